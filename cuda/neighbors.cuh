// SPDX-License-Identifier: Apache-2.0
// The K nearest of the agents offered, kept in registers, nearest first; equal distances in the order of offering.
#pragma once
#include "kernel.cuh"
#include "math.cuh"

template <int K>
struct Nearest {
    float distance[K];  // any measure that orders like the distance
    int id[K];          // -1 where fewer than K were offered

    HD void clear() {
        UNROLL for (int k = 0; k < K; ++k) {
            distance[k] = math::from_bits(0x7f800000u);  // infinity: nothing offered is farther
            id[k] = -1;
        }
    }

    HD void offer(float d, int j) {
        if (!(d < distance[K - 1])) return;
        UNROLL for (int k = K - 1; k >= 0; --k) {
            bool after_previous = k > 0 && d < distance[k > 0 ? k - 1 : 0];
            bool here = !after_previous && d < distance[k];
            distance[k] = after_previous ? distance[k > 0 ? k - 1 : 0] : here ? d : distance[k];
            id[k] = after_previous ? id[k > 0 ? k - 1 : 0] : here ? j : id[k];
        }
    }
};
