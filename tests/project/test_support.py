"""The shared test tools: bitwise comparison finds every difference that it must."""

import numpy as np
import pytest
import torch
from support.bitwise import bits, equal_bits

F32 = torch.tensor([0.0, 1.0, torch.nan])


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.clone])
def test_bits_separate_signed_zeros_and_equate_a_nan_with_itself(kind):
    given, negative, payload = kind(F32), kind(F32 * torch.tensor([-1.0, 1.0, 1.0])), kind(F32.clone())
    payload.view(torch.int32 if isinstance(payload, torch.Tensor) else np.int32)[2] += 1
    assert equal_bits(F32, torch.nn.Parameter(F32.clone()))
    assert equal_bits(given, kind(F32)) and given[0] == negative[0]
    assert not equal_bits(given, negative) and not equal_bits(given, payload)
    assert bits(given).tolist() == [0, 0x3F800000, 0x7FC00000] and bits(given).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_bits_keep_the_shape_and_share_no_memory(dtype):
    tensor = torch.ones(3, 2, 4).to(dtype).transpose(0, 2)
    found = bits(tensor)
    assert found.shape == (4, 2, 3) and equal_bits(tensor, tensor.contiguous())
    tensor[0, 0, 0] = 0
    assert found[0, 0, 0] == found[1, 1, 1] != bits(tensor)[0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        F32[:2],
        F32[None],
        F32.double(),
        F32.numpy(),
        F32.view(torch.int32),
        [F32],
        None,
    ],
)
def test_other_shapes_dtypes_and_types_are_not_equal(other):
    assert not equal_bits(F32, other)


def test_mappings_and_sequences_are_compared_by_their_parts():
    given = {"a": F32, "b": [F32[0], (1, "x", None)]}
    assert equal_bits(given, {"b": [F32[0], (1, "x", None)], "a": F32.clone()})
    for other in (
        {"a": F32},
        {**given, "b": [F32[0]]},
        {**given, "b": [F32[0], (1.0, "x", None)]},
        {**given, "a": -F32},
    ):
        assert not equal_bits(given, other)
