// SPDX-License-Identifier: Apache-2.0
// What a tick tells of a replica: its rows of the output tensors, and whether there is sense in them.
#pragma once
#include "actions.cuh"

// Rows of one replica in the tensors that a tick writes, those that debug builds leave between replicas included.
constexpr i64 OUTPUT_ROWS = NUM_AGENTS + GUARD_ROWS;

HD Rng rng_of(Machine m, u32 stream, i64 episode, int step) {
    return {(u32)m.key[0], (u32)m.key[1], stream, (u32)episode, (u32)step};
}

HD bool none_active(Machine m) {
    bool any = false;
    FOR_AGENTS (i) any |= m.active[i];
    return !team_any(any);
}

// What the agents see of the state as it is: their rows of the observation tensor, where what a smaller role lacks is
// 0, and the choices they have.
HD void observe_rows(Machine m, State s, Io io, Observation* rows) {
    io.obs = (Observation(*)[OBS_SIZE])rows;
#if ACTION_MASKS
    io.action_mask = m.action_mask;
#endif
    observe(s, io);
    if (OBS_PADDED || ACTION_MASKS) team_sync();
    if (OBS_PADDED)
        FOR_OBS (i, k)
            if (!observed(i, k)) io.obs[i][k] = 0;
#if ACTION_MASKS
    FOR_AGENTS (i)
        for (int head = 0; head < ACTION_HEADS; ++head)
            for (int k = logit_offset(head); k < logit_offset(head + 1); ++k) {
                if (!m.active[i]) io.action_mask[i][k] = true;  // its choice does not matter
                if (k - logit_offset(head) >= action_size(i, head)) io.action_mask[i][k] = false;
            }
    team_sync();
#endif
}

// Where agents are rows, the row of one that has left (`stays[i]` false) is 0 as long as its replica goes on.
HD void blank_rows(Machine m, i32 rows, const bool* stays, Observation* obs) {
    if (NUM_AGENTS == 1 || !rows) return;
    bool left = false;
    FOR_AGENTS (i) left |= !stays[i];
    if (!team_any(left) || none_active(m)) return;
    team_sync();
    FOR_OBS (i, k)
        if (!stays[i]) obs[i * OBS_SIZE + k] = 0;
}

// Copies of what the machine keeps, in the tensors of a tick.
HD void report(Machine m, i64 e, bool* active, [[maybe_unused]] bool* action_mask) {
    FOR_AGENTS (i) active[e * OUTPUT_ROWS + i] = m.active[i];
#if ACTION_MASKS
    const int n = NUM_AGENTS * NUM_LOGITS;
    FOR_RANGE (k, n) action_mask[e * OUTPUT_ROWS * NUM_LOGITS + k] = ((const bool*)m.action_mask)[k];
#endif
}

// With quarantine: a replica in which something became NaN or infinite ends with this tick, alone and marked. Its state
// is that of a new episode at once, so that nothing of it is left to spread.
HD bool quarantined(Machine m, State s, Io io, Observation* seen) {
    bool bad = !is_finite(s);
    FOR_AGENTS (i) bad |= m.active[i] && !math::is_finite(io.rewards[i]);
    if (!team_any(bad)) {
        observe_rows(m, s, io, seen);
        team_sync();
        FOR_OBS (i, k) bad |= !math::is_finite(seen[i * OBS_SIZE + k]);
    }
    if (!team_any(bad)) return false;
    team_sync();
    FOR_AGENTS (i) {
        io.rewards[i] = 0;
        io.terminations[i] = m.active[i];
        io.truncations[i] = false;
    }
    ONCE m
        .fault[0] |= NON_FINITE;
    io.rng = rng_of(m, RESET_STREAM, m.episode[0] + 1, 0);
    io.time = 0;
    reset(s, io);
    team_sync();
    return true;
}
