"""tests/gpu/societies.py: it keeps what examples print, run by run, and its tables are made of that."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import imported_script

# In place of an example, which takes half a minute: what its table looks like, of a number that depends on the seed.
EXAMPLE = """
import sys
seed = int(sys.argv[sys.argv.index("--seed") + 1])
print("players   utility  equality")
print(f"random        1.0       0.5")
print(f"trained  {seed + 2:8.3f} {'nan' if seed else 0.25:>9}")
"""


@pytest.fixture
def societies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "example.py").write_text(EXAMPLE)
    with imported_script(Path(__file__).parents[1] / "gpu" / "societies.py", "figures", "measurements") as module:
        monkeypatch.setattr(module, "VARIANTS", {"harvest-mean": f"{tmp_path}/example.py --common-reward mean"})
        yield module


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["societies.py", *map(str, arguments)])
    code: int = module.main()
    return code


def test_parts_are_kept_and_tables_tell_seeds_without_a_number(
    societies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "out", "--seeds", 2, "--device", "cpu"
    assert call(societies, monkeypatch, *given, "--max-seconds", 0) == societies.UNFINISHED
    first = (tmp_path / "out" / "harvest-mean-seed0.json").read_bytes()
    assert call(societies, monkeypatch, *given) == 0
    assert (tmp_path / "out" / "harvest-mean-seed0.json").read_bytes() == first
    capsys.readouterr()
    assert call(societies, monkeypatch, tmp_path / "out", "--tables", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "| harvest | random | 2 | 1.000 [1.000, 1.000], 1.000 | 0.50 [0.50, 0.50], 0.50 |",
        "| harvest | mean | 2 | 2.500 [2.000, 3.000], 2.000 | 0.25 [0.25, 0.25], 0.25, 1 none |",
    ]
    kept = json.loads((tmp_path / "commons.json").read_text())
    assert [one["seed"] for one in kept["runs"]] == [0, 1]
    assert kept["runs"][1]["rows"][1] == {"players": "trained", "utility": 3.0, "equality": None}


def test_runs_of_two_commits_are_not_mixed(
    societies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(societies, monkeypatch, tmp_path / "out", "--seeds", 2, "--device", "cpu") == 0
    file = tmp_path / "out" / "harvest-mean-seed1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "another"}))
    with pytest.raises(SystemExit, match="different commits"):
        call(societies, monkeypatch, tmp_path / "out", "--tables", tmp_path)
