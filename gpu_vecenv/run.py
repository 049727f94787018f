"""A training run in a folder: curves, checkpoint, evaluation. What ``gpu-vecenv train`` does, callable."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from gpu_vecenv.ppo import Trainer

CURVE = "learning_curve.png"


class RunLog:
    """Writes each iteration's figures to ``metrics.csv`` and, where tensorboard is installed, as its events."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, list[dict[str, float]]()
        self._file = (folder / "metrics.csv").open("w", newline="")
        self._csv: csv.DictWriter[str] | None = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._events: Any = SummaryWriter(str(folder / "tensorboard"))
        except ImportError:
            self._events = None

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Add one iteration."""
        self.rows.append(dict(figures))
        if self._csv is None:
            self._csv = csv.DictWriter(self._file, list(figures))
            self._csv.writeheader()
        self._csv.writerow(figures)
        self._file.flush()
        if self._events is not None:
            for name, value in figures.items():
                group = "losses" if "loss" in name or name in ("entropy", "approximate_kl", "clip_share") else "charts"
                self._events.add_scalar(f"{group}/{name}", value, int(figures["env_steps"]))

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def train_with_progress(trainer: Trainer, log: RunLog, console: Console) -> None:
    """Train to the end; the bar shows agent-steps/s, returns and losses."""
    columns = (
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[figures]}", table_column=Column(ratio=1)),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=trainer.num_iterations, figures="")

        def show(figures: dict[str, float]) -> None:
            log(figures)
            returns = " ".join(
                f"{k.removeprefix('return_')} {v:.2f}" for k, v in figures.items() if k.startswith("return_")
            )
            text = (
                f"{figures['agent_steps_per_s'] / 1e3:,.0f}k agent-steps/s  return: {returns}  "
                f"losses: policy {figures['policy_loss']:.3f} value {figures['value_loss']:.2f}"
            )
            progress.update(task, completed=figures["iteration"], figures=text)

        before, trainer.on_iteration = trainer.on_iteration, show
        try:
            trainer.train()
        finally:
            trainer.on_iteration = before


def evaluations(trainer: Trainer, episodes: int) -> dict[str, dict[str, float]]:
    """Every pairing of trained and random roles that tells something: all random, one role trained, all trained."""
    roles = list(trainer.env.game.roles)
    pairings: dict[str, Sequence[str]] = {"all random": roles}
    if len(roles) > 1:
        for role in roles:
            others = [other for other in roles if other != role]
            pairings[f"{role} trained"] = others
    pairings["all trained"] = []
    return {name: trainer.evaluate(episodes, random_roles=random) for name, random in pairings.items()}


def evaluation_table(trainer: Trainer, results: Mapping[str, Mapping[str, float]]) -> Table:
    """The results side by side."""
    game, episodes = trainer.env.game, next(iter(results.values()))["episodes"]
    table = Table(title=f"{game.name()}: {episodes:.0f} episodes each; who is not named as trained acts at random")
    table.add_column("policies", no_wrap=True)
    for heading in (game.terminated_means, "ticks", *(f"return, {role}" for role in game.roles)):
        table.add_column(heading, justify="right")
    for name, figures in results.items():
        returns = [f"{figures[f'return_{role}']:.2f}" for role in game.roles]
        table.add_row(name, f"{figures['terminated_share']:.1%}", f"{figures['episode_length']:.1f}", *returns)
    return table


def plot_curve(rows: Sequence[Mapping[str, float]], roles: Sequence[str], outcome: str, path: Path) -> bool:
    """Draw returns and outcome over env-steps as a PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    finished = [row for row in rows if row["episodes"] > 0]
    steps = [row["env_steps"] for row in finished]
    figure = Figure(figsize=(7, 6), layout="constrained")
    returns, ended = figure.subplots(2, 1, sharex=True)
    for role in roles:
        returns.plot(steps, [row[f"return_{role}"] for row in finished], label=role)
    returns.set_ylabel("return per agent and episode")
    returns.legend()
    ended.plot(steps, [100 * row["terminated_share"] for row in finished], color="tab:green")
    ended.set_ylabel(f"episodes in which\n{outcome} (%)")
    ended.set_ylim(-3, 103)
    ended.set_xlabel("env-steps (all replicas)")
    for axes in (returns, ended):
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure)
    figure.savefig(path)
    return True


def run(trainer: Trainer, folder: Path, *, episodes: int = 1000) -> dict[str, dict[str, float]]:
    """Train to the end, evaluate, and leave curve, figures, checkpoint and evaluation in ``folder``.

    Returns:
        The evaluations, by name: all roles random, each role trained against random others, all trained.
    """
    console = Console()
    env, config = trainer.env, trainer.config
    console.print(
        f"{env.game!r}\n{env.num_envs} replicas x {env.num_agents} agents on {env.device}, "
        f"{trainer.num_iterations} iterations of {config.num_steps} ticks, run folder {folder}",
        highlight=False,
    )
    log = RunLog(folder)
    try:
        train_with_progress(trainer, log, console)
    finally:
        log.close()
    checkpoint = trainer.save(folder / "policy.safetensors")
    results = evaluations(trainer, episodes)
    (folder / "evaluation.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(evaluation_table(trainer, results))
    drawn = plot_curve(log.rows, list(env.game.roles), env.game.terminated_means, folder / CURVE)
    curve = str(folder / CURVE) if drawn else 'not drawn: matplotlib is missing (pip install "gpu_vecenv[train]")'
    for what, where in (
        ("learning curve", curve),
        ("checkpoint", str(checkpoint)),
        ("evaluation", str(folder / "evaluation.json")),
        ("figures", str(folder / "metrics.csv")),
    ):
        console.print(f"{what:15} {where}", highlight=False, soft_wrap=True)
    return results
