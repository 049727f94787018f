"""Kernels of ``cuda/learner/layerwise.cu``: their arguments, the constants of a network, and where its layers lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gpu_vecenv.compile.backends import TensorCores
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.train.learner_kernels import loss_arguments
from gpu_vecenv.train.normalizers import OBS_CLIP
from gpu_vecenv.train.perceptron import METRICS, Perceptron

BLOCK = 256  # threads per block; the same as BLOCK in layerwise.cu
LOSS_BLOCK = 128  # threads per block of the loss; the same as LOSS_BLOCK in layerwise.cu
GATHERED_ROWS = ACTIVATED_ROWS = 64  # rows of a block; the same as in layerwise.cu
LOSS_SHARED_BYTES = 48 << 10  # of the rows that a block of the loss computes at a time
PRODUCT_ROWS = 64  # of a tile of a product; the same as ROWS in layer_product.cu
MAX_PRODUCT_BLOCKS = 2  # of a multiprocessor: with more, a thread has too few registers
PACK_BYTES = 16  # to which rows are padded

ProductKind = Literal["ACTIVATIONS", "RESULTS", "GRADIENTS"]

_PARAMETERS = Array("parameters", f32, const=True)
_RETURN_SCALE = (
    Array("return_mean", f64, const=True, optional=True),
    Array("return_var", f64, const=True, optional=True),
)
_HEADS = (
    Array("actor", f32, const=True),
    Array("critic", f32, const=True, optional=True),
    _PARAMETERS,
    *_RETURN_SCALE,
    Array("indices", i64, const=True, shape=("rows",)),
)
_SUMS = (
    Array("sums", f32),
    Scalar("tile_rows", i64),
    Scalar("rows", i64),
)
STORE_WEIGHTS = KernelSignature(
    "store_weights",
    (
        _PARAMETERS,
        Array("sources", i64, const=True, shape=("elements",)),
        Array("weights", None),
        Scalar("elements", i64),
        Array("obs_mean", f64, const=True, optional=True),
        Array("obs_var", f64, const=True, optional=True),
        Array("obs_scales", f32, optional=True),
    ),
)
GATHER_INPUTS = KernelSignature(
    "gather_inputs",
    (
        Array("obs", None, const=True, strided=True),
        Scalar("obs_stride", i64),  # elements from one agent's observation to the next agent's
        Array("obs_scales", f32, const=True, optional=True),
        Array("indices", i64, const=True, shape=("rows",)),
        Array("inputs", None),
        Scalar("rows", i64),
    ),
)
ACTIVATE = KernelSignature(
    "activate",
    (Array("outputs", None), _PARAMETERS, Scalar("bias", i64), Scalar("size", i32), Scalar("rows", i64)),
)
ACTIVATION_GRADIENTS = KernelSignature(
    "activation_gradients",
    (
        Array("gradients", None),
        Array("outputs", None, const=True),
        Scalar("size", i32),
        Scalar("first_sum", i64),
        *_SUMS,
    ),
)
HEAD_OUTPUTS = KernelSignature(
    "head_outputs",
    (
        *_HEADS,
        Array("action_mask", boolean, const=True, optional=True),
        Scalar("choices", i64),  # of an agent in the mask
        Array("columns", i32, const=True),  # of each parameter in a row of outputs
        Array("outputs", f32, optional=True),
        Scalar("masked_logit", f32),
        Array("values", f32),
        Scalar("rows", i64),
    ),
)
COLLECT_GRADIENTS = KernelSignature(
    "collect_gradients",
    (
        Array("found", f32, const=True),
        Array("sources", i64, const=True, shape=("columns",)),
        Array("out", f32, shape=("columns",)),
        Scalar("first", boolean),
        Scalar("columns", i64),
    ),
)


LAYER_PRODUCT = KernelSignature(
    "layer_product",
    (
        Array("inputs", None, const=True),
        Array("weights", None, const=True),
        _PARAMETERS,
        Scalar("bias", i64),
        Array("outputs", None),
        Array("activations", None, const=True, optional=True),
        Array("sums", f32, optional=True),
        Scalar("sums_pitch", i64),
        Scalar("first_sum", i64),
        Scalar("tile_rows", i64),
        Scalar("rows", i64),
    ),
)


def layerwise_kernels(layout: GameLayout) -> list[KernelSignature]:
    """The kernels of layerwise.cu, for a game's kind of actions."""
    loss = (
        *_HEADS,
        *loss_arguments(layout),
        Array("moments", f64, const=True, shape=(4,)),
        Array("actor_gradients", None),
        Array("critic_gradients", None, optional=True),
        *_SUMS,
    )
    others = [STORE_WEIGHTS, GATHER_INPUTS, ACTIVATE, ACTIVATION_GRADIENTS, HEAD_OUTPUTS, COLLECT_GRADIENTS]
    return [*others, KernelSignature("head_loss", loss)]


def layerwise_source(perceptron: Perceptron, layers: Layers) -> str:
    """The constants of a network in C++."""
    bfloat16 = perceptron.precision == "bfloat16"
    constants: dict[str, dict[str, object]] = {
        "int": {
            "TOWERS": perceptron.towers,
            "INPUTS": perceptron.sizes[0],
            "AGENT_IDS": perceptron.sizes[0] - perceptron.obs_inputs,
            "ACTOR_OUTPUTS": perceptron.actor_outputs,
            "LOG_STDS": perceptron.log_stds,
            "LOSS_SHARED_BYTES": LOSS_SHARED_BYTES,
            "HIDDEN_SIZES": len(layers.sizes),
            "SUMS_PITCH": layers.num_sums,
            "FIRST_HEAD_SUM": layers.first_head_sum,
        },
        "bool": {
            "RELU": int(perceptron.relu),
            "APPROXIMATE_TANH": int(perceptron.precision != "float32"),
            "NORMALIZE_OBS": int(perceptron.normalize_obs),
            "NORMALIZE_RETURNS": int(perceptron.normalize_returns),
        },
        "float": {"OBS_CLIP": OBS_CLIP, "OBS_SCALE": perceptron.obs_scale},
        "i64": {
            "LOG_STD_INDEX": perceptron.indices.get("log_std", 0),
            "ACTOR_BIAS": perceptron.indices["actor.bias"],
            "VALUE_BIAS": perceptron.indices["critic.bias"],
        },
    }
    lines = [f"constexpr {kind} {name} = {value};" for kind, own in constants.items() for name, value in own.items()]
    # A function, which nvcc compiles for the device, unlike constant arrays.
    sizes = (
        f"HD constexpr int hidden_size(int k) {{ constexpr int x[] = {{{', '.join(map(str, layers.sizes))}}}; "
        "return x[k]; }"
    )
    opening = [f"#define BFLOAT16 {int(bfloat16)}", "namespace layerwise {"]
    functions = (sizes, *perceptron.agents_source())
    return "\n".join([*opening, f"typedef {perceptron.obs_type} Observation;", *lines, *functions, "}"]) + "\n"


@dataclass(frozen=True)
class Product:
    """A product of layer_product.cu, in bfloat16: its padded sizes, and what follows on it."""

    inputs: int  # columns of the weights
    outputs: int  # rows of the weights
    units: int  # columns of the product that are no padding
    kind: ProductKind
    relu: bool = False

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        rows, columns = self.outputs, self.inputs
        summed, width = (rows, columns) if self.kind == "GRADIENTS" else (columns, rows)
        size = 2 * _padded(rows, 16) * (_padded(columns, 16) + 8) + 2 * PRODUCT_ROWS * (_padded(summed, 16) + 8)
        size += (4 if self.kind == "RESULTS" else 2) * PRODUCT_ROWS * (_padded(width, 16) + 8)
        return size + 4 * _padded(width, 16)

    def blocks(self, cores: TensorCores) -> int:
        """Blocks that a multiprocessor holds at a time; 0 if none fits."""
        packs = self.inputs * 2 // PACK_BYTES
        if self.kind == "GRADIENTS" and (BLOCK % packs or packs < 8):
            return 0
        if self.shared_bytes > cores.block_shared_bytes:
            return 0
        return min(cores.shared_bytes // (self.shared_bytes + cores.reserved_shared_bytes), MAX_PRODUCT_BLOCKS)

    def source(self, cores: TensorCores) -> str:
        """The constants in C++."""
        numbers = {
            "INPUTS": self.inputs,
            "OUTPUTS": self.outputs,
            "UNITS": self.units,
            "MIN_BLOCKS": self.blocks(cores),
        }
        lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        lines.append(f"constexpr bool RELU = {int(self.relu)}, APPROXIMATE_TANH = true;")
        kinds = "enum Kind { ACTIVATIONS, RESULTS, GRADIENTS };  // what is written; those of a head are float32"
        lines += [kinds, f"constexpr Kind KIND = {self.kind};"]
        return "\n".join(["#define BFLOAT16 1", "namespace layerwise {", *lines, "}"]) + "\n"


@dataclass(frozen=True)
class Layer:
    """A linear layer with padded rows and columns: where its weights and their gradients lie."""

    size: int  # index of its units in ``Layers.sizes``; -1: a head
    sources: torch.Tensor  # (rows, columns) int64: of each element in the network's parameters, or -1
    first: int  # element among all layers'
    bias: int  # first element in the network's parameters
    first_sum: int  # column of the sums of the bias's gradients

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Its matrix in a tensor with all layers'."""
        return flat[self.first : self.first + self.sources.numel()].view(self.sources.shape)


class Layers:
    """The layers of all towers, from the inputs on, and where the gradients of a chunk lie.

    The gradients of a chunk are ``size`` floats: those of the padded weights, then ``num_sums`` sums over the rows, of
    the hidden layers' biases, of the results of the heads (parameters of the distribution, value) and of the metrics.

    Args:
        perceptron: The network.
        width: Elements to a multiple of which rows are padded.
    """

    def __init__(self, perceptron: Perceptron, width: int) -> None:
        self.sizes = sorted(set(perceptron.sizes[1:]))  # units of hidden layers
        self.towers: list[list[Layer]] = []
        self.num_weights = self.num_sums = 0
        # Of each of the network's parameters, and of the metrics, in the gradients of a chunk.
        sources = torch.full((perceptron.num_parameters + METRICS,), -1)
        for trunk in ("trunk", "critic_trunk")[: perceptron.towers]:
            layers = []
            for k, (inputs, units) in enumerate(zip(perceptron.sizes, perceptron.sizes[1:], strict=False)):
                weight, bias = (perceptron.indices[f"{trunk}.{2 * k}.{kind}"] for kind in ("weight", "bias"))
                layers.append(self._layer([(weight, units)], inputs, width, sources, bias, self.num_sums))
                sources[bias : bias + units] = torch.arange(self.num_sums, self.num_sums + units)
                self.num_sums += units
            actor = perceptron.indices["actor.weight"], perceptron.actor_outputs
            critic = perceptron.indices["critic.weight"], 1
            heads = [actor, critic] if perceptron.towers == 1 else [actor if trunk == "trunk" else critic]
            layers.append(self._layer(heads, perceptron.sizes[-1], width, sources, -1, -1))
            self.towers.append(layers)
        self.first_head_sum, value = self.num_sums, self.num_sums + perceptron.outputs
        places = {"actor.bias": (self.num_sums, perceptron.actor_outputs), "critic.bias": (value, 1)}
        places |= {"log_std": (self.num_sums + perceptron.actor_outputs, perceptron.log_stds)}
        self.num_sums = value + 1 + METRICS
        indices = {**perceptron.indices, "metrics": perceptron.num_parameters}
        places["metrics"] = value + 1, METRICS
        for name, (place, count) in places.items():
            if count:
                sources[indices[name] : indices[name] + count] = torch.arange(place, place + count)
        # Sums come after the weights.
        is_weight = torch.zeros(len(sources), dtype=torch.bool)
        for layer in self.all:
            is_weight[layer.sources[layer.sources >= 0]] = True
        self.gradient_sources = torch.where(is_weight, sources, sources + self.num_weights)
        self.size = self.num_weights + self.num_sums

    @property
    def all(self) -> list[Layer]:
        """Those of all towers."""
        return [layer for tower in self.towers for layer in tower]

    @property
    def weight_sources(self) -> torch.Tensor:
        """(num_weights,) int64: of each element of the padded weights in the network's parameters, or -1."""
        return torch.cat([layer.sources.flatten() for layer in self.all])

    def _layer(
        self,
        weights: list[tuple[int, int]],
        inputs: int,
        width: int,
        sources: torch.Tensor,
        bias: int,
        first_sum: int,
    ) -> Layer:
        """A layer of weights (first parameter, units); writes into ``sources`` where their gradients lie."""
        units = sum(count for _, count in weights)
        padded = torch.full((_padded(units, width), _padded(inputs, width)), -1)
        row = 0
        for first, count in weights:
            padded[row : row + count, :inputs] = torch.arange(first, first + count * inputs).view(count, inputs)
            row += count
        places = torch.arange(self.num_weights, self.num_weights + padded.numel()).view(padded.shape)
        sources[padded[padded >= 0]] = places[padded >= 0]
        size = -1 if bias < 0 else self.sizes.index(units)
        layer = Layer(size, padded, self.num_weights, bias, first_sum)
        self.num_weights += padded.numel()
        return layer


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
