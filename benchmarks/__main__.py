"""``python -m benchmarks PEER``: installs a peer in an environment of its own and measures it and us in alternation."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from benchmarks.environments import ROOT, python_of
from benchmarks.errors import BenchmarkError
from benchmarks.peers import PEERS
from benchmarks.summary import compared
from benchmarks.workload import Algorithm, Kind, Peer, Request, Workload
from gpu_vecenv.engine.timing import processor_name

REPEATS, QUICK_REPEATS = 10, 3
# JAX takes most of a GPU's memory at its start otherwise.
VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}


class Side:
    """The process of one side; see ``side.py`` for what it reads and prints."""

    def __init__(self, name: str, python: str | Path, request: Request, quick: bool) -> None:
        variables = {**os.environ, **VARIABLES}
        if request.device == "cpu":
            variables["JAX_PLATFORMS"] = "cpu"
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - close() does
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.side", name],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.ready = self._ask(json.dumps({**request.as_dict(), "quick": quick}))
        except BaseException:
            self.close()
            raise

    def repeat(self) -> dict[str, Any]:
        """One timed repeat."""
        return self._ask("repeat")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended: its output says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            status = self._process.wait()
            self._log.seek(0)
            output = "\n".join(self._log.read().strip().splitlines()[-15:])
            raise BenchmarkError(f"the process of {self.name} ended with status {status}:\n{output}")
        answer: dict[str, Any] = json.loads(reply)
        return answer


def measure(
    name: str, peer: Peer, workload: Workload, arguments: argparse.Namespace, python: str | Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """One row, and what each side said when it was ready."""
    device = "cpu" if peer.cpu_only else arguments.device
    ours = Request(workload, arguments.device, arguments.precision, None, arguments.processors)
    theirs = Request(workload, device, arguments.precision, arguments.published, arguments.processors)
    with (
        Side("gpu_vecenv", sys.executable, ours, arguments.quick) as first,
        Side(name, python, theirs, arguments.quick) as second,
    ):
        times: dict[Side, list[dict[str, Any]]] = {first: [], second: []}
        for repeat in range(arguments.repeats):
            for side in (first, second) if repeat % 2 == 0 else (second, first):
                times[side].append(side.repeat())
        row = {**workload.row(), "num_agents": first.ready["num_agents"], "precision": arguments.precision}
        if first.ready["num_agents"] != second.ready["num_agents"]:
            raise BenchmarkError(
                f"{workload.game} has {first.ready['num_agents']} agents here and {second.ready['num_agents']} in "
                f"{peer.title}: the games are not the same"
            )
        row |= {"peer": second.ready.get("title", peer.title), "ours_device": arguments.device, "peer_device": device}
        row |= {key: second.ready[key] for key in ("script", "peer_device_name") if key in second.ready}
        row |= compared(times[first], times[second])
        for key, side in (("ours", first), ("theirs", second)):
            row[f"{key}_preparation_s"] = side.ready["preparation_s"]
        return row, first.ready, second.ready


def workloads_of(peer: Peer, arguments: argparse.Namespace) -> tuple[Workload, ...]:
    """Those that the command line names."""
    workloads = peer.workloads(arguments.device)
    if not workloads:
        other = "cuda" if peer.cuda else "cpu"
        raise BenchmarkError(f"{peer.title} does not run on {arguments.device!r} here; use --device {other}")
    workloads = tuple(each for each in workloads if arguments.published or not each.needs_published)
    if arguments.algorithm:
        workloads = tuple(
            each for each in workloads if (each.kind, each.algorithm) == ("training", arguments.algorithm)
        )
        if not workloads:
            raise BenchmarkError(
                f"{peer.title} has no training by {arguments.algorithm!r} on {arguments.device!r} here; scripts that "
                "are not on PyPI need --published FOLDER"
            )
    wanted = {key: getattr(arguments, key) for key in ("kind", "game", "num_envs") if getattr(arguments, key)}
    workloads = tuple(each for each in workloads if all(getattr(each, key) in wanted[key] for key in wanted))
    if not workloads:
        told = ", ".join(f"{key} {' or '.join(map(str, values))}" for key, values in wanted.items())
        raise BenchmarkError(f"{peer.title} has no workload on {arguments.device!r} here with {told}")
    if arguments.quick:  # several sizes become the same one
        workloads = tuple({(each.kind, each.game, each.algorithm): each.reduced() for each in workloads}.values())
    return workloads


def rows(
    name: str, peer: Peer, arguments: argparse.Namespace, results: dict[str, Any], known: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Measure the workloads one by one that ``known`` does not have; what they have in common is in ``results``."""
    start, workloads = time.monotonic(), workloads_of(peer, arguments)
    python = python_of(name, peer, arguments.device) if arguments.install else sys.executable
    for workload in workloads:
        if any(workload.row().items() <= row.items() for row in known):
            continue
        if arguments.max_seconds is not None and time.monotonic() - start >= arguments.max_seconds:
            print(f"{arguments.max_seconds} s are over: --resume measures the other rows", file=sys.stderr)
            return
        row, ours, theirs = measure(name, peer, workload, arguments, python)
        common = {**ours["provenance"], "versions": theirs["versions"]}
        if known and (changed := [key for key in common if results.get(key) != common[key]]):
            changed.sort(key=lambda key: key != "commit")  # the likeliest reason comes first
            told = ", ".join(f"{key} {results.get(key)}, now {common[key]}" for key in changed)
            raise BenchmarkError(f"{arguments.json} has rows of {told}; expected the same, or another file")
        results |= common
        yield row


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("peer", choices=PEERS, help="the other library")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, help=f"of each side; default {REPEATS}, with --quick {QUICK_REPEATS}")
    parser.add_argument(
        "--precision",
        choices=("float32", "tf32"),
        help="of matrix products of both sides; default: tf32 on cuda, float32 on cpu",
    )
    parser.add_argument("--json", type=Path, help="file that also receives the results")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json has, and measure the others")
    parser.add_argument("--max-seconds", type=float, help="begin no row later than that; --resume goes on")
    parser.add_argument("--quick", action="store_true", help="sizes of tests: the rates mean nothing")
    parser.add_argument("--processors", type=int, help="of the host, that each side may use; default: all")
    parser.add_argument("--algorithm", choices=get_args(Algorithm), help="measure training by this one alone")
    parser.add_argument("--kind", choices=get_args(Kind), nargs="+", help="measure these alone")
    parser.add_argument("--game", nargs="+", help="measure these alone")
    parser.add_argument("--num-envs", type=int, nargs="+", help="measure rows of so many environments alone")
    parser.add_argument("--published", help="folder with the scripts that the peer publishes outside of PyPI")
    parser.add_argument(
        "--no-install",
        dest="install",
        action="store_false",
        help="take the peer from the current interpreter and install nothing",
    )
    parsed = parser.parse_args(arguments)
    if parsed.repeats is None:
        parsed.repeats = QUICK_REPEATS if parsed.quick else REPEATS
    if parsed.repeats < 2:
        parser.error(f"--repeats is {parsed.repeats}; expected at least 2, for quartiles")
    available = len(os.sched_getaffinity(0))
    if parsed.processors is not None and not 1 <= parsed.processors <= available:
        parser.error(f"--processors is {parsed.processors}; expected 1 to {available}")
    if parsed.precision is None:
        parsed.precision = "tf32" if parsed.device == "cuda" else "float32"
    if parsed.precision == "tf32" and parsed.device == "cpu":
        parser.error("--precision is tf32, which a CPU does not have; expected float32")
    if parsed.json and not parsed.json.resolve().parent.is_dir():
        parser.error(f"--json is {parsed.json}; expected a file in a folder that exists")
    if parsed.resume and not parsed.json:
        parser.error("--resume goes on with the rows of --json; expected both")
    if parsed.published and not Path(parsed.published).is_dir():
        parser.error(f"--published is {parsed.published}; expected a folder")
    parsed.published = parsed.published and str(Path(parsed.published).resolve())
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a JSON line per row and one of what they have in common, and write --json."""
    options = parse(arguments)
    peer: Peer = importlib.import_module(f"benchmarks.peers.{options.peer}").PEER
    results: dict[str, Any] = {
        "peer": options.peer,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "repeats": options.repeats,
        "quick": options.quick,
        "cpu": processor_name(),
    }
    measured: list[dict[str, Any]] = []
    if options.resume and options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        measured, results = before.pop("rows"), before
    try:
        for row in rows(options.peer, peer, options, results, tuple(measured)):
            measured.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**results, "rows": measured}, indent=1) + "\n")
    except BenchmarkError as error:
        sys.exit(f"{error}\n{peer.note}".rstrip())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
