"""The command line: every command, its help, its messages, and the files it leaves."""

import csv
import dataclasses
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import get_args
from uuid import uuid4
from xml.etree import ElementTree

import gymnasium
import pytest
import torch
from support.processes import run_child
from support.warm_process import run_python

import gpu_vecenv
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.check.report import GAME_CHECKS
from gpu_vecenv.cli import replay
from gpu_vecenv.cli.check import CheckRegistered, CheckWithLimit
from gpu_vecenv.cli.crossplay import Crossplay
from gpu_vecenv.cli.evaluate import Evaluate
from gpu_vecenv.cli.exploit import Exploit
from gpu_vecenv.cli.export import Export
from gpu_vecenv.cli.game_files import mark_as_checked
from gpu_vecenv.cli.main import COMMANDS, main
from gpu_vecenv.cli.opponents import OpponentOptions
from gpu_vecenv.cli.options import game_class
from gpu_vecenv.cli.plot import Plot
from gpu_vecenv.cli.replay import Html, Play, Record, RecordRun
from gpu_vecenv.cli.resume import Resume
from gpu_vecenv.cli.train import AlgorithmName, Train
from gpu_vecenv.compile.codegen import generate_header
from gpu_vecenv.declare.attributes import PRESET_ALGORITHMS
from gpu_vecenv.envs.registry import GAMES, configure, gymnasium_id
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.train import evaluation
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.game_policy import load_policy
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.run import RunConfig

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu".split()
GRID = "train tag_gridworld --max-steps 11 --grid 4".split()
SHORT = [*TINY, "--total-steps", "16", "--episodes", "2"]  # one iteration
CONTINUOUS = "train tag_continuous --num-taggers 3 --num-runners 4 --side 3 --tagging-distance 0.2".split()

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs a command line in an empty folder: exit code, lines of output, lines of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        output, errors = capsys.readouterr()
        return code, output, errors.splitlines()

    return run


def in_a_process(*arguments, folder, **variables):
    return run_python("-m", "gpu_vecenv.cli", *arguments, folder=folder, variables=variables)


def newest(run):
    """Tensors and manifest of a run's last checkpoint."""
    return load_checkpoint(max((run / "checkpoints").glob("iteration-*")))


def read_log(run, name="metrics.csv"):
    with (run / name).open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(result, message):
    """Check that a command ended with 2 and a message on stderr: one line of ours, or tyro's box about its options."""
    code, output, errors = result
    assert (code, output) == (2, "")
    ours = errors[0].startswith("gpu-vecenv: error: ")
    assert len(errors) == 1 if ours else not any("Traceback" in line for line in errors), errors
    words = [word for line in errors for word in line.strip("│|").split()]
    assert re.search(message, " ".join(words)), errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of nine iterations, the last three of which are kept. Only to be read."""
    folder = tmp_path_factory.mktemp("runs") / "grid"
    options = (
        "--total-steps 144 --episodes 5 --checkpoint-seconds 0 --normalize-obs --learning-rate 0.03 --seed 3".split()
    )
    assert main([*GRID, *TINY, *options, "--digests", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Runs of other games: one with the same roles, one with a role of its own. Only to be read."""
    folder = tmp_path_factory.mktemp("runs")
    for name, (first, *rest) in {"continuous": CONTINUOUS, "cartpole": ["train", "cartpole"]}.items():
        assert main([first, *rest, *SHORT, "--max-steps", "13", "--out", str(folder / name)]) == 0
    return folder


def test_the_help_fits_a_screen_and_says_what_every_command_is_for(command):
    for arguments in (["--help"], ["-h"], []):
        code, output, errors = command(*arguments)
        assert (code, errors) == (0, [])
        lines = output.splitlines()
        assert len(lines) <= 23 and max(map(len, lines)) < 80  # of 24 x 80, with a line for the prompt
        for name, kind in COMMANDS.items():
            assert f"  {name:10} {kind.__doc__.splitlines()[0]}" in lines


NESTED = {"command", "game", "learner", "opponent"}  # groups of options


def kinds_with_options():
    """Every class whose fields are options of a command."""
    found = [
        *COMMANDS.values(),
        *GAMES.values(),
        CheckRegistered,
        CheckWithLimit,
        Html,
        Play,
        Record,
        RecordRun,
        Resume,
    ]
    return [*found, replay.Show, OpponentOptions, PPOConfig, PQNConfig, RunConfig]


@pytest.mark.parametrize("kind", kinds_with_options(), ids=lambda kind: kind.__qualname__)
def test_every_option_has_a_comment_which_is_its_help(kind):
    names = {field.name for field in dataclasses.fields(kind)} - NESTED if dataclasses.is_dataclass(kind) else set()
    names -= {"run"} & {field.name for field in dataclasses.fields(kind) if field.type == "RunConfig"}
    sources = [inspect.getsource(base).splitlines() for base in kind.__mro__ if dataclasses.is_dataclass(base)]
    for name in names:
        declared = [
            (lines[n - 1].strip(), line)
            for lines in sources
            for n, line in enumerate(lines)
            if re.match(rf"    {name}: ", line)
        ]
        assert declared, name
        before, line = declared[0]
        assert re.search(r"  # .*\w", line) or before.startswith("# "), line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_shells(shell, command):
    code, output, errors = command("--tyro-print-completion", shell)
    assert (code or 0, errors) == (0, []) and output.startswith(("# AUTOMATICALLY GENERATED", "#compdef"))
    assert all(name in output for name in (*COMMANDS, "--total-steps"))


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("train nonsuch", "gpu-vecenv list"),
        ("replay record nonsuch", "gpu-vecenv list"),
        ("train cartpole --num-envs 0", "gpu-vecenv train cartpole --help"),
        ("train cartpole --bogus 3", "gpu-vecenv train cartpole --help"),
        ("evaluate runs/x --episodes 0", "gpu-vecenv evaluate runs/x --help"),
        ("replay html", "gpu-vecenv replay record tag_gridworld"),
        ("plot", "gpu-vecenv plot runs/one runs/other"),
        ("trian", "gpu-vecenv --help"),
        ("--seed 3", "gpu-vecenv --help"),
        ("train cartpole --algorithm nonsuch", "gpu-vecenv train cartpole --help"),
        ("train cartpole --seeds many", "gpu-vecenv train cartpole --help"),
        ("train --resume", "gpu-vecenv train --help"),
        ("evaluate", "gpu-vecenv evaluate --help"),
        ("replay record cartpole --sed 3", "gpu-vecenv replay record cartpole --help"),
        ("export run --greedy", "gpu-vecenv export run --help"),
    ],
)
def test_an_error_ends_with_the_command_that_helps(words, remedy, command):
    code, output, errors = command(*words.split())
    assert (code, output) == (2, "") and errors[-1].endswith(remedy)
    said = "\n".join(errors)
    assert said.count("--help") <= 1, "one command that helps, of this command"
    assert not re.search("class '|typing|dummy|misplaced", said), "names of Python, or options of other commands"
    assert len({len(line) for line in errors[:-1]}) <= 1, "lines of a box are equally long"


def test_version_is_the_packages(command):
    assert command("--version") == (0, f"{gpu_vecenv.__version__}\n", [])


def test_list_shows_every_game_with_roles_and_purpose(command):
    code, output, errors = command("list")
    assert (code, errors) == (0, [])
    for name, game in GAMES.items():
        assert re.search(rf"\b{name}\b", output) and game.__doc__.splitlines()[0][:30] in output
        assert ", ".join(f"{role}: {count}" for role, count in game().roles.items()) in output


@pytest.mark.parametrize("name", sorted(GAMES))
def test_show_prints_the_generated_source(name, command):
    assert command("show", name) == (0, generate_header(configure(name).layout), [])


def test_show_takes_the_games_options(command):
    config = {"grid": 7, "num_taggers": 2, "full_observation": False, "tagger_reward": 2.5}
    options = "--grid 7 --num-taggers 2 --no-full-observation --tagger-reward 2.5".split()
    code, output, errors = command("show", "tag_gridworld", *options)
    assert (code, output, errors) == (0, generate_header(configure("tag_gridworld", **config).layout), [])
    assert "constexpr int GRID = 7;" in output.splitlines()
    both = [command("show", "tag_continuous", "--num-neighbors", value)[1] for value in ("all", "3")]
    assert both == [generate_header(configure("tag_continuous", num_neighbors=value).layout) for value in ("all", 3)]


def test_a_run_has_its_configuration_as_a_file_and_show_prints_it(command, trained):
    found = json.loads((trained / "config.json").read_text())
    assert (found["game"], found["seed"], found["num_envs"]) == ("tag_gridworld", 3, 4)
    assert (found["config"]["total_steps"], found["config"]["learning_rate"]) == (144, 0.03)
    for run in (trained, trained / "checkpoints" / "initial.safetensors"):
        code, output, errors = command("show", str(run))
        assert (code, errors, json.loads(output)) == (0, [], found)


def test_an_interrupt_ends_commands_where_a_shell_ignored_it(command):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    try:
        assert command("list")[0] == 0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_doctor_says_what_is_there(command):
    code, output, errors = command("doctor")
    assert code in (0, 1) and errors == []
    assert all(
        f"\n{part}" in f"\n{output}" for part in ("Python", "torch", "GPU driver", "C++ compiler", "Recommendations")
    )
    assert torch.__version__ in output


def test_the_help_of_bench_names_its_options(command):
    code, output, _ = command("bench", "--help")
    assert code == 0
    assert all(
        f"--{name} " in output for name in ("game", "num-envs", "config", "device", "driver", "threads-per-env", "json")
    )


@pytest.mark.parametrize("name", sorted(GAMES))
@pytest.mark.parametrize("verb", ["show", "train"])
def test_help_mentions_every_field(verb, name, command):
    code, output, errors = command(verb, name, "--help")
    assert (code, errors) == (0, [])
    assert_mentioned([GAMES[name]] + [Train, PPOConfig, RunConfig, OpponentOptions] * (verb == "train"), output)
    comments = re.findall(r"^    \w+: .*?  # (.{12})", Path(inspect.getfile(GAMES[name])).read_text(), re.MULTILINE)
    assert comments
    others = ["per epoch", "episodes of each evaluation", "one policy for the agents of a role"] * (verb == "train")
    assert all(words in output for words in comments + others)


def test_help_says_where_defaults_are_from_and_shows_no_empty_ones(command):
    output = command("train", "--help")[1]
    assert "train --help has the defaults without a game's preset, train GAME --help those of the game" in output
    assert "(default: None)" in output and not re.search(r"\(default:[\s│|]*\)", output)
    assert re.search(r"--eval-opponents [^-]*\(default:[\s│|]+random", output)
    assert "check CartPole-v1 --help" in " ".join(command("check", "--help")[1].split())


def test_help_mentions_the_fields_of_the_algorithm(command):
    code, output, errors = command("train", "cartpole", "--algorithm", "pqn-vdn", "--help")
    assert (code, errors) == (0, [])
    assert_mentioned([GAMES["cartpole"], Train, PQNConfig, RunConfig, OpponentOptions], output)
    assert "--clip" not in output and re.search(r"--mixing [^-]{9,400}\(default: vdn\)", output)


def test_games_have_presets_of_algorithms_that_exist():
    assert {*PRESET_ALGORITHMS, "ppo", "a2c"} == set(get_args(AlgorithmName))
    with pytest.raises(EnvDefinitionError, match=r"algorithm_presets is .*; expected .* of some of pqn, pqn-vdn"):
        type("Wrong", (GAMES["cartpole"],), {"algorithm_presets": {"vdn": {}}})()


def assert_mentioned(kinds, output):
    mentioned = set(re.findall(r"--[a-z][a-z0-9-]*", output))
    apart = {"game_name", "run", "runs"}  # positional, or nested
    if Train in kinds:
        apart |= {"game", "learner", "opponent"}
    for name in {field.name for kind in kinds for field in dataclasses.fields(kind)} - apart:
        assert f"--{name.replace('_', '-')}" in mentioned


@pytest.mark.parametrize("verb", ["crossplay", "evaluate", "exploit", "plot", "export"])
def test_help_of_what_takes_a_run_mentions_every_field(verb, command):
    code, output, errors = command(verb, "--help")
    assert (code, errors) == (0, [])
    assert_mentioned(
        [{"crossplay": Crossplay, "evaluate": Evaluate, "exploit": Exploit, "plot": Plot, "export": Export}[verb]],
        output,
    )
    assert re.search(rf"usage: gpu-vecenv {verb} .* RUN", output)
    purposes = {"evaluate": "roles or agents in place of the run's", "plot": "columns of metrics.csv"}
    purposes |= {"export": "a folder with a model card", "exploit": "of which the best one counts"}
    purposes |= {"crossplay": "roles or agents that the row plays"}
    assert purposes[verb] in output


def events(folder):
    return [path for path in folder.rglob("events.out.tfevents.*") if path.stat().st_size > 100]


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("tag_gridworld", "--max-steps 11 --num-taggers 4"),
        ("tag_continuous", "--num-taggers 3 --num-runners 4 --side 3 --tagging-distance 0.2 --max-steps 13"),
    ],
)
@pytest.mark.usefixtures("pictures")
def test_train_leaves_curve_checkpoint_metrics_and_evaluation(game, options, command, tmp_path):
    options = f"{options} --total-steps 144 --episodes 5 --out here/run --seed 3".split()
    code, output, errors = command("train", game, *TINY, *options)
    assert (code, errors) == (0, [])
    folder = tmp_path / "here" / "run"
    assert os.listdir(tmp_path) == ["here"]
    files = {"evaluation.json", "evaluations.csv", "learning_curve.png", "metrics.csv"}
    for name in (*files, "checkpoints/iteration-00000009.safetensors"):
        assert f"here/run/{name}" in output
    assert re.search(r"^to watch it +gpu-vecenv replay record here/run$", output, re.MULTILINE)
    assert set(os.listdir(folder)) == {*files, "config.json", "settings.json", "checkpoints", "tensorboard", ".lock"}
    assert sorted(os.listdir(folder / "checkpoints")) == [
        "best.safetensors",
        "initial.safetensors",
        "iteration-00000000.safetensors",
        "iteration-00000009.safetensors",
    ]

    rows = read_log(folder)
    assert [int(row["iteration"]) for row in rows] == list(range(1, 10))
    assert [int(row["env_steps"]) for row in rows] == list(range(16, 145, 16))
    begun = next(
        index for index, row in enumerate(rows) if row["first_episodes"] == "0.0"
    )  # until then there are no means
    # Against an opponent without a game there is no rate.
    numbers = [float(x) for row in rows[begun:] for name, x in row.items() if x and not name.startswith("win_rate_")]
    assert begun > 0 and rows[begun - 1]["return_tagger"] == rows[begun - 1]["episode_length"] == ""
    assert {"explained_variance_tagger", "entropy_runner", "return_runner"} < set(rows[0])
    assert all(abs(number) < float("inf") for number in numbers)
    assert sum(float(row["episodes"]) for row in rows) >= 2 * 4

    tensors, manifest = newest(folder)
    assert (manifest["game"], manifest["seed"], manifest["iteration"], manifest["num_envs"]) == (game, 3, 9, 4)
    assert manifest["config"]["hidden_sizes"] == [8] and manifest["game_config"]["num_taggers"] in (3, 4)
    assert manifest["trained"] == ["tagger", "runner"] and set(manifest["policies"]) == {"tagger", "runner"}
    assert all(config == manifest["config"] for config in manifest["policies"].values())
    assert {name.split(".")[1] for name in tensors if name.startswith("policy.")} == {"tagger", "runner"}
    assert load_checkpoint(folder / "checkpoints" / "best.safetensors")[1] == manifest  # there is no other

    results = json.loads((folder / "evaluation.json").read_text())
    kinds = ("random", "still", "initial") if game == "tag_gridworld" else ("random", "initial")  # which has a no-op
    against = [f"{role} against {name}" for role in ("tagger", "runner") for name in kinds]
    assert list(results) == ["all random", *against, "all trained"]
    assert all(name in output for name in results)
    evaluations = read_log(folder, "evaluations.csv")
    assert [f"{row['role']} against {row['opponent']}" for row in evaluations] == against
    for metrics in results.values():
        assert metrics["episodes"] == 5 and 0 <= metrics["terminated_fraction"] <= 1
        assert 1 <= metrics["episode_length"] <= 13
        assert {"return_tagger", "return_runner"} < set(metrics)

    picture = (folder / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert width > 300 and height > 300
    assert len(events(folder / "tensorboard")) == 1


def test_without_a_folder_train_makes_one_of_its_own(command, tmp_path):
    code, _, errors = command(*GRID, *TINY, "--total-steps", "16", "--episodes", "1")
    assert (code, errors) == (0, [])
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tag_gridworld-\d{8}-\d{6}", folder.name)
    assert (folder / "checkpoints" / "iteration-00000001.safetensors").is_file()


def test_the_automatic_num_envs_is_used_and_printed(command, tmp_path):
    options = "--num-envs auto --num-steps 2 --total-steps 1 --episodes 1 --num-epochs 1 --device cpu --out run".split()
    code, output, errors = command(*GRID, *options)
    assert (code, errors) == (0, [])
    num_envs = newest(tmp_path / "run")[1]["num_envs"]
    assert 1 <= num_envs <= 512 and f"{num_envs} environments x 5 agents (roles: 4 tagger, 1 runner) on cpu" in output


@pytest.mark.parametrize("seed", [2**31, 2**64 - 1])
def test_every_seed_of_64_bits_is_taken(seed, command, tmp_path):
    code, _, errors = command(*GRID, *SHORT, "--out", "run", "--seed", str(seed))
    assert (code, errors) == (0, [])
    assert newest(tmp_path / "run")[1]["seed"] == seed


@pytest.mark.slow
def test_the_same_seed_trains_the_same_policy_in_another_process(command, tmp_path):
    options = [*TINY, "--total-steps", "48", "--episodes", "2", "--seed", "9"]
    assert command(*GRID, *options, "--out", "one")[0] == 0
    threads = str(torch.get_num_threads())
    done = in_a_process(*GRID, *options, "--out", "two", folder=tmp_path, OMP_NUM_THREADS=threads)
    assert (done.returncode, done.stderr) == (0, "")
    (weights, manifest), (again, manifest_again) = (newest(tmp_path / name) for name in ("one", "two"))
    for progress in (manifest["progress"], manifest_again["progress"]):
        assert progress.pop("seconds") > 0  # of the clock
    assert manifest == manifest_again and weights.keys() == again.keys()
    assert all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.slow
def test_randomised_parameters_are_options_that_a_run_keeps(command, tmp_path):
    ranges = "--randomize gravity 8 12 half_length 0.3 0.9".split()
    config = {"randomize": {"gravity": (8, 12), "half_length": (0.3, 0.9)}}
    code, output, _ = command("show", "cartpole", *ranges)
    assert code == 0 and output.startswith(generate_header(configure("cartpole", **config).layout))
    assert "#define GRAVITY randomized::value_gravity()" in output.splitlines()
    one = ["train", "cartpole", *ranges, *TINY, "--episodes", "2"]
    assert command(*one, "--total-steps", "32", "--out", "whole")[0] == 0
    assert command(*one, "--total-steps", "16", "--out", "run")[0] == 0
    assert command("train", "--resume", "run", "--total-steps", "32")[0] == 0
    (tensors, manifest), (whole, _) = newest(tmp_path / "run"), newest(tmp_path / "whole")
    assert configure("cartpole", **manifest["game_config"]) == configure("cartpole", **config)
    drawn = [name for name in tensors if name.endswith(("state_gravity", "state_half_length"))]
    assert len(drawn) == 2 and all(tensors[name].equal(whole[name]) for name in drawn)
    assert command("evaluate", "run", "--episodes", "3")[0] == 0
    assert command("replay", "record", "run", "--episodes", "2", "--out", "replays")[0] == 0
    assert command("replay", "html", "replays")[0] == 0 and "randomize" in (tmp_path / "replays.html").read_text()


REFUSED = {
    "unknown command": ("trian tag_gridworld", "unknown command 'trian'; nearest: train"),
    "nothing like a command": (
        "xyzzy",
        "unknown command 'xyzzy'; known: bench, check, crossplay, doctor, evaluate, exploit, export, list, new, plot, "
        "replay, show, train",
    ),
    "list with arguments": ("list all", "Unrecognized options: all"),
    "doctor with arguments": ("doctor all", "Unrecognized options: all"),
    "show without a game": ("show", "Missing .* GAME"),
    "train without a game": ("train --seed 3", "Missing value for argument 'GAME'|Missing .* GAME"),
    "a game after an option": ("train --seed 3 cartpole", "no game is given; expected it before all options"),
    "new without a name": ("new", "Missing .* NAME"),
    "a name that is no identifier": ("new MyGame", r"'MyGame' cannot name a game; expected an identifier \[a-z\]"),
    "a name that is a keyword": ("new class --folder here", "'class' is a keyword of Python"),
    "a name that is taken": ("new tag_gridworld", "'tag_gridworld' is already the game TagGridworld"),
    "an unknown option to new": ("new my_game --foldr here", "--foldr.*Perhaps you meant: --folder"),
    "a path to nowhere to show": (
        "show ./nowhere.py",
        'no file nowhere.py; "gpu-vecenv new my_game" creates a template',
    ),
    "a path to nowhere to train": ("train nowhere.py:Game", "no file nowhere.py"),
    "a path to nowhere to check": ("check folder/nowhere.py", "no file folder/nowhere.py"),
    "a path to nowhere to measure": ("bench --game nowhere.py --device cpu", "no file nowhere.py"),
    "a path that is no Python file": ("train ./my_game.cu", "no game is called './my_game.cu'"),
    "unknown game to check": ("check tag_gridwrld", "no game is called 'tag_gridwrld'; nearest: tag_gridworld"),
    "unknown id to check": ("check Nonsuch-v3", "Nonsuch"),
    "arguments that are no JSON": ("check CartPole-v1 --config {", "line 1 column 2"),
    "arguments that are no object": ("check CartPole-v1 --config 3", "config is '3'; expected a JSON object"),
    "an argument that an id does not take": ('check CartPole-v1 --config {"nonsuch":1}', "nonsuch"),
    "an option of ours for an id": ("check CartPole-v1 --num-envs 3", "--num-envs"),
    "too few steps to check": ("check tag_gridworld --steps 9", r"steps is 9; expected a value in \[10, inf\]"),
    "too few environments to check": ("check tag_gridworld --num-envs 1", r"num_envs is 1; expected a value in \[2"),
    "an unknown device to check": ("check tag_gridworld --device tpu", "device is 'tpu'"),
    "a game's field to check": ("check tag_gridworld --grid 0", r"grid is 0; expected a value in \[1, 32767\]"),
    "unknown game to show": ("show tag_gridwrld", "no game is called 'tag_gridwrld'; nearest: tag_gridworld"),
    "unknown game to train": (
        "train tag_continous",
        "no game is called 'tag_continous'; nearest: tag_continuous.* files: my_game.py",
    ),
    "unknown game to measure": (
        "bench --game tag_gird --device cpu",
        "no game is called 'tag_gird'; nearest: tag_grid",
    ),
    "unknown option to show": ("show tag_gridworld --gird 3", "--gird.*Perhaps you meant: --grid"),
    "unknown option to train": (
        "train tag_gridworld --lerning-rate 3",
        "--lerning-rate.*Perhaps you meant: --learning-rate",
    ),
    "an option of the other game": ("train tag_gridworld --num-runners 3", "--num-runners"),
    "a field below its range": ("show tag_gridworld --num-taggers 0", r"num_taggers is 0; expected a value in \[1"),
    "a field above its range": ("train tag_gridworld --grid 40000", r"grid is 40000; expected .* \[1, 32767\]"),
    "a field that is no number": ("train tag_gridworld --grid seven", "--grid: expected an integer, not 'seven'"),
    "an exponent for an integer": (
        "train tag_gridworld --total-steps 1e4",
        "--total-steps: expected an integer such as 10_000, not '1e4'",
    ),
    "another library's name of an option": ("train cartpole --lr 0.1", "--lr: nearest: --learning-rate Help: "),
    "an option that is nearly one": ("train tag_gridworld --num-runners 3", "--num-runners: nearest: --num-taggers"),
    "a fraction for an integer": ("train tag_gridworld --grid 7.5", "--grid: expected an integer, not '7.5'"),
    "a word for a number": ("train tag_gridworld --gamma much", "--gamma: expected a number, not 'much'"),
    "a field that is not finite": (
        "train tag_gridworld --step-cost nan",
        "step_cost is nan; expected a finite float32",
    ),
    "a word that is no choice": ("train tag_continuous --num-neighbors some", "--num-neighbors.*'some'"),
    "a missing value": ("train tag_gridworld --grid", "--grid"),
    "fields that contradict": (
        "show tag_continuous --min-turn 1 --max-turn 0",
        "min_turn = 1.0 exceeds max_turn = 0.0",
    ),
    "no environments": ("train tag_gridworld --num-envs 0", "num_envs is 0; expected an int >= 1"),
    "fewer than no environments": ("train tag_gridworld --num-envs -1", "num_envs is -1; expected an int >= 1"),
    "environments in words": ("train tag_gridworld --num-envs many", "--num-envs.*'many'"),
    "too many environments": (
        "train tag_continuous --num-envs 2000000000 --device cpu",
        r"2,000,000,000 environments .* need [\d,]+ bytes .* [\d,]+ bytes are free .* at most num_envs = [\d,]+ fit",
    ),
    "a rollout that is too long": (
        "train tag_gridworld --num-envs 4 --num-steps 1000000000 --device cpu",
        r"needs about [\d,]+ bytes, [\d,]+ are free on cpu; at most num_envs = [\d,]+ fit",
    ),
    "automatic size that fits nowhere": (
        "train tag_gridworld --num-envs auto --num-steps 2000000000 --device cpu",
        r"one environment needs about [\d,]+ bytes; [\d,]+ are free on cpu",
    ),
    "minibatches that do not divide": (
        "train tag_gridworld --num-envs 4 --num-steps 8 --num-minibatches 7 --device cpu",
        "num_minibatches is 7; .* = 8 x 4 x 4 = 128",
    ),
    "a discount above 1": ("train tag_gridworld --gamma 2", r"gamma is 2.0; expected a value in \[0, 1\]"),
    "no steps at all": ("train tag_gridworld --total-steps 0", r"total_steps is 0; expected a value in \[1"),
    "a learning rate that is NaN": ("train tag_gridworld --learning-rate nan", "learning_rate is nan"),
    "a layer without units": (
        "train tag_gridworld --hidden-sizes 8 0",
        r"hidden_sizes\[1\] is 0; expected a value in \[1",
    ),
    "an unknown device": ("train tag_gridworld --device tpu", 'device is \'tpu\'; expected "cpu", "cuda"'),
    "an unknown device to measure": ("bench --game tag_gridworld --device tpu", "device is 'tpu'"),
    "a driver on the CPU": ("train tag_gridworld --device cpu --driver pycuda", "driver.*'pycuda'"),
    "a negative seed": ("train tag_gridworld --num-envs 4 --seed -1", r"seed is -1; expected an int in \[0, 2\*\*64"),
    "a seed too large": (
        "train tag_gridworld --num-envs 4 --seed 18446744073709551616",
        "seed is 18446744073709551616",
    ),
    "no evaluation episodes": (
        "train tag_gridworld --episodes 0",
        "episodes is 0",
    ),
    "an unknown algorithm": ("train tag_gridworld --algorithm sac", "invalid choice 'sac' for argument '--algorithm'"),
    "no checkpoints": ("train tag_gridworld --keep 0", r"keep is 0; expected a value in \[1"),
    "negative seconds": (
        "train tag_gridworld --checkpoint-seconds -1",
        r"checkpoint_seconds is -1.0; expected a value",
    ),
    "a figure that no run has": (
        "train tag_gridworld --best-metric retrun_tagger",
        "best_metric is 'retrun_tagger'; expected one of return_tagger, return_runner, episode_length, "
        "terminated_fraction",
    ),
    "policies that are no JSON": ("train tag_gridworld --policies {", "line 1 column 2"),
    "policies that are no object": (
        "train tag_gridworld --policies [3]",
        r"policies is '\[3\]'; expected JSON like",
    ),
    "a policy that is no object": (
        'train tag_gridworld --policies {"tagger":3}',
        "policies is .*; expected JSON like",
    ),
    "an unknown policy": (
        'train tag_gridworld --policies {"taggr":{}}',
        r"unknown policy 'taggr' in policies; expected one of those that are trained: \['tagger', 'runner'\]",
    ),
    "a shared policy where none is shared": (
        'train tag_gridworld --policies {"tagger+runner":{}}',
        r"unknown policy 'tagger\+runner' in policies; expected one of those that are trained: \['tagger', 'runner'\]",
    ),
    "a policy of its own where all share one": (
        'train tag_gridworld --sharing all --policies {"tagger":{"clip":0.1}}',
        r"unknown policy 'tagger' in policies; expected one of those that are trained: \['tagger\+runner'\]",
    ),
    "an unknown key of a policy": (
        'train tag_gridworld --policies {"tagger":{"lerning_rate":0.1}}',
        r"unknown keys \['lerning_rate'\] for tagger; known: .*learning_rate",
    ),
    "a policy's value of a wrong type": (
        'train tag_gridworld --policies {"tagger":{"learning_rate":"high"}}',
        "learning_rate is 'high'.*; expected float",
    ),
    "a policy's value out of range": (
        'train tag_gridworld --policies {"tagger":{"gamma":2}}',
        r"gamma is 2.0; expected a value in \[0, 1\]",
    ),
    "a policy with a run of its own": (
        'train tag_gridworld --policies {"tagger":{"num_steps":7}}',
        "num_steps of tagger is 7; expected 4",
    ),
    "a frozen role without a run": (
        "train tag_gridworld --frozen tagger",
        r"frozen has 'tagger': there is no file or folder tagger; expected random, still, RUN, or .*ROLE=file.py",
    ),
    "a role that is frozen twice": (
        "train tag_gridworld --frozen tagger=random tagger=still",
        "frozen is tagger=random tagger=still, which names tagger_0 twice; expected each role once, such as runner",
    ),
    "a frozen role that there is not": (
        "train tag_gridworld --frozen taggr=random",
        "unknown role 'taggr' in frozen; nearest: tagger",
    ),
    "an agent that is frozen": (
        "train tag_gridworld --frozen tagger_0=random",
        "unknown role 'tagger_0' in frozen; nearest: tagger",
    ),
    "all roles frozen": (
        "train tag_gridworld --frozen random",
        r"frozen is random; expected one of the roles \['tagger', 'runner'\] to be left to train",
    ),
    "a share of no opponents": (
        "train tag_gridworld --opponents-share 0.5",
        "opponents_share is 0.5, but there are no opponents; give --opponents values, or leave it out",
    ),
    "a share of no opponents of a preset": (
        "train tag_continuous --num-envs 6 --opponents --opponents-share 0.3",
        "opponents_share is 0.3, but there are no opponents",
    ),
    "a gain of no snapshots": (
        "train tag_gridworld --opponents random --snapshot-gain 0.7",
        "snapshot_gain is 0.7, but no opponent is a snapshot; add snapshots to --opponents",
    ),
    "hyper-parameters of a frozen role": (
        'train tag_gridworld --frozen runner=random --policies {"runner":{"gamma":0.9}}',
        r"unknown policy 'runner' in policies; expected one of those that are trained: \['tagger'\]",
    ),
    "a role that is frozen and cannot stand still": (
        "train tag_continuous --frozen runner=still",
        "'still' is given, but TagContinuous declares no noop of 'runner'; expected one, such as noop = 0",
    ),
    "a script without a role": (
        "train tag_gridworld --frozen nowhere.py:east",
        "frozen has the script 'nowhere.py:east'; expected the role that it plays: ROLE=nowhere.py:east",
    ),
    "a frozen role's run that there is not": (
        "train tag_gridworld --frozen tagger=nowhere",
        "nowhere",
    ),
    "a run to go on with that there is not": ("train --resume nowhere", "no run at nowhere"),
    "a hyper-parameter of a resumed run": (
        "train --resume nowhere --learning-rate 1e-4 --gamma=0.9",
        "a resumed run keeps .* takes no --learning-rate, --gamma; expected one of .*--total-steps.* needs a new run",
    ),
    "evaluate without a run": ("evaluate", "Missing .* RUN"),
    "a run to evaluate that there is not": ("evaluate nowhere --device cpu", "nowhere"),
    "an unknown option to evaluate": ("evaluate nowhere --gredy", "--gredy.*Perhaps you meant: --greedy"),
    "no episodes to evaluate": ("evaluate nowhere --episodes 0", r"episodes is 0; expected a value in \[1"),
    "an unknown device to evaluate": ("evaluate nowhere --device tpu", "device is 'tpu'"),
    "a game's file to evaluate that there is not": ("evaluate nowhere --game nowhere.py", "no file nowhere.py"),
    "plot without a run": ("plot", "plot needs at least one run folder: gpu-vecenv plot runs/one runs/other"),
    "a run to plot that there is not": ("plot nowhere", "no .*nowhere/metrics.csv; expected a run folder"),
    "a picture of another kind": ("plot nowhere --out curve.txt", "out is curve.txt; expected .* .png or .svg"),
    "an unknown axis": ("plot nowhere --x steps", "'steps'.*'--x'"),
    "a mean of no iterations": ("plot nowhere --smooth 0", r"smooth is 0; expected a value in \[1"),
    "an unknown option to plot": ("plot nowhere --metrisc return_tagger", "--metrisc.*Perhaps you meant: --metrics"),
    "a configuration that is no JSON": ("bench --game tag_gridworld --device cpu --config {", "line 1 column 2"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.usefixtures("pictures")
def test_a_wrong_argument_gives_a_message_and_exit_code_2(what, command, tmp_path):
    arguments, message = REFUSED[what]
    words = arguments.split()
    if arguments.startswith("train tag"):  # short, should it not be refused
        words = [*words[:2], *SHORT, *words[2:], "--out", "run"]
    result = command(*words)
    refused(result, message)
    assert os.listdir(tmp_path) == []  # refused before anything was done


def forget_acorn():
    GAMES.pop("acorn", None)
    gymnasium.registry.pop("gpu_vecenv/Acorn-v0", None)
    sys.modules.pop("acorn", None)


@pytest.fixture
def own(command, tmp_path):
    """A new game called acorn, which is forgotten afterwards."""
    forget_acorn()
    path = list(sys.path)
    code, _, errors = command("new", "acorn")
    assert (code, errors) == (0, [])
    mark_as_checked("acorn.py", game_class("acorn.py")())
    forget_acorn()
    yield tmp_path / "acorn.py"
    sys.path[:] = path
    forget_acorn()


def test_a_run_in_place_of_a_game_is_said_to_be_one(trained, command):
    message = rf"{trained} is a run; expected a game.* continue the run: gpu-vecenv train --resume {trained}$"
    refused(command("train", str(trained), "--seed", "3"), message)


def test_new_writes_a_game_and_says_what_comes_next(command, tmp_path):
    forget_acorn()
    code, output, errors = command("new", "acorn", "--folder", "my own/games")
    assert (code, errors) == (0, [])
    assert sorted(os.listdir(tmp_path / "my own" / "games")) == ["acorn.cu", "acorn.py", "test_acorn.py"]
    lines = [line.strip() for line in output.splitlines()]
    assert lines[1].startswith("edit my own/games/acorn.cu")
    assert lines[2] == "gpu-vecenv check 'my own/games/acorn.py'"
    assert lines[3].startswith("gpu-vecenv train 'my own/games/acorn.py'")


def files_of(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}  # not __pycache__


def test_new_overwrites_nothing(own, command, tmp_path):
    before = files_of(tmp_path)
    own.unlink()
    code, output, errors = command("new", "acorn")
    assert (code, output) == (2, "")
    assert errors == ["gpu-vecenv: error: acorn.cu exists; choose another name or --folder"]
    del before["acorn.py"]
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("spelling", ["acorn.py", "./acorn.py", "acorn.py:Acorn", "{}"])
def test_a_path_is_as_good_as_a_name(spelling, own, command):
    code, output, errors = command("show", spelling.format(own), "--length", "7")
    assert (code, errors) == (0, [])
    assert output.startswith("// Generated from Acorn(") and "constexpr int LENGTH = 7;" in output
    code, output, _ = command("train", spelling.format(own), "--help")
    assert code == 0 and "--num-sprinters" in output


@pytest.mark.slow
def test_train_and_bench_take_a_path(own, command, tmp_path):
    code, _, errors = command("train", "acorn.py", *SHORT, "--out", "run", "--length", "9")
    assert (code, errors) == (0, [])
    _, manifest = newest(tmp_path / "run")
    assert manifest["game"] == "acorn" and manifest["game_config"]["length"] == 9
    code, output, errors = command("bench", "--game", "acorn.py", "--num-envs", "2", "--device", "cpu")
    assert (code, errors) == (0, [])
    assert json.loads(output.splitlines()[0])["game"] == "acorn"


@pytest.mark.slow
def test_a_game_that_was_not_checked_since_it_changed_is_named(own, command, monkeypatch):
    monkeypatch.setenv("GPU_VECENV_CXXFLAGS", "-O0")
    record = ["replay", "record", "acorn.py", "--device", "cpu", "--max-steps", "9", "--out"]
    check = ["check", "acorn.py", "--device", "cpu", "--max-steps", "9", "--steps", "10", "--checks", "G01"]
    unchecked = [
        "gpu-vecenv: acorn.py has not been checked as it is now; an index out of bounds would corrupt memory: "
        "gpu-vecenv check acorn.py --checks G01 G06"
    ]
    assert command(*record, "checked")[::2] == (0, [])
    rules = own.with_suffix(".cu")
    sound, right = rules.read_text() + f"// {uuid4()}\n", "        io.rewards[i] = "
    rules.write_text(sound.replace(right, f"[[maybe_unused]] bool beyond = io.truncations[NUM_AGENTS];\n{right}"))
    assert command(*check)[0] == 1
    assert command(*record, "wrong", "--seed", "1")[::2] == (0, unchecked)
    rules.write_text(sound)
    assert command(*record, "unchecked")[::2] == (0, unchecked)
    assert command("train", "acorn.py", *SHORT, "--max-steps", "9", "--out", "unchecked")[::2] == (0, unchecked)
    assert command(*check)[0] == 0
    assert command(*record, "sound")[::2] == (0, [])
    assert command("train", "acorn.py", *SHORT, "--max-steps", "9", "--out", "sound")[::2] == (0, [])


@pytest.mark.slow
def test_check_passes_a_correct_game(own, command, monkeypatch):
    monkeypatch.setenv("GPU_VECENV_PROGRESS_SECONDS", "0")
    options = ["--steps", "30", "--max-steps", "9", "--device", "cpu"]
    options += [
        "--checks",
        ",".join(k for k in (*GAME_CHECKS, *CHECKS) if k not in ("G00", "K18")),
    ]  # K18 takes longest
    code, output, errors = command("check", "acorn.py", *options, "--verbose")
    assert code == 0
    reports = [re.fullmatch(r"check: (\d+)%(?:, .+?)?  ([a-z_ ]+)(: .+)?", line) for line in errors]
    assert list(dict.fromkeys(report[2] for report in reports)) == [
        *("rules", "races", "bitwise equality", "next_step", "same_step", "disabled", "parallel", "acorn")
    ]
    percents = [int(report[1]) for report in reports]
    assert percents == sorted(percents) and percents[0] == 0 and percents[-1] == 100
    assert re.search(r"acorn: [23]\d passed, 0 failed, \d skipped\n", re.sub(" +", " ", output).replace(" \n", "\n"))
    assert output.count("K01") == 1, "one table"
    assert re.search(r"G05 .* passed .*\n.* note: 50 of 100 environments", output), output


LEFT = "s.berries_left[0] = NUM_BERRIES;\n    }"
WRONG_RULES = (  # an episode that is a step too long; a loop that one thread executes; a sum over threads
    ("io.elapsed_steps >= MAX_STEPS", "io.elapsed_steps > MAX_STEPS", "G04 .* agent walker_0 of environment"),
    (
        "s.berries_left[0] = NUM_BERRIES;",
        "s.berries_left[0] = NUM_BERRIES;\n        FOR_AGENTS (i) s.berry[0] = i;",
        r"G06 .* or group_reduce_min\(\) stands in",
    ),
    (
        LEFT,
        LEFT + "\n    int k = 0;\n    FOR_AGENTS (i) k = i;\n    ONCE { s.berry[0] = k; }",
        r"G05 .* ranges backwards: s\.berry\[0\] of environment 0",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("right", "wrong", "message"), WRONG_RULES)
def test_check_ends_with_1_where_promises_are_broken(right, wrong, message, own, command):
    rules = own.with_suffix(".cu")
    assert right in rules.read_text()
    rules.write_text(rules.read_text().replace(right, wrong))
    code, output, errors = command("check", "acorn.py", "--steps", "30", "--max-steps", "9", "--device", "cpu")
    assert (code, errors) == (1, [])
    assert re.search(message, output), output


@pytest.mark.slow
def test_check_takes_any_vector_environment_of_gymnasium(command):
    some = ["--steps", "10", "--checks", "K01,", "K10", "K14"]
    code, output, errors = command("check", "CartPole-v1", *some, "--verbose")
    assert errors == []
    failed = int(re.search(r"(\d+) failed", output)[1])
    assert code == int(failed > 0) and "episodes end as declared" in output
    ours = ["check", gymnasium_id(GAMES["cartpole"]), *some]
    code, output, errors = command(*ours, "--config", '{"device": "cpu"}')
    assert (code, errors) == (0, []) and " 0 failed" in " ".join(output.split())
    code, output, errors = command(*ours, "--config", '{"device": "cpu", "validate": "async"}')
    assert (code, errors) == (1, []) and "bad actions are refused" in output
    assert " 1 failed" in " ".join(output.split())


def test_check_takes_parallel_environments_of_pettingzoo(command, monkeypatch):
    options = ["--parallel", "--steps", "10", "--checks", "K01,K02,K03,K14", "--config"]
    ours = "gpu_vecenv/tag_gridworld-v0"
    with monkeypatch.context() as patch:
        patch.setenv("GPU_VECENV_PROGRESS_SECONDS", "0")
        code, output, errors = command("check", ours, *options, '{"device": "cpu", "random_start": true}')
    assert all(line.startswith("check: ") for line in errors)
    assert [line.split("  ")[1].split()[0] for line in errors[1:4]] == ["K01", "K02", "K03"]
    assert code == 0 and "tag_gridworld_v0: " in output and " 0 failed" in " ".join(output.split())
    refused(command("check", ours, *options, '{"nonsuch": 1}'), "pettingzoo.make: ConfigError: .*nonsuch")
    refused(command("check", "sisl/nonsuch_v3", *options, "{}"), "pettingzoo.make: .*nonsuch")


def test_an_id_that_only_pettingzoo_has_is_of_a_parallel_environment(command, monkeypatch):
    name = "gpu_vecenv/tag_gridworld-v0"
    run = ["check", name, "--checks", "K10", "--steps", "10", "--config", '{"device": "cpu"}']
    code, output, _ = command(*run)
    assert code == 0 and "tag_gridworld_v0: 1 passed, 0 failed" in output
    monkeypatch.setitem(gymnasium.registry, name, gymnasium.registry[gymnasium_id(GAMES["cartpole"])])
    code, output, _ = command(*run)
    assert code == 0 and "Cartpole" in output
    code, output, _ = command(*run, "--parallel")
    assert code == 0 and "tag_gridworld_v0: 1 passed, 0 failed" in output


FACTORIES = """
import gymnasium

from gpu_vecenv import parallel_env


def make(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


def agents(**config):
    return parallel_env("tag_gridworld", "cpu", **config)
"""


def test_check_takes_factories_and_writes_reports(command, tmp_path):
    (tmp_path / "factories_of_a_test.py").write_text(FACTORIES)
    entry = f"{tmp_path}/factories_of_a_test.py:"
    few = ["--checks", "K10,K15", "--steps", "10"]
    code, output, _ = command("check", f"{entry}make", *few, "--max-steps", "500", "--json", "-", "--junit", "out.xml")
    report = json.loads(output)
    assert (code, report["passed"]) == (1, ["K10"])
    assert {failure["check"] for failure in report["failures"]} == {"K15"}
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert suite[1].find("failure").get("message") == "step after close: accepted; expected an error"
    code, output, _ = command("check", f"{entry}agents", "--parallel", *few)
    assert code == 0 and "2 passed, 0 failed" in output
    refused(command("check", f"{entry}nonsuch", *few), "nonsuch.*expected module:factory")
    refused(command("check", "no_such_module_at_all:make", *few), "No module named")
    refused(command("check", f"{entry}make", "--checks", "K99"), "unknown check 'K99'")


@pytest.mark.slow
def test_check_writes_the_same_reports_for_a_game(own, command, tmp_path):
    rules = own.with_suffix(".cu")
    run = ["check", "acorn.py", "--steps", "10", "--max-steps", "9", "--device", "cpu", "--no-parallel"]
    code, output, errors = command(*run, "--checks", "G02", "K07", "--json", "-", "--junit", "out.xml")
    report = json.loads(output)
    assert (code, errors) == (0, [])
    assert (report["name"], report["passed"], report["failures"]) == ("acorn", ["G01", "G02", "G03", "G04", "K07"], [])
    rules.write_text(rules.read_text().replace("io.elapsed_steps >= MAX_STEPS", "io.elapsed_steps > MAX_STEPS"))
    code, output, errors = command(*run, "--checks", "G02,G04,K07", "--json", "out.json", "--junit", "out.xml")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (code, errors, report["passed"]) == (1, [], ["G01", "G02", "G03"]) and "G04" in output
    (failure,) = report["failures"]
    assert (failure["check"], failure["title"]) == ("G04", "episodes end at their limit")
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")
    assert suite[3].get("name") == "G04" and suite[3].find("failure").get("message") == failure["got"]
    refused(command(*run, "--checks", "K99"), "unknown check 'K99'")


@pytest.mark.slow
def test_check_takes_the_limit_of_a_game_that_declares_none(own, command):
    own.write_text(own.read_text().replace("max_steps", "length_of_episodes"))
    rules = own.with_suffix(".cu")
    rules.write_text(rules.read_text().replace("MAX_STEPS", "LENGTH_OF_EPISODES"))
    run = ["check", "acorn.py", "--steps", "10", "--length-of-episodes", "9", "--device", "cpu", "--checks", "G04"]
    code, output, _ = command(*run, "--max-steps", "8")
    assert code == 1 and "after max_steps = 8 steps" in " ".join(output.replace("│", " ").split())
    code, output, _ = command(*run, "--max-steps", "9")
    assert code == 0 and "4 passed, 0 failed" in output
    code, output, _ = command(*run)
    assert code == 0 and "3 passed, 0 failed, 1 skipped" in output


def test_the_size_that_is_said_to_fit_is_the_free_memory_by_the_bytes_of_one(command):
    _, _, (line,) = command("train", "tag_continuous", "--num-envs", str(2 * 10**9), "--device", "cpu")
    all_bytes, each, free, fits = (
        int(text.replace(",", "")) for text in re.findall(r"(?:need|\(|;|=) ?([\d,]+)(?= bytes| each| fit)", line)
    )
    assert all_bytes == 2 * 10**9 * each and fits == free // each


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_run_folder_that_cannot_be_made_gives_one_line(out, command, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, errors = command(*GRID, *TINY, "--total-steps", "16", "--out", out)
    assert code == 2
    assert len(errors) == 1 and errors[0].startswith("gpu-vecenv: error: ") and out in errors[0]
    assert (tmp_path / "file").read_text() == "mine"


# root too obeys permissions after this
OBEY = """
import ctypes, os
if os.getuid() == 0:
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
"""


@pytest.mark.slow
def test_a_file_in_a_folder_without_the_right_to_write_is_refused_before_the_work(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    script = f"""{OBEY}
import sys
from gpu_vecenv.cli.main import main
sys.exit(main(["check", "CartPole-v1", "--checks", "K01", "--json", "closed/new/report.json"]))"""
    done = run_python("-c", script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "json is closed/new/report.json; expected a file's name where you may write" in done.stderr


def test_a_gpu_that_is_not_there_gives_one_line(tmp_path):
    done = in_a_process("train", "tag_gridworld", "--device", "cuda", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-vecenv: error: device is 'cuda', but torch")
    assert "gpu-vecenv doctor" in line and 'device="cpu"' in line
    assert os.listdir(tmp_path) == []


def test_a_process_ends_with_the_exit_code_and_without_a_traceback(tmp_path):
    done = run_child("-m", "gpu_vecenv.cli", "show", "tag_gridwrld", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu-vecenv: error: no game is called 'tag_gridwrld'; nearest: tag_gridworld.*\n", done.stderr)


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.exhaustive)])
def test_unknown_options_have_suggestions_in_any_encoding(encoding, tmp_path):
    command = ("-m", "gpu_vecenv.cli", "train", "tag_gridworld", "--gird", "3")
    done = run_child(*command, folder=tmp_path, variables={"PYTHONIOENCODING": encoding})
    assert done.returncode == 2
    assert done.stdout == "" and re.search(r"--gird.*Perhaps you meant:.*--grid INT", done.stderr, re.DOTALL)


def test_a_run_whose_loss_is_not_finite_gives_one_line(command):
    """Rewards of 1e38 square to infinity."""
    options = "--total-steps 16 --step-cost 1e38 --out run".split()
    code, _, errors = command(*GRID, *TINY, *options)
    assert code not in (0, None)
    assert len(errors) == 1 and re.search(r"error: iteration 1: losses .* are not finite", errors[0])


# Train: whose hyper-parameters


@pytest.mark.parametrize("spelling", [["--algorithm", "a2c"], ["--algorithm=a2c"]])
def test_a2c_has_defaults_of_its_own(spelling, command, tmp_path):
    options = "--num-envs 4 --hidden-sizes 8 --device cpu --total-steps 40 --episodes 2 --out run".split()
    code, _, errors = command(*GRID, *spelling, *options)
    assert (code, errors) == (0, [])
    wanted = dataclasses.asdict(PPOConfig.a2c(total_steps=40, hidden_sizes=(8,)))
    config = newest(tmp_path / "run")[1]["config"]
    assert config == json.loads(json.dumps(wanted))  # JSON has lists, not tuples
    assert wanted["num_steps"] == 5 and len(read_log(tmp_path / "run")) == 2
    help_text = command(*GRID, *spelling, "--help")[1]
    assert re.search(r"--num-steps INT .*\(default: 5\)", help_text)
    assert re.search(r"--algorithm .*\n.* and their defaults \(default: a2c\)", help_text)


def test_what_is_given_wins_over_a2cs_defaults(command, tmp_path):
    """Also where it is PPO's default, which a comparison with that would take for not given."""
    options = [*SHORT, "--gae-lambda", "0.95", "--normalize-advantages", "--num-steps", "2", "--out", "run"]
    assert command(*GRID, "--algorithm", "a2c", *options)[0] == 0
    config = newest(tmp_path / "run")[1]["config"]
    told = {key: config[key] for key in ("gae_lambda", "normalize_advantages", "num_steps", "num_minibatches")}
    assert told == {"gae_lambda": 0.95, "normalize_advantages": True, "num_steps": 2, "num_minibatches": 2}
    assert config["learning_rate"] == PPOConfig.a2c().learning_rate


def test_a_folder_called_a2c_is_no_algorithm(command, tmp_path):
    assert command(*GRID, *SHORT, "--out", "a2c")[0] == 0
    config = newest(tmp_path / "a2c")[1]["config"]
    assert config["gae_lambda"] == PPOConfig().gae_lambda and config["normalize_advantages"]


@pytest.mark.parametrize("attribute", ["preset", "sample_efficient_preset"])
@pytest.mark.parametrize("name", sorted(GAMES))
def test_presets_fit_their_games(name, attribute):
    game, preset = configure(name), dict(getattr(GAMES[name], attribute))
    num_envs = preset.pop("num_envs", "auto")
    assert num_envs == "auto" or (type(num_envs) is int and num_envs >= 1)
    config = PPOConfig(**preset)
    for count in game.roles.values() if num_envs != "auto" else ():
        assert config.num_steps * num_envs * count % config.num_minibatches == 0


def test_a_game_has_a_preset_for_few_env_steps_or_none(command, tmp_path):
    preset = GAMES["cartpole"].sample_efficient_preset
    few = "--total-steps", str(preset["num_envs"] * preset["num_steps"]), "--episodes", "2", "--device", "cpu"
    assert command("train", "cartpole", "--preset", "sample-efficient", *few, "--out", "run")[0] == 0
    config = newest(tmp_path / "run")[1]["config"]
    told = {name: value for name, value in preset.items() if name not in ("num_envs", "total_steps")}
    assert told.items() <= config.items()
    result = command(*GRID, *SHORT, "--preset", "sample-efficient", "--out", "none")
    refused(result, r"tag_gridworld has no preset for few env-steps; leave out --preset sample-efficient\. Help: .*$")
    assert not (tmp_path / "none").exists()
    result = command("train", "cartpole", "--algorithm", "a2c", "--preset", "sample-efficient", "--out", "none")
    refused(result, r"--preset sample-efficient is of PPO; leave out --preset or --algorithm a2c\. Help: .*$")


PRESET = '{"num_envs": 6, "num_steps": 3, "num_minibatches": 1, "hidden_sizes": (8,), "learning_rate": 0.0042}'


@pytest.fixture
def with_preset(own):
    """The new game, with a preset."""

    def write(preset):
        line = '    termination_label = "all berries were collected"\n'
        text = own.read_text()
        assert line in text
        own.write_text(text.replace(line, f"{line}    preset = {preset}  # noqa: RUF012\n"))

    return write


def test_a_games_preset_gives_the_defaults(with_preset, command, tmp_path):
    with_preset(PRESET)
    code, output, errors = command("train", "acorn.py", "--help")
    assert (code, errors) == (0, [])
    shown = {
        name: re.search(rf"--{name} [^(]*(?:\([^d][^(]*)*\(default: ([^)]+)\)", output)[1]
        for name in ("num-envs", "num-steps", "num-minibatches", "hidden-sizes", "learning-rate", "gamma")
    }
    assert shown == {
        "num-envs": "6",
        "num-steps": "3",
        "num-minibatches": "1",
        "hidden-sizes": "8",
        "learning-rate": "0.0042",
        "gamma": "0.99",
    }
    options = "--device cpu --total-steps 18 --episodes 2".split()
    assert command("train", "acorn.py", *options, "--out", "preset")[0] == 0
    given = ["--num-envs", "4", "--learning-rate", "0.0003"]  # PPO's default, that is given
    assert command("train", "acorn.py", *options, *given, "--out", "given")[0] == 0
    a2c = ["--algorithm", "a2c", "--num-envs", "2"]  # a preset is for PPO
    assert command("train", "acorn.py", *options, *a2c, "--out", "a2c")[0] == 0
    used = {}
    for name in ("preset", "given", "a2c"):
        _, manifest = newest(tmp_path / name)
        config = manifest["config"]
        keys = ("num_steps", "num_minibatches", "hidden_sizes", "learning_rate")
        used[name] = (manifest["num_envs"], *(config[key] for key in keys))
    assert used == {
        "preset": (6, 3, 1, [8], 0.0042),
        "given": (4, 3, 1, [8], 0.0003),
        "a2c": (2, 5, 1, [64, 64], 0.0007),
    }


def test_a_wrong_preset_gives_one_line(with_preset, command, tmp_path):
    with_preset('{"lerning_rate": 0.1}')
    before = set(os.listdir(tmp_path))
    refused(command("train", "acorn.py", *SHORT, "--out", "run"), "lerning_rate")
    assert set(os.listdir(tmp_path)) - before <= {"__pycache__"}


def test_a_role_without_agents_is_no_hindrance(own, command, tmp_path):
    code, _, errors = command("train", "acorn.py", *SHORT, "--num-sprinters", "0", "--max-steps", "9", "--out", "run")
    assert (code, errors) == (0, [])
    assert list(newest(tmp_path / "run")[1]["policies"]) == ["walker"]
    code, output, errors = command("evaluate", "run", "--json", "--episodes", "3", "--device", "cpu")
    assert (code, errors) == (0, []) and json.loads(output)["episodes"] == 3


# Train: whose policies


def width(tensors, name):
    """Units of the first hidden layer of a policy."""
    return len(tensors[f"policy.{name}.network.trunk.0.bias"])


def test_one_policy_may_be_shared_by_all_roles(command, tmp_path):
    changes = '{"tagger+runner": {"entropy_coefficient": 0.5}}'
    code, _, errors = command(*GRID, *SHORT, "--sharing", "all", "--policies", changes, "--out", "run")
    assert (code, errors) == (0, [])
    tensors, manifest = newest(tmp_path / "run")
    assert list(manifest["policies"]) == manifest["trained"] == ["tagger+runner"]
    assert {name.split(".")[1] for name in tensors if name.startswith("policy.")} == {"tagger+runner"}
    assert manifest["policies"]["tagger+runner"]["entropy_coefficient"] == 0.5
    assert "entropy_tagger+runner" in read_log(tmp_path / "run")[0]
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    against = [f"{role} against {other}" for role in ("tagger", "runner") for other in ("random", "initial", "still")]
    assert sorted(results) == sorted(["all random", *against, "all trained"])
    code, output, errors = command("evaluate", "run", "--json", "--episodes", "3", "--device", "cpu")
    assert (code, errors) == (0, []) and {"return_tagger", "return_runner"} < set(json.loads(output))


def test_each_policy_may_have_hyper_parameters_of_its_own(command, tmp_path):
    changes = {"tagger": {"learning_rate": 0.5, "hidden_sizes": [5, 4], "num_minibatches": 1, "final_clip": 0}}
    code, _, errors = command(*GRID, *SHORT, "--policies", json.dumps(changes), "--out", "run")
    assert (code, errors) == (0, [])
    tensors, manifest = newest(tmp_path / "run")
    assert manifest["policies"]["runner"] == manifest["config"]
    assert manifest["policies"]["tagger"] == {**manifest["config"], **changes["tagger"]}
    assert (width(tensors, "tagger"), width(tensors, "runner")) == (5, 8)
    assert "learning_rate_tagger" in read_log(tmp_path / "run")[0]


@pytest.mark.parametrize("source", ["the run", "a file"])
def test_a_frozen_role_plays_by_another_run_and_keeps_its_bits(source, trained, command, tmp_path):
    """Weights and running statistics; the network is as wide as it was there."""
    given = trained if source == "the run" else max((trained / "checkpoints").glob("iteration-*"))
    options = [*SHORT, "--total-steps", "64", "--hidden-sizes", "6", "--no-normalize-obs"]
    code, _, errors = command(*GRID, *options, "--frozen", f"tagger={given}", "--out", "run")
    assert (code, errors) == (0, [])
    (old, old_manifest), (new, manifest) = newest(trained), newest(tmp_path / "run")
    assert set(manifest["policies"]) == {"tagger", "runner"} and manifest["trained"] == ["runner"]
    kept = {name: tensor for name, tensor in old.items() if name.startswith("policy.tagger.")}
    assert any("normalizer" in name for name in kept) and not old["policy.tagger.obs_normalizer.mean"].eq(0).all()
    assert {name for name in new if name.startswith("policy.tagger.")} == set(kept)
    assert all(new[name].equal(tensor) for name, tensor in kept.items())
    assert not any(name.startswith("optimizer.tagger") for name in new)
    assert manifest["policies"]["tagger"]["normalize_obs"] and not manifest["policies"]["runner"]["normalize_obs"]
    assert width(new, "runner") == 6 and old_manifest["config"]["hidden_sizes"] == [8]
    assert {"entropy_runner"} <= set(read_log(tmp_path / "run")[0]).difference({"entropy_tagger"})


def test_frozen_roles_leave_the_others_to_share(trained, command, tmp_path):
    assert command(*GRID, *SHORT, "--sharing", "all", "--frozen", f"runner={trained}", "--out", "run")[0] == 0
    assert newest(tmp_path / "run")[1]["trained"] == ["tagger"]
    result = command(*GRID, *SHORT, "--frozen", f"tagger={trained}", "--policies", '{"tagger": {"clip": 0.1}}')
    # A frozen one has none to change.
    refused(result, r"unknown policy 'tagger' in policies; expected one of those that are trained: \['runner'\]")


@pytest.mark.parametrize("other", ["continuous", "cartpole"])
def test_a_run_of_another_game_plays_no_role_in_this_one(other, elsewhere, trained, command, tmp_path):
    game = {"continuous": "tag_continuous", "cartpole": "cartpole"}[other]
    given = f"tagger={elsewhere / other}"
    refused(command(*GRID, *SHORT, "--frozen", given, "--out", "run"), rf"{other}.*\b{game}\b")
    refused(command("evaluate", str(trained), "--device", "cpu", "--opponents", given), rf"{other}.*\b{game}\b")
    assert os.listdir(tmp_path) == []


def test_a_run_with_another_observation_plays_no_role(trained, command, tmp_path):
    assert command(*GRID, *SHORT, "--num-taggers", "2", "--out", "two")[0] == 0
    before = contents(tmp_path)
    refused(command(*GRID, *SHORT, "--frozen", "tagger=two", "--out", "run"), "tagger")
    refused(command("evaluate", str(trained), "--device", "cpu", "--opponents", "tagger=two"), "tagger")
    assert contents(tmp_path) == before


def test_a_shared_policy_can_play_one_role(command, tmp_path):
    assert command(*GRID, *SHORT, "--sharing", "all", "--out", "shared")[0] == 0
    code, _, errors = command(*GRID, *SHORT, "--frozen", "runner=shared", "--out", "run")
    assert (code, errors) == (0, [])
    (old, _), (new, _) = (newest(tmp_path / name) for name in ("shared", "run"))
    kept = {name: x for name, x in new.items() if name.startswith("policy.runner.network")}
    assert kept and all(old[name.replace("runner", "tagger+runner", 1)].equal(x) for name, x in kept.items())


# Train: what it leaves


def test_graphs_change_no_bit_and_are_noted(device, command, tmp_path):
    options = ["--digests", "--device", device]
    for name in ("graphs", "no-graphs"):
        code, _, errors = command(*GRID, *SHORT, "--total-steps", "64", *options, f"--{name}", "--out", name)
        assert (code, errors) == (0, [])
        settings = json.loads((tmp_path / name / "settings.json").read_text())
        assert settings["graphs"] is (name == "graphs") and settings["device"] == device
    one, other = ([row["weights"] for row in read_log(tmp_path / name)] for name in ("graphs", "no-graphs"))
    assert one == other and len(set(one)) == len(one) == 4
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in one)


REWARD = """from functools import partial


def weighted(t, weight):
    return weight * t.rewards


class Rewards:
    double = partial(weighted, weight=2)


half = partial(weighted, weight=0.5)
wrong = 3
"""


@pytest.fixture
def reward(tmp_path):
    """A file of reward functions, whose module is forgotten afterwards."""
    path = list(sys.path)
    (tmp_path / "own_rewards.py").write_text(REWARD)
    yield tmp_path / "own_rewards.py"
    sys.path[:] = path
    sys.modules.pop("own_rewards", None)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["own_rewards.py:half", "own_rewards:half"])
def test_a_run_keeps_its_reward_function(source, reward, command, tmp_path, monkeypatch):
    one = [*GRID, *TINY, "--episodes", "2", "--total-steps", "32", "--reward", source, "--out", "run"]
    assert command(*one)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sys.modules.pop("own_rewards")
    assert command("train", "--resume", str(tmp_path / "run"), "--total-steps", "48")[0] == 0
    assert newest(tmp_path / "run")[1]["reward"] == "own_rewards.weighted"
    rows = read_log(tmp_path / "run")
    assert len(rows) == 3 and all(math.isfinite(float(row["shaped_reward_runner"])) for row in rows)


@pytest.mark.slow
def test_a_reward_function_that_has_moved_is_named_again(reward, command, tmp_path):
    one = [*GRID, *TINY, "--episodes", "2", "--total-steps", "32", "--reward", "own_rewards.py:half", "--out", "run"]
    assert command(*one)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    moved = reward.rename(tmp_path / "elsewhere" / "own_rewards.py")
    sys.modules.pop("own_rewards")
    go_on = ["train", "--resume", "run", "--total-steps", "48"]
    refused(command(*go_on), "reward is '.*own_rewards.py:half': there is no file .*own_rewards.py")
    assert command(*go_on, "--reward", f"{moved}:Rewards.double")[0] == 0  # another partial of the same function
    (moved.parent / "others.py").write_text("def same(t):\n    return t.rewards\n")
    refused(
        command(*go_on, "--reward", f"{moved.parent / 'others.py'}:same"),
        "its reward is 'own_rewards.weighted', this trainer's 'others.same'",
    )


@pytest.mark.parametrize(
    "source, message",
    [
        ("half", "reward is 'half'; expected module:name or file.py:name"),
        (":half", "reward is ':half'; expected module:name"),
        ("nowhere.py:half", "reward is 'nowhere.py:half': there is no file .*nowhere.py"),
        ("nowhere.rewards:half", "reward is 'nowhere.rewards:half': ModuleNotFoundError: No module named 'nowhere'"),
        ("own_rewards.py:hlf", "own_rewards.py has no 'hlf'; nearest: half"),
        ("own_rewards:Rewards.triple", "own_rewards has no 'Rewards.triple'"),
        ("own_rewards.py:wrong", "reward is a int; expected a function"),
        ("own_rewards:weighted", "weighted.* missing 1 required positional argument: 'weight'"),
    ],
)
def test_what_is_no_reward_function_is_refused_before_anything_is_written(source, message, reward, command, tmp_path):
    refused(command(*GRID, *TINY, "--reward", source, "--out", "run"), message)
    assert not (tmp_path / "run").exists()


def test_settings_hold_what_the_checkpoint_does_not(trained):
    settings = json.loads((trained / "settings.json").read_text())
    run = json.loads(
        json.dumps(dataclasses.asdict(RunConfig(episodes=5, best_episodes=100, checkpoint_seconds=0, digests=True)))
    )
    assert settings == {
        **{"format": 2, "game": "tag_gridworld", "device": "cpu", "graphs": True},
        **{
            "game_file": None,
            "reward": None,
            "curriculum": None,
            "opponents": OpponentOptions().settings(),
            "frozen_scripts": [],
            "run": run,
        },
    }


def test_a_folder_that_holds_a_run_is_left_as_it_is(trained, command):
    before = contents(trained)
    result = command(*GRID, *SHORT, "--no-graphs", "--out", str(trained))
    refused(
        result, f"{trained} already has a run; use another folder, or resume it: gpu-vecenv train --resume {trained}$"
    )
    assert contents(trained) == before


# Evaluate


def played(run, episodes, num_envs, players=None, *, greedy=False, seed=1, best=False):
    """What ``gpu_vecenv.train.evaluation`` makes of it."""
    policy = load_policy(run, best=best, device="cpu")
    env = gpu_vecenv.VecEnv(policy.game, num_envs, "cpu")
    return evaluation.evaluate(env, {**policy.policies, **(players or {})}, episodes, greedy=greedy, seed=seed)


def test_export_writes_torchscript_and_a_folder_for_the_hub(trained, command, tmp_path):
    out = tmp_path / "files"
    code, output, errors = command("export", str(trained), "--format", "torchscript", "--out", str(out))
    assert (code, errors) == (0, [])
    written = re.findall(r"wrote \S+/(\S+) \(1,000 observations, largest difference \d", output)
    assert sorted(written) == ["runner.pt", "tagger.pt"]
    obs = torch.rand(7, 21)
    expected = load_policy(trained, device="cpu")["tagger"]
    assert torch.jit.load(out / "tagger.pt")(obs)[0].equal(expected.act(obs, greedy=True))
    code, output, errors = command("export", str(trained), "--format", "hub", "--out", str(out), "--best")
    assert (code, errors) == (0, [])
    card = (out / "README.md").read_text()
    evaluation = json.loads((trained / "evaluation.json").read_text())["all trained"]
    for role in ("tagger", "runner"):
        assert f'"name": "return_{role}", "value": {evaluation[f"return_{role}"]}' in card
    assert (out / "learning_curve.png").read_bytes() == (trained / "learning_curve.png").read_bytes()
    loaded, best = load_policy(out / "policy.safetensors", device="cpu"), load_policy(trained, best=True, device="cpu")
    assert loaded["tagger"].act(obs, greedy=True).equal(best["tagger"].act(obs, greedy=True))


def test_export_refuses_wrong_formats_and_missing_packages(trained, command, tmp_path, monkeypatch):
    refused(command("export", str(trained), "--format", "pickle"), "onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = command("export", str(trained), "--out", str(tmp_path / "files"))
    refused(result, r'ONNX files need .*onnxruntime: pip install "gpu_vecenv\[onnx\]"')
    assert not (tmp_path / "files").exists()


def test_evaluate_prints_json(trained, command):
    code, output, errors = command("evaluate", str(trained), "--json", "--device", "cpu", "--episodes", "20")
    assert (code, errors) == (0, [])
    said = json.loads(output)
    iteration = load_policy(trained, device="cpu").iteration
    assert iteration > 0
    wanted = {"game": "tag_gridworld", "run": str(trained), "iteration": iteration, "greedy": False}
    wanted |= {"best": False, "opponents": [], "seed": 1}
    wanted |= played(trained, 20, 20)
    assert said == wanted
    metrics = {"episodes", "episode_length", "terminated_fraction", "return_tagger", "return_runner"}
    metrics |= {"worst_return_tagger", "worst_return_runner"}
    assert set(said) == {"game", "run", "best", "iteration", "opponents", "greedy", "seed"} | metrics


def test_evaluate_prints_the_table_of_train(trained, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["--greedy", "--device", "cpu", "--episodes", "20", "--opponents", "runner=random"]
    code, output, errors = command("evaluate", str(trained), *options)
    assert (code, errors) == (0, [])
    metrics = played(trained, 20, 20, {"runner": None}, greedy=True)
    words = [
        f"tag_gridworld: 20 episodes, {metrics['distinct_episodes']} distinct episodes; policies of iteration "
        f"{load_policy(trained, device='cpu').iteration}; most likely actions; runner=random",
        "the runner was caught",
        "  tagger  tagger ",
        "    mean   worst ",
    ]
    words += [f"{metrics['terminated_fraction']:.1%}", f"{metrics['return_tagger']:.2f}", trained.name]
    assert [word for word in words if word not in output] == []


def test_evaluate_takes_one_checkpoint(trained, command):
    file = min((trained / "checkpoints").glob("iteration-*"))
    code, output, errors = command("evaluate", str(file), "--json", "--device", "cpu", "--episodes", "20")
    assert (code, errors) == (0, [])
    metrics = played(file, 20, 20)
    assert json.loads(output).items() >= metrics.items()


@pytest.mark.parametrize(("episodes", "num_envs"), [(1, 1000), (7, 3), (40, 40)])
def test_evaluate_plays_so_many_episodes(episodes, num_envs, trained, command):
    options = ["--episodes", str(episodes), "--num-envs", str(num_envs), "--seed", "6"]
    code, output, _ = command("evaluate", str(trained), "--json", "--device", "cpu", *options)
    assert code == 0 and json.loads(output)["episodes"] == episodes
    assert json.loads(output).items() >= played(trained, episodes, min(num_envs, episodes), seed=6).items()


def test_evaluate_greedy(trained, command):
    options = ["evaluate", str(trained), "--json", "--device", "cpu", "--episodes", "30"]
    drawn, greedy = (json.loads(command(*options, *more)[1]) for more in ([], ["--greedy"]))
    assert greedy.pop("greedy") and not drawn.pop("greedy")
    assert greedy != drawn
    assert greedy.items() >= played(trained, 30, 30, greedy=True).items()


def test_evaluate_best_checkpoint(trained, command, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.copy(min((run / "checkpoints").glob("iteration-*")), run / "checkpoints" / "best.safetensors")
    options = ["evaluate", "run", "--json", "--device", "cpu", "--episodes", "30"]
    last, best = (json.loads(command(*options, *more)[1]) for more in ([], ["--best"]))
    assert (last["best"], best["best"], best["opponents"], best["seed"]) == (False, True, [], 1)
    assert last["return_tagger"] != best["return_tagger"]
    assert best.items() >= played(run, 30, 30, best=True).items()
    file = "runner=run/checkpoints/best.safetensors"
    found = json.loads(command(*options, "--best", "--opponents", file)[1])
    assert found == best | {"opponents": [file]}  # a file is a checkpoint already
    (run / "checkpoints" / "best.safetensors").unlink()
    refused(command(*options, "--best"), "run has no best checkpoint, as it made no evaluations: leave out best")


def test_others_may_play_a_role(trained, command, tmp_path):
    assert command(*GRID, *SHORT, "--seed", "8", "--out", "other")[0] == 0
    options = ["evaluate", str(trained), "--json", "--device", "cpu", "--episodes", "30"]
    other = load_policy(tmp_path / "other", device="cpu")
    for given, players in (
        (["runner=random"], {"runner": None}),
        (["runner=other"], {"runner": other["runner"]}),
        (["runner=random", "tagger=other"], {"runner": None, "tagger": other["tagger"]}),
        (["runner=still"], {"runner": "still"}),
        ([f"runner={trained}"], {}),
    ):
        code, output, errors = command(*options, "--opponents", *given)
        note = [
            f"gpu-vecenv: no policy of {trained} plays: --opponents runner=random tagger=other replaces those of all "
            "agents; to replace some of them name a role or an agent, such as runner=random"
        ]
        assert (code, errors) == (0, note * (len(given) > 1)), given
        assert json.loads(output).items() >= played(trained, 30, 30, players).items(), given


@pytest.mark.parametrize("game", ["tag_gridworld", "connect_four"])
def test_evaluate_prints_the_returns_of_agents_whose_role_is_played_by_several(game, trained, command):
    """In a zero-sum game of one role they stand in place of those of the role, whose mean is always 0."""
    run, agents = str(trained), ["tagger_0", "tagger_1"]
    if game == "connect_four":
        run, agents = "four", ["player_0", "player_1"]
        assert command("train", game, *SHORT, "--best-episodes", "0", "--out", run)[0] == 0
    options = ["evaluate", run, "--device", "cpu", "--episodes", "20", "--opponents", f"{agents[1]}=random"]
    code, output, errors = command(*options)
    assert (code, errors) == (0, [])
    metrics = json.loads(command(*options, "--json")[1])
    means, worst = ([f"{metrics[f'{start}_{name}']:.2f}" for name in agents] for start in ("return", "worst_return"))
    assert len(set(means)) == 2
    if game == "connect_four":
        cells = [cell for pair in zip(means, worst, strict=True) for cell in pair]
        assert "player_0" in output and output.split()[-4:] == cells and " player " not in output
    else:
        for name, *cells in zip(agents, means, worst, strict=True):
            assert re.search(rf"^{name} +{' +'.join(map(re.escape, cells))}$", output, re.M), output


def test_a_script_may_play_a_role(trained, command, tmp_path):
    lines = ["import torch", "def still(game):", "    return lambda obs: torch.full(obs.shape[:2], game.noop).int()"]
    (tmp_path / "scripts_of_this_test.py").write_text("\n".join(lines))
    options = ["evaluate", str(trained), "--json", "--device", "cpu", "--episodes", "30"]
    code, output, errors = command(*options, "--opponents", "runner=scripts_of_this_test.py:still")
    assert (code, errors) == (0, [])
    expected = played(trained, 30, 30, {"runner": lambda obs: torch.zeros(obs.shape[:2], dtype=torch.int32)})
    assert json.loads(output).items() >= expected.items() != played(trained, 30, 30, {}).items()
    several = ["tagger_0+tagger_1=scripts_of_this_test.py:still", "runner=random"]
    first, second = (json.loads(command(*options, "--opponents", *given)[1]) for given in (several, several[::-1]))
    assert first | {"opponents": several[::-1]} == second


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hunter=random"], "unknown role or agent 'hunter' in opponents; nearest: runner"),
        (["runner"], "opponents has 'runner': there is no file or folder runner; expected random, still, RUN, or for"),
        (["=random"], "opponents has '=random'; expected random, still, RUN, or for a role alone ROLE=random"),
        (["runner="], "opponents has 'runner='; expected random"),
        (["s.py:east"], "opponents has the script 's.py:east'; expected the role that it plays: ROLE=s.py:east"),
        (["runner=random", "runner=still"], "opponents is runner=random runner=still, which names runner_0 twice"),
        (["random", "runner=still"], "names runner_0 twice; expected each role once, such as runner=random"),
        (["runner=nowhere"], "opponents has 'runner=nowhere': there is no file or folder nowhere; expected random"),
    ],
)
def test_opponents_that_there_are_not(given, message, trained, command, tmp_path):
    options = ["--device", "cpu", "--episodes", "2", "--out", "result.json"]
    refused(command("evaluate", str(trained), *options, "--opponents", *given), message)
    assert os.listdir(tmp_path) == []


def test_evaluate_writes_what_it_prints(trained, command, tmp_path):
    options = ["--json", "--device", "cpu", "--episodes", "3", "--out", "result.json"]
    code, output, errors = command("evaluate", str(trained), *options)
    assert (code, errors) == (0, [])
    assert (tmp_path / "result.json").read_text() == output


@pytest.mark.slow
def test_evaluate_finds_a_game_of_ones_own_in_its_file(own, command, tmp_path):
    assert command("train", "acorn.py", *SHORT, "--max-steps", "9", "--out", "run")[0] == 0
    options = ["evaluate", "run", "--json", "--episodes", "3", "--device", "cpu"]
    done = in_a_process(*options, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["game"] == "acorn"
    (tmp_path / "run" / "settings.json").unlink()  # as of a run that Python began, which names no file
    forget_acorn()
    code, output, (line,) = command(*options)
    assert (code, output) == (2, "") and "'acorn'" in line and "--game" in line
    assert command(*options, "--game", "acorn.py")[0] == 0


BESIDE_A_GAME = {  # the arguments where a run of tag_gridworld, or replays of it, are in a folder, and the game's place
    "evaluate": "evaluate run --episodes 2 --device cpu --game {}",
    "exploit": "exploit run --total-steps 16 --episodes 2 --device cpu --game {}",
    "crossplay": "crossplay tagger=run random --episodes 2 --device cpu --game {}",
    "export": "export run --format torchscript --game {}",
    "replay record": "replay record run --device cpu --out more --game {}",
    "replay play": "replay play replays --device cpu --game {}",
    "replay html": "replay html replays --device cpu --game {}",
    "train --resume": "train {} --resume run",
}


@pytest.mark.parametrize("what", BESIDE_A_GAME)
def test_a_game_beside_a_run_of_another_one_is_refused(what, trained, own, command, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    assert command("replay", "record", "run", "--device", "cpu", "--out", "replays")[0] == 0
    before = contents(tmp_path)
    message = r"^.* is of tag_gridworld, and .*acorn.py,? is acorn; expected the file that declares tag_gridworld"
    refused(command(*BESIDE_A_GAME[what].format("acorn.py").split()), message)
    assert contents(tmp_path) == before


def test_a_game_beside_a_run_of_another_one_that_is_not_known_is_refused(own, command):
    assert command("train", "acorn.py", *SHORT, "--max-steps", "9", "--out", "run")[0] == 0
    forget_acorn()
    refused(
        command("evaluate", "run", "--episodes", "2", "--device", "cpu", "--game", "cartpole"),
        "run is of acorn, and --game cartpole is cartpole; expected the file that declares acorn",
    )


# Plot


def words(picture):
    """The texts of an SVG, which Matplotlib notes beside the shapes of their letters."""
    return set(re.findall("<!-- (.*?) -->", picture.read_text()))


@pytest.mark.usefixtures("pictures")
def test_plot_draws_a_run(trained, command, tmp_path):
    code, output, errors = command("plot", str(trained))
    assert (code, output, errors) == (0, "drew curves.png\n", [])
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture.rstrip().endswith(b"IEND\xaeB`\x82")
    assert os.listdir(tmp_path) == ["curves.png"]


@pytest.mark.usefixtures("pictures")
def test_plot_draws_several_runs_as_svg(trained, elsewhere, command, tmp_path):
    options = "--out deep/curves.svg --metrics episode_length return_runner --x seconds --smooth 3".split()
    code, output, errors = command("plot", str(trained), str(elsewhere / "continuous"), *options)
    assert (code, output, errors) == (0, "drew deep/curves.svg\n", [])
    picture = tmp_path / "deep" / "curves.svg"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    labels = {"grid, tag_gridworld", "continuous, tag_continuous"}
    assert labels | {"episode length", "return, runner", "training time (seconds)"} <= words(picture)
    assert "return, tagger" not in words(picture)
    assert command("plot", str(trained), "--out", "one.svg")[0] == 0
    assert {"grid", "return, tagger", "env-steps (all environments)"} <= words(tmp_path / "one.svg")
    assert not any("continuous" in word for word in words(tmp_path / "one.svg"))


@pytest.mark.usefixtures("pictures")
def test_plot_smooths_over_the_given_window(trained, command, tmp_path):
    for smooth in ("1", "3"):
        assert command("plot", str(trained), "--smooth", smooth, "--out", f"{smooth}.png")[0] == 0
    assert (tmp_path / "1.png").read_bytes() != (tmp_path / "3.png").read_bytes()


@pytest.mark.usefixtures("pictures")
def test_plot_needs_metrics_of_every_run(trained, command, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(command("plot", str(trained), "empty"), "no .*empty/metrics.csv; expected a run folder")
    refused(command("plot", str(trained), "--metrics", "return_taggr"), "'return_taggr'; nearest: return_tagger")
    assert os.listdir(tmp_path) == ["empty"]


def test_a_game_that_names_a_value_like_an_option_is_refused_in_one_line(command, tmp_path):
    assert command("new", "acorn")[0] == 0
    declaration = tmp_path / "acorn.py"
    text = declaration.read_text()
    first = next(line for line in text.splitlines() if "param(" in line and ": int" in line)
    declaration.write_text(text.replace(first, f"{first}\n    gamma: float = 0.5"))
    code, output, errors = command("train", "acorn.py", "--num-envs", "4")
    assert (code, output) == (2, "") and "gamma has the name of an option of PPOConfig; rename it" in errors[0]


def test_tune_has_the_options_of_the_game(command):
    tune = ("tune", "tag_gridworld", "--num-envs", "4", "--device", "cpu")
    refused(command(*tune, "--grid", "0"), "grid")
    refused(command(*tune, "--grid", "5"), "the device is cpu")
    refused(command(*tune, "--num-runners", "5"), "num-runners")  # of another game


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(command, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    for _ in range(2):
        assert command(*GRID, *TINY, "--total-steps", "16", "--episodes", "1")[0] == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["tag_gridworld-20260101-000000", "tag_gridworld-20260101-000000-2"]
