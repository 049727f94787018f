"""Commands show the control characters of names and paths as text; a terminal gets none of them."""

import pytest

from gpu_vecenv.cli.main import main

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
