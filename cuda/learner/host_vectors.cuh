// SPDX-License-Identifier: Apache-2.0
// Products of matrices on a CPU, by its vector instructions.
//
// Each element of a product is a sum in the order of k, so that its bits do not depend on the width of the vectors.
// They do depend on whether the processor has fused multiply-adds.
#pragma once
#include "kernel.cuh"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace host_vectors {

#if defined(__AVX512F__)
typedef __m512 Vector;
constexpr int LANES = 16, ROWS_AT_ONCE = 8;
HD Vector load(const float* x) { return _mm512_loadu_ps(x); }
HD void store(float* x, Vector y) { _mm512_storeu_ps(x, y); }
HD Vector all(float x) { return _mm512_set1_ps(x); }
HD Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
HD Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 Vector;
constexpr int LANES = 8, ROWS_AT_ONCE = 4;
HD Vector load(const float* x) { return _mm256_loadu_ps(x); }
HD void store(float* x, Vector y) { _mm256_storeu_ps(x, y); }
HD Vector all(float x) { return _mm256_set1_ps(x); }
HD Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
HD Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__ARM_NEON)
typedef float32x4_t Vector;
constexpr int LANES = 4, ROWS_AT_ONCE = 8;
HD Vector load(const float* x) { return vld1q_f32(x); }
HD void store(float* x, Vector y) { vst1q_f32(x, y); }
HD Vector all(float x) { return vdupq_n_f32(x); }
HD Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
HD Vector multiply_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
#else
typedef float Vector;
constexpr int LANES = 1, ROWS_AT_ONCE = 4;
HD Vector load(const float* x) { return *x; }
HD void store(float* x, Vector y) { *x = y; }
HD Vector all(float x) { return x; }
HD Vector add(Vector a, Vector b) { return a + b; }
HD Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif

constexpr int PAD = 16;  // of rows and columns; a multiple of LANES and of ROWS_AT_ONCE
HD constexpr int padded(int size) { return (size + PAD - 1) / PAD * PAD; }

// A factor whose elements (row, k) are `row_step` and `step` apart.
struct Factor {
    const float* x;
    int row_step, step;
};

// Adds products to ROWS_AT_ONCE rows of c, and to VECTORS vectors of each.
template <int VECTORS, int N>
HD void add_block(Factor a, const float* b, float* c, int depth) {
    Vector sums[ROWS_AT_ONCE][VECTORS];
    _Pragma("GCC unroll 8") for (int m = 0; m < ROWS_AT_ONCE; ++m) {
        _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) sums[m][v] = all(0);
    }
    for (int k = 0; k < depth; ++k, a.x += a.step, b += N) {
        Vector row[VECTORS];
        _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) row[v] = load(b + v * LANES);
        _Pragma("GCC unroll 8") for (int m = 0; m < ROWS_AT_ONCE; ++m) {
            Vector x = all(a.x[m * a.row_step]);
            _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) sums[m][v] = multiply_add(x, row[v], sums[m][v]);
        }
    }
    _Pragma("GCC unroll 8") for (int m = 0; m < ROWS_AT_ONCE; ++m) {
        _Pragma("GCC unroll 2") for (int v = 0; v < VECTORS; ++v) {
            float* at = c + m * N + v * LANES;
            store(at, add(load(at), sums[m][v]));
        }
    }
}

// c[row][n] += the sum over k < depth of a(row, k) * b[k][n], for so many rows, a multiple of PAD, of N columns.
template <int N>
HD void add_product(Factor a, const float* b, float* c, int rows, int depth) {
    static_assert(N % PAD == 0, "whole vectors");
    constexpr int VECTORS = N % (2 * LANES) == 0 ? 2 : 1;
    for (int n = 0; n < N; n += VECTORS * LANES) {
        Factor own = a;
        for (int m = 0; m < rows; m += ROWS_AT_ONCE, own.x += ROWS_AT_ONCE * a.row_step)
            add_block<VECTORS, N>(own, b + n, c + m * N + n, depth);
    }
}

}  // namespace host_vectors
