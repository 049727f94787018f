// SPDX-License-Identifier: Apache-2.0
// The K nearest neighbours of each of N agents on a square from 0 to `side`. Few agents: brute force. Many: agents are
// sorted into cells, and a search visits cells around the agent's own until no unvisited cell can contain a nearer
// agent. Both are exact and bitwise equal. A game has in its Scratch, beside the agents' positions:
//
//   Point position[NUM_AGENTS];
//   Neighbors<NUM_AGENTS> neighbors;
//
//   io.scratch->neighbors.build(position, SIDE);     called by every thread; agents at x = infinity are ignored
//   FOR_AGENTS (k) {
//       int i = io.scratch->neighbors.agent(k);      each agent once; neighbouring threads get agents near each other
//       int nearest[K];                              agent indices, nearest first, the lower index on ties; -1 where
//       io.scratch->neighbors.find(position, i, nearest);  there are fewer
//   }
//   group_sync();                                    before the next build
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

// The indices of the K agents nearest to i.
template <class Neighbors, int K>
HD void find_nearest(const Neighbors& neighbors, const Point* position, int i, int (&nearest)[K]) {
    if constexpr (Shortlist<K, Neighbors::COUNT>::FITS) {
        Shortlist<K, Neighbors::COUNT> list;
        list.clear();
        neighbors.search(position, i, list);
        if (list.is_certain()) {
            UNROLL for (int k = 0; k < K; ++k) nearest[k] = list.id(k);
            return;
        }
        if (list.is_complete()) {
            Nearest<K> exact;
            exact.clear();
            UNROLL for (int k = 0; k < list.SIZE; ++k) {
                int j = list.id(k);
                if (j >= 0) exact.insert(squared_distance(position[i], position[j]), j);
            }
            UNROLL for (int k = 0; k < K; ++k) nearest[k] = exact.id(k);
            return;
        }
    }
    Nearest<K> exact;
    exact.clear();
    neighbors.search(position, i, exact);
    UNROLL for (int k = 0; k < K; ++k) nearest[k] = exact.id(k);
}

// With fewer agents sorting costs more than it saves; on a GPU brute force has no divergence.
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
    HD void search(const Point* position, int i, Nearest<K>& list) const {
        for (int j = 0; j < N; ++j)
            if (j != i) list.insert(squared_distance(position[i], position[j]), j);
    }
    template <int K>
    HD void search(const Point* position, int i, Shortlist<K, N>& list) const {
        constexpr int SIZE = Shortlist<K, N>::SIZE;
        for (int first = 0; first + SIZE <= N; first += SIZE) insert<SIZE>(position, i, first, list);
        if (N % SIZE > 0) insert<N % SIZE>(position, i, N / SIZE * SIZE, list);
    }
    template <int BATCH_SIZE, class List>
    HD void insert(const Point* position, int i, int first, List& list) const {
        u32 more[List::SIZE];
        UNROLL for (int k = 0; k < List::SIZE; ++k) {
            u32 key = k < BATCH_SIZE ? list.key_of(squared_distance(position[i], position[first + k]), first + k) : 0;
            more[k] = k < BATCH_SIZE && first + k != i ? key : list.NONE;
        }
        list.insert(more);
    }
    template <int K>
    HD void find(const Point* position, int i, int (&nearest)[K]) const {
        find_nearest(*this, position, i, nearest);
    }
};

// Cells per side such that a cell has five agents or more on average.
HD constexpr int cells_per_side(int agents) {
    int cells = 1;
    while ((cells + 1) * (cells + 1) * 5 <= agents && cells < 64) ++cells;
    return cells;
}

template <int N>
struct Neighbors<N, true> {
    static constexpr int COUNT = N, WIDTH = cells_per_side(N), CELLS = WIDTH * WIDTH;
    float size;        // of a cell
    int absent;        // number of agents that are ignored
    int start[CELLS];  // range of each cell's agents in `sorted`
    int end[CELLS];
    int other[CELLS];                       // second buffer of the prefix sum; then the next free slot of each cell
    typename AgentIndex<N>::Type index[N];  // agents cell by cell, unordered within a cell; ignored ones last
    Point sorted[N];                        // their positions

    HD int cell(float x) const {  // outside positions and NaN belong to the cells at the edge
        float cells = x / size;
        return cells >= WIDTH ? WIDTH - 1 : cells > 0 ? (int)cells : 0;
    }
    HD int cell(Point p) const { return cell(p.y) * WIDTH + cell(p.x); }
    HD static bool is_present(Point p) { return !(p.x >= math::from_bits(math::INF_BITS)); }

    HD void build(const Point* position, float side) {
        ONCE {
            size = side / WIDTH;
            absent = 0;
        }
        FOR_RANGE (c, CELLS) end[c] = 0;
        group_sync();
        FOR_RANGE (j, N) {
            if (is_present(position[j])) atomic_add(&end[cell(position[j])], 1);
        }
        group_sync();
        FOR_RANGE (c, CELLS) start[c] = end[c];
        int* sums = end;
        int* next = other;
        for (int step = 1; step < CELLS; step *= 2) {  // prefix sum in log2(CELLS) passes
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
            int at =
                is_present(position[j]) ? atomic_add(&other[cell(position[j])], 1) : N - 1 - atomic_add(&absent, 1);
            index[at] = j;
            sorted[at] = position[j];
        }
        group_sync();
    }

    HD int agent(int k) const { return index[k]; }

    // True if cells beyond an edge at this distance can contain an agent whose squared distance is at most `bound`. The
    // margin covers the rounding of the division in cell().
    HD bool may_hold_nearer(float distance, float bound) const {
        float clear = math::max(0.0f, distance - size * 0.001f);
        return !(bound < clear * clear);
    }

    template <class List>
    HD void search(const Point* position, int i, List& list) const {
        Point own = position[i];
        if (!is_present(own)) return;
        // Three by three cells; at the edge of the square those nearest to the agent.
        int west = math::max(0, math::min(cell(own.x) - 1, WIDTH - 3)), east = math::min(west + 2, WIDTH - 1);
        int south = math::max(0, math::min(cell(own.y) - 1, WIDTH - 3)), north = math::min(south + 2, WIDTH - 1);
        int left = 0, right = -1, bottom = 0, top = -1;  // range of cells already visited
        for (bool more = true; more;) {
            for (int row = south; row <= north; ++row) {
                bool again = bottom <= row && row <= top;  // of such a row only the ends are new
                for (int part = 0; part <= again; ++part) {
                    int first = again && part ? right + 1 : west, last = again && !part ? left - 1 : east;
                    if (first > last) continue;
                    // The cells of a row are contiguous in `sorted`.
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
    HD void find(const Point* position, int i, int (&nearest)[K]) const {
        find_nearest(*this, position, i, nearest);
    }
};
