"""The commands of a training run: train, evaluate, plot."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from gpu_vecenv.cli.options import PROGRAM, load_run_policy, merge_dataclasses, parse, parse_game
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import find_game
from gpu_vecenv.errors import ConfigError, UnknownGameError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.checkpoint import CheckpointFolder
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.evaluation import evaluate as play
from gpu_vecenv.train.game_policy import GamePolicy, load_policy
from gpu_vecenv.train.plots import plot_runs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.rollout_storage import max_num_envs_that_fit
from gpu_vecenv.train.run import CHECKPOINTS, RunConfig, best_metric_name, run
from gpu_vecenv.train.trainer import RUN_WIDE_KEYS, PolicySpec, Trainer

AUTO_NUM_ENVS = {"cuda": 2000, "cpu": 512}  # what "auto" asks for; it takes fewer where memory is short
SETTINGS = "settings.json"  # in the run folder: what is neither the game's nor the policies'


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Where and how to train."""

    num_envs: int | Literal["auto"] = "auto"  # replicas of all processes; "auto": what suits and fits the device
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works
    seed: int = 0  # of the environment, the weights and the minibatches
    out: Path | None = None  # run folder; by default runs/<game>-<date>-<time>
    algorithm: Literal["ppo", "a2c"] = "ppo"  # whose hyper-parameters are the defaults
    share_policy: bool = False  # one policy for all roles, instead of one for each
    policies: str = "{}"  # hyper-parameters of some policies alone, JSON: {"tagger": {"learning_rate": 0.001}}
    frozen: tuple[str, ...] = ()  # roles that do not learn, and the run or checkpoint they play by: tagger=runs/old
    graphs: bool = True  # CUDA graphs

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """How to go on with a run."""

    resume: Path  # the run's folder
    total_steps: int | None = param(None, low=1)  # another end; the schedules then change from here on
    device: str | None = None  # cpu, cuda or cuda:1; by default the run's
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How to play."""

    episodes: int = param(1000, low=1)  # how many
    greedy: bool = False  # the likeliest action instead of a draw
    best: bool = False  # the best checkpoint instead of the newest
    opponents: tuple[str, ...] = ()  # roles that others play: tagger=random or tagger=runs/other
    num_envs: int = param(1000, low=1)  # replicas
    device: str | None = None  # cpu, cuda or cuda:1; by default cuda if usable, else cpu
    driver: str | None = None  # pycuda or cuda_core (CUDA only); by default the first that works
    seed: int = 1  # of the random streams
    out: Path | None = None  # file to write the JSON to as well
    game: str | None = None  # the file that declares it, if it is no bundled game

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """What to draw."""

    out: Path = Path("curves.png")  # the picture, PNG or SVG
    metrics: tuple[str, ...] = ()  # columns of metrics.csv; by default returns and episode lengths
    x: Literal["env_steps", "seconds"] = "env_steps"  # the horizontal axis
    smooth: int = param(1, low=1)  # iterations of the running mean

    def __post_init__(self) -> None:
        check_fields(self)


def train(arguments: Sequence[str]) -> int:
    """Train a game, or go on with a run."""
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return _resume(arguments)
    game, rest = parse_game("train", arguments)
    a2c = "--algorithm=a2c" in rest or ("--algorithm", "a2c") in pairwise(rest)
    preset = {} if a2c else dict(game.preset)
    settings = TrainConfig(algorithm="a2c" if a2c else "ppo", num_envs=preset.pop("num_envs", "auto"))
    ppo = PPOConfig.a2c() if a2c else PPOConfig(**preset)
    kinds = merge_dataclasses("Train", train=settings, run=RunConfig, ppo=ppo, game=game)
    parsed = parse(kinds, f"{PROGRAM} train {arguments[0]}", rest)
    settings, ppo = parsed.train, parsed.ppo
    with process_group(settings.device) as (world, own):
        if settings.out is None and world.size > 1:
            raise ConfigError("several processes need one run folder: give --out")
        env = _env(parsed.game, settings, own, world, ppo.num_steps)
        specs = _specs(parsed.game, settings, ppo)
        trainer = Trainer(env, ppo, seed=settings.seed, policies=specs, graphs=settings.graphs)
        best_metric_name(trainer, parsed.run)  # refuses a wrong one before anything is written
        folder = settings.out or _new_folder(game.name())
        if world.rank == 0:
            _write_settings(folder, parsed.game, settings, parsed.run)
        return run(trainer, folder, parsed.run)


def _new_folder(name: str) -> Path:
    """A folder that no other run has, not even one that begins in the same second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def _env(game: Env, settings: TrainConfig, device_name: str | None, world: World, num_steps: int) -> VecEnv:
    """This process' shard."""
    device = resolve_device(device_name)

    def make(num_envs: int, first: int = 0) -> VecEnv:
        common: dict[str, Any] = {"autoreset_mode": "next_step", "driver": settings.driver}
        return VecEnv(game, num_envs, device, first_env_index=first, **common)

    if settings.num_envs == "auto":
        if world.size > 1:  # each would find its own number
            raise ConfigError("several processes need one number of replicas: give --num-envs")
        share = max_num_envs_that_fit(make, num_steps, AUTO_NUM_ENVS[device.type])
    else:
        share = world.envs_per_process(settings.num_envs)
    return make(share, world.rank * share)


def _specs(game: Env, settings: TrainConfig, ppo: PPOConfig) -> dict[str, PolicySpec]:
    roles = list(game.layout.present_roles)
    frozen = _named("frozen", settings.frozen)
    learning = [role for role in roles if role not in frozen]
    names = ["+".join(learning)] if settings.share_policy and learning else learning
    try:
        changes = json.loads(settings.policies)
    except json.JSONDecodeError as error:
        raise ConfigError(f"policies is {settings.policies!r}; expected JSON: {error}") from None
    if not isinstance(changes, dict) or not all(isinstance(value, dict) for value in changes.values()):
        raise ConfigError(f'policies is {settings.policies!r}; expected JSON like {{"tagger": {{"gamma": 0.9}}}}')
    if unknown := set(frozen) - set(roles):
        raise ConfigError(f"unknown role {', '.join(map(repr, sorted(unknown)))} in frozen; the roles are {roles}")
    if unknown := set(changes) - set(names):
        raise ConfigError(f"unknown policy {', '.join(map(repr, sorted(unknown)))}; the policies are {names}")
    known = {field.name for field in dataclasses.fields(PPOConfig)}
    for name, values in changes.items():
        if wrong := set(values) - known:
            raise ConfigError(f"unknown keys {sorted(wrong)} for {name}; known: {', '.join(sorted(known))}")
    specs = {name: PolicySpec(config=dataclasses.replace(ppo, **changes.get(name, {}))) for name in names}
    for role, source in frozen.items():
        loaded = _load_other_run("frozen", game, role, source, device="cpu")
        weights = loaded[role].state_dict()
        if game.layout.action.continuous and loaded.configs[role].squash != ppo.squash:
            raise ConfigError(
                f"{source} was trained with squash {loaded.configs[role].squash!r}; give --squash "
                f"{loaded.configs[role].squash}, here it is {ppo.squash!r}"
            )
        config = dataclasses.replace(loaded.configs[role], **{key: getattr(ppo, key) for key in RUN_WIDE_KEYS})
        specs[role] = PolicySpec(config=config, weights=weights, train=False)
    return specs


def _named(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """role=value options."""
    named = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if len(named) < len(pairs):
        raise ConfigError(f"{option} is {' '.join(pairs)}; expected ROLE=RUN for each role, every role once")
    return named


def _load_other_run(option: str, game: Env, role: str, source: str, **how: Any) -> GamePolicy:
    """What plays a role of the game by another run."""
    loaded = load_policy(source, **how)
    if loaded.game.name() != game.name():
        raise ConfigError(f"{option}: {source} is a run of {loaded.game.name()}; expected one of {game.name()}")
    own, other = (
        (kind.layout.observation.shapes[role], kind.layout.action.sizes[role]) if kind.roles.get(role) else None
        for kind in (game, loaded.game)
    )
    if own != other:
        raise ConfigError(f"{option}: {role} of {source} has observations and actions {other}; expected {own}")
    return loaded


def _write_settings(folder: Path, game: Env, settings: TrainConfig, config: RunConfig) -> None:
    if CheckpointFolder(folder / CHECKPOINTS).begun():  # run() will say so
        return
    kept = {"game": game.name(), "device": settings.device, "graphs": settings.graphs}
    replace_file(folder / SETTINGS, json.dumps({**kept, "run": dataclasses.asdict(config)}, indent=1).encode())


def _read_settings(folder: Path) -> tuple[dict[str, Any], RunConfig]:
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"no run at {folder}: it holds no {SETTINGS}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"game": str, "device": str | None, "graphs": bool, "run": dict}
        if wrong := [key for key, kind in kinds.items() if not isinstance(settings[key], kind)]:
            raise ConfigError(f"{', '.join(wrong)} is of the wrong type")
        return settings, RunConfig(**settings["run"])
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or of another version: {type(error).__name__}: {error}") from error


def _resume(arguments: Sequence[str]) -> int:
    given, rest = (None, arguments) if arguments[0].startswith("-") else parse_game("train", arguments)
    config: ResumeConfig = parse(ResumeConfig, f"{PROGRAM} train", rest)
    settings, run_config = _read_settings(config.resume)
    with process_group(config.device or settings["device"]) as (world, own):
        checkpoints = CheckpointFolder(config.resume / CHECKPOINTS, rank=world.rank, world_size=world.size)
        _, manifest = checkpoints.load()
        if manifest["game"] != settings["game"]:
            raise ConfigError(
                f"{config.resume} is a run of {settings['game']}; its checkpoint is of {manifest['game']}"
            )
        kind = given or _registered(manifest["game"], config.resume)
        game = kind(**_known_keys(kind, manifest["game_config"]))
        changes = {} if config.total_steps is None else {"total_steps": config.total_steps}
        configs = {name: PPOConfig(**{**values, **changes}) for name, values in manifest["policies"].items()}
        specs = {name: PolicySpec(config=c, train=name in manifest["trained"]) for name, c in configs.items()}
        env = VecEnv(
            game,
            manifest["num_envs"],
            resolve_device(own),
            autoreset_mode="next_step",
            driver=config.driver,
            first_env_index=manifest["first_env_index"],
        )
        ppo = PPOConfig(**{**manifest["config"], **changes})
        trainer = Trainer(env, ppo, seed=manifest["seed"], policies=specs, graphs=settings["graphs"])
        return run(trainer, config.resume, run_config, resume=True)


def _registered(name: str, folder: Path) -> type[Env]:
    try:
        return find_game(name)
    except UnknownGameError:
        raise ConfigError(
            f"{folder} is a run of {name}, which is no bundled game; name its file: {PROGRAM} train my_game.py "
            f"--resume {folder}"
        ) from None


def _known_keys(game: type[Env], config: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(game)}
    if unknown := set(config) - known:
        raise ConfigError(f"the run was made with keys that {game.__name__} does not have: {sorted(unknown)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


def evaluate(arguments: Sequence[str]) -> None:
    """Play episodes with a run's policies and print the result as JSON."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise ConfigError(f"evaluate needs a run's folder first: {PROGRAM} evaluate runs/my_run")
    helps = arguments[0].startswith("-")
    config: EvaluateConfig = parse(EvaluateConfig, f"{PROGRAM} evaluate RUN", arguments if helps else arguments[1:])
    loaded = load_run_policy("evaluate", arguments[0], game=config.game, best=config.best, device=config.device)
    role_policies: dict[str, RolePolicy] = dict(loaded.policies)
    for role, source in _named("opponents", config.opponents).items():
        if role not in role_policies:
            raise ConfigError(f"unknown role {role!r} in opponents; the roles are {list(role_policies)}")
        how: dict[str, Any] = {"best": config.best, "device": loaded.device}
        given = None if source == "random" else _load_other_run("opponents", loaded.game, role, source, **how)
        role_policies[role] = given and given[role]
    env = VecEnv(loaded.game, min(config.num_envs, config.episodes), loaded.device, driver=config.driver)
    results = play(env, role_policies, config.episodes, greedy=config.greedy, seed=config.seed)
    text = json.dumps({"game": loaded.game.name(), "run": arguments[0], "greedy": config.greedy, **results}, indent=1)
    print(text)
    if config.out is not None:
        config.out.write_text(text + "\n")


def plot(arguments: Sequence[str]) -> None:
    """Draw curves of runs."""
    options = [place for place, argument in enumerate(arguments) if argument.startswith("-")]
    end = options[0] if options else len(arguments)
    config: PlotConfig = parse(PlotConfig, f"{PROGRAM} plot RUN...", arguments[end:])
    if end == 0:
        raise ConfigError(f"plot needs the folders of runs first: {PROGRAM} plot runs/one runs/other")
    runs = [Path(name) for name in arguments[:end]]
    if not plot_runs(runs, config.out, metrics=config.metrics, x=config.x, smooth=config.smooth):
        raise ConfigError('curves need matplotlib: pip install "gpu_vecenv[train]"')
    print(f"drew {config.out}")
