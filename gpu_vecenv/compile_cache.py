"""Compiled binaries by content: a key names everything that decides a binary, so an entry is never stale."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

DIGEST_BYTES = 32


def cached(key_text: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file for a key, built into place if it is not there yet.

    An entry is built beside its final name and published by a rename: other processes see all of it or nothing.
    Its last 32 bytes are the SHA-256 of the rest; a damaged entry is built anew. A failed build leaves nothing.
    """
    path = folder() / (hashlib.sha256(key_text.encode()).hexdigest() + suffix)
    if _sound(path):
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been emptied meanwhile
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=suffix)
    os.close(handle)
    draft = Path(name)
    try:
        build(draft)
        binary = draft.read_bytes()
        with draft.open("ab") as file:
            file.write(hashlib.sha256(binary).digest())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


@cache
def folder() -> Path:
    """``$GPU_VECENV_CACHE``, else the user's cache folder, else a temporary one that ends with the process."""
    try:
        chosen = os.environ.get("GPU_VECENV_CACHE")
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(chosen) if chosen else Path(home) / "gpu_vecenv"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(f"{path} belongs to, or can be written by, somebody else")
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, RuntimeError) as error:
        warnings.warn(f"compiled kernels are kept for this process only: {error}", stacklevel=2)
        path = Path(tempfile.mkdtemp(prefix="gpu_vecenv-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path


def _sound(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST_BYTES and hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
