"""Receipts: what a long run showed, on what device, and the hashes of the sources that it ran.

    python tests/receipts.py            # a table: name, date, device, fresh, stale or missing, what has changed
    python tests/receipts.py --strict   # and exit code 1 unless every required receipt is there and fresh

A receipt guards against forgetting, not against forging: it says nothing any more once a source it names has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reliability" / "receipts"
REQUIRED = ("memcheck", "racecheck", "initcheck", "synccheck", "leaks", "soak", "parity", "large")
NAME = re.compile(r"[a-z][a-z0-9_]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
KINDS: dict[str, type] = {
    "what": str,  # in a sentence
    "command": str,  # that gives it again
    "metrics": dict,
    "planted": dict,  # fault that was planted -> what the tool said of it
    "sources": dict,  # path, relative to the root -> SHA-256
    "device": str,
    "versions": dict,
    "date": str,
}


class ReceiptError(ValueError):
    """A file is no receipt."""


def device_sources(root: Path = ROOT) -> list[str]:
    """The files in cuda/, as paths relative to the root: every receipt depends on all of them."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "cuda").rglob("*.cu*"))


def hashes(files: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Path -> SHA-256, without those that are not there."""
    paths = {file: root / file for file in files}
    return {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in paths.items() if path.is_file()}


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
    """Write a receipt of a run that went well.

    Args:
        name: Of the receipt, and of its file.
        what: What was run, in a sentence.
        command: Gives the metrics again.
        metrics: Numbers and short texts, the tool's own last words among them.
        planted: Fault -> what the tool said of it. A tool that has not been seen to catch a fault shows nothing.
        python: Files beside those in cuda/ that the result depends on; or patterns, such as "gpu_vecenv/envs/*.py".
        device: None asks torch for the name of its GPU.
        folder: Where receipts lie.
        root: Of the sources.

    Raises:
        ReceiptError: The name is none, a pattern meets no file, or nothing was planted.
    """
    if not NAME.fullmatch(name):
        raise ReceiptError(f"a receipt is called {name!r}; expected {NAME.pattern}")
    if not planted:
        raise ReceiptError(f"{name}: nothing was planted; expected at least one fault and what the tool said of it")
    files = device_sources(root)
    for pattern in python:
        found = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file())
        if not found:
            raise ReceiptError(f"{name}: {pattern!r} meets no file below {root.name}")
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
    """A receipt, or None where there is none.

    Raises:
        ReceiptError: The file is damaged, or is no receipt.
    """
    try:
        content = json.loads((folder / f"{name}.json").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ReceiptError(f"{name}.json cannot be read: {error}") from error
    return checked(name, content)


def checked(name: str, content: Any) -> dict[str, Any]:
    """``content``, if it is a receipt; else ReceiptError."""
    if not isinstance(content, dict):
        raise ReceiptError(f"{name}.json is a {type(content).__name__}; expected an object")
    if content.keys() != KINDS.keys():
        differing = ", ".join(sorted(content.keys() ^ KINDS.keys()))
        raise ReceiptError(f"{name}.json lacks, or has beside a receipt's keys: {differing}")
    for key, kind in KINDS.items():
        if not isinstance(content[key], kind) or not content[key]:
            got = str(content[key])[:80]
            raise ReceiptError(f"{name}.json: {key} is {got!r}; expected a {kind.__name__} with content")
    for file, value in content["sources"].items():
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            got = str(value)[:80]
            raise ReceiptError(f"{name}.json: the hash of {file} is {got!r}; expected 64 hexadecimal digits")
    return content


def stale(receipt: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Files that are no longer what the receipt's run had: changed, gone, or new in cuda/."""
    sources: dict[str, str] = receipt["sources"]
    now = hashes({*sources, *device_sources(root)}, root)
    return sorted(file for file in {*sources, *now} if sources.get(file) != now.get(file))


def device_name() -> str:
    """What torch calls its GPU; else the processor's architecture."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def versions() -> dict[str, str]:
    """Of all that a result may depend on beside our sources."""
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
    """Rows of (name, date, device, state), the required ones first; and the names of the required that do not count."""
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
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description="Receipts of long runs: which are fresh, stale or missing.")
    parser.add_argument("--strict", action="store_true", help="exit code 1 unless all required ones are fresh")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they lie")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the sources")
    chosen = parser.parse_args(arguments)
    rows, lacking = table(chosen.folder, chosen.root)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    if lacking:
        print(f"{len(lacking)} of {len(REQUIRED)} required receipts do not count: {', '.join(lacking)}")
    return 1 if chosen.strict and lacking else 0


if __name__ == "__main__":
    sys.exit(main())
