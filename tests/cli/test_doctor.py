"""doctor and install, with compilers, nvidia-smi and pip replaced by small programs on PATH."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_vecenv.cli import doctor, install
from gpu_vecenv.cli.doctor import Diagnosis, Finding
from gpu_vecenv.compile import toolchain
from gpu_vecenv.compile.toolchain import Driver, Torch

H200 = Driver("570.86.15", "12.8", ("NVIDIA H200, compute capability 9.0, 143771 MiB",))
CPU_TORCH = Torch("2.13.0+cpu", problem="this torch is a CPU build")
SMI = """
case "$1" in
    --query*) echo "NVIDIA H200, 570.86.15, 9.0, 143771 MiB" ;;
    *) echo "| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8  |" ;;
esac
"""


class Programs:
    """A folder that is the only one on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, script: str = "echo $0 1.0") -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "GPU_VECENV_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    return Programs(folder)


def test_driver_is_read_from_nvidia_smi(programs):
    assert toolchain.find_driver() == Driver(problem="nvidia-smi not found")
    programs.add("nvidia-smi", SMI)
    assert toolchain.find_driver() == H200


@pytest.mark.parametrize("script", ["echo 'No devices were found'", "echo 'cannot reach the driver'; exit 9", "exit 0"])
def test_driver_without_gpus_has_a_reason(programs, script):
    programs.add("nvidia-smi", script)
    driver = toolchain.find_driver()
    assert driver.gpus == ()
    assert driver.problem.startswith("nvidia-smi: ")


def test_host_compilers_in_their_order(programs, monkeypatch):
    names = ("clang++", "g++", "c++")
    for name in names:
        path = programs.add(name)
        assert toolchain.find_host_compiler() == [path]
    programs.add("c++", "echo 'install the developer tools first'; exit 1")
    assert toolchain.find_host_compiler() == [str(programs.folder / "g++")]
    monkeypatch.setenv("CXX", "ccache 'my g++' -m64")
    assert toolchain.find_host_compiler() == ["ccache", "my g++", "-m64"]


def test_zig_comes_last(programs, tmp_path, monkeypatch):
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert toolchain.find_host_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    path = programs.add("clang++")
    assert toolchain.find_host_compiler() == [path]


def test_wrong_cxx_is_reported_and_not_replaced(programs, monkeypatch):
    programs.add("c++")
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler = doctor.examine().compiler
    assert compiler.problem.startswith("$CXX is set to no-such-compiler, which does not run")
    assert "Set CXX" in doctor.report(Diagnosis(CPU_TORCH, compiler=compiler))


def test_the_compiler_of_pages_is_reported(programs, monkeypatch):
    assert re.search(r"\d+\.\d+", doctor.examine().ziglang.found)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    missing = doctor.examine()
    assert re.search(r"^ziglang +missing: gpu-vecenv web and train --watch need it$", doctor.report(missing), re.M)
    (todo,) = [line for line in doctor.recommendations(missing) if "ziglang" in line]
    assert re.fullmatch(r"Install .* -m pip install ziglang", todo)


def test_nvcc_is_found_in_the_toolkit_too(programs, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = programs.add("nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    monkeypatch.setenv("PATH", "")
    assert toolchain.find_nvcc() == nvcc
    assert doctor.examine().nvcc == Finding(f"{nvcc} (CUDA 13.0)")


@pytest.mark.parametrize(
    ("driver_cuda", "torch", "remedy"),
    [
        ("12.8", CPU_TORCH, "/whl/cu128"),
        ("12.4", Torch("2.13.0", "13.0", "driver too old"), "update the NVIDIA driver, or .*cu126"),
        ("11.8", Torch("2.13.0", "12.8", "driver too old"), "update the NVIDIA driver: "),
        ("13.2", Torch("2.13.0", "12.8", "no kernel image"), "/whl/cu130"),
    ],
)
def test_message_when_torch_cannot_use_the_gpu(programs, driver_cuda, torch, remedy):
    message = toolchain.gpu_problem(Driver("570.1", driver_cuda, H200.gpus), torch)
    for part in (torch.problem, "NVIDIA H200", "570.1", driver_cuda, torch.version):
        assert part in message
    assert (f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build") in message
    assert re.search(remedy, message.splitlines()[-1])


def test_hidden_gpu(programs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = toolchain.gpu_problem(H200, Torch("2.13.0", "12.8", "No CUDA GPUs are available"))
    assert "CUDA_VISIBLE_DEVICES is set to ''" in message


def test_advice_names_the_missing_pieces():
    todo = "\n".join(doctor.recommendations(Diagnosis(Torch("2.13.0", "12.8"), H200)))
    assert todo.count("cuda-core[cu12]") == 2
    assert "ziglang" in todo
    found, torch = Finding("found"), Torch("2.13.0", "12.8")
    launches = {"pycuda": "no context", "cuda_core": "works"}
    diagnosis = Diagnosis(torch, H200, found, found, pycuda=found, ziglang=found, launches=launches)
    assert doctor.recommendations(diagnosis) == []
    without_zig = dataclasses.replace(diagnosis, ziglang=Finding(problem="not installed"))
    assert ["compiler of pages" in line for line in doctor.recommendations(without_zig)] == [True]
    without_both = dataclasses.replace(without_zig, compiler=Finding(problem="none"))
    assert ["ziglang" in line for line in doctor.recommendations(without_both)] == [True], "one package for both"
    del launches["cuda_core"]
    assert "No CUDA driver" in doctor.recommendations(diagnosis)[0]
    assert "whl/cpu" in doctor.recommendations(Diagnosis(Torch(problem="No module named 'torch'")))[0]
    assert "whl/cu128" in doctor.recommendations(Diagnosis(Torch(problem="No module named 'torch'"), H200))[0]


def test_doctor_runs_as_a_script_without_site_packages(programs):
    programs.add("nvidia-smi", SMI)
    command = [sys.executable, "-S", doctor.__file__]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "NVIDIA H200" in result.stdout
    assert "Install torch" in result.stdout


def test_an_installed_torch_is_kept():
    assert install.torch_steps("2.6.0+cpu", gpu=True, pinned=True, platform="linux") == []
    assert install.torch_steps("2.5.1", gpu=True, pinned=False, platform="linux") != []


def test_only_a_gpu_or_a_pin_may_bring_cuda_torch():
    (step,) = install.torch_steps("", gpu=True, pinned=False, platform="linux")
    assert step.arguments == (install.TORCH,)
    local, cpu = install.torch_steps("", gpu=False, pinned=False, platform="linux")
    assert "--no-index" in local.arguments
    assert set(cpu.environment) == {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}
    assert set(cpu.environment.values()) == {install.CPU_WHEELS}
    *before, pinned = install.torch_steps("", gpu=False, pinned=True, platform="linux")
    assert before == [local, cpu]
    assert pinned.arguments == (install.TORCH,)


def test_torch_pins_are_read_from_pips_configuration(tmp_path, monkeypatch):
    other, pin = tmp_path / "other.txt", tmp_path / "pin.txt"
    other.write_text("torchvision==0.20\n# torch==2.13.0\n")
    pin.write_text("numpy<3\ntorch == 2.13.0\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "VIRTUAL_ENV"):  # no other configuration of pip
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_CONSTRAINT", str(other))
    assert not install.torch_is_pinned()
    monkeypatch.setenv("PIP_CONSTRAINT", f"{other} {pin}")
    assert install.torch_is_pinned()


def test_torch_requirement_is_that_of_the_project():
    assert f'"{install.TORCH}",' in (install.ROOT / "pyproject.toml").read_text()


def test_extras_follow_torch_and_compiler():
    root = str(install.ROOT)
    assert install.project_step(["dev"], "13.0", True).arguments[1] == f"{root}[dev,cuda13]"
    assert install.project_step([], "12.8", False).arguments[1] == f"{root}[cuda12,compiler]"


def fake_pip(programs: Programs, fails_on: str) -> tuple[list[str], Path]:
    """A pip that logs its arguments, and fails if they contain ``fails_on``."""
    log = programs.folder / "pip.log"
    script = f'echo "$*" >>"{log}"\ncase "$*" in *"{fails_on}"*) echo first; echo last; exit 1;; esac'
    return [programs.add("pip", script)], log


def test_torch_steps_run_until_one_succeeds(programs):
    steps = install.torch_steps("", gpu=False, pinned=True, platform="linux")
    pip, log = fake_pip(programs, "--no-index")
    assert install.run_first(steps, pip) == ""
    assert len(log.read_text().splitlines()) == 2
    pip, _ = fake_pip(programs, "torch")
    assert install.run_first(steps, pip) == "first\nlast"


def test_failed_optional_extras_print_one_line(programs, capsys):
    programs.add("c++")
    pip, log = fake_pip(programs, "sb3")
    assert install.main(["--extras", "train", "--try", "sb3,supersuit"], pip) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "last" in line or "first" in line] == [
        "  not installed, continuing without it: last"
    ]
    assert "supersuit" in log.read_text()


@pytest.mark.parametrize(
    ("fails_on", "calls"), [("nothing", 3), ("--require-hashes", 1), ("--editable", 2), ("check --disable", 3)]
)
def test_a_lock_replaces_the_extras_and_must_hold_all_requirements(fails_on, calls, programs, monkeypatch, capsys):
    monkeypatch.setenv("GPU_VECENV_DEVICE", "cpu")
    pip, log = fake_pip(programs, fails_on)
    assert install.main(["--lock", "some.txt"], pip) == (fails_on != "nothing")
    assert ("last" in capsys.readouterr().out) == (fails_on != "nothing")
    ends = [
        "--require-hashes --no-deps --only-binary :all: --requirement some.txt",
        f"--no-deps --no-build-isolation --editable {install.ROOT}",
        "check --disable-pip-version-check",
    ]
    said = [line for line in log.read_text().splitlines() if not line.startswith("config")]
    assert len(said) == calls and all(map(str.endswith, said, ends))


def test_a_clone_with_the_name_of_the_package_hides_it_from_scripts_beside_it(tmp_path):
    note = install.shadowing_note(tmp_path / "gpu_vecenv")
    assert f"in {tmp_path / 'gpu_vecenv'} or elsewhere" in note and f"not in {tmp_path}:" in note
    assert install.shadowing_note(tmp_path / "gpu-vecenv") == ""


@pytest.mark.parametrize("option", ["--extras", "--try"])
def test_a_lock_and_extras_exclude_each_other(option, programs):
    pip, log = fake_pip(programs, "nothing")
    with pytest.raises(SystemExit):
        install.main(["--lock", "some.txt", option, "train"], pip)
    assert not log.exists()


def test_pycuda_is_installed_only_with_nvcc_and_a_gpu():
    assert install.optional_steps([], gpu=True, nvcc=None) == []
    assert install.optional_steps([], gpu=False, nvcc="/opt/cuda/bin/nvcc") == []
    (step,) = install.optional_steps([], gpu=True, nvcc="/opt/cuda/bin/nvcc")
    assert step.arguments == ("gpu-vecenv[pycuda]",)
    assert step.environment["PATH"].split(os.pathsep)[0] == "/opt/cuda/bin"


def test_unusable_gpu_stops_the_installation_unless_the_cpu_is_requested(programs, monkeypatch, capsys):
    if not toolchain.find_torch().problem:
        pytest.skip("torch can use a GPU here")
    programs.add("nvidia-smi", SMI)
    programs.add("c++")
    pip, log = fake_pip(programs, "nothing")
    assert install.main([], pip) == 1
    out = capsys.readouterr().out
    assert "torch cannot use the GPU" in out
    assert "GPU_VECENV_DEVICE=cpu" in out
    assert "--editable" not in log.read_text()
    monkeypatch.setenv("GPU_VECENV_DEVICE", "cpu")
    assert install.main([], pip) == 0
    assert "--editable" in log.read_text()


def test_a_driver_for_an_older_cuda_gets_a_torch_for_it():
    (step,) = install.torch_steps("", gpu=True, pinned=False, platform="linux", driver_cuda="12.8")
    assert step.environment["PIP_INDEX_URL"].endswith("/cu128")
    (newest,) = install.torch_steps("", gpu=True, pinned=False, platform="linux", driver_cuda="13.0")
    (pinned,) = install.torch_steps("", gpu=True, pinned=True, platform="linux", driver_cuda="12.8")
    assert not newest.environment and not pinned.environment
