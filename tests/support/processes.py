"""Python in child processes, with the environment that every test's child needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gpu_vecenv

PACKAGE = Path(gpu_vecenv.__file__).resolve().parents[1]


def child_environment(**variables: str) -> dict[str, str]:
    """The caller's environment with the tested package first on PYTHONPATH, and one thread.

    The caller's PYTHONPATH stays behind it, since dependencies may be there; GPU_VECENV_CACHE stays, so that children
    use the same compiled kernels.

    Args:
        variables: Further variables, or other values.
    """
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **variables}


def run_child(
    *arguments: object, folder: Path, variables: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments...`` in ``folder`` and return its exit code and outputs, whatever they are."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=child_environment(**(variables or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
