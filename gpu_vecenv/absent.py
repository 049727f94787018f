"""Names and calls of Gymnasium, PettingZoo and WarpDrive on what has none of them, and what to use in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NoReturn, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

_VIEW = "gpu_vecenv.GymnasiumVectorEnv(env.game, env.num_envs), Gymnasium's view of the game, has it"
_OBJECTS = "environments are rows of tensors, not objects: {0}.state[name] is a field of all of them, to read and write"
_SYNCHRONOUS = "step and reset return without waiting for the device"
_PARALLEL = (
    "gpu_vecenv.parallel_env and batched_parallel_env, PettingZoo's views, have it; env.layout.agent_names has all"
)

_OBJECT_METHODS = dict.fromkeys(("call", "envs", "env_fns", "get_attr", "set_attr"), _OBJECTS)
_ASYNCHRONOUS = dict.fromkeys(
    ("call_async", "call_wait", "reset_async", "reset_wait", "step_async", "step_wait"), _SYNCHRONOUS
)

OF_VEC_ENV = {
    **dict.fromkeys(("metadata", "np_random", "np_random_seed", "render_mode", "spec"), _VIEW),
    **dict.fromkeys(
        ("observation_space", "single_observation_space"), f"{_VIEW}; env.game.layout.observation has those of roles"
    ),
    **dict.fromkeys(("action_space", "single_action_space"), f"{_VIEW}; env.game.layout.action has those of roles"),
    **{name: text.format("env") for name, text in _OBJECT_METHODS.items()},
    **_ASYNCHRONOUS,
    "set_seed": "env.reset(seed=…) seeds the draws",
    "unwrapped": "a VecEnv has no wrappers: use it as it is",
    "render": f'{_VIEW}, with render_mode="rgb_array" or "human"; gpu_vecenv.rollout records an episode',
    "agents": _PARALLEL,
    "possible_agents": _PARALLEL,
    # WarpDrive's EnvWrapper
    "step_all_envs": "use env.step(actions)",
    "reset_all_envs": "use env.reset()",
    **dict.fromkeys(
        ("reset_only_done_envs", "reset_when_done"),
        "step resets those that have ended, see autoreset_mode; env.reset(mask=…) resets some",
    ),
    "cuda_data_manager": "use env.data",
    "cuda_function_manager": "use env.functions",
    "n_agents": "use env.num_agents",
    "n_envs": "use env.num_envs",
    "graceful_close": "use env.close()",
}
# WarpDrive's, of which each name has one place here.
_RESET = "step resets environments that have ended; env.reset(mask=…) resets some"
_EPISODE = "gpu_vecenv.rollout(env, policy, fields=(…)) returns an episode as NumPy arrays"
_LAUNCH = "a kernel is named when it is launched: program.launch(kernel, items, …)"
_COMPILE = "use env.functions.compile(source, kernels=[…]), or env.functions.compile_game(layout)"
OF_DATA_MANAGER = {
    "push_data_to_device": "use env.data.push(name, array)",
    "pull_data_from_device": "use env.data.pull(name), a NumPy array; fields of the game have the prefix state_",
    **dict.fromkeys(("data_on_device_via_torch", "device_data"), "use env.data[name], a tensor"),
    "save_copy_and_apply_at_reset": "the game's reset draws each episode's start; initial_states= of make gives others",
    "log_data_across_episode": _EPISODE,
    "add_shared_constants": "declare Field(…, shared=True), and give arrays= to gpu_vecenv.make",
    "add_meta_info": "declare a param of the game: it is a constant of its device code",
}
OF_FUNCTION_MANAGER = {
    **dict.fromkeys(("initialize_functions", "get_function"), _LAUNCH),
    **dict.fromkeys(("compile_and_load_cuda", "load_cuda_from_source_code"), _COMPILE),
}
OF_SAMPLER = {
    "init_random": "env.reset(seed=…) seeds the draws",
    "register_actions": "nothing is to be registered: sample returns new tensors, or writes to those of out=",
}
OF_TRAINER = {
    "save_model_checkpoint": "use trainer.save(path)",
    "load_model_checkpoint": "use trainer.load(path)",
    "fetch_episode_states": _EPISODE,
    "graceful_close": "use trainer.close()",
}
OF_GYMNASIUM_VECTOR_ENV = {
    **{name: text.format("view.vec_env") for name, text in _OBJECT_METHODS.items()},
    **_ASYNCHRONOUS,
    "seed": "reset(seed=…) seeds all environments",
}
RESET = "seed, mask and out are given by name, as in env.reset(seed=7); options are those of reset in Gymnasium's view"
OF_PACKAGE = {
    "adapters": "use from gpu_vecenv.adapters import sb3, or another of its modules",
    "make_vec": 'use gpu_vecenv.make("tag_gridworld", num_envs=…), or gymnasium.make_vec("gpu_vecenv/TagGridworld-v0")',
    "VectorEnv": "use gpu_vecenv.GymnasiumVectorEnv, or VecEnv, the engine's own interface",
    # WarpDrive
    "EnvWrapper": "use gpu_vecenv.make(…), which returns a VecEnv",
    "EnvironmentRegistrar": "use gpu_vecenv.register",
    "EnvironmentCPUvsGPU": "one source runs on both; gpu_vecenv.check_vector_env and gpu-vecenv check test a game",
    "TrainerA2C": "use gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig.a2c())",
    "TrainerPPO": "use gpu_vecenv.Trainer(env, gpu_vecenv.PPOConfig())",
    "DataFeed": "use env.data.push(name, array)",
    "CUDAFunctionFeed": "arguments have the names of a KernelSignature, which env.functions.compile takes",
    **dict.fromkeys(("CUDALogController", "PyCUDALogController"), _EPISODE),
    **dict.fromkeys(("CUDAEnvironmentReset", "PyCUDAEnvironmentReset"), _RESET),
    "ParamScheduler": "use final_learning_rate of gpu_vecenv.PPOConfig, or a gpu_vecenv.Curriculum",
    "WarpDriveModule": "docs/adapters.md has a module for PyTorch Lightning",
    **dict.fromkeys(("CUDADataManager", "PyCUDADataManager"), "use gpu_vecenv.DataManager, as env.data"),
    **dict.fromkeys(
        ("CUDAFunctionManager", "PyCUDAFunctionManager"), "use gpu_vecenv.FunctionManager, as env.functions"
    ),
    **dict.fromkeys(("CUDASampler", "PyCUDASampler"), "use gpu_vecenv.Sampler(env)"),
}


def of_package(name: str) -> NoReturn:
    """``gpu_vecenv.__getattr__``: raise the AttributeError of a name that the package does not have."""
    place = f": {OF_PACKAGE[name]}" if name in OF_PACKAGE else ""
    raise AttributeError(f"module 'gpu_vecenv' has no attribute {name!r}{place}")


def absent_attribute(owner: object, name: str, known: Mapping[str, str], game: str | None = None) -> NoReturn:
    """Raise the AttributeError of an attribute that is absent; for ``__getattr__``.

    Args:
        owner: An instance of the class without it.
        name: The attribute.
        known: Name -> what to use in its place.
        game: The owner, as messages name it, if the configuration of its attribute ``game`` may have the name.

    Raises:
        AttributeError: Python's own, or that of the property that led here, for other names.
    """
    hint = known.get(name)
    if hint is None and game and name in getattr(vars(owner).get("game"), "__dataclass_fields__", ()):
        hint = f"it is of the game's configuration, {game}.game.{name}"
    if hint is not None:
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}: {hint}")
    object.__getattribute__(owner, name)
    raise AssertionError(name)


def with_hint(hint: str) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Decorator: Python's TypeError of a call that does not fit the function's arguments ends with the hint."""

    def decorate(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        @functools.wraps(function)
        def called(*values: Arguments.args, **options: Arguments.kwargs) -> Returned:
            try:
                return function(*values, **options)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised in the function
                    raise
                raise TypeError(f"{error}: {hint}") from None

        return called

    return decorate
