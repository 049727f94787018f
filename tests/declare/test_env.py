"""Declarations: what they resolve to, which are refused, and a user's game from its source to a step."""

import copy
import dataclasses
import importlib.util
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.fuzzing import fuzz_seed
from support.kernels import signature

import gpu_vecenv
from gpu_vecenv.compile.codegen import generate_header
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env, Field, boolean, f32, f64, i32, i64, param, u8, u32
from gpu_vecenv.declare.layout import RESERVED_CONSTANTS
from gpu_vecenv.engine.vec_env import Fault, VecEnv
from gpu_vecenv.envs.tag_continuous import TagContinuous
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import ConfigError, DeviceUnavailableError, EnvDefinitionError, KernelCompileError
from gpu_vecenv.files import cuda_folder

FLOAT32_MAX = float(np.finfo(np.float32).max)

DRIFT_TEXT = """#include "game_api.cuh"
#include "weight.cuh"

struct Scratch {
    float push[NUM_AGENTS];
};

HD void reset(State s, Io io) {
    FOR_AGENTS (i) {
        s.place[i][0] = (io.rng.uniform(i, 0) - 0.5f) * LIMIT;
        s.place[i][1] = (float)i;
    }
    ONCE s.steps[0] = 0;
}

HD void step(State s, Io io) {
    FOR_AGENTS (i) io.scratch->push[i] = io.action(i, 0) * WEIGHT;
    group_sync();
    FOR_AGENTS (i) {
        float total = s.wind[io.elapsed_steps % TABLE_SIZE];
        for (int j = 0; j < NUM_AGENTS; ++j) total += io.scratch->push[j];
        s.place[i][0] = math::clamp(s.place[i][0] + total, -LIMIT, LIMIT);
        s.place[i][1] = io.action(i, 1);
        io.rewards[i] = i < END_PUSHER ? s.place[i][0] : TWICE;
        io.terminations[i] = false;
        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;
    }
    ONCE s.steps[0] += 1;
}

HD void observe(State s, Io io) {
    FOR_AGENTS (i) {
        for (int k = 0; k < OBS_SIZE; ++k) io.obs[i][k] = (u8)(16 * i + 2 * k + s.steps[0]);
    }
}
"""
BARE_TEXT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io) {}
HD void observe(State, Io) {}
"""


@dataclass(frozen=True, kw_only=True)
class Drift(Env):
    """Points on a line that push each other: continuous actions, uint8 images, scratch, a shared table."""

    num_pushers: int = param(2, low=1)
    limit: float = param(3.0, low=0.5)
    max_steps: int = param(4, low=1)
    table_size: int = param(3, low=1)

    state = (
        Field("place", f32, ("num_agents", 2)),
        Field("steps", i64),
        Field("wind", f32, ("table_size",), shared=True),
    )
    derived = ("twice",)

    @property
    def roles(self) -> dict[str, int]:
        return {"pusher": self.num_pushers, "drifter": 1}

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return (2, 3)

    @property
    def obs_dtype(self) -> np.dtype[Any]:
        return u8

    @property
    def action_space(self) -> Box:
        return Box(np.array([-1, -2], np.float32), np.array([1, 3], np.float32))

    @property
    def twice(self) -> float:
        return 2 * self.limit

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        return {"wind": np.linspace(-0.3, 0.4, self.table_size, dtype=np.float32)}


@dataclass(frozen=True, kw_only=True)
class Bare(Env):
    """A minimal game."""

    level: float = 0.0

    @property
    def obs_dim(self) -> int:
        return 1

    @property
    def action_space(self) -> Space[Any] | dict[str, Space[Any]]:
        return Discrete(2)


def bare_with(**members: Any) -> type[Bare]:
    """The bare game with other members; values of properties are wrapped."""
    for name in {"roles", "obs_dim", "obs_shape", "obs_dtype", "action_space"} & set(members):
        value = members[name]
        members[name] = property(lambda self, value=value: value)
    return type("Bare", (Bare,), {"__module__": __name__, **members})


def configurable(kind: Any, default: Any, **limits: float) -> type[Env]:
    """A bare game with one configuration value, called `value`."""
    return dataclass(frozen=True, kw_only=True)(
        type(
            "Own",
            (Bare,),
            {"__module__": __name__, "__annotations__": {"value": kind}, "value": param(default, **limits)},
        )
    )


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a game's device code into its own folder, with the header that it includes."""
    (tmp_path / "weight.cuh").write_text("#pragma once\nconstexpr float WEIGHT = 0.25f;\n")

    def write_text(game: type[Env], text: str) -> Path:
        path = tmp_path / f"{game.name()}.cu"
        path.write_text(text)
        monkeypatch.setattr(game, "source", path)
        return path

    return write_text


# ---------------------------------------------------------------------- what a declaration resolves to


def test_sizes_follow_from_the_configuration():
    game = TagContinuous(num_taggers=3, num_runners=5, num_neighbors=4, turn_levels=6)
    assert game.num_agents == 8
    assert game.obs_dim == 7 * 4 + 7
    assert game.obs_shape == (35,)
    assert game.layout.obs_size == 35
    assert [field.shape for field in game.layout.fields] == [(8, 2), (8,), (8,), (8,), (8,), (21,), (7,)]
    assert game.action_space == MultiDiscrete([21, 7])
    assert dataclasses.replace(game, num_neighbors="all").obs_dim == 7 * 7 + 7
    assert Drift(num_pushers=4).layout.obs_size == 6


def test_agents_are_numbered_role_by_role():
    game = bare_with(roles={"cat": 2, "dog": 0, "mouse": 3})()
    assert game.num_agents == 5
    assert game.layout.agent_names == ("cat_0", "cat_1", "mouse_0", "mouse_1", "mouse_2")
    assert game.layout.role_slices == {"cat": slice(0, 2), "dog": slice(2, 2), "mouse": slice(2, 5)}
    constants = game.layout.constants
    assert [constants[f"FIRST_{role}"] for role in ("CAT", "DOG", "MOUSE")] == [0, 2, 2]
    assert [constants[f"END_{role}"] for role in ("CAT", "DOG", "MOUSE")] == [2, 2, 5]


def test_a_game_without_declared_roles_has_one_agent():
    assert Bare().layout.agent_names == ("agent_0",)


def test_observation_spaces_have_the_declared_shape_and_type():
    assert Drift().observation_space == Box(0, 255, (2, 3), np.uint8)
    assert Bare().observation_space == Box(-np.inf, np.inf, (1,), np.float32)


def test_game_names_are_snake_case_and_sources_are_beside_the_declaration_or_in_the_package():
    assert TagContinuous.name() == "tag_continuous"
    assert TagContinuous.source_path().name == "tag_continuous.cu"
    assert TagContinuous.source_path().is_file()


def test_constants_are_configuration_sizes_and_derived_values_but_no_strings():
    constants = Drift(num_pushers=4, limit=0.5).layout.constants
    expected = {"NUM_PUSHERS": 4, "LIMIT": 0.5, "MAX_STEPS": 4, "TABLE_SIZE": 3, "TWICE": 1.0, "NUM_AGENTS": 5}
    assert expected.items() <= constants.items()
    assert constants["OBS_SIZE"] == 6
    assert "NUM_NEIGHBORS" not in TagContinuous(num_neighbors="all").layout.constants
    assert TagContinuous(num_neighbors="all").layout.constants["OBSERVE_ALL"] is True


def rendered(value: float) -> str:
    match = re.search(r"^constexpr float LEVEL = (.*);$", generate_header(Bare(level=value).layout), re.MULTILINE)
    assert match is not None
    return match[1]


@given(st.one_of(st.floats(-FLOAT32_MAX, FLOAT32_MAX), st.floats(-FLOAT32_MAX, FLOAT32_MAX, width=32)))
@settings(max_examples=400, deadline=None, database=None)
@seed(fuzz_seed())
def test_a_float_constant_is_a_c_literal_of_the_same_float32(value):
    text = rendered(value)
    assert re.fullmatch(r"-?\d+(\.\d+|\.\d+e[+-]\d+|e[+-]\d+)f", text), text
    assert np.float32(text[:-1]).tobytes() == np.float32(value).tobytes()


def test_the_compiler_parses_every_float_constant_to_the_same_float32(write):
    generator = np.random.default_rng(5)
    anything = generator.integers(0, 2**32, 500, dtype=np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, FLOAT32_MAX, -FLOAT32_MAX, 1.0, 0.1, 16777217], np.float32)
    low = np.concatenate([special, anything[np.isfinite(anything)]])
    space = Box(low, np.full(len(low), FLOAT32_MAX, np.float32))
    game = bare_with(action_space=space)
    write(game, BARE_TEXT)
    program = FunctionManager("cpu").compile(
        "KERNEL(probe) { FOR_ITEMS (k, ACTION_HEADS) args.out[k] = ACTION_LOW[k]; }",
        kernels=[signature("probe", "float* out")],
        game=game(),
    )
    out = torch.zeros(len(low))
    program.launch("probe", len(low), out=out)
    assert out.numpy().tobytes() == low.tobytes()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "constexpr int FAR = 3;"),
        (-(2**31), "constexpr int FAR = -2147483648;"),
        (True, "constexpr bool FAR = true;"),
        (0.5, "constexpr float FAR = 0.5f;"),
        (np.float64(0.5), "constexpr float FAR = 0.5f;"),
        (np.int64(3), "constexpr int FAR = 3;"),
        (np.float32(0.5), "constexpr float FAR = 0.5f;"),
        (np.bool_(True), "constexpr bool FAR = true;"),
        (float("inf"), None),
        (float("nan"), None),
        (1e39, None),
        (2**31, None),
        ("word", None),
    ],
)
def test_a_derived_value_becomes_a_constant_or_is_refused(value, text):
    game = bare_with(derived=("far",), far=property(lambda self: value))
    try:
        lines = generate_header(game().layout).splitlines()
    except EnvDefinitionError:
        lines = None
    if text is None:
        assert lines is None
    else:
        assert lines is not None and text in lines


# ---------------------------------------------------------------------- action layouts

PAIR, TRIPLE = {"cat": 2, "mouse": 1}, {"cat": 1, "dog": 2, "mouse": 1}
LAYOUTS = [
    # roles, action space, shape, head sizes, choices of each agent's heads
    (PAIR, Discrete(5), (), (5,), [[5], [5], [5]]),
    (PAIR, MultiDiscrete([3, 4]), (2,), (3, 4), [[3, 4], [3, 4], [3, 4]]),
    (PAIR, MultiDiscrete([7]), (1,), (7,), [[7], [7], [7]]),
    (PAIR, {"cat": Discrete(3), "mouse": Discrete(6)}, (), (6,), [[3], [3], [6]]),
    (PAIR, {"mouse": Discrete(3), "cat": MultiDiscrete([2, 6])}, (2,), (3, 6), [[2, 6], [2, 6], [3, 0]]),
    (
        TRIPLE,
        {"cat": MultiDiscrete([2, 9, 4]), "dog": Discrete(1), "mouse": MultiDiscrete([5, 3])},
        (3,),
        (5, 9, 4),
        [[2, 9, 4], [1, 0, 0], [1, 0, 0], [5, 3, 0]],
    ),
    ({"cat": 1, "dog": 0}, {"cat": Discrete(2), "dog": MultiDiscrete([4, 4])}, (2,), (4, 4), [[2, 0]]),
    ({"dog": 0, "cat": 1}, {"cat": Discrete(2), "dog": Discrete(4)}, (), (4,), [[2]]),
]
SIZES_PROBE = """
KERNEL(probe) {
    FOR_ITEMS (k, NUM_AGENTS * ACTION_HEADS) args.sizes[k] = action_size((int)k / ACTION_HEADS, (int)k % ACTION_HEADS);
    FOR_ITEMS (head, ACTION_HEADS) args.offsets[head] = logit_offset((int)head);
}
"""


@pytest.mark.parametrize(("roles", "space", "shape", "head_sizes", "choices"), LAYOUTS)
def test_discrete_layouts_are_equal_in_python_and_in_device_code(write, roles, space, shape, head_sizes, choices):
    game = bare_with(roles=roles, action_space=space)
    write(game, BARE_TEXT)
    action = game().layout.action
    assert (action.continuous, action.shape, action.heads) == (False, shape, len(head_sizes))
    assert (action.head_sizes, action.num_logits) == (head_sizes, sum(head_sizes))
    per_agent = [action.sizes[role] for role, count in roles.items() for _ in range(count)]
    assert [[*sizes, *[0] * (len(head_sizes) - len(sizes))] for sizes in per_agent] == choices

    sizes = torch.full((len(choices), len(head_sizes)), -7, dtype=torch.int32)
    offsets = torch.full((len(head_sizes),), -7, dtype=torch.int32)
    program = FunctionManager("cpu").compile(
        SIZES_PROBE, kernels=[signature("probe", "i32* sizes, i32* offsets")], game=game()
    )
    program.launch("probe", 1, sizes=sizes, offsets=offsets)
    assert sizes.tolist() == choices
    assert offsets.tolist() == [sum(head_sizes[:head]) for head in range(len(head_sizes))]
    assert f"NUM_LOGITS = {sum(head_sizes)}, LARGEST_HEAD = {max(head_sizes)};" in generate_header(game().layout)


NARROW, WIDE = Box(-1, 2, (1,)), Box(np.array([-3, 0, 1], np.float32), np.array([-2, 0.5, 4], np.float32))
MIXED = [
    # roles, action space, elements of each agent's Box, sizes of its discrete heads, parameters of the widest role
    (PAIR, {"cat": WIDE, "mouse": Discrete(4)}, [3, 3, 0], [[0] * 3, [0] * 3, [4, 0, 0]], 6),
    (PAIR, {"cat": MultiDiscrete([2, 9]), "mouse": NARROW}, [0, 0, 1], [[2, 9], [2, 9], [0, 0]], 11),
    (PAIR, {"cat": NARROW, "mouse": WIDE}, [1, 1, 3], [[0] * 3] * 3, 6),
    (
        TRIPLE,
        {"cat": NARROW, "dog": MultiDiscrete([3, 2]), "mouse": WIDE},
        [1, 0, 0, 3],
        [[0] * 3, [3, 2, 0], [3, 2, 0], [0] * 3],
        6,
    ),
    ({"cat": 2, "dog": 0}, {"cat": Discrete(2), "dog": WIDE}, [0, 0], [[2, 0, 0]] * 2, 6),
    ({"cat": 0, "dog": 1}, {"cat": Discrete(7), "dog": NARROW}, [1], [[0]], 7),
]
MIXED_PROBE = """
KERNEL(probe) {
    FOR_ITEMS (agent, NUM_AGENTS) {
        args.heads[agent] = action_box::heads((int)agent);
        for (int head = 0; head < ACTION_HEADS; ++head) {
            args.sizes[agent * ACTION_HEADS + head] = action_size((int)agent, head);
            if (head >= action_box::heads((int)agent)) continue;
            args.low[agent * ACTION_HEADS + head] = action_box::low((int)agent, head);
            args.high[agent * ACTION_HEADS + head] = action_box::high((int)agent, head);
        }
    }
}
"""


@pytest.mark.parametrize(("roles", "space", "elements", "sizes", "parameters"), MIXED)
def test_mixed_layouts_are_equal_in_python_and_in_device_code(write, roles, space, elements, sizes, parameters):
    game = bare_with(roles=roles, action_space=space)
    write(game, BARE_TEXT)
    action, agents = game().layout.action, len(sizes)
    assert action.mixed and action.dtype == np.float32 and action.shape == (len(sizes[0]),)
    assert action.num_parameters == parameters and f"PARAMETERS_PER_AGENT = {parameters};" in generate_header(
        game().layout
    )
    found = {name: torch.full((agents, len(sizes[0])), -7, dtype=torch.int32) for name in ("sizes",)}
    found |= {name: torch.full((agents, len(sizes[0])), torch.nan) for name in ("low", "high")}
    heads = torch.full((agents,), -7, dtype=torch.int32)
    kernel = signature("probe", "i32* heads, i32* sizes, float* low, float* high")
    program = FunctionManager("cpu").compile(MIXED_PROBE, kernels=[kernel], game=game())
    program.launch("probe", 1, heads=heads, **found)
    assert heads.tolist() == elements and found["sizes"].tolist() == sizes
    for agent, role in enumerate(role for role, count in roles.items() for _ in range(count)):
        for name in ("low", "high"):
            bounds = getattr(space[role], name).tolist() if elements[agent] else []
            assert found[name][agent, : elements[agent]].tolist() == bounds


def test_equal_boxes_are_not_mixed_and_are_a_table():
    action = Drift().layout.action
    assert action.continuous and not action.mixed and not action.discrete
    assert "TABLE float ACTION_LOW[] = {-1.0f, -2.0f};" in generate_header(Drift().layout)


def test_a_box_gives_continuous_actions_with_bounds():
    action = Drift().layout.action
    assert (action.continuous, action.shape, action.heads) == (True, (2,), 2)
    assert action.bounds == dict.fromkeys(("pusher", "drifter"), ((-1.0, -2.0), (1.0, 3.0)))


# ---------------------------------------------------------------------- games as values

GAMES = [TagGridworld(grid=7, step_cost=0.1), TagContinuous(num_runners=3, num_neighbors="all"), Drift(limit=1.5)]


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name())
def test_games_are_compared_copied_and_pickled_by_value(game):
    twin = type(game)(**{field.name: getattr(game, field.name) for field in dataclasses.fields(game)})
    assert twin == game and hash(twin) == hash(game)
    assert {game: 1}[twin] == 1
    for copied in (copy.copy(game), copy.deepcopy(game), pickle.loads(pickle.dumps(game))):
        assert copied == game and hash(copied) == hash(game) and type(copied) is type(game)
        assert generate_header(copied.layout) == generate_header(game.layout)
    other = dataclasses.replace(game, max_steps=77)
    assert other != game and other.max_steps == 77
    assert dataclasses.replace(other, max_steps=game.max_steps) == game
    assert game != Bare()
    with pytest.raises(dataclasses.FrozenInstanceError):
        game.max_steps = 3
    with pytest.raises(ConfigError, match=r"max_steps is 0"):
        dataclasses.replace(game, max_steps=0)


def test_integers_for_floats_and_numpy_scalars_become_plain_python_values():
    plain = TagGridworld(num_taggers=3, wall_penalty=1.0, random_start=True)
    given_otherwise = TagGridworld(num_taggers=np.int64(3), wall_penalty=1, random_start=np.bool_(True))
    assert given_otherwise == plain
    assert type(given_otherwise.num_taggers) is int
    assert type(given_otherwise.wall_penalty) is float
    assert type(given_otherwise.random_start) is bool


# ---------------------------------------------------------------------- invalid configurations


@pytest.mark.parametrize(
    ("game", "key", "value"),
    [
        (TagGridworld, "num_taggers", 0),
        (TagGridworld, "num_taggers", -1),
        (TagGridworld, "num_taggers", 1.0),
        (TagGridworld, "num_taggers", True),
        (TagGridworld, "num_taggers", "4"),
        (TagGridworld, "num_taggers", None),
        (TagGridworld, "grid", 32768),
        (TagGridworld, "max_steps", 2**31),
        (TagGridworld, "wall_penalty", float("nan")),
        (TagGridworld, "wall_penalty", float("inf")),
        (TagGridworld, "wall_penalty", -1e39),
        pytest.param(TagGridworld, "wall_penalty", 10**400, id="an int beyond every float"),
        (TagGridworld, "wall_penalty", "0.1"),
        (TagGridworld, "wall_penalty", False),
        (TagGridworld, "random_start", 1),
        (TagContinuous, "num_neighbors", "most"),
        (TagContinuous, "num_neighbors", 0),
        (TagContinuous, "num_neighbors", 2.5),
        (TagContinuous, "max_turn", 6.2831),
    ],
)
def test_a_bad_configuration_value_is_refused_by_key_and_value(game, key, value):
    with pytest.raises(ConfigError) as refusal:
        game(**{key: value})
    assert f"{game.__name__}.{key} is {value!r}"[:200] in str(refusal.value)


def test_values_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"min_turn = 2.0 exceeds max_turn = 1.0"):
        TagContinuous(min_turn=2.0, max_turn=1.0)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int | None, [None, 3], ["3", 2.0]),
        (Literal["a", "b"], ["a", "b"], ["c", 0, None]),
        (Literal[1, 2], [1, 2], [3, "1"]),
        (str, ["x"], [1]),
    ],
)
def test_the_declared_type_decides_which_values_are_accepted(kind, good, bad):
    game = configurable(kind, good[0])
    for value in good:
        assert game(value=value).value == value
    for value in bad:
        with pytest.raises(ConfigError, match=r"Own\.value is"):
            game(value=value)


def test_a_range_is_closed():
    game = configurable(float, 0.5, low=0.25, high=0.75)
    assert game(value=0.25).value == 0.25
    assert game(value=0.75).value == 0.75
    for beyond in (np.nextafter(0.25, 0), np.nextafter(0.75, 1)):
        with pytest.raises(ConfigError, match=r"expected a value in \[0\.25, 0\.75\]"):
            game(value=beyond)


# ---------------------------------------------------------------------- invalid declarations


@pytest.mark.parametrize("name", ["", "A", "Cell", "1a", "_a", "a-b", "a b", "a.b", "é", "a\n", "x" * 64])
def test_a_field_name_must_be_a_plain_identifier(name):
    with pytest.raises(EnvDefinitionError, match="expected a C identifier"):
        Field(name, f32)


CPP_KEYWORDS = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl "
    "const constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export "
    "extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr "
    "operator or or_eq private protected public register reinterpret_cast return short signed sizeof static "
    "static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename "
    "union unsigned using virtual void volatile wchar_t while xor xor_eq"
).split()


@pytest.mark.parametrize("name", [*CPP_KEYWORDS, "i32", "i64", "u8", "u32", "u64", "math"])
def test_a_field_name_may_not_be_a_reserved_word(name):
    with pytest.raises(EnvDefinitionError, match=re.escape(repr(name))):
        Field(name, f32)


@pytest.mark.parametrize("name", ["hd", "kernel", "table", "threads_per_env", "once", "scratch"])
def test_a_configuration_key_may_not_become_a_reserved_constant(name):
    game = dataclass(frozen=True, kw_only=True)(
        type("Own", (Bare,), {"__module__": __name__, "__annotations__": {name: int}, name: 3})
    )
    with pytest.raises(EnvDefinitionError, match=name):
        game()


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.complex64, np.object_, "U3"])
def test_an_unsupported_field_dtype_is_refused(dtype):
    with pytest.raises(EnvDefinitionError, match="expected one of"):
        Field("x", np.dtype(dtype))


def test_a_field_dtype_in_quotes_is_shown_with_them_and_with_the_names_that_have_none():
    with pytest.raises(
        EnvDefinitionError, match=r"dtype 'i32' \(str\); .* f32, f64, i32, .*, without quotes, are those"
    ):
        Field("pos", "i32", ("two",))


@pytest.mark.parametrize("dtype", [f32, f64, i32, i64, u8, u32, boolean, np.float32, "int32"])
def test_a_field_dtype_may_be_anything_that_numpy_accepts(dtype):
    assert Field("x", dtype).dtype == np.dtype(dtype)
    assert isinstance(Field("x", dtype).dtype, np.dtype)


@pytest.mark.parametrize("size", ["nothing", "level", "obs_shape", 0, -1, 2.0, True, None])
def test_a_field_size_must_be_a_positive_int_or_the_name_of_one(size):
    with pytest.raises(EnvDefinitionError, match=r"state field 'x' has size"):
        bare_with(state=(Field("x", f32, (2, size)),))()


BOX = Box(-1, 1, (2,), np.float32)
BAD_DECLARATIONS = [
    ({"state": (Field("x", f32), Field("x", i32))}, "not all different"),
    ({"roles": {"Cat": 1}}, "role 'Cat' is no identifier; expected"),
    ({"roles": {"a-b": 1}}, "is no identifier"),
    ({"roles": {"cat": -1}}, "role 'cat' has -1 agents"),
    ({"roles": {"cat": 1.0}}, "role 'cat' has 1.0 agents"),
    ({"roles": {"cat": True}}, "role 'cat' has True agents"),
    ({"obs_dtype": f64}, "obs_dtype is float64"),
    ({"obs_dtype": i32}, "obs_dtype is int32"),
    ({"obs_shape": ()}, r"obs_shape is \(\)"),
    ({"obs_shape": (3, 0)}, r"obs_shape is \(3, 0\)"),
    ({"obs_shape": (3, -1)}, r"obs_shape is \(3, -1\)"),
    ({"obs_shape": (2.0,)}, r"obs_shape is \(2.0,\)"),
    ({"obs_dim": 0}, r"obs_shape is \(0,\)"),
    ({"action_space": {"dog": Discrete(2)}}, r"action spaces for \['dog'\], but the roles are \['agent'\]"),
    ({"action_space": {}}, "but the roles are"),
    ({"action_space": MultiBinary(3)}, "expected Discrete, MultiDiscrete or Box"),
    ({"action_space": Tuple((Discrete(2),))}, "expected Discrete, MultiDiscrete or Box"),
    ({"action_space": Discrete(3, start=1)}, "must start at 0"),
    ({"action_space": MultiDiscrete([3, 3], start=[0, 1])}, "must start at 0"),
    ({"action_space": Box(-1, 1, (0,), np.float32)}, "expected a bounded Box"),
    ({"action_space": Box(-1, 1, (2, 2), np.float32)}, "expected a bounded Box"),
    ({"action_space": Box(-1, 1, (), np.float32)}, "expected a bounded Box"),
    ({"action_space": Box(-1, 1, (2,), np.float64)}, "expected a bounded Box"),
    ({"action_space": Box(0, 255, (2,), np.uint8)}, "expected a bounded Box"),
    ({"action_space": Box(-np.inf, 1, (2,), np.float32)}, "expected a bounded Box"),
    ({"action_space": Box(-1, np.inf, (2,), np.float32)}, "expected a bounded Box"),
]


@pytest.mark.parametrize(("members", "message"), BAD_DECLARATIONS)
def test_a_contradictory_declaration_is_refused(members, message):
    with pytest.raises(EnvDefinitionError, match=message):
        bare_with(**members)()


def test_a_game_without_agents_is_refused():
    with pytest.raises(ConfigError, match="have no agents"):
        bare_with(roles={"cat": 0, "dog": 0})()


def test_observations_that_no_32_bit_index_reaches_are_refused():
    bare_with(roles={"cat": 2**15 - 1}, obs_shape=(2**16,))()
    with pytest.raises(ConfigError, match=r"32768 x 65536 is 2\^31 or more"):
        bare_with(roles={"cat": 2**15}, obs_shape=(2**16,))()


@pytest.mark.parametrize("missing", ["obs_dim", "action_space"])
def test_a_game_must_declare_observations_and_actions(missing):
    game = bare_with()
    setattr(game, missing, getattr(Env, missing))
    with pytest.raises(EnvDefinitionError, match=missing):
        game()


@pytest.mark.parametrize("dtype", [np.uint8, "uint8", np.dtype("uint8")])
def test_an_observation_dtype_may_be_anything_that_numpy_accepts(write, dtype):
    game = bare_with(obs_dtype=dtype)
    write(game, BARE_TEXT)
    obs, _ = VecEnv(game(), 2, "cpu").reset(seed=1)
    assert obs.dtype == torch.uint8


# ---------------------------------------------------------------------- a user's game


def test_a_users_game_runs_like_a_bundled_one(write):
    write(Drift, DRIFT_TEXT)
    game = Drift()
    env = VecEnv(game, 5, "cpu")
    obs, _ = env.reset(seed=3)
    assert obs.dtype == torch.uint8 and obs.shape == (5, 3, 2, 3)
    image = 16 * np.arange(3)[:, None, None] + 2 * np.arange(6).reshape(2, 3)
    assert np.array_equal(obs.numpy(), np.broadcast_to(image, obs.shape))
    assert {name: tuple(tensor.shape) for name, tensor in env.state.items()} == {
        "place": (5, 3, 2),
        "steps": (5,),
        "wind": (3,),
    }
    place, wind = env.state["place"].numpy().copy(), game.arrays()["wind"]
    assert np.unique(place[..., 0]).size == 15
    low, high = torch.tensor(game.layout.action.bounds["pusher"])
    for step in range(1, game.max_steps):
        actions = env.sample_actions()
        assert actions.dtype == torch.float32 and actions.shape == (5, 3, 2)
        assert ((actions >= low) & (actions <= high)).all()
        obs, rewards, terminations, truncations, _ = env.step(actions)
        total = np.full(5, wind[step % 3])
        for agent in range(3):
            total += actions.numpy()[:, agent, 0] * np.float32(0.25)
        place[..., 0] = np.clip(place[..., 0] + total[:, None], np.float32(-3), np.float32(3))
        place[..., 1] = actions.numpy()[..., 1]
        assert np.array_equal(env.state["place"].numpy(), place)
        assert np.array_equal(rewards.numpy()[:, :2], place[:, :2, 0])
        assert (rewards[:, 2] == game.twice).all()
        assert not terminations.any() and not truncations.any()
        assert np.array_equal(obs.numpy(), np.broadcast_to(image + step, obs.shape))
    obs, _, terminations, truncations, info = env.step(env.sample_actions())
    assert truncations.all() and not terminations.any()
    assert np.array_equal(info["final_obs"].numpy(), np.broadcast_to(image + game.max_steps, obs.shape))
    assert np.array_equal(obs.numpy(), np.broadcast_to(image, obs.shape))


def test_actions_that_are_no_numbers_fault_their_environment_only(write):
    write(Drift, DRIFT_TEXT)
    env = VecEnv(Drift(), 5, "cpu")
    env.reset(seed=3)
    actions = torch.tensor([0.0, 1.0]).repeat(5, 3, 1)
    actions[0, 0] = torch.tensor([1.0, 3.0])
    actions[1, 2, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    actions[2, 0, 1] = -2.5
    actions[3, 1, 0] = torch.nan
    _, rewards, *_, info = env.step(actions)
    assert env.faults().tolist() == [0, 0, 0, Fault.NONFINITE_ACTION, 0]
    assert env.elapsed_steps.tolist() == [1, 1, 1, 0, 1]
    assert rewards.isnan().any(1).tolist() == info["fault"].all(1).tolist() == [False, False, False, True, False]


def test_shared_arrays_can_be_given_and_are_checked(write):
    write(Drift, DRIFT_TEXT)
    wind = np.array([1, 2, 4], np.float32)
    env = VecEnv(Drift(), 2, "cpu", arrays={"wind": wind})
    assert env.state["wind"].tolist() == [1, 2, 4]
    for wrong in (wind[:2], wind.astype(np.float64)):
        with pytest.raises(ConfigError, match="'wind' is"):
            VecEnv(Drift(), 2, "cpu", arrays={"wind": wrong})
    with pytest.raises(ConfigError, match=r"unknown \['rain'\]"):
        VecEnv(Drift(), 2, "cpu", arrays={"rain": wind})


def test_new_episodes_can_start_from_initial_states_of_any_field(write):
    fields = (Field("size", f32, (2,)), Field("place", i32))
    game = bare_with(state=fields)
    write(game, BARE_TEXT)
    size = np.arange(14, dtype=np.float32).reshape(7, 2)
    for initial_states in (
        {"place": np.arange(7, dtype=np.int32)},
        {"size": size, "place": np.arange(7, dtype=np.int32)},
    ):
        env = VecEnv(game(), 200, "cpu", initial_states=initial_states)
        env.reset(seed=1)
        drawn = env.state["place"]
        assert set(drawn.tolist()) == set(range(7))
        if "size" in initial_states:
            assert torch.equal(env.state["size"], torch.tensor(size)[drawn.long()])


def test_the_device_code_is_found_beside_a_declaration_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "lonely.py").write_text(
        "from dataclasses import dataclass\n"
        "from gymnasium.spaces import Discrete\n"
        "from gpu_vecenv import Env\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Lonely(Env):\n"
        "    obs_dim = 2\n"
        "    action_space = Discrete(3)\n"
    )
    (tmp_path / "lonely.cu").write_text(
        BARE_TEXT.replace("observe(State, Io) {}", "observe(State, Io io) { io.obs[0][1] = 8; }")
    )
    spec = importlib.util.spec_from_file_location("lonely", tmp_path / "lonely.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lonely", module)
    spec.loader.exec_module(module)
    obs, _ = VecEnv(module.Lonely(), 3, "cpu").reset(seed=0)
    assert obs[..., 1].eq(8).all()
    monkeypatch.setattr("gpu_vecenv.envs.registry.GAMES", dict(gpu_vecenv.envs.registry.GAMES))
    gpu_vecenv.register(module.Lonely)
    assert gpu_vecenv.make("lonely", 2, "cpu").game == module.Lonely()


# ---------------------------------------------------------------------- errors in device code


def compile_error(game: Env) -> KernelCompileError:
    with pytest.raises(KernelCompileError) as error:
        VecEnv(game, 2, "cpu")
    return error.value


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("= io.action(i, 1);", "= io.action(i, 1)", "expected"),
        ("s.steps[0] += 1", "s.stops[0] += 1", "stops"),
        ("s.wind[io.elapsed_steps % TABLE_SIZE]", "(s.wind[0] = 1)", "read-only|const"),
    ],
)
def test_an_error_in_a_game_names_file_and_line_the_same_on_every_retry(write, right, wrong, words):
    text = DRIFT_TEXT.replace(right, wrong)
    path = write(Drift, text)
    line = next(n for n, line in enumerate(text.splitlines(), start=1) if wrong in line)
    error = compile_error(Drift())
    assert "drift.cu did not compile" in str(error)
    assert re.search(rf"drift\.cu:{line}:\d+: error: .*({words})", str(error)), str(error)
    assert re.search(words, error.log)
    assert [str(compile_error(Drift())) for _ in range(2)] == [str(error)] * 2
    path.write_text(DRIFT_TEXT)
    VecEnv(Drift(), 2, "cpu").reset(seed=0)


def test_an_error_in_an_included_file_names_that_file(write):
    path = write(Drift, DRIFT_TEXT)
    (path.parent / "weight.cuh").write_text("#pragma once\n\nconstexpr float WEIGHT = 0.25g;\n")
    assert re.search(r"weight\.cuh:3:\d+: error", str(compile_error(Drift())))


def test_an_error_after_an_include_still_names_the_right_line(write):
    write(Drift, '#include "game_api.cuh"\n\n#include "weight.cuh"\n\nnonsense\n')
    assert re.search(r"drift\.cu:5:\d+: error", str(compile_error(Drift())))


@pytest.mark.parametrize("function", ["reset", "step", "observe"])
def test_a_missing_function_is_named(write, function):
    write(Bare, "\n".join(line for line in BARE_TEXT.splitlines() if f" {function}(" not in line))
    with pytest.raises((KernelCompileError, EnvDefinitionError), match=function):
        VecEnv(Bare(), 2, "cpu")


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(Drift, "source", tmp_path / "nowhere" / "drift.cu")
    with pytest.raises(
        EnvDefinitionError, match=r"Drift: its device code .*nowhere/drift\.cu does not exist; .*gpu-vecenv new"
    ):
        VecEnv(Drift(), 2, "cpu")


def test_a_missing_include_is_named_with_its_line(write):
    path = write(Drift, DRIFT_TEXT)
    (path.parent / "weight.cuh").unlink()
    with pytest.raises(EnvDefinitionError, match=r'drift\.cu:2: #include "weight\.cuh": no such file'):
        VecEnv(Drift(), 2, "cpu")


def test_a_game_for_cuda_only_is_refused_on_the_cpu(write):
    game = bare_with(host=False)
    write(game, BARE_TEXT)
    with pytest.raises(DeviceUnavailableError, match="host = False"):
        VecEnv(game(), 2, "cpu")


@pytest.mark.parametrize("name", ["tag_continuous", "pendulum", "cartpole"])
def test_reserved_constants_cover_all_names_in_generated_code(name):
    game = gpu_vecenv.configure(name)
    text = generate_header(game.layout) + (cuda_folder() / "engine/step.cuh").read_text()
    given = set(re.findall(r"^(?:constexpr [\w ]+|#define) ([A-Z][A-Z_]+)\b", text, re.MULTILINE))
    assert given - set(game.layout.constants) - {"LARGEST_FIELD"} <= RESERVED_CONSTANTS  # that one is in a namespace
    assert {"SAMPLED", "OBS_STAGING_BYTES", "ACTION_HEADS"} <= given


@pytest.mark.parametrize("value", [-1, 2**31, 24.0, "24k", True])
def test_invalid_obs_staging_bytes_are_refused(value):
    members = {"__module__": __name__, "obs_staging_bytes": value}
    with pytest.raises(EnvDefinitionError, match=r"obs_staging_bytes is .*; expected a number of bytes"):
        type("TagGridworld", (TagGridworld,), members)()


def test_obs_staging_bytes_may_not_be_a_configuration_key():
    members = {"__module__": __name__, "__annotations__": {"obs_staging_bytes": "int"}, "obs_staging_bytes": 3}
    game = dataclass(frozen=True, kw_only=True)(type("TagGridworld", (TagGridworld,), members))
    with pytest.raises(EnvDefinitionError, match="give the key another name"):
        game()
