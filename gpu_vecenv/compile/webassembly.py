"""A game as a WebAssembly module: the host's source compiled for the browser, and where its memory holds what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_vecenv._version import __version__
from gpu_vecenv.compile.backends.webassembly import WebAssemblyCompiler
from gpu_vecenv.compile.cache import DIGEST_BYTES, open_cached
from gpu_vecenv.compile.codegen import engine_headers, game_source, inline_includes, own_source
from gpu_vecenv.compile.engine_kernels import BuildOptions, engine_kernels
from gpu_vecenv.compile.function_manager import with_diagnostics
from gpu_vecenv.compile.source_rules import check_source_rules
from gpu_vecenv.declare.kernels import POINTER_32, Array, KernelSignature, arguments_source
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.errors import DeviceUnavailableError, KernelCompileError

Beside = Mapping[Path, Sequence[KernelSignature]]  # further sources of the module -> their kernels


def compile_webassembly(layout: GameLayout, beside: Beside | None = None, *, end_on_nonfinite: bool = False) -> bytes:
    """The module of a configured game and the engine, with the rounding of the other two targets.

    Args:
        layout: The configured game, ``env.layout``.
        beside: Further files of device code, which include no more than the engine's headers.
        end_on_nonfinite: As for ``VecEnv``.

    Raises:
        DeviceUnavailableError: The game is written for CUDA only.
        CompilerError: The package ziglang is not installed.
        SourceRuleError: The game's source uses what device code may not.
        KernelCompileError: With the compiler's message.
    """
    if not layout.host:
        raise DeviceUnavailableError(
            f"{layout.name} declares host = False: it is written for CUDA only and does not run in a browser"
        )
    compiler, build = WebAssemblyCompiler(), _build(end_on_nonfinite)
    text = game_source(layout, build)
    seen = engine_headers()
    for path, kernels in (beside or {}).items():
        text += arguments_source(kernels, build.pointer)
        further = inline_includes(path.read_text(encoding="utf-8"), path.name, path.parent, seen)
        text += f"namespace beside_{path.stem} {{\n{further}}}\n"  # its functions may have names that the game's have

    def compile_module(target: Path) -> None:
        check_source_rules(own_source(layout), layout.name, layout.allows)
        try:
            compiler.compile(text, target)
        except KernelCompileError as error:
            raise with_diagnostics(layout.source_path.name, error) from None

    key = "\n".join([__version__, compiler.identity, f"rules but {sorted(layout.allows)}", text])
    with open_cached(key, compiler.suffix, compile_module) as file:
        file.seek(0)
        return file.read()[:-DIGEST_BYTES]


def memory_layout(
    layout: GameLayout, beside: Beside | None = None, *, end_on_nonfinite: bool = False
) -> dict[str, Any]:
    """Where a page finds fields, outputs and arguments in the module's memory, as JSON types.

    ``fields`` and ``outputs`` are arrays of the environments, (num_envs, *shape) each, but (*shape) where ``shared``;
    ``name`` is that of the kernels' argument. ``kernels`` has the argument struct of each kernel: its size in bytes,
    and name, dtype and first byte of each argument, the dtype "pointer" for addresses.
    """
    build = _build(end_on_nonfinite)
    agents, action, obs = layout.num_agents, layout.action, layout.observation
    outputs: dict[str, tuple[Any, tuple[int, ...]]] = {
        "obs": (obs.dtype, (agents, *obs.shape)),
        "rewards": ("float32", (agents,)),
        **dict.fromkeys(("terminations", "truncations", "active", "final_mask", "fault"), ("bool", (agents,))),
    }
    if layout.num_choices:
        outputs["action_mask"] = "bool", (agents, layout.num_choices)
    if layout.tracks_acting:
        outputs["acting"] = "bool", (agents,)
    outputs["final_obs"] = outputs["obs"]
    kernels = [*engine_kernels(layout, build), *(kernel for kernels in (beside or {}).values() for kernel in kernels)]
    described = {
        "num_agents": agents,
        "agents": layout.agent_names,
        "roles": layout.roles,
        "observation": {
            "shape": obs.shape,
            "roles": {role: space.shape for role, space in obs.spaces.items()},
        },
        "action": {
            "shape": action.shape,
            "heads": action.heads,
            "dtype": action.dtype.name,
            "num_logits": action.num_logits,
            "sizes": action.sizes,
            "bounds": action.bounds,
        },
        "fields": [
            {"name": name, "dtype": field.dtype.name, "shape": field.shape, "shared": field.shared}
            for name, field in layout.state_tensors()
        ],
        "outputs": [{"name": name, "dtype": str(dtype), "shape": shape} for name, (dtype, shape) in outputs.items()],
        "kernels": {kernel.name: _struct(kernel) for kernel in kernels},
    }
    result: dict[str, Any] = json.loads(json.dumps(described))
    return result


def _build(end_on_nonfinite: bool) -> BuildOptions:
    return BuildOptions(end_on_nonfinite=end_on_nonfinite, pointer=POINTER_32)


def _struct(kernel: KernelSignature) -> dict[str, Any]:
    struct = kernel.struct_with(POINTER_32)
    fields: Any = struct.fields
    arguments = [
        {"name": a.name, "dtype": "pointer" if isinstance(a, Array) else a.dtype.name, "offset": fields[a.name][1]}
        for a in kernel.arguments
    ]
    return {"bytes": struct.itemsize, "arguments": arguments}
