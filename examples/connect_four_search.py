"""A search that plays connect_four, for comparisons: full width, a few moves deep, all positions of a batch at once.

    python examples/connect_four_search.py --depth 5 --episodes 200

plays it against random moves. As a script, ``search(depth)`` is a function from observations to actions, an opponent
for ``gpu_vecenv.evaluate`` and ``OpponentsConfig``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

import gpu_vecenv

ROWS, COLUMNS, LENGTH = 6, 7, 4
HEIGHT = ROWS + 1  # bits of a column in a position's 64: its cells from the bottom up, then one that stays 0
BOTTOM = [1 << HEIGHT * column for column in range(COLUMNS)]
CELLS = [((1 << ROWS) - 1) << HEIGHT * column for column in range(COLUMNS)]
STRIDES = (1, HEIGHT, HEIGHT + 1, HEIGHT - 1)  # bits from one piece of a line to the next: up, right, the diagonals
WIN = 100  # value of a line; the sooner, the more
ILLEGAL = -1000
Player = Callable[[torch.Tensor], torch.Tensor]


def bits(planes: torch.Tensor) -> torch.Tensor:
    """Cells (…, 6, 7) with the first row on top -> (…,) int64, a bit for each that is not 0."""
    place = torch.tensor([[BOTTOM[c] << ROWS - 1 - r for c in range(COLUMNS)] for r in range(ROWS)])
    return ((planes != 0) * place.to(planes.device)).sum((-2, -1))


def has_line(pieces: torch.Tensor) -> torch.Tensor:
    """Whether four of these bits are in a line: (…,) int64 -> (…,) bool."""
    found = torch.zeros_like(pieces)
    for stride in STRIDES:
        pairs = pieces & pieces >> stride
        found |= pairs & pairs >> 2 * stride
    return found != 0


def move_values(own: torch.Tensor, other: torch.Tensor, depth: int) -> torch.Tensor:
    """Value of each column for the player who moves, who sees ``depth`` moves ahead, this one included.

    Args:
        own: (…,) int64, the player's pieces.
        other: (…,) int64, the other player's.
        depth: At least 1.

    Returns:
        (…, 7) int64: 0 where nobody has won within the depth, more if this player can force a line, less if the other
        one can, further from 0 the sooner; ``ILLEGAL`` where the column is full.
    """
    bottom, cells = (torch.tensor(values, device=own.device) for values in (BOTTOM, CELLS))
    occupied = (own | other)[..., None]
    move = (occupied + bottom) & cells  # the lowest empty cell; none if the column is full
    after = own[..., None] | move
    value = has_line(after) * (WIN + depth)
    if depth > 1:
        answers = move_values(other[..., None].expand_as(after).contiguous(), after, depth - 1)
        best = answers.amax(-1)
        best = torch.where(best == ILLEGAL, 0, best)  # the board is full: a draw
        value = torch.where(value > 0, value, -best)
    return torch.where(move == 0, ILLEGAL, value)


def search(depth: int = 5, seed: int = 0, device: str | torch.device = "cpu", chunk: int = 64) -> Player:
    """A player that makes one of the moves with the largest value, drawn at random.

    Args:
        depth: Moves of both players that it sees ahead.
        seed: Of the draws.
        device: Of the observations.
        chunk: Positions that are searched at a time; each takes 7^depth numbers.

    Returns:
        A function from observations (…, 6, 7, 2), of games that go on, on the default board, to actions (…) int32.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def act(obs: torch.Tensor) -> torch.Tensor:
        own, other = bits(obs[..., 0]).flatten(), bits(obs[..., 1]).flatten()
        parts = zip(own.split(chunk), other.split(chunk), strict=True)
        values = torch.cat([move_values(a, b, depth) for a, b in parts])
        draws = torch.rand(values.shape, generator=generator, device=values.device)
        chosen = torch.where(values == values.amax(-1, keepdim=True), draws, -1).argmax(-1)
        return chosen.to(torch.int32).view(obs.shape[:-3])

    return act


@dataclass(frozen=True)
class Score:
    """Games of one player against another: as first player and as second one."""

    wins: tuple[int, int]
    draws: tuple[int, int]
    games: tuple[int, int]

    @property
    def win_rate(self) -> float:
        """Share of all games that it won."""
        return sum(self.wins) / sum(self.games)

    def __str__(self) -> str:
        shares = [f"{won}/{games}" for won, games in zip(self.wins, self.games, strict=True)]
        return f"{self.win_rate:.1%} won ({shares[0]} as first, {shares[1]} as second player), {sum(self.draws)} drawn"


def trained(policy: gpu_vecenv.Policy, seed: int, *, greedy: bool) -> Player:
    """A player from a policy of a trainer: the likeliest of the open columns, or a draw."""
    generator = torch.Generator(policy.action_bounds.device).manual_seed(seed)

    def act(obs: torch.Tensor) -> torch.Tensor:
        mask = (obs[..., 0, :, :] == 0).all(-1)  # nobody's piece lies in the first row
        actions = policy.act(obs, mask, greedy=greedy, generator=generator)
        assert isinstance(actions, torch.Tensor)  # the policy is not recurrent
        return actions

    return act


def match(one: Player | None, other: Player | None, games: int, seed: int, device: str | torch.device = "cpu") -> Score:
    """Let two play each other, each as first player in half of the games; None plays random moves."""
    wins, draws, half = [], [], games // 2
    for side in range(2):
        players = (one, other) if side == 0 else (other, one)
        env = gpu_vecenv.make("connect_four", half, device, autoreset_mode="same_step")
        obs, info = env.reset(seed=2 * seed + side)
        result, over = torch.zeros(half, device=env.device), torch.zeros(half, dtype=torch.bool, device=env.device)
        while not bool(over.all()):
            actions = env.sample_actions()
            for agent, player in enumerate(players):
                rows = (info["acting"][:, agent] & ~over).nonzero()[:, 0]
                if player is not None and len(rows):
                    actions[rows, agent] = player(obs[rows, agent]).to(actions.dtype)
            obs, rewards, terminations, _, info = env.step(actions)
            result += torch.where(over, 0, rewards[:, side])  # further games of those that have ended do not count
            over |= terminations[:, 0]
        env.raise_for_faults()
        wins.append(int((result > 0).sum()))
        draws.append(int((result == 0).sum()))
    return Score((wins[0], wins[1]), (draws[0], draws[1]), (half, half))


@dataclass(frozen=True)
class Options:
    """A match of the search against random moves."""

    depth: int = 5  # moves that it sees ahead
    episodes: int = 200
    seed: int = 0
    device: str = "cpu"


def main(options: Options) -> None:
    """Play, and print who won."""
    score = match(
        search(options.depth, options.seed, options.device), None, options.episodes, options.seed, options.device
    )
    print(f"a search of depth {options.depth} against random moves: {score}")


if __name__ == "__main__":
    main(tyro.cli(Options))
