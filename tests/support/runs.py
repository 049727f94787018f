"""Run folders as an interruption leaves them."""

import re
import shutil


def cut_run(whole, cut, last):
    """A copy of a run as it was after iteration ``last``."""
    shutil.copytree(whole, cut)
    for path in (cut / "checkpoints").iterdir():
        if (found := re.search(r"iteration-(\d+)", path.name)) and int(found[1]) > last:
            path.unlink()
    (cut / "evaluation.json").unlink()
