"""What several processes add up: which numbers are in which collective, without processes."""

from dataclasses import dataclass, field

import torch

from gpu_vecenv.train.distributed import World
from gpu_vecenv.train.reductions import GradientBucket, SummedTensors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Twin(World):
    """One of two processes with equal numbers; keeps a copy of what is reduced."""

    size: int = 2
    reduced: list = field(default_factory=list)

    def all_reduce_mean(self, tensor):
        self.reduced.append(tensor.clone())

    def all_reduce_sum(self, tensor):
        self.reduced.append(tensor.clone())
        tensor *= 2


def test_a_minibatch_of_all_learners_is_one_collective_of_those_that_have_it():
    world = Twin()
    bucket = GradientBucket({"few": 3, "most": 70, "also": 1}, {"few": 1, "most": 6, "also": 4}, world, CPU)
    assert bucket.num_updates == 6
    for number, part in enumerate(bucket.parts.values(), 1):
        assert part.data_ptr() % 256 == bucket.parts["most"].data_ptr() % 256  # none begins in another's cache line
        part.fill_(number)
    sums = []
    for k in range(bucket.num_updates):
        bucket.average(k)
        sums.append(world.reduced[k].sum().item())
    assert {name: part.tolist() for name, part in bucket.parts.items()} == {
        "few": [1] * 3,
        "most": [2] * 70,
        "also": [3],
    }
    assert sums == [3 + 140 + 3] + 3 * [140 + 3] + 2 * [140]
    assert [bucket.names(k) for k in (0, 1, 5)] == [["few", "most", "also"], ["most", "also"], ["most"]]


def test_tensors_are_summed_in_place_by_one_collective():
    for count in (1, 3):
        world, tensors = Twin(), [torch.full((k + 1, 2), k + 1.0, dtype=torch.float64) for k in range(count)]
        SummedTensors(tensors, world)()
        (reduced,) = world.reduced
        assert len(reduced) == sum(x.numel() for x in tensors)
        assert [x.unique().tolist() for x in tensors] == [[2 * (k + 1.0)] for k in range(count)]


def test_one_process_reduces_nothing():
    world, tensor = Twin(size=1), torch.ones(2, dtype=torch.float64)
    SummedTensors([tensor, tensor], world)()
    assert not world.reduced and tensor.tolist() == [1, 1]
