"""``gpu-vecenv train --opponents``: what it trains against, refusals, and resumes."""

import csv
import dataclasses
import json
import re
import shlex
import shutil

import pytest
from reliability.resume import evaluation_rows
from support.runs import cut_run, resume_elsewhere

from gpu_vecenv.cli.opponents import OpponentOptions
from gpu_vecenv.cli.train import Train
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.plots import METRICS_FILE

pytestmark = pytest.mark.usefixtures("one_thread", "without_pictures")

TINY = "tag_gridworld --max-steps 5 --num-envs 16 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8"
KEPT = "--checkpoint-seconds 0 --keep 100 --digests --episodes 4 --best-episodes 0"
SCRIPT = """import torch

def east(game):
    return lambda obs: torch.ones(obs.shape[:2], dtype=torch.int32, device=obs.device)

def actor(obs):
    return torch.ones(obs.shape[:2], dtype=torch.int32, device=obs.device)

def number(game):
    return 3
"""
POOL = "--opponents-share 0.5 --opponents-ranges 4 --num-snapshots 2 --snapshot-interval 2 --reassign-interval 1"
STEPS = 64
AGAINST = {"random": ["still"], "still": ["random"], "script": ["random", "still"]}  # what plays the frozen runner
AS_IN_TRAINING = "trained with runner frozen"


def table(run):
    with (run / METRICS_FILE).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def script(tmp_path):
    """A file's name, which no other test has: modules stay imported."""
    name = f"{tmp_path.name}.py"
    (tmp_path / name).write_text(SCRIPT)
    return name


@pytest.fixture
def train(command, device):
    def call(*options, iterations=6):
        return command(
            "train", *TINY.split(), *KEPT.split(), "--device", device, "--total-steps", iterations * STEPS, *options
        )

    return call


def default_opponents(*arguments):
    """Of ``train tag_continuous``."""
    return Train.for_arguments(["tag_continuous", *arguments])[1].opponent


def test_the_opponents_of_a_preset_are_defaults_where_there_can_be_any(monkeypatch):
    preset = OpponentsConfig(**TagContinuous.preset_opponents)
    assert preset.names == ("snapshots", "random") and preset.share == 0.5
    whole, few = default_opponents(), default_opponents("--num-envs", "6")
    assert whole.config(TagContinuous()) == preset
    assert few == dataclasses.replace(whole, opponents_ranges=3)
    assert default_opponents("--num-envs", "auto") == whole
    for without in (
        ["--num-envs", "3"],  # one range, and two sides
        ["--population", "2"],
        ["--policies", '{"runner": {"population": 2}}'],
        ["--frozen", "runner=runs/old"],
        ["--algorithm", "a2c"],
        ["--preset", "mappo"],
    ):
        assert default_opponents(*without) == OpponentOptions()
    for kept in ("{", "3", '{"runner": {"gamma": 0.9}}'):  # wrong values are reported when they are used
        assert default_opponents("--policies", kept) == whole
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert default_opponents() == OpponentOptions()
    assert preset_opponents(TagContinuous(egocentric=False), 512) is None


def test_a_run_against_all_kinds_of_opponents_resumes_bit_by_bit(train, command, script, tmp_path):
    assert train("--out", "old", iterations=2)[0] == 0
    shutil.copytree(tmp_path / "old", tmp_path / "lr=0.1")  # no role
    words = ["runner=random", "tagger=still"]
    against = ["snapshots", "random", "still", *words, f"runner={script}:east", "tagger=old", "old", "lr=0.1"]
    code, _, errors = train("--opponents", *against, *POOL.split(), "--out", "whole", iterations=16)
    assert (code, errors) == (0, [])
    rows = table(tmp_path / "whole")
    names = {name.removeprefix("games_") for name in rows[0] if name.startswith("games_")}
    assert names == {
        *(
            f"{side}_against_{member}"
            for side in ("tagger", "runner")
            for member in ("snapshots", "random", "still", "old", "lr=0.1")
        ),
        f"tagger_against_runner={script}:east",
        "tagger_against_runner=random",
        "runner_against_tagger=still",
        "runner_against_tagger=old",
    }
    played = {name for name in names if sum(float(row[f"games_{name}"]) for row in rows)}
    assert len(played) > 6 and f"tagger_against_runner={script}:east" in played
    assert any("=random" in name or "=still" in name for name in played)
    # Resumed from the middle, from another folder, after the other run has trained on.
    cut_run(tmp_path / "whole", tmp_path / "cut", 5)
    assert command("train", "--resume", "old", "--total-steps", 4 * STEPS)[0] == 0
    resume_elsewhere(command, tmp_path / "cut")
    resumed = table(tmp_path / "cut")
    assert len(rows) == len(resumed) == 16
    assert [row["weights"] for row in rows] == [row["weights"] for row in resumed]
    assert [row["games_tagger_against_old"] for row in rows] == [row["games_tagger_against_old"] for row in resumed]


@pytest.mark.parametrize("player", ["random", "still", "script"])
def test_a_frozen_role_is_played_and_its_run_resumes_bit_by_bit(player, train, command, script, tmp_path):
    source = f"{script}:east" if player == "script" else player
    code, output, errors = train("--frozen", f"runner={source}", "--out", "whole")
    assert (code, errors) == (0, [])
    against = [f"tagger against {name}" for name in AGAINST[player]]
    pairings = ["all random", *against, AS_IN_TRAINING]
    assert list(json.loads((tmp_path / "whole" / "evaluation.json").read_text())) == pairings
    number = f"{len(pairings)} x 4 episodes: all random, {len(against)} against fixed opponents, {AS_IN_TRAINING}\n"
    assert number in output and all(f"\n{name} " in output for name in pairings)
    hint = re.search(r"^to watch it +gpu-vecenv (.*)$", output, re.MULTILINE)
    assert hint is not None and command(*shlex.split(hint[1]), "--device", "cpu")[0] == 0
    rows = table(tmp_path / "whole")
    settings = json.loads((tmp_path / "whole" / "settings.json").read_text())
    assert settings["frozen_scripts"] == ([f"runner={tmp_path / script}:east"] if player == "script" else [])
    cut_run(tmp_path / "whole", tmp_path / "cut", 3)
    resume_elsewhere(command, tmp_path / "cut")
    weights = [row["weights"] for row in rows]
    assert len(set(weights)) == 6 and weights == [row["weights"] for row in table(tmp_path / "cut")]
    # What a run has of it, as an opponent and frozen.
    play = ["evaluate", "whole", "--device", "cpu", "--episodes", "8", "--json"]
    given = json.loads(command(*play, "--opponents", f"runner={source}")[1])
    code, output, errors = command(*play)
    again = train("--frozen", "runner=whole", "--out", "again")
    if player == "script":
        assert code == again[0] == 2 and not (tmp_path / "again").exists()
        assert all("played by a function in training" in one for one in (errors[0], again[2][0]))
        settings.pop("frozen_scripts")
        (tmp_path / "cut" / "settings.json").write_text(json.dumps(settings))
        code, _, errors = command("train", "--resume", tmp_path / "cut")
        assert code == 2 and "does not say which script plays runner: frozen_scripts" in errors[0]
        return
    assert (code, errors) == (0, []) and json.loads(output) | {"opponents": given["opponents"]} == given
    assert again[0] == 0 and [row["weights"] for row in table(tmp_path / "again")] == weights


def test_a_run_with_a_frozen_role_is_evaluated_against_what_is_asked_for(train, tmp_path):
    evaluate = ["--best-episodes", "4", "--best-interval", "0"]
    assert train("--out", "old", iterations=1)[0] == 0
    for frozen, asked, expected in (
        ("runner=old", [], ["random", "still", "frozen"]),
        ("runner=old", ["--eval-opponents", "still"], ["still", "frozen"]),
        ("runner=random", ["--eval-opponents", "random", "still"], ["still", "frozen"]),
    ):
        run = tmp_path / f"{frozen} {len(asked)}"
        code, output, errors = train("--frozen", frozen, *evaluate, *asked, "--out", run, iterations=1)
        assert (code, errors) == (0, [])
        assert [row["opponent"] for row in evaluation_rows(run)] == expected
        against = [f"tagger against {name}" for name in expected[:-1]]
        assert list(json.loads((run / "evaluation.json").read_text())) == ["all random", *against, AS_IN_TRAINING]
    assert "no evaluation is against random: random plays runner in training\n" in output
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = train("--frozen", "runner=random", "--eval-opponents", "random", iterations=1)
    assert code == 2 and len(errors) == 1
    assert "eval_opponents is random, and no evaluation is against it (random: random plays runner in" in errors[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_of_the_same_name_have_the_part_of_their_paths_that_differs(train, tmp_path):
    assert train("--out", "one/seed", iterations=1)[0] == 0
    shutil.copytree(tmp_path / "one" / "seed", tmp_path / "two" / "seed")
    against = ["one/seed", str(tmp_path / "two" / "seed"), "runner=one/seed"]
    assert train("--opponents", *against, "--opponents-share", "0.5", "--out", "run", iterations=1)[0] == 0
    names = {name for name in table(tmp_path / "run")[0] if name.startswith("games_tagger")}
    assert names == {f"games_tagger_against_{name}" for name in ("one/seed", "two/seed", "runner=seed")}
    code, _, errors = train("--opponents", "one/seed", "./one/seed", "--out", "again", iterations=1)
    assert code == 2 and "expected each name once" in errors[0]


def test_an_opponent_that_is_gone_is_named_when_its_run_resumes(train, command, tmp_path):
    assert train("--out", "old", iterations=1)[0] == 0
    assert train("--opponents", "old", "--opponents-share", "0.5", "--out", "run", iterations=1)[0] == 0
    shutil.rmtree(tmp_path / "old")
    code, _, errors = command("train", "--resume", "run", "--total-steps", 4 * STEPS)
    assert code == 2 and f"an opponent of run cannot be opened again: opponents has '{tmp_path / 'old'}'" in errors[0]
    assert "A resumed run needs it where it was" in errors[0]


def test_the_options_are_those_of_the_checkpoint(train, tmp_path):
    options = "--opponents snapshots --opponents-sampling even --opponents-share 1 --snapshot-gain 0.75".split()
    assert train(*options, "--out", "run", iterations=1)[0] == 0
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())["opponents"]
    assert settings["opponents"] == ["snapshots"] and settings["opponents_sampling"] == "even"
    assert (settings["opponents_share"], settings["snapshot_gain"]) == (1.0, 0.75)


@pytest.mark.parametrize(
    ("opponents", "message"),
    [
        (
            ["anyone"],
            "'anyone': there is no file or folder anyone; expected snapshots, random, still, RUN, or for",
        ),
        (["walker=random"], "unknown role or agent 'walker' in opponents; nearest: tagger"),
        (["=scripts.py:east"], "opponents has '=scripts.py:east'; expected"),
        (["scripts.py:east"], "expected the role that it plays: ROLE=scripts.py:east"),
        (["runner=scripts.py:west"], "has no 'west'"),
        (["runner=scripts.py:torch"], "expected a function of the configured game that returns an actor"),
        (
            ["runner=scripts.py:actor"],
            "raised AttributeError: 'TagGridworld' object has no attribute 'shape'; expected",
        ),
        (["runner=scripts.py:number"], "returned a int; expected a function of the configured game"),
        (["walker=scripts.py:east"], "unknown role or agent 'walker'"),
        (["random", "random"], "error: opponents is ['random', 'random']; expected each name once"),
        (["random", "--opponents-share", "2"], "expected a value in [0, 1]"),
        (["random", "--opponents-share", "0"], "error: opponents_share is 0; expected a fraction > 0, or no"),
        (
            ["random", "--opponents-share", "0.1"],
            "error: opponents_share is 0.1, which of 16 environments is 1, and opponents_ranges is 8; expected",
        ),
        (["random", "--opponents-ranges", "1"], "error: opponents_ranges is 1; expected at least one for each side"),
        (["snapshots", "--frozen", "runner=random"], "opponent 'snapshots' plays against no side that learns"),
    ],
)
def test_wrong_opponents_are_refused_before_anything_is_written(opponents, message, train, script, tmp_path):
    opponents = [text.replace("scripts.py", script) for text in opponents]
    message = message.replace("scripts.py", script)
    code, _, errors = train("--opponents", *opponents, "--out", "run")
    assert code == 2 and len(errors) == 1 and message in errors[0]
    assert not (tmp_path / "run").exists()
