"""Examples of adapters whose tensors stay on the GPU, with thousands of environments: what they reach and how fast.

usage: python tests/gpu/train_examples.py RESULTS.json [EXAMPLE…]

Each runs in a process of its own, as it is written but for the sizes in SIZES; it measures its seconds itself.
$CLEANRL_SCRIPT is the file that CleanRL's example takes; without it, that example is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gpu_vecenv.engine.timing import provenance

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
        {"--num-envs 32": "--num-envs 4096", "--total-timesteps 60000": f"--total-timesteps {4096 * 33 * 57}"},
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


def train(name: str) -> dict[str, object]:
    """One example's metrics."""
    agent_steps, changes = SIZES[name]
    text = (EXAMPLES / f"{name}.py").read_text()
    for old, new in {**changes, "seconds:.0f": "seconds:.2f"}.items():
        assert old in text, f"{name}: no {old!r}"
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(text)
        command = [sys.executable, "-W", "ignore", str(script)]
        command += [CLEANRL_SCRIPT] if name.startswith("cleanrl") else []
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        return {"example": name, "error": done.stderr[-2000:]}
    said = done.stdout.strip().splitlines()[-1]
    seconds = float(re.search(r"([\d.]+) s\b", said)[1])
    rate = round(agent_steps / seconds)
    return {"example": name, "said": said, "agent_steps": agent_steps, "agent_steps_per_s": rate}


def main(results: str, *names: str) -> None:
    """Run them, print and write the metrics."""
    rows = []
    for name in names or [name for name in SIZES if CLEANRL_SCRIPT or not name.startswith("cleanrl")]:
        rows.append(train(name))
        print(json.dumps(rows[-1]), flush=True)
    metrics = {**provenance(torch.device("cuda")), "rows": rows}
    Path(results).write_text(json.dumps(metrics, indent=1) + "\n")
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    main(*sys.argv[1:])
