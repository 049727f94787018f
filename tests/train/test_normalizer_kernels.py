"""The kernels of normalizers against ``Normalizer`` in torch: moments of observations and of rewards, updates."""

import copy

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.scouts import Scouts

import gpu_vecenv
from gpu_vecenv import FunctionManager
from gpu_vecenv.train.normalizer_kernels import obs_update, reward_update, update_launch
from gpu_vecenv.train.normalizers import Normalizer
from gpu_vecenv.train.role_view import RoleView
from gpu_vecenv.train.rollout_storage import Rollout

GAMMA = 0.9
NAN = float("nan")
ROLES = {
    "cartpole": ("cartpole", ("agent",), {}),
    "pendulum": ("pendulum", ("agent",), {}),
    "two roles": ("tag_continuous", ("tagger", "runner"), {}),
    "second role": ("tag_continuous", ("runner",), {}),
    "smaller": (Crew, ("driver",), {}),
    "other": (Economy, ("planner",), {}),
    "parts of images": (Scouts, ("scout",), {}),
    "images": (Painter, ("agent",), {}),
}


class Collected:
    """A rollout of random numbers; what is not active is NaN or the largest uint8."""

    def __init__(self, name, device, num_envs=70, num_steps=11):
        game, roles, arguments = ROLES[name]
        env = gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step", **arguments)
        self.view, self.rollout = RoleView(env.game, roles, env.device), Rollout(env, num_steps)
        data, random = self.rollout, torch.Generator().manual_seed(1)
        data.active.copy_(torch.rand(data.active.shape, generator=random) < 0.8)
        for flags in (data.terminations, data.truncations):
            flags.copy_(torch.rand(flags.shape, generator=random) < 0.1)
        data.rewards.copy_(torch.randn(data.rewards.shape, generator=random))
        if data.obs.dtype == torch.uint8:
            data.obs.copy_(torch.randint(0, 250, data.obs.shape, generator=random))
        else:
            data.obs.copy_(torch.randn(data.obs.shape, generator=random) * 3 + 5)
        data.obs[~data.active] = 255 if data.obs.dtype == torch.uint8 else NAN
        samples = torch.arange(data.rewards.numel(), device=env.device).view(data.rewards.shape)
        self.indices = samples[:, :, self.view.agents].flatten().contiguous()
        self.active = data.active[:-1, :, self.view.agents].flatten()
        self.random = random

    def normalizer(self, shape):
        made = Normalizer(shape)
        made.mean.copy_(torch.randn(tuple(shape), generator=self.random))
        made.var.copy_(torch.rand(tuple(shape), generator=self.random) + 1)
        made.count.fill_(100)
        return made.to(self.rollout.rewards.device)

    def of_obs(self):
        """An update, its normalizer and its rows."""
        normalizer = self.normalizer(self.view.obs_shape)
        update = obs_update(normalizer, self.rollout, self.view, self.indices)
        return update, normalizer, torch.cat([self.view.obs(obs).flatten(0, 1) for obs in self.rollout.obs[:-1]])

    def of_rewards(self):
        """The same, and sums before the rollout."""
        sums = torch.randn(self.rollout.rewards[0, :, self.view.agents].shape, generator=self.random)
        sums = sums.to(self.rollout.rewards.device)
        normalizer, rows, running = self.normalizer(()), [], sums.clone()
        data, agents = self.rollout, self.view.agents
        for t in range(len(data.rewards)):
            rewards, active = data.rewards[t][:, agents], data.active[t][:, agents]
            running = torch.where(active, rewards + GAMMA * running, running)
            rows.append(running.flatten())
            ended = (data.terminations[t] | data.truncations[t])[:, agents]
            running = torch.where(ended | ~running.isfinite(), 0, running)
        return reward_update(normalizer, data, self.indices, sums, GAMMA), normalizer, torch.cat(rows), sums, running


def check_moments(found, normalizer, rows, active):
    expected = normalizer.moments(rows, active)
    assert found[0] == expected[0] == active.sum() and 0 < found[0] < len(active)
    # Sums of some 10^4 doubles in another order, of size 10^4 at most.
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-8)


@pytest.mark.parametrize("name", ROLES)
def test_moments_of_observations_are_those_of_torch(name, device):
    collected = Collected(name, device)
    update, normalizer, rows = collected.of_obs()
    update.add_samples()
    check_moments(update.moments, normalizer, rows, collected.active)
    once = update.moments.clone()
    update.add_samples()
    assert update.moments.equal(2 * once)


def test_numbers_of_an_observation_may_lie_apart(device):
    collected = Collected("parts of images", device)
    collected.view.obs_slice, collected.view.obs_shape = (slice(0, 2), slice(0, 2), slice(0, 2)), (2, 2, 2)
    update, normalizer, rows = collected.of_obs()
    assert rows.shape[1:] == (2, 2, 2)
    update.add_samples()
    check_moments(update.moments, normalizer, rows, collected.active)


@pytest.mark.parametrize("num_envs", [3, 93, 94, 300])
def test_tiles_that_are_not_full(num_envs, device):
    """Few samples, one less than a tile of 1024, and one of the next."""
    collected = Collected("cartpole", device, num_envs)
    update, normalizer, rows = collected.of_obs()
    update.add_samples()
    check_moments(update.moments, normalizer, rows, collected.active)


@pytest.mark.parametrize("name", ["cartpole", "two roles", "second role", "smaller"])
def test_moments_of_sums_of_rewards_are_those_of_torch(name, device):
    collected = Collected(name, device)
    update, normalizer, rows, sums, running = collected.of_rewards()
    update.add_samples()
    check_moments(update.moments, normalizer, rows, collected.active)
    torch.testing.assert_close(sums, running, rtol=2e-7, atol=2e-7)  # torch may fuse the product and the sum
    assert sums.count_nonzero() > 10


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_sums_begin_anew_after_a_reward_that_is_not_finite(value, device):
    collected = Collected("cartpole", device)
    collected.rollout.active.fill_(True)
    collected.rollout.rewards[3] = value
    update, _, _, sums, running = collected.of_rewards()
    update.add_samples()
    assert sums.isfinite().all() and not update.moments.isfinite().all()
    torch.testing.assert_close(sums, running, rtol=2e-7, atol=2e-7)


def outcomes(collected):
    """All that two iterations of updates write."""
    obs, obs_normalizer, _ = collected.of_obs()
    rewards, reward_normalizer, _, sums, _ = collected.of_rewards()
    for _ in range(2):
        for update in (obs, rewards):
            update.add_samples()
        found = [obs.moments.clone(), rewards.moments.clone()]
        for update in (obs, rewards):
            update.apply()
    return [*found, sums, *obs_normalizer.buffers(), *reward_normalizer.buffers()]


@pytest.mark.parametrize("name", ["cartpole", "second role", "images"])
def test_emulated_cuda_threads_are_bitwise_equal_to_the_host(name, emulated):
    host = outcomes(Collected(name, "cpu"))
    collected = Collected(name, "cpu")
    collected.rollout.env.functions = emulated
    assert all(x.equal(y) for x, y in zip(host, outcomes(collected), strict=True))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (300,)])
def test_updates_are_those_of_torch(shape):
    """Bit by bit on a CPU, where torch rounds each operation as written."""
    collected = Collected("cartpole", "cpu")
    size = max(1, torch.Size(shape).numel())
    for rows in (50, 1, 0):
        normalizer = collected.normalizer(shape)
        expected = copy.deepcopy(normalizer)
        moments = torch.zeros(1 + 2 * size, dtype=torch.float64)
        update = update_launch(FunctionManager("cpu"), normalizer, moments)
        moments[0] = rows
        if rows:
            moments[1 : 1 + size] = torch.randn(size, generator=collected.random).double() * rows
            moments[1 + size :] = moments[1 : 1 + size].square() / rows * 1.5
        expected.update_from_moments(moments)
        update()
        assert all(x.equal(y) for x, y in zip(normalizer.buffers(), expected.buffers(), strict=True))
        assert moments.eq(0).all()


@pytest.mark.parametrize("place", [0, 1, 150, 300, 600])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_moments_that_are_not_finite_change_nothing(value, place, functions):
    normalizer = Normalizer((300,)).to(functions.device)
    moments = torch.ones(601, dtype=torch.float64, device=functions.device)
    moments[place] = value
    before = [x.clone() for x in normalizer.buffers()]
    update_launch(functions, normalizer, moments)()
    assert all(x.equal(y) for x, y in zip(normalizer.buffers(), before, strict=True)) and moments.eq(0).all()
