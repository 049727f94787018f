// SPDX-License-Identifier: Apache-2.0
// Pursuit: pursuers surround evaders that walk at random around a building. The rules are those of PettingZoo's
// pursuit_v5 (https://github.com/Farama-Foundation/PettingZoo, MIT License, Farama Foundation), written anew.
// Declared in gpu_vecenv/envs/pursuit.py.
#include "game_api.cuh"

constexpr int CELLS = X_SIZE * Y_SIZE, CHANNELS = 3, REACH = (OBS_RANGE - 1) / 2;  // of what a pursuer sees
constexpr int BESIDE = 4, NUM_MOVES = 5;
TABLE int MOVES[NUM_MOVES][2] = {{-1, 0}, {1, 0}, {0, 1}, {0, -1}, {0, 0}};  // the first four lead to the cells beside

struct Cell {
    int x, y;
};

struct Scratch {
    int pursuers[Y_SIZE][X_SIZE], evaders[Y_SIZE][X_SIZE];  // how many are in each cell
    Cell before[NUM_PURSUERS];                              // where a pursuer was when the step began
    int tags[NUM_PURSUERS];                                 // evaders beside it, summed over the moves of all pursuers
    bool caught[NUM_EVADERS];                               // in this step
    bool catches[NUM_PURSUERS];                             // takes part in catching an evader
    bool free[Y_SIZE][X_SIZE];                              // the next one placed may start there
    int free_in_row[Y_SIZE];
};

HD Cell pursuer(State s, int i) { return {s.pursuer_position[i][0], s.pursuer_position[i][1]}; }
HD Cell evader(State s, int e) { return {s.evader_position[e][0], s.evader_position[e][1]}; }
HD Cell moved(Cell c, int move) { return {c.x + MOVES[move][0], c.y + MOVES[move][1]}; }
HD bool is_inside(Cell c) { return c.x >= 0 && c.x < X_SIZE && c.y >= 0 && c.y < Y_SIZE; }
HD bool is_open(State s, Cell c) { return is_inside(c) && s.wall[c.y][c.x] == 0; }
HD Cell after_move(State s, Cell c, int move) { return is_open(s, moved(c, move)) ? moved(c, move) : c; }

// Counts pursuers and evaders in each cell.
HD void count(State s, Io io) {
    FOR_RANGE (k, CELLS) io.scratch->pursuers[k / X_SIZE][k % X_SIZE] = io.scratch->evaders[k / X_SIZE][k % X_SIZE] = 0;
    group_sync();
    FOR_RANGE (i, NUM_PURSUERS) atomic_add(&io.scratch->pursuers[pursuer(s, i).y][pursuer(s, i).x], 1);
    FOR_RANGE (e, NUM_EVADERS)
        if (!s.caught[e]) atomic_add(&io.scratch->evaders[evader(s, e).y][evader(s, e).x], 1);
    group_sync();
}

// For a central critic.
HD void write_maps(State s, Io io) {
    count(s, io);
    FOR_RANGE (k, CELLS) {
        s.pursuers[k / X_SIZE][k % X_SIZE] = (u8)io.scratch->pursuers[k / X_SIZE][k % X_SIZE];
        s.evaders[k / X_SIZE][k % X_SIZE] = (u8)io.scratch->evaders[k / X_SIZE][k % X_SIZE];
    }
}

// Columns and rows in which all start, the ends excluded.
struct Window {
    int first_x, end_x, first_y, end_y;
};

// The cells in which the first one may start; returns how many there are.
HD int free_cells(State s, Io io, Window w) {
    int total = 0;
    for (int y = 0; y < Y_SIZE; ++y) {
        int& in_row = io.scratch->free_in_row[y] = 0;
        for (int x = 0; x < X_SIZE; ++x) {
            bool is_free = s.wall[y][x] == 0 && x >= w.first_x && x < w.end_x && y >= w.first_y && y < w.end_y;
            io.scratch->free[y][x] = is_free;
            in_row += is_free;
        }
        total += in_row;
    }
    return total;
}

// The n-th free cell, row by row.
HD Cell nth_free(Io io, int n) {
    int x = 0, y = 0;
    while (n >= io.scratch->free_in_row[y]) n -= io.scratch->free_in_row[y++];
    while (!io.scratch->free[y][x] || n-- > 0) ++x;
    return {x, y};
}

// Places the pursuers, or the evaders, one after the other, none on or beside one of its own kind. Where no cell is
// left all of the window is free again; a window without a floor becomes the whole map.
HD void place(State s, Io io, Window w, bool are_pursuers) {
    int total = 0;
    for (int j = 0; j < (are_pursuers ? NUM_PURSUERS : NUM_EVADERS); ++j) {
        if (total == 0) total = free_cells(s, io, w);
        if (total == 0) total = free_cells(s, io, {0, X_SIZE, 0, Y_SIZE});
        Cell c = nth_free(io, io.rng.below(are_pursuers ? j : NUM_PURSUERS + j, 0, total));
        for (int move = 0; move < NUM_MOVES; ++move) {
            Cell near = moved(c, move);
            if (!is_inside(near) || !io.scratch->free[near.y][near.x]) continue;
            io.scratch->free[near.y][near.x] = false;
            --io.scratch->free_in_row[near.y];
            --total;
        }
        (are_pursuers ? s.pursuer_position[j][0] : s.evader_position[j][0]) = c.x;
        (are_pursuers ? s.pursuer_position[j][1] : s.evader_position[j][1]) = c.y;
    }
}

HD void reset(State s, Io io) {
    FOR_RANGE (e, NUM_EVADERS) s.caught[e] = false;
    ONCE {
        constexpr int WINDOW = NUM_PURSUERS + NUM_EVADERS;
        float x = io.rng.uniform(WINDOW, 0) * (1 - CONSTRAINT_WINDOW);
        float y = io.rng.uniform(WINDOW, 1) * (1 - CONSTRAINT_WINDOW);
        Window w = {math::to_int(X_SIZE * x), math::to_int(X_SIZE * (x + CONSTRAINT_WINDOW)), math::to_int(Y_SIZE * y),
                    math::to_int(Y_SIZE * (y + CONSTRAINT_WINDOW))};
        place(s, io, w, true);
        place(s, io, w, false);
    }
    group_sync();
    write_maps(s, io);
}

// Evaders beside a cell. At the edge of the map the cell itself stands in for the one outside.
HD int evaders_beside(Io io, Cell c) {
    int found = 0;
    for (int move = 0; move < BESIDE; ++move) {
        int x = math::clamp(moved(c, move).x, 0, X_SIZE - 1), y = math::clamp(moved(c, move).y, 0, Y_SIZE - 1);
        found += io.scratch->evaders[y][x];
    }
    return found;
}

// Whether pursuers stand on all cells beside an evader that are no wall, or at least N_CATCH on its own.
HD bool is_caught(State s, Io io, Cell c) {
    if (!SURROUND) return io.scratch->pursuers[c.y][c.x] >= N_CATCH;
    for (int move = 0; move < BESIDE; ++move) {
        Cell near = moved(c, move);
        if (is_open(s, near) && io.scratch->pursuers[near.y][near.x] == 0) return false;
    }
    return true;
}

// Whether a pursuer takes part in catching an evader: it stands beside it, or on it.
HD bool catches(State s, Io io, int i) {
    for (int e = 0; e < NUM_EVADERS; ++e) {
        int distance = math::abs(evader(s, e).x - pursuer(s, i).x) + math::abs(evader(s, e).y - pursuer(s, i).y);
        if (io.scratch->caught[e] && distance == (SURROUND ? 1 : 0)) return true;
    }
    return false;
}

HD void move_pursuers(State s, Io io) {
    FOR_AGENTS (i) {
        Cell before = io.scratch->before[i] = pursuer(s, i), now = after_move(s, before, io.action(i));
        s.pursuer_position[i][0] = now.x;
        s.pursuer_position[i][1] = now.y;
    }
    group_sync();
    count(s, io);
}

HD void catch_evaders(State s, Io io) {
    // After the moves of the pursuers before it pursuer i is where it was, after its own and the others' where it is.
    FOR_AGENTS (i)
        io.scratch->tags[i] =
            i * evaders_beside(io, io.scratch->before[i]) + (NUM_PURSUERS - i) * evaders_beside(io, pursuer(s, i));
    FOR_RANGE (e, NUM_EVADERS) io.scratch->caught[e] = !s.caught[e] && is_caught(s, io, evader(s, e));
    group_sync();
    FOR_AGENTS (i) io.scratch->catches[i] = catches(s, io, i);
    group_sync();
}

HD void move_evaders(State s, Io io) {
    FOR_RANGE (e, NUM_EVADERS) {
        s.caught[e] |= io.scratch->caught[e];
        if (s.caught[e] || FREEZE_EVADERS) continue;
        Cell now = after_move(s, evader(s, e), io.rng.below(e, 0, NUM_MOVES));
        s.evader_position[e][0] = now.x;
        s.evader_position[e][1] = now.y;
    }
    group_sync();
}

HD float reward(int tags, int catches, int pursuers) {
    float tag = TAG_REWARD * (float)tags / (float)(pursuers * NUM_PURSUERS);
    return tag + CATCH_REWARD * (float)catches / (float)pursuers + URGENCY_REWARD;
}

HD void step(State s, Io io) {
    move_pursuers(s, io);
    catch_evaders(s, io);
    move_evaders(s, io);
    int tags = 0, catching = 0;
    bool all_caught = true;
    for (int i = 0; i < NUM_PURSUERS; ++i) tags += io.scratch->tags[i], catching += io.scratch->catches[i];
    for (int e = 0; e < NUM_EVADERS; ++e) all_caught = all_caught && s.caught[e];
    FOR_AGENTS (i) {
        io.rewards[i] = SHARED_REWARD ? reward(tags, catching, NUM_PURSUERS)
                                      : reward(io.scratch->tags[i], io.scratch->catches[i], 1);
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
        io.terminations[i] = all_caught && !io.truncations[i];
    }
    write_maps(s, io);
}

HD void observe(State s, Io io) {
    count(s, io);
    FOR_RANGE (k, NUM_AGENTS * OBS_RANGE * OBS_RANGE) {
        int i = k / (OBS_RANGE * OBS_RANGE), pixel = k % (OBS_RANGE * OBS_RANGE);
        int row = pixel / OBS_RANGE, column = pixel % OBS_RANGE;
        Cell c = {pursuer(s, i).x + column - REACH, pursuer(s, i).y + row - REACH};
        bool is_seen = math::max(row, column) <= 2 * REACH && is_inside(c);  // not the last row of an even OBS_RANGE
        io.obs[i][CHANNELS * pixel] = is_seen ? (float)s.wall[c.y][c.x] : 1.0f;
        io.obs[i][CHANNELS * pixel + 1] = is_seen ? (float)io.scratch->pursuers[c.y][c.x] : 0.0f;
        io.obs[i][CHANNELS * pixel + 2] = is_seen ? (float)io.scratch->evaders[c.y][c.x] : 0.0f;
    }
}
