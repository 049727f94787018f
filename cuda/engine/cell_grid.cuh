// SPDX-License-Identifier: Apache-2.0
// Who is near whom among the N agents of an environment on a square from 0 to `side`: every lane looks for the
// neighbours of its own agents. Few agents are all looked at. Many are sorted into cells, and a search takes in the
// cells around its own until nobody farther out can be nearer than those found. Both are exact and give the same bits.
// A place in Scratch, beside the agents' places:
//
//   Point place[NUM_AGENTS];
//   Neighbors<NUM_AGENTS> neighbors;
//
//   io.scratch->neighbors.build(place, SIDE);        every lane comes here; who is at x = infinity is not there
//   FOR_AGENTS (k) {
//       int i = io.scratch->neighbors.agent(k);      each agent once; neighbouring lanes have near ones
//       int nearest[K];                              numbers, nearest first, of equally far ones the lower number
//       io.scratch->neighbors.find(place, i, nearest);    first; -1 where there are fewer
//   }
//   group_sync();                                     before the next build
#pragma once
#include "neighbors.cuh"
#include "game_api.cuh"

struct alignas(8) Point {
    float x, y;
};

HD float squared_distance(Point a, Point b) {
    float dx = b.x - a.x, dy = b.y - a.y;
    return dx * dx + dy * dy;
}

// The ids of the K nearest to i, by the search of `neighbors`.
template <class Neighbors, int K>
HD void find_nearest(const Neighbors& neighbors, const Point* place, int i, int (&nearest)[K]) {
    if constexpr (Shortlist<K, Neighbors::COUNT>::FITS) {
        Shortlist<K, Neighbors::COUNT> list;
        list.clear();
        neighbors.search(place, i, list);
        if (list.is_certain()) {
            UNROLL for (int k = 0; k < K; ++k) nearest[k] = list.id(k);
            return;
        }
        if (list.is_complete()) {
            Nearest<K> exact;
            exact.clear();
            UNROLL for (int k = 0; k < list.SIZE; ++k) if (int j = list.id(k); j >= 0)
                exact.insert(squared_distance(place[i], place[j]), j);
            UNROLL for (int k = 0; k < K; ++k) nearest[k] = exact.id(k);
            return;
        }
    }
    Nearest<K> exact;
    exact.clear();
    neighbors.search(place, i, exact);
    UNROLL for (int k = 0; k < K; ++k) nearest[k] = exact.id(k);
}

// Among fewer, sorting costs more than it saves. A GPU's lanes go through all in step.
namespace cell_grid {
#if defined(__CUDACC__)
constexpr int MIN_AGENTS_FOR_GRID = 192;
#else
constexpr int MIN_AGENTS_FOR_GRID = 64;
#endif
}  // namespace cell_grid

template <int N, bool SORTED = (N >= cell_grid::MIN_AGENTS_FOR_GRID)>
struct Neighbors {
    static constexpr int COUNT = N;

    HD void build(const Point*, float) {}
    HD int agent(int k) const { return k; }

    template <int K>
    HD void search(const Point* place, int i, Nearest<K>& list) const {
        for (int j = 0; j < N; ++j)
            if (j != i) list.insert(squared_distance(place[i], place[j]), j);
    }
    template <int K>
    HD void search(const Point* place, int i, Shortlist<K, N>& list) const {
        constexpr int SIZE = Shortlist<K, N>::SIZE;
        for (int first = 0; first + SIZE <= N; first += SIZE) insert<SIZE>(place, i, first, list);
        if (N % SIZE > 0) insert<N % SIZE>(place, i, N / SIZE * SIZE, list);
    }
    template <int BATCH_SIZE, class List>
    HD void insert(const Point* place, int i, int first, List& list) const {
        u32 more[List::SIZE];
        UNROLL for (int k = 0; k < List::SIZE; ++k) {
            u32 key = k < BATCH_SIZE ? list.key_of(squared_distance(place[i], place[first + k]), first + k) : 0;
            more[k] = k < BATCH_SIZE && first + k != i ? key : list.NONE;
        }
        list.insert(more);
    }
    template <int K>
    HD void find(const Point* place, int i, int (&nearest)[K]) const {
        find_nearest(*this, place, i, nearest);
    }
};

// Cells in a row of a grid in which each has five agents on average: in three by three there are ten neighbours then.
HD constexpr int cells_per_side(int agents) {
    int cells = 1;
    while ((cells + 1) * (cells + 1) * 5 <= agents && cells < 64) ++cells;
    return cells;
}

template <int N>
struct Neighbors<N, true> {
    static constexpr int COUNT = N, WIDTH = cells_per_side(N), CELLS = WIDTH * WIDTH;
    float size;        // of a cell
    int absent;        // how many are not there
    int end[CELLS];    // of each cell's agents in `sorted`
    int other[CELLS];  // a second such table, while they are made
    int start[CELLS];
    typename AgentIndex<N>::Type
        index[N];     // of the agents, cell by cell, in any order within one; last those who are not there
    Point sorted[N];  // their places

    HD int cell(float place) const {  // outside, and NaN, count to the cells at the edge
        float cells = place / size;
        return cells >= WIDTH ? WIDTH - 1 : cells > 0 ? (int)cells : 0;
    }
    HD int cell(Point place) const { return cell(place.y) * WIDTH + cell(place.x); }
    HD static bool is_present(Point place) { return !(place.x >= math::from_bits(math::INF_BITS)); }

    HD void build(const Point* place, float side) {
        ONCE {
            size = side / WIDTH;
            absent = 0;
        }
        FOR_RANGE (c, CELLS) end[c] = 0;
        group_sync();
        FOR_RANGE (j, N) {
            if (is_present(place[j])) atomic_add(&end[cell(place[j])], 1);
        }
        group_sync();
        FOR_RANGE (c, CELLS) start[c] = end[c];
        int* sums = end;
        int* next = other;
        for (int step = 1; step < CELLS; step *= 2) {  // sums over ever longer stretches
            group_sync();
            FOR_RANGE (c, CELLS) next[c] = sums[c] + (c >= step ? sums[c - step] : 0);
            int* before = sums;
            sums = next;
            next = before;
        }
        group_sync();
        FOR_RANGE (c, CELLS) {
            int total = sums[c];
            start[c] = other[c] = total - start[c];
            end[c] = total;
        }
        group_sync();
        FOR_RANGE (j, N) {
            int at = is_present(place[j]) ? atomic_add(&other[cell(place[j])], 1) : N - 1 - atomic_add(&absent, 1);
            index[at] = j;
            sorted[at] = place[j];
        }
        group_sync();
    }

    HD int agent(int k) const { return index[k]; }

    // Whether someone in cells beyond an edge at this distance from an agent may be as near as `bound`, a square. The
    // edge counts a little nearer than it is, as the division of cell() is rounded.
    HD bool may_hold_nearer(float distance, float bound) const {
        float clear = math::max(0.0f, distance - size * 0.001f);
        return !(bound < clear * clear);
    }

    template <class List>
    HD void search(const Point* place, int i, List& list) const {
        Point own = place[i];
        if (!is_present(own)) return;
        // Three cells by three, at the edge of the square too: an agent there has neighbours on one side only.
        int west = math::max(0, math::min(cell(own.x) - 1, WIDTH - 3)), east = math::min(west + 2, WIDTH - 1);
        int south = math::max(0, math::min(cell(own.y) - 1, WIDTH - 3)), north = math::min(south + 2, WIDTH - 1);
        int left = 0, right = -1, bottom = 0, top = -1;  // what has been looked at
        for (bool more = true; more;) {
            for (int row = south; row <= north; ++row) {
                bool again = bottom <= row && row <= top;  // there only the ends are new
                for (int part = 0; part <= again; ++part) {
                    int first = again && part ? right + 1 : west, last = again && !part ? left - 1 : east;
                    if (first > last) continue;
                    // The cells of one row lie one after the other in `sorted`.
                    for (int k = start[row * WIDTH + first]; k < end[row * WIDTH + last]; ++k) {
                        int j = index[k];
                        if (j != i) list.insert(squared_distance(own, sorted[k]), j);
                    }
                }
            }
            left = west, right = east, bottom = south, top = north;
            float bound = list.bound();
            west -= left > 0 && may_hold_nearer(own.x - left * size, bound);
            east += right < WIDTH - 1 && may_hold_nearer((right + 1) * size - own.x, bound);
            south -= bottom > 0 && may_hold_nearer(own.y - bottom * size, bound);
            north += top < WIDTH - 1 && may_hold_nearer((top + 1) * size - own.y, bound);
            more = west < left || east > right || south < bottom || north > top;
        }
    }

    template <int K>
    HD void find(const Point* place, int i, int (&nearest)[K]) const {
        find_nearest(*this, place, i, nearest);
    }
};
