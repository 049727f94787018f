#include "game_api.cuh"

struct Scratch {};

HD int to_act(State s) { return s.moves[0] >= 0 && s.moves[1] < 0; }

HD void reset(State s, Io io) {
    ONCE {
        int deal = io.rng.below(0, 0, 6);
        s.card[0] = deal / 2;
        s.card[1] = (s.card[0] + 1 + deal % 2) % 3;
        s.moves[0] = s.moves[1] = -1;
    }
}

HD void step(State s, Io io) {
    ONCE {
        int player = to_act(s), move = io.action(player), higher = s.card[1] > s.card[0];
        bool bet_before = s.moves[1 - player] == 1, over = s.moves[0] >= 0 && (bet_before || move == 0);
        if (s.moves[player] < 0) s.moves[player] = move;
        if (over) {
            int winner = bet_before && move == 0 ? 1 - player : higher;
            float won = bet_before && move == 1 ? 2.0f : 1.0f;
            io.rewards[winner] = won;
            io.rewards[1 - winner] = -won;
        }
        io.terminations[0] = io.terminations[1] = over;
    }
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.acting[i] = i == to_act(s);
        for (int k = 0; k < 3; ++k) io.obs[i][k] = s.card[i] == k;
        for (int k = 0; k < 4; ++k) io.obs[i][3 + k] = s.moves[k / 2] == k % 2;
    }
}
