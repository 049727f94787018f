"""The oracle of overcooked against overcooked_ai 1.1.0 itself: random and scripted play on the five layouts.

The package on PyPI has no ``old_dynamics``; in its repository that flag does two things, which ``OldDynamics`` does to
the package's class: a pot with three onions begins to cook by itself, and interacting with empty hands begins nothing.
"""

import numpy as np
import pytest
from oracles.overcooked import LAYOUTS, THINGS, OvercookedOracle
from overcooked_ai_py.mdp.actions import Action
from overcooked_ai_py.mdp.overcooked_mdp import ObjectState, OvercookedGridworld, SoupState
from support.cooks import act


class OldDynamics(OvercookedGridworld):
    """overcooked_ai's rules with old_dynamics=True."""

    def soup_to_be_cooked_at_location(self, state, pos):
        return False

    def step_environment_effects(self, state):
        for thing in state.objects.values():
            if thing.name == "soup" and thing.is_idle and len(thing.ingredients) == 3:
                thing.begin_cooking()
        super().step_environment_effects(state)


def reference(layout, **config):
    theirs = OvercookedGridworld.from_layout_name(layout, **config)
    theirs.__class__ = OldDynamics  # from_layout_name makes the base class
    return theirs


def arrays(state, oracle):
    """Their state in the game's arrays."""
    item = np.zeros((oracle.height, oracle.width), np.uint8)
    cooking_tick = item.copy()
    for (x, y), thing in state.objects.items():
        pot = oracle.tiles[x, y] == "P"
        item[y, x] = len(thing.ingredients) if pot else THINGS.index(thing.name)
        cooking_tick[y, x] = max(thing._cooking_tick, 0) if pot else 0
    held = [THINGS.index(player.held_object.name if player.held_object else None) for player in state.players]
    orientation = [Action.ACTION_TO_INDEX[player.orientation] for player in state.players]
    return {
        "position": [list(player.position) for player in state.players],
        "orientation": orientation,
        "held": held,
        "item": item,
        "cooking_tick": cooking_tick,
    }


def fill(state, oracle, random):
    """Put things on counters, into pots and into hands, in both."""
    item, tick = oracle.item, oracle.cooking_tick
    for x, y in oracle.cells("X"):
        item[y, x] = random.choice([0, 0, 0, 1, 2, 3])
    for x, y in oracle.cells("P"):
        item[y, x] = random.integers(4)
        tick[y, x] = random.integers(1, oracle.cook_time + 1) if item[y, x] == 3 else 0
    oracle.item, oracle.cooking_tick = item, tick
    oracle.held[:] = random.integers(4, size=2)
    for cell, thing in oracle.things.items():
        state.add_object(made(thing, cell), cell)
    for cell, (onions, ticks) in oracle.soups.items():
        state.add_object(SoupState.get_soup(cell, onions, cooking_tick=ticks if onions == 3 else -1), cell)
    for player, number in zip(state.players, oracle.held, strict=True):
        if number:
            player.set_object(made(THINGS[number], player.position))


def made(thing, cell):
    return SoupState.get_soup(cell, 3, finished=True) if thing == "soup" else ObjectState(thing, cell)


def compare(theirs, state, oracle, step):
    for name, expected in arrays(state, oracle).items():
        np.testing.assert_array_equal(getattr(oracle, name), expected, f"{name}, step {step}")
    encoded = np.stack(theirs.lossless_state_encoding(state, oracle.max_steps))  # (2, width, height, 26)
    np.testing.assert_array_equal(oracle.observe(), encoded.swapaxes(1, 2), f"obs, step {step}")


@pytest.mark.parametrize("play", ["random", "interacting", "scripted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_overcooked_ai(layout, play, random_seed):
    theirs, random = reference(layout), np.random.default_rng(random_seed)
    assert ["".join(row) for row in theirs.terrain_mtx] == [
        "".join(oracle_row) for oracle_row in np.array([*OvercookedOracle(layout_name=layout).tiles.values()]).reshape(
            theirs.height, theirs.width
        )
    ]  # fmt: skip
    returns = np.zeros(2)
    for episode in range(3):
        oracle, state = OvercookedOracle(layout_name=layout), theirs.get_standard_start_state()
        if episode and play != "scripted":
            fill(state, oracle, random)
        compare(theirs, state, oracle, "start")
        for step in range(oracle.max_steps):
            if play == "scripted":
                actions = [act(oracle, i, random) for i in range(2)]
            else:
                actions = random.choice(6, 2, p=[0.15] * 4 + [0.1, 0.3] if play == "random" else [0.1] * 4 + [0, 0.6])
            state, infos = theirs.get_state_transition(state, [Action.INDEX_TO_ACTION[action] for action in actions])
            rewards, terminations, truncations = oracle.step(actions)
            sparse, shaped = infos["sparse_reward_by_agent"], infos["shaped_reward_by_agent"]
            assert rewards.tolist() == [sum(sparse) + own for own in shaped], step
            returns += sum(sparse), sum(shaped)
            compare(theirs, state, oracle, step)
        assert truncations.all() and not terminations.any() and state.timestep == 400
    assert returns[1] > 0 and (play != "scripted" or returns[0] >= 3 * 80)


def test_rewards_that_a_weight_changes():
    """A soup that cooks shorter, and other shaped rewards, are parameters of overcooked_ai too."""
    shaped = {"PLACEMENT_IN_POT_REW": 1, "DISH_PICKUP_REWARD": 2, "SOUP_PICKUP_REWARD": 7}
    theirs = reference("cramped_room", cook_time=6, delivery_reward=11, rew_shaping_params=shaped)
    ours = {"placement_in_pot_reward": 1, "dish_pickup_reward": 2, "soup_pickup_reward": 7}
    oracle, state = OvercookedOracle(cook_time=6, delivery_reward=11, **ours), theirs.get_standard_start_state()
    random, served = np.random.default_rng(7), 0
    for step in range(400):
        actions = [act(oracle, i, random) for i in range(2)]
        state, infos = theirs.get_state_transition(state, [Action.INDEX_TO_ACTION[action] for action in actions])
        sparse, shaped = infos["sparse_reward_by_agent"], infos["shaped_reward_by_agent"]
        assert oracle.step(actions)[0].tolist() == [sum(sparse) + own for own in shaped], step
        served += sum(sparse)
        compare(theirs, state, oracle, step)
    assert served >= 55
