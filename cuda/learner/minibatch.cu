// SPDX-License-Identifier: Apache-2.0
// Which rows of a rollout the minibatches of an epoch have, copies of such rows, and what becomes of their gradient.
#include "kernel.cuh"
#include "math.cuh"
#include "rng.cuh"

constexpr int ROUNDS = 8;           // even, so that the halves are as wide at the end as at the beginning
constexpr int MIN_BITS = 8;         // with fewer, a network's permutations would be few
constexpr u32 EPOCH_COUNTER = ~0u;  // a counter's last word; that of an environment's key, in rng.cuh, is 0

// Another word for each, as good as random: the finaliser of Steele, Lea and Flood, SplitMix64, 2014.
HD u64 splitmix64(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// A permutation of the numbers below a power of two: a Feistel network. Where bits are odd, the left half has one less.
struct Permutation {
    u32 key[ROUNDS];
    int left_bits, right_bits;

    HD u64 operator()(u64 x) const {
        u64 left = x >> right_bits, right = x & ((1ull << right_bits) - 1);
        UNROLL for (int round = 0; round < ROUNDS; ++round) {
            u64 next = left ^ splitmix64(right ^ key[round]) >> (64 - (round % 2 ? right_bits : left_bits));
            left = right;
            right = next;
        }
        return left << right_bits | right;
    }
};

// `indices` in a pseudo-random order, a function of seed, epoch and number of rows alone. Where a permutation of more
// numbers leads beyond them it is applied again, until it comes back: Black and Rogaway, "Ciphers with arbitrary finite
// domains", 2002.
KERNEL(shuffle) {
    Permutation permutation;
    int bits = MIN_BITS;
    while (args.rows > 1 && (args.rows - 1) >> bits) ++bits;
    permutation.left_bits = bits / 2;
    permutation.right_bits = bits - bits / 2;
    for (int k = 0; k < ROUNDS / 4; ++k) {
        Philox4 draws = philox({{(u32)*args.epoch, (u32)((u64)*args.epoch >> 32), (u32)k, EPOCH_COUNTER}},
                               (u32)*args.seed, (u32)(*args.seed >> 32));
        for (int j = 0; j < 4; ++j) permutation.key[4 * k + j] = draws.word[j];
    }
    FOR_ITEMS (row, args.rows) {
        u64 index = (u64)row;
        do index = permutation(index);
        while (index >= (u64)args.rows);
        args.order[row] = args.indices[index];
    }
}

template <int BYTES>
struct alignas(BYTES) Word {
    u32 part[BYTES / 4];
};
template <>
struct Word<1> {
    u8 part;
};

// Words of this many rows, or of one, are on their way at once.
constexpr int BATCH = 8;

template <int BYTES>
HD void copy_row(const void* from, void* to, i64 words) {
    for (i64 first = 0; first < words; first += BATCH) {
        Word<BYTES> batch[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) if (first + b < words) batch[b] = ((const Word<BYTES>*)from)[first + b];
        UNROLL for (int b = 0; b < BATCH; ++b) if (first + b < words)((Word<BYTES>*)to)[first + b] = batch[b];
    }
}

// The row at indices[row] goes to the row'th of `out`. Long rows are copied by the lanes of a warp together,
// neighbouring lanes neighbouring words.
template <int BYTES>
HD void gather(const u8* table, i64 stride, i64 bytes, const i64* indices, u8* out, i64 row,
               [[maybe_unused]] i64 rows) {
    i64 words = bytes / BYTES;
#if defined(__CUDACC__)
    __shared__ i64 index_of[256];
    int lane = threadIdx.x % 32;
    if (words > 4 && row - lane + 32 <= rows) {
        const i64* index = index_of + threadIdx.x / 32 * 32;
        __syncwarp();  // the rows before these have been copied
        index_of[threadIdx.x] = indices[row];
        __syncwarp();
        out += (row - lane) * bytes;
        for (i64 k = lane; k < words; k += 32) {
            for (int first = 0; first < 32; first += BATCH) {
                Word<BYTES> batch[BATCH];
                UNROLL for (int b = 0; b < BATCH; ++b) {
                    batch[b] = ((const Word<BYTES>*)(table + index[first + b] * stride))[k];
                }
                UNROLL for (int b = 0; b < BATCH; ++b)((Word<BYTES>*)(out + (first + b) * bytes))[k] = batch[b];
            }
        }
        return;
    }
#endif
    copy_row<BYTES>(table + indices[row] * stride, out + row * bytes, words);
}

// Rows of `bytes`, copied in words of 16, 4 or 1 byte: both tables, and `stride`, are multiples of that.
KERNEL(gather_rows) {
    FOR_ITEMS (row, args.rows) {
        if (args.word == 16) {
            gather<16>((const u8*)args.table, args.stride, args.bytes, args.indices, (u8*)args.out, row, args.rows);
        } else if (args.word == 4) {
            gather<4>((const u8*)args.table, args.stride, args.bytes, args.indices, (u8*)args.out, row, args.rows);
        } else {
            gather<1>((const u8*)args.table, args.stride, args.bytes, args.indices, (u8*)args.out, row, args.rows);
        }
    }
}

// Before a step: the gradient is scaled down to the largest norm, and `skip_update` becomes 1 where a figure or the
// norm is not finite, or the approximate KL is beyond its target. `metric_sums` take in the metrics, the norm, and
// whether it is 1.
KERNEL(clip_grad_norm) {
    FOR_ITEMS (k, args.parameters + 1) {
        if (k < args.parameters) {
            float scale = args.max_grad_norm / (*args.norm + 1e-6f);
            args.gradient[k] *= scale > 1 ? 1.0f : scale;  // a NaN stays one
            continue;
        }
        bool finite = math::is_finite(*args.norm);
        for (int j = 0; j < args.num_metrics; ++j) {
            finite = finite && math::is_finite(args.metrics[j]);
            args.metric_sums[j] += args.metrics[j];
        }
        if (!finite || args.metrics[args.kl_index] > args.target_kl) *args.skip_update = 1;
        args.metric_sums[args.num_metrics] += *args.norm;
        args.metric_sums[args.num_metrics + 1] += *args.skip_update;
    }
}
