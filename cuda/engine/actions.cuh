// SPDX-License-Identifier: Apache-2.0
// Validation of actions, and uniform random actions.
#pragma once
#include "game_api.cuh"

// Bits of an environment's fault word; class Fault of gpu_vecenv/engine/vec_env.py has the same values.
enum Fault : i32 {
    INVALID_ACTION = 1,     // a discrete action that does not exist or is masked
    NONFINITE_ACTION = 2,   // NaN; infinite, where the engine does not clip it
    STEPPED_AFTER_END = 4,  // without autoreset: the episode had ended
    NONFINITE = 8,          // with end_on_nonfinite: state, rewards or observations became NaN or infinite
};

// Whether agent i's next action counts. An agent that has died is active until its episode ends, and acts no longer.
HD bool acts(EngineState m, int i) {
#if TRACKS_ACTING
    return m.acting[i];
#else
    return m.active[i];
#endif
}

// The fault bits of the actions of agents that act.
HD int check_actions(EngineState m, const Io& io) {
    int outside = 0, nonfinite = 0;
    FOR_AGENTS (i) {
        if (!acts(m, i)) continue;
        for (int head = 0; head < ACTION_HEADS; ++head) {
            i64 k = (i64)i * ACTION_HEADS + head;
#if BOX_ACTIONS
            float x = ((const float*)io.actions)[k];
            if (action_box::has(i, head)) {
                nonfinite |= CLIP_ACTIONS ? math::is_nan(x) : !math::is_finite(x);
                continue;
            }
#endif
#if DISCRETE_HEADS > 0
#if BOX_ACTIONS
            i64 a = x == math::floor(x) ? math::to_int(x) : -1;
#else
            i64 a = io.int64_actions ? ((const i64*)io.actions)[k] : ((const i32*)io.actions)[k];
#endif
            int n = action_size(i, head);
            outside |= n > 0 && (a < 0 || a >= n);  // a head that the role lacks may have any value
#if ACTION_MASKS
            outside |= n > 0 && a >= 0 && a < n && !m.action_mask[i][logit_offset(head) + a];
#endif
#endif
        }
    }
    int fault = group_any(outside) ? INVALID_ACTION : 0;
    return BOX_ACTIONS && group_any(nonfinite) ? fault | NONFINITE_ACTION : fault;
}

// A uniform choice among the allowed ones, 0 where there is none or where the role lacks this head.
#if DISCRETE_HEADS > 0
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

// A uniform value between the bounds of a Box, or a uniform choice.
HD Action random_action([[maybe_unused]] EngineState m, Rng rng, int i, int head) {
#if BOX_ACTIONS
    if (action_box::has(i, head)) {
        float low = action_box::low(i, head), high = action_box::high(i, head);
        float u = rng.uniform(i, head), width = high - low;
        // In halves where the width overflows.
        float value =
            math::is_finite(width) ? math::fma(u, width, low) : 2 * math::fma(u, 0.5f * high - 0.5f * low, 0.5f * low);
        return math::clamp(value, low, high);
    }
#endif
#if DISCRETE_HEADS > 0
    return (Action)random_choice(m, rng, i, head);
#else
    return 0;
#endif
}
