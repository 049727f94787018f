"""The files that ``gpu-vecenv new`` writes: declaration, device code and test of a small game."""

from string import Template

DECLARATION = Template(
    '''\
"""Agents on a ring collect berries. The rules are in $name.cu, in the same folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gpu_vecenv
import numpy as np
from gpu_vecenv.declare.drawing import BLUE, GREEN, GREY, RED, Circle, Drawing, Line
from gpu_vecenv.declare.env import Env, Field, i32, param
from gymnasium.spaces import Discrete


@dataclass(frozen=True, kw_only=True)
class $kind(Env):
    """Walkers and sprinters on a ring; the first agent on the berry is rewarded."""

    # The configuration. Each value is an option of the command line, an argument of make, and a constant of the same
    # name in capitals in the .cu file. Values outside [low, high] are an error.
    num_walkers: int = param(2, low=1)  # agents that move one cell per step
    num_sprinters: int = param(1, low=0)  # agents that move several cells
    length: int = param(24, low=2, high=1_000_000)  # cells of the ring
    speed: int = param(3, low=1, high=1_000_000)  # cells that a sprinter moves per step
    num_berries: int = param(5, low=1)  # collected one after the other; then the episode ends
    max_steps: int = param(100, low=1)  # steps until the episode is truncated

    # The state of one environment between steps: s.cell[i], s.berry[0], s.berries_left[0] in the .cu file. In Python,
    # env.state["cell"] is a tensor (num_envs, num_agents).
    state = (
        Field("cell", i32, ("num_agents",)),  # cell of each agent, in [0, length)
        Field("berry", i32),  # cell of the berry
        Field("berries_left", i32),  # berries to be collected, including this one
    )
    termination_label = "all berries were collected"

    @property
    def roles(self) -> Mapping[str, int]:
        """Agents are numbered by role: sprinters are FIRST_SPRINTER to END_SPRINTER - 1 in the .cu file."""
        return {"walker": self.num_walkers, "sprinter": self.num_sprinters}

    @property
    def obs_dim(self) -> int:
        """Size of an agent's observation, which observe in the .cu file computes."""
        return 4

    @property
    def action_space(self) -> Discrete:
        """Backwards, stay, forwards."""
        return Discrete(3)

    def draw(self, state: Mapping[str, Any]) -> Drawing:
        """One frame, for rendering and replays; ``state`` has the fields of one environment as NumPy arrays."""

        def on_circle(cells: Any, radius: float) -> Any:
            angles = np.asarray(cells) * (2 * np.pi / self.length)
            return radius * np.stack([np.sin(angles), np.cos(angles)], axis=-1)

        ring = Line(on_circle(np.linspace(0, self.length, 100), 1.0), width=0.02, colour=GREY)
        berry = Circle(*on_circle(state["berry"], 1.0), radius=0.06, colour=GREEN)
        agents = []
        for i, cell in enumerate(state["cell"]):  # each on its own circle, so that agents do not overlap
            x, y = on_circle(cell, 0.9 - 0.5 * i / self.num_agents)
            agents.append(Circle(x, y, radius=0.04, colour=BLUE if i < self.num_walkers else RED, agent=i))
        return Drawing(bounds=(-1.2, 1.2, -1.2, 1.2), shapes=[ring, berry, *agents])


# Importing this file registers the game: as $name, and in Gymnasium as gpu_vecenv/$kind-v0.
gpu_vecenv.register($kind)


if __name__ == "__main__":
    env = gpu_vecenv.make("$name", num_envs=1000, length=30)  # on the GPU if available, else on the CPU
    env.reset(seed=1)
    for _ in range(200):
        obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
    totals = {name: tensor.sum().item() for name, tensor in env.episode_statistics().items()}
    print(f"{totals['episodes']} episodes of {totals['lengths'] / totals['episodes']:.1f} steps with random actions")
'''
)

RULES = Template(
    """\
// The rules of $kind, declared in $name.py. This source is compiled for the GPU and for the CPU.
//
// A group of threads runs one environment: FOR_AGENTS (i) distributes the agents over the threads, group_sync() is a
// barrier of the group, ONCE { } runs on one thread only. On the CPU the group is one thread and FOR_AGENTS a plain
// loop. What one thread has written, another may read only after a group_sync().
#include "game_api.cuh"

struct Scratch {};  // io.scratch: memory of one step, shared by the group; this game needs none

HD bool is_sprinter(int i) { return i >= FIRST_SPRINTER; }

// The cell of position x, in [-LENGTH, 2 * LENGTH), on the ring.
HD int on_ring(int x) { return (x + LENGTH) % LENGTH; }

// Starts an episode and writes every field of the state. Random numbers are functions of the seed, the environment, the
// episode and the step; the first two arguments distinguish the samples of one step: agent, and number of the sample.
HD void reset(State s, Io io) {
    FOR_AGENTS (i) s.cell[i] = io.rng.below(i, 0, LENGTH);
    ONCE {
        s.berry[0] = io.rng.below(NUM_AGENTS, 0, LENGTH);
        s.berries_left[0] = NUM_BERRIES;
    }
}

// One step. Rewards are 0 and flags false at the start. An agent is active until it is terminated (its future has value
// 0) or truncated (at the time limit); in this game all agents end together.
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        int direction = io.action(i) - 1;
        s.cell[i] = on_ring(s.cell[i] + direction * (is_sprinter(i) ? SPEED % LENGTH : 1));
    }
    group_sync();  // below, threads read cells that other threads have written

    bool on_berry = false;
    FOR_AGENTS (i) {
        bool first = s.cell[i] == s.berry[0];
        on_berry |= first;
        for (int j = 0; j < i; ++j) first &= s.cell[j] != s.cell[i];  // the lowest number gets it
        io.rewards[i] = first ? 1.0f : 0.0f;
    }
    bool collected = group_any(on_berry);  // true if it is true on any thread
    group_sync();                          // all threads have read the berry's cell before it changes
    ONCE {
        if (collected) {
            s.berry[0] = io.rng.below(NUM_AGENTS, 0, LENGTH);
            s.berries_left[0] -= 1;
        }
    }
    group_sync();

    FOR_AGENTS (i) {
        io.terminations[i] = s.berries_left[0] == 0;
        io.truncations[i] = !io.terminations[i] && io.elapsed_steps >= MAX_STEPS;
    }
}

// Computes the observations of the current state.
HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        int distance = on_ring(s.berry[0] - s.cell[i]);  // forwards
        if (2 * distance > LENGTH) distance -= LENGTH;   // backwards, if that is shorter
        io.obs[i][0] = (float)distance / (float)LENGTH;
        io.obs[i][1] = is_sprinter(i);
        io.obs[i][2] = (float)s.berries_left[0] / (float)NUM_BERRIES;
        io.obs[i][3] = (float)io.elapsed_steps / (float)MAX_STEPS;
    }
}
"""
)

TEST = Template(
    '''\
"""Compares $name.cu with the same rules in NumPy. Run with pytest."""

import numpy as np
import pytest
import torch
from gpu_vecenv import VecEnv
from gpu_vecenv.check.game import check_game

from $name import $kind

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
GAMES = {
    "default": $kind(),
    "crowded": $kind(num_walkers=7, num_sprinters=5, length=5, speed=2, num_berries=20, max_steps=15),
    "alone": $kind(num_walkers=1, num_sprinters=0, length=3, num_berries=1, max_steps=8),
}


class Rules:
    """One environment.

    It does not generate random numbers: it copies the initial state and each new cell of the berry from the game.
    Everything else must be bitwise equal, so that it uses float32 where the game uses float.
    """

    def __init__(self, game: $kind) -> None:
        self.game = game
        self.speed = np.where(np.arange(game.num_agents) < game.num_walkers, 1, game.speed)

    def begin(self, state: dict[str, np.ndarray]) -> None:
        """Start an episode."""
        self.cell, self.berry = state["cell"].copy(), state["berry"]
        self.berries_left, self.elapsed_steps = self.game.num_berries, 0
        assert ((self.cell >= 0) & (self.cell < self.game.length)).all()
        assert state["berries_left"] == self.berries_left

    def step(self, actions: np.ndarray, next_berry: int) -> tuple[np.ndarray, bool, bool]:
        """One step: rewards, terminated, truncated. ``next_berry`` is the cell of the berry afterwards."""
        game = self.game
        self.elapsed_steps += 1
        self.cell = ((self.cell + (actions - 1) * self.speed) % game.length).astype(np.int32)
        rewards = np.zeros(game.num_agents, np.float32)
        on_berry = np.flatnonzero(self.cell == self.berry)
        if len(on_berry):
            rewards[on_berry[0]] = 1
            self.berries_left -= 1
            self.berry = next_berry
        assert self.berry == next_berry and 0 <= next_berry < game.length
        return rewards, self.berries_left == 0, self.berries_left > 0 and self.elapsed_steps >= game.max_steps

    def observe(self) -> np.ndarray:
        """(num_agents, 4) float32."""
        game = self.game
        distance = (self.berry - self.cell) % game.length
        distance = np.where(2 * distance > game.length, distance - game.length, distance)
        obs = np.zeros((game.num_agents, 4), np.float32)
        obs[:, 0] = distance.astype(np.float32) / np.float32(game.length)
        obs[game.num_walkers :, 1] = 1
        obs[:, 2] = np.float32(self.berries_left) / np.float32(game.num_berries)
        obs[:, 3] = np.float32(self.elapsed_steps) / np.float32(game.max_steps)
        return obs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GAMES)
def test_every_step_follows_the_rules(name: str, device: str) -> None:
    """Eight environments, 300 steps."""
    game, num_envs, ends = GAMES[name], 8, np.zeros(2, int)
    env = VecEnv(game, num_envs, device, autoreset_mode="disabled")
    rules = [Rules(game) for _ in range(num_envs)]

    def states() -> list[dict[str, np.ndarray]]:
        host = {field: tensor.cpu().numpy() for field, tensor in env.state.items()}
        return [{field: array[e] for field, array in host.items()} for e in range(num_envs)]

    obs, _ = env.reset(seed=7)
    for reference, state in zip(rules, states(), strict=True):
        reference.begin(state)
    for _ in range(300):
        np.testing.assert_array_equal(obs.cpu().numpy(), [reference.observe() for reference in rules])
        actions = env.sample_actions()
        obs, rewards, terminations, truncations, info = env.step(actions)
        new = states()
        for e, (reference, state) in enumerate(zip(rules, new, strict=True)):
            expected, terminated, truncated = reference.step(actions[e].cpu().numpy(), int(state["berry"]))
            np.testing.assert_array_equal(rewards[e].cpu().numpy(), expected)
            np.testing.assert_array_equal(state["cell"], reference.cell)
            assert state["berries_left"] == reference.berries_left
            assert terminations[e].eq(terminated).all() and truncations[e].eq(truncated).all()
            ends += terminated, truncated
        ended = ~info["active"].any(1)
        if ended.any():
            np.testing.assert_array_equal(obs.cpu().numpy(), [reference.observe() for reference in rules])
            obs, _ = env.reset(mask=ended)
            for e in np.flatnonzero(ended.cpu()):
                rules[e].begin(states()[e])
    assert (env.faults() == 0).all()
    assert ends.sum() >= 300 // game.max_steps * num_envs


@pytest.mark.parametrize("device", DEVICES)
def test_it_conforms_to_the_interfaces(device: str) -> None:
    """All autoreset modes; results do not depend on the order of threads or the number of environments."""
    check_game($kind(max_steps=20), device=device, steps=60).raise_for_failures()
'''
)
