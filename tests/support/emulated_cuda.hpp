// CUDA's built-ins for a host C++ compiler: the threads of a block take turns on one host thread. A thread runs until
// it waits at a barrier; if all remaining threads wait in vain, the program ends with a message. Dynamic shared memory
// is filled with a pattern when a block begins, and the part beyond the requested size must keep it. $EMULATED_THREADS
// gives the order in which threads run.
#pragma once
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>

#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define __global__ __attribute__((visibility("default")))
#define __constant__ static
#define __shared__ static __attribute__((section(".nv.shared")))  // as on a GPU
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define VECTOR2(type, name)                 \
    struct alignas(2 * sizeof(type)) name { \
        type x, y;                          \
    };                                      \
    inline name make_##name(type x, type y) { return {x, y}; }
#define VECTOR4(type, name)                 \
    struct alignas(4 * sizeof(type)) name { \
        type x, y, z, w;                    \
    };                                      \
    inline name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTOR2(int, int2)
VECTOR2(unsigned, uint2)
VECTOR2(float, float2)
VECTOR4(int, int4)
VECTOR4(unsigned, uint4)
VECTOR4(float, float4)
#undef VECTOR2
#undef VECTOR4
static struct {
    unsigned x, y, z;
} threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static unsigned char shared_memory[232448];

namespace emulation {
constexpr int MOST = 1024, STACK = 128 << 10, EXCHANGED_WORDS = 8;
constexpr unsigned long long BLOCK = ~0ull;
static struct Lane {
    ucontext_t context;  // of its begin; afterwards it continues at `position`, which takes no system call
    jmp_buf position;
    unsigned long long waits_for;  // key of the threads at the same barrier
    bool begun, waits, done;
} all_lanes[MOST];
static jmp_buf scheduler_position;
static unsigned exchanged[MOST][EXCHANGED_WORDS];  // what each thread's last exchange shows to the others
static unsigned char* lane_stacks;
static unsigned blocks_run;
static void (*kernel_body)(const void*);
static const void* kernel_arguments;

inline void require(bool holds, const char* rule) {
    if (holds) return;
    fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, rule);
    abort();
}
// A barrier with a number waits for so many threads; what they exchange is that of neighbours.
constexpr unsigned long long NUMBERED = 1ull << 63;
inline unsigned long long key_of_barrier(unsigned barrier, unsigned threads) {
    require(barrier > 0 && barrier < 16 && threads % 32 == 0, "a barrier of whole warps has a number from 1 to 15");
    return NUMBERED | (unsigned long long)barrier << 32 | threads;
}
inline unsigned long long key_of(unsigned mask) { return (unsigned long long)(threadIdx.x / 32) << 32 | mask; }
// Calls f with each thread of the block that takes part in a barrier, while f returns true.
template <class F>
inline void for_members(unsigned long long key, F f) {
    bool all = key == BLOCK || key & NUMBERED;
    unsigned threads = key == BLOCK ? blockDim.x : key & NUMBERED ? (unsigned)key : 32;
    unsigned first = key & NUMBERED ? threadIdx.x / threads * threads : (unsigned)(key >> 32) * 32;
    unsigned end = first + threads;
    if (end > blockDim.x) end = blockDim.x;
    for (unsigned k = first; k < end; ++k)
        if ((all || key >> k % 32 & 1) && !f(k)) return;
}
__attribute__((noinline)) static void suspend() {
    if (!_setjmp(all_lanes[threadIdx.x].position)) _longjmp(scheduler_position, 1);
}
__attribute__((noinline)) static void resume(Lane& lane) {
    if (_setjmp(scheduler_position)) return;
    if (lane.begun) _longjmp(lane.position, 1);
    lane.begun = true;
    setcontext(&lane.context);
}
inline void wait(unsigned long long key) {
    Lane& own = all_lanes[threadIdx.x];
    own.waits_for = key;
    own.waits = true;
    auto is_here = [&](unsigned k) { return all_lanes[k].waits && all_lanes[k].waits_for == key; };
    bool here = true;
    if (key != BLOCK && key & NUMBERED) {
        unsigned arrived = 0;
        for (unsigned k = 0; k < blockDim.x; ++k) arrived += is_here(k);
        if (arrived == (unsigned)key) {
            for (unsigned k = 0; k < blockDim.x; ++k)
                if (is_here(k)) all_lanes[k].waits = false;
            return;
        }
        return suspend();
    }
    for_members(key, [&](unsigned k) { return here = is_here(k); });
    if (here) {
        for_members(key, [](unsigned k) { return all_lanes[k].waits = false, true; });
    } else {
        suspend();
    }
}
template <class T>
inline T exchanged_by(unsigned thread) {
    T value;
    memcpy(&value, exchanged[thread], sizeof value);
    return value;
}
// Shows a value to the other threads of a barrier, and returns what f computes while all values are shown.
template <class T, class F>
inline auto exchange(unsigned long long key, const T& own, F f) {
    static_assert(sizeof own <= sizeof exchanged[0]);
    memcpy(exchanged[threadIdx.x], &own, sizeof own);
    wait(key);
    auto result = f();
    wait(key);
    return result;
}
inline bool any(unsigned long long key, bool p) {
    return exchange(key, p, [&] {
        bool found = false;
        for_members(key, [&](unsigned k) { return !(found = exchanged_by<bool>(k)); });
        return found;
    });
}
inline void begin() {
    kernel_body(kernel_arguments);
    all_lanes[threadIdx.x].done = true;
    suspend();
}
inline void run_block(bool backwards) {
    ++blocks_run;
    for (unsigned k = 0; k < blockDim.x; ++k) {
        all_lanes[k].begun = all_lanes[k].waits = all_lanes[k].done = false;
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
            resume(all_lanes[k]);
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
                                                              unsigned launches, unsigned block, size_t shared_bytes,
                                                              const void* values) {
    // Kept until the process ends, which may load hundreds of these libraries. Without MAP_NORESERVE the system counts
    // their stacks as memory in use and then refuses to fork.
    if (!lane_stacks)
        lane_stacks = (unsigned char*)mmap(nullptr, (size_t)MOST * STACK, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (lane_stacks == MAP_FAILED) {
        perror("the stacks of emulated threads");
        abort();
    }
    const char* order = getenv("EMULATED_THREADS");
    bool backwards = order && !strcmp(order, "backwards");
    kernel_body = kernel;
    kernel_arguments = values;
    gridDim.x = grid;
    gridDim.z = launches;
    blockDim.x = block;
    for (unsigned k = 0; k < grid * launches; ++k) {
        unsigned block_index = backwards ? grid * launches - 1 - k : k;
        blockIdx.x = block_index % grid;
        blockIdx.z = block_index / grid;
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
    return emulation::exchange(emulation::key_of(mask), p != 0, [&] {
        unsigned found = 0;
        emulation::for_members(emulation::key_of(mask), [&](unsigned k) {
            found |= (unsigned)emulation::exchanged_by<bool>(k) << k % 32;
            return true;
        });
        return found;
    });
}
inline int __any_sync(unsigned mask, int p) { return emulation::any(emulation::key_of(mask), p); }
namespace emulation {
// Of lane `from` of the segment of `width` lanes; of the thread itself where the segment has no such lane.
template <class T>
inline T shuffle(unsigned mask, T x, int from, int width) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    int lane = (int)(threadIdx.x % 32), first = lane / width * width;
    int source = from >= 0 && from < width ? first + from : lane;
    require(mask >> source & 1, "a shuffle reads a lane that its mask lacks");
    return exchange(key_of(mask), x, [&] { return exchanged_by<T>(threadIdx.x / 32 * 32 + source); });
}
}  // namespace emulation
template <class T>
inline T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
    return emulation::shuffle(mask, x, from & (width - 1), width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int step, int width = 32) {
    return emulation::shuffle(mask, x, (int)(threadIdx.x % width) ^ step, width);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned step, int width = 32) {
    return emulation::shuffle(mask, x, (int)(threadIdx.x % width + step), width);
}
inline void __threadfence() {}
template <class T>
inline T __ldg(const T* place) {
    return *place;
}
inline int atomicAdd(int* place, int n) {
    *place += n;
    return *place - n;
}
inline unsigned atomicAdd(unsigned* place, unsigned n) {
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
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __logf(float x) { return __builtin_logf(x); }
// Static shared memory lies elsewhere in the library, so that its offset may be negative.
inline size_t __cvta_generic_to_shared(const void* p) {
    long long offset = (const unsigned char*)p - shared_memory;
    emulation::require(offset == (int)offset, "__cvta_generic_to_shared of an address outside of shared memory");
    return (unsigned)offset;
}
