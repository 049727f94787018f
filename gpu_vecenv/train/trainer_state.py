"""Whether a checkpoint fits a trainer: the same run, the same tensors, finite numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.escapes import warn
from gpu_vecenv.train.checkpoint import digest_of
from gpu_vecenv.train.curriculum import Curriculum

EXTRA_MANIFEST_KEYS = ("progress", "rank")  # keys of a checkpoint's manifest that the trainer does not write


def digests_of_initial_states(env: VecEnv, curriculum: Curriculum | None) -> dict[str, str] | None:
    """Field -> SHA-256 of the initial states that an environment was made with, and that no schedule replaces."""
    scheduled = () if curriculum is None else curriculum.initial_states
    names = [name for name in env.build.initial_fields if name not in scheduled]
    return {name: digest_of(env.data[f"initial_{name}"].cpu().contiguous()) for name in names} or None


def check_fits(
    tensors: Mapping[str, torch.Tensor],
    manifest: Mapping[str, Any],
    own: Mapping[str, torch.Tensor],
    description: Mapping[str, Any],
    source: str,
) -> None:
    """Raise unless a trainer can resume from a checkpoint; warn where results may differ bitwise.

    Args:
        tensors: Of the checkpoint.
        manifest: Of the checkpoint, with all options.
        own: The trainer's tensors, from its ``state``.
        description: The trainer's description, likewise.
        source: The file, for messages.

    Raises:
        CheckpointCorruptError: ``iteration`` is no number, or weights are not finite.
        ConfigError: It is of another run, or its tensors have other names, shapes or dtypes.
    """
    expected = json.loads(json.dumps(description))  # JSON has lists, not tuples
    if type(manifest.get("iteration")) is not int or manifest["iteration"] < 0:
        raise CheckpointCorruptError(f"{source}: iteration is {manifest.get('iteration')!r}; expected an int >= 0")
    if "initial_states" not in manifest:  # of an older version
        expected.pop("initial_states")
    if differences := list(_differing(manifest, expected)):
        raise ConfigError(f"{source} is of a different run: {'; '.join(differences)}")
    shapes, found_shapes = (
        {name: (str(x.dtype), tuple(x.shape)) for name, x in sorted(state.items())} for state in (own, tensors)
    )
    if shapes != found_shapes:
        differing = {name: (found_shapes.get(name), shapes.get(name)) for name in {*shapes, *found_shapes}}
        raise ConfigError(
            f"tensors of {source} and of this trainer differ (name: file's, trainer's): "
            f"{ {name: pair for name, pair in sorted(differing.items()) if pair[0] != pair[1]} }"
        )
    bad = [n for n, x in tensors.items() if n.startswith(("policy", "optimizer")) and not bool(x.isfinite().all())]
    if bad:
        raise CheckpointCorruptError(
            f"{source} has NaN or infinite values in {', '.join(bad)}; use an older checkpoint"
        )
    made_with = manifest.get("made_with")
    made_with = made_with if isinstance(made_with, dict) else {}
    platform = {key: value for key, value in description["made_with"].items() if key != "gpu_vecenv"}
    if (before := {key: made_with.get(key) for key in platform}) != platform:
        warn(f"{source} was made with {before}, this is {platform}: results may differ bitwise", stacklevel=4)


def _differing(found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Differences that change results. ``total_steps`` may differ: a run may be extended."""
    ignored = {"iteration", "made_with", "total_steps", *(() if prefix else EXTRA_MANIFEST_KEYS)}
    for key in sorted({*found, *expected} - ignored):
        a, b = found.get(key), expected.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differing(a, b, f"{prefix}{key}.")
        elif json.dumps(a, default=repr) != json.dumps(b, default=repr):  # False is not 0, and 1 not 1.0
            yield f"its {prefix}{key} is {a!r}, this trainer's {b!r}"
