"""Convolutions of small images in TF32 by the kernels of ``cuda/learner/convolution.cu``, with their gradients.

Several layers of few images take one launch of ``cuda/learner/convolution_stack.cu``.

Shapes: N images of H x W cells of C channels, F filters of K x K cells; outputs of H' x W' cells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gpu_vecenv.compile.backends import LaunchShape, TensorCores
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.field import f32, i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.optimizer import column_sums_launch

STEP = 8  # channels of a step of a product, in TF32
FORWARD_THREADS, WEIGHT_THREADS = 256, 256  # of a block; those of weights keep their sums in registers
MAX_IMAGES = 16  # of a block at a time
MAX_STACK_IMAGES = 2  # of a block in a stack of layers; with more, a launch for each layer shares its weights better
# Windows of a block at a time: 32 of each warp; and so many that threads hold the next images in registers meanwhile.
FORWARD_WINDOWS, WEIGHT_WINDOWS = 256, 160
PARTS = 128  # of the images, of which each block sums the gradients of weights
MAX_OWN_SUMS = 104  # registers of a thread for them; it needs as many again, and has 255

_PRODUCT = (Array("weights", f32, const=True), Scalar("num_images", i64), Scalar("images_at_once", i32))
# With respect to outputs; and the outputs, if they are those of a ReLU.
_GRADIENTS = (Array("gradients", f32, const=True), Array("outputs", f32, const=True, optional=True))
FORWARD = KernelSignature(
    "convolution_forward",
    (
        Array("images", f32, const=True),
        Array("biases", f32, const=True),
        Array("outputs", f32),
        Scalar("relu", i32),
        *_PRODUCT,
    ),
)
INPUT_GRADIENTS = KernelSignature(
    "convolution_input_gradients",
    (*_GRADIENTS, Array("input_gradients", f32), *_PRODUCT),
)
WEIGHT_GRADIENTS = KernelSignature(
    "convolution_weight_gradients",
    (
        Array("images", f32, const=True),
        *_GRADIENTS,
        Array("sums", f32),
        Scalar("num_images", i64),
    ),
)


def stack_signature(layers: int) -> KernelSignature:
    """The kernel of so many layers."""
    names = [f"{kind}_{layer}" for layer in range(layers) for kind in ("weights", "biases")]
    return KernelSignature(
        "convolution_stack",
        (
            Array("images", f32, const=True),
            *(Array(name, f32, const=True) for name in names),
            Array("outputs", f32),
            Scalar("num_images", i64),
            Scalar("images_at_once", i32),
        ),
    )


@dataclass(frozen=True)
class ConvolutionShape:
    """Sizes of a convolution.

    Attributes:
        image, outputs: (height, width).
        channels, filters: Of inputs and of outputs.
        kernel, stride, padding: Of both axes.
    """

    image: tuple[int, int]
    outputs: tuple[int, int]
    channels: int
    filters: int
    kernel: int
    stride: int
    padding: int

    @property
    def has_input_gradients(self) -> bool:
        """Whether there is a kernel of them; of the first layer they are not needed."""
        return self.stride == 1 and self.padding < self.kernel

    @property
    def padded_image(self) -> int:
        """Cells of an image with all that its windows reach."""
        high, wide = ((side - 1) * self.stride + self.kernel for side in self.outputs)
        return high * wide

    def product_words(self, images: int, *, back: bool = False) -> int:
        """Words of shared memory of a block that multiplies so many images at a time."""
        inputs, outputs = (self.filters, self.channels) if back else (self.channels, self.filters)
        pitch = _padded(inputs, STEP) + STEP // 2
        weights = _padded(outputs, 16) * (self.kernel**2 * pitch | 4)
        high, wide = (side - 1 + self.kernel for side in self.image)
        cells = high * wide if back else self.padded_image
        return weights + images * cells * pitch

    def weight_words(self, images: int) -> int:
        """Words of shared memory of a block that sums gradients of weights over so many images at a time."""
        rows = _padded(images * self.outputs[0] * self.outputs[1], STEP)
        columns = _bank_pitch(_padded(self.channels, STEP))
        return images * self.padded_image * columns + rows * (_bank_pitch(_padded(self.filters, 16)) + 1)

    def images_at_once(self, cores: TensorCores) -> tuple[int, int, int]:
        """Images that a block has at a time in forward pass, gradients of inputs, and gradients of weights; 0: none."""

        def most(words: Callable[[int], int], windows: int, cells: tuple[int, int]) -> int:
            limit = cores.block_shared_bytes // 4
            images = max(1, min(MAX_IMAGES, windows // (cells[0] * cells[1])))
            return next((count for count in range(images, 0, -1) if words(count) <= limit), 0)

        return (
            most(self.product_words, FORWARD_WINDOWS, self.outputs),
            most(lambda count: self.product_words(count, back=True), FORWARD_WINDOWS, self.image),
            most(self.weight_words, WEIGHT_WINDOWS, self.outputs),
        )

    def shared_bytes(self, cores: TensorCores) -> dict[str, int]:
        """Of a block of each kernel, under its name in convolution.cu."""
        forward, back, of_weights = self.images_at_once(cores)
        return {
            "FORWARD_BYTES": 4 * self.product_words(forward),
            "BACK_BYTES": 4 * self.product_words(back, back=True),
            "WEIGHT_BYTES": 4 * self.weight_words(of_weights),
        }

    @property
    def own_sums(self) -> int:
        """Registers of a thread for the gradients of weights."""
        tiles = self.kernel**2 * _padded(self.channels, STEP) // 8
        return 4 * _padded(self.filters, 16) // 16 * -(-tiles // (WEIGHT_THREADS // 32))


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _bank_pitch(n: int) -> int:
    """As ``pitch_of`` of convolution.cu."""
    return (n + 7) // 16 * 16 + 8


def _aligned(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """The tensors, or copies, where kernels may load 16 bytes at a time."""
    return {name: x if x is None or x.data_ptr() % 16 == 0 else x.clone() for name, x in tensors.items()}


def convolution_source(shape: ConvolutionShape, cores: TensorCores) -> str:
    """The constants of a convolution in C++."""
    images = dict(zip(("FORWARD_IMAGES", "BACK_IMAGES", "WEIGHT_IMAGES"), shape.images_at_once(cores), strict=True))
    numbers = {
        **{"FORWARD_THREADS": FORWARD_THREADS, "WEIGHT_THREADS": WEIGHT_THREADS, "PARTS": PARTS},
        **images,
        **shape.shared_bytes(cores),
    }
    lines = [f"#define HAS_INPUT_GRADIENTS {int(shape.has_input_gradients)}", "namespace convolution {"]
    return "\n".join([*lines, *_constants(numbers), _shape_source("struct Shape", shape), "}"]) + "\n"


def stack_source(shapes: Sequence[ConvolutionShape], cores: TensorCores) -> str:
    """The constants of several layers in C++, and functions that give the weights and biases of each."""
    images = stack_images(shapes, cores)
    layers = {"LAYERS": len(shapes), "IMAGES": images, "STACK_BYTES": 4 * _stack_words(shapes, images)}

    def function(kind: str) -> str:
        table = ", ".join(f"args.{kind}_{layer}" for layer in range(len(shapes)))
        arguments = "const convolution_stack_Arguments& args, int layer"
        return f"HD const float* {kind}_of({arguments}) {{ const float* x[] = {{{table}}}; return x[layer]; }}"

    lines = ["namespace convolution {", *_constants({"FORWARD_THREADS": FORWARD_THREADS, **layers})]
    lines += ["template <int N>", "struct Shape;"]
    lines += [_shape_source(f"template <> struct Shape<{n}>", shape) for n, shape in enumerate(shapes)]
    return "\n".join([*lines, function("weights"), function("biases"), "}"]) + "\n"


def _constants(numbers: Mapping[str, int]) -> list[str]:
    return [f"constexpr int {name} = {value};" for name, value in numbers.items()]


def _shape_source(declaration: str, shape: ConvolutionShape) -> str:
    sizes = dict(zip(("HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH"), (*shape.image, *shape.outputs), strict=True))
    sizes |= {"CHANNELS": shape.channels, "FILTERS": shape.filters}
    sizes |= {"KERNEL": shape.kernel, "STRIDE": shape.stride, "PADDING": shape.padding}
    return f"{declaration} {{ static {' static '.join(_constants(sizes))} }};"


def _stack_words(shapes: Sequence[ConvolutionShape], images: int) -> int:
    """Words of shared memory of a block that takes so many images through all layers: images and weights."""
    weights = max(shape.product_words(0) for shape in shapes)
    return weights + sum(shape.product_words(images) - shape.product_words(0) for shape in shapes)


def stack_images(shapes: Sequence[ConvolutionShape], cores: TensorCores) -> int:
    """Images that a block takes through all layers, at most; 0: they do not fit."""
    limit = cores.block_shared_bytes // 4
    return next((count for count in range(MAX_STACK_IMAGES, 0, -1) if _stack_words(shapes, count) <= limit), 0)


class ConvolutionKernels:
    """A convolution and its gradients, of images with their channels last, (N, H, W, C) float32.

    Args:
        functions: The FunctionManager of the tensors' device.
        shape: See ``why_not_convolution``.
    """

    def __init__(self, functions: FunctionManager, shape: ConvolutionShape) -> None:
        cores = functions.backend.tensor_cores
        assert cores is not None
        self.shape, self._cores = shape, cores
        self._forward_images, self._back_images, _ = shape.images_at_once(cores)
        self._bytes = shape.shared_bytes(cores)
        program = functions.compile(
            cuda_folder() / "learner/convolution.cu",
            kernels=[FORWARD, WEIGHT_GRADIENTS, *([INPUT_GRADIENTS] if shape.has_input_gradients else [])],
            constants=convolution_source(shape, cores),
        )
        # Sums of weights are in the order of (F, K, K, C).
        weights = torch.arange(shape.filters * shape.channels * shape.kernel**2, dtype=torch.int32)
        sizes = shape.filters, shape.channels, shape.kernel, shape.kernel
        biases = torch.arange(shape.filters, dtype=torch.int32) + len(weights)
        out_indices = torch.cat([weights.view(sizes).movedim(1, -1).flatten(), biases])
        self._sum_parts = column_sums_launch(functions, PARTS, out_indices.to(functions.device))
        self._launches = _Launches(program)
        self._lock = threading.Lock()  # threads that train on one device share the launch

    def forward(
        self, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool = False
    ) -> torch.Tensor:
        """Images (N, H, W, C), weight (F, C, K, K) and bias (F,) -> (N, H', W', F), with a ReLU or without."""
        outputs = images.new_empty((len(images), *self.shape.outputs, self.shape.filters))
        given = _aligned(images=images, weights=weight)
        tensors = {**given, "biases": bias, "outputs": outputs, "relu": int(relu)}
        self._multiply("convolution_forward", len(images), self._forward_images, "FORWARD_BYTES", tensors)
        return outputs

    def input_gradients(
        self, gradients: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gradients (N, H, W, C) with respect to images.

        Args:
            gradients: With respect to the outputs, (N, H', W', F).
            weight: As of ``forward``.
            outputs: Those of ``forward`` with a ReLU, None without.
        """
        of_inputs = gradients.new_empty((len(gradients), *self.shape.image, self.shape.channels))
        given = _aligned(gradients=gradients, outputs=outputs, weights=weight)
        tensors = {**given, "input_gradients": of_inputs}
        self._multiply("convolution_input_gradients", len(gradients), self._back_images, "BACK_BYTES", tensors)
        return of_inputs

    def weight_gradients(
        self, images: torch.Tensor, gradients: torch.Tensor, outputs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients with respect to the weight (F, C, K, K) and the bias (F,). See ``input_gradients``."""
        shape = self.shape
        size = shape.filters * shape.channels * shape.kernel**2
        sums = images.new_empty((PARTS, size + shape.filters))
        launch = LaunchShape(PARTS * WEIGHT_THREADS, 1, WEIGHT_THREADS, self._bytes["WEIGHT_BYTES"])
        given = _aligned(images=images, gradients=gradients, outputs=outputs)
        self._launches("convolution_weight_gradients", launch, **given, sums=sums, num_images=len(images))
        found = torch.empty_like(sums[0])
        with self._lock:
            self._sum_parts(parts=sums, out=found)
        weight, bias = found.split((size, shape.filters))
        return weight.view(shape.filters, shape.channels, shape.kernel, shape.kernel), bias

    def _multiply(self, kernel: str, num_images: int, most: int, size: str, arguments: Mapping[str, object]) -> None:
        """Launch a product, with up to ``most`` images at a time, so that all blocks have nearly as many."""
        resident = self._cores.shared_bytes // (self._bytes[size] + self._cores.reserved_shared_bytes)
        places = self._cores.multiprocessors * max(1, resident)
        rounds = max(1, -(-num_images // (places * most)))
        at_once = max(1, -(-num_images // (places * rounds)))
        blocks = max(1, min(places, -(-num_images // at_once)))
        launch = LaunchShape(blocks * FORWARD_THREADS, 1, FORWARD_THREADS, self._bytes[size])
        self._launches(kernel, launch, num_images=num_images, images_at_once=at_once, **arguments)


class ConvolutionStack:
    """Several convolutions, each followed by a ReLU, of few images in one launch, without gradients.

    The bits are those of ``ConvolutionKernels``, one after the other.

    Args:
        functions: The FunctionManager of the tensors' device.
        shapes: Of the layers. ``stack_images`` is not 0.

    Attributes:
        most_images: With more, launches of single layers are faster.
    """

    def __init__(self, functions: FunctionManager, shapes: Sequence[ConvolutionShape]) -> None:
        cores = functions.backend.tensor_cores
        assert cores is not None
        images, self.last = stack_images(shapes, cores), shapes[-1]
        self._bytes = 4 * _stack_words(shapes, images)
        self._blocks = cores.multiprocessors
        self.most_images = images * self._blocks
        program = functions.compile(
            cuda_folder() / "learner/convolution_stack.cu",
            kernels=[stack_signature(len(shapes))],
            constants=stack_source(shapes, cores),
        )
        self._launches = _Launches(program)

    def forward(
        self, images: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Images (N, H, W, C), N <= most_images, and the layers' weights and biases -> (N, H', W', F)."""
        count = len(images)
        outputs = images.new_empty((count, *self.last.outputs, self.last.filters))
        at_once = max(1, -(-count // self._blocks))
        launch = LaunchShape(max(1, -(-count // at_once)) * FORWARD_THREADS, 1, FORWARD_THREADS, self._bytes)
        layers = {f"weights_{layer}": weight for layer, weight in enumerate(weights)}
        tensors = {**_aligned(images=images, **layers), "outputs": outputs}
        tensors |= {f"biases_{layer}": bias for layer, bias in enumerate(biases)}
        self._launches("convolution_stack", launch, num_images=count, images_at_once=at_once, **tensors)
        return outputs


class _Launches:
    """Launches of a program's kernels, one for each shape, which threads may share."""

    def __init__(self, program: Program) -> None:
        self._program, self._lock = program, threading.Lock()
        self._prepared: dict[tuple[str, int], Launch] = {}

    def __call__(self, kernel: str, shape: LaunchShape, **arguments: object) -> None:
        with self._lock:
            if (kernel, shape.items) not in self._prepared:
                self._prepared[kernel, shape.items] = self._program.prepare(kernel, shape)
            self._prepared[kernel, shape.items](**arguments)


def why_not_convolution(shape: ConvolutionShape, cores: TensorCores | None) -> str | None:
    """Why no ``ConvolutionKernels`` computes a convolution, in a few words; None if they can."""
    if cores is None:
        return "no tensor cores"
    if shape.own_sums > MAX_OWN_SUMS:
        return "more weights than fit into registers"
    forward, back, of_weights = shape.images_at_once(cores)
    if forward and of_weights and (back or not shape.has_input_gradients):
        return None
    return "images or weights too large for shared memory"


@cache
def kernels_on(device: torch.device, shape: ConvolutionShape) -> ConvolutionKernels | None:
    """The kernels of a device, None if it has none. Call it once before a graph capture: it may compile."""
    functions = FunctionManager(device)
    if why_not_convolution(shape, functions.backend.tensor_cores) is not None:
        return None
    return ConvolutionKernels(functions, shape)


@cache
def stack_on(device: torch.device, shapes: tuple[ConvolutionShape, ...]) -> ConvolutionStack | None:
    """The stack of a device, None if there is none. Call it once before a graph capture: it may compile."""
    functions = FunctionManager(device)
    cores = functions.backend.tensor_cores
    chained = all(a.outputs == b.image and a.filters == b.channels for a, b in pairwise(shapes))
    if cores is None or len(shapes) < 2 or not chained or not stack_images(shapes, cores):
        return None
    return ConvolutionStack(functions, shapes)


class _Convolution(torch.autograd.Function):
    """See ``convolve``."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: ConvolutionKernels,
        relu: bool,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        outputs = kernels.forward(images, weight, bias, relu=relu)
        ctx.kernels = kernels
        ctx.save_for_backward(images, weight, outputs if relu else None)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        images, weight, outputs = ctx.saved_tensors
        given = gradients.contiguous()
        of_images = ctx.kernels.input_gradients(given, weight, outputs) if ctx.needs_input_grad[2] else None
        return (None, None, of_images, *ctx.kernels.weight_gradients(images, given, outputs))


def convolve(
    kernels: ConvolutionKernels, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, relu: bool = False
) -> torch.Tensor:
    """``kernels.forward`` with gradients. Second derivatives are not supported."""
    outputs: torch.Tensor = _Convolution.apply(kernels, relu, images, weight, bias)  # type: ignore[no-untyped-call]
    return outputs
