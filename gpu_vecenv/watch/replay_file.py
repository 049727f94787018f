"""The replay file format: strict and small; reading a file runs no code and validates every size.

A file is a line that names the format, a header in one line of JSON, the compressed arrays, and the SHA-256 of all
before. The SHA-256 finds damage but not deliberate modification, so that no other check relies on it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu_vecenv._version import __version__
from gpu_vecenv.declare.field import C_TYPES, FIELD_NAME, boolean
from gpu_vecenv.errors import ReplayFormatError
from gpu_vecenv.files import replace_file

MAGIC, FORMAT = b"gpu_vecenv replay ", 3
SHA_BYTES = 32
HEADER_LIMIT, PAYLOAD_LIMIT = 1 << 16, 1 << 28  # bytes of the header, and of the arrays before compression
FILE_LIMIT = PAYLOAD_LIMIT + (1 << 20)
MAX_REPLAY_STEPS = 1_000_000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")  # a configuration key or a role
Array = np.ndarray[Any, Any]
ACTION_TYPES: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.float32)
}
FIELD_TYPES = {str(kind): np.dtype(str(kind)) for kind in C_TYPES}
# Keys of the header. The arrays are the actions, the step_digests and the shared fields by name.
KEYS = "game version config seed env_index actions shared end_on_nonfinite digest returns sources made_with".split()


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """One whole episode, from ``record`` or ``load``; ``play`` gives its states and outputs.

    Attributes:
        game: The game's registered name.
        version: Version of the game's rules.
        config: The game's configuration in JSON types.
        seed: Seed of the reset.
        env_index: Index of the environment, which selects its random streams.
        actions: (T, num_agents[, heads]) int32 >= 0, or (T, num_agents, n) float32; 0 for inactive agents.
        shared: Shared state fields whose values differ from those that the game declares.
        end_on_nonfinite: Argument of ``VecEnv``.
        step_digests: (T + 1,) uint32, the lower half of the digest after the reset and after each step.
        digest: 16 hexadecimal digits, of all actions, outputs and states.
        returns: Role -> mean return of its agents, None where that is not finite.
        sources: SHA-256 of the device code of the game and of the digest.
        made_with: Version of gpu_vecenv.

    Raises:
        ReplayFormatError: An attribute has a wrong type, shape or range.
    """

    game: str
    version: int
    config: Mapping[str, Any]
    seed: int
    env_index: int
    actions: Array = field(repr=False)
    shared: Mapping[str, Array] = field(default_factory=dict, repr=False)
    end_on_nonfinite: bool = False
    step_digests: Array = field(repr=False)
    digest: str
    returns: Mapping[str, float | None]
    sources: str = field(repr=False)
    made_with: str = __version__

    def __post_init__(self) -> None:
        _expect("game", self.game, _is_text(self.game, FIELD_NAME), "a registered name, [a-z][a-z0-9_]*")
        for name, most in (("version", 2**31), ("seed", 2**64), ("env_index", 2**63)):
            value = getattr(self, name)
            _expect(name, value, type(value) is int and 0 <= value < most, f"an int in [0, {most - 1}]")
        _expect("config", self.config, _is_named(self.config, _is_plain), "names with plain values")
        _expect("returns", self.returns, _is_named(self.returns, _is_return), "roles with finite numbers or null")
        _expect("end_on_nonfinite", self.end_on_nonfinite, type(self.end_on_nonfinite) is bool, "True or False")
        _expect("digest", self.digest, _is_text(self.digest, re.compile("[0-9a-f]{16}")), "16 hexadecimal digits")
        _expect("sources", self.sources, _is_text(self.sources, re.compile("[0-9a-f]{64}")), "64 hexadecimal digits")
        _expect("made_with", self.made_with, _is_text(self.made_with, re.compile(r"[0-9A-Za-z.+-]{1,64}")), "a version")
        kind = isinstance(self.actions, np.ndarray) and self.actions.dtype
        shape = np.shape(self.actions)
        _expect("the type of actions", kind, kind in (np.int32, np.float32), "an array of int32 or float32")
        fits = len(shape) in (2, 3) and all(shape) and shape[0] <= MAX_REPLAY_STEPS
        _expect("the shape of actions", shape, fits, f"(T, num_agents[, heads]), T <= {MAX_REPLAY_STEPS:,}")
        valid = np.isfinite(self.actions) if kind == np.float32 else self.actions >= 0
        _expect("the worst of actions", self.actions[~valid][:1], valid.all(), "finite numbers, and choices >= 0")
        got = (
            (len(self.step_digests), self.step_digests.dtype)
            if isinstance(self.step_digests, np.ndarray)
            else self.step_digests
        )
        _expect("step_digests", got, got == (shape[0] + 1, np.uint32), f"an array of {shape[0] + 1} uint32")
        _expect("shared", self.shared, isinstance(self.shared, Mapping), "names with arrays")
        for name, array in self.shared.items():
            _expect("a shared field's name", name, _is_text(name, FIELD_NAME), "[a-z][a-z0-9_]*")
            fits = isinstance(array, np.ndarray) and array.dtype in C_TYPES and array.ndim <= 16 and array.size > 0
            _expect(f"shared[{name!r}]", array, fits, f"an array of {', '.join(FIELD_TYPES)}")
        size = sum(array.nbytes for array in (self.actions, self.step_digests, *self.shared.values()))
        _expect("the size of all arrays", size, size <= PAYLOAD_LIMIT, f"at most {PAYLOAD_LIMIT:,} bytes")
        object.__setattr__(self, "actions", _read_only_copy(self.actions))
        object.__setattr__(self, "step_digests", _read_only_copy(self.step_digests))
        object.__setattr__(self, "shared", {name: _read_only_copy(array) for name, array in self.shared.items()})
        object.__setattr__(self, "config", json.loads(json.dumps(self.config)))  # tuples become lists
        object.__setattr__(self, "returns", dict(self.returns))

    @property
    def num_steps(self) -> int:
        """T, the length of the episode."""
        return len(self.actions)

    def header(self) -> dict[str, Any]:
        """The header: all attributes, with the arrays replaced by dtype and shape."""
        header = {key: getattr(self, key) for key in KEYS}
        shared = {name: _spec(array) for name, array in self.shared.items()}
        return {**header, "actions": _spec(_narrow(self.actions)), "shared": shared}

    def to_bytes(self) -> bytes:
        """The content of the file."""
        header = _canonical(self.header())
        _expect(
            "the length of the header", len(header), len(header) < HEADER_LIMIT, f"less than {HEADER_LIMIT:,} bytes"
        )
        arrays = [_narrow(self.actions), self.step_digests, *(self.shared[name] for name in sorted(self.shared))]
        payload = zlib.compress(b"".join(map(_planes, arrays)), 9)
        body = MAGIC + b"%d\n" % FORMAT + header + b"\n" + payload
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> Replay:
        """Read the content of a file. Sizes are validated before memory is allocated; no code is run.

        Raises:
            ReplayFormatError: It is not a replay of this format, or damaged.
        """
        first = content[: len(MAGIC) + 12].split(b"\n")[0]
        _expect("its first line", first, first.startswith(MAGIC), f"{MAGIC.decode()}{FORMAT}")
        _check_format(first[len(MAGIC) :])
        body, sha = content[:-SHA_BYTES], content[-SHA_BYTES:]
        if hashlib.sha256(body).digest() != sha:
            raise ReplayFormatError("its SHA-256 does not match its content: it is damaged or truncated")
        start = len(first) + 1
        end = body.find(b"\n", start, start + HEADER_LIMIT)
        _expect("the end of its header", end, end >= 0, f"a line end within {HEADER_LIMIT:,} bytes")
        header = _parsed(body[start:end])
        specs = {"actions": _sizes("actions", header["actions"], ACTION_TYPES)}
        steps = specs["actions"][1][0]
        specs["step_digests"] = np.dtype(np.uint32), (steps + 1,)
        for name in sorted(header["shared"]):
            specs[f"shared {name}"] = _sizes(f"shared[{name!r}]", header["shared"][name], FIELD_TYPES)
        lengths = [kind.itemsize * math.prod(shape) for kind, shape in specs.values()]
        size = 4 * math.prod(specs["actions"][1]) + sum(lengths[1:])  # discrete actions are read as int32
        _expect("the size of all arrays", size, size <= PAYLOAD_LIMIT, f"at most {PAYLOAD_LIMIT:,} bytes")
        payload = _decompressed(body[end + 1 :], sum(lengths))
        offsets = itertools.accumulate(lengths, initial=0)
        arrays = {
            name: _unplaned(name, payload[offset : offset + length], *spec)
            for (name, spec), offset, length in zip(specs.items(), offsets, lengths, strict=False)
        }
        actions, step_digests = arrays.pop("actions"), arrays.pop("step_digests")
        if actions.dtype.kind == "u":
            largest = int(actions.max())
            _expect("the largest action", largest, largest < 2**31, "an int32")
            actions = actions.astype(np.int32)
        shared = {name.removeprefix("shared "): array for name, array in arrays.items()}
        return cls(**{**header, "actions": actions, "step_digests": step_digests, "shared": shared})

    def save(self, path: str | Path) -> Path:
        """Write the file atomically; an existing file is replaced.

        Raises:
            OSError: Writing failed; an existing file is unchanged.
        """
        replace_file(Path(path), self.to_bytes())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Replay:
        """Read a file. It contains a game's name and numbers, and no code.

        Raises:
            FileNotFoundError: There is no such file, or it is a folder, pipe or device.
            ReplayFormatError: It is not a replay of this format, or damaged.
        """
        path = Path(path)
        if not path.is_file():  # opening a pipe would wait for its writer
            raise FileNotFoundError(f"no replay at {path}; expected a file")
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                _expect("its size", size, size <= FILE_LIMIT, f"at most {FILE_LIMIT:,} bytes")
                content = file.read(size)
            return cls.from_bytes(content)
        except ReplayFormatError as error:
            raise ReplayFormatError(f"{path} is not a replay of this format, or damaged: {error}") from error


def _expect(what: str, value: Any, fits: Any, expected: str) -> None:
    if not fits:
        raise ReplayFormatError(f"{what} is {value!r:.100}; expected {expected}")


def _check_format(given: bytes) -> None:
    if given == b"%d" % FORMAT:
        return
    older = given.isdigit() and len(given) < 5 and int(given) < FORMAT
    raise ReplayFormatError(
        f"its format is {given.decode('ascii', 'replace')!r:.100}; expected {FORMAT}: "
        + ("it is of an older gpu_vecenv, record the episode again" if older else "update gpu_vecenv to read it")
    )


def _read_only_copy(array: Array) -> Array:
    """A read-only copy."""
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def _is_text(value: Any, form: re.Pattern[str]) -> bool:
    return type(value) is str and form.fullmatch(value) is not None


def _is_named(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, Mapping) and all(_is_text(name, NAME) and fits(value) for name, value in values.items())


def _is_plain(value: Any, depth: int = 4) -> bool:
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    number = (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))
    text = type(value) is str and len(value) <= 1000 and value.replace("\n", "").isprintable()
    return value is None or type(value) is bool or number or text


def _is_return(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))


def _canonical(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse the header; its keys, and its form as ``_canonical`` writes it, are validated."""
    try:
        header = json.loads(line)
        same = _canonical(header) == line
    except (ValueError, RecursionError) as error:
        raise ReplayFormatError(f"its header {line!r:.100} is not strict JSON: {error}") from error
    _expect("its header", line, same, "one JSON object, each key once and in order, without spaces")
    _expect("its header", line, type(header) is dict, "a JSON object")
    odd = sorted(header.keys() ^ set(KEYS))
    _expect("the difference of its header's keys", odd, not odd, f"none, exactly {', '.join(KEYS)}")
    _expect("shared", header["shared"], type(header["shared"]) is dict, "an object of arrays")
    return dict(header)


def _spec(array: Array) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape)}


def _sizes(name: str, spec: Any, kinds: Mapping[str, np.dtype[Any]]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of an array from the header."""
    _expect(name, spec, type(spec) is dict and spec.keys() == {"dtype", "shape"}, "an object of dtype and shape")
    kind, shape = spec["dtype"], spec["shape"]
    _expect(f"the dtype of {name}", kind, type(kind) is str and kind in kinds, f"one of {', '.join(kinds)}")
    counts = type(shape) is list and len(shape) <= 16 and all(type(n) is int and n > 0 for n in shape)
    _expect(f"the shape of {name}", shape, counts and (shape or name != "actions"), "counts, at most 16")
    return kinds[kind], tuple(shape)


def _narrow(actions: Array) -> Array:
    """Discrete actions in the smallest unsigned type that holds them."""
    return actions if actions.dtype == np.float32 else actions.astype(np.min_scalar_type(int(actions.max())))


def _planes(array: Array) -> bytes:
    """Bytes in the order that compresses best: steps vary fastest, byte 0 of all numbers before byte 1."""
    return np.ascontiguousarray(np.ascontiguousarray(array)[..., None].view(np.uint8).transpose()).tobytes()


def _unplaned(name: str, content: bytes, kind: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    planes = np.frombuffer(content, np.uint8).reshape((kind.itemsize, *shape[::-1]))
    _expect(name, "other than 0 and 1", kind != boolean or planes.max() <= 1, "bools")
    array: Array = np.ascontiguousarray(planes.transpose()).view(kind)[..., 0]
    return array


def _decompressed(payload: bytes, size: int) -> bytes:
    """Decompress to exactly ``size`` bytes, and never allocate more."""
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(payload, size + 1)
    except zlib.error as error:
        raise ReplayFormatError(f"its arrays cannot be decompressed: {error}") from error
    whole = len(content) == size and decompressor.eof and not decompressor.unused_data
    _expect("the length of its arrays", len(content), whole, f"{size} bytes, and no data after them")
    return content
