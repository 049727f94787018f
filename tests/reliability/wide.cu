#include "game_api.cuh"

struct Scratch {};

HD u8 scrambled(u32 x) { return (u8)(x * 0x9E3779B1u >> 24); }

HD void reset(State s, Io io) {
    u32 mark = io.rng.word(0, 0);
    ONCE s
        .mark[0] = (i32)mark;
    FOR_RANGE (k, DEPTH) s.cell[k] = scrambled(mark + (u32)k);
}

HD void step(State s, Io io) {
    FOR_RANGE (k, DEPTH) s.cell[k] += 1;
    FOR_AGENTS (i) {
        io.rewards[i] = (float)(io.action(i) + i % 7);
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
    }
}

HD void observe(State s, Io io) {
    u32 mark = (u32)s.mark[0] + (u32)io.elapsed_steps;
    FOR_OBS (i, k) io.obs[i][k] = scrambled(mark + 31u * (u32)i + 7u * (u32)k) ^ s.cell[k % DEPTH];
}
