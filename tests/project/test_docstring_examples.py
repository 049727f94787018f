"""The examples of docstrings run as doctests, and print what they say."""

import doctest
from pathlib import Path

import gymnasium
import pytest
import torch

import gpu_vecenv

NAMES = [name for name in gpu_vecenv.__all__ if ">>>" in (getattr(gpu_vecenv, name).__doc__ or "")]


def test_the_names_of_a_first_program_have_an_example() -> None:
    first = "VecEnv Trainer PPOConfig PolicySpec Sampler GamePolicy load_policy rollout Env check_vector_env".split()
    assert set(first) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"gpu_vecenv": gpu_vecenv, "gymnasium": gymnasium, "torch": torch}
    example = doctest.DocTestParser().get_doctest(getattr(gpu_vecenv, name).__doc__, names, name, None, None)
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)
