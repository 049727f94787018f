"""Episodes in a notebook: a page with a player where it runs, a picture where only its stored outputs are shown."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.error import DependencyNotInstalled

from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.train.evaluation import RolePolicy
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.views.frames import drawing_of, png, rasterise, tiled
from gpu_vecenv.watch.player import page
from gpu_vecenv.watch.recording import record
from gpu_vecenv.watch.replay import film, play
from gpu_vecenv.watch.replay_file import Replay

PICTURES = 4  # of an episode
HEIGHT = 760  # pixels of the page


@dataclass(frozen=True)
class EpisodeView:
    """Recorded episodes, as a notebook shows them.

    Attributes:
        replays: The episodes.
        title: Of the page.
    """

    replays: Sequence[Replay]
    title: str

    def _repr_html_(self) -> str:
        """The page that ``gpu-vecenv replay html`` writes, in a frame."""
        content = html.escape(page([film(replay) for replay in self.replays], self.title))
        return f'<iframe width="100%" height="{HEIGHT}" frameborder="0" srcdoc="{content}"></iframe>'

    def _repr_png_(self) -> bytes | None:
        """The first episode, at four steps side by side; None without pygame."""
        playback = play(self.replays[0])
        steps = np.linspace(0, self.replays[0].num_steps, PICTURES).astype(int)
        try:
            frames = [rasterise(drawing_of(playback.game, playback.state_at(step))) for step in steps]
        except DependencyNotInstalled:
            return None
        return png(tiled(frames, columns=PICTURES))


def watch(
    title: str,
    env: VecEnv,
    role_policies: GamePolicy | Mapping[str, RolePolicy],
    *,
    episodes: int = 1,
    seed: int = 7,
    greedy: bool = False,
) -> EpisodeView:
    """Play whole episodes and show them, as the last value of a notebook's cell.

    Args:
        title: Of the page.
        env: Game, configuration and device are those of this environment, which is not stepped.
        role_policies: Role or agent -> policy, function or None (random policy); or a GamePolicy.
        episodes: Number of episodes.
        seed: Seed of the random streams.
        greedy: Take the most probable action instead of sampling.

    Raises:
        ConfigError, TypeError, ValueError: As for ``record``.

    Example:
        >>> import gpu_vecenv
        >>> env = gpu_vecenv.make("tag_gridworld", 1, "cpu", max_steps=5)
        >>> len(watch("Random play", env, {"tagger": None, "runner": None}).replays)
        1
    """
    return EpisodeView(record(env, role_policies, episodes=episodes, seed=seed, greedy=greedy), title)
