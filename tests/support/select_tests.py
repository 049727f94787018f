"""Prints the tests of the packages that changed, for `make quick`: one line of paths for each process of pytest.

Changed is what differs from the merge base with the main branch, uncommitted and new files included. Without a git
history, without changes, or after a change that concerns every package, it is a fixed core.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ["tests/declare", "tests/compile/test_function_manager.py", "tests/engine/test_vec_env.py"]
CUDA = {"engine": "engine", "games": "envs", "learner": "train"}  # folder of cuda/ -> folder of tests/
DOCUMENTS = ("docs", "examples", "benchmarks", ".github", ".ci")  # these and FILES are tested by tests/project
FILES = ("Makefile", "LICENSE", ".pre-commit-config.yaml", ".readthedocs.yaml")


def git(root: Path, *arguments: str) -> list[str] | None:
    """Lines that a git command prints; None where it fails or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()


def changed(root: Path) -> list[str]:
    """Paths that differ from the merge base with the main branch."""
    for branch in ("origin/main", "main"):
        if base := git(root, "merge-base", "HEAD", branch):
            return [
                *(git(root, "diff", "--name-only", "--relative", base[0]) or []),
                *(git(root, "ls-files", "--others", "--exclude-standard") or []),
            ]
    return []


def tests_of(path: str, root: Path) -> str | None:
    """The folder or file with the tests of a changed path; None where the change concerns every package."""
    top, *rest = Path(path).parts
    found = None
    if top == "adapters":
        found = f"tests/adapters/test_{Path(path).stem}.py"
    elif top == "tests" and rest[0] == "adapters":
        found = path
    elif top == "tests" and rest[0] == "clients":  # they run in environments of their own: make test-clients
        found = "tests/project"
    elif top in ("gpu_vecenv", "tests") and len(rest) > 1:
        found = f"tests/{rest[0]}"
    elif top == "cuda":
        found = f"tests/{CUDA.get(rest[0], rest[0])}"
    elif top in DOCUMENTS or path.endswith((".md", ".cff", ".in")) or path in FILES:
        found = "tests/project"
    if found and (root.joinpath(found).is_file() or any(root.joinpath(found).glob("test_*.py"))):
        return found
    return None


def selected(paths: Iterable[str], root: Path = ROOT) -> list[list[str]]:
    """Arguments of each process of pytest. Each adapter has its own, for some libraries patch others."""
    found = {tests_of(path, root) for path in paths}
    named = sorted(path for path in found if path)
    adapters = [path for path in named if path.startswith("tests/adapters/")]
    packages = [path for path in named if path not in adapters]
    if None in found or not found:
        packages += [path for path in CORE if not path.startswith(tuple(packages))]
    return [*([packages] if packages else []), *([path] for path in adapters)]


if __name__ == "__main__":
    for arguments in selected(changed(ROOT)):
        print(*arguments)
