// SPDX-License-Identifier: Apache-2.0
// Predators and prey on a torus, predators first. Declared in predator_prey.py.
//
// An agent that dies for good terminates and is inactive from then on. A prey that waits for its rebirth does not
// terminate: it stays active, observes zeros, and its actions have no effect.
#include "game_api.cuh"

struct Scratch {
    i32 eater[NUM_PREY];       // the predator that eats this prey in this step, or -1
    u8 count[2][GRID * GRID];  // predators, prey in each cell
};

constexpr int WIDTH = 2 * SIGHT + 1;
TABLE int MOVES[5][2] = {{0, 0}, {1, 0}, {-1, 0}, {0, 1}, {0, -1}};

HD bool is_predator(int i) { return i < END_PREDATOR; }
HD int wrapped(int x) { return (x + GRID) % GRID; }  // for x >= -GRID
HD int cell_index(State s, int i) { return s.cell[i][0] * GRID + s.cell[i][1]; }
HD void place_randomly(State s, Io io, int i) {
    for (int axis = 0; axis < 2; ++axis) s.cell[i][axis] = io.rng.below(i, axis, GRID);
}

HD void reset(State s, Io io) {
    FOR_AGENTS (i) {
        place_randomly(s, io, i);
        s.alive[i] = true;
        if (is_predator(i))
            s.energy[i] = HUNGER;
        else
            s.unborn[i - FIRST_PREY] = 0;
    }
}

// Energy and reward of predator i, which may starve.
HD void feed(State s, Io io, int i) {
    if (!s.alive[i]) return;
    int meals = 0;
    for (int k = 0; k < NUM_PREY; ++k) meals += io.scratch->eater[k] == i;
    s.energy[i] = math::min(s.energy[i] - 1 + meals * MEAL, HUNGER);
    io.rewards[i] = (float)meals * MEAL_REWARD;
    if (s.energy[i] <= 0) {
        s.alive[i] = false;
        io.rewards[i] -= STARVING_PENALTY;
        io.terminations[i] = true;
    }
}

// Prey k is eaten, survives, or waits for its rebirth.
HD void live(State s, Io io, int k) {
    int i = FIRST_PREY + k;
    if (io.scratch->eater[k] >= 0) {
        s.alive[i] = false;
        s.unborn[k] = REBIRTH;
        io.rewards[i] = 0.0f - EATEN_PENALTY;
        io.terminations[i] = REBIRTH == 0;
    } else if (s.alive[i]) {
        io.rewards[i] = LIVING_REWARD;
    } else if (s.unborn[k] > 0 && --s.unborn[k] == 0) {
        place_randomly(s, io, i);
        s.alive[i] = true;
    }
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        if (!s.alive[i]) continue;
        for (int axis = 0; axis < 2; ++axis) s.cell[i][axis] = wrapped(s.cell[i][axis] + MOVES[io.action(i)][axis]);
    }
    group_sync();
    FOR_RANGE (k, NUM_PREY) {  // the first predator in a prey's cell eats it
        int i = FIRST_PREY + k, eater = -1;
        for (int j = END_PREDATOR - 1; j >= 0; --j)
            if (s.alive[i] && s.alive[j] && cell_index(s, i) == cell_index(s, j)) eater = j;
        io.scratch->eater[k] = eater;
    }
    group_sync();
    FOR_AGENTS (i) {
        if (is_predator(i))
            feed(s, io, i);
        else
            live(s, io, i - FIRST_PREY);
    }
    group_sync();
    bool predators = false, prey = false;
    FOR_AGENTS (i) {
        predators |= is_predator(i) && s.alive[i];
        prey |= !is_predator(i) && (s.alive[i] || s.unborn[i - FIRST_PREY] > 0);
    }
    predators = group_any(predators);
    prey = group_any(prey);
    FOR_AGENTS (i) {
        if (!io.active[i]) continue;
        io.terminations[i] |= !predators || !prey;
        io.truncations[i] = !io.terminations[i] && io.elapsed_steps >= MAX_STEPS;
    }
}

// The number of other predators (kind 0) or prey (kind 1) in cell k of agent i's view.
HD float others_in_view(State s, Io io, int i, int kind, int k) {
    int row = wrapped(s.cell[i][0] + k / WIDTH - SIGHT), column = wrapped(s.cell[i][1] + k % WIDTH - SIGHT);
    int self = k == VIEW / 2 && is_predator(i) == (kind == 0);
    return (float)(io.scratch->count[kind][row * GRID + column] - self);
}

HD void observe(State s, Io io) {
    FOR_RANGE (k, GRID * GRID) {
        int predators = 0, prey = 0;
        for (int j = 0; j < NUM_AGENTS; ++j) {
            int here = s.alive[j] && cell_index(s, j) == k;
            (is_predator(j) ? predators : prey) += here;
        }
        io.scratch->count[0][k] = (u8)predators;
        io.scratch->count[1][k] = (u8)prey;
    }
    group_sync();
    FOR_OBS (i, k) {
        if (!observed(i, k)) continue;  // a prey's row is shorter than a predator's
        if (!s.alive[i])
            io.obs[i][k] = 0;
        else if (k < 2 * VIEW)
            io.obs[i][k] = others_in_view(s, io, i, k / VIEW, k % VIEW);
        else
            io.obs[i][k] = (float)s.energy[i] / (float)HUNGER;
    }
}
