"""Metrics that are NaN or infinite are reported once, and kept with the run."""

import csv
import warnings
from dataclasses import dataclass

import pytest
import torch
from gymnasium.spaces import Discrete
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import Env, Field, FunctionManager
from gpu_vecenv.declare.env import i32
from gpu_vecenv.train.iteration_kernels import explained_variance_launch
from gpu_vecenv.train.metrics import NonFiniteMetrics
from gpu_vecenv.train.ppo import PPOConfig, explained_variance
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.trainer import PolicySpec, Trainer

RICH = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { ONCE s.length[0] = 6; }
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        io.rewards[i] = i == 1 ? math::from_bits(0x7f800000u) : io.action(i);
        io.truncations[i] = io.elapsed_steps >= s.length[0];
    }
}
HD void observe(State s, Io io) { FOR_AGENTS (i) io.obs[i][0] = 1; }
"""


@dataclass(frozen=True, kw_only=True)
class Rich(Env):
    """An agent that learns, and one whose rewards are infinite."""

    roles = {"worker": 1, "owner": 1}  # noqa: RUF012
    state = (Field("length", i32),)
    obs_dim = 1
    action_space = Discrete(2)


@pytest.fixture
def rich(tmp_path, monkeypatch):
    (tmp_path / "rich.cu").write_text(RICH)
    monkeypatch.setattr(Rich, "source", tmp_path / "rich.cu", raising=False)

    def trainer(iterations, device="cpu"):
        config = PPOConfig(total_steps=4 * 4 * iterations, num_steps=4, hidden_sizes=(8,))
        policies = {"worker": PolicySpec(), "owner": PolicySpec(train=False)}
        return Trainer(gpu_vecenv.make(Rich, 4, device), config, policies=policies)

    return trainer


EXPECTED = "iteration 2: return_owner is inf; rewards of the game are NaN or infinite"


def test_a_metric_that_is_not_finite_is_a_warning_once(rich, device):
    """Not in the first iteration, in which there are no returns yet."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert rich(5, device).train()["return_owner"] == float("inf")
    (warning,) = (str(one.message) for one in caught if one.category is RuntimeWarning)
    assert warning.startswith(EXPECTED)


@pytest.mark.filterwarnings("ignore:iteration . return_owner is inf")
def test_a_run_keeps_it_also_after_a_resume(rich, tmp_path):
    def kept():
        with (folder / "nonfinite.csv").open(newline="") as file:
            return [(row["iteration"], row["metric"], row["value"]) for row in csv.DictReader(file)]

    folder, config = tmp_path / "run", RunConfig(episodes=1, best_episodes=0, checkpoint_seconds=0, keep=9)
    for iterations in (3, 5):
        trainer = rich(5)
        trainer.train_iteration = limited(trainer, iterations)
        with pytest.raises(KeyboardInterrupt) if iterations == 3 else warnings.catch_warnings():
            run(trainer, folder, config, resume=iterations > 3)
        assert kept() == [("2", "return_owner", "inf")]
    for checkpoint in (folder / "checkpoints").glob("iteration-0000000[2-5].*"):
        checkpoint.unlink()
    run(rich(1), folder, config, resume=True)  # before there was one
    assert not (folder / "nonfinite.csv").exists()


def limited(trainer, iterations):
    """``train_iteration``, interrupted after so many."""
    original = trainer.train_iteration

    def train_iteration():
        if trainer.iteration == iterations:
            raise KeyboardInterrupt
        return original()

    return train_iteration


def test_each_metric_is_found_once_with_its_likely_cause():
    find, first = NonFiniteMetrics(["return_known"]), {"iteration": 7, "first_episodes": 1.0, "weights": "ab"}
    nan = float("nan")
    assert find(first | {"return_a": nan, "entropy_a": 1.0}) == []
    found = find(first | {"first_episodes": 0.0, "return_known": nan, "return_a": nan, "explained_variance_a": -nan})
    assert [(one.iteration, one.metric) for one in found] == [(7, "return_a"), (7, "explained_variance_a")]
    assert "rewards of the game" in str(found[0]) and "squares overflow" in str(found[1])
    assert find(first | {"return_a": nan, "first_episodes": 0.0, "x": float("inf")})[0].metric == "x"


def by_kernel(returns, errors, active):
    """Explained variance of (T, E) samples."""
    indices, out = torch.arange(returns.numel(), device=returns.device), torch.zeros((), device=returns.device)
    functions = FunctionManager(returns.device)
    explained_variance_launch(functions, indices, *(x.contiguous() for x in (returns, errors, active)), out=out)()
    return out


WAYS = {"torch": explained_variance, "kernel": by_kernel}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", [0.0, 3.3, -1e9])
def test_explained_variance_of_returns_that_do_not_vary_is_one_or_zero(level, way, device):
    explained_variance = WAYS[way]
    active = torch.arange(1000, device=device).view(10, 100) % 3 > 0
    returns = torch.where(active, level, torch.nan)
    generator = torch.Generator().manual_seed(1)
    wrong = torch.randn(10, 100, generator=generator).to(device) * max(abs(level), 1)
    assert explained_variance(returns, torch.zeros_like(returns), active) == 1
    assert explained_variance(returns, wrong, active) == 0
    varied = wrong + level
    assert explained_variance(varied, torch.zeros_like(varied), active) == 1
    assert explained_variance(varied, varied, active) == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
@pytest.mark.parametrize("way", WAYS)
def test_explained_variance_says_that_returns_are_not_finite(way, value):
    trainer = Trainer(leaving("cpu"), SMALL)
    trainer.begin_iteration()
    data = trainer.rollout
    data.returns[:, 0] = value
    assert WAYS[way](data.returns, data.advantages, data.active[:-1]).isnan()
