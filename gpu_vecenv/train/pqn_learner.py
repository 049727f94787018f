"""PQNLearner: what PQN adds to a learner. ``pqn.py`` has the equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.learner import Learner, Loss
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.pqn import PQNConfig, acts_or_waits, team_of, team_returns
from gpu_vecenv.train.q_policy import QPolicy, chosen_values
from gpu_vecenv.train.rollout_storage import Rollout


class QLoss:
    """Half the squared errors of the Q values of samples, or of the sums over teams, against the rollout's returns.

    Args:
        policy: The policy.
        rollout: Has the samples.
        together: Agents of a team, whose samples are side by side; 1: each agent by itself.
        counted: Which samples count: (n,) int64 to (n / together, together) bool.
    """

    def __init__(
        self, policy: Policy, rollout: Rollout, together: int, counted: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._view, self._rollout, self._together, self._counted = policy.view, rollout, together, counted

    def __call__(
        self, indices: torch.Tensor, moments: torch.Tensor, parameters: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``Loss``; ``moments[3]`` is the number of samples, or of teams, of the minibatch."""
        data, view, count = self._rollout, self._view, moments[3].clamp(min=1).float()

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            """Those of the samples, of a tensor (T, E, A, …) or (T + 1, E, A, …)."""
            return tensor.flatten(0, 2)[indices]

        mask = None if data.action_mask is None else view.mask(rows(data.action_mask))
        actions = rows(data.draws).view(len(indices), -1)[:, : view.num_heads]
        q_values = parameters.detach().requires_grad_()
        chosen = chosen_values(q_values, actions, view.head_sizes, mask)
        counted = self._counted(indices)
        of_team = torch.where(counted, chosen.view(-1, self._together), 0).sum(1)
        counts = counted.any(1)
        returns = rows(data.returns).view(-1, self._together)[:, 0]
        errors = torch.where(counts, of_team - returns, 0)
        loss = 0.5 * errors.square().sum() / count
        (gradient,) = torch.autograd.grad(loss, q_values)
        metrics = torch.stack([loss, of_team.sum() / count])  # of_team is 0 where none counts
        return gradient, torch.zeros_like(values), metrics.detach()


class PQNLearner(Learner[PQNConfig]):
    """Trains one policy by PQN, with torch."""

    policy: QPolicy
    loss_metrics = ("q_loss", "q_value", "grad_norm")

    def __init__(self, policy: QPolicy, config: PQNConfig, rollout: Rollout, **settings: Any) -> None:
        self.is_team = config.learns_as_team
        layout = rollout.env.game.layout
        if self.is_team and policy.view.num_agents == 1 < max(layout.roles[role] for role in policy.view.roles):
            raise ConfigError(
                f"mixing is 'vdn', but {policy.view.name} is a single agent of {' and '.join(policy.view.roles)}; "
                "expected a policy of the whole team, sharing='role' or 'all', or mixing='none'"
            )
        self.together = policy.view.num_agents if self.is_team else 1
        super().__init__(policy, config, rollout, **settings)

    def make_loss(self, chunk: int) -> Loss:
        """By torch."""
        return QLoss(self.policy, self.rollout, self.together, self.counted)

    def make_begin(self) -> Callable[[], None]:
        """By torch."""
        start, end = self.schedules[0]

        def begin() -> None:
            self.learning_rate.copy_(start + (end - start) * self.progress[0])
            self.metric_sums.zero_()
            torch.mul(self.iteration, self.config.num_epochs, out=self.epoch)
            self.skip_update.copy_((self._stopped != 0).reshape(()))
            self.iteration += 1
            self.progress.copy_((self.iteration.double() / self.num_iterations).clamp(max=1))

        return begin

    def begin_rollout(self) -> None:
        """Write the policy's epsilon."""
        config, progress = self.config, self.progress[0]
        decay = config.epsilon_decay
        done = (progress / decay).clamp(max=1) if decay else torch.ones_like(progress)
        self.policy.epsilon.copy_(config.epsilon + (config.final_epsilon - config.epsilon) * done)

    def counted(self, indices: torch.Tensor) -> torch.Tensor:
        """Which of the samples ``indices`` (n,) count, (n / together, together) bool: those of active agents.

        Of a team those that act, or all where none does. An agent or team that does not act, in games with turns or
        team reward, learns what it can expect there: its draw changes nothing.
        """
        active, acting = self.rollout.learned.flatten()[indices].view(-1, self.together), self.rollout.acting
        if not self.is_team or acting is None:
            return active
        return active & acts_or_waits(acting.flatten()[indices].view(-1, self.together))

    def update_statistics(self) -> None:
        """Of a team after its returns are computed."""
        if self.is_team:
            data, agents = self.rollout, self.policy.view.agents
            tensors = data.rewards, data.values, data.terminations, data.active
            rewards, values, terminations, active = (x[:, :, agents] for x in tensors)
            acting = None if data.acting is None else data.acting[:, :, agents]
            team = team_of(rewards, values, terminations, active, acting)
            returns, errors = team_returns(team, self.config.gamma, self.config.q_lambda)
            data.returns[:, :, agents] = returns[..., None]
            data.advantages[:, :, agents] = errors[..., None]
        super().update_statistics()

    def shuffle(self) -> None:
        """As for every algorithm; then the numbers of samples, or of teams, that count in each minibatch."""
        super().shuffle()
        counted = self.counted(self.order).any(1).view(self.config.num_minibatches, -1)
        self.moments[:, 3] = counted.sum(1)
