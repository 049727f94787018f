"""Work that is run again and again: as it is on the CPU, as CUDA graphs on a GPU; and the clock of its stages."""

import warnings

import pytest
import torch
from torch import nn

import gpu_vecenv
from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.graph import GraphedCallable, GraphPool, StageTimer
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer

LOGISTIC = 3.9  # x -> 3.9 x (1 - x): a wrong or lost repetition shows in all digits


class Work:
    """Something whose result depends on how often it was done; counts the calls from the host."""

    def __init__(self, device, looks=False):
        self.x = torch.linspace(0.1, 0.9, 1000, device=device)
        self.calls, self.looks, self.seen = 0, looks, []

    def __call__(self):
        self.calls += 1
        self.x.copy_(LOGISTIC * self.x * (1 - self.x))
        if self.looks:
            self.seen.append(self.x.sum().item())


def done(repetitions, device):
    work = Work(device)
    for _ in range(repetitions):
        work()
    return work.x


def test_on_the_cpu_work_is_simply_called():
    work = Work("cpu", looks=True)
    repeated = GraphedCallable(work, "the work", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(1, 6):
            repeated()
            assert work.calls == k and repeated.graph is None
    assert work.x.equal(done(5, "cpu")) and len(work.seen) == 5


def test_errors_of_the_work_come_through_and_it_can_be_called_again():
    def fail():
        raise ValueError("of the work")

    repeated = GraphedCallable(fail, "the work", None)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the work"):
            repeated()


@pytest.fixture
def stream():
    """Captures need a stream that is not the default one."""
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        yield own
    own.synchronize()


@pytest.mark.gpu
def test_graph_replays_are_bitwise_equal(stream):
    work = Work("cuda")
    repeated = GraphedCallable(work, "the work", GraphPool())
    repeated()
    assert repeated.graph is None and work.calls == 1  # warms up
    for k in range(2, 20):
        repeated()
        assert repeated.graph is not None and work.calls == 2  # the second is the capture, which runs nothing itself
        assert work.x.equal(done(k, "cuda"))


@pytest.mark.gpu
def test_a_replay_works_on_what_its_tensors_hold_by_then(stream):
    work = Work("cuda")
    repeated = GraphedCallable(work, "the work", GraphPool())
    for _ in range(3):
        repeated()
    work.x.copy_(Work("cuda").x)
    repeated()
    assert work.x.equal(done(1, "cuda"))


@pytest.mark.gpu
def test_without_memory_nothing_is_captured(stream):
    work = Work("cuda")
    repeated = GraphedCallable(work, "the work", None)
    for _ in range(4):
        repeated()
    assert repeated.graph is None and work.calls == 4 and work.x.equal(done(4, "cuda"))


@pytest.mark.gpu
def test_work_that_looks_at_values_runs_without_a_graph_after_one_warning(stream):
    work, other = Work("cuda", looks=True), Work("cuda")
    graph_pool = GraphPool()
    repeated, neighbour = (
        GraphedCallable(work, "the rollout", graph_pool),
        GraphedCallable(other, "the neighbour", graph_pool),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            repeated(), neighbour()
    (warning,) = [str(entry.message) for entry in caught]
    assert warning.startswith("the rollout cannot be captured as a CUDA graph and runs without one: ")
    # The reason is the look at a value, not the end of the capture that it has spoilt.
    assert "not permitted when stream is capturing" in warning or "synchroniz" in warning.lower()
    assert repeated.graph is None and neighbour.graph is not None
    assert work.x.equal(done(6, "cuda")) and other.x.equal(done(6, "cuda")) and len(work.seen) == 6


class Looking(nn.Module):
    """Looks at a value from the host, as a network of a user's own may."""

    def __init__(self, obs_size, num_logits, looks):
        super().__init__()
        self.linear, self.looks, self.seen = nn.Linear(obs_size, num_logits + 1), looks, []

    def forward(self, obs):
        out = self.linear(obs)
        if self.looks:
            self.seen.append(float(out.detach().sum()))
        return out[..., :-1].contiguous(), out[..., -1]


def trained(device, looks, graphs):
    env = gpu_vecenv.make("tag_gridworld", 16, device, grid=4, autoreset_mode="next_step")
    config = PPOConfig(total_steps=10**6, num_steps=8, num_epochs=2, num_minibatches=2, normalize_returns=True)
    torch.manual_seed(0)
    network = Looking(env.game.layout.obs_size, 5, looks)
    trainer = Trainer(env, config, seed=1, graphs=graphs, policies={"tagger+runner": network})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            trainer.train_iteration()
    state = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
    return state, sorted(str(entry.message) for entry in caught), trainer, network


def test_a_network_that_reads_values_on_the_host_trains_bitwise_equally(device):
    plain, no_warnings, *_ = trained(device, looks=False, graphs=False)
    found, said, trainer, network = trained(device, looks=True, graphs=True)
    assert network.seen and not no_warnings
    assert all(found[name].equal(tensor) for name, tensor in plain.items()) and found.keys() == plain.keys()
    stages = [trainer._graphed_rollout, trainer._graphed_end, *trainer.learners["tagger+runner"].stages.values()]
    if device == "cpu":
        assert not said and all(stage.graph is None for stage in stages)
        return
    assert [text.split(" cannot ")[0] for text in said] == ["backward of tagger+runner", "the rollout"]
    captured = {stage.name for stage in stages if stage.graph is not None}
    assert captured == {"the metrics", "shuffle of tagger+runner", "optimizer_step of tagger+runner"}


@pytest.mark.gpu
def test_what_cannot_be_captured_is_done_in_parts_without_a_warning_of_its_own(stream):
    work, first, second = Work("cuda", looks=True), Work("cuda"), Work("cuda")
    graph_pool = GraphPool()
    stage = GraphedCallable(second, "the second part", graph_pool)

    def whole():
        work(), second()

    def parts():
        first(), stage()

    repeated = GraphedCallable(whole, "the work", graph_pool, parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            repeated()
    assert repeated.graph is None and stage.graph is not None
    assert work.x.equal(done(1, "cuda")) and first.x.equal(done(4, "cuda")) and second.x.equal(done(5, "cuda"))


class OtherFails(World):
    """Of two processes the other one cannot capture."""

    def all_agree(self, any_rank, rank_0):
        return True, rank_0


@pytest.mark.gpu
def test_no_process_replays_a_graph_that_another_could_not_capture(stream):
    work, parts = Work("cuda"), Work("cuda")
    repeated = GraphedCallable(work, "the work", GraphPool(), parts, OtherFails(0, 2))
    repeated()
    with pytest.warns(UserWarning, match="the work cannot be captured .* runs in parts: it cannot be in another"):
        repeated()
    repeated()
    assert repeated.graph is None and work.calls == 2 and work.x.equal(done(1, "cuda"))
    assert parts.calls == 2 and parts.x.equal(done(2, "cuda"))


@pytest.mark.gpu
def test_a_graph_that_was_released_is_captured_anew(stream):
    work = Work("cuda")
    repeated = GraphedCallable(work, "the work", GraphPool())
    for _ in range(3):
        repeated()
    repeated.release()
    assert repeated.graph is None
    for _ in range(3):
        repeated()
    assert repeated.graph is not None and work.calls == 4 and work.x.equal(done(6, "cuda"))


# The clock


def test_a_clock_measures_between_marks(device):
    device = torch.device(device)
    clock, work = StageTimer(device), Work(device)
    for _ in range(3):  # marks are made once and moved
        clock.mark("start")
        work()
        clock.mark("middle")
        for _ in range(50):
            work()
        clock.mark("end")
    work.x.sum().item()  # the device has come past the marks
    first, second, both = (
        clock.seconds(*names) for names in (("start", "middle"), ("middle", "end"), ("start", "end"))
    )
    assert first > 0 and second > 0
    # An event of a GPU tells the time in steps of half a microsecond, of float32 milliseconds.
    assert first + second == pytest.approx(both, abs=2e-6)
    assert clock.seconds("end", "start") < 0


def test_a_mark_that_was_never_made_measures_nothing(device):
    clock = StageTimer(torch.device(device))
    clock.mark("start")
    assert clock.seconds("start", "end") == clock.seconds("end", "start") == clock.seconds("a", "b") == 0.0


@pytest.mark.gpu
def test_marks_inside_of_a_graph_are_made_by_each_replay(stream):
    """Before torch 2.8 they are left out, and measure nothing."""
    device = torch.device("cuda")
    clock, work = StageTimer(device), Work(device)

    def marked():
        clock.mark("start")
        for _ in range(50):
            work()
        clock.mark("end")

    repeated = GraphedCallable(marked, "the work", GraphPool() if device.type == "cuda" else None)
    times = []
    for _ in range(4):
        clock.mark("before")
        repeated()
        clock.mark("after")
        torch.cuda.synchronize()
        times.append((clock.seconds("start", "end"), clock.seconds("before", "after")))
    assert repeated.graph is not None
    external = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)
    for inside, outside in times[1:]:
        assert 0 < inside <= outside if external else inside <= outside
