"""Convolutions of small images, for which a GPU's libraries are slow: kernels in TF32, else one matrix product."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpu_vecenv.train.convolution_kernels import (
    ConvolutionKernels,
    ConvolutionShape,
    ConvolutionStack,
    convolve,
    kernels_on,
    stack_on,
)
from gpu_vecenv.train.layers import has_hooks

# Where a product takes the place of a convolution: at most so many times its operations, at least so many images. With
# overcooked's images of 5 x 8 cells and 32,768 of them a step of training then takes half of the time on an H100.
PRODUCT_COST, PRODUCT_IMAGES = 5, 4096


class ImageConvolution(nn.Conv2d):
    """A convolution of images of one size, with the parameters and results of ``torch.nn.Conv2d``.

    On a GPU where torch may use TF32, kernels convolve images that fit into shared memory, with weights whose gradients
    fit into registers. Without TF32, many small images are multiplied by one matrix, which holds the window at each of
    its places and 0 elsewhere. The product has more operations than the convolution, but runs on matrix units at their
    full rate, and so do its gradients, for which cuDNN's algorithms with a fixed order of sums are slow. All else is
    convolved by torch.

    Args:
        image: (height, width) of the inputs.
        in_channels, out_channels, kernel_size, stride, padding: As of ``torch.nn.Conv2d``, square.

    Attributes:
        output_shape: (height, width) of the outputs.

    Example:
        >>> layer = ImageConvolution((5, 8), 26, 32, kernel_size=3, padding=1)
        >>> layer(torch.zeros(7, 26, 5, 8)).shape
        torch.Size([7, 32, 5, 8])
    """

    places: torch.Tensor | None  # (kernel_size^2, input cells x output cells), 1 where a product uses a weight

    def __init__(
        self,
        image: tuple[int, int],
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        height, width = ((side + 2 * padding - kernel_size) // stride + 1 for side in image)
        self.image, self.output_shape = image, (height, width)
        self.shape = ConvolutionShape(image, self.output_shape, in_channels, out_channels, kernel_size, stride, padding)
        small = image[0] * image[1] <= PRODUCT_COST * kernel_size**2
        self.register_buffer("places", self._places() if small else None, persistent=False)

    def _places(self) -> torch.Tensor:
        """Which weight is between each cell of the input and of the output, found by convolving single cells."""
        cells, kernel = self.image[0] * self.image[1], self.kernel_size[0]
        weights = torch.eye(kernel**2).view(kernel**2, 1, kernel, kernel)
        single = torch.eye(cells).view(cells, 1, *self.image)
        places = functional.conv2d(single, weights, stride=self.stride, padding=self.padding)
        return places.flatten(2).transpose(0, 1).flatten(1).contiguous()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, in_channels, height, width) -> (N, out_channels, *output_shape)."""
        kernels = self.usable_kernels(images)
        if kernels is not None:
            return self.by_kernels(kernels, images)
        if self.places is None or not images.is_cuda or images.shape[0] < PRODUCT_IMAGES:
            return super().forward(images)
        return self.product(images, self.places)

    def usable_kernels(self, images: torch.Tensor) -> ConvolutionKernels | None:
        """The kernels for such images; None if there are none."""
        if not images.is_cuda or not torch.backends.cudnn.allow_tf32 or torch.is_autocast_enabled("cuda"):
            return None
        if self.weight.dtype != torch.float32 or images.dtype != torch.float32:
            return None
        if images.requires_grad and not self.shape.has_input_gradients:
            return None
        return kernels_on(images.device, self.shape)

    def by_kernels(self, kernels: ConvolutionKernels, images: torch.Tensor, *, relu: bool = False) -> torch.Tensor:
        """The same by kernels, with the channels of the result last in memory."""
        assert self.bias is not None
        rows = images.movedim(1, -1).contiguous()
        return convolve(kernels, rows, self.weight, self.bias, relu=relu).movedim(-1, 1)

    def product(self, images: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The same by a matrix product, with the channels of the result last in memory."""
        height, width = self.output_shape
        cells, channels = self.image[0] * self.image[1], (self.in_channels, self.out_channels)
        kernel = self.weight.flatten(2).permute(2, 1, 0).flatten(1)
        matrix = (places.t() @ kernel).view(cells, height * width, *channels).transpose(1, 2)
        assert self.bias is not None
        bias, rows = self.bias.repeat(height * width), images.movedim(1, -1).flatten(1)
        outputs = torch.addmm(bias, rows, matrix.reshape(rows.shape[1], -1))
        return outputs.view(-1, height, width, self.out_channels).movedim(-1, 1)


class ConvolutionsWithReLU(nn.Sequential):
    """ImageConvolutions, each followed by an ``nn.ReLU``, which kernels compute together.

    Example:
        >>> layers = ConvolutionsWithReLU(ImageConvolution((5, 8), 26, 32, kernel_size=3, padding=1), nn.ReLU())
        >>> layers(torch.zeros(7, 26, 5, 8)).shape
        torch.Size([7, 32, 5, 8])
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """As of ``nn.Sequential``."""
        stack = self._stack(images)
        if stack is not None:
            weights, biases = ([*self.parameters()][first::2] for first in (0, 1))
            return stack.forward(images.movedim(1, -1).contiguous(), weights, biases).movedim(-1, 1)
        layers = list(self)
        for layer, relu in zip(layers[::2], layers[1::2], strict=True):
            images = _with_relu(layer, relu, images)
        return images

    def _stack(self, images: torch.Tensor) -> ConvolutionStack | None:
        """The kernel that computes all layers of the images; None: there is none, or gradients are recorded."""
        if torch.is_grad_enabled() or any(map(has_hooks, self)):
            return None
        layers = [layer for layer in self if isinstance(layer, ImageConvolution)]
        if any(layer.usable_kernels(images) is None for layer in layers):
            return None
        stack = stack_on(images.device, tuple(layer.shape for layer in layers))
        return stack if stack is not None and len(images) <= stack.most_images else None


def _with_relu(layer: nn.Module, relu: nn.Module, images: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, ImageConvolution) and not has_hooks(layer) and not has_hooks(relu):
        kernels = layer.usable_kernels(images)
        if kernels is not None:
            return layer.by_kernels(kernels, images, relu=True)
    outputs: torch.Tensor = relu(layer(images))
    return outputs
