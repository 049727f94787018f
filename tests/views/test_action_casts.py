"""Every view casts actions as Gymnasium and NumPy do: equal values give equal results, whatever holds them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv.errors import InvalidActionError
from gpu_vecenv.views.gymnasium_env import GymnasiumEnv, GymnasiumVectorEnv

DISCRETE = [0, 1, 1, 0, 1, 0]
CONTINUOUS = [[0.5], [-1.0], [1.5], [0.25], [-0.125], [0.0]]  # exact in float16 and bfloat16


class Exported:
    """An array that offers DLPack alone, like those of JAX."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def negated(values: torch.Tensor) -> torch.Tensor:
    """The values as a lazy negation: their memory holds the opposite numbers."""
    lazy = torch.complex(torch.zeros(values.shape, dtype=torch.float64), -values.double()).conj().imag
    assert lazy.is_neg() and torch.equal(lazy, values.double())
    return lazy


def strided(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, values + 9], -1)[..., 0]


NUMPY: dict[str, Callable[[Any], Any]] = {
    "list": lambda a: a,
    "tuple": tuple,
    "list of scalars": lambda a: [np.asarray(x) for x in a],
    "float64": np.float64,
    "float16": np.float16,
    "negative strides": lambda a: np.array(a)[::-1].copy()[::-1],
    "every other": lambda a: np.repeat(np.array(a), 2, axis=0)[::2],
    "big-endian": lambda a: np.array(a).astype(np.array(a).dtype.newbyteorder(">")),
    "read-only": lambda a: np.array(np.broadcast_to(np.array(a), np.shape(a))),
}
INTEGERS = {name: getattr(np, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint64")}
TORCH: dict[str, Callable[[Any], Any]] = {
    **{
        str(dtype): lambda a, dtype=dtype: torch.tensor(a, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    },
    "strided": lambda a: strided(torch.tensor(a)),
    "lazily negated": lambda a: negated(torch.tensor(a)),
    "dlpack": lambda a: Exported(torch.tensor(a)),
}
TORCH_INTEGERS = {
    str(dtype): lambda a, dtype=dtype: torch.tensor(a, dtype=dtype)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
}
WAYS = {**NUMPY, **TORCH}
ALL = [("cartpole", name, way) for name, way in (WAYS | INTEGERS | TORCH_INTEGERS).items()]
ALL += [("pendulum", name, way) for name, way in WAYS.items()]
CASES = [pytest.param(game, way, id=f"{game} {name}") for game, name, way in ALL]


def actions_of(game: str) -> list[Any]:
    return DISCRETE if game == "cartpole" else CONTINUOUS


def expected(game: str) -> torch.Tensor:
    """Observations after the step, (6, elements)."""
    env = gpu_vecenv.make(game, 6, "cpu", agents_as_envs=True)
    env.reset(seed=1)
    return env.step(torch.tensor(actions_of(game)))[0]


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize(("game", "way"), CASES)
def test_the_vector_env_casts(game, way, output):
    env = GymnasiumVectorEnv(game, 6, "cpu", output=output)
    env.reset(seed=1)
    obs = env.step(way(actions_of(game)))[0]
    assert equal_bits(torch.as_tensor(obs), expected(game))


@pytest.mark.parametrize(("game", "way"), CASES)
def test_the_single_env_casts(game, way):
    env = GymnasiumEnv(game)
    env.reset(seed=1)
    obs = env.step(way([actions_of(game)[0]])[0] if not isinstance(way([0]), Exported) else actions_of(game)[0])[0]
    assert equal_bits(torch.as_tensor(obs), expected(game)[0])


@pytest.mark.parametrize(("game", "way"), CASES)
def test_the_dictionaries_of_agents_cast(game, way):
    batched = gpu_vecenv.batched_parallel_env(game, num_envs=6, device="cpu")
    batched.reset(seed=1)
    obs = batched.step({"agent_0": way(actions_of(game))})[0]["agent_0"]
    assert equal_bits(obs, expected(game))
    parallel = gpu_vecenv.parallel_env(game, "cpu")
    parallel.reset(seed=1)
    action = way(actions_of(game))
    action = actions_of(game)[0] if isinstance(action, Exported) else action[0]
    assert equal_bits(parallel.step({"agent_0": action})[0]["agent_0"], expected(game)[0])


LOST = {
    "a fraction": (lambda: [0, 0.5, 0, 0, 0, 0], InvalidActionError, r"0\.5 .*expected an integer in \[0, 1\]"),
    "nan": (lambda: np.full(6, np.nan), InvalidActionError, "nan.*expected an integer"),
    "more than 64 bits": (lambda: [2**70] + [0] * 5, InvalidActionError, "64 bits"),
    "beyond int64": (lambda: np.full(6, 2**63, np.uint64), InvalidActionError, "9223372036854775808"),
    "bool": (lambda: np.ones(6, bool), TypeError, "dtype bool; expected integers"),
    "complex": (lambda: np.ones(6, complex), TypeError, "complex"),
    "text": (lambda: ["0"] * 6, TypeError, "dtype"),
    "a scalar": (lambda: 1, ValueError, r"shape \(\); expected \(6,\)"),
    "too few": (lambda: [0] * 5, ValueError, r"shape \(5,\); expected \(6,\)"),
    "ragged": (lambda: [0, [1, 2], 0, 0, 0, 0], ValueError, r"expected shape \(6,\)"),
    "nothing": (lambda: None, TypeError, "dtype object"),
    "bool tensor": (lambda: torch.ones(6, dtype=torch.bool), TypeError, "dtype"),
    "complex tensor": (lambda: torch.ones(6, dtype=torch.complex64), TypeError, "dtype"),
    "sparse tensor": (lambda: torch.ones(6).to_sparse(), (TypeError, ValueError), "sparse"),
    "gradient": (lambda: torch.ones(6, requires_grad=True), TypeError, "requires_grad"),
}


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize(("given", "error", "words"), LOST.values(), ids=LOST)
def test_what_loses_the_value_is_refused_and_changes_nothing(given, error, words, output):
    env = GymnasiumVectorEnv("cartpole", 6, "cpu", output=output)
    env.reset(seed=1)
    before = env.vec_env.state_dict()
    with pytest.raises(error, match=words):
        env.step(given())
    assert equal_bits(env.vec_env.state_dict(), before)


def test_a_fraction_on_the_device_is_an_invalid_action(device):
    """Tensors are not read on the host: the engine truncates the environment."""
    env = GymnasiumVectorEnv("cartpole", 4, device)
    env.reset(seed=1)
    _, rewards, _, truncations, info = env.step(torch.tensor([0, 0.5, 1, torch.nan], device=device))
    assert rewards.isnan().tolist() == truncations.tolist() == info["fault"].tolist() == [False, True, False, True]


def test_a_vec_env_takes_a_lazy_negation():
    env = gpu_vecenv.make("pendulum", 6, "cpu", agents_as_envs=True)
    env.reset(seed=1)
    lazy = torch.complex(torch.zeros(6, 1), -torch.tensor(CONTINUOUS)).conj().imag
    assert lazy.dtype is torch.float32 and lazy.is_neg()
    assert equal_bits(env.step(lazy)[0], expected("pendulum"))
