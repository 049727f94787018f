"""The network of JaxMARL's ippo_cnn_overcooked.py in torch, so that both sides train the same one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from gpu_vecenv.train.convolutions import ConvolutionsWithReLU, ImageConvolution
from gpu_vecenv.train.networks import orthogonal

GAIN = 2**0.5  # of hidden layers
FILTERS, KERNELS = 32, (5, 3, 3)


class PublishedCNN(nn.Module):
    """Three convolutions that keep height and width, and a dense layer; the critic has one more, the actor none.

    Args:
        obs_shape: (height, width, channels).
        num_actions: Logits.
        units: Of both dense layers.
    """

    def __init__(self, obs_shape: Sequence[int], num_actions: int, units: int) -> None:
        super().__init__()
        height, width, channels = obs_shape
        layers: list[nn.Module] = []
        for kernel in KERNELS:
            convolution = ImageConvolution((height, width), channels, FILTERS, kernel, padding=kernel // 2)
            nn.init.orthogonal_(convolution.weight, GAIN)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
            channels = FILTERS
        self.convolutions = ConvolutionsWithReLU(*layers)
        self.dense = nn.Sequential(orthogonal(nn.Linear(FILTERS * height * width, units), GAIN), nn.ReLU())
        self.actor = orthogonal(nn.Linear(units, num_actions), 0.01)
        self.critic = nn.Sequential(
            orthogonal(nn.Linear(units, units), GAIN), nn.ReLU(), orthogonal(nn.Linear(units, 1), 1.0)
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (…, height, width, channels) -> logits (…, num_actions) and values (…)."""
        images = obs.reshape(-1, *obs.shape[-3:]).movedim(-1, 1)
        features = self._dense(self.convolutions(images)).reshape(*obs.shape[:-3], -1)
        return self.actor(features), self.critic(features).squeeze(-1)

    def _dense(self, images: torch.Tensor) -> torch.Tensor:
        """``self.dense`` of flattened images; the weights are reordered, as the images have their channels last."""
        layer = self.dense[0]
        assert isinstance(layer, nn.Linear)
        weight = layer.weight.view(-1, *images.shape[1:]).movedim(1, -1).flatten(1)
        features: torch.Tensor = self.dense[1](functional.linear(images.movedim(1, -1).flatten(1), weight, layer.bias))
        return features
