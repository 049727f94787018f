"""ParallelRing: one ring as a PettingZoo ParallelEnv that passes every check."""

import numpy as np
from gymnasium.error import ClosedEnvironmentError, InvalidAction, ResetNeeded
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from mutants.ring import CELLS, DISABLED, Ring

PLANTED_PARALLEL = {}  # name -> (the check that is meant to find it, class, its constructor's arguments)


def planted(check, **arguments):
    """Enter a bug into PLANTED_PARALLEL."""

    def enter(bug):
        assert bug.__name__ not in PLANTED_PARALLEL
        PLANTED_PARALLEL[bug.__name__] = check, bug, arguments
        return bug

    return enter


class ParallelRing(ParallelEnv):
    """Scouts observe four numbers; the last agent, a guard, two. An agent that reaches the goal leaves."""

    ring = Ring

    def __init__(self, agents=3, faster=False):
        self.world = self.ring(1, mode=DISABLED, agents=agents)
        self.possible_agents = [*(f"scout_{i}" for i in range(agents - 1)), "guard"]
        self.places = {agent: place for place, agent in enumerate(self.possible_agents)}
        self.metadata = {"name": "ring_v0", "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self.observation_spaces = {a: Box(-1, CELLS, (2 if a == "guard" else 4,)) for a in self.possible_agents}
        self.action_spaces = {agent: Discrete(3) for agent in self.possible_agents}
        self.state_space = Box(-1, CELLS, (4 * agents,))
        self.live = None

    @property
    def agents(self):
        if self.live is None:
            raise ResetNeeded("agents before reset")
        return list(self.live)

    def render(self):
        return self.world.render()[0]

    def observation_space(self, agent):
        return self.observation_spaces[agent]

    def action_space(self, agent):
        return self.action_spaces[agent]

    def reset(self, seed=None, options=None):
        obs, _ = self.world.reset(seed=seed)
        self.live = list(self.possible_agents)
        self.rows = obs
        return self.observations(self.live), {agent: {} for agent in self.live}

    def observations(self, agents):
        return {a: self.rows[self.places[a], : self.observation_spaces[a].shape[0]].copy() for a in agents}

    def step(self, actions):
        self.check_callable()
        before = list(self.live)
        moves = self.moves(self.checked(actions, before))
        self.rows, rewards, terminations, truncations, _ = self.world.step(moves)
        places = {agent: self.places[agent] for agent in before}
        ended = [agent for agent, i in places.items() if terminations[i] or truncations[i]]
        self.live = self.left(before, ended)
        arrays = rewards, terminations, truncations
        outputs = self.outputs(*({agent: array[i].item() for agent, i in places.items()} for array in arrays))
        return self.observations(before), *outputs, {agent: {} for agent in before}

    def moves(self, actions):
        """(agents,) int64, 1 for agents that have left."""
        return np.array([actions.get(agent, 1) for agent in self.possible_agents], np.int64)

    def left(self, before, ended):
        return [agent for agent in before if agent not in ended]

    def outputs(self, rewards, terminations, truncations):
        return rewards, terminations, truncations

    def check_callable(self):
        if self.world.closed:
            raise ClosedEnvironmentError("step after close")
        if self.live is None:
            raise ResetNeeded("step before reset")
        if not self.live:
            raise ResetNeeded("all agents have left")

    def checked(self, actions, live):
        if not isinstance(actions, dict):
            raise TypeError(f"actions are a {type(actions).__name__}; expected a dict")
        self.check_keys(set(actions), set(live))
        for agent, action in actions.items():
            if not self.valid(agent, action):
                raise InvalidAction(f"{agent}: {action!r}")
        return actions

    def check_keys(self, given, live):
        if given != live:
            raise KeyError(f"actions of {given}; expected those of {live}")

    def valid(self, agent, action):
        return self.action_spaces[agent].contains(action)

    def state(self):
        return self.world.observe().reshape(-1)

    def close(self):
        self.world.close()


class StatefulParallelRing(ParallelRing):
    """Offers its state."""

    names = ("keys", "draws", "cell", "last", "goal", "time", "active")

    def state_dict(self):
        return {name: getattr(self.world, name).copy() for name in self.names} | {"live": list(self.live)}

    def load_state_dict(self, state):
        for name in self.names:
            setattr(self.world, name, state[name].copy())
        self.live = list(state["live"])


class MaskedParallelRing(ParallelRing):
    """Forbids an agent one of the three moves at each cell, and refuses it."""

    def allowed(self, agent):
        mask = np.ones(3, np.int8)
        mask[self.world.cell[0, self.places[agent]] % 4 :][:1] = 0
        return mask

    def reset(self, seed=None, options=None):
        observations, infos = super().reset(seed, options)
        return observations, {agent: {"action_mask": self.allowed(agent)} for agent in infos}

    def valid(self, agent, action):
        return super().valid(agent, action) and bool(self.allowed(agent)[action])

    def step(self, actions):
        *outputs, infos = super().step(actions)
        return *outputs, {agent: {"action_mask": self.allowed(agent)} for agent in infos}
