import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_vecenv.adapters
from gpu_vecenv import bench, bench_interfaces
from gpu_vecenv.errors import ConfigError

TOP = {"gpu_vecenv", "commit", "device_text_sha256", "device", "torch", "cuda", "python", "copy_bytes_per_s", "rows"}
STAGE = {"us", "env_steps_per_s", "agent_steps_per_s", "bytes", "share_of_copy_bandwidth"}
ROW = {"game", "num_envs", "num_agents", "config", "first_step_s", "faults"}
ROW |= {f"{stage}_{figure}" for stage in ("step", "tick") for figure in STAGE}


def run_bench(folder, *arguments):
    """What one run printed and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_vecenv.bench", "--device", "cpu", "--json", "rows.json", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(gpu_vecenv.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads((folder / "rows.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    settings = ["--game", "tag_gridworld", "--num-envs", "64", "--config", '{"num_taggers": 6}']
    return run_bench(tmp_path_factory.mktemp("bench"), *settings)


def test_one_json_line_per_row_is_printed_and_the_same_is_written(measured):
    printed, written = measured
    row, rest = map(json.loads, printed.splitlines())
    assert [row] == written["rows"] and rest == {key: value for key, value in written.items() if key != "rows"}


def test_the_figures_say_what_was_measured_and_where(measured):
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
    for stage in ("step", "tick"):
        figures = {name: row[f"{stage}_{name}"] for name in STAGE}
        assert all(number > 0 for number in figures.values())
        # Rates are rounded to 1, the time to 0.01 us, the share to 0.0001: half of that either way.
        assert abs(figures["agent_steps_per_s"] - 7 * figures["env_steps_per_s"]) <= 0.5 + 7 * 0.5
        longest, shortest = (1e-6 * (figures["us"] + sign * 0.005) for sign in (1, -1))
        assert 64 / longest - 0.5 <= figures["env_steps_per_s"] <= 64 / shortest + 0.5
        shares = [figures["bytes"] / seconds / written["copy_bytes_per_s"] for seconds in (longest, shortest)]
        assert shares[0] - 5.1e-5 <= figures["share_of_copy_bandwidth"] <= shares[1] + 5.1e-5


def test_the_bytes_of_a_step_are_those_of_state_and_outputs(measured):
    """tag_gridworld with 7 agents, counted by hand."""
    _, written = measured
    (row,) = written["rows"]
    agents = 7
    state = agents * 2 * 4  # cells: two int32
    machine = 2 * 4 + 8 + 4 + agents + 4 + agents * 4  # key, episode, time, active, fault, returns
    obs, reward, flags, action = (4 * agents + 1) * 4, 4, 4, 4
    expected = 64 * (2 * (state + machine) + agents * (obs + reward + flags + action))
    assert row["step_bytes"] == row["tick_bytes"] == expected


def test_interfaces_are_measured_beside_the_machine(tmp_path):
    printed, written = run_bench(tmp_path, "--through", "gymnasium")
    *rows, rest = map(json.loads, printed.splitlines())
    assert rows == written["rows"] and set(rest) == TOP - {"copy_bytes_per_s", "rows"}
    assert [(row["game"], row["num_envs"]) for row in rows] == [
        ("cartpole", 4096),
        ("cartpole", 65_536),
        ("tag_gridworld", 1024),
        ("tag_gridworld", 16_384),
    ]
    for row in rows:
        assert row["through"] == "gymnasium" and row["launch_us"] > 0
        # Both are rounded to 0.01.
        assert row["overhead_us"] == pytest.approx(row["through_us"] - row["vec_env_step_us"], abs=0.011)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"through": ("gymnasum",)}, r"through is 'gymnasum'; nearest: gymnasium"),
        ({"through": ("gymnasium",), "game": "cartpole"}, "through measures its own games; expected no game"),
        ({"through": ("gymnasium",), "num_envs": 5}, "through measures its own games"),
        ({"num_envs": 5}, "num_envs and config belong to one game"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        bench.run(bench.BenchConfig(device="cpu", **given))


def test_every_adapter_can_be_measured():
    adapters = {path.stem for path in Path(gpu_vecenv.adapters.__file__).parent.glob("*.py")}
    assert set(bench_interfaces.INTERFACES) == adapters - {"__init__", "lightning"} | {
        "gymnasium",
        "batched",
    }  # no interface
