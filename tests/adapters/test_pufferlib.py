"""PufferLib: the adapter's contract, PufferLib's own vectorisation around it, and its learner."""

import signal

import numpy as np
import pytest
import torch

pytest.importorskip("pufferlib", reason="pufferlib-core is not installed")

import pufferlib.models
import pufferlib.vector
from games.crew import Crew
from games.painter import Painter
from games.script import Script
from pufferlib import pufferl
from support.actions import UNMASKED
from support.adapter_contract import run_example

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import pufferlib as adapter
from gpu_vecenv.errors import ResetNeededError, UnsupportedGameError
from gpu_vecenv.wrappers import ClipReward

ARRAYS = ("observations", "rewards", "terminals", "truncations", "masks")
TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
LEAVE = {"num_leads": 2, "num_others": 2, "leave": 2}
PPO = {
    "seed": 1,
    "device": "cpu",
    "torch_deterministic": True,
    "cpu_offload": False,
    "use_rnn": False,
    "compile": False,
}
PPO |= {"bptt_horizon": 32, "batch_size": "auto", "minibatch_size": 512, "max_minibatch_size": 512, "update_epochs": 8}
PPO |= {"optimizer": "adam", "learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
PPO |= {"anneal_lr": False, "precision": "float32", "gamma": 0.99, "gae_lambda": 0.95, "clip_coef": 0.2}
PPO |= {
    "vf_coef": 0.5,
    "vf_clip_coef": 10.0,
    "ent_coef": 0.0,
    "max_grad_norm": 0.5,
    "prio_alpha": 0.0,
    "prio_beta0": 1.0,
}
PPO |= {"vtrace_rho_clip": 1.0, "vtrace_c_clip": 1.0, "checkpoint_interval": 10_000, "env": "test"}


@pytest.fixture
def learner():
    """Makes PufferLib's learner; ends the thread that it starts."""
    made = []

    def make(env, folder, **config) -> pufferl.PuffeRL:
        torch.manual_seed(1)
        policy = pufferlib.models.Default(env, hidden_size=64)
        config = PPO | {"total_timesteps": 100_000, "data_dir": str(folder)} | config
        made.append(pufferl.PuffeRL(config, env, policy))
        return made[-1]

    yield make
    for trainer in made:
        trainer.utilization.stop()


def copies(env) -> list[np.ndarray]:
    return [getattr(env, name).copy() for name in ARRAYS]


@pytest.mark.parametrize("name", [*UNMASKED, "painter", "script"])
def test_steps_are_those_of_the_gymnasium_view(name, device):
    """Row by row, in PufferLib's own arrays; infos have the return and length of each agent whose episode ended."""
    config = {"tag_continuous": TAG, "painter": {}, "script": LEAVE}.get(name, {"max_steps": 9})
    env = adapter.make({"painter": Painter, "script": Script}.get(name, name), 6, device, seed=5, **config)
    twin = GymnasiumVectorEnv(env.env.game, 6, device)
    held = [getattr(env, array) for array in ARRAYS]
    (first, infos), (expected, info) = env.reset(), twin.reset(seed=5)
    assert first is env.observations and infos == []
    assert env.num_agents == env.agents_per_batch == twin.num_envs and env.driver_env is env and not env.emulated
    returns, lengths, episodes = np.zeros(env.num_agents), np.zeros(env.num_agents, int), 0
    for _ in range(40):
        assert env.observations.dtype == env.single_observation_space.dtype
        np.testing.assert_array_equal(env.observations, expected.cpu().numpy())
        actions, acted = twin.sample_actions(), info["active"]
        *written, infos = env.step(actions.cpu().numpy())
        expected, *outputs, info = twin.step(actions)
        rewards, terminations, truncations = (tensor.cpu().numpy() for tensor in outputs)
        assert all(mine is array for mine, array in zip([*written, env.masks], held, strict=True))
        for mine, wanted in zip(written[1:], (rewards, terminations | truncations, truncations), strict=True):
            np.testing.assert_array_equal(mine, wanted)
        np.testing.assert_array_equal(env.masks, (acted | info["active"]).cpu().numpy())
        returns, lengths = returns + rewards, lengths + 1
        over, ended = terminations | truncations, (terminations | truncations) & acted.cpu().numpy()
        lists = {"episode_return": returns[ended].tolist(), "episode_length": lengths[ended].tolist()}
        assert infos == ([lists] if ended.any() else [])
        episodes += int(ended.sum())
        returns[over] = lengths[over] = 0
    assert episodes >= 6 and not env.env.vec_env.faults().any()


def test_agents_that_left_are_masked(device):
    """Script: others terminate at their second step; leads end with the environment."""
    env = adapter.make(Script, 8, device, seed=2, **LEAVE)
    env.reset()
    assert env.masks.all()
    seen = []
    for _ in range(30):
        before = env.observations.copy()
        _, _, terminals, _, infos = env.step(np.zeros(env.num_agents, np.int32))
        steps, ends = before[:, 1] + 1, before[:, 2]
        gone = before[:, 0] == 0
        over = (steps == ends).reshape(8, 4)[:, :1].repeat(4, 1).reshape(-1)
        np.testing.assert_array_equal(env.masks, ~gone | over)
        leaves = ~gone & ~over & (np.arange(32) % 4 >= 2) & (steps == 2)
        np.testing.assert_array_equal(terminals, over | leaves)
        lengths = [length for info in infos for length in info["episode_length"]]
        assert lengths == steps[terminals & ~gone].tolist()
        seen += [gone.any(), leaves.any(), bool(lengths)]
    assert any(seen[::3]) and any(seen[1::3]) and any(seen[2::3])


def trajectory(env, steps: int = 12) -> list[np.ndarray]:
    """Everything that PufferLib's send and recv give, with the same actions each time."""
    env.async_reset(7)
    found, rng = [], np.random.default_rng(3)
    for _ in range(steps):
        obs, rewards, terminals, truncations, *_, masks = env.recv()
        found += [array.copy() for array in (obs, rewards, terminals, truncations, masks)]
        env.send(rng.integers(0, 4, len(obs), dtype=np.int32))
    env.recv()
    return found


@pytest.mark.parametrize("backend", ["Serial", pytest.param("Multiprocessing", marks=pytest.mark.slow)])
def test_pufferlib_s_vectors_hand_it_their_own_arrays(backend):
    """Two instances, here or in processes of their own, give what each gives alone with its seed."""
    options = {"num_workers": 2, "batch_size": 2, "overwork": True} if backend == "Multiprocessing" else {}
    vector = pufferlib.vector.make(
        adapter.make, env_args=[Script, 3, "cpu"], env_kwargs=LEAVE, backend=backend, num_envs=2, **options
    )
    if backend == "Serial":
        assert all(
            np.shares_memory(getattr(env, name), getattr(vector, name)) for env in vector.envs for name in ARRAYS
        )
    signal.alarm(120)  # PufferLib waits for ever for a process that has died
    try:
        found = trajectory(vector)
    finally:
        signal.alarm(0)
        vector.close()
    alone = [adapter.make(Script, 3, "cpu", seed=9, **LEAVE) for _ in range(2)]
    for i, env in enumerate(alone):
        env.reset(seed=7 + i)
    rng = np.random.default_rng(3)
    for step in range(12):
        expected = [np.concatenate(arrays) for arrays in zip(*map(copies, alone), strict=True)]
        for mine, wanted in zip(found[5 * step : 5 * step + 5], expected, strict=True):
            np.testing.assert_array_equal(mine, wanted)
        actions = rng.integers(0, 4, 24, dtype=np.int32)
        alone[0].step(actions[:12]), alone[1].step(actions[12:])


def test_the_seed_of_the_constructor_counts_for_the_first_reset():
    env, twin = adapter.make("cartpole", 3, "cpu", seed=5), GymnasiumVectorEnv("cartpole", 3, "cpu")
    for seed in (5, None, 6):  # then the next episodes, then a seed of reset's own
        expected, _ = twin.reset(seed=seed)
        np.testing.assert_array_equal(env.reset(seed=None if seed == 5 else seed)[0], expected.numpy())
    given = adapter.make("cartpole", 3, "cpu", seed=5)
    np.testing.assert_array_equal(given.reset(seed=6)[0], expected.numpy())


def test_a_refused_call_changes_nothing():
    env = adapter.make("cartpole", 3, "cpu")
    with pytest.raises(ResetNeededError):
        env.step(np.zeros(3, np.int64))
    env.reset(seed=1)
    env.step(np.ones(3, np.int64))
    before = copies(env)
    for wrong in (np.zeros(4, np.int64), np.zeros((3, 2), np.int64)):
        with pytest.raises(ValueError, match="actions"):
            env.step(wrong)
    with pytest.raises(ValueError, match="seed"):
        env.reset(seed=-1)
    for mine, wanted in zip(copies(env), before, strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_episodes_that_a_fault_ended_are_not_logged():
    env = adapter.make("cartpole", 3, "cpu", max_steps=2)
    env.reset(seed=1)
    env.step(np.ones(3, np.int64))
    _, rewards, terminals, truncations, infos = env.step(np.array([1, 9, 1]))
    assert np.isnan(rewards).tolist() == [False, True, False] and terminals.all() and truncations.all()
    assert infos == [{"episode_return": [2.0, 2.0], "episode_length": [2, 2]}]
    env.step(np.ones(3, np.int64))
    assert env.step(np.ones(3, np.int64))[-1] == [{"episode_return": [2.0] * 3, "episode_length": [2] * 3}]


def test_only_the_right_views_are_wrapped():
    for wrong in ({"output": "numpy"}, {"autoreset_mode": "next_step"}):
        with pytest.raises(ValueError, match='expected output="torch" and "same_step"'):
            adapter.wrap(GymnasiumVectorEnv("cartpole", 2, "cpu", **wrong))
    with pytest.raises(UnsupportedGameError, match="PufferLib does not support action masks"):
        adapter.make(Crew, 2, "cpu")
    env = adapter.wrap(ClipReward(GymnasiumVectorEnv("cartpole", 2, "cpu"), 0.0, 0.5), seed=1)
    env.reset()
    assert env.step(np.ones(2, np.int64))[1].tolist() == [0.5, 0.5]


def test_a_frame_is_that_of_the_first_environment():
    pytest.importorskip("pygame", reason="pygame is not installed")
    env = adapter.make("cartpole", 2, "cpu", render_mode="rgb_array")
    env.reset(seed=1)
    np.testing.assert_array_equal(env.render(), env.env.render()[0])
    assert adapter.make("cartpole", 2, "cpu").render() is None


def test_rollouts_of_the_learner_are_what_the_script_says(learner, tmp_path):
    """Row l of its storage: an observation, the terminal flag before it, and the action after it."""
    env = adapter.make(Script, 32, "cpu", **LEAVE)
    trainer = learner(env, tmp_path)
    stats = trainer.evaluate()
    number, steps, last, _, mark, said = trainer.observations.unbind(-1)
    rows = torch.arange(128) % 4
    gone = number == 0
    assert torch.equal(number, torch.where(gone, 0, (rows + 1.0)[:, None]))
    over = (steps + 1 == last).unflatten(0, (32, 4))[:, :1].expand(-1, 4, -1).flatten(0, 1)
    leaves = ~gone & ~over & (rows >= 2)[:, None] & (steps == 1)
    assert torch.equal(trainer.terminals[:, 1:].bool(), (over | leaves)[:, :-1])
    same = (~gone & ~over & ~leaves)[:, :-1]
    assert torch.equal(said[:, 1:][same], trainer.actions[:, :-1][same].float()) and said.max() == 3
    assert torch.equal(mark[:, 1:][same], mark[:, :-1][same])
    assert torch.equal(trainer.rewards[:, 1:], (~gone)[:, :-1].float())  # which it clips to 1
    ended = (over | leaves) & ~gone
    assert sorted(stats["episode_length"]) == sorted((steps + 1)[:, :-1][ended[:, :-1]].tolist())
    assert trainer.global_step == int((~gone).sum() + (gone[:, 1:] & ~gone[:, :-1]).sum())  # masks


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    if not pufferl._C_AVAILABLE:
        pytest.skip("pufferlib's extension, which its learner needs, does not load with this torch")
    pattern = r"return at random (\d+), of the last rollouts (\d+)"
    at_random, trained = run_example("pufferlib_ppo.py", pattern, tmp_path)
    assert trained > 4 * at_random  # about 20 steps at random, about 130 after 100,000 steps
