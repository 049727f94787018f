"""What device code leaves out: each rule finds what breaks it, with file and line, and nothing that is sound."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from support.warm_process import run_python

import gpu_vecenv
from gpu_vecenv.compile.backends.cuda_compiler import compile_cubin
from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.compile.codegen import inline_includes, own_source
from gpu_vecenv.compile.source_rules import check_source_rules, check_variables, cures
from gpu_vecenv.declare.env import Env, Field, f32
from gpu_vecenv.declare.kernels import Array, KernelSignature, arguments_source
from gpu_vecenv.declare.source_rules import SOURCE_RULES
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import DeviceUnavailableError, EnvDefinitionError, KernelCompileError, SourceRuleError

BROKEN = {
    "system headers": [
        "#include <math.h>",
        "  #  include <cuda/std/array>",
        "%:include <math.h>",
        '%:include "near.cuh"',
        '#inc\\\nlude "near.cuh"',
        '#/* */include "near.cuh"',
        "#include NEAR",
        '#include_next "near.cuh"',
    ],
    "threads and blocks": [
        "const int agent = threadIdx.x;",
        "if (blockIdx.x * blockDim.x < 3) return;",
        "__syncthreads();",
        "__sync_env_threads();",
        "if (__syncthreads_or(x)) return;",
        "__shared__ int num_runners;",
        "__device__ float twice(float x) { return 2 * x; }",
        "__constant__ float levels[3];",
        "x = curand_uniform(&states[agent]);",
    ],
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
        "#define ROOT sqrtf",
        "y = APPLY(sqrtf);",
        "y = (sqrtf)(x);",
        "ONCE sincosf(x, &y, &z);",
        "y = si\\\nnf(x);",
        "y = 1'0 + sinf(x) + 1'0;",
        'a = R"(" sinf)"; y = sinf(x);',
    ],
    "external names": ["extern int count;", 'extern "C" float twice(float);', "#define OURS extern"],
    "token pasting": ["#define JOIN(a, b) a##b", "#define JOIN(a, b) a %:%: b"],
    "pragmas": [
        '#pragma GCC optimize("fast-math")',
        '_Pragma("GCC ivdep") y = 1;',
        '__attribute__((optimize("Ofast")))',
    ],
    "atomics": ["atomicAdd(&s.x[0], 1.0f);", "atomicCAS (p, a, b);"],
    "inline assembly": ['asm("mov %0, %1;" : "=r"(a) : "r"(b));', 'asm volatile("");'],
    "intrinsics": [
        "y = __sinf(x);",
        "y = __fdividef(x, z);",
        "y = __builtin_expf(x);",
        "#define SINE __sinf",
    ],
    "allocation": ["float* p = new float[3];", "delete[] p;", "void* p = malloc(3);", "if (a>b) free(p);"],
    "printing": ['printf("%f", x);', "assert(x > 0);"],
}
SOUND = [
    "float y = math::sin(x) + math::sqrt(x) * math::exp(-x);",
    "float y = math::min(a, math::max(b, c));",
    "// sinf(x) is not here, nor atomicAdd(p, 1)",
    "/* asm(\n) new */ float x = 1;",
    "float max = 3, sin = 2; y = max + sin;",
    "HD float twice(float& min, const int* exp) { return min + *exp; }\nenum Curve { LINE, log };\nint k = log;",
    "#define TWICE(round) ((round) * 2)",
    "#pragma unroll 1",
    'a = R"x(asm("sinf") )" )x"; b = \'a\' + 1\'000;',
    "#define INLINED __forceinline__",
    "int k = 0; // a continued comment \\\nsinf(x)",
    "i32 k = io.rng.below(i, 0, 4); s.round[0] = 1;",
    "float news = renew(x) + freely(x) + unprintf(x);",
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
    others = tuple(set(SOURCE_RULES) - {rule})
    with pytest.raises(SourceRuleError, match=rule):
        check_source_rules(broken, "Mine", others)
    check_source_rules(broken, "Mine", (rule,))


def test_every_rule_has_its_examples():
    assert {*BROKEN, "mutable variables"} == set(SOURCE_RULES)


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


def test_all_other_violations_are_listed_once_with_their_place():
    lines = ['#line 1 "mine.cu"', "y = sinf(x);", "z = sinf(threadIdx.x);", "atomicAdd(p, 1);"]
    expected = (
        r"CUDA only\. Others: mine\.cu:2: 'threadIdx' \(threads and blocks\), mine\.cu:3: 'atomicAdd' \(atomics\)$"
    )
    with pytest.raises(SourceRuleError, match=expected):
        check_source_rules(text(*lines), "Mine")
    with pytest.raises(SourceRuleError, match=r"CUDA only$"):
        check_source_rules(text(*lines), "Mine", ("threads and blocks", "atomics"))


def test_a_game_is_looked_through_before_it_is_compiled(tmp_path):
    with pytest.raises(
        SourceRuleError, match=r"Lonely: lonely\.cu:6: 'atomicAdd' breaks the rule 'atomics'.*allows = \('atomics',\)"
    ):
        VecEnv(game(tmp_path, "atomicAdd(s.x, 1.0f);"), 2, "cpu")
    (tmp_path / "near.cuh").write_text("HD float twice(float x) { return __fmul_rn(x, 2); }\n")
    with pytest.raises(SourceRuleError, match=r"near\.cuh:1: '__fmul_rn'"):
        VecEnv(game(tmp_path, '\n#include "near.cuh"\n'), 2, "cpu")


def test_words_of_warpdrive_have_those_of_this_library_in_the_message(tmp_path):
    cures = {
        "int agent = threadIdx.x;": r"'threadIdx' breaks .*FOR_AGENTS \(i\) .* and ONCE .* `s` and `io` are",
        "__sync_env_threads();": r"'__sync_env_threads' breaks .*; write group_sync\(\), outside of FOR_AGENTS",
        "__shared__ int left[3];": r"'__shared__' breaks .*; declare it in struct Scratch, and write io\.scratch->name",
        "x = curand_uniform(&x);": r"'curand_uniform' breaks .*; write io\.rng\.uniform\(item, draw\)",
    }
    for rules, cure in cures.items():
        with pytest.raises(SourceRuleError, match=rf"Lonely: lonely\.cu:6: {cure}"):
            VecEnv(game(tmp_path, rules), 2, "cpu")


def test_the_rules_name_what_works_instead(tmp_path):
    with pytest.raises(SourceRuleError, match=r"'printf' breaks .* make it a field of the state and read env\.state\["):
        VecEnv(game(tmp_path, 'printf("%f", x);'), 2, "cpu")
    with pytest.raises(
        SourceRuleError, match=r"'atomicAdd' breaks .* float sum is a loop of each agent over the others"
    ):
        VecEnv(game(tmp_path, "atomicAdd(&x, 1);"), 2, "cpu")


def test_a_game_that_may_print_prints(tmp_path):
    script = (
        "import sys; sys.path.insert(0, 'tests/compile'); from pathlib import Path\n"
        "from test_source_rules import VecEnv, game\n"
        f"own = game(Path({str(tmp_path)!r}), 'ONCE printf(\"x is %.1f;\", (double)x);', allows=('printing',))\n"
        "env = VecEnv(own, 1, 'cpu')\n"
        "env.reset(seed=1); env.step(env.sample_actions()); env.step(env.sample_actions())\n"
    )
    done = run_python("-c", script, folder=Path(__file__).resolve().parents[2])
    assert done.stdout == "x is 0.0;x is 1.0;", done.stderr


LEFT_OVER = {  # what stands in a source -> what the error of the compiler has beside it
    "s.x[kThisAgentId] = 1;": r"kThisAgentId: FOR_AGENTS \(i\)",
    "if (kEnvId > 3) return;": "kEnvId: `s` and `io` are those of one environment",
    "loc_x_arr[0] = 1;": r"loc_x_arr: a field of the state is s\.name\[i\]",
    "io.done[0] = true;": r"done: write io\.terminations\[i\] and io\.truncations\[i\]",
    "done_arr[0] = 1;": r"done_arr: write io\.terminations",
}


@pytest.mark.parametrize("rules", LEFT_OVER)
def test_names_left_over_are_answered_behind_the_compilers_error(rules, tmp_path):
    with pytest.raises(KernelCompileError, match=rf"lonely\.cu:6.*error(.|\n)*\n  {LEFT_OVER[rules]}") as raised:
        VecEnv(game(tmp_path, rules), 2, "cpu")
    assert len(str(raised.value).splitlines()) <= 5


@pytest.mark.parametrize("rules", ["x = MOVES[io.action(0)];", "switch (io.action(0)) { default: x = 1; }"])
def test_an_action_that_is_no_index_is_answered_with_the_choice(rules, tmp_path):
    mixed = {
        "roles": {"walker": 1, "flyer": 1},
        "action_space": {"walker": Discrete(2), "flyer": Box(-1, 1)},
        "__module__": __name__,
    }
    with pytest.raises(KernelCompileError, match=r"\n  io\.action\(i\) is a float .* is io\.choice\(i\)$"):
        VecEnv(game(tmp_path, f"const int MOVES[2] = {{0, 1}}; {rules}", **mixed), 2, "cpu")


def test_each_compiler_is_understood():
    """In the words of g++, of g++ in a UTF-8 locale, of Clang and of NVRTC."""
    unknown = [
        "a.cu:6:7: error: 'kEnvId' was not declared in this scope",
        "a.cu:6:7: error: \u2018kEnvId\u2019 was not declared in this scope",
        "a.cu:6:7: error: use of undeclared identifier 'kEnvId'",
        'a.cu(6): error: identifier "kEnvId" is undefined',
    ]
    members = [
        "a.cu:6:7: error: 'struct Io' has no member named 'done'",
        "a.cu:6:7: error: no member named 'done' in 'Io'",
        'a.cu(6): error: class "Io" has no member "done"',
    ]
    floats = [
        "a.cu:6:7: error: invalid types 'const int [5][2][Action {aka float}]' for array subscript",
        "a.cu:6:7: error: array subscript is not an integer",
        "a.cu(6): error: expression must have integral or unscoped enum type",
    ]
    assert [cure[:7] for line in unknown for cure in cures([line])] == ["kEnvId:"] * len(unknown)
    assert [cure[:5] for line in members for cure in cures([line])] == ["done:"] * len(members)
    assert [cure[:9] for line in floats for cure in cures([line])] == ["io.action"] * len(floats)
    assert len(cures(floats)) == 1


def test_other_errors_of_a_compiler_have_no_such_answer(tmp_path):
    with pytest.raises(KernelCompileError) as raised:
        VecEnv(game(tmp_path, "x = io.nothing;"), 2, "cpu")
    assert len(str(raised.value).splitlines()) == 2


def test_what_is_allowed_or_for_cuda_only_is_left_to_the_compiler(tmp_path):
    rules = "x = __builtin_fabsf(x);"
    with pytest.raises(SourceRuleError):
        VecEnv(game(tmp_path, rules), 2, "cpu")
    with pytest.raises(DeviceUnavailableError, match="host = False"):
        VecEnv(game(tmp_path, rules, host=False), 2, "cpu")
    VecEnv(game(tmp_path, rules, allows=("intrinsics",)), 2, "cpu").close()


@pytest.mark.parametrize("allows", ["atomics", ("atomic",), (1,), None, {"atomics": 1}])
def test_permissions_are_names_of_rules(allows, tmp_path):
    with pytest.raises(EnvDefinitionError, match=r"Lonely: allows is .*; expected a tuple of names from 'system"):
        game(tmp_path, "", allows=allows)


@pytest.mark.parametrize("name", [name for name in GAMES if GAMES[name].__module__.startswith("gpu_vecenv.")])
def test_bundled_games_keep_all_rules(name):
    check_source_rules(own_source(gpu_vecenv.configure(name).layout), name)


# Rules, and what stands outside of the function. The variable of each is named "count".
VARIABLES = {
    "static": ("static int count = 0; x += count++;", ""),
    "thread_local": ("thread_local int count = 0; x += count++;", ""),
    "hidden by a macro": ("\n#define KEPT static\nKEPT int count; x += ++count;", ""),
    "initialised at its first use": ("static const float count = x; x += count;", ""),
    "pointer to constants": ("static const float* count = 0; x += count ? 1 : 2; count = &x;", ""),
    "in a lambda": ("auto f = [] { static int count = 3; return count += 2; }; x += f();", ""),
    "global": ("x += count++;", "int count = 0;"),
    "in a namespace": ("x += own::count++;", "namespace own { static int count = 0; }"),
    "of a class": ("x += Kept::count++;", "struct Kept { static inline int count = 0; };"),
    "of a template": ("x += kept<3>();", "template <int K> HD int kept() { static int count = K; return count++; }"),
}
CONSTANTS = (
    "static constexpr float near = 2; static const int k[2] = {1, 2}, j[2] = {1, 2}; constexpr int last = 1; "
    "static const int* const place[2] = {k, k + 1}; x += *place[(int)x & 1]; "
    "x += near + k[(int)x & 1] + j[(int)x & 1] + last + TABLES[(int)x & 1] + Kept::twice(x);",
    "TABLE float TABLES[2] = {1, 2}; "
    "struct Kept { static constexpr int SIZE = 3; HD static float twice(float x) { return SIZE * x; } };",
)


def kernel(rules: tuple[str, str]) -> str:
    """Text of one kernel: all in line 2 but what follows a line end."""
    return text(rules[1], f"KERNEL(test) {{ float x = args.x[0]; {rules[0]} args.x[0] = x; }}")


KERNEL = KernelSignature("test", (Array("x", f32),))
BEFORE = inline_includes('#include "kernel.cuh"', "kernel.cuh", None) + arguments_source([KERNEL])


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_keeps_its_value_is_found_in_a_library(name, tmp_path):
    rules, outside = VARIABLES[name]
    own, binary = kernel(VARIABLES[name]), tmp_path / "library.so"
    HostBackend().compile(BEFORE + own, binary)
    line = 1 if outside else 2 + rules.count("\n")
    with pytest.raises(SourceRuleError, match=rf"Mine: mine\.cu:{line}: 'count' breaks .*'mutable variables'.*Scratch"):
        check_variables(binary, BEFORE + own, own, "Mine")
    check_variables(binary, BEFORE + own, own, "Mine", ("mutable variables",))


def test_constants_are_no_variables(tmp_path):
    own = kernel(CONSTANTS)
    HostBackend().compile(BEFORE + own, tmp_path / "library.so")
    assert b"TABLES" in (tmp_path / "library.so").read_bytes()
    check_variables(tmp_path / "library.so", BEFORE + own, own, "Mine")


def test_a_variable_that_keeps_its_value_is_found_in_a_cubin(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC (cuda.bindings) is not installed")
    binary, without_threads = tmp_path / "k.cubin", VARIABLES.keys() - {"thread_local", "initialised at its first use"}
    for name in sorted(without_threads - {"pointer to constants", "global", "in a namespace", "of a class"}):
        own = kernel(VARIABLES[name])
        binary.write_bytes(compile_cubin(BEFORE + own, "sm_90"))
        with pytest.raises(SourceRuleError, match=r"mine\.cu:\d: 'count'"):
            check_variables(binary, BEFORE + "HD float other(const int count) {}" + own, own, "Mine")
    of_engine = "HD float engine(int k) { static const float sizes[2] = {1, 2}; return sizes[k]; }\n"
    for own in (kernel(CONSTANTS), kernel(("float sizes = 1; x += sizes + engine((int)x & 1);", ""))):
        binary.write_bytes(compile_cubin(BEFORE + of_engine + own, "sm_90"))
        check_variables(binary, BEFORE + of_engine + own, own, "Mine")


def test_a_game_with_such_a_variable_is_refused_also_after_one_that_may_have_it(tmp_path):
    rules = "static int count = 0; x += count++;"
    VecEnv(game(tmp_path, rules, allows=("mutable variables",)), 2, "cpu").close()
    with pytest.raises(SourceRuleError, match=r"Lonely: lonely\.cu:6: 'count' breaks the rule 'mutable variables'"):
        VecEnv(game(tmp_path, rules), 2, "cpu")
