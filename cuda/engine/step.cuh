// SPDX-License-Identifier: Apache-2.0
// Resets and steps of one environment, for any game: autoreset, episode statistics, observations. Compiled after the
// game's own source.
#pragma once
#include "action_source.cuh"
#include "host_simd.cuh"

enum AutoresetMode : i32 { NEXT_STEP, SAME_STEP, DISABLED };

namespace stepping {

// Begins an episode: engine state, then the game's reset(), then the fields that a saved initial state replaces.
HD void begin_episode(EngineState m, State s, Io io, InitialStates initial_states) {
    i64 episode = m.episode[0] + 1;
    group_sync();
    ONCE {
        m.episode[0] = episode;
        m.elapsed_steps[0] = 0;
    }
    FOR_AGENTS (i) {
        m.active[i] = true;
#if TRACKS_ACTING
        m.alive[i] = true;
#endif
        m.returns[i] = 0;
    }
    io.elapsed_steps = 0;
    io.rng = rng_at(m, RESET_STREAM, episode, 0);
    randomized::begin(m, s, rng_at(m, RANDOMIZED_STREAM, episode, 0));
    group_sync();
    reset(s, io);
    group_sync();
    if (initial_states.num_initial_states > 0) {
        copy_initial_state(s, initial_states, io.rng.below(0xffffffffu, 0, (u32)initial_states.num_initial_states));
        group_sync();
        randomized::use(s);
    }
}

// Outside a step.
HD void observe_env(EngineState m, State s, Io io, i32 agents_as_envs, Observation* obs) {
    io.elapsed_steps = m.elapsed_steps[0];
    randomized::use(s);
    observe_rows(m, s, io, obs);
    zero_inactive_rows(m, agents_as_envs, m.active, obs);
}

// One environment during one step. The functions below stand in the order in which step_env() calls them.
struct StepContext {
    i64 env;
    i64 row;             // its first row in the output tensors
    i32 mode;            // AutoresetMode
    i32 agents_as_envs;  // each agent is an environment to the caller: see step_env()
    EngineState engine;  // staged copies where they fit
    State state;
    Io io;
    Observation* obs;          // where observe() writes: shared memory or the output tensor
    bool resets;               // an episode begins in this step
    bool episode_ended;        // the last active agents ended in this step
    bool nonfinite;            // with END_ON_NONFINITE: the episode ended for that reason
    bool faulted;              // there was no step: an invalid action, or the episode had ended before
    bool all_have_final_obs;   // final_obs gets the rows of all agents
    bool some_have_final_obs;  // final_obs gets only the rows that final_mask names
};

HD void use_staged(StepContext& c, staging::Staged& staged) {
    if constexpr (staging::IS_STAGED) {
        c.engine = staging::staged_engine(staged, c.engine);
        c.state = staging::staged_state(staged, c.state);
        c.io.rewards = staged.rewards;
        c.io.terminations = staged.terminations;
        c.io.truncations = staged.truncations;
        c.io.actions = staged.actions;
        c.io.int64_actions = false;
    }
}

// Brings state, actions and policy outputs to the group's staged copies. All loads are issued before the first store.
template <class Source>
HD void load(StepContext& c, staging::Staged& staged, Source& source) {
    source.load(c.env);
    c.io.actions = source.actions_of(c.env);
    c.io.int64_actions = source.int64_actions;
    if constexpr (staging::IS_STAGED) {
        staging::load_staged(staged, c.engine, c.state, c.io.actions, c.io.int64_actions);
        use_staged(c, staged);
    }
    source.stage();
    if (SAMPLED || staging::IS_STAGED) group_sync();
}

HD void prepare_io(StepContext& c, const StepOutputs& out) {
    c.episode_ended = c.nonfinite = c.faulted = false;
    if constexpr (!staging::IS_STAGED) {
        c.io.rewards = out.rewards + c.row;
        c.io.terminations = out.terminations + c.row;
        c.io.truncations = out.truncations + c.row;
    }
    c.obs = staging::obs_target(out.obs + c.row * OBS_SIZE);
    c.io.elapsed_steps = c.engine.elapsed_steps[0];
    c.io.rng = rng_at(c.engine, STEP_STREAM, c.engine.episode[0], c.io.elapsed_steps + 1);
    c.io.active = alive_agents(c.engine);
#if TAKES_TURNS
    c.io.acting = c.engine.acting;
#endif
    FOR_AGENTS (i) {
        c.io.rewards[i] = 0;
        c.io.terminations[i] = c.io.truncations[i] = false;
        // As it was before the step: write_active() replaces it at the end.
        if (c.agents_as_envs) out.active[c.row + i] = c.engine.active[i];
    }
}

// The fault that prevents this step, or 0. Where the step only begins an episode (NEXT_STEP), actions do not count.
HD int find_fault(StepContext& c) {
    bool all_ended = no_agent_active(c.engine);
    c.resets = all_ended && c.mode == NEXT_STEP;
    int fault = c.resets ? 0 : all_ended ? STEPPED_AFTER_END : check_actions(c.engine, c.io);
    group_sync();
    return fault;
}

// Without a valid action the game cannot step: its state stays as it is, and the episode ends as truncated with reward
// NaN, so that no learner takes it for an ordinary transition. After the episode's end there is no transition at all.
HD void truncate_on_fault(StepContext& c, int fault) {
    ONCE {
        c.engine.fault[0] |= fault;
    }
    c.faulted = true;
    if (fault == STEPPED_AFTER_END) return;
    FOR_AGENTS (i) {
        c.io.rewards[i] = c.engine.active[i] ? math::from_bits(math::NAN_BITS) : 0;
        c.io.truncations[i] = c.engine.active[i];
        c.engine.active[i] = false;
    }
    c.episode_ended = true;
    group_sync();
}

HD void step_game(StepContext& c, const host_simd::EnvRange& range) {
    ++c.io.elapsed_steps;
    if (!range.has_stepped(c.env, c.io)) step(c.state, c.io);
    group_sync();
    if constexpr (END_ON_NONFINITE) {
        c.nonfinite = ended_on_nonfinite(c.engine, c.state, c.io, c.obs);
        group_sync();
    }
}

#if TRACKS_ACTING
// Agents with team reward end with their episode: as truncated where the step truncated an agent that did not terminate
// in it, else as terminated. One that ends before has died: it stays active, and receives rewards.
HD void update_agents(StepContext& c) {
    bool any_goes_on = false, truncated = false;
    FOR_AGENTS (i) {
        if (!c.engine.active[i]) c.io.rewards[i] = 0;
        if (!c.engine.active[i] || !c.engine.alive[i]) c.io.terminations[i] = c.io.truncations[i] = false;
        c.engine.returns[i] += c.io.rewards[i];
        bool lives = c.engine.active[i] && c.engine.alive[i];
        any_goes_on |= lives && !(c.io.terminations[i] || c.io.truncations[i]);
        truncated |= c.io.truncations[i] && !c.io.terminations[i];
    }
    c.episode_ended = !group_any(any_goes_on);
    truncated = group_any(truncated);
    FOR_AGENTS (i) {
        bool ends = c.io.terminations[i] || c.io.truncations[i];
        if (!c.episode_ended) c.engine.alive[i] &= !ends;
        if (has_team_reward(i)) {
            ends = c.episode_ended;
            c.io.terminations[i] = ends && !truncated;
            c.io.truncations[i] = ends && truncated;
        }
        c.engine.active[i] &= !ends;
    }
}
#else
// Adds the rewards to the episode's returns; agents that ended become inactive.
HD void update_agents(StepContext& c) {
    bool any_active = false;
    FOR_AGENTS (i) {
        if (!c.engine.active[i]) {
            c.io.rewards[i] = 0;
            c.io.terminations[i] = c.io.truncations[i] = false;
        }
        c.engine.returns[i] += c.io.rewards[i];
        c.engine.active[i] &= !(c.io.terminations[i] || c.io.truncations[i]);
        any_active |= c.engine.active[i];
    }
    c.episode_ended = !group_any(any_active);
}
#endif

HD void load_statistics(StepContext& c, staging::EpisodeStatistics& statistics) {
    bool truncated = false;
    FOR_AGENTS (i) truncated |= c.io.truncations[i];
    truncated = group_any(truncated);
    ONCE {
        c.engine.elapsed_steps[0] = c.io.elapsed_steps;
    }
    if (c.episode_ended && !c.faulted) statistics.load(c.engine, c.io.elapsed_steps, !truncated);
}

// With agents_as_envs every row ends at its environment's reset, also the rows of agents that ended earlier.
HD void terminate_rows(StepContext& c) {
    if (c.episode_ended && c.agents_as_envs) {
        FOR_AGENTS (i) c.io.terminations[i] |= !c.io.truncations[i];
    }
}

HD void write_fault(const StepContext& c, bool* fault) {
    FOR_AGENTS (i) fault[c.row + i] = c.faulted;
}

HD void write_final_mask(StepContext& c, bool* final_mask) {
    c.all_have_final_obs = c.episode_ended && c.mode == SAME_STEP;
    bool any = false;
    FOR_AGENTS (i) {
        bool agent_ended = c.agents_as_envs && c.mode == SAME_STEP && (c.io.terminations[i] || c.io.truncations[i]);
        any |= final_mask[c.row + i] = c.all_have_final_obs || agent_ended;
    }
    c.some_have_final_obs = c.agents_as_envs && group_any(any) && !c.all_have_final_obs;
    c.resets |= c.all_have_final_obs;
}

// Observes the state that the step led to and, where an episode begins, the new state. A SAME_STEP reset needs both:
// the first goes to final_obs. This is a loop and not two calls so that observe() is compiled once.
HD void observe_and_reset(StepContext& c, Observation* final_obs, InitialStates initial_states) {
    for (bool is_final = c.all_have_final_obs;; is_final = false) {
        if (c.resets && !is_final) {
            group_sync();
            begin_episode(c.engine, c.state, c.io, initial_states);
            c.io.elapsed_steps = 0;
        }
        group_sync();
        observe_rows(c.engine, c.state, c.io, c.obs);
        if (c.nonfinite && (is_final || !c.resets)) {
            group_sync();
            FOR_OBS (i, k) c.obs[i * OBS_SIZE + k] = 0;
        }
        if (!is_final) break;
        group_sync();
        FOR_OBS (i, k) final_obs[(c.row + i) * OBS_SIZE + k] = c.obs[i * OBS_SIZE + k];
    }
}

HD void copy_final_rows(const StepContext& c, const StepOutputs& out) {
    if (!c.some_have_final_obs) return;
    group_sync();
    FOR_OBS (i, k) {
        if (out.final_mask[c.row + i]) out.final_obs[(c.row + i) * OBS_SIZE + k] = c.obs[i * OBS_SIZE + k];
    }
}

// With SAME_STEP the rows of agents that ended in this step are zero at once, as final_obs holds their last
// observation. In the other modes obs holds it, and only agents that had ended before this step have zeros.
HD void zero_rows_and_write_active(const StepContext& c, const StepOutputs& out) {
    const bool* keeps_obs = c.mode == SAME_STEP ? c.engine.active : out.active + c.row;
    if (!c.resets) zero_inactive_rows(c.engine, c.agents_as_envs, keeps_obs, c.obs);
    group_sync();  // write_active() overwrites what zero_inactive_rows() reads
    write_active(c.engine, c.env, out);
}

HD void store_rewards_and_ends(const StepContext& c, const staging::Staged& staged, const StepOutputs& out) {
    if constexpr (staging::IS_STAGED) {
        FOR_AGENTS (i) {
            out.rewards[c.row + i] = staged.rewards[i];
            out.terminations[c.row + i] = staged.terminations[i];
            out.truncations[c.row + i] = staged.truncations[i];
        }
    }
}

HD void store_state(const staging::Staged& staged, EngineState engine, State state) {
    if constexpr (staging::IS_STAGED) {
        group_sync();
        staging::store_staged(staged, engine, state);
    }
}

// One environment before its first step here; the state is in its tensors.
HD StepContext context_of(i64 env, EngineState engine, State state, i32 mode, i32 agents_as_envs, Scratch* scratch) {
    StepContext c = {};
    c.env = env;
    c.row = env * OUTPUT_ROWS;
    c.mode = mode;
    c.agents_as_envs = agents_as_envs;
    c.engine = engine;
    c.state = state;
    c.io.scratch = scratch;
    return c;
}

// One step after load(). With agents_as_envs, each agent is an environment of its own to the caller: one that ends
// early has its final_obs then, rows of zeros until its environment's episode ends, and terminates there once more, so
// that no learner bootstraps across the reset. Without WRITES_MASKS, for NEXT_STEP only, `fault` and `final_mask` stay
// as they are.
template <bool WRITES_MASKS = true, class Source>
HD void step_loaded(StepContext& c, const Source& source, InitialStates initial_states, const StepOutputs& out,
                    const host_simd::EnvRange& range) {
    staging::EpisodeStatistics statistics;
    randomized::use(c.state);
    source.draw(c.engine, c.env, (Action*)c.io.actions);
    prepare_io(c, out);
    int fault = find_fault(c);
    if (fault) {
        truncate_on_fault(c, fault);
    } else if (!c.resets) {
        step_game(c, range);
        update_agents(c);
        load_statistics(c, statistics);
    }
    terminate_rows(c);
    if constexpr (WRITES_MASKS) {
        write_fault(c, out.fault);
        write_final_mask(c, out.final_mask);
    }
    observe_and_reset(c, out.final_obs, initial_states);
    copy_final_rows(c, out);
    zero_rows_and_write_active(c, out);
    if (c.episode_ended && !c.faulted) statistics.store(c.engine);
}

// One step of one environment, whose state is in its tensors.
HD void step_env(i64 env, EngineState engine, State state, InitialStates initial_states, ActionSource source,
                 const StepOutputs& out, i32 mode, i32 agents_as_envs, Scratch* scratch,
                 const host_simd::EnvRange& range) {
    StepContext c = context_of(env, engine, state, mode, agents_as_envs, scratch);
    staging::Staged in_registers;
    staging::Staged& staged = staging::staged_of(in_registers);
    load(c, staged, source);
    step_loaded(c, source, initial_states, out, range);
    store_state(staged, engine, state);
    store_rewards_and_ends(c, staged, out);
}

}  // namespace stepping
