#include "game_api.cuh"

struct Scratch {
    bool begun;  // one byte, as small as an empty one
};

HD void reset(State s, Io io) {
    FOR_AGENTS (i) s.colour[i] = io.rng.below(i, 0, 60);
}

HD void step(State s, Io io) {
    ONCE io
        .scratch->begun = true;
    group_sync();
    FOR_AGENTS (i) {
        if (!io.active[i]) continue;
        s.colour[i] += 1 + io.action(i);
        io.rewards[i] = s.colour[i] / 3.0f;
        io.terminations[i] = i < END_SCOUT && io.elapsed_steps == 2 + i;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS && !io.terminations[i];
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        bool scout = i < END_SCOUT;
        for (int y = 0; y < (scout ? 1 : 2); ++y)
            for (int x = 0; x < (scout ? 2 : 3); ++x)
                for (int c = 0; c < 3; ++c)
                    io.obs[i][(y * 3 + x) * 3 + c] = (u8)(1 + s.colour[i] + 60 * y + 20 * x + c);
        // Of a scout's two choices one is allowed; of the pilot's four, two or three.
        for (int k = 0; k < (scout ? 2 : 4); ++k) io.action_mask[i][k] = (s.colour[i] + k) % (scout ? 2 : 3) != 0;
    }
}
