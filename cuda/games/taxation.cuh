// SPDX-License-Identifier: Apache-2.0
// What workers own and earn, the taxes on it, and what both are worth. For games with the fields coin, last_coin,
// rates, utility and others of gpu_vecenv/envs/society.py.
#pragma once
#include "double_auction.cuh"

typedef CheckedArray<float, NUM_WORKERS> Wealth;  // coin, that in escrow included

HD float endowment(State s, int i) { return s.coin[i] + (float)escrow(s, i); }

HD float marginal_rate(State s, float income) {
    float rate = 0;
    for (int b = 0; b < NUM_BRACKETS; ++b)
        if (income >= s.bracket_cutoffs[b]) rate = s.rates[b];
    return rate;
}

// Takes taxes on the period's incomes and gives all workers the same share of them.
HD void enact_taxes(State s) {
    float revenue = 0;
    for (int i = 0; i < NUM_WORKERS; ++i) {
        float income = endowment(s, i) - s.last_coin[i], due = 0;
        for (int b = 0; b < NUM_BRACKETS; ++b) {
            float within = math::max(0.0f, income - s.bracket_cutoffs[b]);
            if (b + 1 < NUM_BRACKETS) within = math::min(within, s.bracket_cutoffs[b + 1] - s.bracket_cutoffs[b]);
            due += s.rates[b] * within;
        }
        due = math::min(due, s.coin[i]);
        s.coin[i] -= due;
        revenue += due;
        s.last_income[i] = income;
        s.last_marginal_rate[i] = marginal_rate(s, income);
    }
    for (int i = 0; i < NUM_WORKERS; ++i) {
        s.coin[i] += revenue / NUM_WORKERS;
        s.last_coin[i] = endowment(s, i);
    }
}

HD float utility_of_coin(float coin) {
    if (ISOELASTIC_ETA == 1.0f) return math::log(math::max(coin, 1.0f));
    float exponent = 1.0f - ISOELASTIC_ETA;
    return (math::exp(exponent * math::log(coin)) - 1.0f) / exponent;
}

// What the state is worth: to a worker its utility, to the planner the social welfare.
HD void appraise(State s, Wealth& wealth) {
    FOR_RANGE (i, NUM_WORKERS) {
        wealth[i] = endowment(s, i);
        s.utility[i] = utility_of_coin(wealth[i]) - ENERGY_COST * s.labor[i];
    }
    group_sync();
    ONCE {
        float total = 0, differences = 0, weights = 0, weighted = 0;
        for (int i = 0; i < NUM_WORKERS; ++i) {
            total += wealth[i];
            for (int j = 0; j < NUM_WORKERS; ++j) differences += math::abs(wealth[i] - wealth[j]);
            float weight = 1.0f / math::max(wealth[i], 1.0f);
            weights += weight;
            weighted += weight * (WELFARE_OF_UTILITY ? s.utility[i] : wealth[i]);
        }
        float gini = differences / (2.0f * NUM_WORKERS * total + 1e-10f) / ((NUM_WORKERS - 1.0f) / NUM_WORKERS);
        s.productivity[0] = total;
        s.equality[0] = 1.0f - gini;
        float equality = (1.0f - MIXING_WEIGHT_GINI_VS_COIN) * s.equality[0] + MIXING_WEIGHT_GINI_VS_COIN;
        s.utility[FIRST_PLANNER] = WELFARE_OF_EQUALITY ? equality * (total / NUM_WORKERS) : weighted / weights;
    }
    group_sync();
}

HD float* put_taxes(float* row, State s, Io io, int i) {
    int day = io.elapsed_steps % PERIOD + 1;
    for (int b = 0; b < NUM_BRACKETS; ++b) *row++ = s.rates[b];
    *row++ = day == 1;
    *row++ = day == PERIOD;
    for (int j = 0; j < NUM_WORKERS; ++j) {  // in ascending order
        int rank = 0;
        for (int k = 0; k < NUM_WORKERS; ++k)
            rank += s.last_income[k] < s.last_income[j] || (s.last_income[k] == s.last_income[j] && k < j);
        row[rank] = s.last_income[j] / PERIOD;
    }
    row += NUM_WORKERS;
    if (i < NUM_WORKERS) *row++ = marginal_rate(s, endowment(s, i) - s.last_coin[i]);
    *row++ = (float)day / PERIOD;
    *row++ = (float)io.elapsed_steps / MAX_STEPS;
    return row;
}
