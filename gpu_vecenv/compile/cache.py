"""Compiled binaries by content: a key names everything that decides a binary, so an entry is never stale."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

if sys.platform != "win32":
    import fcntl

DIGEST_BYTES = 32
MIN_FREE_BYTES = 1 << 20  # bytes that a folder must have left to be of use; a binary has some ten thousand


def cached(key_text: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file for a key, built into place if it is not there yet.

    An entry is built in a folder of its own, ``<key>.<random>.draft``, and published by a rename: other processes see
    all of it or nothing. Its last 32 bytes are the SHA-256 of the rest; a damaged entry is built anew, with a warning.
    That also finds what a power cut left half written, so that the folder need not be flushed. A failed build leaves
    nothing, and whoever waited for it tries for himself.
    """
    path = cache_dir() / (hashlib.sha256(key_text.encode()).hexdigest() + suffix)
    if _is_intact(path):
        return path
    with _exclusive_lock(path.with_suffix(".lock")):
        if not _is_intact(path):  # nobody has built it meanwhile
            if path.exists():
                warnings.warn(f"{path} is damaged: it is compiled anew", stacklevel=2)
            _remove_stale(path.parent)
            _publish(path, build)
    return path


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    # The draft has a folder of its own: when that is gone, a compiler that outlived its killed parent writes nowhere.
    with tempfile.TemporaryDirectory(".draft", f"{path.stem}.", path.parent, ignore_cleanup_errors=True) as own:
        draft = Path(own, path.name)
        draft.touch(mode=0o600)  # compilers keep who may write to it
        build(draft)
        binary = draft.read_bytes()
        with draft.open("ab") as file:
            file.write(hashlib.sha256(binary).digest())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


@contextlib.contextmanager
def _exclusive_lock(lock: Path, wait: bool = True) -> Iterator[None]:
    """No other process builds this entry in the meantime; at the end no draft of it is left.

    The lock is the system's, upon an open file: it ends with its process, however that ends, and a file that lies there
    says nothing. Without such locks (Windows, some network file systems) processes build side by side and the last one
    is published.

    Raises:
        BlockingIOError: Another process holds the lock, and ``wait`` is False.
    """
    handle = _locked(lock, wait)
    try:
        yield
    finally:
        if handle is not None:
            for draft in lock.parent.glob(f"{lock.stem}.*.draft"):  # one's own is gone: of killed processes
                shutil.rmtree(draft, ignore_errors=True)
            lock.unlink(missing_ok=True)
            _release(handle)


def _locked(lock: Path, wait: bool) -> int | None:
    """A handle that holds the lock, or None where there are no locks."""
    if sys.platform == "win32":
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return None
    while True:
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been emptied meanwhile
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        held = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):  # its last owner has removed it: then there may be a new one
                held = os.path.samestat(os.fstat(handle), os.stat(lock))
        except BlockingIOError:
            raise
        except OSError:
            lock.unlink(missing_ok=True)
            return None
        finally:
            if not held:
                os.close(handle)
        if held:
            return handle


def _release(handle: int) -> None:
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the same open file
    os.close(handle)


def _remove_stale(parent: Path) -> None:
    """Remove what killed processes have left of other entries: nobody may ever want those again."""
    for lock in parent.glob("*.lock"):
        with contextlib.suppress(BlockingIOError), _exclusive_lock(lock, wait=False):
            pass


@cache
def cache_dir() -> Path:
    """``$GPU_VECENV_CACHE``, else the user's cache folder, else a temporary one that ends with the process."""
    try:
        chosen = os.environ.get("GPU_VECENV_CACHE")
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = (Path(chosen) if chosen else Path(home) / "gpu_vecenv").absolute()  # wherever the process goes later
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(f"{path} belongs to, or can be written by, somebody else")
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(MIN_FREE_BYTES))
            file.flush()
        return path
    except (OSError, RuntimeError) as error:
        warnings.warn(f"compiled kernels are kept for this process only: {error}", stacklevel=2)
        path = Path(tempfile.mkdtemp(prefix="gpu_vecenv-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path


def _is_intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST_BYTES and hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
