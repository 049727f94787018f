"""One spinner: fields of all types and of several items, a shared table, two choices, draws in a step, large angles."""

from dataclasses import dataclass

from gymnasium.spaces import MultiDiscrete

from gpu_vecenv.declare.env import Env, Field, boolean, f32, f64, i32, i64, param, u8


@dataclass(frozen=True, kw_only=True)
class Spinner(Env):
    """Spins by the table's entry for its first choice; the second turns it round. It breaks by chance."""

    max_steps: int = param(15, low=1)

    state = (
        Field("angle", f32, (3,)),
        Field("turns", i64),
        Field("work", f64),
        Field("marks", u8, (2, 2)),
        Field("reversed", boolean),
        Field("last", i32),
        Field("speeds", f32, (4,), shared=True),
    )
    obs_dim = 5
    action_space = MultiDiscrete([4, 2])
