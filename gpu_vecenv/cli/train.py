"""``gpu-vecenv train``: train the policies of a game."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import tyro

from gpu_vecenv.cli.actors import Player, parsed_players
from gpu_vecenv.cli.curriculum import curriculum_of, preset_schedules
from gpu_vecenv.cli.game_files import report_unchecked
from gpu_vecenv.cli.opponents import OpponentOptions, errors_name_options
from gpu_vecenv.cli.options import (
    DeviceOptions,
    GameName,
    GameT,
    NoGame,
    check_option_names,
    named_game,
    parsed_options,
    with_parameter,
)
from gpu_vecenv.cli.resume import Resume
from gpu_vecenv.cli.runs import RUN_FORMAT, check_watch, settings_of_sources, train_runs
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.importing import imported
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import check_output
from gpu_vecenv.train.capacity import max_num_envs_that_fit
from gpu_vecenv.train.distributed import World, num_processes, process_group
from gpu_vecenv.train.fixed_opponents import parsed_scripts
from gpu_vecenv.train.fixed_policy import FixedPolicy
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.opponent_ranges import preset_opponents
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.policy_specs import RUN_WIDE_KEYS, PolicySpec, Sharing, names_of_policies, resolve_specs
from gpu_vecenv.train.populations import num_cells
from gpu_vecenv.train.ppo import MAPPO, PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.role_view import role_of
from gpu_vecenv.train.run import check_log
from gpu_vecenv.train.run_folder import RunConfig, make_selection
from gpu_vecenv.train.trainer import Trainer

AUTO_NUM_ENVS = {"cuda": 2000, "cpu": 512}  # upper bound of --num-envs auto; fewer if memory is short
# Of the game's preset, for MAPPO, and for PQN where the game has none of it.
RUN_SIZES = ("num_envs", "total_steps", "num_steps")
AlgorithmName = Literal["ppo", "a2c", "pqn", "pqn-vdn"]
PresetName = Literal["fast", "sample-efficient", "mappo"]
ConfigT = TypeVar("ConfigT", bound=LearnerConfig)  # the hyper-parameters of an algorithm, which become options


@dataclass(frozen=True, kw_only=True)
class Train(DeviceOptions, Generic[GameT, ConfigT]):
    """Train the policies of a game, or resume a run.

    train --help has the defaults without a game's preset, train GAME --help those of the game.
    Curve, checkpoints and evaluation are in the run folder. train --resume RUN continues an interrupted run
    bit-identically; its options: train --resume RUN --help
    """

    game_name: GameName  # a name, or a file that declares it
    num_envs: int | Literal["auto"] = "auto"  # environments of all processes; "auto": as suits and fits the device
    seed: int = 0  # seed of environments, weights and minibatches
    # train with so many seeds at a time, from --seed on, each in a run folder; None: one run
    seeds: int | None = param(None, low=1)
    out: Path | None = None  # run folder, of --seeds that of their folders; None: runs/<game>-<date>-<time>
    algorithm: AlgorithmName = "ppo"  # selects the hyper-parameters and their defaults
    # Of PPO: the game's, for little time or for few env-steps, or MAPPO's with the game's sizes of a run
    preset: PresetName = "fast"
    sharing: Sharing = "role"  # one policy for the agents of a role, one for each agent, or one for all
    population: int = param(1, low=1)  # policies to train for each role, each in an equal share of the environments
    policies: str = "{}"  # hyper-parameters of single policies, as JSON: {"tagger": {"learning_rate": 0.001}}
    # roles that are not trained, with what plays them: tagger=runs/old, tagger=random, tagger=still or
    # tagger=file.py:function
    frozen: tuple[str, ...] = ()
    reward: str | None = None  # function that gives the rewards: module:name or file.py:name; None: the game's rewards
    # a Curriculum or a function that returns one, module:name or file.py:name; or JSON, "{}": none
    schedules: str | None = None
    graphs: bool = True  # use CUDA graphs; no effect on the CPU
    watch: bool = False  # serve a page on this computer that plays the current policies and draws the curves
    run: RunConfig = field(default_factory=RunConfig)
    opponent: OpponentOptions = field(default_factory=OpponentOptions)
    learner: ConfigT
    game: GameT

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def for_arguments(cls, arguments: Sequence[str]) -> tuple[Any, Any]:
        """With the options and preset of the game that is named first; Resume if --resume is given."""
        selection = _Selection.of(arguments)
        if selection.resume is not None:
            Resume.check_options(arguments)
            return Resume, tyro.MISSING_NONPROP
        game = named_game(arguments)
        if game is None:
            return with_parameter(cls, NoGame, PPOConfig), tyro.MISSING_NONPROP
        num_envs, config = preset_defaults(game, selection.algorithm, selection.preset)
        opponent = _default_opponents(selection, game, num_envs)
        check_option_names(cls, RunConfig, OpponentOptions, type(config), game)
        defaults = cls(
            game_name=arguments[0],
            num_envs=num_envs,
            algorithm=selection.algorithm,
            preset=selection.preset,
            schedules=preset_schedules(game),
            opponent=opponent,
            learner=config,  # type: ignore[arg-type]  # the parameters are chosen at run time
            game=game(),  # type: ignore[arg-type]
        )
        return with_parameter(cls, game, type(config)), defaults

    def __call__(self) -> int:
        """Train; the exit code of the run."""
        game: Env = self.game  # type: ignore[assignment]
        with process_group(self.device) as (world, device):
            if self.out is None and world.size > 1:
                raise ConfigError("several processes need one run folder: give --out")
            if self.seeds is not None and world.size > 1:
                raise ConfigError(
                    "--seeds trains in one process; leave out --seeds, or start one process without torchrun"
                )
            check_watch(self.watch, world)
            check_log(self.run, self.seeds or 1)
            if self.out is not None:
                check_output("out", self.out, folder=True)
            seeds = [self.seed] if self.seeds is None else [self.seed + index for index in range(self.seeds)]
            specs = self._policy_specs(game)
            make_env = self._env_maker(game, specs, device, world, len(seeds))
            reward = None if self.reward is None else imported("reward", self.reward)
            how: dict[str, Any] = {"reward": reward, "graphs": self.graphs, "policies": specs}
            self.opponent.check_used([OpponentOptions(), _preset_opponents(type(game), self.num_envs)])
            how["opponents"] = self.opponent.config(game)
            how["curriculum"] = curriculum_of(self.schedules)
            if world.rank == 0:
                report_unchecked(self.game_name, game)
            with errors_name_options():
                trainers = [Trainer(make_env(), self.learner, seed=seed, **how) for seed in seeds]
            selection = make_selection(trainers[0], self.run)  # this and the next raise before anything is written
            selection.opponents.check_used()
            folder = self.out or _new_folder(game.name())
            settings = {"format": RUN_FORMAT, "game": game.name(), "device": self.device, "graphs": self.graphs}
            settings |= settings_of_sources(self.game_name, game, self.reward, self.schedules)
            settings["opponents"] = self.opponent.settings()
            players = [Player.parsed("frozen", text) for text in self.frozen]
            settings["frozen_scripts"] = [player.text for player in players if player.is_script]
            scripts = tuple(script.text for script in parsed_scripts(self.run.eval_scripts))
            # A resumed run that is longer compares its checkpoints by as many episodes as before.
            settings["run"] = dataclasses.asdict(self.run) | {
                "eval_scripts": scripts,
                "best_episodes": selection.episodes,
            }
            how = {"of_seeds": self.seeds is not None, "watch": self.watch, "settings": settings}
            return train_runs(trainers, folder, self.run, **how)

    def _env_maker(
        self, game: Env, specs: Mapping[str, PolicySpec], device_name: str | None, world: World, runs: int
    ) -> Callable[[], VecEnv]:
        """Makes the environments of this process, for each of several runs anew."""
        device = resolve_device(device_name)

        def make(num_envs: int, first: int = 0) -> VecEnv:
            return VecEnv(game, num_envs, device, first_env_index=first, autoreset_mode="next_step", driver=self.driver)

        if self.num_envs == "auto":
            if world.size > 1:  # free memory, and with it the number, may differ between processes
                raise ConfigError("several processes need one number of environments: give --num-envs")
            wanted = AUTO_NUM_ENVS[device.type]
            envs_per_process = max_num_envs_that_fit(
                make, self.learner, resolve_specs(game, self.learner, specs), wanted, runs
            )
            envs_per_process -= envs_per_process % num_cells(specs)
        else:
            envs_per_process = world.envs_per_process(self.num_envs)
        return functools.partial(make, envs_per_process, world.rank * envs_per_process)

    def _policy_specs(self, game: Env) -> dict[str, PolicySpec]:
        roles = list(game.layout.present_roles)
        players = parsed_players("frozen", self.frozen, game, agents=False)
        frozen = [name for player in players for name in player.names(game)]
        trained = [role for role in roles if role not in frozen]
        if not trained:
            raise ConfigError(
                f"frozen is {' '.join(self.frozen)}; expected one of the roles {roles} to be left to train"
            )
        names = names_of_policies(game, self.sharing, trained)
        by_role = trained if self.sharing == "agent" else []  # for the policies of all agents of a role
        changes = self._policy_changes([*by_role, *names])
        specs = {}
        for name in names:
            of_role = changes.get(role_of(game, name), {}) if by_role else {}
            values = {"population": self.population, **of_role, **changes.get(name, {})}
            population = values.pop("population")
            if type(population) is not int or population < 1:
                raise ConfigError(f"population of {name} in policies is {population!r:.80}; expected an int >= 1")
            config = dataclasses.replace(self.learner, **values)
            specs[name] = PolicySpec(config=config, population=population)
        for player in players:
            specs |= self._frozen_specs(game, player)
        return specs

    def _policy_changes(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Hyper-parameters of --policies, by policy or role."""
        try:
            changes = json.loads(self.policies)
        except json.JSONDecodeError as error:
            raise ConfigError(f"policies is {self.policies!r}; expected JSON: {error}") from None
        if not isinstance(changes, dict) or not all(isinstance(value, dict) for value in changes.values()):
            raise ConfigError(f'policies is {self.policies!r}; expected JSON like {{"tagger": {{"gamma": 0.9}}}}')
        if unknown := set(changes) - set(names):
            listed = ", ".join(map(repr, sorted(unknown)))
            raise ConfigError(f"unknown policy {listed} in policies; expected one of those that are trained: {names}")
        known = {"population", *(option.name for option in dataclasses.fields(self.learner))}
        for name, values in changes.items():
            if wrong := set(values) - known:
                raise ConfigError(f"unknown keys {sorted(wrong)} for {name}; known: {', '.join(sorted(known))}")
        return changes

    def _frozen_specs(self, game: Env, player: Player) -> dict[str, PolicySpec]:
        """Of the agents that are not trained."""
        if not player.is_run:
            return {name: PolicySpec(actor=actor) for name, actor in player.actors(game).items()}
        specs = {}
        for role in player.names(game):
            loaded = player.loaded(game, role, device="cpu")
            for name, policy in loaded.policies_of(role).items():
                specs[name] = self._frozen_spec(game, role, player.source, loaded.configs[name], policy)
        return specs

    def _frozen_spec(self, game: Env, role: str, source: str, config: LearnerConfig, policy: Policy) -> PolicySpec:
        if isinstance(policy, FixedPolicy):
            return PolicySpec(actor=policy.actor)
        if role in game.layout.action.bounds and config.squash != self.learner.squash:
            raise ConfigError(
                f"{source} was trained with squash {config.squash!r}; give --squash {config.squash}, "
                f"here it is {self.learner.squash!r}"
            )
        config = dataclasses.replace(config, **{key: getattr(self.learner, key) for key in RUN_WIDE_KEYS})
        return PolicySpec(config=config, weights=policy.state_dict(), train=False)


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """The options that decide which other options and defaults there are."""

    algorithm: AlgorithmName = "ppo"
    preset: PresetName = "fast"
    num_envs: int | Literal["auto"] | None = None
    population: int = 1
    policies: str = "{}"
    frozen: tuple[str, ...] = ()
    resume: Path | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> _Selection:
        """Those among the arguments; the defaults if one is wrong, which parsing all options then reports."""
        parsed = parsed_options(cls, arguments)
        return cls(resume=Path() if "--resume" in arguments else None) if parsed is None else parsed[0]

    def has_population(self) -> bool:
        """Whether several policies take the place of one; a wrong value of --policies is reported elsewhere."""
        try:
            given = json.loads(self.policies)
            sizes = [changes.get("population", 1) for changes in given.values()]
        except (AttributeError, ValueError, RecursionError):
            sizes = []
        return any(size != 1 for size in (self.population, *sizes))


def preset_defaults(
    game: type[Env], algorithm: AlgorithmName, name: PresetName
) -> tuple[int | Literal["auto"], LearnerConfig]:
    """Number of environments and hyper-parameters of a game for ``--algorithm ALGORITHM --preset NAME``.

    Raises:
        ConfigError: The preset is of another algorithm, or the game has none of that name.
    """
    preset = dict(game.preset)
    if name != "fast" and algorithm != "ppo":
        raise ConfigError(f"--preset {name} is of PPO; leave out --preset or --algorithm {algorithm}")
    if name == "sample-efficient":
        if not game.sample_efficient_preset:
            raise ConfigError(f"{game.name()} has no preset for few env-steps; leave out --preset sample-efficient")
        preset = dict(game.sample_efficient_preset)
    sizes = {name: preset[name] for name in RUN_SIZES if name in preset}
    if algorithm == "a2c":
        return "auto", PPOConfig.a2c()
    if algorithm == "ppo":
        preset = {**MAPPO, **sizes} if name == "mappo" else preset
        num_envs = preset.pop("num_envs", "auto")
        return num_envs, PPOConfig(**preset)
    preset = dict(game.algorithm_presets.get(algorithm, sizes))
    num_envs = preset.pop("num_envs", "auto")
    return num_envs, PQNConfig.vdn(**preset) if algorithm == "pqn-vdn" else PQNConfig(**preset)


def _default_opponents(selection: _Selection, game: type[Env], num_envs: int | Literal["auto"]) -> OpponentOptions:
    """Those of the game's preset; none with other hyper-parameters, frozen roles, or where there cannot be any."""
    others = selection.algorithm != "ppo" or selection.preset != "fast" or selection.frozen
    if not game.preset_opponents or others or selection.has_population() or num_processes() > 1:
        return OpponentOptions()
    return _preset_opponents(game, num_envs if selection.num_envs is None else selection.num_envs)


def _preset_opponents(game: type[Env], num_envs: int | Literal["auto"]) -> OpponentOptions:
    config = preset_opponents(game(), None if num_envs == "auto" else num_envs)
    return OpponentOptions() if config is None else OpponentOptions.of_config(config)


def _new_folder(name: str) -> Path:
    """A folder that no other run uses, even if several start in the same second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder
