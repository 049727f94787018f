"""Roles with different spaces, and action masks, from the declaration to the trainer."""

import copy

import numpy as np
import pytest
import torch
from games.crew import Crew
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import gpu_vecenv
from gpu_vecenv import PPOConfig, Sampler, Trainer, VecEnv
from gpu_vecenv.declare.spaces import ActionLayout, ObservationLayout, unbounded
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import Fault
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, InvalidActionError
from gpu_vecenv.train.distributions import log_probs_and_entropies, masked
from gpu_vecenv.train.networks import ActorCritic

CREW = Crew()


def allowed(env: VecEnv, actions: torch.Tensor) -> torch.Tensor:
    """(num_envs, num_agents): whether the action mask allows every head of an agent's action."""
    mask, good = env.action_mask, torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
    first = 0
    for head, size in enumerate(env.game.layout.action.head_sizes):
        part = mask[..., first : first + size]
        chosen = part.gather(-1, actions[..., head, None].long().clamp(0, size - 1)).squeeze(-1)
        good &= chosen | ~part.any(-1)  # no such head
        first += size
    return good


def test_the_widest_observation_space_contains_every_role():
    boxes = {
        "a": Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32)),
        "b": Box(2.0, 3.0, (3,), np.float32),
    }
    layout = ObservationLayout.of("Game", ["a", "b"], boxes)
    assert layout.shape == (3,) and layout.padded
    assert layout.own("a") == (slice(0, 2),)
    assert layout.widest == Box(np.array([-1, 0, 0], np.float32), np.array([3, 5, 3], np.float32))
    assert ObservationLayout.of("Game", ["a", "b"], boxes["b"]).widest == boxes["b"]
    image = ObservationLayout.of(
        "Game", ["a", "b"], {"a": Box(0, 255, (2, 3), np.uint8), "b": Box(0, 255, (4, 1), np.uint8)}
    )
    assert image.shape == (4, 3) and image.own("b") == (slice(0, 4), slice(0, 1))


@pytest.mark.parametrize(
    ("spaces", "text"),
    [
        ({"a": Box(0, 1, (2,), np.float32)}, r"observation spaces for \['a'\], but the roles are \['a', 'b'\]"),
        ({"a": Discrete(3), "b": Discrete(3)}, "expected a Box of float32 or uint8"),
        (Box(0, 1, (2,), np.float64), "expected a Box of float32 or uint8"),
        ({"a": Box(0, 1, (2,), np.float32), "b": Box(0, 255, (2,), np.uint8)}, "one dtype"),
        ({"a": Box(0, 1, (2,), np.float32), "b": Box(0, 1, (2, 1), np.float32)}, "one number of axes"),
        (Box(0, 1, (), np.float32), r"obs_shape is \(\)"),
    ],
)
def test_observation_spaces_that_do_not_fit_are_refused(spaces, text):
    with pytest.raises(EnvDefinitionError, match=text):
        ObservationLayout.of("Game", ["a", "b"], spaces)


def test_the_widest_action_space_contains_every_role():
    assert CREW.layout.action.widest == MultiDiscrete([5, 3])
    assert ActionLayout.of("Game", ["a", "b"], {"a": Discrete(2), "b": Discrete(4)}).widest == Discrete(4)
    box = Box(-1.0, 1.0, (2,), np.float32)
    assert ActionLayout.of("Game", ["a"], box).widest == box


@pytest.mark.parametrize(
    "space", [Discrete(2**31), Discrete(2**40), MultiDiscrete([2, 2**31]), MultiDiscrete([2**30, 2**30])]
)
def test_more_choices_than_an_action_can_count_are_refused(space):
    with pytest.raises(ConfigError, match=r"Game: action spaces .* choices; expected fewer than 2\^31"):
        ActionLayout.of("Game", ["a"], space)


@pytest.mark.parametrize("space", [MultiDiscrete(np.array([], int)), MultiDiscrete([[2, 3]])])
def test_a_multi_discrete_has_one_axis_of_heads(space):
    with pytest.raises(EnvDefinitionError, match=r"a MultiDiscrete of shape .*; expected \(heads,\), at least 1"):
        ActionLayout.of("Game", ["a"], space)


def test_the_most_choices_that_an_action_can_count_are_taken():
    assert ActionLayout.of("Game", ["a"], Discrete(2**31 - 1)).sizes == {"a": (2**31 - 1,)}


def test_choices_beside_a_box_are_those_that_a_float32_tells_apart():
    box = Box(-1.0, 1.0, (2,), np.float32)
    assert ActionLayout.of("Game", ["a", "b"], {"a": box, "b": Discrete(2**24)}).head_sizes == (2**24,)
    with pytest.raises(ConfigError, match=r"a head of 16,777,217 choices beside a Box; expected at most 16,777,216"):
        ActionLayout.of("Game", ["a", "b"], {"a": box, "b": MultiDiscrete([2, 2**24 + 1])})


def test_a_box_and_choices_have_no_space_in_common():
    layout = ActionLayout.of("Game", ["a", "b"], {"a": Box(-1.0, 1.0, (2,), np.float32), "b": Discrete(2)})
    with pytest.raises(ConfigError, match="have no space in common"):
        layout.widest  # noqa: B018


@pytest.mark.parametrize("shape", [(2**31,), (2**24 + 1,), (2**20, 2**20), (2**62,)])
def test_an_observation_is_refused_before_the_bounds_of_its_space_are_built(shape):
    """Bounds of these sizes take from seconds to more memory than there is."""
    with pytest.raises(ConfigError, match="items; expected at most 16,777,216"):
        unbounded("Game", shape, np.dtype(np.float32))


def test_masks_of_continuous_actions_are_refused():
    kind = type("Sliding", (Crew,), {"__module__": __name__, "action_space": Box(-1.0, 1.0, (1,), np.float32)})
    with pytest.raises(EnvDefinitionError, match="masks_actions is True"):
        kind()


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_padding_and_masks_are_complete_in_every_mode(mode, device):
    env = VecEnv(CREW, 50, device, autoreset_mode=mode)
    obs, info = env.reset(seed=3)
    for _ in range(40):
        assert (obs[:, 0, 2:] == 0).all()
        assert (obs[:, 1:] != 0).all()
        mask = info["action_mask"]
        assert torch.equal(mask, env.action_mask)
        live = info["active"]
        assert not mask[:, 0, 5:].any() and not mask[:, 1:, 2:5].any()  # choices that the role does not have
        place = env.state["place"].squeeze(-1) if env.state["place"].ndim > 1 else env.state["place"]
        moves = place[:, None] + torch.arange(-2, 3, device=device)
        inside = (moves >= 0) & (moves < CREW.length) | ~live[:, :1]
        assert torch.equal(mask[:, 0, :5], inside)
        rested = (env.state["rest"] == 0) | ~live[:, 1:]
        assert torch.equal(mask[:, 1:, 1], rested) and mask[:, 1:, 0].all()
        actions = env.sample_actions()
        assert allowed(env, actions).all()
        obs, _, _, _, info = env.step(actions)
        if mode == "disabled":
            obs, info = env.reset(mask=~info["active"].any(1))
    assert env.faults().sum() == 0


def test_allowed_choices_are_drawn_uniformly(device):
    env = VecEnv(CREW, 20_000, device, autoreset_mode="disabled")
    env.reset(seed=8)
    env.state["place"].fill_(1)  # moves -1 .. 2 are allowed
    env.observe()
    counts = env.sample_actions()[:, 0, 0].cpu().bincount(minlength=5)
    assert counts[0] == 0
    # Five standard deviations of a binomial, 61 each.
    assert ((counts[1:] - 5000).abs() < 306).all()


def test_a_forbidden_choice_is_a_fault_or_refused(device):
    env = VecEnv(CREW, 3, device)
    env.reset(seed=1)
    env.state["place"].zero_()
    env.observe()
    actions = env.sample_actions()
    actions[1, 0, 0] = 1  # left of the first cell
    before = env.state["place"].clone()
    env.step(actions)
    assert env.faults().tolist() == [0, Fault.INVALID_ACTION, 0]
    assert env.state["place"][1] == before[1]
    sync = VecEnv(CREW, 3, device, validate="sync")
    sync.reset(seed=1)
    sync.state["place"].zero_()
    sync.observe()
    with pytest.raises(InvalidActionError, match="environment 1, agent driver_0, number 0: 1"):
        sync.step(actions)


def test_masked_logits_never_choose_what_is_forbidden(device):
    env = VecEnv(CREW, 500, device)
    _, info = env.reset(seed=2)
    sampler = Sampler(env)
    for _ in range(20):
        logits = masked(torch.randn((500, 3, 8)).to(device), info["action_mask"])
        sample = sampler.sample(logits)
        assert allowed(env, sample.actions).all()
        assert sample.log_probs.isfinite().all() and sample.entropies.isfinite().all()
        *_, info = env.step(sample.actions)
    assert env.faults().sum() == 0


@pytest.mark.slow
def test_the_trainer_respects_masks(device):
    env = VecEnv(CREW, 32, device)
    networks = {"driver": ActorCritic((2,), 5, (16,)), "helper": ActorCritic((4,), 2 + 3, (8,))}
    trainer = Trainer(env, PPOConfig(total_steps=32 * 8 * 3, num_steps=8, learning_rate=0.01), policies=networks)
    before = {role: copy.deepcopy(network.state_dict()) for role, network in networks.items()}
    metrics = trainer.train()
    assert trainer.env.faults().sum() == 0
    assert all(np.isfinite(value) for value in metrics.values())
    for role, network in networks.items():
        assert all(not tensor.equal(before[role][name].to(device)) for name, tensor in network.state_dict().items())
    assert trainer.evaluate(50)["episodes"] == 50


def test_the_first_ratio_is_1_where_a_role_lacks_a_head(device):
    """Sampler and learner compute equal log-probabilities: a missing head contributes to neither."""
    env = VecEnv(CREW, 200, device)
    _, info = env.reset(seed=2)
    logits = torch.randn((200, 3, 8), generator=torch.Generator().manual_seed(0)).to(device)
    sample = Sampler(env).sample(masked(logits, info["action_mask"]))
    rows = (
        logits.flatten(0, 1),
        sample.actions.flatten(0, 1),
        CREW.layout.action.head_sizes,
        info["action_mask"].flatten(0, 1),
    )
    log_probs, entropies = log_probs_and_entropies(*rows)
    # The tolerance of two float32 sums of three logarithms.
    torch.testing.assert_close(log_probs, sample.log_probs.flatten(), rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies, sample.entropies.flatten(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_a_row_is_zero_from_its_agents_end_to_its_environments_end(mode, device):
    env = VecEnv(CREW, 30, device, autoreset_mode=mode, agents_as_envs=True)
    plain = VecEnv(CREW, 30, device, autoreset_mode=mode)
    env.reset(seed=4)
    _, info = plain.reset(seed=4)
    blank = 0
    for _ in range(40):
        before = info["active"]
        obs, *_, row_info = env.step(env.sample_actions())
        expected, *_, info = plain.step(plain.sample_actions())
        left = ~info["active"] & info["active"].any(1, keepdim=True)
        if mode == "same_step":  # an agent that terminates has its last observation in final_obs only
            leaves = left & before
            assert torch.equal(row_info["final_obs"].view_as(expected)[leaves], expected[leaves])
        else:
            left &= ~before
        blank += int(left.sum())
        assert torch.equal(obs.view_as(expected), expected.masked_fill(left[..., None], 0))
        assert torch.equal(env.observe().view_as(expected)[left], torch.zeros_like(expected[left]))
        if mode == "disabled":
            mask = ~info["active"].any(1)
            env.reset(mask=mask)
            _, info = plain.reset(mask=mask)
    assert blank > 100


def test_thread_order_and_agents_as_envs_do_not_change_results():
    whole = trajectory_digest(VecEnv(CREW, 33, "cpu"), 5, 40).words
    for order in (1, 2):
        assert torch.equal(trajectory_digest(VecEnv(CREW, 33, "cpu", thread_order=order), 5, 40).words, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("rows", [False, True])
def test_host_and_cuda_are_bit_identical(mode, rows):
    digests = [
        trajectory_digest(
            VecEnv(CREW, 333, device, autoreset_mode=mode, agents_as_envs=rows, threads_per_env=threads_per_env), 7, 60
        ).words.cpu()
        for device, threads_per_env in (("cpu", None), ("cuda", None), ("cuda", 64))
    ]
    assert torch.equal(digests[0], digests[1]) and torch.equal(digests[0], digests[2])


def test_make_accepts_classes_and_instances():
    assert gpu_vecenv.make(Crew, 2, "cpu", length=9).game == Crew(length=9)
    assert gpu_vecenv.make(Crew(length=9), 2, "cpu", num_helpers=3).game == Crew(length=9, num_helpers=3)
