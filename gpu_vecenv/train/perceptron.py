"""The default network on a GPU's tensor cores: PPO's gradients of a minibatch in one launch, and the forward pass.

``cuda/learner/perceptron.cuh`` is compiled for one network and one precision. Networks that do not fit are computed
layer by layer, see ``layerwise.py``, those that are not the default one by torch; ``why_not_fused`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_vecenv.compile.backends import LaunchShape, TensorCores
from gpu_vecenv.compile.engine_kernels import squash_source
from gpu_vecenv.compile.function_manager import Launch, Program
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.encoders import EncodedActorCritic
from gpu_vecenv.train.kept_tensors import FlatTensors
from gpu_vecenv.train.layers import has_hooks
from gpu_vecenv.train.learner_kernels import LossSettings, loss_arguments, loss_values
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.normalizers import OBS_CLIP
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.rollout_storage import Rollout

METRICS = 5  # of ppo.loss
MAX_PARTS_BYTES = 256 << 20  # of the blocks' partial sums
OBS_DTYPES = {torch.float32: "float", torch.uint8: "u8"}
STRUCTS: dict[Precision, str] = {"float32": "Float32", "tf32": "Tf32", "bfloat16": "Bfloat16"}  # of tensor_core.cuh
WORD_BYTES: dict[Precision, int] = {"float32": 4, "tf32": 4, "bfloat16": 2}
TILE_WORDS: dict[Precision, int] = {"tf32": 8, "bfloat16": 4}  # of a thread, of a tile of 16 x 16
REGISTERS, MAX_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
# Of a thread, beside sums and outputs of a layer: addresses, factors.
OTHER_REGISTERS: dict[Precision, int] = {"float32": 60, "tf32": 44, "bfloat16": 44}


@dataclass(frozen=True)
class TileShape:
    """Rows that some warps compute at a time, and their grid over the rows and the columns of a layer.

    A block of the gradients may have several such tiles, which have the weights in common.
    """

    rows: int
    row_warps: int
    column_warps: int
    tiles: int = 1

    @property
    def tile_warps(self) -> int:
        """Warps of a tile."""
        return self.row_warps * self.column_warps

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.tiles * self.tile_warps


# In the order of preference: the first of which a multiprocessor holds enough warps is taken, else that with the most.
# Where a warp has all columns of its rows, it waits for no other up to the weights' gradients.
GRADIENT_TILES = (
    TileShape(64, 4, 1),
    TileShape(64, 4, 1, tiles=2),
    TileShape(128, 8, 1),
    TileShape(32, 2, 2),
    TileShape(64, 2, 4),
    TileShape(32, 2, 4),
    TileShape(32, 1, 16),
)
FORWARD_TILES = (TileShape(128, 8, 1), TileShape(64, 4, 1), TileShape(32, 2, 1), TileShape(32, 1, 4))
ENOUGH_WARPS = 8


def _units(columns: int) -> int:
    return -(-columns // 16)


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class Perceptron:
    """The constants of one network, of its inputs and outputs, for the kernels."""

    agents: tuple[int, ...]  # of the game's agents, in ascending order
    num_agents: int  # of the game
    agent_ids: bool  # inputs are also which of the policy's agents a row is of
    has_critic: bool  # False: what has indices of a critic's is never read
    sizes: tuple[int, ...]  # inputs of each layer, the head included
    actor_outputs: int
    log_stds: int
    squash: Squash
    has_choices: bool  # discrete actions
    shared_trunk: bool
    relu: bool
    precision: Precision
    obs_type: str
    obs_scale: float
    normalize_obs: bool
    normalize_returns: bool
    indices: dict[str, int]  # parameter -> its first element in the flat tensor of all
    num_parameters: int

    @property
    def obs_inputs(self) -> int:
        """Inputs that are observations."""
        return self.sizes[0] - self.agent_ids * len(self.agents)

    @property
    def towers(self) -> int:
        """Trunks, each with a head."""
        return 1 if self.shared_trunk else 2

    @property
    def head_outputs(self) -> int:
        """Outputs of the first tower."""
        return self.actor_outputs + self.shared_trunk

    @property
    def outputs(self) -> int:
        """Parameters of the distribution."""
        return self.actor_outputs + self.log_stds

    def _layers(self, tower: int, kind: str) -> list[int]:
        hidden = len(self.sizes) - 1
        trunk, head = (("trunk", "actor"), ("critic_trunk", "critic"))[tower]
        return [*(self.indices[f"{trunk}.{2 * k}.{kind}"] for k in range(hidden)), self.indices[f"{head}.{kind}"]]

    def _chained(self, shape: TileShape) -> bool:
        """Whether a warp has a layer's outputs in registers, and as a rule nowhere else."""
        return shape.column_warps == 1 and self.precision != "float32"

    def _activation_bytes(self, rows: int, columns: int) -> int:
        if self.precision == "bfloat16":
            return 2 * rows * (columns + 8)
        return 4 * columns * (rows + 4)

    def shared_bytes(self, shape: TileShape, forward: bool, result_rows: int | None = None) -> int:
        """Shared memory of a block of the forward pass, or of the gradients; see ``source`` for ``result_rows``."""
        word, rows, outputs = WORD_BYTES[self.precision], shape.rows, [*self.sizes[1:], self.head_outputs]
        columns = [padded(self.sizes[0], 32 // word), *(16 * _units(size) for size in self.sizes[1:])]
        weights = sum(16 * _units(n) * (word * k + 16 + 4) for k, n in zip(columns, outputs, strict=True))
        weights += padded(8 * self.obs_inputs, 16) if self.normalize_obs else 0
        first = columns[:1] if result_rows is None else []
        kept = first + ([] if forward and self._chained(shape) else columns[1:])
        activations = sum(self._activation_bytes(rows, k) for k in kept)
        indices = 0 if result_rows is not None else 8 if forward else 16
        results = 4 * ((self.outputs + 1) | 1) * (rows if result_rows is None else result_rows)
        choice_weights = 0 if forward or not self.has_choices else padded(4 * rows * (self.actor_outputs | 1), 16)
        deltas = 0 if forward else self._activation_bytes(rows, 16 * _units(self.head_outputs))
        return weights + shape.tiles * (activations + indices * rows + results + choice_weights + deltas)

    def registers(self, shape: TileShape, forward: bool) -> int:
        """Registers of a thread, an estimate."""
        sums, warps, row_tiles = 0, shape.tile_warps, shape.rows // 16 // shape.row_warps
        for inputs, outputs in zip(self.sizes, [*self.sizes[1:], self.head_outputs], strict=True):
            m, n = _units(outputs), _units(inputs)
            grids = [w for w in range(1, warps + 1) if warps % w == 0]
            sums += 8 * min(-(-m // w) * -(-n // (warps // w)) for w in grids)
        product = 8 * max(-(-_units(n) // shape.column_warps) for n in (*self.sizes[1:], self.head_outputs))
        chain = max(map(_units, self.sizes[1:])) * TILE_WORDS[self.precision] if self._chained(shape) else 0
        return row_tiles * (product + chain) + OTHER_REGISTERS[self.precision] + (0 if forward else sums)

    def blocks(self, shape: TileShape, cores: TensorCores, forward: bool) -> int:
        """Blocks that a multiprocessor holds at a time; 0 if none fits."""
        size, registers = self.shared_bytes(shape, forward), self.registers(shape, forward)
        if size > cores.block_shared_bytes or registers > MAX_REGISTERS:
            return 0
        by_registers = REGISTERS // (32 * shape.warps * registers)
        return min(cores.shared_bytes // (size + cores.reserved_shared_bytes), by_registers)

    def choose_tile(self, cores: TensorCores, forward: bool) -> TileShape | None:
        """The shape of a block's tile; None if none fits."""
        shapes = FORWARD_TILES if forward else GRADIENT_TILES
        warps = {shape: shape.warps * self.blocks(shape, cores, forward) for shape in shapes}
        best = max(shapes, key=lambda shape: min(warps[shape], ENOUGH_WARPS))
        return best if warps[best] else None

    def source(
        self, shape: TileShape, blocks: int, forward: bool, shared_first: int = 0, result_rows: int | None = None
    ) -> str:
        """The constants in C++.

        Args:
            shape: Of a block's tiles.
            blocks: That a multiprocessor should hold.
            forward: Whether there are no gradients.
            shared_first: The first of the network's bytes in shared memory.
            result_rows: Rows of results in shared memory, where the inputs are read from the observations themselves;
                None: as many as the tile has, whose inputs are in shared memory.
        """
        tile = {
            "ROWS": shape.rows,
            "ROW_WARPS": shape.row_warps,
            "COLUMN_WARPS": shape.column_warps,
            "TILES_OF_BLOCK": shape.tiles,
            "MIN_BLOCKS": blocks,
            "SHARED_FIRST": shared_first,
            "SHARED_BYTES": self.shared_bytes(shape, forward, result_rows),
            "RESULT_ROWS": shape.rows if result_rows is None else result_rows,
            "FORWARD_ONLY": int(forward),
            "READS_OBS": int(result_rows is not None),
        }
        return f"#define PRECISION {STRUCTS[self.precision]}\n" + self.network_source(tile)

    def network_source(self, others: Mapping[str, int]) -> str:
        """The constants of the network, and others, in C++."""

        def table(kind: str) -> str:
            return "}, {".join(", ".join(map(str, self._layers(k, kind))) for k in range(self.towers))

        layers = len(self.sizes)
        functions = (  # which nvcc compiles for the device, unlike constant arrays
            f"HD constexpr int layer_inputs(int layer) {{ constexpr int x[] = {{{', '.join(map(str, self.sizes))}}}; "
            "return x[layer]; }",
            *(
                f"HD constexpr i64 first_{kind}(int tower, int layer) {{ constexpr i64 x[][{layers}] = "
                f"{{{{{table(kind)}}}}}; return x[tower][layer]; }}"
                for kind in ("weight", "bias")
            ),
        )
        constants: dict[str, dict[str, object]] = {
            "int": {
                **others,
                "OWN_AGENTS": len(self.agents),
                "AGENT_IDS": self.sizes[0] - self.obs_inputs,  # inputs
                "TOWERS": self.towers,
                "HIDDEN": layers - 1,
                "ACTOR_OUTPUTS": self.actor_outputs,
                "LOG_STDS": self.log_stds,
            },
            "bool": {
                "RELU": int(self.relu),
                "HAS_CHOICES": int(self.has_choices),
                "NORMALIZE_OBS": int(self.normalize_obs),
                "NORMALIZE_RETURNS": int(self.normalize_returns),
            },
            "float": {"OBS_CLIP": OBS_CLIP, "OBS_SCALE": self.obs_scale},
            "i64": {
                "NUM_PARAMETERS": self.num_parameters,
                "LOG_STD_INDEX": self.indices.get("log_std", 0),
                "VALUE_WEIGHTS": self.indices["critic.weight"],
                "VALUE_BIAS": self.indices["critic.bias"],
            },
        }
        lines = [
            f"constexpr {kind} {name} = {value};" for kind, own in constants.items() for name, value in own.items()
        ]
        opening = ["namespace perceptron {", f"typedef {self.obs_type} Observation;"]
        return "\n".join([*opening, *lines, *functions, *self.agents_source(), "}"]) + "\n"

    def agents_source(self) -> tuple[str, str]:
        """Functions in C++: which of the game's agents the policy's k-th is, and the reverse."""
        first, last = self.agents[0], self.agents[-1]
        own_agent, position_of = f"return {first} + k;", f"return agent - {first};"
        if last - first >= len(self.agents):  # they are not consecutive
            positions = {agent: k for k, agent in enumerate(self.agents)}
            table = [positions.get(agent, -1) for agent in range(self.num_agents)]
            own_agent = f"constexpr int x[] = {{{', '.join(map(str, self.agents))}}}; return x[k];"
            position_of = f"constexpr int x[] = {{{', '.join(map(str, table))}}}; return x[agent];"
        return (
            f"HD constexpr int own_agent(int k) {{ {own_agent} }}",
            f"HD constexpr int position_of(int agent) {{ {position_of} }}",
        )


def perceptron_of(policy: Policy, obs: torch.Tensor, precision: Precision) -> Perceptron:
    """The constants of a policy whose network is an ActorCritic, or a Tower, for observations like ``obs``."""
    network, indices, offset = policy.network, dict[str, int](), 0
    assert isinstance(network, ActorCritic | Tower)
    for name, parameter in network.named_parameters():
        indices[name] = offset
        offset += parameter.numel()
    if isinstance(network, Tower):
        indices = {name.replace("head", "actor"): index for name, index in indices.items()}
        indices |= {f"critic{name.removeprefix('actor')}": k for name, k in indices.items() if name.startswith("actor")}
        indices |= {f"critic_{name}": k for name, k in indices.items() if name.startswith("trunk")}
        head, shared_trunk = network.head, False
    else:
        head, shared_trunk = network.actor, network.critic_trunk is None
    return Perceptron(
        policy.view.agent_numbers,
        len(policy.view.positions()),
        policy.agent_ids,
        isinstance(network, ActorCritic),
        network.sizes,
        head.out_features,
        0 if network.log_std is None else network.log_std.numel(),
        policy.squash,
        not policy.view.continuous,
        shared_trunk,
        isinstance(network.trunk[1], nn.ReLU),
        precision,
        OBS_DTYPES[obs.dtype],
        policy.obs_scale,
        policy.obs_normalizer is not None,
        policy.return_normalizer is not None,
        indices,
        offset,
    )


def is_plain(policy: Policy) -> bool:
    """Whether neither the policy nor its network, an ActorCritic or a Tower, was changed or has hooks."""
    network = policy.network
    return isinstance(network, ActorCritic | Tower) and network.is_plain() and not has_hooks(policy)


def tensor_cores_of(rollout: Rollout) -> TensorCores:
    """Of the device, which must have some."""
    cores = rollout.env.functions.backend.tensor_cores
    assert cores is not None
    return cores


def why_torch(policy: Policy, rollout: Rollout) -> str | None:
    """Why no kernels compute a policy's gradients and forward passes, whatever its size; None if kernels may."""
    reason = _why_no_kernels(policy, rollout)
    if reason is None and policy.critic is not None:
        reason = "a central critic"
    return reason or _why_not_default(policy, rollout)


def _why_no_kernels(policy: Policy, rollout: Rollout) -> str | None:
    backend = rollout.env.functions.backend
    if backend.tensor_cores is None and backend.device.type != "cpu":
        return "no tensor cores"
    return "a recurrent network" if policy.recurrent_state_size else None


def _why_not_default(policy: Policy, rollout: Rollout) -> str | None:
    """Why kernels of the default network do not compute this one, which is not recurrent."""
    network = policy.network
    if isinstance(network, EncodedActorCritic):
        return f"network {network.kind!r}"
    if not isinstance(network, ActorCritic | Tower) or not is_plain(policy):
        return "not the default network"
    if len(network.sizes) < 2:
        return "no hidden layers"
    if not all(p.requires_grad and p.device == rollout.rewards.device for p in network.parameters()):
        return "weights that are frozen or on another device"
    obs = rollout.flat_obs(policy.view)
    if obs.dtype not in OBS_DTYPES:
        return f"{str(obs.dtype).removeprefix('torch.')} observations"
    if not obs[0].is_contiguous():
        return "observations that are not contiguous"
    return None


def why_not_fused(policy: Policy, rollout: Rollout, precision: Precision) -> str | None:
    """Why ``PerceptronKernels`` do not compute a policy, in a few words; None if they do."""
    if reason := why_torch(policy, rollout):
        return reason
    cores = rollout.env.functions.backend.tensor_cores
    if cores is None:
        return "no tensor cores"
    perceptron = perceptron_of(policy, rollout.flat_obs(policy.view), precision)
    fits = [perceptron.choose_tile(cores, forward) for forward in (False, True)]
    return None if all(fits) else "a network too large for shared memory"


def acting_kernels(policy: Policy, rollout: Rollout, precision: Precision) -> PerceptronKernels | None:
    """Kernels of the actor of a policy with a central critic, for a rollout in one launch; None if there are none.

    Not in bfloat16: torch, which computes the updates, rounds other numbers to it than the kernels do, and probability
    ratios would show it.
    """
    if policy.critic is None or rollout.env.functions.backend.tensor_cores is None or precision == "bfloat16":
        return None
    if _why_no_kernels(policy, rollout) or _why_not_default(policy, rollout):
        return None
    return PerceptronKernels(policy, rollout, precision)


GRADIENT_ARRAYS = (
    Array("parameters", f32, const=True),
    Array("obs", None, const=True, strided=True),
    Scalar("obs_stride", i64),  # elements from one agent's observation to the next agent's
    Array("obs_mean", f64, const=True, optional=True),
    Array("obs_var", f64, const=True, optional=True),
    Array("return_mean", f64, const=True, optional=True),
    Array("return_var", f64, const=True, optional=True),
)
FORWARD = KernelSignature(
    "perceptron_forward",
    (
        *GRADIENT_ARRAYS,
        Array("action_mask", boolean, const=True, optional=True),
        Scalar("choices", i64),  # of an agent in the mask
        Array("agents", i32, const=True),  # of the policy
        Array("columns", i32, const=True),  # of each parameter in a row of outputs
        Array("outputs", f32, optional=True),
        Scalar("masked_logit", f32),  # in the place of those that the mask forbids
        Array("values", f32, optional=True),
        Scalar("rows", i64),  # of a range
        Array("ranges", i64, const=True, shape=("num_ranges",)),  # numbers of those that are computed
        Scalar("num_ranges", i32),
        Scalar("range_stride", i64),  # elements from one range's parameters to the next one's
        Scalar("statistics_stride", i64),
    ),
)


def gradient_signature(layout: GameLayout) -> KernelSignature:
    """The kernel of the gradients, for a game's kind of actions."""
    return KernelSignature(
        "perceptron_gradients",
        (
            *GRADIENT_ARRAYS,
            *loss_arguments(layout),
            Array("moments", f64, const=True, shape=(4,)),
            Array("indices", i64, const=True, shape=("rows",)),
            Array("parts", f32),
            Scalar("rows", i64),
            Array("skip_update", f32, const=True, optional=True, shape=()),
        ),
    )


@dataclass(frozen=True)
class WeightRanges:
    """Contiguous ranges of environments, each with weights of its own, for a forward pass in one launch.

    Attributes:
        numbers: Of the ranges that are computed, from 0 on.
        range_stride: Float32 elements from the parameters of one range to those of the next.
        statistics_stride: Float64 elements between their statistics.
    """

    numbers: Sequence[int]
    range_stride: int
    statistics_stride: int


ONE_RANGE = WeightRanges([0], 0, 0)


@dataclass(frozen=True)
class Compiled:
    """A kernel that is ready to be launched."""

    program: Program
    shape: LaunchShape
    parts: int  # of the rows, each with sums of its own
    arguments: dict[str, Any]  # beside those that all kernels have


class PerceptronKernels:
    """The kernels of one policy: gradients of minibatches, and the forward pass of a step's observations.

    Makes the network's parameters views of one tensor.

    Args:
        policy: Its network is an ActorCritic for which ``why_not_fused`` is None, or a Tower, see ``acting_kernels``.
        rollout: The samples.
        precision: Of the matrix products.
        flat: Where the parameters lie, (n,) float32; None allocates.
    """

    def __init__(
        self, policy: Policy, rollout: Rollout, precision: Precision, flat: torch.Tensor | None = None
    ) -> None:
        self.policy, self.rollout = policy, rollout
        self.parameters = FlatTensors(list(policy.network.parameters()), flat)
        self.perceptron = perceptron_of(policy, rollout.flat_obs(policy.view), precision)
        normalizers = policy.obs_normalizer, policy.return_normalizer
        statistics = [(None, None) if n is None else (n.mean, n.var) for n in normalizers]
        self.common = {"parameters": self.parameters.flat, "obs_mean": statistics[0][0], "obs_var": statistics[0][1]}
        self.common |= {"return_mean": statistics[1][0], "return_var": statistics[1][1]}

    def compile(
        self, kernel: KernelSignature, rows: int, tile: TileShape | None, most_parts: int, ranges: int = 1
    ) -> Compiled:
        """A kernel for so many rows in each range, in tiles of this shape, at most ``most_parts`` of a range."""
        forward, env, cores = kernel is FORWARD, self.rollout.env, tensor_cores_of(self.rollout)
        tile = tile or self.perceptron.choose_tile(cores, forward)
        assert tile is not None
        resident = self.perceptron.blocks(tile, cores, forward)
        program = env.functions.compile(
            cuda_folder() / f"learner/{kernel.name}.cu",
            kernels=[kernel],
            game=env.game,
            constants=squash_source(self.perceptron.squash) + self.perceptron.source(tile, resident, forward),
        )
        towers, threads = self.perceptron.towers, 32 * tile.warps
        most_blocks = min(cores.multiprocessors * resident // (towers * ranges), most_parts // tile.tiles)
        blocks = max(1, min(-(-rows // (tile.rows * tile.tiles)), most_blocks))
        size = self.perceptron.shared_bytes(tile, forward)
        shape = LaunchShape(ranges * blocks * towers * threads, threads_per_block=threads, shared_bytes=size)
        return Compiled(program, shape, blocks * tile.tiles, {})

    def begin_rollout(self) -> None:
        """Nothing: each launch reads the weights."""

    def gradients(
        self, rows: int, settings: LossSettings, tile: TileShape | None = None
    ) -> tuple[Launch, torch.Tensor]:
        """A launch of the gradients of a minibatch, and its output, partial sums.

        The launch takes the sample ``indices`` (rows,) int64 and the ``moments`` (4,) float64 of their advantages, see
        ``LossKernel``. The sums over the first axis of the output (k, n + 5) are the gradients of all parameters and
        the metrics of ``ppo.loss``. k depends on ``rows``, the network and the GPU.

        Args:
            rows: Samples of a minibatch.
            settings: Of the loss.
            tile: Shape of a block's tile; None chooses one.
        """
        data = self.rollout
        columns = self.perceptron.num_parameters + METRICS
        signature = gradient_signature(data.env.game.layout)
        compiled = self.compile(signature, rows, tile, MAX_PARTS_BYTES // (4 * columns))
        parts = torch.zeros((compiled.parts, columns), device=data.rewards.device)
        obs = data.flat_obs(self.policy.view)
        launch = compiled.program.prepare(
            "perceptron_gradients",
            compiled.shape,
            **self.common,
            **compiled.arguments,
            obs=obs,
            obs_stride=obs.stride(0),
            **loss_values(data, settings),
            parts=parts,
            rows=rows,
            skip_update=settings.skip_update,
        )
        return launch, parts

    def forward(
        self,
        tile: TileShape | None = None,
        num_steps: int = 1,
        num_envs: int | None = None,
        ranges: WeightRanges = ONE_RANGE,
    ) -> Launch:
        """A launch of the forward pass of the observations of one step, or of several.

        The launch takes ``obs`` (E * A, *obs_shape), ``action_mask`` (E, A, n) bool or None, and where to write the
        ``outputs``, (E, A, sampler.num_parameters) float32, and ``values`` (E, A) float32; one of them may be None. It
        writes the rows and columns of the policy's agents.

        Args:
            tile: Shape of a block's tile; None chooses one.
            num_steps: Of which the tensors have rows: with n, all have n * E rows of environments.
            num_envs: E; None: all of the rollout's.
            ranges: With others than one, E is that of a range, and the tensors have rows of all from number 0 on.
        """
        view, env = self.policy.view, self.rollout.env
        num_envs, columns = env.num_envs if num_envs is None else num_envs, view.parameter_columns
        rows = num_steps * num_envs * view.num_agents
        columns = torch.arange(columns.stop) if isinstance(columns, slice) else columns
        device = self.rollout.rewards.device
        compiled = self.compile(FORWARD, rows, tile, rows, len(ranges.numbers))
        return compiled.program.prepare(
            "perceptron_forward",
            compiled.shape,
            **self.common,
            **compiled.arguments,
            obs_stride=self.rollout.flat_obs(view).stride(0),
            choices=env.buffers_layout.num_choices or 0,
            agents=torch.tensor(view.agent_numbers, dtype=torch.int32, device=device),
            columns=columns.to(device, torch.int32),
            masked_logit=torch.finfo(torch.float32).min,
            rows=rows,
            ranges=torch.tensor(ranges.numbers, device=device),
            num_ranges=len(ranges.numbers),
            range_stride=ranges.range_stride,
            statistics_stride=ranges.statistics_stride,
        )
