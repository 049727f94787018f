import importlib.util
import os
import shutil
import signal

import pytest
import torch


def pytest_configure() -> None:
    """Libraries named in the environment must be there: their tests are not to be skipped."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; programs under test inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for library in os.environ.get("GPU_VECENV_REQUIRED", "").split():
        find = shutil.which if library == "chromium" else importlib.util.find_spec  # a program among the libraries
        if library != "cleanrl" and find(library) is None:  # its tests fetch CleanRL's scripts
            pytest.exit(f"$GPU_VECENV_REQUIRED names {library}, which is not installed", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU here"))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
