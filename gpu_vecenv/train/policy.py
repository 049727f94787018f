"""Policy: a network, the normalisation of its inputs and outputs, and the action distribution of some roles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import NO_CONTEXT, Context, Tower, state_size
from gpu_vecenv.train.distributions import (
    gaussian_log_probs_and_entropies,
    log_probs_and_entropies,
    masked,
    squashed,
)
from gpu_vecenv.train.encoders import EncodedActorCritic, make_encoder, unit_scaled
from gpu_vecenv.train.layers import has_hooks
from gpu_vecenv.train.networks import Activation, ActorCritic
from gpu_vecenv.train.normalizers import Normalizer, ValueNorm
from gpu_vecenv.train.recurrent import RecurrentActorCritic, kept
from gpu_vecenv.train.role_view import RoleView

Precision = Literal["float32", "tf32", "bfloat16"]
NetworkKind = Literal["mlp", "cnn", "entities", "gru", "lstm"]


class Policy(nn.Module):
    """Policy of one or more roles: network, normalisation, action distribution.

    Args:
        game: The game.
        roles: The roles that use this policy.
        network: A module with the ``forward`` of ``ActorCritic``, or with that of ``RecurrentActorCritic`` and its
            ``recurrent_state_size``; with a critic of its own one that returns the parameters of the distribution
            alone, and is not recurrent.
        critic: Maps a state, see ``Context``, to values (…, 1); None: the network has a critic. With ``agent_ids`` the
            state is followed by the row's agent, like the network's input.
        agent_ids: The network's input is one axis, an observation followed by which of the policy's agents the row is
            of: 1 in its place, 0 in those of the others. Not of a recurrent network.
        normalize_obs: Keep running statistics of observations, and normalise the network's input with them; also of the
            critic's states.
        normalize_returns: Keep running statistics of discounted sums of rewards; the network predicts values as
            deviations from their mean, in units of their standard deviation.
        value_norm_beta: In place of these: statistics of returns, see ``ValueNorm``; None: not.
        squash: How Gaussian samples are mapped to the Box.
        bfloat16: Run the network in mixed precision.
        device: Device of weights and statistics.

    Attributes:
        recurrent_state_size: Numbers in an agent's state; 0 if the network is not recurrent.

    Raises:
        ConfigError: The network's ``recurrent_state_size`` is no int >= 0, or not 0 with a critic or ``agent_ids``.
    """

    action_bounds: torch.Tensor
    one_hot: torch.Tensor

    def __init__(
        self,
        game: Env,
        roles: Sequence[str],
        network: nn.Module,
        *,
        critic: nn.Module | None = None,
        agent_ids: bool = False,
        normalize_obs: bool = False,
        normalize_returns: bool = False,
        value_norm_beta: float | None = None,
        squash: Squash = "clip",
        bfloat16: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.view = RoleView(game, roles, device)
        self.network, self.recurrent_state_size = network, getattr(network, "recurrent_state_size", 0)
        if type(self.recurrent_state_size) is not int or self.recurrent_state_size < 0:
            raise ConfigError(
                f"recurrent_state_size of the network of {'+'.join(roles)} is {self.recurrent_state_size!r:.80}; "
                "expected an int, the numbers in the state of a row"
            )
        if self.recurrent_state_size and (critic is not None or agent_ids):
            raise ConfigError(
                f"the network of {'+'.join(roles)} is recurrent, with a central critic or agent_ids; expected one that "
                "is not, or critic 'own' and agent_ids False"
            )
        self.critic, self.agent_ids = critic, agent_ids
        central = normalize_obs and critic is not None
        self.state_normalizer = Normalizer((state_size(game),)) if central else None
        parts = network.parts if isinstance(network, EncodedActorCritic) else None
        entities = () if parts is None else parts.entities
        self.obs_normalizer = Normalizer(self.view.obs_shape, entities) if normalize_obs else None
        self.return_normalizer = Normalizer() if normalize_returns else None
        if value_norm_beta is not None:
            self.return_normalizer = ValueNorm(value_norm_beta)
        self.squash, self.uses_bfloat16 = squash, bfloat16
        self._has_heads = bool(game.layout.action.shape)
        self.register_buffer("action_bounds", torch.tensor(self.view.bounds), persistent=False)
        self.register_buffer("one_hot", torch.eye(self.view.num_agents), persistent=False)
        self.to(device)

    def forward(
        self, obs: torch.Tensor, state: torch.Tensor | None = None, *, context: Context = NO_CONTEXT
    ) -> tuple[torch.Tensor, ...]:
        """Parameters (…, n) of the distribution and values (…), in units of returns; if it is recurrent the next state.

        Args:
            obs: (…, *obs_shape) float32 or uint8.
            state: Of a recurrent policy, (…, recurrent_state_size) float32: what the call before returned, and 0 where
                the observation is the first of an episode.
            context: What the networks read beside the observations: a central critic needs its ``state``.

        Raises:
            ConfigError: ``state`` is missing or the policy is not recurrent, or a recurrent network returned other
                shapes.
        """
        self._check_state(obs, state)
        if self.critic is not None:
            parameters = self.parameters_of(obs, context.agents)
            values = self._of_critic(context).squeeze(-1).expand(parameters.shape[:-1])
            return self._scaled(parameters, values)
        if state is None:
            return self._scaled(*self.of_network(obs, context.agents))
        leading, size = state.shape[:-1], self.recurrent_state_size
        rows = obs.reshape(-1, *self.view.obs_shape)
        found = self.of_network(rows, state=state.reshape(-1, size))
        self._check_recurrent_outputs(found, rows.shape[0])
        parameters, values = self._scaled(*found[:2])
        next_state = found[2].float().reshape(*leading, size)
        return parameters.reshape(*leading, parameters.shape[-1]), values.reshape(leading), next_state

    def sequence(
        self, obs: torch.Tensor, state: torch.Tensor, active: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several steps of a recurrent policy: parameters (steps, rows, n) and values (steps, rows), as of ``forward``.

        Args:
            obs: (steps, rows, *obs_shape).
            state: (rows, recurrent_state_size) float32, for the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
        """
        whole: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = getattr(self.network, "sequence", None)
        if whole is not None and not has_hooks(self.network):
            if self.obs_normalizer is not None:
                obs = self.obs_normalizer(obs)
            with self._autocast(obs):
                parameters, values = whole(obs, state, active)
            return self._scaled(parameters, values)
        steps = []
        for t, is_active in enumerate(active):
            *outputs, state = self(obs[t], state)
            state = kept(state, is_active)
            steps.append(outputs)
        of_steps = [torch.stack(tensors) for tensors in zip(*steps, strict=True)]
        return of_steps[0], of_steps[1]

    def _autocast(self, obs: torch.Tensor) -> torch.autocast:
        return torch.autocast(obs.device.type, torch.bfloat16, enabled=self.uses_bfloat16)

    def _scaled(self, parameters: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A network's outputs in float32, values in units of returns."""
        values = values.float()
        if self.return_normalizer is not None:
            values = values * self.return_normalizer.std + self.return_normalizer.mean.float()
        return parameters.float(), values

    def parameters_of(self, obs: torch.Tensor, agents: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the distribution, (…, n) float32; ``agents`` as in ``Context``."""
        if self.critic is None:
            parameters: torch.Tensor = self(obs, context=Context(agents=agents))[0]
            return parameters
        parameters = self.of_network(obs, agents)
        if not isinstance(parameters, torch.Tensor):
            raise ConfigError(
                f"the network of {'+'.join(self.view.roles)} returns a {type(parameters).__name__}; expected the "
                "parameters of the distribution alone, a tensor, with critic='central'"
            )
        return parameters.float()

    def of_network(
        self, obs: torch.Tensor, agents: torch.Tensor | None = None, state: torch.Tensor | None = None
    ) -> Any:
        """What the network returns for normalised observations, unchecked.

        Args:
            obs: (…, *obs_shape); of a recurrent policy (rows, *obs_shape).
            agents: As in ``Context``.
            state: Of a recurrent policy, (rows, recurrent_state_size).
        """
        if self.obs_normalizer is not None:
            obs = self.obs_normalizer(obs)
        if self.agent_ids or isinstance(self.network, Tower):
            obs = self._with_agents(flat(obs, len(self.view.obs_shape)), agents)
        with self._autocast(obs):
            return self.network(obs) if state is None else self.network(obs, state)

    def _of_critic(self, context: Context) -> torch.Tensor:
        assert self.critic is not None
        if context.state is None:
            raise ValueError("context.state is None; expected the state of a central critic, (…, S)")
        state = context.state if self.state_normalizer is None else self.state_normalizer(context.state)
        rows = self._with_agents(flat(state, 1), context.agents)
        with self._autocast(rows):
            values: torch.Tensor = self.critic(rows)
        return values

    def _with_agents(self, rows: torch.Tensor, agents: torch.Tensor | None) -> torch.Tensor:
        """Rows (…, n) and, with ``agent_ids``, the agent of each."""
        if not self.agent_ids:
            return rows
        ids = self.one_hot if agents is None else self.one_hot[agents]
        leading = torch.broadcast_shapes(rows.shape[:-1], ids.shape[:-1])
        return torch.cat([rows.expand(*leading, -1), ids.expand(*leading, -1)], -1)

    def _check_state(self, obs: torch.Tensor, state: torch.Tensor | None) -> None:
        name, size = "+".join(self.view.roles), self.recurrent_state_size
        if state is None:
            if size:
                raise ConfigError(
                    f"the policy of {name} is recurrent and got no state; expected state=, (…, {size}) float32: what "
                    "the call before returned, and 0 where an episode begins"
                )
            return
        expected = (*obs.shape[: obs.ndim - len(self.view.obs_shape)], size)
        if not size or state.shape != expected or state.dtype != torch.float32:
            raise ConfigError(
                f"state of the policy of {name} is {tuple(state.shape)} {state.dtype}; expected "
                f"{f'{expected} torch.float32' if size else 'None, since it is not recurrent'}"
            )

    def _check_recurrent_outputs(self, found: Sequence[torch.Tensor], rows: int) -> None:
        expected = [(rows, self.view.num_parameters), (rows,), (rows, self.recurrent_state_size)]
        shapes = [tuple(x.shape) for x in found] if isinstance(found, tuple | list) else type(found).__name__
        if shapes != expected:
            raise ConfigError(
                f"the network of {'+'.join(self.view.roles)} returns {shapes} for {rows} rows; expected parameters, "
                f"values and the next state: {expected}"
            )

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
        state: torch.Tensor | None = None,
        greedy: bool = False,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Actions for observations (…, *obs_shape).

        Args:
            obs: float32 or uint8.
            action_mask: (…, n) bool, for games with action masks.
            state: Of a recurrent policy, (…, recurrent_state_size) float32: what the call before returned, and 0 where
                the observation is the first of an episode.
            greedy: Take the most likely action (the mean of a Gaussian) instead of sampling.
            generator: For sampling, on the observations' device; None uses torch's default.

        Returns:
            (…[, heads]) int32 or (…, k) float32, according to the role's action space; of a recurrent policy a pair of
            them and the next state.

        Raises:
            ConfigError: ``state`` is missing, or the policy is not recurrent.
        """
        check_flag("greedy", greedy)
        check_kind("generator", generator, torch.Generator, "a torch.Generator", optional=True)
        if self.critic is not None:
            self._check_state(obs, state)
            parameters, *next_state = [self.parameters_of(obs)]
        else:
            parameters, _, *next_state = self(obs, state)
        actions = self._actions(parameters, action_mask, greedy, generator)
        return (actions, *next_state) if next_state else actions

    def _actions(
        self,
        parameters: torch.Tensor,
        action_mask: torch.Tensor | None,
        greedy: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
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


def flat(rows: torch.Tensor, axes: int) -> torch.Tensor:
    """Rows (…, n) float32, of which uint8 is scaled to [0, 1], with their last axes as one."""
    return unit_scaled(rows.flatten(rows.ndim - axes))


def default_network(
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    shared_trunk: bool = True,
    kind: NetworkKind = "mlp",
    *,
    actor_gain: float = 0.01,
    agent_ids: bool = False,
) -> ActorCritic | EncodedActorCritic | RecurrentActorCritic:
    """The default network of a policy with a critic of its own, of a kind; ``agent_ids`` are of "mlp".

    Raises:
        ConfigError: The kind does not fit the observations, or a recurrent network has no ``hidden_sizes``.
    """
    shape = (num_inputs(view, agent_ids),) if agent_ids else view.obs_shape
    settings: dict[str, Any] = {
        "gaussian": view.continuous,
        "activation": activation,
        "shared_trunk": shared_trunk,
        "actor_gain": actor_gain,
    }
    if kind == "mlp":
        return ActorCritic(shape, _num_outputs(view), hidden_sizes, **settings)
    if kind == "gru" or kind == "lstm":
        return RecurrentActorCritic(shape, _num_outputs(view), hidden_sizes, cell=kind, **settings)
    encoder = functools.partial(make_encoder, kind, view.roles, view.obs_shape, view.obs_parts, activation)
    return EncodedActorCritic(kind, encoder, _num_outputs(view), hidden_sizes, **settings)


def default_actor(
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    *,
    actor_gain: float = 0.01,
    agent_ids: bool = False,
) -> Tower:
    """The default network of a policy with a central critic."""
    return Tower(
        num_inputs(view, agent_ids),
        _num_outputs(view),
        hidden_sizes,
        head_gain=actor_gain,
        gaussian=view.continuous,
        activation=activation,
    )


def central_critic(
    game: Env, view: RoleView, hidden_sizes: Sequence[int], activation: Activation = "tanh", *, agent_ids: bool = False
) -> Tower:
    """The central critic of a policy."""
    inputs = state_size(game) + view.num_agents * agent_ids
    return Tower(inputs, 1, hidden_sizes, head_gain=1.0, activation=activation)


def num_inputs(view: RoleView, agent_ids: bool) -> int:
    """Length of an actor's input as one axis: an observation, and with ``agent_ids`` the agent."""
    length: int = math.prod(view.obs_shape) + view.num_agents * agent_ids
    return length


def _num_outputs(view: RoleView) -> int:
    return view.num_heads if view.continuous else view.num_parameters
