// SPDX-License-Identifier: Apache-2.0
// All steps of a rollout in one launch: forward pass, sampling, step, observation and storage. Compiled with the
// constants of one policy of all agents (perceptron.cuh), after a game and the engine's step.cuh.
//
// Environments are independent, so that a block runs its own for all steps, with the weights and, where they fit, their
// states in its shared memory or registers. The threads that compute a row of the network (`owners`: a warp or the
// block) step the environments of their rows, and wait for nobody else. Bits are those of perceptron_forward.cu and of
// a sampled step, whatever the shape of the launch.
#include "return_scale.cuh"
#include "step.cuh"

namespace fused_rollout {  // a game's constants may have the same names

using perceptron::first_owned_row, perceptron::owner, perceptron::result_row, perceptron::sync_owners;
using perceptron::OWNED_ROWS, perceptron::OWNERS, perceptron::PARAMETERS;

constexpr int OWNED_ENVS = OWNED_ROWS / NUM_AGENTS;      // whose rows the same threads compute
constexpr int ROW = NUM_AGENTS * OBS_SIZE;               // elements of an environment's observations
constexpr bool HAS_VALUES = perceptron::TOWERS == 1;     // else the critic is computed after the rollout, all steps at once
constexpr i64 CHOICES = ACTION_MASKS ? (i64)NUM_AGENTS * NUM_LOGITS : 0;  // of an environment
static_assert(OWNED_ENVS > 0 && ENVS_PER_BLOCK == perceptron::ROWS / OWNED_ROWS * OWNED_ENVS, "as Python counts them");
static_assert(perceptron::OWN_AGENTS == NUM_AGENTS && PARAMETERS == PARAMETERS_PER_AGENT, "one policy of all agents");
static_assert(perceptron::SIZES[0] == OBS_SIZE, "which all have the same observations");
static_assert(SHARED_BEGIN == perceptron::SHARED_BYTES, "environments have what the network leaves");

// Draws from the network's results.
struct ActionSource {
    static constexpr bool int64_actions = false;
    const float* results;  // of the environment's first agent
    sampling::SampleArguments sample;

    HD const void* actions_of(i64 env) const { return sample.actions + env * NUM_AGENTS * ACTION_HEADS; }
    HD void load(i64) {}
    HD void stage() {}
    HD void draw(EngineState m, i64 env, Action* actions) const {
        stepping::draw_actions(results, perceptron::RESULT_PITCH, sample, m, env, actions);
    }
};

// The tensors of step t, and those that it writes for step t + 1.
HD ActionSource action_source_of(const rollout_Arguments& args, i64 t, const float* results) {
    i64 first = t * args.num_envs * NUM_AGENTS;
    float* draws = BOX_ACTIONS ? args.draws + first * ACTION_HEADS : nullptr;
    Action* actions = args.actions + t * args.actions_stride;
    return {results, {false, args.squash_by_tanh, actions, args.log_probs + first, nullptr, draws}};
}
HD StepOutputs outputs_of(const rollout_Arguments& args, i64 t) {
    i64 first = t * args.num_envs * NUM_AGENTS, next = first + args.num_envs * NUM_AGENTS;
    StepOutputs out = {};
    out.obs = args.obs + next * OBS_SIZE;
    out.rewards = args.rewards + first;
    out.terminations = args.terminations + first;
    out.truncations = args.truncations + first;
    out.active = args.active + next;
    if constexpr (ACTION_MASKS) out.action_mask = args.action_mask + next * NUM_LOGITS;
    return out;
}

// The environments of this thread's owners.
struct Envs {
    i64 first;  // index of the first
    int count;

    // Copies items of the owners' environments.
    template <class T>
    HD void copy(const T* from, T* to, i64 items_per_env) const {
        for (i64 k = owner(); k < count * items_per_env; k += OWNERS) to[k] = from[k];
    }
    // Row T of the rollout before becomes row 0.
    template <class T>
    HD void carry_over(T* rows, const rollout_Arguments& args, i64 items_per_env) const {
        T* own = rows + first * items_per_env;
        copy(own + args.num_steps * args.num_envs * items_per_env, own, items_per_env);
    }
};

HD Observation* staged_obs() {
    if constexpr (staging::OBS_IN_SHARED)
        return staging::obs_of_block() + first_owned_row() / OWNED_ROWS * OWNED_ENVS * ROW;
    else
        return nullptr;
}

// Choices that are masked have the logit of the forward pass.
HD void mask_results([[maybe_unused]] EngineState m, [[maybe_unused]] float* results, [[maybe_unused]] float logit) {
#if ACTION_MASKS
    FOR_AGENTS (i) {
        for (int k = 0; k < NUM_LOGITS; ++k)
            if (!m.action_mask[i][k]) results[i * perceptron::RESULT_PITCH + k] = logit;
    }
#endif
}

// All steps of the environments of the block.
HD void collect(const rollout_Arguments& args) {
    const perceptron::ReturnScale scale = perceptron::ReturnScale::of(args.return_mean, args.return_var);
    Envs envs = {(i64)blockIdx.x * ENVS_PER_BLOCK + first_owned_row() / OWNED_ROWS * OWNED_ENVS, OWNED_ENVS};
    i64 left = args.num_envs - envs.first;
    if (left < OWNED_ENVS) envs.count = left < 0 ? 0 : (int)left;
    envs.carry_over(args.obs, args, ROW);
    envs.carry_over(args.active, args, NUM_AGENTS);
    if constexpr (ACTION_MASKS) envs.carry_over(args.action_mask, args, CHOICES);
    if constexpr (staging::OBS_IN_SHARED) envs.copy(args.obs + envs.first * ROW, staged_obs(), ROW);
    const int rows = envs.count * NUM_AGENTS;
    for (int row = owner(); row < OWNED_ROWS; row += OWNERS)
        perceptron::indices()[first_owned_row() + row] = row < rows ? row : -1;

    const int own = group_of_block() % OWNED_ENVS;  // this group's environment
    const bool has_env = group_of_warp() < GROUPS_PER_WARP && group_of_block() < ENVS_PER_BLOCK && own < envs.count;
    const i64 env = has_env ? envs.first + own : 0;
    float* results = result_row(first_owned_row() + own * NUM_AGENTS);
    EngineState engine = engine_state_of(args, env);
    State state = state_of(args, env);
    guarded_scratch::Memory* memory = SCRATCH(args.scratch, env);
    staging::Staged in_registers;
    staging::Staged& staged = staging::staged_of(in_registers);
    ActionSource source = action_source_of(args, 0, results);
    stepping::StepContext c =
        stepping::context_of(env, engine, state, NEXT_STEP, 0, guarded_scratch::begin(memory));
    if (has_env) stepping::load(c, staged, source);

    for (i64 t = 0;; ++t) {
        if (t == args.num_steps && !HAS_VALUES) break;
        i64 first_row = (t * args.num_envs + envs.first) * NUM_AGENTS;
        sync_owners();
        perceptron::load_obs(staging::OBS_IN_SHARED ? staged_obs() : args.obs + first_row * OBS_SIZE, OBS_SIZE);
        sync_owners();
        perceptron::forward_layers<0>(0);
        if (HAS_VALUES && owner() < rows)
            args.values[first_row + owner()] = scale.value(result_row(first_owned_row() + owner())[PARAMETERS]);
        if (t == args.num_steps) break;
        if (has_env) {
            source = action_source_of(args, t, results);
            StepOutputs out = outputs_of(args, t);
            mask_results(c.engine, results, args.masked_logit);
            if constexpr (!staging::IS_STAGED) c.io.actions = source.actions_of(env);
            stepping::step_loaded(c, source, initial_states_of(args), out, host_simd::EnvRange());
            stepping::store_rewards_and_ends(c, staged, out);
        }
        if constexpr (staging::OBS_IN_SHARED) {
            sync_owners();
            envs.copy(staged_obs(), args.obs + (first_row + args.num_envs * NUM_AGENTS) * OBS_SIZE, ROW);
        }
    }
    if (has_env) stepping::store_state(staged, engine, state);
}

}  // namespace fused_rollout

// Bytes of scratch per environment in device memory, and of shared memory of a block.
KERNEL(rollout_layout) {
    FOR_ITEMS (k, 1) {
        args.out[0] = staging::SCRATCH_IN_SHARED ? 0 : sizeof(guarded_scratch::Memory);
        args.out[1] = SHARED_BEGIN + staging::OBS_END;
    }
}

KERNEL_WITH_LAUNCH_BOUNDS(rollout, perceptron::THREADS, perceptron::MIN_BLOCKS) {
    perceptron::load_parameters(args.parameters, 0, args.obs_mean, args.obs_var);
    __syncthreads();
    fused_rollout::collect(args);
}
