// SPDX-License-Identifier: Apache-2.0
// The learning rate that follows approx_kl. The reference in torch is `adapted_rate` in gpu_vecenv/train/ppo.py.
#pragma once
#include "math.cuh"

// A minibatch's rate from that of the one before. A negative desired_kl leaves it as it is. NaN changes nothing.
HD float adapted_rate(float rate, float kl, float desired_kl, float least, float most) {
    if (desired_kl < 0) return rate;
    if (kl > 2.0f * desired_kl) return math::max(rate / 1.5f, least);
    if (kl > 0 && kl < 0.5f * desired_kl) return math::min(rate * 1.5f, most);
    return rate;
}
