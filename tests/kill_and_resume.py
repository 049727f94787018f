"""Kill a training run repeatedly, resume it each time, and compare it with an uninterrupted run.

    python tests/kill_and_resume.py --kills 50

SIGKILL comes at random instants: during the start, in an iteration, while a checkpoint is written, during the
evaluation at the end. All weights after each iteration, all metrics but times, the last and the best checkpoint and the
evaluation must be bitwise equal. The exit code is 0 if they are, else 1.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from support.processes import child_environment

from gpu_vecenv.train.checkpoint import load_checkpoint

OPTIONS = "--num-envs 8 --num-steps 8 --num-minibatches 4 --hidden-sizes 16 --episodes 16 --checkpoint-seconds 0"
STEPS = 8 * 8  # of an iteration with these options
TIMES = re.compile("seconds|agent_steps_per_s|.*_time_fraction")  # columns that are not reproducible
DEADLINE = 120.0  # seconds within which a process must reach the point of its kill
FILE = re.compile(r"iteration-(\d+)\.safetensors")
KINDS = ("start", "iteration", "saving", "evaluation")


class StuckError(RuntimeError):
    """A process neither ended nor reached the point of its kill."""


def process(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Run the command line in a new process; its output and errors are written to two files."""
    with (folder / "output.txt").open("w") as output, (folder / "errors.txt").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "gpu_vecenv.cli", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            env=child_environment(),
        )


def wait_for(running: subprocess.Popen[str], there: Callable[[], bool], pause: float = 0.005) -> None:
    """Poll until ``there()`` or until the process has ended."""
    end = time.monotonic() + DEADLINE
    while not there() and running.poll() is None:
        if time.monotonic() > end:
            raise StuckError(f"the process has not reached the point of its kill within {DEADLINE:.0f} s")
        time.sleep(pause)


@contextlib.contextmanager
def ended(running: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
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


def same_bits(one: Path, other: Path) -> bool:
    """Whether the tensors of two checkpoints are bitwise equal."""
    (tensors, _), (others, _) = load_checkpoint(one), load_checkpoint(other)
    return tensors.keys() == others.keys() and all(
        tensors[name].flatten().view(torch.uint8).equal(others[name].flatten().view(torch.uint8)) for name in tensors
    )


def differences(one: Path, other: Path) -> list[str]:
    """Differences between two runs that must be bitwise equal."""
    found = []
    rows, others = table(one), table(other)
    if [row["iteration"] for row in rows] != [row["iteration"] for row in others]:
        found.append(f"iterations: {[row['iteration'] for row in rows]} and {[row['iteration'] for row in others]}")
    for row, another in zip(rows, others, strict=False):
        if different := [key for key in row.keys() | another.keys() if row.get(key) != another.get(key)]:
            found.append(f"row {row['iteration']} and row {another['iteration']} differ in {sorted(different)}")
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
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> list[str]:
    """Train once uninterrupted and once with kills; returns the differences."""
    rng = random.Random(seed)
    kinds = order_of_kills(kills, rng)
    iterations = max(20, 2 * kills)
    command = ["train", game, *OPTIONS.split(), "--digests", "--device", device, "--seed", seed]
    command += ["--total-steps", iterations * STEPS]
    alone, run = folder / "alone", folder / "killed"
    last = run / "checkpoints" / f"iteration-{iterations:08d}.safetensors"

    begin = time.monotonic()
    undisturbed = process(folder, *command, "--out", alone)
    with ended(undisturbed):
        wait_for(undisturbed, lambda: saved(alone) > 0)
        first = time.monotonic()
        wait_for(undisturbed, lambda: saved(alone) == iterations)
        finished = time.monotonic()
        undisturbed.wait(DEADLINE)
    if undisturbed.returncode != 0:
        return [f"the undisturbed run ended with {undisturbed.returncode}: {(folder / 'errors.txt').read_text()}"]
    longest = {"start": first - begin, "iteration": (finished - first) / iterations, "saving": 0.0}
    longest["evaluation"] = time.monotonic() - finished
    tell(", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest.items() if seconds))

    def killed(kind: str) -> str:
        """Start or resume, kill, and describe when; or that the run had ended before."""
        before, written = saved(run), inode(last)
        left = sum(kind in ("iteration", "saving") for kind in kinds[done:])
        target = before + rng.randint(1, max((iterations - before) // (left + 1), 1))
        delay = rng.uniform(0, longest[kind])

        def there() -> bool:
            if kind == "start":
                return True
            if kind == "evaluation" or target > iterations:
                return inode(last) != written
            draft = kind == "iteration" or any(name.endswith(".draft") for name in names(run))
            return draft and saved(run) >= target

        with ended(process(folder, *(["train", "--resume", run] if before else [*command, "--out", run]))) as running:
            # A draft exists for only some milliseconds.
            wait_for(running, there, pause=0.0 if kind == "saving" else 0.005)
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
                tell(f"not killed, ended before: {where}")
                if over > 3 * kills + 3:
                    return ["the run always ends before it is killed"]
            else:
                done += 1
                tell(f"kill {done}, {where}")
    except StuckError as error:
        return [str(error)]
    begun = saved(run) > 0
    with ended(process(folder, *(["train", "--resume", run] if begun else [*command, "--out", run]))) as end:
        end.wait(DEADLINE)
    if end.returncode != 0:
        return [f"the last process ended with {end.returncode}: {(folder / 'errors.txt').read_text()}"]
    return differences(alone, run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of kills")
    parser.add_argument("--game", default="tag_gridworld", help="registered name, or the file that declares it")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run and of the kills")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = kill_and_resume(Path(folder), chosen.kills, chosen.game, chosen.device, chosen.seed)
    for line in found:
        print(line)
    print(f"{chosen.kills} kills, {f'{len(found)} differences' if found else 'bitwise equal'}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
