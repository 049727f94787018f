// SPDX-License-Identifier: Apache-2.0
// The machine around a game: entry kernels, autoreset, final observations, episode statistics, fault words.
// Compiled after the game's own text.
#pragma once

// Bits of a replica's fault word; gpu_vecenv/vec_env.py names them too.
enum Fault : i32 {
    INVALID_ACTION = 1,     // a discrete action, or a continuous one, outside its space
    NON_FINITE_ACTION = 2,  // NaN or infinite
    STEPPED_AFTER_END = 4,  // without autoreset: the episode had ended
};

enum AutoresetMode : i32 { NEXT_STEP, SAME_STEP, DISABLED };

#if defined(__CUDACC__)
constexpr bool SCRATCH_IS_SHARED = sizeof(Scratch) * TEAMS_PER_BLOCK <= SHARED_LIMIT;
extern __shared__ __align__(16) unsigned char shared_scratch[];
HD Scratch* scratch_of(Scratch* everywhere, i64 replica) {
    if constexpr (SCRATCH_IS_SHARED)
        return (Scratch*)shared_scratch + threadIdx.x / TEAM;
    else
        return everywhere + replica;
}
#define SCRATCH(everywhere, e) scratch_of(everywhere, e)
#define REPLICA_KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(TEAM* TEAMS_PER_BLOCK) kernel_##name(__VA_ARGS__)
#define FOR_REPLICAS(e, n) if (i64 e = (i64)blockIdx.x * TEAMS_PER_BLOCK + threadIdx.x / TEAM; e < (n))
#else
constexpr bool SCRATCH_IS_SHARED = false;
#define SCRATCH(everywhere, e) (everywhere + worker_)
#define REPLICA_KERNEL KERNEL
#define FOR_REPLICAS(e, n) FOR_ITEMS (e, n)
#endif

HD Rng rng_of(Machine m, u32 stream, i64 episode, int step) {
    return {(u32)m.key[0], (u32)m.key[1], stream, (u32)episode, (u32)step};
}

HD bool none_active(Machine m) {
    bool any = false;
    FOR_AGENTS (i) any |= m.active[i];
    return !team_any(any);
}

HD int action_fault(Machine m, const Io& io) {
    int outside = 0, non_finite = 0;
    FOR_AGENTS (i) {
        if (!m.active[i]) continue;
        for (int head = 0; head < ACTION_HEADS; ++head) {
            i64 k = (i64)i * ACTION_HEADS + head;
#if CONTINUOUS_ACTIONS
            float a = ((const float*)io.actions)[k];
            non_finite |= !math::is_finite(a);
            outside |= math::is_finite(a) && !(a >= ACTION_LOW[head] && a <= ACTION_HIGH[head]);
#else
            i64 a = io.wide ? ((const i64*)io.actions)[k] : ((const i32*)io.actions)[k];
            int n = action_size(i, head);
            outside |= n > 0 && (a < 0 || a >= n);  // a head that this role lacks may hold anything
#endif
        }
    }
    return (team_any(outside) ? INVALID_ACTION : 0) | (team_any(non_finite) ? NON_FINITE_ACTION : 0);
}

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

KERNEL(vecenv_layout, i64* out) {
    FOR_ITEMS (k, 1) {
        out[0] = sizeof(Scratch);
        out[1] = SCRATCH_IS_SHARED;
    }
}

REPLICA_KERNEL(vecenv_reset, STATE_PARAMETERS, const bool* mask, i32 reseed, u64 seed, u64 first_replica,
               Observation* obs, bool* active, Scratch* scratch, i64 num_envs) {
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
        io.obs = (Observation(*)[OBS_SIZE])(obs + e * NUM_AGENTS * OBS_SIZE);
        observe(s, io);
        FOR_AGENTS (i) active[e * NUM_AGENTS + i] = m.active[i];
    }
}

REPLICA_KERNEL(vecenv_observe, STATE_PARAMETERS, Observation* obs, Scratch* scratch, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        Io io = {};
        io.active = m.active;
        io.scratch = SCRATCH(scratch, e);
        io.time = m.time[0];
        io.obs = (Observation(*)[OBS_SIZE])(obs + e * NUM_AGENTS * OBS_SIZE);
        observe(STATE_OF(e), io);
    }
}

REPLICA_KERNEL(vecenv_step, STATE_PARAMETERS, const void* actions, i32 wide, i32 mode, Observation* obs, float* rewards,
               bool* terminations, bool* truncations, bool* active, Observation* final_obs, bool* final_mask,
               Scratch* scratch, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        State s = STATE_OF(e);
        i64 row = e * NUM_AGENTS;
        Io io;
        io.time = m.time[0];
        io.rng = rng_of(m, STEP_STREAM, m.episode[0], io.time + 1);
        io.active = m.active;
        io.rewards = rewards + row;
        io.terminations = terminations + row;
        io.truncations = truncations + row;
        io.scratch = SCRATCH(scratch, e);
        io.wide = wide;
        io.actions = (const char*)actions + row * ACTION_HEADS * (wide ? sizeof(WideAction) : sizeof(Action));
        FOR_AGENTS (i) {
            io.rewards[i] = 0;
            io.terminations[i] = io.truncations[i] = false;
        }

        bool over = none_active(m);
        bool begins = over && mode == NEXT_STEP;
        int fault = begins ? 0 : over ? STEPPED_AFTER_END : action_fault(m, io);
        bool ends = false;
        team_sync();
        if (fault) {
            ONCE m
                .fault[0] |= fault;
        } else if (!begins) {
            ++io.time;
            step(s, io);
            team_sync();
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
            ONCE {
                m.time[0] = io.time;
                if (ends) {
                    m.completed_episodes[0] += 1;
                    m.completed_lengths[0] += io.time;
                    m.completed_terminations[0] += !truncated;
                }
            }
            if (ends)
                FOR_AGENTS (i) m.completed_returns[i] += m.returns[i];
        }

        // Observe the state that the tick led to. Where an episode ends and the next begins at once, observe twice:
        // its last state into final_obs, then the new start.
        bool last = ends && mode == SAME_STEP;
        FOR_AGENTS (i) final_mask[row + i] = last;
        begins |= last;
        for (;;) {
            if (begins && !last) {
                team_sync();
                begin_episode(m, s, io, POOL);
                io.time = 0;
            }
            io.obs = (Observation(*)[OBS_SIZE])((last ? final_obs : obs) + row * OBS_SIZE);
            team_sync();
            observe(s, io);
            if (!last) break;
            last = false;
        }
        FOR_AGENTS (i) active[row + i] = m.active[i];
    }
}

// Valid uniform actions of the coming tick, int32 or float32.
REPLICA_KERNEL(vecenv_random_actions, STATE_PARAMETERS, Action* actions, i64 num_envs) {
    FOR_REPLICAS(e, num_envs) {
        Machine m = MACHINE_OF(e);
        Rng rng = rng_of(m, RANDOM_ACTION_STREAM, m.episode[0], m.time[0]);
        FOR_RANGE (k, NUM_AGENTS * ACTION_HEADS) {
            int i = k / ACTION_HEADS, head = k % ACTION_HEADS;
#if CONTINUOUS_ACTIONS
            float u = rng.uniform(i, head);
            actions[e * NUM_AGENTS * ACTION_HEADS + k] =
                math::clamp(math::fma(u, ACTION_HIGH[head] - ACTION_LOW[head], ACTION_LOW[head]), ACTION_LOW[head],
                            ACTION_HIGH[head]);
#else
            int n = action_size(i, head);
            actions[e * NUM_AGENTS * ACTION_HEADS + k] = n > 0 ? rng.below(i, head, n) : 0;
#endif
        }
    }
}
