"""The tests that the plugin runs: one a check, each drawing its examples with Hypothesis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from refpar.conformance.adapter import BY_RANK, Subject, able
from refpar.conformance.operations import CHECKS, Check, Example, Wrong
from refpar.conformance.plugin import Report, known_key, report_key

SLOW = {"run": 5, "checkpoint": 2}
"""Operations of which an example takes long: so many times fewer of them."""


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str, refpar_subject: Subject, request: pytest.FixtureRequest) -> None:
    """What the check claims holds for every example that is drawn."""
    config, check = request.config, CHECKS[name]
    report, known = config.stash[report_key], config.stash[known_key]
    if unknown := set(known) - set(CHECKS):
        raise pytest.UsageError(f"no check is called {sorted(unknown)[0]}: there are {', '.join(CHECKS)}")
    if not able(refpar_subject.adapter, check.operation):
        absent(report, check)
    report.outcomes[name] = "failed"
    seen: list[Example] = []
    wrong = None
    try:
        run(check, refpar_subject, config.getoption("refpar_examples"), report, seen)
    except Exception as error:
        wrong = error
        report.details[name] = str(error).partition("\n")[0]
    if wrong is not None and name in known:
        report.outcomes[name] = "known"
        pytest.xfail(known[name])
    if isinstance(wrong, Wrong):
        drawn = [note for note in getattr(wrong, "__notes__", []) if note.startswith("Draw ")]
        extra = written(config.getoption("refpar_write"), check, seen), explained(seen)
        pytest.fail("\n".join([str(wrong), *filter(None, extra), *drawn]), pytrace=False)
    if wrong is not None:
        raise wrong
    if name in known:
        report.outcomes[name] = "fixed"
        pytest.fail(f"{name} was expected to fail ({known[name]}), and passes: take it off the list", pytrace=False)
    report.outcomes[name] = "passed"


def absent(report: Report, check: Check) -> None:
    """Skip a check of what the adapter does not have."""
    report.outcomes[check.name] = "skipped"
    if check.operation not in report.absent:
        report.absent.append(check.operation)
    pytest.skip(f"the adapter has no {check.operation}")


def run(check: Check, subject: Subject, examples: int, report: Report, seen: list[Example]) -> None:
    """Draw examples, and shrink what fails; ``seen`` then holds the smallest."""
    count = max(1, examples // SLOW.get(check.operation, 1))

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in Phase if phase is not Phase.explain],
        report_multiple_bugs=False,
    )
    @given(st.data())
    def claim(data: Any) -> None:
        report.examples[check.name] = report.examples.get(check.name, 0) + 1
        fresh: list[Example] = []
        try:
            check.body(subject, data.draw, fresh)
        except Exception:
            seen[:] = fresh
            raise

    claim()


def written(folder: str | None, check: Check, seen: list[Example]) -> str:
    """Write the smallest failing example as a golden, where there is one; say where it is."""
    if not (folder and seen):
        return ""
    from refpar.conformance.example import write

    path = Path(folder) / check.name
    return write(path, check.name, seen[-1])


def explained(seen: list[Example]) -> str:
    """Say which known mistake has these numbers, for a training run."""
    if not (seen and seen[-1].case is not None):
        return ""
    from refpar.conformance.example import explain

    return explain(seen[-1])


assert all(check.operation in BY_RANK for check in CHECKS.values())
