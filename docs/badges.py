"""The badges of README.md, `docs/_static/badge-*.svg`: ``python docs/badges.py``. They need no account."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_static"
HEIGHT, LETTER, MARGIN = 20, 6.6, 8  # pixels; of a letter its width
GREY, BLUE = "#4b5563", "#0072b2"


def badges() -> dict[str, tuple[str, str]]:
    """Name -> (left, right); versions and the licence are those of pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (licence,) = re.findall(r'^license = "(.*)"$', project, re.MULTILINE)
    return {
        "licence": ("licence", licence),
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "bits": ("GPU = CPU = WebAssembly", "bit-identical"),
    }


def badge(left: str, right: str) -> str:
    """Two words on two colours, as SVG."""
    widths = [round(len(text) * LETTER + 2 * MARGIN) for text in (left, right)]
    total, middles = sum(widths), (widths[0] / 2, widths[0] + widths[1] / 2)
    texts = "".join(
        f'<text x="{x:g}" y="14">{escape(text)}</text>' for x, text in zip(middles, (left, right), strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(left)}: {escape(right)}"><clipPath id="r">'
        f'<rect width="{total}" height="{HEIGHT}" rx="4"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{widths[0]}" height="{HEIGHT}" fill="{GREY}"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="{HEIGHT}" fill="{BLUE}"/></g>'
        f'<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">{texts}</g>'
        "</svg>\n"
    )


if __name__ == "__main__":
    for name, texts in badges().items():
        (FOLDER / f"badge-{name}.svg").write_text(badge(*texts), encoding="utf-8")
