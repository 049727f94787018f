"""GPU-resident multi-agent environments and a trainer."""

from gpu_vecenv._version import __version__
from gpu_vecenv.batched_env import BatchedParallelEnv, batched_parallel_env
from gpu_vecenv.check import check_parallel_env, check_vector_env
from gpu_vecenv.data_manager import DataManager
from gpu_vecenv.env import Env, Field, param
from gpu_vecenv.episode import rollout
from gpu_vecenv.episode_log import EpisodeLog
from gpu_vecenv.function_manager import FunctionManager
from gpu_vecenv.game_policy import GamePolicy, load_policy
from gpu_vecenv.gymnasium_env import GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.pettingzoo_env import ParallelEnv, aec_env, parallel_env
from gpu_vecenv.ppo import PPOConfig
from gpu_vecenv.registry import configure, make, register
from gpu_vecenv.sampler import Sample, Sampler
from gpu_vecenv.slab import Slab
from gpu_vecenv.trainer import PolicySpec, Trainer
from gpu_vecenv.vec_env import Fault, VecEnv

__all__ = [
    "BatchedParallelEnv",
    "DataManager",
    "Env",
    "EpisodeLog",
    "Fault",
    "Field",
    "FunctionManager",
    "GamePolicy",
    "GymnasiumEnv",
    "GymnasiumVectorEnv",
    "PPOConfig",
    "ParallelEnv",
    "PolicySpec",
    "Sample",
    "Sampler",
    "Slab",
    "Trainer",
    "VecEnv",
    "__version__",
    "aec_env",
    "batched_parallel_env",
    "check_parallel_env",
    "check_vector_env",
    "configure",
    "load_policy",
    "make",
    "parallel_env",
    "param",
    "register",
    "rollout",
]
