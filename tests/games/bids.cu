#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    FOR_RANGE (j, BIDDERS) {
        s.bid[j] = 2 * io.rng.uniform(j, 0) - 1;
        s.there[j] = io.rng.uniform(j, 1) < 0.4f;
    }
    ONCE {
        s.limit[0] = io.rng.uniform(BIDDERS, 0) - 0.5f;
    }
}

HD void step(State s, Io io) {
    ONCE {
        bool above = false;
        for (int j = 0; j < BIDDERS; ++j) above |= s.there[j] && s.bid[j] > s.limit[0];
        io.rewards[0] = io.action(0) == above;
        io.terminations[0] = true;
    }
}

// Absent bidders have a bid too: a network that counts them is wrong.
HD void observe(State s, Io io) {
    FOR_OBS (i, k) {
        int j = (k - 1) / 2;
        io.obs[i][k] = k == 0 ? s.limit[0] : k % 2 == 1 ? s.bid[j] : (float)s.there[j];
    }
}
