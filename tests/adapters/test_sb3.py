"""Stable-Baselines3: the adapter's contract, its infos, and learning with SB3's own PPO."""

import copy
import pickle

import cloudpickle
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

from games.crew import Crew
from games.painter import Painter
from games.scouts import Scouts
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

import gpu_vecenv
from gpu_vecenv import GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.adapters import sb3
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, InvalidActionError

TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}


def small(name: str) -> dict:
    return TAG if name == "tag_continuous" else {}


@pytest.mark.parametrize("name", GAMES)
def test_steps_are_those_of_the_gymnasium_view(name, device):
    """Row by row: observations, rewards, dones, and what the info of a done row says."""
    env = sb3.make(name, 6, device, **small(name), **({"max_steps": 9} if name != "tag_continuous" else {}))
    twin = GymnasiumVectorEnv(env.env.game, 6, device)
    env.seed(5)
    obs, (expected, _) = env.reset(), twin.reset(seed=5)
    returns, lengths, active = np.zeros(env.num_envs), np.zeros(env.num_envs, int), np.ones(env.num_envs, bool)
    episodes = 0
    for _ in range(40):
        np.testing.assert_array_equal(obs, expected.cpu().numpy())
        actions = twin.sample_actions()
        obs, rewards, dones, infos = env.step(actions.cpu().numpy())
        expected, twin_rewards, terminations, truncations, info = twin.step(actions)
        np.testing.assert_array_equal(rewards, twin_rewards.cpu().numpy())
        assert rewards.flags.writeable  # SB3 adds to rewards in place
        np.testing.assert_array_equal(dones, (terminations | truncations).cpu().numpy())
        returns, lengths = returns + rewards, lengths + 1
        for row, entry in enumerate(infos):
            if not dones[row]:
                assert entry == {} and infos[row] is entry
                continue
            last = info["final_obs"][row].cpu().numpy()
            np.testing.assert_array_equal(entry["terminal_observation"], last)
            assert entry["TimeLimit.truncated"] is bool(truncations[row])
            assert ("episode" in entry) == active[row]
            if active[row]:
                episodes += 1
                assert (entry["episode"]["r"], entry["episode"]["l"]) == (returns[row], lengths[row])
            returns[row], lengths[row] = 0, 0
        active = info["active"].cpu().numpy()
    assert episodes >= 6 * 4


def test_infos_are_a_list_of_dictionaries_of_their_own():
    env = sb3.make("cartpole", 4, "cpu", max_steps=2)
    env.reset()
    assert type(env.reset_infos) is list and env.reset_infos == [{}] * 4
    _, _, _, running = env.step(np.ones(4, np.int64))
    assert type(running) is list and running == [{}] * 4 and len({id(info) for info in running}) == 4
    _, _, dones, infos = env.step(np.ones(4, np.int64))
    assert type(infos) is list and dones.all()
    assert infos + running == [*infos, *running] and infos[1:3] == [infos[1], infos[2]]
    copied, deep, pickled = infos.copy(), copy.deepcopy(infos), pickle.loads(pickle.dumps(infos))
    for twin in (copied, deep, pickled):
        assert type(twin) is list and [info["episode"] for info in twin] == [info["episode"] for info in infos]
    infos[0]["note"], infos[1] = "kept", {"mine": 1}  # wrappers write into them
    assert copied[0] is infos[0] and copied[1] is not infos[1] == {"mine": 1} and "note" not in deep[0]
    assert np.array(infos).shape == (4,)  # reads the list's memory, not its methods
    with pytest.raises(IndexError):
        infos[4]


def test_seeds_repeat_and_attributes_are_found():
    env = sb3.make("cartpole", 3, "cpu")
    rollouts = []
    for _ in range(2):
        env.seed(7)
        rollouts.append([env.reset(), *(env.step(np.ones(3, np.int64))[0] for _ in range(5))])
    for first, second in zip(*rollouts, strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(env.reset(), rollouts[0][0])  # a seed counts once
    assert env.get_attr("num_agents") == [1] * 3 and env.get_attr("render_mode", 1) == [None]
    env.set_attr("note", "kept")
    assert env.get_attr("note", [0, 2]) == ["kept"] * 2
    with pytest.raises(ValueError, match="one environment serves all rows"):
        env.set_attr("note", "other", 1)
    assert [t.tolist() for t in env.env_method("sample_actions", indices=[0])] == [env.env.sample_actions().tolist()]
    assert env.env_is_wrapped(Monitor) == [True] * 3 and env.env_is_wrapped(VecMonitor) == [False] * 3


def test_options_count_for_one_reset_also_if_it_refuses_them():
    env, twin = sb3.make("cartpole", 3, "cpu"), sb3.make("cartpole", 3, "cpu")
    for wrong, error in (
        ({"nothing": 1}, ConfigError),
        ({"reset_mask": np.ones(3, bool)}, ConfigError),
        ([{}, {"low": 1}, {}], ValueError),
    ):
        env.seed(5)
        env.set_options(wrong)
        with pytest.raises(error, match="options"):
            env.reset()
        twin.seed(5)
        np.testing.assert_array_equal(env.reset(), twin.reset())  # the seed was not used up


def test_masks_reach_those_who_ask():
    env = sb3.make(Crew, 5, "cpu")
    env.reset()
    masks = np.stack(env.env_method("action_masks"))
    np.testing.assert_array_equal(masks, env.action_masks())
    assert masks.shape == (15, 8)
    assert VecMonitor(env).has_attr("action_masks")  # how sb3-contrib finds out whether there are masks
    with pytest.raises(AttributeError, match="has no action masks"):
        sb3.make("cartpole", 5, "cpu").env_method("action_masks")
    assert not VecMonitor(sb3.make("cartpole", 5, "cpu")).has_attr("action_masks")
    assert not hasattr(sb3.make("cartpole", 5, "cpu"), "action_masks")


def test_an_action_that_a_mask_forbids_is_refused_with_an_algorithm_that_reads_masks():
    env = sb3.make("connect_four", 2)
    env.reset()
    with pytest.raises(InvalidActionError, match=r"allowed by .*action_mask.*MaskablePPO reads the masks"):
        for _ in range(7):  # a column has six places
            env.step(np.zeros(env.num_envs, np.int64))


@pytest.mark.parametrize("num_scouts", [0, 2])
def test_sb3s_own_vec_env_finds_the_masks_of_single_envs(num_scouts):
    env = DummyVecEnv([lambda: GymnasiumEnv(Scouts, num_scouts=num_scouts)] * 2)
    env.reset()
    assert env.has_attr("action_masks")
    masks = np.stack(env.env_method("action_masks"))
    assert masks.dtype == bool and masks.shape == (2, int(np.sum(getattr(env.action_space, "nvec", 4))))
    assert not DummyVecEnv([lambda: GymnasiumEnv("cartpole")]).has_attr("action_masks")


def test_only_the_right_views_are_wrapped():
    with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.GymnasiumVectorEnv"):
        sb3.wrap(gpu_vecenv.make("cartpole", 2, "cpu"))
    for wrong in ({"output": "torch"}, {"output": "numpy", "autoreset_mode": "next_step"}):
        with pytest.raises(ValueError, match='expected output="numpy" and "same_step"'):
            sb3.wrap(GymnasiumVectorEnv("cartpole", 2, "cpu", **wrong))
    env = sb3.make("pendulum", 2, "cpu")
    env.reset()
    with pytest.raises(InvalidActionError):
        env.step(np.full((2, 1), np.nan, np.float32))


@pytest.mark.slow
def test_sb3s_own_wrappers_work():
    env: VecEnvWrapper = VecMonitor(VecFrameStack(VecNormalize(VecCheckNan(sb3.make("acrobot", 4, "cpu"))), 3))
    model = A2C("MlpPolicy", env, n_steps=8, seed=1, device="cpu").learn(4 * 600)
    assert len(model.ep_info_buffer) >= 4 and model.ep_info_buffer[0]["l"] == 500


@pytest.mark.parametrize("name", [name for name in GAMES if GAMES[name]().num_agents == 1])
def test_sb3s_checker_passes_on_single_envs(name):
    check_env(GymnasiumEnv(name), warn=False)  # its advice on spaces is about choices that Gymnasium's games made


@pytest.mark.exhaustive
@pytest.mark.slow
def test_images_and_continuous_actions_learn_something():
    env = sb3.make(Painter, 8, "cpu", height=8, width=8)
    PPO("MlpPolicy", env, n_steps=8, batch_size=32, seed=1, device="cpu").learn(256)


def test_the_adapter_travels_by_its_arguments():
    twin = cloudpickle.loads(cloudpickle.dumps(sb3.make("cartpole", 3, "cpu").env))
    assert sb3.wrap(twin).reset().shape == (3, 4)


@pytest.mark.slow
def test_ppo_learns_cartpole():
    torch.set_num_threads(1)
    env = sb3.make("cartpole", 64, "cpu")
    model = PPO("MlpPolicy", env, n_steps=64, batch_size=512, n_epochs=8, learning_rate=1e-3, seed=1, device="cpu")
    at_random, _ = evaluate_policy(RandomActions(env), env, 64, warn=False)
    model.learn(60_000)
    trained, _ = evaluate_policy(model, env, 64, warn=False)
    assert trained > 5 * at_random  # about 22 steps at random, of 500 at most


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ppo_learns_tag_gridworld():
    """The runner's fifth of the rows learns as well: judged is the sum over an environment, whose taggers catch it."""
    torch.set_num_threads(1)
    env = sb3.make("tag_gridworld", 64, "cpu", grid=8, max_steps=50, num_taggers=2)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=1024, n_epochs=4, learning_rate=1e-3, seed=1, device="cpu")
    at_random = taggers_return(RandomActions(env), env)
    model.learn(200_000)
    trained = taggers_return(model, env)
    assert trained > at_random + 2  # a catch is worth 10


class RandomActions:
    """SB3's face of a policy: uniform valid actions from the environment itself."""

    def __init__(self, env: sb3.SB3VecEnv) -> None:
        self.env = env

    def predict(self, obs, state=None, episode_start=None, deterministic=False):
        return self.env.env.sample_actions().numpy(), state


def taggers_return(policy, env: sb3.SB3VecEnv) -> float:
    """Mean return of the taggers' rows over the episodes of 200 steps."""
    env.seed(3)
    obs, returns = env.reset(), []
    tagger = np.arange(env.num_envs) % env.env.num_agents < env.env.num_agents - 1
    for _ in range(200):
        obs, _, dones, infos = env.step(policy.predict(obs, deterministic=False)[0])
        returns += [infos[row]["episode"]["r"] for row in np.flatnonzero(dones & tagger)]
    return float(np.mean(returns))


def test_another_librarys_name_of_an_argument_is_refused_with_its_name_here():
    with pytest.raises(TypeError, match=r"make\(\) has no argument 'n_envs' \(= 4\); nearest: num_envs$"):
        sb3.make("cartpole", n_envs=4)


def test_a_seed_is_given_after_make():
    with pytest.raises(
        ConfigError, match=r"seed is 3, .* make: call env\.seed\(…\) before env\.reset\(\), or .* PPO\("
    ):
        sb3.make("cartpole", num_envs=4, seed=3)
