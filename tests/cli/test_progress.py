"""Progress of long commands: a bar in a terminal; elsewhere plain lines, for log files."""

import io
import json
import re

import pytest
from rich.console import Console
from support.warm_process import run_python

from gpu_vecenv.bench import command as bench_command
from gpu_vecenv.bench import games as bench_games
from gpu_vecenv.bench import interfaces as bench_interfaces
from gpu_vecenv.bench import training as bench_training
from gpu_vecenv.cli.main import main
from gpu_vecenv.engine import timing
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.progress import ProgressDisplay, duration, part

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu".split()
GRID = ["train", "tag_gridworld", *"--max-steps 11 --grid 4 --total-steps 48 --episodes 2".split(), *TINY]
EVERY_LINE = {"GPU_VECENV_PROGRESS_SECONDS": "0", "COLUMNS": "60"}  # lines are longer than the console is wide
LINE = re.compile(r"(\w+): (\d+)%(?:, (?:about \d+ s left|done in \d+ s))?  (.+)")


def shown(reports, *, interval=30.0, terminal=False, show_end=False):
    """What is printed of reports (clock time, fraction) of a task that starts at time 0."""
    now, file = [0.0], io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    options = {"interval": interval, "show_end": show_end, "clock": lambda: now[0]}
    with ProgressDisplay("check", console, **options) as on_progress:
        for time, fraction in reports:
            now[0] = time
            on_progress(fraction, f"K{time:02.0f} [bold]seeds")
    return file.getvalue()


def steps(seconds, parts):
    """Reports at the start of each of these parts, and at the end."""
    return [(seconds * k / parts, k / parts) for k in range(parts + 1)]


def test_a_long_task_says_how_long_it_will_take_and_then_a_line_in_each_interval():
    lines = shown(steps(200, 20), interval=40).splitlines()
    assert lines[0] == "check: 10%, about 3 min left  K20 [bold]seeds"  # the third report: 180 s
    assert [line.split()[1] for line in lines] == ["10%,", "30%,", "50%,", "70%,", "90%,", "100%,"]
    assert lines[1] == "check: 30%, about 2 min left  K60 [bold]seeds"  # 140 s
    assert lines[3] == "check: 70%, about 60 s left  K140 [bold]seeds"
    assert lines[-1] == "check: 100%, done in 3 min  K200 [bold]seeds"


def test_a_task_that_ends_within_an_interval_prints_nothing():
    assert shown(steps(29, 20)) == ""
    assert shown(steps(29, 20), show_end=True) == "check: 100%, done in 29 s  K29 [bold]seeds\n"


def test_a_task_whose_parts_take_long_prints_one_line_for_each():
    lines = shown([(40, 0.25), (80, 0.5), (120, 0.75), (160, 1.0)]).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "check: 25%",
        "check: 50%",
        "check: 75%, about 40 s left",
        "check: 100%, done in 3 min",
    ]


def test_the_estimate_leaves_out_the_time_before_the_first_report_and_what_a_resumed_run_had_done():
    """The first iteration compiles and captures; the iterations before a resume took none of this process's time."""
    assert "70%, about 30 s left" in shown([(1000, 0.5), (1010, 0.6), (1020, 0.7)], interval=0)


def test_interval_0_prints_every_report():
    assert len(shown(steps(2, 7), interval=0).splitlines()) == 8


def test_a_terminal_gets_a_bar_with_the_last_state_and_no_lines():
    text = shown(steps(200, 20), terminal=True)
    assert "check: 100%, done in 3 min" in text and "━" in text
    assert not re.search(r"^check", text, re.MULTILINE)


@pytest.mark.parametrize(
    "seconds, words",
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5340, "89 min"), (12000, "3 h 20 min")],
)
def test_durations_are_words(seconds, words):
    assert duration(seconds) == words


def test_parts_of_a_task_fill_its_whole_range():
    reports = []
    for index in range(2):
        inner = part(lambda *report: reports.append(report), index, 2, "ab"[index])
        for k in range(2):
            part(inner, k, 2)(0.5, "x")
    assert reports == [(0.125, "a: x"), (0.375, "a: x"), (0.625, "b: x"), (0.875, "b: x")]


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_the_environment_variable_is_a_number_of_seconds(value, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GPU_VECENV_PROGRESS_SECONDS", value)
    with pytest.raises(ConfigError, match=f"GPU_VECENV_PROGRESS_SECONDS is '{value}'; expected the seconds"):
        ProgressDisplay("check")


def reports(text, label):
    """The texts of each line of progress with this label; there must be such lines, whose percents grow to 100."""
    found = [match for match in map(LINE.fullmatch, text.splitlines()) if match and match[1] == label]
    percents = [int(match[2]) for match in found]
    assert percents == sorted(percents) and percents[-1:] == [100], text
    return [match[3] for match in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three iterations, in a process that writes to pipes and prints every line; its output."""
    folder = tmp_path_factory.mktemp("progress")
    done = run_python("-m", "gpu_vecenv.cli", *GRID, "--out", "run", folder=folder, variables=EVERY_LINE)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "run", done.stdout


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a command line in an empty folder that prints every line: its output and its errors."""
    monkeypatch.chdir(tmp_path)
    for name, value in EVERY_LINE.items():
        monkeypatch.setenv(name, value)

    def call(*arguments):
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr()

    return call


def test_a_short_training_shows_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GPU_VECENV_PROGRESS_SECONDS", raising=False)
    assert main([*GRID, "--best-episodes", "0", "--out", str(tmp_path / "run")]) == 0
    (line,) = re.findall("^train: .*$", capsys.readouterr().out, re.MULTILINE)
    assert re.match(r"train: 100%, done in \d+ s  iteration 3 of 3 ", line)


def test_train_shows_its_iterations_and_then_its_evaluations(trained):
    folder, output = trained
    iterations = reports(output, "train")
    assert iterations.pop() == "evaluating this checkpoint: 6 x 100 episodes"
    assert [text.split("  ")[0] for text in iterations] == [f"iteration {k} of 3" for k in (1, 2, 3)]
    evaluations = reports(output, "evaluate")
    assert evaluations[0].startswith("all random: episodes 1 to 2 of 2: step 0, 0 of 2 episodes ended")
    assert list(dict.fromkeys(text.split(":")[0] for text in evaluations)) == list(
        json.loads((folder / "evaluation.json").read_text())
    )


BENCHMARKS = {
    "--sweep environments --game cartpole --num-envs 4": 3,
    "--game cartpole --num-envs 2 --table": 1,
    "": 2,
    "--training --precision float32 bfloat16": 4,
    "--training --game cartpole --num-envs 4 --num-steps 4 --precision float32 bfloat16": 2,
    "--interface gymnasium batched": 2,
    "--baseline gymnasium --num-envs 2": 1,
}


@pytest.mark.parametrize("options", BENCHMARKS)
def test_bench_shows_each_row_beside_its_output(options, command, monkeypatch):
    """On the CPU, where every measurement is one short run of few sizes."""
    for module, name, value in (
        (timing, "NUM_RUNS", 1),
        (timing, "MIN_SECONDS", 0),
        (bench_training, "RUNS", 1),
        (bench_training, "MAX_SECONDS", 0),
        (bench_training, "CONFIGURATIONS", (("cartpole", 4, 4, 8),)),
        (bench_command, "SUITES", {"cpu": (("cartpole", 2, {}), ("cartpole", 3, {}))}),
        (bench_games, "COPY_BYTES", {"cpu": 1 << 10}),
        *(
            (bench_interfaces.INTERFACES, name, ((("cartpole", 2, {}),), bench_interfaces.INTERFACES[name][1]))
            for name in ("gymnasium", "batched")
        ),
    ):
        assert name in (module if isinstance(module, dict) else vars(module))
        (monkeypatch.setitem if isinstance(module, dict) else monkeypatch.setattr)(module, name, value)
    output, errors = command("bench", *options.split(), "--device", "cpu")
    count = BENCHMARKS[options]
    assert reports(errors, "bench") == [*(f"row {k} of {count}" for k in range(1, count + 1)), f"{count} rows"]
    if "--table" not in options:
        rows = [json.loads(line) for line in output.splitlines()]
        assert len(rows) == count + 1, "and what they have in common"


def test_evaluate_shows_each_round_beside_its_output(trained, command):
    output, errors = command("evaluate", trained[0], "--episodes", 5, "--num-envs", 2, "--json", "--device", "cpu")
    assert json.loads(output)["episodes"] == 5
    rounds = dict.fromkeys(text.split(":")[0] for text in reports(errors, "evaluate"))
    assert list(rounds) == ["episodes 1 to 2 of 5", "episodes 3 to 4 of 5", "episodes 5 to 5 of 5"]


def test_record_shows_the_episodes_that_it_plays_and_verifies(trained, command):
    output, errors = command("replay", "record", trained[0], "--episodes", 2, "--device", "cpu")
    assert output.startswith("wrote ")
    texts = reports(errors, "record")
    assert texts[0] == "play: step 0, 0 of 2 episodes ended"
    assert texts[-3:] == ["verify episode 1 of 2", "verify episode 2 of 2", "2 of 2 episodes"]
    for verb in ("play", "html"):
        output, errors = command("replay", verb, "replays", "--device", "cpu")
        first, second, end = reports(errors, verb)
        assert first.endswith("-0.replay") and second.endswith("-1.replay") and end == "2 replays" and output
