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

#if !defined(__CUDACC__)
constexpr int CHUNK = 64;  // neighbouring partial sums that are added at the same time, by vector instructions

template <int ACTIVATION>
static void add_chunk(const float* __restrict gradients, const float* __restrict outputs, float* __restrict inputs,
                      int count, float* __restrict sums) {
    for (int k = 0; k < count; ++k) {
        float input = gradients[k];
        if (ACTIVATION != NO_ACTIVATION) inputs[k] = input = activation_gradient(input, outputs[k], ACTIVATION);
        sums[k] += input;
    }
}

// The partial sums from `first` on.
template <int ACTIVATION>
static void accumulate_chunk(const layer_gradients_Arguments& args, i64 first) {
    float sums[CHUNK] = {};
    i64 left = args.partial_sums - first;
    int count = left < CHUNK ? (int)left : CHUNK;
    for (i64 at = first; at < args.floats; at += args.partial_sums) {
        int own = args.floats - at < count ? (int)(args.floats - at) : count;
        bool is_activation = ACTIVATION != NO_ACTIVATION;
        const float* outputs = is_activation ? args.outputs + at : nullptr;
        float* inputs = is_activation ? args.inputs + at : nullptr;
        if (own == CHUNK)  // a constant number of vectors
            add_chunk<ACTIVATION>(args.gradients + at, outputs, inputs, CHUNK, sums);
        else
            add_chunk<ACTIVATION>(args.gradients + at, outputs, inputs, own, sums);
    }
    for (int k = 0; k < count; ++k) args.sums[first + k] = sums[k];
}
#endif

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
    FOR_ITEMS (chunk, (args.partial_sums + CHUNK - 1) / CHUNK) {
        if (args.activation == TANH)
            accumulate_chunk<TANH>(args, chunk * CHUNK);
        else if (args.activation == RELU)
            accumulate_chunk<RELU>(args, chunk * CHUNK);
        else
            accumulate_chunk<NO_ACTIVATION>(args, chunk * CHUNK);
    }
#endif
}
