"""The lock files of CI: every package by version and digest, and what pyproject.toml requires is among them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted((ROOT / ".ci" / "locks").glob("*.txt"))
WORKFLOWS = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
PLATFORMS = re.compile(r"\n  platforms:\n(?:    .*\n)*")  # the job that installs what users get, without locks
PYTHONS = sorted(set(re.findall(r'"(3\.\d+)"', PLATFORMS.sub("", WORKFLOWS))))
UNLOCKED = "torch"  # for the reason that .ci/pyproject.toml gives


def entries(lock: Path) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock, and its digests."""
    lines = [line for line in lock.read_text().splitlines() if not line.lstrip().startswith(("#", "--only-binary"))]
    found = [entry.split("--hash=") for entry in "\n".join(lines).replace("\\\n", "").splitlines() if entry.strip()]
    return [(Requirement(named.strip()), [digest.strip() for digest in digests]) for named, *digests in found]


def environment(python: str) -> dict[str, str]:
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    return {**default_environment(), **linux, "python_version": python, "python_full_version": f"{python}.9"}


def versions(lock: Path, python: str) -> dict[str, str]:
    """What the lock installs on Linux with this Python."""
    chosen: dict[str, str] = {}
    for requirement, _ in entries(lock):
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            (exact,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert name not in chosen and exact.operator == "==", requirement
            chosen[name] = exact.version
    return chosen


def required(extras: list[str]) -> Iterator[Requirement]:
    """What the project and these extras require themselves."""
    project = PROJECT["project"]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            yield from required(sorted(requirement.extras))
        else:
            yield requirement


def missing(lock: Path, requirements: list[Requirement], python: str) -> list[str]:
    """The requirements that the lock does not satisfy."""
    locked = versions(lock, python)
    applying = [wanted for wanted in requirements if not wanted.marker or wanted.marker.evaluate(environment(python))]
    return [
        str(wanted)
        for wanted in applying
        if wanted.name != UNLOCKED and not wanted.specifier.contains(locked.get(canonicalize_name(wanted.name), "0"))
    ]


def test_every_package_has_a_digest():
    for lock in LOCKS:
        for requirement, digests in entries(lock):
            assert digests and all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in digests), requirement
            assert canonicalize_name(requirement.name) not in {UNLOCKED, PROJECT["project"]["name"]}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_satisfies_what_development_requires(python):
    makefile = (ROOT / "Makefile").read_text()
    (shared,) = re.findall(r"^SHARING = (.*)$", makefile, re.MULTILINE)
    assert missing(ROOT / ".ci" / "locks" / "dev.txt", list(required(["dev", *shared.split()])), python) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_sbom_lists_the_tested_versions_of_what_the_project_requires(python):
    runtime = ROOT / ".ci" / "locks" / "runtime.txt"
    assert missing(runtime, list(required([])), python) == []
    assert versions(runtime, python).items() <= versions(ROOT / ".ci" / "locks" / "dev.txt", python).items()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_of_the_tools_satisfies_their_group(python):
    tools = [Requirement(text) for text in PROJECT["dependency-groups"]["tools"]]
    assert missing(ROOT / ".ci" / "locks" / "tools.txt", tools, python) == []


def test_workflows_install_what_is_locked():
    """But for the jobs that try the package, and a release's wheel, as users install it."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        head, _, text = path.read_text().partition("\njobs:\n")
        for job in re.split(r"^  (?=\w+:\n)", text, flags=re.MULTILINE)[1:]:
            name = f"{path.stem}, {job.partition(':')[0]}"
            if re.search(r"\b(?:make [a-z]|\.ci/)", job):
                assert "  LOCKS: .ci/locks\n" in head + job, name
            assert ("pip install" in job) == (name in ("release, try", "nightly, platforms")), name
    assert "\nexport LOCKS=.ci/locks " in (ROOT / ".ci" / "run").read_text()


def test_every_python_of_the_workflows_is_locked():
    assert {"3.10", "3.13"} <= set(PYTHONS)
    (where,) = tomllib.loads((ROOT / ".ci" / "pyproject.toml").read_text())["tool"]["uv"]["environments"]
    marker = Requirement(f"any; {where}").marker
    assert [python for python in PYTHONS if not marker.evaluate(environment(python))] == []
