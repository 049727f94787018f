// SPDX-License-Identifier: Apache-2.0
// Apples that grow the faster the more of them are near, and never again where none is. Declared in
// gpu_vecenv/envs/harvest.py.
#include "commons.cuh"

constexpr u8 GROWS = 254, WAITS = 255;  // in place of a number of apples: in this step; not in the coming one

HD void look_own(State, int, int, bool, Observation*) {}

// Apples at most REGROWTH_RADIUS away, but for the one in the cell itself.
HD int count_near(State s, int y, int x) {
    int found = 0;
    for (int dy = -REGROWTH_RADIUS; dy <= REGROWTH_RADIUS; ++dy)
        for (int dx = -REGROWTH_RADIUS; dx <= REGROWTH_RADIUS; ++dx) {
            bool is_near = dx * dx + dy * dy <= REGROWTH_RADIUS * REGROWTH_RADIUS && (dx != 0 || dy != 0);
            bool inside = y + dy >= 0 && y + dy < HEIGHT && x + dx >= 0 && x + dx < WIDTH;
            found += is_near && inside && s.apple[y + dy][x + dx];
        }
    return found;
}

HD bool grows(Io io, int k, int near) {
    if (near == WAITS) return false;
    float probability = near == 0   ? REGROWTH_NEAR_0
                        : near == 1 ? REGROWTH_NEAR_1
                        : near == 2 ? REGROWTH_NEAR_2
                                    : REGROWTH_NEAR_3;
    return io.rng.uniform(k, GROWTH) < probability;
}

HD void reset(State s, Io io) {
    FOR_RANGE (k, HEIGHT * WIDTH) {
        int y = k / WIDTH, x = k % WIDTH;
        s.apple[y][x] = s.terrain[y][x] == ORCHARD;
        s.near[y][x] = WAITS;
    }
    place_all(s, io);
}

HD void step(State s, Io io) {
    begin_step(s, io);
    FOR_RANGE (k, HEIGHT * WIDTH) {  // by the apples that were near one step ago
        int y = k / WIDTH, x = k % WIDTH;
        if (s.terrain[y][x] != ORCHARD) continue;
        int near = s.apple[y][x] ? WAITS : grows(io, k, s.near[y][x]) ? GROWS : count_near(s, y, x);
        s.near[y][x] = (u8)near;
    }
    group_sync();
    ONCE {
        move_and_zap(s, io);
        respawn(s, io);
    }
    group_sync();
    FOR_RANGE (k, HEIGHT * WIDTH) {
        int y = k / WIDTH, x = k % WIDTH;
        if (s.near[y][x] != GROWS) continue;
        s.near[y][x] = WAITS;
        grow(s, io, y, x);
    }
    end_step(s, io);
}
