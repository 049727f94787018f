"""MPE2's particle games: a Python loop over PettingZoo's parallel environments, on the CPU."""

from __future__ import annotations

import importlib

from benchmarks.peers.parallel_loop import prepare_loop
from benchmarks.workload import Peer, Prepared, Request, Workload

WORKLOADS = (Workload("simulation", "simple_spread", 100, 10), Workload("simulation", "simple_tag", 100, 10))
PEER = Peer("mpe2", ("mpe2", "pettingzoo", "numpy"), ("mpe2>=1.1",), cpu=WORKLOADS, cuda=WORKLOADS, cpu_only=True)


def prepare(request: Request) -> Prepared:
    """Steps with random actions, see ``prepare_loop``."""
    return prepare_loop(request, importlib.import_module(f"mpe2.{request.workload.game}_v3").parallel_env)
