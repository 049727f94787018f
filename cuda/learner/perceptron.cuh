// SPDX-License-Identifier: Apache-2.0
// A multi-layer perceptron with an actor and a critic head on tensor cores. Some warps of a block, or all of them, have
// a tile of rows: inputs, activations and their gradients are in its part of shared memory, sums of the weights'
// gradients in their registers. The tiles of a block have the weights in common, and wait for each other at no other
// time.
//
// Compiled with the constants that gpu_vecenv/train/perceptron.py writes (namespace perceptron). Layer L = 0 … HIDDEN
// has layer_inputs(L) inputs, layer HIDDEN is the head. A tower is a trunk with its head: one tower if actor and critic
// share the trunk, else two, and then a block has one of them. The head of a critic is as wide as the actor's, with
// weights of 0.
//
// A tile's warps form a grid of ROW_WARPS x COLUMN_WARPS over the rows and the columns of a layer's outputs. Columns
// are counted in units of 16; those beyond a layer's size are 0. A warp that has all columns of its rows may keep a
// layer's outputs in registers, as a factor of the next product.
#pragma once
#include "normalizer.cuh"
#include "tensor_core.cuh"

namespace perceptron {

extern __shared__ __align__(16) unsigned char shared_memory[];

typedef tensor_core::PRECISION Precision;
typedef Precision::Word Word;
typedef Precision::Factor Factor;

constexpr int WARPS = ROW_WARPS * COLUMN_WARPS, THREADS = 32 * WARPS;  // of a tile
constexpr int BLOCK_THREADS = TILES_OF_BLOCK * THREADS;
constexpr int ROW_TILES = ROWS / 16 / ROW_WARPS;         // of a warp
constexpr int PARAMETERS = ACTOR_OUTPUTS + LOG_STDS;     // of the distribution
constexpr int OBS_INPUTS = layer_inputs(0) - AGENT_IDS;  // the others are 1 for the row's agent of the policy, else 0
constexpr int METRICS = 5;                               // of `loss` in ppo.py
static_assert(ROWS % (16 * ROW_WARPS) == 0, "a whole number of tiles for each warp");
constexpr int RESULT_PITCH = (PARAMETERS + 1) | 1;  // floats; odd, against bank conflicts
constexpr int CHOICE_WEIGHTS_PITCH = HAS_CHOICES ? ACTOR_OUTPUTS | 1 : 0;
constexpr int STEP = Precision::STEP, STEPS_AT_ONCE = Precision::STEPS_AT_ONCE, TILE_WORDS = Precision::TILE_WORDS;
static_assert(ROWS / STEP % STEPS_AT_ONCE == 0, "of the products over rows");

HD constexpr int aligned(int bytes) { return (bytes + 15) / 16 * 16; }
HD constexpr int units(int columns) { return (columns + 15) / 16; }
// The network's inputs are padded to one step of a product only.
HD constexpr int padded_inputs(int layer) {
    return layer == 0 ? (layer_inputs(0) + STEP - 1) / STEP * STEP : 16 * units(layer_inputs(layer));
}
HD constexpr int divided(int a, int b) { return (a + b - 1) / b; }

constexpr int HEAD_OUTPUTS = ACTOR_OUTPUTS + (TOWERS == 1 ? 1 : 0);
template <int L>
constexpr int INPUTS = layer_inputs(L);
template <int L>
constexpr int OUTPUTS = L < HIDDEN ? layer_inputs(L + 1) : HEAD_OUTPUTS;
template <int L>
constexpr int WEIGHT_PITCH = Precision::weight_pitch(padded_inputs(L));
// Of the inputs of layer L, and of the gradients with respect to the head's outputs.
template <int L>
constexpr int PITCH = Precision::activation_pitch(ROWS, L <= HIDDEN ? padded_inputs(L) : 16 * units(HEAD_OUTPUTS));
template <int N>
constexpr int UNITS = units(N);
template <int N>
constexpr int WARP_UNITS = divided(units(N), COLUMN_WARPS);
// Whether the last unit has more than 8 columns, or there are several: then both halves of each are multiplied.
template <int N>
constexpr bool BOTH_HALVES = units(N) > 1 || N > 8;

// The threads that compute a row: the warps that have its columns. Up to the weights' gradients they wait for no
// others. In a rollout, where they also step environments, they are one warp or the block.
constexpr int OWNER_WARPS = FORWARD_ONLY && COLUMN_WARPS > 1 ? WARPS : COLUMN_WARPS;
constexpr int OWNERS = 32 * OWNER_WARPS, OWNED_ROWS = ROWS / (WARPS / OWNER_WARPS);
static_assert(OWNED_ROWS <= OWNERS, "a thread for each row");
// Barrier 0 is that of the block, then there is one for each tile, and one for the owners of rows.
constexpr int BARRIERS = 1 + TILES_OF_BLOCK + TILES_OF_BLOCK * (WARPS / OWNER_WARPS);
static_assert(BARRIERS <= 16 || OWNER_WARPS == 1, "as many as a block has");
// Whether a layer's outputs stay in registers, as a factor of the next product.
constexpr bool CHAINED = COLUMN_WARPS == 1 && Precision::CHAINS;
// Whether the inputs of layers after the first are in shared memory.
constexpr bool KEEPS_ACTIVATIONS = !FORWARD_ONLY || !CHAINED;
constexpr int UNROLLED_STEPS = CHAINED ? 32 : Precision::UNROLLED_STEPS;  // all where a factor is in registers
constexpr int UNROLLED_ROWS = Precision::UNROLLED_STEPS;                  // of the weights' gradients
constexpr tensor_core::Kind ACTIVATIONS = RELU ? tensor_core::ACTIVATION : tensor_core::NUMBER;
template <int L>
constexpr tensor_core::Kind INPUT_KIND = L == 0 ? tensor_core::INPUT : ACTIVATIONS;

// Bytes in shared memory, and their offsets, in the order of the functions below.
HD constexpr int weight_bytes(int layer) {
    int outputs = layer < HIDDEN ? layer_inputs(layer + 1) : HEAD_OUTPUTS;
    return 16 * units(outputs) * (Precision::weight_pitch(padded_inputs(layer)) * (int)sizeof(Word) + 4);
}
HD constexpr int weights_end(int layers) {
    int bytes = SHARED_FIRST;
    for (int layer = 0; layer < layers; ++layer) bytes += weight_bytes(layer);
    return bytes;
}
HD constexpr int activation_bytes(int columns) { return Precision::activation_words(ROWS, columns) * sizeof(Word); }
constexpr int SCALES_AT = weights_end(HIDDEN + 1);
HD constexpr int rows_end(int layers) {  // of the first tile
    int bytes = SCALES_AT + aligned(NORMALIZE_OBS ? 2 * OBS_INPUTS * (int)sizeof(float) : 0);
    for (int layer = 0; layer < layers; ++layer)
        bytes += (layer == 0 ? !READS_OBS : KEEPS_ACTIVATIONS) ? activation_bytes(padded_inputs(layer)) : 0;
    return bytes;
}
constexpr int ROWS_END = rows_end(HIDDEN + 1);
constexpr int INDICES_END = ROWS_END + (READS_OBS ? 0 : FORWARD_ONLY ? 1 : 2) * ROWS * (int)sizeof(i64);
constexpr int RESULTS_END = INDICES_END + RESULT_ROWS * RESULT_PITCH * (int)sizeof(float);
constexpr int CHOICE_WEIGHTS_END = RESULTS_END + aligned(ROWS * CHOICE_WEIGHTS_PITCH * (int)sizeof(float));
constexpr int DELTAS_END = CHOICE_WEIGHTS_END + activation_bytes(16 * units(HEAD_OUTPUTS));
constexpr int TILE_END = FORWARD_ONLY ? RESULTS_END : DELTAS_END, TILE_BYTES = TILE_END - rows_end(0);
static_assert(SHARED_FIRST + SHARED_BYTES == rows_end(0) + TILES_OF_BLOCK * TILE_BYTES, "as Python allocates them");

template <int L>
constexpr int WEIGHTS_AT = weights_end(L);
template <int L>
constexpr int BIASES_AT = weights_end(L + 1) - 16 * units(L < HIDDEN ? layer_inputs(L + 1) : HEAD_OUTPUTS) * 4;
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
HD float* obs_scales() { return (float*)(shared_memory + SCALES_AT); }  // means, then standard deviations

HD int tile() { return TILES_OF_BLOCK == 1 ? 0 : (int)threadIdx.x / THREADS; }  // of this thread
HD int thread() { return TILES_OF_BLOCK == 1 ? (int)threadIdx.x : (int)threadIdx.x % THREADS; }
HD unsigned char* tile_memory(int first_tiles) { return shared_memory + first_tiles + tile() * TILE_BYTES; }
// Inputs of layer L; of the first only if they are not read from the observations. In the backward pass the gradients
// with respect to the inputs of its activation take their place.
template <int L>
HD Word* rows() {
    return (Word*)tile_memory(ROWS_AT<L>);
}
// Of the tile's rows, or, 1, of those of the next tile; -1: none.
HD i64* indices(int buffer = 0) { return (i64*)tile_memory(ROWS_END) + buffer * ROWS; }
// One row's parameters of the distribution and then its value.
HD float* result_row(int row) { return (float*)tile_memory(INDICES_END) + row * RESULT_PITCH; }
// exp(logit - largest) of one row's choices, of discrete heads.
HD float* choice_weights(int row) { return (float*)tile_memory(RESULTS_END) + row * CHOICE_WEIGHTS_PITCH; }
HD Word* head_deltas() { return (Word*)tile_memory(CHOICE_WEIGHTS_END); }

using tensor_core::Four;
using tensor_core::group;
using tensor_core::lane;
using tensor_core::member;
HD int warp() { return thread() / 32; }
HD int first_row() { return warp() / COLUMN_WARPS * ROW_TILES * 16; }
HD int unit_of(int k) { return warp() % COLUMN_WARPS + k * COLUMN_WARPS; }
HD int owner() { return thread() % OWNERS; }
HD int first_owned_row() { return warp() / OWNER_WARPS * OWNED_ROWS; }
HD void sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory"); }
HD void sync_tile() {
    if constexpr (TILES_OF_BLOCK == 1)
        __syncthreads();
    else
        sync(1 + tile(), THREADS);
}
HD void sync_owners() {
    if constexpr (OWNER_WARPS == 1)
        __syncwarp();
    else if constexpr (OWNER_WARPS == WARPS)
        sync_tile();
    else
        sync(1 + TILES_OF_BLOCK + (int)threadIdx.x / OWNERS, OWNERS);
}

HD bool has_actor(int tower) { return tower == 0; }
HD bool has_value(int tower) { return tower == TOWERS - 1; }
// Where an output of the head is in a row of the results; -1 if the tower does not have it.
HD int result_of(int tower, int output) {
    if (has_actor(tower) && output < ACTOR_OUTPUTS) return output;
    return has_value(tower) && output == (has_actor(tower) ? ACTOR_OUTPUTS : 0) ? PARAMETERS : -1;
}

// Of layer L's first weight and bias in the flat tensor of all parameters; constants, not a table in memory.
template <int L>
HD i64 layer_weight(int tower) {
    constexpr i64 OF_FIRST = first_weight(0, L), OF_LAST = first_weight(TOWERS - 1, L);
    return tower == 0 ? OF_FIRST : OF_LAST;
}
template <int L>
HD i64 layer_bias(int tower) {
    constexpr i64 OF_FIRST = first_bias(0, L), OF_LAST = first_bias(TOWERS - 1, L);
    return tower == 0 ? OF_FIRST : OF_LAST;
}

// Indices in the flat tensor of all parameters, of the weight from input 0 to an output and of its bias; -1: none.
template <int L>
HD i64 weight_index(int tower, int output) {
    int result = L < HIDDEN ? output : result_of(tower, output);
    if (output >= OUTPUTS<L> || result < 0) return -1;
    return L == HIDDEN && result == PARAMETERS ? VALUE_WEIGHTS : layer_weight<L>(tower) + (i64)output * INPUTS<L>;
}
template <int L>
HD i64 bias_index(int tower, int output) {
    int result = L < HIDDEN ? output : result_of(tower, output);
    if (output >= OUTPUTS<L> || result < 0) return -1;
    return L == HIDDEN && result == PARAMETERS ? VALUE_BIAS : layer_bias<L>(tower) + output;
}

// By all threads of the block, or of the tile.
template <int NUM_THREADS>
HD void fill_with_zeros(void* from, const void* to) {
    for (uint4* at = (uint4*)from + threadIdx.x % NUM_THREADS; at < to; at += NUM_THREADS) *at = {0, 0, 0, 0};
}

// Weights and biases of layer L on their way to shared memory: those that a thread loads at a time.
template <int L>
struct LayerLoads {
    static constexpr int ELEMENTS = OUTPUTS<L> * INPUTS<L>, LOADS = divided(ELEMENTS, BLOCK_THREADS);
    static constexpr int BATCH = LOADS < 16 ? LOADS : 16;
    float weight[BATCH];

    HD void load(const float* parameters, int tower, int first) {
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * BLOCK_THREADS;
            i64 row = k < ELEMENTS ? weight_index<L>(tower, k / INPUTS<L>) : -1;
            weight[b] = row >= 0 ? parameters[row + k % INPUTS<L>] : 0.0f;
        }
    }
    HD void store(int first) const {
        UNROLL for (int b = 0; b < BATCH; ++b) {
            int k = first + b * BLOCK_THREADS;
            int at = Precision::weight_at(WEIGHT_PITCH<L>, k / INPUTS<L>, k % INPUTS<L>);
            if (k < ELEMENTS) Precision::store_weight(weights<L>() + at, weight[b]);
        }
    }
};
template <int L>
HD float bias_of(const float* parameters, int tower, int output) {
    i64 at = output < OUTPUTS<L> ? bias_index<L>(tower, output) : -1;
    return at >= 0 ? parameters[at] : 0.0f;
}

// Fills the memory of the layers from L on; the first loads of all of them are in flight at the same time.
template <int L>
HD void load_layers(const float* parameters, int tower) {
    int first = threadIdx.x;
    LayerLoads<L> loads;
    loads.load(parameters, tower, first);
    float bias = bias_of<L>(parameters, tower, first);
    if constexpr (L < HIDDEN) {
        load_layers<L + 1>(parameters, tower);
    } else {
        // Columns beyond the sizes stay 0.
        fill_with_zeros<BLOCK_THREADS>(shared_memory + SHARED_FIRST, shared_memory + SCALES_AT);
        fill_with_zeros<THREADS>(rows<0>(), tile_memory(ROWS_AT<1>));
        __syncthreads();
    }
    loads.store(first);
    while ((first += LayerLoads<L>::BATCH * BLOCK_THREADS) < LayerLoads<L>::ELEMENTS) {
        loads.load(parameters, tower, first);
        loads.store(first);
    }
    for (int k = threadIdx.x; k < OUTPUTS<L>; k += BLOCK_THREADS) {
        biases<L>()[k] = bias;
        bias = bias_of<L>(parameters, tower, k + BLOCK_THREADS);
    }
}

using ReturnScale = ReturnScaleIf<NORMALIZE_RETURNS != 0>;

// Everything that all tiles have in common.
HD void load_parameters(const float* parameters, int tower, [[maybe_unused]] const double* obs_mean,
                        [[maybe_unused]] const double* obs_var, [[maybe_unused]] i64 first_statistic = 0) {
    load_layers<0>(parameters, tower);
    for (int row = thread(); row < RESULT_ROWS; row += THREADS)
        for (int k = 0; k < LOG_STDS; ++k) result_row(row)[ACTOR_OUTPUTS + k] = parameters[LOG_STD_INDEX + k];
    if constexpr (NORMALIZE_OBS) {
        for (int k = threadIdx.x; k < OBS_INPUTS; k += BLOCK_THREADS) {
            obs_scales()[k] = (float)obs_mean[first_statistic + k];
            obs_scales()[OBS_INPUTS + k] = standard_deviation(obs_var[first_statistic + k]);
        }
    }
}

// An input of the first layer.
HD float input_of(Observation x, [[maybe_unused]] int column) {
    float value = x;
    if (AGENT_IDS > 0 && column >= OBS_INPUTS) return value;
    if constexpr (NORMALIZE_OBS) {
        value = (value - obs_scales()[column]) / obs_scales()[OBS_INPUTS + column];
        value = math::clamp(value, -OBS_CLIP, OBS_CLIP);
    } else if constexpr (sizeof(Observation) == 1) {
        value = value / OBS_SCALE;
    }
    return value;
}

// The owners of a tile's rows copy its observations to the inputs of the first layer: each the same number of elements,
// its slots, some of them beyond the size. Neighbouring lanes copy neighbouring columns, LANES of them those of a row,
// so that a slot's row and column are constants of the code, beside those of the lane.
namespace observations {
constexpr int COLUMNS = layer_inputs(0);
HD constexpr int row_slots(int lanes) { return divided(OWNED_ROWS * lanes, OWNERS); }
HD constexpr int slots(int lanes) { return divided(COLUMNS, lanes) * row_slots(lanes); }
HD constexpr int choose_lanes() {
    int best = 1;
    for (int lanes = 2; lanes <= 32; lanes *= 2)
        if (slots(lanes) <= slots(best)) best = lanes;
    return best;
}
constexpr int LANES = choose_lanes(), COLUMN_SLOTS = divided(COLUMNS, LANES), SLOTS = slots(LANES);
constexpr int ROWS_AT_ONCE = OWNERS / LANES;
constexpr int AT_ONCE = SLOTS <= 36 ? SLOTS : 28;  // in flight
constexpr int UNROLLED_LOADS = SLOTS < 128 ? 128 : 1;
}  // namespace observations

// A thread's slots, AT_ONCE of them.
struct Observations {
    static constexpr int COLUMNS = observations::COLUMNS, COLUMN_SLOTS = observations::COLUMN_SLOTS;
    static constexpr int LANES = observations::LANES, SLOTS = observations::SLOTS, AT_ONCE = observations::AT_ONCE;
    static constexpr int ROWS_AT_ONCE = observations::ROWS_AT_ONCE;
    Observation x[AT_ONCE];

    HD static int column(int slot) { return owner() % LANES + slot % COLUMN_SLOTS * LANES; }
    HD static bool has_column(int slot) { return COLUMNS % LANES == 0 || column(slot) < COLUMNS; }
    HD static int place(int slot) { return owner() / LANES + slot / COLUMN_SLOTS * ROWS_AT_ONCE; }
    HD static bool has_row(int slot) {
        return slot < SLOTS && (OWNED_ROWS % ROWS_AT_ONCE == 0 || place(slot) < OWNED_ROWS);
    }
    // Rows in the order in which memory has them, against bank conflicts.
    HD static int row(int slot) { return first_owned_row() + Precision::row_at(place(slot)); }

    // Observations are `stride` elements apart; indices count through all agents of the game.
    HD void load(const Observation* obs, i64 stride, const i64* indices, int first = 0) {
        const Observation* from = nullptr;  // of the lane, in its row
        [[maybe_unused]] int agent = 0;     // of the row, among the policy's
        UNROLL for (int k = 0; k < AT_ONCE; ++k) {
            int slot = first + k;
            if (k == 0 || slot % COLUMN_SLOTS == 0) {
                i64 index = has_row(slot) ? indices[row(slot)] : -1;
                from = index >= 0 ? obs + index * stride + owner() % LANES : nullptr;
                if constexpr (AGENT_IDS > 0) agent = index >= 0 ? position_of((int)((u64)index % NUM_AGENTS)) : 0;
            }
            bool exists = from && has_column(slot);
            if (AGENT_IDS == 0 || column(slot) < OBS_INPUTS)
                x[k] = exists ? from[slot % COLUMN_SLOTS * LANES] : 0;
            else
                x[k] = exists && column(slot) - OBS_INPUTS == agent;
        }
    }
    HD void store(int first) const {
        UNROLL for (int k = 0; k < AT_ONCE; ++k) {
            if (!has_row(first + k) || !has_column(first + k)) continue;
            int own = column(first + k);
            Precision::store(rows<0>() + Precision::activation_at(PITCH<0>, row(first + k), own), input_of(x[k], own));
        }
    }
};

// Copies the observations at `indices` to the inputs of the first layer, but for the first slots, which are there.
HD void store_obs(const Observations& first, const Observation* obs, i64 stride, const i64* indices) {
    using namespace observations;
    first.store(0);
    _Pragma("unroll UNROLLED_LOADS") for (int slot = AT_ONCE; slot < SLOTS; slot += AT_ONCE) {
        Observations others;
        others.load(obs, stride, indices, slot);
        others.store(slot);
    }
}
// The same with the first slots.
HD void load_obs(const Observation* obs, i64 stride) {
    Observations first;
    first.load(obs, stride, indices());
    store_obs(first, obs, stride, indices());
}

// This warp's tiles of a matrix of N columns.
template <int N>
struct Tiles {
    float sums[ROW_TILES][WARP_UNITS<N>][2][4];
};

// Calls f(k, unit) for this warp's units of N columns, the k-th being `unit`.
template <int N, class F>
HD void for_units(F f) {
    UNROLL for (int k = 0; k < WARP_UNITS<N>; ++k) {
        int unit = unit_of(k);
        if (UNITS<N> % COLUMN_WARPS == 0 || unit < UNITS<N>) f(k, unit);
    }
}

// Adds the products of the factors a(tile of this warp's rows, step) and b(unit, step) of so many steps from `step` on.
template <int STEPS, tensor_core::Kind KIND, int N, class A, class B>
HD void add_steps(Tiles<N>& tiles, A a, B b, int step) {
    Factor a_factor[ROW_TILES][STEPS];
    UNROLL for (int m = 0; m < ROW_TILES; ++m) {
        UNROLL for (int s = 0; s < STEPS; ++s) a_factor[m][s] = Precision::factor<KIND>(a(m, step + s));
    }
    for_units<N>([&](int u, int unit) {
        Factor b_factor[STEPS];
        UNROLL for (int s = 0; s < STEPS; ++s) b_factor[s] = Precision::factor<tensor_core::NUMBER>(b(unit, step + s));
        UNROLL for (int m = 0; m < ROW_TILES; ++m)
            Precision::multiply(tiles.sums[m][u], a_factor[m], b_factor, BOTH_HALVES<N>);
    });
}
// The same over K values of k; `b` are weights.
template <int K, tensor_core::Kind KIND, int N, class A, class B>
HD void add_product(Tiles<N>& tiles, A a, B b) {
    constexpr int STEPS = divided(K, STEP), REST = STEPS % STEPS_AT_ONCE;
    _Pragma("unroll UNROLLED_STEPS") for (int step = 0; step < STEPS - REST; step += STEPS_AT_ONCE)
        add_steps<STEPS_AT_ONCE, KIND>(tiles, a, b, step);
    if constexpr (REST > 0) add_steps<REST, KIND>(tiles, a, b, STEPS - REST);
}

HD int row_of_tile(int m) { return first_row() + 16 * m; }
// Calls f(element of the lane in a tile, its column) of a unit.
template <class F>
HD void for_elements(int unit, F f) {
    UNROLL for (int half = 0; half < 2; ++half) {
        UNROLL for (int k = 0; k < 4; ++k) f(half, k, 16 * unit + 8 * half + 2 * member() + k % 2);
    }
}

// As nn.Tanh and nn.ReLU, NaN included.
HD float activation(float x) { return RELU ? (x < 0 ? 0.0f : x) : Precision::tanh(x); }
HD float activation_gradient(float gradient, float output) {
    if (RELU) return output <= 0 ? 0.0f : gradient;
    return gradient * math::fma(-output, output, 1.0f);
}

// The inputs of layer L as factors A of its product. In the registers of a warp that has all columns they are the words
// of these factors, in the order of the steps; else they are in shared memory.
template <int L>
struct LayerInputs {
    static constexpr bool IN_REGISTERS = L > 0 && CHAINED;
    u32 words[ROW_TILES][IN_REGISTERS ? TILE_WORDS * units(INPUTS<L>) : 1];

    HD Four factor(int m, int step) const {
        if constexpr (IN_REGISTERS) {
            const u32* own = words[m] + 4 * step;
            return {{own[0], own[1], own[2], own[3]}};
        } else {
            return Precision::a_of_rows(rows<L>(), PITCH<L>, row_of_tile(m), STEP * step);
        }
    }
};

// The inputs of the first layer, of which each lane reads its own elements from the observations.
struct ObsInputs {
    const Observation* row[ROW_TILES][2];  // those of rows g and g + 8 of each tile; null: zeros
    int agent[ROW_TILES][2];               // of these rows, among the policy's

    HD Four factor(int m, int step) const {
        return Precision::a_of(STEP * step, [&](int half, int column) {
            if (!row[m][half]) return 0.0f;
            if ((AGENT_IDS > 0 || INPUTS<0> % STEP != 0) && column >= OBS_INPUTS)
                return AGENT_IDS > 0 && column - OBS_INPUTS == agent[m][half] ? 1.0f : 0.0f;
            return input_of(row[m][half][column], column);
        });
    }
};

// Layer L of the tile's rows, and those after it. The head writes the results, to the rows from `first_result` on.
template <int L, class Inputs>
HD void forward_from(int tower, int first_result, const Inputs& inputs) {
    constexpr int N = OUTPUTS<L>;
    Tiles<N> tiles;
    for_units<N>([&](int u, int unit) {
        UNROLL for (int m = 0; m < ROW_TILES; ++m)
            for_elements(unit, [&](int half, int k, int column) { tiles.sums[m][u][half][k] = biases<L>()[column]; });
    });
    auto a = [&](int m, int step) { return inputs.factor(m, step); };
    auto b = [](int unit, int step) {
        return Precision::b_of_outputs<BOTH_HALVES<N>>(weights<L>(), WEIGHT_PITCH<L>, 16 * unit, STEP * step);
    };
    add_product<INPUTS<L>, INPUT_KIND<L>>(tiles, a, b);
    if constexpr (L < HIDDEN) {
        LayerInputs<L + 1> outputs;
        for_units<N>([&](int u, int unit) {
            UNROLL for (int m = 0; m < ROW_TILES; ++m) {
                float (&x)[2][4] = tiles.sums[m][u];
                for_elements(unit, [&](int half, int k, int column) {
                    // Beyond the size, 0 times an infinite input may be NaN.
                    x[half][k] = N % 16 != 0 && column >= N ? 0.0f : activation(x[half][k]);
                });
                u32 words[TILE_WORDS];
                Precision::round_tile(x, words);
                if constexpr (CHAINED)
                    UNROLL for (int k = 0; k < TILE_WORDS; ++k) outputs.words[m][TILE_WORDS * u + k] = words[k];
                if constexpr (KEEPS_ACTIVATIONS)
                    Precision::store_tile(rows<L + 1>(), PITCH<L + 1>, row_of_tile(m), 16 * unit, words);
            }
        });
        sync_owners();
        forward_from<L + 1>(tower, first_result, outputs);
    } else {
        for_units<N>([&](int u, int unit) {
            UNROLL for (int m = 0; m < ROW_TILES; ++m) for_elements(unit, [&](int half, int k, int column) {
                int result = result_of(tower, column), row = first_result + 16 * m + group() + k / 2 * 8;
                if (result >= 0) result_row(row)[result] = tiles.sums[m][u][half][k];
            });
        });
        sync_owners();
    }
}
template <int L>
HD void forward_layers(int tower) {
    static_assert(L == 0);
    forward_from<0>(tower, first_row(), LayerInputs<0>());
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

// This warp's tiles of the gradients of layer L: the products of the transposed deltas and the layer's inputs, or, if
// it has few outputs, of the transposed inputs and the deltas.
template <int L>
struct LayerGradients {
    static constexpr bool OF_INPUTS = OUTPUTS<L> <= 8 && INPUTS<L> > 8;
    static constexpr int M_SIZE = OF_INPUTS ? INPUTS<L> : OUTPUTS<L>, N_SIZE = OF_INPUTS ? OUTPUTS<L> : INPUTS<L>;
    static constexpr int M = UNITS<M_SIZE>, N = UNITS<N_SIZE>;
    static constexpr int M_WARPS = warps_over_outputs(M, N), N_WARPS = WARPS / M_WARPS;
    static constexpr int M_TILES = divided(M, M_WARPS), N_TILES = divided(N, N_WARPS);
    float weight[M_TILES][N_TILES][2][4];
    float bias[OF_INPUTS ? N_TILES : M_TILES][4];  // a tile's sums, with equal columns, or rows OF_INPUTS

    HD static int m_unit(int k) { return warp() / N_WARPS + k * M_WARPS; }
    HD static int n_unit(int k) { return warp() % N_WARPS + k * N_WARPS; }
    HD static bool has_m(int k) { return M % M_WARPS == 0 || m_unit(k) < M; }
    HD static bool has_n(int k) { return N % N_WARPS == 0 || n_unit(k) < N; }
    // One of the warps that have the same outputs. All sum them: a branch would cost more.
    HD static bool has_biases() { return (OF_INPUTS ? warp() / N_WARPS : warp() % N_WARPS) == 0; }

    HD void add(const Word* deltas) {
        const Word *left = OF_INPUTS ? rows<L>() : deltas, *right = OF_INPUTS ? deltas : rows<L>();
        constexpr int LEFT_PITCH = OF_INPUTS ? PITCH<L> : PITCH<L + 1>,
                      RIGHT_PITCH = OF_INPUTS ? PITCH<L + 1> : PITCH<L>;
        _Pragma("unroll UNROLLED_ROWS") for (int row = 0; row < ROWS; row += STEP * STEPS_AT_ONCE) {
            Factor b[N_TILES][STEPS_AT_ONCE];
            UNROLL for (int n = 0; n < N_TILES; ++n) {
                if (!has_n(n)) continue;
                UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
                    Four words = Precision::b_of_columns<BOTH_HALVES<N_SIZE>>(right, RIGHT_PITCH, 16 * n_unit(n),
                                                                              row + s * STEP);
                    b[n][s] = Precision::factor<OF_INPUTS ? tensor_core::NUMBER : INPUT_KIND<L>>(words);
                }
                if (OF_INPUTS) Precision::add_b(bias[n], b[n]);
            }
            UNROLL for (int m = 0; m < M_TILES; ++m) {
                if (!has_m(m)) continue;
                Factor a[STEPS_AT_ONCE];
                UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
                    Four words = Precision::a_of_columns(left, LEFT_PITCH, 16 * m_unit(m), row + s * STEP);
                    a[s] = Precision::factor<OF_INPUTS ? INPUT_KIND<L> : tensor_core::NUMBER>(words);
                }
                if (!OF_INPUTS) Precision::add_a(bias[m], a);
                UNROLL for (int n = 0; n < N_TILES; ++n) if (has_n(n))
                    Precision::multiply(weight[m][n], a, b[n], BOTH_HALVES<N_SIZE>);
            }
        }
    }

    HD void write(float* out, int tower) const {
        UNROLL for (int m = 0; m < M_TILES; ++m) {
            UNROLL for (int n = 0; n < N_TILES; ++n) {
                UNROLL for (int k = 0; k < 8; ++k) {
                    int in_m = 16 * m_unit(m) + group() + k / 2 % 2 * 8;
                    int in_n = 16 * n_unit(n) + k / 4 * 8 + 2 * member() + k % 2;
                    int output = OF_INPUTS ? in_n : in_m, input = OF_INPUTS ? in_m : in_n;
                    i64 first = weight_index<L>(tower, output);
                    if (first >= 0 && input < INPUTS<L>) out[first + input] = weight[m][n][k / 4][k % 4];
                }
            }
        }
        if (!has_biases()) return;
        UNROLL for (int k = 0; k < (OF_INPUTS ? N_TILES : M_TILES); ++k) {
            UNROLL for (int j = 0; j < 2; ++j) {
                int output =
                    16 * (OF_INPUTS ? n_unit(k) : m_unit(k)) + (OF_INPUTS ? 2 * member() + j : group() + 8 * j);
                i64 at = bias_index<L>(tower, output);
                if ((OF_INPUTS ? group() : member()) == 0 && at >= 0) out[at] = bias[k][OF_INPUTS ? j : 2 * j];
            }
        }
    }
};

// Of the layers 0 … L.
template <int L>
struct Gradients : Gradients<L - 1> {
    LayerGradients<L> layer;

    // From the deltas, the gradients with respect to layer L's outputs before the activation. Calls before_last()
    // before those of the weights of the first layer.
    template <class F>
    HD void add_layers(const Word* deltas, F before_last) {
        if constexpr (L == 0) before_last();
        layer.add(deltas);
        if constexpr (L > 0) {
            constexpr int N = INPUTS<L>;
            auto a = [=](int m, int step) {
                return Precision::a_of_rows(deltas, PITCH<L + 1>, row_of_tile(m), STEP * step);
            };
            auto b = [](int unit, int step) {
                return Precision::b_of_inputs(weights<L>(), WEIGHT_PITCH<L>, 16 * unit, STEP * step);
            };
            Tiles<N> tiles = {};
            add_product<OUTPUTS<L>, tensor_core::NUMBER>(tiles, a, b);
            sync_tile();  // all warps have read the layer's inputs
            for_units<N>([&](int u, int unit) {
                UNROLL for (int m = 0; m < ROW_TILES; ++m) {
                    float (&x)[2][4] = tiles.sums[m][u];
                    float outputs[2][4];
                    Precision::load_tile(rows<L>(), PITCH<L>, row_of_tile(m), 16 * unit, outputs);
                    for_elements(unit, [&](int half, int k, int column) {
                        float gradient = activation_gradient(x[half][k], outputs[half][k]);
                        x[half][k] = N % 16 != 0 && column >= N ? 0.0f : gradient;
                    });
                    u32 words[TILE_WORDS];
                    Precision::round_tile(x, words);
                    Precision::store_tile(rows<L>(), PITCH<L>, row_of_tile(m), 16 * unit, words);
                }
            });
            sync_tile();
            Gradients<L - 1>::add_layers(rows<L>(), before_last);
        }
    }

    HD void write(float* out, int tower) const {
        layer.write(out, tower);
        if constexpr (L > 0) Gradients<L - 1>::write(out, tower);
    }
};
template <>
struct Gradients<-1> {};

}  // namespace perceptron
