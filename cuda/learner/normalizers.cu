// SPDX-License-Identifier: Apache-2.0
// Running statistics of observations and of discounted sums of rewards. The reference in torch of the moments and of
// the update is `Normalizer` in gpu_vecenv/train/normalizers.py.
#include "blocks.cuh"
#include "math.cuh"

constexpr int MOMENTS_BLOCK = 256;  // a power of two; the same as MOMENTS_BLOCK in normalizer_kernels.py
constexpr int TILE_ROWS = 1024;     // that a block adds up; the same as TILE_ROWS in normalizer_kernels.py
constexpr int STEPS_AT_ONCE = 8;    // loads in flight

// Of one active sample, from its deviation from the mean.
HD Moments moments_of(double deviation) { return {1, deviation, deviation * deviation}; }

// Adds the moments of each number of the observations to `moments`: their count, all sums, all sums of squares. A block
// adds up `lanes` neighbouring numbers of a tile of samples. `tickets` has one for each such column.
BLOCK_KERNEL(obs_moments, MOMENTS_BLOCK) {
    SHARED Moments sums[MOMENTS_BLOCK];
    i64 lanes = args.lanes, groups = args.groups;
    i64 tiles = (args.rows + TILE_ROWS - 1) / TILE_ROWS, columns = (args.size + lanes - 1) >> args.lane_bits;
    FOR_BLOCKS (block, tiles * columns) {
        i64 column = 0, tile = block;
        for (; tile >= tiles; tile -= tiles) ++column;
        i64 first = tile * TILE_ROWS, end = first + TILE_ROWS < args.rows ? first + TILE_ROWS : args.rows;
        Moments* parts = (Moments*)args.parts + column * tiles * lanes;
        FOR_THREADS (k, MOMENTS_BLOCK) {
            i64 number = column * lanes + (k & args.lane_mask);
            sums[k] = {};
            if (number >= args.size) continue;
            i64 offset = args.offsets[number];
            double mean = args.mean[number];
            sums[k] = sum_of_rows<Moments>(first + (k >> args.lane_bits), end, groups, [=](i64 row) {
                i64 index = args.indices[row];
                // Observations of agents that have died, for example, are zeros.
                if (!args.active[index] || (args.acting && !args.acting[index])) return Moments{};
                i64 at = index * args.stride + offset;
                return moments_of((args.bytes ? (double)((const u8*)args.obs)[at] : ((const float*)args.obs)[at]) -
                                  mean);
            });
        }
        add_up<MOMENTS_BLOCK>(sums, (int)lanes);
        FOR_THREADS (lane, lanes) parts[tile * lanes + lane] = sums[lane];
        if (!arrives_last(args.tickets + column, tiles)) continue;

        FOR_THREADS (k, MOMENTS_BLOCK) {
            const Moments* own = parts + (k & args.lane_mask);
            sums[k] =
                sum_of_rows<Moments>(k >> args.lane_bits, tiles, groups, [=](i64 row) { return own[row * lanes]; });
        }
        add_up<MOMENTS_BLOCK>(sums, (int)lanes);
        FOR_THREADS (lane, lanes) {
            i64 number = column * lanes + lane;
            if (number >= args.size) continue;
            if (number == 0) args.moments[0] += sums[0].count;
            args.moments[1 + number] += sums[lane].sum;
            args.moments[1 + args.size + number] += sums[lane].squares;
        }
        block_barrier();  // `sums` is in use until here
    }
}

// Adds the moments of the discounted sums of each agent's rewards since its episode began, at each step, to `moments`.
// The sums continue those of the rollout before. They are the statistic of gymnasium.wrappers.NormalizeReward: a
// function of rewards alone. Statistics of the returns, which contain the critic's values, would feed its errors back
// into the unit of its output.
BLOCK_KERNEL(reward_moments, MOMENTS_BLOCK) {
    SHARED Moments sums[MOMENTS_BLOCK];
    i64 tiles = (args.rows + MOMENTS_BLOCK - 1) / MOMENTS_BLOCK;
    Moments* parts = (Moments*)args.parts;
    FOR_BLOCKS (tile, tiles) {
        FOR_THREADS (k, MOMENTS_BLOCK) {
            i64 row = tile * MOMENTS_BLOCK + k;
            Moments found = {};
            float sum = row < args.rows ? args.reward_sums[row] : 0.0f;
            i64 index = row < args.rows ? args.indices[row] : 0;
            double mean = *args.mean;
            for (i64 begin = 0; begin < args.num_steps && row < args.rows; begin += STEPS_AT_ONCE) {
                float rewards[STEPS_AT_ONCE];
                bool active[STEPS_AT_ONCE], ends[STEPS_AT_ONCE];
                UNROLL for (int j = 0; j < STEPS_AT_ONCE; ++j) {
                    if (begin + j >= args.num_steps) continue;
                    i64 at = (begin + j) * args.step + index;
                    rewards[j] = args.rewards[at];
                    active[j] = args.active[at];
                    ends[j] = args.terminations[at] || args.truncations[at];
                }
                UNROLL for (int j = 0; j < STEPS_AT_ONCE; ++j) {
                    if (begin + j >= args.num_steps) continue;
                    if (active[j]) {
                        sum = rewards[j] + args.gamma * sum;
                        found += moments_of((double)sum - mean);
                    }
                    if (ends[j] || !math::is_finite(sum)) sum = 0;
                }
            }
            if (row < args.rows) args.reward_sums[row] = sum;
            sums[k] = found;
        }
        add_up<MOMENTS_BLOCK>(sums);
        FOR_THREADS (k, 1) parts[tile] = sums[0];
        if (!arrives_last(args.ticket, tiles)) continue;

        FOR_THREADS (k, MOMENTS_BLOCK)
            sums[k] = sum_of_rows<Moments>(k, tiles, MOMENTS_BLOCK, [=](i64 row) { return parts[row]; });
        add_up<MOMENTS_BLOCK>(sums);
        FOR_THREADS (k, 1) {
            args.moments[0] += sums[0].count;
            args.moments[1] += sums[0].sum;
            args.moments[2] += sums[0].squares;
        }
    }
}

// Merges a batch of samples, given by its moments, into mean, variance and count, and sets the moments to 0. Nothing
// else changes if they are not finite. Chan, Golub and LeVeque, see `merge_moments` in running_statistics.py.
BLOCK_KERNEL(update_normalizer, MOMENTS_BLOCK) {
    SHARED double nonfinite[MOMENTS_BLOCK];
    FOR_BLOCKS (only, 1) {
        const double* moments = args.moments;
        FOR_THREADS (k, MOMENTS_BLOCK)
            nonfinite[k] = sum_of_rows<double>(k, 1 + 2 * args.size, MOMENTS_BLOCK,
                                               [=](i64 row) { return math::is_finite(moments[row]) ? 0.0 : 1.0; });
        add_up<MOMENTS_BLOCK>(nonfinite);
        bool changes = nonfinite[0] == 0;
        double rows = args.moments[0], total = *args.count + rows, share = rows / total;
        double divisor = rows > 1 ? rows : 1.0;
        block_barrier();  // all threads have read what is written below
        for (i64 first = 0; first < args.size; first += MOMENTS_BLOCK) {
            FOR_THREADS (k, MOMENTS_BLOCK) {
                i64 number = first + k;
                if (number >= args.size) continue;
                double delta = args.moments[1 + number] / divisor;
                double variance = args.moments[1 + args.size + number] / divisor - delta * delta;
                if (variance < 0) variance = 0;
                double mean = args.mean[number], var = args.var[number];
                if (changes) {
                    args.mean[number] = mean + delta * share;
                    args.var[number] = var + (variance - var) * share + delta * delta * share * (1 - share);
                }
                args.moments[1 + number] = args.moments[1 + args.size + number] = 0;
            }
        }
        FOR_THREADS (k, 1) {
            if (changes) *args.count = total;
            args.moments[0] = 0;
        }
    }
}
