// SPDX-License-Identifier: Apache-2.0
// Taxes by Saez's formula ("Using elasticities to derive optimal income tax rates", 2001), as the AI Economist adapts
// it to brackets: from incomes and marginal rates of past tax days, in this and earlier episodes of an environment. The
// fields that it needs exist with tax_model="saez" only; functions are templates so that the others compile without.
#pragma once
#include "taxation.cuh"

namespace saez {

constexpr int BINS = 100;        // of equal width, from 0 to where the last bracket begins; then one for all beyond
constexpr int MIN_SAMPLES = 10;  // of a regression
constexpr double SMALL = 1e-9;   // keeps divisors away from 0

// In double: rates depend on differences of sums that are almost equal.
HD double least(double a, double b) { return a < b ? a : b; }
HD double greatest(double a, double b) { return a > b ? a : b; }
HD double welfare_weight(double income) { return UNIFORM_WEIGHTS ? 1.0 : 1.0 / greatest(1.0, income); }

// The samples are a ring. The count of a full one is between its size and twice that; the remainder is the next place.
template <class S>
HD int num_samples(S s) {
    return math::min(s.saez_count[0], SAEZ_BUFFER_SIZE);
}

// After a seeded reset there are no samples; the episodes that follow keep what has been observed.
template <class S>
HD void begin(S s, Io io) {
    bool is_new = io.rng.episode == 0 || !math::is_finite(s.elasticity[0]);
    for (int b = 0; b < NUM_BRACKETS; ++b) is_new |= !math::is_finite(s.average_rates[b]);
    for (int k = 0; k < 2 * SAEZ_BUFFER_SIZE; ++k) is_new |= !math::is_finite(s.saez_buffer[k / 2][k % 2]);
    if (is_new) {
        for (int k = 0; k < 2 * SAEZ_BUFFER_SIZE; ++k) s.saez_buffer[k / 2][k % 2] = 0;
        for (int b = 0; b < NUM_BRACKETS; ++b) s.average_rates[b] = 0;
        s.saez_count[0] = 0;
        s.elasticity[0] = 0.5f;
    }
    for (int b = 0; b < NUM_BRACKETS; ++b) s.rates[b] = math::min(s.average_rates[b], TAX_LIMIT);
}

template <class S>
HD void record_incomes(S s) {
    for (int i = 0; i < NUM_WORKERS; ++i) {
        int k = s.saez_count[0] % SAEZ_BUFFER_SIZE;
        s.saez_buffer[k][0] = s.last_income[i];
        s.saez_buffer[k][1] = s.last_marginal_rate[i];
        if (++s.saez_count[0] == 2 * SAEZ_BUFFER_SIZE) s.saez_count[0] = SAEZ_BUFFER_SIZE;
    }
}

// Elasticity of income: the slope of log(income) over log(1 - rate), by least squares, smoothed over tax periods.
template <class S>
HD void estimate_elasticity(S s) {
    double n = 0, rates = 0, squared_rates = 0, x_sum = 0, y_sum = 0, xx_sum = 0, xy_sum = 0;
    for (int k = 0; k < num_samples(s); ++k) {
        float income = s.saez_buffer[k][0], rate = s.saez_buffer[k][1];
        if (income <= 0.0f || rate >= 1.0f) continue;
        double x = math::log(1.0f - rate), y = math::log(math::max(income, 1e-9f));
        n += 1;
        rates += rate;
        squared_rates += (double)rate * rate;
        x_sum += x;
        y_sum += y;
        xx_sum += x * x;
        xy_sum += x * y;
    }
    if (n < MIN_SAMPLES || squared_rates / n - rates / n * (rates / n) < 1e-12) return;
    double slope = (n * xy_sum - x_sum * y_sum) / (n * xx_sum - x_sum * x_sum);
    s.elasticity[0] = (float)(0.02 * (slope < 0 ? 0 : slope) + 0.98 * s.elasticity[0]);
}

struct Bins {
    CheckedArray<int, BINS + 1> count;
    CheckedArray<double, BINS + 1> rate;  // at first the mean welfare weight of all incomes from the bin's on
    int below;                            // negative incomes
    double weight_beyond, income_beyond;  // sums over incomes in the last bin
};

HD int bin_of(double income, double width) {
    int k = math::clamp(math::to_int((float)(income / width)), 0, BINS - 1);  // perhaps of a neighbour, by rounding
    while (k > 0 && income < k * width) --k;
    while (k < BINS - 1 && income >= (k + 1) * width) ++k;
    return k;
}

template <class S>
HD void count_incomes(S s, Bins& bins, double width, double top) {
    bins.below = 0;
    bins.weight_beyond = bins.income_beyond = 0;
    for (int k = 0; k <= BINS; ++k) bins.count[k] = 0;
    for (int k = 0; k < num_samples(s); ++k) {
        double income = s.saez_buffer[k][0];
        if (income < 0) {
            ++bins.below;
        } else if (income > top) {
            ++bins.count[BINS];
            bins.weight_beyond += welfare_weight(income);
            bins.income_beyond += income;
        } else {
            ++bins.count[bin_of(income, width)];
        }
    }
}

// From the highest bin to the lowest; weights have a mean of 1 over all incomes.
HD void average_weights(Bins& bins, double width, double n) {
    double norm = 0, weights = 0, share = 0;
    for (int k = 0; k < BINS; ++k) norm += bins.count[k] * welfare_weight((k + 0.5) * width);
    norm = norm + bins.below * welfare_weight(0) + bins.weight_beyond + SMALL;
    for (int k = BINS; k >= 0; --k) {
        weights += (k == BINS ? bins.weight_beyond : bins.count[k] * welfare_weight((k + 0.5) * width)) / norm;
        share += bins.count[k] / n;
        bins.rate[k] = weights / (share + SMALL);
    }
}

// The optimal rate of each bin; those of bins without incomes lie on a line between those of their neighbours.
HD void rates_of_bins(Bins& bins, double width, double top, double n, double elasticity) {
    double up_to = bins.below / n, last = 0;
    int last_bin = -1;
    for (int k = 0; k <= BINS; ++k) {
        double share = bins.count[k] / n, weight = bins.rate[k], pareto = 0;
        up_to = k == 0 ? up_to + share : least(up_to + share, 1);
        if (k < BINS) {
            if (bins.count[k] == 0) continue;
            weight = 0.5 * (weight + bins.rate[k + 1]);
            double from = 1 - up_to + 0.5 * share;  // share of incomes from the bin's middle on
            pareto = (k + 0.5) * width * share / (from + SMALL) / width;
        } else if (bins.count[k] > 0) {
            double mean = bins.income_beyond / bins.count[k];
            pareto = mean / (mean - top + SMALL);
        }
        double rate = (1 - weight) / (1 - weight + pareto * elasticity + SMALL);
        for (int gap = last_bin + 1; gap < k; ++gap)
            bins.rate[gap] = last + (gap - last_bin) * ((rate - last) / (k - last_bin));
        bins.rate[k] = last = rate;
        last_bin = k;
    }
}

// What an income pays that is as high as the end of a bracket, if the rates of bins hold.
HD double due_at(const Bins& bins, double width, double income) {
    double due = 0;
    for (int k = 0; k < BINS; ++k) due += bins.rate[k] * least(width, greatest(0, income - k * width));
    return due < 0 ? 0 : due;
}

// Rates are random until the buffer is full.
template <class S>
HD void set_rates(S s, Io io) {
    if (s.saez_count[0] < SAEZ_BUFFER_SIZE) {
        for (int b = 0; b < NUM_BRACKETS; ++b) s.rates[b] = TAX_LIMIT * io.rng.uniform(b, 1);
        return;
    }
    estimate_elasticity(s);
    Bins bins;
    double top = s.bracket_cutoffs[NUM_BRACKETS - 1], width = top / BINS, due = 0;
    double elasticity = FIXED_ELASTICITY < 0.0f ? s.elasticity[0] : FIXED_ELASTICITY;
    count_incomes(s, bins, width, top);
    average_weights(bins, width, SAEZ_BUFFER_SIZE);
    rates_of_bins(bins, width, top, SAEZ_BUFFER_SIZE, elasticity);
    for (int b = 0; b < NUM_BRACKETS; ++b) {
        double rate = bins.rate[BINS];
        if (b + 1 < NUM_BRACKETS) {
            double low = s.bracket_cutoffs[b], high = s.bracket_cutoffs[b + 1], all = due_at(bins, width, high);
            rate = (all - due) / (high - low);
            due = all;
        }
        s.rates[b] = math::clamp((float)rate, 0.0f, TAX_LIMIT);
        s.average_rates[b] = 0.99f * s.average_rates[b] + 0.01f * s.rates[b];
    }
}

}  // namespace saez
