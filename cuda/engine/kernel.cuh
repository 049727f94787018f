// SPDX-License-Identifier: Apache-2.0
// Macros and types with which nvcc, NVRTC and host C++ compilers compile the same source.
#pragma once

typedef unsigned char u8;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#if defined(__CUDACC__)

#define HD __device__ __forceinline__
// A constant table.
#define TABLE __constant__ const
#define UNROLL _Pragma("unroll")
namespace host_simd {
HD bool needs_scalar_path(bool p) { return p; }
}  // namespace host_simd
// An entry point. Its body reads one struct, `args`, of type <name>_Arguments, which is generated from the kernel's
// signature (gpu_vecenv/declare/kernels.py), and loops over its items with FOR_ITEMS. Each field is a parameter of the
// CUDA kernel: the compiler takes parameters as equal in all threads and as unchanged by stores, but not the fields of
// a struct in parameter memory, and then unrolls and splits loops less. The symbol kernel_<name> cannot clash with the
// C library's names.
#define KERNEL(name) KERNEL_WITH_LAUNCH_BOUNDS(name, 256)
#if !defined(JOINED_LAUNCHES)
#define KERNEL_WITH_LAUNCH_BOUNDS(name, ...)                                                     \
    static HD void body_of_##name(name##_Arguments args);                                        \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) kernel_##name(name##_PARAMETERS) { \
        body_of_##name({name##_FIELDS});                                                         \
    }                                                                                            \
    static HD void body_of_##name(const name##_Arguments args)
#else
// Several launches in one, each a layer of the grid in z; an argument struct of each is in the parameters, which are
// constant memory. JOINED_LAUNCHES and PARAMETER_BYTES are those of gpu_vecenv/compile/joined_launches.py.
HD constexpr int joined_launches(int bytes) {
    return PARAMETER_BYTES / bytes < JOINED_LAUNCHES ? PARAMETER_BYTES / bytes : JOINED_LAUNCHES;
}
#define KERNEL_WITH_LAUNCH_BOUNDS(name, ...)                              \
    static HD void body_of_##name(name##_Arguments args);                 \
    struct name##_Launches {                                              \
        name##_Arguments of[joined_launches(sizeof(name##_Arguments))];   \
    };                                                                    \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__)             \
        kernel_##name(const __grid_constant__ name##_Launches launches) { \
        body_of_##name(launches.of[blockIdx.z]);                          \
    }                                                                     \
    static HD void body_of_##name(const name##_Arguments args)
#endif
// Every k in [0, n), distributed over the grid.
#define FOR_ITEMS(k, n) \
    for (i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x, n_##k = (n); k < n_##k; k += (i64)gridDim.x * blockDim.x)

#else

#if defined(__clang__)
#define HD inline __attribute__((always_inline))  // Clang's flatten (host_simd.cuh) inlines one level only
#else
#define HD inline
#endif
#define TABLE static const
#define UNROLL
namespace host_simd {
// Returns p, the condition of a rare branch that would keep a loop from being vectorised. In the SIMD loop of
// host_simd.cuh, which is a compile-time property after inlining, it returns false and records p in needs_scalar: the
// environment is then stepped again by the scalar path.
static thread_local bool in_simd_loop;
static thread_local u32 needs_scalar;
HD bool needs_scalar_path(bool p) {
    if (!__builtin_constant_p(in_simd_loop) || !in_simd_loop) return p;
    needs_scalar |= p;
    return false;
}
}  // namespace host_simd
// The host launcher calls the function once per worker thread, with the worker's index and their number. The body has
// its own copy of the arguments, which the compiler keeps in registers: no store can change it.
#define KERNEL(name)                                                                                          \
    static void body_of_##name(i64 worker_, i64 workers_, name##_Arguments args);                             \
    extern "C" __attribute__((visibility("default"))) void kernel_##name(i64 worker_, i64 workers_,           \
                                                                         const name##_Arguments* arguments) { \
        body_of_##name(worker_, workers_, *arguments);                                                        \
    }                                                                                                         \
    static void body_of_##name([[maybe_unused]] i64 worker_, [[maybe_unused]] i64 workers_,                   \
                               [[maybe_unused]] const name##_Arguments args)
#define FOR_ITEMS(k, n) \
    for (i64 k = (i64)(n) * worker_ / workers_, n_##k = (i64)(n) * (worker_ + 1) / workers_; k < n_##k; ++k)

#endif
