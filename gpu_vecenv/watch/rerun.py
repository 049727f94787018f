"""Replays an episode and compares its digests and returns with those of the recording."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.digest import Digest, source_sha256
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES, configure, find_game, stored_configuration
from gpu_vecenv.errors import ConfigError, EnvDefinitionError, ReplayMismatchError, UnknownGameError
from gpu_vecenv.watch.replay_file import Array, Replay

LOW_HALF = np.uint64(0xFFFFFFFF)


def rerun(
    replay: Replay,
    game: Env,
    device: str | torch.device | None,
    driver: str | None,
    on_step: Callable[[VecEnv, StepBuffers], None] = lambda env, buffers: None,
) -> None:
    """Replay an episode, calling ``on_step`` after the reset and each step; ReplayMismatchError if a bit differs."""
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
        raise ReplayMismatchError(f"{describe(replay)}: its shared fields do not fit {game!r:.200}: {error}") from error
    try:
        digest, buffers = Digest(env.functions, 1), env.step_buffers()
        actions = torch.from_numpy(replay.actions.copy()).unsqueeze(1).to(env.device)
        digest.add_reset(*env.reset(seed=replay.seed, out=buffers))
        digest.add_state(env)
        digests = [digest.words.clone()]
        on_step(env, buffers)
        for step in range(replay.num_steps):
            digest.add_step(actions[step], env.step(actions[step], out=buffers))
            digest.add_state(env)
            digests.append(digest.words.clone())
            on_step(env, buffers)
        found = torch.cat(digests).cpu().numpy().view(np.uint64)
        returns = role_returns(game, env.episode_statistics()["returns"][0].cpu().numpy())
        torch_device = env.device
    finally:
        env.close()
    differing = np.flatnonzero((found & LOW_HALF).astype(np.uint32) != replay.step_digests)
    last = f"{found[-1]:016x}"
    if len(differing) or last != replay.digest:
        reason = (
            "the game's source is that of the recording, so this is a bug: please report it"
            if source_sha256(game) == replay.sources
            else f"the game's source has changed since it was recorded with gpu_vecenv {replay.made_with}, rules "
            f"version {replay.version}: play it with that version, or record it again"
        )
        step = int(differing[0]) if len(differing) else replay.num_steps
        raise ReplayMismatchError(
            f"{describe(replay)}: not bitwise equal on {torch_device} from step {step} of {replay.num_steps} on "
            f"(0 is the reset), digest {last}; expected {replay.digest}; {reason}"
        )
    if returns != replay.returns:
        raise ReplayMismatchError(f"{describe(replay)}: returns are {returns}; expected {replay.returns}, as recorded")


def describe(replay: Replay) -> str:
    """Name of a replay in messages."""
    return f"replay of {replay.game}, seed {replay.seed}, environment {replay.env_index}"


def configured(replay: Replay, kind: type[Env] | None) -> Env:
    """The replay's configured game. Raises UnknownGameError, or ReplayMismatchError if it no longer fits the replay."""
    check_kind("replay", replay, Replay, "a Replay, from record or Replay.load")
    if kind is None:
        try:
            kind = find_game(replay.game)
        except UnknownGameError as error:
            raise UnknownGameError(
                f"{describe(replay)}: no game is called {replay.game[:128]!r}. A replay file never loads code: pass "
                "the class, game=MyGame, or on the command line the file that declares it, --game my_game.py"
            ) from error
    if not (isinstance(kind, type) and issubclass(kind, Env)):
        raise TypeError(f"game is {kind!r:.128}; expected a class derived from gpu_vecenv.Env, or None")
    if replay.game not in (kind.name(), registered_name(kind)):
        raise ConfigError(f"{describe(replay)}: game is {kind.__name__}, {kind.name()}; expected that of the replay")
    try:
        game = configure(kind, **stored_configuration(kind, replay.config))
    except (ConfigError, EnvDefinitionError) as error:
        raise ReplayMismatchError(
            f"{describe(replay)}, recorded with gpu_vecenv {replay.made_with}: its configuration does not fit the "
            f"current game: {error}"
        ) from error
    expected = (
        (replay.num_steps, game.layout.num_agents, *game.layout.action.shape),
        game.layout.action.dtype,
    )
    found = replay.actions.shape, replay.actions.dtype
    if found != expected:
        raise ReplayMismatchError(
            f"{describe(replay)}: its actions are {found[0]} {found[1]}; {game!r:.200} takes {expected[0]} "
            f"{np.dtype(expected[1])}"
        )
    return game


def registered_name(kind: type[Env]) -> str:
    """Name under which a game is registered, else its own name."""
    return next((name for name, game in GAMES.items() if game is kind), kind.name())


def role_returns(game: Env, returns: Array) -> dict[str, float | None]:
    """Role -> mean return of its agents, as ``evaluate`` gives it; None if one is not finite, 0 without agents."""
    by_role = {role: returns[agents] for role, agents in game.layout.role_slices.items()}
    return {
        role: math.fsum(values.tolist()) / max(len(values), 1) if np.isfinite(values).all() else None
        for role, values in by_role.items()
    }
