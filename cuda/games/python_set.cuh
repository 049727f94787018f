// SPDX-License-Identifier: Apache-2.0
// In which order CPython, 3.8 or newer with 64 bits, iterates a set of cells (x, y): Objects/setobject.c,
// tupleobject.c.
#pragma once
#include "game_api.cuh"

// A hash table of items 0, 1, …, up to MAX_ITEMS of them.
template <int MAX_ITEMS>
struct PythonSet {
    static constexpr int EMPTY = -1, LINEAR_PROBES = 9;
    HD static constexpr bool is_crowded(int items, int slots) { return 5 * items >= 3 * (slots - 1); }
    HD static constexpr int grown(int items) {
        int slots = 8;
        while (slots <= 4 * items) slots *= 2;
        return slots;
    }
    HD static constexpr int capacity() {
        int slots = 8;
        for (int items = 1; items <= MAX_ITEMS; ++items)
            if (is_crowded(items, slots)) slots = grown(items);
        return slots;
    }

    CheckedArray<int, capacity()> slot;

    // hash((x, y)), but for one in 2^64.
    HD static u64 hash(int x, int y) {
        u64 sum = 2870177450012600261u;
        for (int k = 0; k < 2; ++k) {
            sum += (u64)(k == 0 ? x : y) * 14029467366897019727u;
            sum = (sum << 31 | sum >> 33) * 11400714785074694791u;
        }
        return sum + (2 ^ 2870177450012600261u ^ 3527539u);
    }

    HD void insert(int item, u64 hash, int slots) {
        u64 mask = (u64)slots - 1, first = hash & mask, perturb = hash;
        for (;;) {
            int probes = first + LINEAR_PROBES <= mask ? LINEAR_PROBES : 0;
            for (int k = (int)first; k <= (int)first + probes; ++k) {
                if (slot[k] != EMPTY) continue;
                slot[k] = item;
                return;
            }
            perturb >>= 5;
            first = (first * 5 + 1 + perturb) & mask;
        }
    }

    // Replaces items, which are inserted into an empty set one after the other, by the order of their iteration.
    // hash_of(item) is the hash of one.
    template <class Items, class Hash>
    HD void order(Items& items, int count, Hash hash_of) {
        int slots = 8;
        for (int k = 0; k < slots; ++k) slot[k] = EMPTY;
        for (int n = 1; n <= count; ++n) {
            insert(items[n - 1], hash_of(items[n - 1]), slots);
            if (!is_crowded(n, slots)) continue;
            list(items, slots);
            slots = grown(n);
            for (int k = 0; k < slots; ++k) slot[k] = EMPTY;
            for (int k = 0; k < n; ++k) insert(items[k], hash_of(items[k]), slots);
        }
        list(items, slots);
    }

  private:
    template <class Items>
    HD void list(Items& items, int slots) {
        int n = 0;
        for (int k = 0; k < slots; ++k)
            if (slot[k] != EMPTY) items[n++] = slot[k];
    }
};
