"""Rollouts in one launch against rollouts of several launches a step, on emulated CUDA threads and on a GPU."""

from typing import NamedTuple

import pytest
import torch
from games.economy import Economy
from games.fragile import Fragile
from games.painter import Painter
from games.probes import Forbidden
from support.bitwise import equal_bits
from support.emulated_cuda import EmulatedCudaBackend

import gpu_vecenv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.engine.sampler import Sampler
from gpu_vecenv.train.fused_rollout import TILES, FusedRollout, fused_rollout, why_not_fused
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.perceptron import Forward, PerceptronKernels, TileShape
from gpu_vecenv.train.policy_specs import PolicySpec, policy_of_spec, resolve_specs
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.rollout_storage import Rollout

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
CASES = {
    "two trunks": Case("cartpole", {"max_steps": 6}, {**APART, "hidden_sizes": (64, 48)}),
    "shared trunk": Case("cartpole", {"max_steps": 5}, {**BOTH, "activation": "relu", "hidden_sizes": (24,)}),
    "box": Case("pendulum", {"max_steps": 4}, {**APART, **BOTH, "hidden_sizes": (40, 24)}),
    "box, tanh": Case("pendulum", {"max_steps": 7}, {"squash": "tanh", "hidden_sizes": (16,)}),
    "several agents": Case("simple_spread", {"max_steps": 5}, {**APART, "hidden_sizes": (32, 32)}),
    "two roles in one": Case(
        "tag_gridworld", {"max_steps": 6}, {"hidden_sizes": (24, 16)}, ("tagger+runner",), num_envs=19
    ),
    "heads": Case("tag_continuous", {**FEW, "max_steps": 8}, {"hidden_sizes": (24,)}, ("tagger+runner",)),
    "many agents": Case(
        "tag_gridworld", {"num_taggers": 19, "max_steps": 5}, {"hidden_sizes": (16,)}, ("tagger+runner",), num_envs=5
    ),
    "a policy for each role": Case("tag_gridworld", {"max_steps": 6}, {"hidden_sizes": (24,)}),
    "narrower observations": Case("simple_adversary", {"max_steps": 5}, {**APART, **BOTH, "hidden_sizes": (24, 16)}),
    "box beside choices": Case(Economy, {}, {"normalize_returns": True, "hidden_sizes": (24,)}),
    "masks": Case(Forbidden, {}, {"hidden_sizes": (16,)}),
    "images": Case(Painter, {}, {**APART, "hidden_sizes": (24,)}),
    "randomised": Case(
        "cartpole", {"randomize": {"gravity": (8.0, 12.0)}, "max_steps": 6}, {"hidden_sizes": (16,)}
    ),
    "non-finite numbers": Case(Fragile, {"num_actions": 7}, {"hidden_sizes": (16,)}, env={"end_on_nonfinite": True}),
}


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cuda":
        return "cuda"
    kernel_on(torch.device("cpu"))  # which is shared with other tests, compiled for the host
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    return "cpu"


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
            forward(-1, only_values=True)

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
