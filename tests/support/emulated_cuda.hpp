// CUDA's built-ins for a host C++ compiler: the threads of a block take turns on one host thread. A thread runs until
// it waits at a barrier; if all remaining threads wait in vain, the program ends with a message. Dynamic shared memory
// is filled with a pattern when a block begins, and the part beyond the requested size must keep it. $EMULATED_THREADS
// gives the order in which threads run.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define __global__ __attribute__((visibility("default")))
#define __constant__ static
#define __shared__ static __attribute__((section(".nv.shared")))  // as on a GPU
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static struct {
    unsigned x;
} threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static unsigned char shared_memory[232448];

namespace emulation {
constexpr int MOST = 1024, STACK = 128 << 10;
constexpr unsigned long long BLOCK = ~0ull;
static struct Lane {
    ucontext_t context;
    unsigned long long waits_for;  // key of the threads at the same barrier
    bool waits, done;
} all_lanes[MOST];
static ucontext_t lane_scheduler;
static long long lane_value[MOST];
static unsigned char* lane_stacks;
static void (*kernel_body)(const void*);
static const void* kernel_arguments;

inline unsigned long long key_of(unsigned mask) { return (unsigned long long)(threadIdx.x / 32) << 32 | mask; }
inline bool is_member(unsigned k, unsigned long long key) {
    return key == BLOCK ? k < blockDim.x : k / 32 == key >> 32 && key >> k % 32 & 1;
}
inline void wait(unsigned long long key) {
    Lane& own = all_lanes[threadIdx.x];
    own.waits_for = key;
    own.waits = true;
    bool here = true;
    for (unsigned k = 0; k < blockDim.x; ++k)
        if (is_member(k, key)) here &= all_lanes[k].waits && all_lanes[k].waits_for == key;
    if (here) {
        for (unsigned k = 0; k < blockDim.x; ++k)
            if (is_member(k, key)) all_lanes[k].waits = false;
    } else {
        swapcontext(&own.context, &lane_scheduler);
    }
}
inline bool any(unsigned long long key, bool p) {
    lane_value[threadIdx.x] = p;
    wait(key);
    bool found = false;
    for (unsigned k = 0; k < blockDim.x; ++k) found |= is_member(k, key) && lane_value[k];
    wait(key);
    return found;
}
inline void begin() {
    kernel_body(kernel_arguments);
    all_lanes[threadIdx.x].done = true;
    swapcontext(&all_lanes[threadIdx.x].context, &lane_scheduler);
}
inline void run_block(bool backwards) {
    for (unsigned k = 0; k < blockDim.x; ++k) {
        all_lanes[k].waits = all_lanes[k].done = false;
        getcontext(&all_lanes[k].context);
        all_lanes[k].context.uc_stack.ss_sp = lane_stacks + (size_t)k * STACK;
        all_lanes[k].context.uc_stack.ss_size = STACK;
        makecontext(&all_lanes[k].context, begin, 0);
    }
    for (unsigned left = blockDim.x; left > 0;) {
        bool moved = false;
        for (unsigned turn = 0; turn < blockDim.x; ++turn) {
            unsigned k = backwards ? blockDim.x - 1 - turn : turn;
            if (all_lanes[k].waits || all_lanes[k].done) continue;
            moved = true;
            threadIdx.x = k;
            swapcontext(&lane_scheduler, &all_lanes[k].context);
            left -= all_lanes[k].done;
        }
        if (!moved) {
            fprintf(stderr, "block %u: %u threads wait for others that have ended or wait elsewhere\n", blockIdx.x,
                    left);
            abort();
        }
    }
}
extern "C" __attribute__((visibility("default"))) void launch(void (*kernel)(const void*), unsigned grid,
                                                              unsigned block, size_t shared_bytes, const void* values) {
    if (!lane_stacks) lane_stacks = (unsigned char*)malloc((size_t)MOST * STACK);
    const char* order = getenv("EMULATED_THREADS");
    bool backwards = order && !strcmp(order, "backwards");
    kernel_body = kernel;
    kernel_arguments = values;
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned k = 0; k < grid; ++k) {
        blockIdx.x = backwards ? grid - 1 - k : k;
        memset(shared_memory, 0xCD, sizeof shared_memory);
        run_block(backwards);
        for (size_t at = shared_bytes; at < sizeof shared_memory; ++at)
            if (shared_memory[at] != 0xCD) {
                fprintf(stderr, "block %u writes shared memory beyond its %zu bytes\n", k, shared_bytes);
                abort();
            }
    }
}
}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::BLOCK); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::wait(emulation::key_of(mask)); }
inline int __syncthreads_or(int p) { return emulation::any(emulation::BLOCK, p); }
// Threads that take turns are never converged.
inline unsigned __activemask() { return 1u << threadIdx.x % 32; }
inline unsigned __ballot_sync(unsigned mask, int p) {
    emulation::lane_value[threadIdx.x] = p;
    emulation::wait(emulation::key_of(mask));
    unsigned found = 0;
    for (unsigned k = 0; k < 32; ++k) found |= (mask >> k & 1 && emulation::lane_value[threadIdx.x / 32 * 32 + k]) << k;
    emulation::wait(emulation::key_of(mask));
    return found;
}
inline int __any_sync(unsigned mask, int p) { return emulation::any(emulation::key_of(mask), p); }
inline int __shfl_xor_sync(unsigned mask, int x, int step) {
    emulation::lane_value[threadIdx.x] = x;
    emulation::wait(emulation::key_of(mask));
    int other = (int)emulation::lane_value[threadIdx.x ^ step];
    emulation::wait(emulation::key_of(mask));
    return other;
}
inline int atomicAdd(int* place, int n) {
    *place += n;
    return *place - n;
}
inline unsigned long long atomicCAS(unsigned long long* place, unsigned long long expected, unsigned long long value) {
    unsigned long long old = *place;
    if (old == expected) *place = value;
    return old;
}
inline unsigned __float_as_uint(float x) {
    unsigned b;
    memcpy(&b, &x, sizeof b);
    return b;
}
inline float __uint_as_float(unsigned b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
