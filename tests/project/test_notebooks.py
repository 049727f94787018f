"""The notebooks: they hold small results of a run on a CPU, on which they run top to bottom, each in its own kernel."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.processes import child_environment

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
from support.notebooks import executed, read  # noqa: E402 - it imports both

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
REPOSITORY = re.compile(r'^Repository = "https://github\.com/(.+)"$', re.MULTILINE)
BADGE = re.compile(
    r"\[!\[Open in Colab\]\(https://colab\.research\.google\.com/assets/colab-badge\.svg\)\]"
    r"\(https://colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/(\S+)\)\n"
)
# Libraries that a notebook needs beside those of all tests; two numbers that it must print, and how much larger the
# second is at least: about half of what was seen. After as few steps as the quick start takes, runs differ much: there
# it is thrice what 500 episodes leave to chance.
SAYS = {
    "lightning_tag": (("lightning",), [(r"random taggers: a return of (\d+) (?s:.*)trained taggers: .* of (\d+) ", 8)]),
    "own_game": ((), [(r"in 50 steps: ([\d.]+) at random, ([\d.]+) trained", 3)]),
    "quick_start": ((), [(r"random taggers catch .* in (\d+)% (?s:.*)trained taggers catch .* in (\d+)% ", 10)]),
    "self_play": ((), [(r"random  +(\d+)% (?s:.*)wins (\d+)% against random moves", 15)]),
    "sb3_and_torchrl": (
        ("stable_baselines3", "torchrl"),
        [
            (r"stays up: (\d+) at random, (\d+) trained", 150),
            (r"return of an agent: (-\d+\.\d) in the first .* (-\d+\.\d) in the last", 2),
        ],
    ),
    "write_an_adapter": ((), [(r"steps of an episode: (\d+) at first, (\d+) at last", 30)]),
}
ENVIRONMENT = child_environment(CUDA_VISIBLE_DEVICES="")  # the notebooks use larger sizes on a GPU


def code(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_every_notebook_is_tested_and_named_in_the_table_of_examples() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SAYS)
    table = (ROOT / "examples" / "README.md").read_text()
    missing = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".ipynb")]
    assert [path.name for path in missing if f"]({path.relative_to(ROOT / 'examples').as_posix()})" not in table] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_small_results_of_a_whole_run(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)  # the first that has ids of cells
    ids = [cell.id for cell in notebook.cells]
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in ids) and len(set(ids)) == len(ids)
    assert [cell.execution_count for cell in code(path)] == list(range(1, len(code(path)) + 1))
    outputs = [output for cell in code(path) for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds and kinds <= {"image/png", "text/plain"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"} and path.stat().st_size < 400_000
    assert [cell.id for cell in notebook.cells if cell.metadata] == []
    assert set(notebook.metadata) == {"accelerator", "colab", "kernelspec", "language_info"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_in_colab_and_installs_only_what_is_missing(path: Path) -> None:
    badge = BADGE.match(read(path).cells[0].source)
    assert badge and badge[2] == path.relative_to(ROOT).as_posix()
    text = (ROOT / "pyproject.toml").read_text()
    repository = REPOSITORY.search(text)
    assert {badge[1]} == {BADGE.match(read(other).cells[0].source)[1] for other in NOTEBOOKS}
    assert repository is None or badge[1] == repository[1]
    first = code(path)[0].source
    assert 'if importlib.util.find_spec("gpu_vecenv") is None:' in first and "torch" not in first.replace("torchrl", "")
    (extras,) = re.findall(r'^    extras = "([\w,-]+)," \+ \("(?:cuda13" .* "compiler)"\)$', first, re.MULTILINE)
    assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in text] == []
    assert "def watch(" not in "".join(cell.source for cell in code(path))  # that of the package


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_cpu(path: Path, tmp_path: Path) -> None:
    libraries, says = SAYS[path.stem]
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    notebook = executed(path, tmp_path, ENVIRONMENT)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    for pattern, gain in says:
        match = re.search(pattern, said)
        assert match and float(match[2]) - float(match[1]) >= gain, said
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert shown and all("srcdoc=" in text for text in shown)
