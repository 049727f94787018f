"""Registry of games by name, and their ids in Gymnasium and PettingZoo."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pettingzoo

from gpu_vecenv.declare.env import Env, FixedArgument
from gpu_vecenv.declare.field import FIELD_NAME
from gpu_vecenv.envs.acrobot import Acrobot
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.envs.cleanup import Cleanup
from gpu_vecenv.envs.connect_four import ConnectFour
from gpu_vecenv.envs.continuous_mountain_car import ContinuousMountainCar
from gpu_vecenv.envs.economy import Economy
from gpu_vecenv.envs.harvest import Harvest
from gpu_vecenv.envs.mountain_car import MountainCar
from gpu_vecenv.envs.overcooked import Overcooked
from gpu_vecenv.envs.pendulum import Pendulum
from gpu_vecenv.envs.pursuit import Pursuit
from gpu_vecenv.envs.simple_adversary import SimpleAdversary
from gpu_vecenv.envs.simple_spread import SimpleSpread
from gpu_vecenv.envs.simple_tag import SimpleTag
from gpu_vecenv.envs.skirmish import Skirmish
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.envs.warehouse import Warehouse
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, UnknownGameError, nearest

GAMES: dict[str, type[Env]] = {
    game.name(): game
    for game in (
        TagContinuous,
        TagGridworld,
        Cartpole,
        MountainCar,
        ContinuousMountainCar,
        Acrobot,
        Pendulum,
        SimpleSpread,
        SimpleTag,
        SimpleAdversary,
        Skirmish,
        ConnectFour,
        Overcooked,
        Pursuit,
        Warehouse,
        Harvest,
        Cleanup,
        Economy,
    )
}
Game = str | type[Env] | Env  # a registered name, a class or a configured game
GAME_FILE = re.compile(r"(.+\.py)(?::(\w+))?", re.DOTALL)  # my_game.py, my_game.py:MyGame
ENV_ID = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_]+-v[0-9]+")
OWN_GAMES = "Names are not import paths: register your own games with gpu_vecenv.register(MyGame)"
# What users of Gymnasium give to make -> where it belongs here.
ELSEWHERE = {
    "episode_length": "a game's own limit, if it has one, is max_steps",
    "env_backend": 'driver="pycuda" or "cuda_core" chooses one; leave it out to take the first that works',
    "seed": "pass it to reset(seed=…)",
    "render_mode": 'pass it to gymnasium.make_vec("gpu_vecenv/…", render_mode=…), whose render() returns frames',
    "output": 'pass it to gymnasium.make_vec("gpu_vecenv/…", output=…) or parallel_env; make returns tensors',
}


def register(game: type[Env], name: str | None = None) -> None:
    """Register a game by name, by default its class name in snake case, and its ids in Gymnasium and PettingZoo.

    Raises:
        EnvDefinitionError: ``game`` is not an Env class, the name is not an identifier, or name or id is taken.
    """
    if not (isinstance(game, type) and issubclass(game, Env)):
        raise EnvDefinitionError(f"register: game is {game!r}; expected a subclass of gpu_vecenv.Env")
    name = game.name() if name is None else name
    if type(name) is not str or not FIELD_NAME.fullmatch(name):
        raise EnvDefinitionError(
            f"register: name is {name!r}; expected an identifier of a-z, 0-9 and _, with a letter first"
        )
    if not ENV_ID.fullmatch(gymnasium_id(game, name)):
        raise EnvDefinitionError(
            f"register: {gymnasium_id(game, name)!r}, of the title {game.title!r} and the version {game.version!r}, is "
            "not an id; expected gpu_vecenv/<letters, digits, _>-v<number>"
        )
    if GAMES.get(name, game) is not game:
        raise EnvDefinitionError(f"register: {name!r} is already {GAMES[name].__qualname__}; choose another name")
    for version in versions(game):
        known = gymnasium.registry.get(gymnasium_id(game, name, version))
        if known is not None and known.kwargs.get("game") != name:
            raise EnvDefinitionError(
                f"register: the id {known.id!r} of {name!r} is already that of {known.kwargs.get('game')!r}; "
                "give the class another name, title or version"
            )
    GAMES[name] = game
    _register_ids(game, name)


def gymnasium_id(game: type[Env], name: str | None = None, version: int | None = None) -> str:
    """Gymnasium id, ``gpu_vecenv/TagContinuous-v1``; derived from ``name`` if it differs from the game's own name.

    ``version`` is by default that of the default configuration.
    """
    title = game.title or game.__name__
    if name is not None and name != game.name():
        title = "".join(word.capitalize() for word in name.split("_"))
    return f"gpu_vecenv/{title}-v{game.version if version is None else version}"


def versions(game: type[Env]) -> dict[int, Mapping[str, Any]]:
    """Every version that a game plays, in order -> the configuration values that select it."""
    found = {number: other.config for number, other in game.other_versions.items()} | {game.version: {}}
    return dict(sorted(found.items()))


def _time_limit(game: type[Env]) -> int | None:
    """Default steps of an episode, if Gymnasium's TimeLimit ends it."""
    limits = [field.default for field in dataclasses.fields(game) if field.name == "max_steps"]
    return limits[0] if game.gymnasium_time_limit and limits and isinstance(limits[0], int) else None


def _register_ids(game: type[Env], name: str) -> None:
    """Register the ids of Gymnasium and PettingZoo; the entry points get the game by name."""
    for version, config in versions(game).items():
        kwargs = {"game": name, **config}
        if (title := gymnasium_id(game, name, version)) not in gymnasium.registry:
            limit = _time_limit(game)
            gymnasium.register(
                title,
                entry_point=f"gpu_vecenv.views.gymnasium_env:{'UnlimitedGymnasiumEnv' if limit else 'GymnasiumEnv'}",
                max_episode_steps=limit,
                reward_threshold=game.reward_threshold,
                vector_entry_point="gpu_vecenv.views.gymnasium_env:GymnasiumVectorEnv",
                kwargs=kwargs,
            )
        title = f"gpu_vecenv/{name}-v{version}"
        if hasattr(pettingzoo, "register") and title not in pettingzoo.parallel_registry:  # since PettingZoo 1.27
            pettingzoo.register("parallel", title, "gpu_vecenv.views.pettingzoo_env:parallel_env", kwargs=kwargs)
            pettingzoo.register("aec", title, "gpu_vecenv.views.pettingzoo_env:aec_env", kwargs=kwargs)


def find_game(name: str, own_games: str = OWN_GAMES) -> type[Env]:
    """The game registered by this name.

    Raises:
        UnknownGameError: There is none; the message lists the nearest names and says where ``own_games`` come from.
    """
    if not isinstance(name, str):
        of_env = isinstance(getattr(name, "game", None), Env)
        given = f"a {type(name).__name__}" if of_env else f"{name!r:.128} ({type(name).__name__})"
        hint = ": give env.game" if of_env else ""
        raise TypeError(f"a game is {given}; expected a registered name, an Env class or an Env{hint}")
    if name not in GAMES:
        spec = gymnasium.registry.get(name)
        if spec is not None and spec.kwargs.get("game") in GAMES:
            hint = f"{spec.kwargs['game']!r} is its name; the id is for gymnasium.make_vec"
        else:
            of_file = "a file is for the command line: in Python import it and give its class. "
            hint = f"{of_file * bool(GAME_FILE.fullmatch(name))}{nearest(name, GAMES)}. {own_games}"
        raise UnknownGameError(f"no game is called {name[:128]!r}; {hint}")
    return GAMES[name]


def load_game(file: str | Path) -> type[Env]:
    """Import and register the game of a Python file: ``my_game.py``, or ``my_game.py:MyGame`` if it defines several.

    The file is run once per process, as ``import my_game``; its folder is appended to ``sys.path`` for its own imports.
    Names of games, as ``make`` takes them, never run or import anything.

    Raises:
        UnknownGameError: There is no such file, or no such game in it.
        EnvDefinitionError: The file raises, defines no game or several, or its module or game name is taken.
    """
    match = GAME_FILE.fullmatch(str(file))
    if match is None:
        raise UnknownGameError(f"file is {str(file)!r}; expected my_game.py or my_game.py:MyGame")
    path, wanted = Path(match[1]), match[2]
    if not path.is_file():
        raise UnknownGameError(f'no file {path}; "gpu-vecenv new my_game" creates a template')
    path = path.resolve()
    games = _games_of(module_of_file(path))
    if wanted is not None and wanted not in games:
        raise UnknownGameError(f"{path} has no game {wanted!r}; {nearest(wanted, games)}")
    if not games:
        raise EnvDefinitionError(f"{path} holds no game; expected a class that derives from gpu_vecenv.Env")
    if wanted is None and len(games) > 1:
        raise EnvDefinitionError(
            f"{path} defines several games, {', '.join(games)}; choose one: {path.name}:{next(iter(games))}"
        )
    game = games[wanted or next(iter(games))]
    if game not in GAMES.values():
        register(game)
    return game


def game_argument(game: type[Env]) -> str | None:
    """What names a game's file on a command line: ``my_game.py``, or ``my_game.py:MyGame`` if it defines several.

    None for a bundled game, and for one without a file, such as a notebook's.
    """
    module = sys.modules.get(game.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or game.__module__.startswith("gpu_vecenv."):
        return None
    path = Path(file).resolve()
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{game.__name__}" if len(_games_of(module)) > 1 else str(path)


def game_summary(game: type[Env]) -> str:
    """The first line of a game's documentation as plain text; empty without any."""
    return (game.__doc__ or "").strip().partition("\n")[0].replace("`", "")


def _games_of(module: ModuleType) -> dict[str, type[Env]]:
    """Name -> class of the games that a module itself defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Env) and value.__module__ == module.__name__
    }


def module_of_file(path: Path) -> ModuleType:
    """The module of a resolved file: from ``sys.modules`` if it is there, else by running the file.

    Raises:
        EnvDefinitionError: The file raises, or the name of its module is taken.
    """
    for name in (path.stem, "__main__"):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is not None and file is not None and Path(file).resolve() == path:
            return module
    if path.stem in sys.modules or path.stem in sys.stdlib_module_names:
        raise EnvDefinitionError(f"{path}: there is another module called {path.stem!r} already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    folder, added = str(path.parent), str(path.parent) not in sys.path
    registries: list[dict[str, Any]] = [GAMES, gymnasium.registry]
    if hasattr(pettingzoo, "register"):
        registries += [pettingzoo.parallel_registry, pettingzoo.aec_registry]
    known = [dict(registry) for registry in registries]
    if added:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        if added:
            sys.path.remove(folder)
        for registry, before in zip(registries, known, strict=True):
            registry.clear()
            registry.update(before)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        raise EnvDefinitionError(f"{path}:{line}: {type(error).__name__}: {error}") from error
    return module


def configure(game: Game, /, **config: Any) -> Env:
    """A configured game: from a registered name, an Env class, or an Env with ``config`` replaced.

    ``config`` has names of fields or of ``Env.reference_arguments``: ``configure("simple_spread", N=3)`` is
    ``configure("simple_spread", num_agents=3)``.

    Raises:
        UnknownGameError: No game has this name.
        ConfigError: A key is unknown, two names of one field have different values, or a value has the wrong type or
            range.
    """
    return configured(game, config)


def configured(game: Game, config: Mapping[str, Any], others: Iterable[str] = ()) -> Env:
    """As ``configure``; the error on an unknown key lists ``others``, further arguments of the caller, too."""
    kind = type(game) if isinstance(game, Env) else game
    if not (isinstance(kind, type) and issubclass(kind, Env)):
        kind = find_game(kind)
    config = _by_field(kind, config, others)
    if isinstance(game, Env):
        return dataclasses.replace(game, **config) if config else game  # a game is immutable
    return kind(**config)


def stored_configuration(game: type[Env], config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration out of a file, with the parameters that it lacks because they came with a later version.

    A file without a parameter that tells versions apart is older than the parameter: it is of the oldest version.
    """
    before: dict[str, Any] = {}
    for values in versions(game).values():
        before = {**values, **before}
    return {**before, **config}


def configuration_names(game: Env) -> dict[str, Any]:
    """Name -> value of every argument that ``configure`` takes for this game."""
    return {
        name: getattr(game, target) if isinstance(target, str) else target.value
        for name, target in _targets(type(game)).items()
    }


def _targets(game: type[Env]) -> dict[str, str | FixedArgument]:
    """Name of an argument -> its field, or its only value."""
    fields = {field.name: field.name for field in dataclasses.fields(game)}
    names = {name: to for name, to in game.reference_arguments.items() if not isinstance(to, str) or to in fields}
    return {**names, **fields}


def _by_field(game: type[Env], config: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Field -> value, with ``reference_arguments`` replaced by their fields; or ConfigError."""
    targets = _targets(game)
    given: dict[str, str] = {}  # field -> the name it was given by
    for key, value in config.items():
        target = targets.get(key)
        if target is None:
            if key in ELSEWHERE:
                raise ConfigError(f"{key} is {value!r}, which is not a configuration key: {ELSEWHERE[key]}")
            names = nearest(key, targets, set(others) - set(targets))
            raise ConfigError(f"{game.name()} has no configuration key {key!r} (= {value!r}); {names}")
        if isinstance(target, FixedArgument):
            if value != target.value:
                raise ConfigError(
                    f"{game.name()}: {key} is {value!r}; expected {target.value!r}, the only value supported: "
                    f"{target.reason}"
                )
        elif (first := given.setdefault(target, key)) != key and config[first] != value:
            raise ConfigError(
                f"{game.name()}: {first} is {config[first]!r} and {key} is {value!r}, two names of one value; expected "
                "one of them, or equal values"
            )
    return {field: config[name] for field, name in given.items()}


for _name, _game in GAMES.items():
    _register_ids(_game, _name)
