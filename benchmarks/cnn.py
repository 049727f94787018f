"""The network of JaxMARL's ippo_cnn_overcooked.py in torch, so that both sides train the same one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gpu_vecenv.train.convolutions import ConvolutionsWithReLU, ImageConvolution
from gpu_vecenv.train.layers import through
from gpu_vecenv.train.networks import hidden_layers, orthogonal

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
        self.dense = hidden_layers((FILTERS * height * width, units), "relu")
        self.actor = orthogonal(nn.Linear(units, num_actions), 0.01)
        self.critic_dense = hidden_layers((units, units), "relu")
        self.critic = orthogonal(nn.Linear(units, 1), 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (…, height, width, channels) -> logits (…, num_actions) and values (…)."""
        images = self.convolutions(obs.reshape(-1, *obs.shape[-3:]).movedim(-1, 1))
        rows = images.movedim(1, -1).flatten(1)  # channels last, as in the published network and in memory
        features = through(self.dense, rows)
        values = self.critic(through(self.critic_dense, features))
        leading = obs.shape[:-3]
        return self.actor(features).reshape(*leading, -1), values.reshape(leading)
