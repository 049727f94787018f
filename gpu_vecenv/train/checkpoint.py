"""Checkpoints: tensors and a JSON manifest in one safetensors file, replaced atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from gpu_vecenv.errors import CheckpointCorruptError, CheckpointVersionError, ConfigError
from gpu_vecenv.escapes import warn
from gpu_vecenv.files import put_file, replace_file

FORMAT = "4"  # rises where an older file would mean something else: see stored_config.py for what need not raise it
CHECKPOINTS = "checkpoints"  # folder of checkpoints in a run folder
BEST = "best.safetensors"
INITIAL_CHECKPOINT = "initial.safetensors"  # of the beginning, iteration 0, however many are kept
_MANIFEST_LIMIT = 25_000_000  # bytes; safetensors refuses headers of 100 MB, which contain it quoted
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes((0x80, protocol)) for protocol in range(2, 6)))  # torch.save, plain pickles
_Loaded = TypeVar("_Loaded")
_FILE = re.compile(r"iteration-([0-9]{8}|[1-9][0-9]{8,})(?:\.rank([1-9][0-9]*))?\.safetensors")
_DRAFT = re.compile(rf"\.(?:{_FILE.pattern}|{re.escape(BEST)}|{re.escape(INITIAL_CHECKPOINT)})\.[0-9a-f]{{12}}\.draft")


def save_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
    """Write ``tensors`` and ``manifest`` to ``path``; they are on disk when this returns.

    The data are written to a temporary file, flushed and renamed: a crash leaves the previous file intact, and at most
    a draft named ``.<name>.<12 hexadecimal digits>.draft``.

    Args:
        path: The file; its folder is created if necessary.
        tensors: Dense tensors of any shape and device, of the dtypes that safetensors supports.
        manifest: JSON values. The key "tensors" is reserved for the SHA-256 of each tensor.

    Raises:
        ConfigError: A tensor or an entry cannot be stored.
        OSError: Writing failed; the previous file is unchanged and no draft is left.
    """
    replace_file(path, _content(tensors, manifest))


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read tensors, on the CPU, and manifest. Nothing in the file is ever executed.

    Raises:
        FileNotFoundError: There is no such file, or it is a folder, pipe or device.
        CheckpointCorruptError: The file is not a checkpoint of this library, or is damaged; the message names the part.
        CheckpointVersionError: Another version of the library wrote it, in another format.
    """
    if not path.is_file():  # opening a pipe would block
        raise FileNotFoundError(f"no checkpoint at {path}; expected a file")
    content = path.read_bytes()
    try:
        tensors = {name: tensor.cpu() for name, tensor in from_bytes(content).items()}
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, AssertionError, LookupError, RuntimeError, ValueError) as error:
        if path.suffix.lower() in _PICKLE_SUFFIXES or content.startswith(_PICKLE_STARTS):
            raise CheckpointCorruptError(
                f"{path} is not a checkpoint but a pickle. Pickles are never opened, since they can execute any code; "
                "convert weights with safetensors.torch.save_file"
            ) from error
        raise _damaged(path, f"safetensors cannot read it: {error}") from error
    metadata = header.get("__metadata__") or {}
    if (found := metadata.get("format")) != FORMAT:
        if found is None or not found.isdecimal():
            raise _damaged(path, f"its format is {found!r}; expected {FORMAT!r}")
        age, advice = ("an older", "train again") if int(found) < int(FORMAT) else ("a newer", "install the newest one")
        raise CheckpointVersionError(
            f"{path} was written by {age} version of gpu_vecenv: its format is {found!r}; expected {FORMAT!r}. Open it "
            f"with the version that wrote it, or {advice}"
        )
    text = str(metadata.get("manifest"))
    if _sha256(text) != metadata.get("sha256"):
        raise _damaged(path, "its manifest and the manifest's SHA-256 differ")
    try:
        manifest = json.loads(text, parse_constant=int)  # int("NaN") raises: NaN and Infinity are not JSON
        digests = {**manifest.pop("tensors")}
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its manifest {text[:80]} is not a strict JSON object with digests: {error}") from error
    for name in sorted(digests.keys() | tensors.keys()):
        if name not in tensors or digest_of(tensors[name]) != digests.get(name):
            raise _damaged(path, f"tensor {name!r} and its SHA-256 differ, or one of the two is missing")
    return tensors, manifest


class CheckpointFolder:
    """The latest checkpoints of a run, one file per saved iteration and process.

    Rank 0 writes ``iteration-00000123.safetensors``, rank 1 ``iteration-00000123.rank1.safetensors`` and so on.
    ``load`` reads the newest iteration: a run that continues from an earlier one needs a new folder.

    Args:
        folder: Created by the first ``save``.
        keep: Number of newest iterations to keep; with 1 there is no fallback for a damaged file.
        rank: Rank of this process.
        world_size: Number of processes.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(self, folder: Path, *, keep: int = 3, rank: int = 0, world_size: int = 1) -> None:
        _check_range("keep", keep, 1)
        _check_range("world_size", world_size, 1)
        _check_range("rank", rank, 0, world_size - 1)
        self.folder, self.keep, self.rank, self.world_size = Path(folder), keep, rank, world_size

    def save(
        self, iteration: int, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any], *, best: bool = False
    ) -> Path:
        """Write this process's file of an iteration with ``save_checkpoint``, then remove its old files.

        A file is removed when ``keep`` newer iterations are complete, with the files of all processes.

        Args:
            iteration: At least 0; added to the manifest, as are "rank" and "world_size".
            tensors: Those of this process.
            manifest: As for ``save_checkpoint``.
            best: Also replace ``best.safetensors`` by rank 0's file.
        """
        _check_range("iteration", iteration, 0)
        own = {"iteration": iteration, "rank": self.rank, "world_size": self.world_size}
        if {**own, **manifest} != {**manifest, **own}:
            raise ConfigError(f"the manifest has other values for {own}; remove these entries")
        path = self.path(iteration, self.rank)
        if best and self.rank == 0:  # written first: if the numbered file exists, so does this one
            save_checkpoint(self.folder / BEST, tensors, {**manifest, **own})
            _link(self.folder / BEST, path)
        else:
            save_checkpoint(path, tensors, {**manifest, **own})
        complete = self.iterations()
        oldest = complete[-self.keep] if len(complete) >= self.keep else 0
        for old, ranks in self._found().items():
            if old < min(oldest, iteration) and self.rank in ranks:
                self.path(old, self.rank).unlink(missing_ok=True)
        return path

    def keep_initial(self) -> None:
        """Make ``initial.safetensors`` rank 0's file of iteration 0, which ``save`` removes once others are newer."""
        if self.path(0).is_file():
            _link(self.path(0), self.folder / INITIAL_CHECKPOINT)

    def initial(self) -> Path:
        """The file that ``keep_initial`` made, or would make: a killed process may have not.

        Raises:
            FileNotFoundError: There is none.
        """
        for path in (self.folder / INITIAL_CHECKPOINT, self.path(0)):
            if path.is_file():
                return path
        raise FileNotFoundError(f"no {self.folder / INITIAL_CHECKPOINT}, the checkpoint of iteration 0")

    def begun(self) -> bool:
        """Whether the folder has any checkpoint, of any process."""
        return bool(self._found())

    def iterations(self) -> list[int]:
        """The iterations, ascending, for which the files of all processes exist."""
        return sorted(found for found, ranks in self._found().items() if ranks.issuperset(range(self.world_size)))

    def newest(self) -> int:
        """The newest iteration for which no process's file is damaged or missing: the same for every process.

        Call it in all processes before any of them saves. A warning names each newer file that is not usable.

        Raises:
            FileNotFoundError: No iteration has the files of all processes.
            CheckpointCorruptError: All complete iterations are damaged.
            ConfigError: The run had another number of processes.
        """

        def check(iteration: int) -> None:
            for rank in range(self.world_size):
                self._load(iteration, rank)

        found = sorted(self._found(), reverse=True)
        return newest_usable(found, check, f"of {self.world_size} process(es) in {self.folder}")[0]

    def load(self, iteration: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This process's tensors, on the CPU, and manifest, of one of ``iterations()``; None: of ``newest()``.

        Raises:
            FileNotFoundError: There is no such iteration, or files of some processes are missing.
            CheckpointCorruptError: This process's file is damaged.
            ConfigError: The run had another number of processes.
        """
        if iteration is None:
            iteration = self.newest()
        _check_range("iteration", iteration, 0)
        complete = self.iterations()
        if iteration not in complete:
            self._load(iteration, 0)  # raises if world_size differs
            raise FileNotFoundError(f"{self.folder} lacks files of iteration {iteration}; complete ones: {complete}")
        return self._load(iteration, self.rank)

    def clean(self) -> None:
        """Remove the drafts of a killed process of this rank. Not while one is saving."""
        for match in filter(None, map(_DRAFT.fullmatch, self._names())):
            if int(match[2] or 0) == self.rank:
                (self.folder / match[0]).unlink(missing_ok=True)

    def path(self, iteration: int, rank: int = 0) -> Path:
        """The file of an iteration and a process."""
        return self.folder / f"iteration-{iteration:08d}{f'.rank{rank}' if rank else ''}.safetensors"

    def _load(self, iteration: int, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        path = self.path(iteration, rank)
        tensors, manifest = load_checkpoint(path)
        found, size = [manifest.get("iteration"), manifest.get("rank")], manifest.get("world_size")
        if found != [iteration, rank]:
            raise _damaged(path, f"its iteration and rank are {found}; expected {[iteration, rank]}")
        if size != self.world_size:
            raise ConfigError(
                f"{path} is of a run of {size} process(es), this one has {self.world_size}; start as many: "
                f"torchrun --nproc-per-node={size}"
            )
        return tensors, manifest

    def _names(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.exists() else []

    def _found(self) -> dict[int, set[int]]:
        """The ranks whose files exist, of each iteration."""
        found: dict[int, set[int]] = {}
        for match in filter(None, map(_FILE.fullmatch, self._names())):
            found.setdefault(int(match[1]), set()).add(int(match[2] or 0))
        return found


def _link(source: Path, target: Path) -> None:
    """Replace ``target`` by a hard link to ``source``, or by a copy."""
    try:
        put_file(target, lambda draft: os.link(source, draft))
    except OSError:  # a file system without hard links
        replace_file(target, source.read_bytes())


def newest_usable(iterations: Iterable[int], load: Callable[[int], _Loaded], where: str) -> tuple[int, _Loaded]:
    """The first of ``iterations``, newest first, that ``load`` accepts, and what it returned.

    A warning names each newer one that is damaged or missing. If all are, CheckpointVersionError,
    CheckpointCorruptError or FileNotFoundError gives all reasons and ``where`` they are.
    """
    refused: list[Exception] = []
    for iteration in iterations:
        try:
            loaded = load(iteration)
        except (CheckpointCorruptError, FileNotFoundError) as error:  # a running process removes old files
            refused.append(error)
            continue
        for refusal in refused:
            warn(f"{refusal}; iteration {iteration} is used instead", stacklevel=4)
        return iteration, loaded
    kinds = (CheckpointVersionError, CheckpointCorruptError)
    kind = next((kind for kind in kinds if any(isinstance(error, kind) for error in refused)), FileNotFoundError)
    raise kind(f"no usable checkpoint {where}: {'; '.join(map(str, refused)) or 'there is none'}")


def _content(tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> bytes:
    if "tensors" in manifest:
        raise ConfigError('the manifest has the key "tensors", which is reserved for digests; rename it')
    host = {name: _on_host(name, tensor) for name, tensor in tensors.items()}
    digests = {name: digest_of(tensor) for name, tensor in host.items()}
    try:
        text = json.dumps({**manifest, "tensors": digests}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the manifest is not strict JSON: {error}") from error
    if len(text) > _MANIFEST_LIMIT:
        raise ConfigError(f"the manifest has {len(text)} bytes; at most {_MANIFEST_LIMIT}: put data into tensors")
    try:
        return to_bytes(host, {"format": FORMAT, "manifest": text, "sha256": _sha256(text)})
    except (KeyError, ValueError, SafetensorError) as error:  # a dtype, a name
        raise ConfigError(f"safetensors cannot hold these tensors, because of {error}") from error


def _on_host(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that shares memory with no other tensor, as safetensors requires."""
    if not isinstance(name, str) or name == "__metadata__":
        raise ConfigError(f"a tensor's name is {name!r}; expected a string other than '__metadata__'")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        raise ConfigError(f"tensors[{name!r}] is {tensor!r:.80}; expected a dense tensor with data")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes of a contiguous tensor on the CPU."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{path} is not a checkpoint of this library, or is damaged: {what}")


def _check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name} is {value!r}; expected an integer {expected}")
