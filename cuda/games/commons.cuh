// SPDX-License-Identifier: Apache-2.0
// Games of a commons: players on a grid eat apples, see a window of it from where they stand, and zap each other out
// for a while. Rules and numbers are those of Melting Pot (https://github.com/google-deepmind/meltingpot, Apache
// License 2.0, DeepMind), written anew.
//
// A game declares the fields of gpu_vecenv/envs/commons.py, and calls begin_step(), move_and_zap(), respawn() and
// end_step() in this order, with what grows, or what its own beam does, between them.
#pragma once
#include "game_api.cuh"

constexpr int WALL = 1, ORCHARD = 2;  // what a cell is; an apple may be in an orchard
constexpr int NOBODY = -1;
enum Choice { NOOP, FORWARD, BACKWARD, LEFT, RIGHT, TURN_LEFT, TURN_RIGHT, ZAP, CLEAN };
enum Beam { ZAP_BEAM = 1, CLEAN_BEAM = 2 };                                             // bits of the field `beam`
enum Draw { GROWTH, ORDER, PLACE, ORIENTATION, DIRT, DIRTY_CELL };                      // random numbers of a step
enum Channel { WALLS, APPLES, ORCHARDS, READY, FACING, ZAPS = FACING + 4, FIRST_OWN };  // FIRST_OWN: of the game
constexpr int VIEW_WIDTH = 2 * VIEW_SIDE + 1;
constexpr u8 SHOWN = 255;
TABLE int AHEAD[4][2] = {{0, -1}, {1, 0}, {0, 1}, {-1, 0}};  // north, east, south, west: column, row
TABLE int TURNS[5] = {0, 0, 2, 3, 1};                        // quarter turns from where one faces to where one goes

struct Scratch {
    int agent_at[HEIGHT][WIDTH];  // or NOBODY; those that are out are nowhere
    int order[NUM_AGENTS];        // in which they move
    int hits[NUM_AGENTS];         // by beams of this step
    float total_reward;
    int dirty;  // cells of the river
};

// Channels from FIRST_OWN on; defined by the game.
HD void look_own(State s, int y, int x, bool outside, Observation* pixel);

HD bool is_out(State s, int i) { return s.respawn_in[i] > 0; }
HD const int* right_of(int orientation) { return AHEAD[(orientation + 1) % 4]; }

// Fills in agent_at; every thread of the group calls it.
HD void find_agents(State s, Io io) {
    FOR_RANGE (k, HEIGHT * WIDTH) io.scratch->agent_at[k / WIDTH][k % WIDTH] = NOBODY;
    group_sync();
    FOR_AGENTS (i)
        if (!is_out(s, i)) io.scratch->agent_at[s.position[i][1]][s.position[i][0]] = i;
    group_sync();
}

// Agent i at one of the spawn points first .. end - 1 that are free, all equally probable, facing anywhere.
HD void place(State s, Io io, int i, int first, int end) {
    int n = 0;
    for (int k = first; k < end; ++k) n += io.scratch->agent_at[s.spawn[k][1]][s.spawn[k][0]] == NOBODY;
    n = io.rng.below(i, PLACE, n);
    for (int k = first; k < end; ++k) {
        int x = s.spawn[k][0], y = s.spawn[k][1];
        if (io.scratch->agent_at[y][x] != NOBODY || n-- > 0) continue;
        s.position[i][0] = x;
        s.position[i][1] = y;
        s.orientation[i] = io.rng.below(i, ORIENTATION, 4);
        io.scratch->agent_at[y][x] = i;
        return;
    }
}

// The fields of this header, but for the apples.
HD void place_all(State s, Io io) {
    FOR_AGENTS (i) {
        s.respawn_in[i] = 1;  // out until it is placed
        s.zap_wait[i] = s.eaten[i] = s.eaten_at[i] = s.steps_out[i] = 0;
    }
    FOR_RANGE (k, HEIGHT * WIDTH) s.beam[k / WIDTH][k % WIDTH] = 0;
    group_sync();
    find_agents(s, io);
    ONCE {
        for (int i = 0; i < NUM_AGENTS; ++i) {
            s.respawn_in[i] = 0;
            bool inside = i < NUM_FIRST_SPAWNS;
            place(s, io, i, inside ? 0 : NUM_FIRST_SPAWNS, inside ? NUM_FIRST_SPAWNS : NUM_SPAWNS);
        }
    }
}

HD void eat(State s, Io io, int i, int y, int x) {
    s.apple[y][x] = 0;
    s.eaten[i] += 1;
    s.eaten_at[i] += io.elapsed_steps;
    io.rewards[i] += APPLE_REWARD;
}

// An apple where none is; a player that stands there eats it at once. One thread per cell.
HD void grow(State s, Io io, int y, int x) {
    int i = io.scratch->agent_at[y][x];
    s.apple[y][x] = 1;
    if (i != NOBODY) eat(s, io, i, y, x);
}

HD void begin_step(State s, Io io) {
    FOR_AGENTS (i) io.scratch->hits[i] = 0;
    FOR_RANGE (k, HEIGHT * WIDTH) s.beam[k / WIDTH][k % WIDTH] = 0;
    find_agents(s, io);
}

// One after the other, in random order: a player enters a cell without wall and player, and eats the apple there.
HD void move(State s, Io io) {
    for (int n = 0; n < NUM_AGENTS; ++n) {  // all permutations are equally probable
        int k = io.rng.below(n, ORDER, n + 1);
        io.scratch->order[n] = n;
        io.scratch->order[n] = io.scratch->order[k];
        io.scratch->order[k] = n;
    }
    for (int n = 0; n < NUM_AGENTS; ++n) {
        int i = io.scratch->order[n], action = is_out(s, i) ? NOOP : io.action(i);
        if (action == TURN_LEFT || action == TURN_RIGHT)
            s.orientation[i] = (s.orientation[i] + (action == TURN_LEFT ? 3 : 1)) % 4;
        if (action < FORWARD || action > RIGHT) continue;
        const int* ahead = AHEAD[(s.orientation[i] + TURNS[action]) % 4];
        int x = s.position[i][0], y = s.position[i][1], to_x = x + ahead[0], to_y = y + ahead[1];
        if (s.terrain[to_y][to_x] == WALL || io.scratch->agent_at[to_y][to_x] != NOBODY) continue;
        io.scratch->agent_at[y][x] = NOBODY;
        io.scratch->agent_at[to_y][to_x] = i;
        s.position[i][0] = to_x;
        s.position[i][1] = to_y;
        if (s.apple[to_y][to_x]) eat(s, io, i, to_y, to_x);
    }
}

// A ray of the beam from a cell on: whether that cell itself stops it.
template <class Stops>
HD bool ray(State s, int y, int x, const int* ahead, int length, Beam beam, Stops stops) {
    for (int n = 0; n < length; ++n, x += ahead[0], y += ahead[1]) {
        if (s.terrain[y][x] == WALL || stops(y, x)) return n == 0;
        s.beam[y][x] = (u8)(s.beam[y][x] | beam);
    }
    return false;
}

// Agent i's beam: rays from the cells left and right of it, shorter by one for each cell farther away, and from the
// cell ahead. What `stops` a ray is not lit.
template <class Stops>
HD void fire(State s, int i, Beam beam, Stops stops) {
    const int *ahead = AHEAD[s.orientation[i]], *right = right_of(s.orientation[i]);
    int x = s.position[i][0], y = s.position[i][1];
    for (int side = -1; side <= 1; side += 2)
        for (int r = 1; r <= BEAM_RADIUS; ++r)
            if (ray(s, y + side * r * right[1], x + side * r * right[0], ahead, BEAM_LENGTH - r + 1, beam, stops))
                break;
    ray(s, y + ahead[1], x + ahead[0], ahead, BEAM_LENGTH, beam, stops);
}

// Whether agent i fires now; counts down the steps until it can again.
HD bool fires(State s, Io io, int i, int choice, int cooldown, int* wait) {
    if (is_out(s, i)) return false;
    if (*wait > 0) {
        --*wait;
        return false;
    }
    if (io.action(i) != choice) return false;
    *wait = cooldown;
    return true;
}

// By one thread. All beams at once: those that are hit fire too, and stop the beams of others.
HD void move_and_zap(State s, Io io) {
    move(s, io);
    for (int i = 0; i < NUM_AGENTS; ++i) {
        if (!fires(s, io, i, ZAP, ZAP_COOLDOWN, &s.zap_wait[i])) continue;
        fire(s, i, ZAP_BEAM, [&](int y, int x) {
            int hit = io.scratch->agent_at[y][x];
            if (hit == NOBODY) return false;
            io.scratch->hits[hit] += 1;
            io.rewards[hit] -= ZAPPED_PENALTY;
            io.rewards[i] += ZAP_REWARD;
            return true;
        });
    }
}

// By one thread: whose time is over comes back, before those that were hit in this step go.
HD void respawn(State s, Io io) {
    for (int i = 0; i < NUM_AGENTS; ++i) {
        if (!is_out(s, i)) continue;
        s.steps_out[i] += 1;
        if (--s.respawn_in[i] == 0) place(s, io, i, NUM_FIRST_SPAWNS, NUM_SPAWNS);
    }
}

HD void end_step(State s, Io io) {
    group_sync();
    FOR_AGENTS (i) {
        if (io.scratch->hits[i] > 0) s.respawn_in[i] = ZAPPED_STEPS + 1;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
    }
    if (COMMON_WEIGHT == 0) return;
    ONCE {
        float total = 0;
        for (int i = 0; i < NUM_AGENTS; ++i) total += io.rewards[i];
        io.scratch->total_reward = total * COMMON_WEIGHT;
    }
    group_sync();
    FOR_AGENTS (i) io.rewards[i] = io.scratch->total_reward;
}

// What player i sees at a cell; outside of the map all is wall.
HD void look(State s, Io io, int i, int y, int x, Observation* pixel) {
    bool outside = y < 0 || y >= HEIGHT || x < 0 || x >= WIDTH;
    int terrain = outside ? WALL : s.terrain[y][x], beam = outside ? 0 : s.beam[y][x];
    int j = outside ? NOBODY : io.scratch->agent_at[y][x];
    int facing = j == NOBODY || j == i ? NOBODY : (s.orientation[j] - s.orientation[i] + 4) % 4;
    pixel[WALLS] = terrain == WALL ? SHOWN : 0;
    pixel[APPLES] = !outside && s.apple[y][x] ? SHOWN : 0;
    pixel[ORCHARDS] = terrain == ORCHARD ? SHOWN : 0;
    pixel[READY] = (u8)(SHOWN * (ZAP_COOLDOWN - s.zap_wait[i]) / ZAP_COOLDOWN);
    for (int turn = 0; turn < 4; ++turn) pixel[FACING + turn] = facing == turn ? SHOWN : 0;
    pixel[ZAPS] = beam & ZAP_BEAM ? SHOWN : 0;
    look_own(s, y, x, outside, pixel);
}

HD void observe(State s, Io io) {
    constexpr int CELLS = OBS_SIZE / NUM_CHANNELS;
    find_agents(s, io);
    FOR_RANGE (k, NUM_AGENTS * CELLS) {
        int i = k / CELLS, ahead = VIEW_AHEAD - k % CELLS / VIEW_WIDTH, aside = k % CELLS % VIEW_WIDTH - VIEW_SIDE;
        const int *forth = AHEAD[s.orientation[i]], *right = right_of(s.orientation[i]);
        int x = s.position[i][0] + ahead * forth[0] + aside * right[0];
        int y = s.position[i][1] + ahead * forth[1] + aside * right[1];
        Observation* pixel = &io.obs[i][k % CELLS * NUM_CHANNELS];
        if (is_out(s, i))
            for (int channel = 0; channel < NUM_CHANNELS; ++channel) pixel[channel] = 0;
        else
            look(s, io, i, y, x, pixel);
    }
    FOR_AGENTS (i) io.acting[i] = !is_out(s, i);
}
