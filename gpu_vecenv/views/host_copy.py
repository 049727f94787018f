"""HostCopy: what a step writes, as NumPy arrays; one copy and one synchronisation a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_vecenv.engine.step_buffers import StepBuffers, StepBuffersLayout

Arrays = dict[str, np.ndarray[Any, Any]]


class HostCopy:
    """Outputs for a client on the host: ``step(actions, out=copy.step_buffers())``, then ``copy.arrays()``.

    On the CPU the arrays are the memory that the kernel wrote. On a GPU the kernel writes into one device buffer, which
    is copied to fresh pinned memory; ``final_obs`` it writes into that pinned memory itself, because only the few rows
    that ended are written at all. Pinned memory is reused once the arrays that view it are gone: earlier outputs never
    change.
    """

    def __init__(self, layout: StepBuffersLayout) -> None:
        self._layout, self._pinned = layout, layout.device.type == "cuda"
        self._copied, self._unread = layout.nbytes_without_final_obs, False
        self._views = [
            (name, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype, shape, first * dtype.itemsize)
            for name, dtype, shape, _, first in layout.views
        ]
        if self._pinned:
            self._buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
            self._on_device = StepBuffers.allocate(layout, self._buffer)
            self._final_obs = layout.views[-1] if layout.has_final_obs else None

    def step_buffers(self) -> StepBuffers:
        """Where the next step writes."""
        if self._pinned and self._unread:  # an interrupted call: the kernel may still be writing into the last block
            torch.cuda.current_stream(self._layout.device).synchronize()
        self._unread = True
        self._host = torch.empty(self._layout.nbytes, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        if not self._pinned:
            return StepBuffers.allocate(self._layout, self._host)
        if self._final_obs is None:
            return self._on_device
        _, dtype, shape, strides, first = self._final_obs
        final_obs = self._host.view(dtype).as_strided(shape, strides, first)
        pointers = (*self._on_device.pointers[:-1], final_obs.data_ptr())
        return self._on_device._replace(pointers=pointers, final_obs=final_obs)

    def arrays(self) -> Arrays:
        """Name -> array of what has been written since ``step_buffers``; waits for the device."""
        if self._pinned:
            self._host[: self._copied].copy_(self._buffer[: self._copied], non_blocking=True)
            torch.cuda.current_stream(self._layout.device).synchronize()
        self._unread = False
        memory = self._host.numpy()
        return {name: np.ndarray(shape, dtype, memory, start) for name, dtype, shape, start in self._views}
