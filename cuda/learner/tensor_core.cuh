// SPDX-License-Identifier: Apache-2.0
// Products of matrices in shared memory on tensor cores (NVIDIA, PTX ISA: mma.sync, ldmatrix; sm_80 and later), in
// three precisions.
//
// A product sums A[m][k] * B[k][n] over k; a warp computes tiles of 16 x 16 of it, STEP values of k at a time. A matrix
// is stored "along" if neighbouring elements in memory have neighbouring k, and "across" if they have neighbouring m or
// n. Lane 4 * g + t holds the elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each half, 8 columns, of a
// tile of sums. Rows in memory are `pitch` words apart, so that the loads below have no bank conflicts but those named.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

namespace tensor_core {

HD u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// Four matrices of 8 rows of 16 bytes; lane k gives the address of row k % 8 of matrix k / 8.
HD void load_matrices(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address(row)));
}
// The same, each matrix of 16-bit elements transposed.
HD void load_transposed(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address(row)));
}

HD void multiply_tf32(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
HD void multiply_bfloat16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounded to 10 bits of fraction, ties away from zero, as cvt.rna.tf32.f32, which some compilers translate to branches.
// NaN and infinities stay.
HD u32 rounded_tf32(float x) {
    u32 b = math::bits(x);
    return math::is_nan(x) ? b : (b + 0x1000u) & 0xffffe000u;
}
// Two bfloat16, `low` in the lower half.
HD u32 packed_bfloat16(float low, float high) {
    u32 y;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// Relative error up to 2^-11.
HD float approximate_tanh(float x) {
    float y;
    asm volatile("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Four {
    u32 word[4];
};

// Matrices along, of words of which 16 bytes hold WIDTH.
template <class W, int WIDTH>
struct Along {
    typedef W Word;
    static constexpr int STEP = 2 * WIDTH;
    HD static constexpr int pitch(int columns) { return columns + WIDTH; }  // of a multiple of STEP columns
    HD static Four a_along(const Word* matrix, int pitch, int m, int k) {
        int lane = threadIdx.x % 32;
        Four out;
        load_matrices(out.word, matrix + (m + lane % 16) * pitch + k + lane / 16 * WIDTH);
        return out;
    }
    HD static Four b_along(const Word* matrix, int pitch, int n, int k) {
        int lane = threadIdx.x % 32;
        Four out;
        load_matrices(out.word, matrix + (n + lane % 8 + lane / 16 * 8) * pitch + k + lane / 8 % 2 * WIDTH);
        return out;
    }
};

// Factors as float32 words, of which the tensor cores read 19 bits. Across, k runs in pairs: lane t has 2t and 2t + 1
// where along it has t and t + 4. The order of k is free as long as both factors have the same.
struct Tf32Words : Along<float, 4> {
    // The order of k of the matrices across; two lanes share a bank.
    HD static Four a_along_in_pairs(const Word* matrix, int pitch, int m, int k) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uint2 *low = (const uint2*)(matrix + (m + g) * pitch + k + 2 * t),
                    *high = (const uint2*)(matrix + (m + g + 8) * pitch + k + 2 * t);
        return {{low->x, high->x, low->y, high->y}};
    }
    HD static Four a_across(const Word* matrix, int pitch, int m, int k) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const u32* at = (const u32*)matrix + (k + 2 * t) * pitch + m + g;
        return {{at[0], at[8], at[pitch], at[pitch + 8]}};
    }
    HD static Four b_across(const Word* matrix, int pitch, int n, int k) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const u32* at = (const u32*)matrix + (k + 2 * t) * pitch + n + g;
        return {{at[0], at[pitch], at[8], at[pitch + 8]}};
    }
    HD static float loaded(const Word* at, int k) { return at[k]; }
};

// One product; factors are rounded when they are stored.
struct Tf32 : Tf32Words {
    typedef Four Factor;
    template <bool>
    HD static Factor factor(const Four& words) {
        return words;
    }
    HD static void multiply(float (&sums)[2][4], const Factor& a, const Factor& b, bool second) {
        multiply_tf32(sums[0], a.word, b.word[0], b.word[1]);
        if (second) multiply_tf32(sums[1], a.word, b.word[2], b.word[3]);
    }
    HD static float tanh(float x) { return approximate_tanh(x); }
    HD static void store(Word* to, float x) { *to = math::from_bits(rounded_tf32(x)); }
    HD static void store_pair(Word* to, float x, float y) { *(uint2*)to = {rounded_tf32(x), rounded_tf32(y)}; }
};

// float32 as the sum of two TF32 numbers: three products of them, the small one times the small one left out. The error
// of a product is about 2^-22 of its size (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
// while surpassing the FP32 theoretical peak performance", 2022).
struct Float32 : Tf32Words {
    struct Factor {
        u32 large[4], small[4];
    };
    // An infinity is the small part if INFINITE: times the large part of a number it has the right sign.
    template <bool INFINITE>
    HD static Factor factor(const Four& words) {
        Factor out;
        UNROLL for (int k = 0; k < 4; ++k) {
            float x = math::from_bits(words.word[k]);
            u32 large = (words.word[k] + 0x1000u) & 0xffffe000u;  // as rounded_tf32; NaNs are those of `store`
            if (INFINITE && !(math::abs(x) < 0x1p127f)) large = 0;
            float rest = x - math::from_bits(large);
            if (!INFINITE) rest = rest < 1e30f ? rest : 1e30f;  // not infinity minus itself
            out.large[k] = large;
            out.small[k] = math::bits(rest);  // tensor cores ignore the last 13 bits
        }
        return out;
    }
    HD static void multiply(float (&sums)[2][4], const Factor& a, const Factor& b, bool second) {
        UNROLL for (int half = 0; half < 2; ++half) {
            if (half == 1 && !second) continue;
            multiply_tf32(sums[half], a.small, b.large[2 * half], b.large[2 * half + 1]);
            multiply_tf32(sums[half], a.large, b.small[2 * half], b.small[2 * half + 1]);
            multiply_tf32(sums[half], a.large, b.large[2 * half], b.large[2 * half + 1]);
        }
    }
    HD static float tanh(float x) { return math::tanh(x); }
    // One NaN for all: rounding must not carry into the sign.
    HD static float canonical(float x) { return math::is_nan(x) ? math::from_bits(math::NAN_BITS) : x; }
    HD static void store(Word* to, float x) { *to = canonical(x); }
    HD static void store_pair(Word* to, float x, float y) { *(float2*)to = {canonical(x), canonical(y)}; }
};

struct Bfloat16 : Along<unsigned short, 8> {
    typedef Four Factor;
    HD static Four a_along_in_pairs(const Word* matrix, int pitch, int m, int k) {
        return a_along(matrix, pitch, m, k);  // pairs of k share a word in any case
    }
    HD static Four a_across(const Word* matrix, int pitch, int m, int k) {
        int lane = threadIdx.x % 32;
        Four out;
        load_transposed(out.word, matrix + (k + lane % 8 + lane / 16 * 8) * pitch + m + lane / 8 % 2 * 8);
        return out;
    }
    HD static Four b_across(const Word* matrix, int pitch, int n, int k) {
        int lane = threadIdx.x % 32;
        Four out;
        load_transposed(out.word, matrix + (k + lane % 16) * pitch + n + lane / 16 * 8);
        return out;
    }
    template <bool>
    HD static Factor factor(const Four& words) {
        return words;
    }
    HD static void multiply(float (&sums)[2][4], const Factor& a, const Factor& b, bool second) {
        multiply_bfloat16(sums[0], a.word, b.word[0], b.word[1]);
        if (second) multiply_bfloat16(sums[1], a.word, b.word[2], b.word[3]);
    }
    HD static float tanh(float x) { return approximate_tanh(x); }
    HD static float loaded(const Word* at, int k) { return math::from_bits((u32)at[k] << 16); }
    HD static void store(Word* to, float x) { *to = (Word)packed_bfloat16(x, 0); }
    HD static void store_pair(Word* to, float x, float y) { *(u32*)to = packed_bfloat16(x, y); }
};

}  // namespace tensor_core
