"""PettingZoo's SISL games: a Python loop over its parallel environments, on the CPU."""

from __future__ import annotations

from benchmarks.peers.parallel_loop import prepare_loop
from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "pursuit", 100, 10),)
PEER = Peer(
    "PettingZoo SISL",
    ("pettingzoo", "numpy", "scipy"),
    ("pettingzoo>=1.25", "pygame-ce>=2.5", "scipy>=1.11"),
    cpu=WORKLOADS,
    cuda=WORKLOADS,
    cpu_only=True,
)


def prepare(request: Request) -> Prepared:
    """Steps with random actions, see ``prepare_loop``."""
    from pettingzoo.sisl.pursuit.pursuit import parallel_env

    return prepare_loop(request, parallel_env)
