"""What SECURITY.md says of the sources: ruff finds what could run data, and the variables that are read are listed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gpu_vecenv", "adapters")
RUFF = Path(sys.executable).with_name("ruff")
FORBIDDEN = """\
eval("1")
exec("1")
import pickle; pickle.load(file)
import pickle; pickle.loads(content)
import pickle; pickle.Unpickler(file)
import marshal; marshal.loads(content)
import shelve; shelve.open("file")
import cloudpickle
import dill
import joblib
import numpy as np; np.load("file")
import torch; torch.load("file")
import torch; torch.hub.load("repository", "model")
import yaml; yaml.load(file, Loader=yaml.Loader)
import runpy
import os; os.system("ls")
import os; os.popen("ls")
import subprocess; subprocess.run("ls", shell=True)
import ctypes; ctypes.PyDLL("file")
import warnings; warnings.warn("message")
"""


@pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed")
@pytest.mark.parametrize("folder", ["gpu_vecenv/train", "gpu_vecenv/compile/backends", "adapters", "examples"])
def test_what_runs_data_is_found(folder: str) -> None:
    command = [RUFF, "check", "--stdin-filename", f"{folder}/new.py", "--output-format", "json", "-"]
    done = subprocess.run(command, input=FORBIDDEN, capture_output=True, text=True, cwd=ROOT)
    rules = ("S1", "S3", "S5", "S6", "TID251")
    found = {each["location"]["row"] for each in json.loads(done.stdout) if each["code"].startswith(rules)}
    assert [line for row, line in enumerate(FORBIDDEN.splitlines(), 1) if row not in found] == []


def test_every_exception_has_its_reason() -> None:
    for folder in (*PACKAGES, "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in re.findall(r".*noqa: (?:S\d|TID).*", path.read_text(encoding="utf-8")):
                assert re.search(r"noqa: \w+ +(?:- |\()\w", line), f"{path.name}: {line}"


# Of no effect on what is run.
HARMLESS = {"CUDA_VISIBLE_DEVICES", "GPU_VECENV_COMMIT", "GPU_VECENV_DEVICE", "LOCAL_RANK", "RANK", "WORLD_SIZE"}


def test_variables_that_decide_what_is_run_are_listed() -> None:
    sources = [path.read_text(encoding="utf-8") for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"""\benviron\b(?:\.get\(|\[)["'](\w+)["']""", text)}
    assert {"CXX", "GPU_VECENV_CACHE", "PATH"} <= read
    listed = set(re.findall(r"`\$(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")))
    assert read - listed == HARMLESS
