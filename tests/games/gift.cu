#include "game_api.cuh"

struct Scratch {};

HD void reset(State, Io) {}

HD void step(State, Io io) {
    FOR_AGENTS (i) {
        int given = 0;
        for (int k = 0; k < NUM_AGENTS; ++k) given += k != i && io.action(k) == 1;
        io.rewards[i] = GIFT * (float)given - (float)(io.action(i) == 1);
        io.terminations[i] = true;
    }
}

HD void observe(State, Io io) {
    FOR_AGENTS (i) io.obs[i][0] = 1;
}
