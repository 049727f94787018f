"""Names of the arrays in a game's Scratch, for messages on races: found in its source, measured by the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpu_vecenv.compile.tokens import tokens
from gpu_vecenv.declare.field import i64
from gpu_vecenv.declare.kernels import Array, KernelSignature

SCRATCH_MEMBERS = KernelSignature("scratch_members", (Array("out", i64),))
ITEMS = 3  # of each: offset in bytes, or -1 if there is no such member, size, size of an element or 0
SOURCE = """
template <class S> HD auto measure_{0}(i64* out, int) -> decltype(measure<S>(out, &S::{0})) {{
    return measure<S>(out, &S::{0});
}}
template <class S> HD void measure_{0}(i64* out, long) {{ out[0] = -1; }}
"""


def member_names(text: str) -> list[str]:
    """Names that are declared in structs of a game's own source, in order; Scratch may have them."""
    names, inside, head = dict[str, None](), list[bool](), list[str]()
    angles = brackets = 0
    code = [token for token in tokens(text) if not token.directive]
    for token, after in pairwise(code):
        text = token.text
        in_struct = bool(inside) and inside[-1]
        if text == "{":
            inside.append("struct" in head and "(" not in head)
        elif text == "}" and inside:
            inside.pop()
        if text in ("{", "}", ";"):
            angles, brackets, head = 0, 0, []
            continue
        head.append(text)
        brackets += (text in ("[", "(")) - (text in ("]", ")"))
        angles += (text == "<") - (text == ">")
        declared = token.kind == "word" and len(head) > 1 and after.text in ("[", ",", ";", "=")
        if in_struct and declared and angles <= 0 and brackets <= 0:
            names[text] = None
    return list(names)


def members_source(names: Sequence[str]) -> str:
    """The kernel that writes ITEMS numbers for each name."""
    writes = "".join(
        f"        races::measure_{name}<Scratch>(args.out + {ITEMS * k}, 0);\n" for k, name in enumerate(names)
    )
    functions = "".join(SOURCE.format(name) for name in names)
    return (
        f'#line 1 "generated functions"\nnamespace races {{{functions}}}\n'
        f"KERNEL({SCRATCH_MEMBERS.name}) {{\n    FOR_ITEMS(k, 1) {{\n{writes}    }}\n}}\n"
    )
