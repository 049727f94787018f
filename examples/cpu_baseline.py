"""A simulation in NumPy on the CPU with the policy network on the GPU, the usual split, against both on the GPU.

The first plays the classes of tests/oracles, so this runs in a checkout only; one env after another on one core, as
in Gymnasium's SyncVectorEnv. Observations are copied to the device and actions back. Network, seeds and draws are the
same in both, so their final states must be bitwise equal. 2,000 environments of 1,000 agents:

    python examples/cpu_baseline.py --num-envs 2000 --cpu-envs 2000 --num-taggers 999 --full-observation False
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Column, Table
from torch import nn

from gpu_vecenv import Env, FunctionManager, Sampler, VecEnv, configure
from gpu_vecenv.declare.env import f32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.engine.timing import processor_name, provenance, spread

TESTS = Path(__file__).resolve().parents[1] / "tests"
SEED = 7
State = dict[str, np.ndarray]  # field, time or obs -> (num_envs, …)
SINCOS = """
#include "math.cuh"

KERNEL(map_sincos) { FOR_ITEMS (k, args.n) math::sincos(args.x[k], &args.s[k], &args.c[k]); }
"""
SINCOS_KERNEL = KernelSignature(
    "map_sincos", (Array("x", f32, const=True), Array("s", f32), Array("c", f32), Scalar("n", i64))
)


@dataclass
class Options:
    """Measure env-steps a second, network included, of a simulation in NumPy and of one on the device."""

    game: Literal["tag_gridworld", "tag_continuous"] = "tag_gridworld"
    num_envs: int = 1000  # on the device
    cpu_envs: int = 20  # in NumPy, and of the run on the device that is compared with it
    num_taggers: int | None = None  # by default the game's
    num_runners: int | None = None  # tag_continuous only, by default the game's; tag_gridworld has one
    full_observation: bool | None = None  # tag_gridworld only, by default the game's
    steps: int = 50
    repeats: int = 1  # of each; then rates are medians, with quartiles
    json: Path | None = None  # file that receives the rates of all repeats
    device: str | None = None  # of the network: cpu, cuda or cuda:1; by default cuda if usable, else cpu


class Stages:
    """Seconds spent in each stage of a loop; a GPU is waited for before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add what lies within."""
        start = self._now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def oracle_class(game: Env) -> Callable[[], Any]:
    """Returns a function that makes one environment of the game in NumPy."""
    if not (TESTS / "oracles").is_dir():
        sys.exit(f"the simulations in NumPy are in tests/oracles of a checkout; there is no {TESTS / 'oracles'}")
    sys.path.append(str(TESTS))
    from oracles.tag_continuous import TagContinuousOracle
    from oracles.tag_gridworld import TagGridworldOracle

    config = {field.name: getattr(game, field.name) for field in game.own_fields()}
    if game.name() == "tag_gridworld":
        return lambda: TagGridworldOracle(**config)
    program = FunctionManager("cpu").compile(SINCOS, kernels=[SINCOS_KERNEL])

    def sincos(x: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:  # NumPy's differ in the last bit
        angle = torch.from_numpy(x)
        sine, cosine = torch.empty_like(angle), torch.empty_like(angle)
        program.launch("map_sincos", len(x), x=angle, s=sine, c=cosine, n=len(x))
        return sine, cosine

    functions = {"sin": lambda x: sincos(x)[0].numpy(), "cos": lambda x: sincos(x)[1].numpy()}
    return lambda: TagContinuousOracle(**functions, **config)


def on_cpu(game: Env, num_envs: int, network: nn.Module, device: torch.device, steps: int) -> tuple[Stages, State]:
    """Simulate in NumPy, one environment after another: the time it took, and the state that it ends with."""
    make = oracle_class(game)
    oracles = [make() for _ in range(num_envs)]
    fields = [field.name for field in game.state if not field.shared]
    # Never stepped: starts and actions are drawn from its random streams. What the starts cost is not counted.
    streams = VecEnv(game, num_envs, device)
    sampler, stages = Sampler(streams), Stages(device)
    obs = torch.empty((num_envs, game.num_agents, *game.layout.observation.shape), pin_memory=device.type == "cuda")

    def begin(chosen: Iterable[int]) -> None:
        starts = {name: streams.state[name].cpu().numpy() for name in fields}
        for e in chosen:
            oracles[e].elapsed_steps, oracles[e].active = 0, np.ones(game.num_agents, bool)
            for name in fields:
                setattr(oracles[e], name, starts[name][e].copy())

    def observe() -> None:
        for row, oracle in zip(obs.numpy(), oracles, strict=True):
            row[:] = oracle.observe()

    streams.reset(seed=SEED)
    begin(range(num_envs))
    observe()
    sampler.sample(network(obs.to(device)))  # what loads or compiles at first use is not counted
    for _ in range(steps):
        with stages("copying"):
            rows = obs.to(device)
        with stages("model"):
            sample = sampler.sample(network(rows))
        with stages("copying"):
            actions = sample.actions.cpu().numpy()
        with stages("simulating"):
            for oracle, action in zip(oracles, actions, strict=True):
                oracle.step(action)
        ended = np.array([not oracle.active.any() for oracle in oracles])
        if ended.any():
            streams.reset(mask=ended)
            begin(np.flatnonzero(ended))
        streams.elapsed_steps.copy_(torch.tensor([oracle.elapsed_steps for oracle in oracles]))
        with stages("simulating"):
            observe()
    state = {name: np.stack([getattr(oracle, name) for oracle in oracles]) for name in fields}
    return stages, {
        **state,
        "elapsed_steps": np.array([oracle.elapsed_steps for oracle in oracles], np.int32),
        "obs": obs.numpy(),
    }


def on_device(game: Env, num_envs: int, network: nn.Module, device: torch.device, steps: int) -> tuple[Stages, State]:
    """The same on the device alone."""
    env = VecEnv(game, num_envs, device)  # an environment whose episode ends begins the next one in the same step
    sampler, stages, buffers = Sampler(env), Stages(device), env.step_buffers()
    env.reset(seed=SEED, out=buffers)
    env.step(sampler.sample(network(buffers.obs)).actions, out=buffers)  # not counted, as above
    env.reset(seed=SEED, out=buffers)
    with stages("all"):
        for _ in range(steps):
            env.step(sampler.sample(network(buffers.obs)).actions, out=buffers)
    env.raise_for_faults()
    state = {field.name: env.state[field.name] for field in game.state if not field.shared}
    state |= {"elapsed_steps": env.elapsed_steps, "obs": buffers.obs}
    return stages, {name: tensor.cpu().numpy() for name, tensor in state.items()}


@torch.no_grad()
def main(options: Options) -> None:
    """Measure and compare."""
    chosen = {name: getattr(options, name) for name in ("num_taggers", "num_runners", "full_observation")}
    game = configure(options.game, **{name: value for name, value in chosen.items() if value is not None})
    device = FunctionManager(options.device).device
    torch.manual_seed(SEED)
    layers = (
        nn.Linear(game.obs_dim, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, game.layout.action.num_logits),
    )
    network = nn.Sequential(*layers).to(device)

    if options.repeats < 1:
        sys.exit(f"--repeats is {options.repeats}; expected at least 1")
    kinds = [("NumPy on the CPU", options.cpu_envs, on_cpu), ("all on the device", options.cpu_envs, on_device)]
    if options.num_envs != options.cpu_envs:
        kinds.append(("all on the device", options.num_envs, on_device))
    stages: list[list[Stages]] = [[] for _ in kinds]
    states: list[State] = []
    for _ in range(options.repeats):
        states = []
        for found, (_, num_envs, run) in zip(stages, kinds, strict=True):
            taken, state = run(game, num_envs, network, device, options.steps)
            found.append(taken)
            states.append(state)
    expected, found_state, *_ = states

    table = Table(
        "", *(Column(name, justify="right") for name in "envs env-steps/s agent-steps/s ratio quartiles".split())
    )
    rows = []
    for found, (name, num_envs, _) in zip(stages, kinds, strict=True):
        rates = [num_envs * options.steps / sum(each.seconds.values()) for each in found]
        rows.append({"where": name, "num_envs": num_envs, **spread("env_steps_per_s", rates, 0)})
        rate, (first, third) = rows[-1]["env_steps_per_s"], rows[-1]["env_steps_per_s_quartiles"]
        ratio = f"{rate / rows[0]['env_steps_per_s']:,.1f}"
        numbers = f"{rate:,.0f}", f"{rate * game.num_agents:,.0f}", ratio, f"{first:,.0f} … {third:,.0f}"
        table.add_row(name, f"{num_envs:,}", *numbers)
    if options.json:
        common = {**provenance(device), "cpu": processor_name(), "game": options.game, "num_agents": game.num_agents}
        common |= {"config": {name: value for name, value in chosen.items() if value is not None}}
        common |= {"steps": options.steps, "repeats": options.repeats}
        options.json.write_text(json.dumps({**common, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, where a copy costs nothing"
    print(f"{options.game}, {game.num_agents} agents, {options.steps} steps; the network is on {where}")
    Console().print(table)
    last = stages[0][-1].seconds
    whole = sum(last.values())
    shares = ", ".join(f"{name} {seconds / whole:.1%}" for name, seconds in sorted(last.items(), reverse=True))
    print(f"time of the first, on one core of {os.cpu_count()}: {shares}")
    print("the model is network and sampling; ratios are of env-steps/s, steps of all environments")
    different = [name for name in expected if expected[name].tobytes() != found_state[name].tobytes()]
    if different:
        sys.exit(f"after {options.steps} steps the two differ in {', '.join(different)}; expected bitwise equal states")
    print(f"after {options.steps} steps all {options.cpu_envs} environments are bitwise equal in both")


if __name__ == "__main__":
    main(tyro.cli(Options))
