"""SuperSuit on the NumPy view of one replica: its wrappers work, and its vector of copies is our Gymnasium view.

SuperSuit seeds copy k with seed + k, where the Gymnasium view has one seed for all replicas. So the rows of a copy are
those of a Gymnasium view of one replica with that seed, over any number of episodes.
"""

import numpy as np
import pytest

pytest.importorskip("supersuit", reason="supersuit is not installed")

import supersuit
from games.painter import Painter
from pettingzoo.test import api_test, parallel_api_test

import gpu_vecenv
from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.pettingzoo_env import aec_env, parallel_env

# Few agents, so that they leave early and replicas end often.
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


def same_bits(a, b) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


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
    assert same_bits(obs, np.concatenate([env.reset(seed=SEED + k)[0] for k, env in enumerate(natives)]))
    ends = 0
    for _ in range(60):
        actions = [rows_of_actions(env, generator) for env in natives]
        results = [env.step(part) for env, part in zip(natives, actions, strict=True)]
        obs, rewards, terminations, truncations, infos = vector.step(np.concatenate(actions))
        expected = [np.concatenate([result[k] for result in results]) for k in range(4)]
        assert same_bits(obs, expected[0]) and same_bits(rewards, expected[1])
        assert np.array_equal(terminations, expected[2]) and np.array_equal(truncations, expected[3])
        ended = np.concatenate([result[4]["_final_obs"] for result in results])
        final = np.concatenate([result[4]["final_obs"] for result in results])
        assert ["terminal_observation" in info for info in infos] == ended.tolist()
        assert all(same_bits(infos[row]["terminal_observation"], final[row]) for row in ended.nonzero()[0])
        ends += ended.any()
    assert ends


def test_agents_that_leave_early_need_black_death():
    vector, generator = supersuit.pettingzoo_env_to_vec_env_v1(one("tag_continuous", **TAG)), np.random.default_rng(2)
    with pytest.raises(AssertionError, match=r"agent death|varying numbers of active agents"):
        for seed in range(4):
            vector.reset(seed=seed)
            for _ in range(12):
                vector.step(generator.integers(0, 21, (5, 2)))


def test_black_death_gives_the_rows_of_the_gymnasium_view_until_the_last_tick():
    env = supersuit.black_death_v3(one("tag_continuous", **TAG))
    vector = supersuit.pettingzoo_env_to_vec_env_v1(env)
    native = GymnasiumVectorEnv("tag_continuous", 1, "cpu", output="numpy", autoreset_mode="disabled", **TAG)
    generator, early = np.random.default_rng(2), 0
    for seed in range(4):
        obs, (expected, info) = vector.reset(seed=seed)[0], native.reset(seed=seed)
        assert same_bits(obs, expected)
        while info["active"].any():
            actions, live = rows_of_actions(native, generator), info["active"]
            obs, rewards, terminations, truncations, _ = vector.step(actions)
            expected, expected_rewards, *_, info = native.step(actions)
            assert same_bits(obs, expected) and same_bits(rewards, expected_rewards)
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
def test_a_wrapper_sees_the_observations_of_the_replica(wrap, game, config, expected):
    env, twin = wrap(one(game, **config)), one(game, **config)
    observations, own = env.reset(seed=SEED)[0], twin.reset(seed=SEED)[0]
    history = {agent: [obs] for agent, obs in own.items()}
    while True:
        assert set(observations) == set(own)
        for agent, obs in own.items():
            given, wanted = np.asarray(observations[agent]), expected(agent, obs, history[agent])
            assert same_bits(given, wanted)
            assert env.observation_space(agent).contains(given)
        if not twin.agents:
            break
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        observations, *others, _ = env.step(actions)
        own, *expected_others, _ = twin.step(actions)
        assert others == expected_others
        for agent, obs in own.items():
            history[agent].append(obs)


def test_rewards_are_clipped():
    env, twin = supersuit.clip_reward_v0(one("tag_gridworld", **GRID), -0.005, 0.005), one("tag_gridworld", **GRID)
    env.reset(seed=SEED), twin.reset(seed=SEED)
    actions = dict.fromkeys(twin.agents, 0)
    rewards, own = env.step(actions)[1], twin.step(actions)[1]
    assert rewards == {agent: max(min(reward, 0.005), -0.005) for agent, reward in own.items()} != own


def test_padded_observations_are_the_rows_of_the_tensor():
    env = supersuit.pad_observations_v0(one("simple_tag"))
    native = gpu_vecenv.make("simple_tag", 1, "cpu", autoreset_mode="disabled")
    assert native.game.observation.padded
    observations, _ = env.reset(seed=SEED)
    obs, _ = native.reset(seed=SEED)
    for agent, row in zip(env.possible_agents, obs[0].numpy(), strict=True):
        assert same_bits(observations[agent], row)


CHANGERS = [
    (lambda env: supersuit.sticky_actions_v0(env, 0.5), "tag_gridworld", GRID),
    (lambda env: supersuit.frame_stack_v1(supersuit.black_death_v3(env), 3), "tag_continuous", TAG),
    (lambda env: supersuit.pad_action_space_v0(supersuit.pad_observations_v0(env)), "simple_adversary", {}),
]


@pytest.mark.parametrize(("wrap", "game", "config"), CHANGERS)
def test_wrapped_views_pass_pettingzoos_test(wrap, game, config):
    parallel_api_test(wrap(one(game, **config)), 40)


# Positions are unbounded, and so are the spaces of what is seen of them.
@pytest.mark.filterwarnings("ignore:Agent's (minimum|maximum) observation space value is")
@pytest.mark.parametrize(
    "wrap", [supersuit.flatten_v0, lambda env: supersuit.dtype_v0(env, np.float64), supersuit.frame_stack_v1]
)
def test_wrapped_aec_envs_pass_pettingzoos_test(wrap):
    api_test(wrap(aec_env("tag_gridworld", **GRID)), 40)
