"""A bundled game's version increases when its rules change: results of two versions are not comparable.

The table tests/game_versions.json says what each version does. After a change of rules, raise ``version`` in the game's
declaration and run

    python tests/envs/test_game_versions.py

which rewrites the table. It refuses where rules have changed and the version has not.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.digest import Digest
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.envs.registry import GAMES, versions

TABLE = Path(__file__).parents[1] / "game_versions.json"
# Row of the table -> name of a game, and the configuration that plays the version. A game's default configuration has
# the game's name, other versions of its rules a number after it.
ROWS = {
    name if version == game.version else f"{name}_v{version}": (name, config)
    for name, game in GAMES.items()
    if game.__module__.startswith("gpu_vecenv.")
    for version, config in versions(game).items()
}
BUNDLED = [row for row, (name, _) in ROWS.items() if row == name]
REWRITE = "python tests/envs/test_game_versions.py"
AGENTS, SEED = 256, 2**40 + 8  # of all environments together
MORE = 20  # steps, beyond those after which an episode is truncated
HELD = 16  # steps for which every other environment repeats its actions: that gets a car up the hill


def rules(kind: type[Env], device: str = "cpu", **config: Any) -> dict[str, Any]:
    """What a version identifies: its configuration, and the outputs of a fixed trajectory in that one.

    Only outputs count: the representation of state is no rule.
    """
    game = kind(**config)
    num_envs, steps = -(-AGENTS // game.num_agents), game.max_steps + MORE
    env = VecEnv(game, num_envs, device)
    digest, buffers = Digest(env.functions, num_envs), env.step_buffers()
    digest.add_reset(*env.reset(seed=SEED))
    held = torch.empty(0)
    for step in range(steps):
        actions = env.sample_actions()
        if step % HELD == 0:
            held = actions[::2].clone()
        if not game.masks_actions:  # a choice that was allowed may be forbidden now
            actions[::2] = held
        digest.add_step(actions, env.step(actions, out=buffers))
    ended = {name: total.sum().item() for name, total in env.episode_statistics().items()}
    defaults = {field.name: field.default for field in kind.own_fields()} | config
    counted = {"episodes": ended["episodes"], "terminated": ended["terminations"], "digest": digest.hex()}
    env.close()
    return {"version": game.played_version, "defaults": defaults, **counted}


def changes(name: str, known: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs from the table although the version does not. A new configuration value is no change by itself."""
    if now["version"] > known["version"]:
        return []
    if now["version"] < known["version"]:
        return [f"{name}: version fell from {known['version']} to {now['version']}"]
    found = []
    for key, value in known["defaults"].items():
        if key not in now["defaults"]:
            found.append(f"{name}: {key}, by default {value}, is gone")
        elif now["defaults"][key] != value:
            found.append(f"{name}: {key} was {value} by default and is {now['defaults'][key]}")
    for key in ("episodes", "terminated", "digest"):
        if now[key] != known[key]:
            found.append(f"{name}: {key} was {known[key]} and is {now[key]}")
    return found


def to_do(found: list[str]) -> str:
    """The message."""
    return "\n".join([*found, "the rules have changed: raise `version` in the declaration, then run", REWRITE])


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def test_the_table_has_the_bundled_games_and_no_others(table: dict[str, Any]) -> None:
    assert list(table) == list(ROWS), f"run {REWRITE}"


@pytest.mark.parametrize("name", ROWS)
def test_rules_match_the_version(name: str, table: dict[str, Any], device: str) -> None:
    game, config = ROWS[name]
    now = rules(GAMES[game], device, **config)
    assert not (found := changes(name, table[name], now)), to_do(found)
    assert table[name] == now, f"the table is behind: run {REWRITE}"


@pytest.mark.parametrize("name", BUNDLED)
def test_the_trajectory_covers_every_way_to_end(name: str, table: dict[str, Any]) -> None:
    """A rule that the trajectory never reaches could change unnoticed."""
    entry = table[name]
    # Of tag_continuous an end is 100 tags away; the trajectory has tags enough. A pole falls long before its limit,
    # which the table knows from the defaults; a board of Connect Four is full at it.
    never_terminates = {"tag_continuous", "pendulum", "simple_spread", "simple_tag", "simple_adversary", "overcooked"}
    never_terminates |= {"pursuit", "warehouse", "harvest", "cleanup", "economy"}
    outlasts = {"cartpole", "connect_four"}
    assert entry["episodes"] > 0
    assert (entry["terminated"] > 0) == (name not in never_terminates)
    assert (entry["terminated"] < entry["episodes"]) == (name not in outlasts)


def with_source(folder: Path, old: str, new: str, **attributes: Any) -> type[Env]:
    """Cartpole with changed device code."""
    text = Cartpole.source_path().read_text()
    assert text.count(old) == 1
    (folder / "cartpole.cu").write_text(text.replace(old, new))
    return type("Cartpole", (Cartpole,), {"source": folder / "cartpole.cu", **attributes})


def test_a_changed_rule_needs_a_new_version(table: dict[str, Any], tmp_path: Path) -> None:
    heavier = "io.rewards[0] = terminated ? -1.0f : 0.0f;\n        else\n            io.rewards[0] = 1;"
    changed = heavier.replace("= 1;", "= 2;")
    now = rules(with_source(tmp_path, heavier, changed))
    found = changes("cartpole", table["cartpole"], now)
    assert len(found) == 1 and "cartpole: digest" in found[0]
    assert not changes("cartpole", table["cartpole"], rules(with_source(tmp_path, heavier, changed, version=2)))


def test_equivalent_code_needs_no_new_version(table: dict[str, Any], tmp_path: Path) -> None:
    old = "bool terminated = math::abs(s.x[0]) > X_THRESHOLD ||"
    new = "bool terminated = X_THRESHOLD < math::abs(s.x[0]) ||"
    same = with_source(tmp_path, old, new)
    assert rules(same) == table["cartpole"]


def test_a_changed_default_needs_a_new_version(table: dict[str, Any]) -> None:
    known = table["cartpole"]
    more = {**known, "defaults": {**known["defaults"], "wind": 0.0}}  # the old rules, as long as nothing blows
    assert changes("cartpole", known, more) == []
    (found,) = changes("cartpole", {**known, "defaults": {**known["defaults"], "max_steps": 200}}, known)
    assert found == "cartpole: max_steps was 200 by default and is 500"
    (gone,) = changes("cartpole", more, known)
    assert gone == "cartpole: wind, by default 0.0, is gone"
    (fell,) = changes("cartpole", {**known, "version": known["version"] + 1}, known)
    assert fell.startswith("cartpole: version fell")


def main() -> int:
    """Rewrite the table; 1 and no table where rules have changed under an old version."""
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table = {row: rules(GAMES[name], **config) for row, (name, config) in ROWS.items()}
    found = [line for row in table if row in known for line in changes(row, known[row], table[row])]
    if found:
        print(to_do(found))
        return 1
    TABLE.write_text(json.dumps(table, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
