"""The folder of the CUDA sources, atomic replacement of files, and whether one can be written at a path."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

from gpu_vecenv.errors import ConfigError


@functools.cache
def cuda_folder() -> Path:
    """The folder of the ``.cu`` and ``.cuh`` files: packaged as ``_cuda``, in a checkout beside the package."""
    package = Path(__file__).parent
    packaged = package / "_cuda"
    return packaged if packaged.is_dir() else package.parent / "cuda"


@functools.cache
def engine_folder() -> Path:
    """The folder of the headers that games include, resolved."""
    return (cuda_folder() / "engine").resolve()


def check_output(name: str, path: Path, *, folder: bool = False) -> None:
    """Raise ConfigError unless a file, or a folder, can be made at the path of the option ``name``, or is there.

    For what is written after minutes of work. Missing folders above it are no hindrance: they will be made.
    """
    places = [path.absolute(), *path.absolute().parents]
    existing = next(place for place in places[not folder :] if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or (path.is_dir() and not folder):
        expected = "a folder, or a name for one," if folder else "a file's name"
        raise ConfigError(f"{name} is {path}; expected {expected} where you may write")


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
    if os.name == "nt":  # Windows opens no folders
        return
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
