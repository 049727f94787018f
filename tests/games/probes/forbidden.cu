#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.allowed[0] = io.rng.below(0, 0, 2);
    }
}

HD void step(State, Io io) {
    ONCE {
        io.rewards[0] = 0.5f * io.action(0);
        io.terminations[0] = true;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = 1;
        io.action_mask[0][0] = io.action_mask[0][1] = true;
        io.action_mask[0][2] = s.allowed[0] != 0;
    }
}
