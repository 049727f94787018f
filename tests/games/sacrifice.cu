#include "game_api.cuh"

struct Scratch {};

HD int num_dead(State s) {
    int count = 0;
    for (int i = 0; i < NUM_UNITS; ++i) count += s.dead[i];
    return count;
}

HD void reset(State s, Io) {
    FOR_AGENTS (i) s.dead[i] = false;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        if (io.active[i] && io.action(i) == 1 && io.elapsed_steps < MAX_STEPS) io.terminations[i] = s.dead[i] = true;
    }
    group_sync();
    if (io.elapsed_steps < MAX_STEPS) return;
    int dead = num_dead(s);
    FOR_AGENTS (i) {
        io.rewards[i] = dead == 0 ? CONSOLATION : dead < NUM_UNITS ? 1.0f : 0.0f;
        if (s.dead[i]) continue;
        io.terminations[i] = !LIMIT;
        io.truncations[i] = LIMIT;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = 1.0f - (float)io.elapsed_steps / MAX_STEPS;
        io.obs[i][1] = num_dead(s) > s.dead[i];
        for (int k = 0; k < NUM_UNITS; ++k) io.obs[i][2 + k] = k == i;
    }
}
