"""Minari: a dataset collected from a single environment plays again bitwise from its seeds and actions."""

import gymnasium
import numpy as np
import pytest
from support.documented import documented


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def test_episodes_play_again_from_their_seeds():
    dataset = documented("Minari")["dataset"]
    assert dataset.total_episodes == 20
    env = gymnasium.make("gpu_vecenv/CartPole-v1")
    assert dataset.observation_space == env.observation_space and dataset.action_space == env.action_space
    seeds = {metadata["id"]: metadata["seed"] for metadata in dataset.storage.get_episode_metadata(range(20))}
    lengths = set()
    for episode in dataset.iterate_episodes():
        obs, _ = env.reset(seed=int(seeds[episode.id]))
        steps = [env.step(action) for action in episode.actions]
        assert episode.observations.dtype == np.float32
        np.testing.assert_array_equal(episode.observations, [obs, *(step[0] for step in steps)])
        outputs = (episode.rewards, episode.terminations, episode.truncations)
        for column, stored in enumerate(outputs, start=1):
            np.testing.assert_array_equal(stored, [step[column] for step in steps])
        assert episode.terminations[-1] and not episode.terminations[:-1].any()
        lengths.add(len(steps))
    assert len(lengths) > 3


def test_the_environment_is_recovered_with_its_configuration():
    import minari

    env = minari.DataCollector(gymnasium.make("gpu_vecenv/CartPole-v1", max_episode_steps=5, theta_threshold=3.0))
    env.reset(seed=1)
    while not any(env.step(env.action_space.sample())[2:4]):
        pass
    dataset = env.create_dataset("gpu_vecenv/short-v0")
    (episode,) = dataset.iterate_episodes()
    assert len(episode.actions) == 5 and episode.truncations[-1] and not episode.terminations.any()
    recovered = dataset.recover_environment()
    assert recovered.spec.max_episode_steps == 5 and recovered.unwrapped.game.theta_threshold == 3.0
