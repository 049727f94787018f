"""LearnerConfig: the hyperparameters that all algorithms have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gpu_vecenv.declare.config import check_fields, param
from gpu_vecenv.engine.sampler import Squash
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.networks import Activation
from gpu_vecenv.train.policy import NetworkKind, Precision

OptimizerKind = Literal["adam", "adamw", "radam", "rmsprop", "sgd"]


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Hyperparameters of a policy that every algorithm has; a subclass is those of one algorithm.

    Each policy may have its own. The options marked * in ``docs/hyper_parameters.md`` and in the list of
    ``gpu-vecenv train GAME --help`` belong to the run: all policies must agree on them.

    Attributes:
        algorithm: Its name in checkpoints and on the command line.
        reads_states: Whether a critic sees states, so that rollouts keep them, see ``central_critic.Context``.
        learns_as_team: Whether the agents of a policy learn from one return.
        trace_decay: Lambda of the returns, in [0, 1].
    """

    algorithm: ClassVar[str]

    total_steps: int = param(1_000_000, low=1)  # * env-steps of the whole run, summed over all environments
    num_steps: int = param(32, low=1)  # * T: steps of each environment in an iteration
    staggered_starts: bool = True  # * first episodes begin at different elapsed steps, of games with max_steps
    num_epochs: int = param(4, low=1)  # passes over each iteration's samples
    num_minibatches: int = param(4, low=1)  # per epoch
    optimizer: OptimizerKind = "adam"  # torch's, with its default options but for the following
    learning_rate: float = param(3e-4, low=0)  # of the optimizer
    adam_epsilon: float = param(1e-5, low=0)  # added to the root of second moments; "sgd" has none
    weight_decay: float | None = param(None, low=0)  # of "adamw", per step and unit of the rate; None: 0.01
    momentum: float | None = param(None, low=0, high=1)  # of "sgd" and "rmsprop"; None: 0
    final_learning_rate: float | None = param(0.0, low=0)  # reached linearly at the end of the run; None: constant
    gamma: float = param(0.99, low=0, high=1)  # discount per step
    max_grad_norm: float = param(0.5, low=0)  # gradients are scaled down to this norm
    normalize_obs: bool = False  # by running mean and variance
    network: NetworkKind = "mlp"  # default network; "cnn", "entities": behind an encoder, "gru", "lstm": recurrent
    sequence_length: int | None = param(None, low=1)  # of recurrent policies, in steps; divides num_steps, None: those
    hidden_sizes: tuple[int, ...] = param((64, 64), low=1)  # units of the hidden layers of the default network
    activation: Activation = "tanh"  # of the hidden layers
    agent_ids: bool = False  # networks also see which of the policy's agents a row is of
    squash: Squash = "clip"  # * how Gaussian draws are mapped to a Box; or "beta": draws of a Beta distribution
    precision: Precision = "float32"  # * of matrix products: "tf32" rounds factors where a GPU can; "bfloat16" mixed
    chunk_rows: int = param(2**20, low=1)  # samples per forward pass; gradients of a minibatch's chunks are summed

    def __post_init__(self) -> None:
        check_fields(self)
        if self.network in ("cnn", "entities") and self.agent_ids:
            raise ConfigError(
                f"network is {self.network!r} with agent_ids; expected network 'mlp', 'gru' or 'lstm', or agent_ids "
                "False: an encoder takes an observation alone"
            )
        for name, kinds in (("weight_decay", ("adamw",)), ("momentum", ("sgd", "rmsprop"))):
            if getattr(self, name) is not None and self.optimizer not in kinds:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} with optimizer {self.optimizer!r}, which has none; expected None,"
                    f" or optimizer {' or '.join(map(repr, kinds))}"
                )

    @property
    def num_updates(self) -> int:
        """Minibatches per iteration, all epochs together."""
        return self.num_epochs * self.num_minibatches

    def steps_at_once(self, samples_per_step: int) -> int:
        """Steps that a forward pass may take: as many as fit in a chunk, and in a minibatch, but at least one."""
        return max(1, min(self.chunk_rows // samples_per_step, self.num_steps // self.num_minibatches))

    @property
    def reads_states(self) -> bool:
        """No, unless a subclass says so."""
        return False

    @property
    def learns_as_team(self) -> bool:
        """Unless an algorithm has it otherwise: no."""
        return False

    @property
    def trace_decay(self) -> float:
        """An option of the algorithm."""
        raise NotImplementedError

    @property
    def scheduled(self) -> tuple[str, ...]:
        """Names of the options that change linearly with the progress of the run, up to ``final_<name>``."""
        return ("learning_rate",)

    def schedule_ends(self) -> dict[str, tuple[float, float]]:
        """What changes linearly with the progress of the run: name -> its values at the start and at the end."""
        ends = {name: (getattr(self, name), getattr(self, f"final_{name}")) for name in self.scheduled}
        return {name: (start, start if end is None else end) for name, (start, end) in ends.items()}

    def rates(self, progress: float) -> dict[str, float]:
        """What schedules give when the fraction ``progress`` of the run is done, by the names of metrics."""
        start, end = self.schedule_ends()["learning_rate"]
        return {"learning_rate": start + (end - start) * progress}
