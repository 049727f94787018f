// SPDX-License-Identifier: Apache-2.0
// From partial sums of a gradient to a step of Adam, with one launch for each.
//
// Both kernels are written for blocks of threads. On the host a worker takes the place of a block, and a loop that of
// its threads. All sums have an order that depends on sizes alone.
#include "kernel.cuh"
#include "math.cuh"

#if defined(__CUDACC__)

#define BLOCK_KERNEL(name, threads) KERNEL_WITH_LAUNCH_BOUNDS(name, threads)
#define SHARED __shared__
#define NUM_BLOCKS ((i32)gridDim.x)
// Every k in [0, n), distributed over the grid's blocks, and over the threads of a block.
#define FOR_BLOCKS(k, n) for (i64 k = blockIdx.x; k < (n); k += gridDim.x)
#define FOR_THREADS(k, n) for (i32 k = (i32)threadIdx.x; k < (n); k += (i32)blockDim.x)

HD void block_barrier() { __syncthreads(); }

// Whether this block is the last to call. `ticket` counts the calls and is 0 again after the last. What a block has
// read before its call may be overwritten after the last one.
HD bool arrives_last(i32* ticket, i32 blocks) {
    bool last = false;
    __syncthreads();  // all threads of the block have read
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1) == blocks - 1;
        if (last) *ticket = 0;
    }
    return __syncthreads_or(last);
}

// Exact: correctly rounded.
HD double root(double x) { return __dsqrt_rn(x); }

#else

#define BLOCK_KERNEL(name, threads) KERNEL(name)
#define SHARED
#define NUM_BLOCKS ((i32)workers_)
#define FOR_BLOCKS(k, n) FOR_ITEMS (k, n)
#define FOR_THREADS(k, n) for (i32 k = 0; k < (n); ++k)

HD void block_barrier() {}

HD bool arrives_last(i32* ticket, i32 blocks) {
    bool last = __atomic_fetch_add(ticket, 1, __ATOMIC_ACQ_REL) == blocks - 1;
    if (last) *ticket = 0;
    return last;
}

HD double root(double x) { return __builtin_sqrt(x); }

#endif

// Loads in flight.
constexpr int BATCH = 8;

constexpr int COLUMNS = 32;  // of a block: neighbouring lanes read neighbouring columns
constexpr int GROUPS = 8;    // of rows; the same as SUM_GROUPS in optimizer.py
constexpr int SUM_BLOCK = COLUMNS * GROUPS;

// Sum of the rows group, group + GROUPS and so on of one column, in this order.
HD float sum_of_group(const float* column, i64 rows, i64 stride, int group) {
    float sum = 0;
    for (i64 first = group; first < rows; first += BATCH * GROUPS) {
        float batch[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            i64 row = first + b * GROUPS;
            batch[b] = row < rows ? column[row * stride] : 0.0f;
        }
        UNROLL for (int b = 0; b < BATCH; ++b) sum += batch[b];  // never -0, so that adding 0 changes no bit
    }
    return sum;
}

// The sum of each column: that of the first group of rows, plus those of the other groups in turn.
BLOCK_KERNEL(sum_parts, SUM_BLOCK) {
    SHARED float sums[GROUPS][COLUMNS];
    FOR_BLOCKS (block, (args.columns + COLUMNS - 1) / COLUMNS) {
        i64 first = block * COLUMNS;
        int columns = (int)(args.columns - first < COLUMNS ? args.columns - first : COLUMNS);
        FOR_THREADS (k, SUM_BLOCK) {
            int group = k / COLUMNS, column = k % COLUMNS;
            if (column >= columns) continue;
            sums[group][column] = sum_of_group(args.parts + first + column, args.rows, args.columns, group);
        }
        block_barrier();
        FOR_THREADS (column, columns) {
            float sum = sums[0][column];
            for (int group = 1; group < GROUPS; ++group) sum += sums[group][column];
            args.out[first + column] = sum;
        }
        block_barrier();  // `sums` is in use until here
    }
}

constexpr int ADAM_BLOCK = 1024;  // a power of two; the same as ADAM_BLOCK in optimizer.py

// Sum of the squares of the elements `thread`, thread + ADAM_BLOCK and so on, in this order.
HD double sum_of_squares(const float* x, i64 n, int thread) {
    double sum = 0;
    for (i64 first = thread; first < n; first += BATCH * ADAM_BLOCK) {
        float batch[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            i64 k = first + b * ADAM_BLOCK;
            batch[b] = k < n ? x[k] : 0.0f;
        }
        UNROLL for (int b = 0; b < BATCH; ++b) sum += (double)batch[b] * (double)batch[b];
    }
    return sum;
}

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
// parameters nor Adam's state change. Adds metrics, norm and `skip_update` to `metric_sums`.
//
// Each block computes the norm and all decisions itself, from the same numbers in the same order. What others may still
// read is written by the block that arrives last.
BLOCK_KERNEL(adam_step, ADAM_BLOCK) {
    SHARED double sums[ADAM_BLOCK];
    SHARED float step_size, root_of_correction;  // learning rate and second moment, corrected for the bias
    float step = *args.steps + 1;
    FOR_THREADS (k, 1) {
        u32 exponent = (u32)math::to_int(step);
        step_size = (float)((double)*args.learning_rate / (double)(float)(1 - power(args.beta1, exponent)));
        root_of_correction = (float)root(1 - power(args.beta2, exponent));
    }
    FOR_THREADS (k, ADAM_BLOCK) sums[k] = sum_of_squares(args.gradient, args.size, k);
    block_barrier();
    for (int half = ADAM_BLOCK / 2; half > 0; half /= 2) {
        FOR_THREADS (k, half) sums[k] += sums[k + half];
        block_barrier();
    }
    float norm = (float)root(sums[0]), scale = args.max_grad_norm / (norm + 1e-6f);
    if (scale > 1) scale = 1;
    bool finite = math::is_finite(norm);
    for (int k = 0; k < args.num_metrics; ++k) finite = finite && math::is_finite(args.metrics[k]);
    float skip_update = *args.skip_update;
    if (!finite || args.metrics[args.kl_index] > args.target_kl) skip_update = 1;
    bool skips = skip_update == 1;

    FOR_ITEMS (k, skips ? 0 : args.size) {
        float gradient = args.gradient[k] * scale;
        float m = (float)(args.beta1 * args.exp_avg[k] + (1 - args.beta1) * gradient);
        float v = (float)(args.beta2 * args.exp_avg_sq[k] + (1 - args.beta2) * gradient * gradient);
        float denominator = (float)(math::sqrt(v) / root_of_correction + args.eps);
        args.parameters[k] -= step_size * m / denominator;
        args.exp_avg[k] = m;
        args.exp_avg_sq[k] = v;
    }

    if (!arrives_last(args.ticket, NUM_BLOCKS)) return;
    FOR_THREADS (k, args.num_metrics + 2) {
        bool is_metric = k < args.num_metrics;
        args.metric_sums[k] += is_metric ? args.metrics[k] : k == args.num_metrics ? norm : skip_update;
    }
    FOR_THREADS (k, skips ? 0 : args.num_steps) args.steps[k] = step;
    FOR_THREADS (k, 1) *args.skip_update = skip_update;
}
