"""Commands and warnings show the control characters of names and paths as text; a terminal gets none of them."""

import subprocess
import sys

import pytest

from gpu_vecenv.cli import doctor
from gpu_vecenv.cli.main import main
from gpu_vecenv.compile import cache
from gpu_vecenv.engine import tuning_cache
from gpu_vecenv.errors import CheckpointCorruptError
from gpu_vecenv.train.checkpoint import newest_usable

NAME, SHOWN = "\x1b]0;x\x07[b]", r"\x1b]0;x\x07[b]"  # sets a terminal's title; [b] is markup of rich
TRAIN = "--num-envs 4 --num-steps 4 --num-minibatches 2 --hidden-sizes 8 --total-steps 16 --episodes 2".split()


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder, checks what it sends to the terminal: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        assert all(line.isprintable() for text in said for line in text.split("\n")), (arguments, said)
        return code, *said

    return run


def test_errors_show_control_characters_as_text(command):
    for arguments in (["evaluate", NAME], [NAME], ["list", f"--{NAME}"], ["show", f"{NAME}.py"]):
        code, output, errors = command(*arguments)
        assert (code, output) == (2, "") and SHOWN in errors, (arguments, errors)


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """An environment whose programs, found in a folder with such a name, print such texts; in the compiler's case one
    that is no UTF-8 either."""
    folder = tmp_path / NAME / "bin"
    folder.mkdir(parents=True)
    for name, text in (
        ("nvidia-smi", f"{NAME} H200, 570.1, 9.0, 1 MiB"), ("nvcc", NAME), ("g++", f"{NAME} \\0351"),
    ):  # fmt: skip
        (folder / name).write_text(f"#!/bin/sh\nprintf '%b' '{text}'\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CUDA_HOME", str(folder.parent))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_doctor_shows_control_characters_as_text(command, programs, monkeypatch):
    rows = {"GPU 0": f"{SHOWN} H200", "nvcc": f"{SHOWN}/bin/nvcc", "C++ compiler": rf"({SHOWN} \xe9)"}
    _, output, errors = command("doctor")
    script = subprocess.run([sys.executable, "-S", doctor.__file__], capture_output=True, text=True)
    assert (errors, script.stderr) == ("", "")
    for shown in (output, script.stdout):
        assert all(line.isprintable() for line in shown.split("\n")), shown
        for title, value in rows.items():
            assert any(line.startswith(title) and value in line for line in shown.split("\n")), (title, shown)
    for wrong, problem in ((f"'{NAME}\n'", "which does not run"), (f"{NAME} '", "No closing quotation")):
        monkeypatch.setenv("CXX", wrong)
        _, output, errors = command("doctor")
        (line,) = (line for line in output.split("\n") if line.startswith("C++ compiler"))
        assert SHOWN in line and problem in line and "Set CXX to a C++ compiler" in output, (wrong, output)


def test_warnings_show_control_characters_as_text(tmp_path, monkeypatch):
    folder = tmp_path / NAME
    folder.mkdir()
    folder.chmod(0o777)  # writable by others: not used as a cache
    (folder / "tuning.json").write_text("{")
    monkeypatch.setenv("GPU_VECENV_CACHE", str(folder))

    def load(iteration):
        if iteration == 2:
            raise CheckpointCorruptError(f"{folder} is damaged")

    with pytest.warns(UserWarning) as caught:
        tuning_cache.read(folder / "tuning.json")
        cache.cache_dir.__wrapped__()
        newest_usable([2, 1], load, "here")
    assert len(caught) == 3
    assert caught[0].filename == __file__  # the caller's line is shown
    for warning in caught:
        assert str(warning.message).isprintable() and SHOWN in str(warning.message)


@pytest.mark.slow
def test_results_show_control_characters_as_text(command, tmp_path):
    (tmp_path / "named.py").write_text(
        "from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv\n\n\n"
        f"class Named(CartPoleVectorEnv):\n    def __str__(self):\n        return {NAME!r}\n"
    )
    for arguments in (
        ["train", "cartpole", *TRAIN, "--device", "cpu", "--out", NAME],
        ["evaluate", NAME, "--episodes", "2", "--device", "cpu"],
        ["plot", NAME, "--out", f"{NAME}/curve.png"],
        ["replay", "record", "cartpole", "--device", "cpu", "--out", NAME],
        ["replay", "show", NAME],
        ["replay", "play", NAME, "--device", "cpu"],
        ["replay", "html", NAME, "--device", "cpu", "--out", f"{NAME}/page.html"],
        ["new", "my_game", "--folder", NAME],
        ["check", "named.py:Named", "--checks", "K01", "--steps", "10"],
    ):
        code, output, errors = command(*arguments)
        assert code == 0 and SHOWN in output, (arguments, output, errors)
