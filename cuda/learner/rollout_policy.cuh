// SPDX-License-Identifier: Apache-2.0
// One policy of a rollout: its network, for the rows of its agents. Compiled once for each policy, in a namespace of
// its own in place of `perceptron`; POLICY_TENSORS are its arguments of the kernel.
//
// The results of a block's environments lie one after the other, each as rows of its agents. Up to a warp's agents, the
// threads that compute rows of the networks, a warp or the block, have whole environments and compute their rows at
// once. Of larger environments a group of several warps has one: its warps take turns at the tiles of its rows, those
// of one policy after those of the other.
#pragma once
#include "perceptron.cuh"

namespace perceptron {

struct PolicyTensors {
    const float* parameters;
    const double *obs_mean, *obs_var, *return_mean, *return_var;
};

#if HAS_RANGES
// Tensors of several networks of one shape: those of the first, and from one to the next elements of the parameters and
// of the statistics.
struct StackedTensors {
    PolicyTensors first;
    i64 stride, statistics_stride;

    HD const double* statistics(const double* of_first, i64 number) const {
        return of_first ? of_first + number * statistics_stride : nullptr;
    }
    HD PolicyTensors of(i64 number) const {
        return {first.parameters + number * stride, statistics(first.obs_mean, number),
                statistics(first.obs_var, number), statistics(first.return_mean, number),
                statistics(first.return_var, number)};
    }
};
// Of each range. Where an opponent does not play the policy, its own agents do.
struct OpponentTensors {
    StackedTensors ranges;
    const bool* plays;
};
// Of a population, whose members take turns: each acts in so many ranges, then the next.
struct MemberTensors {
    StackedTensors members;
    int count, ranges_each;
};
#endif

struct RolloutPolicy {
    static constexpr bool BY_GROUPS = THREADS_PER_ENV > 32;
    static constexpr int BLOCK_ROWS = RESULT_ROWS, BLOCK = THREADS, BLOCKS = MIN_BLOCKS;
    static constexpr int ROWS_OF_OWNERS = BY_GROUPS ? RESULT_ROWS / ENVS_PER_BLOCK : OWNED_ROWS;
    static constexpr int NUM_OWNERS = BY_GROUPS ? THREADS_PER_ENV : OWNERS;
    static constexpr int GROUP_WARPS = BY_GROUPS ? THREADS_PER_ENV / 32 : 1;
    static constexpr int PASSES = ROWS_OF_OWNERS / OWNED_ROWS;  // each by one of the group's warps
    static constexpr bool HAS_CHOICES = perceptron::HAS_CHOICES;
    // With two trunks the critic is computed after the rollout, for all steps at once.
    static constexpr bool HAS_VALUES = TOWERS == 1;
    static_assert(PARAMETERS <= PARAMETERS_PER_AGENT && OBS_INPUTS <= OBS_SIZE, "a policy of this game");
    static_assert(PASSES * OWNED_ROWS == ROWS_OF_OWNERS && (!BY_GROUPS || OWNER_WARPS == 1), "tiles of a warp's own");

    ReturnScale scale;

    HD static int owner() { return BY_GROUPS ? thread_rank() : perceptron::owner(); }
    // Of the results of the owners' environments.
    HD static int first_owned_row() {
        return BY_GROUPS ? group_of_block() * ROWS_OF_OWNERS : perceptron::first_owned_row();
    }
    HD static void sync_owners() {
        if constexpr (BY_GROUPS)
            group_sync();
        else
            perceptron::sync_owners();
    }
    HD static bool has(int agent) { return position_of(agent) >= 0 && position_of(agent) < OWN_AGENTS; }
    // Parameters of the distribution of an agent in the k-th environment of this thread's owners.
    HD static float* parameters_of(int k, int agent) {
        return result_row(first_owned_row() + k * OWN_AGENTS + position_of(agent));
    }
    // Index of the agent of a row, from the first agent of the owners' environments on.
    HD static int agent_of(int row) { return row / OWN_AGENTS * NUM_AGENTS + own_agent(row % OWN_AGENTS); }

    // In a range of environments with an opponent or members of populations; -1: in none.
    HD void begin(const rollout_Arguments& args, [[maybe_unused]] int range) {
        PolicyTensors own = {POLICY_TENSORS};
#if HAS_OPPONENTS
        const OpponentTensors opponents = {POLICY_OPPONENTS};
        if (range >= 0 && opponents.plays[range]) own = opponents.ranges.of(range);
#elif HAS_POPULATIONS
        const MemberTensors population = {{own, POLICY_MEMBER_STRIDES}, POLICY_MEMBERS};
        own = population.members.of(range / population.ranges_each % population.count);
#endif
        load_parameters(own.parameters, 0, own.obs_mean, own.obs_var);
        scale = ReturnScale::of(own.return_mean, own.return_var);
    }

    // Results and values of the owners' environments, whose observations and values are given, agent after agent.
    HD void forward(const ::Observation* obs, int envs, float* values) const {
        int first_pass = BY_GROUPS ? (thread_rank() / 32 + GROUP_WARPS - FIRST_PASS % GROUP_WARPS) % GROUP_WARPS : 0;
        _Pragma("unroll 1") for (int pass = first_pass; pass < PASSES; pass += GROUP_WARPS) {
            forward_rows(obs, envs, pass * OWNED_ROWS);
            int row = pass * OWNED_ROWS + perceptron::owner();
            if (HAS_VALUES && perceptron::owner() < OWNED_ROWS && row < envs * OWN_AGENTS)
                values[agent_of(row)] = scale.value(result_row(first_owned_row() + row)[PARAMETERS]);
            __syncwarp();  // instructions of the next tile are those of whole warps
        }
    }
    // Those of OWNED_ROWS rows, counted in the owners' from `first` on.
    HD static void forward_rows(const ::Observation* obs, int envs, int first) {
        first += first_row() - perceptron::first_owned_row();  // the warp's rows
        ObsInputs inputs;
        UNROLL for (int m = 0; m < ROW_TILES; ++m) {
            UNROLL for (int half = 0; half < 2; ++half) {
                int row = first + 16 * m + group() + 8 * half;
                inputs.row[m][half] = row < envs * OWN_AGENTS ? obs + (i64)agent_of(row) * OBS_SIZE : nullptr;
                inputs.agent[m][half] = row % OWN_AGENTS;
            }
        }
        forward_from<0>(0, first_owned_row() + first, inputs);
    }
};

}  // namespace perceptron
