"""The documents do not lie: their code and commands run, and what they name exists."""

import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from games.crew import Crew
from support.cases import mostly_exhaustive
from support.shared import made_once
from support.warm_process import run_python

import gpu_vecenv
from gpu_vecenv.absent import OF_PACKAGE, OF_VEC_ENV
from gpu_vecenv.cli.main import COMMANDS
from gpu_vecenv.compile import function_manager
from gpu_vecenv.envs.registry import GAMES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import performance  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"\A(?:#|//) (\w+\.\w+)$", re.MULTILINE)  # a first line that names the file a block is
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"\w[\w.-]*(/[\w.-]+)*(/|\.(py|cu|cuh|md|toml|yml|cff))")
NOT_HERE = {
    "cartpole.yml",
    "src/main.py",
    "tuples_of_agents.py",
    "walk.py",
    "walk.cu",
    "my_game.py",
    "my_game.cu",
    "foragers.py",
    "foragers.cu",
    "test_my_game.py",
}  # made by the reader
SMALL = "--total-steps 64 --num-steps 4 --num-envs 4 --num-minibatches 4 --episodes 4 --device cpu".split()


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block in exactly this language."""
    return [(name, body) for name, text in TEXTS.items() for kind, body in FENCE.findall(text) if kind == language]


def inline(text: str) -> list[str]:
    return INLINE.findall(FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def commands() -> list[str]:
    """Every gpu-vecenv command of the documents, once, whatever the name of its run; not those without their game.

    Nor those that serve until Ctrl-C, or print completions: tests/web/test_training_server.py and tests/cli/test_cli.py
    have them.
    """
    lines = [line for _, body in blocks("sh") for line in body.splitlines()]
    spans = [span for text in TEXTS.values() for span in inline(text)]
    bare = re.compile(
        r"gpu-vecenv (?!(train|evaluate|exploit|crossplay|plot|replay|show|bench|check|new)$)(?!.* --watch$)(?!-)"
    )
    found = [line for line in [*lines, *spans] if bare.match(line)]
    return list({re.sub(r"\bruns/(tag|first|six)\b", "runs/…", line): line for line in reversed(found)}.values())


def files(*documents: str) -> dict[str, str]:
    """Name -> text of the blocks of these documents that say which file they are."""
    found = [
        (FILE_NAME.match(text), text)
        for language in ("python", "cuda")
        for where, text in blocks(language)
        if where in documents
    ]
    return {name[1]: text for name, text in found if name}


FILES = files(*TEXTS)
COMMAND_LINES = commands()
BUNDLED = tuple(GAMES)  # other tests of this process register games of their own


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, folder=folder)


def test_the_documents_have_what_is_tested_here() -> None:
    assert len(blocks("python")) >= 9
    assert len(commands()) >= 5
    assert any("make train" in body and "make test" in body for _, body in blocks("sh"))


def test_only_the_predecessors_code_is_skipped() -> None:
    kinds = {(name, kind) for name, text in TEXTS.items() for kind, _ in FENCE.findall(text)}
    # A diff is of a file that gpu-vecenv new writes; tests/cli/test_own_game.py applies it. tests/clients runs the code
    # of docs/clients.md, which needs libraries; tests/compile/test_webassembly.py runs that of docs/web.md.
    assert {kind.partition("my_game")[0] for _, kind in kinds} <= {
        "python",
        "python skip",
        "python client",
        "yaml client",
        "sh",
        "bibtex",
        "cuda",
        "js",
        "diff ",
        "diff test_",
    }
    assert {name for name, kind in kinds if "skip" in kind} <= {"docs/coming_from_warpdrive.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("document", "code"), [pytest.param(*block, id=f"{block[0]}-{i}") for i, block in enumerate(blocks("python"))]
)
def test_python_blocks_run(document: str, code: str, made_before: Path, tmp_path: Path) -> None:
    if "onnxruntime" in code:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
        exported = ["export", made_before / "run", "--format", "onnx", "--out", "tagger_files"]
        assert run(tmp_path, "-m", "gpu_vecenv.cli", *map(str, exported)).returncode == 0
    for name, text in {**FILES, **files(document)}.items():  # that of its own page where several pages have the file
        (tmp_path / name).write_text(text)
    name = FILE_NAME.match(code)
    script = tmp_path / (name[1] if name else "block.py")
    code = re.sub(r"(total_(?:time)?steps)=[\d_]+", r"\1=1", code)
    few = r'\1, steps=10, checks=["K01", "K10", "K20"])'  # all take a minute
    script.write_text(re.sub(r"(check_vector_env\(.*), steps=\d+\)", few, code))
    done = run(tmp_path, script.name)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def made_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small runs, replays, and games of one's own: what earlier commands have left behind."""

    def make(folder: Path) -> None:
        assert run(folder, "-m", "gpu_vecenv.cli", "train", "tag_gridworld", *SMALL, "--out", "run").returncode == 0
        record = ["replay", "record", "tag_gridworld", "--seed", "1", "--device", "cpu"]
        assert run(folder, "-m", "gpu_vecenv.cli", *record).returncode == 0
        (folder / "game").mkdir()
        assert run(folder / "game", "-m", "gpu_vecenv.cli", "new", "my_game").returncode == 0
        for name, text in files("docs/write_a_game.md").items():
            (folder / name).write_text(text)
        for game, name in (("foragers.py", "foragers"), ("connect_four", "four"), ("connect_four", "four-snapshots")):
            assert run(folder, "-m", "gpu_vecenv.cli", "train", game, *SMALL, "--out", name).returncode == 0
        record_trained = ["replay", "record", "foragers", "--out", "trained", "--device", "cpu"]
        assert run(folder, "-m", "gpu_vecenv.cli", *record_trained).returncode == 0

    return made_once(tmp_path_factory, "made_before", make)


# tests/bench/test_bench.py measures interfaces without repetitions.
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", mostly_exhaustive(COMMAND_LINES, [c for c in COMMAND_LINES if "--interface" not in c])
)
def test_commands_run(command: str, made_before: Path, tmp_path: Path) -> None:
    _, verb, *arguments = shlex.split(command)
    assert verb in COMMANDS
    if "onnx" in arguments:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    helps, resumes = "--help" in arguments, "--resume" in arguments
    takes_runs = resumes or verb in ("crossplay", "evaluate", "exploit", "export", "plot", "replay", "show", "web")
    for old in re.findall(r"\bruns?/[\w-]+", " ".join(arguments)) if takes_runs else ():
        own = made_before / Path(old).name  # the run of a game that a page writes
        shutil.copytree(own if own.is_dir() else made_before / "run", tmp_path / old)
    takes_replays = verb == "web" or (verb == "replay" and arguments[0] != "record")
    for old in ("replays", "trained") if takes_replays else ():
        shutil.copytree(made_before / old, tmp_path / old)
    if verb == "train" and not helps and not resumes:
        arguments += [*SMALL, "--out", "run"]
    if verb == "evaluate" and not helps:
        arguments += ["--episodes", "4", "--device", "cpu"]
    if verb == "crossplay" and not helps:
        arguments += ["--episodes", "4", "--device", "cpu"]
    if verb == "exploit" and not helps:
        arguments += ["--total-steps", "64", "--episodes", "4", "--device", "cpu"]
    if verb == "check" and "--help" not in arguments:
        arguments += ["--steps", "30", "--checks", "K01,K10"]  # tests/cli/test_cli.py runs nearly all on a new game
    if verb == "bench":
        arguments = ["2" if before == "--num-envs" else word for before, word in pairwise(["", *arguments])]
    for folder in ("examples", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    if any(argument in FILES for argument in arguments):
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
    if any(argument.startswith("my_game.py") for argument in arguments):
        shutil.copytree(made_before / "game", tmp_path, dirs_exist_ok=True)
    if "--compare" in arguments:
        earlier = ["--json" if word == "--compare" else word for word in arguments]
        assert run(tmp_path, "-m", "gpu_vecenv.cli", verb, *earlier).returncode == 0
    done = run(tmp_path, "-m", "gpu_vecenv.cli", verb, *arguments)
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()
    # doctor's exit code depends on the machine, that of check on an environment of another library.
    finds = verb == "doctor" or (verb == "check" and ":" in arguments[0])
    assert done.returncode in ((0, 1) if finds else (0,)), done.stderr
    if verb == "train" and not helps and not resumes:
        first = "run/seed-0" if "--seeds" in arguments else "run"
        assert {"checkpoints", "evaluation.json", "metrics.csv"} <= set(os.listdir(tmp_path / first))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for _, body in blocks("sh") for line in body.splitlines()]
    lines += [span for text in TEXTS.values() for span in inline(text)]
    named = {target for line in lines for target in re.findall(r"^make ([a-z-]+)", line)}
    assert {"train", "test"} <= named <= targets


@pytest.mark.parametrize("document", TEXTS)
def test_paths_exist(document: str) -> None:
    named = {span for span in inline(TEXTS[document]) if PATH.fullmatch(span)} - NOT_HERE
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("document", TEXTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in LINK.findall(FENCE.sub("", TEXTS[document])):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (ROOT / document).parent / path if path else ROOT / document
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


def test_the_readme_is_short_and_its_pictures_are_here() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 110
    linked = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    files = [ROOT / target.partition("#")[0] for target in linked]
    assert len(linked) > 20 and all(file.is_file() for file in files), linked
    films = {file.stem: file.stat().st_size for file in (ROOT / "docs" / "films").glob("*.gif")}
    assert films["front"] < 2_000_000 and all(size < 500_000 for size in films.values())
    assert {name for name in BUNDLED if name not in films} == set(), "python docs/films.py RUNS"


def test_no_page_names_an_address_that_the_project_lacks() -> None:
    addresses = script("addresses")
    for text in TEXTS.values():  # of another project's repository is another name before the slash
        own = set(re.findall(r"https?://[^\s)\"']*gpu_?-?vecenv[^\s)\"']*", text))
        assert all(address.startswith((addresses.REPOSITORY or " ", addresses.SITE or " ")) for address in own), own


def test_badges_say_what_the_project_says() -> None:
    badges = script("badges")
    for name, texts in badges.badges().items():
        assert badges.badge(*texts) == (ROOT / "docs" / "_static" / f"badge-{name}.svg").read_text()
        assert f"docs/_static/badge-{name}.svg" in TEXTS["README.md"]
    assert badges.badges()["python"][1] in TEXTS["README.md"]


def script(name: str) -> Any:
    """A module beside the documentation."""
    namespace: dict[str, Any] = {"__file__": str(ROOT / "docs" / f"{name}.py"), "__name__": name}
    exec((ROOT / "docs" / f"{name}.py").read_text(), namespace)
    return SimpleNamespace(**namespace)


def test_names_exist() -> None:
    public = SimpleNamespace(**vars(gpu_vecenv), Program=function_manager.Program)
    views = [
        gpu_vecenv.make("tag_gridworld", 1, "cpu"),
        gpu_vecenv.make(Crew, 1, "cpu"),
        gpu_vecenv.GymnasiumVectorEnv("tag_gridworld", 1, "cpu"),
        gpu_vecenv.parallel_env("tag_gridworld", "cpu"),
        gpu_vecenv.batched_parallel_env("tag_gridworld", 1, "cpu"),
    ]
    unknown = []
    for document, text in TEXTS.items():
        for span in re.findall(r"`[^`\n]+`", text):
            for owner, name in re.findall(r"\b([A-Z]\w+)\.(\w+)", span):
                kind = getattr(public, owner, None)
                if kind is not None and not hasattr(kind, name) and name not in vars(kind).get("__annotations__", {}):
                    unknown.append(f"{document}: {owner}.{name}")
            for name in re.findall(r"\bgpu_vecenv\.(\w+)", span):
                if not hasattr(gpu_vecenv, name) and name not in OF_PACKAGE:  # names of others that errors explain
                    try:
                        importlib.import_module(f"gpu_vecenv.{name}")
                    except ImportError:
                        unknown.append(f"{document}: gpu_vecenv.{name}")
            for name in re.findall(r"(?<![\w/])env\.(\w+)", span):
                if not any(hasattr(env, name) for env in views) and name not in OF_VEC_ENV:
                    unknown.append(f"{document}: env.{name}")
    assert not unknown


def metrics(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "docs" / "performance" / file).read_text())["rows"]


def test_the_claims_of_the_front_pages_are_measured() -> None:
    steps = performance.steps_of(performance.read(performance.SECTIONS["steps"])["h200"])

    def rate(game: str, num_envs: int, num_agents: int) -> float:
        rows = steps[game, num_envs, num_agents].values()
        return max(row["sample_and_step_env_steps_per_s"] for row in rows)

    trained: dict[str, list[float]] = {}
    for row in metrics("h200-train-examples.json"):
        trained.setdefault(row["example"], []).append(row["agent_steps_per_s"] / 1e6)
    carts = f"{rate('cartpole', 1_000_000, 1) / 1e9:.1f} G env-steps/s"
    readme, landing, reliability = TEXTS["README.md"], TEXTS["docs/index.md"], TEXTS["docs/reliability.md"]
    assert carts in readme and carts in landing
    assert f"{rate('tag_continuous', 100, 10_000) * 10_000 / 1e6:.0f} M agent-steps/s" in readme
    assert f"makes {statistics.median(trained['torchrl_mappo']):.2f} M agent-steps/s" in readme
    assert f"skrl's {statistics.median(trained['skrl_mappo']):.2f} M" in readme
    adapters = TEXTS["docs/adapters.md"]
    steps_us = [row["vec_env_step_us"] for row in metrics("h200-interfaces.json")]
    assert f"the {min(steps_us):.0f} to {max(steps_us):.0f} of `VecEnv.step`" in adapters
    numpy_rows = metrics("cpu-interfaces-numpy.json")
    copies = [row["interface_us"] / 1e3 for row in numpy_rows if row["interface"] == "supersuit"]
    assert f"vector took {min(copies):.0f} to {max(copies):.0f} ms for 64 environments" in adapters
    on_gpus = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) million agent-steps of an H", reliability)]
    assert f"{sum(on_gpus):,} million agent-steps" in readme and f"{sum(on_gpus):,} million agent-steps" in landing
    assert "120 million of them by WebAssembly" in readme and "120 million agent-steps, 0 differ" in reliability
    table = adapters.partition("\n\n| library |")[2].partition("\n\n")[0]
    libraries = re.findall(r"^\| ([\w-]+(?: Lightning)?) \|", table, re.MULTILINE)
    without_learners = {"SuperSuit", "PyTorch Lightning"}  # they wrap, or train with this library's PPO
    assert len(set(libraries) - without_learners) == 10
    assert "Ten RL libraries" in readme and "10 RL libraries" in landing


@pytest.mark.parametrize("game", GAMES)
def test_parameter_tables_are_complete(game: str) -> None:
    section = re.search(rf"^## {game}$(.*?)(?=^## |\Z)", TEXTS["docs/games.md"], re.MULTILINE | re.DOTALL)
    assert section
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section[1], re.MULTILINE))
    assert rows == {field.name: str(field.default) for field in GAMES[game].own_fields()}
