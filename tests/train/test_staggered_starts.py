"""Staggered starts: first episodes that begin at different elapsed steps."""

import dataclasses

import pytest
import torch
from games.parity import Parity

import gpu_vecenv
from gpu_vecenv import EpisodeLog, PPOConfig, Trainer
from gpu_vecenv.train.staggered_starts import stagger, staggered_steps

CONFIG = PPOConfig(total_steps=10**6, num_steps=8, num_minibatches=2, num_epochs=1, hidden_sizes=(8,))

pytestmark = pytest.mark.usefixtures("one_thread")


def pendulum(num_envs, device="cpu", max_steps=20, **arguments):
    return gpu_vecenv.make("pendulum", num_envs, device, autoreset_mode="next_step", max_steps=max_steps, **arguments)


@pytest.mark.parametrize(("num_envs", "max_steps"), [(2000, 200), (7, 1000), (512, 3), (5, 1)])
def test_they_are_spread_evenly_over_an_episode(num_envs, max_steps):
    steps = staggered_steps(pendulum(num_envs, max_steps=max_steps)).double()
    assert steps.min() == 0 and steps.max() < max_steps
    # The largest difference from the uniform distribution: multiples of the golden ratio have one below 2 log2(n) / n.
    fractions = (steps / max_steps).sort().values
    uniform = torch.arange(num_envs, dtype=torch.float64) / num_envs
    largest = 2 * torch.tensor(num_envs).log2() / num_envs + 1 / max_steps
    assert (fractions - uniform).abs().max() <= largest


def test_they_are_a_function_of_the_global_index():
    """Of processes each has its own environments' values, up to the largest index that there may be."""
    whole = staggered_steps(pendulum(12))
    parts = [staggered_steps(pendulum(4, first_env_index=first)) for first in (0, 4, 8)]
    assert torch.cat(parts).equal(whole) and len(whole.unique()) > 8
    last = staggered_steps(pendulum(4, first_env_index=2**63 - 4))
    assert last.min() >= 0 and last.max() < 20


def test_a_game_without_a_time_limit_is_as_it_was():
    env = gpu_vecenv.make(Parity, 5, "cpu")
    obs, _ = env.reset(seed=1)
    assert not stagger(env).any()
    assert env.elapsed_steps.eq(0).all() and env.observe().equal(obs)


def test_first_truncations_come_at_different_times_and_later_episodes_have_their_length(device):
    trainer = Trainer(pendulum(64, device), CONFIG, seed=3)
    begins = staggered_steps(trainer.env)
    assert trainer.env.elapsed_steps.equal(begins)
    ends = []
    for _ in range(7):
        trainer.train_iteration()
        ends.append(trainer.rollout.truncations[:, :, 0].clone())
    ends = torch.cat(ends)
    for env, begin in enumerate(begins.tolist()):
        own = ends[:, env].nonzero().flatten().tolist()
        assert own[0] == 19 - begin and own[1] - own[0] == 21  # the step that resets is one more
    assert ends.any(1).float().mean() > 0.9  # in lockstep: one step in 21


def test_lockstep_can_be_chosen(device):
    trainer = Trainer(pendulum(64, device), dataclasses.replace(CONFIG, staggered_starts=False), seed=3)
    assert trainer.env.elapsed_steps.eq(0).all()
    for _ in range(3):
        metrics = trainer.train_iteration()
    assert metrics["episodes"] == 64 and metrics["first_episodes"] == 0 and metrics["episode_length"] == 20
    assert trainer.rollout.truncations[:, :, 0].any(1).sum() == 1


def test_observations_have_the_elapsed_time(device):
    env = gpu_vecenv.make("tag_gridworld", 16, device, autoreset_mode="next_step", full_observation=False)
    trainer = Trainer(env, CONFIG, seed=3)
    # On the host: torch's division on a GPU is not that of IEEE.
    expected = staggered_steps(trainer.env).cpu().float() / trainer.env.game.max_steps
    assert trainer.rollout.obs[-1, :, :, 5].cpu().equal(expected[:, None].expand(-1, env.num_agents))


def test_shortened_episodes_count_in_no_mean_and_no_number(device):
    """Rewards of Pendulum are negative and lengths equal: a part of an episode would show in both means."""
    trainer, found = Trainer(pendulum(64, device), CONFIG, seed=3), []
    begins = staggered_steps(trainer.env)
    for _ in range(9):
        found.append(trainer.train_iteration())
    steps = torch.arange(1, 9 * 8 + 1, device=device)[:, None]
    ended = (steps - (20 - begins)) // 21 + (begins == 0)  # that count, after so many steps
    ended = ended.clamp(min=0)[7::8].sum(1).tolist()
    assert [sum(m["episodes"] for m in found[: k + 1]) for k in range(9)] == ended
    firsts = [metrics["first_episodes"] for metrics in found]
    assert firsts[0] == 64 and firsts[-1] == 0 and firsts == sorted(firsts, reverse=True)
    lengths = [metrics["episode_length"] for metrics in found]
    assert all(length != length for length, first in zip(lengths, firsts, strict=True) if first)
    assert {length for length, first in zip(lengths, firsts, strict=True) if not first} == {20.0}


def test_an_episode_that_ends_with_a_skipped_one_is_in_no_mean_either():
    env = pendulum(3, max_steps=4)
    env.reset(seed=1)
    log = EpisodeLog(env)
    log.skip_current(torch.tensor([True, False, True]))
    for _ in range(10):  # two episodes, and the steps that reset
        env.step(env.sample_actions())
    assert log.update() == 4 and log.latest[:, -1].tolist() == [0, 2, 0]
    assert log.means()["length"].isnan()
    for _ in range(5):
        env.step(env.sample_actions())
    assert log.update() == 3 and log.latest[:, -1].tolist() == [1, 1, 1] and log.means()["length"] == 4


def test_a_run_that_is_resumed_in_a_shortened_episode_is_bit_identical(device, tmp_path):
    whole, part = (Trainer(pendulum(16, device), CONFIG, seed=3) for _ in range(2))
    part.train_iteration()
    part.save(tmp_path / "a.safetensors")
    resumed = Trainer(pendulum(16, device), CONFIG, seed=3)
    resumed.load(tmp_path / "a.safetensors")
    whole.train_iteration()
    for _ in range(5):
        one, other = ({k: v for k, v in t.train_iteration().items() if "_per_s" not in k} for t in (whole, resumed))
        assert str({k: v for k, v in one.items() if "time" not in k}) == str(
            {k: v for k, v in other.items() if "time" not in k}
        )
        assert all(x.equal(y) for x, y in zip(whole.state()[0].values(), resumed.state()[0].values(), strict=True))
