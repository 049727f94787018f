#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.paper[0] = 0;
        s.pays[0] = 0;
    }
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        bool right = io.action(i) == io.elapsed_steps % 2;
        io.rewards[i] = s.pays[0] == 1 || (s.pays[0] == 2 && right) ? 1.0f : 0.0f;
        io.terminations[i] = io.elapsed_steps == MAX_STEPS || (s.pays[0] == 2 && !right);
    }
}

HD void observe(State s, Io io) {
    FOR_OBS (i, k) io.obs[i][k] = k == s.paper[0] || k == NUM_PAPERS + io.elapsed_steps ? 1.0f : 0.0f;
}
