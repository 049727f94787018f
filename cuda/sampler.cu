// SPDX-License-Identifier: Apache-2.0
// Actions, log-probabilities and entropies from logits, or from means and log standard deviations; compiled after a
// game's declaration, with its constants.
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

#if defined(__CUDACC__)

// The numbers of one row of a table of N columns. A whole warp reads its rows together, neighbouring lanes neighbouring
// words; then each lane has its own row in shared memory. Where rows would lie in too few banks, or are too long, each
// lane reads its own.
template <int N>
HD const float* own_row(const float* table, i64 row, i64 rows) {
    constexpr int BLOCK = 128;  // threads, as sampler.py launches them
    if constexpr (N % 8 == 0 || BLOCK * N * sizeof(float) > 48 << 10) {
        return table + row * N;
    } else {
        __shared__ float staged[BLOCK * N];
        int lane = threadIdx.x % 32;
        i64 first = row - lane;
        float* own = staged + threadIdx.x / 32 * 32 * N;
        if (rows - first < 32) {
            UNROLL for (int c = 0; c < N; ++c) own[lane * N + c] = table[row * N + c];
            return own + lane * N;
        }
        __syncwarp();  // the rows before these have been read
        UNROLL for (int c = 0; c < N; ++c) own[c * 32 + lane] = table[first * N + c * 32 + lane];
        __syncwarp();
        return own + lane * N;
    }
}

#else

template <int N>
HD const float* own_row(const float* table, i64 row, i64) {
    return table + row * N;
}

#endif

#if !BOX_ACTIONS
// One agent's action, head by head. Logits of one agent lie head after head, each padded to the widest role's size.
// A choice is made by inverting the cumulative distribution; sums run in the order of the choices.
HD void sample_row(const float* logits, Rng rng, int agent, bool greedy, i32* action, float* log_prob, float* entropy) {
    float sum_log_prob = 0, sum_entropy = 0;
    for (int head = 0; head < ACTION_HEADS; ++head) {
        int n = action_size(agent, head);
        const float* x = logits + logit_offset(head);
        if (n == 0) {
            action[head] = 0;
            continue;
        }
        float largest = x[0], weight[LARGEST_HEAD], total = 0, moment = 0;
        for (int k = 1; k < n; ++k) largest = math::max(x[k], largest);
        for (int k = 0; k < n; ++k) {
            float below = math::max(-104.0f, x[k] - largest);  // where weights are 0; a NaN stays one
            total += weight[k] = math::exp_within(below);
            moment += weight[k] * below;
        }
        // NaN among the logits, or nothing but -infinity: no distribution. The environment refuses -1.
        if (!(total >= 1) || !math::is_finite(total)) {
            action[head] = -1;
            sum_log_prob = sum_entropy = math::from_bits(0x7fc00000u);
            continue;
        }
        int choice = 0;
        if (greedy) {
            while (x[choice] < largest) ++choice;
        } else {
            // What is left falls below 0 with the choice, and stays there.
            float rest = rng.uniform(agent, head) * total;
            for (int k = 0; k < n; ++k) {
                choice += rest >= weight[k];
                rest -= weight[k];
            }
            if (choice == n)  // rounding: the last that is possible at all
                for (int k = 0; k < n; ++k) choice = weight[k] > 0 ? k : choice;
        }
        float log_total = math::log(total);
        action[head] = choice;
        sum_log_prob += x[choice] - largest - log_total;
        sum_entropy += log_total - moment / total;
    }
    *log_prob = sum_log_prob;
    *entropy = sum_entropy;
}

KERNEL(sample, const float* logits, const u32* key, const i64* episode, const i32* time, i32 greedy, i32* actions,
       float* log_probs, float* entropies, i64 rows) {
    FOR_ITEMS (row, rows) {
        i64 e = row / NUM_AGENTS;
        int agent = (int)(row % NUM_AGENTS);
        Rng rng = {key[2 * e], key[2 * e + 1], SAMPLER_STREAM, (u32)episode[e], (u32)time[e]};
        sample_row(own_row<NUM_LOGITS>(logits, row, rows), rng, agent, greedy, actions + row * ACTION_HEADS,
                   log_probs + row, entropies + row);
    }
}
#else
// From [-1, 1] to the Box, ends to ends. Halves are taken first: the sum or difference of two bounds may overflow.
HD float box_action(float s, int head) {
    float low = ACTION_LOW[head], high = ACTION_HIGH[head];
    float a = math::clamp((0.5f * high + 0.5f * low) + (0.5f * high - 0.5f * low) * s, low, high);
    return s >= 1 ? high : s <= -1 ? low : a;
}

// One agent's action, head by head: a Gaussian draw, squashed. All means come before all log standard deviations.
HD void sample_row(const float* parameters, Rng rng, int agent, bool greedy, bool squash_by_tanh, float* action,
                   float* draw, float* log_prob, float* entropy) {
    float sum_log_prob = 0, sum_entropy = 0;
    for (int head = 0; head < ACTION_HEADS; ++head) {
        float mean = parameters[head], log_std = parameters[ACTION_HEADS + head], std = math::exp(log_std);
        float u = greedy ? mean : mean + std * rng.normal(agent, head);
        // No distribution, or a draw too large for a float. The environment refuses NaN.
        if (!math::is_finite(mean) || !math::is_finite(log_std) || !math::is_finite(u)) {
            action[head] = draw[head] = sum_log_prob = sum_entropy = math::from_bits(math::NAN_BITS);
            continue;
        }
        // The density is that of the draw as it is stored, rounded. Where it is the mean, std may be 0.
        float distance = u - mean, z = distance == 0 ? 0 : distance / std;
        float density = -0.5f * z * z - log_std - 0.9189385f;  // log(2 pi) / 2
        if (squash_by_tanh) {
            // Less log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), where nothing overflows or is lost.
            float a = math::abs(u);
            density += 2.0f * (a + math::log(1.0f + math::exp(-2.0f * a)) - 0.6931472f);
        }
        action[head] = box_action(squash_by_tanh ? math::tanh(u) : math::clamp(u, -1.0f, 1.0f), head);
        draw[head] = u;
        sum_log_prob += density;
        sum_entropy += 1.4189385f + log_std;  // log(2 pi e) / 2
    }
    *log_prob = sum_log_prob;
    *entropy = sum_entropy;
}

KERNEL(sample_box, const float* parameters, const u32* key, const i64* episode, const i32* time, i32 greedy,
       float* actions, float* log_probs, float* entropies, i64 rows, float* draws, i32 squash_by_tanh) {
    FOR_ITEMS (row, rows) {
        i64 e = row / NUM_AGENTS;
        int agent = (int)(row % NUM_AGENTS);
        Rng rng = {key[2 * e], key[2 * e + 1], SAMPLER_STREAM, (u32)episode[e], (u32)time[e]};
        sample_row(own_row<2 * ACTION_HEADS>(parameters, row, rows), rng, agent, greedy, squash_by_tanh,
                   actions + row * ACTION_HEADS, draws + row * ACTION_HEADS, log_probs + row, entropies + row);
    }
}
#endif
