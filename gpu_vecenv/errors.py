"""Typed errors. Each is also the builtin, and Gymnasium's class where there is one, that callers already catch."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import gymnasium
import gymnasium.error

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
COUNTERPARTS = {  # names of options in Stable-Baselines3, CleanRL, RLlib, skrl, RSL-RL, rl_games -> those here
    **dict.fromkeys(("n_env", "n_envs", "nenvs", "num_env", "num_actors", "num_environments"), "num_envs"),
    **dict.fromkeys(("n_agent", "n_agents"), "num_agents"),
    "lr": "learning_rate",
    **dict.fromkeys(("total_timesteps", "total_timestep", "timesteps"), "total_steps"),
    **dict.fromkeys(("n_steps", "horizon", "horizon_length", "num_steps_per_env", "rollouts"), "num_steps"),
    **dict.fromkeys(("n_epochs", "update_epochs", "ppo_epoch", "mini_epochs", "num_learning_epochs"), "num_epochs"),
    **dict.fromkeys(("batch_size", "minibatch_size", "mini_batches", "num_mini_batches"), "num_minibatches"),
    **dict.fromkeys(("discount", "discount_factor"), "gamma"),
    **dict.fromkeys(("lam", "lambda", "lambda_"), "gae_lambda"),
    **dict.fromkeys(("clip_range", "clip_coef", "clip_param", "clip_ratio", "e_clip", "ratio_clip"), "clip"),
    **dict.fromkeys(("clip_range_vf", "vf_clip_param"), "value_clip"),
    **dict.fromkeys(("ent_coef", "entropy_coef", "entropy_coeff", "entropy_loss_scale"), "entropy_coefficient"),
    **dict.fromkeys(("vf_coef", "value_coef", "vf_loss_coeff", "value_loss_coef", "critic_coef"), "value_coefficient"),
    **dict.fromkeys(("grad_norm", "grad_clip", "grad_norm_clip"), "max_grad_norm"),
    **dict.fromkeys(("norm_adv", "normalize_advantage"), "normalize_advantages"),
    **dict.fromkeys(("net_arch", "hidden_dims", "fcnet_hiddens"), "hidden_sizes"),
    **dict.fromkeys(("activation_fn", "fcnet_activation"), "activation"),
    **dict.fromkeys(("max_episode_steps", "episode_length", "max_steps_per_episode"), "max_steps"),
}


class ConfigError(ValueError):
    """A configuration key is unknown, of the wrong type or out of range."""


class UnknownOptionError(ConfigError, TypeError):
    """A class or function has no option of this name; the message lists the nearest names."""


class EnvDefinitionError(ValueError):
    """A game's declaration contradicts itself or its device code."""


class SourceRuleError(EnvDefinitionError):
    """A game's device code uses what is not available, or not bit-identical, on both devices; see ``Env.allows``."""


class UnknownGameError(gymnasium.error.NameNotFound, ValueError):
    """No registered game has this name."""


class UnsupportedGameError(ConfigError):
    """Another library cannot represent this game; the message names adapters that can."""


class CapacityError(ValueError):
    """The requested size does not fit in memory; the message gives the bytes and a size that fits."""


class DeviceUnavailableError(RuntimeError):
    """The device does not exist or cannot be used; the message describes what was found."""


class CompilerError(RuntimeError):
    """No usable compiler, or the compiler itself failed to run."""


class KernelCompileError(RuntimeError):
    """Device code did not compile. ``log`` is the compiler's full output."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class DeviceFaultError(RuntimeError):
    """A kernel failed on the device; restart the process."""


class EnvContractError(RuntimeError):
    """A game's device code breaks the engine's contract, for instance writes outside of its environment."""


class DataRaceError(EnvContractError):
    """Threads of a group access the same memory without a ``group_sync()`` between, which only a GPU would show."""


class ForkedProcessError(RuntimeError):
    """A forked process uses GPU objects of its parent; use the start method "spawn"."""


class ConcurrentUseError(RuntimeError):
    """Two threads use one environment at the same time."""


class InvalidActionError(gymnasium.error.InvalidAction, ValueError):
    """An action is not finite or outside its space."""


class InvalidSeedError(gymnasium.error.Error, ValueError):
    """A seed is not an integer in [0, 2**64 - 1]."""


class ResetNeededError(gymnasium.error.ResetNeeded, RuntimeError):
    """``step`` was called before ``reset``."""


class ClosedEnvError(gymnasium.error.ClosedEnvironmentError, RuntimeError):
    """The environment has been closed."""


class CheckpointCorruptError(ValueError):
    """A file is not a checkpoint, or is damaged."""


class CheckpointVersionError(CheckpointCorruptError):
    """A checkpoint or run folder was written by another version of the library, in another format."""


class ExportError(RuntimeError):
    """A policy cannot be exported, or the exported one computes other results."""


class ReplayFormatError(ValueError):
    """A file is not a replay, or is damaged."""


class ReplayMismatchError(ValueError):
    """A replay differs bitwise from its recording, or its game has changed; the message has the first difference."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; no parameter was updated with it."""


class RankLostError(RuntimeError):
    """A process of a distributed training run was lost; the others cannot continue."""


class DependencyVersionError(ImportError):
    """An installed library is older than gpu_vecenv requires; the message has the command that updates it."""


LEAST_GYMNASIUM = (1, 1)  # as pyproject.toml says; the first with AutoresetMode


def check_gymnasium(version: str) -> None:
    """Raise DependencyVersionError if this version of Gymnasium is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_GYMNASIUM:
        raise DependencyVersionError(
            f'gymnasium is {version}; expected >= 1.1: pip install "gymnasium>=1.1,<2". Code for an older one keeps '
            "it in a Python environment of its own"
        )


check_gymnasium(gymnasium.__version__)


def counted(number: float, noun: str) -> str:
    """A number of things in English: 1 step, 1,000 steps."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def similar(name: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """The known name of what other libraries call ``name``, or up to three spelt like it, the nearest first."""
    known = sorted(known)
    if COUNTERPARTS.get(name) in known:
        return [COUNTERPARTS[name]]
    return difflib.get_close_matches(name, known, n=3, cutoff=cutoff)


def nearest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """End of an "unknown name" message: the similar names, or all if there are none.

    ``others`` are valid too, but of another kind than those known: they are listed after them.
    """
    known, others = sorted(known), sorted(others)
    if near := similar(name, [*known, *others]):
        return f"nearest: {', '.join(near)}"
    return f"known: {', '.join(known) or 'none'}" + (f"; also valid: {', '.join(others)}" if others else "")


def refuse_counterparts(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Decorator of a function with ``**options``: one of them with another library's name of an argument is refused.

    Raises:
        UnknownOptionError: Names the argument.
    """
    arguments = set(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*values: Arguments.args, **options: Arguments.kwargs) -> Returned:
        for name in options:
            if name not in arguments and COUNTERPARTS.get(name) in arguments:
                hint = nearest(name, arguments)
                raise UnknownOptionError(
                    f"{function.__name__}() has no argument {name!r} (= {options[name]!r:.80}); {hint}"
                )
        return function(*values, **options)

    return checked


class UnknownNameError(KeyError):
    """No tensor has this name; the message lists the nearest names."""

    def __str__(self) -> str:  # KeyError prints the repr
        return str(self.args[0]) if self.args else ""


class AgentKeyError(UnknownNameError):
    """A dictionary's keys are not the expected agents or roles; the message lists both."""


class PettingZooResetNeededError(ResetNeededError, AssertionError, AttributeError):
    """ResetNeededError in PettingZoo views, where PettingZoo raises AssertionError or AttributeError."""


class UnknownModuleError(UnknownGameError, AttributeError):
    """No registered game has this name and version; raised on attribute access to the PettingZoo module."""
