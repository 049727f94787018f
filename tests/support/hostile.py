"""Small games with one mistake each: a sound game whose statements are replaced."""

from dataclasses import dataclass
from pathlib import Path

from gymnasium.spaces import Discrete

from gpu_vecenv.declare.env import Env, Field, f32, i32, param

SOURCE = """#include "game_api.cuh"
struct Scratch { int spare; CheckedArray<int, 3> nearest; float heading[3]; };
HD void reset(State s, Io io) {
    FOR_AGENTS (i) { s.place[i][0] = io.rng.uniform(i, 0); s.place[i][1] = 0; }
    ONCE { s.goal[0] = (int)io.rng.below(9, 0, 3); }
}
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        s.place[i][1] = s.place[i][0];
        s.place[i][0] += 0.25f * (float)(io.action(i) - 1);
        io.rewards[i] = s.place[i][0];
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
    }
    //
}
HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.obs[i][0] = s.place[i][0];
        io.obs[i][1] = s.place[i][1];
        io.obs[i][2] = (float)s.goal[0];
    }
}
"""
MISTAKE_LINE = 14  # of "//", where most mistakes stand


@dataclass(frozen=True, kw_only=True)
class Walkers(Env):
    """Agents on a line, and a goal that they see."""

    num_walkers: int = param(3, low=1)
    max_steps: int = param(12, low=1)

    state = (Field("place", f32, ("num_agents", 2)), Field("goal", i32))
    obs_dim = 3
    action_space = Discrete(3)

    @property
    def roles(self):
        return {"walker": self.num_walkers}


def walkers(folder: Path, old: str = "//", new: str = "//", **declared) -> type[Env]:
    """Walkers with another statement in its rules, ``folder/walkers.cu``, and other class attributes."""
    assert SOURCE.count(old) == 1, old
    path = folder / "walkers.cu"
    path.write_text(SOURCE.replace(old, new))
    return type("Walkers", (Walkers,), {"source": path, "__module__": __name__, **declared})
