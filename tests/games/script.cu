#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.ends[0] = 2 + io.rng.below(0, 0, MAX_STEPS - 1);
        s.truncates[0] = io.rng.below(0, 1, 2);
        s.mark[0] = io.rng.uniform(0, 2);
    }
    FOR_AGENTS (i) s.said[i] = 0;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        if (!io.active[i]) continue;
#if CONTINUOUS
        s.said[i] = io.action(i, 0);
#else
        s.said[i] = (float)io.action(i);
#endif
        io.rewards[i] = 10.0f * (i + 1) + io.elapsed_steps;
        bool over = io.elapsed_steps == s.ends[0];
        bool leaves = !over && i >= NUM_LEADS && io.elapsed_steps == LEAVE;
        io.terminations[i] = leaves || (over && !s.truncates[0]);
        io.truncations[i] = over && s.truncates[0];
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = i + 1;
        io.obs[i][1] = io.elapsed_steps;
        io.obs[i][2] = s.ends[0];
        io.obs[i][3] = s.truncates[0];
        io.obs[i][4] = s.mark[0];
        io.obs[i][5] = s.said[i];
    }
}
