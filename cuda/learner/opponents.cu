// SPDX-License-Identifier: Apache-2.0
// Results of the episodes against opponents that ended in a rollout.
#include "kernel.cuh"

// For each environment from `first_env` on: the wins of the side that learns, draws and games. `sums` are the rewards
// of both sides in the episode so far. Mean returns are compared as products with the numbers of agents, without
// rounding of quotients. An episode has ended where agents were active and none is in the next row. One whose sums are
// NaN has no result.
KERNEL(opponent_results) {
    FOR_ITEMS (env, args.num_envs) {
        i64 first = (args.first_env + env) * args.agents, step = args.all_envs * args.agents;
        i64 counts[3] = {}, learners = 0;
        double own = args.sums[2 * env], others = args.sums[2 * env + 1];
        for (i64 agent = 0; agent < args.agents; ++agent) learners += args.learns[first + agent];
        for (i64 t = 0; t < args.num_steps; ++t) {
            i64 row = t * step + first;
            bool was_active = false, is_active = false;
            for (i64 agent = 0; agent < args.agents; ++agent) {
                i64 at = row + agent;
                was_active |= args.active[at];
                is_active |= args.active[at + step];
                double reward = args.active[at] ? (double)args.rewards[at] : 0.0;
                bool learns = args.learns[first + agent];
                own += learns ? reward : 0.0;
                others += learns ? 0.0 : reward;
            }
            if (!was_active || is_active) continue;
            double difference = own * (double)(args.agents - learners) - others * (double)learners;
            counts[0] += difference > 0;
            counts[1] += difference == 0;
            counts[2] += difference <= 0 || difference > 0;
            own = others = 0;
        }
        args.sums[2 * env] = own;
        args.sums[2 * env + 1] = others;
        for (int k = 0; k < 3; ++k) args.counts[3 * env + k] = counts[k];
    }
}
