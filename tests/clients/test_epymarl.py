"""EPyMARL: the environment of tuples that docs/clients.md shows, without EPyMARL itself, which is no package."""

import gymnasium
import numpy as np
from support.documented import documented

import gpu_vecenv


def test_tuples_are_what_the_agents_have():
    kind = documented("EPyMARL")["TuplesOfAgents"]
    # As EPyMARL makes it: with Gymnasium's time limit around.
    env = gymnasium.make("SimpleSpreadTuples-v0", max_episode_steps=20)
    twin = gpu_vecenv.parallel_env("simple_spread", "cpu", output="numpy")
    assert type(env.unwrapped) is kind and env.unwrapped.n_agents == 3
    for spaces, own in ((env.observation_space, twin.observation_spaces), (env.action_space, twin.action_spaces)):
        assert list(spaces) == list(own.values())
    for seed in (3, 4):
        (obs, _), (expected, _) = env.reset(seed=seed), twin.reset(seed=seed)
        for step in range(20):
            for mine, wanted in zip(obs, expected.values(), strict=True):
                np.testing.assert_array_equal(mine, wanted)
            actions = [step % 5, (step + 1) % 5, 2]
            obs, rewards, terminated, truncated, _ = env.step(actions)
            expected, wanted, *_ = twin.step(dict(zip(twin.possible_agents, actions, strict=True)))
            assert rewards == list(wanted.values()) and not terminated and truncated == (step == 19)
