"""The documents follow the style page of CONTRIBUTING.md."""

import re

import pytest
from support.prose import DOCUMENTS, prose, proselint, words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_has_no_word_that_the_style_replaces(path):
    text = prose(path.read_text(encoding="utf-8"))
    assert list(words(text)) == []


def test_words_are_found_in_prose_alone():
    text = "# The log\n\nIt tells\nwhat `tells` is:\n\n```sh\ntells\n```\n\n    tells\n\n"
    text += "[link](tells.md) <b tells>\nOne's own.\n"
    assert [line for line, _ in words(prose(text))] == [3, 13]
    assert [len(line) for line in prose(text).splitlines()] == [len(line) for line in text.splitlines()]


def test_proselint_runs_with_its_checks():
    pytest.importorskip("proselint", reason="it needs Python 3.11")
    assert [line for line, _ in proselint("A page.\n\nThis is a very unique page.\n")] == [3, 3]
    assert list(proselint('A "quoted" word ... and io Io.\n')) == []


def test_every_measured_table_has_a_command_in_its_section():
    text = next(path for path in DOCUMENTS if path.name == "results.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert "\n|---" not in section or re.search(r"^    (python|gpu-vecenv|torchrun) ", section, re.MULTILINE), (
            section[:60]
        )
        assert not re.search(r"\bgoals?\b(?!s?-|\.py)", prose(section)), section[:60]
