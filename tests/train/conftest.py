"""Where the tests of the trainer's kernels compile and launch them; command lines in a folder of their own."""

import pytest
import torch
from support.emulated_cuda import EmulatedCudaBackend

from gpu_vecenv import FunctionManager
from gpu_vecenv.cli.main import main
from gpu_vecenv.compile import function_manager
from gpu_vecenv.train.layers import kernel_on


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_of_networks(request, monkeypatch):
    """A GPU, or the host with emulated CUDA threads, where the default network has kernels too."""
    if request.param == "cuda":
        return "cuda"
    kernel_on(torch.device("cpu"))  # which is shared with other tests, compiled for the host
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    return "cpu"


@pytest.fixture(scope="module")
def one_thread():
    """For a whole module, as fixtures of modules train too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums over rows then always have the same order
    yield
    torch.set_num_threads(before)


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs a command line in an empty folder: exit code, output, lines of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        output, errors = capsys.readouterr()
        return code, output, errors.splitlines()

    return run


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
