"""SuperSuit on the NumPy view of one environment, by hand and by the adapter, and the adapter's wrappers on the device.

SuperSuit's wrappers work, and its vector of copies is our Gymnasium view: it is what the native wrappers are held to.

SuperSuit seeds copy k with seed + k, where the Gymnasium view has one seed for all envs. So the rows of a copy are
those of a Gymnasium view of one environment with that seed, over any number of episodes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("supersuit", reason="supersuit is not installed")

import supersuit
from games.crew import Crew
from games.economy import OpenEconomy
from games.painter import Painter
from games.script import Script
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import VectorWrapper
from pettingzoo.test import api_test, parallel_api_test
from support.adapter_contract import run_example_here
from support.bitwise import equal_bits
from support.synchronisation import no_synchronisation

import gpu_vecenv
from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import supersuit as ours
from gpu_vecenv.errors import UnsupportedGameError
from gpu_vecenv.views.pettingzoo_env import aec_env, parallel_env

# Few agents, so that they leave early and environments end often.
TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
GRID = {"grid": 4, "max_steps": 7, "random_start": True}
TOGETHER = [
    ("tag_gridworld", GRID),
    ("simple_spread", {}),
    ("simple_spread", {"continuous_actions": True}),
    (Painter, {}),
]
SEED = 5


def one(game, **config):
    return parallel_env(game, "cpu", output="numpy", **config)


def rows_of_actions(view, generator) -> np.ndarray:
    space = view.single_action_space
    space.seed(int(generator.integers(2**31)))
    return np.stack([space.sample() for _ in range(view.num_envs)])


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(("game", "config"), TOGETHER)
def test_its_vector_env_is_the_gymnasium_view(game, config, copies):
    vector = supersuit.concat_vec_envs_v1(supersuit.pettingzoo_env_to_vec_env_v1(one(game, **config)), copies)
    natives = [GymnasiumVectorEnv(game, 1, "cpu", output="numpy", **config) for _ in range(copies)]
    agents, generator = natives[0].num_envs, np.random.default_rng(1)
    assert vector.num_envs == copies * agents
    assert vector.observation_space == natives[0].single_observation_space
    assert vector.action_space == natives[0].single_action_space
    obs, _ = vector.reset(seed=SEED)
    assert equal_bits(obs, np.concatenate([env.reset(seed=SEED + k)[0] for k, env in enumerate(natives)]))
    ends = 0
    for _ in range(60):
        actions = [rows_of_actions(env, generator) for env in natives]
        results = [env.step(part) for env, part in zip(natives, actions, strict=True)]
        obs, rewards, terminations, truncations, infos = vector.step(np.concatenate(actions))
        expected = [np.concatenate([result[k] for result in results]) for k in range(4)]
        assert equal_bits(obs, expected[0]) and equal_bits(rewards, expected[1])
        assert np.array_equal(terminations, expected[2]) and np.array_equal(truncations, expected[3])
        ended = np.concatenate([result[4]["_final_obs"] for result in results])
        final = np.concatenate([result[4]["final_obs"] for result in results])
        assert ["terminal_observation" in info for info in infos] == ended.tolist()
        assert all(equal_bits(infos[row]["terminal_observation"], final[row]) for row in ended.nonzero()[0])
        ends += ended.any()
    assert ends


def test_agents_that_leave_early_need_black_death():
    vector, generator = supersuit.pettingzoo_env_to_vec_env_v1(one("tag_continuous", **TAG)), np.random.default_rng(2)
    with pytest.raises(AssertionError, match=r"agent death|varying numbers of active agents"):
        for seed in range(4):
            vector.reset(seed=seed)
            for _ in range(12):
                vector.step(generator.integers(0, 21, (5, 2)))


def test_black_death_gives_the_rows_of_the_gymnasium_view_until_the_last_step():
    env = supersuit.black_death_v3(one("tag_continuous", **TAG))
    vector = supersuit.pettingzoo_env_to_vec_env_v1(env)
    native = GymnasiumVectorEnv("tag_continuous", 1, "cpu", output="numpy", autoreset_mode="disabled", **TAG)
    generator, early = np.random.default_rng(2), 0
    for seed in range(4):
        obs, (expected, info) = vector.reset(seed=seed)[0], native.reset(seed=seed)
        assert equal_bits(obs, expected)
        while info["active"].any():
            actions, live = rows_of_actions(native, generator), info["active"]
            obs, rewards, terminations, truncations, _ = vector.step(actions)
            expected, expected_rewards, *_, info = native.step(actions)
            assert equal_bits(obs, expected) and equal_bits(rewards, expected_rewards)
            assert not obs[~live].any() and not rewards[~live].any()
            assert not terminations.any() and not truncations.any()  # black death tells nobody's end by itself
            early += not live.all()
        # Nobody is left; it steps without actions once more before it sees that the episode is over.
        *_, terminations, truncations, infos = vector.step(actions)
        assert terminations.all() and truncations.all()
        assert all(not info["terminal_observation"].any() for info in infos)
    assert early


def indicated(agent, obs, history):
    return np.concatenate([obs, np.float32([agent.startswith("tagger"), agent.startswith("runner")])])


def stacked(agent, obs, history):
    return np.concatenate([np.zeros_like(obs)] * 3 + history)[-4 * len(obs) :]


def delayed(agent, obs, history):
    return history[-2] if len(history) > 1 else np.zeros_like(obs)


WRAPPERS = [
    (lambda env: supersuit.flatten_v0(env), Painter, {}, lambda agent, obs, history: obs.ravel()),
    (lambda env: supersuit.reshape_v0(env, (20, 3)), Painter, {}, lambda agent, obs, history: obs.reshape(20, 3)),
    (lambda env: supersuit.color_reduction_v0(env, "G"), Painter, {}, lambda agent, obs, history: obs[:, :, 1]),
    (lambda env: supersuit.dtype_v0(env, np.float16), Painter, {}, lambda agent, obs, history: obs.astype(np.float16)),
    (lambda env: supersuit.dtype_v0(env, np.float64), "tag_continuous", TAG, lambda a, obs, h: obs.astype(np.float64)),
    (lambda env: supersuit.agent_indicator_v0(env, type_only=True), "tag_continuous", TAG, indicated),
    (lambda env: supersuit.frame_stack_v1(env, 4), "tag_gridworld", GRID, stacked),
    (lambda env: supersuit.delay_observations_v0(env, 1), "tag_gridworld", GRID, delayed),
    (lambda env: supersuit.max_observation_v0(env, 2), "tag_gridworld", GRID, lambda a, obs, h: np.max(h[-2:], 0)),
    (lambda env: supersuit.clip_actions_v0(env), Painter, {}, lambda agent, obs, history: obs),
    (lambda env: supersuit.nan_noop_v0(env, 0), "tag_gridworld", GRID, lambda agent, obs, history: obs),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "game", "config", "expected"), WRAPPERS)
def test_a_wrapper_sees_the_observations_of_the_env(wrap, game, config, expected):
    env, twin = wrap(one(game, **config)), one(game, **config)
    observations, own = env.reset(seed=SEED)[0], twin.reset(seed=SEED)[0]
    history = {agent: [obs] for agent, obs in own.items()}
    while True:
        assert set(observations) == set(own)
        for agent, obs in own.items():
            given, wanted = np.asarray(observations[agent]), expected(agent, obs, history[agent])
            assert equal_bits(given, wanted)
            assert env.observation_space(agent).contains(given)
        if not twin.agents:
            break
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        observations, *others, _ = env.step(actions)
        own, *expected_others, _ = twin.step(actions)
        assert others == expected_others
        for agent, obs in own.items():
            history[agent].append(obs)


def test_bounds_follow_a_function_that_turns_them_around():
    env = ours.observation_lambda_v0(GymnasiumVectorEnv("pendulum", 3, "cpu"), lambda obs: -2 * obs)
    assert env.single_observation_space == Box(np.float32([-2, -2, -16]), np.float32([2, 2, 16]))
    assert env.single_observation_space.contains(env.reset(seed=1)[0][0].numpy())


@pytest.mark.parametrize("mode", ["full", "R", "G", "B"])
def test_only_images_lose_their_colour(mode):
    with pytest.raises(ValueError, match=r"observations have shape \(3,\); expected \(height, width, 3\)"):
        ours.color_reduction_v0(GymnasiumVectorEnv("pendulum", 3, "cpu"), mode)


def test_rewards_are_clipped():
    env, twin = supersuit.clip_reward_v0(one("tag_gridworld", **GRID), -0.005, 0.005), one("tag_gridworld", **GRID)
    env.reset(seed=SEED), twin.reset(seed=SEED)
    actions = dict.fromkeys(twin.agents, 0)
    rewards, own = env.step(actions)[1], twin.step(actions)[1]
    assert rewards == {agent: max(min(reward, 0.005), -0.005) for agent, reward in own.items()} != own


def test_padded_observations_are_the_rows_of_the_tensor():
    env = supersuit.pad_observations_v0(one("simple_tag"))
    native = gpu_vecenv.make("simple_tag", 1, "cpu", autoreset_mode="disabled")
    assert native.game.layout.observation.padded
    observations, _ = env.reset(seed=SEED)
    obs, _ = native.reset(seed=SEED)
    for agent, row in zip(env.possible_agents, obs[0].numpy(), strict=True):
        assert equal_bits(observations[agent], row)


CHANGERS = [
    (lambda env: supersuit.sticky_actions_v0(env, 0.5), "tag_gridworld", GRID),
    (lambda env: supersuit.frame_stack_v1(supersuit.black_death_v3(env), 3), "tag_continuous", TAG),
    (lambda env: supersuit.pad_action_space_v0(supersuit.pad_observations_v0(env)), "simple_adversary", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "game", "config"), CHANGERS)
def test_wrapped_views_pass_pettingzoos_test(wrap, game, config):
    parallel_api_test(wrap(one(game, **config)), 40)


@pytest.mark.slow
# Positions are unbounded, and so are the spaces of what is seen of them.
@pytest.mark.filterwarnings("ignore:Agent's (minimum|maximum) observation space value is")
@pytest.mark.parametrize(
    "wrap", [supersuit.flatten_v0, lambda env: supersuit.dtype_v0(env, np.float64), supersuit.frame_stack_v1]
)
def test_wrapped_aec_envs_pass_pettingzoos_test(wrap):
    api_test(wrap(aec_env("tag_gridworld", **GRID)), 40)


# ---------------------------------------------------------------------- the adapter: SuperSuit's own


@pytest.mark.parametrize(("game", "config"), [*TOGETHER, ("simple_tag", {}), ("simple_adversary", {})])
def test_make_joins_envs_as_its_users_do(game, config):
    """Padded, where roles differ, to the very rows of the Gymnasium view."""
    vector = ours.make(game, 2, **config)
    natives = [GymnasiumVectorEnv(game, 1, "cpu", output="numpy", **config) for _ in range(2)]
    assert vector.num_envs == 2 * natives[0].num_envs
    assert vector.observation_space.shape == natives[0].single_observation_space.shape
    assert vector.action_space == natives[0].single_action_space
    generator = np.random.default_rng(3)
    obs, _ = vector.reset(seed=SEED)
    expected = [env.reset(seed=SEED + k)[0] for k, env in enumerate(natives)]
    for _ in range(60):
        assert equal_bits(obs, np.concatenate(expected))
        actions = [rows_of_actions(env, generator) for env in natives]
        obs, rewards, *_ = vector.step(np.concatenate(actions))
        results = [env.step(part) for env, part in zip(natives, actions, strict=True)]
        expected = [result[0] for result in results]
        assert equal_bits(rewards, np.concatenate([result[1] for result in results]))


class Uneven(Script):
    """Others have half of a lead's choices."""

    source = Script.source_path()
    action_space = {"lead": Discrete(4), "other": Discrete(2)}  # noqa: RUF012


class UnevenNumbers(Script):
    """Others have numbers of their own."""

    source = Script.source_path()
    action_space = {"lead": MultiDiscrete([4, 2]), "other": MultiDiscrete([2])}  # noqa: RUF012


def test_roles_with_fewer_choices_are_padded():
    vector = ours.make(Uneven, 2, num_others=1)
    assert vector.action_space == Discrete(4)
    vector.reset(seed=1)
    said = vector.step(np.array([3, 3, 2, 1]))[0][:, 5]
    assert said.tolist() == [3, 0, 2, 1]  # SuperSuit takes what an agent lacks for its first choice
    with pytest.raises(UnsupportedGameError, match="SuperSuit's pad_action_space_v0"):
        ours.make(UnevenNumbers, 2, num_others=1)


def test_each_role_keeps_its_choices_in_a_function_of_ones_own():
    env = GymnasiumVectorEnv(Uneven, 2, "cpu", num_others=1)
    assert ours.action_lambda_v1(env, lambda rows: rows, lambda space: space).action_space == env.action_space


def test_agents_may_leave_early_with_black_death():
    vector = ours.make("tag_continuous", 2, black_death=True, **TAG)
    native = GymnasiumVectorEnv("tag_continuous", 1, "cpu", **TAG)
    vector.reset(seed=SEED)
    generator, zeros, ends = np.random.default_rng(2), 0, 0
    for _ in range(60):
        obs, _, terminations, truncations, _ = vector.step(
            np.concatenate([rows_of_actions(native, generator) for _ in range(2)])
        )
        zeros, ends = zeros + (~obs.any(1)).sum(), ends + (terminations & truncations).sum()
    assert zeros > 0 and ends >= 2 * 5 * 4


def test_wrap_takes_only_a_wrapped_env():
    vector = ours.wrap(supersuit.frame_stack_v2(one("tag_gridworld", **GRID), 3))
    obs, _ = vector.reset(seed=1)
    assert obs.shape == (5, 3 * parallel_env("tag_gridworld", "cpu", **GRID).observation_space("tagger_0").shape[0])
    for other in (None, GymnasiumVectorEnv("cartpole", 1, "cpu", output="numpy"), aec_env("tag_gridworld")):
        with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.ParallelEnv"):
            ours.wrap(other)


def test_games_with_masks_are_refused():
    with pytest.raises(UnsupportedGameError, match=r"SuperSuit does not support action masks.*torchrl"):
        ours.make(Crew, 2)
    with pytest.raises(UnsupportedGameError, match=r"pad_action_space_v0 does not support .*torchrl"):
        ours.make(OpenEconomy, 2)


def test_seeds_of_stable_baselines3_repeat():
    """SuperSuit's own vector has no ``seed``, which SB3 calls."""
    PPO = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed").PPO
    plain = supersuit.pettingzoo_env_to_vec_env_v1(one("cartpole"))
    with pytest.raises(AttributeError, match="'ConcatVecEnv' object has no attribute 'seed'"):
        PPO("MlpPolicy", supersuit.concat_vec_envs_v1(plain, 2, base_class="stable_baselines3"), seed=1)
    vector = ours.make("cartpole", 2, base_class="stable_baselines3")
    weights = []
    for seed in (1, 1, 2):
        model = PPO("MlpPolicy", vector, n_steps=16, batch_size=32, seed=seed, device="cpu").learn(32)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.policy.parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    vector.seed(5)
    twin = ours.make("cartpole", 2)
    assert equal_bits(vector.reset(), twin.reset(seed=5)[0])
    assert equal_bits(vector.reset(), twin.reset()[0])  # a seed counts once


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ppo_learns_cartpole():
    PPO = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed").PPO
    from stable_baselines3.common.vec_env import VecMonitor

    torch.set_num_threads(1)
    env = VecMonitor(ours.make("cartpole", 16, base_class="stable_baselines3"))
    env.seed(1)
    env.reset()
    generator, at_random = np.random.default_rng(1), []
    for _ in range(100):
        infos = env.step(generator.integers(0, 2, 16))[3]
        at_random += [info["episode"]["r"] for info in infos if "episode" in info]
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=8, learning_rate=1e-3, seed=1, device="cpu")
    model.learn(24_000)
    trained = [info["r"] for info in model.ep_info_buffer]
    assert np.mean(trained) > 3 * np.mean(at_random)  # about 22 steps at random, of 500 at most


# ---------------------------------------------------------------------- the adapter: native


def test_every_wrapper_of_supersuit_has_an_equal_or_a_reason():
    names = {name for name in dir(supersuit) if re.search(r"_v\d+$", name)}
    assert names == {*ours.NATIVE, *ours.NOT_NATIVE} and not {*ours.NATIVE} & {*ours.NOT_NATIVE}
    assert ours.frame_stack_v2 is ours.NATIVE["frame_stack_v2"]
    with pytest.raises(AttributeError, match="no native frame_skip_v0: a row that ends"):
        ours.frame_skip_v0  # noqa: B018
    with pytest.raises(AttributeError, match="no native frame_stack_v9: SuperSuit has none"):
        ours.frame_stack_v9  # noqa: B018


def first_two(obs):
    return obs[..., :2]


def wild(rows):
    return 7 * rows - 3


# SuperSuit divides by the width of the bounds and then multiplies, here both are one factor: some roundings of values
# of at most 1, 2^-24 each.
SOME_ROUNDINGS = 8 * 2**-24
EQUAL = [  # name, arguments, game, its configuration, tolerance
    ("flatten_v0", (), Painter, {}, 0),
    ("reshape_v0", ((20, 3),), Painter, {}, 0),
    ("color_reduction_v0", ("R",), Painter, {}, 0),
    ("color_reduction_v0", ("G",), Painter, {}, 0),
    ("color_reduction_v0", ("B",), Painter, {}, 0),
    ("color_reduction_v0", (), Painter, {}, 1),  # products of float32 added in another order may pass a whole number
    ("dtype_v0", (np.float16,), Painter, {}, 0),
    ("dtype_v0", (np.float64,), "tag_gridworld", GRID, 0),
    ("agent_indicator_v0", (), "tag_gridworld", GRID, 0),
    ("agent_indicator_v0", (True,), "tag_gridworld", GRID, 0),
    ("agent_indicator_v0", (), Painter, {}, 0),
    ("frame_stack_v1", (), "tag_gridworld", GRID, 0),
    ("frame_stack_v1", (3, 0), Painter, {}, 0),
    ("frame_stack_v2", (), "tag_gridworld", GRID, 0),
    ("frame_stack_v2", (2, 0), "tag_gridworld", GRID, 0),
    ("frame_stack_v2", (3,), Painter, {}, 0),
    ("frame_stack_v2", (3, 0), Painter, {}, 0),
    ("delay_observations_v0", (2,), "tag_gridworld", GRID, 0),
    ("delay_observations_v0", (3,), Painter, {}, 0),
    ("max_observation_v0", (2,), "tag_gridworld", GRID, 0),
    ("max_observation_v0", (3,), "simple_spread", {}, 0),
    ("sticky_actions_v0", (0,), "tag_gridworld", GRID, 0),
    ("clip_actions_v0", (), Painter, {}, 0),
    ("clip_reward_v0", (), "simple_spread", {}, 0),
    ("clip_reward_v0", (-0.005, 0.005), "tag_gridworld", GRID, 0),
    ("pad_observations_v0", (), "simple_tag", {}, 0),
    ("pad_action_space_v0", (), "tag_gridworld", GRID, 0),
    ("observation_lambda_v0", (first_two,), "tag_gridworld", GRID, 0),
    ("observation_lambda_v0", (first_two, lambda box: Box(-9, 9, (2,))), "tag_gridworld", GRID, 0),
]
LAMBDAS = {  # SuperSuit's are given a space as well
    "observation_lambda_v0": lambda change, space=None: (
        lambda obs, box: change(obs),
        *([] if space is None else [space]),
    )
}


@pytest.mark.parametrize(("name", "arguments", "game", "config", "tolerance"), EQUAL)
def test_a_native_wrapper_gives_supersuits_rows(name, arguments, game, config, tolerance, device):
    given = LAMBDAS.get(name, lambda *same: same)(*arguments)
    theirs = supersuit.pettingzoo_env_to_vec_env_v1(getattr(supersuit, name)(one(game, **config), *given))
    env = ours.NATIVE[name](GymnasiumVectorEnv(game, 1, device, **config), *arguments)
    assert env.single_observation_space.shape == theirs.observation_space.shape
    assert env.single_observation_space.dtype == theirs.observation_space.dtype
    generator, ends = np.random.default_rng(4), 0
    (obs, _), (expected, _) = env.reset(seed=SEED), theirs.reset(seed=SEED)
    for _ in range(50):
        np.testing.assert_allclose(obs.cpu().numpy(), expected, rtol=0, atol=tolerance, strict=True)
        actions = rows_of_actions(env.unwrapped, generator)
        actions = wild(actions) if name == "clip_actions_v0" else actions
        obs, rewards, terminations, truncations, info = env.step(torch.from_numpy(actions).to(device))
        expected, expected_rewards, *ended, infos = theirs.step(actions)
        assert equal_bits(rewards.cpu().numpy(), expected_rewards)
        assert (terminations.tolist(), truncations.tolist()) == tuple(flags.astype(bool).tolist() for flags in ended)
        for row in np.flatnonzero(info["_final_obs"].cpu()):
            last = info["final_obs"][row].cpu().numpy()
            np.testing.assert_allclose(last, infos[row]["terminal_observation"], rtol=0, atol=tolerance, strict=True)
            ends += 1
    assert ends


def test_frames_of_images_without_channels_get_one(device):
    grey = supersuit.color_reduction_v0(one(Painter), "R")
    theirs = supersuit.pettingzoo_env_to_vec_env_v1(supersuit.frame_stack_v2(grey, 3))
    inner = GymnasiumVectorEnv(Painter, 1, device)
    env = ours.frame_stack_v2(ours.color_reduction_v0(inner, "R"), 3)
    assert env.single_observation_space == theirs.observation_space == Box(0, 255, (4, 5, 3), np.uint8)
    first = ours.frame_stack_v2(ours.color_reduction_v0(GymnasiumVectorEnv(Painter, 1, device), "R"), 3, 0)
    assert first.single_observation_space == Box(0, 255, (3, 4, 5), np.uint8)
    generator = np.random.default_rng(4)
    obs, stacked, expected = env.reset(seed=SEED)[0], first.reset(seed=SEED)[0], theirs.reset(seed=SEED)[0]
    for _ in range(30):
        assert equal_bits(obs.contiguous().cpu().numpy(), expected)
        assert torch.equal(stacked.movedim(1, -1), obs)
        actions = rows_of_actions(inner, generator)
        expected = theirs.step(actions)[0]
        obs, stacked = (env.step(torch.from_numpy(actions).to(device))[0] for env in (env, first))


def test_normalized_images_are_supersuits(device):
    theirs = supersuit.normalize_obs_v0(supersuit.dtype_v0(one(Painter), np.float32), -1, 1)
    env = ours.normalize_obs_v0(ours.dtype_v0(GymnasiumVectorEnv(Painter, 1, device), np.float32), -1, 1)
    assert env.single_observation_space == theirs.observation_space("agent_0") == Box(-1, 1, (4, 5, 3))
    expected, obs = theirs.reset(seed=SEED)[0]["agent_0"], env.reset(seed=SEED)[0]
    for _ in range(5):
        np.testing.assert_allclose(obs[0].cpu().numpy(), expected, rtol=0, atol=SOME_ROUNDINGS)
        action = np.float32([0.5, 1])
        obs = env.step(torch.from_numpy(action[None]).to(device))[0]
        expected = theirs.step({"agent_0": action})[0]["agent_0"]
    assert len(np.unique(expected)) > 1


class Heard(VectorWrapper):
    """Keeps the actions that it was given, and the tensors that it gave."""

    def step(self, actions):
        self.given, self.gave = actions, super().step(actions)
        return self.gave


def test_functions_of_ones_own_are_given_all_rows(device):
    heard = Heard(GymnasiumVectorEnv("tag_gridworld", 3, device, **GRID))
    env = ours.reward_lambda_v0(ours.action_lambda_v1(heard, lambda rows: rows * 0 + 2, lambda space: space), torch.abs)
    assert env.single_action_space == heard.single_action_space and env.action_space == heard.action_space
    env.reset(seed=1)
    rewards = env.step(torch.zeros(15, dtype=torch.int64, device=device))[1]
    assert heard.given.tolist() == [2] * 15
    assert torch.equal(rewards, heard.gave[1].abs()) and not torch.equal(rewards, heard.gave[1])


def test_small_images_have_supersuits_shape(device):
    env = ours.resize_v1(GymnasiumVectorEnv(Painter, 2, device), 3, 2)
    theirs = supersuit.resize_v1(one(Painter), 3, 2)
    assert env.single_observation_space.shape == theirs.observation_space("agent_0").shape == (2, 3, 3)
    assert env.reset(seed=1)[0].shape == (2, 2, 3, 3)


def test_rows_of_agents_that_left_are_zeros(device):
    env = GymnasiumVectorEnv(Script, 8, device, num_others=2, leave=2)
    assert ours.black_death_v3(env) is env is ours.pad_observations_v0(env) is ours.pad_action_space_v0(env)
    env.reset(seed=1)
    gone, active = 0, torch.ones(24, dtype=torch.bool, device=device)
    for _ in range(12):
        obs, _, _, _, info = env.step(env.sample_actions())
        left, active = ~active & ~info["active"], info["active"]
        assert not obs[left].any()
        gone += int(left.sum())
    assert gone


@pytest.mark.parametrize("name", ["black_death_v3", "frame_stack_v2", "reshape_v0"])
def test_native_wrappers_are_of_vector_environments(name):
    with pytest.raises(TypeError, match=r"env is a ParallelEnv; expected a gpu_vecenv\.GymnasiumVectorEnv"):
        getattr(ours, name)(one(Script))


def test_unchanged_outputs_are_the_step_buffers(device):
    heard = Heard(GymnasiumVectorEnv(Painter, 2, device))
    env = ours.flatten_v0(ours.reshape_v0(ours.sticky_actions_v0(ours.clip_reward_v0(heard), 0.1), (20, 3)))
    env.reset(seed=1)
    obs, _, terminations, truncations, info = env.step(heard.env.sample_actions())
    theirs = [heard.gave[0], *heard.gave[2:4], heard.gave[4]["final_obs"]]
    for mine, inner in zip([obs, terminations, truncations, info["final_obs"]], theirs, strict=True):
        assert mine.data_ptr() == inner.data_ptr()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("frame_stack_v2", (2, 1), "stack_dim is 1"),
        ("color_reduction_v0", ("grey",), "mode is 'grey'"),
        ("max_observation_v0", (0,), "memory is 0"),
    ],
)
def test_wrong_arguments_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        ours.NATIVE[name](GymnasiumVectorEnv(Painter, 1, "cpu"), *arguments)


def many(env):
    """Wrappers of every kind."""
    env = ours.agent_indicator_v0(ours.sticky_actions_v0(env, 0.2))
    env = ours.max_observation_v0(ours.delay_observations_v0(ours.black_death_v3(env), 1), 2)
    return ours.clip_reward_v0(ours.dtype_v0(ours.frame_stack_v2(env, 3), np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("game", ["tag_gridworld", Painter])
def test_no_step_synchronises_with_the_gpu(game):
    env = many(GymnasiumVectorEnv(game, 50, "cuda", max_steps=9))
    if game is Painter:
        env = ours.resize_v1(ours.color_reduction_v0(GymnasiumVectorEnv(game, 50, "cuda"), "full"), 3, 3)
        env = ours.frame_stack_v1(env, 2)
    env.reset(seed=1)
    with no_synchronisation():
        for _ in range(100):
            obs = env.step(env.unwrapped.sample_actions())[0]
    assert obs.is_cuda


def fresh(*command: str) -> subprocess.CompletedProcess:
    """Python in a process of its own."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_native_wrappers_do_without_supersuit():
    code = (
        "import sys; sys.modules['supersuit'] = None\n"
        "from gpu_vecenv import GymnasiumVectorEnv\n"
        "from gpu_vecenv.adapters import supersuit\n"
        "env = supersuit.frame_stack_v2(GymnasiumVectorEnv('cartpole', 2, 'cpu'), 3)\n"
        "print(env.reset(seed=1)[0].shape)\n"
        "supersuit.make('cartpole', 2)\n"
    )
    ran = fresh("-c", code)
    assert "torch.Size([2, 12])" in ran.stdout
    last = ran.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: supersuit is not installed: pip install 'gpu-vecenv[supersuit]'"


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    pytest.importorskip("rsl_rl", reason="rsl-rl-lib is not installed")
    pattern = r"return at random (-\d+), trained (-\d+) \(0 at most\), after \d+ s"
    at_random, trained = run_example_here("supersuit_frames.py", pattern, tmp_path)
    assert trained > at_random + 400  # about -1200 at random
