"""Policy: a network, the normalisation of its inputs and outputs, and the action distribution of some agents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gpu_vecenv.declare.arguments import check_flag, check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import NO_CONTEXT, Context, Tower, state_size
from gpu_vecenv.train.distributions import (
    box_log_probs_and_entropies,
    has_log_std,
    log_probs_and_entropies,
    masked,
    mean_draws,
    random_draws,
    squashed,
)
from gpu_vecenv.train.encoders import EncodedActorCritic, make_encoder
from gpu_vecenv.train.layers import has_hooks
from gpu_vecenv.train.networks import Activation, ActorCritic
from gpu_vecenv.train.normalizers import Normalizer, ValueNorm, unit_scaled
from gpu_vecenv.train.q_networks import QNetwork
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentTower, kept
from gpu_vecenv.train.role_view import RoleView

Precision = Literal["float32", "tf32", "bfloat16"]
NetworkKind = Literal["mlp", "cnn", "entities", "gru", "lstm"]
OBS_TYPES = (torch.float32, torch.uint8)


def check_tensor(
    name: str,
    tensor: Any,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    row: tuple[int, ...],
    batch: tuple[int, ...] | None = None,
) -> None:
    """Raise TypeError or ValueError unless it is a tensor (*batch, *row), with any batch if that is None."""
    expected = f"a torch tensor on {device}"
    if not isinstance(tensor, torch.Tensor):
        cure = f": torch.as_tensor({name}, device={str(device)!r})" if isinstance(tensor, np.ndarray) else ""
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected {expected}{cure}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    shape = tuple(tensor.shape)
    first = len(shape) - len(row)
    if first < 0 or shape[first:] != row or batch not in (None, shape[:first]):
        numbers = ", ".join(map(str, (*(("…",) if batch is None else batch), *row)))
        raise ValueError(f"{name} has shape {shape}; expected ({numbers})")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {expected}, the policy's device")


class Policy(nn.Module):
    """Policy of one or more roles, or of some agents: network, normalisation, action distribution.

    Args:
        game: The game.
        roles: The roles that use this policy, or names of single agents, such as "tagger_0".
        network: A module with the ``forward`` of ``ActorCritic``, or with that of ``RecurrentActorCritic`` and its
            ``recurrent_state_size``; with a critic of its own one that returns the parameters of the distribution
            without values.
        critic: Maps a state, see ``Context``, to values (…, 1); None: the network has a critic. With
            ``recurrent_state_size`` it has the ``forward`` of ``RecurrentTower``. With ``agent_ids`` the state is
            followed by the row's agent, like the network's input.
        agent_ids: The network's input is one axis, an observation followed by which of the policy's agents the row is
            of: 1 in its place, 0 in those of the others.
        normalize_obs: Keep running statistics of observations, and normalise the network's input with them; also of the
            critic's states.
        normalize_returns: Keep running statistics of discounted sums of rewards; the network predicts values as
            deviations from their mean, in units of their standard deviation.
        value_norm_beta: In place of these: statistics of returns, see ``ValueNorm``; None: not.
        squash: The distribution of a Box's draws and how they are mapped to it, see ``Sampler``.
        bfloat16: Run the network in mixed precision.
        device: Device of weights and statistics.

    Attributes:
        acting_state_size: Numbers in an agent's state when it acts, those of the network; 0 if that is not recurrent.
        recurrent_state_size: Numbers in its state in training, in which those of a central critic follow.
        torch_reason: Why no kernels compute it, whatever its network, in a few words; None: they may.

    Raises:
        ConfigError: The network's ``recurrent_state_size`` is no int >= 0.
    """

    action_bounds: torch.Tensor
    one_hot: torch.Tensor
    torch_reason: str | None = None

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
        self.network, self.critic, self.agent_ids = network, critic, agent_ids
        self.acting_state_size: int = state_size_of(network, f"the network of {self.view.name}")
        of_critic = 0 if critic is None else state_size_of(critic, f"the critic of {self.view.name}")
        self.recurrent_state_size: int = self.acting_state_size + of_critic
        central = normalize_obs and critic is not None
        self.state_normalizer = Normalizer((state_size(game),)) if central else None
        parts = network.parts if isinstance(network, EncodedActorCritic | QNetwork) else None
        entities = () if parts is None else parts.entities
        self.obs_normalizer = Normalizer(self.view.obs_shape, entities) if normalize_obs else None
        self.return_normalizer = Normalizer() if normalize_returns else None
        if value_norm_beta is not None:
            self.return_normalizer = ValueNorm(value_norm_beta)
        self.obs_scale = game.layout.observation.scale
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
            ValueError: ``context`` has no state, which a central critic needs.
        """
        self._check_state(obs, state, self.recurrent_state_size)
        leading = obs.shape[: obs.ndim - len(self.view.obs_shape)]
        if self.critic is None:
            parameters, values, *next_state = self._call(
                self.network, self._inputs(obs, context.agents), state, leading
            )
            return *self._scaled(parameters, values), *next_state
        of_actor, of_critic = self._split(state)
        parameters, *next_state = self._of_actor(obs, of_actor, context.agents)
        values, *rest = self._call(self.critic, self._critic_inputs(context, leading), of_critic, leading)
        if state is not None:
            next_state = [torch.cat([*next_state, *rest], -1)]
        return *self._scaled(parameters, values.squeeze(-1).expand(leading)), *next_state

    def central_values(self, context: Context, leading: Sequence[int]) -> torch.Tensor:
        """Values (*leading) in units of returns by a central critic without memory, as of ``forward``.

        Args:
            context: What the critic reads.
            leading: The leading axes of the observations: the last one counts agents unless ``context`` numbers them.
        """
        assert self.critic is not None
        (values,) = self._call(self.critic, self._critic_inputs(context, leading), None, leading)
        return self._scaled_values(values.squeeze(-1)).expand(leading)

    def sequence(
        self, obs: torch.Tensor, state: torch.Tensor, active: torch.Tensor, *, context: Context = NO_CONTEXT
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Several steps of a recurrent policy: parameters (steps, rows, n) and values (steps, rows), as of ``forward``.

        Args:
            obs: (steps, rows, *obs_shape).
            state: (rows, recurrent_state_size) float32, for the first step.
            active: (steps, rows) bool; the state after a step in which it is False is 0.
            context: What the networks read beside the observations, with these leading axes.
        """
        of_actor, of_critic = (state, None) if self.critic is None else self._split(state)
        outputs = self.outputs_of_sequence(obs, of_actor, active, context.agents)
        if self.critic is not None:
            rows = self._critic_inputs(context, active.shape)
            values = self._sequence(self.critic, rows, of_critic, active)[0].squeeze(-1)
            outputs = outputs[0], values.expand(active.shape)
        return self._scaled(*outputs)

    def outputs_of_sequence(
        self, obs: torch.Tensor, state: torch.Tensor | None, active: torch.Tensor, agents: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Of the network alone, see ``sequence``: parameters and, unless the critic is central, values."""
        return self._sequence(self.network, self._inputs(obs, agents), state, active)

    def acting(
        self, obs: torch.Tensor, state: torch.Tensor | None = None, agents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What acting needs, without a central critic: parameters (…, n) float32, and of a recurrent policy the state.

        Args:
            obs: (…, *obs_shape) float32 or uint8.
            state: (…, acting_state_size) float32, see ``forward``; None if that is 0.
            agents: As in ``Context``.
        """
        if self.critic is None:
            parameters, _, *next_state = self(obs, state, context=Context(agents=agents))
        else:
            self._check_state(obs, state, self.acting_state_size)
            parameters, *next_state = self._of_actor(obs, state, agents)
            parameters = parameters.float()
        return parameters, next_state[0] if next_state else None

    def parameters_of(self, obs: torch.Tensor, agents: torch.Tensor | None = None) -> torch.Tensor:
        """Parameters of the distribution of a policy that acts without a state, see ``acting``."""
        return self.acting(obs, agents=agents)[0]

    def _autocast(self, obs: torch.Tensor) -> torch.autocast:
        return torch.autocast(obs.device.type, torch.bfloat16, enabled=self.uses_bfloat16)

    def _scaled(self, parameters: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A network's outputs in float32, values in units of returns."""
        return parameters.float(), self._scaled_values(values)

    def _scaled_values(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float()
        if self.return_normalizer is None:
            return values
        return values * self.return_normalizer.std + self.return_normalizer.mean.float()

    def _split(self, state: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The states of the network and of the central critic; None for one that has none."""
        if state is None:
            return None, None
        sizes = self.acting_state_size, self.recurrent_state_size - self.acting_state_size
        of_actor, of_critic = state.split(sizes, -1)
        return of_actor if sizes[0] else None, of_critic if sizes[1] else None

    def of_network(
        self, obs: torch.Tensor, agents: torch.Tensor | None = None, state: torch.Tensor | None = None
    ) -> Any:
        """What the network returns for normalised observations, unchecked.

        Args:
            obs: (…, *obs_shape); of a recurrent network (rows, *obs_shape).
            agents: As in ``Context``.
            state: Of a recurrent network, (rows, acting_state_size).
        """
        return self._raw(self.network, self._inputs(obs, agents), state)

    def _raw(self, module: nn.Module, inputs: torch.Tensor, state: torch.Tensor | None) -> Any:
        """What the network or the critic returns."""
        with self._autocast(inputs):
            return module(inputs) if state is None else module(inputs, state)

    def _inputs(self, obs: torch.Tensor, agents: torch.Tensor | None) -> torch.Tensor:
        """What the network gets for observations."""
        obs = unit_scaled(obs, self.obs_scale) if self.obs_normalizer is None else self.obs_normalizer(obs)
        if self.agent_ids or isinstance(self.network, Tower | RecurrentTower):
            obs = self._with_agents(obs.flatten(obs.ndim - len(self.view.obs_shape)), agents)
        return obs

    def _critic_inputs(self, context: Context, leading: Sequence[int]) -> torch.Tensor:
        """What the central critic gets, (*leading, n); without memory once where rows share a state, (…, n)."""
        if context.state is None:
            raise ValueError("context.state is None; expected the state of a central critic, (…, S)")
        of_states = self.state_normalizer
        state = unit_scaled(context.state, self.obs_scale) if of_states is None else of_states(context.state)
        rows = self._with_agents(state, context.agents)
        of_each_row = self.recurrent_state_size > self.acting_state_size  # values depend on the critic's state too
        return rows.expand(*leading, rows.shape[-1]) if of_each_row else rows

    def _of_actor(
        self, obs: torch.Tensor, state: torch.Tensor | None, agents: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Parameters and, if the network is recurrent, its next state, with a central critic."""
        leading = obs.shape[: obs.ndim - len(self.view.obs_shape)]
        outputs = self._call(self.network, self._inputs(obs, agents), state, leading)
        if state is None and not isinstance(outputs[0], torch.Tensor):
            raise ConfigError(
                f"the network of {self.view.name} returns a {type(outputs[0]).__name__}; expected the "
                "parameters of the distribution alone, a tensor, with critic='central'"
            )
        return outputs

    def _call(
        self, module: nn.Module, inputs: torch.Tensor, state: torch.Tensor | None, leading: Sequence[int]
    ) -> tuple[Any, ...]:
        """Outputs of the network or the critic, (*leading, …), and of a recurrent one the next state."""
        if state is None:
            outputs = self._raw(module, inputs, None)
            if module is not self.network or self.critic is not None:
                return (outputs,)
            if len(outputs) != 2:
                raise ConfigError(
                    f"the network of {self.view.name} returns {len(outputs)} outputs; expected parameters and values, "
                    "and recurrent_state_size = n if the third one is the next state"
                )
            return tuple(outputs)
        rows = inputs.reshape(-1, *inputs.shape[len(leading) :])
        found = self._raw(module, rows, state.reshape(-1, state.shape[-1]))
        self._check_recurrent_outputs(module, found, rows.shape[0])
        *outputs, next_state = found
        return *(x.reshape((*leading, *x.shape[1:])) for x in outputs), next_state.float().reshape(
            (*leading, next_state.shape[-1])
        )

    def _sequence(
        self, module: nn.Module, inputs: torch.Tensor, state: torch.Tensor | None, active: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Outputs of the network or the critic for several steps, (steps, rows, …)."""
        if state is None:
            return self._call(module, inputs, None, active.shape)
        whole: Callable[..., Any] | None = getattr(module, "sequence", None)
        if whole is not None and not has_hooks(module):
            with self._autocast(inputs):
                outputs = whole(inputs, state, active)
            return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        steps = []
        for t, is_active in enumerate(active):
            *of_step, state = self._call(module, inputs[t], state, active.shape[1:])
            state = kept(state, is_active)
            steps.append(of_step)
        return tuple(torch.stack(tensors) for tensors in zip(*steps, strict=True))

    def _with_agents(self, rows: torch.Tensor, agents: torch.Tensor | None) -> torch.Tensor:
        """Rows (…, n) and, with ``agent_ids``, the agent of each."""
        if not self.agent_ids:
            return rows
        ids = self.one_hot if agents is None else self.one_hot[agents]
        leading = torch.broadcast_shapes(rows.shape[:-1], ids.shape[:-1])
        return torch.cat([rows.expand(*leading, -1), ids.expand(*leading, -1)], -1)

    def _check_state(self, obs: torch.Tensor, state: torch.Tensor | None, size: int) -> None:
        name = self.view.name
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

    def _check_recurrent_outputs(self, module: nn.Module, found: Any, rows: int) -> None:
        of_actor = [] if module is self.critic else [(rows, self.view.num_parameters)]
        of_critic = [(rows, 1)] if module is self.critic else [(rows,)] if self.critic is None else []
        expected = [*of_actor, *of_critic, (rows, state_size_of(module))]
        shapes = [tuple(x.shape) for x in found] if isinstance(found, tuple | list) else type(found).__name__
        if shapes != expected:
            what = "values" if module is self.critic else "parameters, values" if self.critic is None else "parameters"
            raise ConfigError(
                f"the {'critic' if module is self.critic else 'network'} of {self.view.name} returns "
                f"{shapes} for {rows} rows; expected {what} and the next state: {expected}"
            )

    def distribution(
        self, outputs: torch.Tensor, action_mask: torch.Tensor | None, *, greedy: bool = False
    ) -> torch.Tensor:
        """Parameters (…, n) for a ``Sampler``, of the network's ``outputs`` (…, n), which give forbidden choices 0.

        Args:
            outputs: What ``parameters_of`` returns.
            action_mask: (…, n) bool, for games with masks.
            greedy: The most likely choices will be taken.
        """
        return masked(outputs, action_mask)

    def state_values(
        self, outputs: torch.Tensor, values: torch.Tensor, action_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Values of states (…), of what the network returns for them and the choices that masks (…, n) allow."""
        return values

    @property
    def value_scale(self) -> torch.Tensor | float:
        """Unit of the value loss: the standard deviation of discounted sums of rewards, or 1."""
        return 1.0 if self.return_normalizer is None else self.return_normalizer.std

    def log_probs_and_entropies(
        self, parameters: torch.Tensor, draws: torch.Tensor, action_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (B,) float32 of ``draws`` (B, heads) under ``parameters`` (B, n)."""
        if self.view.continuous:
            return box_log_probs_and_entropies(parameters, draws, self.squash)
        return log_probs_and_entropies(parameters, draws, self.view.head_sizes, action_mask)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy a ``state_dict`` into the weights.

        Raises:
            ConfigError: Names or shapes differ, or there are NaN or infinite values. Nothing has changed.
        """
        own, found = ({n: tuple(x.shape) for n, x in sorted(w.items())} for w in (self.state_dict(), weights))
        if own != found:
            raise ConfigError(f"weights for {self.view.name} are {found}; expected those of this policy: {own}")
        if bad := [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]:
            raise ConfigError(f"weights for {self.view.name} have NaN or infinite values in {', '.join(bad)}")
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
        """Actions for observations.

        Args:
            obs: (…, *obs_shape) float32 or uint8; of a policy with ``agent_ids`` (…, agents of the policy, *obs_shape).
            action_mask: (…, n) bool, for games with action masks.
            state: Of a recurrent policy, (…, acting_state_size) float32: what the call before returned, and 0 where
                the observation is the first of an episode.
            greedy: Take the most likely action (of a Box the mean of the distribution) instead of sampling.
            generator: For sampling, on the observations' device; None uses torch's default.

        Returns:
            (…[, heads]) int32 or (…, k) float32, according to the role's action space; of a recurrent policy a pair of
            them and the next state.

        Raises:
            ConfigError: ``state`` is missing, or the policy is not recurrent.
            TypeError, ValueError: ``obs`` is no tensor, or of another dtype, shape or device.
        """
        check_flag("greedy", greedy)
        check_kind("generator", generator, torch.Generator, "a torch.Generator", optional=True)
        each_agent = (self.view.num_agents,) if self.acts_for_all_agents else ()
        check_tensor("obs", obs, self.one_hot.device, OBS_TYPES, (*each_agent, *self.view.obs_shape))
        return self._act(obs, action_mask, state, greedy, generator)

    @property
    def acts_for_all_agents(self) -> bool:
        """Whether ``act`` takes the observations of all of the policy's agents together."""
        return self.agent_ids

    def _act(
        self,
        obs: torch.Tensor,
        action_mask: torch.Tensor | None,
        state: torch.Tensor | None,
        greedy: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As ``act``, of arguments that are as they must be."""
        parameters, next_state = self.acting(obs, state)
        actions = self._actions(parameters, action_mask, greedy, generator)
        return actions if next_state is None else (actions, next_state)

    def _actions(
        self,
        parameters: torch.Tensor,
        action_mask: torch.Tensor | None,
        greedy: bool,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        if self.view.continuous:
            draws = mean_draws(parameters, self.squash) if greedy else random_draws(parameters, self.squash, generator)
            return squashed(draws, self.action_bounds, self.squash)
        heads = []
        of_sampler = self.distribution(parameters, action_mask, greedy=greedy)
        for logits in of_sampler.split(list(self.view.head_sizes), -1):
            # The Gumbel-max trick: the argmax of logits plus this noise is a sample.
            noise = 0 if greedy else -torch.empty_like(logits).exponential_(generator=generator).log()
            heads.append((logits + noise).argmax(-1).int())
        return torch.stack(heads, -1) if self._has_heads else heads[0]


def state_size_of(module: nn.Module, what: str = "a network") -> int:
    """``recurrent_state_size`` of a network or critic, 0 without one; ConfigError unless it is an int >= 0."""
    size: Any = getattr(module, "recurrent_state_size", 0)
    if type(size) is not int or size < 0:
        raise ConfigError(
            f"recurrent_state_size of {what} is {size!r:.80}; expected an int, the numbers in the state of a row"
        )
    return size


def default_network(
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    shared_trunk: bool = True,
    kind: NetworkKind = "mlp",
    *,
    squash: Squash = "clip",
    actor_gain: float = 0.01,
    agent_ids: bool = False,
    post_hidden_sizes: Sequence[int] = (),
) -> ActorCritic | EncodedActorCritic | RecurrentActorCritic:
    """The default network of a policy with a critic of its own, of a kind; ``agent_ids`` not of "cnn" and "entities".

    Raises:
        ConfigError: The kind does not fit the observations, or a recurrent network has no ``hidden_sizes``.
    """
    shape = (num_inputs(view, agent_ids),) if agent_ids else view.obs_shape
    settings: dict[str, Any] = {
        "gaussian": view.continuous and has_log_std(squash),
        "activation": activation,
        "shared_trunk": shared_trunk,
        "actor_gain": actor_gain,
    }
    if kind == "mlp":
        return ActorCritic(shape, _num_outputs(view, squash), hidden_sizes, **settings)
    if kind == "gru" or kind == "lstm":
        settings |= {"cell": kind, "post_hidden_sizes": post_hidden_sizes}
        return RecurrentActorCritic(shape, _num_outputs(view, squash), hidden_sizes, **settings)
    encoder = functools.partial(make_encoder, kind, view.roles, view.obs_shape, view.obs_parts, activation)
    return EncodedActorCritic(kind, encoder, _num_outputs(view, squash), hidden_sizes, **settings)


def default_actor(
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    kind: NetworkKind = "mlp",
    *,
    squash: Squash = "clip",
    actor_gain: float = 0.01,
    agent_ids: bool = False,
    post_hidden_sizes: Sequence[int] = (),
) -> Tower | RecurrentTower:
    """The default network of a policy with a central critic, of a kind: "mlp", "gru" or "lstm"."""
    inputs, outputs = num_inputs(view, agent_ids), _num_outputs(view, squash)
    settings = {"head_gain": actor_gain, "gaussian": view.continuous and has_log_std(squash)}
    return _tower(inputs, outputs, hidden_sizes, activation, kind, post_hidden_sizes, **settings)


def central_critic(
    game: Env,
    view: RoleView,
    hidden_sizes: Sequence[int],
    activation: Activation = "tanh",
    kind: NetworkKind = "mlp",
    *,
    agent_ids: bool = False,
    post_hidden_sizes: Sequence[int] = (),
) -> Tower | RecurrentTower:
    """The central critic of a policy, of a kind as its network."""
    inputs = state_size(game) + view.num_agents * agent_ids
    return _tower(inputs, 1, hidden_sizes, activation, kind, post_hidden_sizes, head_gain=1.0)


def _tower(
    inputs: int,
    outputs: int,
    hidden_sizes: Sequence[int],
    activation: Activation,
    kind: NetworkKind,
    post_hidden_sizes: Sequence[int],
    **settings: Any,
) -> Tower | RecurrentTower:
    if kind == "gru" or kind == "lstm":
        settings |= {"cell": kind, "post_hidden_sizes": post_hidden_sizes}
        return RecurrentTower(inputs, outputs, hidden_sizes, activation=activation, **settings)
    return Tower(inputs, outputs, hidden_sizes, activation=activation, **settings)


def num_inputs(view: RoleView, agent_ids: bool) -> int:
    """Length of an actor's input as one axis: an observation, and with ``agent_ids`` the agent."""
    length: int = math.prod(view.obs_shape) + view.num_agents * agent_ids
    return length


def _num_outputs(view: RoleView, squash: Squash) -> int:
    return view.num_heads if view.continuous and has_log_std(squash) else view.num_parameters
