// SPDX-License-Identifier: Apache-2.0
// MPE2's simple_spread: agents cover landmarks and avoid collisions. Declared in gpu_vecenv/envs/simple_spread.py.
#include "particles.cuh"

constexpr float COVER_DISTANCE = 0.1f;  // a landmark is covered if an agent is nearer than this

struct Scratch : Particles {
    float nearest[NUM_LANDMARKS];  // distance from each landmark to its nearest agent
};

HD Entity agent_entity(State, int) { return {0.15f, true, 5, NO_SPEED_LIMIT}; }
HD Entity landmark_entity() { return {0.05f, false, 0, 0}; }

HD void reset(State s, Io io) {
    place_agents_randomly(s, io);
    FOR_RANGE (j, NUM_LANDMARKS) random_position(s.landmark[j], io, NUM_AGENTS + j, 1);
}

HD int collisions(State s, int i) {
    int count = 0;
    for (int j = 0; j < NUM_AGENTS; ++j)
        count +=
            j != i && distance(s.position[i], s.position[j]) < agent_entity(s, i).radius + agent_entity(s, j).radius;
    return count;
}

HD void step(State s, Io io) {
    move_agents(s, io, *io.scratch);

    bool uncovered = false;
    FOR_RANGE (j, NUM_LANDMARKS) {
        float nearest = distance(s.position[0], s.landmark[j]);
        for (int i = 1; i < NUM_AGENTS; ++i) nearest = math::min(nearest, distance(s.position[i], s.landmark[j]));
        io.scratch->nearest[j] = nearest;
        uncovered |= nearest >= COVER_DISTANCE;
    }
    group_sync();
    bool success = TERMINATE_ON_SUCCESS && !group_any(uncovered);

    float shared = 0;
    for (int j = 0; j < NUM_LANDMARKS; ++j) shared -= io.scratch->nearest[j];
    bool collisions_cost = !CURRICULUM || s.curriculum_stage[0] >= 1;
    FOR_AGENTS (i) {
        float own = collisions_cost ? (float)-collisions(s, i) : 0.0f;
        io.rewards[i] = shared * (1 - LOCAL_RATIO) + own * LOCAL_RATIO;
    }
    set_end_flags(io, success);
}

// Own velocity, own position, landmarks, other agents, and two communication channels per other agent, always 0.
HD void observe(State s, Io io) {
    find_observed(s, *io.scratch);
    FOR_OBS (i, k) {
        if (k < 2)
            io.obs[i][k] = s.velocity[i][k];
        else if (k < 4)
            io.obs[i][k] = s.position[i][k - 2];
        else
            io.obs[i][k] = k < 4 + RELATIVE_POSITIONS_SIZE ? relative_position(s, *io.scratch, i, k - 4) : 0.0f;
    }
}
