"""Shapes of the blocks of ``cuda/learner/rollout.cu``, the source for a shape, and which one a game is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gpu_vecenv.compile.backends import TensorCores, group_constants
from gpu_vecenv.compile.codegen import inline_includes, stepping_source
from gpu_vecenv.compile.engine_kernels import BuildOptions
from gpu_vecenv.declare.field import f32, f64
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.perceptron import REGISTERS, Perceptron, TileShape

# In the order of preference, as measured on an H200: the first with which a launch runs all environments at once is
# taken, else that with which it runs the most; of groups of several warps, the most threads of groups.
TILES = (TileShape(64, 4, 1), TileShape(32, 2, 2), TileShape(16, 1, 4), TileShape(64, 2, 2), TileShape(128, 8, 1))
MAX_GROUPS = 8  # of several warps in a block; barriers are numbered up to 15
MAX_THREADS = 1024  # of a block
STEP_REGISTERS = 40  # of a thread for its environment, beside those of the network; an estimate
LARGE_GROUP_REGISTERS = 128  # of a thread of a group of several warps, at most
SCRATCH_BYTES = 32  # of an agent, of the game's working memory; an estimate
STATIC_BYTES = 1024  # of shared memory that the engine keeps for variables of kernels
MAX_BLOCKS = 8  # of a multiprocessor; with more the registers are too few
TENSORS = {"parameters": f32, "obs_mean": f64, "obs_var": f64, "return_mean": f64, "return_var": f64}  # of a policy
RangeKind = Literal["opponents", "populations"]  # what ranges of environments have networks of their own for
STRIDES = ("stride", "statistics_stride")  # from one range's or member's tensors to those of the next, in elements


@dataclass(frozen=True)
class RolloutTile:
    """A block's tile of rows, of each policy, and how its threads step the environments of these rows.

    Environments of up to 32 agents are stepped by a part of a warp each, and the tile has the rows of all of a block's
    agents. Those of more agents are stepped by a group of several warps each, whose warps take turns at the tiles of
    its agents' rows.

    Args:
        tile: Rows and warps of a block; of groups of several warps the rows that they compute at a time.
        layout: The game.
        perceptrons: The networks of its policies.
        groups: Of several warps in a block; 0: the environments have up to 32 agents.
        stages_obs: With groups of several warps, whether their observations are in shared memory if they fit; else
            forward passes read them from device memory.
        most_registers: Of a thread of groups of several warps.
    """

    tile: TileShape
    layout: GameLayout
    perceptrons: tuple[Perceptron, ...]
    groups: int = 0
    stages_obs: bool = False
    most_registers: int = LARGE_GROUP_REGISTERS

    def __str__(self) -> str:
        if not self.groups:
            return str(self.tile)
        obs = f"observations in {'shared' if self.stages_obs else 'device'} memory"
        return f"{self.groups} x {self.threads_per_env} threads, {obs}, up to {self.most_registers} registers"

    @property
    def threads_per_env(self) -> int:
        """Agents, rounded up to a power of two; of groups of several warps all of their threads."""
        if self.groups:
            return 32 * self.tile.warps // self.groups
        return 1 << (self.layout.num_agents - 1).bit_length()

    @property
    def envs(self) -> int:
        """Environments of a block; 0 if the rows or the threads of one are too many.

        All warps have as many, if there are enough: a warp whose groups are not all at work takes longer.
        """
        if self.groups:
            return self.groups
        owners = self.tile.row_warps if self.tile.column_warps == 1 else 1  # of rows, with environments of their own
        most_agents: int = max(len(p.agents) for p in self.perceptrons)
        warps = self.tile.warps // owners
        each = min(self.tile.rows // owners // most_agents, warps * (32 // self.threads_per_env))
        return owners * (each if each < warps else each // warps * warps)

    def _passes(self, perceptron: Perceptron) -> int:
        """Tiles of a warp that the rows of one environment are, for groups of several warps."""
        return -(-len(perceptron.agents) * self.tile.warps // self.tile.rows)

    def _result_rows(self, perceptron: Perceptron) -> int:
        """Rows of a network's results that a block has."""
        if not self.groups:
            return self.tile.rows
        return self.groups * self._passes(perceptron) * self.tile.rows // self.tile.warps

    def _bytes_of(self, perceptron: Perceptron) -> int:
        return perceptron.shared_bytes(self.tile, forward=True, result_rows=self._result_rows(perceptron))

    @property
    def network_bytes(self) -> int:
        """Shared memory of the networks."""
        return sum(map(self._bytes_of, self.perceptrons))

    def blocks(self, cores: TensorCores) -> int:
        """Blocks that a multiprocessor holds at a time, an estimate; 0 if none fits."""
        fields = (field for field in (*self.layout.fields, *self.layout.engine_fields) if not field.shared)
        each: int = sum(field.nbytes for field in fields)
        if self.groups:
            outputs = 6 + self.layout.action.heads * self.layout.action.dtype.itemsize  # rewards, flags, actions
            each += (SCRATCH_BYTES + outputs) * self.layout.num_agents
        if self.stages_obs or not self.groups:
            each += self.layout.obs_size * self.layout.num_agents * self.layout.observation.dtype.itemsize
        static_bytes = STATIC_BYTES + 4 * len(self.layout.randomized) * self.envs
        if self.envs == 0 or self.network_bytes + static_bytes > cores.block_shared_bytes:
            return 0
        registers = STEP_REGISTERS + max(p.registers(self.tile, forward=True) for p in self.perceptrons)
        if self.groups:
            registers = min(registers, self.most_registers)
        by_registers = REGISTERS // (32 * self.tile.warps * registers)
        size = self.network_bytes + each * self.envs + cores.reserved_shared_bytes
        blocks = min(cores.shared_bytes // size, by_registers, MAX_BLOCKS)
        if self.groups > 1 or self.stages_obs:  # a block with one group and without them may need less
            return blocks
        return max(1, blocks)

    def constants(self, cores: TensorCores, resident_blocks: int) -> str:
        """The constants of the groups of threads in C++."""
        limit = cores.block_shared_bytes
        if self.groups:  # what is in shared memory must leave that of the other blocks
            limit = min(limit, cores.shared_bytes // resident_blocks - cores.reserved_shared_bytes)
        return group_constants(
            self.threads_per_env,
            self.envs,
            1 if self.groups else -(-self.envs // self.tile.warps),
            limit - self.network_bytes,
            self.network_bytes,
        )

    def source(
        self, build: BuildOptions, cores: TensorCores, resident_blocks: int, ranges: RangeKind | None = None
    ) -> str:
        """The program of rollout.cu; kernel.cuh precedes it."""
        folder, seen = cuda_folder() / "learner", set[str]()

        def include(name: str, seen: set[str]) -> str:
            return inline_includes(f'#include "{name}"', "rollout", folder, seen)

        include("kernel.cuh", seen)
        layout = self.layout
        if self.groups:
            layout = replace(layout, obs_staging_bytes=cores.block_shared_bytes if self.stages_obs else 0)
        text = self.constants(cores, resident_blocks)
        for kind in get_args(RangeKind):
            text += f"#define HAS_{kind.upper()} {int(ranges == kind)}\n"
        text += "#define HAS_RANGES (HAS_OPPONENTS || HAS_POPULATIONS)\n"
        text += (
            stepping_source(layout, build, seen) + include("tensor_core.cuh", seen) + include("normalizer.cuh", seen)
        )
        names, first, first_pass = [f"perceptron_{k}" for k in range(len(self.perceptrons))], 0, 0
        for k, (name, perceptron) in enumerate(zip(names, self.perceptrons, strict=True)):
            tensors = ", ".join(f"args.{tensor}_{k}" for tensor in TENSORS)
            rows = self._result_rows(perceptron)
            text += f"#define perceptron {name}\n{perceptron.source(self.tile, resident_blocks, True, first, rows)}"
            text += f"namespace perceptron {{ constexpr int FIRST_PASS = {first_pass}; }}\n"
            others = ", ".join(f"args.opponent_{tensor}_{k}" for tensor in TENSORS)
            strides, of_members = (
                ", ".join(f"args.{whose}_{name}_{k}" for name in STRIDES) for whose in ("opponent", "member")
            )
            macros = {
                "POLICY_TENSORS": tensors,
                "POLICY_OPPONENTS": f"{{{{{others}}}, {strides}}}, args.opponent_plays_{k}",
                "POLICY_MEMBERS": f"args.members_{k}, args.ranges_each_{k}",
                "POLICY_MEMBER_STRIDES": of_members,
            }
            text += "".join(f"#define {name} {value}\n" for name, value in macros.items())
            text += include("rollout_policy.cuh", set(seen))
            text += "".join(f"#undef {name}\n" for name in (*macros, "perceptron"))
            first += self._bytes_of(perceptron)
            first_pass += self._passes(perceptron) if self.groups else 0
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


def rollout_tiles(
    layout: GameLayout, perceptrons: Sequence[Perceptron], default_threads_per_env: int
) -> list[RolloutTile]:
    """The tiles of blocks that are tried, in the order of preference.

    Args:
        layout: The game.
        perceptrons: The networks of its policies.
        default_threads_per_env: With which the engine steps an environment.
    """
    networks = tuple(perceptrons)
    if layout.num_agents <= 32:
        return [RolloutTile(tile, layout, networks) for tile in TILES]
    warps = default_threads_per_env // 32
    obs_bytes = layout.num_agents * layout.obs_size * layout.observation.dtype.itemsize
    engine_stages = obs_bytes <= layout.obs_staging_bytes
    return [
        RolloutTile(TileShape(16 * groups * own, groups * own, 1), layout, networks, groups, stages_obs)
        for own in sorted({warps, 2 * warps, max(2, warps // 2)}, key=lambda own: abs(own - warps))
        for stages_obs in (engine_stages, not engine_stages)
        for groups in range(1, MAX_GROUPS + 1)
        if 32 * groups * own <= MAX_THREADS
    ]


def choose_tile(
    layout: GameLayout,
    perceptrons: Sequence[Perceptron],
    num_envs: int,
    cores: TensorCores,
    default_threads_per_env: int,
) -> RolloutTile | None:
    """The shape of a block's tile; None if none fits."""
    tiles = rollout_tiles(layout, perceptrons, default_threads_per_env)
    envs = [min(tile.blocks(cores) * tile.envs * cores.multiprocessors, num_envs) for tile in tiles]
    threads = [at_once * tile.threads_per_env for at_once, tile in zip(envs, tiles, strict=True)]
    most = max(threads)
    return tiles[threads.index(most)] if most else None
