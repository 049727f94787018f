"""Kills while checkpoints are written: the files left can be loaded and are complete."""

import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_vecenv.train.checkpoint import CheckpointFolder, load_checkpoint, save_checkpoint
from reliability.experiment import Experiment, Metrics, said

SIZE = 200_000  # elements of a checkpoint's large tensor
LEAST_DRAFTS = 3  # kills that must have hit the middle of a save


@dataclass(kw_only=True)
class Saves(Experiment):
    """SIGKILL a process that saves checkpoints in a loop, at random instants, and load the files it left."""

    count: int = 200
    """Kills."""
    what: Literal["folder", "file"] = "folder"
    """Whether it saves iterations and the best one in a folder, or one file repeatedly."""

    depends_on = ("gpu_vecenv/train/checkpoint.py",)

    def measure(self) -> Metrics:
        torch.set_num_threads(1)  # the saving process is a fork of this one: its pools would have no threads
        memory = (
            "/dev/shm" if os.path.isdir("/dev/shm") else None
        )  # no waiting for a disk: kills then hit all of a save
        with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
            warnings.simplefilter("error")  # a skipped iteration warns
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork
            return self._kill(Path(folder))

    def _kill(self, place: Path) -> Metrics:
        chance = random.Random(self.seed)
        folder = CheckpointFolder(place, keep=2) if self.what == "folder" else None
        self.save(place, 0)
        start = time.perf_counter()
        self.save(place, 1)
        duration = time.perf_counter() - start
        kills = drafts = versions = most = 0
        last = 1
        least = min(self.count, LEAST_DRAFTS)
        while kills < self.count or (drafts < least and kills < 10 * self.count + 200):
            self._kill_once(place, last, duration * chance.uniform(1, 8))
            kills += 1
            left = [place / name for name in os.listdir(place) if name.endswith(".draft")]
            drafts, most = drafts + len(left), max(most, len(os.listdir(place)))
            try:
                if folder:
                    version = whole(*folder.load())
                    complete = folder.iterations()
                    self.check(
                        complete in ([version - 1, version], [version - 2, version - 1, version]),
                        f"kill {kills}: the newest is {version}, there are {complete}",
                    )
                    best = whole(*load_checkpoint(place / "best.safetensors"))  # which is written first
                    self.check(best in (version, version + 1), f"kill {kills}: the best is {best} at {version}")
                    folder.clean()
                else:
                    version = whole(*load_checkpoint(place / "one"))
                    self.check(len(os.listdir(place)) == 1 + len(left), f"kill {kills}: {os.listdir(place)}")
                    for draft in left:
                        draft.unlink()
            except (ValueError, OSError, Warning) as error:
                self.failures.append(f"kill {kills}, after version {last}: {error!r}")
                return {"kills": kills}  # no checkpoint to continue from
            self.check(version >= last + 2, f"kill {kills}: two saves after {last} had returned, but it is {version}")
            litter = [name for name in os.listdir(place) if name.endswith(".draft")]
            self.check(not litter and len(left) <= 1, f"kill {kills}: drafts {left}, not removed {litter}")
            versions, last = versions + version - last, version
        self.check(drafts >= least, f"only {drafts} of {kills} kills hit a save")
        return {"kills": kills, "what": self.what, "hit_a_save": drafts, "saves": versions, "most_files": most}

    def save(self, place: Path, version: int) -> None:
        """A checkpoint whose tensors contain its version."""
        tensors = {"a": torch.full((SIZE,), float(version)), "b": torch.arange(9) + version}
        if self.what == "folder":
            CheckpointFolder(place, keep=2).save(version, tensors, {"v": version}, best=True)
        else:
            save_checkpoint(place / "one", tensors, {"v": version})

    def plant(self) -> Metrics:
        return {"files that are written in place": said(InPlace(count=20))}

    def _kill_once(self, place: Path, last: int, delay: float) -> None:
        """Fork a process that saves in a loop, and kill it after a delay from its third save on."""
        begun, begin = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for version in range(last + 1, 10**8):
                    os.write(begin, b"!")
                    self.save(place, version)
            finally:
                os._exit(1)
        os.close(begin)
        try:
            for _ in range(3):
                if os.read(begun, 1) != b"!":
                    raise OSError("the saving process has ended by itself")
            start = time.perf_counter()
            while time.perf_counter() < start + delay:  # the kills hit different moments of a save
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(begun)


@dataclass(kw_only=True)
class InPlace(Saves):
    what: Literal["folder", "file"] = "file"

    def save(self, place: Path, version: int) -> None:
        """Saves the same bytes without a draft file."""
        with tempfile.TemporaryDirectory() as elsewhere:
            super().save(Path(elsewhere), version)
            content = (Path(elsewhere) / "one").read_bytes()
        with (place / "one").open("wb", buffering=0) as file:  # in small pieces, so that a kill hits the middle
            for at in range(0, len(content), 256):
                file.write(content[at : at + 256])


def whole(tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> int:
    """The version of a checkpoint; raises ValueError if its tensors have several versions."""
    version = manifest["v"]
    full = tensors["a"].shape == (SIZE,) and bool(tensors["a"].eq(version).all())
    if not full or not tensors["b"].equal(torch.arange(9) + version):
        raise ValueError(f"the manifest says version {version}, the tensors do not")
    return int(version)
