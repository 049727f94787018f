"""A rollout in one launch: forward pass, sampling, step, observation and storage of all steps.

``cuda/learner/rollout.cu`` is compiled for one game, its policies and one precision. Where it does not apply, a rollout
takes a few launches a step (``Rollout.collect``), with bit-identical results; ``fused_rollout`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_vecenv.compile.backends import LaunchShape, TensorCores, group_constants
from gpu_vecenv.compile.codegen import inline_includes, stepping_source
from gpu_vecenv.compile.engine_kernels import BuildOptions, state_arguments
from gpu_vecenv.declare.field import boolean, f32, f64, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.errors import KernelCompileError
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.perceptron import REGISTERS, Perceptron, PerceptronKernels, TileShape, is_plain
from gpu_vecenv.train.rollout_storage import Rollout

# In the order of preference, as measured on an H200: the first with which a launch runs all environments at once is
# taken, else that with which it runs the most.
TILES = (TileShape(64, 4, 1), TileShape(32, 2, 2), TileShape(16, 1, 4), TileShape(64, 2, 2), TileShape(128, 8, 1))
MAX_AGENTS = 32  # of one environment: its group is at most a warp
STEP_REGISTERS = 40  # of a thread for its environment, beside those of the network; an estimate
STATIC_BYTES = 1024  # of shared memory that the engine keeps for variables of kernels
MAX_BLOCKS = 8  # of a multiprocessor; with more the registers are too few
TENSORS = {"parameters": f32, "obs_mean": f64, "obs_var": f64, "return_mean": f64, "return_var": f64}  # of a policy


@dataclass(frozen=True)
class RolloutTile:
    """A block's tile of rows, of each policy, and how its threads step the environments of these rows.

    Args:
        tile: Rows and warps of a block.
        layout: The game.
        perceptrons: The networks of its policies.
    """

    tile: TileShape
    layout: GameLayout
    perceptrons: tuple[Perceptron, ...]

    @property
    def threads_per_env(self) -> int:
        """Agents, rounded up to a power of two."""
        return 1 << (self.layout.num_agents - 1).bit_length()

    @property
    def envs(self) -> int:
        """Environments of a block; 0 if the rows or the threads of one are too many.

        All warps have as many, if there are enough: a warp whose groups are not all at work takes longer.
        """
        owners = self.tile.row_warps if self.tile.column_warps == 1 else 1  # of rows, with environments of their own
        most_agents: int = max(p.agents.stop - p.agents.start for p in self.perceptrons)
        warps = self.tile.warps // owners
        each = min(self.tile.rows // owners // most_agents, warps * (32 // self.threads_per_env))
        return owners * (each if each < warps else each // warps * warps)

    @property
    def network_bytes(self) -> int:
        """Shared memory of the networks."""
        return sum(perceptron.shared_bytes(self.tile, forward=True) for perceptron in self.perceptrons)

    def blocks(self, cores: TensorCores) -> int:
        """Blocks that a multiprocessor holds at a time, an estimate; 0 if none fits."""
        fields = (field for field in (*self.layout.fields, *self.layout.engine_fields) if not field.shared)
        each: int = sum(field.nbytes for field in fields)
        each += self.layout.obs_size * self.layout.num_agents * self.layout.observation.dtype.itemsize
        static_bytes = STATIC_BYTES + 4 * len(self.layout.randomized) * self.envs
        if self.envs == 0 or self.network_bytes + static_bytes > cores.block_shared_bytes:
            return 0
        registers = STEP_REGISTERS + max(p.registers(self.tile, forward=True) for p in self.perceptrons)
        size = self.network_bytes + each * self.envs + cores.reserved_shared_bytes
        blocks = min(cores.shared_bytes // size, REGISTERS // (32 * self.tile.warps * registers))
        return max(1, min(blocks, MAX_BLOCKS))

    def constants(self, cores: TensorCores) -> str:
        """The constants of the groups of threads in C++."""
        return group_constants(
            self.threads_per_env,
            self.envs,
            -(-self.envs // self.tile.warps),
            cores.block_shared_bytes - self.network_bytes,
            self.network_bytes,
        )

    def source(self, build: BuildOptions, cores: TensorCores, resident_blocks: int) -> str:
        """The program of rollout.cu; kernel.cuh precedes it."""
        folder, seen = cuda_folder() / "learner", set[str]()

        def include(name: str, seen: set[str]) -> str:
            return inline_includes(f'#include "{name}"', "rollout", folder, seen)

        include("kernel.cuh", seen)
        text = self.constants(cores) + stepping_source(self.layout, build, seen) + include("tensor_core.cuh", seen)
        names, first = [f"perceptron_{k}" for k in range(len(self.perceptrons))], 0
        for k, (name, perceptron) in enumerate(zip(names, self.perceptrons, strict=True)):
            tensors = ", ".join(f"args.{tensor}_{k}" for tensor in TENSORS)
            text += f"#define perceptron {name}\n{perceptron.source(self.tile, resident_blocks, True, first)}"
            text += f"#define POLICY_TENSORS {tensors}\n{include('rollout_policy.cuh', set(seen))}"
            text += "#undef POLICY_TENSORS\n#undef perceptron\n"
            first += perceptron.shared_bytes(self.tile, forward=True)
        members = " ".join(f"{name}::RolloutPolicy {name}_;" for name in names)
        calls, types = (" ".join(f"f({name}{end});" for name in names) for end in ("_", "::RolloutPolicy()"))
        text += f"""typedef {names[0]}::RolloutPolicy FirstPolicy;
struct Policies {{
    {members}
    template <class F> HD void each(F f) {{ {calls} }}
    template <class F> HD static void each_type(F f) {{ {types} }}
}};
"""
        return text + inline_includes((folder / "rollout.cu").read_text(encoding="utf-8"), "rollout.cu", folder, seen)


def choose_tile(
    layout: GameLayout, perceptrons: Sequence[Perceptron], num_envs: int, cores: TensorCores
) -> RolloutTile | None:
    """The shape of a block's tile; None if none fits."""
    tiles = [RolloutTile(tile, layout, tuple(perceptrons)) for tile in TILES]
    at_once = {tile.tile: tile.blocks(cores) * tile.envs * cores.multiprocessors for tile in tiles}
    best = max(tiles, key=lambda tile: min(at_once[tile.tile], num_envs))
    return best if at_once[best.tile] else None


def rollout_kernels(
    layout: GameLayout, build: BuildOptions, num_policies: int
) -> tuple[KernelSignature, KernelSignature]:
    """The kernels of rollout.cu and their arguments."""
    rollout = KernelSignature(
        "rollout",
        (
            *state_arguments(layout, build),
            *(
                Array(f"{name}_{k}", dtype, const=True, optional=name != "parameters")
                for k in range(num_policies)
                for name, dtype in TENSORS.items()
            ),
            Array("obs", layout.observation.dtype),
            Array("active", boolean),
            *((Array("acting", boolean),) if layout.tracks_acting else ()),
            Array("action_mask", boolean, optional=True),
            Scalar("squash_by_tanh", boolean),
            Array("actions", layout.action.dtype),
            Scalar("actions_stride", i64),  # elements from one step's to those of the next
            Array("log_probs", f32),
            Array("draws", f32, optional=True),
            Array("values", f32),
            Array("rewards", f32),
            Array("terminations", boolean),
            Array("truncations", boolean),
            Scalar("num_steps", i64),
            Array("scratch", None),
            Scalar("num_envs", i64),
        ),
    )
    return KernelSignature("rollout_layout", (Array("out", i64, shape=(2,)),)), rollout


def why_not_fused(rollout: Rollout, torch_reasons: Mapping[str, str | None]) -> str | None:
    """Why a rollout takes several launches a step whatever the sizes, in a few words; None if it may be one launch.

    Args:
        rollout: The rollout buffer.
        torch_reasons: Policy -> why torch computes it, see ``perceptron.why_not_fused``.
    """
    env = rollout.env
    if env.functions.backend.tensor_cores is None:
        return "no tensor cores"
    if reason := next((reason for reason in torch_reasons.values() if reason is not None), None):
        return f"a policy by torch: {reason}"
    if rollout.shaping is not None:
        return "a reward function"
    if reason := env.why_not_fused():
        return reason
    if env.num_agents > MAX_AGENTS:
        return f"more than {MAX_AGENTS} agents"
    return None


def fused_rollout(
    rollout: Rollout,
    sampler: Sampler,
    torch_reasons: Mapping[str, str | None],
    kernels: Mapping[str, PerceptronKernels | None],
    tile: TileShape | None = None,
) -> tuple[FusedRollout | None, str | None]:
    """A rollout in one launch, or None with the reason why there is none.

    Args:
        rollout: Where it is stored.
        sampler: Of the environment.
        torch_reasons: Policy -> why torch computes it, see ``perceptron.why_not_fused``.
        kernels: Policy -> its kernels; None: torch.
        tile: Shape of a block's tile; None chooses one.
    """
    if reason := why_not_fused(rollout, torch_reasons):
        return None, reason
    own = [kernel for kernel in kernels.values() if kernel is not None]
    cores = rollout.env.functions.backend.tensor_cores
    assert len(own) == len(kernels) and cores is not None
    layout, perceptrons = rollout.env.layout, tuple(kernel.perceptron for kernel in own)
    if tile is None:
        chosen = choose_tile(layout, perceptrons, rollout.env.num_envs, cores)
    else:
        chosen = RolloutTile(tile, layout, perceptrons)
    if chosen is None:
        return None, "networks too large for shared memory"
    try:
        return FusedRollout(rollout, sampler, own, chosen), None
    except KernelCompileError as error:  # macros of a game's source may have names of the network's
        return None, f"one kernel of game and networks does not compile: {str(error).splitlines()[1].strip()}"


class FusedRollout:
    """All steps of a rollout by one launch, and the values of row T.

    Where actor and critic have a trunk each, the values of all rows are one more launch.

    Args:
        rollout: Where it is stored.
        sampler: Of the environment.
        kernels: Of all policies.
        tile: Of a block.
    """

    def __init__(
        self, rollout: Rollout, sampler: Sampler, kernels: Sequence[PerceptronKernels], tile: RolloutTile
    ) -> None:
        self.rollout, self.kernels, self.tile = rollout, kernels, tile
        env, cores, threads = rollout.env, rollout.env.functions.backend.tensor_cores, 32 * tile.tile.warps
        assert cores is not None
        build = BuildOptions(env.build.initial_fields, env.build.end_on_nonfinite, sampled=True)
        blocks = -(-env.num_envs // tile.envs)
        program = env.functions.compile(
            tile.source(build, cores, min(tile.blocks(cores), -(-blocks // cores.multiprocessors))),
            "rollout.cu",
            kernels=rollout_kernels(env.layout, build, len(kernels)),
        )
        sizes = torch.zeros(2, dtype=torch.int64, device=env.device)
        program.launch("rollout_layout", 1, out=sizes)
        scratch_bytes, self.shared_bytes = sizes.tolist()
        data, action = rollout, env.layout.action
        self._launch = env.prepare(
            program,
            "rollout",
            LaunchShape(blocks * threads, threads_per_block=threads, shared_bytes=self.shared_bytes),
            **{f"{name}_{k}": tensor for k, own in enumerate(kernels) for name, tensor in own.common.items()},
            obs=data.obs,
            active=data.active,
            **({"acting": data.acting} if env.layout.tracks_acting else {}),
            action_mask=data.action_mask,
            squash_by_tanh=sampler.squash == "tanh",
            actions=data.draws if action.discrete else data.samples[0].actions,
            actions_stride=data.draws[0].numel() if action.discrete else 0,
            log_probs=data.log_probs,
            draws=None if action.discrete else data.draws,
            values=data.values,
            rewards=data.rewards,
            terminations=data.terminations,
            truncations=data.truncations,
            num_steps=len(data.rewards),
            scratch=torch.empty(max(1, scratch_bytes * env.num_envs), dtype=torch.uint8, device=env.device),
            num_envs=env.num_envs,
        )
        # Of the policies whose actor and critic have a trunk each.
        self._values = [
            (own.policy.view, own.forward(num_steps=len(data.values))) for own in kernels if own.perceptron.towers == 2
        ]

    def applies(self) -> bool:
        """Whether neither policies nor environment were changed since."""
        return self.rollout.env.why_not_fused() is None and all(is_plain(own.policy) for own in self.kernels)

    def __call__(self) -> None:
        """Collect a rollout, as ``Rollout.collect`` and the forward passes of row T do."""
        data = self.rollout
        data.env.launch(self._launch, "rollout")
        for view, forward in self._values:
            obs = data.obs.flatten(0, 2)[(slice(None), *view.obs_slice)]
            forward(obs=obs, action_mask=None, outputs=None, values=data.values)
