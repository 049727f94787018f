// SPDX-License-Identifier: Apache-2.0
// Convolutions of small images on tensor cores in TF32, and their gradients. Compiled with the constants of
// gpu_vecenv/train/convolution_kernels.py: sizes of images, window and filters.
//
// Images have their channels last. A convolution is a product of a matrix of windows, a row for each cell of the
// outputs, with the weights. The matrix of windows is never written: a block holds images with their margins of zeros
// in shared memory, where a row of the matrix is an address and a column an offset from it. Channels are padded to a
// multiple of 8 with zeros, so that a step of a product is within one cell of the window.
//
// The bits of an output depend neither on the images beside it nor on the shape of the launch. The gradients of weights
// are sums over parts of the images, which depend on their number alone.
#include "tensor_core.cuh"

namespace convolution {

using tensor_core::Tf32;

constexpr int STEP = Tf32::STEP, PLACES = KERNEL * KERNEL;  // places in a window
HD constexpr int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

extern __shared__ __align__(16) unsigned char shared_memory[];
HD float* shared() { return (float*)shared_memory; }
HD int warp() { return (int)threadIdx.x / 32; }

// Images of HEIGHT x WIDTH cells of CHANNELS numbers in shared memory with a MARGIN of zeros, and ROWS x COLUMNS
// windows, STRIDE cells apart. A cell has PITCH words.
template <int HEIGHT, int WIDTH, int CHANNELS, int MARGIN, int ROWS, int COLUMNS, int STRIDE, int PITCH>
struct Images {
    static constexpr int DEPTH = padded(CHANNELS, STEP);  // numbers of a cell in a row of the matrix of windows
    static constexpr int HIGH = (ROWS - 1) * STRIDE + KERNEL, WIDE = (COLUMNS - 1) * STRIDE + KERNEL;
    static constexpr int WORDS = HIGH * WIDE * PITCH, NUMBERS = HEIGHT * WIDTH * CHANNELS, WINDOWS = ROWS * COLUMNS;
    static_assert(PITCH >= DEPTH, "a cell has all its channels");

    HD static void clear(float* images, int count) {
        for (int k = threadIdx.x; k < count * WORDS; k += blockDim.x) images[k] = 0;
    }
    // Cells outside of all windows are left out, and what a ReLU with these `outputs`, if given, has as gradient 0.
    HD static void load(float* images, const float* from, const float* outputs, int count) {
        _Pragma("unroll 4") for (int k = threadIdx.x; k < count * NUMBERS; k += blockDim.x) {
            int cell = k / CHANNELS, x = cell % WIDTH + MARGIN, y = cell / WIDTH % HEIGHT + MARGIN;
            float* to = images + cell / (WIDTH * HEIGHT) * WORDS + (y * WIDE + x) * PITCH + k % CHANNELS;
            if (x < WIDE && y < HIGH) Tf32::store(to, outputs && outputs[k] <= 0 ? 0 : from[k]);
        }
    }
    // Where window number k begins, counted over the images.
    HD static int window(int k) {
        int at = k % WINDOWS;
        return k / WINDOWS * WORDS + (at / COLUMNS * WIDE + at % COLUMNS) * STRIDE * PITCH;
    }
    // From the beginning of a window to a column of the matrix.
    HD static int offset(int column) {
        int place = column / DEPTH;
        return (place / KERNEL * WIDE + place % KERNEL) * PITCH + column % DEPTH;
    }
};

// Sums over windows. BACK: from the gradients of outputs to those of inputs, which is a convolution with the window
// turned by half a circle, and with filters and channels exchanged.
template <class Source, int OUTPUTS, bool BACK>
struct Sums {
    static constexpr int WARPS = FORWARD_THREADS / 32, TILES = 2;  // tiles of 16 windows that a warp has at a time
    static constexpr int COLUMNS = padded(OUTPUTS, 16), PITCH = Tf32::weight_pitch(PLACES * Source::DEPTH);
    static constexpr int WEIGHT_WORDS = COLUMNS * PITCH;
    typedef float Tile[COLUMNS / 16][2][4];

    // Weights (FILTERS, CHANNELS, KERNEL, KERNEL) of torch.
    HD static void load_weights(float* weights, const float* from) {
        for (int k = threadIdx.x; k < WEIGHT_WORDS; k += FORWARD_THREADS) weights[k] = 0;
        __syncthreads();
        _Pragma("unroll 4") for (int k = threadIdx.x; k < FILTERS * CHANNELS * PLACES; k += FORWARD_THREADS) {
            int place = k % PLACES, channel = k / PLACES % CHANNELS, filter = k / (PLACES * CHANNELS);
            int output = BACK ? channel : filter, input = BACK ? filter : channel;
            int column = (BACK ? PLACES - 1 - place : place) * Source::DEPTH + input;
            Tf32::store_weight(weights + output * PITCH + column, from[k]);
        }
    }

    // Of the windows from `first` on.
    HD static void multiply(const float* weights, const float* images, int first, int windows, Tile (&sums)[TILES]) {
        const float* window[TILES];
        UNROLL for (int m = 0; m < TILES; ++m) {
            int k = first + 16 * m + tensor_core::lane() % 16;
            window[m] = images + Source::window(k < windows ? k : 0) + tensor_core::lane() / 16 * (STEP / 2);
        }
        for (int place = 0; place < PLACES; ++place) {
            UNROLL for (int channel = 0; channel < Source::DEPTH; channel += STEP) {
                int column = place * Source::DEPTH + channel, at = Source::offset(place * Source::DEPTH) + channel;
                Tf32::Factor a[TILES][1], b[1];
                UNROLL for (int m = 0; m < TILES; ++m) tensor_core::load_matrices(a[m][0].word, window[m] + at);
                UNROLL for (int n = 0; n < COLUMNS / 16; ++n) {
                    b[0] = Tf32::b_along<true>(weights, PITCH, 16 * n, column);
                    UNROLL for (int m = 0; m < TILES; ++m) Tf32::multiply(sums[m][n], a[m], b, true);
                }
            }
        }
    }

    HD static void store(float* outputs, const float* biases, bool relu, int windows, const Tile (&sums)[TILES]) {
        UNROLL for (int n = 0; n < COLUMNS / 16; ++n) {
            UNROLL for (int k = 0; k < 4; ++k) {
                int column = 16 * n + k / 2 * 8 + 2 * tensor_core::member() + k % 2;
                float bias = !BACK && column < OUTPUTS ? biases[column] : 0;
                UNROLL for (int m = 0; m < TILES; ++m) {
                    UNROLL for (int half = 0; half < 2; ++half) {
                        int row = 16 * m + 8 * half + tensor_core::group();
                        float x = sums[m][n][k / 2][2 * half + k % 2] + bias;
                        if (row < windows && column < OUTPUTS) outputs[row * OUTPUTS + column] = relu && x < 0 ? 0 : x;
                    }
                }
            }
        }
    }

    // A block takes `images_at_once` images at a time, or fewer.
    HD static void all(const float* sources, const float* masks, const float* given, const float* biases,
                       float* outputs, bool relu, i64 num_images, i32 images_at_once) {
        float *weights = shared(), *images = weights + WEIGHT_WORDS;
        load_weights(weights, given);
        Source::clear(images, images_at_once);
        const i64 stride = (i64)gridDim.x * images_at_once;
        for (i64 first = (i64)blockIdx.x * images_at_once; first < num_images; first += stride) {
            i64 left = num_images - first;
            int count = left < images_at_once ? (int)left : images_at_once, windows = count * Source::WINDOWS;
            __syncthreads();
            const i64 at_first = first * Source::NUMBERS;
            Source::load(images, sources + at_first, masks ? masks + at_first : nullptr, count);
            __syncthreads();
            for (int at = warp() * 16 * TILES; at < windows; at += WARPS * 16 * TILES) {
                Tile sums[TILES] = {};
                multiply(weights, images, at, windows, sums);
                store(outputs + (first * Source::WINDOWS + at) * OUTPUTS, biases, relu, windows - at, sums);
            }
        }
    }
};

// Of rows that the lanes of a warp read at the same time, each from a bank of its own.
HD constexpr int pitch_of(int n) { return (n + 7) / 16 * 16 + 8; }

// Gradients of weights and biases: products of gradients of outputs, the rows of which are filters, with windows.
struct WeightGradients {
    static constexpr int WARPS = WEIGHT_THREADS / 32, OUT_WINDOWS = OUT_HEIGHT * OUT_WIDTH;
    typedef Images<HEIGHT, WIDTH, CHANNELS, PADDING, OUT_HEIGHT, OUT_WIDTH, STRIDE, pitch_of(padded(CHANNELS, STEP))>
        Source;
    static constexpr int FILTER_TILES = padded(FILTERS, 16) / 16, PITCH = pitch_of(16 * FILTER_TILES);
    static constexpr int COLUMN_TILES = PLACES * Source::DEPTH / 8, OWN_TILES = (COLUMN_TILES + WARPS - 1) / WARPS;
    static constexpr int ROWS = padded(WEIGHT_IMAGES * OUT_WINDOWS, STEP);
    static constexpr int GRADIENTS_AT = WEIGHT_IMAGES * Source::WORDS, WINDOWS_AT = GRADIENTS_AT + ROWS * PITCH;
    static constexpr int SHARED_WORDS = WINDOWS_AT + ROWS;

    typedef float Tile[FILTER_TILES][4];
    Tile sums[OWN_TILES], bias_sums;
    int offset[OWN_TILES];  // of the lane's column of each tile

    HD static float* images() { return shared(); }
    HD static float* gradients() { return shared() + GRADIENTS_AT; }
    HD static int* windows() { return (int*)shared() + WINDOWS_AT; }

    HD WeightGradients() : sums(), bias_sums() {
        UNROLL for (int n = 0; n < OWN_TILES; ++n) {
            int tile = warp() + n * WARPS;
            offset[n] = Source::offset(tile < COLUMN_TILES ? 8 * tile : 0) + tensor_core::group();
        }
    }

    // Rows up to a whole step, with zeros in those of no image.
    HD static void load(const float* from, const float* outputs, int rows) {
        constexpr int COLUMNS = 16 * FILTER_TILES;
        _Pragma("unroll 4") for (int k = threadIdx.x; k < padded(rows, STEP) * COLUMNS; k += WEIGHT_THREADS) {
            int row = k / COLUMNS, column = k % COLUMNS;
            bool exists = row < rows && column < FILTERS;
            const int at = exists ? row * FILTERS + column : 0;
            bool is_zero = !exists || (outputs && outputs[at] <= 0);
            Tf32::store(gradients() + row * PITCH + column, is_zero ? 0 : from[at]);
        }
    }

    HD void multiply(int rows) {
        using tensor_core::group;
        for (int first = 0; first < rows; first += STEP) {
            int row = first + tensor_core::member();
            const u32* left = (const u32*)gradients() + row * PITCH + group();
            const u32 *upper = (const u32*)images() + windows()[row],
                      *lower = (const u32*)images() + windows()[row + 4];
            u32 a[FILTER_TILES][4];
            UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
                UNROLL for (int k = 0; k < 4; ++k) a[f][k] = left[k / 2 * 4 * PITCH + 16 * f + k % 2 * 8];
            }
            UNROLL for (int n = 0; n < OWN_TILES; ++n) {
                u32 b0 = upper[offset[n]], b1 = lower[offset[n]];
                UNROLL for (int f = 0; f < FILTER_TILES; ++f) tensor_core::multiply_tf32(sums[n][f], a[f], b0, b1);
            }
            if (warp() == WARPS - 1) {
                UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
                    tensor_core::multiply_tf32(bias_sums[f], a[f], Tf32::ONE, Tf32::ONE);
                }
            }
        }
    }

    // A row: weights as torch has them, then biases.
    HD void store(float* to) const {
        UNROLL for (int f = 0; f < FILTER_TILES; ++f) {
            UNROLL for (int k = 0; k < 4; ++k) {
                int filter = 16 * f + k / 2 * 8 + tensor_core::group(), own = 2 * tensor_core::member() + k % 2;
                if (filter >= FILTERS) continue;
                UNROLL for (int n = 0; n < OWN_TILES; ++n) {
                    int column = 8 * (warp() + n * WARPS) + own, channel = column % Source::DEPTH;
                    if (column < PLACES * Source::DEPTH && channel < CHANNELS)
                        to[(filter * CHANNELS + channel) * PLACES + column / Source::DEPTH] = sums[n][f][k];
                }
                if (warp() == WARPS - 1 && own == 0) to[FILTERS * CHANNELS * PLACES + filter] = bias_sums[f][k];
            }
        }
    }

    // Each block sums over a part of the images.
    HD static void all(const float* sources, const float* given, const float* outputs, float* out, i64 num_images) {
        WeightGradients own;
        Source::clear(images(), WEIGHT_IMAGES);
        for (int k = threadIdx.x; k < ROWS; k += WEIGHT_THREADS) {
            windows()[k] = k < WEIGHT_IMAGES * OUT_WINDOWS ? Source::window(k) : 0;
        }
        const i64 end = (blockIdx.x + 1) * num_images / PARTS;
        for (i64 first = blockIdx.x * num_images / PARTS; first < end; first += WEIGHT_IMAGES) {
            int count = end - first < WEIGHT_IMAGES ? (int)(end - first) : WEIGHT_IMAGES;
            __syncthreads();
            Source::load(images(), sources + first * Source::NUMBERS, nullptr, count);
            const i64 at = first * OUT_WINDOWS * FILTERS;
            load(given + at, outputs ? outputs + at : nullptr, count * OUT_WINDOWS);
            __syncthreads();
            own.multiply(count * OUT_WINDOWS);
        }
        own.store(out + (i64)blockIdx.x * (FILTERS * CHANNELS * PLACES + FILTERS));
    }
};

// Addresses of 8 neighbouring cells are in different banks of shared memory.
typedef Images<HEIGHT, WIDTH, CHANNELS, PADDING, OUT_HEIGHT, OUT_WIDTH, STRIDE, padded(CHANNELS, STEP) + 4> Inputs;
typedef Sums<Inputs, FILTERS, false> Forward;
static_assert(FORWARD_BYTES == 4 * (Forward::WEIGHT_WORDS + FORWARD_IMAGES * Inputs::WORDS), "as Python has it");
static_assert(WEIGHT_BYTES == 4 * WeightGradients::SHARED_WORDS, "as Python has it");
#if HAS_INPUT_GRADIENTS
typedef Images<OUT_HEIGHT, OUT_WIDTH, FILTERS, KERNEL - 1 - PADDING, HEIGHT, WIDTH, 1, padded(FILTERS, STEP) + 4>
    OutputGradients;
typedef Sums<OutputGradients, CHANNELS, true> Back;
static_assert(BACK_BYTES == 4 * (Back::WEIGHT_WORDS + BACK_IMAGES * OutputGradients::WORDS), "as Python has it");
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
