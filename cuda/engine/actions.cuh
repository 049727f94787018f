// SPDX-License-Identifier: Apache-2.0
// What the engine does with actions: it refuses those outside their space, and draws random ones inside.
#pragma once
#include "game_api.cuh"

// Bits of an environment's fault word; gpu_vecenv/engine/vec_env.py names them too.
enum Fault : i32 {
    INVALID_ACTION = 1,     // a discrete action, or a continuous one, outside its space
    NONFINITE_ACTION = 2,   // NaN or infinite
    STEPPED_AFTER_END = 4,  // without autoreset: the episode had ended
    NONFINITE = 8,          // with end_on_nonfinite: state, rewards or observations became NaN or infinite
};

HD int check_actions(EngineState m, const Io& io) {
    int outside = 0, nonfinite = 0;
    FOR_AGENTS (i) {
        if (!m.active[i]) continue;
        for (int head = 0; head < ACTION_HEADS; ++head) {
            i64 k = (i64)i * ACTION_HEADS + head;
#if BOX_ACTIONS
            float a = ((const float*)io.actions)[k];
            nonfinite |= !math::is_finite(a);
            outside |= math::is_finite(a) && !(a >= ACTION_LOW[head] && a <= ACTION_HIGH[head]);
#else
            i64 a = io.int64_actions ? ((const i64*)io.actions)[k] : ((const i32*)io.actions)[k];
            int n = action_size(i, head);
            outside |= n > 0 && (a < 0 || a >= n);  // a head that this role lacks may hold anything
#if ACTION_MASKS
            outside |= n > 0 && a >= 0 && a < n && !m.action_mask[i][logit_offset(head) + a];
#endif
#endif
        }
    }
    int fault = group_any(outside) ? INVALID_ACTION : 0;
    return BOX_ACTIONS && group_any(nonfinite) ? fault | NONFINITE_ACTION : fault;
}

#if !BOX_ACTIONS
// A uniform choice among those that are allowed; 0 where there is none, or no such head.
HD int random_choice([[maybe_unused]] EngineState m, Rng rng, int i, int head) {
    int n = action_size(i, head);
#if ACTION_MASKS
    const bool* allowed = m.action_mask[i] + logit_offset(head);
    int count = 0;
    for (int k = 0; k < n; ++k) count += allowed[k];
    int rank = count > 0 ? rng.below(i, head, count) : n;
    for (int k = 0; k < n; ++k)
        if (allowed[k] && rank-- == 0) return k;
    return 0;
#else
    return n > 0 ? rng.below(i, head, n) : 0;
#endif
}
#endif
