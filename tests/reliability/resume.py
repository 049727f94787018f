"""Kills during training: resumed runs are bitwise equal to uninterrupted ones."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from kill_and_resume import kill_and_resume

from reliability.experiment import Experiment, Metrics


@dataclass(kw_only=True)
class Resume(Experiment):
    """SIGKILL a training run repeatedly, resume it, and compare it bitwise with an uninterrupted run."""

    count: int = 50
    """Number of kills."""
    game: str = "tag_gridworld"
    """A registered name, or the file that declares it."""

    def measure(self) -> Metrics:
        with tempfile.TemporaryDirectory() as folder:
            self.failures += kill_and_resume(Path(folder), self.count, self.game, self.device, self.seed)
        return {"kills": self.count, "game": self.game, "differences": len(self.failures)}
