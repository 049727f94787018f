// SPDX-License-Identifier: Apache-2.0
// Elements of the default network layer by layer, in packs of 16 bytes, and its activation. Compiled with the constants
// of a network.
#pragma once
#include "tensor_core.cuh"

namespace layerwise {

struct alignas(16) Pack {
    u32 word[4];
};

// Elements in device memory, float32 or bfloat16.
#if BFLOAT16
typedef unsigned short Element;
constexpr int WIDTH = 8;  // elements of a pack
HD void unpack(const Pack& pack, float* out) {
    UNROLL for (int k = 0; k < 4; ++k) {
        out[2 * k] = tensor_core::Bfloat16::low(pack.word[k]);
        out[2 * k + 1] = tensor_core::Bfloat16::high(pack.word[k]);
    }
}
HD Pack packed(const float* x) {
    Pack pack;
    UNROLL for (int k = 0; k < 4; ++k) pack.word[k] = tensor_core::packed_bfloat16(x[2 * k], x[2 * k + 1]);
    return pack;
}
#else
typedef float Element;
constexpr int WIDTH = 4;
HD void unpack(const Pack& pack, float* out) {
    UNROLL for (int k = 0; k < 4; ++k) out[k] = math::from_bits(pack.word[k]);
}
HD Pack packed(const float* x) {
    Pack pack;
    UNROLL for (int k = 0; k < 4; ++k) pack.word[k] = math::bits(x[k]);
    return pack;
}
#endif

// As nn.Tanh and nn.ReLU, NaN included.
HD float activation(float x) {
    if (RELU) return x < 0 ? 0.0f : x;
    return APPROXIMATE_TANH ? tensor_core::approximate_tanh(x) : math::tanh(x);
}
HD float activation_gradient(float gradient, float output) {
    if (RELU) return output <= 0 ? 0.0f : gradient;
    return gradient * math::fma(-output, output, 1.0f);
}

HD constexpr int packs_of(int elements) { return (elements + WIDTH - 1) / WIDTH; }
HD i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

}  // namespace layerwise
