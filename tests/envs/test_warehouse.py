"""warehouse: random robots and scripted ones against the oracle, single rules of moving, layouts, starts."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.warehouse import FORWARD, LEFT, NOOP, RIGHT, TOGGLE_LOAD, WarehouseOracle, assert_valid_start, rows_of
from support.bitwise import bits
from support.draws import step_below
from support.kernels import signature
from support.scripts import imported_script

import gpu_vecenv
from gpu_vecenv import FunctionManager, VecEnv
from gpu_vecenv.compile.backends import GroupShape
from gpu_vecenv.errors import ConfigError

FIELDS = ("position", "direction", "carrying", "has_delivered", "shelf", "inactive_steps", "deliveries")
ROBOTS = Path(__file__).parents[2] / "examples" / "warehouse_robots.py"
UP, DOWN, WEST, EAST = range(4)
HALL = "\n".join(["..x..x..", "..xx.x..", ".g......", "..x.xx..", "...gx...", "xx....xx"])
CROWD = {"grid": HALL, "request_queue_size": 9, "max_steps": 60}
CASES = {
    "tiny, 4 robots, easy": {"num_agents": 4, "difficulty": "easy", "max_steps": 120},
    "medium, 19 robots, global": {"num_agents": 19, "size": "medium", "reward_type": "global", "max_steps": 60},
    "hall, 12 robots, two stages": {**CROWD, "num_agents": 12, "reward_type": "two_stage"},
    "hall, 20 robots, global": {**CROWD, "num_agents": 20, "reward_type": "global", "normalised_coordinates": True},
    "hall, 33 robots, far sight": {**CROWD, "num_agents": 33, "sensor_range": 3},
    "field, 40 robots": {
        "num_agents": 40,
        "request_queue_size": 4,
        "grid": "x.........\n" * 9 + "xg........",
        "max_steps": 60,
    },
}


def pair(num_envs: int, device: str, **config) -> tuple[VecEnv, list[WarehouseOracle], np.ndarray]:
    """Environments, their oracles in the same states, and the first observations."""
    env = VecEnv(gpu_vecenv.configure("warehouse", **config), num_envs, device, autoreset_mode="disabled")
    obs, _ = env.reset(seed=2**40 + 5)
    oracles = [WarehouseOracle(**config) for _ in range(num_envs)]
    for e, oracle in enumerate(oracles):
        for field in FIELDS:
            setattr(oracle, field, env.state[field][e].cpu().numpy().copy())
        assert_valid_start(oracle)
    return env, oracles, obs


def compare(env: VecEnv, oracles: list[WarehouseOracle], obs: torch.Tensor, step: int) -> None:
    expected = np.stack([oracle.observe() for oracle in oracles])
    np.testing.assert_array_equal(bits(obs), bits(expected), f"obs, step {step}")
    for field in FIELDS:
        ours, theirs = env.state[field].cpu().numpy(), np.stack([getattr(oracle, field) for oracle in oracles])
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, f"{field}, step {step}")


def stepped(env: VecEnv, oracles: list[WarehouseOracle], actions: torch.Tensor, step: int) -> list[torch.Tensor]:
    """One step of both, compared; the observations and the rewards."""
    obs, *outputs, _ = env.step(actions)
    results = [
        oracle.step(own, step_below(env, e, step))
        for e, (oracle, own) in enumerate(zip(oracles, actions.tolist(), strict=True))
    ]
    for tensor, expected in zip(outputs, zip(*results, strict=True), strict=True):
        np.testing.assert_array_equal(bits(tensor), bits(np.stack(expected)), f"step {step}")
    compare(env, oracles, obs, step)
    return [obs, outputs[0]]


@pytest.mark.parametrize("name", CASES)
def test_random_robots_move_as_in_the_oracle(name, random_seed, device):
    env, oracles, obs = pair(3, device, **CASES[name])
    compare(env, oracles, obs, 0)
    random = np.random.default_rng(random_seed)
    for step in range(1, env.game.max_steps + 1):
        actions = random.choice(5, (3, env.num_agents), p=[0.02, 0.6, 0.14, 0.14, 0.1])
        stepped(env, oracles, torch.tensor(actions, dtype=torch.int32, device=device), step)


@pytest.mark.parametrize("reward_type", ["individual", "two_stage"])
def test_scripted_robots_bring_shelves_and_put_them_back(reward_type, device):
    config = {"num_agents": 3, "column_height": 3, "sensor_range": 9, "max_steps": 120, "reward_type": reward_type}
    env, oracles, obs = pair(1, device, **config)
    with imported_script(ROBOTS) as module:
        act, returns = module.fetch(env.game), 0.0
    for step in range(1, 121):
        obs, rewards = stepped(env, oracles, act(obs), step)
        returns += rewards.sum().item()
    deliveries = oracles[0].deliveries
    assert deliveries >= 8
    if reward_type == "two_stage":  # half of the reward comes when the shelf is put back, which not all were at the end
        assert 0.75 * deliveries < returns <= deliveries
    else:
        assert returns == deliveries


def test_the_example_counts_what_scripted_robots_deliver(capsys):
    with imported_script(ROBOTS) as module:
        module.main(num_agents=2, max_steps=60, episodes=1, seed=1)
        said = re.fullmatch(r"tiny, 2 robots: ([\d.]+) deliveries an episode\n", capsys.readouterr().out)
        assert said and float(said[1]) >= 1
        with pytest.raises(ValueError, match="sensor_range is 1; expected at least 10"):
            module.fetch(gpu_vecenv.configure("warehouse"))


def test_sets_are_listed_in_python_s_order(tmp_path, device):
    """Of up to 120 cells, for which tables grow three times; many hashes collide."""
    game = gpu_vecenv.configure("warehouse")
    shutil.copy(game.layout.source_path.parent / "python_set.cuh", tmp_path)
    (tmp_path / "order.cu").write_text(ORDER)
    kernels = [signature("order_cells", "const i32* cells, i32* items, i64 n")]
    functions = FunctionManager(device)
    threads = functions.backend.device_constants(GroupShape.of(1))
    program = functions.compile(tmp_path / "order.cu", kernels=kernels, game=game, constants=threads)
    random = np.random.default_rng(1)
    for count in [*range(1, 24), 60, 75, 77, 120] * 5:
        cells = random.permutation(np.argwhere(np.ones((90, 90))))[:count].astype(np.int32)
        items = torch.arange(count, dtype=torch.int32, device=device)
        program.launch("order_cells", 1, cells=torch.tensor(cells, device=device), items=items, n=count)
        once = {(int(x), int(y)) for x, y in cells}
        twice = [*{cell for cell in once}]  # noqa: C416  a copy by itself has another order
        assert [tuple(cells[item].tolist()) for item in items.tolist()] == twice, count


ORDER = """#include "python_set.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io) {}
HD void observe(State, Io) {}
KERNEL(order_cells) {
    FOR_ITEMS (k, 1) {
        PythonSet<120> set;
        auto hash_of = [&](int item) { return set.hash(args.cells[2 * item], args.cells[2 * item + 1]); };
        for (int copy = 0; copy < 2; ++copy) set.order(args.items, (int)args.n + 0 * (int)k, hash_of);
    }
}
"""


def hall(device, robots, rows, **config):
    """An environment of these rows in which robots (x, y, direction, carries) stand; shelves are where x is."""
    env = gpu_vecenv.make("warehouse", 1, device, num_agents=len(robots), grid="\n".join(rows), **config)
    env.reset(seed=3)
    env.state["position"].copy_(torch.tensor([[robot[:2] for robot in robots]]))
    env.state["direction"].copy_(torch.tensor([[robot[2] for robot in robots]]))
    env.state["carrying"].copy_(torch.tensor([[bool(robot[3:]) for robot in robots]]))
    return env


def acted(env, *actions):
    """Rewards of one step, and where robots stand then."""
    rewards = env.step(torch.tensor([actions], dtype=torch.int32, device=env.device))[1]
    return rewards[0].tolist(), [tuple(cell) for cell in env.state["position"][0].tolist()]


EMPTY = ["........", "........", "........", "g.....xx"]


@pytest.mark.parametrize(
    ("robots", "expected"),
    [
        # (x, y, direction); all go forward
        ([(0, 0, UP)], [(0, 0)]),  # a wall
        ([(0, 0, EAST), (1, 0, WEST)], [(0, 0), (1, 0)]),  # two do not exchange cells
        ([(0, 0, EAST), (1, 0, EAST), (2, 0, EAST)], [(1, 0), (2, 0), (3, 0)]),  # one behind the other
        ([(0, 0, EAST), (1, 0, EAST), (2, 0, UP)], [(0, 0), (1, 0), (2, 0)]),  # behind one that a wall stops
        ([(0, 0, EAST), (1, 0, DOWN), (1, 1, WEST), (0, 1, UP)], [(1, 0), (1, 1), (0, 1), (0, 0)]),  # round a cycle
        # Nobody joins a cycle.
        (
            [(0, 0, EAST), (1, 0, DOWN), (1, 1, WEST), (0, 1, UP), (2, 0, WEST)],
            [(1, 0), (1, 1), (0, 1), (0, 0), (2, 0)],
        ),
        ([(0, 1, EAST), (2, 1, WEST)], [(1, 1), (2, 1)]),  # the first of two
        ([(2, 1, WEST), (0, 1, EAST)], [(1, 1), (0, 1)]),
        ([(0, 1, EAST), (2, 1, WEST), (3, 1, WEST)], [(0, 1), (1, 1), (2, 1)]),  # the longer path
        # Also the longer path of two that meet before its end.
        (
            [(1, 0, EAST), (2, 0, DOWN), (3, 0, WEST), (4, 0, WEST)],
            [(1, 0), (2, 1), (2, 0), (3, 0)],
        ),
    ],
)
def test_who_gets_where_many_want_to_be(robots, expected, device):
    env = hall(device, robots, EMPTY, request_queue_size=1)
    assert acted(env, *[FORWARD] * len(robots))[1] == expected


@pytest.mark.parametrize("middle", [(1, 1), (1, 2), (4, 2), (5, 1), (5, 2)])
def test_the_order_of_a_set_decides_in_a_small_part_of_the_graph(middle, device):
    """Two want the same cell, and two others go where nobody else does: 3 of 7 cells are less than half."""
    x, y = middle
    robots = [(x - 1, y, EAST), (x, y - 1, DOWN)]
    env = hall(device, [*robots, (7, 0, DOWN), (7, 3, UP)], EMPTY, request_queue_size=1)
    once = set()
    for cell in (robots[0][:2], middle, robots[1][:2]):
        once.add(cell)
    first = next(cell for cell in [*{cell for cell in once}] if cell != middle)  # noqa: C416  as networkx copies it
    cells = acted(env, *[FORWARD] * 4)[1]
    assert cells == [middle if robot[:2] == first else robot[:2] for robot in robots] + [(7, 1), (7, 2)]


def test_a_robot_with_a_shelf_does_not_push_another_shelf(device):
    rows = ["x.xx", "g..x"]
    env = hall(device, [(0, 0, EAST), (1, 1, EAST)], rows, request_queue_size=1)
    acted(env, TOGGLE_LOAD, NOOP)
    assert env.state["carrying"][0].tolist() == [True, False]
    assert acted(env, FORWARD, NOOP)[1] == [(1, 0), (1, 1)] and env.state["shelf"][0, 0].tolist()[0] == 0
    assert acted(env, FORWARD, NOOP)[1] == [(1, 0), (1, 1)]  # a shelf stands there
    acted(env, NOOP, FORWARD)
    acted(env, NOOP, LEFT)
    assert acted(env, NOOP, FORWARD)[1] == [(1, 0), (2, 0)]  # without a shelf one goes under it
    acted(env, NOOP, TOGGLE_LOAD)
    acted(env, NOOP, RIGHT)
    assert acted(env, FORWARD, FORWARD)[1] == [(1, 0), (2, 0)]  # behind one that a third shelf stops
    acted(env, NOOP, RIGHT)
    assert acted(env, FORWARD, FORWARD)[1] == [(2, 0), (2, 1)]  # into the cell that the other shelf leaves
    assert (env.state["shelf"][0] > 0).tolist() == [[False, False, True, True], [False, False, True, True]]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_shelf_stays_where_a_robot_drives_off_without_it(loaded, device):
    robots = [(0, 0, EAST, True), (1, 0, EAST, True)] if loaded else [(0, 0, EAST, True), (1, 0, EAST)]
    env = hall(device, robots, ["xx..", "g..x"], request_queue_size=1)
    assert acted(env, FORWARD, FORWARD)[1] == [(loaded, 0), (2, 0)]
    assert (env.state["shelf"][0, 0] > 0).tolist() == [not loaded, True, loaded, False]


def test_shelves_are_put_down_where_there_is_storage(device):
    env = hall(device, [(1, 0, WEST, True)], ["x.", "gx"])
    env.state["shelf"].copy_(torch.tensor([[[0, 2], [0, 1]]]))
    acted(env, TOGGLE_LOAD)
    assert env.state["carrying"].item()  # a corridor
    acted(env, FORWARD)
    acted(env, TOGGLE_LOAD)
    assert not env.state["carrying"].item() and env.state["shelf"][0].tolist() == [[2, 0], [0, 1]]
    acted(env, TOGGLE_LOAD)
    assert env.state["carrying"].item()


@pytest.mark.parametrize(
    ("reward_type", "delivery", "return_"),
    [("individual", [1, 0], [0, 0]), ("global", [1, 1], [0, 0]), ("two_stage", [0.5, 0], [0.5, 0])],
)
def test_who_is_rewarded(reward_type, delivery, return_, device):
    env = hall(
        device, [(0, 0, DOWN, True), (3, 0, UP)], ["x..x", "g..x"], request_queue_size=2, reward_type=reward_type
    )
    env.state["shelf"].copy_(torch.tensor([[[2, 0, 0, 2], [0, 0, 0, 1]]]))
    assert acted(env, FORWARD, NOOP)[0] == delivery
    assert env.state["shelf"][0].tolist() == [[0, 0, 0, 2], [1, 0, 0, 2]]  # the only one that was not requested
    assert env.state["deliveries"].item() == 1
    assert acted(env, NOOP, NOOP)[0] == [0, 0]
    for action in (LEFT, LEFT, FORWARD):
        assert acted(env, action, NOOP)[0] == [0, 0]
    assert acted(env, TOGGLE_LOAD, NOOP)[0] == return_
    assert acted(env, TOGGLE_LOAD, NOOP)[0] == acted(env, TOGGLE_LOAD, NOOP)[0] == [0, 0]


def test_a_shelf_that_waits_on_a_goal_may_be_the_next_that_is_requested(device):
    env = hall(device, [(0, 0, DOWN, True), (1, 1, UP, True)], ["x..", "ggx"], request_queue_size=1)
    env.state["shelf"].copy_(torch.tensor([[[2, 0, 0], [0, 1, 0]]]))
    rewards, _ = acted(env, FORWARD, NOOP)
    assert rewards == [1, 1] and env.state["deliveries"].item() == 2
    assert env.state["shelf"][0].tolist() == [[0, 0, 0], [2, 1, 0]]


def test_an_episode_without_deliveries_may_be_ended(device):
    env = hall(
        device, [(0, 0, DOWN, True)], ["x..", "ggx"], max_inactivity_steps=3, max_steps=7, autoreset_mode="disabled"
    )
    env.state["shelf"].copy_(torch.tensor([[[2, 0, 0], [0, 0, 1]]]))
    flags = []
    for action in (NOOP, NOOP, FORWARD, NOOP, NOOP, NOOP):
        *_, terminations, truncations, _ = env.step(torch.tensor([[action]], dtype=torch.int32, device=device))
        flags.append((terminations.item(), truncations.item()))
    assert flags == [(False, False)] * 5 + [(True, False)]
    env = hall(device, [(0, 0, DOWN)], ["x..", "ggx"], max_steps=2)
    assert [env.step(torch.tensor([[NOOP]], device=device))[3].item() for _ in range(2)] == [False, True]


def test_starts_cover_cells_directions_and_requests(device):
    env = gpu_vecenv.make("warehouse", 4000, device, num_agents=3, grid="x.x\nxgx", request_queue_size=2)
    env.reset(seed=2)
    cells = {tuple(map(tuple, robots)) for robots in env.state["position"].tolist()}
    assert len(cells) == 6 * 5 * 4 and all(len({*robots}) == 3 for robots in cells)
    counts = torch.bincount(
        (env.state["position"][:, 2].long() * torch.tensor([1, 3], device=device)).sum(-1), minlength=6
    )
    requested = (env.state["shelf"] == 2).float().mean(0).cpu()
    # Five standard errors of a share of 4000 draws are at most 0.04.
    assert torch.allclose(counts.cpu() / 4000, torch.full((6,), 1 / 6), atol=0.03, rtol=0)
    assert torch.allclose(requested, torch.tensor([[0.5, 0, 0.5], [0.5, 0, 0.5]]), atol=0.04, rtol=0)
    assert len({tuple(shelf) for shelf in env.state["shelf"].flatten(1).tolist()}) == 6
    directions = torch.bincount(env.state["direction"].flatten().long(), minlength=4) / 12000
    assert torch.allclose(directions.cpu(), torch.full((4,), 0.25), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("size", "shelves", "shape"),
    [("tiny", 32, (11, 10)), ("small", 80, (20, 10)), ("medium", 144, (20, 16)), ("large", 224, (29, 16))],
)
def test_sizes_are_those_of_rware(size, shelves, shape):
    game = gpu_vecenv.configure("warehouse", size=size)
    assert (game.height, game.width) == shape and game.num_shelves == shelves
    assert game.plan.goals.tolist() == [[shape[1] // 2 - 1, shape[0] - 1], [shape[1] // 2, shape[0] - 1]]


def test_layouts_are_those_of_the_oracle():
    for rows, columns, column_height in [(1, 3, 8), (2, 5, 8), (3, 5, 2), (1, 7, 1)]:
        text = "\n".join(map("".join, rows_of(rows, columns, column_height)))
        sizes = {"shelf_rows": rows, "shelf_columns": columns, "column_height": column_height}
        games = [gpu_vecenv.configure("warehouse", **config) for config in (sizes, {"layout": text.upper()})]
        assert (games[0].plan.tiles == games[1].plan.tiles).all() and (games[0].plan.goals == games[1].plan.goals).all()


def test_arguments_of_rware_are_understood():
    game = gpu_vecenv.configure("warehouse", n_agents=4, difficulty="hard", msg_bits=0)
    assert game.num_agents == 4 and game.num_requests == 2
    assert [gpu_vecenv.configure("warehouse", difficulty=name).num_requests for name in ("easy", "normal")] == [4, 2]
    assert gpu_vecenv.configure(game, request_queue_size=5).num_requests == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"grid": "x.x\nxx"}, "2 rows of 2, 3 characters"),
        ({"grid": "x.x\nx?g"}, r"row 1, 'x\?g', has '\?'"),
        ({"grid": "x.x\nx.x"}, "'g' 0 times; expected at least one"),
        ({"shelf_columns": 4}, "shelf_columns is 4; expected an odd number"),
        ({"column_height": 2**30}, "1 x 3 groups of 1073741824 shelves .* x 10 cells; expected at most 256 x 256"),
        ({"request_queue_size": 32}, "32 requests with 110 cells and 32 shelves; expected 1 … 31"),
        ({"num_agents": 1, "difficulty": "hard"}, "0 requests"),
        ({"num_agents": 7, "grid": "x.x\nxgx"}, "7 robots with 6 cells"),
        ({"msg_bits": 1}, "agents send no messages"),
    ],
)
def test_a_warehouse_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        gpu_vecenv.configure("warehouse", **config)


def test_observations_are_within_their_space(random_seed, device):
    for normalised in (False, True):
        config = {"num_agents": 4, "grid": HALL, "normalised_coordinates": normalised}
        env = gpu_vecenv.make("warehouse", 24, device, **config)
        space, largest = env.game.layout.observation.spaces["robot"], torch.zeros(env.game.layout.observation.shape)
        env.reset(seed=random_seed)
        for _ in range(80):
            obs = env.step(env.sample_actions())[0].flatten(0, 1).cpu()
            assert all(space.contains(row) for row in obs.numpy())
            largest = torch.maximum(largest, obs.amax(0))
        assert (largest.numpy() == space.high).mean() > 0.9


def test_robots_that_share_a_cell_hang_nothing(device):
    """No start or step leads there, but the state can be written to."""
    ring = [(0, 0, EAST), (1, 0, DOWN), (1, 1, WEST), (0, 1, UP)]
    for robots in ([*ring, (0, 0, DOWN)], [(1, 0, EAST), *ring], [(0, 0, EAST)] * 5):
        env = hall(device, robots, EMPTY, request_queue_size=1)
        _, cells = acted(env, *[FORWARD] * 5)
        assert all(abs(x - robot[0]) + abs(y - robot[1]) <= 1 for (x, y), robot in zip(cells, robots, strict=True))
