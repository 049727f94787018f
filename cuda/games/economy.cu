// SPDX-License-Identifier: Apache-2.0
// Workers gather, trade and build; a planner taxes them. The rules are those of the AI Economist's gather-trade-build,
// ai-economist 1.7.1, written anew (https://github.com/salesforce/ai-economist, BSD-3-Clause License). Declared in
// gpu_vecenv/envs/economy.py.
#include "game_api.cuh"
#include "saez.cuh"

constexpr int WATER = 1, STONE_SOURCE = 2;  // terrain; source number STONE_SOURCE + c is of resource c
constexpr int BUILD = 1, FIRST_ORDER = 2;   // actions; those of orders: bids, asks for stone, then for wood
constexpr int FIRST_MOVE = FIRST_ORDER + 4 * NUM_PRICES;
constexpr int PARETO = 1, LOGNORMAL = 2;
constexpr int CELLS = HEIGHT * WIDTH, VIEWED = VIEW * VIEW;
TABLE int AHEAD[4][2] = {{0, -1}, {0, 1}, {-1, 0}, {1, 0}};  // row, column: left, right, up, down

struct Scratch {
    CheckedArray<int, NUM_WORKERS> order;  // a random one of the workers
    Wealth wealth;
    Book book;
};

HD void shuffle(Scratch& w, Io io, int draw) {
    for (int i = 0; i < NUM_WORKERS; ++i) w.order[i] = i;
    for (int i = NUM_WORKERS - 1; i > 0; --i) {
        int j = io.rng.below(i, draw, i + 1), other = w.order[j];
        w.order[j] = w.order[i];
        w.order[i] = other;
    }
}

HD bool is_occupied(State s, int row, int column) {
    for (int i = 0; i < NUM_WORKERS; ++i)
        if (s.loc[i][0] == row && s.loc[i][1] == column) return true;
    return false;
}

// Nobody enters water, other workers' houses or cells where somebody stands.
HD bool can_enter(State s, int i, int row, int column) {
    if (row < 0 || row >= HEIGHT || column < 0 || column >= WIDTH || s.terrain[row][column] == WATER) return false;
    bool is_house = s.terrain[row][column] < STONE_SOURCE && s.tile[row][column] != 0;
    return (!is_house || s.tile[row][column] == i + 1) && !is_occupied(s, row, column);
}

HD bool can_build(State s, int i) {
    int row = s.loc[i][0], column = s.loc[i][1];
    return s.inventory[i][0] > 0 && s.inventory[i][1] > 0 && s.terrain[row][column] == 0 && s.tile[row][column] == 0;
}

HD float skill(Io io, int i, int draw, int distribution, float shape, float mean, float deviation) {
    if (distribution == PARETO) return math::exp(-math::log(1.0f - io.rng.uniform(i, draw)) / shape) - 1.0f;
    return distribution == LOGNORMAL ? math::exp(mean + deviation * io.rng.normal(i, draw)) : 0.0f;
}

// Ranked workers stand in corners and are paid by rank, in a random order; others stand anywhere.
HD void place_workers(State s, Io io, Scratch& w) {
    shuffle(w, io, 0);
    for (int rank = 0; rank < NUM_WORKERS; ++rank) {
        int i = w.order[rank], skipped = io.rng.below(i, 1, NUM_LAND - rank), row = 0, column = -1;
        s.loc[i][0] = s.start[rank][0];
        s.loc[i][1] = s.start[rank][1];
        if (FIXED_FOUR_SKILL_AND_LOC) {
            s.build_payment[i] = PAYMENT * s.ranked_skill[rank];
            continue;
        }
        for (int cell = 0; cell < CELLS && column < 0; ++cell) {
            bool is_free = s.terrain[cell / WIDTH][cell % WIDTH] != WATER;
            for (int k = 0; k < rank; ++k) is_free &= s.loc[w.order[k]][0] * WIDTH + s.loc[w.order[k]][1] != cell;
            if (!is_free || skipped-- > 0) continue;
            row = cell / WIDTH;
            column = cell % WIDTH;
        }
        s.loc[i][0] = row;
        s.loc[i][1] = column;
    }
}

HD void reset(State s, Io io) {
    FOR_RANGE (cell, CELLS) s.tile[cell / WIDTH][cell % WIDTH] = s.terrain[cell / WIDTH][cell % WIDTH] >= STONE_SOURCE;
    FOR_RANGE (k, 2 * NUM_PRICES) s.price_history[k / NUM_PRICES][k % NUM_PRICES] = 0;
    FOR_RANGE (b, NUM_BRACKETS) s.rates[b] = PLANNER_TAXES ? 0.0f : math::min(s.schedule[b], TAX_LIMIT);
    FOR_RANGE (i, NUM_WORKERS) {
        float most = PAYMENT_MAX_SKILL_MULTIPLIER, sampled = skill(io, i, 2, BUILD_DISTRIBUTION, 4, -1, 0.5f);
        s.build_payment[i] = math::min(most, (most - 1.0f) * sampled + 1.0f) * PAYMENT;
        s.bonus_gather_prob[i] = math::min(2.0f, skill(io, i, 3, GATHER_DISTRIBUTION, 3, -2.022f, 0.938f)) / 2.0f;
        s.coin[i] = s.last_coin[i] = STARTING_AGENT_COIN;
        s.labor[i] = s.last_income[i] = s.last_marginal_rate[i] = 0;
        for (int c = 0; c < 2; ++c) {
            s.inventory[i][c] = 0;
            for (int k = 0; k < 3 * MAX_NUM_ORDERS; ++k) s.orders[i][c][k / 3][k % 3] = 0;
        }
    }
    group_sync();
    ONCE {
        place_workers(s, io, *io.scratch);
        if constexpr (SAEZ_TAXES) saez::begin(s, io);
    }
    group_sync();
    appraise(s, io.scratch->wealth);
}

HD void build(State s, int i) {
    for (int c = 0; c < 2; ++c) --s.inventory[i][c];
    s.tile[s.loc[i][0]][s.loc[i][1]] = (u8)(i + 1);
    s.coin[i] += s.build_payment[i];
    s.labor[i] += BUILD_LABOR;
}

HD void move_and_gather(State s, Io io, int i) {
    int way = io.action(i) - FIRST_MOVE, *row = &s.loc[i][0], *column = &s.loc[i][1];
    if (way >= 0 && can_enter(s, i, *row + AHEAD[way][0], *column + AHEAD[way][1])) {
        *row += AHEAD[way][0];
        *column += AHEAD[way][1];
        s.labor[i] += MOVE_LABOR;
    }
    int c = s.terrain[*row][*column] - STONE_SOURCE;
    if (c < 0 || s.tile[*row][*column] == 0) return;
    s.inventory[i][c] += 1 + (io.rng.uniform(i, 0) < s.bonus_gather_prob[i]);
    s.tile[*row][*column] = 0;
    s.labor[i] += COLLECT_LABOR;
}

HD void step(State s, Io io) {
    Scratch& w = *io.scratch;
    bool first_day = (io.elapsed_steps - 1) % PERIOD == 0, last_day = io.elapsed_steps % PERIOD == 0;
    FOR_RANGE (b, NUM_BRACKETS) {
        int choice = PLANNER_TAXES && first_day ? io.action(FIRST_PLANNER, b) : 0;
        if (choice > 0) s.rates[b] = (float)(choice - 1) / (NUM_RATES - 1);
    }
    FOR_RANGE (k, 2 * NUM_PRICES) s.price_history[k / NUM_PRICES][k % NUM_PRICES] *= 0.995f;
    FOR_RANGE (i, NUM_WORKERS) {
        int action = io.action(i), order = action - FIRST_ORDER;
        if (action == BUILD && can_build(s, i)) build(s, i);
        if (order < 0 || action >= FIRST_MOVE) continue;
        place_order(s, i, order / (2 * NUM_PRICES), order / NUM_PRICES % 2 == 0 ? BID : ASK, order % NUM_PRICES);
    }
    group_sync();
    ONCE {
        if constexpr (SAEZ_TAXES)
            if (first_day) saez::set_rates(s, io);
        for (int c = 0; c < 2; ++c) match_orders(s, c);
        for (int i = 0; i < NUM_WORKERS; ++i) age_orders(s, i);
        shuffle(w, io, 0);
        for (int k = 0; k < NUM_WORKERS; ++k) move_and_gather(s, io, w.order[k]);
        if (last_day) enact_taxes(s);
        if constexpr (SAEZ_TAXES)
            if (last_day) saez::record_incomes(s);
    }
    group_sync();
    FOR_RANGE (k, NUM_SOURCES) {
        bool grows = io.rng.uniform(NUM_WORKERS + k, 0) < RESOURCE_REGEN_PROB;
        if (grows) s.tile[s.source[k][0]][s.source[k][1]] = 1;
    }
    FOR_AGENTS (i) {
        io.rewards[i] = s.utility[i];
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
    }
    group_sync();
    appraise(s, w.wealth);
    FOR_AGENTS (i) io.rewards[i] = s.utility[i] - io.rewards[i];
}

HD float* put_inventory(float* row, State s, int i) {
    *row++ = 0.01f * s.coin[i];
    for (int c = 0; c < 2; ++c) *row++ = 0.01f * (float)s.inventory[i][c];
    return row;
}

HD void observe_worker(State s, Io io, int i) {
    int row = s.loc[i][0], column = s.loc[i][1];
    float* obs = &io.obs[i][0];
    *obs++ = s.build_payment[i] / PAYMENT;
    obs = put_market(obs, s, io.scratch->book, i);
    *obs++ = s.bonus_gather_prob[i];
    obs = put_inventory(put_taxes(obs, s, io, i), s, i);
    *obs++ = (float)column / WIDTH;
    *obs++ = (float)row / HEIGHT;
    bool* allowed = &io.action_mask[i][0];
    allowed[0] = true;
    allowed[BUILD] = can_build(s, i);
    for (int k = 0; k < 4 * NUM_PRICES; ++k) {
        int c = k / (2 * NUM_PRICES);
        bool can_pay = k / NUM_PRICES % 2 == 0 ? (float)(k % NUM_PRICES) <= s.coin[i] : s.inventory[i][c] > 0;
        allowed[FIRST_ORDER + k] = can_pay && has_free_order(s, i, c);
    }
    for (int way = 0; way < 4; ++way)
        allowed[FIRST_MOVE + way] = can_enter(s, i, row + AHEAD[way][0], column + AHEAD[way][1]);
}

HD void observe_planner(State s, Io io) {
    float* obs = put_taxes(put_market(&io.obs[FIRST_PLANNER][0], s, io.scratch->book, NUM_WORKERS), s, io, NUM_WORKERS);
    for (int i = 0; i < NUM_WORKERS; ++i) {
        *obs++ = marginal_rate(s, endowment(s, i) - s.last_coin[i]);
        *obs++ = s.last_income[i] / PERIOD;
        *obs++ = s.last_marginal_rate[i];
        obs = put_inventory(obs, s, i);
    }
    io.acting[FIRST_PLANNER] = io.elapsed_steps % PERIOD == 0;
    for (int b = 0; b < NUM_BRACKETS; ++b)
        for (int k = 0; k <= NUM_RATES; ++k)
            io.action_mask[FIRST_PLANNER][logit_offset(b) + k] =
                k == 0 || (PLANNER_TAXES && (float)(k - 1) / (NUM_RATES - 1) <= TAX_LIMIT);
}

// What a cell in worker i's view shows: channel after channel.
HD void observe_cell(State s, Io io, int i, int k) {
    int row = s.loc[i][0] + k / VIEW - VIEW / 2, column = s.loc[i][1] + k % VIEW - VIEW / 2, standing = 0;
    bool inside = row >= 0 && row < HEIGHT && column >= 0 && column < WIDTH;
    int terrain = inside ? s.terrain[row][column] : 0, tile = inside ? s.tile[row][column] : 0;
    int house = terrain < STONE_SOURCE ? tile : 0;
    for (int j = 0; j < NUM_WORKERS; ++j)
        if (s.loc[j][0] == row && s.loc[j][1] == column) standing = j + 1;
    float* obs = &io.obs[i][OBS_SIZE_WORKER - 9 * VIEWED + k];
    for (int c = 0; c < 2; ++c) {
        obs[c * VIEWED] = terrain == STONE_SOURCE + c && tile != 0;
        obs[(4 + c) * VIEWED] = terrain == STONE_SOURCE + c;
        int owner = c == 0 ? house : standing;
        obs[(7 + c) * VIEWED] = owner == 0 ? 0.0f : owner == i + 1 ? 1.0f : (float)(owner + 1);
    }
    obs[2 * VIEWED] = house != 0;
    obs[3 * VIEWED] = terrain == WATER;
    obs[6 * VIEWED] = inside;
}

HD void observe(State s, Io io) {
    sum_up_market(s, io.scratch->book);
    group_sync();
    FOR_AGENTS (i) {
        if (i < NUM_WORKERS)
            observe_worker(s, io, i);
        else
            observe_planner(s, io);
    }
    FOR_RANGE (k, NUM_WORKERS * VIEWED) observe_cell(s, io, k / VIEWED, k % VIEWED);
}
