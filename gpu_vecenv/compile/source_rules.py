"""Source rules: constructs that a game's device code may not use, so that both devices compile it bit-identically.

Most are names, found among the tokens of the game's own text. Variables that keep their values between steps are found
in the compiled binary, where no spelling hides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from gpu_vecenv.compile.binary_symbols import GPU_MEMORY, writable_variables
from gpu_vecenv.compile.tokens import Token, tokens
from gpu_vecenv.declare.source_rules import SOURCE_RULES
from gpu_vecenv.errors import SourceRuleError

LIBM = (
    "a?(?:sin|cos|tan)h?|sincos|(?:sin|cos|sincos)pi|atan2|exp(?:2|10|m1)?|log(?:2|10|1p|b)?|pow|r?sqrt|r?cbrt|r?hypot|"
    "fmod|modf|remainder|fabs|abs|floor|ceil|(?:ll?)?round|trunc|(?:ll?)?rint|nearbyint|nextafter|copysign|ldexp|"
    "frexp|scalbl?n|fma|fdivide|f?min|f?max|fdim|erfc?|[lt]gamma|norm(?:[34]d)?|isnan|isinf|isfinite"
)
# Words of CUDA and of WarpDrive for threads, blocks and their memory -> what a game has in their place.
THREAD_WORDS = {
    "threadIdx|blockIdx|blockDim|gridDim|warpSize": "FOR_AGENTS (i) { … } distributes the agents over the threads of "
    "an environment, and ONCE { … } is executed by one of them; `s` and `io` are those of one environment",
    r"__syncthreads\w*|__syncwarp|__sync_env_threads": "write group_sync(), outside of FOR_AGENTS and ONCE",
    "__shared__": "declare it in struct Scratch, and write io.scratch->name",
    "__global__|__device__|__host__": "a game is three functions, HD void reset(State s, Io io), step and observe; "
    "mark others with HD",
    "__constant__": "write TABLE for a constant table",
    r"curand\w*": "write io.rng.uniform(item, draw), io.rng.normal(item, draw) or io.rng.below(item, draw, n)",
}
# Rule, as in Env.allows -> names that are in use where they are called, or where the game does not declare them.
NAMES = {
    "library functions": rf"(?:{LIBM})[fl]?",
    "atomics": r"atomic(?!_add$)\w*",
    "intrinsics": r"__(?!align__$|attribute__$|launch_bounds__$|has_include$)\w+",
    "allocation": "malloc|calloc|realloc|free|alloca",
    "printing": "printf|puts|assert",
    "pragmas": "optimize",
}
# Rule -> words of the language, or of a compiler, that are in use wherever they stand.
WORDS = {
    "threads and blocks": "|".join(THREAD_WORDS),
    "external names": "extern",
    "inline assembly": "asm|__asm__|__asm",
    "allocation": "new",
    "token pasting": "##",
    "pragmas": "_Pragma",
}
REASONS = {
    "system headers": "the GPU's run-time compiler has no C or C++ library, and the key of the binary lacks what "
    'another spelling includes; write #include "file" at the beginning of a line of its own',
    "threads and blocks": "the CPU has none of them",
    "library functions": "libraries round differently on CPU and GPU; use math.cuh, as in math::sin",
    "external names": "a game consists of its own source; define it there",
    "atomics": "their order is nondeterministic, and the host build has none; use atomic_add for integers. A float sum "
    "is a loop of each agent over the others, in a fixed order",
    "inline assembly": "it targets one processor",
    "intrinsics": "they belong to one compiler, and many are approximate",
    "allocation": "memory is declared: fields of the state, or struct Scratch",
    "printing": "thousands of threads would print, and the GPU would synchronise; to look at a value, make it a field "
    "of the state and read env.state[name]",
    "token pasting": "it makes names that these rules cannot check; write the name",
    "pragmas": "they change what one compiler computes; #pragma once and unroll are permitted",
    "mutable variables": "it keeps its value between steps, shared by all environments and lost by saved states; make "
    "it a field of the state or of struct Scratch, or constexpr",
}
# What a compiler says of names that games do not have: WarpDrive's, Gymnasium's -> what they have in their place.
UNKNOWN_NAME = re.compile("not declared|undeclared|undefined|no member")
QUOTED = re.compile(r"['\"\u2018](\w+)['\"\u2019]")
UNKNOWN_NAMES = {
    r"kThisAgent\w*|agent_id": "FOR_AGENTS (i) { … } gives the agent, i",
    r"kEnv\w+|kThisEnv\w+|env_id": "`s` and `io` are those of one environment",
    r"kNumAgents|wkNumberAgents": "write NUM_AGENTS",
    r"kEpisodeLength|wkEpisodeLength": "write MAX_STEPS, if that is the game's param",
    r"_timestep_|env_timestep\w*": "write io.elapsed_steps",
    r"_?dones?_?|done_arr": "write io.terminations[i] and io.truncations[i]",
    r"(?!done_|env_timestep_)\w+_arr": "a field of the state is s.name[i]; actions, rewards and observations are "
    "io.action(i), io.rewards[i] and io.obs[i][k]",
}
# What a compiler says where an integer is needed and stands no integer.
NO_INTEGER = re.compile(
    "array subscript|switch quantity|expression of integer type|have integral|[({]aka '?float'?[)}]"
)
PRAGMAS = ("once", "unroll")
LINE = re.compile(r'^#line (\d+) "(.*)"$')
# Behind the name of a variable: the end of its scope, its number among those of a function, a compiler's suffix.
MANGLED_END = re.compile(r"E?(?:_\d+|__\d+_)?(?:\..*)?$")
# Thread-local variables of the engine, by their namespaces.
OF_ENGINE = ("_ZN9host_simd", "_ZN10randomized", "_ZN6bounds", "_ZN5races")
# Words before a name that are no type, so that the name is not declared there.
LISTED = 20  # violations beside the first in a message
NO_TYPES = frozenset(
    "ONCE UNROLL return else do case throw goto and or not xor using delete new co_return co_yield".split()
)
assert REASONS.keys() == set(SOURCE_RULES)


def check_source_rules(text: str, game: str, allows: Sequence[str] = ()) -> None:
    """Check the names in a game's own source, with its includes inlined and #line directives.

    Args:
        text: The source.
        game: Name of the game, for the message.
        allows: Names of rules that are not checked.

    Raises:
        SourceRuleError: Names file, line, the violation and the reason of the rule, and where the others are.
    """
    first = dict[tuple[str, str], int]()
    for rule, violation, line in _violations(text):
        if rule not in allows:
            first.setdefault((rule, violation), line)
    if first:
        (rule, violation), line = next(iter(first.items()))
        others = [f"{_location(text, line)}: {other!r} ({rule})" for (rule, other), line in [*first.items()][1:]]
        raise _error(game, _location(text, line), rule, violation, others)


def check_variables(binary: Path, source: str, text: str, game: str, allows: Sequence[str] = ()) -> None:
    """Check that a game's compiled code has no variables that keep their values between steps.

    Args:
        binary: The library or cubin.
        source: What it was compiled from.
        text: The game's own part of it, as for ``check_source_rules``.
        game: Name of the game, for the message.
        allows: Names of rules that are not checked.

    Raises:
        SourceRuleError: Names the variable, and file and line where its name first stands.
    """
    if "mutable variables" in allows or not (symbols := writable_variables(binary.read_bytes())):
        return
    words = {token.text: token.line for token in reversed([*tokens(text)]) if token.kind == "word"}
    on_gpu = any(section.startswith(GPU_MEMORY) for _, section in symbols)
    constants = _constants([*tokens(source)]) if on_gpu else set()  # the game's own, and those of its declaration
    for symbol, section in symbols:
        name = _declared_name(symbol, words)
        if name is not None and not (section.startswith(GPU_MEMORY) and name in constants):
            raise _error(game, _location(text, words[name]), "mutable variables", name)


def cures(diagnostics: Iterable[str]) -> list[str]:
    """What to write instead, for each error of a compiler that a game's author may expect to be valid."""
    found = dict[str, None]()
    for line in diagnostics:
        if UNKNOWN_NAME.search(line):
            names = QUOTED.findall(line)
            found |= {
                f"{name}: {cure}": None
                for name in names
                for known, cure in UNKNOWN_NAMES.items()
                if re.fullmatch(known, name)
            }
        elif NO_INTEGER.search(line):
            found["io.action(i) is a float if some role has a Box; the choice of a Discrete one is io.choice(i)"] = None
    return [*found]


def _error(game: str, location: str, rule: str, violation: str, others: Sequence[str] = ()) -> SourceRuleError:
    instead = (cure for words, cure in THREAD_WORDS.items() if re.fullmatch(words, violation))
    reason = "; ".join([REASONS[rule], *instead])
    allows = "" if rule == "threads and blocks" else f"allows = ({rule!r},), or "  # CPU compilers reject them
    return SourceRuleError(
        f"{game}: {location}: {violation!r} breaks the rule {rule!r} of device code: {reason}. "
        f"To permit it, declare {allows}host = False for a game that runs on CUDA only"
        + (f". Others: {', '.join(others[:LISTED])}{', …' * (len(others) > LISTED)}" if others else "")
    )


def _declared_name(symbol: str, words: Mapping[str, int]) -> str | None:
    """The variable of a symbol: the symbol itself, or "5count" at the end of a name mangled by the Itanium C++ ABI."""
    if not symbol.startswith("_Z"):
        return symbol if symbol in words else None
    if symbol.startswith(OF_ENGINE):
        return None
    end = MANGLED_END.sub("", symbol)
    return max((word for word in words if end.endswith(f"{len(word)}{word}")), key=len, default=None)


def _constants(code: Sequence[Token]) -> set[str]:
    """Names of variables, not of parameters, that are declared by const, constexpr or TABLE."""
    names, in_declaration, named, depth, parentheses = set[str](), False, False, 0, 0
    for before, token in pairwise(code):
        parentheses += (token.text == "(") - (token.text == ")")
        if token.text in ("const", "constexpr", "TABLE"):
            in_declaration, named, depth = parentheses == 0, False, 0
            continue
        if before.text == "}" and depth == 0 and token.text not in (",", ";"):
            in_declaration = False  # a function's body has ended
        if not in_declaration:
            continue
        if depth == 0 and not named and before.kind == "word" and token.text in ("=", "[", "{", ",", ";"):
            names.add(before.text)
            named = True
        depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
        if depth == 0 and token.text == ",":
            named = False
        in_declaration = depth >= 0 and (depth > 0 or token.text != ";")
    return names


def _violations(text: str) -> Iterator[tuple[str, str, int]]:
    """Rule, what breaks it and line index of every violation, in source order."""
    code = [*tokens(text)]
    declared = _declared(code)
    end = Token("", "", 0)
    for k, token in enumerate(code):
        after, second = (code[k + n] if k + n < len(code) else end for n in (1, 2))
        before = end if token.begins else code[k - 1]
        if token.directive and token.text == token.directive and before.text == "#":
            if token.text.startswith(("include", "import")):
                yield "system headers", "".join(["#", *_same_line(code, k)]), token.line
            elif token.text == "pragma" and after.text not in PRAGMAS:
                yield "pragmas", f"#pragma {after.text}", token.line
        elif token.directive in ("line", "error", "pragma", "include"):
            continue
        elif token.text == "delete" and before.text not in ("=", "operator"):
            yield "allocation", token.text, token.line
        elif token.text == "std" and after.text == "::" and code[min(k + 3, len(code) - 1)].text in ("(", "<"):
            yield "library functions", f"std::{second.text}", token.line
        elif token.kind == "word" or token.text == "##":
            yield from _by_name(code, k, before, after, declared)


def _by_name(
    code: Sequence[Token], k: int, before: Token, after: Token, declared: set[str]
) -> Iterator[tuple[str, str, int]]:
    """The violation that this name is, if it is one."""
    token = code[k]
    for rule, names in WORDS.items():
        if re.fullmatch(names, token.text):
            yield rule, token.text, token.line
            return
    own_member = before.text in (".", "->") or (before.text == "::" and code[k - 2].kind == "word")
    if own_member or after.text == "::":
        return
    for rule, names in NAMES.items():
        if not re.fullmatch(names, token.text):
            continue
        if after.text == "(":
            in_use = not _is_type(before)  # else the game defines a function of that name
        else:
            in_use = token.text not in declared and not token.text.endswith("__")
        if in_use:
            yield rule, token.text, token.line


def _is_type(token: Token) -> bool:
    return token.kind == "word" and token.text not in NO_TYPES


def _declared(code: Sequence[Token]) -> set[str]:
    """Names that the source seems to declare: as variables, parameters, enumerators, macros."""
    names = set()
    for k, token in enumerate(code[1:], start=1):
        if token.kind != "word" or token.begins:
            continue
        before, after = code[k - 1], code[k + 1].text if k + 1 < len(code) else ""
        listed = before.text in (",", "[", "{") and after in ("=", ",", ";", "[", "]", "}")
        pointer = before.text in ("*", "&", "&&", ">") and (_is_type(code[k - 2]) or code[k - 2].text in ("*", ">"))
        parameter = token.directive == "define" and before.text in ("(", ",") and after in (",", ")")
        if listed or pointer or parameter or _is_type(before):
            names.add(token.text)
    return names


def _same_line(code: Sequence[Token], k: int) -> Iterator[str]:
    line = code[k].line
    for token in code[k:]:
        if token.line != line:
            return
        yield f"{token.text} " if token.text == code[k].text else token.text


def _location(text: str, index: int) -> str:
    """File and number of a line according to the #line directive before it."""
    lines = text.split("\n")
    for back in range(index, -1, -1):
        if mark := LINE.match(lines[back]):
            return f"{mark[2]}:{int(mark[1]) + index - back - 1}"
    return f"line {index + 1}"
