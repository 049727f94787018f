"""FunctionManager: compiles device code for one device and launches its kernels on any tensor there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from gpu_vecenv._version import __version__
from gpu_vecenv.absent import OF_FUNCTION_MANAGER, absent_attribute
from gpu_vecenv.compile.backends import Backend, GroupShape, LaunchShape, Module, structure
from gpu_vecenv.compile.backends.select import select
from gpu_vecenv.compile.cache import open_cached
from gpu_vecenv.compile.codegen import (
    declared_source,
    game_source,
    inline_includes,
    missing_definitions,
    own_source,
)
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.compile.engine_kernels import DEFAULT_BUILD, BuildOptions, engine_kernels
from gpu_vecenv.compile.joined_launches import JoinedKernels, RecordedLaunch
from gpu_vecenv.compile.recording import recorder
from gpu_vecenv.compile.source_rules import check_source_rules, check_variables, cures
from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar, arguments_source
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.errors import DeviceUnavailableError, EnvDefinitionError, KernelCompileError, nearest

TENSOR_DTYPES: dict[np.dtype[Any], tuple[torch.dtype, ...]] = {
    np.dtype(np.float32): (torch.float32,),
    np.dtype(np.float64): (torch.float64,),
    np.dtype(np.int32): (torch.int32,),
    np.dtype(np.uint32): (torch.uint32, torch.int32),  # torch computes with few unsigned types
    np.dtype(np.int64): (torch.int64,),
    np.dtype(np.uint64): (torch.uint64, torch.int64),
    np.dtype(np.uint8): (torch.uint8,),
    np.dtype(np.bool_): (torch.bool,),
}
DIAGNOSTIC = re.compile(r"error|undefined|unresolved|in expansion of macro", re.IGNORECASE)
SHOWN_DIAGNOSTICS = 3
OWN_ERROR = re.compile(r"[^:(]+(:\d+(:\d+)?:|\(\d+\):) (fatal |catastrophic )?error")  # file.cu:3:8: or file.cu(3):


class FunctionManager:
    """Compiles and launches kernels on one device.

    Args:
        device: A torch device, or None for cuda if usable, else cpu.
        driver: "pycuda" or "cuda_core"; None takes the first that works. CUDA only.

    Raises:
        DeviceUnavailableError: The device or the driver cannot be used.
        CompilerError: No usable compiler.
    """

    def __init__(self, device: str | torch.device | None = None, driver: str | None = None) -> None:
        self.device = resolve_device(device)
        self.backend: Backend = select(self.device, driver)

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_FUNCTION_MANAGER)

    def compile(
        self,
        source: str | Path,
        name: str | None = None,
        *,
        kernels: Sequence[KernelSignature],
        game: Env | None = None,
        constants: str = "",
    ) -> Program:
        """Compile custom kernels: C++ source, or the path of a ``.cu`` file.

        Each kernel takes one struct, ``args``, with the fields of its signature. For
        ``KernelSignature("scale", (Array("x", f32), Scalar("a", f32), Scalar("n", i64)))`` the source is
        ``KERNEL(scale) { FOR_ITEMS (k, args.n) args.x[k] *= args.a; }``. ``kernel.cuh`` is included already.

        Args:
            source: The source, or its path.
            name: Its name in error messages; by default the file's name.
            kernels: Signatures of the kernels in the source.
            game: If given, its constants and types, as ``gpu-vecenv show`` prints them, precede the source.
            constants: Definitions in C++ that come after those of the game and precede the source.

        Raises:
            KernelCompileError: With file, line and the compiler's message.
        """
        if not isinstance(source, str | Path):
            raise TypeError(f"compile: source is a {type(source).__name__}; expected the source, or a Path to it")
        check_kind("compile: name", name, str, "a str", optional=True)
        check_kind("compile: constants", constants, str, "a str")
        check_kind("compile: game", game, Env, "a configured Env", optional=True)
        check_kind("compile: kernels", kernels, (tuple, list), "a list of KernelSignature")
        for kernel in kernels:
            check_kind("compile: an entry of kernels", kernel, KernelSignature, "a KernelSignature")
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        folder = None if isinstance(source, str) else source.parent
        name = name or ("kernel.cu" if isinstance(source, str) else source.name)
        seen = set[str]()
        if game is None:
            before = inline_includes('#include "kernel.cuh"', "generated header", None, seen)
        else:
            before = declared_source(game.layout, DEFAULT_BUILD, seen)
        before += f"{arguments_source(kernels)}{constants}\n"
        return self._build(before + inline_includes(text, name, folder, seen), name, kernels)

    def compile_game(
        self, layout: GameLayout, *, group_shape: GroupShape | None = None, build: BuildOptions = DEFAULT_BUILD
    ) -> Program:
        """Compile a game together with the engine.

        Args:
            layout: The configured game, ``env.layout``.
            group_shape: Threads per environment and per block (CUDA); None chooses by the number of agents.
            build: Build options of the engine.

        Raises:
            DeviceUnavailableError: The game is written for CUDA only.
            EnvDefinitionError: Its source cannot be read, or lacks one of the functions of a game.
            SourceRuleError: It uses what device code may not.
            KernelCompileError: With file, line and the compiler's message.
        """
        if self.device.type == "cpu" and not layout.host:
            raise DeviceUnavailableError(
                f'{layout.name} declares host = False: it is written for CUDA only; use device="cuda"'
            )
        group_shape = group_shape or GroupShape.of(
            self.backend.default_threads_per_env(layout.num_agents, layout.largest_array)
        )
        path = layout.source_path
        try:
            source = self.backend.device_constants(group_shape) + game_source(layout, build)
            return self._build(source, path.name, [*engine_kernels(layout, build), *layout.kernels], layout)
        except KernelCompileError as error:
            # An error in the file itself may be the reason why a definition is missing, and says more.
            own = any(OWN_ERROR.match(line) and line.startswith(path.name) for line in error.log.splitlines())
            missing = [] if own else missing_definitions(layout)
            if not missing:
                if layout.randomized:
                    names = ", ".join(parameter.name for parameter in layout.randomized)
                    message = (
                        f"{error}\n  Randomised are {names}: neither they nor what follows from them can stand where "
                        "C++ requires a constant (an array's size, a template's argument, if constexpr)"
                    )
                    raise KernelCompileError(message, error.log) from error
                raise
            message = str(error).splitlines()[1].strip()
            raise EnvDefinitionError(
                f"{layout.name}: {path} does not define {', nor '.join(missing)}; the compiler says: {message}"
            ) from error

    def _compile(self, text: str, target: Path, game: GameLayout | None) -> None:
        if game is None or not game.host:
            self.backend.compile(text, target)
            return
        own = own_source(game)
        check_source_rules(own, game.name, game.allows)
        self.backend.compile(text, target)
        check_variables(target, text, own, game.name, game.allows)

    def _build(
        self, text: str, name: str, kernels: Iterable[KernelSignature], game: GameLayout | None = None
    ) -> Program:
        joined = JoinedKernels(self.backend, text, lambda source: self._load(source, name, game))
        return Program(name, self.device, self._load(text, name, game), kernels, joined)

    def _load(self, text: str, name: str, game: GameLayout | None) -> Module:
        # What a binary was checked for is part of its key: one in the cache is not checked again.
        rules = f"rules but {sorted(game.allows)}" if game is not None and game.host else "no rules"
        key = "\n".join([__version__, self.backend.identity, rules, text])
        try:
            file = open_cached(key, self.backend.suffix, lambda target: self._compile(text, target, game))
        except KernelCompileError as error:
            raise with_diagnostics(name, error) from None
        with file:
            return self.backend.load(file)


def with_diagnostics(name: str, error: KernelCompileError) -> KernelCompileError:
    """The error of a compiler with the first lines of what it says of the source ``name``, and cures."""
    lines = [line for line in error.log.splitlines() if DIAGNOSTIC.search(line)] or error.log.splitlines()
    shown = "\n  ".join([*lines[:SHOWN_DIAGNOSTICS], *cures(lines[:SHOWN_DIAGNOSTICS])])
    return KernelCompileError(f"{name} did not compile ({error}):\n  {shown}", error.log)


class Program:
    """Compiled kernels of one source."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        module: Module,
        kernels: Iterable[KernelSignature],
        joined: JoinedKernels,
    ) -> None:
        self.name, self.device, self.module, self.joined = name, device, module, joined
        self.kernels = {kernel.name: kernel for kernel in kernels}

    def prepare(self, kernel: str, shape: LaunchShape, /, **arguments: object) -> Launch:
        """A reusable launch, with arguments that stay the same for all calls.

        Args:
            kernel: Its name.
            shape: Items and threads.
            arguments: Arguments by name; tensors are kept alive. All others are given with each call.

        Raises:
            TypeError: The kernel has no such argument, or the argument has another dtype.
            ValueError: A tensor is on another device, is not contiguous or has another size; a number is out of range.
            AttributeError: There is no such kernel.
        """
        if kernel not in self.kernels:
            raise AttributeError(f"{self.name} has no kernel {kernel!r}; {nearest(kernel, list(self.kernels))}")
        try:
            return Launch(self, self.kernels[kernel], shape, arguments)
        except AttributeError as error:
            raise AttributeError(
                f"{self.name}: kernel {kernel!r} has a signature, but the source does not define it; expected "
                f"KERNEL({kernel}) {{ … }}"
            ) from error

    def launch(self, kernel: str, items: int, /, **arguments: object) -> None:
        """Run a kernel once over ``items`` items, on torch's current stream, with arguments by name.

        Raises:
            TypeError, ValueError, AttributeError: As ``prepare``; TypeError also where an argument is missing, or where
                ``items`` is not an int; ValueError where it is negative.
        """
        if not isinstance(items, int | np.integer) or isinstance(items, bool):
            raise TypeError(f"{self.name}: {kernel}: items is {items!r}; expected an int >= 0")
        if items < 0:
            raise ValueError(f"{self.name}: {kernel}: items is {items}; expected an int >= 0")
        self.prepare(kernel, LaunchShape(items), **arguments)()


class Launch:
    """One kernel with its arguments, callable.

    Attributes:
        fields: The kernel's argument struct. The step path, whose tensors have been checked already, sets addresses and
            numbers in it by name, unchecked, and calls ``run``.
    """

    def __init__(
        self, program: Program, kernel: KernelSignature, shape: LaunchShape, arguments: dict[str, object]
    ) -> None:
        self.kernel, self.device = f"{program.name}: {kernel.name}", program.device
        self._signature, self._sizes, self._shape, self._joined = kernel, dict[str, int](), shape, program.joined
        self.fields: Any = structure(kernel)
        self._launch = program.module.launcher(kernel.name, self.fields, shape)
        self._given_at_call = frozenset(kernel.by_name) - frozenset(arguments)
        if not arguments.keys() <= kernel.by_name.keys():
            raise self._wrong_names(arguments, kernel.by_name, missing=())
        self._write(arguments)
        self._check_sizes(array for array in kernel.arrays if not self._given_at_call & _names(array))
        self._shapes_at_call = [array for array in kernel.arrays if self._given_at_call & _names(array)]
        self._kept_alive = [argument for argument in arguments.values() if isinstance(argument, torch.Tensor)]

    def __call__(self, **arguments: object) -> None:
        """Launch the kernel on torch's current stream.

        Args:
            arguments: All arguments that were not prepared.

        Raises:
            TypeError, ValueError: As ``Program.prepare``; TypeError also where one is missing or was prepared.
        """
        if arguments.keys() != self._given_at_call:
            raise self._wrong_names(arguments, self._given_at_call, self._given_at_call - arguments.keys())
        self._write(arguments)
        self._check_sizes(self._shapes_at_call)
        self.run()

    def run(self) -> None:
        """Launch with the values in ``fields``, on torch's current stream; or record it, see ``recording``."""
        if (record := recorder()) is None:
            self._launch()
        else:
            record(RecordedLaunch(self._joined, self._signature, self._shape, bytes(self.fields)))

    def _wrong_names(self, given: Iterable[str], expected: Iterable[str], missing: Iterable[str]) -> TypeError:
        unknown = set(given) - set(expected)
        parts = [
            f"{what} {', '.join(sorted(names))}"
            for what, names in (("missing", missing), ("not expected", unknown))
            if names
        ]
        return TypeError(
            f"{self.kernel}: arguments {'; '.join(parts)}; expected {', '.join(sorted(expected)) or 'none'}"
        )

    def _write(self, arguments: dict[str, object]) -> None:
        for name, value in arguments.items():
            declared = self._signature.by_name[name]
            if isinstance(declared, Scalar):
                try:
                    setattr(self.fields, name, declared.convert(value))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self.kernel}: argument {name} {error}") from None
            else:
                self._check_tensor(declared, value)
                setattr(self.fields, name, value.data_ptr() if isinstance(value, torch.Tensor) else None)
                self._sizes[name] = value.numel() if isinstance(value, torch.Tensor) else -1

    def _check_tensor(self, array: Array, value: object) -> None:
        what = f"{self.kernel}: argument {array.name}"
        if value is None and array.optional:
            return
        if not isinstance(value, torch.Tensor):
            expected = "a tensor or None" if array.optional else "a tensor"
            raise TypeError(f"{what} is a {type(value).__name__}; expected {expected}")
        if array.dtype is not None and value.dtype not in TENSOR_DTYPES[array.dtype]:
            expected = " or ".join(map(str, TENSOR_DTYPES[array.dtype]))
            raise TypeError(f"{what} has dtype {value.dtype}; expected {expected}")
        if value.device != self.device:
            raise ValueError(f"{what} is on {value.device}; expected a tensor on {self.device}")
        if not array.strided and not value.is_contiguous():
            raise ValueError(f"{what} has strides {value.stride()}; expected a contiguous tensor")
        if value.is_neg() or value.is_conj():
            raise ValueError(
                f"{what} is a lazily negated or conjugated view; expected its .resolve_neg() or .resolve_conj()"
            )

    def _check_sizes(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            if array.shape is None or self._sizes[array.name] < 0:
                continue
            expected = math.prod(getattr(self.fields, n) if isinstance(n, str) else n for n in array.shape)
            if self._sizes[array.name] != expected:
                raise ValueError(
                    f"{self.kernel}: argument {array.name} has {self._sizes[array.name]} elements; "
                    f"expected {' * '.join(map(str, array.shape))} = {expected}"
                )


def _names(array: Array) -> frozenset[str]:
    """The name of an array, and those of the scalars in its shape."""
    return frozenset([array.name, *(n for n in array.shape or () if isinstance(n, str))])
