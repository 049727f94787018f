// SPDX-License-Identifier: Apache-2.0
// A pole on a cart, as in Gymnasium's CartPole: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve
// difficult learning control problems", 1983; without friction. Declared in gpu_vecenv/envs/cartpole.py.
#include "vecenv.cuh"

struct Scratch {};

constexpr float MASS = CART_MASS + POLE_MASS;
constexpr float MOMENT = POLE_MASS * HALF_LENGTH;

HD float start(const Io& io, int k) { return START_LOW + io.rng.uniform(0, k) * (START_HIGH - START_LOW); }

HD void reset(State s, Io io) {
    ONCE {
        s.position[0] = start(io, 0);
        s.velocity[0] = start(io, 1);
        s.angle[0] = start(io, 2);
        s.angular_velocity[0] = start(io, 3);
    }
}

HD void step(State s, Io io) {
    ONCE {
        float v = s.velocity[0], w = s.angular_velocity[0];
        float sine, cosine;
        math::sincos(s.angle[0], &sine, &cosine);
        float push = io.action(0) == 1 ? FORCE : -FORCE;
        float pull = (push + MOMENT * w * w * sine) / MASS;
        float turn =
            (GRAVITY * sine - cosine * pull) / (HALF_LENGTH * (4.0f / 3.0f - POLE_MASS * cosine * cosine / MASS));
        float acceleration = pull - MOMENT * turn * cosine / MASS;
        s.velocity[0] = v + DT * acceleration;
        s.angular_velocity[0] = w + DT * turn;
        s.position[0] += DT * (SEMI_IMPLICIT ? s.velocity[0] : v);
        s.angle[0] += DT * (SEMI_IMPLICIT ? s.angular_velocity[0] : w);

        bool fell = math::abs(s.position[0]) > MAX_POSITION || math::abs(s.angle[0]) > MAX_ANGLE;
        if (SUTTON_BARTO_REWARD)
            io.rewards[0] = fell ? -1.0f : 0.0f;
        else
            io.rewards[0] = 1;
        io.terminations[0] = fell;
        io.truncations[0] = !fell && io.time >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = s.position[0];
        io.obs[0][1] = s.velocity[0];
        io.obs[0][2] = s.angle[0];
        io.obs[0][3] = s.angular_velocity[0];
    }
}
