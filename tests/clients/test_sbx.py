"""SBX, Stable-Baselines3 in JAX, on the adapter of Stable-Baselines3: replay buffers are what the game says."""

import numpy as np
import sbx
from games.script import Script
from support.documented import documented

from gpu_vecenv.adapters import sb3


def test_replay_is_what_the_script_says():
    env = sb3.make(Script, 8, "cpu", num_leads=2)
    model = sbx.DQN("MlpPolicy", env, buffer_size=16 * 40, learning_starts=64, train_freq=4, batch_size=32, seed=1)
    model.learn(16 * 40)
    buffer = model.replay_buffer
    assert buffer.full and buffer.observations.dtype == np.float32
    number, steps, last, truncates, mark, _ = np.moveaxis(buffer.observations, -1, 0)
    after = np.moveaxis(buffer.next_observations, -1, 0)
    np.testing.assert_array_equal(number, np.tile([1, 2], (40, 8)))
    # Final observations included: no next observation is that of another episode.
    np.testing.assert_array_equal(after[:5], [number, steps + 1, last, truncates, mark])
    np.testing.assert_array_equal(after[5], buffer.actions[..., 0])
    np.testing.assert_array_equal(buffer.rewards, 10 * number + steps + 1)
    ends = steps + 1 == last
    np.testing.assert_array_equal(buffer.dones.astype(bool), ends)
    np.testing.assert_array_equal(buffer.timeouts.astype(bool), ends & (truncates == 1))
    assert (ends & (truncates == 1)).any() and (ends & (truncates == 0)).any()


def test_the_documented_lines_run():
    made = documented("SBX")
    assert made["ppo"].num_timesteps == 4096 and made["sac"].num_timesteps == 1024
    assert np.abs(made["sac"].replay_buffer.actions[:64]).max() <= 1  # scaled; the environment checks the bounds
