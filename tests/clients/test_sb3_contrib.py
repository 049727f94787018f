"""sb3-contrib on the adapter of Stable-Baselines3: masks, recurrent policies, TRPO; rollouts are what the game says."""

import numpy as np
import pytest
from games.crew import Crew
from games.scouts import Scouts
from games.script import Script
from sb3_contrib import TRPO, MaskablePPO, RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from support.documented import documented

from gpu_vecenv.adapters import sb3

SETTINGS = {"n_steps": 16, "batch_size": 64, "seed": 1, "device": "cpu"}


class Masks(BaseCallback):
    """Masks of the environment after each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_rollout_start(self):
        self.seen = [self.training_env.env_method("action_masks")]

    def _on_step(self):
        self.seen.append(self.training_env.env_method("action_masks"))
        return True


@pytest.mark.parametrize("game", [Scouts, Crew])
def test_masked_actions_are_never_chosen(game):
    env, masks = sb3.make(game, 4, "cpu"), Masks()
    model = MaskablePPO("MlpPolicy", env, **SETTINGS).learn(16 * env.num_envs, masks)
    buffer, choices = model.rollout_buffer, np.array(env.action_space.nvec if game is Crew else [env.action_space.n])
    expected = np.array(masks.seen)[:-1].reshape(-1, choices.sum())
    given = buffer.action_masks.reshape(-1, choices.sum())
    # The buffer has been flattened for training, row by row.
    np.testing.assert_array_equal(given, expected.reshape(16, env.num_envs, -1).swapaxes(0, 1).reshape(given.shape))
    assert 0 < given.mean() < 1
    starts = np.concatenate([[0], choices.cumsum()[:-1]])
    chosen = np.take_along_axis(given, buffer.actions.reshape(len(given), -1).astype(int) + starts, 1)
    none = np.add.reduceat(given, starts, axis=1) == 0  # an agent that left, or a role without this number
    assert (chosen.astype(bool) | none).all() and none.any() == (game is Crew)


@pytest.mark.parametrize(("algorithm", "policy"), [(RecurrentPPO, "MlpLstmPolicy"), (TRPO, "MlpPolicy")])
def test_rollouts_are_what_the_script_says(algorithm, policy):
    env = sb3.make(Script, 8, "cpu", num_leads=2)
    stored = {}

    class Stored(BaseCallback):
        def _on_rollout_end(self):
            buffer = self.model.rollout_buffer
            stored.update({name: getattr(buffer, name).copy() for name in ("observations", "rewards", "actions")})
            stored["starts"] = buffer.episode_starts.astype(bool)

        def _on_step(self):
            return True

    model = algorithm(policy, env, **SETTINGS, policy_kwargs={"net_arch": [8]}).learn(16 * env.num_envs, Stored())
    assert stored["observations"].shape == (16, 16, 6) and stored["observations"].dtype == np.float32
    number, steps, last, truncates, _, said = np.moveaxis(stored["observations"], -1, 0)
    np.testing.assert_array_equal(number, np.tile([1, 2], (16, 8)))
    ends = steps + 1 == last
    np.testing.assert_array_equal(stored["starts"][1:], ends[:-1])
    exact = ~(ends & (truncates == 1))  # SB3 adds the bootstrapped value to the reward of a truncated step
    assert exact.any() and not exact.all()
    rewards = 10 * number + steps + 1
    np.testing.assert_array_equal(stored["rewards"][exact], rewards[exact])
    assert (stored["rewards"] != rewards)[~exact].all()
    np.testing.assert_array_equal(said[1:][~ends[:-1]], stored["actions"].reshape(16, 16)[:-1][~ends[:-1]])
    assert len(model.ep_info_buffer) == ends.sum()
    assert sorted(info["l"] for info in model.ep_info_buffer) == sorted(last[ends].astype(int))


def test_the_documented_lines_run():
    made = documented("sb3-contrib")
    assert [made[name].num_timesteps for name in ("recurrent", "trpo")] == [2048, 2048]
