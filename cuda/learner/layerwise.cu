// SPDX-License-Identifier: Apache-2.0
// The default network one layer at a time: what is between the matrix products, which are torch's. Compiled with the
// constants of a game's declaration and of a network; gpu_vecenv/train/layerwise.py has the order of the launches.
//
// Matrices have a row for each sample, padded with zeros to packs of 16 bytes. A padded element stays 0 whatever the
// row has, so that neither NaN nor infinity spreads from there.
#include "layer_elements.cuh"
#include "loss.cuh"
#include "normalizer.cuh"

namespace layerwise {  // a game's constants may have the same names

constexpr int BLOCK = 256;       // threads per block; the same as BLOCK in layerwise_kernels.py
constexpr int LOSS_BLOCK = 128;  // threads per block of the loss; the same as LOSS_BLOCK in layerwise_kernels.py
constexpr int METRICS = 5;
constexpr int PARAMETERS = ACTOR_OUTPUTS + LOG_STDS;  // of an agent's distribution
constexpr bool SHARED_TRUNK = TOWERS == 1;

using ReturnScale = ReturnScaleIf<NORMALIZE_RETURNS != 0>;

constexpr int INPUT_PACKS = packs_of(INPUTS);
constexpr int OBS_INPUTS = INPUTS - AGENT_IDS;  // the others are 1 for the row's agent of the policy, else 0
constexpr int ACTOR_PITCH = WIDTH * packs_of(ACTOR_OUTPUTS + SHARED_TRUNK), CRITIC_PITCH = WIDTH;

// The rows of a tile of a layer's UNITS, distributed over a block: a thread has one pack of every GROUPS-th row. With
// more packs than threads a tile is done in several parts, from pack `first` on.
template <int UNITS>
struct Share {
    static constexpr int ALL = packs_of(UNITS), PACKS = ALL < BLOCK ? ALL : BLOCK, GROUPS = BLOCK / PACKS;
    static constexpr int LOADS = 4;  // in flight
    int pack, group;
    bool exists;
    HD Share(int first)
        : pack(first + (int)threadIdx.x % PACKS),
          group((int)threadIdx.x / PACKS),
          exists(group < GROUPS && pack < ALL) {}
    HD i64 at(i64 row) const { return row * ALL + pack; }
    HD bool has_unit(int k) const { return pack * WIDTH + k < UNITS; }

    // Calls load(k, row) for the next rows before end, and then use(k, row) for each of them, until there are none.
    template <class L, class U>
    HD void for_rows(i64 begin, i64 end, L load, U use) const {
        if (!exists) return;
        for (i64 row = begin + group; row < end; row += LOADS * GROUPS) {
            UNROLL for (int k = 0; k < LOADS; ++k) if (row + k * GROUPS < end) load(k, row + k * GROUPS);
            UNROLL for (int k = 0; k < LOADS; ++k) if (row + k * GROUPS < end) use(k, row + k * GROUPS);
        }
    }
};

// Calls f(size) with the layer's units, the k-th of HIDDEN_SIZES, as a constant of its type.
template <int UNITS>
struct Size {
    static constexpr int UNITS_OF_LAYER = UNITS;
};
// NVRTC 13.0 takes generic lambdas for functions of the host: F is a struct.
template <int K = 0, class F>
HD void with_size(int k, F f) {
    if constexpr (K + 1 < HIDDEN_SIZES) {
        if (k != K) return with_size<K + 1>(k, f);
    }
    f(Size<hidden_size(K)>());
}

// The outputs of the heads, without their biases.
struct Heads {
    const float *actor, *critic;  // rows of ACTOR_PITCH and CRITIC_PITCH floats
    const float* parameters;      // all of the network

    // A parameter of the row's distribution, or behind them its value.
    HD float operator()(i64 row, int k) const {
        if (k < ACTOR_OUTPUTS) return actor[row * ACTOR_PITCH + k] + parameters[ACTOR_BIAS + k];
        if (k < PARAMETERS) return parameters[LOG_STD_INDEX + k - ACTOR_OUTPUTS];
        float value = SHARED_TRUNK ? actor[row * ACTOR_PITCH + ACTOR_OUTPUTS] : critic[row * CRITIC_PITCH];
        return value + parameters[VALUE_BIAS];
    }
};

// The weights as the products read them, `sources` of the network's parameters; -1 is padding. Also mean and standard
// deviation of each input.
HD void store_weights(const store_weights_Arguments& args) {
    FOR_ITEMS (k, args.elements / WIDTH) {
        float x[WIDTH];
        UNROLL for (int j = 0; j < WIDTH; ++j) {
            i64 source = args.sources[k * WIDTH + j];
            x[j] = source < 0 ? 0.0f : args.parameters[source];
        }
        ((Pack*)args.weights)[k] = packed(x);
    }
    FOR_ITEMS (k, NORMALIZE_OBS ? OBS_INPUTS : 0) {
        args.obs_scales[k] = (float)args.obs_mean[k];
        args.obs_scales[OBS_INPUTS + k] = standard_deviation(args.obs_var[k]);
    }
}

constexpr int GATHERED_ROWS = 64;  // of a block; the same as GATHERED_ROWS in layerwise_kernels.py

// The inputs of the first layer: the observations at `indices`, `obs_stride` elements apart, normalised.
HD void gather_inputs(const gather_inputs_Arguments& args) {
    const Observation* obs = (const Observation*)args.obs;
    const float* scales = args.obs_scales;
    for (i64 tile = blockIdx.x; tile < (args.rows + GATHERED_ROWS - 1) / GATHERED_ROWS; tile += gridDim.x) {
        i64 first = tile * GATHERED_ROWS;
        for (int k = threadIdx.x; k < GATHERED_ROWS * INPUT_PACKS; k += blockDim.x) {
            i64 row = first + k / INPUT_PACKS;
            int column = k % INPUT_PACKS * WIDTH;
            if (row >= args.rows) continue;
            const i64 index = args.indices[row];
            const Observation* own = obs + index * args.obs_stride + column;
            const int agent = AGENT_IDS > 0 ? position_of((int)((u64)index % NUM_AGENTS)) : 0;
            float x[WIDTH];
            UNROLL for (int j = 0; j < WIDTH; ++j) {
                int id = column + j - OBS_INPUTS;
                x[j] = id < 0 ? (float)own[j] : AGENT_IDS > 0 && id == agent ? 1.0f : 0.0f;
            }
            UNROLL for (int j = 0; j < WIDTH; ++j) {
                if (column + j >= OBS_INPUTS) continue;
                if constexpr (NORMALIZE_OBS) {
                    x[j] = (x[j] - scales[column + j]) / scales[OBS_INPUTS + column + j];
                    x[j] = math::clamp(x[j], -OBS_CLIP, OBS_CLIP);
                } else if constexpr (sizeof(Observation) == 1) {
                    x[j] = x[j] / OBS_SCALE;
                }
            }
            ((Pack*)args.inputs)[row * INPUT_PACKS + k % INPUT_PACKS] = packed(x);
        }
    }
}

constexpr int ACTIVATED_ROWS = 64;  // of a block; the same as ACTIVATED_ROWS in layerwise_kernels.py

// Adds the bias of a layer to its products and applies the activation, in place.
template <int UNITS>
HD void activate_layer(const activate_Arguments& args) {
    typedef Share<UNITS> Own;
    Pack* outputs = (Pack*)args.outputs;
    for (i64 tile = blockIdx.x; tile < (args.rows + ACTIVATED_ROWS - 1) / ACTIVATED_ROWS; tile += gridDim.x) {
        i64 end = smaller((tile + 1) * ACTIVATED_ROWS, args.rows);
        for (int first = 0; first < Own::ALL; first += BLOCK) {
            const Own own(first);
            float bias[WIDTH];
            UNROLL for (int j = 0; j < WIDTH; ++j) {
                bias[j] = own.has_unit(j) ? args.parameters[args.bias + own.pack * WIDTH + j] : 0.0f;
            }
            Pack loaded[Own::LOADS];
            own.for_rows(
                tile * ACTIVATED_ROWS, end, [&](int k, i64 row) { loaded[k] = outputs[own.at(row)]; },
                [&](int k, i64 row) {
                    float x[WIDTH];
                    unpack(loaded[k], x);
                    UNROLL for (int j = 0; j < WIDTH; ++j) x[j] = own.has_unit(j) ? activation(x[j] + bias[j]) : 0.0f;
                    outputs[own.at(row)] = packed(x);
                });
        }
    }
}
struct ActivateLayer {
    const activate_Arguments& args;
    template <class S>
    HD void operator()(S) const {
        activate_layer<S::UNITS_OF_LAYER>(args);
    }
};
HD void activate(const activate_Arguments& args) { with_size(args.size, ActivateLayer{args}); }

// From the gradients with respect to a layer's activations to those with respect to what they were computed from, in
// place, and their sums over each tile of `tile_rows` rows: `sums` has a row of SUMS_PITCH floats for each tile.
template <int UNITS>
HD void layer_gradients(const activation_gradients_Arguments& args) {
    typedef Share<UNITS> Own;
    __shared__ float of_threads[BLOCK * WIDTH];
    Pack* gradients = (Pack*)args.gradients;
    const Pack* outputs = (const Pack*)args.outputs;
    for (i64 tile = blockIdx.x; tile < (args.rows + args.tile_rows - 1) / args.tile_rows; tile += gridDim.x) {
        i64 end = smaller((tile + 1) * args.tile_rows, args.rows);
        float* sums = args.sums + tile * SUMS_PITCH + args.first_sum;
        for (int first = 0; first < Own::ALL; first += BLOCK) {
            const Own own(first);
            float of_thread[WIDTH] = {};
            Pack loaded[Own::LOADS], loaded_outputs[Own::LOADS];
            own.for_rows(
                tile * args.tile_rows, end,
                [&](int k, i64 row) {
                    loaded[k] = gradients[own.at(row)];
                    loaded_outputs[k] = outputs[own.at(row)];
                },
                [&](int k, i64 row) {
                    float x[WIDTH], y[WIDTH];
                    unpack(loaded[k], x);
                    unpack(loaded_outputs[k], y);
                    UNROLL for (int j = 0; j < WIDTH; ++j) {
                        x[j] = own.has_unit(j) ? activation_gradient(x[j], y[j]) : 0.0f;
                        of_thread[j] += x[j];
                    }
                    gradients[own.at(row)] = packed(x);
                });
            UNROLL for (int j = 0; j < WIDTH; ++j) of_threads[(int)threadIdx.x * WIDTH + j] = of_thread[j];
            __syncthreads();
            for (int k = threadIdx.x; k < Own::PACKS * WIDTH && first * WIDTH + k < UNITS; k += BLOCK) {
                float sum = of_threads[k];
                for (int group = 1; group < Own::GROUPS; ++group) sum += of_threads[group * Own::PACKS * WIDTH + k];
                sums[first * WIDTH + k] = sum;
            }
            __syncthreads();  // of_threads is in use until here
        }
    }
}
struct LayerGradients {
    const activation_gradients_Arguments& args;
    template <class S>
    HD void operator()(S) const {
        layer_gradients<S::UNITS_OF_LAYER>(args);
    }
};
HD void activation_gradients(const activation_gradients_Arguments& args) { with_size(args.size, LayerGradients{args}); }

// The parameters of the distributions of the agents at `indices`, and their values, as perceptron_forward.cu has them.
HD void head_outputs(const head_outputs_Arguments& args) {
    const Heads heads = {args.actor, args.critic, args.parameters};
    const ReturnScale scale = ReturnScale::of(args.return_mean, args.return_var);
    FOR_ITEMS (k, args.rows * (PARAMETERS + 1)) {
        i64 row = k / (PARAMETERS + 1), index = args.indices[row];
        int element = (int)(k % (PARAMETERS + 1));
        if (element == PARAMETERS) {
            args.values[index] = scale.value(heads(row, element));
        } else if (args.outputs) {
            int column = args.columns[element];
            bool forbidden = args.action_mask && !args.action_mask[index * args.choices + column];
            args.outputs[index * PARAMETERS_PER_AGENT + column] = forbidden ? args.masked_logit : heads(row, element);
        }
    }
}

constexpr int SUMS = PARAMETERS + 1 + METRICS;  // of each row: gradients of the heads' outputs, then metrics
constexpr int RESULT_PITCH = (PARAMETERS + 1) | 1, GRADIENT_PITCH = SUMS | 1;  // odd, against bank conflicts
// Rows that a block computes at a time, one thread each.
HD constexpr int loss_rows() {
    int rows = LOSS_BLOCK;
    while (rows > 1 && rows * (RESULT_PITCH + GRADIENT_PITCH) * 4 > LOSS_SHARED_BYTES) rows /= 2;
    return rows;
}
constexpr int LOSS_ROWS = loss_rows();

// The loss of one row and its gradients with respect to x, the parameters of its distribution and its value.
HD void row_loss(const head_loss_Arguments& args, i64 index, const float* x, const ReturnScale& scale, float* out) {
    float* metrics = out + PARAMETERS + 1;
    for (int k = 0; k < SUMS; ++k) out[k] = 0;
    if (!args.active[index]) return;
    const Minibatch minibatch = minibatch_of(args.moments, args.normalize_advantages);
    ValueLoss value = value_loss(scale.value(x[PARAMETERS]), args.old_values[index], args.returns[index], scale.scale,
                                 minibatch.value_count, args.value_coefficient, args.value_clip, args.scales_value_clip,
                                 args.huber_delta);
    out[PARAMETERS] = value.gradient * scale.scale;
    metrics[1] = value.loss;
#if TRACKS_ACTING
    if (!args.acting[index]) return;
#endif
    const Action* draws = args.draws + index * ACTION_HEADS;
    const bool* mask = args.action_mask + (ACTION_MASKS ? index * NUM_LOGITS : 0);
    int agent = (int)(index % NUM_AGENTS);
    const Part<1> all = {0};
    Distribution<1> d = distribution(x, draws, mask, agent, out, all);
    sum_heads(d, [](float of_head, int) { return of_head; });
    PolicyLoss policy =
        policy_gradients(d, x, draws, mask, agent, args.log_probs[index], args.estimates[index], minibatch, *args.clip,
                         *args.entropy_coefficient, out, all, [=](int k, float gradient) { out[k] = gradient; });
    metrics[0] = policy.loss;
    metrics[2] = policy.entropy;
    metrics[3] = policy.approx_kl;
    metrics[4] = policy.clip_fraction;
}

// The gradient with respect to an output of the actor's head, or of the critic's own; 0 where it is padding.
HD float head_gradient(const float* gradients, bool actor, int output) {
    if (!actor) return output == 0 ? gradients[PARAMETERS] : 0.0f;
    if (output < ACTOR_OUTPUTS) return gradients[output];
    return SHARED_TRUNK && output == ACTOR_OUTPUTS ? gradients[PARAMETERS] : 0.0f;
}

template <bool ACTOR, int PITCH>
HD void store_head_gradients(const float* gradients, void* out, i64 first, int rows) {
    constexpr int PACKS = PITCH / WIDTH;
    for (int k = threadIdx.x; k < rows * PACKS; k += LOSS_BLOCK) {
        float x[WIDTH];
        UNROLL for (int j = 0; j < WIDTH; ++j) {
            x[j] = head_gradient(gradients + k / PACKS * GRADIENT_PITCH, ACTOR, k % PACKS * WIDTH + j);
        }
        ((Pack*)out)[first * PACKS + k] = packed(x);
    }
}

// The loss of the samples at `indices`, its gradients with respect to the outputs of the heads, and for each tile of
// `tile_rows` rows the sums of these, of the gradients of the log standard deviations and of the metrics.
HD void head_loss(const head_loss_Arguments& args) {
    __shared__ float results[LOSS_ROWS * RESULT_PITCH];
    __shared__ float gradients[LOSS_ROWS * GRADIENT_PITCH];
    const Heads heads = {args.actor, args.critic, args.parameters};
    const ReturnScale scale = ReturnScale::of(args.return_mean, args.return_var);
    for (i64 tile = blockIdx.x; tile < (args.rows + args.tile_rows - 1) / args.tile_rows; tile += gridDim.x) {
        float* sums = args.sums + tile * SUMS_PITCH + FIRST_HEAD_SUM;
        i64 end = smaller((tile + 1) * args.tile_rows, args.rows);
        for (i64 first = tile * args.tile_rows; first < end; first += LOSS_ROWS) {
            int rows = (int)(end - first < LOSS_ROWS ? end - first : LOSS_ROWS);
            for (int k = threadIdx.x; k < rows * (PARAMETERS + 1); k += blockDim.x) {
                int row = k / (PARAMETERS + 1), element = k % (PARAMETERS + 1);
                results[row * RESULT_PITCH + element] = heads(first + row, element);
            }
            __syncthreads();
            for (int row = threadIdx.x; row < rows; row += blockDim.x) {
                row_loss(args, args.indices[first + row], results + row * RESULT_PITCH, scale,
                         gradients + row * GRADIENT_PITCH);
            }
            __syncthreads();
            store_head_gradients<true, ACTOR_PITCH>(gradients, args.actor_gradients, first, rows);
            if (!SHARED_TRUNK) store_head_gradients<false, CRITIC_PITCH>(gradients, args.critic_gradients, first, rows);
            for (int k = threadIdx.x; k < SUMS; k += blockDim.x) {
                float sum = first == tile * args.tile_rows ? 0.0f : sums[k];
                _Pragma("unroll 8") for (int row = 0; row < rows; ++row) sum += gradients[row * GRADIENT_PITCH + k];
                sums[k] = sum;
            }
            __syncthreads();  // gradients are in use until here
        }
    }
}

// Adds a chunk's gradients and metrics to those of the chunks before it: `sources` are their places in `found`.
HD void collect_gradients(const collect_gradients_Arguments& args) {
    FOR_ITEMS (k, args.columns) {
        float own = args.found[args.sources[k]];
        args.out[k] = args.first ? own : args.out[k] + own;
    }
}

}  // namespace layerwise

KERNEL(store_weights) { layerwise::store_weights(args); }
KERNEL_WITH_LAUNCH_BOUNDS(gather_inputs, layerwise::BLOCK) { layerwise::gather_inputs(args); }
KERNEL_WITH_LAUNCH_BOUNDS(activate, layerwise::BLOCK) { layerwise::activate(args); }
KERNEL_WITH_LAUNCH_BOUNDS(activation_gradients, layerwise::BLOCK) { layerwise::activation_gradients(args); }
KERNEL(head_outputs) { layerwise::head_outputs(args); }
KERNEL_WITH_LAUNCH_BOUNDS(head_loss, layerwise::LOSS_BLOCK) { layerwise::head_loss(args); }
KERNEL(collect_gradients) { layerwise::collect_gradients(args); }
