"""What device code leaves out: each rule finds what breaks it, with file and line, and nothing that is sound."""

from dataclasses import dataclass

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from gpu_vecenv.compile.codegen import game_source
from gpu_vecenv.compile.source_rules import RULES, check_source_rules
from gpu_vecenv.declare.env import Env, Field
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import EnvDefinitionError, SourceRuleError
from gpu_vecenv.files import cuda_folder

BROKEN = {
    "system headers": ["#include <math.h>", "  #  include <cuda/std/array>"],
    "library functions": [
        "float y = sinf(x);",
        "float y = exp (x);",
        "float y = std::max(x, 1.0f);",
        "y = fabsf(-x) + 1;",
        "y = powf(x, 2);",
        "y = min(x, 2);",
        "y = sqrt(x);",
        "y = ::sinf(x);",
        "y = cuda::std::sin(x);",
        "if (a>sqrtf(b)) y = 1>>abs(k);",
        "y = std::max<float>(a, b);",
        "sincosf(x, &y, &z);",
        "y = fma(a, b, c) + copysignf(a, b);",
        "return floorf(x);",
    ],
    "atomics": ["atomicAdd(&s.x[0], 1.0f);", "atomicCAS (p, a, b);"],
    "inline assembly": ['asm("mov %0, %1;" : "=r"(a) : "r"(b));', 'asm volatile("");'],
    "intrinsics": ["y = __sinf(x);", "y = __fdividef(x, z);", "y = __builtin_expf(x);", "__syncthreads();"],
    "allocation": ["float* p = new float[3];", "delete[] p;", "void* p = malloc(3);", "if (a>b) free(p);"],
    "printing": ['printf("%f", x);', "assert(x > 0);"],
}
SOUND = [
    "float y = math::sin(x) + math::sqrt(x) * math::exp(-x);",
    "float y = math::min(a, math::max(b, c));",
    "// sinf(x) is not here, nor atomicAdd(p, 1)",
    "/* asm(\n) new */ float x = 1;",
    "float max = 3, sin = 2; y = max + sin;",
    "i32 k = io.rng.below(i, 0, 4); s.round[0] = 1;",
    "float news = renew(x) + freely(x) + unprintf(x);",
    '#include "math.cuh"',
    "group_sync();",
    "r.log(x); p->exp(x); pool.free(i); Grid::round(x);",
    "HD int mod(int a, int n) { return (a % n + n) % n; }",
    "struct R { HD float log(float x) { return x; } HD i32 min(i32 i) { return i; } HD void free(int) {} };",
    "struct Grid { Grid(const Grid&) = delete; };",
    "struct __align__(16) Cell { u8 kind; };",
    "static_assert(LENGTH > 2);",
]


def text(*lines: str) -> str:
    return "\n".join(['#line 1 "mine.cu"', *lines]) + "\n"


@dataclass(frozen=True, kw_only=True)
class Lonely(Env):
    obs_dim = 2
    action_space = Discrete(3)
    state = (Field("x", np.float32),)


def game(folder, rules: str, **changes) -> Env:
    """A game of its own class, whose step has these rules."""
    path = folder / "lonely.cu"
    path.write_text(
        '#include "game_api.cuh"\nstruct Scratch {};\nHD void reset(State s, Io) { ONCE s.x[0] = 0; }\n'
        f"HD void step(State s, Io io) {{\n    float x = s.x[0];\n    {rules}\n"
        "    ONCE { s.x[0] = x + 1; io.truncations[0] = io.elapsed_steps >= 3; }\n}\n"
        "HD void observe(State s, Io io) { ONCE { io.obs[0][0] = s.x[0]; io.obs[0][1] = 0; } }\n"
    )
    return type("Lonely", (Lonely,), {"source": path, **changes})()


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in BROKEN.items() for line in lines])
def test_each_rule_finds_what_breaks_it_and_its_permission_is_for_it_alone(rule, line):
    broken = text("float x = 1;  // sinf(x)", line)
    with pytest.raises(SourceRuleError, match=rf"^Mine: mine\.cu:2: .* breaks the rule .{rule}. of device code: "):
        check_source_rules(broken, "Mine")
    others = tuple(set(RULES) - {rule})
    with pytest.raises(SourceRuleError, match=rule):
        check_source_rules(broken, "Mine", others)
    check_source_rules(broken, "Mine", (rule,))


def test_every_rule_has_its_examples():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize("line", SOUND)
def test_valid_source_passes(line):
    check_source_rules(text("float a = 1;", line), "Mine")


def test_the_first_violation_is_reported_with_its_file():
    """Not the first of the rules; marks of included files count."""
    lines = ['#line 1 "near.cuh"', "int k;", "y = sinf(x);", '#line 2 "mine.cu"', "/*", "*/ atomicAdd(p, 1);"]
    with pytest.raises(SourceRuleError, match=r"near\.cuh:2: 'sinf'"):
        check_source_rules(text(*lines), "Mine")
    with pytest.raises(SourceRuleError, match=r"mine\.cu:3: 'atomicAdd'"):
        check_source_rules(text(*lines), "Mine", ("library functions",))


def test_a_game_is_looked_through_before_it_is_compiled(tmp_path):
    with pytest.raises(
        SourceRuleError, match=r"Lonely: lonely\.cu:6: 'atomicAdd' breaks the rule 'atomics'.*allows = \('atomics',\)"
    ):
        VecEnv(game(tmp_path, "atomicAdd(s.x, 1.0f);"), 2, "cpu")
    (tmp_path / "near.cuh").write_text("HD float twice(float x) { return __fmul_rn(x, 2); }\n")
    with pytest.raises(SourceRuleError, match=r"near\.cuh:1: '__fmul_rn'"):
        VecEnv(game(tmp_path, '\n#include "near.cuh"\n'), 2, "cpu")


def test_what_is_allowed_or_for_cuda_only_is_left_to_the_compiler(tmp_path):
    rules = "x = __builtin_fabsf(x);"
    with pytest.raises(SourceRuleError):
        game_source(game(tmp_path, rules).layout)
    assert rules in game_source(game(tmp_path, rules, host=False).layout)
    VecEnv(game(tmp_path, rules, allows=("intrinsics",)), 2, "cpu").close()


@pytest.mark.parametrize("allows", ["atomics", ("atomic",), (1,), None, {"atomics": 1}])
def test_permissions_are_names_of_rules(allows, tmp_path):
    with pytest.raises(EnvDefinitionError, match=r"Lonely: allows is .*; expected a tuple of names from 'system"):
        game(tmp_path, "", allows=allows)


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(cuda_folder().rglob("*.cu")) if "step(State" in p.read_text()],
    ids=lambda path: path.stem,
)
def test_bundled_games_keep_all_rules(path):
    lines = path.read_text().splitlines()
    check_source_rules(text(*lines), path.stem)
