"""How many episodes the evaluations of a run have, and how many are played at a time."""

import json

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from support.training import SMALL
from torch import nn

import gpu_vecenv
from gpu_vecenv import PolicySpec
from gpu_vecenv.cli.main import main
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train import evaluation_sizes
from gpu_vecenv.train.evaluation_sizes import AGENTS, num_envs_for, num_episodes
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.trainer import Trainer

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 1 --hidden-sizes 8 --device cpu".split()
GRID = ["train", "tag_gridworld", "--grid", "4", *TINY]


@pytest.mark.parametrize(
    ("max_steps", "total_steps", "episodes"),
    [
        (100, 16, 25),  # 8 x 25 episodes of 100 steps of 5 agents are 100,000 agent-steps
        (1000, 16, 10),  # never fewer
        (100, 400_000, 50),  # a tenth of the training
        (1000, 10**9, 1000),
    ],
)
def test_a_short_training_is_followed_by_fewer_episodes(max_steps, total_steps, episodes):
    env = gpu_vecenv.make("tag_gridworld", 4, "cpu", max_steps=max_steps, autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(total_steps=total_steps, num_steps=4, hidden_sizes=(8,)))
    assert num_episodes(trainer, 8) == episodes


def test_a_game_without_max_steps_has_all_episodes(early_game):
    env = gpu_vecenv.make(early_game, 4, "cpu", autoreset_mode="next_step")
    assert num_episodes(Trainer(env, SMALL), 2) == 1000


@pytest.fixture
def early_game(tmp_path, monkeypatch):
    (tmp_path / "endless.cu").write_text(
        '#include "game_api.cuh"\nstruct Scratch {};\nHD void reset(State s, Io io) {}\n'
        "HD void step(State s, Io io) { ONCE io.terminations[0] = io.elapsed_steps >= 3; }\n"
        "HD void observe(State s, Io io) { ONCE io.obs[0][0] = 1; }\n"
    )

    class Endless(gpu_vecenv.Env):
        source = tmp_path / "endless.cu"
        obs_dim = 1
        action_space = Discrete(2)

    return Endless


def test_episodes_are_played_in_equal_rounds_as_large_as_memory_and_agents_allow():
    env = gpu_vecenv.make("cartpole", 4, "cpu")
    assert num_envs_for(env, 1000) == 1000, "one round of small environments, however few the training has"
    assert num_envs_for(env, AGENTS + 10) == AGENTS // 2 + 5
    many = gpu_vecenv.make("tag_gridworld", 3, "cpu", num_taggers=AGENTS // 6, grid=4, full_observation=False)
    assert num_envs_for(many, 1000) == 5
    assert num_envs_for(many, 7) == 4, "two rounds, not one of 5 and one of 2"


def test_a_run_says_what_it_evaluates_and_keeps_the_number_of_its_checkpoints(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "--max-steps 100000 --total-steps 16 --best-episodes 2 --out run"
    assert main([*GRID, *options.split(), "--episodes", "3", "--max-steps", "9"]) == 0
    said = capsys.readouterr().out
    assert "evaluating 8 x 3 episodes: all random, 6 against fixed opponents, all trained\n" in said
    assert "more episodes" not in said
    monkeypatch.setattr(evaluation_sizes, "AGENT_STEPS", 8000)
    env = gpu_vecenv.make("tag_gridworld", 4, "cpu", max_steps=20, grid=4, autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(total_steps=16, num_steps=4, hidden_sizes=(8,), num_minibatches=1))
    assert run(trainer, tmp_path / "short", RunConfig(best_episodes=0, eval_opponents=())) == 0
    said = capsys.readouterr().out
    assert "evaluating 2 x 40 episodes (after a longer training 1,000 each): all random" in said
    assert f"more episodes   gpu-vecenv evaluate {tmp_path / 'short'} --episodes 1000\n" in said
    assert json.loads((tmp_path / "short/evaluation.json").read_text())["all trained"]["episodes"] == 40
    with pytest.raises(
        ConfigError, match="already has a run; use another folder, or resume it: the same call and resume"
    ):
        run(trainer, tmp_path / "short", RunConfig(best_episodes=0, eval_opponents=()))


class Plain(nn.Module):
    """Logits of the first numbers of an observation."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, obs):
        return self.scale * obs[..., :5], self.scale * obs[..., 0]


@pytest.mark.parametrize("what", ["initial_states", "network"])
def test_a_run_that_commands_cannot_play_names_none(what, tmp_path, capsys):
    given = {"initial_states": {"cell": np.zeros((3, 5, 2), np.int32)}} if what == "initial_states" else {}
    env = gpu_vecenv.make("tag_gridworld", 4, "cpu", max_steps=20, grid=4, autoreset_mode="next_step", **given)
    policies = {name: PolicySpec(network=Plain() if what == "network" else None) for name in ("tagger", "runner")}
    trainer = Trainer(
        env, PPOConfig(total_steps=16, num_steps=4, hidden_sizes=(8,), num_minibatches=1), policies=policies
    )
    assert run(trainer, tmp_path / "run", RunConfig(best_episodes=0, eval_opponents=())) == 0
    said = capsys.readouterr().out
    assert "checkpoint" in said and "gpu-vecenv evaluate" not in said and "gpu-vecenv replay" not in said


def test_settings_have_the_number_of_episodes_that_compares_checkpoints(tmp_path, capsys):
    assert main([*GRID, "--max-steps", "5000", "--total-steps", "16", "--episodes", "1", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "settings.json").read_text())["run"]
    assert (kept["episodes"], kept["best_episodes"]) == (1, 10)
    capsys.readouterr()
