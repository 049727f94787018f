"""Scripted baselines for the two tag games, to compare trained policies with. Their input is that of a policy.

``pursuit(game)`` plays the taggers, ``flee(game)`` the runners. Both are called with the observations of their role's
agents, (num_envs, n, numbers) float32, and return actions, (num_envs, n) or (num_envs, n, heads) int32. Nothing is
random, and nothing is read on the host. In tag_continuous with ``egocentric=False`` a single observation does not say
where one heads: those scripts keep in mind what they did and saw since the start of the episode, so each wants every
observation, in order. With ``egocentric=True`` each action follows from one observation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from gpu_vecenv import Env, configure, evaluate, make
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.envs.tag_gridworld import TagGridworld

Actor = Callable[[torch.Tensor], torch.Tensor]


def cells(game: TagGridworld, obs: torch.Tensor, role: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Own cells (num_envs, n, 2) and those of the opponents seen (num_envs, n, opponents, 2), int64."""
    if game.full_observation:  # all columns, then all rows
        everyone = (obs[..., : 2 * game.num_agents] * game.grid).round().long().unflatten(-1, (2, -1)).mT
        taggers, runners = everyone[..., :-1, :], everyone[..., -1:, :]
        own = taggers[:, 0] if role == "tagger" else runners[:, 0]
        return own, runners if role == "tagger" else taggers
    both = (obs[..., :4] * game.grid).round().long()
    return both[..., :2], both[..., None, 2:]


@dataclass
class GridPursuit:
    """Taggers step towards the runner along the axis on which it is farther; on ties the even ones change columns."""

    game: TagGridworld

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, n) int32 of the taggers."""
        own, runner = cells(self.game, obs, "tagger")
        dx, dy = (runner[..., 0, :] - own).unbind(-1)
        even = torch.arange(obs.shape[1], device=obs.device) % 2 == 0
        by_column = torch.where(dx.abs() == dy.abs(), even, dx.abs() > dy.abs())
        along_column, along_row = torch.where(dx > 0, 1, 2), torch.where(dy > 0, 3, 4)
        moves = torch.where(by_column, along_column, along_row)
        return torch.where((dx == 0) & (dy == 0), 0, moves).int()


@dataclass
class GridFlee:
    """The runner makes the move that leaves the nearest tagger most steps away; on ties, all taggers together."""

    game: TagGridworld

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, 1) int32 of the runner."""
        own, taggers = cells(self.game, obs, "runner")
        move = torch.arange(5, device=obs.device)  # as the game counts: stay, column + 1, - 1, row + 1, - 1
        columns, rows = ((move == k).long() - (move == k + 1).long() for k in (1, 3))
        after = own[..., None, :] + torch.stack([columns, rows], -1)  # (num_envs, 1, moves, 2)
        steps = (after[..., None, :] - taggers[..., None, :, :]).abs().sum(-1)  # (num_envs, 1, moves, taggers)
        farthest = 2 * self.game.grid * taggers.shape[-2] + 1  # more than any sum, so that the nearest counts first
        score = steps.amin(-1) * farthest + steps.sum(-1)
        legal = ((after >= 0) & (after <= self.game.grid)).all(-1)
        return score.where(legal, -1).argmax(-1).int()


@dataclass
class Perception:
    """What an agent of tag_continuous makes of an observation; all but ``there`` and ``tagger`` float32.

    Positions are relative to one's own, in the axes of the square; M agents are seen.
    """

    there: torch.Tensor  # (num_envs, n, M) bool: sees somebody
    tagger: torch.Tensor  # (num_envs, n, M) bool
    position: torch.Tensor  # (num_envs, n, M, 2)
    heading: torch.Tensor  # (num_envs, n, M) rad
    speed: torch.Tensor  # (num_envs, n, M) per step
    acceleration: torch.Tensor  # (num_envs, n, M) per step


def direction(heading: torch.Tensor) -> torch.Tensor:
    """Unit vectors (..., 2)."""
    return torch.stack([heading.cos(), heading.sin()], -1)


class Motion:
    """How an agent of tag_continuous moves: its state, and what each choice makes of it.

    A subclass sets, in ``update``, ``speed``, ``acceleration`` and ``heading``, (num_envs, n) float32, and ``low`` and
    ``high``, (num_envs, n, 2) float32, bounds of the own position.
    """

    speed: torch.Tensor
    acceleration: torch.Tensor
    heading: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def __init__(self, game: TagContinuous, role: str) -> None:
        self.game = game
        self.top = game.max_speed * (game.tagger_skill if role == "tagger" else game.runner_skill)
        self.acceleration_level, self.turn_level = map(torch.as_tensor, game.arrays().values())

    def move_levels(self, device: torch.device) -> None:
        """Move what the choices stand for to the device of the observations."""
        self.acceleration_level = self.acceleration_level.to(device)
        self.turn_level = self.turn_level.to(device)

    def update(self, obs: torch.Tensor) -> Perception:
        """Take in the next observation (num_envs, n, numbers)."""
        raise NotImplementedError

    def speeds(self) -> torch.Tensor:
        """Speed after each choice of acceleration, (num_envs, n, choices)."""
        return (self.speed[..., None] + self.acceleration[..., None] + self.acceleration_level).clamp(0, self.top)

    def headings(self) -> torch.Tensor:
        """Heading after each choice of turn, (num_envs, n, choices)."""
        return self.heading[..., None] + self.turn_level

    def actions_of(self, acceleration: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """The actions (num_envs, n, 2) of these choices, which count as played."""
        return torch.stack([acceleration, turn], -1).int()


class ObservedState(Motion):
    """What an egocentric observation says of its agent and, turned back into the axes of the square, of others."""

    def update(self, obs: torch.Tensor) -> Perception:
        """Take in the next observation."""
        self.move_levels(obs.device)
        features, own = obs[..., :-7].unflatten(-1, (7, self.game.num_observed)), obs[..., -7:]
        self.heading = torch.atan2(own[..., 1], own[..., 0])
        self.speed, self.acceleration = (own[..., 2:4] * self.game.max_speed).unbind(-1)
        self.low = self.high = own[..., 4:6] * self.game.side
        cosine, sine = own[..., 0, None], own[..., 1, None]

        def turned_back(ahead: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
            return torch.stack([cosine * ahead - sine * left, sine * ahead + cosine * left], -1)

        position = turned_back(features[..., 0, :], features[..., 1, :]) * (math.sqrt(2) * self.game.side)
        velocity = turned_back(features[..., 2, :], features[..., 3, :]) * self.game.max_speed
        velocity = velocity + (self.speed[..., None] * own[..., :2])[..., None, :]
        heading, speed = torch.atan2(velocity[..., 1], velocity[..., 0]), velocity.norm(dim=-1)
        there, tagger = features[..., 6, :] > 0.5, features[..., 4, :] > 0.5
        return Perception(there, tagger, position, heading, speed, torch.zeros_like(speed))


class StateEstimator(Motion):
    """What an agent of tag_continuous can know of itself, though with ``egocentric=False`` no observation says it.

    Speed and acceleration follow from its own actions. So does its heading, but for that of the start, one of four
    quarter turns: with the right one, the agents seen now come from where agents were seen a step ago. Of its position
    it keeps bounds: they move as it does, the edge stops them as it stops the agent, and every observed agent is inside
    the square.

    It relies on its actions being played, and on the game's own starts. A step 0 in the observation begins anew.
    """

    def __init__(self, game: TagContinuous, role: str) -> None:
        super().__init__(game, role)
        self.shape: torch.Size | None = None

    def begin(self, obs: torch.Tensor) -> None:
        """Forget everything, and prepare for observations of this shape."""
        n, seen = obs.shape[:2], self.game.num_observed
        self.shape, self.device = obs.shape, obs.device
        self.move_levels(obs.device)
        self.speed, self.acceleration, self.turned = torch.zeros(3, *n, device=obs.device)
        self.votes = torch.zeros(*n, 4, device=obs.device)  # for each quarter turn as the heading at the start
        self.low, self.high = torch.zeros(2, *n, 2, device=obs.device)  # bounds of the own position
        self.before = torch.zeros(*n, seen, 2, device=obs.device)  # positions seen a step ago; inf: none

    def update(self, obs: torch.Tensor) -> Perception:
        """Take in the next observation."""
        game, seen = self.game, self.game.num_observed
        if self.shape != obs.shape or self.device != obs.device:
            self.begin(obs)
        start = obs[..., -1] == 0
        for tensor in (self.speed, self.acceleration, self.turned):
            tensor.masked_fill_(start, 0)
        self.votes.masked_fill_(start[..., None], 0)
        self.low.masked_fill_(start[..., None], 0)
        self.high.masked_fill_(start[..., None], game.side)
        self.before.masked_fill_(start[..., None, None], math.inf)

        features = obs[..., :-1].unflatten(-1, (7, seen))
        there = features[..., 6, :] > 0.5
        position = features[..., :2, :].mT * (math.sqrt(2) * game.side)
        speed = features[..., 2, :] * game.max_speed + self.speed[..., None]
        acceleration = features[..., 3, :] * game.max_speed + self.acceleration[..., None]
        ahead = features[..., 4, :] * (2 * math.pi)
        self.vote(position.where(there[..., None], math.inf), speed, ahead)

        self.heading = self.turned + self.votes.argmax(-1) * (math.pi / 2)  # the first one on ties
        self.sure = (self.votes == self.votes.amax(-1, keepdim=True)).sum(-1) == 1  # (num_envs, n) bool: no tie
        self.bound(position, there)
        heading = ahead + self.heading[..., None]
        return Perception(there, features[..., 5, :] > 0.5, position, heading, speed, acceleration)

    def vote(self, position: torch.Tensor, speed: torch.Tensor, ahead: torch.Tensor) -> None:
        """Ask of each quarter turn how many of those seen come from where somebody was."""
        moved = speed[..., None] * direction(ahead + self.turned[..., None])
        moved = moved - (self.speed[..., None] * direction(self.turned))[..., None, :]
        near = 1e-5 * self.game.side  # float32 rounds positions to a hundredth of it
        for quarter in range(4):
            came_from = position - moved
            if self.game.observe_all:  # each has its own place
                found = ((came_from - self.before).abs() < near).all(-1)
            else:
                apart = (came_from[..., :, None, :] - self.before[..., None, :, :]).abs()
                found = (apart < near).all(-1).any(-1)
            self.votes[..., quarter] += found.sum(-1)
            moved = torch.stack([-moved[..., 1], moved[..., 0]], -1)
        self.before = position

    def bound(self, position: torch.Tensor, there: torch.Tensor) -> None:
        """Move the bounds of the own position as the agent moved; without a heading, as far as it may have."""
        side, moved = self.game.side, self.speed[..., None] * direction(self.heading)
        low = self.low + torch.where(self.sure[..., None], moved, -self.speed[..., None])
        high = self.high + torch.where(self.sure[..., None], moved, self.speed[..., None])
        there = there[..., None]
        low = low.clamp(0, side).maximum(-position.where(there, math.inf).amin(-2))
        high = high.clamp(0, side).minimum(side - position.where(there, -math.inf).amax(-2))
        broken = low > high + 1e-3 * side  # as after a start with speed: begin with any place
        self.low, self.high = low.masked_fill(broken, 0), high.masked_fill(broken, side)

    def actions_of(self, acceleration: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """The actions (num_envs, n, 2) of these choices, which count as played."""
        gained = self.acceleration + self.acceleration_level[acceleration]
        self.speed = (self.speed + gained).clamp(0, self.top)
        self.acceleration = gained.masked_fill((self.speed <= 0) | (self.speed >= self.top), 0)
        self.turned = (self.turned + self.turn_level[turn]) % (2 * math.pi)
        return torch.stack([acceleration, turn], -1).int()


def motion(game: TagContinuous, role: str) -> Motion:
    """An agent's state, as observed or as estimated."""
    return ObservedState(game, role) if game.egocentric else StateEstimator(game, role)


class Pursuit:
    """Of all actions, a tagger takes that which brings it nearest to a runner, if runners keep on as they move.

    Runners to which another tagger in sight is nearer count only where there are no others. Who sees no runner changes
    nothing.
    """

    def __init__(self, game: TagContinuous) -> None:
        self.own = motion(game, "tagger")
        self.top = game.max_speed * game.runner_skill

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, n, 2) int32 of the taggers."""
        own, sight = self.own, self.own.update(obs)
        chased = self.chased(sight)
        speed = (sight.speed + sight.acceleration).clamp(0, self.top)
        runners = sight.position + speed[..., None] * direction(sight.heading)
        low, high = (bound[..., None, :] for bound in (-own.high, own.game.side - own.low))
        runners = runners.maximum(low).minimum(high)  # the edge stops them
        after = own.speeds()[..., None, None] * direction(own.headings())[..., None, :, :]
        after = after.flatten(-3, -2)  # (num_envs, n, actions, 2)
        distance = (after[..., :, None, :] - runners[..., None, :, :]).square().sum(-1)
        action = distance.where(chased[..., None, :], math.inf).amin(-1).argmin(-1)
        return own.actions_of(action // len(own.turn_level), action % len(own.turn_level))

    def chased(self, sight: Perception) -> torch.Tensor:
        """Which of those seen to go after, (num_envs, n, M) bool."""
        runner, place = sight.there & ~sight.tagger, sight.position
        others = (place[..., :, None, :] - place[..., None, :, :]).norm(dim=-1)
        others = others.where((sight.there & sight.tagger)[..., None, :], math.inf).amin(-1)
        own = runner & (place.norm(dim=-1) <= others)
        return torch.where(own.any(-1, keepdim=True), own, runner)


class Flee:
    """At full speed, a runner turns to where the nearest tagger is farthest after the step; the edge stops it.

    Who sees no tagger flees from the runners it sees: in a crowd one does not see far.
    """

    def __init__(self, game: TagContinuous) -> None:
        self.own = motion(game, "runner")

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        """Actions (num_envs, n, 2) int32 of the runners."""
        own, sight = self.own, self.own.update(obs)
        feared = sight.there & sight.tagger
        feared = torch.where(feared.any(-1, keepdim=True), feared, sight.there)
        here = ((own.low + own.high) / 2)[..., None, :]
        speed = own.speeds().amax(-1)[..., None, None]
        after = (here + speed * direction(own.headings())).clamp(0, own.game.side) - here  # (num_envs, n, turns, 2)
        distance = (after[..., :, None, :] - sight.position[..., None, :, :]).square().sum(-1)
        turn = distance.where(feared[..., None, :], math.inf).amin(-1).argmax(-1)  # no turn if there is none
        return own.actions_of(own.acceleration_level.argmax().expand(turn.shape), turn)


def pursuit(game: Env) -> Actor:
    """A script for the taggers; TypeError where the game is not one of the two."""
    if isinstance(game, TagGridworld):
        return GridPursuit(game)
    if isinstance(game, TagContinuous):
        return Pursuit(game)
    raise TypeError(f"no script plays {game.name()}; expected tag_gridworld or tag_continuous")


def flee(game: Env) -> Actor:
    """A script for the runners; TypeError where the game is not one of the two."""
    if isinstance(game, TagGridworld):
        return GridFlee(game)
    if isinstance(game, TagContinuous):
        return Flee(game)
    raise TypeError(f"no script plays {game.name()}; expected tag_gridworld or tag_continuous")


def play(
    game: Env,
    actors: Mapping[str, Actor | None],
    num_envs: int = 100,
    seed: int = 1,
    device: str | None = None,
    episodes: int = 100,
) -> dict[str, float]:
    """Play whole episodes; returns the metrics of ``gpu_vecenv.evaluate``.

    Args:
        game: Any game, with its configuration.
        actors: Role name -> its actor; roles without one act randomly.
        num_envs: Largest number of environments.
        seed: Of the environments and of random actions.
        device: cpu, cuda or cuda:1; None: cuda if usable, else cpu.
        episodes: Number of episodes.
    """
    env = make(game, num_envs, device)
    try:
        return evaluate(env, {role: actors.get(role) for role in game.layout.role_slices}, episodes, seed=seed)
    finally:
        env.close()


def main(
    game: Literal["tag_gridworld", "tag_continuous"] = "tag_gridworld",
    episodes: int = 100,
    num_envs: int = 100,
    device: str | None = None,
    seed: int = 1,
) -> None:
    """Let scripts and random actions play against each other, and print who caught whom.

    Args:
        game: Which of the two, as it is by default.
        episodes: Of each pairing.
        num_envs: Number of environments.
        device: cpu, cuda or cuda:1; by default cuda if usable, else cpu.
        seed: Of starts and random actions.
    """
    configured = configure(game)
    table = Table("taggers", "runners", "terminated", "mean length", "tagger's return", "runner's return")
    for taggers in ("random", "pursuit"):
        for runners in ("random", "flee"):
            actors = {
                "tagger": pursuit(configured) if taggers == "pursuit" else None,
                "runner": flee(configured) if runners == "flee" else None,
            }
            results = play(configured, actors, num_envs, seed, device, episodes)
            table.add_row(
                taggers,
                runners,
                f"{results['terminated_fraction']:.1%}",
                f"{results['episode_length']:.1f}",
                f"{results['return_tagger']:.3f}",
                f"{results['return_runner']:.3f}",
            )
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
