"""Beta distributions: draws, densities and entropies of the sampler, and the functions of beta.cuh, against scipy."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from games.painter import Painter
from games.script import Script
from support.bitwise import equal_bits
from support.kernels import signature, unpack

import gpu_vecenv
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.errors import ConfigError

EPSILON = 2.0**-23  # an ulp of a float32 in [1, 2)
# A fair sampler's Kolmogorov-Smirnov test gives a smaller p-value with this probability; the seeds were not chosen.
P_VALUE = 1e-6
NUM_ENVS = 2**15
# x and y: both alpha and beta 1; near 1; one mode; far from symmetric; large.
PARAMETERS = [(-200.0, -200.0), (-3.0, -1.0), (0.0, 0.0), (3.0, -2.0), (-2.0, 5.0), (50.0, 20.0), (3000.0, 900.0)]


def of_outputs(x, y):
    """alpha and beta in float64."""
    return 1 + np.logaddexp(0, x), 1 + np.logaddexp(0, y)


def sampled(rows, device="cpu", seed=1, **options):
    """A sample of Pendulum's one number for each row (n, 2)."""
    env = gpu_vecenv.make("pendulum", len(rows), device)
    env.reset(seed=seed)
    return Sampler(env, "beta").sample(torch.as_tensor(rows, device=device).float()[:, None].contiguous(), **options)


@pytest.mark.parametrize(("x", "y"), PARAMETERS)
def test_draws_are_of_the_beta_distribution(x, y, device):
    alpha, beta = of_outputs(x, y)
    exact = scipy.stats.beta(alpha, beta)
    sample = sampled(np.full((NUM_ENVS, 2), (x, y)), device)
    draws = sample.draws.cpu().double().numpy().ravel()
    assert ((draws > 0) & (draws < 1)).all()
    for part in (draws, draws[:1000], draws[1::7]):
        assert scipy.stats.kstest(part, exact.cdf).pvalue > P_VALUE
    # The mean of n draws is normal, and so is their variance, whose own is that of (u - mean)^2.
    mean, variance, kurtosis = (float(m) for m in exact.stats("mvk"))
    limit = scipy.stats.norm.isf(P_VALUE / 2) / np.sqrt(NUM_ENVS)
    assert abs(draws.mean() - mean) < limit * np.sqrt(variance)
    assert abs(((draws - mean) ** 2).mean() - variance) < limit * variance * np.sqrt(kurtosis + 2)
    # Pendulum's torques are in [-2, 2]. Roundings of 2u - 1, of its product and of the clamped sum.
    actions = sample.actions.cpu().double().numpy().ravel()
    assert abs(actions - (-2 + 4 * draws)).max() <= 4 * EPSILON
    again, other = (sampled(np.full((500, 2), (x, y)), device, seed).draws.cpu().numpy().ravel() for seed in (1, 2))
    assert (again == draws[:500].astype(np.float32)).all() and (again != other).mean() > 0.9


def test_elements_agents_and_environments_are_drawn_independently(device):
    """A correlation of n independent pairs is normal with variance 1 / n."""
    env = gpu_vecenv.make("simple_spread", 2**14, device, continuous_actions=True)
    env.reset(seed=3)
    sampler = Sampler(env, "beta")
    draws = sampler.sample(torch.zeros(2**14, env.num_agents, sampler.num_parameters, device=device)).draws
    columns = draws.flatten(1).cpu().double().numpy()
    pairs = np.corrcoef(columns.T)[np.triu_indices(columns.shape[1], 1)]
    after = [np.corrcoef(x[1:], x[:-1])[0, 1] for x in columns.T]
    assert np.abs([*pairs, *after]).max() * 2**7 < scipy.stats.norm.isf(P_VALUE / 2 / len(pairs))


def test_densities_and_entropies_agree_with_scipy(device):
    """Of draws with random parameters, small and large."""
    random = np.random.default_rng(1)
    rows = (random.normal(size=(4000, 2)) * 10 ** random.uniform(-1, 2.5, (4000, 1))).astype(np.float32)
    alpha, beta = of_outputs(*rows.astype(np.float64).T)
    exact = scipy.stats.beta(alpha, beta)
    for greedy in (False, True):
        sample = sampled(rows, device, greedy=greedy)
        u = sample.draws.cpu().double().numpy().ravel()
        if greedy:
            assert abs(u - alpha / (alpha + beta)).max() < 4 * EPSILON
        # alpha - 1 has an error of 1.5 ulp of itself or of 1, and both log u and log(alpha / (alpha + beta)) of an ulp
        # of themselves and, relatively to their argument, of two: (alpha - 1) times these, and likewise of beta; and
        # the difference of the two logarithms times the error of alpha. What remains is of size 10 at most.
        bound = sum(
            (a - 1) * (3 + 2 * abs(np.log(v)) + 2 * abs(np.log(m))) + 3 * np.maximum(a - 1, 1) * abs(np.log(v / m))
            for a, v, m in ((alpha, u, exact.mean()), (beta, 1 - u, 1 - exact.mean()))
        )
        errors = abs(sample.log_probs.cpu().double().numpy().ravel() - exact.logpdf(u))
        assert (errors <= EPSILON * (bound + 20)).all()
        # Of scipy's own sums, which cancel, some digits are lost.
        errors = abs(sample.entropies.cpu().double().numpy().ravel() - exact.entropy())
        assert (errors <= 20 * EPSILON).all()


def test_extreme_parameters_have_finite_densities(device):
    rows = np.array([(x, y) for x in (-1e30, -90.0, 0.0, 90.0, 1e30) for y in (-1e30, -20.0, 3.0, 1e30)])
    for greedy in (False, True):
        sample = sampled(rows, device, greedy=greedy)
        for tensor in (sample.actions, sample.draws, sample.log_probs, sample.entropies):
            assert tensor.isfinite().all()
        assert sample.draws.gt(0).all() and sample.draws.lt(1).all() and sample.actions.abs().max() <= 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_parameters_that_are_not_finite_give_actions_that_the_environment_refuses(bad, device):
    rows = np.zeros((6, 2))
    rows[1, 0] = rows[4, 1] = bad
    sample = sampled(rows, device)
    expected = [False, True, False, False, True, False]
    for tensor in (sample.actions, sample.draws, sample.log_probs, sample.entropies):
        assert tensor.isnan().flatten().tolist() == expected


@pytest.mark.parametrize(("game", "config"), [(Painter, {}), (Script, {"continuous": True, "num_others": 3})])
def test_environments_take_what_is_drawn(game, config, device):
    env = gpu_vecenv.make(game, 50, device, **config)
    env.reset(seed=1)
    sampler = Sampler(env, "beta")
    parameters = torch.zeros(50, env.num_agents, sampler.num_parameters, device=device)
    for _ in range(4):
        sample, _ = sampler.step(parameters)
        assert sample.actions.isfinite().all()
    assert not env.faults().any()


def test_discrete_games_have_no_beta_distribution(device):
    with pytest.raises(ConfigError, match="squash is 'beta', but Cartpole has discrete actions"):
        Sampler(gpu_vecenv.make("cartpole", 2, device), "beta")


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [False, True])
def test_both_devices_are_bitwise_equal(greedy):
    random = np.random.default_rng(5)
    rows = random.normal(size=(20000, 2)) * 10 ** random.uniform(-2, 4, (20000, 1))
    assert equal_bits(*(vars(sampled(rows, device, greedy=greedy)) for device in ("cpu", "cuda")))


def exact_terms(z):
    """What GammaTerms computes, by scipy, from z >= 1; where its differences cancel, by their asymptotic series."""
    w, large = 1 / z, z > 50
    series = {
        "log_gamma": w * (1 / 12 - w**2 / 360 + w**4 / 1260),
        "digamma": w * (1 / 2 + w / 12 - w**3 / 120 + w**5 / 252),
        "trigamma": 1 / 2 + w / 6 - w**3 / 30 + w**5 / 42,
    }
    direct = {
        "log_gamma": scipy.special.gammaln(z) - ((z - 0.5) * np.log(z) - z + 0.5 * np.log(2 * np.pi)),
        "digamma": np.log(z) - scipy.special.digamma(z),
        "trigamma": (scipy.special.polygamma(1, z) - w) / w**2,
    }
    return {name: np.where(large, series[name], direct[name]) for name in series}


def test_terms_of_the_gamma_function_are_within_their_bounds(device):
    """Of each argument between 1 and 2^24 that is a multiple of 2^-10 of a power of two."""
    z = np.ldexp(np.linspace(1, 2, 1024, endpoint=False), np.arange(24)[:, None]).ravel().astype(np.float32)
    names = ("log_gamma", "digamma", "trigamma")
    outputs = ", ".join(f"float* {name}" for name in names)
    declared = signature("terms", f"const float* z, {outputs}, i64 n")
    body = "const auto of = sampling::GammaTerms::of(z[k]);" + "".join(f"{x}[k] = of.{x}();" for x in names)
    source = f'#include "beta.cuh"\nKERNEL(terms) {{ {unpack(declared)} FOR_ITEMS(k, n) {{ {body} }} }}\n'
    program = FunctionManager(device).compile(source, name="terms.cu", kernels=[declared])
    given = torch.from_numpy(z).to(device)
    found = {name: torch.empty_like(given) for name in names}
    program.launch("terms", len(z), z=given, **found, n=len(z))
    for name, exact in exact_terms(z.astype(np.float64)).items():
        # The polynomial, below 2^-23; 1 / z, the product, and the last sum of the polynomial, half an ulp each.
        errors = abs(found[name].cpu().double().numpy() / exact - 1)
        assert errors.max() <= 2 * EPSILON, name
