"""Random numbers of a step of one environment, drawn again from its key: see rng.cuh."""

from collections.abc import Callable

from oracles.philox import philox

from gpu_vecenv import VecEnv

STEP_STREAM, BELOW = 1, 1 << 28


def _words(env: VecEnv, e: int, step: int) -> Callable[[int, int], list[int]]:
    key = [word & 0xFFFFFFFF for word in env.data["engine_key"][e].tolist()]
    episode = int(env.data["engine_episode"][e])
    return lambda block, item: philox([STEP_STREAM << 29 | block, item, step, episode], key)


def step_below(env: VecEnv, e: int, step: int) -> Callable[[int, int], int]:
    """What ``io.rng.below(item, 0, n)`` gives in this step of the environment's present episode: (item, n) -> int."""
    words_of = _words(env, e, step)

    def below(item: int, n: int) -> int:
        words = words_of(BELOW, item)
        return (words[1] * n + (words[0] * n >> 32)) >> 32

    return below


def step_uniform(env: VecEnv, e: int, step: int, draw: int = 0) -> Callable[[int], float]:
    """Likewise what ``io.rng.uniform(item, draw)`` gives: item -> float."""
    words_of = _words(env, e, step)
    return lambda item: (words_of(draw >> 2, item)[draw & 3] >> 8) / 2**24


def order_of(below: Callable[[int, int], int], n: int) -> list[int]:
    """0 … n - 1 in the random order of Fisher and Yates' shuffle, from the last place to the second."""
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = below(i, i + 1)
        order[i], order[j] = order[j], order[i]
    return order
