// SPDX-License-Identifier: Apache-2.0
#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    FOR_AGENTS (i)
        for (int axis = 0; axis < 2; ++axis) s.place[i][axis] = io.rng.uniform(i, axis);
    ONCE {
        s.clock[0] = 0;
        s.wanted[0] = 0;
    }
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        s.place[i][0] += 0.25f;
        io.rewards[i] = s.place[i][1];
        io.truncations[i] = io.elapsed_steps >= 6;
    }
    group_sync();
    ONCE {
        const float nan = math::from_bits(0x7fc00000u), infinity = math::from_bits(0x7f800000u);
        s.clock[0] += 0.5;
        int fault = io.action(1);
        if (fault == 1) s.place[1][0] = nan;
        if (fault == 2) s.place[0][1] = -infinity;
        if (fault == 3) io.rewards[1] = nan;
        if (fault == 4) io.rewards[0] = infinity;
        if (fault == 5) s.wanted[0] = 1;
        if (fault == 6) s.clock[0] = nan;
        if (fault == 7) ((float*)s.place)[4] = 7;
        if (fault == 8) ((float*)s.place)[-1] = 7;
        if (fault == 9) s.wanted[0] = 2;
        if (fault == 10) io.rewards[2] = 7;
        if (fault == 11) io.truncations[3] = true;
        if (fault == 12) *(float*)64 = 7;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = s.place[i][0];
        io.obs[i][1] = s.place[i][1];
        io.obs[i][2] = s.wanted[0] == 1 ? math::from_bits(0x7fc00000u) : 0;
    }
    ONCE
        if (s.wanted[0] == 2) io.obs[2][0] = 7;
}
