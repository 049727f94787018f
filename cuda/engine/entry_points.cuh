// SPDX-License-Identifier: Apache-2.0
// The kernels that run any game: reset, step with autoreset and episode statistics, observe, random actions. Compiled
// after the game's own source.
#pragma once
#include "step.cuh"

// Bytes of scratch per environment in device memory, bytes of shared memory per block, and whether one launch that
// draws actions and steps is faster than two.
KERNEL(vecenv_layout) {
    FOR_ITEMS (k, 1) {
        args.out[0] = staging::SCRATCH_IN_SHARED ? 0 : sizeof(guarded_scratch::Memory);
        args.out[1] = staging::SHARED_BYTES;
        args.out[2] = staging::FUSED_SAMPLING_PAYS_OFF;
    }
}

ENV_KERNEL(vecenv_step) {
    const stepping::ActionSource source = stepping::action_source_of(args);
    StepOutputs out = {args.obs,        args.rewards, args.terminations, args.truncations, args.active,
                       args.final_mask, args.fault,   args.action_mask,  args.final_obs};
#if TRACKS_ACTING
    out.acting = args.acting;
#endif
    host_simd::EnvRange range = {engine_state_of(args, 0), state_of(args, 0), source, out};
    FOR_REMAINING_ENVS (env, args.num_envs, range) {
        bounds::use(args, env);
        guarded_scratch::Memory* memory = SCRATCH(args.scratch, env);
        stepping::step_env(env, engine_state_of(args, env), state_of(args, env), initial_states_of(args), source, out,
                           args.mode, args.agents_as_envs, guarded_scratch::begin(memory), range);
        guarded_scratch::check(memory);
    }
    staging::write_obs(args.obs, args.num_envs);
}

#if !SAMPLED

ENV_KERNEL(vecenv_reset) {
    StepOutputs out = {};
    out.active = args.active;
    out.action_mask = args.action_mask;
#if TRACKS_ACTING
    out.acting = args.acting;
#endif
    FOR_ENVS (env, args.num_envs) {
        bounds::use(args, env);
        EngineState m = engine_state_of(args, env);
        State s = state_of(args, env);
        Io io = {};
        io.active = alive_agents(m);
        guarded_scratch::Memory* memory = SCRATCH(args.scratch, env);
        io.scratch = guarded_scratch::begin(memory);
        if (!args.mask || args.mask[env]) {
            ONCE {
                m.fault[0] = 0;
                if (args.reseed) {
                    if (args.seeds)
                        env_key(args.seeds[env], 0, (u32*)m.key);  // as of an environment that is made alone
                    else
                        env_key(args.seed, args.first_env_index + env, (u32*)m.key);
                    m.episode[0] = -1;
                }
            }
            group_sync();
            stepping::begin_episode(m, s, io, initial_states_of(args));
        }
        stepping::observe_env(m, s, io, args.agents_as_envs, args.obs + env * OUTPUT_ROWS * OBS_SIZE);
        write_active(m, env, out);
        guarded_scratch::check(memory);
    }
}

ENV_KERNEL(vecenv_observe) {
    FOR_ENVS (env, args.num_envs) {
        bounds::use(args, env);
        EngineState m = engine_state_of(args, env);
        Io io = {};
        io.active = alive_agents(m);
        guarded_scratch::Memory* memory = SCRATCH(args.scratch, env);
        io.scratch = guarded_scratch::begin(memory);
        stepping::observe_env(m, state_of(args, env), io, args.agents_as_envs, args.obs + env * OUTPUT_ROWS * OBS_SIZE);
        guarded_scratch::check(memory);
    }
}

// Valid uniform actions of the coming step, int32 or float32.
ENV_KERNEL(vecenv_random_actions) {
    FOR_ENVS (env, args.num_envs) {
        bounds::use(args, env);
        EngineState m = engine_state_of(args, env);
        Rng rng = rng_at(m, RANDOM_ACTION_STREAM, m.episode[0], m.elapsed_steps[0]);
        FOR_RANGE (k, NUM_AGENTS * ACTION_HEADS) {
            int i = k / ACTION_HEADS, head = k % ACTION_HEADS;
            args.actions[env * NUM_AGENTS * ACTION_HEADS + k] = random_action(m, rng, i, head);
        }
    }
}

#endif
