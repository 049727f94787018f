// SPDX-License-Identifier: Apache-2.0
// One agent's action, its log-probability and its entropy, from logits or from the parameters of a Box's distribution.
// Compiled after the generated header of a game, which gives the constants, and maybe after a definition of SQUASH.
#pragma once
#include "beta.cuh"
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

#if !defined(SQUASH)
#define SQUASH sampling::CLIP
#endif

namespace sampling {

// How a draw becomes an element of a Box: `squash` in gpu_vecenv/engine/sampler.py. Draws of BETA are of a Beta
// distribution, the others Gaussian.
enum Squash { CLIP, TANH, BETA };

// Sampling options and output tensors, with one row per agent of every environment. Outputs may be null.
struct SampleArguments {
    bool greedy;
    Action* actions;
    float *log_probs, *entropies, *draws;  // draws: only where a role has a Box
    bool dense = false;                    // an agent's logits are those of its own choices only
};

struct LogProbAndEntropy {
    float log_prob, entropy;  // sums over the heads
};

#if DISCRETE_HEADS > 0
// exp(x) for x <= 0, or NaN: relative error below 3e-7 down to -10 and 2e-6 at -87; 0 from there on. It has half
// the instructions of math::exp: probabilities need neither the rounding error of x nor denormal results.
HD float exp_nonpositive(float x) {
    float rounded = math::fma(x, 0x1.715476p+0f, math::ROUNDER);
    float r = math::fma(x, 0x1.715476p+0f, math::ROUNDER - rounded);
    float p = math::fma(math::fma(1.3274557e-3f, r, 9.6719582e-3f), r, 5.5506788e-2f);
    p = math::fma(math::fma(math::fma(p, r, 2.4022235e-1f), r, 6.9314706e-1f), r, 1.0f);
    float scale = math::from_bits((math::bits(rounded) << 23) + 0x3f800000u);  // ROUNDER's own bits are shifted out
    return x < -87.0f ? 0.0f : p * scale;
}

// Samples every discrete head. The logits of an agent are stored head after head, each padded to the widest role's
// size unless they are dense. A choice is drawn by inverting the cumulative distribution; sums run in the order of the
// choices.
HD LogProbAndEntropy sample_choices(const float* logits, Rng rng, int agent, const SampleArguments& sample,
                                    Action (&action)[ACTION_HEADS]) {
    float sum_log_prob = 0, sum_entropy = 0;
    int own_offset = 0;
    Philox4 random = {};
    for (int head = 0; head < DISCRETE_HEADS; ++head) {
        if (head % 4 == 0) random = rng.block(agent, head / 4);
        u32 word = random.word[0];  // one per head
        random = {{random.word[1], random.word[2], random.word[3], 0}};
        int n = action_size(agent, head);
        const float* x = logits + (sample.dense ? own_offset : logit_offset(head));
        own_offset += n;
        action[head] = 0;
        if (n == 0) continue;
        float largest = x[0], weight[LARGEST_HEAD], total = 0;
        for (int k = 1; k < n; ++k) largest = math::max(x[k], largest);
        for (int k = 0; k < n; ++k) total += weight[k] = exp_nonpositive(x[k] - largest);
        // NaN among the logits, or all are -infinity: no distribution. -1 is an invalid action.
        if (!(total >= 1) || !math::is_finite(total)) {
            action[head] = -1;
            sum_log_prob = sum_entropy = math::from_bits(math::NAN_BITS);
            continue;
        }
        int choice = 0;
        if (sample.greedy) {
            while (x[choice] < largest) ++choice;
        } else {
            // Subtracts weights until the remainder is negative; it stays negative then.
            float rest = Rng::unit(word) * total;
            for (int k = 0; k < n; ++k) {
                choice += rest >= weight[k];
                rest -= weight[k];
            }
            if (choice == n)  // rounding: the last choice of positive probability
                for (int k = 0; k < n; ++k) choice = weight[k] > 0 ? k : choice;
        }
        float log_total = math::log(total);
        action[head] = (Action)choice;
        sum_log_prob += x[choice] - largest - log_total;
        if (sample.entropies) {
            float moment = 0;
            for (int k = 0; k < n; ++k) moment += weight[k] * math::max(-104.0f, x[k] - largest);
            sum_entropy += log_total - moment / total;
        }
    }
    for (int head = DISCRETE_HEADS; head < ACTION_HEADS; ++head) action[head] = 0;
    return {sum_log_prob, sum_entropy};
}
#endif

#if BOX_ACTIONS
// Maps [-1, 1] to the Box. The bounds are halved first because their sum or difference may overflow.
HD float box_action(float s, int agent, int head) {
    float low = action_box::low(agent, head), high = action_box::high(agent, head);
    float a = math::clamp((0.5f * high + 0.5f * low) + (0.5f * high - 0.5f * low) * s, low, high);
    return s >= 1 ? high : s <= -1 ? low : a;
}

// One element of a Box: what was drawn, which is NaN if there is no distribution, and where it is in [-1, 1].
struct BoxElement {
    float draw, place, log_prob, entropy;
};

HD BoxElement no_element() {
    const float nan = math::from_bits(math::NAN_BITS);
    return {nan, nan, nan, nan};
}

HD BoxElement gaussian_element(float mean, float log_std, bool greedy, Rng rng, int agent, int head) {
    float std = math::exp(log_std), u = greedy ? mean : mean + std * rng.normal(agent, head);
    // No distribution, or a draw that overflows.
    if (!math::is_finite(mean) || !math::is_finite(log_std) || !math::is_finite(u)) return no_element();
    // The density of the draw as stored, after rounding. A greedy draw is the mean, and std may be 0.
    float distance = u - mean, z = distance == 0 ? 0 : distance / std;
    float density = -0.5f * z * z - log_std - 0.9189385f;  // log(2 pi) / 2
    if constexpr (SQUASH == TANH) {
        // Minus log(1 - tanh(u)^2), as 2 (log 2 - |u| - log(1 + exp(-2 |u|))), which neither overflows nor cancels.
        float a = math::abs(u);
        density += 2.0f * (a + math::log(1.0f + math::exp(-2.0f * a)) - 0.6931472f);
    }
    float place = SQUASH == TANH ? math::tanh(u) : math::clamp(u, -1.0f, 1.0f);
    return {u, place, density, 1.4189385f + log_std};  // log(2 pi e) / 2
}

HD BoxElement beta_element(float x, float y, bool greedy, Rng rng, int agent, int head) {
    const Beta beta = Beta::of(x, y);
    if (!math::is_finite(x) || !math::is_finite(y) || !beta.is_finite()) return no_element();
    float u = greedy ? beta.mean() : beta.draw(rng, agent, head);
    return {u, 2.0f * u - 1.0f, beta.log_prob(u), beta.entropy()};
}

// Samples every element of a Box. The first parameters of all elements come before the second ones.
HD LogProbAndEntropy sample_box(const float* parameters, Rng rng, int agent, const SampleArguments& sample, i64 row,
                                Action (&action)[ACTION_HEADS]) {
    float sum_log_prob = 0, sum_entropy = 0;
    for (int head = 0; head < action_box::heads(agent); ++head) {
        float x = parameters[head], y = parameters[action_box::heads(agent) + head];
        BoxElement element = SQUASH == BETA ? beta_element(x, y, sample.greedy, rng, agent, head)
                                            : gaussian_element(x, y, sample.greedy, rng, agent, head);
        // NaN is an invalid action.
        action[head] = math::is_nan(element.draw) ? element.draw : box_action(element.place, agent, head);
        sum_log_prob += element.log_prob;
        sum_entropy += element.entropy;
        sample.draws[row * ACTION_HEADS + head] = element.draw;
    }
    for (int head = action_box::heads(agent); head < ACTION_HEADS; ++head) action[head] = 0;
    return {sum_log_prob, sum_entropy};
}
#endif

// Samples the action of one agent. A draw is also written of what is no element of a Box: the choice itself, else 0.
HD void sample_row(const float* parameters, Rng rng, int agent, const SampleArguments& sample, i64 row,
                   Action (&action)[ACTION_HEADS]) {
#if !BOX_ACTIONS
    LogProbAndEntropy sums = sample_choices(parameters, rng, agent, sample, action);
#else
#if DISCRETE_HEADS == 0
    LogProbAndEntropy sums = sample_box(parameters, rng, agent, sample, row, action);
#else
    LogProbAndEntropy sums = action_box::heads(agent) > 0 ? sample_box(parameters, rng, agent, sample, row, action)
                                                          : sample_choices(parameters, rng, agent, sample, action);
#endif
    for (int head = action_box::heads(agent); head < ACTION_HEADS; ++head)
        sample.draws[row * ACTION_HEADS + head] = action[head];
#endif
    sample.log_probs[row] = sums.log_prob;
    if (sample.entropies) sample.entropies[row] = sums.entropy;
    UNROLL for (int head = 0; head < ACTION_HEADS; ++head) sample.actions[row * ACTION_HEADS + head] = action[head];
}

}  // namespace sampling
