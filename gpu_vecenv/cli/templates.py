"""The files that ``gpu-vecenv new`` writes: declaration, device code and test of a small game."""

from string import Template

DECLARATION = Template(
    '''\
"""Walkers and sprinters on a ring look for berries. The rules are in $name.cu, beside this file."""

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
    """Walkers and sprinters share a ring; whoever stands on the berry first is rewarded."""

    # The configuration. Each value is an option of the command line, an argument of make, and in the .cu file a
    # constant of the same name in capitals. A value outside [low, high] is refused.
    num_walkers: int = param(2, low=1)  # agents that move one cell a step
    num_sprinters: int = param(1, low=0)  # agents that move several
    length: int = param(24, low=2, high=1_000_000)  # cells of the ring
    speed: int = param(3, low=1, high=1_000_000)  # cells that a sprinter moves
    num_berries: int = param(5, low=1)  # found one after the other; then the episode ends
    max_steps: int = param(100, low=1)  # steps until the episode is truncated

    # What one replica holds between two steps: s.place[i], s.berry[0], s.left[0] in the .cu file, and here, of all
    # replicas, env.state["place"], a tensor (num_envs, num_agents).
    state = (
        Field("place", i32, ("num_agents",)),  # cell of each agent, in [0, length)
        Field("berry", i32),  # cell of the berry
        Field("left", i32),  # berries that are still to be found, this one included
    )
    termination_label = "all berries were found"

    @property
    def roles(self) -> Mapping[str, int]:
        """Agents are numbered role by role: sprinters from FIRST_SPRINTER to END_SPRINTER - 1 in the .cu file."""
        return {"walker": self.num_walkers, "sprinter": self.num_sprinters}

    @property
    def obs_dim(self) -> int:
        """Numbers that an agent sees; observe in the .cu file makes them."""
        return 4

    @property
    def action_space(self) -> Discrete:
        """Backwards, stay, forwards."""
        return Discrete(3)

    def draw(self, state: Mapping[str, Any]) -> Drawing:
        """What a replica looks like, for windows, films and replays; ``state`` has its fields as NumPy arrays."""

        def on_circle(cells: Any, radius: float) -> Any:
            angles = np.asarray(cells) * (2 * np.pi / self.length)
            return radius * np.stack([np.sin(angles), np.cos(angles)], axis=-1)

        ring = Line(on_circle(np.linspace(0, self.length, 100), 1.0), width=0.02, colour=GREY)
        berry = Circle(*on_circle(state["berry"], 1.0), radius=0.06, colour=GREEN)
        agents = []
        for i, cell in enumerate(state["place"]):  # each on a circle of its own, so that all are seen
            x, y = on_circle(cell, 0.9 - 0.5 * i / self.num_agents)
            agents.append(Circle(x, y, radius=0.04, colour=BLUE if i < self.num_walkers else RED, agent=i))
        return Drawing(bounds=(-1.2, 1.2, -1.2, 1.2), shapes=[ring, berry, *agents])


# Whoever imports this file can make the game by name, here and, as gpu_vecenv/$kind-v0, in Gymnasium.
gpu_vecenv.register($kind)


if __name__ == "__main__":
    env = gpu_vecenv.make("$name", num_envs=1000, length=30)  # on the GPU if there is one, else on the CPU
    env.reset(seed=1)
    for _ in range(200):
        obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
    totals = {name: tensor.sum().item() for name, tensor in env.episode_statistics().items()}
    print(f"{totals['episodes']} episodes of {totals['lengths'] / totals['episodes']:.1f} steps by random actions")
'''
)

RULES = Template(
    """\
// The rules of $kind, which $name.py declares. This text is compiled for the GPU and for the CPU.
//
// A threads_per_env of lanes runs one replica: FOR_AGENTS (i) shares the agents out over the lanes, group_sync() waits until all
// lanes have come there, ONCE { } is done by one lane only. On the CPU the threads_per_env is one thread and FOR_AGENTS a plain
// loop. What one lane wrote, another may read only after a group_sync().
#include "game_api.cuh"

struct Scratch {};  // working memory of one step, shared by the lanes: io.scratch; this game needs none

HD bool is_sprinter(int i) { return i >= FIRST_SPRINTER; }

// The cell that x, in [-LENGTH, 2 * LENGTH), is on the ring.
HD int on_ring(int x) { return (x + LENGTH) % LENGTH; }

// A new episode: every field of the state is written. Random numbers are functions of the seed, the replica, the
// episode and the step; the arguments tell the draws of one step apart: whose it is, and its number.
HD void reset(State s, Io io) {
    FOR_AGENTS (i) s.place[i] = io.rng.below(i, 0, LENGTH);
    ONCE {
        s.berry[0] = io.rng.below(NUM_AGENTS, 0, LENGTH);
        s.left[0] = NUM_BERRIES;
    }
}

// One step. Rewards are 0 and flags false at first. An agent is active until it is terminated (its future is worth
// nothing) or truncated (time ran out); here all end together, so that all are active.
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        int way = io.action(i) - 1;
        s.place[i] = on_ring(s.place[i] + way * (is_sprinter(i) ? SPEED % LENGTH : 1));
    }
    group_sync();  // below, lanes look at agents that other lanes have moved

    bool here = false;
    FOR_AGENTS (i) {
        bool first = s.place[i] == s.berry[0];
        here |= first;
        for (int j = 0; j < i; ++j) first &= s.place[j] != s.place[i];  // of several, the lowest number gets it
        io.rewards[i] = first ? 1.0f : 0.0f;
    }
    bool found = group_any(here);  // whether it holds on any lane
    group_sync();                  // all lanes have looked at the berry before it is moved
    ONCE {
        if (found) {
            s.berry[0] = io.rng.below(NUM_AGENTS, 0, LENGTH);
            s.left[0] -= 1;
        }
    }
    group_sync();

    FOR_AGENTS (i) {
        io.terminations[i] = s.left[0] == 0;
        io.truncations[i] = !io.terminations[i] && io.elapsed_steps >= MAX_STEPS;
    }
}

// What each agent sees of the state as it is.
HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        int way = on_ring(s.berry[0] - s.place[i]);  // forwards
        if (2 * way > LENGTH) way -= LENGTH;         // the shorter way, backwards
        io.obs[i][0] = (float)way / (float)LENGTH;
        io.obs[i][1] = is_sprinter(i);
        io.obs[i][2] = (float)s.left[0] / (float)NUM_BERRIES;
        io.obs[i][3] = (float)io.elapsed_steps / (float)MAX_STEPS;
    }
}
"""
)

TEST = Template(
    '''\
"""The rules once more, in NumPy, against those of $name.cu. Run by pytest."""

import numpy as np
import pytest
import torch
from gpu_vecenv import VecEnv
from gpu_vecenv.check.game import check_game

from $name import $kind

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
GAMES = {
    "as it is": $kind(),
    "crowded": $kind(num_walkers=7, num_sprinters=5, length=5, speed=2, num_berries=20, max_steps=15),
    "alone": $kind(num_walkers=1, num_sprinters=0, length=3, num_berries=1, max_steps=8),
}


class Rules:
    """One replica.

    Its random numbers are not repeated here: it starts where the game starts, and takes the cells that the game drew.
    Everything else must have the same bits, so that float32 is used where the game uses float.
    """

    def __init__(self, game: $kind) -> None:
        self.game = game
        self.speed = np.where(np.arange(game.num_agents) < game.num_walkers, 1, game.speed)

    def begin(self, state: dict[str, np.ndarray]) -> None:
        """A new episode."""
        self.place, self.berry, self.left, self.elapsed_steps = state["place"].copy(), state["berry"], self.game.num_berries, 0
        assert ((self.place >= 0) & (self.place < self.game.length)).all() and state["left"] == self.left

    def step(self, actions: np.ndarray, drawn: int) -> tuple[np.ndarray, bool, bool]:
        """One step; the next berry lies in the cell `drawn` if this one is found. Rewards, terminated, truncated."""
        game = self.game
        self.elapsed_steps += 1
        self.place = ((self.place + (actions - 1) * self.speed) % game.length).astype(np.int32)
        rewards = np.zeros(game.num_agents, np.float32)
        there = np.flatnonzero(self.place == self.berry)
        if len(there):
            rewards[there[0]] = 1
            self.left -= 1
            self.berry = drawn
        assert self.berry == drawn and 0 <= drawn < game.length
        return rewards, self.left == 0, self.left > 0 and self.elapsed_steps >= game.max_steps

    def observe(self) -> np.ndarray:
        """(num_agents, 4) float32."""
        game = self.game
        way = (self.berry - self.place) % game.length
        way = np.where(2 * way > game.length, way - game.length, way)
        numbers = np.zeros((game.num_agents, 4), np.float32)
        numbers[:, 0] = way.astype(np.float32) / np.float32(game.length)
        numbers[game.num_walkers :, 1] = 1
        numbers[:, 2] = np.float32(self.left) / np.float32(game.num_berries)
        numbers[:, 3] = np.float32(self.elapsed_steps) / np.float32(game.max_steps)
        return numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GAMES)
def test_every_tick_follows_the_rules(name: str, device: str) -> None:
    """Eight replicas, 300 steps."""
    game, num_envs, ends = GAMES[name], 8, np.zeros(2, int)
    env = VecEnv(game, num_envs, device, autoreset_mode="disabled")
    rules = [Rules(game) for _ in range(num_envs)]

    def states() -> list[dict[str, np.ndarray]]:
        host = {field: tensor.cpu().numpy() for field, tensor in env.state.items()}
        return [{field: array[e] for field, array in host.items()} for e in range(num_envs)]

    obs, _ = env.reset(seed=7)
    for replica, state in zip(rules, states(), strict=True):
        replica.begin(state)
    for _ in range(300):
        np.testing.assert_array_equal(obs.cpu().numpy(), [replica.observe() for replica in rules])
        actions = env.sample_actions()
        obs, rewards, terminations, truncations, info = env.step(actions)
        new = states()
        for e, (replica, state) in enumerate(zip(rules, new, strict=True)):
            expected, terminated, truncated = replica.step(actions[e].cpu().numpy(), int(state["berry"]))
            np.testing.assert_array_equal(rewards[e].cpu().numpy(), expected)
            np.testing.assert_array_equal(state["place"], replica.place)
            assert state["left"] == replica.left
            assert terminations[e].eq(terminated).all() and truncations[e].eq(truncated).all()
            ends += terminated, truncated
        ended = ~info["active"].any(1)
        if ended.any():
            np.testing.assert_array_equal(obs.cpu().numpy(), [replica.observe() for replica in rules])
            obs, _ = env.reset(mask=ended)
            for e in np.flatnonzero(ended.cpu()):
                rules[e].begin(states()[e])
    assert (env.faults() == 0).all()
    assert ends.sum() >= 300 // game.max_steps * num_envs


@pytest.mark.parametrize("device", DEVICES)
def test_it_keeps_the_promises_of_the_interface(device: str) -> None:
    """Seeds, episodes, arguments, in all autoreset modes; the same bits in any order of lanes, alone or among many."""
    check_game($kind(max_steps=20), device=device, steps=60).raise_for_failures()
'''
)
