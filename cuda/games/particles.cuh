// SPDX-License-Identifier: Apache-2.0
// Physics and observations of the particle games: discs on an unbounded plane, moved by their actions and by
// collisions. Rules and numbers are those of MPE2 (Farama Foundation), the successor of the environments of Lowe et
// al., "Multi-agent actor-critic for mixed cooperative-competitive environments", 2017.
//
// A game declares state fields `position` and `velocity` of its agents and `landmark`, constants NUM_LANDMARKS,
// NUM_OBSERVED_AGENTS, NUM_OBSERVED_LANDMARKS and OBSERVE_ALL_AGENTS, OBSERVE_ALL_LANDMARKS, has a Scratch derived
// from Particles, and defines agent_entity() and landmark_entity().
#pragma once
#include "neighbors.cuh"
#include "game_api.cuh"

constexpr float DT = 0.1f;                // time of a step
constexpr float DAMPING = 0.25f;          // fraction of its velocity that a body loses in a step
constexpr float CONTACT_FORCE = 100.0f;   // per unit of penetration depth
constexpr float CONTACT_MARGIN = 0.001f;  // softness of a contact: see add_collision_force()
// Bodies with a larger gap exert no force on each other: 1 + exp(-17) is 1 in float.
constexpr float CONTACT_CUTOFF = 17.0f * CONTACT_MARGIN;
constexpr float NO_SPEED_LIMIT = 3.4e38f;

struct Entity {
    float radius;
    bool collide;     // MPE2's flag: such bodies push each other apart
    float accel;      // force of a full action
    float max_speed;  // per unit of time
};

HD Entity agent_entity(State s, int i);  // defined by the game
HD Entity landmark_entity();

struct Particles {
    float force[NUM_AGENTS][2];
    // Nearest first; -1 in an empty slot. Not used with OBSERVE_ALL_*.
    int observed_agent[OBSERVE_ALL_AGENTS ? 1 : NUM_AGENTS][OBSERVE_ALL_AGENTS ? 1 : NUM_OBSERVED_AGENTS];
    int observed_landmark[OBSERVE_ALL_LANDMARKS ? 1 : NUM_AGENTS][OBSERVE_ALL_LANDMARKS ? 1 : NUM_OBSERVED_LANDMARKS];
};

// Uniform in the square [-extent, extent]^2.
HD void random_position(float position[2], const Io& io, int item, float extent) {
    for (int axis = 0; axis < 2; ++axis) position[axis] = (2 * io.rng.uniform(item, axis) - 1) * extent;
}

// Agents at random positions in [-1, 1]^2, at rest.
HD void place_agents_randomly(State s, const Io& io) {
    FOR_AGENTS (i) {
        random_position(s.position[i], io, i, 1);
        s.velocity[i][0] = s.velocity[i][1] = 0;
    }
}

HD float squared_distance(const float a[2], const float b[2]) {
    float x = a[0] - b[0], y = a[1] - b[1];
    return x * x + y * y;
}

HD float distance(const float a[2], const float b[2]) { return math::sqrt(squared_distance(a, b)); }

// The force of agent i's action along an axis, in [-1, 1]. Actions: no action, left, right, down, up.
HD float action_direction(const Io& io, int i, int axis) {
    int back = 2 * axis + 1, forth = 2 * axis + 2;
#if BOX_ACTIONS
    return io.action(i, forth) - io.action(i, back);
#else
    return (float)((io.action(i) == forth) - (io.action(i) == back));
#endif
}

// Adds the force on a body at `own` from one at `other`; they touch at `contact_distance`. It is proportional to the
// softplus of the penetration depth, margin * log(1 + exp((contact_distance - distance) / margin)). There is none
// between two bodies at the same position, as it would have no direction.
HD void add_collision_force(float force[2], const float own[2], const float other[2], float contact_distance) {
    float square = squared_distance(own, other), cutoff = contact_distance + CONTACT_CUTOFF;
    if (square > cutoff * cutoff || square == 0) return;
    float apart = math::sqrt(square), x = (contact_distance - apart) / CONTACT_MARGIN;
    float depth = (math::max(0.0f, x) + math::log(1.0f + math::exp(-math::abs(x)))) * CONTACT_MARGIN;
    for (int axis = 0; axis < 2; ++axis) force[axis] += CONTACT_FORCE * (own[axis] - other[axis]) / apart * depth;
}

// Moves all agents by one step. Positions change by the velocities before the step.
HD void move_agents(State s, const Io& io, Particles& particles) {
    const Entity landmark = landmark_entity();
    FOR_AGENTS (i) {
        const Entity own = agent_entity(s, i);
        float force[2] = {action_direction(io, i, 0) * own.accel, action_direction(io, i, 1) * own.accel};
        if (own.collide) {
            for (int j = 0; j < NUM_AGENTS; ++j) {
                const Entity other = agent_entity(s, j);
                if (j != i && other.collide)
                    add_collision_force(force, s.position[i], s.position[j], own.radius + other.radius);
            }
            for (int j = 0; landmark.collide && j < NUM_LANDMARKS; ++j)
                add_collision_force(force, s.position[i], s.landmark[j], own.radius + landmark.radius);
        }
        particles.force[i][0] = force[0];
        particles.force[i][1] = force[1];
    }
    group_sync();
    FOR_AGENTS (i) {
        float* v = s.velocity[i];
        for (int axis = 0; axis < 2; ++axis) {
            s.position[i][axis] += v[axis] * DT;
            v[axis] = v[axis] * (1 - DAMPING) + particles.force[i][axis] * DT;  // all masses are 1
        }
        float speed = math::sqrt(v[0] * v[0] + v[1] * v[1]), max_speed = agent_entity(s, i).max_speed;
        if (speed > max_speed)
            for (int axis = 0; axis < 2; ++axis) v[axis] = v[axis] / speed * max_speed;
    }
    group_sync();
}

// The time limit takes precedence: agents that succeed in the last step are truncated.
HD void set_end_flags(Io io, bool success) {
    bool at_time_limit = io.elapsed_steps >= MAX_STEPS;
    FOR_AGENTS (i) {
        io.truncations[i] = at_time_limit;
        io.terminations[i] = success && !at_time_limit;
    }
}

// The indices of the K of n positions nearest to `own`, the lowest index on ties, without the index `self`.
template <int K>
HD void find_nearest(int (&indices)[K], const float own[2], const float (*positions)[2], int n, int self) {
    Nearest<K> nearest;
    nearest.clear();
    for (int j = 0; j < n; ++j)
        if (j != self) nearest.insert(squared_distance(own, positions[j]), j);
    UNROLL for (int k = 0; k < K; ++k) indices[k] = nearest.id(k);
}

// Finds the agents and landmarks that each agent observes. Call it before relative_position().
HD void find_observed(State s, Particles& particles) {
    if (OBSERVE_ALL_AGENTS && OBSERVE_ALL_LANDMARKS) return;
    FOR_AGENTS (i) {
        if (!OBSERVE_ALL_AGENTS) find_nearest(particles.observed_agent[i], s.position[i], s.position, NUM_AGENTS, i);
        if (!OBSERVE_ALL_LANDMARKS)
            find_nearest(particles.observed_landmark[i], s.position[i], s.landmark, NUM_LANDMARKS, -1);
    }
    group_sync();
}

// The agent in a slot of agent i's observation, or -1.
HD int observed_agent(const Particles& particles, int i, int slot) {
    return OBSERVE_ALL_AGENTS ? slot + (slot >= i) : particles.observed_agent[i][slot];
}

// Elements of an observation that relative_position() computes.
constexpr int RELATIVE_POSITIONS_SIZE = 2 * (NUM_OBSERVED_LANDMARKS + NUM_OBSERVED_AGENTS);

// Element k of the positions relative to agent i: observed landmarks, then observed agents.
HD float relative_position(State s, const Particles& particles, int i, int k) {
    int slot = k / 2, axis = k % 2;
    bool landmark = slot < NUM_OBSERVED_LANDMARKS;
    int j = !landmark               ? observed_agent(particles, i, slot - NUM_OBSERVED_LANDMARKS)
            : OBSERVE_ALL_LANDMARKS ? slot
                                    : particles.observed_landmark[i][slot];
    if (j < 0) return 0;
    return (landmark ? s.landmark[j][axis] : s.position[j][axis]) - s.position[i][axis];
}
