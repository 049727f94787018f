"""Replays: an episode kept as what it follows from, in a small file; played again it has the same bits anywhere.

An episode is a function of its game's rules, configuration and shared fields, of its env_index's number, the seed and the
actions. A file holds these and nothing else that is used, besides fingerprints by which every playing is checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import FIELD_NAME
from gpu_vecenv.engine.arguments import validate_int, validate_seed
from gpu_vecenv.engine.digest import Digest, source_sha256
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES, configure, find_game
from gpu_vecenv.errors import CapacityError, ConfigError, EnvDefinitionError, ReplayMismatchError, UnknownGameError
from gpu_vecenv.train.evaluation import STEPS_PER_SYNC, RolePolicies, RolePolicy, evaluation_env, steps_until_all_done
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.views.agents import versioned_name
from gpu_vecenv.watch.player import Film
from gpu_vecenv.watch.replay_file import MAX_REPLAY_STEPS, PAYLOAD_LIMIT, Array, Replay

__all__ = ["Playback", "Replay", "film", "is_stale", "play", "record", "verify"]
LOW_HALF = np.uint64(0xFFFFFFFF)
OUTPUTS = {"obs": 0, "active": 0, "rewards": 1, "terminations": 1, "truncations": 1}  # -> what a start has not


@dataclass(frozen=True, kw_only=True, eq=False)
class Playback:
    """A replay, played again: what there was at each step, on the host. T steps, A agents.

    Attributes:
        replay: What was played.
        game: Its game.
        stale: The game's text has changed since; yet no bit has.
        state: Name -> (T + 1, *shape), the start first; shared fields without the first axis. Beside the game's fields
            "elapsed_steps" (T + 1,) int32 and "active" (T + 1, A) bool, unless fields have these names.
        active: (T + 1, A) bool, whose next action counts.
        obs: (T + 1, A, *obs_shape).
        rewards: (T, A) float32.
        terminations: (T, A) bool.
        truncations: (T, A) bool.
    """

    replay: Replay
    game: Env
    stale: bool
    state: Mapping[str, Array] = field(repr=False)
    active: Array = field(repr=False)
    obs: Array = field(repr=False)
    rewards: Array = field(repr=False)
    terminations: Array = field(repr=False)
    truncations: Array = field(repr=False)

    def state_at(self, step: int) -> dict[str, Array]:
        """The state after so many steps, as ``Env.draw`` takes it."""
        shared = {entry.name for entry in self.game.layout.fields if entry.shared}
        return {name: values if name in shared else values[step] for name, values in self.state.items()}


@torch.no_grad()
def record(
    env: VecEnv,
    role_policies: GamePolicy | Mapping[str, RolePolicy],
    *,
    episodes: int = 1,
    seed: int = 0,
    greedy: bool = False,
) -> list[Replay]:
    """Play whole episodes, each in a env_index of its own, in an environment like ``env``; ``env`` itself rests.

    Each is then played again, alone, and must have the same bits.

    Args:
        env: The pattern.
        role_policies: Role -> who acts for it, as for ``evaluate``; or what ``load_policy`` gives.
        episodes: How many: of the replicas 0, 1, … of the seed.
        seed: Of the random streams.
        greedy: Policies take the likeliest action instead of sampling.

    Raises:
        ConfigError: A replay cannot hold what decides these episodes, or they do not end; or as ``evaluate`` does.
        NonFiniteError: A policy gives NaN, or excludes every choice.
        ReplayMismatchError: The game's text does something that its configuration, seed and actions do not decide.
    """
    if not isinstance(env, VecEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv: that of a view is its vec_env")
    if env.build.initial_fields:
        raise ConfigError(
            f"record: initial_states of {', '.join(env.build.initial_fields)} come from a pool, which no replay holds; record an "
            "environment made without initial_states"
        )
    game, episodes, seed = env.game, validate_int("episodes", episodes, 1), validate_seed(seed)
    (name, config), text = _name_and_config(game), source_sha256(game)
    eval_env = evaluation_env(env, episodes)
    try:
        role_policies = role_policies.policies if isinstance(role_policies, GamePolicy) else role_policies
        actions, words = _play_episodes(eval_env, RolePolicies(eval_env, role_policies, greedy), seed)
        statistics = {name: tensor.cpu().numpy() for name, tensor in eval_env.episode_statistics().items()}
        shared = _changed_fields(eval_env)
    finally:
        eval_env.close()
    replays = [
        Replay(
            game=name,
            version=game.version,
            config=config,
            seed=seed,
            env_index=env_index,
            actions=actions[:steps, env_index],
            shared=shared,
            end_on_nonfinite=env.build.end_on_nonfinite,
            step_digests=(words[: steps + 1, env_index] & LOW_HALF).astype(np.uint32),
            digest=f"{words[steps, env_index]:016x}",
            returns=_returns(game, statistics["returns"][env_index]),
            sources=text,
        )
        for env_index, steps in enumerate(statistics["lengths"].tolist())
    ]
    for replay in replays:
        try:
            _rerun(replay, game, env.device, getattr(env.functions.backend, "driver_name", None))
        except ReplayMismatchError as error:
            raise ReplayMismatchError(
                f"{type(game).__name__} does not repeat, so that no replay of it can be kept: what its text does is "
                f"decided by more than its configuration, seed and actions. {error}"
            ) from error
    return replays


def _play_episodes(eval_env: VecEnv, act: RolePolicies, seed: int) -> tuple[Array, Array]:
    """Play until all replicas have ended: (steps, num_envs, …) actions, (steps + 1, num_envs) uint64 digests."""
    digest, buffers, taken = (
        Digest(eval_env.functions, eval_env.num_envs),
        eval_env.step_buffers(),
        list[torch.Tensor](),
    )
    digest.add_reset(*eval_env.reset(seed=seed, out=buffers))
    digest.add_state(eval_env)
    words, pieces = [digest.words.clone()], list[Array]()
    bytes_per_step = 4 * eval_env.num_agents * eval_env.game.layout.action.heads
    for steps, _ in enumerate(steps_until_all_done(eval_env)):
        if steps >= MAX_REPLAY_STEPS or steps * bytes_per_step >= PAYLOAD_LIMIT:
            raise ConfigError(f"record: an episode goes on after {steps:,} steps; expected one that ends")
        idle = ~buffers.active.view(*buffers.active.shape, *[1] * len(eval_env.game.layout.action.shape))
        actions = act(buffers.obs, buffers.action_mask).masked_fill(idle, 0)  # whatever they were, nobody does them
        digest.add_step(actions, eval_env.step(actions, out=buffers))
        digest.add_state(eval_env)
        words.append(digest.words.clone())
        taken.append(actions)
        if len(taken) == STEPS_PER_SYNC:  # the device keeps no more than these
            pieces.append(torch.stack(taken).cpu().numpy())
            taken.clear()
    return np.concatenate(pieces), torch.stack(words).cpu().numpy().view(np.uint64)


def verify(
    replay: Replay,
    device: str | torch.device | None = None,
    *,
    game: type[Env] | None = None,
    driver: str | None = None,
) -> None:
    """Play a replay, compare every bit and keep nothing. Arguments and errors are those of ``play``."""
    _rerun(replay, _configured(replay, game), device, driver)


def is_stale(replay: Replay, game: type[Env] | None = None) -> bool:
    """Whether the game's text has changed since the recording; it may give the same bits all the same."""
    return source_sha256(_configured(replay, game)) != replay.sources


def play(
    replay: Replay,
    device: str | torch.device | None = None,
    *,
    game: type[Env] | None = None,
    driver: str | None = None,
) -> Playback:
    """Play a replay again, on any device, and compare every bit of it.

    Args:
        replay: What was recorded, on whatever device.
        device: Where; None takes cuda if usable, else cpu.
        game: The game's class, if it is none that is registered.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.

    Raises:
        ReplayMismatchError: It gives other bits, or the game is not as it was; the message has the first such step.
        UnknownGameError: No registered game has the replay's name.
        CapacityError: All states and outputs do not fit in memory; ``verify`` keeps none.
    """
    configured, kept = _configured(replay, game), list[dict[str, torch.Tensor]]()
    shared = dict[str, torch.Tensor]()

    def on_step(env: VecEnv, buffers: StepBuffers) -> None:
        if not kept:
            # What was kept is there until all of it is joined.
            needed, free = 2 * (replay.num_steps + 1) * env.bytes_per_env(), free_bytes(torch.device("cpu"))
            if needed > min(free, free_bytes(env.device)):
                raise CapacityError(
                    f"play: states and outputs have {needed:,} bytes, {free:,} are free; verify keeps none"
                )
        now = {"elapsed_steps": env.elapsed_steps, "active": env.active}
        now |= {entry.name: env.state[entry.name] for entry in configured.state if not entry.shared}
        outputs = {f"buffers {name}": tensor for name, tensor in buffers.tensors().items() if name in OUTPUTS}
        kept.append({name: tensor[0].clone() for name, tensor in (now | outputs).items()})
        if len(kept) == 1:
            shared.update({entry.name: env.state[entry.name] for entry in configured.state if entry.shared})

    _rerun(replay, configured, device, driver, on_step)
    by_step = {name: torch.stack([step[name] for step in kept]).cpu().numpy() for name in kept[0]}
    outputs = {name: by_step.pop(f"buffers {name}")[skipped:] for name, skipped in OUTPUTS.items()}
    return Playback(
        replay=replay,
        game=configured,
        stale=is_stale(replay, game),
        state={**by_step, **{name: tensor.cpu().numpy() for name, tensor in shared.items()}},
        **outputs,
    )


def film(
    replay: Replay,
    device: str | torch.device | None = None,
    *,
    game: type[Env] | None = None,
    driver: str | None = None,
    title: str | None = None,
) -> Film:
    """Play a replay and draw it, for ``gpu_vecenv.watch.player.page``. Arguments and errors are those of ``play``.

    Raises:
        EnvDefinitionError: The game is not drawn.
    """
    seen = play(replay, device, game=game, driver=driver)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(seen.game)}
    changed = {name: getattr(seen.game, name) for name in defaults}
    changed = {name: value for name, value in changed.items() if value != defaults[name]}
    facts = {
        "game": versioned_name(replay.game, seen.game),
        "configuration": ", ".join(f"{name} {value}" for name, value in changed.items()) or "the defaults",
        "seed": f"{replay.seed}, environment {replay.env_index}",
        "steps": f"{replay.num_steps}",
        **{f"return of {role}": format_return(replay.returns[role]) for role in seen.game.layout.roles},
        "digest": replay.digest,
        "recorded with": f"gpu_vecenv {replay.made_with}",
    }
    return Film(
        title=title or f"{replay.game}, seed {replay.seed}, environment {replay.env_index}",
        drawings=[seen.game.draw(seen.state_at(step)) for step in range(replay.num_steps + 1)],
        agents=seen.game.layout.agent_names,
        roles={role: count for role, count in seen.game.layout.roles.items() if count},
        rewards=seen.rewards,
        active=seen.active,
        terminations=seen.terminations,
        truncations=seen.truncations,
        facts=facts,
        fps=seen.game.render_fps,
    )


def format_return(value: float | None) -> str:
    """A role's return in a few digits."""
    return "not finite" if value is None else f"{value:.6g}"


def _rerun(
    replay: Replay,
    game: Env,
    device: str | torch.device | None,
    driver: str | None,
    on_step: Callable[[VecEnv, StepBuffers], None] = lambda env, buffers: None,
) -> None:
    """Play a replay; ``on_step`` is called after the reset and after each step. ReplayMismatchError if a bit differs."""
    try:
        env = VecEnv(
            game,
            1,
            device,
            autoreset_mode="disabled",
            driver=driver,
            first_env_index=replay.env_index,
            arrays=replay.shared,
            end_on_nonfinite=replay.end_on_nonfinite,
        )
    except ConfigError as error:
        raise ReplayMismatchError(
            f"{_describe(replay)}: its shared fields do not fit {game!r:.200}: {error}"
        ) from error
    try:
        digest, buffers = Digest(env.functions, 1), env.step_buffers()
        actions = torch.from_numpy(replay.actions.copy()).unsqueeze(1).to(env.device)
        digest.add_reset(*env.reset(seed=replay.seed, out=buffers))
        digest.add_state(env)
        words = [digest.words.clone()]
        on_step(env, buffers)
        for step in range(replay.num_steps):
            digest.add_step(actions[step], env.step(actions[step], out=buffers))
            digest.add_state(env)
            words.append(digest.words.clone())
            on_step(env, buffers)
        found = torch.cat(words).cpu().numpy().view(np.uint64)
        returns = _returns(game, env.episode_statistics()["returns"][0].cpu().numpy())
        where = env.device
    finally:
        env.close()
    differing = np.flatnonzero((found & LOW_HALF).astype(np.uint32) != replay.step_digests)
    last = f"{found[-1]:016x}"
    if len(differing) or last != replay.digest:
        reason = (
            "the game's text is that of the recording, so that this is a fault: please report it"
            if source_sha256(game) == replay.sources
            else f"the game's text has changed since it was recorded with gpu_vecenv {replay.made_with}, rules version "
            f"{replay.version}: play it with those, or record it anew"
        )
        step = int(differing[0]) if len(differing) else replay.num_steps
        raise ReplayMismatchError(
            f"{_describe(replay)}: other bits on {where} from step {step} of {replay.num_steps} on (0 is the start), "
            f"digest {last}; expected {replay.digest}; {reason}"
        )
    if returns != replay.returns:
        raise ReplayMismatchError(f"{_describe(replay)}: returns are {returns}; expected {replay.returns}, as it says")


def _describe(replay: Replay) -> str:
    return f"replay of {replay.game}, seed {replay.seed}, environment {replay.env_index}"


def _configured(replay: Replay, kind: type[Env] | None) -> Env:
    """The replay's game; or UnknownGameError, or ReplayMismatchError where it is not as it was."""
    if kind is None:
        try:
            kind = find_game(replay.game)
        except UnknownGameError as error:
            raise UnknownGameError(
                f"{_describe(replay)}: {error}. A file never loads code: give the class, game=MyGame, or on the command "
                "line the file that declares it, --game my_game.py"
            ) from error
    if not (isinstance(kind, type) and issubclass(kind, Env)):
        raise TypeError(f"game is {kind!r:.128}; expected a class derived from gpu_vecenv.Env, or None")
    if replay.game not in (kind.name(), _registered_name(kind)):
        raise ConfigError(f"{_describe(replay)}: game is {kind.__name__}, {kind.name()}; expected that of the replay")
    try:
        game = configure(kind, **replay.config)
    except (ConfigError, EnvDefinitionError) as error:
        raise ReplayMismatchError(
            f"{_describe(replay)}, recorded with gpu_vecenv {replay.made_with}: its configuration does not fit the game as "
            f"it is now: {error}"
        ) from error
    expected = (
        (replay.num_steps, game.layout.num_agents, *game.layout.action.shape),
        np.float32 if game.layout.action.continuous else np.int32,
    )
    found = replay.actions.shape, replay.actions.dtype
    if found != expected:
        raise ReplayMismatchError(
            f"{_describe(replay)}: its actions are {found[0]} {found[1]}; {game!r:.200} takes {expected[0]} "
            f"{np.dtype(expected[1])}"
        )
    return game


def _registered_name(kind: type[Env]) -> str:
    return next((name for name, game in GAMES.items() if game is kind), kind.name())


def _name_and_config(game: Env) -> tuple[str, dict[str, Any]]:
    """What a file says of a game; ConfigError where that would not give the same game back."""
    name, config, again = _registered_name(type(game)), dataclasses.asdict(game), None
    try:
        again = configure(type(game), **json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        reason: object = error
    else:
        reason = f"it would be {again!r:.200}"
    if again != game or not FIELD_NAME.fullmatch(name):
        raise ConfigError(f"record: {name!r}, {game!r:.200}, cannot be written down as name and JSON: {reason}")
    return name, config


def _changed_fields(env: VecEnv) -> dict[str, Array]:
    """Shared fields whose bits are not those that the game declares."""
    declared = env.game.arrays()
    now = {entry.name: env.state[entry.name].cpu().numpy() for entry in env.game.layout.fields if entry.shared}
    return {n: a for n, a in now.items() if n not in declared or a.tobytes() != np.asarray(declared[n]).tobytes()}


def _returns(game: Env, returns: Array) -> dict[str, float | None]:
    sums = {role: returns[where] for role, where in game.layout.role_slices.items()}
    return {role: math.fsum(own.tolist()) if np.isfinite(own).all() else None for role, own in sums.items()}
