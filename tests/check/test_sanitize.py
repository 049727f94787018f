"""A game under the sanitizers: one sentence with file and line, also where it crashes or does not end."""

import re
import sys

import pytest
from support.cases import mostly_exhaustive
from support.hostile import MISTAKE_LINE, Walkers, walkers

from gpu_vecenv.check.game import check_game
from gpu_vecenv.check.sanitize import sanitizer_finding, sanitizer_library
from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.envs.registry import load_game
from gpu_vecenv.errors import CompilerError, ConfigError

DECLARATION = """from dataclasses import dataclass
from pathlib import Path
from support.hostile import Walkers

@dataclass(frozen=True, kw_only=True)
class {name}(Walkers):
    source = Path(__file__).with_name("walkers.cu")
"""
WHERE = rf"walkers\.cu:{MISTAKE_LINE}: "
# What it is -> statement, finding.
MISTAKES = {
    "division by zero": (
        "ONCE s.goal[0] = 7 / (s.goal[0] - s.goal[0] * io.elapsed_steps);",
        WHERE + r"division by zero \(in step 1\)$",
    ),
    "write beyond all environments": (
        "float* own = s.place[0]; ONCE own[200] = 1;",
        WHERE + r"heap-[a-z-]+, a write of 4 bytes \(in step 1\)$",
    ),
    "endless loop": (
        "ONCE while (s.goal[0] >= 0 && io.elapsed_steps > 4) s.goal[0] = (s.goal[0] + 1) % 3;",
        WHERE + r"step 5 did not end within 3 s: look for a loop",
    ),
    "crash": ("float* own = s.place[0]; ONCE own[2000000000] = 1;", WHERE + r"SEGV \(in step 1\)$"),
    "none": ("//", None),
}


@pytest.fixture
def _sanitizer():
    try:
        sanitizer_library(HostBackend().compiler_command)
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """A function that makes a game with a statement, in a module of its own."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def declare(name, statement):
        walkers(tmp_path, new=statement)
        path = tmp_path / f"{name.lower()}.py"
        path.write_text(DECLARATION.format(name=name))
        return load_game(path)()

    return declare


@pytest.mark.slow
@pytest.mark.usefixtures("_sanitizer")
@pytest.mark.parametrize("mistake", mostly_exhaustive(MISTAKES, ["none", "division by zero"]))
def test_a_finding_is_one_sentence_with_file_and_line(mistake, declared):
    statement, expected = MISTAKES[mistake]
    limit = 3.0 if mistake == "endless loop" else 100.0  # seconds of a step, of which a crash's report takes some
    found = sanitizer_finding(declared(f"Watched{list(MISTAKES).index(mistake)}", statement), 8, 20, 3, limit)
    assert found is None if expected is None else re.match(expected, str(found)), found


@pytest.mark.slow
@pytest.mark.usefixtures("_sanitizer")
def test_check_stops_at_what_the_sanitizers_find(declared):
    report = check_game(declared("Sanitized", MISTAKES["crash"][0]), device="cpu", steps=10, num_envs=4, sanitize=True)
    assert (report.passed, report.failed, report.skipped) == ([], ["G00"], {})
    assert report.failures[0].got.startswith(f"walkers.cu:{MISTAKE_LINE}: SEGV")


def test_a_compiler_without_the_sanitizer_is_named():
    with pytest.raises(CompilerError, match=r"ziglang c\+\+ has no shared AddressSanitizer.*Install g\+\+.*\$CXX"):
        sanitizer_library([sys.executable, "-m", "ziglang", "c++"])


@pytest.mark.usefixtures("_sanitizer")
def test_a_game_that_another_process_cannot_import_is_refused(tmp_path):
    local = type("Local", (Walkers,), {"source": walkers(tmp_path).source})
    with pytest.raises(ConfigError, match=r"another process cannot import Local: .*put it in a module"):
        sanitizer_finding(local(), 2, 10, 3, 3.0)
