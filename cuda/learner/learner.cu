// SPDX-License-Identifier: Apache-2.0
// Advantage estimates, and PPO's loss with its gradients, for each sample of a rollout. The reference in torch is
// `advantages` and `loss` in gpu_vecenv/train/ppo.py. Compiled with the constants of a game's declaration.
#include "loss.cuh"

constexpr int STEPS_AT_ONCE = 8;  // loads in flight

// The value of a state for an agent. In a zero-sum game that of the other agent, with its sign changed, where that one
// acts there and this one does not.
HD float value_at(const float* values, [[maybe_unused]] const bool* acting, i64 k, [[maybe_unused]] int agent) {
#if TRACKS_ACTING
    if constexpr (ZERO_SUM) {
        i64 other = k + 1 - 2 * agent;
        if (!acting[k] && acting[other]) return -values[other];
    }
#endif
    return values[k];
}

// Generalised advantage estimates and returns of each agent, from the last step to the first. Lambda counts the steps
// in which it acts.
KERNEL(advantages) {
    FOR_ITEMS (column, args.columns) {
        int agent = (int)(column % NUM_AGENTS);
        float discount = args.gamma[agent], decay = discount * args.gae_lambda[agent], gae = 0;
        for (i64 last = args.num_steps - 1; last >= 0; last -= STEPS_AT_ONCE) {
            float decays[STEPS_AT_ONCE], deltas[STEPS_AT_ONCE], values[STEPS_AT_ONCE];
            UNROLL for (int j = 0; j < STEPS_AT_ONCE; ++j) {
                if (last - j < 0) continue;
                i64 k = (last - j) * args.columns + column;
                bool active = args.active[k], terminates = args.terminations[k];
                const bool* acting = nullptr;  // before this step
                float decay_here = decay;
#if TRACKS_ACTING
                acting = args.acting;
                if (!acting[k + args.columns]) decay_here = discount;
#endif
                float next = value_at(args.next_values, acting + (TRACKS_ACTING ? args.columns : 0), k, agent);
                float bootstrap = terminates ? 0.0f : discount * next;
                values[j] = value_at(args.values, acting, k, agent);
                deltas[j] = active ? args.rewards[k] + bootstrap - values[j] : 0.0f;
                decays[j] = active && !(terminates || args.truncations[k]) ? decay_here : 0.0f;
            }
            UNROLL for (int j = 0; j < STEPS_AT_ONCE; ++j) {
                if (last - j < 0) continue;
                i64 k = (last - j) * args.columns + column;
                gae = math::fma(decays[j], gae, deltas[j]);
                args.estimates[k] = gae;
                args.returns[k] = gae + values[j];
            }
        }
    }
}

#if defined(__CUDACC__)

namespace learner {  // a game's constants may have the same names

constexpr int LOSS_BLOCK = 128;                                // largest number of threads
constexpr int PITCH = (PARAMETERS_PER_AGENT / 4 * 4 + 4) | 1;  // odd, against bank conflicts
constexpr bool STAGE_ROWS = 2 * LOSS_BLOCK * PITCH * sizeof(float) <= 48 << 10;
constexpr int THREADS_PER_ROW = PITCH > 16 ? 32 : PITCH > 8 ? 16 : 8;

// Copies the 32 rows of a warp to or from shared memory, with coalesced accesses. In an incomplete warp each lane
// copies its own row.
HD void copy_rows(float* to, i64 to_stride, const float* from, i64 from_stride, int columns, bool whole) {
    int lane = threadIdx.x % 32;
    if (!whole) {
        for (int k = 0; k < columns; ++k) to[lane * to_stride + k] = from[lane * from_stride + k];
        return;
    }
    __syncwarp();
    _Pragma("unroll 8") for (int row = lane / THREADS_PER_ROW; row < 32; row += 32 / THREADS_PER_ROW) {
        UNROLL for (int k = 0; k < PITCH; k += THREADS_PER_ROW) {
            int column = k + lane % THREADS_PER_ROW;
            if (column < columns) to[row * to_stride + column] = from[row * from_stride + column];
        }
    }
    __syncwarp();
}

}  // namespace learner

#endif

// Gradients of the loss with respect to a network's outputs for the samples at these indices, and each sample's part of
// policy loss, value loss, entropy, approx_kl and clip_fraction. All are 0 if the agent was not active, and all but the
// value's if it did not act. A row of `gradients` has `width` columns; without `value_gradients` the value's gradient
// fills the columns after the parameters'. `moments` are those of `shuffle`. A negative value_clip means no clipping.
KERNEL(loss_gradients) {
    FOR_ITEMS (row, args.rows) {
        const float* x = args.parameters + row * args.parameter_stride;
        float* own = args.gradients + row * args.width;
#if defined(__CUDACC__)
        int lane = threadIdx.x % 32;
        bool whole = row - lane + 32 <= args.rows;
        __shared__ float staged[learner::STAGE_ROWS ? 2 * learner::LOSS_BLOCK * learner::PITCH : 1];
        float* staged_x = staged + (threadIdx.x - lane) * 2 * learner::PITCH;
        float* staged_gradients = staged_x + 32 * learner::PITCH;
        if constexpr (learner::STAGE_ROWS) {
            learner::copy_rows(staged_x, learner::PITCH, x - lane * args.parameter_stride, args.parameter_stride,
                               args.num_parameters, whole);
            x = staged_x + lane * learner::PITCH;
            own = staged_gradients + lane * learner::PITCH;
        }
#endif
        i64 index = args.indices[row];
        float value_gradient = 0, part[5] = {};
        Minibatch minibatch = minibatch_of(args.moments, args.normalize_advantages);
        bool active = args.active[index], acted = active;
#if TRACKS_ACTING
        acted = acted && args.acting[index];
#endif
        if (!acted) {
            for (int k = 0; k < args.num_parameters; ++k) own[k] = 0;
        } else {
            const Action* draws = args.draws + index * ACTION_HEADS;
            const bool* mask = args.action_mask + (ACTION_MASKS ? index * NUM_LOGITS : 0);
            int agent = (int)(index % NUM_AGENTS);
            const Part<1> all = {0};
            Distribution<1> d = distribution(x, draws, mask, agent, own, all);
            sum_heads(d, [](float of_head, int) { return of_head; });
            PolicyLoss policy = policy_gradients(d, x, draws, mask, agent, args.log_probs[index], args.estimates[index],
                                                 minibatch, *args.clip, *args.entropy_coefficient, own, all,
                                                 [=](int k, float gradient) { own[k] = gradient; });
            part[0] = policy.loss;
            part[2] = policy.entropy;
            part[3] = policy.approx_kl;
            part[4] = policy.clip_fraction;
        }
        if (active) {
            ValueLoss value =
                value_loss(args.values[row * args.value_stride], args.old_values[index], args.returns[index],
                           *args.value_scale, minibatch.value_count, args.value_coefficient, args.value_clip,
                           args.scales_value_clip, args.huber_delta);
            value_gradient = value.gradient;
            part[1] = value.loss;
        }
        for (int k = 0; k < 5; ++k) args.metrics[k * args.rows + row] = part[k];
        for (int k = args.num_parameters; k < args.width; ++k) own[k] = value_gradient;
        if (args.value_gradients) args.value_gradients[row] = value_gradient;
#if defined(__CUDACC__)
        if constexpr (learner::STAGE_ROWS)
            learner::copy_rows(args.gradients + (row - lane) * args.width, args.width, staged_gradients, learner::PITCH,
                               args.width, whole);
#endif
    }
}
