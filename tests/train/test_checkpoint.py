import contextlib
import errno
import hashlib
import json
import os
import pickle
import random
import resource
import signal
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from reliability.experiment import metrics_of
from safetensors.torch import load_file, save_file
from support.bitwise import equal_bits

from gpu_vecenv import load_policy
from gpu_vecenv.errors import CheckpointCorruptError, CheckpointVersionError, ConfigError
from gpu_vecenv.train.checkpoint import FORMAT, CheckpointFolder, load_checkpoint, save_checkpoint

TENSORS = {"a": torch.tensor([[1.5, -2.0], [3.0, 0.1]]), "b.c": torch.tensor([7, -8])}
MANIFEST = {"game": "tag", "seed": 2**64 - 1, "rate": 0.1, "sizes": [3, 4], "deep": {"none": None, "yes": True}}
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def raw(tensor):
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def random_bits(shape, dtype, seed=0):
    """All patterns of bits, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def refused(path, *errors):
    with pytest.raises(errors) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    """A small checkpoint."""
    save_checkpoint(tmp_path / "small", TENSORS, MANIFEST)
    return tmp_path / "small"


def forge(path, tensors, manifest, **metadata):
    """A file whose manifest has the right SHA-256, whatever the manifest is."""
    digest = hashlib.sha256(manifest.encode()).hexdigest()
    save_file(tensors, path, {"format": FORMAT, "manifest": manifest, "sha256": digest, **metadata})


def written_manifest(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["manifest"]


# What comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_bit_by_bit(dtype, device, tmp_path):
    whole = random_bits((6, 5, 4), dtype).to(device)
    tensors = {
        "whole": whole,
        "transposed": whole.permute(2, 0, 1),
        "every other": whole[::2, 1:, ::3],
        "expanded": whole[0, 0, 0].expand(3, 2),
        "scalar": whole[1, 2, 3],
        "empty": whole[:0],
        "row": whole[2],
        "again": whole,
    }
    path = tmp_path / "new" / "folder" / "tensors"
    save_checkpoint(path, tensors, {})
    found, manifest = load_checkpoint(path)
    assert equal_bits(found, tensors) and manifest == {}
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    assert os.listdir(path.parent) == [path.name]


def test_what_is_loaded_is_memory_of_its_own(path):
    tensors, _ = load_checkpoint(path)
    for tensor in tensors.values():
        tensor.zero_()
    assert equal_bits(load_checkpoint(path)[0], TENSORS)
    before = load_checkpoint(path)[0]
    path.write_bytes(b"")
    assert equal_bits(before, TENSORS)


def test_parameters_and_conjugates_are_stored_as_their_values(tmp_path):
    layer = torch.nn.Linear(3, 2)
    turned = torch.complex(torch.ones(4), torch.arange(4.0)).conj().imag  # negated when it is read
    save_checkpoint(tmp_path / "file", {**dict(layer.named_parameters()), "turned": turned}, {})
    found, _ = load_checkpoint(tmp_path / "file")
    assert found["weight"].equal(layer.weight) and not found["weight"].requires_grad
    assert found["turned"].tolist() == [0.0, -1.0, -2.0, -3.0]


@pytest.mark.parametrize("name", ["", "é\n\t\"\\'", "a" * 3000, "tensors", "../x"])
def test_any_name_of_a_tensor_comes_back(name, tmp_path):
    save_checkpoint(tmp_path / "file", {name: torch.ones(2)}, {})
    assert list(load_checkpoint(tmp_path / "file")[0]) == [name]


def test_a_manifest_comes_back(path):
    tensors, manifest = load_checkpoint(path)
    assert manifest == MANIFEST and equal_bits(tensors, TENSORS)
    save_checkpoint(path, {}, {})
    assert load_checkpoint(path) == ({}, {})


def test_a_checkpoint_is_plain_data(path):
    """Header and manifest are JSON that any reader understands, digests are those of the documents."""
    manifest = json.loads(written_manifest(path))
    assert {**manifest, "tensors": None} == {**MANIFEST, "tensors": None}
    content = b"torch.int64 (2,) " + TENSORS["b.c"].numpy().tobytes()
    assert manifest["tensors"]["b.c"] == hashlib.sha256(content).hexdigest()
    assert equal_bits(load_file(path), TENSORS)


def test_a_file_may_be_read_by_whom_the_process_allows(tmp_path):
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "file", TENSORS, MANIFEST)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_default_device_changes_nothing(tmp_path):
    tensors = {**TENSORS, "empty": TENSORS["a"][:0]}
    with torch.device("meta"):
        save_checkpoint(tmp_path / "file", tensors, {})
    assert equal_bits(load_checkpoint(tmp_path / "file")[0], tensors)


# What is not written

CIRCLE: dict[str, object] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    "manifest",
    [
        {"x": float("nan")}, {"x": [float("inf")]}, {"x": {"y": -float("inf")}}, {"x": object()}, {"x": {1, 2}},
        {(1, 2): 3}, {1: 2, "a": 3}, {"x": torch.ones(1)}, CIRCLE, {"tensors": {}},
    ],
)  # fmt: skip
def test_a_manifest_that_is_not_strict_json_is_refused(manifest, path):
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="the manifest"):
        save_checkpoint(path, TENSORS, manifest)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": [1.0]}, {"x": None}, {"x": torch.ones(2).to_sparse()}, {"x": torch.ones(2, device="meta")},
        {"x": torch.ones(2, dtype=torch.complex128)}, {1: torch.ones(2)}, {"__metadata__": torch.ones(2)},
        {"\ud800": torch.ones(2)},
    ],
)  # fmt: skip
def test_tensors_that_safetensors_has_no_word_for_are_refused(tensors, path):
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        save_checkpoint(path, tensors, {})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_manifest_that_readers_refuse_for_its_size_is_not_written(path):
    save_checkpoint(path, {}, {"x": '"' * 12_400_000})  # all of it is quoted once more in the header
    assert len(load_checkpoint(path)[1]["x"]) == 12_400_000
    with pytest.raises(ConfigError, match="at most 25000000"):
        save_checkpoint(path, {}, {"x": "y" * 25_000_000})
    assert len(load_checkpoint(path)[1]["x"]) == 12_400_000


# Damage


def outcome(path):
    """The type of the error, or that the very same content was loaded."""
    try:
        tensors, manifest = load_checkpoint(path)
    except CheckpointCorruptError as error:
        assert str(path) in str(error)
        return "refused"
    assert equal_bits(tensors, TENSORS) and manifest == MANIFEST
    return "the same"


def test_a_flipped_bit_is_always_found(path):
    """Every bit of the first 8 bytes, which hold a length, and one of each other byte."""
    content = path.read_bytes()
    loaded = []
    for bit in (*range(64), *(8 * place + place % 7 for place in range(8, len(content)))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            loaded += [bit] if outcome(path) == "the same" else []
        except Exception as error:
            raise AssertionError(f"bit {bit}, in {content[max(bit // 8 - 20, 0) : bit // 8 + 20]!r}") from error
    assert not loaded


def test_a_flipped_bit_names_what_is_damaged(path):
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    order = sorted(TENSORS, key=lambda name: content.index(raw(TENSORS[name]).numpy().tobytes(), data))
    places = {data: repr(order[0]), len(content) - 1: repr(order[1]), content.index(b"tag"): "manifest"}
    for place, word in places.items():
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        assert word in refused(path, CheckpointCorruptError)


def test_a_file_of_any_other_length_is_refused(path):
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refused(path, CheckpointCorruptError)
    for more in (b"\0", b" " * 8, content):
        path.write_bytes(content + more)
        refused(path, CheckpointCorruptError)


def test_mutated_files_are_refused_or_harmless(path, random_seed):
    content, draw = path.read_bytes(), random.Random(random_seed)
    header = 8 + int.from_bytes(content[:8], "little")
    found = dict.fromkeys(("refused", "the same"), 0)
    for _ in range(1000):
        mutated = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            first, length = draw.randrange(draw.choice((8, header, len(content)))), draw.randint(0, 12)
            other = draw.randrange(len(content))
            piece = draw.choice((content[other : other + length], draw.randbytes(length), b"9" * length, b"", b"[{"))
            mutated[first : first + draw.choice((length, len(piece)))] = piece
        path.write_bytes(mutated)
        found[outcome(path)] += 1
    assert found["refused"] > 800


@pytest.mark.parametrize("header", [2**63, 2**64 - 1, 10**8, 10**8 + 1, 10**12])
def test_a_header_that_claims_to_be_huge_is_refused(header, path):
    path.write_bytes(header.to_bytes(8, "little") + path.read_bytes()[8:])
    refused(path, CheckpointCorruptError)


def test_a_header_nested_without_end_is_refused(path):
    header = b'{"a":' + b"[" * 200_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(path, CheckpointCorruptError)


@pytest.mark.parametrize(
    "metadata",
    [
        None, {}, {"format": "1"}, {"format": "pt"}, {"format": FORMAT}, {"manifest": "{}"},
        {"format": FORMAT, "manifest": '{"tensors": {}}'},
        {"format": FORMAT, "manifest": '{"tensors": {}}', "sha256": ""},
    ],
)  # fmt: skip
def test_a_foreign_safetensors_file_is_refused(metadata, tmp_path):
    save_file(TENSORS, tmp_path / "foreign", metadata)
    refused(tmp_path / "foreign", CheckpointCorruptError)


@pytest.mark.parametrize(("version", "age"), [("1", "an older"), ("2", "an older"), (str(int(FORMAT) + 1), "a newer")])
def test_checkpoints_of_other_versions_are_refused_by_name(version, age, tmp_path):
    path = tmp_path / "iteration-00000001.safetensors"
    save_file(TENSORS, path, {"format": version})
    message = f"was written by {age} version of gpu_vecenv: its format is '{version}'; expected '{FORMAT}'"
    for load in (lambda: load_checkpoint(path), CheckpointFolder(tmp_path).load, lambda: load_policy(tmp_path)):
        with pytest.raises(CheckpointVersionError, match=message):
            load()


@pytest.mark.parametrize(
    "manifest",
    [
        "", "{", "[1]", "null", '"text"', "{}", '{"tensors": null}', '{"tensors": [[1, 2]]}', '{"tensors": "ab"}',
        '{"tensors": {}, "x": NaN}', '{"tensors": {}, "x": -Infinity}', '{"tensors": {}} {}', "[" * 200_000,
    ],
    ids=lambda manifest: manifest[:30],
)  # fmt: skip
def test_a_manifest_that_only_looks_sound_is_refused(manifest, tmp_path):
    forge(tmp_path / "forged", {}, manifest)
    assert "manifest" in refused(tmp_path / "forged", CheckpointCorruptError)


def test_a_missing_a_further_and_a_changed_tensor_are_named(path):
    manifest = written_manifest(path)
    forge(path, TENSORS, manifest)
    assert equal_bits(load_checkpoint(path)[0], TENSORS)  # the forgery itself is sound
    a, b = TENSORS["a"], TENSORS["b.c"]
    for tensors, name in [
        ({"a": a}, "b.c"),
        ({"a": a, "b.c": b, "more": a.clone()}, "more"),
        ({"a": a.reshape(4), "b.c": b}, "a"),
        ({"a": a.view(torch.int32), "b.c": b}, "a"),
        ({"a": a, "b.c": b.flip(0)}, "b.c"),
        ({"a": a, "d": b}, "b.c"),
    ]:
        forge(path, tensors, manifest)
        assert f"tensor {name!r}" in refused(path, CheckpointCorruptError)


# What is no checkpoint


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_is_refused_unread(tmp_path):
    sprung = tmp_path / "sprung"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps(Trap(sprung), protocol)
        for name in ("policy.pkl", "policy.PT", "policy.safetensors", "policy")[: 4 if protocol > 1 else 2]:
            (tmp_path / name).write_bytes(content)
            message = refused(tmp_path / name, CheckpointCorruptError)
            assert "never opened" in message and "safetensors.torch.save_file" in message
    torch.save({**TENSORS, "trap": Trap(sprung)}, tmp_path / "zip")
    assert "never opened" in refused(tmp_path / "zip", CheckpointCorruptError)
    assert not sprung.exists()
    pickle.loads(content)
    assert sprung.is_dir()  # the trap was live


def test_a_checkpoint_is_recognised_by_its_content(tmp_path):
    """A header of 640 bytes begins as a pickle does."""
    path = tmp_path / "policy.pt"
    save_checkpoint(path, {}, {"x": ""})
    manifest = {"x": "y" * (640 - int.from_bytes(path.read_bytes()[:8], "little"))}
    save_checkpoint(path, {}, manifest)
    assert path.read_bytes().startswith(b"\x80\x02")
    assert load_checkpoint(path) == ({}, manifest)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "dangling link", "name with a zero"])
def test_what_is_no_file_is_no_checkpoint(kind, tmp_path):
    path = Path("/dev/null") if kind == "device" else tmp_path / ("na\0me" if "zero" in kind else "name")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")

    def too_long(*_):
        raise AssertionError("waits for a writer")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)  # for a loader that would wait forever
    try:
        refused(path, FileNotFoundError)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Failures while saving


@contextlib.contextmanager
def read_only(folder):
    """Root may write everywhere, so it becomes another user for that time."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@contextlib.contextmanager
def full_disk(size):
    """Files may not grow beyond some bytes: a write fails in its middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("failure", ["read-only folder", 0, 1, 8, 1024, -1])
def test_a_failed_save_leaves_the_former_files(failure):
    with tempfile.TemporaryDirectory() as name:  # tmp_path lies below a folder that other users cannot enter
        folder = Path(name)
        folder.chmod(0o755)
        checkpoints = CheckpointFolder(folder, keep=1)
        first = checkpoints.save(1, {"a": torch.zeros(999)}, {}, best=True)
        before = {file: (folder / file).read_bytes() for file in sorted(os.listdir(folder))}
        assert list(before) == ["best.safetensors", first.name]
        size = len(before[first.name]) - 1 if failure == -1 else failure  # the last byte has no room
        refusal = read_only(folder) if failure == "read-only folder" else full_disk(size)
        with refusal:
            for save in (
                lambda: save_checkpoint(first, {"a": torch.ones(999)}, load_checkpoint(first)[1]),
                lambda: checkpoints.save(1, {"a": torch.ones(999)}, {}, best=True),
                lambda: checkpoints.save(2, {"a": torch.ones(999)}, {}, best=True),
            ):
                with pytest.raises(OSError) as caught:
                    save()
                assert caught.value.errno in (errno.EACCES, errno.EFBIG)
                assert {file: (folder / file).read_bytes() for file in sorted(os.listdir(folder))} == before
        checkpoints.save(2, {"a": torch.ones(999)}, {})
        assert sorted(os.listdir(folder)) == ["best.safetensors", "iteration-00000002.safetensors"]


def test_a_folder_in_the_place_of_the_file_is_left_alone(tmp_path):
    (tmp_path / "name").mkdir()
    with pytest.raises(OSError):
        save_checkpoint(tmp_path / "name", TENSORS, MANIFEST)
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_kill_while_saving_leaves_whole_files(what):
    metrics = metrics_of("saves", "--count", 20, "--what", what)
    assert metrics["kills"] >= 20 and metrics["hit_a_save"] >= 3 and metrics["failures"] == 0


# Folders


def fill(folder, iterations, *, ranks=1, **arguments):
    """Save iterations by all ranks; the tensors tell both."""
    folders = [CheckpointFolder(folder, rank=rank, world_size=ranks, **arguments) for rank in range(ranks)]
    for iteration in iterations:
        for rank, one in enumerate(folders):
            one.save(iteration, {"at": torch.tensor([iteration, rank])}, {"seed": rank})
    return folders


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_folder_keeps_the_newest_and_gives_back_what_was_saved(tmp_path):
    folder = CheckpointFolder(tmp_path / "run", keep=3)
    assert folder.iterations() == []
    for iteration in (0, 5, 7, 123, 10**8, 10**8 + 1):
        path = folder.save(iteration, {"at": torch.tensor(iteration)}, {"seed": 3})
        assert path == tmp_path / "run" / f"iteration-{iteration:08d}.safetensors"
    assert folder.iterations() == [123, 10**8, 10**8 + 1] and len(os.listdir(tmp_path / "run")) == 3
    for wanted, got in [(None, 10**8 + 1), (123, 123)]:
        tensors, manifest = folder.load(wanted)
        assert tensors["at"] == got and manifest == {"seed": 3, "iteration": got, "rank": 0, "world_size": 1}
    with pytest.raises(FileNotFoundError, match="iteration-00000007"):
        folder.load(7)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_so_many_files_of_each_rank_are_kept(keep, tmp_path):
    fill(tmp_path, range(8), ranks=3, keep=keep)[0].save(8, {}, {})  # the others have not saved yet
    kept = CheckpointFolder(tmp_path, world_size=3).iterations()
    assert kept == list(range(8 - keep, 8))
    fill(tmp_path, [8], ranks=3, keep=keep)
    last = CheckpointFolder(tmp_path, rank=2, keep=keep, world_size=3)
    assert last.iterations() == list(range(9 - keep, 9))
    assert len(list(tmp_path.glob("*.rank2.*"))) == keep
    assert len(list(tmp_path.glob("*00000008*"))) == 3


def test_a_rank_that_is_ahead_leaves_a_complete_iteration(tmp_path):
    ahead, behind = fill(tmp_path, [], ranks=2, keep=1)
    ahead.save(1, {}, {})
    ahead.save(2, {}, {})
    behind.save(1, {}, {})
    assert ahead.iterations() == behind.iterations() == [1]
    ahead.save(3, {}, {})
    assert behind.load(1)[1]["iteration"] == 1
    behind.save(2, {}, {})
    assert ahead.iterations() == [2]


def test_an_iteration_that_goes_back_is_not_removed_at_once(tmp_path):
    (folder,) = fill(tmp_path, [7, 8, 9], keep=2)
    assert folder.save(5, {}, {}).is_file()
    assert folder.iterations() == [5, 8, 9]


def test_only_files_of_the_folder_are_removed(tmp_path):
    others = [
        "iteration-00000000.rank1.safetensors", "iteration-00000000.rank0.safetensors", "iteration-0.safetensors",
        "iteration-000000000.safetensors", "iteration-00000000.safetensors.old", "policy.safetensors", "notes",
        "iteration-00000000.rank01.safetensors", "xiteration-00000000.safetensors",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).write_bytes(b"")
    (folder,) = fill(tmp_path, range(1, 5), keep=1)
    assert set(os.listdir(tmp_path)) == {*others, "iteration-00000004.safetensors"}
    assert folder.iterations() == [4]


def test_the_best_survives_until_the_next_best(tmp_path):
    folder, best = CheckpointFolder(tmp_path, keep=1), tmp_path / "best.safetensors"
    for iteration in range(9):
        folder.save(iteration, {"at": torch.tensor(iteration)}, {}, best=iteration in (2, 6))
        expected = None if iteration < 2 else 2 if iteration < 6 else 6
        if expected is None:
            assert not best.exists()
        else:
            tensors, manifest = load_checkpoint(best)
            assert tensors["at"] == expected == manifest["iteration"]
    assert sorted(os.listdir(tmp_path)) == ["best.safetensors", "iteration-00000008.safetensors"]
    folder.save(8, {"at": torch.tensor(80)}, {}, best=True)
    assert load_checkpoint(best)[0]["at"] == 80
    CheckpointFolder(tmp_path, rank=1, world_size=2).save(9, {"at": torch.tensor(9)}, {}, best=True)
    assert load_checkpoint(best)[0]["at"] == 80  # of rank 0 alone
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_all_ranks_go_back_to_the_newest_that_is_whole(broken, tmp_path):
    folders = fill(tmp_path, range(1, 5), ranks=3, keep=4)
    suffix = f".rank{broken}" if broken else ""
    flip_last_bit(tmp_path / f"iteration-00000004{suffix}.safetensors")
    (tmp_path / f"iteration-00000003{suffix}.safetensors").write_bytes(b"")
    for rank, folder in enumerate(folders):
        with pytest.warns(UserWarning) as caught:
            tensors, manifest = folder.load()
        assert tensors["at"].tolist() == [2, rank] and manifest["iteration"] == 2
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == 2 and all("iteration 2 is used instead" in message for message in messages)
        assert f"iteration-00000004{suffix}.safe" in messages[0] and f"iteration-00000003{suffix}.safe" in messages[1]
        with contextlib.nullcontext() if rank != broken else pytest.raises(CheckpointCorruptError):
            assert folder.load(4)[0]["at"].tolist() == [4, rank]


def test_whole_files_are_loaded_without_a_warning(tmp_path):
    folders = fill(tmp_path, range(3), ranks=2)
    flip_last_bit(tmp_path / "iteration-00000001.safetensors")  # not the newest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [folder.load()[0]["at"].tolist() for folder in folders] == [[2, 0], [2, 1]]


def test_an_iteration_that_some_rank_lacks_is_passed_over(tmp_path):
    folders = fill(tmp_path, [1, 2, 3], ranks=2)
    (tmp_path / "iteration-00000003.rank1.safetensors").unlink()
    (tmp_path / "iteration-00000002.safetensors").unlink()
    for folder in folders:
        assert folder.iterations() == [1]
        with pytest.warns(UserWarning, match="iteration 1 is used instead"):
            assert folder.newest() == 1
        for iteration in (2, 3):
            with pytest.raises(FileNotFoundError, match=f"iteration-0000000{iteration}|iteration {iteration}"):
                folder.load(iteration)


def test_a_folder_without_a_usable_checkpoint_says_so(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="there is none") as caught:
            CheckpointFolder(folder).load()
        assert str(folder) in str(caught.value)
    (folder,) = fill(tmp_path, [1, 2])
    for iteration in (1, 2):
        flip_last_bit(tmp_path / f"iteration-0000000{iteration}.safetensors")
    with pytest.raises(CheckpointCorruptError) as damaged:
        folder.load()
    assert all(text in str(damaged.value) for text in (str(tmp_path), "00000001", "00000002", "tensor 'at'"))


@pytest.mark.parametrize(("had", "has"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2)])
def test_another_number_of_processes_is_refused_with_what_to_do(had, has, tmp_path):
    fill(tmp_path, [1, 2], ranks=had)
    for rank in range(has):
        folder = CheckpointFolder(tmp_path, rank=rank, world_size=has)
        for iteration in (None, 2):
            with pytest.raises(ConfigError, match=rf"of {had} process\(es\).*--nproc-per-node={had}"):
                folder.load(iteration)


def test_a_file_under_another_name_is_refused(tmp_path):
    one, other = fill(tmp_path, [1], ranks=2)
    content = (tmp_path / "iteration-00000001.safetensors").read_bytes()
    (tmp_path / "iteration-00000001.rank1.safetensors").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="rank"):
        other.load(1)
    for name in ("iteration-00000002.safetensors", "iteration-00000002.rank1.safetensors"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="iteration"):
        one.load(2)


def test_drafts_of_killed_processes_are_cleaned(tmp_path):
    CheckpointFolder(tmp_path / "missing").clean()
    assert not (tmp_path / "missing").exists()
    folders = fill(tmp_path, [3], ranks=12)
    made = set(os.listdir(tmp_path))
    drafts = {
        0: {".iteration-00000003.safetensors.0123456789ab.draft", ".best.safetensors.0123456789ab.draft"},
        1: {".iteration-00000004.rank1.safetensors.0123456789ab.draft"},
        11: {".iteration-00000004.rank11.safetensors.0123456789ab.draft"},
    }
    others = {".policy.safetensors.0123456789ab.draft", "notes.draft", ".iteration-00000003.safetensors.draft"}
    for name in set().union(others, *drafts.values()):
        (tmp_path / name).write_bytes(b"half")
    for rank in (5, 1, 0, 11):
        folders[rank].clean()
        drafts.pop(rank, None)
        assert set(os.listdir(tmp_path)) == made.union(others, *drafts.values())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"keep": 0}, "keep"), ({"keep": -1}, "keep"), ({"keep": 1.5}, "keep"), ({"keep": True}, "keep"),
        ({"rank": -1}, "rank"), ({"rank": 1}, "rank"), ({"rank": 2, "world_size": 2}, "rank"),
        ({"world_size": 0}, "world_size"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(arguments, name, tmp_path):
    with pytest.raises(ConfigError, match=f"^{name} is"):
        CheckpointFolder(tmp_path, **arguments)


@pytest.mark.parametrize("iteration", [-1, 1.0, True, "1"])
def test_a_bad_iteration_is_refused(iteration, tmp_path):
    folder = CheckpointFolder(tmp_path)
    for call in (lambda: folder.save(iteration, {}, {}), lambda: folder.load(iteration)):
        with pytest.raises(ConfigError, match=r"^iteration is"):
            call()
    assert os.listdir(tmp_path) == []


def test_entries_of_the_folders_own_are_not_given_otherwise(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(4, {}, {"iteration": 4, "rank": 0})
    for entry in ({"iteration": 5}, {"rank": 1}, {"world_size": 2}):
        with pytest.raises(ConfigError, match="remove these entries"):
            folder.save(4, {}, entry)
    assert folder.load()[1] == {"iteration": 4, "rank": 0, "world_size": 1}
