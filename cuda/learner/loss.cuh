// SPDX-License-Identifier: Apache-2.0
// PPO's loss of one sample, and its gradients with respect to a network's outputs. The reference in torch is `loss` in
// gpu_vecenv/train/ppo.py. Compiled with the constants of a game's declaration.
//
// Comparisons with NaN are false: each condition below is written so that NaN propagates to the loss or its gradient.
#pragma once
#include "sampling.cuh"

// Logit of a choice that the mask forbids, as in gpu_vecenv/train/distributions.py; it has no gradient.
constexpr float MASKED_LOGIT = -0x1.fffffep127f;

#if DISCRETE_HEADS > 0
// Softmax of one head: the probability of choice k is exp(logit - largest) * share.
struct Head {
    float largest, log_total, share, entropy;
    bool exists;     // has an allowed choice
    float log_prob;  // of what was drawn
};

HD bool allowed([[maybe_unused]] const bool* mask, [[maybe_unused]] int k) { return !ACTION_MASKS || mask[k]; }

HD float logit(const float* x, const bool* mask, int k) { return allowed(mask, k) ? x[k] : MASKED_LOGIT; }

// Writes exp(logit - largest) of each choice to `weights`.
HD Head head_of(const float* x, const bool* mask, int n, float* weights) {
    bool exists = false;
    for (int k = 0; k < n; ++k) exists = exists || allowed(mask, k);
    if (!exists) return {};
    float largest = logit(x, mask, 0), total = 0, moment = 0;
    for (int k = 1; k < n; ++k) largest = math::max(logit(x, mask, k), largest);
    constexpr int BATCH = 4;  // independent exponentials
    for (int first = 0; first < n; first += BATCH) {
        float below[BATCH], weight[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            below[b] = first + b < n ? logit(x, mask, first + b) - largest : 0.0f;
            weight[b] = sampling::exp_nonpositive(below[b]);
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
            if (first + b >= n) continue;
            weights[first + b] = weight[b];
            total += weight[b];
            if (weight[b] > 0) moment += weight[b] * below[b];
        }
    }
    float log_total = math::log(total), share = 1.0f / total;
    return {largest, log_total, share, log_total - moment * share, true, 0};
}

// The choice that was drawn. The sampler returns -1 for NaN logits; their log-probability is NaN.
HD int choice_of(i32 draw) { return math::max(draw, 0); }
HD int choice_of(float draw) { return math::max(math::to_int(draw), 0); }
#endif

// Several threads may compute a row, each a part of its discrete heads: every COUNT-th one from `first` on. The k-th of
// them has the same place in the code of all threads.
template <int COUNT>
struct Part {
    static constexpr int HEADS = (DISCRETE_HEADS + COUNT - 1) / COUNT;  // at most
    int first;
    HD int head(int k) const { return k * COUNT + first; }
    HD bool has(int k) const { return COUNT == 1 || head(k) < DISCRETE_HEADS; }
};

template <int COUNT>
struct Distribution {
    float log_prob, entropy;  // sums over the heads
#if DISCRETE_HEADS > 0
    Head heads[Part<COUNT>::HEADS];
#endif
};

#if DISCRETE_HEADS > 0
// One of a part's heads: where its logits and its mask begin, and what was drawn; not an index into registers.
struct HeadPlace {
    int size, first_logit, choice;
    const bool* mask;
};
template <int COUNT>
HD HeadPlace place_of(Part<COUNT> part, int k, const Action* draws, const bool* mask, int agent) {
    int head = part.head(k), first = 0;
    Action draw = draws[k * COUNT];
    UNROLL for (int other = 0; other < DISCRETE_HEADS; ++other) {
        if (other < head) first += action_size(agent, other);
        if (other == head) draw = draws[other];
    }
    return {action_size(agent, head), first, choice_of(draw), mask + (ACTION_MASKS ? logit_offset(head) : 0)};
}
#endif

#if BOX_ACTIONS
// From the mean, in standard deviations; a greedy draw is the mean, and std may be 0.
HD float deviation(float draw, float mean, float std) {
    float distance = draw - mean;
    return distance == 0 ? 0 : distance / std;
}
#endif

// Log-probability and entropy of what was drawn, of discrete heads those of each in a part; see sum_heads. An agent has
// either the elements of a Box, and then the parameters are as in sample_box, or discrete heads, and then they are
// their logits, one after the other. Masks are padded to the widest role.
template <int COUNT>
HD Distribution<COUNT> distribution(const float* x, const Action* draws, [[maybe_unused]] const bool* mask, int agent,
                                    [[maybe_unused]] float* weights, [[maybe_unused]] Part<COUNT> part) {
    Distribution<COUNT> d = {};
#if BOX_ACTIONS
    const int elements = action_box::heads(agent);
    for (int head = 0; head < elements; ++head) {
        if constexpr (SQUASH == sampling::BETA) {
            const auto beta = sampling::Beta::of(x[head], x[elements + head]);
            d.log_prob += beta.log_prob(draws[head]);
            d.entropy += beta.entropy();
            continue;
        }
        float log_std = x[elements + head], z = deviation(draws[head], x[head], math::exp(log_std));
        float density = -0.5f * z * z - log_std - 0.9189385f;  // log(2 pi) / 2
        if constexpr (SQUASH == sampling::TANH) {
            // Minus log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), a form that stays accurate.
            float a = math::abs(draws[head]);
            density += 2.0f * (a + math::log(1.0f + math::exp(-2.0f * a)) - 0.6931472f);
        }
        d.log_prob += density;
        d.entropy += log_std + 1.4189385f;  // log(2 pi e) / 2
    }
#endif
#if DISCRETE_HEADS > 0
    for (int k = 0; k < part.HEADS; ++k) {
        if (!part.has(k)) continue;
        HeadPlace own = place_of(part, k, draws, mask, agent);
        const float* logits = x + own.first_logit;
        Head& h = d.heads[k] = head_of(logits, own.mask, own.size, weights + own.first_logit);
        if (h.exists) h.log_prob = logit(logits, own.mask, own.choice) - h.largest - h.log_total;
    }
#endif
    return d;
}

// Adds up what all parts have of the discrete heads, in the order of the heads: the log-probability is bitwise that of
// sampling.cuh. `exchange(x, k)` is x of part k's thread.
template <int COUNT, class F>
HD void sum_heads([[maybe_unused]] Distribution<COUNT>& d, [[maybe_unused]] F exchange) {
#if DISCRETE_HEADS > 0
    for (int head = 0; head < DISCRETE_HEADS; ++head) {
        d.log_prob += exchange(d.heads[head / COUNT].log_prob, head % COUNT);
        d.entropy += exchange(d.heads[head / COUNT].entropy, head % COUNT);
    }
#endif
}

// Calls store(k, gradient) of the parameters, from the gradients of log-probability and entropy. Squashing of a
// Gaussian does not change them. Of discrete heads only those of a part; `weights` are its weights, and `store` may
// overwrite the k-th.
template <int COUNT, class F>
HD void backward([[maybe_unused]] const Distribution<COUNT>& d, const float* x, const Action* draws,
                 [[maybe_unused]] const bool* mask, int agent, float by_log_prob, float by_entropy,
                 [[maybe_unused]] const float* weights, [[maybe_unused]] Part<COUNT> part, F store) {
#if BOX_ACTIONS
    const int elements = action_box::heads(agent);
    for (int head = 0; head < elements; ++head) {
        if constexpr (SQUASH == sampling::BETA) {
            float first = x[head], second = x[elements + head];
            const auto beta = sampling::Beta::of(first, second);
            const auto gradients = beta.gradients(first, second, draws[head], by_log_prob, by_entropy);
            store(head, gradients.by_x);
            store(elements + head, gradients.by_y);
            continue;
        }
        float std = math::exp(x[elements + head]), z = deviation(draws[head], x[head], std);
        store(head, by_log_prob * (z / std));
        store(elements + head, by_log_prob * (z * z - 1.0f) + by_entropy);
    }
#endif
#if DISCRETE_HEADS > 0
    for (int k = 0; k < part.HEADS; ++k) {
        if (!part.has(k)) continue;
        HeadPlace own = place_of(part, k, draws, mask, agent);
        const float* logits = x + own.first_logit;
        const Head& h = d.heads[k];
        // Of log p it is 1 for the choice, minus p, and of the entropy -p (log p + entropy).
        float shift = h.log_total - h.entropy, of_weight = -by_log_prob * h.share, of_log_p = -by_entropy * h.share;
        for (int j = 0; j < own.size; ++j) {
            if (!allowed(own.mask, j)) {
                store(own.first_logit + j, 0);
                continue;
            }
            // The logit may be -infinity; then the weight is 0, and times the bound it is 0.
            float above = math::max(logits[j] - h.largest - shift, -1e30f);
            float slope = math::fma(of_log_p, above, of_weight);
            store(own.first_logit + j,
                  math::fma(weights[own.first_logit + j], slope, j == own.choice ? by_log_prob : 0.0f));
        }
    }
#endif
}

// What the samples of a minibatch have in common.
struct Minibatch {
    double mean;             // of the advantages that are normalised, else 0
    float deviation, count;  // of these advantages, else 1; active samples whose agents acted, at least 1
    float value_count;       // all active samples, at least 1
};

// From the moments of `shuffle`.
HD Minibatch minibatch_of(const double* moments, bool normalize_advantages) {
    double count = moments[0] > 1 ? moments[0] : 1.0;
    float value_count = TRACKS_ACTING ? (float)(moments[3] > 1 ? moments[3] : 1.0) : (float)count;
    if (!normalize_advantages) return {0, 1, (float)count, value_count};
    double mean = moments[1] / count, variance = moments[2] / count - mean * mean;
    return {mean, math::sqrt((float)(variance < 0 ? 0.0 : variance)) + 1e-8f, (float)count, value_count};
}

// One sample's part of policy loss, entropy, approx_kl and clip_fraction.
struct PolicyLoss {
    float loss, entropy, approx_kl, clip_fraction;
};

// Calls store(k, gradient) with respect to the parameters x of the distribution d, as `backward`.
template <int COUNT, class F>
HD PolicyLoss policy_gradients(const Distribution<COUNT>& d, const float* x, const Action* draws, const bool* mask,
                               int agent, float old_log_prob, float estimate, const Minibatch& minibatch, float clip,
                               float entropy_coefficient, const float* weights, Part<COUNT> part, F store) {
    float advantage = (float)(estimate - minibatch.mean) / minibatch.deviation, count = minibatch.count;
    float log_ratio = d.log_prob - old_log_prob, ratio = math::exp(log_ratio);
    float surrogate = ratio * advantage, surrogate_clipped = math::clamp(ratio, 1.0f - clip, 1.0f + clip) * advantage;
    bool is_clipped = surrogate_clipped < surrogate;
    float by_log_prob = is_clipped ? 0.0f : -surrogate / count;
    backward(d, x, draws, mask, agent, by_log_prob, -entropy_coefficient / count, weights, part, store);
    return {-(is_clipped ? surrogate_clipped : surrogate) / count, d.entropy / count,
            (ratio - 1.0f - log_ratio) / count, (math::abs(ratio - 1.0f) > clip ? 1.0f : 0.0f) / count};
}

// One sample's part of the value loss, and its gradient, times `coefficient`, with respect to the value.
struct ValueLoss {
    float loss, gradient;
};

// `scale` is the value's unit. A negative value_clip means no clipping; with `scales_clip` it is in that unit. A
// negative huber_delta means a squared error; otherwise the loss is linear beyond so many units.
HD ValueLoss value_loss(float value, float old, float target, float scale, float count, float coefficient,
                        float value_clip, bool scales_clip, float huber_delta) {
    float error = value - target, slope = 2.0f * error, square = error * error, unit = scale * scale;
    if (value_clip >= 0) {
        if (scales_clip) value_clip *= scale;
        float change = value - old;
        float clipped_error = old + math::clamp(change, -value_clip, value_clip) - target;
        float clipped_square = clipped_error * clipped_error;
        float clipped_slope = math::abs(change) > value_clip ? 0.0f : 2.0f * clipped_error;
        slope = square > clipped_square   ? slope
                : square < clipped_square ? clipped_slope
                                          : 0.5f * (slope + clipped_slope);
        square = square > clipped_square ? square : clipped_square;
    }
    float delta = huber_delta * scale;
    if (huber_delta >= 0 && square > delta * delta) {
        float length = math::sqrt(square);
        square = delta * (2.0f * length - delta);
        slope *= delta / length;
    }
    return {0.5f * square / unit / count, coefficient * 0.5f * slope / unit / count};
}
