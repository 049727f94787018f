"""GPU-resident multi-agent environments and a trainer."""

from gpu_vecenv._version import __version__
from gpu_vecenv.data_manager import DataManager
from gpu_vecenv.env import Env, Field, param
from gpu_vecenv.function_manager import FunctionManager
from gpu_vecenv.ppo import PPOConfig, Trainer
from gpu_vecenv.registry import configure, make, register
from gpu_vecenv.sampler import Sample, Sampler
from gpu_vecenv.slab import Slab
from gpu_vecenv.vec_env import Fault, VecEnv

__all__ = [
    "DataManager",
    "Env",
    "Fault",
    "Field",
    "FunctionManager",
    "PPOConfig",
    "Sample",
    "Sampler",
    "Slab",
    "Trainer",
    "VecEnv",
    "__version__",
    "configure",
    "make",
    "param",
    "register",
]
