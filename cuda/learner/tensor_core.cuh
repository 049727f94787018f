// SPDX-License-Identifier: Apache-2.0
// Products of matrices in shared memory on tensor cores (NVIDIA, PTX ISA: mma.sync, ldmatrix; sm_80 and later), in
// three precisions.
//
// A product sums A[m][k] * B[k][n] over k; a warp computes tiles of 16 x 16 of it, STEP values of k at a time. Lane
// 4 * g + t holds the elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of each half, 8 columns, of a tile of
// sums.
//
// There are two kinds of matrices in shared memory. Weights have a row for each output, `pitch` words apart. The
// activations of a tile of rows, and their gradients, are laid out as each precision says: in all of them a tile of
// sums that was rounded is, in registers, a factor A of the next product, and loads and stores have no bank conflicts.
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
// Two of them; lanes 0 … 15 give the addresses.
HD void load_two_matrices(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address(row)));
}
HD void load_two_transposed(u32 (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(out[0]), "=r"(out[1])
                 : "r"(address(row)));
}
// Four, each matrix of 16-bit elements transposed.
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
// Nearly so in one instruction: x (1 + c) is cut off to 10 bits by the tensor cores. With c = 2/3 of half a unit the
// mean error is 0 for fractions of any size, the largest is 2/3 of a unit instead of a half.
HD u32 nearly_rounded_tf32(float x) { return math::bits(math::fma(x, 0x1.555556p-12f, x)); }
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

// Relative error up to 2^-23.
HD float approximate_reciprocal(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Four {
    u32 word[4];
};

// Where a factor may be infinite. Inputs: their products have the right sign. Activations, which are not negative:
// their products are not NaN. Elsewhere they are NaN.
enum Kind { INPUT, ACTIVATION, NUMBER };

HD int lane() { return threadIdx.x % 32; }
HD int group() { return lane() / 4; }   // g
HD int member() { return lane() % 4; }  // t

// Loads of matrices of W, of which 16 bytes hold WIDTH, whose rows have neighbouring k.
template <class W, int WIDTH>
struct Along {
    typedef W Word;
    static constexpr int STEP = 2 * WIDTH;
    static constexpr bool CHAINS = true;  // whether a factor may be kept in registers
    static constexpr int UNROLLED_STEPS = 4;
    HD static constexpr int weight_pitch(int columns) { return columns + WIDTH; }  // of a multiple of STEP columns
    HD static Four a_along(const Word* matrix, int pitch, int m, int k) {
        Four out;
        load_matrices(out.word, matrix + (m + lane() % 16) * pitch + k + lane() / 16 * WIDTH);
        return out;
    }
    static constexpr int STEPS_AT_ONCE = 1;  // of a product, that one call multiplies
    // Without BOTH, only the first half of the columns.
    template <bool BOTH>
    HD static Four b_along(const Word* matrix, int pitch, int n, int k) {
        Four out = {};
        const Word* row = matrix + (n + lane() % 8) * pitch + k + lane() / 8 % 2 * WIDTH;
        if constexpr (BOTH)
            load_matrices(out.word, row + lane() / 16 * 8 * pitch);
        else
            load_two_matrices(out.word, row);
        return out;
    }
    // B[k = input][n = output].
    template <bool BOTH>
    HD static Four b_of_outputs(const Word* weights, int pitch, int n, int k) {
        return b_along<BOTH>(weights, pitch, n, k);
    }
};

// Factors as float32 words, of which the tensor cores read 19 bits. Where k counts columns of activations, lane t has
// columns 2t and 2t + 1 of a step, as in sums, in the places of k = t and t + 4; weights are stored in this order. The
// order of k is free as long as both factors have the same. Activations have a row of memory for each column, with the
// rows g and g + 8 of a tile side by side.
struct Tf32Words : Along<float, 4> {
    HD static constexpr int activation_pitch(int rows, int) { return rows + 4; }  // 4 or 20 modulo the 32 banks
    HD static constexpr int activation_words(int rows, int columns) {
        return columns * activation_pitch(rows, columns);
    }
    HD static constexpr int activation_at(int pitch, int row, int column) {
        return column * pitch + row / 16 * 16 + row % 8 * 2 + row % 16 / 8;
    }
    HD static constexpr int row_at(int k) { return k / 16 * 16 + k % 16 / 2 + k % 2 * 8; }  // the k-th in memory
    HD static constexpr int weight_at(int pitch, int output, int input) {
        return output * pitch + input / 8 * 8 + place(input % 8);
    }
    HD static constexpr int place(int k) { return k % 2 * 4 + k / 2; }

    // B[k = output][n = input].
    HD static Four b_of_inputs(const Word* weights, int pitch, int n, int k) {
        const u32* at = (const u32*)weights + (k + 2 * member()) * pitch + n + place(group());
        return {{at[0], at[pitch], at[8], at[pitch + 8]}};
    }
    // A[m = row][k = column].
    HD static Four a_of_rows(const Word* activations, int pitch, int row, int column) {
        const float* at = activations + activation_at(pitch, row + group(), column + 2 * member());
        uint2 left = *(const uint2*)at, right = *(const uint2*)(at + pitch);
        return {{left.x, left.y, right.x, right.y}};
    }
    // The same of x(half, column), the lane's elements in the rows g and g + 8; `column` is the step's first.
    template <class P, class F>
    HD static Four a_of(int column, F x) {
        int left = column + 2 * member(), right = left + 1;
        return {{P::rounded(x(0, left)), P::rounded(x(1, left)), P::rounded(x(0, right)), P::rounded(x(1, right))}};
    }
    // A[m = column][k = row].
    HD static Four a_of_columns(const Word* activations, int pitch, int column, int row) {
        return a_along(activations, pitch, column, row);
    }
    // B[k = row][n = column].
    template <bool BOTH>
    HD static Four b_of_columns(const Word* activations, int pitch, int column, int row) {
        return b_along<BOTH>(activations, pitch, column, row);
    }

    static constexpr int TILE_WORDS = 8;  // of a lane in a tile of sums
    // Lane's words of a tile in the order of the factors A of its two steps.
    template <class P>
    HD static void round_tile(const float (&sums)[2][4], u32* words) {
        UNROLL for (int half = 0; half < 2; ++half) {
            UNROLL for (int k = 0; k < 4; ++k) words[4 * half + k] = P::rounded(sums[half][k % 2 * 2 + k / 2]);
        }
    }
    HD static void store_tile(Word* activations, int pitch, int row, int column, const u32* words) {
        UNROLL for (int half = 0; half < 2; ++half) {
            Word* at = activations + activation_at(pitch, row + group(), column + 8 * half + 2 * member());
            *(uint2*)at = {words[4 * half], words[4 * half + 1]};
            *(uint2*)(at + pitch) = {words[4 * half + 2], words[4 * half + 3]};
        }
    }
    HD static void load_tile(const Word* activations, int pitch, int row, int column, float (&out)[2][4]) {
        UNROLL for (int half = 0; half < 2; ++half) {
            const Word* at = activations + activation_at(pitch, row + group(), column + 8 * half + 2 * member());
            float2 left = *(const float2*)at, right = *(const float2*)(at + pitch);
            out[half][0] = left.x;
            out[half][1] = right.x;
            out[half][2] = left.y;
            out[half][3] = right.y;
        }
    }
    static constexpr u32 ONE = 0x3f800000u;
};

// One product; factors are rounded when they are stored.
struct Tf32 : Tf32Words {
    typedef Four Factor;
    template <Kind>
    HD static Factor factor(const Four& words) {
        return words;
    }
    HD static void multiply(float (&sums)[2][4], const Factor (&a)[1], const Factor (&b)[1], bool second) {
        multiply_tf32(sums[0], a[0].word, b[0].word[0], b[0].word[1]);
        if (second) multiply_tf32(sums[1], a[0].word, b[0].word[2], b[0].word[3]);
    }
    // Adds the sums over k of A, to each column, or of the first half of B, to each row.
    HD static void add_a(float (&sums)[4], const Factor (&a)[1]) { multiply_tf32(sums, a[0].word, ONE, ONE); }
    HD static void add_b(float (&sums)[4], const Factor (&b)[1]) {
        multiply_tf32(sums, {ONE, ONE, ONE, ONE}, b[0].word[0], b[0].word[1]);
    }
    HD static float tanh(float x) { return approximate_tanh(x); }
    HD static u32 rounded(float x) { return nearly_rounded_tf32(x); }
    HD static void store(Word* to, float x) { *to = math::from_bits(rounded(x)); }
    HD static void store_weight(Word* to, float x) { *to = math::from_bits(rounded_tf32(x)); }
    // Of two neighbouring inputs, the first of which is even, in an output's row.
    HD static void store_weights(Word* row, int input, float x, float y) {
        store_weight(row + weight_at(0, 0, input), x);
        store_weight(row + weight_at(0, 0, input + 1), y);
    }
    template <class F>
    HD static Four a_of(int column, F x) {
        return Tf32Words::a_of<Tf32>(column, x);
    }
    HD static void round_tile(const float (&sums)[2][4], u32* words) { Tf32Words::round_tile<Tf32>(sums, words); }
};

// float32 as the sum of two TF32 numbers: three products of them, the small one times the small one left out. The error
// of a product is about 2^-22 of its size. Tensor cores cut off what their sums cannot hold, so that errors of one sign
// add up over k; the products of two steps are summed for themselves, small ones first, and added with rounding.
// (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance", 2022.)
struct Float32 : Tf32Words {
    static constexpr bool CHAINS = false;  // with all steps unrolled the code is longer than the cache of instructions
    static constexpr int UNROLLED_STEPS = 1, STEPS_AT_ONCE = 2;
    static constexpr u32 INFINITY_BITS = 0x7f800000u;
    struct Factor {
        u32 large[4], small[4];
    };
    template <Kind KIND>
    HD static Factor factor(const Four& words) {
        Factor out;
        UNROLL for (int k = 0; k < 4; ++k) {
            float x = math::from_bits(words.word[k]);
            u32 large = (words.word[k] + 0x1000u) & 0xffffe000u;  // as rounded_tf32, but for NaN, which `rest` is too
            if (KIND == INPUT && !(math::abs(x) < 0x1p127f)) large = 0;
            float rest = x - math::from_bits(large);
            if (KIND == ACTIVATION && large == INFINITY_BITS) rest = 1e30f;
            out.large[k] = large;
            out.small[k] = math::bits(rest);  // tensor cores ignore the last 13 bits
        }
        return out;
    }
    template <int STEPS>
    HD static void multiply(float (&sums)[2][4], const Factor (&a)[STEPS], const Factor (&b)[STEPS], bool second) {
        UNROLL for (int half = 0; half < 2; ++half) {
            if (half == 1 && !second) continue;
            float part[4] = {};
            const int k = 2 * half;
            UNROLL for (int s = 0; s < STEPS; ++s) {
                multiply_tf32(part, a[s].small, b[s].large[k], b[s].large[k + 1]);
                multiply_tf32(part, a[s].large, b[s].small[k], b[s].small[k + 1]);
            }
            UNROLL for (int s = 0; s < STEPS; ++s) multiply_tf32(part, a[s].large, b[s].large[k], b[s].large[k + 1]);
            add(sums[half], part);
        }
    }
    HD static void add(float (&sums)[4], const float (&part)[4]) {
        UNROLL for (int k = 0; k < 4; ++k) sums[k] += part[k];
    }
    template <int STEPS>
    HD static void add_a(float (&sums)[4], const Factor (&a)[STEPS]) {
        float part[4] = {};
        UNROLL for (int s = 0; s < STEPS; ++s) multiply_tf32(part, a[s].small, ONE, ONE);
        UNROLL for (int s = 0; s < STEPS; ++s) multiply_tf32(part, a[s].large, ONE, ONE);
        add(sums, part);
    }
    template <int STEPS>
    HD static void add_b(float (&sums)[4], const Factor (&b)[STEPS]) {
        const u32 ONES[4] = {ONE, ONE, ONE, ONE};
        float part[4] = {};
        UNROLL for (int s = 0; s < STEPS; ++s) multiply_tf32(part, ONES, b[s].small[0], b[s].small[1]);
        UNROLL for (int s = 0; s < STEPS; ++s) multiply_tf32(part, ONES, b[s].large[0], b[s].large[1]);
        add(sums, part);
    }
    // Max 3.2 ulp, 0.33 in the mean, as torch's 0.28: e / (e + 2) with e = exp(2 |x|) - 1. Half as many instructions as
    // math::tanh, none of them a branch, as in a division. NaN stays; from 9.02 on the result is 1.
    HD static float tanh(float x) {
        float a = math::abs(x);
        a = a > 10.0f ? 10.0f : a;
        float rounded = math::fma(a, 0x1.715476p+1f, math::ROUNDER), k = rounded - math::ROUNDER;
        float r = math::fma(k, -0x1.62e43p-2f, a);  // a - k log(2) / 2
        float p = math::fma(math::fma(8.888878e-02f, r, 2.678125e-01f), r, 6.666742e-01f);
        p = math::fma(math::fma(math::fma(p, r, 1.3333205f), r, 1.9999999f), r, 2.0f);
        float scale = math::from_bits((math::bits(rounded) << 23) + 0x3f800000u);  // 2^k, as in exp_nonpositive
        float e = math::fma(scale, p * r, scale - 1.0f), d = e + 2.0f;
        float reciprocal = approximate_reciprocal(d), y = e * reciprocal;
        y = math::fma(math::fma(-y, d, e), reciprocal, y);
        return math::from_bits(math::bits(y) | (math::bits(x) & math::SIGN));
    }
    HD static u32 rounded(float x) { return math::bits(x); }
    HD static void store(Word* to, float x) { *to = x; }
    HD static void store_weight(Word* to, float x) { *to = x; }
    HD static void store_weights(Word* row, int input, float x, float y) {
        store_weight(row + weight_at(0, 0, input), x);
        store_weight(row + weight_at(0, 0, input + 1), y);
    }
    template <class F>
    HD static Four a_of(int column, F x) {
        return Tf32Words::a_of<Float32>(column, x);
    }
    HD static void round_tile(const float (&sums)[2][4], u32* words) { Tf32Words::round_tile<Float32>(sums, words); }
};

// Activations have a row of memory for each row.
struct Bfloat16 : Along<unsigned short, 8> {
    typedef Four Factor;
    HD static constexpr int activation_pitch(int, int columns) { return columns + 8; }
    HD static constexpr int activation_words(int rows, int columns) { return rows * activation_pitch(rows, columns); }
    HD static constexpr int activation_at(int pitch, int row, int column) { return row * pitch + column; }
    HD static constexpr int row_at(int k) { return k; }
    HD static constexpr int weight_at(int pitch, int output, int input) { return output * pitch + input; }

    HD static Four b_of_inputs(const Word* weights, int pitch, int n, int k) {
        return b_of_columns<true>(weights, pitch, n, k);
    }
    HD static Four a_of_rows(const Word* activations, int pitch, int row, int column) {
        return a_along(activations, pitch, row, column);
    }
    template <class F>
    HD static Four a_of(int column, F x) {
        Four out;
        UNROLL for (int k = 0; k < 4; ++k) {
            int half = k % 2, first = column + k / 2 * 8 + 2 * member();
            out.word[k] = packed_bfloat16(x(half, first), x(half, first + 1));
        }
        return out;
    }
    HD static Four a_of_columns(const Word* activations, int pitch, int column, int row) {
        Four out;
        load_transposed(out.word,
                        activations + (row + lane() % 8 + lane() / 16 * 8) * pitch + column + lane() / 8 % 2 * 8);
        return out;
    }
    template <bool BOTH>
    HD static Four b_of_columns(const Word* activations, int pitch, int column, int row) {
        Four out = {};
        const Word* at = activations + (row + lane() % 16) * pitch + column;
        if constexpr (BOTH)
            load_transposed(out.word, at + lane() / 16 * 8);
        else
            load_two_transposed(out.word, at);
        return out;
    }

    static constexpr int TILE_WORDS = 4;
    HD static void round_tile(const float (&sums)[2][4], u32* words) {
        UNROLL for (int k = 0; k < 4; ++k) words[k] =
            packed_bfloat16(sums[k / 2][k % 2 * 2], sums[k / 2][k % 2 * 2 + 1]);
    }
    HD static void store_tile(Word* activations, int pitch, int row, int column, const u32* words) {
        UNROLL for (int k = 0; k < 4; ++k) * pair(activations, pitch, row, column, k) = words[k];
    }
    HD static void load_tile(const Word* activations, int pitch, int row, int column, float (&out)[2][4]) {
        UNROLL for (int k = 0; k < 4; ++k) {
            u32 word = *pair((Word*)activations, pitch, row, column, k);
            out[k / 2][k % 2 * 2] = low(word);
            out[k / 2][k % 2 * 2 + 1] = high(word);
        }
    }
    // The lane's k-th pair of elements of a tile.
    HD static u32* pair(Word* activations, int pitch, int row, int column, int k) {
        return (u32*)(activations + (row + group() + k % 2 * 8) * pitch + column + k / 2 * 8 + 2 * member());
    }
    HD static float low(u32 word) { return math::from_bits(word << 16); }
    HD static float high(u32 word) { return math::from_bits(word & 0xffff0000u); }
    static constexpr u32 ONES = 0x3f803f80u;

    template <Kind>
    HD static Factor factor(const Four& words) {
        return words;
    }
    HD static void multiply(float (&sums)[2][4], const Factor (&a)[1], const Factor (&b)[1], bool second) {
        multiply_bfloat16(sums[0], a[0].word, b[0].word[0], b[0].word[1]);
        if (second) multiply_bfloat16(sums[1], a[0].word, b[0].word[2], b[0].word[3]);
    }
    HD static void add_a(float (&sums)[4], const Factor (&a)[1]) { multiply_bfloat16(sums, a[0].word, ONES, ONES); }
    HD static void add_b(float (&sums)[4], const Factor (&b)[1]) {
        multiply_bfloat16(sums, {ONES, ONES, ONES, ONES}, b[0].word[0], b[0].word[1]);
    }
    HD static float tanh(float x) { return approximate_tanh(x); }
    HD static void store(Word* to, float x) { *to = (Word)packed_bfloat16(x, 0); }
    HD static void store_weight(Word* to, float x) { store(to, x); }
    HD static void store_weights(Word* row, int input, float x, float y) {
        *(u32*)(row + input) = packed_bfloat16(x, y);
    }
};

}  // namespace tensor_core
