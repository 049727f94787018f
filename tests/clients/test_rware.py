"""warehouse against RWARE 2.0.0 itself, from the same starts with the same actions and requests, step by step.

tests/envs/test_warehouse.py compares the game with an oracle of the same rules.
"""

import numpy as np
import pytest
import torch
from support.draws import step_below

import gpu_vecenv

rware = pytest.importorskip("rware.warehouse", reason="pip install rware==2.0.0")

HALL = "..x..x..\n..xx.x..\n.g......\n..x.xx..\n...gx...\nxx....xx"
FIELD = "x.........\n" * 9 + "xg......g."
CASES = {
    **{f"{size}, {n} robots": {"size": size, "num_agents": n} for size in ("tiny", "small") for n in (2, 4)},
    "one robot": {"num_agents": 1},
    "easy": {"num_agents": 4, "difficulty": "easy", "reward_type": "global"},
    "hard": {"num_agents": 4, "size": "small", "difficulty": "hard", "reward_type": "two_stage"},
    "medium": {"num_agents": 8, "size": "medium"},
    "large, far sight": {"num_agents": 19, "size": "large", "sensor_range": 3},
    "low": {"num_agents": 12, "shelf_rows": 2, "shelf_columns": 5, "column_height": 2, "normalised_coordinates": True},
    "inactivity": {"num_agents": 4, "max_inactivity_steps": 50},
    "hall, two stages": {"num_agents": 12, "request_queue_size": 9, "reward_type": "two_stage", "grid": HALL},
    "hall, global": {"num_agents": 25, "request_queue_size": 9, "reward_type": "global", "grid": HALL},
    "field, 20 robots": {"num_agents": 20, "request_queue_size": 4, "grid": FIELD},
    "field, 40 robots": {"num_agents": 40, "request_queue_size": 4, "grid": FIELD},
}


class Requests:
    """RWARE's generator in a step: of the shelves that are not requested, row by row, it chooses the game's."""

    def __init__(self, theirs, below):
        self.theirs, self.below, self.goals = theirs, below, enumerate(theirs.goals)

    def choice(self, candidates):
        queued = {(shelf.x, shelf.y) for shelf in self.theirs.request_queue}
        goal = next(number for number, cell in self.goals if cell in queued)
        return sorted(candidates, key=lambda shelf: (shelf.y, shelf.x))[self.below(goal, len(candidates))]


def arrays(env):
    return {name: tensor[0].numpy() for name, tensor in env.state.items()}


def reference(game, state):
    """RWARE in the state of the first environment."""
    rows, columns = {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}[game.size]
    theirs = rware.Warehouse(
        shelf_columns=game.shelf_columns or columns,
        column_height=game.column_height,
        shelf_rows=game.shelf_rows or rows,
        n_agents=game.num_agents,
        msg_bits=0,
        sensor_range=game.sensor_range,
        request_queue_size=game.num_requests,
        max_inactivity_steps=game.max_inactivity_steps or None,
        max_steps=game.max_steps,
        reward_type=rware.RewardType[game.reward_type.upper()],
        layout=game.grid,
        normalised_coordinates=game.normalised_coordinates,
    )
    theirs.reset(seed=0)
    for agent, (x, y), direction in zip(theirs.agents, state["position"], state["direction"], strict=True):
        agent.x, agent.y, agent.dir = int(x), int(y), rware.Direction(int(direction))
    theirs._recalc_grid()
    theirs.request_queue = [shelf for shelf in theirs.shelfs if state["shelf"][shelf.y, shelf.x] == 2]
    return theirs


def compare(theirs, state, obs, theirs_obs, step):
    agents, shelf = theirs.agents, np.zeros(theirs.grid_size, np.uint8)
    for one in theirs.shelfs:
        shelf[one.y, one.x] = 2 if one in theirs.request_queue else 1
    expected = {
        "position": [(agent.x, agent.y) for agent in agents],
        "direction": [agent.dir.value for agent in agents],
        "carrying": [agent.carrying_shelf is not None for agent in agents],
        "has_delivered": [agent.has_delivered for agent in agents],
        "shelf": shelf,
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, f"{name}, step {step}")
    np.testing.assert_array_equal(obs[0].numpy(), np.stack(theirs_obs), f"obs, step {step}")


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_rware(name, random_seed):
    env = gpu_vecenv.make("warehouse", 1, "cpu", max_steps=300, autoreset_mode="disabled", **CASES[name])
    random, rewarded = np.random.default_rng(random_seed), 0.0
    for episode in range(3):
        obs, _ = env.reset(seed=2**40 + random_seed + episode)
        state = arrays(env)
        theirs = reference(env.game, state)
        compare(theirs, state, obs, [theirs._make_obs(agent) for agent in theirs.agents], 0)
        for step in range(1, env.game.max_steps + 1):
            actions = random.choice(5, env.num_agents, p=[0.02, 0.6, 0.14, 0.14, 0.1])
            obs, rewards, terminations, truncations, _ = env.step(torch.tensor(actions[None], dtype=torch.int32))
            state = arrays(env)
            theirs._np_random = Requests(theirs, step_below(env, 0, step))
            theirs_obs, theirs_rewards, done, *_ = theirs.step(actions.tolist())
            assert rewards[0].tolist() == theirs_rewards, step
            assert (terminations | truncations)[0].tolist() == [done] * env.num_agents, step
            rewarded += sum(theirs_rewards)
            compare(theirs, state, obs, theirs_obs, step)
            if done:
                break
    assert rewarded > 0 or "hall" not in name
