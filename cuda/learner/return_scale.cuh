// SPDX-License-Identifier: Apache-2.0
// From the network's values, deviations in units of a standard deviation, to returns.
#pragma once
#include "perceptron.cuh"

namespace perceptron {

struct ReturnScale {
    float scale, mean;

    HD static ReturnScale of([[maybe_unused]] const double* return_mean, [[maybe_unused]] const double* return_var,
                             [[maybe_unused]] i64 at = 0) {
        if constexpr (NORMALIZE_RETURNS)
            return {standard_deviation(return_var[at]), (float)return_mean[at]};
        else
            return {1.0f, 0.0f};
    }
    HD float value(float x) const { return NORMALIZE_RETURNS ? x * scale + mean : x; }
};

}  // namespace perceptron
