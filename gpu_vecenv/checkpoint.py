"""Checkpoints: tensors and a JSON description in one safetensors file, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from gpu_vecenv.errors import CheckpointCorruptError

FORMAT = 1


def save_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> None:
    """Write ``tensors`` and ``manifest`` (JSON values) to ``path``.

    The file is written beside its name, flushed to disk and renamed: a crash leaves the former file intact.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(manifest, sort_keys=True)
    content = to_bytes(host, {"format": str(FORMAT), "manifest": text, "sha256": _digest(host, text)})
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and manifest of a checkpoint, on the host. Nothing in the file is ever executed.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointCorruptError: It is no checkpoint of this library, or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != str(FORMAT):
                raise CheckpointCorruptError(f"{path}: format {metadata.get('format')!r}; expected {FORMAT}")
            manifest = json.loads(metadata["manifest"])
            if not isinstance(manifest, dict):
                raise CheckpointCorruptError(f"{path}: its manifest is {manifest!r:.80}; expected a JSON object")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no iterator)
            if _digest(tensors, metadata["manifest"]) != metadata["sha256"]:
                raise CheckpointCorruptError(f"{path} is damaged: its content and its SHA-256 differ")
            return tensors, manifest
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointCorruptError(f"{path} is no checkpoint of this library, or damaged: {error}") from error


def _digest(tensors: Mapping[str, torch.Tensor], manifest: str) -> str:
    digest = hashlib.sha256(manifest.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
