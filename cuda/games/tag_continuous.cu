// SPDX-License-Identifier: Apache-2.0
// Tag on a square. Agents 0 .. NUM_TAGGERS - 1 tag, the rest run. Declared in gpu_vecenv/envs/tag_continuous.py.
#include "vecenv.cuh"
#include "cell_grid.cuh"

constexpr float TWO_PI = 6.28318530718f;
constexpr float REACH = TAGGING_DISTANCE * SIDE;
constexpr float DIAGONAL = 1.41421356237f * SIDE;
constexpr int NO_TAGGER = -1;

struct Scratch {
    int tagged[NUM_TAGGERS];  // runners that each tagger tagged in this tick
    Place place[NUM_AGENTS];  // whoever is out of game is at infinity
    Neighbors<SEE_ALL ? 1 : NUM_AGENTS> neighbors;
    AgentNumber<NUM_AGENTS>::Type seen[SEE_ALL ? 1 : NUM_AGENTS][SEE_ALL ? 1 : NUM_SEEN];  // nearest first, -1: nobody
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
    float least = REACH * REACH;
    int nearest = NO_TAGGER;
    for (int i = 0; i < NUM_TAGGERS; ++i) {
        float dx = s.position[i][0] - s.position[j][0], dy = s.position[i][1] - s.position[j][1];
        float square = dx * dx + dy * dy;
        nearest = square < least ? i : nearest;
        least = math::min(square, least);
    }
    return nearest;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        if (io.active[i] && s.in_game[i])
            move(s, io, i);
        else
            s.acceleration[i] = s.heading[i] = s.speed[i] = 0;
    }
    FOR_RANGE (i, NUM_TAGGERS) io.scratch->tagged[i] = 0;
    team_sync();

    bool runs = false;
    FOR_AGENTS (j) {  // a runner asks whether a tagger has it
        if (is_tagger(j)) continue;
        int tagger = io.active[j] && s.in_game[j] ? tagger_in_reach(s, j) : NO_TAGGER;
        if (tagger != NO_TAGGER) {
            team_add(&io.scratch->tagged[tagger], 1);
            io.rewards[j] += TAG_PENALTY;
            if (RUNNER_LEAVES_WHEN_TAGGED) {
                s.in_game[j] = false;
                s.heading[j] = s.speed[j] = 0;
            }
        }
        runs |= s.in_game[j];
    }
    bool over = !team_any(runs), last_tick = io.time >= MAX_STEPS;
    team_sync();

    FOR_AGENTS (i) {
        if (is_tagger(i)) {
            for (int count = io.scratch->tagged[i]; count > 0; --count) io.rewards[i] += TAG_REWARD;
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

// What agent i sees of agent j in a place of its observation, kind by kind; of nobody, zeros.
HD void show(State s, Io io, int i, int j, int place) {
    float* row = &io.obs[i][place];
    bool sees = j >= 0 && s.in_game[i];
    j = math::max(j, 0);
    row[0 * NUM_SEEN] = sees ? (s.position[j][0] - s.position[i][0]) / DIAGONAL : 0;
    row[1 * NUM_SEEN] = sees ? (s.position[j][1] - s.position[i][1]) / DIAGONAL : 0;
    row[2 * NUM_SEEN] = sees ? (s.speed[j] - s.speed[i]) / MAX_SPEED : 0;
    row[3 * NUM_SEEN] = sees ? (s.acceleration[j] - s.acceleration[i]) / MAX_SPEED : 0;
    row[4 * NUM_SEEN] = sees ? (s.heading[j] - s.heading[i]) / TWO_PI : 0;
    row[5 * NUM_SEEN] = sees && is_tagger(j);
    row[6 * NUM_SEEN] = sees && s.in_game[j];
}

HD void observe(State s, Io io) {
    if (!SEE_ALL) {
        FOR_AGENTS (i) {
            float x = s.in_game[i] ? s.position[i][0] : math::from_bits(math::INF_BITS);
            io.scratch->place[i] = {x, s.position[i][1]};
        }
        team_sync();
        io.scratch->neighbors.build(io.scratch->place, SIDE);
        FOR_AGENTS (k) {
            int i = io.scratch->neighbors.agent(k), nearest[SEE_ALL ? 1 : NUM_SEEN];
            io.scratch->neighbors.find(io.scratch->place, i, nearest);
            UNROLL for (int n = 0; n < (SEE_ALL ? 1 : NUM_SEEN); ++n) io.scratch->seen[i][n] = nearest[n];
        }
        team_sync();
    }
    FOR_RANGE (k, NUM_AGENTS * NUM_SEEN) {
        int i = k / NUM_SEEN, place = k % NUM_SEEN;
        show(s, io, i, SEE_ALL ? place + (place >= i) : io.scratch->seen[i][place], place);
    }
    FOR_AGENTS (i) io.obs[i][OBS_SIZE - 1] = s.in_game[i] ? (float)io.time / (float)MAX_STEPS : 0.0f;
}
