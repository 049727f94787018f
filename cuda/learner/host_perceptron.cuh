// SPDX-License-Identifier: Apache-2.0
// The default network on a CPU, in float32. Compiled with the constants of a game's declaration and of a network, which
// gpu_vecenv/train/perceptron.py generates; perceptron.cuh is its counterpart on a GPU.
//
// A worker computes TILE rows at a time, whose activations stay in the caches. A tower is a trunk and its head.
#pragma once
#include "host_vectors.cuh"
#include "math.cuh"
#include "normalizer.cuh"

namespace perceptron {  // a game's constants may have the same names

using host_vectors::add_product;
using host_vectors::Factor;
using host_vectors::PAD;
using host_vectors::padded;

constexpr int TILE = 64;
constexpr int METRICS = 5;                               // of `loss` in ppo.py
constexpr int PARAMETERS = ACTOR_OUTPUTS + LOG_STDS;     // of the distribution
constexpr int OBS_INPUTS = layer_inputs(0) - AGENT_IDS;  // the others are 1 for the row's agent of the policy, else 0
constexpr int HEAD_OUTPUTS = ACTOR_OUTPUTS + (TOWERS == 1);  // of the first tower; the other has one
HD constexpr int layer_outputs(int layer) { return layer < HIDDEN ? layer_inputs(layer + 1) : HEAD_OUTPUTS; }
template <int L>
constexpr int INPUTS = layer_inputs(L);
template <int L>
constexpr int COLUMNS = padded(layer_inputs(L));
template <int L>
constexpr int OUTPUTS = layer_outputs(L);
template <int L>
constexpr int OUTPUT_COLUMNS = padded(layer_outputs(L));

HD bool has_actor(int tower) { return tower == 0; }
HD bool has_value(int tower) { return tower == TOWERS - 1; }
// The head's output that is the value; -1: none.
HD int value_output(int tower) { return !has_value(tower) ? -1 : has_actor(tower) ? ACTOR_OUTPUTS : 0; }
HD int outputs_of(int layer, int tower) {
    return layer < HIDDEN ? layer_outputs(layer) : (has_actor(tower) ? ACTOR_OUTPUTS : 0) + has_value(tower);
}
// Indices in the flat tensor of all parameters, of the weight from input 0 to an output and of its bias.
HD i64 weight_index(int layer, int tower, int output) {
    if (layer == HIDDEN && output == value_output(tower)) return VALUE_WEIGHTS;
    return first_weight(tower, layer) + (i64)output * layer_inputs(layer);
}
HD i64 bias_index(int layer, int tower, int output) {
    if (layer == HIDDEN && output == value_output(tower)) return VALUE_BIAS;
    return first_bias(tower, layer) + output;
}

// Layers from L on: weights and a tile's inputs. What pads rows and columns is 0 or not read.
template <int L>
struct Layers : Layers<L + 1> {
    float by_input[INPUTS<L>][OUTPUT_COLUMNS<L>], bias[OUTPUT_COLUMNS<L>], inputs[TILE][COLUMNS<L>];

    Layers<L + 1>& next() { return *this; }
    void load(const float* parameters, int tower) {
        const int outputs = outputs_of(L, tower);
        // A few inputs at a time: an output's elements in all rows may fall into few sets of the cache, and evict each
        // other before the next output's, in the same lines, are written.
        for (int first = 0; first < INPUTS<L>; first += PAD) {
            const int end = first + PAD < INPUTS<L> ? first + PAD : INPUTS<L>;
            for (int n = 0; n < OUTPUT_COLUMNS<L>; ++n) {
                const float* weights = n < outputs ? parameters + weight_index(L, tower, n) : nullptr;
                for (int k = first; k < end; ++k) by_input[k][n] = weights ? weights[k] : 0;
            }
        }
        for (int n = 0; n < OUTPUT_COLUMNS<L>; ++n) bias[n] = n < outputs ? parameters[bias_index(L, tower, n)] : 0;
        next().load(parameters, tower);
    }
    // Computes the inputs of all layers after this one, of so many rows, a multiple of PAD.
    void forward(int rows) {
        float* out = next().inputs[0];
        for (int row = 0; row < rows; ++row) __builtin_memcpy(out + row * OUTPUT_COLUMNS<L>, bias, sizeof bias);
        add_product<OUTPUT_COLUMNS<L>>({inputs[0], COLUMNS<L>, 1}, by_input[0], out, rows, INPUTS<L>);
        if constexpr (L < HIDDEN) {
            for (int k = 0; k < rows * OUTPUT_COLUMNS<L>; ++k) out[k] = RELU ? relu(out[k]) : math::tanh(out[k]);
            next().forward(rows);
        }
    }
    static float relu(float x) { return x < 0 ? 0.0f : x; }  // NaN stays
};
// The results of the head.
template <>
struct Layers<HIDDEN + 1> {
    float inputs[TILE][OUTPUT_COLUMNS<HIDDEN>];

    void load(const float*, int) {}
};

using ReturnScale = ReturnScaleIf<NORMALIZE_RETURNS != 0>;

struct ObsScale {
    float mean[OBS_INPUTS], deviation[OBS_INPUTS];

    // Statistics begin at an index.
    ObsScale([[maybe_unused]] const double* obs_mean, [[maybe_unused]] const double* obs_var, i64 at = 0) {
        for (int k = 0; NORMALIZE_OBS && k < OBS_INPUTS; ++k) {
            mean[k] = (float)obs_mean[at + k];
            deviation[k] = standard_deviation(obs_var[at + k]);
        }
    }
    // Writes one row of the first layer's inputs, of an agent of the policy.
    void copy(const Observation* obs, int agent, float* row) const {
        for (int k = 0; k < AGENT_IDS; ++k) row[OBS_INPUTS + k] = k == agent;
        for (int k = 0; k < OBS_INPUTS; ++k) {
            float x = obs[k];
            if constexpr (NORMALIZE_OBS)
                x = math::clamp((x - mean[k]) / deviation[k], -OBS_CLIP, OBS_CLIP);
            else if constexpr (sizeof(Observation) == 1)
                x = x / OBS_SCALE;
            row[k] = x;
        }
    }
};

// A worker's memory, of SCRATCH floats.
template <class T>
HD T& memory_of(float* scratch, i64 worker) {
    static_assert(sizeof(T) <= SCRATCH * sizeof(float), "as Python allocates it");
    return *(T*)(scratch + worker * SCRATCH);
}

}  // namespace perceptron
