"""Oracle of warehouse for one environment, written from the rules of RWARE alone.

Cells are pairs (x, y). Shelves are a dictionary, cell -> whether it is requested; the array that the game calls shelf
is made of it, and read back into it. What is random is the caller's: ``below(goal, n)`` says which of the n shelves
that are not requested, row by row, is requested in place of the one that was delivered on goal number ``goal``.

Everybody's wish to be in a cell is an edge of a graph whose nodes are cells. Of a part of it that hangs together and
has a cycle only those in the cycle get there, none if they are two; else those on a longest path do. Among predecessors
with as long a path the one whose cell networkx lists first wins: in the order in which the edges were added, or, of a
part with less than half of all cells, in that of a set of Python's. Here it is such a set.
"""

import numpy as np

F = np.float32
NOOP, FORWARD, LEFT, RIGHT, TOGGLE_LOAD = range(5)
STEPS = [(0, -1), (0, 1), (-1, 0), (1, 0)]  # up, down, left, right
CLOCKWISE = [0, 3, 1, 2]
SIZES = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
SHARES = {"easy": 2, "normal": 1, "hard": 0.5}


def rows_of(shelf_rows, shelf_columns, column_height):
    """RWARE's layout: x stands for a shelf, g for a goal."""
    height, width = (column_height + 1) * shelf_rows + 2, 3 * shelf_columns + 1
    rows = [["." if x % 3 == 0 or y % (column_height + 1) == 0 else "x" for x in range(width)] for y in range(height)]
    rows[-1] = ["."] * width
    for x in (width // 2 - 1, width // 2):
        for y in range(height - column_height - 2, height):
            rows[y][x] = "g" if y == height - 1 else "."
    return rows


class WarehouseOracle:
    """Robots bring requested shelves to goals."""

    def __init__(
        self,
        *,
        num_agents=2,
        size="tiny",
        difficulty="normal",
        request_queue_size=None,
        shelf_rows=None,
        shelf_columns=None,
        column_height=8,
        grid=None,
        reward_type="individual",
        max_steps=500,
        max_inactivity_steps=0,
        sensor_range=1,
        normalised_coordinates=False,
    ):
        rows, columns = SIZES[size]
        if grid:
            lines = [[*line.replace(" ", "").lower()] for line in grid.strip().split("\n")]
        else:
            lines = rows_of(shelf_rows or rows, shelf_columns or columns, column_height)
        self.tiles = {(x, y): tile for y, line in enumerate(lines) for x, tile in enumerate(line)}
        self.width, self.height = len(lines[0]), len(lines)
        self.goals = [cell for cell, tile in self.tiles.items() if tile == "g"]
        self.num_requests = request_queue_size or int(num_agents * SHARES[difficulty])
        self.num_agents, self.reward_type, self.sensor_range = num_agents, reward_type, sensor_range
        self.max_steps, self.max_inactivity_steps = max_steps, max_inactivity_steps
        self.scale = (self.width - 1, self.height - 1) if normalised_coordinates else (1, 1)
        self.elapsed_steps = 0

    @property
    def shelf(self):
        found = np.zeros((self.height, self.width), np.uint8)
        for (x, y), requested in self.shelves.items():
            found[y, x] = 1 + requested
        return found

    @shelf.setter
    def shelf(self, value):
        self.shelves = {(x, y): bool(value[y, x] == 2) for x, y in self.tiles if value[y, x]}

    def cell(self, i):
        return int(self.position[i, 0]), int(self.position[i, 1])

    def step(self, actions, below=None):
        """Return rewards, terminations and truncations, (num_agents,) each."""
        self.elapsed_steps += 1
        rewards = np.zeros(self.num_agents, F)
        cells = [self.cell(i) for i in range(self.num_agents)]
        targets = [self.target(i, action, cells) for i, action in enumerate(actions)]
        moving = [i for i in committed(cells, targets) if targets[i] != cells[i]]
        carried = {i: self.shelves.pop(cells[i]) for i in moving if self.carrying[i]}
        for i in moving:
            self.position[i] = targets[i]
            if i in carried:
                self.shelves[targets[i]] = carried[i]
        for i, action in enumerate(actions):
            turn = {LEFT: -1, RIGHT: 1}.get(int(action), 0)
            self.direction[i] = CLOCKWISE[(CLOCKWISE.index(self.direction[i]) + turn) % 4]
            if action == TOGGLE_LOAD and not self.carrying[i]:
                self.carrying[i] = cells[i] in self.shelves
            elif action == TOGGLE_LOAD and self.tiles[cells[i]] == "x":
                self.carrying[i] = False
                if self.has_delivered[i] and self.reward_type == "two_stage":
                    rewards[i] += F(0.5)
                self.has_delivered[i] = False
        before = int(self.deliveries)
        for number, goal in enumerate(self.goals):
            if self.shelves.get(goal):
                self.deliver(goal, number, rewards, below)
        self.inactive_steps = np.int32(0 if self.deliveries > before else self.inactive_steps + 1)
        ended = 0 < self.max_inactivity_steps <= self.inactive_steps
        timeout = self.elapsed_steps >= self.max_steps and not ended
        return rewards, np.full(self.num_agents, ended), np.full(self.num_agents, timeout)

    def target(self, i, action, cells):
        if action != FORWARD:
            return cells[i]
        dx, dy = STEPS[self.direction[i]]
        target = (cells[i][0] + dx, cells[i][1] + dy)
        if target not in self.tiles:
            return cells[i]
        taken_away = target in cells and self.carrying[cells.index(target)]
        return cells[i] if self.carrying[i] and target in self.shelves and not taken_away else target

    def deliver(self, goal, number, rewards, below):
        others = sorted((cell for cell, requested in self.shelves.items() if not requested), key=lambda c: (c[1], c[0]))
        self.shelves[others[below(number, len(others))]] = True
        self.shelves[goal] = False
        self.deliveries = np.int32(self.deliveries + 1)
        i = [self.cell(j) for j in range(self.num_agents)].index(goal)
        if self.reward_type == "global":
            rewards += F(1)
        else:
            rewards[i] += F(0.5 if self.reward_type == "two_stage" else 1)
        if self.reward_type == "two_stage":
            self.has_delivered[i] = True

    def observe(self):
        """Return the (num_agents, 8 + 7 (2 sensor_range + 1)^2) observations of the current state."""
        cells = [self.cell(i) for i in range(self.num_agents)]
        around = range(-self.sensor_range, self.sensor_range + 1)
        rows = []
        for i, (x, y) in enumerate(cells):
            row = [F(x) / F(self.scale[0]), F(y) / F(self.scale[1]), self.carrying[i]]
            row += [*np.eye(4)[self.direction[i]], self.tiles[x, y] != "x"]
            for cell in [(x + dx, y + dy) for dy in around for dx in around]:
                there = cell in cells
                row += [there, *np.eye(4)[self.direction[cells.index(cell)] if there else 0]]
                row += [cell in self.shelves, self.shelves.get(cell, False)]
            rows.append(row)
        return np.array(rows, F)


def committed(cells, targets):
    """The agents that get where they want to be, also those that stay."""
    listed = list(dict.fromkeys(cell for pair in zip(cells, targets, strict=True) for cell in pair))
    leads = dict(zip(cells, targets, strict=True))
    sources = {cell: [start for start, target in leads.items() if target == cell] for cell in listed}
    chosen, seen = [], set()
    for first in listed:
        if first in seen:
            continue
        part = {first}
        queue = [first]
        for cell in queue:
            for other in [*([leads[cell]] if cell in leads else []), *sources[cell]]:
                if other not in part:
                    part.add(other)
                    queue.append(other)
        seen |= part
        path, last = [], first
        while last in leads and last not in path:
            path.append(last)
            last = leads[last]
        if last in leads:
            cycle = path[path.index(last) :]
            chosen += cycle if len(cycle) != 2 else []
        else:
            small = 2 * len(part) < len(listed)
            order = list({cell for cell in part}) if small else [cell for cell in listed if cell in part]  # noqa: C416
            chosen += longest(last, sources, order)
    return [cells.index(cell) for cell in chosen if cell in leads]


def longest(cell, sources, order):
    """Cells of a longest path to this one."""
    paths = [longest(source, sources, order) for source in sorted(sources[cell], key=order.index)]
    return [*max(paths, key=len, default=[]), cell]


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    assert oracle.elapsed_steps == 0 and oracle.inactive_steps == 0 and oracle.deliveries == 0
    assert not oracle.carrying.any() and not oracle.has_delivered.any()
    assert oracle.shelves.keys() == {cell for cell, tile in oracle.tiles.items() if tile == "x"}
    assert sum(oracle.shelves.values()) == oracle.num_requests
    cells = {oracle.cell(i) for i in range(oracle.num_agents)}
    assert len(cells) == oracle.num_agents and cells <= oracle.tiles.keys()
    assert set(oracle.direction.tolist()) <= {0, 1, 2, 3}
