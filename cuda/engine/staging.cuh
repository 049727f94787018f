// SPDX-License-Identifier: Apache-2.0
// Where a tick works. Reading and writing state item by item where it lies would wait for memory again and again: a
// tick takes its replica's state to where its lanes are, all of it at once, and puts it back at its end. One agent
// alone is kept in registers, a team's in shared memory. What does not fit there works where the state lies; so do
// games for CUDA only, which may use what knows that memory alone, and debug builds with guard bands, which watch it.
#pragma once
#include "vecenv.cuh"

namespace staging {

HD constexpr u64 aligned(u64 bytes) { return (bytes + 15) / 16 * 16; }
constexpr int MOST_PARTS = 16;  // items of a field that one lane takes; they pass through registers
constexpr bool FITS = MAY_STAGE && GUARD_ROWS == 0 && (LARGEST_FIELD + TEAM - 1) / TEAM <= MOST_PARTS;
constexpr bool IN_REGISTERS = FITS && NUM_AGENTS == 1 && TEAM == 1 && sizeof(Near) <= 256;

#if defined(__CUDACC__)

constexpr u64 MOST_SHARED = SHARED_LIMIT - 1024;  // the rest is for the words of vecenv.cuh
// From one team's part to the next: such that teams of a warp, whose lanes read at once, read from different banks.
HD constexpr u64 stride_of(u64 bytes) {
    constexpr u64 ROW = 128, OWN = TEAM < 4 ? 16 : 4 * TEAM;
    u64 stride = aligned(bytes);
    while (TEAM < 32 && stride % ROW != OWN) stride += 16;
    return stride;
}
constexpr u64 SCRATCH_STRIDE = stride_of(sizeof(Scratch)), NEAR_STRIDE = stride_of(sizeof(Near));
constexpr u64 SCRATCH_BYTES = SCRATCH_STRIDE * TEAMS_PER_BLOCK, NEAR_BYTES = NEAR_STRIDE * TEAMS_PER_BLOCK;
constexpr u64 OBS_BYTES = aligned(sizeof(Observation) * OBS_SIZE * NUM_AGENTS * TEAMS_PER_BLOCK);
constexpr bool SCRATCH_IS_SHARED = SCRATCH_BYTES <= MOST_SHARED;
constexpr u64 SCRATCH_END = SCRATCH_IS_SHARED && !__is_empty(Scratch) ? SCRATCH_BYTES : 0;
constexpr bool NEAR_IS_SHARED = FITS && !IN_REGISTERS && SCRATCH_END + NEAR_BYTES <= MOST_SHARED;
constexpr u64 NEAR_END = SCRATCH_END + (NEAR_IS_SHARED ? NEAR_BYTES : 0);
constexpr bool OBS_IS_SHARED = FITS && OBS_BYTES <= MOST_GATHERED && NEAR_END + OBS_BYTES <= MOST_SHARED;
constexpr u64 OBS_END = NEAR_END + (OBS_IS_SHARED ? OBS_BYTES : 0);
// What actions are drawn from, where a tick draws its own: a team that is a block has done so before it observes. Rows
// of a few numbers are read as fast where they lie; those whose numbers would share few banks, or that are more than
// lanes can carry, lie there too, and then a kernel that does nothing else is faster.
constexpr i64 OWN_PARAMETERS = (i64)NUM_AGENTS * PARAMETERS_PER_AGENT;
constexpr int CARRIED_AT_ONCE = OWN_PARAMETERS % 4 == 0 ? 4 : 1;
constexpr u64 PARAMETERS_BEGIN = TEAMS_PER_BLOCK > 1 ? OBS_END : NEAR_END;
constexpr u64 PARAMETERS_STRIDE = stride_of(sizeof(float) * OWN_PARAMETERS);
constexpr u64 PARAMETERS_END = PARAMETERS_BEGIN + PARAMETERS_STRIDE * TEAMS_PER_BLOCK, MOST_PARAMETERS = 24 << 10;
constexpr bool PARAMETERS_FIT = FITS && PARAMETERS_PER_AGENT >= 4 && PARAMETERS_PER_AGENT % 8 != 0 &&
                                OWN_PARAMETERS <= TEAM * MOST_PARTS * CARRIED_AT_ONCE &&
                                PARAMETERS_END - PARAMETERS_BEGIN <= MOST_PARAMETERS && PARAMETERS_END <= MOST_SHARED;
constexpr bool PARAMETERS_ARE_SHARED = SAMPLED && PARAMETERS_FIT,
               DRAWING_PAYS = PARAMETERS_FIT || PARAMETERS_PER_AGENT <= 8;
constexpr u64 SHARED_BYTES = PARAMETERS_ARE_SHARED && PARAMETERS_END > OBS_END ? PARAMETERS_END : OBS_END;

extern __shared__ __align__(16) unsigned char shared_memory[];

HD i64 first_of_block() { return (i64)in_order(blockIdx.x, gridDim.x) * TEAMS_PER_BLOCK; }
HD int team_of_block() { return threadIdx.x / TEAM; }
HD Scratch* scratch_of(Scratch* everywhere, i64 replica) {
    if constexpr (SCRATCH_IS_SHARED)
        return (Scratch*)(shared_memory + SCRATCH_STRIDE * team_of_block());
    else
        return everywhere + replica;
}
HD Near& near_of(Near& own) {
    if constexpr (NEAR_IS_SHARED)
        return *(Near*)(shared_memory + SCRATCH_END + NEAR_STRIDE * team_of_block());
    else
        return own;
}
HD Observation* obs_of(Observation* there) {
    if constexpr (OBS_IS_SHARED)
        return (Observation*)(shared_memory + NEAR_END) + NUM_AGENTS * OBS_SIZE * team_of_block();
    else
        return there;
}

// The whole block writes what its teams have observed: neighbouring lanes neighbouring words, four at a time where the
// tensor's place allows it.
HD void write_obs(Observation* obs, i64 num_envs) {
    if constexpr (OBS_IS_SHARED) {
        __syncthreads();
        constexpr int ROW = NUM_AGENTS * OBS_SIZE;
        i64 first = first_of_block(), left = num_envs - first;
        // A power of two; its mask, which changes nothing, shows the lint of the PTX that nothing is cut off.
        int teams = left < TEAMS_PER_BLOCK ? (int)(left & (TEAMS_PER_BLOCK - 1)) : TEAMS_PER_BLOCK;
        int n = teams * ROW * (int)sizeof(Observation);
        const unsigned char* from = shared_memory + NEAR_END;
        unsigned char* to = (unsigned char*)(obs + first * ROW);
        int whole = (u64)to % 16 == 0 ? n / 16 : 0;
        for (int k = threadIdx.x; k < whole; k += blockDim.x) ((uint4*)to)[k] = ((const uint4*)from)[k];
        constexpr int SIZE = sizeof(Observation);
        for (int k = whole * 16 / SIZE + threadIdx.x; k < n / SIZE; k += blockDim.x)
            ((Observation*)to)[k] = ((const Observation*)from)[k];
    }
}

// So many lanes are to be there at once on a multiprocessor: the compiler uses no more registers than that leaves.
// Small teams wait for memory most of the time, larger ones for one another. Of the largest it knows best (0).
constexpr int BLOCK = TEAM * TEAMS_PER_BLOCK, RESIDENT_LANES = TEAM < 32 ? 1280 : TEAM <= 128 ? 640 : 0;
constexpr int RESIDENT_BLOCKS = RESIDENT_LANES / BLOCK < 32 ? RESIDENT_LANES / BLOCK : 32;  // more are never there

#define SCRATCH(everywhere, e) staging::scratch_of(everywhere, e)
#define REPLICA_KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(staging::BLOCK, staging::RESIDENT_BLOCKS) kernel_##name(__VA_ARGS__)
#define FOR_REPLICAS(e, n) if (i64 e = staging::first_of_block() + staging::team_of_block(); e < (n))

#else

constexpr bool SCRATCH_IS_SHARED = false, NEAR_IS_SHARED = false, DRAWING_PAYS = false;
constexpr u64 SHARED_BYTES = 0;
HD Near& near_of(Near& own) { return own; }
HD Observation* obs_of(Observation* there) { return there; }
HD void write_obs(Observation*, i64) {}
#define SCRATCH(everywhere, e) (everywhere + worker_)
#define REPLICA_KERNEL KERNEL
#define FOR_REPLICAS(e, n) FOR_ITEMS (e, n)

#endif

constexpr bool IS_NEAR = IN_REGISTERS || NEAR_IS_SHARED;

// A number of 64 bits that does not fit is no action, and gives another that is none.
HD Action narrow(WideAction a) {
#if BOX_ACTIONS
    return a;
#else
    return a == (Action)a ? (Action)a : -1;
#endif
}

// One lane's items of a field on their way: all fields are asked for before the first is needed.
template <class T, int N>
struct Part {
    static constexpr int COUNT = !FITS ? 1 : (N + TEAM - 1) / TEAM;
    T item[COUNT];

    HD void take(const T* from) {
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = lane() + c * TEAM; k < N) item[c] = from[k];
    }
    HD void take_actions(const void* from, bool wide) {
        if (!wide) return take((const T*)from);
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = lane() + c * TEAM; k < N) item[c] =
            narrow(((const WideAction*)from)[k]);
    }
    HD void give(T* to) const {
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = lane() + c * TEAM; k < N) to[k] = item[c];
    }
};

#if SAMPLED && defined(__CUDACC__)
// A team's parameters on their way to where it draws: four at a time where they are a multiple of four.
struct Parameters {
    struct alignas(4 * CARRIED_AT_ONCE) Word {
        float number[CARRIED_AT_ONCE];
    };
    static constexpr int WORDS = PARAMETERS_ARE_SHARED ? (int)(OWN_PARAMETERS / CARRIED_AT_ONCE) : 1;
    static constexpr int COUNT = (WORDS + TEAM - 1) / TEAM;
    Word word[COUNT];

    HD void ask(const float* own) {
        if constexpr (PARAMETERS_ARE_SHARED)
            UNROLL for (int c = 0; c < COUNT; ++c) if (int k = lane() + c * TEAM; k < WORDS) word[c] =
                ((const Word*)own)[k];
    }
    // Where they are to be read, once the team has come together.
    HD const float* keep(const float* own) const {
        if constexpr (!PARAMETERS_ARE_SHARED) return own;
        Word* near = (Word*)(shared_memory + PARAMETERS_BEGIN + PARAMETERS_STRIDE * team_of_block());
        UNROLL for (int c = 0; c < COUNT; ++c) if (int k = lane() + c * TEAM; k < WORDS) near[k] = word[c];
        return (const float*)near;
    }
};
#endif

// What replicas keep of the episodes that have ended. Where one ends it is asked for, and written only when the tick is
// done: it lies in memory that nobody has touched for long.
struct Books {
    Part<float, NUM_AGENTS> earlier, returns;
    i64 lengths, episodes, terminations;
    int ticks;
    bool terminated;

    HD void open(Machine m, int time, bool by_termination) {
        ticks = time;
        terminated = by_termination;
        ONCE {
            lengths = m.completed_lengths[0];
            episodes = m.completed_episodes[0];
            terminations = m.completed_terminations[0];
        }
        if constexpr (FITS) {
            earlier.take(m.completed_returns);
            returns.take(m.returns);
        } else {
            FOR_AGENTS (i) m.completed_returns[i] += m.returns[i];
        }
    }
    HD void close(Machine m) {
        ONCE {
            m.completed_lengths[0] = lengths + ticks;
            m.completed_episodes[0] = episodes + 1;
            m.completed_terminations[0] = terminations + terminated;
        }
        if constexpr (FITS) {
            UNROLL for (int c = 0; c < earlier.COUNT; ++c) earlier.item[c] += returns.item[c];
            earlier.give(m.completed_returns);
        }
    }
};

}  // namespace staging
