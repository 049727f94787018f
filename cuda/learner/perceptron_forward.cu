// SPDX-License-Identifier: Apache-2.0
// The forward pass of the default network for the observations of one step, of all environments or of several ranges of
// them, each with weights of its own. Compiled with the constants of a game's declaration and of a network.
#include "perceptron.cuh"

namespace perceptron {  // a game's constants may have the same names

// Parameters of the distributions of OWN_AGENTS agents of each environment, and their values.
// The forward pass is that of perceptron_gradients.cu: its bits do not depend on the rows beside a row.
HD void forward_rows(const perceptron_forward_Arguments& args) {
    int first_tower = args.outputs ? 0 : TOWERS - 1;        // without outputs, only values
    int towers = (args.values ? TOWERS : 1) - first_tower;  // without values, only outputs
    int tower = first_tower + blockIdx.x % towers;
    // Numbers of blocks are divided in 32 bits, which is faster.
    const int blocks = gridDim.x / towers / args.num_ranges, block = blockIdx.x / towers;
    const i64 range = args.ranges[block / blocks], statistics = range * args.statistics_stride;
    load_parameters(args.parameters + range * args.range_stride, tower, args.obs_mean, args.obs_var, statistics);
    const ReturnScale scale = ReturnScale::of(args.return_mean, args.return_var, statistics);
    i64 before = range * (args.rows / OWN_AGENTS) * NUM_AGENTS;  // agents of the ranges before it
    int row = first_owned_row() + owner();
    bool has_row = owner() < OWNED_ROWS;
    __syncthreads();
    for (i64 first = (i64)(block % blocks) * ROWS; first < args.rows; first += (i64)blocks * ROWS) {
        i64 k = first + row, index = before + k / OWN_AGENTS * NUM_AGENTS + args.agents[(u64)k % OWN_AGENTS];
        sync_owners();  // the previous tile has been read
        if (has_row) indices()[row] = k < args.rows ? index : -1;
        sync_owners();
        load_obs((const Observation*)args.obs, args.obs_stride);
        sync_owners();
        forward_layers<0>(tower);
        if (has_actor(tower) && args.outputs) {
            for (int k = owner(); k < OWNED_ROWS * PARAMETERS; k += OWNERS) {
                int own = first_owned_row() + k / PARAMETERS, column = args.columns[k % PARAMETERS];
                i64 at = indices()[own];
                if (at < 0) continue;
                bool forbidden = args.action_mask && !args.action_mask[at * args.choices + column];
                args.outputs[at * PARAMETERS_PER_AGENT + column] =
                    forbidden ? args.masked_logit : result_row(own)[k % PARAMETERS];
            }
        }
        if (has_value(tower) && args.values && has_row && k < args.rows)
            args.values[index] = scale.value(result_row(row)[PARAMETERS]);
    }
}

}  // namespace perceptron

KERNEL_WITH_LAUNCH_BOUNDS(perceptron_forward, perceptron::THREADS, perceptron::MIN_BLOCKS) {
    perceptron::forward_rows(args);
}
