"""Kills a training run at random instants, resumes it each time, and compares it with an uninterrupted run.

SIGKILL comes during the start, in an iteration, while a checkpoint is written and during the evaluation at the end. All
weights after each iteration, all metrics but times, the last and the best checkpoint and the evaluation must be bitwise
equal.
"""

import contextlib
import csv
import itertools
import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.bitwise import equal_bits
from support.processes import child_environment
from support.warm_process import WarmProcess

from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from reliability.experiment import Experiment, Metrics, said

OPTIONS = "--num-envs 8 --num-steps 8 --num-minibatches 4 --hidden-sizes 16 --episodes 16 --checkpoint-seconds 0"
OPTIONS += " --best-episodes 8 --best-interval 0"
STEPS = 8 * 8  # of an iteration with these options
TIMES = re.compile("seconds|agent_steps_per_s|.*_time_fraction")  # columns that are not reproducible
DEADLINE = 120.0  # seconds within which a process must reach the point of its kill
FILE = re.compile(r"iteration-(\d+)\.safetensors")


class StuckError(RuntimeError):
    """A process neither ended nor reached the point of its kill."""


def process(folder: Path, *arguments: object) -> WarmProcess:
    """Run the command line in a new process; its output and errors are written to two files."""
    output, errors = folder / "output.txt", folder / "errors.txt"
    command = ("-m", "gpu_vecenv.cli", *arguments)
    return WarmProcess(Path.cwd(), *command, environment=child_environment(), output=output, errors=errors)


def wait_for(running: WarmProcess, reached: Callable[[], bool], pause: float = 0.005) -> None:
    """Poll until ``reached()`` or until the process has ended."""
    end = time.monotonic() + DEADLINE
    while not reached() and running.poll() is None:
        if time.monotonic() > end:
            raise StuckError(f"the process has not reached the point of its kill within {DEADLINE:.0f} s")
        time.sleep(pause)


@contextlib.contextmanager
def ended(running: WarmProcess) -> Iterator[WarmProcess]:
    """Kill the process at exit."""
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def names(run: Path) -> list[str]:
    """File names in the folder of checkpoints."""
    folder = run / "checkpoints"
    return os.listdir(folder) if folder.exists() else []


def saved(run: Path) -> int:
    """The newest iteration that has a checkpoint, 0 if there is none."""
    return max((int(match[1]) for match in map(FILE.fullmatch, names(run)) if match), default=0)


def inode(path: Path) -> int:
    """Inode of a file, 0 if there is none; it changes when the file is replaced."""
    return path.stat().st_ino if path.exists() else 0


def table(run: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without times."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not TIMES.fullmatch(k)} for row in rows]


def evaluation_rows(run: Path) -> list[dict[str, str]]:
    """The rows of evaluations.csv without times; none if there is no such file."""
    path = run / "evaluations.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def same_bits(one: Path, other: Path) -> bool:
    """Whether the tensors of two checkpoints are bitwise equal."""
    return equal_bits(load_checkpoint(one)[0], load_checkpoint(other)[0])


def differences(one: Path, other: Path) -> list[str]:
    """Differences between two runs that must be bitwise equal."""
    found = []
    rows, others = table(one), table(other)
    if [row["iteration"] for row in rows] != [row["iteration"] for row in others]:
        found.append(f"iterations: {[row['iteration'] for row in rows]} and {[row['iteration'] for row in others]}")
    for row, another in zip(rows, others, strict=False):
        if different := [key for key in row.keys() | another.keys() if row.get(key) != another.get(key)]:
            found.append(f"row {row['iteration']} and row {another['iteration']} differ in {sorted(different)}")
    during = [evaluation_rows(run) for run in (one, other)]
    if during[0] != during[1]:
        found.append(f"evaluations.csv: {during[0]} and {during[1]}")
    evaluations = [json.loads((run / "evaluation.json").read_text()) for run in (one, other)]
    if evaluations[0] != evaluations[1]:
        found.append(f"evaluation.json: {evaluations[0]} and {evaluations[1]}")
    kept = [sorted(names(run)) for run in (one, other)]
    if kept[0] != kept[1]:
        found.append(f"files in checkpoints: {kept[0]} and {kept[1]}")
    for name in sorted({*kept[0]} & {*kept[1]}):
        paths = [run / "checkpoints" / name for run in (one, other)]
        if not same_bits(*paths):
            iterations = [load_checkpoint(path)[1]["iteration"] for path in paths]
            found.append(f"tensors in {name}, of the iterations {iterations[0]} and {iterations[1]}")
    return found


def order_of_kills(kills: int, rng: random.Random) -> list[str]:
    """Phase of each kill: the first before there is a checkpoint, some during the final evaluation."""
    first, last = max(kills // 10, 1), max(kills // 6, 1)
    middle = list(itertools.islice(itertools.cycle(("iteration", "saving", "iteration", "start")), kills))
    middle = middle[: max(kills - first - last, 0)]
    rng.shuffle(middle)
    return [*["start"] * first, *middle, *["evaluation"] * last][:kills]


def kill_and_resume(
    folder: Path,
    kills: int,
    game: str = "tag_gridworld",
    device: str = "cpu",
    *,
    seed: int,
    before_resuming: Callable[[Path], object] = lambda run: None,
) -> list[str]:
    """Train once uninterrupted and once with kills; returns the differences."""
    rng = random.Random(seed)
    kinds = order_of_kills(kills, rng)
    iterations = max(20, 2 * kills)
    command = ["train", game, *OPTIONS.split(), "--digests", "--device", device, "--seed", seed]
    command += ["--total-steps", iterations * STEPS]
    alone, run = folder / "alone", folder / "killed"
    last = run / "checkpoints" / f"iteration-{iterations:08d}.safetensors"

    started = time.monotonic()
    uninterrupted = process(folder, *command, "--out", alone)
    with ended(uninterrupted):
        wait_for(uninterrupted, lambda: saved(alone) > 0)
        first = time.monotonic()
        wait_for(uninterrupted, lambda: saved(alone) == iterations)
        finished = time.monotonic()
        uninterrupted.wait(DEADLINE)
    if uninterrupted.returncode != 0:
        return [f"the uninterrupted run ended with {uninterrupted.returncode}: {(folder / 'errors.txt').read_text()}"]
    longest = {"start": first - started, "iteration": (finished - first) / iterations, "saving": 0.0}
    longest["evaluation"] = time.monotonic() - finished
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest.items() if seconds))

    def start() -> WarmProcess:
        if not saved(run):
            return process(folder, *command, "--out", run)
        before_resuming(run)
        return process(folder, "train", "--resume", run)

    def killed(kind: str) -> str:
        """Start or resume, and kill; returns when that was, or that the run had ended before."""
        before, written = saved(run), inode(last)
        left = sum(kind in ("iteration", "saving") for kind in kinds[done:])
        target = before + rng.randint(1, max((iterations - before) // (left + 1), 1))
        delay = rng.uniform(0, longest[kind])

        def reached() -> bool:
            if kind == "start":
                return True
            if kind == "evaluation" or target > iterations:
                return inode(last) != written
            draft = kind == "iteration" or any(name.endswith(".draft") for name in names(run))
            return draft and saved(run) >= target

        with ended(start()) as running:
            # A draft exists for only some milliseconds.
            wait_for(running, reached, pause=0.001 if kind == "saving" else 0.005)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(delay)
        code, errors = running.returncode, (folder / "errors.txt").read_text()
        if code not in (0, -9) or "is used instead" in errors:
            raise StuckError(f"from iteration {before} on the process ended with {code}: {errors}")
        draft = ", a draft left" * any(name.endswith(".draft") for name in names(run))
        where = f"{kind}: iterations {before} to {saved(run)}{draft}"
        return f"{where}, evaluated" if code == 0 else where

    done, over = 0, 0
    try:
        while done < kills:
            where = killed(kinds[done])
            if where.endswith("evaluated"):
                over += 1
                print(f"not killed, ended before: {where}")
                if over > 3 * kills + 3:
                    return ["the run always ends before it is killed"]
            else:
                done += 1
                print(f"kill {done}, {where}")
    except StuckError as error:
        return [str(error)]
    with ended(start()) as end:
        end.wait(DEADLINE)
    if end.returncode != 0:
        return [f"the last process ended with {end.returncode}: {(folder / 'errors.txt').read_text()}"]
    return differences(alone, run)


@dataclass(kw_only=True)
class Resume(Experiment):
    """SIGKILL a training run repeatedly, resume it, and compare it bitwise with an uninterrupted run."""

    count: int = 50
    """Kills."""
    game: str = "tag_gridworld"
    """A registered name, or the file that declares it."""

    def measure(self) -> Metrics:
        with tempfile.TemporaryDirectory() as folder:
            self.failures += kill_and_resume(
                Path(folder), self.count, self.game, self.device, seed=self.seed, before_resuming=self.before_resuming
            )
        return {"kills": self.count, "game": self.game, "differences": len(self.failures)}

    def before_resuming(self, run: Path) -> None:
        """Called before each resumption."""

    def plant(self) -> Metrics:
        return {"a weight changes before a resumption": said(OtherWeight(count=2, seed=self.seed, device=self.device))}


@dataclass(kw_only=True)
class OtherWeight(Resume):
    def before_resuming(self, run: Path) -> None:
        path = run / "checkpoints" / f"iteration-{saved(run):08d}.safetensors"
        tensors, manifest = load_checkpoint(path)
        next(tensor for name, tensor in tensors.items() if name.startswith("policy")).view(-1)[0] += 1
        save_checkpoint(path, tensors, manifest)
