"""What plays some agents, as all commands name it: SOURCE, or ROLE=SOURCE for the agents of a role alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.importing import absolute
from gpu_vecenv.errors import ConfigError, nearest
from gpu_vecenv.train.evaluation import RolePolicy, actors_of, replaced
from gpu_vecenv.train.fixed_policy import RANDOM, STILL, WORDS, FixedActor, noop_of
from gpu_vecenv.train.game_policy import GamePolicy, load_policy, run_and_member
from gpu_vecenv.train.role_view import agents_of, role_of
from gpu_vecenv.train.scripts import Script, names_script

HOW = f"{', '.join(WORDS)}, RUN, or for a role alone ROLE={RANDOM}, ROLE={STILL}, ROLE=RUN or ROLE=file.py:function"


class Player(NamedTuple):
    """What plays some agents.

    Attributes:
        option: Of the command line, for errors.
        role: A role or an agent, or several joined by "+"; "" stands for all roles.
        source: "random", "still", a run or one of its checkpoints, or a script.
    """

    option: str
    role: str
    source: str

    @classmethod
    def parsed(cls, option: str, text: str, expected: str = HOW) -> Player:
        """What a value of an option names; the whole text is a source where it is a path that exists.

        Args:
            option: For errors.
            text: The value.
            expected: For errors, what the option takes.

        Raises:
            ConfigError: It has another form, a script has no role, or there is no such run.
        """
        role, separator, source = text.partition("=")
        if not separator or Path(text).exists():
            role, source = "", text
        found = cls(option, role, source)
        if not source or text.startswith("="):
            raise ConfigError(f"{option} has {text!r}; expected {expected}")
        if found.is_script and not role:
            raise ConfigError(f"{option} has the script {source!r}; expected the role that it plays: ROLE={source}")
        if found.is_run and not run_and_member(source)[0].exists():
            raise ConfigError(f"{option} has {text!r}: there is no file or folder {source}; expected {expected}")
        return found

    @property
    def is_script(self) -> bool:
        """Whether the source is a script."""
        return self.source not in WORDS and names_script(self.source)

    @property
    def is_run(self) -> bool:
        """Whether the source is a run or a checkpoint."""
        return self.source not in WORDS and not names_script(self.source)

    @property
    def whole(self) -> str:
        """The source, with a path from the root."""
        if self.source in WORDS:
            return self.source
        return absolute(self.source) if self.is_script else str(Path(self.source).resolve())

    @property
    def text(self) -> str:
        """What ``parsed`` takes, from any folder."""
        return self._of_role(self.whole)

    def name(self, parts: int = 1) -> str:
        """In metrics and checkpoints: so many last parts of the path, the same for whole and relative ones."""
        return self._of_role(str(Path(*Path(self.whole).parts[-parts:])))

    def _of_role(self, source: str) -> str:
        return f"{self.role}={source}" if self.role else source

    def names(self, game: Env, *, agents: bool = True) -> list[str]:
        """The roles or agents of its actors, as ``actors`` names them but for agents of a role with several policies.

        Args:
            game: That is played.
            agents: Whether single agents may be named.

        Raises:
            ConfigError: The game has no such role.
        """
        layout = game.layout
        names = self.role.split("+") if self.role else list(layout.present_roles)
        known = [*layout.present_roles, *(layout.agent_names if agents else ())]
        if unknown := [name for name in names if name not in known]:
            kind = "role or agent" if agents else "role"
            raise ConfigError(f"unknown {kind} {unknown[0]!r} in {self.option}; {nearest(unknown[0], known)}")
        return names

    def actors(self, game: Env, **options: Any) -> dict[str, RolePolicy]:
        """Role or agent -> its actor, of a run its policies; arguments and errors as of ``players``."""
        return actors_of(self.players(game, **options))

    def players(
        self, game: Env, policies: GamePolicy | None = None, **options: Any
    ) -> dict[str, GamePolicy | FixedActor]:
        """Role or agent -> what plays it; agents that are joined by "+" have one script together.

        Args:
            game: That is played.
            policies: Of the run, if they are loaded already.
            options: Of ``load_policy``.

        Raises:
            ConfigError: The source does not fit the game, or a script cannot be imported.
        """
        names = self.names(game)
        if self.source == RANDOM:
            return dict.fromkeys(names, RANDOM)
        if self.source == STILL:
            for name in names:
                noop_of(game, role_of(game, name))  # raises
            return dict.fromkeys(names, STILL)
        if self.is_script:
            return {self.role: Script(self.role, self.source).actor(self.option, game)}
        return {name: self.loaded(game, name, policies, **options) for name in names}

    def loaded(self, game: Env, name: str, policies: GamePolicy | None = None, **options: Any) -> GamePolicy:
        """The policies of a run of the same game, where a role, or that of an agent, acts alike.

        Args:
            game: That is played.
            name: Role or agent.
            policies: Of the run, if they are loaded already.
            options: Of ``load_policy``.

        Raises:
            ConfigError: It is of another game, or of other observations or actions.
        """
        loaded = load_policy(self.source, **options) if policies is None else policies
        role = role_of(game, name)
        where = f"{self.option}: {self.source}"
        if loaded.game.name() != game.name():
            raise ConfigError(f"{where} is a run of {loaded.game.name()}; expected one of {game.name()}")
        expected, found = (
            (env.layout.observation.shapes[role], env.layout.action.sizes[role]) if env.layout.roles.get(role) else None
            for env in (game, loaded.game)
        )
        if expected != found:
            raise ConfigError(
                f"{self.option}: {name} of {self.source} has observations and actions {found}; expected {expected}"
            )
        return loaded


def distinct_names(players: Sequence[Player]) -> list[str]:
    """A name of each: the last part of its path, or as many as tell it from the others."""
    parts = [1] * len(players)
    longest = max((len(Path(player.whole).parts) for player in players), default=1)
    for _ in range(longest):
        names = [player.name(count) for player, count in zip(players, parts, strict=True)]
        parts = [count + (names.count(name) > 1) for name, count in zip(names, parts, strict=True)]
    return names


def parsed_players(option: str, texts: Sequence[str], game: Env, *, agents: bool = True) -> list[Player]:
    """What the values of an option name, each of which plays other agents.

    Args:
        option: For errors.
        texts: The values.
        game: That is played.
        agents: Whether they may name single agents.

    Raises:
        ConfigError: As of ``Player.parsed`` and ``Player.names``, or an agent is named twice.
    """
    found = [Player.parsed(option, text) for text in texts]
    numbers = [agent for player in found for agent in agents_of(game, player.names(game, agents=agents))]
    if twice := [agent for agent in numbers if numbers.count(agent) > 1]:
        raise ConfigError(
            f"{option} is {' '.join(texts)}, which names {game.layout.agent_names[twice[0]]} twice; expected each role "
            f"once, such as {list(game.layout.present_roles)[-1]}={RANDOM}"
        )
    return found


def opponents_of_run(
    loaded: GamePolicy, option: str, texts: Sequence[str], *, best: bool = False
) -> dict[str, GamePolicy | FixedActor]:
    """Role or agent -> what plays it in place of a run's policies, of those that the values of an option name.

    Args:
        loaded: The run's policies.
        option: For errors.
        texts: The values.
        best: Of other runs the best checkpoint instead of the newest.

    Raises:
        ConfigError: As of ``parsed_players`` and ``Player.players``.
    """
    found = dict[str, GamePolicy | FixedActor]()
    for player in parsed_players(option, texts, loaded.game):
        of_folder = run_and_member(Path(player.source))[0].is_dir()  # a file is its own checkpoint
        found |= player.players(loaded.game, best=best and of_folder, device=loaded.device)
    return found


def players_of_run(
    loaded: GamePolicy, option: str, texts: Sequence[str], *, best: bool = False
) -> dict[str, RolePolicy]:
    """Role or agent -> its actor: the policies of a run, but for the agents that the values of an option name.

    Arguments and errors as of ``opponents_of_run``.
    """
    return replaced(loaded.game, loaded.policies, actors_of(opponents_of_run(loaded, option, texts, best=best)))
