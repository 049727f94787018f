"""Every argument of the public entrances gets objects of other kinds: each is refused by a typed error that says what
is expected, or is right. An argument that this table lacks fails the test."""

import dataclasses
import importlib
import inspect
import re
import shutil
import sys
import traceback
import types
import typing
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import tyro

import gpu_vecenv
import gpu_vecenv.adapters
from gpu_vecenv import errors, wrappers
from gpu_vecenv.adapters import cleanrl
from gpu_vecenv.cli import replay as replay_command
from gpu_vecenv.cli.main import COMMANDS, main
from gpu_vecenv.cli.options import Command
from gpu_vecenv.declare.env import f32
from gpu_vecenv.declare.kernels import Array, KernelSignature
from gpu_vecenv.engine.data_manager import DataManager
from gpu_vecenv.train.plots import plot_runs
from gpu_vecenv.views.frames import Frames
from gpu_vecenv.watch import player, replay
from gpu_vecenv.web.page import game_page

WRONG = {
    "None": None,
    "an object": object(),
    "a set": {"a"},
    "a str": "no such thing",
    "bytes": b"x",
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "2**70": 2**70,
    "True": True,
    "[]": [],
    "{}": {},
    "{1: 2}": {1: 2},
    "a function": lambda *arguments, **more: None,
    "a class": int,
    "an array": np.zeros(2),
    "a tensor": torch.zeros(2),
    "a complex": 1j,
    "[None]": [None],
}
GAME = gpu_vecenv.configure("tag_gridworld", num_taggers=1, grid=4, max_steps=5)
RANDOM = {"tagger": None, "runner": None}
REFUSALS = (
    *(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    *(TypeError, ValueError, FileNotFoundError, gymnasium.error.Error),
)
# Each says what is wrong and what to do; the last is the compiler's.
CURE = re.compile(r"\bexpected\b|nearest:|known:|at most num_envs|did not compile|has no attribute", re.IGNORECASE)
ANY = set(WRONG)  # not tried
NONE, TRUE, TEXT, COUNT = {"None"}, {"True"}, {"a str"}, {"2**70"}


@pytest.fixture(scope="module")
def entrances(tmp_path_factory):
    """Name -> function, its arguments, and for each argument the objects that are right beside its own value."""
    folder = tmp_path_factory.mktemp("entrances")
    env = gpu_vecenv.VecEnv(GAME, 4, "cpu")
    env.reset(seed=1)
    training = gpu_vecenv.VecEnv(GAME, 4, "cpu", autoreset_mode="next_step")
    config = gpu_vecenv.PPOConfig(total_steps=32, num_steps=4, num_minibatches=1, hidden_sizes=(8,))
    trainer = gpu_vecenv.Trainer(training, config)
    checkpoint = trainer.save(folder / "run.safetensors")
    policy = gpu_vecenv.load_policy(checkpoint, device="cpu")
    (recording,) = replay.record(env, RANDOM)
    film = replay.film(recording, "cpu")
    table = folder / "table"
    table.mkdir()
    (table / "metrics.csv").write_text("iteration,env_steps,return_agent,episode_length\n1,9,1,5\n2,18,2,5\n")
    sampler, logits = gpu_vecenv.Sampler(env), torch.zeros((4, 2, 5))
    cpu, kernels = gpu_vecenv.FunctionManager("cpu"), [KernelSignature("k", (Array("x", f32),))]
    common = {"device": ("cpu", NONE), "render_mode": (None, NONE)}
    vectorized = {"num_envs": (2, set()), "render_env_indices": (None, NONE), **common}
    modes = {"autoreset_mode": ("same_step", set())}
    check = {
        "checks": (["K08"], {"[]", "None"}),
        "seed": (17, COUNT),
        "steps": (10, COUNT),
        "max_steps": (None, NONE | COUNT),
    }
    function = (None, NONE | {"a function", "a class"})
    functions = {"oracle": function, "state_of": function}
    mappings = {"variants": (None, NONE | {"{}"})}

    def vectors(num_envs):
        return gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=num_envs, device="cpu")

    def data():
        manager = DataManager(torch.device("cpu"))
        manager.allocate("x", (2,), np.dtype(np.float32))
        return manager

    vector = vectors(2)
    return {
        "VecEnv": (
            gpu_vecenv.VecEnv,
            {
                "game": (GAME, set()), "num_envs": (2, set()), "device": ("cpu", NONE), **modes,
                "agents_as_envs": (False, TRUE), "driver": (None, NONE), "validate": ("async", set()),
                "arrays": (None, NONE | {"{}"}), "initial_states": (None, NONE | {"{}"}),
                "randomize": (None, NONE | {"[]", "{}"}), "first_env_index": (0, set()),
                "threads_per_env": (None, NONE), "threads_per_block": (None, NONE), "end_on_nonfinite": (False, TRUE),
                "fuse_sampling": (None, NONE | TRUE), "thread_order": (0, set()), "guards": (False, TRUE),
                "races": (False, TRUE),
            },
        ),
        "step": (env.step, {"actions": (env.sample_actions(), set()), "out": (None, NONE)}),
        "reset": (env.reset, {"seed": (1, NONE), "mask": (None, NONE), "out": (None, NONE)}),
        "observe": (env.observe, {"out": (None, NONE)}),
        "load_state_dict": (env.load_state_dict, {"state": (env.state_dict(), set())}),
        "Sampler": (gpu_vecenv.Sampler, {"env": (env, set()), "squash": ("clip", set())}),
        "Sampler.sample": (
            sampler.sample, {"parameters": (logits, set()), "greedy": (False, TRUE), "out": (None, NONE)},
        ),
        "Sampler.step": (
            sampler.step,
            {"parameters": (logits, set()), "greedy": (False, TRUE), "sample": (None, NONE), "out": (None, NONE)},
        ),
        "DataManager": (DataManager, {"device": (torch.device("cpu"), set())}),
        "allocate": (
            lambda **given: data().allocate(**given),
            {
                "name": ("y", TEXT), "shape": ((2,), {"[]"}), "dtype": (np.dtype(np.float32), {"a class"}),
                "guard_items": (0, set()),
            },
        ),
        "push": (
            lambda **given: data().push(**given), {"name": ("x", TEXT), "array": (torch.ones(2), {"a tensor"})},
        ),
        "FunctionManager": (gpu_vecenv.FunctionManager, {"device": ("cpu", NONE), "driver": (None, NONE)}),
        "compile": (
            cpu.compile,
            {
                "source": ("KERNEL(k) { args.x[0] = 1; }", set()), "name": (None, NONE | TEXT),
                "kernels": (kernels, {"[]"}), "game": (None, NONE), "constants": ("", TEXT),
            },
        ),
        "GymnasiumVectorEnv": (
            gpu_vecenv.GymnasiumVectorEnv,
            {
                "game": (GAME, set()), **vectorized, **modes, "output": ("torch", set()),
                "max_episode_steps": (None, NONE), "fill_final_obs": (True, TRUE),
            },
        ),
        "GymnasiumEnv": (gpu_vecenv.GymnasiumEnv, {"game": (GAME, set()), **common}),
        "parallel_env": (
            gpu_vecenv.parallel_env,
            {"game": (GAME, set()), **common, "output": ("torch", set()), "max_cycles": (None, NONE)},
        ),
        "aec_env": (gpu_vecenv.aec_env, {"game": (GAME, set()), "device": ("cpu", NONE)}),
        "batched_parallel_env": (
            gpu_vecenv.batched_parallel_env,
            {
                "game": (GAME, set()), **vectorized, **modes, "group_by": ("agent", set()),
                "agents_as_envs": (False, TRUE), "max_cycles": (None, NONE),
            },
        ),
        "evaluate": (
            gpu_vecenv.evaluate,
            {
                "env": (env, set()), "role_policies": (RANDOM, set()), "episodes": (2, COUNT),
                "greedy": (False, TRUE), "seed": (1, NONE), "on_progress": (lambda *_: None, {"a function", "a class"}),
            },
        ),
        "exploitability": (
            gpu_vecenv.exploitability,
            {
                "env": (env, set()), "policy": (policy, set()), "roles": (["runner"], {"[]"}),
                "opponents": (None, NONE | {"{}"}), "config": (None, NONE),
                "total_steps": (16, NONE | COUNT), "seeds": ([0, 1, 2], set()),
                "episodes": (2, COUNT), "seed": (1, set()), "on_progress": (lambda *_: None, {"a function", "a class"}),
            },
        ),
        "crossplay": (
            gpu_vecenv.crossplay,
            {
                "env": (env, set()), "policies": ({"a": policy, "b": None}, set()), "roles": ([], {"[]"}),
                "runs": (None, NONE | {"{}"}), "episodes": (2, COUNT), "greedy": (False, TRUE), "seed": (1, set()),
                "on_progress": (lambda *_: None, {"a function", "a class"}),
            },
        ),
        "rollout": (
            gpu_vecenv.rollout,
            {
                "env": (env, set()), "policy": (None, NONE | {"a class"}), "env_index": (0, set()),
                "fields": ((), {"[]"}), "greedy": (False, TRUE), "seed": (1, NONE),
            },
        ),
        "Trainer": (
            gpu_vecenv.Trainer,
            {
                "env": (training, set()), "config": (config, NONE), "seed": (0, set()), "policies": (None, NONE),
                "sharing": ("role", set()), "graphs": (True, TRUE), "reward": (None, NONE | {"a class"}),
                "curriculum": (None, NONE), "on_iteration": function, "opponents": (None, NONE),
            },
        ),
        "load_policy": (
            gpu_vecenv.load_policy,
            {
                "run": (checkpoint, set()), "game": (None, NONE), "networks": (None, NONE | {"{}"}),
                "best": (False, set()), "device": ("cpu", NONE), "member": (None, NONE),
            },
        ),
        "GamePolicy": (
            gpu_vecenv.GamePolicy,
            {
                "game": (GAME, set()), "policies": (trainer.policies, set()),
                "configs": (None, NONE | {"{}"}), "shared": (None, NONE | {"{}"}),
            },
        ),
        "GamePolicy.forward": (
            policy.forward,
            {
                "obs": (env.observe(), set()), "action_mask": (None, NONE), "greedy": (False, TRUE),
                "generator": (None, NONE),
                "state": (None, NONE),
            },
        ),
        "EpisodeLog": (gpu_vecenv.EpisodeLog, {"vec_env": (env, set())}),
        "record": (
            replay.record,
            {
                "env": (env, set()), "role_policies": (RANDOM, set()), "episodes": (1, set()), "seed": (0, set()),
                "greedy": (False, TRUE), "on_progress": (lambda *_: None, {"a function", "a class"}),
            },
        ),
        "film": (
            replay.film,
            {
                "replay": (recording, set()), "device": ("cpu", NONE), "game": (None, NONE), "driver": (None, NONE),
                "title": (None, NONE | TEXT),
            },
        ),
        "play": (
            replay.play,
            {"replay": (recording, set()), "device": ("cpu", NONE), "game": (None, NONE), "driver": (None, NONE)},
        ),
        "page": (player.page, {"films": ([film], set()), "title": ("x", TEXT)}),
        "game_page": (
            game_page,
            {
                "game": (GAME, set()), "policy": (None, NONE), "title": (None, NONE | TEXT), "replay": (None, NONE),
            },
        ),
        "Frames": (
            Frames, {"vec_env": (env, set()), "copies": (1, COUNT), "scale": (1.0, {"1.5", "2**70", "True"})},
        ),
        "plot_runs": (
            plot_runs,
            {
                "runs": ([table], set()), "out": (folder / "curve.png", set()), "metrics": ((), {"[]"}),
                "x": ("env_steps", set()), "smooth": (1, COUNT),
            },
        ),
        "check_vector_env": (
            lambda **given: gpu_vecenv.check_vector_env(vectors, **given),
            {
                **check, **functions, **mappings, "modes": (None, NONE | {"{}"}),
                "graph": (None, NONE | {"a function", "a class"}), "permutable_agents": (None, ANY),
            },
        ),
        "check_parallel_env": (
            lambda **given: gpu_vecenv.check_parallel_env(lambda: gpu_vecenv.parallel_env(GAME, "cpu"), **given),
            {**check, **functions, **mappings},
        ),
        "AgentIndicator": (wrappers.AgentIndicator, {"env": (vector, set()), "type_only": (False, TRUE)}),
        "ClipReward": (
            wrappers.ClipReward,
            {
                "env": (vector, set()), "min_reward": (-2.0, NONE | {"-1", "1.5"}),
                "max_reward": (2.0, NONE | {"-1", "1.5", "2**70"}),
            },
        ),
        "DelayObservation": (wrappers.DelayObservation, {"env": (vector, set()), "delay": (1, COUNT)}),
        "DtypeObservation": (wrappers.DtypeObservation, {"env": (vector, set()), "dtype": (np.float64, {"a class"})}),
        "NormalizeObservation": (
            wrappers.NormalizeObservation, {"env": (vector, set()), "epsilon": (1e-8, {"1.5", "2**70"})},
        ),
        "NormalizeReward": (
            wrappers.NormalizeReward,
            {"env": (vector, set()), "gamma": (0.9, set()), "epsilon": (1e-8, {"1.5", "2**70"})},
        ),
        "RecordEpisodeStatistics": (
            wrappers.RecordEpisodeStatistics,
            {"env": (vector, set()), "buffer_length": (9, set()), "stats_key": ("episode", TEXT)},
        ),
        "StickyAction": (
            wrappers.StickyAction,
            {
                "env": (vector, set()), "repeat_action_probability": (0.5, set()),
                "repeat_action_duration": (1, COUNT),
            },
        ),
        "TransformObservation": (
            wrappers.TransformObservation,
            {
                "env": (vector, set()), "func": (torch.sin, {"a function", "a class"}),
                "observation_space": (None, NONE), "single_observation_space": (None, NONE),
            },
        ),
    }  # fmt: skip


def problem(call, arguments, name, value):
    """What is wrong with the refusal of a value, or nothing."""
    try:
        call(**{**arguments, name: value})
    except REFUSALS as error:
        if not CURE.search(str(error)) and not isinstance(error, FileNotFoundError):
            return f"{type(error).__name__} does not say what is expected: {error}"
        return ""
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}, {Path(where.filename).name}:{where.lineno}: {error}"
    return "was not refused"


def lacking(entrances):
    """The arguments that a table of entrances lacks."""
    found = []
    for entrance, (call, given) in entrances.items():
        parameters = inspect.signature(call).parameters.values()
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        found += [f"{entrance}: {name}" for name in sorted(names - set(given))]
    return found


def problems(entrances):
    """What is wrong with the refusals of the wrong objects, for every argument."""
    found = []
    for entrance, (call, given) in entrances.items():
        arguments = {name: value for name, (value, _) in given.items()}
        call(**arguments)
        for name, (_, right) in given.items():
            for what in WRONG.keys() - right:
                if said := problem(call, arguments, name, WRONG[what]):
                    found.append(f"{entrance}, {name}, {what}: {said[:200]}")
    return found


def test_the_table_has_every_argument(entrances):
    assert lacking(entrances) == []


@pytest.mark.parametrize("part", range(4))
def test_objects_of_other_kinds_are_refused(part, entrances):
    found = problems(dict(list(entrances.items())[part::4]))
    assert found == [], "\n" + "\n".join(found)


# ---------------------------------------------------------------------- adapters

MAKE = {"game": (GAME, set()), "num_envs": (2, set()), "device": ("cpu", NONE)}


def rows(output="torch", game=GAME):
    return gpu_vecenv.GymnasiumVectorEnv(game, 2, "cpu", output=output)


def box_make():
    return {**MAKE, "game": ("pendulum", set())}


def of_cleanrl(module):
    box = {"env": (rows(game="pendulum"), set())}
    single = {"env": (gpu_vecenv.GymnasiumEnv("cartpole"), set())}
    return {"GymEnv": single, "IsaacGymEnv": box, "make": box_make(), "wrap": box}


def of_lightning(module):
    env = gpu_vecenv.VecEnv(GAME, 4, "cpu", autoreset_mode="next_step")
    config = gpu_vecenv.PPOConfig(total_steps=32, num_steps=4, num_minibatches=1, hidden_sizes=(8,))
    run = {"config": (config, NONE), "seed": (0, set())}
    wrap = {"env": (env, set()), **run, "policies": (None, NONE), "sharing": ("role", set())}
    wrap["reward"] = (None, NONE | {"a class"})
    return {"PPOModule": wrap, "make": {**MAKE, **run}, "wrap": wrap}


def of_rl_games(module):
    env = {"env": (rows(), set())}
    make = {**MAKE, "seed": (None, NONE)}
    return {"RLGamesVecEnv": env, "make": make, "wrap": env, "register": {"name": ("gpu_vecenv", TEXT)}}


def of_rsl_rl(module):
    box = {"env": (rows(game="pendulum"), set())}
    return {"RslRlVecEnv": box, "make": box_make(), "wrap": box}


def of_sb3(module):
    env = {"env": (rows("numpy"), set())}
    return {"SB3VecEnv": env, "make": MAKE, "wrap": env}


def of_skrl(module):
    many = gpu_vecenv.BatchedParallelEnv(GAME, 2, "cpu", agents_as_envs=True)
    one = {"env": (rows(game="cartpole"), set())}
    return {
        "LazyMeans": {"log": (gpu_vecenv.EpisodeLog(many.vec_env), set())},
        "MultiAgentEnv": {"env": (many, set())},
        "SingleAgentEnv": one,
        "make": MAKE,
        "with_final_obs": {"agent": (types.SimpleNamespace(record_transition=print), set())},
        "wrap": one,
    }


def of_supersuit(module):
    env = gpu_vecenv.ParallelEnv(GAME, "cpu", output="numpy")
    return {
        "make": {**MAKE, "base_class": ("gymnasium", set())},
        "wrap": {"env": (env, set()), "black_death": (False, TRUE)},
    }


def of_tianshou(module):
    env = {"env": (rows("numpy"), set())}
    return {"TianshouVectorEnv": env, "make": MAKE, "wrap": env}


def of_torchrl(module):
    env = gpu_vecenv.BatchedParallelEnv(GAME, 2, "cpu", group_by="role", autoreset_mode="disabled")
    state = {"return_state": (False, TRUE)}
    wrap = {"env": (env, set()), **state}
    return {"TorchRLEnv": wrap, "make": {**MAKE, **state}, "wrap": wrap}


ADAPTERS = {name.removeprefix("of_"): table for name, table in list(globals().items()) if name.startswith("of_")}
# Each needs an environment of its own: make test-clients.
APART = {"benchmarl", "pufferlib", "rllib"}


def public(module):
    """Functions and classes that are its own, but for CleanRL's run, which needs gym and has a test of its own."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name for name in own if not name.startswith("_")} - {"run"}


def test_every_adapter_has_a_table():
    files = {path.stem for path in Path(gpu_vecenv.adapters.__path__[0]).glob("[!_]*.py")}
    assert files == ADAPTERS.keys() | APART


@pytest.mark.parametrize("what", WRONG)
def test_cleanrl_runs_files_only(what):
    before = list(sys.argv)
    with pytest.raises((TypeError, FileNotFoundError), match="expected the path of a script"):
        cleanrl.run(WRONG[what])
    assert sys.argv == before and "isaacgymenvs" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_refuse_objects_of_other_kinds(name):
    try:
        module = importlib.import_module(f"gpu_vecenv.adapters.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    tables = ADAPTERS[name](module)
    assert tables.keys() == public(module)
    entrances = {f"{name}.{entrance}": (getattr(module, entrance), given) for entrance, given in tables.items()}
    assert lacking(entrances) == []
    found = problems(entrances)
    assert found == [], "\n" + "\n".join(found)


# ---------------------------------------------------------------------- options of the commands

SMALL = "--num-envs 4 --num-steps 4 --num-minibatches 1 --hidden-sizes 8 --total-steps 16 --episodes 2 --device cpu"
LINES = {  # of each command one that ends within a second
    "list": "list",
    "show": "show tag_gridworld",
    "show a run": "show run",
    "new": "new my_game",
    "check": "check tag_gridworld --steps 10 --num-envs 2 --checks K01 --device cpu",
    "check an id": "check CartPole-v1 --steps 10 --checks K01",
    "train": f"train tag_gridworld {SMALL} --max-steps 5 --grid 4 --out new",
    "resume": "train --resume run --device cpu",
    "evaluate": "evaluate run --episodes 2 --num-envs 2 --device cpu",
    "exploit": "exploit run --total-steps 16 --episodes 2 --num-envs 4 --device cpu",
    "crossplay": "crossplay run --episodes 2 --num-envs 2 --device cpu",
    "plot": "plot run --out curve.png",
    "export": "export run --format torchscript --out new",
    "record": "replay record tag_gridworld --max-steps 5 --grid 4 --device cpu --out new",
    "record a run": "replay record run --device cpu --out new",
    "play": "replay play kept --device cpu",
    "html": "replay html kept --device cpu --out page.html",
    "replay show": "replay show kept",
    "web": "web tag_gridworld --max-steps 5 --grid 4 --out new",
    "bench": "bench --game cartpole --num-envs 4 --device cpu",
    "tune": "tune cartpole --num-envs 4",
    "doctor": "doctor",
}
# Wrong values of options that take text, each a list of words; "file" is a file, "nowhere" is nothing.
TEXTS = {
    "best_metric": [["nonsuch"]],
    "checks": [["K99"], [""]],
    "compare": [["nowhere"], ["file"]],
    "config": [["{"], ["[]"], ['{"nonsuch": 1}'], ["nonsuch"]],
    "device": [["tpu"], [""], ["cuda:99"]],
    "driver": [["nonsuch"], [""]],
    "eval_opponents": [["nonsuch"]],
    "eval_scripts": [["nonsuch"], ["tagger=nowhere.py:f"], ["nonsuch=math:pi"]],
    "folder": [["file"], ["file/out"]],
    "frozen": [["tagger"], ["tagger=nowhere"], ["nonsuch=run"]],
    "game": [["nowhere.py"], ["nonsuch"]],
    "interface": [["nonsuch"]],
    "json": [["file/out"], ["run"]],
    "junit": [["file/out"], ["run"], ["-"]],
    "metrics": [["nonsuch"]],
    "opponents": [["tagger"], ["tagger=nowhere"], ["nonsuch=random"]],
    "out": [["file/out"]],
    "plot": [["file/out.png"], ["curve.txt"]],
    "policies": [["{"], ["[]"], ['{"nonsuch": {}}'], ['{"tagger": {"gamma": 2}}']],
    "randomize": [["nonsuch"], ["grid", "1"], ["grid", "1", "x"]],
    "resume": [["nowhere"], ["file"]],
    "roles": [["nonsuch"], ["tagger", "tagger"]],
    "reward": [["nonsuch"], ["nowhere:f"], ["nowhere.py:f"], ["math:nonsuch"], ["math:pi"], [""]],
    "schedules": [["nonsuch"], ["nowhere:f"], ["nowhere.py:f"], ["math:pi"], ["{"], ['{"nonsuch": {}}'], [""]],
    "replay": [["nowhere"], ["file"]],
    "run": [["nowhere"]],
    "title": [],  # any text
    "wandb": [],  # any text, where it is installed
}
SAYS = re.compile(
    rf"{CURE.pattern}|; the (roles|policies) are |unexpected keyword argument|No module named|no file |no run at |"
    "finds no usable GPU|cannot be combined with|needs? a |no usable checkpoint",
    re.IGNORECASE,
)


def options(kind):
    """Name, type and metadata of every option of a command's dataclass; positional arguments are none."""
    origin = typing.get_origin(kind) or kind
    hints = typing.get_type_hints(origin, include_extras=True)
    chosen = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(kind), strict=True))
    for field in dataclasses.fields(origin):
        hint = chosen.get(hints[field.name], hints[field.name])
        if dataclasses.is_dataclass(hint):
            yield from options(hint)
        elif tyro.conf.Positional not in getattr(hint, "__metadata__", ()):
            yield field.name, hint, field.metadata


def parts(hint):
    """A type and all types and words that it is made of."""
    yield hint
    for part in typing.get_args(hint):
        yield from parts(part)


def wrong_values(name, hint, metadata):
    """Wrong values of an option, each a list of words; None if it takes text and TEXTS lacks it."""
    kinds = set(parts(hint))
    low, high = metadata.get("low"), metadata.get("high")
    beyond = [[str(low - 1)]] if low is not None else []
    beyond += [[str(high + 1)]] if high is not None else []
    if bool in kinds:
        return [["maybe"]]
    if name in TEXTS:
        return TEXTS[name]
    if int in kinds:
        return [["nonsuch"], ["1.5"], ["nan"], [""], *beyond]
    if float in kinds:
        return [["nonsuch"], ["nan"], ["inf"], [""], *beyond]
    return None if {str, Path} & kinds else [["nonsuch"]]


def kind_of(words):
    """The dataclass whose fields are the options of a command line."""
    if words[:2] == ["replay", "record"]:
        return replay_command.Record.of_source(words[2])
    if words[0] == "replay":
        return {"play": replay_command.Play, "html": replay_command.Html, "show": replay_command.Show}[words[1]]
    command = COMMANDS[words[0]]
    return command.for_arguments(words[1:])[0] if issubclass(command, Command) else command


def contents(folder):
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run, replays and a file."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "file").write_text("text")
    assert main([*LINES["train"].split()[:-1], str(folder / "run")]) == 0
    assert main([*LINES["record"].split()[:-1], str(folder / "kept")]) == 0
    return folder


def test_every_command_has_a_line():
    assert {line.split()[0] for line in LINES.values()} == COMMANDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.exhaustive), False], ids=["every", "some"])
@pytest.mark.parametrize("line", LINES)
def test_wrong_values_of_options_are_refused_before_anything_is_done(
    line, every, finished, tmp_path, monkeypatch, capsys
):
    """Parsing is most of the time: of an option's numbers one is tried with every change, another of the next one."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    words, found, before = LINES[line].split(), [], contents(tmp_path)
    for count, (name, hint, metadata) in enumerate(options(kind_of(words))):
        option, wrong = f"--{name.replace('_', '-')}", wrong_values(name, hint, metadata)
        if wrong and name not in TEXTS and not every:
            wrong = [wrong[count % len(wrong)]]
        if wrong is None:
            found.append(f"{option}: TEXTS has no wrong values")
        for value in wrong or ():
            capsys.readouterr()
            try:
                code = main([*words, option, *value])
            except SystemExit as stop:
                code = stop.code
            except Exception as error:
                code = repr(error)
            output, errors = capsys.readouterr()
            ours = errors.startswith("gpu-vecenv: error: ") and errors.count("\n") == 1
            clear = SAYS.search(errors) if ours else option in errors or "Unrecognized options: maybe" in errors
            if (code, output) != (2, "") or not clear or contents(tmp_path) != before:
                changed = sorted(map(str, before.keys() ^ contents(tmp_path).keys()))
                found.append(f"{option} {value}: code {code}, output {output[:80]!r}, {changed}, {errors[:300]!r}")
                before = contents(tmp_path)
    assert found == [], "\n" + "\n".join(found)
