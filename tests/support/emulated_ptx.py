"""Translates inline PTX for the emulation of CUDA: each asm statement becomes a call of a function of emulated_ptx.hpp.

The function has the instruction's name with underscores, and takes its operands in the order of the PTX text. An
instruction without a function there is an error of the compiler. Instructions in braces, with registers of their own,
are one function: their names follow one another, and it takes all operands in their order.
"""

import ast
import re
from collections.abc import Iterator

from gpu_vecenv.compile.tokens import TOKEN

BLOCK = re.compile(r"\s*\{\s*(?:\.reg[^;]*;\s*)+(.*;)\s*\}\s*", re.DOTALL)
INSTRUCTION = re.compile(r"\s*([a-z][\w.:]*)\s*([^;]*?)\s*;?\s*")
OPERAND = re.compile(r'"([=+]?)&?([a-z])"\s*(\(.*\))', re.DOTALL)


def translate(text: str) -> str:
    """The source with calls in place of its asm statements."""
    parts, at = [], 0
    for begin, end, words in _statements(text):
        parts += [text[at:begin], _call(words)]
        at = end
    return "".join([*parts, text[at:]])


def _statements(text: str) -> Iterator[tuple[int, int, list[str]]]:
    """Begin and end of each asm statement, and its tokens in between the parentheses, with " " for blanks."""
    begin, depth, words = None, 0, list[str]()
    for match in TOKEN.finditer(text):
        if begin is None:
            if match[0] == "asm":
                begin, depth, words = match.start(), 0, []
            continue
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        continued = match[0] == "\\"  # the end of a line of a macro
        words.append(" " if continued or match.lastgroup in ("blank", "newline") else match[0])
        if depth == 0 and match[0] == ")":
            yield begin, match.end(), words[words.index("(") + 1 : -1]
            begin = None


def _call(words: list[str]) -> str:
    template, outputs, inputs, *_ = [*_split(words, ":"), [], []]
    ptx = "".join(ast.literal_eval(word) for word in template if word != " ")
    block = BLOCK.fullmatch(ptx)
    parts = [INSTRUCTION.fullmatch(part) for part in (block[1].split(";")[:-1] if block else [ptx])]
    instruction = parts[-1]
    if instruction is None or not all(parts):
        raise ValueError(f"asm has not one PTX instruction: {ptx!r}")
    operands = [
        _operand(words) for part in (outputs, inputs) for words in _split(part, ",") if words != [" "] * len(words)
    ]
    used = [int(number) for number in re.findall(r"%(\d+)", instruction[2])]
    for number, (access, _) in enumerate(operands):
        if access == "=" and used.count(number) > 1:
            raise ValueError(f"asm reads %{number}, whose constraint says that it is only written: {ptx!r}")
    if used and max(used) >= len(operands):
        raise ValueError(f"asm has no operand %{max(used)}: {ptx!r}")
    if block:
        name = "_".join(part[1] for part in parts if part)
        return f"ptx::{re.sub(r'[.:]+', '_', name)}({', '.join(argument for _, argument in operands)})"
    arguments = re.sub(r"[{}\[\]]", "", instruction[2])
    arguments = re.sub(r"%(\d+)", lambda match: operands[int(match[1])][1], arguments)
    return f"ptx::{re.sub(r'[.:]+', '_', instruction[1])}({arguments})"


def _operand(words: list[str]) -> tuple[str, str]:
    """Whether an operand is written ("=", "+" or ""), and the argument: an lvalue, or a value of the declared type."""
    operand = "".join(words).strip()
    parts = OPERAND.fullmatch(operand)
    if parts is None:
        raise ValueError(f"asm has an operand without a translation: {operand}")
    access, letter, expression = parts.groups()
    return access, expression if access else f"ptx::{letter}{expression}"


def _split(words: list[str], separator: str) -> list[list[str]]:
    """Parts between separators outside of brackets; "::" separates like two of ":"."""
    parts, depth = [list[str]()], 0
    for word in words:
        depth += (word in "([{") - (word in ")]}")
        if depth == 0 and word in (separator, 2 * separator):
            parts += [[] for _ in word]
        else:
            parts[-1].append(word)
    return parts
