"""Kernels on the host under AddressSanitizer and UndefinedBehaviorSanitizer; and what the script for a GPU believes.

Kernels are compiled with the sanitizers through $GPU_VECENV_CXXFLAGS and run in a Python process that has loaded
AddressSanitizer before all else: torch's tensors then come from its allocator, with guarded bytes around them.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import receipts
from games.crew import Crew
from gpu import sanitize
from gpu.planted_kernels import KERNELS, PLANTED, TEXT
from gpu.step_games import GAMES, cases

import gpu_vecenv
from gpu_vecenv.check.sanitize import sanitizer_environment, sanitizer_library
from gpu_vecenv.compile.backends.cuda_compiler import compile_cubin
from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.compile.codegen import inline_includes
from gpu_vecenv.declare.kernels import arguments_source
from gpu_vecenv.envs.registry import GAMES as REGISTERED
from gpu_vecenv.errors import CompilerError

ROOT = Path(__file__).resolve().parents[2]


@cache
def environment() -> dict[str, str]:
    """Of a process that watches its kernels."""
    try:
        return sanitizer_environment(sanitizer_library(HostBackend().compiler_command))
    except CompilerError as error:
        pytest.skip(str(error))


def watched(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python text under both sanitizers; leaks are none of their business, as Python keeps much to its end."""
    return subprocess.run(
        # The compiler is a child process of this one: it need not be watched.
        [sys.executable, "-c", "import os; del os.environ['LD_PRELOAD']\n" + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "tests",
        env={
            **os.environ,
            **environment(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )


# ---------------------------------------------------------------------- the tools see faults

# Each fault runs in a fork of one process. `x` is a tensor of n floats, `gone` a pointer to one that was let go of.
PLANTED_ON_THE_HOST = {
    "none": ("x[0] = 1; x[n - 1] = 2;", ""),
    "write past the end": ("x[n] = 1;", "heap-buffer-overflow"),
    "read before the start": ("x[0] = x[-1];", "heap-buffer-overflow"),
    "use after free": ("x[0] = gone[1];", "heap-use-after-free"),
    "local array": ("volatile int at = (int)n; int a[8]; a[0] = 0; a[at] = 1; x[0] = a[0];", "index 8 out of bounds"),
    "signed overflow": ("int i = 0x7fffffff; x[0] = i + (int)n;", "signed integer overflow"),
    "index in an int": ("int e = (int)n << 18; x[e * 1024 & 1] = 1;", "signed integer overflow"),
    "bad shift": ("x[0] = 1 << (int)(n * 4);", "shift exponent 32 is too large"),
    "misaligned": ("*(float*)((char*)x + 1) = 1;", "misaligned address"),
    "null": ("float* none = n == 8 ? nullptr : x; *none = 1;", "null pointer"),
    "float too large for an int": (
        "x[0] = 1e10f; x[1] = (float)(int)x[0];",
        "outside the range of representable values",
    ),
    "not a bool": ("*(u8*)x = 7; x[1] = *(bool*)x;", "not a valid value for type 'bool'"),
    "division by zero": ("int zero = (int)n - 8; x[0] = (float)((int)n / zero);", "division by zero"),
}

FORKED = """
import json, os, sys

def forked(run):
    # The exit code of a fork that runs this, and what it said: a sanitizer ends the process.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        run()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
"""

PLANT = """
import numpy as np, torch
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.compile.backends import LaunchShape
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar

names = json.loads(sys.argv[2])
arguments = Array("x", np.float32), Array("gone", np.float32, const=True), Scalar("n", np.int64)
kernels = [KernelSignature(f"fault{number}", arguments) for number in range(len(names))]
program = FunctionManager("cpu").compile(sys.argv[1], "planted.cu", kernels=kernels)

def plant(number):
    x, gone = torch.zeros(8), torch.zeros(8)
    launch = program.prepare(f"fault{number}", LaunchShape(1), x=x, gone=gone, n=8)
    launch._kept_alive.clear()
    del gone
    launch()

print(json.dumps({name: forked(lambda: plant(number)) for number, name in enumerate(names)}))
"""


@pytest.mark.exhaustive
def test_each_kind_of_fault_is_seen():
    text = '#include "kernel.cuh"\n' + "\n".join(
        f"KERNEL(fault{number}) {{ auto [x, gone, n] = args; FOR_ITEMS (k, 1) {{ {body} }} }}"
        for number, (body, _) in enumerate(PLANTED_ON_THE_HOST.values())
    )
    done = watched(FORKED + PLANT, text, json.dumps(list(PLANTED_ON_THE_HOST)))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("none") == [0, ""]
    for number, (name, (code, report)) in enumerate(said.items(), start=1):
        words = PLANTED_ON_THE_HOST[name][1]
        assert code != 0 and words in report, f"{name}: {report or 'nothing said'}"
        assert f"kernel_fault{number}" in report, f"{name}: the kernel is not named"
        assert f"planted.cu:{number + 2}" in report, f"{name}: the line is not named"


# In a game: an agent too far, in a tensor of outputs and in one of the state.
MUTANTS = {
    "obs": ("io.obs[i][1] = 1.0f + io.elapsed_steps;", "io.obs[i + 1][1] = 1.0f + io.elapsed_steps;"),
    "rewards": ("io.rewards[i] = hands_over;", "io.rewards[i + 1] = hands_over;"),
    "state": ("int rest = s.rest[i - 1];", "int rest = s.rest[i];"),
}

MUTATE = """
from pathlib import Path
from games.crew import Crew
from gpu.step_games import step_game

def mutate(path):
    mutant = type("Mutant", (Crew,), {"source": path})
    step_game("cpu", mutant, {}, 5, "same_step", "plain")

print(json.dumps({path.stem: forked(lambda: mutate(path)) for path in Path(sys.argv[1]).glob("*.cu")}))
"""


@pytest.mark.exhaustive
def test_a_fault_in_a_game_is_seen(tmp_path):
    text = Crew.source_path().read_text()
    for name, (old, new) in {"none": ("", ""), **MUTANTS}.items():
        assert name == "none" or text.count(old) == 1
        (tmp_path / f"{name}.cu").write_text(text.replace(old, new))
    done = watched(FORKED + MUTATE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("none") == [0, ""]
    assert said.keys() == MUTANTS.keys()
    for name, (code, report) in said.items():
        assert code != 0 and "heap-buffer-overflow" in report and f"{name}.cu:" in report, report or name


# ---------------------------------------------------------------------- and none in ours


def test_every_game_is_stepped():
    bundled = {name for name, game in REGISTERED.items() if game.__module__.startswith("gpu_vecenv.")}
    stepped = {game if isinstance(game, str) else game.name() for game, _ in GAMES}
    assert stepped >= bundled
    masks = [gpu_vecenv.configure(game, **config).masks_actions for game, config in GAMES]
    boxes = [gpu_vecenv.configure(game, **config).layout.action.continuous for game, config in GAMES]
    assert any(masks) and any(boxes) and not all(masks) and not all(boxes)


STEP = """
import runpy, sys
sys.argv = ["step_games.py", "--device", "cpu"]
runpy.run_path("gpu/step_games.py", run_name="__main__")
"""


@pytest.mark.exhaustive
def test_no_game_has_a_fault_on_the_host():
    done = watched(STEP)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-5000:]
    assert f"stepped {len(list(cases('cpu')))} environments" in done.stdout
    assert "runtime error" not in done.stderr and "Sanitizer" not in done.stderr


# ---------------------------------------------------------------------- the hook


def test_flags_from_the_environment_come_last_and_are_part_of_the_key(monkeypatch):
    monkeypatch.delenv("GPU_VECENV_CXXFLAGS", raising=False)
    plain = HostBackend()
    monkeypatch.setenv("GPU_VECENV_CXXFLAGS", "-DONE='a b' -g")
    debug = HostBackend()
    assert debug.command == [*plain.command, "-DONE=a b", "-g"]
    assert debug.identity != plain.identity and "-DONE=a b" in debug.identity
    monkeypatch.setenv("GPU_VECENV_CXXFLAGS", "'")
    with pytest.raises(CompilerError, match=r"\$GPU_VECENV_CXXFLAGS is \"'\""):
        HostBackend()


# ---------------------------------------------------------------------- what the script for a GPU believes

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
FOUND = {
    "memcheck": "========= ERROR SUMMARY: 2 errors",
    "racecheck": "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)",
}


@pytest.mark.parametrize("tool", CLEAN)
def test_a_summary_is_read(tool):
    assert sanitize.outcome(0, f"========= COMPUTE-SANITIZER\nx\n{CLEAN[tool]}\n").findings == 0
    said = sanitize.outcome(97, f"x\n{FOUND[tool]}\n")
    assert said.findings == (2 if tool == "memcheck" else 1) and said.summary in FOUND[tool]
    assert sanitize.outcome(0, f"{FOUND[tool]}\n{CLEAN[tool]}\n").findings > 0, "of a child process"
    assert sanitize.outcome(0, "ERROR SUMMARY: 0 errors, says the program\n").findings is None


# Stands for compute-sanitizer and for the Python below it: this machine has no GPU. $BEHAVIOUR says what goes wrong.
IMITATION = """#!{python}
import os, subprocess, sys
behaviour, planted = os.environ["BEHAVIOUR"], "planted_kernels.py" in " ".join(sys.argv)
tool = sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else None
if behaviour == "hangs" and planted:
    subprocess.run(["sleep", "600"])  # the program below the tool
if not planted:
    bits = "f" if tool and behaviour == "other bits" else "0"
    print("cartpole 1 agents 1 same_step", bits * 16)
    if not (tool and behaviour == "ends early"):
        print("stepped 1 environments")
if tool is not None and not (behaviour == "no summary" and not planted):
    found = behaviour != "blind" if planted else behaviour == "finds"
    if tool == "racecheck":
        print(f"========= RACECHECK SUMMARY: {{int(found)}} hazards displayed ({{int(found)}} errors, 0 warnings)")
    else:
        print(f"========= ERROR SUMMARY: {{int(found)}} errors")
    sys.exit(97 if found else 1 if behaviour == "fails" and not planted else 0)
sys.exit(1 if behaviour == "no GPU" else 0)
"""


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("well", None),
        ("finds", "; see "),
        ("blind", "void: it did not report its planted kernel"),
        ("hangs", "void: it did not report its planted kernel"),
        ("other bits", "void: other bits"),
        ("ends early", "void: the program ended early"),
        ("fails", "void: the program ended early, exit code 1"),
        ("no summary", "void: exit code 0 and no summary"),
        ("no GPU", "without a tool: exit code 1"),
    ],
)
def test_a_tool_counts_only_if_it_has_seen_its_planted_kernel(monkeypatch, tmp_path, capsys, behaviour, words):
    imitation = tmp_path / "compute-sanitizer"
    imitation.write_text(IMITATION.format(python=sys.executable))
    imitation.chmod(0o700)
    monkeypatch.setenv("BEHAVIOUR", behaviour)
    if behaviour == "hangs":
        monkeypatch.setattr(sanitize, "PLANTED_SECONDS", 1)
    results = tmp_path / "results"
    code = sanitize.main(results, sanitizer=str(imitation), python=str(imitation))
    said = capsys.readouterr().out
    written = {path.stem for path in (results / "receipts").glob("*.json")}
    if words is None:
        assert code == 0 and written == set(sanitize.TOOLS) <= set(receipts.REQUIRED)
        for tool in sanitize.TOOLS:
            receipt = receipts.read(tool, results / "receipts")
            assert receipt["metrics"]["findings"] == 0 and receipt["metrics"]["environments"] == sanitize.PARTS
            assert set(receipt["planted"]) == set(PLANTED[tool])
            assert "cuda/engine/step.cuh" in receipt["sources"] and "tests/gpu/step_games.py" in receipt["sources"]
            assert receipts.stale(receipt) == []
    else:
        assert code == 1 and written == set()
        assert said.count(words) == (1 if behaviour == "no GPU" else len(sanitize.TOOLS)), said


def test_the_planted_kernels_of_the_tools_compile_for_gpus_that_are_not_there():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    cubin = compile_cubin(
        inline_includes('#include "kernel.cuh"', "kernels", None)
        + arguments_source(KERNELS)
        + inline_includes(TEXT.partition("\n")[2], "planted_kernels.cu", None),
        "sm_90",
    )
    for kernels in PLANTED.values():
        for kernel in kernels:
            assert f".text.kernel_{kernel}\0".encode() in cubin


@pytest.mark.gpu
@pytest.mark.slow
def test_the_tools_see_their_planted_kernels(tmp_path):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("there is no compute-sanitizer")
    here = str(Path(sanitize.__file__).parent / "planted_kernels.py")
    for tool in sanitize.TOOLS:
        command = ["compute-sanitizer", "--tool", tool, *sanitize.OPTIONS, *sanitize.MORE_OPTIONS.get(tool, ())]
        said = [sanitize.run([*command, sys.executable, here, kernel], 120) for kernel in PLANTED[tool]]
        assert any(one.findings and one.code == sanitize.FOUND for one in said), said
