"""Symbols of a compiled binary: variables in writable memory, of a shared library or a cubin. Both are ELF files."""

from __future__ import annotations

import struct
from typing import NamedTuple

# From the ELF specification, version 1.2, and the System V ABI for 64-bit objects.
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE, WRITABLE = 2, 1
OBJECT, FILE, THREAD_LOCAL = 1, 4, 6
# Start-up code of the C library in every shared library; and memory that a block of a GPU shares during one launch.
STARTUP_FILE, BLOCK_MEMORY, GPU_MEMORY = "crtstuff.c", ".nv.shared", ".nv.global"
RELOCATED_CONSTANTS = ".data.rel.ro"  # constants that hold addresses: read-only once these are known


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def writable_variables(binary: bytes) -> list[tuple[str, str]]:
    """Mangled name and section of each variable in writable memory: global, static and thread-local ones.

    Those of the start-up code are left out, and constants of the host, whose memory is read-only; a GPU has no
    read-only memory for static constants of functions. Empty for a binary that is not a 64-bit ELF file of this byte
    order.
    """
    if binary[:6] != b"\x7fELF\x02\x01":
        return []
    header = HEADER.unpack_from(binary)
    start, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    sections = [_Section(*SECTION.unpack_from(binary, start + k * entry_size)) for k in range(count)]
    names = sections[names_index]
    found, startup = [], False
    for table in sections:
        if table.kind != SYMBOL_TABLE:
            continue
        for at in range(table.offset, table.offset + table.size, SYMBOL.size):
            name_at, info, _, index, _, size = SYMBOL.unpack_from(binary, at)
            name = _string(binary, sections[table.link], name_at)
            if info & 15 == FILE:
                startup = name == STARTUP_FILE
            if info & 15 not in (OBJECT, THREAD_LOCAL) or size == 0 or not 0 < index < count or startup:
                continue
            section = _string(binary, names, sections[index].name)
            if sections[index].flags & WRITABLE and not section.startswith((BLOCK_MEMORY, RELOCATED_CONSTANTS)):
                found.append((name, section))
    return found


def _string(binary: bytes, table: _Section, at: int) -> str:
    start = table.offset + at
    return binary[start : binary.index(b"\0", start)].decode(errors="replace")
