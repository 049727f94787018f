"""The caller's configuration of opponents: which share of the environments plays against what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpu_vecenv.declare.config import check_fields, param, with_known_options
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.fixed_policy import RANDOM, STILL, WORDS

SNAPSHOTS = "snapshots"
MEMBERS = (SNAPSHOTS, RANDOM, STILL)
MOST = 2**31 - 1  # iterations
Sampling = Literal["hard", "even", "uniform"]


@with_known_options
@dataclass(frozen=True, kw_only=True)
class Opponent:
    """An opponent of one's own: policies or scripts that play some agents.

    Args:
        name: In metrics and checkpoints.
        actors: Role or agent -> its actor: a ``Policy``, such as one of a run from ``load_policy``, "random" or None,
            "still", the no-op that the game declares, or a function from observations (num_envs, count, *shape) to
            actions of their action space. Several names may be joined by "+".
            A function keeps no state from call to call, which checkpoints would lack, and draws no random numbers. On
            a GPU it becomes part of a CUDA graph: torch operations alone, without host reads.

    Raises:
        ConfigError: The name is empty or that of another kind of opponents, there are no actors, or one is a word that
            stands for none.
        TypeError: A role is no name, or an actor none of these.
    """

    name: str
    actors: Mapping[str, RolePolicy]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name in MEMBERS:
            raise ConfigError(f"Opponent.name is {self.name!r}; expected a name that is none of {', '.join(MEMBERS)}")
        if not isinstance(self.actors, Mapping):
            raise TypeError(f"Opponent.actors is a {type(self.actors).__name__}; expected a mapping, role -> actor")
        if not self.actors:
            raise ConfigError(f"Opponent {self.name!r} has no actors; expected one for at least one role")
        for role, actor in self.actors.items():
            if not isinstance(role, str):
                raise TypeError(f"Opponent.actors of {self.name!r} has {role!r:.80}; expected names of roles or agents")
            if isinstance(actor, str) and actor not in WORDS:
                raise ConfigError(
                    f"the actor of {role!r} of Opponent {self.name!r} is {actor!r:.80}; expected {RANDOM!r}, "
                    f"{STILL!r}, a Policy or a function of observations"
                )
            if not isinstance(actor, str | None) and not callable(actor):
                raise TypeError(
                    f"the actor of {role!r} of Opponent {self.name!r} is a {type(actor).__name__}; expected a Policy, "
                    f"a function of observations that returns actions, {RANDOM!r} or {STILL!r}"
                )


def _checked_members(key: str, value: Any) -> tuple[str | Opponent, ...]:
    """The members, or ConfigError."""
    if not isinstance(value, tuple | list) or not value:
        raise ConfigError(f"{key} is {value!r:.200}; expected a tuple of {', '.join(MEMBERS)} and Opponent(…)")
    for member in value:
        if not isinstance(member, Opponent) and not (isinstance(member, str) and member in MEMBERS):
            raise ConfigError(f"{key} has {member!r:.80}; expected {', '.join(map(repr, MEMBERS))} or an Opponent(…)")
    names = [member.name if isinstance(member, Opponent) else member for member in value]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} is {names}; expected each name once")
    return tuple(value)


@with_known_options
@dataclass(frozen=True, kw_only=True)
class OpponentsConfig:
    """A share of a trainer's environments, in which one side learns and an opponent plays the others.

    A side is a role, or in a game of one role an agent. The last environments are cut into ``num_ranges`` contiguous
    ranges of equal size; the sides take turns in which one learns there. A range has one opponent at a time. After
    ``reassign_interval`` iterations, once an episode has ended in each of its environments, the range's next opponent
    is drawn; another one begins with new episodes.

    An opponent has won or lost by the end of an episode, by the sign of the difference of the sides' mean returns, of
    the rewards that are trained with. With p = (wins + draws / 2 + 1) / (games + 2) of a learning side against an
    opponent, opponents are drawn with weights (1 - p)^2 ("hard") or p (1 - p) ("even"), prioritised fictitious
    self-play of Vinyals et al., "Grandmaster level in StarCraft II", 2019, or all with the same ("uniform").

    Raises:
        ConfigError: A value has another type, or is out of range.
    """

    share: float = param(0.25, low=0, high=1)  # of the environments
    # "snapshots" of the policies in training; "random": uniform actions; "still": the no-op that the game declares
    members: tuple[str | Opponent, ...] = dataclasses.field(
        default=(SNAPSHOTS,), metadata={"convert": _checked_members}
    )
    num_ranges: int = param(8, low=1)  # opponents at a time
    num_snapshots: int = param(8, low=1)  # that are kept; a new one replaces the oldest
    snapshot_interval: int = param(50, low=1, high=MOST)  # iterations between two snapshots; the first is at the start
    snapshot_gain: float | None = param(None, low=0, high=1)  # also once all sides win so often against the newest
    reassign_interval: int = param(10, low=1, high=MOST)  # iterations that a range keeps its opponent
    sampling: Sampling = "hard"

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.share:
            raise ConfigError("OpponentsConfig.share is 0; expected a fraction > 0, or no opponents")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the members."""
        return tuple(member.name if isinstance(member, Opponent) else member for member in self.members)

    def description(self) -> dict[str, Any]:
        """JSON values that say what it is, in a checkpoint."""
        values = {option.name: getattr(self, option.name) for option in dataclasses.fields(self)}
        return {**values, "members": list(self.names)}
