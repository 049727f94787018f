"""Trained policies as files for other programs, ONNX and TorchScript, each compared with the policy it comes from."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from gpu_vecenv._version import __version__
from gpu_vecenv.errors import ConfigError, ExportError
from gpu_vecenv.files import replace_file
from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.distributions import masked, squashed
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.normalizers import OBS_CLIP
from gpu_vecenv.train.policy import Policy, flat
from gpu_vecenv.train.q_policy import QPolicy

FileFormat = Literal["onnx", "torchscript"]
SUFFIXES: dict[FileFormat, str] = {"onnx": ".onnx", "torchscript": ".pt"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DESCRIPTION = "policy.json"
INPUTS, OUTPUTS = ("obs", "action_mask"), ("actions", "parameters")
NUM_OBSERVATIONS = 1000  # by which a file is compared with its policy
# Another runtime sums the products of a layer in another order and has functions of its own such as tanh: relative to
# the largest output this is far above what a few layers of rounding add up to, and far below what a policy acts by.
TOLERANCE = 1e-4
Arrays: TypeAlias = Sequence[np.ndarray[Any, Any]]


class InferencePolicy(nn.Module):
    """What a file computes, in float32 on the CPU: normalisation, network and most likely actions of a policy.

    Args:
        policy: The policies of a game.
        one: Which of them; it is copied.
    """

    mean: torch.Tensor
    std: torch.Tensor
    action_bounds: torch.Tensor

    def __init__(self, policy: GamePolicy, one: Policy) -> None:
        super().__init__()
        self.network = copy.deepcopy(one.network).cpu().eval().requires_grad_(False)
        self.normalizes = one.obs_normalizer is not None
        if one.obs_normalizer is not None:
            mean, std = (x.detach().cpu() for x in one.obs_normalizer.statistics())
            self.register_buffer("mean", mean)
            self.register_buffer("std", std)
        self.register_buffer("action_bounds", one.action_bounds.cpu())
        self.is_actor, self.flattens = one.critic is not None, isinstance(one.network, Tower)
        self.obs_axes = len(one.view.obs_shape)
        self.continuous, self.squash = one.view.continuous, one.squash
        self.head_sizes, self.has_heads = list(one.view.head_sizes), _has_heads(policy)

    def forward(self, obs: torch.Tensor, action_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Most likely actions and the parameters of their distribution.

        Args:
            obs: (rows, *obs_shape) float32 or uint8.
            action_mask: (rows, n) bool, for games with masks.

        Returns:
            Actions (rows[, heads]) int32 or (rows, k) float32, and parameters (rows, n) float32, before any mask.
        """
        if self.normalizes:
            obs = ((obs - self.mean) / self.std).clamp(-OBS_CLIP, OBS_CLIP)
        outputs = self.network(flat(obs, self.obs_axes) if self.flattens else obs)
        parameters = (outputs if self.is_actor else outputs[0]).float()
        if self.continuous:
            return squashed(parameters.chunk(2, -1)[0], self.action_bounds, self.squash), parameters
        logits = masked(parameters, action_mask).split(self.head_sizes, -1)
        heads = [x.argmax(-1).int() for x in logits]
        return torch.stack(heads, -1) if self.has_heads else heads[0], parameters


@dataclass(frozen=True)
class Exported:
    """A file of one policy.

    Attributes:
        path: The file.
        difference: The largest difference of its parameters from the policy's, by the largest of these.
    """

    path: Path
    difference: float


def export(policy: GamePolicy, folder: Path, file_format: FileFormat) -> list[Exported]:
    """Write a file for each policy, and ``policy.json``, which describes games, roles, inputs and outputs.

    A file is written once its results for 1,000 observations are those of the policy.

    Args:
        policy: As ``load_policy`` returns it.
        folder: Made if necessary; files in it are replaced.
        file_format: "onnx" or "torchscript".

    Raises:
        ConfigError: ONNX's packages are not installed.
        ExportError: A network cannot be exported, is recurrent or sees ``agent_ids``, or the file's results differ from
            the policy's.
    """
    if file_format == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ConfigError(f'ONNX files need {", ".join(missing)}: pip install "gpu_vecenv[onnx]"')
    own = {"+".join(one.view.roles): one for one in policy.policies.values()}
    contents = {name: _exported(name, policy, one, file_format) for name, one in own.items()}
    files = []
    for name, (content, difference) in contents.items():
        path = folder / f"{name}{SUFFIXES[file_format]}"
        replace_file(path, content)
        files.append(Exported(path, difference))
    described = {
        "game": policy.game.name(),
        "version": policy.game.version,
        "config": policy.game.layout.config,
        "made_with": {"gpu_vecenv": __version__, "torch": str(torch.__version__)},
        "policies": {
            name: {"file": file.path.name, **_description(policy, own[name])}
            for name, file in zip(own, files, strict=True)
        },
    }
    replace_file(folder / DESCRIPTION, (json.dumps(described, indent=1) + "\n").encode())
    return files


def sample_inputs(policy: GamePolicy, one: Policy, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Observations (count, *obs_shape) from the role's space, and for games with masks masks (count, n).

    Where a policy normalises its observations, these are drawn with the mean and standard deviation that it has seen.
    """
    generator, view = np.random.default_rng(seed), one.view
    space = policy.game.layout.observation.spaces[view.roles[0]]
    drawn = _in_space(space, generator, count)
    if one.obs_normalizer is not None and space.dtype == np.float32:
        mean, std = (x.cpu().numpy() for x in one.obs_normalizer.statistics())
        drawn = np.clip(mean + std * generator.standard_normal(drawn.shape), space.low, space.high)
    for entities in () if view.obs_parts is None else view.obs_parts.entities:
        if entities.presence is not None:
            columns = [columns[entities.presence] for columns in entities.columns]
            drawn[:, columns] = generator.integers(0, 2, (count, len(columns)))
    inputs = [torch.from_numpy(drawn.astype(space.dtype))]
    if _has_mask(policy, one):
        allowed = generator.random((count, view.num_parameters)) < 0.5
        first = 0
        for size in view.head_sizes:  # every head has a choice
            allowed[np.arange(count), first + generator.integers(0, size, count)] = True
            first += size
        inputs.append(torch.from_numpy(allowed))
    return inputs


def _in_space(space: Box, generator: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Uniform where both bounds are finite, otherwise from a normal distribution clipped to the space."""
    shape = (count, *space.shape)
    if space.dtype == np.uint8:
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return generator.integers(low, high, shape, endpoint=True)
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(finite, space.low, 0), np.where(finite, space.high, 1)
    normal = np.clip(generator.standard_normal(shape), space.low, space.high)
    return np.where(finite, generator.uniform(low, high, shape), normal)


def _has_heads(policy: GamePolicy) -> bool:
    """Whether choices have an axis of heads."""
    return bool(policy.game.layout.action.shape)


def _has_mask(policy: GamePolicy, one: Policy) -> bool:
    return policy.game.masks_actions and not one.view.continuous


def _exported(name: str, policy: GamePolicy, one: Policy, file_format: FileFormat) -> tuple[bytes, float]:
    """A file's content, and how far its results are from the policy's."""
    for found, what in ((one.recurrent_state_size, "is recurrent"), (one.agent_ids, "has agent_ids")):
        if found:
            raise ExportError(
                f"the policy of {name} {what}; expected one whose outputs depend on the observation alone, or "
                "--format hub"
            )
    module, inputs = InferencePolicy(policy, one), sample_inputs(policy, one, NUM_OBSERVATIONS)
    write = _onnx if file_format == "onnx" else _torchscript
    try:
        with torch.no_grad(), _quiet():
            content, call = write(module, [x[:2] for x in inputs])
            found = call(inputs)
    except Exception as error:  # an exporter raises errors of many kinds about a network that it cannot represent
        raise ExportError(
            f"the network of {name} cannot be exported as {file_format}: {type(error).__name__}: {error}"
        ) from error
    of_policy = _parameters_of(one, inputs[0])
    difference = float(np.abs(found[1] - of_policy).max()) / _scale(of_policy)
    if not difference <= TOLERANCE:
        raise ExportError(
            f"{file_format} file of {name}: parameters differ from the policy's by {difference:.1e} of the largest; "
            f"expected at most {TOLERANCE:.0e}"
        )
    _check_actions(name, file_format, one, found[0], of_policy, inputs)
    return content, difference


def _scale(parameters: np.ndarray[Any, Any]) -> float:
    """To which differences are relative."""
    return max(float(np.abs(parameters).max()), 1.0)


@torch.no_grad()
def _parameters_of(policy: Policy, obs: torch.Tensor) -> np.ndarray[Any, Any]:
    """Of the policy itself in float32, on its device."""
    bfloat16 = policy.uses_bfloat16
    try:
        policy.uses_bfloat16 = False
        return policy.parameters_of(obs.to(policy.action_bounds.device)).cpu().numpy()
    finally:
        policy.uses_bfloat16 = bfloat16


def _check_actions(
    name: str,
    file_format: FileFormat,
    policy: Policy,
    actions: np.ndarray[Any, Any],
    parameters: np.ndarray[Any, Any],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Raise ExportError unless the actions are the most likely ones of ``parameters``, up to rounding."""
    of_policy = torch.from_numpy(parameters)
    scale = _scale(parameters)
    if policy.view.continuous:
        expected = squashed(of_policy.chunk(2, -1)[0], policy.action_bounds.cpu(), policy.squash).numpy()
        width = float((policy.action_bounds[1] - policy.action_bounds[0]).max())
        good = bool((np.abs(actions - expected) <= TOLERANCE * scale * width).all())
    else:
        heads = torch.from_numpy(actions).reshape(len(actions), -1).long()
        logits = masked(of_policy, inputs[1] if len(inputs) > 1 else None).split(list(policy.view.head_sizes), -1)
        taken = [x.gather(-1, heads[:, head, None])[:, 0] for head, x in enumerate(logits)]
        pairs = zip(taken, logits, strict=True)
        # Of two choices with almost equal logits either may be taken.
        good = all(bool((x >= best.amax(-1) - 2 * TOLERANCE * scale).all()) for x, best in pairs)
    if not good:
        raise ExportError(f"{file_format} file of {name} takes other actions than the policy's most likely ones")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say of themselves: that TorchScript is an old format, which packages they miss."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


Call: TypeAlias = Callable[[Sequence[torch.Tensor]], Arrays]


def _torchscript(module: InferencePolicy, example: Sequence[torch.Tensor]) -> tuple[bytes, Call]:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(torch.jit.trace(module.eval(), tuple(example))), buffer)
    content = buffer.getvalue()
    loaded = torch.jit.load(io.BytesIO(content))
    return content, lambda inputs: [x.numpy() for x in loaded(*inputs)]


def _onnx(module: InferencePolicy, example: Sequence[torch.Tensor]) -> tuple[bytes, Call]:
    import onnxruntime

    rows = torch.export.Dim("rows", min=1)
    names = INPUTS[: len(example)]
    program = torch.onnx.export(
        module.eval(),
        tuple(example),
        input_names=names,
        output_names=OUTPUTS,
        dynamo=True,
        dynamic_shapes=tuple({0: rows} for _ in example),
        verbose=False,
    )
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def call(inputs: Sequence[torch.Tensor]) -> Arrays:
        found: Arrays = session.run(list(OUTPUTS), {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        return found

    return content, call


def _description(policy: GamePolicy, one: Policy) -> dict[str, Any]:
    """Inputs and outputs of a file."""
    view, layout = one.view, policy.game.layout
    obs = {"shape": ["rows", *view.obs_shape], "dtype": str(layout.observation.dtype)}
    inputs = {"obs": obs}
    if _has_mask(policy, one):
        inputs["action_mask"] = {"shape": ["rows", view.num_parameters], "dtype": "bool"}
    heads = [view.num_heads] if view.continuous or _has_heads(policy) else []
    what = "Q values" if isinstance(one, QPolicy) else "logits"
    discrete = f"{what}, head after head, before any mask"
    meaning = "means, then log standard deviations" if view.continuous else discrete
    return {
        "roles": list(view.roles),
        "inputs": inputs,
        "outputs": {
            "actions": {"shape": ["rows", *heads], "dtype": "float32" if view.continuous else "int32"},
            "parameters": {"shape": ["rows", view.num_parameters], "dtype": "float32", "meaning": meaning},
        },
        "action_space": str(layout.action.spaces[view.roles[0]]),
        "obs_parts": None if view.obs_parts is None else view.obs_parts.describe(),
        "squash": one.squash if view.continuous else None,
    }
