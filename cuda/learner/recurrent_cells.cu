// SPDX-License-Identifier: Apache-2.0
// What a step of GRU or LSTM cells computes beside its matrix products, which are torch's, forward and back. Compiled
// with the constants of gpu_vecenv/train/recurrent_cells.py: the kind of the cells, their number, the units of each,
// and the type of what products read and give.
//
// Gates are those of torch.nn.GRUCell and LSTMCell, in their order. States are float32. An item is one unit of one cell
// in one row.
//
// Shapes, with L steps, R rows, C cells and u units: inputs (C, L, R, gates u) with strides; biases (C, gates u);
// active (L, R); states (R, parts, C, u); outputs, previous and previous_cells (C, L, R, u).
#include "math.cuh"

namespace cells {

#if BFLOAT16
typedef unsigned short Element;
HD float load(Element x) { return math::from_bits((u32)x << 16); }
HD Element rounded(float x) {
    u32 bits = math::bits(x);
    return (Element)(math::is_nan(x) ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#else
typedef float Element;
HD float load(Element x) { return x; }
HD Element rounded(float x) { return x; }
#endif

constexpr int GATES = LSTM ? 4 : 3, PARTS = LSTM ? 2 : 1;

HD float sigmoid(float x) { return 1.0f / (1.0f + math::exp(-x)); }
HD float sigmoid_gradient(float y) { return y * (1.0f - y); }
HD float tanh_gradient(float y) { return math::fma(-y, y, 1.0f); }

struct Item {
    i64 row, cell, unit;
    HD Item(i64 k) : row(k / (CELLS * UNITS)), cell(k / UNITS % CELLS), unit(k % UNITS) {}
    // Of a tensor (C, R, u).
    HD i64 of_step(i64 rows) const { return (cell * rows + row) * UNITS + unit; }
    // Of a tensor (R, parts, C, u).
    HD i64 of_states(int part) const { return ((row * PARTS + part) * CELLS + cell) * UNITS + unit; }
};

// What inputs and the state add to each gate, with the biases.
struct Sums {
    float inputs[GATES], states[GATES];
    HD Sums(const Item& item, const Element* of_inputs, const Element* of_states, const float* input_biases,
            const float* state_biases) {
        UNROLL for (int gate = 0; gate < GATES; ++gate) {
            i64 bias = (item.cell * GATES + gate) * UNITS + item.unit;
            inputs[gate] = load(of_inputs[gate * UNITS + item.unit]) + input_biases[bias];
            states[gate] = load(of_states[gate * UNITS + item.unit]) + state_biases[bias];
        }
    }
};

struct Gru {
    float r, z, n, of_state;  // the last is what the state adds to n
    HD Gru(const Sums& sums)
        : r(sigmoid(sums.inputs[0] + sums.states[0])),
          z(sigmoid(sums.inputs[1] + sums.states[1])),
          n(math::tanh(math::fma(r, sums.states[2], sums.inputs[2]))),
          of_state(sums.states[2]) {}
    HD float output(float state) const { return math::fma(z, state - n, n); }
};

struct Lstm {
    float enter, forget, candidate, leave, cell, tanh;  // the last two: the next state of the cell, and its tanh
    HD Lstm(const Sums& sums, float cell_before)
        : enter(sigmoid(sums.inputs[0] + sums.states[0])),
          forget(sigmoid(sums.inputs[1] + sums.states[1])),
          candidate(math::tanh(sums.inputs[2] + sums.states[2])),
          leave(sigmoid(sums.inputs[3] + sums.states[3])),
          cell(math::fma(forget, cell_before, enter * candidate)),
          tanh(math::tanh(cell)) {}
    HD float output() const { return leave * tanh; }
};

}  // namespace cells

// `hidden` (C, R, gates u) is what the states add in this step, without biases. The next states, and the next step's
// `previous`, are 0 in rows that are not active, whatever was there.
KERNEL(cells_forward) {
    using namespace cells;
    FOR_ITEMS (k, CELLS * args.rows * UNITS) {
        const Item item(k);
        const i64 row = args.step * args.rows + item.row, at = item.cell * args.steps * args.rows + row;
        const Sums sums(item, (const Element*)args.inputs + item.cell * args.cell_stride + row * args.row_stride,
                        (const Element*)args.hidden + (item.cell * args.rows + item.row) * GATES * UNITS,
                        args.input_biases, args.state_biases);
        const bool goes_on = !args.active || args.active[row];
        float output;
        if constexpr (LSTM) {
            const float before = args.states[item.of_states(1)];
            const Lstm gates(sums, before);
            output = gates.output();
            if (args.previous_cells) args.previous_cells[at * UNITS + item.unit] = before;
            args.next_states[item.of_states(1)] = goes_on ? gates.cell : 0.0f;
        } else {
            output = Gru(sums).output(args.states[item.of_states(0)]);
        }
        ((Element*)args.outputs)[at * UNITS + item.unit] = rounded(output);
        const float next = goes_on ? output : 0.0f;
        args.next_states[item.of_states(0)] = next;
        if (args.step + 1 < args.steps) ((Element*)args.previous)[(at + args.rows) * UNITS + item.unit] = rounded(next);
    }
}

// `hidden` (C, L, R, gates u) is what the states add in all steps; of a GRU the gradients with respect to it replace
// it. Those with respect to what inputs add, which of an LSTM are the same, are gate_gradients (L, R, C, gates u).
// `carried` (C, R, u) is the gradient of the state before the step, of an LSTM that of the cell's, but for the part
// through the products, `products`.
KERNEL(cells_backward) {
    using namespace cells;
    FOR_ITEMS (k, CELLS * args.rows * UNITS) {
        const Item item(k);
        const i64 row = args.step * args.rows + item.row, at = item.cell * args.steps * args.rows + row;
        const i64 of_step = item.of_step(args.rows);
        Element* hidden = (Element*)args.hidden + at * GATES * UNITS;
        const Sums sums(item, (const Element*)args.inputs + item.cell * args.cell_stride + row * args.row_stride,
                        hidden, args.input_biases, args.state_biases);
        float out = load(((const Element*)args.output_gradients)[at * UNITS + item.unit]), carried = 0;
        if (args.step + 1 < args.steps && args.active[row]) {
            carried = args.carried[of_step];
            out += load(((const Element*)args.products)[of_step]);
        }
        Element* to = (Element*)args.gate_gradients + (row * CELLS + item.cell) * GATES * UNITS + item.unit;
        if constexpr (LSTM) {
            const float before = args.previous_cells[at * UNITS + item.unit];
            const Lstm gates(sums, before);
            const float cell = math::fma(out * gates.leave, tanh_gradient(gates.tanh), carried);
            to[0 * UNITS] = rounded(cell * gates.candidate * sigmoid_gradient(gates.enter));
            to[1 * UNITS] = rounded(cell * before * sigmoid_gradient(gates.forget));
            to[2 * UNITS] = rounded(cell * gates.enter * tanh_gradient(gates.candidate));
            to[3 * UNITS] = rounded(out * gates.tanh * sigmoid_gradient(gates.leave));
            args.carried[of_step] = cell * gates.forget;
        } else {
            out += carried;
            const float state = load(((const Element*)args.previous)[at * UNITS + item.unit]);
            const Gru gates(sums);
            const float n = out * (1.0f - gates.z) * tanh_gradient(gates.n);
            const Element r = rounded(n * gates.of_state * sigmoid_gradient(gates.r));
            const Element z = rounded(out * (state - gates.n) * sigmoid_gradient(gates.z));
            to[0 * UNITS] = hidden[0 * UNITS + item.unit] = r;
            to[1 * UNITS] = hidden[1 * UNITS + item.unit] = z;
            to[2 * UNITS] = rounded(n);
            hidden[2 * UNITS + item.unit] = rounded(n * gates.r);
            args.carried[of_step] = out * gates.z;
        }
    }
}
