"""Games as WebAssembly: Node.js computes the digests of the CPU, in every game, version and autoreset mode."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import ledger
import pytest
from support.node import module_json, require_node, run_node

import gpu_vecenv
from gpu_vecenv.compile.webassembly import compile_webassembly, memory_layout
from gpu_vecenv.declare.kernels import POINTER_32
from gpu_vecenv.engine.vec_env import MODES, VecEnv
from gpu_vecenv.envs.registry import GAMES, versions
from gpu_vecenv.errors import CompilerError, DeviceUnavailableError, KernelCompileError, SourceRuleError

require_node()
DOCS = Path(__file__).parents[2] / "docs"
SLOW = ("tag_continuous", "skirmish")  # to compile
CONFIGS = [
    pytest.param(name, version, marks=pytest.mark.slow if name in SLOW else ())
    for name, game in GAMES.items()
    for version in versions(game).values()
]
MARKS = (10, 60)
MAX_BYTES = 100_000


@pytest.mark.parametrize("name, version", CONFIGS)
def test_node_computes_the_digests_of_the_cpu(name, version):
    """As in rows of the ledger, and shorter; 40 environments, so that single-agent games take the SIMD loop."""
    config = {**ledger.CONFIGS.get(name, {}), **version, "max_steps": 20}
    for mode in MODES:
        row = {"game": name, "config": config, "autoreset_mode": mode, "num_envs": 40, "seed": ledger.SEED}
        assert ledger.digests(row, ledger.WEBASSEMBLY, MARKS) == ledger.digests(row, "cpu", MARKS), mode


def test_the_ledger_is_replayed_as_webassembly(tmp_path, capsys):
    made = {"game": "cartpole", "config": {}, "autoreset_mode": "same_step", "num_envs": 8, "seed": 3}
    made |= {"device": "a GPU", "sources": ""}
    rows = [{**made, "digests": ledger.digests(made, "cpu", (40,))}, {**made, "digests": {"40": "0" * 16}}]
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ledger.main(["replay", "--webassembly", "--ledger", str(path)]) == 1
    said = capsys.readouterr().out
    assert "320 agent-steps, equal to a GPU" in said and "2 rows, 1 differ" in said and "as WebAssembly" in said


@pytest.mark.parametrize("name", GAMES)
def test_a_module_is_small_and_imports_nothing(name):
    wasm = compile_webassembly(gpu_vecenv.configure(name).layout)
    assert wasm[:4] == b"\0asm" and len(wasm) <= MAX_BYTES
    sections = dict(_sections(wasm))
    assert 2 not in sections, "it has a section of imports"
    for exported in ("memory", "__heap_base", "kernel_vecenv_reset", "kernel_vecenv_step", "kernel_vecenv_observe"):
        assert bytes([len(exported)]) + exported.encode() in sections[7]


def _sections(wasm):
    """Number and content of each section of a module."""
    at = 8
    while at < len(wasm):
        number, at, size, shift = wasm[at], at + 1, 0, 0
        while True:
            size |= (wasm[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if wasm[at - 1] < 128:
                break
        yield number, wasm[at : at + size]
        at += size


def test_the_code_of_the_documentation_runs(tmp_path):
    (code,) = re.findall(r"^```js\n(.*?)^```$", (DOCS / "web.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "documented.js"
    script.write_text(
        'import { readFileSync } from "node:fs";\n'
        "const { wasm, layout, shared } = JSON.parse(readFileSync(process.argv[2]));\n"
        f"const bytes = bytesOfBase64(wasm);\n{code}"
        "console.log(JSON.stringify([[...env.outputs.rewards], [...env.state.cell]]));\n"
    )
    game = gpu_vecenv.configure("tag_gridworld", num_taggers=2)
    rewards, cells = run_node(script, module_json(game), "engine.js")
    env = VecEnv(game, 64, "cpu")
    env.reset(seed=7)
    assert rewards == env.step(env.sample_actions())[1].flatten().tolist()
    assert cells == env.state["cell"].flatten().tolist()


def test_randomised_parameters_are_drawn_as_on_the_cpu():
    game = dataclasses.replace(gpu_vecenv.configure("pendulum", max_steps=7), randomize={"mass": (0.5, 2.0)})
    env = VecEnv(game, 5, "cpu", autoreset_mode="same_step")
    digest = gpu_vecenv.engine.digest.trajectory_digest(env, 11, 20, state_every=ledger.STATE_EVERY)
    job = {"num_envs": 5, "autoreset_mode": "same_step", "seed": "11", "marks": [20], "reset_every": 1}
    job |= {"state_every": ledger.STATE_EVERY, **module_json(game)}
    assert run_node("trajectory.js", job, "engine.js") == {"20": digest.hex()}


def test_the_layout_has_the_sizes_and_names_of_the_declaration():
    layout = memory_layout(gpu_vecenv.configure("tag_gridworld", num_taggers=2).layout)
    fields = {field["name"]: field for field in layout["fields"]}
    assert fields["state_cell"] == {"name": "state_cell", "dtype": "int32", "shape": [3, 2], "shared": False}
    assert {"name": "rewards", "dtype": "float32", "shape": [3]} in layout["outputs"]
    assert layout["roles"] == {"tagger": 2, "runner": 1} and layout["action"]["sizes"]["runner"] == [5]
    step = layout["kernels"]["vecenv_step"]
    names = [argument["name"] for argument in step["arguments"]]
    assert names[:2] == ["engine_key", "engine_episode"] and names[-1] == "num_envs"
    assert [a["offset"] for a in step["arguments"]][:2] == [0, POINTER_32.itemsize] and step["bytes"] % 8 == 0


def test_a_game_for_cuda_only_is_refused():
    layout = dataclasses.replace(gpu_vecenv.configure("cartpole").layout, host=False)
    with pytest.raises(DeviceUnavailableError, match=r"host = False.*does not run in a browser"):
        compile_webassembly(layout)


def test_source_rules_hold(tmp_path):
    layout = gpu_vecenv.configure("cartpole").layout
    source = tmp_path / "bad.cu"
    source.write_text(layout.source_path.read_text() + "\nHD float twice(float x) { return __builtin_fabsf(x); }\n")
    with pytest.raises(SourceRuleError, match="__builtin_fabsf"):
        compile_webassembly(dataclasses.replace(layout, source_path=source))


def test_errors_of_the_compiler_have_file_and_line(tmp_path):
    layout = gpu_vecenv.configure("cartpole").layout
    source = tmp_path / "bad.cu"
    source.write_text("HD int one() { return none; }\n" + layout.source_path.read_text())
    with pytest.raises(KernelCompileError, match=r"bad\.cu did not compile .*\n.*bad\.cu:1:23: error: .*none"):
        compile_webassembly(dataclasses.replace(layout, source_path=source))


def test_without_ziglang_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(CompilerError, match=r"ziglang is not installed; .*pip install 'gpu-vecenv\[compiler\]'"):
        compile_webassembly(gpu_vecenv.configure("cartpole").layout)
