"""The page of a game: one self-contained file, and beside it the parts for pages of one's own."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_vecenv._version import __version__
from gpu_vecenv.declare.arguments import check_kind
from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import game_summary
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.fixed_policy import noop_of
from gpu_vecenv.train.game_policy import GamePolicy
from gpu_vecenv.train.policy import Policy
from gpu_vecenv.views.agents import versioned_name
from gpu_vecenv.watch.inline_page import POLICY, inline_page, read
from gpu_vecenv.watch.player import player_script
from gpu_vecenv.watch.replay import Replay
from gpu_vecenv.watch.rerun import registered_name
from gpu_vecenv.web.inspection import critic_state_json, obs_parts_json
from gpu_vecenv.web.javascript import draw_source
from gpu_vecenv.web.module import WebModule, web_module
from gpu_vecenv.web.policies import policies_json

BEFORE_DRAW, AFTER_DRAW = (
    ("engine.js", "numpy.js"),
    (
        *("network.js", "policy.js", "critic.js", "memory.js"),
        *("picture.js", "simulation.js", "history.js", "episode.js", "steering.js"),
        *("replay.js", "inspector.js", "cards.js"),
        *("tiles.js", "mosaic.js", "page.js"),
    ),
)
FOLDER = Path(__file__).parent
# The page's module is compiled from its own data.
WITH_WEBASSEMBLY = POLICY.replace("script-src {script}", "script-src {script} 'wasm-unsafe-eval'")


def game_page(
    game: Env,
    policy: GamePolicy | None = None,
    *,
    title: str | None = None,
    replay: Replay | None = None,
) -> dict[str, bytes]:
    """The files of a page that plays a game without a server, by their names.

    ``index.html`` is self-contained: module, policies and scripts are in it. The others are its parts for pages of
    one's own: ``game.wasm``; ``game.json``, the layout of its memory and its shared fields; ``game.js``, its engine and
    its ``draw``.

    Args:
        game: The configured game. Randomised parameters (``randomize``) get a slider each.
        policy: Trained policies, which play unless the reader chooses otherwise; None: random play.
        title: Of the page; default: the game's name.
        replay: A replay of this game and configuration, with which the page begins.

    Raises:
        ConfigError: The policy or the replay is of another game or configuration, or has a network that the page does
            not compute.
        EnvDefinitionError: The game has no ``draw``, or one that has no counterpart in JavaScript.
        DeviceUnavailableError, CompilerError, SourceRuleError, KernelCompileError: As ``compile_webassembly``.
    """
    check_kind("game", game, Env, "a configured Env, from configure")
    check_kind("title", title, str, "a str", optional=True)
    check_kind("policy", policy, GamePolicy, "a GamePolicy, from load_policy", optional=True)
    if policy is not None and not _plays(policy.game, game):
        raise ConfigError(
            f"the policies are of {policy.game!r:.300}; expected policies of {game!r:.300}, whose page this is"
        )
    arrays = {} if policy is None or policy.game != game else policy.shared
    module, draw = web_module(game, arrays), draw_source(game)
    policies = () if policy is None else policy.policies.values()
    content = _content(game, module, policies, title, replay, arrays)
    page = inline_page(FOLDER, _script(draw), content, policy=WITH_WEBASSEMBLY)
    described = {key: content[key] for key in ("game", "version", "config", "layout", "shared")}
    return {
        "index.html": page.encode(),
        "game.wasm": module.wasm,
        "game.json": json.dumps(described, separators=(",", ":")).encode(),
        "game.js": (_scripts(BEFORE_DRAW) + draw).encode(),
    }


def training_page(game: Env, policies: Iterable[Policy]) -> bytes:
    """The page of a training run, which asks the server that it comes from for newer policies and for metrics.

    Args:
        game: The configured game.
        policies: Those that play at first.

    Raises:
        ConfigError, EnvDefinitionError, DeviceUnavailableError, CompilerError, SourceRuleError, KernelCompileError: As
            ``game_page``.
    """
    module, draw = web_module(game), draw_source(game)
    content = {**_content(game, module, policies, None, None, {}), "training": True}
    rules = f"{WITH_WEBASSEMBLY}; connect-src 'self'"
    return inline_page(FOLDER, _script(draw, "training.js"), content, policy=rules).encode()


def _plays(trained: Env, game: Env) -> bool:
    """Whether policies of one configured game can play another: equal but for what is randomised."""
    return dataclasses.replace(trained, randomize=()) == dataclasses.replace(game, randomize=())


def _content(
    game: Env,
    module: WebModule,
    policies: Iterable[Policy],
    title: str | None,
    replay: Replay | None,
    arrays: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """What the page's scripts read, in JSON types; ``arrays`` are shared fields that the policies were trained to."""
    name, layout = versioned_name(registered_name(type(game)), game), game.layout
    fields = {entry.name: entry.default for entry in game.own_fields()}
    changed = {key: getattr(game, key) for key in fields if getattr(game, key) != fields[key]}
    config = json.loads(json.dumps(dataclasses.asdict(game)))
    roles = ", ".join(f"{count} {role}" for role, count in layout.roles.items() if count)
    facts = {
        "game": name,
        "configuration": ", ".join(f"{key} {value}" for key, value in changed.items()) or "defaults",
        "WebAssembly": f"{len(module.wasm):,} bytes, from the source of the GPU's kernels",
        "made with": f"gpu_vecenv {__version__}",
    }
    return {
        "title": title or registered_name(type(game)),
        "summary": game_summary(type(game)) or roles,
        "game": registered_name(type(game)),
        "version": game.played_version,
        "config": config,
        "facts": list(facts.items()),
        "fps": game.render_fps,
        "termination_label": game.termination_label,
        "takes_turns": layout.takes_turns,
        "noop": {role: list(noop_of(game, role)) for role in layout.present_roles if _has_noop(game, role)},
        "parameters": [
            {"name": each.name, "low": each.low, "high": each.high, "value": getattr(game, each.name)}
            for each in layout.randomized
            if each.low < each.high
        ],
        "scalars": [
            {"name": name, "value": np.asarray({**game.arrays(), **arrays}[name]).item()}
            for name in shared_scalars(game)
        ],
        "policies": policies_json(policies),
        "replay": None if replay is None else _replay(game, config, replay),
        "obs_parts": obs_parts_json(game),
        "critic_state": critic_state_json(game),
        "layout": module.layout,
        "shared": module.shared,
        "wasm": base64.b64encode(module.wasm).decode(),
    }


def shared_scalars(game: Env) -> list[str]:
    """Fields of one number that all environments share: a reader of the page, or a curriculum, may change them."""
    return [field.name for field in game.layout.fields if field.shared and field.shape == ()]


def _has_noop(game: Env, role: str) -> bool:
    return role in game.noop if isinstance(game.noop, Mapping) else game.noop is not None


def _replay(game: Env, config: Mapping[str, Any], replay: Replay) -> dict[str, str]:
    check_kind("replay", replay, Replay, "a Replay, from record or Replay.load")
    if replay.game != registered_name(type(game)) or replay.version != game.played_version or replay.config != config:
        raise ConfigError(
            f"the replay is of {replay.game}, version {replay.version}, {replay.config!r:.300}; expected one of "
            f"{game!r:.300}"
        )
    name = f"{replay.game}, seed {replay.seed}, environment {replay.env_index}"
    return {"name": name, "content": base64.b64encode(replay.to_bytes()).decode()}


def _script(draw: str, *others: str) -> str:
    return _scripts(BEFORE_DRAW) + draw + player_script() + _scripts((*others, *AFTER_DRAW))


def _scripts(names: tuple[str, ...]) -> str:
    return "".join(read(FOLDER / name) for name in names)
