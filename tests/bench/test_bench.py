"""``python -m gpu_vecenv.bench``: rows, tables, sweeps, comparisons and options."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.warm_process import run_python

import gpu_vecenv.adapters
from gpu_vecenv.bench import baselines as bench_baselines
from gpu_vecenv.bench import command as bench
from gpu_vecenv.bench import compare as bench_compare
from gpu_vecenv.bench import interfaces as bench_interfaces
from gpu_vecenv.bench import sweep as bench_sweep
from gpu_vecenv.bench import table as bench_table
from gpu_vecenv.bench import training as bench_training
from gpu_vecenv.engine import timing as measurement
from gpu_vecenv.engine.make import make
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import CapacityError, ConfigError

ROOT = Path(__file__).parents[2]
STAGES = ("step", "sampling", "sample_and_step")
TOP = {"gpu_vecenv", "commit", "device_source_sha256", "device", "processors", "torch", "cuda", "python"}
TOP |= {"copy_bytes_per_s", "rows"}
RATES = {"us", "us_quartiles", "env_steps_per_s", "agent_steps_per_s"}
STAGE = RATES | {"bytes", "gb_per_s", "share_of_copy_bandwidth"}
ROW = {"game", "num_envs", "num_agents", "config", "first_step_s", "bytes_per_agent_step", "env_bytes", "faults"}
ROW |= {f"{stage}_{figure}" for stage in STAGES for figure in STAGE}


def run_bench(folder, *arguments):
    """What one run printed and what it wrote."""
    done = run_python("-m", "gpu_vecenv.bench", "--device", "cpu", "--json", "rows.json", *arguments, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads((folder / "rows.json").read_text())


@pytest.fixture
def quick(monkeypatch):
    """``bench.run`` on the CPU in this process, with one short run per measurement."""
    for module, name, value in (
        (measurement, "NUM_RUNS", 1),
        (measurement, "MIN_SECONDS", 0),
        (bench_training, "RUNS", 1),
        (bench_training, "MAX_SECONDS", 0),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    return lambda **given: bench.run(bench.BenchConfig(device="cpu", **given))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    settings = ["--game", "tag_gridworld", "--num-envs", "64", "--config", '{"num_taggers": 6}']
    return run_bench(tmp_path_factory.mktemp("bench"), *settings)


def test_one_json_line_per_row_is_printed_and_the_same_is_written(measured):
    printed, written = measured
    row, rest = map(json.loads, printed.splitlines())
    assert [row] == written["rows"] and rest == {key: value for key, value in written.items() if key != "rows"}


def test_rows_name_game_device_and_versions(measured):
    _, written = measured
    (row,) = written["rows"]
    assert set(written) == TOP and set(row) == ROW
    assert (row["game"], row["num_envs"], row["num_agents"]) == ("tag_gridworld", 64, 7)
    assert row["config"] == {"num_taggers": 6} and row["faults"] == 0
    assert written["gpu_vecenv"] == gpu_vecenv.__version__ and written["torch"] == torch.__version__
    assert written["device"] and written["commit"] != ""
    assert written["python"] == ".".join(map(str, sys.version_info[:3]))


def test_every_rate_is_positive_and_follows_from_the_time(measured):
    _, written = measured
    (row,) = written["rows"]
    assert written["copy_bytes_per_s"] > 0 and row["first_step_s"] > 0
    for stage in STAGES:
        metrics = {name: row[f"{stage}_{name}"] for name in STAGE}
        lower, upper = metrics.pop("us_quartiles")
        assert 0 < lower <= metrics["us"] <= upper and all(number > 0 for number in metrics.values())
        # Rates are rounded to 1, the time to 0.01 us, the share to 0.0001: half of that either way.
        assert abs(metrics["agent_steps_per_s"] - 7 * metrics["env_steps_per_s"]) <= 0.5 + 7 * 0.5
        longest, shortest = (1e-6 * (metrics["us"] + sign * 0.005) for sign in (1, -1))
        assert 64 / longest - 0.5 <= metrics["env_steps_per_s"] <= 64 / shortest + 0.5
        shares = [metrics["bytes"] / seconds / written["copy_bytes_per_s"] for seconds in (longest, shortest)]
        assert shares[0] - 5.1e-5 <= metrics["share_of_copy_bandwidth"] <= shares[1] + 5.1e-5
        speeds = [metrics["bytes"] / seconds / 1e9 for seconds in (longest, shortest)]
        assert speeds[0] - 5.1e-5 <= metrics["gb_per_s"] <= speeds[1] + 5.1e-5


def test_the_bytes_of_a_step_are_those_of_state_and_outputs(measured):
    """tag_gridworld with 7 agents, counted by hand."""
    _, written = measured
    (row,) = written["rows"]
    agents = 7
    state = agents * 2 * 4  # cells: two int32
    engine = 2 * 4 + 8 + 4 + agents + 4 + agents * 8  # key, episode, time, active, fault, returns
    obs, reward, flags, action = (4 * agents + 1) * 4, 4, 4, 4
    expected = 64 * (2 * (state + engine) + agents * (obs + reward + flags + action))
    assert row["step_bytes"] == row["sample_and_step_bytes"] == expected
    assert row["bytes_per_agent_step"] == round(expected / 64 / agents, 2)
    clocks, logits, drawn = 2 * 4 + 8 + 4, 5 * 4, 2 * 4  # key, episode, time; five moves; action, log-probability
    assert row["sampling_bytes"] == 64 * (clocks + agents * (logits + drawn))


def test_games_with_continuous_actions_are_sampled_too(quick):
    (row,) = quick(game="pendulum", num_envs=3)["rows"]
    assert set(row) == ROW and row["faults"] == 0
    clocks, parameters, drawn = 2 * 4 + 8 + 4, 2 * 4, 3 * 4  # mean, log-std.; action, draw, log-probability
    assert row["sampling_bytes"] == 3 * (clocks + parameters + drawn)


def test_games_with_masks_are_played_by_them(quick):
    (row,) = quick(game="connect_four", num_envs=50)["rows"]
    assert set(row) == ROW and row["faults"] == 0


@pytest.mark.parametrize("game", ["tag_continuous", "pendulum"])
def test_a_rollout_has_its_own_stage(game, quick):
    (row,) = quick(game=game, num_envs=2, rollout=True, num_steps=3, hidden_sizes=(8, 4))["rows"]
    assert set(row) - ROW == {f"rollout_{figure}" for figure in (*RATES, "num_steps", "hidden_sizes")}
    assert (row["rollout_num_steps"], row["rollout_hidden_sizes"]) == (3, [8, 4])
    assert row["rollout_env_steps_per_s"] == pytest.approx(2e6 / row["rollout_us"], rel=0.01)  # of a rounded rate


def test_every_time_is_per_step(quick, monkeypatch):
    clock = itertools.count()  # each reading is 1 s later than the one before
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    (row,) = quick(game="cartpole", num_envs=2, rollout=True, num_steps=4, hidden_sizes=(8,))["rows"]
    assert [row[f"{stage}_us"] for stage in STAGES] == [2e6 / 20] * 3
    assert row["rollout_us"] == 2e6 / 4 and row["rollout_env_steps_per_s"] == 4


def test_every_time_has_the_median_and_the_quartiles_of_ten_runs(quick, monkeypatch):
    runs = [100, 1, 7, 3, 9, 5, 2, 8, 4, 6]  # seconds of one call
    readings = itertools.chain.from_iterable((0.0, 2.0, float(taken)) for taken in itertools.cycle(runs))
    monkeypatch.setattr(measurement, "NUM_RUNS", 10)
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    (row,) = quick(game="cartpole", num_envs=2)["rows"]
    for stage in STAGES:
        assert row[f"{stage}_us"] == 5.5e6 / 20
        assert row[f"{stage}_us_quartiles"] == [3.25e6 / 20, 7.75e6 / 20]
        assert row[f"{stage}_env_steps_per_s"] == round(2 * 20 / 5.5)


def test_results_are_of_ten_runs():
    assert measurement.NUM_RUNS == bench_training.RUNS == 10


def test_the_suite_of_each_device_has_games_that_exist():
    for suite in bench.SUITES.values():
        assert len({(game, num_envs, json.dumps(settings)) for game, num_envs, settings in suite}) == len(suite)
        for game, _, settings in suite:
            configure(game, **settings)


def test_a_rollout_is_by_default_as_the_games_preset_has_it(quick):
    (row,) = quick(game="simple_spread", num_envs=2, rollout=True)["rows"]
    preset = configure("simple_spread").preset
    assert (row["rollout_num_steps"], row["rollout_hidden_sizes"]) == (preset["num_steps"], [*preset["hidden_sizes"]])


def test_training_of_any_game_and_size_is_measured(quick):
    given = {"num_steps": 4, "hidden_sizes": (8, 4), "num_epochs": 2, "num_minibatches": 2}
    precisions = ("float32", "bfloat16")
    settings = '{"num_taggers": 2}'
    results = quick(training=True, game="tag_gridworld", num_envs=4, config=settings, precision=precisions, **given)
    assert results["processes"] == 1
    assert [row["precision"] for row in results["rows"]] == ["float32", "bfloat16"]
    for row in results["rows"]:
        assert row["iteration_ms_quartiles"] == [row["iteration_ms"]] * 2  # of one run
        assert (row["game"], row["num_envs"], row["num_agents"]) == ("tag_gridworld", 4, 3)
        assert (row["config"], row["num_steps"], row["units"]) == ({"num_taggers": 2}, 4, [8, 4])
        assert row["update"] == "2 epochs of 2 minibatches"
        assert row["agent_steps_per_s"] == pytest.approx(3 * row["env_steps_per_s"], abs=2)  # both are rounded to 1
        shares = [row[name] for name in bench_training.SHARES if name != "rollout_time_fraction"]
        assert all(share > 0 for share in shares) and sum(shares) <= 1.0002  # each is rounded to 0.0001


def test_training_by_default_is_as_the_games_preset_has_it(quick):
    (row,) = quick(training=True, game="simple_spread", num_envs=1, num_epochs=1, num_minibatches=1)["rows"]
    assert (row["num_steps"], row["units"], row["update"]) == (25, [128, 128], "one step on the whole batch")


def test_training_without_a_game_uses_warpdrives_configurations(quick, monkeypatch):
    monkeypatch.setattr(bench_training, "CONFIGURATIONS", (("cartpole", 4, 5, 8),))
    rows = quick(training=True)["rows"]
    assert [row["update"] for row in rows] == ["one step on the whole batch", "4 epochs of 4 minibatches"]
    assert [row["units"] for row in rows] == [8, 8] and [row["num_steps"] for row in rows] == [5, 5]


# ---------------------------------------------------------------------- tables

SMALL = {"game": "cartpole", "num_envs": 3}


def test_a_table_has_every_stage(quick, capsys, tmp_path):
    results = quick(**SMALL, rollout=True, table=True, json=tmp_path / "rows.json")
    printed = capsys.readouterr().out
    with pytest.raises(json.JSONDecodeError):
        json.loads(printed.splitlines()[0])
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert [line[:3] for line in cells] == [
        ["cartpole", "step", "3 x 1"],
        ["", "sampling", ""],
        ["", "sample_and_step", ""],
        ["", "rollout", ""],
    ]
    assert results["torch"] in printed and str(results["commit"]) in printed
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == results["rows"]


def test_a_narrow_terminal_gets_each_row_upright(quick, monkeypatch, capsys):
    """A heading and its values in each line, none of which is cut."""
    monkeypatch.setattr(bench_table, "console", lambda: Console(width=80))
    quick(**SMALL, table=True)
    output = capsys.readouterr().out.splitlines()
    lines = [line.rstrip() for line in output[: output.index(next(x for x in output if x.startswith("first step")))]]
    assert [re.split(" {2,}", line)[0] for line in lines] == list(bench_table.HEADINGS["games"][: len(lines)])
    assert re.split(" {2,}", lines[1]) == ["stage", "step", "sampling", "sample_and_step"]
    assert "…" not in "".join(output) and max(map(len, output)) <= 80


def test_a_terminal_gets_a_table_by_default(quick, monkeypatch):
    pty = pytest.importorskip("pty")  # not on Windows
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        quick(**SMALL)
    said = b""
    with contextlib.suppress(OSError):  # raised by Linux once the other end is closed
        while piece := os.read(ours, 1 << 16):
            said += piece
    os.close(ours)
    text = said.decode()
    assert "sampling" in text and "│" in text and '{"game"' not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (7.0, "7"), (98_000, "98 k"), (2_258_470_000, "2.26 G"), (999_700, "1,000 k"), (5.3e12, "5.3 T")],
)
def test_large_numbers_have_three_digits_and_a_prefix(number, text):
    assert bench_table.si_prefixed(number) == text


def test_every_kind_of_row_has_a_cell_for_each_heading(quick):
    through = {"interface": "sb3", "game": "g", "num_envs": 1, "interface_us": 1.0, "vec_env_step_us": 1.0}
    through |= {"launch_us": 1.0, "overhead_us": 0.0}
    (training,) = quick(training=True, game="cartpole", num_envs=4, num_steps=4)["rows"]
    against = {"baseline": "mpe2", "version": "1", "game": "g", "num_envs": 1, "num_agents": 1, "speedup": 2.0}
    against |= {"baseline_env_steps_per_s": 1.0, "step_env_steps_per_s": 2.0}
    for kind, row in (("interface", through), ("training", training), ("baseline", against)):
        assert bench_table.kind(row) == kind
        for line in bench_table.lines(row):
            assert len(line) == len(bench_table.HEADINGS[kind])
        for line in bench_table.lines({**row, "ratios": None}):
            assert len(line) == len(bench_table.HEADINGS[kind]) + 1 and line[-1] == "no match"


# ---------------------------------------------------------------------- sweeps


def test_environment_counts_grow_by_the_root_of_ten():
    assert bench_sweep.environment_counts(100_000) == [1, 3, 10, 32, 100, 316, 1000, 3162, 10_000, 31_623, 100_000]
    assert bench_sweep.environment_counts(20) == [1, 3, 10, 20]
    assert bench_sweep.environment_counts(1) == [1]


@pytest.mark.parametrize("game", ["tag_gridworld", "tag_continuous", "simple_spread", "simple_tag", "simple_adversary"])
@pytest.mark.parametrize("num_agents", bench_sweep.AGENTS)
def test_agents_grow_in_the_proportion_of_the_roles(game, num_agents):
    before, after = configure(game), bench_sweep.with_agents(configure(game), num_agents)
    assert after.num_agents == num_agents and min(after.roles.values()) >= 1
    growing = [role for role in before.roles if role not in ("runner",) or game != "tag_gridworld"]
    growing = [role for role in growing if role != "adversary" or game != "simple_adversary"]  # there is always one
    whole, left = (sum(g.roles[role] for role in growing) for g in (before, after))
    for role in growing:
        share = left * before.roles[role] / whole
        assert abs(after.roles[role] - share) <= 1  # rounded, and at least 1
    changed = {f.name for f in dataclasses.fields(after) if getattr(after, f.name) != getattr(before, f.name)}
    assert all(name.startswith("num_") for name in changed)


def test_agents_grow_from_the_configuration_that_was_given():
    game = configure("tag_continuous", num_taggers=1, num_runners=1, side=5.0)
    assert bench_sweep.with_agents(game, 10) == configure("tag_continuous", num_taggers=5, num_runners=5, side=5.0)


def test_fewer_agents_than_roles_are_an_error():
    with pytest.raises(ConfigError, match="tag_continuous cannot have 1 agents; expected at least one of each role"):
        bench_sweep.with_agents(configure("tag_continuous"), 1)


@pytest.mark.parametrize(
    ("rates", "last"),
    [
        ([5, 50, 500], 100),  # linear throughout
        ([5, 45, 450], 100),  # 10 % less is still within
        ([5, 44, 500], 1),  # 12 % less ends it, even where more follows
        ([5, 60, 530], 10),  # it counts against the best, not the first
        ([5, 60, 545], 100),
    ],
)
def test_linear_growth_ends_where_more_than_a_tenth_of_the_best_is_lost(rates, last):
    assert bench_sweep.linear_up_to([1, 10, 100], rates) == last


def test_a_sweep_over_environments_is_measured_and_drawn(quick, tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    for name in ("curve.svg", "curve.png"):
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words
            results = quick(game="cartpole", sweep="environments", num_envs=4, plot=tmp_path / name)
    assert [row["num_envs"] for row in results["rows"]] == [1, 3, 4]
    assert all(set(row) == ROW for row in results["rows"])
    assert set(results["linear_up_to"]) == {"step", "sample_and_step"} <= set(STAGES)
    assert set(results["linear_up_to"].values()) <= {1, 3, 4}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["linear_up_to"] == results["linear_up_to"]
    text = (tmp_path / "curve.svg").read_text()
    words = ("env-steps / s", ">environments<", "cartpole, 1 agent,", "steps with given actions", "linear growth")
    assert all(word in text for word in words), text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_over_agents_is_measured(quick, monkeypatch, capsys):
    monkeypatch.setattr(bench_sweep, "AGENTS", (2, 5))
    results = quick(game="tag_continuous", sweep="agents", num_envs=2, table=True)
    assert [(row["num_envs"], row["num_agents"]) for row in results["rows"]] == [(2, 2), (2, 5)]
    assert [row["config"] for row in results["rows"]] == [{"num_taggers": 1, "num_runners": n} for n in (1, 4)]
    up_to = results["linear_up_to"]["step"]
    assert f"step: within 10 % of linear up to {up_to} agents" in capsys.readouterr().out


def test_a_size_that_does_not_fit_ends_a_sweep_with_a_message(quick, monkeypatch, capsys):
    monkeypatch.setattr(bench_sweep, "AGENTS", (5, 20_000))  # 13 GB per environment
    results = quick(game="tag_gridworld", sweep="agents", num_envs=10_000, table=True)
    assert [row["num_agents"] for row in results["rows"]] == [5]
    assert "num_envs = 10,000 environments" in results["stopped"]
    assert "stopped: num_envs = 10,000 environments" in capsys.readouterr().out
    monkeypatch.setattr(bench_sweep, "AGENTS", (20_000,))
    with pytest.raises(CapacityError):
        quick(game="tag_gridworld", sweep="agents", num_envs=10_000)


# ---------------------------------------------------------------------- comparisons

SAID = {"commit": "abc", "device": "a", "torch": "2"}


def file(folder, rows, **said):
    path = folder / "earlier.json"
    path.write_text(json.dumps({**SAID, **said, "rows": rows}))
    return path


def test_an_earlier_run_is_compared_stage_by_stage(quick, tmp_path, capsys):
    quick(**SMALL, json=tmp_path / "rows.json")
    told = json.loads((tmp_path / "rows.json").read_text())
    told |= {"torch": "1.0", "commit": "0123456"}
    (tmp_path / "rows.json").write_text(json.dumps(told))
    capsys.readouterr()
    results = quick(**SMALL, compare=tmp_path / "rows.json")
    (row,) = results["rows"]
    before, rate = told["rows"][0], "{}_env_steps_per_s".format
    assert row["ratios"] == {stage: round(row[rate(stage)] / before[rate(stage)], 3) for stage in STAGES}
    differences = {"commit": ["0123456", results["commit"]], "torch": ["1.0", torch.__version__]}
    assert results["compared"] == {"file": str(tmp_path / "rows.json"), "rows": 1, "then_now": differences}
    assert json.loads(capsys.readouterr().out.splitlines()[0])["ratios"] == row["ratios"]


def test_a_table_has_the_ratios_and_what_differs(quick, tmp_path, capsys):
    row = {"game": "cartpole", "num_envs": 3, "num_agents": 1, "config": {}, "sample_and_step_env_steps_per_s": 1e-3}
    quick(**SMALL, table=True, compare=file(tmp_path, [row]))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "│" in line]
    assert "no match" in lines[0] and "no match" not in lines[2]  # the earlier row has no other stage
    assert "device was a, is" in printed and "commit was abc, is" in printed


ROW_NOW = {"game": "g", "num_envs": 10, "num_agents": 2, "config": {"a": (1, 2)}, "step_env_steps_per_s": 30.0}


@pytest.mark.parametrize(
    ("changes", "ratios"),
    [
        ({"config": {"a": [1, 2]}}, {"step": 3.0}),
        ({"config": {"a": [1, 3]}}, None),
        ({"config": {}}, None),
        ({"game": "h", "config": {"a": [1, 2]}}, None),
        ({"num_envs": 11, "config": {"a": [1, 2]}}, None),
        ({"num_agents": 3, "config": {"a": [1, 2]}}, None),
        ({"interface": "sb3", "config": {"a": [1, 2]}}, None),
    ],
)
def test_only_matching_rows_are_compared(changes, ratios, tmp_path):
    old = {**ROW_NOW, "step_env_steps_per_s": 10, **changes}
    assert bench_compare.read(file(tmp_path, [old])).ratios(ROW_NOW) == ratios


def test_rows_with_fewer_keys_are_compared_by_those_they_have(tmp_path):
    """Training rows once had neither num_agents nor config; rows of interfaces have times only."""
    said = {"game": "cartpole", "num_envs": 4, "num_steps": 5, "units": 8, "update": "u", "precision": "tf32"}
    old = {**said, "env_steps_per_s": 100}
    now = {**said, "num_agents": 1, "config": {}, "env_steps_per_s": 50}
    assert bench_compare.read(file(tmp_path, [old])).ratios(now) == {"iteration": 0.5}
    assert bench_compare.read(file(tmp_path, [old])).ratios({**now, "precision": "float32"}) is None
    assert bench_compare.read(file(tmp_path, [old])).ratios({**now, "config": {"max_steps": 3}}) is None
    times = {"interface": "sb3", "game": "g", "num_envs": 4, "config": {}, "vec_env_step_us": 1.0}
    earlier = bench_compare.read(file(tmp_path, [{**times, "interface_us": 20.0}]))
    assert earlier.ratios({**times, "interface_us": 10.0}) == {"interface": 2.0, "vec_env_step": 1.0}


@pytest.mark.parametrize("name", ["h200-cuda_core", "cpu-one-core", "h200-interfaces"])
def test_the_recorded_measurements_can_be_compared_with(name):
    path = ROOT / "docs" / "performance" / f"{name}.json"
    earlier = bench_compare.read(path)
    assert len(earlier.rows) == len(json.loads(path.read_text())["rows"]) > 0
    for row in earlier.rows:
        assert set(earlier.ratios(row).values()) == {1.0}


ANOTHER = {"game": "g", "num_envs": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON, or damaged"),
        ('{"rows": [', "is not JSON, or damaged"),
        ("[" * 100_000, "is not JSON, or damaged"),
        (b"\x89PNG\xff", "is not JSON, or damaged"),
        ("[1]", "is not a result of this benchmark"),
        ('{"rows": []}', "is not a result of this benchmark"),
        (json.dumps({**SAID, "rows": {}}), "is not a result of this benchmark"),
        (json.dumps({**SAID, "rows": [3]}), r"rows\[0\], is damaged; expected a game and its num_envs"),
        (json.dumps({**SAID, "rows": [ANOTHER, {**ANOTHER, "game": 3}]}), r"rows\[1\], is damaged"),
        (json.dumps({**SAID, "rows": [{**ANOTHER, "num_envs": "3"}]}), r"rows\[0\], is damaged"),
        (json.dumps({**SAID, "rows": [{**ANOTHER, "step_env_steps_per_s": 0}]}), "step has no positive rate"),
        (
            json.dumps({**SAID, "rows": [{**ANOTHER, "step_env_steps_per_s": float("nan")}]}),
            "step has no positive rate",
        ),
        (json.dumps({**SAID, "rows": [{**ANOTHER, "env_steps_per_s": "fast"}]}), "iteration has no positive rate"),
        (
            json.dumps({**SAID, "rows": [{**ANOTHER, "interface": "sb3", "interface_us": 0}]}),
            "interface has no positive rate",
        ),
    ],
)
def test_a_file_that_cannot_be_compared_with_is_refused(text, message, tmp_path):
    path = tmp_path / "earlier.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        bench.run(bench.BenchConfig(device="cpu", **SMALL, compare=path))


def test_a_missing_file_to_compare_with_is_an_error_before_measuring(tmp_path, capsys):
    with pytest.raises(
        FileNotFoundError, match=r"no file .*nowhere.json to compare with; expected a file written by --json"
    ):
        bench.run(bench.BenchConfig(device="cpu", **SMALL, compare=tmp_path / "nowhere.json"))
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------- other libraries


@pytest.mark.parametrize(("baseline", "game"), [("gymnasium", "cartpole"), ("mpe2", "simple_tag")])
def test_baselines_are_measured_in_the_same_run(baseline, game, quick):
    library = pytest.importorskip(baseline)
    (row,) = quick(baseline=baseline, num_envs=2)["rows"]
    assert (row["baseline"], row["version"], row["game"], row["num_envs"]) == (baseline, library.__version__, game, 2)
    for stage in ("step", "baseline"):
        # The rate is rounded to 0.1, the time to 0.01 us.
        assert row[f"{stage}_env_steps_per_s"] == pytest.approx(2e6 / row[f"{stage}_us"], rel=0.01)
    ratio = row["step_env_steps_per_s"] / row["baseline_env_steps_per_s"]
    assert row["speedup"] == pytest.approx(ratio, rel=0.01, abs=0.006)  # rounded to 0.01


def test_interfaces_are_measured_with_vec_env_and_launch(quick, capsys, tmp_path):
    quick(interface=("gymnasium",), json=tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    *rows, rest = map(json.loads, capsys.readouterr().out.splitlines())
    assert rows == written["rows"] and set(rest) == TOP - {"copy_bytes_per_s", "rows"}
    assert [(row["game"], row["num_envs"]) for row in rows] == [
        ("cartpole", 4096),
        ("cartpole", 65_536),
        ("tag_gridworld", 1024),
        ("tag_gridworld", 16_384),
    ]
    for row in rows:
        assert row["interface"] == "gymnasium" and row["launch_us"] > 0
        # Both are rounded to 0.01.
        assert row["overhead_us"] == pytest.approx(row["interface_us"] - row["vec_env_step_us"], abs=0.011)


def test_the_loop_over_mpe2_resets_what_has_ended(monkeypatch):
    simple_tag = pytest.importorskip("mpe2.simple_tag_v3")
    made, real = [], simple_tag.parallel_env
    monkeypatch.setattr(simple_tag, "parallel_env", lambda: made.append(real()) or made[-1])
    env = make("simple_tag", 2, "cpu")
    env.reset(seed=1)
    step = bench_baselines.STEPS["mpe2"](env, [env.sample_actions()])
    alive = []
    for _ in range(52):  # an episode has 25 steps
        step()
        alive.append([bool(baseline.agents) for baseline in made])
    ended = [step_index for step_index, both in enumerate(alive, 1) if both == [False, False]]
    assert ended == [25, 51] and alive.count([True, True]) == 50


# ---------------------------------------------------------------------- options


def test_every_option_has_a_help_text():
    lines = inspect.getsource(bench.BenchConfig).splitlines()
    fields = {field.name: field for field in dataclasses.fields(bench.BenchConfig)}
    told = {name for name in fields for line in lines if re.match(rf"    {name}: .* = .*  # \w", line)}
    assert told == set(fields)
    for kind, options in bench.OPTIONS_OF.items():
        assert options | bench.COMMON_OPTIONS <= set(fields) and (kind in fields or kind == "games")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interface": ("gymnasum",)}, r"interface is 'gymnasum'; nearest: gymnasium"),
        (
            {"interface": ("gymnasium",), "game": "cartpole"},
            "game cannot be combined with interface; it is an option of steps of games",
        ),
        ({"interface": ("gymnasium",), "num_envs": 5}, "num_envs cannot be combined with interface"),
        ({"interface": ("gymnasium",), "training": True}, "training and interface are different measurements"),
        ({"num_envs": 5}, "num_envs needs a game: give game as well"),
        ({"num_envs": 0, "game": "cartpole"}, "num_envs is 0; expected an int >= 1"),
        ({"config": "[1]", "game": "cartpole"}, r"config is '\[1\]'; expected a JSON object"),
        ({"game": "cartpole", "num_steps": 3}, "num_steps needs rollouts: give rollout or training as well"),
        ({"game": "cartpole", "hidden_sizes": (3,)}, "hidden_sizes needs rollouts"),
        ({"game": "cartpole", "rollout": True, "num_steps": 0}, r"num_steps is 0; expected a value in \[1"),
        ({"game": "cartpole", "rollout": True, "num_epochs": 2}, "num_epochs cannot be combined with steps of games"),
        (
            {"game": "cartpole", "precision": ("tf32",)},
            "precision cannot be combined with steps of games; it is an option of train",
        ),
        ({"training": True, "num_epochs": 2}, "num_epochs needs a game"),
        ({"training": True, "driver": "pycuda"}, "driver cannot be combined with training"),
        ({"training": True, "rollout": True}, "rollout cannot be combined with training"),
        ({"training": True, "game": "cartpole", "num_minibatches": 0}, "num_minibatches is 0; expected a value in"),
        ({"training": True, "game": "cartpole", "hidden_sizes": (0,)}, r"hidden_sizes\[0\] is 0; expected a value in"),
        ({"training": True, "game": "cartpole", "precision": ("half",)}, "precision is 'half'"),
        ({"sweep": "sizes", "game": "cartpole"}, "sweep is 'sizes'; expected 'environments' or 'agents'"),
        ({"sweep": "environments"}, "sweep needs a game"),
        ({"sweep": "agents", "game": "cartpole"}, "cartpole has no field that sets the number of a role's agents"),
        ({"sweep": "environments", "game": "cartpole", "rollout": True}, "rollout cannot be combined with sweep"),
        (
            {"plot": Path("a.png"), "game": "cartpole"},
            "plot cannot be combined with steps of games; it is an option of sweep",
        ),
        (
            {"sweep": "environments", "game": "cartpole", "plot": Path("a.txt")},
            "plot is a.txt; expected .* .png or .svg",
        ),
        (
            {"sweep": "environments", "game": "cartpole", "plot": Path("no/a.png")},
            "plot is no/a.png; expected a file in",
        ),
        ({"game": "cartpole", "json": Path("no/a.json")}, "json is no/a.json; expected a file in a folder that exists"),
        ({"game": "cartpole", "json": Path()}, r"json is \.; expected a file"),
        ({"baseline": "gym"}, "baseline is 'gym'; expected 'gymnasium' or 'mpe2'"),
        ({"baseline": "mpe2", "game": "cartpole"}, "game cannot be combined with baseline"),
    ],
)
def test_wrong_options_are_errors_before_measuring(given, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        bench.run(bench.BenchConfig(device="cpu", **given))
    assert capsys.readouterr().out == "" and os.listdir(tmp_path) == []


def test_every_adapter_can_be_measured():
    adapters = {path.stem for path in Path(gpu_vecenv.adapters.__file__).parent.glob("*.py")}
    assert set(bench_interfaces.INTERFACES) == adapters - {"__init__", "lightning"} | {
        "gymnasium",
        "batched",
    }  # no interface
