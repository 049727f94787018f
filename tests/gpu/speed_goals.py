"""The goals of speed on one H200, one by one, beside what is measured: what `gpu-vecenv bench` gives, and more.

    python3 tests/gpu/speed_goals.py RESULTS.json [NAME…]     names: steps sampler eager training solved

Nothing here fails where a goal is missed: it says so.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.bench import games as bench_games
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.timing import captured, provenance, seconds, synchronize
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.policy import Precision
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv

Row = dict[str, Any]
THOUSAND = {"num_taggers": 100, "num_runners": 900}
SEEDS = 10  # of the runs to 475
MANY = {"num_taggers": 999, "full_observation": False}
# Game, configuration, envs, steps (sampling and step) of all environments in a second, share of the copy bandwidth.
TICKS: tuple[tuple[str, dict[str, Any], int, float, float | None], ...] = (
    ("tag_continuous", {}, 100, 4e6, None),
    ("tag_continuous", {}, 2000, 25e6, None),
    ("tag_continuous", THOUSAND, 2000, 2e6, None),
    ("tag_continuous", {"num_taggers": 1000, "num_runners": 9000}, 100, 20e3, None),
    ("tag_continuous", {}, 20_000, 0, 0.3),
    ("tag_gridworld", {}, 2000, 200e6, None),
    ("tag_gridworld", {}, 100_000, 2e9, None),
    ("tag_gridworld", MANY, 2000, 25e6, None),
    ("tag_gridworld", {}, 1_000_000, 0, 0.5),
    ("cartpole", {}, 100_000, 5e9, None),
    ("cartpole", {}, 1_000_000, 20e9, 0.5),
)
# Game, configuration, envs, layers, steps, epochs, one policy for all roles, precision, agent-steps in a second.
TRAINING: tuple[tuple[str, int, tuple[int, int], int, int, bool, Precision, float], ...] = (
    ("tag_continuous", 2000, (64, 64), 25, 4, True, "tf32", 45e6),
    ("tag_continuous", 2000, (64, 64), 25, 1, True, "tf32", 90e6),
    ("tag_continuous", 2000, (256, 256), 25, 1, False, "tf32", 110 * 800e3),
    ("tag_continuous", 2000, (256, 256), 25, 1, False, "bfloat16", 110 * 800e3),
    ("cartpole", 16_384, (64, 64), 32, 4, True, "tf32", 60e6),
)


def steps(device: torch.device) -> Iterator[Row]:
    """Sampling, step and autoreset in a captured graph."""
    bandwidth = bench_games.copy_bandwidth(device)
    for name, config, num_envs, goal, share in TICKS:
        row = bench_games.measure(bench_games.compared_game(name, **config), num_envs, bandwidth, device)
        goals = {"sample_and_step_env_steps_per_s": goal or None, "step_share_of_copy_bandwidth": share}
        yield {**row, "goals": {figure: value for figure, value in goals.items() if value is not None}}


def sampler(device: torch.device) -> Iterator[Row]:
    """Actions from logits, against torch's own."""
    for name, num_envs in (("tag_gridworld", 2000), ("tag_continuous", 2000)):
        env = VecEnv(bench_games.compared_game(name), num_envs, device)
        env.reset(seed=1)
        own, sizes = Sampler(env), list(env.game.layout.action.head_sizes)
        logits = torch.randn((num_envs, env.num_agents, own.num_parameters), device=device)
        sample = replace(own.sample(logits), entropies=None)

        def draw(own: Sampler = own, logits: torch.Tensor = logits, sample: Any = sample) -> None:
            own.sample(logits, out=sample)

        def distributions(logits: torch.Tensor = logits, sizes: list[int] = sizes) -> list[torch.Tensor]:
            heads = logits.split(sizes, -1)
            return [torch.distributions.Categorical(logits=x, validate_args=False).sample() for x in heads]

        def multinomial(logits: torch.Tensor = logits, sizes: list[int] = sizes) -> list[torch.Tensor]:
            heads = logits.flatten(0, 1).split(sizes, -1)
            return [torch.multinomial(x.softmax(-1), 1) for x in heads]

        for how in ("eager", "graph"):
            calls: list[Callable[[], Any]] = [draw, distributions, multinomial]
            if how == "graph":
                calls = [captured(call, device) for call in calls]
            mine, *others = (seconds(call, device) * 1e6 for call in calls)
            yield {
                **bench_games.named(env.game, num_envs),
                "how": how,
                "sampler_us": round(mine, 2),
                "categorical_us": round(others[0], 2),
                "multinomial_us": round(others[1], 2),
                "ratio": round(min(others) / mine, 2),
                "goals": {"ratio": 3.0},
            }


def eager(device: torch.device) -> Iterator[Row]:
    """Gymnasium's step, called one by one."""
    env = GymnasiumVectorEnv("tag_gridworld", 65_536, device)
    env.reset(seed=1)
    actions = env.vec_env.sample_actions()
    duration = seconds(lambda: env.step(actions), device)
    rate = round(env.num_envs / duration)
    yield {"game": "tag_gridworld", "rows": env.num_envs, "us": round(duration * 1e6, 2), "agent_steps_per_s": rate} | {
        "goals": {"agent_steps_per_s": 1e9}
    }


def training(device: torch.device) -> Iterator[Row]:
    """Rollout and update, end to end; of A2C, with its own configuration, there is no goal."""
    for name, num_envs, layers, num_steps, epochs, shared, precision, goal in TRAINING:
        config = PPOConfig(
            total_steps=10**12,
            num_steps=num_steps,
            num_epochs=epochs,
            num_minibatches=4 if epochs > 1 else 1,
            hidden_sizes=layers,
            precision=precision,
        )
        yield {
            **trained(bench_games.compared_game(name), num_envs, config, shared, device),
            "goals": {"agent_steps_per_s": goal},
        }
    config = PPOConfig.a2c(total_steps=10**12, hidden_sizes=(32, 32), precision="tf32")
    row = trained(configure("tag_gridworld", **MANY), 2000, config, True, device)
    yield {**row, "how": "a2c", "goals": {}}


def trained(game: Env, num_envs: int, config: PPOConfig, shared: bool, device: torch.device) -> Row:
    """The mean of twelve iterations; ``shared``: one policy for all roles."""
    roles = "+".join(role for role, count in game.roles.items() if count)
    trainer = Trainer(VecEnv(game, num_envs, device), config, policies={roles: PolicySpec()} if shared else None)
    for _ in range(4):
        metrics = trainer.train_iteration()
    synchronize(device)
    start, iterations = time.perf_counter(), 12
    for _ in range(iterations):
        metrics = trainer.train_iteration()
    synchronize(device)
    duration = (time.perf_counter() - start) / iterations
    shares = {key: round(value, 3) for key, value in metrics.items() if key.endswith("_share") and "_share_" not in key}
    trainer.close()
    return {
        **bench_games.named(game, num_envs),
        "layers": config.hidden_sizes,
        "num_steps": config.num_steps,
        "epochs": config.num_epochs,
        "precision": config.precision,
        "iteration_ms": round(duration * 1e3, 3),
        "agent_steps_per_s": round(config.num_steps * num_envs * game.num_agents / duration),
        **shares,
    }


def solved(device: torch.device) -> Iterator[Row]:
    """CartPole-v1 to 475 over the latest episode of each environment: seconds from before the environment is made.

    Kernels are compiled, graphs are not captured yet. The host reads metrics once in five iterations.
    """
    config = PPOConfig(
        total_steps=10**9,
        num_steps=32,
        num_epochs=4,
        num_minibatches=4,
        hidden_sizes=(64, 64),
        learning_rate=3e-3,
        gamma=0.98,
        gae_lambda=0.8,
        entropy_coefficient=0.0,
    )
    for num_envs in (256, 1024, 4096):
        durations, unsolved = [], 0
        for seed in range(-1, SEEDS):  # the first run compiles
            start, length = time.perf_counter(), 0.0
            env = VecEnv(configure("cartpole"), num_envs, device, autoreset_mode="next_step")
            trainer = Trainer(env, config, seed=max(seed, 0))
            while not length >= 475 and time.perf_counter() - start < 20:  # NaN until each environment ended an episode
                length = trainer.train_interval(5)["episode_length"]
            if seed >= 0:
                durations.append(time.perf_counter() - start)
                unsolved += not length >= 475
            trainer.close()
        yield {
            "game": "cartpole",
            "num_envs": num_envs,
            "seeds": SEEDS,
            "unsolved": unsolved,
            "seconds_to_solve": round(statistics.median(durations), 3),
            "seconds_of_the_slowest": round(max(durations), 3),
            "goals": {"seconds_to_solve": 0.12, "seconds_of_the_slowest": 0.25},
        }


SECTIONS = {call.__name__: call for call in (steps, sampler, eager, training, solved)}


def main(results: str, *names: str) -> None:
    """Measure, print what is reached and what is not, and write it."""
    device = resolve_device(None)
    found: dict[str, Any] = {**provenance(device)}
    for name in names or SECTIONS:
        found[name] = []
        for row in SECTIONS[name](device):
            found[name].append(row)
            for figure, goal in row["goals"].items():
                reached = row[figure] <= goal if figure.startswith("seconds") else row[figure] >= goal
                what = " ".join(
                    str(row[key]) for key in ("game", "num_envs", "num_agents", "how", "epochs") if key in row
                )
                verdict = "reached" if reached else "MISSED"
                print(f"{verdict:8} {name}: {what}: {figure} {row[figure]:,} of {goal:,}", flush=True)
            print(json.dumps(row), flush=True)
        Path(results).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
