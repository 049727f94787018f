"""The Python of docs/clients.md, run as it stands there."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python client\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documented(client: str) -> dict[str, Any]:
    """Run the Python blocks of a client's section one after the other; the variables that they set."""
    sections = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
    blocks, variables = BLOCK.findall(sections[client]), {"__name__": "documented"}
    assert blocks, f"{PAGE.name} has no Python for {client}"
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {client}", "exec"), variables)  # our own documentation
    return variables
