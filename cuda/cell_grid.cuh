// SPDX-License-Identifier: Apache-2.0
// Who is near whom among the N agents of a replica on a square from 0 to `side`: every lane looks for the neighbours of
// its own agents. Few agents are all looked at. Many are sorted into cells, and a search goes outwards from its own
// cell until nobody farther out can be nearer than those found. Both are exact and give the same bits. A place in
// Scratch:
//
//   Neighbors<NUM_AGENTS> neighbors;
//   io.scratch->neighbors.build(x, y, SIDE);               every lane comes here; who is at x = infinity is not there
//   FOR_AGENTS (k) {
//       int i = io.scratch->neighbors.agent(k);            each agent once; neighbouring lanes have near ones
//       Nearest<K> nearest;
//       io.scratch->neighbors.find(x, y, i, nearest);      by the square of the distance, without i itself
//   }
//   team_sync();                                           before the next build
#pragma once
#include "neighbors.cuh"
#include "vecenv.cuh"

// Among fewer than 64 agents, sorting costs more than it saves.
template <int N, bool SORTED = (N >= 64)>
struct Neighbors {
    HD void build(const float*, const float*, float) {}
    HD int agent(int k) const { return k; }

    template <int K>
    HD void find(const float* x, const float* y, int i, Nearest<K>& nearest) const {
        nearest.clear();
        for (int j = 0; j < N; ++j) {
            float dx = x[j] - x[i], dy = y[j] - y[i];
            if (j != i) nearest.offer(dx * dx + dy * dy, j);
        }
    }
};

// Cells in a row of a grid in which each has four agents on average: ten neighbours lie within a cell's length, then.
HD constexpr int cells_in_a_row(int agents) {
    int cells = 1;
    while ((cells + 1) * (cells + 1) * 4 <= agents && cells < 64) ++cells;
    return cells;
}

template <int N>
struct Neighbors<N, true> {
    static constexpr int WIDTH = cells_in_a_row(N), CELLS = WIDTH * WIDTH;
    float size;        // of a cell
    int end[CELLS];    // of each cell's agents in `sorted`
    int other[CELLS];  // a second such table, while they are made
    int sorted[N];     // numbers of the agents, cell by cell, in any order within one; last those who are not there
    int absent;        // how many these are
    int start[CELLS];

    HD int cell(float place) const {  // outside, and NaN, count to the cells at the edge
        float cells = place / size;
        return cells >= WIDTH ? WIDTH - 1 : cells > 0 ? (int)cells : 0;
    }
    HD static bool is_there(float x) { return !(x >= math::from_bits(math::INF_BITS)); }

    HD void build(const float* x, const float* y, float side) {
        ONCE {
            size = side / WIDTH;
            absent = 0;
        }
        FOR_RANGE (c, CELLS) end[c] = 0;
        team_sync();
        FOR_RANGE (j, N) {
            if (is_there(x[j])) team_add(&end[cell(y[j]) * WIDTH + cell(x[j])], 1);
        }
        team_sync();
        FOR_RANGE (c, CELLS) start[c] = end[c];
        int* sums = end;
        int* next = other;
        for (int step = 1; step < CELLS; step *= 2) {  // sums over ever longer stretches
            team_sync();
            FOR_RANGE (c, CELLS) next[c] = sums[c] + (c >= step ? sums[c - step] : 0);
            int* before = sums;
            sums = next;
            next = before;
        }
        team_sync();
        FOR_RANGE (c, CELLS) {
            int total = sums[c];
            start[c] = other[c] = total - start[c];
            end[c] = total;
        }
        team_sync();
        FOR_RANGE (j, N) {
            if (is_there(x[j]))
                sorted[team_add(&other[cell(y[j]) * WIDTH + cell(x[j])], 1)] = j;
            else
                sorted[N - 1 - team_add(&absent, 1)] = j;
        }
        team_sync();
    }

    HD int agent(int k) const { return sorted[k]; }

    // The cells from `left` to `right` in one row lie one after the other in `sorted`.
    template <int K>
    HD void look(const float* x, const float* y, int i, int row, int left, int right, Nearest<K>& nearest) const {
        if (row < 0 || row >= WIDTH || left >= WIDTH || right < 0) return;
        int first = row * WIDTH + math::max(left, 0), last = row * WIDTH + math::min(right, WIDTH - 1);
        for (int k = start[first]; k < end[last]; ++k) {
            int j = sorted[k];
            float dx = x[j] - x[i], dy = y[j] - y[i];
            if (j != i) nearest.offer(dx * dx + dy * dy, j);
        }
    }

    // How far it is from `place` to where cells begin that a search has not seen, at least: a little less than that, as
    // the division of cell() is rounded. Beyond the edge cells there is nothing.
    HD float clear(float place, int middle, int ring) const {
        float left = middle > ring ? place - (middle - ring) * size : math::from_bits(math::INF_BITS);
        float right = middle + ring < WIDTH - 1 ? (middle + ring + 1) * size - place : math::from_bits(math::INF_BITS);
        return math::max(0.0f, math::min(left, right) - size * 0.001f);
    }

    template <int K>
    HD void find(const float* x, const float* y, int i, Nearest<K>& nearest) const {
        nearest.clear();
        if (!is_there(x[i])) return;
        int column = cell(x[i]), row = cell(y[i]);
        for (int ring = 1; ring <= WIDTH; ++ring) {
            for (int r = row - ring; r <= row + ring; ++r) {
                bool whole = ring == 1 || r == row - ring || r == row + ring;  // else both ends: the rest is seen
                for (int left = column - ring; left <= column + ring; left += 2 * ring) {
                    look(x, y, i, r, left, whole ? column + ring : left, nearest);
                    if (whole) break;
                }
            }
            float seen = math::min(clear(x[i], column, ring), clear(y[i], row, ring));
            bool everything = !math::is_finite(seen);
            if (everything || nearest.distance(K - 1) < seen * seen) return;
        }
    }
};
