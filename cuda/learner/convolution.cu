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
template <int HEIGHT, int WIDTH, int CHANNELS, int MARGIN, int ROWS, int COLUMNS, int STRIDE, int PITCH>
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

// Sums over windows, of up to IMAGES images at a time. BACK: from the gradients of outputs to those of inputs, which is
// a convolution with the window turned by half a circle, and with filters and channels exchanged.
template <class Source, int OUTPUTS, int IMAGES, bool BACK>
struct Sums {
    static constexpr int WARPS = FORWARD_THREADS / 32, COLUMNS = padded(OUTPUTS, 16);
    // The matrix of weights has a row for each output, in which a place has as many words as a cell of the images: 4
    // modulo 8, so that stores of neighbouring places, and loads of neighbouring rows, are spread over the banks.
    static constexpr int PITCH = PLACES * Source::CELL | 4, WEIGHT_WORDS = COLUMNS * PITCH;
    typedef Loads<Source::CELL_NUMBERS, IMAGES * Source::NUMBERS, FORWARD_THREADS, BACK, 32> NextImages;

    // Whether products read padding, which must be clear.
    static constexpr bool PADDED = Source::CELL_NUMBERS % STEP != 0 || OUTPUTS % 16 != 0;

    // Weights (FILTERS, CHANNELS, KERNEL, KERNEL) of torch on their way to shared memory, many of a thread at once.
    struct Weights {
        static constexpr int NUMBERS = FILTERS * CHANNELS * PLACES, SIZE = vector_of(NUMBERS);
        static constexpr int VECTORS = NUMBERS / SIZE, OWN = (VECTORS + FORWARD_THREADS - 1) / FORWARD_THREADS;
        static constexpr int AT_ONCE = OWN < 40 / SIZE ? OWN : 40 / SIZE;
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
        // Into the rows of the tile's windows, of which `windows` exist.
        HD void store(float* outputs, const float* biases, bool relu, int windows, int column) const {
            constexpr int SIZE = OUTPUTS % 2 == 0 ? 2 : 1;
            UNROLL for (int k = 0; k < 4 * N; k += SIZE) {  // of the lane's outputs of a window
                const int output = column + k / 2 * 8 + 2 * tensor_core::member() + k % 2;
                if (output >= OUTPUTS) continue;
                float bias[SIZE];
                UNROLL for (int e = 0; e < SIZE; ++e) bias[e] = BACK ? 0 : biases[output + e];
                UNROLL for (int r = 0; r < 2 * M; ++r) {
                    const int row = 8 * r + tensor_core::group();
                    Vector<SIZE> out;
                    UNROLL for (int e = 0; e < SIZE; ++e) {
                        float x = sums[r / 2][k / 4][k / 2 % 2][r % 2 * 2 + k % 2 + e] + bias[e];
                        out.number[e] = relu && x < 0 ? 0 : x;
                    }
                    if (row < windows) store_vector(outputs + row * OUTPUTS + output, out);
                }
            }
        }
    };

    template <int M, int N>
    HD static void multiply(const float* weights, const float* images, const float* biases, float* outputs, bool relu,
                            int windows) {
        constexpr int ACROSS = COLUMNS / (16 * N);
        for (int k = warp(); k < (windows + 16 * M - 1) / (16 * M) * ACROSS; k += WARPS) {
            const int row = k / ACROSS * 16 * M, column = k % ACROSS * 16 * N;
            Tile<M, N> tile(weights, images, row, windows, column);
            tile.multiply();
            tile.store(outputs + row * OUTPUTS, biases, relu, windows - row, column);
        }
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
            // Few windows are spread over more warps.
            if ((windows + 15) / 16 * (COLUMNS / 16) <= WARPS)
                multiply<1, 1>(weights, images, biases, to, relu, windows);
            else
                multiply<2, COLUMNS / 16>(weights, images, biases, to, relu, windows);
            __syncthreads();
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

// Addresses of 8 neighbouring cells are in different banks of shared memory.
typedef Images<HEIGHT, WIDTH, CHANNELS, PADDING, OUT_HEIGHT, OUT_WIDTH, STRIDE, padded(CHANNELS, STEP) + 4> Inputs;
typedef Sums<Inputs, FILTERS, FORWARD_IMAGES, false> Forward;
static_assert(FORWARD_BYTES == 4 * (Forward::WEIGHT_WORDS + FORWARD_IMAGES * Inputs::WORDS), "as Python has it");
static_assert(WEIGHT_BYTES == 4 * WeightGradients::SHARED_WORDS, "as Python has it");
#if HAS_INPUT_GRADIENTS
typedef Images<OUT_HEIGHT, OUT_WIDTH, FILTERS, KERNEL - 1 - PADDING, HEIGHT, WIDTH, 1, padded(FILTERS, STEP) + 4>
    OutputGradients;
typedef Sums<OutputGradients, CHANNELS, BACK_IMAGES, true> Back;
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
