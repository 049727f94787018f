// SPDX-License-Identifier: Apache-2.0
// An army of agents, units 0 .. NUM_ALLIES - 1, fights one that a script commands. See gpu_vecenv/envs/skirmish.py.
#include "game_api.cuh"
#include "cell_grid.cuh"
#include "crowd.cuh"

enum Stat { VELOCITY, DAMAGE, ATTACK_RANGE, SIGHT_RANGE, RADIUS, FULL_HEALTH, COOLDOWN };
constexpr int STOP = 4, FIRST_ATTACK = 5, NOBODY = -1;
constexpr int UNIT_FEATURES = 7 + NUM_TYPES, OWN_FEATURES = 4 + NUM_TYPES,
              NUM_SEEN = NUM_SEEN_ALLIES + NUM_SEEN_ENEMIES;
constexpr int LARGER_ARMY = NUM_ALLIES > NUM_ENEMIES ? NUM_ALLIES : NUM_ENEMIES;
constexpr int SLOTS = OBSERVE_ALL ? 1 : NUM_SEEN_ALLIES;  // of each army, where agents see the nearest

// What a unit does in all moves of a step.
struct Order {
    Point way;                                  // in each move
    int target;                                 // whom it attacks, or NOBODY
    float attack_range, damage, pause, radius;  // pause: between its hits
};

struct Scratch {
    Disc disc[NUM_UNITS];  // before units push each other; without radius if dead
    Order order[NUM_UNITS];
    int hit[NUM_UNITS];                                 // whom it hits in this move, or NOBODY
    float health_before[NUM_UNITS];                     // at the beginning of the step
    float lost[NUM_UNITS];                              // share of the full health that the unit lost in this step
    int seen[OBSERVE_ALL ? 1 : NUM_ALLIES][2 * SLOTS];  // allies, then enemies, nearest first; NOBODY in an empty slot
    float reward;
    bool over;
};

HD bool is_ally(int u) { return u < NUM_ALLIES; }
HD bool is_alive(State s, int u) { return s.health[u] > 0; }
HD float stat(State s, int u, Stat which) { return s.unit_stats[s.unit_type[u]][which]; }

// North, east, south, west; nowhere by all other actions.
HD Point direction(int a) { return {(float)((a == 1) - (a == 3)), (float)((a == 0) - (a == 2))}; }

HD float distance(State s, int u, int v) {
    float dx = s.position[v][0] - s.position[u][0], dy = s.position[v][1] - s.position[u][1];
    return math::sqrt(dx * dx + dy * dy);
}

// Without branches, so that all loads overlap.
HD bool is_within(State s, int u, int v, float range) {
    int alive = is_alive(s, u) & is_alive(s, v), near = distance(s, u, v) < range;
    return (alive & near) != 0;
}
HD bool is_near(State s, int u, int v, Stat range) { return is_within(s, u, v, stat(s, u, range)); }

// With OBSERVED_UNITS: the nearest visible allies and enemies of agent i, the lower number first on ties.
HD void find_seen(State s, Io io, int i) {
    if (OBSERVE_ALL) return;
    Nearest<SLOTS> allies, enemies;
    allies.clear(), enemies.clear();
    for (int v = 0; v < NUM_UNITS; ++v)
        if (v != i && is_near(s, i, v, SIGHT_RANGE)) (is_ally(v) ? allies : enemies).insert(distance(s, i, v), v);
    for (int k = 0; k < 2 * SLOTS; ++k) io.scratch->seen[i][k] = k < SLOTS ? allies.id(k) : enemies.id(k - SLOTS);
}

// The unit in a slot of agent i's observation, or NOBODY.
HD int unit_in_slot(Io io, int i, int slot) {
    if (!OBSERVE_ALL) return io.scratch->seen[i][slot];
    return slot < NUM_SEEN_ALLIES ? slot + (slot >= i) : slot + 1;
}

// The unit that unit u attacks with this action, or NOBODY. Enemies count from the last ally on.
HD int attacked(Io io, int u, int action) {
    int target = action - FIRST_ATTACK;
    if (target < 0) return NOBODY;
    return is_ally(u) ? unit_in_slot(io, u, NUM_SEEN_ALLIES + target) : NUM_ALLIES - 1 - target;
}

// Features of unit u, as far as `shown`: health, x, y, `more` others, cooldown, type.
HD void write_features(State s, int u, bool shown, float x, float y, float cooldown, int more, float* row) {
    row[0] = shown ? s.health[u] / stat(s, u, FULL_HEALTH) : 0;
    row[1] = shown ? x : 0;
    row[2] = shown ? y : 0;
    row[3 + more] = shown ? cooldown : 0;
    for (int type = 0; type < NUM_TYPES; ++type) row[4 + more + type] = shown && s.unit_type[u] == type;
}

HD float cooldown_share(State s, int u) { return math::clamp(s.cooldown[u] / stat(s, u, COOLDOWN), 0.0f, 1.0f); }

// A slot of agent i's observation.
HD void write_unit(State s, Io io, int i, int slot) {
    float* row = &io.obs[i][UNIT_FEATURES * slot];
    int found = unit_in_slot(io, i, slot), v = math::max(found, 0);
    bool visible = found != NOBODY && is_near(s, i, v, SIGHT_RANGE);
    bool acts = visible && (SEE_ENEMY_ACTIONS || is_ally(v));
    float sight = stat(s, i, SIGHT_RANGE), x = s.position[v][0] - s.position[i][0],
          y = s.position[v][1] - s.position[i][1];
    int last = FIRST_ATTACK - 1 + (is_ally(v) ? NUM_SEEN_ENEMIES : NUM_ALLIES);
    write_features(s, v, visible, x / sight, y / sight, cooldown_share(s, v), 3, row);
    row[3] = acts ? direction(s.action[v]).x : 0;
    row[4] = acts ? direction(s.action[v]).y : 0;
    row[5] = acts && s.action[v] >= FIRST_ATTACK ? (float)s.action[v] / (float)last : 0;
}

// For a central critic: features of all units, then their armies, then their types.
HD void write_world(State s) {
    FOR_RANGE (u, NUM_UNITS) {
        float x = s.position[u][0], y = s.position[u][1];
        write_features(s, u, is_alive(s, u), x, y, s.cooldown[u], 0, &s.world[OWN_FEATURES * u]);
        s.world[OWN_FEATURES * NUM_UNITS + u] = !is_ally(u);
        s.world[(OWN_FEATURES + 1) * NUM_UNITS + u] = (float)s.unit_type[u];
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) find_seen(s, io, i);
    group_sync();
    FOR_RANGE (k, NUM_ALLIES * NUM_SEEN) write_unit(s, io, k / NUM_SEEN, k % NUM_SEEN);
    FOR_AGENTS (i) {
        float x = s.position[i][0] / MAP_WIDTH, y = s.position[i][1] / MAP_HEIGHT;
        write_features(s, i, is_alive(s, i), x, y, cooldown_share(s, i), 0, &io.obs[i][UNIT_FEATURES * NUM_SEEN]);
    }
    FOR_RANGE (k, NUM_ALLIES * NUM_LOGITS) {
        int i = k / NUM_LOGITS, action = k % NUM_LOGITS, target = attacked(io, i, action);
        bool can_attack = target != NOBODY && is_near(s, i, target, ATTACK_RANGE);
        io.action_mask[i][action] = action < FIRST_ATTACK ? action == STOP || is_alive(s, i) : can_attack;
    }
}

// Moves, hits and cooldowns of all units at once, by where they stood before.
HD void move_and_hit(State s, Io io, int move) {
    FOR_RANGE (u, NUM_UNITS) {
        const Order order = io.scratch->order[u];
        float cooldown = s.cooldown[u], x = s.position[u][0], y = s.position[u][1];
        bool attacks = order.target != NOBODY && cooldown <= 0;
        bool hits = is_within(s, u, math::max(order.target, 0), order.attack_range) && attacks;
        io.scratch->hit[u] = hits ? order.target : NOBODY;
        if (hits)
            cooldown = order.pause + (3 * io.rng.uniform(u, move) - 1) * TIME_PER_STEP;
        else
            cooldown -= TIME_PER_STEP;
        s.cooldown[u] = cooldown;
        if (is_alive(s, u)) {
            x = math::clamp(x + order.way.x, 0.0f, MAP_WIDTH);
            y = math::clamp(y + order.way.y, 0.0f, MAP_HEIGHT);
        }
        io.scratch->disc[u] = {x, y, 0};
    }
    group_sync();
    FOR_RANGE (u, NUM_UNITS) {
        Disc& disc = io.scratch->disc[u];
        float health = s.health[u];
        const int first = is_ally(u) ? NUM_ALLIES : 0, count = is_ally(u) ? NUM_ENEMIES : NUM_ALLIES;
        for (int k = 0; k < LARGER_ARMY; ++k) {
            int v = first + (k < count ? k : 0);
            bool is_hit = k < count && io.scratch->hit[v] == u;
            health = is_hit ? health - io.scratch->order[v].damage : health;
        }
        bool at_wall = disc.x <= 0 || disc.x >= MAP_WIDTH || disc.y <= 0 || disc.y >= MAP_HEIGHT;
        health = WALLS_CAUSE_DEATH && at_wall ? 0 : math::max(0.0f, health);
        disc.radius = health > 0 ? io.scratch->order[u].radius : math::from_bits(math::NAN_BITS);
        s.health[u] = health;
        if (move == WORLD_STEPS_PER_ENV_STEP - 1)
            io.scratch->lost[u] = (health - io.scratch->health_before[u]) / stat(s, u, FULL_HEALTH);
    }
    group_sync();
    push_apart<NUM_UNITS>(io.scratch->disc, s.position);
    group_sync();
}

// The n-th ally in range of enemy unit u that it sees, from the last one on.
HD int nth_in_range(State s, int u, Stat range, int n) {
    int a = NUM_ALLIES - 1;
    while (a > 0 && !(is_near(s, u, a, SIGHT_RANGE) && is_near(s, u, a, range) && n-- == 0)) --a;
    return a;
}

// The action of enemy e: it attacks an ally in its range, the same one as before if it can; else it follows one that it
// sees, a new one in each step; else it walks to the place opposite to its start.
HD int commanded(State s, Io io, int e) {
    int u = NUM_ALLIES + e, visible = 0, in_range = 0, keeps_prey = 0, closest = NOBODY;
    float least = math::from_bits(math::INF_BITS);
    if (io.elapsed_steps == 1) {
        s.goal[e][0] = MAP_WIDTH / 2 - (s.position[u][0] - MAP_WIDTH / 2);
        s.goal[e][1] = MAP_HEIGHT / 2 - (s.position[u][1] - MAP_HEIGHT / 2);
    }
    if (!is_alive(s, u)) return STOP;
    const float sight = stat(s, u, SIGHT_RANGE), range = stat(s, u, ATTACK_RANGE);
    const int prey = s.prey[e];
    for (int a = NUM_ALLIES - 1; a >= 0; --a) {
        int sees = is_within(s, u, a, sight), reaches = sees & (int)is_within(s, u, a, range);
        float away = reaches ? distance(s, u, a) : math::from_bits(math::INF_BITS);
        visible += sees;
        in_range += reaches;
        keeps_prey |= reaches & (int)(prey == a);
        closest = away < least ? a : closest;
        least = math::min(away, least);
    }
    if (in_range == 0) s.prey[e] = NOBODY;
    if (in_range > 0 && keeps_prey == 0)
        s.prey[e] = ATTACKS_CLOSEST ? closest : nth_in_range(s, u, ATTACK_RANGE, io.rng.below(e, 1, in_range));
    if (ENEMY_SHOOTS && in_range > 0) return FIRST_ATTACK + (NUM_ALLIES - 1 - s.prey[e]);
    int leader = visible > 0 ? nth_in_range(s, u, SIGHT_RANGE, io.rng.below(e, 0, visible)) : 0;
    float dx = (visible > 0 ? s.position[leader][0] : s.goal[e][0]) - s.position[u][0];
    float dy = (visible > 0 ? s.position[leader][1] : s.goal[e][1]) - s.position[u][1];
    float reach = math::max(math::abs(dx), math::abs(dy));
    return dy == reach ? 0 : dx == reach ? 1 : -dy == reach ? 2 : 3;
}

// Two armies face each other; drawn armies mirror each other, or one surrounds the other.
HD Point start_of(Io io, int u) {
    float x = is_ally(u) ? MAP_WIDTH / 4 : MAP_WIDTH / 4 * 3, y = MAP_HEIGHT / 2;
    if (DRAWN_ARMIES && io.rng.uniform(NUM_UNITS, 0) >= 0.5f) {
        x = io.rng.uniform(u % NUM_ALLIES, 0) * (MAP_WIDTH / 2);
        return {is_ally(u) ? x : MAP_WIDTH - x, io.rng.uniform(u % NUM_ALLIES, 1) * MAP_HEIGHT};
    }
    if (DRAWN_ARMIES) {
        int outside = io.rng.below(NUM_UNITS, 1, 2), corner = io.rng.below(u, 2, 4);
        float t = is_ally(u) == (outside == 0) ? io.rng.uniform(NUM_UNITS + 1 + corner, 0) : 1.0f;
        x = t * (MAP_WIDTH / 2) + (1 - t) * (corner < 2 ? 0.0f : MAP_WIDTH);
        y = t * (MAP_HEIGHT / 2) + (1 - t) * (corner % 2 == 0 ? 0.0f : MAP_HEIGHT);
    }
    return {x + (2 * io.rng.uniform(u, 0) - 1) * START_SPREAD, y + (2 * io.rng.uniform(u, 1) - 1) * START_SPREAD};
}

HD void reset(State s, Io io) {
    FOR_RANGE (u, NUM_UNITS) {
        s.unit_type[u] = DRAWN_ARMIES ? io.rng.below(u % NUM_ALLIES, 3, NUM_TYPES) : s.army[u];
        s.health[u] = stat(s, u, FULL_HEALTH);
        s.cooldown[u] = 0;
        s.action[u] = STOP;
        if (u == 0) s.won[0] = false;
        Point start = start_of(io, u);
        io.scratch->disc[u] = {start.x, start.y, stat(s, u, RADIUS)};
    }
    FOR_RANGE (e, NUM_ENEMIES) s.goal[e][0] = s.goal[e][1] = 0, s.prey[e] = NOBODY;
    group_sync();
    push_apart<NUM_UNITS>(io.scratch->disc, s.position);
    write_world(s);
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) find_seen(s, io, i);
    FOR_RANGE (u, NUM_UNITS) {
        io.scratch->health_before[u] = s.health[u];
        int action = !is_ally(u) ? commanded(s, io, u - NUM_ALLIES) : io.active[u] ? io.action(u) : STOP;
        float length = stat(s, u, VELOCITY) * TIME_PER_STEP;
        Order& order = io.scratch->order[u];
        order.way = {direction(action).x * length, direction(action).y * length};
        order.target = attacked(io, u, action);
        order.attack_range = stat(s, u, ATTACK_RANGE);
        order.damage = stat(s, u, DAMAGE);
        order.pause = stat(s, u, COOLDOWN);
        order.radius = stat(s, u, RADIUS);
        s.action[u] = action;
    }
    group_sync();
    for (int move = 0; move < WORLD_STEPS_PER_ENV_STEP; ++move) move_and_hit(s, io, move);
    ONCE {
        float lost = 0;
        int allies = 0, enemies = 0;  // alive
        for (int u = 0; u < NUM_UNITS; ++u) {
            (is_ally(u) ? allies : enemies) += is_alive(s, u);
            if (!is_ally(u)) lost += io.scratch->lost[u];
        }
        s.won[0] = allies > 0 && enemies == 0;
        io.scratch->reward = math::abs(lost) / NUM_ENEMIES + (s.won[0] ? WON_BATTLE_BONUS : 0);
        io.scratch->over = allies == 0 || enemies == 0;
    }
    group_sync();
    FOR_AGENTS (i) {
        io.rewards[i] = io.scratch->reward;
        io.terminations[i] = io.scratch->over || !is_alive(s, i);
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS && !io.terminations[i];
    }
    write_world(s);
}
