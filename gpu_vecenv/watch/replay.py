"""Replays: an episode as its seed and actions, in a small file; played again it is bitwise equal on any device.

An episode is a function of its game's rules, configuration and shared fields, of the environment's index, the seed and
the actions. A file holds these, and digests by which each playback is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gpu_vecenv.compile.device import free_bytes
from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.digest import source_sha256
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import CapacityError
from gpu_vecenv.views.agents import versioned_name
from gpu_vecenv.watch.player import Film
from gpu_vecenv.watch.recording import record
from gpu_vecenv.watch.replay_file import Array, Replay
from gpu_vecenv.watch.rerun import configured, rerun

__all__ = ["Playback", "Replay", "film", "is_stale", "play", "record", "verify"]
# Output -> 1 if a reset has none, so that its first record is dropped.
OUTPUTS = {"obs": 0, "active": 0, "rewards": 1, "terminations": 1, "truncations": 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class Playback:
    """States and outputs of a replayed episode of T steps and A agents, on the host.

    Attributes:
        replay: The replay.
        game: Its game.
        stale: Whether the game's source has changed since the recording (without changing a bit).
        state: Name -> (T + 1, *shape), from the reset on; shared fields without the first axis. In addition to the
            game's fields, "elapsed_steps" (T + 1,) int32 and "active" (T + 1, A) bool, unless fields have these names.
        active: (T + 1, A) bool, agents whose episode has not ended.
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
        """The state after ``step`` steps, in the form that ``Env.draw`` takes."""
        shared = {entry.name for entry in self.game.layout.fields if entry.shared}
        return {name: values if name in shared else values[step] for name, values in self.state.items()}


def verify(
    replay: Replay,
    device: str | torch.device | None = None,
    *,
    game: type[Env] | None = None,
    driver: str | None = None,
) -> None:
    """Replay an episode and compare every bit, storing nothing. Arguments and errors are those of ``play``."""
    rerun(replay, configured(replay, game), device, driver)


def is_stale(replay: Replay, game: type[Env] | None = None) -> bool:
    """Whether the game's source has changed since the recording; its trajectories may still be bitwise equal."""
    return source_sha256(configured(replay, game)) != replay.sources


def play(
    replay: Replay,
    device: str | torch.device | None = None,
    *,
    game: type[Env] | None = None,
    driver: str | None = None,
) -> Playback:
    """Replay an episode on any device and compare every bit with the recording.

    Args:
        replay: Recorded on any device.
        device: "cpu", "cuda", "cuda:1"; None takes cuda if usable, else cpu.
        game: The game's class, if it is not registered.
        driver: "pycuda" or "cuda_core" (CUDA only); None takes the first that works.

    Raises:
        ReplayMismatchError: A bit differs (the message has the first step), or the game no longer fits the replay.
        UnknownGameError: No game is registered under the replay's name.
        CapacityError: The states and outputs do not fit in memory; ``verify`` stores none.
    """
    configured_game = configured(replay, game)
    kept, shared = list[dict[str, torch.Tensor]](), dict[str, torch.Tensor]()

    def on_step(env: VecEnv, buffers: StepBuffers) -> None:
        if not kept:
            # Twice: the records exist until they are stacked.
            needed, free = 2 * (replay.num_steps + 1) * env.bytes_per_env(), free_bytes(torch.device("cpu"))
            if needed > min(free, free_bytes(env.device)):
                raise CapacityError(
                    f"play: states and outputs need {needed:,} bytes, {free:,} are free; verify stores none"
                )
        now = {"elapsed_steps": env.elapsed_steps, "active": env.active}
        now |= {entry.name: env.state[entry.name] for entry in configured_game.layout.fields if not entry.shared}
        outputs = {f"buffers {name}": tensor for name, tensor in buffers.tensors().items() if name in OUTPUTS}
        kept.append({name: tensor[0].clone() for name, tensor in (now | outputs).items()})
        if len(kept) == 1:
            shared.update(
                {entry.name: env.state[entry.name] for entry in configured_game.layout.fields if entry.shared}
            )

    rerun(replay, configured_game, device, driver, on_step)
    by_step = {name: torch.stack([step[name] for step in kept]).cpu().numpy() for name in kept[0]}
    outputs = {name: by_step.pop(f"buffers {name}")[skipped:] for name, skipped in OUTPUTS.items()}
    return Playback(
        replay=replay,
        game=configured_game,
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
    """Replay an episode and draw it, for ``gpu_vecenv.watch.player.page``. Arguments and errors are those of ``play``.

    Raises:
        EnvDefinitionError: The game has no ``draw``.
    """
    check_kind("title", title, str, "a str", optional=True)
    playback = play(replay, device, game=game, driver=driver)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(playback.game)}
    changed = {name: getattr(playback.game, name) for name in defaults}
    changed = {name: value for name, value in changed.items() if value != defaults[name]}
    facts = {
        "game": versioned_name(replay.game, playback.game),
        "configuration": ", ".join(f"{name} {value}" for name, value in changed.items()) or "defaults",
        "seed": f"{replay.seed}, environment {replay.env_index}",
        "steps": f"{replay.num_steps}",
        **{f"return, {role}": format_return(replay.returns[role]) for role in playback.game.layout.roles},
        "digest": replay.digest,
        "recorded with": f"gpu_vecenv {replay.made_with}",
    }
    return Film(
        title=title or f"{replay.game}, seed {replay.seed}, environment {replay.env_index}",
        drawings=[
            playback.game.with_drawn_values(state).draw(state)
            for state in map(playback.state_at, range(replay.num_steps + 1))
        ],
        agents=playback.game.layout.agent_names,
        roles={role: count for role, count in playback.game.layout.roles.items() if count},
        rewards=playback.rewards,
        active=playback.active,
        terminations=playback.terminations,
        truncations=playback.truncations,
        facts=facts,
        fps=playback.game.render_fps,
    )


def format_return(value: float | None) -> str:
    """The mean return of a role's agents, rounded to 6 digits."""
    return "not finite" if value is None else f"{value:.6g}"
