"""Linear layers whose backward pass computes the gradients of activation and bias in one kernel.

Matrix products are torch's. Second derivatives are not supported.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch
from gpu_vecenv.declare.field import f32, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder

NO_ACTIVATION, TANH, RELU = range(3)  # enum Activation of layers.cu
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Tanh: TANH, nn.ReLU: RELU}
MAX_PARTIAL_SUMS = 2**18  # floats; enough to fill a large GPU
MIN_ROWS_PER_SUM = 16  # if there are as many rows

LAYER_GRADIENTS = KernelSignature(
    "layer_gradients",
    (
        Array("gradients", f32, const=True, shape=("floats",)),
        Array("outputs", f32, const=True, optional=True, shape=("floats",)),
        Array("inputs", f32, shape=("floats",)),
        Array("sums", f32, shape=("partial_sums",)),
        Scalar("activation", i32),
        Scalar("width", i32),
        Scalar("partial_sums", i64),
        Scalar("floats", i64),
    ),
)


class LayerKernel:
    """Gradient with respect to an activation's inputs, and its sums over the rows.

    The order of summation depends on the sizes alone.

    Args:
        functions: The FunctionManager of the tensors' device.
    """

    def __init__(self, functions: FunctionManager) -> None:
        self._program = functions.compile(cuda_folder() / "learner/layers.cu", kernels=[LAYER_GRADIENTS])
        self._launches: dict[tuple[int, int], Launch] = {}
        self._lock = threading.Lock()  # threads that train on one device share the launches

    def __call__(
        self, gradients: torch.Tensor, outputs: torch.Tensor | None = None, activation: int = NO_ACTIVATION
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient with respect to the inputs (rows, columns), and its sums over the rows (columns,).

        Args:
            gradients: With respect to the outputs, (rows, columns) float32, contiguous.
            outputs: Of the activation, like ``gradients``. None for NO_ACTIVATION, which returns ``gradients``.
            activation: ``NO_ACTIVATION``, ``TANH`` or ``RELU``.
        """
        rows, columns = gradients.shape
        parts = max(1, min(rows // MIN_ROWS_PER_SUM, MAX_PARTIAL_SUMS // max(columns, 1)))
        inputs = gradients if outputs is None else torch.empty_like(gradients)
        sums = gradients.new_empty((parts, columns))
        if columns == 0:
            return inputs, sums.sum(0)
        matrices = [x for x in (gradients, outputs, inputs, sums) if x is not None]
        width = 4 if columns % 4 == 0 and all(x.data_ptr() % 16 == 0 for x in matrices) else 1
        with self._lock:
            self._launch(sums.numel() // width, gradients.numel())(
                gradients=gradients,
                outputs=outputs,
                inputs=inputs,
                sums=sums,
                activation=activation,
                width=width,
                partial_sums=sums.numel(),
            )
        return inputs, sums.sum(0)

    def _launch(self, items: int, floats: int) -> Launch:
        if (items, floats) not in self._launches:
            shape = LaunchShape(items, work=floats)
            self._launches[items, floats] = self._program.prepare("layer_gradients", shape, floats=floats)
        return self._launches[items, floats]


@cache
def kernel_on(device: torch.device) -> LayerKernel:
    """The kernel of a device. Call it once before a graph capture: it may compile."""
    return LayerKernel(FunctionManager(device))


class _Layer(torch.autograd.Function):
    """See ``layer``."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: int
    ) -> torch.Tensor:
        if activation == RELU:
            outputs: torch.Tensor = torch._addmm_activation(bias, rows, weight.t())  # in one kernel, unlike relu_()
        else:
            outputs = nn.functional.linear(rows, weight, bias)
            outputs = outputs.tanh_() if activation == TANH else outputs
        ctx.activation = activation
        ctx.save_for_backward(rows, weight, outputs if activation != NO_ACTIVATION else None)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, outputs = ctx.saved_tensors
        inputs, sums = kernel_on(rows.device)(gradients.contiguous(), outputs, ctx.activation)
        return (*_products(ctx, inputs, rows, weight), sums, None)


class _Heads(torch.autograd.Function):
    """See ``heads``. One matrix product for all heads reads the rows, the largest tensor, once.

    Copies of the last column pad the product to a multiple of four columns, so that all rows are aligned to 16 bytes.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, biases = layers[::2], layers[1::2]
        ctx.sizes = [len(bias) for bias in biases]
        last = sum(ctx.sizes) - 1
        padding = width_of(last) - last - 1
        weight, bias = (torch.cat([*x, *x[-1:] * padding]) for x in (weights, biases))
        ctx.save_for_backward(rows, weight)
        outputs = nn.functional.linear(rows, weight, bias)
        return outputs[:, :last], outputs[:, last]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        both = packed(*gradients)
        sums = kernel_on(rows.device)(both)[1]
        count = sum(ctx.sizes)
        of_rows, of_weight = _products(ctx, both[:, :count], rows, weight[:count])
        assert of_weight is not None
        of_layers = zip(of_weight.split(ctx.sizes), sums[:count].split(ctx.sizes), strict=True)
        return (of_rows, *(gradient for pair in of_layers for gradient in pair))


def width_of(parameters: int) -> int:
    """Columns of a tensor with ``parameters`` and a value per row, and rows aligned to 16 bytes."""
    return parameters // 4 * 4 + 4


def are_packed(parameters: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether (n, m) and (n,), both float32, are the first m + 1 columns of one tensor (n, width_of(m))."""
    rows, count = parameters.shape
    width = width_of(count)
    in_one = parameters.stride() == (width, 1) and values.stride() == (width,)
    in_one &= values.data_ptr() == parameters.data_ptr() + 4 * count
    return in_one and parameters.untyped_storage().nbytes() >= 4 * (parameters.storage_offset() + rows * width)


def packed(parameters: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Both as one tensor (n, width_of(m)), a view if possible. The values of the padding columns are unspecified."""
    rows, count = parameters.shape
    width = width_of(count)
    if are_packed(parameters, values):
        return parameters.as_strided((rows, width), (width, 1))
    return torch.cat([parameters, values[:, None].expand(rows, width - count)], 1)


def _products(
    ctx: Any, gradients: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the rows, if required, and of the weight."""
    return gradients @ weight if ctx.needs_input_grad[0] else None, gradients.T @ rows


def is_supported_mlp(layers: nn.Module) -> bool:
    """Whether ``layers`` alternates plain linear layers and supported activations, without hooks."""
    if type(layers) is not nn.Sequential:
        return False
    linears, activations = list(layers)[::2], list(layers)[1::2]
    return (
        len(linears) == len(activations)
        and all(type(layer) in ACTIVATIONS for layer in activations)
        and all(is_plain(layer) for layer in linears)
        and not any(has_hooks(layer) for layer in (layers, *activations))
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether ``layer`` is an nn.Linear, float32, with a bias and without hooks."""
    if type(layer) is not nn.Linear or has_hooks(layer):
        return False
    own = vars(layer)["_parameters"]  # reading layer.weight takes longer
    return own["bias"] is not None and own["weight"].dtype == torch.float32


def layer(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: int) -> torch.Tensor:
    """activation(rows @ weight.T + bias), (n, outputs), of rows (n, inputs), weight (outputs, inputs), bias (outputs,).

    All are float32; ``activation`` is ``NO_ACTIVATION``, ``TANH`` or ``RELU``.
    """
    outputs: torch.Tensor = _Layer.apply(rows, weight, bias, activation)  # type: ignore[no-untyped-call]
    return outputs


def through(layers: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Outputs of a supported MLP for rows (n, inputs) float32."""
    assert isinstance(layers, nn.Sequential)
    parts = list(layers)
    for linear, activation in zip(parts[::2], parts[1::2], strict=True):
        assert isinstance(linear, nn.Linear)
        rows = layer(rows, linear.weight, linear.bias, ACTIVATIONS[type(activation)])
    return rows


def heads(rows: torch.Tensor, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Several linear layers of the same rows: outputs (n, m) of all but the last, and (n,) of the last.

    Args:
        rows: (n, inputs) float32.
        layers: Weight (outputs, inputs) and bias (outputs,) of each; the last has one output.
    """
    outputs: tuple[torch.Tensor, torch.Tensor] = _Heads.apply(rows, *layers)  # type: ignore[no-untyped-call]
    return outputs


def has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has forward or backward hooks, or a replaced ``forward``."""
    own = vars(layer)
    forward = "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]
    hooks = forward or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks or torch.nn.modules.module._has_any_global_hook())


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """``list(module.parameters())`` in a fraction of the time: this is part of each iteration of a trainer."""
    found, left = list[nn.Parameter](), [module]
    while left:
        own = vars(left.pop())
        found += [p for p in own["_parameters"].values() if p is not None]
        if own["_modules"]:
            left += [child for child in reversed(own["_modules"].values()) if child is not None]
    return [*{id(p): p for p in found}.values()]
