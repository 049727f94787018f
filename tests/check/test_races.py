"""``races=True``: on the CPU, accesses that race on a GPU; bundled games have none, and without a barrier they do."""

import re
import shutil

import pytest

import gpu_vecenv
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, DataRaceError
from gpu_vecenv.files import cuda_folder

BUNDLED = sorted(name for name, game in GAMES.items() if game.__module__.startswith("gpu_vecenv."))
QUICK = "tag_gridworld", "simple_tag", "warehouse"
# Game -> configuration with which each barrier of its source is needed within some steps.
CONFIGURATIONS = {
    "connect_four": {"opening_moves": 2},
    "overcooked": {"random_start_positions": True},
    "skirmish": {"observed_units": 3},
}
SYNC = re.compile(r"^(?!\s*//).*?\bgroup_sync\(\);", re.MULTILINE)
# Barriers, by game and their number in its source, that no access needs within RACED_STEPS steps of random actions.
RARE_OR_SPARE = {
    "cleanup": {2},  # apples grow once the river is clean
    "economy": {1, 4},  # the engine's and the market's own barriers follow
    "harvest": {1},
    "overcooked": {1},  # a soup begins to cook when a pot is full
    "pursuit": {2, 3},
    "skirmish": {5},  # what each unit's thread wrote, it reads itself
    "tag_continuous": {2, 3},  # observations of all agents; many agents are sorted into cells
    "warehouse": {4, 6},  # a robot with a shelf follows another one
}
RACED_STEPS = 100


def cases(quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.exhaustive) for name in BUNDLED]


def play(game, steps):
    env = VecEnv(game, 2, "cpu", races=True)
    env.reset(seed=17)
    for _ in range(steps):
        env.step(env.sample_actions())


@pytest.mark.parametrize("name", cases(QUICK))
def test_a_bundled_game_has_no_races(name):
    play(gpu_vecenv.configure(name, **CONFIGURATIONS.get(name, {})), RACED_STEPS)


@pytest.mark.parametrize("name", cases(("tag_gridworld",)))
def test_a_bundled_game_without_one_of_its_barriers_has_a_race(name, tmp_path):
    folder = shutil.copytree(cuda_folder() / "games", tmp_path / "games")
    path = folder / f"{name}.cu"
    source, game = path.read_text(), GAMES[name]
    for number, sync in enumerate(SYNC.finditer(source)):
        path.write_text(source[: sync.end() - len("group_sync();")] + "{}" + source[sync.end() :])
        own = type(game.__name__, (game,), {"source": path, "__module__": __name__})
        env = own(**CONFIGURATIONS.get(name, {}))
        if number in RARE_OR_SPARE.get(name, ()):
            play(env, RACED_STEPS)
        else:
            with pytest.raises(DataRaceError, match=r"(put|split the loop, with) group_sync\(\) between the two"):
                play(env, RACED_STEPS)


def test_a_build_that_finds_races_is_bitwise_equal():
    game = gpu_vecenv.configure("tag_gridworld", max_steps=6)
    one, other = VecEnv(game, 5, "cpu"), VecEnv(game, 5, "cpu", races=True)
    assert trajectory_digest(other, 3, 15).hex() == trajectory_digest(one, 3, 15).hex()


def test_a_compiler_with_another_sanitizer_is_refused(monkeypatch):
    monkeypatch.setenv("GPU_VECENV_CXXFLAGS", "-fsanitize=address")
    with pytest.raises(ConfigError, match=r"races=True on cpu: expected .* no other sanitizer"):
        VecEnv(gpu_vecenv.configure("tag_gridworld"), 2, "cpu", races=True)
