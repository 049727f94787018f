"""A page for each notebook of `examples/notebooks`: its text, its code and the results that are stored in it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOSTED = "colab"  # an image with this in its address is a button for another site; the page has none


def page(notebook: dict[str, Any], name: str, folder: Path) -> str:
    """The notebook as Markdown; its pictures are written into the folder of the page."""
    parts = [f"*A notebook: `examples/notebooks/{name}.ipynb`.*"]
    for index, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append("\n".join(line for line in source.splitlines() if HOSTED not in line).strip())
        else:
            language = "text" if source.lstrip().startswith(("%", "!")) else "python"
            parts.append(f"```{language}\n{source}\n```")
            parts += outputs(cell["outputs"], f"{name}-{index}", folder)
    title = next(part for part in parts if part.startswith("# "))
    parts.remove(title)
    heading, _, rest = title.partition("\n")
    return "\n\n".join(filter(None, [heading, *parts[:1], rest.strip(), *parts[1:]])) + "\n"


def outputs(stored: list[dict[str, Any]], name: str, folder: Path) -> Iterator[str]:
    """What a cell printed and showed: pictures, else text; other kinds are left out."""
    for number, output in enumerate(stored):
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            picture = folder / f"{name}-{number}.png"
            picture.write_bytes(base64.b64decode("".join(data["image/png"])))
            yield f"![result]({picture.name})"
        elif text := "".join(data.get("text/plain", "")).rstrip():
            yield f"```text\n{text}\n```"


def write(source: Path, folder: Path) -> None:
    """Write all pages; files that are right already stay as they are."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.ipynb")):
        text = page(json.loads(path.read_text(encoding="utf-8")), path.stem, folder)
        target = folder / f"{path.stem}.md"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
