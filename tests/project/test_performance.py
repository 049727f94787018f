"""The tables of benchmarks.performance: they are the raw files', and the scripts that measure these run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import measurements  # noqa: E402
import train_examples  # noqa: E402

from benchmarks import performance  # noqa: E402
from benchmarks.errors import BenchmarkError  # noqa: E402
from gpu_vecenv.engine import timing  # noqa: E402

PAGES = {path: path.read_text(encoding="utf-8") for path in performance.PAGES}
TABLES = [
    found
    for page in PAGES.values()
    for section in performance.MARKED.finditer(page)
    for found in re.finditer(r"(?:^\|.*\n)+\n(.*)\n(.*)\n", section[0], re.M)
]


def write(folder: Path, name: str, rows: list[dict[str, Any]], **common: Any) -> None:
    results = {"device": "Card", "commit": "abc", "torch": "2", "python": "3", **common, "rows": rows}
    (folder / name).write_text(json.dumps(results))


def test_the_tables_are_made_of_the_raw_files() -> None:
    assert performance.written(PAGES) == PAGES


def test_each_table_has_computer_commit_file_and_command_below_it() -> None:
    assert len(TABLES) == sum(len(performance.read(section)) for section in performance.SECTIONS.values()) >= 16
    for found in TABLES:
        caption, command = found[1], found[2]
        files = re.findall(r"`docs/performance/([^`]+\.json)`", caption)
        assert files and re.fullmatch(r"`(taskset -c 0 )?python .*`\\?", command), caption
        for file in files:
            results = json.loads((performance.FOLDER / file).read_text(encoding="utf-8"))
            assert not results.get("quick") and caption.startswith(f"*{results['device']}, ")
            assert f", commit {results['commit']}" in caption
            assert not any("commit" in row for row in results["rows"]), "one file, one commit"
            if "_quartiles" in json.dumps(results):
                assert {"torch", "python", "device_source_sha256"} <= set(results)


def test_pages_and_files_have_no_goals() -> None:
    for page in PAGES.values():
        assert not re.search(r"\bgoals?\b", page)
    for name in performance.MEASUREMENTS:
        for path in performance.FOLDER.glob(f"*-{name}.json"):
            assert '"goal' not in path.read_text(encoding="utf-8")


def test_files_that_prose_names_exist() -> None:
    for page in PAGES.values():
        for file in re.findall(r"docs/performance/([\w-]+\.json)", page):
            assert (performance.FOLDER / file).is_file(), file


ROW = {"game": "g", "num_envs": 2000, "num_agents": 5, "config": {}, "step_us": 4.6, "sample_and_step_us": 5.464}
ROW |= {"sample_and_step_env_steps_per_s": 366_046_904, "step_share_of_copy_bandwidth": 0.0676}


def test_cells_have_quartiles_where_files_do(tmp_path: Path) -> None:
    write(tmp_path, "h9-cuda_core.json", [{**ROW, "step_us_quartiles": [4.5, 4.71]}], driver="cuda.core 1")
    slower = {**ROW, "num_envs": 3, "step_us": 1234.5, "step_us_quartiles": [1.0, 2000.0]}
    write(tmp_path, "h9-pycuda.json", [{**ROW, "sample_and_step_env_steps_per_s": 4e8}, slower], driver="PyCUDA 2")
    lines = list(performance.lines("steps", tmp_path))
    assert lines[2] == "| `g` | 3 x 5 | - | - | 1,230 (1.00 … 2,000) | 5.46 | 366 M | 7% |"
    assert lines[3] == "| `g` | 2,000 x 5 | 4.60 (4.50 … 4.71) | 5.46 | 4.60 | 5.46 | 400 M | 7% |"
    told = "`docs/performance/h9-cuda_core.json`, `docs/performance/h9-pycuda.json`"
    assert lines[5] == f"*Card, commit abc, torch 2, Python 3, cuda.core 1, PyCUDA 2: {told}.*\\"
    first, second = map(performance.command_of, ("cuda_core", "pycuda"))
    assert lines[6:] == [f"`{first}`\\", f"`{second}`"]


def test_each_card_has_a_table_of_its_own(tmp_path: Path) -> None:
    row = {"num_envs": 4, "seeds": 10, "unsolved": 1, "seconds_to_solve": 0.2, "seconds_of_the_slowest": 0.25}
    for card in ("h9", "h8"):
        write(tmp_path, f"{card}-solved.json", [row], device=card)
    lines = list(performance.lines("solved", tmp_path))
    assert [line.split(",")[0] for line in lines if line.startswith("*")] == ["*h8", "*h9"]
    assert lines.count("| 4 | 0.200 | 0.250 | 9 of 10 |") == 2


def test_rates_have_quartiles_where_files_do(tmp_path: Path) -> None:
    python = {"where": "NumPy", "num_envs": 4, "env_steps_per_s": 1302.0, "env_steps_per_s_quartiles": [987.0, 1620.0]}
    write(tmp_path, "h9-cpu-baseline.json", [python, {"where": "device", "num_envs": 4, "env_steps_per_s": 2.604e6}])
    lines = list(performance.lines("cpu-baseline", tmp_path))
    assert lines[2:4] == ["| NumPy | 4 | 1.30 k (0.987 … 1.62) | 1.00 |", "| device | 4 | 2.60 M | 2,000 |"]


def test_a_table_of_two_commits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "h9-cuda_core.json", [ROW])
    write(tmp_path, "h9-pycuda.json", [ROW], commit="def")
    with pytest.raises(BenchmarkError, match="commit of h9-cuda_core, pycuda is abc and def; expected the same"):
        performance.read(performance.SECTIONS["steps"], tmp_path)


def test_pages_without_a_section_are_refused() -> None:
    page = next(iter(PAGES))
    with pytest.raises(BenchmarkError, match=r"the pages have tables .*; expected steps"):
        performance.written({page: PAGES[page]})


def given(file: Path) -> Any:
    return SimpleNamespace(file=file, device=torch.device("cpu"), quick=False)


def test_rows_of_a_file_are_kept_and_those_of_another_commit_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    first = measurements.Measurements(given(file), config={"sizes": (1, 2)})
    assert first.measure({"name": "a"}, lambda: {"ms": 1}) == {"name": "a", "ms": 1}
    again = measurements.Measurements(given(file), config={"sizes": (1, 2)})
    assert again.measure({"name": "a"}, lambda: pytest.fail("it was measured before")) == {"name": "a", "ms": 1}
    again.measure({"name": "b"}, lambda: {"ms": 2})
    results = json.loads(file.read_text())
    assert results["rows"] == [{"name": "a", "ms": 1}, {"name": "b", "ms": 2}]
    assert results["commit"] == timing.provenance(torch.device("cpu"))["commit"]
    assert capsys.readouterr().out.splitlines() == [json.dumps(row) for row in results["rows"]]
    file.write_text(json.dumps({**results, "commit": "abc"}))
    with pytest.raises(SystemExit, match=r"has rows of commit abc, now .*; expected the same.*move this one away"):
        measurements.Measurements(given(file), config={"sizes": (1, 2)})


def test_ratios_are_of_neighbouring_repeats() -> None:
    assert measurements.ratios("ratio", [1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == {
        "ratio": 2.0,
        "ratio_quartiles": [1.5, 2.5],
    }


def job(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "performance.py"), str(folder), *names, "--quick"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_was_measured_is_left_out_and_another_commit_refused(tmp_path: Path) -> None:
    done = job(tmp_path, "sampler", "--max-seconds", "0")
    assert done.returncode == 0 and done.stdout.startswith("sampler: python tests/gpu/sampler_speed.py"), done
    (file,) = tmp_path.glob("*.json")
    assert file.name == "cpu-sampler.json" and not list((tmp_path / "unfinished").iterdir())
    done = job(tmp_path, "sampler", "cuda_core", "one-core", "--max-seconds", "0")
    assert done.returncode == 3 and done.stdout.startswith("cuda_core: ")
    assert done.stdout.endswith("left: one-core; the same command measures them\n")
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "abc"}))
    done = job(tmp_path, "sampler")
    assert done.returncode == 1 and "cpu-sampler.json has rows of commit abc, now" in done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_measurement_writes_a_file_that_becomes_a_table(tmp_path: Path) -> None:
    done = job(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, section in performance.SECTIONS.items():
        if all(performance.MEASUREMENTS[measurement].quick for measurement in section.measurements):
            lines = list(performance.lines(name, tmp_path))
            rows = [line for line in lines if line.startswith("| ")]
            assert len(rows) > 1 and any("(" in line for line in rows[1:]), name
            assert all((tmp_path / file).exists() for file in re.findall(r"/([\w-]+\.svg)\)", "\n".join(lines)))


def test_examples_of_adapters_are_measured_with_other_sizes_and_seeds() -> None:
    for name in train_examples.SIZES:
        text = train_examples.text_of(name, 7)
        compile(text, name, "exec")
        original = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert "4096" in text and "seed" in text and re.search(r"seed\S* ?1\b", text) is None
        assert len(text.splitlines()) == len(original.splitlines())


def test_the_figures_of_an_example_are_those_that_it_prints() -> None:
    found = train_examples.figures_of("return at random -1230, trained -153 (0 at most), after 6.62 s")
    assert found == {"random": -1230, "trained": -153, "seconds": 6.62}
    found = train_examples.figures_of("return of random actions -26.5, after 12.04 s of training -14.2")
    assert found == {"random": -26.5, "trained": -14.2, "seconds": 12.04}
    found = train_examples.figures_of("return at random 22, of the last 100 episodes 499, 4.34 s")
    assert found == {"random": 22, "trained": 499, "seconds": 4.34}
