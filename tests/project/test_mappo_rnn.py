"""examples/mappo_rnn.py: its states, advantages, probabilities and masks are those of the trainer's definitions."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from games.recall import Recall
from games.sacrifice import Sacrifice
from torch import distributions, nn

import gpu_vecenv
from gpu_vecenv.train.ppo import advantages

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "several agents": ("simple_spread", {"max_steps": 5}),
    "terminations": ("cartpole", {"max_steps": 60}),
    "a Box": ("pendulum", {"max_steps": 7}),
    "terminations of two agents": (Recall, {}),
    "agents that die": (Sacrifice, {"num_units": 4, "max_steps": 5}),
}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "mappo_rnn.py"
    spec = importlib.util.spec_from_file_location("mappo_rnn", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mappo_of(example: ModuleType, game: Any, device: str, arguments: dict[str, Any], **options: Any) -> Any:
    env = gpu_vecenv.make(game, 6, device, autoreset_mode="next_step", **arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        mappo = example.MAPPO(
            env,
            example.Options(
                **{
                    "num_envs": 6,
                    "num_steps": 12,
                    "sequence_length": 4,
                    "num_minibatches": 3,
                    "units": 8,
                    "seed": 4,
                    **options,
                }
            ),
        )
        for p in [*mappo.actor.parameters(), *mappo.critic.parameters()]:
            p.data.copy_(0.7 * torch.randn(p.shape))  # far from even choices, and states that matter
    return mappo


@pytest.fixture(params=KINDS)
def collected(request: pytest.FixtureRequest, example: ModuleType, device: str) -> Any:
    """After the third rollout."""
    mappo = mappo_of(example, *KINDS[request.param][:1], device, KINDS[request.param][1])
    for _ in range(3):
        mappo.collect()
    return mappo


def test_advantages_are_those_of_the_trainer(collected: Any) -> None:
    data, options = collected.data, collected.options
    numbers = data.rewards, data.values[:-1], data.values[1:]
    flags = data.terminations, data.truncations, data.active[:-1]
    expected = advantages(*numbers, *flags, options.gamma, options.gae_lambda)
    torch.testing.assert_close(data.advantages, expected, rtol=1e-6, atol=1e-5)
    assert (data.terminations | data.truncations).any() and expected.ne(0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_observation_is_the_first_where_no_step_of_its_episode_was_made(
    kind: str, example: ModuleType, device: str
) -> None:
    mappo = mappo_of(example, KINDS[kind][0], device, KINDS[kind][1], num_steps=1, sequence_length=1, num_minibatches=1)
    starts = 0
    for _ in range(30):
        mappo.collect()
        assert mappo.data.first[1].equal(mappo.env.elapsed_steps == 0)
        starts += int(mappo.data.first[1].sum())
    assert starts > 6


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_the_state_is_0_at_the_first_observation_and_there_alone(which: str, collected: Any) -> None:
    data, network = collected.data, getattr(collected, which)
    inputs = data.states if which == "critic" else data.obs[:, :, 0]
    states = torch.zeros((6, 8), device=inputs.device)
    first = torch.tensor([True, False] * 3, device=inputs.device)
    expected, _ = network(inputs[:1], states, first[None])
    found, _ = network(inputs[:1], states + 1, first[None])
    same = found.isclose(expected, rtol=0, atol=1e-6).flatten(2).all(2)[0]
    assert same.equal(first)


def test_with_unchanged_weights_every_ratio_is_one(collected: Any) -> None:
    """The update's sequences begin with the states of the rollout, and forget where the rollout did."""
    data, every = collected.data, torch.arange(18, device=collected.env.device)
    returns = data.advantages + data.values[:-1]
    collected.loss(every, data.advantages, returns)
    assert collected.metrics[3].abs() < 1e-7  # half the square of rounding errors, which may have either sign
    value_loss = collected.metrics[1].clone()
    errors = nn.functional.huber_loss(data.values[:-1], returns, reduction="none", delta=10.0)
    torch.testing.assert_close(value_loss, errors[data.active[:-1]].mean(), rtol=1e-4, atol=1e-5)
    collected.actor_starts.zero_()
    collected.loss(every, data.advantages, returns)
    assert collected.metrics[3] > 1e-6
    collected.critic_starts.zero_()
    collected.loss(every, data.advantages, returns)
    assert (collected.metrics[1] - value_loss).abs() > 1e-3 * value_loss


def test_rows_continue_from_one_rollout_to_the_next(collected: Any) -> None:
    last = [x[-1].clone() for x in (collected.data.obs, collected.data.active, collected.data.first)]
    states = collected.actor_state.clone(), collected.critic_state.clone()
    collected.collect()
    for found, expected in zip((collected.data.obs, collected.data.active, collected.data.first), last, strict=True):
        assert found[0].equal(expected)
    assert collected.actor_starts[0].equal(states[0]) and collected.critic_starts[0].equal(states[1])


def test_probabilities_are_those_of_torch(example: ModuleType) -> None:
    torch.manual_seed(0)
    logits, draws = torch.randn(7, 3, 9), torch.stack([torch.randint(n, (7, 3)) for n in (2, 4, 3)], -1)
    heads = [distributions.Categorical(logits=part) for part in logits.split((2, 4, 3), -1)]
    found = example.log_probs_and_entropies(logits, draws.int(), (2, 4, 3))
    torch.testing.assert_close(found[0], sum(d.log_prob(x) for d, x in zip(heads, draws.unbind(-1), strict=True)))
    torch.testing.assert_close(found[1], sum(d.entropy() for d in heads))
    one = example.log_probs_and_entropies(logits, draws[..., 0].int(), (9,))
    torch.testing.assert_close(one[0], distributions.Categorical(logits=logits).log_prob(draws[..., 0]))
    box, parameters = torch.randn(7, 3, 2), torch.randn(7, 3, 4)
    normal = distributions.Normal(parameters[..., :2], parameters[..., 2:].exp())
    found = example.log_probs_and_entropies(parameters, box, ())
    torch.testing.assert_close(found[0], normal.log_prob(box).sum(-1))
    torch.testing.assert_close(found[1], normal.entropy().sum(-1))


def test_forbidden_choices_have_no_probability_and_finite_gradients(example: ModuleType, device: str) -> None:
    mappo = mappo_of(example, "simple_spread", device, {})
    mask = torch.ones((2, 6, 3, 5), dtype=torch.bool, device=device)
    mask[..., 1:3] = False
    first = torch.ones((2, 6), dtype=torch.bool, device=device)
    parameters, _ = mappo.policy(mappo.data.obs[:2], mappo.actor_state, first, mask)
    assert parameters.softmax(-1)[~mask].eq(0).all()
    _, entropies = example.log_probs_and_entropies(parameters, torch.zeros((2, 6, 3), device=device), (5,))
    entropies.sum().backward()
    assert (
        all(p.grad.isfinite().all() for p in mappo.actor.parameters())
        and mappo.actor.head.bias.grad[[1, 2]].eq(0).all()
    )


def test_a_critic_sees_the_state_that_a_game_declares(example: ModuleType, device: str) -> None:
    class Seen(Recall):
        critic_state = ("cue",)
        source = Recall.source_path()

    mappo = mappo_of(example, Seen, device, {})
    for _ in range(2):
        mappo.collect()
        fields = [mappo.env.state[name].reshape(6, -1).float() for name in Seen.critic_state]
        assert mappo.data.states[-1].equal(torch.cat(fields, 1))


def test_an_update_changes_all_weights_and_takes_no_sample_of_agents_that_did_not_act(
    example: ModuleType, device: str
) -> None:
    mappo = mappo_of(example, Sacrifice, device, {}, num_epochs=1, num_minibatches=1)
    mappo.collect()
    mappo.minibatches.copy_(torch.arange(18)[None])
    data = mappo.data
    idle = ~(data.active & data.acting)[:-1]
    assert idle.any()
    data.log_probs[idle] = torch.nan
    before = [p.detach().clone() for p in mappo.actor.parameters()]
    mappo.update()
    assert mappo.metrics.isfinite().all()
    assert all(p.isfinite().all() and not p.equal(b) for p, b in zip(mappo.actor.parameters(), before, strict=True))
