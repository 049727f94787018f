// SPDX-License-Identifier: Apache-2.0
// The products of GRU cells with their states over whole sequences, forward and back, on tensor cores. Compiled with
// the constants of gpu_vecenv/train/gru_kernels.py: the number of cells, one or two, the units of a cell, and the
// precision of the products.
//
// What the inputs add to the gates is known before. A block has one cell, of an actor or of a critic, whose weights
// stay in its shared memory, and tiles of sequences one after the other. It takes a tile through all steps; the state
// goes from step to step in registers, and as a factor of the products in shared memory. A warp has 16 rows and
// 16 units. The bits of a row depend neither on the rows beside it nor on the number of steps.
//
// Gates are those of torch.nn.GRUCell, in its order: r and z of reset and update, n of the new state. The backward pass
// computes them again from the states, which is faster than to keep them.
#include "tensor_core.cuh"

namespace gru {

typedef tensor_core::PRECISION Precision;
typedef Precision::Word Word;
typedef Precision::Factor Factor;

constexpr int GATES = 3;
// Gradients of a unit, and biases: of r and z, of n, and of what the state adds to n.
enum Kind { R, Z, N, N_OF_STATE, KINDS };
constexpr int COLUMN_WARPS = (UNITS + 15) / 16, COLUMNS = 16 * COLUMN_WARPS, ROWS = 16 * ROW_WARPS;
constexpr int THREADS = 32 * COLUMN_WARPS * ROW_WARPS;
constexpr int STEP = Precision::STEP, STEPS_AT_ONCE = Precision::STEPS_AT_ONCE;
constexpr int WEIGHT_PITCH = Precision::weight_pitch(COLUMNS), PITCH = Precision::activation_pitch(ROWS, COLUMNS);
constexpr int WEIGHT_WORDS = GATES * COLUMNS * WEIGHT_PITCH, TILE_WORDS = Precision::activation_words(ROWS, COLUMNS);
constexpr int BIASES_AT = (WEIGHT_WORDS + 2 * TILE_WORDS) * sizeof(Word);
static_assert(SHARED_BYTES == BIASES_AT + KINDS * COLUMNS * 4, "as gru_kernels.py allocates them");
constexpr int UNROLLED_STEPS = STEPS_AT_ONCE == 1 ? 2 : 1;  // with more, a thread has too few registers
static_assert(UNITS % 4 == 0, "a lane has four neighbouring units");

extern __shared__ __align__(16) unsigned char shared_memory[];
HD Word* weights() { return (Word*)shared_memory; }
// Factors of a product, one of two: a warp may fill the other one while others multiply.
HD Word* tile_of(int buffer) { return weights() + WEIGHT_WORDS + buffer * TILE_WORDS; }

// Of r, z, and of what inputs and states add to n.
HD float* biases() { return (float*)(shared_memory + BIASES_AT); }

// Four neighbouring elements in device memory, float32 or bfloat16.
#if BFLOAT16
typedef unsigned short Element;
HD void load_four(const Element* from, float (&x)[4]) {
    uint2 words = *(const uint2*)from;
    x[0] = tensor_core::Bfloat16::low(words.x);
    x[1] = tensor_core::Bfloat16::high(words.x);
    x[2] = tensor_core::Bfloat16::low(words.y);
    x[3] = tensor_core::Bfloat16::high(words.y);
}
HD void store_four(Element* to, const float (&x)[4]) {
    *(uint2*)to = {tensor_core::packed_bfloat16(x[0], x[1]), tensor_core::packed_bfloat16(x[2], x[3])};
}
#else
typedef float Element;
#endif
HD void load_four(const float* from, float (&x)[4]) {
    float4 words = *(const float4*)from;
    x[0] = words.x;
    x[1] = words.y;
    x[2] = words.z;
    x[3] = words.w;
}
HD void store_four(float* to, const float (&x)[4]) { *(float4*)to = {x[0], x[1], x[2], x[3]}; }

// A lane's elements of a tile of 16 rows and 16 units, as in sums of products.
typedef float Tile[2][4];

// Where a unit is among the columns of weights and tiles: so that a lane's four columns of a row are four neighbouring
// units, and its accesses to device memory have 16 bytes.
HD constexpr int column_of(int unit) { return unit / 16 * 16 + unit % 4 / 2 * 8 + unit % 16 / 4 * 2 + unit % 2; }
HD constexpr int unit_of(int column) {
    return column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
}

// Where gradients of a kind are in a row of all cells', in units of UNITS. Those of the inputs' gates of two cells are
// neighbours, and so are those of the states' gates of each: products read what they need without gaps.
HD int place_of(int cell, int kind) {
    if (kind == N) return 3 + cell;
    return kind == N_OF_STATE ? 7 * cell : 4 * cell + 1 + kind;
}
constexpr int GRADIENT_PITCH = CELLS * KINDS * UNITS;

HD int warp() { return (int)threadIdx.x / 32; }
HD int first_column() { return warp() % COLUMN_WARPS * 16; }
HD int first_row() { return warp() / COLUMN_WARPS * 16; }

// The lane's rows and units.
struct Own {
    i64 row[2];
    bool exists[2];
    int unit;
    HD Own(i64 first, i64 rows) : unit(first_column() + 4 * tensor_core::member()) {
        UNROLL for (int k = 0; k < 2; ++k) {
            row[k] = first + first_row() + 8 * k + tensor_core::group();
            exists[k] = row[k] < rows && (UNITS % 16 == 0 || unit < UNITS);
        }
    }
    // Of elements at from + row * stride + unit; 0 where there are none.
    template <class E>
    HD void load(const E* from, i64 stride, Tile& x) const {
        UNROLL for (int k = 0; k < 2; ++k) {
            float four[4] = {};
            if (exists[k]) load_four(from + row[k] * stride + unit, four);
            UNROLL for (int j = 0; j < 4; ++j) x[j / 2][2 * k + j % 2] = four[j];
        }
    }
    template <class E>
    HD void store(E* to, i64 stride, const Tile& x) const {
        UNROLL for (int k = 0; k < 2; ++k) {
            if (!exists[k]) continue;
            float four[4];
            UNROLL for (int j = 0; j < 4; ++j) four[j] = x[j / 2][2 * k + j % 2];
            store_four(to + row[k] * stride + unit, four);
        }
    }
    // Begins to bring the elements of such a tile into the level 2 cache.
    template <class E>
    HD void prefetch(const E* from, i64 stride) const {
        UNROLL for (int k = 0; k < 2; ++k) {
            if (exists[k]) asm volatile("prefetch.global.L2 [%0];" : : "l"(from + row[k] * stride + unit));
        }
    }
    // 0 in the rows whose episode ended, whatever was there. `active` has a flag for each row.
    HD void keep(const bool* active, Tile& x) const {
        UNROLL for (int k = 0; k < 2; ++k) {
            bool goes_on = exists[k] && active[row[k]];
            UNROLL for (int j = 0; j < 4; ++j) x[j / 2][2 * k + j % 2] = goes_on ? x[j / 2][2 * k + j % 2] : 0.0f;
        }
    }
};

// The weights of the neurons of a gate and of a column tile of their inputs, 8 neurons times 16 inputs of a warp at a
// time: lane 4 * g + t has four inputs of the g-th neuron, so that it reads 16 bytes, and the words that the lanes
// write together are in different banks. 0 where there are no units.
HD void load_weights(const float* of_states) {
    constexpr int GROUPS = COLUMNS / 8;  // of neurons of a gate
    const int input = first_column() + 4 * tensor_core::member(), column = column_of(input);
    _Pragma("unroll 1") for (int gate = 0; gate < GATES; ++gate) {
        _Pragma("unroll 8") for (int k = 0; k < (GROUPS + ROW_WARPS - 1) / ROW_WARPS; ++k) {
            const int group = k * ROW_WARPS + warp() / COLUMN_WARPS;
            if (GROUPS % ROW_WARPS != 0 && group >= GROUPS) continue;
            const int neuron = 8 * group + tensor_core::group(), unit = unit_of(neuron);
            float four[4] = {};
            if (UNITS % 16 == 0 || (unit < UNITS && input < UNITS))
                load_four(of_states + (gate * UNITS + unit) * UNITS + input, four);
            Word* row = weights() + (gate * COLUMNS + neuron) * WEIGHT_PITCH;
            Precision::store_weights(row, column, four[0], four[1]);
            Precision::store_weights(row, column + 8, four[2], four[3]);
        }
    }
}

// Of a cell.
HD void load_parameters(const float* of_states, const float* input_biases, const float* state_biases) {
    load_weights(of_states);
    for (int unit = threadIdx.x; unit < COLUMNS; unit += THREADS) {
        float x[GATES] = {}, y[GATES] = {};
        UNROLL for (int gate = 0; gate < GATES; ++gate) {
            if (unit >= UNITS) continue;
            x[gate] = input_biases[gate * UNITS + unit];
            y[gate] = state_biases[gate * UNITS + unit];
        }
        biases()[R * COLUMNS + unit] = x[R] + y[R];
        biases()[Z * COLUMNS + unit] = x[Z] + y[Z];
        biases()[N * COLUMNS + unit] = x[N];
        biases()[N_OF_STATE * COLUMNS + unit] = y[N];
    }
}

HD void store_tile(int buffer, const Tile& x) {
    u32 words[Precision::TILE_WORDS];
    Precision::round_tile(x, words);
    Precision::store_tile(tile_of(buffer), PITCH, first_row(), first_column(), words);
    __syncthreads();
}

// Factors A of STEPS_AT_ONCE steps, the lane's rows of a tile.
HD void load_rows(int buffer, int column, Factor (&a)[STEPS_AT_ONCE]) {
    UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
        tensor_core::Four words = Precision::a_of_rows(tile_of(buffer), PITCH, first_row(), column + s * STEP);
        a[s] = Precision::factor<tensor_core::NUMBER>(words);
    }
}

// What the states in a tile add to the gates.
HD void multiply_gates(int buffer, Tile (&sums)[GATES]) {
    _Pragma("unroll UNROLLED_STEPS") for (int k = 0; k < COLUMNS; k += STEP * STEPS_AT_ONCE) {
        Factor a[STEPS_AT_ONCE], b[STEPS_AT_ONCE];
        load_rows(buffer, k, a);
        UNROLL for (int gate = 0; gate < GATES; ++gate) {
            UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
                int output = gate * COLUMNS + first_column();
                b[s] = Precision::factor<tensor_core::NUMBER>(
                    Precision::b_of_outputs<true>(weights(), WEIGHT_PITCH, output, k + s * STEP));
            }
            Precision::multiply(sums[gate], a, b, true);
        }
    }
}

// Adds gradients with respect to the states, from those in a tile, of a gate.
HD void multiply_back(int buffer, int gate, Tile& sums) {
    _Pragma("unroll UNROLLED_STEPS") for (int k = 0; k < COLUMNS; k += STEP * STEPS_AT_ONCE) {
        Factor a[STEPS_AT_ONCE], b[STEPS_AT_ONCE];
        load_rows(buffer, k, a);
        UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
            int output = gate * COLUMNS + k + s * STEP;
            b[s] = Precision::factor<tensor_core::NUMBER>(
                Precision::b_of_inputs(weights(), WEIGHT_PITCH, first_column(), output));
        }
        Precision::multiply(sums, a, b, true);
    }
}

HD float sigmoid(float x) { return math::fma(0.5f, Precision::tanh(0.5f * x), 0.5f); }

// Biases of the lane's units.
struct Biases {
    float of[KINDS][4];
    HD Biases(int unit) {
        UNROLL for (int kind = 0; kind < KINDS; ++kind) load_four(biases() + kind * COLUMNS + unit, of[kind]);
    }
};

struct Gates {
    float r, z, n, of_state;  // the last is what the state adds to n
    // Element (half, e) of a tile.
    HD Gates(const Tile (&inputs)[GATES], const Tile (&sums)[GATES], const Biases& biases, int half, int e) {
        const int j = 2 * half + e % 2;
        r = sigmoid(inputs[R][half][e] + (sums[R][half][e] + biases.of[R][j]));
        z = sigmoid(inputs[Z][half][e] + (sums[Z][half][e] + biases.of[Z][j]));
        of_state = sums[N][half][e] + biases.of[N_OF_STATE][j];
        n = Precision::tanh(math::fma(r, of_state, inputs[N][half][e] + biases.of[N][j]));
    }
};

// What the inputs add to the gates of a step; `first` is the cell's first element of the step's first row.
HD void load_inputs(const Own& own, const Element* first, i64 stride, Tile (&inputs)[GATES]) {
    UNROLL for (int gate = 0; gate < GATES; ++gate) own.load(first + gate * UNITS, stride, inputs[gate]);
}

// Shapes, with R rows: inputs (steps, R, gates, units) of each cell, with strides; states (R, cells, units); all others
// (cells, steps, R, …).
HD void forward(const gru_forward_Arguments& args) {
    const int cell = blockIdx.x % CELLS;
    const i64 first_step = cell * args.steps;
    load_parameters(args.weights + cell * GATES * UNITS * UNITS, args.input_biases + cell * GATES * UNITS,
                    args.state_biases + cell * GATES * UNITS);
    const Element* inputs_of_cell = (const Element*)args.inputs + cell * args.cell_stride;
    int buffer = 0;
    for (i64 tile = blockIdx.x / CELLS; tile * ROWS < args.rows; tile += gridDim.x / CELLS) {
        const Own own(tile * ROWS, args.rows);
        Tile state, inputs[GATES];
        own.load(args.states + cell * UNITS, CELLS * UNITS, state);
        load_inputs(own, inputs_of_cell, args.row_stride, inputs);
        for (i64 t = 0; t < args.steps; ++t) {
            const i64 of_step = (first_step + t) * args.rows * UNITS;
            if (args.previous) own.store((Element*)args.previous + of_step, UNITS, state);
            store_tile(buffer, state);
            Tile sums[GATES] = {};
            multiply_gates(buffer, sums);
            buffer ^= 1;
            const Biases biases(own.unit);
            UNROLL for (int half = 0; half < 2; ++half) {
                UNROLL for (int e = 0; e < 4; ++e) {
                    const Gates gates(inputs, sums, biases, half, e);
                    state[half][e] = math::fma(gates.z, state[half][e] - gates.n, gates.n);
                }
            }
            if (t + 1 < args.steps)
                load_inputs(own, inputs_of_cell + (t + 1) * args.rows * args.row_stride, args.row_stride, inputs);
            own.store((Element*)args.outputs + of_step, UNITS, state);
            if (t + 1 < args.steps) own.keep(args.active + t * args.rows, state);
        }
        if (args.next_states) own.store(args.next_states + cell * UNITS, CELLS * UNITS, state);
    }
}

// Sums over the lane's units of gradients of all rows and steps, in a fixed order: over the steps, then over the lanes.
struct BiasSums {
    float of[KINDS][4];
    HD BiasSums() : of() {}
    HD void add(int kind, const Tile& x) {
        UNROLL for (int j = 0; j < 4; ++j) of[kind][j] += x[j / 2][j % 2] + x[j / 2][2 + j % 2];
    }
    // To the row of these warps' rows.
    HD void store(float* to, int cell, const Own& own) {
        UNROLL for (int kind = 0; kind < KINDS; ++kind) {
            UNROLL for (int j = 0; j < 4; ++j) {
                UNROLL for (int lanes = 4; lanes < 32; lanes *= 2) of[kind][j] +=
                    __shfl_xor_sync(~0u, of[kind][j], lanes);
            }
            if (tensor_core::group() == 0 && (UNITS % 16 == 0 || own.unit < UNITS))
                store_four(to + place_of(cell, kind) * UNITS + own.unit, of[kind]);
        }
    }
};

// From the gradients with respect to the outputs of each cell, (steps, R, units), to those with respect to what inputs
// and states add to the gates, (steps, R, GRADIENT_PITCH).
HD void backward(const gru_backward_Arguments& args) {
    const int cell = blockIdx.x % CELLS;
    const i64 first_step = cell * args.steps;
    load_parameters(args.weights + cell * GATES * UNITS * UNITS, args.input_biases + cell * GATES * UNITS,
                    args.state_biases + cell * GATES * UNITS);
    const Element* inputs_of_cell = (const Element*)args.inputs + cell * args.cell_stride;
    const Element* of_outputs = (const Element*)(cell == 0 ? args.first_gradients : args.second_gradients);
    int buffer = 0;
    for (i64 tile = blockIdx.x / CELLS; tile * ROWS < args.rows; tile += gridDim.x / CELLS) {
        const Own own(tile * ROWS, args.rows);
        BiasSums bias_sums;
        Tile carried = {};  // gradients with respect to a step's outputs that come from the step after it
        for (i64 t = args.steps - 1; t >= 0; --t) {
            const i64 row = t * args.rows, of_step = (first_step + t) * args.rows;
            Tile state, inputs[GATES], sums[GATES] = {};
            own.load((const Element*)args.previous + of_step * UNITS, UNITS, state);
            load_inputs(own, inputs_of_cell + row * args.row_stride, args.row_stride, inputs);
            Tile found = {};
            if (of_outputs) own.load(of_outputs + row * UNITS, UNITS, found);
            if (t > 0) {  // the step before takes as long as memory does
                own.prefetch((const Element*)args.previous + (of_step - args.rows) * UNITS, UNITS);
                const Element* of_inputs = inputs_of_cell + (row - args.rows) * args.row_stride;
                UNROLL for (int gate = 0; gate < GATES; ++gate) {
                    own.prefetch(of_inputs + gate * UNITS, args.row_stride);
                }
                if (of_outputs) own.prefetch(of_outputs + (row - args.rows) * UNITS, UNITS);
            }
            store_tile(buffer, state);
            multiply_gates(buffer, sums);
            buffer ^= 1;
            const Biases biases(own.unit);
            Tile gradients[KINDS];
            UNROLL for (int half = 0; half < 2; ++half) {
                UNROLL for (int e = 0; e < 4; ++e) {
                    const Gates gates(inputs, sums, biases, half, e);
                    float out = found[half][e] + carried[half][e];
                    float n = out * (1.0f - gates.z) * math::fma(-gates.n, gates.n, 1.0f);
                    gradients[R][half][e] = n * gates.of_state * (gates.r * (1.0f - gates.r));
                    gradients[Z][half][e] = out * (state[half][e] - gates.n) * (gates.z * (1.0f - gates.z));
                    gradients[N][half][e] = n;
                    gradients[N_OF_STATE][half][e] = n * gates.r;
                    carried[half][e] = out * gates.z;
                }
            }
            Element* to = (Element*)args.gate_gradients + row * GRADIENT_PITCH;
            UNROLL for (int kind = 0; kind < KINDS; ++kind) {
                own.store(to + place_of(cell, kind) * UNITS, GRADIENT_PITCH, gradients[kind]);
                bias_sums.add(kind, gradients[kind]);
            }
            if (t == 0) break;  // the gradient of the first state is not needed
            UNROLL for (int gate = 0; gate < GATES; ++gate) {
                store_tile(buffer, gradients[gate == N ? (int)N_OF_STATE : gate]);
                multiply_back(buffer, gate, carried);
                buffer ^= 1;
            }
            own.keep(args.active + (t - 1) * args.rows, carried);
        }
        const i64 warp_rows = tile * ROW_WARPS + warp() / COLUMN_WARPS;
        bias_sums.store(args.sums + warp_rows * GRADIENT_PITCH, cell, own);
    }
}

}  // namespace gru

KERNEL_WITH_LAUNCH_BOUNDS(gru_forward, gru::THREADS, gru::MIN_BLOCKS) { gru::forward(args); }
KERNEL_WITH_LAUNCH_BOUNDS(gru_backward, gru::THREADS, gru::MIN_BLOCKS) { gru::backward(args); }
