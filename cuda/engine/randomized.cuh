// SPDX-License-Identifier: Apache-2.0
// Randomised parameters: constants of a game that differ between environments. The game's source uses them by name,
// also in functions without access to the state, so that the values of the environment that a group of threads works on
// are kept beside its state: in shared memory on the GPU, in variables of the thread on the host. Generated before the
// game's source are begin(), use() and macros with the parameters' names. A game that is not randomised has none of it.
#pragma once
#include "game_api.cuh"

namespace randomized {

#if defined(RANDOMIZED)

// Derived constants are computed in double, as Python does, and rounded to float.
HD double abs(double x) { return x <= 0 ? 0 - x : x; }
#if defined(__CUDACC__)
HD double sqrt(double x) { return __dsqrt_rn(x); }
#else
HD double sqrt(double x) { return __builtin_sqrt(x); }
#endif

// Uniform in [low, high); low if they are equal. The range has the largest float below `high` too. It is in memory,
// where a curriculum changes it.
HD float drawn(Rng rng, int draw, const float* range) {
    float low = range[0], high = range[1], last = range[2];
    return low < high ? math::min(last, low + rng.uniform(draw, 0) * (high - low)) : low;
}

#if defined(__CUDACC__)
#define RANDOMIZED_PARAMETER(name)               \
    HD float& stored_##name() {                  \
        __shared__ float values[ENVS_PER_BLOCK]; \
        return values[group_of_block()];         \
    }                                            \
    HD float value_##name() { return stored_##name(); }
#else
#define RANDOMIZED_PARAMETER(name)                   \
    static thread_local float own_##name;            \
    HD float& stored_##name() { return own_##name; } \
    HD float value_##name() { return own_##name; }
#endif

#else

constexpr int NUM_PARAMETERS = 0;
HD void use(State) {}                      // makes the values in the state those that the game's source reads
HD void begin(EngineState, State, Rng) {}  // draws the values of a new episode, and uses them

#endif

}  // namespace randomized
