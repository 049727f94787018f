"""Code injection through names, configuration keys and values.

An injection must be refused, or be passed on as plain data: the device code equals that for a harmless value. Meanwhile
nothing is compiled, imported, started or written, according to Python's audit hooks. Some accepted ones are compiled
with a compiler that only records its arguments.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import inspect
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock  # noqa: F401  the cache imports it at the first compilation
import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

import gpu_vecenv
from gpu_vecenv.cli.new import new_game
from gpu_vecenv.cli.options import game_class
from gpu_vecenv.compile.cache import cache_dir as cache_folder
from gpu_vecenv.compile.codegen import game_source, inline_includes
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env, Field, f32, param
from gpu_vecenv.envs.registry import GAMES, find_game, load_game
from gpu_vecenv.errors import (
    CompilerError,
    ConfigError,
    DeviceUnavailableError,
    EnvDefinitionError,
    KernelCompileError,
    UnknownGameError,
    UnknownModuleError,
)
from gpu_vecenv.views import pettingzoo_env
from reliability.experiment import Experiment, Metrics, said

Errors = type[Exception] | tuple[type[Exception], ...]

MARK = "qzjx"  # part of every injection, to recognise it anywhere
PIECES = (
    '"', "'", "\n", "\r\n", "\r", "\\", "\\\n", "\0", "??/", "??/\n", "\t", "\x1b[2J", "\u2028", "\u202e", "\uff1b",
    "\u0430gent", "\u2170nt", "\ud800", "`touch {canary}`", "$(touch {canary})", "; touch {canary} #",
    "| touch {canary}",
    "&& touch {canary}", "\n#include </etc/passwd>\n", '\n#include "/etc/passwd"\n', "*/ int x; /*", "); } int evil(",
    ";\nint evil = system(\"touch {canary}\");\n", "${{CXX}}", "%n%s", "__import__('os').system('touch {canary}')",
    "!!python/object/apply:os.system ['touch {canary}']", "cos\nsystem\n(S'touch {canary}'\ntR.", "-o {canary}",
    "@/etc/passwd", "-fplugin={canary}", "../../../etc/passwd", "os:system", "antigravity:x", "gpu_vecenv/os:System-v0",
    "__class__", "__proto__", "__init_subclass__", "constructor", "{0.__class__}", "constexpr int", "HD", "#define",
    "\n#line 1 \"", "R\"(", "u8\"",
)  # fmt: skip


class HostileStr(str):
    """A str whose repr and str differ from its value."""

    def __str__(self) -> str:
        return f'";\nint {MARK};\n//'

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)

    def upper(self) -> str:
        return str(self)


class HostileInt(int):
    """An int whose str and repr are C++ code."""

    def __str__(self) -> str:
        return f"0;\nint {MARK} = 0"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)


class HostileFloat(float):
    """A float whose str and repr are C++ code."""

    __str__ = __repr__ = HostileInt.__str__

    def __format__(self, spec: str) -> str:
        return HostileInt.__str__(self)  # type: ignore[arg-type]


class HostileNumpy(np.float64):
    """A NumPy scalar whose item() is hostile."""

    def item(self, *index: Any) -> Any:
        return HostileFloat(1.0)

    __str__ = __repr__ = HostileInt.__str__


class HostileWord(str, enum.Enum):
    """A str enum whose str and repr are C++ code."""

    ALL = "all"
    CLIP = "clip"

    __str__ = __repr__ = HostileStr.__str__


class HostileNumber(enum.IntEnum):
    """An int enum whose str and repr are C++ code."""

    FIVE = 5
    ONE = 1

    __str__ = __repr__ = HostileInt.__str__

    def __format__(self, spec: str) -> str:
        return HostileInt.__str__(self)


class Pretender:
    """A value that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("same_step")

    def __index__(self) -> int:
        return 1

    __int__ = __index__
    __str__ = __repr__ = HostileInt.__str__

    def __format__(self, spec: str) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class Named(Env):
    """A game with strings in its configuration, which are not part of the device code."""

    label: str = "plain"
    file: Path = Path("plain")
    labels: tuple[str, ...] = ()
    level: float = param(1.0)

    state = (Field("place", f32),)
    obs_dim = 1
    action_space = Discrete(2)

    @classmethod
    def name(cls) -> str:
        return "named"


RULES = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State, Io) {}
HD void step(State, Io) {}
HD void observe(State s, Io io) { FOR_AGENTS (i) io.obs[i][0] = s.place[0]; }
"""

_watched: list[str] | None = None
PROCESS_EVENTS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "import", "ctypes.dlopen",
    "pickle.find_class", "marshal.loads", "socket.connect",
)  # fmt: skip


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that records compilations, imports, processes and files opened for writing."""
    if _watched is None:
        return
    if event == "subprocess.Popen" and list(arguments[1][1:]) == ["--version"] and MARK not in repr(arguments):
        return  # queries the compiler's version
    if event == "ctypes.dlopen" and Path(str(arguments[0])).resolve().parent == cache_folder().resolve():
        return  # a compiled harmless game
    if event in PROCESS_EVENTS or (event == "compile" and MARK in repr(arguments[0])):
        _watched.append(f"{event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        _watched.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)


@contextlib.contextmanager
def watching() -> Iterator[list[str]]:
    """The recorded events of a block."""
    global _watched
    _watched = events = []
    try:
        yield events
    finally:
        _watched = None


def injection(rng: random.Random, canary: Path) -> str:
    pieces = [rng.choice(PIECES).replace("{canary}", str(canary)) for _ in range(rng.randrange(1, 5))]
    pieces.insert(rng.randrange(len(pieces) + 1), MARK)
    if rng.randrange(50) == 0:
        pieces.append("A" * rng.randrange(10_000))
    return "".join(pieces)


def hostile(rng: random.Random, text: str) -> Any:
    """An injection as a value of some type, or a value whose repr is one."""
    values = [
        text,
        HostileStr("all"),
        HostileStr(text),
        HostileInt(5),
        HostileFloat(0.5),
        HostileNumpy(0.5),
        Pretender(),
    ]
    values += [HostileWord.ALL, HostileWord.CLIP, HostileNumber.FIVE, np.str_(text.replace("\ud800", "")), [text]]
    values += [text.encode(errors="replace"), (HostileInt(1),), {text: text}, bytearray(b"all"), np.array(["all"])]
    return rng.choice(values)


@dataclass
class Refused:
    """A call that must raise one of these errors and run nothing."""

    call: Callable[[], object]
    errors: Errors


@dataclass
class Harmless:
    """A call that may raise these errors, or returns a game or device code: it must equal ``harmless``."""

    call: Callable[[], Env | str]
    errors: Errors
    harmless: str


Attempt = Refused | Harmless


def stripped(text: str) -> str:
    """Device code without the comment on its configuration and the names in #line directives."""
    lines = [re.sub(r'^(#line \d+ )"([^"\\]|\\.)*"$', r"\1", line) for line in text.split("\n")]
    return "\n".join(
        "//" if line.startswith("// Generated from") and ends_with_its_line(line) else line for line in lines
    )


def ends_with_its_line(remark: str) -> bool:
    """Whether a // comment ends exactly where its line ends."""
    return not re.search(r"[\r\v\f]|(\\|\?\?/)\s*$", remark)


def game_with(**members: Any) -> type[Env]:
    """A game class with these members."""
    return dataclass(frozen=True, kw_only=True)(type("Own", (Named,), {"__module__": __name__, **members}))


class Injector:
    """Generator of attempts; ``folder`` is for game files."""

    def __init__(self, folder: Path) -> None:
        gpu_vecenv.make("cartpole", 1, "cpu")  # imports what the package and Python import when it is first needed
        "".encode("ascii")
        self.folder, self.canary = folder, folder / "canary"
        self.rules = folder / "named.cu"
        self.rules.write_text(RULES)
        Named.source = self.rules
        self.harmless = stripped(game_source(Named().layout))
        games = [GAMES[name]() for name in ("tag_gridworld", "tag_continuous", "pendulum")]
        self.bundled = {game.name(): stripped(game_source(game.layout)) for game in games}
        self.all = stripped(game_source(gpu_vecenv.configure("tag_continuous", num_neighbors="all").layout))
        self.kernel = stripped(inline_includes("int x;", "kernel.cu", None))

    def attempt(self, rng: random.Random) -> tuple[str, Attempt]:
        text = injection(rng, self.canary)
        ways = (
            self.as_name,
            self.as_key,
            self.as_value,
            self.as_declaration,
            self.as_argument,
            self.as_word,
            self.as_file,
        )
        way = rng.choice(ways)
        return way.__name__, way(rng, text)

    def as_name(self, rng: random.Random, text: str) -> Attempt:
        name = rng.choice([text, HostileStr(text), f"tag_gridworld{text}", f"gpu_vecenv/{text}-v0"])
        unknown = (UnknownGameError,)
        file = text.replace("\0", "").replace("\ud800", "")[:200]
        return rng.choice(
            [
                Refused(lambda: gpu_vecenv.make(name, 2, "cpu"), unknown),
                Refused(lambda: gpu_vecenv.configure(name), unknown),
                Refused(lambda: find_game(name), unknown),
                Refused(lambda: gpu_vecenv.GymnasiumVectorEnv(name, 2, "cpu"), unknown),
                Refused(lambda: gpu_vecenv.GymnasiumEnv(name), unknown),
                Refused(lambda: gpu_vecenv.ParallelEnv(name, "cpu"), unknown),
                Refused(lambda: gpu_vecenv.BatchedParallelEnv(name, 2, "cpu"), unknown),
                Refused(lambda: getattr(pettingzoo_env, str.__str__(name)), UnknownModuleError),
                Refused(lambda: load_game(f"{file}.py"), (UnknownGameError, OSError)),
                Refused(lambda: load_game(f"{file}.py:{file}"), (UnknownGameError, OSError)),
                Refused(lambda: game_class(text), (UnknownGameError, ConfigError, OSError)),
                Refused(lambda: new_game(f"{text};", self.folder / "new"), ConfigError),
            ]
        )

    def as_key(self, rng: random.Random, text: str) -> Attempt:
        key = rng.choice([text, f"grid{text}", f"__{MARK}__", f"{MARK}.__class__", f"grid = 5; {MARK}"])
        value = rng.choice([1, text, HostileInt(1)])
        kind = rng.choice([gpu_vecenv.configure, lambda game, **config: gpu_vecenv.make(game, 2, "cpu", **config)])
        game = rng.choice(["tag_gridworld", GAMES["tag_gridworld"](), Named])
        if rng.randrange(4) == 0:
            return Refused(lambda: gpu_vecenv.PPOConfig(**{key: value}), TypeError)
        return Refused(lambda: kind(game, **{key: value}), ConfigError)

    def as_value(self, rng: random.Random, text: str) -> Attempt:
        value = hostile(rng, text)
        if rng.randrange(3) == 0:
            key = rng.choice(["label", "label", "file", "labels", "level"])
            if key == "file":
                value = rng.choice([value, Path(text.replace("\0", ""))])
            if key == "labels":
                value = rng.choice([value, (text,), [HostileStr(text)], (text, HostileWord.ALL)])
            return Harmless(lambda: Named(**{key: value}), ConfigError, self.harmless)
        name = rng.choice(sorted(self.bundled))
        key = rng.choice([field.name for field in GAMES[name].own_fields()])
        if rng.randrange(5) == 0:
            return Refused(lambda: gpu_vecenv.PPOConfig(squash=value, activation=text), ConfigError)
        harmless = self.all if isinstance(value, str) and str.__str__(value) == "all" else self.bundled[name]
        return Harmless(lambda: gpu_vecenv.configure(name, **{key: value}), ConfigError, harmless)

    def as_declaration(self, rng: random.Random, text: str) -> Attempt:
        text += ";"  # else some are valid identifiers
        word: Any = rng.choice([text, HostileStr("place"), HostileStr(text), HostileWord.ALL, f"place{text}"])
        number = rng.choice([HostileInt(1), HostileFloat(1.0), HostileNumpy(1.0), HostileNumber.ONE, text, Pretender()])
        wrong = (EnvDefinitionError, ConfigError)
        declarations: list[Attempt] = [
            Refused(lambda: Field(word, f32), wrong),
            Refused(lambda: Field("place", text), wrong),
            Refused(lambda: game_with(state=(Field("place", f32, (text,)),))(), wrong),
            Refused(lambda: game_with(state=(Field("place", f32, (number,)),))(), wrong),
            Refused(lambda: game_with(roles=property(lambda self: {word: 1}))(), wrong),
            Refused(lambda: game_with(roles=property(lambda self: {"one": number}))(), wrong),
            Refused(lambda: game_with(derived=(text,))(), wrong),
            Refused(lambda: game_with(derived=(text,), **{text: 1})(), wrong),
            Refused(lambda: game_with(derived=("far",), far=number)(), wrong),
            Refused(lambda: game_with(obs_dim=number)(), wrong),
            Refused(lambda: gpu_vecenv.register(Named, word), wrong),
            Refused(lambda: gpu_vecenv.register(game_with(title=f"{text}/")), wrong),
            Refused(lambda: gpu_vecenv.register(game_with(version=f"{text}.")), wrong),
        ]
        return rng.choice(declarations)

    def as_argument(self, rng: random.Random, text: str) -> Attempt:
        value = rng.choice([hostile(rng, text), Pretender(), HostileInt(1), HostileNumber.ONE])
        known = set(inspect.signature(gpu_vecenv.VecEnv).parameters) - {"game", "num_envs", "arrays", "initial_states"}
        key = rng.choice(sorted(known))
        if isinstance(value, int) or (key in ("autoreset_mode", "validate") and isinstance(value, Pretender)):
            value = HostileStr("1")  # the others are converted to a plain number or mode
        wrong = (TypeError, ValueError, DeviceUnavailableError)
        return Refused(lambda: gpu_vecenv.VecEnv(Named(), 2, **{"device": "cpu", key: value}), wrong)

    def as_word(self, rng: random.Random, text: str) -> Attempt:
        """Lookups by name: spaces, roles, options, metrics."""
        env = gpu_vecenv.configure("tag_gridworld")
        return rng.choice(
            [
                Refused(lambda: gpu_vecenv.GymnasiumVectorEnv("cartpole", 2, "cpu", render_mode=text), Exception),
                Refused(lambda: env.layout.action.sizes[text], KeyError),
                Refused(
                    lambda: gpu_vecenv.load_policy(self.folder / text.replace("\0", "")[:100], device="cpu"), OSError
                ),
                Refused(lambda: gpu_vecenv.VecEnv(env, 2, text), DeviceUnavailableError),
            ]
        )

    def as_file(self, rng: random.Random, text: str) -> Attempt:
        """Names of files, which appear in #line directives."""
        name = re.sub(r"[/\0\ud800]", "", text)[:60] + ".cu"
        if rng.randrange(2):
            return Harmless(lambda: inline_includes("int x;", name, None), (), self.kernel)
        path = self.folder / name
        path.write_text(RULES)
        return Harmless(lambda: game_with(source=path)(), (), self.harmless)


RECORDER = """#!/bin/sh
case "$*" in *--version*) echo recorder 1; exit 0;; esac
folder=$(mktemp -d {records}/XXXXXX)
for argument; do printf '%s\\0' "$argument" >> "$folder/arguments"; source=$argument; done
cat -- "$source" > "$folder/source"
echo "kernel.cu:1: error: this compiler only records" >&2
exit 1
"""


def fuzz_injections(
    count: int, seed: int, compiled_every: int = 40, make_injector: Callable[[Path], Injector] = Injector
) -> tuple[list[str], collections.Counter[str]]:
    """Try injections: the failures, and the numbers of refused and accepted ones by kind."""
    failures: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    games = 0
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name).resolve()
        records, recorder = folder / "records", folder / "c++"
        records.mkdir()
        recorder.write_text(RECORDER.format(records=records))
        recorder.chmod(0o755)
        injector = make_injector(folder)
        before = sorted(GAMES), sorted(gymnasium.registry)
        for number in range(count):
            rng = random.Random(f"{seed}, {number}, injection")
            kind, attempt = injector.attempt(rng)
            with watching() as events:
                wrong, game = tried(attempt)
            if not wrong and events:
                wrong = f"meanwhile: {events[0]}"
            counts[f"{kind}, {'accepted' if game is not None else 'refused'}"] += 1
            if not wrong and isinstance(attempt, Harmless) and game is not None:
                wrong = source_problem(game, attempt.harmless)
                if not wrong and isinstance(game, Env):
                    games += 1
                    if games % compiled_every == 0:
                        counts["compiled"] += 1
                        wrong = compiler_problem(game, recorder, records, attempt.harmless)
            if injector.canary.exists():
                wrong = "a shell executed it"
                injector.canary.unlink()
            if wrong:
                failures.append(f"injection {number}, {kind}: {wrong}")
        if (sorted(GAMES), sorted(gymnasium.registry)) != before:
            failures.append("something was registered")
    return failures, counts


def tried(attempt: Attempt) -> tuple[str, Any]:
    """The problem with the outcome of an attempt, and its result if it was accepted."""
    try:
        result = attempt.call()
    except Exception as error:
        expected = isinstance(error, attempt.errors)
        return "" if expected else f"raised {type(error).__name__}, not {attempt.errors}: {str(error)[:200]!r}", None
    return (f"was not refused, it gave {type(result).__name__}", None) if isinstance(attempt, Refused) else ("", result)


def source_problem(given: Env | str, harmless: str) -> str:
    text = stripped(given if isinstance(given, str) else game_source(given.layout))
    if text == harmless:
        return ""
    return next(
        f"the device code differs: {line!r:.200}, not {other!r:.100}"
        for line, other in zip([*text.split("\n"), None], [*harmless.split("\n"), None], strict=False)
        if line != other
    )


def compiler_problem(game: Env, recorder: Path, records: Path, harmless: str) -> str:
    """Compile with a compiler that only records its arguments, and check them."""
    for old in records.iterdir():
        shutil.rmtree(old)
    before, os.environ["CXX"] = os.environ.get("CXX"), str(recorder)
    try:
        with watching() as events:
            FunctionManager("cpu").compile_game(game.layout)
        return "it was compiled without the recording compiler"
    except (KernelCompileError, EnvDefinitionError):
        pass
    except CompilerError as error:
        return f"{error}"
    finally:
        os.environ.pop("CXX")
        if before is not None:
            os.environ["CXX"] = before
    started = [event for event in events if not event.startswith("open")]
    if any(not event.startswith("subprocess.Popen") for event in started):
        return f"more than the compiler was run: {started}"
    (record,) = records.iterdir()
    arguments = (record / "arguments").read_bytes().decode().split("\0")[:-1]
    if any(MARK in argument for argument in arguments):
        return f"in the command line: {arguments}"
    if arguments[-3] != "-o" or cache_folder() not in Path(arguments[-2]).parents:
        return f"the compiler writes outside the cache: {arguments[-3:]}"
    source = (record / "source").read_text(encoding="utf-8")
    return "" if stripped(source) == harmless else f"the compiler read other source: {source[:200]!r}"


@dataclass(kw_only=True)
class Injections(Experiment):
    """Names, keys and values that look like code: each is refused or stays plain data."""

    count: int = 20_000
    """Injections."""

    def measure(self) -> Metrics:
        failures, counts = fuzz_injections(self.count, self.seed, make_injector=self.injector)
        self.failures += failures
        return {"injections": dict(sorted(counts.items()))}

    def injector(self, folder: Path) -> Injector:
        return Injector(folder)

    def plant(self) -> Metrics:
        return {fault: said(Planting(fault=fault)) for fault in PLANTED}


PLANTED = ("a refused name writes a file", "a refused name starts a program", "a name is accepted", "a value is code")


class Planted(Injector):
    """Its calls do what none may do."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(folder)
        self.fault = fault

    def attempt(self, rng: random.Random) -> tuple[str, Attempt]:
        def call() -> int:
            if self.fault == PLANTED[0]:
                (self.folder / "written").write_text("")
            elif self.fault == PLANTED[1]:
                subprocess.run(["true"], check=True)
            else:
                return 1
            raise UnknownGameError

        if self.fault == PLANTED[3]:
            return "planted", Harmless(lambda: self.kernel + "\nint evil;", (), self.kernel)
        return "planted", Refused(call, UnknownGameError)


@dataclass(kw_only=True)
class Planting(Injections):
    count: int = 1
    fault: str = PLANTED[0]

    def injector(self, folder: Path) -> Injector:
        return Planted(folder, self.fault)
