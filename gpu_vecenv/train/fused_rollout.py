"""A rollout in one launch: forward pass, sampling, step, observation and storage of all steps.

``cuda/learner/rollout.cu`` is compiled for one game, its policies and one precision. Where it does not apply, a rollout
takes a few launches a step (``Rollout.collect``), with bit-identical results but for actors beside a central critic,
which torch computes there; ``fused_rollout`` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.engine_kernels import BuildOptions, state_arguments
from gpu_vecenv.compile.function_manager import Program
from gpu_vecenv.declare.field import boolean, f32, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.sampler import Sampler, Squash
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import KernelCompileError
from gpu_vecenv.train.kept_tensors import row_width
from gpu_vecenv.train.opponents import Opponents
from gpu_vecenv.train.perceptron import PerceptronKernels, is_plain
from gpu_vecenv.train.policy_kernels import PolicyKernels
from gpu_vecenv.train.populations import Member
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.rollout_tiles import STRIDES, TENSORS, RangeKind, RolloutTile, choose_tile

DTYPES = torch.float32, torch.float64  # of parameters and statistics


def rollout_kernels(
    layout: GameLayout, build: BuildOptions, num_policies: int, ranges: RangeKind | None = None
) -> tuple[KernelSignature, KernelSignature]:
    """The kernels of rollout.cu and their arguments."""
    of_ranges: list[Array | Scalar] = []
    if ranges is not None:
        of_ranges = [Scalar("first_range", i64), Scalar("range_size", i64)]
        of_ranges += [Scalar("blocks_before_ranges", i32), Scalar("blocks_per_range", i32)]
    for k in range(num_policies):
        if ranges == "opponents":
            of_ranges += [
                Array(f"opponent_{name}_{k}", dtype, const=True, optional=name != "parameters")
                for name, dtype in TENSORS.items()
            ]
            of_ranges.append(Array(f"opponent_plays_{k}", boolean, const=True))
            of_ranges += [Scalar(f"opponent_{name}_{k}", i64) for name in STRIDES]
        if ranges == "populations":
            of_ranges += [Scalar(f"{name}_{k}", i32) for name in ("members", "ranges_each")]
            of_ranges += [Scalar(f"member_{name}_{k}", i64) for name in STRIDES]
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
            *of_ranges,
        ),
    )
    return KernelSignature("rollout_layout", (Array("out", i64, shape=(2,)),)), rollout


def why_not_fused(rollout: Rollout, unfused_reasons: Mapping[str, str | None]) -> str | None:
    """Why a rollout takes several launches a step whatever the sizes, in a few words; None if it may be one launch.

    Args:
        rollout: The rollout buffer.
        unfused_reasons: Policy -> why ``PerceptronKernels`` do not compute it, see ``perceptron.why_not_fused``.
    """
    env = rollout.env
    if env.functions.backend.tensor_cores is None:
        return "no tensor cores"
    if reason := next((reason for reason in unfused_reasons.values() if reason is not None), None):
        return f"a policy without a kernel of its own: {reason}"
    if rollout.shaping is not None:
        return "a reward function"
    if rollout.keeps_states:
        return "a state for critics, which is stored at each step"
    if reason := env.why_not_fused():
        return reason
    return None


def fused_rollout(
    rollout: Rollout,
    sampler: Sampler,
    unfused_reasons: Mapping[str, str | None],
    kernels: Mapping[str, PolicyKernels | None],
    tile: RolloutTile | None = None,
    *,
    actors: Mapping[str, PerceptronKernels] = MappingProxyType({}),
    opponents: Opponents | None = None,
    members: Mapping[str, Member] = MappingProxyType({}),
) -> tuple[FusedRollout | None, str | None]:
    """A rollout in one launch, or None with the reason why there is none.

    Args:
        rollout: Where it is stored.
        sampler: Of the environment.
        unfused_reasons: Policy -> why ``PerceptronKernels`` do not compute it, see ``perceptron.why_not_fused``.
        kernels: Policy -> its kernels; None: torch.
        tile: Of a block; None chooses one.
        actors: Policy with a central critic -> what acts for it, see ``acting_kernels``; it computes no values.
        opponents: Of some of the environments; None: there are none.
        members: Name of a policy -> which policy it is a member of; without it a policy of its own.
    """
    if reason := why_not_fused(rollout, {**unfused_reasons, **dict.fromkeys(actors)}):
        return None, reason
    if opponents is not None and (
        reason := "opponents beside a central critic" if actors else opponents.why_not_fused()
    ):
        return None, reason
    populations: dict[str, list[PerceptronKernels]] = {}
    for name, kernel in {**kernels, **actors}.items():
        assert isinstance(kernel, PerceptronKernels)
        populations.setdefault(members[name].policy if name in members else name, []).append(kernel)
    if any(len(population) > 1 for population in populations.values()):
        if actors:
            return None, "a population beside a central critic"
        if any(len(population) > 1 and _values_later(population[0]) for population in populations.values()):
            return None, "a population whose actor and critic share no layers"
    own = [population[0] for population in populations.values()]
    env = rollout.env
    backend, cores = env.functions.backend, env.functions.backend.tensor_cores
    assert cores is not None
    if tile is None:
        threads = backend.default_threads_per_env(env.num_agents)
        if threads > 32 and threads < env.num_agents:  # measured: several launches a step are faster then
            return None, "more agents in an environment than threads in a group"
        tile = choose_tile(env.layout, [kernel.perceptron for kernel in own], env.num_envs, cores, threads)
    if tile is None:
        return None, "networks too large for shared memory"
    try:
        return FusedRollout(rollout, sampler, list(populations.values()), tile, opponents), None
    except KernelCompileError as error:  # macros of a game's source may have names of the network's
        return None, f"one kernel of game and networks does not compile: {str(error).splitlines()[1].strip()}"


def _values_later(kernel: PerceptronKernels) -> bool:
    """Whether actor and critic have a trunk each, so that values are computed after the rollout."""
    return kernel.perceptron.has_critic and kernel.perceptron.towers == 2


def rollout_program(
    env: VecEnv, tile: RolloutTile, squash: Squash = "clip", *, ranges: RangeKind | None = None
) -> Program:
    """The program of rollout.cu for the environments of ``env`` and tiles that fit on its device; see ``Sampler``."""
    cores = env.functions.backend.tensor_cores
    assert cores is not None
    build = BuildOptions(env.build.initial_fields, env.build.end_on_nonfinite, sampled=True, squash=squash)
    of_multiprocessor = -(-env.num_envs // (tile.envs * cores.multiprocessors))
    return env.functions.compile(
        tile.source(build, cores, min(tile.blocks(cores), of_multiprocessor), ranges),
        "rollout.cu",
        kernels=rollout_kernels(env.layout, build, len(tile.perceptrons), ranges),
    )


class MemberTensors:
    """Weights and statistics of a population's members, one after the other, as one launch reads them.

    Attributes:
        first: Those of the first member by name; None: the network has no such statistics.
        strides: Elements from one member's parameters, and from its statistics, to those of the next.

    Args:
        kernels: Of the members; of one alone its own tensors are read.
    """

    def __init__(self, kernels: Sequence[PerceptronKernels]) -> None:
        self.first: dict[str, torch.Tensor | None] = dict(kernels[0].common)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        given = [(name, tensor) for name, tensor in self.first.items() if tensor is not None]
        widths = {dtype: max((x.numel() for _, x in given if x.dtype == dtype), default=0) for dtype in DTYPES}
        self.strides = [row_width(widths[dtype], dtype) for dtype in DTYPES]
        if len(kernels) == 1:
            return
        for name, tensor in given:
            stride = self.strides[DTYPES.index(tensor.dtype)]
            rows = tensor.new_zeros((len(kernels), stride))[:, : tensor.numel()]
            self.first[name] = rows[0].view(tensor.shape)
            self._copies += [
                (row.view(tensor.shape), own)
                for row, kernel in zip(rows, kernels, strict=True)
                if (own := kernel.common[name]) is not None
            ]

    def copy(self) -> None:
        """Take the members' present tensors."""
        for row, own in self._copies:
            row.copy_(own)


class FusedRollout:
    """All steps of a rollout by one launch, and the values of row T.

    Where actor and critic have a trunk each, the values of all rows are one more launch. Those of central critics are
    the caller's.

    Args:
        rollout: Where it is stored.
        sampler: Of the environment.
        populations: Of each policy the kernels of its members, in the order of ``members_of``.
        tile: Of a block.
        opponents: Of some of the environments, without populations; None: there are none.
    """

    def __init__(
        self,
        rollout: Rollout,
        sampler: Sampler,
        populations: Sequence[Sequence[PerceptronKernels]],
        tile: RolloutTile,
        opponents: Opponents | None = None,
    ) -> None:
        self.rollout, self.tile = rollout, tile
        self.kernels = [kernel for population in populations for kernel in population]
        self._members = [MemberTensors(population) for population in populations]
        env, threads, cells = rollout.env, 32 * tile.tile.warps, math.prod(map(len, populations))
        kind: RangeKind | None = "opponents" if opponents is not None else "populations" if cells > 1 else None
        program = rollout_program(env, tile, sampler.squash, ranges=kind)
        blocks, of_ranges = -(-env.num_envs // tile.envs), dict[str, Any]()
        if kind is not None:  # a block has environments of one range
            first, size = 0, env.num_envs // cells
            if opponents is not None:
                first, size = opponents.ranges.first, opponents.ranges.size
            before, each = -(-first // tile.envs), -(-size // tile.envs)
            blocks = before + (env.num_envs - first) // size * each
            of_ranges = {"first_range": first, "range_size": size}
            of_ranges |= {"blocks_before_ranges": before, "blocks_per_range": each}
        if opponents is not None:
            for k, own in enumerate(self.kernels):
                given = opponents.rollout_tensors(own.policy.view.name)
                of_ranges |= {f"opponent_{name}_{k}": value for name, value in given.items()}
        elif kind == "populations":
            for k, (population, tensors) in enumerate(zip(populations, self._members, strict=True)):
                cells //= len(population)
                of_ranges |= {f"members_{k}": len(population), f"ranges_each_{k}": cells}
                of_ranges |= {f"member_{n}_{k}": value for n, value in zip(STRIDES, tensors.strides, strict=True)}
        sizes = torch.zeros(2, dtype=torch.int64, device=env.device)
        program.launch("rollout_layout", 1, out=sizes)
        scratch_bytes, self.shared_bytes = sizes.tolist()
        data, action = rollout, env.layout.action
        self._launch = env.prepare(
            program,
            "rollout",
            LaunchShape(blocks * threads, threads_per_block=threads, shared_bytes=self.shared_bytes),
            **{f"{name}_{k}": tensor for k, own in enumerate(self._members) for name, tensor in own.first.items()},
            obs=data.obs,
            active=data.active,
            **({"acting": data.acting} if env.layout.tracks_acting else {}),
            action_mask=data.action_mask,
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
            **of_ranges,
        )
        # Of the policies whose actor and critic have a trunk each.
        self._values = [
            (own.policy.view, own.forward(num_steps=len(data.values))) for own in self.kernels if _values_later(own)
        ]

    def applies(self) -> bool:
        """Whether neither policies nor environment were changed since."""
        return self.rollout.env.why_not_fused() is None and all(is_plain(own.policy) for own in self.kernels)

    def __call__(self) -> None:
        """Collect a rollout, as ``Rollout.collect`` and ``Forward.finish`` do, but for values of central critics."""
        data = self.rollout
        for members in self._members:
            members.copy()
        data.env.launch(self._launch, "rollout")
        for view, forward in self._values:
            obs = data.obs.flatten(0, 2)[(slice(None), *view.obs_slice)]
            forward(obs=obs, action_mask=None, outputs=None, values=data.values)
