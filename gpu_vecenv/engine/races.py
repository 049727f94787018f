"""Debug builds: what the records of races.cuh say, as one sentence with file, line, element and threads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_vecenv.compile.codegen import own_source
from gpu_vecenv.compile.engine_kernels import GUARD_BYTES
from gpu_vecenv.compile.function_manager import Program
from gpu_vecenv.compile.scratch_members import ITEMS, SCRATCH_MEMBERS, member_names
from gpu_vecenv.declare.layout import GameLayout

READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_AFTER_WRITE, WRITTEN_BY_EVERY_THREAD = range(4)  # as in races.cuh
EVERY_THREAD, ATOMIC = -1, -2
LINE = re.compile(r'#line (\d+) "(.*)"$')
# What gives threads their indices: its name, and the two arguments of a loop.
LOOP = re.compile(r"\b(FOR_RANGE|FOR_OBS|ONCE)\b(?:\s*\(\s*(\w+)\s*,\s*((?:[^()]|\([^()]*\))*?)\s*\))?")
VERBS = {
    READ_AFTER_WRITE: ("wrote", "reads"),
    WRITE_AFTER_READ: ("read", "writes"),
    WRITE_AFTER_WRITE: ("wrote", "writes"),
}


@dataclass(frozen=True)
class Memory:
    """The tensors that device code of one environment accesses.

    Args:
        state: Name of the DataManager -> tensor.
        outputs: Name in the step buffers -> tensor.
        scratch: The bytes of Scratch, with their guard bytes, one after the other.
        scratch_bytes: Of each.
        program: The game's.
    """

    state: Iterable[tuple[str, torch.Tensor]]
    outputs: Mapping[str, torch.Tensor]
    scratch: torch.Tensor
    scratch_bytes: int
    program: Program

    def member(self, offset: int, layout: GameLayout) -> str:
        """The element of Scratch at an offset in bytes, as far as the source shows its name."""
        names = member_names(own_source(layout))
        measured = torch.zeros(max(1, ITEMS * len(names)), dtype=torch.int64)
        self.program.launch(SCRATCH_MEMBERS.name, 1, out=measured)
        for name, (first, size, element) in zip(
            names, measured[: ITEMS * len(names)].view(-1, ITEMS).tolist(), strict=True
        ):
            if first >= 0 and first <= offset < first + size:
                return f"io.scratch->{name}" + (f"[{(offset - first) // element}]" if element else "")
        return f"byte {offset} of Scratch"


@dataclass(frozen=True)
class Access:
    """One of the two accesses, or the place of a construct."""

    thread: int
    line: int
    file: str
    of_agents: bool

    def who(self, source: str, layout: GameLayout) -> str:
        """The thread, as the source names it."""
        at = f"{self.file}:{self.line}"
        if self.thread == EVERY_THREAD:
            return (
                f"the code after {at}, which every thread executes," if self.line else "the code before the first loop"
            )
        if self.thread == ATOMIC:
            return f"atomic_add in the loop at {at}"
        if self.of_agents:
            return f"agent {layout.agent_names[self.thread]} in the loop at {at}"
        loops = LOOP.findall(line_of(source, self.file, self.line))
        if len(loops) != 1:  # a macro of the game, or several in one line
            return f"index {self.thread} of the loop at {at}"
        kind, index, inner = loops[0]
        if kind == "ONCE":
            return f"ONCE at {at}"
        if kind == "FOR_OBS":
            agent, column = divmod(self.thread, layout.obs_size)
            return f"agent {layout.agent_names[agent]}, {inner} = {column}, in FOR_OBS at {at}"
        return f"{index} = {self.thread} in {kind} ({index}, {inner}) at {at}"


def line_of(source: str, file: str, number: int) -> str:
    """A line of a file whose text stands in ``source`` behind #line directives; "" if there is none."""
    here = at = None
    for line in source.splitlines():
        if mark := LINE.match(line):
            at, here = int(mark[1]), mark[2]
        elif at is not None:
            if (here, at) == (file, number):
                return line
            at += 1
    return ""


def race_sentence(
    record: Sequence[int], files: Mapping[int, str], source: str, layout: GameLayout, memory: Memory
) -> str:
    """What two threads access, where, and what to change."""
    _, kind, address = record[:3]
    before, after = (_access(record[k : k + 4], files) for k in (3, 7))
    what = element_at(address, layout, memory)
    if kind == WRITTEN_BY_EVERY_THREAD:
        return f"{after.who(source, layout)} writes {what}: write it in ONCE {{ }}, or in a loop for each item its own"
    first, second = VERBS[kind]
    sentence = f"{after.who(source, layout)} {second} {what}, which {before.who(source, layout)} {first}: "
    if (before.file, before.line) != (after.file, after.line):
        return f"{sentence}put group_sync() between the two"
    if kind == WRITE_AFTER_WRITE:
        return f"{sentence}let one thread write it, or use atomic_add for an integer"
    return f"{sentence}split the loop, with group_sync() between the two halves"


def misplaced_sentence(record: Sequence[int], files: Mapping[int, str]) -> str:
    """Which construct must be executed by all threads."""
    outer, inner = (_access(record[k : k + 4], files) for k in (3, 7))
    return (
        f"{inner.file}:{inner.line}: a loop over the threads of the group, ONCE in a loop, group_sync(), group_any() "
        f"or group_reduce_min() stands in the loop or ONCE of {outer.file}:{outer.line}: all threads must execute it; "
        "move it out, or write an ordinary for loop"
    )


def element_at(address: int, layout: GameLayout, memory: Memory) -> str:
    """The element at an address, as a game's source names it, with its environment."""
    offset = address - memory.scratch.data_ptr()
    if 0 <= offset < memory.scratch.numel():
        return memory.member(offset % memory.scratch_bytes - GUARD_BYTES, layout)
    for name, tensor in (*memory.outputs.items(), *memory.state):
        offset = (address - tensor.data_ptr()) // tensor.element_size()
        if address < tensor.data_ptr() or offset >= tensor.stride(0) * len(tensor):
            continue
        env_index, rest = divmod(offset, tensor.stride(0))
        shape = tensor.shape[1:]
        if name in ("obs", "final_obs", "action_mask"):  # one axis in the source
            shape = torch.Size([tensor.shape[1], tensor[0, 0].numel()])
        indices = list[int]()
        for size in reversed(shape[1:]):
            rest, k = divmod(rest, size)
            indices.insert(0, k)
        indices.insert(0, rest)
        source = f"s.{name.removeprefix('state_')}" if name.startswith("state_") else f"io.{name}"
        return f"{source}{''.join(f'[{k}]' for k in indices)} of environment {env_index}"
    return "memory of another kind"


def _access(items: Sequence[int], files: Mapping[int, str]) -> Access:
    thread, line, file, of_agents = items
    return Access(thread, line, files.get(file, "unknown file"), bool(of_agents))
