"""Random integers of a step of one environment, drawn again from its key: see rng.cuh."""

from collections.abc import Callable

from oracles.philox import philox

from gpu_vecenv import VecEnv

STEP_STREAM, BELOW = 1, 1 << 28


def step_below(env: VecEnv, e: int, step: int) -> Callable[[int, int], int]:
    """What ``io.rng.below(item, 0, n)`` gives in this step of the environment's present episode: (item, n) -> int."""
    key = [word & 0xFFFFFFFF for word in env.data["engine_key"][e].tolist()]
    episode = int(env.data["engine_episode"][e])

    def below(item: int, n: int) -> int:
        words = philox([STEP_STREAM << 29 | BELOW, item, step, episode], key)
        return (words[1] * n + (words[0] * n >> 32)) >> 32

    return below
