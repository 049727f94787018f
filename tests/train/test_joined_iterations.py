"""Iterations of several trainers with one launch for all: each is bitwise as alone; which trainers can be joined."""

import pytest
import torch
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv.errors import NonFiniteError
from gpu_vecenv.train.graph import StageTimer
from gpu_vecenv.train.joined_iterations import join_iterations
from gpu_vecenv.train.parallel_trainers import ParallelTrainers
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

NUM_ENVS, ITERATIONS = 8, 5
CONFIG = {"num_steps": 4, "num_minibatches": 2, "num_epochs": 1, "hidden_sizes": (4,), "normalize_obs": True}
CONFIG |= {"normalize_returns": True, "shared_trunk": False}


def make(
    device, seed, game="cartpole", *, num_envs=NUM_ENVS, several_launches=False, reward=None, sharing="role", **changes
):
    env = gpu_vecenv.make(game, num_envs, device, max_steps=5, autoreset_mode="next_step")
    if several_launches:
        env.step = env.step  # replaced: the rollout calls it
    config = PPOConfig(**{"total_steps": num_envs * 4 * ITERATIONS, **CONFIG, **changes})
    return Trainer(env, config, seed=seed, reward=reward, sharing=sharing)


def without_times(metrics):
    times = ("per_s", "time_fraction")
    return {name: repr(value) for name, value in metrics.items() if not name.endswith(times)}


def alone(trainer):
    metrics = [without_times(trainer.train_interval(1)) for _ in range(trainer.iteration, trainer.num_iterations)]
    return metrics, trainer.state()[0]


def together(trainers, parallel, iterations):
    return [[without_times(result) for result in parallel.train_interval(trainers)] for _ in range(iterations)]


def assert_as_alone(trainers, results, twins):
    for k, (trainer, twin) in enumerate(zip(trainers, twins, strict=True)):
        metrics, tensors = alone(twin)
        assert [each[k] for each in results] == metrics
        assert equal_bits({**trainer.state()[0]}, {**tensors})


@pytest.mark.parametrize("changes", [{}, {"several_launches": True}], ids=["one launch", "several launches"])
def test_each_trainer_is_bitwise_as_alone(changes, device_of_networks):
    trainers, twins = ([make(device_of_networks, seed, **changes) for seed in (7, 8, 9)] for _ in range(2))
    assert all((trainer.rollout_reason is None) == (not changes) for trainer in trainers)
    parallel = ParallelTrainers(trainers)
    results = together(trainers, parallel, 1)
    assert not parallel.joins(trainers)  # the first iteration checks networks
    results += together(trainers, parallel, ITERATIONS - 2)
    assert parallel.joins(trainers)
    results += together(trainers, parallel, 1)
    assert parallel._graphed == {}  # nothing is left of trainers that have ended
    assert_as_alone(trainers, results, twins)
    assert not equal_bits({**trainers[0].state()[0]}, {**trainers[1].state()[0]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "sharing"), [("tag_gridworld", "role"), ("tag_gridworld", "agent"), ("pendulum", "role")]
)
def test_several_policies_and_box_actions_are_bitwise_as_alone(game, sharing, device_of_networks):
    trainers, twins = ([make(device_of_networks, seed, game, sharing=sharing) for seed in (1, 2)] for _ in range(2))
    parallel = ParallelTrainers(trainers)
    results = together(trainers, parallel, 2)
    assert parallel.joins(trainers)
    assert_as_alone(trainers, results + together(trainers, parallel, ITERATIONS - 2), twins)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"num_epochs": 2}, id="num_epochs"),
        pytest.param({"several_launches": True}, id="several_launches"),
        pytest.param({"num_envs": 512}, id="num_envs", marks=pytest.mark.slow),
        pytest.param({"hidden_sizes": (5,)}, id="hidden_sizes", marks=pytest.mark.slow),
        pytest.param({"shared_trunk": True}, id="shared_trunk", marks=pytest.mark.slow),
    ],
)
def test_trainers_of_other_work_are_not_joined(other, device_of_networks):
    trainers = [make(device_of_networks, 1), make(device_of_networks, 2, **other)]
    for trainer in trainers:
        trainer.train_iteration()
    assert join_iterations(trainers) is None
    assert join_iterations(trainers[:1]) is not None and join_iterations(trainers[1:]) is not None


def test_without_joined_iterations_each_trainer_is_bitwise_as_alone_too(device_of_networks):
    (one, two), twins = ([make(device_of_networks, 1), make(device_of_networks, 2, num_epochs=2)] for _ in range(2))
    parallel = ParallelTrainers([one, two])
    results = together([one, two], parallel, 2)
    assert not parallel.joins([one, two]) and parallel._graphed
    assert_as_alone([one, two], results + together([one, two], parallel, ITERATIONS - 2), twins)


def test_what_torch_computes_is_not_joined(device_of_networks):
    trainer = make(device_of_networks, 1, reward=lambda transition: transition.rewards * 2)
    trainer.train_iteration()
    before = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
    assert join_iterations([trainer]) is None
    assert equal_bits({**trainer.state()[0]}, before)


def test_joining_can_be_turned_off(device_of_networks):
    trainers = [make(device_of_networks, seed) for seed in (1, 2)]
    parallel = ParallelTrainers(trainers, join=False)
    together(trainers, parallel, 3)
    assert not parallel.joins(trainers)


@pytest.mark.slow
def test_trainers_that_are_left_are_joined_anew(device_of_networks):
    """One whose loss is not finite, and one that ends earlier, leave; the others are bitwise as alone."""
    trainers, twins = ([make(device_of_networks, seed) for seed in (1, 2, 3, 4)] for _ in range(2))
    for one in (trainers, twins):
        one[3].train_interval(2)
    parallel = ParallelTrainers(trainers)
    results = together(trainers, parallel, 2)
    assert parallel.joins(trainers)
    trainers[1].env.state["x"].fill_(float("nan"))
    found = parallel.train_interval(trainers)
    assert [isinstance(result, NonFiniteError) for result in found] == [False, True, False, False]
    assert not parallel.joins(trainers)
    left = [trainers[0], trainers[2]]
    results = [
        [each[0], each[2]] for each in [*results, [without_times(r) if isinstance(r, dict) else r for r in found]]
    ]
    results += together(left, parallel, 1)
    assert parallel.joins(left)
    assert_as_alone(left, results + together(left, parallel, 1), [twins[0], twins[2]])
    assert trainers[3].iteration == trainers[3].num_iterations
    assert equal_bits({**trainers[3].state()[0]}, {**alone(twins[3])[1]})


def test_weights_that_a_caller_replaces_are_those_of_the_next_iteration(device_of_networks):
    trainers, twins = ([make(device_of_networks, seed) for seed in (1, 2)] for _ in range(2))
    parallel = ParallelTrainers(trainers)
    results = together(trainers, parallel, 2)
    expected = [[without_times(twin.train_iteration()) for twin in twins] for _ in range(2)]
    for trainer in (trainers[0], twins[0]):
        weight = trainer.policies["agent"].network.actor.weight
        weight.data = weight.data * 2
    results += together(trainers, parallel, 1)
    expected.append([without_times(twin.train_iteration()) for twin in twins])
    assert parallel.joins(trainers) and results == expected


def test_times_of_joined_work_are_those_of_the_first_timer():
    one, other = (StageTimer(torch.device("cpu")) for _ in range(2))
    one.mark("start")
    one.mark("end")
    other.mark("start")
    assert other.has("start") and not other.has("end")
    other.follow(one)
    assert other.has("end") and other.seconds("start", "end") == one.seconds("start", "end")
    other.follow(other)
    assert not other.has("end")


def test_shares_of_the_time_are_there_for_each(device_of_networks):
    trainers = [make(device_of_networks, seed) for seed in (1, 2)]
    parallel = ParallelTrainers(trainers)
    for _ in range(3):
        results = parallel.train_interval(trainers)
    assert parallel.joins(trainers)
    shares = [[result[f"{stage}_time_fraction"] for stage in ("rollout", "update")] for result in results]
    assert all(min(own) > 0 and sum(own) < 1.001 for own in shares)
