"""Randomised parameters: their ranges, what forbids them, and derived constants as expressions of them.

To find out what a parameter decides, the declaration is evaluated with a ``Traced`` number in its place. A Traced
records arithmetic and nothing else: whatever needs its value raises.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_vecenv.declare.config import FLOAT32_MAX, check_fields
from gpu_vecenv.declare.field import Field, f32
from gpu_vecenv.declare.spaces import ActionLayout, ObservationLayout
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, nearest

if TYPE_CHECKING:
    from gpu_vecenv.declare.env import Env

DERIVED = "the derived constant"
Range = tuple[str, float, float]  # parameter, low, high


@dataclass(frozen=True)
class RandomizedParameter:
    """A configuration value that each environment draws anew at each reset, uniformly in [low, high).

    Attributes:
        name: Its name, which is also that of the state field with its values.
        low: float32 number.
        high: float32 number; if it equals ``low``, that is the only value.
        draw: Index of its draws: its position among all values of the configuration, so that what is drawn does not
            depend on which others are randomised.
    """

    name: str
    low: float
    high: float
    draw: int

    @property
    def last(self) -> float:
        """The largest value that is drawn, float32."""
        return float(np.nextafter(f32.type(self.high), f32.type(self.low)))


class Untraceable(Exception):
    """A declaration needs the value of a randomised parameter."""


class Traced:
    """Stands for a number that differs between environments: a C++ expression of type double.

    Addition, subtraction, multiplication, division, negation, ``abs`` and ``numpy.sqrt`` give the same bits in Python
    and on every device. All other uses raise Untraceable.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Traced:
        function = UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__" or kwargs:
            raise Untraceable(f"numpy.{ufunc.__name__} of it cannot be computed for each environment")
        return function(*map(_traced, inputs))

    def _refuse(self, *_: Any) -> Any:
        raise Untraceable(
            "it is converted, compared, rounded or raised to a power; only + - * /, abs and numpy.sqrt are computed "
            "for each environment"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = __round__ = __trunc__ = _refuse
    __floor__ = __ceil__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __array__ = _refuse
    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = _refuse

    def __add__(self, other: Any) -> Traced:
        return _binary("+", self, other)

    def __radd__(self, other: Any) -> Traced:
        return _binary("+", other, self)

    def __sub__(self, other: Any) -> Traced:
        return _binary("-", self, other)

    def __rsub__(self, other: Any) -> Traced:
        return _binary("-", other, self)

    def __mul__(self, other: Any) -> Traced:
        return _binary("*", self, other)

    def __rmul__(self, other: Any) -> Traced:
        return _binary("*", other, self)

    def __truediv__(self, other: Any) -> Traced:
        return _binary("/", self, other)

    def __rtruediv__(self, other: Any) -> Traced:
        return _binary("/", other, self)

    def __neg__(self) -> Traced:
        return Traced(f"(-{self.expression})")

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        return Traced(f"randomized::abs({self.expression})")


def _traced(value: Any) -> Traced:
    """A number as a Traced."""
    if isinstance(value, Traced):
        return value
    # float32 is not among them: NumPy computes in float32 where one meets a Python float.
    if not isinstance(value, int | float | np.integer) or (not isinstance(value, float) and abs(int(value)) > 2**53):
        raise Untraceable(f"arithmetic with {value!r:.64} ({type(value).__name__}) is not that of Python floats")
    if not math.isfinite(value):
        raise Untraceable(f"arithmetic with {value} cannot be computed for each environment")
    return Traced(f"({float(value).hex()})")


def _binary(operator: str, one: Any, other: Any) -> Traced:
    return Traced(f"({_traced(one).expression} {operator} {_traced(other).expression})")


UFUNCS: dict[str, Callable[..., Traced]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a: -a,
    "positive": lambda a: a,
    "absolute": abs,
    "sqrt": lambda a: Traced(f"randomized::sqrt({a.expression})"),
}


def with_ranges(game: Env, ranges: Sequence[Sequence[float]]) -> Env:
    """The game that draws its randomised parameters from other ranges; those that are equal in float32 stay exact.

    Args:
        game: The game.
        ranges: Of each parameter in ``game.layout.randomized`` (low, high, …), as the engine's tensor of ranges has it.
    """
    changed = {
        own.name: (low, high)
        for own, (low, high, *_) in zip(game.layout.randomized, ranges, strict=True)
        if (low, high) != (own.low, own.high)
    }
    randomize = tuple((name, *changed.get(name, (low, high))) for name, low, high in game.randomize)
    return dataclasses.replace(game, randomize=randomize) if changed else game


def checked_ranges(key: str, given: Any) -> tuple[Range, ...]:
    """The value of ``Env.randomize`` in its canonical form, sorted by name.

    Args:
        key: Its name in messages.
        given: A mapping, parameter -> (low, high), or the canonical form itself.

    Raises:
        ConfigError: It is neither, a bound is not a finite float32, or a range is empty.
    """
    expected = 'expected a mapping, parameter -> (low, high), as in {"gravity": (8, 12)}'
    triples: list[tuple[Any, ...]]
    if isinstance(given, Mapping):
        triples = [
            (name, *bounds) if isinstance(bounds, tuple | list) else (name, bounds) for name, bounds in given.items()
        ]
    elif isinstance(given, tuple | list) and all(isinstance(triple, tuple | list) for triple in given):
        triples = [tuple(triple) for triple in given]
    else:
        raise ConfigError(f"{key} is {given!r:.200} ({type(given).__name__}); {expected}")
    ranges = {}
    for triple in triples:
        name, *bounds = triple or (None,)
        if type(name) is not str or name in ranges:
            raise ConfigError(f"{key} has the name {name!r:.200}; {expected}, each parameter once")
        bounds = [bound.item() if isinstance(bound, np.generic) else bound for bound in bounds]
        numbers = len(bounds) == 2 and all(
            type(bound) in (int, float) and abs(bound) <= FLOAT32_MAX for bound in bounds
        )
        if not numbers or bounds[0] > bounds[1]:
            raise ConfigError(
                f"{key}: {name} is {tuple(bounds)!r:.200}; expected (low, high), finite float32, low <= high"
            )
        if float(f32.type(bounds[1])) - float(f32.type(bounds[0])) > FLOAT32_MAX:
            raise ConfigError(f"{key}: {name} is {tuple(bounds)}; expected high - low to be a finite float32")
        ranges[name] = (name, float(bounds[0]), float(bounds[1]))
    return tuple(ranges[name] for name in sorted(ranges))


def randomizable(game: Env) -> tuple[str, ...]:
    """Names of the parameters of a configured game that ``randomize`` may name."""
    return tuple(name for name in _positions(game) if _obstacle(game, name) is None)


def resolve_randomized(game: Env) -> tuple[tuple[RandomizedParameter, ...], dict[str, str]]:
    """The randomised parameters of a game, and the derived constants that follow from them.

    Returns:
        The parameters in the order of the configuration; name of a derived constant -> its C++ expression in double.

    Raises:
        ConfigError: A name is unknown, the parameter decides something that all environments share, or its range
            contradicts the configuration.
    """
    if not game.randomize:
        return (), {}
    key, known = f"{type(game).__name__}.randomize", _positions(game)
    ranges = {name: (low, high) for name, low, high in game.randomize}
    for name in ranges:
        if obstacle := _obstacle(game, name):
            names = ", ".join(randomizable(game)) or "none"
            raise ConfigError(f"{key}: {name!r} cannot be randomised: {obstacle}; expected one of: {names}")
    _check_corners(game, key, ranges)
    parameters = []
    for name, position in known.items():
        if name in ranges:
            low, high = (float(f32.type(bound)) for bound in ranges[name])
            parameters.append(RandomizedParameter(name, low, high, position))
    values = {name: getattr(_traced_game(game, *ranges), name) for name in game.derived}
    return tuple(parameters), {name: value.expression for name, value in values.items() if isinstance(value, Traced)}


def _positions(game: Env) -> dict[str, int]:
    """Name -> position in the configuration, of the values that are floats."""
    names = enumerate(field.name for field in game.own_fields())
    return {name: position for position, name in names if type(getattr(game, name)) is float}


def _obstacle(game: Env, name: str) -> str | None:
    """Why a parameter cannot be randomised; None if it can."""
    names = [field.name for field in game.own_fields()]
    if name not in names:
        return f"there is no such parameter; {nearest(name, names)}"
    if name not in _positions(game):
        return f"{getattr(game, name)!r} is not a float"
    if game.kernels:
        own = ", ".join(kernel.name for kernel in game.kernels)
        return f"{type(game).__name__} has kernels of its own, {own}, which belong to no environment"
    if name in [field.name for field in game.state]:
        return "a field of the state has its name, where its values would be"
    try:
        Field(name, f32)
    except EnvDefinitionError:
        return "its name is a word of C++, which the field with its values cannot have"
    traced = _traced_game(game, name)
    for what, evaluate in _shared_facts(game):
        try:
            evaluate(traced)
        except Exception as error:  # whatever the game's code raises: with the plain number it raises nothing
            return f"it decides {what} ({error})" if what.startswith(DERIVED) else f"it decides {what}"
    return None


def _shared_facts(game: Env) -> Iterator[tuple[str, Callable[[Env], object]]]:
    """What all environments of a game have in common: a name, and a function that raises if it depends on a Traced."""
    title, roles = type(game).__name__, list(game.roles)
    yield "the roles", lambda traced: _check_equal(dict(traced.roles), dict(game.roles))
    yield "the number of agents", partial(_check_attribute, game, "num_agents")
    yield "the observation space", lambda traced: ObservationLayout.of(title, roles, traced.observation_space)
    yield "the action space", lambda traced: ActionLayout.of(title, roles, traced.action_space)
    for field in game.state:
        for size in field.shape:
            if isinstance(size, str):
                yield f"the size {size} of the state field {field.name}", partial(_check_attribute, game, size)
    if shared := ", ".join(field.name for field in game.state if field.shared):
        yield (
            f"values that all environments share: {shared}",
            lambda traced: [*map(_check_array, traced.arrays().values())],
        )
    for name in game.derived:
        yield f"{DERIVED} {name}", partial(_check_derived, game, name)


def _check_equal(value: object, expected: object) -> None:
    if value != expected:  # a Traced in it raises
        raise Untraceable(f"{value!r:.64} would be {expected!r:.64}")


def _check_attribute(game: Env, name: str, traced: Env) -> None:
    _check_equal(getattr(traced, name), getattr(game, name))


def _check_array(array: Any) -> None:
    if np.asarray(array).dtype.hasobject:
        raise Untraceable("it is among the values")


def _check_derived(game: Env, name: str, traced: Env) -> None:
    if not isinstance(getattr(traced, name), Traced):
        _check_attribute(game, name, traced)
    elif not isinstance(getattr(game, name), float):
        raise Untraceable(f"{getattr(game, name)!r:.64} is not a float")


def _traced_game(game: Env, *names: str) -> Env:
    return with_values(game, {name: Traced(f"(double)randomized::value_{name}()") for name in names})


def with_values(game: Env, values: Mapping[str, Any]) -> Env:
    """A copy of a configured game with other values, unchecked, and nothing randomised."""
    kind = type(game)
    copy = object.__new__(kind)
    own = {
        name: value
        for name, value in vars(game).items()
        if not isinstance(inspect.getattr_static(kind, name, None), cached_property)
    }
    vars(copy).update({**own, **values, "randomize": ()})
    return copy


def _check_corners(game: Env, key: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Check the ends of all ranges as a configuration's values, each together with those of each other parameter."""
    least = {name: low for name, (low, _) in ranges.items()}
    pairs: list[tuple[str, ...]] = [*itertools.combinations(ranges, 2)] or [(name,) for name in ranges]
    for names in pairs:
        for bounds in itertools.product(*(ranges[name] for name in names)):
            corner = with_values(game, {**least, **dict(zip(names, bounds, strict=True))})
            try:
                check_fields(corner)
                corner.validate()
            except ValueError as error:
                values = " and ".join(f"{name} = {bound}" for name, bound in zip(names, bounds, strict=True))
                raise ConfigError(f"{key}: with {values}, {error}") from error
