// SPDX-License-Identifier: Apache-2.0
// MPE2's simple_adversary: good agents observe which landmark is the goal, the adversary does not. Declared in
// gpu_vecenv/envs/simple_adversary.py.
#include "particles.cuh"

struct Scratch : Particles {
    float distance_to_goal[NUM_AGENTS];
};

HD bool is_adversary(int i) { return i < END_ADVERSARY; }

HD Entity agent_entity(State, int) { return {0.15f, false, 5, NO_SPEED_LIMIT}; }
HD Entity landmark_entity() { return {0.08f, false, 0, 0}; }

HD void reset(State s, Io io) {
    place_agents_randomly(s, io);
    FOR_RANGE (j, NUM_LANDMARKS) random_position(s.landmark[j], io, NUM_AGENTS + j, 1);
    ONCE {
        s.goal[0] = io.rng.below(0, 0, NUM_LANDMARKS);
    }
}

HD void step(State s, Io io) {
    move_agents(s, io, *io.scratch);

    const float* goal = s.landmark[s.goal[0]];
    FOR_AGENTS (i) io.scratch->distance_to_goal[i] = distance(s.position[i], goal);
    group_sync();
    float adversary = io.scratch->distance_to_goal[FIRST_ADVERSARY], good = io.scratch->distance_to_goal[FIRST_AGENT];
    for (int i = FIRST_AGENT; i < END_AGENT; ++i) good = math::min(good, io.scratch->distance_to_goal[i]);
    FOR_AGENTS (i) io.rewards[i] = is_adversary(i) ? -adversary : adversary - good;
    set_end_flags(io, false);
}

// The goal's relative position (good agents only), landmarks, other agents.
HD void observe(State s, Io io) {
    find_observed(s, *io.scratch);
    FOR_OBS (i, k) {
        int slot = is_adversary(i) ? k : k - 2;
        if (slot < 0)
            io.obs[i][k] = s.landmark[s.goal[0]][k] - s.position[i][k];
        else if (slot < RELATIVE_POSITIONS_SIZE)
            io.obs[i][k] = relative_position(s, *io.scratch, i, slot);
    }
}
