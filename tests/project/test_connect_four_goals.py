"""tests/gpu/connect_four_goals.py: parts train and play as one run does, and goals tell the worst seed."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import imported_script

SCRIPT = Path(__file__).parents[1] / "gpu" / "connect_four_goals.py"
SMALL = '{"num_envs": 8, "total_steps": 256, "num_steps": 16, "num_minibatches": 2, "hidden_sizes": [8]}'


@pytest.fixture(scope="module")
def goals() -> Iterator[ModuleType]:
    with imported_script(SCRIPT, "connect_four_search", "tag_goals", "tag_baselines") as module:
        yield module


def options(goals: ModuleType, device: str, **changes: Any) -> Any:
    return goals.Options(**{"device": device, "seeds": 2, "episodes": 4, "learner": SMALL, **changes})


@pytest.mark.slow
def test_parts_give_what_one_run_gives(
    goals: ModuleType, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert goals.main(whole, options(goals, device)) == 1  # nobody learns it in 256 steps
    expected = [line for line in capsys.readouterr().out.splitlines() if "env-steps in" not in line]
    calls, code = 0, goals.UNFINISHED
    while code == goals.UNFINISHED and calls < 30:
        code = goals.main(parts, options(goals, device, max_seconds=0.0))
        calls += 1
    said = capsys.readouterr().out.splitlines()
    assert code == 1 and said[0] == "0 of 2 runs are trained; the same command continues"
    again = [line for line in said if "env-steps in" not in line and "continues" not in line]
    assert again == expected and len(expected) == 2 * 4 + 2
    found = json.loads((parts / "connect_four_goals.json").read_text())
    for run in found["runs"].values():
        assert run["env_steps"] == 256 and run["complete"] and len(run["matches"]) == 4


def test_goals_tell_the_worst_seed(goals: ModuleType, tmp_path: Path) -> None:
    def run(wins: int) -> dict[str, Any]:
        won = {"wins": [50, wins], "draws": [0, 1], "games": [50, 50]}
        matches = {f"{kind}, {name}": won for kind in ("greedy", "sampled") for name in goals.OPPONENTS}
        return {"error": "", "seconds": 1.0, "env_steps": 256, "matches": matches}

    results = goals.Results(tmp_path, {"runs": {"a": run(50), "b": run(35)}})
    lines = dict(goals.summary(["a", "b"], results))
    assert lines["a, greedy, random moves: 100.0% won, 1 of 100 drawn"]
    assert lines["wins at least 80% against a search of depth 5: 2 of 2 seeds; the worst is b, 85.0%"]
    assert not lines["wins at least 99% against random moves: 1 of 2 seeds; the worst is b, 85.0%"]
    broken = {"error": "loss is NaN", "seconds": 1.0, "env_steps": 0}
    results = goals.Results(tmp_path, {"runs": {"a": run(50), "b": broken}})
    lines = dict(goals.summary(["a", "b"], results))
    assert not lines["b: loss is NaN"]
    assert not lines["wins at least 80% against a search of depth 5: 1 of 2 seeds; the worst is a, 100.0%"]
