"""Oracles of harvest and cleanup for one environment, written from the rules of Melting Pot alone.

Cells are pairs (x, y); apples, dirt and beams are sets of them. The arrays that the games call apple, dirt, near and
beam are made of these, and read back into them. What is random comes from ``draws``:

    order(n)                  a permutation of n players, in which they move
    grows(cell, probability)  whether an apple grows
    dirt(cells, probability)  one of these cells, or None
    spawn(i, cells)           one of these free cells, and the way that player i faces there
"""

import numpy as np

F = np.float32
HARVEST = """
WWWWWWWWWWWWWWWWWWWWWWWW
WAAA    A      A    AAAW
WAA    AAA    AAA    AAW
WA    AAAAA  AAAAA    AW
W      AAA    AAA      W
W       A      A       W
W  A                A  W
W AAA  Q        Q  AAA W
WAAAAA            AAAAAW
W AAA              AAA W
W  A                A  W
W                      W
W                      W
W                      W
W  PPPPPPPPPPPPPPPPPP  W
W PPPPPPPPPPPPPPPPPPPP W
WPPPPPPPPPPPPPPPPPPPPPPW
WWWWWWWWWWWWWWWWWWWWWWWW
"""
# Melting Pot's characters; what they are here is in MEANING.
CLEANUP = """
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
WHFFFHFFHFHFHFHFHFHFHHFHFFFHFW
WHFHFHFFHFHFHFHFHFHFHHFHFFFHFW
WHFFHFFHHFHFHFHFHFHFHHFHFFFHFW
WHFHFHFFHFHFHFHFHFHFHHFHFFFHFW
WHFFFFFFHFHFHFHFHFHFHHFHFFFHFW
W==============+~FHHHHHHf====W
W   P    P      ===+~SSf     W
W     P     P   P  <~Sf  P   W
W             P   P<~S>      W
W   P    P         <~S>   P  W
W               P  <~S>P     W
W     P           P<~S>      W
W           P      <~S> P    W
W  P             P <~S>      W
W^T^T^T^T^T^T^T^T^T;~S,^T^T^TW
WBBBBBBBBBBBBBBBBBBBssBBBBBBBW
WBBBBBBBBBBBBBBBBBBBBBBBBBBBBW
WBBBBBBBBBBBBBBBBBBBBBBBBBBBBW
WBBBBBBBBBBBBBBBBBBBBBBBBBBBBW
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
"""
MEANING = {**dict.fromkeys("=+f><;,^s", " "), "~": "R", "S": "R", "T": "A", "B": "A"}
NOOP, FORWARD, BACKWARD, LEFT, RIGHT, TURN_LEFT, TURN_RIGHT, ZAP, CLEAN = range(9)
WAYS = [(0, -1), (1, 0), (0, 1), (-1, 0)]  # north, east, south, west
RELATIVE = {FORWARD: 0, RIGHT: 1, BACKWARD: 2, LEFT: 3}
WAITS = 255


def moved(cell, orientation, ahead=0, right=0):
    """The cell so many steps ahead and to the right."""
    (fx, fy), (rx, ry) = WAYS[orientation % 4], WAYS[(orientation + 1) % 4]
    return cell[0] + ahead * fx + right * rx, cell[1] + ahead * fy + right * ry


class CommonsOracle:
    """What both games share: players, beams, views."""

    fields = ("position", "orientation", "zap_wait", "respawn_in", "eaten", "eaten_at", "steps_out", "apple", "beam")

    def __init__(
        self,
        text,
        *,
        num_agents=7,
        max_steps=1000,
        apple_reward=1,
        zap_reward=0,
        zapped_penalty=0,
        common_reward="none",
        zap_cooldown=2,
        zapped_steps=4,
        beam_length=3,
        beam_radius=1,
        view_ahead=9,
        view_behind=1,
        view_side=5,
    ):
        rows = [[MEANING.get(tile, tile) for tile in row.strip()] for row in text.strip().split("\n")]
        self.tiles = {(x, y): tile for y, row in enumerate(rows) for x, tile in enumerate(row)}
        self.width, self.height, self.n = len(rows[0]), len(rows), num_agents
        self.max_steps, self.common_reward = max_steps, common_reward
        self.apple_reward, self.zap_reward, self.zapped_penalty = F(apple_reward), F(zap_reward), F(zapped_penalty)
        self.zap_cooldown, self.zapped_steps = zap_cooldown, zapped_steps
        self.beam_length, self.beam_radius = beam_length, beam_radius
        self.view = view_ahead, view_behind, view_side
        self.elapsed_steps, self.active = 0, np.ones(num_agents, bool)
        self.apples, self.lit = set(), {}
        self.position = np.zeros((num_agents, 2), np.int32)
        for name in ("orientation", "zap_wait", "respawn_in", "eaten", "eaten_at", "steps_out"):
            setattr(self, name, np.zeros(num_agents, np.int32))

    def cells(self, tiles):
        """Row by row."""
        return [cell for cell, tile in self.tiles.items() if tile in tiles]

    def as_array(self, values):
        found = np.zeros((self.height, self.width), np.uint8)
        for (x, y), value in values.items():
            found[y, x] = value
        return found

    def as_dict(self, array):
        return {(int(x), int(y)): int(array[y, x]) for y, x in np.argwhere(array)}

    @property
    def apple(self):
        return self.as_array(dict.fromkeys(self.apples, 1))

    @apple.setter
    def apple(self, array):
        self.apples = set(self.as_dict(array))
        assert all(self.tiles[cell] == "A" for cell in self.apples)

    @property
    def beam(self):
        return self.as_array(self.lit)

    @beam.setter
    def beam(self, array):
        self.lit = self.as_dict(array)

    def where(self):
        """Cell -> player, of those that are not out."""
        return {tuple(map(int, self.position[i])): i for i in range(self.n) if not self.respawn_in[i]}

    # ------------------------------------------------------------------ a step

    def step(self, actions, draws):
        """Play one step and return (rewards, terminations, truncations)."""
        self.elapsed_steps += 1
        self.rewards, self.lit, self.hit = np.zeros(self.n, F), {}, []
        here = self.respawn_in == 0
        actions = np.where(here, actions, NOOP)
        self.before(draws)
        self.move(actions, draws.order(self.n))
        self.zap(actions, here)
        self.clean(actions, here)
        for i in np.flatnonzero(~here):
            self.steps_out[i] += 1
            taken = self.where()
            self.respawn_in[i] -= 1
            if self.respawn_in[i] == 0:
                self.position[i], self.orientation[i] = draws.spawn(i, [c for c in self.cells("P") if c not in taken])
        self.after(draws)
        for i in self.hit:
            self.respawn_in[i] = self.zapped_steps + 1
        if self.common_reward != "none":
            total = F(0)
            for reward in self.rewards:
                total += reward
            self.rewards[:] = total * F(1 / self.n if self.common_reward == "mean" else 1)
        late = np.full(self.n, self.elapsed_steps >= self.max_steps)
        self.active = ~late
        return self.rewards, np.zeros(self.n, bool), late

    def before(self, draws):
        pass

    def after(self, draws):
        pass

    def clean(self, actions, here):
        pass

    def move(self, actions, order):
        for i in order:
            if actions[i] in (TURN_LEFT, TURN_RIGHT):
                self.orientation[i] = (self.orientation[i] + (1 if actions[i] == TURN_RIGHT else 3)) % 4
            elif actions[i] in RELATIVE:
                cell = moved(tuple(map(int, self.position[i])), self.orientation[i] + RELATIVE[actions[i]], 1)
                if self.tiles[cell] != "W" and cell not in self.where():
                    self.position[i] = cell
                    if cell in self.apples:
                        self.eat(i, cell)

    def eat(self, i, cell):
        self.apples.remove(cell)
        self.rewards[i] += self.apple_reward
        self.eaten[i] += 1
        self.eaten_at[i] += self.elapsed_steps

    def grow(self, cell):
        self.apples.add(cell)
        if cell in self.where():
            self.eat(self.where()[cell], cell)

    def rays(self, i):
        """Cells of each ray; one whose first cell is blocked hides the rays beyond it."""
        cell, way, length = tuple(map(int, self.position[i])), self.orientation[i], self.beam_length
        yield [[moved(cell, way, 1 + k) for k in range(length)]]
        for side in (-1, 1):
            yield [
                [moved(cell, way, k, side * r) for k in range(length - r + 1)] for r in range(1, self.beam_radius + 1)
            ]

    def fire(self, i, bit, stops):
        for rays in self.rays(i):
            for ray in rays:
                blocked = next((k for k, c in enumerate(ray) if self.tiles[c] == "W" or stops(c)), len(ray))
                for cell in ray[:blocked]:
                    self.lit[cell] = self.lit.get(cell, 0) | bit
                if ray and blocked == 0:
                    break

    def shooters(self, actions, here, action, wait, cooldown):
        for i in np.flatnonzero(here):
            if wait[i] > 0:
                wait[i] -= 1
            elif actions[i] == action:
                wait[i] = cooldown
                yield int(i)

    def zap(self, actions, here):
        where = self.where()
        for i in self.shooters(actions, here, ZAP, self.zap_wait, self.zap_cooldown):

            def stops(cell, i=i):
                if cell in where:
                    self.hit.append(where[cell])
                    self.rewards[where[cell]] -= self.zapped_penalty
                    self.rewards[i] += self.zap_reward
                return cell in where

            self.fire(i, 1, stops)

    # ------------------------------------------------------------------ what is seen

    def observe(self):
        """Return the (n, rows, columns, channels) observations of the current state."""
        ahead, behind, side = self.view
        where, found = self.where(), []
        for i in range(self.n):
            rows = []
            for forth in range(ahead, -behind - 1, -1):
                for right in range(-side, side + 1):
                    cell = moved(tuple(map(int, self.position[i])), self.orientation[i], forth, right)
                    rows.append(self.pixel(i, cell, where))
            image = np.array(rows, np.uint8).reshape(ahead + 1 + behind, 2 * side + 1, -1)
            found.append(image if not self.respawn_in[i] else np.zeros_like(image))
        return np.array(found)

    def pixel(self, i, cell, where):
        tile, other = self.tiles.get(cell, "W"), where.get(cell, i)
        turns = (self.orientation[other] - self.orientation[i]) % 4
        facing = [other != i and turns == turn for turn in range(4)]
        lit, ready = self.lit.get(cell, 0), 255 * (self.zap_cooldown - self.zap_wait[i]) // self.zap_cooldown
        flags = [
            tile == "W",
            cell in self.apples,
            tile == "A",
            None,
            *facing,
            lit & 1,
            *self.own_flags(cell, tile, lit),
        ]
        return [ready if flag is None else 255 * bool(flag) for flag in flags]

    def own_flags(self, cell, tile, lit):
        return []


class HarvestOracle(CommonsOracle):
    """Apples that grow where others are near."""

    fields = (*CommonsOracle.fields, "near")

    def __init__(self, *, grid=HARVEST, radius=2, probabilities=(0, 0.0025, 0.005, 0.025), **config):
        super().__init__(grid, **config)
        self.radius, self.probabilities = radius, [F(p) for p in probabilities]
        self.around = dict.fromkeys(self.cells("A"), WAITS)  # bare cell -> apples near it, a step ago

    @property
    def near(self):
        return self.as_array({**dict.fromkeys(self.tiles, WAITS), **self.around})

    @near.setter
    def near(self, array):
        self.around = {cell: int(array[cell[1], cell[0]]) for cell in self.around}

    def count(self, x, y):
        return sum(0 < (x - a) ** 2 + (y - b) ** 2 <= self.radius**2 for a, b in self.apples)

    def before(self, draws):
        bare = [cell for cell in self.around if cell not in self.apples]
        ripe = [cell for cell in bare if self.around[cell] != WAITS]
        self.growing = [c for c in ripe if draws.grows(c, self.probabilities[min(self.around[c], 3)])]
        self.around = {c: self.count(*c) if c in bare and c not in self.growing else WAITS for c in self.around}

    def after(self, draws):
        for cell in self.growing:
            self.grow(cell)


class CleanupOracle(CommonsOracle):
    """Apples that grow while the river is clean."""

    fields = (*CommonsOracle.fields, "clean_wait", "cleaned", "dirt")

    def __init__(
        self,
        *,
        grid=CLEANUP,
        zap_cooldown=10,
        zapped_steps=50,
        clean_cooldown=2,
        max_apple_growth_rate=0.05,
        threshold_depletion=0.4,
        threshold_restoration=0,
        dirt_spawn_probability=0.5,
        dirt_spawn_delay=50,
        **config,
    ):
        super().__init__(grid, zap_cooldown=zap_cooldown, zapped_steps=zapped_steps, **config)
        self.clean_cooldown, self.growth, self.delay = clean_cooldown, F(max_apple_growth_rate), dirt_spawn_delay
        self.depletion, self.restoration = F(threshold_depletion), F(threshold_restoration)
        self.pollution = F(dirt_spawn_probability)
        self.dirty = set(self.cells("F"))
        self.clean_wait, self.cleaned = np.zeros((2, self.n), np.int32)

    @property
    def dirt(self):
        return self.as_array(dict.fromkeys(self.dirty, 1))

    @dirt.setter
    def dirt(self, array):
        self.dirty = set(self.as_dict(array))
        assert all(self.tiles[cell] in "HF" for cell in self.dirty) and array.max() <= 1

    def before(self, draws):
        river = self.cells("HF")
        share = F(len(self.dirty)) / F(len(river))
        ratio = min((share - self.depletion) / (self.restoration - self.depletion), F(1))
        for cell in self.cells("A"):
            if cell not in self.apples and draws.grows(cell, self.growth * ratio):
                self.grow(cell)
        clean = [cell for cell in river if cell not in self.dirty]
        if self.elapsed_steps > self.delay and clean:
            self.dirty |= {cell for cell in [draws.dirt(clean, self.pollution)] if cell}

    def clean(self, actions, here):
        gone = set()
        for i in self.shooters(actions, here, CLEAN, self.clean_wait, self.clean_cooldown):

            def stops(cell, i=i):
                if cell in self.dirty:
                    gone.add(cell)
                    self.cleaned[i] += 1
                return cell in self.dirty

            self.fire(i, 2, stops)
        self.dirty -= gone

    def own_flags(self, cell, tile, lit):
        return [tile in "RHF", cell in self.dirty, lit & 2]


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    assert not any(getattr(oracle, name).any() for name in ("zap_wait", "respawn_in", "eaten", "eaten_at", "steps_out"))
    cells = [tuple(map(int, cell)) for cell in oracle.position]
    first = len(oracle.cells("Q"))
    assert len(set(cells)) == oracle.n and not oracle.lit
    assert all(oracle.tiles[cell] == ("Q" if i < first else "P") for i, cell in enumerate(cells))
    assert ((oracle.orientation >= 0) & (oracle.orientation < 4)).all()
    if isinstance(oracle, HarvestOracle):
        assert oracle.apples == set(oracle.cells("A")) and (oracle.near == WAITS).all()
    else:
        assert not oracle.apples and oracle.dirty == set(oracle.cells("F"))
        assert not oracle.clean_wait.any() and not oracle.cleaned.any()
