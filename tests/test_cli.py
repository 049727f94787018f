import csv
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch

import gpu_vecenv
from gpu_vecenv.checkpoint import load_checkpoint
from gpu_vecenv.cli import COMMANDS, RunConfig, main
from gpu_vecenv.ppo import PPOConfig
from gpu_vecenv.prologue import prologue
from gpu_vecenv.registry import GAMES, configure, gymnasium_id

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu".split()
GRID = "train tag_gridworld --max-steps 11".split()


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
    package = Path(gpu_vecenv.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "gpu_vecenv.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), **variables},
    )


def test_help_names_every_command(command):
    for arguments in (["--help"], ["-h"], ["help"]):
        code, output, errors = command(*arguments)
        assert (code, errors) == (0, [])
        assert all(re.search(rf"^  {name} ", output, re.MULTILINE) for name in COMMANDS)


def test_without_a_command_help_is_shown(tmp_path):
    done = in_a_process(folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "usage: gpu-vecenv COMMAND" in done.stdout


def test_version_is_the_packages(command):
    assert command("--version") == (0, f"{gpu_vecenv.__version__}\n", [])


def test_list_shows_every_game_with_roles_and_purpose(command):
    code, output, errors = command("list")
    assert (code, errors) == (0, [])
    for name, game in GAMES.items():
        assert re.search(rf"\b{name}\b", output) and game.__doc__.splitlines()[0][:40] in output
        assert all(f"{count} {role}" in output for role, count in game().roles.items())


@pytest.mark.parametrize("name", sorted(GAMES))
def test_show_prints_the_generated_text(name, command):
    assert command("show", name) == (0, prologue(configure(name)), [])


def test_show_takes_the_games_options(command):
    config = {"grid": 7, "num_taggers": 2, "full_observation": False, "tagger_reward": 2.5}
    options = "--grid 7 --num-taggers 2 --no-full-observation --tagger-reward 2.5".split()
    code, output, errors = command("show", "tag_gridworld", *options)
    assert (code, output, errors) == (0, prologue(configure("tag_gridworld", **config)), [])
    assert "constexpr int GRID = 7;" in output.splitlines()
    both = [command("show", "tag_continuous", "--num-neighbors", value)[1] for value in ("all", "3")]
    assert both == [prologue(configure("tag_continuous", num_neighbors=value)) for value in ("all", 3)]


def test_doctor_says_what_is_there(command):
    code, output, errors = command("doctor")
    assert code in (0, 1) and errors == []
    assert all(f"\n{part}" in f"\n{output}" for part in ("Python", "torch", "GPU driver", "C++ compiler", "What to do"))
    assert torch.__version__ in output


def test_the_help_of_bench_names_its_options(command):
    code, output, _ = command("bench", "--help")
    assert code == 0
    assert all(f"--{name} " in output for name in ("game", "num-envs", "config", "device", "driver", "team", "json"))


@pytest.mark.parametrize("name", sorted(GAMES))
@pytest.mark.parametrize("verb", ["show", "train"])
def test_help_mentions_every_field(verb, name, command):
    code, output, errors = command(verb, name, "--help")
    assert (code, errors) == (0, [])
    kinds = [GAMES[name]] if verb == "show" else [GAMES[name], PPOConfig, RunConfig]
    mentioned = set(re.findall(r"--[a-z][a-z0-9-]*", output))
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        assert f"--{field.name.replace('_', '-')}" in mentioned
    assert f"gpu-vecenv {verb} {name}" in output
    comments = re.findall(r"^    \w+: .*?  # (.{12})", Path(inspect.getfile(GAMES[name])).read_text(), re.MULTILINE)
    assert comments
    assert all(words in output for words in comments + ["per epoch", "of each evaluation"] * (verb == "train"))


def events(folder):
    return [path for path in folder.rglob("events.out.tfevents.*") if path.stat().st_size > 100]


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("tag_gridworld", "--max-steps 11 --num-taggers 4"),
        ("tag_continuous", "--num-taggers 3 --num-runners 4 --side 3 --tagging-distance 0.2 --max-steps 13"),
    ],
)
def test_train_leaves_curve_checkpoint_figures_and_evaluation(game, options, command, tmp_path):
    options = f"{options} --total-steps 144 --episodes 5 --out here/run --seed 3".split()
    code, output, errors = command("train", game, *TINY, *options)
    assert (code, errors) == (0, [])
    folder = tmp_path / "here" / "run"
    assert os.listdir(tmp_path) == ["here"]
    for name in ("policy.safetensors", "evaluation.json", "learning_curve.png", "metrics.csv"):
        assert f"here/run/{name}" in output

    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == list(range(1, 10))
    assert [int(row["env_steps"]) for row in rows] == list(range(16, 145, 16))
    numbers = [float(value) for row in rows for name, value in row.items() if name != "explained_variance"]
    assert all(abs(number) < float("inf") for number in numbers)
    assert sum(float(row["episodes"]) for row in rows) >= 2 * 4

    _, manifest = load_checkpoint(folder / "policy.safetensors")
    assert (manifest["game"], manifest["seed"], manifest["iteration"], manifest["num_envs"]) == (game, 3, 9, 4)
    assert manifest["ppo_config"]["hidden_sizes"] == [8] and manifest["game_config"]["num_taggers"] in (3, 4)

    results = json.loads((folder / "evaluation.json").read_text())
    assert list(results) == ["all random", "tagger trained", "runner trained", "all trained"]
    assert all(name in output for name in results)
    for figures in results.values():
        assert figures["episodes"] == 5 and 0 <= figures["terminated_share"] <= 1
        assert 1 <= figures["episode_length"] <= 13
        assert {"return_tagger", "return_runner"} < set(figures)

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
    assert (folder / "policy.safetensors").is_file()


def test_the_automatic_number_of_replicas_is_used_and_told(command, tmp_path):
    options = "--num-envs auto --num-steps 2 --total-steps 1 --episodes 1 --num-epochs 1 --device cpu --out run".split()
    code, output, errors = command(*GRID, *options)
    assert (code, errors) == (0, [])
    num_envs = load_checkpoint(tmp_path / "run" / "policy.safetensors")[1]["num_envs"]
    assert 1 <= num_envs <= 512 and f"{num_envs} replicas x 5 agents on cpu" in output


@pytest.mark.parametrize("seed", [2**31, 2**64 - 1])
def test_every_seed_of_64_bits_is_taken(seed, command, tmp_path):
    options = ["--total-steps", "16", "--episodes", "1", "--out", "run", "--seed", str(seed)]
    code, _, errors = command(*GRID, *TINY, *options)
    assert (code, errors) == (0, [])
    assert load_checkpoint(tmp_path / "run" / "policy.safetensors")[1]["seed"] == seed


def test_the_same_seed_trains_the_same_policy_in_another_process(command, tmp_path):
    options = [*TINY, "--total-steps", "48", "--episodes", "2", "--seed", "9"]
    assert command(*GRID, *options, "--out", "one")[0] == 0
    done = in_a_process(*GRID, *options, "--out", "two", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (weights, manifest), (again, manifest_again) = (
        load_checkpoint(tmp_path / name / "policy.safetensors") for name in ("one", "two")
    )
    assert manifest == manifest_again and weights.keys() == again.keys()
    assert all(weights[name].equal(again[name]) for name in weights)


REFUSED = {
    "unknown command": ("trian tag_gridworld", "unknown command 'trian'; nearest: train"),
    "nothing like a command": ("xyzzy", "unknown command 'xyzzy'; known: bench, check, doctor, list, new, show, train"),
    "list with arguments": ("list all", "list takes no arguments; got all"),
    "doctor with arguments": ("doctor all", "all"),
    "show without a game": (
        "show",
        "show needs a game's name first: .*tag_continuous, tag_gridworld; see gpu-vecenv show GAME --help",
    ),
    "train without a game": ("train --seed 3", "train needs a game's name first: .*tag_continuous, tag_gridworld; see"),
    "check without a game": ("check --steps 30", "check needs a game's name first: .*tag_gridworld; see"),
    "new without a name": ("new", "new needs a name first, gpu-vecenv new my_game; see gpu-vecenv new --help"),
    "new with an option for a name": ("new --folder here", "new needs a name first"),
    "a name that is no identifier": ("new MyGame", r"'MyGame' is no name of a game; expected an identifier \[a-z\]"),
    "a name that is a keyword": ("new class --folder here", "'class' is a word that Python"),
    "a name that is taken": ("new tag_gridworld", "'tag_gridworld' is a game already: TagGridworld"),
    "an unknown option to new": ("new my_game --foldr here", "--foldr.*nearest: --folder"),
    "a path to nowhere to show": ("show ./nowhere.py", 'no file nowhere.py; "gpu-vecenv new my_game" writes one'),
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
    "too few ticks to check": ("check tag_gridworld --steps 9", r"steps is 9; expected a value in \[10, inf\]"),
    "too few replicas to check": ("check tag_gridworld --num-envs 1", r"num_envs is 1; expected a value in \[2"),
    "an unknown device to check": ("check tag_gridworld --device tpu", "device is 'tpu'"),
    "a game's field to check": ("check tag_gridworld --grid 0", r"grid is 0; expected a value in \[1, 32767\]"),
    "unknown game to show": ("show tag_gridwrld", "no game is called 'tag_gridwrld'; nearest: tag_gridworld"),
    "unknown game to train": ("train tag_continous", "no game is called 'tag_continous'; nearest: tag_continuous"),
    "unknown game to measure": (
        "bench --game tag_gird --device cpu",
        "no game is called 'tag_gird'; nearest: tag_grid",
    ),
    "unknown option to show": ("show tag_gridworld --gird 3", "--gird.*nearest: --grid"),
    "unknown option to train": ("train tag_gridworld --lerning-rate 3", "--lerning-rate.*nearest: --learning-rate"),
    "an option of the other game": ("train tag_gridworld --num-runners 3", "--num-runners"),
    "a field below its range": ("show tag_gridworld --num-taggers 0", r"num_taggers is 0; expected a value in \[1"),
    "a field above its range": ("train tag_gridworld --grid 40000", r"grid is 40000; expected .* \[1, 32767\]"),
    "a field that is no number": ("train tag_gridworld --grid seven", "--grid.*'seven'"),
    "a fraction for an integer": ("train tag_gridworld --grid 7.5", "--grid.*'7.5'"),
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
    "no replicas": ("train tag_gridworld --num-envs 0", "num_envs is 0; expected an int >= 1"),
    "fewer than no replicas": ("train tag_gridworld --num-envs -1", "num_envs is -1; expected an int >= 1"),
    "replicas in words": ("train tag_gridworld --num-envs many", "--num-envs.*'many'"),
    "too many replicas": (
        "train tag_continuous --num-envs 2000000000 --device cpu",
        r"2,000,000,000 replicas .* need [\d,]+ bytes .* [\d,]+ bytes are free .* at most num_envs = [\d,]+ fit",
    ),
    "a rollout that is too long": (
        "train tag_gridworld --num-envs 4 --num-steps 1000000000 --device cpu",
        r"needs about [\d,]+ bytes, [\d,]+ are free on cpu; at most num_envs = [\d,]+ fit",
    ),
    "automatic size that fits nowhere": (
        "train tag_gridworld --num-steps 2000000000 --device cpu",
        r"one replica needs about [\d,]+ bytes; [\d,]+ are free on cpu",
    ),
    "minibatches that do not divide": (
        "train tag_gridworld --num-envs 4 --num-steps 8 --num-minibatches 7 --device cpu",
        "num_minibatches is 7; .* = 8 x 4 x 5 = 160",
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
        "train tag_gridworld --num-envs 4 --num-steps 4 --total-steps 16 --episodes 0 --device cpu",
        "episodes is 0",
    ),
    "a configuration that is no JSON": ("bench --game tag_gridworld --device cpu --config {", "line 1 column 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(what, command, tmp_path):
    arguments, message = REFUSED[what]
    out = ["--out", "run"] if arguments.startswith("train tag") else []
    code, _, errors = command(*arguments.split(), *out)
    assert code == 2
    assert len(errors) == 1 and errors[0].startswith("gpu-vecenv: error: "), errors
    assert re.search(message, errors[0]), errors
    assert "---" not in errors[0]  # words, not pieces of a frame
    assert os.listdir(tmp_path) == []  # refused before anything was done


@pytest.fixture
def own(command, tmp_path):
    """A new game called acorn, whose module is forgotten afterwards."""
    games, modules = dict(GAMES), set(sys.modules)
    assert command("new", "acorn")[0] == 0
    yield tmp_path / "acorn.py"
    GAMES.clear()
    GAMES.update(games)
    gymnasium.registry.pop("gpu_vecenv/Acorn-v0", None)
    for name in {"acorn"} - modules:
        sys.modules.pop(name, None)


def test_new_writes_a_game_and_says_what_comes_next(command, tmp_path):
    code, output, errors = command("new", "acorn", "--folder", "my own/games")
    assert (code, errors) == (0, [])
    assert sorted(os.listdir(tmp_path / "my own" / "games")) == ["acorn.cu", "acorn.py", "test_acorn.py"]
    lines = [line.strip() for line in output.splitlines()]
    assert lines[1].startswith("edit my own/games/acorn.cu")
    assert lines[2] == "gpu-vecenv check 'my own/games/acorn.py'"
    assert lines[3].startswith("gpu-vecenv train 'my own/games/acorn.py'")


def test_new_overwrites_nothing(own, command, tmp_path):
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    own.unlink()
    code, output, errors = command("new", "acorn")
    assert (code, output) == (2, "")
    assert errors == ["gpu-vecenv: error: acorn.cu is there already; choose another name or --folder"]
    del before["acorn.py"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("spelling", ["acorn.py", "./acorn.py", "acorn.py:Acorn", "{}"])
def test_a_path_is_as_good_as_a_name(spelling, own, command):
    code, output, errors = command("show", spelling.format(own), "--length", "7")
    assert (code, errors) == (0, [])
    assert output.startswith("// Generated from Acorn(") and "constexpr int LENGTH = 7;" in output
    code, output, _ = command("train", spelling.format(own), "--help")
    assert code == 0 and "--num-sprinters" in output and f"gpu-vecenv train {spelling.format(own)}" in output


def test_train_and_bench_take_a_path(own, command, tmp_path):
    options = "--total-steps 16 --episodes 2 --out run --length 9".split()
    code, _, errors = command("train", "acorn.py", *TINY, *options)
    assert (code, errors) == (0, [])
    _, manifest = load_checkpoint(tmp_path / "run" / "policy.safetensors")
    assert manifest["game"] == "acorn" and manifest["game_config"]["length"] == 9
    code, output, errors = command("bench", "--game", "acorn.py", "--num-envs", "2", "--device", "cpu")
    assert (code, errors) == (0, [])
    assert json.loads(output.splitlines()[0])["game"] == "acorn"


def test_check_tells_that_a_game_keeps_its_promises(own, command):
    code, output, errors = command("check", "acorn.py", "--steps", "30", "--max-steps", "9", "--device", "cpu")
    assert (code, errors) == (0, [])
    for mode in ("same_step", "next_step", "disabled"):
        assert re.search(rf"acorn, {mode}: 1?\d passed, 0 failed", output), output
    assert all(f"{way} │ equal" in re.sub(" +", " ", output) for way in ("50 of 100 replicas", "ranges shuffled"))


WRONG_RULES = {
    "an episode that is a tick too long": (
        "io.time >= MAX_STEPS",
        "io.time > MAX_STEPS",
        "K10.*episodes end as declared",
    ),
    "an order of the lanes that matters": (
        "s.left[0] = NUM_BERRIES;",
        "s.left[0] = NUM_BERRIES;\n        FOR_AGENTS (i) s.berry[0] = i;",
        "ranges backwards.*replicas 0, 1, 2",
    ),
}


@pytest.mark.parametrize("what", WRONG_RULES)
def test_check_ends_with_1_where_a_promise_is_broken(what, own, command):
    right, wrong, message = WRONG_RULES[what]
    rules = own.with_suffix(".cu")
    assert right in rules.read_text()
    rules.write_text(rules.read_text().replace(right, wrong))
    code, output, errors = command("check", "acorn.py", "--steps", "30", "--max-steps", "9", "--device", "cpu")
    assert (code, errors) == (1, [])
    assert re.search(message, output), output


def test_check_takes_any_vector_environment_of_gymnasium(command):
    code, output, errors = command("check", "CartPole-v1", "--steps", "10")
    assert errors == []
    failed = int(re.search(r"(\d+) failed", output)[1])
    assert code == int(failed > 0) and "episodes end as declared" in output
    ours = ["check", gymnasium_id(GAMES["cartpole"]), "--steps", "10"]
    code, output, errors = command(*ours, "--config", '{"device": "cpu"}')
    assert (code, errors) == (0, []) and " 0 failed" in output
    code, output, errors = command(*ours, "--config", '{"device": "cpu", "validate": "async"}')
    assert (code, errors) == (1, []) and "bad actions are refused" in output and " 1 failed" in output


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


def test_a_gpu_that_is_not_there_gives_one_line(tmp_path):
    done = in_a_process("train", "tag_gridworld", "--device", "cuda", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-vecenv: error: device is 'cuda', but torch")
    assert "gpu-vecenv doctor" in line and 'device="cpu"' in line
    assert os.listdir(tmp_path) == []


def test_a_process_ends_with_the_exit_code_and_without_a_traceback(tmp_path):
    done = in_a_process("show", "tag_gridwrld", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu-vecenv: error: no game is called 'tag_gridwrld'; nearest: tag_gridworld.*\n", done.stderr)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_line_has_the_nearest_names_whatever_the_terminal_can_show(encoding, tmp_path):
    done = in_a_process("train", "tag_gridworld", "--gird", "3", folder=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--gird" in line and "nearest: --grid" in line and "---" not in line


def test_a_run_whose_loss_is_not_finite_gives_one_line(command):
    """Rewards of 1e38 square to infinity."""
    options = "--total-steps 16 --step-cost 1e38 --out run".split()
    code, _, errors = command(*GRID, *TINY, *options)
    assert code not in (0, None)
    assert len(errors) == 1 and re.search(r"error: iteration 1: losses .* are not finite", errors[0])
