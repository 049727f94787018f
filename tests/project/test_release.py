"""What a release goes through: the tag is the version everywhere, and the workflows run what is there."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_vecenv.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))
TOLD = {
    "gpu_vecenv/_version.py": '__version__ = "1.2.3"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
    "CHANGELOG.md": "## [Unreleased]\n\n## [1.2.3] - 2031-02-03\n",
}
BUILDS = "no-such-venv-tools/bin/python"  # what it comes to once the tag is found good; it is not there
WRONG = {
    "another tag": ("v1.2.4", {}, "TAG is v1.2.4, but gpu_vecenv/_version.py says 1.2.3"),
    "no v": ("1.2.3", {}, "TAG is 1.2.3, but"),
    "not quoted": ("v$(touch ran)`touch ran`", {}, "TAG is v$(touch ran)`touch ran`, but"),
    "an old citation": ("v1.2.3", {"CITATION.cff": "version: 1.2.2\n"}, "CITATION.cff does not say version: 1.2.3"),
    "no date": ("v1.2.3", {"CHANGELOG.md": "## [1.2.3] - unreleased\n"}, "CHANGELOG.md has no date for [1.2.3]"),
}


def dist(folder: Path, tag: str, changed: dict[str, str]) -> str:
    """What `make dist` says in a tree of these files; nothing is built."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", folder)
    for name, text in {**TOLD, **changed}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = ["make", "dist", "VENV=no-such-venv", "-o", "no-such-venv-tools/stamp"]
    # Without the variables by which a make that runs these tests speaks to its children.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, env={**kept, "TAG": tag}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize("what", WRONG)
def test_a_tag_that_is_not_the_version_everywhere_builds_nothing(what: str, tmp_path: Path) -> None:
    tag, changed, message = WRONG[what]
    said = dist(tmp_path, tag, changed)
    assert message in said and BUILDS not in said and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("tag", ["v1.2.3", ""])
def test_the_versions_own_tag_and_none_are_built(tag: str, tmp_path: Path) -> None:
    assert BUILDS in dist(tmp_path, tag, {})


@pytest.mark.slow
def test_a_commit_gives_the_same_bytes_whenever_and_wherever_it_is_built(tmp_path: Path) -> None:
    """In folders of other names, of other times and rights, with what is not committed lying about."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    digests = []
    for name, umask, time in ("tree", "022", "2001-02-03"), ("another tree", "077", "2031-02-03 04:05:06"):
        tree = tmp_path / name
        script = f"""
            umask {umask}
            git clone -q "$1" "$2" && cp "$1/.ci/build" "$2/.ci/build" && cd "$2"
            find . -not -path './.git/*' -exec touch -d '{time}' {{}} +
            echo new >gpu_vecenv/'{name}'.py
            .ci/build "$3" dist
        """
        command = ["bash", "-ec", script, "bash", str(ROOT), str(tree), sys.executable]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        files = sorted((tree / "dist").iterdir())
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    assert digests[0] == digests[1] and [Path(name).suffix for name in digests[0]] == [".whl", ".gz"]


def test_the_sbom_can_name_the_version() -> None:
    """`make dist` replaces this line."""
    assert '\ndynamic = ["version"]\n' in (ROOT / "pyproject.toml").read_text()


def test_workflows_and_templates_name_what_is_there() -> None:
    texts = [path.read_text() for path in [*WORKFLOWS, ROOT / ".github" / "pull_request_template.md"]]
    text = "".join(texts)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for line in re.findall(r"(?:run: |- |`)make ([a-z -]+)", text) for target in line.split()}
    assert {"check", "quick", "mutants", "dist", "release-check"} <= named <= targets
    assert set(re.findall(r"gpu-vecenv ([a-z]+)", text)) <= set(COMMANDS)
    for path in re.findall(r"(?:run|uses): (\.[\w./-]+)", text) + re.findall(r"python (tests/\S+?\.py)", text):
        assert (ROOT / path).is_file(), path


def test_actions_are_pinned_to_a_commit_and_say_its_version() -> None:
    for path in WORKFLOWS:
        for action in re.findall(r"uses: ([^.\s].*)", path.read_text()):
            assert re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", action), f"{path.name}: {action}"


# Whatever else a job may do. All may read the repository.
RIGHTS = {("codeql", "security-events"), ("release", "id-token"), ("release", "contents")}


def test_workflows_may_read_and_jobs_little_more() -> None:
    rights = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        assert "\npermissions:\n  contents: read\n\n" in text, path
        rights |= {(path.stem, right) for right in re.findall(r"^ *([a-z-]+): write\b", text, re.MULTILINE)}
        assert "write-all" not in text and "pull_request_target" not in text, path
    assert rights == RIGHTS


def test_only_the_job_that_publishes_may_say_who_it_is() -> None:
    """Trusted publishing is a right of the job's; code of the tree runs in the others."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    head, *jobs = re.split(r"^  (?=\w+:\n)", text.partition("\njobs:\n")[2], flags=re.MULTILINE)
    assert not head.strip() and [job.partition(":")[0] for job in jobs] == ["ci", "build", "try", "publish", "attach"]
    assert ["id-token: write" in job for job in jobs] == [False, False, False, True, False]
    assert ["contents: write" in job for job in jobs] == [False, False, False, False, True]
    publish, attach = jobs[-2:]
    assert "needs: [ci, build, try]" in publish and "actions/checkout" not in publish and "run:" not in publish
    assert "needs: publish" in attach and "actions/checkout" not in attach
    assert re.findall(r"run: (\w+)", attach) == ["gh"]
    assert "password" not in text and "secrets" not in text
    assert "attestations:" not in text  # the action's default is to sign them


def test_known_weaknesses_are_looked_for_every_night() -> None:
    nightly, codeql = ((ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("nightly", "codeql"))
    assert re.search(r'- cron: "\d+ \d+ \* \* \*"', nightly)
    (targets,) = re.findall(r"^nightly: (.*?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"audit", *targets.split()} <= set(re.findall(r"^ *- make ([a-z-]+)", nightly, re.MULTILINE))
    assert "language: [python, javascript-typescript, actions]" in codeql
    updates = (ROOT / ".github" / "dependabot.yml").read_text()
    assert re.findall(r"package-ecosystem: (.*)\n *directory: (.*)", updates) == [
        ("github-actions", "/"), ("pip", "/"), ("pip", "/.ci/locks"),
    ]  # fmt: skip


def test_pre_commit_runs_the_programs_of_make_check() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    programs = set(re.findall(r"entry: \.venv/bin/(python [-\w./ ]+|ruff \w+|[\w-]+)", hooks))
    checks = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\ntest-changed:")[0]
    assert len(programs) == 6
    assert programs == set(re.findall(r"\$\(BIN\)/(python [-\w./ ]+|ruff \w+|[\w-]+)", checks))
    assert set(re.findall(r"repo: (.*)", hooks)) == {"local"}
