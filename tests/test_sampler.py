"""Sampler: drawn actions follow the logits, and come with the right log-probabilities and entropies."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import gpu_vecenv
from gpu_vecenv.env import Env
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.sampler import Sample, Sampler
from gpu_vecenv.vec_env import Fault, VecEnv

# A fair sampler's chi-square exceeds this with probability 1e-6, by degrees of freedom.
CHI_SQUARE_QUANTILE = {1: 23.92, 2: 27.63, 3: 30.66, 4: 33.37, 5: 35.88, 6: 38.25, 20: 65.42}
# One ulp of a float32 in [1, 2). exp and log of math.cuh err by less than that, every other operation by half of it,
# relative to its result.
EPSILON = 2.0**-23
TEXT = """#include "vecenv.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io io) {
    FOR_AGENTS (i) io.truncations[i] = io.time >= 3;
}
HD void observe(State, Io io) {
    FOR_AGENTS (i) io.obs[i][0] = (float)io.time;
}
"""


def log_prob_bound(choices: int, spread: float) -> float:
    """The largest error of one head's log-probability, logit - largest - log(total), absolute.

    Three roundings of logits' differences up to `spread`; the total, 1 or more, with half an ulp of it per summand and
    its own exponentials' ulp; the logarithm, up to log(choices), with its ulp and the last subtraction's half.
    """
    return EPSILON * (1.5 * spread + choices / 2 + 1 + 1.5 * math.log(choices))


def entropy_bound(choices: int, spread: float) -> float:
    """Of one head's entropy, the sum of p * -log(p), up to log(choices).

    The mean error of log(p); then, relative to the sum, p's total and quotient (choices / 2 + 3), the rounding of each
    partial sum (choices / 2), and p's exponent, whose error grows with -log(p) and so by log(choices) on average.
    """
    return log_prob_bound(choices, spread) + EPSILON * math.log(choices) * (choices + 3 + math.log(choices))


@dataclass(frozen=True, kw_only=True)
class Choose(Env):
    """A game that is nothing but its roles' choices."""

    cats: int = 2
    mice: int = 1

    @property
    def roles(self) -> dict[str, int]:
        return {"cat": self.cats, "mouse": self.mice}

    @property
    def obs_dim(self) -> int:
        return 1

    @property
    def action_space(self) -> dict[str, Discrete | MultiDiscrete]:
        return {"cat": MultiDiscrete([2, 6]), "mouse": Discrete(4)}


@pytest.fixture
def choosing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VecEnv]:
    """Environments of games with these action spaces."""
    (tmp_path / "choose.cu").write_text(TEXT)
    monkeypatch.setattr(Choose, "source", tmp_path / "choose.cu")

    def make(device: str, num_envs: int, action_space: object = None, cats: int = 2, mice: int = 1) -> VecEnv:
        game = Choose
        if action_space is not None:
            members = {"__module__": __name__, "action_space": property(lambda self: action_space)}
            game = type("Choose", (Choose,), members)
        return VecEnv(game(cats=cats, mice=mice), num_envs, device)

    return make


def logits_of(env: VecEnv, seed: int, scale: float) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    shape = (env.num_envs, env.num_agents, env.game.action.num_logits)
    return torch.from_numpy((scale * generator.standard_normal(shape)).astype(np.float32)).to(env.device)


def reference(logits: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of one head in float64."""
    distribution = torch.distributions.Categorical(logits=logits.double().cpu())
    return distribution.log_prob(actions.cpu()), distribution.entropy()


def heads_of(env: VecEnv) -> list[slice]:
    sizes = env.game.action.head_sizes
    return [slice(sum(sizes[:head]), sum(sizes[: head + 1])) for head in range(len(sizes))]


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 3, 4, 5), (100, 1, 1, 10, 1, 1, 1), tuple(range(1, 22))])
def test_frequencies_follow_the_softmax(device, choosing, weights):
    env = choosing(device, 2**16, Discrete(len(weights)), cats=4, mice=0)
    env.reset(seed=1)
    # The constant that is added to all logits must not matter.
    logits = (torch.tensor(weights, dtype=torch.float64).log() + 3).float().expand(2**16, 4, -1).contiguous()
    actions = Sampler(env).sample(logits.to(device)).actions.cpu().numpy()
    assert actions.shape == (2**16, 4) and actions.dtype == np.int32
    probabilities = np.array(weights) / sum(weights)
    for agents in (actions, actions[:, :1], actions[:2000]):  # all, one agent, few replicas
        counts, expected = np.bincount(agents.ravel(), minlength=len(weights)), probabilities * agents.size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < CHI_SQUARE_QUANTILE[len(weights) - 1]


def test_agents_heads_and_replicas_are_drawn_independently(device, choosing):
    env = choosing(device, 2**16, MultiDiscrete([2, 2]))
    env.reset(seed=9)
    logits = torch.zeros(2**16, 3, 4, device=device)
    actions = Sampler(env).sample(logits).actions.cpu().numpy().reshape(2**16, 6)
    cells = np.bincount(actions @ (1 << np.arange(6)), minlength=64)
    # 63 degrees of freedom: exceeded with probability 1e-6 above 131.
    assert ((cells - 2**10) ** 2 / 2**10).sum() < 131
    together = np.bincount(actions[1:, 0] * 2 + actions[:-1, 0], minlength=4)
    assert ((together - together.sum() / 4) ** 2 / (together.sum() / 4)).sum() < CHI_SQUARE_QUANTILE[3]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("choices", [1, 5, 100])
def test_log_probabilities_and_entropies_agree_with_torch(device, choosing, choices, scale, greedy):
    env = choosing(device, 500, Discrete(choices))
    env.reset(seed=2)
    logits = logits_of(env, 4, scale)
    sample = Sampler(env).sample(logits, greedy=greedy)
    log_probs, entropies = reference(logits, sample.actions)
    spread = float((logits.max(-1).values - logits.min(-1).values).max())
    assert sample.log_probs.dtype == sample.entropies.dtype == torch.float32
    assert (sample.log_probs.cpu().double() - log_probs).abs().max() <= log_prob_bound(choices, spread)
    assert (sample.entropies.cpu().double() - entropies).abs().max() <= entropy_bound(choices, spread)


def test_several_heads_add_up(device, choosing):
    env = choosing(device, 500, MultiDiscrete([3, 7, 2]))
    env.reset(seed=2)
    logits = logits_of(env, 5, 2.0)
    sample = Sampler(env).sample(logits)
    assert sample.actions.shape == (500, 3, 3)
    parts = [reference(logits[..., head], sample.actions[..., k]) for k, head in enumerate(heads_of(env))]
    spread = float((logits.max(-1).values - logits.min(-1).values).max())
    # The heads' own errors, and the rounding of two sums of numbers up to 20.
    bounds = [sum(bound(n, spread) for n in (3, 7, 2)) + 2 * 20 * EPSILON for bound in (log_prob_bound, entropy_bound)]
    for got, exact, bound in zip((sample.log_probs, sample.entropies), zip(*parts, strict=True), bounds, strict=True):
        assert (got.cpu().double() - sum(exact)).abs().max() <= bound


def test_roles_with_smaller_heads_use_the_first_logits_of_each(device, choosing):
    env = choosing(device, 4096)
    env.reset(seed=2)
    assert env.game.action.head_sizes == (4, 6)
    logits = logits_of(env, 6, 1.0)
    sample = Sampler(env).sample(logits)
    cats, mice = slice(0, 2), slice(2, 3)
    actions = sample.actions.cpu()
    assert actions[:, cats, 0].max() == 1 and actions[:, cats, 1].max() == 5
    assert actions[:, mice, 0].max() == 3 and (actions[:, mice, 1] == 0).all()
    first, second = (
        reference(logits[:, cats, :2], actions[:, cats, 0]),
        reference(logits[:, cats, 4:], actions[:, cats, 1]),
    )
    mouse = reference(logits[:, mice, :4], actions[:, mice, 0])
    for got, of_first, of_second, of_mouse in zip(
        (sample.log_probs.cpu(), sample.entropies.cpu()), first, second, mouse, strict=True
    ):
        bound = entropy_bound(2, 10.0) + entropy_bound(6, 10.0)  # the larger of the two bounds, for 2 heads
        assert (got[:, cats].double() - of_first - of_second).abs().max() <= bound
        assert (got[:, mice].double() - of_mouse).abs().max() <= entropy_bound(4, 10.0)

    # Whatever stands where a role has no logits, NaN included, decides nothing.
    padded = logits.clone()
    padded[:, cats, 2:4] = torch.nan
    padded[:, mice, 4:] = torch.nan
    again = Sampler(env).sample(padded)
    for name in ("actions", "log_probs", "entropies"):
        assert torch.equal(getattr(again, name), getattr(sample, name))
    env.step(sample.actions)
    assert not env.faults().any()


def test_greedy_takes_the_largest_logit_and_the_first_of_equals(device, choosing):
    env = choosing(device, 5, Discrete(4), cats=1, mice=0)
    env.reset(seed=3)
    rows = [[0, 0, 0, 0], [1, 3, 3, 2], [-5, -6, -7, -5], [-torch.inf, -1, -2, -1], [-0.0, 0.0, -1, 0.0]]
    logits = torch.tensor(rows, device=device)[:, None].contiguous()
    sample = Sampler(env).sample(logits, greedy=True)
    assert sample.actions.flatten().tolist() == [0, 1, 0, 1, 0]


def test_excluded_choices_are_never_drawn(device, choosing):
    env = choosing(device, 2**17, Discrete(8), cats=8, mice=0)  # 2^20 draws
    env.reset(seed=4)
    sampler = Sampler(env)
    masks = torch.arange(2**20).reshape(2**17, 8) % 255 + 1  # every set of choices but the empty one
    allowed = (masks[..., None] >> torch.arange(8)) % 2 == 1
    values = torch.randn(2**17, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = torch.where(allowed, values, -torch.inf).to(device)
    for greedy in (False, True):
        sample = sampler.sample(logits, greedy=greedy)
        assert allowed.gather(-1, sample.actions.cpu().long()[..., None]).all()
        assert torch.isfinite(sample.log_probs).all() and torch.isfinite(sample.entropies).all()
    one = allowed.sum(-1) == 1
    assert (sample.log_probs.cpu()[one] == 0).all() and (sample.entropies.cpu()[one] == 0).all()


def test_choices_too_unlikely_for_a_float_are_excluded_too(device, choosing):
    env = choosing(device, 2**14, Discrete(3), cats=4, mice=0)
    env.reset(seed=4)
    for spread in (150.0, 1e4, 1e38):
        logits = torch.tensor([-spread, 0.0, -spread], device=device).expand(2**14, 4, 3).contiguous()
        sample = Sampler(env).sample(logits)
        assert (sample.actions == 1).all() and (sample.log_probs == 0).all() and (sample.entropies == 0).all()


# Keys of a replica whose first draw in tick 0 of episode 0 is the smallest uniform number, 0, or the largest,
# 1 - 2^-24; found by trying the first 2^26.
SMALLEST_DRAW, LARGEST_DRAW = [1434075, 2691185, 7211575], [7459937, 22810931, 30942505]


def test_the_smallest_and_the_largest_draw_choose_possible_actions(device, choosing):
    inf, rare = torch.inf, math.log(0.75 * EPSILON)
    rows = {
        # 0 takes the first possible choice, however unlikely.
        "first": (SMALLEST_DRAW, [-inf, -inf, -100.0, 0.0] + [-inf] * 6, 2),
        # The largest takes the last, however unlikely. Eight weights are each rounded up when added to 1, so that
        # there are not enough of them to reach the total: the last possible choice is meant, not the last one.
        "last": (LARGEST_DRAW, [0.0] + [rare] * 8 + [-inf], 8),
        "last of two": (LARGEST_DRAW, [0.0, math.log(EPSILON)] + [-inf] * 8, 1),
    }
    for keys, row, expected in rows.values():
        env = choosing(device, len(keys), Discrete(len(row)), cats=1, mice=0)
        env.reset(seed=1)
        env.data["machine_key"].copy_(torch.tensor([[key, 0] for key in keys], dtype=torch.int64).to(torch.int32))
        logits = torch.tensor(row, device=device).expand(len(keys), 1, -1).contiguous()
        sample = Sampler(env).sample(logits)
        assert (sample.actions == expected).all()
        assert torch.isfinite(sample.log_probs).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_no_distribution_give_an_action_that_the_environment_refuses(device, choosing, greedy):
    inf, nan = torch.inf, torch.nan
    rows = [[0, 0, 0], [-inf, -inf, -inf], [nan, 0, 0], [0, 0, nan], [nan, nan, nan], [0, inf, 0], [-inf, 0, -inf]]
    env = choosing(device, len(rows), Discrete(3))
    env.reset(seed=4)
    logits = torch.zeros(len(rows), 3, 3, device=device)
    logits[:, 1] = torch.tensor(rows, device=device)
    sample = Sampler(env).sample(logits, greedy=greedy)
    bad = [False, True, True, True, True, True, False]
    assert (sample.actions[:, 1] == -1).tolist() == bad
    assert sample.log_probs[:, 1].isnan().tolist() == sample.entropies[:, 1].isnan().tolist() == bad
    others = [0, 2]
    assert (sample.actions[:, others] >= 0).all()
    assert not sample.log_probs[:, others].isnan().any() and not sample.entropies[:, others].isnan().any()
    env.step(sample.actions)
    assert env.faults().tolist() == [Fault.INVALID_ACTION * wrong for wrong in bad]
    assert env.time.tolist() == [int(not wrong) for wrong in bad]


def test_one_bad_head_spoils_the_sums_but_not_the_other_heads(device, choosing):
    env = choosing(device, 2, MultiDiscrete([2, 2, 2]), cats=1, mice=0)
    env.reset(seed=4)
    logits = torch.zeros(2, 1, 6, device=device)
    logits[1, 0, 2] = torch.nan
    sample = Sampler(env).sample(logits)
    assert sample.actions[1, 0, 1] == -1
    assert (sample.actions[1, 0, [0, 2]] >= 0).all() and (sample.actions[0] >= 0).all()
    assert sample.log_probs.isnan().flatten().tolist() == [False, True]
    assert sample.entropies.isnan().flatten().tolist() == [False, True]


def test_outputs_go_where_the_caller_wants_them(device, choosing):
    env = choosing(device, 50)
    env.reset(seed=4)
    sampler = Sampler(env)
    logits = logits_of(env, 1, 1.0)
    fresh = sampler.sample(logits)
    kept = [tensor.clone() for tensor in dataclasses.astuple(fresh)]
    out = Sample(*(torch.full_like(tensor, 9) for tensor in (fresh.actions, fresh.log_probs, fresh.entropies)))
    pointers = [tensor.data_ptr() for tensor in (out.actions, out.log_probs, out.entropies)]
    assert sampler.sample(logits, out=out) is out
    assert [tensor.data_ptr() for tensor in (out.actions, out.log_probs, out.entropies)] == pointers
    for name in ("actions", "log_probs", "entropies"):
        assert torch.equal(getattr(out, name), getattr(fresh, name))
    sampler.sample(-logits)
    assert all(torch.equal(x, y) for x, y in zip((fresh.actions, fresh.log_probs, fresh.entropies), kept, strict=True))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("actions", lambda x: x.long()),
        ("log_probs", lambda x: x.double()),
        ("entropies", lambda x: x.repeat(1, 2)),
        ("log_probs", lambda x: x.repeat(2, 1)),
        ("actions", lambda x: x.repeat_interleave(2, 0)[::2]),
        ("entropies", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    ],
)
def test_outputs_of_another_shape_or_type_are_refused(device, choosing, name, change):
    env = choosing(device, 50)
    env.reset(seed=4)
    sampler, logits = Sampler(env), logits_of(env, 1, 1.0)
    right = sampler.sample(logits)
    with pytest.raises((TypeError, ValueError), match=name):
        sampler.sample(logits, out=dataclasses.replace(right, **{name: change(getattr(right, name))}))


def test_a_draw_depends_on_seed_episode_tick_and_nothing_else(device, choosing):
    env = choosing(device, 300, Discrete(1000))
    sampler = Sampler(env)
    logits = torch.zeros(300, 3, 1000, device=device)

    def draw() -> torch.Tensor:
        return sampler.sample(logits).actions.clone()

    env.reset(seed=5)
    seen = [draw()]
    assert torch.equal(draw(), seen[0])
    torch.manual_seed(1)
    env.sample_actions()
    assert torch.equal(draw(), seen[0])
    for _ in range(7):  # the third tick ends an episode
        env.step(env.sample_actions())
        seen.append(draw())
    assert env.episode_statistics()["episodes"].eq(2).all()
    env.reset(seed=6)
    seen.append(draw())
    for i in range(len(seen)):
        for j in range(i):  # two independent draws agree in 900 / 1000 places on average
            assert (seen[i] == seen[j]).sum() < 10, (i, j)
    env.reset(seed=5)
    assert torch.equal(draw(), seen[0])
    assert torch.equal(Sampler(env).sample(logits).actions, seen[0])


def test_a_draw_is_not_the_random_action_of_the_same_tick(device, choosing):
    env = choosing(device, 300, Discrete(1000))
    env.reset(seed=5)
    actions = Sampler(env).sample(torch.zeros(300, 3, 1000, device=device)).actions
    assert (actions == env.sample_actions()).sum() < 10


def test_a_replica_draws_the_same_among_few_and_among_many(device, choosing):
    whole = choosing(device, 257)
    whole.reset(seed=7)
    logits = logits_of(whole, 2, 1.0)
    expected = Sampler(whole).sample(logits)
    for num_envs in (1, 2, 31, 256):
        env = choosing(device, num_envs)
        env.reset(seed=7)
        few = Sampler(env).sample(logits[:num_envs].contiguous())
        for name in ("actions", "log_probs", "entropies"):
            assert torch.equal(getattr(few, name), getattr(expected, name)[:num_envs])
    shard = VecEnv(whole.game, 57, device, first_replica=200)
    shard.reset(seed=7)
    assert torch.equal(Sampler(shard).sample(logits[200:]).actions, expected.actions[200:])


def test_wrong_logits_are_refused(device, choosing):
    env = choosing(device, 4)
    env.reset(seed=1)
    sampler = Sampler(env)
    logits = torch.zeros(4, 3, 10, device=device)
    for wrong in (logits.double(), logits.half(), logits.int()):
        with pytest.raises(TypeError, match=f"logits have dtype {wrong.dtype}; expected torch.float32"):
            sampler.sample(wrong)
    for shape in ((4, 3, 9), (4, 3, 1), (1, 3, 10), (12, 10), (4, 3, 10, 1), (3, 4, 10)):
        with pytest.raises(ValueError, match=r"expected \(4, 3, 10\)"):
            sampler.sample(torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match="on meta"):
        sampler.sample(logits.to("meta"))
    with pytest.raises(TypeError):
        sampler.sample(logits.cpu().numpy())


def test_logits_need_neither_be_contiguous_nor_free_of_gradients(device, choosing):
    env = choosing(device, 4)
    env.reset(seed=1)
    sampler = Sampler(env)
    logits = logits_of(env, 3, 1.0)
    expected = sampler.sample(logits)
    strided = logits.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not strided.is_contiguous()
    got = sampler.sample(strided)
    assert torch.equal(got.actions, expected.actions) and torch.equal(got.log_probs, expected.log_probs)
    assert not got.log_probs.requires_grad


def test_continuous_actions_have_no_logits(device, choosing):
    with pytest.raises(EnvDefinitionError, match="continuous actions"):
        Sampler(choosing(device, 4, Box(-1, 1, (2,), np.float32)))


def test_bundled_games_take_what_the_sampler_gives(device):
    for name in ("tag_gridworld", "tag_continuous"):
        env = gpu_vecenv.make(name, 20, device)
        env.reset(seed=1)
        sample = Sampler(env).sample(logits_of(env, 1, 1.0))
        env.step(sample.actions)
        assert not env.faults().any()


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [False, True])
def test_both_devices_give_the_same_bits(choosing, greedy):
    samples = []
    for device in ("cpu", "cuda"):
        env = choosing(device, 5000)
        env.reset(seed=2**64 - 1)
        logits = logits_of(env, 8, 5.0)
        logits[::7, :, ::3] = -torch.inf
        samples.append(Sampler(env).sample(logits, greedy=greedy))
    here, there = samples
    assert torch.equal(here.actions, there.actions.cpu())
    for name in ("log_probs", "entropies"):
        bits = [getattr(sample, name).cpu().numpy().tobytes() for sample in samples]
        assert bits[0] == bits[1]
