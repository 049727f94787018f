"""Oracle of tag_continuous for one environment, written from the rules alone.

Everything is float32 and every operation is rounded to float32 separately; configuration floats
are rounded to float32 first. Action levels are a float64 linspace of the range as given, rounded
to float32, with 0 in front for index 0. A heading is np.mod(., TWO_PI) in float32, and 0 where
rounding gives TWO_PI itself. An agent's top speed is the product max_speed * skill. Squared
distance is dx*dx + dy*dy; nearest, K nearest and "distance < radius" compare it (the last with
radius * radius), ties to the lower id. Observations divide, by D = sqrt2 * G, max_speed, TWO_PI
and T. sin and cos are the caller's; by default float64's, rounded to float32. Egocentric
observations rotate a difference (x, y) by minus the heading h: (cos h x + sin h y, cos h y - sin h x).

A reward starts as s * (edge + step reward); the tags are added one at a time, runners in agent
order, the survival reward last. Distances are those after all moves.

No agent gets both flags and termination wins: at t = T a runner that leaves in that step, or the
taggers once no runner is in game, terminate and are not truncated. With
runner_leaves_when_tagged=False a tagged runner stays in game and pays at each step within reach.
A runner that leaves has heading = speed = 0 from that same step on; its acceleration becomes 0 by
rule 5 of the next. An agent not active before the step has reward 0, no flag, and its actions are
ignored (read as index 0). Taggers stay in game when they terminate, and observe normally.
"""

import numpy as np

F = np.float32
TWO_PI = F(2 * np.pi)
QUARTER_TURNS = (np.arange(4) * np.pi / 2).astype(F)


def levels(low, high, count):
    """Return the change that each action index stands for; index 0 changes nothing."""
    return np.concatenate([[0.0], np.linspace(low, high, count)]).astype(F)


class TagContinuousOracle:
    """Taggers 0..num_taggers-1 chase the other agents, the runners, on [0, side]^2."""

    def __init__(
        self,
        *,
        sin=lambda x: np.sin(x.astype(np.float64)).astype(F),
        cos=lambda x: np.cos(x.astype(np.float64)).astype(F),
        num_taggers=10,
        num_runners=100,
        side=20,
        max_steps=500,
        max_speed=1,
        tagger_skill=1,
        runner_skill=1,
        min_acceleration=-0.1,
        max_acceleration=0.1,
        acceleration_levels=20,
        min_turn=-2.356,
        max_turn=2.356,
        turn_levels=20,
        num_neighbors=10,
        egocentric=True,
        tagging_distance=0.02,
        tag_reward=10,
        tag_penalty=-10,
        tagger_step_reward=0,
        runner_step_reward=0,
        edge_penalty=0,
        survival_reward=1,
        runner_leaves_when_tagged=True,
    ):
        n = num_taggers + num_runners
        self.sin, self.cos = sin, cos
        self.num_taggers, self.num_agents = num_taggers, n
        self.tagger = np.arange(n) < num_taggers
        self.side, self.max_steps, self.max_speed = F(side), max_steps, F(max_speed)
        self.top_speed = self.max_speed * np.where(self.tagger, F(tagger_skill), F(runner_skill))
        self.acceleration_level = levels(min_acceleration, max_acceleration, acceleration_levels)
        self.turn_level = levels(min_turn, max_turn, turn_levels)
        self.num_neighbors, self.egocentric = num_neighbors, egocentric
        self.radius = F(tagging_distance) * self.side
        self.tag_reward, self.tag_penalty = F(tag_reward), F(tag_penalty)
        self.step_reward = np.where(self.tagger, F(tagger_step_reward), F(runner_step_reward))
        self.edge_penalty, self.survival_reward = F(edge_penalty), F(survival_reward)
        self.runner_leaves_when_tagged = runner_leaves_when_tagged

        self.elapsed_steps = 0
        self.active = np.ones(n, bool)
        self.in_game = np.ones(n, bool)
        self.position = np.zeros((n, 2), F)
        self.heading, self.speed, self.acceleration = np.zeros((3, n), F)

    def _squared_distance(self, agent, others):
        d = self.position[others] - self.position[agent]
        return d[:, 0] * d[:, 0] + d[:, 1] * d[:, 1]

    def step(self, actions):
        """Play one step and return (rewards, terminations, truncations)."""
        for name in ("position", "heading", "speed", "acceleration"):
            assert getattr(self, name).dtype == F, f"{name} must be float32"
        was_active = np.asarray(self.active, bool)
        u = np.where(was_active[:, None], np.asarray(actions).reshape(self.num_agents, 2), 0)
        in_game = np.array(self.in_game, bool)
        s = in_game.astype(F)

        # 1.
        self.elapsed_steps = int(self.elapsed_steps) + 1
        # 2. Acceleration accumulates.
        acceleration = self.acceleration + self.acceleration_level[u[:, 0]]
        # 3. Heading in [0, 2pi).
        heading = np.mod(self.heading + self.turn_level[u[:, 1]], TWO_PI)
        self.heading = np.where(heading == TWO_PI, F(0), heading) * s
        # 4. Speed in [0, top speed].
        self.speed = np.minimum(self.top_speed, np.maximum(F(0), self.speed + acceleration)) * s
        # 5. At either end of the speed range the acceleration is lost.
        at_end = (self.speed <= 0) | (self.speed >= self.top_speed)
        self.acceleration = np.where(at_end, F(0), acceleration)
        # 6. Move, clamp each axis; one edge penalty however many axes are clamped.
        direction = np.stack([self.cos(self.heading), self.sin(self.heading)], axis=1)
        target = self.position + self.speed[:, None] * direction
        self.position = np.clip(target, F(0), self.side)
        edge = np.where((self.position != target).any(axis=1), self.edge_penalty, F(0))
        # 7.
        rewards = s * (edge + self.step_reward)

        # 8. Each runner in game meets its nearest tagger (argmin: the first, so lowest id).
        left = np.zeros(self.num_agents, bool)
        for runner in np.flatnonzero(in_game & ~self.tagger):
            d2 = self._squared_distance(runner, np.arange(self.num_taggers))
            nearest = d2.argmin()
            if d2[nearest] < self.radius * self.radius:
                rewards[runner] += self.tag_penalty
                rewards[nearest] += self.tag_reward
                left[runner] = self.runner_leaves_when_tagged
        in_game &= ~left
        self.in_game = in_game
        self.heading[left] = 0
        self.speed[left] = 0

        # 9. The time limit.
        at_limit = self.elapsed_steps == self.max_steps
        if at_limit:
            rewards[in_game & ~self.tagger] += self.survival_reward
        # 10. Without runners the taggers are done.
        done = self.tagger & ~in_game[~self.tagger].any()

        terminations = was_active & (left | done)
        truncations = was_active & in_game & at_limit & ~terminations
        self.active = was_active & ~terminations & ~truncations
        return np.where(was_active, rewards, F(0)), terminations, truncations

    @staticmethod
    def _turned(facing, vector):
        """The vector as one sees it who looks along ``facing``: ahead, to the left."""
        cosine, sine = facing
        return np.array([cosine * vector[0] + sine * vector[1], cosine * vector[1] - sine * vector[0]], F)

    def observe(self):
        """Return the (A, 7M + 1) observations of the current state, or (A, 7M + 7) egocentric ones."""
        in_game = np.asarray(self.in_game, bool)
        observe_all = self.num_neighbors == "all"
        m = self.num_agents - 1 if observe_all else self.num_neighbors
        observations = np.zeros((self.num_agents, 7 * m + (7 if self.egocentric else 1)), F)
        diagonal = F(np.sqrt(2)) * self.side
        heading = np.asarray(self.heading)
        facing = np.stack([self.cos(heading), self.sin(heading)], axis=1)
        velocity = np.asarray(self.speed)[:, None] * facing
        for i in np.flatnonzero(in_game):
            others = np.delete(np.arange(self.num_agents), i)
            if not observe_all:
                others = others[in_game[others]]
                # A stable sort keeps the lower id first on ties.
                order = np.argsort(self._squared_distance(i, others), kind="stable")
                others = others[order[:m]]
            if self.egocentric:
                seen = np.zeros((m, 7), F)
                for slot, j in enumerate(others):
                    place = self._turned(facing[i], self.position[j] - self.position[i]) / diagonal
                    moves = self._turned(facing[i], velocity[j] - velocity[i]) / self.max_speed
                    seen[slot] = [*place, *moves, self.tagger[j], 1, in_game[j]]
                own = [*facing[i], self.speed[i] / self.max_speed, self.acceleration[i] / self.max_speed]
                own += [*(self.position[i] / self.side), F(self.elapsed_steps) / F(self.max_steps)]
                observations[i] = [*seen.T.reshape(-1), *own]
                continue
            features = np.zeros((7, m), F)
            features[:, : len(others)] = [
                (self.position[others, 0] - self.position[i, 0]) / diagonal,
                (self.position[others, 1] - self.position[i, 1]) / diagonal,
                (self.speed[others] - self.speed[i]) / self.max_speed,
                (self.acceleration[others] - self.acceleration[i]) / self.max_speed,
                (self.heading[others] - self.heading[i]) / TWO_PI,
                self.tagger[others],
                in_game[others],
            ]
            observations[i, :-1] = features.reshape(-1)
            observations[i, -1] = F(self.elapsed_steps) / F(self.max_steps)
        return observations


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    position = np.asarray(oracle.position)
    assert oracle.elapsed_steps == 0
    assert np.all(oracle.active)
    assert np.all(oracle.in_game)
    assert position.shape == (oracle.num_agents, 2)
    assert np.all((position >= 0) & (position <= oracle.side))
    assert np.all(np.isin(oracle.heading, QUARTER_TURNS))
    assert np.all(np.asarray(oracle.speed) == 0)
    assert np.all(np.asarray(oracle.acceleration) == 0)
