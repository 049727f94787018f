"""tests/gpu/spread.py: commands share GPUs as their lines say, and none outlives the time."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "gpu" / "spread.py"


def spread(
    tmp_path: Path, lines: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, int]]]:
    (tmp_path / "jobs").write_text(lines)
    command = [sys.executable, str(SCRIPT), str(tmp_path / "jobs"), str(tmp_path / "out"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done, json.loads((tmp_path / "out" / "jobs.json").read_text())


def test_jobs_wait_for_their_share_of_a_gpu(tmp_path: Path) -> None:
    """The third needs a whole one, so the fourth, which ends the first two, begins before it."""
    occupied = f"echo $CUDA_VISIBLE_DEVICES; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    lines = f"0.5 half {occupied}\n# of two GPUs\n1 whole {occupied}\n1 late test -e {tmp_path}/go\n"
    lines += f"0:0.5 last touch {tmp_path}/go\n"
    done, found = spread(tmp_path, lines, "--gpus", "2")
    assert done.returncode == 0, done
    assert [found[name]["gpu"] for name in ("half", "whole", "last")] == [0, 1, 0] and "late" in found
    assert (tmp_path / "out" / "whole.txt").read_text() == "1\n"


def test_failures_and_what_is_late_are_told(tmp_path: Path) -> None:
    lines = f"1 fails exit 7\n1 endless flock {tmp_path}/lock sleep 1000 & wait\n1 never true\n"
    done, found = spread(tmp_path, lines, "--gpus", "1", "--max-seconds", "3")
    assert done.returncode == 1 and "fails: exit code 7" in done.stdout
    assert found["fails"]["code"] == 7 and found["endless"]["interrupted"] and "never" not in found
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process of the command holds it any more
