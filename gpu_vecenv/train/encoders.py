"""Default networks of images and of entities: an encoder each, then the layers and heads of a perceptron.

Torch computes them, as operations that CUDA graphs can hold and whose results do not depend on the order of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from gpu_vecenv.declare.obs_parts import EntityList, ObservationParts
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.convolutions import ConvolutionsWithReLU, ImageConvolution
from gpu_vecenv.train.networks import Activation, hidden_layers, orthogonal

EncoderKind = Literal["cnn", "entities"]
# Filters, kernel size, stride and padding of each layer. Of large images: Mnih et al., "Human-level control through
# deep reinforcement learning", 2015. Pooling, as in IMPALA's networks, has a gradient that sums in no fixed order on a
# GPU; strides take its place.
NATURE = ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))
NATURE_SIDE = 36  # the least height and width
SMALL_FILTERS = (16, 32, 32)
DENSE_SIDE = 8  # maps of at most this height and width keep their size
ENTITY_UNITS = 64  # of both layers of an entity's encoder
HIDDEN_GAIN = 2**0.5  # of hidden layers, as in ActorCritic


class ImageEncoder(nn.Module):
    """Convolutions with ReLU: images (…, height, width, channels) to features (…, size).

    From 36 x 36 on these are three layers with kernels of 8, 4 and 3 and strides of 4, 2 and 1. Smaller images have
    three layers of 3 x 3 with padding, whose stride is 2 where their input is higher or wider than 8.

    Args:
        obs_shape: (height, width, channels).
    """

    parts = None

    def __init__(self, obs_shape: Sequence[int]) -> None:
        super().__init__()
        height, width, channels = obs_shape
        layers: list[nn.Module] = []
        for filters, kernel, stride, padding in _convolutions(height, width):
            convolution = ImageConvolution((height, width), channels, filters, kernel, stride, padding)
            nn.init.orthogonal_(convolution.weight, HIDDEN_GAIN)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
            (height, width), channels = convolution.output_shape, filters
        self.convolutions, self.size = ConvolutionsWithReLU(*layers), channels * height * width

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Images (…, height, width, channels) -> (…, size)."""
        images = obs.reshape(-1, *obs.shape[-3:]).movedim(-1, 1)  # without moving the channels in memory
        features: torch.Tensor = self.convolutions(images)
        return features.reshape(*obs.shape[:-3], self.size)


class EntityEncoder(nn.Module):
    """A layer for each entity's numbers and the agent's own, a second layer, then mean and maximum over the entities.

    Places without an entity are left out. The order of the entities does not matter: Zaheer et al., "Deep sets", 2017.

    Args:
        entities: The list.
        own: Size of the agent's own part.
        activation: Of both layers.
    """

    columns: torch.Tensor

    def __init__(self, entities: EntityList, own: int, activation: Activation) -> None:
        super().__init__()
        self.shape, self.presence = (entities.count, entities.features), entities.presence
        self.register_buffer("columns", torch.tensor(entities.columns).flatten(), persistent=False)
        self.of_entity, self.activation = hidden_layers((entities.features, ENTITY_UNITS), activation)
        self.of_own = nn.Linear(own, ENTITY_UNITS, bias=False) if own else None
        if self.of_own is not None:
            nn.init.orthogonal_(self.of_own.weight, HIDDEN_GAIN)
        self.layers = hidden_layers((ENTITY_UNITS, ENTITY_UNITS), activation)
        self.size = 2 * ENTITY_UNITS

    def forward(self, obs: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Observations (…, D) and their own parts (…, own) -> (…, size); 0 where there is no entity."""
        rows = obs.index_select(-1, self.columns).unflatten(-1, self.shape)
        features = self.of_entity(rows)
        if self.of_own is not None:
            features = features + self.of_own(own).unsqueeze(-2)
        features = self.layers(self.activation(features)).float()
        if self.presence is None:
            return torch.cat([features.mean(-2), features.amax(-2)], -1)
        present = (rows[..., self.presence] != 0).unsqueeze(-1)
        count = present.sum(-2)
        mean = torch.where(present, features, 0).sum(-2) / count.clamp(min=1)
        largest = torch.where(present, features, torch.finfo(features.dtype).min).amax(-2)
        return torch.cat([mean, torch.where(count > 0, largest, 0)], -1)


class PartsEncoder(nn.Module):
    """The agent's own part, and the encodings of its lists of entities.

    Args:
        parts: Of the observation.
        activation: Of the entities' layers.
    """

    own_columns: torch.Tensor

    def __init__(self, parts: ObservationParts, activation: Activation) -> None:
        super().__init__()
        own, self.parts = parts.own_columns, parts
        self.register_buffer("own_columns", torch.tensor(own, dtype=torch.int64), persistent=False)
        self.lists = nn.ModuleList(EntityEncoder(entities, len(own), activation) for entities in parts.entities)
        self.size = len(own) + sum(2 * ENTITY_UNITS for _ in parts.entities)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations (…, D) -> (…, size)."""
        own = obs.index_select(-1, self.own_columns)
        return torch.cat([own, *(encoder(obs, own) for encoder in self.lists)], -1)


class EncodedActorCritic(nn.Module):
    """An encoder of observations, hidden layers, and the two heads of ``ActorCritic``.

    Attributes:
        parts: Of the observations, which the encoder takes apart; None: they have none.

    Args:
        kind: "cnn" or "entities".
        encoder: Makes the encoder, whose outputs are (…, ``size``).
        num_outputs: Outputs of the actor: logits, means, or all parameters of Beta distributions.
        hidden_sizes: Units of each hidden layer between encoder and heads.
        gaussian: Append log standard deviations, parameters that do not depend on the observation and start at 0.
        activation: Of the hidden layers.
        shared_trunk: Whether actor and critic share encoder and hidden layers.
        actor_gain: Of the weights of the actor head.
    """

    def __init__(
        self,
        kind: EncoderKind,
        encoder: Callable[[], ImageEncoder | PartsEncoder],
        num_outputs: int,
        hidden_sizes: Sequence[int],
        *,
        gaussian: bool = False,
        activation: Activation = "tanh",
        shared_trunk: bool = True,
        actor_gain: float = 0.01,
    ) -> None:
        super().__init__()
        self.kind = kind

        def trunk() -> nn.Sequential:
            first = encoder()
            return nn.Sequential(first, hidden_layers((first.size, *hidden_sizes), activation))

        self.trunk = trunk()
        self.critic_trunk = None if shared_trunk else trunk()
        first = self.trunk[0]
        assert isinstance(first, ImageEncoder | PartsEncoder)
        self.parts = first.parts
        features = hidden_sizes[-1] if hidden_sizes else first.size
        self.actor = orthogonal(nn.Linear(features, num_outputs), actor_gain)
        self.critic = orthogonal(nn.Linear(features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> parameters (…, n) and values (…)."""
        features = self.trunk(obs)
        outputs = self.actor(features)
        values = self.critic(features if self.critic_trunk is None else self.critic_trunk(obs))
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs, values.squeeze(-1)


def make_encoder(
    kind: EncoderKind,
    roles: Sequence[str],
    obs_shape: Sequence[int],
    parts: ObservationParts | None,
    activation: Activation,
) -> ImageEncoder | PartsEncoder:
    """The encoder of a kind for observations of some roles; ``parts`` are those of all of them, or None.

    Raises:
        ConfigError: The observations are no images, or have no lists of entities.
    """
    name = " and ".join(roles)
    if kind == "cnn":
        if len(obs_shape) != 3:
            raise ConfigError(
                f'network is "cnn", but observations of {name} have shape {tuple(obs_shape)}; expected an image, '
                '(height, width, channels), or network="mlp"'
            )
        return ImageEncoder(obs_shape)
    if parts is None or not parts.entities:
        raise ConfigError(
            f'network is "entities", but the game declares no lists of entities that observations of {name} have; '
            'expected obs_parts such as (Own("velocity", 2), Entities("agent", 3, 2)), or network="mlp"'
        )
    return PartsEncoder(parts, activation)


def _convolutions(height: int, width: int) -> Sequence[tuple[int, int, int, int]]:
    if min(height, width) >= NATURE_SIDE:
        return NATURE
    layers = []
    for filters in SMALL_FILTERS:
        stride = 2 if max(height, width) > DENSE_SIDE else 1
        height, width = ((n + stride - 1) // stride for n in (height, width))
        layers.append((filters, 3, stride, 1))
    return layers
