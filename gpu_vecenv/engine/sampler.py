"""Sampler: draws actions with log-probabilities and entropies from a network's outputs, alone or fused with a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

import torch

from gpu_vecenv.absent import OF_SAMPLER, absent_attribute
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.engine_kernels import sample_arguments, squash_source
from gpu_vecenv.declare.arguments import check_choice, check_flag
from gpu_vecenv.declare.field import i32, i64, u32
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.declare.layout import GameLayout
from gpu_vecenv.engine.data_manager import TORCH_TYPES
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import Outputs, VecEnv
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.files import cuda_folder

Squash = Literal["clip", "tanh", "beta"]
ALIGNMENT = 16  # bytes of one load in the kernels


@dataclass(frozen=True)
class Sample:
    """One draw for every agent; with ``agents_as_envs`` the first two axes are one of num_envs * num_agents.

    Attributes:
        actions: (num_envs, num_agents[, heads]) int32; if a role has a Box (num_envs, num_agents, n) f32.
        log_probs: (num_envs, num_agents) f32, summed over the heads.
        entropies: Likewise. In an ``out`` argument None leaves them out.
        draws: Like ``actions``, but before squashing: the draws of a Box. None if no role has a Box.
    """

    actions: torch.Tensor
    log_probs: torch.Tensor
    entropies: torch.Tensor | None = None
    draws: torch.Tensor | None = None


def sample_kernel(layout: GameLayout) -> KernelSignature:
    """The kernel of sampler.cu."""
    clocks = Array("key", u32, const=True), Array("episode", i64, const=True), Array("elapsed_steps", i32, const=True)
    return KernelSignature("sample", (*clocks, *sample_arguments(layout.action.dtype), Scalar("rows", i64)))


class Sampler:
    """Draws actions for one environment: categorical, or Gaussian or Beta for roles with a Box.

    A draw is a function of the parameters and of each environment's seed, episode and step, without generator state:
    bit-identical on CPU and GPU, eager or in a graph. Two draws in the same step are equal.

    Attributes:
        num_parameters: Size of the last axis of ``parameters``: the sum of the head sizes, or 2n for a Box of n; that
            of the widest role.
        num_logits: The sum of the head sizes; 0 if every role has a Box.

    Args:
        env: The environment.
        squash: Draws of a Box are Gaussian, and "clip" or "tanh" maps them to [-1, 1], which is then scaled to the Box;
            or "beta": they are of a Beta distribution, whose [0, 1] is scaled to it.

    Raises:
        ConfigError: ``squash`` is none of them, or not "clip" for a game without a Box.

    Example:
        >>> env = gpu_vecenv.make("cartpole", num_envs=8)
        >>> obs, info = env.reset(seed=1)
        >>> sampler = gpu_vecenv.Sampler(env)
        >>> logits = torch.zeros(8, env.num_agents, sampler.num_parameters, device=env.device)
        >>> sampler.sample(logits).actions.shape
        torch.Size([8, 1])
    """

    def __init__(self, env: VecEnv, squash: Squash = "clip") -> None:
        if not isinstance(env, VecEnv):
            raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv; pass a view's vec_env")
        action = env.game.layout.action
        check_choice("squash", squash, get_args(Squash), ConfigError)
        if squash != "clip" and action.discrete:
            raise ConfigError(
                f"squash is {squash!r}, but {type(env.game).__name__} has discrete actions; leave squash out"
            )
        if env.build.guards:
            raise ConfigError("guards lie between the clocks that a sampler reads; use an environment without guards")
        self.env, self.squash = env, squash
        self.num_logits = action.num_logits
        self.num_parameters = action.num_parameters
        program = env.functions.compile(
            cuda_folder() / "engine/sampler.cu",
            kernels=[sample_kernel(env.game.layout)],
            game=env.game,
            constants=squash_source(squash),
        )
        rows = env.num_envs * env.num_agents
        clocks: dict[str, object] = {name: env.data[f"engine_{name}"] for name in ("key", "episode", "elapsed_steps")}
        self._launch = program.prepare("sample", LaunchShape(rows, threads_per_block=128), rows=rows, **clocks)

    if not TYPE_CHECKING:  # type checkers report unknown attributes of classes without this method

        def __getattr__(self, name: str) -> NoReturn:
            absent_attribute(self, name, OF_SAMPLER)

    def sample(self, parameters: torch.Tensor, *, greedy: bool = False, out: Sample | None = None) -> Sample:
        """Draw one action per agent.

        Discrete heads: the parameters are unnormalised logits, head after head. A role with smaller heads uses the
        first logits of each. A logit of -inf, or 87 below the largest, excludes its choice; NaN, or -inf for all
        choices, gives action -1, which is invalid.

        A Box of n: the parameters are n means, then n log standard deviations. A draw is
        u = mean + exp(log_std) * normal, the action center + half_width * s(u) with those of the Box, where s clips
        to [-1, 1] or is tanh, so that actions are always inside. Log-probabilities are log densities on [-1, 1]: of u
        for "clip", since clipping counts as the environment's; of tanh(u) for "tanh", log N(u) - log(1 - tanh(u)^2)
        (Haarnoja et al., "Soft Actor-Critic", 2018, appendix C). Entropies are those of the Gaussian before
        squashing. A parameter or draw that is not finite gives action NaN, which is invalid.

        With "beta" the parameters are n numbers x, then n numbers y: a draw u, in (0, 1), is of the distribution with
        alpha = 1 + softplus(x), beta = 1 + softplus(y), by two Gamma draws of Marsaglia and Tsang, 2000; the action is
        low + (high - low) * u. Log-probabilities and entropies are those of u. Those of the action would differ by
        log(high - low), a constant, as they would with "clip" and "tanh" by log((high - low) / 2).

        Where some roles have a Box and others discrete heads, each agent's parameters are of its role's kind, and
        ``actions`` and ``draws`` hold choices as whole floats.

        Args:
            parameters: (num_envs, num_agents, num_parameters) f32, contiguous. A role with fewer has the first ones.
            greedy: Take the first of the largest logits, or u = mean; of "beta" alpha / (alpha + beta).
            out: Buffers to write to; None allocates.

        Raises:
            TypeError, ValueError: Dtype, shape or device of ``parameters`` or ``out`` is wrong, or ``out`` lacks
                ``draws`` (some role has a Box) or has them (none has).
            ResetNeededError, ClosedEnvError: The environment has not been reset yet, or has been closed.
        """
        parameters, out = self._prepare("sample", parameters, greedy, out, "out")
        self._draw(parameters, greedy, out)
        return out

    def step(
        self,
        parameters: torch.Tensor,
        *,
        greedy: bool = False,
        sample: Sample | None = None,
        out: StepBuffers | None = None,
    ) -> tuple[Sample, Outputs]:
        """Draw one action per agent and step: bit-identical to ``env.step(sampler.sample(parameters).actions)``.

        On a GPU this is one kernel where that is faster than two: see the argument ``fuse_sampling`` of ``VecEnv``.
        That kernel is compiled at the first call; if the first call is in a graph capture, the graph draws and steps
        with two kernels.

        Args:
            parameters: As in ``sample``.
            greedy: As in ``sample``.
            sample: Buffers for the sample; None allocates.
            out: Buffers for the step's outputs; None allocates.

        Returns:
            The sample, and what ``VecEnv.step`` returns.

        Raises:
            TypeError, ValueError, InvalidActionError, ResetNeededError, ClosedEnvError: As ``sample`` and
                ``VecEnv.step``. After an InvalidActionError (``validate="sync"``) only ``sample`` has been written.
        """
        parameters, sample = self._prepare("step", parameters, greedy, sample, "sample")
        out = self.env.output(out)
        outputs = self.env.step_sampled(self.squash, self._sample_arguments(parameters, greedy, sample), out)
        if outputs is None:
            self._draw(parameters, greedy, sample)
            outputs = self.env.step(sample.actions, out=out)
        return sample, outputs

    def _prepare(
        self, method: str, parameters: torch.Tensor, greedy: bool, out: Sample | None, name: str
    ) -> tuple[torch.Tensor, Sample]:
        """The validated arguments; ``out``, the argument ``name`` of ``method``, is allocated if it is None."""
        self.env.check_ready(method)
        check_flag(f"{method}: greedy", greedy)
        self._check_parameters(method, parameters)
        parameters = parameters.detach().contiguous()
        if parameters.data_ptr() % ALIGNMENT:
            parameters = parameters.clone()
        if out is not None:
            self._check_output(f"{method}: {name}", out)
            return parameters, out
        rows, action = self.env.buffers_layout.batch, self.env.game.layout.action
        new = torch.empty((2, *rows), device=self.env.device)
        actions = torch.empty((*rows, *action.shape), dtype=TORCH_TYPES[action.dtype], device=self.env.device)
        draws = None if action.discrete else torch.empty_like(actions)
        return parameters, Sample(actions, new[0], new[1], draws)

    def _draw(self, parameters: torch.Tensor, greedy: bool, out: Sample) -> None:
        self.env.launch(self._launch, "sample", **self._sample_arguments(parameters, greedy, out))

    def _sample_arguments(self, parameters: torch.Tensor, greedy: bool, out: Sample) -> dict[str, int | None]:
        """Arguments of a kernel that draws, from checked tensors."""
        return {
            "parameters": parameters.data_ptr(),
            "greedy": greedy,
            "actions": out.actions.data_ptr(),
            "log_probs": out.log_probs.data_ptr(),
            "entropies": None if out.entropies is None else out.entropies.data_ptr(),
            "draws": None if out.draws is None else out.draws.data_ptr(),
        }

    def _check_parameters(self, method: str, parameters: torch.Tensor) -> None:
        expected = (*self.env.buffers_layout.batch, self.num_parameters)
        name, device = "logits" if self.env.game.layout.action.discrete else "parameters", self.env.device
        if not isinstance(parameters, torch.Tensor):
            raise TypeError(f"{method}: {name} are a {type(parameters).__name__}; expected a torch tensor")
        if parameters.dtype != torch.float32:
            raise TypeError(
                f"{method}: {name} have dtype {parameters.dtype}; expected torch.float32 (use {name}.float())"
            )
        if parameters.layout != torch.strided:
            raise ValueError(f"{method}: {name} are {parameters.layout}; expected a dense tensor")
        if parameters.shape != expected or parameters.device != device:
            meaning = "" if self.env.game.layout.action.discrete else ", one of each element before the other"
            raise ValueError(
                f"{method}: {name} are {tuple(parameters.shape)} on {parameters.device}; "
                f"expected {expected} on {device}{meaning}"
            )

    def _check_output(self, what: str, out: Sample) -> None:
        if not isinstance(out, Sample):
            raise TypeError(f"{what} is a {type(out).__name__}; expected a Sample")
        rows, action = self.env.buffers_layout.batch, self.env.game.layout.action
        shape, dtype = (*rows, *action.shape), TORCH_TYPES[action.dtype]
        wanted = [("actions", shape, dtype), ("log_probs", rows, torch.float32)]
        if out.entropies is not None:
            wanted.append(("entropies", rows, torch.float32))
        if not action.discrete:
            wanted.append(("draws", shape, dtype))
        elif out.draws is not None:
            raise ValueError(f"{what}.draws is given; expected None, as only Box games have draws")
        for name, shape, dtype in wanted:
            tensor = getattr(out, name)
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{what}.{name} is a {type(tensor).__name__}; expected a {dtype} tensor of shape {shape}"
                )
            if tensor.dtype != dtype:
                raise TypeError(f"{what}.{name} has dtype {tensor.dtype}; expected {dtype}")
            if tensor.shape != shape or tensor.device != self.env.device or not tensor.is_contiguous():
                raise ValueError(
                    f"{what}.{name} is {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
                    f"expected {shape}, contiguous, on {self.env.device}"
                )
