"""Maps drawn in characters."""

import numpy as np
import pytest

from gpu_vecenv.declare.text_layout import parse_text_layout
from gpu_vecenv.errors import ConfigError


def test_characters_become_their_places():
    found = parse_text_layout("map", "#.#\n.@ ", "#.@ ")
    assert found.dtype == np.uint8 and found.tolist() == [[0, 1, 0], [1, 2, 3]]


def test_blanks_are_kept_but_for_what_all_rows_share():
    for text in ("\n # \n#  \n", "    \n   # \n  #  \n ", " # \n#  "):
        assert parse_text_layout("map", text, "# ").tolist() == [[1, 0, 1], [0, 1, 1]]


def test_a_blank_row_between_others_is_a_row():
    assert parse_text_layout("map", "##\n  \n##", "# ").tolist() == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "map has 1 rows of 0 characters; expected 1 … 256 rows of one length"),
        (" \n ", "map has 1 rows of 0 characters"),
        ("##\n#", "map has 2 rows of 1, 2 characters"),
        ("#" * 257, "map has 1 rows of 257"),
        ("\n".join("#" * 257), "map has 257 rows of 1"),
        ("##\n#x", r"map: row 1, '#x', has 'x'; expected some of '#\.'"),
        ("##\n#ö", "has 'ö'"),
    ],
)
def test_what_is_no_map_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_text_layout("map", text, "#.")
