// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: every draw is a pure function of (seed, env_index, stream, episode, step, item, draw).
// There is no generator state: the draws of any step of any episode of any environment can be repeated alone.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

struct Philox4 {
    u32 word[4];
};

// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
HD Philox4 philox(Philox4 counter, u32 key0, u32 key1) {
    for (int round = 0; round < 10; ++round) {
        u64 a = (u64)0xD2511F53u * counter.word[0], b = (u64)0xCD9E8D57u * counter.word[2];
        counter = {{(u32)(b >> 32) ^ counter.word[1] ^ key0, (u32)b, (u32)(a >> 32) ^ counter.word[3] ^ key1, (u32)a}};
        key0 += 0x9E3779B9u;  // golden ratio
        key1 += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return counter;
}

// Streams never share a draw. The top bits of the first counter word hold them.
enum Stream : u32 { RESET_STREAM, STEP_STREAM, SAMPLER_STREAM, RANDOM_ACTION_STREAM, RANDOMIZED_STREAM };

// The key of one environment, which all its draws use: other indices and other seeds have other streams.
HD void env_key(u64 seed, u64 env_index, u32 key[2]) {
    Philox4 k = philox({{(u32)env_index, (u32)(env_index >> 32), 0, 0}}, (u32)seed, (u32)(seed >> 32));
    key[0] = k.word[0];
    key[1] = k.word[1];
}

struct NormalAndUniform {
    float normal, uniform;
};

struct Rng {
    u32 key0, key1, stream, episode, step;

    // One block of four random words. `item` is an agent or any other index, `draw` < 2^28 counts its draws.
    HD Philox4 block(u32 item, u32 draw) const {
        return philox({{stream << 29 | draw, item, step, episode}}, key0, key1);
    }
    HD u32 word(u32 item, u32 draw) const { return block(item, draw >> 2).word[draw & 3]; }

    // Uniform in [0, 1), 24 bits.
    HD float uniform(u32 item, u32 draw) const { return unit(word(item, draw)); }
    HD static float unit(u32 word) { return (float)(word >> 8) * 0x1p-24f; }

    // Uniform in {0, …, n - 1}, n > 0. The bias is below n / 2^64: 64 random bits times n, upper half.
    HD int below(u32 item, u32 draw, u32 n) const {
        Philox4 b = block(item, 1u << 28 | draw);  // blocks that `word` never uses
        u64 low = (u64)b.word[0] * n, high = (u64)b.word[1] * n;
        return (int)((high + (low >> 32)) >> 32);
    }

    // Standard normal, by Box and Muller, "A note on the generation of random normal deviates", 1958.
    HD float normal(u32 item, u32 draw) const { return normal_of(block(item, 1u << 28 | draw)); }

    // The same normal, and an independent number in (0, 1], of the words that `below` uses.
    HD NormalAndUniform normal_and_uniform(u32 item, u32 draw) const {
        Philox4 b = block(item, 1u << 28 | draw);
        return {normal_of(b), positive_unit(b.word[0])};
    }

  private:
    HD static float positive_unit(u32 word) { return (float)((word >> 8) + 1) * 0x1p-24f; }  // its logarithm is finite
    HD static float normal_of(const Philox4& b) {
        float angle = (float)(b.word[3] >> 8) * (0x1p-24f * 6.2831853f);
        return math::sqrt(-2.0f * math::log(positive_unit(b.word[2]))) * math::cos(angle);
    }
};
