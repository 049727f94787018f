"""Launches of the optimizer's kernels: sums of partial gradients, of squares, clipping with a step of Adam, RAdam."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.compile.function_manager import FunctionManager, Launch, Program
from gpu_vecenv.declare.field import boolean, f32, f64, i32, i64, u64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.files import cuda_folder

SUM_BLOCK = 256  # threads per block; the same as SUM_BLOCK in optimizer.cu
SUM_COLUMNS = 32  # columns of a block; the same as COLUMNS in optimizer.cu
ADAM_BLOCK = 256  # threads per block; the same as ADAM_BLOCK in optimizer.cu
ADAM_THREADS = 2**16  # at most: each block adds up all squares
# At most, where a gradient has few squares: more blocks at a time hide that each finds its parameter first.
ADDRESS_BLOCKS = 512
MAX_SQUARES = 2048  # of a gradient without parts: a block of Adam loads so many at once

SUM_PARTS = KernelSignature(
    "sum_parts",
    (
        Array("parts", f32, const=True, shape=("rows", "columns")),
        Array("trainable", boolean, const=True, shape=("columns",)),
        Array("out", f32, shape=("columns",)),
        Array("out_indices", i32, const=True, optional=True, shape=("columns",)),
        Array("squares", f64),
        Scalar("num_squared", i64),
        Array("skip_update", f32, const=True, optional=True, shape=()),
        Scalar("rows", i64),
        Scalar("columns", i64),
    ),
)
SUM_SQUARES = KernelSignature(
    "sum_squares",
    (
        Array("gradient", f32, shape=("size",)),
        Array("trainable", boolean, const=True, shape=("size",)),
        Array("squares", f64, shape=("num_squares",)),
        Scalar("num_squares", i64),
        Scalar("part", i64),  # elements of each sum
        Array("skip_update", f32, const=True, shape=()),
        Scalar("size", i64),
    ),
)
_OF_ADAM = (
    Array("gradient", f32, const=True, shape=("size",)),
    Array("squares", f64, const=True, shape=("num_squares",)),
    Scalar("num_squares", i64),
    Scalar("size", i64),
    Array("learning_rate", f32, shape=()),
    Scalar("desired_kl", f32),
    Scalar("least_rate", f32),
    Scalar("most_rate", f32),
    Scalar("beta1", f64),
    Scalar("beta2", f64),
    Scalar("eps", f64),
    Scalar("max_grad_norm", f32),
    Scalar("target_kl", f32),
    Array("metrics", f32, const=True, shape=("num_metrics",)),
    Scalar("num_metrics", i32),
    Scalar("kl_index", i32),
    Array("skip_update", f32, shape=()),
    Array("metric_sums", f32, shape=("num_sums",)),
    Scalar("num_sums", i32),
    Array("ticket", i32, shape=()),
)
ADAM_STEP = KernelSignature(
    "adam_step",
    (
        *_OF_ADAM,
        Array("parameters", f32, shape=("size",)),
        Array("exp_avg", f32, shape=("size",)),
        Array("exp_avg_sq", f32, shape=("size",)),
        Array("steps", f32, shape=("num_steps",)),
        Scalar("num_steps", i32),
    ),
)
ADAM_STEP_BY_ADDRESSES = KernelSignature(
    "adam_step_by_addresses",
    (
        *_OF_ADAM,
        Array("addresses", u64, const=True, shape=("num_parameters", 4)),
        Scalar("num_parameters", i64),
        Array("segments", i64, const=True, shape=("num_segments", 4)),
        Scalar("num_segments", i64),
    ),
)
_OF_RADAM = (
    Array("addresses", u64, const=True, shape=("num_parameters", 4)),
    Array("rates", f32, shape=("num_parameters", 2)),
    Array("takes", boolean, shape=("num_parameters",)),
    Scalar("num_parameters", i64),
    Scalar("beta1", f64),
    Scalar("beta2", f64),
)
RADAM_RATES = KernelSignature(
    "radam_rates",
    (
        *_OF_RADAM,
        Array("trainable", boolean, const=True, shape=("num_parameters",)),
        Array("skip_update", f32, const=True, shape=()),
        Array("learning_rate", f32, const=True, shape=()),
    ),
)
RADAM_STEP = KernelSignature(
    "radam_step",
    (
        *_OF_RADAM,
        Array("gradient", f32, const=True, shape=("size",)),
        Array("owners", i32, const=True, shape=("size",)),
        Array("firsts", i64, const=True, shape=("num_parameters",)),
        Scalar("size", i64),
        Scalar("eps", f64),
    ),
)
KERNELS = [SUM_PARTS, SUM_SQUARES, ADAM_STEP, ADAM_STEP_BY_ADDRESSES, RADAM_RATES, RADAM_STEP]


def _program(functions: FunctionManager) -> Program:
    return functions.compile(cuda_folder() / "learner/optimizer.cu", kernels=KERNELS)


def num_squares(columns: int) -> int:
    """Partial sums of squares that ``sum_parts_launch`` writes for so many columns."""
    return -(-columns // SUM_COLUMNS)


def sum_parts_launch(
    functions: FunctionManager,
    parts: torch.Tensor,
    *,
    trainable: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    num_squared: int,
    skip_update: torch.Tensor | None = None,
) -> Launch:
    """A launch that sums over the first axis, in an order that depends on the sizes alone.

    Args:
        functions: The FunctionManager of the tensors' device.
        parts: (k, n) float32.
        trainable: (n,) bool: where it is False, the sum is 0.
        out: (n,) float32.
        squares: (num_squares(n),) float64, partial sums of the squares of the first results.
        num_squared: The number of these results.
        skip_update: () float32; where it is 1, nothing is written. None: never.
    """
    rows, columns = parts.shape
    tensors = {"parts": parts, "trainable": trainable, "out": out, "squares": squares, "skip_update": skip_update}
    numbers = {"num_squared": num_squared, "rows": rows, "columns": columns}
    return _program(functions).prepare("sum_parts", _of_columns(rows, columns), **tensors, **numbers, out_indices=None)


def column_sums_launch(functions: FunctionManager, rows: int, out_indices: torch.Tensor) -> Launch:
    """A launch that sums over the first axis as ``sum_parts_launch`` does, of tensors that are given at each call.

    These are ``parts`` (rows, n) and ``out`` (n,), both float32.

    Args:
        functions: The FunctionManager of the tensors' device.
        rows: Of ``parts``.
        out_indices: (n,) int32, where the sum of each column is stored in ``out``: a permutation.
    """
    columns, device = len(out_indices), out_indices.device
    return _program(functions).prepare(
        "sum_parts",
        _of_columns(rows, columns),
        trainable=torch.ones(columns, dtype=torch.bool, device=device),
        out_indices=out_indices,
        squares=torch.zeros(num_squares(columns), dtype=torch.float64, device=device),
        num_squared=0,
        skip_update=None,
        rows=rows,
        columns=columns,
    )


def _of_columns(rows: int, columns: int) -> LaunchShape:
    return LaunchShape(
        columns, threads_per_item=SUM_BLOCK // SUM_COLUMNS, threads_per_block=SUM_BLOCK, work=rows * columns
    )


def few_squares(size: int) -> int:
    """Partial sums of squares of a gradient that no other kernel has summed, see ``sum_squares_launch``."""
    return min(MAX_SQUARES, -(-size // SUM_BLOCK))


def sum_squares_launch(
    functions: FunctionManager,
    gradient: torch.Tensor,
    *,
    trainable: torch.Tensor,
    squares: torch.Tensor,
    skip_update: torch.Tensor,
) -> Launch:
    """A launch that sums the squares of a gradient, in an order that depends on the sizes alone.

    Args:
        functions: The FunctionManager of the tensors' device.
        gradient: (n,) float32.
        trainable: (n,) bool: where it is False, the gradient becomes 0.
        squares: (k,) float64, partial sums of as many elements each.
        skip_update: () float32; where it is 1, nothing is written.
    """
    size, count = len(gradient), len(squares)
    return _program(functions).prepare(
        "sum_squares",
        LaunchShape(count, threads_per_item=SUM_BLOCK, threads_per_block=SUM_BLOCK, work=size),
        gradient=gradient,
        trainable=trainable,
        squares=squares,
        num_squares=count,
        part=-(-size // count),
        skip_update=skip_update,
        size=size,
    )


def adam_launch(
    functions: FunctionManager,
    *,
    parameters: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    steps: torch.Tensor,
    **settings: Any,
) -> Launch:
    """A launch of a step of Adam with a clipped gradient, or of none if the update is skipped.

    It does what ``clip_grad_norm_launch`` and ``torch.optim.Adam(fused=True)`` do, but leaves ``gradient`` as it is.

    Args:
        functions: The FunctionManager of the tensors' device.
        parameters: (n,) float32, like all others.
        exp_avg: (n,) first moments, as Adam's state has them.
        exp_avg_sq: (n,) second moments.
        steps: (m,) the number of steps taken so far, m times.
        settings: Further arguments, see ``_adam_arguments``.
    """
    size = len(parameters)
    return _program(functions).prepare(
        "adam_step",
        LaunchShape(min(size, ADAM_THREADS), threads_per_block=ADAM_BLOCK, work=size),
        parameters=parameters,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        steps=steps,
        num_steps=len(steps),
        **_adam_arguments(**settings),
    )


def adam_launch_by_addresses(
    functions: FunctionManager, addresses: torch.Tensor, sizes: Sequence[int], **settings: Any
) -> Launch:
    """As ``adam_launch``, of parameters and state that are wherever they are in memory.

    Args:
        functions: The FunctionManager of the tensors' device.
        addresses: (n, 4) int64, of n parameters those of values, ``exp_avg``, ``exp_avg_sq`` and ``step``, all float32.
            The first ``step`` is read; all are written.
        sizes: Elements of each parameter; those of the gradient lie one after the other.
        settings: Further arguments, see ``_adam_arguments``.
    """
    ends, segments = list(itertools.accumulate(sizes)), list[tuple[int, int, int, int]]()
    for k, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        firsts = range(0, size, ADAM_BLOCK)
        segments += [(k, first, end - size + first, min(ADAM_BLOCK, size - first)) for first in firsts]
    count = len(segments)
    return _program(functions).prepare(
        "adam_step_by_addresses",
        LaunchShape(
            min(count, ADDRESS_BLOCKS),
            threads_per_item=ADAM_BLOCK,
            threads_per_block=ADAM_BLOCK,
            work=sum(sizes),
        ),
        addresses=addresses,
        num_parameters=len(sizes),
        segments=torch.tensor(segments).to(addresses.device),
        num_segments=count,
        **_adam_arguments(**settings),
    )


def _adam_arguments(
    *,
    gradient: torch.Tensor,
    squares: torch.Tensor,
    learning_rate: torch.Tensor,
    metrics: torch.Tensor,
    metric_sums: torch.Tensor,
    skip_update: torch.Tensor,
    max_grad_norm: float,
    target_kl: float | None,
    kl_index: int,
    desired_kl: float | None = None,
    rate_limits: tuple[float, float] = (0.0, math.inf),
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-5,
) -> dict[str, Any]:
    """What both kernels of Adam take.

    Args:
        gradient: (n,) float32, like all others.
        squares: (j,) float64, whose sum is the square of the gradient's norm; see ``sum_parts_launch`` and
            ``sum_squares_launch``.
        learning_rate: () read on the device, and written if it follows approx_kl.
        metrics: (k,) of the minibatch.
        metric_sums: (k + 2,), to which ``skip_update`` is added, and metrics and the gradient's norm unless it was 1.
        skip_update: () set to 1 if approx_kl exceeds target_kl, or a metric or the norm is not finite. Where it is 1,
            all later updates are skipped too.
        max_grad_norm: See ``LearnerConfig.max_grad_norm``.
        target_kl: See ``PPOConfig.target_kl``.
        kl_index: Index of approx_kl among the metrics.
        desired_kl: See ``PPOConfig.desired_kl``.
        rate_limits: The least and the largest learning rate that follows approx_kl.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
    """
    return {
        "gradient": gradient,
        "squares": squares,
        "num_squares": len(squares),
        "size": len(gradient),
        "learning_rate": learning_rate,
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "max_grad_norm": max_grad_norm,
        "target_kl": math.inf if target_kl is None else target_kl,
        "metrics": metrics,
        "num_metrics": len(metrics),
        "kl_index": kl_index,
        "desired_kl": -1 if desired_kl is None else desired_kl,
        "least_rate": rate_limits[0],
        "most_rate": rate_limits[1],
        "skip_update": skip_update,
        "metric_sums": metric_sums,
        "num_sums": len(metrics) + 2,
        "ticket": torch.zeros((), dtype=torch.int32, device=gradient.device),
    }


def radam_launches(
    functions: FunctionManager,
    addresses: torch.Tensor,
    sizes: Sequence[int],
    *,
    gradient: torch.Tensor,
    trainable: torch.Tensor,
    skip_update: torch.Tensor,
    learning_rate: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> list[Launch]:
    """The launches of a step of ``torch.optim.RAdam``, or of none where the update is skipped.

    Args:
        functions: The FunctionManager of the tensors' device.
        addresses: (n, 4) int64, of n parameters those of values, ``exp_avg``, ``exp_avg_sq`` and ``step``, all float32.
        sizes: Elements of each parameter.
        gradient: Of all of them, one after the other, float32.
        trainable: (n,) bool; nothing changes of a parameter where it is False.
        skip_update: () float32; nothing changes where it is not 0.
        learning_rate: () float32, read on the device.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
    """
    device, numbers = addresses.device, torch.tensor(sizes)
    common: dict[str, Any] = {
        "addresses": addresses,
        "rates": torch.empty((len(sizes), 2), device=device),
        "takes": torch.empty(len(sizes), dtype=torch.bool, device=device),
        "num_parameters": len(sizes),
        "beta1": betas[0],
        "beta2": betas[1],
    }
    program = _program(functions)
    rates = program.prepare(
        "radam_rates",
        LaunchShape(len(sizes)),
        **common,
        trainable=trainable,
        skip_update=skip_update,
        learning_rate=learning_rate,
    )
    step = program.prepare(
        "radam_step",
        LaunchShape(len(gradient)),
        **common,
        gradient=gradient,
        owners=torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(numbers).to(device),
        firsts=(numbers.cumsum(0) - numbers).to(device),
        size=len(gradient),
        eps=eps,
    )
    return [rates, step]
