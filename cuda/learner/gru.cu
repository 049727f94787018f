// SPDX-License-Identifier: Apache-2.0
// The products of GRU cells with their states over whole sequences, forward and back, on tensor cores. Compiled with
// the constants of gpu_vecenv/train/gru_kernels.py: the number of cells, one or two, the units of a cell, and the
// precision of the products.
//
// What the inputs add to the gates is known before. A block has one cell, of an actor or of a critic, whose weights
// stay in its shared memory, and tiles of sequences one after the other. It takes a tile through all steps; the state
// goes from step to step in registers, and as a factor of the products in shared memory. A warp has 16 units and one or
// two tiles of 16 rows: with two it loads weights from shared memory half as often, but there are half as many warps.
// The bits of a row depend neither on this, nor on the rows beside it, nor on the number of steps.
//
// What a step reads from device memory is loaded before the product that comes first, and stays as it is in memory
// until it is used: what converts it would wait for it.
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
constexpr int COLUMN_WARPS = (UNITS + 15) / 16, COLUMNS = 16 * COLUMN_WARPS, WARP_ROWS = 16 * WARP_TILES;
constexpr int ROWS = WARP_ROWS * ROW_WARPS, THREADS = 32 * COLUMN_WARPS * ROW_WARPS;
constexpr int STEP = Precision::STEP, STEPS_AT_ONCE = Precision::STEPS_AT_ONCE;
constexpr int WEIGHT_PITCH = Precision::weight_pitch(COLUMNS), PITCH = Precision::activation_pitch(ROWS, COLUMNS);
constexpr int WEIGHT_WORDS = GATES * COLUMNS * WEIGHT_PITCH, TILE_WORDS = Precision::activation_words(ROWS, COLUMNS);
constexpr int BIASES_AT = (WEIGHT_WORDS + BUFFERS * TILE_WORDS) * sizeof(Word);
static_assert(SHARED_BYTES == BIASES_AT + KINDS * COLUMNS * 4, "as gru_kernels.py allocates them");
constexpr int UNROLLED_STEPS = STEPS_AT_ONCE > 1 ? 1 : MIN_BLOCKS > 1 ? 4 : 16;  // more need more registers
// Gates whose gradients are factors at a time; the tile of a step's states has a buffer of its own.
constexpr int GATES_AT_ONCE = BUFFERS > GATES ? GATES : 1;
static_assert(UNITS % 4 == 0, "a lane has four neighbouring units");

extern __shared__ __align__(16) unsigned char shared_memory[];
HD Word* weights() { return (Word*)shared_memory; }
// Factors of a product, one of BUFFERS: a warp may fill the next one while others multiply.
HD Word* tile_of(int buffer) { return weights() + WEIGHT_WORDS + buffer * TILE_WORDS; }

// Of r, z, and of what inputs and states add to n.
HD float* biases() { return (float*)(shared_memory + BIASES_AT); }

// Four neighbouring elements in device memory, float32 or bfloat16.
#if BFLOAT16
typedef unsigned short Element;
HD uint2 load_words(const Element* from) { return *(const uint2*)from; }
HD void convert(const uint2& words, float (&x)[4]) {
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
HD float4 load_words(const float* from) { return *(const float4*)from; }
HD void convert(const float4& words, float (&x)[4]) {
    x[0] = words.x;
    x[1] = words.y;
    x[2] = words.z;
    x[3] = words.w;
}
HD void load_four(const float* from, float (&x)[4]) { convert(load_words(from), x); }
HD void store_four(float* to, const float (&x)[4]) { *(float4*)to = {x[0], x[1], x[2], x[3]}; }

// A lane's elements of the rows of a warp and 16 units, as in sums of products.
typedef float Tile[2][4];
typedef Tile Tiles[WARP_TILES];

// The same as they are in memory.
template <class E>
struct Loaded {
    decltype(load_words((const E*)nullptr)) words[WARP_TILES][2];
    HD void to(Tiles& x) const {
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            UNROLL for (int k = 0; k < 2; ++k) {
                float four[4];
                convert(words[m][k], four);
                UNROLL for (int j = 0; j < 4; ++j) x[m][j / 2][2 * k + j % 2] = four[j];
            }
        }
    }
};

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
HD int first_row() { return warp() / COLUMN_WARPS * WARP_ROWS; }

// Whether the episodes of the lane's rows go on.
struct Flags {
    u8 of[WARP_TILES][2];
};

// The lane's rows, 8 apart, and units.
struct Own {
    i64 first;
    bool exists[WARP_TILES][2];
    int unit;
    HD Own(i64 first_of_block, i64 rows)
        : first(first_of_block + first_row() + tensor_core::group()), unit(first_column() + 4 * tensor_core::member()) {
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            UNROLL for (int k = 0; k < 2; ++k) exists[m][k] =
                first + 16 * m + 8 * k < rows && (UNITS % 16 == 0 || unit < UNITS);
        }
    }
    // Of elements at from + row * stride + unit, where the lane's first ones are; of a step, which `before` rows
    // precede.
    template <class E>
    HD E* in(E* from, i64 stride, i64 before = 0) const {
        return from + (before + first) * stride + unit;
    }
    // Elements from such an address on; 0 where there are none.
    template <class E>
    HD void load(const E* from, i64 stride, Loaded<E>& x) const {
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            UNROLL for (int k = 0; k < 2; ++k) {
                x.words[m][k] = {};
                if (exists[m][k]) x.words[m][k] = load_words(from + (16 * m + 8 * k) * stride);
            }
        }
    }
    template <class E>
    HD void store(E* to, i64 stride, const Tiles& x) const {
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            UNROLL for (int k = 0; k < 2; ++k) {
                if (!exists[m][k]) continue;
                float four[4];
                UNROLL for (int j = 0; j < 4; ++j) four[j] = x[m][j / 2][2 * k + j % 2];
                store_four(to + (16 * m + 8 * k) * stride, four);
            }
        }
    }
    // `active` has a flag for each row.
    HD void load_flags(const bool* active, Flags& flags) const {
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            UNROLL for (int k = 0; k < 2; ++k) {
                flags.of[m][k] = 0;
                if (exists[m][k]) flags.of[m][k] = ((const u8*)active)[first + 16 * m + 8 * k];
            }
        }
    }
};

// 0 in the rows whose episode ended, whatever was there.
HD void keep(const Flags& flags, Tiles& x) {
    UNROLL for (int m = 0; m < WARP_TILES; ++m) {
        UNROLL for (int e = 0; e < 8; ++e) {
            float& element = x[m][e / 4][e % 4];
            element = flags.of[m][e % 4 / 2] ? element : 0.0f;
        }
    }
}

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

HD void store_tiles(int buffer, const Tiles& x) {
    if (BUFFERS == 1) __syncthreads();  // others may still multiply by the one before
    UNROLL for (int m = 0; m < WARP_TILES; ++m) {
        u32 words[Precision::TILE_WORDS];
        Precision::round_tile(x[m], words);
        Precision::store_tile(tile_of(buffer), PITCH, first_row() + 16 * m, first_column(), words);
    }
}

typedef Factor Factors[STEPS_AT_ONCE];

// Factors A of STEPS_AT_ONCE steps, the warp's rows of a tile.
HD void load_rows(int buffer, int column, Factors (&a)[WARP_TILES]) {
    UNROLL for (int m = 0; m < WARP_TILES; ++m) {
        UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
            a[m][s] = Precision::factor<tensor_core::NUMBER>(
                Precision::a_of_rows(tile_of(buffer), PITCH, first_row() + 16 * m, column + s * STEP));
        }
    }
}

// What the states in a tile add to the gates.
HD void multiply_gates(int buffer, Tiles (&sums)[GATES]) {
    _Pragma("unroll UNROLLED_STEPS") for (int k = 0; k < COLUMNS; k += STEP * STEPS_AT_ONCE) {
        Factors a[WARP_TILES], b;
        load_rows(buffer, k, a);
        UNROLL for (int gate = 0; gate < GATES; ++gate) {
            UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
                int output = gate * COLUMNS + first_column();
                b[s] = Precision::factor<tensor_core::NUMBER>(
                    Precision::b_of_outputs<true>(weights(), WEIGHT_PITCH, output, k + s * STEP));
            }
            UNROLL for (int m = 0; m < WARP_TILES; ++m) Precision::multiply(sums[gate][m], a[m], b, true);
        }
    }
}

// Adds gradients with respect to the states, from those in a tile, of a gate.
HD void multiply_back(int buffer, int gate, Tiles& sums) {
    _Pragma("unroll UNROLLED_STEPS") for (int k = 0; k < COLUMNS; k += STEP * STEPS_AT_ONCE) {
        Factors a[WARP_TILES], b;
        load_rows(buffer, k, a);
        UNROLL for (int s = 0; s < STEPS_AT_ONCE; ++s) {
            int output = gate * COLUMNS + k + s * STEP;
            b[s] = Precision::factor<tensor_core::NUMBER>(
                Precision::b_of_inputs(weights(), WEIGHT_PITCH, first_column(), output));
        }
        UNROLL for (int m = 0; m < WARP_TILES; ++m) Precision::multiply(sums[m], a[m], b, true);
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
    // Element (half, e) of tile m.
    HD Gates(const Tiles (&inputs)[GATES], const Tiles (&sums)[GATES], const Biases& biases, int m, int half, int e) {
        const int j = 2 * half + e % 2;
        r = sigmoid(inputs[R][m][half][e] + (sums[R][m][half][e] + biases.of[R][j]));
        z = sigmoid(inputs[Z][m][half][e] + (sums[Z][m][half][e] + biases.of[Z][j]));
        of_state = sums[N][m][half][e] + biases.of[N_OF_STATE][j];
        n = Precision::tanh(math::fma(r, of_state, inputs[N][m][half][e] + biases.of[N][j]));
    }
};

// What the inputs add to the gates of a step.
struct Inputs {
    Loaded<Element> of[GATES];
    // `from` is where the lane's first elements are.
    HD void load(const Own& own, const Element* from, i64 stride) {
        UNROLL for (int gate = 0; gate < GATES; ++gate) own.load(from + gate * UNITS, stride, of[gate]);
    }
    HD void to(Tiles (&x)[GATES]) const { UNROLL for (int gate = 0; gate < GATES; ++gate) of[gate].to(x[gate]); }
};

// Shapes, with R rows: inputs (steps, R, gates, units) of each cell, with strides; states (R, cells, units); all others
// (cells, steps, R, …).
HD void forward(const gru_forward_Arguments& args) {
    const int cell = blockIdx.x % CELLS;
    load_parameters(args.weights + cell * GATES * UNITS * UNITS, args.input_biases + cell * GATES * UNITS,
                    args.state_biases + cell * GATES * UNITS);
    const i64 of_step = args.rows * UNITS, of_cell = cell * args.steps * of_step;
    int buffer = 0;
    for (i64 tile = blockIdx.x / CELLS; tile * ROWS < args.rows; tile += gridDim.x / CELLS) {
        const Own own(tile * ROWS, args.rows);
        const Element* from = own.in((const Element*)args.inputs + cell * args.cell_stride, args.row_stride);
        Element* to = own.in((Element*)args.outputs + of_cell, UNITS);
        Element* previous = args.previous ? own.in((Element*)args.previous + of_cell, UNITS) : nullptr;
        const bool* active = args.active;
        Loaded<float> first_state;
        own.load(own.in(args.states + cell * UNITS, CELLS * UNITS), CELLS * UNITS, first_state);
        Inputs loaded;
        loaded.load(own, from, args.row_stride);
        Tiles state;
        first_state.to(state);
        for (i64 t = 0; t < args.steps; ++t) {
            const bool is_last = t + 1 == args.steps;
            Flags flags = {};
            if (!is_last) own.load_flags(active, flags);
            store_tiles(buffer, state);
            __syncthreads();
            if (previous) own.store(previous, UNITS, state);
            Tiles inputs[GATES], sums[GATES] = {};
            multiply_gates(buffer, sums);
            buffer = (buffer + 1) % BUFFERS;
            loaded.to(inputs);
            const Biases biases(own.unit);
            UNROLL for (int m = 0; m < WARP_TILES; ++m) {
                UNROLL for (int half = 0; half < 2; ++half) {
                    UNROLL for (int e = 0; e < 4; ++e) {
                        const Gates gates(inputs, sums, biases, m, half, e);
                        state[m][half][e] = math::fma(gates.z, state[m][half][e] - gates.n, gates.n);
                    }
                }
            }
            own.store(to, UNITS, state);
            if (is_last) break;
            from += args.rows * args.row_stride;
            loaded.load(own, from, args.row_stride);
            keep(flags, state);
            to += of_step;
            if (previous) previous += of_step;
            active += args.rows;
        }
        if (args.next_states) own.store(own.in(args.next_states + cell * UNITS, CELLS * UNITS), CELLS * UNITS, state);
    }
}

// Sums over the lane's units of gradients of all rows of a tile and all steps, in a fixed order: over the steps, then
// over the lanes.
struct BiasSums {
    float of[KINDS][4];
    HD BiasSums() : of() {}
    HD void add(int kind, const Tile& x) {
        UNROLL for (int j = 0; j < 4; ++j) of[kind][j] += x[j / 2][j % 2] + x[j / 2][2 + j % 2];
    }
    // To the row of the tile.
    HD void store(float* to, int cell, int unit) {
        UNROLL for (int kind = 0; kind < KINDS; ++kind) {
            UNROLL for (int j = 0; j < 4; ++j) {
                UNROLL for (int lanes = 4; lanes < 32; lanes *= 2) of[kind][j] +=
                    __shfl_xor_sync(~0u, of[kind][j], lanes);
            }
            if (tensor_core::group() == 0 && (UNITS % 16 == 0 || unit < UNITS))
                store_four(to + place_of(cell, kind) * UNITS + unit, of[kind]);
        }
    }
};

// From the gradients with respect to the outputs of each cell, (steps, R, units), to those with respect to what inputs
// and states add to the gates, (steps, R, GRADIENT_PITCH). There is a row of sums for each 16 rows.
HD void backward(const gru_backward_Arguments& args) {
    const int cell = blockIdx.x % CELLS;
    load_parameters(args.weights + cell * GATES * UNITS * UNITS, args.input_biases + cell * GATES * UNITS,
                    args.state_biases + cell * GATES * UNITS);
    const Element* inputs_of_cell = (const Element*)args.inputs + cell * args.cell_stride;
    const Element* states = (const Element*)args.previous + cell * args.steps * args.rows * UNITS;
    const Element* of_outputs = (const Element*)(cell == 0 ? args.first_gradients : args.second_gradients);
    int buffer = 0;
    for (i64 tile = blockIdx.x / CELLS; tile * ROWS < args.rows; tile += gridDim.x / CELLS) {
        const Own own(tile * ROWS, args.rows);
        i64 before = (args.steps - 1) * args.rows;
        Loaded<Element> loaded_state;  // before the step
        own.load(own.in(states, UNITS, before), UNITS, loaded_state);
        BiasSums bias_sums[WARP_TILES];
        Tiles carried = {};  // gradients with respect to a step's outputs that come from the step after it
        for (i64 t = args.steps - 1; t >= 0; --t) {
            Inputs loaded;
            Loaded<Element> loaded_found = {};  // gradients with respect to the step's outputs
            loaded.load(own, own.in(inputs_of_cell, args.row_stride, before), args.row_stride);
            if (of_outputs) own.load(own.in(of_outputs, UNITS, before), UNITS, loaded_found);
            Tiles state, found, inputs[GATES], sums[GATES] = {};
            loaded_state.to(state);
            store_tiles(buffer, state);
            __syncthreads();
            multiply_gates(buffer, sums);
            buffer = (buffer + 1) % BUFFERS;
            loaded_found.to(found);
            loaded.to(inputs);
            const Biases biases(own.unit);
            Tiles gradients[KINDS];
            UNROLL for (int m = 0; m < WARP_TILES; ++m) {
                UNROLL for (int half = 0; half < 2; ++half) {
                    UNROLL for (int e = 0; e < 4; ++e) {
                        const Gates gates(inputs, sums, biases, m, half, e);
                        float out = found[m][half][e] + carried[m][half][e];
                        float n = out * (1.0f - gates.z) * math::fma(-gates.n, gates.n, 1.0f);
                        gradients[R][m][half][e] = n * gates.of_state * (gates.r * (1.0f - gates.r));
                        gradients[Z][m][half][e] = out * (state[m][half][e] - gates.n) * (gates.z * (1.0f - gates.z));
                        gradients[N][m][half][e] = n;
                        gradients[N_OF_STATE][m][half][e] = n * gates.r;
                        carried[m][half][e] = out * gates.z;
                    }
                }
            }
            Element* to = own.in((Element*)args.gate_gradients, GRADIENT_PITCH, before);
            UNROLL for (int kind = 0; kind < KINDS; ++kind) {
                own.store(to + place_of(cell, kind) * UNITS, GRADIENT_PITCH, gradients[kind]);
                UNROLL for (int m = 0; m < WARP_TILES; ++m) bias_sums[m].add(kind, gradients[kind][m]);
            }
            if (t == 0) break;  // the gradient of the first state is not needed
            before -= args.rows;
            Flags flags;
            UNROLL for (int first = 0; first < GATES; first += GATES_AT_ONCE) {
                UNROLL for (int gate = first; gate < first + GATES_AT_ONCE; ++gate) {
                    store_tiles((buffer + gate - first) % BUFFERS, gradients[gate == N ? (int)N_OF_STATE : gate]);
                }
                if (first == 0) {  // before it there are too few registers
                    own.load(own.in(states, UNITS, before), UNITS, loaded_state);
                    own.load_flags(args.active + before, flags);
                }
                __syncthreads();
                UNROLL for (int gate = first; gate < first + GATES_AT_ONCE; ++gate) {
                    multiply_back(buffer, gate, carried);
                    buffer = (buffer + 1) % BUFFERS;
                }
            }
            keep(flags, carried);
        }
        UNROLL for (int m = 0; m < WARP_TILES; ++m) {
            const i64 part = (tile * ROWS + first_row()) / 16 + m;
            if (16 * part < args.rows) bias_sums[m].store(args.sums + part * GRADIENT_PITCH, cell, own.unit);
        }
    }
}

}  // namespace gru

KERNEL_WITH_LAUNCH_BOUNDS(gru_forward, gru::THREADS, gru::MIN_BLOCKS) { gru::forward(args); }
KERNEL_WITH_LAUNCH_BOUNDS(gru_backward, gru::THREADS, gru::MIN_BLOCKS) { gru::backward(args); }
