"""``gpu-vecenv crossplay``: tables, JSON, and which runs play."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import gpu_vecenv
from gpu_vecenv.cli.main import main
from gpu_vecenv.train import game_policy
from gpu_vecenv.train.game_policy import load_policy

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu".split()
GRID = ["train", "tag_gridworld", *"--max-steps 11 --grid 4 --total-steps 16 --episodes 2".split(), *TINY]
QUICK = ["--episodes", "6", "--device", "cpu"]
SCRIPT = """import torch

def stay(game):
    return lambda obs: torch.zeros(obs.shape[:2], dtype=torch.int32)

number = 3
"""

FIRST_COLUMN = """import torch

def first(game):
    return lambda obs: (obs[:, :, 0] == 0).all(-1).int().argmax(-1).int()
"""


@pytest.fixture(scope="session")  # the module of a script has one file in a process
def trained(tmp_path_factory):
    """A run, and a folder of three runs. Only to be read."""
    folder = tmp_path_factory.mktemp("crossplay")
    assert main([*GRID, "--learning-rate", "0.1", "--out", str(folder / "one")]) == 0
    assert main([*GRID, "--learning-rate", "0.1", "--seeds", "3", "--seed", "4", "--out", str(folder / "three")]) == 0
    assert (
        main(["train", "cartpole", *TINY, "--total-steps", "16", "--episodes", "2", "--out", str(folder / "pole")]) == 0
    )
    (folder / "own_scripts.py").write_text(SCRIPT)
    (folder / "script_of_training.py").write_text(SCRIPT)
    script = f"runner={folder / 'script_of_training.py'}:stay"
    assert main([*GRID, "--seed", "2", "--frozen", script, "--out", str(folder / "scripted")]) == 0
    return folder


@pytest.fixture
def command(trained, capsys, monkeypatch, tmp_path):
    """Runs a command line in a folder with copies of the runs: exit code, output, lines of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)

    def call(*arguments):
        capsys.readouterr()
        code = main(arguments)
        output, errors = capsys.readouterr()
        return code, output, errors.splitlines()

    yield call
    for name in ("own_scripts", "first_column"):
        sys.modules.pop(name, None)


def test_every_run_plays_every_other(command, tmp_path):
    options = ["--json", "--out", "deep/result.json", "--seed", "3", *QUICK]
    code, output, errors = command("crossplay", "one", "three", "random", "runner=own_scripts.py:stay", *options)
    assert (code, errors) == (0, [])
    assert (tmp_path / "deep" / "result.json").read_text() == output
    said = json.loads(output)
    runs = ["one", "three/seed-4", "three/seed-5", "three/seed-6"]
    assert said["rows"] == [*runs, "random"] and said["columns"] == [*runs, "random", "runner=own_scripts.py:stay"]
    assert (said["game"], said["sides"], said["episodes"]) == ("tag_gridworld", ["tagger", "runner"], 6)
    one, five = (load_policy(tmp_path / run, device="cpu") for run in ("one", "three/seed-5"))
    env = gpu_vecenv.VecEnv(one.game, 6, "cpu")
    expected = gpu_vecenv.evaluate(env, {"tagger": five["tagger"], "runner": one["runner"]}, 6, seed=3)
    for role in ("tagger", "runner"):
        assert said["returns"][role]["mean"][2][0] == pytest.approx(expected[f"return_{role}"], rel=1e-9)
        assert len(said["returns"][role]["standard_error"]) == 5
        assert said["self_and_cross_play"][role]["runs"] == 4 and "ratings" not in said


def test_tables_show_all_returns_and_ratings(command):
    pytest.importorskip("openskill")
    options = ["one", "three/seed-4", "three/seed-5", "runner=own_scripts.py:stay", "--ratings", *QUICK]
    code, output, errors = command("crossplay", *options)
    assert (code, errors) == (0, [])
    said = json.loads(command("crossplay", *options, "--json")[1])
    assert output.startswith("tag_gridworld: mean returns of 6 episodes each; rows play tagger, columns runner\n")
    for role in ("tagger", "runner"):
        assert f"return, {role}" in output
        for name, means, deviations in zip(said["rows"], *said["returns"][role].values(), strict=True):
            cells = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(means, deviations, strict=True)]
            assert re.search(rf"{name} +" + " +".join(map(re.escape, cells)), output), name
        assert f"{role}: self-play {said['self_and_cross_play'][role]['self_play']:.2f} ± " in output
        assert f"ratings by openskill: {role}, best first" in output
        for one in said["ratings"][role].values():
            assert f"{one['mu']:.1f} ± {one['sigma']:.1f}" in output
    assert "column 4: runner=own_scripts.py:stay" in output and len(said["ratings"]["runner"]) == 4


def test_both_sides_of_one_role_have_a_table(command):
    """The returns of the two players of connect_four cancel in the mean of their role."""
    train = ["train", "connect_four", *TINY, *"--total-steps 16 --episodes 2 --best-episodes 0 --out four".split()]
    assert command(*train)[0] == 0
    Path("first_column.py").write_text(FIRST_COLUMN)
    options = ["four", "player=first_column.py:first", "random", "--episodes", "50", "--device", "cpu"]
    code, output, errors = command("crossplay", *options)
    assert (code, errors) == (0, [])
    found = json.loads(command("crossplay", *options, "--json")[1])["returns"]
    assert list(found) == ["player", "player_0", "player_1"] and found["player_0"]["mean"][1][2] > 0.3
    assert "rows play player_0, columns player_1" in output and "return, player\n" not in output
    for side in ("player_0", "player_1"):
        _, _, table = output.partition(f"return, {side}\n")
        means, errors = (found[side][key][1] for key in ("mean", "standard_error"))
        cells = [f"{mean:.2f} ± {error:.2f}" for mean, error in zip(means, errors, strict=True)]
        assert re.search(r"^2 +player=first_column.py:first +" + " +".join(map(re.escape, cells)), table, re.M), output


def test_agents_may_be_rows(command):
    code, output, _ = command(
        "crossplay", "one", "three/seed-4", "--roles", "tagger_1", "runner", "--greedy", "--json", *QUICK
    )
    assert code == 0 and json.loads(output)["sides"] == ["tagger_1+runner", "tagger_0+tagger_2+tagger_3"]
    assert json.loads(output)["greedy"] is True


def test_other_runs_and_random_actions_may_play_one_side_alone(command):
    code, output, _ = command("crossplay", "one", "runner=random", "tagger=three/seed-4", "--json", *QUICK)
    alone = json.loads(output)
    assert code == 0 and alone["rows"] == ["one", "tagger=three/seed-4"]
    assert alone["columns"] == ["one", "runner=random"]
    code, output, _ = command("crossplay", "one", "three/seed-4", "random", "--json", *QUICK)
    means = json.loads(output)["returns"]["tagger"]["mean"]
    assert code == 0 and alone["returns"]["tagger"]["mean"] == [[row[0], row[2]] for row in means[:2]]
    still = ["still", "runner=still", "runner=own_scripts.py:stay"]
    code, output, _ = command("crossplay", "one", *still, "--json", *QUICK)
    found = json.loads(output)
    assert code == 0 and found["columns"] == ["one", *still]
    assert all(len(set(row[1:])) == 1 for row in found["returns"]["runner"]["mean"])  # 0 is the no-op
    assert not found["self_and_cross_play"]  # of runs, and there is one


def test_the_game_is_that_of_the_first_run_also_of_one_that_plays_a_role_alone(command):
    both = ["tagger=one", "runner=own_scripts.py:stay"]
    whole = json.loads(command("crossplay", "one", both[1], "--json", *QUICK)[1])
    for order in (both, both[::-1]):
        code, output, errors = command("crossplay", *order, "--json", *QUICK)
        assert (code, errors) == (0, [])
        found = json.loads(output)
        assert (found["game"], found["rows"], found["columns"]) == (whole["game"], both[:1], both[1:])
        assert found["returns"]["tagger"]["mean"] == [whole["returns"]["tagger"]["mean"][0][1:]]


@pytest.mark.parametrize(
    ("words", "runs"),
    [("tagger=one runner=three/seed-4", ["one", "three/seed-4"]), ("runner=random tagger=one", ["one"])],
)
def test_a_run_that_plays_a_role_alone_is_loaded_once(words, runs, command, monkeypatch):
    loaded, read = [], game_policy.read_run
    monkeypatch.setattr(game_policy, "read_run", lambda run, *rest: loaded.append(str(run)) or read(run, *rest))
    assert command("crossplay", *words.split(), *QUICK)[0] == 0 and loaded == runs


def test_of_a_run_against_a_script_the_trained_role_plays(command):
    code, output, errors = command("crossplay", "tagger=scripted", "one", "runner=own_scripts.py:stay", *QUICK)
    assert (code, errors) == (0, []) and "tagger=scripted" in output
    # What is not in the checkpoint is not asked for where it does not play.
    assert command("crossplay", "tagger=scripted", "runner=one", *QUICK)[0] == 0


def test_a_side_of_one_entry_has_no_ratings_and_the_other_keeps_its_own(command):
    pytest.importorskip("openskill")
    options = ["tagger=one", "tagger=random", "runner=one", "--ratings", *QUICK]
    code, output, errors = command("crossplay", *options)
    assert (code, errors) == (0, [])
    assert "ratings by openskill: tagger, best first" in output
    assert "ratings by openskill: runner has none, as there is one entry to rate" in output
    said = json.loads(command("crossplay", *options, "--json")[1])["ratings"]
    assert said["tagger"].keys() == {"tagger=one", "tagger=random"} and said["runner"] == {}


REFUSED = {
    "": r"Missing|expected one or more|at least",
    "one one": r"runs is \['one', 'one'\]; expected one or more, each once",
    "random": "expected at least one RUN or ROLE=RUN, whose game is played",
    "tagger=random runner=own_scripts.py:stay": "expected at least one RUN or ROLE=RUN, whose game is played",
    "scripted one": (
        r"policies\['scripted'\]: runner was played by a function in training, .*; expected tagger of the run alone, "
        "which is tagger=scripted on the command line, and what plays runner now .*runner=file.py:function"
    ),
    "one runner=scripted": (
        r"policies\['runner=scripted'\]: runner was played by a function in training, which the checkpoint does not "
        "have; expected what plays runner now as an entry of its own, such as runner=file.py:function or runner=random"
    ),
    "one --ratings": "compare the entries of a side, and tagger of one and runner of one are alone on theirs; expected",
    "one nowhere": "runs has 'nowhere': there is no file or folder nowhere; expected random, still, RUN, or for a role",
    "one own_scripts.py:stay": "runs has the script 'own_scripts.py:stay'; expected the role that it plays",
    "one pole": r"policies\['pole'\] is of cartpole on cpu; expected tag_gridworld",
    "one runner=own_scripts.py:nonsuch": "own_scripts.py has no 'nonsuch'",
    "one runner=own_scripts.py:number": "own_scripts.py:number is 3; expected a function of the configured game",
    "one nonsuch=own_scripts.py:stay": "unknown role or agent 'nonsuch' in runs",
    "one --roles nonsuch": "unknown role 'nonsuch' of TagGridworld",
    "one --episodes 1": r"episodes is 1; expected a value in \[2",
    "one --out three": "out is three; expected a file's name",
}


def files(folder):
    """Without those of imported scripts."""
    return sorted(path for path in folder.glob("*") if path.name != "__pycache__")


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_written(words, command, tmp_path):
    if "--ratings" in words:
        pytest.importorskip("openskill")
    before = files(tmp_path)
    code, output, errors = command("crossplay", *QUICK, *words.split())
    assert (code, output) == (2, "") and len(errors) == 1 and re.search(REFUSED[words], errors[0]), errors
    assert files(tmp_path) == before


def test_ratings_without_the_library_are_refused_before_anything_is_played(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "openskill", None)
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    code, output, errors = command("crossplay", "one", "three", "--ratings", *QUICK)
    assert (code, output) == (2, "") and 'pip install "gpu_vecenv[ratings]"' in errors[0]
    assert not os.path.exists("crossplay.json")


def test_crossplay_shows_its_progress(command, monkeypatch):
    monkeypatch.setenv("GPU_VECENV_PROGRESS_SECONDS", "0")
    code, _, errors = command("crossplay", "one", "random", *QUICK)
    percents = [int(re.fullmatch(r"crossplay: (\d+)%.*", line)[1]) for line in errors]
    assert code == 0 and percents == sorted(percents) and percents[-1] == 100
    assert any("random and one: episodes 1 to 6 of 6" in line for line in errors)


@pytest.mark.parametrize("width", [30, 60, 80])
def test_no_mean_is_cut_where_lines_are_short(command, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, output, _ = command("crossplay", "one", "three", "random", *QUICK)
    assert (
        code == 0
        and "…" not in output
        and len(re.findall(r"(?<= )-?\d+\.\d\d ± \d+\.\d\d(?!\d)", output)) == 2 * 25 + 2 * 3
    )
    assert all(len(line) <= width for line in output.splitlines() if re.match(r"\d|─", line))


def test_runs_play_with_the_shared_fields_of_their_checkpoints(command):
    train = [
        "train",
        "overcooked",
        "--out",
        "cook",
        "--total-steps",
        "16",
        "--episodes",
        "2",
        "--max-steps",
        "100",
        *TINY,
    ]
    assert command(*train, "--schedules", json.dumps({"shared": {"shaping_weight": [[0, 50]]}}))[0] == 0
    for line in (("evaluate", "cook", "--json"), ("crossplay", "cook", "--json")):
        said = json.loads(command(*line, "--episodes", "200", "--device", "cpu")[1])
        mean = said["return_player"] if line[0] == "evaluate" else said["returns"]["player"]["mean"][0][0]
        assert mean > 10, "shaped rewards are 3 or 5, and few"
