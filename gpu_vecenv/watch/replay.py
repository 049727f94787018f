"""Replays: an episode kept as what it follows from, in a small file; played again it has the same bits anywhere.

An episode is a function of its game's rules, configuration and shared fields, of its replica's number, the seed and the
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
from gpu_vecenv.declare.env import FIELD_NAME, Env
from gpu_vecenv.engine.arguments import checked_seed, count
from gpu_vecenv.engine.digest import Digest, sources
from gpu_vecenv.engine.step_buffers import Slab
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES, configure, find_game
from gpu_vecenv.errors import CapacityError, ConfigError, EnvDefinitionError, ReplayMismatchError, UnknownGameError
from gpu_vecenv.train.evaluation import TICKS_BETWEEN_LOOKS, Player, Players, table_like, ticks_to_play
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.views.agents import versioned_name
from gpu_vecenv.watch.player import Film
from gpu_vecenv.watch.replay_file import PAYLOAD_LIMIT, TICKS_LIMIT, Array, Replay

__all__ = ["Playback", "Replay", "film", "is_stale", "play", "record", "verify"]
LOW_HALF = np.uint64(0xFFFFFFFF)
OUTPUTS = {"obs": 0, "active": 0, "rewards": 1, "terminations": 1, "truncations": 1}  # -> what a start has not


@dataclass(frozen=True, kw_only=True, eq=False)
class Playback:
    """A replay, played again: what there was at each tick, on the host. T ticks, A agents.

    Attributes:
        replay: What was played.
        game: Its game.
        stale: The game's text has changed since; yet no bit has.
        state: Name -> (T + 1, *shape), the start first; shared fields without the first axis. Beside the game's fields
            "time" (T + 1,) int32 and "active" (T + 1, A) bool, unless fields have these names.
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

    def at(self, tick: int) -> dict[str, Array]:
        """The state after so many ticks, as ``Env.draw`` takes it."""
        shared = {entry.name for entry in self.game.state if entry.shared}
        return {name: values if name in shared else values[tick] for name, values in self.state.items()}


@torch.no_grad()
def record(
    env: VecEnv, players: GamePolicy | Mapping[str, Player], *, episodes: int = 1, seed: int = 0, greedy: bool = False
) -> list[Replay]:
    """Play whole episodes, each in a replica of its own, in an environment like ``env``; ``env`` itself rests.

    Each is then played again, alone, and must have the same bits.

    Args:
        env: The pattern.
        players: Role -> who acts for it, as for ``evaluate``; or what ``load_policy`` gives.
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
    if env.build.pooled:
        raise ConfigError(
            f"record: starts of {', '.join(env.build.pooled)} come from a pool, which no replay holds; record an "
            "environment made without starts"
        )
    game, episodes, seed = env.game, count("episodes", episodes, 1), checked_seed(seed)
    (name, config), text = _name_and_config(game), sources(game)
    table = table_like(env, episodes)
    try:
        players = players.policies if isinstance(players, GamePolicy) else players
        actions, words = _played(table, Players(table, players, greedy), seed)
        statistics = {name: tensor.cpu().numpy() for name, tensor in table.episode_statistics().items()}
        shared = _changed_fields(table)
    finally:
        table.close()
    replays = [
        Replay(
            game=name,
            version=game.version,
            config=config,
            seed=seed,
            replica=replica,
            actions=actions[:ticks, replica],
            shared=shared,
            quarantine=env.build.quarantine,
            checks=(words[: ticks + 1, replica] & LOW_HALF).astype(np.uint32),
            digest=f"{words[ticks, replica]:016x}",
            returns=_returns(game, statistics["returns"][replica]),
            sources=text,
        )
        for replica, ticks in enumerate(statistics["lengths"].tolist())
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


def _played(table: VecEnv, act: Players, seed: int) -> tuple[Array, Array]:
    """Play until all replicas have ended: (ticks, num_envs, …) actions, (ticks + 1, num_envs) uint64 digests."""
    digest, slab, taken = Digest(table.functions, table.num_envs), table.slab(), list[torch.Tensor]()
    digest.add_start(*table.reset(seed=seed, out=slab))
    digest.add_state(table)
    words, pieces = [digest.words.clone()], list[Array]()
    bytes_per_tick = 4 * table.num_agents * table.game.action.heads
    for ticks, _ in enumerate(ticks_to_play(table)):
        if ticks >= TICKS_LIMIT or ticks * bytes_per_tick >= PAYLOAD_LIMIT:
            raise ConfigError(f"record: an episode goes on after {ticks:,} ticks; expected one that ends")
        idle = ~slab.active.view(*slab.active.shape, *[1] * len(table.game.action.shape))
        actions = act(slab.obs, slab.action_mask).masked_fill(idle, 0)  # whatever they were, nobody does them
        digest.add_tick(actions, table.step(actions, out=slab))
        digest.add_state(table)
        words.append(digest.words.clone())
        taken.append(actions)
        if len(taken) == TICKS_BETWEEN_LOOKS:  # the device keeps no more than these
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
    return sources(_configured(replay, game)) != replay.sources


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
        ReplayMismatchError: It gives other bits, or the game is not as it was; the message has the first such tick.
        UnknownGameError: No registered game has the replay's name.
        CapacityError: All states and outputs do not fit in memory; ``verify`` keeps none.
    """
    configured, kept = _configured(replay, game), list[dict[str, torch.Tensor]]()
    shared = dict[str, torch.Tensor]()

    def look(env: VecEnv, slab: Slab) -> None:
        if not kept:
            # What was kept is there until all of it is joined.
            needed, free = 2 * (replay.num_ticks + 1) * env.bytes_per_env(), free_bytes(torch.device("cpu"))
            if needed > min(free, free_bytes(env.device)):
                raise CapacityError(
                    f"play: states and outputs have {needed:,} bytes, {free:,} are free; verify keeps none"
                )
        now = {"time": env.time, "active": env.active}
        now |= {entry.name: env.state[entry.name] for entry in configured.state if not entry.shared}
        outputs = {f"slab {name}": tensor for name, tensor in slab.tensors().items() if name in OUTPUTS}
        kept.append({name: tensor[0].clone() for name, tensor in (now | outputs).items()})
        if len(kept) == 1:
            shared.update({entry.name: env.state[entry.name] for entry in configured.state if entry.shared})

    _rerun(replay, configured, device, driver, look)
    by_tick = {name: torch.stack([tick[name] for tick in kept]).cpu().numpy() for name in kept[0]}
    outputs = {name: by_tick.pop(f"slab {name}")[skipped:] for name, skipped in OUTPUTS.items()}
    return Playback(
        replay=replay,
        game=configured,
        stale=is_stale(replay, game),
        state={**by_tick, **{name: tensor.cpu().numpy() for name, tensor in shared.items()}},
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
        "seed": f"{replay.seed}, replica {replay.replica}",
        "ticks": f"{replay.num_ticks}",
        **{f"return of {role}": told_return(replay.returns[role]) for role in seen.game.roles},
        "digest": replay.digest,
        "recorded with": f"gpu_vecenv {replay.made_with}",
    }
    return Film(
        title=title or f"{replay.game}, seed {replay.seed}, replica {replay.replica}",
        drawings=[seen.game.draw(seen.at(tick)) for tick in range(replay.num_ticks + 1)],
        agents=seen.game.agent_names,
        roles={role: count for role, count in seen.game.roles.items() if count},
        rewards=seen.rewards,
        active=seen.active,
        terminations=seen.terminations,
        truncations=seen.truncations,
        facts=facts,
        fps=seen.game.render_fps,
    )


def told_return(value: float | None) -> str:
    """A role's return in a few digits."""
    return "not finite" if value is None else f"{value:.6g}"


def _rerun(
    replay: Replay,
    game: Env,
    device: str | torch.device | None,
    driver: str | None,
    look: Callable[[VecEnv, Slab], None] = lambda env, slab: None,
) -> None:
    """Play a replay; ``look`` is called after the reset and after each tick. ReplayMismatchError if a bit differs."""
    try:
        env = VecEnv(
            game,
            1,
            device,
            autoreset_mode="disabled",
            driver=driver,
            first_replica=replay.replica,
            arrays=replay.shared,
            quarantine=replay.quarantine,
        )
    except ConfigError as error:
        raise ReplayMismatchError(f"{_told(replay)}: its shared fields do not fit {game!r:.200}: {error}") from error
    try:
        digest, slab = Digest(env.functions, 1), env.slab()
        actions = torch.from_numpy(replay.actions.copy()).unsqueeze(1).to(env.device)
        digest.add_start(*env.reset(seed=replay.seed, out=slab))
        digest.add_state(env)
        words = [digest.words.clone()]
        look(env, slab)
        for tick in range(replay.num_ticks):
            digest.add_tick(actions[tick], env.step(actions[tick], out=slab))
            digest.add_state(env)
            words.append(digest.words.clone())
            look(env, slab)
        found = torch.cat(words).cpu().numpy().view(np.uint64)
        returns = _returns(game, env.episode_statistics()["returns"][0].cpu().numpy())
        where = env.device
    finally:
        env.close()
    differing = np.flatnonzero((found & LOW_HALF).astype(np.uint32) != replay.checks)
    last = f"{found[-1]:016x}"
    if len(differing) or last != replay.digest:
        reason = (
            "the game's text is that of the recording, so that this is a fault: please report it"
            if sources(game) == replay.sources
            else f"the game's text has changed since it was recorded with gpu_vecenv {replay.made_with}, rules version "
            f"{replay.version}: play it with those, or record it anew"
        )
        tick = int(differing[0]) if len(differing) else replay.num_ticks
        raise ReplayMismatchError(
            f"{_told(replay)}: other bits on {where} from tick {tick} of {replay.num_ticks} on (0 is the start), "
            f"digest {last}; expected {replay.digest}; {reason}"
        )
    if returns != replay.returns:
        raise ReplayMismatchError(f"{_told(replay)}: returns are {returns}; expected {replay.returns}, as it says")


def _told(replay: Replay) -> str:
    return f"replay of {replay.game}, seed {replay.seed}, replica {replay.replica}"


def _configured(replay: Replay, kind: type[Env] | None) -> Env:
    """The replay's game; or UnknownGameError, or ReplayMismatchError where it is not as it was."""
    if kind is None:
        try:
            kind = find_game(replay.game)
        except UnknownGameError as error:
            raise UnknownGameError(
                f"{_told(replay)}: {error}. A file never loads code: give the class, game=MyGame, or on the command "
                "line the file that declares it, --game my_game.py"
            ) from error
    if not (isinstance(kind, type) and issubclass(kind, Env)):
        raise TypeError(f"game is {kind!r:.128}; expected a class derived from gpu_vecenv.Env, or None")
    if replay.game not in (kind.name(), _registered_name(kind)):
        raise ConfigError(f"{_told(replay)}: game is {kind.__name__}, {kind.name()}; expected that of the replay")
    try:
        game = configure(kind, **replay.config)
    except (ConfigError, EnvDefinitionError) as error:
        raise ReplayMismatchError(
            f"{_told(replay)}, recorded with gpu_vecenv {replay.made_with}: its configuration does not fit the game as "
            f"it is now: {error}"
        ) from error
    expected = (
        (replay.num_ticks, game.num_agents, *game.action.shape),
        np.float32 if game.action.continuous else np.int32,
    )
    found = replay.actions.shape, replay.actions.dtype
    if found != expected:
        raise ReplayMismatchError(
            f"{_told(replay)}: its actions are {found[0]} {found[1]}; {game!r:.200} takes {expected[0]} "
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
    now = {entry.name: env.state[entry.name].cpu().numpy() for entry in env.game.state if entry.shared}
    return {n: a for n, a in now.items() if n not in declared or a.tobytes() != np.asarray(declared[n]).tobytes()}


def _returns(game: Env, returns: Array) -> dict[str, float | None]:
    sums = {role: returns[where] for role, where in game.role_slices.items()}
    return {role: math.fsum(own.tolist()) if np.isfinite(own).all() else None for role, own in sums.items()}
