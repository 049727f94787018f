"""What calls of a network must do: treat rows, with their states, as independent, in a rollout and in an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.network_outputs import call_of_user, unchanged
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
AGAIN = "is called again: it draws random numbers or keeps some"


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
    states = torch.rand((count, policy.acting_state_size), generator=generator).to(rows.device) * 2 - 1
    all_rows, half = torch.arange(count, device=rows.device), max(count // 2, 2)
    calls = {
        AGAIN: all_rows,
        "gets the rows in another order": order,
        "gets half of the rows": all_rows[:half],
        "gets the rows along two leading axes": all_rows.unflatten(0, (-1, 2)),
    }

    def called(what: str, k: torch.Tensor) -> list[torch.Tensor]:
        return call_of_user(name, policy, lambda: _outputs(policy, rows[k], agents[k], states[k]), f" when it {what}")

    with unchanged(policy):
        expected = called("gets some rows", all_rows)
        drawn_before = _generator_states(rows.device)
        found = {what: (called(what, k), k.flatten()) for what, k in calls.items()}
        draws = any(not a.equal(b) for a, b in zip(drawn_before, _generator_states(rows.device), strict=True))
        if policy.acting_state_size and hasattr(policy.network, "sequence"):
            call_of_user(name, policy, lambda: _check_sequence(name, policy, rows, agents, states), " in its sequence")
        again = _outputs_twice(name, policy, obs[0])
    for what, (outputs, indices) in found.items():
        if _differ(outputs, [x[indices] for x in expected]):
            raise _depends(name, what)
    if _differ(*again):
        raise _depends(name, AGAIN)
    if draws:
        raise ConfigError(
            f"the network of {name} draws random numbers; expected outputs that depend on the row alone: leave out "
            "dropout, or call its eval(), and noise; actions are drawn from the parameters that it returns"
        )


def _depends(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"the network of {name} gives other outputs for a row when it {what}; expected outputs that depend on the row "
        "alone, whatever the leading axes. nn.LSTM and nn.GRU need an axis of one time step, "
        "lstm(obs.flatten(0, -2)[None]), attention an axis of each row's own entities; for batch normalisation use "
        "nn.LayerNorm, or call its eval(); leave out dropout. Memory goes in and out: recurrent_state_size = n, and "
        "forward(obs, state) that returns parameters, values and the next state"
    )


def _outputs_twice(name: str, policy: Policy, obs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of two calls with all rows of a step (num_envs, num_agents, *shape), as a rollout makes them.

    A network that keeps a state of its own may do so only where it recognises a rollout by the number of rows.
    """
    own = policy.view.obs(obs)
    agents = torch.arange(own.shape[1], device=own.device).expand(own.shape[:2])
    states = torch.zeros((*own.shape[:2], policy.acting_state_size), device=own.device)
    first, second = (
        call_of_user(name, policy, lambda: _outputs(policy, own, agents, states), " in a rollout") for _ in range(2)
    )
    return second, first


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    """States of torch's generators that a network on the device may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _check_sequence(name: str, policy: Policy, rows: torch.Tensor, agents: torch.Tensor, states: torch.Tensor) -> None:
    """Raise ConfigError unless ``sequence`` gives what its steps give, here of three; the second one ends episodes."""
    active = torch.tensor([True, False, True], device=rows.device)[:, None].expand(3, len(rows))
    obs, state, expected = torch.stack([rows, rows.flip(0), rows]), states, list[list[torch.Tensor]]()
    for t in range(3):
        *outputs, state = _outputs(policy, obs[t], agents, state)
        state = kept(state, active[t])
        expected.append(outputs)
    context = Context(agents=agents.expand(3, -1))
    if policy.critic is None:
        parameters, *values = policy.sequence(obs, states, active, context=context)
    else:
        parameters, *values = policy.outputs_of_sequence(obs, states, active, context.agents)
    found = [parameters, *(x[..., None] for x in values)]
    shapes = [tuple(x.shape) for x in found]
    wanted = [(3, *x.shape) for x in expected[0]]
    if shapes != wanted or any(_differ([x[t] for x in found], expected[t]) for t in range(3)):
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
    """Parameters (rows, n), values (rows, 1) if they are the network's, of a recurrent network states (rows, size)."""
    state = states if policy.acting_state_size else None
    if policy.critic is not None:
        found = [x for x in policy.acting(obs, state, agents) if x is not None]
    else:
        parameters, values, *rest = policy(obs, state, context=Context(agents=agents))
        found = [parameters, values[..., None], *rest]
    return [x.flatten(0, -2) for x in found]


def _differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether at least MIN_FRACTION of the rows differ by more than rounding; NaN equals NaN."""
    differing = torch.zeros(len(found[0]), dtype=torch.bool, device=found[0].device)
    for a, b in zip(found, expected, strict=True):
        largest = b.nan_to_num(0, 0, 0).abs().amax(0)
        close = (a - b).abs() <= TOLERANCE * largest.clamp(min=FLOOR * largest.amax())
        differing |= ~(close | (a == b) | (a.isnan() & b.isnan())).all(1)
    return bool(differing.float().mean() >= MIN_FRACTION)
