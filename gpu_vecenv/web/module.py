"""A configured game for the page: its WebAssembly module, the layout of its memory, its shared fields."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_vecenv.compile.webassembly import compile_webassembly, memory_layout
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.arguments import shared_field_arrays
from gpu_vecenv.engine.digest import DIGEST_KERNEL
from gpu_vecenv.files import engine_folder


@dataclass(frozen=True, kw_only=True)
class WebModule:
    """One configured game, compiled.

    Attributes:
        wasm: The WebAssembly module.
        layout: As ``memory_layout`` describes it, in JSON types.
        shared: Kernel argument of each array that all environments share -> its bytes in base64.
    """

    wasm: bytes
    layout: dict[str, Any]
    shared: dict[str, str]


def web_module(
    game: Env,
    arrays: Mapping[str, np.ndarray[Any, Any] | torch.Tensor] | None = None,
    *,
    end_on_nonfinite: bool = False,
) -> WebModule:
    """Compile a game for browsers.

    Args:
        game: The configured game.
        arrays: Values of shared state fields, as for ``VecEnv``.
        end_on_nonfinite: As for ``VecEnv``.

    Raises:
        ConfigError: ``arrays`` has other names, shapes or dtypes than the game's shared fields.
        DeviceUnavailableError, CompilerError, SourceRuleError, KernelCompileError: As ``compile_webassembly``.
    """
    layout, beside = game.layout, {engine_folder() / "digest.cu": (DIGEST_KERNEL,)}
    values = {f"state_{name}": np.asarray(array) for name, array in shared_field_arrays(game, arrays or {}).items()}
    if layout.randomized:
        values["engine_ranges"] = np.array([(each.low, each.high, each.last) for each in layout.randomized], np.float32)
    dtypes = {name: field.dtype for name, field in layout.state_tensors()}
    return WebModule(
        wasm=compile_webassembly(layout, beside, end_on_nonfinite=end_on_nonfinite),
        layout=memory_layout(layout, beside, end_on_nonfinite=end_on_nonfinite),
        shared={
            name: base64.b64encode(np.ascontiguousarray(array, dtypes[name]).tobytes()).decode()
            for name, array in values.items()
        },
    )
