"""PQN: Gallici et al., "Simplifying deep temporal difference learning", 2024; its configuration and equations.

Q-learning from the rollout alone: no replay buffer and no target network; layer normalisation keeps it stable. A policy
acts epsilon-greedily. Targets are the lambda-returns of the rollout's own Q values, with V(s) = max over a of Q(s, a):

    R(t) = r(t) + gamma ((1 - lambda) V(t + 1) + lambda R(t + 1))

where V is 0 after a termination, and R(t + 1) is V(t + 1) where an episode is truncated or the rollout ends. These are
the returns that ``ppo.advantages`` estimates, of these values: the same kernel computes them. The loss is
(Q(s, a) - R)^2 / 2.

With ``mixing="vdn"`` (Sunehag et al., "Value-decomposition networks for cooperative multi-agent learning", 2018) the
agents of the policy are a team: sums over them take the place of Q and V, and the mean of their rewards that of r.

Shapes: T steps, E environments, C agents of a policy with n choices in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from gpu_vecenv.declare.config import param, with_known_options
from gpu_vecenv.declare.env import Env
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.encoders import make_encoder
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.networks import Activation
from gpu_vecenv.train.policy import num_inputs
from gpu_vecenv.train.ppo import advantages
from gpu_vecenv.train.q_networks import QNetwork, RecurrentQNetwork
from gpu_vecenv.train.q_policy import QPolicy
from gpu_vecenv.train.role_view import RoleView

Mixing = Literal["none", "vdn"]


@with_known_options
@dataclass(frozen=True, kw_only=True)
class PQNConfig(LearnerConfig):
    """Hyperparameters of Gallici et al., "Simplifying deep temporal difference learning", 2024.

    Each policy may have its own. The options marked * in ``docs/hyper_parameters.md`` and in the list of
    ``gpu-vecenv train GAME --help`` belong to the run: all policies must agree on them.

    The optimizer is Adam by default, where the reference implementation has that of ``optimizer="radam"``.
    """

    num_epochs: int = param(2, low=1)  # passes over each iteration's samples
    num_minibatches: int = param(16, low=1)  # per epoch
    learning_rate: float = param(2.5e-4, low=0)  # of the optimizer
    max_grad_norm: float = param(10.0, low=0)  # gradients are scaled down to this norm
    hidden_sizes: tuple[int, ...] = param((128, 128), low=1)  # units of the hidden layers of the default network
    activation: Activation = "relu"  # of the hidden layers
    layer_norm: bool = True  # each hidden layer is normalised in front of its activation, but recurrent ones
    q_lambda: float = param(0.65, low=0, high=1)  # of the returns that are the targets
    epsilon: float = param(1.0, low=0, high=1)  # share of random choices at the start of the run
    final_epsilon: float = param(0.05, low=0, high=1)  # reached linearly
    epsilon_decay: float = param(0.1, low=0, high=1)  # after this fraction of the run
    mixing: Mixing = "none"  # each agent learns by itself, or "vdn": the agents of a policy learn as a team

    algorithm: ClassVar[str] = "pqn"

    @classmethod
    def vdn(cls, **changes: Any) -> PQNConfig:
        """PQN-VDN: the agents of a policy learn the value of what they do together, as a sum over them."""
        return cls(**{"mixing": "vdn", **changes})

    @property
    def learns_as_team(self) -> bool:
        """With VDN."""
        return self.mixing == "vdn"

    @property
    def trace_decay(self) -> float:
        """Of the targets."""
        return self.q_lambda

    def rates(self, progress: float) -> dict[str, float]:
        """Also the share of random choices."""
        done = 1.0 if progress >= self.epsilon_decay else progress / self.epsilon_decay
        return {**super().rates(progress), "epsilon": self.epsilon + (self.final_epsilon - self.epsilon) * done}


class Team(NamedTuple):
    """What the agents of a policy have together in each step, as one agent that learns by itself."""

    rewards: torch.Tensor  # (T, E) float32, as are the next two
    values: torch.Tensor  # before each step
    next_values: torch.Tensor  # after it, before any reset
    active: torch.Tensor  # (T, E) bool: whether any agent is
    ends: torch.Tensor  # (T, E) bool: whether none is after the step
    acting: torch.Tensor  # (T + 1, E) bool: whether any agent acts


def team_of(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminations: torch.Tensor,
    active: torch.Tensor,
    acting: torch.Tensor | None,
) -> Team:
    """Rewards are the mean over all agents, 0 for those that are not active; values the sum over those that act.

    Where none of the team acts, as in the turn of an opponent, it is the sum over all.

    The value after a step is that of the agents that were active in it and did not terminate: of one that was
    truncated it is that of its last observation.

    Args:
        rewards: (T, E, C) float32.
        values: (T + 1, E, C) float32, of each agent's greedy choice.
        terminations: (T, E, C) bool.
        active: (T + 1, E, C) bool.
        acting: (T + 1, E, C) bool; None: all active agents act.
    """
    before, acts = active[:-1], torch.ones_like(active) if acting is None else acts_or_waits(acting)
    return Team(
        torch.where(before, rewards, 0).sum(-1) / rewards.shape[-1],
        torch.where(before & acts[:-1], values[:-1], 0).sum(-1),
        torch.where(before & ~terminations & acts[1:], values[1:], 0).sum(-1),
        before.any(-1),
        ~active[1:].any(-1),
        (torch.ones_like(active) if acting is None else acting).any(-1),
    )


def acts_or_waits(acting: torch.Tensor) -> torch.Tensor:
    """The agents (…, C) of a team whose values add up to its own: those that act, or all where none does."""
    return acting | ~acting.any(-1, keepdim=True)


def team_returns(team: Team, gamma: float, q_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets of a team (T, E), and what they exceed the values of the greedy choices by."""
    no_terminations = torch.zeros_like(team.ends)  # they are in next_values
    numbers = team.rewards, team.values, team.next_values
    errors = advantages(*numbers, no_terminations, team.ends, team.active, gamma, q_lambda, team.acting)
    return errors + team.values, errors


def make_policy(
    game: Env, roles: Sequence[str], config: PQNConfig, network: nn.Module | None, device: torch.device
) -> QPolicy:
    """The policy of some roles as ``config`` describes it, with ``network`` or a default one of ``hidden_sizes``.

    Raises:
        ConfigError: The roles have a Box, or the default network does not fit the observations.
    """
    view = RoleView(game, roles)
    if view.continuous:
        raise ConfigError(
            f"Q-learning needs choices, but {' and '.join(roles)} of {type(game).__name__} have "
            f"{game.layout.action.spaces[roles[0]]}; expected Discrete or MultiDiscrete, or a PPOConfig"
        )
    return QPolicy(
        game,
        roles,
        network or default_network(view, config),
        agent_ids=config.agent_ids,
        normalize_obs=config.normalize_obs,
        squash=config.squash,
        bfloat16=config.precision == "bfloat16",
        device=device,
    )


def default_network(view: RoleView, config: PQNConfig) -> QNetwork | RecurrentQNetwork:
    """The default network of a kind."""
    shape = (num_inputs(view, True),) if config.agent_ids else view.obs_shape
    settings: dict[str, Any] = {
        "head_sizes": view.head_sizes,
        "hidden_sizes": config.hidden_sizes,
        "activation": config.activation,
        "layer_norm": config.layer_norm,
    }
    kind = config.network
    if kind == "gru" or kind == "lstm":
        return RecurrentQNetwork(shape, cell=kind, **settings)
    if kind != "mlp":
        settings["encoder"] = make_encoder(kind, view.roles, view.obs_shape, view.obs_parts, config.activation)
    return QNetwork(shape, **settings)
