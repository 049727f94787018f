// SPDX-License-Identifier: Apache-2.0
// Several convolutions, each followed by a ReLU, of few images: one block takes its images through all layers in shared
// memory. Compiled with the constants of gpu_vecenv/train/convolution_kernels.py: LAYERS, Shape<n> of each, and IMAGES
// that a block has at most. The bits are those of the layers one by one.
#include "convolution.cuh"

namespace convolution {

template <int N>
struct Layer {
    typedef Inputs<Shape<N>> Source;
    typedef Sums<Shape<N>, Source, Shape<N>::FILTERS, IMAGES, false> Products;
    // Words of shared memory in front of its images; and of the weights of a layer up to this one.
    static constexpr int WEIGHT_WORDS =
        Products::WEIGHT_WORDS > Layer<N - 1>::WEIGHT_WORDS ? Products::WEIGHT_WORDS : Layer<N - 1>::WEIGHT_WORDS;
    static constexpr int IMAGES_AT = Layer<N - 1>::IMAGES_END, IMAGES_END = IMAGES_AT + IMAGES * Source::WORDS;
};
template <>
struct Layer<-1> {
    static constexpr int WEIGHT_WORDS = 0, IMAGES_END = 0;
};
constexpr int WEIGHTS_AT = Layer<LAYERS - 1>::IMAGES_END;
static_assert(STACK_BYTES == 4 * (WEIGHTS_AT + Layer<LAYERS - 1>::WEIGHT_WORDS), "as Python has it");

// Layers from N on, of `count` images of the block; `own` are the first weights of layer N.
template <int N>
HD void convolve(const convolution_stack_Arguments& args, typename Layer<N>::Products::Weights own, int count,
                 float* outputs) {
    typedef typename Layer<N>::Products Products;
    float* weights = shared() + WEIGHTS_AT;
    if (N > 0 && Products::PADDED) {
        clear(weights, Products::WEIGHT_WORDS);
        __syncthreads();
    }
    own.store(weights, weights_of(args, N));
    __syncthreads();
    const float *images = shared() + Layer<N>::IMAGES_AT, *biases = biases_of(args, N);
    const int windows = count * Layer<N>::Source::WINDOWS;
    typedef typename Products::Numbers Numbers;
    if constexpr (N + 1 < LAYERS) {
        typename Layer<N + 1>::Products::Weights next;
        next.load(weights_of(args, N + 1));
        auto put = [&](int window, int output, Numbers numbers) {
            const int at = Layer<N + 1>::Source::place(window * Shape<N>::FILTERS + output);
            if (at < 0) return;
            UNROLL for (int e = 0; e < Products::NEIGHBORS; ++e) {
                Tf32::store(shared() + Layer<N + 1>::IMAGES_AT + at + e, numbers.number[e]);
            }
        };
        Products::multiply(weights, images, biases, true, windows, put);
        __syncthreads();
        convolve<N + 1>(args, next, count, outputs);
    } else {
        auto put = [&](int window, int output, Numbers numbers) {
            store_vector(outputs + window * Shape<N>::FILTERS + output, numbers);
        };
        Products::multiply(weights, images, biases, true, windows, put);
    }
}

HD void convolve_all(const convolution_stack_Arguments& args) {
    typedef Layer<0> First;
    const i64 first = (i64)blockIdx.x * args.images_at_once, left = args.num_images - first;
    const int count = left < args.images_at_once ? left < 0 ? 0 : (int)left : args.images_at_once;
    const float* images = args.images + first * First::Source::NUMBERS;
    typename First::Products::Weights own;
    own.load(weights_of(args, 0));
    typename First::Products::NextImages given;
    given.load(images, nullptr, count * First::Source::NUMBERS);
    clear(shared(), First::Products::PADDED ? WEIGHTS_AT + First::Products::WEIGHT_WORDS : WEIGHTS_AT);
    __syncthreads();
    given.store(shared(), images, nullptr, count * First::Source::NUMBERS, First::Source::place);
    constexpr int OUTPUTS = Layer<LAYERS - 1>::Source::WINDOWS * Shape<LAYERS - 1>::FILTERS;
    convolve<0>(args, own, count, args.outputs + first * OUTPUTS);
}

}  // namespace convolution

KERNEL_WITH_LAUNCH_BOUNDS(convolution_stack, convolution::FORWARD_THREADS) { convolution::convolve_all(args); }
