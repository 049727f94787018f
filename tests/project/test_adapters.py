"""Shared code of the adapters: errors for missing libraries and unsupported games."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from games.crew import Crew
from games.script import Script
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import gpu_vecenv
from gpu_vecenv import GymnasiumVectorEnv, adapters
from gpu_vecenv.errors import ConfigError, UnsupportedGameError
from gpu_vecenv.wrappers import FlattenObservation

FOLDER = Path(adapters.__file__).parent
ADAPTERS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


LIBRARIES = {
    name: {"sb3": "stable_baselines3", "rllib": "ray"}.get(name, name) for name in ADAPTERS if name != "cleanrl"
}
WITHOUT = f"""
import importlib, json, sys, traceback
said = {{}}
sys.modules.update(dict.fromkeys({list(LIBRARIES.values())}))
for name in {list(LIBRARIES)}:
    try:
        importlib.import_module(f"gpu_vecenv.adapters.{{name}}").make("cartpole", 1)
    except ModuleNotFoundError:
        said[name] = traceback.format_exc().strip()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def without():
    """Adapter -> what it says where no library is installed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_one_line(name, without):
    said = without[name]
    extra = re.search(r"ModuleNotFoundError: .* is not installed: pip install 'gpu-vecenv\[([\w-]+)\]'$", said)
    assert extra and extra[1] == name.replace("_", "-")
    assert "During handling" not in said and "direct cause" not in said
    assert f"\n{extra[1]} = [" in (FOLDER.parent / "pyproject.toml").read_text(), "an extra of that name"


def test_other_errors_of_imports_pass():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"), adapters.requires_extra("x"):
        importlib.import_module("torch")
        from torch import nothing  # noqa: F401


def test_views_are_distinguished():
    rows = GymnasiumVectorEnv("pendulum", 2, "cpu")
    assert adapters.checked_vector_env(rows, "Some library", kinds=(Box,)) is rows
    wrapped = FlattenObservation(rows)
    assert adapters.checked_vector_env(wrapped, "Some library") is wrapped
    for other in (gpu_vecenv.make("pendulum", 2, "cpu"), gpu_vecenv.parallel_env("pendulum", "cpu"), None):
        with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.GymnasiumVectorEnv"):
            adapters.checked_vector_env(other, "Some library")
    with pytest.raises(ValueError, match=r'env has output="torch" .*; expected output="numpy" and "next_step"'):
        adapters.checked_vector_env(rows, "Some library", output="numpy", mode="NEXT_STEP")


@pytest.mark.parametrize(
    ("game", "config", "allowed", "reason"),
    [
        (
            "cartpole",
            {},
            {"kinds": (Box,)},
            r"Some library does not support Discrete; the game has actions Discrete\(2\)\. .*that do: sb3",
        ),
        ("pendulum", {}, {"kinds": (Discrete,)}, r"not support Box; the game has actions Box\(.* that do: .*rsl_rl"),
        ("tag_continuous", {}, {"kinds": (Discrete, Box)}, "not support MultiDiscrete; .* that do: .*torchrl"),
        (Crew, {}, {}, "does not support action masks; .* that do: sb3, torchrl"),
    ],
)
def test_a_game_beyond_a_library_is_refused_with_what_to_take(game, config, allowed, reason):
    env = GymnasiumVectorEnv(game, 2, "cpu", **config)
    with pytest.raises(UnsupportedGameError, match=reason) as caught:
        adapters.checked_vector_env(env, "Some library", **allowed)
    assert isinstance(caught.value, ConfigError)


def test_only_adapters_that_take_the_whole_game_are_named():
    with pytest.raises(UnsupportedGameError, match=r"that do: sb3, torchrl, rl_games, tianshou, lightning$"):
        adapters.check_actions("Some library", MultiDiscrete([2, 3]), (Box,), masks_actions=True)
    with pytest.raises(UnsupportedGameError, match="make the game with continuous_actions=True"):
        adapters.checked_vector_env(GymnasiumVectorEnv("simple_tag", 2, "cpu"), "Some library", kinds=(Box,))


def test_what_an_adapter_sets_is_not_taken():
    game, rest = adapters.split_config("cartpole", {"max_steps": 7, "validate": "sync"}, output="numpy")
    assert game.max_steps == 7 and rest == {"validate": "sync", "output": "numpy"}
    with pytest.raises(ConfigError, match=r"output is 'torch'; the adapter sets it \('numpy'\): leave it out"):
        adapters.split_config("cartpole", {"output": "torch"}, output="numpy")
    with pytest.raises(ConfigError, match=r"seed is 3, .*pass it to reset\(seed=…\)"):
        gpu_vecenv.make("cartpole", 2, "cpu", seed=3)


def test_wrappers_are_refused_where_they_cannot_be():
    env = FlattenObservation(GymnasiumVectorEnv("pendulum", 2, "cpu"))
    with pytest.raises(TypeError, match="expected a GymnasiumVectorEnv without wrappers for Some library"):
        adapters.checked_vector_env(env, "Some library", wrapped=False)


def test_what_is_named_instead_exists_and_is_what_the_page_has():
    assert {name for names in adapters.SUPPORTED_BY.values() for name in names} <= set(ADAPTERS)
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    names, _, *rows = page[page.index("| | sb3 |") :].partition("\n\n")[0].splitlines()
    titles = {"roles with actions of their own": "a policy per role"}
    for feature, supporting in adapters.SUPPORTED_BY.items():
        wanted = titles.get(feature, feature)
        (row,) = (row for row in rows if row.split("|")[1].strip().replace("`", "") == wanted)
        cells = zip(names.split("|")[2:-1], row.split("|")[2:-1], strict=True)
        assert {name.strip() for name, cell in cells if cell.strip() != "\N{EN DASH}"} == set(supporting), feature


def test_roles_of_different_sizes_need_masks_or_a_library_with_roles():
    adapters.checked_vector_env(GymnasiumVectorEnv(Crew, 2, "cpu"), "Some library", masks=True)
    adapters.checked_vector_env(GymnasiumVectorEnv(Script, 2, "cpu", num_others=2), "Some library")
    with pytest.raises(UnsupportedGameError, match=r"of their own; .*\{'lead': \(4,\), 'other': \(2,\)\}.*skrl"):
        adapters.checked_vector_env(
            GymnasiumVectorEnv(Script, 2, "cpu", num_others=2, choices_of_others=2), "Some library"
        )
