"""Code generation: the layout of a game as C++ (constants, structs, accessors), and its whole translation unit."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from gpu_vecenv.compile.bounds_source import bounds_constants, checked_state
from gpu_vecenv.compile.engine_kernels import (
    DEFAULT_BUILD,
    GUARD_ROWS,
    TRACES_ACCESSES,
    BuildOptions,
    engine_kernels,
    squash_source,
)
from gpu_vecenv.compile.randomized_source import float_literal, parameter_functions, with_varying_constants
from gpu_vecenv.compile.scratch_members import member_names, members_source
from gpu_vecenv.declare.field import C_TYPES
from gpu_vecenv.declare.kernels import arguments_source
from gpu_vecenv.declare.layout import FieldLayout, GameLayout
from gpu_vecenv.errors import EnvDefinitionError
from gpu_vecenv.escapes import printable
from gpu_vecenv.files import cuda_folder, engine_folder

HOST_PRINTING = "#if !defined(__CUDACC__)\n#include <cassert>\n#include <cstdio>\n#endif\n"
FUNCTIONS = ("reset", "step", "observe")
SIMD_ENVS = 64  # environments that the host steps in one SIMD loop, one bit of a word each
PARAMETERS = r"\s*\((const\s+|\[\[\w+\]\]\s*)*State(\s+\w+)?\s*,\s*(const\s+|\[\[\w+\]\]\s*)*Io(\s+\w+)?\s*\)"
SCRATCH = re.compile(r"\bstruct\s[^;{}]*\bScratch\b[^;{}]*\{")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')


def generate_header(layout: GameLayout, build: BuildOptions = DEFAULT_BUILD) -> str:
    """The header of one configured game; constants of the device precede it."""
    action, initial_fields = layout.action, [field for field in layout.fields if field.name in build.initial_fields]
    obs_type = C_TYPES[layout.observation.dtype]
    lines = [f"// Generated from {printable(layout.config)}. Do not edit."]
    lines += [_constant(name, value) for name, value in sorted(layout.constants.items())]
    lines += [
        f"constexpr bool END_ON_NONFINITE = {str(build.end_on_nonfinite).lower()};",
        f"constexpr int GUARD_ROWS = {GUARD_ROWS if build.guards else 0};",
        f"constexpr bool ALLOW_STAGING = {str(layout.host).lower()};",
        f"constexpr int ACTION_HEADS = {action.heads};",
        f"constexpr unsigned long long OBS_STAGING_BYTES = {layout.obs_staging_bytes};",
        f"#define SAMPLED {int(build.sampled)}",
        f"#define BOX_ACTIONS {int(not action.discrete)}",
        f"#define DISCRETE_HEADS {len(action.head_sizes)}",
        f"#define ACTION_MASKS {int(layout.masks_actions)}",
        f"#define TRACKS_ACTING {int(layout.tracks_acting)}",
        f"#define TAKES_TURNS {int(layout.takes_turns)}",
        f"constexpr bool ZERO_SUM = {str(layout.zero_sum).lower()};",
        f"typedef {obs_type} Observation;",
        f"typedef {C_TYPES[action.dtype]} Action;",
        f"typedef {'i64' if action.discrete else 'float'} LongAction;",
    ]
    if build.sampled:
        lines.append(squash_source(build.squash).rstrip())
    if layout.randomized:
        lines.append("#define RANDOMIZED")
    if not action.discrete:
        lines += [f"constexpr bool CLIP_ACTIONS = {str(layout.clips_actions).lower()};", *_boxes(layout)]
    lines += _action_sizes(layout) + _observed(layout)
    if layout.tracks_acting:
        lines += _team_roles(layout)
    if build.guards:
        heads = {role: str(len(own)) for role, own in action.sizes.items()}
        lines += ["namespace bounds {", *_by_role(layout, "int own_heads", "", heads), "}"]
    largest = max(action.head_sizes, default=0)
    lines += [
        f"constexpr int NUM_LOGITS = {action.num_logits}, LARGEST_HEAD = {largest};",
        f"constexpr int PARAMETERS_PER_AGENT = {action.num_parameters};",
    ]
    if action.head_sizes:
        lines += [
            "HD int logit_offset([[maybe_unused]] int head) {",
            f"    return {_by_head([*accumulate(action.head_sizes, initial=0)])};",
            "}",
        ]
    state = checked_state(layout) if build.guards else _struct("State", layout.fields)
    lines += state + _struct("EngineState", layout.engine_fields) + _staged_struct(layout)
    lines += [
        "struct InitialStates {",
        *(f"    {_declare(f, 'const ', stacked=True)};" for f in initial_fields),
        "    i64 num_initial_states;",
        "};",
    ]
    return "\n".join(lines) + "\n"


def _state_of_arguments(layout: GameLayout, build: BuildOptions) -> str:
    """state_of, engine_state_of, initial_states_of: the structs of pointers, from a kernel's arguments."""
    head = "template <class Arguments>\nHD {} {}([[maybe_unused]] const Arguments& args{}) {{\n    return {{{}}};\n}}\n"
    index = ", [[maybe_unused]] i64 env"
    state, engine = (
        ", ".join(_slice(field, f"args.{owner}_{field.name}", build.guard_items(field)) for field in fields)
        for owner, fields in (("state", layout.fields), ("engine", layout.engine_fields))
    )
    initial_fields = [field for field in layout.fields if field.name in build.initial_fields]
    initial = [*(_cast(f, f"args.initial_{f.name}", stacked=True) for f in initial_fields)]
    return (
        head.format("State", "state_of", index, state)
        + head.format("EngineState", "engine_state_of", index, engine)
        + head.format("InitialStates", "initial_states_of", "", ", ".join([*initial, "args.num_initial_states"]))
    )


def generate_state_functions(layout: GameLayout, build: BuildOptions = DEFAULT_BUILD) -> str:
    """Functions that loop over the fields of the state; they use FOR_RANGE and HD."""
    lines = [
        "HD void copy_initial_state([[maybe_unused]] State s, [[maybe_unused]] InitialStates initial_states, "
        "[[maybe_unused]] i64 row) {"
    ]
    for field in layout.fields:
        if field.name in build.initial_fields:
            size, kind = field.size, C_TYPES[field.dtype]
            source = f"((const {kind}*)initial_states.{field.name})[row * {size} + k]"
            lines.append(f"    FOR_RANGE(k, {size}) (({kind}*)s.{field.name})[k] = {source};")
    lines += ["}", "HD bool is_finite([[maybe_unused]] State s) {", "    bool finite = true;"]
    for field in layout.fields:
        if field.dtype.kind == "f" and not field.shared:
            size, kind = field.size, C_TYPES[field.dtype]
            lines.append(f"    FOR_RANGE(k, {size}) finite &= math::is_finite((({kind}*)s.{field.name})[k]);")
    return "\n".join([*lines, "    return finite;", "}", *_staging_functions(layout), *_host_simd(layout)]) + "\n"


def quoted(name: str) -> str:
    """A file name as a C string literal."""
    return '"' + printable(name).replace("\\", "\\\\").replace('"', '\\"') + '"'


def inline_includes(text: str, name: str, folder: Path | None, seen: set[str] | None = None) -> str:
    """``text`` with every ``#include "…"`` replaced by the file's content, each file once, with #line directives.

    Files are searched for in ``folder`` (that of the including file), then in the package's device code. The result is
    self-contained: the cache key is its hash, and the compiler needs no include path.
    """
    seen = set() if seen is None else seen
    lines = [f"#line 1 {quoted(name)}"]
    for number, content, wanted in _parts(text):
        lines.append(content)
        if wanted is None:
            continue
        folders = [parent for parent in (folder, engine_folder()) if parent is not None]
        header = next(filter(None, (_header(parent, wanted) for parent in folders)), None)
        if header is None:
            raise EnvDefinitionError(
                f'{name}:{number}: #include "{wanted}": no such file in '
                f"{', '.join(str(parent / wanted) for parent in folders)}"
            )
        if header.key not in seen:
            seen.add(header.key)
            lines.append(inline_includes(header.text, header.name, header.folder, seen))
        lines.append(f"#line {number + 1} {quoted(name)}")
    return "\n".join(lines) + "\n"


class _Header(NamedTuple):
    key: str  # its resolved path
    name: str
    folder: Path
    text: str


@functools.lru_cache(maxsize=256)  # of the texts of headers, which are the same in many programs
def _parts(text: str) -> tuple[tuple[int, str, str | None], ...]:
    """The lines before each #include, its line number and the file that it names; None after the last one."""
    parts, lines = list[tuple[int, str, str | None]](), list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        match = INCLUDE.match(line) if "#" in line else None
        if match is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        parts.append((number, "\n".join(lines), match.group(1)))
        lines = []
    return (*parts, (0, "\n".join(lines), None))


def _header(folder: Path, wanted: str) -> _Header | None:
    """A header in a folder; None if there is none. Those of the package are read once."""
    return (_packaged_header if _is_packaged(folder) else _read_header)(folder, wanted)


def _read_header(folder: Path, wanted: str) -> _Header | None:
    path = folder / wanted
    if not path.is_file():
        return None
    return _Header(str(path.resolve()), path.name, path.parent, path.read_text(encoding="utf-8"))


_packaged_header = functools.cache(_read_header)


@functools.lru_cache(maxsize=256)
def _is_packaged(folder: Path) -> bool:
    return folder.resolve().is_relative_to(cuda_folder().resolve())


def _engine_headers(text: str, name: str, folder: Path, seen: set[str]) -> str:
    """The engine's headers that a game's source includes, for the source before it."""
    included = set(seen)
    inline_includes(text, name, folder, included)
    headers = sorted(Path(key).name for key in included - seen if Path(key).parent == engine_folder())
    return inline_includes("".join(f'#include "{header}"\n' for header in headers), "generated header", None, seen)


def declared_source(layout: GameLayout, build: BuildOptions, seen: set[str]) -> str:
    """kernel.cuh and the generated header; ``seen`` collects the included files."""
    macros = inline_includes('#include "kernel.cuh"', "generated header", None, seen)
    if build.guards:
        macros += bounds_constants(layout) + inline_includes('#include "bounds.cuh"', "generated header", None, seen)
    if build.races:
        macros += TRACES_ACCESSES + inline_includes('#include "races.cuh"', "generated header", None, seen)
    return macros + '#line 1 "generated header"\n' + generate_header(layout, build)


def game_source(layout: GameLayout, build: BuildOptions = DEFAULT_BUILD) -> str:
    """The self-contained translation unit of one game, without the constants of the device."""
    seen = set[str]()
    return (
        stepping_source(layout, build, seen)
        + arguments_source(engine_kernels(layout, build), build.pointer)
        + inline_includes('#include "entry_points.cuh"', "generated functions", None, seen)
        + (members_source(member_names(own_source(layout))) if build.races else "")
    )


def stepping_source(layout: GameLayout, build: BuildOptions, seen: set[str]) -> str:
    """One game and the engine's functions that reset and step it; ``seen`` collects the included files."""
    path = layout.source_path
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise EnvDefinitionError(
            f"{layout.name}: its device code {path} does not exist; expected reset, step and observe there, of which "
            "gpu-vecenv new my_game writes an example"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise EnvDefinitionError(f"{layout.name}: its device code {path} cannot be read: {reason}") from error
    declared = declared_source(layout, build, seen)
    if "printing" in layout.allows:
        declared = HOST_PRINTING + declared
    if build.thread_order:
        declared = f"#define DEBUG_THREAD_ORDER {build.thread_order}\n{declared}"
    before = inline_includes('#include "game_api.cuh"', "generated header", None, seen)
    if layout.randomized:
        before += inline_includes('#include "randomized.cuh"', "generated header", None, seen)
        before += _engine_headers(source, path.name, path.parent, seen)
    game = inline_includes(source, path.name, path.parent, seen)
    if layout.randomized:
        before += parameter_functions(layout)
        game = with_varying_constants(layout, game)
    staging = inline_includes('#include "staging.cuh"', "generated functions", None, seen)
    engine = inline_includes('#include "step.cuh"', "generated functions", None, seen)
    return (
        declared
        + before
        + arguments_source(layout.kernels, build.pointer)
        + game
        + staging
        + '#line 1 "generated functions"\n'
        + generate_state_functions(layout, build)
        + _state_of_arguments(layout, build)
        + engine
    )


def engine_headers() -> set[str]:
    """The paths of the engine's headers, as ``inline_includes`` has them in ``seen``."""
    return {str(header) for header in engine_folder().glob("*.cuh")}


def own_source(layout: GameLayout) -> str:
    """A game's own text: its source with its includes inlined, without the engine's headers."""
    path = layout.source_path
    return inline_includes(path.read_text(encoding="utf-8"), path.name, path.parent, engine_headers())


def own_files(layout: GameLayout) -> list[Path]:
    """A game's source and the files that it includes, without the engine's headers."""
    path, seen = layout.source_path, set[str]()
    inline_includes(path.read_text(encoding="utf-8"), path.name, path.parent, seen)
    return [path.resolve(), *(header for header in map(Path, sorted(seen)) if header.parent != engine_folder())]


def missing_definitions(layout: GameLayout) -> list[str]:
    """Definitions that a game's source and its includes seem to lack, each with similar ones that were found."""
    path = layout.source_path
    text = COMMENT.sub("", inline_includes(path.read_text(encoding="utf-8"), path.name, path.parent))
    missing = [] if SCRATCH.search(text) else ["struct Scratch { … }"]
    for function in FUNCTIONS:
        heads = re.findall(rf"[^;{{}}\n]*\b{function}\s*\([^;{{}}]*\)(?=\s*\{{)", text)
        if not any(re.search(rf"\bvoid\s+{function}{PARAMETERS}", head) for head in heads):
            instead = f" (it has {'; '.join(' '.join(head.split()) for head in heads)})" if heads else ""
            missing.append(f"HD void {function}(State s, Io io) {{ … }}{instead}")
    return missing


def _constant(name: str, value: int | float | bool) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"constexpr float {name} = {float_literal(value)};"


def _table(name: str, values: Iterable[float]) -> str:
    return f"TABLE float {name}[] = {{{', '.join(map(float_literal, values))}}};"


def _action_sizes(layout: GameLayout) -> list[str]:
    """action_size(agent, head): number of choices of that head, 0 if the agent does not have it."""
    sizes = {role: [*own, *[0] * (layout.action.heads - len(own))] for role, own in layout.action.sizes.items()}
    return _by_role(layout, "int action_size", "head", {role: _by_head(own) for role, own in sizes.items()})


def _boxes(layout: GameLayout) -> list[str]:
    """action_box::heads(agent): elements of the agent's Box, 0 if it has none; has, low, high: of one element.

    Where all roles have one Box, its bounds are the tables ACTION_LOW and ACTION_HIGH, for the game too.
    """
    bounds, uniform = layout.action.bounds, not layout.action.mixed
    tables, functions = list[str](), list[str]()
    for side, name in enumerate(("low", "high")):
        if uniform:
            tables.append(_table(f"ACTION_{name.upper()}", next(iter(bounds.values()))[side]))
            values = dict.fromkeys(layout.roles, f"ACTION_{name.upper()}[head]")
        else:
            functions += [_table(f"{name}_of_{role}", own[side]) for role, own in bounds.items()]
            values = {role: f"{name}_of_{role}[head]" if role in bounds else "0" for role in layout.roles}
        functions += _by_role(layout, f"float {name}", "head", values)
    heads = {role: str(len(bounds[role][0]) if role in bounds else 0) for role in layout.roles}
    inside = {role: "true" if uniform else f"head < {size}" for role, size in heads.items()}
    functions += _by_role(layout, "int heads", "", heads) + _by_role(layout, "bool has", "head", inside)
    return [*tables, "namespace action_box {", *functions, "}"]


def _by_role(layout: GameLayout, name: str, index: str, values: Mapping[str, str]) -> list[str]:
    """A function of an agent and an index that returns its role's value."""
    parameters = ", ".join(f"[[maybe_unused]] int {parameter}" for parameter in ("agent", index) if parameter)
    roles, lines = layout.present_roles, [f"HD {name}({parameters}) {{"]
    for role in roles:
        guard = "" if role == roles[-1] else f"if (agent < {layout.role_slices[role].stop}) "
        lines.append(f"    {guard}return {values[role]};")
    return [*lines, "}"]


def _observed(layout: GameLayout) -> list[str]:
    """observed(agent, k): whether item k of a row of the observation tensor is not padding for that agent."""
    observation, values = layout.observation, dict[str, str]()
    for role in layout.roles:
        inside, stride = [], layout.obs_size
        for own, widest in zip(observation.shapes[role], observation.shape, strict=True):
            stride //= widest
            if own < widest:
                inside.append(f"k / {stride} % {widest} < {own}")
        values[role] = " && ".join(inside) or "true"
    padded = f"constexpr bool OBS_PADDED = {str(observation.padded).lower()};"
    return [padded, *_by_role(layout, "bool observed", "k", values)]


def _team_roles(layout: GameLayout) -> list[str]:
    """has_team_reward(agent); stays_when_dead(agent, k): whether item k of its observation is of its id."""
    team = {role: str(role in layout.team_roles).lower() for role in layout.roles}
    lengths = {role: shape[-1] for role, shape in layout.observation.shapes.items()}
    ids = {role: f"k >= {n - layout.agent_id_size} && k < {n}" for role, n in lengths.items()}
    if layout.agent_id_size == 0:
        ids = dict.fromkeys(ids, "false")
    return _by_role(layout, "bool has_team_reward", "", team) + _by_role(layout, "bool stays_when_dead", "k", ids)


def _by_head(values: Sequence[int]) -> str:
    """An expression in ``head``."""
    choice = str(values[-1])
    for head, value in reversed(list(enumerate(values[:-1]))):
        choice = choice if choice == str(value) else f"head == {head} ? {value} : {choice}"
    return choice


def _declare(field: FieldLayout, const: str = "", stacked: bool = False) -> str:
    inner = "".join(f"[{n}]" for n in field.shape[0 if stacked else 1 :])
    kind = f"{const}{C_TYPES[field.dtype]}"
    return f"{kind} (*{field.name}){inner}" if inner else f"{kind}* {field.name}"


def _struct(name: str, fields: Iterable[FieldLayout]) -> list[str]:
    return [f"struct {name} {{", *(f"    {_declare(f, 'const ' if f.shared else '')};" for f in fields), "};"]


def _staged_struct(layout: GameLayout) -> list[str]:
    """Struct of the staged state: copies of the fields that a step may change, and per-agent actions and outputs."""
    fields = _staged_fields(layout)
    own = (
        f"alignas({_alignment(f)}) {C_TYPES[f.dtype]} {who}_{f.name}{''.join(f'[{n}]' for n in f.shape or (1,))};"
        for who, f in fields
    )
    rows = (
        "Action actions[NUM_AGENTS * ACTION_HEADS];",
        "float rewards[NUM_AGENTS];",
        "bool terminations[NUM_AGENTS];",
        "bool truncations[NUM_AGENTS];",
    )
    largest = max(layout.num_agents * layout.action.heads, *(field.size for _, field in fields))
    return [
        "namespace staging {",
        "struct Staged {",
        *(f"    {line}" for line in (*own, *rows)),
        "};",
        f"constexpr int LARGEST_FIELD = {largest};",
        "}",
    ]


def _staging_functions(layout: GameLayout) -> list[str]:
    """staged_engine, staged_state: pointers into a Staged; load_staged, store_staged: copies to it and back."""
    fields = _staged_fields(layout)
    staged = {(owner, field.name) for owner, field in fields}
    lines = ["namespace staging {"]
    for owner, kind, whole in (("m", "EngineState", layout.engine_fields), ("s", "State", layout.fields)):
        parts = [f"staged.{owner}_{f.name}" if (owner, f.name) in staged else f"{owner}.{f.name}" for f in whole]
        name = f"staged_{kind.removesuffix('State').lower() or 'state'}"
        head = f"HD {kind} {name}([[maybe_unused]] Staged& staged, [[maybe_unused]] {kind} {owner})"
        lines.append(f"{head} {{ return {{{', '.join(parts)}}}; }}")
    lines += [
        "HD void load_staged(Staged& staged, EngineState m, [[maybe_unused]] State s, const void* actions, "
        "bool int64_actions) {",
        "    ThreadItems<Action, NUM_AGENTS * ACTION_HEADS> staged_actions;",
        "    if (!SAMPLED) staged_actions.load_actions(actions, int64_actions);",
    ]
    for verb, source in (("load", "{0}.{1}"), ("store", "staged.{0}_{1}")):
        for owner, field in reversed(fields):  # narrow items first: the assembler puts later ones behind a branch
            kind, size = C_TYPES[field.dtype], field.size
            declared = f"ThreadItems<{kind}, {size}> {owner}_{field.name}; " if verb == "load" else ""
            lines.append(f"    {declared}{owner}_{field.name}.{verb}(({kind}*){source.format(owner, field.name)});")
    lines += [
        "    if (!SAMPLED) staged_actions.store(staged.actions);",
        "}",
        "HD void store_staged(const Staged& staged, EngineState m, [[maybe_unused]] State s) {",
    ]
    for owner, field in fields:
        kind, size = C_TYPES[field.dtype], field.size
        copy = f"(({kind}*){owner}.{field.name})[k] = ((const {kind}*)staged.{owner}_{field.name})[k];"
        if field.name != "key" or owner == "s":
            lines.append(f"    FOR_RANGE(k, {size}) {copy}")
    return [*lines, "}", "}"]


def _host_simd(layout: GameLayout) -> list[str]:
    """Types and accessors for host_simd.cuh: the state of one and of SIMD_ENVS environments, a loop over the fields."""
    own = [(f, C_TYPES[f.dtype], f.size) for f in layout.fields if not f.shared]
    parts = [_cast(f, f"s.{f.name}") if f.shared else _cast(f, f"own.{f.name}", const="") for f in layout.fields]
    arguments = ("SimdState& simd", "EnvState& own", "State s", "F f")
    return [
        "#if !defined(__CUDACC__)",
        "namespace host_simd {",
        f"constexpr int SIMD_ENVS = {SIMD_ENVS}, STATE_ITEMS = {sum(size for _, _, size in own)};",
        "struct EnvState {",
        *(f"    {kind} {f.name}[{size}];" for f, kind, size in own),
        "};",
        "struct alignas(64) SimdState {",
        *(f"    {kind} {f.name}[{size}][SIMD_ENVS];" for f, kind, size in own),
        "};",
        "HD State state_of([[maybe_unused]] EnvState& own, [[maybe_unused]] State s) {",
        f"    return {{{', '.join(parts)}}};",
        "}",
        "template <class F>",
        f"HD void each_field({', '.join(f'[[maybe_unused]] {argument}' for argument in arguments)}) {{",
        *(f"    f(simd.{f.name}, own.{f.name}, ({kind}*)s.{f.name});" for f, kind, _ in own),
        "}",
        "}",
        "#endif",
    ]


def _staged_fields(layout: GameLayout) -> list[tuple[str, FieldLayout]]:
    """(m or s, field) of the state that a step reads and writes, by decreasing alignment, which avoids padding."""
    engine = [
        ("m", field)
        for field in layout.engine_fields
        if field.name in ("key", "episode", "elapsed_steps", "active", "alive", "acting", "returns")
    ]
    fields = [*engine, *(("s", field) for field in layout.fields if not field.shared)]
    return sorted(fields, key=lambda item: -_alignment(item[1]))


def _alignment(field: FieldLayout) -> int:
    """Alignment in bytes, at most 16, of one environment's part of a field, in its tensor and when staged."""
    return min(16, field.nbytes & -field.nbytes)


def _cast(field: FieldLayout, argument: str, const: str = "const ", stacked: bool = False) -> str:
    inner = "".join(f"[{n}]" for n in field.shape[0 if stacked else 1 :])
    return f"({const}{C_TYPES[field.dtype]} (*){inner})({argument})" if inner else f"({argument})"


def _slice(field: FieldLayout, argument: str, guard_items: int) -> str:
    if field.shared:
        return _cast(field, argument)
    return _cast(field, f"{argument} + (i64)env * {field.size + guard_items}", "")
