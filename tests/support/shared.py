"""What one of pytest-xdist's workers makes and all read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of this run of pytest that ``make`` fills: by the first worker that wants it, while others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.with_suffix(".made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # a worker may have failed to make it
            folder.mkdir()
            make(folder)
            folder.with_suffix(".made").touch()
    return folder
