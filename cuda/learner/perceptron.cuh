// SPDX-License-Identifier: Apache-2.0
// A multi-layer perceptron with an actor and a critic head on tensor cores. A block has a tile of rows: inputs,
// activations and their gradients are in its shared memory, sums of the weights' gradients in its registers.
//
// Compiled with the constants that gpu_vecenv/train/perceptron.py writes (namespace perceptron). Layer L = 0 … HIDDEN
// has SIZES[L] inputs, layer HIDDEN is the head. A tower is a trunk with its head: one tower if actor and critic share
// the trunk, else two, and then a block has one of them. The head of a critic is as wide as the actor's, with weights
// of 0.
//
// Warps form a grid of ROW_WARPS x COLUMN_WARPS over the rows and the columns of a layer's outputs. Columns are counted
// in units of 16; those beyond a layer's size are 0. Matrices in shared memory have rows of pitch(columns) words,
// weights are stored as in torch, [outputs][inputs].
#pragma once
#include "tensor_core.cuh"

namespace perceptron {

extern __shared__ __align__(16) unsigned char shared_memory[];

typedef tensor_core::PRECISION Precision;
typedef Precision::Word Word;
typedef Precision::Factor Factor;

constexpr int WARPS = ROW_WARPS * COLUMN_WARPS, THREADS = 32 * WARPS;
constexpr int ROW_TILES = ROWS / 16 / ROW_WARPS;      // of a warp
constexpr int PARAMETERS = ACTOR_OUTPUTS + LOG_STDS;  // of the distribution
constexpr int METRICS = 5;                            // of `loss` in ppo.py
static_assert(ROWS % (16 * ROW_WARPS) == 0, "a whole number of tiles for each warp");
constexpr int RESULT_PITCH = (PARAMETERS + 1) | 1;  // floats; odd, against bank conflicts
constexpr int SUM_PITCH = (PARAMETERS + 1 + METRICS) | 1;

HD constexpr int aligned(int bytes) { return (bytes + 15) / 16 * 16; }
HD constexpr int units(int columns) { return (columns + 15) / 16; }
HD constexpr int pitch(int columns) { return Precision::pitch(16 * units(columns)); }
// The network's inputs are padded to one step of a product only.
HD constexpr int input_pitch(int layer) {
    constexpr int STEP = Precision::STEP;
    return layer == 0 ? Precision::pitch((SIZES[0] + STEP - 1) / STEP * STEP) : pitch(SIZES[layer]);
}
HD constexpr int divided(int a, int b) { return (a + b - 1) / b; }

constexpr int HEAD_OUTPUTS = ACTOR_OUTPUTS + (TOWERS == 1 ? 1 : 0);
template <int L>
constexpr int INPUTS = SIZES[L];
template <int L>
constexpr int OUTPUTS = L < HIDDEN ? SIZES[L + 1] : HEAD_OUTPUTS;
template <int L>
constexpr int INPUT_PITCH = input_pitch(L);
template <int L>
constexpr int OUTPUT_PITCH = pitch(OUTPUTS<L>);
template <int N>
constexpr int UNITS = units(N);
template <int N>
constexpr int WARP_UNITS = divided(units(N), COLUMN_WARPS);
// Whether the last unit has more than 8 columns, or there are several: then both halves of each are multiplied.
template <int N>
constexpr bool BOTH_HALVES = units(N) > 1 || N > 8;

// Bytes in shared memory, and their offsets, in the order of the functions below.
HD constexpr int weight_bytes(int layer) {
    int outputs = layer < HIDDEN ? SIZES[layer + 1] : HEAD_OUTPUTS;
    return 16 * units(outputs) * input_pitch(layer) * (int)sizeof(Word) + 16 * units(outputs) * (int)sizeof(float);
}
HD constexpr int weights_end(int layers) {
    int bytes = SHARED_FIRST;
    for (int layer = 0; layer < layers; ++layer) bytes += weight_bytes(layer);
    return bytes;
}
HD constexpr int rows_end(int layers) {
    int bytes = weights_end(HIDDEN + 1);
    for (int layer = 0; layer < layers; ++layer) bytes += ROWS * input_pitch(layer) * (int)sizeof(Word);
    return bytes;
}
constexpr int ROWS_END = rows_end(HIDDEN + 1);
constexpr int INDICES_END = ROWS_END + ROWS * (int)sizeof(i64);
constexpr int SCALES_END = INDICES_END + aligned(NORMALIZE_OBS ? 2 * SIZES[0] * (int)sizeof(float) : 0);
constexpr int RESULTS_END = SCALES_END + ROWS * RESULT_PITCH * (int)sizeof(float);
constexpr int RESULT_GRADIENTS_END = RESULTS_END + ROWS * RESULT_PITCH * (int)sizeof(float);
constexpr int SUMS_END = RESULT_GRADIENTS_END + ROWS * SUM_PITCH * (int)sizeof(float);
constexpr int DELTAS_END = SUMS_END + ROWS * pitch(HEAD_OUTPUTS) * (int)sizeof(Word);
static_assert(SHARED_FIRST + SHARED_BYTES == (FORWARD_ONLY ? RESULTS_END : DELTAS_END), "as Python allocates them");

template <int L>
constexpr int WEIGHTS_AT = weights_end(L);
template <int L>
constexpr int BIASES_AT = weights_end(L + 1) - 16 * units(L < HIDDEN ? SIZES[L + 1] : HEAD_OUTPUTS) * 4;
template <int L>
constexpr int ROWS_AT = rows_end(L);

template <int L>
HD Word* weights() {
    return (Word*)(shared_memory + WEIGHTS_AT<L>);
}
template <int L>
HD float* biases() {
    return (float*)(shared_memory + BIASES_AT<L>);
}
// Inputs of layer L. In the backward pass the gradients with respect to the inputs of its activation take their place.
template <int L>
HD Word* rows() {
    return (Word*)(shared_memory + ROWS_AT<L>);
}
HD i64* indices() { return (i64*)(shared_memory + ROWS_END); }            // of the tile's rows; -1: none
HD float* obs_scales() { return (float*)(shared_memory + INDICES_END); }  // means, then standard deviations
// One row's parameters of the distribution and then its value; their gradients; sums of gradients and metrics.
HD float* result_row(int row) { return (float*)(shared_memory + SCALES_END) + row * RESULT_PITCH; }
HD float* gradient_row(int row) { return (float*)(shared_memory + RESULTS_END) + row * RESULT_PITCH; }
HD float* sum_row(int row) { return (float*)(shared_memory + RESULT_GRADIENTS_END) + row * SUM_PITCH; }
HD Word* head_deltas() { return (Word*)(shared_memory + SUMS_END); }

HD int lane() { return threadIdx.x % 32; }
HD int warp() { return threadIdx.x / 32; }
HD int group() { return lane() / 4; }
HD int member() { return lane() % 4; }
HD int first_row() { return warp() / COLUMN_WARPS * ROW_TILES * 16; }
HD int unit_of(int k) { return warp() % COLUMN_WARPS + k * COLUMN_WARPS; }

// The threads that compute a row: a warp if it has all columns, else the block. Up to the weights' gradients they wait
// for nobody else.
constexpr bool WARPS_OWN_ROWS = COLUMN_WARPS == 1;
constexpr int OWNERS = WARPS_OWN_ROWS ? 32 : THREADS, OWNED_ROWS = WARPS_OWN_ROWS ? 16 * ROW_TILES : ROWS;
static_assert(OWNED_ROWS <= OWNERS, "a thread for each row");
HD int owner() { return WARPS_OWN_ROWS ? lane() : (int)threadIdx.x; }
HD int first_owned_row() { return WARPS_OWN_ROWS ? first_row() : 0; }
HD void sync_owners() {
    if constexpr (WARPS_OWN_ROWS)
        __syncwarp();
    else
        __syncthreads();
}

HD bool has_actor(int tower) { return tower == 0; }
HD bool has_value(int tower) { return tower == TOWERS - 1; }
// Where an output of the head is in a row of the results; -1 if the tower does not have it.
HD int result_of(int tower, int output) {
    if (has_actor(tower) && output < ACTOR_OUTPUTS) return output;
    return has_value(tower) && output == (has_actor(tower) ? ACTOR_OUTPUTS : 0) ? PARAMETERS : -1;
}

// Indices in the flat tensor of all parameters, of the weight from input 0 to an output and of its bias; -1: none.
template <int L>
HD i64 weight_index(int tower, int output) {
    int result = L < HIDDEN ? output : result_of(tower, output);
    if (output >= OUTPUTS<L> || result < 0) return -1;
    return L == HIDDEN && result == PARAMETERS ? VALUE_WEIGHTS : WEIGHT_INDICES[tower][L] + (i64)output * INPUTS<L>;
}
template <int L>
HD i64 bias_index(int tower, int output) {
    int result = L < HIDDEN ? output : result_of(tower, output);
    if (output >= OUTPUTS<L> || result < 0) return -1;
    return L == HIDDEN && result == PARAMETERS ? VALUE_BIAS : BIAS_INDICES[tower][L] + output;
}

// Copies a matrix to rows of `pitch` words.
HD void copy_matrix(const float* from, int rows, int columns, Word* to, int pitch) {
    constexpr int BATCH = 8;  // loads in flight
    for (int first = threadIdx.x; first < rows * columns; first += BATCH * THREADS) {
        float x[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * THREADS;
            x[b] = k < rows * columns ? from[k] : 0.0f;
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * THREADS;
            if (k < rows * columns) Precision::store(to + k / columns * pitch + k % columns, x[b]);
        }
    }
}

template <int L>
HD void load_layers(const float* parameters, int tower) {
    const float *matrix = parameters + WEIGHT_INDICES[tower][L], *bias = parameters + BIAS_INDICES[tower][L];
    if constexpr (L < HIDDEN) {
        copy_matrix(matrix, OUTPUTS<L>, INPUTS<L>, weights<L>(), INPUT_PITCH<L>);
        for (int k = threadIdx.x; k < OUTPUTS<L>; k += THREADS) biases<L>()[k] = bias[k];
        load_layers<L + 1>(parameters, tower);
    } else {
        int actor_rows = has_actor(tower) ? ACTOR_OUTPUTS : 0;
        copy_matrix(matrix, actor_rows, INPUTS<L>, weights<L>(), INPUT_PITCH<L>);
        for (int k = threadIdx.x; k < actor_rows; k += THREADS) biases<L>()[k] = bias[k];
        if (has_value(tower)) {
            copy_matrix(parameters + VALUE_WEIGHTS, 1, INPUTS<L>, weights<L>() + actor_rows * INPUT_PITCH<L>,
                        INPUT_PITCH<L>);
            if (threadIdx.x == 0) biases<L>()[actor_rows] = parameters[VALUE_BIAS];
        }
    }
}

HD void fill_with_zeros(void* from, const void* to) {
    for (uint4* at = (uint4*)from + threadIdx.x; at < to; at += THREADS) *at = {0, 0, 0, 0};
}

HD float standard_deviation(double variance) { return (float)__dsqrt_rn(variance + 1e-8); }  // as policy.Normalizer

// Everything that all tiles have in common.
HD void load_parameters(const float* parameters, int tower, [[maybe_unused]] const double* obs_mean,
                        [[maybe_unused]] const double* obs_var) {
    fill_with_zeros(shared_memory + SHARED_FIRST, rows<1>());  // columns beyond the sizes stay 0
    __syncthreads();
    load_layers<0>(parameters, tower);
    for (int row = threadIdx.x; row < ROWS; row += THREADS)
        for (int k = 0; k < LOG_STDS; ++k) result_row(row)[ACTOR_OUTPUTS + k] = parameters[LOG_STD_INDEX + k];
    if constexpr (NORMALIZE_OBS) {
        for (int k = threadIdx.x; k < SIZES[0]; k += THREADS) {
            obs_scales()[k] = (float)obs_mean[k];
            obs_scales()[SIZES[0] + k] = standard_deviation(obs_var[k]);
        }
    }
}

// Copies the observations at `indices`, `stride` elements apart, to the inputs of the first layer.
HD void load_obs(const Observation* obs, i64 stride) {
    constexpr int BATCH = 8;  // loads in flight
    const int n = OWNED_ROWS * SIZES[0];
    const i64* own_indices = indices() + first_owned_row();
    Word* own_rows = rows<0>() + first_owned_row() * INPUT_PITCH<0>;
    for (int first = owner(); first < n; first += BATCH * OWNERS) {
        Observation x[BATCH];
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * OWNERS;
            i64 index = k < n ? own_indices[k / SIZES[0]] : -1;
            x[b] = index >= 0 ? obs[index * stride + k % SIZES[0]] : 0;
        }
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * OWNERS, column = k % SIZES[0];
            if (k >= n) continue;
            float value = x[b];
            if constexpr (NORMALIZE_OBS) {
                value = (value - obs_scales()[column]) / obs_scales()[SIZES[0] + column];
                value = math::clamp(value, -OBS_CLIP, OBS_CLIP);
            } else if constexpr (sizeof(Observation) == 1) {
                value = value / 255;
            }
            Precision::store(own_rows + k / SIZES[0] * INPUT_PITCH<0> + column, value);
        }
    }
}

// Adds a product to this warp's tiles of a matrix of N columns: rows of `a`, with K columns, times `b`. That is
// [N][K] if ALONG, else [K][N]. `a` may have infinities if INFINITE.
template <int N, int K, bool ALONG, bool INFINITE>
HD void add_product(const Word* a, int a_pitch, const Word* b, int b_pitch,
                    float (&sums)[ROW_TILES][WARP_UNITS<N>][2][4]) {
    _Pragma("unroll 4") for (int k = 0; k < K; k += Precision::STEP) {
        Factor a_factor[ROW_TILES];
        UNROLL for (int m = 0; m < ROW_TILES; ++m) {
            int row = first_row() + 16 * m;
            a_factor[m] = Precision::factor<INFINITE>(ALONG ? Precision::a_along(a, a_pitch, row, k)
                                                            : Precision::a_along_in_pairs(a, a_pitch, row, k));
        }
        UNROLL for (int u = 0; u < WARP_UNITS<N>; ++u) {
            int unit = unit_of(u);
            if (UNITS<N> % COLUMN_WARPS != 0 && unit >= UNITS<N>) continue;
            Factor b_factor = Precision::factor<false>(ALONG ? Precision::b_along(b, b_pitch, 16 * unit, k)
                                                             : Precision::b_across(b, b_pitch, 16 * unit, k));
            UNROLL for (int m = 0; m < ROW_TILES; ++m)
                Precision::multiply(sums[m][u], a_factor[m], b_factor, BOTH_HALVES<N>);
        }
    }
}

// Calls f(unit of this warp, half, row, column, sums of this column and the next) for this warp's tiles of a matrix of
// N columns.
template <int N, class F>
HD void for_pairs(float (&sums)[ROW_TILES][WARP_UNITS<N>][2][4], F f) {
    UNROLL for (int u = 0; u < WARP_UNITS<N>; ++u) {
        int unit = unit_of(u);
        if (UNITS<N> % COLUMN_WARPS != 0 && unit >= UNITS<N>) continue;
        UNROLL for (int half = 0; half < 2; ++half) {
            UNROLL for (int m = 0; m < ROW_TILES; ++m) {
                UNROLL for (int below = 0; below < 2; ++below)
                    f(u, half, first_row() + 16 * m + group() + 8 * below, 16 * unit + 8 * half + 2 * member(),
                      sums[m][u][half][2 * below], sums[m][u][half][2 * below + 1]);
            }
        }
    }
}

// As nn.Tanh and nn.ReLU, NaN included.
HD float activation(float x) { return RELU ? (x < 0 ? 0.0f : x) : Precision::tanh(x); }
HD float activation_gradient(float gradient, float output) {
    if (RELU) return output <= 0 ? 0.0f : gradient;
    return gradient * (1.0f - output * output);
}

// Layer L of the tile's rows, and those after it. The head writes the results.
template <int L>
HD void forward_layers(int tower) {
    constexpr int N = OUTPUTS<L>;
    float sums[ROW_TILES][WARP_UNITS<N>][2][4] = {};
    for_pairs<N>(sums, [](int, int, int, int column, float& x, float& y) {
        x = biases<L>()[column];
        y = biases<L>()[column + 1];
    });
    add_product<N, INPUTS<L>, true, L == 0>(rows<L>(), INPUT_PITCH<L>, weights<L>(), INPUT_PITCH<L>, sums);
    for_pairs<N>(sums, [=](int, int, int row, int column, float x, float y) {
        if constexpr (L < HIDDEN) {
            // Beyond the size, 0 times an infinite input may be NaN.
            x = N % 16 != 0 && column >= N ? 0.0f : activation(x);
            y = N % 16 != 0 && column + 1 >= N ? 0.0f : activation(y);
            Precision::store_pair(rows<(L < HIDDEN ? L + 1 : L)>() + row * OUTPUT_PITCH<L> + column, x, y);
        } else {
            int of_x = result_of(tower, column), of_y = result_of(tower, column + 1);
            if (of_x >= 0) result_row(row)[of_x] = x;
            if (of_y >= 0) result_row(row)[of_y] = y;
        }
    });
    sync_owners();
    if constexpr (L < HIDDEN) forward_layers<L + 1>(tower);
}

// The grid of warps over the tiles of a weight gradient of `m` x `n` units: the fewest tiles of a warp, then factors.
HD constexpr int warps_over_outputs(int m, int n) {
    int best = 1;
    for (int warps = 1; warps <= WARPS; ++warps) {
        if (WARPS % warps != 0) continue;
        int rows = divided(m, warps), columns = divided(n, WARPS / warps);
        int best_rows = divided(m, best), best_columns = divided(n, WARPS / best);
        int tiles = rows * columns, best_tiles = best_rows * best_columns;
        if (tiles < best_tiles || (tiles == best_tiles && rows + columns < best_rows + best_columns)) best = warps;
    }
    return best;
}

// Gradients of layer L: this warp's tiles of those of the weights, and of a hidden layer this lane's part of the
// columns of those of the biases.
template <int L>
struct LayerGradients {
    static constexpr int M = UNITS<OUTPUTS<L>>, N = UNITS<INPUTS<L>>;
    static constexpr int M_WARPS = warps_over_outputs(M, N), N_WARPS = WARPS / M_WARPS;
    static constexpr int M_TILES = divided(M, M_WARPS), N_TILES = divided(N, N_WARPS);
    float weight[M_TILES][N_TILES][2][4];
    float bias[WARP_UNITS<OUTPUTS<L>>][2][2];

    HD static int m_unit(int k) { return warp() / N_WARPS + k * M_WARPS; }
    HD static int n_unit(int k) { return warp() % N_WARPS + k * N_WARPS; }
    HD static bool has_m(int k) { return M % M_WARPS == 0 || m_unit(k) < M; }
    HD static bool has_n(int k) { return N % N_WARPS == 0 || n_unit(k) < N; }

    // Adds the product of the transposed deltas and the layer's inputs.
    HD void add(const Word* deltas) {
        _Pragma("unroll 4") for (int k = 0; k < ROWS; k += Precision::STEP) {
            Factor b[N_TILES];
            UNROLL for (int n = 0; n < N_TILES; ++n) {
                if (has_n(n))
                    b[n] = Precision::factor<L == 0>(Precision::b_across(rows<L>(), INPUT_PITCH<L>, 16 * n_unit(n), k));
            }
            UNROLL for (int m = 0; m < M_TILES; ++m) {
                if (!has_m(m)) continue;
                Factor a = Precision::factor<false>(Precision::a_across(deltas, OUTPUT_PITCH<L>, 16 * m_unit(m), k));
                UNROLL for (int n = 0; n < N_TILES; ++n) if (has_n(n))
                    Precision::multiply(weight[m][n], a, b[n], BOTH_HALVES<INPUTS<L>>);
            }
        }
    }

    HD void write_weights(float* out, int tower) const {
        UNROLL for (int m = 0; m < M_TILES; ++m) {
            UNROLL for (int n = 0; n < N_TILES; ++n) {
                UNROLL for (int k = 0; k < 8; ++k) {
                    int output = 16 * m_unit(m) + group() + k / 2 % 2 * 8;
                    int input = 16 * n_unit(n) + k / 4 * 8 + 2 * member() + k % 2;
                    i64 first = weight_index<L>(tower, output);
                    if (first >= 0 && input < INPUTS<L>) out[first + input] = weight[m][n][k / 4][k % 4];
                }
            }
        }
    }

    // The sums of ROW_WARPS warps are added in order, in the memory of the deltas.
    HD void write_biases(float* out, int tower) const {
        constexpr int COLUMNS = OUTPUTS<L>;
        float* of_warps = (float*)rows<(L < HIDDEN ? L + 1 : L)>();
        UNROLL for (int u = 0; u < WARP_UNITS<COLUMNS>; ++u) {
            UNROLL for (int k = 0; k < 4; ++k) {
                float sum = bias[u][k / 2][k % 2];
                UNROLL for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                int column = 16 * unit_of(u) + k / 2 * 8 + 2 * member() + k % 2;
                if (group() == 0 && column < COLUMNS) of_warps[warp() / COLUMN_WARPS * COLUMNS + column] = sum;
            }
        }
        __syncthreads();
        for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
            float sum = of_warps[column];
            for (int k = 1; k < ROW_WARPS; ++k) sum += of_warps[k * COLUMNS + column];
            out[bias_index<L>(tower, column)] = sum;
        }
    }
};

// Of the layers 0 … L.
template <int L>
struct Gradients : Gradients<L - 1> {
    LayerGradients<L> layer;

    // From the deltas, the gradients with respect to layer L's outputs before the activation.
    HD void add_layers(const Word* deltas) {
        layer.add(deltas);
        if constexpr (L > 0) {
            constexpr int N = INPUTS<L>;
            float sums[ROW_TILES][WARP_UNITS<N>][2][4] = {};
            add_product<N, OUTPUTS<L>, false, false>(deltas, OUTPUT_PITCH<L>, weights<L>(), INPUT_PITCH<L>, sums);
            __syncthreads();  // all warps have read the layer's inputs
            auto& bias = Gradients<L - 1>::layer.bias;
            for_pairs<N>(sums, [&](int u, int half, int row, int column, float x, float y) {
                Word* at = rows<L>() + row * INPUT_PITCH<L> + column;
                x = N % 16 != 0 && column >= N ? 0.0f : activation_gradient(x, Precision::loaded(at, 0));
                y = N % 16 != 0 && column + 1 >= N ? 0.0f : activation_gradient(y, Precision::loaded(at, 1));
                bias[u][half][0] += x;
                bias[u][half][1] += y;
                Precision::store_pair(at, x, y);
            });
            __syncthreads();
            Gradients<L - 1>::add_layers(rows<L>());
        }
    }

    HD void write(float* out, int tower) const {
        layer.write_weights(out, tower);
        if constexpr (L < HIDDEN) layer.write_biases(out, tower);
        if constexpr (L > 0) Gradients<L - 1>::write(out, tower);
    }
};
template <>
struct Gradients<-1> {};

}  // namespace perceptron
