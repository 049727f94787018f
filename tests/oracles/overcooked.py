"""Oracle of overcooked for one environment, written from the rules of overcooked_ai alone.

Things lie in a dictionary, cell (x, y) -> what is there; a pot's soup is a pair [onions, cooking ticks]. The arrays
that the game calls item and cooking_tick are made of it, and read back into it. Everything is an integer up to the
reward, whose two terms are float32.

Players interact one after the other, then both move, then soups cook. Whether a dish is useful is decided by the pots
as they were before anybody interacted, by the dishes on counters and in hands as they are.
"""

import numpy as np

F = np.float32
LAYOUTS = {
    "cramped_room": ["XXPXX", "O  2O", "X1  X", "XDXSX"],
    "asymmetric_advantages": ["XXXXXXXXX", "O XSXOX S", "X   P 1 X", "X2  P   X", "XXXDXDXXX"],
    "coordination_ring": ["XXXPX", "X 1 P", "D2X X", "O   X", "XOSXX"],
    "forced_coordination": ["XXXPX", "O X1P", "O2X X", "D X X", "XXXSX"],
    "counter_circuit_o_1order": ["XXXPPXXX", "X  2   X", "D XXXX S", "X  1   X", "XXXOOXXX"],
}
NORTH, SOUTH, EAST, WEST, STAY, INTERACT = range(6)
STEPS = {NORTH: (0, -1), SOUTH: (0, 1), EAST: (1, 0), WEST: (-1, 0)}
THINGS = [None, "onion", "dish", "soup"]
CHANNELS = 26


class OvercookedOracle:
    """Two players cook soups of three onions."""

    def __init__(
        self,
        *,
        layout_name="cramped_room",
        grid="",
        max_steps=400,
        cook_time=20,
        delivery_reward=20,
        placement_in_pot_reward=3,
        dish_pickup_reward=3,
        soup_pickup_reward=5,
        shaping=1,
        random_start_positions=False,
        random_object_probability=0,
    ):
        rows = [row.strip() for row in grid.strip().split("\n")] if grid else LAYOUTS[layout_name]
        tiles = {(x, y): tile for y, row in enumerate(rows) for x, tile in enumerate(row)}
        self.starts = [next(cell for cell, tile in tiles.items() if tile == digit) for digit in "12"]
        self.tiles = {cell: " " if tile in "12" else tile for cell, tile in tiles.items()}
        self.width, self.height = len(rows[0]), len(rows)
        self.max_steps, self.cook_time = max_steps, cook_time
        self.delivery_reward, self.shaping = F(delivery_reward), F(shaping)
        self.placement_in_pot_reward, self.dish_pickup_reward = F(placement_in_pot_reward), F(dish_pickup_reward)
        self.soup_pickup_reward = F(soup_pickup_reward)
        self.random_start_positions, self.random_objects = random_start_positions, random_object_probability > 0
        self.elapsed_steps, self.active = 0, np.ones(2, bool)
        self.position, self.orientation = np.array(self.starts, np.int32), np.zeros(2, np.int32)
        self.held = np.zeros(2, np.int32)
        self.things, self.soups = {}, {}
        self.sparse_return = F(0)

    def cells(self, tile):
        return [cell for cell, other in self.tiles.items() if other == tile]

    @property
    def item(self):
        found = np.zeros((self.height, self.width), np.uint8)
        for (x, y), thing in self.things.items():
            found[y, x] = THINGS.index(thing)
        for (x, y), (onions, _) in self.soups.items():
            found[y, x] = onions
        return found

    @item.setter
    def item(self, value):
        cells = {(x, y): int(value[y, x]) for x, y in self.tiles if value[y, x]}
        self.things = {cell: THINGS[number] for cell, number in cells.items() if self.tiles[cell] == "X"}
        self.soups = {cell: [number, 0] for cell, number in cells.items() if self.tiles[cell] == "P"}
        assert len(self.things) + len(self.soups) == len(cells), "something lies on the floor or on a dispenser"

    @property
    def cooking_tick(self):
        found = np.zeros((self.height, self.width), np.uint8)
        for (x, y), (_, ticks) in self.soups.items():
            found[y, x] = ticks
        return found

    @cooking_tick.setter
    def cooking_tick(self, value):  # after item
        for (x, y), soup in self.soups.items():
            soup[1] = int(value[y, x])
        assert (self.cooking_tick == value).all(), "something cooks without a soup"

    def step(self, actions):
        """Play one step and return (rewards, terminations, truncations)."""
        if not self.active.any():
            return np.zeros(2, F), np.zeros(2, bool), np.zeros(2, bool)
        self.elapsed_steps += 1
        useful_pots = len(self.soups)
        deliveries, shaped = 0, [F(0), F(0)]
        for i, action in enumerate(actions):
            if action == INTERACT:
                delivered, shaped[i] = self.interact(i, useful_pots)
                deliveries += delivered
        self.move(actions)
        for soup in self.soups.values():
            if soup[0] == 3 and soup[1] < self.cook_time:
                soup[1] += 1
        sparse = F(deliveries) * self.delivery_reward
        self.sparse_return = F(self.sparse_return + sparse)
        rewards = np.array([sparse + self.shaping * own for own in shaped], F)
        ended = np.full(2, self.elapsed_steps >= self.max_steps)
        self.active = ~ended
        return rewards, np.zeros(2, bool), ended

    def interact(self, i, useful_pots):
        dx, dy = STEPS[int(self.orientation[i])]
        cell = (int(self.position[i][0]) + dx, int(self.position[i][1]) + dy)
        tile, held = self.tiles[cell], THINGS[self.held[i]]
        if tile == "X":
            if held and cell not in self.things:
                self.things[cell] = held
                self.hold(i, None)
            elif not held and cell in self.things:
                self.hold(i, self.things.pop(cell))
        elif tile == "O" and not held:
            self.hold(i, "onion")
        elif tile == "D" and not held:
            useful = "dish" not in self.things.values() and list(self.held).count(2) < useful_pots
            self.hold(i, "dish")
            return 0, self.dish_pickup_reward if useful else F(0)
        elif tile == "P" and held == "dish" and self.soups.get(cell) == [3, self.cook_time]:
            del self.soups[cell]
            self.hold(i, "soup")
            return 0, self.soup_pickup_reward
        elif tile == "P" and held == "onion" and self.soups.get(cell, [0])[0] < 3:
            self.soups.setdefault(cell, [0, 0])[0] += 1
            self.hold(i, None)
            return 0, self.placement_in_pot_reward
        elif tile == "S" and held == "soup":
            self.hold(i, None)
            return 1, F(0)
        return 0, F(0)

    def hold(self, i, thing):
        self.held[i] = THINGS.index(thing)

    def move(self, actions):
        before = [tuple(map(int, cell)) for cell in self.position]
        after = list(before)
        for i, action in enumerate(actions):
            if action in STEPS:
                self.orientation[i] = action
                target = (before[i][0] + STEPS[action][0], before[i][1] + STEPS[action][1])
                if self.tiles.get(target) == " ":
                    after[i] = target
        if after[0] != after[1] and after != before[::-1]:
            self.position = np.array(after, np.int32)

    def observe(self):
        """Return the (2, height, width, 26) observations of the current state."""
        obs = np.zeros((2, self.height, self.width, CHANNELS), F)
        for i in range(2):
            for place, player in enumerate((i, 1 - i)):
                x, y = self.position[player]
                obs[i, y, x, place] = 1
                obs[i, y, x, 2 + 4 * place + self.orientation[player]] = 1
        for channel, tile in zip(range(10, 16), "PXOTDS", strict=True):
            for x, y in self.cells(tile):
                obs[:, y, x, channel] = 1
        for (x, y), (onions, ticks) in self.soups.items():
            if onions < 3:
                obs[:, y, x, 16] = onions
            else:
                obs[:, y, x, 18] = 3
                obs[:, y, x, 20] = self.cook_time - ticks
                obs[:, y, x, 21] = ticks == self.cook_time
        held = [((int(x), int(y)), THINGS[thing]) for (x, y), thing in zip(self.position, self.held, strict=True)]
        for (x, y), thing in [*self.things.items(), *held]:
            if thing == "soup":
                obs[:, y, x, 18] += 3
                obs[:, y, x, 21] += 1
            elif thing:
                obs[:, y, x, {"dish": 22, "onion": 23}[thing]] += 1
        if self.max_steps - self.elapsed_steps < 40:
            obs[..., 25] = 1
        return obs


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    assert oracle.elapsed_steps == 0 and oracle.sparse_return == 0
    assert (oracle.orientation == NORTH).all() and not oracle.things
    cells = [tuple(map(int, cell)) for cell in oracle.position]
    assert cells[0] != cells[1] and all(oracle.tiles[cell] == " " for cell in cells)
    assert oracle.random_start_positions or cells == oracle.starts
    assert oracle.random_objects or (not oracle.soups and not oracle.held.any())
    assert all(ticks == 0 and 1 <= onions <= 3 for onions, ticks in oracle.soups.values())
