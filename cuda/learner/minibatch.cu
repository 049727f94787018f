// SPDX-License-Identifier: Apache-2.0
// Minibatches: permutation of the samples, moments of their advantages, gathering of rows, gradient clipping.
#include "blocks.cuh"
#include "learning_rate.cuh"
#include "math.cuh"
#include "rng.cuh"

constexpr int ROUNDS = 8;           // even, so that the halves end with the widths they began with
constexpr int MIN_BITS = 8;         // with fewer, a Feistel network has too few permutations
constexpr u32 EPOCH_COUNTER = ~0u;  // last word of the counter; it is 0 in the keys of environments, rng.cuh

// A bijective hash: the finaliser of SplitMix64, Steele, Lea and Flood, 2014.
HD u64 splitmix64(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

// A Feistel network: a permutation of [0, 2^bits). If bits is odd, the left half has one bit less.
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

// A pseudo-random permutation of [0, rows), a function of seed, epoch and `rows` alone. The permutation of a power of
// two is applied until the result is below `rows`: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
struct RowPermutation {
    Permutation permutation;
    u64 rows;

    HD RowPermutation(u64 seed, u64 epoch, i64 n) : rows((u64)n) {
        int bits = MIN_BITS;
        while (n > 1 && (n - 1) >> bits) ++bits;
        permutation.left_bits = bits / 2;
        permutation.right_bits = bits - bits / 2;
        for (int k = 0; k < ROUNDS / 4; ++k) {
            Philox4 draws =
                philox({{(u32)epoch, (u32)(epoch >> 32), (u32)k, EPOCH_COUNTER}}, (u32)seed, (u32)(seed >> 32));
            for (int j = 0; j < 4; ++j) permutation.key[4 * k + j] = draws.word[j];
        }
    }

    HD i64 operator()(i64 row) const {
        u64 index = (u64)row;
        do index = permutation(index);
        while (index >= rows);
        return (i64)index;
    }
};

// Of samples: those of the advantages of active ones whose agents acted, and the number of all active ones, whose
// values count.
struct MinibatchMoments : Moments {
    double values;

    HD void operator+=(const MinibatchMoments& other) {
        Moments::operator+=(other);
        values += other.values;
    }
};

constexpr int SHUFFLE_BLOCK = 256;  // a power of two; the same as SHUFFLE_BLOCK in learner_kernels.py
constexpr int TILE_ROWS = 1024;     // whose moments a block adds up; the same as TILE_ROWS in learner_kernels.py

// An epoch's order of the samples, permuted or as `indices` has them, and the moments of each minibatch of it.
// `epoch` then counts the next one. `tickets` has one for each minibatch, and one for all.
BLOCK_KERNEL(shuffle, SHUFFLE_BLOCK) {
    SHARED MinibatchMoments sums[SHUFFLE_BLOCK];
    i64 tiles = (args.rows + TILE_ROWS - 1) / TILE_ROWS;
    RowPermutation permuted((u64)*args.seed, (u64)*args.epoch, args.rows * args.minibatches);
    FOR_BLOCKS (block, tiles * args.minibatches) {
        i64 minibatch = 0, tile = block;
        for (; tile >= tiles; tile -= tiles) ++minibatch;  // there are few, and a 64-bit division is slow
        i64 first = tile * TILE_ROWS;
        MinibatchMoments* parts = (MinibatchMoments*)args.parts + minibatch * tiles;
        FOR_THREADS (k, SHUFFLE_BLOCK) {
            MinibatchMoments sum = {};
            UNROLL for (int j = 0; j < TILE_ROWS; j += SHUFFLE_BLOCK) {
                if (first + j + k >= args.rows) continue;
                i64 row = minibatch * args.rows + first + j + k;
                i64 index = args.indices[args.permutes ? permuted(row) : row];
                args.order[row] = index;
                bool active = args.active[index], acted = active && (!args.acting || args.acting[index]);
                double x = acted ? (double)args.estimates[index] : 0.0;
                sum += {{(double)acted, x, x * x}, (double)active};
            }
            sums[k] = sum;
        }
        add_up<SHUFFLE_BLOCK>(sums);
        FOR_THREADS (k, 1) parts[tile] = sums[0];
        if (!arrives_last(args.tickets + minibatch, tiles)) continue;

        FOR_THREADS (k, SHUFFLE_BLOCK)
            sums[k] = sum_of_rows<MinibatchMoments>(k, tiles, SHUFFLE_BLOCK, [=](i64 row) { return parts[row]; });
        add_up<SHUFFLE_BLOCK>(sums);
        FOR_THREADS (k, 1) ((MinibatchMoments*)args.moments)[minibatch] = sums[0];
        if (arrives_last(args.tickets + args.minibatches, args.minibatches))
            FOR_THREADS (k, 1) *args.epoch += 1;
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

constexpr int GATHER_BLOCK = 256;   // threads; the same as GATHER_BLOCK in learner_kernels.py
constexpr int WORDS_IN_FLIGHT = 4;  // of a thread; the same as WORDS_IN_FLIGHT in learner_kernels.py

#if !defined(__CUDACC__)
template <int BYTES>
HD void copy_row(const void* from, void* to, i64 words) {
    for (i64 first = 0; first < words; first += BATCH) {
        Word<BYTES> batch[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) if (first + b < words) batch[b] = ((const Word<BYTES>*)from)[first + b];
        UNROLL for (int b = 0; b < BATCH; ++b) if (first + b < words)((Word<BYTES>*)to)[first + b] = batch[b];
    }
}
#endif

// Copies the rows indices[0], indices[1], … to the `rows` rows of `out`, each of so many words. Neighbouring threads
// copy neighbouring words of all rows together, so that no thread waits for another row's words before it loads its
// own. All words of a block are fewer than 2^31: there are as many as one row has, or few.
template <int BYTES>
HD void gather(const u8* table, i64 stride, const i64* indices, u8* out, u32 rows, u32 words) {
#if defined(__CUDACC__)
    u32 all = rows * words;
    for (u32 first = threadIdx.x; first < all; first += WORDS_IN_FLIGHT * GATHER_BLOCK) {
        Word<BYTES> batch[WORDS_IN_FLIGHT];
        UNROLL for (int b = 0; b < WORDS_IN_FLIGHT; ++b) {
            u32 at = first + b * GATHER_BLOCK, row = at / words;
            if (at < all) batch[b] = ((const Word<BYTES>*)(table + indices[row] * stride))[at - (i64)row * words];
        }
        UNROLL for (int b = 0; b < WORDS_IN_FLIGHT; ++b) {
            u32 at = first + b * GATHER_BLOCK;
            if (at < all) ((Word<BYTES>*)out)[at] = batch[b];
        }
    }
#else
    for (i64 row = 0; row < rows; ++row)
        copy_row<BYTES>(table + indices[row] * stride, out + row * words * BYTES, words);
#endif
}

// Gathers rows in words of 16, 4 or 1 byte; both addresses and `stride` are multiples of the word. A block copies
// `block_rows` rows.
BLOCK_KERNEL(gather_rows, GATHER_BLOCK) {
    FOR_BLOCKS (block, (args.rows + args.block_rows - 1) / args.block_rows) {
        i64 first = block * args.block_rows, left = args.rows - first;
        u32 rows = (u32)(left < args.block_rows ? left : args.block_rows), words = (u32)args.words;
        const u8* table = (const u8*)args.table;
        u8* out = (u8*)args.out + first * args.words * args.word;
        if (args.word == 16) {
            gather<16>(table, args.stride, args.indices + first, out, rows, words);
        } else if (args.word == 4) {
            gather<4>(table, args.stride, args.indices + first, out, rows, words);
        } else {
            gather<1>(table, args.stride, args.indices + first, out, rows, words);
        }
    }
}

// Scales the gradient down to max_grad_norm, and that of a critic, which begins at `first_of_critic`, apart to
// critic_max_grad_norm. `skip_update` becomes 1 if a metric or the norm of all is not finite or approx_kl exceeds
// target_kl. Adds `skip_update` to `metric_sums`, and metrics and norm unless it was 1 before.
KERNEL(clip_grad_norm) {
    FOR_ITEMS (k, args.parameters + 1) {
        if (k < args.parameters) {
            bool of_critic = k >= args.first_of_critic;
            float most = of_critic ? args.critic_max_grad_norm : args.max_grad_norm;
            float scale = most / ((of_critic ? *args.critic_norm : *args.norm) + 1e-6f);
            args.gradient[k] *= scale > 1 ? 1.0f : scale;  // NaN is not greater than 1 and stays NaN
            continue;
        }
        float norm = *args.norm;
        if (args.critic_norm) norm = math::sqrt(norm * norm + *args.critic_norm * *args.critic_norm);
        bool finite = math::is_finite(norm), computed = *args.skip_update != 1;
        for (int j = 0; j < args.num_metrics; ++j) {
            finite = finite && math::is_finite(args.metrics[j]);
            if (computed) args.metric_sums[j] += args.metrics[j];
        }
        if (!finite || args.metrics[args.kl_index] > args.target_kl) *args.skip_update = 1;
        if (*args.skip_update == 0)
            *args.learning_rate = adapted_rate(*args.learning_rate, args.metrics[args.kl_index], args.desired_kl,
                                               args.least_rate, args.most_rate);
        if (computed) args.metric_sums[args.num_metrics] += norm;
        args.metric_sums[args.num_metrics + 1] += *args.skip_update;
    }
}
