// SPDX-License-Identifier: Apache-2.0
// Tag on a grid. Agents 0 .. NUM_TAGGERS - 1 tag, the last one runs. Declared in gpu_vecenv/envs/tag_gridworld.py.
#include "game_api.cuh"

struct Scratch {};

constexpr int RUNNER = NUM_TAGGERS;
TABLE int MOVES[5][2] = {{0, 0}, {1, 0}, {-1, 0}, {0, 1}, {0, -1}};

HD void reset(State s, Io io) {
    FOR_AGENTS (i) {
        for (int axis = 0; axis < 2; ++axis) {
            if (RANDOM_START)
                s.cell[i][axis] = io.rng.below(i, axis, GRID + 1);
            else
                s.cell[i][axis] = i == RUNNER ? 0 : GRID / 2;
        }
    }
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {  // move; walls stop an agent, with a penalty
        int action = io.action(i);
        bool hit = false;
        for (int axis = 0; axis < 2; ++axis) {
            int wanted = s.cell[i][axis] + MOVES[action][axis];
            s.cell[i][axis] = math::clamp(wanted, 0, GRID);
            hit |= s.cell[i][axis] != wanted;
        }
        io.rewards[i] = hit ? 0.0f - WALL_PENALTY : 0.0f;  // a penalty of 0 gives 0, not -0
    }
    group_sync();

    bool here = false;  // a tagger is on the runner's cell
    FOR_RANGE (i, NUM_TAGGERS) {
        here |= s.cell[i][0] == s.cell[RUNNER][0] && s.cell[i][1] == s.cell[RUNNER][1];
    }
    bool tag = group_any(here);
    FOR_AGENTS (i) {
        if (tag)
            io.rewards[i] += i == RUNNER ? -RUNNER_PENALTY : TAGGER_REWARD;
        else
            io.rewards[i] += i == RUNNER ? STEP_COST : -STEP_COST;
        io.terminations[i] = tag;
        io.truncations[i] = !tag && io.elapsed_steps >= MAX_STEPS;
    }
}

// cells / GRID, correctly rounded like a division but without its slow path; verified for every GRID up to 32,767.
HD float share_of_grid(int cells) {
    constexpr float PER_CELL = 1.0f / (float)GRID;
    float all = (float)cells, share = all * PER_CELL;
    return math::fma(math::fma(-share, (float)GRID, all), PER_CELL, share);
}

// Elements that are equal for all agents: columns, rows, types (1: runner), one-hot self (0 here), time.
HD float common_feature(State s, Io io, int k) {
    int kind = k / NUM_AGENTS, j = k % NUM_AGENTS;
    if (kind < 2) return share_of_grid(s.cell[j][kind]);
    if (kind == 2) return j == RUNNER;
    if (kind == 3) return 0;
    return (float)io.elapsed_steps / (float)MAX_STEPS;
}

HD int squared_distance(State s, int i, int j) {
    int dx = s.cell[j][0] - s.cell[i][0], dy = s.cell[j][1] - s.cell[i][1];
    return dx * dx + dy * dy;
}

// The tagger nearest to the runner, the lowest index on ties.
HD int nearest_tagger(State s) {
    int least = 0x7fffffff, nearest = NUM_TAGGERS;
    FOR_RANGE (j, NUM_TAGGERS) least = math::min(least, squared_distance(s, RUNNER, j));
    least = group_reduce_min(least);
    FOR_RANGE (j, NUM_TAGGERS) {
        if (squared_distance(s, RUNNER, j) == least) nearest = math::min(nearest, j);
    }
    return group_reduce_min(nearest);
}

HD void observe(State s, Io io) {
    if (FULL_OBSERVATION) {
        FOR_RANGE (k, OBS_SIZE) {
            float common = common_feature(s, io, k);
            for (int i = 0; i < NUM_AGENTS; ++i) io.obs[i][k] = k == 3 * NUM_AGENTS + i ? 1.0f : common;
        }
        return;
    }
    int tagger = nearest_tagger(s);
    FOR_AGENTS (i) {  // own cell, opponent's cell, own type, time
        int j = i == RUNNER ? tagger : RUNNER;
        io.obs[i][0] = share_of_grid(s.cell[i][0]);
        io.obs[i][1] = share_of_grid(s.cell[i][1]);
        io.obs[i][2] = share_of_grid(s.cell[j][0]);
        io.obs[i][3] = share_of_grid(s.cell[j][1]);
        io.obs[i][4] = i == RUNNER;
        io.obs[i][5] = (float)io.elapsed_steps / (float)MAX_STEPS;
    }
}
