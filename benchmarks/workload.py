"""What both sides of a comparison run, and what a peer's module declares. Imports the standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["simulation", "training"]
Precision = Literal["float32", "tf32"]
Algorithm = Literal["ppo", "ppo_cnn", "ppo_rnn", "mappo_rnn", "pqn_vdn_rnn"]  # "cnn": of images; "rnn": with a GRU


@dataclass(frozen=True)
class Workload:
    """One row of the results, the same for both sides.

    A run of a simulation is ``num_steps`` steps with random actions; a run of a training is ``updates`` iterations of
    ``algorithm`` with rollouts of ``num_steps``.
    """

    kind: Kind
    game: str
    num_envs: int
    num_steps: int
    updates: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)  # of the game
    # Training: of both sides.
    algorithm: Algorithm = "ppo"
    num_epochs: int = 4
    num_minibatches: int = 4
    hidden_size: int = 64  # of every hidden layer

    @property
    def needs_published(self) -> bool:
        """Whether the peer's side is a script that it publishes outside of PyPI, and nothing else."""
        return self.algorithm != "ppo"

    @property
    def env_steps(self) -> int:
        """Env-steps of one run."""
        return self.num_envs * self.num_steps * (self.updates if self.kind == "training" else 1)

    def reduced(self) -> Workload:
        """The same in a size that takes a fraction of a second."""
        updates = min(self.updates, 2)
        sizes = {"num_envs": min(self.num_envs, 8), "num_steps": min(self.num_steps, 20)}
        return dataclasses.replace(self, updates=updates, num_minibatches=min(self.num_minibatches, 4), **sizes)

    def row(self) -> dict[str, Any]:
        """The entries of a row of results that name the workload."""
        row: dict[str, Any] = {key: getattr(self, key) for key in ("kind", "game", "num_envs", "num_steps")}
        row["config"] = dict(self.config)
        if self.kind == "training":
            keys = "algorithm", "updates", "num_epochs", "num_minibatches", "hidden_size"
            row |= {key: getattr(self, key) for key in keys}
        return row


@dataclass(frozen=True)
class Request:
    """What the process of one side gets: a workload, where to run it, and the precision of float32 matrix products."""

    workload: Workload
    device: str  # "cpu" or "cuda"
    precision: Precision
    published: str | None = None  # folder with the peer's own scripts
    processors: int | None = None  # of the host, that the process may use; None: all

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Request:
        """The inverse of ``as_dict``."""
        return cls(**{**values, "workload": Workload(**values["workload"])})


@dataclass(frozen=True)
class Prepared:
    """One side, ready to be timed.

    Attributes:
        run: One run of the workload; returns when the device has finished it.
        num_agents: Agents of an environment.
        facts: What else belongs into the results: the device, the names of what was measured.
    """

    run: Callable[[], object]
    num_agents: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """What a module of ``benchmarks.peers`` declares as PEER, beside its function ``prepare(request) -> Prepared``."""

    title: str
    packages: tuple[str, ...]  # distributions whose versions are recorded
    requirements: tuple[str, ...]  # of pip
    cpu: tuple[Workload, ...] = ()
    cuda: tuple[Workload, ...] = ()
    cuda_requirements: tuple[str, ...] = ()  # besides ``requirements``, with device "cuda"
    no_deps: tuple[str, ...] = ()  # installed without what they require
    cpu_only: bool = False  # the peer's side runs on the CPU even if ours runs on a GPU
    note: str = ""  # printed where the environment cannot be made or the side does not start

    def workloads(self, device: str) -> tuple[Workload, ...]:
        """Those of a device; empty where the peer does not run on it."""
        return self.cuda if device == "cuda" else self.cpu
