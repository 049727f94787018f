"""Scripted cooks of overcooked: they bring onions to pots and soups to the hatch, also over counters."""

import numpy as np
from oracles.overcooked import INTERACT, STAY, STEPS, THINGS, OvercookedOracle


def paths(oracle: OvercookedOracle, i: int, around: bool = False) -> dict[tuple[int, int], tuple[int, int]]:
    """Cell of the floor that player i reaches -> its distance, and the first action; ``around``: the other one."""
    first, other = (tuple(map(int, oracle.position[j])) for j in (i, 1 - i))
    found, queue = {first: (0, STAY)}, [first]
    for x, y in queue:
        for action, (dx, dy) in STEPS.items():
            cell = (x + dx, y + dy)
            if oracle.tiles.get(cell) == " " and cell not in found and not (around and cell == other):
                length, start = found[x, y]
                found[cell] = (length + 1, action if length == 0 else start)
                queue.append(cell)
    return found


def beside(oracle: OvercookedOracle, found: dict) -> set[tuple[int, int]]:
    """What is not floor and next to these cells."""
    around = {(x + dx, y + dy) for x, y in found for dx, dy in STEPS.values()}
    return {cell for cell in around if oracle.tiles[cell] != " "}


def wishes(oracle: OvercookedOracle, i: int, shared: set[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cells that player i would interact with, the most wanted first."""
    held = THINGS[oracle.held[i]]
    lying = {thing: [cell for cell, other in oracle.things.items() if other == thing] for thing in THINGS}
    full = [cell for cell, (onions, _) in oracle.soups.items() if onions == 3]
    open_pots = [cell for cell in oracle.cells("P") if cell not in full]
    counters = [cell for cell in shared if oracle.tiles[cell] == "X" and cell not in oracle.things]
    if held == "soup":
        return [oracle.cells("S"), counters]
    if held == "dish":
        return [full, counters]
    if held == "onion":
        return [open_pots, counters]
    dishes = list(oracle.held).count(2) + len(lying["dish"])
    found = [lying["soup"]]
    if full:
        found.append(lying["dish"])
    if len(full) > dishes:
        found.append(oracle.cells("D"))
    missing = 3 * len(open_pots) - sum(onions for onions, _ in oracle.soups.values() if onions < 3)
    if missing > list(oracle.held).count(1):
        found.append(lying["onion"])
    if missing > list(oracle.held).count(1) + len(lying["onion"]):
        found.append(oracle.cells("O"))
    return found


def act(oracle: OvercookedOracle, i: int, random: np.random.Generator) -> int:
    """The action of player i; one in eight is random, so that nobody stands in the other's way for ever."""
    if random.random() < 1 / 8:
        return int(random.integers(6))
    ways = paths(oracle, i)
    near = beside(oracle, ways)
    shared = near & beside(oracle, paths(oracle, 1 - i))
    holds = bool(oracle.held[i])
    for wish in wishes(oracle, i, shared):
        # What a player could not carry on is left to the other one.
        targets = [cell for cell in wish if cell in near and (holds or useful(oracle, cell, near, shared))]
        if targets:
            return towards(oracle, i, paths(oracle, i, around=True), targets, towards(oracle, i, ways, targets))
    return int(random.integers(6))


def useful(oracle: OvercookedOracle, cell: tuple[int, int], near: set, shared: set) -> bool:
    """Whether to take what is here: not from a shared counter, if it can only be put there again."""
    if oracle.tiles[cell] != "X" or cell not in shared:
        return True
    tile = "S" if oracle.things[cell] == "soup" else "P"
    return any(oracle.tiles[other] == tile for other in near)


def towards(oracle: OvercookedOracle, i: int, ways: dict, targets: list[tuple[int, int]], otherwise: int = STAY) -> int:
    """The next action on the shortest way to interact with one of these cells."""
    options = []
    for x, y in targets:
        for action, (dx, dy) in STEPS.items():
            if (x - dx, y - dy) in ways:
                length, start = ways[x - dx, y - dy]
                turned = INTERACT if oracle.orientation[i] == action else action
                options.append((length, start if length else turned))
    return min(options, key=lambda option: (option[0], option[1] != INTERACT))[1] if options else otherwise
