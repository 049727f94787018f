"""``gpu-vecenv crossplay``: the policies of several runs against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from gpu_vecenv.cli.actors import Player
from gpu_vecenv.cli.options import PROGRAM, DeviceOptions, load_run_policy
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, counted
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.progress import ProgressDisplay
from gpu_vecenv.tables import FittedTable
from gpu_vecenv.train.crossplay import (
    CrossPlay,
    Entry,
    SelfAndCrossPlay,
    actors_of_side,
    check_ratings,
    crossplay,
    ratings,
    rows_and_columns,
    sides_of,
)
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.game_policy import GamePolicy, populations_of_run, run_and_member
from gpu_vecenv.train.role_view import agents_of, sides_with_returns
from gpu_vecenv.train.run_folder import run_folders, run_of_checkpoint


@dataclass(frozen=True, kw_only=True)
class Crossplay(DeviceOptions):
    """Play runs against each other: a matrix of mean returns.

    The policies of each run play with and against those of each other run. There is a matrix for each role; where
    agents of one role are on both sides, as in connect_four, also one for the row's and one for the column's.

    RUN is the folder of a run, one of its checkpoints, a folder of several seeds, which stands for all of its runs,
    random, still, or for a role alone runner=OTHER_RUN, runner=random, runner=still or runner=file.py:function. A run
    with populations stands for all of their members, RUN:2 for the members 2. The game is configured as in the first
    RUN or ROLE=RUN, of which there is at least one, with the shared fields of its checkpoint.
    """

    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN...")]]  # at least one, see above
    episodes: int = param(1000, low=2)  # episodes of each pairing
    roles: tuple[str, ...] = ()  # roles or agents that the row plays; none: the first role, or the first agent
    ratings: bool = False  # also rate the entries of each side that has several, by openskill
    greedy: bool = False  # take the most likely action instead of a sample
    best: bool = False  # the best checkpoints instead of the newest
    num_envs: int = param(1000, low=1)  # environments that are stepped at a time
    seed: int = 1  # seed of the random streams
    json: bool = False  # print JSON instead of tables
    out: Path | None = None  # file that receives the result as JSON; None: no file
    game: str | None = None  # file that declares the game; None: the run's, unless it has changed

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.runs)) < max(len(self.runs), 1):
            raise ConfigError(
                f"runs is {list(self.runs)}; expected one or more, each once: {PROGRAM} crossplay one other"
            )

    def __call__(self) -> None:
        """Play, print the result and write it."""
        if self.out is not None:
            check_output("out", self.out)
        if self.ratings:
            check_ratings()
        entries, runs, first = self._entries()
        how: dict[str, Any] = {"driver": self.driver, "arrays": first.shared}
        env = VecEnv(first.game, min(self.num_envs, self.episodes), first.device, **how)
        if self.ratings:
            self._check_rated(env, entries)
        options: dict[str, Any] = {"roles": self.roles, "runs": runs, "greedy": self.greedy, "seed": self.seed}
        with ProgressDisplay("crossplay") as on_progress:
            found = crossplay(env, entries, episodes=self.episodes, on_progress=on_progress, **options)
        rated = ratings(found) if self.ratings else None
        said = {"game": first.game.name(), "greedy": self.greedy, **found.as_dict()}
        if rated is not None:
            keys = ("mu", "sigma")
            said["ratings"] = {
                side: {name: dict(zip(keys, one, strict=True)) for name, one in of_side.items()}
                for side, of_side in rated.items()
            }
        text = dumps(said, indent=1)
        if self.json:
            print(text)
        else:
            _print_tables(first.game, found, rated)
        if self.out is not None:
            replace_file(self.out, f"{text}\n".encode())

    def _check_rated(self, env: VecEnv, entries: Mapping[str, Entry]) -> None:
        """Raise ConfigError if each side has one entry."""
        sides = rows_and_columns(env, entries, self.roles)
        if max(map(len, sides)) > 1:
            return
        alone = " and ".join(f"{'+'.join(own)} of {name}" for side in sides for name, own in side.items())
        raise ConfigError(
            f"--ratings compare the entries of a side, and {alone} are alone on theirs; expected two entries or more "
            f"for one side, such as another run or random, or no --ratings"
        )

    def _entries(self) -> tuple[dict[str, Entry], dict[str, str], GamePolicy]:
        """Name -> what plays, name -> its run, and the policies of the first run, also if it plays a role alone."""
        found = {text: Player.parsed("runs", text) for text in self.runs}
        loaded = {text: self._loaded(text) for text, player in found.items() if player.is_run and not player.role}
        runs = [(text, player) for text, player in found.items() if player.is_run]
        if not runs:
            raise ConfigError(f"runs is {list(self.runs)}; expected at least one RUN or ROLE=RUN, whose game is played")
        first_text, player = runs[0]
        of_first = loaded.get(first_text) or {first_text: self._policies_of(player.source)}
        first = next(policy for policy in of_first.values() if isinstance(policy, GamePolicy))
        entries, run_of = dict[str, Entry](), dict[str, str]()
        for text, player in found.items():
            if text in loaded:
                entries |= loaded[text]
                run_of |= {name: _run_of(name, entry) for name, entry in loaded[text].items()}
            else:
                policies = first if text == first_text else None
                entries[text] = player.actors(first.game, policies=policies, best=self.best, device=self.device)
        return entries, run_of, first

    def _loaded(self, source: str) -> dict[str, GamePolicy | Mapping[str, RolePolicy]]:
        """Name -> what plays, of a run, or of each of a folder of several."""
        run, member = run_and_member(source)
        entries = dict[str, GamePolicy | Mapping[str, RolePolicy]]()
        for folder in run_folders(run):
            entries |= self._of_run(folder, member)
        return entries

    def _of_run(self, run: Path, member: int | None) -> dict[str, GamePolicy | Mapping[str, RolePolicy]]:
        """Name -> what plays, of one run: the member of this number, or all of its members."""
        if member is not None:
            return {f"{run}:{member}": self._policies_of(f"{run}:{member}")}
        populations = populations_of_run(run, self.best)
        if not populations:
            return {str(run): self._policies_of(str(run))}
        loaded = {k: self._policies_of(f"{run}:{k}") for k in range(max(populations.values()))}
        return {f"{run}:{k}": one if k == 0 else self._new(one, populations, k) for k, one in loaded.items()}

    def _policies_of(self, run: str) -> GamePolicy:
        """Of a run, or of a member of it."""
        return load_run_policy(Path(run), game=self.game, best=self.best, device=self.device)

    def _new(self, policy: GamePolicy, populations: Mapping[str, int], number: int) -> Mapping[str, RolePolicy]:
        """Of the members of a number those sides that differ from members before."""
        game, entry = policy.game, dict[str, RolePolicy]()
        new = {
            agent for name, count in populations.items() if count > number for agent in agents_of(game, name.split("+"))
        }
        for side in sides_of(game, self.roles):
            if new & set(agents_of(game, side)):
                entry |= actors_of_side(game, policy.policies, side) or {}
        return entry


def _run_of(name: str, entry: GamePolicy | Mapping[str, RolePolicy]) -> str:
    """The run that trained an entry with this name; members of a population that is alone do not meet: one each."""
    path, member = run_and_member(name)
    run = run_of_checkpoint(path).resolve()
    policies = entry.policies if isinstance(entry, GamePolicy) else entry
    meets_others = len({*map(id, policies.values())}) > 1
    return str(run) if member is None or meets_others else f"{run}:{member}"


def _print_tables(game: Env, found: CrossPlay, rated: Mapping[str, Mapping[str, tuple[float, float]]] | None) -> None:
    console, numbers = Console(), {name: k + 1 for k, name in enumerate(dict.fromkeys([*found.rows, *found.columns]))}
    rows, columns = found.sides
    each = counted(found.episodes, "episode")
    _print_line(console, f"{game.name()}: mean returns of {each} each; rows play {rows}, columns {columns}")
    always_zero = set(game.layout.roles) - {*sides_with_returns(game)}
    for side, matrix in found.returns.items():
        if side in always_zero:
            continue
        _print_line(console, f"return, {side}")
        table = FittedTable("", rows, *(str(numbers[name]) for name in found.columns), left=[rows])
        for name, means, errors in zip(found.rows, matrix.mean, matrix.standard_error, strict=True):
            cells = (f"{mean:.2f} ± {error:.2f}" for mean, error in zip(means, errors, strict=True))
            table.add_row(str(numbers[name]), name, *cells)
        console.print(table)
        if side in found.self_and_cross_play:
            _print_line(console, f"{side}: {_in_words(found.self_and_cross_play[side])}")
    for name in (name for name in found.columns if name not in found.rows):
        _print_line(console, f"column {numbers[name]}: {name}")
    for side, of_side in (rated or {}).items():
        if not of_side:
            _print_line(console, f"ratings by openskill: {side} has none, as there is one entry to rate")
            continue
        _print_line(console, f"ratings by openskill: {side}, best first")
        table = FittedTable("", side, "rating", left=[side])
        for name, (mu, sigma) in sorted(of_side.items(), key=lambda item: -item[1][0]):
            table.add_row(str(numbers[name]), name, f"{mu:.1f} ± {sigma:.1f}")
        console.print(table)


def _in_words(found: SelfAndCrossPlay) -> str:
    def number(value: float, error: float | None) -> str:
        return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"

    own = number(found.self_play, found.self_play_standard_error)
    others = number(found.cross_play, found.cross_play_standard_error)
    gap = number(found.gap, found.gap_standard_error)
    return f"self-play {own}, cross-play {others}, difference {gap} (means over {found.runs} runs)"


def _print_line(console: Console, line: str) -> None:
    console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
