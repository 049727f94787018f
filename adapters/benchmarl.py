"""BenchMARL: a game as a task, ``Experiment(task=benchmarl.task("simple_spread"), …)``.

BenchMARL creates its environments from a task: their number and device follow from its own configuration
(``on_policy_n_envs_per_worker``, ``evaluation_episodes``, ``sampling_device``). ``make`` and ``wrap`` return one
environment as the task creates them, a ``TorchRLEnv`` of ``gpu_vecenv.adapters.torchrl``, which documents the autoreset
mode ("disabled": TorchRL resets by mask) and the copies (of actions only). Roles are BenchMARL's groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium.spaces import Box, Discrete

from gpu_vecenv import BatchedParallelEnv, Env
from gpu_vecenv.adapters import check_actions, requires_extra, split_config, unsupported
from gpu_vecenv.errors import UnsupportedGameError, refuse_counterparts

with requires_extra("benchmarl"):
    from benchmarl.environments import TaskClass
    from torchrl.data import Composite
    from torchrl.envs import ActionMask, EnvBase, Transform

    from gpu_vecenv.adapters import torchrl as torchrl_adapter


class GameTask(TaskClass):
    """A game as a task of BenchMARL.

    Args:
        game: A registered name, an Env class or an Env.
        config: The game's configuration, and other arguments of ``gpu_vecenv.adapters.torchrl.make``: with
            ``return_state=True`` critics get all observations of an environment instead of those of their group, with
            ``render_mode="rgb_array"`` evaluations are recorded as video.

    Raises:
        ConfigError, UnknownGameError: As ``gpu_vecenv.configure``.
        UnsupportedGameError: Actions are MultiDiscrete, or those of some roles a Box and of others Discrete, or the
            game has no ``max_steps``.
    """

    def __init__(self, game: Any, config: dict[str, Any]) -> None:
        self.game: Env
        by_experiment = dict.fromkeys(("num_envs", "device", "seed"), "by the Experiment's configuration")
        self.game, arguments = split_config(game, config, **by_experiment)
        self.arguments = {key: value for key, value in arguments.items() if key not in by_experiment}
        checked(self.game)
        super().__init__(self.game.name(), {**dataclasses.asdict(self.game), **self.arguments})

    def get_env_fun(self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any) -> Callable[[], Any]:
        """A function that makes ``num_envs`` environments, whose first reset uses the seed."""
        return partial(_seeded, seed, self.game, num_envs, device, **self.arguments)

    def supports_continuous_actions(self) -> bool:
        """Whether actions are a Box."""
        return self.game.layout.action.continuous

    def supports_discrete_actions(self) -> bool:
        """Whether actions are Discrete."""
        return not self.game.layout.action.continuous

    def max_steps(self, env: EnvBase) -> int:
        """The game's ``max_steps``."""
        return int(self.game.max_steps)  # type: ignore[attr-defined]

    def has_render(self, env: EnvBase) -> bool:
        """Whether the environment renders frames."""
        return self.arguments.get("render_mode") == "rgb_array"

    @staticmethod
    def render_callback(experiment: Any, env: EnvBase, data: Any) -> Any:
        """A frame of the first environment."""
        return env.env.render()[0]

    def group_map(self, env: EnvBase) -> dict[str, list[str]]:
        """Role -> its agents' names."""
        return dict(env.group_map)

    def observation_spec(self, env: EnvBase) -> Composite:
        """Observation spec of each group, without the batch axis."""
        return _of_groups(env, "observation")

    def action_mask_spec(self, env: EnvBase) -> Composite | None:
        """Action mask spec of each group, if the game masks actions."""
        return _of_groups(env, "action_mask") if self.game.layout.masks_actions else None

    def action_spec(self, env: EnvBase) -> Composite:
        """Action spec of each group."""
        return env.full_action_spec_unbatched

    def state_spec(self, env: EnvBase) -> Composite | None:
        """Spec of all observations of an environment, with ``return_state``."""
        spec = env.full_observation_spec_unbatched
        return Composite({"state": spec["state"]}) if "state" in spec else None

    def info_spec(self, env: EnvBase) -> Composite | None:
        """None: there are no infos."""
        return None

    def get_env_transforms(self, env: EnvBase) -> list[Transform]:
        """ActionMask for random actions, if the game masks actions."""
        groups = env.group_map if self.game.layout.masks_actions else ()
        return [ActionMask((group, "action"), (group, "action_mask")) for group in groups]

    @staticmethod
    def env_name() -> str:
        """First part of BenchMARL's task name."""
        return "gpu_vecenv"


def checked(game: Env) -> Env:
    """The game, if BenchMARL supports its actions and it has ``max_steps``.

    Raises:
        UnsupportedGameError: Otherwise.
    """
    action = game.layout.action
    for space in action.spaces.values():
        check_actions("BenchMARL", space, (Discrete, Box))
    if not action.continuous and not action.discrete:
        raise unsupported("BenchMARL", "a Box beside discrete actions", f"actions {dict(action.spaces)}")
    if getattr(game, "max_steps", None) is None:
        raise UnsupportedGameError(f"BenchMARL evaluates episodes of a known length; {game.name()} has no max_steps")
    return game


def _of_groups(env: EnvBase, key: str) -> Composite:
    spec = env.full_observation_spec_unbatched
    return Composite({group: Composite({key: spec[group, key]}, shape=spec[group].shape) for group in env.group_map})


def _seeded(seed: int | None, *args: Any, **arguments: Any) -> torchrl_adapter.TorchRLEnv:
    env = torchrl_adapter.make(*args, **arguments)
    env.set_seed(seed)
    return env


def task(game: Any, **config: Any) -> GameTask:
    """A game as a task of BenchMARL; ``config`` as for ``gpu_vecenv.adapters.torchrl.make``."""
    return GameTask(game, config)


@refuse_counterparts
def make(game: Any, num_envs: int, device: Any = None, **config: Any) -> torchrl_adapter.TorchRLEnv:
    """``num_envs`` environments as ``task(game, **config)`` creates them."""
    return task(game, **config).get_env_fun(num_envs, False, None, device)()


def wrap(env: BatchedParallelEnv, *, return_state: bool = False) -> torchrl_adapter.TorchRLEnv:
    """A BatchedParallelEnv as for ``gpu_vecenv.adapters.torchrl``, if BenchMARL can train on its game."""
    wrapped = torchrl_adapter.wrap(env, return_state=return_state)
    checked(env.game)
    return wrapped
