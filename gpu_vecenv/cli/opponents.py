"""Options of ``gpu-vecenv train`` for opponents in a share of the environments."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_vecenv.cli.actors import HOW, Player, distinct_names
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.opponents_config import MEMBERS, MOST, SNAPSHOTS, Opponent, OpponentsConfig, Sampling

DEFAULTS = OpponentsConfig()
# Fields of OpponentsConfig -> options; all others have the same name.
OPTIONS = {
    "members": "opponents",
    "share": "opponents_share",
    "sampling": "opponents_sampling",
    "num_ranges": "opponents_ranges",
}
OF_SNAPSHOTS, NO_SNAPSHOTS = ("num_snapshots", "snapshot_interval", "snapshot_gain"), "no opponent is a snapshot"


@dataclass(frozen=True, kw_only=True)
class OpponentOptions:
    """Opponents in a share of the environments."""

    # snapshots, random, still, RUN, or for a role alone ROLE=random, ROLE=still, ROLE=RUN or ROLE=file.py:function, any
    # of them; none: no opponents
    opponents: tuple[str, ...] = ()
    opponents_share: float = param(DEFAULTS.share, low=0, high=1)  # share of the environments with opponents, 0 to 1
    opponents_sampling: Sampling = DEFAULTS.sampling  # hard: those that win more often; even: even matches; or uniform
    # groups of environments, each with one opponent at a time
    opponents_ranges: int = param(DEFAULTS.num_ranges, low=1)
    num_snapshots: int = param(DEFAULTS.num_snapshots, low=1)  # snapshots that are kept
    snapshot_interval: int = param(DEFAULTS.snapshot_interval, low=1, high=MOST)  # iterations between two snapshots
    # also a snapshot once the estimated probability to win against the newest one, 0 to 1, exceeds this; None: never
    snapshot_gain: float | None = param(None, low=0, high=1)
    reassign_interval: int = param(DEFAULTS.reassign_interval, low=1, high=MOST)  # least iterations of an opponent

    def __post_init__(self) -> None:
        check_fields(self)

    def config(self, game: Env) -> OpponentsConfig | None:
        """The opponents; None without any.

        Raises:
            ConfigError: One is not among the game's, or cannot be imported or loaded.
        """
        if not self.opponents:
            return None
        names = [field.name for field in dataclasses.fields(OpponentsConfig)]
        values = {name: getattr(self, OPTIONS.get(name, name)) for name in names}
        with errors_name_options():
            return OpponentsConfig(**{**values, "members": _members(game, self.opponents)})

    def check_used(self, defaults: Sequence[OpponentOptions]) -> None:
        """Refuse options that would do nothing.

        Args:
            defaults: What the options may have been without being given.

        Raises:
            ConfigError: One is given without the opponents that it is for.
        """
        if SNAPSHOTS in self.opponents:
            return
        names = tuple(option.name for option in dataclasses.fields(self) if option.name != "opponents")
        lacks, wanted, idle = "there are no opponents", "give --opponents values", names
        if self.opponents:
            lacks, wanted, idle = NO_SNAPSHOTS, f"add {SNAPSHOTS} to --opponents", OF_SNAPSHOTS
        for name in idle:
            if (value := getattr(self, name)) not in [getattr(own, name) for own in defaults]:
                raise ConfigError(f"{name} is {value}, but {lacks}; {wanted}, or leave it out")

    @classmethod
    def of_config(cls, config: OpponentsConfig) -> OpponentOptions:
        """The options that make a configuration without opponents of one's own."""
        values = {OPTIONS.get(name, name): value for name, value in config.description().items()}
        return cls(**{**values, "opponents": config.names})

    def settings(self) -> dict[str, Any]:
        """What ``of_settings`` takes; paths are whole, so that any folder can be the present one."""
        return {**dataclasses.asdict(self), "opponents": [_whole(text) for text in self.opponents]}

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> OpponentOptions:
        """The options of a run.

        Raises:
            ConfigError: They have unknown keys, or wrong values.
        """
        if unknown := sorted(set(settings) - {option.name for option in dataclasses.fields(cls)}):
            raise ConfigError(
                f"the run's opponents have unknown keys {unknown}; install the version that began the run"
            )
        return cls(**settings)


@contextlib.contextmanager
def errors_name_options() -> Iterator[None]:
    """A ConfigError names options of the command line in place of fields of ``OpponentsConfig``."""
    try:
        yield
    except ConfigError as error:
        text = re.sub(r"OpponentsConfig\.(\w+)", lambda match: OPTIONS.get(match[1], match[1]), str(error))
        raise type(error)(text) from error


def _whole(text: str) -> str:
    return text if text in MEMBERS else Player.parsed("opponents", text).text


def _members(game: Env, texts: Sequence[str]) -> tuple[str | Opponent, ...]:
    """What the values of --opponents stand for."""
    players = {text: Player.parsed("opponents", text, f"{SNAPSHOTS}, {HOW}") for text in texts if text not in MEMBERS}
    names = dict(zip(players, distinct_names(list(players.values())), strict=True))
    return tuple(
        Opponent(name=names[text], actors=players[text].actors(game, device="cpu")) if text in players else text
        for text in texts
    )
