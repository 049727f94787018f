#include "game_api.cuh"

struct Scratch {
    float income[NUM_WORKERS];
    int guess;  // what a clerk guesses: the place that it has seen
};

HD void reset(State s, Io io) {
    FOR_RANGE (j, NUM_WORKERS) s.place[j] = io.rng.below(j, 0, LENGTH);
    FOR_RANGE (k, NUM_RATES) s.rate[k] = 0;
}

HD void step(State s, Io io) {
    bool last = io.elapsed_steps >= MAX_STEPS;
    ONCE {
        io.scratch->guess = s.place[0] % 4;
    }
    FOR_RANGE (k, NUM_RATES) s.rate[k] = io.action(FIRST_PLANNER, k);
    group_sync();
    FOR_RANGE (j, NUM_WORKERS) {
        io.scratch->income[j] = 0;
        if (!io.active[j]) continue;
        s.place[j] = math::clamp(s.place[j] + io.choice(j, 0) - 1, 0, LENGTH - 1);
        bool works = io.choice(j, 1) == 1;
        float income = works ? (float)s.place[j] / (LENGTH - 1) : 0.0f;
        io.scratch->income[j] = income;
        io.rewards[j] = works ? income * (1.0f - s.rate[0]) : 0.125f * s.rate[NUM_RATES - 1];
        io.terminations[j] = io.elapsed_steps == 4 + j;
        io.truncations[j] = last && !io.terminations[j];
    }
    FOR_RANGE (j, NUM_CLERKS) {
        int i = FIRST_CLERK + j;
        io.rewards[i] = io.choice(i) == io.scratch->guess;
        io.truncations[i] = last;
    }
    group_sync();
    ONCE {
        float total = 0, tax = s.rate[0] - 0.25f;
        for (int j = 0; j < NUM_WORKERS; ++j) total += io.scratch->income[j];
        total -= 4.0f * tax * tax;
        for (int k = 1; k < NUM_RATES; ++k) total -= s.rate[k] * s.rate[k];
        io.rewards[FIRST_PLANNER] = total;
        io.truncations[FIRST_PLANNER] = last;
    }
}

HD void observe(State s, Io io) {
    FOR_RANGE (j, NUM_WORKERS) {
        int place = s.place[j];
        io.obs[j][0] = (float)place;
        io.obs[j][1] = s.rate[0];
        io.obs[j][2] = s.rate[NUM_RATES - 1];
#if ACTION_MASKS
        for (int move = 0; move < 3; ++move)
            io.action_mask[j][move] = place + move - 1 >= 0 && place + move - 1 < LENGTH;
        io.action_mask[j][4] = true;
        io.action_mask[j][5] = place > 0;
#endif
    }
    ONCE {
        io.obs[FIRST_PLANNER][0] = (float)s.place[0];
        io.obs[FIRST_PLANNER][1] = (float)io.elapsed_steps;
    }
    FOR_RANGE (j, NUM_CLERKS) {
        int i = FIRST_CLERK + j;
        io.obs[i][0] = (float)s.place[0];
        io.obs[i][1] = (float)io.elapsed_steps;
#if ACTION_MASKS
        for (int k = 0; k < 4; ++k) io.action_mask[i][k] = true;
#endif
    }
}
