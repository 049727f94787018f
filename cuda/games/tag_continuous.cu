// SPDX-License-Identifier: Apache-2.0
// Tag on a square. Agents 0 .. NUM_TAGGERS - 1 tag, the rest run. Declared in gpu_vecenv/envs/tag_continuous.py.
#include "game_api.cuh"
#include "cell_grid.cuh"

constexpr float TWO_PI = 6.28318530718f;
constexpr float TAGGING_RADIUS = TAGGING_DISTANCE * SIDE;
constexpr float DIAGONAL = 1.41421356237f * SIDE;
constexpr int NO_TAGGER = -1;

struct Scratch {
    int tagged[NUM_TAGGERS];                       // runners that each tagger tagged in this step
    Point position[NUM_AGENTS];                    // agents out of the game are at infinity
    Point direction[EGOCENTRIC ? NUM_AGENTS : 1];  // of the heading: its cosine and sine
    Neighbors<OBSERVE_ALL ? 1 : NUM_AGENTS> neighbors;
    // Nearest first, -1 in an empty slot.
    AgentIndex<NUM_AGENTS>::Type observed[OBSERVE_ALL ? 1 : NUM_AGENTS][OBSERVE_ALL ? 1 : NUM_OBSERVED];
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

// Accelerates, turns and moves agent i; the edge stops it, with a penalty.
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

// The nearest tagger that can tag runner j, the lowest index on ties.
HD int nearest_tagger_in_range(State s, int j) {
    float least = TAGGING_RADIUS * TAGGING_RADIUS;
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
    group_sync();

    bool any_runner_left = false;
    FOR_AGENTS (j) {  // every runner finds its tagger
        if (is_tagger(j)) continue;
        int tagger = io.active[j] && s.in_game[j] ? nearest_tagger_in_range(s, j) : NO_TAGGER;
        if (tagger != NO_TAGGER) {
            atomic_add(&io.scratch->tagged[tagger], 1);
            io.rewards[j] += TAG_PENALTY;
            if (RUNNER_LEAVES_WHEN_TAGGED) {
                s.in_game[j] = false;
                s.heading[j] = s.speed[j] = 0;
            }
        }
        any_runner_left |= s.in_game[j];
    }
    bool all_tagged = !group_any(any_runner_left), at_time_limit = io.elapsed_steps >= MAX_STEPS;
    group_sync();

    FOR_AGENTS (i) {
        if (is_tagger(i)) {
            for (int count = io.scratch->tagged[i]; count > 0; --count) io.rewards[i] += TAG_REWARD;
            io.terminations[i] = all_tagged;
            io.truncations[i] = at_time_limit && !all_tagged;
        } else if (!s.in_game[i]) {
            io.terminations[i] = true;  // tagged in this step, or out of the game in a saved initial state
        } else if (at_time_limit) {
            io.rewards[i] += SURVIVAL_REWARD;
            io.truncations[i] = true;
        }
    }
}

// Writes the features of agent j into a slot of agent i's observation, feature by feature; zeros if j is -1.
HD void write_neighbor(State s, Io io, int i, int j, int slot) {
    float* row = &io.obs[i][slot];
    bool visible = j >= 0 && s.in_game[i];
    j = math::max(j, 0);
    row[0 * NUM_OBSERVED] = visible ? (s.position[j][0] - s.position[i][0]) / DIAGONAL : 0;
    row[1 * NUM_OBSERVED] = visible ? (s.position[j][1] - s.position[i][1]) / DIAGONAL : 0;
    row[2 * NUM_OBSERVED] = visible ? (s.speed[j] - s.speed[i]) / MAX_SPEED : 0;
    row[3 * NUM_OBSERVED] = visible ? (s.acceleration[j] - s.acceleration[i]) / MAX_SPEED : 0;
    row[4 * NUM_OBSERVED] = visible ? (s.heading[j] - s.heading[i]) / TWO_PI : 0;
    row[5 * NUM_OBSERVED] = visible && is_tagger(j);
    row[6 * NUM_OBSERVED] = visible && s.in_game[j];
}

// A vector in the frame of an agent that heads in `direction`: ahead of it, and to its left.
HD Point in_frame(Point direction, float x, float y) {
    return {direction.x * x + direction.y * y, direction.x * y - direction.y * x};
}

// The same for the egocentric layout.
HD void write_neighbor_egocentric(State s, Io io, int i, int j, int slot) {
    float* row = &io.obs[i][slot];
    bool visible = j >= 0 && s.in_game[i];
    j = math::max(j, 0);
    Point own = io.scratch->direction[i], other = io.scratch->direction[j];
    Point place = in_frame(own, s.position[j][0] - s.position[i][0], s.position[j][1] - s.position[i][1]);
    Point velocity =
        in_frame(own, s.speed[j] * other.x - s.speed[i] * own.x, s.speed[j] * other.y - s.speed[i] * own.y);
    row[0 * NUM_OBSERVED] = visible ? place.x / DIAGONAL : 0;
    row[1 * NUM_OBSERVED] = visible ? place.y / DIAGONAL : 0;
    row[2 * NUM_OBSERVED] = visible ? velocity.x / MAX_SPEED : 0;
    row[3 * NUM_OBSERVED] = visible ? velocity.y / MAX_SPEED : 0;
    row[4 * NUM_OBSERVED] = visible && is_tagger(j);
    row[5 * NUM_OBSERVED] = visible;
    row[6 * NUM_OBSERVED] = visible && s.in_game[j];
}

// Writes what agent i observes of itself, after the others: heading, speed, acceleration, position.
HD void write_own(State s, Io io, int i) {
    float* own = &io.obs[i][7 * NUM_OBSERVED];
    bool in_game = s.in_game[i];
    own[0] = in_game ? io.scratch->direction[i].x : 0;
    own[1] = in_game ? io.scratch->direction[i].y : 0;
    own[2] = in_game ? s.speed[i] / MAX_SPEED : 0;
    own[3] = in_game ? s.acceleration[i] / MAX_SPEED : 0;
    own[4] = in_game ? s.position[i][0] / SIDE : 0;
    own[5] = in_game ? s.position[i][1] / SIDE : 0;
}

HD void observe(State s, Io io) {
    if (EGOCENTRIC) {
        FOR_AGENTS (i) {
            Point* direction = &io.scratch->direction[EGOCENTRIC ? i : 0];
            math::sincos(s.heading[i], &direction->y, &direction->x);
        }
        if (OBSERVE_ALL) group_sync();
    }
    if (!OBSERVE_ALL) {
        FOR_AGENTS (i) {
            float x = s.in_game[i] ? s.position[i][0] : math::from_bits(math::INF_BITS);
            io.scratch->position[i] = {x, s.position[i][1]};
        }
        group_sync();
        io.scratch->neighbors.build(io.scratch->position, SIDE);
        FOR_AGENTS (k) {
            int i = io.scratch->neighbors.agent(k), nearest[OBSERVE_ALL ? 1 : NUM_OBSERVED];
            io.scratch->neighbors.find(io.scratch->position, i, nearest);
            UNROLL for (int n = 0; n < (OBSERVE_ALL ? 1 : NUM_OBSERVED); ++n) io.scratch->observed[i][n] = nearest[n];
        }
        group_sync();
    }
    FOR_RANGE (k, NUM_AGENTS * NUM_OBSERVED) {
        int i = k / NUM_OBSERVED, slot = k % NUM_OBSERVED;
        int j = OBSERVE_ALL ? slot + (slot >= i) : io.scratch->observed[i][slot];
        if (EGOCENTRIC)
            write_neighbor_egocentric(s, io, i, j, slot);
        else
            write_neighbor(s, io, i, j, slot);
    }
    if (EGOCENTRIC)
        FOR_AGENTS (i) write_own(s, io, i);
    FOR_AGENTS (i) io.obs[i][OBS_SIZE - 1] = s.in_game[i] ? (float)io.elapsed_steps / (float)MAX_STEPS : 0.0f;
}
