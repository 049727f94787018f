// SPDX-License-Identifier: Apache-2.0
// A car in a valley with a motor that can be throttled, as in Gymnasium's MountainCarContinuous. Declared in
// gpu_vecenv/envs/continuous_mountain_car.py.
#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        s.position[0] = RESET_LOW + io.rng.uniform(0, 0) * (RESET_HIGH - RESET_LOW);
        s.velocity[0] = 0;
    }
}

HD void step(State s, Io io) {
    ONCE {
        float action = io.action(0), force = math::clamp(action, ACTION_LOW[0], ACTION_HIGH[0]);
        float v = s.velocity[0] + (force * POWER - GRAVITY * math::cos(3 * s.position[0]));
        v = math::clamp(v, -MAX_SPEED, MAX_SPEED);
        float x = math::clamp(s.position[0] + v, MIN_POSITION, MAX_POSITION);
        if (x == MIN_POSITION && v < 0) v = 0;  // the wall
        s.position[0] = x;
        s.velocity[0] = v;

        bool goal = x >= GOAL_POSITION && v >= GOAL_VELOCITY;
        io.rewards[0] = (goal ? GOAL_REWARD : 0) - ACTION_COST * (action * action);
        io.terminations[0] = goal;
        io.truncations[0] = !goal && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        io.obs[0][0] = s.position[0];
        io.obs[0][1] = s.velocity[0];
    }
}
