"""Checkpoints of versions with fewer options: they load and resume; options that no longer exist are refused."""

import dataclasses
import re

import pytest
import torch
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, load_policy
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.checkpoint import FORMAT, load_checkpoint, save_checkpoint
from gpu_vecenv.train.stored_config import readable_config, with_defaults

# Those of PPOConfig when the format of checkpoints was 4 for the first time.
OLD_OPTIONS = set(
    "total_steps num_steps num_epochs num_minibatches learning_rate final_learning_rate gamma gae_lambda "
    "normalize_advantages clip final_clip value_clip value_coefficient entropy_coefficient final_entropy_coefficient "
    "target_kl max_grad_norm normalize_obs normalize_returns hidden_sizes activation shared_trunk squash precision "
    "chunk_rows".split()
)
SMALL = PPOConfig(total_steps=10**6, num_steps=4, num_minibatches=2, hidden_sizes=(8,), clip=0.3)
TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --episodes 4".split()

pytestmark = pytest.mark.usefixtures("one_thread")


def older(values):
    """A configuration as an older version stored it."""
    return {name: value for name, value in values.items() if name in OLD_OPTIONS}


def rewritten(path, change):
    """The file with other configurations, the trainer's and those of all policies."""
    tensors, manifest = load_checkpoint(path)
    policies = {name: change(values) for name, values in manifest["policies"].items()}
    save_checkpoint(path, tensors, {**manifest, "config": change(manifest["config"]), "policies": policies})
    return path


def trainer_of(device, **changes):
    env = gpu_vecenv.make("tag_gridworld", 4, device, autoreset_mode="next_step")
    return Trainer(env, dataclasses.replace(SMALL, **changes))


def test_the_old_options_are_some_of_todays():
    assert FORMAT == "4", "OLD_OPTIONS are now those of today"
    options = {field.name for field in dataclasses.fields(PPOConfig)}
    assert options > OLD_OPTIONS and "adam_epsilon" in options - OLD_OPTIONS


def test_a_trainer_resumes_from_a_file_without_newer_options(device, tmp_path):
    alone = trainer_of(device)
    alone.train_iteration()
    path = rewritten(alone.save(tmp_path / "old.safetensors"), older)
    assert "network" not in load_checkpoint(path)[1]["policies"]["tagger"]
    alone.train_iteration()
    resumed = trainer_of(device)
    resumed.load(path)
    resumed.train_iteration()
    assert equal_bits(alone.state()[0], resumed.state()[0])


def test_a_file_without_newer_options_is_of_their_defaults(device, tmp_path):
    path = rewritten(trainer_of(device).save(tmp_path / "old.safetensors"), older)
    with pytest.raises(
        ConfigError, match=r"its config.adam_epsilon is 1e-05, this trainer's 0.001; its policies\.runner"
    ):
        trainer_of(device, adam_epsilon=1e-3).load(path)
    with pytest.raises(ConfigError, match=r"its config.clip is 0.3, this trainer's 0.2"):
        trainer_of(device, clip=0.2).load(path)


def test_policies_are_loaded_from_a_file_without_newer_options(device, tmp_path):
    trainer = trainer_of(device)
    policy = load_policy(rewritten(trainer.save(tmp_path / "old.safetensors"), older), device=device)
    assert policy.configs == {"tagger": SMALL, "runner": SMALL}
    obs = torch.rand(trainer.rollout.obs[0].shape, device=device)
    expected = load_policy(trainer.save(tmp_path / "new.safetensors"), device=device)(obs, greedy=True)
    assert policy(obs, greedy=True).equal(expected)


def test_unknown_options_are_refused_with_the_version_that_has_them(device, tmp_path):
    trainer = trainer_of(device)
    path = rewritten(trainer.save(tmp_path / "new.safetensors"), lambda values: {**values, "of_tomorrow": 1})
    made_with = re.escape(f"'gpu_vecenv': '{gpu_vecenv.__version__}'")
    rest = rf"has unknown configuration keys \['of_tomorrow'\]; it was made with .*{made_with}.*install that version"
    before = trainer.state()[0]["policy.tagger.network.actor.bias"].clone()
    with pytest.raises(ConfigError, match=f"{path}: the trainer {rest}"):
        trainer.load(path)
    assert trainer.state()[0]["policy.tagger.network.actor.bias"].equal(before)
    with pytest.raises(ConfigError, match=f"{path}: the trainer {rest}"):
        load_policy(path, device=device)


def test_what_is_no_configuration_stays_as_it_is():
    for manifest in ({}, {"config": None, "policies": [1]}, {"policies": {"agent": 3}, "made_with": 4}):
        found = with_defaults(manifest, "a file")
        assert {key: found[key] for key in manifest} == manifest


def test_a_run_is_resumed_whose_files_have_no_newer_options(command, device, tmp_path):
    options = ["cartpole", *TINY, "--checkpoint-seconds", 0, "--digests", "--device", device]
    for name, iterations in (("alone", 4), ("old", 2)):
        rates = ["--final-learning-rate", "None"]
        code, _, errors = command("train", *options, *rates, "--total-steps", 16 * iterations, "--out", tmp_path / name)
        assert (code, errors) == (0, [])
    files = list((tmp_path / "old" / "checkpoints").glob("iteration-*"))
    for path in files:
        rewritten(path, older)
    code, _, errors = command("train", "--resume", tmp_path / "old", "--total-steps", 16 * 4)
    assert (code, errors) == (0, [])
    found = [
        load_checkpoint(tmp_path / name / "checkpoints" / "iteration-00000004.safetensors") for name in ("alone", "old")
    ]
    assert equal_bits(found[0][0], found[1][0])
    assert found[0][1]["policies"] == found[1][1]["policies"] and found[0][1]["config"] == found[1][1]["config"]


def test_a_run_with_unknown_options_is_not_resumed(command, device, tmp_path):
    code, _, errors = command(
        "train", "cartpole", *TINY, "--total-steps", 16, "--device", device, "--out", tmp_path / "run"
    )
    assert (code, errors) == (0, [])
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        rewritten(path, lambda values: {**values, "of_tomorrow": 1})
    code, _, errors = command("train", "--resume", tmp_path / "run", "--total-steps", 32)
    assert code == 2 and len(errors) == 1
    assert "unknown configuration keys ['of_tomorrow']; it was made with {" in errors[0]


def test_a_readable_configuration_has_what_differs_between_policies():
    config = dataclasses.asdict(SMALL)
    policies = {"tagger": config, "runner": {**config, "gamma": 0.9}}
    manifest = {"game": "tag_gridworld", "config": config, "policies": policies, "num_envs": 3, "world_size": 2}
    kept = {"game": "tag_gridworld", "config": config, "policies": {"tagger": {}, "runner": {"gamma": 0.9}}}
    assert readable_config({**manifest, "iteration": 4, "made_with": {}}) == {**kept, "num_envs": 6}
    exported = {"game": "tag_gridworld", "policies": policies}
    assert readable_config(exported) == exported, "without a trainer's configuration"
