"""economy against ai-economist 1.7.1 itself, from the same starts with the same actions and draws, step by step.

After each step theirs continues with our coin, so that rounding does not add up; marginal rates of incomes beside a
cutoff are not compared. tests/envs/test_economy.py compares the game with an oracle of the same rules. What
benchmarks/ measures of theirs is checked here too.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.draws import order_of, step_below, step_uniform

import gpu_vecenv

foundation = pytest.importorskip("ai_economist.foundation", reason="see FORCED_ai-economist in the Makefile")
from ai_economist.foundation.components import move  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers import ai_economist as peer  # noqa: E402
from benchmarks.workload import Request, Workload  # noqa: E402
from gpu_vecenv.envs.registry import configure  # noqa: E402

# Those numbers are float64, ours float32: utilities and prices up to 1,000 have errors up to 1e-4.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-4}
SMALL = {"period": 25, "max_steps": 150, "order_duration": 9}
TASTES = {"isoelastic_eta": 0.5, "energy_cost": 0.4, "payment": 7.0, "payment_max_skill_multiplier": 2.0}
CROWDED = {"num_workers": 10, "fixed_four_skill_and_loc": False, **SMALL}
SAEZ = {"tax_model": "saez", "period": 5, "saez_buffer_size": 64, "usd_scaling": 20000.0, "resource_regen_prob": 0.3}
QUADRANT, DENSE, MIXED = (
    "quadrant_25x25_20each_30clump.txt",
    "quadrant_8x8_4each_8clump.txt",
    "env-pure_and_mixed-15x15.txt",
)
CASES = {
    "defaults": (QUADRANT, {"period": 100, "max_steps": 1000}),
    "limited taxes": (QUADRANT, {"tax_limit": 0.4, **SMALL}),
    "federal taxes": (QUADRANT, {"tax_model": "us_federal", "usd_scaling": 5000.0, **SMALL}),
    "limited federal taxes": (QUADRANT, {"tax_model": "us_federal", "tax_limit": 0.2, "usd_scaling": 5000.0, **SMALL}),
    "Saez's taxes": (DENSE, {**CROWDED, **SAEZ}),
    "limited Saez's taxes": (DENSE, {**CROWDED, **SAEZ, "num_workers": 4, "tax_limit": 0.6}),
    "Saez's taxes, fixed elasticity": (DENSE, {**CROWDED, **SAEZ, "saez_fixed_elas": 1.5, "usd_scaling": 1000.0}),
    "Saez's taxes, uniform weights": (DENSE, {**CROWDED, **SAEZ, "pareto_weight_type": "uniform"}),
    "free market": (QUADRANT, {"tax_model": "free_market", **SMALL}),
    "nine ranks": (QUADRANT, {"num_workers": 9, **TASTES, **SMALL}),
    "crowded": (DENSE, {**CROWDED, "resource_regen_prob": 0.3, "max_num_orders": 3, "max_bid_ask": 4}),
    "rich": (DENSE, {**CROWDED, "starting_agent_coin": 50.0, "planner_reward_type": "inv_income_weighted_utility"}),
    "mixed": (
        MIXED,
        {
            **CROWDED,
            "build_skill_dist": "lognormal",
            "gather_skill_dist": "lognormal",
            "planner_reward_type": "inv_income_weighted_coin_endowments",
            "mobile_agent_observation_range": 2,
        },
    ),
    "without skills": (
        MIXED,
        {**CROWDED, "build_skill_dist": "none", "gather_skill_dist": "none", "mixing_weight_gini_vs_coin": 0.7},
    ),
}


class Skill(float):
    """A probability to gather two units, and whose it is."""

    worker = 0


class Gathered:
    """A number between 0 and 1 that is drawn when it is compared with somebody's skill."""

    def __init__(self, uniform):
        self.uniform = uniform

    def __lt__(self, skill):
        return self.uniform(skill.worker) < float(skill)


def grid_of(file):
    path = f"{foundation.__path__[0]}/scenarios/simple_wood_and_stone/map_txt/{file}"
    with open(path, encoding="utf-8") as text:
        return "\n".join(row.replace(" ", ".") for row in text.read().split(";") if row)


def reference(game, file):
    models = {"us_federal": "us-federal-single-filer-2018-scaled", "saez": "saez"}
    components = {
        "Build": {
            "build_labor": game.build_labor,
            "payment": game.payment,
            "payment_max_skill_multiplier": game.payment_max_skill_multiplier,
            "skill_dist": game.build_skill_dist,
        },
        "ContinuousDoubleAuction": {
            "max_bid_ask": game.max_bid_ask,
            "max_num_orders": game.max_num_orders,
            "order_duration": game.order_duration,
            "order_labor": game.order_labor,
        },
        "Gather": {
            "collect_labor": game.collect_labor,
            "move_labor": game.move_labor,
            "skill_dist": game.gather_skill_dist,
        },
        "PeriodicBracketTax": {
            "period": game.period,
            "tax_model": models.get(game.tax_model, "model_wrapper"),
            "usd_scaling": game.usd_scaling,
            "saez_fixed_elas": game.saez_fixed_elas,
            "pareto_weight_type": game.pareto_weight_type,
            "disable_taxes": game.tax_model == "free_market",
            # The planner's rates would be others below another maximum; the schedule's limit rises with each episode.
            "rate_max": game.tax_limit if game.tax_model == "saez" else 1.0,
            "tax_annealing_schedule": (-1, game.tax_limit) if game.tax_limit < 1 and game.tax_model != "saez" else None,
        },
    }
    theirs = foundation.make_env_instance(
        "layout_from_file/simple_wood_and_stone",
        components=list(components.items()),
        n_agents=game.num_workers,
        world_size=[game.height, game.width],
        episode_length=game.max_steps,
        env_layout_file=file,
        planner_gets_spatial_info=False,
        **{
            name: getattr(game, name)
            for name in (
                *("fixed_four_skill_and_loc", "resource_regen_prob", "starting_agent_coin", "isoelastic_eta"),
                *("energy_cost", "planner_reward_type", "mixing_weight_gini_vs_coin", "mobile_agent_observation_range"),
            )
        },
    )
    theirs.get_component("PeriodicBracketTax")._buffer_size = game.saez_buffer_size
    return theirs


def begin(theirs, state):
    """A new episode of theirs from our start."""
    theirs.reset()
    tax = theirs.get_component("PeriodicBracketTax")
    tax._curr_rates_obs = np.array(tax.curr_marginal_rates)  # else it is of the latest period of the last episode
    theirs.world.clear_agent_locs()
    for agent, loc, payment, bonus in zip(
        theirs.world.agents, state["loc"], state["build_payment"], state["bonus_gather_prob"], strict=True
    ):
        theirs.world.maps.set_agent_loc(agent, *map(int, loc))
        agent.state["build_payment"] = float(payment)
        agent.state["bonus_gather_prob"] = Skill(bonus)
        agent.state["bonus_gather_prob"].worker = agent.idx


def compare_state(theirs, game, state, step):
    agents, maps = theirs.world.agents, theirs.world.maps
    tax, market = theirs.get_component("PeriodicBracketTax"), theirs.get_component("ContinuousDoubleAuction")
    houses, resources = maps.get("House", owner=True) + 1, maps.get("Stone") + maps.get("Wood")
    exact = {
        "loc": [agent.loc for agent in agents],
        "tile": np.where(state["terrain"] >= 2, resources, houses),
        "inventory": [[agent.inventory[name] for name in ("Stone", "Wood")] for agent in agents],
    }
    for name, value in exact.items():
        np.testing.assert_array_equal(state[name], value, f"{name}, step {step}")
    coins = np.array([agent.total_endowment("Coin") for agent in agents])
    metrics = theirs.scenario_metrics()
    close = {
        "coin": [agent.inventory["Coin"] for agent in agents],
        "labor": [agent.endogenous["Labor"] for agent in agents],
        "price_history": [sum(market.price_history[c].values()) for c in ("Stone", "Wood")],
        "rates": tax._curr_rates_obs,
        "last_coin": tax.last_coin,
        "last_income": tax.last_income,
        "productivity": coins.sum(),
        "equality": metrics["social/equality"],
    }
    for name, value in close.items():
        np.testing.assert_allclose(state[name], value, **TOLERANCE, err_msg=f"{name}, step {step}")
    beside = np.abs(state["last_income"][:, None] - state["bracket_cutoffs"]).min(1) < 1e-3  # rounding decides
    theirs_rates = np.where(beside, state["last_marginal_rate"], tax.last_marginal_rate)
    np.testing.assert_allclose(state["last_marginal_rate"], theirs_rates, **TOLERANCE, err_msg=f"step {step}")
    if game.tax_model == "saez":
        compare_saez(tax, samples(state), state, step)
    orders = [[[] for _ in range(2)] for _ in agents]
    for c, name in enumerate(("Stone", "Wood")):
        for bid in market.bids[name]:
            orders[bid["buyer"]][c].append([1, bid["bid"], bid["bid_lifetime"]])
        for ask in market.asks[name]:
            orders[ask["seller"]][c].append([2, ask["ask"], ask["ask_lifetime"]])
    ours = [[sorted(order for order in own.tolist() if order[0]) for own in both] for both in state["orders"]]
    assert ours == [[sorted(own) for own in both] for both in orders], f"orders, step {step}"


def samples(state):
    """Incomes and marginal rates that Saez's formula is applied to, the oldest first."""
    ring, count = state["saez_buffer"], int(state["saez_count"])
    return ring[:count] if count < len(ring) else np.roll(ring, -(count % len(ring)), axis=0)


def compare_saez(tax, observed, state, step):
    theirs = np.array(tax._local_saez_buffer).reshape(-1, 2)
    np.testing.assert_allclose(observed[:, 0], theirs[:, 0], **TOLERANCE, err_msg=f"incomes, step {step}")
    beside = np.abs(observed[:, :1] - state["bracket_cutoffs"]).min(1) < 1e-3
    rates = np.where(beside, observed[:, 1], theirs[:, 1])
    np.testing.assert_allclose(observed[:, 1], rates, **TOLERANCE, err_msg=f"rates of incomes, step {step}")
    np.testing.assert_allclose(state["elasticity"], tax.elas_t, **TOLERANCE, err_msg=f"elasticity, step {step}")
    averages = tax.running_avg_tax_rates
    np.testing.assert_allclose(state["average_rates"], averages, **TOLERANCE, err_msg=f"average rates, step {step}")


def compare_outputs(env, obs, info, theirs_env, step):
    theirs = theirs_env._generate_observations(flatten_observations=True, flatten_masks=True)
    workers, view, sizes = env.game.num_workers, env.game.view, env.game.layout.action.head_sizes
    mask, acting = info["action_mask"][0].numpy(), info["acting"][0].tolist()
    coins = [agent.total_endowment("Coin") for agent in theirs_env.world.agents]
    incomes = np.array(coins) - theirs_env.get_component("PeriodicBracketTax").last_coin
    beside = np.abs(incomes[:, None] - env.state["bracket_cutoffs"].numpy()).min(1) < 1e-3
    for i in range(workers):
        own = theirs[str(i)]
        flat = np.delete(own["flat"], 1)  # the skill that payments are not of
        if beside[i]:  # rounding decides about the marginal rate
            flat[-8] = theirs["p"][f"p{i}"][0] = obs[i, len(flat) - 8]
        expected = np.concatenate([flat, own["world-map"].ravel(), own["world-idx_map"].ravel()])
        np.testing.assert_allclose(obs[i], expected, **TOLERANCE, err_msg=f"worker {i}, step {step}")
        np.testing.assert_array_equal(mask[i, : len(own["action_mask"])], own["action_mask"], f"step {step}")
        assert own["world-map"].shape[1:] == (view, view)
    flat = theirs["p"]["flat"]
    assert not flat[-3:].any()  # what the planner owns
    expected = np.concatenate([flat[:-3], *(theirs["p"][f"p{i}"] for i in range(workers))])
    np.testing.assert_allclose(obs[workers][: len(expected)], expected, **TOLERANCE, err_msg=f"planner, step {step}")
    heads = np.split(mask[workers], np.cumsum(sizes)[:-1])
    choices = np.concatenate([head[: env.game.num_rates + 1] for head in heads])
    nothing = np.tile(np.eye(1, env.game.num_rates + 1)[0], len(heads))
    expected = nothing if len(theirs["p"]["action_mask"]) == 1 else theirs["p"]["action_mask"]
    assert acting == [True] * workers + [step % env.game.period == 0]
    if not acting[workers]:  # ours ignores what the planner does, theirs allows it to do nothing
        choices = nothing
    np.testing.assert_array_equal(choices, expected, f"the planner's mask, step {step}")


def likely(random, mask, game):
    """An allowed action of each agent: workers build and gather more often than uniform choice lets them."""
    orders = 4 * game.num_prices
    weights = np.array([0.1, 20.0] + [1 / game.num_prices] * orders + [1.5] * 4)
    own = [weights * mask[i, : len(weights)] for i in range(game.num_workers)]
    workers = [random.choice(len(weights), p=weight / weight.sum()) for weight in own]
    heads = np.split(mask[game.num_workers], np.cumsum(game.layout.action.head_sizes)[:-1])
    return workers, [random.choice(np.flatnonzero(head)) for head in heads]


def give(theirs, state):
    """Our rounding of the same step to them, which decides where coin is just enough."""
    tax = theirs.get_component("PeriodicBracketTax")
    for i, agent in enumerate(theirs.world.agents):
        agent.state["inventory"]["Coin"] = float(state["coin"][i])
        tax.last_coin[i] = float(state["last_coin"][i])
        tax.last_marginal_rate[i] = float(state["last_marginal_rate"][i])
    if "saez_buffer" in state:
        tax._local_saez_buffer = samples(state).astype(float).tolist()
        tax.curr_bracket_tax_rates = state["rates"].astype(float)
        tax.running_avg_tax_rates, tax.elas_t = state["average_rates"].astype(float), float(state["elasticity"])


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_ai_economist(name, random_seed, monkeypatch):
    file, config = CASES[name]
    env = gpu_vecenv.make("economy", 1, "cpu", autoreset_mode="disabled", grid=grid_of(file), **config)
    game, random = env.game, np.random.default_rng(random_seed)
    monkeypatch.setattr(np, "int", int, raising=False)  # which ai-economist uses and NumPy has no longer
    theirs = reference(game, file)
    obs, info = env.reset(seed=2**40 + random_seed)
    shared = {field.name for field in game.state if field.shared}
    arrays = {field: tensor.numpy() for field, tensor in env.state.items()}  # live
    state = {field: array if field in shared else array[0, ...] for field, array in arrays.items()}
    for episode in range(1 + (game.tax_model == "saez")):  # whose taxes depend on the episodes before
        if episode:
            obs, info = env.reset()
        begin(theirs, state)
        compare_outputs(env, obs[0].numpy(), info, theirs, 0)
        compare_state(theirs, game, state, 0)
        traded = play(env, theirs, state, info, random, monkeypatch)
        assert traded > 1 and state["tile"][state["terrain"] == 0].any() and state["last_income"].any()


def play(env, theirs, state, info, random, monkeypatch):
    """Compares an episode, and returns in how many steps somebody has traded."""
    game, workers, traded = env.game, env.game.num_workers, 0
    for step in range(1, game.max_steps + 1):
        acts = info["acting"][0, workers].item()
        own, choices = likely(random, info["action_mask"][0].numpy(), game)
        actions = np.zeros((1, workers + 1, game.num_brackets), np.int32)
        actions[0, :workers, 0], actions[0, workers] = own, choices
        trades = state["price_history"].sum()
        obs, rewards, _, truncations, info = env.step(torch.tensor(actions))
        order, uniform = order_of(step_below(env, 0, step), workers), step_uniform(env, 0, step)
        regrowth = np.ones((game.height, game.width))
        for k, (row, column) in enumerate(state["source"]):
            regrowth[row, column] = uniform(workers + k)
        monkeypatch.setattr(np.random, "permutation", lambda n, order=order: order)
        monkeypatch.setattr(np.random, "rand", lambda *shape, regrowth=regrowth: regrowth)
        rates = [step_uniform(env, 0, step, 1)(b) for b in range(game.num_brackets)]
        monkeypatch.setattr(
            np.random, "uniform", lambda low, high, size, rates=rates: low + (high - low) * np.array(rates)
        )
        monkeypatch.setattr(move, "rand", lambda uniform=uniform: Gathered(uniform))
        given = {str(i): action for i, action in enumerate(own)}
        if game.tax_model == "planner":
            given["p"] = choices if acts else [0] * len(choices)
        _, theirs_rewards, done, _ = theirs.step(given)
        compare_state(theirs, game, state, step)
        give(theirs, state)
        compare_outputs(env, obs[0].numpy(), info, theirs, step)
        expected = [theirs_rewards[key] for key in (*map(str, range(workers)), "p")]
        np.testing.assert_allclose(rewards[0].numpy(), expected, **TOLERANCE, err_msg=f"rewards, step {step}")
        assert truncations[0].tolist() == [done["__all__"]] * (workers + 1)
        traded += state["price_history"].sum() > trades
    return traded


def settings(theirs):
    """Of the scenario and of each component all plain values, the map among them, and how resources grow."""
    plain, parts = (bool, int, float, str, type(None)), (theirs, *theirs.components)
    own = {part.name: {key: value for key, value in vars(part).items() if isinstance(value, plain)} for part in parts}
    return own, theirs.layout_specs


def test_the_benchmark_plays_what_is_compared_with_the_defaults():
    (workload,) = peer.WORKLOADS
    game, quadrant = (configure("economy", **config) for config in (workload.config, {"grid": grid_of(QUADRANT)}))
    np.testing.assert_array_equal(game.land.terrain, quadrant.land.terrain)
    assert settings(peer.environment()) == settings(reference(game, QUADRANT))


def test_the_benchmark_draws_allowed_actions_and_resets(monkeypatch):
    scenario = foundation.scenarios.get("layout_from_file/simple_wood_and_stone")
    calls = {"step": 0, "reset": 0}

    def checked_step(self, actions, step=scenario.step):
        calls["step"] += 1
        assert self.world.timestep < 5 and list(actions) == [*"0123", "p"]
        for agent, mask in self._generate_masks(flatten_masks=True).items():
            rows = np.reshape(mask, (np.size(actions[agent]), -1))
            assert rows[np.arange(len(rows)), actions[agent]].all()
        return step(self, actions)

    def counted_reset(self, reset=scenario.reset):
        calls["reset"] += 1
        return reset(self)

    monkeypatch.setattr(scenario, "step", checked_step)
    monkeypatch.setattr(scenario, "reset", counted_reset)
    monkeypatch.setitem(peer.OPTIONS, "episode_length", 5)
    prepared = peer.prepare(Request(Workload("simulation", "economy", 2, 12), "cpu", "float32"))
    prepared.run()
    assert calls == {"step": 24, "reset": 6} and prepared.num_agents == 5
