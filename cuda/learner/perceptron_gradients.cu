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
};

HD Sample load_sample(const perceptron_gradients_Arguments& args, i64 index) {
    Sample sample = {index};
    if (index < 0) return sample;
    sample.active = args.active[index];
    sample.log_prob = args.log_probs[index];
    sample.estimate = args.estimates[index];
    sample.target = args.returns[index];
    sample.old_value = args.old_values[index];
    if constexpr (Sample::HAS_DRAWS)
        UNROLL for (int k = 0; k < ACTION_HEADS; ++k) sample.draws[k] = args.draws[index * ACTION_HEADS + k];
    return sample;
}

// The loss of one row, and its gradients with respect to the head's outputs.
HD void row_loss(const perceptron_gradients_Arguments& args, int row, const Sample& sample, const Minibatch& minibatch,
                 int tower) {
    float *x = result_row(row), *gradients = gradient_row(row), *sums = sum_row(row);
    if (!sample.active) {
        for (int k = 0; k <= PARAMETERS; ++k) gradients[k] = 0;
    } else {
        float* metrics = sums + PARAMETERS + 1;
        if (has_actor(tower)) {
            const Action* draws = Sample::HAS_DRAWS ? sample.draws : args.draws + sample.index * ACTION_HEADS;
            const bool* mask = args.action_mask + (ACTION_MASKS ? sample.index * NUM_LOGITS : 0);
            PolicyLoss policy =
                policy_gradients(x, draws, mask, (int)(sample.index % NUM_AGENTS), sample.log_prob, sample.estimate,
                                 minibatch, *args.clip, *args.entropy_coefficient, args.squash_by_tanh, gradients);
            metrics[0] += policy.loss;
            metrics[2] += policy.entropy;
            metrics[3] += policy.approx_kl;
            metrics[4] += policy.clip_fraction;
        }
        if (has_value(tower)) {
            float scale = NORMALIZE_RETURNS ? standard_deviation(*args.return_var) : 1.0f;
            float mean = NORMALIZE_RETURNS ? (float)*args.return_mean : 0.0f;
            float value = NORMALIZE_RETURNS ? x[PARAMETERS] * scale + mean : x[PARAMETERS];
            ValueLoss loss = value_loss(value, sample.old_value, sample.target, scale * scale, minibatch.count,
                                        args.value_coefficient, args.value_clip);
            metrics[1] += loss.loss;
            gradients[PARAMETERS] = loss.gradient * scale;
        }
        for (int k = has_actor(tower) ? 0 : PARAMETERS; k < PARAMETERS + (has_value(tower) ? 1 : 0); ++k)
            sums[k] += gradients[k];
    }
    Word* deltas = head_deltas() + row * OUTPUT_PITCH<HIDDEN>;
    for (int k = 0; k < HEAD_OUTPUTS; ++k) {
        int result = result_of(tower, k);
        Precision::store(deltas + k, result >= 0 ? gradients[result] : 0.0f);
    }
}

// PPO's gradients of all parameters, of `rows` samples at `indices`, and then the metrics of the loss, as sums over
// each block's samples: a row of `parts` for each block, or for two blocks, one for the actor and one for the critic.
// The launch has as many blocks.
HD void sum_gradients(const perceptron_gradients_Arguments& args) {
    int tower = blockIdx.x % TOWERS;
    i64 block = blockIdx.x / TOWERS, blocks = gridDim.x / TOWERS;
    load_parameters(args.parameters, tower, args.obs_mean, args.obs_var);
    fill_with_zeros(sum_row(0), shared_memory + DELTAS_END);  // and the deltas
    Minibatch minibatch = minibatch_of(args.moments, args.normalize_advantages);
    Gradients<HIDDEN> gradients = {};
    int row = first_owned_row() + owner();
    bool has_row = owner() < OWNED_ROWS;
    auto index_of = [&](i64 k) { return has_row && k < args.rows ? args.indices[k] : -1; };
    i64 next = index_of(block * ROWS + row);
    for (i64 first = block * ROWS; first < args.rows; first += blocks * ROWS) {
        __syncthreads();  // the previous tile has been read
        Sample sample = load_sample(args, next);
        if (has_row) indices()[row] = next;
        next = index_of(first + blocks * ROWS + row);
        sync_owners();
        load_obs((const Observation*)args.obs, args.obs_stride);
        sync_owners();
        forward_layers<0>(tower);
        if (has_row) row_loss(args, row, sample, minibatch, tower);
        __syncthreads();
        gradients.add_layers(head_deltas());
    }
    __syncthreads();
    float* out = args.parts + block * (NUM_PARAMETERS + METRICS);
    gradients.write(out, tower);
    for (int column = threadIdx.x; column < PARAMETERS + 1 + METRICS; column += THREADS) {
        bool of_actor = column < PARAMETERS, of_value = column == PARAMETERS || column == PARAMETERS + 2;
        if (of_value ? !has_value(tower) : !has_actor(tower)) continue;
        float sum = 0;
        for (int row = 0; row < ROWS; ++row) sum += sum_row(row)[column];
        i64 at = column > PARAMETERS      ? NUM_PARAMETERS + column - PARAMETERS - 1
                 : !of_actor              ? VALUE_BIAS
                 : column < ACTOR_OUTPUTS ? BIAS_INDICES[0][HIDDEN] + column
                                          : LOG_STD_INDEX + column - ACTOR_OUTPUTS;
        out[at] = sum;
    }
}

}  // namespace perceptron

KERNEL_WITH_LAUNCH_BOUNDS(perceptron_gradients, perceptron::THREADS, perceptron::MIN_BLOCKS) {
    perceptron::sum_gradients(args);
}
