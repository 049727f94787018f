// SPDX-License-Identifier: Apache-2.0
// PPO's gradients of the default network, of a minibatch of the rollout's samples. Compiled with the constants of a
// game's declaration and of a network.
#include "perceptron.cuh"

#include "loss.cuh"

namespace perceptron {  // a game's constants may have the same names

// What the loss of a sample needs, but for masks and long actions; loaded before the forward pass.
struct Sample {
    i64 index;  // -1: none
    bool active;
    float log_prob, estimate, target, old_value;
    static constexpr bool HAS_DRAWS = ACTION_HEADS <= 4;
    Action draws[HAS_DRAWS ? ACTION_HEADS : 1];
#if TRACKS_ACTING
    bool has_acted;
    HD bool acted() const { return active && has_acted; }
#else
    HD bool acted() const { return active; }
#endif
};

HD Sample load_sample(const perceptron_gradients_Arguments& args, i64 index) {
    Sample sample = {index};
    if (index < 0) return sample;
    sample.active = args.active[index];
#if TRACKS_ACTING
    sample.has_acted = args.acting[index];
#endif
    sample.log_prob = args.log_probs[index];
    sample.estimate = args.estimates[index];
    sample.target = args.returns[index];
    sample.old_value = args.old_values[index];
    if constexpr (Sample::HAS_DRAWS)
        UNROLL for (int k = 0; k < ACTION_HEADS; ++k) sample.draws[k] = args.draws[index * ACTION_HEADS + k];
    return sample;
}

// What the losses of all rows have in common.
struct Loss {
    Minibatch minibatch;
    float clip, entropy_coefficient;
    ReturnScale return_scale;
};

HD Loss loss_of(const perceptron_gradients_Arguments& args) {
    return {minibatch_of(args.moments, args.normalize_advantages), *args.clip, *args.entropy_coefficient,
            ReturnScale::of(args.return_mean, args.return_var)};
}

// Sums over the rows of a thread.
constexpr int SUMS = LOG_STDS + METRICS;
struct Sums {
    float x[SUMS];  // gradients of the log standard deviations, then the metrics
};

// Threads that compute the loss of a row, neighbouring lanes, each for a part of the action's heads.
HD constexpr int parts_of_row() {
    int parts = 1;
    while (!BOX_ACTIONS && 2 * parts <= DISCRETE_HEADS && 2 * parts <= OWNERS / OWNED_ROWS) parts *= 2;
    return parts;
}
constexpr int PARTS = parts_of_row();
static_assert(PARTS == 1 || OWNED_ROWS * PARTS % 32 == 0, "whole warps");

// The loss of one row, and its gradients with respect to the head's outputs. All parts of a row are here.
HD void row_loss(const perceptron_gradients_Arguments& args, int row, const Sample& sample, const Loss& loss, int tower,
                 Sums& sums) {
    const Part<PARTS> part = {owner() % PARTS};
    float *x = result_row(row), *weights = choice_weights(row), *metrics = sums.x + LOG_STDS;
    Word* deltas = head_deltas() + Precision::activation_at(PITCH<HIDDEN + 1>, row, 0);
    auto store_delta = [=](int output, float gradient) {
        Precision::store(deltas + Precision::activation_at(PITCH<HIDDEN + 1>, 0, output), gradient);
    };
    if (!sample.acted())
        for (int k = part.first; k < HEAD_OUTPUTS; k += PARTS)
            if (!sample.active || result_of(tower, k) != PARAMETERS) store_delta(k, 0);
    if (has_actor(tower)) {
        const Action* draws = Sample::HAS_DRAWS ? sample.draws : args.draws + sample.index * ACTION_HEADS;
        const bool* mask = args.action_mask + (ACTION_MASKS ? sample.index * NUM_LOGITS : 0);
        int agent = (int)(sample.index % NUM_AGENTS);
        Distribution<PARTS> d = {};
        if (sample.acted()) d = distribution(x, draws, mask, agent, weights, part);
        sum_heads(d, [](float of_part, int k) {
            return PARTS == 1 ? of_part : __shfl_sync(~0u, of_part, lane() / PARTS * PARTS + k);
        });
        if (sample.acted()) {
            auto store_gradient = [&](int k, float gradient) {
                if (k < ACTOR_OUTPUTS) {
                    store_delta(k, gradient);
                } else {
                    UNROLL for (int j = 0; j < LOG_STDS; ++j) sums.x[j] += k == ACTOR_OUTPUTS + j ? gradient : 0.0f;
                }
            };
            PolicyLoss policy =
                policy_gradients(d, x, draws, mask, agent, sample.log_prob, sample.estimate, loss.minibatch, loss.clip,
                                 loss.entropy_coefficient, weights, part, store_gradient);
            metrics[0] += policy.loss;
            metrics[2] += policy.entropy;
            metrics[3] += policy.approx_kl;
            metrics[4] += policy.clip_fraction;
        }
    }
    if (has_value(tower) && part.first == 0 && sample.active) {
        float scale = loss.return_scale.scale;
        ValueLoss of_value = value_loss(loss.return_scale.value(x[PARAMETERS]), sample.old_value, sample.target, scale,
                                        loss.minibatch.value_count, args.value_coefficient, args.value_clip,
                                        args.scales_value_clip, args.huber_delta);
        metrics[1] += of_value.loss;
        store_delta(has_actor(tower) ? ACTOR_OUTPUTS : 0, of_value.gradient * scale);
    }
}

// Adds up the sums of all rows, in order, in the memory of the activations.
HD void write_sums(float* out, const Sums& sums, int row, bool is_first, int tower) {
    constexpr int PITCH = SUMS | 1;
    float* of_rows = (float*)rows<0>();
    static_assert(ROWS * PITCH * (int)sizeof(float) <= ROWS_END - ROWS_AT<0>, "the sums fit");
    if (is_first) UNROLL for (int k = 0; k < SUMS; ++k) of_rows[row * PITCH + k] = sums.x[k];
    sync_tile();
    for (int k = thread(); k < SUMS; k += THREADS) {
        if (k == LOG_STDS + 1 ? !has_value(tower) : !has_actor(tower)) continue;
        float sum = 0;
        for (int row = 0; row < ROWS; ++row) sum += of_rows[row * PITCH + k];
        out[k < LOG_STDS ? LOG_STD_INDEX + k : NUM_PARAMETERS + k - LOG_STDS] = sum;
    }
}

// PPO's gradients of all parameters, of `rows` samples at `indices`, and then the metrics of the loss, as sums over the
// samples of each tile of each block: a row of `parts` for each, or, of two blocks, one for the actor and one for the
// critic, for both. The launch has as many blocks. Nothing where `skip_update` is given and 1.
HD void sum_gradients(const perceptron_gradients_Arguments& args) {
    if (args.skip_update && *args.skip_update == 1) return;
    int tower = blockIdx.x % TOWERS;
    i64 own = (i64)(blockIdx.x / TOWERS) * TILES_OF_BLOCK + tile(),
        stride = (i64)(gridDim.x / TOWERS) * TILES_OF_BLOCK * ROWS;
    load_parameters(args.parameters, tower, args.obs_mean, args.obs_var);
    fill_with_zeros<THREADS>(head_deltas(), tile_memory(DELTAS_END));
    __syncthreads();  // the weights are there
    Loss loss = loss_of(args);
    Gradients<HIDDEN> gradients = {};
    Sums sums = {};
    int row = first_owned_row() + owner() / PARTS;
    bool has_row = owner() < OWNED_ROWS * PARTS;
    bool is_first = has_row && owner() % PARTS == 0;  // of the threads of its row
    auto index_of = [&](i64 k) { return has_row && k < args.rows ? args.indices[k] : -1; };
    const Observation* obs = (const Observation*)args.obs;
    i64 index = index_of(own * ROWS + row);
    if (is_first) indices()[row] = index;
    sync_owners();
    // A tile's first observations are loaded during the tile before, where registers are left for them: few before its
    // backward pass, many before the gradients of the first layer's weights.
    constexpr bool EARLY = COLUMN_WARPS <= 2, FEW = observations::AT_ONCE <= 8;
    Observations first_obs;
    if (EARLY) first_obs.load(obs, args.obs_stride, indices());
    int buffer = 0;  // of the tile's indices
    for (i64 first = own * ROWS; first < args.rows; first += stride, buffer ^= 1) {
        i64 next = index_of(first + stride + row);
        Sample sample = load_sample(args, index);
        sync_tile();  // the previous one has been read
        if (!EARLY) first_obs.load(obs, args.obs_stride, indices(buffer));
        store_obs(first_obs, obs, args.obs_stride, indices(buffer));
        sync_owners();
        forward_layers<0>(tower);
        if (has_row) row_loss(args, row, sample, loss, tower, sums);
        index = next;
        if (is_first) indices(buffer ^ 1)[row] = index;
        sync_tile();
        auto load_next = [&](bool now) {
            if (EARLY && now) first_obs.load(obs, args.obs_stride, indices(buffer ^ 1));
        };
        load_next(FEW);
        gradients.add_layers(head_deltas(), [&] { load_next(!FEW); });
    }
    sync_tile();
    float* out = args.parts + own * (NUM_PARAMETERS + METRICS);
    gradients.write(out, tower);
    write_sums(out, sums, row, is_first, tower);
}

}  // namespace perceptron

KERNEL_WITH_LAUNCH_BOUNDS(perceptron_gradients, perceptron::BLOCK_THREADS, perceptron::MIN_BLOCKS) {
    perceptron::sum_gradients(args);
}
