"""The bundled games are bitwise equal to independent NumPy oracles; rewards and flags add up."""

import numpy as np
import pytest
import torch
from oracles import overcooked, tag_continuous, tag_gridworld
from support.bitwise import bits
from support.kernels import signature

import gpu_vecenv
from gpu_vecenv import FunctionManager, StepBuffers, VecEnv

SINCOS = """#include "math.cuh"
KERNEL(map_sincos) { FOR_ITEMS(k, args.n) math::sincos(args.x[k], &args.s[k], &args.c[k]); }
"""
GRIDWORLDS = {
    "defaults": {},
    "the end by time": {"max_steps": 20},
    "tags": {"num_taggers": 3, "grid": 4, "max_steps": 30, "random_start": True},
    "crowd": {"num_taggers": 40, "grid": 9, "max_steps": 25, "random_start": True},
    "partial": {"num_taggers": 3, "grid": 3, "max_steps": 25, "random_start": True, "full_observation": False},
    "partial, far": {"num_taggers": 9, "max_steps": 50, "random_start": True, "full_observation": False},
    "odd numbers": {"grid": 7, "max_steps": 11, "wall_penalty": 0.37, "tagger_reward": 1e-3, "runner_penalty": 1 / 3},
    "no numbers": {"grid": 2, "max_steps": 6, "wall_penalty": 0, "step_cost": 0, "tagger_reward": 0},
    "one cell, one step": {"num_taggers": 1, "grid": 1, "max_steps": 1},
}
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 40}
REWARDS = {"tagger_step_reward": -0.013, "runner_step_reward": 0.07, "edge_penalty": -0.3, "tag_reward": 0.1}
CONTINUOUS = {
    "the end by time": {"max_steps": 15, "num_taggers": 3, "num_runners": 9, "num_neighbors": 4},
    "tags": {**FEW, "tagging_distance": 0.1},
    "all neighbours": {**FEW, "tagging_distance": 0.1, "num_neighbors": "all"},
    "more neighbours than agents": {**FEW, "tagging_distance": 0.1, "num_neighbors": 7},
    "tagged runners stay": {**FEW, "tagging_distance": 0.2, "runner_leaves_when_tagged": False},
    "rewards": {**FEW, **REWARDS, "tagging_distance": 0.15, "survival_reward": 0.7, "tag_penalty": -1 / 3},
    "rewards, staying": {**FEW, **REWARDS, "runner_leaves_when_tagged": False, "tagging_distance": 0.3},
    "skills": {**FEW, "tagger_skill": 1.3, "runner_skill": 0.45, "tagging_distance": 0.1, "max_speed": 0.7},
    "runners that cannot run": {**FEW, "runner_skill": 0, "tagging_distance": 0.05},
    "levels": {**FEW, "acceleration_levels": 3, "turn_levels": 1, "max_turn": -1.0, "min_acceleration": -0.3},
    "many tags at once": {"num_taggers": 2, "num_runners": 30, "side": 2.0, "max_steps": 12, "tagging_distance": 0.4},
}
CONTINUOUS |= {
    f"version 0, {name}": {**CONTINUOUS[name], "egocentric": False}
    for name in ("tags", "all neighbours", "more neighbours than agents", "tagged runners stay", "skills", "levels")
}
LARGE = {
    "defaults": {},
    "version 0": {"egocentric": False},
    "ten thousand agents": {"num_taggers": 500, "num_runners": 9500},
}
PANTRY = {"random_start_positions": True, "random_object_probability": 0.5}
KITCHENS = {name: {"layout_name": name, "max_steps": 90} for name in overcooked.LAYOUTS}
KITCHENS |= {f"{name}, filled": {**config, **PANTRY, "cook_time": 5} for name, config in KITCHENS.items()}
KITCHENS |= {
    "numbers": {**PANTRY, "max_steps": 45, "shaping": 0.37, "delivery_reward": 1 / 3, "soup_pickup_reward": 0.7},
    "a kitchen of one's own": {**PANTRY, "grid": "XPSX\nO12D\nXXXX", "max_steps": 60, "cook_time": 1},
}
CASES = [("tag_gridworld", name, 6, 300) for name in GRIDWORLDS]
CASES += [("overcooked", name, 6, 200) for name in KITCHENS]
CASES += [("tag_continuous", name, 4, 120) for name in CONTINUOUS]
CASES += [
    ("tag_continuous", "defaults", 2, 60),
    ("tag_continuous", "version 0", 2, 120),
    pytest.param("tag_continuous", "ten thousand agents", 1, 1, marks=pytest.mark.exhaustive),
]
ORACLES = {"tag_gridworld": tag_gridworld, "tag_continuous": tag_continuous, "overcooked": overcooked}
CONFIGS = {"tag_gridworld": GRIDWORLDS, "tag_continuous": {**CONTINUOUS, **LARGE}, "overcooked": KITCHENS}


def poisoned(env: VecEnv) -> StepBuffers:
    """Step buffers filled with 0xFF bytes, so that an element that a kernel does not write shows."""
    buffers = env.step_buffers()
    for tensor in buffers.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    return buffers


def oracle_of(name: str, config: dict, device: str):
    """An oracle; its sine and cosine are those of the device code.

    That is fair: which sine is right has a test of its own, against float64 over the whole range, and an oracle with
    another sine would differ in the last bit and then drift away. What is compared here is everything else.
    """
    if name == "tag_gridworld":
        return tag_gridworld.TagGridworldOracle(**config)
    if name == "overcooked":
        return overcooked.OvercookedOracle(**config)
    program = FunctionManager(device).compile(
        SINCOS, kernels=[signature("map_sincos", "const float* x, float* s, float* c, i64 n")]
    )

    def sincos(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        angle = torch.tensor(x, device=device)
        sine, cosine = torch.empty_like(angle), torch.empty_like(angle)
        program.launch("map_sincos", len(x), x=angle, s=sine, c=cosine, n=len(x))
        return sine.cpu().numpy(), cosine.cpu().numpy()

    return tag_continuous.TagContinuousOracle(sin=lambda x: sincos(x)[0], cos=lambda x: sincos(x)[1], **config)


def test_share_of_grid_rounds_like_a_division(device):
    for grid in (1, 41, 3001, 32767):
        env = gpu_vecenv.make("tag_gridworld", grid + 1, device, grid=grid, num_taggers=1)
        env.reset(seed=1)
        env.state["cell"].copy_(torch.arange(grid + 1)[:, None, None].expand(-1, 2, 2))
        expected = np.arange(grid + 1, dtype=np.float32) / np.float32(grid)
        np.testing.assert_array_equal(env.observe()[:, 0, :4].cpu().numpy(), np.repeat(expected[:, None], 4, axis=1))


@pytest.mark.parametrize(("name", "config", "num_envs", "steps"), CASES)
def test_every_step_is_bitwise_equal_to_the_oracle(name, config, num_envs, steps, random_seed, device):
    config = CONFIGS[name][config]
    env = VecEnv(gpu_vecenv.configure(name, **config), num_envs, device, autoreset_mode="disabled")
    oracles = [oracle_of(name, config, device) for _ in range(num_envs)]
    fields = [field.name for field in env.game.state if not field.shared]
    choices = np.array(env.game.layout.action.head_sizes)
    random = np.random.default_rng(random_seed)
    ends = 0

    def inject(environments) -> None:
        for e in environments:
            oracles[e].elapsed_steps, oracles[e].active = 0, np.ones(env.num_agents, bool)
            for field in fields:
                setattr(oracles[e], field, env.state[field][e].cpu().numpy().copy())
            ORACLES[name].assert_valid_start(oracles[e])

    def compare(what: str, tensor: torch.Tensor, expected: list[np.ndarray]) -> None:
        expected = np.stack(expected)
        assert expected.dtype == tensor.cpu().numpy().dtype, what
        np.testing.assert_array_equal(bits(tensor), bits(expected), what)

    obs, _ = env.reset(seed=2**40 + random_seed, out=poisoned(env))
    inject(range(num_envs))
    compare("first obs", obs, [oracle.observe() for oracle in oracles])
    for step in range(steps):
        shape = (num_envs, env.num_agents, *env.game.layout.action.shape)
        actions = random.integers(0, choices if env.game.layout.action.shape else choices[0], shape, np.int32)
        outputs = env.step(torch.tensor(actions, device=device), out=poisoned(env))
        results = [oracle.step(action) for oracle, action in zip(oracles, actions, strict=True)]
        for place, what in enumerate(("rewards", "terminations", "truncations")):
            compare(f"{what}, step {step}", outputs[place + 1], [result[place] for result in results])
        compare(f"obs, step {step}", outputs[0], [oracle.observe() for oracle in oracles])
        compare(f"active, step {step}", outputs[4]["active"], [oracle.active for oracle in oracles])
        compare(f"env.active, step {step}", env.active, [oracle.active for oracle in oracles])
        compare(f"time, step {step}", env.elapsed_steps, [np.int32(oracle.elapsed_steps) for oracle in oracles])
        for field in fields:
            compare(f"{field}, step {step}", env.state[field], [getattr(oracle, field) for oracle in oracles])
        ended = ~env.active.any(1)
        if ended.any():
            ends += int(ended.sum())
            obs, _ = env.reset(mask=ended, out=poisoned(env))
            inject(np.flatnonzero(ended.cpu()))
            compare(f"obs after reset, step {step}", obs, [oracle.observe() for oracle in oracles])
    assert env.faults().sum() == 0
    assert ends >= steps // env.game.max_steps * num_envs


NEAREST = """#include "neighbors.cuh"
KERNEL(three_nearest) {
    FOR_ITEMS (k, args.n) {
        Nearest<3> nearest;
        nearest.clear();
        for (int j = 0; j < 8; ++j) nearest.insert(args.distance[8 * k + j], j);
        for (int place = 0; place < 3; ++place) args.id[3 * k + place] = nearest.id(place);
    }
}
"""


def test_nearest_equals_a_stable_sort(device):
    """Of eight distances, many of them equal; nobody is found who is infinitely far, or whose distance is NaN."""
    far = [np.inf, np.nan, np.inf]
    distances = np.random.default_rng(3).choice(np.float32([0, 1, 2, *far]), (2000, 8))
    expected = []
    for row in distances:
        found = sorted((j for j in range(8) if row[j] < np.inf), key=lambda j, row=row: row[j])
        expected.append([*found, -1, -1, -1][:3])
    ids = torch.zeros((2000, 3), dtype=torch.int32, device=device)
    program = FunctionManager(device).compile(
        NEAREST, kernels=[signature("three_nearest", "const float* distance, i32* id, i64 n")]
    )
    program.launch("three_nearest", 2000, distance=torch.tensor(distances, device=device), id=ids, n=2000)
    np.testing.assert_array_equal(ids.cpu(), expected)


CROWD = {"num_taggers": 6, "num_runners": 64, "num_neighbors": 7, "side": 8.0}


def crowds(random: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Places (count, 2) on a square of side 8, of which a search by cells may miss somebody."""
    anywhere = random.uniform(0, 8, (count, 2))
    border = random.integers(0, 7, (count, 2)) * 8 / 6  # of six cells in a row, or three
    corner = 8 - random.uniform(0, 0.5, (count, 2)) ** 4
    alone = np.where(np.arange(count)[:, None] < 3, 8 - anywhere / 40, anywhere / 40)
    line = np.stack([anywhere[:, 0], np.full(count, 4.0)], 1)
    around = np.nextafter(np.float32(border), np.float32(random.choice([0, 8], (count, 2))))
    angle = 2 * np.pi * np.arange(count) / count  # all as far from the middle as floats can tell, and next to it
    circle = 4 + np.where(np.arange(count) > 5, 1.0, 0.0)[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    some = np.where(np.arange(count)[:, None] % 12 < 3, circle, anywhere)
    lattice = np.stack(np.divmod(np.arange(count), 9), 1)
    few = {"anywhere": anywhere, "on borders": border, "around borders": around, "in a corner": corner}
    few |= {"on a circle": circle, "some on a circle": some, "on a lattice": lattice, "together": anywhere / 1e6 + 3}
    few |= {"hardly apart": anywhere * 1e-22}  # squares of distances have hardly a bit
    return few | {"three alone": alone, "in a line": line, "in one place": np.full((count, 2), 4.0)}


@pytest.mark.parametrize("egocentric", [False, True])
@pytest.mark.parametrize("runners", [64, 194])  # two hundred agents are sorted into cells on a GPU too
def test_the_nearest_are_found_for_all_layouts(runners, egocentric, device):
    """Against the oracle, which looks at everybody: crowds in corners, on the borders of cells, and sparse ones."""
    random, config = np.random.default_rng(11), {**CROWD, "num_runners": runners, "egocentric": egocentric}
    places = np.float32(list(crowds(random, 6 + runners).values()))
    out = random.random(places.shape[:2]) < np.linspace(0, 0.95, len(places))[:, None]  # in the last, few are left
    out[:, :6] = False
    env = VecEnv(gpu_vecenv.configure("tag_continuous", **config), len(places), device)
    env.reset(seed=1)
    env.state["position"].copy_(torch.tensor(places))
    env.state["in_game"].copy_(torch.tensor(~out))
    observed = env.observe().cpu()
    for e, rows in enumerate(observed):
        oracle = oracle_of("tag_continuous", config, device)
        oracle.elapsed_steps, oracle.active = 0, np.ones(6 + runners, bool)
        for field in (field.name for field in env.game.state if not field.shared):
            setattr(oracle, field, env.state[field][e].cpu().numpy().copy())
        np.testing.assert_array_equal(bits(rows), bits(oracle.observe()), f"crowd {e}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "all_caught"),
    [
        ({}, False),
        ({"tagging_distance": 0.1, "side": 10.0, "max_steps": 70, "num_neighbors": 1}, True),
    ],
)
def test_rewards_and_flags_of_tag_continuous_add_up(config, all_caught, device):
    """100 environments x 110 agents x 300 steps, in integers: every reward here is a whole number of at most 1000."""
    env = gpu_vecenv.make("tag_continuous", 100, device, autoreset_mode="next_step", **config)
    taggers, runners = (env.game.layout.role_slices[role] for role in ("tagger", "runner"))
    buffers = env.step_buffers()
    env.reset(seed=19, out=buffers)
    left = torch.zeros(100, dtype=torch.int64, device=device)  # runners gone in this episode
    ends = torch.zeros_like(left)
    returns = torch.zeros((100, 110), dtype=torch.float64, device=device)
    completed = torch.zeros_like(returns)
    imbalance = {}
    for _ in range(300):
        begins = ~env.active.any(1)
        _, rewards, terminations, truncations, info = env.step(env.sample_actions(), out=buffers)
        whole = rewards.long()
        leaving = terminations[:, runners].sum(1)
        left = torch.where(begins, 0, left + leaving)
        ended = ~info["active"].any(1)
        late = (env.elapsed_steps >= env.game.max_steps) & ~begins
        over = left == 100
        survivors = torch.where(late, 100 - left, 0)
        in_game = env.state["in_game"]
        returns = torch.where(begins[:, None], 0, returns + rewards)
        completed = torch.where(ended[:, None], completed + returns, completed)
        ends += ended
        differences = {
            "rewards are whole": (rewards != whole).sum(1),
            "taggers' rewards": whole[:, taggers].sum(1) - 10 * leaving,
            "runners' rewards": whole[:, runners].sum(1) + 10 * leaving - survivors,
            "runners in game": in_game[:, runners].sum(1) - (100 - left),
            "taggers in game": in_game[:, taggers].sum(1) - 10,
            "runners truncated": truncations[:, runners].sum(1) - survivors,
            "taggers terminated": terminations[:, taggers].sum(1) - 10 * (over & ~begins),
            "taggers truncated": truncations[:, taggers].sum(1) - 10 * (late & ~over),
            "ends": ended.long() - (over & ~begins | late).long(),
            "running returns": (returns != env.data["engine_returns"]).sum(1),
        }
        for what, difference in differences.items():
            imbalance[what] = imbalance.get(what, 0) + difference.abs().sum()
    assert {what: int(total) for what, total in imbalance.items()} == dict.fromkeys(imbalance, 0)
    statistics = env.episode_statistics()
    assert torch.equal(statistics["returns"], completed)
    assert torch.equal(statistics["episodes"], ends)
    assert (int(statistics["terminations"].sum()) > 0) == all_caught
