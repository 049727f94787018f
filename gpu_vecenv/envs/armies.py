"""Units of ``skirmish``, and the scenarios that name two armies of them."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpu_vecenv.errors import ConfigError


class Unit(NamedTuple):
    """A type of units. Lengths are in units of the map."""

    velocity: float  # per second
    damage: float  # of an attack
    attack_range: float
    sight_range: float
    radius: float
    health: float  # at the start
    cooldown: float  # seconds between two attacks


UNITS = {  # letter in a scenario -> type; in the order of their numbers
    "m": Unit(3.15, 9.0, 5.0, 9.0, 0.375, 45.0, 0.61),  # marine
    "M": Unit(2.25, 10.0, 6.0, 10.0, 0.5625, 125.0, 1.07),  # marauder
    "s": Unit(4.13, 13.0, 6.0, 10.0, 0.625, 160.0, 1.87),  # stalker
    "z": Unit(3.15, 8.0, 2.0, 9.0, 0.5, 150.0, 0.86),  # zealot
    "l": Unit(4.13, 5.0, 2.0, 8.0, 0.375, 35.0, 0.5),  # zergling
    "h": Unit(3.15, 12.0, 5.0, 9.0, 0.625, 80.0, 0.59),  # hydralisk
}
GROUP = rf"([1-9][0-9]{{0,5}})([{''.join(UNITS)}])"
ARMY = re.sub(r"\((?!\?)", "(?:", rf"(?:{GROUP})+")
SCENARIO = re.compile(rf"({ARMY})(?:_vs_({ARMY}))?|smacv2_([1-9][0-9]{{0,5}})_units")


class Armies(NamedTuple):
    """Types of the units of two armies, by number."""

    allies: list[int]
    enemies: list[int]
    drawn: bool  # whether types and places are drawn anew for each episode; then both have as many units


def armies_of(scenario: str) -> Armies:
    """The armies that a scenario names.

    ``3s5z`` fights its own kind; in ``5m_vs_6m`` enemies follow ``_vs_``; ``smacv2_N_units`` draws N units for each.

    Raises:
        ConfigError: It names none.
    """
    if not (found := SCENARIO.fullmatch(scenario)):
        raise ConfigError(
            f"Skirmish.scenario is {scenario!r:.100}; expected numbers of units of the types {', '.join(UNITS)}, such "
            "as '3s5z' or '5m_vs_6m', or 'smacv2_N_units' for N drawn ones, such as 'smacv2_10_units'"
        )
    allies, enemies, size = found.groups()
    if size:
        return Armies([0] * int(size), [0] * int(size), True)
    types = list(UNITS)
    both = [
        [types.index(letter) for count, letter in re.findall(GROUP, army) for _ in range(int(count))]
        for army in (allies, enemies or allies)
    ]
    return Armies(both[0], both[1], False)
