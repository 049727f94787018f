"""Runs the page's scripts in Node.js, without a browser."""

import json
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_vecenv.web.module import web_module

NODE = shutil.which("node") or shutil.which("nodejs")
SCRIPTS = Path(__file__).resolve().parents[2] / "gpu_vecenv" / "web"
# Scripts of the page, in order, that compute policies; and that simulate episodes.
NETWORKS = ("engine.js", "network.js", "policy.js", "critic.js")
SIMULATION = (*NETWORKS, "numpy.js", "memory.js", "picture.js", "simulation.js", "history.js", "replay.js")
REQUIRED = os.environ.get("GPU_VECENV_REQUIRED", "").split()


def require_node():
    """Skips the tests of a module where there is neither Node.js nor a compiler, unless CI demands them."""
    if NODE is None and "node" not in REQUIRED:
        pytest.skip("no node on PATH", allow_module_level=True)
    if find_spec("ziglang") is None and "ziglang" not in REQUIRED:
        pytest.skip("the Python package ziglang is missing", allow_module_level=True)


def run_node(script, argument, *scripts, timeout=300):
    """What a script of tests/support writes, as JSON, given an argument in JSON; the page's scripts precede it."""
    text = "".join((SCRIPTS / name).read_text() for name in scripts) + (Path(__file__).parent / script).read_text()
    with tempfile.TemporaryDirectory() as folder:
        program, given = Path(folder, "script.mjs"), Path(folder, "argument.json")
        program.write_text(text)
        given.write_text(json.dumps(argument))
        command = [NODE, str(program), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def module_json(game, **options):
    """A game's module and layout for ``run_node``."""
    import base64

    module = web_module(game, **options)
    return {"wasm": base64.b64encode(module.wasm).decode(), "layout": module.layout, "shared": module.shared}
