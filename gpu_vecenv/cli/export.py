"""``gpu-vecenv export``: policies of a run for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_vecenv.cli.options import Command, Run, load_run_policy
from gpu_vecenv.declare.config import check_fields
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output
from gpu_vecenv.train.export import NUM_OBSERVATIONS, export
from gpu_vecenv.train.game_policy import run_and_member
from gpu_vecenv.train.model_card import export_hub


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write policies of a run as ONNX, TorchScript or for the hub.

    The last is a folder for the Hugging Face hub, with a model card.
    """

    run: Run  # folder of the run, or one of its checkpoints
    format: Literal["onnx", "torchscript", "hub"] = "onnx"  # one file for each policy, or a folder with a model card
    # folder for the files; None: one with the format's name in that of the run, or beside the checkpoint
    out: Path | None = None
    best: bool = False  # the best checkpoint instead of the newest
    game: str | None = None  # file that declares the game; None: the run's, unless it has changed

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self) -> None:
        """Write the files."""
        path, member = run_and_member(self.run)
        run = path if path.is_dir() else None
        name = self.format if member is None else f"{self.format}-{member}"
        folder = self.out or (path if run is not None else path.absolute().parent) / name
        check_output("out", folder, folder=True)
        policy = load_run_policy(self.run, game=self.game, best=self.best, device="cpu")
        if self.format == "hub":
            for written in export_hub(policy, folder, run if member is None else None):  # its numbers are of members 0
                print(printable(f"wrote {written}"))
            return
        for file in export(policy, folder, self.format):
            compared = f"{NUM_OBSERVATIONS:,} observations, largest difference {file.difference:.1e}"
            print(printable(f"wrote {file.path} ({compared})"))
