"""Typed errors. Each is also the builtin, and Gymnasium's class where there is one, that callers already catch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import gymnasium
import gymnasium.error


class ConfigError(ValueError):
    """A configuration key is unknown, of the wrong type or out of range."""


class UnknownOptionError(ConfigError, TypeError):
    """A class of options has none of this name; the message lists the nearest names."""


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


def nearest(name: str, known: Iterable[str], list_all: bool = False, others: Iterable[str] = ()) -> str:
    """End of an "unknown name" message: up to three similar names, and all if there are none or ``list_all``.

    ``others`` are valid too, but of another kind than those known: they are listed after them.
    """
    known, others = sorted(known), sorted(others)
    near = difflib.get_close_matches(name, [*known, *others], n=3, cutoff=0.5)
    everything = f"known: {', '.join(known) or 'none'}" + (f"; also valid: {', '.join(others)}" if others else "")
    if not near:
        return everything
    return f"nearest: {', '.join(near)}" + (f"; {everything}" if list_all else "")


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
