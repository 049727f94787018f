"""What the commands that train one side at a time have in common: options, the module of the side, rows of the file."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.side import versions
from benchmarks.workload import Precision, Workload


def add_options(parser: argparse.ArgumentParser) -> None:
    """The side, its device, the peer's scripts, and the file."""
    parser.add_argument("side", choices=("gpu_vecenv", "jaxmarl"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--published", help="folder with the scripts that the peer publishes outside of PyPI")
    parser.add_argument("--json", type=Path, required=True, help="file to which the row is added")


def check_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End with a message where a peer's scripts are not named."""
    if given.side != "gpu_vecenv" and given.published is None:
        parser.error("--published is missing; expected the folder of the peer's scripts")


def module_of(side: str) -> ModuleType:
    """The module that trains the side; it imports the side's libraries."""
    return importlib.import_module("benchmarks.ours" if side == "gpu_vecenv" else f"benchmarks.peers.{side}")


def precision_of(device: str) -> Precision:
    """Of matrix products, on both sides."""
    return "tf32" if device == "cuda" else "float32"


def add_row(
    given: argparse.Namespace,
    workload: Workload,
    module: ModuleType,
    found: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Add what was found, with the workload, the date and versions, to the file; returns the row."""
    row = {
        "side": given.side,
        **workload.row(),
        **found,
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "versions": versions(module.PEER.packages),
        **facts,
    }
    rows = json.loads(given.json.read_text(encoding="utf-8"))["rows"] if given.json.exists() else []
    given.json.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n", encoding="utf-8")
    return row
