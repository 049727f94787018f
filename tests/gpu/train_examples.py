"""Examples of adapters whose tensors stay on the GPU, with thousands of environments: what they reach and how fast.

    python tests/gpu/train_examples.py RESULTS.json [EXAMPLE…] [--seeds 10] [--max-seconds 540]

Each runs in a process of its own, as it is written but for the sizes in SIZES and its seeds, which are 1 there; it
measures its seconds itself. A row is an example with one seed. Rows that the file has are kept; all examples have a
seed before the next one begins. An example that fails is left out from then on, and the exit code is 1. With
--max-seconds it is 3 if rows are left: the same command continues.
$CLEANRL_SCRIPT is the file that CleanRL's example takes; without it, that example is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import UNFINISHED
from measurements import Measurements

CLEANRL_SCRIPT = os.environ.get("CLEANRL_SCRIPT", "")
EXAMPLES = Path(__file__).parents[2] / "examples"
# Example -> agent-steps of its training, and what is replaced in its text.
SIZES: dict[str, tuple[int, dict[str, str]]] = {
    "torchrl_mappo": (
        4096 * 3 * 25 * 30,
        {"num_envs=64": "num_envs=4096", "64 * 25": "4096 * 25", "split(400)": "split(12_800)"},
    ),
    "skrl_mappo": (4096 * 3 * 600, {"num_envs=128": "num_envs=4096"}),
    "skrl_ppo": (4096 * 1000, {"num_envs=128": "num_envs=4096"}),
    "rsl_rl_ppo": (4096 * 32 * 50, {"num_envs=128": "num_envs=4096"}),
    "rl_games_ppo": (
        4096 * 32 * 25,
        {
            '"num_actors": 64': '"num_actors": 4096',
            '"cpu"': '"cuda"',
            '"minibatch_size": 512': '"minibatch_size": 32768',
        },
    ),
    "cleanrl_isaacgym": (
        4096 * 33 * 57,
        {"--num-envs 32": "--seed 1 --num-envs 4096", "--total-timesteps 60000": f"--total-timesteps {4096 * 33 * 57}"},
    ),
    "benchmarl_mappo": (
        4096 * 3 * 25 * 30,
        {
            '{"on_policy_n_envs_per_worker": 64': '{"sampling_device": "cuda", "train_device": "cuda", '
            '"on_policy_minibatch_size": 12_800, "on_policy_n_envs_per_worker": 4096',
            "64 * 25": "4096 * 25",
        },
    ),
}


SEED = re.compile(r"""(seed(?:\(|=|": | ))1\b""")
RANDOM, TRAINED, SECONDS = (
    r"random(?: actions)? (-?[\d.]+)",
    r"(?:training|trained|episodes) (-?[\d.]+)",
    r"([\d.]+) s\b",
)


def text_of(name: str, seed: int) -> str:
    """The example with its size and seed."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for old, new in {**SIZES[name][1], "seconds:.0f": "seconds:.2f"}.items():
        assert old in text, f"{name}: no {old!r}"
        text = text.replace(old, new)
    text, count = SEED.subn(rf"\g<1>{seed}", text)
    assert count, f"{name}: no seed"
    return text


def figures_of(said: str) -> dict[str, float]:
    """What the last line of an example tells: mean returns of random and trained play, and seconds of training."""
    patterns = {"random": RANDOM, "trained": TRAINED, "seconds": SECONDS}
    found = {key: re.search(pattern, said) for key, pattern in patterns.items()}
    assert all(found.values()), said
    return {key: float(match[1]) for key, match in found.items() if match}


def train(name: str, seed: int) -> dict[str, Any]:
    """One example's figures. Raises subprocess.CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(text_of(name, seed), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", str(script)]
        command += [CLEANRL_SCRIPT] if name.startswith("cleanrl") else []
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    said = done.stdout.strip().splitlines()[-1]
    figures, agent_steps = figures_of(said), SIZES[name][0]
    rate = round(agent_steps / figures["seconds"])
    return {"said": said, **figures, "agent_steps": agent_steps, "agent_steps_per_s": rate}


def main() -> None:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    usable = [name for name in SIZES if CLEANRL_SCRIPT or not name.startswith("cleanrl")]
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(SIZES)}", default=usable)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    given.device, given.quick = torch.device("cuda"), False
    measurements, start, failed = Measurements(given), time.monotonic(), set[str]()
    for seed in range(1, given.seeds + 1):
        for name in [name for name in given.examples if name not in failed]:
            if time.monotonic() - start > given.max_seconds:
                sys.exit(UNFINISHED)
            try:
                measurements.measure({"example": name, "seed": seed}, lambda: train(name, seed))  # noqa: B023
            except subprocess.CalledProcessError as error:
                print(f"{name} with seed {seed} has failed: {error.stderr[-2000:]}", flush=True)
                failed.add(name)
    sys.exit(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main()
