"""A game of one's own: written by ``gpu-vecenv new``, loaded by its path, refused where it is wrong, and run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from support.warm_process import run_python

import gpu_vecenv
from gpu_vecenv.check.game import check_game
from gpu_vecenv.cli.game_files import mark_as_checked, report_unchecked
from gpu_vecenv.cli.new import new_game
from gpu_vecenv.compile.backends.cuda import cuda_constants, default_threads_per_env
from gpu_vecenv.compile.backends.cuda_compiler import compile_cubin, header_folders
from gpu_vecenv.compile.codegen import game_source, missing_definitions
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES, load_game
from gpu_vecenv.errors import (
    ConfigError,
    DeviceUnavailableError,
    EnvDefinitionError,
    KernelCompileError,
    UnknownGameError,
)
from gpu_vecenv.train.run import RunConfig
from gpu_vecenv.train.run import run as train
from gpu_vecenv.views.gymnasium_env import GymnasiumVectorEnv

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"game_{name}.md").read_text(encoding="utf-8") for name in ("api", "checks")}
BARE = """from dataclasses import dataclass
from gymnasium.spaces import Box, Dict, Discrete
import numpy as np
from gpu_vecenv import Env, Field


@dataclass(frozen=True, kw_only=True)
class Lonely(Env):
    obs_dim = 2
    action_space = Discrete(3)
    state = (Field("x", np.float32),)
"""
BARE_TEXT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io) { ONCE s.x[0] = 0; }
HD void step(State s, Io io) { ONCE { s.x[0] += 1; io.truncations[0] = io.elapsed_steps >= 3; } }
HD void observe(State s, Io io) { ONCE { io.obs[0][0] = s.x[0]; io.obs[0][1] = 0; } }
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Games that a test adds, and their modules, are gone after it. Libraries stay: twice imported, some crash."""
    modules, ids = set(sys.modules), set(gymnasium.registry)
    games, path = dict(GAMES), list(sys.path)
    folders = tmp_path_factory.getbasetemp(), ROOT / "examples"
    yield
    GAMES.clear()
    GAMES.update(games)
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and any(map(Path(file).resolve().is_relative_to, folders)):
            del sys.modules[name]
    for title in set(gymnasium.registry) - ids:
        del gymnasium.registry[title]
    sys.path[:] = path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lonely.py and, unless it is None, lonely.cu beside it."""

    def write_files(declaration: str = BARE, text: str | None = BARE_TEXT, name: str = "lonely") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(declaration)
        if text is not None:
            path.with_suffix(".cu").write_text(text)
        return path

    return write_files


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, folder=folder)


# ---------------------------------------------------------------------- gpu-vecenv new


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "my games"
    done = run(folder.parent, "-m", "gpu_vecenv.cli", "new", "berry_ring", "--folder", "my games")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu-vecenv check 'my games/berry_ring.py'\n" in done.stdout
    return folder


def test_a_new_game_is_three_files_without_a_placeholder_left(written):
    assert sorted(os.listdir(written)) == ["berry_ring.cu", "berry_ring.py", "test_berry_ring.py"]
    for path in written.iterdir():
        text = path.read_text()
        assert "$" not in text and "my_game" not in text and len(text.splitlines()) > 40
        assert "berry_ring" in text


@pytest.mark.slow
def test_its_own_test_passes_and_sees_a_changed_rule(written, tmp_path):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_berry_ring.py", "-k", "rules")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout or torch.cuda.is_available()
    rules = tmp_path / "berry_ring.cu"
    rules.write_text(
        rules.read_text().replace("int direction = io.action(i) - 1;", "int direction = 1 - io.action(i);")
    )
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_berry_ring.py", "-k", "alone")
    assert done.returncode == 1 and "AssertionError" in done.stdout


@pytest.mark.slow
def test_it_runs_by_itself(written):
    done = run(written, "berry_ring.py")
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"(\d+) episodes of ", done.stdout)[1]) > 1000


# tests/cli/test_cli.py checks such a game too, but for the growth of memory.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_keeps_the_promises_of_the_interface(written, device):
    game = load_game(written / "berry_ring.py")
    check_game(game(max_steps=20), device=device, steps=30).raise_for_failures()


def test_it_is_found_by_gymnasium_once_its_file_is_imported(written):
    load_game(written / "berry_ring.py")
    envs = gymnasium.make_vec("gpu_vecenv/BerryRing-v0", num_envs=4, device="cpu", num_walkers=3)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (16, 4)


def test_it_is_well_formatted(written):
    tools = Path(sys.executable).parent
    for tool in ("ruff", "clang-format"):
        if not (tools / tool).exists():
            pytest.skip(f"{tool} is not installed beside this Python")
    rules = "E,F,I,B,C4,D,RUF,SIM,UP"
    options = ["--isolated", "--line-length", "120"]
    google = ["--config", 'lint.pydocstyle.convention="google"', "--ignore", "D105,D107"]
    commands = [
        ["ruff", "check", *options, "--select", rules, *google, "."],
        ["ruff", "format", *options, "--check", "."],
        ["clang-format", f"--style=file:{ROOT / '.clang-format'}", "--dry-run", "-Werror", "berry_ring.cu"],
    ]
    for command in commands:
        done = subprocess.run([tools / command[0], *command[1:]], cwd=written, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "class_name"),
    [("chase", "Chase"), ("my_game", "MyGame"), ("a_b", "A_B"), ("game_2d", "Game_2d"), ("x2_y", "X2Y"), ("x", "X")],
)
def test_the_class_is_called_after_the_game(name, class_name, tmp_path):
    declaration = new_game(name, tmp_path)[0]
    game = load_game(declaration)
    assert (game.__name__, game.name()) == (class_name, name)
    assert GAMES[name] is game


BAD_NAMES = {
    "MyGame": r"expected an identifier \[a-z\]",
    "": "expected an identifier",
    "my-game": "expected an identifier",
    "my_game.py": "expected an identifier",
    "../up": "expected an identifier",
    "größe": "expected an identifier",
    "2d": "expected an identifier",
    "x" * 64: "expected an identifier",
    "class": "a keyword of Python",
    "lambda": "a keyword of Python",
    "true": "a keyword of Python",
    "env": "used by the new files",
    "tag_gridworld": "is already the game TagGridworld",
    "random": "is already a module",
    "torch": "is already a module",
    "gpu_vecenv": "is already a module",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_and_nothing_written(name, tmp_path):
    with pytest.raises(ConfigError, match=BAD_NAMES[name]):
        new_game(name, tmp_path / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", ["lonely.py", "lonely.cu", "test_lonely.py"])
def test_no_file_is_overwritten_and_none_written_beside_it(there, tmp_path):
    (tmp_path / there).write_text("mine")
    with pytest.raises(FileExistsError, match=re.escape(there)):
        new_game("lonely", tmp_path)
    assert os.listdir(tmp_path) == [there] and (tmp_path / there).read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "test_lonely.py").symlink_to(tmp_path / "nowhere" / "x")  # does not exist, and cannot be made
    with pytest.raises(OSError):
        new_game("lonely", tmp_path)
    assert os.listdir(tmp_path) == ["test_lonely.py"]


def patch(folder: Path, name: str, body: str) -> None:
    """Applies a block of the page: lines that begin with a space or - go, those with a space or + come."""
    lines = body.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
    text = (folder / name).read_text()
    assert text.count(old) == 1, f"{name} has {text.count(old)} times:\n{old}"
    (folder / name).write_text(text.replace(old, new))


@pytest.mark.slow
def test_the_changes_of_the_page_can_be_made_to_a_new_game(tmp_path):
    new_game("my_game", tmp_path)
    *changes, test = re.findall(r"^```diff (\S+)\n(.*?)^```$", PAGES["checks"], re.MULTILINE | re.DOTALL)
    assert [name for name, _ in changes] == ["my_game.py", "my_game.cu"] and test[0] == "test_my_game.py"
    for change in changes:
        patch(tmp_path, *change)
    pytest_of_it = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py", "-k", "alone"]
    assert run(tmp_path, *pytest_of_it).returncode == 1
    patch(tmp_path, *test)
    done = run(tmp_path, *pytest_of_it)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------- a game by its path


def test_a_path_gives_the_game_in_it_and_registers_it(write):
    path = write()
    game = load_game(path)
    assert game.__name__ == "Lonely" and issubclass(game, Env)
    assert load_game(str(path)) is game and load_game(f"{path}:Lonely") is game
    assert gpu_vecenv.make("lonely", 2, "cpu").game == game()
    assert game.source_path() == path.resolve().with_suffix(".cu")


def test_a_file_may_import_its_neighbours(write, tmp_path):
    (tmp_path / "lonely_sizes.py").write_text("WIDE = 5\n")
    path = write("from lonely_sizes import WIDE\n" + BARE.replace("obs_dim = 2", "obs_dim = WIDE"))
    assert load_game(path)().layout.obs_size == 5


def test_one_of_several_games_is_chosen_by_its_class(write):
    path = write(
        BARE + BARE[BARE.index("@dataclass") :].replace("Lonely", "Other").replace("obs_dim = 2", "obs_dim = 7")
    )
    assert load_game(f"{path}:Other")().layout.obs_size == 7
    with pytest.raises(EnvDefinitionError, match=r"several games, Lonely, Other; choose one: lonely\.py:Lonely"):
        load_game(path)
    with pytest.raises(UnknownGameError, match="has no game 'Othr'; nearest: Other"):
        load_game(f"{path}:Othr")


@pytest.mark.parametrize("name", ["lonely", "tag_gridworld", "lonely.cu", "", "os:system"])
def test_what_is_no_python_file_is_no_path_of_a_game(name):
    with pytest.raises(UnknownGameError, match=r"expected my_game\.py"):
        load_game(name)


def test_a_game_is_checked_until_one_of_its_files_changes(write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.cuh").write_text(f"// {uuid4()}\n")  # no other run of this test has checked these files
    (tmp_path / "lonely_sizes.py").write_text("WIDE = 2\n")
    path = write("from lonely_sizes import WIDE\n" + BARE, '#include "near.cuh"\n' + BARE_TEXT)
    game = load_game("lonely.py")()

    def is_reported() -> bool:
        report_unchecked("lonely.py", game)
        return "lonely.py has not been checked as it is now" in capsys.readouterr().err

    for changed in (path, path.with_suffix(".cu"), tmp_path / "near.cuh", tmp_path / "lonely_sizes.py"):
        assert is_reported()
        mark_as_checked("lonely.py", game)
        assert not is_reported()
        changed.write_text(changed.read_text() + "\n")
    report_unchecked("cartpole", gpu_vecenv.configure("cartpole"))
    assert capsys.readouterr().err == ""


def test_a_name_never_runs_a_file(write, monkeypatch):
    path = write("raise SystemExit('it was run')\n" + BARE)
    monkeypatch.chdir(path.parent)
    for name in ("lonely", "lonely.py", "./lonely.py", str(path)):
        with pytest.raises(UnknownGameError, match="no game is called"):
            gpu_vecenv.make(name, 2, "cpu")
    with pytest.raises(
        UnknownGameError, match="a file is for the command line: in Python import it and give its class"
    ):
        gpu_vecenv.make("lonely.py", 2, "cpu")


BAD_FILES = {
    "no game": ("x = 3\n", "holds no game; expected a class that derives from gpu_vecenv.Env"),
    "an imported game": ("from gpu_vecenv.envs.cartpole import Cartpole\n", "holds no game"),
    "wrong syntax": ("x = 1\ndef f(:\n", r"lonely\.py:2: SyntaxError: invalid syntax"),
    "an error": ("x = 1\n\nnonsuch\n", r"lonely\.py:3: NameError: name 'nonsuch' is not defined"),
    "a missing library": ("import nonsuch_library\n", r"lonely\.py:1: ModuleNotFoundError"),
    "a field of a wrong type": (
        BARE.replace("np.float32", "np.float16"),
        r"lonely\.py:11: EnvDefinitionError: Field 'x' has dtype .*float16.*\(.*\); expected one of float32",
    ),
    "a name that is taken": (
        BARE.replace("Lonely", "Cartpole"),
        "register: 'cartpole' is already Cartpole",
    ),
    "a class whose name is no identifier": (BARE.replace("Lonely", "Größe"), "name is 'größe'; expected an identifier"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_no_game_is_refused(what, write):
    declaration, message = BAD_FILES[what]
    path, before = write(declaration), dict(GAMES)
    for _ in range(2):  # it does not become right by being asked for again
        with pytest.raises(EnvDefinitionError, match=message):
            load_game(path)
    assert dict(GAMES) == before


def test_a_file_that_was_wrong_can_be_put_right(write):
    path, before = write("gpu_vecenv_nonsuch\n" + BARE), list(sys.path)
    with pytest.raises(EnvDefinitionError, match="NameError"):
        load_game(path)
    assert sys.path == before and "lonely" not in sys.modules
    write(BARE + "import gpu_vecenv\ngpu_vecenv.register(Lonely)\nnonsuch\n")
    with pytest.raises(EnvDefinitionError, match="NameError"):
        load_game(path)
    write()
    assert load_game(path).__name__ == "Lonely"


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    (tmp_path / "folder.py").mkdir()
    for name in ("nowhere.py", "folder.py"):
        with pytest.raises(UnknownGameError, match=rf"no file .*{name}; \"gpu-vecenv new my_game\""):
            load_game(tmp_path / name)


@pytest.mark.parametrize("name", ["json", "tabnanny", "pytest"])  # one imported, one not, one of another library
def test_a_file_called_like_another_module_is_refused(name, write):
    with pytest.raises(EnvDefinitionError, match=f"another module called '{name}' already; rename the file"):
        load_game(write(name=name))


# ---------------------------------------------------------------------- declarations and texts that are wrong


def refusal(path: Path, error: type[Exception], device: str = "cpu") -> str:
    with pytest.raises(error) as raised:
        VecEnv(load_game(path)(), 2, device)
    return str(raised.value)


BAD_DECLARATIONS = {
    "roles as a method": (
        "    def roles(self): return {'cat': 1}\n",
        "Lonely: roles is a method; expected a property: write @property above it",
    ),
    "roles as a list": ("    roles = ['cat']\n", r"Lonely: roles is \['cat'\]; expected a mapping"),
    "a role that is no string": ("    roles = {3: 1}\n", "Lonely: role 3 is no identifier; expected"),
    "actions as a method": ("    def action_space(self): return 3\n", "action_space is a method; expected a property"),
    "sizes as a method": (
        "    def obs_dim(self): return 3\n",
        "obs_dim is a method; expected a property",
    ),
    "a state of one field": (
        "    state = (Field('x', np.float32))\n",
        r"Lonely: state is Field\(name='x'.*a tuple of Field, such as \(Field",
    ),
    "a state of names": ("    state = ('x', 'y')\n", r"Lonely: state is \('x', 'y'\); expected a tuple of Field"),
    "a size that is no size": ("    state = (Field('x', np.float32, ('wide',)),)\n", "state field 'x' has size 'wide'"),
    "actions of a kind unknown": (
        "    action_space = Dict({'a': Discrete(2)})\n",
        r"action spaces for \['a'\], but the roles are",
    ),
    "actions for a role unknown": (
        "    action_space = {'cat': Discrete(2)}\n",
        r"action spaces for \['cat'\], but the roles are \['agent'\]",
    ),
    "actions without bounds": (
        "    action_space = Box(-np.inf, np.inf, (2,))\n",
        "expected a bounded Box",
    ),
    "observations of integers": (
        "    observation_space = Box(0, 9, (2,), np.int32)\n",
        "observation space of 'agent' is Box.*expected a Box of float32 or uint8",
    ),
    "observations that are no box": (
        "    observation_space = Discrete(3)\n",
        r"observation space of 'agent' is Discrete\(3\); expected a Box",
    ),
    "values without a decorator": (
        "\nclass Lonely(Lonely):\n    size: int = 3\n",
        r"Lonely declares configuration values: write @dataclass\(frozen=True, kw_only=True\)",
    ),
}


@pytest.mark.parametrize("what", BAD_DECLARATIONS)
def test_a_wrong_declaration_is_refused_with_what_was_found(what, write):
    added, message = BAD_DECLARATIONS[what]
    said = refusal(write(BARE + added), EnvDefinitionError)
    assert re.search(message, said), said


def test_a_missing_device_source_is_named_with_its_expected_path(write):
    path = write(text=None)
    said = refusal(path, EnvDefinitionError)
    assert said.startswith(f"Lonely: its device code {path.with_suffix('.cu')} does not exist; ")
    assert said.count("lonely.cu") == 1 and "gpu-vecenv new my_game" in said


LINES = {
    "struct Scratch { … }": "struct Scratch {};\n",
    "HD void reset(State s, Io io) { … }": "HD void reset(State s, Io) { ONCE s.x[0] = 0; }\n",
    "HD void step(State s, Io io) { … }": next(line for line in BARE_TEXT.splitlines(True) if " step(" in line),
    "HD void observe(State s, Io io) { … }": next(line for line in BARE_TEXT.splitlines(True) if " observe(" in line),
}


@pytest.mark.parametrize("what", LINES)
def test_missing_definitions_are_named_with_the_file(what, write):
    path = write(text=BARE_TEXT.replace(LINES[what], f"// {LINES[what]}"))
    said = refusal(path, EnvDefinitionError)
    assert said.startswith(f"Lonely: {path.with_suffix('.cu')} does not define {what}; the compiler says: "), said
    assert said.count("does not define") == 1 and ", nor " not in said


def test_a_function_with_other_parameters_is_shown(write):
    path = write(text=BARE_TEXT.replace("reset(State s, Io)", "reset(State s,\n              const Io& io)"))
    said = refusal(path, EnvDefinitionError)
    assert "does not define HD void reset(State s, Io io) { … } (it has HD void reset(State s, const Io& io))" in said
    assert refusal(write(text=BARE_TEXT.replace("(State s, Io)", "(State s)")), EnvDefinitionError).count("it has") == 1


@pytest.mark.parametrize(
    "head",
    [
        "reset(State s, Io)",
        "reset(State, Io io)",
        "reset([[maybe_unused]] State s, Io /* none */)",
        "reset(State\n s,Io\n io )",
    ],
)
def test_every_way_to_write_the_definitions_is_known(head, write):
    path = write(text=BARE_TEXT.replace("reset(State s, Io) { ONCE s.x[0] = 0; }", f"{head} {{}}"))
    game = load_game(path)()
    assert missing_definitions(game.layout) == []
    VecEnv(game, 2, "cpu")


def test_an_error_in_the_source_is_reported_before_missing_definitions(write):
    """The compiler also says that step is never defined."""
    said = refusal(
        write(text=BARE_TEXT.replace("s.x[0] = 0; }", "s.x[0] = ; }").replace("void step", "int step")),
        KernelCompileError,
    )
    assert re.search(r"lonely\.cu:3:\d+: error", said)


def cuda_text(game: Env) -> str:
    return cuda_constants(default_threads_per_env(game.num_agents, game.layout.largest_array), 64 << 10) + game_source(
        game.layout
    )


def test_both_compilers_name_file_and_line_of_an_error(write):
    path = write(text=BARE_TEXT.replace("s.x[0] += 1;", "s.y[0] += 1;"))
    assert re.search(
        r"lonely\.cu did not compile .*\n +lonely\.cu:4:\d+: error: .*\by\b", refusal(path, KernelCompileError)
    )
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    with pytest.raises(KernelCompileError) as raised:
        compile_cubin(cuda_text(load_game(path)()), "sm_90")
    assert re.search(r'^lonely\.cu\(4\): error: class "State" has no member "y"', raised.value.log, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize("what", LINES)
def test_missing_definitions_are_named_on_a_gpu_too(what, write):
    path = write(text=BARE_TEXT.replace(LINES[what], ""))
    assert f"does not define {what}; the compiler says: " in refusal(path, EnvDefinitionError, "cuda")


@pytest.mark.parametrize("path", ["new", "own_env/predator_prey.py", "domain_randomisation.py"])
def test_the_same_source_compiles_for_a_gpu(path, written):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    game = load_game(written / "berry_ring.py" if path == "new" else ROOT / "examples" / path)()
    assert b"kernel_vecenv_step" in compile_cubin(cuda_text(game), "sm_90")


# ---------------------------------------------------------------------- images

PHOTO = """from dataclasses import dataclass
from gymnasium.spaces import Discrete
from gpu_vecenv.declare.env import Env, Field, i32, u8


@dataclass(frozen=True, kw_only=True)
class Photo(Env):
    state = (Field("clicks", i32, ("num_agents",)),)
    roles = {"camera": 2}
    obs_shape = (4, 5, 3)
    obs_dtype = u8
    action_space = Discrete(2)
"""
PHOTO_TEXT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io) { FOR_AGENTS (i) s.clicks[i] = 0; }
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        s.clicks[i] += io.action(i);
        io.rewards[i] = (float)io.action(i);
        io.truncations[i] = io.elapsed_steps >= 6;
    }
}
HD void observe(State s, Io io) { FOR_OBS (i, k) io.obs[i][k] = (u8)(100 * i + k + s.clicks[i]); }
"""


def photos(clicks: np.ndarray) -> np.ndarray:
    """(num_envs, 2, 4, 5, 3) uint8 of (num_envs, 2) clicks."""
    pixels = np.arange(60).reshape(4, 5, 3) + 100 * np.arange(2)[:, None, None, None]
    return (pixels + clicks[..., None, None, None]).astype(np.uint8)


def test_observations_may_be_images(write, device):
    game = load_game(write(PHOTO, PHOTO_TEXT, "photo"))()
    assert game.observation_space == Box(0, 255, (4, 5, 3), np.uint8)
    env = VecEnv(game, 5, device)
    obs, _ = env.reset(seed=1)
    assert obs.dtype == torch.uint8 and obs.is_contiguous()
    clicks = np.zeros((5, 2), np.int64)
    for step in range(14):
        assert np.array_equal(obs.cpu().numpy(), photos(clicks)), step
        actions = env.sample_actions()
        obs, *_, info = env.step(actions)
        clicks += actions.cpu().numpy()
        ended = info["_final_obs"].cpu().numpy()
        assert ended.all() == ended.any() == (step % 6 == 5)
        if ended.any():
            assert np.array_equal(info["final_obs"].cpu().numpy(), photos(clicks))
            clicks[:] = 0


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_gymnasium_vector_env_has_images_as_rows(output, write, device):
    game = load_game(write(PHOTO, PHOTO_TEXT, "photo"))()
    envs = GymnasiumVectorEnv(game, 5, device, output=output)
    assert envs.single_observation_space == Box(0, 255, (4, 5, 3), np.uint8)
    assert envs.observation_space == Box(0, 255, (10, 4, 5, 3), np.uint8)
    obs, _ = envs.reset(seed=1)
    obs, *_ = envs.step(np.ones(10, np.int64))
    images = obs if output == "numpy" else obs.cpu().numpy()
    assert images.dtype == np.uint8
    assert np.array_equal(images, photos(np.ones((5, 2), int)).reshape(10, 4, 5, 3))


def test_a_policy_learns_from_images(write, device):
    env = VecEnv(load_game(write(PHOTO, PHOTO_TEXT, "photo"))(), 64, device, autoreset_mode="next_step")
    config = gpu_vecenv.PPOConfig(total_steps=20_000, num_steps=16, learning_rate=3e-3, hidden_sizes=(16,))
    trainer = gpu_vecenv.Trainer(env, config, seed=1)
    before = trainer.evaluate(100)["return_camera"]
    trainer.train()
    assert trainer.evaluate(100)["return_camera"] > before + 2  # of 6; random play has 3


# ---------------------------------------------------------------------- all of CUDA C++

SWARM = """from dataclasses import dataclass
from gymnasium.spaces import Discrete
from gpu_vecenv.declare.env import Env, Field, f32, i32, i64, param
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar


@dataclass(frozen=True, kw_only=True)
class Swarm(Env):
    num_bees: int = param(8, low=1)

    host = False
    state = (Field("height", f32, ("num_agents",)),)
    kernels = (
        KernelSignature("lift", (Array("height", f32), Scalar("by", f32), Scalar("n", i64))),
        KernelSignature(
            "tally", (Array("height", f32, const=True), Array("above", i32), Scalar("limit", f32), Scalar("n", i64))
        ),
    )
    obs_dim = 2
    action_space = Discrete(2)

    @property
    def roles(self):
        return {"bee": self.num_bees}
"""
# Mean height by a cooperative group, the highest by warp intrinsics; and a kernel of its own.
SWARM_TEXT = """#include "game_api.cuh"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

static_assert(THREADS_PER_ENV <= 32, "a swarm fits in a warp");

struct Scratch {
    float mean;
    int highest;
};

HD void reset(State s, Io io) {
    FOR_AGENTS (i) s.height[i] = io.rng.uniform(i, 0);
}
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        s.height[i] += io.action(i);
        io.rewards[i] = s.height[i];
        io.truncations[i] = io.elapsed_steps >= 5;
    }
}
HD void observe(State s, Io io) {
    auto group = cg::tiled_partition<THREADS_PER_ENV>(cg::this_thread_block());
    float own = 0;
    int floor = -1;
    FOR_AGENTS (i) {
        own += s.height[i];
        floor = max(floor, (int)s.height[i]);
    }
    float sum = cg::reduce(group, own, cg::plus<float>());
    for (int k = THREADS_PER_ENV / 2; k > 0; k /= 2) floor = max(floor, __shfl_xor_sync(group_mask(), floor, k));
    if (group.thread_rank() == 0) {
        io.scratch->mean = sum / NUM_AGENTS;
        io.scratch->highest = floor;
    }
    group.sync();
    FOR_AGENTS (i) {
        io.obs[i][0] = io.scratch->mean;
        io.obs[i][1] = (float)io.scratch->highest;
    }
}

KERNEL(lift) {
    i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (k < args.n) atomicAdd(&args.height[k], args.by);
}
KERNEL(tally) {
    FOR_ITEMS (k, args.n) {
        bool is_above = args.height[k] > args.limit;
        unsigned mask = __ballot_sync(__activemask(), is_above);
        if (is_above && __popc(mask << (31 - threadIdx.x % 32)) == 1) atomicAdd(args.above, __popc(mask));
    }
}
"""


def test_a_game_for_cuda_only_is_refused_on_the_cpu_with_the_reason(write):
    game = load_game(write(SWARM, SWARM_TEXT, "swarm"))()
    for make in (VecEnv, GymnasiumVectorEnv):
        with pytest.raises(
            DeviceUnavailableError, match=r"Swarm declares host = False: .*CUDA only; use device=\"cuda\""
        ):
            make(game, 2, "cpu")
    with pytest.raises(DeviceUnavailableError, match="host = False"):
        check_game(game, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("num_bees", [1, 8, 32])
def test_a_game_for_cuda_only_may_use_all_of_cuda(num_bees, architecture, write):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    if not header_folders():
        pytest.skip("CUDA's headers are in no wheel and no toolkit here")
    cubin = compile_cubin(cuda_text(load_game(write(SWARM, SWARM_TEXT, "swarm"))(num_bees=num_bees)), architecture)
    for kernel in (b"kernel_vecenv_step", b"kernel_lift", b"kernel_tally"):
        assert kernel in cubin


def test_the_documented_game_for_cuda_only_compiles(write):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    if not header_folders():
        pytest.skip("CUDA's headers are in no wheel and no toolkit here")
    blocks = re.findall(r"^```(?:python|cuda)\n(?:#|//) hive\.(?:py|cu)\n(.*?)^```$", PAGES["api"], re.M | re.DOTALL)
    game = load_game(write(*blocks, "hive"))()
    assert b"kernel_lift" in compile_cubin(cuda_text(game), "sm_90")


@pytest.mark.slow
def test_headers_that_are_nowhere_are_named_with_what_to_install(write, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    path = write(SWARM, SWARM_TEXT, "swarm")
    script = f"""
import cuda.pathfinder
cuda.pathfinder.find_nvidia_header_directory = lambda library: None
from gpu_vecenv.compile.backends.cuda import cuda_constants
from gpu_vecenv.compile.backends.cuda_compiler import compile_cubin
from gpu_vecenv.errors import KernelCompileError
from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.envs.registry import load_game
try:
    compile_cubin(cuda_constants(8, 65536) + game_source(load_game({str(path)!r})().layout), "sm_90")
except KernelCompileError as error:
    print(error, error.log)
"""
    said = run(tmp_path, "-c", script)
    assert 'pip install "cuda-toolkit[cudart,cccl]==13.*"' in said.stdout, said.stderr
    assert 'swarm.cu(2): catastrophic error: could not open source file "cooperative_groups.h"' in said.stdout


@pytest.mark.gpu
def test_a_game_for_cuda_only_runs_there(write):
    game = load_game(write(SWARM, SWARM_TEXT, "swarm"))()
    env = VecEnv(game, 1000)
    obs, _ = env.reset(seed=3)
    for _ in range(4):
        height = env.state["height"]
        # 8 numbers below 6 in any order: each of 7 additions rounds by half an ulp below 64, then the quotient.
        error = (obs[:, 0, 0].double() - height.double().mean(1)).abs().max()
        assert error <= 7 * 2.0**-19 / 8 + 2.0**-22
        assert torch.equal(obs[:, 3, 1], height.floor().amax(1))
        obs, rewards, *_ = env.step(env.sample_actions())
        assert torch.equal(rewards, env.state["height"])
    height, above = env.state["height"], torch.zeros(1, dtype=torch.int32, device="cuda")
    expected = height + 0.5
    env.program.launch("lift", 8000, height=height, by=0.5, n=8000)
    assert torch.equal(height, expected)
    env.program.launch("tally", 8000, height=height, above=above, limit=2, n=8000)
    assert above.item() == (height > 2).sum().item() > 0


@pytest.mark.gpu
def test_a_game_for_cuda_only_keeps_the_promises_of_the_interface(write):
    report = check_game(load_game(write(SWARM, SWARM_TEXT, "swarm"))(), steps=30)
    report.raise_for_failures()
    assert "a game with host = False is not bit-reproducible" in report.notes["G05"][0]


NEIGHBORS = """from dataclasses import dataclass
from gymnasium.spaces import Discrete
from gpu_vecenv.declare.env import Env, Field, f32, param


@dataclass(frozen=True, kw_only=True)
class Flock(Env):
    num_birds: int = param(5, low=1)
    side: float = 3.0
    obs_dim = 3
    action_space = Discrete(2)
    state = (Field("place", f32, ("num_birds", 2)),)

    @property
    def roles(self):
        return {"bird": self.num_birds}
"""
NEIGHBORS_TEXT = """
HD void reset(State s, Io io) {
    FOR_AGENTS (i)
        for (int axis = 0; axis < 2; ++axis) s.place[i][axis] = SIDE * io.rng.uniform(i, axis);
}
HD void step(State, Io) {}
HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        io.scratch->place[i].x = io.obs[i][0] = s.place[i][0];
        io.scratch->place[i].y = io.obs[i][1] = s.place[i][1];
    }
    group_sync();
    find_observed(io);
    FOR_AGENTS (i) io.obs[i][2] = (float)io.scratch->nearest[i];
}
"""


@pytest.mark.parametrize("birds", [1, 5, 90])
def test_the_documented_neighbours_are_the_nearest(birds, write, device):
    (text,) = re.findall(r"^```cuda\n(#include \"cell_grid.cuh\"\n.*?)^```$", PAGES["api"], re.M | re.DOTALL)
    game = load_game(write(NEIGHBORS, text + NEIGHBORS_TEXT, "flock"))
    obs, _ = VecEnv(game(num_birds=birds), 7, device).reset(seed=3)
    places, nearest = obs[..., :2].cpu(), obs[..., 2].cpu()
    distances = torch.cdist(places.double(), places.double()) + torch.eye(birds) * 1e9
    expected = distances.argmin(2) if birds > 1 else torch.full((7, 1), -1)
    assert nearest.long().equal(expected)


@pytest.mark.usefixtures("without_pictures")
def test_after_training_a_game_without_draw_it_says_how_to_add_it(write, capsys, tmp_path):
    env = VecEnv(load_game(write())(), 4, "cpu", autoreset_mode="next_step")
    trainer = gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig(total_steps=8, num_steps=2, num_minibatches=1))
    assert train(trainer, tmp_path / "run", RunConfig(episodes=2)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "to watch it give the game a method draw(self, state), of which gpu-vecenv new my_game writes" in shown
    assert "replay record" not in shown and "4 environments x 1 agent (role: agent) on cpu" in shown


def test_a_run_whose_game_has_moved_is_found_after_it_was_resumed(written, tmp_path):
    command = partial(run, tmp_path, "-m", "gpu_vecenv.cli")
    shutil.copytree(written, tmp_path / "old")
    (game,) = (path.name for path in (tmp_path / "old").glob("*.py") if not path.name.startswith("test_"))
    small = "--num-envs 4 --num-steps 4 --num-minibatches 1 --hidden-sizes 8 --device cpu --episodes 2".split()
    assert command("train", f"old/{game}", *small, "--total-steps", "16", "--out", "run").returncode == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert command("evaluate", "run", "--episodes", "2", "--device", "cpu").returncode == 2
    assert command("train", f"new/{game}", "--resume", "run", "--total-steps", "32").returncode == 0
    assert command("evaluate", "run", "--episodes", "2", "--device", "cpu").returncode == 0
    assert command("train", "--resume", "run", "--total-steps", "48").returncode == 0
