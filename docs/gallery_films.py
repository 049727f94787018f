"""The replays of `docs/gallery.md`: those of scripts and random play are recorded anew by every build."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gpu_vecenv
from gpu_vecenv.envs.armies import UNITS
from gpu_vecenv.watch import player, replay

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from pursuit_surround import surround
from tag_baselines import flee, pursuit
from warehouse_robots import fetch

RANDOM, FLEE, PURSUIT = "at random", "fleeing", "pursuing"


def to_the_side_of_the_fall(game: gpu_vecenv.Env) -> Any:
    """Cartpole's cart pushed to where the pole leans and turns: obs (…, 4) -> actions (…) int32."""
    return lambda obs: (obs[..., 2] + obs[..., 3] > 0).to(torch.int32)


def attack_the_closest(game: gpu_vecenv.Env) -> Any:
    """Units of skirmish that go east to the middle of the map and attack the closest enemy in range."""
    sights, ranges = (
        torch.tensor([getattr(unit, name) for unit in UNITS.values()]) for name in ("sight_range", "attack_range")
    )
    enemies = slice(13 * game.num_seen_allies, 13 * (game.num_seen_allies + game.num_seen_enemies))

    def act(obs: torch.Tensor) -> torch.Tensor:
        units, types = obs[..., enemies].unflatten(-1, (-1, 13)), obs[..., -6:]
        away = units[..., 1:3].norm(dim=-1).where(units[..., 0] > 0, torch.inf) * (types @ sights)[..., None]
        least, closest = away.min(-1)
        walk = torch.where(obs[..., -9] < 0.5, 1, 4)
        # A little less than the range: a target that rounding puts out of it would be forbidden.
        return torch.where(least < 0.999 * (types @ ranges), 5 + closest, walk).to(torch.int32)

    return act


def eat_the_closest(game: gpu_vecenv.Env) -> Any:
    """Players of harvest that go to the closest apple that they see, or straight on, and turn at walls."""
    forth = torch.arange(game.view_ahead, -game.view_behind - 1, -1)
    rows, columns = torch.meshgrid(forth, torch.arange(-game.view_side, game.view_side + 1), indexing="ij")
    away = (rows.abs() + columns.abs()).flatten()

    def act(obs: torch.Tensor) -> torch.Tensor:
        apples, walls = obs[..., 1].flatten(-2) > 0, obs[..., game.view_ahead - 1, game.view_side, 0] > 0
        least, closest = away.where(apples, 1000).min(-1)
        ahead, aside = rows.flatten()[closest], columns.flatten()[closest]
        to_apple = torch.where(ahead > 0, 1, torch.where(aside < 0, 3, torch.where(aside > 0, 4, 2)))
        return torch.where(least < 1000, to_apple, torch.where(walls, 6, 1)).to(torch.int32)

    return act


SCRIPTS: Mapping[str, Any] = {
    RANDOM: lambda game: None,
    FLEE: flee,
    PURSUIT: pursuit,
    "by a rule": to_the_side_of_the_fall,
    "attacking": attack_the_closest,
    "eating": eat_the_closest,
    "surrounding": surround,
    "fetching": fetch,
}


@dataclass(frozen=True)
class Scene:
    """Episodes of one game that are played side by side."""

    casts: tuple[Mapping[str, str], ...]  # role -> who acts for it, a name in SCRIPTS
    config: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False  # whether the last film is the replay of trained policies that `films.py` recorded


SCENES = {
    "tag_continuous": Scene(({"tagger": RANDOM, "runner": RANDOM},), {"num_taggers": 5}, trained=True),
    "tag_gridworld": Scene(({"tagger": RANDOM, "runner": RANDOM}, {"tagger": PURSUIT, "runner": FLEE})),
    "cartpole": Scene(({"agent": RANDOM}, {"agent": "by a rule"}), {"max_steps": 200}),
    "skirmish": Scene(({"ally": RANDOM}, {"ally": "attacking"}), {"scenario": "10m_vs_11m"}),
    "pursuit": Scene(({"pursuer": RANDOM}, {"pursuer": "surrounding"}), {"max_steps": 200}),
    "warehouse": Scene(
        ({"robot": RANDOM}, {"robot": "fetching"}),
        {"num_agents": 4, "column_height": 5, "sensor_range": 9, "max_steps": 150},
    ),
    "harvest": Scene(({"player": RANDOM}, {"player": "eating"}), {"max_steps": 150}),
    "simple_tag": Scene(({"adversary": RANDOM, "agent": RANDOM},), {"max_steps": 100}),
}


def films(name: str) -> list[player.Film]:
    """The scene of this game, recorded and drawn on the host."""
    scene = SCENES[name]
    made = []
    for cast in scene.casts:
        env = gpu_vecenv.make(name, 1, "cpu", **scene.config)
        players = {role: SCRIPTS[who](env.game) for role, who in cast.items()}
        (played,) = replay.record(env, players, seed=7)
        title = ", ".join(f"{role} {who}" for role, who in cast.items())
        made.append(replay.film(played, "cpu", title=title))
    if scene.trained:
        title = ", ".join(f"{role} trained" for role in scene.casts[0])
        made.append(replay.film(replay.Replay.load(replay_file(name)), "cpu", title=title))
    return made


def replay_file(name: str) -> Path:
    """Where the episode of this game's trained policies is."""
    return Path(__file__).parent / "films" / f"{name}.replay"


def write(folder: Path) -> None:
    """Write a page for each scene."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCENES:
        (folder / f"{name}.html").write_text(player.page(films(name), name), encoding="utf-8")
