#include "game_api.cuh"

struct Scratch {};

HD void reset(State, Io) {}

HD void step(State s, Io io) {
    ONCE {
        io.rewards[0] = s.table[0];
        io.truncations[0] = io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        for (int k = 0; k < 3; ++k) io.obs[0][k] = s.table[k];
        io.obs[0][3] = (float)s.stage[0];
    }
}
