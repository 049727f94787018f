// SPDX-License-Identifier: Apache-2.0
// Where a step works. Reading and writing state item by item where it lies would wait for memory again and again: a
// step takes its environment's state to where its lanes are, all of it at once, and puts it back at its end. One agent
// alone is kept in registers, a team's in shared memory. What does not fit there works where the state lies; so do
// games for CUDA only, which may use what knows that memory alone, and debug builds with guard bands, which watch it.
#pragma once
#include "game_api.cuh"

namespace staging {

HD constexpr u64 aligned(u64 bytes) { return (bytes + 15) / 16 * 16; }
constexpr int MAX_ITEMS_PER_THREAD = 16;  // items of a field that one lane takes; they pass through registers
constexpr bool FITS =
    ALLOW_STAGING && GUARD_ROWS == 0 && (LARGEST_FIELD + THREADS_PER_ENV - 1) / THREADS_PER_ENV <= MAX_ITEMS_PER_THREAD;
constexpr bool IN_REGISTERS = FITS && NUM_AGENTS == 1 && THREADS_PER_ENV == 1 && sizeof(Staged) <= 256;

#if defined(__CUDACC__)

constexpr u64 SHARED_BUDGET = SHARED_LIMIT - 1024;  // the rest is for the words of game_api.cuh
// From one team's part to the next: such that groups of a warp, whose lanes read at once, read from different banks.
HD constexpr u64 stride_of(u64 bytes) {
    constexpr u64 ROW = 128, OWN = THREADS_PER_ENV < 4 ? 16 : 4 * THREADS_PER_ENV;
    u64 stride = aligned(bytes);
    while (THREADS_PER_ENV < 32 && stride % ROW != OWN) stride += 16;
    return stride;
}
constexpr u64 SCRATCH_STRIDE = stride_of(sizeof(Scratch)), STAGED_STRIDE = stride_of(sizeof(Staged));
constexpr u64 SCRATCH_BYTES = SCRATCH_STRIDE * ENVS_PER_BLOCK, STAGED_BYTES = STAGED_STRIDE * ENVS_PER_BLOCK;
constexpr u64 OBS_BYTES = aligned(sizeof(Observation) * OBS_SIZE * NUM_AGENTS * ENVS_PER_BLOCK);
constexpr bool SCRATCH_IN_SHARED = SCRATCH_BYTES <= SHARED_BUDGET;
constexpr u64 SCRATCH_END = SCRATCH_IN_SHARED && !__is_empty(Scratch) ? SCRATCH_BYTES : 0;
constexpr bool STAGED_IN_SHARED = FITS && !IN_REGISTERS && SCRATCH_END + STAGED_BYTES <= SHARED_BUDGET;
constexpr u64 STAGED_END = SCRATCH_END + (STAGED_IN_SHARED ? STAGED_BYTES : 0);
constexpr bool OBS_IN_SHARED = FITS && OBS_BYTES <= OBS_STAGING_BYTES && STAGED_END + OBS_BYTES <= SHARED_BUDGET;
constexpr u64 OBS_END = STAGED_END + (OBS_IN_SHARED ? OBS_BYTES : 0);
// What actions are drawn from, where a step draws its own: a team that is a block has done so before it observes. Rows
// of a few numbers are read as fast where they lie; those whose numbers would share few banks, or that are more than
// lanes can carry, lie there too, and then a kernel that does nothing else is faster.
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

HD i64 first_env_of_block() { return (i64)visit_order(blockIdx.x, gridDim.x) * ENVS_PER_BLOCK; }
HD int group_of_block() { return threadIdx.x / THREADS_PER_ENV; }
HD Scratch* scratch_at(Scratch* scratches, i64 replica) {
    if constexpr (SCRATCH_IN_SHARED)
        return (Scratch*)(shared_memory + SCRATCH_STRIDE * group_of_block());
    else
        return scratches + replica;
}
HD Staged& staged_of(Staged& own) {
    if constexpr (STAGED_IN_SHARED)
        return *(Staged*)(shared_memory + SCRATCH_END + STAGED_STRIDE * group_of_block());
    else
        return own;
}
HD Observation* obs_target(Observation* there) {
    if constexpr (OBS_IN_SHARED)
        return (Observation*)(shared_memory + STAGED_END) + NUM_AGENTS * OBS_SIZE * group_of_block();
    else
        return there;
}

// The whole block writes what its groups have observed: neighbouring lanes neighbouring words, four at a time where the
// tensor's place allows it.
HD void write_obs(Observation* obs, i64 num_envs) {
    if constexpr (OBS_IN_SHARED) {
        __syncthreads();
        constexpr int ROW = NUM_AGENTS * OBS_SIZE;
        i64 first = first_env_of_block(), left = num_envs - first;
        // A power of two; its mask, which changes nothing, shows the lint of the PTX that nothing is cut off.
        int groups = left < ENVS_PER_BLOCK ? (int)(left & (ENVS_PER_BLOCK - 1)) : ENVS_PER_BLOCK;
        int n = groups * ROW * (int)sizeof(Observation);
        const unsigned char* from = shared_memory + STAGED_END;
        unsigned char* to = (unsigned char*)(obs + first * ROW);
        int whole = (u64)to % 16 == 0 ? n / 16 : 0;
        for (int k = threadIdx.x; k < whole; k += blockDim.x) ((uint4*)to)[k] = ((const uint4*)from)[k];
        constexpr int SIZE = sizeof(Observation);
        for (int k = whole * 16 / SIZE + threadIdx.x; k < n / SIZE; k += blockDim.x)
            ((Observation*)to)[k] = ((const Observation*)from)[k];
    }
}

// So many lanes are to be there at once on a multiprocessor: the compiler uses no more registers than that leaves.
// Small groups wait for memory most of the time, larger ones for one another. Of the largest it knows best (0).
constexpr int BLOCK = THREADS_PER_ENV * ENVS_PER_BLOCK, RESIDENT_THREADS = THREADS_PER_ENV < 32     ? 1280
                                                                           : THREADS_PER_ENV <= 128 ? 640
                                                                                                    : 0;
constexpr int RESIDENT_BLOCKS = RESIDENT_THREADS / BLOCK < 32 ? RESIDENT_THREADS / BLOCK : 32;  // more are never there

#define SCRATCH(scratches, env) staging::scratch_at(scratches, env)
#define ENV_KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(staging::BLOCK, staging::RESIDENT_BLOCKS) kernel_##name(__VA_ARGS__)
#define FOR_ENVS(env, n) if (i64 env = staging::first_env_of_block() + staging::group_of_block(); env < (n))

#else

constexpr bool SCRATCH_IN_SHARED = false, STAGED_IN_SHARED = false, FUSED_SAMPLING_PAYS_OFF = false;
constexpr u64 SHARED_BYTES = 0;
HD Staged& staged_of(Staged& own) { return own; }
HD Observation* obs_target(Observation* there) { return there; }
HD void write_obs(Observation*, i64) {}
#define SCRATCH(scratches, env) (scratches + worker_)
#define ENV_KERNEL KERNEL
#define FOR_ENVS(env, n) FOR_ITEMS (env, n)

#endif

constexpr bool IS_STAGED = IN_REGISTERS || STAGED_IN_SHARED;

// A number of 64 bits that does not fit is no action, and gives another that is none.
HD Action to_action(LongAction a) {
#if BOX_ACTIONS
    return a;
#else
    return a == (Action)a ? (Action)a : -1;
#endif
}

// One lane's items of a field on their way: all fields are asked for before the first is needed.
template <class T, int N>
struct ThreadItems {
    static constexpr int COUNT = !FITS ? 1 : (N + THREADS_PER_ENV - 1) / THREADS_PER_ENV;
    T item[COUNT];

    HD void load(const T* from) {
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < N) item[c] =
            from[k];
    }
    HD void load_actions(const void* from, bool int64_actions) {
        if (!int64_actions) return load((const T*)from);
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < N) item[c] =
            to_action(((const LongAction*)from)[k]);
    }
    HD void store(T* to) const {
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < N) to[k] = item[c];
    }
};

#if SAMPLED && defined(__CUDACC__)
// A team's parameters on their way to where it draws: four at a time where they are a multiple of four.
struct Parameters {
    struct alignas(4 * VECTOR_WIDTH) Word {
        float number[VECTOR_WIDTH];
    };
    static constexpr int WORDS = PARAMETERS_IN_SHARED ? (int)(PARAMETERS_PER_ENV / VECTOR_WIDTH) : 1;
    static constexpr int COUNT = (WORDS + THREADS_PER_ENV - 1) / THREADS_PER_ENV;
    Word word[COUNT];

    HD void load(const float* own) {
        if constexpr (PARAMETERS_IN_SHARED)
            UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < WORDS) word[c] =
                ((const Word*)own)[k];
    }
    // Where they are to be read, once the team has come together.
    HD const float* store(const float* own) const {
        if constexpr (!PARAMETERS_IN_SHARED) return own;
        Word* staged = (Word*)(shared_memory + PARAMETERS_BEGIN + PARAMETERS_STRIDE * group_of_block());
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = thread_rank() + c * THREADS_PER_ENV; k < WORDS) staged[k] =
            word[c];
        return (const float*)staged;
    }
};
#endif

// What environments keep of the episodes that have ended. Where one ends it is asked for, and written only when the
// step is done: it lies in memory that nobody has touched for long.
struct EpisodeStatistics {
    ThreadItems<float, NUM_AGENTS> totals, returns;
    i64 lengths, episodes, terminations;
    int length;
    bool terminated;

    HD void load(EngineState m, int time, bool terminated_now) {
        length = time;
        terminated = terminated_now;
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
