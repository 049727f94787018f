"""tests/gpu/societies.py: seeds are trained together in parts, and its tables are made of what was measured of each."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import imported_script

from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure


def make_trainer(total_steps: int, seed: int, device: str) -> Trainer:
    env = VecEnv(configure("cartpole"), 4, device)
    return Trainer(env, PPOConfig(total_steps=total_steps, num_steps=8, hidden_sizes=(8,)), seed=seed)


def rows(trainer: Trainer, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """Numbers that depend on the seed, and a weight that depends on every iteration."""
    weight = next(trainer.policies["agent"].parameters()).flatten()[0].item()
    yield {"players": "random", "utility": 1.0, "equality": 0.5}
    yield {"players": "trained", "utility": seed + 2.0, "equality": None if seed else 0.25, "weight": weight}


@pytest.fixture
def societies(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    modules = ("figures", "measurements", "commons", "economy_taxes")
    with imported_script(Path(__file__).parents[1] / "gpu" / "societies.py", *modules) as module:
        monkeypatch.setattr(module, "VARIANTS", {"harvest-mean": lambda: module.Variant(256, make_trainer, rows)})
        monkeypatch.setattr(module, "PARTS", 2)
        yield module


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["societies.py", *map(str, arguments)])
    code: int = module.main()
    return code


def train(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> int:
    return call(module, monkeypatch, folder, "--seeds", 2, "--device", "cpu", *arguments)


def test_training_in_parts_is_that_of_one_call_and_tables_tell_seeds_without_a_number(
    societies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert train(societies, monkeypatch, parts, "--max-seconds", 0) == societies.UNFINISHED
    assert not list(parts.glob("*-seed*.json"))
    assert train(societies, monkeypatch, parts) == train(societies, monkeypatch, whole) == 0
    for folder in (parts, whole):
        capsys.readouterr()
        assert call(societies, monkeypatch, folder, "--tables", folder) == 0
        assert capsys.readouterr().out.splitlines()[:2] == [
            "| harvest | random | 2 | 1.000 [1.000, 1.000], 1.000 | 0.50 [0.50, 0.50], 0.50 |",
            "| harvest | mean | 2 | 2.500 [2.000, 3.000], 2.000 | 0.25 [0.25, 0.25], 0.25, 1 none |",
        ]
    kept = [json.loads((folder / "commons.json").read_text())["runs"] for folder in (parts, whole)]
    assert [one["rows"] for one in kept[0]] == [one["rows"] for one in kept[1]]
    assert [(one["seed"], one["at_once"], one["env_steps"]) for one in kept[0]] == [(0, 2, 256), (1, 2, 256)]


def test_runs_of_two_commits_are_not_mixed(
    societies: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(societies, monkeypatch, tmp_path, "--max-seconds", 0) == societies.UNFINISHED
    state = tmp_path / "unfinished" / "harvest-mean" / "state.json"
    kept = json.loads(state.read_text())
    state.write_text(json.dumps({**kept, "commit": "another"}))
    with pytest.raises(SystemExit, match="commit another, now"):
        train(societies, monkeypatch, tmp_path)
    state.write_text(json.dumps(kept))
    assert train(societies, monkeypatch, tmp_path) == 0
    file = tmp_path / "harvest-mean-seed1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "another"}))
    with pytest.raises(SystemExit, match="different commits"):
        call(societies, monkeypatch, tmp_path, "--tables", tmp_path)
