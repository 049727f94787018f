"""Ring, a toy vector environment that passes every check; variants that do so too; and the table of planted bugs.

Agents walk on a ring of 16 cells towards their ring's goal; a random drift moves them as well. An agent that reaches
the goal terminates; after 12 steps an episode is truncated. Each environment is one ring, each of its agents a row.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from gymnasium.error import ClosedEnvironmentError, InvalidAction, ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.spaces import Dict as DictSpace
from gymnasium.spaces import Tuple as TupleSpace
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MODES = SAME, NEXT, DISABLED
CELLS, LIMIT = 16, 12
STEPS, LATE = 40, 120  # steps of a check; step at which late bugs occur
U64 = (1 << 64) - 1


def mixed(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): uint64 -> uint64, any shape."""
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Ring(VectorEnv):
    def __init__(self, num_envs, mode=SAME, output="numpy", agents=1, continuous=False, device="cpu"):
        self.device = device
        self.num_rings, self.agents, self.mode, self.output = num_envs, agents, mode, output
        self.num_envs = num_envs * agents
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self.single_observation_space = Box(-1, CELLS, (4,), np.float32)
        self.single_action_space = Box(-1, 1, (2,), np.float32) if continuous else Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        n = num_envs
        self.keys, self.draws = np.zeros(n, np.uint64), np.zeros(n, np.uint64)
        self.cell, self.last = np.zeros((n, agents), np.int64), np.zeros((n, agents), np.int64)
        self.goal, self.time = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.active = np.zeros((n, agents), np.bool_)
        self.elapsed_steps, self.begun = 0, False

    # ------------------------------------------------------------------ random streams

    def env_keys(self, seed):
        """One key per ring, distinct for every pair of seed and ring."""
        return mixed(mixed(seed & U64) ^ mixed(np.arange(self.num_rings) + (seed >> 64)) * np.uint64(3))

    def reseed(self, seed, chosen):
        self.keys = np.where(chosen, self.env_keys(seed), self.keys)
        self.draws[chosen] = 0

    def draw(self, chosen):
        """(num_rings,) uint64, one number per ring; only the streams of the chosen rings advance."""
        numbers = mixed(self.keys + mixed(self.draws))
        self.draws[chosen] += np.uint64(1)
        return numbers

    # ------------------------------------------------------------------ episodes

    def begin(self, chosen):
        numbers = self.draw(chosen)
        cells = (numbers[:, None] >> (np.arange(self.agents, dtype=np.uint64) * np.uint64(8))) % np.uint64(CELLS)
        self.cell = np.where(chosen[:, None], cells.astype(np.int64), self.cell)
        self.goal = np.where(chosen, (numbers >> np.uint64(32)).astype(np.int64) % CELLS, self.goal)
        self.last = np.where(chosen[:, None], 0, self.last)
        self.clear_clock(chosen)
        self.active |= chosen[:, None]

    def clear_clock(self, chosen):
        self.time[chosen] = 0

    def autoreset(self, chosen):
        self.begin(chosen)

    def reset(self, *, seed=None, options=None):
        if self.closed:
            raise ClosedEnvironmentError("reset after close")
        chosen = self.validate_mask(options)
        if seed is not None:
            self.reset_seed(self.validate_seed(seed), chosen)
        elif not self.begun:
            self.reseed(secrets.randbits(63), chosen)
        self.begin(chosen)
        self.begun = True
        return self.out(self.observe()), {}

    def reset_seed(self, seed, chosen):
        self.reseed(seed, chosen)

    def validate_seed(self, seed):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {seed!r}; expected an int")
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected 0 or more")
        return seed

    def validate_mask(self, options):
        """Rings to reset, (num_rings,) bool."""
        unknown = set(options or {}) - {"reset_mask"}
        if unknown:
            raise ValueError(f"unknown options {unknown}")
        if not options:
            return np.ones(self.num_rings, np.bool_)
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError("reset_mask: expected an array of bool")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask has shape {mask.shape}; expected ({self.num_envs},)")
        return mask.reshape(self.num_rings, self.agents).any(1)

    # ------------------------------------------------------------------ steps

    def step(self, actions):
        self.check_callable()
        moves = self.checked_moves(actions)
        self.elapsed_steps += 1
        resets = ~self.active.any(1) & (self.mode is NEXT)
        if self.mode is DISABLED and not self.active.any(1).all():
            raise ResetNeeded("a ring's episode has ended")
        before = self.active.copy()
        goes = before & ~resets[:, None]
        self.time[~resets] += 1
        self.move(goes, moves)
        arrived = goes & (self.cell == self.goal[:, None])
        timeout = (self.time >= self.limit())[:, None] & goes & ~arrived
        rewards = np.where(goes, np.where(arrived, 1.0, -0.1), 0.0)
        self.active &= ~(arrived | timeout)
        ends = ~self.active.any(1) & ~resets
        terminations = self.flagged_at_the_end(arrived, timeout, ends)
        info = {}
        self.after_moves(ends)
        if self.mode is SAME:
            info = self.final(ends)
            self.autoreset(self.environments_to_reset(ends))
        elif self.mode is NEXT:
            self.autoreset(self.environments_to_reset(resets))
        obs = self.observe()
        rewards, terminations, timeout = self.flags(rewards, terminations, timeout)
        outputs = [self.out(value) for value in (obs, rewards.reshape(-1), terminations, timeout)]
        return *outputs, {key: self.out(value) for key, value in info.items()}

    def check_callable(self):
        if self.closed:
            raise ClosedEnvironmentError("step after close")
        if not self.begun:
            raise ResetNeeded("step before reset")

    def checked_moves(self, actions):
        """(num_rings, agents) int64, -1, 0 or 1 cells."""
        wanted = np.ndarray if self.output == "numpy" else torch.Tensor
        if not isinstance(actions, wanted):
            raise TypeError(f"actions are a {type(actions).__name__}; expected {wanted.__name__}")
        space = self.action_space
        if getattr(actions, "requires_grad", False):
            raise TypeError("actions require a gradient")
        actions = np.asarray(actions if self.output == "numpy" else actions.cpu())
        if actions.dtype != space.dtype:
            raise TypeError(f"actions have dtype {actions.dtype}; expected {space.dtype}")
        if actions.shape != space.shape:
            raise ValueError(f"actions have shape {actions.shape}; expected {space.shape}")
        if not space.contains(actions):
            raise InvalidAction(f"actions {actions} are not in {space}")
        moves = np.rint(actions[:, 0]).astype(np.int64) if isinstance(space, Box) else actions - 1
        return moves.reshape(self.num_rings, self.agents)

    def move(self, goes, moves):
        drift = (self.draw(goes.any(1)) >> np.uint64(40)).astype(np.int64) % 3 - 1
        self.cell = np.where(goes, (self.cell + moves + drift[:, None]) % CELLS, self.cell)
        self.last = np.where(goes, moves, 0)

    def limit(self):
        return LIMIT

    def flagged_at_the_end(self, arrived, timeout, ends):
        """A row that ended before its ring terminates again with it."""
        return arrived | (ends[:, None] & ~timeout)

    def after_moves(self, ends):
        pass

    def flags(self, rewards, terminations, truncations):
        return rewards, terminations.reshape(-1), truncations.reshape(-1)

    def final(self, ends):
        if not ends.any():
            return {}
        return {"final_obs": self.observe(), "_final_obs": np.repeat(ends, self.agents)}

    def environments_to_reset(self, chosen):
        return chosen

    def observe(self):
        """(rows, 4) float32: cell, goal, time, last move; zeros for an agent that ended before its ring."""
        n = self.agents
        columns = [self.cell, np.repeat(self.goal[:, None], n, 1), np.repeat(self.time[:, None], n, 1), self.last]
        rows = np.stack(columns, -1).astype(np.float32)
        gone = ~self.active & self.active.any(1)[:, None]
        rows[gone] = 0
        return rows.reshape(self.num_envs, 4)

    def render(self):
        """A frame (1, CELLS, 3) uint8 of each ring: the goal is blue, agents are red."""
        frames = np.zeros((self.num_rings, 1, CELLS, 3), np.uint8)
        frames[np.arange(self.num_rings), 0, self.goal, 2] = 255
        frames[np.arange(self.num_rings)[:, None], 0, self.cell, 0] = 255
        return tuple(frames)

    def out(self, array):
        return torch.as_tensor(array).to(self.device) if self.output == "torch" else array


class MaskedRing(Ring):
    """Forbids one of the three moves at each cell and raises InvalidAction for it."""

    def allowed(self):
        return np.arange(3) != (self.cell.reshape(-1, 1) % 4)

    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        return obs, info | {"action_mask": self.out(self.allowed())}

    def step(self, actions):
        self.check_callable()
        self.checked_moves(actions)
        if self.active.all() and not self.allowed()[np.arange(self.num_envs), np.asarray(actions)].all():
            raise InvalidAction("a forbidden move")
        *outputs, info = super().step(actions)
        return *outputs, info | {"action_mask": self.out(self.allowed())}


class NestedRing(Ring):
    """Observations in a dict and a tuple; final observations row by row, as SyncVectorEnv gives them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        two = Box(-1, CELLS, (2,), np.float32)
        self.single_observation_space = DictSpace({"place": two, "rest": TupleSpace((two, Box(-1, CELLS, (1,))))})
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def nested(self, obs):
        return {"place": obs[..., :2], "rest": (obs[..., 2:], obs[..., :1] * 1)}

    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        return self.nested(obs), info

    def step(self, actions):
        obs, *outputs, info = super().step(actions)
        if "final_obs" in info:
            final = np.full(self.num_envs, None, object)
            for row in np.flatnonzero(info["_final_obs"]):
                final[row] = self.nested(info["final_obs"][row])
            info["final_obs"] = final
        return self.nested(obs), *outputs, info


class StatisticsRing(Ring):
    """Has one agent, and infos: its cell, and return and length of ended episodes; in same-step mode in final_info."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.returns, self.lengths = np.zeros(self.num_rings), np.zeros(self.num_rings, np.int64)
        self.over = np.zeros(self.num_rings, np.bool_)  # ended in the last step

    def cell_info(self):
        return {"cell": self.cell.reshape(-1) * 1}

    def clear(self, chosen):
        self.returns, self.lengths = np.where(chosen, 0.0, self.returns), np.where(chosen, 0, self.lengths)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        chosen = self.validate_mask(options)
        self.clear(chosen)
        self.over &= ~chosen
        return obs, info | self.cell_info()

    def after_moves(self, ends):
        self.last_info = self.cell_info()

    def step(self, actions):
        *outputs, info = super().step(actions)
        rewards, terminations, truncations = map(np.asarray, outputs[1:])
        self.clear(self.over)
        self.count(rewards, self.over & (self.mode is NEXT))
        self.over = terminations | truncations
        over, ended = self.over.copy(), {}
        if over.any():
            ended = {
                "episode": {"r": self.returns * 1, "l": self.lengths * 1, "_r": over, "_l": over},
                "_episode": over,
            }
            if self.mode is SAME:
                ended = {"final_info": self.final_info(self.last_info, ended), "_final_info": over * 1 > 0}
        return *outputs, info | self.cell_info() | ended

    def count(self, rewards, resetting):
        self.returns, self.lengths = self.returns + rewards, self.lengths + ~resetting

    def final_info(self, last, statistics):
        return last | statistics


class StillRing(Ring):
    """Deterministic: one start, no drift; seeds and rings make no difference."""

    def draw(self, chosen):
        return np.full(self.num_rings, 5 + (3 << 32), np.uint64)


class GarbageWhereTheMaskIsFalse(Ring):
    """Rows of final_obs outside the mask differ from run to run."""

    def final(self, ends):
        garbage = np.full((self.num_envs, 4), secrets.randbelow(1000), np.float32)
        mask = np.repeat(ends, self.agents)
        return {"final_obs": np.where(mask[:, None], self.observe(), garbage), "_final_obs": mask}


class BothFlagsRing(Ring):
    """A ring that terminates in the step of its limit is truncated as well."""

    def move(self, goes, moves):
        super().move(goes, moves)
        self.timed_out = np.repeat(self.time >= self.limit(), self.agents)

    def flags(self, rewards, terminations, truncations):
        rewards, terminations, truncations = super().flags(rewards, terminations, truncations)
        return rewards, terminations, truncations | (terminations & self.timed_out)


class AnyIntegerRing(Ring):
    """Takes NumPy's integers as seeds, and actions of any integer type."""

    def validate_seed(self, seed):
        return super().validate_seed(int(seed) if isinstance(seed, np.integer) else seed)

    def checked_moves(self, actions):
        whole = isinstance(actions, np.ndarray) and actions.dtype == np.int32
        return super().checked_moves(actions.astype(np.int64) if whole else actions)


class DictActionRing(Ring):
    """Actions are dictionaries: {"move": 0, 1 or 2, "rest": (a number that does nothing,)}."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.single_action_space = DictSpace({"move": Discrete(3), "rest": TupleSpace((Box(-1, 1, (1,)),))})
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def checked_moves(self, actions):
        if not isinstance(actions, dict) or set(actions) != {"move", "rest"} or len(actions["rest"]) != 1:
            raise TypeError(f"actions are {actions}; expected those of {self.action_space}")
        spaces, parts = (self.action_space["move"], self.action_space["rest"][0]), (actions["move"], actions["rest"][0])
        for space, part in zip(spaces, parts, strict=True):
            if not isinstance(part, np.ndarray | torch.Tensor) or not (
                np.asarray(part).dtype == space.dtype and space.contains(np.asarray(part))
            ):
                raise InvalidAction(f"actions {part} are not in {space}")
        return (np.asarray(actions["move"]) - 1).reshape(self.num_rings, self.agents)


class LeavingRowsBringFinalObservations(Ring):
    """A row that ends before its ring also has its last observation in final_obs."""

    def after_moves(self, ends):
        self.leaving = (self.cell == self.goal[:, None]) & ~self.gone
        self.gone = ~self.active & self.active.any(1)[:, None]

    def begin(self, chosen):
        super().begin(chosen)
        self.gone = ~self.active & self.active.any(1)[:, None]

    def final(self, ends):
        mask = np.repeat(ends, self.agents) | self.leaving.reshape(-1)
        return {"final_obs": self.observe(), "_final_obs": mask}


class StatefulRing(Ring):
    """Has ``state``, live arrays, and ``state_dict``, copies of them."""

    names = ("keys", "draws", "cell", "last", "goal", "time", "active")

    @property
    def state(self):
        return {name: getattr(self, name) for name in self.names}

    def state_dict(self):
        return {name: array.copy() for name, array in self.state.items()}

    def load_state_dict(self, state):
        for name, array in self.state.items():
            array[...] = state[name]


class PermutableRing(StatefulRing):
    """Declares its agents permutable."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metadata["permutable_agents"] = [list(range(self.agents))]


PLANTED = {}  # name -> (the check that is meant to find it, class, its constructor's arguments)


def planted(check, **arguments):
    """Register a bug in PLANTED."""

    def enter(bug):
        assert bug.__name__ not in PLANTED
        PLANTED[bug.__name__] = check, bug, arguments
        return bug

    return enter
