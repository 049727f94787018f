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
    bool exists;  // has an allowed choice
};

HD bool allowed([[maybe_unused]] const bool* mask, [[maybe_unused]] int k) { return !ACTION_MASKS || mask[k]; }

HD float logit(const float* x, const bool* mask, int k) { return allowed(mask, k) ? x[k] : MASKED_LOGIT; }

// Writes exp(logit - largest) of each choice to `weights`.
HD Head head_of(const float* x, const bool* mask, int n, float* weights) {
    bool exists = false;
    for (int k = 0; k < n; ++k) exists = exists || allowed(mask, k);
    if (!exists) return {0, 0, 0, 0, false};
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
    return {largest, log_total, share, log_total - moment * share, true};
}

// The choice that was drawn. The sampler returns -1 for NaN logits; their log-probability is NaN.
HD int choice_of(i32 draw) { return math::max(draw, 0); }
HD int choice_of(float draw) { return math::max(math::to_int(draw), 0); }
#endif

struct Distribution {
    float log_prob, entropy;  // sums over the heads
#if DISCRETE_HEADS > 0
    Head heads[DISCRETE_HEADS];
#endif
};

#if BOX_ACTIONS
// From the mean, in standard deviations; a greedy draw is the mean, and std may be 0.
HD float deviation(float draw, float mean, float std) {
    float distance = draw - mean;
    return distance == 0 ? 0 : distance / std;
}
#endif

// Log-probability, bitwise that of sampling.cuh, and entropy of what was drawn. An agent has either the elements of a
// Box, and then the parameters are means and then log standard deviations, or discrete heads, and then they are their
// logits, one after the other. Masks are padded to the widest role.
HD Distribution distribution(const float* x, const Action* draws, [[maybe_unused]] const bool* mask, int agent,
                             [[maybe_unused]] bool squash_by_tanh, [[maybe_unused]] float* weights) {
    Distribution d;
    d.log_prob = d.entropy = 0;
#if BOX_ACTIONS
    const int elements = action_box::heads(agent);
    for (int head = 0; head < elements; ++head) {
        float log_std = x[elements + head], z = deviation(draws[head], x[head], math::exp(log_std));
        float density = -0.5f * z * z - log_std - 0.9189385f;  // log(2 pi) / 2
        if (squash_by_tanh) {
            // Minus log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), a form that stays accurate.
            float a = math::abs(draws[head]);
            density += 2.0f * (a + math::log(1.0f + math::exp(-2.0f * a)) - 0.6931472f);
        }
        d.log_prob += density;
        d.entropy += log_std + 1.4189385f;  // log(2 pi e) / 2
    }
#endif
#if DISCRETE_HEADS > 0
    for (int head = 0; head < DISCRETE_HEADS; ++head) {
        int n = action_size(agent, head);
        const bool* own = mask + (ACTION_MASKS ? logit_offset(head) : 0);
        Head h = d.heads[head] = head_of(x, own, n, weights);
        if (h.exists) d.log_prob += logit(x, own, choice_of(draws[head])) - h.largest - h.log_total;
        d.entropy += h.entropy;
        x += n;
        weights += n;
    }
#endif
    return d;
}

// Gradients of the parameters, from those of log-probability and entropy. Squashing does not change them. Of discrete
// heads it overwrites the weights in `gradients`.
HD void backward([[maybe_unused]] const Distribution& d, const float* x, const Action* draws,
                 [[maybe_unused]] const bool* mask, int agent, float by_log_prob, float by_entropy, float* gradients) {
#if BOX_ACTIONS
    const int elements = action_box::heads(agent);
    for (int head = 0; head < elements; ++head) {
        float std = math::exp(x[elements + head]), z = deviation(draws[head], x[head], std);
        gradients[head] = by_log_prob * (z / std);
        gradients[elements + head] = by_log_prob * (z * z - 1.0f) + by_entropy;
    }
#endif
#if DISCRETE_HEADS > 0
    for (int head = 0; head < DISCRETE_HEADS; ++head) {
        int n = action_size(agent, head), choice = choice_of(draws[head]);
        const bool* own = mask + (ACTION_MASKS ? logit_offset(head) : 0);
        const Head& h = d.heads[head];
        for (int k = 0; k < n; ++k) {
            if (!allowed(own, k)) {
                gradients[k] = 0;
                continue;
            }
            float log_p = x[k] - h.largest - h.log_total, p = gradients[k] * h.share;
            // log_p may be -infinity; then p = 0, and p times the bound is 0.
            float of_entropy = -p * (math::max(log_p, -1e30f) + h.entropy);
            gradients[k] = by_log_prob * ((k == choice ? 1.0f : 0.0f) - p) + by_entropy * of_entropy;
        }
        x += n;
        gradients += n;
    }
#endif
}

// What the samples of a minibatch have in common.
struct Minibatch {
    double mean;             // of the advantages that are normalised, else 0
    float deviation, count;  // of these advantages, else 1; active samples, at least 1
};

// From the moments of `shuffle`.
HD Minibatch minibatch_of(const double* moments, bool normalize_advantages) {
    double count = moments[0] > 1 ? moments[0] : 1.0;
    if (!normalize_advantages) return {0, 1, (float)count};
    double mean = moments[1] / count, variance = moments[2] / count - mean * mean;
    return {mean, math::sqrt((float)(variance < 0 ? 0.0 : variance)) + 1e-8f, (float)count};
}

// One sample's part of policy loss, entropy, approx_kl and clip_fraction.
struct PolicyLoss {
    float loss, entropy, approx_kl, clip_fraction;
};

// Writes the gradients with respect to the parameters x of the distribution.
HD PolicyLoss policy_gradients(const float* x, const Action* draws, const bool* mask, int agent, float old_log_prob,
                               float estimate, const Minibatch& minibatch, float clip, float entropy_coefficient,
                               bool squash_by_tanh, float* gradients) {
    float advantage = (float)(estimate - minibatch.mean) / minibatch.deviation, count = minibatch.count;
    Distribution d = distribution(x, draws, mask, agent, squash_by_tanh, gradients);
    float log_ratio = d.log_prob - old_log_prob, ratio = math::exp(log_ratio);
    float surrogate = ratio * advantage, surrogate_clipped = math::clamp(ratio, 1.0f - clip, 1.0f + clip) * advantage;
    bool is_clipped = surrogate_clipped < surrogate;
    float by_log_prob = is_clipped ? 0.0f : -surrogate / count;
    backward(d, x, draws, mask, agent, by_log_prob, -entropy_coefficient / count, gradients);
    return {-(is_clipped ? surrogate_clipped : surrogate) / count, d.entropy / count,
            (ratio - 1.0f - log_ratio) / count, (math::abs(ratio - 1.0f) > clip ? 1.0f : 0.0f) / count};
}

// One sample's part of the value loss, and its gradient, times `coefficient`, with respect to the value.
struct ValueLoss {
    float loss, gradient;
};

// `unit` is the square of the value's unit. A negative value_clip means no clipping.
HD ValueLoss value_loss(float value, float old, float target, float unit, float count, float coefficient,
                        float value_clip) {
    float error = value - target, slope = 2.0f * error, square = error * error;
    if (value_clip >= 0) {
        float change = value - old;
        float clipped_error = old + math::clamp(change, -value_clip, value_clip) - target;
        float clipped_square = clipped_error * clipped_error;
        float clipped_slope = math::abs(change) > value_clip ? 0.0f : 2.0f * clipped_error;
        slope = square > clipped_square   ? slope
                : square < clipped_square ? clipped_slope
                                          : 0.5f * (slope + clipped_slope);
        square = square > clipped_square ? square : clipped_square;
    }
    return {0.5f * square / unit / count, coefficient * 0.5f * slope / unit / count};
}
