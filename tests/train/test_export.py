"""Exported policies: they act like the policy, in other programs too; what cannot be exported is refused."""

import copy
import json
import re
import sys
import types

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.painter import Painter
from support.warm_process import run_python
from torch import nn

import gpu_vecenv
from gpu_vecenv import GamePolicy, PolicySpec, PPOConfig, Trainer, load_policy
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, ExportError
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.evaluation import RolePolicies
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
    "GRU, masks, roles that differ": (Crew, {}, {"network": "gru", "normalize_returns": True}),
    "LSTM, Box, normalised": (Painter, {}, {"network": "lstm", "hidden_sizes": (8, 8), "normalize_obs": True}),
    "GRU, central critic": (Painter, {}, {"network": "gru", "critic": "central", "normalize_obs": True}),
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
    """On other observations than those of the export, one row and many; with a state that is stepped several times."""
    described = json.loads((files[0].path.parent / "policy.json").read_text())["policies"]
    assert [file.path.name for file in files] == [one["file"] for one in described.values()]
    for (name, one), file in zip(by_name(policy).items(), files, strict=True):
        assert 0 <= file.difference <= TOLERANCE
        for rows in (1, 33):
            state = of_policy = torch.zeros(rows, one.acting_state_size)
            for t in range(4 if one.acting_state_size else 1):
                inputs = sample_inputs(policy, one, rows, seed=7 + t)
                if "state" in inputs:
                    inputs["state"] = state
                found = call(file.path, inputs)
                of_policy = assert_gives_what_the_policy_gives(one, inputs, found, of_policy)
                state = found.get("next_state")
                if t == 1:  # episodes of other rows end
                    state[::2], of_policy[::2] = 0, 0
        for found_as, of_file in (("inputs", inputs), ("outputs", found)):
            assert list(of_file) == list(described[name][found_as])
            for key, entry in described[name][found_as].items():
                assert ["rows", *of_file[key].shape[1:]] == entry["shape"]
                assert str(of_file[key].numpy().dtype) == entry["dtype"]
        assert described[name]["recurrent_state_size"] == one.acting_state_size


def assert_gives_what_the_policy_gives(one, inputs, found, state):
    """The outputs of a file are those of a policy with a state of its own, whose next one is returned."""
    obs, mask = inputs["obs"], inputs.get("action_mask")
    if one.acting_state_size:
        actions, _ = one.act(obs, mask, state=state, greedy=True)
        parameters, next_state = one.acting(obs, state)
        expected = {"actions": actions, "parameters": parameters, "next_state": next_state}
    else:
        expected = {"actions": one.act(obs, mask, greedy=True), "parameters": one.parameters_of(obs)}
    assert list(found) == list(expected)
    scale = max(expected["parameters"].abs().max().item(), 1)
    for key, tensor in expected.items():
        if key == "actions" and not one.view.continuous:
            assert found[key].equal(tensor) and tensor.dtype == torch.int32
        else:
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=TOLERANCE * scale)
    return expected.get("next_state", state)


def outputs_of(inputs):
    return ("actions", "parameters", "next_state")[: 3 if "state" in inputs else 2]


def call_torchscript(path, inputs):
    return dict(zip(outputs_of(inputs), torch.jit.load(path)(*inputs.values()), strict=True))


def test_torchscript_acts_like_the_policy(policy, tmp_path):
    files = export(policy, tmp_path, "torchscript")
    assert_acts_alike(policy, files, call_torchscript)


@pytest.mark.slow
def test_onnx_acts_like_the_policy(policy, tmp_path):
    assert_onnx_acts_alike(policy, tmp_path)


def assert_onnx_acts_alike(policy, folder):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def call(path, inputs):
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert [x.name for x in session.get_inputs()] == list(inputs)
        names = [x.name for x in session.get_outputs()]
        found = session.run(names, {name: x.numpy() for name, x in inputs.items()})
        return dict(zip(names, map(torch.from_numpy, found), strict=True))

    assert_acts_alike(policy, export(policy, folder, "onnx"), call)


def test_inputs_of_the_comparison_reach_what_they_should(policy):
    for one in by_name(policy).values():
        inputs = sample_inputs(policy, one, 200)
        obs, mask = inputs["obs"], inputs.get("action_mask")
        space = policy.game.layout.observation.spaces[one.view.roles[0]]
        assert obs.dtype == getattr(torch, str(space.dtype)) and all(space.contains(x) for x in obs.numpy())
        assert (obs != obs[0]).any(0).all()
        assert (mask is not None) == (policy.game.masks_actions and not one.view.continuous)
        for part in () if mask is None else mask.split(list(one.view.head_sizes), -1):
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


class Memory(nn.Module):
    """A recurrent network of a user's, with a cell of torch's; it records the states of its own calls."""

    recurrent_state_size = 6

    def __init__(self, next_state=lambda state: state):
        super().__init__()
        self.cell, self.actor, self.critic = nn.GRUCell(4, 6), nn.Linear(6, 2), nn.Linear(6, 1)
        self.next_state, self.calls = next_state, []

    def forward(self, obs, state):
        after = self.cell(obs, state)
        self.calls.append((state, after))
        return self.actor(after), self.critic(after).squeeze(-1), self.next_state(after)


def memory(network):
    game = gpu_vecenv.configure("cartpole")
    return GamePolicy(game, {"agent": Policy(game, ["agent"], network)}, {"agent": PPOConfig()})


def test_a_recurrent_network_of_ones_own_is_compared_over_episodes(tmp_path):
    network = Memory()
    policy = memory(network)
    files = export(policy, tmp_path, "torchscript")
    states = torch.stack([before for before, _ in network.calls])
    assert states.shape == (20, 50, 6) and not states[0].any()
    for (_, after), state in zip(network.calls[:-1], states[1:], strict=True):
        begins = (state == 0).all(-1)
        assert 0 < begins.sum() < 25
        torch.testing.assert_close(state[~begins], after[~begins])  # the file's and the network's are rounded otherwise
    assert_acts_alike(policy, files, call_torchscript)


@pytest.mark.slow
def test_onnx_of_a_recurrent_network_of_ones_own(tmp_path):
    assert_onnx_acts_alike(memory(Memory()), tmp_path)


@pytest.mark.parametrize(
    ("next_state", "text"),
    [
        (lambda state: state if len(state) < 9 else -state, "next_state differ from the policy's by"),
        (lambda state: state[:2], "cannot be exported as torchscript: ConfigError: .*and the next state"),
    ],
)
def test_a_recurrent_file_whose_state_differs_is_not_written(next_state, text, tmp_path):
    with pytest.raises(ExportError, match=text):
        export(memory(Memory(next_state)), tmp_path, "torchscript")
    assert not list(tmp_path.iterdir())


def test_the_card_of_a_network_of_ones_own_names_it(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = Memory()
    network.cell.weight_hh.data *= 9  # so that actions depend on states
    network.actor.bias.data.zero_()
    policy = memory(network)
    export_hub(policy, tmp_path)
    assert run_code_of_card(tmp_path, monkeypatch, Memory=Memory)["obs"].equal(play(policy))


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


def test_files_of_policies_with_other_inputs_are_refused(tmp_path):
    trainer = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), PPOConfig(num_steps=4, hidden_sizes=(8,), agent_ids=True))
    trainer.save(tmp_path / "policy.safetensors")
    policy = load_policy(tmp_path / "policy.safetensors", device="cpu")
    with pytest.raises(ExportError, match="agent_ids"):
        export(policy, tmp_path, "torchscript")


def test_the_folder_for_the_hub_has_a_card_and_loads(policy, tmp_path):
    files = export_hub(policy, tmp_path)
    assert sorted(path.name for path in files) == ["README.md", "config.json", "policy.safetensors"]
    loaded = load_policy(tmp_path / "policy.safetensors", game=policy.game, device="cpu")
    for role, one in policy.policies.items():
        inputs = sample_inputs(policy, one, 20)
        call = {"action_mask": inputs.get("action_mask"), "state": inputs.get("state"), "greedy": True}
        found, expected = (
            x if isinstance(x, tuple) else (x,) for x in (p.act(inputs["obs"], **call) for p in (loaded[role], one))
        )
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert loaded.configs[role] == policy.configs[role]
    tensors, manifest = load_checkpoint(tmp_path / "policy.safetensors")
    assert all(name.startswith("policy.") for name in tensors)
    assert json.loads((tmp_path / "config.json").read_text()) == manifest
    card = (tmp_path / "README.md").read_text()
    assert f"# PPO on {policy.game.name()}\n" in card and "not evaluated" in card and "model-index" not in card


def run_code_of_card(folder, monkeypatch, **names):
    """What the card's Python leaves, run with the hub's client replaced by one that finds the folder."""
    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = lambda repository, name: str(folder / name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    exec(code, names)
    return names


def play(policy):
    """The observations after the steps that a card's code takes, by the evaluation's actors."""
    env = gpu_vecenv.make(policy.game, 100, policy.device)
    actor = RolePolicies(env, policy.policies, greedy=True)
    obs, info = env.reset(seed=1)
    for _ in range(100):
        obs, *_, info = env.step(actor(obs, info.get("action_mask")))
    return obs


def test_the_code_of_a_card_acts_like_the_policy(policy, tmp_path, monkeypatch):
    kind = type(policy.game)
    monkeypatch.setitem(GAMES, kind.name(), kind)
    export_hub(policy, tmp_path)
    left = run_code_of_card(tmp_path, monkeypatch)
    assert left["obs"].equal(play(policy))
    card = (tmp_path / "README.md").read_text()
    for role, one in policy.policies.items():
        size = one.acting_state_size
        told = f"The policy of {role} is recurrent: each agent has a state of {size} float32 numbers, which is 0"
        assert (told in card) == (size > 0)


def test_the_code_of_a_card_plays_beside_a_role_that_a_function_played(tmp_path, monkeypatch, capsys):
    env = gpu_vecenv.make("tag_gridworld", 4, "cpu", max_steps=9, grid=4, autoreset_mode="next_step")
    still = PolicySpec(actor=lambda obs: obs.new_zeros(obs.shape[:2], dtype=torch.int32))
    trainer = Trainer(env, PPOConfig(total_steps=64, num_steps=4), policies={"tagger": PolicySpec(), "runner": still})
    path = trainer.save(tmp_path / "run.safetensors")
    export_hub(gpu_vecenv.load_policy(path, device="cpu"), tmp_path / "card")
    run_code_of_card(tmp_path / "card", monkeypatch)
    assert "'episodes': 100" in capsys.readouterr().out
    assert (
        "| runner | float32 (21,) | Discrete(5) | played by a function in training |"
        in (tmp_path / "card/README.md").read_text()
    )


@pytest.mark.parametrize("name", ["all trained", "trained with others frozen"])
def test_the_metadata_of_a_card_is_yaml_with_the_returns(name, policy):
    yaml = pytest.importorskip("yaml")
    role = next(iter(policy.policies))
    results = {
        "all random": {"episodes": 7, f"return_{role}": -9.0},
        f"{role} against random": {"episodes": 1200, f"return_{role}": 3.5, f"worst_return_{role}": -4.0},
        f"{role} against all against one.py:flee": {"episodes": 5, f"return_{role}": 2.25},
        name: {"episodes": 7, f"return_{role}": -1.25},
    }
    card = model_card(policy, results, curve=True)
    _, metadata, text = card.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["library_name"] == "gpu_vecenv" and "reinforcement-learning" in found["tags"]
    (metric,) = found["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "mean_reward", "name": f"return_{role}", "value": -1.25}
    assert "-1.25 |" in text and "learning_curve.png" in text
    assert f"| {role} against random | 1,200 | 3.5 |" in text and "all random" not in text
    assert f"| {role} against all against one.py:flee | 5 | 2.25 |" in text


def test_a_policy_whose_configuration_is_unknown_has_no_card(policy, tmp_path):
    with pytest.raises(ConfigError, match="hyperparameters are not known"):
        export_hub(GamePolicy(policy.game, by_name(policy)), tmp_path)


@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_a_policy_is_loaded_without_compiling_anything(network, tmp_path):
    config = PPOConfig(num_steps=4, total_steps=16, network=network)
    trainer = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), config)
    trainer.save(tmp_path / "policy.safetensors")
    (tmp_path / "act.py").write_text(ACT)
    cache = tmp_path / "cache"
    done = run_python("act.py", folder=tmp_path, variables={"GPU_VECENV_CACHE": str(cache), "PATH": ""})
    assert done.returncode == 0, done.stderr
    states = 3 * "torch.Size([5, 1, 256])\n" if network == "lstm" else ""
    assert done.stdout == states + "torch.Size([5, 1])\n"
    assert not cache.exists()


ACT = """
import torch, gpu_vecenv
policy = gpu_vecenv.load_policy("policy.safetensors", device="cpu")
obs = torch.zeros(5, 1, 4)
if policy.recurrent_state_size:
    state = policy.initial_state(5)
    for _ in range(3):
        actions, state = policy(obs, state=state, greedy=True)
        print(state.shape)
else:
    actions = policy(obs, greedy=True)
print(actions.shape)
"""
