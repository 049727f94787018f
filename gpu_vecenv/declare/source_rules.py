"""Names of the rules that a game's CUDA source must keep; ``compile/source_rules.py`` checks them."""

SOURCE_RULES = (
    "system headers",
    "threads and blocks",
    "library functions",
    "external names",
    "atomics",
    "inline assembly",
    "intrinsics",
    "allocation",
    "printing",
    "token pasting",
    "pragmas",
    "mutable variables",
)
