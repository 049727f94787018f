"""Sphinx's configuration: `make docs`. Nothing is fetched, neither while it builds nor by a reader's browser."""

from __future__ import annotations

import dataclasses
import html
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import addresses  # noqa: E402
import gallery_films  # noqa: E402
import game_pages  # noqa: E402
import notebook_pages  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import gpu_vecenv  # noqa: E402

project = "gpu_vecenv"
DESCRIPTION = (
    "Simulate and train multi-agent games entirely on one GPU: Gymnasium and PettingZoo environments, torch, PPO."
)
copyright = "the authors of gpu_vecenv, Apache-2.0"
version = release = gpu_vecenv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# The libraries of the adapters need not be installed.
autodoc_mock_imports = [
    "benchmarl", "lightning", "pufferlib", "ray", "rl_games", "rsl_rl", "skrl", "stable_baselines3", "supersuit",
    "tensordict", "tianshou", "torchrl",
]  # fmt: skip
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # one list, as for arguments
napoleon_custom_sections = [("Returns", "prose"), ("Yields", "prose")]  # not "type: description", as Google has it
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

smartquotes_action = "qe"  # two hyphens begin options of commands
html_theme = "furo"
html_title = f"gpu_vecenv {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = html_logo = "_static/logo.svg"
html_baseurl = addresses.SITE
html_theme_options: dict[str, Any] = {"source_repository": addresses.REPOSITORY} if addresses.REPOSITORY else {}
if addresses.REPOSITORY:
    html_theme_options |= {"source_branch": "main", "source_directory": "docs/"}
html_copy_source = html_show_sourcelink = False

# Names of this library must resolve. Those of others are not looked up, which needs the network; some have no page.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!gpu_vecenv\.).*"),
    ("py:class", r"gpu_vecenv\.(compile|declare|engine|train)\.[\w.]+"),
    ("py:class", r"gpu_vecenv\.errors\.Returned"),  # a type variable, which has no page
]

CODE = re.compile(r"(``.+?``)")
# Documents beside docs/ that its pages link to.
BESIDE = sorted(path.name for path in DOCS.parent.glob("*.md") if path.name != "README.md")


def generate(app: Sphinx) -> None:
    """Write what is made from the declarations, and take over the documents that lie outside."""
    docs = Path(app.srcdir)
    game_pages.write(docs, docs / "games")
    notebook_pages.write(docs.parent / "examples" / "notebooks", docs / "notebooks")
    (docs / "project").mkdir(exist_ok=True)
    for name in BESIDE:
        text = (docs.parent / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        target = docs / "project" / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Documents as they read on the site: pages instead of sections for games, the outer documents among them."""
    if name == "games":
        source[0] = game_pages.overview(source[0])
    if name == "index":
        source[0] = source[0].replace("<!-- a link to play each game -->", game_pages.links_to_play())
    for document in BESIDE:
        source[0] = source[0].replace(f"](../{document}", f"](project/{document}")


def record(app: Sphinx, exception: Exception | None) -> None:
    """Put the replays and the games beside the pages."""
    if exception is None and app.builder.format == "html":
        gallery_films.write(Path(app.outdir) / "replays")
        game_pages.write_playable(Path(app.outdir) / "play")


def preview(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What other sites show of a link to a page: Open Graph; its address and picture where the site has an address."""
    title = re.sub(r"<[^>]*>", "", context.get("title", project))
    about = {"type": "website", "site_name": project, "title": title, "description": DESCRIPTION}
    if addresses.SITE:
        about |= {"url": f"{addresses.SITE}{name}.html", "image": f"{addresses.SITE}_static/preview.png"}
    tags = [f'<meta property="og:{key}" content="{html.escape(text)}" />' for key, text in about.items()]
    tags.append(f'<meta name="description" content="{html.escape(DESCRIPTION)}" />')
    context["metatags"] = context.get("metatags", "") + "\n".join(tags)


def docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn docstrings with Google's sections into reST, and add the fields of a dataclass."""
    if what == "class" and dataclasses.is_dataclass(thing) and "Args:" not in lines:
        attributes = [f"    {field}: {comment}" for field, comment in game_pages.comments(thing).items()]
        lines += ["", "Attributes:", *attributes, ""] if attributes else []
    lines[:] = ["".join(escaped(part) for part in CODE.split(line)) for line in lines]
    if what in ("property", "attribute"):
        # napoleon takes what stands before a colon for a type, unless the line ends there
        lines[:1] = lines[0].replace(": ", ":\n", 1).split("\n")


def escaped(part: str) -> str:
    """Prose outside of code: escape every star that does not begin a list."""
    return part if part.startswith("``") else re.sub(r"\*(?=\S)", r"\*", part)


def setup(app: Sphinx) -> None:
    """Sphinx's hook."""
    app.connect("builder-inited", generate)
    app.connect("source-read", adapt)
    app.connect("html-page-context", preview)
    app.connect("build-finished", record)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon
