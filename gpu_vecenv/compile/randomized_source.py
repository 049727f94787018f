"""Randomised parameters in the source of a game: functions with their values, and constants that follow from them.

The source refers to a parameter by the name of a constant. Here that name becomes a macro, a call of the function that
returns the value of the environment at hand, and every constant that is computed from it becomes a function too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.errors import ConfigError

# What is no code: comments, literals, preprocessor lines.
NO_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE
)
LINE = re.compile(r'^#line (\d+) (".*")$', re.MULTILINE)
QUALIFIERS = r"(?:(?:\[\[\w+\]\]|static|inline|constexpr|const|TABLE)\s+)*"
# One scalar or several, as in constexpr float A = 1, B = 2; and any variable with an initial value.
SCALARS = re.compile(
    rf"\s*(?P<qualifiers>{QUALIFIERS})(?P<type>[A-Za-z_][\w:]*)\s+(?P<declared>[A-Za-z_]\w*\s*=.*)", re.DOTALL
)
VARIABLE = re.compile(
    rf"\s*(?P<qualifiers>{QUALIFIERS})[A-Za-z_][\w:<>,\s*&]*?[\s*&](?P<name>[A-Za-z_]\w*)\s*(?:\[[^=;]*\]\s*)*[={{]"
)
NAMESPACE = re.compile(r"(?:\bnamespace(?:\s+[\w:]+)?|\bextern)\s*")
NOT_A_VARIABLE = re.compile(
    r"\s*(?:template|using|typedef|struct|class|union|enum|namespace|extern|return)\b|[^=]*\boperator\b"
)
WORD = re.compile(r"\w+")
OPEN, CLOSE = "([{", ")]}"


def float_literal(value: float) -> str:
    """A float32 in C++."""
    text = f"{np.float32(value):.9g}"  # nine digits represent a float32 exactly
    return text + ("f" if "." in text or "e" in text else ".0f")


def parameter_functions(layout: GameLayout) -> str:
    """The functions of randomized.cuh that depend on the game, and the macros with the names of its constants."""
    names = [parameter.name for parameter in layout.randomized]
    draws = [
        f"s.{parameter.name}[0] = drawn(rng, {parameter.draw}, m.ranges[{row}]);"
        for row, parameter in enumerate(layout.randomized)
    ]
    lines = [
        '#line 1 "randomised parameters"',
        "namespace randomized {",
        f"constexpr int NUM_PARAMETERS = {len(names)};",
        *(f"RANDOMIZED_PARAMETER({name})" for name in names),
        "HD void use(State s) {",
        "    ONCE {",
        *(f"        stored_{name}() = s.{name}[0];" for name in names),
        "    }",
        "    group_sync();",
        "}",
        "HD void begin(EngineState m, State s, Rng rng) {",
        "    ONCE {",
        *(f"        {draw}" for draw in draws),
        "    }",
        "    group_sync();",
        "    use(s);",
        "}",
        *(f"HD float derived_{name}() {{ return (float)({value}); }}" for name, value in layout.derived.items()),
        "}",
        *(f"#define {name.upper()} randomized::value_{name}()" for name in names),
        *(f"#define {name.upper()} randomized::derived_{name}()" for name in layout.derived),
    ]
    return "\n".join(lines) + "\n"


def with_varying_constants(layout: GameLayout, text: str) -> str:
    """The source of a game whose constants that follow from randomised parameters are functions; it ends the macros.

    Args:
        layout: The configured game.
        text: Its own source with #line directives.

    Raises:
        ConfigError: A parameter initialises a table, or another variable outside of functions that is no scalar.
    """
    varying = {name.upper() for name in (*(parameter.name for parameter in layout.randomized), *layout.derived)}
    local, scope = set[str](), 0  # names of variables in one function, and where it begins
    parts, at = [], 0
    code = NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for begin, end, block in _initialisations(code):
        statement = code[begin:end]
        local, scope = (local if block == scope else set()), block
        if not (varying | local).intersection(WORD.findall(statement)):
            continue
        if block:
            variable = VARIABLE.match(statement)
            if variable is not None and re.search("static|constexpr|TABLE", variable["qualifiers"]):
                local.add(variable["name"])
                parts += [text[at : begin + variable.start("qualifiers")], "const "]
                at = begin + variable.end("qualifiers")
            continue
        file, line = _location(text, end)
        scalars = SCALARS.match(statement)
        if scalars is None:
            found = ", ".join(sorted(varying.intersection(WORD.findall(statement))))
            raise ConfigError(
                f"{layout.name}.randomize: {file}:{line}: {found} differs between environments and cannot initialise "
                f"{' '.join(statement.split())[:80]!r}; compute it in a function, or do not randomise it"
            )
        lines = []
        for name, value in _declarators(scalars["declared"]):
            if varying.intersection(WORD.findall(value)):
                varying.add(name)
                lines.append(f"HD {scalars['type']} value_of_{name}() {{ return {value}; }}")
                lines.append(f"#define {name} value_of_{name}()")
            else:
                lines.append(f"{scalars['qualifiers']}{scalars['type']} {name} = {value};")
        parts += [text[at:begin], "\n" + "\n".join(lines) + f"\n#line {line} {file}\n"]
        at = end + 1
    return "".join([*parts, text[at:]]) + "".join(f"#undef {name}\n" for name in sorted(varying))


def _initialisations(code: str) -> Iterator[tuple[int, int, int]]:
    """Begin and end (the semicolon) of every declaration with an initial value, and where the block around it begins.

    The block is the outermost one in braces, of a function or a class; 0 outside of these.

    Args:
        code: The source with spaces in place of comments, literals and preprocessor lines.
    """
    begin = 0  # of the statement
    blocks: list[int] = []  # where every open brace is; 0 for those of namespaces
    position = 0
    while position < len(code):
        letter = code[position]
        if letter in "([":
            position = _closing(code, position)
        elif letter in "={":
            head = code[begin : position + 1].lstrip()
            begin = position + 1 - len(head)
            if VARIABLE.fullmatch(head) and not NOT_A_VARIABLE.match(head):
                end = position
                while end < len(code) and code[end] != ";":
                    end = _closing(code, end) + 1 if code[end] in OPEN else end + 1
                yield begin, end, next(filter(None, blocks), 0)
                position, begin = end, end + 1
            elif letter == "{":
                blocks.append(0 if NAMESPACE.fullmatch(code[begin:position].strip()) else position)
                begin = position + 1
        elif letter == "}":
            blocks = blocks[:-1]
            begin = position + 1
        elif letter == ";":
            begin = position + 1
        position += 1


def _closing(code: str, position: int) -> int:
    """Position of the bracket that closes the one here, or the last one."""
    depth = 0
    for at in range(position, len(code)):
        depth += (code[at] in OPEN) - (code[at] in CLOSE)
        if depth == 0:
            return at
    return len(code) - 1


def _declarators(text: str) -> Iterator[tuple[str, str]]:
    """Name and initial value of each of several, ``A = 1, B = f(2, 3)``."""
    depth, begin = 0, 0
    for at, letter in enumerate(f"{text},"):
        depth += (letter in OPEN) - (letter in CLOSE)
        if letter == "," and depth == 0:
            name, _, value = text[begin:at].partition("=")
            yield name.strip(), " ".join(value.split())
            begin = at + 1


def _location(text: str, position: int) -> tuple[str, int]:
    """File, as a literal, and line at a position, by the #line directive before it."""
    mark = list(LINE.finditer(text, 0, position))[-1]
    return mark[2], int(mark[1]) + text.count("\n", mark.end(), position) - 1
