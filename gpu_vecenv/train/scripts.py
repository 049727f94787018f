"""Scripts: actors that a command line names, ROLE=file.py:function or ROLE=module:function."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.importing import absolute, imported
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.game_policy import run_and_member

EXPECTED = "expected a function of the configured game that returns an actor, a function of observations"


class Script(NamedTuple):
    """A function that makes an actor, and whose agents the actor plays.

    Attributes:
        agents: A role or an agent, or several joined by "+".
        source: ``file.py:function`` or ``module:function``: a function of the configured game that returns a function
            of observations (num_envs, count, *shape), which returns actions of the agents' action space.
    """

    agents: str
    source: str

    @property
    def name(self) -> str:
        """Of the function."""
        return self.source.rpartition(":")[2]

    @property
    def text(self) -> str:
        """What ``parsed`` takes, from any folder."""
        return f"{self.agents}={absolute(self.source)}"

    @classmethod
    def parsed(cls, option: str, text: str) -> Script:
        """The script that "runner=file.py:function" names.

        Raises:
            ConfigError: The text has another form.
        """
        agents, _, source = text.partition("=")
        if not agents or not names_script(source):
            raise ConfigError(f"{option} has {text!r}; expected ROLE=file.py:function or ROLE=module:function")
        return cls(agents, source)

    def actor(self, option: str, game: Env) -> Callable[[torch.Tensor], torch.Tensor]:
        """What the function returns for this game; its file or module is imported, and so runs.

        Raises:
            ConfigError: There is no such function, it raises, or it returns no function.
        """
        make = imported(option, self.source)
        if not callable(make):
            raise ConfigError(f"{option}: {self.source} is {make!r:.80}; {EXPECTED}")
        try:
            actor: Callable[[torch.Tensor], torch.Tensor] = make(game)
        except Exception as error:  # a function that is the user's may raise anything
            raise ConfigError(f"{option}: {self.source} raised {type(error).__name__}: {error}; {EXPECTED}") from error
        if not callable(actor):
            raise ConfigError(f"{option}: {self.source} returned a {type(actor).__name__}; {EXPECTED}")
        return actor


def names_script(source: str) -> bool:
    """Whether it is a script's source, and not the path of a file or folder, or a member of a run."""
    return ":" in source and not run_and_member(source)[0].exists()
