"""What begins and ends the updates of an iteration: explained variance, schedules, sums over environments."""

import ctypes

import pytest
import torch
from games.script import Script

from gpu_vecenv import EpisodeLog, FunctionManager, VecEnv
from gpu_vecenv.compile.backends import symbol
from gpu_vecenv.files import cuda_folder
from gpu_vecenv.train.iteration_kernels import (
    BEGIN_UPDATE,
    EPISODE_METRICS,
    EXPLAINED_VARIANCE,
    LEARNER_METRICS,
    begin_update_launch,
    explained_variance_launch,
    learner_metrics_launch,
)
from gpu_vecenv.train.ppo import PPOConfig, explained_variance

ROWS = [1, 2, 255, 257, 2048, 2049, 5000, 70000]
NAN = float("nan")


def on_workers(functions, kernel, launch, workers):
    """Runs a host kernel on worker after worker, from the last to the first."""
    kernels = [BEGIN_UPDATE, EXPLAINED_VARIANCE, LEARNER_METRICS, EPISODE_METRICS]
    program = functions.compile(cuda_folder() / "learner/iteration.cu", kernels=kernels)
    function = program.module.library[symbol(kernel)]
    for worker in reversed(range(workers)):
        function(worker, workers, ctypes.byref(launch.fields))


class Samples:
    """Returns with errors, of which a fifth is not active and NaN, and the order in which they are read."""

    def __init__(self, functions, rows, level=3.0):
        random = torch.Generator().manual_seed(rows)
        active = torch.rand(rows, generator=random) < 0.8
        returns = torch.randn(rows, generator=random) + level
        errors = torch.randn(rows, generator=random) * 0.7 + 0.3
        returns[~active] = errors[~active] = NAN
        self.returns, self.errors, self.active = (x.to(functions.device) for x in (returns, errors, active))
        self.indices = torch.randperm(rows, generator=random).to(functions.device)
        self.out = torch.zeros((), device=functions.device)
        given = self.indices, self.returns, self.errors, self.active
        self.launch = explained_variance_launch(functions, *given, out=self.out)

    def __call__(self):
        self.launch()
        return self.out.item()


@pytest.mark.parametrize("rows", ROWS)
def test_explained_variance_is_that_of_torch(rows, functions):
    samples = Samples(functions, rows)
    kept = (x[samples.active].double() for x in (samples.returns, samples.errors))
    active = torch.ones(int(samples.active.sum()), dtype=torch.bool, device=functions.device)
    exact = explained_variance(*kept, active).item()
    # Float32 sums of 70000 squares, of size 10, by torch.
    assert explained_variance(samples.returns, samples.errors, samples.active).item() == pytest.approx(exact, abs=1e-4)
    # The variance, 1, is a difference of numbers of size 10 in double; a quotient of floats is rounded three times.
    assert samples() == pytest.approx(exact, rel=1e-6, abs=1e-6)
    assert samples() == samples()  # launched again


def test_explained_variance_of_part_of_the_samples(functions):
    samples = Samples(functions, 3000)
    some, out = samples.indices[:1000], torch.zeros((), device=functions.device)
    explained_variance_launch(functions, some, samples.returns, samples.errors, samples.active, out=out)()
    expected = explained_variance(*(x[some] for x in (samples.returns, samples.errors, samples.active)))
    assert out.item() == pytest.approx(expected.item(), abs=1e-5)


def test_explained_variance_of_no_active_sample_is_that_of_torch(functions):
    samples = Samples(functions, 100)
    samples.active.zero_()
    assert samples() == explained_variance(samples.returns, samples.errors, samples.active) == 1


@pytest.mark.parametrize("rows", [1, 257, 5000])
def test_emulated_cuda_threads_explain_like_the_host(rows, emulated):
    assert Samples(FunctionManager("cpu"), rows)() == Samples(emulated, rows)()


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_host_threads_explains_alike(workers):
    functions = FunctionManager("cpu")
    samples = Samples(functions, 9000)
    on_workers(functions, "explained_variance", samples.launch, workers)
    found = samples.out.item()
    assert found == samples()


# Schedules


class Beginning:
    """What an iteration's updates begin with."""

    def __init__(self, functions, config, num_iterations):
        device = functions.device
        self.iteration, self.epoch = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self.progress, self.stopped = torch.zeros((2, 1), dtype=torch.float64, device=device)
        self.scheduled = tuple(torch.zeros(3, device=device))
        self.skip_update, self.metric_sums = torch.full((), NAN, device=device), torch.ones(7, device=device)
        tensors = {name: value for name, value in vars(self).items() if name != "stopped"}
        schedules = torch.tensor(list(config.schedule_ends().values()), dtype=torch.float64).to(device)
        self.launch = begin_update_launch(functions, num_iterations, config.num_epochs, schedules=schedules, **tensors)

    def __call__(self):
        self.launch(stopped=self.stopped)


SCHEDULES = [
    PPOConfig(num_epochs=3),
    PPOConfig(learning_rate=0.7, final_learning_rate=0.1, clip=0.3, final_clip=0.1, final_entropy_coefficient=1.0),
    PPOConfig(learning_rate=0.1, final_learning_rate=None),
]


@pytest.mark.parametrize("config", SCHEDULES, ids=["default", "all", "constant"])
def test_schedules_are_those_that_python_computes(config, functions):
    """Bit by bit, beyond the end of the run too."""
    begin = Beginning(functions, config, 7)
    for iteration in range(10):
        begin.metric_sums.fill_(NAN)
        begin()
        expected = torch.tensor(config.schedule(min(iteration / 7, 1.0)))
        assert torch.stack(begin.scheduled).cpu().equal(expected)
        assert begin.epoch.item() == iteration * config.num_epochs and begin.iteration.item() == iteration + 1
        assert begin.metric_sums.eq(0).all() and begin.skip_update == 0


def test_updates_are_skipped_while_stopped(functions):
    begin, found = Beginning(functions, PPOConfig(), 9), []
    for stopped in (0, 1, 1, 0):
        begin.stopped.fill_(stopped)
        begin()
        found.append(begin.skip_update.item())
    assert found == [0, 1, 1, 0]


# Metrics of a learner


@pytest.mark.parametrize(
    ("place", "value", "faults", "stops"),
    [(0, 1.0, 0, 0), (0, NAN, 0, 1), (5, float("inf"), 0, 1), (6, 0.0, 0, 0), (7, NAN, 0, 0), (0, 1.0, 2, 1)],
)
def test_losses_that_are_not_finite_and_invalid_actions_stop(place, value, faults, stops, functions):
    """The first six are losses; the last are explained variance and learning rate."""
    numbers = torch.arange(1.0, 10.0, device=functions.device)
    numbers[6] = 0.25  # one of the four updates was skipped
    numbers[place] = value
    sums, explained, rate = numbers[:7] * 4, numbers[7].clone(), numbers[8].clone()
    totals = torch.full((9,), 0.5, dtype=torch.float64, device=functions.device)
    given, stopped = torch.tensor([float(faults), 0.0], dtype=torch.float64, device=functions.device)
    settings = {"num_losses": 6, "num_updates": 4, "faults": given, "totals": totals, "stopped": stopped}
    launch = learner_metrics_launch(
        functions, metric_sums=sums, explained_variance=explained, learning_rate=rate, **settings
    )
    launch()
    torch.testing.assert_close(totals, numbers.double() + 0.5, rtol=0, atol=0, equal_nan=True)
    assert stopped == stops
    launch()
    torch.testing.assert_close(totals, 2 * numbers.double() + 0.5, rtol=0, atol=0, equal_nan=True)


# Episodes


def logged(env, clears):
    """Sums and each environment's latest episodes after some steps, taken in every few."""
    env.reset(seed=3)
    log, found = EpisodeLog(env), []
    sums = torch.zeros(log.num_sums, dtype=torch.float64, device=env.device)
    launch = log.launch_into(sums, clears=clears)
    for _ in range(6):
        for _ in range(7):
            env.step(env.sample_actions())
        log.begin_update()
        if clears:
            log.cleared()
        log.take_in(launch)
        found.append((sums.cpu().clone(), log.latest.cpu().clone()))
    return found


def script(num_envs, device, **arguments):
    return VecEnv(Script(num_leads=2, num_others=3, leave=2), num_envs, device, **arguments)


@pytest.mark.parametrize("num_envs", [5, 256, 700])
def test_statistics_that_begin_anew_give_the_same_episodes(num_envs, device):
    env = script(num_envs, device)
    kept, cleared, ended = logged(script(num_envs, device), False), logged(env, True), 0
    for number, ((sums, latest), (own, own_latest)) in enumerate(zip(kept, cleared, strict=True), start=1):
        assert latest.equal(own_latest)
        ended += sums[5]
        torch.testing.assert_close(own[:5], latest.sum(0), rtol=1e-12, atol=0)  # in another order
        assert own[5] == ended and own[6] == sums[6] and own[7:].tolist() == [0, 0, number]
    assert ended > num_envs
    assert all(x.eq(0).all() for x in env.episode_statistics().values())


def test_faults_of_both_kinds_are_counted(device):
    env = script(300, device)
    env.reset(seed=1)
    env.faults()[:7], env.faults()[5:11], env.faults()[20] = 1, 8, 2 | 8
    log = EpisodeLog(env)
    sums = torch.zeros(log.num_sums, dtype=torch.float64, device=env.device)
    log.take_in(log.launch_into(sums, clears=False))
    assert sums[7:9].tolist() == [6, 7] and sums[6] == 300


@pytest.mark.parametrize("workers", [2, 5])
def test_any_number_of_host_threads_takes_in_the_same_episodes(workers):
    found = []
    for number in (1, workers):
        env = script(700, "cpu")
        env.reset(seed=3)
        log = EpisodeLog(env)
        sums = torch.zeros(log.num_sums, dtype=torch.float64)
        launch = log.launch_into(sums, clears=False)
        for _ in range(20):
            env.step(env.sample_actions())
        on_workers(env.functions, "episode_metrics", launch, number)
        found.append((sums, log.latest))
    assert all(x.equal(y) for x, y in zip(*found, strict=True)) and found[0][0][5] > 0


@pytest.mark.parametrize("clears", [False, True])
def test_emulated_cuda_threads_log_like_the_host(clears, emulated):
    host, env = script(300, "cpu"), script(300, "cpu")
    env.functions = emulated
    assert all(
        x.equal(y)
        for one, other in zip(logged(host, clears), logged(env, clears), strict=True)
        for x, y in zip(one, other, strict=True)
    )


def test_debug_builds_are_logged_alike(device):
    """Their statistics have guard bytes between environments."""
    assert all(
        x.equal(y)
        for one, other in zip(
            logged(script(40, device), True), logged(script(40, device, guards=True), True), strict=True
        )
        for x, y in zip(one, other, strict=True)
    )
