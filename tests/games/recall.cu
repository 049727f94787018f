#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    FOR_AGENTS (i) s.cue[i] = io.rng.below(i, 0, 2) == 1 ? 1.0f : -1.0f;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        bool last = io.elapsed_steps == DELAY + 1;
        bool right = (io.action(i) == 1) == (s.cue[i] > 0);
        io.rewards[i] = !last ? 0.0f : right ? 1.0f : -1.0f;
        io.terminations[i] = last;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = io.elapsed_steps == 0 ? s.cue[i] : 0.0f;
        io.obs[i][1] = (float)io.elapsed_steps / (DELAY + 1);
    }
}
