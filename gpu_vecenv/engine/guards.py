"""Guard bands of debug builds: bytes between environments, in state and outputs, that no kernel may write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from gpu_vecenv.engine.data_manager import DataManager
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.errors import EnvContractError

GUARD_BYTE = 0xA5  # unlikely as a float, an index and a flag


def state_guard_bands(data: DataManager) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and band, (num_envs, items), of every tensor that has one."""
    for name, tensor in data.items():
        memory = data.memory(name)
        if memory is not tensor:
            yield name, memory[:, tensor[0].numel() :]


def output_guard_bands(buffers: StepBuffers) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and band, (num_envs, guard rows, …), of every tensor of step buffers."""
    for name, tensor in buffers.tensors().items():
        shape = (tensor.shape[0], buffers.layout.guard_rows, *tensor.shape[2:])
        start = tensor.storage_offset() + tensor.shape[1] * tensor.stride(1)
        yield name, tensor.as_strided(shape, tensor.stride(), start)


def fill(bands: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the guard bytes."""
    for _, band in bands:
        band.view(torch.uint8).fill_(GUARD_BYTE)


def check(bands: Iterable[tuple[str, torch.Tensor]], call: str) -> None:
    """Compare the guard bytes; synchronises with the device.

    Raises:
        EnvContractError: Some of them have changed.
    """
    for name, band in bands:
        written = (band.view(torch.uint8) != GUARD_BYTE).flatten(1).nonzero()
        if len(written):
            env_index, offset = written[0].tolist()
            raise EnvContractError(
                f"{call} wrote {len(written)} bytes outside of {name}: the first is byte {offset} after those "
                "of environment "
                f"{env_index}; expected indices within the environment (agents, then the field's own sizes)"
            )
