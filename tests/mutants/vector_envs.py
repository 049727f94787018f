"""All planted bugs of vector environments, and the call of the checker that finds them.

``PLANTED`` is the data: name -> (check, class, its constructor's arguments).
"""

from gpu_vecenv import check_vector_env
from mutants import (  # noqa: F401 (each enters its bugs into PLANTED)
    vector_episodes,
    vector_equivalence,
    vector_frames_and_infos,
    vector_interface,
    vector_outputs,
    vector_resets,
    vector_seeds,
)
from mutants.ring import LIMIT, MODES, PLANTED, STEPS, Ring
from mutants.vector_graph import Counter

__all__ = ["PLANTED", "examined"]


def examined(kind, checks=None, steps=STEPS, seed=17, max_steps=LIMIT, **arguments):
    """Check a Ring or Counter class: against a plain Ring, in all modes, with the other output type."""

    def maker(kind=kind, **changes):
        return lambda num_envs: kind(num_envs, **{**arguments, **changes})

    further = {}
    if issubclass(kind, Ring):
        correct = next(base for base in kind.__mro__ if base.__module__ == Ring.__module__)
        other = {"numpy": "torch", "torch": "numpy"}[arguments.get("output", "numpy")]
        further = {
            "oracle": maker(correct),
            "modes": {mode.name.lower(): maker(mode=mode) for mode in MODES},
            "variants": {other: maker(output=other)},
        }
    elif issubclass(kind, Counter):
        further = {"graph": maker()}
    return check_vector_env(maker(), checks=checks, steps=steps, seed=seed, max_steps=max_steps, **further)
