"""What the tests of several adapters share: recording wrappers, examples that learn."""

import os
import re
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
from gymnasium.vector import VectorWrapper

from support.processes import run_child

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Recorder(VectorWrapper):
    """Keeps the actions and outputs of the last step, to compare them with those of the adapter around it."""

    def step(self, actions):
        self.actions, self.outputs = actions, super().step(actions)
        return self.outputs


class TerminatesAndTruncates(VectorWrapper):
    """Every row terminates and is truncated at every step: learners must not bootstrap."""

    def step(self, actions):
        obs, rewards, terminations, _, info = super().step(actions)
        return obs, rewards, torch.ones_like(terminations), torch.ones_like(terminations), info


def run_example(script: str, pattern: str, folder: Path) -> tuple[float, float]:
    """Mean returns before and after training, which ``pattern`` finds in what the example prints."""
    done = run_child("-W", "ignore", EXAMPLES / script, folder=folder, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return _means(pattern, done.stdout)


def run_example_here(script: str, pattern: str, folder: Path) -> tuple[float, float]:
    """The same in this process, which has imported the library: in a new one that takes longer than the training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _means(pattern, output_here(EXAMPLES / script, folder=folder))


def output_here(script: Path, *arguments: object, folder: Path) -> str:
    """What a script prints that runs in this process, as ``__main__``, in ``folder``; its errors are raised."""
    before, said = Path.cwd(), StringIO()
    words, paths = [str(script), *map(str, arguments)], [str(script.parent), *sys.path]
    os.chdir(folder)
    try:
        with patch.object(sys, "argv", words), patch.object(sys, "path", paths), redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        os.chdir(before)
    return said.getvalue()


def _means(pattern: str, said: str) -> tuple[float, float]:
    found = re.search(pattern, said)
    assert found is not None, said
    before, after = map(float, found.groups())
    return before, after
