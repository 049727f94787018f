"""Debug builds: guard bands between environments, that no kernel may write, and records of indices out of bounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from gpu_vecenv.compile.bounds_source import (
    CHECKED_ARRAY,
    MISPLACED,
    RACE,
    RECORD_ITEMS,
    SCRATCH_GUARDS,
    checked_arrays,
    recorded_names,
)
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.compile.engine_kernels import GUARD_BYTE, BuildOptions
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.data_manager import DataManager
from gpu_vecenv.engine.races import Memory, misplaced_sentence, race_sentence
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.errors import DataRaceError, EnvContractError

FILE = re.compile(r'^#line \d+ "(.*)"$', re.MULTILINE)


def state_guard_bands(data: DataManager) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bands, (num_envs + 1, items), of every tensor that has them: before environment 0, after each."""
    for name, tensor in data.items():
        memory = data.memory(name)
        if memory is not tensor:
            num_envs, stride = memory.shape
            items = stride - tensor[0].numel()
            yield name, memory.as_strided((num_envs + 1, items), (stride, 1), memory.storage_offset() - items)


def output_guard_bands(buffers: StepBuffers) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bands, (num_envs + 1, guard rows, …), of every tensor of step buffers: as of the state."""
    rows = buffers.layout.guard_rows
    for name, tensor in buffers.tensors().items():
        shape = (tensor.shape[0] + 1, rows, *tensor.shape[2:])
        yield name, tensor.as_strided(shape, tensor.stride(), tensor.storage_offset() - rows * tensor.stride(1))


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
        rows = band.view(torch.uint8).flatten(1)
        written = (rows != GUARD_BYTE).nonzero()
        if len(written):
            row, offset = written[0].tolist()
            where = f"{offset} after those of environment {row - 1}"
            if row == 0:
                where = f"{rows.shape[1] - offset} before those of environment 0"
            raise EnvContractError(
                f"{call} wrote {len(written)} bytes outside of {name}: the first is byte {where}; expected indices "
                "within the environment (agents, then the field's own sizes)"
            )


def new_records(num_envs: int, device: torch.device) -> torch.Tensor:
    """Records of indices out of bounds and of changed guard bytes of Scratch, (num_envs, RECORD_ITEMS) int64, empty."""
    return torch.zeros((num_envs, RECORD_ITEMS), dtype=torch.int64, device=device)


def check_records(records: torch.Tensor, layout: GameLayout, build: BuildOptions, memory: Memory, call: str) -> None:
    """Read the records, and empty them; synchronises with the device.

    Raises:
        DataRaceError: Threads of a group would race on a GPU.
        EnvContractError: An index was out of bounds; the access was not executed. Or memory around Scratch was written.
    """
    found = records[:, 0].nonzero()[:, 0].tolist()
    if not found:
        return
    record = records[found[0]].tolist()
    records.zero_()
    number, axis, index, first, size, line, file_hash = record[:7]
    name = recorded_names(layout)[number - 1]
    if name == SCRATCH_GUARDS:
        where = f"{-index} before its first" if index < 0 else f"{index - size + 1} after its last"
        raise EnvContractError(
            f"{call} wrote outside of Scratch in environment {found[0]}: the nearest byte is {where}; expected indices "
            "within its arrays. For file and line, declare them as CheckedArray<type, size> name;"
        )
    source = game_source(layout, build)
    files = {hash_of(file): file for file in FILE.findall(source)}
    if name == RACE:
        raise DataRaceError(f"{call}: {race_sentence(record, files, source, layout, memory)}")
    if name == MISPLACED:
        raise DataRaceError(f"{call}: {misplaced_sentence(record, files)}")
    indices = [first if axis else index, *["…"] * (axis - 1), *[index] * (axis > 0)]
    if name == "io.actions":
        access = f"io.action({', '.join(map(str, indices))})"
    elif name == CHECKED_ARRAY:
        access = f"[{index}] of a CheckedArray"
    else:
        access = name + "".join(f"[{k}]" for k in indices)
    agent = f", agent {layout.agent_names[first]}" if axis and _has_agents(layout, name) else ""
    raise EnvContractError(
        f"{call}: {files.get(file_hash, 'unknown file')}:{line}: {access} is out of bounds in environment "
        f"{found[0]}{agent}: index {index} of axis {axis}; expected 0 to {size - 1}. The access was not executed"
    )


def hash_of(file: str) -> int:
    """32-bit FNV-1a of a file's name, as bounds.cuh has it."""
    value = 2166136261
    for byte in file.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _has_agents(layout: GameLayout, name: str) -> bool:
    """Whether the first axis of an array is that of the agents, as far as its size shows it."""
    shape = dict(checked_arrays(layout))[name]
    return name.startswith("io.") or (shape[0] == layout.num_agents > 1)
