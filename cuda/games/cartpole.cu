// SPDX-License-Identifier: Apache-2.0
// A pole on a cart, as in Gymnasium's CartPole: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve
// difficult learning control problems", 1983; without friction. Declared in gpu_vecenv/envs/cartpole.py.
#include "game_api.cuh"

struct Scratch {};

constexpr float TOTAL_MASS = CART_MASS + POLE_MASS;
constexpr float POLE_MASS_LENGTH = POLE_MASS * HALF_LENGTH;

HD float initial_value(const Io& io, int k) { return RESET_LOW + io.rng.uniform(0, k) * (RESET_HIGH - RESET_LOW); }

HD void reset(State s, Io io) {
    ONCE {
        s.x[0] = initial_value(io, 0);
        s.x_dot[0] = initial_value(io, 1);
        s.theta[0] = initial_value(io, 2);
        s.theta_dot[0] = initial_value(io, 3);
    }
}

HD void step(State s, Io io) {
    ONCE {
        float v = s.x_dot[0], w = s.theta_dot[0];
        float sin_theta, cos_theta;
        math::sincos(s.theta[0], &sin_theta, &cos_theta);
        float force = io.action(0) == 1 ? FORCE_MAG : -FORCE_MAG;
        float temp = (force + POLE_MASS_LENGTH * w * w * sin_theta) / TOTAL_MASS;
        float theta_acc = (GRAVITY * sin_theta - cos_theta * temp) /
                          (HALF_LENGTH * (4.0f / 3.0f - POLE_MASS * cos_theta * cos_theta / TOTAL_MASS));
        float x_acc = temp - POLE_MASS_LENGTH * theta_acc * cos_theta / TOTAL_MASS;
        s.x_dot[0] = v + DT * x_acc;
        s.theta_dot[0] = w + DT * theta_acc;
        s.x[0] += DT * (SEMI_IMPLICIT ? s.x_dot[0] : v);
        s.theta[0] += DT * (SEMI_IMPLICIT ? s.theta_dot[0] : w);

        bool terminated = math::abs(s.x[0]) > X_THRESHOLD || math::abs(s.theta[0]) > THETA_THRESHOLD;
        if (SUTTON_BARTO_REWARD)
            io.rewards[0] = terminated ? -1.0f : 0.0f;
        else
            io.rewards[0] = 1;
        io.terminations[0] = terminated;
        io.truncations[0] = !terminated && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = s.x[0];
        io.obs[0][1] = s.x_dot[0];
        io.obs[0][2] = s.theta[0];
        io.obs[0][3] = s.theta_dot[0];
    }
}
