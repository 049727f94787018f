"""Cache of compiled binaries, addressed by content: the key contains everything that decides a binary."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import platformdirs

from gpu_vecenv.errors import CompilerError
from gpu_vecenv.escapes import warn

if TYPE_CHECKING:
    from filelock import FileLock

DIGEST_BYTES = 32
MAX_ATTEMPTS = 3  # to open a file before it is damaged
MIN_FREE_BYTES = 1 << 20  # a folder with less free space is not used; a binary has some ten thousand bytes


def cached(key_text: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file of a key; ``build`` writes it if it is missing or damaged.

    An entry is built in a folder of its own, ``<key>.<random>.draft``, and published by a rename, so that other
    processes see a whole file or none. Its last 32 bytes are the SHA-256 of the rest. They also reveal a file that a
    power failure left incomplete, so that nothing has to flush the folder. Processes that want the same entry wait for
    the one that builds it; if that build fails, each of them builds it itself and gets the error.

    Where the cache folder cannot hold the entry, it is in a temporary folder, with a warning.
    """
    try:
        return _cached(cache_dir(), key_text, suffix, build)
    except OSError as error:  # full, a path that is too long, a file of another user
        if cache_dir() == temporary_dir():
            raise
        _warn(error)
        return _cached(temporary_dir(), key_text, suffix, build)


def open_cached(key_text: str, suffix: str, build: Callable[[Path], None]) -> BinaryIO:
    """The file of ``cached``, open and checked through that descriptor: another file in its place is not read.

    Raises:
        CompilerError: Others damage the file as soon as it is built.
    """
    for _ in range(MAX_ATTEMPTS):
        path = cached(key_text, suffix, build)
        with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
            file = opened.enter_context(path.open("rb"))
            if _is_whole(file.read()):
                opened.pop_all()
                return file
    raise CompilerError(f"{path} is damaged each time it has been built; give $GPU_VECENV_CACHE another folder")


def _cached(folder: Path, key_text: str, suffix: str, build: Callable[[Path], None]) -> Path:
    path = folder / (hashlib.sha256(key_text.encode()).hexdigest() + suffix)
    if _is_intact(path):
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been deleted since the process started
    with _exclusive(path) as locked:
        if not _is_intact(path):  # no other process has built it meanwhile
            if path.exists():
                warn(f"{path} is damaged: it is compiled anew", stacklevel=2)
            if locked:
                _remove_stale_drafts(path)
            _publish(path, build)
    return path


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    # A folder per draft: once it is removed, a compiler that outlives its killed parent has nowhere to write.
    with tempfile.TemporaryDirectory(".draft", f"{path.stem}.", path.parent, ignore_cleanup_errors=True) as own:
        draft = Path(own, path.name)
        draft.touch(mode=0o600)  # compilers keep the permissions of an existing file
        build(draft)
        binary = draft.read_bytes()
        with draft.open("ab") as file:
            file.write(hashlib.sha256(binary).digest())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def _lock(parent: Path, key: str, timeout: float = -1) -> FileLock:
    """The lock of an entry. The system releases it when its process ends; the file itself stays and means nothing."""
    from filelock import FileLock  # importing it writes to the temporary folder

    return FileLock(parent / f"{key}.lock", timeout, mode=0o600)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Hold the lock of an entry; False where the file system has no locks: processes build side by side there."""
    lock = _lock(path.parent, path.stem)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _remove_stale_drafts(path: Path) -> None:
    """Remove the drafts that killed processes left, of this entry, whose lock is held, and of all others."""
    from filelock import Timeout

    for draft in path.parent.glob("*.draft"):
        key = draft.name.partition(".")[0]
        lock = contextlib.nullcontext() if key == path.stem else _lock(path.parent, key, timeout=0)
        with contextlib.suppress(Timeout), lock:  # Timeout: a living process builds that entry
            shutil.rmtree(draft, ignore_errors=True)


@cache
def cache_dir() -> Path:
    """``$GPU_VECENV_CACHE``, else the user's cache folder, else a temporary folder, removed when the process ends."""
    try:
        chosen = os.environ.get("GPU_VECENV_CACHE")
        path = Path(chosen or platformdirs.user_cache_dir("gpu_vecenv", appauthor=False)).expanduser()
        path = path.absolute()  # a later chdir() must not move it
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(f"{path} belongs to another user or is writable by others; expected a private folder")
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()
        return path
    except (OSError, RuntimeError) as error:
        _warn(error)
        return temporary_dir()


@cache
def temporary_dir() -> Path:
    """A folder that is removed when the process ends."""
    path = Path(tempfile.mkdtemp(prefix="gpu_vecenv-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _warn(error: Exception) -> None:
    warn(
        f"compiled kernels are kept for this process only: {error}; to keep them, set $GPU_VECENV_CACHE to a folder of "
        "your own with free space",
        stacklevel=3,
    )


def _is_intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return _is_whole(content)


def _is_whole(content: bytes) -> bool:
    return len(content) > DIGEST_BYTES and hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
