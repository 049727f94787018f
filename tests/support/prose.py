"""The prose of the documents: words that the style page of CONTRIBUTING.md replaces, and proselint's checks.

``python tests/support/prose.py`` prints file, line and what to write instead; the exit code is 1 if there is anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
]
# What is written -> what to write. Words of a field's vocabulary, personification, and words that say nothing.
WORDS = {
    r"tells?|told": "prints, shows, returns, has",
    r"(?:goes|go|went) on": "continues",
    r"(?<!you )wants?": "needs, expects",
    r"(?<!who )(?<!to )knows?": "has, observes",
    r"asked|asks (?:the|if|whether)": "requests, prompts",
    r"whoever": "anyone who, with or without",
    r"whatever": "any, independent of",
    r"nobody|somebody|everybody|anybody": "no agent, another user, all players",
    r"oneself|one's": "your, the agent's",
    r"anew": "again",
    r"all but|but for|but in": "all except, except for",
    r"shall": "must, should",
    r"learnt": "learned",
    r"same bits": "bit-identical",
    r"by now|today": "now",
    r"there is to learn": "how much is learned",
    r"as good as can be": "optimal",
    r"ticks?": "step",
    r"replicas": "environments",
    r"slabs?": "step buffers",
    r"obviously|of course|simply|basically": "nothing",
}
HIDDEN = re.compile(
    r"^(?P<fence>```|~~~).*?^(?P=fence)|^ {4}\S.*?$|<!--.*?-->|<[^>\n]+>|`[^`\n]+`|\]\([^)\n]*\)|^:::.*?$",
    re.MULTILINE | re.DOTALL,
)
# proselint's: quotes and dots of a keyboard are right here, and names and code repeat each other.
LEFT_OUT = (
    "typography",
    "lexical_illusions",
    "dates_times",
    "misc.preferred_forms",
    "misc.phrasal_adjectives",
)


def prose(text: str) -> str:
    """The text without code, links' targets and markup, with as many lines and columns."""
    return HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def words(text: str) -> Iterator[tuple[int, str]]:
    """(line, what to write instead) of each word that the style replaces."""
    for pattern, instead in WORDS.items():
        for found in re.finditer(rf"(?<![\w*-])(?:{pattern})(?![\w-])", text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, f"{found[0]!r}: write {instead}"


def proselint(text: str) -> Iterator[tuple[int, str]]:
    """(line, advice) of proselint's checks."""
    from proselint.checks import __register__
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    for found in LintFile("document", text).lint():
        check = found.check_result.check_path
        if not check.startswith(LEFT_OUT):
            yield found.pos[0], f"{check}: {found.check_result.message}"


def main() -> int:
    """Check every document."""
    try:
        import proselint as _  # noqa: F401

        checks = (words, proselint)
    except ImportError:
        print("proselint is not installed (it needs Python 3.11): words alone are checked", file=sys.stderr)
        checks = (words,)
    findings = [
        f"{path.relative_to(ROOT)}:{line}: {advice}"
        for path in DOCUMENTS
        for check in checks
        for line, advice in sorted(check(prose(path.read_text(encoding="utf-8"))))
    ]
    print(*findings, sep="\n", end="\n" * bool(findings))
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
