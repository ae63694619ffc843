"""A comparison as text, as JSON, and as JUnit XML for continuous integration."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import refpar
from refpar.oracle.compare import Comparison, Divergence

MOST_SHOWN = 10


def as_text(comparison: Comparison, name: str) -> str:
    """Return a report of a few lines: the first wrong number, what it looks like, and what followed."""
    lines = []
    if comparison.first is not None:
        lines += first_lines(comparison.first, comparison)
        roles = Counter(found.role for found in comparison.divergences[1:])
        if roles:
            words = {
                "consequence": "are consequences (right for what the run had before)",
                "again": "are wrong again, even for what the run had before",
                "later": "come later",
            }
            counted = [f"{roles[role]} {word}" for role, word in words.items() if roles[role]]
            lines.append(f"  {len(comparison.divergences) - 1} more values differ: {'; '.join(counted)}")
        again = [found for found in comparison.divergences[1:] if found.role == "again"]
        lines += [f"    again: {found}" for found in again[:3]]
    lines += [f"  note: {note}" for note in comparison.notes]
    if comparison.not_compared:
        missing = ", ".join(f"{kind} ({number})" for kind, number in comparison.not_compared.items())
        lines.append(f"  not compared, for the candidate has none: {missing}")
    return "\n".join([*lines, f"refpar compare: {headline(comparison, name)}"])


def first_lines(first: Divergence, comparison: Comparison) -> list[str]:
    """Return what is to be said of the first wrong value."""
    lines = [f"first wrong value: {first}"]
    if math.isfinite(first.error) and not first.problem:
        times = f"{first.ratio:.3g} times the bound" if first.bound else "the bound is exact equality"
        lines.append(f"  error {first.error:.3g}, {times} ({comparison.bound_kind}); "
                     f"{first.share:.1%} of its entries are wrong")  # fmt: skip
    return [*lines, *(f"  looks like: {cause}" for cause in first.causes)]


def headline(comparison: Comparison, name: str) -> str:
    """Return the last line."""
    if comparison.ok:
        nearest = (
            f"the nearest to its bound off by {comparison.max_error:.3g} of {comparison.bound:.3g} allowed"
            if comparison.max_error
            else "all equal"
        )
        return f"{name} matches: {comparison.compared} values, {nearest} ({comparison.bound_kind})"
    places = {(found.step, found.name): found.problem.startswith("missing") for found in comparison.divergences}
    missing = sum(places.values())
    beside = f", {missing} missing" if missing else ""
    return f"{name} differs: {len(places) - missing} of {comparison.compared} values{beside} ({comparison.bound_kind})"


def as_json(comparison: Comparison, name: str, digest: str = "") -> dict[str, Any]:
    """Return a report for programs; numbers that JSON cannot write are left as they are for the caller to mend."""
    return {
        "schema": 1,
        "name": name,
        "sha256": digest,
        "matches": comparison.ok,
        "tier": comparison.bound_kind,
        "compared": comparison.compared,
        "max_error": comparison.max_error,
        "bound": comparison.bound,
        "not_compared": comparison.not_compared,
        "notes": comparison.notes,
        "divergences": [divergence_json(found, comparison.bound_kind) for found in comparison.divergences],
        "versions": {"refpar": refpar.__version__},
    }


def divergence_json(found: Divergence, tier: str) -> dict[str, Any]:
    """Return one divergence for programs. What may not be off at all is exact, whatever the tier of the others."""
    return {
        "step": found.step,
        "name": found.name,
        "rank": found.rank,
        "index": None if found.index is None else list(found.index),
        "got": found.got,
        "expected": found.expected,
        "error": found.error,
        "bound": found.bound,
        "tier": tier if found.bound else "exact",
        "share": found.share,
        "problem": found.problem,
        "role": found.role,
        "causes": list(found.causes),
    }


def as_junit(comparison: Comparison, name: str) -> str:
    """Return JUnit XML: one case for the comparison, and one for each value that differs; consequences are skipped."""
    failures = [found for found in comparison.divergences if found.role != "consequence"]
    skipped = len(comparison.divergences) - len(failures)
    suite = ElementTree.Element(
        "testsuite", name=f"refpar compare {clean(name)}", tests=str(1 + len(comparison.divergences)),
        failures=str(len(failures) + (not comparison.ok)), skipped=str(skipped), errors="0",
    )  # fmt: skip
    whole = ElementTree.SubElement(suite, "testcase", classname=f"refpar.{clean(name)}", name="all values")
    if not comparison.ok:
        failure = ElementTree.SubElement(whole, "failure", message=clean(headline(comparison, name)))
        failure.text = clean(as_text(comparison, name))
    for found in comparison.divergences:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"refpar.{clean(name)}.step{found.step}", name=clean(found.name)
        )
        kind = "skipped" if found.role == "consequence" else "failure"
        entry = ElementTree.SubElement(case, kind, message=clean(f"{found.role}: {found}"))
        entry.text = clean("\n".join(found.causes))
    content: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return content.decode() + "\n"


def clean(text: str) -> str:
    """Return text without the characters that XML cannot hold."""
    return "".join(c for c in text if c in "\n\t" or 32 <= ord(c) < 0xD800 or 0xE000 <= ord(c) < 0xFFFE)
