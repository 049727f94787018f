"""``--schedules`` of ``gpu-vecenv train``: a curriculum from a Python file, or from JSON."""

from __future__ import annotations

import json

from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.importing import absolute, imported
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.curriculum import Curriculum

EXAMPLE = '{"config": {"clip": [[0, 0.2], [1, 0.1]]}}'


def curriculum_of(text: str | None) -> Curriculum | None:
    """The curriculum that ``--schedules`` names.

    Args:
        text: ``module:name`` or ``file.py:name`` of a ``Curriculum``, or of a function without arguments that returns
            one. Or JSON, by kind and name the points of a ``PiecewiseLinear``, such as
            ``{"config": {"clip": [[0, 0.2], [1, 0.1]]}}``. None: there is none.

    Raises:
        ConfigError: It is neither, or the function fails.
    """
    if text is None:
        return None
    if _is_json(text):
        return _of_json(text)
    found = imported("schedules", text)
    if not isinstance(found, Curriculum) and callable(found):
        try:
            found = found()
        except Exception as error:  # a function of the user's may raise anything
            raise ConfigError(f"schedules is {text!r}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Curriculum):
        raise ConfigError(
            f"schedules is {text!r}, which gives a {type(found).__name__}; expected a Curriculum, or a function "
            "without arguments that returns one"
        )
    return found


def preset_schedules(game: type[Env]) -> str | None:
    """``--schedules`` of a game's presets, as JSON; None where they have none."""
    return (
        json.dumps({kind: dict(own) for kind, own in game.preset_schedules.items()}) if game.preset_schedules else None
    )


def stored_curriculum(text: str | None) -> str | None:
    """``--schedules`` as settings have it: files with their whole path."""
    return text if text is None or _is_json(text) else absolute(text)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def _of_json(text: str) -> Curriculum:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"schedules is {text!r}; expected JSON like {EXAMPLE}: {error}") from None
    if not all(isinstance(targets, dict) for targets in given.values()):
        raise ConfigError(f"schedules is {text!r}; expected JSON like {EXAMPLE}")
    return Curriculum.of_points(given)
