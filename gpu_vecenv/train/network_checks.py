"""What a network must do: give the shapes that its roles need, and treat rows, with their states, as independent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.recurrent import kept
from gpu_vecenv.train.role_view import RoleView

NUM_ROWS = 32  # that are compared: so few that leaving out half of them changes a mean over all by a lot
# A row's results may differ by rounding: the kernel of a matrix product, and with it the order of its sums, depends on
# the number of rows and on the position of a row. Policies are compared in float32. In a network that uses bfloat16
# itself, about one unit in 2^12 crosses a boundary of rounding, by 2^-8 of its value; over the units of a layer that is
# about 2^-14 of the output. A jump, such as that of an argmax, enlarges it in single rows. A network that mixes rows
# changes most of them, by more: an attention over almost equal rows by 2^-9.
TOLERANCE = 2.0**-10  # relative to the largest number of a column of the outputs,
FLOOR = 2.0**-10  # or to this part of the largest of all columns, where a column is what remains of larger numbers
MIN_FRACTION = 0.5  # of the rows differ where a network mixes them


def check_output_shapes(name: str, policy: Policy, obs: torch.Tensor) -> None:
    """Raise ConfigError unless the network returns parameters and values; ``obs`` (num_envs, num_agents, *shape)."""
    view, rows = policy.view, (len(obs), policy.view.num_agents)
    try:
        inspect.signature(policy.network.forward).bind(*("obs", "state")[: 2 if policy.recurrent_state_size else 1])
    except TypeError as error:
        raise ConfigError(
            f"the network of {name} has recurrent_state_size {policy.recurrent_state_size}, and its forward {error}; "
            "expected forward(obs), or recurrent_state_size = n and forward(obs, state)"
        ) from error
    with _unchanged(policy):
        if policy.recurrent_state_size:
            _check_recurrent_call(name, policy, view.obs(obs))
            return
        outputs = (policy.parameters_of(view.obs(obs)),) if policy.critic is not None else policy(view.obs(obs))
    found, expected = [tuple(x.shape) for x in outputs], [(*rows, view.num_parameters), rows]
    if found != expected[: len(found)]:
        what = "parameters" if policy.critic is not None else "parameters and values"
        raise ConfigError(f"the network of {name} returns shapes {found}; expected {what}: {expected[: len(found)]}")


def _check_recurrent_call(name: str, policy: Policy, obs: torch.Tensor) -> None:
    size = policy.recurrent_state_size
    try:
        policy(obs, torch.zeros((*obs.shape[:2], size), device=obs.device))
    except ConfigError:
        raise
    except Exception as error:
        rows = obs.shape[0] * obs.shape[1]
        raise ConfigError(
            f"the network of {name} has recurrent_state_size {size} and raises {type(error).__name__}: {error}; "
            f"expected forward(obs, state), {(rows, *policy.view.obs_shape)} and {(rows, size)}, to return parameters, "
            "values and the next state. The first axis is that of independent rows, not time: nn.GRU and nn.LSTM need "
            "an axis of one time step, gru(obs[None], state[None]); nn.GRUCell and nn.LSTMCell take rows"
        ) from error


def check_independent_rows(name: str, policy: Policy, obs: torch.Tensor) -> None:
    """Raise ConfigError if a network's output for a row depends on other rows, on their order, or on the call.

    Outputs of a recurrent one are the next states too, and may depend on the row's state. Its ``sequence``, if it has
    one, must give what its steps give.

    It would be trained on other outputs than those it acted by: rollouts have one row for each agent of each
    environment, updates take some of them in any order. What ``obs`` do not show, for example because all rows are
    equal, is not found. The network's buffers and the random generators do not change.

    Args:
        name: Name of the policy.
        policy: The policy.
        obs: (steps, num_envs, num_agents, *shape), observations of all agents.
    """
    rows, agents = _some_rows(policy.view, obs)
    count = len(rows)
    if count < 2:
        return
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(count, generator=generator).to(rows.device)
    states = torch.rand((count, policy.recurrent_state_size), generator=generator).to(rows.device) * 2 - 1
    all_rows, half = torch.arange(count, device=rows.device), max(count // 2, 2)
    calls = {
        "is called again: it draws random numbers or keeps some": all_rows,
        "gets the rows in another order": order,
        "gets half of the rows": all_rows[:half],
        "gets the rows along two leading axes": all_rows.unflatten(0, (-1, 2)),
    }
    with _unchanged(policy):
        expected = _outputs(policy, rows, agents, states)
        found = {what: (_outputs(policy, rows[k], agents[k], states[k]), k.flatten()) for what, k in calls.items()}
        if hasattr(policy.network, "sequence"):
            _check_sequence(name, policy, rows, agents, states)
    for what, (outputs, indices) in found.items():
        if _differ(outputs, [x[indices] for x in expected]):
            raise ConfigError(
                f"the network of {name} gives other outputs for a row when it {what}; expected outputs that depend on "
                "the row alone, whatever the leading axes. nn.LSTM and nn.GRU need an axis of one time step, "
                "lstm(obs.flatten(0, -2)[None]), attention an axis of each row's own entities; for batch normalisation "
                "use nn.LayerNorm, or call its eval(); leave out dropout. Memory goes in and out: "
                "recurrent_state_size = n, and forward(obs, state) that returns parameters, values and the next state"
            )


def _check_sequence(name: str, policy: Policy, rows: torch.Tensor, agents: torch.Tensor, states: torch.Tensor) -> None:
    """Raise ConfigError unless ``sequence`` gives what its steps give, here of three; the second one ends episodes."""
    active = torch.tensor([True, False, True], device=rows.device)[:, None].expand(3, len(rows))
    obs, state, expected = torch.stack([rows, rows.flip(0), rows]), states, list[list[torch.Tensor]]()
    for t in range(3):
        parameters, values, state = policy(obs[t], state, context=Context(agents=agents))
        state = kept(state, active[t])
        expected.append([parameters, values[:, None]])
    parameters, values = policy.sequence(obs, states, active, agents)
    shapes = [tuple(parameters.shape), tuple(values.shape)]
    wanted = [(3, *expected[0][0].shape), (3, len(rows))]
    if shapes != wanted or any(_differ([parameters[t], values[t][:, None]], expected[t]) for t in range(3)):
        raise ConfigError(
            f"the network of {name} gives other outputs for a sequence, {shapes}, than for its steps, {wanted}; "
            "expected sequence(obs, state, active) to give what forward(obs, state) gives step by step, with a state "
            "of 0 after each step in which active is False; or leave out sequence"
        )


def _some_rows(view: RoleView, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An even number of rows, at most NUM_ROWS, drawn from all steps, environments and agents of these roles, in order.

    Also the number of each row's agent among them.

    Equally spaced ones might all be of one agent.
    """
    own = obs[(slice(None), slice(None), view.agents, *view.obs_slice)]
    num_steps, num_envs, num_agents = own.shape[:3]
    total = num_steps * num_envs * num_agents
    count = min(NUM_ROWS, total) // 2 * 2
    index = torch.randint(max(total, 1), (count,), generator=torch.Generator().manual_seed(1)).sort().values
    index = index.to(obs.device)
    agents = index % num_agents
    return own[index // (num_envs * num_agents), index // num_agents % num_envs, agents], agents


def _outputs(policy: Policy, obs: torch.Tensor, agents: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Parameters (rows, n), values (rows, 1) if they are the network's, of a recurrent policy states (rows, size)."""
    if policy.critic is not None:
        return [policy.parameters_of(obs, agents).flatten(0, -2)]
    state = states if policy.recurrent_state_size else None
    parameters, values, *rest = policy(obs, state, context=Context(agents=agents))
    return [parameters.flatten(0, -2), values.flatten()[:, None], *(state.flatten(0, -2) for state in rest)]


def _differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether at least MIN_FRACTION of the rows differ by more than rounding; NaN equals NaN."""
    differing = torch.zeros(len(found[0]), dtype=torch.bool, device=found[0].device)
    for a, b in zip(found, expected, strict=True):
        largest = b.nan_to_num(0, 0, 0).abs().amax(0)
        close = (a - b).abs() <= TOLERANCE * largest.clamp(min=FLOOR * largest.amax())
        differing |= ~(close | (a == b) | (a.isnan() & b.isnan())).all(1)
    return bool(differing.float().mean() >= MIN_FRACTION)


@contextmanager
def _unchanged(policy: Policy) -> Iterator[None]:
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
