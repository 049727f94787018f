"""Actions and log-probabilities from logits by ``Sampler``, and actions alone by torch's ways, called and in a graph.

    python3 tests/gpu/sampler_speed.py RESULTS.json

Medians and quartiles of ten runs in microseconds; `ratio` is the faster of torch's ways by ``Sampler``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from measurements import Measurements, arguments

from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.bench.games import compared_game, named
from gpu_vecenv.engine.timing import captured, run_seconds, spread

SIZES = (("tag_gridworld", 2000), ("tag_continuous", 2000))
QUICK = (("cartpole", 3),)


def ways_of(env: VecEnv) -> dict[str, Callable[[], Any]]:
    """Draw from logits, by each way."""
    env.reset(seed=1)
    own, sizes = Sampler(env), list(env.game.layout.action.head_sizes)
    logits = torch.randn((env.num_envs, env.num_agents, own.num_parameters), device=env.device)
    sample = replace(own.sample(logits), entropies=None)

    def draw() -> None:
        own.sample(logits, out=sample)

    def distributions() -> list[torch.Tensor]:
        heads = logits.split(sizes, -1)
        return [torch.distributions.Categorical(logits=x, validate_args=False).sample() for x in heads]

    def multinomial() -> list[torch.Tensor]:
        heads = logits.flatten(0, 1).split(sizes, -1)
        return [torch.multinomial(x.softmax(-1), 1) for x in heads]

    return {"sampler": draw, "categorical": distributions, "multinomial": multinomial}


def row_of(env: VecEnv, how: str) -> dict[str, Any]:
    """Times of all ways, and the ratio."""
    row: dict[str, Any] = {}
    for name, call in ways_of(env).items():
        repeat = captured(call, env.device) if how == "graph" else call
        row |= spread(f"{name}_us", [run * 1e6 for run in run_seconds(repeat, env.device)], 2)
    return {**row, "ratio": round(min(row["categorical_us"], row["multinomial_us"]) / row["sampler_us"], 2)}


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    measurements = Measurements(given)
    for name, num_envs in QUICK if given.quick else SIZES:
        env = VecEnv(compared_game(name), num_envs, given.device)
        for how in ("eager", "graph"):
            measurements.measure({**named(env.game, num_envs), "how": how}, lambda: row_of(env, how))  # noqa: B023
        env.close()


if __name__ == "__main__":
    main()
