"""Signatures of kernels: one list of names and types makes the struct in C++ and in Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpu_vecenv.declare.field import C_TYPES as FIELD_C_TYPES
from gpu_vecenv.declare.field import known_dtype, u64

IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
POINTER, POINTER_32 = np.dtype(np.uintp), np.dtype(np.uint32)  # addresses in this process, and in WebAssembly
C_TYPES = FIELD_C_TYPES | {u64: "u64"}


def _dtype(argument: str, dtype: Any) -> np.dtype[Any]:
    known = known_dtype(dtype)
    if known is not None and known in C_TYPES:
        return known
    raise TypeError(f"argument {argument!r} has dtype {dtype!r}; expected one of {', '.join(map(str, C_TYPES))}")


@dataclass(frozen=True)
class Array:
    """A tensor that a kernel takes: in C++ a pointer to its first element.

    Args:
        name: In C++ and in Python.
        dtype: Of the elements; None: any, and the pointer is to ``void``.
        const: The kernel only reads it.
        optional: None may be given in its place: a null pointer.
        strided: It need not be contiguous, as the kernel takes its strides too.
        shape: Numbers, and names of integer scalars of the same kernel. Their product must be the number of elements,
            which is not checked if ``shape`` is None.
    """

    name: str
    dtype: Any
    const: bool = False
    optional: bool = False
    strided: bool = False
    shape: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and (
            not isinstance(self.shape, tuple | list) or not all(isinstance(size, int | str) for size in self.shape)
        ):
            raise TypeError(
                f"argument {self.name!r} has shape {self.shape!r}; expected a tuple of numbers and names, or None"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype(self.name, self.dtype))

    @property
    def declaration(self) -> str:
        """Of the C++ struct's field."""
        return f"{'const ' if self.const else ''}{'void' if self.dtype is None else C_TYPES[self.dtype]}* {self.name}"

    @property
    def field_dtype(self) -> np.dtype[Any]:
        """Of the struct's field: an address."""
        return POINTER


@dataclass(frozen=True)
class Scalar:
    """A number or flag that a kernel takes by value.

    Args:
        name: In C++ and in Python.
        dtype: Its type; an integer must be in its range.
    """

    name: str
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype(self.name, self.dtype))

    @property
    def declaration(self) -> str:
        """Of the C++ struct's field."""
        return f"{C_TYPES[self.dtype]} {self.name}"

    @property
    def field_dtype(self) -> np.dtype[Any]:
        """Of the struct's field."""
        dtype: np.dtype[Any] = self.dtype
        return dtype

    def convert(self, value: object) -> int | float | bool:
        """The value as Python has it.

        Raises:
            TypeError: It is of another kind.
            ValueError: It is out of range.
        """
        kinds = {"b": (bool, np.bool_), "f": (int, float, np.integer, np.floating)}.get(
            self.dtype.kind, (int, np.integer)
        )
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.dtype.kind != "b"):
            raise TypeError(f"is a {type(value).__name__}; expected {self.dtype}")
        number: Any = value.item() if isinstance(value, np.generic) else value
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if not limits.min <= number <= limits.max:
                raise ValueError(f"is {number}; expected {self.dtype}, from {limits.min} to {limits.max}")
        if self.dtype.kind == "f" and math.inf > abs(number) > float(np.finfo(self.dtype).max):
            raise ValueError(f"is out of range; expected {self.dtype}, up to {np.finfo(self.dtype).max}")
        return number  # type: ignore[no-any-return]


@dataclass(frozen=True)
class KernelSignature:
    """A kernel's name and its arguments, in the order of the struct.

    In C++ the kernel is ``KERNEL(name) { … }``, whose body reads ``args.<argument>``.

    Raises:
        TypeError: An argument is no Array or Scalar.
        ValueError: There are no arguments, a name is not an identifier or comes twice, or a shape names something other
            than an integer scalar.
    """

    name: str
    arguments: tuple[Array | Scalar, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, tuple | list) or not all(
            isinstance(argument, Array | Scalar) for argument in self.arguments
        ):
            raise TypeError(f"kernel {self.name!r} has arguments {self.arguments!r:.200}; expected Array and Scalar")
        object.__setattr__(self, "arguments", tuple(self.arguments))
        names = [argument.name for argument in self.arguments]
        if not names:
            raise ValueError(f"kernel {self.name!r} has no arguments; expected at least one")
        for name in (self.name, *names):
            if not isinstance(name, str) or not IDENTIFIER.fullmatch(name):
                raise ValueError(
                    f"kernel {self.name!r} has the name {name!r}; expected a C++ identifier that begins with a letter"
                )
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"kernel {self.name!r} has several arguments {', '.join(twice)}; expected distinct names")
        sizes = {a.name for a in self.arguments if isinstance(a, Scalar) and a.dtype.kind in "iu"}
        for array in self.arrays:
            if unknown := [n for n in array.shape or () if isinstance(n, str) and n not in sizes]:
                raise ValueError(
                    f"kernel {self.name!r}: the shape of {array.name!r} names {', '.join(unknown)}; "
                    f"expected numbers, or names of the kernel's integer scalars: {', '.join(sorted(sizes)) or 'none'}"
                )

    @property
    def arrays(self) -> list[Array]:
        """The arguments that are tensors."""
        return [argument for argument in self.arguments if isinstance(argument, Array)]

    @cached_property
    def by_name(self) -> dict[str, Array | Scalar]:
        """Name -> argument."""
        return {argument.name: argument for argument in self.arguments}

    @cached_property
    def struct(self) -> np.dtype[Any]:
        """The struct, laid out as C++ does in this process."""
        return self.struct_with(POINTER)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Argument -> its first byte in the struct."""
        return _offsets(self.struct)

    def struct_with(self, pointer: np.dtype[Any]) -> np.dtype[Any]:
        """The struct, laid out as C++ does where addresses have the dtype ``pointer``."""
        kinds = [(a.name, pointer if isinstance(a, Array) else a.field_dtype) for a in self.arguments]
        return np.dtype(kinds, align=True)

    @cached_property
    def source(self) -> str:
        """The struct in C++, and the macros from which KERNEL makes the parameters of a CUDA kernel and the struct.

        It compiles only where the layout is that of ``struct``.
        """
        return self.source_with(POINTER)

    def source_with(self, pointer: np.dtype[Any]) -> str:
        """As ``source``, for the layout of ``struct_with(pointer)``."""
        struct, laid_out = f"{self.name}_Arguments", self.struct_with(pointer)
        checks = [f"__builtin_offsetof({struct}, {name}) == {at}" for name, at in _offsets(laid_out).items()]
        lines = [f"struct {struct} {{", *(f"    {argument.declaration};" for argument in self.arguments), "};"]
        lines += [_assertion(f"sizeof({struct}) == {laid_out.itemsize}")]
        lines += ["#if !defined(__CUDACC_RTC__)  // some versions of NVRTC lack __builtin_offsetof"]
        lines += [*map(_assertion, checks), "#endif"]
        lines += [f"#define {self.name}_PARAMETERS {', '.join(a.declaration for a in self.arguments)}"]
        lines += [f"#define {self.name}_FIELDS {', '.join(self.by_name)}"]
        return "\n".join(lines) + "\n"


def _assertion(condition: str) -> str:
    return f'static_assert({condition}, "laid out as Python fills it");'


def _offsets(struct: np.dtype[Any]) -> dict[str, int]:
    fields: Any = struct.fields
    return {name: fields[name][1] for name in struct.names or ()}


def arguments_source(kernels: Iterable[KernelSignature], pointer: np.dtype[Any] = POINTER) -> str:
    """The structs of several kernels, for the source before them; ``pointer`` is the dtype of their addresses."""
    return '#line 1 "kernel arguments"\n' + "".join(kernel.source_with(pointer) for kernel in kernels)
