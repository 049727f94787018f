"""``gpu-vecenv evaluate``: returns and episode lengths of trained policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_vecenv.cli.options import DeviceOptions, Run, load_run_policy
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.progress import ProgressDisplay
from gpu_vecenv.train.evaluation import RolePolicy, evaluate, replaced
from gpu_vecenv.train.evaluation_tables import evaluation_table
from gpu_vecenv.train.game_policy import GamePolicy, load_policy
from gpu_vecenv.train.role_view import role_of


@dataclass(frozen=True, kw_only=True)
class Evaluate(DeviceOptions):
    """Play episodes with the policies of a run and print the mean returns."""

    run: Run  # folder of the run, or one of its checkpoints
    episodes: int = param(1000, low=1)  # number of episodes
    greedy: bool = False  # take the most likely action instead of a sample
    best: bool = False  # the best checkpoint instead of the newest
    opponents: tuple[str, ...] = ()  # other policies for some roles or agents: tagger=random or tagger_0=runs/other
    num_envs: int = param(1000, low=1)  # environments
    seed: int = 1  # of the random streams
    json: bool = False  # print JSON instead of a table
    out: Path | None = None  # file that receives the JSON
    game: str | None = None  # file that declares the game, unless it is a bundled one

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self) -> None:
        """Print the result."""
        if self.out is not None:
            check_output("out", self.out)
        loaded = load_run_policy(self.run, game=self.game, best=self.best, device=self.device)
        role_policies: dict[str, RolePolicy] = dict(loaded.policies)
        known = [*loaded.game.layout.present_roles, *loaded.game.layout.agent_names]
        for name, source in role_runs("opponents", self.opponents).items():
            if name not in known:
                raise ConfigError(f"unknown role {name!r} in opponents; the roles are {known}")
            others: dict[str, RolePolicy] = {name: None}
            if source != "random":
                options = {"best": self.best, "device": loaded.device}
                others = dict(load_other_run("opponents", loaded.game, name, source, **options).policies_of(name))
            role_policies = replaced(loaded.game, role_policies, others)
        env = VecEnv(loaded.game, min(self.num_envs, self.episodes), loaded.device, driver=self.driver)
        how: dict[str, Any] = {"greedy": self.greedy, "seed": self.seed}
        with ProgressDisplay("evaluate") as on_progress:
            results = evaluate(env, role_policies, self.episodes, on_progress=on_progress, **how)
        text = dumps({"game": loaded.game.name(), "run": str(self.run), "greedy": self.greedy, **results}, indent=1)
        if self.json:
            print(text)
        else:
            note = "; ".join(["most likely actions"] * self.greedy + list(self.opponents))
            Console().print(evaluation_table(loaded.game, {str(self.run): results}, note))
        if self.out is not None:
            replace_file(self.out, f"{text}\n".encode())


def role_runs(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """Role -> run, of ROLE=RUN values of an option."""
    runs = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if len(runs) < len(pairs):
        raise ConfigError(f"{option} is {' '.join(pairs)}; expected ROLE=RUN for each role, every role once")
    return runs


def load_other_run(option: str, game: Env, name: str, source: str, **options: Any) -> GamePolicy:
    """The policies of another run of the same game, where a role, or that of an agent, acts alike."""
    loaded, role = load_policy(source, **options), role_of(game, name)
    if loaded.game.name() != game.name():
        raise ConfigError(f"{option}: {source} is a run of {loaded.game.name()}; expected one of {game.name()}")
    expected, found = (
        (env.layout.observation.shapes[role], env.layout.action.sizes[role]) if env.layout.roles.get(role) else None
        for env in (game, loaded.game)
    )
    if expected != found:
        raise ConfigError(f"{option}: {name} of {source} has observations and actions {found}; expected {expected}")
    return loaded
