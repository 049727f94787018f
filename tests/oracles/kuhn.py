"""Kuhn poker as a tree: payoffs, values and best responses of tabular policies, exactly.

A policy maps an information state, a card 0 to 2 and the moves so far as a string of "p" and "b", to the probability of
a bet. Players are 0 and 1.
"""

import itertools
from collections.abc import Mapping
from fractions import Fraction

DEALS = list(itertools.permutations(range(3), 2))
PAYOFF = {"bp": 1, "pbp": -1}  # of player 0, where one player folds
STAKE = {"pp": 1, "bb": 2, "pbb": 2}  # of a showdown
DECISIONS = (("", "pb"), ("p", "b"))  # of each player
Policy = Mapping[tuple[int, str], Fraction]
PAIR = tuple[Policy, Policy]


def payoff(deal: tuple[int, int], history: str) -> int | None:
    """What player 0 wins; None where the game goes on."""
    if history in STAKE:
        return STAKE[history] if deal[0] > deal[1] else -STAKE[history]
    return PAYOFF.get(history)


def value(pair: PAIR) -> Fraction:
    """The mean payoff of player 0."""
    return sum((_value(pair, deal, "") for deal in DEALS), Fraction(0)) / len(DEALS)


def _value(pair: PAIR, deal: tuple[int, int], history: str) -> Fraction:
    won = payoff(deal, history)
    if won is not None:
        return Fraction(won)
    player = len(history) % 2
    bets = pair[player][deal[player], history]
    branches = ((move, p) for move, p in (("p", 1 - bets), ("b", bets)) if p)
    return sum((p * _value(pair, deal, history + move) for move, p in branches), Fraction(0))


def best_response(pair: PAIR, player: int) -> Fraction:
    """The largest mean payoff of a player against the other one's policy, over all pure strategies."""
    states = [(card, history) for card in range(3) for history in DECISIONS[player]]
    sign, found = 1 - 2 * player, []
    for choices in itertools.product((Fraction(0), Fraction(1)), repeat=len(states)):
        own = dict(zip(states, choices, strict=True))
        found.append(sign * value((own, pair[1]) if player == 0 else (pair[0], own)))
    return max(found)


def nash_conv(pair: PAIR) -> Fraction:
    """The sum of what the players gain by best responses; their values sum to 0."""
    return best_response(pair, 0) + best_response(pair, 1)


def everywhere(bets: Fraction) -> PAIR:
    """Policies that bet with one probability in all information states."""
    first, second = ({(card, history): bets for card in range(3) for history in histories} for histories in DECISIONS)
    return first, second


def equilibrium(alpha: Fraction) -> PAIR:
    """The Nash equilibria of Kuhn, "Simplified two-person poker", 1950: alpha in [0, 1/3]."""
    third = Fraction(1, 3)
    first = {(0, ""): alpha, (1, ""): Fraction(0), (2, ""): 3 * alpha}
    first |= {(0, "pb"): Fraction(0), (1, "pb"): alpha + third, (2, "pb"): Fraction(1)}
    second = {(0, "p"): third, (1, "p"): Fraction(0), (2, "p"): Fraction(1)}
    second |= {(0, "b"): Fraction(0), (1, "b"): third, (2, "b"): Fraction(1)}
    return first, second
