"""PufferLib's emulation of single environments; its native interface is tested in tests/adapters/test_pufferlib.py."""

import numpy as np
import pufferlib.vector
from games.script import Script
from pufferlib.emulation import GymnasiumPufferEnv, PettingZooPufferEnv
from support.documented import documented

from gpu_vecenv import GymnasiumEnv, parallel_env

LEAVE = {"num_leads": 2, "num_others": 2, "leave": 2}


def vector(kind, creator, num_envs: int):
    return pufferlib.vector.make(kind, env_kwargs={"env_creator": creator}, backend="Serial", num_envs=num_envs)


def test_gymnasium_environments_give_what_they_give_alone():
    env, twins = vector(GymnasiumPufferEnv, lambda: GymnasiumEnv(Script), 3), [GymnasiumEnv(Script) for _ in range(3)]
    obs, _ = env.reset(seed=7)
    expected = [twin.reset(seed=7 + i)[0] for i, twin in enumerate(twins)]
    over, rng, ends = [False] * 3, np.random.default_rng(1), 0
    assert obs.dtype == np.float32
    for _ in range(40):
        np.testing.assert_array_equal(obs, expected)
        actions = rng.integers(0, 4, 3, dtype=np.int32)
        obs, rewards, terminals, truncations, _ = env.step(actions)
        for i, twin in enumerate(twins):
            if over[i]:  # PufferLib resets where it would step next
                expected[i], reward, terminated, truncated = twin.reset()[0], 0.0, False, False
            else:
                expected[i], reward, terminated, truncated, _ = twin.step(actions[i])
            assert (rewards[i], terminals[i], truncations[i]) == (reward, terminated, truncated)
            over[i] = terminated or truncated
            ends += over[i]
    assert ends > 12


def test_parallel_environments_give_what_they_give_alone():
    """Agents that left are rows of zeros, masked."""
    env = vector(PettingZooPufferEnv, lambda: parallel_env(Script, "cpu", output="numpy", **LEAVE), 2)
    twins = [parallel_env(Script, "cpu", output="numpy", **LEAVE) for _ in range(2)]
    obs, _ = env.reset(seed=7)
    dicts = [twin.reset(seed=7 + i)[0] for i, twin in enumerate(twins)]
    rng, resets, gone = np.random.default_rng(1), 0, 0
    for _ in range(30):
        for i, (twin, named) in enumerate(zip(twins, dicts, strict=True)):
            rows = [named.get(agent, np.zeros(6, np.float32)) for agent in twin.possible_agents]
            np.testing.assert_array_equal(obs[4 * i : 4 * i + 4], rows)
        actions = rng.integers(0, 4, 8, dtype=np.int32)
        obs, rewards, terminals, truncations, _ = env.step(actions)
        for i, twin in enumerate(twins):
            if not twin.agents:
                dicts[i], resets = twin.reset()[0], resets + 1
                continue
            acting = {agent: actions[4 * i + a] for a, agent in enumerate(twin.possible_agents) if agent in twin.agents}
            dicts[i], *outputs, _ = twin.step(acting)
            for a, agent in enumerate(twin.possible_agents):
                row, wanted = 4 * i + a, [output.get(agent) for output in outputs]
                if agent in acting:
                    assert [rewards[row], terminals[row], truncations[row]] == wanted
                else:
                    gone += 1
                    assert (rewards[row], terminals[row], env.masks[row]) == (0, True, False)
    assert resets > 5 and gone > 5


def test_the_documented_lines_run():
    made = documented("PufferLib")
    assert made["native"].num_agents == made["observations"].shape[0] == 4096
    assert made["single"].num_agents == 4 and made["parallel"].num_agents == 20
