"""Torch twins of those of Gymnasium's vector wrappers that fail on tensors, or take them off the device.

Each has the name, the arguments and the meaning of its namesake in ``gymnasium.wrappers.vector``, 1.4, or where that
has none, in ``gymnasium.wrappers``; differences are told in its docstring, also where it follows SuperSuit.

All work in the three autoreset modes, compute where ``reset`` returned the observations, never wait for the device in
``step``, and write into no tensor of the environment's; those with statistics or a memory cannot be captured in a CUDA
graph. They serve every ``gymnasium.vector.VectorEnv`` of tensors: observations (num_envs, *shape), rewards,
terminations and truncations (num_envs,), ``info`` a dict. Gymnasium's own TransformReward, TransformAction and
ArrayConversion do that as well.

``info`` may hold two things that matter here. ``final_obs`` (num_envs, *shape), in SAME_STEP mode, are the last
observations of ended episodes, in the rows where ``_final_obs`` (num_envs,) bool is True; observation wrappers
transform them too. ``active`` (num_envs,) bool says whose next action counts: a row that was not active before a step
has had no transition, and statistics pass over it. Without it, rows are inactive from an episode's end to the reset.
"""

from gpu_vecenv.wrappers.stateful import DelayObservation, FrameStackObservation, MaxObservation, StickyAction
from gpu_vecenv.wrappers.transforms import AgentIndicator, GrayscaleObservation, ResizeObservation
from gpu_vecenv.wrappers.vector import (
    ClipAction,
    ClipReward,
    DictInfoToList,
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    RescaleAction,
    RescaleObservation,
    ReshapeObservation,
    RowInfos,
    TransformObservation,
)

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
