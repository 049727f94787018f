// SPDX-License-Identifier: Apache-2.0
// Advantage estimates, and PPO's loss with its gradients, for each sample of a rollout. The reference in torch is
// `advantages` and `loss` in gpu_vecenv/train/ppo.py. Compiled with the constants of a game's declaration.
#include "kernel.cuh"
#include "math.cuh"

// Generalised advantage estimates and returns of each agent, from the last step to the first.
KERNEL(advantages) {
    FOR_ITEMS (column, args.columns) {
        int agent = (int)(column % NUM_AGENTS);
        float discount = args.gamma[agent], decay = discount * args.gae_lambda[agent], gae = 0;
        for (i64 k = (args.num_steps - 1) * args.columns + column; k >= 0; k -= args.columns) {
            float bootstrap = args.terminations[k] ? 0.0f : discount * args.next_values[k];
            float delta = args.active[k] ? args.rewards[k] + bootstrap - args.values[k] : 0.0f;
            bool continues = args.active[k] && !(args.terminations[k] || args.truncations[k]);
            gae = math::fma(continues ? decay : 0.0f, gae, delta);
            args.estimates[k] = gae;
            args.returns[k] = gae + args.values[k];
        }
    }
}

// Count of active samples, sum of their advantages and of the squares, as partial sums: `part` adds every parts-th row.
// They give mean and variance of a minibatch. In doubles, mean square minus squared mean is accurate for floats.
KERNEL(advantage_moments) {
    FOR_ITEMS (part, args.parts) {
        double count = 0, sum = 0, squares = 0;
        for (i64 row = part; row < args.rows; row += args.parts) {
            i64 index = args.indices[row];
            double x = args.active[index] ? (double)args.estimates[index] : 0.0;
            count += args.active[index];
            sum += x;
            squares += x * x;
        }
        args.moments[part] = count;
        args.moments[args.parts + part] = sum;
        args.moments[2 * args.parts + part] = squares;
    }
}

#if DISCRETE_HEADS > 0
// Logit of a choice that the mask forbids, as in gpu_vecenv/train/distributions.py; it has no gradient.
constexpr float MASKED_LOGIT = -0x1.fffffep127f;

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
            weight[b] = math::exp(below[b]);
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

// Log-probability and entropy of what was drawn. An agent has either the elements of a Box, and then the parameters are
// means and then log standard deviations, or discrete heads, and then they are their logits, one after the other.
// Masks are padded to the widest role.
HD Distribution distribution(const float* x, const Action* draws, [[maybe_unused]] const bool* mask, int agent,
                             [[maybe_unused]] bool squash_by_tanh, [[maybe_unused]] float* weights) {
    Distribution d;
    d.log_prob = d.entropy = 0;
#if BOX_ACTIONS
    const int elements = action_box::heads(agent);
    for (int head = 0; head < elements; ++head) {
        float log_std = x[elements + head], z = (draws[head] - x[head]) * math::exp(-log_std);
        float density = -0.5f * (z * z) - log_std - 0.9189385f;  // log(2 pi) / 2
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
        float inverse = math::exp(-x[elements + head]), z = (draws[head] - x[head]) * inverse;
        gradients[head] = by_log_prob * (z * inverse);
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

#if defined(__CUDACC__)

namespace learner {  // a game's constants may have the same names

constexpr int LOSS_BLOCK = 128;                                // largest number of threads
constexpr int PITCH = (PARAMETERS_PER_AGENT / 4 * 4 + 4) | 1;  // odd, against bank conflicts
constexpr bool STAGE_ROWS = 2 * LOSS_BLOCK * PITCH * sizeof(float) <= 48 << 10;
constexpr int THREADS_PER_ROW = PITCH > 16 ? 32 : PITCH > 8 ? 16 : 8;

// Copies the 32 rows of a warp to or from shared memory, with coalesced accesses. In an incomplete warp each lane
// copies its own row.
HD void copy_rows(float* to, i64 to_stride, const float* from, i64 from_stride, int columns, bool whole) {
    int lane = threadIdx.x % 32;
    if (!whole) {
        for (int k = 0; k < columns; ++k) to[lane * to_stride + k] = from[lane * from_stride + k];
        return;
    }
    __syncwarp();
    _Pragma("unroll 8") for (int row = lane / THREADS_PER_ROW; row < 32; row += 32 / THREADS_PER_ROW) {
        UNROLL for (int k = 0; k < PITCH; k += THREADS_PER_ROW) {
            int column = k + lane % THREADS_PER_ROW;
            if (column < columns) to[row * to_stride + column] = from[row * from_stride + column];
        }
    }
    __syncwarp();
}

}  // namespace learner

#endif

// Gradients of the loss with respect to a network's outputs for the samples at these indices, and each sample's part of
// policy loss, value loss, entropy, approx_kl and clip_fraction. All are 0 if the agent was not active. A row of
// `gradients` has `width` columns; without `value_gradients` the value's gradient fills the columns after the
// parameters'. `moments` are the sums of advantage_moments. A negative value_clip means no clipping.
//
// Comparisons with NaN are false: each condition below is written so that NaN propagates to the loss or its gradient.
KERNEL(loss_gradients) {
    FOR_ITEMS (row, args.rows) {
        const float* x = args.parameters + row * args.parameter_stride;
        float* own = args.gradients + row * args.width;
#if defined(__CUDACC__)
        int lane = threadIdx.x % 32;
        bool whole = row - lane + 32 <= args.rows;
        __shared__ float staged[learner::STAGE_ROWS ? 2 * learner::LOSS_BLOCK * learner::PITCH : 1];
        float* staged_x = staged + (threadIdx.x - lane) * 2 * learner::PITCH;
        float* staged_gradients = staged_x + 32 * learner::PITCH;
        if constexpr (learner::STAGE_ROWS) {
            learner::copy_rows(staged_x, learner::PITCH, x - lane * args.parameter_stride, args.parameter_stride,
                               args.num_parameters, whole);
            x = staged_x + lane * learner::PITCH;
            own = staged_gradients + lane * learner::PITCH;
        }
#endif
        i64 index = args.indices[row];
        float value_gradient = 0, part[5] = {};
        if (!args.active[index]) {
            for (int k = 0; k < args.num_parameters; ++k) own[k] = 0;
        } else {
            double exact_count = args.moments[0] > 1 ? args.moments[0] : 1.0;
            float count = (float)exact_count, advantage = args.estimates[index];
            if (args.normalize_advantages) {
                double mean = args.moments[1] / exact_count, variance = args.moments[2] / exact_count - mean * mean;
                advantage = (float)(advantage - mean) / (math::sqrt((float)(variance < 0 ? 0.0 : variance)) + 1e-8f);
            }
            const Action* drawn = args.draws + index * ACTION_HEADS;
            const bool* mask = args.action_mask + (ACTION_MASKS ? index * NUM_LOGITS : 0);
            int agent = (int)(index % NUM_AGENTS);
            Distribution d = distribution(x, drawn, mask, agent, args.squash_by_tanh, own);

            float log_ratio = d.log_prob - args.log_probs[index], ratio = math::exp(log_ratio);
            float surrogate = ratio * advantage,
                  surrogate_clipped = math::clamp(ratio, 1.0f - *args.clip, 1.0f + *args.clip) * advantage;
            bool is_clipped = surrogate_clipped < surrogate;
            float by_log_prob = is_clipped ? 0.0f : -surrogate / count;
            backward(d, x, drawn, mask, agent, by_log_prob, -*args.entropy_coefficient / count, own);

            float value = args.values[row * args.value_stride], old = args.old_values[index];
            float error = value - args.returns[index], slope = 2.0f * error, square = error * error;
            if (args.value_clip >= 0) {
                float change = value - old;
                float clipped_error =
                    old + math::clamp(change, -args.value_clip, args.value_clip) - args.returns[index];
                float clipped_square = clipped_error * clipped_error;
                float clipped_slope = math::abs(change) > args.value_clip ? 0.0f : 2.0f * clipped_error;
                slope = square > clipped_square   ? slope
                        : square < clipped_square ? clipped_slope
                                                  : 0.5f * (slope + clipped_slope);
                square = square > clipped_square ? square : clipped_square;
            }
            float unit = *args.value_scale * *args.value_scale;
            value_gradient = args.value_coefficient * 0.5f * slope / unit / count;

            part[0] = -(is_clipped ? surrogate_clipped : surrogate) / count;
            part[1] = 0.5f * square / unit / count;
            part[2] = d.entropy / count;
            part[3] = (ratio - 1.0f - log_ratio) / count;
            part[4] = (math::abs(ratio - 1.0f) > *args.clip ? 1.0f : 0.0f) / count;
        }
        for (int k = 0; k < 5; ++k) args.metrics[k * args.rows + row] = part[k];
        for (int k = args.num_parameters; k < args.width; ++k) own[k] = value_gradient;
        if (args.value_gradients) args.value_gradients[row] = value_gradient;
#if defined(__CUDACC__)
        if constexpr (learner::STAGE_ROWS)
            learner::copy_rows(args.gradients + (row - lane) * args.width, args.width, staged_gradients, learner::PITCH,
                               args.width, whole);
#endif
    }
}
