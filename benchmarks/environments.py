"""Python environments of peers, made by pip: .venv-bench-PEER in the repository's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.workload import Peer

ROOT = Path(__file__).resolve().parent.parent
STAMP = "requirements.json"  # what is installed; the environment is changed only when it differs


def python_of(name: str, peer: Peer, device: str) -> Path:
    """The interpreter of the peer's environment, which is made or brought up to date first.

    Raises:
        BenchmarkError: pip could not install the peer.
    """
    folder = ROOT / f".venv-bench-{name}"
    python, stamp = folder / "bin" / "python", folder / STAMP
    requirements = [*peer.requirements, *(peer.cuda_requirements if device == "cuda" else ())]
    wanted = json.dumps({"requirements": requirements, "no_deps": peer.no_deps})
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {', '.join([*requirements, *peer.no_deps])} into {folder.name}", file=sys.stderr, flush=True)
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if requirements:
        _call([*pip, *requirements])
    if peer.no_deps:
        _call([*pip, "--no-deps", *peer.no_deps])
    stamp.write_text(wanted)
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BenchmarkError(f"{' '.join(command)} failed:\n{output}")
