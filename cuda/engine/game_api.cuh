// SPDX-License-Identifier: Apache-2.0
// The words of a game. A team of lanes runs one environment; on the host the team is one thread and the same text is a
// plain loop. The generated header before this text gives the constants, `State`, `THREADS_PER_ENV` and `Observation`.
//
//   HD                marks a function of both sides
//   FOR_AGENTS(i)     every agent of the environment, shared out over the lanes
//   FOR_RANGE(i, n)   every i in [0, n), likewise; consecutive i fall to neighbouring lanes (coalesced writes)
//   FOR_OBS(i, k)     every element k of every agent's observation, likewise
//   ONCE              what follows is done by one lane of the team
//   group_sync()       what lanes wrote before is seen by all lanes after; every lane must come here
//   group_any(p)       whether p holds on any lane; every lane must come here (no substitute for group_sync)
//   atomic_add(p, n)    adds to an integer that other lanes add to; gives what it was: that depends on who came first
//   group_reduce_min(x)       the least of all lanes' integers; every lane must come here (no substitute for
//   group_sync)
//
// A float sum must run over items in their order, never over lanes: its bits must not depend on the team size.
#pragma once
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

// The order in which the host visits a range, and a GPU's blocks the environments, must not matter. A debug build goes
// backwards (1) or shuffled (2).
HD int visit_order(int k, int n) {
#if !defined(DEBUG_THREAD_ORDER)
    return k + 0 * n;
#elif DEBUG_THREAD_ORDER == 1
    return n - 1 - k;
#else
    return k < (n + 1) / 2 ? 2 * k : 2 * (n - 1 - k) + 1;
#endif
}

#if defined(__CUDACC__)

static_assert(THREADS_PER_ENV <= 32 ? 32 % THREADS_PER_ENV == 0 : THREADS_PER_ENV % 32 == 0,
              "a team divides a warp or is made of warps");

HD int thread_rank() { return threadIdx.x % THREADS_PER_ENV; }
HD u32 group_mask() {
    return (0xffffffffu >> (32 - THREADS_PER_ENV % 33)) << (threadIdx.x % 32 / THREADS_PER_ENV * THREADS_PER_ENV);
}
// Whether the teams of a warp are at the same place together: then one instruction serves them all. Teams that took
// different ways come one after the other, each under its own mask, which costs many.
HD bool is_full_warp() { return THREADS_PER_ENV == 32 || __activemask() == 0xffffffffu; }
HD void group_sync() {
    if constexpr (THREADS_PER_ENV > 32) {
        __syncthreads();  // one environment a block
    } else if constexpr (THREADS_PER_ENV > 1) {
        if (is_full_warp())
            __syncwarp();
        else
            __syncwarp(group_mask());
    }
}
HD bool group_any(bool p) {
    if constexpr (THREADS_PER_ENV > 32) return __syncthreads_or(p);
    if constexpr (THREADS_PER_ENV == 1) return p;
    if (is_full_warp()) return __ballot_sync(0xffffffffu, p) & group_mask();
    return __any_sync(group_mask(), p);
}
HD int atomic_add(int* place, int n) {
    if constexpr (THREADS_PER_ENV > 1) return atomicAdd(place, n);
    *place += n;  // may lie in registers
    return *place - n;
}
HD int group_reduce_min(int x) {
    constexpr int WIDTH = THREADS_PER_ENV > 32 ? 32 : THREADS_PER_ENV;
    if (WIDTH == 32 || is_full_warp())
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(0xffffffffu, x, step));
    else
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(group_mask(), x, step));
    if constexpr (THREADS_PER_ENV > 32) {
        __shared__ int least[(THREADS_PER_ENV + 31) / 32];
        if (thread_rank() % 32 == 0) least[thread_rank() / 32] = x;
        __syncthreads();
        for (int warp = 0; warp < THREADS_PER_ENV / 32; ++warp) x = math::min(x, least[warp]);
        __syncthreads();  // the next one may write there
    }
    return x;
}
#define FOR_RANGE(i, n) for (int i = thread_rank(), n_##i = (n); i < n_##i; i += THREADS_PER_ENV)
#define FOR_OBS(i, k)                                                                                                  \
    for (int at_ = thread_rank(), i, k; at_ < NUM_AGENTS * OBS_SIZE && (i = at_ / OBS_SIZE, k = at_ % OBS_SIZE, true); \
         at_ += THREADS_PER_ENV)
#define ONCE if (thread_rank() == 0)

#else

constexpr int THREADS_PER_ENV = 1;
HD int thread_rank() { return 0; }
HD void group_sync() {}
HD bool group_any(bool p) { return p; }
HD int group_reduce_min(int x) { return x; }
HD int atomic_add(int* place, int n) {
    *place += n;
    return *place - n;
}
#define FOR_RANGE(i, n) \
    for (int k_##i = 0, n_##i = (n), i = visit_order(0, n_##i); k_##i < n_##i; i = visit_order(++k_##i, n_##i))
#define FOR_OBS(i, k) \
    FOR_AGENTS (i)    \
        FOR_RANGE (k, OBS_SIZE)
#define ONCE

#endif

#define FOR_AGENTS(i) FOR_RANGE (i, NUM_AGENTS)

struct Scratch;  // the game's own: working memory of one environment within one step; never read before written

// What the engine hands to a game's functions beside its state.
struct Io {
    Rng rng;                       // of this environment, episode and step
    int elapsed_steps;             // steps since reset, this one included
    const bool* active;            // [NUM_AGENTS] agents that had not ended before this step
    float* rewards;                // [NUM_AGENTS] 0 at first
    bool* terminations;            // [NUM_AGENTS] false at first
    bool* truncations;             // [NUM_AGENTS] false at first
    Observation (*obs)[OBS_SIZE];  // [NUM_AGENTS]; observe writes each role's own part of its rows
#if ACTION_MASKS
    bool (*action_mask)[NUM_LOGITS];  // [NUM_AGENTS]; observe writes for each choice of each head: allowed or not
#endif
    Scratch* scratch;
    const void* actions;  // [NUM_AGENTS][ACTION_HEADS], read through action()
    bool int64_actions;   // 64-bit actions

    // Agent i's action, or its head-th number. Valid for active agents; others' are to be ignored.
    HD Action action(int i, int head = 0) const {
        i64 k = (i64)i * ACTION_HEADS + head;
        return int64_actions ? (Action)((const LongAction*)actions)[k] : ((const Action*)actions)[k];
    }
};

// A game is these three functions.
HD void reset(State s, Io io);    // writes every field of a new episode's state
HD void step(State s, Io io);     // one step: state, rewards, terminations, truncations
HD void observe(State s, Io io);  // io.obs of the state as it is
