// SPDX-License-Identifier: Apache-2.0
// All steps of a rollout in one launch: forward passes, sampling, step, observation and storage. Compiled after a game,
// the engine's step.cuh and rollout_policy.cuh for each policy; `Policies`, all of them, and FirstPolicy are generated.
//
// Environments are independent, so that a block runs its own for all steps, with the weights and, where they fit, their
// states in its shared memory or registers. The threads that step environments and compute the rows of their agents
// (`owners`: a warp, a group of warps or the block) wait for no others. Bits are those of perceptron_forward.cu and of
// a sampled step, whatever the shape of the launch.
#include "step.cuh"

namespace fused_rollout {  // a game's constants may have the same names

constexpr int OWNED_ENVS = ENVS_PER_BLOCK * FirstPolicy::ROWS_OF_OWNERS / FirstPolicy::BLOCK_ROWS;
constexpr int ROW = NUM_AGENTS * OBS_SIZE;        // elements of an environment's observations
constexpr float MASKED_LOGIT = -0x1.fffffep127f;  // as the forward pass writes it
static_assert(OWNED_ENVS > 0, "no environment is divided");

HD int owner() { return FirstPolicy::owner(); }
HD void sync_owners() { FirstPolicy::sync_owners(); }
HD int first_owned_env() { return FirstPolicy::first_owned_row() / FirstPolicy::ROWS_OF_OWNERS * OWNED_ENVS; }

// What is done for each policy; NVRTC 13.0 takes generic lambdas for functions of the host.
struct FindParameters {
    int k, agent;
    float** row;
    template <class P>
    HD void operator()(P policy) const {
        if (policy.has(agent)) *row = policy.parameters_of(k, agent);
    }
};
// Choices that the game masks have the logit of the forward pass.
struct MaskParameters {
    EngineState engine;
    int k, agent;
    template <class P>
    HD void operator()([[maybe_unused]] P policy) const {
#if ACTION_MASKS
        if (!P::HAS_CHOICES || !policy.has(agent)) return;
        float* own = policy.parameters_of(k, agent);
        for (int head = 0; head < DISCRETE_HEADS; ++head) {
            const bool* allowed = engine.action_mask[agent] + logit_offset(head);
            for (int choice = 0; choice < action_size(agent, head); ++choice, ++own)
                if (!allowed[choice]) *own = MASKED_LOGIT;
        }
#endif
    }
};
struct Begin {
    const rollout_Arguments& args;
    int range;
    template <class P>
    HD void operator()(P& policy) const {
        policy.begin(args, range);
    }
};
struct Forward {
    const Observation* obs;  // of the first environment, as the next
    float* values;
    int envs;
    bool acts;
    template <class P>
    HD void operator()(P& policy) const {
        if (P::HAS_VALUES || acts) policy.forward(obs, envs, values);
    }
};

// Parameters of the distribution of an agent in the k-th environment of the owners.
HD float* parameters_of(int k, int agent) {
    float* row = nullptr;
    Policies::each_type(FindParameters{k, agent, &row});
    return row;
}

// Draws from the networks' results for the k-th environment of the owners.
struct ActionSource {
    static constexpr bool int64_actions = false;
    sampling::SampleArguments sample;
    int k;

    HD const void* actions_of(i64 env) const { return sample.actions + env * NUM_AGENTS * ACTION_HEADS; }
    HD void load(i64) {}
    HD void stage() {}
    HD void draw(EngineState m, i64 env, Action* actions) const {
        int own = k;
        stepping::draw_actions([=](int i) { return parameters_of(own, i); }, sample, m, env, actions);
    }
};
HD sampling::SampleArguments sample_arguments(const rollout_Arguments& args, i64 t) {
    i64 first = t * args.num_envs * NUM_AGENTS;
    float* draws = BOX_ACTIONS ? args.draws + first * ACTION_HEADS : nullptr;
    Action* actions = args.actions + t * args.actions_stride;
    return {false, actions, args.log_probs + first, nullptr, draws, true};
}

// What step t writes, its own rows and those before step t + 1.
HD StepOutputs outputs_of(const rollout_Arguments& args, i64 t) {
    i64 first = t * args.num_envs * NUM_AGENTS, next = first + args.num_envs * NUM_AGENTS;
    StepOutputs out = {};
    out.obs = args.obs + next * OBS_SIZE;
    out.rewards = args.rewards + first;
    out.terminations = args.terminations + first;
    out.truncations = args.truncations + first;
    out.active = args.active + next;
#if TRACKS_ACTING
    out.acting = args.acting + next;
#endif
    if constexpr (ACTION_MASKS) out.action_mask = args.action_mask + next * NUM_LOGITS;
    return out;
}

// A block's environments, of one range with an opponent or members of populations, or of none.
struct BlockEnvs {
    i64 first, end;
    int range;

    HD static BlockEnvs of(const rollout_Arguments& args) {
#if HAS_RANGES
        int block = (int)blockIdx.x - args.blocks_before_ranges;
        if (block < 0) return {blockIdx.x * (i64)ENVS_PER_BLOCK, args.first_range, -1};
        int range = block / args.blocks_per_range;
        i64 first = args.first_range + range * args.range_size, before = range * (i64)args.blocks_per_range;
        return {first + (block - before) * ENVS_PER_BLOCK, first + args.range_size, range};
#else
        return {blockIdx.x * (i64)ENVS_PER_BLOCK, args.num_envs, -1};
#endif
    }
};

// The environments of this thread's owners.
struct OwnedEnvs {
    i64 first;  // index of the first
    int count;

    template <class T>
    HD void copy(const T* from, T* to, int items_per_env) const {
        constexpr int BATCH = 8, OWNERS = FirstPolicy::NUM_OWNERS;  // loads in flight
        int items = count * items_per_env;
        for (int first = owner(); first < items; first += BATCH * OWNERS) {
            T x[BATCH];
            UNROLL for (int b = 0; b < BATCH; ++b) if (first + b * OWNERS < items) x[b] = from[first + b * OWNERS];
            UNROLL for (int b = 0; b < BATCH; ++b) if (first + b * OWNERS < items) to[first + b * OWNERS] = x[b];
        }
    }
    // Row T of the rollout before becomes row 0.
    template <class T>
    HD void carry_over(T* rows, const rollout_Arguments& args, int items_per_env) const {
        T* own = rows + first * items_per_env;
        copy(own + args.num_steps * args.num_envs * items_per_env, own, items_per_env);
    }
};

HD Observation* staged_obs() {
    if constexpr (staging::OBS_IN_SHARED)
        return staging::obs_of_block() + first_owned_env() * ROW;
    else
        return nullptr;
}

HD void collect(const rollout_Arguments& args) {
    const BlockEnvs block = BlockEnvs::of(args);
    OwnedEnvs envs = {block.first + first_owned_env(), OWNED_ENVS};
    i64 left = block.end - envs.first;
    if (left < OWNED_ENVS) envs.count = left < 0 ? 0 : (int)left;
    Policies policies;
    policies.each(Begin{args, block.range});
    envs.carry_over(args.obs, args, ROW);
    envs.carry_over(args.active, args, NUM_AGENTS);
#if TRACKS_ACTING
    envs.carry_over(args.acting, args, NUM_AGENTS);
#endif
    if constexpr (ACTION_MASKS) envs.carry_over(args.action_mask, args, NUM_AGENTS * NUM_LOGITS);
    if constexpr (staging::OBS_IN_SHARED) envs.copy(args.obs + envs.first * ROW, staged_obs(), ROW);

    const int own = group_of_block() % OWNED_ENVS;  // this group's environment
    const bool has_env = group_of_warp() < GROUPS_PER_WARP && group_of_block() < ENVS_PER_BLOCK && own < envs.count;
    const i64 env = has_env ? envs.first + own : 0;
    EngineState engine = engine_state_of(args, env);
    State state = state_of(args, env);
    guarded_scratch::Memory* memory = SCRATCH(args.scratch, env);
    staging::Staged in_registers;
    staging::Staged& staged = staging::staged_of(in_registers);
    ActionSource source = {sample_arguments(args, 0), own};
    stepping::StepContext c = stepping::context_of(env, engine, state, NEXT_STEP, 0, guarded_scratch::begin(memory));
    if (has_env) stepping::load(c, staged, source);
    stepping::use_staged(c, staged);  // the same pointers in all threads: so the compiler keeps the copy in registers
    __syncthreads();

    for (i64 t = 0;; ++t) {
        i64 first_row = (t * args.num_envs + envs.first) * NUM_AGENTS;
        const Observation* obs = staging::OBS_IN_SHARED ? staged_obs() : args.obs + first_row * OBS_SIZE;
        bool acts = t < args.num_steps;
        policies.each(Forward{obs, args.values + first_row, envs.count, acts});
        if (!acts) break;
        if constexpr (FirstPolicy::BY_GROUPS) sync_owners();  // other warps have computed some of the rows
        if (has_env) {
            StepOutputs out = outputs_of(args, t);
            source.sample = sample_arguments(args, t);
            if constexpr (ACTION_MASKS)
                FOR_AGENTS (i) Policies::each_type(MaskParameters{c.engine, own, i});
            if constexpr (!staging::IS_STAGED) c.io.actions = source.actions_of(env);
            stepping::step_loaded<false>(c, source, initial_states_of(args), out, host_simd::EnvRange());
            stepping::store_rewards_and_ends(c, staged, out);
        }
        sync_owners();  // observations are read next
        if constexpr (staging::OBS_IN_SHARED)
            envs.copy(staged_obs(), args.obs + (first_row + args.num_envs * NUM_AGENTS) * OBS_SIZE, ROW);
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

KERNEL_WITH_LAUNCH_BOUNDS(rollout, FirstPolicy::BLOCK, FirstPolicy::BLOCKS) { fused_rollout::collect(args); }
