"""Oracle of tag_gridworld for one environment, written from the rules alone.

Cells are int32. Everything else is float32 and every operation is rounded to float32 separately;
configuration floats are rounded to float32 first. A reward starts at 0 and its contributions are
added one at a time: the wall penalty, then the tag or step term. x/G and t/T are float32
quotients of float32 operands. The runner's nearest tagger is found by squared cell distance in
integers, lowest id on ties.

No agent gets both flags: a tag at t = T terminates and does not truncate. An agent that was not
active before the step does not move, has reward 0 and no flag. Observations are those of the
cells, also at the step that ends the episode.
"""

import numpy as np

F = np.float32
# stay, x+1, x-1, y+1, y-1
MOVES = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.int32)


class TagGridworldOracle:
    """Taggers 0..num_taggers-1 chase one runner, the last agent, on cells [0, grid]."""

    def __init__(
        self,
        *,
        num_taggers=4,
        grid=20,
        max_steps=100,
        wall_penalty=0.1,
        tagger_reward=10,
        runner_penalty=5,
        step_cost=0.01,
        full_observation=True,
        random_start=False,
    ):
        self.num_taggers = self.runner = num_taggers
        self.num_agents = num_taggers + 1
        self.grid = grid
        self.max_steps = max_steps
        self.wall_penalty = F(wall_penalty)
        self.tagger_reward = F(tagger_reward)
        self.runner_penalty = F(runner_penalty)
        self.step_cost = F(step_cost)
        self.full_observation = full_observation
        self.random_start = random_start

        self.elapsed_steps = 0
        self.active = np.ones(self.num_agents, bool)
        self.cell = np.full((self.num_agents, 2), grid // 2, np.int32)
        self.cell[self.runner] = 0

    def step(self, actions):
        """Play one step and return (rewards, terminations, truncations)."""
        was_active = np.asarray(self.active, bool)
        self.elapsed_steps = int(self.elapsed_steps) + 1

        # Move, clamp; hitting the wall costs wall_penalty.
        stay = 0
        moves = MOVES[np.where(was_active, np.asarray(actions).reshape(self.num_agents), stay)]
        target = np.asarray(self.cell, np.int32) + moves
        self.cell = np.clip(target, 0, self.grid).astype(np.int32)
        clamped = (self.cell != target).any(axis=1)
        rewards = np.zeros(self.num_agents, F)
        rewards[clamped] -= self.wall_penalty

        # Tag: some tagger on the runner's cell after all moves.
        tagged = (self.cell[: self.runner] == self.cell[self.runner]).all(axis=1).any()
        if tagged:
            rewards[: self.runner] += self.tagger_reward
            rewards[self.runner] -= self.runner_penalty
        else:
            rewards[: self.runner] -= self.step_cost
            rewards[self.runner] += self.step_cost

        terminations = was_active & tagged
        truncations = was_active & (self.elapsed_steps == self.max_steps) & ~terminations
        self.active = was_active & ~terminations & ~truncations
        return np.where(was_active, rewards, F(0)), terminations, truncations

    def observe(self):
        """Return the (A, obs_dim) observations of the current state."""
        n = self.num_agents
        place = np.asarray(self.cell).astype(F) / F(self.grid)
        is_runner = (np.arange(n) == self.runner).astype(F)
        clock = np.full((n, 1), F(self.elapsed_steps) / F(self.max_steps), F)

        if self.full_observation:
            shared = np.concatenate([place[:, 0], place[:, 1], is_runner])
            return np.hstack([np.tile(shared, (n, 1)), np.eye(n, dtype=F), clock])

        # A tagger sees the runner; the runner sees its nearest tagger.
        offset = np.asarray(self.cell, np.int64)[: self.runner] - self.cell[self.runner]
        opponent = np.full(n, self.runner)
        opponent[self.runner] = (offset**2).sum(axis=1).argmin()
        return np.hstack([place, place[opponent], is_runner[:, None], clock])


def assert_valid_start(oracle):
    """Assert that the oracle's state is one that a reset may produce."""
    cell = np.asarray(oracle.cell)
    assert oracle.elapsed_steps == 0
    assert np.all(oracle.active)
    assert cell.shape == (oracle.num_agents, 2)
    if oracle.random_start:
        assert np.all((cell >= 0) & (cell <= oracle.grid))
    else:
        assert np.all(cell[: oracle.runner] == oracle.grid // 2)
        assert np.all(cell[oracle.runner] == 0)
