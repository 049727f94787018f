"""AgileRL on the Gymnasium view in NumPy: what its buffers hold is what the game says."""

import numpy as np
import pytest
import torch
from agilerl.algorithms import DQN, PPO
from agilerl.components import ReplayBuffer
from agilerl.rollouts import collect_rollouts
from agilerl.training.train_off_policy import train_off_policy
from games.script import Script
from support.documented import documented

from gpu_vecenv import GymnasiumVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:tensordict")


def test_rollouts_are_what_the_script_says():
    env = GymnasiumVectorEnv(Script, 8, "cpu", output="numpy", num_leads=2)
    agent = PPO(env.single_observation_space, env.single_action_space, num_envs=16, learn_step=16 * 20, batch_size=64)
    scores, *_ = collect_rollouts(agent, env)
    stored = agent.rollout_buffer.buffer
    assert stored.batch_size == (20, 16) and stored["observations"].dtype == torch.float32
    number, steps, last, truncates, _, said = stored["observations"].unbind(-1)
    assert torch.equal(number, torch.tensor([1.0, 2.0]).repeat(20, 8))
    ends = steps + 1 == last
    assert torch.equal(stored["dones"], ends) and truncates[ends].any() and not truncates[ends].all()
    assert torch.equal(stored["rewards"], 10 * number + steps + 1)
    assert torch.equal(stored["next_observations"][:-1], stored["observations"][1:])
    inside = ~ends[:-1]
    assert torch.equal(said[1:][inside], stored["actions"][:-1, :, 0][inside])
    # The return of an episode of n steps is n * 10 * (i + 1) + 1 + … + n.
    returns = (last * 10 * number + last * (last + 1) / 2)[ends]
    assert sorted(scores) == sorted(returns.tolist())


def test_replay_is_what_the_script_says(capsys):
    """Next step mode: final observations are stored; at a reset step the action and the reward mean nothing."""
    env = GymnasiumVectorEnv(Script, 8, "cpu", output="numpy", num_leads=2, autoreset_mode="next_step")
    agent = DQN(env.single_observation_space, env.single_action_space, batch_size=32, learn_step=16)
    memory, settings = ReplayBuffer(max_size=640, device="cpu"), {"max_steps": 640, "evo_steps": 640, "eval_steps": 20}
    train_off_policy(env, "script", "DQN", [agent], memory, verbose=False, **settings)
    assert len(memory) == 640
    number, steps, last, truncates, mark, _ = memory.storage["obs"].unbind(-1)
    after = memory.storage["next_obs"].unbind(-1)
    reward, done = memory.storage["reward"][:, 0], memory.storage["done"][:, 0].bool()
    resets, ends = steps == last, steps + 1 == last
    assert 0 < resets.sum() < ends.sum() + 16
    for column, expected in enumerate((number, steps + 1, last, truncates, mark, memory.storage["action"][:, 0])):
        assert torch.equal(after[column][~resets], expected[~resets])
    assert torch.equal(after[1][resets], torch.zeros(int(resets.sum())))
    assert torch.equal(reward, torch.where(resets, 0, 10 * number + steps + 1))
    assert torch.equal(done, ends & (truncates == 0)) and done.any()


def test_the_documented_lines_run(capsys):
    made = documented("AgileRL")
    assert all(np.isfinite(made[name]).all() and len(made[name]) for name in ("ppo_scores", "dqn_scores"))
    assert len(made["memory"]) == 2048
