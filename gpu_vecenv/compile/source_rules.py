"""Source rules: constructs that a game's device code may not use, so that both devices compile it bit-identically."""

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
_MEMBER = r"(?<![\w.])(?<!->)"  # a member of the author's own may have any name
# as may a function that the author defines
_OWN = r"(?<!\bvoid )(?<!\bbool )(?<!\bfloat )(?<!\bint )(?<!\b[iu]8 )(?<!\b[iu]\d\d )"
SYSTEM_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<", re.MULTILINE)
# Name of a rule, as in Env.allows -> pattern of violations, reason.
RULES: dict[str, tuple[re.Pattern[str], str]] = {
    "system headers": (
        SYSTEM_HEADER,
        "the GPU's run-time compiler has no C or C++ library",
    ),
    "library functions": (
        re.compile(rf"\bstd::\w+(?=\s*[<(])|{_MEMBER}{_OWN}(?<!\w::)(?:{_LIBM})[fl]?(?=\s*\()"),
        "libraries round differently on CPU and GPU; use math.cuh, as in math::sin",
    ),
    "atomics": (
        re.compile(r"\batomic(?!_add\b)\w*(?=\s*\()"),
        "their order is nondeterministic, and the host build has none; use atomic_add for integers",
    ),
    "inline assembly": (re.compile(r"\b(?:asm|__asm__|__asm)\b"), "it targets one processor"),
    "intrinsics": (
        re.compile(r"\b__(?!align__|attribute__|launch_bounds__|has_include)\w+(?=\s*\()"),
        "they belong to one compiler, and many are approximate",
    ),
    "allocation": (
        re.compile(rf"{_MEMBER}{_OWN}(?:malloc|calloc|realloc|free|alloca)(?=\s*\()|\bnew\b|(?<!=)(?<!= )\bdelete\b"),
        "memory is declared: fields of the state, or struct Scratch",
    ),
    "printing": (
        re.compile(r"\b(?:printf|puts|assert)(?=\s*\()"),
        "thousands of threads would print, and the GPU would synchronise",
    ),
}
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
LINE = re.compile(r'^#line (\d+) "(.*)"$')


def check_source_rules(text: str, game: str, allows: Sequence[str] = ()) -> None:
    """Check a game's own source, with its includes inlined and #line directives.

    Args:
        text: The source.
        game: Name of the game, for the message.
        allows: Names of rules that are not checked.

    Raises:
        SourceRuleError: Names file, line, the violation and the reason of the rule.
    """
    for rule, violation, file, line in _findings(text):
        if rule not in allows:
            raise SourceRuleError(
                f"{game}: {file}:{line}: {violation!r} breaks the rule {rule!r} of device code: {RULES[rule][1]}. "
                f"To permit it, declare allows = ({rule!r},), or host = False for a game that runs on CUDA only"
            )


@lru_cache(64)
def _findings(text: str) -> tuple[tuple[str, str, str, int], ...]:
    """Rule, matched source, file and line of every violation, in source order."""
    return tuple(_search(text))


def _search(text: str) -> Iterator[tuple[str, str, str, int]]:
    marks = text.splitlines()
    bare = COMMENT.sub(lambda match: "\n" * match[0].count("\n"), "\n".join(_unmarked(marks)))
    found = sorted(
        (match.start(), rule, match[0]) for rule, (what, _) in RULES.items() for match in what.finditer(bare)
    )
    for start, rule, violation in found:
        file, line = _location(marks, bare.count("\n", 0, start))
        yield rule, violation.strip(), file, line


def _unmarked(lines: Sequence[str]) -> Iterator[str]:
    return ("" if LINE.match(line) else line for line in lines)


def _location(lines: Sequence[str], index: int) -> tuple[str, int]:
    """File and number of a line according to the #line directive before it."""
    for back in range(index, -1, -1):
        if mark := LINE.match(lines[back]):
            return mark[2], int(mark[1]) + index - back - 1
    return "", index + 1
