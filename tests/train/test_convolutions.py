"""Convolutions by kernels against torch's in float64, on emulated CUDA threads and on a GPU."""

import pytest
import torch
from support.bitwise import equal_bits
from support.kernel_trainers import products_in
from torch import nn
from torch.nn import functional

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile.backends import TensorCores
from gpu_vecenv.train import convolution_kernels
from gpu_vecenv.train.convolution_kernels import (
    ConvolutionKernels,
    ConvolutionShape,
    ConvolutionStack,
    convolve,
    stack_on,
    why_not_convolution,
)
from gpu_vecenv.train.convolutions import ConvolutionsWithReLU, ImageConvolution

NAN = float("nan")
# Image, channels, filters, kernel, stride, padding.
CASES = {
    "as published": ((5, 8), 26, 32, 5, 1, 2),
    "second layer": ((4, 5), 32, 32, 3, 1, 1),
    "odd sizes": ((3, 4), 3, 5, 3, 1, 0),
    "odd filters of even channels": ((4, 5), 2, 5, 3, 1, 1),
    "one cell": ((1, 1), 1, 1, 1, 1, 0),
    "rows left out": ((7, 6), 2, 20, 3, 2, 1),
}
# TF32 keeps 10 bits of a factor, rounded here by up to 2/3 of the last; tensor cores cut off what they add.
WITHIN = 2.0**-9  # of the sum of the magnitudes of all products


def layer_of(name):
    torch.manual_seed(3)
    image, *sizes = CASES[name]
    return ImageConvolution(image, *sizes)


def kernels_of(layer, device):
    return ConvolutionKernels(FunctionManager(device), layer.shape)


def sample(layer, count, device):
    torch.manual_seed(4)
    height, width = layer.output_shape
    images = torch.randn(count, *layer.image, layer.in_channels)
    gradients = torch.randn(count, height, width, layer.out_channels)
    return images.to(device), gradients.to(device)


def results(kernels, layer, images, gradients, *, back, relu=False):
    """Outputs, and gradients with respect to weight, bias and, if there is a kernel, images."""
    device = images.device
    weight, bias = (p.detach().to(device).requires_grad_() for p in (layer.weight, layer.bias))
    images = images.clone().requires_grad_(back)
    outputs = convolve(kernels, images, weight, bias, relu=relu)
    return outputs.detach(), *torch.autograd.grad(outputs, [weight, bias, *([images] if back else [])], gradients)


def in_float64(layer, images, gradients, *, magnitudes):
    """``results`` by torch; with ``magnitudes`` of the absolute values of all inputs."""
    tensors = [x.detach().double().cpu() for x in (images, layer.weight, layer.bias, gradients)]
    images, weight, bias, gradients = [x.abs() for x in tensors] if magnitudes else tensors
    inputs = [x.requires_grad_() for x in (weight, bias, images)]
    outputs = functional.conv2d(images.movedim(-1, 1), weight, bias, layer.stride, layer.padding).movedim(1, -1)
    return outputs.detach(), *torch.autograd.grad(outputs, inputs, gradients)


@pytest.mark.parametrize(("count", "relu"), [(1, False), (37, True)])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_agree_with_torch_in_float64(name, count, relu, device_of_networks):
    layer = layer_of(name)
    kernels = kernels_of(layer, device_of_networks)
    back = kernels.shape.has_input_gradients
    assert back == (layer.stride == (1, 1))
    images, gradients = sample(layer, count, device_of_networks)
    found = results(kernels, layer, images, gradients, back=back, relu=relu)
    check(found, layer, images, gradients, relu=relu)


def check(found, layer, images, gradients, *, relu=False):
    if relu:  # the sign of an output near 0 may be another one in float64
        gradients = gradients * (found[0] > 0)
    exact, size = (in_float64(layer, images, gradients, magnitudes=magnitudes) for magnitudes in (False, True))
    if relu:
        exact = (exact[0].relu(), *exact[1:])
    for ours, theirs, most in zip(found, exact, size, strict=False):
        assert ((ours.double().cpu() - theirs).abs() <= WITHIN * most).all()


def test_blocks_take_images_one_part_after_the_other(device_of_networks, monkeypatch):
    monkeypatch.setattr(convolution_kernels, "PARTS", 3)
    monkeypatch.setattr(convolution_kernels, "MAX_IMAGES", 2)
    layer = layer_of("second layer")
    images, gradients = sample(layer, 16, device_of_networks)
    found = results(kernels_of(layer, device_of_networks), layer, images, gradients, back=True)
    check(found, layer, images, gradients)
    monkeypatch.setattr(convolution_kernels, "MAX_IMAGES", 5)
    more = results(kernels_of(layer, device_of_networks), layer, images, gradients, back=True)
    assert equal_bits([found[0], found[3]], [more[0], more[3]])


def test_an_image_has_the_bits_of_its_own(device_of_networks):
    layer = layer_of("as published")
    kernels = kernels_of(layer, device_of_networks)
    images, gradients = sample(layer, 41, device_of_networks)
    together = results(kernels, layer, images, gradients, back=True)
    for k in (0, 17, 40):
        alone = results(kernels, layer, images[k : k + 1], gradients[k : k + 1], back=True)
        assert equal_bits([together[0][k], together[3][k]], [alone[0][0], alone[3][0]])


def test_tensors_may_begin_anywhere_in_memory(device_of_networks):
    layer = layer_of("second layer")
    kernels = kernels_of(layer, device_of_networks)
    given = sample(layer, 3, device_of_networks)
    moved = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in given]
    assert all(x.data_ptr() % 16 for x in moved)
    found, expected = (results(kernels, layer, *each, back=True) for each in (moved, given))
    assert equal_bits(found, expected)


def test_the_number_of_multiprocessors_changes_no_bit(device_of_networks):
    layer = layer_of("second layer")
    found = []
    for multiprocessors in (1, 500):
        kernels = kernels_of(layer, device_of_networks)
        kernels._cores = TensorCores(multiprocessors, kernels._cores.shared_bytes, kernels._cores.block_shared_bytes)
        found.append(results(kernels, layer, *sample(layer, 70, device_of_networks), back=True))
    assert equal_bits(*found)


def test_the_order_of_threads_changes_no_bit(device_of_networks, monkeypatch):
    layer, found = layer_of("odd sizes"), []
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)  # a GPU has an order of its own
        kernels = kernels_of(layer, device_of_networks)
        found.append(results(kernels, layer, *sample(layer, 11, device_of_networks), back=True))
    assert equal_bits(*found)


def test_nan_stays_in_its_image_and_reaches_the_gradients_of_weights(device_of_networks):
    layer = layer_of("second layer")
    kernels = kernels_of(layer, device_of_networks)
    images, gradients = sample(layer, 9, device_of_networks)
    images[4, 0, 0, 3] = NAN
    outputs, weight, bias, of_images = results(kernels, layer, images, gradients, back=True, relu=True)
    is_nan = outputs.isnan().flatten(1).any(1)
    assert is_nan.nonzero().flatten().tolist() == [4]
    assert weight[:, 3].isnan().any() and not weight[:, 4].isnan().any() and not bias.isnan().any()
    assert not of_images.isnan().any()


def test_no_images(device_of_networks):
    layer = layer_of("odd sizes")
    outputs, weight, bias, _ = results(
        kernels_of(layer, device_of_networks), layer, *sample(layer, 0, device_of_networks), back=True
    )
    assert outputs.shape == (0, 1, 2, 5) and not weight.any() and not bias.any()


STACKS = {
    "as published": ((5, 8), (26, 32, 5, 1, 2), (32, 32, 3, 1, 1), (32, 32, 3, 1, 1)),
    "odd sizes": ((7, 6), (2, 20, 3, 2, 1), (20, 5, 3, 1, 1), (5, 3, 2, 1, 0)),
    "cells outside of all windows": ((4, 5), (3, 8, 3, 1, 1), (8, 16, 2, 2, 0)),
}


def stack_of(name):
    """Layers, each of the outputs of the one before."""
    torch.manual_seed(5)
    image, *sizes = STACKS[name]
    layers = []
    for size in sizes:
        layers.append(ImageConvolution(image, *size))
        image = layers[-1].output_shape
    return layers


@pytest.mark.parametrize("multiprocessors", [2, 500])
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_has_the_bits_of_its_layers(name, multiprocessors, device_of_networks, monkeypatch):
    layers, functions = stack_of(name), FunctionManager(device_of_networks)
    images, _ = sample(layers[0], 3, device_of_networks)
    expected = images
    for layer in layers:
        parameters = (p.detach().to(device_of_networks) for p in layer.parameters())
        expected = kernels_of(layer, device_of_networks).forward(expected, *parameters, relu=True)
    cores = functions.backend.tensor_cores
    few = TensorCores(multiprocessors, cores.block_shared_bytes, cores.block_shared_bytes)
    monkeypatch.setattr(functions.backend, "tensor_cores", few)
    stack = ConvolutionStack(functions, [layer.shape for layer in layers])
    assert stack.most_images == multiprocessors * convolution_kernels.MAX_STACK_IMAGES
    weights, biases = zip(*([p.detach().to(device_of_networks) for p in x.parameters()] for x in layers), strict=True)
    found = stack.forward(images, weights, biases)
    assert equal_bits([found], [expected])
    assert stack.forward(images[:0], weights, biases).shape == (0, *expected.shape[1:])


def test_layers_that_do_not_follow_each_other_are_no_stack(device_of_networks):
    first, second, _ = (layer.shape for layer in stack_of("as published"))
    device = torch.device(device_of_networks)
    assert stack_on(device, (first,)) is None and stack_on(device, (second, first)) is None


def test_what_does_not_fit_is_left_to_torch():
    cores = TensorCores(132, 233472, 232448)
    small = ConvolutionShape((5, 8), (5, 8), 26, 32, 5, 1, 2)
    assert why_not_convolution(small, cores) is None
    assert why_not_convolution(small, None) == "no tensor cores"
    large = ConvolutionShape((84, 84), (20, 20), 4, 32, 8, 4, 0)
    assert why_not_convolution(large, cores) == "images or weights too large for shared memory"
    many = ConvolutionShape((5, 8), (5, 8), 64, 64, 5, 1, 2)
    assert why_not_convolution(many, cores) == "more weights than fit into registers"


@pytest.mark.gpu
def test_a_layer_uses_kernels_in_tf32_alone():
    layer = layer_of("second layer").cuda()
    images = sample(layer, 5, "cuda")[0].movedim(-1, 1)
    with products_in("float32"):
        exact = layer(images)
    with products_in("tf32"):
        found = layer(images)
        expected = kernels_of(layer, "cuda").forward(images.movedim(1, -1), layer.weight, layer.bias)
        together, calls = ConvolutionsWithReLU(layer, nn.ReLU()), []
        with_relu = together(images)
        layer.register_forward_hook(lambda *_: calls.append(1))
        hooked = together(images)
    assert equal_bits([found.movedim(1, -1)], [expected]) and not equal_bits([found], [exact])
    assert equal_bits([with_relu, hooked], [found.relu()] * 2) and calls == [1]


@pytest.mark.gpu
def test_few_images_go_through_all_layers_in_one_launch(monkeypatch):
    convolutions = [layer.cuda() for layer in stack_of("as published")]
    layers = ConvolutionsWithReLU(*(module for layer in convolutions for module in (layer, nn.ReLU())))
    images = sample(convolutions[0], 9, "cuda")[0].movedim(-1, 1)
    stacked, forward = [], ConvolutionStack.forward
    monkeypatch.setattr(ConvolutionStack, "forward", lambda self, *given: stacked.append(1) or forward(self, *given))
    with products_in("tf32"):
        with_gradients = layers(images)
        with torch.no_grad():
            found = layers(images)
            assert stacked == [1]
            many = layers(images.repeat(100, 1, 1, 1))
        assert stacked == [1] and equal_bits([found, many[9:18]], [with_gradients.detach()] * 2)
        with torch.no_grad(), products_in("float32"):
            layers(images)
    assert stacked == [1] and with_gradients.requires_grad
