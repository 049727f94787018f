// SPDX-License-Identifier: Apache-2.0
// Agents cover landmarks and keep apart. Declared in gpu_vecenv/envs/simple_spread.py.
#include "particles.cuh"

constexpr float COVERED = 0.1f;  // a landmark with an agent nearer than this

struct Scratch : Particles {
    float nearest[NUM_LANDMARKS];  // distance from each landmark to its nearest agent
};

HD Body agent_body(State, int) { return {0.15f, true, 5, ENDLESS}; }
HD Body landmark_body() { return {0.05f, false, 0, 0}; }

HD void reset(State s, Io io) {
    scatter_agents(s, io);
    FOR_RANGE (j, NUM_LANDMARKS) scatter(s.landmark[j], io, NUM_AGENTS + j, 1);
}

HD int collisions(State s, int i) {
    int count = 0;
    for (int j = 0; j < NUM_AGENTS; ++j)
        count += j != i && distance(s.position[i], s.position[j]) < agent_body(s, i).radius + agent_body(s, j).radius;
    return count;
}

HD void step(State s, Io io) {
    move_agents(s, io, *io.scratch);

    bool uncovered = false;
    FOR_RANGE (j, NUM_LANDMARKS) {
        float nearest = distance(s.position[0], s.landmark[j]);
        for (int i = 1; i < NUM_AGENTS; ++i) nearest = math::min(nearest, distance(s.position[i], s.landmark[j]));
        io.scratch->nearest[j] = nearest;
        uncovered |= nearest >= COVERED;
    }
    team_sync();
    bool success = TERMINATE_ON_SUCCESS && !team_any(uncovered);

    float shared = 0;
    for (int j = 0; j < NUM_LANDMARKS; ++j) shared -= io.scratch->nearest[j];
    bool collisions_cost = !CURRICULUM || s.curriculum_stage[0] >= 1;
    FOR_AGENTS (i) {
        float own = collisions_cost ? (float)-collisions(s, i) : 0.0f;
        io.rewards[i] = shared * (1 - LOCAL_RATIO) + own * LOCAL_RATIO;
    }
    end_tick(io, success);
}

// Own velocity, own position, landmarks, other agents, and two numbers that each of them says: nothing.
HD void observe(State s, Io io) {
    look_around(s, *io.scratch);
    FOR_OBS (i, k) {
        if (k < 2)
            io.obs[i][k] = s.velocity[i][k];
        else if (k < 4)
            io.obs[i][k] = s.position[i][k - 2];
        else
            io.obs[i][k] = k < 4 + SEEN_SIZE ? seen_body(s, *io.scratch, i, k - 4) : 0.0f;
    }
}
