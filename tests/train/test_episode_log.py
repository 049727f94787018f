"""What trainers log of episodes: the same means as those of the episodes, taken down one by one."""

import math

import pytest
import torch
from games.script import Script
from support.synchronisation import no_synchronisation

import gpu_vecenv
from gpu_vecenv import EpisodeLog


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_means_are_those_of_the_latest_episodes_of_each_environment(mode, rows, device):
    env = gpu_vecenv.make(
        Script, 7, device, autoreset_mode=mode, agents_as_envs=rows, num_leads=2, num_others=3, leave=2
    )
    env.reset(seed=3)
    log, shape = EpisodeLog(env), (7, 5)
    assert log.names == ("return_lead", "return_other", "length", "terminated")
    assert all(math.isnan(value) for value in log.means().values())
    returns, lengths, ended, compared = torch.zeros(shape), torch.zeros(7), {}, 0
    latest = {}  # of each environment, the episodes between the last two looks between which any ended
    for step in range(60):
        playing = env.elapsed_steps.cpu() < env.state["ends"].cpu()
        ends, truncates = (env.state[name].clone().cpu() for name in ("ends", "truncates"))
        _, rewards, *_ = env.step(env.sample_actions())
        returns += rewards.cpu().reshape(shape)
        lengths += playing
        for e in torch.nonzero(playing & (lengths == ends)).flatten().tolist():
            row = [returns[e, :2].mean(), returns[e, 2:].mean(), lengths[e], 1.0 - truncates[e]]
            ended.setdefault(e, []).append(torch.tensor(row, dtype=torch.float64))
            returns[e], lengths[e] = 0, 0
        if step % 5 == 4 or step == 45:  # once nothing can have ended between two looks
            latest |= ended
            ended, found = {}, torch.stack(list(log.means().values())).cpu()
            if len(latest) == 7:
                expected = torch.stack([one for some in latest.values() for one in some]).mean(0)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
                compared += 1
            else:
                assert found.isnan().all()
    assert compared >= 10


def test_it_is_what_it_was_where_no_episode_ended():
    env = gpu_vecenv.make("cartpole", 3, "cpu")
    env.reset(seed=1)
    log = EpisodeLog(env)
    while not env.episode_statistics()["episodes"].all():
        env.step(env.sample_actions())
    first, second = log.means(), log.means()
    assert first == second and first["length"] > 5 and first["terminated"] == 1
    assert first["return_agent"] == first["length"]


def test_it_follows_when_statistics_are_cleared_or_loaded():
    env = gpu_vecenv.make(Script, 5, "cpu")
    env.reset(seed=1)
    log = EpisodeLog(env)
    for _ in range(12):
        env.step(env.sample_actions())
    saved = env.state_dict()
    log.means()
    env.clear_episode_statistics()
    for _ in range(30):  # more episodes than there were before
        env.step(env.sample_actions())
    statistics = env.episode_statistics()
    assert log.means()["length"] == statistics["lengths"].sum() / statistics["episodes"].sum().double()
    last = log.means()
    env.load_state_dict(saved)
    assert log.means() == last  # fewer episodes than before: none has ended
    for _ in range(12):
        env.step(env.sample_actions())
    statistics = env.episode_statistics()
    lengths = statistics["lengths"].sum() - saved["engine_completed_lengths"].sum()
    episodes = statistics["episodes"].sum() - saved["engine_completed_episodes"].sum()
    assert log.means()["length"] == lengths / episodes.double()


@pytest.mark.gpu
def test_a_look_waits_for_nothing():
    env = gpu_vecenv.make("tag_gridworld", 50, "cuda")
    env.reset(seed=1)
    log = EpisodeLog(env)
    log.means()
    with no_synchronisation():
        env.step(env.sample_actions())
        log.means()
