"""The oracles of harvest and cleanup against Melting Pot 2.4.1 itself, step by step.

Melting Pot is given a view so large that each player sees the whole map, as numbers of sprites by layer, which are what
its state is compared by. What it drew at random, the oracle takes over, and the test counts how often what happened.
"""

import copy
import itertools

import numpy as np
import pytest
from meltingpot.configs.substrates import clean_up, commons_harvest__open
from meltingpot.utils.substrates import builder
from oracles.commons import CLEAN, FORWARD, RIGHT, ZAP, CleanupOracle, HarvestOracle, assert_valid_start

SIDE = 30  # cells that a player sees to each side
# Of the actions, as Melting Pot counts: move, turn, zap, clean.
ACTIONS = [(0, 0), (1, 0), (3, 0), (4, 0), (2, 0), (0, -1), (0, 1), (0, 0), (0, 0)]
# Of components of Melting Pot's substrates, and of the oracle: rivers that random players can keep clean.
EASE = {"DirtSpawner": {"dirtSpawnProbability": 0.1}, "AppleGrow": {"thresholdDepletion": 0.9}}
EASED = {"dirt_spawn_probability": 0.1, "threshold_depletion": 0.9}
LIKELY = [1, 8, 1, 1, 1, 1, 1, 1, 3]  # of actions
GAMES = {
    # substrate, oracle, layers of apples and of players, changes there and here, steps
    "harvest": (commons_harvest__open, HarvestOracle, (3, 4), {}, {}, 1000),
    "cleanup": (clean_up, CleanupOracle, (4, 6), {}, {}, 300),
    "cleanup, eased": (clean_up, CleanupOracle, (4, 6), EASE, EASED, 1000),
}


class Substrate:
    """A substrate of Melting Pot, and what its state is in the oracle's words."""

    def __init__(self, module, layers, changes, seed):
        module._ENABLE_DEBUG_OBSERVATIONS = True  # where players are, and which way they face
        config = module.get_config()
        settings = module.build(config.default_player_roles, config)
        view = dict.fromkeys(("left", "right", "forward", "backward"), SIDE) | {"centered": False}
        changes = {**changes, "Avatar": {"view": view}}
        simulation = copy.deepcopy(settings["simulation"])
        for thing in (*simulation["gameObjects"], *simulation["prefabs"].values(), simulation["scene"]):
            for component in thing["components"]:
                component.get("kwargs", {}).update(changes.get(component["component"], {}))
        settings["simulation"] = simulation
        self.env = builder.builder(settings, env_seed=seed)
        self.layers = layers
        self.cleans = module is clean_up
        self.beams, self.seen = [], self.env.reset().observation
        self.rewards = np.zeros(7, np.float32)

    def find_beams(self):
        """After a step in which all zapped: which of the last layers shows that differs from start to start."""
        views = sum(self.seen[f"{i + 1}.LAYER"].astype(int) > 0 for i in range(7)).sum((0, 1))
        self.beams = sorted(range(7, len(views)), key=lambda layer: -views[layer])

    def step(self, actions):
        given = {}
        for i, action in enumerate(actions):
            move, turn = ACTIONS[action]
            given |= {f"{i + 1}.move": move, f"{i + 1}.turn": turn, f"{i + 1}.fireZap": int(action == ZAP)}
            if self.cleans:
                given[f"{i + 1}.fireClean"] = int(action == CLEAN)
        timestep = self.env.step({name: np.array(value, np.int32) for name, value in given.items()})
        self.seen = timestep.observation
        self.rewards = np.array([float(self.seen[f"{i + 1}.REWARD"]) for i in range(7)], np.float32)
        assert not timestep.last()

    @property
    def position(self):
        return np.array([self.seen[f"{i + 1}.POSITION"] for i in range(7)], np.int32)

    @property
    def orientation(self):
        return np.array([self.seen[f"{i + 1}.ORIENTATION"] for i in range(7)], np.int32)

    @property
    def ready(self):
        return np.array([float(self.seen[f"{i + 1}.READY_TO_SHOOT"]) for i in range(7)])

    def layer(self, oracle, viewer, layer):
        """Cell -> sprite, as a player sees it."""
        x, y = self.position[viewer]
        window = self.seen[f"{viewer + 1}.LAYER"][..., layer]
        return {(cx, cy): int(window[cy - y + SIDE, cx - x + SIDE]) for cx, cy in oracle.tiles}

    def state(self, oracle):
        """Apples, dirty cells, cells with players, lit cells; by a player that is not out, which sees all walls."""
        walls, layer = set(oracle.cells("W")), self.layers[1]
        views = ({cell for cell, sprite in self.layer(oracle, i, layer).items() if sprite} for i in range(7))
        viewer = next(i for i, view in enumerate(views) if walls <= view and len(view) <= len(walls) + 7)
        sprites = {cell for cell, sprite in self.layer(oracle, viewer, self.layers[0]).items() if sprite}
        players = {cell for cell, sprite in self.layer(oracle, viewer, self.layers[1]).items() if sprite}
        lit = {}
        for bit, layer in zip((1, 2), self.beams, strict=False):
            for cell in (cell for cell, sprite in self.layer(oracle, viewer, layer).items() if sprite):
                lit[cell] = lit.get(cell, 0) | bit
        return {
            "apples": sprites & set(oracle.cells("A")),
            "dirty": sprites & set(oracle.cells("HF")),
            "players": players - walls,
            "lit": lit,
        }


class Drawn:
    """What Melting Pot drew in a step: what the oracle asks for, read from the states before and after the step."""

    def __init__(self, oracle, theirs, after, order, dirt):
        self.theirs, self.after, self.chosen, self.polluted, self.asked = theirs, after, order, dirt, []
        self.grown = after["apples"] - oracle.apples
        # An apple that grew and was eaten in the same step is known by its reward.
        for i in np.flatnonzero(oracle.respawn_in == 0):
            was, now = (tuple(map(int, place[i])) for place in (oracle.position, theirs.position))
            rewards = int(theirs.rewards[i]) - (was != now and now in oracle.apples)
            for cell in dict.fromkeys((now, was)):
                if rewards > 0 and oracle.tiles[cell] == "A" and cell not in oracle.apples:
                    self.grown.add(cell)
                    rewards -= 1

    def order(self, n):
        return self.chosen

    def grows(self, cell, probability):
        self.asked.append((float(probability), cell in self.grown))
        return cell in self.grown

    def dirt(self, cells, probability):
        return self.polluted

    def spawn(self, i, cells):
        place = tuple(map(int, self.theirs.position[i]))
        assert place in cells
        return place, self.theirs.orientation[i]


def rewarded_twice(before, actions, theirs, draws):
    """Rewards of Melting Pot's cleanup for an apple that was eaten already.

    It grew under a player before anyone moved, and is there until all have moved. Who enters the cell then is rewarded
    again, and so is the player itself, if it wants to go and cannot.
    """
    under = draws.grown & set(before.where()) if isinstance(before, CleanupOracle) else set()
    moves = (before.respawn_in == 0) & (actions >= FORWARD) & (actions <= RIGHT)
    return np.array([moves[i] and tuple(map(int, theirs.position[i])) in under for i in range(7)], np.float32)


def differences(oracle, theirs, after, again=0):
    """Names of what is not equal."""
    alive = oracle.respawn_in == 0
    ready = np.where(alive, 1 - oracle.zap_wait / oracle.zap_cooldown, 0)
    pairs = {
        "position": (oracle.position[alive], theirs.position[alive]),
        "orientation": (oracle.orientation[alive], theirs.orientation[alive]),
        "rewards": (oracle.rewards + again, theirs.rewards),
        "ready": (ready, theirs.ready),
    }
    found = [name for name, (ours, given) in pairs.items() if not np.array_equal(ours, given)]
    found += ["players"] * (set(oracle.where()) != after["players"])
    found += ["apples"] * (oracle.apples != after["apples"])
    found += ["lit"] * (oracle.lit != after["lit"])
    found += ["dirty"] * (getattr(oracle, "dirty", set()) != after["dirty"])
    return found


def follow(oracle, theirs, actions, random):
    """The oracle after the step that Melting Pot has played, and what was drawn in it."""
    after, closest = theirs.state(oracle), None
    # A cell that got dirty and was cleaned in the same step shows only in the beams that ended there.
    new = sorted(after["dirty"] - getattr(oracle, "dirty", set()))
    spots = new or [None, *(cell for cell in oracle.cells("HF") if cell not in getattr(oracle, "dirty", set()))]
    orders = itertools.chain([np.arange(7), np.arange(7)[::-1]], (random.permutation(7) for _ in range(300)))
    for order, dirt in itertools.chain(((order, spots[0]) for order in orders), ((np.arange(7), d) for d in spots[1:])):
        trial, draws = copy.deepcopy(oracle), None
        draws = Drawn(oracle, theirs, after, order, dirt)
        trial.step(actions, draws)
        found = differences(trial, theirs, after, rewarded_twice(oracle, actions, theirs, draws))
        if not found:
            return trial, draws
        closest = found if closest is None or len(found) < len(closest) else closest
    raise AssertionError(f"step {oracle.elapsed_steps + 1}: {closest} differ, whatever the order")


@pytest.mark.parametrize("name", GAMES)
def test_every_step_is_that_of_melting_pot(name):
    module, kind, layers, changes, config, steps = GAMES[name]
    theirs, oracle, random = Substrate(module, layers, changes, 3), kind(**config), np.random.default_rng(5)
    oracle.position, oracle.orientation, oracle.rewards = theirs.position, theirs.orientation, theirs.rewards
    if name == "harvest":
        oracle.apples = set(oracle.cells("A"))
    assert_valid_start(oracle)
    assert not differences(oracle, theirs, theirs.state(oracle))
    likely, asked, spawned = np.array(LIKELY[: 8 + theirs.cleans]), [], 0
    for step in range(steps):
        actions = random.choice(len(likely), 7, p=likely / likely.sum()) if step else np.full(7, ZAP)
        theirs.step(actions)
        if step == 0:
            theirs.find_beams()
        oracle, draws = follow(oracle, theirs, actions, random)
        asked += draws.asked
        spawned += draws.polluted is not None
    assert oracle.steps_out.sum() > 100 and (oracle.eaten.sum() > 100 or name == "cleanup")
    for probability in {probability for probability, _ in asked}:
        grown = [did for asked_for, did in asked if asked_for == probability]
        expected = len(grown) * max(probability, 0)
        assert abs(sum(grown) - expected) <= 5 * np.sqrt(expected), f"{sum(grown)} of {len(grown)} at {probability}"
    if theirs.cleans:  # one draw in each step after the delay; the river never is dirty all over
        expected, probability = (steps - oracle.delay) * float(oracle.pollution), float(oracle.pollution)
        assert oracle.cleaned.sum() > 30
        assert abs(spawned - expected) <= 5 * np.sqrt(expected * (1 - probability))
