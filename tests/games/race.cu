#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.total[0] = io.rng.below(0, 0, GOAL - 1);
        s.player[0] = io.rng.below(0, 1, 2);
    }
}

HD void step(State s, Io io) {
    ONCE {
        int player = s.player[0];
        s.total[0] = math::min(s.total[0] + 1 + io.action(player), GOAL);
        s.player[0] = 1 - player;
        if (s.total[0] == GOAL) {
            io.rewards[player] = 1;
            io.rewards[1 - player] = -1;
        }
    }
    group_sync();
    FOR_AGENTS (i) {
        io.terminations[i] = s.total[0] == GOAL;
        io.truncations[i] = !io.terminations[i] && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.acting[i] = i == s.player[0];
        for (int k = 0; k <= GOAL; ++k) io.obs[i][k] = k == s.total[0];
        io.obs[i][GOAL + 1] = i == s.player[0];
    }
}
