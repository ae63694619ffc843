"""The pytest plugin: ``pytest --refpar-adapter=package.module:Adapter`` runs the battery, and nothing else.

pytest loads this file in every run where refpar is installed, so it imports nothing that costs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = 50


@dataclass
class Report:
    """What became of the battery.

    Attributes
    ----------
    title : name and version of the implementation
    outcomes : by check: ``passed``, ``failed``, ``known`` (it failed as expected), ``fixed`` (it was expected to
        fail, and passes), or ``skipped``
    absent : operations that the adapter does not have
    examples : that the checks have drawn
    details : what was wrong, by check
    """

    title: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        """Return how many checks have an outcome."""
        return sum(value == outcome for value in self.outcomes.values())

    def __str__(self) -> str:
        run = len(self.outcomes) - self.count("skipped")
        text = f"{self.title}: {self.count('passed')} of {run} checks passed, on {sum(self.examples.values())} examples"
        for outcome in ("failed", "known", "fixed"):
            names = [name for name, value in self.outcomes.items() if value == outcome]
            text += f"; {outcome}: {', '.join(names)}" if names else ""
        return text + (f"; it has no {', '.join(self.absent)}" if self.absent else "")


subject_key = pytest.StashKey[Any]()
report_key = pytest.StashKey[Report]()
known_key = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: Any) -> None:
    """Add the options of the battery."""
    group = parser.getgroup("refpar", "hold an implementation of distributed training to one device")
    group.addoption("--refpar-adapter", metavar="PACKAGE.MODULE:CLASS", help="run the battery against this adapter")
    group.addoption("--refpar-examples", metavar="N", type=int, default=EXAMPLES, help="examples a check")
    group.addoption("--refpar-known", metavar="FILE", help="known failures, a line each: CHECK: the reason")
    group.addoption("--refpar-write", metavar="DIR", help="write failing examples as goldens to this folder")
    group.addoption("--refpar-report", metavar="FILE", help="write what became of each check as JSON")


def pytest_configure(config: Any) -> None:
    """Load the adapter, and run the battery in place of what pytest would collect by itself."""
    spec = config.getoption("refpar_adapter")
    if spec is None or hasattr(config, "workerinput"):
        return
    try:
        from refpar.conformance.adapter import BadAdapter, Subject
        from refpar.conformance.launch import rank_of_launcher
    except ImportError as error:
        raise pytest.UsageError(f"--refpar-adapter: {error}: pip install 'refpar[test]' brings it") from None
    if rank_of_launcher() > 0:
        return
    battery = Path(__file__).with_name("battery.py")
    try:
        config.stash[known_key] = read_known(config.getoption("refpar_known"))
        config.stash[subject_key] = Subject(spec)
    except (BadAdapter, OSError) as error:
        raise pytest.UsageError(f"refpar: {error}") from None
    config.stash[report_key] = Report(title_of(config.stash[subject_key]))
    explicit = config.args_source is config.ArgsSource.ARGS
    config.args = [*(config.args if explicit else []), str(battery)]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: Any) -> int | None:
    """On every rank but the first of a launcher, wait for calls instead of running tests."""
    spec = config.getoption("refpar_adapter", None)
    if spec is None:
        return None
    from refpar.conformance.launch import rank_of_launcher, serve

    return serve(spec) if rank_of_launcher() > 0 else None


def pytest_unconfigure(config: Any) -> None:
    """End what the adapter has started."""
    subject = config.stash.get(subject_key, None)
    if subject is not None:
        subject.close()


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Say in a line what became of the battery."""
    report = config.stash.get(report_key, None)
    if report is None or not report.outcomes:
        return
    terminalreporter.write_line(f"refpar conformance: {report}")
    path = config.getoption("refpar_report")
    if path:
        import dataclasses
        import json

        Path(path).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")


def read_known(path: str | None) -> dict[str, str]:
    """Return the known failures of a file, and their reasons, by check."""
    from refpar.conformance.adapter import BadAdapter

    known: dict[str, str] = {}
    for line in Path(path).read_text().splitlines() if path else []:
        text = line.partition("#")[0].strip()
        name, colon, reason = text.partition(":")
        if text and not (colon and reason.strip()):
            raise BadAdapter(f"{path}: {line!r} is no known failure: write CHECK: the reason")
        if text:
            known[name.strip()] = reason.strip()
    return known


def title_of(subject: Any) -> str:
    """Return the name and version of an adapter."""
    from refpar.conformance.adapter import title

    return title(subject.adapter)


@pytest.fixture(scope="session")
def refpar_subject(request: Any) -> Any:
    """The adapter under test."""
    return request.config.stash[subject_key]
