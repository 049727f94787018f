// SPDX-License-Identifier: Apache-2.0
// What kernels compute from the statistics of Normalizer, gpu_vecenv/train/normalizers.py.
#pragma once
#include "kernel.cuh"

HD float standard_deviation(double variance) {
#if defined(__CUDACC__)
    return (float)__dsqrt_rn(variance + 1e-8);
#else
    return (float)__builtin_sqrt(variance + 1e-8);
#endif
}

// From the network's values, deviations in units of a standard deviation, to returns. Statistics are at an index.
template <bool NORMALIZED>
struct ReturnScaleIf {
    float scale, mean;

    HD static ReturnScaleIf of([[maybe_unused]] const double* return_mean, [[maybe_unused]] const double* return_var,
                               [[maybe_unused]] i64 at = 0) {
        if constexpr (NORMALIZED)
            return {standard_deviation(return_var[at]), (float)return_mean[at]};
        else
            return {1.0f, 0.0f};
    }
    HD float value(float x) const { return NORMALIZED ? x * scale + mean : x; }
};
