// SPDX-License-Identifier: Apache-2.0
// Robots carry requested shelves to goals and put them back. The rules are those of RWARE 2.0.0, written anew
// (https://github.com/semitable/robotic-warehouse, MIT License). Declared in gpu_vecenv/envs/warehouse.py.
#include "game_api.cuh"
#include "python_set.cuh"

constexpr int FORWARD = 1, TURN_LEFT = 2, TURN_RIGHT = 3, TOGGLE_LOAD = 4;
constexpr int NOTHING = 0, SHELF = 1, REQUESTED = 2, STORAGE = 1;  // in a cell; its floor, where shelves are put down
constexpr int NOBODY = -1, CYCLE = -1;                             // no agent; no end of a chain
constexpr int CELLS = HEIGHT * WIDTH, SINK = NUM_AGENTS;           // SINK: the empty cell of a component
TABLE int AHEAD[4][2] = {{0, -1}, {0, 1}, {-1, 0}, {1, 0}};        // up, down, left, right
TABLE int TURNED[2][4] = {{2, 3, 1, 0}, {3, 2, 0, 1}};             // to the left, to the right

struct Scratch {
    CheckedArray<int, NUM_AGENTS> cell, target;  // where an agent stands and where it would be, row by row
    CheckedArray<int, NUM_AGENTS> next;          // the agent on its target, or NOBODY
    CheckedArray<int, NUM_AGENTS> end;           // the empty cell to which agents lead one after the other, or CYCLE
    CheckedArray<int, NUM_AGENTS> behind;        // the most agents in a row that would follow
    CheckedArray<int, NUM_AGENTS> order;         // of agents that would enter the same cell with as many behind
    CheckedArray<bool, NUM_AGENTS> moves;
    CheckedArray<u8, NUM_AGENTS> load;
    CheckedArray<int, NUM_AGENTS + 1> nodes;  // of a component: its agents and SINK
    PythonSet<NUM_AGENTS + 1> set;
};

HD u8& at(State s, int cell) { return s.shelf[cell / WIDTH][cell % WIDTH]; }

HD int agent_in(State s, int x, int y) {
    for (int i = 0; i < NUM_AGENTS; ++i)
        if (s.position[i][0] == x && s.position[i][1] == y) return i;
    return NOBODY;
}

// Requests shelf number k, counted row by row, of those that are not requested.
HD void request(State s, int k) {
    for (int cell = 0; cell < CELLS; ++cell)
        if (at(s, cell) == SHELF && k-- == 0) at(s, cell) = REQUESTED;
}

// Agents start on different cells, all equally probable.
HD void place_agent(State s, Io io, int i) {
    int free = io.rng.below(i, 0, CELLS - i), cell = free, before = -1;
    while (cell != before) {  // the cell before which `free` cells are free
        before = cell;
        cell = free;
        for (int j = 0; j < i; ++j) cell += s.position[j][1] * WIDTH + s.position[j][0] <= before;
    }
    s.position[i][0] = cell % WIDTH;
    s.position[i][1] = cell / WIDTH;
}

HD void reset(State s, Io io) {
    FOR_RANGE (cell, CELLS) at(s, cell) = s.floor[cell / WIDTH][cell % WIDTH] == STORAGE ? SHELF : NOTHING;
    FOR_AGENTS (i) {
        s.direction[i] = io.rng.below(i, 1, 4);
        s.carrying[i] = s.has_delivered[i] = false;
    }
    group_sync();
    ONCE {
        s.inactive_steps[0] = s.deliveries[0] = 0;
        for (int i = 0; i < NUM_AGENTS; ++i) place_agent(s, io, i);
        for (int k = 0; k < NUM_REQUESTS; ++k) request(s, io.rng.below(k, 2, NUM_SHELVES - k));
    }
}

// Where an agent would be: a cell ahead inside of the walls, but not under a second shelf that nobody carries away.
HD int target_of(State s, Io io, int i) {
    int x = s.position[i][0], y = s.position[i][1], own = y * WIDTH + x;
    if (io.action(i) != FORWARD) return own;
    x = math::clamp(x + AHEAD[s.direction[i]][0], 0, WIDTH - 1);
    y = math::clamp(y + AHEAD[s.direction[i]][1], 0, HEIGHT - 1);
    int cell = y * WIDTH + x, other = agent_in(s, x, y);
    bool blocked = s.carrying[i] && at(s, cell) != NOTHING && !(other != NOBODY && s.carrying[other]);
    return blocked ? own : cell;
}

// Follows the agents ahead: to an empty cell, or round a cycle. Agents in a cycle of three or more move; two would
// exchange their cells, and one stays where it is.
HD void follow(Scratch& w, int i) {
    int j = w.next[i], length = 1;
    for (; j != NOBODY && j != i && length <= NUM_AGENTS; ++length) j = w.next[j];
    w.moves[i] = j == i && length > 2;
    w.end[i] = CYCLE;
    if (j != NOBODY) return;
    for (j = i; w.next[j] != NOBODY;) j = w.next[j];
    w.end[i] = w.target[j];
}

HD bool would_enter(Scratch& w, int j, int cell) { return w.target[j] == cell && w.cell[j] != cell; }

// Puts the agents of a component into the order in which networkx lists their cells: of the iteration of a Python set
// that is the copy of one into which a breadth-first search from the first agent inserted them.
HD void order_as_set(Scratch& w, int first) {
    int end = w.end[first], found = 1;
    w.nodes[0] = first;
    auto find = [&](int node) {
        for (int k = 0; k < found; ++k)
            if (w.nodes[k] == node) return;
        w.nodes[found++] = node;
    };
    auto cell_of = [&](int node) { return node == SINK ? end : w.cell[node]; };
    for (int k = 0; k < found; ++k) {
        int node = w.nodes[k];
        if (node != SINK) find(w.next[node] == NOBODY ? SINK : w.next[node]);
        for (int j = 0; j < NUM_AGENTS; ++j)
            if (would_enter(w, j, cell_of(node))) find(j);
    }
    auto hash_of = [&](int node) { return w.set.hash(cell_of(node) % WIDTH, cell_of(node) / WIDTH); };
    for (int copy = 0; copy < 2; ++copy) w.set.order(w.nodes, found, hash_of);
    for (int k = 0; k < found; ++k)
        if (w.nodes[k] != SINK) w.order[w.nodes[k]] = k;
}

HD bool is_first_at_end(Scratch& w, int i) {
    for (int j = 0; j < i; ++j)
        if (w.end[j] == w.end[i]) return false;
    return w.end[i] != CYCLE;
}

// In every component that leads to an empty cell the agents of a longest path move.
HD void choose_paths(Scratch& w) {
    int num_cells = NUM_AGENTS;  // those of agents, and the empty ones that they would enter
    for (int i = 0; i < NUM_AGENTS; ++i) {
        num_cells += is_first_at_end(w, i);
        if (w.end[i] == CYCLE) continue;
        for (int j = i, behind = 0; j != NOBODY; j = w.next[j], ++behind) w.behind[j] = math::max(w.behind[j], behind);
    }
    for (int i = 0; i < NUM_AGENTS; ++i) {
        if (!is_first_at_end(w, i)) continue;
        int own_cells = 1;
        for (int j = 0; j < NUM_AGENTS; ++j) own_cells += w.end[j] == w.end[i];
        if (own_cells > 2 && 2 * own_cells < num_cells) order_as_set(w, i);
        for (int cell = w.end[i];;) {
            int best = NOBODY;
            for (int j = 0; j < NUM_AGENTS; ++j) {
                if (!would_enter(w, j, cell)) continue;
                bool longer = best == NOBODY || w.behind[j] > w.behind[best];
                if (longer || (w.behind[j] == w.behind[best] && w.order[j] < w.order[best])) best = j;
            }
            if (best == NOBODY || w.moves[best]) break;  // the latter if somebody has put robots into one cell
            w.moves[best] = true;
            cell = w.cell[best];
        }
    }
}

HD void toggle_load(State s, Io io, int i) {
    int x = s.position[i][0], y = s.position[i][1];
    if (!s.carrying[i]) {
        s.carrying[i] = s.shelf[y][x] != NOTHING;
    } else if (s.floor[y][x] == STORAGE) {
        s.carrying[i] = false;
        if (IS_TWO_STAGE && s.has_delivered[i]) io.rewards[i] = 0.5f;
        s.has_delivered[i] = false;
    }
}

// Requested shelves on goals are delivered, one goal after the other, and another shelf is requested for each.
HD bool deliver(State s, Io io) {
    int deliveries = 0;
    for (int goal = 0; goal < NUM_GOALS; ++goal) {
        int x = s.goal[goal][0], y = s.goal[goal][1], i = agent_in(s, x, y);
        if (s.shelf[y][x] != REQUESTED) continue;
        ++deliveries;
        request(s, io.rng.below(goal, 0, NUM_SHELVES - NUM_REQUESTS));
        s.shelf[y][x] = SHELF;
        for (int j = 0; j < NUM_AGENTS; ++j)
            if (IS_GLOBAL || j == i) io.rewards[j] += IS_TWO_STAGE ? 0.5f : 1.0f;
        if (IS_TWO_STAGE && i != NOBODY) s.has_delivered[i] = true;
    }
    s.deliveries[0] += deliveries;
    return deliveries > 0;
}

HD void step(State s, Io io) {
    Scratch& w = *io.scratch;
    FOR_AGENTS (i) {
        w.cell[i] = s.position[i][1] * WIDTH + s.position[i][0];
        w.target[i] = target_of(s, io, i);
        w.next[i] = agent_in(s, w.target[i] % WIDTH, w.target[i] / WIDTH);
        w.behind[i] = 0;
    }
    group_sync();
    FOR_AGENTS (i) {
        follow(w, i);
        w.order[i] = 2 * i;  // when networkx first sees the cell: as agent i's own, or before as another's target
        for (int j = i - 1; j >= 0; --j)
            if (w.next[j] == i) w.order[i] = 2 * j + 1;
    }
    group_sync();
    ONCE choose_paths (w)
        ;
    group_sync();
    FOR_AGENTS (i) {
        if (!w.moves[i] || !s.carrying[i]) continue;
        w.load[i] = at(s, w.cell[i]);
        at(s, w.cell[i]) = NOTHING;
    }
    group_sync();
    FOR_AGENTS (i) {
        int action = io.action(i);
        if (action == TURN_LEFT || action == TURN_RIGHT) s.direction[i] = TURNED[action - TURN_LEFT][s.direction[i]];
        if (action == TOGGLE_LOAD) toggle_load(s, io, i);
        if (!w.moves[i]) continue;
        s.position[i][0] = w.target[i] % WIDTH;
        s.position[i][1] = w.target[i] / WIDTH;
        if (s.carrying[i]) at(s, w.target[i]) = w.load[i];
    }
    group_sync();
    ONCE s
        .inactive_steps[0] = deliver(s, io) ? 0 : s.inactive_steps[0] + 1;
    group_sync();
    FOR_AGENTS (i) {
        io.terminations[i] = MAX_INACTIVITY_STEPS > 0 && s.inactive_steps[0] >= MAX_INACTIVITY_STEPS;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS && !io.terminations[i];
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        int x = s.position[i][0], y = s.position[i][1];
        float* row = &io.obs[i][0];
        row[0] = NORMALISED_COORDINATES ? (float)x / (float)math::max(WIDTH - 1, 1) : (float)x;
        row[1] = NORMALISED_COORDINATES ? (float)y / (float)math::max(HEIGHT - 1, 1) : (float)y;
        row[2] = s.carrying[i];
        for (int k = 0; k < 4; ++k) row[3 + k] = s.direction[i] == k;
        row[7] = s.floor[y][x] != STORAGE;
    }
    FOR_RANGE (k, NUM_AGENTS * SENSORS * SENSORS) {
        int i = k / (SENSORS * SENSORS), sensor = k % (SENSORS * SENSORS);
        int x = s.position[i][0] - SENSOR_RANGE + sensor % SENSORS;
        int y = s.position[i][1] - SENSOR_RANGE + sensor / SENSORS;
        int shelf = x >= 0 && x < WIDTH && y >= 0 && y < HEIGHT ? s.shelf[y][x] : NOTHING;
        float* row = &io.obs[i][8 + 7 * sensor];
        for (int place = 0; place < 5; ++place) row[place] = place == 1;  // no robot, with direction up
        row[5] = shelf != NOTHING;
        row[6] = shelf == REQUESTED;
    }
    group_sync();
    FOR_RANGE (k, NUM_AGENTS * NUM_AGENTS) {
        int i = k / NUM_AGENTS, j = k % NUM_AGENTS;
        int column = s.position[j][0] - s.position[i][0] + SENSOR_RANGE;
        int line = s.position[j][1] - s.position[i][1] + SENSOR_RANGE;
        if (column < 0 || column >= SENSORS || line < 0 || line >= SENSORS) continue;
        float* row = &io.obs[i][8 + 7 * (line * SENSORS + column)];
        row[0] = 1;
        for (int way = 0; way < 4; ++way) row[1 + way] = s.direction[j] == way;
    }
}
