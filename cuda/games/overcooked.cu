// SPDX-License-Identifier: Apache-2.0
// Overcooked: two players cook soups of three onions. The rules are those of overcooked_ai with old_dynamics=True
// (https://github.com/HumanCompatibleAI/overcooked_ai, MIT License, Center for Human-Compatible AI), written anew.
// Declared in gpu_vecenv/envs/overcooked.py.
#include "game_api.cuh"

struct Scratch {};

constexpr int FLOOR = 0, COUNTER = 1, POT = 2, ONIONS = 3, DISHES = 4, SERVING = 5;  // what a cell is
constexpr int NOTHING = 0, ONION = 1, DISH = 2, SOUP = 3;                            // what lies there, or is held
constexpr int INTERACT = 5, FULL = 3;
TABLE int TERRAIN_CHANNELS[6] = {0, 11, 10, 12, 14, 15};                     // of what a cell is, but floor
TABLE int STEPS[6][2] = {{0, -1}, {0, 1}, {1, 0}, {-1, 0}, {0, 0}, {0, 0}};  // north, south, east, west

// The n-th cell of floor, row by row.
HD void place_player(State s, int i, int n) {
    for (int k = 0; k < HEIGHT * WIDTH; ++k) {
        if (s.terrain[k / WIDTH][k % WIDTH] != FLOOR || n-- > 0) continue;
        s.position[i][0] = k % WIDTH;
        s.position[i][1] = k / WIDTH;
        return;
    }
}

HD int draw_object(Io io, int i) {
    if (io.rng.uniform(i, 1) >= RANDOM_OBJECT_PROBABILITY) return NOTHING;
    float u = io.rng.uniform(i, 2);
    return u < 0.2f ? DISH : u < 0.8f ? ONION : SOUP;
}

HD void reset(State s, Io io) {
    FOR_AGENTS (i) {
        s.position[i][0] = s.start[i][0];
        s.position[i][1] = s.start[i][1];
        s.orientation[i] = 0;
        s.held[i] = draw_object(io, i);
    }
    group_sync();
    ONCE {
        s.sparse_return[0] = 0;
        if (RANDOM_START_POSITIONS) {  // all pairs of different cells are equally probable
            int first = io.rng.below(0, 0, NUM_FLOOR), second = io.rng.below(1, 0, NUM_FLOOR - 1);
            place_player(s, 0, first);
            place_player(s, 1, second + (second >= first));
        }
    }
    FOR_RANGE (k, HEIGHT * WIDTH) {
        int y = k / WIDTH, x = k % WIDTH;
        bool filled = s.terrain[y][x] == POT && io.rng.uniform(k, 3) < RANDOM_OBJECT_PROBABILITY;
        s.item[y][x] = (u8)(filled ? 1 + io.rng.below(k, 4, FULL) : 0);
        s.cooking_tick[y][x] = 0;
    }
}

HD int count(State s, int terrain, int item) {
    int found = 0;
    for (int k = 0; k < HEIGHT * WIDTH; ++k) {
        int y = k / WIDTH, x = k % WIDTH;
        found += s.terrain[y][x] == terrain && (item == NOTHING ? s.item[y][x] != 0 : s.item[y][x] == item);
    }
    return found;
}

// What player i does to the cell before it: the shaped reward. Deliveries are not among it.
HD float interact(State s, int i, int filled_pots) {
    int x = s.position[i][0] + STEPS[s.orientation[i]][0], y = s.position[i][1] + STEPS[s.orientation[i]][1];
    int terrain = s.terrain[y][x], item = s.item[y][x], held = s.held[i];
    float shaped = 0;
    if (terrain == COUNTER && (held == NOTHING) != (item == NOTHING)) {
        s.item[y][x] = (u8)held;
        s.held[i] = item;
    } else if (terrain == ONIONS && held == NOTHING) {
        s.held[i] = ONION;
    } else if (terrain == DISHES && held == NOTHING) {
        if (count(s, COUNTER, DISH) == 0 && (s.held[1 - i] == DISH) < filled_pots) shaped = DISH_PICKUP_REWARD;
        s.held[i] = DISH;
    } else if (terrain == POT && held == ONION && item < FULL) {
        s.item[y][x] = (u8)(item + 1);
        s.held[i] = NOTHING;
        shaped = PLACEMENT_IN_POT_REWARD;
    } else if (terrain == POT && held == DISH && item == FULL && s.cooking_tick[y][x] >= COOK_TIME) {
        s.item[y][x] = 0;
        s.cooking_tick[y][x] = 0;
        s.held[i] = SOUP;
        shaped = SOUP_PICKUP_REWARD;
    }
    return shaped;
}

HD bool delivers(State s, int i) {
    int x = s.position[i][0] + STEPS[s.orientation[i]][0], y = s.position[i][1] + STEPS[s.orientation[i]][1];
    return s.held[i] == SOUP && s.terrain[y][x] == SERVING;
}

// Players turn, and move unless they would share a cell or exchange theirs.
HD void move(State s, Io io) {
    int x[NUM_AGENTS], y[NUM_AGENTS];
    for (int i = 0; i < NUM_AGENTS; ++i) {
        int action = io.action(i);
        if (action < 4) s.orientation[i] = action;
        x[i] = s.position[i][0] + STEPS[action][0];
        y[i] = s.position[i][1] + STEPS[action][1];
        if (s.terrain[y[i]][x[i]] != FLOOR) {
            x[i] = s.position[i][0];
            y[i] = s.position[i][1];
        }
    }
    bool share = x[0] == x[1] && y[0] == y[1];
    bool exchange =
        x[0] == s.position[1][0] && y[0] == s.position[1][1] && x[1] == s.position[0][0] && y[1] == s.position[0][1];
    if (share || exchange) return;
    for (int i = 0; i < NUM_AGENTS; ++i) {
        s.position[i][0] = x[i];
        s.position[i][1] = y[i];
    }
}

HD void step(State s, Io io) {
    ONCE {
        bool anybody = io.action(0) == INTERACT || io.action(1) == INTERACT;
        int deliveries = 0, filled_pots = anybody ? count(s, POT, NOTHING) : 0;  // before anybody interacts
        for (int i = 0; i < NUM_AGENTS; ++i) {                                   // the first player before the second
            if (io.action(i) != INTERACT) continue;
            if (delivers(s, i)) {
                s.held[i] = NOTHING;
                ++deliveries;
            } else {
                io.rewards[i] = s.shaping_weight[0] * interact(s, i, filled_pots);
            }
        }
        move(s, io);
        float sparse = (float)deliveries * DELIVERY_REWARD;
        for (int i = 0; i < NUM_AGENTS; ++i) io.rewards[i] = sparse + io.rewards[i];
        s.sparse_return[0] += sparse;
    }
    group_sync();
    FOR_RANGE (k, HEIGHT * WIDTH) {
        int y = k / WIDTH, x = k % WIDTH;
        bool cooks = s.terrain[y][x] == POT && s.item[y][x] == FULL && s.cooking_tick[y][x] < COOK_TIME;
        if (cooks) s.cooking_tick[y][x] = (u8)(s.cooking_tick[y][x] + 1);
    }
    FOR_AGENTS (i) io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
}

HD bool stands(State s, int i, int y, int x) { return s.position[i][0] == x && s.position[i][1] == y; }

// The channels of the lossless state encoding that are not 0 at one cell, as player i sees it.
HD void write_cell(State s, Io io, int i, int cell) {
    int y = cell / WIDTH, x = cell % WIDTH, first = cell * NUM_CHANNELS;
    int terrain = s.terrain[y][x], item = s.item[y][x];
    for (int place = 0; place < NUM_AGENTS; ++place) {  // the observer first, then the same for orientations
        int player = place == 0 ? i : 1 - i;
        if (!stands(s, player, y, x)) continue;
        io.obs[i][first + place] = 1;
        io.obs[i][first + 2 + 4 * place + s.orientation[player]] = 1;
        item = s.held[player];
    }
    if (terrain != FLOOR) io.obs[i][first + TERRAIN_CHANNELS[terrain]] = 1;
    if (MAX_STEPS - io.elapsed_steps < 40) io.obs[i][first + 25] = 1;
    if (terrain == POT) {
        if (item < FULL) {
            io.obs[i][first + 16] = (float)item;
        } else {
            int tick = s.cooking_tick[y][x];
            io.obs[i][first + 18] = FULL;
            io.obs[i][first + 20] = (float)(COOK_TIME - tick);
            io.obs[i][first + 21] = tick >= COOK_TIME;
        }
    } else if (item == SOUP) {
        io.obs[i][first + 18] = FULL;
        io.obs[i][first + 21] = 1;
    } else if (item != NOTHING) {
        io.obs[i][first + (item == DISH ? 22 : 23)] = 1;
    }
}

// Few channels are not 0 (those of tomatoes never): zeros are written in order, side by side, then these.
HD void observe(State s, Io io) {
    FOR_OBS (i, k) io.obs[i][k] = 0;
    group_sync();
    FOR_RANGE (n, NUM_AGENTS * HEIGHT * WIDTH) write_cell(s, io, n / (HEIGHT * WIDTH), n % (HEIGHT * WIDTH));
}
