"""Oracle of skirmish for one environment, written from the rules of JaxMARL 0.2.0's HeuristicEnemySMAX.

Everything is float32 and every operation is rounded to float32 separately. What is summed over units is summed in the
order of their numbers. All that happens in a move happens at once, from what was before it. Distances are the square
root of dx*dx + dy*dy; "in range" and "in sight" are a smaller distance.

Random numbers are the caller's: ``draws`` has deviation(move), (units,) in [0, 1), for the cooldowns after attacks,
follow(enemy, n), which of n visible allies an enemy follows, and pick(enemy, n), which of n allies in its range it
attacks, both counted from the last ally on.
"""

import re

import numpy as np

F = np.float32
NORTH, EAST, SOUTH, WEST, STOP, ATTACK = range(6)
STEPS = np.array([[0, 1], [1, 0], [0, -1], [-1, 0], [0, 0]], F)
LETTERS = "mMszlh"
VELOCITY = np.array([3.15, 2.25, 4.13, 3.15, 4.13, 3.15], F)
DAMAGE = np.array([9, 10, 13, 8, 5, 12], F)
RANGE = np.array([5, 6, 6, 2, 2, 5], F)
SIGHT = np.array([9, 10, 10, 9, 8, 9], F)
RADIUS = np.array([0.375, 0.5625, 0.625, 0.5, 0.375, 0.625], F)
HEALTH = np.array([45, 125, 160, 150, 35, 80], F)
COOLDOWN = np.array([0.61, 1.07, 1.87, 0.86, 0.5, 0.59], F)


def sizes(scenario):
    """(allies, enemies) of a scenario."""
    if scenario.startswith("smacv2"):
        return (int(scenario.split("_")[1]),) * 2
    armies = [len(army_types(army)) for army in scenario.split("_vs_")]
    return armies[0], armies[-1]


def army_types(army):
    """Types of 3s5z: 2, 2, 2, 3, 3, 3, 3, 3."""
    return [LETTERS.index(letter) for count, letter in re.findall(r"(\d+)(\D)", army) for _ in range(int(count))]


class SkirmishOracle:
    """One episode; the state is set from outside before the first step."""

    def __init__(
        self,
        scenario="3s5z",
        *,
        map_width=32,
        map_height=32,
        start_spread=2,
        max_steps=100,
        world_steps_per_env_step=8,
        time_per_step=0.0625,
        walls_cause_death=True,
        won_battle_bonus=1,
        enemy_shoots=True,
        attack_mode="closest",
        see_enemy_actions=True,
        observed_units="all",
    ):
        self.scenario = scenario
        self.allies, self.enemies = sizes(scenario)
        self.units = self.allies + self.enemies
        self.size = np.array([map_width, map_height], F)
        self.start_spread = F(start_spread)
        self.max_steps, self.moves, self.dt = max_steps, world_steps_per_env_step, F(time_per_step)
        self.walls_cause_death, self.won_battle_bonus = walls_cause_death, F(won_battle_bonus)
        self.enemy_shoots, self.attack_mode = enemy_shoots, attack_mode
        self.see_enemy_actions, self.observed_units = see_enemy_actions, observed_units
        self.ally = np.arange(self.units) < self.allies
        self.elapsed_steps = 0
        self.over = False

    @property
    def alive(self):
        return self.health > 0

    def distances(self):
        """(units, units)."""
        d = self.position[None] - self.position[:, None]
        return np.sqrt(d[..., 0] * d[..., 0] + d[..., 1] * d[..., 1])

    def near(self, reach):
        """Whether unit v is alive and nearer to u, alive, than u's reach, (units, units)."""
        return (self.distances() < reach[self.unit_type][:, None]) & self.alive[:, None] & self.alive

    def rows(self):
        """The units in each agent's observation, allies and enemies; -1 where there is none."""
        others = [
            ([v for v in range(self.allies) if v != i], list(range(self.allies, self.units)))
            for i in range(self.allies)
        ]
        if self.observed_units == "all":
            return others
        sight, distance, found = self.near(SIGHT), self.distances(), []
        for i, armies in enumerate(others):
            nearest = [sorted((v for v in army if sight[i, v]), key=lambda v: (distance[i, v], v)) for army in armies]
            found.append([(army + [-1] * self.observed_units)[: self.observed_units] for army in nearest])
        return found

    # ------------------------------------------------------------------ a step

    def command(self, draws):
        """Actions of all enemies; also their goals and prey."""
        if self.elapsed_steps == 1:
            middle = self.size / F(2)
            self.goal = middle - (self.position[self.allies :] - middle)
        sight, reach, distance = self.near(SIGHT), self.near(SIGHT) & self.near(RANGE), self.distances()
        backwards = np.arange(self.allies)[::-1]
        actions = np.full(self.enemies, STOP)
        for e in range(self.enemies):
            u = self.allies + e
            if not self.alive[u]:
                continue
            shootable = [a for a in backwards if reach[u, a]]
            visible = [a for a in backwards if sight[u, a]]
            if not shootable:
                self.prey[e] = -1
            elif self.prey[e] not in shootable:
                closest = shootable[int(np.argmin(distance[u, shootable]))]  # argmin: the first
                self.prey[e] = closest if self.attack_mode == "closest" else shootable[draws.pick(e, len(shootable))]
            if shootable and self.enemy_shoots:
                actions[e] = ATTACK + self.allies - 1 - self.prey[e]
                continue
            to = self.position[visible[draws.follow(e, len(visible))]] if visible else self.goal[e]
            dx, dy = to - self.position[u]
            actions[e] = int(np.argmax([dy, dx, -dy, -dx]))
        return actions

    def targets(self, actions, rows):
        """The unit that each unit attacks; -1: none."""
        found = np.full(self.units, -1)
        for u, action in enumerate(actions):
            if action >= ATTACK:
                found[u] = rows[u][action - ATTACK] if self.ally[u] else self.allies - 1 - (action - ATTACK)
        return found

    def move(self, targets, deviation):
        """An eighth of a step."""
        alive, kind = self.alive, self.unit_type
        reach, sum_of_units = self.near(RANGE), np.arange(self.units)
        hits = (targets >= 0) & (self.cooldown <= 0) & reach[sum_of_units, targets]
        way = STEPS[np.minimum(self.action, STOP)] * (VELOCITY[kind] * self.dt)[:, None]
        place = np.where(alive[:, None], np.clip(self.position + way, F(0), self.size), self.position)
        spread = (F(3) * deviation - F(1)) * self.dt
        self.cooldown = np.where(hits, COOLDOWN[kind] + spread, self.cooldown - self.dt).astype(F)
        health = self.health.copy()
        for u in np.flatnonzero(hits):
            health[targets[u]] -= DAMAGE[kind[u]]
        health = np.maximum(health, F(0))
        if self.walls_cause_death:
            health[((place <= 0) | (place >= self.size)).any(1)] = 0
        self.health = health
        self.position = self.pushed(place)

    def pushed(self, place):
        """Places after living units that overlap have pushed each other apart."""
        push = np.zeros((self.units, 2), F)
        radius = RADIUS[self.unit_type]
        for v in np.flatnonzero(self.alive):
            d = place - place[v]
            distance = np.sqrt(d[:, 0] * d[:, 0] + d[:, 1] * d[:, 1]) + F(1e-6)
            overlap = np.maximum((radius + radius[v]) / distance - F(1), F(0))
            push += d * overlap[:, None]
        return np.where(self.alive[:, None], place + push / F(2), place)

    def step(self, actions, draws):
        """Play one step and return (rewards, terminations, truncations) of the allies."""
        for name in ("position", "health", "cooldown", "goal"):
            assert getattr(self, name).dtype == F, f"{name} must be float32"
        self.elapsed_steps += 1
        before, rows = self.health.copy(), [enemies for _, enemies in self.rows()]
        own = np.where(self.alive[: self.allies], actions, STOP)
        self.action = np.concatenate([own, self.command(draws)]).astype(np.int32)
        targets = self.targets(self.action, rows)
        for move in range(self.moves):
            self.move(targets, draws.deviation(move))
        lost = F(0)
        for u in range(self.allies, self.units):
            lost += (self.health[u] - before[u]) / HEALTH[self.unit_type[u]]
        left, enemies_left = self.alive[: self.allies].any(), self.alive[self.allies :].any()
        self.won = bool(left and not enemies_left)
        reward = abs(lost) / F(self.enemies) + (self.won_battle_bonus if self.won else F(0))
        decided, late = not left or not enemies_left, self.elapsed_steps >= self.max_steps
        self.over = bool(decided or late)
        ends = np.full(self.allies, self.over)
        return np.full(self.allies, reward, F), ends & decided, ends & (not decided)

    # ------------------------------------------------------------------ what is seen

    def features(self, u):
        """Share of health, share of cooldown, type one-hot."""
        kind = self.unit_type[u]
        cooldown = np.clip(self.cooldown[u] / COOLDOWN[kind], F(0), F(1))
        return self.health[u] / HEALTH[kind], cooldown, np.eye(6, dtype=F)[kind]

    def observe(self):
        """Return the (allies, numbers) observations of the current state."""
        sight, found, rows = self.near(SIGHT), [], self.rows()
        last = [ATTACK - 1 + (self.enemies if self.observed_units == "all" else self.observed_units)] * self.allies
        last += [ATTACK - 1 + self.allies] * self.enemies
        for i in range(self.allies):
            row = []
            for v in (v for army in rows[i] for v in army):
                if v < 0 or not sight[i, v]:
                    row.append(np.zeros(13, F))
                    continue
                health, cooldown, kind = self.features(v)
                offset = (self.position[v] - self.position[i]) / SIGHT[self.unit_type[i]]
                way = STEPS[min(self.action[v], STOP)]
                attack = F(self.action[v]) / F(last[v]) if self.action[v] >= ATTACK else F(0)
                if not self.see_enemy_actions and not self.ally[v]:
                    way, attack = np.zeros(2, F), F(0)
                row.append(np.array([health, *offset, *way, attack, cooldown, *kind], F))
            health, cooldown, kind = self.features(i)
            own = np.array([health, *(self.position[i] / self.size), cooldown, *kind], F)
            found.append(np.concatenate([*row, own if self.alive[i] else np.zeros(10, F)]))
        return np.array(found)

    def action_masks(self):
        """(allies, actions); of the dead only STOP is allowed."""
        reach, masks = self.near(RANGE), []
        for i, (_, enemies) in enumerate(self.rows()):
            attacks = [v >= 0 and reach[i, v] for v in enemies]
            masks.append([*[self.alive[i]] * 4, True, *attacks])
        return np.array(masks)

    def world(self):
        """What a central critic sees."""
        rows = np.zeros((self.units, 10), F)
        for u in np.flatnonzero(self.alive):
            health, _, kind = self.features(u)
            rows[u] = [health, *self.position[u], self.cooldown[u], *kind]
        return np.concatenate([rows.ravel(), ~self.ally, self.unit_type]).astype(F)


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    assert np.all(oracle.health == HEALTH[oracle.unit_type]) and not oracle.cooldown.any()
    assert np.all(oracle.action == STOP) and np.all(oracle.prey == -1) and not oracle.won
    if oracle.scenario.startswith("smacv2"):
        np.testing.assert_array_equal(oracle.unit_type[: oracle.allies], oracle.unit_type[oracle.allies :])
    else:
        armies = oracle.scenario.split("_vs_")
        assert oracle.unit_type.tolist() == army_types(armies[0]) + army_types(armies[-1])
        if oracle.units < 12:  # more push each other farther
            sides = np.where(oracle.ally, 1, 3) * oracle.size[0] / 4
            assert np.all(np.abs(oracle.position[:, 0] - sides) < oracle.start_spread + 4)
