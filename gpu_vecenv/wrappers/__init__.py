"""Gymnasium's vector wrappers for environments of torch tensors, on the device of the tensors.

Gymnasium's own fail on tensors or copy them to the host. Each class here has the name, arguments and meaning of its
namesake in ``gymnasium.wrappers.vector`` 1.4, or in ``gymnasium.wrappers`` where there is no vector version; its
docstring lists the differences, and says where it follows SuperSuit.

All wrappers

- support the three autoreset modes;
- compute on the device of the observations, and never synchronise with it in ``step``;
- never write to a tensor of the environment;
- accept every ``gymnasium.vector.VectorEnv`` that returns tensors: observations (num_envs, *shape), rewards,
  terminations and truncations (num_envs,), ``info`` a dict.

Wrappers with statistics or history cannot be captured in a CUDA graph. Gymnasium's own TransformReward,
TransformAction and ArrayConversion work on tensors too.

Two entries of ``info`` are used if present. ``final_obs`` (num_envs, *shape), in SAME_STEP mode, holds the last
observations of ended episodes, valid in the rows where ``_final_obs`` (num_envs,) bool is True; observation wrappers
transform it as well. ``active`` (num_envs,) bool marks the rows whose next action counts: a row that was inactive
before a step had no transition, and statistics skip it. Without ``active``, a row is inactive from the end of its
episode until its reset.
"""

from gpu_vecenv.wrappers.actions import ClipAction, RescaleAction, StickyAction
from gpu_vecenv.wrappers.history import DelayObservation, FrameStackObservation, MaxObservation
from gpu_vecenv.wrappers.images import GrayscaleObservation, ResizeObservation
from gpu_vecenv.wrappers.observations import (
    AgentIndicator,
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    RescaleObservation,
    ReshapeObservation,
    TransformObservation,
)
from gpu_vecenv.wrappers.rewards import ClipReward, NormalizeReward
from gpu_vecenv.wrappers.statistics import DictInfoToList, RecordEpisodeStatistics, RowInfos

__all__ = [
    "AgentIndicator",
    "ClipAction",
    "ClipReward",
    "DelayObservation",
    "DictInfoToList",
    "DtypeObservation",
    "FlattenObservation",
    "FrameStackObservation",
    "GrayscaleObservation",
    "MaxObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "RescaleObservation",
    "ReshapeObservation",
    "ResizeObservation",
    "RowInfos",
    "StickyAction",
    "TransformObservation",
]
