// SPDX-License-Identifier: Apache-2.0
// From partial sums of a gradient, or from a gradient, to a step of Adam, with one launch for each, and steps of RAdam.
// All sums have an order that depends on sizes alone.
#include "blocks.cuh"
#include "learning_rate.cuh"
#include "math.cuh"

#if defined(__CUDACC__)
// Exact: correctly rounded.
HD double root(double x) { return __dsqrt_rn(x); }

#else
HD double root(double x) { return __builtin_sqrt(x); }

#endif

constexpr int COLUMNS = 32;  // of a block: neighbouring lanes read neighbouring columns; as in optimizer.py
constexpr int GROUPS = 32;   // of rows
// A thread has several groups of its column: with fewer threads per block more blocks are on a multiprocessor, and the
// barriers of one are hidden by the loads of others.
constexpr int SUM_BLOCK = 256;  // threads; the same as SUM_BLOCK in optimizer.py
constexpr int THREAD_GROUPS = GROUPS * COLUMNS / SUM_BLOCK;
constexpr int STEPS = 4;  // rows of a group that a thread loads at a time

// The sum of each column: that of the first group of rows, plus those of the other groups in turn; 0 where the column
// is not `trainable`. With `out_indices` column k's sum is at out[out_indices[k]]. Also the sum of the squares of each
// block's results among the first `num_squared` columns. Nothing where `skip_update` is given and 1.
BLOCK_KERNEL(sum_parts, SUM_BLOCK) {
    if (args.skip_update && *args.skip_update == 1) return;
    SHARED float sums[GROUPS][COLUMNS];
    SHARED double squares[COLUMNS];
    FOR_BLOCKS (block, (args.columns + COLUMNS - 1) / COLUMNS) {
        i64 first = block * COLUMNS;
        int columns = (int)(args.columns - first < COLUMNS ? args.columns - first : COLUMNS);
        FOR_THREADS (k, SUM_BLOCK) {
            int column = k % COLUMNS;
            if (column >= columns) continue;
            const float* own = args.parts + first + column;
            float sum[THREAD_GROUPS] = {};
            for (i64 begin = k / COLUMNS; begin < args.rows; begin += STEPS * GROUPS) {
                float batch[STEPS * THREAD_GROUPS] = {};  // loads in flight
                UNROLL for (int b = 0; b < STEPS * THREAD_GROUPS; ++b) {
                    i64 row = begin + b * (GROUPS / THREAD_GROUPS);
                    if (row < args.rows) batch[b] = own[row * args.columns];
                }
                // Never -0, so that adding 0 changes no bit.
                UNROLL for (int b = 0; b < STEPS * THREAD_GROUPS; ++b) sum[b % THREAD_GROUPS] += batch[b];
            }
            UNROLL for (int j = 0; j < THREAD_GROUPS; ++j) sums[k / COLUMNS + j * (GROUPS / THREAD_GROUPS)][column] =
                sum[j];
        }
        block_barrier();
        FOR_THREADS (column, COLUMNS) {
            float sum = 0;
            if (column < columns && args.trainable[first + column]) {
                sum = sums[0][column];
                for (int group = 1; group < GROUPS; ++group) sum += sums[group][column];
            }
            if (column < columns) args.out[args.out_indices ? args.out_indices[first + column] : first + column] = sum;
            squares[column] = first + column < args.num_squared ? (double)sum * (double)sum : 0.0;
        }
        add_up<COLUMNS>(squares);
        FOR_THREADS (k, 1) args.squares[block] = squares[0];
        block_barrier();  // `sums` and `squares` are in use until here
    }
}

// Sums of a gradient's squares: of `part` elements each, which a block adds up. Elements that are not `trainable`
// become 0 first. Nothing where `skip_update` is 1.
BLOCK_KERNEL(sum_squares, SUM_BLOCK) {
    if (*args.skip_update == 1) return;
    SHARED double sums[SUM_BLOCK];
    FOR_BLOCKS (block, args.num_squares) {
        i64 first = block * args.part, end = first + args.part < args.size ? first + args.part : args.size;
        FOR_THREADS (k, SUM_BLOCK) {
            double sum = 0;
            for (i64 begin = first + k; begin < end; begin += BATCH * SUM_BLOCK) {
                float batch[BATCH] = {};
                bool trainable[BATCH] = {};
                UNROLL for (int b = 0; b < BATCH; ++b) {
                    i64 at = begin + b * SUM_BLOCK;
                    if (at < end) batch[b] = args.gradient[at];
                    if (at < end) trainable[b] = args.trainable[at];
                }
                UNROLL for (int b = 0; b < BATCH; ++b) {
                    i64 at = begin + b * SUM_BLOCK;
                    if (trainable[b]) sum += (double)batch[b] * (double)batch[b];
                    if (at < end && !trainable[b]) args.gradient[at] = 0;
                }
            }
            sums[k] = sum;
        }
        add_up<SUM_BLOCK>(sums);
        FOR_THREADS (k, 1) args.squares[block] = sums[0];
        block_barrier();  // `sums` is in use until here
    }
}

constexpr int ADAM_BLOCK = 256;  // a power of two; the same as ADAM_BLOCK in optimizer.py

// base^exponent by squaring. Each product rounds once: with exponents below 2^24 the error is below 2^-27 of the
// result, less than a float's rounding.
HD double power(double base, u32 exponent) {
    double result = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

// One step of Adam with the gradient scaled down to max_grad_norm, as torch.optim.Adam(fused=True) takes it.
// Products of the decay rates, and the sum with eps, are computed in double and rounded to float: 1 - 0.999f is not
// 0.001.
//
// `skip_update` becomes 1 if a metric or the norm is not finite or approx_kl exceeds target_kl; where it is 1, neither
// parameters nor Adam's state change, nor the learning rate, which otherwise follows approx_kl first. Adds
// `skip_update` to `metric_sums`, and metrics and norm unless it was 1 before: then they are of no minibatch.
//
// Each block computes the norm and all decisions itself, from the same numbers in the same order: `squares` are partial
// sums of the gradient's squares. What others may still read is written by the block that arrives last.
struct AdamStep {
    float step;  // its number, from 1 on
    float norm, scale, rate, skip_update;
    float step_size, root_of_correction;  // learning rate and root of the second moment, corrected for the bias
    bool computed, skips;                 // whether metrics and gradient are of a minibatch; whether nothing changes

    // `sums` [ADAM_BLOCK] and `corrections` [2] are shared.
    template <class Arguments>
    HD AdamStep(const Arguments& args, float number, double* sums, double* corrections) : step(number) {
        FOR_THREADS (k, 2) corrections[k] = 1 - power(k == 0 ? args.beta1 : args.beta2, (u32)math::to_int(step));
        const double* squares = args.squares;
        skip_update = *args.skip_update;
        computed = skip_update != 1;
        FOR_THREADS (k, ADAM_BLOCK)
            sums[k] = sum_of_rows<double>(k, computed ? args.num_squares : 0, ADAM_BLOCK,
                                          [=](i64 row) { return squares[row]; });
        add_up<ADAM_BLOCK>(sums);
        norm = (float)root(sums[0]);
        scale = args.max_grad_norm / (norm + 1e-6f);
        if (scale > 1) scale = 1;
        bool finite = math::is_finite(norm);
        for (int k = 0; k < args.num_metrics; ++k) finite = finite && math::is_finite(args.metrics[k]);
        if (!finite || args.metrics[args.kl_index] > args.target_kl) skip_update = 1;
        skips = skip_update == 1;

        rate = *args.learning_rate;
        if (!skips)
            rate = adapted_rate(rate, args.metrics[args.kl_index], args.desired_kl, args.least_rate, args.most_rate);
        step_size = (float)((double)rate / (double)(float)corrections[0]);
        root_of_correction = (float)root(corrections[1]);
    }

    // Of one element of the gradient.
    template <class Arguments>
    HD void update(const Arguments& args, float element, float& value, float& exp_avg, float& exp_avg_sq) const {
        float gradient = element * scale;
        float m = (float)(args.beta1 * exp_avg + (1 - args.beta1) * gradient);
        float v = (float)(args.beta2 * exp_avg_sq + (1 - args.beta2) * gradient * gradient);
        float denominator = (float)(math::sqrt(v) / root_of_correction + args.eps);
        value -= step_size * m / denominator;
        exp_avg = m;
        exp_avg_sq = v;
    }

    // By the block that arrives last.
    template <class Arguments>
    HD void record(const Arguments& args) const {
        FOR_THREADS (k, args.num_metrics + 2) {
            bool is_metric = k < args.num_metrics;
            if (computed || k > args.num_metrics)
                args.metric_sums[k] += is_metric ? args.metrics[k] : k == args.num_metrics ? norm : skip_update;
        }
        FOR_THREADS (k, 1) {
            *args.skip_update = skip_update;
            *args.learning_rate = rate;
        }
    }
};

// Of parameters that are consecutive parts of one tensor, like the state.
BLOCK_KERNEL(adam_step, ADAM_BLOCK) {
    SHARED double sums[ADAM_BLOCK];
    SHARED double corrections[2];
    AdamStep own(args, *args.steps + 1, sums, corrections);
    FOR_ITEMS (k, own.skips ? 0 : args.size)
        own.update(args, args.gradient[k], args.parameters[k], args.exp_avg[k], args.exp_avg_sq[k]);

    if (!arrives_last(args.ticket, NUM_BLOCKS)) return;
    own.record(args);
    FOR_THREADS (k, own.skips ? 0 : args.num_steps) args.steps[k] = own.step;
}

// Of parameters wherever they are: of each, `addresses` are those of its values, of both moments and of its number of
// steps, which is that of all. Each of `segments` are up to ADAM_BLOCK elements of one parameter: its number, the first
// element in it and in `gradient`, and how many.
BLOCK_KERNEL(adam_step_by_addresses, ADAM_BLOCK) {
    SHARED double sums[ADAM_BLOCK];
    SHARED double corrections[2];
    AdamStep own(args, *(const float*)args.addresses[3] + 1, sums, corrections);
    FOR_BLOCKS (block, own.skips ? 0 : args.num_segments) {
        const i64* segment = args.segments + 4 * block;
        const u64* addresses = args.addresses + 4 * segment[0];
        float *values = (float*)addresses[0] + segment[1], *exp_avg = (float*)addresses[1] + segment[1];
        float* exp_avg_sq = (float*)addresses[2] + segment[1];
        const float* gradient = args.gradient + segment[2];
        FOR_THREADS (k, (i32)segment[3]) own.update(args, gradient[k], values[k], exp_avg[k], exp_avg_sq[k]);
    }

    if (!arrives_last(args.ticket, NUM_BLOCKS)) return;
    own.record(args);
    FOR_THREADS (k, own.skips ? 0 : (i32)args.num_parameters) *(float*)args.addresses[4 * k + 3] = own.step;
}

// What of torch.optim.RAdam's step is the same for all elements of a parameter: whether it is taken, and `rates`: of
// m / (sqrt(v) + eps), and of m alone in the first steps, whose second moments vary too much. Counts the steps taken.
KERNEL(radam_rates) {
    FOR_ITEMS (k, args.num_parameters) {
        bool takes = args.trainable[k] && *args.skip_update == 0;
        args.takes[k] = takes;
        if (!takes) continue;
        float* count = (float*)args.addresses[4 * k + 3];
        float step = *count + 1;
        *count = step;
        u32 exponent = (u32)math::to_int(step);
        double left = power(args.beta2, exponent), correction = 1 - left;
        double most = 2 / (1 - args.beta2) - 1, length = most - 2 * step * left / correction;
        double rate = *args.learning_rate / (1 - power(args.beta1, exponent));
        bool rectifies = length > 5;
        double variance = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length);
        args.rates[2 * k] = rectifies ? (float)(rate * root(variance * correction)) : 0.0f;
        args.rates[2 * k + 1] = rectifies ? 0.0f : (float)rate;
    }
}

// After radam_rates. Of each parameter `addresses` are those of its values, of both moments and of its number of steps,
// and `firsts` its first element in `gradient`; `owners` are the parameters of that tensor's elements.
KERNEL(radam_step) {
    FOR_ITEMS (k, args.size) {
        i64 owner = args.owners[k], at = k - args.firsts[owner];
        if (!args.takes[owner]) continue;
        const u64* addresses = args.addresses + 4 * owner;
        float *value = (float*)addresses[0] + at, *exp_avg = (float*)addresses[1] + at;
        float* exp_avg_sq = (float*)addresses[2] + at;
        float gradient = args.gradient[k];
        float m = (float)(args.beta1 * *exp_avg + (1 - args.beta1) * gradient);
        float v = (float)(args.beta2 * *exp_avg_sq + (1 - args.beta2) * gradient * gradient);
        float denominator = (float)(math::sqrt(v) + args.eps);
        *value -= m * (args.rates[2 * owner] / denominator + args.rates[2 * owner + 1]);
        *exp_avg = m;
        *exp_avg_sq = v;
    }
}
