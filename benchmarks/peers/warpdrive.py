"""WarpDrive's tag_gridworld and tag_continuous through PyCUDA, on a GPU only.

WarpDrive 2.7.1 is older than Python 3.12, NumPy 2, Gymnasium and CUDA 13. What stands in for what it misses is in
``_prepare_imports``; its kernels, launches and sampler are its own.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.workload import Peer, Prepared, Request, Workload

PEER = Peer(
    "WarpDrive",
    ("rl-warp-drive", "pycuda", "torch", "numpy"),
    ("pycuda>=2025.1", "torch>=2.6", "numba>=0.60", "pyyaml>=6", "gymnasium>=1.1", "matplotlib>=3.9"),
    no_deps=("rl-warp-drive==2.7.1",),  # it demands gym, which does not import beside NumPy 2
    cuda=(
        Workload("simulation", "tag_gridworld", 2000, 100, config={"grid": 100}),  # its configuration file's
        Workload("simulation", "tag_gridworld", 100_000, 100, config={"grid": 100}),
        Workload("simulation", "tag_continuous", 2000, 500, config={"egocentric": False}),  # its observations
    ),
    note="WarpDrive needs a GPU, nvcc with curand_kernel.h, and a writable folder, into which it writes its sources.",
)
HEAP_BYTES = 512 << 20  # random states are allocated on the device; 8 MB, the default, are too few
UNBOUND_THREADS, REGISTERS = 512, 65_536  # of a block; above, a kernel asks for more registers than there are


def prepare(request: Request) -> Prepared:
    """Steps with actions of WarpDrive's sampler from equal probabilities; ended episodes are reset after each step."""
    if request.device != "cuda":
        raise BenchmarkError("WarpDrive runs on GPUs only; use --device cuda")
    _prepare_imports()
    import torch
    import yaml

    torch.cuda.init()  # PyCUDA takes the context that torch has made
    workload = request.workload
    warp_drive = importlib.import_module("warp_drive")
    folder = Path(str(warp_drive.__file__)).parent / "training" / "run_configs"
    config = yaml.safe_load((folder / f"{workload.game}.yaml").read_text(encoding="utf-8"))
    game = _game(workload.game, config["env"])
    wrapper = _wrapper(game, workload.num_envs)
    if workload.game == "tag_gridworld":
        data, functions = wrapper.env.cuda_data_manager, wrapper.env.cuda_function_manager
        data.add_shared_constants({"kIndexToActionArr": wrapper.env.step_actions})
        functions.initialize_shared_constants(data, constant_names=["kIndexToActionArr"])
    sample = _sampler(wrapper, _policies(config, wrapper), torch)

    def run() -> None:
        for _ in range(workload.num_steps):
            sample()
            wrapper.step_all_envs()
            wrapper.reset_only_done_envs()
        torch.cuda.synchronize()

    wrapper.reset_all_envs()
    return Prepared(run, wrapper.n_agents, {"peer_device_name": torch.cuda.get_device_name()})


class _GymnasiumAsGym(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of gym give gymnasium."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ours = name == "gym" or name.startswith("gym.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module("gymnasium" + spec.name[len("gym") :])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it


def _prepare_imports() -> None:
    """What WarpDrive 2.7.1 and its libraries miss on a current machine."""
    import numpy as np

    sys.meta_path.insert(0, _GymnasiumAsGym())
    if not hasattr(np, "row_stack"):  # numba-cuda names it; NumPy 2.5 has dropped it
        np.row_stack = np.vstack  # type: ignore[attr-defined]
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # for a PyCUDA that was linked without it
    if not shutil.which("nvcc"):
        folders = [Path("/usr/local/cuda/bin"), *Path("/usr/local").glob("cuda-*/bin")]
        found = [str(folder) for folder in folders if (folder / "nvcc").is_file()]
        if not found:
            raise BenchmarkError("nvcc was not found on PATH or in /usr/local/cuda; WarpDrive compiles with it")
        os.environ["PATH"] = found[0] + os.pathsep + os.environ["PATH"]
    compiler = Path(str(shutil.which("nvcc"))).resolve().parent.parent
    headers = [compiler / "include", *compiler.glob("targets/*/include")]
    if not any((folder / "curand_kernel.h").is_file() for folder in headers):
        packages = [Path(entry).glob("nvidia/*/include/curand_kernel.h") for entry in sys.path]
        header = next((path for paths in packages for path in paths), None)
        if header:
            _nvcc_option(f"-I{header.parent}")


def _nvcc_option(option: str) -> None:
    os.environ["NVCC_APPEND_FLAGS"] = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {option}".strip()


def _game(name: str, settings: dict[str, Any]) -> Any:
    """WarpDrive's declaration of the game with its configuration file's settings: the defaults here but ``grid``."""
    module = importlib.import_module(f"example_envs.{name}.{name}")
    game = {"tag_gridworld": "CUDATagGridWorld", "tag_continuous": "TagContinuous"}[name]
    return getattr(module, game)(**settings)


def _wrapper(game: Any, num_envs: int) -> Any:
    """WarpDrive's EnvWrapper; its reset on the host, once per environment, is computed once and repeated."""
    from warp_drive.env_wrapper import EnvWrapper
    from warp_drive.utils import autoinit_pycuda  # noqa: F401 - pushes torch's context

    class OneReset(EnvWrapper):
        _first: Any = None

        def obs_at_reset(self) -> Any:
            if self._first is None:
                type(self)._first = super().obs_at_reset()
            return self._first

    import pycuda.driver

    pycuda.driver.Context.set_limit(pycuda.driver.limit.MALLOC_HEAP_SIZE, HEAP_BYTES)
    threads = -(-game.num_agents // 32) * 32
    if threads > UNBOUND_THREADS:
        _nvcc_option(f"-maxrregcount={REGISTERS // threads // 8 * 8}")
    return OneReset(env_obj=game, num_envs=num_envs, env_backend="pycuda")


def _policies(config: dict[str, Any], wrapper: Any) -> dict[str, list[int]]:
    taggers, runners = list(wrapper.env.taggers), list(wrapper.env.runners)
    names = list(config["policy"])
    return {names[0]: taggers + runners} if len(names) == 1 else {"tagger": taggers, "runner": runners}


def _sampler(wrapper: Any, policies: dict[str, list[int]], torch: Any) -> Any:
    """A function that draws an action for every agent with WarpDrive's sampler."""
    from gym.spaces import Discrete
    from warp_drive.managers.pycuda_managers.pycuda_function_manager import PyCUDASampler
    from warp_drive.training.utils.data_loader import create_and_push_data_placeholders
    from warp_drive.utils.constants import Constants

    wrapper.reset_all_envs()
    sampler = PyCUDASampler(wrapper.cuda_function_manager)
    create_and_push_data_placeholders(
        env_wrapper=wrapper,
        action_sampler=sampler,
        policy_tag_to_agent_id_map=policies,
        push_data_batch_placeholders=False,
    )
    sampler.init_random(1)
    wrapper.init_reset_pool(1)
    data, name = wrapper.cuda_data_manager, Constants.ACTIONS
    space = wrapper.env.action_space[0]
    sizes = [int(space.n)] if isinstance(space, Discrete) else [int(size) for size in space.nvec]
    rows = wrapper.n_envs, wrapper.n_agents
    probabilities = [torch.full((*rows, size), 1.0 / size, device="cuda") for size in sizes]

    def sample() -> None:
        if len(sizes) == 1:
            sampler.sample(data, probabilities[0], name)
            return
        joint = data.data_on_device_via_torch(name)
        for head, each in enumerate(probabilities):
            sampler.sample(data, each, f"{name}_{head}")
            joint[:, :, head] = data.data_on_device_via_torch(f"{name}_{head}")[:, :, 0]

    return sample
