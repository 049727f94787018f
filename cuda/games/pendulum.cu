// SPDX-License-Identifier: Apache-2.0
// A pendulum with a motor, as in Gymnasium's Pendulum. Declared in gpu_vecenv/envs/pendulum.py.
#include "game_api.cuh"

struct Scratch {};

constexpr float PI = 3.14159265359f, TWO_PI = 6.28318530718f;

HD float wrap(float angle) { return angle - TWO_PI * math::floor((angle + PI) / TWO_PI); }

HD void reset(State s, Io io) {
    ONCE {
        s.theta[0] = (2 * io.rng.uniform(0, 0) - 1) * RESET_THETA;
        s.theta_dot[0] = (2 * io.rng.uniform(0, 1) - 1) * RESET_THETA_DOT;
    }
}

HD void step(State s, Io io) {
    ONCE {
        // Gymnasium lets the angle grow; here each step begins with the wrapped one, which keeps float32 exact enough.
        float angle = wrap(s.theta[0]), v = s.theta_dot[0], torque = io.action(0);
        io.rewards[0] = -(angle * angle + 0.1f * (v * v) + 0.001f * (torque * torque));
        io.truncations[0] = io.elapsed_steps >= MAX_STEPS;

        float weight = 3 * GRAVITY / (2 * LENGTH), lever = 3 / (MASS * LENGTH * LENGTH);
        v = math::clamp(v + (weight * math::sin(angle) + lever * torque) * DT, -MAX_SPEED, MAX_SPEED);
        s.theta[0] = angle + v * DT;
        s.theta_dot[0] = v;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        math::sincos(s.theta[0], &io.obs[0][1], &io.obs[0][0]);
        io.obs[0][2] = s.theta_dot[0];
    }
}
