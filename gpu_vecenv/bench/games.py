"""Throughput of one game, in steps and bytes: step, sampling, both together, and rollouts of policies."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.random_play import UniformParameters
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.timing import captured, quartiles, run_seconds, seconds, spread, synchronize
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.capacity import check_capacity
from gpu_vecenv.train.fused_rollout import fused_rollout
from gpu_vecenv.train.policy_kernels import Forward, choose_kernels
from gpu_vecenv.train.policy_specs import resolve_specs
from gpu_vecenv.train.ppo import PPOConfig, make_policy
from gpu_vecenv.train.rollout_storage import Rollout

STEPS_PER_RUN = 20  # steps per measurement; on a GPU in one captured graph
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
# WarpDrive's observations, with which its speed and earlier figures are compared.
COMPARED: dict[str, dict[str, Any]] = {"tag_continuous": {"egocentric": False}}
RNG_FIELDS = ("key", "episode", "elapsed_steps")  # read by the sampler


def compared_game(name: str, **config: Any) -> Env:
    """A registered game in the version that figures of its speed are of."""
    return configure(name, **{**COMPARED.get(name, {}), **config})


def repeat_step(env: VecEnv) -> Callable[[], None]:
    """The kernel launch of the last ``env.step`` alone, with the same actions and step buffers."""
    return env._kernels._step.run


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, counting bytes read and written."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = STEPS_PER_RUN if device.type == "cuda" else 1  # reduces the share of launch overhead

    def run() -> None:
        for _ in range(copies):
            target.copy_(source)

    return 2 * source.nbytes * copies / seconds(run, device)


def bytes_per_env_step(game: Env) -> int:
    """The fewest bytes that a step of one environment moves: state in and out, actions in, outputs out."""
    layout = game.layout
    fields = [*layout.fields, *(f for f in layout.engine_fields if not f.name.startswith("completed"))]
    state = sum(f.nbytes for f in fields if not f.shared)
    obs, reward, flags, action = layout.obs_size * layout.observation.dtype.itemsize, 4, 4, 4 * layout.action.heads
    return 2 * state + layout.num_agents * (obs + reward + flags + action)


def bytes_per_env_sample(game: Env) -> int:
    """The fewest bytes that sampling for one environment moves: counters and parameters in, samples out."""
    layout = game.layout
    counters = sum(f.nbytes for f in layout.engine_fields if f.name in RNG_FIELDS)
    sampled = layout.action.heads * (1 if layout.action.discrete else 2)
    return counters + 4 * layout.num_agents * (layout.action.num_parameters + sampled + 1)


def measure(
    game: Env,
    num_envs: int,
    bandwidth: float,
    device: torch.device,
    driver: str | None = None,
    threads_per_env: int | None = None,
) -> dict[str, Any]:
    """One row: the stages "step", "sampling", and "sample_and_step" (``Sampler.step``).

    Times are per step. Sampling yields actions and log-probabilities, as the trainer uses them. In games with masks
    random actions are drawn within "step", and "sample_and_step" excludes what a mask forbids. The bytes of
    "sample_and_step" are those of the step alone.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    env = VecEnv(game, num_envs, device, driver=driver, threads_per_env=threads_per_env)
    buffers = env.step_buffers()
    env.reset(seed=1, out=buffers)
    actions = []
    for _ in range(STEPS_PER_RUN):
        actions.append(env.sample_actions())
        env.step(actions[-1], out=buffers)
        if len(actions) == 1:
            synchronize(device)
            first_step = time.perf_counter() - start
    row = {
        **named(game, num_envs),
        "first_step_s": round(first_step, 3),
        "bytes_per_agent_step": round(bytes_per_env_step(game) / game.layout.num_agents, 2),
    }
    sampler = Sampler(env)
    parameters = UniformParameters(sampler, buffers)
    sample = dataclasses.replace(sampler.sample(parameters.tensor), entropies=None)

    def step() -> None:
        for action in actions:  # replays visit other states, with other action masks
            env.step(env.sample_actions() if game.layout.masks_actions else action, out=buffers)

    def draw_samples() -> None:
        for _ in range(STEPS_PER_RUN):
            sampler.sample(parameters.tensor, out=sample)

    def sample_and_step() -> None:
        for _ in range(STEPS_PER_RUN):
            parameters.refresh()
            sampler.step(parameters.tensor, sample=sample, out=buffers)

    step_bytes, sample_bytes = num_envs * bytes_per_env_step(game), num_envs * bytes_per_env_sample(game)
    for stage, call, num_bytes in (
        ("step", step, step_bytes),
        ("sampling", draw_samples, sample_bytes),
        ("sample_and_step", sample_and_step, step_bytes),
    ):
        durations = [run / STEPS_PER_RUN for run in run_seconds(captured(call, device), device)]
        row |= rates(stage, durations, game, num_envs)
        _, duration, _ = quartiles(durations)
        row[f"{stage}_bytes"] = num_bytes
        row[f"{stage}_gb_per_s"] = round(num_bytes / duration / 1e9, 4)
        row[f"{stage}_share_of_copy_bandwidth"] = round(num_bytes / duration / bandwidth, 4)
    row["env_bytes"] = env.bytes_per_env() * num_envs
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    row["faults"] = int(env.faults().count_nonzero())
    env.close()
    return row


def measure_rollout(
    game: Env,
    num_envs: int,
    config: PPOConfig,
    device: torch.device,
    driver: str | None = None,
    threads_per_env: int | None = None,
) -> dict[str, Any]:
    """The stage "rollout" of a row: a step with a new policy for each role, stored in the trainer's rollout buffer.

    The time of a rollout divided by ``config.num_steps``, without advantages and updates.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    env = VecEnv(game, num_envs, device, autoreset_mode="next_step", driver=driver, threads_per_env=threads_per_env)
    check_capacity(env, config, resolve_specs(game, config, None))
    rollout, sampler = Rollout(env, config.num_steps), Sampler(env, squash=config.squash)
    policies = {role: make_policy(game, [role], config, None, device) for role in game.layout.present_roles}
    parameters = torch.zeros((num_envs, game.layout.num_agents, sampler.num_parameters), device=device)
    env.reset(seed=1, out=rollout.last)

    choices = {
        role: choose_kernels(policy, rollout, config.precision, config.chunk_rows) for role, policy in policies.items()
    }
    reasons = {role: choice.unfused_reason for role, choice in choices.items()}
    kernels = {role: choice.kernels for role, choice in choices.items()}
    collect: Callable[[], None] | None = fused_rollout(rollout, sampler, reasons, kernels)[0]
    if collect is None:
        forward_passes = [Forward(policy, rollout, parameters, kernels[role]) for role, policy in policies.items()]
        collect = partial(rollout.collect, forward_passes, sampler, parameters)
    with torch.no_grad():
        durations = [run / config.num_steps for run in run_seconds(captured(collect, device), device)]
    row = {"rollout_num_steps": config.num_steps, "rollout_hidden_sizes": list(config.hidden_sizes)}
    row |= rates("rollout", durations, game, num_envs)
    if device.type == "cuda":
        row["rollout_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    env.close()
    return row


def named(game: Env, num_envs: int) -> dict[str, Any]:
    """Game, sizes, and the configuration values that differ from their defaults."""
    fields = {field.name: (getattr(game, field.name), field.default) for field in dataclasses.fields(game)}
    config = {name: value for name, (value, default) in fields.items() if value != default}
    return {"game": game.name(), "num_envs": num_envs, "num_agents": game.layout.num_agents, "config": config}


def rates(stage: str, durations: Sequence[float], game: Env, num_envs: int) -> dict[str, Any]:
    """The metrics of a stage from its seconds per step in each run: time with quartiles, rates of the median."""
    _, duration, _ = quartiles(durations)
    return {
        **spread(f"{stage}_us", [each * 1e6 for each in durations], 2),
        f"{stage}_env_steps_per_s": round(num_envs / duration),
        f"{stage}_agent_steps_per_s": round(num_envs * game.layout.num_agents / duration),
    }
