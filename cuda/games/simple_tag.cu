// SPDX-License-Identifier: Apache-2.0
// MPE2's simple_tag: adversaries chase good agents among obstacles. Declared in gpu_vecenv/envs/simple_tag.py.
#include "particles.cuh"

constexpr float CATCH_REWARD = 10.0f;  // for a collision of an adversary and a good agent

struct Scratch : Particles {
    int catches[NUM_GOOD];  // adversaries that touch a good agent
};

HD bool is_adversary(int i) { return i < END_ADVERSARY; }

HD Entity agent_entity(State s, int i) {
    if (is_adversary(i)) return {0.075f, true, 3, 1};
    return {0.05f, true, 4 * s.speed_factor[0], 1.3f * s.speed_factor[0]};
}
HD Entity landmark_entity() { return {0.2f, true, 0, 0}; }

HD void reset(State s, Io io) {
    place_agents_randomly(s, io);
    FOR_RANGE (j, LANDMARK_ROWS) random_position(s.landmark[j], io, NUM_AGENTS + j, 0.9f);
    ONCE {
        s.speed_factor[0] = CURRICULUM ? 0.5f + 0.25f * math::clamp(s.curriculum_stage[0], 0, 2) : 1.0f;
    }
}

// MPE2's bound(): the penalty of a good agent for leaving the arena along one axis.
HD float bound_penalty(float position) {
    float x = math::abs(position);
    if (x < 0.9f) return 0;
    if (x < 1.0f) return (x - 0.9f) * 10;
    return math::min(math::exp(2 * x - 2), 10.0f);
}

HD void step(State s, Io io) {
    move_agents(s, io, *io.scratch);

    bool any_free = false;
    FOR_RANGE (g, NUM_GOOD) {
        int i = FIRST_AGENT + g, catches = 0;
        for (int j = FIRST_ADVERSARY; j < END_ADVERSARY; ++j)
            catches += distance(s.position[i], s.position[j]) < agent_entity(s, i).radius + agent_entity(s, j).radius;
        io.scratch->catches[g] = catches;
        any_free |= catches == 0;
    }
    group_sync();
    bool success = TERMINATE_ON_SUCCESS && !group_any(any_free);

    int catches = 0;
    for (int g = 0; g < NUM_GOOD; ++g) catches += io.scratch->catches[g];
    FOR_AGENTS (i) {
        if (is_adversary(i))
            io.rewards[i] = CATCH_REWARD * catches;
        else
            io.rewards[i] = 0 - CATCH_REWARD * io.scratch->catches[i - FIRST_AGENT] - bound_penalty(s.position[i][0]) -
                            bound_penalty(s.position[i][1]);
    }
    set_end_flags(io, success);
}

// Element k of the velocities of other good agents: of all, or of those among the observed agents.
HD float observed_velocity(State s, const Particles& particles, int i, int k) {
    int slot = k / 2, j;
    if (OBSERVE_ALL_AGENTS) {
        j = FIRST_AGENT + slot;
        j += !is_adversary(i) && j >= i;
    } else {
        j = observed_agent(particles, i, slot);
    }
    return j < 0 || is_adversary(j) ? 0.0f : s.velocity[j][k % 2];
}

// Own velocity, own position, obstacles, other agents, velocities of good agents.
HD void observe(State s, Io io) {
    find_observed(s, *io.scratch);
    FOR_OBS (i, k) {
        if (k >= (is_adversary(i) ? OBS_SIZE_ADVERSARY : OBS_SIZE_AGENT)) continue;
        if (k < 2)
            io.obs[i][k] = s.velocity[i][k];
        else if (k < 4)
            io.obs[i][k] = s.position[i][k - 2];
        else if (k < 4 + RELATIVE_POSITIONS_SIZE)
            io.obs[i][k] = relative_position(s, *io.scratch, i, k - 4);
        else
            io.obs[i][k] = observed_velocity(s, *io.scratch, i, k - 4 - RELATIVE_POSITIONS_SIZE);
    }
}
