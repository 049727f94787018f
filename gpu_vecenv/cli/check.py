"""``gpu-vecenv check``: conformance of a game, or of a registered Gymnasium or PettingZoo environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, cast

import gymnasium
import pettingzoo
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from rich.console import Console

from gpu_vecenv.check import Report, check_parallel_env, check_vector_env
from gpu_vecenv.check.export import as_json, as_junit
from gpu_vecenv.check.game import RULES, check_game
from gpu_vecenv.cli.game_files import mark_as_checked
from gpu_vecenv.cli.options import (
    Command,
    DeviceOptions,
    GameName,
    GameT,
    NoGame,
    check_option_names,
    named_game,
    with_parameter,
)
from gpu_vecenv.declare.config import check_fields, param, parse_json_object
from gpu_vecenv.engine.arguments import MODES
from gpu_vecenv.envs.importing import imported
from gpu_vecenv.envs.registry import GAME_FILE
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.files import check_output, replace_file
from gpu_vecenv.progress import OnProgress, ProgressDisplay

ENV_ID = re.compile(r"/|-v\d+$")
FACTORY = re.compile(r".+:[A-Za-z_]\w*")  # module:factory or file.py:factory


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Command):
    """Which checks run, and where their report goes."""

    steps: int = param(300, low=10)  # steps of most runs; later behaviour is not tested
    seed: int = param(17, low=0)  # the first of the seeds
    checks: tuple[str, ...] = ()  # checks to run, such as K01 K10 or K01,K10; none: all
    verbose: bool = False  # print all checks, also those that pass, why others are skipped, and notes
    json: str | None = None  # file for the report as JSON, - for the standard output
    junit: str | None = None  # file for the report as JUnit's XML

    def __post_init__(self) -> None:
        check_fields(self)
        if self.junit == "-":
            raise ConfigError("junit is '-'; expected a file: --json alone takes - for the standard output")
        for name, path in (("json", self.json), ("junit", self.junit)):
            if path not in (None, "-"):
                check_output(name, Path(str(path)))

    @property
    def chosen(self) -> list[str] | None:
        """The names in ``checks``."""
        return [name for part in self.checks for name in re.split(r"[\s,]+", part.strip(", \t\n"))] or None

    def finish(self, report: Report) -> int:
        """Print and write the report; 1 if a check fails."""
        if self.json == "-":
            print(as_json(report))
        else:
            Console().print(report if self.verbose else report.summary("--verbose"))
        for path, text in ((self.json, as_json), (self.junit, as_junit)):
            if path not in (None, "-"):
                replace_file(Path(str(path)), text(report).encode())
        return int(bool(report.failures))


@dataclass(frozen=True, kw_only=True)
class Check(ReportOptions, DeviceOptions, Generic[GameT]):
    """Check that an environment keeps the promises of its interfaces.

    It is a game, or any environment that is registered with Gymnasium or PettingZoo.

    check tag_gridworld and check my_game.py test all interfaces of a game; check CartPole-v1 tests a vector environment
    of Gymnasium, and check sisl/pursuit_v5 a parallel environment of PettingZoo. An id has other options than a game:
    check CartPole-v1 --help. Exit code 1 if a check fails.
    """

    game_name: GameName  # a name, a file that declares it, or an id of Gymnasium or PettingZoo
    num_envs: int = param(100, low=2)  # environments of the runs that must be bit-identical
    parallel: bool = True  # also check a game of several agents as a PettingZoo ParallelEnv
    sanitize: bool = False  # first play it on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer
    game: GameT

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the options of the game that is named first; CheckRegistered for an id."""
        entry = arguments[0] if arguments else ""
        if FACTORY.fullmatch(entry) or (not GAME_FILE.fullmatch(entry) and ENV_ID.search(entry)):
            return CheckRegistered, tyro.MISSING_NONPROP
        game = named_game(arguments) or NoGame
        own_limit = any(field.name == "max_steps" for field in fields(game))
        command = cls if own_limit else CheckWithLimit
        check_option_names(command, game)
        return with_parameter(command, game), tyro.MISSING_NONPROP

    @property
    def limit(self) -> int | None:
        """The step at which episodes are truncated; None takes it from the game."""
        return None

    def __call__(self) -> int:
        """Print the report; 1 if a check fails."""
        with ProgressDisplay("check") as on_progress:
            report = check_game(
                self.game,  # type: ignore[arg-type]
                device=self.device,
                driver=self.driver,
                checks=self.chosen,
                num_envs=self.num_envs,
                steps=self.steps,
                max_steps=self.limit,
                seed=self.seed,
                parallel=self.parallel,
                sanitize=self.sanitize,
                on_progress=on_progress,
            )
        if "G01" in report.passed and RULES.isdisjoint(report.failed):  # a failure ends the run in which G01 is found
            mark_as_checked(self.game_name, self.game)  # type: ignore[arg-type]
        return self.finish(report)


@dataclass(frozen=True, kw_only=True)
class CheckWithLimit(Check[GameT]):  # noqa: D101 - that of Check
    __doc__ = Check.__doc__

    max_steps: int | None = param(None, low=1)  # step at which episodes are truncated; None: limits are not tested

    @property
    def limit(self) -> int | None:
        """The option."""
        return self.max_steps


@dataclass(frozen=True, kw_only=True)
class CheckRegistered(ReportOptions):
    """Check that a vector environment of Gymnasium, or a parallel one of PettingZoo, conforms to its API.

    ENTRY is a registered id, or module:factory or file.py:factory. An id that both have registered is Gymnasium's,
    unless --parallel is given. A factory takes the number of environments; with --parallel it takes nothing. Exit code
    1 if a check fails.
    """

    # CartPole-v1, sisl/pursuit_v5, module:factory, file.py:factory
    env_id: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ENTRY")]]
    config: str = "{}"  # further arguments of gymnasium.make_vec or pettingzoo.make, as JSON
    parallel: bool = False  # the entry is a PettingZoo parallel environment, as is an id that only PettingZoo has
    max_steps: int | None = param(None, low=1)  # step at which episodes are truncated; None: that of its spec

    def __call__(self) -> int:
        """Print the report; 1 if a check fails."""
        config = parse_json_object("config", self.config)
        with ProgressDisplay("check") as on_progress:
            registry = getattr(pettingzoo, "parallel_registry", {})  # since PettingZoo 1.27
            parallel = self.parallel or self.env_id in registry.keys() - gymnasium.registry.keys()
            check = self._check_parallel if parallel else self._check_vector
            report = check(config, on_progress)
        return self.finish(report)

    def _run(self) -> dict[str, Any]:
        return {"steps": self.steps, "seed": self.seed, "checks": self.chosen, "max_steps": self.max_steps}

    def _check_parallel(self, config: dict[str, Any], on_progress: OnProgress) -> Report:
        factory = _factory(self.env_id) or partial(pettingzoo.make, "parallel", self.env_id)
        make = partial(factory, **config)
        try:
            make().close()
        except Exception as error:  # an environment with missing dependencies may raise anything
            source = self.env_id if FACTORY.fullmatch(self.env_id) else "pettingzoo.make"
            raise ConfigError(f"{source}: {type(error).__name__}: {error}") from error
        return check_parallel_env(make, on_progress=on_progress, **self._run())

    def _check_vector(self, config: dict[str, Any], on_progress: OnProgress) -> Report:
        factory = _factory(self.env_id)
        if factory is not None:
            make = partial(factory, **config)
            try:
                make(1).close()
            except Exception as error:
                raise ConfigError(f"{self.env_id}: {type(error).__name__}: {error}") from error
            return check_vector_env(make, on_progress=on_progress, **self._run())

        def maker(**changes: Any) -> Callable[[int], VectorEnv[Any, Any, Any]]:
            return lambda num_envs: gymnasium.make_vec(self.env_id, num_envs=num_envs, **{**config, **changes})

        options: dict[str, Any] = {"on_progress": on_progress}
        if self.env_id.startswith("gpu_vecenv/"):  # the default, "async", marks invalid actions without raising
            config.setdefault("validate", "sync")
            options["modes"] = {mode: maker(autoreset_mode=mode) for mode in MODES}
            options["state_of"] = lambda env: env.unwrapped.vec_env
        elif config.get("vectorization_mode") in ("sync", "async"):  # Gymnasium's own vector envs support all modes
            vector_kwargs = config.get("vector_kwargs", {})
            options["modes"] = {m: maker(vector_kwargs={**vector_kwargs, "autoreset_mode": m}) for m in AutoresetMode}
        return check_vector_env(maker(), **self._run(), **options)


def _factory(entry: str) -> Callable[..., Any] | None:
    """The function that module:factory or file.py:factory names; None for an id.

    Raises:
        ConfigError: The module cannot be imported, or has no such function.
    """
    if FACTORY.fullmatch(entry) is None:
        return None
    try:
        found = imported("ENTRY", entry)
    except (ConfigError, EnvDefinitionError) as error:
        raise ConfigError(f"{error}; expected module:factory") from error
    if not callable(found):
        raise ConfigError(f"{entry} is a {type(found).__name__}; expected a function that makes environments")
    return cast(Callable[..., Any], found)
