#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.sign[0] = io.rng.below(0, 0, 2) ? 1.0f : -1.0f;
    }
}

HD void step(State s, Io io) {
    ONCE {
        io.rewards[0] = s.sign[0];
        io.terminations[0] = true;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = s.sign[0];
    }
}
