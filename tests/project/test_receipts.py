"""Receipts: written atomically, stale after one changed byte, and refused if damaged."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import receipts
from receipts import REQUIRED, ReceiptError

MEMCHECK = {
    "what": "Every kernel under memcheck.",
    "command": "python tests/gpu/sanitize.py RESULTS",
    "metrics": {"errors": 0, "launches": 123, "summary": "ERROR SUMMARY: 0 errors"},
    "planted": {"write past the end": "ERROR SUMMARY: 1 error"},
    "python": ["gpu_vecenv/declare/*.py"],
    "device": "A GPU",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree of sources."""
    for folder in ("cuda/engine", "gpu_vecenv/declare", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cuda" / "game.cu").write_text("one\n")
    (tmp_path / "cuda" / "engine" / "kernel.cuh").write_text("two\n")
    (tmp_path / "gpu_vecenv" / "declare" / "env.py").write_text("three\n")
    (tmp_path / "docs" / "note.md").write_text("four\n")
    return tmp_path


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "receipts"


def written(root: Path, folder: Path, name: str = "memcheck", **changes) -> dict:
    receipts.write(name, **{**MEMCHECK, **changes}, folder=folder, root=root)
    return receipts.read(name, folder)


def test_a_receipt_has_the_run_and_its_sources(root, folder):
    receipt = written(root, folder)
    assert receipt.keys() == receipts.KINDS.keys()
    assert {key: receipt[key] for key in ("what", "command", "metrics", "planted", "device")} == {
        key: value for key, value in MEMCHECK.items() if key != "python"
    }
    assert list(receipt["sources"]) == ["cuda/engine/kernel.cuh", "cuda/game.cu", "gpu_vecenv/declare/env.py"]
    # printf 'one\n' | sha256sum
    assert receipt["sources"]["cuda/game.cu"] == "2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806"
    assert {"gpu_vecenv", "python", "torch", "compiler"} <= receipt["versions"].keys()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", receipt["date"])
    assert receipts.stale(receipt, root) == []
    assert [path.name for path in folder.iterdir()] == ["memcheck.json"], "a draft is left"


def test_one_changed_byte_makes_it_stale_until_it_is_written_again(root, folder):
    receipt = written(root, folder)
    (root / "docs" / "note.md").write_text("five\n")
    assert receipts.stale(receipt, root) == [], "not a source"
    (root / "cuda" / "game.cu").write_text("onE\n")
    assert receipts.stale(receipt, root) == ["cuda/game.cu"]
    (root / "gpu_vecenv" / "declare" / "env.py").write_text("three \n")
    assert receipts.stale(receipt, root) == ["cuda/game.cu", "gpu_vecenv/declare/env.py"]
    assert receipts.stale(written(root, folder), root) == []
    (root / "cuda" / "game.cu").write_text("one\n")
    (root / "gpu_vecenv" / "declare" / "env.py").write_text("three\n")
    assert receipts.stale(receipt, root) == [], "what it was"


def test_a_preset_of_a_game_is_no_source(root, folder):
    file = root / "gpu_vecenv" / "declare" / "env.py"
    text = "class Game:\n    mappo_preset = {\n        'gamma': 0.9,\n    }\n    limit: int = 5\n"
    file.write_text(text)
    receipt = written(root, folder)
    file.write_text(text.replace("0.9", "0.99"))
    assert receipts.stale(receipt, root) == []
    for other in (text.replace("5", "6"), text.replace("mappo_preset", "mappo"), text.replace("class Game", "if True")):
        file.write_text(other)
        assert receipts.stale(receipt, root) == ["gpu_vecenv/declare/env.py"]


def test_a_removed_or_new_file_makes_it_stale(root, folder):
    receipt = written(root, folder)
    (root / "cuda" / "engine" / "kernel.cuh").rename(root / "cuda" / "engine" / "words.cuh")
    assert receipts.stale(receipt, root) == ["cuda/engine/kernel.cuh", "cuda/engine/words.cuh"]
    (root / "cuda" / "engine" / "words.cuh").rename(root / "cuda" / "engine" / "kernel.cuh")
    (root / "gpu_vecenv" / "declare" / "env.py").unlink()
    assert receipts.stale(receipt, root) == ["gpu_vecenv/declare/env.py"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "../memcheck"}, "the name of a receipt is"),
        ({"name": "Mem check"}, "the name of a receipt is"),
        ({"planted": {}}, "nothing was planted"),
        ({"python": ["gpu_vecenv/nothing.py"]}, "matches no file"),
        ({"metrics": {}}, "metrics is"),
        ({"command": ""}, "command is"),
    ],
)
def test_a_receipt_without_evidence_is_not_written(root, folder, changes, words):
    with pytest.raises(ReceiptError, match=words):
        receipts.write(**{"name": "memcheck", **MEMCHECK, **changes}, folder=folder, root=root)
    assert not folder.exists() or list(folder.iterdir()) == []


def damaged(content: dict) -> list[bytes]:
    """Damaged versions of a receipt's file."""
    text = json.dumps(content).encode()
    without = {key: value for key, value in content.items() if key != "planted"}
    others = [
        without,
        {**content, "more": 1},
        {**content, "sources": {}},
        {**content, "sources": {"cuda/game.cu": "0"}},
        {**content, "sources": {"cuda/game.cu": None}},
        {**content, "planted": {}},
        {**content, "metrics": [1]},
        {**content, "date": 20260101},
        [content],
        None,
    ]
    cut = [b"", text[:-1], text[: len(text) // 2], b"\xff" + text, b"[" * 10**5]
    return cut + [json.dumps(other).encode() for other in others]


def test_a_damaged_receipt_is_refused(root, folder):
    content = written(root, folder)
    for damaged_content in damaged(content):
        (folder / "memcheck.json").write_bytes(damaged_content)
        with pytest.raises(ReceiptError, match=r"memcheck\.json"):
            receipts.read("memcheck", folder)
        (rows, lacking) = receipts.table(folder, root)
        assert rows[0][3].startswith("damaged: ") and "memcheck" in lacking
    (folder / "memcheck.json").write_text(json.dumps(content))
    assert receipts.read("memcheck", folder) == content


def command(root: Path, folder: Path, *more: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, receipts.__file__, "--root", str(root), "--folder", str(folder), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_command_prints_a_table_and_with_strict_fails(root, folder):
    code, said = command(root, folder)
    assert code == 0 and said.count("missing") == len(REQUIRED)
    assert command(root, folder, "--strict")[0] == 1
    for name in (*REQUIRED, "another"):
        written(root, folder, name)
    code, said = command(root, folder, "--strict")
    assert code == 0 and said.count("fresh") == len(REQUIRED) + 1 and "A GPU" in said

    (folder / "soak.json").unlink()
    code, said = command(root, folder, "--strict")
    assert code == 1 and re.search(r"^soak .*missing$", said, re.MULTILINE)
    assert said.endswith("1 of 8 required receipts are not fresh: soak\n")
    written(root, folder, "soak")
    (folder / "soak.json").write_text("{")
    code, said = command(root, folder, "--strict")
    assert code == 1 and "damaged: soak.json" in said

    written(root, folder, "soak")
    (folder / "another.json").write_text("{")
    assert command(root, folder, "--strict")[0] == 0, "not required"
    (root / "cuda" / "game.cu").write_text("other\n")
    assert command(root, folder)[0] == 0, "only printed"
    code, said = command(root, folder, "--strict")
    assert code == 1 and said.count("stale: cuda/game.cu\n") == len(REQUIRED)


def test_the_receipts_of_the_repository_are_valid():
    """They need not be fresh: freshness is checked before a release."""
    for path in receipts.FOLDER.glob("*.json"):
        assert receipts.read(path.stem) is not None
    assert "cuda/engine/step.cuh" in receipts.device_sources()
