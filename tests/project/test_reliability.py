"""Short runs of the experiments of tests/reliability: without failures, and with planted faults, which they find.

Those that fork, kill or measure their own process run as commands.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from reliability.experiment import ENGINE, NAMES, NOTHING, TESTS, environment, kind_of, metrics_of
from reliability.rng import clear_verdicts
from support.fuzzing import VARIABLE

# Arguments, and metrics that depend on them: an ignored argument fails the test.
COMMANDS = {
    "saves": (["--count", 1], {"what": "folder"}),
    "cache": (["--count", 1, "--processes", 6], {"rounds": 1, "compiled_healthy": 1, "compiled_damaged": 1}),
    "leaks": (["--count", 14, "--num-envs", 8, "--no-alone"], {"cycles": 14, "tensor_bytes_left": 0, "files_left": 0}),
    "interrupts": (["--count", 5], {"while_step": 1, "while_train": 1}),
    "resume": (["--count", 2], {"kills": 2, "differences": 0}),
}
COUNTS = {"damage": 300, "soak": 200_000, "rng": 400_000, "large": 1_000_000}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_experiment_has_a_small_form():
    # Those of the last two are in test_fuzz_calls.py.
    assert {*COMMANDS, *COUNTS, "calls", "injections"} == set(NAMES)


def test_make_reliability_runs_every_experiment():
    line = re.search(r"\n\tfor experiment in (.*?);", (TESTS.parent / "Makefile").read_text())
    assert line and sorted(line[1].split()) == sorted(NAMES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_an_experiment_that_is_a_command_finds_nothing_but_what_is_planted(name, device):
    arguments, expected = COMMANDS[name]
    metrics = metrics_of(name, *arguments, "--planted", "--device", "cpu" if name in ("saves", "cache") else device)
    assert metrics["failures"] == 0 and metrics.items() >= expected.items(), metrics
    assert NOTHING not in metrics["planted"].values()


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_an_experiment_finds_nothing(name, device):
    options = {"dieharder": "no"} if name == "rng" else {}
    experiment = kind_of(name)(count=COUNTS[name], device=device, **options)
    metrics = experiment.run()
    assert experiment.failures == [] and metrics["failures"] == 0 and metrics["count"] == COUNTS[name]


@pytest.mark.parametrize("name", [*COUNTS, "calls", "injections"])
def test_an_experiment_finds_what_is_planted(name, device):
    found = kind_of(name)(count=1, device=device).plant()
    assert found and NOTHING not in found.values()


def test_random_inputs_are_others_in_every_run_and_repeatable(monkeypatch):
    monkeypatch.delenv(VARIABLE)  # as at the beginning of a run
    seed = kind_of("calls")(count=1).seed
    assert kind_of("damage")(count=1).seed == seed == int(os.environ[VARIABLE])  # child processes inherit it
    monkeypatch.delenv(VARIABLE)
    assert kind_of("calls")(count=1).seed != seed
    monkeypatch.setenv(VARIABLE, "7")
    assert kind_of("calls")(count=1).seed == 7


def test_a_failure_is_printed_and_exits_with_1(tmp_path):
    command = [
        sys.executable,
        str(TESTS / "reliability"),
        "soak",
        "--game",
        "nothing",
        "--seed",
        "7",
        "--json",
        str(tmp_path / "file"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1 and "UnknownGameError" in done.stdout and "to repeat it: --seed 7" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["failures"] == 1
    written = json.loads((tmp_path / "file").read_text())
    assert written["failures"] == 1 and "nothing" in written["what"][0]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_receipt_depends_on_is_there(name):
    files = [*ENGINE, *kind_of(name).depends_on, f"tests/reliability/{name}.py"]
    assert [pattern for pattern in files if not list(TESTS.parent.glob(pattern))] == []


def test_the_last_verdict_of_a_repeated_dieharder_test_counts():
    lines = [
        "   rng_name    |rands/second|   Seed   |",
        " diehard_parking_lot|   0|     12000|     100|0.00133868|   WEAK   ",
        " diehard_parking_lot|   0|     12000|     200|0.02651979|  PASSED  ",
        "        diehard_runs|   0|    100000|     100|0.04893826|  PASSED  ",
        "        diehard_runs|   0|    100000|     100|0.00224451|   WEAK   ",
        "        diehard_runs|   0|    100000|     200|0.19427669|  PASSED  ",
        "        diehard_runs|   0|    100000|     200|0.00000000|  FAILED  ",
        "          sts_serial|   1|    100000|     100|0.00100000|   WEAK   ",
        "          sts_serial|   2|    100000|     100|0.30000000|  PASSED  ",
    ]
    assert clear_verdicts("\n".join(lines)) == ["PASSED", "PASSED", "FAILED", "WEAK", "PASSED"]
