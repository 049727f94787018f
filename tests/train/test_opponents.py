"""Opponents in a share of the environments: who learns, by whose weights the others act, results, draws, resumes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from games.race import Race
from support.bitwise import equal_bits
from torch import nn

import gpu_vecenv
from gpu_vecenv import Opponent, OpponentsConfig, PolicySpec, PPOConfig, PQNConfig, Trainer, VecEnv
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.opponent_kernels import results_launch, uniform_numbers
from gpu_vecenv.train.opponent_ranges import Ranges
from gpu_vecenv.train.opponents import draw_weights, learning_wins
from gpu_vecenv.train.ppo import Batch, loss
from gpu_vecenv.train.rollout_storage import Rollout

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error:the rollout cannot be captured"),
]

TINY = PPOConfig(
    total_steps=10**6,
    num_steps=8,
    num_epochs=1,
    num_minibatches=1,
    hidden_sizes=(8,),
    entropy_coefficient=0,
    staggered_starts=False,  # episodes that begin are those whose first step was made
)
POOL = OpponentsConfig(share=0.5, num_ranges=4, num_snapshots=3, snapshot_interval=2, reassign_interval=2)
ENVS = 16  # of which the last 8 are 4 ranges
FIRST, SIZE = 8, 2


def east(obs):
    """A script: the first move."""
    return torch.ones(obs.shape[:2], dtype=torch.int32, device=obs.device)


def trainer(device, opponents=POOL, config=TINY, game="tag_gridworld", num_envs=ENVS, **options):
    settings = {"max_steps": 5} if isinstance(game, str) else {}
    if "policies" not in options:
        options = {"seed": 3, **options}
    env = (
        gpu_vecenv.make(game, num_envs, device, autoreset_mode="next_step", **settings)
        if isinstance(game, str)
        else VecEnv(game, num_envs, device, autoreset_mode="next_step")
    )
    return Trainer(env, config, opponents=opponents, **options)


def update_weights(one):
    """Between ``begin_iteration`` and ``end_iteration``, where graphs can be captured."""
    with one.training_stream():
        for learner in one.learners.values():
            learner.update()


def members(*names, **changes):
    return dataclasses.replace(POOL, members=names, **changes)


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


# Whose samples are learned from


def test_ranges_are_the_last_environments_and_sides_take_turns(device):
    game = gpu_vecenv.configure("tag_gridworld")
    ranges = Ranges(dataclasses.replace(POOL, share=0.5), game, 19, {"tagger": (0, 1, 2, 3), "runner": (4,)})
    assert (ranges.first, ranges.size, [side.name for side in ranges.sides]) == (11, 2, ["tagger", "runner"])
    assert [ranges.envs(k) for k in range(4)] == [slice(11, 13), slice(13, 15), slice(15, 17), slice(17, 19)]
    learns = trainer(device).opponents.learns.cpu()
    expected = torch.ones(ENVS, 5, dtype=torch.bool)
    for number in range(4):
        envs = slice(FIRST + SIZE * number, FIRST + SIZE * (number + 1))
        expected[envs] = torch.tensor([True] * 4 + [False] if number % 2 == 0 else [False] * 4 + [True])
    assert learns.equal(expected)


def test_in_a_game_of_one_role_an_agent_learns_against_the_others(device):
    one = trainer(device, game=Race())
    assert [side.name for side in one.opponents.ranges.sides] == ["player_0", "player_1"]
    one.train_iteration()
    learned = one.rollout.learned[:, FIRST:].view(-1, 4, SIZE, 2).any(2).any(0)
    assert learned.tolist() == [[True, False], [False, True]] * 2
    assert one.rollout.learned[:, :FIRST].equal(one.rollout.active[:, :FIRST])


@pytest.mark.parametrize("side", ["tagger", "runner"])
def test_gradients_are_those_of_the_samples_of_learning_agents_alone(side, device):
    one = trainer(device, members("snapshots", "random"))
    for _ in range(2):  # policies and snapshots differ then
        one.train_iteration()
    one.begin_iteration()
    learner, data = one.learners[side], one.rollout
    policy, view = learner.policy, learner.policy.view
    learner.minibatch_gradient(0)
    learns = torch.arange(ENVS, device=data.obs.device)
    number = (learns - FIRST) // SIZE % 2
    learns = (learns < FIRST) | (number == ("tagger", "runner").index(side))
    # By torch, of samples that are selected, as if there were no others.
    chosen = (data.active[:-1] & learns[:, None])[:, :, view.agents]

    def own(x):
        return x[:, :, view.agents][chosen]

    advantages = own(data.advantages)
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    batch = Batch(
        own(data.obs[:-1]),
        own(data.draws)[:, None],
        own(data.log_probs),
        own(data.values[:-1]),
        advantages,
        own(data.returns),
        torch.ones(len(advantages), dtype=torch.bool, device=advantages.device),
    )
    with torch.enable_grad():
        expected = torch.autograd.grad(loss(policy, batch, TINY)[0], list(policy.parameters()))
    found = learner.flat_grad
    expected = torch.cat([grad.flatten() for grad in expected])
    # Sums over samples in another order.
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert not chosen.equal(data.active[:-1][:, :, view.agents])


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        dataclasses.replace(TINY, normalize_obs=True, normalize_returns=True),
        dataclasses.replace(TINY, value_norm_beta=0.9, critic="central", normalize_obs=True),
        dataclasses.replace(TINY, network="gru", sequence_length=4),
        PQNConfig(num_steps=8, num_epochs=1, num_minibatches=2, hidden_sizes=(8,)),
    ],
    ids=["plain", "normalized", "central", "gru", "pqn"],
)
def test_what_opponents_did_changes_no_weights_and_no_statistics(config, device):
    states = []
    for spoils in (False, True):
        one = trainer(device, members("random"), config=config)
        one.begin_iteration()
        data = one.rollout
        if spoils:
            masked = data.active[:-1] & ~data.learned[:-1]
            assert masked.any()
            for tensor in (data.log_probs, data.advantages, data.returns):
                tensor.masked_fill_(masked, 3.0)
            data.draws.masked_fill_(masked, 2)
            data.values[:-1].masked_fill_(masked, 9.0)
        for learner in one.learners.values():
            for update in learner.normalizer_updates:
                update.moments.zero_()
            learner.update_statistics()
        update_weights(one)
        one.end_iteration()
        states.append({**{n: weights(p) for n, p in one.policies.items()}})
        states[-1] |= {
            f"{n} of Adam": {k: x.clone() for k, x in one.learners[n].optimizer_state().items()} for n in one.learners
        }
        for learner in one.learners.values():
            states[-1] |= {"variance": learner.explained_variance.clone()}
    learned_sums = [own.pop("variance") for own in states]
    assert equal_bits(learned_sums[0], learned_sums[1])
    for name in states[0]:
        own = [{k: x for k, x in one[name].items() if k != "reward_sums"} for one in states]
        assert equal_bits(*own), name


def test_environments_without_opponents_are_as_in_training_without_a_pool(device):
    data = []
    for opponents in (None, members("snapshots", "random", "still")):
        one = trainer(device, opponents)
        one.begin_iteration()
        names = ("obs", "active", "rewards", "draws", "log_probs", "values", "advantages", "returns", "terminations")
        data.append({name: getattr(one.rollout, name)[:, :FIRST].clone() for name in names})
    assert equal_bits(*data)


# Who acts


@torch.no_grad()
def log_probs_of(policy, data, t, envs):
    view = policy.view
    parameters, _ = policy(view.obs(data.obs[t][envs]))
    draws = data.draws[t][envs][:, view.agents]
    return policy.log_probs_and_entropies(parameters.flatten(0, 1), draws.flatten()[:, None])[0]


def acts_by_weights_of_kernels(normalizes, device):
    settings = {"normalize_obs": normalizes, "normalize_returns": normalizes, "learning_rate": 0.1}
    one = trainer(device, config=dataclasses.replace(TINY, **settings))
    assert one.opponents.by_kernels == ("tagger", "runner")
    acts_by_weights(one, [])


@pytest.mark.parametrize("normalizes", [False, True])
def test_an_opponent_acts_by_the_weights_that_the_policy_had(normalizes, device_of_networks):
    acts_by_weights_of_kernels(normalizes, device_of_networks)


@pytest.mark.parametrize("normalizes", [False, True])
def test_an_opponent_acts_by_the_weights_that_the_policy_had_by_vector_instructions(normalizes):
    acts_by_weights_of_kernels(normalizes, "cpu")


@pytest.mark.parametrize("at_once", [True, False])
def test_an_opponent_acts_by_the_weights_that_the_policy_had_by_torch(at_once, device):
    config = dataclasses.replace(TINY, learning_rate=0.1, hidden_sizes=(), normalize_obs=True)
    one = trainer(device, config=config)
    assert one.opponents.by_kernels == ()
    for snapshots in one.opponents.snapshots.values():
        assert snapshots.all_actors is not None
        if not at_once:
            snapshots.all_actors = None
    acts_by_weights(one, [])


@pytest.mark.parametrize("shared_trunk", [True, False])
def test_a_rollout_in_one_launch_is_that_of_several(shared_trunk, device_of_networks):
    config = dataclasses.replace(TINY, learning_rate=0.1, normalize_obs=True, shared_trunk=shared_trunk)
    pool = {"num_ranges": 2, "reassign_interval": 1, "snapshot_interval": 1, "sampling": "uniform"}
    options = {"opponents": members("snapshots", "random", **pool), "config": config, "num_envs": 15, "seed": 5}
    fused, stepwise = (trainer(device_of_networks, **options) for _ in range(2))
    assert fused.rollout_reason is None and fused.opponents.ranges.size == 3
    stepwise._fused_rollout = None
    kinds = set()
    for _ in range(5):
        for one in (fused, stepwise):
            one.train_iteration()
        kinds |= set(fused.opponents.opponent.tolist())
        for name in ("obs", "active", "learned", "rewards", "draws", "log_probs", "terminations", "truncations"):
            assert equal_bits(getattr(fused.rollout, name), getattr(stepwise.rollout, name)), name
        learned = fused.rollout.learned[:-1]
        for name in ("values", "advantages", "returns"):
            own = [getattr(one.rollout, name)[: len(learned)][learned] for one in (fused, stepwise)]
            assert equal_bits(*own), name
        assert equal_bits(*({n: weights(p) for n, p in one.policies.items()} for one in (fused, stepwise)))
    assert kinds == {0, 1, 2, 3}  # some of the snapshots, and random choices


def test_what_one_launch_cannot_do_takes_several(device_of_networks):
    for opponents, game, reason in (
        (members("random"), "tag_gridworld", "opponents other than snapshots and random choices"),
        (members("snapshots", "still"), "tag_gridworld", "opponents other than snapshots and random choices"),
        (POOL, Race(), "opponents of agents with the same policy"),
    ):
        assert trainer(device_of_networks, opponents, game=game).rollout_reason == reason
    central = trainer(device_of_networks, config=dataclasses.replace(TINY, critic="central"))
    assert central.rollout_reason == "opponents beside a central critic"


def acts_by_weights(one, taken):
    seen, slots = set(), [None] * 3
    for iteration in range(9):
        if iteration % 2 == 0:
            slots[len(taken) % 3] = {name: weights(policy) for name, policy in one.policies.items()}
            taken.append(iteration)
        one.begin_iteration()
        for number in range(4):
            slot = int(one.opponents.opponent[number])
            seen.add(slot)
            name = ("runner", "tagger")[number % 2]  # who does not learn
            actor = one.opponents.snapshots[name].actors[number]
            assert equal_bits(weights(actor), slots[slot][name])
            envs = slice(FIRST + SIZE * number, FIRST + SIZE * (number + 1))
            for t in (0, 7):
                found = one.rollout.log_probs[t][envs][:, actor.view.agents].flatten()
                active = one.rollout.active[t][envs][:, actor.view.agents].flatten()
                expected = log_probs_of(actor, one.rollout, t, envs)
                # The kernel's logarithms and torch's.
                assert torch.allclose(found[active], expected[active], atol=1e-5)
        update_weights(one)
        one.end_iteration()
    assert seen == {0, 1, 2}


def test_random_opponents_choose_evenly(device):
    one = trainer(device, members("random"))
    one.begin_iteration()
    data = one.rollout
    others = data.active[:-1] & ~one.opponents.learns
    # The kernel's logarithm.
    assert torch.allclose(data.log_probs[others].exp(), torch.full_like(data.log_probs[others], 0.2), atol=1e-6)
    assert len(data.draws[others].unique()) == 5 and one.opponents.acts_itself is False


def test_random_opponents_with_a_box_draw_from_all_of_it(device):
    env = gpu_vecenv.make("simple_tag", 64, device, autoreset_mode="next_step", max_steps=5, continuous_actions=True)
    one = Trainer(env, TINY, opponents=members("random", "still"))
    one.begin_iteration()
    kinds = one.opponents.opponent
    assert set(kinds.tolist()) == {0, 1}
    actions = one.rollout.samples[-1].actions[32:].view(4, 8, 4, 5)  # the last step's
    others = ~one.opponents.learns[32:].view(4, 8, 4) & one.rollout.active[-2, 32:].view(4, 8, 4)
    expected = env_actions = actions[kinds == 0][others[kinds == 0]]
    assert 0 <= float(expected.min()) < 0.1 and 0.9 < float(env_actions.max()) <= 1
    assert abs(float(expected.mean()) - 0.5) < 0.1
    assert not actions[kinds == 1][others[kinds == 1]].any()


def test_one_stands_still_and_a_script_does_what_it_returns(device):
    one = trainer(device, members("still", Opponent(name="east", actors={"runner": east}), sampling="uniform"))
    found = set()
    for _ in range(6):
        one.begin_iteration()
        draws, active = one.rollout.draws, one.rollout.active[:-1]
        for number, member in enumerate(one.opponents.opponent.tolist()):
            envs = slice(FIRST + SIZE * number, FIRST + SIZE * (number + 1))
            agents = slice(4, 5) if number % 2 == 0 else slice(0, 4)
            own = draws[:, envs, agents][active[:, envs, agents]]
            found.add((number % 2, member))
            assert own.unique().tolist() == [member]
        update_weights(one)
        one.end_iteration()
    assert found == {(0, 0), (0, 1), (1, 0)}  # east plays only runners


def test_policies_of_another_run_play(device):
    other = trainer(device, None, seed=9, config=dataclasses.replace(TINY, network="gru", hidden_sizes=(4,)))
    for _ in range(2):
        other.train_iteration()
    actors = {"runner": other.policies["runner"], "tagger_0+tagger_1+tagger_2+tagger_3": other.policies["tagger"]}
    for name, policy in actors.items():
        one = trainer(device, members(Opponent(name="old", actors={name: policy})))
        before = weights(policy)
        one.begin_iteration()
        data, agents = one.rollout, policy.view.agents
        number = 1 if agents.start == 0 else 0
        if len(one.opponents.ranges.sides) == 1:
            number = 0
        envs = one.opponents.ranges.envs(number)
        state = torch.zeros(SIZE, policy.view.num_agents, policy.acting_state_size, device=data.obs.device)
        with torch.no_grad():
            for t in range(8):
                parameters, state = policy.acting(data.obs[t][envs][:, agents], state)
                active = data.active[t][envs][:, agents]
                state = torch.where(active[..., None], state, 0)
                draws = data.draws[t][envs][:, agents].long()
                expected = parameters.log_softmax(-1).gather(-1, draws[..., None])[..., 0]
                found = data.log_probs[t][envs][:, agents]
                # The kernel's logarithms and torch's.
                assert torch.allclose(found[active], expected[active], atol=1e-5)
        assert equal_bits(before, weights(policy))


# Who is drawn


def test_results_by_hand(device, random_seed):
    random = torch.Generator().manual_seed(random_seed)
    env = gpu_vecenv.make("tag_gridworld", 7, device, autoreset_mode="next_step", num_taggers=2)
    data = Rollout(env, 20)
    learns = torch.rand(7, 3, generator=random) < 0.5
    sums, counts = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.int64)
    data.rewards.copy_(torch.randint(-2, 3, data.rewards.shape, generator=random))
    data.active.copy_((torch.rand(data.active.shape, generator=random) < 0.35).to(device))
    data.active[-1] = True
    sums[1] = torch.nan  # an episode that does not count
    own_sums, own_counts = sums.to(device, copy=True), counts.to(device, copy=True)
    launch = results_launch(data, learns.to(device), 3, sums=own_sums, counts=own_counts)
    for _ in range(2):  # the second one continues the sums
        launch()
        counts.zero_()
        for env_index in range(3, 7):
            k = env_index - 3
            for t in range(20):
                active, after = data.active[t, env_index].cpu(), data.active[t + 1, env_index].cpu()
                rewards, own = data.rewards[t, env_index].cpu().double(), learns[env_index]
                sums[k, 0] += rewards[active & own].sum()
                sums[k, 1] += rewards[active & ~own].sum()
                if bool(active.any()) and not bool(after.any()):
                    number = int(own.sum())
                    difference = float(sums[k, 0] * (3 - number) - sums[k, 1] * number)
                    counts[k] += torch.tensor([difference > 0, difference == 0, not math.isnan(difference)])
                    sums[k] = 0
        assert own_sums.cpu().equal(sums) and own_counts.cpu().equal(counts)


def test_first_episodes_that_are_shortened_are_no_games(device):
    """Episodes of tag_gridworld end by their limit of 5 steps at the latest; a rollout has 8."""
    config = dataclasses.replace(TINY, num_steps=5, staggered_starts=True)
    one = trainer(device, members("still"), config)
    shortened = one.env.elapsed_steps[FIRST:] > 0
    assert bool(shortened.any()) and not bool(shortened.all())
    one.train_iteration()
    active = one.rollout.active[:, FIRST:].any(2)
    ended = (active[:-1] & ~active[1:]).sum(0)
    expected = (ended - shortened.long()).sum()  # every shortened episode has ended within 5 steps
    assert bool((ended[shortened] > 0).all()) and one.opponents.results[..., 2].sum().equal(expected)


def test_wins_and_weights_by_formula():
    results = torch.tensor([[[0, 0, 0], [3, 2, 8], [10, 0, 10]]])
    p = learning_wins(results)
    assert p.tolist() == [[0.5, 0.5, 11 / 12]]
    assert draw_weights(p, "hard")[0].tolist() == pytest.approx([0.25, 0.25, (1 / 12) ** 2])
    assert draw_weights(p, "even")[0].tolist() == pytest.approx([0.25, 0.25, 11 / 144])
    assert draw_weights(p, "uniform").tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("sampling", ["hard", "even", "uniform"])
def test_opponents_are_drawn_in_proportion_to_their_weights(sampling, device):
    one = trainer(device, members("snapshots", "random", "still", sampling=sampling, num_snapshots=2))
    opponents = one.opponents
    opponents.results[0] = torch.tensor([[9, 0, 10], [5, 0, 10], [2, 2, 10], [0, 0, 10]])
    opponents.results[1] = torch.tensor([[0, 0, 10], [0, 10, 10], [8, 0, 10], [9, 0, 10]])
    opponents.state()["taken"].fill_(2)
    never = torch.zeros(1, dtype=torch.bool, device=device)
    counts, draws = torch.zeros(2, 4), 3000
    for _ in range(draws):
        opponents.opponent.fill_(-1)
        opponents.assign(torch.zeros(1, dtype=torch.int64, device=device), never)
        opponents.state()["clock"].add_(1)
        for number, drawn in enumerate(opponents.opponent.tolist()):
            counts[number % 2, drawn] += 1
    expected = draw_weights(learning_wins(opponents.results), sampling).cpu()
    expected = expected / expected.sum(1, keepdim=True)
    # Four deviations of a frequency of 6,000 draws, which are the same in every run.
    assert ((counts / (2 * draws) - expected).abs() < 4 * (0.25 / (2 * draws)) ** 0.5).all()


def test_numbers_are_a_function_of_seed_and_clock(device):
    numbers = []
    for seed, clock in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 0), (0, 0)):
        out = torch.zeros(50, 40, dtype=torch.float64, device=device)
        uniform_numbers(seed, torch.tensor(clock, device=device), out)
        assert 0 < float(out.min()) < 0.01 and 0.99 < float(out.max()) < 1
        assert abs(float(out.mean()) - 0.5) < 0.03
        numbers.append(out)
    assert equal_bits(numbers[0], numbers[-1])
    assert len({float(out[0, 0]) for out in numbers[:4]}) == 4 and len(numbers[0].unique()) == 2000
    # The finaliser of SplitMix64, of numbers that others publish: its generator from seed 0 begins with these words.
    words = (numbers[0].flatten()[:2].cpu() * 2**52 - 0.5).long().tolist()
    assert words == [0xE220A8397B1DCDAF >> 12, 0x6E789E6AA1B965F4 >> 12]


def test_a_range_that_gets_another_opponent_begins_new_episodes(device):
    config = dataclasses.replace(TINY, network="gru", sequence_length=1, num_steps=4, normalize_returns=True)
    one = trainer(device, members("snapshots", "random", reassign_interval=1, snapshot_interval=100), config=config)
    changes, remembered = 0, set()
    for _ in range(20):
        before, opponents = one.env.elapsed_steps.clone(), one.opponents.opponent.clone()
        state = {name: own.current.clone() for name, own in one.states.items()}
        sums = {name: own.reward_sums.clone() for name, own in one.learners.items()}
        acting = {name: x.clone() for name, x in one.opponents.state().items() if name.startswith("states")}
        obs = one.rollout.obs[-1].clone()
        with torch.no_grad():
            one.begin_episodes(one.opponents.begin_rollout())
        changed = (one.opponents.opponent != opponents).repeat_interleave(SIZE)
        begins = torch.cat([torch.zeros(FIRST, dtype=torch.bool, device=changed.device), changed])
        assert (one.env.elapsed_steps[begins] == 0).all() and equal_bits(
            one.env.elapsed_steps[~begins], before[~begins]
        )
        assert equal_bits(one.rollout.obs[-1][~begins], obs[~begins])
        assert one.rollout.active[-1][begins].all()
        changes += int(changed.sum())
        for name, own in one.states.items():
            assert not own.current[begins].any() and equal_bits(own.current[~begins], state[name][~begins])
            assert not one.learners[name].reward_sums[begins].any()
            assert equal_bits(one.learners[name].reward_sums[~begins], sums[name][~begins])
        for name, before_it in acting.items():
            own = one.opponents.state()[name]
            assert not own[changed].any() and equal_bits(own[~changed], before_it[~changed])
        one.train_iteration()
        remembered |= {name for name, own in one.opponents.state().items() if name.startswith("states") and own.any()}
    assert remembered == {"states.tagger", "states.runner"}
    assert 3 * SIZE < changes < 20 * SIZE * 4


def test_an_opponent_stays_until_its_episodes_have_ended(device):
    one = trainer(
        device, members("random", "still", reassign_interval=1), config=dataclasses.replace(TINY, num_steps=2)
    )
    waited = changed = 0
    for _ in range(40):
        opponents = one.opponents.opponent.clone()
        due = one.opponents.state()["ended"].view(4, SIZE).amin(1) > 0
        one.train_iteration()
        changes = one.opponents.opponent != opponents
        assert not (changes & ~due & (opponents >= 0)).any()
        waited += int((~due).sum())
        changed += int((changes & due).sum())
    assert waited > 40 and changed > 10


def test_a_snapshot_replaces_the_oldest_by_interval_and_by_gain(device):
    one = trainer(device, dataclasses.replace(POOL, snapshot_interval=4, snapshot_gain=0.8))
    state = one.opponents.state()
    for iteration in range(6):
        one.train_iteration()
        assert int(state["taken"]) == 1 + iteration // 4
    one.opponents.results[0, 1] = torch.tensor([90, 0, 99])
    one.opponents.results[1, 1] = 0
    with torch.no_grad():
        one.opponents.begin_rollout()  # after 6 iterations, with too few games
    assert int(state["taken"]) == 2
    one.opponents.results[0, 1] = torch.tensor([90, 0, 100])
    one.opponents.results[:, 2] = 7
    with torch.no_grad():
        one.opponents.begin_rollout()
    assert int(state["taken"]) == 3
    assert one.opponents.results[:, 2].tolist() == [[0, 0, 0]] * 2 and one.opponents.results[0, 1].tolist() == [
        90,
        0,
        100,
    ]


def test_metrics_count_games_of_sides_against_members(device):
    one = trainer(device, members("random", Opponent(name="east", actors={"runner": east})))
    games, total = 0.0, 0
    for _ in range(8):
        metrics = one.train_iteration()
        own = {name: value for name, value in metrics.items() if "_against_" in name}
        assert set(own) == {
            f"{kind}_{match}"
            for kind in ("games", "win_rate")
            for match in ("tagger_against_random", "tagger_against_east", "runner_against_random")
        }
        games += sum(value for name, value in own.items() if name.startswith("games"))
        total = int(one.opponents.results[..., 2].sum())
        assert all(0 <= own[n.replace("games", "win_rate")] <= 1 for n, x in own.items() if n.startswith("games") and x)
    assert games == total > 30


# Resumes

EVERYTHING = members("snapshots", "random", "still", Opponent(name="east", actors={"runner": east}))


@pytest.mark.parametrize(
    ("config", "game"),
    [
        (dataclasses.replace(TINY, normalize_obs=True, normalize_returns=True), "tag_gridworld"),
        (
            dataclasses.replace(TINY, network="gru", sequence_length=4, critic="central", agent_ids=True),
            "tag_gridworld",
        ),
        (PQNConfig(num_steps=8, num_epochs=1, num_minibatches=2, hidden_sizes=(8,)), "simple_tag"),
    ],
    ids=["perceptron", "gru", "pqn"],
)
def test_a_resumed_trainer_goes_on_bit_by_bit(config, game, device, tmp_path):
    opponents = EVERYTHING if game == "tag_gridworld" else members("snapshots", "random", "still")
    whole, resumed = (trainer(device, opponents, config=config, game=game) for _ in range(2))
    for _ in range(5):
        whole.train_iteration()
    path = whole.save(tmp_path / "checkpoint")
    assert bool((whole.env.elapsed_steps % 6 != 0).any())  # in the middle of episodes
    resumed.train_iteration()
    resumed.load(path)
    for _ in range(6):
        metrics = [one.train_iteration() for one in (whole, resumed)]
        assert equal_bits(whole.state()[0], resumed.state()[0])
        assert all(
            a == b or a != a or "_per_s" in n or "time" in n
            for (n, a), b in zip(metrics[0].items(), metrics[1].values(), strict=True)
        )
    assert len({*whole.opponents.opponent.tolist()}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("game", "opponents"),
    [
        ("tag_gridworld", EVERYTHING),  # several launches a step
        ("tag_gridworld", members("snapshots", "random")),  # one launch for a rollout
        (gpu_vecenv.configure("tag_continuous", num_taggers=2, num_runners=60, max_steps=5), POOL),  # by several warps
    ],
    ids=["everything", "one launch", "crowd"],
)
def test_graphs_do_what_their_launches_do(game, opponents):
    """Opponents, their weights and their random numbers are those of each iteration, not those of the capture."""
    one, eager = (trainer("cuda", opponents, game=game, graphs=graphs) for graphs in (True, False))
    met = set()
    for _ in range(8):
        one.train_iteration()
        eager.train_iteration()
        met |= {*one.opponents.opponent.tolist()}
    assert one.graphs and not eager.graphs
    assert equal_bits(one.state()[0], eager.state()[0])
    assert len(met) > 1


def test_weights_do_not_depend_on_when_metrics_are_read(device):
    states = []
    for interval in (1, 3):
        one = trainer(device, EVERYTHING)
        while one.iteration < 6:
            one.train_interval(interval)
        states.append({name: x.clone() for name, x in one.state()[0].items()})
    assert equal_bits(*states)


def test_a_checkpoint_of_other_opponents_is_refused(device, tmp_path):
    path = trainer(device).save(tmp_path / "checkpoint")
    for other in (None, members("snapshots", "random"), dataclasses.replace(POOL, sampling="even")):
        with pytest.raises(ConfigError, match="opponents"):
            trainer(device, other).load(path)
    trainer(device).load(path)


def test_a_closed_trainer_leaves_nothing(device):
    one = trainer(device, EVERYTHING)
    one.train_iteration()
    one.close()
    assert not hasattr(one, "opponents")


# Refused


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: OpponentsConfig(share=0), ConfigError, "share is 0"),
        (lambda: OpponentsConfig(share=1.5), ConfigError, r"expected a value in \[0, 1\]"),
        (lambda: OpponentsConfig(members=()), ConfigError, "expected a tuple of snapshots, random, still"),
        (lambda: OpponentsConfig(members=("anyone",)), ConfigError, "'anyone'; expected 'snapshots'"),
        (
            lambda: OpponentsConfig(members=(np.arange(2),)),
            ConfigError,
            "expected 'snapshots', 'random', 'still' or an",
        ),
        (lambda: OpponentsConfig(members=("random", "random")), ConfigError, "each name once"),
        (lambda: OpponentsConfig(sampling="best"), ConfigError, "sampling is 'best'"),
        (lambda: OpponentsConfig(num_snapshots=0), ConfigError, "num_snapshots is 0"),
        (lambda: Opponent(name="random", actors={"runner": east}), ConfigError, "Opponent.name is 'random'"),
        (lambda: Opponent(name="x", actors={}), ConfigError, "no actors"),
        (lambda: Opponent(name="x", actors={1: east}), TypeError, "of 'x' has 1; expected names of roles or agents"),
        (lambda: Opponent(name="x", actors=3), TypeError, "actors is a int; expected a mapping"),
        (lambda: Opponent(name="x", actors={"runner": 3}), TypeError, "is a int; expected a Policy"),
        (lambda: OpponentsConfig(snapshot_interval=2**31), ConfigError, "snapshot_interval is 2147483648; expected"),
        (lambda: OpponentsConfig(reassign_interval=2**31), ConfigError, "reassign_interval is 2147483648; expected"),
    ],
)
def test_wrong_configurations_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


class Uncopied(nn.Module):
    """A network with what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Linear(21, 6), (number for number in range(3))

    def forward(self, obs):
        found = self.layer(obs)
        return found[..., :5], found[..., 5]


@pytest.mark.parametrize(
    ("opponents", "options", "message"),
    [
        (
            dataclasses.replace(POOL, share=0.1),
            {},
            "of 16 environments is 1, and OpponentsConfig.num_ranges is 4; expected",
        ),
        (dataclasses.replace(POOL, num_ranges=1), {}, "at least one for each side that learns: tagger, runner"),
        (members(Opponent(name="x", actors={"walker": east})), {}, "unknown role 'walker'"),
        (members("still"), {"game": Race()}, "declares no noop of 'player'"),
        (POOL, {"game": "cartpole"}, "has one agent"),
        (
            POOL,
            {"policies": {"tagger": PolicySpec(network=Uncopied()), "runner": PolicySpec()}},
            "tagger cannot be copied",
        ),
        (
            POOL,
            {"config": PQNConfig.vdn(num_steps=8, num_epochs=1, num_minibatches=1, hidden_sizes=(8,)), "game": Race()},
            "learn together, but player_0 would learn alone",
        ),
        (
            members("random"),
            {"policies": {n: PolicySpec(train=False) for n in ("tagger", "runner")}},
            "plays against no side that learns; these are none",
        ),
    ],
)
def test_opponents_that_do_not_fit_are_refused(opponents, options, message, device):
    with pytest.raises(ConfigError, match=message):
        trainer(device, opponents, **options)


def test_a_policy_of_another_shape_is_refused(device):
    other = trainer(device, None, game="simple_tag")
    with pytest.raises(ConfigError, match="of opponent 'x' has observations"):
        trainer(device, members(Opponent(name="x", actors={"runner": other.policies["agent"]})))


def test_a_policy_of_other_choices_is_refused(device):
    """As many numbers, 32, but of other heads."""
    one, other = (
        gpu_vecenv.configure("tag_continuous", num_taggers=1, num_runners=2, acceleration_levels=k, turn_levels=30 - k)
        for k in (10, 20)
    )
    actors = {"runner": trainer(device, None, game=other).policies["runner"]}
    with pytest.raises(ConfigError, match=r"of opponent 'x' has observations and choices .*\(21, 11\).*\(11, 21\)"):
        trainer(device, members(Opponent(name="x", actors=actors)), game=one)


def test_other_types_are_refused(device):
    with pytest.raises(TypeError, match="opponents is a str; expected a OpponentsConfig or None"):
        trainer(device, "snapshots")


def test_a_script_that_returns_something_else_is_refused(device):
    one = trainer(device, members(Opponent(name="x", actors={"runner": lambda obs: obs})))
    with pytest.raises((TypeError, ValueError), match="function of 'runner' of opponent 'x'"):
        one.train_iteration()


def test_an_action_of_a_script_that_does_not_exist_is_named_as_a_cause(device):
    one = trainer(device, members(Opponent(name="x", actors={"runner": lambda obs: 7 * east(obs)})))
    with pytest.raises(
        NonFiniteError, match="or an opponent's function returned an action that its role does not have"
    ):
        one.train_iteration()
