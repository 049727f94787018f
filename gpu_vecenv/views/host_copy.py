"""Copies of step buffers on the host, as NumPy arrays: one copy and one synchronisation per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpu_vecenv.engine.step_buffers import StepBuffers, StepBuffersLayout
from gpu_vecenv.engine.vec_env import VecEnv

Arrays = dict[str, np.ndarray[Any, Any]]


class HostCopy:
    """Step outputs on the host: ``step(actions, out=copy.step_buffers())``, then ``copy.arrays()``.

    On the CPU the arrays view the memory that the kernel wrote, allocated for several steps at a time. On a GPU the
    kernel writes into one device buffer, which is copied to fresh pinned memory. It writes ``final_obs`` directly into
    pinned memory, because only the few rows that ended are written. Pinned memory is reused after the arrays that view
    it are freed, so earlier outputs never change.
    """

    def __init__(self, layout: StepBuffersLayout) -> None:
        self._layout, self._pinned = layout, layout.device.type == "cuda"
        self._copied, self._unread = layout.nbytes_without_final_obs, False
        self._views = [
            (name, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, shape, first * dtype.itemsize)
            for name, dtype, shape, _, first in layout.views
        ]
        self._unused: list[tuple[StepBuffers, Arrays]] = []  # on the CPU
        if self._pinned:
            self._buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
            self._on_device = StepBuffers.allocate(layout, self._buffer)
            self._final_obs = layout.views[-1] if layout.has_final_obs else None

    def step_buffers(self) -> StepBuffers:
        """Buffers for the next step."""
        if not self._pinned:
            if not self._unused:
                self._unused = _host_buffers(self._layout)
            buffers, self._arrays = self._unused.pop()
            return buffers
        if self._unread:  # an interrupted call: the kernel may still be writing into the last block
            torch.cuda.current_stream(self._layout.device).synchronize()
        self._unread = True
        self._host = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        if self._final_obs is None:
            return self._on_device
        _, dtype, shape, strides, first = self._final_obs
        final_obs = self._host.view(dtype).as_strided(shape, strides, first)
        return self._on_device.with_final_obs(final_obs)

    def arrays(self) -> Arrays:
        """Name -> array of the outputs written to the last ``step_buffers``; synchronises with the device."""
        if not self._pinned:
            return self._arrays
        self._host[: self._copied].copy_(self._buffer[: self._copied], non_blocking=True)
        torch.cuda.current_stream(self._layout.device).synchronize()
        self._unread = False
        memory = self._host.numpy()
        return {name: np.ndarray(shape, dtype, memory, start) for name, dtype, shape, start in self._views}


def _host_buffers(layout: StepBuffersLayout) -> list[tuple[StepBuffers, Arrays]]:
    buffers, allocations = StepBuffers.allocate_several(layout)
    names = list(allocations)
    columns = (allocations[name].numpy() for name in names)
    return [(entry, dict(zip(names, arrays, strict=True))) for entry, *arrays in zip(buffers, *columns, strict=True)]


def fill_final_obs(arrays: Arrays) -> None:
    """Give rows of "final_obs" without a final observation, which no step writes, the observation."""
    if "final_obs" in arrays:
        mask = arrays["final_mask"]
        written = mask.reshape(*mask.shape, *[1] * (arrays["obs"].ndim - mask.ndim))
        np.copyto(arrays["final_obs"], arrays["obs"], where=~written)


class HostCopyWithoutObs:
    """As HostCopy, but observations stay on the device."""

    def __init__(self, layout: StepBuffersLayout) -> None:
        self._layout, self._on_host = layout, replace(layout, device=torch.device("cpu"))
        self._first = next(at * dtype.itemsize for name, dtype, *_, at in layout.views if name == "rewards")

    def step_buffers(self) -> StepBuffers:
        """Fresh buffers for the next step."""
        self._buffer = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._layout.device)
        return StepBuffers.allocate(self._layout, self._buffer)

    def arrays(self) -> Arrays:
        """Name -> array of the outputs of the last ``step_buffers``, without "obs"; synchronises with the device."""
        host = torch.empty(self._layout.nbytes, dtype=torch.uint8, device="cpu")
        host[self._first :] = self._buffer[self._first :]
        tensors = StepBuffers.allocate(self._on_host, host).tensors()
        return {name: tensor.numpy() for name, tensor in tensors.items() if name != "obs"}


class HostMasks:
    """Host copy of the flags and the action mask for the next step; callers may modify infos without effect on it.

    Args:
        env: The environment.
        arrays: The outputs of its last step.
    """

    def __init__(self, env: VecEnv, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        self.loads = env.loads
        self.active = arrays["active"].copy()
        self.acting = self.active & arrays["acting"] if "acting" in arrays else self.active
        self.action_mask = arrays["action_mask"].copy() if "action_mask" in arrays else None

    @staticmethod
    def current(env: VecEnv, cached: HostMasks | None) -> HostMasks:
        """``cached``, or the masks of the environment if a state has been loaded since."""
        if cached is not None and cached.loads == env.loads:
            return cached
        tensors = {"active": env.active, "acting": env.acting}
        if env.game.layout.masks_actions:
            tensors["action_mask"] = env.action_mask
        return HostMasks(env, {name: tensor.cpu().numpy() for name, tensor in tensors.items()})
