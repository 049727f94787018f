"""What the tests of several adapters share: recording wrappers, examples that learn."""

import re
from pathlib import Path

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
    found = re.search(pattern, done.stdout)
    assert done.returncode == 0 and found is not None, done.stdout + done.stderr
    before, after = map(float, found.groups())
    return before, after
