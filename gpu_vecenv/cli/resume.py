"""``gpu-vecenv train --resume``: continue a run from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_vecenv.cli.actors import Player
from gpu_vecenv.cli.curriculum import curriculum_of
from gpu_vecenv.cli.game_files import folder_of_run, load_game_of_run
from gpu_vecenv.cli.opponents import OpponentOptions, errors_name_options
from gpu_vecenv.cli.options import (
    PROGRAM,
    DeviceOptions,
    OptionalGameName,
    check_same_game,
    game_class,
    parsed_options,
)
from gpu_vecenv.cli.runs import RUN_FORMAT, check_watch, settings_of_sources, train_runs
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.importing import imported
from gpu_vecenv.envs.registry import find_game, stored_configuration
from gpu_vecenv.errors import CheckpointVersionError, ConfigError, UnknownGameError
from gpu_vecenv.train.checkpoint import CHECKPOINTS, CheckpointFolder
from gpu_vecenv.train.distributed import World, process_group
from gpu_vecenv.train.fixed_policy import FUNCTION, RANDOM, stored_actors
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.populations import stored_members, stored_populations
from gpu_vecenv.train.run_folder import SETTINGS, RunConfig, check_end, read_seeds, resume_command, run_folders
from gpu_vecenv.train.stored_config import stored_config, stored_configs, with_defaults
from gpu_vecenv.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Resume(DeviceOptions):
    """Continue an interrupted run, or those of several seeds, bit-identically, with the configuration stored in it."""

    game_name: OptionalGameName = None  # file that declares the game; None: the run's, unless it has changed
    resume: Path  # folder of the run
    total_steps: int | None = param(None, low=1)  # a new end of the run; the schedules change from here on
    reward: str | None = None  # where its reward function is now; None: where it was
    schedules: str | None = None  # where its curriculum is now; None: where it was
    watch: bool = False  # serve a page on this computer that plays the current policies and draws the curves
    device: str | None = None  # cpu, cuda or cuda:1; None: the run's

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def check_options(cls, arguments: Sequence[str]) -> None:
        """Raise ConfigError if one of the options is not of a resumed run; a wrong value is reported elsewhere."""
        parsed = parsed_options(cls, arguments)
        given = [word.partition("=")[0] for word in (parsed[1] if parsed else ()) if word.startswith("--")]
        if wrong := [name for name in given if name != "--help"]:
            names = [field.name for field in dataclasses.fields(cls) if field.name not in ("game_name", "resume")]
            options = ["--" + name.replace("_", "-") for name in names]
            raise ConfigError(
                f"a resumed run keeps its game and hyper-parameters: it takes no {', '.join(wrong)}; expected one of "
                f"{', '.join(options)}. Another value needs a new run: {PROGRAM} train "
                "GAME, to which PolicySpec(weights=…) in Python gives these weights"
            )

    def __call__(self) -> int:
        """Continue; the exit code of the run."""
        given = game_class(self.game_name) if self.game_name is not None else None
        seeds = read_seeds(self.resume)
        folders = run_folders(self.resume)
        begun = [folder for folder in folders if CheckpointFolder(folder / CHECKPOINTS).begun()]
        settings, run_config = _read_settings((begun or folders)[0])
        if given is None:
            load_game_of_run((begun or folders)[0])
        else:
            check_same_game(given, f"the game given, {self.game_name},", settings["game"], str(self.resume))
        with process_group(settings["device"] if self.device is None else self.device) as (world, device):
            check_watch(self.watch, world)
            if seeds is None or not begun:
                manifests = [_newest_manifest(folders[0], world)]
            else:  # a seed that has no checkpoint begins anew, like those that have
                found = {folder: _newest_manifest(folder, world) for folder in begun}
                pairs = zip(folders, seeds, strict=True)
                manifests = [found.get(folder, {**found[begun[0]], "seed": seed}) for folder, seed in pairs]
            trainers = [self._trainer(manifest, given, settings, device) for manifest in manifests]
            check_end(trainers[0], max(manifest["iteration"] for manifest in manifests), self.resume)
            given_now = settings_of_sources(self.game_name, trainers[0].env.game, self.reward, self.schedules)
            moved = {name: value for name, value in given_now.items() if value is not None}
            how = {"of_seeds": seeds is not None, "watch": self.watch, "resume": True}
            return train_runs(
                trainers, self.resume, run_config, settings={**settings, **moved} if moved else None, **how
            )

    def _trainer(
        self, manifest: Mapping[str, Any], given: type[Env] | None, settings: Mapping[str, Any], device: str | None
    ) -> Trainer:
        """A new trainer like the one of a checkpoint's manifest."""
        if manifest["game"] != settings["game"]:
            raise ConfigError(f"{self.resume} is a run of {settings['game']}; its checkpoint is of {manifest['game']}")
        kind = given or _registered(manifest["game"], self.resume)
        env = VecEnv(
            kind(**_known_keys(kind, stored_configuration(kind, manifest["game_config"]))),
            manifest["num_envs"],
            resolve_device(device),
            autoreset_mode="next_step",
            driver=self.driver,
            first_env_index=manifest["first_env_index"],
        )
        changes: dict[str, Any] = {} if self.total_steps is None else {"total_steps": self.total_steps}
        stored = stored_configs(manifest, str(self.resume))
        configs = {name: dataclasses.replace(config, **changes) for name, config in stored.items()}
        populations = stored_populations(manifest, str(self.resume))
        specs = {
            policy: PolicySpec(
                config=configs[first], train=first in manifest["trained"], population=populations.get(policy, 1)
            )
            for policy, (first, *_) in stored_members(populations, configs, str(self.resume)).items()
        }
        scripts = {script.role: script for script in (Player.parsed("frozen", x) for x in settings["frozen_scripts"])}
        for name, acts in stored_actors(manifest, str(self.resume)).items():
            if acts == FUNCTION and name not in scripts:
                raise ConfigError(f"{self.resume / SETTINGS} does not say which script plays {name}: frozen_scripts")
            actor: Any = scripts[name].actors(env.game)[name] if acts == FUNCTION else acts
            specs[name] = PolicySpec(config=configs[name], actor=actor)
        own = stored_config(manifest, str(self.resume))
        source = settings["reward"] if self.reward is None else self.reward
        reward = None if source is None else imported("reward", source)
        how = {"seed": manifest["seed"], "reward": reward, "graphs": settings["graphs"]}
        how["opponents"] = self._opponents(settings, env.game)
        how["curriculum"] = curriculum_of(settings["curriculum"] if self.schedules is None else self.schedules)
        with errors_name_options():
            return Trainer(env, dataclasses.replace(own, **changes), policies=specs, **how)

    def _opponents(self, settings: Mapping[str, Any], game: Env) -> OpponentsConfig | None:
        """Those of the run. Weights and results are of the checkpoint; what they play is opened again."""
        options = OpponentOptions.of_settings(settings["opponents"])
        try:
            return options.config(game)
        except ConfigError as error:
            raise ConfigError(
                f"an opponent of {self.resume} cannot be opened again: {error}. A resumed run needs it where it was"
            ) from error


def _newest_manifest(folder: Path, world: World) -> dict[str, Any]:
    """The manifest of this process's newest usable checkpoint in a run folder, with all options."""
    manifest = CheckpointFolder(folder / CHECKPOINTS, rank=world.rank, world_size=world.size).load()[1]
    return with_defaults(manifest, str(folder))


def _read_settings(folder: Path) -> tuple[dict[str, Any], RunConfig]:
    path = folder / SETTINGS
    if not path.is_file():
        found = folder_of_run(folder)
        resumes = "" if found is None else f"; a run resumes from its folder, with all members: {resume_command(found)}"
        raise FileNotFoundError(f"no run at {folder}: it has no {SETTINGS}{resumes}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if (found := settings.get("format", 1)) != RUN_FORMAT:
            raise CheckpointVersionError(
                f"{path} was written by another version of gpu_vecenv: its format is {found!r}; expected {RUN_FORMAT}. "
                "Resume with the version that wrote it, or train again"
            )
        settings = {"reward": None, "curriculum": None, "opponents": {}, "frozen_scripts": [], **settings}
        kinds = {
            "reward": str | None,
            "curriculum": str | None,
            "opponents": dict,
            "frozen_scripts": list,
            "game": str,
            "device": str | None,
            "graphs": bool,
            "run": dict,
        }
        if wrong := [key for key, kind in kinds.items() if not isinstance(settings[key], kind)]:
            raise ConfigError(f"{', '.join(wrong)} has the wrong type")
        # Runs of versions that had no other fixed opponents.
        return settings, RunConfig(**{"eval_opponents": (RANDOM,), **settings["run"]})
    except CheckpointVersionError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or of another version: {type(error).__name__}: {error}") from error


def _registered(name: str, folder: Path) -> type[Env]:
    try:
        return find_game(name)
    except UnknownGameError:
        raise ConfigError(
            f"{folder} is a run of {name}, which is not a bundled game; give its file: {PROGRAM} train my_game.py "
            f"--resume {folder}"
        ) from None


def _known_keys(game: type[Env], config: Mapping[str, Any]) -> dict[str, Any]:
    known = {option.name for option in dataclasses.fields(game)}
    if unknown := set(config) - known:
        raise ConfigError(f"the run was made with keys that {game.__name__} does not have: {sorted(unknown)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
