"""Scripts of examples/ and tests/gpu/ as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def imported_script(path: Path, *others: str) -> Iterator[ModuleType]:
    """The module of a script, in sys.modules meanwhile, where its dataclasses look; ``others`` are what it imports."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    before = list(sys.path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    for name in (path.stem, *others):
        sys.modules.pop(name, None)
