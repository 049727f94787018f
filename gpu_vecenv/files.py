"""Files: the folder of the CUDA sources, and writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path


def cuda_folder() -> Path:
    """The folder of the ``.cu`` and ``.cuh`` files: packaged as ``_cuda``, in a checkout beside the package."""
    package = Path(__file__).parent
    packaged = package / "_cuda"
    return packaged if packaged.is_dir() else package.parent / "cuda"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside its name, flushed, renamed. OSError leaves the former one as it was."""
    put_file(path, lambda draft: _write(draft, content))


def put_file(path: Path, make: Callable[[Path], None]) -> None:
    """Let ``make`` write a draft beside ``path``, rename it to that, and flush the folder, so that the name lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}.draft")
    try:
        make(draft)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what made the draft fail says more
            draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot flush a folder
            raise
    finally:
        os.close(folder)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
