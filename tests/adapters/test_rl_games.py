"""rl_games: the adapter's contract, what rl_games' own PPO and players make of it, and learning."""

import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("rl_games", reason="rl-games is not installed")

from games.crew import Crew
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Discrete, MultiDiscrete
from rl_games.common.algo_observer import DefaultAlgoObserver
from rl_games.torch_runner import Runner
from support.adapter_contract import Recorder, TerminatesAndTruncates, run_example_here
from support.synchronisation import no_synchronisation

from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import rl_games
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, UnsupportedGameError
from gpu_vecenv.wrappers import ClipAction

TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
ROLES = {"num_leads": 2, "num_others": 2, "leave": 2}
MLP = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
GAUSS = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}, "fixed_sigma": True}
GAUSS |= {"sigma_init": {"name": "const_initializer", "val": -0.5}}
MODELS = {
    "discrete": ("a2c_discrete", "discrete_a2c", {"discrete": None}),
    "multi_discrete": ("a2c_discrete", "multi_discrete_a2c", {"multi_discrete": None}),
    "continuous": ("a2c_continuous", "continuous_a2c_logstd", {"continuous": GAUSS}),
}
PPO = {"name": "test", "env_name": "gpu_vecenv", "num_actors": 8, "horizon_length": 16, "max_epochs": 2}
PPO |= {"normalize_input": True, "normalize_value": True, "normalize_advantage": True, "reward_shaper": {}}
PPO |= {"gamma": 0.99, "tau": 0.95, "learning_rate": 1e-3, "lr_schedule": None, "e_clip": 0.2, "clip_value": True}
PPO |= {"mini_epochs": 4, "critic_coef": 1, "entropy_coef": 0.0, "bounds_loss_coef": 1e-4, "grad_norm": 1.0}
PPO |= {"truncate_grads": True, "torch_compile": False, "print_stats": False, "games_to_track": 100_000}


def runner_of(folder, env_config, kind="discrete", seed=1, central_value=False, device="cpu", **config):
    """rl_games' Runner, loaded, and its observer, which knows the agent once it trains."""
    rl_games.register()
    torch.set_num_threads(1)
    algo, model, space = MODELS[kind]
    config = PPO | {"device": device, "device_name": device, "train_dir": str(folder), "minibatch_size": 128} | config
    config["env_config"] = {"device": device, **env_config}
    if central_value:
        names = ("minibatch_size", "mini_epochs", "learning_rate", "clip_value", "truncate_grads", "grad_norm")
        config["central_value_config"] = {name: config[name] for name in names} | {"normalize_input": True}
        config["central_value_config"]["network"] = {"name": "actor_critic", "central_value": True, "mlp": MLP}
    network = {"name": "actor_critic", "separate": not central_value, "space": space, "mlp": MLP}
    params = {"seed": seed, "torch_threads": 1, "algo": {"name": algo}, "model": {"name": model}, "network": network}
    runner = Runner(observer := DefaultAlgoObserver())
    runner.load({"params": params | {"config": config}})
    return runner, observer


def train(folder, env_config, kind="discrete", **config):
    """rl_games' agent after training."""
    runner, observer = runner_of(folder, env_config, kind, **config)
    runner.run({"train": True})
    return observer.algo


def faults(env: rl_games.RLGamesVecEnv) -> int:
    return int(env.gymnasium_env.vec_env.faults().ne(0).sum())


# Of economy, the heads with masks have different sizes, which rl_games does not support: see below.
@pytest.mark.parametrize("name", [*(name for name in GAMES if name != "economy"), "script"])
def test_steps_are_those_of_the_gymnasium_view(name, device):
    """Row by row, in rl_games' words; the state of an environment is its rows."""
    config = TAG if name == "tag_continuous" else {"max_steps": 9}
    game = Script(**ROLES) if name == "script" else name
    env = rl_games.make(game, 6, device, seed=5, **({} if name == "script" else config))
    twin = GymnasiumVectorEnv(env.gymnasium_env.game, 6, device)
    named, (expected, _) = env.reset(), twin.reset(seed=5)
    info, ends = env.get_env_info(), 0
    assert info["agents"] == env.get_number_of_agents() == twin.num_agents and info["value_size"] == 1
    assert info["observation_space"] == twin.single_observation_space
    for _ in range(30):
        assert set(named) == {"obs", "states"}
        assert torch.equal(named["obs"], expected)
        assert named["states"].shape == (6, *info["state_space"].shape)
        assert torch.equal(named["states"].reshape(expected.shape), expected)
        assert info["state_space"].contains(named["states"][0].cpu().numpy())
        actions = twin.sample_actions()
        named, rewards, dones, infos = env.step(actions if actions.is_floating_point() else actions.long())
        expected, twin_rewards, terminations, truncations, _ = twin.step(actions)
        assert torch.equal(rewards, twin_rewards) and rewards.dtype == torch.float32
        assert torch.equal(dones, terminations | truncations) and dones.dtype == torch.bool
        assert list(infos) == ["time_outs"] and torch.equal(infos["time_outs"], truncations)
        ends += int(dones.sum())
    assert ends >= 6 and faults(env) == 0


@pytest.mark.parametrize(
    ("config", "agents"), [({}, 1), ({"num_leads": 3}, 3), (ROLES, 4), ({"continuous": True}, 1)], ids=str
)
def test_rollouts_of_rl_games_are_what_the_script_says(tmp_path, device, config, agents):
    """Rewards, ends and bootstraps in the buffer of rl_games' agent; an agent that left is a row of zeros."""
    kind = "continuous" if "continuous" in config else "discrete"
    env_config = {"game": Script(**config)}
    epochs = {"max_epochs": 1, "horizon_length": 32, "normalize_value": False, "minibatch_size": 256 * agents}
    agent = train(tmp_path, env_config, kind, device=device, **epochs)
    buffer = agent.experience_buffer.tensor_dict
    number, steps, last, truncates = (column.round().long() for column in buffer["obses"].unbind(-1)[:4])
    rows = torch.arange(8 * agents, device=device) % agents
    assert torch.equal(number, torch.where(number == 0, 0, rows + 1))
    gone = number == 0
    assert bool(gone.any()) == ("leave" in config)
    ends, next_tick = steps + 1 == last, steps + 1
    leaves = (next_tick == config.get("leave")) & ~ends & (rows >= config.get("num_leads", 1)) & ~gone
    time_outs = (ends & (truncates == 1) & ~gone).float().unsqueeze(-1)
    rewards = torch.where(gone, 0, 10 * (rows + 1) + next_tick).float().unsqueeze(-1)
    assert torch.equal(buffer["rewards"], rewards + agent.gamma * buffer["values"] * time_outs)
    assert time_outs.any() and not time_outs.all()
    # The environment's first row is always there, and ends where its environment does; so do rows of zeros.
    over = ends.unflatten(1, (8, agents))[..., :1].expand(-1, -1, agents).flatten(1)
    dones = torch.cat([buffer["dones"][1:].bool(), agent.dones.unsqueeze(0)])
    assert torch.equal(dones, over | leaves)
    assert faults(agent.vec_env) == 0


def test_rl_games_counts_the_episodes_of_first_agents(tmp_path):
    agent = train(tmp_path, {"game": Script(num_leads=3)}, minibatch_size=384)
    sums = agent.vec_env.gymnasium_env.vec_env.episode_statistics()
    episodes = int(sums["episodes"].sum())
    assert agent.game_rewards.current_size == episodes > 20
    # rl_games averages float32 step by step.
    assert agent.game_rewards.get_mean()[0] == pytest.approx(float(sums["returns"][:, 0].sum()) / episodes, rel=1e-5)
    assert agent.game_lengths.get_mean() == pytest.approx(int(sums["lengths"].sum()) / episodes, rel=1e-5)


def test_bounds_that_are_none_are_refused():
    with pytest.raises(ValueError, match="expected finite bounds"):
        rl_games.wrap(ClipAction(GymnasiumVectorEnv("pendulum", 2, "cpu")))


def test_seeds_count_once_and_come_with_the_config(tmp_path):
    env = rl_games.make("cartpole", 3, "cpu")
    first = []
    for _ in range(2):
        env.seed(7)
        first.append(env.reset()["obs"])
    assert torch.equal(*first) and not torch.equal(env.reset()["obs"], first[0])
    assert torch.equal(rl_games.make("cartpole", 3, "cpu", seed=7).reset()["obs"], first[0])
    agent = train(tmp_path, {"game": "cartpole"}, seed=11, max_epochs=1)  # Runner hands its seed to env_config
    assert agent.vec_env.gymnasium_env.vec_env.seed == 11


def test_checkpoints_hold_the_random_streams(tmp_path):
    agent = train(tmp_path, {"game": "cartpole"}, max_epochs=1)
    agent.save(str(tmp_path / "saved"))
    expected = agent.env_reset()["obs"]
    other = train(tmp_path, {"game": "cartpole"}, max_epochs=1, seed=2)
    other.vec_env.seed(3)
    other.restore(str(tmp_path / "saved.pth"))
    assert torch.equal(other.env_reset()["obs"], expected)
    env = rl_games.make("cartpole", 2, "cpu", seed=3)
    with pytest.warns(UserWarning, match="the checkpoint has the state of 8 environments, expected 2: not loaded"):
        env.set_env_state(agent.vec_env.get_env_state())
    env.set_env_state(None)  # of a checkpoint without
    assert torch.equal(env.reset()["obs"], rl_games.make("cartpole", 2, "cpu", seed=3).reset()["obs"])
    with pytest.raises(ValueError, match="expected"):
        rl_games.make("pendulum", 8, "cpu").set_env_state(agent.vec_env.get_env_state())


@pytest.mark.parametrize("num_envs", [1, 8])
@pytest.mark.parametrize(
    ("game", "kind", "config"),
    [
        ("cartpole", "discrete", {}),
        ("pendulum", "continuous", {}),
        (Scouts, "discrete", {"use_action_masks": True, "normalize_input": False}),
        (Script, "discrete", {}),
    ],
)
def test_rl_games_players_play(tmp_path, capsys, game, kind, config, num_envs):
    """One env, whose actions they squeeze, and several, by way of both of rl_games' ways to make environments."""
    runner, observer = runner_of(tmp_path, {"game": game, "num_envs": num_envs}, kind, **minibatch(game), **config)
    runner.run({"train": True})
    observer.algo.save(str(tmp_path / "saved"))
    for use_vecenv in (False, True):
        runner.params["config"]["player"] = {"games_num": 10, "use_vecenv": use_vecenv, "deterministic": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.run({"train": False, "play": True, "checkpoint": str(tmp_path / "saved.pth")})
        environments = 8 if use_vecenv else num_envs
        assert any("not loaded" in str(warning.message) for warning in caught) == (environments != 8)
    assert capsys.readouterr().out.count("av reward:") == 2


def minibatch(game) -> dict:
    return {"minibatch_size": 128 * (game().num_agents if isinstance(game, type) else 1)}


class EvenCrew(Crew):
    """Actions of two numbers with equally many choices: masks that rl_games can cut."""

    source: ClassVar = Path(__file__).parents[1] / "games" / "crew.cu"
    action_space: ClassVar = {"driver": MultiDiscrete([5]), "helper": MultiDiscrete([5, 5])}


@pytest.mark.parametrize(("game", "kind"), [(Scouts, "discrete"), (EvenCrew, "multi_discrete")])
def test_masked_choices_are_not_made(tmp_path, device, game, kind):
    config = {"use_action_masks": True, "normalize_input": False, "device": device, **minibatch(game)}
    agent = train(tmp_path, {"game": game}, kind, **config)
    env = agent.vec_env
    assert faults(env) == 0 and env.has_action_masks()
    masks = env.get_action_masks()
    assert masks.dtype == bool and not masks.all()
    np.testing.assert_array_equal(masks, env.gymnasium_env.action_masks().cpu().numpy())


def test_configs_that_would_go_wrong_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="use_action_masks is False in rl_games' config; expected True"):
        train(tmp_path, {"game": Scouts}, minibatch_size=384, normalize_input=False)
    with pytest.raises(
        UnsupportedGameError, match=r"of the first agents; the game has roles .* that support it: benchmarl"
    ):
        train(tmp_path, {"game": "tag_gridworld", "num_taggers": 1}, central_value=True)
    with pytest.raises(UnsupportedGameError, match=r"into equal parts; the game masks heads of sizes \[5, 3\]"):
        rl_games.make(Crew, 2, "cpu")
    with pytest.raises(UnsupportedGameError, match="not support roles with actions of their own"):
        rl_games.make(Script, 2, "cpu", num_others=1, choices_of_others=2)


def test_only_the_right_views_are_wrapped():
    for wrong in ({"output": "numpy"}, {"autoreset_mode": "next_step"}):
        with pytest.raises(ValueError, match='expected output="torch" and "same_step"'):
            rl_games.wrap(GymnasiumVectorEnv("cartpole", 2, "cpu", **wrong))
    env = rl_games.make("cartpole", 2, "cpu")
    env.reset()
    with pytest.raises(RuntimeError, match="shape"):
        env.step(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("clip_actions", [True, False])
def test_box_actions_never_leave_their_bounds(tmp_path, device, clip_actions):
    """With sigma 3 most are outside; rl_games' own scaling to bounds that are not symmetric may miss them by an ulp."""
    env = rl_games.make(Painter, 4, device, seed=1)
    twin = GymnasiumVectorEnv(Painter, 4, device)
    env.reset(), twin.reset(seed=1)
    wild = torch.tensor([[-9.0, 9.0], [0.5, -1.0], [2.0, 1.0], [-0.5, 0.5]], device=device)
    tame = torch.tensor([[-1.0, 3.0], [0.5, 0.0], [1.0, 1.0], [-0.5, 0.5]], device=device)
    assert torch.equal(env.step(wild)[0]["obs"], twin.step(tame)[0])
    wide = {**GAUSS, "sigma_init": {"name": "const_initializer", "val": 1.1}}
    MODELS["wide"] = ("a2c_continuous", "continuous_a2c_logstd", {"continuous": wide})
    config = {"clip_actions": clip_actions, "max_epochs": 1, "device": device, "minibatch_size": 128}
    agent = train(tmp_path, {"game": "pendulum"}, "wide", **config)
    assert faults(agent.vec_env) == 0


def test_several_choices_are_a_tuple(tmp_path):
    env = rl_games.make("tag_continuous", 2, "cpu", **TAG)
    sizes = env.gymnasium_env.single_action_space.nvec.tolist()
    assert list(env.get_env_info()["action_space"]) == [Discrete(n) for n in sizes]
    agent = train(tmp_path, {"game": "tag_continuous", **TAG}, "multi_discrete", minibatch_size=640)
    assert agent.game_rewards.current_size > 0 and faults(agent.vec_env) == 0


def test_what_terminates_is_not_bootstrapped():
    env = rl_games.wrap(TerminatesAndTruncates(GymnasiumVectorEnv("cartpole", 4, "cpu")))
    env.reset()
    *_, dones, infos = env.step(env.gymnasium_env.sample_actions())
    assert dones.all() and not infos["time_outs"].any()


@pytest.mark.parametrize("game", ["cartpole", "simple_spread"])
def test_nothing_is_copied(game, device):
    kept = Recorder(GymnasiumVectorEnv(game, 4, device))
    env = rl_games.wrap(kept)
    env.reset()
    actions = kept.env.sample_actions().long()
    named, rewards, *_ = env.step(actions)
    assert kept.actions.data_ptr() == actions.data_ptr()
    assert named["obs"].data_ptr() == named["states"].data_ptr() == kept.outputs[0].data_ptr()
    assert rewards is kept.outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("game", ["cartpole", "pendulum", "simple_spread"])
def test_no_step_waits_for_the_device(game):
    env = rl_games.make(game, 64, "cuda")
    env.reset()
    with no_synchronisation():
        for _ in range(100):
            env.step(env.gymnasium_env.sample_actions())


def returns(env: rl_games.RLGamesVecEnv, act, steps: int) -> float:
    """Mean return of all agents, over the episodes that end within these steps."""
    engine = env.gymnasium_env.vec_env
    env.seed(3)
    named = env.reset()
    engine.clear_episode_statistics()
    for _ in range(steps):
        named, *_ = env.step(act(named))
    sums = engine.episode_statistics()
    return float((sums["returns"].sum(0) / sums["episodes"].sum()).mean())


SPREAD = {"minibatch_size": 400, "horizon_length": 25, "max_epochs": 60, "learning_rate": 3e-3, "central_value": True}
PENDULUM = {"minibatch_size": 1024, "horizon_length": 64, "max_epochs": 40, "mini_epochs": 8}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_config", "kind", "config", "margin"),
    [
        # At random about -41, after training about -30, of 25 steps.
        ({"game": "simple_spread", "num_agents": 2, "local_ratio": 0.0}, "discrete", SPREAD, 5),
        # At random about -1,260, after training about -220, of 200 steps.
        ({"game": "pendulum"}, "continuous", PENDULUM, 400),
    ],
    ids=["central value", "continuous"],
)
def test_ppo_learns(tmp_path, env_config, kind, config, margin):
    agent = train(tmp_path, env_config, kind, num_actors=64, **config)
    env = agent.vec_env
    at_random = returns(env, lambda named: env.gymnasium_env.sample_actions(), 400)
    trained = returns(env, lambda named: agent.preprocess_actions(agent.get_action_values(named)["actions"]), 400)
    assert trained > at_random + margin
    assert faults(env) == 0


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    pattern = r"return at random (\d+), of the last 100 episodes (\d+)"
    at_random, trained = run_example_here("rl_games_ppo.py", pattern, tmp_path)
    assert trained > 4 * at_random  # about 22 steps at random, about 200 after 51,200 steps
