// SPDX-License-Identifier: Apache-2.0
// Two links on a pivot, as in Gymnasium's Acrobot: R. S. Sutton, "Generalization in reinforcement learning: successful
// examples using sparse coarse coding", NIPS 1996, and Sutton and Barto, "Reinforcement learning: an introduction",
// 1998, whose equations differ in one term. Declared in gpu_vecenv/envs/acrobot.py.
#include "game_api.cuh"

struct Scratch {};

constexpr float PI = 3.14159265359f, TWO_PI = 6.28318530718f;
constexpr float M1 = LINK_MASS_1, M2 = LINK_MASS_2, L1 = LINK_LENGTH_1, C1 = LINK_COM_POS_1, C2 = LINK_COM_POS_2;

struct Motion {
    float of[4];  // two angles and two angular velocities, or their derivatives
};

HD float wrap(float angle) { return angle - TWO_PI * math::floor((angle + PI) / TWO_PI); }

HD void reset(State s, Io io) {
    ONCE {
        for (int k = 0; k < 2; ++k) {
            s.theta[k] = RESET_LOW + io.rng.uniform(0, k) * (RESET_HIGH - RESET_LOW);
            s.theta_dot[k] = RESET_LOW + io.rng.uniform(0, 2 + k) * (RESET_HIGH - RESET_LOW);
        }
    }
}

HD Motion dsdt(Motion m, float torque) {
    float v1 = m.of[2], v2 = m.of[3];
    float sine, cosine;
    math::sincos(m.of[1], &sine, &cosine);
    float d1 = M1 * C1 * C1 + M2 * (L1 * L1 + C2 * C2 + 2 * L1 * C2 * cosine) + 2 * LINK_MOI;
    float d2 = M2 * (C2 * C2 + L1 * C2 * cosine) + LINK_MOI;
    float bend = M2 * L1 * C2 * sine;
    float phi2 = M2 * C2 * GRAVITY * math::sin(m.of[0] + m.of[1]);
    float phi1 = -bend * v2 * v2 - 2 * bend * v2 * v1 + (M1 * C1 + M2 * L1) * GRAVITY * math::sin(m.of[0]) + phi2;
    float swing = NIPS ? 0 : bend * v1 * v1;
    float ddtheta2 = (torque + d2 / d1 * phi1 - swing - phi2) / (M2 * C2 * C2 + LINK_MOI - d2 * d2 / d1);
    return {{v1, v2, -(d2 * ddtheta2 + phi1) / d1, ddtheta2}};
}

HD Motion advance(float time, Motion rate, Motion m) {
    for (int k = 0; k < 4; ++k) m.of[k] += time * rate.of[k];
    return m;
}

HD void step(State s, Io io) {
    ONCE {
        float torque = (float)(io.action(0) - 1) * TORQUE;
        if (TORQUE_NOISE_MAX > 0) torque += (2 * io.rng.uniform(0, 0) - 1) * TORQUE_NOISE_MAX;

        // The classical Runge-Kutta method.
        Motion m = {{s.theta[0], s.theta[1], s.theta_dot[0], s.theta_dot[1]}};
        Motion a = dsdt(m, torque);
        Motion b = dsdt(advance(DT / 2, a, m), torque);
        Motion c = dsdt(advance(DT / 2, b, m), torque);
        Motion d = dsdt(advance(DT, c, m), torque);
        for (int k = 0; k < 4; ++k) m.of[k] += DT / 6 * (a.of[k] + 2 * b.of[k] + 2 * c.of[k] + d.of[k]);
        s.theta[0] = wrap(m.of[0]);
        s.theta[1] = wrap(m.of[1]);
        s.theta_dot[0] = math::clamp(m.of[2], -MAX_VELOCITY_1, MAX_VELOCITY_1);
        s.theta_dot[1] = math::clamp(m.of[3], -MAX_VELOCITY_2, MAX_VELOCITY_2);

        bool goal = -math::cos(s.theta[0]) - math::cos(s.theta[1] + s.theta[0]) > GOAL_HEIGHT;
        io.rewards[0] = goal ? 0.0f : -1.0f;
        io.terminations[0] = goal;
        io.truncations[0] = !goal && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        for (int k = 0; k < 2; ++k) {
            math::sincos(s.theta[k], &io.obs[0][2 * k + 1], &io.obs[0][2 * k]);
            io.obs[0][4 + k] = s.theta_dot[k];
        }
    }
}
