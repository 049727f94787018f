// SPDX-License-Identifier: Apache-2.0
// The machine around a game: entry kernels, autoreset, final observations, episode statistics, fault words.
// Compiled after the game's own text.
#pragma once
#include "lockstep.cuh"
#if SAMPLED
#include "sampling.cuh"
#endif

enum AutoresetMode : i32 { NEXT_STEP, SAME_STEP, DISABLED };

// A new episode: clocks, returns, activity, state.
HD void begin_episode(Machine m, State s, Io io, Pool pool) {
    i64 episode = m.episode[0] + 1;
    team_sync();
    ONCE {
        m.episode[0] = episode;
        m.time[0] = 0;
    }
    FOR_AGENTS (i) {
        m.active[i] = true;
        m.returns[i] = 0;
    }
    io.time = 0;
    io.rng = rng_of(m, RESET_STREAM, episode, 0);
    team_sync();
    reset(s, io);
    team_sync();
    if (pool.NUM_STARTS > 0) {  // every pooled field from the same saved start
        draw_start(s, pool, io.rng.below(0xffffffffu, 0, (u32)pool.NUM_STARTS));
        team_sync();
    }
}

// Bytes of working memory: of each replica in the device's memory, and of a block in shared memory; and whether a step
// that draws its actions is faster than a draw and a step.
KERNEL(vecenv_layout, i64* out) {
    FOR_ITEMS (k, 1) {
        out[0] = staging::SCRATCH_IS_SHARED ? 0 : sizeof(Scratch);
        out[1] = staging::SHARED_BYTES;
        out[2] = staging::DRAWING_PAYS;
    }
}

#if !SAMPLED

REPLICA_KERNEL(vecenv_reset, STATE_PARAMETERS, const bool* mask, i32 reseed, u64 seed, u64 first_replica, i32 rows,
               Observation* obs, bool* active, bool* action_mask, Scratch* scratch, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        State s = STATE_OF(e);
        Io io = {};
        io.active = m.active;
        io.scratch = SCRATCH(scratch, e);
        if (!mask || mask[e]) {
            ONCE {
                m.fault[0] = 0;
                if (reseed) {
                    replica_key(seed, first_replica + e, (u32*)m.key);
                    m.episode[0] = -1;
                }
            }
            team_sync();
            begin_episode(m, s, io, POOL);
        }
        io.time = m.time[0];
        observe_rows(m, s, io, obs + e * OUTPUT_ROWS * OBS_SIZE);
        blank_rows(m, rows, m.active, obs + e * OUTPUT_ROWS * OBS_SIZE);
        report(m, e, active, action_mask);
    }
}

REPLICA_KERNEL(vecenv_observe, STATE_PARAMETERS, i32 rows, Observation* obs, Scratch* scratch, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        Io io = {};
        io.active = m.active;
        io.scratch = SCRATCH(scratch, e);
        io.time = m.time[0];
        observe_rows(m, STATE_OF(e), io, obs + e * OUTPUT_ROWS * OBS_SIZE);
        blank_rows(m, rows, m.active, obs + e * OUTPUT_ROWS * OBS_SIZE);
    }
}

#define ACTION_PARAMETERS const void *actions, i32 wide

#else

#define ACTION_PARAMETERS                                                                                         \
    const float *parameters, i32 greedy, i32 squash_by_tanh, Action *actions, float *log_probs, float *entropies, \
        float *draws

namespace sampling {

// A tick that draws its own actions: each lane those of its agents, where the tick will read them, and for the caller.
HD void draw_actions(Machine m, i64 e, const float* rows, const Drawn& drawn, Action* near) {
    Rng rng = rng_of(m, SAMPLER_STREAM, m.episode[0], m.time[0]);
    FOR_AGENTS (i) {
        Action action[ACTION_HEADS];
        sample_row(rows + (i64)i * PARAMETERS_PER_AGENT, rng, i, drawn, e * NUM_AGENTS + i, action);
        UNROLL for (int head = 0; head < ACTION_HEADS; ++head) near[i * ACTION_HEADS + head] = action[head];
    }
}

}  // namespace sampling

#endif

// With `rows`, agents are rows with episodes of their own. One that leaves early ends there, with final_obs; rows of
// zeros follow, and where its replica ends it terminates once more, so that nobody bootstraps across the new start.
REPLICA_KERNEL(vecenv_step, STATE_PARAMETERS, ACTION_PARAMETERS, i32 mode, i32 rows, Observation* obs, float* rewards,
               bool* terminations, bool* truncations, bool* active, bool* final_mask, bool* action_mask,
               Observation* final_obs, Scratch* scratch, i64 num_envs) {
#if SAMPLED
    const bool wide = false;
#endif
    lockstep::Run run = {MACHINE_OF(0), STATE_OF(0), actions, wide,
                         Outputs{obs, rewards, terminations, truncations, active, final_mask}};
    FOR_REPLICAS_LEFT(e, num_envs, run) {
        const Machine far_machine = MACHINE_OF(e);
        const State far_state = STATE_OF(e);
        Machine m = far_machine;
        State s = far_state;
        i64 row = e * OUTPUT_ROWS;
        Io io = {};
        io.rewards = rewards + row;
        io.terminations = terminations + row;
        io.truncations = truncations + row;
        io.scratch = SCRATCH(scratch, e);
        io.wide = wide;
        io.actions =
            (const char*)actions + e * NUM_AGENTS * ACTION_HEADS * (wide ? sizeof(WideAction) : sizeof(Action));
        staging::Near own;
        staging::Near& near = staging::near_of(own);
#if SAMPLED
        staging::Parameters asked;
        asked.ask(parameters + e * staging::OWN_PARAMETERS);
#endif
        if constexpr (staging::IS_NEAR) {
            staging::fetch(near, m, s, io.actions, wide);
            m = staging::near_machine(near, m);
            s = staging::near_state(near, s);
            io.rewards = near.rewards;
            io.terminations = near.terminations;
            io.truncations = near.truncations;
            io.actions = near.actions;
            io.wide = false;
        }
#if SAMPLED
        const float* drawn_from = asked.keep(parameters + e * staging::OWN_PARAMETERS);
#endif
        if (SAMPLED || staging::IS_NEAR) team_sync();
#if SAMPLED
        sampling::draw_actions(m, e, drawn_from,
                               {greedy != 0, squash_by_tanh != 0, actions, log_probs, entropies, draws},
                               (Action*)io.actions);
#endif
        Observation* seen = staging::obs_of(obs + row * OBS_SIZE);
        io.time = m.time[0];
        io.rng = rng_of(m, STEP_STREAM, m.episode[0], io.time + 1);
        io.active = m.active;
        FOR_AGENTS (i) {
            io.rewards[i] = 0;
            io.terminations[i] = io.truncations[i] = false;
            if (rows) active[row + i] = m.active[i];  // before the tick; at its end, report() writes those after it
        }

        bool over = none_active(m);
        bool begins = over && mode == NEXT_STEP;
        int fault = begins ? 0 : over ? STEPPED_AFTER_END : action_fault(m, io);
        bool ends = false, lost = false;
        staging::Books books;
        team_sync();
        if (fault) {
            ONCE m
                .fault[0] |= fault;
        } else if (!begins) {
            ++io.time;
            if (!run.has_stepped(e, io)) step(s, io);
            team_sync();
            if constexpr (QUARANTINE) {
                lost = quarantined(m, s, io, seen);
                team_sync();
            }
            bool going_on = false;
            FOR_AGENTS (i) {
                if (!m.active[i]) {
                    io.rewards[i] = 0;
                    io.terminations[i] = io.truncations[i] = false;
                }
                m.returns[i] += io.rewards[i];
                m.active[i] &= !(io.terminations[i] || io.truncations[i]);
                going_on |= m.active[i];
            }
            ends = !team_any(going_on);
            bool truncated = false;
            FOR_AGENTS (i) truncated |= io.truncations[i];
            truncated = team_any(truncated);
            ONCE m
                .time[0] = io.time;
            if (ends) books.open(m, io.time, !truncated);
            if (ends && rows)
                FOR_AGENTS (i) io.terminations[i] |= !io.truncations[i];
        }

        // Observe the state that the tick led to. Where an episode ends and the next begins at once, observe twice:
        // its last state into final_obs, then the new start.
        bool last = ends && mode == SAME_STEP;
        bool leaves = false;
        FOR_AGENTS (i) {
            bool left = rows && mode == SAME_STEP && (io.terminations[i] || io.truncations[i]);
            leaves |= final_mask[row + i] = last || left;
        }
        leaves = rows && team_any(leaves) && !last;
        begins |= last;
        for (;;) {
            if (begins && !last) {
                team_sync();
                begin_episode(m, s, io, POOL);
                io.time = 0;
            }
            team_sync();
            observe_rows(m, s, io, seen);
            if (lost && (last || !begins)) {
                team_sync();
                FOR_OBS (i, k) seen[i * OBS_SIZE + k] = 0;
            }
            if (!last) break;
            team_sync();
            FOR_OBS (i, k) final_obs[(row + i) * OBS_SIZE + k] = seen[i * OBS_SIZE + k];
            last = false;
        }
        if (leaves) {
            team_sync();
            FOR_OBS (i, k)
                if (final_mask[row + i]) final_obs[(row + i) * OBS_SIZE + k] = seen[i * OBS_SIZE + k];
        }
        // Who has a final_obs sees the zeros at once, others first their last state.
        if (!begins) blank_rows(m, rows, mode == SAME_STEP ? m.active : active + row, seen);
        team_sync();  // blank_rows has read what report() writes
        report(m, e, active, action_mask);
        if (ends) books.close(m);
        if constexpr (staging::IS_NEAR) {
            team_sync();
            staging::put_back(near, far_machine, far_state);
            FOR_AGENTS (i) {
                rewards[row + i] = near.rewards[i];
                terminations[row + i] = near.terminations[i];
                truncations[row + i] = near.truncations[i];
            }
        }
    }
    staging::write_obs(obs, num_envs);
}

#if !SAMPLED

// Valid uniform actions of the coming tick, int32 or float32.
REPLICA_KERNEL(vecenv_random_actions, STATE_PARAMETERS, Action* actions, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        Rng rng = rng_of(m, RANDOM_ACTION_STREAM, m.episode[0], m.time[0]);
        FOR_RANGE (k, NUM_AGENTS * ACTION_HEADS) {
            int i = k / ACTION_HEADS, head = k % ACTION_HEADS;
#if BOX_ACTIONS
            float u = rng.uniform(i, head);
            actions[e * NUM_AGENTS * ACTION_HEADS + k] =
                math::clamp(math::fma(u, ACTION_HIGH[head] - ACTION_LOW[head], ACTION_LOW[head]), ACTION_LOW[head],
                            ACTION_HIGH[head]);
#else
            actions[e * NUM_AGENTS * ACTION_HEADS + k] = random_choice(m, rng, i, head);
#endif
        }
    }
}

#endif
