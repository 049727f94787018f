// SPDX-License-Identifier: Apache-2.0
// The K nearest of those offered, kept in registers, nearest first, of equally far ones the lower number first.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

// Exact, one by one.
template <int K>
struct Nearest {
    static constexpr u64 NONE = (u64)math::INF_BITS << 32;  // infinitely far: nothing offered is farther
    u64 key[K];  // the bits of a distance, which order like the distance, above the agent's number

    HD void clear() { UNROLL for (int k = 0; k < K; ++k) key[k] = NONE; }

    // Any measure d that orders like the distance and is not negative. An infinite one, or NaN, is passed over.
    HD void insert(float d, int j) {
        u64 candidate = (u64)math::bits(d) << 32 | (u32)j;
        if (candidate >= key[K - 1]) return;
        UNROLL for (int k = K - 1; k >= 0; --k) {
            bool after_previous = k > 0 && candidate < key[k > 0 ? k - 1 : 0];
            key[k] = after_previous ? key[k > 0 ? k - 1 : 0] : candidate < key[k] ? candidate : key[k];
        }
    }

    HD float distance(int k) const { return math::from_bits((u32)(key[k] >> 32)); }
    HD float bound() const { return distance(K - 1); }                        // of who may still be among them
    HD int id(int k) const { return key[k] < NONE ? (int)(u32)key[k] : -1; }  // -1 where fewer than K were offered
};

// What the number of one of N agents, or -1, is kept in.
template <int N, bool SMALL = (N < 1 << 15)>
struct AgentIndex {
    typedef short Type;
};
template <int N>
struct AgentIndex<N, false> {
    typedef int Type;
};

// The least power of two that is not below n.
HD constexpr int next_power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// A few more than the K nearest of N in half the bits: a distance loses its last ones to the number. An order takes two
// instructions then, so that many are sorted at once. Whoever asks it must ask is_certain() too: it says whether the
// bits that are left tell all apart, which they mostly do.
template <int K, int N>
struct Shortlist {
    static constexpr int SIZE = next_power_of_two(K + 2);
    static constexpr bool FITS = SIZE <= 32;  // in registers
    static constexpr u32 INDEX_MASK = next_power_of_two(N) - 1, NONE = math::INF_BITS << 1;
    u32 key[SIZE];

    // Rounded up, so that no distance but 0 itself gives 0.
    HD static u32 key_of(float d, int j) {
        u32 b = math::bits(d);
        return ((((b < math::INF_BITS ? b : math::INF_BITS) << 1) + INDEX_MASK) & ~INDEX_MASK) | (u32)j;
    }
    HD void clear() { UNROLL for (int k = 0; k < SIZE; ++k) key[k] = NONE; }

    // As Nearest has it. Below 2^127.
    HD void insert(float d, int j) {
        u32 candidate = key_of(d, j);
        if (candidate >= key[SIZE - 1]) return;
        UNROLL for (int k = SIZE - 1; k > 0; --k) key[k] = smaller(key[k], larger(key[k - 1], candidate));
        key[0] = smaller(key[0], candidate);
    }

    // SIZE keys at once, in any order.
    HD void insert(u32 (&more)[SIZE]) {
        sort(more);
        UNROLL for (int k = 0; k < SIZE; ++k) key[k] = smaller(key[k], more[SIZE - 1 - k]);  // up, then down
        UNROLL for (int step = SIZE / 2; step > 0; step /= 2) UNROLL for (int k = 0; k < SIZE; ++k) if ((k & step) == 0)
            order(key[k], key[k + step]);
    }

    HD int id(int k) const { return key[k] < NONE ? (int)(key[k] & INDEX_MASK) : -1; }
    HD float bound() const { return math::from_bits((key[K - 1] & ~INDEX_MASK) >> 1); }

    // Whether two keys may be in the wrong order.
    HD static bool is_ambiguous(u32 a, u32 b) { return (a ^ b) <= INDEX_MASK && a > INDEX_MASK && a < NONE; }
    HD bool is_certain() const {
        bool certain = true;
        UNROLL for (int k = 0; k < K; ++k) certain = certain && !is_ambiguous(key[k], key[k + 1]);
        return certain;
    }
    // Whether the K nearest are all here, in whatever order.
    HD bool is_complete() const { return !is_ambiguous(key[K - 1], key[SIZE - 1]); }

    HD static u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
    HD static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
    HD static void order(u32& a, u32& b) {
        u32 first = smaller(a, b);
        b = larger(a, b);
        a = first;
    }
    // Batcher, "Sorting networks and their applications", 1968: odd-even merges of ever longer sorted stretches.
    template <int HALF = 1, int STEP = 1>
    HD static void sort(u32 (&a)[SIZE]) {
        UNROLL for (int k = STEP % HALF; k + STEP < SIZE;
                    ++k) if ((k - STEP % HALF) / STEP % 2 == 0 && k / (2 * HALF) == (k + STEP) / (2 * HALF))
            order(a[k], a[k + STEP]);
        if constexpr (STEP > 1)
            sort<HALF, STEP / 2>(a);
        else if constexpr (4 * HALF <= SIZE)
            sort<2 * HALF, 2 * HALF>(a);
    }
};
