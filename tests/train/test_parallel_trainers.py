"""ParallelTrainers: several trainers at a time, each bitwise as alone; on a GPU in one CUDA graph."""

import warnings

import pytest
import torch
from reliability.resume import TIMES
from support.bitwise import equal_bits
from torch import nn

import gpu_vecenv
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.train.parallel_trainers import MAX_BRANCHES, ParallelTrainers
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

NUM_ENVS, ITERATIONS = 48, 6
CONFIG = PPOConfig(total_steps=NUM_ENVS * 8 * ITERATIONS, num_steps=8, num_minibatches=2, num_epochs=2)
NORMALIZED = {"normalize_obs": True, "normalize_returns": True, "shared_trunk": False}


class Own(nn.Module):
    """A network that torch computes."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, obs):
        out = self.heads(self.body(obs))
        return out[..., :2], out[..., 2]


def make(device, seed, *, driver=None, reward=None, own=False, graphs=True, **changes):
    env = gpu_vecenv.make("cartpole", NUM_ENVS, device, driver=driver, max_steps=20, autoreset_mode="next_step")
    config = CONFIG if not changes else PPOConfig(**{**vars(CONFIG), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policies = {"agent": PolicySpec(network=Own())} if own else None
    return Trainer(env, config, seed=seed, reward=reward, policies=policies, graphs=graphs)


def without_times(metrics):
    return {name: repr(value) for name, value in metrics.items() if not TIMES.fullmatch(name)}


def trained(trainer, log_interval=1):
    """Metrics and final tensors of a trainer alone."""
    metrics = []
    while trainer.iteration < trainer.num_iterations:
        metrics.append(without_times(trainer.train_interval(log_interval)))
    return metrics, trainer.state()[0]


def trained_together(trainers, together, log_interval=1, at_iteration=None):
    """Metrics and final tensors of each; ``at_iteration``: a number of iterations, and what is called after them."""
    iteration, check = at_iteration or (None, None)
    metrics = [[] for _ in trainers]
    while active := [k for k, trainer in enumerate(trainers) if trainer.iteration < trainer.num_iterations]:
        for k, result in zip(active, together.train_interval([trainers[k] for k in active], log_interval), strict=True):
            metrics[k].append(without_times(result))
        if trainers[0].iteration == iteration:
            check()
    return [(each, trainer.state()[0]) for each, trainer in zip(metrics, trainers, strict=True)]


def assert_same(found, expected):
    for (metrics, tensors), (alone, wanted) in zip(found, expected, strict=True):
        assert metrics == alone
        assert equal_bits({**tensors}, {**wanted})


@pytest.mark.parametrize("log_interval", [1, 4])
def test_each_trainer_is_bitwise_as_alone(log_interval, device):
    trainers = [make(device, seed, **NORMALIZED) for seed in (7, 8)]
    found = trained_together(trainers, ParallelTrainers(trainers), log_interval)
    assert len(found[0][0]) == -(-ITERATIONS // log_interval)
    assert not equal_bits(found[0][1], found[1][1])
    assert_same(found, [trained(make(device, seed, **NORMALIZED), log_interval) for seed in (7, 8)])


def with_opponents(device, seed):
    env = gpu_vecenv.make("tag_gridworld", NUM_ENVS, device, max_steps=5, autoreset_mode="next_step")
    changing = {"share": 0.5, "snapshot_interval": 2, "reassign_interval": 1}
    return Trainer(env, CONFIG, seed=seed, opponents=OpponentsConfig(members=("snapshots", "random"), **changing))


def test_opponents_of_each_trainer_are_as_alone(device):
    """What they draw is of torch's operations, which are not joined: there is a branch for each trainer."""
    trainers = [with_opponents(device, seed) for seed in (7, 8)]
    together = ParallelTrainers(trainers)
    found = trained_together(trainers, together)
    assert not together.joins(trainers) and not equal_bits(found[0][1], found[1][1])
    assert_same(found, [trained(with_opponents(device, seed)) for seed in (7, 8)])


@pytest.mark.slow
def test_trainers_may_be_at_other_iterations(device):
    """The intervals end at the same numbers as alone; the last ones run without those that have ended."""
    trainers, twins = ([make(device, seed) for seed in (1, 2, 3)] for _ in range(2))
    for one, two, ahead in zip(trainers, twins, (0, 1, 5), strict=True):
        for _ in range(ahead):
            assert without_times(one.train_iteration()) == without_times(two.train_iteration())
    found = trained_together(trainers, ParallelTrainers(trainers), 3)
    assert [len(metrics) for metrics, _ in found] == [2, 2, 1]
    assert_same(found, [trained(twin, 3) for twin in twins])


def broken(transition):
    return transition.rewards / 0


def test_an_error_of_one_is_its_result_and_the_others_go_on(device):
    trainers = [make(device, seed, reward=reward) for seed, reward in ((1, None), (2, broken), (3, None))]
    together = ParallelTrainers(trainers)
    one, error, other = together.train_interval(trainers)
    assert isinstance(error, NonFiniteError) and "iteration 1: losses" in str(error)
    assert (one["iteration"], other["iteration"], trainers[1].iteration) == (1, 1, 0)
    left = [trainers[0], trainers[2]]
    for (metrics, tensors), seed in zip(trained_together(left, together), (1, 3), strict=True):
        alone, wanted = trained(make(device, seed))
        assert metrics == alone[1:] and equal_bits(tensors, wanted)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_the_interval_is_checked(value, device):
    trainers = [make(device, 1)]
    with pytest.raises((TypeError, ValueError), match=r"log_interval is .*expected an int >= 1"):
        ParallelTrainers(trainers).train_interval(trainers, value)


def test_wrong_trainers_are_refused(device):
    one = make(device, 1)
    with pytest.raises(ConfigError, match="there are no trainers; expected at least one"):
        ParallelTrainers([])
    with pytest.raises(TypeError, match="trainers has a VecEnv; expected trainers"):
        ParallelTrainers([one, one.env])
    with pytest.raises(ConfigError, match="trainers share an environment"):
        ParallelTrainers([one, Trainer(one.env, CONFIG)])


# On a GPU


def captured(together):
    """Whether each set of trainers that run together has a graph; there is none once one of them has ended."""
    return [graphed.graph is not None for graphed in together._graphed.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("join", [True, False], ids=["joined", "branches"])
@pytest.mark.parametrize("driver", ["pycuda", "cuda_core"])
@pytest.mark.parametrize("precision", ["tf32", "float32", "bfloat16"])
def test_iterations_by_kernels_are_one_graph(driver, precision, join):
    changes = {"driver": driver, "precision": precision, **NORMALIZED}
    trainers = [make("cuda", seed, **changes) for seed in range(8)]
    assert all(trainer.by_kernels for trainer in trainers)
    together, checks = ParallelTrainers(trainers, join=join), []

    def check():
        checks.append((captured(together), together.joins(trainers)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained_together(trainers, together, at_iteration=(ITERATIONS - 1, check))
    assert checks == [([True], join)]
    assert_same(found, [trained(make("cuda", seed, **changes)) for seed in range(8)])


@pytest.mark.gpu
@pytest.mark.parametrize("driver", ["pycuda", "cuda_core"])
def test_kernels_are_launched_on_a_stream_of_each_branch(driver):
    """What one branch waits for is nobody else's work: it ends while another one is held up."""
    trainers = [make("cuda", seed, driver=driver) for seed in (0, 1)]
    together = ParallelTrainers(trainers)
    for _ in range(2):
        together.train_interval(trainers)
    (held, free), done = together._branches.values(), torch.cuda.Event()
    actions = [trainer.env.sample_actions() for trainer in trainers]
    torch.cuda.synchronize()
    with torch.cuda.stream(held):
        torch.cuda._sleep(10**10)  # seconds
        trainers[0].env.step(actions[0], out=trainers[0].rollout.last)
    with torch.cuda.stream(free):
        trainers[1].env.step(actions[1], out=trainers[1].rollout.last)
        done.record()
    done.synchronize()
    assert not held.query()


@pytest.mark.gpu
def test_a_graph_of_those_that_are_left_replaces_that_of_all():
    iterations = ITERATIONS + 2
    longer = {"total_steps": NUM_ENVS * 8 * iterations}
    trainers = [make("cuda", seed, **longer) for seed in (1, 2, 3)]
    together = ParallelTrainers(trainers)
    for _ in range(3):
        together.train_interval(trainers)
    assert captured(together) == [True]
    trainers[1].rollout.env.state["x"].fill_(float("nan"))
    results = together.train_interval(trainers)
    assert [isinstance(result, NonFiniteError) for result in results] == [False, True, False]
    assert captured(together) == []
    left, checks = [trainers[0], trainers[2]], []
    found = trained_together(left, together, at_iteration=(iterations - 1, lambda: checks.append(captured(together))))
    assert checks == [[True]] and captured(together) == []
    for (_, tensors), seed in zip(found, (1, 3), strict=True):
        assert equal_bits(tensors, trained(make("cuda", seed, **longer))[1])


@pytest.mark.gpu
def test_networks_of_torch_run_on_streams_of_their_own():
    trainers = [make("cuda", seed, own=True) for seed in (1, 2, 3)]
    assert not any(trainer.by_kernels for trainer in trainers)
    together = ParallelTrainers(trainers)
    found = trained_together(trainers, together)
    assert captured(together) == [] and len(set(together._branches.values())) == 3
    assert_same(found, [trained(make("cuda", seed, own=True)) for seed in (1, 2, 3)])


@pytest.mark.gpu
@pytest.mark.parametrize("join", [True, False], ids=["joined", "branches"])
@pytest.mark.parametrize("graphs", [True, False])
def test_more_trainers_than_streams_share_them(graphs, join):
    count, checks = MAX_BRANCHES + 3, []
    trainers = [make("cuda", seed, graphs=graphs) for seed in range(count)]
    together = ParallelTrainers(trainers, join=join)
    found = trained_together(
        trainers, together, at_iteration=(ITERATIONS - 1, lambda: checks.append(captured(together)))
    )
    assert checks == [[graphs]]
    assert len({stream.cuda_stream for stream in together._branches.values()}) <= MAX_BRANCHES
    assert_same(found, [trained(make("cuda", seed, graphs=graphs)) for seed in range(count)])


@pytest.mark.gpu
def test_the_memory_of_the_graph_is_released():
    def allocated():
        trainers = [make("cuda", seed) for seed in range(4)]
        together = ParallelTrainers(trainers)
        for _ in range(3):
            together.train_interval(trainers)
        for trainer in trainers:
            trainer.close()
        del together, trainers
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    allocated()  # permanent allocations
    before = allocated()
    assert allocated() == before


def test_only_own_trainers_are_trained(device):
    own, other = make(device, 1), make(device, 2)
    together = ParallelTrainers([own])
    with pytest.raises(ConfigError, match="trainers has one that ParallelTrainers was not made with"):
        together.train_interval([own, other])
    assert together.train_interval([]) == [] and own.iteration == 0
