"""Damaged and foreign checkpoints: refused with a typed error, or, by rng, just what was saved; nothing runs."""

import copy
import hashlib
import io
import json
import os
import pickle
import random
import resource
import struct
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.checkpoint import FORMAT, load_checkpoint, save_checkpoint
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.trainer import Trainer
from reliability.experiment import Experiment, Metrics, said

GROWTH_LIMIT = 128 << 20  # bytes; the largest file has 1 MB, and a JSON parser needs some tens of bytes for each byte
WARM_UP = 100  # files, before memory is looked at
CONFIG = PPOConfig(total_steps=10**6, num_steps=4, num_epochs=1, num_minibatches=1, hidden_sizes=(8,))
State = tuple[dict[str, torch.Tensor], dict[str, Any]]


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@dataclass(kw_only=True)
class Damage(Experiment):
    """Load damaged, forged and foreign checkpoint files, all of them also into a living trainer."""

    count: int = 20_000
    """Files."""

    depends_on = ("gpu_vecenv/train/checkpoint.py", "gpu_vecenv/train/trainer.py")

    def measure(self) -> Metrics:
        torch.set_num_threads(1)
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other versions of libraries, which forged files claim
            return self._load_all(Path(folder))

    def _load_all(self, place: Path) -> Metrics:
        trainer = Trainer(gpu_vecenv.make("cartpole", 4, self.device, max_steps=9), CONFIG)
        trainer.train_iteration()
        trainer.save(place / "saved")
        saved, content = load_checkpoint(place / "saved"), (place / "saved").read_bytes()
        trainer.train_iteration()
        live = bits(trainer)
        sprung, path = place / "sprung", place / "damaged.safetensors"
        found = {"refused": 0, "the same": 0, "of another run": 0}
        slowest, peak = 0.0, 0
        for number in range(self.count):
            rng = random.Random(f"{self.seed} {number}")
            kind = rng.choice(KINDS)
            what = f"file {number}, {kind.__name__}"
            forged = kind(File(path, content, saved, sprung, rng))
            begin = time.perf_counter()
            try:
                tensors, manifest = self.load(path)
            except (CheckpointCorruptError, FileNotFoundError):
                result = "refused"
            except Exception as error:
                result = f"raised {error!r}"
            else:
                if same((tensors, manifest), saved):
                    result = "the same"
                else:  # what is signed anew is another save, which the trainer has to refuse
                    result = "of another run" if forged else "accepted with other content"
            self.check(result in found, f"{what}: {result}")
            found[result] = found.get(result, 0) + 1
            refused = result != "the same"
            try:
                trainer.load(path)
            except (CheckpointCorruptError, ConfigError, FileNotFoundError):
                self.check(refused, f"{what}: what was saved is refused by the trainer")
                self.check(equal_bits(bits(trainer), live), f"{what}: a refused file changed the trainer")
            except Exception as error:
                self.failures.append(f"{what}: the trainer raised {error!r}")
            else:
                loaded = bits(trainer)
                same_as_saved = all(equal_bits(loaded[name], tensor) for name, tensor in saved[0].items())
                self.check(not refused and same_as_saved, f"{what}: the trainer took it")
                trainer.load_state(*live_state(live, saved[1]), "the former state")
            slowest = max(slowest, time.perf_counter() - begin)
            clear(path)
            if number == WARM_UP:
                peak = most_memory()
        growth = most_memory() - peak if peak else 0
        self.check(growth < GROWTH_LIMIT, f"memory grew by {growth} bytes")
        self.check(not sprung.exists(), "a pickle was executed")
        pickle.loads(pickle.dumps(Trap(sprung)))
        self.check(sprung.is_dir(), "the trap is not live")
        trainer.close()
        return {
            "files": self.count,
            "refused": found["refused"],
            "by_chance_what_was_saved": found["the same"],
            "forged_and_refused_by_the_trainer": found["of another run"],
            "slowest_ms": round(slowest * 1000, 1),
            "memory_growth_mb": round(growth / 2**20, 1),
        }

    def load(self, path: Path) -> State:
        return load_checkpoint(path)

    def plant(self) -> Metrics:
        return {"digests that nobody compares": said(WithoutDigests(count=300, device=self.device))}


class WithoutDigests(Damage):
    def load(self, path: Path) -> State:
        try:
            return load_checkpoint(path)
        except CheckpointCorruptError as error:
            if "SHA-256" not in str(error):
                raise
            return {}, {}


# Ways to damage. Each writes a file, and returns whether it is signed anew: sound, but of something else.


@dataclass
class File:
    """What is damaged, and with which rng."""

    path: Path
    content: bytes
    saved: State
    sprung: Path
    rng: random.Random

    def parts(self) -> tuple[dict[str, Any], bytes]:
        """Header and data."""
        size = int.from_bytes(self.content[:8], "little")
        return json.loads(self.content[8 : 8 + size]), self.content[8 + size :]

    def write(self, header: bytes | str | Mapping[str, Any], data: bytes) -> bool:
        """A file with this header, which may be any bytes."""
        text = json.dumps(header) if isinstance(header, Mapping) else header
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self.path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        return False

    def forge(self, manifest: str) -> bool:
        """The tensors as they are, with another manifest and the right SHA-256 of it."""
        digest = hashlib.sha256(manifest.encode("utf-8", "surrogatepass")).hexdigest()
        header, data = self.parts()
        header["__metadata__"] |= {"manifest": manifest, "sha256": digest}
        return self.write(header, data)

    def tensor(self) -> str:
        return self.rng.choice(sorted(self.saved[0]))


def flipped_bits(file: File) -> bool:
    raw = bytearray(file.content)
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(file.rng.choice((1, 1, 2, 8))):
        raw[file.rng.randrange(file.rng.choice((8, header, len(raw))))] ^= 1 << file.rng.randrange(8)
    file.path.write_bytes(raw)
    return False


def truncated(file: File) -> bool:
    header = 8 + int.from_bytes(file.content[:8], "little")
    file.path.write_bytes(file.content[: file.rng.randrange(file.rng.choice((9, header, len(file.content))))])
    return False


def extended(file: File) -> bool:
    more = (b"\0" * 7, file.rng.randbytes(100), file.content, file.content[-64:])
    file.path.write_bytes(file.content + file.rng.choice(more))
    return False


def blocks_moved(file: File) -> bool:
    """A block of a disk is zero, stale, doubled, left out or in another's place."""
    size = file.rng.choice((16, 512, 4096))
    blocks = [file.content[at : at + size] for at in range(0, len(file.content), size)]
    one, other = file.rng.randrange(len(blocks)), file.rng.randrange(len(blocks))
    blocks[one] = file.rng.choice((bytes(len(blocks[one])), blocks[other], blocks[one] * 2, b""))
    file.path.write_bytes(b"".join(blocks))
    return False


def mutated(file: File) -> bool:
    raw = bytearray(file.content)
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(file.rng.randint(1, 3)):
        first, length = file.rng.randrange(file.rng.choice((8, header, len(raw)))), file.rng.randint(0, 12)
        other = file.rng.randrange(len(raw))
        pieces = (bytes(raw[other : other + length]), file.rng.randbytes(length), b"9" * length, b"", b"[{", b'","')
        piece = file.rng.choice(pieces)
        raw[first : first + file.rng.choice((length, len(piece)))] = piece
    file.path.write_bytes(raw)
    return False


def claimed_header(file: File) -> bool:
    size = int.from_bytes(file.content[:8], "little")
    sizes = (0, 1, size - 1, size + 1, len(file.content), 10**8, 10**8 + 1, 10**12, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
    file.path.write_bytes(file.rng.choice(sizes).to_bytes(8, "little") + file.content[8:])
    return False


def another_header(file: File) -> bool:
    """Offsets that overlap, leave holes or lie outside; shapes whose size overflows; other types."""
    header, data = file.parts()
    name, other = file.tensor(), file.tensor()
    entry = header[name]
    start, end = entry["data_offsets"]
    huge = file.rng.choice((2**31, 2**32, 2**62, 2**63, 2**64, 10**30))
    change: dict[str, Any] = file.rng.choice(
        (
            {"data_offsets": header[other]["data_offsets"]},
            {"data_offsets": [end, start]},
            {"data_offsets": [start, end + huge]},
            {"data_offsets": [start + 4, end + 4]},
            {"data_offsets": [-start - 1, end]},
            {"data_offsets": [start]},
            {"data_offsets": [start, start]},
            {"data_offsets": [0, len(data)]},
            {"shape": [huge, *entry["shape"]]},
            {"shape": [huge, huge]},
            {"shape": [0, *entry["shape"]]},
            {"shape": [-1]},
            {"shape": [1, *entry["shape"]]},
            {"shape": [*entry["shape"][::-1], 1]},
            {"shape": None},
            {"dtype": file.rng.choice(("F64", "F32", "I32", "BF16", "U8", "F8_E4M3", "Q4", "", None, 7, "f32"))},
            {"dtype": "BOOL", "shape": [end - start]},
            {"shape": [2**20] * 20},
        )
    )
    header[name] = {**entry, **change}
    return file.write(header, data)


def tensors_changed(file: File) -> bool:
    """Names left out, added, exchanged, doubled or pointing elsewhere, in the header only."""
    header, data = file.parts()
    name, other = file.tensor(), file.tensor()
    strange = ("../../weights", "/etc/passwd", "..\\x", "a\0b", "", "x" * 100_000, "\ud800", "__class__", "env/../x")
    way = file.rng.randrange(5)
    if way == 0:
        header[file.rng.choice(strange)] = header.pop(name)
    elif way == 1:
        del header[name]
    elif way == 2:
        header[name], header[other] = header[other], header[name]
    elif way == 3:
        header[file.rng.choice(strange)] = header[name]
    else:  # one name twice, or the metadata twice: which of both counts is up to the reader
        text = json.dumps(header)
        twice = file.rng.choice((name, "__metadata__"))
        instead = json.dumps(file.rng.choice((header[other], {}, {"format": FORMAT}, None)))
        first = file.rng.random() < 0.5
        pair = f'"{twice}": {instead}'
        return file.write(f"{{{pair}, {text[1:]}" if first else f"{text[:-1]}, {pair}}}", data)
    return file.write(header, data)


def strange_json(file: File) -> bool:
    """A header that is no JSON, or hardly."""
    header, data = file.parts()
    text, own_format = json.dumps(header), f'"format": "{FORMAT}"'
    return file.write(
        file.rng.choice(
            (
                "", "{}", "null", "[]", "0", "{", text + "}", text[:-1], text.replace('"', "'"), "\ufeff" + text,
                text.encode("utf-16"), b"\xff\xfe" + text.encode(), "[" * 100_000, '{"a":' * 100_000, text + "\0",
                text.replace("[", "[NaN,", 1), text.replace(":", ":1e999,", 1), " " * 10_000 + text, text + text,
                text.replace(own_format, '"format": "1"'), text.replace(own_format, f'"format": {FORMAT}'),
                text.replace('"__metadata__"', '"__meta__"'), text.replace("sha256", "sha255", 1),
            )
        ),
        data,
    )  # fmt: skip


def strange_manifest(file: File) -> bool:
    """A manifest with the right SHA-256, as whoever wants to do harm would write it."""
    header, _ = file.parts()
    text = header["__metadata__"]["manifest"]
    manifest = json.loads(text)
    digests, name = manifest["tensors"], file.tensor()
    fewer = {key: value for key, value in digests.items() if key != name}
    return file.forge(
        file.rng.choice(
            (
                "", "{", "null", "[]", '"text"', "{}", '{"tensors": null}', '{"tensors": {}}', text[:-1], text + text,
                text.replace("{", '{"x": NaN, ', 1), text.replace("{", '{"x": -Infinity, ', 1), "[" * 100_000,
                '{"a":' * 50_000 + "1" + "}" * 50_000, text.replace("{", '{"x": ' + "9" * 5000 + ", ", 1),
                json.dumps({**manifest, "tensors": fewer}), json.dumps({**manifest, "tensors": {**digests, "x": "y"}}),
                json.dumps({**manifest, "tensors": {**digests, name: digests[name].upper() + " "}}),
                json.dumps({**manifest, "tensors": {**digests, name: None}}),
                json.dumps({**manifest, "tensors": list(digests)}), text[:-1] + ', "tensors": {}}',
            )
        )
    )  # fmt: skip


def another_run(file: File) -> bool:
    """Sound files, which the trainer has to refuse: of another shape, type, game, or with numbers that are none."""
    tensors, manifest = {**file.saved[0]}, copy.deepcopy(file.saved[1])
    name = file.rng.choice(sorted(n for n in tensors if n.startswith("policy")))
    way = file.rng.randrange(8)
    if way == 0:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[file.rng.randrange(tensors[name].numel())] = float(
            file.rng.choice(("nan", "inf", "-inf"))
        )
    elif way == 1:
        tensors[name] = tensors[name].double()
    elif way == 2:
        tensors[name] = tensors[name].unsqueeze(0)
    elif way == 3:
        del tensors[name]
    elif way == 4:
        tensors[file.rng.choice(("../x", "env.more", "policy.more", "/tmp/x", "env." * 9))] = torch.ones(1)
    elif way == 5:
        manifest[file.rng.choice(("game", "num_envs", "seed", "config", "world_size"))] = "another"
    elif way == 6:
        manifest["game_config"]["max_steps"] = 10
    else:
        del manifest[file.rng.choice(("game", "config", "policies", "trained"))]
    save_checkpoint(file.path, tensors, manifest)
    return True


def foreign(file: File) -> bool:
    """What other programs write: pickles among it, which do something when they are loaded."""
    trap = Trap(file.sprung)
    buffer = io.BytesIO()
    way = file.rng.randrange(9)
    if way == 0:
        raw = pickle.dumps(trap, file.rng.randint(0, pickle.HIGHEST_PROTOCOL))
    elif way == 1:
        torch.save({**file.saved[0], "trap": trap}, buffer)
        raw = buffer.getvalue()
    elif way == 2:
        torch.save(trap, buffer, _use_new_zipfile_serialization=False)
        raw = buffer.getvalue()
    elif way == 3:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data.pkl", bytes(10**6))
        raw = buffer.getvalue()
    elif way == 4:
        raw = save(file.saved[0], file.rng.choice((None, {}, {"format": "pt"}, {"format": FORMAT}, {"format": "1"})))
    elif way == 5:
        raw = file.rng.randbytes(file.rng.randrange(2000))
    elif way == 6:
        raw = file.rng.choice((b"", b"\x7fELF", b"\x93NUMPY\x01\0", b"\x1f\x8b\x08", b"#!/bin/sh\n", b"\x89HDF\r\n"))
        raw += bytes(file.rng.randrange(100))
    elif way == 7:
        header, data = file.parts()
        header["__metadata__"]["manifest"] = pickle.dumps(trap, 0).decode("latin-1")
        return file.write(header, data)
    else:
        raw = struct.pack("<Q", 2) + b"{}" + pickle.dumps(trap)
    file.path.write_bytes(raw)
    return False


def no_file(file: File) -> bool:
    """A folder, a pipe, a device, a link to one of them or to nowhere."""
    way = file.rng.randrange(6)
    if way == 0:
        file.path.mkdir()
    elif way == 1:
        os.mkfifo(file.path)
    elif way < 5:
        file.path.symlink_to(("/dev/zero", "nowhere", file.path.name)[way - 2])
    return False


KINDS: tuple[Callable[[File], bool], ...] = (
    *(flipped_bits, flipped_bits, flipped_bits, truncated, extended, blocks_moved, mutated, mutated, claimed_header),
    *(another_header, another_header, tensors_changed, strange_json, strange_manifest, another_run, foreign, no_file),
)


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that the trainer's next iteration depends on, copied to the host."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in trainer.state()[0].items()}
    return {**state, "iteration": torch.tensor(trainer.iteration)}


def live_state(live: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> State:
    tensors = {name: tensor for name, tensor in live.items() if name != "iteration"}
    return tensors, {**manifest, "iteration": int(live["iteration"])}


def same(one: State, other: State) -> bool:
    return equal_bits(one[0], other[0]) and one[1] == other[1]


def most_memory() -> int:
    """The most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
