"""Advantage estimates against their definition: every pattern of a few steps, and real episodes in every mode."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from games.script import Script
from oracles.gae import of_deltas, of_returns, stretches
from support.advantages import ALIVE, FACTORS, JUNK, Given, episodes_of, patterned

import gpu_vecenv
from gpu_vecenv.train.ppo import advantages


def estimated(given, gamma, gae_lambda, device):
    found = advantages(*(torch.tensor(x, device=device) for x in given), gamma, gae_lambda)
    assert found.dtype == torch.float32 and found.shape == given.rewards.shape
    return found.cpu().numpy()


# Every pattern


@pytest.mark.parametrize(("gamma", "gae_lambda"), FACTORS)
@pytest.mark.parametrize(("kinds", "horizon"), [(ALIVE, 8), ((*ALIVE, "both", "inactive"), 6)], ids=["alive", "all"])
def test_every_pattern_of_a_few_steps(kinds, horizon, gamma, gae_lambda, device):
    given = patterned(kinds, horizon)
    assert given.rewards.shape == (horizon, len(kinds) ** horizon)
    expected, bounds = np.zeros((2, *given.rewards.shape))
    for column, steps, rows in episodes_of(given):
        expected[steps, column], bounds[steps, column] = of_deltas(*rows, gamma, gae_lambda)
    found = estimated(given, gamma, gae_lambda, device)
    assert (np.abs(found - expected) <= bounds).all()  # the bound is 0, like the estimate, where nobody was active
    several = Given(*(x.reshape(horizon, len(kinds), -1, 1) for x in given))
    assert (estimated(several, gamma, gae_lambda, device).reshape(found.shape) == found).all()


def test_each_agent_may_have_factors_of_its_own(device):
    given = Given(*(x.reshape(6, -1, 3) for x in patterned(ALIVE, 6)))
    factors = [(1.0, 0.5), (0.75, 1.0), (0.5, 0.25)]  # they and their products are exact, so the bits are the same
    gammas, lambdas = torch.tensor(factors, device=device).unbind(1)
    found = estimated(given, gammas, lambdas, device)
    for agent, alone in enumerate(factors):
        assert (found[..., agent] == estimated(given, *alone, device)[..., agent]).all()


def test_estimates_by_hand(device):
    """With gamma and lambda of 1/2, four agents: in the middle step one goes on, others end or are not active."""
    rewards, values, next_values = ([[row] * 4 for row in rows] for rows in ([1, 2, 4], [10, 20, 40], [20, 40, 80]))
    rewards[1][3] = next_values[1][1] = JUNK
    terminations, truncations, active = np.zeros((3, 3, 4), bool)
    terminations[1, 1] = truncations[1, 2] = True
    active[:] = True
    active[1, 3] = False
    given = Given(*(np.float32(x) for x in (rewards, values, next_values)), terminations, truncations, active)
    expected = [[1.75, 1 - 18 / 4, 1.5, 1.0], [3, 2 - 20, 2, 0], [4, 4, 4, 4]]
    assert estimated(given, 0.5, 0.5, device).tolist() == expected


@pytest.mark.parametrize(("gamma", "gae_lambda"), FACTORS)
def test_the_oracle_agrees_with_the_mixture_of_returns(gamma, gae_lambda):
    for _, _, rows in episodes_of(patterned(ALIVE, 7)):
        exact, bounds = of_deltas(*rows, gamma, gae_lambda)
        # Float64 rounds 2^29 times finer. A part of the mixture meets two sums of up to 7, the roundings of three
        # powers and of 1 - lambda and three products: less than 30, where the bounds have room for 5 at least.
        other = of_returns(*rows, gamma, gae_lambda)
        assert (np.abs(exact - other) <= 8 * bounds / 2**29).all()


def test_the_oracle_by_hand():
    given = [1.0, 2.0, 4.0], [10.0, 20.0, 40.0], [20.0, 40.0, 0.0]  # deltas 1, 2 and -36
    assert of_deltas(*given, 0.5, 0.5).exact.tolist() == [1 + 2 / 4 - 36 / 16, 2 - 36 / 4, -36]
    assert of_deltas(*given, 0.5, 0.0).exact.tolist() == [1, 2, -36]
    assert of_deltas(*given, 0.5, 1.0).exact.tolist() == [1 + 2 / 2 + 4 / 4 - 10, 2 + 4 / 2 - 20, 4 - 40]
    terminations, truncations, active = ([c != "." for c in row] for row in ("..T...T.", "....X...", "YYYYY.YY"))
    assert stretches(terminations, truncations, active) == [slice(0, 3), slice(3, 5), slice(6, 7), slice(7, 8)]


# Real episodes

NUM_STEPS, NUM_ENVS, LEADS, LEAVE = 40, 9, 2, 2
GAME = {"num_leads": LEADS, "num_others": 3, "leave": LEAVE, "max_steps": 6}
AGENTS = LEADS + 3


def actions_at(environment, episode, time, agent):
    """Any function of these four: then episodes are the same in all modes."""
    return (environment + 3 * episode + time * time + agent * (1 + time)) % 4


def value_of(obs):
    """A made-up value of observations (…, 6), float32. Summed in one order, whatever the shape."""
    weights = np.random.default_rng(5).normal(size=6)
    return sum(weights[k] * obs[..., k].astype(np.float64) for k in range(6)).astype(np.float32)


def played(mode, device):
    """NUM_STEPS steps: the arguments of ``advantages``, and the observations, (step, environment, agent, 6)."""
    env = gpu_vecenv.make(Script, NUM_ENVS, device, autoreset_mode=mode, **GAME)
    obs, info = env.reset(seed=7)
    episode, environment, agent = np.full((NUM_ENVS, 1), -1), np.arange(NUM_ENVS)[:, None], np.arange(AGENTS)
    rows, observations, last = [], [], None
    for _ in range(NUM_STEPS):
        before, active = obs.cpu().numpy(), info["active"]
        observations.append(before)
        time = before[:, :1, 1].astype(int)
        episode = episode + (time == 0)
        actions = torch.tensor(actions_at(environment, episode, time, agent), device=env.device)
        obs, *outcome, info = env.step(actions)
        led_to = obs
        if mode == "same_step":
            led_to = torch.where(info["_final_obs"][..., None], info["final_obs"], obs)
        if mode == "disabled":
            obs, info = env.reset(mask=~info["active"].any(1))
        rows.append([value_of(before), value_of(led_to.cpu().numpy()), active, *outcome])
        last = value_of(obs.cpu().numpy())
    assert env.faults().eq(0).all()
    columns = (np.stack([np.asarray(torch.as_tensor(x).cpu()) for x in column]) for column in zip(*rows, strict=True))
    values, next_values, active, rewards, terminations, truncations = columns
    if mode == "next_step":  # no other observations are needed than those of the next row
        assert (next_values == np.append(values[1:], last[None], axis=0)).all()
    return Given(rewards, values, next_values, terminations, truncations, active), np.stack(observations)


class Episode(NamedTuple):
    """One agent's part of one episode, as the script has it."""

    key: tuple[int, int, int]  # environment, episode, agent
    steps: slice  # of the trajectory
    rows: list[np.ndarray]  # rewards, values, next values; float64
    kind: str


def episodes_by_script(observations):
    """All episodes of a trajectory, cut and made anew from the script's words in the observations of their starts.

    Flags, activity and later observations of the trajectory are not looked at.
    """
    for environment in range(NUM_ENVS):
        starts = np.flatnonzero(observations[:, environment, 0, 1] == 0)
        for (episode, start), agent in itertools.product(enumerate(starts), range(AGENTS)):
            _, _, ends, truncates, mark, _ = observations[start, environment, agent]
            leaves = agent >= LEADS and ends > LEAVE
            length = LEAVE if leaves else int(ends)
            steps = min(length, NUM_STEPS - start)
            said = [0, *(actions_at(environment, episode, time, agent) for time in range(steps))]
            seen = [[agent + 1, time, ends, truncates, mark, said[time]] for time in range(steps + 1)]
            values = value_of(np.array(seen)).astype(np.float64)
            kind = "leaves" if leaves else "truncates" if truncates else "terminates"
            next_values = values[1:].copy()
            if steps < length:
                kind = "unfinished"
            elif kind != "truncates":
                next_values[-1] = 0
            rewards = 10.0 * (agent + 1) + np.arange(1, steps + 1)
            yield Episode(
                (environment, episode, agent), slice(start, start + steps), [rewards, values[:-1], next_values], kind
            )


@pytest.mark.parametrize(("gamma", "gae_lambda"), FACTORS)
def test_real_episodes_in_every_autoreset_mode(gamma, gae_lambda, device):
    finished = {}
    for mode in ("next_step", "same_step", "disabled"):
        given, observations = played(mode, device)
        found = estimated(given, gamma, gae_lambda, device)
        expected, bounds = np.zeros((2, NUM_STEPS, NUM_ENVS, AGENTS))
        of_mode, kinds = {}, []
        for (environment, episode, agent), steps, rows, kind in episodes_by_script(observations):
            at = steps, environment, agent
            expected[at], bounds[at] = of_deltas(*rows, gamma, gae_lambda)
            kinds.append(kind)
            if kind != "unfinished":
                of_mode[environment, episode, agent] = found[at].tolist()
        wrong = np.argwhere(np.abs(found - expected) > bounds)  # the bound is 0 at steps of no episode
        assert len(wrong) == 0, f"{mode}: step, environment, agent {wrong[0]}"
        assert all(kinds.count(kind) > 5 for kind in ("leaves", "truncates", "terminates", "unfinished"))
        assert (given.active.sum((1, 2)) < NUM_ENVS * AGENTS).any()
        finished[mode] = of_mode
    # The next_step mode spends a step on each reset and so gets less far. What is the same episode has the same bits.
    assert finished["same_step"] == finished["disabled"]
    common = finished["next_step"].keys() & finished["same_step"].keys()
    assert len(common) == len(finished["next_step"]) > 200
    assert all(finished["next_step"][key] == finished["same_step"][key] for key in common)
