// SPDX-License-Identifier: Apache-2.0
// What a layer of a network hands back to the one before it, but for the products of matrices.
#include "kernel.cuh"

enum Activation : i32 { NO_ACTIVATION, TANH, RELU };

// The gradient in front of an activation, of that behind it and of what it gave.
HD float activation_gradient(float gradient, float output, i32 activation) {
    if (activation == TANH) return gradient * (1.0f - output * output);
    return activation == RELU && output <= 0 ? 0.0f : gradient;
}

template <int N>
struct alignas(N * 4) Word {
    float x[N];
};

// One of the partial_sums into which a matrix is taken apart, see below; `stride` and `words` count words of N floats.
template <int N>
HD void accumulate_partial_sum(const float* gradients, const float* outputs, float* inputs, float* sums, i32 activation,
                               i64 partial_sum, i64 stride, i64 words) {
    constexpr int BATCH = 4;  // words that are on their way at once
    Word<N> sum = {};
    for (i64 first = partial_sum; first < words; first += BATCH * stride) {
        Word<N> gradient[BATCH], output[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            i64 k = first + b * stride;
            if (k >= words) continue;
            gradient[b] = ((const Word<N>*)gradients)[k];
            if (activation != NO_ACTIVATION) output[b] = ((const Word<N>*)outputs)[k];
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
            i64 k = first + b * stride;
            if (k >= words) continue;
            Word<N> input = gradient[b];
            if (activation != NO_ACTIVATION) {
                UNROLL for (int j = 0; j < N; ++j) {
                    input.x[j] = activation_gradient(gradient[b].x[j], output[b].x[j], activation);
                }
                ((Word<N>*)inputs)[k] = input;
            }
            UNROLL for (int j = 0; j < N; ++j) sum.x[j] += input.x[j];
        }
    }
    ((Word<N>*)sums)[partial_sum] = sum;
}

// Gradients in front of an activation, of those behind it and its outputs, and their sums over the rows, in parts; both
// in one pass. Without an activation only the sums. Strand k has the floats k, k + partial_sums, k + 2 * partial_sums
// and so on; as the number of partial_sums is a multiple of a row's floats, all of its floats belong to one column, and
// sums[k] is their sum in this order. On a GPU neighbouring lanes have neighbouring words of `width` floats, 1 or 4.
KERNEL(layer_gradients) {
#if defined(__CUDACC__)
    if (args.width == 4) {
        FOR_ITEMS (k, args.partial_sums / 4) {
            accumulate_partial_sum<4>(args.gradients, args.outputs, args.inputs, args.sums, args.activation, k,
                                      args.partial_sums / 4, args.floats / 4);
        }
    } else {
        FOR_ITEMS (k, args.partial_sums)
            accumulate_partial_sum<1>(args.gradients, args.outputs, args.inputs, args.sums, args.activation, k,
                                      args.partial_sums, args.floats);
    }
#else
    // The same sums, all partial sums side by side: a processor reads one stretch of memory at a time.
    FOR_ITEMS (k, args.partial_sums) args.sums[k] = 0;
    for (i64 first = 0; first < args.floats; first += args.partial_sums) {
        i64 left = args.floats - first;
        FOR_ITEMS (k, args.partial_sums) {
            if (k >= left) break;
            float input = args.gradients[first + k];
            if (args.activation != NO_ACTIVATION) {
                args.inputs[first + k] = input = activation_gradient(input, args.outputs[first + k], args.activation);
            }
            args.sums[k] += input;
        }
    }
#endif
}
