// SPDX-License-Identifier: Apache-2.0
// Actions, log-probabilities and entropies from logits; compiled after a game's declaration, with its constants.
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

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
        int best = 0;
        for (int k = 1; k < n; ++k) best = x[k] > x[best] ? k : best;
        float weight[LARGEST_HEAD], total = 0;
        for (int k = 0; k < n; ++k) total += weight[k] = math::exp(x[k] - x[best]);
        // NaN among the logits, or nothing but -infinity: no distribution. The environment refuses -1.
        if (!(total >= 1) || !math::is_finite(total)) {
            action[head] = -1;
            sum_log_prob = sum_entropy = math::from_bits(0x7fc00000u);
            continue;
        }
        int choice = best;
        if (!greedy) {
            float rest = rng.uniform(agent, head) * total;
            choice = -1;
            for (int k = 0, last = 0; k < n; ++k) {
                if (weight[k] > 0) last = k;
                if (choice < 0 && rest < weight[k]) choice = k;
                rest -= weight[k];
                if (choice < 0 && k == n - 1) choice = last;  // rounding: the last that is possible at all
            }
        }
        float log_total = math::log(total), head_entropy = 0;
        for (int k = 0; k < n; ++k) {
            float p = weight[k] / total;
            if (p > 0) head_entropy -= p * (x[k] - x[best] - log_total);
        }
        action[head] = choice;
        sum_log_prob += x[choice] - x[best] - log_total;
        sum_entropy += head_entropy;
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
        sample_row(logits + row * NUM_LOGITS, rng, agent, greedy, actions + row * ACTION_HEADS, log_probs + row,
                   entropies + row);
    }
}
#endif
