"""Files of a time when a game had only its first version: they have no parameter that tells versions apart."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, VecEnv, configure, load_policy
from gpu_vecenv.cli.main import main
from gpu_vecenv.declare.env import OtherVersion
from gpu_vecenv.envs.registry import GAMES, stored_configuration
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.watch.recording import record
from gpu_vecenv.watch.rerun import configured

FEW: dict[str, Any] = {"num_taggers": 1, "num_runners": 2, "num_neighbors": 2, "max_steps": 6}
CONFIG = PPOConfig(total_steps=10**6, num_steps=4, num_minibatches=1, hidden_sizes=(8,))


def trainer(device: str, egocentric: bool = False) -> Trainer:
    env = VecEnv(configure("tag_continuous", **FEW, egocentric=egocentric), 3, device, autoreset_mode="next_step")
    return Trainer(env, CONFIG, seed=2)


def old_file(path: Path, device: str) -> Trainer:
    """A trainer of version 0 and, in ``path``, its checkpoint without ``egocentric``."""
    made = trainer(device)
    made.train_iteration()
    tensors, manifest = load_checkpoint(made.save(path))
    assert manifest["game_config"].pop("egocentric") is False
    save_checkpoint(path, tensors, manifest)
    return made


def test_a_stored_configuration_is_of_the_oldest_version_that_it_can_be() -> None:
    assert stored_configuration(TagContinuous, {"side": 3.0}) == {"side": 3.0, "egocentric": False}
    assert stored_configuration(TagContinuous, {"egocentric": True}) == {"egocentric": True}
    assert stored_configuration(GAMES["cartpole"], {"dt": 0.1}) == {"dt": 0.1}
    others = {0: OtherVersion(config={"egocentric": False, "side": 9.0}), 2: OtherVersion(config={"side": 8.0})}
    later = type("Later", (TagContinuous,), {"version": 3, "other_versions": others})
    assert stored_configuration(later, {}) == {"egocentric": False, "side": 9.0}


@pytest.mark.slow
def test_an_old_checkpoint_resumes_and_acts(device: str, tmp_path: Path) -> None:
    made = old_file(tmp_path / "old.safetensors", device)
    again = trainer(device)
    again.load(tmp_path / "old.safetensors")
    one, other = made.train_iteration(), again.train_iteration()
    losses = [name for name in one if name.startswith("value_loss")]
    assert losses and [one[name] for name in losses] == [other[name] for name in losses]
    policy = load_policy(tmp_path / "old.safetensors", device=device)
    assert policy.game == made.env.game and policy.game.played_version == 0
    given = load_policy(tmp_path / "old.safetensors", game=made.env.game, device=device)
    assert given.game == policy.game
    with pytest.raises(gpu_vecenv.errors.ConfigError, match=r"its game_config\.egocentric is False"):
        trainer(device, egocentric=True).load(tmp_path / "old.safetensors")


@pytest.mark.slow
def test_an_old_run_resumes_on_the_command_line(device: str, tmp_path: Path) -> None:
    options = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
    small = ["--num-envs", "3", "--num-steps", "4", "--num-minibatches", "1", "--hidden-sizes", "8"]
    small += ["--network", "mlp", "--episodes", "2", "--device", device, "--out", str(tmp_path / "run")]
    assert main(["train", "tag_continuous", "--no-egocentric", *options, *small, "--total-steps", "24"]) == 0
    (path,) = list((tmp_path / "run" / "checkpoints").glob("*[0-9].safetensors"))[-1:]
    tensors, manifest = load_checkpoint(path)
    del manifest["game_config"]["egocentric"]
    save_checkpoint(path, tensors, manifest)
    assert main(["train", "--resume", str(tmp_path / "run"), "--total-steps", "48", "--device", device]) == 0


def test_an_old_replay_is_of_version_0(device: str) -> None:
    env = VecEnv(configure("tag_continuous", **FEW, egocentric=False), 1, device)
    (made,) = record(env, {"tagger": None, "runner": None}, seed=3)
    old = dataclasses.replace(made, config={k: v for k, v in made.config.items() if k != "egocentric"})
    assert made.version == 0 and configured(old, None) == env.game
    assert torch.equal(env.reset(seed=3)[0], VecEnv(configured(old, None), 1, device).reset(seed=3)[0])
