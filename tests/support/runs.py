"""Run folders as an interruption leaves them."""

import re
import shutil

import pytest


def cut_run(whole, cut, last):
    """A copy of a run as it was after iteration ``last``."""
    shutil.copytree(whole, cut)
    for path in (cut / "checkpoints").iterdir():
        if (found := re.search(r"iteration-(\d+)", path.name)) and int(found[1]) > last:
            path.unlink()
    (cut / "evaluation.json").unlink()


def resume_elsewhere(command, run):
    """Resume a run from another working folder, to which relative paths in its settings would be wrong."""
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        code, _, errors = command("train", "--resume", run)
    assert (code, errors) == (0, [])
