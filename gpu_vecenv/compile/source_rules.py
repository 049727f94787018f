"""What the device code of a game leaves out, so that it compiles for both devices and gives both the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from gpu_vecenv.errors import SourceRuleError

_LIBM = (
    "a?(?:sin|cos|tan)h?|sincos|(?:sin|cos|sincos)pi|atan2|exp(?:2|10|m1)?|log(?:2|10|1p|b)?|pow|r?sqrt|r?cbrt|r?hypot|"
    "fmod|modf|remainder|fabs|abs|floor|ceil|(?:ll?)?round|trunc|(?:ll?)?rint|nearbyint|nextafter|copysign|ldexp|"
    "frexp|scalbl?n|fma|fdivide|f?min|f?max|fdim|erfc?|[lt]gamma|norm(?:[34]d)?|isnan|isinf|isfinite"
)
_MEMBER = r"(?<![\w.])(?<!->)"  # not before: a member's name is the author's own
_OWN = r"(?<!\bvoid )(?<!\bbool )(?<!\bfloat )(?<!\bint )(?<!\b[iu]8 )(?<!\b[iu]\d\d )"  # nor is that of a definition
SYSTEM_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<", re.MULTILINE)
# Name of a rule, as Env.allows has it -> what breaks it, and why it is there.
RULES: dict[str, tuple[re.Pattern[str], str]] = {
    "system headers": (
        SYSTEM_HEADER,
        "the GPU's run-time compiler has no C or C++ library",
    ),
    "library functions": (
        re.compile(rf"\bstd::\w+(?=\s*[<(])|{_MEMBER}{_OWN}(?<!\w::)(?:{_LIBM})[fl]?(?=\s*\()"),
        "libraries round differently on CPU and GPU; math.cuh has the functions, as math::sin",
    ),
    "atomics": (re.compile(r"\batomic(?!_add\b)\w*(?=\s*\()"), "their order is chance, and a CPU has none of CUDA's"),
    "inline assembly": (re.compile(r"\b(?:asm|__asm__|__asm)\b"), "it is written for one processor"),
    "intrinsics": (
        re.compile(r"\b__(?!align__|attribute__|launch_bounds__|has_include)\w+(?=\s*\()"),
        "functions of one compiler, many of them approximate",
    ),
    "allocation": (
        re.compile(rf"{_MEMBER}{_OWN}(?:malloc|calloc|realloc|free|alloca)(?=\s*\()|\bnew\b|(?<!=)(?<!= )\bdelete\b"),
        "a step has no memory of its own but Scratch; the state is declared",
    ),
    "printing": (re.compile(r"\b(?:printf|puts|assert)(?=\s*\()"), "it floods, and stops a GPU's pipeline"),
}
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
LINE = re.compile(r'^#line (\d+) "(.*)"$')


def check_source_rules(text: str, game: str, allows: Sequence[str] = ()) -> None:
    """Look through a game's own text, with its includes in it and #line marks.

    Args:
        text: The text.
        game: Its class, for the message.
        allows: Names of rules that do not count.

    Raises:
        SourceRuleError: Names file, line, what stands there and why that is no good.
    """
    for rule, words, file, line in _findings(text):
        if rule not in allows:
            raise SourceRuleError(
                f"{game}: {file}:{line}: {words!r}: {rule} are left out of device code: {RULES[rule][1]}. "
                f"If it is meant, allow it: allows = ({rule!r},) in the declaration; or the game is for CUDA only: "
                "host = False"
            )


@lru_cache(64)
def _findings(text: str) -> tuple[tuple[str, str, str, int], ...]:
    """Rule, words, file and line of all that breaks a rule, in the order of the text."""
    return tuple(_search(text))


def _search(text: str) -> Iterator[tuple[str, str, str, int]]:
    marks = text.splitlines()
    bare = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), "\n".join(_unmarked(marks)))
    found = sorted(
        (match.start(), rule, match[0]) for rule, (what, _) in RULES.items() for match in what.finditer(bare)
    )
    for start, rule, words in found:
        file, line = _place(marks, bare.count("\n", 0, start))
        yield rule, words.strip(), file, line


def _unmarked(lines: Sequence[str]) -> Iterator[str]:
    return ("" if LINE.match(line) else line for line in lines)


def _place(lines: Sequence[str], index: int) -> tuple[str, int]:
    """File and number of a line, as the mark before it says."""
    for back in range(index, -1, -1):
        if mark := LINE.match(lines[back]):
            return mark[2], int(mark[1]) + index - back - 1
    return "", index + 1
