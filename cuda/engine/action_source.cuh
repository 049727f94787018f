// SPDX-License-Identifier: Apache-2.0
// Where the actions of a step come from: the caller's tensor, or (SAMPLED) draws from policy outputs inside the step.
#pragma once
#include "outputs.cuh"
#include "staging.cuh"
#if SAMPLED
#include "sampling.cuh"
#endif

namespace stepping {

#if !SAMPLED

struct ActionSource {
    const void* actions;  // [num_envs][NUM_AGENTS][ACTION_HEADS]
    i32 int64_actions;

    HD const void* actions_of(i64 env) const {
        return (const char*)actions +
               env * NUM_AGENTS * ACTION_HEADS * (int64_actions ? sizeof(LongAction) : sizeof(Action));
    }
    HD void load(i64) {}
    HD void stage() {}
    HD void draw(EngineState, i64, Action*) const {}
};

template <class Arguments>
HD ActionSource action_source_of(const Arguments& args) {
    return {args.actions, args.int64_actions};
}

#else

// Draws the actions of all agents from their parameters, row_of(agent): into `actions`, which the game reads, and into
// the caller's tensors.
template <class F>
HD void draw_actions(F row_of, const sampling::SampleArguments& sample, EngineState m, i64 env, Action* actions) {
    Rng rng = rng_at(m, SAMPLER_STREAM, m.episode[0], m.elapsed_steps[0]);
    FOR_AGENTS (i) {
        Action action[ACTION_HEADS];
        sampling::sample_row(row_of(i), rng, i, sample, env * NUM_AGENTS + i, action);
        UNROLL for (int head = 0; head < ACTION_HEADS; ++head) actions[i * ACTION_HEADS + head] = action[head];
    }
}

// Policy outputs of one environment: loaded early into registers, then stored to shared memory, from which any thread
// of the group reads the rows of its agents.
struct ActionSource {
    struct alignas(4 * staging::VECTOR_WIDTH) Vector {
        float number[staging::VECTOR_WIDTH];
    };
    static constexpr int VECTORS =
        staging::PARAMETERS_IN_SHARED ? (int)(staging::PARAMETERS_PER_ENV / staging::VECTOR_WIDTH) : 1;
    static constexpr int COUNT = (VECTORS + THREADS_PER_ENV - 1) / THREADS_PER_ENV;
    static constexpr bool int64_actions = false;

    const float* parameters;  // [num_envs][NUM_AGENTS][PARAMETERS_PER_AGENT]
    sampling::SampleArguments sample;
    Vector vector[COUNT];
    const float* rows;  // of this environment

    HD const void* actions_of(i64 env) const { return sample.actions + env * NUM_AGENTS * ACTION_HEADS; }
    HD void load(i64 env) {
        rows = parameters + env * staging::PARAMETERS_PER_ENV;
        if constexpr (staging::PARAMETERS_IN_SHARED) {
            FOR_THREAD_ITEMS (c, k, VECTORS) vector[c] = ((const Vector*)rows)[k];
        }
    }
    HD void stage() {
        if constexpr (staging::PARAMETERS_IN_SHARED) {
            Vector* staged = (Vector*)staging::parameters_of_group();
            FOR_THREAD_ITEMS (c, k, VECTORS) staged[k] = vector[c];
            rows = (const float*)staged;
        }
    }
    HD void draw(EngineState m, i64 env, Action* actions) const {
        draw_actions([=](int i) { return rows + (i64)i * PARAMETERS_PER_AGENT; }, sample, m, env, actions);
    }
};

template <class Arguments>
HD ActionSource action_source_of(const Arguments& args) {
    return {args.parameters, {args.greedy, args.actions, args.log_probs, args.entropies, args.draws}, {}, nullptr};
}

#endif

}  // namespace stepping
