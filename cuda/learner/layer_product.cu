// SPDX-License-Identifier: Apache-2.0
// Products of the rows of a matrix with the weights of one layer, in bfloat16 on tensor cores: of inputs to what the
// next layer reads, or of gradients back. Compiled with the constants of one product: the layer's weights stay in
// shared memory, and what follows on the product needs no pass over memory of its own. The bits of a row do not depend
// on the rows beside it.
#include "layer_elements.cuh"

namespace layerwise {

typedef tensor_core::Bfloat16 Precision;

constexpr bool BACKWARD = KIND == GRADIENTS;

// The padded weights have a row for each of OUTPUTS and a column for each of INPUTS. The product sums over the columns
// or, BACKWARD, over the rows; UNITS of its columns are no padding.
HD constexpr int whole(int size) { return (size + 15) / 16 * 16; }
constexpr int SUMMED = BACKWARD ? OUTPUTS : INPUTS, COLUMNS = BACKWARD ? INPUTS : OUTPUTS;
constexpr int THREADS = 256, ROWS = 64, ROW_WARPS = 2, COLUMN_WARPS = 4;  // of a block
constexpr int ROW_TILES = ROWS / 16 / ROW_WARPS, TILE_UNITS = whole(COLUMNS) / 16;
constexpr int WARP_UNITS = (TILE_UNITS + COLUMN_WARPS - 1) / COLUMN_WARPS;
// Elements from one row to the next in shared memory; 8 more against bank conflicts.
constexpr int WEIGHT_PITCH = whole(INPUTS) + 8, ROW_PITCH = whole(SUMMED) + 8, OUT_PITCH = whole(COLUMNS) + 8;
// Bytes of shared memory before each part, and of all; the same as Product.shared_bytes in layerwise_kernels.py.
constexpr int ROWS_AT = 2 * whole(OUTPUTS) * WEIGHT_PITCH, OUT_AT = ROWS_AT + 2 * ROWS * ROW_PITCH;
constexpr int BIAS_AT = OUT_AT + (KIND == RESULTS ? 4 : 2) * ROWS * OUT_PITCH;
constexpr int SHARED_BYTES = BIAS_AT + 4 * whole(COLUMNS);

extern __shared__ __align__(16) unsigned char shared_memory[];
HD Element* weights() { return (Element*)shared_memory; }
HD Element* tile_rows() { return (Element*)(shared_memory + ROWS_AT); }
HD Element* tile_out() { return (Element*)(shared_memory + OUT_AT); }
HD float* tile_results() { return (float*)(shared_memory + OUT_AT); }
HD float* biases() { return (float*)(shared_memory + BIAS_AT); }

// Packs of a tile of rows on their way from device memory, those of a thread.
template <int PACKS>
struct Loads {
    static constexpr int COUNT = (ROWS * PACKS + THREADS - 1) / THREADS;
    Pack pack[COUNT];

    template <class F>
    HD static void each(i64 rows, F f) {
        UNROLL for (int k = 0; k < COUNT; ++k) {
            int at = k * THREADS + (int)threadIdx.x;
            if (at < ROWS * PACKS && at / PACKS < rows) f(k, at);
        }
    }
    // The first of `rows`, at most ROWS, is at `from`.
    HD void load(const Pack* from, i64 rows) {
        each(rows, [&](int k, int at) { pack[k] = from[at]; });
    }
    HD void store(i64 rows) const {
        each(rows, [&](int k, int at) { *((Pack*)(tile_rows() + at / PACKS * ROW_PITCH) + at % PACKS) = pack[k]; });
    }
};

HD void load_weights(const layer_product_Arguments& args) {
    for (int k = threadIdx.x; k < SHARED_BYTES / 16; k += THREADS) ((Pack*)shared_memory)[k] = {};
    __syncthreads();
    constexpr int PACKS = INPUTS / WIDTH;
    for (int k = threadIdx.x; k < OUTPUTS * PACKS; k += THREADS)
        *((Pack*)(weights() + k / PACKS * WEIGHT_PITCH) + k % PACKS) = ((const Pack*)args.weights)[k];
    if (KIND == ACTIVATIONS)
        for (int k = threadIdx.x; k < UNITS; k += THREADS) biases()[k] = args.parameters[args.bias + k];
}

// The product of the tile's rows, to tile_out() or tile_results().
HD void multiply_tile() {
    int warp = threadIdx.x / 32, column_warp = warp % COLUMN_WARPS;
    int first_row = warp / COLUMN_WARPS * 16 * ROW_TILES;
    float sums[ROW_TILES][WARP_UNITS][2][4] = {};
    auto has_unit = [&](int u) {
        return TILE_UNITS % COLUMN_WARPS == 0 || u * COLUMN_WARPS + column_warp < TILE_UNITS;
    };
    _Pragma("unroll 2") for (int k = 0; k < whole(SUMMED); k += 16) {
        tensor_core::Four a[ROW_TILES][1];
        UNROLL for (int m = 0; m < ROW_TILES; ++m) {
            a[m][0] = Precision::a_of_rows(tile_rows(), ROW_PITCH, first_row + 16 * m, k);
        }
        UNROLL for (int u = 0; u < WARP_UNITS; ++u) {
            if (!has_unit(u)) continue;
            int column = 16 * (u * COLUMN_WARPS + column_warp);
            tensor_core::Four b[1];
            if constexpr (BACKWARD)
                b[0] = Precision::b_of_inputs(weights(), WEIGHT_PITCH, column, k);
            else
                b[0] = Precision::b_of_outputs<true>(weights(), WEIGHT_PITCH, column, k);
            UNROLL for (int m = 0; m < ROW_TILES; ++m) Precision::multiply(sums[m][u], a[m], b, true);
        }
    }
    UNROLL for (int u = 0; u < WARP_UNITS; ++u) {
        if (!has_unit(u)) continue;
        int first = 16 * (u * COLUMN_WARPS + column_warp);
        UNROLL for (int m = 0; m < ROW_TILES; ++m) {
            float (&x)[2][4] = sums[m][u];
            int row = first_row + 16 * m;
            UNROLL for (int half = 0; half < 2; ++half) {
                UNROLL for (int k = 0; k < 4; ++k) {
                    int column = first + 8 * half + 2 * tensor_core::member() + k % 2;
                    if (KIND == ACTIVATIONS) {
                        float y = activation(x[half][k] + biases()[column]);
                        x[half][k] = column < UNITS ? y : 0.0f;
                    } else if (KIND == RESULTS) {
                        tile_results()[(row + tensor_core::group() + k / 2 * 8) * OUT_PITCH + column] = x[half][k];
                    }
                }
            }
            if (KIND == RESULTS) continue;
            u32 words[Precision::TILE_WORDS];
            Precision::round_tile(x, words);
            Precision::store_tile(tile_out(), OUT_PITCH, row, first, words);
        }
    }
}

// Copies a tile of float32 results.
HD void write_results(float* out, i64 rows) {
    constexpr int PACKS = COLUMNS / 4;
    for (int k = threadIdx.x; k < ROWS * PACKS; k += THREADS)
        if (k / PACKS < rows) ((Pack*)out)[k] = *((Pack*)(tile_results() + k / PACKS * OUT_PITCH) + k % PACKS);
}

constexpr int OUT_PACKS = COLUMNS / WIDTH;
HD Pack out_pack(int at) { return *((Pack*)(tile_out() + at / OUT_PACKS * OUT_PITCH) + at % OUT_PACKS); }

// Adds up what the threads of a column have, in order. A thread has the same columns in all its packs.
static_assert(!BACKWARD || THREADS % OUT_PACKS == 0, "a thread has one pack of each row");
HD void write_sums(const float* of_thread, float* out) {
    float* of_threads = (float*)tile_rows();
    static_assert(!BACKWARD || THREADS * WIDTH * 4 <= BIAS_AT - ROWS_AT, "the sums fit");
    __syncthreads();  // the tile has been read
    UNROLL for (int j = 0; j < WIDTH; ++j) of_threads[(int)threadIdx.x * WIDTH + j] = of_thread[j];
    __syncthreads();
    for (int k = threadIdx.x; k < UNITS; k += THREADS) {
        float sum = of_threads[k];
        for (int group = 1; group < THREADS / OUT_PACKS; ++group) sum += of_threads[group * COLUMNS + k];
        out[k] = sum;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < THREADS * WIDTH / 4; k += THREADS) ((Pack*)of_threads)[k] = {};  // padding is 0
    __syncthreads();
}

// Groups of `tile_rows` rows, a multiple of ROWS, whose sums a block writes.
HD void layer_product(const layer_product_Arguments& args) {
    typedef Loads<SUMMED / WIDTH> RowLoads;
    typedef Loads<BACKWARD ? OUT_PACKS : 1> OutputLoads;
    load_weights(args);
    RowLoads loads;  // of the next tile
    auto load = [&](i64 first) {
        if (first < args.rows) loads.load((const Pack*)args.inputs + first * (SUMMED / WIDTH), args.rows - first);
    };
    load(blockIdx.x * args.tile_rows);
    for (i64 group = blockIdx.x; group * args.tile_rows < args.rows; group += gridDim.x) {
        i64 first = group * args.tile_rows, end = smaller(first + args.tile_rows, args.rows);
        float sums[WIDTH] = {};
        for (; first < end; first += ROWS) {
            loads.store(end - first);
            __syncthreads();
            load(first + ROWS < end ? first + ROWS : (group + gridDim.x) * args.tile_rows);
            OutputLoads outputs;
            if (BACKWARD) outputs.load((const Pack*)args.activations + first * OUT_PACKS, end - first);
            multiply_tile();
            __syncthreads();
            if constexpr (KIND == RESULTS) {
                write_results((float*)args.outputs + first * COLUMNS, end - first);
            } else {
                Pack* out = (Pack*)args.outputs + first * OUT_PACKS;
                Loads<OUT_PACKS>::each(end - first, [&](int k, int at) {
                    Pack pack = out_pack(at);
                    if constexpr (BACKWARD) {
                        float x[WIDTH], y[WIDTH];
                        unpack(pack, x);
                        unpack(outputs.pack[k], y);
                        UNROLL for (int j = 0; j < WIDTH; ++j) {
                            x[j] = at % OUT_PACKS * WIDTH + j < UNITS ? activation_gradient(x[j], y[j]) : 0.0f;
                            sums[j] += x[j];
                        }
                        pack = packed(x);
                    }
                    out[at] = pack;
                });
            }
        }
        if constexpr (BACKWARD) write_sums(sums, args.sums + group * args.sums_pitch + args.first_sum);
    }
}

}  // namespace layerwise

KERNEL_WITH_LAUNCH_BOUNDS(layer_product, layerwise::THREADS, layerwise::MIN_BLOCKS) { layerwise::layer_product(args); }
