"""Oracle of economy for one environment, written from the rules of the AI Economist alone.

The map is a list of strings, houses a dictionary, cell -> owner; orders are tuples in two books. Every operation on
coin is rounded to float32. What is random is the caller's: the order in which workers move, ``uniform(i)`` below worker
i's skill for two units at once, and ``uniform(workers + k)`` below the probability of growth for source k; a rate of
each bracket between 0 and 1, for Saez's taxes. ``exp`` and ``log`` too are the caller's, of float32.
"""

import textwrap

import numpy as np

from oracles.saez import bracket_rates, smoothed_elasticity

F = np.float32
RATES = {"free_market": [0] * 7, "us_federal": [0.1, 0.12, 0.22, 0.24, 0.32, 0.35, 0.37]}
CUTOFFS = [0, 9700, 39475, 84200, 160725, 204100, 510300]
MOVES = [(0, -1), (0, 1), (-1, 0), (1, 0)]


class GatherTradeBuildOracle:
    """Workers gather, trade and build; ``game`` has the configuration, and only that; ``grid`` is the map."""

    def __init__(self, game, grid, exp, log):
        self.game, self.exp, self.log = game, exp, log
        self.rows = textwrap.dedent(grid).strip().split("\n")
        self.sources = {
            (y, x): "SW".index(tile) for y, row in enumerate(self.rows) for x, tile in enumerate(row) if tile in "SW"
        }
        self.workers = range(game.num_workers)
        self.cutoffs = [F(cutoff / game.usd_scaling) for cutoff in CUTOFFS]
        self.elapsed_steps = 0
        self.books = [[], []]  # of stone, of wood: (side, worker, price, steps), side "bid" or "ask"
        self.units, self.houses = {*self.sources}, {}
        self.price_history = np.zeros((2, game.max_bid_ask + 1), F)
        fixed = RATES.get(game.tax_model, [0] * 7)
        self.rates = [min(F(rate), F(game.tax_limit)) for rate in fixed]
        self.inventory = [[0, 0] for _ in self.workers]
        self.coin = [F(game.starting_agent_coin) for _ in self.workers]
        self.last_coin = self.coin.copy()
        self.labor = [F(0) for _ in self.workers]
        self.last_income, self.last_marginal_rate = [F(0) for _ in self.workers], [F(0) for _ in self.workers]
        self.observed, self.elasticity, self.average_rates = [], F(0.5), [F(0)] * 7

    def begin(self, loc, build_payment, bonus_gather_prob):
        """The start of an episode, as drawn."""
        self.loc = [tuple(cell) for cell in loc.tolist()]
        self.build_payment, self.bonus_gather_prob = [*build_payment], [*bonus_gather_prob]
        self.worth = self.appraised()

    # ------------------------------------------------------------------ what is where, who has what

    def enters(self, i, cell):
        y, x = cell
        if not (0 <= y < len(self.rows) and 0 <= x < len(self.rows[0])) or self.rows[y][x] == "@":
            return False
        return self.houses.get(cell, i) == i and cell not in self.loc

    def builds(self, i):
        y, x = self.loc[i]
        return min(self.inventory[i]) > 0 and self.rows[y][x] == "." and self.loc[i] not in self.houses

    def open_orders(self, i, c):
        return [order for order in self.books[c] if order[1] == i]

    def may_order(self, i, c, side, price):
        affordable = self.coin[i] >= price if side == "bid" else self.inventory[i][c] > 0
        return affordable and len(self.open_orders(i, c)) < self.game.max_num_orders

    def endowment(self, i):
        escrow = sum(order[2] for c in range(2) for order in self.open_orders(i, c) if order[0] == "bid")
        return self.coin[i] + F(escrow)

    def marginal_rate(self, income):
        reached = [rate for rate, cutoff in zip(self.rates, self.cutoffs, strict=True) if income >= cutoff]
        return reached[-1] if reached else F(0)

    def appraised(self):
        """Utilities of the workers and the social welfare."""
        game, wealth = self.game, [self.endowment(i) for i in self.workers]
        eta = F(game.isoelastic_eta)
        utilities = []
        for coin, labor in zip(wealth, self.labor, strict=True):
            if eta == 1:
                utility = self.log(max(coin, F(1)))
            else:
                utility = (self.exp((F(1) - eta) * self.log(coin)) - F(1)) / (F(1) - eta)
            utilities.append(utility - F(game.energy_cost) * labor)
        total, differences = F(0), F(0)
        for one in wealth:
            total += one
            for other in wealth:
                differences += abs(one - other)
        n = F(len(wealth))
        gini = differences / (F(2) * n * total + F(1e-10)) / ((n - F(1)) / n)
        self.productivity, self.equality = total, F(1) - gini
        mixed = F(game.mixing_weight_gini_vs_coin)
        if game.planner_reward_type == "coin_eq_times_productivity":
            welfare = ((F(1) - mixed) * self.equality + mixed) * (total / n)
        else:
            valued = utilities if game.planner_reward_type == "inv_income_weighted_utility" else wealth
            above, below = F(0), F(0)
            for coin, value in zip(wealth, valued, strict=True):
                weight = F(1) / max(coin, F(1))
                above, below = above + weight * value, below + weight
            welfare = above / below
        return [*utilities, welfare]

    # ------------------------------------------------------------------ a step

    def step(self, choices, planned, order, uniform, random_rates):
        """Workers' actions, the planner's seven, and what is random; the rewards of all."""
        game, prices = self.game, self.game.max_bid_ask + 1
        self.elapsed_steps += 1
        if game.tax_model == "planner" and self.elapsed_steps % game.period == 1 % game.period:
            levels = F(game.num_rates - 1)
            self.rates = [F(k - 1) / levels if k else old for k, old in zip(planned, self.rates, strict=True)]
        if game.tax_model == "saez" and self.elapsed_steps % game.period == 1 % game.period:
            self.optimise(random_rates)
        self.price_history *= F(0.995)
        for i, choice in enumerate(choices):
            if choice == 1 and self.builds(i):
                self.inventory[i] = [units - 1 for units in self.inventory[i]]
                self.houses[self.loc[i]] = i
                self.coin[i] += self.build_payment[i]
                self.labor[i] += F(game.build_labor)
            elif 2 <= choice < 2 + 4 * prices:
                kind, price = divmod(choice - 2, prices)
                self.order(i, kind // 2, ("bid", "ask")[kind % 2], price)
        for c in range(2):
            self.trade(c)
        for c in range(2):
            self.expire(c)
        for i in order:
            self.move(i, choices[i] - 2 - 4 * prices, uniform)
        if self.elapsed_steps % game.period == 0:
            self.tax()
        for k, cell in enumerate(sorted(self.sources)):
            if F(uniform(game.num_workers + k)) < F(game.resource_regen_prob):
                self.units.add(cell)
        before, self.worth = self.worth, self.appraised()
        return np.array([now - then for now, then in zip(self.worth, before, strict=True)], F)

    def order(self, i, c, side, price):
        if not self.may_order(i, c, side, price):
            return
        if side == "bid":
            self.coin[i] -= F(price)
        else:
            self.inventory[i][c] -= 1
        self.books[c].append((side, i, price, 0))
        self.labor[i] += F(self.game.order_labor)

    def trade(self, c):
        bids = sorted((o for o in self.books[c] if o[0] == "bid"), key=lambda o: (-o[2], -o[3], o[1]))
        for bid in bids:
            asks = [o for o in self.books[c] if o[0] == "ask" and o[1] != bid[1]]
            ask = min(asks, key=lambda o: (o[2], -o[3], o[1]), default=None)
            if ask is None or ask[2] > bid[2]:
                continue
            price = ask[2] if ask[3] >= bid[3] else bid[2]
            self.books[c].remove(bid)
            self.books[c].remove(ask)
            self.inventory[bid[1]][c] += 1
            self.coin[ask[1]] += F(price)
            self.coin[bid[1]] += F(bid[2] - price)
            self.price_history[c, price] += F(1)

    def expire(self, c):
        older = [(side, i, price, steps + 1) for side, i, price, steps in self.books[c]]
        self.books[c] = [order for order in older if order[3] <= self.game.order_duration]
        for side, i, price, steps in older:
            if steps > self.game.order_duration and side == "bid":
                self.coin[i] += F(price)
            elif steps > self.game.order_duration:
                self.inventory[i][c] += 1

    def move(self, i, way, uniform):
        game, (y, x) = self.game, self.loc[i]
        if way >= 0 and self.enters(i, target := (y + MOVES[way][0], x + MOVES[way][1])):
            self.loc[i] = target
            self.labor[i] += F(game.move_labor)
        if self.loc[i] in self.units:
            self.units.remove(self.loc[i])
            both = F(uniform(i)) < self.bonus_gather_prob[i]
            self.inventory[i][self.sources[self.loc[i]]] += 2 if both else 1
            self.labor[i] += F(game.collect_labor)

    def tax(self):
        edges, revenue = [*self.cutoffs, F(np.inf)], F(0)
        for i in self.workers:
            income, due = self.endowment(i) - self.last_coin[i], F(0)
            for rate, low, high in zip(self.rates, edges[:-1], edges[1:], strict=True):
                due += rate * min(max(income - low, F(0)), high - low)
            due = min(due, self.coin[i])
            self.coin[i] -= due
            revenue += due
            self.last_income[i], self.last_marginal_rate[i] = income, self.marginal_rate(income)
        for i in self.workers:
            self.coin[i] += revenue / F(len(self.workers))
            self.last_coin[i] = self.endowment(i)

        self.observed += zip(self.last_income, self.last_marginal_rate, strict=True)
        self.observed = self.observed[-self.game.saez_buffer_size :]

    def optimise(self, random_rates):
        """Rates of a new period by Saez's formula."""
        limit = F(self.game.tax_limit)
        if len(self.observed) < self.game.saez_buffer_size:
            self.rates = [limit * F(rate) for rate in random_rates]
            return
        incomes, rates = np.array(self.observed, F).T
        self.elasticity = smoothed_elasticity(incomes, rates, self.elasticity, self.log)
        fixed = self.game.saez_fixed_elas
        found = bracket_rates(incomes, self.cutoffs, self.elasticity if fixed is None else F(fixed))
        self.rates = [min(max(F(rate), F(0)), limit) for rate in found]
        self.average_rates = [
            F(0.99) * mean + F(0.01) * rate for mean, rate in zip(self.average_rates, self.rates, strict=True)
        ]

    # ------------------------------------------------------------------ what agents see

    def histogram(self, c, side, of):
        counts = np.zeros(self.game.max_bid_ask + 1, F)
        for order in self.books[c]:
            counts[order[2]] += order[0] == side and order[1] in of
        return counts

    def market_rate(self, c):
        trades, paid = F(0), F(0)
        for price, count in enumerate(self.price_history[c]):
            trades, paid = trades + count, paid + F(price) * count
        return [paid / max(trades, F(0.001))]

    def common(self):
        """Of the tax period: where it is, the incomes of the latest."""
        day = self.elapsed_steps % self.game.period + 1
        begins = [*self.rates, day == 1, day == self.game.period]
        begins += sorted(income / F(self.game.period) for income in self.last_income)
        return begins, [F(day) / F(self.game.period), F(self.elapsed_steps) / F(self.game.max_steps)]

    def owned(self, i):
        return [F(0.01) * F(number) for number in (self.coin[i], *self.inventory[i])]

    def present_rate(self, i):
        return self.marginal_rate(self.endowment(i) - self.last_coin[i])

    def observe(self):
        """(agents, observation of a worker): the planner's has zeros behind."""
        begins, ends = self.common()
        history = [F(0.01) * self.price_history[c] for c in range(2)]
        rows = []
        for i in self.workers:
            others, (y, x) = [*{*self.workers} - {i}], self.loc[i]
            parts = [[self.build_payment[i] / F(self.game.payment)]]
            parts += [self.histogram(c, side, others) for side in ("ask", "bid") for c in range(2)]
            parts += [self.market_rate(c) for c in range(2)]
            parts += [self.histogram(c, side, [i]) for side in ("ask", "bid") for c in range(2)]
            parts += [*history, [self.bonus_gather_prob[i]], begins, [self.present_rate(i)], ends, self.owned(i)]
            parts += [[F(x) / F(len(self.rows[0])), F(y) / F(len(self.rows))], self.around(i).ravel()]
            rows.append(np.concatenate(parts).astype(F))
        parts = [self.histogram(c, side, self.workers) for side in ("ask", "bid") for c in range(2)]
        parts += [self.market_rate(c) for c in range(2)] + [*history, begins, ends]
        for i in self.workers:
            last = [self.last_income[i] / F(self.game.period), self.last_marginal_rate[i]]
            parts += [[self.present_rate(i)], last, self.owned(i)]
        planner = np.concatenate(parts).astype(F)
        return np.stack([*rows, np.pad(planner, (0, len(rows[0]) - len(planner)))])

    def around(self, i):
        far = self.game.mobile_agent_observation_range
        seen = np.zeros((9, 2 * far + 1, 2 * far + 1), F)

        def number(worker):
            return 1 if worker == i else worker + 2

        for row in range(2 * far + 1):
            for column in range(2 * far + 1):
                y, x = cell = self.loc[i][0] + row - far, self.loc[i][1] + column - far
                if not (0 <= y < len(self.rows) and 0 <= x < len(self.rows[0])):
                    continue
                source = self.sources.get(cell)
                standing = number(self.loc.index(cell)) if cell in self.loc else 0
                owner = number(self.houses[cell]) if cell in self.houses else 0
                unit = cell in self.units
                water = self.rows[y][x] == "@"
                resources = [source == 0 and unit, source == 1 and unit]
                seen[:, row, column] = [*resources, owner > 0, water, source == 0, source == 1, 1, owner, standing]
        return seen

    def masks(self):
        """Of each worker's actions, and of one of the planner's seven choices."""
        prices = self.game.max_bid_ask + 1
        workers = []
        for i in self.workers:
            own = [True, self.builds(i)]
            for c in range(2):
                own += [self.may_order(i, c, side, price) for side in ("bid", "ask") for price in range(prices)]
            own += [self.enters(i, (self.loc[i][0] + down, self.loc[i][1] + right)) for down, right in MOVES]
            workers.append(own)
        levels, sets = F(self.game.num_rates - 1), self.game.tax_model == "planner"
        allowed = [sets and F(k) / levels <= F(self.game.tax_limit) for k in range(self.game.num_rates)]
        return np.array(workers), np.array([True, *allowed])

    # ------------------------------------------------------------------ the state as the game has it

    def arrays(self):
        tile = np.zeros((len(self.rows), len(self.rows[0])), np.uint8)
        for cell in self.units:
            tile[cell] = 1
        for cell, owner in self.houses.items():
            tile[cell] = owner + 1
        names = ("loc", "inventory"), ("coin", "labor", "build_payment", "bonus_gather_prob", "price_history", "rates")
        names = (names[0], (*names[1], "last_coin", "last_income", "last_marginal_rate", "productivity", "equality"))
        found = {
            name: np.array(getattr(self, name), dtype)
            for of, dtype in zip(names, (np.int32, F), strict=True)
            for name in of
        }
        if self.game.tax_model == "saez":
            found |= {name: np.array(getattr(self, name), F) for name in ("elasticity", "average_rates")}
        return {**found, "tile": tile, "utility": np.array(self.worth, F)}

    def orders(self):
        """Worker -> resource -> (side, price, steps), sorted; side 1 bid, 2 ask."""
        sides = {"bid": 1, "ask": 2}
        return [
            [sorted([sides[side], price, steps] for side, _, price, steps in self.open_orders(i, c)) for c in range(2)]
            for i in self.workers
        ]
