"""Field: one named array of an environment's state, with the dtypes that device code has a type for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_vecenv.errors import EnvDefinitionError

f32, f64 = np.dtype(np.float32), np.dtype(np.float64)
i32, i64 = np.dtype(np.int32), np.dtype(np.int64)
u8, u32, u64 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.uint64)
boolean = np.dtype(np.bool_)

C_TYPES = {
    f32: "float",
    f64: "double",
    i32: "i32",
    i64: "i64",
    u8: "u8",
    u32: "u32",
    boolean: "bool",
}
FIELD_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
# Names that a field may not have: keywords of C++ and types of the device code.
RESERVED = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl const "
    "constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern "
    "false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or "
    "or_eq private protected public register reinterpret_cast return short signed sizeof static static_assert "
    "static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned using "
    "virtual void volatile wchar_t while xor xor_eq i32 i64 u8 u32 u64 math".split()
)


def known_dtype(dtype: Any) -> np.dtype[Any] | None:
    """What ``np.dtype`` makes of it; None if nothing."""
    try:
        return None if dtype is None else np.dtype(dtype)  # of None, NumPy makes float64
    except (TypeError, ValueError, SyntaxError):  # np.dtype parses strings
        return None


@dataclass(frozen=True)
class Field:
    """One named array of an environment's state.

    Args:
        name: The C and Python name, ``[a-z][a-z0-9_]*``.
        dtype: ``f32``, ``i32``, ``i64``, ``u8``, ``u32``, ``boolean`` or ``f64``.
        shape: Sizes of one environment's array: integers, or names of int attributes of the game.
        shared: One read-only array for all environments (a map, a table, a time series).
        when: Name of a bool attribute of the game: configurations where it is False are without the field. Empty: all
            have it.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] = ()
    shared: bool = False
    when: str = ""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not FIELD_NAME.fullmatch(self.name) or self.name in RESERVED:
            raise EnvDefinitionError(
                f"Field name {self.name!r}: expected a C identifier [a-z][a-z0-9_]* that is no C++ keyword"
            )
        if known_dtype(self.dtype) not in C_TYPES:
            raise EnvDefinitionError(
                f"Field {self.name!r} has dtype {self.dtype!r:.200} ({type(self.dtype).__name__}); expected one of "
                f"{', '.join(map(str, C_TYPES))}; f32, f64, i32, i64, u8, u32, boolean, without quotes, are those of "
                "gpu_vecenv.declare.field"
            )
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if isinstance(self.shape, str) or not isinstance(self.shape, tuple | list):
            raise EnvDefinitionError(
                f"Field {self.name!r} has shape {self.shape!r}; expected a tuple, ({self.shape!r},)"
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.shared, bool):
            raise EnvDefinitionError(f"Field {self.name!r} has shared {self.shared!r:.200}; expected True or False")
        if type(self.when) is not str:
            raise EnvDefinitionError(
                f"Field {self.name!r} has when {self.when!r:.200}; expected the name of a bool attribute of the game"
            )
