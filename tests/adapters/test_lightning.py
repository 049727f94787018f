"""PyTorch Lightning: its loop makes of a policy what our trainer makes of it; loggers, checkpoints, two processes."""

import csv
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed")

from games.crew import Crew
from games.economy import Economy
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.adapter_contract import output_here
from support.processes import child_environment

import gpu_vecenv
from gpu_vecenv import PolicySpec, PPOConfig
from gpu_vecenv.adapters import lightning
from gpu_vecenv.errors import ConfigError, NonFiniteError

ROOT = Path(__file__).parents[2]
TAG = {"grid": 5, "max_steps": 20}
SMALL = PPOConfig(num_steps=8, num_epochs=2, num_minibatches=2, total_steps=4 * 8 * 16, learning_rate=1e-3)
NORMAL = {"normalize_obs": True, "normalize_returns": True}
ENVIRONMENT = child_environment()


def changed(**changes):
    return PPOConfig(**{**vars(SMALL), **changes})


def trainer(device, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    kind = "gpu" if device == "cuda" else "cpu"
    saves = any(isinstance(x, ModelCheckpoint) for x in options.get("callbacks", []))
    options = {"enable_checkpointing": saves, "max_epochs": -1, **quiet, **options}
    return Trainer(accelerator=kind, devices=1, **options)


def fitted(module, device, ckpt_path=None, **options):
    loop = trainer(device, **options)
    loop.fit(module, ckpt_path=ckpt_path)
    return loop


def state(module):
    """Copies of weights, normalisers, Adams, and of what a process has."""
    tensors = module.state_dict() | {f"process.{name}": x for name, x in module.inner.process_state().items()}
    for name, learner in module.learners.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in learner.optimizer_state().items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def equal_bits(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    ("game", "config", "changes"),
    [
        ("tag_gridworld", TAG, NORMAL),
        ("tag_gridworld", TAG, {"target_kl": 1e-6, "final_clip": 0.1, "final_entropy_coefficient": 0.0}),
        ("pendulum", {}, {"squash": "tanh", "value_clip": 0.2, "normalize_advantages": False, **NORMAL}),
        ("pendulum", {}, {"squash": "beta", "optimizer": "rmsprop", "momentum": 0.5, **NORMAL}),
        (Crew, {}, {"num_minibatches": 1}),
        (Economy, {}, {"num_minibatches": 1, "squash": "tanh"}),
    ],
)
def test_policies_become_what_our_trainer_makes_of_them(game, config, changes, device):
    module = lightning.make(game, 16, device, changed(**changes), seed=3, **config)
    loop = fitted(module, device)
    ours = gpu_vecenv.Trainer(gpu_vecenv.make(game, 16, device, **config), changed(**changes), seed=3)
    metrics = ours.train()
    assert module.inner.iteration == ours.iteration == loop.current_epoch == 4
    for name, policy in ours.policies.items():
        for key, tensor in policy.state_dict().items():
            # The norm of the gradients is a sum in another order; Adam may make much of the last bit of a small one.
            torch.testing.assert_close(module.policies[name].state_dict()[key], tensor, rtol=1e-4, atol=1e-5)
        for figure in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
            logged = loop.callback_metrics[f"{figure}_{name}"].item()
            assert logged == pytest.approx(metrics[f"{figure}_{name}"], rel=1e-3, abs=1e-5), figure  # as above
    for figure in ("env_steps", "episodes", "episode_length", "terminated_fraction", *module_returns(module)):
        logged = loop.callback_metrics[figure].item()  # Lightning's float32
        assert logged == pytest.approx(metrics[figure], rel=1e-6, nan_ok=game == "pendulum"), figure  # 200 steps
    # Not vacuous: weights are not those of the beginning.
    fresh = lightning.make(game, 16, device, changed(**changes), seed=3, **config)
    assert not torch.equal(*(next(iter(x.policies.values())).network.actor.weight for x in (module, fresh)))


def sparse(t):
    """The game's reward, and a price of each choice but 0."""
    return t.rewards - 0.25 * t.actions.bool().float()


def other(t):
    return t.rewards + 1


@pytest.mark.parametrize("first_env_index", [0, 32])  # with 32, fit makes an environment and a Trainer of its own
def test_a_reward_trains_the_policies_that_it_trains_with_our_trainer(first_env_index, device):
    env = gpu_vecenv.make("tag_gridworld", 16, device, first_env_index=first_env_index, **TAG)
    module = lightning.wrap(env, SMALL, seed=3, reward=sparse)
    loop = fitted(module, device)
    env = gpu_vecenv.make("tag_gridworld", 16, device, **TAG)
    ours, plain = (gpu_vecenv.Trainer(env.like(), SMALL, seed=3, reward=reward) for reward in (sparse, None))
    metrics = ours.train()
    plain.train()
    for name, policy in ours.policies.items():
        for key, tensor in policy.state_dict().items():
            # As above.
            torch.testing.assert_close(module.policies[name].state_dict()[key], tensor, rtol=1e-4, atol=1e-5)
        weights = (x.policies[name].network.actor.weight for x in (ours, plain))
        assert torch.sub(*weights).abs().max() > 1e-3, "not those of the game's own rewards"
        logged = loop.callback_metrics[f"shaped_reward_{name}"].item()  # Lightning's float32
        assert logged == pytest.approx(metrics[f"shaped_reward_{name}"], rel=1e-6)


def test_a_run_is_resumed_with_the_same_reward_alone(tmp_path, device):
    def module(reward):
        return lightning.make("tag_gridworld", 16, device, SMALL, seed=3, reward=reward, **TAG)

    each = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
    whole, again = module(sparse), module(sparse)
    fitted(whole, device, callbacks=[each])
    for reward in (None, other):
        expected = rf"the checkpoint's reward is '.*\.sparse', this module's {'.*other' if reward else 'None'}"
        with pytest.raises(ConfigError, match=expected):
            fitted(module(reward), device, tmp_path / "epoch=1.ckpt")
    fitted(again, device, tmp_path / "epoch=1.ckpt")
    assert equal_bits(state(whole), state(again))


def module_returns(module):
    return [f"return_{role}" for role in module.inner.env.game.roles]


@pytest.mark.slow
def test_it_learns(device):
    config = PPOConfig(num_steps=32, num_epochs=4, total_steps=30 * 32 * 64, learning_rate=3e-3)
    module = lightning.make("cartpole", 64, device, config, seed=1)
    at_random = module.inner.evaluate(100, random_roles=["agent"])["return_agent"]
    fitted(module, device)
    assert at_random < 30 and module.inner.evaluate(100)["return_agent"] > 3 * at_random


def test_each_policy_has_an_optimizer(device):
    shared = lightning.make("tag_gridworld", 16, device, SMALL, policies={"tagger+runner": PolicySpec()}, **TAG)
    frozen = {"tagger": PolicySpec(), "runner": PolicySpec(train=False)}
    half = lightning.make("tag_gridworld", 16, device, SMALL, policies=frozen, **TAG)
    both = lightning.make("tag_gridworld", 16, device, SMALL, **TAG)
    each = lightning.make("tag_gridworld", 16, device, SMALL, sharing="agent", **TAG)
    cases = [(shared, ["tagger+runner"]), (half, ["tagger"]), (both, ["tagger", "runner"])]
    for module, names in [*cases, (each, list(each.inner.env.game.layout.agent_names))]:
        before = state(module)
        loop = fitted(module, device, max_epochs=1)
        assert [set(map(id, x.param_groups[0]["params"])) for x in loop.optimizers] == [
            set(map(id, module.policies[name].parameters())) for name in names
        ]
        assert loop.global_step == 4 * len(names)
        moved = {name.split(".")[1] for name, x in state(module).items() if not x.equal(before[name]) and "." in name}
        assert moved & {"tagger", "runner", "tagger+runner", *names} == set(names)


def test_metrics_are_logged_once_an_epoch(tmp_path, device):
    module = lightning.make("tag_gridworld", 16, device, SMALL, **TAG)
    fitted(module, device, logger=CSVLogger(tmp_path, name="", version=""))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    each = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "return"}
    each |= {"explained_variance", "learning_rate", "skipped_fraction"}
    wanted = {f"{figure}_{role}" for figure in each for role in ("tagger", "runner")}
    wanted |= {
        "env_steps",
        "episodes",
        "first_episodes",
        "episode_length",
        "terminated_fraction",
        "epoch",
        "step",
        "agent_steps_per_s",
    }
    wanted |= {f"{stage}_time_fraction" for stage in ("policy", "sampling", "env", "update")}
    assert set(rows[0]) == wanted
    assert [float(row["env_steps"]) for row in rows] == [128, 256, 384, 512]
    rates = [float(row["learning_rate_runner"]) for row in rows]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


class Everything(Callback):
    """Keeps the module's state as each epoch ends."""

    def __init__(self):
        self.states = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.states.append(state(pl_module))


@pytest.mark.parametrize(
    ("game", "config", "changes"),
    [("tag_gridworld", TAG, {}), ("pendulum", {}, {}), ("pendulum", {}, {"network": "gru", "sequence_length": 4})],
)
def test_a_run_resumed_from_a_checkpoint_equals_one_without_interruption(game, config, changes, tmp_path, device):
    settings = changed(**NORMAL, **changes)

    def module():
        return lightning.make(game, 16, device, settings, seed=3, **config)

    kept, after = Everything(), Everything()
    each = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1)
    whole = module()
    loop = fitted(whole, device, callbacks=[kept, each])
    assert len(kept.states) == 4
    again = module()
    resumed = fitted(again, device, tmp_path / "epoch=1.ckpt", callbacks=[after])
    assert len(after.states) == 2 and again.inner.iteration == 4
    assert all(equal_bits(a, b) for a, b in zip(after.states, kept.states[2:], strict=True))
    assert not equal_bits(kept.states[1], kept.states[2])
    logged = (
        {n: x.nan_to_num() for n, x in each.callback_metrics.items() if "per_s" not in n and "time" not in n}
        for each in (loop, resumed)
    )
    assert equal_bits(*logged)
    env = gpu_vecenv.make(game, 4, device, **config)
    loaded = lightning.PPOModule.load_from_checkpoint(tmp_path / "epoch=3.ckpt", env=env, config=settings)
    assert all(x.equal(whole.state_dict()[name]) for name, x in loaded.state_dict().items())
    with pytest.raises(ConfigError, match=r"differ in .*env.engine_key.*\(16, 2\).*; expected .*\(8, 2\)"):
        fitted(lightning.make(game, 8, device, settings, **config), device, tmp_path / "epoch=1.ckpt")


def test_a_checkpoint_of_the_midst_of_an_epoch_is_refused(tmp_path, device):
    callbacks = [ModelCheckpoint(tmp_path, "midst", every_n_train_steps=3, save_top_k=1)]
    fitted(lightning.make("cartpole", 16, device, SMALL), device, callbacks=callbacks, max_steps=3)
    with pytest.raises(ConfigError, match="was saved during an epoch, by 1 processes; expected at the end of one"):
        fitted(lightning.make("cartpole", 16, device, SMALL), device, tmp_path / "midst.ckpt")


def test_a_second_fit_continues_the_first(device):
    """Lightning takes modules and optimisers to the CPU when it is done; graphs must still find the weights."""
    twice, once = (lightning.make("tag_gridworld", 16, device, changed(**NORMAL), **TAG) for _ in range(2))
    fitted(twice, device, max_epochs=2)
    weights = {name: p.data_ptr() for name, p in twice.named_parameters()}
    fitted(twice.to("meta"), device)
    assert {name: p.data_ptr() for name, p in twice.named_parameters()} == weights
    fitted(once, device)
    assert equal_bits(state(twice), state(once))
    assert twice.inner.evaluate(10)["episodes"] == 10


@pytest.mark.slow
def test_the_profiler_separates_rollout_and_update(device):
    module = lightning.make("cartpole", 16, device, SMALL)
    durations = fitted(module, device, profiler="simple").profiler.recorded_durations
    assert len(durations["[LightningModule]PPOModule.on_train_epoch_start"]) == 4
    assert len(durations["[Strategy]SingleDeviceStrategy.training_step"]) == 4 * 4


def test_our_own_mixed_precision_works(device):
    module = lightning.make("cartpole", 16, device, changed(precision="bfloat16"))
    fitted(module, device)
    plain = lightning.make("cartpole", 16, device, SMALL)
    fitted(plain, device)
    assert not equal_bits(module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_lightnings_precisions_are_refused(precision, device):
    module = lightning.make("cartpole", 16, device, SMALL)
    with pytest.raises(ConfigError, match=rf"precision '{precision}'; expected one device or 'ddp', and '32-true'"):
        fitted(module, device, precision=precision)


def test_what_has_no_word_is_refused():
    differing = {"tagger": PolicySpec(config=changed(num_minibatches=4)), "runner": PolicySpec()}
    with pytest.raises(ConfigError, match=r"\(num_epochs, num_minibatches\) are .*expected one pair"):
        lightning.make("tag_gridworld", 16, "cpu", SMALL, policies=differing)
    with pytest.raises(ConfigError, match=r"precision is tf32, .*set tf32 in torch instead"):
        lightning.make("cartpole", 16, "cpu", changed(precision="tf32"))
    with pytest.raises(ConfigError, match="the adapter sets it"):
        lightning.make("cartpole", 16, "cpu", SMALL, first_env_index=16)
    with pytest.raises(ConfigError, match="no configuration key 'max_stesp'"):
        lightning.make("cartpole", 16, "cpu", SMALL, max_stesp=3)


class Broken(torch.nn.Module):
    """Its gradient is not finite."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, obs):
        logits = self.weight.abs().sqrt().expand(*obs.shape[:-1], 2)
        return logits, logits[..., 0]


def test_what_is_not_finite_stops_the_run_and_leaves_the_weights(device):
    module = lightning.wrap(gpu_vecenv.make("cartpole", 16, device), SMALL, policies={"agent": Broken()})
    with pytest.raises(NonFiniteError, match=r"iteration 1: losses .*'grad_norm_agent': nan.* are not finite"):
        fitted(module, device)
    assert module.policies["agent"].network.weight.tolist() == [0, 0]


TWO = """
import sys
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from gpu_vecenv import PPOConfig
from gpu_vecenv.adapters import lightning

def run(**options):
    module = lightning.make("simple_tag", 8, "cpu", PPOConfig(**CONFIG), seed=3, max_steps=100)
    each = ModelCheckpoint(".", "{epoch}", save_top_k=-1, enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, callbacks=[each], **quiet)
    trainer.fit(module, **options)
    return module

if __name__ == "__main__":
    whole, again = run(), run(ckpt_path="epoch=1.ckpt")
    states = [{**x.state_dict(), **x.inner.env.state_dict()} for x in (whole, again)]
    torch.save(states, f"rank{whole.inner.world.rank}.pt")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_are_one_run_of_twice_the_envs(tmp_path):
    """Nobody ends or leaves here, so that the means over two shards are those over all rows."""
    config = {**vars(SMALL), "num_minibatches": 1, "normalize_advantages": False, "staggered_starts": False, **NORMAL}
    (tmp_path / "two.py").write_text(TWO.replace("CONFIG", repr(config)))
    environment = {k: v for k, v in ENVIRONMENT.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    command = [sys.executable, "two.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (first, first_again), (second, second_again) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert equal_bits(first, first_again) and equal_bits(second, second_again), "the checkpoint has both shards"
    ours = gpu_vecenv.Trainer(gpu_vecenv.make("simple_tag", 16, "cpu", max_steps=100), PPOConfig(**config), seed=3)
    ours.train()
    weights = torch.nn.ModuleDict(ours.policies).state_dict()
    for name, tensor in weights.items():
        assert first[f"policies.{name}"].equal(second[f"policies.{name}"])
        # Sums in another order, as above.
        torch.testing.assert_close(first[f"policies.{name}"], tensor, rtol=1e-4, atol=1e-5)
    episodes = [x["engine_elapsed_steps"] for x in (first, second)]
    assert torch.cat(episodes).equal(ours.env.state_dict()["engine_elapsed_steps"])


@pytest.mark.slow
def test_the_example_trains_and_resumes(device, tmp_path):
    options = "--num-envs 4 --num-steps 8 --max-steps 20 --episodes 4 --out out --iterations".split()
    example = ROOT / "examples" / "lightning_tag.py"

    def said(*more):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
            printed = output_here(example, *options, *more, "--device", device, folder=tmp_path)
        return re.findall(r"returns, (.*): tagger (-?[\d.]+), runner (-?[\d.]+)", printed)

    names = ["all random", "taggers trained, runners random", "runners trained, taggers random", "all trained"]
    assert [name for name, *_ in said("2")] == names
    assert len(said("3", "--resume", "out/checkpoints/last.ckpt")) == 4
    rows = list(csv.DictReader((tmp_path / "out" / "metrics.csv").open()))
    assert float(rows[-1]["env_steps"]) == 3 * 8 * 4
