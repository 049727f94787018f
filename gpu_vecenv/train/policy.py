"""Policies: a network, the normalisation in front of it and the distribution behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.running_statistics import merge_moments
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.layers import NO_ACTIVATION, heads, is_plain, is_supported_mlp, layer, through

Activation = Literal["tanh", "relu"]
Precision = Literal["float32", "tf32", "bfloat16"]
OBS_CLIP = 10.0  # normalised observations are clamped to ±this: one outlier must not drown the others


class ActorCritic(nn.Module):
    """A multi-layer perceptron that ends in the parameters of a distribution and a value.

    Any module that does so may take its place: ``forward`` maps observations (…, *obs_shape), float32 or uint8, to a
    pair of float32 tensors, parameters (…, n) and values (…). For discrete actions the parameters are logits, head
    after head; for a Box of k numbers they are k means and then k logarithms of standard deviations, where the Box's
    bounds count as -1 and 1. It draws no random numbers and must not look at tensors from the host (a module that does
    is run without CUDA graphs).

    Args:
        obs_shape: Shape of one agent's observation; several axes are flattened, uint8 is scaled to [0, 1].
        num_outputs: Outputs of the actor: logits, or means.
        hidden_sizes: Units of each hidden layer.
        gaussian: Add the logarithms of standard deviations, which are weights of their own and 0 at first.
        activation: Of the hidden layers.
        shared_trunk: Whether actor and critic share the hidden layers.

    Weights are orthogonal, with gains as in Andrychowicz et al., "What matters in on-policy reinforcement learning?",
    2021: sqrt(2) inside, 0.01 for the actor's outputs, 1 for the value.
    """

    fused = False  # whether gradients come from the kernels of layers.py: a learner says so while it differentiates

    def __init__(
        self,
        obs_shape: Sequence[int],
        num_outputs: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        gaussian: bool = False,
        activation: Activation = "tanh",
        shared_trunk: bool = True,
    ) -> None:
        super().__init__()
        self.obs_shape = tuple(obs_shape)
        sizes = [math.prod(self.obs_shape), *hidden_sizes]
        self.trunk = _layers(sizes, activation)
        self.critic_trunk = None if shared_trunk else _layers(sizes, activation)
        self.actor = _orthogonal(nn.Linear(sizes[-1], num_outputs), 0.01)
        self.critic = _orthogonal(nn.Linear(sizes[-1], 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> parameters (…, n) and values (…)."""
        rows = obs.flatten(obs.ndim - len(self.obs_shape))
        rows = rows.float() / 255 if obs.dtype == torch.uint8 else rows
        if self.fused and torch.is_grad_enabled() and self._may_fuse(rows):
            return self._fused(rows)
        features = self.trunk(rows)
        if self.critic_trunk is None:  # one product for both: the features, the largest tensor, are read once
            weight, bias = (
                torch.cat(pair) for pair in zip(self.actor.parameters(), self.critic.parameters(), strict=True)
            )
            outputs, values = nn.functional.linear(features, weight, bias).tensor_split((-1,), -1)
        else:
            outputs, values = self.actor(features), self.critic(self.critic_trunk(rows))
        if self.log_std is not None:
            outputs = torch.cat([outputs.float(), self.log_std.expand_as(outputs)], -1)
        return outputs, values.squeeze(-1)

    def _may_fuse(self, rows: torch.Tensor) -> bool:
        """Not in mixed precision; nor where somebody has changed the layers, or is told of their calls."""
        trunks = [self.trunk] if self.critic_trunk is None else [self.trunk, self.critic_trunk]
        plain = all(map(is_supported_mlp, trunks)) and is_plain(self.actor) and is_plain(self.critic)
        return (
            plain and rows.ndim == 2 and rows.dtype == torch.float32 and not torch.is_autocast_enabled(rows.device.type)
        )

    def _fused(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same numbers up to rounding, of rows (n, inputs)."""
        features = through(self.trunk, rows)
        actor, critic = ((head.weight, head.bias) for head in (self.actor, self.critic))
        if self.critic_trunk is not None:
            outputs = layer(features, *actor, NO_ACTIVATION)
            values = layer(through(self.critic_trunk, rows), *critic, NO_ACTIVATION).squeeze(-1)
            if self.log_std is not None:
                outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
            return outputs, values
        if self.log_std is None:
            return heads(features, *actor, *critic)
        no_weight = torch.zeros_like(self.actor.weight, requires_grad=False)  # what depends on no feature is a bias
        return heads(features, *actor, no_weight, self.log_std, *critic)


class RoleView:
    """Where the agents of some roles lie in a game's tensors.

    ``agents`` is their slice of the agent axis, ``obs_slice`` their observation's part of a row, ``columns`` their part of
    the parameter axis, ``head_sizes`` the choices of each of their heads (empty for a Box).

    Raises:
        ConfigError: The roles are unknown, not adjacent, or differ in observations or actions.
    """

    def __init__(self, game: Env, roles: Sequence[str], device: torch.device | None = None) -> None:
        name, known = type(game).__name__, list(game.layout.roles)
        if unknown := [role for role in roles if role not in known]:
            raise ConfigError(f"unknown role {', '.join(map(repr, unknown))} of {name}; the roles are {known}")
        first, action = roles[0], game.layout.action
        for role in roles:
            shapes, sizes = game.layout.observation.shapes, action.sizes
            if shapes[role] != shapes[first] or sizes[role] != sizes[first]:
                raise ConfigError(
                    f"{role!r} of {name} has observations {shapes[role]} and {sizes[role]} choices, {first!r} has "
                    f"{shapes[first]} and {sizes[first]}: give each a policy of its own"
                )
        slices = [game.layout.role_slices[role] for role in roles]
        if any(after.start != before.stop for before, after in pairwise(slices)):
            raise ConfigError(
                f"{' and '.join(roles)} of {name} are not adjacent among {known}, in this order: they cannot share"
            )
        self.roles, self.agents = tuple(roles), slice(slices[0].start, slices[-1].stop)
        self.num_agents = self.agents.stop - self.agents.start
        self.obs_slice, self.obs_shape = game.layout.observation.own(first), game.layout.observation.shapes[first]
        self.continuous, self.num_heads = action.continuous, len(action.sizes[first])
        self.head_sizes = () if action.continuous else action.sizes[first]
        self.parameter_columns: slice | torch.Tensor = slice(0, 2 * self.num_heads)
        if not action.continuous:
            widest, offset, columns = action.head_sizes, 0, list[int]()
            for head, size in enumerate(self.head_sizes):
                columns += range(offset, offset + size)
                offset += widest[head]
            whole = columns == list(range(len(columns)))
            self.parameter_columns = slice(0, len(columns)) if whole else torch.tensor(columns, device=device)
        self.num_parameters = 2 * self.num_heads if action.continuous else sum(self.head_sizes)

    def obs(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a game's observations (num_envs, num_agents, *shape), these agents' own: (num_envs, count, *obs_shape)."""
        return rows[(slice(None), self.agents, *self.obs_slice)]

    def mask(self, action_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Of a game's masks (…, num_logits), the columns of these agents."""
        return None if action_mask is None else action_mask[..., self.parameter_columns]


class Normalizer(nn.Module):
    """Running mean and variance of all rows taken in, weighted equally; in float64 on the device, saved with a policy.

    Args:
        shape: Of one row.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))  # weight of the first mean and variance

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation, (*shape) float32."""
        return (self.var + 1e-8).sqrt().float()

    def moments(self, rows: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Number, sum and sum of squares of the ``counted`` (n,) bool among ``rows`` (n, *shape), about the mean.

        (1 + 2 * size,) float64. Those of several batches, or of several processes, add up.
        """
        deviations = torch.where(counted.view(-1, *[1] * self.mean.ndim), rows.double() - self.mean, 0)
        return torch.cat(
            [counted.sum()[None].double(), deviations.sum(0).flatten(), deviations.square().sum(0).flatten()]
        )

    def update_from_moments(self, moments: torch.Tensor) -> None:
        """Take in the rows of ``moments``; without rows, or where one of them was not finite, nothing changes."""
        moments = torch.where(moments.isfinite().all(), moments, 0)
        size = moments[0]
        delta, squares = (moments[1:] / size.clamp(min=1)).view(2, *self.mean.shape)
        var = (squares - delta.square()).clamp(min=0)
        own = (self.mean, self.var, self.count)
        for old, new in zip(own, merge_moments(*own, size, delta, var), strict=True):
            old.copy_(new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (…, *shape) with mean 0 and variance 1, clamped to ±10, float32."""
        return ((x - self.mean.float()) / self.std).clamp(-OBS_CLIP, OBS_CLIP)


class Policy(nn.Module):
    """What acts for the agents of one or several roles: network, normalisation, distribution.

    Args:
        game: The game.
        roles: Those it acts for.
        network: See ``ActorCritic`` for what it must do.
        normalize_obs: Keep running statistics of observations and show the network normalised ones.
        normalize_returns: Keep those of returns; the network's value is then in units of their standard deviation.
        squash: How draws of a Gaussian are brought into a Box.
        bfloat16: Run the network in mixed precision.
        device: Where it lives.
    """

    action_bounds: torch.Tensor

    def __init__(
        self,
        game: Env,
        roles: Sequence[str],
        network: nn.Module,
        *,
        normalize_obs: bool = False,
        normalize_returns: bool = False,
        squash: Squash = "clip",
        bfloat16: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.view = RoleView(game, roles, device)
        self.network = network
        self.obs_normalizer = Normalizer(self.view.obs_shape) if normalize_obs else None
        self.return_normalizer = Normalizer() if normalize_returns else None
        self.squash, self._bfloat16 = squash, bfloat16
        self._has_heads = bool(game.layout.action.shape)
        self.register_buffer(
            "action_bounds", torch.tensor([game.layout.action.low, game.layout.action.high]), persistent=False
        )
        self.to(device)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> parameters (…, n) of the distribution and values (…), in units of returns."""
        if self.obs_normalizer is not None:
            obs = self.obs_normalizer(obs)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self._bfloat16):
            parameters, values = self.network(obs)
        values = values.float()
        if self.return_normalizer is not None:
            values = values * self.return_normalizer.std + self.return_normalizer.mean.float()
        return parameters.float(), values

    @property
    def value_scale(self) -> torch.Tensor | float:
        """What a value loss is measured in: the standard deviation of returns, or 1."""
        return 1.0 if self.return_normalizer is None else self.return_normalizer.std

    def log_probs_and_entropies(
        self, parameters: torch.Tensor, draws: torch.Tensor, action_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of draws (B, heads) under parameters (B, n), summed over the heads: two (B,) f32 tensors."""
        if self.view.continuous:
            return gaussian_log_probs_and_entropies(parameters, draws, self.squash)
        return log_probs_and_entropies(parameters, draws, self.view.head_sizes, action_mask)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take a ``state_dict``, in place.

        Raises:
            ConfigError: Names or shapes differ, or there are NaN or infinite numbers. Nothing has changed.
        """
        own, found = ({n: tuple(x.shape) for n, x in sorted(w.items())} for w in (self.state_dict(), weights))
        if own != found:
            raise ConfigError(f"weights for {'+'.join(self.view.roles)} are {found}; this policy has {own}")
        if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
            raise ConfigError(
                f"weights for {'+'.join(self.view.roles)} hold NaN or infinite numbers in {', '.join(bad)}"
            )
        self.load_state_dict(dict(weights))

    @torch.no_grad()
    def act(
        self,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        *,
        greedy: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Actions for observations (…, *obs_shape).

        Args:
            obs: float32 or uint8.
            action_mask: (…, n) bool, where the game has masks.
            greedy: Take the likeliest action (the mean of a Gaussian) instead of drawing one.
            generator: Of the draws, on the observations' device; None takes torch's own.

        Returns:
            (…[, heads]) int32 or (…, k) float32, as the role's action space says.
        """
        parameters = self(obs)[0]
        if self.view.continuous:
            means, log_stds = parameters.chunk(2, -1)
            noise = 0 if greedy else torch.empty_like(means).normal_(generator=generator)
            return squashed(means + log_stds.exp() * noise, self.action_bounds, self.squash)
        heads = []
        for logits in masked(parameters, action_mask).split(list(self.view.head_sizes), -1):
            # Gumbel, 1954: adding this noise and taking the largest is a draw.
            noise = 0 if greedy else -torch.empty_like(logits).exponential_(generator=generator).log()
            heads.append((logits + noise).argmax(-1).int())
        return torch.stack(heads, -1) if self._has_heads else heads[0]


def squashed(draws: torch.Tensor, action_bounds: torch.Tensor, squash: Squash) -> torch.Tensor:
    """Draws (…, k) of a Gaussian as actions in the Box ``action_bounds`` (2, k)."""
    low, high = action_bounds
    inside = draws.tanh() if squash == "tanh" else draws.clamp(-1, 1)
    middle, half = low / 2 + high / 2, high / 2 - low / 2  # halves first: a wide Box must not overflow
    return torch.clamp(middle + half * inside, low, high)


def default_network(
    view: RoleView, hidden_sizes: Sequence[int], activation: Activation = "tanh", shared_trunk: bool = True
) -> ActorCritic:
    """The network of a policy that was given none."""
    outputs = view.num_heads if view.continuous else view.num_parameters
    return ActorCritic(
        view.obs_shape,
        outputs,
        hidden_sizes,
        gaussian=view.continuous,
        activation=activation,
        shared_trunk=shared_trunk,
    )


def masked(logits: torch.Tensor, action_mask: torch.Tensor | None) -> torch.Tensor:
    """Logits in which choices that ``action_mask`` (same shape, bool) forbids have probability 0."""
    # Not -inf: a row without any choice, as of an agent without some head, would become NaN and its gradient too.
    return logits if action_mask is None else logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)


def log_probs_and_entropies(
    logits: torch.Tensor, actions: torch.Tensor, head_sizes: Sequence[int], action_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of actions (B, heads) under logits (B, sum(head_sizes)), summed over the heads: two (B,) f32 tensors.

    A head that a row lacks, one without a choice that ``action_mask`` (same shape as the logits) allows, adds nothing.
    """
    actions = actions.clamp(min=0).long()  # -1 has no distribution: its logits are NaN, and so is its log-probability
    log_probs = logits.new_zeros(len(logits))
    entropies = logits.new_zeros(len(logits))
    masks = [None] * len(head_sizes) if action_mask is None else action_mask.split(list(head_sizes), dim=-1)
    for head, (part, mask) in enumerate(zip(logits.split(list(head_sizes), dim=-1), masks, strict=True)):
        all_log_probs = masked(part, mask).log_softmax(-1)
        log_prob = all_log_probs.gather(-1, actions[:, head, None]).squeeze(-1)
        finite = all_log_probs.clamp(min=-1e30)  # an excluded choice adds 0 * this; no weight makes it overflow
        entropy = -(all_log_probs.exp() * finite).sum(-1)
        if mask is not None:
            exists = mask.any(-1)
            log_prob, entropy = torch.where(exists, log_prob, 0), torch.where(exists, entropy, 0)
        log_probs, entropies = log_probs + log_prob, entropies + entropy
    return log_probs, entropies


def gaussian_log_probs_and_entropies(
    parameters: torch.Tensor, draws: torch.Tensor, squash: Squash
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of draws (B, k) under means and log standard deviations (B, 2k), summed over k: two (B,) f32 tensors.

    With "clip" the density is that of the draw itself: clipping is the environment's affair, and every draw beyond a
    bound has its own gradient. With "tanh" it is that of tanh(draw) (Haarnoja et al., "Soft actor-critic", 2018,
    appendix C), written so that no digit is lost where tanh is near 1. The entropy is the Gaussian's own in both.
    """
    means, log_stds = parameters.chunk(2, -1)
    scaled = (draws - means) * (-log_stds).exp()
    log_probs = -0.5 * scaled.square() - log_stds - 0.5 * math.log(2 * math.pi)
    if squash == "tanh":
        log_probs = log_probs - 2 * (math.log(2) - draws - nn.functional.softplus(-2 * draws))
    entropies = log_stds + 0.5 * math.log(2 * math.pi * math.e)
    return log_probs.sum(-1), entropies.sum(-1)


def _layers(sizes: Sequence[int], activation: Activation) -> nn.Sequential:
    units = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [_orthogonal(nn.Linear(inputs, outputs), math.sqrt(2)), units()]
    return nn.Sequential(*layers)


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
