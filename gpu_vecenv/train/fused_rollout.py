"""A rollout in one launch: forward pass, sampling, step, observation and storage of all steps.

``cuda/learner/rollout.cu`` is compiled for one game, one policy of all its agents and one precision. All other rollouts
take a few launches a step (``Rollout.collect``), with bit-identical results; ``why_not_fused`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_vecenv.compile.backends import LaunchShape, TensorCores, group_constants
from gpu_vecenv.compile.engine_kernels import BuildOptions, state_arguments
from gpu_vecenv.compile.function_manager import Launch, Stepping
from gpu_vecenv.declare.field import boolean, f32, f64, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.perceptron import Perceptron, PerceptronKernels, TileShape, is_plain
from gpu_vecenv.train.rollout_storage import Rollout

# In the order of preference: the first with which a launch runs all environments at once is taken, as the steps of a
# small tile take the least time; else that with which it runs the most.
TILES = (TileShape(16, 1, 4), TileShape(32, 2, 2), TileShape(64, 4, 1), TileShape(64, 2, 2), TileShape(128, 8, 1))
MAX_AGENTS = 32  # of one environment: a group is at most a warp
STEP_REGISTERS = 64  # of a thread for its environment, beside those of the network; an estimate


@dataclass(frozen=True)
class EnvsOfTile:
    """How the threads of a block step the environments whose rows the block computes.

    Args:
        tile: Rows and warps of the block.
        num_agents: Rows of an environment.
    """

    tile: TileShape
    num_agents: int

    @property
    def owners(self) -> int:
        """Warps that have all columns of their rows, each with environments of its own, or one block."""
        return self.tile.row_warps if self.tile.column_warps == 1 else 1

    @property
    def envs(self) -> int:
        """Environments of the block; 0 if the rows of one are too many."""
        return self.owners * (self.tile.rows // self.owners // self.num_agents)

    @property
    def threads_per_env(self) -> int:
        """The next power of two."""
        return 1 << (self.num_agents - 1).bit_length()

    @property
    def groups_per_warp(self) -> int:
        """Environments of a warp; the last warps of a block may have fewer."""
        return -(-self.envs // self.tile.warps)

    def fits(self) -> bool:
        """Whether the threads suffice."""
        return self.envs > 0 and self.groups_per_warp * self.threads_per_env <= 32

    def constants(self, shared_begin: int, shared_limit: int) -> str:
        """The constants in C++, with the bytes of shared memory that the network has and those that the rest may use."""
        return group_constants(
            self.threads_per_env, self.envs, self.groups_per_warp, shared_limit - shared_begin, shared_begin
        )


def choose_tile(perceptron: Perceptron, env: VecEnv, cores: TensorCores) -> TileShape | None:
    """The shape of a block's tile; None if none fits."""
    layout = env.layout
    each = layout.obs_size * layout.num_agents * layout.observation.dtype.itemsize
    each += sum(field.nbytes for field in (*layout.fields, *layout.engine_fields) if not field.shared)

    def envs_at_once(tile: TileShape) -> int:
        own = EnvsOfTile(tile, layout.num_agents)
        size = perceptron.shared_bytes(tile, forward=True)
        registers = perceptron.registers(tile, forward=True) + STEP_REGISTERS
        if not own.fits() or size > cores.block_shared_bytes - 1024:
            return 0
        blocks = cores.shared_bytes // (size + each * own.envs + cores.reserved_shared_bytes)
        return own.envs * cores.multiprocessors * max(1, min(blocks, 65536 // (32 * tile.warps * registers)))

    at_once = {tile: envs_at_once(tile) for tile in TILES}
    best = max(TILES, key=lambda tile: min(at_once[tile], env.num_envs))
    return best if at_once[best] else None


def rollout_kernels(layout: GameLayout, build: BuildOptions) -> tuple[KernelSignature, KernelSignature]:
    """The kernels of rollout.cu and their arguments."""
    rollout = KernelSignature(
        "rollout",
        (
            *state_arguments(layout, build),
            Array("parameters", f32, const=True),
            Array("obs_mean", f64, const=True, optional=True),
            Array("obs_var", f64, const=True, optional=True),
            Array("return_mean", f64, const=True, optional=True),
            Array("return_var", f64, const=True, optional=True),
            Array("obs", layout.observation.dtype),
            Array("active", boolean),
            Array("action_mask", boolean, optional=True),
            Scalar("masked_logit", f32),  # in the place of those that the mask forbids
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
    if len(torch_reasons) > 1:
        return "several policies"
    if rollout.shaping is not None:
        return "a reward function"
    if reason := env.why_not_fused():
        return reason
    return None if env.num_agents <= MAX_AGENTS else f"more than {MAX_AGENTS} agents"


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
    (own,), cores = kernels.values(), rollout.env.functions.backend.tensor_cores
    assert own is not None and cores is not None
    tile = tile or choose_tile(own.perceptron, rollout.env, cores)
    if tile is None:
        return None, "a network too large for shared memory"
    fused = FusedRollout(rollout, sampler, own, tile)
    return fused, None


class FusedRollout:
    """All steps of a rollout by one launch, and the values of row T.

    Where actor and critic have a trunk each, the values of all rows are a second launch.

    Args:
        rollout: Where it is stored.
        sampler: Of the environment.
        kernels: Of the policy of all agents.
        tile: Shape of a block's tile.
    """

    def __init__(self, rollout: Rollout, sampler: Sampler, kernels: PerceptronKernels, tile: TileShape) -> None:
        self.rollout, self.kernels, self.tile = rollout, kernels, tile
        env, perceptron, cores = rollout.env, kernels.perceptron, rollout.env.functions.backend.tensor_cores
        assert cores is not None
        own = EnvsOfTile(tile, env.num_agents)
        begin, limit = perceptron.shared_bytes(tile, forward=True), cores.block_shared_bytes
        build = BuildOptions(env.build.initial_fields, env.build.end_on_nonfinite, sampled=True)
        blocks = -(-env.num_envs // own.envs)
        program = env.functions.compile(
            cuda_folder() / "learner/rollout.cu",
            kernels=rollout_kernels(env.layout, build),
            game=env.game,
            constants=perceptron.source(tile, max(1, min(8, -(-blocks // cores.multiprocessors))), forward=True),
            stepping=Stepping(own.constants(begin, limit), build),
        )
        sizes = torch.zeros(2, dtype=torch.int64, device=env.device)
        program.launch("rollout_layout", 1, out=sizes)
        scratch_bytes, shared_bytes = sizes.tolist()
        data, action = rollout, env.layout.action
        threads = 32 * tile.warps
        self._launch: Launch = env.prepare(
            program,
            "rollout",
            LaunchShape(blocks * threads, threads_per_block=threads, shared_bytes=shared_bytes),
            **kernels.common,
            obs=data.obs,
            active=data.active,
            action_mask=data.action_mask,
            masked_logit=torch.finfo(torch.float32).min,
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
        self._values = None if perceptron.towers == 1 else kernels.forward(num_steps=len(data.rewards) + 1)

    def applies(self) -> bool:
        """Whether neither policy nor environment was changed since."""
        return is_plain(self.kernels.policy) and self.rollout.env.why_not_fused() is None

    def __call__(self) -> None:
        """Collect a rollout, as ``Rollout.collect`` and the forward pass of row T do."""
        data = self.rollout
        data.env.launch(self._launch, "rollout")
        if self._values is not None:
            self._values(obs=data.obs.flatten(0, 2), action_mask=None, outputs=None, values=data.values)
