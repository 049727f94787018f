// SPDX-License-Identifier: Apache-2.0
// The K nearest of the agents offered, kept in registers, nearest first, of equally far ones the lower number first.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

template <int K>
struct Nearest {
    static constexpr u64 NOBODY = (u64)math::INF_BITS << 32;  // infinitely far: nothing offered is farther
    u64 key[K];  // the bits of a distance, which order like the distance, above the agent's number

    HD void clear() { UNROLL for (int k = 0; k < K; ++k) key[k] = NOBODY; }

    // Any measure d that orders like the distance and is not negative. An infinite one, or NaN, is passed over.
    HD void offer(float d, int j) {
        u64 mine = (u64)math::bits(d) << 32 | (u32)j;
        if (mine >= key[K - 1]) return;
        UNROLL for (int k = K - 1; k >= 0; --k) {
            bool after_previous = k > 0 && mine < key[k > 0 ? k - 1 : 0];
            key[k] = after_previous ? key[k > 0 ? k - 1 : 0] : mine < key[k] ? mine : key[k];
        }
    }

    HD float distance(int k) const { return math::from_bits((u32)(key[k] >> 32)); }
    HD int id(int k) const { return key[k] < NOBODY ? (int)(u32)key[k] : -1; }  // -1 where fewer than K were offered
};
