// SPDX-License-Identifier: Apache-2.0
// Staging: the step kernel copies the state of its environments out of device memory with all loads in flight at once,
// works on the copy and stores it at the end, instead of waiting for device memory at every access. The copy is in
// registers for a single agent and in shared memory otherwise. The step works in device memory where the copy does not
// fit, in games for CUDA only (their code may need addresses in device memory) and in debug builds with guard bands.
#pragma once
#include "guarded_scratch.cuh"
#include "randomized.cuh"

namespace staging {

HD constexpr u64 aligned(u64 bytes) { return (bytes + 15) / 16 * 16; }
constexpr int MAX_ITEMS_PER_THREAD = 16;  // items of a field that one thread copies through its registers
constexpr bool FITS =
    ALLOW_STAGING && GUARD_ROWS == 0 && (LARGEST_FIELD + THREADS_PER_ENV - 1) / THREADS_PER_ENV <= MAX_ITEMS_PER_THREAD;
constexpr bool IN_REGISTERS = FITS && NUM_AGENTS == 1 && THREADS_PER_ENV == 1 && sizeof(Staged) <= 256;

#if defined(__CUDACC__)

// The rest is for __shared__ variables: of group_reduce_min(), randomised parameters, and the records of bounds.cuh.
constexpr u64 SHARED_BUDGET = SHARED_LIMIT - 1024 - sizeof(float) * ENVS_PER_BLOCK * randomized::NUM_PARAMETERS -
                              (GUARD_ROWS > 0 ? sizeof(i64*) * ENVS_PER_BLOCK : 0);
// Stride between the copies of two groups, such that the groups of a warp access different banks at the same time.
HD constexpr u64 stride_of(u64 bytes) {
    constexpr u64 ROW = 128, OWN = THREADS_PER_ENV < 4 ? 16 : 4 * THREADS_PER_ENV;
    u64 stride = aligned(bytes);
    while (THREADS_PER_ENV < 32 && stride % ROW != OWN) stride += 16;
    return stride;
}
constexpr u64 SCRATCH_STRIDE = stride_of(sizeof(guarded_scratch::Memory)), STAGED_STRIDE = stride_of(sizeof(Staged));
constexpr u64 SCRATCH_BYTES = SCRATCH_STRIDE * ENVS_PER_BLOCK, STAGED_BYTES = STAGED_STRIDE * ENVS_PER_BLOCK;
constexpr u64 OBS_BYTES = aligned(sizeof(Observation) * OBS_SIZE * NUM_AGENTS * ENVS_PER_BLOCK);
constexpr bool SCRATCH_IN_SHARED = SCRATCH_BYTES <= SHARED_BUDGET;
constexpr u64 SCRATCH_END = SCRATCH_IN_SHARED && !__is_empty(guarded_scratch::Memory) ? SCRATCH_BYTES : 0;
constexpr bool STAGED_IN_SHARED = FITS && !IN_REGISTERS && SCRATCH_END + STAGED_BYTES <= SHARED_BUDGET;
constexpr u64 STAGED_END = SCRATCH_END + (STAGED_IN_SHARED ? STAGED_BYTES : 0);
constexpr bool OBS_IN_SHARED = FITS && OBS_BYTES <= OBS_STAGING_BYTES && STAGED_END + OBS_BYTES <= SHARED_BUDGET;
constexpr u64 OBS_END = STAGED_END + (OBS_IN_SHARED ? OBS_BYTES : 0);
// Policy outputs, for a step that draws its actions. Where a group is a block they share memory with the observations,
// which are written after the draw. They stay in device memory if a row has so few numbers that staging gains nothing,
// if rows would fall into few banks, or if there are too many for the threads' registers; in the last two cases drawing
// in a kernel of its own is faster (FUSED_SAMPLING_PAYS_OFF).
constexpr i64 PARAMETERS_PER_ENV = (i64)NUM_AGENTS * PARAMETERS_PER_AGENT;
constexpr int VECTOR_WIDTH = PARAMETERS_PER_ENV % 4 == 0 ? 4 : 1;
constexpr u64 PARAMETERS_BEGIN = ENVS_PER_BLOCK > 1 ? OBS_END : STAGED_END;
constexpr u64 PARAMETERS_STRIDE = stride_of(sizeof(float) * PARAMETERS_PER_ENV);
constexpr u64 PARAMETERS_END = PARAMETERS_BEGIN + PARAMETERS_STRIDE * ENVS_PER_BLOCK, MAX_PARAMETER_BYTES = 24 << 10;
constexpr bool PARAMETERS_FIT = FITS && PARAMETERS_PER_AGENT >= 4 && PARAMETERS_PER_AGENT % 8 != 0 &&
                                PARAMETERS_PER_ENV <= THREADS_PER_ENV * MAX_ITEMS_PER_THREAD * VECTOR_WIDTH &&
                                PARAMETERS_END - PARAMETERS_BEGIN <= MAX_PARAMETER_BYTES &&
                                PARAMETERS_END <= SHARED_BUDGET;
constexpr bool PARAMETERS_IN_SHARED = SAMPLED && PARAMETERS_FIT,
               FUSED_SAMPLING_PAYS_OFF = PARAMETERS_FIT || PARAMETERS_PER_AGENT <= 8;
constexpr u64 SHARED_BYTES = PARAMETERS_IN_SHARED && PARAMETERS_END > OBS_END ? PARAMETERS_END : OBS_END;

extern __shared__ __align__(16) unsigned char shared_memory[];

// What is before SHARED_BEGIN belongs to the kernel that steps environments.
HD unsigned char* at(u64 offset) { return shared_memory + SHARED_BEGIN + offset; }
HD i64 first_env_of_block() { return (i64)visit_order(blockIdx.x, gridDim.x) * ENVS_PER_BLOCK; }
HD float* parameters_of_group() { return (float*)at(PARAMETERS_BEGIN + PARAMETERS_STRIDE * group_of_block()); }
HD guarded_scratch::Memory* scratch_at(guarded_scratch::Memory* scratches, i64 env) {
    if constexpr (SCRATCH_IN_SHARED)
        return (guarded_scratch::Memory*)at(SCRATCH_STRIDE * group_of_block());
    else
        return scratches + env;
}
HD Staged& staged_of(Staged& in_registers) {
    if constexpr (STAGED_IN_SHARED)
        return *(Staged*)at(SCRATCH_END + STAGED_STRIDE * group_of_block());
    else
        return in_registers;
}
HD Observation* obs_of_block() { return (Observation*)at(STAGED_END); }
HD Observation* obs_target(Observation* output) {
    if constexpr (OBS_IN_SHARED)
        return obs_of_block() + NUM_AGENTS * OBS_SIZE * group_of_block();
    else
        return output;
}

// The whole block copies its staged observations to the output tensor: coalesced, 16 bytes at a time where the tensor's
// alignment allows it.
HD void write_obs(Observation* obs, i64 num_envs) {
    if constexpr (OBS_IN_SHARED) {
        __syncthreads();
        constexpr int ROW = NUM_AGENTS * OBS_SIZE;
        i64 first = first_env_of_block(), left = num_envs - first;
        // ENVS_PER_BLOCK is a power of two: the mask changes nothing but proves to the PTX lint that the cast is exact.
        int groups = left < ENVS_PER_BLOCK ? (int)(left & (ENVS_PER_BLOCK - 1)) : ENVS_PER_BLOCK;
        int n = groups * ROW * (int)sizeof(Observation);
        const unsigned char* from = at(STAGED_END);
        unsigned char* to = (unsigned char*)(obs + first * ROW);
        int whole = (u64)to % 16 == 0 ? n / 16 : 0;
        for (int k = threadIdx.x; k < whole; k += blockDim.x) ((uint4*)to)[k] = ((const uint4*)from)[k];
        constexpr int SIZE = sizeof(Observation);
        for (int k = whole * 16 / SIZE + threadIdx.x; k < n / SIZE; k += blockDim.x)
            ((Observation*)to)[k] = ((const Observation*)from)[k];
    }
}

// Minimum resident threads per multiprocessor, which bounds the registers per thread. Small groups need more of them to
// hide memory latency; with large groups barriers dominate. 0: the compiler decides.
constexpr int BLOCK = THREADS_PER_ENV * ENVS_PER_BLOCK, RESIDENT_THREADS = THREADS_PER_ENV < 32     ? 1280
                                                                           : THREADS_PER_ENV <= 128 ? 640
                                                                                                    : 0;
constexpr int RESIDENT_BLOCKS =
    RESIDENT_THREADS / BLOCK < 32 ? RESIDENT_THREADS / BLOCK : 32;  // the hardware's maximum

#define SCRATCH(scratches, env) staging::scratch_at((guarded_scratch::Memory*)(scratches), env)
#define ENV_KERNEL(name) KERNEL_WITH_LAUNCH_BOUNDS(name, staging::BLOCK, staging::RESIDENT_BLOCKS)
#define FOR_ENVS(env, n) if (i64 env = staging::first_env_of_block() + group_of_block(); env < (n))

#else

constexpr bool SCRATCH_IN_SHARED = false, STAGED_IN_SHARED = false, FUSED_SAMPLING_PAYS_OFF = false;
constexpr u64 SHARED_BYTES = 0;
HD Staged& staged_of(Staged& in_registers) { return in_registers; }
HD Observation* obs_target(Observation* output) { return output; }
HD void write_obs(Observation*, i64) {}
#define SCRATCH(scratches, env) ((guarded_scratch::Memory*)(scratches) + worker_)
#define ENV_KERNEL KERNEL
#define FOR_ENVS(env, n) FOR_ITEMS (env, n)

#endif

constexpr bool IS_STAGED = IN_REGISTERS || STAGED_IN_SHARED;

// An int64 action outside int32 becomes -1, which is invalid too.
HD Action to_action(LongAction a) {
#if BOX_ACTIONS
    return a;
#else
    return a == (Action)a ? (Action)a : -1;
#endif
}

// Every k-th item of n that this thread copies, as the c-th of its COUNT.
#define FOR_THREAD_ITEMS(c, k, n) \
    UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < n)

// One thread's items of a field, in registers: the loads of all fields are issued before the first store.
template <class T, int N>
struct ThreadItems {
    static constexpr int COUNT = !FITS ? 1 : (N + THREADS_PER_ENV - 1) / THREADS_PER_ENV;
    T item[COUNT];

    HD void load(const T* from) {
        FOR_THREAD_ITEMS (c, k, N) item[c] = from[k];
    }
    HD void load_actions(const void* from, bool int64_actions) {
        if (!int64_actions) return load((const T*)from);
        FOR_THREAD_ITEMS (c, k, N) item[c] = to_action(((const LongAction*)from)[k]);
    }
    HD void store(T* to) const {
        FOR_THREAD_ITEMS (c, k, N) to[k] = item[c];
    }
};

// Statistics of ended episodes: loaded where an episode ends and stored at the end of the step, so that the step hides
// the latency of memory that was last used an episode ago.
struct EpisodeStatistics {
    ThreadItems<double, NUM_AGENTS> totals, returns;
    i64 lengths, episodes, terminations;
    int length;
    bool terminated;

    HD void load(EngineState m, int episode_length, bool episode_terminated) {
        length = episode_length;
        terminated = episode_terminated;
        ONCE {
            lengths = m.completed_lengths[0];
            episodes = m.completed_episodes[0];
            terminations = m.completed_terminations[0];
        }
        if constexpr (FITS) {
            totals.load(m.completed_returns);
            returns.load(m.returns);
        } else {
            FOR_AGENTS (i) m.completed_returns[i] += m.returns[i];
        }
    }
    HD void store(EngineState m) {
        ONCE {
            m.completed_lengths[0] = lengths + length;
            m.completed_episodes[0] = episodes + 1;
            m.completed_terminations[0] = terminations + terminated;
        }
        if constexpr (FITS) {
            UNROLL for (int c = 0; c < totals.COUNT; ++c) totals.item[c] += returns.item[c];
            totals.store(m.completed_returns);
        }
    }
};

}  // namespace staging
