"""Typed errors: each also is the builtin (and Gymnasium's own class, where it has one) that callers already catch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import gymnasium.error


class ConfigError(ValueError):
    """A configuration key is unknown, of the wrong type or out of range."""


class EnvDefinitionError(ValueError):
    """A game's declaration contradicts itself or its device code."""


class SourceRuleError(EnvDefinitionError):
    """A game's device code uses what runs on one device only or gives each other bits; ``Env.allows`` permits it."""


class UnknownGameError(gymnasium.error.NameNotFound, ValueError):
    """No registered game has this name."""


class UnsupportedGameError(ConfigError):
    """Another library has no word for what this game does; the message names adapters that do."""


class CapacityError(ValueError):
    """What was asked for does not fit in memory; the message names the bytes and a size that fits."""


class DeviceUnavailableError(RuntimeError):
    """The device does not exist or cannot be used; the message says what was found."""


class CompilerError(RuntimeError):
    """No usable compiler, or the compiler itself failed to run."""


class KernelCompileError(RuntimeError):
    """Device code did not compile. ``log`` holds everything the compiler said."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log


class DeviceFaultError(RuntimeError):
    """A kernel failed on the device; the process has to be restarted."""


class EnvContractError(RuntimeError):
    """A game's device code breaks the engine's rules, as by writing outside of its replica; seen by debug builds."""


class ForkedProcessError(RuntimeError):
    """A forked process uses what its parent made on a GPU; the start method "spawn" works."""


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
    """A file is no checkpoint, or a damaged one."""


class ReplayFormatError(ValueError):
    """A file is no replay, or a damaged one."""


class ReplayMismatchError(ValueError):
    """A replay does not give the bits that were recorded, or its game is not as it was; the message says from where."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; nothing has been updated with it."""


class RankLostError(RuntimeError):
    """One of the processes that train together is gone; the others cannot go on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that ends an "unknown name" message: up to three near names, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known) or 'none'}"


class AgentKeyError(KeyError):
    """A dictionary's keys are not the agents (or roles) that it must name; the message has both."""

    def __str__(self) -> str:  # KeyError's own is the repr
        return str(self.args[0]) if self.args else ""


class PettingZooResetNeededError(ResetNeededError, AssertionError, AttributeError):
    """ResetNeededError where PettingZoo raises AssertionError, of methods, or AttributeError, of attributes."""


class UnknownModuleError(UnknownGameError, AttributeError):
    """No registered game has this name and version; raised where PettingZoo has a module for each game."""
