"""Constants that Python and device code both have, as comments in Python say, have one value."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import gpu_vecenv

PACKAGE = Path(gpu_vecenv.__file__).parent
CUDA = PACKAGE.parent / "cuda"


def shared_constants():
    """Module, name, device source and name there, of each comment "the same as NAME in FILE", or "… as in FILE"."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            code, _, comment = line.partition("  # ")
            if "the same as" not in comment or ".cu" not in comment:
                continue
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            names = [node.id for node in ast.walk(ast.parse(code.strip())) if isinstance(node, ast.Name)]
            named = re.findall(r"(?:same as|and) ([A-Z_]+) in (\w+\.cuh?)", comment)
            everything = re.findall(r"same as in (\w+\.cuh?)", comment)
            for there, source in named or [(name, everything[0]) for name in names]:
                yield module, there if there in names else names[0], source, there


SHARED = list(shared_constants())


def test_there_are_such_comments():
    assert len(SHARED) > 15


@pytest.mark.parametrize(("module", "name", "source", "there"), SHARED)
def test_the_value_is_that_of_the_device_code(module, name, source, there):
    (path,) = CUDA.rglob(source)
    (value,) = set(re.findall(rf"constexpr int (?:\w+ = \d+, )*{there} = (\d+)\b", path.read_text(encoding="utf-8")))
    assert getattr(importlib.import_module(module), name) == int(value)
