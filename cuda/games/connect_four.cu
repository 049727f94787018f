// SPDX-License-Identifier: Apache-2.0
// Connect Four. The rules are those of PettingZoo's classic game connect_four_v3 (Farama Foundation, MIT licence).
// Declared in gpu_vecenv/envs/connect_four.py.
#include "game_api.cuh"

struct Scratch {
    int player, row, column;  // of the move
};

HD bool is_open(State s, int column) { return s.board[0][column] == 0; }

// Column number k of those that are open; `column` if there are not so many.
HD int open_column(State s, int k, int column) {
    for (int other = 0; other < NUM_COLUMNS; ++other)
        if (is_open(s, other) && k-- == 0) return other;
    return column;
}

// Where the piece of the player falls: the chosen column, which is open, or with probability SLIP any open one.
HD int chosen_column(State s, Io io) {
    int column = io.action(s.player[0]);
    if (SLIP > 0 && io.rng.uniform(0, 0) < SLIP) {
        int open = 0;
        for (int other = 0; other < NUM_COLUMNS; ++other) open += is_open(s, other);
        column = open_column(s, io.rng.below(0, 0, open), column);
    }
    return column;
}

// Pieces of the same player in a line beyond a cell, in one direction.
HD int count_beyond(State s, int row, int column, int down, int right) {
    int piece = s.board[row][column], count = 0;
    for (int r = row + down, c = column + right; r >= 0 && r < NUM_ROWS && c >= 0 && c < NUM_COLUMNS;
         r += down, c += right) {
        if (s.board[r][c] != piece) break;
        ++count;
    }
    return count;
}

// Whether the piece on this cell is part of a line that wins, in one of four ways.
HD bool completes_line(State s, int row, int column, int way) {
    int down = way > 0, right = way == 1 ? 0 : way == 3 ? -1 : 1;
    int others = count_beyond(s, row, column, down, right) + count_beyond(s, row, column, -down, -right);
    return others + 1 >= LINE_LENGTH;
}

HD bool wins(State s, int row, int column) {
    bool won = false;
    for (int way = 0; way < 4; ++way) won |= completes_line(s, row, column, way);
    return won;
}

// The row of the lowest empty cell of an open column.
HD int landing_row(State s, int column) {
    int row = NUM_ROWS - 1;
    while (row > 0 && s.board[row][column] != 0) --row;
    return row;
}

// One random move of an opening: of the open columns, from a random one on, the first in which no line is completed.
HD void play_opening_move(State s, Io io, int move) {
    int start = io.rng.below(0, (u32)move, NUM_COLUMNS);
    for (int k = 0; k < NUM_COLUMNS; ++k) {
        int column = (start + k) % NUM_COLUMNS;
        if (!is_open(s, column)) continue;
        int row = landing_row(s, column);
        s.board[row][column] = (u8)(s.player[0] + 1);
        if (!wins(s, row, column)) {
            s.player[0] = 1 - s.player[0];
            return;
        }
        s.board[row][column] = 0;
    }
}

HD void reset(State s, Io io) {
    FOR_RANGE (k, NUM_ROWS * NUM_COLUMNS) s.board[k / NUM_COLUMNS][k % NUM_COLUMNS] = 0;
    group_sync();
    ONCE {
        s.player[0] = 0;
        for (int move = 0; move < OPENING_MOVES; ++move) play_opening_move(s, io, move);
    }
}

HD void step(State s, Io io) {
    Scratch& w = *io.scratch;
    ONCE {
        w.player = s.player[0];
        w.column = chosen_column(s, io);
        w.row = landing_row(s, w.column);
        s.board[w.row][w.column] = (u8)(w.player + 1);
        s.player[0] = 1 - w.player;
    }
    group_sync();
    bool line = false, open = false;
    FOR_RANGE (way, 4) line |= completes_line(s, w.row, w.column, way);
    FOR_RANGE (column, NUM_COLUMNS) open |= is_open(s, column);
    bool won = group_any(line), full = !group_any(open);
    FOR_AGENTS (i) {
        if (won) io.rewards[i] = i == w.player ? 1.0f : -1.0f;
        io.terminations[i] = won || full;
        io.truncations[i] = !(won || full) && io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) io.acting[i] = i == s.player[0];
    FOR_RANGE (column, NUM_COLUMNS) {
        for (int i = 0; i < NUM_AGENTS; ++i) io.action_mask[i][column] = is_open(s, column);
    }
    FOR_RANGE (cell, NUM_ROWS * NUM_COLUMNS) {
        int piece = s.board[cell / NUM_COLUMNS][cell % NUM_COLUMNS];
        for (int i = 0; i < NUM_AGENTS; ++i) {
            int other = 1 - i;
            io.obs[i][2 * cell] = piece == i + 1;
            io.obs[i][2 * cell + 1] = piece == other + 1;
        }
    }
}
