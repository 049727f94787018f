"""Trained policies as files for other programs, ONNX and TorchScript, each compared with the policy it comes from."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from gpu_vecenv.train.distributions import masked, mean_draws, squashed
from gpu_vecenv.train.fixed_policy import FixedPolicy
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.inference import InferencePolicy, RecurrentInferencePolicy
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.q_policy import QPolicy
from gpu_vecenv.train.recurrent import kept

FileFormat = Literal["onnx", "torchscript"]
SUFFIXES: dict[FileFormat, str] = {"onnx": ".onnx", "torchscript": ".pt"}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DESCRIPTION = "policy.json"
OUTPUTS = ("actions", "parameters", "next_state")  # the last one of recurrent policies
NUM_OBSERVATIONS = 1000  # by which a file is compared with its policy
NUM_STEPS = 20  # in which a recurrent one takes them
RESET_PROBABILITY = 1 / 8  # of a row before each of these steps
# Another runtime sums the products of a layer in another order and has functions of its own such as tanh: relative to
# the largest output this is far above what a few layers of rounding add up to, and far below what a policy acts by.
TOLERANCE = 1e-4
Inputs: TypeAlias = dict[str, torch.Tensor]  # by name, in the order of a file's inputs
Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
Call: TypeAlias = Callable[[Inputs], Arrays]


@dataclass(frozen=True)
class Exported:
    """A file of one policy.

    Attributes:
        path: The file.
        difference: The largest difference of its parameters and next states from the policy's, by the largest of these.
    """

    path: Path
    difference: float


def export(policy: GamePolicy, folder: Path, file_format: FileFormat) -> list[Exported]:
    """Write a file for each policy, and ``policy.json``, which describes games, roles, inputs and outputs.

    A file is written once its results for 1,000 observations are those of the policy; a recurrent one takes them in
    steps, each with the state that the one before left, or 0 where an episode begins. Policies without a network, such
    as random ones, have no file.

    Args:
        policy: As ``load_policy`` returns it.
        folder: Made if necessary; files in it are replaced.
        file_format: "onnx" or "torchscript".

    Raises:
        ConfigError: ONNX's packages are not installed.
        ExportError: A network cannot be exported or sees ``agent_ids``, or the file's results differ from the policy's.
    """
    if file_format == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ConfigError(f'ONNX files need {", ".join(missing)}: pip install "gpu_vecenv[onnx]"')
    own = {one.view.name: one for one in policy.policies.values() if not isinstance(one, FixedPolicy)}
    contents = {name: _exported(name, policy, one, file_format) for name, one in own.items()}
    files = []
    for name, (content, difference) in contents.items():
        path = folder / f"{name}{SUFFIXES[file_format]}"
        replace_file(path, content)
        files.append(Exported(path, difference))
    described = {
        "game": policy.game.name(),
        "version": policy.game.played_version,
        "config": policy.game.layout.config,
        "made_with": {"gpu_vecenv": __version__, "torch": str(torch.__version__)},
        "policies": {
            name: {"file": file.path.name, **_description(policy, own[name])}
            for name, file in zip(own, files, strict=True)
        },
    }
    replace_file(folder / DESCRIPTION, (json.dumps(described, indent=1) + "\n").encode())
    return files


def sample_inputs(policy: GamePolicy, one: Policy, count: int, seed: int = 0) -> Inputs:
    """Inputs of a file: observations (count, *obs_shape) from the role's space, states, and masks (count, n).

    States are of recurrent policies, (count, acting_state_size), and 0; masks are of games with masks. Where a
    policy normalises its observations, these are drawn with the mean and standard deviation that it has seen.
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
    inputs = {"obs": torch.from_numpy(drawn.astype(space.dtype))}
    if one.acting_state_size:
        inputs["state"] = torch.zeros(count, one.acting_state_size)
    if _has_mask(policy, one):
        allowed = generator.random((count, view.num_parameters)) < 0.5
        first = 0
        for size in view.head_sizes:  # every head has a choice
            allowed[np.arange(count), first + generator.integers(0, size, count)] = True
            first += size
        inputs["action_mask"] = torch.from_numpy(allowed)
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
    if one.agent_ids:
        raise ExportError(
            f"the policy of {name} has agent_ids; expected one that sees observations alone, or --format hub"
        )
    module = (RecurrentInferencePolicy if one.acting_state_size else InferencePolicy)(policy, one)
    inputs = sample_inputs(policy, one, NUM_OBSERVATIONS)
    write = _onnx if file_format == "onnx" else _torchscript
    try:
        with torch.no_grad(), _quiet():
            content, call = write(module, {key: x[:2] for key, x in inputs.items()})
            found, of_policy = _results(one, inputs, call)
    except Exception as error:  # an exporter raises errors of many kinds about a network that it cannot represent
        raise ExportError(
            f"the network of {name} cannot be exported as {file_format}: {type(error).__name__}: {error}"
        ) from error
    differences = [_check_equal(name, file_format, key, found[key], of_policy[key]) for key in of_policy]
    _check_actions(name, file_format, one, found["actions"], of_policy["parameters"], inputs.get("action_mask"))
    return content, max(differences)


def _results(one: Policy, inputs: Inputs, call: Call) -> tuple[Arrays, Arrays]:
    """What a file gives for ``inputs``, and what the policy does, without actions.

    A recurrent policy takes them in steps. File and policy begin each of these with the same state, the file's.
    """
    steps = list[tuple[Arrays, Arrays]]()
    generator = torch.Generator().manual_seed(0)
    for parts in zip(*(x.chunk(NUM_STEPS if one.acting_state_size else 1) for x in inputs.values()), strict=True):
        of_step = dict(zip(inputs, parts, strict=True))
        if "state" in of_step and steps:
            goes_on = torch.rand(len(of_step["state"]), generator=generator) >= RESET_PROBABILITY
            of_step["state"] = kept(torch.from_numpy(steps[-1][0]["next_state"]), goes_on)
        steps.append((call(of_step), _of_policy(one, of_step)))
    found, of_policy = (
        {key: np.concatenate([x[key] for x in side]) for key in side[0]} for side in zip(*steps, strict=True)
    )
    return found, of_policy


def _check_equal(
    name: str, file_format: FileFormat, key: str, found: np.ndarray[Any, Any], of_policy: np.ndarray[Any, Any]
) -> float:
    """The largest difference, relative to ``_scale``. Raises ExportError if it is too large."""
    difference = float(np.abs(found - of_policy).max()) / _scale(of_policy)
    if not difference <= TOLERANCE:
        raise ExportError(
            f"{file_format} file of {name}: {key} differ from the policy's by {difference:.1e} of the largest; "
            f"expected at most {TOLERANCE:.0e}"
        )
    return difference


def _scale(parameters: np.ndarray[Any, Any]) -> float:
    """To which differences are relative."""
    return max(float(np.abs(parameters).max()), 1.0)


@torch.no_grad()
def _of_policy(policy: Policy, inputs: Mapping[str, torch.Tensor]) -> Arrays:
    """Parameters and next state of the policy itself in float32, on its device."""
    bfloat16, device = policy.uses_bfloat16, policy.action_bounds.device
    try:
        policy.uses_bfloat16 = False
        parameters, next_state = policy.acting(*(inputs[key].to(device) for key in ("obs", "state") if key in inputs))
        found = {"parameters": parameters.cpu().numpy()}
        return found if next_state is None else found | {"next_state": next_state.cpu().numpy()}
    finally:
        policy.uses_bfloat16 = bfloat16


def _check_actions(
    name: str,
    file_format: FileFormat,
    policy: Policy,
    actions: np.ndarray[Any, Any],
    parameters: np.ndarray[Any, Any],
    action_mask: torch.Tensor | None,
) -> None:
    """Raise ExportError unless the actions are the most likely ones of ``parameters``, up to rounding."""
    of_policy = torch.from_numpy(parameters)
    scale = _scale(parameters)
    if policy.view.continuous:
        expected = squashed(mean_draws(of_policy, policy.squash), policy.action_bounds.cpu(), policy.squash).numpy()
        width = float((policy.action_bounds[1] - policy.action_bounds[0]).max())
        good = bool((np.abs(actions - expected) <= TOLERANCE * scale * width).all())
    else:
        heads = torch.from_numpy(actions).reshape(len(actions), -1).long()
        logits = masked(of_policy, action_mask).split(list(policy.view.head_sizes), -1)
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


def _torchscript(module: nn.Module, example: Inputs) -> tuple[bytes, Call]:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.freeze(torch.jit.trace(module.eval(), tuple(example.values()))), buffer)
    content = buffer.getvalue()
    loaded = torch.jit.load(io.BytesIO(content))

    def call(inputs: Inputs) -> Arrays:
        found = loaded(*inputs.values())
        return dict(zip(_outputs(example), (x.numpy() for x in found), strict=True))

    return content, call


def _onnx(module: nn.Module, example: Inputs) -> tuple[bytes, Call]:
    import onnxruntime

    rows, outputs = torch.export.Dim("rows", min=1), _outputs(example)
    program = torch.onnx.export(
        module.eval(),
        tuple(example.values()),
        input_names=list(example),
        output_names=outputs,
        dynamo=True,
        dynamic_shapes=tuple({0: rows} for _ in example),
        verbose=False,
    )
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def call(inputs: Inputs) -> Arrays:
        found = session.run(outputs, {name: x.numpy() for name, x in inputs.items()})
        return dict(zip(outputs, found, strict=True))

    return content, call


def _outputs(inputs: Inputs) -> tuple[str, ...]:
    """Names of the outputs of a file with these inputs."""
    return OUTPUTS if "state" in inputs else OUTPUTS[:-1]


def _description(policy: GamePolicy, one: Policy) -> dict[str, Any]:
    """Inputs, in the file's order, and outputs; "rows" is any number of them."""
    view, layout = one.view, policy.game.layout
    state = {"shape": ["rows", one.acting_state_size], "dtype": "float32"}
    inputs: dict[str, Any] = {"obs": {"shape": ["rows", *view.obs_shape], "dtype": str(layout.observation.dtype)}}
    if one.acting_state_size:
        inputs["state"] = {**state, "meaning": "next_state of the call before; 0 where obs is an episode's first"}
    if _has_mask(policy, one):
        inputs["action_mask"] = {"shape": ["rows", view.num_parameters], "dtype": "bool"}
    heads = [view.num_heads] if view.continuous or _has_heads(policy) else []
    what = "Q values" if isinstance(one, QPolicy) else "logits"
    meaning = f"{what}, head after head, before any mask"
    if view.continuous:
        beta = "numbers x, then numbers y: a Beta distribution with alpha = 1 + softplus(x), beta = 1 + softplus(y)"
        meaning = beta if one.squash == "beta" else "means, then log standard deviations"
    outputs: dict[str, Any] = {
        "actions": {"shape": ["rows", *heads], "dtype": "float32" if view.continuous else "int32"},
        "parameters": {"shape": ["rows", view.num_parameters], "dtype": "float32", "meaning": meaning},
    }
    if one.acting_state_size:
        outputs["next_state"] = state
    return {
        "roles": list(view.roles),
        "agents": [layout.agent_names[agent] for agent in view.agent_numbers],
        "inputs": inputs,
        "outputs": outputs,
        "recurrent_state_size": one.acting_state_size,
        "action_space": str(layout.action.spaces[view.roles[0]]),
        "obs_parts": None if view.obs_parts is None else view.obs_parts.describe(),
        "squash": one.squash if view.continuous else None,
    }
