#include "game_api.cuh"

struct Scratch {};

HD void reset(State s, Io io) {
    ONCE {
        for (int k = 0; k < 3; ++k) s.angle[k] = io.rng.uniform(0, k);
        s.turns[0] = 0;
        s.work[0] = 0;
        for (int k = 0; k < 4; ++k) s.marks[k / 2][k % 2] = (u8)k;
        s.reversed[0] = false;
        s.last[0] = -1;
    }
}

HD void step(State s, Io io) {
    ONCE {
        int choice = io.action(0, 0);
        if (io.action(0, 1) == 1) s.reversed[0] = !s.reversed[0];
        float speed = s.speeds[choice];
        if (s.reversed[0]) speed = -speed;
        for (int k = 0; k < 3; ++k) s.angle[k] += speed * (float)(k + 1);
        s.turns[0] += choice;
        s.work[0] += 0.1 * choice;
        s.marks[io.elapsed_steps % 2][choice % 2] += 1;
        s.last[0] = choice;
        bool broken = io.rng.uniform(0, 0) < 0.05f;
        io.rewards[0] = broken ? -1.0f : speed;
        io.terminations[0] = broken;
        io.truncations[0] = !broken && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    ONCE {
        math::sincos(s.angle[0], &io.obs[0][0], &io.obs[0][1]);
        // Beyond 2^16 now and then, which no step sees.
        io.obs[0][2] = math::cos(s.angle[1] * 20000.0f);
        io.obs[0][3] = (float)s.work[0] + s.marks[0][1] + (float)s.turns[0];
        io.obs[0][4] = io.rng.uniform(1, 1) + io.elapsed_steps;
    }
}
