"""The documentation site: it builds without a warning, lacks nothing, and a browser fetches nothing from elsewhere."""

import ast
import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gpu_vecenv
from gpu_vecenv.envs.particles import Particles
from gpu_vecenv.envs.registry import GAMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RULES = (DOCS / "games.md").read_text(encoding="utf-8")
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
# Whatever a browser loads by itself; links that are clicked may lead anywhere.
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|object|embed)\b[^>]*\b(?:src|data)=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b[^>]*\bhref=["']?(?:https?:)?//[^>]*>|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)


@pytest.fixture(scope="module")
def game_pages() -> Any:
    """The module beside Sphinx's configuration; nothing of Sphinx is needed for it."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("game_pages")
    finally:
        sys.path.remove(str(DOCS))


@pytest.mark.parametrize("name", GAMES)
def test_a_game_s_page_has_all_that_is_declared(game_pages: Any, name: str) -> None:
    page = game_pages.page(name, RULES)
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page.partition("## Parameters")[2], re.MULTILINE))
    beside = game_pages.comments(GAMES[name])
    for field in GAMES[name].own_fields():
        told, default = rows[field.name], field.default
        if told.startswith("≈ "):  # six digits
            assert f"{float(told[2:]):.6g}" == f"{default:.6g}"
        else:
            assert told == str(default)
        assert beside[field.name], f"{name}.{field.name} has no comment beside it, which would say what it is"
    assert {field.name for field in GAMES[name].state} <= set(rows)
    assert all(f"`{role}_0`" in page for role, agents in GAMES[name]().roles.items() if agents)
    keys = Counter([*GAMES[name].preset, *GAMES[name].sample_efficient_preset])
    assert all(page.count(f"| `{key}` |") >= count for key, count in keys.items())
    assert re.search(rf"^(?:\| |## (?:.*\b)?){name}\b", RESULTS, re.MULTILINE), "results.md lacks the game"
    measured = f"(results/{name}.png)" in RESULTS
    assert measured == (DOCS / "results" / f"{name}.png").exists() == (f"(../results/{name}.png)" in page)


@pytest.mark.parametrize("name", GAMES)
def test_a_game_s_page_leads_to_others_from_its_folder(game_pages: Any, name: str) -> None:
    page = game_pages.page(name, RULES)
    links = set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page)) - {f"{name}.png"}
    # The folder of the pages comes into being when the site is built.
    files = [Path(os.path.normpath(DOCS / "games" / link)) for link in links]
    assert "../games.md" in links and all(file.exists() for file in files), links
    assert ("#particle-games" in page) == issubclass(GAMES[name], Particles)


def variants(kind: Any) -> list[Any]:
    """The game as it is by default, and with each number that has a name of its own, one by one, a little larger."""
    numbers = [f.name for f in dataclasses.fields(kind) if f.name.startswith("num_")]
    return [kind(), *(kind(**{name: (getattr(kind(), name) or 0) + 2}) for name in numbers)]


@pytest.mark.parametrize("name", GAMES)
def test_the_tables_of_observations_count_every_number(game_pages: Any, name: str) -> None:
    kind = GAMES[name]
    tables = [table for _, table in game_pages.observation_tables(kind, game_pages.sections(RULES)[name])]
    assert tables
    games = {id(table): [table.game] for table in tables} | {id(tables[0]): variants(kind)}
    for table in tables:
        for game in games[id(table)]:
            if name == "simple_tag" and game.num_agent_neighbors is not None:
                continue  # told below its table
            expected = {role: shape[-1] for role, shape in game.layout.observation.shapes.items()}
            assert dataclasses.replace(table, game=game).lengths() == expected, game


def test_places_in_an_observation_follow_each_other(game_pages: Any) -> None:
    page = game_pages.page("tag_continuous", RULES)
    places = re.findall(r"^\| (\d+)(?: … (\d+))?[^|]*\|", page.partition("**Observation**")[2], re.MULTILINE)
    assert (places[0], places[7]) == (("0", "9"), ("70", "71"))
    assert [int(after[0]) for after in places[1:8]] == [int(before[1]) + 1 for before in places[:7]]


@pytest.mark.parametrize("name", GAMES)
def test_what_a_game_s_page_shows_runs(game_pages: Any, name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", game_pages.page(name, RULES), re.MULTILINE | re.DOTALL)
    told = re.search(r"a torch tensor \((.*)\)", blocks[0])
    scope: dict[str, Any] = {}
    exec(blocks[0], scope)
    assert told and told[1] == ", ".join(map(str, scope["obs"].shape))


def test_games_are_played_by_the_policies_of_the_results(game_pages: Any) -> None:
    names = sorted(path.stem for path in game_pages.POLICIES.iterdir())
    assert names == ["cartpole", "pendulum", "tag_gridworld"]
    for name in names:
        policy = game_pages.trained(name)
        assert policy.game == GAMES[name]() and (game_pages.POLICIES / f"{name}.safetensors").stat().st_size < 100_000
        (steps,) = {config.total_steps for config in policy.configs.values()}
        assert f"`gpu-vecenv train {name} --total-steps {steps}`" in game_pages.page(name, RULES)
    assert "All play at random" in game_pages.page("harvest", RULES)
    env = gpu_vecenv.make("cartpole", num_envs=32, device="cpu", autoreset_mode="next_step")
    # A random cart keeps its pole for 20 steps, one that learnt for most of 500.
    assert gpu_vecenv.evaluate(env, game_pages.trained("cartpole").policies, 32, seed=2)["return_agent"] > 300


def test_a_notebook_s_page_has_its_text_its_code_and_its_stored_results(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS))
    try:
        notebook_pages = importlib.import_module("notebook_pages")
    finally:
        sys.path.remove(str(DOCS))
    results = [
        {"output_type": "stream", "text": ["a\n", "b\n"]},
        {"output_type": "display_data", "data": {"image/png": "iVBORw==", "text/plain": "<Figure>"}},
    ]
    cells = [
        {
            "cell_type": "markdown",
            "source": ["[![a](https://colab.example/a.svg)](https://colab.example)\n\n# One\n", "Two"],
        },
        {"cell_type": "code", "source": ["print(1)"], "outputs": results},
    ]
    page = notebook_pages.page({"cells": cells}, "some", tmp_path)
    assert page.startswith(
        "# One\n\n*A notebook: `examples/notebooks/some.ipynb`.*\n\nTwo\n\n```python\nprint(1)\n```\n"
    )
    assert page.endswith("\n\n```text\na\nb\n```\n\n![result](some-1-1.png)\n") and "colab" not in page
    assert (tmp_path / "some-1-1.png").read_bytes() == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    made = shutil.ignore_patterns("_build", "games", "notebooks", "project", "__pycache__")
    shutil.copytree(DOCS, tmp_path / "docs", ignore=made)
    for beside in (*ROOT.glob("*.md"), ROOT / "examples"):
        (tmp_path / beside.name).symlink_to(beside)
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", tmp_path / "docs", site],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr  # a page outside of every table of contents is a warning too

    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for name in GAMES:
        page = pages[site / "games" / f"{name}.html"]
        assert f'src="../play/{name}.html#play"' in page
        assert f"_images/{name}.gif" in pages[site / "games.html"]
        assert (f"_images/{name}.png" in page) == (DOCS / "results" / f"{name}.png").exists()
    assert (site / "_images" / "cartpole.png").stat().st_size > 1000

    reference = "".join(page for path, page in pages.items() if path.parent.name == "api")
    assert [name for name in gpu_vecenv.__all__ if f'id="gpu_vecenv.{name}"' not in reference] == []

    for path, page in pages.items():
        assert FOREIGN.findall(page) == [], path
        for played in re.findall(r'<iframe[^>]*src="([^"]*)"', page):
            file = Path(os.path.normpath(path.parent / played.partition("#")[0]))
            assert file.stem in pages[file]
    for name in GAMES:
        assert f"{name}_v" in pages[site / "play" / f"{name}.html"]
        assert f'href="play/{name}.html"' in pages[site / "index.html"]
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        assert FOREIGN.findall(path.read_text(encoding="utf-8")) == [], path


def test_included_code_exists() -> None:
    included = re.compile(r"^:::\{literalinclude\} (.+)\n:language: python\n:pyobject: (.+)\n:::$", re.MULTILINE)
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    found = [(path, *match) for path, text in pages.items() for match in included.findall(text)]
    assert len(found) == sum(text.count("{literalinclude}") for text in pages.values()) > 0
    for page, file, name in found:
        nodes: Any = ast.parse((page.parent / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            (nodes,) = (node for node in nodes.body if getattr(node, "name", None) == part)


def test_the_search_for_foreign_references_finds_them() -> None:
    foreign = [
        '<script async="async" src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css" />',
        '<img alt="" src="http://example/badge.svg" />',
        "@import 'https://example/x.css'",
        "src: url(https://example/font.woff2)",
    ]
    assert all(FOREIGN.search(text) for text in foreign)
    assert not FOREIGN.search(
        '<a href="https://example">a link</a><img src="../_images/x.png" /><link href="../x.css" />'
    )
