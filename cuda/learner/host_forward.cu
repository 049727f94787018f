// SPDX-License-Identifier: Apache-2.0
// perceptron_forward.cu for a CPU.
#include "host_perceptron.cuh"

namespace perceptron {

// Of agent k among the OWN_AGENTS agents of a range's environments.
HD i64 index_of(const perceptron_forward_Arguments& args, i64 range, i64 k) {
    return (range * (args.rows / OWN_AGENTS) + k / OWN_AGENTS) * NUM_AGENTS + args.agents[(u64)k % OWN_AGENTS];
}

static void write_outputs(const perceptron_forward_Arguments& args, const float* parameters, const float* x,
                          i64 index) {
    for (int k = 0; k < PARAMETERS; ++k) {
        int column = args.columns[k];
        bool forbidden = args.action_mask && !args.action_mask[index * args.choices + column];
        float own = k < ACTOR_OUTPUTS ? x[k] : parameters[LOG_STD_INDEX + k - ACTOR_OUTPUTS];
        args.outputs[index * PARAMETERS_PER_AGENT + column] = forbidden ? args.masked_logit : own;
    }
}

}  // namespace perceptron

KERNEL(perceptron_forward) {
    using namespace perceptron;
    auto& layers = memory_of<Layers<0>>(args.scratch, worker_);
    const i64 tiles = (args.rows + TILE - 1) / TILE;
    int first_tower = args.outputs ? 0 : TOWERS - 1;        // without outputs, only values
    int towers = (args.values ? TOWERS : 1) - first_tower;  // without values, only outputs
    i64 loaded = -1;
    FOR_ITEMS (item, tiles * towers * args.num_ranges) {
        i64 range = args.ranges[item / (tiles * towers)], statistics = range * args.statistics_stride;
        int tower = first_tower + (int)(item / tiles % towers);
        const float* parameters = args.parameters + range * args.range_stride;
        const ObsScale obs_scale(args.obs_mean, args.obs_var, statistics);
        const ReturnScale return_scale = ReturnScale::of(args.return_mean, args.return_var, statistics);
        if (range * TOWERS + tower != loaded) layers.load(parameters, tower);
        loaded = range * TOWERS + tower;
        i64 first = item % tiles * TILE;
        int rows = (int)(args.rows - first < TILE ? args.rows - first : TILE);
        for (int row = 0; row < rows; ++row)
            obs_scale.copy((const Observation*)args.obs + index_of(args, range, first + row) * args.obs_stride,
                           (int)((first + row) % OWN_AGENTS), layers.inputs[row]);
        layers.forward(padded(rows));
        const auto& results = static_cast<Layers<HIDDEN + 1>&>(layers).inputs;
        for (int row = 0; row < rows; ++row) {
            i64 index = index_of(args, range, first + row);
            if (has_actor(tower) && args.outputs) write_outputs(args, parameters, results[row], index);
            if (has_value(tower) && args.values)
                args.values[index] = return_scale.value(results[row][value_output(tower)]);
        }
    }
}
