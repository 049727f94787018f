"""Each next step that a command prints is run as printed, for a bundled game and for one of one's own."""

import contextlib
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from uuid import uuid4

import gymnasium
import pytest

from gpu_vecenv.cli.game_files import GameFileNeededError, load_game_of_run
from gpu_vecenv.cli.main import main
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.watch.replay_file import Replay

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu".split()
SHORT = [*TINY, *"--total-steps 16 --episodes 2 --best-episodes 0 --max-steps 9".split()]
HINT = re.compile(r"gpu-vecenv [a-z]+ .+$", re.MULTILINE)
# What each command prints as next steps. Of `new` they train for a minute, so with fewer steps here.
EXPECTED = {
    "new": ["check", "train"],
    "own": ["replay record", "web"],
    "bundled": ["replay record", "web"],
    "resumed own": ["replay record", "web"],
    "seeds": ["replay record", "web"],
    "record own": ["replay html", "replay play"],
    "record bundled": ["replay html", "replay play"],
    "again": ["train --resume"],
}


def forget() -> None:
    """The game acorn is not registered, as in a new process."""
    for name in ("acorn", "acorn_sizes"):
        GAMES.pop(name, None)
        sys.modules.pop(name, None)
    gymnasium.registry.pop("gpu_vecenv/Acorn-v0", None)
    with contextlib.suppress(ImportError):
        from pettingzoo import aec_registry, parallel_registry

        for registry in (aec_registry, parallel_registry):
            registry.pop("gpu_vecenv/acorn-v0", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which all commands run."""
    folder, before, path = tmp_path_factory.mktemp("my work"), Path.cwd(), list(sys.path)
    os.chdir(folder)
    forget()
    yield folder
    os.chdir(before)
    forget()
    sys.path[:] = path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    forget()
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def printed(place: Path) -> dict[str, str]:
    """What the commands print, by a name for each."""
    commands = {
        "new": "new acorn --folder games".split(),
        "own": ["train", "games/acorn.py", *SHORT, "--out", "runs/my own"],
        "resumed own": ["train", "--resume", "runs/my own", "--total-steps", "32"],
        "bundled": ["train", "tag_gridworld", *SHORT, "--grid", "4", "--out", "runs/tag"],
        "seeds": ["train", "games/acorn.py", *SHORT, "--seeds", "2", "--out", "runs/seeds"],
        "record own": ["replay", "record", "runs/my own", "--out", "replays"],
        "record bundled": ["replay", "record", "runs/tag", "--out", "replays"],
        "again": ["train", "games/acorn.py", *SHORT, "--out", "runs/my own"],
    }
    texts = {}
    for name, words in commands.items():
        forget()
        with contextlib.redirect_stdout(StringIO()) as output, contextlib.redirect_stderr(output):
            code = main(words)
        texts[name] = output.getvalue()
        assert code == (2 if name == "again" else 0), texts[name]
        if name == "new":  # the cache folder has no replay of such a game yet
            with (place / "games/acorn.cu").open("a") as file:
                file.write(f"// {uuid4()}\n")
            with contextlib.redirect_stdout(StringIO()):
                assert main(["check", "games/acorn.py", "--checks", "G01", "G06"]) == 0
    return texts


@pytest.mark.parametrize("name", EXPECTED)
def test_a_printed_next_step_works_as_printed(name, printed, place, capsys):
    hints = HINT.findall(printed[name])
    assert [
        " ".join(hint.split()[1 : len(kind.split()) + 1]) for hint, kind in zip(hints, EXPECTED[name], strict=True)
    ] == EXPECTED[name]
    for hint in hints:
        words = shlex.split(hint)[1:]
        if words[0] == "check":
            words += ["--checks", "K01", "--steps", "10", "--device", "cpu"]  # the rest is tested in test_cli.py
        elif words[:2] == ["train", "games/acorn.py"]:
            words[words.index("--total-steps") :] = [*SHORT, "--out", "runs/new"]
        code, _, errors = run(capsys, *words)
        assert (code, errors) == (0, ""), (hint, errors)


# ---------------------------------------------------------------------- whose files are run


@pytest.mark.parametrize("changed", ["acorn.py", "acorn.cu"])
def test_changed_rules_are_not_run_unasked_but_by_the_printed_command(changed, printed, place, capsys):
    path, settings = place / "games" / changed, place / "runs/my own/settings.json"
    before, settings_before = path.read_text(), settings.read_text()
    path.write_text(before + "\n")
    try:
        for words in (["evaluate", "runs/my own", *"--episodes 2".split()], ["train", "--resume", "runs/my own"]):
            code, output, errors = run(capsys, *words)
            assert (code, output) == (2, "") and f"{changed} has changed" in errors and "acorn" not in sys.modules
            (command,) = HINT.findall(errors)
            code, _, errors = run(capsys, *shlex.split(command)[1:])
            assert (code, errors) == (0, "")
        # The resumed run has the present rules.
        assert run(capsys, "evaluate", "runs/my own", "--episodes", "2")[0] == 0
    finally:
        path.write_text(before)
        settings.write_text(settings_before)


def test_a_module_that_the_game_imports_is_one_of_its_files(place, capsys):
    (place / "games2").mkdir()
    assert run(capsys, "new", "acorn", "--folder", "games2")[0] == 0
    declaration, sizes = place / "games2/acorn.py", place / "games2/acorn_sizes.py"
    sizes.write_text("SIZE = 3\n")
    declaration.write_text(declaration.read_text() + "\nimport acorn_sizes  # noqa\n")
    assert run(capsys, "train", "games2/acorn.py", *SHORT, "--out", "runs/sizes")[0] == 0
    sizes.write_text("raise SystemExit\n")
    code, _, errors = run(capsys, "export", "runs/sizes", "--format", "torchscript")
    assert code == 2 and "acorn_sizes.py has changed" in errors
    sizes.unlink()
    assert "acorn_sizes.py is missing" in run(capsys, "export", "runs/sizes", "--format", "torchscript")[2]


def test_schedules_beside_a_game_are_none_of_its_files(place, capsys):
    (place / "games3").mkdir()
    assert run(capsys, "new", "acorn", "--folder", "games3")[0] == 0
    game, schedules = place / "games3/acorn.py", place / "games3/acorn_sizes.py"
    game.write_text(game.read_text() + f"\n# {uuid4()}\n")  # no other run of this test has checked these files
    schedules.write_text("from gpu_vecenv import Curriculum\ncurriculum = Curriculum\n")
    assert run(capsys, "check", str(game), "--checks", "G01", "G06")[0] == 0
    named = ["--schedules", f"{schedules}:curriculum"]
    code, _, errors = run(capsys, "train", str(game), *SHORT, *named, "--out", "runs/scheduled")
    assert code == 0 and "has not been checked" not in errors
    moved = schedules.rename(place / "acorn_sizes.py")
    assert run(capsys, "evaluate", "runs/scheduled", "--episodes", "2")[0] == 0
    again = ["train", "--resume", "runs/scheduled", "--total-steps", "32"]
    assert run(capsys, *again, "--schedules", f"{moved}:curriculum")[0] == 0


def test_errors_of_a_run_that_resumes_name_its_own_help_and_folder(printed, capsys):
    assert run(capsys, "train", "--resume", "runs/tag", "--total-steps", "-1")[2].endswith(
        "Help: gpu-vecenv train --resume runs/tag --help\n"
    )
    for part in ("runs/tag:1", "runs/tag/checkpoints"):
        code, _, errors = run(capsys, "train", "--resume", part)
        assert code == 2 and errors.endswith("with all members: gpu-vecenv train --resume runs/tag\n")


def test_training_a_game_without_device_code_says_what_is_missing(place, capsys):
    (place / "games4").mkdir()
    assert run(capsys, "new", "acorn", "--folder", "games4")[0] == 0
    (place / "games4/acorn.cu").unlink()
    code, _, errors = run(capsys, "train", "games4/acorn.py", *SHORT, "--out", "runs/none")
    assert code == 2 and "acorn.cu does not exist; expected reset, step and observe there" in errors


def test_a_run_from_elsewhere_loads_no_code(printed, place, tmp_path):
    settings = (place / "runs/my own/settings.json").read_text()
    (tmp_path / "settings.json").write_text(settings.replace("/acorn.py", "/./acorn.py"))
    forget()
    with pytest.raises(GameFileNeededError, match="no run was begun here with this file"):
        load_game_of_run(tmp_path)
    assert "acorn" not in sys.modules
    (tmp_path / "settings.json").write_text(settings)
    load_game_of_run(tmp_path / "checkpoints" / "iteration-1")
    assert "acorn" in GAMES


@pytest.mark.parametrize("text", ["[]", "{", '{"game_file": 3}', '{"game_file": {"files": {}}}'])
def test_damaged_settings_are_refused(text, printed, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match="damaged or of another version"):
        load_game_of_run(tmp_path)


def test_a_replay_whose_game_has_changed_is_played_by_the_printed_command_alone(printed, place, capsys):
    # With a configuration of its own: processes that test at the same time share the cache folder.
    record = "replay record games/acorn.py --length 31 --device cpu --out own".split()
    assert run(capsys, *record)[0] == 0
    path = place / "games/acorn.py"
    before = path.read_text()
    path.write_text(before + "\n")
    try:
        code, output, errors = run(capsys, "replay", "play", "own")
        assert (code, output) == (2, "") and "acorn.py has changed since" in errors and "acorn" not in sys.modules
        (command,) = HINT.findall(errors)
        assert run(capsys, *shlex.split(command)[1:])[0] == 0
    finally:
        path.write_text(before)


def test_a_replay_from_elsewhere_asks_for_the_file_of_its_game(printed, place, capsys, tmp_path):
    (recorded,) = place.glob("replays/acorn-*.replay")
    path = tmp_path / "other.replay"
    dataclasses.replace(Replay.load(recorded), sources="0" * 64).save(path)  # of rules that never ran here
    code, output, errors = run(capsys, "replay", "html", str(path))
    assert (code, output) == (2, "") and errors.endswith("declares it, --game my_game.py\n") and len(errors) < 300
    assert "acorn" not in sys.modules


def test_without_the_compiler_of_pages_the_hint_says_what_to_install(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ziglang", None)
    code, output, _ = run(capsys, "train", "tag_gridworld", *SHORT, "--grid", "4", "--out", "runs/no_pages")
    assert code == 0
    assert re.search(r"gpu-vecenv web tag_gridworld .*\n +which needs ziglang: .* -m pip install ziglang\n", output)
