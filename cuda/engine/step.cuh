// SPDX-License-Identifier: Apache-2.0
// The engine around a game: entry kernels, autoreset, final observations, episode statistics, fault words.
// Compiled after the game's own text.
#pragma once
#include "host_simd.cuh"
#if SAMPLED
#include "sampling.cuh"
#endif

enum AutoresetMode : i32 { NEXT_STEP, SAME_STEP, DISABLED };

// A new episode: clocks, returns, activity, state.
HD void begin_episode(EngineState m, State s, Io io, InitialStates initial_states) {
    i64 episode = m.episode[0] + 1;
    group_sync();
    ONCE {
        m.episode[0] = episode;
        m.elapsed_steps[0] = 0;
    }
    FOR_AGENTS (i) {
        m.active[i] = true;
        m.returns[i] = 0;
    }
    io.elapsed_steps = 0;
    io.rng = rng_at(m, RESET_STREAM, episode, 0);
    group_sync();
    reset(s, io);
    group_sync();
    if (initial_states.num_initial_states > 0) {  // every field given from the same saved start
        copy_initial_state(s, initial_states, io.rng.below(0xffffffffu, 0, (u32)initial_states.num_initial_states));
        group_sync();
    }
}

// Bytes of working memory: of each environment in the device's memory, and of a block in shared memory; and whether a
// step that draws its actions is faster than a draw and a step.
KERNEL(vecenv_layout, i64* out) {
    FOR_ITEMS (k, 1) {
        out[0] = staging::SCRATCH_IN_SHARED ? 0 : sizeof(Scratch);
        out[1] = staging::SHARED_BYTES;
        out[2] = staging::FUSED_SAMPLING_PAYS_OFF;
    }
}

#if !SAMPLED

ENV_KERNEL(vecenv_reset, STATE_PARAMETERS, const bool* mask, i32 reseed, u64 seed, u64 first_env_index,
           i32 agents_as_envs, Observation* obs, bool* active, bool* action_mask, Scratch* scratch, i64 num_envs) {
    FOR_ENVS(env, num_envs) {
        EngineState m = ENGINE_STATE_OF(env);
        State s = STATE_OF(env);
        Io io = {};
        io.active = m.active;
        io.scratch = SCRATCH(scratch, env);
        if (!mask || mask[env]) {
            ONCE {
                m.fault[0] = 0;
                if (reseed) {
                    env_key(seed, first_env_index + env, (u32*)m.key);
                    m.episode[0] = -1;
                }
            }
            group_sync();
            begin_episode(m, s, io, INITIAL_STATES);
        }
        io.elapsed_steps = m.elapsed_steps[0];
        observe_rows(m, s, io, obs + env * OUTPUT_ROWS * OBS_SIZE);
        zero_inactive_rows(m, agents_as_envs, m.active, obs + env * OUTPUT_ROWS * OBS_SIZE);
        write_active(m, env, active, action_mask);
    }
}

ENV_KERNEL(vecenv_observe, STATE_PARAMETERS, i32 agents_as_envs, Observation* obs, Scratch* scratch, i64 num_envs) {
    FOR_ENVS(env, num_envs) {
        EngineState m = ENGINE_STATE_OF(env);
        Io io = {};
        io.active = m.active;
        io.scratch = SCRATCH(scratch, env);
        io.elapsed_steps = m.elapsed_steps[0];
        observe_rows(m, STATE_OF(env), io, obs + env * OUTPUT_ROWS * OBS_SIZE);
        zero_inactive_rows(m, agents_as_envs, m.active, obs + env * OUTPUT_ROWS * OBS_SIZE);
    }
}

#define ACTION_PARAMETERS const void *actions, i32 int64_actions

#else

#define ACTION_PARAMETERS                                                                                         \
    const float *parameters, i32 greedy, i32 squash_by_tanh, Action *actions, float *log_probs, float *entropies, \
        float *draws

namespace sampling {

// A step that draws its own actions: each lane those of its agents, where the step will read them, and for the caller.
HD void draw_actions(EngineState m, i64 env, const float* rows, const SampleArguments& sample, Action* staged) {
    Rng rng = rng_at(m, SAMPLER_STREAM, m.episode[0], m.elapsed_steps[0]);
    FOR_AGENTS (i) {
        Action action[ACTION_HEADS];
        sample_row(rows + (i64)i * PARAMETERS_PER_AGENT, rng, i, sample, env * NUM_AGENTS + i, action);
        UNROLL for (int head = 0; head < ACTION_HEADS; ++head) staged[i * ACTION_HEADS + head] = action[head];
    }
}

}  // namespace sampling

#endif

// With `agents_as_envs`, agents are rows with episodes of their own. One that any_agent_ended early episode_ended
// there, with final_obs; rows of zeros follow, and where its environment episode_ended it terminates once more, so that
// nobody bootstraps across the new start.
ENV_KERNEL(vecenv_step, STATE_PARAMETERS, ACTION_PARAMETERS, i32 mode, i32 agents_as_envs, Observation* obs,
           float* rewards, bool* terminations, bool* truncations, bool* active, bool* final_mask, bool* action_mask,
           Observation* final_obs, Scratch* scratch, i64 num_envs) {
#if SAMPLED
    const bool int64_actions = false;
#endif
    host_simd::EnvRange run = {ENGINE_STATE_OF(0), STATE_OF(0), actions, int64_actions,
                               Outputs{obs, rewards, terminations, truncations, active, final_mask}};
    FOR_REMAINING_ENVS(env, num_envs, run) {
        const EngineState global_engine = ENGINE_STATE_OF(env);
        const State global_state = STATE_OF(env);
        EngineState m = global_engine;
        State s = global_state;
        i64 row = env * OUTPUT_ROWS;
        Io io = {};
        io.rewards = rewards + row;
        io.terminations = terminations + row;
        io.truncations = truncations + row;
        io.scratch = SCRATCH(scratch, env);
        io.int64_actions = int64_actions;
        io.actions = (const char*)actions +
                     env * NUM_AGENTS * ACTION_HEADS * (int64_actions ? sizeof(LongAction) : sizeof(Action));
        staging::Staged own;
        staging::Staged& staged = staging::staged_of(own);
#if SAMPLED
        staging::Parameters network_outputs;
        network_outputs.load(parameters + env * staging::PARAMETERS_PER_ENV);
#endif
        if constexpr (staging::IS_STAGED) {
            staging::load_staged(staged, m, s, io.actions, int64_actions);
            m = staging::staged_engine(staged, m);
            s = staging::staged_state(staged, s);
            io.rewards = staged.rewards;
            io.terminations = staged.terminations;
            io.truncations = staged.truncations;
            io.actions = staged.actions;
            io.int64_actions = false;
        }
#if SAMPLED
        const float* policy_parameters = network_outputs.store(parameters + env * staging::PARAMETERS_PER_ENV);
#endif
        if (SAMPLED || staging::IS_STAGED) group_sync();
#if SAMPLED
        sampling::draw_actions(m, env, policy_parameters,
                               {greedy != 0, squash_by_tanh != 0, actions, log_probs, entropies, draws},
                               (Action*)io.actions);
#endif
        Observation* obs_rows = staging::obs_target(obs + row * OBS_SIZE);
        io.elapsed_steps = m.elapsed_steps[0];
        io.rng = rng_at(m, STEP_STREAM, m.episode[0], io.elapsed_steps + 1);
        io.active = m.active;
        FOR_AGENTS (i) {
            io.rewards[i] = 0;
            io.terminations[i] = io.truncations[i] = false;
            if (agents_as_envs)
                active[row + i] = m.active[i];  // before the step; at its end, write_active() writes those after it
        }

        bool all_ended = no_agent_active(m);
        bool resets = all_ended && mode == NEXT_STEP;
        int fault = resets ? 0 : all_ended ? STEPPED_AFTER_END : check_actions(m, io);
        bool episode_ended = false, nonfinite = false;
        staging::EpisodeStatistics statistics;
        group_sync();
        if (fault) {
            ONCE m
                .fault[0] |= fault;
        } else if (!resets) {
            ++io.elapsed_steps;
            if (!run.has_stepped(env, io)) step(s, io);
            group_sync();
            if constexpr (END_ON_NONFINITE) {
                nonfinite = ended_on_nonfinite(m, s, io, obs_rows);
                group_sync();
            }
            bool any_active = false;
            FOR_AGENTS (i) {
                if (!m.active[i]) {
                    io.rewards[i] = 0;
                    io.terminations[i] = io.truncations[i] = false;
                }
                m.returns[i] += io.rewards[i];
                m.active[i] &= !(io.terminations[i] || io.truncations[i]);
                any_active |= m.active[i];
            }
            episode_ended = !group_any(any_active);
            bool truncated = false;
            FOR_AGENTS (i) truncated |= io.truncations[i];
            truncated = group_any(truncated);
            ONCE m
                .elapsed_steps[0] = io.elapsed_steps;
            if (episode_ended) statistics.load(m, io.elapsed_steps, !truncated);
            if (episode_ended && agents_as_envs)
                FOR_AGENTS (i) io.terminations[i] |= !io.truncations[i];
        }

        // Observe the state that the step led to. Where an episode episode_ended and the next resets at once, observe
        // twice: its writes_final_obs state into final_obs, then the new start.
        bool writes_final_obs = episode_ended && mode == SAME_STEP;
        bool any_agent_ended = false;
        FOR_AGENTS (i) {
            bool agent_ended = agents_as_envs && mode == SAME_STEP && (io.terminations[i] || io.truncations[i]);
            any_agent_ended |= final_mask[row + i] = writes_final_obs || agent_ended;
        }
        any_agent_ended = agents_as_envs && group_any(any_agent_ended) && !writes_final_obs;
        resets |= writes_final_obs;
        for (;;) {
            if (resets && !writes_final_obs) {
                group_sync();
                begin_episode(m, s, io, INITIAL_STATES);
                io.elapsed_steps = 0;
            }
            group_sync();
            observe_rows(m, s, io, obs_rows);
            if (nonfinite && (writes_final_obs || !resets)) {
                group_sync();
                FOR_OBS (i, k) obs_rows[i * OBS_SIZE + k] = 0;
            }
            if (!writes_final_obs) break;
            group_sync();
            FOR_OBS (i, k) final_obs[(row + i) * OBS_SIZE + k] = obs_rows[i * OBS_SIZE + k];
            writes_final_obs = false;
        }
        if (any_agent_ended) {
            group_sync();
            FOR_OBS (i, k)
                if (final_mask[row + i]) final_obs[(row + i) * OBS_SIZE + k] = obs_rows[i * OBS_SIZE + k];
        }
        // Who has a final_obs sees the zeros at once, others first their writes_final_obs state.
        if (!resets) zero_inactive_rows(m, agents_as_envs, mode == SAME_STEP ? m.active : active + row, obs_rows);
        group_sync();  // zero_inactive_rows has read what write_active() writes
        write_active(m, env, active, action_mask);
        if (episode_ended) statistics.store(m);
        if constexpr (staging::IS_STAGED) {
            group_sync();
            staging::store_staged(staged, global_engine, global_state);
            FOR_AGENTS (i) {
                rewards[row + i] = staged.rewards[i];
                terminations[row + i] = staged.terminations[i];
                truncations[row + i] = staged.truncations[i];
            }
        }
    }
    staging::write_obs(obs, num_envs);
}

#if !SAMPLED

// Valid uniform actions of the coming step, int32 or float32.
ENV_KERNEL(vecenv_random_actions, STATE_PARAMETERS, Action* actions, i64 num_envs) {
    FOR_ENVS(env, num_envs) {
        EngineState m = ENGINE_STATE_OF(env);
        Rng rng = rng_at(m, RANDOM_ACTION_STREAM, m.episode[0], m.elapsed_steps[0]);
        FOR_RANGE (k, NUM_AGENTS * ACTION_HEADS) {
            int i = k / ACTION_HEADS, head = k % ACTION_HEADS;
#if BOX_ACTIONS
            float u = rng.uniform(i, head);
            actions[env * NUM_AGENTS * ACTION_HEADS + k] =
                math::clamp(math::fma(u, ACTION_HIGH[head] - ACTION_LOW[head], ACTION_LOW[head]), ACTION_LOW[head],
                            ACTION_HIGH[head]);
#else
            actions[env * NUM_AGENTS * ACTION_HEADS + k] = random_choice(m, rng, i, head);
#endif
        }
    }
}

#endif
