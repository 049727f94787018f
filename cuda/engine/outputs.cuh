// SPDX-License-Identifier: Apache-2.0
// Output rows of one environment, and the check for non-finite values.
#pragma once
#include "actions.cuh"
#include "randomized.cuh"

// Rows per environment in the tensors that a step writes: one per agent, and the guard rows of debug builds.
constexpr i64 OUTPUT_ROWS = NUM_AGENTS + GUARD_ROWS;

// The tensors that a step writes: all rows of all environments.
struct StepOutputs {
    Observation* obs;
    float* rewards;
    bool *terminations, *truncations, *active, *final_mask, *fault, *action_mask;
    Observation* final_obs;
    bool* acting;
};

HD Rng rng_at(EngineState m, u32 stream, i64 episode, int step) {
    return {(u32)m.key[0], (u32)m.key[1], stream, (u32)episode, (u32)step};
}

HD bool no_agent_active(EngineState m) {
    bool any = false;
    FOR_AGENTS (i) any |= m.active[i];
    return !group_any(any);
}

// What `active` is to the game: agents that have neither ended nor died.
HD const bool* alive_agents(EngineState m) {
#if TRACKS_ACTING
    return m.alive;
#else
    return m.active;
#endif
}

// Writes the observations of the current state, zero-padded to the widest role's size, the agents that act next, and
// the action masks. The row of an agent that has died is zero, but for its id.
HD void observe_rows(EngineState m, State s, Io io, Observation* rows) {
    io.obs = (Observation(*)[OBS_SIZE])rows;
#if ACTION_MASKS
    io.action_mask = m.action_mask;
#endif
#if TRACKS_ACTING
    FOR_AGENTS (i) m.acting[i] = true;
    group_sync();
#endif
#if TAKES_TURNS
    io.acting = m.acting;
#endif
    observe(s, io);
    if (OBS_PADDED || ACTION_MASKS || TRACKS_ACTING) group_sync();
#if TRACKS_ACTING
    FOR_AGENTS (i) m.acting[i] &= m.alive[i];
    FOR_OBS (i, k) {
        if (has_team_reward(i) && !m.alive[i] && !stays_when_dead(i, k)) io.obs[i][k] = 0;
    }
    group_sync();
#endif
    if (OBS_PADDED) {
        FOR_OBS (i, k) {
            if (!observed(i, k)) io.obs[i][k] = 0;
        }
    }
#if ACTION_MASKS
    FOR_AGENTS (i) {
        for (int head = 0; head < ACTION_HEADS; ++head) {
            for (int k = logit_offset(head); k < logit_offset(head + 1); ++k) {
                if (!acts(m, i)) io.action_mask[i][k] = true;  // its action is ignored
                if (k - logit_offset(head) >= action_size(i, head)) io.action_mask[i][k] = false;
            }
        }
    }
    group_sync();
#endif
}

// With agents_as_envs, zeroes the rows of agents that have ended (`keeps_obs[i]` false) while others are still active.
HD void zero_inactive_rows(EngineState m, i32 agents_as_envs, const bool* keeps_obs, Observation* obs) {
    if (NUM_AGENTS == 1 || !agents_as_envs) return;
    bool any_ended = false;
    FOR_AGENTS (i) any_ended |= !keeps_obs[i];
    if (!group_any(any_ended) || no_agent_active(m)) return;
    group_sync();
    FOR_OBS (i, k) {
        if (!keeps_obs[i]) obs[i * OBS_SIZE + k] = 0;
    }
}

// Copies active and acting flags and action masks into the output tensors.
HD void write_active(EngineState m, i64 env, const StepOutputs& out) {
    FOR_AGENTS (i) out.active[env * OUTPUT_ROWS + i] = m.active[i];
#if TRACKS_ACTING
    FOR_AGENTS (i) out.acting[env * OUTPUT_ROWS + i] = m.acting[i];
#endif
#if ACTION_MASKS
    const int n = NUM_AGENTS * NUM_LOGITS;
    FOR_RANGE (k, n) out.action_mask[env * OUTPUT_ROWS * NUM_LOGITS + k] = ((const bool*)m.action_mask)[k];
#endif
}

// With end_on_nonfinite: where state, a reward or an observation is NaN or infinite, all active agents terminate with
// reward 0, the environment gets a fault bit, and its state is that of a new episode, so that no non-finite number
// survives. The other environments are not affected.
HD bool ended_on_nonfinite(EngineState m, State s, Io io, Observation* obs_rows) {
    bool nonfinite = !is_finite(s);
    FOR_AGENTS (i) nonfinite |= m.active[i] && !math::is_finite(io.rewards[i]);
    if (!group_any(nonfinite)) {
        observe_rows(m, s, io, obs_rows);
        group_sync();
        FOR_OBS (i, k) nonfinite |= !math::is_finite(obs_rows[i * OBS_SIZE + k]);
    }
    if (!group_any(nonfinite)) return false;
    group_sync();
    FOR_AGENTS (i) {
        io.rewards[i] = 0;
        io.terminations[i] = m.active[i];
        io.truncations[i] = false;
    }
    ONCE {
        m.fault[0] |= NONFINITE;
    }
    io.rng = rng_at(m, RESET_STREAM, m.episode[0] + 1, 0);
    io.elapsed_steps = 0;
    randomized::begin(m, s, rng_at(m, RANDOMIZED_STREAM, m.episode[0] + 1, 0));
    reset(s, io);
    group_sync();
    return true;
}
