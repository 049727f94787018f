// SPDX-License-Identifier: Apache-2.0
// Beta distributions whose alpha and beta are at least 1: draws, log-densities, entropies and their gradients. Chou,
// Maturana, Scherer, "Improving stochastic policy gradients in continuous control with deep reinforcement learning
// using the Beta distribution", ICML 2017. The reference in torch is in gpu_vecenv/train/distributions.py.
#pragma once
#include "math.cuh"
#include "rng.cuh"

namespace sampling {

// The functions of Gamma(z), z >= 1, after the leading terms of their asymptotic series, which cancel in those of a
// Beta distribution and are left out: sums keep their precision where alpha and beta are large. Each remainder, divided
// by its leading power of w = 1 / z, is a polynomial in w; relative errors are below 2^-23. The coefficients are fitted
// as those of math.cuh.
struct GammaTerms {
    float w;

    HD static GammaTerms of(float z) { return {1.0f / z}; }

    // log Gamma(z) - ((z - 1/2) log z - z + log(2 pi) / 2)
    HD float log_gamma() const {
        float p = math::fma(math::fma(1.30952190e-4f, w, -6.11821015e-4f), w, 1.02514459e-3f);
        p = math::fma(math::fma(p, w, -4.06108702e-5f), w, -2.77564512e-3f);
        return w * math::fma(math::fma(p, w, 1.14223170e-7f), w, 8.33333284e-2f);
    }
    // log z - psi(z), where psi is the derivative of log Gamma
    HD float digamma() const {
        float p = math::fma(math::fma(-3.77476594e-4f, w, 2.22346303e-3f), w, -5.45207039e-3f);
        p = math::fma(math::fma(math::fma(p, w, 6.33855769e-3f), w, -5.94785146e-4f), w, -8.24973732e-3f);
        return w * math::fma(math::fma(math::fma(p, w, -5.75737567e-6f), w, 8.33334699e-2f), w, 0.5f);
    }
    // (psi'(z) - w) / w^2
    HD float trigamma() const {
        float p = math::fma(math::fma(-3.41115776e-3f, w, 1.77964140e-2f), w, -3.80997322e-2f);
        p = math::fma(math::fma(math::fma(p, w, 3.79076675e-2f), w, -2.88286828e-3f), w, -3.30306590e-2f);
        return math::fma(math::fma(math::fma(p, w, -1.22776646e-5f), w, 1.66666672e-1f), w, 0.5f);
    }
};

// log(1 + exp(x)); the absolute error is below 2^-23 for x <= 1, and the relative one beyond.
HD float softplus(float x) { return math::max(0.0f, x) + math::log(1.0f + math::exp(-math::abs(x))); }

struct Beta {
    // Draws are inside (0, 1), so that both logarithms are finite.
    static constexpr float LEAST = 0x1p-126f, MOST = 1.0f - 0x1p-24f;
    static constexpr u32 ATTEMPTS = 64;  // of a Gamma draw; each is rejected with a probability below 0.05

    float a, b;  // alpha - 1 and beta - 1: zero or more
    GammaTerms of_alpha, of_beta, of_sum;
    float log_alpha, log_beta, log_sum;  // of alpha / (alpha + beta), beta / (alpha + beta), alpha + beta

    // From a network's outputs: alpha = 1 + softplus(x), beta = 1 + softplus(y).
    HD static Beta of(float x, float y) {
        float a = softplus(x), b = softplus(y), alpha = 1.0f + a, beta = 1.0f + b, sum = alpha + beta;
        return {a,
                b,
                GammaTerms::of(alpha),
                GammaTerms::of(beta),
                GammaTerms::of(sum),
                math::log(alpha / sum),
                math::log(beta / sum),
                math::log(sum)};
    }

    HD bool is_finite() const { return math::is_finite(2.0f + a + b); }
    HD float mean() const { return inside((1.0f + a) / (2.0f + a + b)); }
    HD static float inside(float u) { return math::clamp(u, LEAST, MOST); }

    // log B(alpha, beta) - (alpha - 1) log(alpha / (alpha + beta)) - (beta - 1) log(beta / (alpha + beta))
    HD float log_norm() const {
        return 0.5f * (log_alpha + log_beta) - 0.5f * log_sum + 0.9189385f +  // log(2 pi) / 2
               (of_alpha.log_gamma() + of_beta.log_gamma() - of_sum.log_gamma());
    }
    HD float log_prob(float u) const {
        return a * (math::log(u) - log_alpha) + b * (math::log(1.0f - u) - log_beta) - log_norm();
    }
    HD float entropy() const {
        return log_norm() + a * of_alpha.digamma() + b * of_beta.digamma() - (a + b) * of_sum.digamma();
    }

    // Derivatives of log-probability and entropy, times these numbers, with respect to x and y of `of`.
    struct Gradients {
        float by_x, by_y;
    };
    HD Gradients gradients(float x, float y, float u, float by_log_prob, float by_entropy) const {
        float of_both = of_sum.w * math::fma(-2.0f, of_sum.w, 1.0f) * of_sum.trigamma() - 2.0f * of_sum.w;
        float by_alpha = by_log_prob * (math::log(u) - log_alpha + of_alpha.digamma() - of_sum.digamma()) +
                         by_entropy * (entropy_slope(of_alpha) + of_both);
        float by_beta = by_log_prob * (math::log(1.0f - u) - log_beta + of_beta.digamma() - of_sum.digamma()) +
                        by_entropy * (entropy_slope(of_beta) + of_both);
        return {by_alpha * sigmoid(x), by_beta * sigmoid(y)};
    }

    // A draw: Gamma(alpha) / (Gamma(alpha) + Gamma(beta)). `element` counts the numbers of the agent's action.
    HD float draw(Rng rng, int agent, int element) const {
        float x = gamma_draw(rng, agent, 2 * element, 1.0f + a), y = gamma_draw(rng, agent, 2 * element + 1, 1.0f + b);
        return inside(x / (x + y));
    }

  private:
    // 1 - (z - 1) psi'(z)
    HD static float entropy_slope(GammaTerms terms) { return terms.w - terms.w * (1.0f - terms.w) * terms.trigamma(); }
    HD static float sigmoid(float x) { return 1.0f / (1.0f + math::exp(-x)); }

    // Marsaglia, Tsang, "A simple method for generating gamma variables", 2000. After ATTEMPTS rejections, which have a
    // probability below 1e-83, it is the mode of the transformed density.
    HD static float gamma_draw(Rng rng, int agent, int number, float shape) {
        float d = shape - 0x1.555556p-2f, c = 1.0f / math::sqrt(9.0f * d);  // 1/3
        for (u32 attempt = 0; attempt < ATTEMPTS; ++attempt) {
            NormalAndUniform random = rng.normal_and_uniform(agent, number * ATTEMPTS + attempt);
            float t = math::fma(c, random.normal, 1.0f), v = t * t * t, square = random.normal * random.normal;
            if (t <= 0) continue;
            // The first condition implies the second.
            if (random.uniform < 1.0f - 0.0331f * square * square ||
                math::log(random.uniform) < 0.5f * square + d * (1.0f - v + math::log(v)))
                return d * v;
        }
        return d;
    }
};

}  // namespace sampling
