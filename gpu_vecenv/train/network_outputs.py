"""What one call of a network must do: take its arguments and leave them as they are, and return what a policy needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.policy import Policy, num_inputs

T = TypeVar("T")
OUTPUTS = ("parameters", "values", "the next state")
GRADIENT_ROWS = 32  # of which gradients are computed


def check_outputs(name: str, policy: Policy, obs: torch.Tensor) -> None:
    """Raise ConfigError unless the network takes the arguments of its kind and returns the outputs of its kind.

    Args:
        name: Name of the policy.
        policy: The policy.
        obs: (num_envs, num_agents, *shape), observations of all agents.
    """
    try:
        inspect.signature(policy.network.forward).bind(*("obs", "state")[: 2 if policy.acting_state_size else 1])
    except TypeError as error:
        raise ConfigError(
            f"the network of {name} has recurrent_state_size {policy.acting_state_size}, and its forward {error}; "
            "expected forward(obs), or recurrent_state_size = n and forward(obs, state)"
        ) from error
    except ValueError:
        pass  # a traced module has no signature
    with unchanged(policy):
        _checked_call(name, policy, policy.view.obs(obs))


def check_gradients(name: str, policy: Policy, obs: torch.Tensor) -> None:
    """Raise ConfigError unless the outputs depend on trainable weights; arguments as in ``check_outputs``.

    Values may depend on none, if all weights are of the parameters: such a network has no critic.
    """
    weights = {key: p for key, p in policy.network.named_parameters() if p.requires_grad}
    rows = policy.view.obs(obs)[:GRADIENT_ROWS]
    with unchanged(policy), torch.enable_grad():
        parameters, *others = _checked_call(name, policy, rows, " when it gets some of the rows")
        if not parameters.requires_grad:
            raise ConfigError(
                f"the network of {name} returns parameters that require no gradient; expected parameters that depend "
                "on its weights: no detach(), no torch.no_grad() in forward, no argmax; or PolicySpec(train=False)"
            )
        if policy.critic is not None or others[0].requires_grad:
            return
        gradients = torch.autograd.grad(parameters.sum(), list(weights.values()), allow_unused=True)
    unused = [key for key, gradient in zip(weights, gradients, strict=True) if gradient is None]
    if unused:
        raise ConfigError(
            f"the network of {name} returns values that require no gradient, and {unused} would not be trained; "
            "expected values that depend on the critic's weights, without detach(); or a network without a critic, "
            "which returns zeros"
        )


def call_of_user(name: str, policy: Policy, call: Callable[[], T], when: str = "") -> T:
    """What a function returns that calls the network; ConfigError if it raises, with what the network should take.

    Args:
        name: Name of the policy.
        policy: The policy.
        call: The function.
        when: What is special about the call, as " when it gets half of the rows".
    """
    try:
        return call()
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        size, device = policy.acting_state_size, policy.action_bounds.device
        elsewhere = [
            f" Its tensor {where} is on {found}, not on {device}: register_buffer or nn.Parameter lets it follow."
            for where, found in _tensors_elsewhere(policy)
        ]
        row = (num_inputs(policy.view, True),) if policy.agent_ids else policy.view.obs_shape
        shape = ", ".join(map(str, row))
        expected = f"forward(obs), observations (…, {shape}), to return {_listed(_expected(policy))}"
        if size:
            expected = (
                f"forward(obs, state), (rows, {shape}) and (rows, {size}), to return {_listed(_expected(policy))}. The "
                "first axis is that of independent rows, not time: nn.GRU and nn.LSTM need an axis of one time step, "
                "gru(obs[None], state[None]); nn.GRUCell and nn.LSTMCell take rows"
            )
        raise ConfigError(
            f"the network of {name}{f' has recurrent_state_size {size} and' * bool(size)} raises "
            f"{type(error).__name__}{when}: {error}; expected {expected}{''.join(elsewhere)}"
        ) from error


def _checked_call(name: str, policy: Policy, obs: torch.Tensor, when: str = "") -> list[torch.Tensor]:
    """What the network returns, if it is right, for observations of the policy's agents (num_envs, count, *obs_shape).

    ``when`` as in ``call_of_user``.
    """
    size, arguments, agents = policy.acting_state_size, {"observations": obs}, None
    if size:
        rows = obs.flatten(0, 1)
        agents = torch.arange(obs.shape[1], device=obs.device).repeat(len(obs))
        arguments = {"observations": rows, "state": torch.zeros((len(rows), size), device=obs.device)}
    versions = {key: x._version for key, x in arguments.items()}
    found = call_of_user(
        name, policy, lambda: policy.of_network(arguments["observations"], agents, arguments.get("state")), when
    )
    if written := [key for key, x in arguments.items() if x._version != versions[key]]:
        raise ConfigError(
            f"the network of {name} writes to its {' and '.join(written)}; expected new tensors, since the rollout "
            "keeps those that went in: no operation in place (obs *= 2, obs.clamp_()), or one on a clone()"
        )
    return _checked_outputs(name, policy, found, tuple(obs.shape[:2]), obs.device)


def _checked_outputs(
    name: str, policy: Policy, found: Any, rows: tuple[int, ...], device: torch.device
) -> list[torch.Tensor]:
    view, expected = policy.view, _expected(policy)
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    if len(outputs) != len(expected) or not all(isinstance(x, torch.Tensor) for x in outputs):
        hint = "; a network that returns a next state has recurrent_state_size = n, the numbers in the state of a row"
        alone = "the parameters of the distribution alone, a tensor, with critic='central'"
        raise ConfigError(
            f"the network of {name} returns {_listed([f'a {type(x).__name__}' for x in outputs])}; expected "
            f"{alone if len(expected) == 1 else f'{_listed(expected)}, tensors'}"
            f"{hint * (len(outputs) == len(OUTPUTS) > len(expected))}"
        )
    rows = (rows[0] * rows[1],) if policy.acting_state_size else rows
    of_each = zip(OUTPUTS, [(*rows, view.num_parameters), rows, (*rows, policy.acting_state_size)], strict=True)
    shapes = [shape for output, shape in of_each if output in expected]
    if [tuple(x.shape) for x in outputs] != shapes:
        raise ConfigError(
            f"the network of {name} returns shapes {[tuple(x.shape) for x in outputs]} for {math.prod(rows)} rows; "
            f"expected {_listed(expected)}: {shapes}"
        )
    for what, x in zip(expected, outputs, strict=True):
        if not x.is_floating_point():
            raise ConfigError(f"the network of {name} returns {what} in {x.dtype}; expected floating-point numbers")
        if x.device != device:
            raise ConfigError(
                f"the network of {name} returns {what} on {x.device}; expected {device}, where its observations are"
            )
    return outputs


def _expected(policy: Policy) -> tuple[str, ...]:
    """Names of the outputs that the network must return."""
    absent = {"values": policy.critic is not None, "the next state": not policy.acting_state_size}
    return tuple(output for output in OUTPUTS if not absent.get(output))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])


def _tensors_elsewhere(policy: Policy) -> Iterator[tuple[str, torch.device]]:
    """Name and device of tensors that the network keeps as plain attributes, which ``to(device)`` does not move."""
    for prefix, module in policy.network.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device != policy.action_bounds.device:
                yield f"{prefix}.{key}".removeprefix("."), value.device


@contextmanager
def unchanged(policy: Policy) -> Iterator[None]:
    """Without gradients; the buffers, such as running statistics, and torch's generators are as before afterwards.

    Meanwhile the policy does not use bfloat16, and on a GPU no product has partial sums in bfloat16.
    """
    buffers, device = {name: buffer.clone() for name, buffer in policy.named_buffers()}, policy.action_bounds.device
    matmul = torch.backends.cuda.matmul
    bfloat16, reduced_precision = policy.uses_bfloat16, matmul.allow_bf16_reduced_precision_reduction
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        try:
            policy.uses_bfloat16 = matmul.allow_bf16_reduced_precision_reduction = False
            yield
        finally:
            policy.uses_bfloat16, matmul.allow_bf16_reduced_precision_reduction = bfloat16, reduced_precision
            for name, buffer in policy.named_buffers():
                buffer.copy_(buffers[name])
