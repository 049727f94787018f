"""The folder of the CUDA sources, and atomic replacement of files."""

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
    """Replace a file atomically: write a draft beside it, flush, rename. After an OSError the old file is unchanged."""
    put_file(path, lambda draft: _write(draft, content))


def put_file(path: Path, make: Callable[[Path], None]) -> None:
    """Call ``make`` to write a draft beside ``path``, rename it to ``path``, and flush the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}.draft")
    try:
        make(draft)
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the first error is the informative one
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
