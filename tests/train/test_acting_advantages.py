"""Advantages of agents that act in some steps only, in torch and by the kernel, against decisions in float64."""

import numpy as np
import pytest
import torch
from games.race import Race
from oracles.gae import of_decisions, of_deltas, stretches
from support.advantages import FACTORS, JUNK, Given
from support.emulated_cuda import EmulatedCudaBackend

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.learner_kernels import advantage_launch
from gpu_vecenv.train.ppo import advantages

NUM_STEPS, NUM_ENVS, AGENTS = 19, 150, 2  # more steps than the kernel loads at once


class General(Race):
    """The same with rewards of any sum."""

    zero_sum = False


General.source = Race.source_path()


def random_flags(seed, zero_sum):
    """Random arguments, (step, environment, agent), and who acts in each step and in the one after the last.

    Players of a zero-sum game end together.
    """
    random = np.random.default_rng(seed)
    shape = NUM_STEPS, NUM_ENVS, AGENTS
    kinds = random.choice(["continue", "terminate", "truncate", "inactive"], shape, p=[0.85, 0.05, 0.05, 0.05])
    if zero_sum:
        kinds[:] = kinds[..., :1]
    rewards, values, next_values = random.normal(size=(3, *shape)).astype(np.float32)
    active = kinds != "inactive"
    goes_on = (kinds[:-1] == "continue") & active[1:]
    next_values[:-1][goes_on] = values[1:][goes_on]  # elsewhere they are of a state that has no row
    next_values[kinds == "terminate"] = rewards[~active] = JUNK
    acting = random.random((NUM_STEPS + 1, NUM_ENVS, AGENTS)) < 0.5
    return Given(rewards, values, next_values, kinds == "terminate", kinds == "truncate", active), acting


def for_players(given, acting):
    """Values of a zero-sum game: those of agents that do not act, where the other one does, are minus the other's."""
    values, next_values = given.values.copy(), given.next_values.copy()
    for numbers, source, acts in ((values, given.values, acting[:-1]), (next_values, given.next_values, acting[1:])):
        for agent in range(AGENTS):
            other = 1 - agent
            waits = ~acts[..., agent] & acts[..., other]
            numbers[..., agent][waits] = -source[..., other][waits]
    return given._replace(values=values, next_values=next_values)


def expected_of(given, acting, factors):
    """By the oracle: estimates and bounds, (step, environment, agent)."""
    exact, bounds = np.zeros((2, *given.rewards.shape))
    numbers = [x.astype(np.float64) for x in given[:3]]
    numbers[2][given.terminations] = 0
    for env, agent in np.ndindex(NUM_ENVS, AGENTS):
        for steps in stretches(*(x[:, env, agent] for x in given[3:])):
            at = steps, env, agent
            exact[at], bounds[at] = of_decisions(*(x[at] for x in numbers), acting[at], *factors[agent])
    return exact, bounds


def by_torch(given, acting, factors, zero_sum, device):
    gammas, lambdas = torch.tensor(factors, device=device).unbind(1)
    tensors = (torch.tensor(x, device=device) for x in given)
    acting = torch.tensor(acting, device=device)
    found = advantages(*tensors, gammas, lambdas, acting, zero_sum)
    return found.cpu().numpy()


def by_kernel(given, acting, factors, zero_sum, device):
    env = gpu_vecenv.make(Race if zero_sum else General, NUM_ENVS, device)
    gammas, lambdas = torch.tensor(factors, device=device).T.contiguous()
    tensors = [torch.tensor(x, device=device) for x in given]
    out = torch.full_like(tensors[0], torch.nan), torch.full_like(tensors[0], torch.nan)
    advantage_launch(env, *tensors, gammas, lambdas, torch.tensor(acting, device=device), out=out)()
    values = for_players(given, acting).values if zero_sum else given.values
    assert (out[1].cpu().numpy() == out[0].cpu().numpy() + values).all()
    return out[0].cpu().numpy()


@pytest.mark.parametrize("zero_sum", [False, True])
@pytest.mark.parametrize("pair", [(0, 2), (1, 4), (3, 0)], ids=lambda pair: str([FACTORS[k] for k in pair]))
@pytest.mark.parametrize("by", [by_torch, by_kernel])
def test_estimates_of_random_flags(by, pair, zero_sum, device, random_seed):
    given, acting = random_flags(random_seed, zero_sum)
    factors = [FACTORS[k] for k in pair]
    exact, bounds = expected_of(for_players(given, acting) if zero_sum else given, acting, factors)
    found = by(given, acting, factors, zero_sum, device)
    assert (np.abs(found - exact) <= bounds).all()  # the bound is 0, like the estimate, where nobody was active


@pytest.mark.parametrize("zero_sum", [False, True])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_emulated_threads_are_bitwise_equal_to_the_host(order, zero_sum, monkeypatch, random_seed):
    monkeypatch.setenv("EMULATED_THREADS", order)
    given, acting = random_flags(random_seed, zero_sum)
    found = by_kernel(given, acting, FACTORS[:2], zero_sum, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        emulated = by_kernel(given, acting, FACTORS[:2], zero_sum, "cpu")
    assert (found == emulated).all()


def test_agents_that_always_act_have_the_estimates_of_other_games(device, random_seed):
    given, acting = random_flags(random_seed, False)
    everywhere, factors = np.ones_like(acting), FACTORS[:2]
    gammas, lambdas = torch.tensor(factors, device=device).unbind(1)
    usual = advantages(*(torch.tensor(x, device=device) for x in given), gammas, lambdas).cpu().numpy()
    for zero_sum in (False, True):
        assert (by_torch(given, everywhere, factors, zero_sum, device) == usual).all()


def test_the_oracle_by_hand():
    rewards, values, next_values = [1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [20.0, 40.0, 80.0]
    exact = of_decisions(rewards, values, next_values, [True, False, True], 0.5, 0.25).exact
    last = 4 + 80 / 2 - 40
    assert exact.tolist() == [1 + 2 / 2 + 40 / 4 - 10 + last / 4 / 4, 2 + 40 / 2 - 20 + last / 2 / 4, last]
    always = of_decisions(rewards, values, next_values, [True] * 3, 0.5, 0.25).exact
    assert always == pytest.approx(of_deltas(rewards, values, next_values, 0.5, 0.25).exact, abs=1e-12)


def test_the_reward_of_the_others_move_arrives_by_hand(device):
    """Agent 1 moves second and wins; agent 0, which moved before, loses at that step, in which it does not act."""
    shape = 2, 1, 2
    rewards, values, next_values = np.zeros((3, *shape), np.float32)
    rewards[1, 0] = [-1, 1]
    terminations, active = np.zeros(shape, bool), np.ones(shape, bool)
    terminations[1] = True
    given = Given(rewards, values, next_values, terminations, np.zeros(shape, bool), active)
    acting = np.array([[[True, False]], [[False, True]], [[False, False]]])
    for zero_sum in (False, True):
        found = by_torch(given, acting, [(0.5, 0.0)] * 2, zero_sum, device)
        assert found[:, 0].tolist() == [[-0.5, 0], [-1, 1]]
        values[1, 0] = next_values[0, 0] = [7, 0]  # between two decisions: a value that must not count
        assert by_torch(given, acting, [(0.5, 0.0)] * 2, zero_sum, device)[0, 0, 0] == -0.5
        values[1, 0] = next_values[0, 0] = 0


def test_the_bootstrap_changes_sign_by_hand(device):
    """A rollout ends after agent 0's move: its value is minus that of agent 1, whose turn it is."""
    shape = 1, 1, 2
    next_values = np.array([[[100, 3]]], np.float32)
    zeros, flags = np.zeros(shape, np.float32), np.zeros(shape, bool)
    given = Given(zeros, zeros, next_values, flags, flags, ~flags)
    acting = np.array([[[True, False]], [[False, True]]])
    assert by_torch(given, acting, [(0.5, 1.0)] * 2, True, device)[0, 0].tolist() == [-1.5, 1.5]
    assert by_torch(given, acting, [(0.5, 1.0)] * 2, False, device)[0, 0].tolist() == [50, 1.5]
