"""Which policies have networks that their configurations describe, so that a checkpoint is all they need."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from gpu_vecenv.train.central_critic import Tower
from gpu_vecenv.train.encoders import EncodedActorCritic
from gpu_vecenv.train.networks import ActorCritic
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.train.q_networks import QNetwork, RecurrentQNetwork
from gpu_vecenv.train.recurrent import RecurrentActorCritic, RecurrentTower

# load_policy makes them.
DEFAULT_NETWORKS = (
    ActorCritic,
    EncodedActorCritic,
    QNetwork,
    RecurrentActorCritic,
    RecurrentQNetwork,
    RecurrentTower,
    Tower,
)


def policies_with_own_networks(policies: Iterable[Policy]) -> list[Policy]:
    """Those with a module of the caller's, each once; ``load_policy`` needs it. Fixed policies have no network."""
    once = {id(policy): policy for policy in policies}.values()
    return [policy for policy in once if not isinstance(policy.network, (*DEFAULT_NETWORKS, nn.Identity))]
