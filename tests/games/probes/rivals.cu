#include "game_api.cuh"

struct Scratch {};

HD void reset(State, Io) {}

HD void step(State, Io io) {
    FOR_AGENTS (i) {
        io.rewards[i] = io.action(i) == (i < END_LEFT ? 1 : 2);
        io.terminations[i] = true;
    }
}

HD void observe(State, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = 1;
        if (i >= END_LEFT) io.obs[i][1] = 1;
    }
}
