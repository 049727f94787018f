"""The kernels of entry_points.cuh: build options, and the signatures that follow from them and the layout of a game."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_vecenv.compile.scratch_members import SCRATCH_MEMBERS
from gpu_vecenv.declare.field import boolean, f32, i32, i64, u64
from gpu_vecenv.declare.kernels import POINTER, Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import FieldLayout, GameLayout

GUARD_ROWS = 16  # rows of outputs after those of each environment, in a debug build
GUARD_BYTES = 64  # bytes of state after those of each environment, and before and after a Scratch, in a debug build
GUARD_BYTE = 0xA5  # their value: unlikely as a float, an index and a flag
TRACES_ACCESSES = "#define TRACES_ACCESSES\n"  # in a source whose accesses to memory are reported to races.cuh


@dataclass(frozen=True)
class BuildOptions:
    """Options of the code that is generated for one game.

    Args:
        initial_fields: Names of the state fields that have initial states.
        end_on_nonfinite: An environment with a NaN or infinite number ends its episode.
        guards: Debug build: guard bands between environments and around Scratch, and checked indices.
        races: With guards, on the host: accesses that would race on a GPU are recorded.
        sampled: The step draws its own actions from policy outputs; the step kernel is the only one.
        squash: How it draws them, see ``Sampler``.
        thread_order: Debug build: 1 is backwards, 2 shuffled: of ranges on the host, of blocks on a GPU.
        pointer: Dtype of addresses in the kernels' argument structs, ``POINTER_32`` in WebAssembly.
    """

    initial_fields: tuple[str, ...] = ()
    end_on_nonfinite: bool = False
    guards: bool = False
    races: bool = False
    thread_order: int = 0
    sampled: bool = False
    squash: str = "clip"
    pointer: np.dtype[Any] = POINTER

    def guard_items(self, field: FieldLayout) -> int:
        """Items of a field's guard band after those of each environment."""
        return GUARD_BYTES // field.dtype.itemsize if self.guards and not field.shared else 0


DEFAULT_BUILD = BuildOptions()


def engine_kernels(layout: GameLayout, build: BuildOptions = DEFAULT_BUILD) -> tuple[KernelSignature, ...]:
    """The kernels of entry_points.cuh and their arguments."""
    obs, action, state = layout.observation.dtype, layout.action.dtype, state_arguments(layout, build)
    sizes = KernelSignature("vecenv_layout", (Array("out", i64, shape=(3,)),))
    num_envs = Scalar("num_envs", i64)
    agents_as_envs = Scalar("agents_as_envs", boolean)
    acting = (Array("acting", boolean),) if layout.tracks_acting else ()
    end = (Array("scratch", None), num_envs)
    if build.sampled:
        actions = sample_arguments(action)
    else:
        actions = (Array("actions", None, const=True), Scalar("int64_actions", boolean))
    step = KernelSignature(
        "vecenv_step",
        (
            *state,
            *actions,
            Scalar("mode", i32),
            agents_as_envs,
            Array("obs", obs),
            Array("rewards", f32),
            Array("terminations", boolean),
            Array("truncations", boolean),
            Array("active", boolean),
            Array("final_mask", boolean),
            Array("fault", boolean),
            Array("action_mask", boolean, optional=True),
            Array("final_obs", obs, optional=True),
            *acting,
            *end,
        ),
    )
    members = (SCRATCH_MEMBERS,) if build.races else ()
    if build.sampled:
        return sizes, *members, step
    reset = KernelSignature(
        "vecenv_reset",
        (
            *state,
            Array("mask", boolean, const=True, optional=True),
            Scalar("reseed", boolean),
            Scalar("seed", u64),
            Array("seeds", u64, const=True, optional=True),
            Scalar("first_env_index", u64),
            agents_as_envs,
            Array("obs", obs),
            Array("active", boolean),
            Array("action_mask", boolean, optional=True),
            *acting,
            *end,
        ),
    )
    observe = KernelSignature("vecenv_observe", (*state, agents_as_envs, Array("obs", obs), *end))
    random_actions = KernelSignature("vecenv_random_actions", (*state, Array("actions", action), num_envs))
    return sizes, *members, reset, step, observe, random_actions


def state_arguments(layout: GameLayout, build: BuildOptions) -> tuple[Array | Scalar, ...]:
    """Arguments of a kernel that reads or writes the state of environments."""
    tensors = (
        Array(name, field.dtype, const=name.startswith("initial_") or field.shared)
        for name, field in layout.state_tensors(build.initial_fields)
    )
    records = (Array("violations", i64),) if build.guards else ()
    return (*tensors, Scalar("num_initial_states", i64), *records)


def squash_source(squash: str) -> str:
    """What precedes sampling.cuh for one of the ways to draw actions, see ``Sampler``."""
    return f"#define SQUASH sampling::{squash.upper()}\n"


def sample_arguments(action: np.dtype[Any]) -> tuple[Array | Scalar, ...]:
    """Arguments of a kernel that draws actions of this dtype."""
    return (
        Array("parameters", f32, const=True),
        Scalar("greedy", boolean),
        Array("actions", action),
        Array("log_probs", f32),
        Array("entropies", f32, optional=True),
        Array("draws", f32, optional=True),
    )
