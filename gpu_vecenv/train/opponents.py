"""Opponents: in a share of the environments one side learns, and snapshots, scripts or random play have the others.

Shapes: E environments, A agents, R ranges of S environments, the last R * S ones; M opponents: all slots of snapshots,
then the other members. What is drawn and counted stays on the device, so that iterations can be CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import FunctionActions, check_fits_agents, divided, positions_of
from gpu_vecenv.train.fixed_policy import RANDOM, STILL, noop_of
from gpu_vecenv.train.host_kernels import HostKernels
from gpu_vecenv.train.opponent_kernels import results_launch, uniform_numbers
from gpu_vecenv.train.opponent_ranges import Ranges
from gpu_vecenv.train.opponent_weights import Snapshots
from gpu_vecenv.train.opponents_config import SNAPSHOTS, Opponent, OpponentsConfig
from gpu_vecenv.train.perceptron import PerceptronKernels, WeightRanges
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.policy_kernels import PolicyKernels
from gpu_vecenv.train.recurrent import kept
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.train.rollout_storage import Rollout

MIN_GAIN_GAMES = 100  # against the newest snapshot before its results can lead to another one


class Opponents:
    """Who plays in the ranges of environments, how, and with which results.

    Attributes:
        ranges: The environments.
        learns: (E, A) bool: agents whose samples are learned from.
        plays: (E, A) bool: agents whom an opponent other than a snapshot has.
        opponent: (R,) int64, the opponent of each range; -1 before the first.
        snapshots: Policy -> its snapshots; none unless they are among the members.
        acts_itself: Whether ``act`` changes any actions.
        results: (sides, M, 3) int64: wins of the learning side, draws, games, since the opponent is in its slot.

    Args:
        config: The opponents.
        ranges: Of the rollout's environments.
        rollout: The rollout, with ``learned``.
        policies: Of the agents that a network plays.
        parameters: (E, A, sampler.num_parameters) float32, of the distributions of a step.
        seed: Of the choice of opponents.
        squash: Of the sampler.
        kernels: Policy -> what computes it; None: torch. Snapshots have kernels where these compute whole networks.
        precision: Of the matrix products.

    Raises:
        ConfigError: An opponent does not match the game, or cannot be copied.
    """

    def __init__(
        self,
        config: OpponentsConfig,
        ranges: Ranges,
        rollout: Rollout,
        policies: Mapping[str, Policy],
        parameters: torch.Tensor,
        seed: int,
        squash: str,
        kernels: Mapping[str, PolicyKernels | None],
        precision: Precision,
    ) -> None:
        self.config, self.ranges, self.rollout, self.seed = config, ranges, rollout, seed
        env, device = rollout.env, parameters.device
        num_envs, num_agents = env.num_envs, env.num_agents
        self._pool = slice(ranges.first, num_envs)
        size = num_envs - ranges.first
        self._size, self._parameters = size, parameters[self._pool]
        self._outputs = torch.zeros_like(self._parameters)
        # Names of the kinds of opponents, and of each opponent its kind.
        self.names = config.names
        slots = config.num_snapshots if SNAPSHOTS in self.names else 0
        others = [k for k, name in enumerate(self.names) if name != SNAPSHOTS]
        self._slots = slots
        kinds = [k for k, name in enumerate(self.names) if name == SNAPSHOTS for _ in range(slots)] + others
        self._kinds = torch.tensor(kinds, device=device)
        self._others = torch.tensor(others, dtype=torch.int64, device=device)
        sides = [ranges.side(number) for number in range(ranges.count)]
        self._sides = torch.tensor(sides, device=device)

        self.learns = torch.ones((num_envs, num_agents), dtype=torch.bool, device=device)
        self.plays = torch.zeros_like(self.learns)
        played = torch.zeros((len(self.names), ranges.count, num_agents), dtype=torch.bool)
        for number, side in enumerate(sides):
            learning = torch.zeros(num_agents, dtype=torch.bool)
            learning[list(ranges.sides[side].agents)] = True
            self.learns[ranges.envs(number)] = learning.to(device)
            for kind, name in enumerate(self.names):
                played[kind, number, list(ranges.plays[name][side])] = True
        self._played = played.to(device)  # (kinds, R, A)
        # Whether a kind plays in a range at all.
        self._available = self._played.any(2)[self._kinds].T.contiguous()  # (R, M)
        self._masks = torch.zeros((len(self.names), size, num_agents), dtype=torch.bool, device=device)

        count = len(kinds)
        self._clock, self._taken = torch.zeros((2,), dtype=torch.int64, device=device)
        self.opponent = torch.full((ranges.count,), -1, device=device)
        self._age = torch.zeros_like(self.opponent)  # iterations since a range has its opponent
        self._ended = torch.zeros(size, dtype=torch.int64, device=device)  # episodes since then
        self.results = torch.zeros((len(ranges.sides), count, 3), dtype=torch.int64, device=device)
        self._sums = torch.zeros((size, 2), dtype=torch.float64, device=device)
        self._counts = torch.zeros((size, 3), dtype=torch.int64, device=device)
        self._draws = torch.zeros((ranges.count, count), dtype=torch.float64, device=device)
        # Of the last rollout, by side and kind.
        self._new_results = torch.zeros((len(ranges.sides), len(self.names), 3), dtype=torch.int64, device=device)
        possible = [bool(ranges.plays[name][side]) for side in range(len(ranges.sides)) for name in self.names]
        self._matches = torch.tensor(possible).nonzero()[:, 0].to(device)
        self._changed = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._find_results = results_launch(rollout, self.learns, ranges.first, sums=self._sums, counts=self._counts)

        self.snapshots = {name: Snapshots(policy, slots, ranges.count) for name, policy in policies.items() if slots}
        # Of the actor of the first range; the others' weights follow.
        self._perceptrons = {
            name: kind(snapshots.actors[0], rollout, precision, snapshots.first_parameters)
            for name, snapshots in self.snapshots.items()
            for kind in (PerceptronKernels, HostKernels)
            if type(kernels[name]) is kind
        }
        self._launches = {
            name: own.forward(num_envs=ranges.size, ranges=weights)
            for name, own in self._perceptrons.items()
            if (weights := self._weight_ranges(self.snapshots[name])).numbers  # none where all others are frozen
        }
        self._states = {
            name: torch.zeros((size, policy.view.num_agents, policy.acting_state_size), device=device)
            for name, policy in policies.items()
            if slots and policy.acting_state_size
        }
        self._actors = [
            _Actors(kind, member, env, size, squash)
            for kind, member in enumerate(config.members)
            if isinstance(member, Opponent)
        ]
        self._kind_of = {name: kind for kind, name in enumerate(self.names)}
        action = env.layout.action
        boxes = [env.layout.agent_roles[agent] in action.bounds for agent in range(num_agents)]
        self._has_box = torch.tensor(boxes, device=device)
        self._noop = self._noops() if STILL in self.names else None
        self.acts_itself = (
            STILL in self.names or (RANDOM in self.names and any(boxes)) or any(one.acts for one in self._actors)
        )

    def _weight_ranges(self, snapshots: Snapshots) -> WeightRanges:
        """The ranges in which a policy's snapshots play."""
        agents = frozenset(snapshots.policy.view.agent_numbers)
        own = [k for k in range(self.ranges.count) if not agents <= self.ranges.sides[self.ranges.side(k)].agents]
        return WeightRanges(own, snapshots.stride_of("float32"), snapshots.stride_of("float64"))

    def _noops(self) -> torch.Tensor:
        """The action of each agent that stands still, (A[, heads])."""
        env = self.rollout.env
        layout = env.layout
        template = self._actions_of(0)[0]
        noops = torch.zeros_like(template)
        for agent, role in enumerate(layout.agent_roles):
            numbers = torch.tensor(noop_of(env.game, role), dtype=noops.dtype)
            noops[agent] = (
                numbers.to(noops.device)
                if noops.ndim == 1
                else torch.nn.functional.pad(numbers, (0, noops.shape[1] - len(numbers))).to(noops.device)
            )
        return noops

    def _actions_of(self, t: int) -> torch.Tensor:
        """Actions of step t in the ranges, (R * S, A[, heads])."""
        return self.rollout.samples[t].actions[self._pool]

    @property
    def match_names(self) -> list[str]:
        """Of the sides that learn and the members they play against, in the order of ``match_results``."""
        names = [f"{side.name}_against_{name}" for side in self.ranges.sides for name in self.names]
        return [names[match] for match in self._matches.tolist()]

    def match_results(self) -> torch.Tensor:
        """Wins, draws and games in the last rollout, one after the other for each of ``match_names``; int64."""
        return self._new_results.flatten(0, 1)[self._matches].flatten()

    @property
    def by_kernels(self) -> tuple[str, ...]:
        """Policies whose snapshots have one launch for the forward passes of all ranges."""
        return tuple(self._launches)

    def why_not_fused(self) -> str | None:
        """Why a rollout takes several launches a step, in a few words; None if it may be one launch."""
        layout = self.rollout.env.layout
        if SNAPSHOTS not in self.names or not {SNAPSHOTS, RANDOM}.issuperset(self.names) or self.acts_itself:
            return "opponents other than snapshots and random choices"
        for snapshots in self.snapshots.values():
            own = frozenset(snapshots.policy.view.agent_numbers)
            if any(side.agents & own and not own <= side.agents for side in self.ranges.sides):
                return "opponents of agents with the same policy"
        if layout.zero_sum and layout.tracks_acting:  # values of an agent are those of the others
            return "opponents in a game of turns"
        return None

    def rollout_tensors(self, name: str) -> dict[str, Any]:
        """What one launch for a rollout takes of a policy's opponents: see ``rollout_policy.cuh``."""
        weights = self._weight_ranges(self.snapshots[name])
        plays = torch.zeros_like(self.opponent, dtype=torch.bool)
        plays[weights.numbers] = True
        return {
            **self._perceptrons[name].common,
            "plays": plays,
            "stride": weights.range_stride,
            "statistics_stride": weights.statistics_stride,
        }

    # Between rollouts

    def skip_current(self, mask: torch.Tensor) -> None:
        """Do not count the episodes that are running where ``mask`` (E,) bool is True."""
        self._sums.masked_fill_(mask[self._pool, None], torch.nan)

    def begin_rollout(self) -> torch.Tensor:
        """Take a snapshot if one is due, and draw the opponents that are; environments that begin anew, (E,) bool.

        The caller resets these, and clears what it keeps of their episodes.
        """
        newest = (self._taken - 1).remainder(max(1, self._slots))
        slot = self._taken.remainder(max(1, self._slots)).view(1)
        takes = torch.zeros(1, dtype=torch.bool, device=self.opponent.device)
        if self._slots:
            takes = (self._clock % self.config.snapshot_interval == 0).view(1)
            if self.config.snapshot_gain is not None:
                against = self.results.index_select(1, newest.view(1)).sum(0)  # (1, 3)
                enough = against[:, 2] >= MIN_GAIN_GAMES
                takes = takes | (enough & (learning_wins(against) > self.config.snapshot_gain))
            for snapshots in self.snapshots.values():
                snapshots.take(slot, takes)
            row = self.results.index_select(1, slot)
            self.results.index_copy_(1, slot, torch.where(takes[:, None], 0, row))
            self._taken += takes[0]
        self.assign(slot, takes)
        self._clock += 1
        self.give_weights()
        changed = self._changed[self._pool]
        for state in self._states.values():
            state.masked_fill_(changed[:, None, None], 0)
        for actors in self._actors:
            actors.clear(changed)
        return self._changed

    def assign(self, slot: torch.Tensor, takes: torch.Tensor) -> None:
        """Draw opponents where they are due; ``slot`` (1,) has another snapshot where ``takes`` (1,)."""
        config, ranges = self.config, self.ranges
        replaced = (self.opponent == slot) & takes  # (R,), whose weights are gone
        ended = self._ended.view(ranges.count, ranges.size).amin(1) > 0
        due = (self.opponent < 0) | replaced | (ended & (self._age >= config.reassign_interval))
        weights = draw_weights(learning_wins(self.results), config.sampling)[self._sides]  # (R, M)
        there = torch.arange(weights.shape[1], device=weights.device)
        usable = self._available & ((there >= self._slots) | (there < self._taken))
        uniform_numbers(self.seed, self._clock, self._draws)
        # The least of exponential variables with these rates: each is the least with a probability in proportion.
        times = torch.where(usable, -self._draws.log() / weights, torch.inf)
        drawn = torch.where(due, times.argmin(1), self.opponent)
        # At first all environments begin anyway.
        changed = due & (self.opponent >= 0) & ((drawn != self.opponent) | replaced)
        self.opponent.copy_(drawn)
        self._age.copy_(torch.where(due, 0, self._age) + 1)
        of_env = changed[:, None].expand(-1, ranges.size).reshape(-1)
        self._changed[self._pool] = of_env
        self._ended.masked_fill_(due[:, None].expand(-1, ranges.size).reshape(-1), 0)
        self._sums.masked_fill_(of_env[:, None], 0)

    def give_weights(self) -> None:
        """Give those who act the weights of the ranges' opponents, and mark their agents."""
        slots = self.opponent.clamp(0, max(0, self._slots - 1))
        kinds = self._kinds[self.opponent.clamp(min=0)]
        for snapshots in self.snapshots.values():
            snapshots.give(slots, kinds == self._kind_of.get(RANDOM, -1))
        for kind in range(len(self.names)):
            masks = self._played[kind] & (kinds == kind)[:, None]  # (R, A)
            self._masks[kind] = masks[:, None].expand(-1, self.ranges.size, -1).flatten(0, 1)
        self.plays[self._pool] = self._masks.index_select(0, self._others).any(0)

    def end_rollout(self) -> None:
        """Count the episodes that ended, and mark the samples that are learned from."""
        data, ranges = self.rollout, self.ranges
        torch.logical_and(data.active, self.learns, out=data.learned)
        self._find_results()
        counts = self._counts.view(ranges.count, ranges.size, 3).sum(1)
        opponent = self.opponent.clamp(min=0)
        self.results.view(-1, 3).index_add_(0, self._sides * self.results.shape[1] + opponent, counts)
        self._new_results.zero_()
        self._new_results.view(-1, 3).index_add_(0, self._sides * len(self.names) + self._kinds[opponent], counts)
        self._ended += self._counts[:, 2]

    # In a rollout

    def __call__(self, t: int) -> None:
        """Write the parameters of the opponents' distributions in step t."""
        data, pool = self.rollout, self._pool
        for snapshots in self.snapshots.values():
            self._forward(snapshots, t)
        if self._slots:
            self._select(self._kind_of[SNAPSHOTS])
        if RANDOM in self.names:
            even = torch.zeros_like(self._outputs)
            if data.action_mask is not None:
                own = ~data.action_mask[t][pool]
                even[..., : own.shape[-1]].masked_fill_(own, torch.finfo(even.dtype).min)
            self._outputs.copy_(even)
            self._select(self._kind_of[RANDOM])
        mask = None if data.action_mask is None else data.action_mask[t][pool]
        for actors in self._actors:
            if actors.policies:
                actors.write_parameters(data.obs[t][pool], data.active[t][pool], mask, self._outputs)
                self._select(actors.kind)

    def _select(self, kind: int) -> None:
        """Use ``_outputs`` for the agents that opponents of a kind play."""
        mask = self._masks[kind][..., None]
        self._parameters.copy_(torch.where(mask, self._outputs, self._parameters))

    def _forward(self, snapshots: Snapshots, t: int) -> None:
        """The forward passes of a policy's snapshots into ``_outputs``: one launch, or torch."""
        data, ranges, view, pool = self.rollout, self.ranges, snapshots.policy.view, self._pool
        states = self._states.get(view.name)
        if (launch := self._launches.get(view.name)) is not None:
            launch(
                obs=data.obs[t][pool].flatten(0, 1)[(slice(None), *view.obs_slice)],
                action_mask=None if data.action_mask is None or view.continuous else data.action_mask[t][pool],
                outputs=self._outputs,
                values=None,
            )
            return
        numbers = self._weight_ranges(snapshots).numbers
        if numbers and snapshots.all_actors is not None:
            mask = None if data.action_mask is None else view.mask(data.action_mask[t][pool][:, view.agents])
            outputs = snapshots.all_actors(view.obs(data.obs[t][pool]).unflatten(0, (ranges.count, -1)))
            parameters = snapshots.policy.distribution(outputs.flatten(0, 1), mask)
            view.write_parameters(parameters, self._outputs)
            return
        for number in numbers:
            envs = ranges.envs(number)
            own = slice(envs.start - ranges.first, envs.stop - ranges.first)
            obs, actor = view.obs(data.obs[t][envs]), snapshots.actors[number]
            outputs, state = actor.acting(obs, None if states is None else states[own])
            if states is not None:
                assert state is not None
                states[own] = kept(state, data.active[t][envs][:, view.agents])
            mask = None if data.action_mask is None else view.mask(data.action_mask[t][envs][:, view.agents])
            view.write_parameters(actor.distribution(outputs, mask), self._outputs[own])

    def act(self, t: int) -> None:
        """Replace the actions, which were drawn for step t, of opponents that have no distribution."""
        env, pool = self.rollout.env, self._pool
        actions = self._actions_of(t)

        def replace(mask: torch.Tensor, given: torch.Tensor) -> None:
            own = mask.view(*mask.shape, *(1,) * (actions.ndim - mask.ndim))
            actions.copy_(torch.where(own, given, actions))

        if self._noop is not None:
            replace(self._masks[self._kind_of[STILL]], self._noop)
        if RANDOM in self.names:
            replace(self._masks[self._kind_of[RANDOM]] & self._has_box, env.sample_actions()[pool])
        for actors in self._actors:
            for view, given in actors.actions(self.rollout.obs[t][pool], actions) if actors.acts else ():
                own = torch.zeros(env.num_agents, dtype=torch.bool, device=actions.device)
                own[view.agents] = True
                replace(self._masks[actors.kind] & own, given)

    # State

    def state(self) -> dict[str, torch.Tensor]:
        """Everything the next iteration depends on, live tensors by name."""
        tensors = {
            "clock": self._clock,
            "taken": self._taken,
            "opponent": self.opponent,
            "age": self._age,
            "ended": self._ended,
            "results": self.results,
            "sums": self._sums,
        }
        for name, snapshots in self.snapshots.items():
            tensors |= {f"snapshots.{name}.{key}": rows for key, rows in snapshots.rows.items()}
        tensors |= {f"states.{name}": state for name, state in self._states.items()}
        for actors in self._actors:
            tensors |= actors.state()
        return tensors


def learning_wins(results: torch.Tensor) -> torch.Tensor:
    """The p of results (…, 3): (wins + draws / 2 + 1) / (games + 2), float64."""
    wins, draws, games = results.double().unbind(-1)
    return (wins + draws / 2 + 1) / (games + 2)


def draw_weights(p: torch.Tensor, sampling: str) -> torch.Tensor:
    """Weights with which opponents are drawn, of the probability p that the learning side wins."""
    if sampling == "uniform":
        return torch.ones_like(p)
    return (1 - p).square() if sampling == "hard" else p * (1 - p)


class _Actors:
    """The actors of an ``Opponent`` in all ranges.

    Args:
        kind: Number of the opponent among the members.
        opponent: The opponent.
        env: The environment.
        size: Environments of all ranges, the last ones.
        squash: Of the sampler.

    Raises:
        ConfigError: A policy does not match its agents.
    """

    def __init__(self, kind: int, opponent: Opponent, env: VecEnv, size: int, squash: str) -> None:
        self.kind, self.name = kind, opponent.name
        self._views = {name: RoleView(env.game, name.split("+"), env.device) for name in opponent.actors}
        self.policies, functions = divided(env.game, opponent.actors, env.device)
        self._functions = FunctionActions(env, self._views, functions, size, f" of opponent {self.name!r}")
        self._positions: dict[str, torch.Tensor] = {}
        self._states: dict[str, torch.Tensor] = {}
        for name, policy in list(self.policies.items()):
            view = self._views[name]
            what = f"the policy of {name!r} of opponent {self.name!r}"
            check_fits_agents(what, policy, view)
            if view.continuous and policy.squash != squash:
                raise ConfigError(f"{what} has squash {policy.squash!r}; expected {squash!r}, as in training")
            # Its weights are those of now, whatever becomes of the caller's.
            self.policies[name] = policy = copy.deepcopy(policy).to(env.device)
            if policy.agent_ids:
                self._positions[name] = positions_of(env, name, view, policy)
            if policy.acting_state_size:
                shape = (size, view.num_agents, policy.acting_state_size)
                self._states[name] = torch.zeros(shape, device=env.device)

    @property
    def acts(self) -> bool:
        """Whether it gives actions, not only distributions."""
        return bool(self._functions.views)

    def clear(self, begins: torch.Tensor) -> None:
        """Begin episodes in environments (n,) bool of the ranges."""
        for state in self._states.values():
            state.masked_fill_(begins[:, None, None], 0)

    def write_parameters(
        self, obs: torch.Tensor, active: torch.Tensor, action_mask: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Parameters of the policies' distributions, for all environments of the ranges."""
        for name, policy in self.policies.items():
            view, state = self._views[name], self._states.get(name)
            outputs, following = policy.acting(view.obs(obs), state, self._positions.get(name))
            if state is not None:
                assert following is not None
                state.copy_(kept(following, active[:, view.agents]))
            mask = None if action_mask is None else view.mask(action_mask[:, view.agents])
            view.write_parameters(policy.distribution(outputs, mask), out)

    def actions(self, obs: torch.Tensor, like: torch.Tensor) -> Iterator[tuple[RoleView, torch.Tensor]]:
        """Views of the actors without a network, and actions like ``like`` with those of their agents."""
        whole = like.clone()
        self._functions(obs, whole)
        yield from ((view, whole) for view in self._functions.views.values())

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and states, live tensors by name."""
        tensors = {
            f"actors.{self.name}.{name}.{key}": x
            for name, policy in self.policies.items()
            for key, x in policy.state_dict().items()
        }
        return tensors | {f"states.{self.name}.{name}": state for name, state in self._states.items()}
