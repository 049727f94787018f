"""Reports of the conformance checks as JSON and as JUnit's XML."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from gpu_vecenv.check.report import Report


def as_json(report: Report) -> str:
    """A JSON object with ``name``, ``passed``, ``failures``, ``skipped`` and ``notes``."""
    return json.dumps(asdict(report), indent=2, default=str)


def as_junit(report: Report) -> str:
    """A test suite with one case for each check."""
    counts = {"tests": len(report.passed) + len(report.failed) + len(report.skipped), "failures": len(report.failed)}
    counts["skipped"] = len(report.skipped)
    suite = ElementTree.Element("testsuite", {"name": report.name, **{name: str(n) for name, n in counts.items()}})
    for check in sorted({*report.passed, *report.failed, *report.skipped}):
        case = ElementTree.SubElement(suite, "testcase", classname=report.name, name=check)
        for failure in report.failures:
            if failure.check == check:
                ElementTree.SubElement(case, "failure", message=failure.message).text = str(asdict(failure))
        if check in report.skipped:
            ElementTree.SubElement(case, "skipped", message=report.skipped[check])
    return ElementTree.tostring(suite, encoding="unicode")
