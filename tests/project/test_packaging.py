"""The wheel: what is in it, and that it runs elsewhere, with pieces of the machine missing."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.shared import made_once

import gpu_vecenv
from gpu_vecenv.errors import LEAST_GYMNASIUM, DependencyVersionError, check_gymnasium

ROOT = Path(__file__).resolve().parents[2]
TREE = ("gpu_vecenv", "adapters", "cuda")
DOCUMENTS = ("ARCHITECTURE.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *DOCUMENTS)

# Runs a script with these changes to the machine, made before anything is imported.
WITHOUT = {
    "the package ziglang": "import sys; sys.modules['ziglang'] = None",
    # root too obeys permissions after this
    "root's right to write anywhere": textwrap.dedent("""
        import ctypes, os
        if os.getuid() == 0:
            header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            assert ctypes.CDLL(None).capset(header, none) == 0
    """),
}
STEP = """
import gpu_vecenv
env = gpu_vecenv.make("tag_gridworld", 3, "cpu")
env.reset(seed=1)
env.step(env.sample_actions())
print("stepped", env.elapsed_steps.tolist())
"""


RULES = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io) {}
HD void observe(State, Io io) { FOR_AGENTS (i) io.obs[i][0] = 0; }
"""
DECLARATION = """
from gymnasium.spaces import Discrete
from gpu_vecenv import Env

class Own(Env):
    obs_dim = 1
    action_space = Discrete(2)
"""


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the tree: nothing is left in it."""

    def make(folder: Path) -> None:
        for name in TREE:
            shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in BUILT_FROM:
            shutil.copy(ROOT / name, folder / "tree" / name)
        # The interpreter's own setuptools: building needs no network.
        build(folder / "tree", folder / "dist", "--wheel", "--sdist")

    return made_once(tmp_path_factory, "distributions", make) / "dist"


def build(tree: Path, dist: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "build", *kinds, "--no-isolation", "--outdir", str(dist), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with the wheel's content."""
    name = "site 'packages' \"游戏\""

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / name)]
        subprocess.run([*command, str(wheel)], check=True, capture_output=True)

    return made_once(tmp_path_factory, "spaces and ünïcödé", make) / name


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script with the installed wheel, in an empty folder."""

    def run_script(
        script: str, *options: str, arguments: Sequence[str] = (), **changes: str | None
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPU_VECENV", "XDG", "CXX"))}
        variables = {**kept, "PYTHONPATH": str(installed), "GPU_VECENV_CACHE": str(tmp_path / "kernels"), **changes}
        variables = {name: value for name, value in variables.items() if value is not None}
        done = subprocess.run(
            [sys.executable, *options, "-c", script, *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=variables,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run_script


def test_the_wheel_holds_the_tree_and_nothing_else(wheel):
    def files(folder: Path, *endings: str) -> set[str]:
        found = (path for ending in endings for path in folder.rglob(f"*{ending}"))
        return {path.relative_to(folder).as_posix() for path in found if "__pycache__" not in path.parts}

    expected = {f"gpu_vecenv/{name}" for name in files(ROOT / "gpu_vecenv", ".py", "py.typed", ".html", ".css", ".js")}
    expected |= {f"gpu_vecenv/adapters/{name}" for name in files(ROOT / "adapters", ".py")}
    expected |= {f"gpu_vecenv/_cuda/{name}" for name in files(ROOT / "cuda", ".cu", ".cuh")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
        for name in held & expected:
            source = name.replace("gpu_vecenv/_cuda/", "cuda/").replace("gpu_vecenv/adapters/", "adapters/")
            assert archive.read(name) == (ROOT / source).read_bytes()
    about = {name for name in held if name.split("/")[0].endswith(".dist-info")}
    assert held - about == expected
    assert {name.split("/")[0] for name in about} == {f"gpu_vecenv-{wheel.name.split('-')[1]}.dist-info"}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_says_what_it_needs_and_under_which_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        named = {name.split("/", 1)[1]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(named["METADATA"]).decode()
        entry_points = archive.read(named["entry_points.txt"]).decode()
        assert "licenses/LICENSE" in named
    lines = metadata.splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.10" in lines
    required = [line for line in lines if line.startswith("Requires-Dist:")]
    assert required and all(">=" in line or "==" in line or "gpu-vecenv[" in line for line in required)
    assert "gpu-vecenv = gpu_vecenv.cli.main:main" in entry_points


def test_the_source_distribution_gives_the_same_wheel(distributions, wheel, tmp_path):
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        members = {name.partition("/")[2] for name in source.getnames()}
        source.extractall(tmp_path, filter="data")
    wanted = {path.relative_to(ROOT).as_posix() for top in TREE for path in (ROOT / top).rglob("*.*") if path.is_file()}
    assert {name for name in wanted if "__pycache__" not in name} | set(BUILT_FROM) <= members
    (tree,) = tmp_path.iterdir()
    build(tree, tmp_path / "dist", "--wheel")
    (rebuilt,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(rebuilt) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []


@pytest.mark.slow
def test_the_installed_wheel_steps_from_its_own_files(run, installed):
    script = STEP + "from gpu_vecenv.declare.env import cuda_folder; print(gpu_vecenv.__file__); print(cuda_folder())"
    stepped, package, device_text = run(script).stdout.splitlines()
    assert stepped == "stepped [1, 1, 1]"
    assert package == str(installed / "gpu_vecenv" / "__init__.py")
    assert device_text == str(installed / "gpu_vecenv" / "_cuda")


@pytest.mark.slow
def test_it_steps_without_assertions(run):
    assert run(STEP, "-O").stdout == "stepped [1, 1, 1]\n"


@pytest.mark.slow
def test_it_steps_from_read_only_packages_without_a_home(run, installed):
    folders = [path for path in (installed, *installed.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    script = f"""{WITHOUT["root's right to write anywhere"]}
try:
    open({str(installed / "gpu_vecenv" / "new")!r}, "w")
except PermissionError:
    print("read-only")
{STEP}"""
    try:
        assert run(script, HOME=None).stdout == "read-only\nstepped [1, 1, 1]\n"
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.slow
def test_import_needs_no_home_no_compiler_and_no_cache(run, tmp_path):
    nothing = tmp_path / "empty"
    nothing.mkdir()
    script = f"""
{WITHOUT["the package ziglang"]}
import gpu_vecenv
from gpu_vecenv.errors import CompilerError
print(gpu_vecenv.configure("tag_gridworld").num_agents)
try:
    gpu_vecenv.make("tag_gridworld", 3, "cpu")
except CompilerError as error:
    print(error)
"""
    # Home and cache are in a place where nothing can be: it must not matter before something is compiled.
    nowhere = f"{os.devnull}/x"
    output = run(script, HOME=nowhere, PATH=str(nothing), GPU_VECENV_CACHE=nowhere).stdout
    assert output.startswith("5\nno C++ compiler: looked for $CXX, c++, g++, clang++ and the Python package ziglang;")
    assert list(tmp_path.iterdir()) == [nothing]


@pytest.mark.slow
def test_folders_of_any_name_do(run, tmp_path):
    """The packages', the cache's, the temporary files' and a game's: spaces, quotes, a line's end, other alphabets."""
    odd = tmp_path / "a 'b' \"c\" $(d)\n-游戏 ünï"
    (odd / "tmp").mkdir(parents=True)
    (odd / "own.cu").write_text(RULES, encoding="utf-8")
    (odd / "own.py").write_text(DECLARATION, encoding="utf-8")
    script = """
import gpu_vecenv
from gpu_vecenv.envs.registry import load_game
import sys
env = gpu_vecenv.make(load_game(sys.argv[1]), 3, "cpu")
env.reset(seed=1)
env.step(env.sample_actions())
print("stepped", env.elapsed_steps.tolist())
"""
    changes = {"GPU_VECENV_CACHE": str(odd / "cache"), "TMPDIR": str(odd / "tmp"), "HOME": str(odd)}
    assert run(script, arguments=[str(odd / "own.py")], **changes).stdout == "stepped [1, 1, 1]\n"
    assert list((odd / "cache").glob("*.so"))


def test_import_starts_no_program_and_writes_no_file(run, tmp_path):
    script = """
import sys
import gymnasium, pettingzoo, safetensors.torch, torch
sys.dont_write_bytecode = True
seen = []
def note(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "os.mkdir"):
        seen.append((event, arguments))
    elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append((event, arguments))
sys.addaudithook(note)
import gpu_vecenv
print(seen)
"""
    assert run(script).stdout == "[]\n" and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_cuda_context_is_made_on_the_cpu(run):
    script = f"""
{STEP}
import sys, torch
print(torch.cuda.is_initialized(), "pycuda" in sys.modules)
"""
    assert run(script).stdout == "stepped [1, 1, 1]\nFalse False\n"


def test_cuda_without_a_gpu_raises_only_if_requested(run):
    script = """
import gpu_vecenv
try:
    gpu_vecenv.make("tag_gridworld", 3, "cuda")
except gpu_vecenv.errors.DeviceUnavailableError as error:
    print(error)
"""
    said = run(script, CUDA_VISIBLE_DEVICES="", PATH="/nowhere").stdout
    assert said.startswith("device is 'cuda', but torch ") and 'or use the CPU: device="cpu"' in said


# Libraries that are there but fail to load: who needs them, and what is said then.
BROKEN = {
    "pygame": (
        "gpu_vecenv.GymnasiumVectorEnv('tag_gridworld', 2, 'cpu', render_mode='rgb_array')",
        'DependencyNotInstalled: frames need pygame (it is broken): pip install "gpu_vecenv[render]"',
    ),
    "stable_baselines3": ("from gpu_vecenv.adapters import sb3", "ImportError: it is broken"),
    "ziglang": (STEP, "stepped [1, 1, 1]"),
    "pycuda": ("gpu_vecenv.make('tag_gridworld', 2, 'cpu', driver='pycuda')", "ValueError: driver is 'pycuda'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_optional_library_matters_only_where_it_is_used(name, run, tmp_path):
    use, said = BROKEN[name]
    (tmp_path / "broken" / name).mkdir(parents=True)
    (tmp_path / "broken" / name / "__init__.py").write_text("raise ImportError('it is broken')")
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path / "broken")!r})
{STEP}
try:
    exec({use!r})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    stepped, then = run(script).stdout.splitlines()
    assert stepped == "stepped [1, 1, 1]" and then.startswith(said)


OPTIONAL = ("pycuda", "cuda", "matplotlib", "tensorboard", "stable_baselines3", "supersuit")


def test_import_brings_no_optional_library_and_no_cuda_context(run):
    # What torch, NumPy and Gymnasium import by themselves is not ours to decide.
    script = f"""
import sys
import gymnasium, numpy, torch
before = set(sys.modules)
import gpu_vecenv
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & set({OPTIONAL!r})), torch.cuda.is_initialized(), "gpu_vecenv" in new)
"""
    assert run(script).stdout == "[] False True\n"


def test_absent_optional_libraries_are_not_missed(run):
    # torch looks for `cuda` itself and does without.
    script = f"import sys; sys.modules.update(dict.fromkeys({(*OPTIONAL, 'ziglang')!r}))\n{STEP}"
    assert run(script).stdout == "stepped [1, 1, 1]\n"


@pytest.mark.slow
def test_import_changes_no_random_state_and_no_settings(run):
    script = """
import random
import numpy as np, torch
def settings():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    modes = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), np.geterr()
    return states, modes, torch.get_num_threads(), torch.get_default_dtype()
before = settings()
import gpu_vecenv
print(settings() == before)
env = gpu_vecenv.make("tag_gridworld", 3, "cpu")
env.reset(seed=1)
env.step(env.sample_actions())
print(settings() == before)
"""
    assert run(script).stdout == "True\nTrue\n"


@pytest.mark.slow
def test_import_lets_threads_of_torch_wait_passively_unless_the_user_decided(run):
    script = "import os, gpu_vecenv; print(os.environ['OMP_WAIT_POLICY'])"
    assert run(script, OMP_WAIT_POLICY=None).stdout == "passive\n"
    assert run(script, OMP_WAIT_POLICY="active").stdout == "active\n"


@pytest.mark.slow
def test_the_locale_does_not_matter(run):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = "import locale; assert locale.getpreferredencoding(False) != 'UTF-8'" + STEP
    assert run(script, PYTHONIOENCODING="utf-8", **ascii_only).stdout == "stepped [1, 1, 1]\n"


@pytest.mark.slow
def test_nothing_is_printed_or_warned_by_import(run):
    done = run("import gymnasium, torch, warnings; warnings.simplefilter('error'); import gpu_vecenv")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_import_warns_of_nothing_even_where_warnings_are_errors(installed, tmp_path):
    """``-W error`` is for all: what torch, Gymnasium and their like warn of by themselves is imported before."""
    script = "import gymnasium, pettingzoo, safetensors.torch, torch\nimport sys; "
    plain = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    if plain.returncode:
        pytest.skip(f"a dependency warns by itself: {plain.stderr.splitlines()[-1]}")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script + "import gpu_vecenv"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("version", "old"), [("0.29.1", True), ("1.0.0", True), ("1.1.0", False), ("1.2.0a1", False), ("2.0", False)]
)
def test_an_old_gymnasium_is_refused_in_one_sentence(version, old):
    with pytest.raises(DependencyVersionError, match="pip install") if old else contextlib.nullcontext():
        check_gymnasium(version)


def test_the_recipe_and_the_message_require_what_the_project_requires():
    text = (ROOT / "pyproject.toml").read_text()
    required = re.findall(r'"(\S+)"', text.partition("\ndependencies = [")[2].partition("\n]")[0])
    assert "torch>=2.6" in required
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    for one in required:
        name, version = re.fullmatch(r"([a-z]+)(.*)", one).groups()
        assert f"    - {name.replace('torch', 'pytorch')} {version}\n" in recipe
    assert f'version: "{gpu_vecenv.__version__}"' in recipe
    assert f"gymnasium>={'.'.join(map(str, LEAST_GYMNASIUM))},<2" in required
