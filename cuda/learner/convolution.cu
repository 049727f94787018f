// SPDX-License-Identifier: Apache-2.0
// A convolution of small images, and its gradients. Compiled with the constants of
// gpu_vecenv/train/convolution_kernels.py: Shape, sizes of images, window and filters.
//
// The gradients of weights are sums over parts of the images, which depend on their number alone.
#include "convolution.cuh"

namespace convolution {

constexpr int CHANNELS = Shape::CHANNELS, FILTERS = Shape::FILTERS, PLACES = Shape::KERNEL * Shape::KERNEL;

// Of rows that the lanes of a warp read at the same time, each from a bank of its own.
HD constexpr int pitch_of(int n) { return (n + 7) / 16 * 16 + 8; }

// Gradients of weights and biases: products of gradients of outputs, the rows of which are filters, with windows.
struct WeightGradients {
    typedef Images<Shape::HEIGHT, Shape::WIDTH, CHANNELS, Shape::PADDING, Shape::OUT_HEIGHT, Shape::OUT_WIDTH,
                   Shape::KERNEL, Shape::STRIDE, pitch_of(padded(CHANNELS, STEP))>
        Source;
    static constexpr int WARPS = WEIGHT_THREADS / 32, OUT_WINDOWS = Source::WINDOWS;
    static constexpr int FILTER_TILES = padded(FILTERS, 16) / 16, PITCH = pitch_of(16 * FILTER_TILES);
    static constexpr int COLUMN_TILES = PLACES * Source::DEPTH / 8, OWN_TILES = (COLUMN_TILES + WARPS - 1) / WARPS;
    static constexpr int ROWS = padded(WEIGHT_IMAGES * OUT_WINDOWS, STEP);
    static constexpr int GRADIENTS_AT = WEIGHT_IMAGES * Source::WORDS, WINDOWS_AT = GRADIENTS_AT + ROWS * PITCH;
    static constexpr int SHARED_WORDS = WINDOWS_AT + ROWS;

    typedef Loads<CHANNELS, WEIGHT_IMAGES * Source::NUMBERS, WEIGHT_THREADS, false, 20> NextImages;
    typedef Loads<FILTERS, WEIGHT_IMAGES * OUT_WINDOWS * FILTERS, WEIGHT_THREADS, true, 40> NextGradients;

    typedef float Tile[FILTER_TILES][4];
    Tile sums[OWN_TILES], bias_sums;
    const u32* columns[OWN_TILES];  // the lane's, of the first window

    HD static float* images() { return shared(); }
    HD static float* gradients() { return shared() + GRADIENTS_AT; }
    HD static int* windows() { return (int*)shared() + WINDOWS_AT; }

    HD WeightGradients() : sums(), bias_sums() {
        UNROLL for (int n = 0; n < OWN_TILES; ++n) {
            int tile = warp() + n * WARPS;
            int column = tile < COLUMN_TILES ? 8 * tile : 0;
            columns[n] = (const u32*)images() + Source::offset(column / Source::DEPTH) + column % Source::DEPTH +
                         tensor_core::group();
        }
    }

    HD void multiply(int rows) {
        using tensor_core::group;
        const int* own_windows = windows() + tensor_core::member();  // a step's are read during the step before
        int next_upper = own_windows[0], next_lower = own_windows[4];
        for (int first = 0; first < rows; first += STEP) {
            const u32* left = (const u32*)gradients() + (first + tensor_core::member()) * PITCH + group();
            const int upper = next_upper, lower = next_lower, next = first + STEP < rows ? first + STEP : 0;
            next_upper = own_windows[next];
            next_lower = own_windows[next + 4];
            u32 a[FILTER_TILES][4];
            UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
                UNROLL for (int k = 0; k < 4; ++k) a[f][k] = left[k / 2 * 4 * PITCH + 16 * f + k % 2 * 8];
            }
            UNROLL for (int n = 0; n < OWN_TILES; ++n) {
                u32 b0 = columns[n][upper], b1 = columns[n][lower];
                UNROLL for (int f = 0; f < FILTER_TILES; ++f) tensor_core::multiply_tf32(sums[n][f], a[f], b0, b1);
            }
            if (warp() == WARPS - 1) {
                UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
                    tensor_core::multiply_tf32(bias_sums[f], a[f], Tf32::ONE, Tf32::ONE);
                }
            }
        }
    }

    // A row: weights (FILTERS, KERNEL, KERNEL, CHANNELS), then biases.
    HD void store(float* to) const {
        constexpr int SIZE = CHANNELS % 2 == 0 && FILTERS % 2 == 0 ? 2 : 1;  // rows of blocks begin at vectors
        UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
            UNROLL for (int k = 0; k < 4; k += SIZE) {
                int filter = 16 * f + k / 2 * 8 + tensor_core::group(), own = 2 * tensor_core::member() + k % 2;
                if (filter >= FILTERS) continue;
                UNROLL for (int n = 0; n < OWN_TILES; ++n) {
                    int column = 8 * (warp() + n * WARPS) + own, channel = column % Source::DEPTH;
                    if (column >= PLACES * Source::DEPTH || channel >= CHANNELS) continue;
                    Vector<SIZE> out;
                    UNROLL for (int e = 0; e < SIZE; ++e) out.number[e] = sums[n][f][k + e];
                    store_vector(to + (filter * PLACES + column / Source::DEPTH) * CHANNELS + channel, out);
                }
                if (warp() == WARPS - 1 && own == 0) to[FILTERS * CHANNELS * PLACES + filter] = bias_sums[f][k];
            }
        }
    }

    // Each block sums over a part of the images.
    HD static void all(const float* sources, const float* given, const float* outputs, float* out, i64 num_images) {
        WeightGradients own;
        const i64 end = (blockIdx.x + 1) * num_images / PARTS;
        i64 first = blockIdx.x * num_images / PARTS;
        auto count = [&] { return end - first < WEIGHT_IMAGES ? end < first ? 0 : (int)(end - first) : WEIGHT_IMAGES; };
        auto gradient = [&](const float* of) { return of ? of + first * (OUT_WINDOWS * FILTERS) : nullptr; };
        NextImages next_images;
        NextGradients next_gradients;
        auto load = [&] {
            next_images.load(sources + first * Source::NUMBERS, nullptr, count() * Source::NUMBERS);
            next_gradients.load(gradient(given), gradient(outputs), count() * OUT_WINDOWS * FILTERS);
        };
        load();
        clear(shared(), WINDOWS_AT);
        for (int k = threadIdx.x; k < ROWS; k += WEIGHT_THREADS) {
            windows()[k] = k < WEIGHT_IMAGES * OUT_WINDOWS ? Source::window(k) : 0;
        }
        __syncthreads();
        while (first < end) {
            const int rows = count() * OUT_WINDOWS;
            next_images.store(images(), sources + first * Source::NUMBERS, nullptr, count() * Source::NUMBERS,
                              Source::place);
            next_gradients.store(gradients(), gradient(given), gradient(outputs), rows * FILTERS,
                                 [](int k) { return k / FILTERS * PITCH + k % FILTERS; });
            // Up to a whole step, in memory that may have images of before.
            for (int k = rows * PITCH + (int)threadIdx.x; k < padded(rows, STEP) * PITCH; k += WEIGHT_THREADS) {
                gradients()[k] = 0;
            }
            __syncthreads();
            first += WEIGHT_IMAGES;
            load();
            own.multiply(rows);
            __syncthreads();
        }
        own.store(out + (i64)blockIdx.x * (FILTERS * CHANNELS * PLACES + FILTERS));
    }
};

typedef Sums<Shape, Inputs<Shape>, FILTERS, FORWARD_IMAGES, false> Forward;
static_assert(FORWARD_BYTES == 4 * (Forward::WEIGHT_WORDS + FORWARD_IMAGES * Inputs<Shape>::WORDS), "as Python has it");
static_assert(WEIGHT_BYTES == 4 * WeightGradients::SHARED_WORDS, "as Python has it");
#if HAS_INPUT_GRADIENTS
typedef Sums<Shape, OutputGradients<Shape>, CHANNELS, BACK_IMAGES, true> Back;
static_assert(BACK_BYTES == 4 * (Back::WEIGHT_WORDS + BACK_IMAGES * OutputGradients<Shape>::WORDS), "as Python has it");
#endif

}  // namespace convolution

KERNEL_WITH_LAUNCH_BOUNDS(convolution_forward, convolution::FORWARD_THREADS) {
    convolution::Forward::all(args.images, nullptr, args.weights, args.biases, args.outputs, args.relu != 0,
                              args.num_images, args.images_at_once);
}
#if HAS_INPUT_GRADIENTS
KERNEL_WITH_LAUNCH_BOUNDS(convolution_input_gradients, convolution::FORWARD_THREADS) {
    convolution::Back::all(args.gradients, args.outputs, args.weights, nullptr, args.input_gradients, false,
                           args.num_images, args.images_at_once);
}
#endif
KERNEL_WITH_LAUNCH_BOUNDS(convolution_weight_gradients, convolution::WEIGHT_THREADS) {
    convolution::WeightGradients::all(args.images, args.gradients, args.outputs, args.sums, args.num_images);
}
