"""Training of recurrent policies: their states in the rollout, and minibatches of sequences in place of samples.

Shapes: T steps, E environments, A agents, of which the policy has C; sequences have L steps and there are
S = T / L * E * C of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.central_critic import Context
from gpu_vecenv.train.env_ranges import EnvRanges, all_envs
from gpu_vecenv.train.gru import GruLayer, recurrent_cells, why_not_gru
from gpu_vecenv.train.layers import kernel_on
from gpu_vecenv.train.learner_kernels import RowGather, shuffle_launch
from gpu_vecenv.train.policy import Policy, Precision
from gpu_vecenv.train.recurrent import CellKernels, RecurrentCells, kept
from gpu_vecenv.train.recurrent_cells import CellLayer, why_not_cells
from gpu_vecenv.train.rollout_context import RolloutContext
from gpu_vecenv.train.rollout_storage import Rollout, TensorSpecs


def state_specs(
    num_steps: int, num_envs: int, num_agents: int, state_size: int, sequence_length: int | None
) -> TensorSpecs:
    """The tensors of ``RecurrentStates``, all that it allocates; estimates of its memory are of these."""
    shape = (num_envs, num_agents, state_size)
    sequences = num_steps // (num_steps if sequence_length is None else sequence_length)
    return {"current": (shape, torch.float32), "starts": ((sequences, *shape), torch.float32)}


class RecurrentStates:
    """The states of a recurrent policy in a rollout.

    An observation is processed with the state that the one before it left, or with 0 if it is the first of its episode.
    ``current`` (E, C, n) belongs to the next observation; at the end of an iteration that is row T, whose step the next
    iteration takes. ``starts`` (T / L, E, C, n) are those with which sequences begin. All are float32.

    Args:
        policy: The policy.
        rollout: Of its environment.
        sequence_length: L; None: T.
        precision: Of the matrix products.
        envs: The environments in which the policy acts, E in all; None: all of the rollout.

    Attributes:
        torch_reason: Why torch computes the recurrent layers, in a few words; None: kernels do.
        stepwise_reason: Why kernels, if they do, take a launch and a product of torch's for each step, in place of one
            launch for all; None: one launch.

    Raises:
        ConfigError: L does not divide T.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        sequence_length: int | None = None,
        precision: Precision = "float32",
        envs: EnvRanges | None = None,
    ) -> None:
        num_steps, num_envs, _ = rollout.rewards.shape
        num_envs = num_envs if envs is None else envs.num_envs
        self.sequence_length = num_steps if sequence_length is None else sequence_length
        if num_steps % self.sequence_length:
            raise ConfigError(
                f"sequence_length of {policy.view.name} is {sequence_length}; expected a divisor of "
                f"num_steps, {num_steps}"
            )
        specs = state_specs(num_steps, num_envs, policy.view.num_agents, policy.recurrent_state_size, sequence_length)
        self.current, self.starts = (
            torch.zeros(shape, dtype=dtype, device=rollout.rewards.device)
            for shape, dtype in (specs["current"], specs["starts"])
        )
        functions = rollout.env.functions
        self.torch_reason = why_not_cells(policy, functions)
        self.stepwise_reason = why_not_gru(recurrent_cells(policy), functions, precision)
        self._layers: dict[RecurrentCells, CellKernels] = {}
        if self.torch_reason is None:
            for cells in recurrent_cells(policy):
                self._layers[cells] = (
                    GruLayer(functions, cells.units, precision, cells.count)
                    if self.stepwise_reason is None
                    else CellLayer(functions, cells, precision)
                )
            kernel_on(rollout.rewards.device)  # of the layers in front; graphs cannot be captured while it compiles

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Let kernels compute the recurrent layers of the policy, where there are some."""
        before = {cells: cells.kernels for cells in self._layers}
        for cells, layer in self._layers.items():
            cells.kernels = layer
        try:
            yield
        finally:
            for cells, own in before.items():
                cells.kernels = own

    def begin_step(self, t: int) -> None:
        """Before the forward pass of step t."""
        if t % self.sequence_length == 0:
            self.starts[t // self.sequence_length].copy_(self.current)

    def end_step(self, state: torch.Tensor, active: torch.Tensor) -> None:
        """After it: take over the state (E, C, n) of agents that were ``active`` (E, C) before the step."""
        self.current.copy_(kept(state, active))


def first_samples(policy: Policy, rollout: Rollout, length: int, together: int, envs: EnvRanges) -> torch.Tensor:
    """Indices of the first samples of blocks of ``length`` steps of ``together`` agents, (T / L, E, C / together).

    E are the environments ``envs``.
    """
    data = rollout.rewards
    samples = envs.of(torch.arange(data.numel(), device=data.device).view_as(data), 1)
    return samples[::length, :, policy.view.agents][:, :, ::together]


def agents_together(policy: Policy, together: int) -> torch.Tensor:
    """What each of the first ``together`` agents adds to the index of the first one's sample, (together,) int64."""
    numbers = torch.tensor(policy.view.agent_numbers[:together], device=policy.action_bounds.device)
    return numbers - numbers[0]


def block_shuffle(
    rollout: Rollout,
    firsts: torch.Tensor,
    length: int,
    agents: torch.Tensor,
    seed: torch.Tensor,
    epoch: torch.Tensor,
    *,
    out: torch.Tensor,
    moments: torch.Tensor,
) -> Callable[[], None]:
    """What writes an order of blocks of samples and the moments of its minibatches, see ``shuffle_launch``.

    A minibatch has the first steps of all its blocks, then their second ones, and so on; agents of a block are side by
    side.

    Args:
        rollout: Has the samples.
        firsts: (blocks,) int64, from ``first_samples``.
        length: Steps of a block.
        agents: (together,) int64, what each agent of a block adds to the index of the first, from ``agents_together``.
        seed: (1,) int64, the bits of a uint64.
        epoch: (1,) int64, increased by 1.
        out: (blocks * length * together,) int64.
        moments: (num_minibatches, 4) float64.
    """
    functions, minibatches = rollout.env.functions, len(moments)
    permuted, samples = torch.empty_like(firsts), torch.empty_like(out)
    numbers = rollout.learned, rollout.advantages
    permute = shuffle_launch(
        functions,
        firsts,
        seed,
        epoch,
        *numbers,
        acting=rollout.acting,
        permutes=minibatches > 1,
        out=permuted,
        moments=torch.empty_like(moments),  # of first samples only
    )
    add_moments = shuffle_launch(
        functions,
        samples,
        seed,
        torch.zeros_like(epoch),
        *numbers,
        acting=rollout.acting,
        permutes=False,
        out=out,
        moments=moments,
    )
    steps = torch.arange(length, device=out.device) * rollout.rewards[0].numel()
    # What each sample of a block adds to the index of the first.
    offsets = steps[:, None, None] + agents
    of_minibatches = samples.view(minibatches, length, -1, len(agents))

    def shuffle() -> None:
        permute()
        torch.add(permuted.view(minibatches, 1, -1, 1), offsets, out=of_minibatches)
        add_moments()

    return shuffle


class Sequences:
    """The samples of a policy as sequences: L steps of one agent each, whose order in an epoch is permuted.

    With ``together`` those of several agents of one environment are permuted as one.

    ``order`` (T * E * C,) has the indices of the samples, minibatch after minibatch: first those of all its sequences'
    first steps, then those of the second ones, and so on.

    Args:
        policy: The policy, recurrent.
        rollout: Has the samples.
        states: Of the policy in the rollout.
        num_minibatches: Of an epoch.
        together: So many agents of an environment stay together, side by side: 1, or C.
        envs: The environments in which the policy acts, E in all; None: all of the rollout.

    Raises:
        ConfigError: The minibatches cannot have equal sizes.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        states: RecurrentStates,
        num_minibatches: int,
        together: int = 1,
        envs: EnvRanges | None = None,
    ) -> None:
        envs = envs or all_envs(rollout.env.num_envs)
        self._policy, self._rollout, self._states = policy, rollout, states
        self.length = states.sequence_length
        firsts = first_samples(policy, rollout, self.length, together, envs)
        if firsts.numel() % num_minibatches:
            raise ConfigError(
                f"num_minibatches is {num_minibatches}; expected a divisor of the number of sequences, num_steps / "
                f"sequence_length x num_envs x {'agents' if together == 1 else 'teams'} = "
                f"{' x '.join(map(str, firsts.shape))} = {firsts.numel()}"
            )
        self._firsts = firsts.flatten().contiguous()
        self._agents = agents_together(policy, together)
        # Of each agent of each environment its row among those of the policy.
        rows = envs.positions(rollout.rewards.shape[1]).to(rollout.rewards.device)
        self._start_rows = (rows[:, None] * policy.view.num_agents + policy.view.positions()).flatten()

    def shuffle(
        self, seed: torch.Tensor, epoch: torch.Tensor, *, out: torch.Tensor, moments: torch.Tensor
    ) -> Callable[[], None]:
        """What writes an epoch's order of the samples and the moments of its minibatches, see ``shuffle_launch``.

        Args:
            seed: (1,) int64, the bits of a uint64.
            epoch: (1,) int64, increased by 1.
            out: (T * E * C,) int64, the ``order``.
            moments: (num_minibatches, 4) float64.
        """
        blocks = self._firsts, self.length, self._agents
        return block_shuffle(self._rollout, *blocks, seed, epoch, out=out, moments=moments)

    def outputs(
        self, indices: torch.Tensor, chunk: int, gather: RowGather, context: RolloutContext
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        """A minibatch chunk by chunk: the indices of samples, and the policy's parameters and values for them.

        Args:
            indices: (rows,) int64, a minibatch in the ``order``.
            chunk: Sequences of a chunk.
            gather: Of the policy's observations.
            context: What its networks read beside them.
        """
        active = self._rollout.active[:-1].flatten()
        for part in indices.view(self.length, -1).split(chunk, 1):
            own = part.contiguous().flatten()
            obs = gather(own).unflatten(0, part.shape)
            of_part = Context(*(x if x is None else x.unflatten(0, part.shape) for x in context.of_samples(own)))
            starts, acted = self._starts(part[0]), active[own].view_as(part)
            with self._states.kernels():
                parameters, values = self._policy.sequence(obs, starts, acted, context=of_part)
            yield own, (parameters.flatten(0, 1), values.flatten())

    def _starts(self, firsts: torch.Tensor) -> torch.Tensor:
        """The states with which sequences begin, (n, state size), of the indices of their first samples (n,)."""
        # Samples count through (T, E, A); sequences begin at multiples of L steps. Starts are (T / L, E * C, n).
        rows, starts = self._start_rows, self._states.starts.flatten(1, 2)
        found: torch.Tensor = starts[firsts // (self.length * len(rows)), rows[firsts % len(rows)]]
        return found
