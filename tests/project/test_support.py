"""The shared test tools: bitwise comparison, cases, shared folders, the selection of `make quick`, the CPU limit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.bitwise import bits, equal_bits
from support.cases import mostly_exhaustive, slow_but
from support.select_tests import CORE, ROOT, changed, selected
from support.shared import made_once

F32 = torch.tensor([0.0, 1.0, torch.nan])


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.clone])
def test_bits_separate_signed_zeros_and_equate_a_nan_with_itself(kind):
    given, negative, payload = kind(F32), kind(F32 * torch.tensor([-1.0, 1.0, 1.0])), kind(F32.clone())
    payload.view(torch.int32 if isinstance(payload, torch.Tensor) else np.int32)[2] += 1
    assert equal_bits(F32, torch.nn.Parameter(F32.clone())) and equal_bits(F32, F32.numpy())
    assert equal_bits(given, kind(F32)) and given[0] == negative[0]
    assert not equal_bits(given, negative) and not equal_bits(given, payload)
    assert bits(given).tolist() == [0, 0x3F800000, 0x7FC00000] and bits(given).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_bits_keep_the_shape_and_share_no_memory(dtype):
    tensor = torch.ones(3, 2, 4).to(dtype).transpose(0, 2)
    found = bits(tensor)
    assert found.shape == (4, 2, 3) and equal_bits(tensor, tensor.contiguous())
    tensor[0, 0, 0] = 0
    assert found[0, 0, 0] == found[1, 1, 1] != bits(tensor)[0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        F32[:2],
        F32[None],
        F32.double(),
        F32.double().numpy(),
        F32.view(torch.int32),
        [F32],
        None,
    ],
)
def test_other_shapes_dtypes_and_types_are_not_equal(other):
    assert not equal_bits(F32, other)


def test_mappings_and_sequences_are_compared_by_their_parts():
    given = {"a": F32, "b": [F32[0], (1, "x", None)]}
    assert equal_bits(given, {"b": [F32[0], (1, "x", None)], "a": F32.clone()})
    for other in (
        {"a": F32},
        {**given, "b": [F32[0]]},
        {**given, "b": [F32[0], (1.0, "x", None)]},
        {**given, "a": -F32},
    ):
        assert not equal_bits(given, other)


# The selection of `make quick`

SELECTIONS = {
    "gpu_vecenv/train/ppo.py": [["tests/train"]],
    "gpu_vecenv/compile/backends/host.py": [["tests/compile"]],
    "cuda/engine/step.cuh": [["tests/engine"]],
    "cuda/games/cartpole.cu": [["tests/envs"]],
    "cuda/learner/loss.cuh": [["tests/train"]],
    "tests/views/test_render.py": [["tests/views"]],
    "README.md": [["tests/project"]],
    "examples/README.md": [["tests/project"]],
    "adapters/sb3.py": [["tests/adapters/test_sb3.py"]],
    "tests/adapters/test_sb3.py": [["tests/adapters/test_sb3.py"]],
    "tests/clients/test_sbx.py": [["tests/project"]],
    # What concerns every package.
    "gpu_vecenv/errors.py": [CORE],
    "pyproject.toml": [CORE],
    "tests/conftest.py": [CORE],
    "tests/support/bitwise.py": [CORE],
    "adapters/__init__.py": [CORE],
}


@pytest.mark.parametrize("path", SELECTIONS)
def test_a_change_selects_the_tests_of_its_package(path):
    assert selected([path]) == SELECTIONS[path]


def test_several_changes_select_each_package_once_and_each_adapter_apart():
    paths = ["gpu_vecenv/train/ppo.py", "tests/train/test_ppo.py", "cuda/engine/step.cuh", "adapters/sb3.py"]
    assert selected([*paths, "adapters/skrl.py"]) == [
        ["tests/engine", "tests/train"],
        ["tests/adapters/test_sb3.py"],
        ["tests/adapters/test_skrl.py"],
    ]
    # The core, without what is selected anyway.
    assert selected(["cuda/engine/step.cuh", "pyproject.toml"]) == [
        ["tests/engine", *(path for path in CORE if "engine" not in path)]
    ]


def test_the_core_exists_and_is_selected_without_changes():
    assert selected([]) == [CORE] and all((ROOT / path).exists() for path in CORE)


def test_changed_are_commits_since_main_and_uncommitted_files(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert changed(tmp_path) == []
    for name in ("same", "committed", "edited", "removed"):
        (tmp_path / name).write_text("old")
    git("init")
    git("add", ".")
    git("commit", "-m", "main")
    assert changed(tmp_path) == []
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("new")
    git("commit", "-am", "branch")
    (tmp_path / "edited").write_text("new")
    (tmp_path / "removed").unlink()
    (tmp_path / "new folder").mkdir()
    (tmp_path / "new folder" / "file").touch()
    assert sorted(changed(tmp_path)) == ["committed", "edited", "new folder/file", "removed"]


# The CPU limit

BUSY = """
import subprocess, sys, time
import pytest

BURN = "import time; begin = time.process_time()\\nwhile time.process_time() < begin + 0.4: pass"

def test_in_this_process():
    exec(BURN)

def test_in_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.mark.slow
def test_marked():
    exec(BURN)

def test_waiting():
    time.sleep(0.4)
"""


@pytest.mark.slow
def test_a_test_over_the_cpu_limit_fails_unless_it_is_marked_slow(tmp_path):
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: a\n gpu: b\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rf",
        "-p",
        "no:cacheprovider",
        "--cpu-limit",
        "0.3",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    failed = {line.split()[1].rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_in_this_process", "test_in_a_child"}, done.stdout
    assert done.stdout.count("more than 0.3: mark the test slow") >= 2


OF_A_GPU = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    pass

def test_anywhere(device):
    assert device == "cpu"
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
@pytest.mark.parametrize("processes", mostly_exhaustive([0, 2], [2]))
def test_without_a_gpu_its_tests_are_left_out_and_counted(processes, tmp_path):
    (tmp_path / "test_kinds.py").write_text(OF_A_GPU)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "left out: 2 tests of NVIDIA GPUs" in done.stdout and "1 passed" in done.stdout
    assert "skipped" not in done.stdout


IN_PARTS = """
import time
import pytest

@pytest.mark.parametrize("k", range(3))
def test_one(k):
    assert k != 1

def test_last():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", mostly_exhaustive([0, 2], [0]))
def test_a_run_in_parts_begins_no_test_too_late_and_repeats_none_that_passed(processes, tmp_path):
    (tmp_path / "test_parts.py").write_text(IN_PARTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: a\n gpu: b\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}

    def part(*options):
        command = [sys.executable, "-m", "pytest", "-n", str(processes), "-p", "no:cacheprovider", *options]
        command += ["--passed", "passed.txt", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, output = part("--max-seconds", "0")
    assert code == 3 and "4 skipped" in output and not (tmp_path / "passed.txt").exists()
    code, output = part("-k", "one")
    assert code == 1 and "1 failed, 2 passed" in output
    passed = {line.rpartition("::")[2] for line in (tmp_path / "passed.txt").read_text().splitlines()}
    assert passed == {"test_one[0]", "test_one[2]"}
    code, output = part()
    assert code == 1 and "1 failed, 1 passed" in output


def test_of_each_value_one_case_runs_with_every_change_and_the_rest_is_exhaustive():
    cases = [(name, n) for name in ("a", "b", "c") for n in (1, 2, 3)]
    params = slow_but([("b", 1)], cases)
    marks = {param.values: {mark.name for mark in param.marks} for param in params}
    assert list(marks) == cases and [param.id for param in params][:2] == ["a-1", "a-2"]
    assert [case for case, own in marks.items() if "exhaustive" not in own] == [("a", 1), ("b", 1), ("c", 3)]
    assert marks[("b", 1)] == set() and marks[("c", 3)] == {"slow"}
    by_number = {
        param.values for param in slow_but([], cases, each=1) if "exhaustive" not in {m.name for m in param.marks}
    }
    assert by_number == {("a", 1), ("b", 2), ("c", 3)}


def test_cases_that_are_not_usual_are_exhaustive():
    one, *others = mostly_exhaustive(range(3), [0])
    assert one == 0 and all(param.marks[0].name == "exhaustive" for param in others)
    with pytest.raises(ValueError, match=r"usual has \[7\]"):
        mostly_exhaustive(range(3), [7])


def test_what_workers_share_is_made_once(tmp_path_factory):
    made = []
    folders = {made_once(tmp_path_factory, "shared by this test", made.append) for _ in range(2)}
    assert {*made} == folders and len(made) == 1 and made[0].is_dir()
