// SPDX-License-Identifier: Apache-2.0
// The kernel that samples the actions of all environments; compiled after the generated header of a game.
#include "sampling.cuh"

#if defined(__CUDACC__)

// One row of a table of N columns. A warp copies the rows of its 32 lanes to shared memory with coalesced accesses.
// Where rows are short, too long, or would fall into too few banks, each lane reads its row from the table.
template <int N>
HD const float* staged_row(const float* table, i64 row, i64 rows) {
    constexpr int BLOCK = 128;  // threads, as sampler.py launches them
    if constexpr (N < 4 || N % 8 == 0 || BLOCK * N * sizeof(float) > 48 << 10) {
        return table + row * N;
    } else {
        alignas(16) __shared__ float staged[BLOCK * N];
        int lane = threadIdx.x % 32;
        i64 first = row - lane;
        float* own = staged + threadIdx.x / 32 * 32 * N;
        if (rows - first < 32) {
            UNROLL for (int c = 0; c < N; ++c) own[lane * N + c] = table[row * N + c];
            return own + lane * N;
        }
        __syncwarp();                                           // the previous rows have been read
        const uint4* from = (const uint4*)(table + first * N);  // 32 rows are a multiple of 16 bytes
        UNROLL for (int c = lane; c < 8 * N; c += 32)((uint4*)own)[c] = from[c];
        __syncwarp();
        return own + lane * N;
    }
}

#else

template <int N>
HD const float* staged_row(const float* table, i64 row, i64) {
    return table + row * N;
}

#endif

KERNEL(sample) {
    FOR_ITEMS (row, args.rows) {
        i64 env = row / NUM_AGENTS;
        Rng rng = {args.key[2 * env], args.key[2 * env + 1], SAMPLER_STREAM, (u32)args.episode[env],
                   (u32)args.elapsed_steps[env]};
        Action action[ACTION_HEADS];
        sampling::sample_row(staged_row<PARAMETERS_PER_AGENT>(args.parameters, row, args.rows), rng,
                             (int)(row % NUM_AGENTS),
                             {args.greedy, args.actions, args.log_probs, args.entropies, args.draws}, row, action);
    }
}
