#include "game_api.cuh"

struct Scratch {};

HD void reset(State, Io) {}

HD void step(State, Io io) {
    FOR_AGENTS (i) {
        if (!io.active[i]) continue;
        io.rewards[i] = 1;
        io.terminations[i] = io.elapsed_steps == i + 1;
    }
}

HD void observe(State, Io io) {
    FOR_AGENTS (i) io.obs[i][0] = io.active[i] ? (float)(i + 1 - io.elapsed_steps) / NUM_PLAYERS : 1.0f;
}
