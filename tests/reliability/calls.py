"""Wrong calls at random: each is refused by its documented error, and nothing changes."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import random
import tempfile
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium.error
import numpy as np
import torch
from games.crew import Crew

import gpu_vecenv
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import (
    AgentKeyError,
    CheckpointCorruptError,
    ConfigError,
    InvalidActionError,
    InvalidSeedError,
    ResetNeededError,
    UnknownGameError,
)
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from reliability.experiment import Experiment, Metrics, said

MAX_CHARACTERS = 6000  # of an error message
Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True)
class Bad:
    """A wrong call, the errors of which it must raise one, and words that the message must contain."""

    name: str
    call: Callable[[], object]
    errors: Errors
    words: Sequence[str] = ()


def all_bits(*values: Any) -> bytes:
    """All bits of outputs, except the rows of "final_obs" outside of their mask, which are unspecified."""
    parts = []
    for value in values:
        if isinstance(value, Mapping):
            parts.append(all_bits(*(x for pair in sorted(value.items()) if pair[0] != "final_obs" for x in pair)))
        elif isinstance(value, tuple | list):
            parts.append(all_bits(*value))
        elif isinstance(value, torch.Tensor):
            parts.append(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            parts.append(value.tobytes())
        else:
            parts.append(repr(value).encode())
    return b"|".join(parts)


# ---------------------------------------------------------------------- wrong values


def no_seed(rng: random.Random) -> Any:
    wrong = [-1, 2**64, 1.5, "7", True, np.float64(3), np.bool_(True), [1, 2], (), b"7", np.arange(3), 3j, math.nan, {}]
    wrong += [-rng.randrange(1, 2**70), 2**64 + rng.randrange(2**70), torch.tensor(3), rng.random(), str(rng.random())]
    return rng.choice(wrong)


def bad_seed(rng: random.Random, call: Callable[..., object]) -> Bad:
    seed, error = no_seed(rng), rng.choice([InvalidSeedError, gymnasium.error.Error, ValueError])
    return Bad("seed", lambda: call(seed=seed), error, ["reset: seed ", "expected "])


def other_shape(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another small shape; often one that broadcasts to this one, or has as many elements."""
    while True:
        wrong = list(shape)
        for _ in range(rng.randrange(1, 3)):
            match rng.randrange(5):
                case 0:
                    wrong.insert(rng.randrange(len(wrong) + 1), 1)
                case 1 if wrong:
                    wrong.pop(rng.randrange(len(wrong)))
                case 2 if wrong:
                    wrong[rng.randrange(len(wrong))] = rng.randrange(5)
                case 3:
                    rng.shuffle(wrong)
                case _:
                    wrong = [rng.randrange(4) for _ in range(rng.randrange(5))]
        if tuple(wrong) != shape:
            return tuple(wrong)


KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.uint8, torch.int16)
KINDS += (torch.int32, torch.int64, torch.complex64)
NOTHING = (None, 0, 1.5, "up", [[0]], {}, object(), b"\0")


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


def bad_tensor(
    rng: random.Random, good: torch.Tensor, kinds: Sequence[torch.dtype], *, arrays: bool = False
) -> tuple[Any, Errors, list[str]]:
    """A wrong variant of ``good``, for which dtypes ``kinds`` are valid; the error, and words of its message."""
    match rng.randrange(6):
        case 0:
            wrong = good.to(rng.choice([kind for kind in KINDS if kind not in kinds]))
            return wrong, TypeError, [str(wrong.dtype), "expected"]
        case 1 | 2:
            shape = other_shape(rng, tuple(good.shape))
            return torch.zeros(shape, dtype=good.dtype, device=good.device), ValueError, [str(shape), "expected"]
        case 3:
            return elsewhere(good), ValueError, [str(elsewhere(good).device), "expected"]
        case 4 if not arrays and good.dtype != torch.bool:
            return good.to_sparse(), ValueError, ["sparse", "expected"]
        case _:
            wrong = rng.choice(NOTHING)
            return wrong, TypeError, [type(wrong).__name__, "expected"]


def bad_array(rng: random.Random, good: np.ndarray) -> tuple[Any, Errors, list[str]]:
    """A wrong variant of an array of actions, which views cast; the error, and words of its message."""
    if rng.randrange(2):
        shape = other_shape(rng, good.shape)
        return np.zeros(shape, good.dtype), ValueError, [str(shape), "expected"]
    if good.dtype.kind != "f" and rng.randrange(2):
        return good + rng.choice([0.5, math.nan, 1e30]), InvalidActionError, ["no choice", "expected an integer"]
    wrong = good.astype(rng.choice(["bool", "complex64", "object", "U3"]))
    return wrong, TypeError, ["dtype", "expected"]


def bad_actions(rng: random.Random, good: torch.Tensor) -> tuple[Any, Errors, list[str]]:
    """A wrong variant of a tensor of actions, which views cast; the error, and words of its message."""
    match rng.randrange(5):
        case 0:
            return good.to(rng.choice([torch.bool, torch.complex64])), TypeError, ["dtype", "expected"]
        case 1 | 2:
            shape = other_shape(rng, tuple(good.shape))
            return torch.zeros(shape, dtype=good.dtype, device=good.device), ValueError, [str(shape), "expected"]
        case 3:
            return elsewhere(good), ValueError, [str(elsewhere(good).device), "expected"]
        case _:
            return rng.choice(NOTHING), (TypeError, ValueError), ["expected"]


def bad_mask(rng: random.Random, n: int, device: torch.device) -> tuple[Any, Errors, list[str]]:
    good = torch.zeros(n, dtype=torch.bool, device=device)
    if rng.randrange(3) == 0:
        wrong = rng.choice([[True] * n, True, 1, "all", np.ones(n), np.arange(n), np.array([None] * n), torch.ones(n)])
        return wrong, TypeError, ["expected bool"]
    if rng.randrange(2):
        shape = other_shape(rng, (n,))
        wrong = np.zeros(shape, np.bool_) if rng.randrange(2) else torch.zeros(shape, dtype=torch.bool, device=device)
        return wrong, ValueError, [str(shape), f"expected ({n},)"]
    return elsewhere(good), ValueError, ["expected"]


def wrong_choices(rng: random.Random, env: gpu_vecenv.VecEnv, good: torch.Tensor) -> torch.Tensor:
    """Actions with at least one of an active agent outside of its space."""
    action, wrong = env.game.layout.action, good.clone()
    rows = wrong.view(-1, env.num_agents, action.heads)
    alive = env.active.nonzero().tolist() or [[0, 0]]
    for env_index, agent in rng.sample(alive, rng.randrange(1, len(alive) + 1)):
        role = next(r for r, where in env.game.layout.role_slices.items() if where.start <= agent < where.stop)
        head = rng.randrange(len(action.sizes[role]))
        if action.continuous:
            bad = [math.nan] if env.game.layout.clips_actions else [math.nan, math.inf, -math.inf]
        else:
            size = action.sizes[role][head]
            bad = [-1, size, -(2**31), 2**31 - 1, size + rng.randrange(1000), -rng.randrange(1, 1000)]
        rows[env_index, agent, head] = rng.choice(bad)
    return wrong


def typo(rng: random.Random, word: str) -> str:
    """A misspelling."""
    at, letter = rng.randrange(len(word)), rng.choice("abcxyz_0")
    moved = word[:at] + word[at + 1 :] + letter  # the word itself if its last letter is taken and put back
    return rng.choice([word[:at] + letter + word[at:], moved if moved != word else word + letter, word + "s"])


def bad_setting(rng: random.Random, kind: type) -> tuple[str, Any, list[str]]:
    """A configuration key, an invalid value, and words of the message."""
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init and field.name != "randomize"]
    if rng.randrange(4) == 0:
        names = [field.name for field in fields]
        key = rng.choice([typo(rng, rng.choice(names)), "grid_size", "lr", "__class__", "__proto__", "_", "a b", "ä"])
        if key not in names:
            return key, rng.choice([1, "x", None, 0.5]), [repr(key)]
    field = rng.choice(fields)
    hint, low, high = hints[field.name], field.metadata.get("low"), field.metadata.get("high")
    kinds = set(typing.get_args(hint)) if typing.get_args(hint) and typing.get_origin(hint) is not tuple else {hint}
    wrong: list[Any] = [[], {}, object, 3j, b"5", np.zeros(2), "no such word", "5"]
    wrong += [] if type(None) in kinds else [None]
    if typing.get_origin(hint) is tuple:
        wrong = [7, "64", None, {}, (0,), (-3, 4), (1.5,), ("64",), (True,)]
    elif int in kinds:
        wrong += [True, 1.5, 2.0, np.float32(5), math.nan, -(2**31) - 1]
        wrong += [2**31, 10**30] if issubclass(kind, Env) else []  # they do not fit into a kernel's int
        wrong += [low - 1] if low is not None else []
        wrong += [high + 1] if high is not None else []
    elif float in kinds:
        wrong += [True, math.nan, math.inf, -math.inf, 1e39, np.float64("nan")]
        wrong += [low - 1.0, -1e30] if low is not None else []
        wrong += [high + 1.0] if high is not None else []
    elif bool in kinds:
        wrong += [0, 1, 1.0, np.int64(1), "True"]
    return field.name, rng.choice(wrong), [field.name, "expected"]


# ---------------------------------------------------------------------- objects under test


class Subject:
    """An object that gets wrong calls, with a twin that gets none."""

    name = ""

    def begin(self) -> None:
        """Set the object and its twin to the same state."""

    def bad(self, rng: random.Random) -> Bad:
        raise NotImplementedError

    def fingerprint(self) -> bytes:
        """The bits of everything that a refused call must not change."""
        raise NotImplementedError

    def next_step_agrees(self) -> bool:
        """Step both; whether the outputs are bitwise equal."""
        return True


class Pair(Subject):
    """An environment and its twin."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self.env, self.twin = name, make(), make()
        self.vec_env = getattr(self.env, "vec_env", self.env)
        self.begin()

    def begin(self) -> None:
        for env in (self.env, self.twin):
            env.reset(seed=11)

    def fingerprint(self) -> bytes:
        return all_bits(
            self.vec_env.state_dict(), self.vec_env.seed, [x.data_ptr() for x in self.vec_env.data.values()]
        )

    def step_once(self, env: Any) -> bytes:
        return all_bits(env.step(env.sample_actions()))

    def next_step_agrees(self) -> bool:
        return self.step_once(self.env) == self.step_once(self.twin)

    def attribute(self, rng: random.Random) -> Bad:
        name = rng.choice(["stepp", "observations", "single_env", "__proto__", "reward", typo(rng, "num_agents")])
        return Bad("attribute", lambda: getattr(self.env, name), AttributeError, [name])


class VecEnvPair(Pair):
    """VecEnv."""

    def __init__(self, game: Env, device: str, **arguments: Any) -> None:
        super().__init__(f"VecEnv of {game.name()}", lambda: gpu_vecenv.VecEnv(game, 6, device, **arguments))
        self.others = [gpu_vecenv.VecEnv(game, 5, device).step_buffers(), object(), {}, [], self.env.observe()]

    def bad(self, rng: random.Random) -> Bad:
        env, actions = self.env, self.env.sample_actions()
        kinds = [torch.float32] if env.game.layout.action.continuous else [torch.int32, torch.int64]
        match rng.randrange(13):
            case 0 | 1 | 2:
                wrong, error, words = bad_tensor(rng, actions, kinds)
                return Bad("step", lambda: env.step(wrong), error, ["step: actions", *words])
            case 3 if env.validate == "sync" and bool(env.active.any()):
                wrong = wrong_choices(rng, env, actions)
                words = ["invalid action values", "the first: environment", "agent", "expected"]
                return Bad("values", lambda: env.step(wrong), (InvalidActionError,), words)
            case 3 if env.game.layout.action.continuous:
                wrong = actions.clone().requires_grad_()
                return Bad("gradient", lambda: env.step(wrong), TypeError, ["requires_grad", "detach"])
            case 4:
                out = rng.choice(self.others)
                call = rng.choice([lambda: env.step(actions, out=out), lambda: env.reset(out=out, seed=3)])
                return Bad("out", call, ValueError, ["out is", "step_buffers()"])
            case 5 | 6:
                return bad_seed(rng, env.reset)
            case 7:
                wrong, error, words = bad_mask(rng, env.num_envs, env.device)
                seed = rng.choice([None, 4])
                return Bad("mask", lambda: env.reset(mask=wrong, seed=seed), error, ["reset: mask", *words])
            case 8:
                name = rng.choice(["obs", "rewards", "terminations", "truncations", "active", "final_mask"])
                good = env.step_buffers().tensors()[name]
                wrong, error, words = bad_tensor(rng, good, [good.dtype])
                errors = (TypeError, ValueError, RuntimeError) if isinstance(wrong, torch.Tensor) else error
                return Bad("step_buffers", lambda: env.step_buffers(**{name: wrong}), errors, [name, "expected"])
            case 9:
                wrong, error, words = bad_tensor(rng, env.observe(), [env.buffers_layout.obs_dtype])
                if wrong is None or (isinstance(wrong, torch.Tensor) and wrong.is_sparse):
                    return self.attribute(rng)
                return Bad("observe", lambda: env.observe(out=wrong), (TypeError, ValueError), ["obs", "expected"])
            case 10:
                return self.state(rng)
            case 11:
                name, keyword = typo(rng, "seed"), rng.choice([env.reset, env.step, env.step_buffers])
                return Bad("keyword", lambda: keyword(**{name: 3}), TypeError, [name])
            case _:
                call = rng.choice([self.data, self.attribute])
                return call(rng)

    def state(self, rng: random.Random) -> Bad:
        saved = self.env.state_dict()
        name = rng.choice(sorted(saved))
        match rng.randrange(5):
            case 0:
                del saved[name]
            case 4:
                wrong, error, _ = bad_tensor(rng, saved[name], [saved[name].dtype])
                given = {key: tensor.new_zeros(tensor.shape) for key, tensor in saved.items()} | {name: wrong}
                if isinstance(wrong, torch.Tensor) and wrong.device != self.env.device and not wrong.is_meta:
                    return self.attribute(rng)  # a state may come from elsewhere
                errors = ValueError if isinstance(wrong, torch.Tensor) else error
                return Bad("state", lambda: self.env.load_state_dict(given), errors, [name, "expected"])
            case 1:
                saved[typo(rng, name)] = saved[name]
            case 2:
                saved[name] = saved[name].new_zeros(other_shape(rng, tuple(saved[name].shape)))
            case _:
                saved[name] = saved[name].to(rng.choice([k for k in KINDS if k != saved[name].dtype]))
        return Bad("state", lambda: self.env.load_state_dict(saved), ValueError, [name, "expected"])

    def data(self, rng: random.Random) -> Bad:
        data = self.env.data
        name = rng.choice(sorted(data))
        shape = other_shape(rng, tuple(data[name].shape))
        return rng.choice(
            [
                Bad("allocate", lambda: data.allocate(name, (2,), np.dtype(np.float32)), KeyError, [name, "already"]),
                Bad(
                    "allocate", lambda: data.allocate("n", (2,), torch.float16), ValueError, ["'n'", "expected one of"]
                ),
                Bad("push", lambda: data.push(name, data[name].new_zeros(shape)), ValueError, [name, str(shape)]),
                Bad("tensor", lambda: data[f"{name}!"], KeyError, [name]),
            ]
        )


class Rows(Pair):
    """GymnasiumVectorEnv."""

    def __init__(self, game: Env, device: str, **arguments: Any) -> None:
        kind = partial(gpu_vecenv.GymnasiumVectorEnv, game, 4, device, **arguments)
        super().__init__(f"GymnasiumVectorEnv of {game.name()}, {arguments.get('output', 'torch')}", kind)

    def step_once(self, env: Any) -> bytes:
        actions = env.sample_actions()
        return all_bits(env.step(actions.cpu().numpy() if env.output == "numpy" else actions))

    def bad(self, rng: random.Random) -> Bad:
        env, actions = self.env, self.env.sample_actions()
        if env.output == "numpy":  # which also accepts tensors of the CPU
            actions = actions.cpu()
        match rng.randrange(8):
            case 0:
                wrong, error, words = bad_actions(rng, actions)
                return Bad("step", lambda: env.step(wrong), error, ["step: actions", *words])
            case 1 | 2:
                wrong, error, words = bad_array(rng, actions.cpu().numpy())
                return Bad("step of an array", lambda: env.step(wrong), error, ["step: actions", *words])
            case 3 | 4 if env.output == "numpy" and bool(env.vec_env.active.any()):
                wrong = wrong_choices(rng, env.vec_env, actions.to(env.vec_env.device)).cpu().numpy()
                words = ["invalid action values", "the first: environment", "agent", "expected"]
                return Bad("values", lambda: env.step(wrong), InvalidActionError, words)
            case 5:
                return bad_seed(rng, env.reset)
            case 6:
                return self.options(rng)
            case _:
                return self.attribute(rng)

    def options(self, rng: random.Random) -> Bad:
        env = self.env
        match rng.randrange(4):
            case 0:
                options = rng.choice([7, "reset_mask", [("reset_mask", None)], True])
                return Bad("options", lambda: env.reset(options=options), TypeError, ["options", "expected a dict"])
            case 1:
                options = {typo(rng, "reset_mask"): np.ones(env.num_envs, bool), "reset_mask": None}
                return Bad("options", lambda: env.reset(options=options), ConfigError, ["options has", "reset_mask"])
            case 2 if env.num_agents > 1:
                mask = np.zeros(env.num_envs, bool)
                mask[rng.randrange(env.num_envs)] = True
                return Bad(
                    "part", lambda: env.reset(options={"reset_mask": mask}), ValueError, ["reset_mask differs among"]
                )
            case _:
                wrong, error, words = bad_mask(rng, env.num_envs, env.device)
                return Bad("mask", lambda: env.reset(options={"reset_mask": wrong}), error, ["mask", *words])


class Single(Pair):
    """GymnasiumEnv, also after the end of an episode."""

    def __init__(self, game: Env, device: str) -> None:
        super().__init__(f"GymnasiumEnv of {game.name()}", lambda: gpu_vecenv.GymnasiumEnv(game, device))
        self.over = gpu_vecenv.GymnasiumEnv(game, device)
        self.over.reset(seed=1)
        while not any(self.over.step(self.action(self.over))[2:4]):
            pass

    def action(self, env: Any) -> Any:
        actions = env.vec_env.sample_actions()[0]
        return (actions[0] if env.game.num_agents == 1 else actions).cpu().numpy()

    def step_once(self, env: Any) -> bytes:
        result = env.step(self.action(env))
        return all_bits(result) if not any(result[2:4]) else all_bits(result, env.reset())

    def bad(self, rng: random.Random) -> Bad:
        env, action = self.env, self.action(self.env)
        match rng.randrange(7):
            case 0 | 1:
                wrong, error, words = bad_array(rng, action)
                return Bad("step", lambda: env.step(wrong), error, ["step: actions", *words])
            case 2:
                actions = torch.from_numpy(np.atleast_1d(action)).view(env._check.shape)
                wrong = (
                    wrong_choices(rng, env.vec_env, actions.to(env.vec_env.device)).cpu().numpy().reshape(env._shape)
                )
                return Bad("values", lambda: env.step(wrong), InvalidActionError, ["invalid action", "expected"])
            case 3:
                wrong = rng.choice([None, "up", {}, object(), 1.5, True, b"1", 3j, 2**63, -(2**80)])
                return Bad("no action", lambda: env.step(wrong), (TypeError, ValueError), ["step: action", "expected"])
            case 4:
                over = self.over
                return Bad("after the end", lambda: over.step(self.action(over)), ResetNeededError, ["call reset()"])
            case 5:
                options = {rng.choice(["seed", "reset_mask", typo(rng, "low")]): 1}
                return Bad("options", lambda: env.reset(options=options), ConfigError, ["reset: options has"])
            case _:
                return bad_seed(rng, env.reset)


class Agents(Pair):
    """ParallelEnv, or BatchedParallelEnv: dictionaries of agents or roles."""

    def __init__(self, game: Env, device: str, kind: Any, *arguments: Any, **keywords: Any) -> None:
        words = " ".join(map(str, keywords.values()))
        make = partial(kind, game, *arguments, device=device, **keywords)
        super().__init__(f"{kind.__name__} of {game.name()} {words}", make)
        self.single = kind is gpu_vecenv.ParallelEnv

    def actions(self, env: Any) -> dict[str, Any]:
        drawn, game = env.vec_env.sample_actions(), env.game
        if not self.single:
            return self.joined(env, drawn)
        mine = {}
        for agent in env.agents:
            row = drawn[0, game.layout.agent_names.index(agent)]
            shape = env.action_space(agent).shape
            row = row.reshape(-1)[: math.prod(shape)].reshape(shape)
            mine[agent] = row.cpu().numpy() if env.output == "numpy" else row
        return mine

    def joined(self, env: Any, drawn: torch.Tensor) -> dict[str, Any]:
        game, mine = env.game, {}
        for key in env.possible_agents:
            shape = env.action_space(key).shape
            where = game.layout.role_slices[key] if env.group_by == "role" else game.layout.agent_names.index(key)
            rows = drawn[:, where]
            mine[key] = rows[..., : shape[0]] if shape else rows
        return mine

    def step_once(self, env: Any) -> bytes:
        result = all_bits(env.step(self.actions(env)))
        return result if env.agents else result + all_bits(env.reset())

    def bad(self, rng: random.Random) -> Bad:
        env, actions = self.env, self.actions(self.env)
        agent = rng.choice(sorted(actions))
        good, words = actions[agent], [agent, "expected"]
        match rng.randrange(9):
            case 0:
                del actions[agent]
                return Bad("missing", lambda: env.step(actions), AgentKeyError, ["no action for", agent])
            case 1:
                name = rng.choice([typo(rng, agent), "no_agent", "", agent.upper(), 7, None])
                if name in env.possible_agents:  # a typo that names another agent
                    name = "no_agent"
                return Bad("unknown", lambda: env.step({**actions, name: good}), AgentKeyError, [str(name), "unknown"])
            case 2:
                dead = [agent for agent in env.possible_agents if agent not in actions]
                if not dead:
                    return bad_seed(rng, env.reset)
                words = ["has ended", dead[0]]
                return Bad("dead", lambda: env.step({**actions, dead[0]: good}), AgentKeyError, words)
            case 3:
                wrong = rng.choice([None, [good], 7, "up", (good,), np.zeros(3)])
                words = ["step: actions", "expected"]
                return Bad("no dictionary", lambda: env.step(wrong), (TypeError, ValueError), words)
            case 4 | 5 if self.single:
                array = np.asarray(good.cpu()) if isinstance(good, torch.Tensor) else good
                wrong, error, _ = bad_array(rng, np.asarray(array))
                return Bad("action", lambda: env.step({**actions, agent: wrong}), error, words)
            case 4 | 5:
                wrong, error, _ = bad_actions(rng, good)
                if (
                    isinstance(wrong, torch.Tensor)
                    and wrong.shape == (*good.shape, 1)
                    and not env.action_space(agent).shape
                ):
                    return self.attribute(rng)  # DirectMARLEnv's form
                return Bad("actions", lambda: env.step({**actions, agent: wrong}), error, words)
            case 6 if self.single:
                space = env.action_space(agent)
                values = [math.nan] if env.game.layout.action.continuous else [-1, 2**31 - 1, -(2**31)]
                kind = np.float32 if env.game.layout.action.continuous else np.int32
                wrong = np.full(space.shape, rng.choice(values), kind)
                words = ["invalid action values", agent]
                return Bad("values", lambda: env.step({**actions, agent: wrong}), InvalidActionError, words)
            case 7:
                name = rng.choice([typo(rng, agent), "no_agent", "", 7])
                if name in env.possible_agents:
                    name = "no_agent"
                space = rng.choice([env.action_space, env.observation_space])
                return Bad("space", lambda: space(name), AgentKeyError, ["no agent", repr(name)])
            case _:
                return bad_seed(rng, env.reset)


class Draws(Pair):
    """Sampler."""

    def __init__(self, game: Env, device: str) -> None:
        super().__init__(f"Sampler of {game.name()}", lambda: gpu_vecenv.VecEnv(game, 6, device))
        self.sampler, self.other = gpu_vecenv.Sampler(self.env), gpu_vecenv.Sampler(self.twin)
        self.parameters = torch.zeros((6, game.num_agents, self.sampler.num_parameters), device=device)

    def next_step_agrees(self) -> bool:
        pairs = ((self.env, self.sampler), (self.twin, self.other))
        drawn = [(env, sampler.sample(self.parameters)) for env, sampler in pairs]
        results = [all_bits(list(vars(sample).values()), env.step(sample.actions)) for env, sample in drawn]
        return results[0] == results[1]

    def bad(self, rng: random.Random) -> Bad:
        sampler, out = self.sampler, self.sampler.sample(self.parameters)
        name = rng.choice(["actions", "log_probs", "entropies"])
        match rng.randrange(3):
            case 0:
                wrong, error, words = bad_tensor(rng, self.parameters, [torch.float32])
                return Bad("sample", lambda: sampler.sample(wrong), error, ["sample:", *words])
            case 1:
                good = getattr(out, name)
                wrong, error, words = bad_tensor(rng, good, [good.dtype], arrays=True)
                if wrong is None and name == "entropies":  # leaves them out
                    return bad_seed(rng, self.env.reset)
                given = dataclasses.replace(out, **{name: wrong})
                words = [f"sample: out.{name}", *words]
                return Bad("out", lambda: sampler.sample(self.parameters, out=given), error, words)
            case _:
                squash = rng.choice(
                    ["tan", "", None, 1, "TANH", *(["tanh"] if self.env.game.layout.action.sizes else [])]
                )
                if squash == "tanh" and self.env.game.layout.action.continuous:
                    squash = "clipped"
                return Bad("squash", lambda: gpu_vecenv.Sampler(self.env, squash), ConfigError, ["squash is"])


class Making(Pair):
    """make, configure and constructors; an unrelated environment must not change."""

    def __init__(self, device: str) -> None:
        game = gpu_vecenv.configure("tag_gridworld", max_steps=5)
        super().__init__("making", lambda: gpu_vecenv.VecEnv(game, 3, device))
        self.device = device

    def fingerprint(self) -> bytes:
        return super().fingerprint() + all_bits(sorted(GAMES), sorted(gymnasium.registry))

    def bad(self, rng: random.Random) -> Bad:
        name, device = rng.choice(sorted(set(GAMES) - {"own"})), self.device
        kinds = [gpu_vecenv.make, gpu_vecenv.GymnasiumVectorEnv, gpu_vecenv.BatchedParallelEnv]
        kind = rng.choice(kinds)
        alone = rng.choice([gpu_vecenv.ParallelEnv, gpu_vecenv.GymnasiumEnv])
        any_kind = rng.choice([lambda game, **more: kind(game, 2, device, **more), partial(alone, device=device)])
        match rng.randrange(4):
            case 0:
                word = typo(rng, name)
                if word in GAMES:
                    word += "?"
                words = [repr(word), "gpu_vecenv.register", "not import paths"]
                return Bad("name", lambda: any_kind(word), rng.choice([UnknownGameError, ValueError]), words)
            case 1:
                wrong = rng.choice([None, 7, b"cartpole", ["cartpole"], object(), 2.5, int, {"game": 1}])
                return Bad("no name", lambda: any_kind(wrong), TypeError, ["expected a registered name"])
            case _:
                key, value, words = bad_setting(rng, GAMES[name])
                call = partial(rng.choice([any_kind, gpu_vecenv.configure]), name, **{key: value})
                return Bad("configuration", call, ConfigError, words)


class Training(Subject):
    """PPOConfig, Trainer, checkpoints and policies loaded from them."""

    name = "training"

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder, self.called = device, folder, 0
        env = gpu_vecenv.make("tag_gridworld", 4, device, num_taggers=1, grid=4, max_steps=5)
        small = {"num_steps": 4, "num_epochs": 1, "hidden_sizes": (8,), "num_minibatches": 2}
        self.env, self.config = env, gpu_vecenv.PPOConfig(total_steps=10**6, **small)
        self.trainer, self.twin = (gpu_vecenv.Trainer(env, self.config, seed=3) for _ in range(2))
        for trainer in (self.trainer, self.twin):
            trainer.train_iteration()
        self.good = self.trainer.save(folder / "good.safetensors")
        self.content = self.good.read_bytes()
        tensors, manifest = load_checkpoint(self.good)
        self.tensors, self.manifest = tensors, {k: v for k, v in manifest.items() if k != "tensors"}
        (folder / "a folder").mkdir()
        os.mkfifo(folder / "pipe")

    def begin(self) -> None:
        for trainer in (self.trainer, self.twin):
            trainer.load(self.good)

    def fingerprint(self) -> bytes:
        tensors, manifest = self.trainer.state()
        return all_bits(tensors, manifest["iteration"])

    def next_step_agrees(self) -> bool:
        self.called += 1
        if self.called % 50:  # an iteration takes as long as many calls
            return True
        for trainer in (self.trainer, self.twin):
            trainer.train_iteration()
        return all_bits(self.trainer.state()[0]) == all_bits(self.twin.state()[0])

    def bad(self, rng: random.Random) -> Bad:
        match rng.randrange(6):
            case 0 | 1:
                key, value, words = bad_setting(rng, gpu_vecenv.PPOConfig)
                known = {field.name for field in dataclasses.fields(gpu_vecenv.PPOConfig)}
                errors = ConfigError if key in known else TypeError  # Python's own, of a keyword
                words = words if key in known else [key]
                return Bad("PPOConfig", lambda: gpu_vecenv.PPOConfig(**{key: value}), errors, words)
            case 2:
                return self.trainers(rng)
            case _:
                return self.files(rng)

    def trainers(self, rng: random.Random) -> Bad:
        change, make = partial(dataclasses.replace, self.config), partial(gpu_vecenv.Trainer, self.env)
        rows = 4 * 4  # steps x environments x agents of either role
        parts = rng.choice([n for n in range(3, 40) if rows % n])
        return rng.choice(
            [
                Bad(
                    "minibatches",
                    lambda: make(change(num_minibatches=parts)),
                    ConfigError,
                    [f"num_minibatches is {parts}", "expected a divisor", "= 16"],
                ),
                bad_seed(rng, make),
            ]
        )

    def files(self, rng: random.Random) -> Bad:
        path, words = self.folder / f"{rng.randrange(8)}.safetensors", [str(self.folder)]
        load: Callable[[Path], object] = rng.choice([self.trainer.load, partial(gpu_vecenv.load_policy, device="cpu")])
        whole = {"iteration": 1}
        match rng.randrange(8):
            case 0:
                path = self.folder / rng.choice(["nothing.safetensors", "no/where", "pipe", "a\0b", "a folder"])
                return Bad("no file", lambda: load(path), (FileNotFoundError, OSError), ["checkpoint"])
            case 1:
                path.write_bytes(self.content[: rng.randrange(len(self.content))])
                return Bad("cut", lambda: load(path), CheckpointCorruptError, words)
            case 2 | 3:
                content, place = bytearray(self.content), rng.randrange(len(self.content))
                content[place] ^= 1 << rng.randrange(8)
                path.write_bytes(content)
                return Bad("flipped", lambda: load(path), CheckpointCorruptError, words)
            case 4:
                path = self.folder / rng.choice(["weights.pt", "weights.pkl", "weights.safetensors"])
                path.write_bytes(
                    rng.choice([b"PK\x03\x04", b"\x80\x02", b"\x80\x04"]) + rng.randbytes(rng.randrange(200))
                )
                return Bad("pickle", lambda: load(path), CheckpointCorruptError, [*words, "never opened"])
            case 5:
                whole["game"] = rng.choice(["chess", "os:system", "../../x", "tag_gridworld\n"])
                save_checkpoint(path, self.tensors, {**self.manifest, **whole})
                return Bad("other game", lambda: load(path), (ConfigError, UnknownGameError), words)
            case 6:
                key, value, _ = bad_setting(rng, GAMES["tag_gridworld"])
                if type(value) not in (int, float, str) or value in (math.inf, -math.inf) or value != value:  # no JSON
                    key, value = "gird", 4
                whole["game_config"] = {**self.manifest["game_config"], key: value}
                save_checkpoint(path, self.tensors, {**self.manifest, **whole})
                return Bad("other configuration", lambda: load(path), ConfigError, [key])
            case _:
                name = rng.choice(sorted(name for name in self.tensors if name.startswith("policy")))
                bad = (
                    self.tensors[name]
                    .clone()
                    .double()
                    .fill_(rng.choice([math.nan, math.inf]))
                    .to(self.tensors[name].dtype)
                )
                save_checkpoint(path, {**self.tensors, name: bad}, self.manifest)
                return Bad("not finite", lambda: load(path), CheckpointCorruptError, [*words, "NaN or infinite", name])


def subjects(device: str, folder: Path) -> list[Subject]:
    """All objects under test."""
    grid = gpu_vecenv.configure("tag_gridworld", max_steps=7)
    plane = gpu_vecenv.configure("tag_continuous", num_taggers=2, num_runners=3, num_neighbors=3, max_steps=9)
    box, crew = gpu_vecenv.configure("pendulum", max_steps=6), Crew()
    single, batched = gpu_vecenv.ParallelEnv, gpu_vecenv.BatchedParallelEnv
    return [
        VecEnvPair(grid, device),
        VecEnvPair(plane, device, validate="sync"),
        VecEnvPair(box, device, autoreset_mode="next_step"),
        VecEnvPair(box, device, validate="sync"),
        VecEnvPair(crew, device, validate="sync", agents_as_envs=True),
        Rows(grid, device),
        Rows(plane, device, output="numpy"),
        Rows(box, device, output="numpy", autoreset_mode="next_step"),
        Single(gpu_vecenv.configure("cartpole", max_steps=9), device),
        Single(plane, device),
        Single(box, device),
        Agents(plane, device, single),
        Agents(crew, device, single, output="numpy"),
        Agents(grid, device, batched, 4),
        Agents(plane, device, batched, 4, group_by="role"),
        Draws(plane, device),
        Draws(box, device),
        Making(device),
        Making(device),
        Training(device, folder),
        Training(device, Path(tempfile.mkdtemp(dir=folder))),
    ]


def fuzz_calls(
    device: str, calls: int, seed: int, first: int = 0, subjects: Callable[[str, Path], list[Subject]] = subjects
) -> tuple[list[str], collections.Counter[str]]:
    """Make wrong calls number ``first`` to ``first + calls - 1``: the failures, and the number of calls per subject."""
    failures: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_subjects = subjects(device, Path(name))
        for number in range(first, first + calls):
            rng = random.Random(f"{seed}, {number}")
            subject = rng.choice(all_subjects)
            bad = subject.bad(rng)
            counts[subject.name] += 1
            before = subject.fingerprint()
            problem = problem_of(bad)
            if not problem and subject.fingerprint() != before:
                problem = "something has changed"
            if not problem and not subject.next_step_agrees():
                problem = "the next steps of the object and its twin differ"
            if problem:
                failures.append(f"call {number}, {subject.name}, {bad.name}: {problem}")
                subject.begin()
    return failures, counts


def problem_of(bad: Bad) -> str:
    """Make a wrong call; returns what is wrong with its error, or nothing."""
    try:
        result = bad.call()
    except Exception as error:
        message = str(error)
        if not isinstance(error, bad.errors):
            return f"raised {type(error).__name__}, not {bad.errors}: {message[:300]}"
        if missing := [word for word in bad.words if word not in message]:
            return f"{type(error).__name__} lacks {missing}: {message[:300]}"
        return f"{type(error).__name__} has {len(message)} characters" if len(message) > MAX_CHARACTERS else ""
    return f"was not refused, it gave {result!r:.200}"


@dataclass(kw_only=True)
class Calls(Experiment):
    """Make wrong calls at random: each raises its documented error, and changes no bit of the object."""

    count: int = 10_000
    """Wrong calls."""
    first: int = 0
    """Number of the first call, to repeat a failure."""

    def measure(self) -> Metrics:
        failures, counts = fuzz_calls(self.device, self.count, self.seed, self.first, self.subjects)
        self.failures += failures
        return {"calls": dict(sorted(counts.items()))}

    def subjects(self, device: str, folder: Path) -> list[Subject]:
        return subjects(device, folder)

    def plant(self) -> Metrics:
        planted = {f"a refused call that changes {what}": Spoiling(what=what, device=self.device) for what in SPOILED}
        return {fault: said(experiment) for fault, experiment in planted.items()}


SPOILED = ("the state", "the next step")


class Spoiled(Pair):
    """Its refused calls change the state, or what only later steps show."""

    def __init__(self, device: str, what: str) -> None:
        super().__init__("spoiled", lambda: gpu_vecenv.make("tag_gridworld", 3, device))
        self.what = what

    def bad(self, rng: random.Random) -> Bad:
        def call() -> None:
            if self.what == "the state":
                self.env.step(self.env.sample_actions())
            raise ConfigError

        return Bad("call", call, ConfigError)

    def step_once(self, env: gpu_vecenv.VecEnv) -> bytes:
        return b"odd" if env is self.env and self.what == "the next step" else b"even"


@dataclass(kw_only=True)
class Spoiling(Calls):
    count: int = 1
    what: str = SPOILED[0]

    def subjects(self, device: str, folder: Path) -> list[Subject]:
        return [Spoiled(device, self.what)]
