// SPDX-License-Identifier: Apache-2.0
// What begins and ends the updates of an iteration: schedules, explained variance, metrics. The reference in torch of
// the second is `explained_variance` in gpu_vecenv/train/ppo.py.
#include "blocks.cuh"
#include "math.cuh"

HD float between(double start, double end, double progress) { return (float)(start + (end - start) * progress); }

// Learning rate, clip and entropy coefficient when the fraction `progress` of the run is done, the first of the
// iteration's epochs, and whether its updates are skipped. `iteration` and `progress` are then those of the next one.
// `schedules` has the values of the first three at the start and at the end of the run.
KERNEL(begin_update) {
    FOR_ITEMS (k, args.num_metrics) args.metric_sums[k] = 0;
    FOR_ITEMS (only, 1) {
        float* scheduled[] = {args.learning_rate, args.clip, args.entropy_coefficient};
        for (int k = 0; k < 3; ++k)
            *scheduled[k] = between(args.schedules[2 * k], args.schedules[2 * k + 1], *args.progress);
        *args.epoch = *args.iteration * args.num_epochs;
        *args.skip_update = *args.stopped != 0 ? 1.0f : 0.0f;
        *args.iteration += 1;
        double progress = (double)*args.iteration / (double)args.num_iterations;
        *args.progress = progress < 1 ? progress : 1.0;
    }
}

constexpr int TILE_BLOCK = 256;  // a power of two; the same as TILE_BLOCK in iteration_kernels.py
constexpr int TILE_ROWS = 2048;  // that a block adds up; the same as TILE_ROWS in iteration_kernels.py

struct ReturnMoments {
    double count, sum, squares, error_sum, error_squares;

    HD void operator+=(const ReturnMoments& other) {
        count += other.count;
        sum += other.sum;
        squares += other.squares;
        error_sum += other.error_sum;
        error_squares += other.error_squares;
    }
};

HD float variance_of(double mean, double mean_square) {
    double variance = mean_square - mean * mean;
    return variance < 0 ? 0.0f : (float)variance;  // NaN is not less than 0
}

// Fraction of the returns' variance that is not the variance of their errors, the advantages, over the active samples.
BLOCK_KERNEL(explained_variance, TILE_BLOCK) {
    SHARED ReturnMoments sums[TILE_BLOCK];
    i64 tiles = (args.rows + TILE_ROWS - 1) / TILE_ROWS;
    ReturnMoments* parts = (ReturnMoments*)args.parts;
    FOR_BLOCKS (tile, tiles) {
        i64 first = tile * TILE_ROWS, end = first + TILE_ROWS < args.rows ? first + TILE_ROWS : args.rows;
        FOR_THREADS (k, TILE_BLOCK) {
            sums[k] = sum_of_rows<ReturnMoments>(first + k, end, TILE_BLOCK, [=](i64 row) {
                i64 index = args.indices[row];
                if (!args.active[index]) return ReturnMoments{};
                double x = args.returns[index], error = args.errors[index];
                return ReturnMoments{1, x, x * x, error, error * error};
            });
        }
        add_up<TILE_BLOCK>(sums);
        FOR_THREADS (k, 1) parts[tile] = sums[0];
        if (!arrives_last(args.ticket, tiles)) continue;

        FOR_THREADS (k, TILE_BLOCK)
            sums[k] = sum_of_rows<ReturnMoments>(k, tiles, TILE_BLOCK, [=](i64 row) { return parts[row]; });
        add_up<TILE_BLOCK>(sums);
        FOR_THREADS (k, 1) {
            ReturnMoments total = sums[0];
            double count = total.count > 1 ? total.count : 1.0, mean = total.sum / count;
            float variance = variance_of(mean, total.squares / count);
            float unexplained = variance_of(total.error_sum / count, total.error_squares / count);
            float rounding = (float)(1e-6 * mean * (1e-6 * mean));  // about 8 units in the last place of float32 sums
            float constant = unexplained <= rounding ? 1.0f : 0.0f;
            float explained = variance <= rounding ? constant : 1 - unexplained / variance;
            *args.explained_variance = math::is_finite(variance) ? explained : math::from_bits(0x7fc00000u);
        }
    }
}

// Adds to `totals` the means over an iteration's minibatches up to the first that is skipped, the share of skipped
// ones, which is the last of `metric_sums`, explained variance and learning rate. `stopped` becomes 1 if one of the
// first `num_losses` is not finite or an environment had an invalid action.
KERNEL(learner_metrics) {
    FOR_ITEMS (k, args.num_metrics + 2) {
        i64 last = (i64)args.num_metrics - 1;
        float skipped = args.metric_sums[last], computed = (float)args.num_updates;
        if (skipped > 0 && k < last) computed -= skipped - 1;  // 1 if all were skipped: sums are 0 then
        float metric = k < args.num_metrics    ? args.metric_sums[k] / computed
                       : k == args.num_metrics ? *args.explained_variance
                                               : *args.learning_rate;
        args.totals[k] += metric;
        if ((k < args.num_losses && !math::is_finite(metric)) || *args.faults > 0) *args.stopped = 1;
    }
}

constexpr i32 NONFINITE_FAULT = 8;  // Fault.NONFINITE of vec_env.py
// Sums over environments beside those of the columns of `latest`; the same as OTHER_SUMS in iteration_kernels.py.
enum { ENDED, FIRST_EPISODES, INVALID, NONFINITE, OTHERS };

// Takes in the episodes that have ended in one environment since the last call: mean returns of each role's agents,
// lengths, terminations, and their number are the columns of `before` and `latest`. Returns their number. Where that in
// `latest` is -1, the first of them does not count: the sums of those that ended with it are left out.
template <class Arguments>
HD double take_in(const Arguments& args, i64 env) {
    int columns = args.roles + 3;
    double* before = args.before + env * columns;
    double* latest = args.latest + env * columns;
    double* returns = args.returns + env * args.returns_stride;
    i64* lengths = args.lengths + env * args.lengths_stride;
    i64* terminations = args.terminations + env * args.terminations_stride;
    i64* episodes = args.episodes + env * args.episodes_stride;
    double ended = (double)*episodes - before[columns - 1];
    bool skips = latest[columns - 1] < 0;
    for (int column = 0; column < columns; ++column) {
        double sum = 0;
        if (column < args.roles) {
            i64 begin = args.bounds[column], end = args.bounds[column + 1];
            for (i64 agent = begin; agent < end; ++agent) sum += returns[agent];
            sum /= (double)(end - begin);
        } else {
            sum = (double)*(column == args.roles ? lengths : column == args.roles + 1 ? terminations : episodes);
        }
        if (ended > 0) latest[column] = skips ? 0.0 : sum - before[column];
        before[column] = args.clears ? 0.0 : sum;
    }
    if (args.clears) {
        for (i64 agent = 0; agent < args.agents; ++agent) returns[agent] = 0;
        *lengths = *terminations = *episodes = 0;
    }
    return ended > 0 && skips ? ended - 1 : ended;
}

// `sums` are those of the columns of `latest` over all environments; then the number of episodes that ended since the
// last call; of environments without any, with a fault other than NONFINITE, and with that one; and of calls. With
// `clears` the statistics of episodes begin anew, and the number of episodes is added to what is there.
BLOCK_KERNEL(episode_metrics, TILE_BLOCK) {
    SHARED double others[OTHERS][TILE_BLOCK];
    SHARED double sums[TILE_BLOCK];
    i64 tiles = (args.num_envs + TILE_BLOCK - 1) / TILE_BLOCK;
    int columns = args.roles + 3, all = columns + OTHERS;
    FOR_BLOCKS (tile, tiles) {
        i64 first = tile * TILE_BLOCK;
        int envs = (int)(args.num_envs - first < TILE_BLOCK ? args.num_envs - first : TILE_BLOCK);
        FOR_THREADS (k, TILE_BLOCK) {
            i32 fault = k < envs ? args.fault[(first + k) * args.fault_stride] : 0;
            others[ENDED][k] = k < envs ? take_in(args, first + k) : 0.0;
            others[FIRST_EPISODES][k] = k < envs && args.latest[(first + k) * columns + columns - 1] <= 0;
            others[INVALID][k] = (fault & ~NONFINITE_FAULT) != 0;
            others[NONFINITE][k] = (fault & NONFINITE_FAULT) != 0;
        }
        for (int column = 0; column < all; ++column) {
            FOR_THREADS (k, TILE_BLOCK) {
                double latest = k < envs && column < columns ? args.latest[(first + k) * columns + column] : 0.0;
                sums[k] = column < columns ? latest : others[column - columns][k];
            }
            add_up<TILE_BLOCK>(sums);
            FOR_THREADS (k, 1) args.parts[tile * all + column] = sums[0];
            block_barrier();
        }
        if (!arrives_last(args.ticket, tiles)) continue;

        for (int column = 0; column < all; ++column) {
            const double* parts = args.parts + column;
            FOR_THREADS (k, TILE_BLOCK)
                sums[k] = sum_of_rows<double>(k, tiles, TILE_BLOCK, [=](i64 row) { return parts[row * all]; });
            add_up<TILE_BLOCK>(sums);
            FOR_THREADS (k, 1)
                args.sums[column] = (args.clears && column == columns + ENDED ? args.sums[column] : 0.0) + sums[0];
            block_barrier();
        }
        FOR_THREADS (k, 1) args.sums[all] += 1;
    }
}
