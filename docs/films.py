"""The films of README.md and of the pages of games, `docs/films/*.gif`: ``python docs/films.py RUNS``.

RUNS holds the runs that README.md shows below a random policy:

    gpu-vecenv train tag_gridworld --grid 10 --total-steps 700000 --out RUNS/tag_gridworld
    gpu-vecenv train simple_spread --num-minibatches 4 --total-steps 1500000 --out RUNS/simple_spread
    gpu-vecenv train cartpole --total-steps 300000 --out RUNS/cartpole

the run of five taggers and a hundred runners, of which an episode is also kept for `docs/gallery.md`:

    gpu-vecenv train tag_continuous --num-taggers 5 --out RUNS/tag_continuous

and, beside foragers.py and foragers.cu of docs/write_a_game.md, the run of that page:

    gpu-vecenv train RUNS/foragers.py --out RUNS/foragers
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gallery_films import SCENES, SCRIPTS, Scene, replay_file
from PIL import Image, ImageDraw, ImageFont

import gpu_vecenv
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import load_game
from gpu_vecenv.views.frames import Frames, tiled, write_video
from gpu_vecenv.watch.recording import record

FOLDER = Path(__file__).parent / "films"
SIDE = 240  # pixels of a game's film
SECONDS = 6
FPS = 12.5  # a GIF's durations are hundredths of a second
PANEL = 266  # pixels of a game in the film of README.md
CAPTION = 30  # pixels above a row of them
TRAINED: Mapping[str, Mapping[str, Any]] = {"tag_gridworld": {"grid": 10}, "simple_spread": {}, "cartpole": {}}
TITLES = "random policies", "trained on a CPU, less than two minutes each"
INK, PAPER = (31, 35, 40), (246, 248, 250)
# Games without a script: a random policy, with another configuration where the default one shows little.
OTHERS: Mapping[str, Scene] = {
    "overcooked": Scene(({"player": "at random"},)),
    "cleanup": Scene(({"player": "at random"},)),
    "connect_four": Scene(({"player": "at random"},)),
    "simple_spread": Scene(({"agent": "at random"},)),
    "simple_adversary": Scene(({"adversary": "at random", "agent": "at random"},)),
    "economy": Scene(({"worker": "at random", "planner": "at random"},)),
    **{
        name: Scene(({"agent": "at random"},))
        for name in ("acrobot", "continuous_mountain_car", "mountain_car", "pendulum")
    },
}
Policy = Callable[[torch.Tensor], torch.Tensor]  # observations of all agents -> actions
Frame = np.ndarray[Any, Any]  # (height, width, 3) uint8


def steps(env: VecEnv, policy: Policy | None, scale: float) -> Iterator[list[Frame]]:
    """All environments after each step, each a frame; without a policy all act at random."""
    obs, _ = env.reset(seed=7)
    while True:
        yield Frames(env, scale=scale)[:]
        obs, *_ = env.step(env.sample_actions() if policy is None else policy(obs))


def scripted(env: VecEnv, cast: Mapping[str, str]) -> Policy:
    """The scripts of a cast for all roles; a role without one acts at random."""
    scripts = {role: SCRIPTS[who](env.game) for role, who in cast.items()}

    def act(obs: torch.Tensor) -> torch.Tensor:
        actions = env.sample_actions()
        for role, where in env.game.layout.role_slices.items():
            if scripts.get(role) is not None:
                actions[:, where] = scripts[role](obs[:, where])
        return actions

    return act


def scale_to(game: gpu_vecenv.Env, side: int) -> float:
    """The factor that makes a game's picture `side` pixels wide or high, whichever is more."""
    env = gpu_vecenv.make(game, 1, "cpu")
    env.reset(seed=7)
    return side / max(Frames(env)[0].shape)


def padded(frame: Frame, side: int) -> Frame:
    """The frame in the middle of a square of its first pixel's colour."""
    canvas = np.full((side, side, 3), frame[0, 0], np.uint8)
    top, left = (side - frame.shape[0]) // 2, (side - frame.shape[1]) // 2
    canvas[top : top + frame.shape[0], left : left + frame.shape[1]] = frame[:side, :side]
    return canvas


def game_film(env: VecEnv, policy: Policy) -> Iterator[Frame]:
    """One environment."""
    shown = steps(env, policy, scale_to(env.game, SIDE))
    for _, (frame,) in zip(range(int(SECONDS * FPS)), shown, strict=False):
        yield padded(frame, SIDE)


def save_films_of(name: str, scene: Scene, runs: Path) -> None:
    """By the policies of a run, of which an episode is also kept for the gallery, or the last cast of the scene."""
    env = gpu_vecenv.make(name, 1, "cpu", **scene.config)
    film = FOLDER / f"{name}.gif"
    if not scene.trained:
        write_video(game_film(env, scripted(env, scene.casts[-1])), film, FPS)
        return
    policy = gpu_vecenv.load_policy(runs / name, game=env.game, device="cpu")
    write_video(game_film(env, policy), film, FPS)
    (played,) = record(env, policy, seed=7)
    played.save(replay_file(name))


def titled(frame: Frame, text: str) -> Frame:
    """The frame below one line."""
    image = Image.new("RGB", (frame.shape[1], frame.shape[0] + CAPTION), PAPER)
    image.paste(Image.fromarray(frame), (0, CAPTION))
    place = (frame.shape[1] // 2, CAPTION // 2)
    ImageDraw.Draw(image).text(place, text, INK, ImageFont.load_default(16), anchor="mm")
    return np.asarray(image)


def front_film(runs: Path) -> Iterator[Frame]:
    """Three games by random policies, and below them by the policies of the runs."""
    rows = []
    for trained in (False, True):
        shown = []
        for name, config in TRAINED.items():
            env = gpu_vecenv.make(name, 1, "cpu", **config)
            policy = gpu_vecenv.load_policy(runs / name, game=env.game, device="cpu") if trained else None
            shown.append(steps(env, policy, scale_to(env.game, PANEL)))
        rows.append(zip(*shown, strict=True))
    for _, *panels in zip(range(int(SECONDS * FPS)), *rows, strict=False):
        lines = [tiled([padded(frame, PANEL) for (frame,) in row], len(row)) for row in panels]
        yield np.concatenate([titled(line, text) for line, text in zip(lines, TITLES, strict=True)])


def tutorial_film(runs: Path) -> Iterator[Frame]:
    """The game of docs/write_a_game.md by a random policy, and beside it by that of its run."""
    env = gpu_vecenv.make(load_game(runs / "foragers.py"), 1, "cpu")
    trained = gpu_vecenv.load_policy(runs / "foragers", game=env.game, device="cpu")
    panels = [
        steps(gpu_vecenv.make(env.game, 1, "cpu"), policy, scale_to(env.game, PANEL)) for policy in (None, trained)
    ]
    for _, *frames in zip(range(int(SECONDS * FPS)), *panels, strict=False):
        yield np.concatenate(
            [titled(padded(frame, PANEL), text) for (frame,), text in zip(frames, ("random", "trained"), strict=True)],
            1,
        )


def preview(film: Path) -> Image.Image:
    """What other sites show of a link to this one, 1200 x 630: the name, the pitch and a frame of a film."""
    image = Image.new("RGB", (1200, 630), PAPER)
    with Image.open(film) as frames:
        frames.seek(frames.n_frames // 2)
        frame = frames.convert("RGB")
    frame.thumbnail((700, 560))
    image.paste(frame, (1160 - frame.width, (630 - frame.height) // 2))
    draw = ImageDraw.Draw(image)
    draw.text((40, 190), "gpu_vecenv", INK, ImageFont.load_default(64))
    draw.text((40, 290), "Simulate and train\nmulti-agent games\nentirely on one GPU", INK, ImageFont.load_default(36))
    return image


if __name__ == "__main__":
    torch.manual_seed(0)  # policies sample their actions
    FOLDER.mkdir(exist_ok=True)
    write_video(front_film(Path(sys.argv[1])), FOLDER / "front.gif", FPS)
    write_video(tutorial_film(Path(sys.argv[1])), FOLDER / "foragers.gif", FPS)
    for name, scene in {**SCENES, **OTHERS}.items():
        save_films_of(name, scene, Path(sys.argv[1]))
    preview(FOLDER / "front.gif").save(FOLDER.parent / "_static" / "preview.png", optimize=True)
