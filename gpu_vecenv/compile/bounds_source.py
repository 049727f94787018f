"""Generated source of builds with guards: arrays of the state and of Io that check their indices, see bounds.cuh."""

from __future__ import annotations

from gpu_vecenv.compile.engine_kernels import GUARD_BYTE, GUARD_BYTES
from gpu_vecenv.declare.field import C_TYPES
from gpu_vecenv.declare.layout import GameLayout

IO_ARRAYS = ("active", "rewards", "terminations", "truncations", "obs", "action_mask", "actions", "acting")
# What records name beside the arrays.
CHECKED_ARRAY, SCRATCH_GUARDS, RACE, MISPLACED = "CheckedArray", "Scratch", "race", "misplaced construct"
# Of one environment: number in recorded_names() + 1 or 0, axis, index, index of axis 0, size, line, hash of the file.
# Of a race: that number, kind, address, then of the earlier and of the later access: thread, line, hash of the file,
# whether it is in a loop over the agents.
RECORD_ITEMS = 11


def checked_arrays(layout: GameLayout) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays whose indices are checked, as a game's source names them, and their shapes; numbered in this order."""
    agents = layout.num_agents
    shapes = {
        "obs": (agents, layout.obs_size),
        "action_mask": (agents, layout.num_choices),
        "actions": (agents, layout.action.heads),
    }
    state = [(f"s.{field.name}", field.shape or (1,)) for field in layout.fields]
    return state + [(f"io.{name}", shapes.get(name, (agents,))) for name in IO_ARRAYS]


def recorded_names(layout: GameLayout) -> list[str]:
    """What records name, numbered in this order."""
    return [*(name for name, _ in checked_arrays(layout)), CHECKED_ARRAY, SCRATCH_GUARDS, RACE, MISPLACED]


def bounds_constants(layout: GameLayout) -> str:
    """What precedes bounds.cuh."""
    names = (*(f"IO_{name.upper()}" for name in IO_ARRAYS), "CHECKED_ARRAY", "SCRATCH_GUARDS", "RACE", "MISPLACED")
    numbers = (f"{name} = {number}" for number, name in enumerate(names, start=len(layout.fields)))
    largest = max(layout.obs_size * 8, layout.num_choices, *(field.nbytes for field in layout.fields))
    return (
        '#line 1 "generated header"\n#define BOUNDS_CHECKED\nnamespace bounds {\n'
        f"enum Array {{ {', '.join(numbers)} }};\nconstexpr int DUMMY_BYTES = {largest};\n"
        f"constexpr int GUARD_BYTES = {GUARD_BYTES}, GUARD_BYTE = {GUARD_BYTE};\n}}\n"
    )


def checked_state(layout: GameLayout) -> list[str]:
    """``State``, of arrays that check their indices."""
    kinds = [f"{'const ' if field.shared else ''}{C_TYPES[field.dtype]}" for field in layout.fields]
    members = [
        f"    bounds::Checked<{kind}, {number}, 0, {', '.join(map(str, field.shape or (1,)))}> {field.name};"
        for number, (kind, field) in enumerate(zip(kinds, layout.fields, strict=True))
    ]
    return ["struct State {", *members, "};"]
