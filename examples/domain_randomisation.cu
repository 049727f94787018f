// SPDX-License-Identifier: Apache-2.0
// A cart on a straight track, pushed towards its middle. Declared in domain_randomisation.py.
#include "game_api.cuh"

struct Scratch {};

HD float between(float low, float high, float u) { return low + u * (high - low); }

// Every environment draws a mass of its own for every episode. It is a field of the state, not a constant of this text.
HD void reset(State s, Io io) {
    ONCE {
        s.mass[0] = between(LOW_MASS, HIGH_MASS, io.rng.uniform(0, 0));
        s.position[0] = between(-TRACK, TRACK, io.rng.uniform(0, 1));
        s.velocity[0] = 0;
    }
}

HD void step(State s, Io io) {
    ONCE {
        float push = FORCE * (float)(io.action(0) - 1);
        s.velocity[0] += DT * push / s.mass[0];
        s.position[0] += DT * s.velocity[0];
        io.rewards[0] = -math::abs(s.position[0]);
        io.truncations[0] = io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = s.position[0];
        io.obs[0][1] = s.velocity[0];
        if (SHOW_MASS) io.obs[0][2] = s.mass[0];
    }
}
