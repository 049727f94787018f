"""Sampler: drawn actions follow the logits, and come with the right log-probabilities and entropies."""

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from games.script import Script
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from oracles.philox import philox

import gpu_vecenv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.sampler import Sample, Sampler
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.errors import ConfigError, InvalidActionError, ResetNeededError

# A fair sampler's chi-square exceeds this with probability 1e-6, by degrees of freedom.
CHI_SQUARE_QUANTILE = {1: 23.92, 2: 27.63, 3: 30.66, 4: 33.37, 5: 35.88, 6: 38.25, 20: 65.42}
# One ulp of a float32 in [1, 2). exp and log of math.cuh err by less than that, every other operation by half of it,
# relative to its result.
EPSILON = 2.0**-23
TEXT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io io) {
    FOR_AGENTS (i) io.truncations[i] = io.elapsed_steps >= 3;
}
HD void observe(State, Io io) {
    FOR_AGENTS (i) io.obs[i][0] = (float)io.elapsed_steps;
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
    shape = (env.num_envs, env.num_agents, env.game.layout.action.num_logits)
    return torch.from_numpy((scale * generator.standard_normal(shape)).astype(np.float32)).to(env.device)


def reference(logits: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of one head in float64."""
    distribution = torch.distributions.Categorical(logits=logits.double().cpu())
    return distribution.log_prob(actions.cpu()), distribution.entropy()


def heads_of(env: VecEnv) -> list[slice]:
    sizes = env.game.layout.action.head_sizes
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
    for agents in (actions, actions[:, :1], actions[:2000]):  # all, one agent, few environments
        counts, expected = np.bincount(agents.ravel(), minlength=len(weights)), probabilities * agents.size
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < CHI_SQUARE_QUANTILE[len(weights) - 1]


def test_agents_heads_and_envs_are_drawn_independently(device, choosing):
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
    assert env.game.layout.action.head_sizes == (4, 6)
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


# Keys of an environment whose first draw in step 0 of episode 0 is the smallest uniform number, 0, or the largest,
# 1 - 2^-24; found by trying the first 2^26.
SMALLEST_DRAW, LARGEST_DRAW = [1434075, 2691185, 7211575], [7459937, 22810931, 30942505]


def test_the_smallest_and_the_largest_draw_choose_possible_actions(device, choosing):
    inf, rare = torch.inf, math.log(0.75 * EPSILON)
    rows = {
        # 0 takes the first possible choice, however unlikely; one of less than exp(-87) counts as impossible.
        "first": (SMALLEST_DRAW, [-inf, -88.0, -86.0, 0.0] + [-inf] * 6, 2),
        # The largest takes the last, however unlikely. Eight weights are each rounded up when added to 1, so that
        # there are not enough of them to reach the total: the last possible choice is meant, not the last one.
        "last": (LARGEST_DRAW, [0.0] + [rare] * 8 + [-inf], 8),
        "last of two": (LARGEST_DRAW, [0.0, math.log(EPSILON)] + [-inf] * 8, 1),
    }
    for keys, row, expected in rows.values():
        env = choosing(device, len(keys), Discrete(len(row)), cats=1, mice=0)
        env.reset(seed=1)
        env.data["engine_key"].copy_(torch.tensor([[key, 0] for key in keys], dtype=torch.int64).to(torch.int32))
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
    _, rewards, *_ = env.step(sample.actions)
    assert env.faults().tolist() == [Fault.INVALID_ACTION * wrong for wrong in bad]
    assert rewards.isnan().all(1).tolist() == bad


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
    assert fresh.draws is None
    kept = [tensor.clone() for tensor in (fresh.actions, fresh.log_probs, fresh.entropies)]
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


def test_a_draw_depends_on_seed_episode_step_and_nothing_else(device, choosing):
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
    for _ in range(7):  # the third step ends an episode
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


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_each_role_of_a_mixed_game_is_sampled_as_in_a_game_of_its_kind(device, choosing, squash, greedy):
    """Bit by bit: the same numbers are drawn for the same agent."""
    box, pair = Box(np.array([-1, 0, 2], np.float32), np.array([1, 5, 3], np.float32)), MultiDiscrete([3, 5])
    mixed, discrete, boxes = (
        choosing(device, 300, space, cats=2, mice=2)
        for space in ({"cat": pair, "mouse": box}, {"cat": pair, "mouse": Discrete(4)}, {"cat": box, "mouse": box})
    )
    for env in (mixed, discrete, boxes):
        env.reset(seed=9)
    # A head is as wide as the widest role's: that of the mixed game has no mouse beside it.
    logits = torch.randn((300, 4, 9), generator=torch.Generator().manual_seed(1)).to(device)
    parameters = torch.zeros((300, 4, 8), device=device)
    parameters[:, :2] = logits[:, :2, [0, 1, 2, 4, 5, 6, 7, 8]]
    parameters[:, 2:, :6] = logits[:, 2:, :6]
    found = Sampler(mixed, squash).sample(parameters, greedy=greedy)
    chosen = Sampler(discrete).sample(logits, greedy=greedy)
    drawn = Sampler(boxes, squash).sample(parameters[..., :6].contiguous(), greedy=greedy)
    assert found.actions[:, :2, :2].equal(chosen.actions[:, :2].float()) and found.actions[:, :2, 2].eq(0).all()
    assert found.draws[:, :2].equal(found.actions[:, :2])
    for name in ("actions", "draws"):
        assert getattr(found, name)[:, 2:].equal(getattr(drawn, name)[:, 2:])
    for name in ("log_probs", "entropies"):
        expected = torch.cat([getattr(chosen, name)[:, :2], getattr(drawn, name)[:, 2:]], 1)
        assert getattr(found, name).equal(expected)
    assert found.actions[:, :2, 1].unique().numel() == 5 and found.actions[:, 2].unique().numel() > 300


# Rows of 2, 5, 15 and 42 numbers, a Box's, and those of so many agents that a step does not draw them itself.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cartpole", {}),
        ("tag_gridworld", {}),
        ("tag_gridworld", {"num_taggers": 999, "full_observation": False}),
        ("tag_continuous", {}),
        ("tag_continuous", {"num_taggers": 20, "num_runners": 280}),
        ("simple_tag", {"continuous_actions": True}),
        ("pendulum", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_a_sampled_step_is_bitwise_equal_to_a_sample_and_a_step(name, config, mode, device):
    game = gpu_vecenv.configure(name, **{"max_steps": 5, **config})
    num_envs = 257 if game.num_agents < 200 else 9
    envs = [VecEnv(game, num_envs, where, autoreset_mode=mode) for where in (device, device, "cpu")]
    squash = "tanh" if game.layout.action.continuous else "clip"
    one, other, on_host = samplers = [Sampler(env, squash) for env in envs]
    for env in envs:
        env.reset(seed=3)
    random = torch.Generator().manual_seed(1)
    for step in range(8):
        given = torch.randn((num_envs, game.num_agents, one.num_parameters), generator=random)
        sample, outputs = one.step(given.to(device), greedy=step == 4)
        again = other.sample(given.to(device), greedy=step == 4)
        host, on_the_host = on_host.step(given, greedy=step == 4)
        for each, found in ((again, other.env.step(again.actions)), (host, on_the_host)):
            drawn = [(getattr(each, f.name), getattr(sample, f.name)) for f in dataclasses.fields(each)]
            for a, b in (*drawn, *zip(found[:4], outputs[:4], strict=True)):
                assert (a is None) == (b is None)
                assert a is None or a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes(), step
            assert found[4].keys() == outputs[4].keys()
    states = [sampler.env.state_dict() for sampler in samplers]
    assert all(x.cpu().equal(state[key].cpu()) for key, x in states[0].items() for state in states[1:])


@pytest.mark.parametrize("name", ["tag_gridworld", "cartpole"])
def test_a_sampled_step_writes_into_the_given_tensors(name, device):
    env, twin = (VecEnv(gpu_vecenv.configure(name), 70, device) for _ in range(2))
    sampler, buffers = Sampler(env), env.step_buffers()
    for each in (env, twin):
        each.reset(seed=8)
    wide = torch.randn((70, env.num_agents, sampler.num_parameters * 2 + 1), device=device)
    given = wide[..., 1 : sampler.num_parameters + 1]  # begins at no multiple of 16 bytes, and has gaps
    full = Sampler(twin).sample(given.clone())
    bare = Sample(torch.empty_like(full.actions), torch.empty_like(full.log_probs))
    sample, (obs, *_) = sampler.step(given, sample=bare, out=buffers)
    assert sample is bare and obs is buffers.obs and bare.entropies is None
    assert torch.equal(bare.actions, full.actions) and torch.equal(bare.log_probs, full.log_probs)
    assert torch.equal(obs, twin.step(full.actions)[0])


def test_a_step_with_its_draw_refuses_what_its_halves_refuse_and_changes_nothing(device, choosing):
    env = choosing(device, 20)
    sampler, logits = Sampler(env), torch.zeros(20, 3, 10, device=device)
    with pytest.raises(ResetNeededError, match="step before reset"):
        sampler.step(logits)
    env.reset(seed=1)
    before, sample = env.state_dict(), sampler.sample(logits)
    for call, error, said in (
        (lambda: sampler.step(logits[:, :2]), ValueError, "step: logits are"),
        (lambda: sampler.step(logits.double()), TypeError, "float64"),
        (lambda: sampler.step(logits, sample=5), TypeError, "step: sample is a int"),
        (lambda: sampler.step(logits, sample=dataclasses.replace(sample, actions=logits)), TypeError, "sample.actions"),
        (
            lambda: sampler.step(logits, sample=sample, out=choosing(device, 21).step_buffers()),
            ValueError,
            "out is StepBuffers",
        ),
    ):
        with pytest.raises(error, match=re.escape(said)):
            call()
    assert all(torch.equal(x, before[key]) for key, x in env.state_dict().items())
    sample.actions.fill_(77)
    with pytest.raises(ValueError, match="out is StepBuffers"):
        sampler.step(logits, sample=sample, out=choosing(device, 21).step_buffers())
    assert sample.actions.eq(77).all()


@pytest.mark.gpu
def test_a_first_step_with_its_draw_may_be_captured():
    envs = [VecEnv(gpu_vecenv.configure("tag_gridworld"), 50, "cuda") for _ in range(2)]
    one, other = (Sampler(env) for env in envs)
    logits = torch.randn((50, 5, 5), device="cuda")
    buffers = envs[0].step_buffers()
    for env in envs:
        env.reset(seed=1)
    envs[0].step(envs[0].sample_actions())
    other.env.step(other.env.sample_actions())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample = Sample(*(torch.empty(50, 5, dtype=kind, device="cuda") for kind in (torch.int32, torch.float32)))
        one.step(logits, sample=sample, out=buffers)
    for _ in range(3):
        graph.replay()
        expected, (obs, *_) = other.step(logits)
        assert torch.equal(sample.actions, expected.actions) and torch.equal(buffers.obs, obs)


def test_where_actions_are_looked_at_first_a_step_with_its_draw_does_so_too(device, choosing):
    env = choosing(device, 20).like(validate="sync")
    env.reset(seed=1)
    with pytest.raises(InvalidActionError):
        Sampler(env).step(torch.full((20, 3, 10), float("nan"), device=device))
    assert not env.elapsed_steps.any()


def test_a_draw_is_not_the_random_action_of_the_same_step(device, choosing):
    env = choosing(device, 300, Discrete(1000))
    env.reset(seed=5)
    actions = Sampler(env).sample(torch.zeros(300, 3, 1000, device=device)).actions
    assert (actions == env.sample_actions()).sum() < 10


def test_a_choice_is_the_one_of_the_samplers_stream(device, choosing):
    """Computed anew: stream 2, item the agent, draw the head. Of 8 even choices the first 3 bits take one."""
    env = choosing(device, 20, MultiDiscrete([8, 8]))
    env.reset(seed=5)
    env.step(env.sample_actions())
    actions = Sampler(env).sample(torch.zeros(20, 3, 16, device=device)).actions.cpu().numpy()
    keys = env.data["engine_key"].cpu().numpy().view(np.uint32).tolist()
    for (environment, agent, head), action in np.ndenumerate(actions):
        assert action == philox([2 << 29, agent, 1, 0], keys[environment])[head] >> 29


def test_an_env_draws_the_same_among_few_and_among_many(device, choosing):
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
    shard = VecEnv(whole.game, 57, device, first_env_index=200)
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


def test_discrete_games_take_neither_tanh_nor_draws(device, choosing):
    env = choosing(device, 4)
    env.reset(seed=1)
    with pytest.raises(ConfigError, match="Choose has discrete actions"):
        Sampler(env, squash="tanh")
    sampler, logits = Sampler(env, squash="clip"), logits_of(env, 3, 1.0)
    assert sampler.num_parameters == sampler.num_logits == 10
    out = dataclasses.replace(sampler.sample(logits), draws=torch.zeros(4, 3, 2, device=device))
    with pytest.raises(ValueError, match=r"out\.draws is given"):
        sampler.sample(logits, out=out)


def test_bundled_games_take_what_the_sampler_gives(device):
    for name in ("tag_gridworld", "tag_continuous"):
        env = gpu_vecenv.make(name, 20, device)
        env.reset(seed=1)
        sample = Sampler(env).sample(logits_of(env, 1, 1.0))
        env.step(sample.actions)
        assert not env.faults().any()


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [False, True])
def test_both_devices_are_bitwise_equal(choosing, greedy):
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


# ---------------------------------------------------------------------- Box games

UNIT = Box(-1, 1, (2,), np.float32)
LARGEST = float(np.finfo(np.float32).max)
# The last has a width, and the sum of its second pair of bounds a value, that no float32 holds.
BOXES = {
    "unit": UNIT,
    "positive": Box(np.float32([0, 0.1]), np.float32([1, 0.7]), dtype=np.float32),
    "far off": Box(np.float32([1e6, -3]), np.float32([1e6 + 1, 1e-3]), dtype=np.float32),
    "tiny": Box(np.float32([-1e-40, 5]), np.float32([3e-40, 5]), dtype=np.float32),
    "huge": Box(np.float32([-LARGEST, 0.9 * LARGEST]), np.float32(2 * [LARGEST]), dtype=np.float32),
}
FIELDS = ("actions", "log_probs", "entropies", "draws")
# A fair sampler's Kolmogorov-Smirnov test gives a smaller p-value with this probability; the seeds were not chosen.
P_VALUE = 1e-6


def gaussians(env: VecEnv, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Means around 0 up to a few times ``scale``, log standard deviations from -5 to 2."""
    generator = np.random.default_rng(seed)
    shape = (*env.buffers_layout.batch, env.game.layout.action.heads)
    parameters = (scale * generator.standard_normal(shape), generator.uniform(-5, 2, shape))
    return torch.from_numpy(np.concatenate(parameters, -1).astype(np.float32)).to(env.device)


def exact(parameters: torch.Tensor, draws: torch.Tensor, squash: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of these draws, head by head, in float64, and a float32's largest error.

    1 - tanh(u)^2 is written as 1 / cosh(u)^2, other than in the kernel. The error of the log-probabilities, z^2 / 2 +
    log_std + constant: in z, half an ulp each of the distance and of the quotient and an ulp of std, twice of which is
    in z^2, with half an ulp of its own, 2.25 z^2 in all; then half an ulp of each of the two partial sums, at most
    z^2 / 2 + |log_std| + 1, and the constant's rounding. tanh adds, doubled: an ulp each of exp and log and half an ulp
    of their argument, together 2, and half an ulp each of the two sums up to |u| + 1; and half an ulp of the last
    sum. The sums over heads are left to the caller.
    """
    mean, log_std = np.split(parameters.cpu().double().numpy(), 2, -1)
    u = draws.cpu().double().numpy()
    z = (u - mean) / np.exp(log_std)
    log_prob = -(z**2) / 2 - log_std - np.log(2 * np.pi) / 2
    bound = 2.25 * z**2 + (z**2 / 2 + abs(log_std) + 1) + 0.5
    if squash == "tanh":
        log_prob += 2 * (np.logaddexp(u, -u) - np.log(2))
        bound += 2 * (2 + abs(u) + 1) + (z**2 / 2 + abs(log_std) + 1 + 2 * abs(u)) / 2
    return log_prob, 0.5 * np.log(2 * np.pi * np.e) + log_std, EPSILON * bound


def check_against_float64(sample: Sample, parameters: torch.Tensor, squash: str) -> None:
    log_prob, entropy, bound = exact(parameters, sample.draws, squash)
    heads = log_prob.shape[-1]
    # Each of a sum's partial sums is rounded, half an ulp of at most the sum of the sizes.
    bound = bound.sum(-1) + heads / 2 * EPSILON * abs(log_prob).sum(-1)
    assert (abs(sample.log_probs.cpu().double().numpy() - log_prob.sum(-1)) <= bound).all()
    # A constant below 2 is rounded, and the sum with it.
    log_std = parameters[..., heads:].cpu().double().numpy()
    bound = EPSILON * (0.5 + (2 + abs(log_std)) / 2).sum(-1) + heads / 2 * EPSILON * abs(entropy).sum(-1)
    assert (abs(sample.entropies.cpu().double().numpy() - entropy.sum(-1)) <= bound).all()


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (-3.0, 1.5), (0.7, -4.0)])
def test_draws_are_gaussian(device, choosing, mean, log_std):
    env = choosing(device, 2**15, UNIT)
    env.reset(seed=1)
    parameters = torch.tensor([mean, 2.0, log_std, -1.0], device=device).expand(2**15, 3, 4).contiguous()
    sample = Sampler(env).sample(parameters)
    draws = sample.draws.cpu().double().numpy()
    assert draws.shape == (2**15, 3, 2) and sample.draws.dtype == sample.actions.dtype == torch.float32
    for head, (m, s) in enumerate(((mean, log_std), (2.0, -1.0))):
        for agents in (draws[..., head], draws[:, 0, head], draws[:1000, 2, head]):  # all, one agent, few environments
            assert scipy.stats.kstest(agents.ravel(), scipy.stats.norm(m, math.exp(s)).cdf).pvalue > P_VALUE
    # Agents, heads and neighbouring envs: a correlation of n independent pairs is normal with variance 1 / n. The
    # p-value is for each of the 15 pairs, and again for the squares, which would show a common size.
    columns = (draws - [mean, 2.0]).reshape(2**15, 6)
    for x in (columns, columns**2):
        pairs = np.corrcoef(x.T)[np.triu_indices(6, 1)]
        after = [np.corrcoef(x[1:, k], x[:-1, k])[0, 1] for k in range(6)]
        assert np.abs([*pairs, *after]).max() * math.sqrt(2**15) < scipy.stats.norm.isf(P_VALUE / 2)


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("box", BOXES)
def test_actions_are_draws_squashed_and_stretched_to_the_box(device, choosing, box, squash):
    space = BOXES[box]
    env = choosing(device, 3000, space)
    env.reset(seed=2)
    sample = Sampler(env, squash).sample(gaussians(env, 3))
    actions, draws = (tensor.cpu().numpy() for tensor in (sample.actions, sample.draws))
    assert ((actions >= space.low) & (actions <= space.high)).all()
    assert (actions[draws >= 10] == np.broadcast_to(space.high, actions.shape)[draws >= 10]).all()
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    u = draws.astype(np.float64)
    s = np.tanh(u) if squash == "tanh" else np.clip(u, -1, 1)
    # Half an ulp of the centre and of the half width, at most the larger bound together; tanh's own 1.51 ulp and the
    # product's half, of the half width; half an ulp of the last sum. Of denormals each operation may lose 2^-150 more.
    bound = EPSILON * 3.1 * np.maximum(abs(low), abs(high)) + 5 * 2.0**-150
    assert (abs(actions - ((high / 2 + low / 2) + (high / 2 - low / 2) * s)) <= bound).all()
    env.step(sample.actions)
    assert not env.faults().any()


@pytest.mark.parametrize("box", BOXES)
def test_the_ends_of_the_box_are_reached_exactly(device, choosing, box):
    space = BOXES[box]
    env = choosing(device, 6, space, cats=1, mice=0)
    env.reset(seed=2)
    means = torch.tensor([-1.0, 1.0, -50.0, 50.0, -1e38, 1e38], device=device)
    parameters = torch.cat([means[:, None, None].expand(6, 1, 2), torch.zeros(6, 1, 2, device=device)], -1)
    expected = np.stack([space.low, space.high] * 3)[:, None]
    assert (Sampler(env, "clip").sample(parameters, greedy=True).actions.cpu().numpy() == expected).all()
    by_tanh = Sampler(env, "tanh").sample(parameters, greedy=True).actions.cpu().numpy()
    assert (by_tanh[2:] == expected[2:]).all()


def test_tanh_is_within_its_bound(device, choosing):
    # Every 997th of the positive floats up to 16, and those around the change of formula and where 1 is reached.
    near = np.float32([0, 0.625, 8.66434, 2.0**-126]).view(np.int32)[:, None] + np.arange(300)
    bits = np.concatenate([np.arange(0, 0x41800000, 997), near.ravel()]).astype(np.int32)
    bits = np.concatenate([bits, bits | np.int32(-(2**31))])
    env = choosing(device, len(bits), Box(-1, 1, (1,), np.float32), cats=1, mice=0)
    env.reset(seed=1)
    u = torch.from_numpy(bits.view(np.float32)).to(device)
    sample = Sampler(env, "tanh").sample(torch.stack([u, torch.zeros_like(u)], -1)[:, None], greedy=True)
    got, x = sample.actions.cpu().numpy().ravel().astype(np.float64), u.cpu().numpy().astype(np.float64)
    ulp = 2.0 ** np.maximum(np.frexp(np.tanh(x))[1] - 24, -149)
    error = abs(got - np.tanh(x)) / ulp
    assert error.max() <= 1.51, (error.max(), x[error.argmax()])


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0])
def test_densities_and_entropies_agree_with_float64(device, choosing, scale, squash, greedy):
    env = choosing(device, 5000, Box(-1, 1, (5,), np.float32))
    env.reset(seed=2)
    parameters = gaussians(env, 4, scale)
    check_against_float64(Sampler(env, squash).sample(parameters, greedy=greedy), parameters, squash)


def test_densities_of_tanh_integrate_to_one(device, choosing):
    # By importance: the mean of 1 / density over the draws is the length of [-1, 1], 2. With a Gaussian this narrow its
    # variance is that of exp(z^2 / 2) cut off; instead the mean of f / density is the integral of f(a) = 3 (1 - a^2) /
    # 4, that is 1, of a variance which the sample itself tells.
    env = choosing(device, 2**16, Box(-1, 1, (1,), np.float32), cats=1, mice=0)
    env.reset(seed=5)
    parameters = torch.zeros(2**16, 1, 2, device=device)
    sample = Sampler(env, "tanh").sample(parameters)
    a, log_prob = (tensor.cpu().double().numpy().ravel() for tensor in (sample.actions, sample.log_probs))
    weights = 0.75 * (1 - a**2) / np.exp(log_prob)
    error = weights.std() / math.sqrt(len(weights))
    assert abs(weights.mean() - 1) < scipy.stats.norm.isf(P_VALUE / 2) * error and error < 0.01


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_extreme_parameters_have_finite_densities(device, choosing, squash):
    means, log_stds = [-1e30, -50.0, -10.0, 0.0, 10.0, 50.0, 1e30], [-1e30, -104.0, -90.0, -20.0, 0.0, 5.0, 80.0]
    rows = torch.tensor([[m, s] for m in means for s in log_stds], device=device)[:, None].contiguous()
    env = choosing(device, len(rows), Box(-1, 1, (1,), np.float32), cats=1, mice=0)
    env.reset(seed=3)
    for greedy in (False, True):
        sample = Sampler(env, squash).sample(rows, greedy=greedy)
        for name in FIELDS:
            assert torch.isfinite(getattr(sample, name)).all(), name
        env.step(sample.actions)
        assert not env.faults().any()
        # A standard deviation that is denormal or 0 has no such relative error as the bound supposes.
        usual = rows[:, 0, 1].cpu() >= -20
        part = Sample(*(getattr(sample, name).cpu()[usual] for name in FIELDS))
        check_against_float64(part, rows.cpu()[usual], squash)


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_greedy_draws_are_the_means(device, choosing, squash):
    env = choosing(device, 500, UNIT)
    env.reset(seed=3)
    parameters = gaussians(env, 1, 2.0)
    sampler = Sampler(env, squash)
    sample = sampler.sample(parameters, greedy=True)
    assert torch.equal(sample.draws, parameters[..., :2])
    drawn = sampler.sample(parameters)
    assert not (drawn.draws == sample.draws).any() and torch.equal(drawn.entropies, sample.entropies)


def test_a_gaussian_draw_depends_on_seed_env_agent_episode_and_step(device, choosing):
    env = choosing(device, 300, UNIT)
    sampler, parameters = Sampler(env), torch.zeros(300, 3, 4, device=device)

    def draw() -> torch.Tensor:
        return sampler.sample(parameters).draws.clone()

    env.reset(seed=5)
    seen = [draw()]
    assert torch.equal(draw(), seen[0]) and torch.equal(Sampler(env, "tanh").sample(parameters).draws, seen[0])
    for _ in range(7):  # the third step ends an episode
        env.step(env.sample_actions())
        seen.append(draw())
    env.reset(seed=6)
    seen.append(draw())
    values = torch.stack(seen).cpu().numpy().ravel()
    # 1.3e8 pairs of 16200 draws, of which two fall on the same float with a probability below 2^-23, an ulp of 1 times
    # the density: fewer than 16 pairs. A draw that did not depend on one of these would make 1800 or more.
    distinct = len(np.unique(values))
    assert len(values) - distinct < 100, distinct
    env.reset(seed=5)
    assert torch.equal(draw(), seen[0])
    shard = VecEnv(env.game, 100, device, first_env_index=200)
    shard.reset(seed=5)
    assert torch.equal(Sampler(shard).sample(parameters[200:]).draws, seen[0][200:])


def test_a_gaussian_draw_is_the_one_of_the_samplers_stream(device, choosing):
    """Computed anew: stream 2, item the agent, draw the head, of the blocks that uniform numbers never use."""
    env = choosing(device, 20, UNIT)
    env.reset(seed=5)
    env.step(env.sample_actions())
    draws = Sampler(env).sample(torch.zeros(20, 3, 4, device=device)).draws.cpu().double().numpy()
    keys = env.data["engine_key"].cpu().numpy().view(np.uint32).tolist()
    for (environment, agent, head), u in np.ndenumerate(draws):
        words = philox([2 << 29 | 1 << 28 | head, agent, 1, 0], keys[environment])
        radius = math.sqrt(-2 * math.log(((words[2] >> 8) + 1) / 2**24))
        # The angle is rounded twice and 2 pi once, 5 ulp of 1 in all; the others are an ulp or less each.
        assert abs(u - radius * math.cos(2 * math.pi * (words[3] >> 8) / 2**24)) <= 7 * EPSILON * radius


# Keys of an env whose first Gaussian draw in step 0 of episode 0 begins with the uniform number 0; found by trying.
SMALLEST_RADIUS = [1868581, 4105490, 24881042]


def test_the_smallest_uniform_number_gives_a_finite_draw(device, choosing):
    """Its logarithm would be that of 0 if it were not moved up by 2^-24, which makes the largest radius there is."""
    env = choosing(device, 3, UNIT, cats=1, mice=0)
    env.reset(seed=1)
    env.data["engine_key"].copy_(torch.tensor([[key, 0] for key in SMALLEST_RADIUS]))
    sample = Sampler(env).sample(torch.zeros(3, 1, 4, device=device))
    for draw, key in zip(sample.draws[:, 0, 0].tolist(), SMALLEST_RADIUS, strict=True):
        words = philox([2 << 29 | 1 << 28, 0, 0, 0], [key, 0])
        assert words[2] >> 8 == 0
        expected = math.sqrt(48 * math.log(2)) * math.cos(2 * math.pi * (words[3] >> 8) / 2**24)
        assert draw == pytest.approx(expected, abs=7 * EPSILON * 6)  # as above


def test_agents_as_rows_draw_the_same(device, choosing):
    env = choosing(device, 50, UNIT)
    env.reset(seed=5)
    parameters = gaussians(env, 2)
    expected = Sampler(env, "tanh").sample(parameters)
    flat = VecEnv(env.game, 50, device, agents_as_envs=True)
    flat.reset(seed=5)
    sample = Sampler(flat, "tanh").sample(parameters.view(150, 4))
    assert sample.actions.shape == sample.draws.shape == (150, 2) and sample.log_probs.shape == (150,)
    for name in FIELDS:
        assert torch.equal(getattr(sample, name), getattr(expected, name).flatten(0, 1))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_parameters_that_are_not_finite_give_actions_that_the_environment_refuses(device, squash, greedy):
    inf, nan = torch.inf, torch.nan
    # Means of two heads, then their log standard deviations. Draws of the last overflow, but its mean does not.
    rows = [[0, 0, 0, 0], [nan, 0, 0, 0], [0, inf, 0, 0], [0, -inf, 0, 0], [0, 0, nan, 0], [0, 0, 0, inf]]
    rows += [[0, 0, -inf, 0], [0, 0, 1e3, 0]]
    env = gpu_vecenv.make(Script, len(rows), device, continuous=True, num_others=2)
    env.reset(seed=4)
    parameters = torch.zeros(len(rows), 3, 4, device=device)
    parameters[:, 1] = torch.tensor(rows, device=device)
    sample = Sampler(env, squash).sample(parameters, greedy=greedy)
    bad = [False] + [True] * 6 + [not greedy]
    assert sample.actions[:, 1].isnan().any(-1).tolist() == sample.draws[:, 1].isnan().any(-1).tolist() == bad
    assert sample.log_probs[:, 1].isnan().tolist() == sample.entropies[:, 1].isnan().tolist() == bad
    assert sample.actions[:, 1].isnan().sum() == sum(bad)  # the other head is drawn all the same
    for name in FIELDS:
        assert getattr(sample, name)[:, [0, 2]].isfinite().all()
    env.step(sample.actions)
    assert env.faults().tolist() == [Fault.NONFINITE_ACTION * wrong for wrong in bad]


def test_outputs_of_box_games_go_where_the_caller_wants_them(device, choosing):
    env = choosing(device, 50, UNIT)
    env.reset(seed=4)
    sampler, parameters = Sampler(env), gaussians(env, 1)
    fresh = sampler.sample(parameters)
    out = Sample(*(torch.full_like(getattr(fresh, name), 9) for name in FIELDS))
    pointers = [getattr(out, name).data_ptr() for name in FIELDS]
    assert sampler.sample(parameters, out=out) is out
    assert [getattr(out, name).data_ptr() for name in FIELDS] == pointers
    assert all(torch.equal(getattr(out, name), getattr(fresh, name)) for name in FIELDS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("draws", lambda x: None, r"out\.draws is a NoneType; expected a torch\.float32 tensor of shape \(50, 3, 2\)"),
        ("draws", lambda x: x.double(), r"out\.draws has dtype torch\.float64"),
        ("draws", lambda x: x[..., :1].contiguous(), r"out\.draws is \(50, 3, 1\)"),
        ("draws", lambda x: x.repeat_interleave(2, 0)[::2], r"out\.draws is .*contiguous"),
        ("draws", lambda x: x.to("meta"), r"out\.draws is .*on meta"),
        ("actions", lambda x: x.int(), r"out\.actions has dtype torch\.int32; expected torch\.float32"),
        ("actions", lambda x: x[:, :2].contiguous(), r"out\.actions is \(50, 2, 2\)"),
        ("log_probs", lambda x: x.to("meta"), r"out\.log_probs is .*on meta"),
    ],
)
def test_wrong_outputs_of_box_games_are_refused(device, choosing, name, change, message):
    env = choosing(device, 50, UNIT)
    env.reset(seed=4)
    sampler, parameters = Sampler(env), gaussians(env, 1)
    right = sampler.sample(parameters)
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.sample(parameters, out=dataclasses.replace(right, **{name: change(getattr(right, name))}))


def test_wrong_parameters_of_box_games_are_refused(device, choosing):
    env = choosing(device, 4, UNIT)
    sampler = Sampler(env)
    assert (sampler.num_parameters, sampler.num_logits) == (4, 0)
    parameters = torch.zeros(4, 3, 4, device=device)
    env.reset(seed=1)
    for wrong in (parameters.double(), parameters.int()):
        with pytest.raises(TypeError, match=f"parameters have dtype {wrong.dtype}; expected torch.float32"):
            sampler.sample(wrong)
    for shape in ((4, 3, 2), (4, 3, 5), (12, 4), (4, 3, 2, 2), (3, 4, 4)):
        with pytest.raises(ValueError, match=r"expected \(4, 3, 4\) on .*, one of each element before the other"):
            sampler.sample(torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match=r"parameters are .* on meta"):
        sampler.sample(parameters.to("meta"))
    with pytest.raises(TypeError, match="parameters are a ndarray"):
        sampler.sample(parameters.cpu().numpy())
    with pytest.raises(ConfigError, match='squash is \'sigmoid\'; expected "clip" or "tanh" or "beta"'):
        Sampler(env, squash="sigmoid")


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize(
    ("game", "config"),
    [
        ("pendulum", {}),
        ("pendulum", {"max_torque": 0.3}),
        ("continuous_mountain_car", {}),
        (Script, {"continuous": True, "num_others": 3}),
        *((f"simple_{name}", {"continuous_actions": True}) for name in ("spread", "tag", "adversary")),
    ],
)
def test_box_games_take_what_the_sampler_gives(device, game, config, squash):
    env = gpu_vecenv.make(game, 40, device, **config)
    env.reset(seed=1)
    sampler, parameters = Sampler(env, squash), gaussians(env, 1, 3.0)
    for _ in range(5):
        sample = sampler.sample(parameters)
        check_against_float64(sample, parameters, squash)
        env.step(sample.actions)
    assert not env.faults().any()


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("box", BOXES)
def test_both_devices_are_bitwise_equal_for_box_actions(choosing, box, squash, greedy):
    samples = []
    for device in ("cpu", "cuda"):
        env = choosing(device, 5000, BOXES[box])
        env.reset(seed=2**64 - 1)
        samples.append(Sampler(env, squash).sample(gaussians(env, 8, 5.0), greedy=greedy))
    for name in FIELDS:
        bits = [getattr(sample, name).cpu().numpy().tobytes() for sample in samples]
        assert bits[0] == bits[1]
