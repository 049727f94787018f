// SPDX-License-Identifier: Apache-2.0
// The K nearest candidates inserted so far, in registers: nearest first, the lower index first on ties.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

// Exact, one insertion at a time.
template <int K>
struct Nearest {
    static constexpr u64 NONE = (u64)math::INF_BITS << 32;  // an empty slot: at distance infinity
    u64 key[K];  // high half: the distance's bits, which order like the distance; low half: the index

    HD void clear() { UNROLL for (int k = 0; k < K; ++k) key[k] = NONE; }

    // d: any non-negative measure that orders like the distance. Infinity and NaN are ignored.
    HD void insert(float d, int j) {
        u64 candidate = (u64)math::bits(d) << 32 | (u32)j;
        if (candidate >= key[K - 1]) return;
        UNROLL for (int k = K - 1; k >= 0; --k) {
            bool after_previous = k > 0 && candidate < key[k > 0 ? k - 1 : 0];
            key[k] = after_previous ? key[k > 0 ? k - 1 : 0] : candidate < key[k] ? candidate : key[k];
        }
    }

    HD float distance(int k) const { return math::from_bits((u32)(key[k] >> 32)); }
    HD float bound() const { return distance(K - 1); }                        // farther candidates are ignored
    HD int id(int k) const { return key[k] < NONE ? (int)(u32)key[k] : -1; }  // -1 in an empty slot
};

// The smallest integer type for the index of one of N agents, or -1.
template <int N, bool SMALL = (N < 1 << 15)>
struct AgentIndex {
    typedef short Type;
};
template <int N>
struct AgentIndex<N, false> {
    typedef int Type;
};

// The smallest power of two >= n.
HD constexpr int next_power_of_two(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// Approximately the K + 2 or more nearest of N, with 32-bit keys: the index replaces the low bits of the distance. Two
// keys are ordered in two instructions, so that many are sorted at once. Callers must check is_certain(): it is false
// in the rare case that the truncated distances of two of the nearest are equal.
template <int K, int N>
struct Shortlist {
    static constexpr int SIZE = next_power_of_two(K + 2);
    static constexpr bool FITS = SIZE <= 32;  // in registers
    static constexpr u32 INDEX_MASK = next_power_of_two(N) - 1, NONE = math::INF_BITS << 1;
    u32 key[SIZE];

    // Rounded up, so that only distance 0 has the key 0.
    HD static u32 key_of(float d, int j) {
        u32 b = math::bits(d);
        return ((((b < math::INF_BITS ? b : math::INF_BITS) << 1) + INDEX_MASK) & ~INDEX_MASK) | (u32)j;
    }
    HD void clear() { UNROLL for (int k = 0; k < SIZE; ++k) key[k] = NONE; }

    // As Nearest::insert(), for d below 2^127.
    HD void insert(float d, int j) {
        u32 candidate = key_of(d, j);
        if (candidate >= key[SIZE - 1]) return;
        UNROLL for (int k = SIZE - 1; k > 0; --k) key[k] = smaller(key[k], larger(key[k - 1], candidate));
        key[0] = smaller(key[0], candidate);
    }

    // SIZE keys at once, in any order.
    HD void insert(u32 (&more)[SIZE]) {
        sort(more);
        UNROLL for (int k = 0; k < SIZE; ++k) key[k] = smaller(key[k], more[SIZE - 1 - k]);  // now a bitonic sequence
        UNROLL for (int step = SIZE / 2; step > 0; step /= 2) {
            UNROLL for (int k = 0; k < SIZE; ++k) {
                if ((k & step) == 0) order(key[k], key[k + step]);
            }
        }
    }

    HD int id(int k) const { return key[k] < NONE ? (int)(key[k] & INDEX_MASK) : -1; }
    HD float bound() const { return math::from_bits((key[K - 1] & ~INDEX_MASK) >> 1); }

    // Whether the order of two keys may differ from that of their distances.
    HD static bool is_ambiguous(u32 a, u32 b) { return (a ^ b) <= INDEX_MASK && a > INDEX_MASK && a < NONE; }
    HD bool is_certain() const {
        bool certain = true;
        UNROLL for (int k = 0; k < K; ++k) certain = certain && !is_ambiguous(key[k], key[k + 1]);
        return certain;
    }
    // Whether the list contains the K nearest, in any order.
    HD bool is_complete() const { return !is_ambiguous(key[K - 1], key[SIZE - 1]); }

    HD static u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
    HD static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
    HD static void order(u32& a, u32& b) {
        u32 first = smaller(a, b);
        b = larger(a, b);
        a = first;
    }
    // Batcher, "Sorting networks and their applications", 1968: odd-even merge sort.
    template <int HALF = 1, int STEP = 1>
    HD static void sort(u32 (&a)[SIZE]) {
        constexpr int FIRST = STEP % HALF;
        UNROLL for (int k = FIRST; k + STEP < SIZE; ++k) {
            if ((k - FIRST) / STEP % 2 == 0 && k / (2 * HALF) == (k + STEP) / (2 * HALF)) order(a[k], a[k + STEP]);
        }
        if constexpr (STEP > 1)
            sort<HALF, STEP / 2>(a);
        else if constexpr (4 * HALF <= SIZE)
            sort<2 * HALF, 2 * HALF>(a);
    }
};
