"""Exported policies: they act like the policy, in other programs too; what cannot be exported is refused."""

import copy
import json

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from support.processes import child_environment
from support.warm_process import run_python
from torch import nn

import gpu_vecenv
from gpu_vecenv import GamePolicy, PPOConfig, Trainer, load_policy
from gpu_vecenv.errors import ConfigError, ExportError
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.export import TOLERANCE, export, sample_inputs
from gpu_vecenv.train.model_card import export_hub, model_card
from gpu_vecenv.train.policy import Policy

TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3}
SETUPS = {
    "entities, heads": ("tag_continuous", TAG, {"network": "entities", "normalize_obs": True}),
    "image, Box": (Painter, {}, {"network": "cnn", "shared_trunk": False}),
    "image, normalised": (Painter, {}, {"normalize_obs": True, "squash": "tanh"}),
    "image, beta": (Painter, {}, {"squash": "beta", "shared_trunk": False}),
    "image, central critic": (Painter, {}, {"critic": "central"}),
    "masks, roles that differ": (Crew, {}, {"normalize_returns": True, "hidden_sizes": ()}),
    "one choice": ("cartpole", {}, {"normalize_obs": True, "activation": "relu"}),
}


@pytest.fixture(params=SETUPS, scope="module")
def policy(request, tmp_path_factory):
    """After two iterations, so that its statistics are not the initial ones; with weights that are far from these."""
    kind, arguments, settings = SETUPS[request.param]
    config = PPOConfig(**{"num_steps": 4, "hidden_sizes": (16,), "num_minibatches": 2, "total_steps": 32, **settings})
    trainer = Trainer(gpu_vecenv.make(kind, 4, "cpu", **arguments), config)
    trainer.train()
    generator = torch.Generator().manual_seed(1)
    for one in trainer.policies.values():
        for p in one.parameters():
            p.data += 0.3 * torch.empty_like(p).normal_(generator=generator)
    path = tmp_path_factory.mktemp("run") / "policy.safetensors"
    trainer.save(path)
    return load_policy(path, game=trainer.env.game, device="cpu")


def by_name(policy):
    return {"+".join(one.view.roles): one for one in policy.policies.values()}


def assert_acts_alike(policy, files, call):
    """On other observations than those of the export, one row and many."""
    described = json.loads((files[0].path.parent / "policy.json").read_text())["policies"]
    assert [file.path.name for file in files] == [one["file"] for one in described.values()]
    for (name, one), file in zip(by_name(policy).items(), files, strict=True):
        assert 0 <= file.difference <= TOLERANCE
        for rows in (1, 33):
            inputs = sample_inputs(policy, one, rows, seed=7)
            actions, parameters = call(file.path, inputs)
            expected, of_policy = one.act(*inputs, greedy=True), one.parameters_of(inputs[0])
            scale = max(of_policy.abs().max().item(), 1)
            torch.testing.assert_close(parameters, of_policy, rtol=0, atol=TOLERANCE * scale)
            if one.view.continuous:
                torch.testing.assert_close(actions, expected, rtol=0, atol=TOLERANCE * scale)
            else:
                assert actions.equal(expected) and actions.dtype == torch.int32
            for key, tensor in (("actions", actions), ("parameters", parameters)):
                output = described[name]["outputs"][key]
                assert ["rows", *tensor.shape[1:]] == output["shape"]
                assert str(tensor.numpy().dtype) == output["dtype"]
            assert [list(x.shape[1:]) for x in inputs] == [x["shape"][1:] for x in described[name]["inputs"].values()]


def test_torchscript_acts_like_the_policy(policy, tmp_path):
    files = export(policy, tmp_path, "torchscript")
    assert_acts_alike(policy, files, lambda path, inputs: torch.jit.load(path)(*inputs))


@pytest.mark.slow
def test_onnx_acts_like_the_policy(policy, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def call(path, inputs):
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        found = session.run(["actions", "parameters"], {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        return [torch.from_numpy(x) for x in found]

    assert_acts_alike(policy, export(policy, tmp_path, "onnx"), call)


def test_inputs_of_the_comparison_reach_what_they_should(policy):
    for one in by_name(policy).values():
        obs, *mask = sample_inputs(policy, one, 200)
        space = policy.game.layout.observation.spaces[one.view.roles[0]]
        assert obs.dtype == getattr(torch, str(space.dtype)) and all(space.contains(x) for x in obs.numpy())
        assert (obs != obs[0]).any(0).all()
        assert bool(mask) == (policy.game.masks_actions and not one.view.continuous)
        for part in mask[0].split(list(one.view.head_sizes), -1) if mask else ():
            assert part.any(-1).all() and not part.all()
    assert np.isfinite(obs.numpy()).all()


class Doubled(torch.autograd.Function):
    """An operation that TorchScript does not have."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x


class Own(nn.Module):
    """A linear layer, and a function of its outputs."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 3), act

    def forward(self, obs):
        outputs = self.act(self.layer(obs))
        return outputs[..., :2], outputs[..., 2]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda x: x if len(x) < 9 else 2 * x, "parameters differ from the policy's by"),  # traced with two rows
        (Doubled.apply, "cannot be exported as torchscript: "),
    ],
)
def test_a_file_that_computes_something_else_is_not_written(act, text, tmp_path):
    game = gpu_vecenv.configure("cartpole")
    policy = GamePolicy(game, {"agent": Policy(game, ["agent"], Own(act))})
    with pytest.raises(ExportError, match=text):
        export(policy, tmp_path, "torchscript")
    assert not list(tmp_path.iterdir())


def test_bfloat16_policies_are_compared_in_float32(policy, tmp_path):
    policy = copy.deepcopy(policy)
    for one in by_name(policy).values():
        one.uses_bfloat16 = True
    export(policy, tmp_path, "torchscript")
    assert all(one.uses_bfloat16 for one in by_name(policy).values())


@pytest.mark.parametrize(
    ("settings", "text"), [({"network": "gru"}, "is recurrent"), ({"agent_ids": True}, "agent_ids")]
)
def test_files_of_policies_with_other_inputs_are_refused(settings, text, tmp_path):
    trainer = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), PPOConfig(num_steps=4, hidden_sizes=(8,), **settings))
    trainer.save(tmp_path / "policy.safetensors")
    policy = load_policy(tmp_path / "policy.safetensors", device="cpu")
    with pytest.raises(ExportError, match=text):
        export(policy, tmp_path, "torchscript")


def test_the_folder_for_the_hub_has_a_card_and_loads(policy, tmp_path):
    files = export_hub(policy, tmp_path)
    assert sorted(path.name for path in files) == ["README.md", "config.json", "policy.safetensors"]
    loaded = load_policy(tmp_path / "policy.safetensors", game=policy.game, device="cpu")
    for role, one in policy.policies.items():
        inputs = sample_inputs(policy, one, 20)
        assert loaded[role].act(*inputs, greedy=True).equal(one.act(*inputs, greedy=True))
        assert loaded.configs[role] == policy.configs[role]
    tensors, manifest = load_checkpoint(tmp_path / "policy.safetensors")
    assert all(name.startswith("policy.") for name in tensors)
    assert json.loads((tmp_path / "config.json").read_text()) == manifest
    card = (tmp_path / "README.md").read_text()
    assert f"# PPO on {policy.game.name()}\n" in card and "not evaluated" in card and "model-index" not in card


def test_the_metadata_of_a_card_is_yaml_with_the_returns(policy):
    yaml = pytest.importorskip("yaml")
    role = next(iter(policy.policies))
    card = model_card(policy, {f"return_{role}": -1.25}, curve=True)
    _, metadata, text = card.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["library_name"] == "gpu_vecenv" and "reinforcement-learning" in found["tags"]
    (metric,) = found["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "mean_reward", "name": f"return_{role}", "value": -1.25}
    assert "-1.25 |" in text and "learning_curve.png" in text


def test_a_policy_whose_configuration_is_unknown_has_no_card(policy, tmp_path):
    with pytest.raises(ConfigError, match="hyperparameters are not known"):
        export_hub(GamePolicy(policy.game, by_name(policy)), tmp_path)


def test_a_policy_is_loaded_without_compiling_anything(tmp_path):
    trainer = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), PPOConfig(num_steps=4, total_steps=16))
    trainer.save(tmp_path / "policy.safetensors")
    (tmp_path / "act.py").write_text(ACT)
    cache = tmp_path / "cache"
    environment = child_environment(GPU_VECENV_CACHE=str(cache), PATH="")
    done = run_python(tmp_path, "act.py", environment=environment)
    assert done.returncode == 0 and done.stdout == "torch.Size([5, 1])\n", done.stderr
    assert not cache.exists()


ACT = """
import torch, gpu_vecenv
policy = gpu_vecenv.load_policy("policy.safetensors", device="cpu")
print(policy(torch.zeros(5, 1, 4), greedy=True).shape)
"""
