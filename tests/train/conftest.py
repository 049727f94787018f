"""Where the tests of the trainer's kernels compile and launch them."""

import pytest
from support.emulated_cuda import EmulatedCudaBackend

from gpu_vecenv import FunctionManager
from gpu_vecenv.compile import function_manager


@pytest.fixture
def functions(device):
    return FunctionManager(device)


@pytest.fixture(params=["forwards", "backwards"])
def emulated(monkeypatch, request):
    """Compiles and launches as on a GPU."""
    monkeypatch.setenv("EMULATED_THREADS", request.param)
    with monkeypatch.context() as patch:
        patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
        return FunctionManager("cpu")
