"""Rewards shaped in Python: bitwise equal to those of a game, learned from, logged beside the game's own, resumed."""

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from games.probes import Choice, Target
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import Env, Field, PPOConfig, Trainer
from gpu_vecenv.declare.field import f32
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.staggered_starts import stagger
from gpu_vecenv.train.user_functions import qualified_name

WALKERS = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { FOR_AGENTS(i) s.x[i] = 0.3f * (float)(i + 1); }
HD void step(State s, Io io) {
    FOR_AGENTS(i) {
        const float before = s.x[i], after = before + (io.action(i) == 1 ? 0.7f : -0.6f);
        s.x[i] = after;
        io.terminations[i] = after > 2.0f;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS - i;
        io.rewards[i] = 0.1f * after;
        if (SHAPED) {
            const float gain = (after * after - 0.9f * (before * before)) * (io.action(i) == 1 ? 3.0f : 1.0f);
            const float end = io.terminations[i] ? 0.5f : 0.0f, limit = io.truncations[i] ? 0.25f : 0.0f;
            io.rewards[i] = io.rewards[i] + gain - end + limit;
        }
    }
}
HD void observe(State s, Io io) { FOR_AGENTS(i) io.obs[i][0] = s.x[i]; }
"""


@dataclass(frozen=True, kw_only=True)
class Walkers(Env):
    """Three walkers, the last of which leave first; it pays what ``shaped`` adds if ``shaped``."""

    max_steps: int = 7
    shaped: bool = False
    roles = {"slow": 1, "fast": 2}  # noqa: RUF012
    state = (Field("x", f32, ("num_agents",)),)
    obs_dim = 1
    action_space = Discrete(2)


def shaped(t):
    """The same sum in the same order, so that no bit differs."""
    before, after = t.obs[..., 0], t.next_obs[..., 0]
    gain = (after * after - 0.9 * (before * before)) * torch.where(t.actions == 1, 3.0, 1.0)
    return t.rewards + gain - torch.where(t.terminations, 0.5, 0.0) + torch.where(t.truncations, 0.25, 0.0)


def same(t):
    """The game's own."""
    return t.rewards


@pytest.fixture
def walkers(tmp_path, monkeypatch):
    (tmp_path / "walkers.cu").write_text(WALKERS)
    monkeypatch.setattr(Walkers, "source", tmp_path / "walkers.cu", raising=False)

    def make(device, reward=None, **options):
        env = gpu_vecenv.make(Walkers, 6, device, autoreset_mode="next_step", shaped=options.pop("pays", False))
        return Trainer(env, SMALL, seed=4, reward=reward, **options)

    return make


def learned(trainer):
    """Weights and Adam's state."""
    return {
        name: x.detach().clone() for name, x in trainer.state()[0].items() if name.startswith(("policy.", "optimizer."))
    }


def test_a_reward_is_bitwise_equal_to_that_of_a_game(walkers, device):
    """Walkers have left, episodes have ended, and steps that only reset have been taken."""
    by_game, by_function, unshaped = walkers(device, pays=True), walkers(device, shaped), walkers(device)
    for _ in range(3):
        for trainer in (by_game, by_function, unshaped):
            trainer.train_iteration()
        active = by_game.rollout.active[:-1]
        assert by_function.rollout.rewards.where(active, 0).equal(by_game.rollout.rewards.where(active, 0))
        assert equal_bits(learned(by_function), learned(by_game))
    assert (
        not active.all() and active.any(2).logical_not().any() and not equal_bits(learned(unshaped), learned(by_game))
    )


def test_the_games_own_rewards_are_bitwise_those_without_a_function(device):
    trainers = [Trainer(leaving(device), SMALL, seed=5, reward=reward) for reward in (None, same)]
    for _ in range(3):
        plain, given = (trainer.train_iteration() for trainer in trainers)
    assert equal_bits(*map(learned, trainers))
    added = {name for name in given if name not in plain and not name.endswith("_time_fraction")}  # of other launches
    assert added == {"shaped_reward_tagger", "shaped_reward_runner"}


def test_a_policy_learns_what_the_function_pays_and_is_measured_by_the_game(device):
    """Choice 1 is paid 1 and choice 0 costs 1: the function pays the opposite."""
    config = PPOConfig(
        total_steps=40 * 8 * 32, num_steps=8, num_minibatches=2, learning_rate=0.02, entropy_coefficient=0.0
    )
    env = gpu_vecenv.make(Choice, 32, device)
    trainer = Trainer(env, config, seed=1, reward=lambda t: -t.rewards)
    metrics = trainer.train()
    assert metrics["return_agent"] == -metrics["shaped_reward_agent"] < -0.9
    assert trainer.evaluate(100, greedy=True)["return_agent"] == -1


@pytest.mark.parametrize("game", [Walkers, Target])
def test_the_function_gets_what_a_twin_environment_takes_and_gives(game, walkers, device):
    seen = []

    def record(t):
        seen.append(type(t)(*(x.clone() for x in t)))
        return t.rewards

    env = gpu_vecenv.make(game, 5, device, autoreset_mode="next_step")
    trainer, twin = Trainer(env, SMALL, seed=4, reward=record, graphs=False), env.like()
    _, info = twin.reset(seed=4)
    stagger(twin)
    obs = twin.observe()
    assert len(seen) == 1 and not seen.pop().active.any()  # the first call sees what is returned, before any step
    for _ in range(2):
        trainer.begin_iteration()
        for t in seen:
            assert t.obs.equal(obs) and t.active.equal(info["active"])
            obs, rewards, terminations, truncations, info = twin.step(t.actions)
            assert t.next_obs.equal(obs) and t.rewards[t.active].equal(rewards[t.active])
            assert t.terminations.equal(terminations) and t.truncations.equal(truncations)
        assert len(seen) == SMALL.num_steps
        seen.clear()
    if game is Target:
        assert (t.actions.abs() <= 1).all() and not t.actions.equal(trainer.rollout.draws[-1])


def test_rewards_of_agents_that_are_not_active_count_nowhere(walkers, device):
    def poisoned(t):
        return torch.where(t.active, shaped(t), torch.nan)

    clean, given = walkers(device, shaped), walkers(device, poisoned)
    for _ in range(3):
        clean.train_iteration(), given.train_iteration()
    assert equal_bits(learned(clean), learned(given))
    assert given.rollout.rewards[~given.rollout.active[:-1]].eq(0).all()


def test_the_mean_per_agent_step_is_logged_for_each_role_beside_the_games_return(walkers, device):
    plain, given = walkers(device, pays=True), walkers(device, shaped)
    for _ in range(2):
        metrics = given.train_iteration()
        returns = plain.train_iteration()
    rewards, active = given.rollout.rewards.double(), given.rollout.active[:-1]
    for role, agents in given.env.game.layout.role_slices.items():
        expected = rewards[:, :, agents][active[:, :, agents]].mean().item()
        # A float64 sum of 100 numbers in another order.
        assert metrics[f"shaped_reward_{role}"] == pytest.approx(expected, rel=1e-12)
        assert metrics[f"return_{role}"] != returns[f"return_{role}"]
    assert not any(name.startswith(("active_", "shaped")) for name in returns)


@pytest.mark.parametrize(
    "reward, error, words",
    [
        (3, TypeError, "reward is a int; expected a function, Transition -> tensor"),
        (lambda t: 1.0, TypeError, r"<lambda> returned a float; expected a torch tensor"),
        (lambda t: t.rewards.double(), TypeError, r"returned torch.float64; expected torch.float32"),
        (lambda t: t.terminations, TypeError, r"returned torch.bool; expected torch.float32"),
        (
            lambda t: t.rewards.sum(1),
            ValueError,
            r"a tensor \(6,\) on .* for each agent, .* = \(6, 3\)",
        ),
        (lambda t: t.obs, ValueError, r"a tensor \(6, 3, 1\) on"),
        (lambda t: t.rewards + "1", ConfigError, r"<lambda> raised TypeError: .*str.* \(.*test_reward\.py, line \d+\)"),
        (lambda t: t.nonesuch, ConfigError, r"<lambda> raised AttributeError: .* \(.*test_reward\.py, line \d+\)"),
        (lambda t: t.rewards.to("meta"), ValueError, "on meta; expected a reward for each agent"),
        (lambda t: t.rewards.add_(1), ValueError, r"wrote to rewards.* of its transition; .* clone\(\)"),
        (lambda t: (t.next_obs[..., 0].zero_(), t.rewards)[1], ValueError, "wrote to obs, next_obs of its transition"),
    ],
)
def test_a_function_that_gives_no_rewards_is_refused_when_the_trainer_is_made(reward, error, words, walkers, device):
    with pytest.raises(error, match=words):
        walkers(device, reward)


def test_rewards_that_are_not_finite_are_the_functions_fault(walkers, device):
    trainer = walkers(device, lambda t: t.rewards / 0)
    with pytest.raises(NonFiniteError, match=r"rewards that .*<lambda> returned are not finite"):
        trainer.train_iteration()


def test_a_run_is_resumed_with_the_same_function_alone(walkers, device, tmp_path):
    first = walkers(device, shaped)
    first.train_iteration()
    first.save(tmp_path / "a.safetensors")
    name = qualified_name(shaped)
    for reward in (None, same):
        found = None if reward is None else qualified_name(same)
        with pytest.raises(ConfigError, match=f"its reward is {name!r}, this trainer's {found!r}"):
            walkers(device, reward).load(tmp_path / "a.safetensors")
    walkers(device).save(tmp_path / "plain.safetensors")
    with pytest.raises(ConfigError, match=f"its reward is None, this trainer's {name!r}"):
        first.load(tmp_path / "plain.safetensors")
    again = walkers(device, shaped)
    assert again.load(tmp_path / "a.safetensors")["reward"] == name
    first.train_iteration(), again.train_iteration()
    assert equal_bits(learned(first), learned(again))


def test_functions_are_named_by_what_is_called():
    class Weighted:
        def __call__(self, t):
            return t.rewards

    here = __name__
    assert qualified_name(shaped) == f"{here}.shaped" == qualified_name(functools.partial(functools.partial(shaped)))
    assert qualified_name(Weighted()).endswith(".<locals>.Weighted") and qualified_name(math.sin) == "math.sin"


@pytest.mark.gpu
def test_a_captured_function_gives_the_same_bits_as_without_graphs(walkers):
    weight = torch.ones((), device="cuda")

    def weighted(t):
        return weight * shaped(t)

    graphed, eager = walkers("cuda", weighted), walkers("cuda", weighted, graphs=False)
    for iteration in range(4):
        weight.fill_(iteration + 1)  # a tensor is read at each replay
        graphed.train_iteration(), eager.train_iteration()
        assert graphed.rollout.rewards.equal(eager.rollout.rewards)
        assert equal_bits(learned(graphed), learned(eager))
    assert graphed._graphed_iteration.graph is not None


@pytest.mark.gpu
def test_a_function_that_reads_on_the_host_trains_without_a_graph(walkers):
    def reads(t):
        return t.rewards + float(t.rewards.sum())

    trainer = walkers("cuda", reads)
    trainer.train_iteration()
    trainer.train_iteration()  # in stages, as the whole cannot be captured
    with pytest.warns(UserWarning, match="the rollout cannot be captured as a CUDA graph"):
        trainer.train_iteration()
    assert trainer.iteration == 3
