"""Preprocessing tokens of C++ source, after phases 1 to 3 of its translation: continued lines, comments, literals."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

TOKEN = re.compile(
    r"""(?P<newline>\n)
    |(?P<blank>[ \t\f\v\r]+|//[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<literal>(?:u8|[uUL])?(?:R"(?P<ends>[^\s()\\]{0,16})\(.*?\)(?P=ends)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<word>[^\W\d]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
    |(?P<punctuation>%:%:|%:|<%|%>|<:|:>|\#\#|::|->|&&|==|\S)""",
    re.DOTALL | re.VERBOSE,
)
DIGRAPHS = {"%:%:": "##", "%:": "#", "<%": "{", "%>": "}", "<:": "[", ":>": "]"}


class Token(NamedTuple):
    """One token; digraphs have the spelling of what they stand for.

    ``line`` is the index of its line in the source. ``directive`` is the name of the preprocessor directive that it is
    in, "" outside of these; ``begins`` is whether it is the first of a directive's replacement list or of a line.
    """

    text: str
    kind: str
    line: int
    directive: str = ""
    begins: bool = False


def tokens(source: str) -> Iterator[Token]:
    """The tokens of source, without comments and line ends."""
    joined, starts = _join_lines(source)
    line: list[Token] = []
    for match in TOKEN.finditer(joined):
        kind = match.lastgroup if match.lastgroup != "ends" else "literal"
        if kind == "newline":
            yield from _in_directive(line)
            line = []
        elif kind == "blank":
            line += [Token(" ", "blank", 0)] * bool(line)
        else:
            text = match[0]
            line.append(Token(DIGRAPHS.get(text, text), str(kind), bisect_right(starts, match.start()) - 1))
    yield from _in_directive(line)


def _join_lines(source: str) -> tuple[str, list[int]]:
    """The source without continued lines, and where in it each line of the source begins."""
    parts, starts, at, length = list[str](), [0], 0, 0
    for match in re.finditer(r"\\[ \t]*\r?\n|\n", source):
        kept = source[at : match.end()] if match[0] == "\n" else source[at : match.start()]
        parts.append(kept)
        length += len(kept)
        starts.append(length)
        at = match.end()
    return "".join([*parts, source[at:]]), starts


def _in_directive(line: list[Token]) -> Iterator[Token]:
    """The tokens of one line with the name of its directive; blanks are dropped."""
    shown = [token for token in line if token.kind != "blank"]
    if not shown or shown[0].text != "#":
        yield from (token._replace(begins=number == 0) for number, token in enumerate(shown))
        return
    name = shown[1].text if len(shown) > 1 else "#"
    begins = _macro_body(line) if name == "define" else 0
    yield from (token._replace(directive=name, begins=number in (0, begins)) for number, token in enumerate(shown))


def _macro_body(line: list[Token]) -> int:
    """Index, among the tokens of #define that are no blanks, of the first of the replacement list."""
    shown = [number for number, token in enumerate(line) if token.kind != "blank"]
    if len(shown) < 4 or shown[2] + 1 >= len(line) or line[shown[2] + 1].text != "(":
        return 3  # a macro without parameters
    closing = next((k for k, number in enumerate(shown) if line[number].text == ")"), len(shown))
    return closing + 1
