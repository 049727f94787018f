"""Pages in one self-contained file, which loads nothing: script, style and data are inline."""

from __future__ import annotations

import base64
import hashlib
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What all pages forbid; {script} and {style} become the hashes of the inline ones.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"
)
FRAGMENTS = ("view", "transport", "events", "keys")  # of player/*.html, which pages with a player have


def inline_page(folder: Path, script: str, content: Mapping[str, Any], *, policy: str = POLICY) -> str:
    """The page of a folder's ``page.html`` and ``page.css``, after the style that all pages have.

    ``page.html`` may have the controls of a player: ``$view``, ``$transport``, ``$events`` and ``$keys``.

    Args:
        folder: Where the two files are.
        script: JavaScript.
        content: What the script reads, in JSON types; no text in it is executed.
        policy: The content security policy.

    Raises:
        ValueError: ``content`` has a number that is not finite.
    """
    shared = Path(__file__).parent
    parts = {name: read(shared / "player" / f"{name}.html").rstrip() for name in FRAGMENTS}
    scripted = {"script": script, "style": read(shared / "base.css") + read(folder / "page.css")}
    hashes = policy.format_map({name: _hash(text) for name, text in scripted.items()})
    return string.Template(read(folder / "page.html")).substitute(
        parts | scripted, policy=hashes, data=_escaped(content)
    )


def read(path: Path) -> str:
    """Text of a file of the package."""
    return path.read_text(encoding="utf-8")


def _escaped(content: Mapping[str, Any]) -> str:
    """Equal JSON, in which no text can close the script element around it."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def _hash(text: str) -> str:
    """Hash of an inline script or style for the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
