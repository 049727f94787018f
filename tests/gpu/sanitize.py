"""Every kernel under the four tools of compute-sanitizer, each shown before to catch a fault of its own kind.

    python3 tests/gpu/sanitize.py RESULTS [TOOL…]      tools: memcheck racecheck initcheck synccheck (default: all)

RESULTS gets the logs and, of tools that found nothing, receipts/NAME.json, to be copied to docs/reliability/receipts.
A tool counts only if it reports its planted kernel (planted_kernels.py), and if the run over all kernels
(step_games.py) comes to its end with the same bits as without the tool. The exit code is 0 if all tools count and none
found anything.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import receipts

from gpu.planted_kernels import PLANTED

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = tuple(PLANTED)
FOUND = 97  # exit code of a tool that found something; 0 and others are the program's own
PLANTED_SECONDS, GAMES_SECONDS = 120, 1500  # a barrier that nobody else comes to may wait for ever
PARTS = max(4, (os.cpu_count() or 1) // len(TOOLS))  # processes in which each tool has its share of the games
SUMMARY = re.compile(r"^========= ((?:ERROR|RACECHECK) SUMMARY: (\d+) .*)$", re.MULTILINE)
END = re.compile(r"^stepped (\d+) environments$", re.MULTILINE)
# API errors are left out: cuda.bindings asks an older driver for functions it may lack, which is no fault.
OPTIONS = ("--error-exitcode", str(FOUND), "--report-api-errors", "no")
# A write past one tensor would else fall into the next, which is none to the tool.
MORE_OPTIONS = {"memcheck": ("--padding", "512")}
SOURCES = (
    "gpu_vecenv/compile/codegen.py",
    "gpu_vecenv/compile/engine_kernels.py",
    "gpu_vecenv/declare/layout.py",
    "gpu_vecenv/engine/vec_env.py",
    "gpu_vecenv/engine/step_buffers.py",
    "gpu_vecenv/engine/data_manager.py",
    "gpu_vecenv/engine/sampler.py",
    "gpu_vecenv/train/convolution_kernels.py",
    "gpu_vecenv/train/fused_rollout.py",
    "gpu_vecenv/train/gru.py",
    "gpu_vecenv/train/gru_kernels.py",
    "gpu_vecenv/train/iteration_kernels.py",
    "gpu_vecenv/train/learner_kernels.py",
    "gpu_vecenv/train/normalizer_kernels.py",
    "gpu_vecenv/train/layers.py",
    "gpu_vecenv/train/layerwise.py",
    "gpu_vecenv/train/layerwise_kernels.py",
    "gpu_vecenv/train/optimizer.py",
    "gpu_vecenv/train/perceptron.py",
    "gpu_vecenv/train/policy_kernels.py",
    "gpu_vecenv/train/recurrent_cells.py",
    "gpu_vecenv/train/rollout_tiles.py",
    "gpu_vecenv/engine/digest.py",
    "gpu_vecenv/compile/backends/cuda*.py",
    "gpu_vecenv/envs/*.py",
    "tests/games/*.cu",
    "tests/games/*.py",
    "tests/gpu/planted_kernels.py",
    "tests/gpu/sanitize.py",
    "tests/gpu/step_games.py",
)


class Outcome(NamedTuple):
    """What a tool said of one program: its exit code, findings (None: no summary), the summary's words, the output."""

    code: int
    findings: int | None
    summary: str
    output: str


def outcome(code: int, output: str) -> Outcome:
    """Read the output of a tool and of the program under it."""
    summaries = SUMMARY.findall(output)
    if not summaries:
        return Outcome(code, None, "no summary", output)
    words, _ = summaries[-1]
    return Outcome(code, max(int(count) for _, count in summaries), words, output)


def run(command: Sequence[str], seconds: float) -> Outcome:
    """Run to the end, or until its time is over (exit code 124)."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # torch's allocator would hide writes past a tensor: every tensor gets an allocation of its own.
    here = {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env={**os.environ, **here},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            output, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the tool and the program below it
            output, _ = running.communicate()
            return outcome(124, output)
    return outcome(running.returncode, output)


def step_games(command: Sequence[str]) -> Outcome:
    """All games, in several processes at once; one that says nothing, or fails, is not outvoted by the others."""
    commands = [[*command, str(HERE / "step_games.py"), "--part", f"{k}", "--parts", f"{PARTS}"] for k in range(PARTS)]
    with ThreadPoolExecutor(PARTS) as pool:
        parts = list(pool.map(lambda one: run(one, GAMES_SECONDS), commands))
    output = "".join(part.output for part in parts)
    found = [part.findings for part in parts if part.findings is not None]
    worst = max(parts, key=lambda part: (part.findings is None, part.code != 0, part.findings))
    whole = len(found) == PARTS
    return Outcome(worst.code, sum(found) if whole else None, worst.summary if whole else "no summary", output)


def examine(tool: str, reference: Outcome, results: Path, sanitizer: str, python: str) -> str | None:
    """One tool over its planted kernels, then over all; None if it counts and found nothing, else what is wrong."""
    command = [sanitizer, "--tool", tool, *OPTIONS, *MORE_OPTIONS.get(tool, ()), python]
    caught: dict[str, str] = {}
    for kernel in PLANTED[tool]:
        said = run([*command, str(HERE / "planted_kernels.py"), kernel], PLANTED_SECONDS)
        (results / f"{tool}-{kernel}.txt").write_text(said.output, encoding="utf-8")
        if said.findings and said.code == FOUND:
            caught[kernel] = said.summary
    if not caught:
        return f"void: it did not report its planted kernel, {' nor '.join(PLANTED[tool])}"
    start = time.monotonic()
    said = step_games(command)
    seconds = time.monotonic() - start
    (results / f"{tool}.txt").write_text(said.output, encoding="utf-8")
    if said.findings is None:
        return f"void: exit code {said.code} and no summary"
    if said.findings:
        return f"{said.summary}; see {tool}.txt"
    if said.code != 0 or len(END.findall(said.output)) != PARTS:
        return f"void: the program ended early, exit code {said.code}"
    if lines_of(said) != lines_of(reference):
        return "void: other bits than without the tool"
    receipts.write(
        tool,
        what=f"compute-sanitizer's {tool} over every kernel: all games, four numbers of environments, three autoreset "
        "modes, masked resets, refused actions, agents as rows",
        command=f"python tests/gpu/sanitize.py RESULTS {tool}",
        metrics={
            "findings": said.findings,
            "summary": said.summary,
            "environments": sum(map(int, END.findall(said.output))),
            "seconds": round(seconds),
        },
        planted=caught,
        python=SOURCES,
        folder=results / "receipts",
    )
    return None


def lines_of(said: Outcome) -> list[str]:
    """What the program itself printed."""
    return [line for line in said.output.splitlines() if re.search(r" [0-9a-f]{16}$", line)]


def main(
    results: Path, tools: Sequence[str] = (), sanitizer: str = "compute-sanitizer", python: str = sys.executable
) -> int:
    """Examine with all tools at once; the exit code."""
    tools = tools or TOOLS
    if unknown := set(tools) - set(TOOLS):
        raise SystemExit(f"unknown tools {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    results.mkdir(parents=True, exist_ok=True)
    reference = step_games([python])  # it also fills the cache of compiled kernels
    (results / "without.txt").write_text(reference.output, encoding="utf-8")
    if reference.code != 0 or not lines_of(reference):
        print(f"without a tool: exit code {reference.code}; see without.txt")
        return 1
    with ThreadPoolExecutor(len(tools)) as pool:
        running = {pool.submit(examine, tool, reference, results, sanitizer, python): tool for tool in tools}
        said = []
        for one in as_completed(running):  # each as it ends, so that a run that is cut off has said what it found
            said.append(one.result())
            print(f"{running[one]}: {said[-1] or 'its planted kernel seen, 0 findings in ours'}", flush=True)
    return 1 if any(said) else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
