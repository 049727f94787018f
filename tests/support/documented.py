"""The Python of docs/clients.md, run as it stands there."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python client\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(client: str) -> str:
    """The Python blocks of a client's section."""
    sections = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
    blocks = BLOCK.findall(sections[client])
    assert blocks, f"{PAGE.name} has no Python for {client}"
    return "\n\n".join(blocks)


def documented(client: str) -> dict[str, Any]:
    """Run the Python blocks of a client's section; the variables that they set."""
    variables: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code_of(client), f"{PAGE.name}: {client}", "exec"), variables)  # our own documentation
    return variables
