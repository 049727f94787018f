// SPDX-License-Identifier: Apache-2.0
// The words of a game. A team of lanes runs one replica; on the host the team is one thread and the same text is a
// plain loop. The generated prologue before this text gives the constants, `State`, `TEAM` and `Observation`.
//
//   HD                marks a function of both sides
//   FOR_AGENTS(i)     every agent of the replica, shared out over the lanes
//   FOR_RANGE(i, n)   every i in [0, n), likewise; consecutive i fall to neighbouring lanes (coalesced writes)
//   FOR_OBS(i, k)     every element k of every agent's observation, likewise
//   ONCE              what follows is done by one lane of the team
//   team_sync()       what lanes wrote before is seen by all lanes after; every lane must come here
//   team_any(p)       whether p holds on any lane; every lane must come here (no substitute for team_sync)
//   team_add(p, n)    adds to an integer that other lanes add to; gives what it was: that depends on who came first
//   team_min(x)       the least of all lanes' integers; every lane must come here (no substitute for team_sync)
//
// A float sum must run over items in their order, never over lanes: its bits must not depend on the team size.
#pragma once
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

// The order in which the host visits a range, and a GPU's blocks the replicas, must not matter. A debug build goes
// backwards (1) or shuffled (2).
HD int in_order(int k, int n) {
#if !defined(LANE_ORDER)
    return k + 0 * n;
#elif LANE_ORDER == 1
    return n - 1 - k;
#else
    return k < (n + 1) / 2 ? 2 * k : 2 * (n - 1 - k) + 1;
#endif
}

#if defined(__CUDACC__)

static_assert(TEAM <= 32 ? 32 % TEAM == 0 : TEAM % 32 == 0, "a team divides a warp or is made of warps");

HD int lane() { return threadIdx.x % TEAM; }
HD u32 team_mask() { return (0xffffffffu >> (32 - TEAM % 33)) << (threadIdx.x % 32 / TEAM * TEAM); }
// Whether the teams of a warp are at the same place together: then one instruction serves them all. Teams that took
// different ways come one after the other, each under its own mask, which costs many.
HD bool whole_warp() { return TEAM == 32 || __activemask() == 0xffffffffu; }
HD void team_sync() {
    if constexpr (TEAM > 32) {
        __syncthreads();  // one replica a block
    } else if constexpr (TEAM > 1) {
        if (whole_warp())
            __syncwarp();
        else
            __syncwarp(team_mask());
    }
}
HD bool team_any(bool p) {
    if constexpr (TEAM > 32) return __syncthreads_or(p);
    if constexpr (TEAM == 1) return p;
    if (whole_warp()) return __ballot_sync(0xffffffffu, p) & team_mask();
    return __any_sync(team_mask(), p);
}
HD int team_add(int* place, int n) {
    if constexpr (TEAM > 1) return atomicAdd(place, n);
    *place += n;  // may lie in registers
    return *place - n;
}
HD int team_min(int x) {
    constexpr int WIDTH = TEAM > 32 ? 32 : TEAM;
    if (WIDTH == 32 || whole_warp())
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(0xffffffffu, x, step));
    else
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(team_mask(), x, step));
    if constexpr (TEAM > 32) {
        __shared__ int least[(TEAM + 31) / 32];
        if (lane() % 32 == 0) least[lane() / 32] = x;
        __syncthreads();
        for (int warp = 0; warp < TEAM / 32; ++warp) x = math::min(x, least[warp]);
        __syncthreads();  // the next one may write there
    }
    return x;
}
#define FOR_RANGE(i, n) for (int i = lane(), n_##i = (n); i < n_##i; i += TEAM)
#define FOR_OBS(i, k)                                                                                           \
    for (int at_ = lane(), i, k; at_ < NUM_AGENTS * OBS_SIZE && (i = at_ / OBS_SIZE, k = at_ % OBS_SIZE, true); \
         at_ += TEAM)
#define ONCE if (lane() == 0)

#else

constexpr int TEAM = 1;
HD int lane() { return 0; }
HD void team_sync() {}
HD bool team_any(bool p) { return p; }
HD int team_min(int x) { return x; }
HD int team_add(int* place, int n) {
    *place += n;
    return *place - n;
}
#define FOR_RANGE(i, n) \
    for (int k_##i = 0, n_##i = (n), i = in_order(0, n_##i); k_##i < n_##i; i = in_order(++k_##i, n_##i))
#define FOR_OBS(i, k) \
    FOR_AGENTS (i)    \
        FOR_RANGE (k, OBS_SIZE)
#define ONCE

#endif

#define FOR_AGENTS(i) FOR_RANGE (i, NUM_AGENTS)

struct Scratch;  // the game's own: working memory of one replica within one tick; never read before written

// What the machine hands to a game's functions beside its state.
struct Io {
    Rng rng;                       // of this replica, episode and tick
    int time;                      // ticks since reset, this one included
    const bool* active;            // [NUM_AGENTS] agents that had not ended before this tick
    float* rewards;                // [NUM_AGENTS] 0 at first
    bool* terminations;            // [NUM_AGENTS] false at first
    bool* truncations;             // [NUM_AGENTS] false at first
    Observation (*obs)[OBS_SIZE];  // [NUM_AGENTS]; observe writes each role's own part of its rows
#if ACTION_MASKS
    bool (*action_mask)[NUM_LOGITS];  // [NUM_AGENTS]; observe writes for each choice of each head: allowed or not
#endif
    Scratch* scratch;
    const void* actions;  // [NUM_AGENTS][ACTION_HEADS], read through action()
    bool wide;            // 64-bit actions

    // Agent i's action, or its head-th number. Valid for active agents; others' are to be ignored.
    HD Action action(int i, int head = 0) const {
        i64 k = (i64)i * ACTION_HEADS + head;
        return wide ? (Action)((const WideAction*)actions)[k] : ((const Action*)actions)[k];
    }
};

// A game is these three functions.
HD void reset(State s, Io io);    // writes every field of a new episode's state
HD void step(State s, Io io);     // one tick: state, rewards, terminations, truncations
HD void observe(State s, Io io);  // io.obs of the state as it is
