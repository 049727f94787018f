// SPDX-License-Identifier: Apache-2.0
// One policy of a rollout: its network, for the rows of its agents. Compiled once for each policy, in a namespace of
// its own in place of `perceptron`; POLICY_TENSORS are its arguments of the kernel.
#pragma once
#include "return_scale.cuh"

namespace perceptron {

struct PolicyTensors {
    const float* parameters;
    const double *obs_mean, *obs_var, *return_mean, *return_var;
};

struct RolloutPolicy {
    static constexpr int BLOCK_ROWS = ROWS, ROWS_OF_OWNERS = OWNED_ROWS, NUM_OWNERS = OWNERS;
    static constexpr int BLOCK = THREADS, BLOCKS = MIN_BLOCKS;
    static constexpr bool IS_GAUSSIAN = LOG_STDS > 0;
    // With two trunks the critic is computed after the rollout, for all steps at once.
    static constexpr bool HAS_VALUES = TOWERS == 1;
    static_assert(PARAMETERS <= PARAMETERS_PER_AGENT && layer_inputs(0) <= OBS_SIZE, "a policy of this game");

    ReturnScale scale;

    HD static int owner() { return perceptron::owner(); }
    HD static int first_owned_row() { return perceptron::first_owned_row(); }
    HD static void sync_owners() { perceptron::sync_owners(); }
    HD static bool has(int agent) { return agent >= FIRST_OWN_AGENT && agent < FIRST_OWN_AGENT + OWN_AGENTS; }
    // Parameters of the distribution of an agent in the k-th environment of this thread's owners.
    HD static float* parameters_of(int k, int agent) {
        return result_row(first_owned_row() + k * OWN_AGENTS + agent - FIRST_OWN_AGENT);
    }
    // Index of the agent of a row, from the first agent of the owners' environments on.
    HD static int agent_of(int row) { return row / OWN_AGENTS * NUM_AGENTS + FIRST_OWN_AGENT + row % OWN_AGENTS; }

    // Weights, and the rows of the owners' environments.
    HD void begin(const rollout_Arguments& args, int envs) {
        const PolicyTensors own = {POLICY_TENSORS};
        load_parameters(own.parameters, 0, own.obs_mean, own.obs_var);
        scale = ReturnScale::of(own.return_mean, own.return_var);
        for (int row = owner(); row < OWNED_ROWS; row += OWNERS)
            indices()[first_owned_row() + row] = row < envs * OWN_AGENTS ? agent_of(row) : -1;
    }
    // Observations of the owners' environments, one agent after the other.
    HD static void load_obs(const ::Observation* obs) { perceptron::load_obs(obs, OBS_SIZE); }
    HD static void forward() { forward_layers<0>(0); }
    HD void store_values(int envs, float* values) const {
        if (owner() < envs * OWN_AGENTS)
            values[agent_of(owner())] = scale.value(result_row(first_owned_row() + owner())[PARAMETERS]);
    }
};

}  // namespace perceptron
