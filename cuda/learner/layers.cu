// SPDX-License-Identifier: Apache-2.0
// Backward pass of a linear layer's activation and bias; the matrix products are torch's.
#include "kernel.cuh"

enum Activation : i32 { NO_ACTIVATION, TANH, RELU };

// Gradient with respect to an activation's input, from that of its output and from its output.
HD float activation_gradient(float gradient, float output, i32 activation) {
    if (activation == TANH) return gradient * (1.0f - output * output);
    return activation == RELU && output <= 0 ? 0.0f : gradient;
}

template <int N>
struct alignas(N * 4) Word {
    float x[N];
};

// One partial sum of layer_gradients; `stride` and `words` count words of N floats.
template <int N>
HD void accumulate_partial_sum(const float* gradients, const float* outputs, float* inputs, float* sums, i32 activation,
                               i64 partial_sum, i64 stride, i64 words) {
    constexpr int BATCH = 4;  // loads in flight
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

// Gradients with respect to an activation's inputs, and partial sums of them over the rows, in one pass; without an
// activation only the sums. sums[k] adds the floats k, k + partial_sums, k + 2 * partial_sums and so on, in this order.
// `partial_sums` is a multiple of the number of columns, so that each sum is of one column. On a GPU neighbouring lanes
// access neighbouring words of `width` floats, 1 or 4.
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
    // The same sums in the same order, but with contiguous memory accesses.
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
