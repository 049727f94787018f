// SPDX-License-Identifier: Apache-2.0
// The default network on tensor cores: PPO's gradients of a minibatch from the rollout's samples in one launch, and the
// forward pass. Compiled with the constants of a game's declaration and of a network.
#include "perceptron.cuh"

#include "loss.cuh"

namespace perceptron {  // a game's constants may have the same names

// The loss of the row of this thread, and its gradients with respect to the head's outputs.
HD void row_loss(const perceptron_gradients_Arguments& args, const Minibatch& minibatch, int tower) {
    int row = threadIdx.x;
    float *x = result_row(row), *gradients = gradient_row(row), *sums = sum_row(row);
    i64 index = indices()[row];
    bool active = index >= 0 && args.active[index];
    if (!active) {
        for (int k = 0; k <= PARAMETERS; ++k) gradients[k] = 0;
    } else {
        float* metrics = sums + PARAMETERS + 1;
        if (has_actor(tower)) {
            PolicyLoss policy = policy_gradients(
                x, args.draws + index * ACTION_HEADS, args.action_mask + (ACTION_MASKS ? index * NUM_LOGITS : 0),
                (int)(index % NUM_AGENTS), args.log_probs[index], args.estimates[index], minibatch, *args.clip,
                *args.entropy_coefficient, args.squash_by_tanh, gradients);
            metrics[0] += policy.loss;
            metrics[2] += policy.entropy;
            metrics[3] += policy.approx_kl;
            metrics[4] += policy.clip_fraction;
        }
        if (has_value(tower)) {
            float scale = NORMALIZE_RETURNS ? standard_deviation(*args.return_var) : 1.0f;
            float mean = NORMALIZE_RETURNS ? (float)*args.return_mean : 0.0f;
            float value = NORMALIZE_RETURNS ? x[PARAMETERS] * scale + mean : x[PARAMETERS];
            ValueLoss loss = value_loss(value, args.old_values[index], args.returns[index], scale * scale,
                                        minibatch.count, args.value_coefficient, args.value_clip);
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
    for (int k = threadIdx.x; k < ROWS * SUM_PITCH; k += THREADS) sum_row(0)[k] = 0;
    for (int k = threadIdx.x; k < ROWS * OUTPUT_PITCH<HIDDEN>; k += THREADS) Precision::store(head_deltas() + k, 0);
    Minibatch minibatch = minibatch_of(args.moments, args.normalize_advantages);
    Gradients<HIDDEN> gradients = {};
    for (i64 first = block * ROWS; first < args.rows; first += blocks * ROWS) {
        __syncthreads();  // the previous tile has been read
        for (int row = threadIdx.x; row < ROWS; row += THREADS)
            indices()[row] = first + row < args.rows ? args.indices[first + row] : -1;
        __syncthreads();
        load_obs((const Observation*)args.obs, args.obs_stride);
        __syncthreads();
        forward_layers<0>(tower);
        if (threadIdx.x < ROWS) row_loss(args, minibatch, tower);
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

// Parameters of the distributions of OWN_AGENTS agents, from FIRST_OWN_AGENT on, of each environment, and their values.
// The forward pass is that of perceptron_gradients: its bits do not depend on the rows beside a row.
HD void forward_rows(const perceptron_forward_Arguments& args) {
    int tower = blockIdx.x % TOWERS;
    load_parameters(args.parameters, tower, args.obs_mean, args.obs_var);
    float scale = NORMALIZE_RETURNS ? standard_deviation(*args.return_var) : 1.0f;
    float mean = NORMALIZE_RETURNS ? (float)*args.return_mean : 0.0f;
    for (i64 first = blockIdx.x / TOWERS * ROWS; first < args.rows; first += gridDim.x / TOWERS * ROWS) {
        __syncthreads();
        for (int k = threadIdx.x; k < ROWS; k += THREADS) {
            i64 row = first + k;
            indices()[k] = row < args.rows ? row / OWN_AGENTS * NUM_AGENTS + FIRST_OWN_AGENT + row % OWN_AGENTS : -1;
        }
        __syncthreads();
        load_obs((const Observation*)args.obs, args.obs_stride);
        __syncthreads();
        forward_layers<0>(tower);
        if (has_actor(tower) && args.outputs) {
            for (int k = threadIdx.x; k < ROWS * PARAMETERS; k += THREADS) {
                i64 index = indices()[k / PARAMETERS];
                if (index < 0) continue;
                int column = args.columns[k % PARAMETERS];
                bool forbidden = args.action_mask && !args.action_mask[index * args.choices + column];
                args.outputs[index * PARAMETERS_PER_AGENT + column] =
                    forbidden ? MASKED_LOGIT : result_row(k / PARAMETERS)[k % PARAMETERS];
            }
        }
        if (has_value(tower)) {
            for (int k = threadIdx.x; k < ROWS; k += THREADS) {
                float value = result_row(k)[PARAMETERS];
                if (indices()[k] >= 0) args.values[indices()[k]] = NORMALIZE_RETURNS ? value * scale + mean : value;
            }
        }
    }
}

}  // namespace perceptron

KERNEL_WITH_LAUNCH_BOUNDS(perceptron_gradients, perceptron::THREADS, perceptron::MIN_BLOCKS) {
    perceptron::sum_gradients(args);
}

KERNEL_WITH_LAUNCH_BOUNDS(perceptron_forward, perceptron::THREADS) { perceptron::forward_rows(args); }
