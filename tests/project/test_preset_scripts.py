"""tests/gpu/preset_figures.py and preset_sweep.py: parts train as one run does, and tables say what the files have."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gpu_vecenv
from gpu_vecenv.errors import CheckpointCorruptError
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.seed_statistics import bootstrap_interval

SCRIPTS = Path(__file__).parents[1] / "gpu"
NAMES = ("figures", "preset_runs", "preset_figures", "preset_sweep", "sb3_zoo")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    path = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))
    yield {name: importlib.import_module(name) for name in NAMES[:4]}
    sys.path[:] = path
    for name in NAMES:
        sys.modules.pop(name, None)


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def without_times(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key not in ("seconds", "part")} for run in runs]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parts_of_the_figures_are_as_one_call(scripts: dict[str, ModuleType], device: str, tmp_path: Path) -> None:
    figures = scripts["preset_figures"]
    small = {"seeds": 2, "points": 2, "curve_episodes": 2, "episodes": 3, "total_steps": 8192, "device": device}
    given = figures.Options(games="cartpole", **small)
    assert figures.main(tmp_path / "whole", given) == 0
    little = figures.Options(games="cartpole", max_seconds=0.0, **small)
    assert figures.main(tmp_path / "parts", little) == 3
    half = contents(tmp_path / "parts")
    assert not half["runs"] and [len(kept["curve"]) for kept in half["unfinished"].values()] == [1, 1]
    checkpoint = tmp_path / "parts" / "policies" / "cartpole-seed1.safetensors"
    kept = checkpoint.read_bytes()
    checkpoint.write_bytes(kept[:100])
    with pytest.raises(CheckpointCorruptError):  # it goes on from the checkpoints
        figures.main(tmp_path / "parts", little)
    checkpoint.write_bytes(kept)
    assert figures.main(tmp_path / "parts", little) == 3  # complete, but late
    assert figures.main(tmp_path / "parts", given) == 0
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert without_times(whole["runs"]) == without_times(parts["runs"]) and not parts["unfinished"]
    assert [run["seed"] for run in whole["runs"]] == [0, 1]
    for run in whole["runs"]:
        assert [steps for steps, _ in run["curve"]] == [4096, 8192] and run["env_steps"] == 8192
        assert run["sampled"].keys() == run["greedy"].keys() == {"agent"}
    assert {"commit", "device", "torch"} <= whole["parts"][0].keys()
    table = scripts["figures"].table([whole])
    scores = [run["sampled"]["agent"] for run in whole["runs"]]
    found = bootstrap_interval(scores)
    assert f"| {found.value:.1f} [{found.low:.1f}, {found.high:.1f}] | {min(scores):.1f} |" in table
    with pytest.raises(SystemExit, match="expected another folder"):
        figures.main(tmp_path / "whole", figures.Options(games="cartpole", **{**small, "episodes": 4}))
    with pytest.raises(SystemExit, match=r"unknown games \['chess'\]"):
        figures.main(tmp_path / "whole", figures.Options(games="chess", **small))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_sweep_tells_its_trials_best_first(
    scripts: dict[str, ModuleType], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = scripts["preset_sweep"]
    monkeypatch.setattr(sweep, "ROWS_OF_A_MINIBATCH", (512, 1024))  # few minibatches take no time
    monkeypatch.setattr(sweep, "NUM_EPOCHS", (1,))
    small = {"points": 1, "curve_episodes": 2, "episodes": 3, "total_steps": 1, "device": device}
    given = sweep.Options(games="cartpole,simple_adversary", seeds=1, trials=2, **small)
    assert sweep.main(tmp_path, given) == 0
    runs = contents(tmp_path)["runs"]
    assert [(run["game"], run["trial"], run["seed"]) for run in runs] == [
        (game, trial, 1000) for game in ("cartpole", "simple_adversary") for trial in (0, 1)
    ]
    assert runs[0]["changes"] == {} and runs[1]["changes"].keys() == {"num_minibatches", "num_epochs", "learning_rate"}
    assert runs[2]["sampled"].keys() == {"adversary", "agent"}
    lines = (tmp_path / "cartpole.md").read_text().splitlines()[4:]
    best, worst = (float(line.split("|")[5].split("(")[0]) for line in lines)
    assert best >= worst and sum("| preset |" in line for line in lines) == 1
    before = (tmp_path / "figures.json").read_text()
    assert sweep.main(tmp_path, given) == 0 and (tmp_path / "figures.json").read_text() == before
    one = sweep.Options(games="cartpole", seeds=1, trials=2, numbers="1", learner='{"num_envs": 64}', **small)
    assert sweep.main(tmp_path / "one", one) == 0
    assert [(run["trial"], run["env_steps"]) for run in contents(tmp_path / "one")["runs"]] == [(1, 64 * 32)]


@pytest.mark.slow
def test_figures_of_other_seeds_and_hyper_parameters(
    scripts: dict[str, ModuleType], device: str, tmp_path: Path
) -> None:
    figures = scripts["preset_figures"]
    small = {"seeds": 1, "points": 1, "curve_episodes": 2, "episodes": 3, "total_steps": 1, "device": device}
    changed = figures.Options(games="cartpole", first_seed=7, learner='{"num_envs": 64, "num_epochs": 1}', **small)
    assert figures.main(tmp_path, changed) == 0
    (run,) = contents(tmp_path)["runs"]
    assert (run["seed"], run["num_envs"], run["learner"]["num_epochs"]) == (7, 64, 1)
    for unused in (changed, replace(changed, learner="{}", opponents="null")):
        with pytest.raises(SystemExit, match="expected no --learner and no --opponents"):
            figures.main(tmp_path / "pqn", replace(unused, algorithm="pqn"))


def test_the_return_in_a_zero_sum_game_of_one_role_is_that_against_random_moves(scripts: dict[str, ModuleType]) -> None:
    runs = scripts["preset_runs"]
    learner = {"num_envs": 8, "num_steps": 4, "num_minibatches": 1, "total_steps": 32}
    trainer = runs.make_trainer(gpu_vecenv.configure("connect_four"), learner, 0, torch.device("cpu"))
    with closing(trainer.env), closing(trainer):
        found = runs.returns_of(trainer, 16)
        assert found == runs.returns_of(trainer, 16, others={"player": None})
    assert found["player"] != 0  # the mean of both sides is 0 by definition


def test_opponents_are_the_presets_others_or_none(scripts: dict[str, ModuleType]) -> None:
    game = gpu_vecenv.configure("tag_continuous", num_taggers=2, num_runners=3, max_steps=10)
    learner = {"num_envs": 8, "num_steps": 4, "num_minibatches": 1, "total_steps": 32}
    others = OpponentsConfig(members=("random",), share=0.5, num_ranges=2)
    for text, expected in (
        (None, preset_opponents(game, 8)),
        ("null", None),
        ('{"members": ["random"], "share": 0.5, "num_ranges": 2}', others),
    ):
        trainer = scripts["preset_runs"].make_trainer(game, learner, 0, torch.device("cpu"), opponents_json=text)
        found = None if trainer.opponents is None else trainer.opponents.config
        trainer.close()
        trainer.env.close()
        assert found == expected


def test_trials_are_few_different_and_fit_the_rollout(scripts: dict[str, ModuleType]) -> None:
    preset = {"num_envs": 64, "num_steps": 32, "num_minibatches": 4, "num_epochs": 4, "learning_rate": 0.001}
    trials = scripts["preset_sweep"].trials_of("cartpole", preset, 40)
    assert len(trials) == 40 and trials[0] == {} and trials == scripts["preset_sweep"].trials_of("cartpole", preset, 40)
    assert len({tuple(trial.items()) for trial in trials}) == 40
    assert all(2048 % trial["num_minibatches"] == 0 for trial in trials[1:])
    same = {"num_minibatches": 4, "num_epochs": 4, "learning_rate": 0.001}
    assert same not in scripts["preset_sweep"].trials_of("cartpole", preset, 1000)  # of the whole grid
    assert trials[1:] != scripts["preset_sweep"].trials_of("acrobot", preset, 40)[1:]


def test_a_sweep_has_trials_where_no_power_of_two_divides_a_rollout(scripts: dict[str, ModuleType]) -> None:
    preset = {"num_envs": 10, "num_steps": 500, "num_minibatches": 1}
    trials = scripts["preset_sweep"].trials_of("warehouse", preset, 1000)
    assert len(trials) > 40
    assert all(5000 % trial["num_minibatches"] == 0 for trial in trials[1:])
    assert {trial["num_minibatches"] for trial in trials[1:]} > {1, 10, 200}


def run_of(seed: int, score: float, **more: Any) -> dict[str, Any]:
    returns = {"sampled": {"agent": score}, "greedy": {"agent": score}}
    return {"row": "cartpole", "seed": seed, "seconds": 2.0, "env_steps": 1000, **returns, **more}


def test_a_table_has_the_middle_half_the_worst_seed_and_those_that_failed(scripts: dict[str, ModuleType]) -> None:
    runs = [run_of(seed, score) for seed, score in enumerate([1.0, 3.0, 5.0, 100.0])]
    ours = {"side": "ours", "runs": [*runs, {"row": "cartpole", "seed": 4, "error": "NaN"}]}
    lines = scripts["figures"].table([ours, {"side": "theirs", "runs": runs}]).splitlines()
    assert lines[2].startswith("| cartpole | agent | ours | 4, 1 more ended with errors | 1,000 | 2.0 s | 4.0 [")
    assert lines[3].startswith("| cartpole | agent | theirs | 4 | 1,000 | 2.0 s | 4.0 [") and len(lines) == 4
    assert lines[3].endswith("] | 1.0 |")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_zoo_s_settings_train(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    zoo = importlib.import_module("sb3_zoo")
    small = {"seeds": 1, "points": 2, "curve_episodes": 2, "episodes": 2, "total_steps": 512}
    assert zoo.main(tmp_path, zoo.Options(games="cartpole,continuous_mountain_car", **small)) == 0
    first, second = contents(tmp_path)["runs"]
    assert first["env_steps"] == second["env_steps"] == 512
    assert [len(run["curve"]) for run in (first, second)] == [1, 1]  # the final policy is evaluated apart
    assert 9 <= first["sampled"]["agent"] <= 500
