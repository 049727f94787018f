// SPDX-License-Identifier: Apache-2.0
// Tag on a square. Agents 0 .. NUM_TAGGERS - 1 tag, the rest run. Declared in gpu_vecenv/envs/tag_continuous.py.
#include "vecenv.cuh"
#include "cell_grid.cuh"

constexpr float TWO_PI = 6.28318530718f;
constexpr float REACH = TAGGING_DISTANCE * SIDE;
constexpr float DIAGONAL = 1.41421356237f * SIDE;
constexpr int NO_TAGGER = -1;

// What an observation shows of the difference between two agents, in its order.
enum Feature { X, Y, SPEED, ACCELERATION, HEADING, NUM_FEATURES };

struct Scratch {
    int tagger_of[NUM_AGENTS];  // who tagged a runner in this tick
    float feature[NUM_FEATURES][NUM_AGENTS];
    int seen[SEE_ALL ? 1 : NUM_AGENTS][SEE_ALL ? 1 : NUM_SEEN];  // nearest first, -1: nobody
    Neighbors<SEE_ALL ? 1 : NUM_AGENTS> neighbors;
};

HD bool is_tagger(int i) { return i < NUM_TAGGERS; }

HD void reset(State s, Io io) {
    FOR_AGENTS (i) {
        s.position[i][0] = io.rng.uniform(i, 0) * SIDE;
        s.position[i][1] = io.rng.uniform(i, 1) * SIDE;
        s.heading[i] = (float)io.rng.below(i, 0, 4) * (TWO_PI / 4);
        s.speed[i] = 0;
        s.acceleration[i] = 0;
        s.in_game[i] = true;
    }
}

// Accelerate, turn, move; the edge stops an agent and may cost it.
HD void move(State s, Io io, int i) {
    float top_speed = MAX_SPEED * (is_tagger(i) ? TAGGER_SKILL : RUNNER_SKILL);
    float acceleration = s.acceleration[i] + s.acceleration_level[io.action(i, 0)];
    float heading = math::mod(s.heading[i] + s.turn_level[io.action(i, 1)], TWO_PI);
    float speed = math::min(top_speed, math::max(0.0f, s.speed[i] + acceleration));
    if (speed <= 0 || speed >= top_speed) acceleration = 0;

    float direction[2];
    math::sincos(heading, &direction[1], &direction[0]);
    bool hit = false;
    for (int axis = 0; axis < 2; ++axis) {
        float wanted = s.position[i][axis] + speed * direction[axis];
        s.position[i][axis] = math::clamp(wanted, 0.0f, SIDE);
        hit |= s.position[i][axis] != wanted;
    }
    s.acceleration[i] = acceleration;
    s.heading[i] = heading;
    s.speed[i] = speed;
    io.rewards[i] = (hit ? EDGE_PENALTY : 0) + (is_tagger(i) ? TAGGER_STEP_REWARD : RUNNER_STEP_REWARD);
}

// The nearest tagger within reach of runner j, lowest number on ties.
HD int tagger_in_reach(State s, int j) {
    Nearest<1> nearest;
    nearest.clear();
    for (int i = 0; i < NUM_TAGGERS; ++i) {
        float dx = s.position[i][0] - s.position[j][0], dy = s.position[i][1] - s.position[j][1];
        nearest.offer(dx * dx + dy * dy, i);
    }
    return nearest.distance(0) < REACH * REACH ? nearest.id(0) : NO_TAGGER;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        if (io.active[i] && s.in_game[i])
            move(s, io, i);
        else
            s.acceleration[i] = s.heading[i] = s.speed[i] = 0;
    }
    team_sync();

    bool tags = false, runs = false;
    FOR_AGENTS (j) {  // a runner asks whether a tagger has it
        if (is_tagger(j)) continue;
        int tagger = io.active[j] && s.in_game[j] ? tagger_in_reach(s, j) : NO_TAGGER;
        io.scratch->tagger_of[j] = tagger;
        if (tagger != NO_TAGGER) {
            tags = true;
            io.rewards[j] += TAG_PENALTY;
            if (RUNNER_LEAVES_WHEN_TAGGED) {
                s.in_game[j] = false;
                s.heading[j] = s.speed[j] = 0;
            }
        }
        runs |= s.in_game[j];
    }
    tags = team_any(tags);
    bool over = !team_any(runs), last_tick = io.time >= MAX_STEPS;
    team_sync();

    FOR_AGENTS (i) {
        if (is_tagger(i)) {
            for (int j = NUM_TAGGERS; tags && j < NUM_AGENTS; ++j) {  // in agent order: equal sums everywhere
                if (io.scratch->tagger_of[j] == i) io.rewards[i] += TAG_REWARD;
            }
            io.terminations[i] = over;
            io.truncations[i] = last_tick && !over;
        } else if (!s.in_game[i]) {
            io.terminations[i] = true;  // tagged now, or out of game from a saved start
        } else if (last_tick) {
            io.rewards[i] += SURVIVAL_REWARD;
            io.truncations[i] = true;
        }
    }
}

HD void find_seen(Io io, int i) {
    Nearest<SEE_ALL ? 1 : NUM_SEEN> nearest;
    io.scratch->neighbors.find(io.scratch->feature[X], io.scratch->feature[Y], i, nearest);
    UNROLL for (int k = 0; k < (SEE_ALL ? 1 : NUM_SEEN); ++k) io.scratch->seen[i][k] = nearest.id(k);
}

HD float feature(State s, Io io, int i, int k) {
    constexpr float UNIT[NUM_FEATURES] = {DIAGONAL, DIAGONAL, MAX_SPEED, MAX_SPEED, TWO_PI};
    if (!s.in_game[i]) return 0;
    if (k == OBS_SIZE - 1) return (float)io.time / (float)MAX_STEPS;
    int kind = k / NUM_SEEN, place = k % NUM_SEEN;
    int j = SEE_ALL ? place + (place >= i) : io.scratch->seen[i][place];
    if (j < 0) return 0;
    if (kind == NUM_FEATURES) return is_tagger(j);
    if (kind == NUM_FEATURES + 1) return s.in_game[j];
    return (io.scratch->feature[kind][j] - io.scratch->feature[kind][i]) / UNIT[kind];
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        // Whoever is out of game is infinitely far: the search for the nearest passes it over.
        bool far = !SEE_ALL && !s.in_game[i];
        io.scratch->feature[X][i] = far ? math::from_bits(0x7f800000u) : s.position[i][0];
        io.scratch->feature[Y][i] = s.position[i][1];
        io.scratch->feature[SPEED][i] = s.speed[i];
        io.scratch->feature[ACCELERATION][i] = s.acceleration[i];
        io.scratch->feature[HEADING][i] = s.heading[i];
    }
    team_sync();
    if (!SEE_ALL) {
        io.scratch->neighbors.build(io.scratch->feature[X], io.scratch->feature[Y], SIDE);
        FOR_AGENTS (k) find_seen(io, io.scratch->neighbors.agent(k));
        team_sync();
    }
    FOR_OBS (i, k) io.obs[i][k] = feature(s, io, i, k);
}
