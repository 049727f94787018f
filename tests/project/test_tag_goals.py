"""tests/gpu/tag_goals.py: parts train as one run does, every pairing is played, and goals tell the worst seed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import imported_script

from gpu_vecenv import load_policy
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.train.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[1] / "gpu" / "tag_goals.py"
SMALL = '{"num_envs": 8, "total_steps": 512, "num_steps": 16, "num_minibatches": 2, "hidden_sizes": [8]}'


@pytest.fixture(scope="module")
def goals() -> Iterator[ModuleType]:
    with imported_script(SCRIPT, "tag_baselines") as module:
        yield module


def options(goals: ModuleType, device: str, **changes: Any) -> Any:
    given = {"device": device, "rows": "tag_gridworld", "seeds": 2, "episodes": 3, "learner": SMALL, "config": "{}"}
    given["policies"] = '{"runner": {"population": 2}}'
    return goals.Options(**{**given, **changes})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parts_train_as_one_run_does(
    goals: ModuleType, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = goals.main(whole, options(goals, device, at_once=2))
    lines = capsys.readouterr().out.splitlines()
    calls, code = 0, goals.UNFINISHED
    while code == goals.UNFINISHED and calls < 40:
        code = goals.main(parts, options(goals, device, at_once=2, max_seconds=0.0))
        calls += 1
    again = capsys.readouterr().out.splitlines()
    assert code == expected == 1  # nobody learns it in 512 steps
    assert calls >= 4 + 10 and again[0] == "0 of 2 runs are trained; the same command continues"
    found, once = (json.loads((folder / "tag_goals.json").read_text()) for folder in (parts, whole))
    assert len(found["parts"]) == calls - 1 and found["scripts"] == once["scripts"]
    for run in ("tag_gridworld-seed0", "tag_gridworld-seed1"):
        assert found["runs"][run]["env_steps"] == 512 and found["runs"][run]["complete"]
        assert found["runs"][run]["pairings"] == once["runs"][run]["pairings"]
        one, other = (load_checkpoint(folder / "checkpoints" / f"{run}.safetensors")[0] for folder in (parts, whole))
        assert one.keys() == other.keys() and all(bool((one[k] == other[k]).all()) for k in one if "policy" in k)
    said = [line for line in lines if "env-steps in" not in line]
    assert said == [line for line in again[-len(lines) :] if "env-steps in" not in line]
    assert len(said) == 4 + 2 * 5 + 2  # scripts, pairings of each seed, goals
    assert said[0].startswith("tag_gridworld, pursuit - flee: all tagged 100.0%, 20 steps")
    assert "win at least 97% against random: 0 of 2 seeds; the worst is" in said[-2]


@pytest.mark.slow
def test_the_game_and_the_network_are_those_that_were_asked_for(goals: ModuleType, device: str, tmp_path: Path) -> None:
    small = {"num_envs": 2, "total_steps": 128, "num_steps": 64, "num_minibatches": 1, "hidden_sizes": [8]}
    config = json.dumps({"num_taggers": 1, "num_runners": 2, "max_steps": 5})
    given = options(goals, device, rows="tag_continuous", seeds=1, learner=json.dumps(small), config=config)
    given = replace(given, first_seed=7, policies=None)
    assert goals.main(tmp_path, given) == 1
    policy = load_policy(tmp_path / "checkpoints" / "tag_continuous-seed7.safetensors", device=device)
    assert policy.game == configure("tag_continuous", egocentric=True, **json.loads(config))
    learner = json.loads((tmp_path / "tag_goals.json").read_text())["runs"]["tag_continuous-seed7"]["learner"]
    assert learner["gamma"] == policy.game.own_preset["gamma"] and learner["total_steps"] == 128
    with pytest.raises(SystemExit, match="expected another folder"):
        goals.main(tmp_path, options(goals, device, rows="tag_continuous", seeds=2))
    with pytest.raises(SystemExit, match=r"unknown rows \['chess'\]; expected some of tag_gridworld, tag_continuous"):
        goals.main(tmp_path, options(goals, device, rows="chess"))


def test_the_policies_of_the_grid_are_those_of_make_train(goals: ModuleType) -> None:
    policies = json.dumps(goals.ROWS["tag_gridworld"].policies)
    assert f"--policies '{policies}'" in (SCRIPT.parents[2] / "Makefile").read_text(encoding="utf-8")


def pairings(**shares: float) -> dict[tuple[str, str], dict[str, float]]:
    """Shares by "trained_flee", and returns that are those less 10."""
    found = {(name.split("_")[0], name.split("_")[1]): share for name, share in shares.items()}
    return {pair: {"tagged_all": share, "return_runner": share - 10} for pair, share in found.items()}


def test_what_reaches_a_goal(goals: ModuleType) -> None:
    at_least, more_often = goals.at_least("flee", 0.85), goals.more_often("flee")
    assert at_least.reached(pairings(trained_flee=0.85)) and not at_least.reached(pairings(trained_flee=0.84))
    cases = {(0.5, 0.4): True, (0.4, 0.4): False, (0.3, 0.4): False, (1.0, 1.0): True, (0.99, 1.0): False}
    for (trained, script), reached in cases.items():
        assert more_often.reached(pairings(trained_flee=trained, pursuit_flee=script)) is reached, (trained, script)
    better = goals.BETTER_RUNNERS
    assert better.reached(pairings(pursuit_trained=0.5, pursuit_flee=0.4))
    assert not better.reached(pairings(pursuit_trained=0.4, pursuit_flee=0.4))
    assert better.margin(pairings(pursuit_trained=0.5, pursuit_flee=0.25)) == 0.25


def test_the_worst_seed_is_told_and_a_failed_run_counts(goals: ModuleType, tmp_path: Path) -> None:
    def run(share: float, error: str = "") -> dict[str, Any]:
        metrics = {"tagged_all": share, "episode_length": 9.0, "return_tagger": 1.0, "return_runner": -1.0}
        kept = {"error": error, "env_steps": 100, "seconds": 2.0}
        return kept | {"pairings": {"trained - random": metrics, "trained - flee": metrics}}

    results = goals.Results(tmp_path, {"runs": {"a": run(0.99), "b": run(0.9), "c": run(1.0)}, "scripts": {"x": {}}})
    lines = list(goals.summary(goals.ROWS["tag_gridworld"], "x", ["a", "b", "c"], results))
    random, flee = lines[-2:]
    assert random == (
        "x, trained taggers win at least 97% against random: 2 of 3 seeds; the worst is b, -0.070 from the bound",
        False,
    )
    assert flee[0].endswith("3 of 3 seeds; the worst is b, +0.050 from the bound") and flee[1]
    results.runs["c"] = run(1.0, "a loss is NaN")
    lines = list(goals.summary(goals.ROWS["tag_gridworld"], "x", ["a", "b", "c"], results))
    assert ("c: a loss is NaN", False) in lines and lines[-1] == (lines[-1][0], False)
    assert "2 of 3 seeds" in lines[-1][0]
