"""Sampler: actions with their log-probabilities and entropies from logits, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_vecenv.backends import Argument, LaunchShape
from gpu_vecenv.env import device_folder
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.vec_env import VecEnv


@dataclass(frozen=True)
class Sample:
    """One draw: ``actions`` (num_envs, num_agents[, heads]) int32; the others (num_envs, num_agents) f32.

    Where the environment has agents as rows, one axis of num_envs * num_agents takes the place of the first two.

    With several heads, ``log_probs`` and ``entropies`` are sums over the heads.
    """

    actions: torch.Tensor
    log_probs: torch.Tensor
    entropies: torch.Tensor


class Sampler:
    """Draws categorical actions for one environment.

    A draw is a function of the logits and of each replica's seed, episode and tick: the same bits on CPU and GPU, eager
    or in a graph, and no generator state. Two draws in the same tick are equal.

    Raises:
        EnvDefinitionError: The game's actions are not discrete.
    """

    def __init__(self, env: VecEnv) -> None:
        if env.game.action.continuous:
            raise EnvDefinitionError(
                f"{type(env.game).__name__} has continuous actions; logits belong to discrete ones"
            )
        self.env = env
        self.num_logits = env.game.action.num_logits
        program = env.functions.compile(device_folder() / "sampler.cu", game=env.game)
        rows = env.num_envs * env.num_agents
        clocks: list[Argument] = [env.data[f"machine_{name}"] for name in ("key", "episode", "time")]
        arguments = [None, *clocks, np.int32(0), None, None, None, np.int64(rows)]
        self._launch = program.prepare("sample", LaunchShape(rows), arguments)

    def sample(self, logits: torch.Tensor, *, greedy: bool = False, out: Sample | None = None) -> Sample:
        """Draw one action per agent.

        Args:
            logits: (num_envs, num_agents, num_logits) f32, contiguous: head after head, unnormalised. A role with
                smaller heads uses the first logits of each. -inf excludes a choice; NaN, or nothing but -inf, yields
                action -1, which the environment refuses.
            greedy: Take the largest logit, the first of equals.
            out: Where to write.

        Raises:
            TypeError, ValueError: Dtype, shape or device of ``logits`` or ``out`` is wrong.
            ResetNeededError, ClosedEnvError: The environment has not been reset yet, or has been closed.
        """
        self.env.check_ready("sample")
        rows = self.env.layout.batch
        expected = (*rows, self.num_logits)
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"sample: logits are a {type(logits).__name__}; expected a torch tensor")
        if logits.dtype != torch.float32:
            raise TypeError(f"sample: logits have dtype {logits.dtype}; expected torch.float32 (use logits.float())")
        if logits.shape != expected or logits.device != self.env.device:
            raise ValueError(
                f"sample: logits are {tuple(logits.shape)} on {logits.device}; expected {expected} on {self.env.device}"
            )
        logits = logits.detach().contiguous()
        if out is None:
            new = torch.empty((2, *rows), device=self.env.device)
            actions = torch.empty((*rows, *self.env.game.action.shape), dtype=torch.int32, device=self.env.device)
            out = Sample(actions, new[0], new[1])
        else:
            self._check_output(out)
        raw = self._launch.raw
        raw[0], raw[4] = logits.data_ptr(), np.int32(greedy)
        raw[5:8] = out.actions.data_ptr(), out.log_probs.data_ptr(), out.entropies.data_ptr()
        self._launch()
        return out

    def _check_output(self, out: Sample) -> None:
        rows = self.env.layout.batch
        for name, shape, dtype in (
            ("actions", (*rows, *self.env.game.action.shape), torch.int32),
            ("log_probs", rows, torch.float32),
            ("entropies", rows, torch.float32),
        ):
            tensor = getattr(out, name)
            if tensor.dtype != dtype:
                raise TypeError(f"sample: out.{name} has dtype {tensor.dtype}; expected {dtype}")
            if tensor.shape != shape or tensor.device != self.env.device or not tensor.is_contiguous():
                raise ValueError(
                    f"sample: out.{name} is {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
                    f"expected {shape}, contiguous, on {self.env.device}"
                )
