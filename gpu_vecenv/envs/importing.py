"""Objects that a command line names: ``module:name`` or ``file.py:name``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from gpu_vecenv.envs.registry import module_of_file
from gpu_vecenv.errors import ConfigError, nearest


def imported(option: str, text: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names; the module or file is imported, and so runs.

    The folder of a file, and for a module the working directory, are appended to ``sys.path``.

    Raises:
        ConfigError: The text has another form, there is no such module, file or name, or importing it fails.
    """
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"{option} is {text!r}; expected module:name or file.py:name")
    if source.endswith(".py"):
        if not (path := Path(source).resolve()).is_file():
            raise ConfigError(f"{option} is {text!r}: there is no file {path}")
        module = module_of_file(path)
    else:
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
        try:
            module = importlib.import_module(source)
        except Exception as error:  # a module that is run may raise anything
            raise ConfigError(f"{option} is {text!r}: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key in vars(found) if not key.startswith("_")]
            raise ConfigError(f"{option} is {text!r}: {source} has no {name!r}; {nearest(part, known)}")
        found = getattr(found, part)
    return found


def absolute(text: str) -> str:
    """``file.py:name`` with the file's whole path, so that ``imported`` finds it from another folder too."""
    source, _, name = text.rpartition(":")
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else text
