// SPDX-License-Identifier: Apache-2.0
// Convolutions of small images on tensor cores in TF32: images and weights in shared memory, and their products. A
// Shape has the constants of a convolution, from gpu_vecenv/train/convolution_kernels.py.
//
// Images have their channels last. A convolution is a product of a matrix of windows, a row for each cell of the
// outputs, with the weights. The matrix of windows is never written: a block holds images with their margins of zeros
// in shared memory, where a row of the matrix is an address and a column an offset from it. Channels are padded to a
// multiple of 8 with zeros, so that a step of a product is within one cell of the window.
//
// The bits of an output depend neither on the images beside it nor on the shape of the launch.
#pragma once
#include "tensor_core.cuh"

namespace convolution {

using tensor_core::Tf32;

constexpr int STEP = Tf32::STEP;
HD constexpr int padded(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

extern __shared__ __align__(16) unsigned char shared_memory[];
HD float* shared() { return (float*)shared_memory; }
HD int warp() { return (int)threadIdx.x / 32; }

// Neighbouring numbers that one instruction moves, as many as divide a row of n.
template <int N>
struct alignas(4 * N) Vector {
    float number[N];
};
HD constexpr int vector_of(int n) { return n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : 1; }
HD void store_vector(float* to, const Vector<1>& x) { *to = x.number[0]; }
// As one word, because compilers store two numbers that they have just calculated one by one.
HD void store_vector(float* to, const Vector<2>& x) {
    *(u64*)to = (u64)math::bits(x.number[1]) << 32 | math::bits(x.number[0]);
}

HD void clear(float* memory, int words) {  // words: a multiple of 4
    for (int k = threadIdx.x; k < words / 4; k += blockDim.x) ((Vector<4>*)memory)[k] = {};
}

// A block's numbers on their way from global to shared memory, up to MOST neighbours in rows of ROW. A thread keeps the
// first of its own in up to REGISTERS, so that they arrive while the block multiplies others. MASKED: numbers are
// gradients, those of a ReLU with the given outputs, if any.
template <int ROW, int MOST, int THREADS, bool MASKED, int REGISTERS>
struct Loads {
    static constexpr int SIZE = vector_of(ROW), VECTORS = MOST / SIZE;
    static constexpr int OWN = (VECTORS + THREADS - 1) / THREADS, FITTING = REGISTERS / SIZE / (MASKED ? 2 : 1);
    static constexpr int AT_ONCE = OWN < FITTING ? OWN : FITTING;
    Vector<SIZE> numbers[AT_ONCE], masks[MASKED ? AT_ONCE : 1];

    // From vector number `first` on, of `count` numbers.
    HD void load(const float* from, const float* outputs, int count, int first = 0) {
        UNROLL for (int n = 0; n < AT_ONCE; ++n) {
            const int k = first + n * THREADS + (int)threadIdx.x;
            if (k * SIZE >= count) continue;
            numbers[n] = ((const Vector<SIZE>*)from)[k];
            if (MASKED && outputs) masks[n] = ((const Vector<SIZE>*)outputs)[k];
        }
    }
    // Those loaded before, then the others. place(k): where number k is from `to` on, or -1 to leave it out.
    template <class Place>
    HD void store(float* to, const float* from, const float* outputs, int count, Place place) {
        for (int first = 0; first * SIZE < count; first += AT_ONCE * THREADS) {
            if (OWN > AT_ONCE && first) load(from, outputs, count, first);
            store_loaded(to, outputs != nullptr, count, first, place);
        }
    }
    template <class Place>
    HD void store_loaded(float* to, bool masked, int count, int first, Place place) {
        UNROLL for (int n = 0; n < AT_ONCE; ++n) {
            const int k = (first + n * THREADS + (int)threadIdx.x) * SIZE, at = place(k);
            if (k >= count || at < 0) continue;
            Vector<SIZE> rounded;
            UNROLL for (int e = 0; e < SIZE; ++e) {
                bool is_zero = MASKED && masked && masks[n].number[e] <= 0;
                Tf32::store(rounded.number + e, is_zero ? 0 : numbers[n].number[e]);
            }
            *(Vector<SIZE>*)(to + at) = rounded;
        }
    }
};

// Images of HEIGHT x WIDTH cells of CHANNELS numbers in shared memory with a MARGIN of zeros, and ROWS x COLUMNS
// windows, STRIDE cells apart. A cell has PITCH words.
template <int HEIGHT, int WIDTH, int CHANNELS, int MARGIN, int ROWS, int COLUMNS, int KERNEL, int STRIDE, int PITCH>
struct Images {
    static constexpr int DEPTH = padded(CHANNELS, STEP);  // numbers of a cell in a row of the matrix of windows
    static constexpr int CELL = PITCH, CELL_NUMBERS = CHANNELS;
    static constexpr int HIGH = (ROWS - 1) * STRIDE + KERNEL, WIDE = (COLUMNS - 1) * STRIDE + KERNEL;
    static constexpr int WORDS = HIGH * WIDE * PITCH, NUMBERS = HEIGHT * WIDTH * CHANNELS, WINDOWS = ROWS * COLUMNS;
    static_assert(PITCH >= DEPTH && PITCH % 4 == 0, "a cell has all its channels, and vectors of them");

    // Where number k is, counted over the images; -1 in cells outside of all windows.
    HD static int place(int k) {
        int cell = k / CHANNELS, x = cell % WIDTH + MARGIN, y = cell / WIDTH % HEIGHT + MARGIN;
        int at = cell / (WIDTH * HEIGHT) * WORDS + (y * WIDE + x) * PITCH + k % CHANNELS;
        return x < WIDE && y < HIGH ? at : -1;
    }
    // Where window number k begins, counted over the images.
    HD static int window(int k) {
        int at = k % WINDOWS;
        return k / WINDOWS * WORDS + (at / COLUMNS * WIDE + at % COLUMNS) * STRIDE * PITCH;
    }
    // From the beginning of a window to one of its cells.
    HD static int offset(int place) { return (place / KERNEL * WIDE + place % KERNEL) * PITCH; }
};

// Addresses of 8 neighbouring cells are in different banks of shared memory.
HD constexpr int cell_pitch(int channels) { return padded(channels, STEP) + STEP / 2; }
template <class Shape>
struct Inputs : Images<Shape::HEIGHT, Shape::WIDTH, Shape::CHANNELS, Shape::PADDING, Shape::OUT_HEIGHT,
                       Shape::OUT_WIDTH, Shape::KERNEL, Shape::STRIDE, cell_pitch(Shape::CHANNELS)> {};
template <class Shape>
struct OutputGradients : Images<Shape::OUT_HEIGHT, Shape::OUT_WIDTH, Shape::FILTERS, Shape::KERNEL - 1 - Shape::PADDING,
                                Shape::HEIGHT, Shape::WIDTH, Shape::KERNEL, 1, cell_pitch(Shape::FILTERS)> {};

// Sums over windows, of up to IMAGES images at a time. BACK: from the gradients of outputs to those of inputs, which is
// a convolution with the window turned by half a circle, and with filters and channels exchanged.
template <class Shape, class Source, int OUTPUTS, int IMAGES, bool BACK>
struct Sums {
    static constexpr int CHANNELS = Shape::CHANNELS, FILTERS = Shape::FILTERS, PLACES = Shape::KERNEL * Shape::KERNEL;
    static constexpr int WARPS = FORWARD_THREADS / 32, COLUMNS = padded(OUTPUTS, 16);
    // The matrix of weights has a row for each output, in which a place has as many words as a cell of the images: 4
    // modulo 8, so that stores of neighbouring places, and loads of neighbouring rows, are spread over the banks.
    static constexpr int PITCH = PLACES * Source::CELL | 4, WEIGHT_WORDS = COLUMNS * PITCH;
    typedef Loads<Source::CELL_NUMBERS, IMAGES * Source::NUMBERS, FORWARD_THREADS, BACK, 32> NextImages;
    static constexpr int NEIGHBORS = OUTPUTS % 2 == 0 ? 2 : 1;  // outputs of a lane that are moved together
    typedef Vector<NEIGHBORS> Numbers;

    // Whether products read padding, which must be clear.
    static constexpr bool PADDED = Source::CELL_NUMBERS % STEP != 0 || OUTPUTS % 16 != 0;

    // Weights (FILTERS, CHANNELS, KERNEL, KERNEL) of torch on their way to shared memory, many of a thread at once.
    struct Weights {
        static constexpr int NUMBERS = FILTERS * CHANNELS * PLACES, SIZE = vector_of(NUMBERS);
        static constexpr int VECTORS = NUMBERS / SIZE, OWN = (VECTORS + FORWARD_THREADS - 1) / FORWARD_THREADS;
        static constexpr int AT_ONCE = OWN < 48 / SIZE ? OWN : 48 / SIZE;
        Vector<SIZE> numbers[AT_ONCE];

        HD static int vector(int n) { return n * FORWARD_THREADS + (int)threadIdx.x; }
        HD void load(const float* from, int first = 0) {
            UNROLL for (int n = 0; n < AT_ONCE; ++n) {
                if (vector(first + n) < VECTORS) numbers[n] = ((const Vector<SIZE>*)from)[vector(first + n)];
            }
        }
        // Those loaded before, then the others.
        HD void store(float* weights, const float* from) {
            for (int first = 0; first < OWN; first += AT_ONCE) {
                if (first) load(from, first);
                store_loaded(weights, first);
            }
        }
        HD void store_loaded(float* weights, int first) {
            UNROLL for (int n = 0; n < AT_ONCE; ++n) {
                if (vector(first + n) >= VECTORS) continue;
                const int k = vector(first + n) * SIZE;
                int place = k % PLACES, channel = k / PLACES % CHANNELS, filter = k / (PLACES * CHANNELS);
                UNROLL for (int e = 0; e < SIZE; ++e) {
                    int output = BACK ? channel : filter, input = BACK ? filter : channel;
                    int column = (BACK ? PLACES - 1 - place : place) * Source::CELL + input;
                    Tf32::store_weight(weights + output * PITCH + column, numbers[n].number[e]);
                    if (++place < PLACES) continue;
                    place = 0;
                    if (++channel < CHANNELS) continue;
                    channel = 0;
                    ++filter;
                }
            }
        }
    };

    // A warp's tile of 16 M windows and 16 N outputs. The bits of a sum are those of any other shape of a tile.
    template <int M, int N>
    struct Tile {
        struct Factors {
            Tf32::Factor windows[M][1], weights[N][1];
        };
        const float *window[M], *weights;
        float sums[M][N][2][4];

        HD Tile(const float* weights, const float* images, int first, int num_windows, int column)
            : weights(weights + column * PITCH), sums() {
            UNROLL for (int m = 0; m < M; ++m) {
                int k = first + 16 * m + tensor_core::lane() % 16;
                window[m] = images + Source::window(k < num_windows ? k : 0) + tensor_core::lane() / 16 * (STEP / 2);
            }
        }
        HD Factors factors(int place, int channel) const {
            Factors out;
            const int at = Source::offset(place) + channel;
            UNROLL for (int m = 0; m < M; ++m) tensor_core::load_matrices(out.windows[m][0].word, window[m] + at);
            UNROLL for (int n = 0; n < N; ++n) {
                out.weights[n][0] = Tf32::b_along<true>(weights, PITCH, 16 * n, place * Source::CELL + channel);
            }
            return out;
        }
        // The factors of a step are loaded during the step before; those after the last step are not used.
        HD void multiply() {
            Factors next = factors(0, 0);
            for (int place = 0; place < PLACES; ++place) {
                UNROLL for (int channel = 0; channel < Source::DEPTH; channel += STEP) {
                    const Factors now = next;
                    if (channel + STEP < Source::DEPTH)
                        next = factors(place, channel + STEP);
                    else
                        next = factors(place + 1 < PLACES ? place + 1 : 0, 0);
                    UNROLL for (int n = 0; n < N; ++n) {
                        UNROLL for (int m = 0; m < M; ++m) {
                            Tf32::multiply(sums[m][n], now.windows[m], now.weights[n], true);
                        }
                    }
                }
            }
        }
        // The outputs of the tile's windows, of which `windows` exist, to put(row of the tile, output, numbers).
        template <class Put>
        HD void store(const float* biases, bool relu, int windows, int column, Put put) const {
            UNROLL for (int k = 0; k < 4 * N; k += NEIGHBORS) {  // of the lane's outputs of a window
                const int output = column + k / 2 * 8 + 2 * tensor_core::member() + k % 2;
                if (output >= OUTPUTS) continue;
                float bias[NEIGHBORS];
                UNROLL for (int e = 0; e < NEIGHBORS; ++e) bias[e] = BACK ? 0 : biases[output + e];
                UNROLL for (int r = 0; r < 2 * M; ++r) {
                    const int row = 8 * r + tensor_core::group();
                    Numbers out;
                    UNROLL for (int e = 0; e < NEIGHBORS; ++e) {
                        float x = sums[r / 2][k / 4][k / 2 % 2][r % 2 * 2 + k % 2 + e] + bias[e];
                        out.number[e] = relu && x < 0 ? 0 : x;
                    }
                    if (row < windows) put(row, output, out);
                }
            }
        }
    };

    template <int M, int N, class Put>
    HD static void tiles(const float* weights, const float* images, const float* biases, bool relu, int windows,
                         Put put) {
        constexpr int ACROSS = COLUMNS / (16 * N);
        for (int k = warp(); k < (windows + 16 * M - 1) / (16 * M) * ACROSS; k += WARPS) {
            const int first = k / ACROSS * 16 * M, column = k % ACROSS * 16 * N;
            Tile<M, N> tile(weights, images, first, windows, column);
            tile.multiply();
            tile.store(biases, relu, windows - first, column,
                       [&](int row, int output, Numbers numbers) { put(first + row, output, numbers); });
        }
    }
    // The outputs of windows, to put(window, output, numbers). Few windows are spread over more warps.
    template <class Put>
    HD static void multiply(const float* weights, const float* images, const float* biases, bool relu, int windows,
                            Put put) {
        if ((windows + 15) / 16 * (COLUMNS / 16) <= WARPS)
            tiles<1, 1>(weights, images, biases, relu, windows, put);
        else
            tiles<2, COLUMNS / 16>(weights, images, biases, relu, windows, put);
    }

    // A block takes `images_at_once` images at a time, or fewer.
    HD static void all(const float* sources, const float* masks, const float* given, const float* biases,
                       float* outputs, bool relu, i64 num_images, i32 images_at_once) {
        float *weights = shared(), *images = weights + WEIGHT_WORDS;
        const i64 stride = (i64)gridDim.x * images_at_once;
        i64 first = (i64)blockIdx.x * images_at_once;
        auto count = [&] {
            i64 left = num_images - first;
            return left < images_at_once ? left < 0 ? 0 : (int)left : images_at_once;
        };
        auto source = [&](const float* of) { return of ? of + first * Source::NUMBERS : nullptr; };
        Weights own_weights;
        own_weights.load(given);
        NextImages next;
        next.load(source(sources), source(masks), count() * Source::NUMBERS);
        if (PADDED) clear(weights, WEIGHT_WORDS);
        clear(images, images_at_once * Source::WORDS);
        __syncthreads();
        own_weights.store(weights, given);
        while (first < num_images) {
            next.store(images, source(sources), source(masks), count() * Source::NUMBERS, Source::place);
            __syncthreads();
            const int windows = count() * Source::WINDOWS;
            float* to = outputs + first * Source::WINDOWS * OUTPUTS;
            first += stride;
            next.load(source(sources), source(masks), count() * Source::NUMBERS);
            multiply(weights, images, biases, relu, windows, [&](int window, int output, Numbers numbers) {
                store_vector(to + window * OUTPUTS + output, numbers);
            });
            __syncthreads();
        }
    }
};

}  // namespace convolution
