"""What all tests share: required libraries, environment variables, CPU limits, devices."""

import gc
import importlib.util
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fuzzing import VARIABLE, fuzz_seed

# Variables of the caller that would change what the programs under test print, install, seed or connect to.
CLEARED = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GPU_VECENV_DEVICE", "GPU_VECENV_CXXFLAGS", "GPU_VECENV_COMMIT", "PYTHONOPTIMIZE", "PYTHONWARNINGS"),
    *("MAKEFLAGS", "MAKELEVEL", "MFLAGS"),
)

BEGIN = time.monotonic()
LEFT_FOR_LATER = "left for the next part of the run"
COLLECTED = pytest.StashKey[set[str]]()
LEFT_OUT = pytest.StashKey[int]()  # tests that need a GPU, where there is none


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="fail each test that is not marked slow and uses more CPU time, that of its child processes included",
    )
    parser.addoption(
        "--host-flags",
        default="",
        metavar="FLAGS",
        help="compiler flags for the host's kernels, such as -Og, with which they compile in half the time",
    )
    parser.addoption(
        "--passed",
        type=Path,
        metavar="FILE",
        help="leave out the tests that FILE lists, and add those that pass: a run in parts",
    )
    parser.addoption(
        "--max-seconds",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no test later than this; tests that are left make the exit code 3",
    )


def pytest_report_header() -> str:
    return f"random inputs: {VARIABLE}={fuzz_seed()} repeats them"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "random_seed" in getattr(item, "fixturenames", ()):
        report.sections.append(("random inputs", f"{VARIABLE}={fuzz_seed()} repeats them"))
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Libraries named in $GPU_VECENV_REQUIRED must be installed: their tests must not be skipped."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; programs under test inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in CLEARED:  # here and not in a fixture: modules copy the environment when they are imported
        os.environ.pop(name, None)
    if not hasattr(config, "workerinput"):  # only the first of pytest-xdist's processes has all reports
        config.pluginmanager.register(Parts(config.getoption("--passed")))
    if flags := config.getoption("--host-flags"):
        os.environ["GPU_VECENV_CXXFLAGS"] = flags
    os.environ["MPLBACKEND"] = "agg"
    os.environ["GPU_VECENV_PROGRESS_SECONDS"] = "86400"  # no test prints more on a slower machine
    fuzz_seed()
    os.umask(0o022)
    for library in os.environ.get("GPU_VECENV_REQUIRED", "").split():
        find = shutil.which if library in ("chromium", "node") else importlib.util.find_spec  # programs and libraries
        if library != "cleanrl" and find(library) is None:  # its tests fetch CleanRL's scripts
            pytest.exit(f"$GPU_VECENV_REQUIRED names {library}, which is not installed", returncode=1)


frozen_modules = 0


def freeze_what_was_imported() -> None:
    """Each trainer that is closed collects garbage; 0.5 s if that visited all tests and modules."""
    global frozen_modules
    if len(sys.modules) > frozen_modules + 300:  # torch._dynamo is imported by the first optimizer
        gc.collect()
        gc.freeze()
        frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_what_was_imported()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    freeze_what_was_imported()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in path for path in config.args):  # whole files, before markers and keywords choose
        config.stash[COLLECTED] = {item.nodeid for item in items}
    if (file := config.getoption("--passed")) is not None and file.exists():
        passed = set(file.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    if torch.cuda.is_available():
        return
    needy = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needy)
    config.stash[LEFT_OUT] = len(needy)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGIN > item.config.getoption("--max-seconds"):
        pytest.skip(LEFT_FOR_LATER)


class Parts:
    """Of a run in parts: which tests passed, and whether some are left."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.is_any_left = file, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_any_left |= report.skipped and LEFT_FOR_LATER in str(report.longrepr)
        if self.file is not None and report.when == "call" and report.passed:
            with self.file.open("a") as lines:
                lines.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_any_left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = 3


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # in a process of pytest-xdist
        output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process of pytest-xdist collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {count} tests of NVIDIA GPUs, of which torch finds none here")


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    limit, begin = item.config.getoption("--cpu-limit"), cpu_seconds()
    yield
    used = cpu_seconds() - begin
    if limit is not None and used > limit and not item.get_closest_marker("slow"):
        pytest.fail(
            f"{used:.1f} s of CPU time, more than {limit:g}: mark the test slow, or make it faster", pytrace=False
        )


@pytest.fixture
def collected_tests(pytestconfig: pytest.Config) -> set[str]:
    """The node ids of the files that this run has read in whole, those included that it does not run."""
    return pytestconfig.stash.get(COLLECTED, set())


@pytest.fixture
def random_seed() -> int:
    """The seed of random inputs, another one in each run."""
    return fuzz_seed()


@pytest.fixture
def shipped_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled as users have them, whatever --host-flags says."""
    monkeypatch.delenv("GPU_VECENV_CXXFLAGS", raising=False)


@pytest.fixture
def pictures() -> None:
    """For tests of drawings in a module without_pictures."""


@pytest.fixture
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no learning curve, a second each, as where matplotlib is missing; but for tests that use pictures."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
