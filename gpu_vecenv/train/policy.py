"""Policy: a network, the normalisation of its inputs and outputs, and the action distribution of some roles."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.obs_parts import EntityList
from gpu_vecenv.engine.running_statistics import merge_moments
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.distributions import (
    gaussian_log_probs_and_entropies,
    log_probs_and_entropies,
    masked,
    squashed,
)
from gpu_vecenv.train.encoders import EncodedActorCritic, make_encoder
from gpu_vecenv.train.networks import Activation, ActorCritic

Precision = Literal["float32", "tf32", "bfloat16"]
NetworkKind = Literal["mlp", "cnn", "entities"]
VAR_EPS = 1e-8  # added to variances
OBS_CLIP = 10.0  # normalised observations are clamped to [-OBS_CLIP, OBS_CLIP]: limits the influence of outliers


class RoleView:
    """The parts of a game's tensors that belong to the agents of some roles.

    ``agents`` is their slice of the agent axis, ``obs_slice`` the slices of the observation axes that they use,
    ``obs_parts`` the parts of their observations (None if they declare none, or different ones), ``parameter_columns``
    their columns of the parameter axis, ``continuous`` whether they have a Box, ``head_sizes`` the choices of each of
    their heads (empty for a Box), ``bounds`` those of their Box.

    Raises:
        ConfigError: The roles are unknown, not adjacent, or differ in observations or actions.
    """

    def __init__(self, game: Env, roles: Sequence[str], device: torch.device | None = None) -> None:
        name, known = type(game).__name__, list(game.layout.roles)
        if unknown := [role for role in roles if role not in known]:
            raise ConfigError(f"unknown role {', '.join(map(repr, unknown))} of {name}; the roles are {known}")
        first, action = roles[0], game.layout.action
        for role in roles:
            kinds = {name: (action.sizes[name], action.bounds.get(name)) for name in (role, first)}
            shapes, spaces = game.layout.observation.shapes, action.spaces
            if shapes[role] != shapes[first] or kinds[role] != kinds[first]:
                raise ConfigError(
                    f"{role!r} of {name} has observations {shapes[role]} and actions {spaces[role]}, {first!r} has "
                    f"{shapes[first]} and {spaces[first]}; expected equal ones: configure one policy for each"
                )
        slices = [game.layout.role_slices[role] for role in roles]
        if any(after.start != before.stop for before, after in pairwise(slices)):
            raise ConfigError(
                f"a policy cannot be shared by {' and '.join(roles)} of {name}; expected adjacent "
                f"roles in the order of {known}"
            )
        self.roles, self.agents = tuple(roles), slice(slices[0].start, slices[-1].stop)
        self.num_agents = self.agents.stop - self.agents.start
        self.obs_slice, self.obs_shape = game.layout.observation.own(first), game.layout.observation.shapes[first]
        parts = [game.layout.observation.parts.get(role) for role in roles]
        self.obs_parts = parts[0] if all(part == parts[0] for part in parts) else None
        self.continuous, self.num_heads = first in action.bounds, len(action.sizes[first])
        self.bounds = action.bounds.get(first, ((), ()))
        self.head_sizes = () if self.continuous else action.sizes[first]
        self.parameter_columns: slice | torch.Tensor = slice(0, 2 * self.num_heads)
        if not self.continuous:
            widest, offset, columns = action.head_sizes, 0, list[int]()
            for head, size in enumerate(self.head_sizes):
                columns += range(offset, offset + size)
                offset += widest[head]
            whole = columns == list(range(len(columns)))
            self.parameter_columns = slice(0, len(columns)) if whole else torch.tensor(columns, device=device)
        self.num_parameters = 2 * self.num_heads if self.continuous else sum(self.head_sizes)

    def obs(self, rows: torch.Tensor) -> torch.Tensor:
        """These agents' observations (num_envs, count, *obs_shape), a view of (num_envs, num_agents, *shape)."""
        return rows[(slice(None), self.agents, *self.obs_slice)]

    def mask(self, action_mask: torch.Tensor | None) -> torch.Tensor | None:
        """These agents' columns of a game's masks (…, num_logits); None for a Box, which has no choices to mask."""
        return None if action_mask is None or self.continuous else action_mask[..., self.parameter_columns]


class Normalizer(nn.Module):
    """Running mean and variance of all rows seen, weighted equally; float64 buffers, saved with the policy.

    Args:
        shape: Shape of one row.
        entities: Lists of entities in a row. Each is normalised with the statistics of all entities of its list, so
            that their order does not matter, and a feature that tells their presence stays as it is.
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor

    def __init__(self, shape: Sequence[int] = (), entities: Sequence[EntityList] = ()) -> None:
        super().__init__()
        self.entities = tuple(entities)
        for index, one in enumerate(self.entities):
            self.register_buffer(f"columns_{index}", torch.tensor(one.columns), persistent=False)
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer(
            "count", torch.tensor(1e-4, dtype=torch.float64)
        )  # weight of the initial mean and variance

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation, (*shape) float32."""
        return (self.var + VAR_EPS).sqrt().float()

    def moments(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Count, sum and sum of squares of the deviations from the mean, (1 + 2 * size,) float64.

        Of ``rows`` (n, *shape) where ``mask`` (n,) bool is True. Moments of several batches or processes are summed.
        """
        deviations = torch.where(mask.view(-1, *[1] * self.mean.ndim), rows.double() - self.mean, 0)
        return torch.cat([mask.sum()[None].double(), deviations.sum(0).flatten(), deviations.square().sum(0).flatten()])

    def update_from_moments(self, moments: torch.Tensor) -> None:
        """Update from the moments of a batch; nothing changes if it has no rows or its moments are not finite."""
        moments = torch.where(moments.isfinite().all(), moments, 0)
        size = moments[0]
        delta, squares = (moments[1:] / size.clamp(min=1)).view(2, *self.mean.shape)
        var = (squares - delta.square()).clamp(min=0)
        own = (self.mean, self.var, self.count)
        for old, new in zip(own, merge_moments(*own, size, delta, var), strict=True):
            old.copy_(new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (…, *shape) with mean 0 and variance 1, clamped to [-10, 10], float32."""
        mean, std = self.statistics()
        return ((x - mean) / std).clamp(-OBS_CLIP, OBS_CLIP)

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows are normalised with: mean and standard deviation, (*shape) float32 each."""
        if not self.entities:
            return self.mean.float(), self.std
        mean, var = self.mean.clone(), self.var.clone()
        for index, one in enumerate(self.entities):
            columns: torch.Tensor = getattr(self, f"columns_{index}")
            means, variances = mean[columns], var[columns]  # (count, features)
            center = means.mean(0)
            variance = variances.mean(0) + (means - center).square().mean(0)
            for statistic, of_list in ((mean, center), (var, variance)):
                statistic.index_copy_(0, columns.flatten(), of_list.repeat(one.count))
            if one.presence is not None:
                mean.index_fill_(0, columns[:, one.presence], 0)
                var.index_fill_(0, columns[:, one.presence], 1)
        return mean.float(), (var + VAR_EPS).sqrt().float()


class Policy(nn.Module):
    """Policy of one or more roles: network, normalisation, action distribution.

    Args:
        game: The game.
        roles: The roles that use this policy.
        network: A module with the ``forward`` of ``ActorCritic``.
        normalize_obs: Keep running statistics of observations, and normalise the network's input with them.
        normalize_returns: Keep running statistics of discounted sums of rewards; the network predicts values as
            deviations from their mean, in units of their standard deviation.
        squash: How Gaussian samples are mapped to the Box.
        bfloat16: Run the network in mixed precision.
        device: Device of weights and statistics.
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
        parts = network.parts if isinstance(network, EncodedActorCritic) else None
        entities = () if parts is None else parts.entities
        self.obs_normalizer = Normalizer(self.view.obs_shape, entities) if normalize_obs else None
        self.return_normalizer = Normalizer() if normalize_returns else None
        self.squash, self.uses_bfloat16 = squash, bfloat16
        self._has_heads = bool(game.layout.action.shape)
        self.register_buffer("action_bounds", torch.tensor(self.view.bounds), persistent=False)
        self.to(device)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (…, *obs_shape) -> parameters (…, n) of the distribution and values (…), in units of returns."""
        if self.obs_normalizer is not None:
            obs = self.obs_normalizer(obs)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.uses_bfloat16):
            parameters, values = self.network(obs)
        values = values.float()
        if self.return_normalizer is not None:
            values = values * self.return_normalizer.std + self.return_normalizer.mean.float()
        return parameters.float(), values

    @property
    def value_scale(self) -> torch.Tensor | float:
        """Unit of the value loss: the standard deviation of discounted sums of rewards, or 1."""
        return 1.0 if self.return_normalizer is None else self.return_normalizer.std

    def log_probs_and_entropies(
        self, parameters: torch.Tensor, draws: torch.Tensor, action_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (B,) float32 of ``draws`` (B, heads) under ``parameters`` (B, n)."""
        if self.view.continuous:
            return gaussian_log_probs_and_entropies(parameters, draws, self.squash)
        return log_probs_and_entropies(parameters, draws, self.view.head_sizes, action_mask)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy a ``state_dict`` into the weights.

        Raises:
            ConfigError: Names or shapes differ, or there are NaN or infinite values. Nothing has changed.
        """
        own, found = ({n: tuple(x.shape) for n, x in sorted(w.items())} for w in (self.state_dict(), weights))
        if own != found:
            raise ConfigError(
                f"weights for {'+'.join(self.view.roles)} are {found}; expected those of this policy: {own}"
            )
        if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
            raise ConfigError(
                f"weights for {'+'.join(self.view.roles)} have NaN or infinite values in {', '.join(bad)}"
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
            action_mask: (…, n) bool, for games with action masks.
            greedy: Take the most likely action (the mean of a Gaussian) instead of sampling.
            generator: For sampling, on the observations' device; None uses torch's default.

        Returns:
            (…[, heads]) int32 or (…, k) float32, according to the role's action space.
        """
        check_flag("greedy", greedy)
        check_kind("generator", generator, torch.Generator, "a torch.Generator", optional=True)
        parameters = self(obs)[0]
        if self.view.continuous:
            means, log_stds = parameters.chunk(2, -1)
            noise = 0 if greedy else torch.empty_like(means).normal_(generator=generator)
            return squashed(means + log_stds.exp() * noise, self.action_bounds, self.squash)
        heads = []
        for logits in masked(parameters, action_mask).split(list(self.view.head_sizes), -1):
            # The Gumbel-max trick: the argmax of logits plus this noise is a sample.
            noise = 0 if greedy else -torch.empty_like(logits).exponential_(generator=generator).log()
            heads.append((logits + noise).argmax(-1).int())
        return torch.stack(heads, -1) if self._has_heads else heads[0]


def default_network(
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    shared_trunk: bool = True,
    kind: NetworkKind = "mlp",
) -> ActorCritic | EncodedActorCritic:
    """The default network of a policy, of a kind.

    Raises:
        ConfigError: The kind does not fit the observations.
    """
    outputs = view.num_heads if view.continuous else view.num_parameters
    settings: dict[str, Any] = {"gaussian": view.continuous, "activation": activation, "shared_trunk": shared_trunk}
    if kind == "mlp":
        return ActorCritic(view.obs_shape, outputs, hidden_sizes, **settings)
    encoder = functools.partial(make_encoder, kind, view.roles, view.obs_shape, view.obs_parts, activation)
    return EncodedActorCritic(kind, encoder, outputs, hidden_sizes, **settings)
