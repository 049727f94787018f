"""Rules about the source itself: who imports whom, what is never called, how long a file may be."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_vecenv
from gpu_vecenv.env import Env, device_folder
from gpu_vecenv.registry import GAMES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpu_vecenv"
MODULES = sorted(PACKAGE.rglob("*.py"))
EVERYTHING = [path for top in ("gpu_vecenv", "adapters", "examples") for path in sorted((ROOT / top).rglob("*.py"))]
PYTHON_LINES, DEVICE_LINES, ADAPTER_LINES = 450, 300, 160

# A module imports only from earlier groups; backends and envs count as one module each.
GROUPS = (
    {"errors"},
    {
        "_version",
        "doctor",
        "compile_cache",
        "kernel_policy",
        "drawing",
        "spaces",
        "running_statistics",
        "graph",
        "distributed",
    },
    {"env", "device", "install", "player", "window"},
    {"envs", "prologue", "backends", "slab", "agents"},
    {"data_manager", "function_manager", "host_copy"},
    {"guards", "tuning_cache"},
    {"kernels"},
    {"arguments"},
    {"tensor_wrapper", "vec_env"},
    {"digest", "episode_log", "layers", "sampler", "stateful_wrappers", "transform_wrappers"},
    {"registry", "wrappers", "policy", "checkpoint", "render"},
    {"gymnasium_env", "pettingzoo_env", "batched_env", "rollout_storage", "evaluation"},
    {"learner_kernels", "check", "measurement", "replay_file"},
    {"ppo", "tuning"},
    {"trainer", "game_policy", "bench_games"},
    {
        "episode",
        "run_log",
        "plot",
        "check_game",
        "replay",
        "bench_against",
        "bench_compare",
        "bench_interfaces",
        "bench_table",
        "bench_training",
    },
    {"run", "bench_sweep"},
    {"new_game", "options", "bench"},
    {"train_command", "replay_command"},
    {"cli"},
)
# What an adapter imports beside torch, numpy, gymnasium, pettingzoo, where that is no library of its own name.
LIBRARIES = {
    "__init__": set(),
    "benchmarl": {"benchmarl", "torchrl"},
    "cleanrl": set(),  # scripts, no library
    "rllib": {"ray"},
    "rsl_rl": {"rsl_rl", "tensordict"},
    "sb3": {"stable_baselines3"},
    "torchrl": {"tensordict", "torchrl"},
}
RANK = {module: rank for rank, group in enumerate(GROUPS) for module in group}
OPTIONAL = {
    "pycuda", "cuda", "matplotlib", "pygame", "tensorboard", "imageio", "moviepy", "ray", "rl_games", "rsl_rl", "skrl",
    "lightning", "benchmarl", "stable_baselines3", "supersuit", "tensordict", "tianshou", "torchrl", "wandb", "ziglang",
}  # fmt: skip


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """The dotted name of everything that is imported below a node."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def imports_at_once(node: ast.AST) -> Iterator[str]:
    """Those that run when the module is imported: neither in a function nor for the type checker only."""
    for child in ast.iter_child_nodes(node):
        checker_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from imports(child)
        elif not checker_only and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_once(child)


def unit(path: Path) -> str:
    """env.py -> env, backends/host.py -> backends."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def of_the_package(names: Iterator[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("gpu_vecenv.")}


def libraries(names: Iterator[str]) -> set[str]:
    """What comes neither from the standard library nor from here."""
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"gpu_vecenv", "__future__"}


def test_the_rules_see_every_form_of_import():
    source = (
        "import gpu_vecenv.env as e\nfrom gpu_vecenv import cli\nfrom gpu_vecenv.backends.host import x\n"
        "import os, torch.nn\ndef f():\n    import matplotlib.pyplot\n"
        "try:\n    import pycuda\nexcept ImportError:\n    pass\n"
    )
    parsed = ast.parse(source)
    assert of_the_package(imports(parsed)) == {"env", "cli", "backends"}
    assert libraries(imports(parsed)) == {"torch", "matplotlib", "pycuda"}
    assert libraries(imports_at_once(parsed)) == {"torch", "pycuda"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_from_earlier_groups(path):
    here = unit(path)
    if here == "__init__":
        return
    assert here in RANK, f"{here} has no place in GROUPS"
    wanted = of_the_package(imports(tree(path))) - {here}
    assert {name for name in wanted if RANK.get(name, 99) >= RANK[here]} == set()


def test_importing_the_package_loads_neither_command_line_nor_benchmark():
    wanted = of_the_package(imports(tree(PACKAGE / "__init__.py")))
    assert wanted <= set(RANK) - {
        "cli",
        "train_command",
        "run",
        "run_log",
        "plot",
        "bench",
        "digest",
        "doctor",
        "install",
        "backends",
        "envs",
    }


@pytest.mark.parametrize("path", sorted((PACKAGE / "envs").glob("*.py")), ids=lambda path: path.stem)
def test_a_declaration_knows_nothing_of_torch_or_of_the_machine(path):
    names = list(imports(tree(path)))
    assert of_the_package(iter(names)) <= {"env", "envs", "errors", "drawing"}
    assert libraries(iter(names)) <= {"numpy", "gymnasium"}


def test_declaring_and_generating_need_no_torch():
    for name in ("env", "errors", "drawing", "prologue"):
        assert libraries(imports(tree(PACKAGE / f"{name}.py"))) <= {"numpy", "gymnasium"}


def test_tools_that_run_before_installation_need_only_python():
    assert libraries(imports(tree(PACKAGE / "doctor.py"))) == set()
    assert libraries(imports(tree(PACKAGE / "install.py"))) <= {"doctor"}
    assert of_the_package(imports_at_once(tree(PACKAGE / "install.py"))) == set()


def test_the_trainer_knows_neither_games_nor_backends():
    for name in ("ppo", "trainer", "policy", "rollout_storage", "checkpoint"):
        assert not of_the_package(imports(tree(PACKAGE / f"{name}.py"))) & {"envs", "backends", "registry"}


def test_only_the_backends_touch_drivers_and_foreign_functions():
    touching = {unit(path) for path in MODULES if libraries(imports(tree(path))) & {"cuda", "pycuda"}}
    touching |= {unit(path) for path in MODULES if any(name.startswith("ctypes") for name in imports(tree(path)))}
    assert touching == {"backends"}


def test_optional_libraries_are_imported_where_they_are_used():
    drivers = {"pycuda_driver.py": {"pycuda"}, "cuda_core_driver.py": {"cuda"}}
    for path in MODULES:
        assert libraries(imports_at_once(tree(path))) & OPTIONAL <= drivers.get(path.name, set()), path


def test_the_package_imports_nothing_that_is_not_part_of_it():
    for path in MODULES:
        top = {name.split(".")[0] for name in imports(tree(path))} | of_the_package(imports(tree(path)))
        assert not top & {"adapters", "examples", "tests"}, path


def test_an_adapter_uses_public_names_and_one_library():
    for path in (ROOT / "adapters").glob("*.py"):
        names = list(imports(tree(path)))
        assert of_the_package(iter(names)) <= {*gpu_vecenv.__all__, "adapters", "errors", "wrappers"} | (
            {"ppo", "distributed"} if path.stem == "lightning" else set()  # it brings no learner of its own
        ), path
        outside = libraries(iter(names)) - {"torch", "numpy", "gymnasium", "pettingzoo"}
        assert outside <= LIBRARIES.get(path.stem, {path.stem}), path
        if path.stem != "__init__":
            assert len(path.read_text(encoding="utf-8").splitlines()) <= ADAPTER_LINES


def test_examples_use_public_names_and_games():
    for path in (ROOT / "examples").glob("*.py"):
        assert of_the_package(imports(tree(path))) <= {*gpu_vecenv.__all__, "adapters", "envs"}, path


# ---------------------------------------------------------------------- names and places


def test_no_module_has_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "helper", "misc", "base", "core", "tools"}
    files = [*EVERYTHING, *(ROOT / "tests").rglob("*.py"), *device_folder().iterdir()]
    assert {path for path in files if path.stem in empty or path.parent.name in empty} == set()


def test_the_device_folder_is_no_python_package():
    assert device_folder() == ROOT / "cuda"
    assert {path.suffix for path in device_folder().rglob("*") if path.is_file()} == {".cu", ".cuh"}


def test_every_declaration_is_registered_and_has_its_device_text():
    stems = {path.stem for path in (PACKAGE / "envs").glob("*.py")} - {
        "__init__",
        "particles",
        "valley",
    }  # bases, no games
    assert stems
    for stem in stems:
        module = importlib.import_module(f"gpu_vecenv.envs.{stem}")
        games = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Env) and value.__module__ == module.__name__
        ]
        assert [game.name() for game in games] == [stem]
        assert GAMES[stem] is games[0]
        assert games[0].source_path() == device_folder() / f"{stem}.cu"
        assert games[0].source_path().is_file()
    assert {name for name, game in GAMES.items() if game.__module__.startswith("gpu_vecenv.")} == stems
    assert {path.stem for path in device_folder().glob("*.cu")} - stems == {
        "digest",
        "sampler",
        "learner",
        "layers",
        "minibatch",
    }


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_python_file_stays_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= PYTHON_LINES


@pytest.mark.parametrize("path", sorted(device_folder().iterdir()), ids=lambda path: path.name)
def test_a_device_file_stays_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= DEVICE_LINES


# ---------------------------------------------------------------------- what is never done

NEVER_IMPORTED = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "code",
    "codeop", "imp", "pty", "commands",
}  # fmt: skip
NEVER_CALLED = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "builtins.__import__", "torch.load", "torch.jit.load", "torch.export.load", "torch.hub.load",
    "torch.serialization.load", "torch.package.PackageImporter", "torch.ops.load_library",
    "torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load",
    "pandas.read_pickle", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "tempfile.mktemp", "importlib.reload", "importlib.__import__",
    "ctypes.PyDLL", "ctypes.OleDLL", "ctypes.WinDLL", "ctypes.cdll.LoadLibrary", "ctypes.pydll.LoadLibrary",
}  # fmt: skip
PROGRAM = re.compile(r"subprocess\.\w+")
NEVER_CALLED_FAMILIES = ("os.exec", "os.spawn", "os.posix_spawn")  # whatever letters come after
# Modules whose functions the rules below look for by their full names: they are imported whole, under these names.
BY_THEIR_NAMES = ("builtins", "ctypes", "importlib", "os", "runpy", "subprocess")
IMPORTING = {"import_module", "spec_from_file_location", "exec_module", "find_spec", "run_path", "run_module"}
# Where a module is imported by a name that is no literal, a file is run, a library loaded or a program started; and why
# no data decides what comes in there.
ALLOWED = {
    ("adapters/cleanrl.py", "runpy.run_path"): "a script of CleanRL's, which whoever calls it names",
    ("gpu_vecenv/backends/cuda.py", "importlib.import_module"): "a key of the table DRIVERS",
    ("gpu_vecenv/backends/host.py", "ctypes.CDLL"): "what the compiler made, now or earlier: an entry of the cache",
    ("gpu_vecenv/backends/compiler_process.py", "subprocess.Popen"): "the compiler: an argument list",
    ("gpu_vecenv/backends/host.py", "subprocess.run"): "its version: an argument list",
    ("gpu_vecenv/backends/cuda_compiler.py", "subprocess.run"): "nvcc's version: an argument list",
    ("gpu_vecenv/bench_interfaces.py", "importlib.import_module"): "a key of the table INTERFACES",
    ("gpu_vecenv/doctor.py", "importlib.import_module"): "literals of its callers",
    ("gpu_vecenv/doctor.py", "subprocess.run"): "which tools are there: an argument list",
    ("gpu_vecenv/install.py", "subprocess.run"): "pip: an argument list",
    ("gpu_vecenv/measurement.py", "subprocess.run"): "git describe: an argument list",
    ("gpu_vecenv/registry.py", "importlib.util.spec_from_file_location"): "a file that the command line is told to run",
    ("gpu_vecenv/registry.py", "spec.loader.exec_module"): "the same",
}


def called(source: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Dotted name of what is called, and the call."""
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def dangers(source: ast.AST) -> set[str]:
    """Ways to run what a file or a string says: unpickling, evaluating, shells."""
    found = {name for name in imports(source) if name.split(".")[0] in NEVER_IMPORTED}
    found |= {name for name in imports(source) if name in NEVER_CALLED or name.startswith(NEVER_CALLED_FAMILIES)}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in BY_THEIR_NAMES:
            found |= {f"from {node.module}"}
        if isinstance(node, ast.Import):
            found |= {f"{a.name} as {a.asname}" for a in node.names if a.asname and a.name in BY_THEIR_NAMES}
    for name, call in called(source):
        found |= {name} & NEVER_CALLED
        found |= {name} if name.startswith(NEVER_CALLED_FAMILIES) else set()
        shell = [keyword.value for keyword in call.keywords if keyword.arg in ("shell", "executable", "preexec_fn")]
        found |= {"shell=True" for value in shell if ast.unparse(value) != "False"}
        if PROGRAM.fullmatch(name) and (not call.args or isinstance(call.args[0], ast.JoinedStr | ast.Constant)):
            found |= {f"{name} of a string"}
    return found


def gates(source: ast.AST) -> set[str]:
    """Calls that import what a variable names, load a library or start a program."""
    found = set()
    for name, call in called(source):
        literal = bool(call.args) and isinstance(call.args[0], ast.Constant)
        if name.rpartition(".")[2] in IMPORTING and not literal:
            found.add(name)
        if PROGRAM.fullmatch(name) or name == "ctypes.CDLL":
            found.add(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "eval(x)",
        "exec('a')",
        "__import__('a')",
        "builtins.eval(x)",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "torch.jit.load(path)",
        "from yaml import load",
        "yaml.load(f)",
        "np.load(path)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=wanted)",
        "subprocess.run('ls -l')",
        "subprocess.run(f'ls {x}')",
        "subprocess.Popen(command, executable=x)",
        "from subprocess import run",
        "import subprocess as s",
        "import importlib as i",
        "from importlib import import_module",
        "from ctypes import CDLL",
        "ctypes.cdll.LoadLibrary(x)",
        "os.system(command)",
        "os.execvp(program, arguments)",
        "os.posix_spawnp(program, arguments, {})",
        "from os import system",
        "def f():\n    import marshal",
        "from runpy import run_path",
    ],
)
def test_the_rules_see_what_is_dangerous(source):
    assert dangers(ast.parse(source))


def test_the_rules_let_pass_what_is_not():
    harmless = "re.compile(x)\nmodel.eval()\nfunctions.compile(x)\nsubprocess.run(c, shell=False)\njson.load(f)\n"
    harmless += "import os, subprocess, ctypes.util, importlib.util\nos.environ.get('x')\nsubprocess.run(['a', b])\n"
    assert dangers(ast.parse(harmless + "safetensors.torch.load(b)\nfrom json import load\n")) == set()


@pytest.mark.parametrize(
    ("source", "gate"),
    [
        ("importlib.import_module(name)", "importlib.import_module"),
        ("importlib.import_module(f'a.{name}')", "importlib.import_module"),
        ("importlib.util.find_spec(name)", "importlib.util.find_spec"),
        ("loader.exec_module(module)", "loader.exec_module"),
        ("ctypes.CDLL(path)", "ctypes.CDLL"),
        ("ctypes.CDLL('libc.so')", "ctypes.CDLL"),
        ("subprocess.Popen(command)", "subprocess.Popen"),
        ("subprocess.run(command).stdout.strip()", "subprocess.run"),
        ("runpy.run_path(path)", "runpy.run_path"),
        ("importlib.import_module('torch')", None),
        ("importlib.util.find_spec('ziglang')", None),
    ],
)
def test_the_rules_see_where_something_may_come_in(source, gate):
    assert gates(ast.parse(source)) == ({gate} if gate else set())


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_read_is_ever_executed(path):
    assert dangers(tree(path)) == set()


def test_modules_libraries_and_programs_come_in_only_where_it_is_known_why():
    found = {(path.relative_to(ROOT).as_posix(), gate) for path in EVERYTHING for gate in gates(tree(path))}
    assert found == set(ALLOWED)


# ---------------------------------------------------------------------- public names


@pytest.mark.parametrize("name", gpu_vecenv.__all__)
def test_a_public_name_exists_and_is_documented(name):
    value = getattr(gpu_vecenv, name)
    if name == "__version__":
        assert value.count(".") == 2
        return
    text = inspect.getdoc(value)
    assert text and not text.startswith(f"{name}("), "dataclass writes that one itself"
    assert value.__module__.startswith("gpu_vecenv."), "somebody else's"
    if not inspect.isclass(value):
        return
    for attribute, member in vars(value).items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if attribute.startswith("_") or not (inspect.isroutine(member) or isinstance(member, property)):
            continue
        assert member.__doc__, f"{name}.{attribute}"


def test_the_package_exports_what_it_imports_and_nothing_else():
    imported = {name.rpartition(".")[2] for name in imports(tree(PACKAGE / "__init__.py"))}
    assert imported == set(gpu_vecenv.__all__)
    assert len(gpu_vecenv.__all__) == len(set(gpu_vecenv.__all__))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_module_says_what_it_is_for(path):
    assert ast.get_docstring(tree(path))
