"""FunctionManager: compiles device code for one device and launches its kernels on any tensor there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends import Argument, Backend, GroupShape, LaunchShape, Module, code_of, select
from gpu_vecenv.compile.cache import cached
from gpu_vecenv.compile.codegen import (
    DEFAULT_BUILD,
    BuildOptions,
    declared_source,
    game_source,
    inline_includes,
    missing_definitions,
)
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.errors import DeviceUnavailableError, EnvDefinitionError, KernelCompileError, nearest

KERNEL_NAME = re.compile(r"^\s*(?:ENV_)?KERNEL\(\s*(\w+)", re.MULTILINE)
KERNEL_PARAMETERS = re.compile(r"\bKERNEL\(\s*(\w+)\s*,([^(){}]*)\)\s*\{")
PARAMETER = re.compile(r"\s*(?:const\s+)?(\w+)\s*(\*?)\s*\w+\s*")
SCALARS = {"int": "i", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "float": "f", "double": "d"}
POINTER_DTYPES: dict[str, set[torch.dtype]] = {
    "float": {torch.float32},
    "double": {torch.float64},
    "int": {torch.int32},
    "i32": {torch.int32},
    "u32": {torch.int32, torch.uint32},
    "i64": {torch.int64},
    "u64": {torch.int64, torch.uint64},
    "u8": {torch.uint8},
    "bool": {torch.bool},
}
DIAGNOSTIC = re.compile(r"error|undefined|unresolved", re.IGNORECASE)
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

    def compile(self, source: str | Path, name: str | None = None, *, game: Env | None = None) -> Program:
        """Compile kernels of your own: text, or the path of a ``.cu`` file.

        Kernels are written ``KERNEL(scale, float* x, float a, i64 n) { FOR_ITEMS(k, n) x[k] *= a; }`` after
        ``#include "kernel.cuh"``.

        Args:
            source: The text, or its path.
            name: What errors call it; by default the file's name.
            game: Its constants and types, as ``gpu-vecenv show`` prints them, precede the text.

        Raises:
            KernelCompileError: With file, line and the compiler's words.
        """
        if not isinstance(source, str | Path):
            raise TypeError(f"compile: source is a {type(source).__name__}; expected the text, or a Path to it")
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        folder = None if isinstance(source, str) else source.parent
        name = name or ("kernel.cu" if isinstance(source, str) else source.name)
        seen = set[str]()
        before = "" if game is None else declared_source(game.layout, DEFAULT_BUILD, seen)
        return self._build(before + inline_includes(text, name, folder, seen), name)

    def compile_game(
        self, layout: GameLayout, *, group_shape: GroupShape | None = None, build: BuildOptions = DEFAULT_BUILD
    ) -> Program:
        """Compile a game with the engine around it.

        Args:
            layout: The configured game, ``env.layout``.
            group_shape: Lanes per replica and threads per block (CUDA); None chooses by the number of agents.
            build: How the text around it is made.

        Raises:
            DeviceUnavailableError: The game is written for CUDA only.
            EnvDefinitionError: Its text cannot be read, or does not define what a game defines.
            KernelCompileError: With file, line and the compiler's words.
        """
        if self.device.type == "cpu" and not layout.host:
            raise DeviceUnavailableError(
                f'{layout.name} declares host = False: it is written for CUDA only; use device="cuda"'
            )
        group_shape = group_shape or GroupShape.of(self.backend.default_threads_per_env(layout.num_agents))
        path = layout.source_path
        try:
            return self._build(self.backend.device_constants(group_shape) + game_source(layout, build), path.name)
        except KernelCompileError as error:
            # An error in the file itself tells more than what is missing because of it.
            own = any(OWN_ERROR.match(line) and line.startswith(path.name) for line in error.log.splitlines())
            missing = [] if own else missing_definitions(layout)
            if not missing:
                raise
            said = str(error).splitlines()[1].strip()
            raise EnvDefinitionError(
                f"{layout.name}: {path} does not define {', nor '.join(missing)}; the compiler says: {said}"
            ) from error

    def _build(self, text: str, name: str) -> Program:
        key = "\n".join([__version__, self.backend.identity, text])
        try:
            path = cached(key, self.backend.suffix, lambda target: self.backend.compile(text, target))
        except KernelCompileError as error:
            said = [line for line in error.log.splitlines() if DIAGNOSTIC.search(line)] or error.log.splitlines()
            shown = "\n  ".join(said[:SHOWN_DIAGNOSTICS])
            raise KernelCompileError(f"{name} did not compile ({error}):\n  {shown}", error.log) from None
        return Program(name, self.device, self.backend.load(path), text)


@lru_cache(64)
def _kernels_in(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the kernels; and kernel -> its parameter list, where that is plain text."""
    return tuple(KERNEL_NAME.findall(text)), dict(KERNEL_PARAMETERS.findall(text))


class Program:
    """Compiled kernels of one text."""

    def __init__(self, name: str, device: torch.device, module: Module, text: str) -> None:
        self.name, self.device, self.module = name, device, module
        self.kernels, self.parameters = _kernels_in(text)

    def prepare(self, kernel: str, shape: LaunchShape, arguments: Sequence[Argument]) -> Launch:
        """A launch to be made again and again, its arguments replaceable one by one.

        Raises:
            TypeError: An argument is neither tensor, None nor NumPy scalar, or not what the kernel declares.
            ValueError: A tensor lies on another device or is not contiguous.
            AttributeError: There is no such kernel.
        """
        try:
            return Launch(self, kernel, shape, arguments)
        except AttributeError as error:
            raise AttributeError(f"{self.name} has no kernel {kernel!r}; {nearest(kernel, self.kernels)}") from error

    def launch(self, kernel: str, items: int, *arguments: Argument) -> None:
        """Run a kernel once over ``items`` items, on torch's current stream."""
        self.prepare(kernel, LaunchShape(items), arguments)()


class Launch:
    """One kernel with its arguments, callable."""

    def __init__(self, program: Program, kernel: str, shape: LaunchShape, arguments: Sequence[Argument]) -> None:
        self.kernel, self.device = f"{program.name}: {kernel}", program.device
        codes = "".join(code_of(self.kernel, place, argument) for place, argument in enumerate(arguments))
        self._check_types(program.parameters.get(kernel, ""), codes, arguments)
        self.kept_alive = [
            argument for argument in arguments if isinstance(argument, torch.Tensor)
        ]  # alive while launchable
        self.arguments: list[Any] = [self._raw(argument) for argument in arguments]
        self._launch = program.module.launcher(kernel, codes, shape)

    def _check_types(self, declared: str, codes: str, arguments: Sequence[Argument]) -> None:
        """Compare with the parameter list in the text; one that macros write cannot be read and is let pass."""
        matches = [PARAMETER.fullmatch(part) for part in declared.split(",")]
        known = [m.groups() for m in matches if m and (m[1] in SCALARS or m[2])]
        if not declared or len(known) < len(matches):
            return
        if len(arguments) != len(known):
            raise TypeError(f"{self.kernel} takes {len(known)} arguments ({declared.strip()}); got {len(arguments)}")
        for place, ((kind, star), code, argument) in enumerate(zip(known, codes, arguments, strict=True)):
            fits = code == ("P" if star else SCALARS[kind])
            if fits and isinstance(argument, torch.Tensor) and kind in POINTER_DTYPES:
                fits = argument.dtype in POINTER_DTYPES[kind]
            if not fits:
                got = argument.dtype if isinstance(argument, torch.Tensor) else type(argument).__name__
                raise TypeError(f"{self.kernel}: argument {place} is {got}; the kernel declares {kind}{star}")

    def _raw(self, argument: Argument) -> Any:
        if not isinstance(argument, torch.Tensor):
            return 0 if argument is None else argument
        if argument.device != self.device or not argument.is_contiguous():
            raise ValueError(
                f"{self.kernel}: got a tensor on {argument.device}, strides {argument.stride()}; "
                f"expected a contiguous one on {self.device}"
            )
        return argument.data_ptr()

    def __call__(self) -> None:
        """Run it, on torch's current stream."""
        self._launch(self.arguments)
