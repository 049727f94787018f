"""Curricula: what changes in the course of a training, as a function of its progress or of a metric.

The values are written between iterations, into tensors that kernels and CUDA graphs read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from gpu_vecenv.declare.arguments import check_flag
from gpu_vecenv.declare.config import with_known_options
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.layout import FieldLayout
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.learner import Learner
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.level_replay import LevelReplay
from gpu_vecenv.train.normalizers import ValueNorm
from gpu_vecenv.train.populations import members_of_metric
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.user_functions import naming, qualified_name

# A number, or what numpy.asarray makes an array of numbers of, as a function of a number.
Schedule: TypeAlias = Callable[[float], Any]
KINDS = "shared", "initial_states", "randomize", "config"  # of what follows schedules


@dataclass(frozen=True)
class PiecewiseLinear:
    """Numbers, or arrays of one shape, linear between points, constant before the first and after the last.

    Args:
        points: (x, value) each, with ascending x.

    Raises:
        ConfigError: There are no points, x does not ascend, or values are not finite numbers of one shape.

    Example:
        ``PiecewiseLinear([(0, 0.5), (0.8, 2)])`` is 0.5 at 0, 1.25 at 0.4, and 2 from 0.8 on.
    """

    points: Sequence[tuple[float, Any]]

    def __post_init__(self) -> None:
        expected = "expected pairs (x, value), x ascending, values finite numbers of one shape"
        try:
            pairs = tuple((float(x), np.asarray(value, dtype=np.float64)) for x, value in self.points)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"points are {self.points!r:.200}; {expected}: {error}") from None
        finite = all(math.isfinite(x) and bool(np.isfinite(value).all()) for x, value in pairs)
        if not pairs or not finite or len({value.shape for _, value in pairs}) > 1:
            raise ConfigError(f"points are {self.points!r:.200}; {expected}")
        if any(x >= y for (x, _), (y, _) in itertools.pairwise(pairs)):
            raise ConfigError(f"points are {self.points!r:.200}; {expected}")
        object.__setattr__(self, "points", tuple((x, value.tolist()) for x, value in pairs))

    def __call__(self, x: float) -> Any:
        """The value at x."""
        (first, value), *_ = self.points
        if x <= first:
            return np.asarray(value)
        for (begin, start), (end, stop) in itertools.pairwise(self.points):
            if x < end:
                low, high = np.asarray(start), np.asarray(stop)
                return low + (high - low) * ((x - begin) / (end - begin))
        return np.asarray(self.points[-1][1])


@dataclass(frozen=True)
class ByMetric:
    """A value that follows a metric of the trainer, such as "return_tagger".

    Args:
        metric: The name of a mean over episodes, "return_<role>", "episode_length" or "terminated_fraction", or of a
            metric of a policy, such as "entropy_tagger".
        schedule: The value, as a function of the metric.
        start: Stands for the metric until it is finite for the first time.
        largest: Follow the largest value that the metric has had so far, ``start`` included, and not its latest: what
            was reached stays.
    """

    metric: str
    schedule: Schedule
    start: float = field(kw_only=True)
    largest: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_flag("largest", self.largest)
        if type(self.start) not in (int, float) or not math.isfinite(self.start):
            raise ConfigError(f"start is {self.start!r}; expected a finite number")
        if not isinstance(self.metric, str):
            raise TypeError(f"metric is a {type(self.metric).__name__}; expected the name of a metric")
        _check_callable("schedule", self.schedule)


@with_known_options
@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """What changes in the course of a training: name -> a function of the run's progress in [0, 1), or a ``ByMetric``.

    A function of progress, such as a ``PiecewiseLinear``, is called before each iteration with the share of the run's
    iterations that are done. A ``ByMetric`` follows what the trainer reads. Schedules must be functions of their
    argument alone: a resumed run calls them again.

    Args:
        shared: Fields of the state that all environments share. The value is an array of the field's shape, or a number
            for all of its items; of fields of integers it is rounded to the nearest.
        initial_states: Fields that ``initial_states`` of the environment names: an array like the one given there,
            (number of states, *field shape), or a number for all of its items. It counts from each environment's next
            reset on.
        randomize: Parameters that ``randomize`` of the environment names: (low, high), within the range that is given
            there. It counts from each environment's next reset on.
        config: Options of the policies: "learning_rate", of PPO also "clip", "entropy_coefficient", "gae_lambda" and,
            without ``normalize_returns``, "gamma". "clip" is that of all policies which have it, "clip_tagger" that of
            the policy "tagger". It replaces the schedule that the configuration has, up to ``final_<name>``.
        levels: Draw the rows of the environment's ``initial_states`` by what there is to learn from each; None: with
            equal probabilities. Not beside ``initial_states``, and in one process only.

    Raises:
        TypeError: A value is no function.
        ConfigError: There are both ``levels`` and ``initial_states``.

    Example:
        ``Curriculum(config={"entropy_coefficient": PiecewiseLinear([(0, 0.05), (0.5, 0.001)])})``
    """

    shared: Mapping[str, Schedule | ByMetric] = field(default_factory=dict)
    initial_states: Mapping[str, Schedule | ByMetric] = field(default_factory=dict)
    randomize: Mapping[str, Schedule | ByMetric] = field(default_factory=dict)
    config: Mapping[str, Schedule | ByMetric] = field(default_factory=dict)
    levels: LevelReplay | None = None

    def __post_init__(self) -> None:
        for kind, targets in self.kinds():
            if not isinstance(targets, Mapping):
                raise TypeError(f"{kind} is a {type(targets).__name__}; expected a mapping, name -> schedule")
            for name, schedule in targets.items():
                if not isinstance(schedule, ByMetric):
                    _check_callable(f"{kind}[{name!r}]", schedule)
        if not isinstance(self.levels, LevelReplay | None):
            raise TypeError(f"levels is a {type(self.levels).__name__}; expected a LevelReplay or None")
        if self.levels is not None and self.initial_states:
            raise ConfigError(
                "levels and initial_states are both given; expected one of them: both write the same rows"
            )

    @classmethod
    def of_points(cls, points: Mapping[str, Mapping[str, Any]]) -> Curriculum:
        """A curriculum of linear pieces, as ``--schedules`` and ``preset_schedules`` of a game have it.

        Args:
            points: By argument of ``Curriculum`` and name the points of a ``PiecewiseLinear``, such as
                ``{"config": {"clip": [[0, 0.2], [1, 0.1]]}}``.

        Raises:
            ConfigError: Another argument than those of schedules, or points that are not a schedule's.
        """
        if unknown := set(points) - set(KINDS):
            raise ConfigError(f"schedules has {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        of_kinds: dict[str, Any] = {
            kind: {name: PiecewiseLinear(given) for name, given in targets.items()} for kind, targets in points.items()
        }
        return cls(**of_kinds)

    def kinds(self) -> Iterator[tuple[str, Mapping[str, Schedule | ByMetric]]]:
        """The names of the arguments that are schedules, and the arguments."""
        yield from ((name, getattr(self, name)) for name in KINDS)

    def description(self) -> dict[str, dict[str, Any]]:
        """JSON values that tell curricula apart; functions by their names."""
        found = {kind: {name: _described(targets[name]) for name in sorted(targets)} for kind, targets in self.kinds()}
        return found if self.levels is None else {**found, "levels": self.levels.description()}


def preset_curriculum(game: Env) -> Curriculum | None:
    """What a game's presets change in the course of a training; None where that is nothing."""
    return Curriculum.of_points(game.preset_schedules) if game.preset_schedules else None


@dataclass(frozen=True)
class _Target:
    """What a schedule changes."""

    kind: str  # the argument of Curriculum
    name: str
    schedule: Schedule | ByMetric
    check: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]  # the value in the form that is written, or raises
    write: Callable[[np.ndarray[Any, Any]], None]


class Schedules:
    """A curriculum of one trainer: writes the values of an iteration, and follows metrics.

    Attributes:
        readings: (n,) float64 on the CPU, of the n values that follow metrics: what each metric is taken to be.

    Args:
        curriculum: The curriculum.
        env: The trainer's environment.
        learners: By policy.
        discounts: "gamma" and "gae_lambda": those of each agent, (num_agents,) float32, which the advantages have.

    Raises:
        ConfigError: There is no such field, parameter, option or metric, it cannot change during a run, or the values
            at the beginning do not fit. Nothing has changed.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        env: VecEnv,
        learners: Mapping[str, Learner[Any]],
        discounts: Mapping[str, torch.Tensor],
    ) -> None:
        self.curriculum, self._env, self._learners, self._discounts = curriculum, env, learners, discounts
        makers: dict[str, Callable[[str, Schedule | ByMetric], Iterator[_Target]]] = {
            "shared": self._shared,
            "initial_states": self._initial_states,
            "randomize": self._randomized,
            "config": self._options,
        }
        self._targets = [
            target
            for kind, schedules in curriculum.kinds()
            for name, schedule in schedules.items()
            for target in makers[kind](name, schedule)
        ]
        names = [(target.kind, target.name) for target in self._targets]
        if twice := {name for kind, name in names if names.count((kind, name)) > 1}:
            raise ConfigError(
                f"curriculum: config has {', '.join(sorted(twice))} twice; expected one schedule for each"
            )
        metrics = [f"{metric}_{name}" for name, one in learners.items() for metric in one.metric_names()]
        metrics += [*(f"return_{role}" for role in env.layout.roles), "episode_length", "terminated_fraction"]
        self._followed = [t.schedule for t in self._targets if isinstance(t.schedule, ByMetric)]
        for one in self._followed:
            if one.metric not in metrics:
                raise ConfigError(
                    f"curriculum: there is no metric {one.metric!r}; expected one of {', '.join(metrics)}"
                )
        self.readings = torch.tensor([one.start for one in self._followed], dtype=torch.float64)
        self._written: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self._values(0.0)

    def apply(self, progress: float) -> bool:
        """Write what has changed; whether observations may have changed with it. No device synchronisation.

        Args:
            progress: The share of the run's iterations that are done.

        Raises:
            ConfigError: A value does not fit. Nothing has changed.
        """
        observed = False
        for target, value in zip(self._targets, self._values(progress), strict=True):
            before = self._written.get((target.kind, target.name))
            if before is None or not np.array_equal(before, value):
                target.write(value)
                self._written[target.kind, target.name] = value
                observed |= target.kind == "shared"
        return observed

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Follow the metrics of a row; means that are not finite leave the value as it is."""
        for k, one in enumerate(self._followed):
            value = float(metrics[one.metric])
            if math.isfinite(value):
                self.readings[k] = max(value, self.readings[k].item()) if one.largest else value

    def restored(self) -> None:
        """The tensors were written by a load: nothing that was written before counts."""
        self._written.clear()

    def rates(self) -> dict[str, float]:
        """The values of options as they were last written, by the names of metrics: "learning_rate_tagger"."""
        return {name: float(value) for (kind, name), value in self._written.items() if kind == "config"}

    def metrics(self) -> dict[str, float]:
        """For the log: all values that are one number, and the ends of ranges."""
        found = dict[str, float]()
        for (kind, name), value in self._written.items():
            if kind == "randomize":
                found |= {f"curriculum_{name}_{end}": float(x) for end, x in zip(("low", "high"), value, strict=True)}
            elif value.size == 1 and kind != "initial_states":
                found[f"curriculum_{name}"] = float(value.item())
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """What the next iterations depend on, beside shared fields: live tensors by name."""
        tensors = {"readings": self.readings} if self._followed else {}
        if self.curriculum.randomize:
            tensors["ranges"] = self._env.data["engine_ranges"]
        for name in self.curriculum.initial_states:
            tensors[f"initial_{name}"] = self._env.data[f"initial_{name}"]
        return tensors

    def _values(self, progress: float) -> list[np.ndarray[Any, Any]]:
        """Of all targets, checked."""
        readings = iter(self.readings.tolist())
        values = []
        for target in self._targets:
            schedule, x = target.schedule, progress
            if isinstance(schedule, ByMetric):
                schedule, x = schedule.schedule, next(readings)
            with naming(f"curriculum: the schedule of {target.name}"):
                given = schedule(x)
            given = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
            try:
                value = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError, OverflowError):
                value = np.asarray(math.nan)
            if not np.isfinite(value).all():
                raise ConfigError(
                    f"curriculum: the schedule of {target.name} gives {given!r:.80} at {x}; expected finite numbers"
                )
            try:
                values.append(target.check(value))
            except ValueError as error:
                raise ConfigError(f"curriculum: {target.name} at {x}: {error}") from None
        return values

    def _shared(self, name: str, schedule: Schedule | ByMetric) -> Iterator[_Target]:
        fields = {field.name: field for field in self._env.layout.fields if field.shared}
        if name not in fields:
            raise ConfigError(f"curriculum: shared has {name!r}; expected some of the shared fields {sorted(fields)}")
        check = partial(_of_field, fields[name], fields[name].shape)
        yield _Target("shared", name, schedule, check, partial(_copy, self._env.state[name]))

    def _initial_states(self, name: str, schedule: Schedule | ByMetric) -> Iterator[_Target]:
        given = self._env.build.initial_fields
        if name not in given:
            raise ConfigError(
                f"curriculum: initial_states has {name!r}; expected some of {sorted(given)}, the fields of the states "
                "that the environment was made with"
            )
        (layout,) = (field for field in self._env.layout.fields if field.name == name)
        tensor = self._env.data[f"initial_{name}"]
        check = partial(_of_field, layout, (len(tensor), *layout.shape))
        yield _Target("initial_states", name, schedule, check, partial(_copy, tensor))

    def _randomized(self, name: str, schedule: Schedule | ByMetric) -> Iterator[_Target]:
        parameters = {parameter.name: (k, parameter) for k, parameter in enumerate(self._env.layout.randomized)}
        if name not in parameters:
            expected = f"some of {sorted(parameters)}" if parameters else "one that was made with randomize="
            raise ConfigError(
                f"curriculum: randomize has {name!r}, which the environment does not randomise; expected {expected}"
            )
        row, widest = parameters[name]

        def check(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            if value.shape != (2,) or not widest.low <= value[0] <= value[1] <= widest.high:
                raise ConfigError(
                    f"the range is {value.tolist()}; expected (low, high) with {widest.low} <= low <= high <= "
                    f"{widest.high}, within the range that the environment was made with"
                )
            return value.astype(np.float32)

        def write(value: np.ndarray[Any, Any]) -> None:
            own = dataclasses.replace(widest, low=float(value[0]), high=float(value[1]))
            _copy(self._env.data["engine_ranges"][row], np.array([own.low, own.high, own.last], np.float32))

        yield _Target("randomize", name, schedule, check, write)

    def _options(self, name: str, schedule: Schedule | ByMetric) -> Iterator[_Target]:
        writers = {
            f"{option}_{policy}": (option, learner, write)
            for policy, learner in self._learners.items()
            for option, write in self._writers(learner).items()
        }
        members = members_of_metric(name, writers)  # options are named as metrics are
        own = [full for full, (option, *_) in writers.items() if name in (full, option) or full in members]
        options = sorted({option for option, *_ in writers.values()})
        if not own:
            raise ConfigError(
                f"curriculum: config has {name!r}; expected some of {options}, or one of {sorted(writers)}: no other "
                "option can change during a run"
            )
        fixed = [policy for policy in self._learners if f"{name}_{policy}" not in writers]
        if fixed and name in options:
            raise ConfigError(
                f"curriculum: config has {name!r}, which cannot change in {', '.join(fixed)}; expected other policies "
                f"by their names: {sorted(own)}"
            )
        for full in own:
            option, learner, write = writers[full]
            yield _Target("config", full, schedule, partial(_of_option, learner.config, option), write)

    def _writers(self, learner: Learner[Any]) -> dict[str, Callable[[np.ndarray[Any, Any]], None]]:
        """The options of a policy that can change, each with what writes it."""
        config, policy = learner.config, learner.policy
        found: dict[str, Callable[[np.ndarray[Any, Any]], None]]
        found = {option: partial(_fill, learner.schedules, row) for row, option in enumerate(config.scheduled)}
        if not isinstance(config, PPOConfig):
            return found
        if config.desired_kl is not None:
            del found["learning_rate"]  # it follows approx_kl
        names = ["gae_lambda"]
        if learner.envs.num_envs < self._env.num_envs:  # discounts are those of an agent in all environments
            names = []
        elif policy.return_normalizer is None or isinstance(policy.return_normalizer, ValueNorm):
            names.append("gamma")  # otherwise the normalizer has it
        return found | {option: partial(_fill, self._discounts[option], policy.view.agents) for option in names}


def _fill(tensor: torch.Tensor, where: Any, value: np.ndarray[Any, Any]) -> None:
    tensor[where] = float(value)


def _of_option(config: LearnerConfig, option: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if value.ndim:
        raise ConfigError(f"the value is {value.tolist()}; expected a number")
    changes: dict[str, Any] = {option: float(value)}
    dataclasses.replace(config, **changes)  # raises
    return value


def _copy(tensor: torch.Tensor, value: np.ndarray[Any, Any]) -> None:
    tensor.copy_(torch.from_numpy(value.copy()).view_as(tensor), non_blocking=True)


def _of_field(layout: FieldLayout, shape: tuple[int, ...], value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A value in a field's dtype and this shape."""
    if value.ndim and value.shape != shape:
        raise ConfigError(f"the shape is {value.shape}; expected {shape}, or a number")
    if layout.dtype.kind in "iu":
        value = np.rint(value)
        limits = np.iinfo(layout.dtype)
        if value.min() < limits.min or value.max() > limits.max:
            raise ConfigError(f"the values do not fit in {layout.dtype}")
    elif layout.dtype.kind == "f" and np.abs(value).max(initial=0) > np.finfo(layout.dtype).max:
        raise ConfigError(f"the values do not fit in {layout.dtype}")
    return np.broadcast_to(value, shape).astype(layout.dtype)


def _check_callable(what: str, given: object) -> None:
    if not callable(given):
        raise TypeError(f"{what} is a {type(given).__name__}; expected a function of a number, or a ByMetric")


def _described(schedule: Schedule | ByMetric) -> Any:
    if isinstance(schedule, ByMetric):
        fields = {"metric": schedule.metric, "start": schedule.start, "largest": schedule.largest}
        return {**fields, "schedule": _described(schedule.schedule)}
    return list(schedule.points) if isinstance(schedule, PiecewiseLinear) else qualified_name(schedule)
