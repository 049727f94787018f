// SPDX-License-Identifier: Apache-2.0
// What a learner computes of each row of a rollout: advantage estimates, and the loss of PPO with its gradients. The
// formulas are those of `advantages` and `loss` in gpu_vecenv/ppo.py. Compiled after a game's declaration, with its
// constants.
#include "kernel.cuh"
#include "math.cuh"

// Generalised advantage estimates and returns, one agent of one replica after the other, from the last tick back.
KERNEL(advantages, const float* rewards, const float* values, const float* next_values, const bool* terminations,
       const bool* truncations, const bool* active, const float* gamma, const float* gae_lambda, float* estimates,
       float* returns, i64 ticks, i64 columns) {
    FOR_ITEMS (column, columns) {
        int agent = (int)(column % NUM_AGENTS);
        float discount = gamma[agent], decay = discount * gae_lambda[agent], trace = 0;
        for (i64 k = (ticks - 1) * columns + column; k >= 0; k -= columns) {
            float ahead = terminations[k] ? 0.0f : discount * next_values[k];
            float delta = active[k] ? rewards[k] + ahead - values[k] : 0.0f;
            bool goes_on = active[k] && !(terminations[k] || truncations[k]);
            trace = math::fma(goes_on ? decay : 0.0f, trace, delta);
            estimates[k] = trace;
            returns[k] = trace + values[k];
        }
    }
}

// Whether a row is active, its advantage and that squared, or zeros: their sums over a minibatch are its count, and
// mean and variance of its advantages. In doubles the difference of the mean square and the squared mean keeps what
// the advantages, as floats, can tell.
KERNEL(advantage_moments, const bool* active, const float* estimates, const i64* places, double* moments, i64 rows) {
    FOR_ITEMS (row, rows) {
        i64 place = places[row];
        double x = active[place] ? (double)estimates[place] : 0.0;
        moments[row] = active[place];
        moments[rows + row] = x;
        moments[2 * rows + row] = x * x;
    }
}

#if !BOX_ACTIONS
// One head of a row. A choice that its mask forbids has this logit, as in gpu_vecenv/policy.py, and no gradient.
constexpr float FORBIDDEN = -0x1.fffffep127f;

struct Head {
    float largest, log_total, entropy;
    bool exists;  // has a choice that is allowed
};

struct Distribution {
    float log_prob, entropy;  // sums over the heads
    Head heads[ACTION_HEADS];
};

HD bool allowed([[maybe_unused]] const bool* mask, [[maybe_unused]] int k) { return !ACTION_MASKS || mask[k]; }

HD float logit(const float* x, const bool* mask, int k) { return allowed(mask, k) ? x[k] : FORBIDDEN; }

HD Head head_of(const float* x, const bool* mask, int n) {
    bool exists = false;
    for (int k = 0; k < n; ++k) exists = exists || allowed(mask, k);
    if (!exists) return {0, 0, 0, false};
    float largest = logit(x, mask, 0), total = 0, moment = 0;
    for (int k = 1; k < n; ++k) largest = math::max(logit(x, mask, k), largest);
    for (int k = 0; k < n; ++k) {
        float below = logit(x, mask, k) - largest, weight = math::exp(below);
        total += weight;
        if (weight > 0) moment += weight * below;
    }
    float log_total = math::log(total);
    return {largest, log_total, log_total - moment / total, true};
}

// Of what was drawn under a row's parameters: logits of the agent's own heads and choices, one after the other. A mask
// has the widest role's. The draw -1 is that of logits which are NaN, and so is any of their log-probabilities.
HD Distribution distribution(const float* x, const Action* draws, const bool* mask, int agent, bool) {
    Distribution d;
    d.log_prob = d.entropy = 0;
    for (int head = 0; head < ACTION_HEADS; ++head) {
        int n = action_size(agent, head);
        const bool* own = mask + (ACTION_MASKS ? logit_offset(head) : 0);
        Head h = d.heads[head] = head_of(x, own, n);
        if (h.exists) d.log_prob += logit(x, own, math::max(draws[head], 0)) - h.largest - h.log_total;
        d.entropy += h.entropy;
        x += n;
    }
    return d;
}

// The parameters' gradients, given those of the log-probability and of the entropy.
HD void differentiate(const Distribution& d, const float* x, const Action* draws, const bool* mask, int agent,
                      float by_log_prob, float by_entropy, float* gradients) {
    for (int head = 0; head < ACTION_HEADS; ++head) {
        int n = action_size(agent, head), choice = math::max(draws[head], 0);
        const bool* own = mask + (ACTION_MASKS ? logit_offset(head) : 0);
        const Head& h = d.heads[head];
        for (int k = 0; k < n; ++k) {
            float log_p = logit(x, own, k) - h.largest - h.log_total, p = math::exp(log_p);
            // An excluded choice has log_p = -infinity; p = 0 times the bound is 0.
            float of_entropy = -p * (math::max(log_p, -1e30f) + h.entropy);
            float gradient = by_log_prob * ((k == choice ? 1.0f : 0.0f) - p) + by_entropy * of_entropy;
            gradients[k] = allowed(own, k) ? gradient : 0.0f;
        }
        x += n;
        gradients += n;
    }
}
#else
struct Distribution {
    float log_prob, entropy;  // sums over the heads
};

// Of what was drawn under a row's parameters: means, then log standard deviations.
HD Distribution distribution(const float* x, const Action* draws, const bool*, int, bool squash_by_tanh) {
    Distribution d = {0, 0};
    for (int head = 0; head < ACTION_HEADS; ++head) {
        float log_std = x[ACTION_HEADS + head], z = (draws[head] - x[head]) * math::exp(-log_std);
        float density = -0.5f * (z * z) - log_std - 0.9189385f;  // log(2 pi) / 2
        if (squash_by_tanh) {
            // Less log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), where nothing overflows or is lost.
            float a = math::abs(draws[head]);
            density += 2.0f * (a + math::log(1.0f + math::exp(-2.0f * a)) - 0.6931472f);
        }
        d.log_prob += density;
        d.entropy += log_std + 1.4189385f;  // log(2 pi e) / 2
    }
    return d;
}

// The parameters' gradients, given those of the log-probability and of the entropy. Squashing moves none of them.
HD void differentiate(const Distribution&, const float* x, const Action* draws, const bool*, int, float by_log_prob,
                      float by_entropy, float* gradients) {
    for (int head = 0; head < ACTION_HEADS; ++head) {
        float inverse = math::exp(-x[ACTION_HEADS + head]), z = (draws[head] - x[head]) * inverse;
        gradients[head] = by_log_prob * (z * inverse);
        gradients[ACTION_HEADS + head] = by_log_prob * (z * z - 1.0f) + by_entropy;
    }
}
#endif

// Of the rows at these places, under a network's outputs for them: gradients of the loss with respect to the outputs,
// and each row's part of policy loss, value loss, entropy, approximate KL and clipped share. All are 0 where an agent
// was not active. `moments` are a minibatch's sums, see above; a negative value_clip clips no value.
//
// A comparison with a NaN is false: each choice below is written so that a NaN goes on into the loss or its gradient.
KERNEL(loss_gradients, const bool* active, const Action* draws, const float* log_probs, const float* old_values,
       const float* estimates, const float* returns, const bool* action_mask, const float* clip,
       const float* entropy_coefficient, i32 normalize_advantages, i32 squash_by_tanh, float value_coefficient,
       float value_clip, i32 num_parameters, const float* value_unit, const double* moments, const i64* places,
       const float* parameters, i64 parameter_stride, const float* values, i64 value_stride, float* parameter_gradients,
       float* value_gradients, float* figures, i64 rows) {
    FOR_ITEMS (row, rows) {
        i64 place = places[row];
        float* gradients = parameter_gradients + row * num_parameters;
        if (!active[place]) {
            for (int k = 0; k < num_parameters; ++k) gradients[k] = 0;
            value_gradients[row] = 0;
            for (int k = 0; k < 5; ++k) figures[k * rows + row] = 0;
            continue;
        }
        double exact_count = moments[0] > 1 ? moments[0] : 1.0;
        float count = (float)exact_count, advantage = estimates[place];
        if (normalize_advantages) {
            double mean = moments[1] / exact_count, variance = moments[2] / exact_count - mean * mean;
            advantage = (float)(advantage - mean) / (math::sqrt((float)(variance < 0 ? 0.0 : variance)) + 1e-8f);
        }
        const float* x = parameters + row * parameter_stride;
        const Action* drawn = draws + place * ACTION_HEADS;
        const bool* mask = action_mask + (ACTION_MASKS ? place * NUM_LOGITS : 0);
        int agent = (int)(place % NUM_AGENTS);
        Distribution d = distribution(x, drawn, mask, agent, squash_by_tanh);

        float log_ratio = d.log_prob - log_probs[place], ratio = math::exp(log_ratio);
        float gain = ratio * advantage, clipped = math::clamp(ratio, 1.0f - *clip, 1.0f + *clip) * advantage;
        bool holds_back = clipped < gain;
        float by_log_prob = holds_back ? 0.0f : -gain / count;
        differentiate(d, x, drawn, mask, agent, by_log_prob, -*entropy_coefficient / count, gradients);

        float value = values[row * value_stride], old = old_values[place];
        float error = value - returns[place], slope = 2.0f * error, square = error * error;
        if (value_clip >= 0) {
            float change = value - old;
            float near_error = old + math::clamp(change, -value_clip, value_clip) - returns[place];
            float near_square = near_error * near_error;
            float near_slope = math::abs(change) > value_clip ? 0.0f : 2.0f * near_error;
            slope = square > near_square ? slope : square < near_square ? near_slope : 0.5f * (slope + near_slope);
            square = square > near_square ? square : near_square;
        }
        float unit = *value_unit * *value_unit;
        value_gradients[row] = value_coefficient * 0.5f * slope / unit / count;

        figures[row] = -(holds_back ? clipped : gain) / count;
        figures[rows + row] = 0.5f * square / unit / count;
        figures[2 * rows + row] = d.entropy / count;
        figures[3 * rows + row] = (ratio - 1.0f - log_ratio) / count;
        figures[4 * rows + row] = (math::abs(ratio - 1.0f) > *clip ? 1.0f : 0.0f) / count;
    }
}
