// SPDX-License-Identifier: Apache-2.0
// Kernels that are written for blocks of threads. On the host a worker takes the place of a block, and a loop that of
// its threads.
#pragma once
#include "kernel.cuh"

#if defined(__CUDACC__)

#define BLOCK_KERNEL(name, threads) KERNEL_WITH_LAUNCH_BOUNDS(name, threads)
#define SHARED __shared__
#define NUM_BLOCKS ((i32)gridDim.x)
// Every k in [0, n), distributed over the grid's blocks, and over the threads of a block.
#define FOR_BLOCKS(k, n) for (i64 k = blockIdx.x; k < (n); k += gridDim.x)
#define FOR_THREADS(k, n) for (i32 k = (i32)threadIdx.x; k < (n); k += (i32)blockDim.x)

HD void block_barrier() { __syncthreads(); }

// Whether this is the last of so many calls, each by a whole block. `ticket` counts them and is 0 again after the last.
// What was read before a call may be overwritten after the last one, which finds what was written before the others.
HD bool arrives_last(i32* ticket, i64 calls) {
    bool last = false;
    __syncthreads();  // all threads of the block have read and written
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1) == (i32)calls - 1;
        if (last) *ticket = 0;
        __threadfence();
    }
    return __syncthreads_or(last);
}

#else

#define BLOCK_KERNEL(name, threads) KERNEL(name)
#define SHARED
#define NUM_BLOCKS ((i32)workers_)
#define FOR_BLOCKS(k, n) FOR_ITEMS (k, n)
#define FOR_THREADS(k, n) for (i32 k = 0; k < (n); ++k)

HD void block_barrier() {}

HD bool arrives_last(i32* ticket, i64 calls) {
    bool last = __atomic_fetch_add(ticket, 1, __ATOMIC_ACQ_REL) == (i32)calls - 1;
    if (last) *ticket = 0;
    return last;
}

#endif

// Loads in flight.
constexpr int BATCH = 8;

// Adds up every width-th of sums[0], …, sums[N - 1], powers of two, in an order that depends on these alone. The totals
// are then in sums[0], …, sums[width - 1].
template <int N, class T>
HD void add_up(T* sums, int width = 1) {
    block_barrier();
    for (int half = N / 2; half >= width; half /= 2) {
        FOR_THREADS (k, half) sums[k] += sums[k + half];
        block_barrier();
    }
}

// Of active samples: their number, the sum of a quantity, and that of its squares. They give its mean and variance. In
// doubles, mean square minus squared mean is accurate for floats.
struct Moments {
    double count, sum, squares;

    HD void operator+=(const Moments& other) {
        count += other.count;
        sum += other.sum;
        squares += other.squares;
    }
};

// Sum of `own(row)` for the rows first, first + step and so on below `rows`, in this order.
template <class T, class F>
HD T sum_of_rows(i64 first, i64 rows, i64 step, F own) {
    T sum = {};
    for (i64 begin = first; begin < rows; begin += BATCH * step) {
        T batch[BATCH] = {};
        UNROLL for (int b = 0; b < BATCH; ++b) if (begin + b * step < rows) batch[b] = own(begin + b * step);
        UNROLL for (int b = 0; b < BATCH; ++b) sum += batch[b];  // never -0, so that adding 0 changes no bit
    }
    return sum;
}
