"""examples/pursuit_surround.py: pursuers go around walls to an evader, and to the last free cell beside it."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.scripts import imported_script

import gpu_vecenv

EXAMPLE = Path(__file__).parents[2] / "examples" / "pursuit_surround.py"
LEFT, RIGHT, DOWN, UP, STAY = range(5)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with imported_script(EXAMPLE) as module:
        yield module


def chosen(example: ModuleType, *rows: str) -> int:
    """The move of a pursuer in the middle of rows with walls "#", pursuers "p" and evaders "e"."""
    obs = torch.tensor([[[cell == kind for kind in "#pe"] for cell in row] for row in rows]).float()
    obs[3, 3, 1] += 1
    return example.surround(gpu_vecenv.configure("pursuit"))(obs[None, None]).item()


def test_moves_follow_from_what_a_pursuer_sees(example: ModuleType) -> None:
    empty = "......."
    assert chosen(example, empty, empty, empty, ".....e.", empty, empty, empty) == RIGHT
    assert chosen(example, empty, empty, "...p...", "..pe...", "...p...", empty, empty) == RIGHT  # off the evader
    assert chosen(example, empty, empty, "...e...", empty, empty, empty, empty) == STAY
    # Below it is a wall, whose only way around is to the left.
    walled = ["#######", "#.....#", "#.....#", "#.....#", "#.#####", "#...e.#", "#######"]
    assert chosen(example, *walled) == LEFT
