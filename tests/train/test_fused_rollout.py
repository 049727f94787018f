"""Rollouts in one launch against rollouts of several launches a step, on emulated CUDA threads and on a GPU."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.fragile import Fragile
from games.painter import Painter
from games.probes import Forbidden
from games.race import Race
from games.sacrifice import Sacrifice
from support.bitwise import equal_bits
from support.learning import batch_of

import gpu_vecenv
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.train.fused_rollout import FusedRollout, fused_rollout, why_not_fused
from gpu_vecenv.train.perceptron import PerceptronKernels, TileShape
from gpu_vecenv.train.policy_kernels import Forward
from gpu_vecenv.train.policy_specs import PolicySpec, policy_of_spec, resolve_specs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.rollout_context import RolloutContext
from gpu_vecenv.train.rollout_storage import Rollout
from gpu_vecenv.train.rollout_tiles import STATIC_BYTES, TILES, RolloutTile
from gpu_vecenv.train.trainer import Trainer

NAN = float("nan")
OTHERS = ("float32", "bfloat16")
APART = {"shared_trunk": False}
BOTH = {"normalize_obs": True, "normalize_returns": True}


class Case(NamedTuple):
    """A game, its policies, their networks, and the environments; episodes end within a rollout."""

    game: object
    arguments: dict = {}  # noqa: RUF012
    config: dict = {}  # noqa: RUF012
    policies: tuple = ()  # by default one for each role
    env: dict = {}  # noqa: RUF012
    num_envs: int = 37  # the last block is not full


FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "acceleration_levels": 3, "turn_levels": 4}
MANY = {**FEW, "num_runners": 40, "max_steps": 8, "tagging_distance": 0.1}
CASES = {
    "two trunks": Case("cartpole", {"max_steps": 6}, {**APART, "hidden_sizes": (64, 48)}),
    "shared trunk": Case("cartpole", {"max_steps": 5}, {**BOTH, "activation": "relu", "hidden_sizes": (24,)}),
    "box": Case("pendulum", {"max_steps": 4}, {**APART, **BOTH, "hidden_sizes": (40, 24)}),
    "box, tanh": Case("pendulum", {"max_steps": 7}, {"squash": "tanh", "hidden_sizes": (16,)}),
    "box, beta": Case("pendulum", {"max_steps": 7}, {**BOTH, "squash": "beta", "hidden_sizes": (16,)}),
    "box and masks, beta": Case(Economy, {}, {"squash": "beta", "hidden_sizes": (16,)}),
    "several agents": Case("simple_spread", {"max_steps": 5}, {**APART, "hidden_sizes": (32, 32)}),
    "two roles in one": Case(
        "tag_gridworld", {"max_steps": 6}, {"hidden_sizes": (24, 16)}, ("tagger+runner",), num_envs=19
    ),
    "heads": Case("tag_continuous", {**FEW, "max_steps": 8}, {"hidden_sizes": (24,)}, ("tagger+runner",)),
    "many agents": Case(
        "tag_gridworld", {"num_taggers": 19, "max_steps": 5}, {"hidden_sizes": (16,)}, ("tagger+runner",), num_envs=5
    ),
    "groups": Case(
        "tag_gridworld",
        {"num_taggers": 35, "max_steps": 5, "full_observation": False},
        {**BOTH, "activation": "relu", "hidden_sizes": (16,)},
        ("tagger+runner",),
        num_envs=5,
    ),
    "groups, a policy for each role": Case("tag_continuous", MANY, {"hidden_sizes": (24,)}, num_envs=5),
    "a policy for each role": Case("tag_gridworld", {"max_steps": 6}, {"hidden_sizes": (24,)}),
    "a policy for each agent": Case(
        "tag_gridworld", {"num_taggers": 2, "max_steps": 6}, {"hidden_sizes": (16,)}, ("tagger_0", "tagger_1", "runner")
    ),
    "agents apart": Case(
        "tag_gridworld",
        {"num_taggers": 3, "max_steps": 6},
        {**APART, "hidden_sizes": (24,)},
        ("tagger_0+tagger_2", "tagger_1+runner"),
    ),
    "agent ids": Case(
        "tag_gridworld",
        {"num_taggers": 3, "max_steps": 6},
        {**BOTH, "agent_ids": True, "hidden_sizes": (24,)},
        ("tagger_0+tagger_2", "tagger_1+runner"),
    ),
    "agent ids, two trunks": Case("simple_spread", {"max_steps": 5}, {**APART, "agent_ids": True}),
    "groups, agent ids": Case("tag_continuous", MANY, {"agent_ids": True, "hidden_sizes": (24,)}, num_envs=5),
    "groups, agents apart": Case(
        "tag_continuous",
        MANY,
        {**BOTH, "hidden_sizes": (16,)},
        (
            "tagger+" + "+".join(f"runner_{k}" for k in range(0, 40, 2)),
            "+".join(f"runner_{k}" for k in range(1, 40, 2)),
        ),
        num_envs=5,
    ),
    "narrower observations": Case("simple_adversary", {"max_steps": 5}, {**APART, **BOTH, "hidden_sizes": (24, 16)}),
    "box beside choices": Case(Economy, {}, {**APART, "normalize_returns": True, "hidden_sizes": (24,)}),
    "groups, box beside choices": Case(
        Economy, {"num_workers": 34}, {"normalize_returns": True, "hidden_sizes": (16,)}, num_envs=4
    ),
    "masks of roles": Case(Crew, {}, {"hidden_sizes": (16,)}),
    "masks": Case(Forbidden, {}, {"hidden_sizes": (16,)}),
    "turns": Case(Race, {}, {"hidden_sizes": (16,)}),
    "deaths": Case(Sacrifice, {"num_units": 3}, {**APART, "hidden_sizes": (16,)}),
    "images": Case(Painter, {}, {**APART, "hidden_sizes": (24,)}),
    "randomised": Case("cartpole", {"randomize": {"gravity": (8.0, 12.0)}, "max_steps": 6}, {"hidden_sizes": (16,)}),
    "non-finite numbers": Case(Fragile, {"num_actions": 7}, {"hidden_sizes": (16,)}, env={"end_on_nonfinite": True}),
}


@pytest.fixture
def device(device_of_networks):
    return device_of_networks


class Setup:
    """Environments and policies that are the same each time."""

    def __init__(self, case, device, precision="float32", num_steps=9):
        game = gpu_vecenv.configure(case.game, **case.arguments)
        config = PPOConfig(precision=precision, **case.config)
        self.env = gpu_vecenv.make(game, case.num_envs, device, autoreset_mode="next_step", **case.env)
        self.rollout, self.sampler = Rollout(self.env, num_steps), Sampler(self.env, squash=config.squash)
        random = torch.Generator().manual_seed(5)
        specs = resolve_specs(game, config, {name: PolicySpec() for name in case.policies} or None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.policies = {
                name: policy_of_spec(name, spec, config, game, self.rollout.obs[0]) for name, spec in specs.items()
            }
        for policy in self.policies.values():
            with torch.no_grad():
                for p in policy.parameters():
                    p += (0.5 * torch.randn(p.shape, generator=random)).to(p.device)
            if policy.obs_normalizer is not None:
                mean = policy.obs_normalizer.mean
                mean.copy_(0.1 * torch.randn(mean.shape, generator=random))
                policy.obs_normalizer.var.copy_(0.5 + torch.rand(mean.shape, generator=random))
            if policy.return_normalizer is not None:
                policy.return_normalizer.mean.fill_(1.5)
                policy.return_normalizer.var.fill_(6.25)
        self.kernels = {n: PerceptronKernels(p, self.rollout, precision) for n, p in self.policies.items()}
        self.reasons = dict.fromkeys(self.kernels)
        self.parameters = torch.zeros(
            (self.env.num_envs, self.env.num_agents, self.sampler.num_parameters), device=self.env.device
        )
        self.forward_passes = [
            Forward(policy, self.rollout, self.parameters, self.kernels[name]) for name, policy in self.policies.items()
        ]
        self.env.reset(seed=3, out=self.rollout.last)

    @torch.no_grad()
    def collect(self):
        """By several launches a step."""
        self.rollout.collect(self.forward_passes, self.sampler, self.parameters)
        for forward in self.forward_passes:
            forward.finish()

    def tile(self, shape, *groups):
        """A block's tile."""
        networks = tuple(kernels.perceptron for kernels in self.kernels.values())
        return RolloutTile(shape, self.env.layout, networks, *groups)

    def fused(self, tile=None):
        """By one launch."""
        fused, reason = fused_rollout(self.rollout, self.sampler, self.reasons, self.kernels, tile)
        assert reason is None
        assert isinstance(fused, FusedRollout)
        return fused

    def results(self):
        """All that a rollout writes."""
        data = self.rollout
        names = ("obs", "active", "values", "action_mask", "draws", "log_probs", "rewards", "terminations")
        tensors = {name: getattr(data, name) for name in (*names, "truncations")}
        tensors["actions"] = data.samples[-1].actions
        tensors |= {f"env.{name}": tensor for name, tensor in self.env.state_dict().items()}
        return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not equal_bits(one[name], other[name])]


@pytest.mark.parametrize("name", CASES)
def test_one_launch_collects_what_several_launches_a_step_do(name, device):
    case = CASES[name]
    expected, found = Setup(case, device), Setup(case, device)
    fused = found.fused()
    for _ in range(3):
        expected.collect()
        fused()
        assert differing(expected.results(), found.results()) == []
    assert expected.env.episode_statistics()["episodes"].sum() > 0
    assert len(expected.rollout.draws.unique()) > 1 or name == "images"


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    "name",
    ["several agents", *(pytest.param(n, marks=pytest.mark.slow) for n in ("two trunks", "a policy for each role"))],
)
def test_results_do_not_depend_on_the_shape_of_the_launch(name, tile, device, monkeypatch):
    case = CASES[name]._replace(num_envs=29)
    expected, found = Setup(case, device, "tf32"), Setup(case, device, "tf32")
    fused = found.fused(found.tile(tile))
    assert fused.tile.tile == tile and 0 < fused.tile.envs <= tile.rows
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)
        expected.collect()
        fused()
        assert differing(expected.results(), found.results()) == []


# Case, warps of a group, rows of a warp's tile, groups of a block, whether observations are in shared memory. In the
# first one warp has more tiles than the other.
GROUPS = [
    ("groups", 2, 16, 1, True),
    ("groups, a policy for each role", 2, 16, 3, False),
    ("groups, a policy for each role", 4, 32, 2, True),
]


@pytest.mark.parametrize(("name", "warps", "rows", "groups", "stages_obs"), GROUPS)
@pytest.mark.parametrize("precision", ["tf32", *(pytest.param(p, marks=pytest.mark.slow) for p in OTHERS)])
def test_groups_of_several_warps_share_a_block(name, warps, rows, groups, stages_obs, precision, device, monkeypatch):
    case = CASES[name]._replace(num_envs=4)
    expected, found = Setup(case, device, precision), Setup(case, device, precision)
    tile = found.tile(TileShape(rows * warps * groups, warps * groups, 1), groups, stages_obs)
    fused = found.fused(tile)
    obs_bytes = found.rollout.obs[0, 0].nbytes * groups
    assert fused.tile.threads_per_env == 32 * warps
    assert (fused.shared_bytes - tile.network_bytes >= obs_bytes) == stages_obs
    for order in ("forwards", "backwards"):
        monkeypatch.setenv("EMULATED_THREADS", order)
        expected.collect()
        fused()
        assert differing(expected.results(), found.results()) == []
    assert not found.rollout.active.all()


def test_bfloat16_and_one_environment(device):
    case = CASES["two roles in one"]._replace(num_envs=1)
    expected, found = Setup(case, device, "bfloat16"), Setup(case, device, "bfloat16")
    expected.collect()
    found.fused()()
    assert differing(expected.results(), found.results()) == []


@pytest.mark.parametrize("name", ["several agents", "two roles in one", "randomised", "groups"])
def test_environments_that_do_not_fit_in_shared_memory(name, device, monkeypatch):
    """State, scratch memory and observations are then in device memory."""
    expected, found = Setup(CASES[name], device), Setup(CASES[name], device)
    cores = found.env.functions.backend.tensor_cores
    tile = found.tile(TileShape(32, 2, 1), 1) if name == "groups" else found.tile(TILES[0])
    few = dataclasses.replace(cores, block_shared_bytes=tile.network_bytes + STATIC_BYTES + 4 * tile.tile.rows)
    monkeypatch.setattr(found.env.functions.backend, "tensor_cores", few)
    fused = found.fused(tile)
    assert fused.shared_bytes == fused.tile.network_bytes
    for _ in range(2):
        expected.collect()
        fused()
        assert differing(expected.results(), found.results()) == []


@pytest.mark.parametrize("name", ["two trunks", "box", "several agents"])
def test_a_network_that_is_nan_faults_its_environments(name, device):
    expected, found = Setup(CASES[name], device), Setup(CASES[name], device)
    fused = found.fused()
    expected.collect()
    fused()
    for setup in (expected, found):
        for kernels in setup.kernels.values():
            with torch.no_grad():
                kernels.policy.network.actor.bias.fill_(NAN)
    for _ in range(2):
        expected.collect()
        fused()
        assert differing(expected.results(), found.results()) == []
    assert (found.env.faults() != 0).all()
    assert found.rollout.rewards.isnan().any()


# Where a rollout takes several launches a step


def test_reasons_for_several_launches_a_step(device, monkeypatch):
    def reason(setup, **reasons):
        found, why = fused_rollout(setup.rollout, setup.sampler, {**setup.reasons, **reasons}, setup.kernels)
        assert (found is None) == (why is not None)
        return why

    setup = Setup(CASES["two trunks"], device)
    assert reason(setup) is None
    assert reason(setup, agent="no hidden layers") == "a policy without a kernel of its own: no hidden layers"
    setup.rollout.shaping = lambda transition: transition.rewards
    assert reason(setup) == "a reward function"
    setup.rollout.shaping = None
    setup.env.step = setup.env.step
    assert reason(setup) == "an overridden step"
    del setup.env.step
    assert reason(setup) is None
    assert reason(Setup(CASES["two trunks"]._replace(env={"validate": "sync"}), device)) == 'validate="sync"'
    assert reason(Setup(CASES["groups"], device)) is None
    many = CASES["groups"]._replace(arguments={"num_taggers": 9000, "full_observation": False}, num_envs=1)
    assert reason(Setup(many, device)) == "more agents in an environment than threads in a group"
    setup = Setup(CASES["a policy for each role"], device)
    backend = setup.env.functions.backend
    few = dataclasses.replace(backend.tensor_cores, block_shared_bytes=8 << 10)
    monkeypatch.setattr(backend, "tensor_cores", few)
    assert reason(setup) == "networks too large for shared memory"


def test_a_game_whose_macros_are_names_of_the_network_takes_several_launches(device, tmp_path):
    source = tmp_path / "own.cu"
    source.write_text("#define OWNED_ROWS 7\n" + Cartpole.source_path().read_text())
    own = dataclasses.dataclass(frozen=True, kw_only=True)(type("Own", (Cartpole,), {"source": source}))
    setup = Setup(Case(own, {}, {"hidden_sizes": (16,)}), device)
    fused, reason = fused_rollout(setup.rollout, setup.sampler, setup.reasons, setup.kernels)
    assert fused is None and reason.startswith("one kernel of game and networks does not compile: ")
    assert "error" in reason


def test_a_processor_without_tensor_cores_takes_several_launches():
    env = gpu_vecenv.make("cartpole", 4, "cpu", autoreset_mode="next_step")
    assert why_not_fused(Rollout(env, 3), {"agent": "no tensor cores"}) == "no tensor cores"


def trainer_of(case, device):
    config = PPOConfig(total_steps=10**6, num_steps=7, num_epochs=1, num_minibatches=2, **case.config)
    env = gpu_vecenv.make(case.game, 8, device, autoreset_mode="next_step", **case.arguments)
    return Trainer(env, config, seed=2)


@pytest.mark.parametrize("name", ["shared trunk", "narrower observations"])
def test_a_trainer_trains_the_same_either_way(name, device):
    fused, other = (trainer_of(CASES[name], device) for _ in range(2))
    assert fused.rollout_reason is other.rollout_reason is None
    overridden = other.env.step
    other.env.step = lambda *arguments, **named: overridden(*arguments, **named)
    for _ in range(3):
        metrics, expected = fused.train_iteration(), other.train_iteration()
        assert differing(fused.state()[0], other.state()[0]) == []
        timed = {key for key in {*metrics, *expected} if key.endswith(("_time_fraction", "_per_s"))}
        assert metrics["rollout_time_fraction"] > 0 and "env_time_fraction" not in metrics
        assert expected["env_time_fraction"] > 0 and "rollout_time_fraction" not in expected
        assert [metrics[key] for key in metrics if key not in timed] == pytest.approx(
            [expected[key] for key in expected if key not in timed], rel=0, abs=0, nan_ok=True
        )


def test_a_changed_policy_is_computed_as_it_is(device):
    trainer = trainer_of(CASES["shared trunk"], device)
    trainer.train_iteration()
    (policy,) = trainer.policies.values()
    calls = []
    policy.register_forward_hook(lambda *_: calls.append(1))
    trainer.train_iteration()
    assert len(calls) >= trainer.config.num_steps


CENTRAL = {
    "agent ids": Case("simple_spread", {"max_steps": 5}, {**BOTH, "agent_ids": True, "hidden_sizes": (24, 16)}),
    "a policy for each role, masks": Case(Crew, {}, {"hidden_sizes": (16,), "activation": "relu"}),
    "box, tanh": Case("pendulum", {"max_steps": 4}, {**BOTH, "hidden_sizes": (16, 8), "squash": "tanh"}),
}


@pytest.mark.parametrize("name", CENTRAL)
def test_actors_beside_a_central_critic_act_in_one_launch(name, device):
    """Rounded in another order than torch rounds; weights that a caller replaces are those that act."""
    case = CENTRAL[name]
    trainer = trainer_of(case._replace(config={**case.config, "critic": "central"}), device)
    assert trainer.rollout_reason is None and set(trainer.torch_reasons.values()) == {"a central critic"}
    data, before = trainer.rollout, None
    samples = torch.arange(data.rewards.numel(), device=data.rewards.device).view(data.rewards.shape)
    for _ in range(3):
        data.values.fill_(NAN)
        data.log_probs.fill_(NAN)
        trainer.begin_iteration()
        for policy in trainer.policies.values():
            agents, context = policy.view.agents, RolloutContext(policy, data, samples.numel())
            indices = samples[:, :, agents].flatten()
            batch = batch_of(data, policy.view, indices, data.advantages.flatten()[indices])
            with torch.no_grad():
                outputs = policy.parameters_of(batch.obs, policy.view.positions()[indices % data.rewards.shape[2]])
                log_probs, _ = policy.log_probs_and_entropies(outputs, batch.draws, batch.action_mask)
                values = [policy(policy.view.obs(obs), context=context.of_step(t))[1] for t, obs in enumerate(data.obs)]
            acted = data.active[:-1].flatten()[indices]
            torch.testing.assert_close(batch.log_probs[acted], log_probs[acted], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(data.values[:, :, agents], torch.stack(values), rtol=1e-4, atol=1e-4)
        trainer.end_iteration()
        assert before is None or not equal_bits(before, data.log_probs)
        before = data.log_probs.clone()
        for policy in trainer.policies.values():
            for p in policy.network.parameters():
                p.data = 1.5 * p.detach()


def test_what_a_central_critic_sees_may_need_several_launches(device):
    critic = {"critic": "central", "hidden_sizes": (16,)}
    declared = trainer_of(Case("pursuit", {"max_steps": 4}, critic), device)
    assert declared.rollout_reason == "a state for critics, which is stored at each step"
    changed = trainer_of(CENTRAL["agent ids"]._replace(config=critic), device)
    changed.train_iteration()
    calls = []
    changed.policies["agent"].network.head.register_forward_hook(lambda *_: calls.append(1))
    changed.train_iteration()
    assert len(calls) >= changed.config.num_steps
    lower = trainer_of(CENTRAL["agent ids"]._replace(config={**critic, "precision": "bfloat16"}), device)
    assert lower.rollout_reason == "a policy without a kernel of its own: a central critic"
