// SPDX-License-Identifier: Apache-2.0
// Apples that grow only while the river is clean; players clean it with a beam of their own. Declared in
// gpu_vecenv/envs/cleanup.py.
#include "commons.cuh"

constexpr int RIVER = 3, DIRTY_AT_FIRST = 5;  // what a cell is; from RIVER + 1 on it can be dirty
constexpr u8 DIRT_NOW = 1, CLEANED = 2;       // in the field `dirt`; CLEANED until the step ends
enum OwnChannel { WATER = FIRST_OWN, DIRTY, CLEANING };

HD void look_own(State s, int y, int x, bool outside, Observation* pixel) {
    pixel[WATER] = !outside && s.terrain[y][x] >= RIVER ? SHOWN : 0;
    pixel[DIRTY] = !outside && s.dirt[y][x] ? SHOWN : 0;
    pixel[CLEANING] = !outside && s.beam[y][x] & CLEAN_BEAM ? SHOWN : 0;
}

HD void reset(State s, Io io) {
    FOR_RANGE (k, HEIGHT * WIDTH) {
        int y = k / WIDTH, x = k % WIDTH;
        s.apple[y][x] = 0;
        s.dirt[y][x] = s.terrain[y][x] == DIRTY_AT_FIRST ? DIRT_NOW : 0;
    }
    FOR_AGENTS (i) s.clean_wait[i] = s.cleaned[i] = 0;
    place_all(s, io);
}

// One more cell of the river is dirty, all clean ones equally probable. By one thread.
HD void pollute(State s, Io io) {
    int clean = NUM_RIVER_CELLS - io.scratch->dirty;
    if (io.elapsed_steps <= DIRT_SPAWN_DELAY || clean == 0) return;
    if (io.rng.uniform(0, DIRT) >= DIRT_SPAWN_PROBABILITY) return;
    int n = io.rng.below(0, DIRTY_CELL, clean);
    for (int k = 0; k < NUM_RIVER_CELLS; ++k) {
        int x = s.river[k][0], y = s.river[k][1];
        if (s.dirt[y][x] || n-- > 0) continue;
        s.dirt[y][x] = DIRT_NOW;
        return;
    }
}

HD void clean(State s, Io io) {
    for (int i = 0; i < NUM_AGENTS; ++i) {
        if (!fires(s, io, i, CLEAN, CLEAN_COOLDOWN, &s.clean_wait[i])) continue;
        fire(s, i, CLEAN_BEAM, [&](int y, int x) {
            if (s.dirt[y][x] == 0) return false;
            s.dirt[y][x] = CLEANED;  // it stops all beams of this step
            s.cleaned[i] += 1;
            return true;
        });
    }
}

HD void step(State s, Io io) {
    begin_step(s, io);
    ONCE {
        io.scratch->dirty = 0;
    }
    group_sync();
    FOR_RANGE (k, NUM_RIVER_CELLS) {
        if (s.dirt[s.river[k][1]][s.river[k][0]]) atomic_add(&io.scratch->dirty, 1);
    }
    group_sync();
    float share = (float)io.scratch->dirty / NUM_RIVER_CELLS;
    float growth = (share - THRESHOLD_DEPLETION) / (THRESHOLD_RESTORATION - THRESHOLD_DEPLETION);
    float probability = MAX_APPLE_GROWTH_RATE * math::min(growth, 1.0f);
    FOR_RANGE (k, HEIGHT * WIDTH) {  // before players move
        int y = k / WIDTH, x = k % WIDTH;
        bool bare = s.terrain[y][x] == ORCHARD && s.apple[y][x] == 0;
        if (bare && io.rng.uniform(k, GROWTH) < probability) grow(s, io, y, x);
    }
    group_sync();
    ONCE {
        pollute(s, io);
        move_and_zap(s, io);
        clean(s, io);
        respawn(s, io);
        for (int k = 0; k < NUM_RIVER_CELLS; ++k) {
            u8* dirt = &s.dirt[s.river[k][1]][s.river[k][0]];
            if (*dirt == CLEANED) *dirt = 0;
        }
    }
    end_step(s, io);
}
