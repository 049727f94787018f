// SPDX-License-Identifier: Apache-2.0
// perceptron_gradients.cu for a CPU.
#include "host_perceptron.cuh"

#include "loss.cuh"

namespace perceptron {

// Gradients of layers 0 … L: of their weights and biases, as sums over tiles; with respect to a tile's results.
template <int L>
struct Gradients : Gradients<L - 1> {
    float weights[OUTPUT_COLUMNS<L>][COLUMNS<L>], bias[OUTPUT_COLUMNS<L>];
    float by_output[OUTPUTS<L>][COLUMNS<L>];    // the layer's weights
    float of_outputs[TILE][OUTPUT_COLUMNS<L>];  // with respect to the layer's results, before their activation

    void begin(const float* parameters, int tower) {
        __builtin_memset(weights, 0, sizeof weights);
        __builtin_memset(bias, 0, sizeof bias);
        for (int n = 0; n < OUTPUTS<L>; ++n) {
            const float* own = n < outputs_of(L, tower) ? parameters + weight_index(L, tower, n) : nullptr;
            for (int k = 0; k < COLUMNS<L>; ++k) by_output[n][k] = own && k < INPUTS<L> ? own[k] : 0;
        }
        if constexpr (L > 0) Gradients<L - 1>::begin(parameters, tower);
    }
    // From `of_outputs` of `count` rows, and the inputs of the forward pass.
    void backward(const Layers<0>& layers, int count) {
        const auto& inputs = static_cast<const Layers<L>&>(layers).inputs;
        constexpr int N = OUTPUT_COLUMNS<L>;
        add_product<COLUMNS<L>>({of_outputs[0], 1, N}, inputs[0], weights[0], N, count);
        float sums[N] = {};
        for (int row = 0; row < count; ++row)
            for (int n = 0; n < N; ++n) sums[n] += of_outputs[row][n];
        for (int n = 0; n < N; ++n) bias[n] += sums[n];
        if constexpr (L > 0) {
            float* out = Gradients<L - 1>::of_outputs[0];
            const float* activations = inputs[0];
            const int rows = padded(count);
            __builtin_memset(out, 0, rows * COLUMNS<L> * sizeof(float));
            add_product<COLUMNS<L>>({of_outputs[0], N, 1}, by_output[0], out, rows, OUTPUTS<L>);
            for (int k = 0; k < rows * COLUMNS<L>; ++k) {
                float y = activations[k];
                out[k] = RELU ? (y <= 0 ? 0.0f : out[k]) : out[k] * (1.0f - y * y);
            }
            Gradients<L - 1>::backward(layers, count);
        }
    }
    void write(float* out, int tower) const {
        for (int n = 0; n < outputs_of(L, tower); ++n) {
            __builtin_memcpy(out + weight_index(L, tower, n), weights[n], INPUTS<L> * sizeof(float));
            out[bias_index(L, tower, n)] = bias[n];
        }
        if constexpr (L > 0) Gradients<L - 1>::write(out, tower);
    }
};
template <>
struct Gradients<-1> {};

struct Memory {
    Layers<0> layers;
    Gradients<HIDDEN> gradients;
};

// What the losses of all rows have in common, and sums over them.
struct Losses {
    const perceptron_gradients_Arguments& args;
    const Minibatch minibatch;
    const ReturnScale return_scale;
    float log_stds[LOG_STDS + 1], metrics[METRICS];  // of a tile

    explicit Losses(const perceptron_gradients_Arguments& args)
        : args(args),
          minibatch(minibatch_of(args.moments, args.normalize_advantages)),
          return_scale(ReturnScale::of(args.return_mean, args.return_var)) {}

    void begin_tile() {
        for (float& x : log_stds) x = 0;
        for (float& x : metrics) x = 0;
    }
    // One row: gradients with respect to the head's results.
    void add(const float* results, i64 index, int tower, float* gradients) {
        for (int k = 0; k < OUTPUT_COLUMNS<HIDDEN>; ++k) gradients[k] = 0;
        if (!args.active[index]) return;
        bool acted = true;
#if TRACKS_ACTING
        acted = args.acting[index];
#endif
        if (has_actor(tower) && acted) add_policy(results, index, gradients);
        if (int output = value_output(tower); output >= 0) {
            ValueLoss loss =
                value_loss(return_scale.value(results[output]), args.old_values[index], args.returns[index],
                           return_scale.scale, minibatch.value_count, args.value_coefficient, args.value_clip,
                           args.scales_value_clip, args.huber_delta);
            metrics[1] += loss.loss;
            gradients[output] = loss.gradient * return_scale.scale;
        }
    }

  private:
    void add_policy(const float* results, i64 index, float* out) {
        float x[PARAMETERS], gradients[PARAMETERS] = {};
        for (int k = 0; k < PARAMETERS; ++k)
            x[k] = k < ACTOR_OUTPUTS ? results[k] : args.parameters[LOG_STD_INDEX + k - ACTOR_OUTPUTS];
        const Action* draws = args.draws + index * ACTION_HEADS;
        const bool* mask = args.action_mask + (ACTION_MASKS ? index * NUM_LOGITS : 0);
        int agent = (int)(index % NUM_AGENTS);
        const Part<1> all = {0};
        Distribution<1> d = distribution(x, draws, mask, agent, gradients, all);
        sum_heads(d, [](float of_head, int) { return of_head; });
        PolicyLoss loss = policy_gradients(d, x, draws, mask, agent, args.log_probs[index], args.estimates[index],
                                           minibatch, *args.clip, *args.entropy_coefficient, gradients, all,
                                           [&](int k, float gradient) { gradients[k] = gradient; });
        metrics[0] += loss.loss;
        metrics[2] += loss.entropy;
        metrics[3] += loss.approx_kl;
        metrics[4] += loss.clip_fraction;
        for (int k = 0; k < ACTOR_OUTPUTS; ++k) out[k] = gradients[k];
        for (int k = 0; k < LOG_STDS; ++k) log_stds[k] += gradients[ACTOR_OUTPUTS + k];
    }
};

// The sums of one part of the samples, for one tower, in a row of `parts`.
static void sum_part(const perceptron_gradients_Arguments& args, i64 part, int tower, Memory& memory) {
    const ObsScale obs_scale(args.obs_mean, args.obs_var);
    Losses losses(args);
    memory.layers.load(args.parameters, tower);
    memory.gradients.begin(args.parameters, tower);
    const auto& results = static_cast<Layers<HIDDEN + 1>&>(memory.layers).inputs;
    float sums[LOG_STDS + METRICS] = {};
    const i64 end = args.rows * (part + 1) / args.num_parts;
    for (i64 first = args.rows * part / args.num_parts; first < end; first += TILE) {
        int count = (int)(end - first < TILE ? end - first : TILE);
        const i64* indices = args.indices + first;
        for (int row = 0; row < count; ++row)
            obs_scale.copy((const Observation*)args.obs + indices[row] * args.obs_stride,
                           position_of((int)(indices[row] % NUM_AGENTS)), memory.layers.inputs[row]);
        memory.layers.forward(padded(count));
        losses.begin_tile();
        for (int row = 0; row < count; ++row)
            losses.add(results[row], indices[row], tower, memory.gradients.of_outputs[row]);
        for (int k = 0; k < LOG_STDS; ++k) sums[k] += losses.log_stds[k];
        for (int k = 0; k < METRICS; ++k) sums[LOG_STDS + k] += losses.metrics[k];
        memory.gradients.backward(memory.layers, count);
    }
    float* out = args.parts + part * (NUM_PARAMETERS + METRICS);
    memory.gradients.write(out, tower);
    if (has_actor(tower))
        for (int k = 0; k < LOG_STDS; ++k) out[LOG_STD_INDEX + k] = sums[k];
    for (int k = 0; k < METRICS; ++k)
        if (k == 1 ? has_value(tower) : has_actor(tower)) out[NUM_PARAMETERS + k] = sums[LOG_STDS + k];
}

}  // namespace perceptron

KERNEL(perceptron_gradients) {
    using namespace perceptron;
    if (args.skip_update && *args.skip_update == 1) return;
    auto& memory = memory_of<Memory>(args.scratch, worker_);
    FOR_ITEMS (item, args.num_parts * TOWERS) sum_part(args, item / TOWERS, (int)(item % TOWERS), memory);
}
