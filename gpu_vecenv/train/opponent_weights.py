"""Weights of opponents: snapshots of a policy as rows of a tensor, and copies of the policy that act with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.kept_tensors import row_width
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy


def _tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """Of a policy's ``state_dict``, without gradients; parameters first, in their order."""
    tensors = {name: p.detach() for name, p in policy.named_parameters()}
    return tensors | {name: x for name, x in policy.state_dict().items() if name not in tensors}


class _Acting(nn.Module):
    """``Policy.acting`` of a policy without memory as the ``forward`` of a module, which ``functional_call`` needs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy.acting(obs)[0]


class Snapshots:
    """Snapshots of one policy: all tensors of its ``state_dict``, those of a dtype one after the other in a row.

    Attributes:
        rows: Name of a dtype -> (num_snapshots, n), weights and statistics.
        all_actors: Observations (num_actors, envs, n, *obs_shape), to each actor its own, -> parameters (num_actors,
            envs, n, outputs) as of ``Policy.acting``, by batched matrix products: each alone would be too small for a
            GPU. None: not a default perceptron.

    Args:
        policy: The policy.
        num_snapshots: Rows.
        num_actors: Copies that act, each with the weights of one snapshot.

    Raises:
        ConfigError: The policy's network cannot be copied.
    """

    def __init__(self, policy: Policy, num_snapshots: int, num_actors: int) -> None:
        self.policy = policy
        self._places: dict[str, list[tuple[str, int, int]]] = {}  # dtype -> name, first element, elements
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, tensor in _tensors(policy).items():
            key = str(tensor.dtype).removeprefix("torch.")
            first = sizes.get(key, 0)
            self._places.setdefault(key, []).append((name, first, tensor.numel()))
            # Parameters follow each other without gaps; only rows are aligned.
            sizes[key], dtypes[key] = first + tensor.numel(), tensor.dtype
        self.rows: dict[str, torch.Tensor] = {}
        self._acting: dict[str, torch.Tensor] = {}
        device = next(iter(_tensors(policy).values())).device
        for key, size in sizes.items():
            width = row_width(size, dtypes[key])
            self.rows[key] = torch.zeros((num_snapshots, width), dtype=dtypes[key], device=device)
            self._acting[key] = torch.zeros((num_actors, width), dtype=dtypes[key], device=device)
        self.actors = [self._actor(number) for number in range(num_actors)]
        self.all_actors = self._all_actors()

    def stride_of(self, dtype: str) -> int:
        """Elements of this dtype from one actor's tensors to those of the next; 0 without any."""
        return self._acting[dtype].stride(0) if dtype in self._acting else 0

    @property
    def first_parameters(self) -> torch.Tensor:
        """The parameters of the first actor, float32, one after the other, (n,)."""
        count = sum(p.numel() for p in self.policy.parameters())
        return self._acting["float32"][0, :count]

    def _actor(self, number: int) -> Policy:
        """A copy of the policy whose tensors are parts of a row."""
        try:
            actor = copy.deepcopy(self.policy)
        except Exception as error:  # a network of the user's may raise anything
            raise ConfigError(
                f"the policy of {self.policy.view.name} cannot be copied for opponents: {type(error).__name__}: "
                f"{error}; expected a network that copy.deepcopy copies"
            ) from error
        own: dict[str, torch.Tensor] = {**dict(actor.named_parameters()), **actor.state_dict(keep_vars=True)}
        for key, places in self._places.items():
            for name, first, size in places:
                tensor = own[name]
                tensor.data = self._acting[key][number, first : first + size].view(tensor.shape)
        return actor

    def _all_actors(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """See ``all_actors``."""
        network = self.policy.network
        if not isinstance(network, ActorCritic) or not network.is_plain() or self.policy.critic is not None:
            return None
        shapes = {name: tensor.shape for name, tensor in _tensors(self.policy).items()}
        weights = {
            f"policy.{name}": self._acting[key][:, first : first + size].view(-1, *shapes[name])
            for key, places in self._places.items()
            for name, first, size in places
        }
        acting = _Acting(self.actors[0])
        act = torch.func.vmap(lambda own, obs: torch.func.functional_call(acting, own, (obs,)))
        return lambda obs: act(weights, obs)

    def take(self, slot: torch.Tensor, takes: torch.Tensor) -> None:
        """Write the policy's present weights to the row ``slot`` (1,) int64 where ``takes`` (1,) bool is True."""
        own = _tensors(self.policy)
        for key, places in self._places.items():
            rows = self.rows[key]
            present = torch.cat([own[name].flatten() for name, _, _ in places])
            row = rows.index_select(0, slot)
            row[:, : len(present)] = torch.where(takes[:, None], present, row[:, : len(present)])
            rows.index_copy_(0, slot, row)

    def give(self, slots: torch.Tensor, evenly: torch.Tensor) -> None:
        """Give each actor the weights of a snapshot; to those that choose ``evenly`` zeros, a perceptron's even choice.

        Args:
            slots: (num_actors,) int64.
            evenly: (num_actors,) bool.
        """
        for key, rows in self.rows.items():
            torch.index_select(rows, 0, slots, out=self._acting[key])
        if "float32" in self._acting:
            self._acting["float32"].masked_fill_(evenly[:, None], 0)
