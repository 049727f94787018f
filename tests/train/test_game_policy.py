"""Policies of a run, loaded again: that they act as they did in training, and what is refused."""

import dataclasses
import shutil

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.scouts import Scouts
from support.bitwise import equal_bits
from torch import nn

import gpu_vecenv
from gpu_vecenv import GamePolicy, PolicySpec, PPOConfig, Trainer, load_policy
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import AgentKeyError, CheckpointCorruptError, ConfigError, UnknownGameError
from gpu_vecenv.train.checkpoint import CheckpointFolder, load_checkpoint, save_checkpoint
from gpu_vecenv.train.distributions import masked
from gpu_vecenv.train.evaluation import evaluate

TAG = {"num_taggers": 2, "num_runners": 3, "max_steps": 20}
SMALL = {"total_steps": 10**6, "num_steps": 8, "num_epochs": 1, "num_minibatches": 2, "learning_rate": 0.05}
CASES = {
    "one role": ("cartpole", {}, {"staggered_starts": False}, None),
    "each role its own": ("tag_continuous", TAG, {"normalize_obs": True, "normalize_returns": True}, None),
    "shared": ("tag_continuous", TAG, {"shared_trunk": False, "activation": "relu"}, ["tagger+runner"]),
    "other sizes and heads, masks": (Crew, {"num_helpers": 3}, {"hidden_sizes": (8, 4)}, None),
    "images, masks": (Scouts, {}, {"normalize_obs": True}, None),
    "Box beside choices, masks": (Economy, {}, {"squash": "tanh"}, None),
    "Box": ("pendulum", {}, {"precision": "bfloat16"}, None),
    "Box of two numbers, tanh": (Painter, {}, {"squash": "tanh"}, None),
    "Box of two numbers, beta": (Painter, {}, {"squash": "beta"}, None),
}


@pytest.fixture(autouse=True)
def registered():
    """The test games, for as long as a test lasts."""
    before = dict(GAMES)
    for game in (Crew, Economy, Painter, Scouts):
        GAMES[game.name()] = game
    yield
    GAMES.clear()
    GAMES.update(before)


def made(case, device):
    game, config, changes, names = CASES[case]
    env = gpu_vecenv.make(game, 6, device, autoreset_mode="next_step", **config)
    policies = None if names is None else {name: PolicySpec() for name in names}
    trainer = Trainer(env, PPOConfig(**{**SMALL, **changes}), seed=3, policies=policies)
    for _ in range(2):
        trainer.train_iteration()
    return trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trainer and run folder of a case on a device, made once."""
    kept = {}

    def run(case, device):
        if (case, device) not in kept:
            trainer = made(case, device)
            folder = tmp_path_factory.mktemp("run")
            CheckpointFolder(folder / "checkpoints").save(trainer.iteration, *trainer.state(), best=True)
            kept[case, device] = trainer, folder
        return kept[case, device]

    return run


def played(trainer):
    """Observations and masks of some steps, one step a row."""
    env = trainer.env.like(autoreset_mode="same_step")
    obs, info = env.reset(seed=9)
    seen = [(obs.clone(), info["action_mask"].clone() if "action_mask" in info else None)]
    for _ in range(5):
        obs, *_, info = env.step(env.sample_actions())
        seen.append((obs.clone(), info["action_mask"].clone() if "action_mask" in info else None))
    obs, masks = zip(*seen, strict=True)
    return torch.stack(obs), None if masks[0] is None else torch.stack(masks)


def likeliest(trainer, obs, mask):
    """Greedy actions (steps, envs, agents[, heads]) of the trainer's own policies, by definition, one by one."""
    game = trainer.env.game
    kind = torch.int32 if game.layout.action.discrete else torch.float32
    actions = torch.zeros((*obs.shape[:2], game.num_agents, *game.layout.action.shape), dtype=kind, device=obs.device)
    for policy in trainer.policies.values():
        roles = policy.view.roles
        first, end = game.layout.role_slices[roles[0]].start, game.layout.role_slices[roles[-1]].stop
        with torch.no_grad():  # all at once: products of other sizes may be rounded otherwise
            parameters = policy(obs[(..., slice(first, end), *game.layout.observation.own(roles[0]))])[0]
        for role in roles:
            for agent in range(game.layout.role_slices[role].start, game.layout.role_slices[role].stop):
                own = parameters[:, :, agent - first]
                if role in game.layout.action.bounds:
                    low, high = torch.tensor(game.layout.action.bounds[role], device=obs.device)
                    means = own[..., : len(low)]
                    inside = means.tanh() if policy.squash == "tanh" else means.clamp(-1, 1)
                    if policy.squash == "beta":
                        alphas, betas = (1 + torch.logaddexp(own[..., : 2 * len(low)], own.new_zeros(()))).chunk(2, -1)
                        inside = 2 * alphas / (alphas + betas) - 1
                    actions[:, :, agent, : len(low)] = low + (high - low) * (inside + 1) / 2
                    continue
                column = 0
                for head, size in enumerate(game.layout.action.sizes[role]):
                    at = sum(game.layout.action.head_sizes[:head])
                    allowed = None if mask is None else mask[:, :, agent, at : at + size]
                    chosen = masked(own[..., column : column + size], allowed).argmax(-1)
                    part = actions[:, :, agent, head] if game.layout.action.shape else actions[:, :, agent]
                    part.copy_(chosen)
                    column += size
    return actions


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_policy_acts_as_the_trained_one(case, runs, device):
    trainer, folder = runs(case, device)
    loaded = load_policy(folder, device=device)
    assert loaded.game == trainer.env.game
    obs, mask = played(trainer)
    found, expected = loaded(obs, mask, greedy=True), likeliest(trainer, obs, mask)
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.device == obs.device
    if not trainer.env.game.layout.action.discrete:
        # Up to 8 roundings, as the Box is stretched in another order; of numbers up to 6, half of 2**-21 each.
        assert (found - expected).abs().max() <= 8 * 2**-22
        assert found.unique().numel() > 3, "these weights tell nothing apart"
    else:
        assert found.equal(expected)
        assert found.unique().numel() > 1, "these weights tell nothing apart"
    assert loaded(obs[2], None if mask is None else mask[2]).shape == found.shape[1:]
    assert loaded(obs[2, 1], None if mask is None else mask[2, 1]).shape == found.shape[2:]


@pytest.mark.parametrize("case", ["other sizes and heads, masks", "images, masks"])
def test_an_exported_policy_acts_alike_for_any_number_of_environments(case, runs, device, tmp_path):
    trainer, folder = runs(case, device)
    loaded = load_policy(folder, device=device)
    obs, mask = played(trainer)
    any_number = {0: torch.export.Dim("num_envs")}
    shapes = {"obs": any_number, "action_mask": None if mask is None else any_number, "greedy": None}
    few = (obs[0], None if mask is None else mask[0])
    with torch.no_grad():
        program = torch.export.export(loaded, few, {"greedy": True}, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "policy.pt2")
    again = torch.export.load(tmp_path / "policy.pt2").module()
    many = (obs.flatten(0, 1), None if mask is None else mask.flatten(0, 1))
    assert torch.equal(again(*many, greedy=True), loaded(*many, greedy=True))


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_policy_is_the_trained_one_bit_by_bit(case, runs, device):
    trainer, folder = runs(case, device)
    loaded = load_policy(str(folder), device=device)
    for policy in trainer.policies.values():
        for role in policy.view.roles:
            own, other = policy.state_dict(), loaded[role].state_dict()
            assert own.keys() == other.keys() and all(own[name].equal(other[name]) for name in own)
            assert loaded[role] is loaded.policies[role] is loaded[policy.view.roles[0]]
            assert loaded[role].squash == policy.squash
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    numbers = {id(p) for policy in loaded.policies.values() for p in policy.parameters()}
    assert {id(p) for p in loaded.parameters()} == numbers
    role_policies = {role: loaded[role] for role in trainer.env.game.roles}
    for greedy in (False, True):
        assert evaluate(trainer.env, role_policies, 12, greedy=greedy) == trainer.evaluate(12, greedy=greedy)


def test_draws_follow_the_masks_and_the_generator(runs, device):
    trainer, folder = runs("other sizes and heads, masks", device)
    loaded, (obs, mask) = load_policy(folder, device=device), played(trainer)

    def drawn(seed):
        return loaded(obs, mask, generator=torch.Generator(device).manual_seed(seed))

    assert drawn(1).equal(drawn(1)) and not drawn(1).equal(drawn(2))
    many = loaded(obs.expand(50, *obs.shape), mask.expand(50, *mask.shape)).long()
    first, second = mask[..., :5].gather(-1, many[..., :1].movedim(0, -1)[..., 0, :]), many[:, :, :, 0, 1]
    assert first[mask[..., :5].any(-1)].all()
    assert second.eq(0).all(), "the driver has one head"
    env = trainer.env.like(num_envs=64, autoreset_mode="same_step")
    obs, info = env.reset(seed=1)
    for _ in range(20):
        obs, *_, info = env.step(loaded(obs, info["action_mask"]))
    assert env.faults().eq(0).all()


def test_a_single_file_and_the_best_one(tmp_path, device):
    trainer = made("one role", device)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    files, weights = [], []
    for iteration in (1, 2):
        files.append(folder.save(iteration, *_of_iteration(trainer, iteration), best=iteration == 1))
        weights.append({name: tensor.clone() for name, tensor in trainer.policies["agent"].state_dict().items()})
        trainer.train_iteration()

    def same(one, other):
        return all(one[name].equal(tensor) for name, tensor in other["agent"].state_dict().items())

    assert not same(weights[0], load_policy(files[1], device=device))
    assert same(weights[0], load_policy(files[0], device=device))
    assert same(weights[1], load_policy(tmp_path, device=device))
    assert same(weights[1], load_policy(tmp_path / "checkpoints", device=device))
    assert same(weights[0], load_policy(tmp_path, best=True, device=device))
    assert same(weights[1], load_policy(shutil.copy(files[1], tmp_path / "copy.safetensors"), device=device))
    with pytest.raises(ConfigError, match=r"best is True, but .* not a run folder"):
        load_policy(files[0], best=True, device=device)


def _of_iteration(trainer, iteration, world_size=1):
    tensors, manifest = trainer.state()
    return tensors, {**manifest, "iteration": iteration, "world_size": world_size}


def test_one_file_of_a_run_of_several_processes_is_enough(tmp_path):
    trainer = made("one role", "cpu")
    for iteration in (1, 2):
        CheckpointFolder(tmp_path, world_size=4).save(iteration, *_of_iteration(trainer, iteration, world_size=4))
    assert load_policy(tmp_path, device="cpu").policies.keys() == {"agent"}


def test_damaged_files_are_passed_over_with_a_warning(tmp_path):
    trainer = made("one role", "cpu")
    folder = CheckpointFolder(tmp_path)
    files = [folder.save(iteration, *_of_iteration(trainer, iteration)) for iteration in (1, 2, 3)]
    for file in files[1:]:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="iteration 1 is used instead") as warned:
        load_policy(tmp_path, device="cpu")
    assert [str(file) in str(warning.message) for file, warning in zip(files[:0:-1], warned, strict=True)] == [True] * 2
    assert {warning.filename for warning in warned} == {__file__}
    files[0].write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match="no usable checkpoint"):
        load_policy(tmp_path, device="cpu")
    with pytest.raises(CheckpointCorruptError, match="damaged"):
        load_policy(files[1], device="cpu")


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no usable checkpoint in .*: there is none"):
        load_policy(tmp_path, device="cpu")
    with pytest.raises(FileNotFoundError, match=r"best\.safetensors"):
        load_policy(tmp_path, best=True, device="cpu")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_policy(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("best", [False, True])
def test_a_folder_of_runs_names_them(best, tmp_path):
    for seed in (1, 0):
        (tmp_path / f"seed-{seed}" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no .*checkpoint.*; the folder has runs, .*: seed-0, seed-1$"):
        load_policy(tmp_path, best=best, device="cpu")


def test_a_game_that_is_not_registered(runs):
    trainer, folder = runs("other sizes and heads, masks", "cpu")
    del GAMES["crew"]
    with pytest.raises(UnknownGameError, match=r"'crew'.*Import the module .*, or pass the game: .*game="):
        load_policy(folder, device="cpu")
    assert load_policy(folder, game=Crew(num_helpers=3), device="cpu").game is not trainer.env.game
    GAMES["other_name"] = Crew
    assert load_policy(folder, device="cpu").game == Crew(num_helpers=3)


def test_a_game_that_is_given_must_be_the_runs(runs):
    _, folder = runs("other sizes and heads, masks", "cpu")
    for other in (Crew(num_helpers=2), Crew(num_helpers=3, length=7), Painter()):
        with pytest.raises(
            ConfigError, match=r"game is (Crew|Painter).*; expected crew with .*'num_helpers': 3"
        ) as caught:
            load_policy(folder, game=other, device="cpu")
        assert repr(other) in str(caught.value)


class Own(nn.Module):
    """A user's network for cartpole; its weights are named like nobody else's."""

    def __init__(self, units=5):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, units), nn.Linear(units, 3)

    def forward(self, obs):
        outputs = self.outer(self.inner(obs).relu())
        return outputs[..., :2], outputs[..., 2]


def test_networks_of_the_users_own(tmp_path, device):
    env = gpu_vecenv.make("cartpole", 4, device, autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(**SMALL), policies={"agent": Own()})
    trainer.train_iteration()
    path = trainer.save(tmp_path / "own.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"a policy that does not use the default network needs one: networks=\{'agent': module\}.*inner",
    ) as bad:
        load_policy(path, device=device)
    assert str(path) in str(bad.value)
    with pytest.raises(ConfigError, match=r"networks\['agent'\] differs from the network"):
        load_policy(path, networks={"agent": Own(6)}, device=device)
    with pytest.raises(ConfigError, match=r"networks has \['driver'\]; expected some of \['agent'\]"):
        load_policy(path, networks={"driver": Own()}, device=device)
    network = Own()
    loaded, (obs, _) = load_policy(path, networks={"agent": network}, device=device), played(trainer)
    assert loaded["agent"].network is network
    assert loaded(obs, greedy=True).equal(likeliest(trainer, obs, None))


def changed(path, folder, tensors=None, **manifest):
    """A copy of a checkpoint with other entries."""
    old, entries = load_checkpoint(path)
    save_checkpoint(folder / "changed.safetensors", {**old, **(tensors or {})}, {**entries, **manifest})
    return folder / "changed.safetensors"


def test_files_that_are_whole_but_wrong(runs, tmp_path):
    trainer, folder = runs("each role its own", "cpu")
    path = next((folder / "checkpoints").glob("iteration*"))
    _, manifest = load_checkpoint(path)
    key = "policy.runner.network.actor.bias"
    for value in (float("nan"), float("inf")):
        bad = torch.full_like(trainer.state()[0][key], value)
        with pytest.raises(
            CheckpointCorruptError, match=r"NaN or infinite values in policy\.runner\.network\.actor\.b"
        ):
            load_policy(changed(path, tmp_path, {key: bad}), device="cpu")
    for entry in ("game", "game_config", "policies"):
        with pytest.raises(CheckpointCorruptError, match=f"it lacks {entry}"):
            load_policy(changed(path, tmp_path, **{entry: None}), device="cpu")
    save_checkpoint(tmp_path / "foreign.safetensors", {}, {})
    with pytest.raises(CheckpointCorruptError, match="it lacks game, game_config, policies"):
        load_policy(tmp_path / "foreign.safetensors", device="cpu")
    one, two = manifest["policies"].values()
    with pytest.raises(CheckpointCorruptError, match="policy 'runner' has the configuration 3"):
        load_policy(changed(path, tmp_path, policies={"tagger": one, "runner": 3}), device="cpu")
    with pytest.raises(ConfigError, match=r"'tagger' has unknown configuration keys \['new'\]"):
        load_policy(changed(path, tmp_path, policies={"tagger": {**one, "new": 1}, "runner": two}), device="cpu")
    with pytest.raises(ConfigError, match="networks="):
        wider = {**one, "hidden_sizes": [7]}
        load_policy(changed(path, tmp_path, policies={"tagger": wider, "runner": two}), device="cpu")
    with pytest.raises(ConfigError, match=r"policies are for \['tagger'\]; expected each of the roles"):
        load_policy(changed(path, tmp_path, policies={"tagger": one}), device="cpu")


def test_the_saved_state_of_the_environment_is_not_used(runs, tmp_path):
    _, folder = runs("each role its own", "cpu")
    path = next((folder / "checkpoints").glob("iteration*"))
    state = {name: tensor for name, tensor in load_checkpoint(path)[0].items() if not name.startswith("policy.")}
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8).fill_(0xFF)
    assert any(name.startswith("env.") for name in state)
    forged = load_policy(changed(path, tmp_path, state), device="cpu")
    assert equal_bits(forged.state_dict(), load_policy(path, device="cpu").state_dict())


def test_loading_leaves_torchs_draws_alone(runs):
    _, folder = runs("one role", "cpu")
    before = torch.random.get_rng_state()
    load_policy(folder, device="cpu")
    assert torch.random.get_rng_state().equal(before)


def test_without_a_device_it_is_the_one_that_environments_take(runs):
    _, folder = runs("one role", "cpu")
    assert load_policy(folder).device == gpu_vecenv.make("cartpole", 1).device


def test_roles_by_name(runs):
    _, folder = runs("shared", "cpu")
    loaded = load_policy(folder, device="cpu")
    assert list(loaded.policies) == ["tagger", "runner"] and loaded["tagger"] is loaded["runner"]
    for unknown in ("taggr", "tagger+runner", 0):
        with pytest.raises(AgentKeyError, match=r"no role .* with agents; .*tagger"):
            loaded[unknown]


def test_policies_must_be_of_each_role_once(runs):
    trainer, _ = runs("each role its own", "cpu")
    game, (tagger, runner) = trainer.env.game, trainer.policies.values()
    assert GamePolicy(game, {"tagger": tagger, "runner": runner}).policies == {"tagger": tagger, "runner": runner}
    for wrong in ({}, {"tagger": tagger}, {"tagger": tagger, "runner": runner, "other": runner}):
        message = r"expected each of the roles \['tagger', 'runner'\] once|unknown role 'other'"
        with pytest.raises(ConfigError, match=message):
            GamePolicy(game, wrong)
    with pytest.raises(ConfigError, match=r"policies\['tagger'\] is of 'runner'"):
        GamePolicy(game, {"tagger": runner, "runner": tagger})
    with pytest.raises(TypeError, match=r"policies\['runner'\] is a Linear; expected a Policy"):
        GamePolicy(game, {"tagger": tagger, "runner": nn.Linear(1, 1)})


def test_a_role_without_agents_needs_no_policy(tmp_path, device):
    env = gpu_vecenv.make(Scouts, 4, device, num_scouts=0, autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(**SMALL))
    loaded = load_policy(trainer.save(tmp_path / "pilot.safetensors"), device=device)
    assert list(loaded.policies) == ["pilot"]
    obs, mask = played(trainer)
    assert loaded(obs, mask, greedy=True).equal(likeliest(trainer, obs, mask))


def test_wrong_tensors(runs, device):
    trainer, folder = runs("other sizes and heads, masks", device)
    loaded, (obs, mask) = load_policy(folder, device=device), played(trainer)
    for error, message, arguments in (
        (TypeError, "obs is a list; expected a torch tensor", (obs.tolist(),)),
        (TypeError, "obs has dtype torch.float64; expected torch.float32", (obs.double(),)),
        (ValueError, r"obs has shape \(6, 6, 3, 4\); expected \(…, 4, 4\)", (obs[:, :, 1:],)),
        (ValueError, r"obs has shape \(4,\); expected \(…, 4, 4\)", (obs[0, 0, 0],)),
        (ValueError, r"obs has shape \(\); expected \(…, 4, 4\)", (obs[0, 0, 0, 0],)),
        (ValueError, "obs is on meta; expected", (obs.to("meta"),)),
        (TypeError, "action_mask has dtype torch.uint8; expected torch.bool", (obs, mask.byte())),
        (ValueError, r"action_mask has shape \(6, 4, 8\); expected \(6, 6, 4, 8\)", (obs, mask[0])),
        (ValueError, r"action_mask has shape \(6, 6, 4, 7\); expected \(6, 6, 4, 8\)", (obs, mask[..., 1:])),
        (ValueError, "action_mask is on meta; expected", (obs, mask.to("meta"))),
    ):
        with pytest.raises(error, match=message):
            loaded(*arguments)
    box = load_policy(runs("Box", device)[1], device=device)
    with pytest.raises(ValueError, match="action_mask is given; expected None"):
        box(torch.zeros(2, 1, 3, device=device), torch.ones(2, 1, 1, dtype=torch.bool, device=device))


def test_what_a_manifest_holds_is_a_configuration(runs):
    """Lists, as JSON has them, become tuples again."""
    trainer, folder = runs("other sizes and heads, masks", "cpu")
    _, manifest = load_checkpoint(next((folder / "checkpoints").glob("iteration*")))
    assert manifest["policies"]["driver"]["hidden_sizes"] == [8, 4]
    config = PPOConfig(**manifest["policies"]["driver"])
    assert dataclasses.asdict(config) == dataclasses.asdict(trainer.config)
