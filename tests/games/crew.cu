#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE s
        .place[0] = io.rng.below(0, 0, LENGTH);
    FOR_RANGE (j, NUM_HELPERS) s.rest[j] = io.rng.below(1 + j, 0, 3);
}

HD void step(State s, Io io) {
    ONCE {
        s.place[0] += io.action(0) - 2;  // -2 .. 2; what leaves the road is masked
        io.rewards[0] = (float)s.place[0];
        io.truncations[0] = io.elapsed_steps >= MAX_STEPS;
    }
    FOR_RANGE (j, NUM_HELPERS) {
        int i = 1 + j;
        if (!io.active[i]) continue;
        bool hands_over = io.action(i, 0) == 1;
        s.rest[j] = hands_over ? 3 : math::max(s.rest[j] - 1 - io.action(i, 1), 0);
        io.rewards[i] = hands_over;
        io.terminations[i] = io.elapsed_steps == 3 + j;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS && !io.terminations[i];
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        bool driver = i == 0;
        io.obs[i][0] = 1.0f + s.place[0];
        io.obs[i][1] = 1.0f + io.elapsed_steps;
        for (int move = 0; driver && move < 5; ++move) {
            int there = s.place[0] + move - 2;
            io.action_mask[i][move] = there >= 0 && there < LENGTH;
        }
        if (driver) continue;
        int rest = s.rest[i - 1];
        io.obs[i][2] = 1.0f + rest;
        io.obs[i][3] = 1.0f + i;
        io.action_mask[i][0] = true;
        io.action_mask[i][1] = rest == 0;
        for (int k = 0; k < 3; ++k) io.action_mask[i][5 + k] = k <= rest;
    }
}
