"""economy: random agents against the oracle, rules of market, houses and taxes, starts, refused configurations."""

import numpy as np
import pytest
import torch
from oracles.gather_trade_build import GatherTradeBuildOracle
from support.bitwise import bits
from support.draws import order_of, step_below, step_uniform
from support.kernels import signature

import gpu_vecenv
from gpu_vecenv import FunctionManager, VecEnv
from gpu_vecenv.envs.settlement import QUADRANT, ranked_skills, ranked_starts
from gpu_vecenv.errors import ConfigError

EXP_LOG = """#include "math.cuh"
KERNEL(map_exp_log) { FOR_ITEMS(k, args.n) { args.e[k] = math::exp(args.x[k]); args.l[k] = math::log(args.x[k]); } }
"""
VILLAGE = "\n".join(["W.....S", "WW.@.SS", "...@...", ".......", "SS.@.WW", "S..@..W"])
HURRIED = {"grid": VILLAGE, "period": 15, "max_steps": 75, "order_duration": 7, "resource_regen_prob": 0.2}
ANYWHERE = {**HURRIED, "fixed_four_skill_and_loc": False}
CASES = {
    "defaults": {"max_steps": 110},
    "limited rates": {**HURRIED, "tax_limit": 0.37, "num_rates": 11, "max_bid_ask": 3},
    "federal taxes, poor dollars": {**HURRIED, "tax_model": "us_federal", "usd_scaling": 9000.0, "max_num_orders": 2},
    "free market, utilitarian": {
        **ANYWHERE,
        "num_workers": 2,
        "tax_model": "free_market",
        "planner_reward_type": "inv_income_weighted_utility",
        "isoelastic_eta": 1.0,
        "starting_agent_coin": 3.5,
        "build_skill_dist": "none",
    },
    "nine workers": {
        **ANYWHERE,
        "num_workers": 9,
        "period": 2,
        "max_steps": 30,
        "planner_reward_type": "inv_income_weighted_coin_endowments",
        "gather_skill_dist": "lognormal",
        "mobile_agent_observation_range": 1,
    },
    "Saez's taxes": {
        **ANYWHERE,
        "num_workers": 7,
        "tax_model": "saez",
        "saez_buffer_size": 60,
        "tax_limit": 0.9,
        "period": 3,
        "usd_scaling": 20_000.0,
    },
    "Saez's taxes, elasticity": {
        **{**ANYWHERE, "num_workers": 7, "max_steps": 90, "period": 4},
        **{"tax_model": "saez", "saez_buffer_size": 70, "saez_fixed_elas": 0.3},
    },
    "equality counts less": {**ANYWHERE, "mixing_weight_gini_vs_coin": 0.3},
}


def exp_and_log(device: str):
    """Those of the device code: which ones are right has a test of its own, against float64."""
    program = FunctionManager(device).compile(
        EXP_LOG, kernels=[signature("map_exp_log", "const float* x, float* e, float* l, i64 n")]
    )

    def both(x: np.float32) -> tuple[np.float32, np.float32]:
        given = torch.tensor([x], device=device)
        exponential, logarithm = torch.empty_like(given), torch.empty_like(given)
        program.launch("map_exp_log", 1, x=given, e=exponential, l=logarithm, n=1)
        return np.float32(exponential.item()), np.float32(logarithm.item())

    return lambda x: both(x)[0], lambda x: both(x)[1]


def arrays_of(env: VecEnv, e: int) -> dict[str, np.ndarray]:
    shared = {field.name for field in env.game.state if field.shared}
    return {name: tensor[e].cpu().numpy() for name, tensor in env.state.items() if name not in shared}


def compare(env: VecEnv, oracles: list[GatherTradeBuildOracle], obs: torch.Tensor, info: dict, step: int) -> None:
    expected = np.stack([oracle.observe() for oracle in oracles])
    np.testing.assert_array_equal(bits(obs), bits(expected), f"obs, step {step}")
    workers, sizes = env.game.num_workers, env.game.layout.action.head_sizes
    acts = step % env.game.period == 0
    assert info["acting"].tolist() == [[True] * workers + [acts]] * len(oracles)
    for e, oracle in enumerate(oracles):
        ours = arrays_of(env, e)
        for name, value in oracle.arrays().items():
            np.testing.assert_array_equal(bits(ours[name]), bits(value), f"{name}, step {step}")
        found = [[sorted(order for order in own if order[0]) for own in both] for both in ours["orders"].tolist()]
        assert found == oracle.orders(), step
        own, choices = oracle.masks()
        mask = info["action_mask"][e].cpu().numpy()
        np.testing.assert_array_equal(mask[:workers, : own.shape[1]], own, f"masks, step {step}")
        for head in np.split(mask[workers], np.cumsum(sizes)[:-1]) if acts else ():
            np.testing.assert_array_equal(head[: len(choices)], choices, f"the planner's mask, step {step}")


def likely(random: np.random.Generator, mask: np.ndarray, env: VecEnv) -> np.ndarray:
    """Allowed actions, (agents, heads): workers build more often than uniform choice lets them, and move."""
    game = env.game
    weights = np.array([0.1, 20.0] + [1 / game.num_prices] * 4 * game.num_prices + [1.5] * 4)
    actions = np.zeros((game.num_agents, game.num_brackets), np.int32)
    for i in range(game.num_workers):
        own = weights * mask[i, : len(weights)]
        actions[i, 0] = random.choice(len(weights), p=own / own.sum())
    heads = np.split(mask[-1], np.cumsum(game.layout.action.head_sizes)[:-1])
    actions[-1] = [random.choice(np.flatnonzero(head[: game.num_rates + 1])) for head in heads]
    return actions


@pytest.mark.parametrize("name", CASES)
def test_random_agents_do_as_in_the_oracle(name, random_seed, device):
    env = gpu_vecenv.make("economy", 1, device, autoreset_mode="disabled", **CASES[name])
    game, random = env.game, np.random.default_rng(random_seed)
    obs, info = env.reset(seed=2**40 + random_seed)
    oracles = [GatherTradeBuildOracle(game, game.grid or QUADRANT, *exp_and_log(device)) for _ in range(env.num_envs)]
    for e, oracle in enumerate(oracles):
        start = arrays_of(env, e)
        oracle.begin(start["loc"], start["build_payment"], start["bonus_gather_prob"])
    compare(env, oracles, obs, info, 0)
    for step in range(1, game.max_steps + 1):
        actions = np.stack([likely(random, mask, env) for mask in info["action_mask"].cpu().numpy()])
        obs, rewards, terminations, truncations, info = env.step(torch.tensor(actions, device=device))
        for e, oracle in enumerate(oracles):
            order = order_of(step_below(env, e, step), game.num_workers)
            choices, planned = actions[e, :-1, 0].tolist(), actions[e, -1].tolist()
            rates = [*map(step_uniform(env, e, step, draw=1), range(game.num_brackets))]
            expected = oracle.step(choices, planned, order, step_uniform(env, e, step), rates)
            np.testing.assert_array_equal(bits(rewards[e]), bits(expected), f"rewards, step {step}")
        compare(env, oracles, obs, info, step)
        assert not terminations.any() and truncations.all() == (step == game.max_steps) == truncations.any()
    assert all(oracle.elasticity != 0.5 for oracle in oracles if game.tax_model == "saez")
    assert all(any(oracle.labor) and (name != "defaults" or len(oracle.units) < 40) for oracle in oracles)


BID, ASK, WOOD = 1, 2, 1
FIELD = {"grid": "S......\n.......\n...W...\n.@.....", "resource_regen_prob": 0.0, "gather_skill_dist": "none"}
FIELD |= {"fixed_four_skill_and_loc": False, "period": 3, "order_duration": 4, "max_steps": 50}
BARTER = {"tax_model": "free_market", "build_skill_dist": "none", "max_num_orders": 2}
CORNERS = [(0, 1), (0, 6), (3, 0), (3, 6)]


def field(device: str, num_envs: int = 1, **config: object) -> VecEnv:
    """Four workers in four corners of a map, with 20 coin and 5 units of stone and wood each."""
    env = gpu_vecenv.make("economy", num_envs, device, autoreset_mode="disabled", **FIELD, **config)
    env.reset(seed=4)
    env.state["loc"][:] = torch.tensor(CORNERS)
    env.state["inventory"][:] = 5
    env.state["coin"][:] = env.state["last_coin"][:] = 20
    env.observe()
    return env


def act(env: VecEnv, *choices: int, planned: tuple[int, ...] = (0,) * 7) -> dict:
    actions = torch.zeros((env.num_envs, 5, 7), dtype=torch.int32, device=env.device)
    actions[:, :4, 0], actions[:, 4] = (
        torch.tensor(choices, device=env.device),
        torch.tensor(planned, device=env.device),
    )
    *_, info = env.step(actions)
    assert not env.faults().any()
    return info


def order(side: int, price: int, resource: int = 0) -> int:
    return 2 + 22 * resource + 11 * (side - 1) + price


@pytest.mark.parametrize(
    ("orders", "coin", "wood"),
    [
        pytest.param([{0: (BID, 7)}, {1: (ASK, 4)}], [-7, 7, 0, 0], [1, -1, 0, 0], id="the bid is older"),
        pytest.param([{1: (ASK, 4)}, {0: (BID, 7)}], [-4, 4, 0, 0], [1, -1, 0, 0], id="the ask is older"),
        pytest.param([{1: (ASK, 4), 0: (BID, 7)}], [-4, 4, 0, 0], [1, -1, 0, 0], id="both at once"),
        pytest.param([{0: (BID, 4)}, {1: (ASK, 5)}], [-4, 0, 0, 0], [0, -1, 0, 0], id="too dear: both in escrow"),
        pytest.param([{0: (BID, 9)}, {0: (ASK, 2)}], [-9, 0, 0, 0], [-1, 0, 0, 0], id="not with oneself"),
        pytest.param(
            [{0: (BID, 6), 2: (BID, 8)}, {1: (ASK, 1)}], [-6, 8, -8, 0], [0, -1, 1, 0], id="the highest bid first"
        ),
        pytest.param(
            [{1: (ASK, 6), 2: (ASK, 3)}, {0: (BID, 9)}], [-3, 0, 3, 0], [1, -1, -1, 0], id="the lowest ask first"
        ),
        pytest.param(
            [{3: (BID, 5)}, {0: (BID, 5)}, {1: (ASK, 5)}], [-5, 5, 0, -5], [0, -1, 0, 1], id="the oldest bid first"
        ),
        pytest.param(
            [{3: (ASK, 5)}, {1: (ASK, 5)}, {0: (BID, 5)}], [-5, 0, 0, 5], [1, -1, 0, -1], id="the oldest ask first"
        ),
        pytest.param(
            [{2: (BID, 5), 0: (BID, 5)}, {1: (ASK, 5)}], [-5, 5, -5, 0], [1, -1, 0, 0], id="the first worker first"
        ),
    ],
)
def test_who_trades_at_which_price(orders, coin, wood, device):
    env = field(device, **BARTER)
    for given in orders:
        act(env, *(order(*given[i], WOOD) if i in given else 0 for i in range(4)))
    assert (env.state["coin"][0] - 20).tolist() == coin
    assert (env.state["inventory"][0] - 5).T.tolist() == [[0] * 4, wood]


def test_orders_expire_and_give_back_what_was_offered(device):
    env = field(device, **BARTER)
    act(env, order(BID, 7), order(ASK, 10, WOOD), 0, 0)
    labor = env.state["labor"][0].tolist()
    for _ in range(3):
        act(env, 0, 0, 0, 0)
        assert env.state["coin"][0, 0] == 13 and env.state["inventory"][0, 1, 1] == 4
    act(env, 0, 0, 0, 0)
    assert env.state["coin"][0, 0] == 20 and env.state["inventory"][0, 1, 1] == 5
    assert not env.state["orders"][..., 0].any() and env.state["labor"][0].tolist() == labor == [0.25, 0.25, 0, 0]


def test_a_worker_has_so_many_open_orders_for_each_resource(device):
    env = field(device, **BARTER)
    for _ in range(2):
        info = act(env, order(BID, 1), 0, 0, 0)
    mask = info["action_mask"][0, 0]
    assert not mask[2:24].any() and mask[24:46].all()  # of stone none, of wood all
    env.state["coin"][0, 1] = 3.5
    env.state["inventory"][0, 1, 1] = 0
    mask = act(env, 0, 0, 0, 0)["action_mask"][0, 1]
    assert mask[2:13].tolist() == [True] * 4 + [False] * 7 and mask[13:24].all() and not mask[35:46].any()


LEFT, RIGHT, UP, DOWN = range(46, 50)


def test_houses_stand_on_empty_land_and_let_their_owner_pass(device):
    env = field(device, **BARTER)
    env.state["loc"][:] = torch.tensor([(0, 1), (0, 3), (2, 2), (3, 0)])
    env.observe()
    mask = act(env, 1, 0, RIGHT, 0)["action_mask"][0]
    assert env.state["tile"][0, 0, 1] == 1 and env.state["inventory"][0].tolist() == [[4, 4], [5, 5], [5, 6], [5, 5]]
    assert env.state["coin"][0].tolist() == [30, 20, 20, 20] and env.state["labor"][0].tolist() == [10, 0, 2, 0]
    assert mask[:4, 1].tolist() == [False, True, False, True]  # not on a house, not on a source
    assert not mask[3, RIGHT] and mask[3, UP]  # water
    act(env, RIGHT, LEFT, 0, 0)  # into the same cell: the order in which they move is random
    assert sorted(env.state["loc"][0, :2, 1].tolist()) in ([1, 2], [2, 3])
    env.state["loc"][0, :2] = torch.tensor([(1, 1), (0, 2)])
    mask = act(env, 0, 0, 0, 0)["action_mask"][0]
    assert mask[0, UP] and not mask[1, LEFT]
    act(env, UP, 0, 0, 0)
    assert env.state["loc"][0, 0].tolist() == [0, 1]


def test_the_planner_acts_at_the_first_step_of_a_period_and_what_it_sets_stays(device):
    env = field(device)
    assert env.acting[0].all() and env.action_mask[0, 4, :50].tolist() == [True] * 22 + [False] * 28
    info = act(env, 0, 0, 0, 0, planned=(11, 3, 0, 0, 0, 0, 1))
    assert info["acting"][0].tolist() == [True] * 4 + [False]
    rates = [0.5, 0.1, 0, 0, 0, 0, 0]
    for _ in range(2):
        np.testing.assert_array_equal(env.state["rates"][0].cpu().numpy(), np.float32(rates))
        info = act(env, 0, 0, 0, 0, planned=(5,) * 7)
    assert info["acting"][0].all()
    act(env, 0, 0, 0, 0, planned=(0, 0, 2, 0, 0, 0, 0))  # 0 leaves a rate as it is
    np.testing.assert_array_equal(env.state["rates"][0].cpu().numpy(), np.float32([*rates[:2], 0.05, 0, 0, 0, 0]))


def test_taxes_are_due_by_bracket_and_shared_by_all(device):
    env = field(device)
    act(env, 0, 0, 0, 0, planned=(11, 21, 0, 0, 0, 0, 0))  # half of what is below 9.7, all of what is up to 39.475
    act(env, 0, 0, order(BID, 10), 0)
    env.state["coin"][0] = torch.tensor([20 + 9.7, 20 + 19.7, 4.0, 20 + 100.0])
    act(env, 0, 0, 0, 0)
    due = [4.85, 14.85, 0, 4.85 + 29.775]  # of worker 2, who has lost 6, nothing; 10 are in escrow
    shared = sum(due) / 4
    expected = [29.7 - due[0], 39.7 - due[1], 4.0, 120.0 - due[3]]
    np.testing.assert_allclose(env.state["coin"][0].tolist(), np.add(expected, shared), rtol=1e-6)
    np.testing.assert_allclose(env.state["last_income"][0].tolist(), [9.7, 19.7, -6, 100], rtol=1e-6)
    kept = np.add(np.add(expected, shared), [0, 0, 10, 0])
    np.testing.assert_allclose(env.state["last_coin"][0].tolist(), kept, rtol=1e-6)
    assert env.state["last_marginal_rate"][0, 1:].tolist() == [1, 0, 0]


def test_nobody_pays_out_of_escrow(device):
    env = field(device)
    act(env, 0, 0, 0, 0, planned=(21,) * 7)
    env.state["coin"][0] = torch.tensor([60.0, 20, 20, 20])
    for k in range(2):
        env.state["coin"][0, 0] -= 10
        env.state["orders"][0, 0, WOOD, k] = torch.tensor([BID, 10, 0], dtype=torch.uint8)
    env.state["coin"][0, 0] -= 30
    env.state["last_coin"][0, 0] = 0
    act(env, 0, 0, 0, 0)
    act(env, 0, 0, 0, 0)
    np.testing.assert_allclose(env.state["coin"][0].tolist(), [2.5, 22.5, 22.5, 22.5])  # 10 of the 30 that are due


SAEZ = {"tax_model": "saez", "saez_buffer_size": 12}


def test_the_elasticity_of_income_is_found_in_the_incomes_and_rates_of_the_past(device):
    env = field(device, **SAEZ)
    rates = np.linspace(0.05, 0.95, 12, dtype=np.float32)
    observed = np.stack([30 * (1 - rates) ** 0.75, rates], 1)
    observed[:2] = [[-4, 0.1], [9, 1.0]]  # without a logarithm
    env.state["saez_buffer"][:] = torch.tensor(observed)
    env.state["saez_count"][:] = 12
    act(env, 0, 0, 0, 0)
    np.testing.assert_allclose(env.state["elasticity"].cpu(), 0.98 * 0.5 + 0.02 * 0.75, rtol=1e-6)
    for _ in range(3):  # 4 incomes of 0, after the tax day: too few others
        act(env, 0, 0, 0, 0)
    assert env.state["saez_buffer"][0, :4, 0].tolist() == [0] * 4 and env.state["saez_count"] == 16
    np.testing.assert_allclose(env.state["elasticity"].cpu(), 0.505, rtol=1e-6)


def test_what_taxes_are_computed_from_outlasts_an_episode(device):
    env = gpu_vecenv.make("economy", 30, device, **FIELD | SAEZ | {"period": 2, "max_steps": 10})
    names = "saez_buffer", "saez_count", "elasticity", "average_rates"

    def kept():
        return {name: env.state[name].clone() for name in names}

    env.reset(seed=3)
    begun = kept()
    assert not begun["saez_count"].any() and (begun["elasticity"] == 0.5).all() and not env.state["rates"].any()
    for _ in range(30):  # 5 tax days of 4 workers in an episode: the buffer is full in the first one
        before, rates = kept(), env.state["rates"].clone()
        *_, info = env.step(env.sample_actions())
        ended = info["_final_obs"].any()
    assert ended and (env.state["saez_count"] >= 12).all()
    torch.testing.assert_close(env.state["average_rates"], before["average_rates"], rtol=0, atol=0)
    assert torch.equal(env.state["rates"], env.state["average_rates"]) and not torch.equal(env.state["rates"], rates)
    before = kept()
    env.reset(mask=torch.arange(30, device=device) < 20)
    assert all(torch.equal(value, before[name]) for name, value in kept().items())
    env.reset(seed=3, mask=torch.arange(30, device=device) < 10)
    assert all(torch.equal(value[:10], begun[name][:10]) for name, value in kept().items())
    assert all(torch.equal(value[10:], before[name][10:]) for name, value in kept().items())


def test_a_number_that_is_not_finite_does_not_outlast_its_episode(device):
    env = gpu_vecenv.make("economy", 2, device, end_on_nonfinite=True, **FIELD | SAEZ)
    env.reset(seed=3)
    for name in ("saez_buffer", "elasticity", "average_rates"):
        env.state[name][0].fill_(float("nan"))
        assert env.step(env.sample_actions())[2][0].all() and env.state[name].isfinite().all(), name
        assert not env.step(env.sample_actions())[2].any()


def test_other_taxes_have_no_state_of_saez_s(device):
    env = field(device)
    assert not {"saez_buffer", "saez_count", "elasticity", "average_rates"} & {*env.state}


def test_returns_are_what_utility_and_welfare_have_risen_by(device):
    env = gpu_vecenv.make("economy", 20, device, autoreset_mode="disabled", **FIELD | {"resource_regen_prob": 0.3})
    env.reset(seed=1)
    start, returns = env.state["utility"].clone(), torch.zeros((20, 5), device=device)
    for _ in range(50):
        returns += env.step(env.sample_actions())[1]
    # Fifty additions of float32 numbers below 100.
    torch.testing.assert_close(returns, env.state["utility"] - start, rtol=0, atol=1e-3)
    wealth = env.state["coin"].double() + (env.state["orders"][..., 1] * (env.state["orders"][..., 0] == BID)).sum(
        (2, 3)
    )
    gini = (wealth[:, :, None] - wealth[:, None]).abs().sum((1, 2)) / (2 * 4 * wealth.sum(1) + 1e-10)
    torch.testing.assert_close(env.state["equality"].double(), 1 - gini * 4 / 3, rtol=0, atol=1e-5)
    torch.testing.assert_close(env.state["productivity"].double(), wealth.sum(1))
    product = env.state["productivity"] * env.state["equality"]
    torch.testing.assert_close(env.state["utility"][:, 4], product / 4)
    assert (wealth > 0).any()


def test_randomised_parameters_are_each_environment_s_own(device):
    env = field(device, 50, randomize={"tax_limit": (0.0, 1.0), "energy_cost": (0.0, 2.0), "build_labor": (1.0, 3.0)})
    limits = env.state["tax_limit"][:, None].cpu() + 1e-7
    allowed = env.action_mask[:, 4, 1:22].cpu()
    assert torch.equal(allowed, torch.arange(21) / 20 <= limits) and len({*allowed.sum(1).tolist()}) > 5
    before = env.state["utility"][:, 3].clone()
    actions = torch.zeros((50, 5, 7), dtype=torch.int32, device=device)
    actions[:, 3, 0] = UP
    env.step(actions)
    env.state["loc"][:, 3, 0] = 3
    earned = env.step(actions)[1][:, 3]
    assert before.shape == (50,)
    torch.testing.assert_close(earned, -env.state["energy_cost"], rtol=0, atol=1e-5)


def test_ranked_workers_start_in_corners_in_any_order(device):
    env = gpu_vecenv.make("economy", 2000, device)
    env.reset(seed=5)
    corners = [(0, 24), (24, 0), (0, 0), (24, 24)]
    assert ranked_starts(4, 25, 25).tolist() == [list(corner) for corner in corners]
    skills = torch.tensor(ranked_skills(4, 3.0)) * 10
    np.testing.assert_allclose(skills.tolist(), [11.33164062, 13.26711234, 16.47237295, 22.2496143], rtol=1e-6)
    starts = {tuple(map(tuple, loc)) for loc in env.state["loc"].tolist()}
    assert len(starts) == 24
    ranks = (env.state["build_payment"].cpu()[..., None] == skills).int().argmax(-1)
    assert torch.equal(torch.tensor(corners)[ranks], env.state["loc"].cpu().long())
    # Of Pareto's distribution with shape 3 a share of 1 / 2^3 exceeds 1, and of 1 / 3^3 exceeds 2.
    bonus = env.state["bonus_gather_prob"].flatten()
    assert abs((bonus > 0.5).float().mean().item() - 1 / 8) < 0.02
    assert abs((bonus == 1).float().mean().item() - 1 / 27) < 0.01


def test_other_workers_start_anywhere_on_land(device):
    env = gpu_vecenv.make("economy", 4000, device, **FIELD)
    env.reset(seed=6)
    places = (env.state["loc"] * torch.tensor([7, 1], device=device)).sum(-1).cpu()
    assert all(len({*row}) == 4 for row in places.tolist())
    counts = torch.bincount(places.flatten().long(), minlength=28) / 16000
    assert counts[22] == 0 and (counts[[k for k in range(28) if k != 22]] - 1 / 27).abs().max() < 0.01
    # Of Pareto's distribution with shape 4 a share of 1 / 2^4 exceeds 1: those are paid three times as much.
    assert abs((env.state["build_payment"] == 30).float().mean().item() - 1 / 16) < 0.02


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"grid": "S..\n.x."}, "row 1, '.x.', has 'x'"),
        ({"grid": "...\n..."}, "6 cells of land, 0 sources"),
        ({"grid": "@S\n.."}, "4 workers do not start in the corners of a map of 2 x 2"),
        ({"grid": "S.\n..", "num_workers": 5}, "5 workers do not start"),
        ({"grid": "S@\n..", "fixed_four_skill_and_loc": False}, "4 workers, 3 cells of land"),
        ({"bracket_spacing": "log"}, "US federal"),
    ],
)
def test_an_economy_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        gpu_vecenv.configure("economy", **config)


def test_arguments_of_ai_economist_are_understood():
    game = gpu_vecenv.configure("economy", n_agents=9, episode_length=400, rate_max=0.5, bracket_spacing="us-federal")
    assert (game.num_workers, game.max_steps, game.tax_limit) == (9, 400, 0.5)
    assert len(ranked_starts(9, 25, 25)) == 9 == len({*map(tuple, ranked_starts(9, 25, 25).tolist())})
    assert QUADRANT.count("W") == QUADRANT.count("S") == 20
