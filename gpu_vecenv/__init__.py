"""GPU-resident multi-agent environments and a trainer."""

import os as _os
import typing as _typing

# Before torch loads OpenMP. Threads of torch that spin while they wait keep others from their processor: on two busy
# processors an update of a small recurrent network took six times as long.
_os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from gpu_vecenv import errors as _errors  # noqa: F401 - first: it checks the version of Gymnasium
from gpu_vecenv._version import __version__
from gpu_vecenv.check import check_parallel_env, check_vector_env
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env, Field, param
from gpu_vecenv.engine.data_manager import DataManager
from gpu_vecenv.engine.make import make
from gpu_vecenv.engine.sampler import Sample, Sampler
from gpu_vecenv.engine.step_buffers import StepBuffers
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.envs.registry import configure, register
from gpu_vecenv.train.crossplay import crossplay
from gpu_vecenv.train.curriculum import ByMetric, Curriculum, PiecewiseLinear
from gpu_vecenv.train.episode_log import EpisodeLog
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.exploitability import exploitability
from gpu_vecenv.train.game_policy import GamePolicy, load_policy
from gpu_vecenv.train.level_replay import LevelReplay
from gpu_vecenv.train.opponents_config import Opponent, OpponentsConfig
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.recurrent_layer import RecurrentLayer
from gpu_vecenv.train.reward import Transition
from gpu_vecenv.train.trainer import Trainer
from gpu_vecenv.views.batched_env import BatchedParallelEnv, batched_parallel_env
from gpu_vecenv.views.gymnasium_env import GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.views.pettingzoo_env import ParallelEnv, aec_env, parallel_env
from gpu_vecenv.watch.episode import rollout

if not _typing.TYPE_CHECKING:  # a type checker would accept every name
    from gpu_vecenv.absent import of_package as __getattr__  # noqa: F401

__all__ = [
    "BatchedParallelEnv",
    "ByMetric",
    "Curriculum",
    "DataManager",
    "Env",
    "EpisodeLog",
    "Fault",
    "Field",
    "FunctionManager",
    "GamePolicy",
    "GymnasiumEnv",
    "GymnasiumVectorEnv",
    "LevelReplay",
    "Opponent",
    "OpponentsConfig",
    "PPOConfig",
    "PQNConfig",
    "ParallelEnv",
    "PiecewiseLinear",
    "PolicySpec",
    "RecurrentLayer",
    "Sample",
    "Sampler",
    "StepBuffers",
    "Trainer",
    "Transition",
    "VecEnv",
    "__version__",
    "aec_env",
    "batched_parallel_env",
    "check_parallel_env",
    "check_vector_env",
    "configure",
    "crossplay",
    "evaluate",
    "exploitability",
    "load_policy",
    "make",
    "parallel_env",
    "param",
    "register",
    "rollout",
]
