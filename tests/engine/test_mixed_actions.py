"""Roles with a Box beside roles with discrete actions: rules, validation, casts and draws in one float32 tensor."""

import numpy as np
import pytest
import torch
from games.economy import Economy
from oracles.economy import EconomyOracle
from support.actions import beyond_bounds
from support.bitwise import equal_bits

from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.compile.device import resolve_device
from gpu_vecenv.engine.actions import ActionValidator
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import Fault
from gpu_vecenv.errors import InvalidActionError

CONFIGS = [{}, {"num_rates": 1, "num_workers": 5, "num_clerks": 2, "length": 6}, {"num_rates": 4, "num_clerks": 0}]
PLANNER, CLERK = 3, 4  # agents of the default configuration


def reset_by_oracle(oracle, env, envs):
    """Begin episodes of the oracle from the environment's places."""
    places = env.state["place"].cpu().numpy().reshape(len(oracle.place), -1)
    assert ((places >= 0) & (places < oracle.game.length)).all()
    oracle.begin(envs, places[envs])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_every_step_is_that_of_the_oracle(mode, config, device):
    game, num_envs = Economy(**config), 60
    env, oracle = VecEnv(game, num_envs, device, autoreset_mode=mode), EconomyOracle(game, num_envs)
    obs, info = env.reset(seed=3)
    reset_by_oracle(oracle, env, np.arange(num_envs))
    begun = 0
    for _ in range(40):
        assert equal_bits(obs, oracle.observations())
        assert equal_bits(info["active"], oracle.active) and equal_bits(info["action_mask"], oracle.action_masks())
        actions = env.sample_actions()
        assert actions.dtype == torch.float32 and actions.shape == (num_envs, game.num_agents, max(2, game.num_rates))
        planner = slice(game.num_workers, game.num_workers + 1)
        actions[:, planner] = beyond_bounds(actions[:, planner])
        ended = ~oracle.active.any(1)
        expected = oracle.step(actions.cpu().numpy())
        over = ~oracle.active.any(1)
        final = oracle.observations()
        obs, *outputs, info = env.step(actions)
        if mode == "next_step":
            over = ended
            for array in expected:
                array[ended] = 0
        assert all(equal_bits(found, array) for found, array in zip(outputs, expected, strict=True))
        if mode == "same_step":
            assert equal_bits(info["_final_obs"].view(num_envs, -1)[:, 0], over)
            assert equal_bits(info["final_obs"].view(final.shape).cpu()[over], torch.tensor(final[over]))
        if mode == "disabled":
            obs, info = env.reset(mask=torch.tensor(over, device=env.device))
        reset_by_oracle(oracle, env, np.flatnonzero(over))
        begun += over.sum()
    assert begun > 3 * num_envs and env.faults().eq(0).all()


def test_random_actions_are_uniform_per_role(device):
    env = VecEnv(Economy(), 20_000, device)
    env.reset(seed=8)
    env.state["place"].fill_(1)
    env.observe()
    actions = env.sample_actions().cpu()
    for agent, head, size in [(0, 0, 3), (1, 1, 2), (CLERK, 0, 4)]:
        counts = actions[:, agent, head].long().bincount(minlength=size)
        # Six standard deviations of a binomial; the draw is fixed.
        assert len(counts) == size and ((counts - 20_000 / size).abs() < 6 * (20_000 / size) ** 0.5).all()
    assert actions[:, 0, 2].eq(0).all() and actions[:, CLERK, 1:].eq(0).all()  # numbers that the role lacks
    low, high = torch.tensor(env.game.layout.action.bounds["planner"])
    rates = (actions[:, PLANNER] - low) / (high - low)
    assert ((rates >= 0) & (rates <= 1)).all()
    # The mean of 20,000 uniform numbers has a standard deviation of 1 / sqrt(12 * 20,000) = 1 / 490; six of them.
    assert ((rates.mean(0) - 0.5).abs() < 6 / 490).all()


# Agent, number, value, and the fault that it is.
NAN, INF = float("nan"), float("inf")
VALUES = [
    *((agent, 0, value, Fault.INVALID_ACTION) for agent in (1, CLERK) for value in (-1, 4, 0.5, 2e9, NAN, INF, -INF)),
    (1, 1, 2, Fault.INVALID_ACTION),
    (1, 1, -0.25, Fault.INVALID_ACTION),
    (1, 0, 0, Fault.INVALID_ACTION),  # masked
    (1, 1, 1, Fault.INVALID_ACTION),  # masked
    (1, 0, -0.0, Fault.INVALID_ACTION),
    (1, 1, -0.0, 0),
    (1, 0, 2, 0),
    (CLERK, 0, 3, 0),
    (PLANNER, 0, NAN, Fault.NONFINITE_ACTION),
    (PLANNER, 2, NAN, Fault.NONFINITE_ACTION),
    *((PLANNER, 1, value, 0) for value in (0.5, -INF, INF, 1e9)),
    *((agent, number, NAN, 0) for agent, number in ((1, 2), (CLERK, 1), (CLERK, 2))),  # numbers that the role lacks
]


@pytest.mark.parametrize(("agent", "number", "value", "fault"), VALUES)
def test_numbers_are_validated_by_role_on_device_and_host(agent, number, value, fault, device):
    envs = [VecEnv(Economy(), 3, device, validate=validate) for validate in ("async", "sync")]
    for env in envs:
        env.reset(seed=1)
        env.state["place"].zero_()  # no one can move left, or work
        env.observe()
    actions = torch.zeros((3, 5, 3), device=device)
    actions[:, :3, 0] = 1
    actions[2, agent, number] = value
    before = [state.clone() for state in envs[0].state.values()]
    _, rewards, _, truncations, _ = envs[0].step(actions)
    assert envs[0].faults().tolist() == [0, 0, fault]
    if not fault:
        envs[1].step(actions)
        assert rewards.isfinite().all() and not truncations.any()
        return
    assert rewards[2].isnan().all() and truncations[2].all() and not truncations[:2].any()
    assert len(before) == 2
    name = envs[0].game.layout.agent_names[agent]
    with pytest.raises(InvalidActionError, match=f"1 invalid action values; .* environment 2, agent {name}, number"):
        envs[1].step(actions)
    assert all(equal_bits(envs[1].state[key], old) for key, old in zip(envs[1].state, before, strict=True))


def test_an_unclipped_box_beside_choices_refuses_infinity(monkeypatch, device):
    monkeypatch.setattr(Economy, "clip_actions", False)
    env = VecEnv(Economy(), 2, device)
    env.reset(seed=1)
    actions = env.sample_actions()
    actions[0, PLANNER, 1], actions[1, PLANNER, 1] = 7, INF
    env.step(actions)
    assert env.faults().tolist() == [0, Fault.NONFINITE_ACTION] and env.state["rate"][0, 1] == 7


def test_casts_do_not_round_numbers_into_choices(device):
    check = ActionValidator(Economy().layout, (2, 5), resolve_device(device))
    given = np.zeros((2, 5, 3))
    given[:, PLANNER] = 1 - 2.0**-40  # 1 as float32
    assert check.cast(given).dtype == np.float32 and check.cast(given)[0, PLANNER, 0] == 1
    given[1, CLERK, 0] = 3 + 2.0**-40
    with pytest.raises(InvalidActionError, match=r"3\.0+9.* is no choice of a discrete action"):
        check.cast(given)
    on_device = check.cast(torch.tensor(given, device=device))
    assert on_device.dtype == torch.float32 and on_device[1, CLERK, 0] == -1 and on_device[0, PLANNER, 0] == 1
    whole = check.cast(torch.full((2, 5, 3), 2**24 + 1, device=device))
    assert whole.dtype == torch.float32 and whole.ge(2**24).all()


def test_actions_of_one_role_are_of_its_kind(device):
    check = ActionValidator(Economy().layout, (2, 5), resolve_device(device))
    ints, floats = torch.zeros((2, 3), dtype=torch.int64, device=device), torch.zeros((2, 3), device=device)
    assert check(ints, (2, 3), role="worker") is ints and check(floats, (2, 3), role="planner") is floats
    with pytest.raises(TypeError, match=r"dtype torch\.float32; expected torch\.int32 or torch\.int64"):
        check(floats, (2, 3), role="worker")
    with pytest.raises(TypeError, match=r"dtype torch\.int64; expected torch\.float32 \(use actions\.float\(\)\)$"):
        check(ints, (2, 3), role="planner")
    with pytest.raises(TypeError, match=r"dtype torch\.int64; expected torch\.float32 \(use actions\.float\(\)\)$"):
        check(ints.view(2, 3, 1).expand(2, 3, 5).mT.contiguous(), (2, 5, 3))
    assert check.cast(0.25 * np.ones(3), (3,), role="planner").dtype == np.float32
    assert check.cast(np.ones(3, np.uint8), (3,), role="worker").dtype == np.int64
    with pytest.raises(InvalidActionError, match=r"0\.25 is no choice"):
        check.cast(0.25 * np.ones(3), (3,), role="worker")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sampled_step_is_a_sample_and_a_step(config, device):
    game = Economy(**config)
    one, other = (VecEnv(game, 70, device) for _ in range(2))
    samplers, random = [Sampler(env, "tanh") for env in (one, other)], torch.Generator().manual_seed(2)
    for env in (one, other):
        env.reset(seed=4)
    for step in range(12):
        parameters = torch.randn((70, game.num_agents, samplers[0].num_parameters), generator=random).to(device)
        sample, outputs = samplers[0].step(parameters, greedy=step == 5)
        again = samplers[1].sample(parameters, greedy=step == 5)
        assert equal_bits(vars(sample), vars(again))
        assert equal_bits(outputs[:4], other.step(again.actions)[:4])
    assert one.faults().any()  # masks were ignored


def test_parameters_that_are_no_distribution_are_faults_of_their_kind(device):
    env = VecEnv(Economy(), 4, device)
    env.reset(seed=1)
    parameters = torch.zeros((4, 5, 6), device=device)
    parameters[0, 1, :3], parameters[1, CLERK, 0], parameters[2, PLANNER, 4] = -INF, NAN, NAN
    sample = Sampler(env).sample(parameters)
    assert sample.actions[0, 1, 0] == -1 and sample.actions[1, CLERK, 0] == -1 and sample.draws[1, CLERK, 0] == -1
    assert sample.actions[2, PLANNER, 1].isnan() and sample.actions.isnan().sum() == 1
    assert [tuple(index) for index in sample.log_probs.isnan().nonzero().tolist()] == [(0, 1), (1, CLERK), (2, PLANNER)]


def test_thread_order_and_agents_as_envs_do_not_change_results():
    whole = trajectory_digest(VecEnv(Economy(), 33, "cpu"), 5, 40).words
    for order in (1, 2):
        assert torch.equal(trajectory_digest(VecEnv(Economy(), 33, "cpu", thread_order=order), 5, 40).words, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_host_and_cuda_are_bit_identical(mode, rows):
    digests = [
        trajectory_digest(
            VecEnv(Economy(), 333, device, autoreset_mode=mode, agents_as_envs=rows, threads_per_env=threads_per_env),
            7,
            60,
        ).words.cpu()
        for device, threads_per_env in (("cpu", None), ("cuda", None), ("cuda", 64))
    ]
    assert torch.equal(digests[0], digests[1]) and torch.equal(digests[0], digests[2])
