"""A forward and backward pass of a network of small images, by torch, by matrix products and by kernels.

    python3 tests/gpu/convolution_speed.py RESULTS.json

The network is that of JaxMARL's ippo_cnn_overcooked.py, in TF32. Medians and quartiles of ten runs in microseconds, as
CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from measurements import Measurements, arguments

from benchmarks.cnn import PublishedCNN
from gpu_vecenv.engine.timing import captured, run_seconds, spread
from gpu_vecenv.train import convolutions
from gpu_vecenv.train.convolution_kernels import kernels_on
from gpu_vecenv.train.graph import on_stream

ACTIONS, UNITS = 6, 64
# Height, width, channels, images.
SIZES = ((5, 8, 26, 128), (5, 8, 26, 2048), (5, 8, 26, 32_768), (4, 5, 26, 16_384))
QUICK = ((4, 5, 3, 2),)
# The fewest images that are multiplied, and whether kernels convolve them.
WAYS = {"convolutions": (2**62, False), "products": (0, False), "kernels": (2**62, True)}


def row_of(height: int, width: int, channels: int, images: int, device: torch.device) -> dict[str, Any]:
    """Times of all ways, and of a forward pass alone."""
    obs = torch.rand((images, height, width, channels), device=device)
    row: dict[str, Any] = {}
    for name, (fewest, by_kernels) in WAYS.items():
        convolutions.PRODUCT_IMAGES = fewest
        convolutions.kernels_on = kernels_on if by_kernels else lambda *_: None
        network = PublishedCNN((height, width, channels), ACTIONS, UNITS).to(device)

        def both(network: PublishedCNN = network) -> None:
            network.zero_grad(set_to_none=False)
            logits, values = network(obs)
            (logits.sum() + values.sum()).backward()

        @torch.no_grad()
        def forward(network: PublishedCNN = network) -> None:
            network(obs)

        both()
        for key, call in ((f"{name}_us", both), (f"{name}_forward_us", forward)):
            row |= spread(key, [run * 1e6 for run in run_seconds(captured(call, device), device)], 1)
    return row


def main() -> None:
    """Measure what the file lacks."""
    given = arguments(__doc__)
    stream = torch.cuda.Stream(given.device) if given.device.type == "cuda" else None  # as a trainer's
    measurements = Measurements(given, precision="tf32")
    for height, width, channels, images in QUICK if given.quick else SIZES:
        key = {"cells": [height, width], "channels": channels, "images": images}
        with on_stream(stream, given.device, allow_tf32=True):
            measurements.measure(key, lambda: row_of(height, width, channels, images, given.device))  # noqa: B023


if __name__ == "__main__":
    main()
