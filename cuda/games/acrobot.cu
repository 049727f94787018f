// SPDX-License-Identifier: Apache-2.0
// Two links on a pivot, as in Gymnasium's Acrobot: R. S. Sutton, "Generalization in reinforcement learning: successful
// examples using sparse coarse coding", NIPS 1996, and Sutton and Barto, "Reinforcement learning: an introduction",
// 1998, whose equations differ in one term. Declared in gpu_vecenv/envs/acrobot.py.
#include "vecenv.cuh"

struct Scratch {};

constexpr float PI = 3.14159265359f, TWO_PI = 6.28318530718f;
constexpr float M1 = LINK_MASS_1, M2 = LINK_MASS_2, L1 = LINK_LENGTH_1, C1 = LINK_COM_1, C2 = LINK_COM_2;

struct Motion {
    float of[4];  // both angles, both velocities; or their rates of change
};

HD float wrap(float angle) { return angle - TWO_PI * math::floor((angle + PI) / TWO_PI); }

HD void reset(State s, Io io) {
    ONCE {
        for (int k = 0; k < 2; ++k) {
            s.angle[k] = START_LOW + io.rng.uniform(0, k) * (START_HIGH - START_LOW);
            s.velocity[k] = START_LOW + io.rng.uniform(0, 2 + k) * (START_HIGH - START_LOW);
        }
    }
}

HD Motion rate_of(Motion m, float torque) {
    float v1 = m.of[2], v2 = m.of[3];
    float sine, cosine;
    math::sincos(m.of[1], &sine, &cosine);
    float d1 = M1 * C1 * C1 + M2 * (L1 * L1 + C2 * C2 + 2 * L1 * C2 * cosine) + 2 * LINK_MOI;
    float d2 = M2 * (C2 * C2 + L1 * C2 * cosine) + LINK_MOI;
    float bend = M2 * L1 * C2 * sine;
    float phi2 = M2 * C2 * GRAVITY * math::sin(m.of[0] + m.of[1]);
    float phi1 = -bend * v2 * v2 - 2 * bend * v2 * v1 + (M1 * C1 + M2 * L1) * GRAVITY * math::sin(m.of[0]) + phi2;
    float swing = NIPS ? 0 : bend * v1 * v1;
    float turn2 = (torque + d2 / d1 * phi1 - swing - phi2) / (M2 * C2 * C2 + LINK_MOI - d2 * d2 / d1);
    return {{v1, v2, -(d2 * turn2 + phi1) / d1, turn2}};
}

HD Motion after(float time, Motion rate, Motion m) {
    for (int k = 0; k < 4; ++k) m.of[k] += time * rate.of[k];
    return m;
}

HD void step(State s, Io io) {
    ONCE {
        float torque = (float)(io.action(0) - 1) * TORQUE;
        if (TORQUE_NOISE > 0) torque += (2 * io.rng.uniform(0, 0) - 1) * TORQUE_NOISE;

        // The classical Runge-Kutta method.
        Motion m = {{s.angle[0], s.angle[1], s.velocity[0], s.velocity[1]}};
        Motion a = rate_of(m, torque);
        Motion b = rate_of(after(DT / 2, a, m), torque);
        Motion c = rate_of(after(DT / 2, b, m), torque);
        Motion d = rate_of(after(DT, c, m), torque);
        for (int k = 0; k < 4; ++k) m.of[k] += DT / 6 * (a.of[k] + 2 * b.of[k] + 2 * c.of[k] + d.of[k]);
        s.angle[0] = wrap(m.of[0]);
        s.angle[1] = wrap(m.of[1]);
        s.velocity[0] = math::clamp(m.of[2], -MAX_VELOCITY_1, MAX_VELOCITY_1);
        s.velocity[1] = math::clamp(m.of[3], -MAX_VELOCITY_2, MAX_VELOCITY_2);

        bool goal = -math::cos(s.angle[0]) - math::cos(s.angle[1] + s.angle[0]) > GOAL_HEIGHT;
        io.rewards[0] = goal ? 0.0f : -1.0f;
        io.terminations[0] = goal;
        io.truncations[0] = !goal && io.time >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        for (int k = 0; k < 2; ++k) {
            math::sincos(s.angle[k], &io.obs[0][2 * k + 1], &io.obs[0][2 * k]);
            io.obs[0][4 + k] = s.velocity[k];
        }
    }
}
