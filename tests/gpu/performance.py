"""The measurements of this library alone, each into a file for ``python -m benchmarks.performance``.

    python3 tests/gpu/performance.py FOLDER [MEASUREMENT…] [--max-seconds 540]

A file is FOLDER/<card>-<measurement>.json. Measurements whose file is of this commit are left out, so that a call that
was interrupted is repeated. One that takes more than nine minutes is ended; its rows are kept, and the next call
measures the others. With --max-seconds it begins none that may last longer, except one that is the first: call it until
it does not exit with 3. The exit code is 1 if a measurement has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from figures import UNFINISHED
from measurements import ROOT, refuse_changes

from benchmarks.performance import MEASUREMENTS, filled
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.timing import provenance

MOST_SECONDS = 540  # of a measurement


def card_of(device: torch.device) -> str:
    """A GPU's name in those of files, such as h100; cpu without one."""
    if device.type == "cpu":
        return "cpu"
    found = re.search(r"[A-Z]*\d\w*", torch.cuda.get_device_name(device))
    return found[0].lower() if found else "gpu"


def file_of(name: str, card: str) -> str:
    """Its name; of what is measured on a CPU it begins with cpu."""
    return f"{'cpu' if MEASUREMENTS[name].on_cpu else card}-{name}.json"


def measure(name: str, file: Path, quick: bool) -> int:
    """Run the command, and move its file into its folder once it is complete; the command's exit code."""
    unfinished = file.parent / "unfinished"  # files that lack rows
    unfinished.mkdir(parents=True, exist_ok=True)
    measurement, written = MEASUREMENTS[name], unfinished / file.name
    command = filled(measurement.quick if quick else measurement.command, written, file.with_suffix(".svg"))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    print(f"{name}: {command}", flush=True)
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            print(f"{name}: more than {MOST_SECONDS} s; the next call measures the rest", flush=True)
            return UNFINISHED
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code == 0:
        written.replace(file)
    return code


def left_of(names: list[str], folder: Path, card: str, commit: str) -> list[str]:
    """Measurements without a file; SystemExit if there is one of another commit."""
    left = []
    for name in names:
        file = folder / file_of(name, card)
        if file.exists():
            refuse_changes(file, json.loads(file.read_text(encoding="utf-8")), {"commit": commit})
        else:
            left.append(name)
    return left


def main() -> None:
    """Measure what the folder lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "measurements",
        nargs="*",
        metavar="MEASUREMENT",
        help=f"of {', '.join(MEASUREMENTS)}; by default all that need no RL library",
    )
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true", help="on a CPU with sizes of tests: the figures mean nothing")
    given = parser.parse_args()
    if unknown := sorted(set(given.measurements) - set(MEASUREMENTS)):
        parser.error(f"no measurements {', '.join(unknown)}; expected some of {', '.join(MEASUREMENTS)}")
    device = resolve_device("cpu" if given.quick else "cuda")
    start, gpus = time.monotonic(), torch.cuda.device_count()
    names = given.measurements or [name for name, measurement in MEASUREMENTS.items() if not measurement.clients]
    if given.quick:
        names = [name for name in names if MEASUREMENTS[name].quick]
    else:
        for name in [name for name in names if MEASUREMENTS[name].gpus > gpus]:
            print(f"{name} is left out: it needs {MEASUREMENTS[name].gpus} GPUs, and there is {gpus}", flush=True)
            names.remove(name)
    given.folder = given.folder.resolve()
    card, commit, codes = card_of(device), provenance(device)["commit"], []
    if not commit:
        sys.exit("the commit is unknown, as this is no git checkout; expected one, or the commit in $GPU_VECENV_COMMIT")
    left = left_of(names, given.folder, card, commit)
    for count, name in enumerate(left):
        if count and time.monotonic() - start + MEASUREMENTS[name].seconds > given.max_seconds:
            print(f"left: {', '.join(left[count:])}; the same command measures them", flush=True)
            codes.append(UNFINISHED)
            break
        codes.append(measure(name, given.folder / file_of(name, card), given.quick))
        if codes[-1] not in (0, UNFINISHED):
            print(f"{name} has failed with {codes[-1]}", flush=True)
    sys.exit(1 if set(codes) - {0, UNFINISHED} else max(codes, default=0))


if __name__ == "__main__":
    main()
