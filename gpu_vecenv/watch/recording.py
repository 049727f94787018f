"""Records whole episodes as replays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.field import FIELD_NAME
from gpu_vecenv.declare.randomize import with_ranges
from gpu_vecenv.engine.arguments import validate_int, validate_seed
from gpu_vecenv.engine.digest import Digest, source_sha256
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import configure
from gpu_vecenv.errors import ConfigError, ReplayMismatchError
from gpu_vecenv.progress import OnProgress, no_progress, part
from gpu_vecenv.train.evaluation import STEPS_PER_SYNC, RolePolicies, RolePolicy, evaluation_env, steps_until_all_done
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.watch.replay_file import MAX_REPLAY_STEPS, PAYLOAD_LIMIT, Array, Replay
from gpu_vecenv.watch.rerun import LOW_HALF, registered_name, rerun, role_returns


@torch.no_grad()
def record(
    env: VecEnv,
    role_policies: GamePolicy | Mapping[str, RolePolicy],
    *,
    episodes: int = 1,
    seed: int = 0,
    greedy: bool = False,
    on_progress: OnProgress = no_progress,
) -> list[Replay]:
    """Play whole episodes in a new environment like ``env``, one per environment; ``env`` itself is not stepped.

    Each episode is then replayed alone and must be bitwise equal.

    Args:
        env: Game, configuration, device, shared fields and ranges of randomised parameters are those that it has now.
        role_policies: Role -> policy, function or None (random policy), as for ``evaluate``; or a GamePolicy.
        episodes: Number of episodes; episode k is the first one of environment k.
        seed: Seed of the random streams.
        greedy: Take the most probable action instead of sampling.
        on_progress: Called with the fraction that is done and a text.

    Raises:
        ConfigError: The episodes depend on something that a replay does not store, or do not end; or as for
        ``evaluate``.
        TypeError, ValueError: As for ``evaluate``.
        NonFiniteError: A policy outputs NaN or excludes every choice, or a function returned an invalid action.
        ReplayMismatchError: The game depends on more than its configuration, seed and actions.
    """
    if not isinstance(env, VecEnv):
        raise TypeError(f"env is a {type(env).__name__}; expected a VecEnv (of a view: view.vec_env)")
    check_kind("on_progress", on_progress, Callable, "a function of a fraction and a text")
    if env.build.initial_fields:
        raise ConfigError(
            f"record: initial_states of {', '.join(env.build.initial_fields)} are not stored in a replay; record an "
            "environment made without initial_states"
        )
    game, episodes, seed = _as_drawn(env), validate_int("episodes", episodes, 1), validate_seed(seed)
    (name, config), sources = _name_and_config(game), source_sha256(game)
    eval_env = evaluation_env(env, episodes)
    try:
        act, playing = RolePolicies(eval_env, role_policies, greedy), part(on_progress, 0, episodes + 1, "play")
        actions, digests = _play_episodes(eval_env, act, seed, playing)
        statistics = {name: tensor.cpu().numpy() for name, tensor in eval_env.episode_statistics().items()}
        shared = _changed_fields(eval_env)
    finally:
        eval_env.close()
    replays = [
        Replay(
            game=name,
            version=game.played_version,
            config=config,
            seed=seed,
            env_index=env_index,
            actions=actions[:steps, env_index],
            shared=shared,
            end_on_nonfinite=env.build.end_on_nonfinite,
            step_digests=(digests[: steps + 1, env_index] & LOW_HALF).astype(np.uint32),
            digest=f"{digests[steps, env_index]:016x}",
            returns=role_returns(game, statistics["returns"][env_index]),
            sources=sources,
        )
        for env_index, steps in enumerate(statistics["lengths"].tolist())
    ]
    for replay in replays:
        on_progress((1 + replay.env_index) / (episodes + 1), f"verify episode {replay.env_index + 1:,} of {episodes:,}")
        try:
            rerun(replay, game, env.device, env.functions.backend.driver_name)
        except ReplayMismatchError as error:
            raise ReplayMismatchError(
                f"{type(game).__name__} is not reproducible and cannot be recorded: its trajectories depend "
                "on more than "
                f"configuration, seed and actions. {error}"
            ) from error
    on_progress(1.0, f"{episodes:,} of {episodes:,} episodes")
    return replays


def _play_episodes(eval_env: VecEnv, act: RolePolicies, seed: int, on_progress: OnProgress) -> tuple[Array, Array]:
    """Step until every episode has ended: (steps, num_envs, …) actions, (steps + 1, num_envs) uint64 digests."""
    digest, buffers, on_device = (
        Digest(eval_env.functions, eval_env.num_envs),
        eval_env.step_buffers(),
        list[torch.Tensor](),
    )
    digest.add_reset(*eval_env.reset(seed=seed, out=buffers))
    digest.add_state(eval_env)
    digests, on_host = [digest.words.clone()], list[Array]()
    bytes_per_step = 4 * eval_env.num_agents * eval_env.game.layout.action.heads
    for steps, _ in enumerate(steps_until_all_done(eval_env, on_progress)):
        if steps >= MAX_REPLAY_STEPS or steps * bytes_per_step >= PAYLOAD_LIMIT:
            raise ConfigError(f"record: an episode has not ended after {steps:,} steps; expected one that ends")
        acting = buffers.active if buffers.acting is None else buffers.active & buffers.acting
        idle = ~acting.view(*acting.shape, *[1] * len(eval_env.game.layout.action.shape))
        actions = act(buffers.obs, buffers.action_mask).masked_fill(
            idle, 0
        )  # actions of agents that do not act have no effect
        digest.add_step(actions, eval_env.step(actions, out=buffers))
        digest.add_state(eval_env)
        digests.append(digest.words.clone())
        on_device.append(actions)
        if len(on_device) == STEPS_PER_SYNC:  # limits device memory
            on_host.append(torch.stack(on_device).cpu().numpy())
            on_device.clear()
    return np.concatenate(on_host), torch.stack(digests).cpu().numpy().view(np.uint64)


def _as_drawn(env: VecEnv) -> Env:
    """The game with the ranges from which the environment draws parameters now: a schedule may have changed them."""
    return with_ranges(env.game, env.data["engine_ranges"].tolist()) if env.layout.randomized else env.game


def _name_and_config(game: Env) -> tuple[str, dict[str, Any]]:
    """Name and JSON configuration of a game. Raises ConfigError if they do not give an equal game back."""
    name, config, again = registered_name(type(game)), dataclasses.asdict(game), None
    try:
        again = configure(type(game), **json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError) as error:
        reason: object = error
    else:
        reason = f"it would be {again!r:.200}"
    if again != game or not FIELD_NAME.fullmatch(name):
        raise ConfigError(f"record: {name!r}, {game!r:.200}, cannot be stored as name and JSON: {reason}")
    return name, config


def _changed_fields(env: VecEnv) -> dict[str, Array]:
    """Shared fields that are not bitwise equal to those that the game declares."""
    declared = env.game.arrays()
    now = {entry.name: env.state[entry.name].cpu().numpy() for entry in env.game.layout.fields if entry.shared}
    return {n: a for n, a in now.items() if n not in declared or a.tobytes() != np.asarray(declared[n]).tobytes()}
