"""Receipts: the results of a long run, its device, and the hashes of the sources that it used.

    python tests/receipts.py            # a table: name, date, device, fresh, stale or missing, what has changed
    python tests/receipts.py --strict   # and exit code 1 unless every required receipt is there and fresh

A receipt is stale once a source that it names has changed, apart from presets: hyper-parameters of trainings are in the
files of games, and decide nothing that a receipt is of. It does not protect against deliberate modification.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reliability" / "receipts"
REQUIRED = ("memcheck", "racecheck", "initcheck", "synccheck", "leaks", "soak", "parity", "large")
NAME = re.compile(r"[a-z][a-z0-9_]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
PARSING = threading.Lock()  # Python 3.11 counts the recursion of ast.parse for all threads together
KINDS: dict[str, type] = {
    "what": str,  # one sentence
    "command": str,  # reproduces it
    "metrics": dict,
    "planted": dict,  # planted fault -> message of the tool
    "sources": dict,  # path, relative to the root -> SHA-256
    "device": str,
    "versions": dict,
    "date": str,
}


class ReceiptError(ValueError):
    """A file is not a valid receipt."""


def device_sources(root: Path = ROOT) -> list[str]:
    """The files in cuda/, as paths relative to the root: every receipt depends on all of them."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "cuda").rglob("*.cu*"))


def hashes(files: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Path -> SHA-256 of the files that exist, of Python's without presets."""
    paths = {file: root / file for file in files}
    return {file: hashlib.sha256(_contents(path)).hexdigest() for file, path in paths.items() if path.is_file()}


def _contents(path: Path) -> bytes:
    """Those of a file, of Python without the presets of its classes: ``preset``, ``mappo_preset`` and the like."""
    contents = path.read_bytes()
    if path.suffix != ".py":
        return contents
    lines = contents.splitlines(keepends=True)
    with PARSING:
        tree = ast.parse(contents)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in (statement for one in classes for statement in one.body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.endswith("preset"):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [b""] * (node.end_lineno - node.lineno + 1)
    return b"".join(lines)


def write(
    name: str,
    *,
    what: str,
    command: str,
    metrics: Mapping[str, Any],
    planted: Mapping[str, Any],
    python: Iterable[str],
    device: str | None = None,
    folder: Path = FOLDER,
    root: Path = ROOT,
) -> Path:
    """Write the receipt of a successful run.

    Args:
        name: Name of the receipt and of its file.
        what: What was run, one sentence.
        command: Reproduces the metrics.
        metrics: Numbers and short texts, such as the tool's summary.
        planted: Fault -> message of the tool: evidence that the tool finds a fault.
        python: Files outside cuda/ that the result depends on, or patterns, such as "gpu_vecenv/envs/*.py".
        device: None takes the name of the GPU from torch.
        folder: Folder of receipts.
        root: Root of the sources.

    Raises:
        ReceiptError: An invalid name, a pattern that matches no file, or no planted fault.
    """
    if not NAME.fullmatch(name):
        raise ReceiptError(f"the name of a receipt is {name!r}; expected {NAME.pattern}")
    if not planted:
        raise ReceiptError(f"{name}: nothing was planted; expected at least one fault and the message of the tool")
    files = device_sources(root)
    for pattern in python:
        found = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())
        if not found:
            raise ReceiptError(f"{name}: {pattern!r} matches no file below {root.name}")
        files += found
    receipt = {
        "what": what,
        "command": command,
        "metrics": dict(metrics),
        "planted": dict(planted),
        "sources": hashes(files, root),
        "device": device or device_name(),
        "versions": versions(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    text = json.dumps(receipt, indent=1) + "\n"
    checked(name, json.loads(text))
    folder.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=folder, suffix=".draft")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    path = folder / f"{name}.json"
    Path(draft).replace(path)
    return path


def read(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Read a receipt; None if there is none.

    Raises:
        ReceiptError: The file is damaged or not a receipt.
    """
    try:
        content = json.loads((folder / f"{name}.json").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ReceiptError(f"{name}.json cannot be read: {error}") from error
    return checked(name, content)


def checked(name: str, content: Any) -> dict[str, Any]:
    """``content`` if it is a valid receipt, else raises ReceiptError."""
    if not isinstance(content, dict):
        raise ReceiptError(f"{name}.json is a {type(content).__name__}; expected an object")
    if content.keys() != KINDS.keys():
        differing = ", ".join(sorted(content.keys() ^ KINDS.keys()))
        raise ReceiptError(f"{name}.json has missing or unknown keys: {differing}")
    for key, kind in KINDS.items():
        if not isinstance(content[key], kind) or not content[key]:
            got = str(content[key])[:80]
            raise ReceiptError(f"{name}.json: {key} is {got!r}; expected a non-empty {kind.__name__}")
    for file, value in content["sources"].items():
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            got = str(value)[:80]
            raise ReceiptError(f"{name}.json: the hash of {file} is {got!r}; expected 64 hexadecimal digits")
    return content


def stale(receipt: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Files that have changed since the run, were removed, or are new in cuda/."""
    sources: dict[str, str] = receipt["sources"]
    now = hashes({*sources, *device_sources(root)}, root)
    return sorted(file for file in {*sources, *now} if sources.get(file) != now.get(file))


def device_name() -> str:
    """Name of the GPU, else the architecture of the CPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions() -> dict[str, str]:
    """Versions that a result may depend on in addition to the sources."""
    import torch

    import gpu_vecenv

    found = {
        "gpu_vecenv": gpu_vecenv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    try:
        from gpu_vecenv.compile.backends.cuda_compiler import compiler

        found["compiler"] = compiler().strip().splitlines()[-1]
    except Exception as error:  # a receipt of a run on the host needs none
        found["compiler"] = type(error).__name__
    return {library: version for library, version in found.items() if version is not None}


def table(folder: Path = FOLDER, root: Path = ROOT) -> tuple[list[tuple[str, str, str, str]], list[str]]:
    """Rows of (name, date, device, state), required ones first; and the names of required ones that are not fresh."""
    others = sorted(path.stem for path in folder.glob("*.json") if path.stem not in REQUIRED)
    rows, lacking = [], []
    for name in (*REQUIRED, *others):
        date = device = "-"
        try:
            receipt = read(name, folder)
        except ReceiptError as error:
            state = f"damaged: {error}"
        else:
            if receipt is None:
                state = "missing"
            else:
                date, device, changed = receipt["date"], receipt["device"], stale(receipt, root)
                state = f"stale: {', '.join(changed)}" if changed else "fresh"
        rows.append((name, date, device, state))
        if state != "fresh" and name in REQUIRED:
            lacking.append(name)
    return rows, lacking


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Receipts of long runs: which are fresh, stale or missing.")
    parser.add_argument("--strict", action="store_true", help="exit code 1 unless all required ones are fresh")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of receipts")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the sources")
    chosen = parser.parse_args(arguments)
    rows, lacking = table(chosen.folder, chosen.root)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    if lacking:
        print(f"{len(lacking)} of {len(REQUIRED)} required receipts are not fresh: {', '.join(lacking)}")
    return 1 if chosen.strict and lacking else 0


if __name__ == "__main__":
    sys.exit(main())
