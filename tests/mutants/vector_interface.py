"""The interface itself, refusals, global state and leaks: bugs for K00 and K14 to K18."""

import os
import random
import threading

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError, InvalidAction
from gymnasium.vector.utils import batch_space

from mutants.ring import Ring, planted


@planted("K00")
class ActionSpaceOfOneRow(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.action_space = self.single_action_space


@planted("K00", agents=2)
class ObservationsOfEnvironmentsNotRows(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.observation_space = batch_space(self.single_observation_space, self.num_rings)


@planted("K00")
class InfoIsAListAfterAStep(Ring):
    def step(self, actions):
        *outputs, info = super().step(actions)
        return *outputs, [info]


@planted("K00")
class ResetReturnsNoInfo(Ring):
    def reset(self, **arguments):
        return super().reset(**arguments)[0], None


class Lenient(Ring):
    """Prepares what it is given until it passes."""

    def prepared(self, actions):
        raise NotImplementedError

    def checked_moves(self, actions):
        return super().checked_moves(self.prepared(actions))


@planted("K14")
class OutOfRangeAccepted(Lenient):
    def prepared(self, actions):
        return np.minimum(actions, 2) if isinstance(actions, np.ndarray) and actions.dtype == np.int64 else actions


@planted("K14")
class NegativeAccepted(Lenient):
    def prepared(self, actions):
        return np.maximum(actions, 0) if isinstance(actions, np.ndarray) and actions.dtype == np.int64 else actions


@planted("K14")
class OnlyTheFirstRowChecked(Lenient):
    def prepared(self, actions):
        if (
            isinstance(actions, np.ndarray)
            and actions.dtype == np.int64
            and actions.ndim == 1
            and actions[0] in range(3)
        ):
            return actions % 3
        return actions


@planted("K14")
class MiddleRowNotChecked(Lenient):
    def prepared(self, actions):
        if isinstance(actions, np.ndarray) and actions.dtype == np.int64 and actions.shape == (self.num_envs,):
            actions = actions.copy()
            actions[1:-1] %= 3
        return actions


@planted("K14")
class Int32ReadAsInt64(Lenient):
    def prepared(self, actions):
        if isinstance(actions, np.ndarray) and actions.dtype == np.int32 and actions.shape == (self.num_envs,):
            return np.frombuffer(actions.tobytes() * 2, np.int64)[: self.num_envs] % 3
        return actions


@planted("K14", output="torch")
class StridesIgnored(Lenient):
    def prepared(self, actions):
        if isinstance(actions, torch.Tensor) and not actions.is_contiguous():
            return torch.as_strided(actions, actions.shape, torch.empty(actions.shape).stride())
        return actions


@planted("K14", continuous=True)
class ReadInTheOrderOfMemory(Lenient):
    def prepared(self, actions):
        return actions.ravel("K").reshape(actions.shape) if isinstance(actions, np.ndarray) else actions


@planted("K14")
class FloatsAccepted(Lenient):
    def prepared(self, actions):
        if getattr(actions, "dtype", None) == np.float32 and np.isfinite(actions).all():
            return actions.astype(np.int64)
        return actions


@planted("K14", continuous=True)
class NanAccepted(Lenient):
    def prepared(self, actions):
        return np.nan_to_num(actions, posinf=9, neginf=-9) if isinstance(actions, np.ndarray) else actions


@planted("K14")
class OneActionForAllAccepted(Lenient):
    def prepared(self, actions):
        if isinstance(actions, np.ndarray) and actions.shape in ((), (1,)) and self.num_envs > 1:
            return np.broadcast_to(actions, (self.num_envs,))
        return actions


@planted("K14")
class NoneIsAnAction(Lenient):
    def prepared(self, actions):
        return np.ones(self.num_envs, np.int64) if actions is None else actions


@planted("K14", output="torch")
class RefusedAfterTheClockMoved(Ring):
    def checked_moves(self, actions):
        self.time += 1
        moves = super().checked_moves(actions)
        self.time -= 1
        return moves


@planted("K14")
class RefusedByIndexError(Ring):
    def checked_moves(self, actions):
        try:
            return super().checked_moves(actions)
        except InvalidAction as error:
            raise IndexError(str(error)) from error


@planted("K14", output="torch", continuous=True)
class GradientAccepted(Lenient):
    def prepared(self, actions):
        return actions.detach() if isinstance(actions, torch.Tensor) else actions


@planted("K15")
class StepBeforeReset(Ring):
    def check_callable(self):
        if self.closed:
            super().check_callable()


@planted("K15")
class StepAfterClose(Ring):
    def check_callable(self):
        if not self.closed:
            super().check_callable()


@planted("K15")
class ResetAfterClose(Ring):
    def reset(self, **arguments):
        closed, self.closed = self.closed, False
        outputs = super().reset(**arguments)
        self.closed = closed
        return outputs


@planted("K15")
class SecondCloseFails(Ring):
    def close(self, **arguments):
        if self.closed:
            raise ClosedEnvironmentError("close after close")
        super().close(**arguments)


@planted("K16")
class NegativeSeedAccepted(Ring):
    def validate_seed(self, seed):
        return super().validate_seed(abs(seed) if type(seed) is int else seed)


@planted("K16")
class SeedRounded(Ring):
    def validate_seed(self, seed):
        return super().validate_seed(int(seed) if type(seed) is float and seed == seed else seed)


@planted("K16")
class MaskOfNumbersAccepted(Ring):
    def validate_mask(self, options):
        if options and "reset_mask" in options:
            options = options | {"reset_mask": np.asarray(options["reset_mask"]).astype(np.bool_)}
        return super().validate_mask(options)


@planted("K16")
class MaskBroadcast(Ring):
    def validate_mask(self, options):
        mask = (options or {}).get("reset_mask")
        if isinstance(mask, np.ndarray) and mask.shape == (1,):
            options = {"reset_mask": np.repeat(mask, self.num_envs)}
        return super().validate_mask(options)


@planted("K16")
class SeedRefusedAfterTheReset(Ring):
    def reset(self, *, seed=None, options=None):
        outputs = super().reset(seed=None, options=options)
        return outputs if seed is None else super().reset(seed=seed, options=options)


@planted("K17")
class GlobalNumpyUsed(Ring):
    def autoreset(self, chosen):
        np.random.random()
        super().autoreset(chosen)


@planted("K17")
class GlobalNumpySeeded(Ring):
    def reset_seed(self, seed, chosen):
        np.random.seed(seed % 2**32)
        super().reset_seed(seed, chosen)


@planted("K17")
class GlobalRandomUsed(Ring):
    def begin(self, chosen):
        random.random()
        super().begin(chosen)


@planted("K17")
class GlobalTorchSeeded(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)


@planted("K17")
class GlobalStatePutBackAfterUse(Ring):
    def observe(self):
        rows, state = super().observe(), random.getstate()
        rows[:, 3] = random.randrange(3)
        random.setstate(state)
        return rows


@planted("K18")
class EnvironmentKept(Ring):
    every = []  # noqa: RUF012, that it is shared is the bug

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.every.append(self)


@planted("K18")
class EmptiedEnvironmentKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        vars(self).clear()
        self.every.append(self)


@planted("K18")
class BufferKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        self.every.append(np.zeros(300))


@planted("K18")
class TensorKept(Ring):
    every = []  # noqa: RUF012

    def close_extras(self, **arguments):
        self.every.append(torch.zeros(300))


@planted("K18")
class FileLeftOpen(Ring):
    every = []  # noqa: RUF012

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.every.append(os.open(os.devnull, os.O_RDONLY))


@planted("K18")
class ThreadLeftRunning(Ring):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
