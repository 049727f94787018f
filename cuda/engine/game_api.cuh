// SPDX-License-Identifier: Apache-2.0
// The API for games. On the GPU a group of THREADS_PER_ENV threads runs one environment; on the host the group is one
// thread and the same source is a plain loop. The generated header before it gives the constants, `State`,
// `THREADS_PER_ENV` and `Observation`.
//
//   HD                   marks a function for device and host
//   FOR_AGENTS (i)       every agent of the environment, distributed over the threads of the group
//   FOR_RANGE (i, n)     every i in [0, n), likewise; consecutive i go to neighbouring threads (coalesced accesses)
//   FOR_OBS (i, k)       every element k of every agent's observation, likewise
//   ONCE { }             executed by one thread of the group
//   group_sync()         barrier: writes before it are visible to the whole group after it
//   group_any(p)         whether p is true in any thread
//   group_reduce_min(x)  the smallest of all threads' integers
//   atomic_add(p, n)     adds to an int that other threads add to; returns the old value, which depends on the order of
//                        the threads
//   CheckedArray<T, N>   T[N]; debug builds check its indices, also in Scratch
//
// Every thread of the group must call group_sync(), group_any() and group_reduce_min(); the last two are no barriers
// for memory.
//
// A float sum must run over items in a fixed order, never over threads: it must not depend on the group size.
#pragma once
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

// The order in which the host visits a range, and in which the GPU's blocks visit environments, must not matter. Debug
// builds visit backwards (1) or shuffled (2).
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
              "THREADS_PER_ENV must divide 32 or be a multiple of 32");

HD int thread_rank() { return threadIdx.x % THREADS_PER_ENV; }
// The first GROUPS_PER_WARP groups of a warp run environments; lanes beyond them run none.
HD int group_of_warp() { return threadIdx.x % 32 / THREADS_PER_ENV; }
HD int group_of_block() {
    if constexpr (GROUPS_PER_WARP * THREADS_PER_ENV >= 32) return threadIdx.x / THREADS_PER_ENV;
    return threadIdx.x / 32 * GROUPS_PER_WARP + group_of_warp();
}
constexpr u32 ALL_GROUPS =
    GROUPS_PER_WARP * THREADS_PER_ENV >= 32 ? 0xffffffffu : (1u << GROUPS_PER_WARP * THREADS_PER_ENV % 32) - 1;
HD u32 group_mask() {
    return (0xffffffffu >> (32 - THREADS_PER_ENV % 33)) << (threadIdx.x % 32 / THREADS_PER_ENV * THREADS_PER_ENV);
}
// Whether all groups of the warp are converged: then one instruction serves them all. Diverged groups execute one after
// the other, each under its own mask, which takes more instructions.
HD bool is_full_warp() { return THREADS_PER_ENV == 32 || __activemask() == ALL_GROUPS; }
// Groups of several warps in one block have barriers of their own, of 16; barrier 0 is that of the block.
static_assert(THREADS_PER_ENV <= 32 || ENVS_PER_BLOCK < 16, "a barrier for each group");
HD void group_barrier() {
    if constexpr (ENVS_PER_BLOCK == 1)
        __syncthreads();
    else
        asm volatile("barrier.sync %0, %1;" : : "r"(1 + group_of_block()), "n"(THREADS_PER_ENV) : "memory");
}
HD bool group_barrier_any(bool p) {
    if constexpr (ENVS_PER_BLOCK == 1) return __syncthreads_or(p);
    u32 any;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.red.or.pred p, %2, %3, p; selp.u32 %0, 1, 0, p; }"
                 : "=r"(any)
                 : "r"((u32)p), "r"(1 + group_of_block()), "n"(THREADS_PER_ENV)
                 : "memory");
    return any;
}
HD void group_sync() {
    if constexpr (THREADS_PER_ENV > 32) {
        group_barrier();
    } else if constexpr (THREADS_PER_ENV > 1) {
        if (is_full_warp())
            __syncwarp(ALL_GROUPS);
        else
            __syncwarp(group_mask());
    }
}
HD bool group_any(bool p) {
    if constexpr (THREADS_PER_ENV > 32) return group_barrier_any(p);
    if constexpr (THREADS_PER_ENV == 1) return p;
    if (is_full_warp()) return __ballot_sync(ALL_GROUPS, p) & group_mask();
    return __any_sync(group_mask(), p);
}
HD int atomic_add(int* p, int n) {
    if constexpr (THREADS_PER_ENV > 1) return atomicAdd(p, n);
    *p += n;  // p may be in registers
    return *p - n;
}
HD int group_reduce_min(int x) {
    constexpr int WIDTH = THREADS_PER_ENV > 32 ? 32 : THREADS_PER_ENV;
    if (WIDTH == 32 || is_full_warp()) {
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(ALL_GROUPS, x, step));
    } else {
        UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = math::min(x, __shfl_xor_sync(group_mask(), x, step));
    }
    if constexpr (THREADS_PER_ENV > 32) {
        __shared__ int least[ENVS_PER_BLOCK][(THREADS_PER_ENV + 31) / 32];
        int* own = least[group_of_block()];
        if (thread_rank() % 32 == 0) own[thread_rank() / 32] = x;
        group_barrier();
        for (int warp = 0; warp < THREADS_PER_ENV / 32; ++warp) x = math::min(x, own[warp]);
        group_barrier();  // the next call may write `least`
    }
    return x;
}
// Not unrolled: most ranges give a thread one item, and the code of further ones costs more than it saves.
#define FOR_RANGE(i, n) _Pragma("unroll 1") for (int i = thread_rank(), n_##i = (n); i < n_##i; i += THREADS_PER_ENV)
#define FOR_OBS(i, k)                                                                                                  \
    for (int at_ = thread_rank(), i, k; at_ < NUM_AGENTS * OBS_SIZE && (i = at_ / OBS_SIZE, k = at_ % OBS_SIZE, true); \
         at_ += THREADS_PER_ENV)
#define ONCE if (thread_rank() == 0)

#else

constexpr int THREADS_PER_ENV = 1;
HD int thread_rank() { return 0; }

#if !defined(TRACES_ACCESSES)

HD void group_sync() {}
HD bool group_any(bool p) { return p; }
HD int group_reduce_min(int x) { return x; }
HD int atomic_add(int* p, int n) {
    *p += n;
    return *p - n;
}
#define FOR_RANGE(i, n) \
    for (int k_##i = 0, n_##i = (n), i = visit_order(0, n_##i); k_##i < n_##i; i = visit_order(++k_##i, n_##i))
#define FOR_OBS(i, k) \
    FOR_AGENTS (i)    \
        FOR_RANGE (k, OBS_SIZE)
#define ONCE

#else  // races.cuh follows which thread of a group would execute what

HD void group_sync(int line = __builtin_LINE(), const char* file = __builtin_FILE()) { races::sync(line, file); }
HD bool group_any(bool p, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    races::require_all_threads(line, file);
    return p;
}
HD int group_reduce_min(int x, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    races::require_all_threads(line, file);
    return x;
}
HD int atomic_add(int* p, int n) { return races::atomic_add(p, n); }
#define FOR_RANGE(i, n)                                                                                    \
    for (races::Scope scope_##i(races::IN_LOOP, __LINE__, __FILE__, (n) == NUM_AGENTS); scope_##i.once();) \
        for (int k_##i = 0, n_##i = (n), i = visit_order(0, n_##i); k_##i < n_##i && races::enter(i);      \
             i = visit_order(++k_##i, n_##i))
#define FOR_OBS(i, k)                         \
    FOR_RANGE (at_##i, NUM_AGENTS * OBS_SIZE) \
        for (int i = at_##i / OBS_SIZE, k = at_##i % OBS_SIZE, end_##i = k + 1; k < end_##i; ++k)
#define ONCE if (races::Scope scope_once(races::IN_ONCE, __LINE__, __FILE__, false); races::enter(0))

#endif

#endif

#define FOR_AGENTS(i) FOR_RANGE (i, NUM_AGENTS)

// Debug builds check indices: bounds.cuh.
#if !defined(BOUNDS_CHECKED)
namespace bounds {
enum Array { IO_ACTIONS };
typedef int Index;
HD int checked(int, int, int k, int, int) { return k; }
HD int own_heads(int) { return ACTION_HEADS; }
template <class Arguments>
HD void use(const Arguments&, i64) {}
}  // namespace bounds
template <class T, int N>
using CheckedArray = T[N];
#endif

struct Scratch;  // defined by the game: working memory of one environment within one step, uninitialised

// Arguments of reset, step and observe besides the state.
struct Io {
    Rng rng;            // of this environment, episode and step
    int elapsed_steps;  // steps since reset, this one included
#if !defined(BOUNDS_CHECKED)
    const bool* active;            // [NUM_AGENTS] agents that had neither ended nor died before this step
    float* rewards;                // [NUM_AGENTS] initially 0
    bool* terminations;            // [NUM_AGENTS] initially false
    bool* truncations;             // [NUM_AGENTS] initially false
    Observation (*obs)[OBS_SIZE];  // [NUM_AGENTS]; observe writes as many elements as the agent's role has
#if ACTION_MASKS
    bool (*action_mask)[NUM_LOGITS];  // [NUM_AGENTS]; observe writes whether each choice is allowed
#endif
#if TAKES_TURNS
    bool* acting;  // [NUM_AGENTS] agents that act in this step; observe writes those of the next, initially true
#endif
#else  // the same arrays, with checked indices
    bounds::Checked<const bool, bounds::IO_ACTIVE, 0, NUM_AGENTS> active;
    bounds::Checked<float, bounds::IO_REWARDS, 0, NUM_AGENTS> rewards;
    bounds::Checked<bool, bounds::IO_TERMINATIONS, 0, NUM_AGENTS> terminations;
    bounds::Checked<bool, bounds::IO_TRUNCATIONS, 0, NUM_AGENTS> truncations;
    bounds::Checked<Observation, bounds::IO_OBS, 0, NUM_AGENTS, OBS_SIZE> obs;
#if ACTION_MASKS
    bounds::Checked<bool, bounds::IO_ACTION_MASK, 0, NUM_AGENTS, NUM_LOGITS> action_mask;
#endif
#if TAKES_TURNS
    bounds::Checked<bool, bounds::IO_ACTING, 0, NUM_AGENTS> acting;
#endif
#endif
    Scratch* scratch;
    const void* actions;  // [NUM_AGENTS][ACTION_HEADS], read through action()
    bool int64_actions;   // else 32-bit

    // Agent i's action, or its element `head`; with CLIP_ACTIONS clipped to the bounds of its Box. Valid for active
    // agents only, with TAKES_TURNS for those that act.
    HD Action action(bounds::Index agent, bounds::Index element = 0) const {
        int i = bounds::checked(bounds::IO_ACTIONS, 0, agent, NUM_AGENTS, -1);
        int head = bounds::checked(bounds::IO_ACTIONS, 1, element, bounds::own_heads(i), i);
        i64 k = (i64)i * ACTION_HEADS + head;
        Action a = int64_actions ? (Action)((const LongAction*)actions)[k] : ((const Action*)actions)[k];
#if BOX_ACTIONS
        if (CLIP_ACTIONS && action_box::has(i, head))
            a = math::clamp(a, action_box::low(i, head), action_box::high(i, head));
#endif
        return a;
    }
#if DISCRETE_HEADS > 0
    // Agent i's choice of the discrete head `head`, also where other roles have a Box and action() is a float.
    HD int choice(bounds::Index agent, bounds::Index head = 0) const {
#if BOX_ACTIONS
        return math::to_int(action(agent, head));
#else
        return action(agent, head);
#endif
    }
#endif
};

// A game is these three functions.
HD void reset(State s, Io io);    // writes every field of a new episode's state
HD void step(State s, Io io);     // one step: state, rewards, terminations, truncations
HD void observe(State s, Io io);  // writes io.obs for the current state
