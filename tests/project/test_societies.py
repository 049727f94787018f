"""tests/gpu/societies.py: seeds are trained together in parts, and its tables are made of what was measured of each."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import imported_script

from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure

MODULES = ("figures", "preset_runs", "commons", "economy_taxes")


def make_trainer(total_steps: int, seed: int, device: str) -> Trainer:
    env = VecEnv(configure("cartpole"), 4, device)
    return Trainer(env, PPOConfig(total_steps=total_steps, num_steps=8, hidden_sizes=(8,)), seed=seed)


def point(trainer: Trainer, episodes: int) -> Mapping[str, float | None]:
    """A weight, which depends on every iteration."""
    return {"weight": next(trainer.policies["agent"].parameters()).flatten()[0].item() * episodes}


def rows(trainer: Trainer, beside: Mapping[str, None], episodes: int, seed: int) -> Iterator[dict[str, Any]]:
    """Numbers that depend on the seed."""
    for players in beside:
        yield {"players": players, "utility": 1.0, "equality": 0.5}
    yield {"players": "trained", "utility": seed + 1.0, "equality": None if seed > 1 else 0.25, **point(trainer, 1)}


@pytest.fixture
def societies(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported_script(Path(__file__).parents[1] / "gpu" / "societies.py", *MODULES) as module:
        variant = module.Variant(256, make_trainer, point, rows)
        monkeypatch.setattr(module, "VARIANTS", {"harvest-mean": lambda: variant, "harvest-none": lambda: variant})
        yield module


def call(module: ModuleType, folder: Path, **given: Any) -> int:
    own = {"seeds": 2, "points": 2, "curve_episodes": 3, "device": "cpu", "variants": "harvest-mean"}
    options = module.Options(**own | given)
    code: int = module.main(folder, options)
    return code


def test_training_in_parts_is_that_of_one_call_and_tables_tell_seeds_without_a_number(
    societies: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert call(societies, parts, max_seconds=0) == societies.UNFINISHED
    assert not json.loads((parts / "figures.json").read_text())["runs"]
    assert call(societies, parts) == call(societies, whole) == 0
    for folder in (parts, whole):
        capsys.readouterr()
        assert call(societies, folder, tables=folder) == 0
        assert capsys.readouterr().out.splitlines()[:2] == [
            "| harvest | random | 2 | 1.000 [1.000, 1.000], 1.000 | 0.50 [0.50, 0.50], 0.50 |",
            "| harvest | mean | 2 | 2.500 [2.000, 3.000], 2.000 | 0.25 [0.25, 0.25], 0.25, 1 none |",
        ]
    kept = [json.loads((folder / "commons.json").read_text())["runs"] for folder in (parts, whole)]
    for name in ("rows", "curve"):
        assert [run[name] for run in kept[0]] == [run[name] for run in kept[1]]
    assert [(run["seed"], run["at_once"], run["env_steps"], len(run["curve"])) for run in kept[0]] == [
        (0, 2, 256, 2),
        (1, 2, 256, 2),
    ]


def test_random_players_are_measured_once_with_the_first_variant_of_a_game(
    societies: ModuleType, tmp_path: Path
) -> None:
    assert call(societies, tmp_path, variants="harvest-none,harvest-mean", seeds=1) == 0
    runs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    measured = {run["row"]: [row["players"] for row in run["rows"]] for run in runs}
    assert measured == {"harvest-none": ["trained"], "harvest-mean": ["random", "trained"]}


def test_an_unknown_variant_is_refused(societies: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no variants chess; expected some of harvest-mean, harvest-none"):
        societies.main(tmp_path, societies.Options(variants="chess"))
    assert not list(tmp_path.iterdir())
