"""``refpar conformance``: the battery, without writing a test."""

from __future__ import annotations

import importlib.util
import os
import sys

MATCHED, MISMATCH, BAD_INPUT, FAILED = 0, 1, 2, 3


def listing() -> int:
    """Print what is checked."""
    from refpar.conformance.operations import CHECKS

    for check in CHECKS.values():
        print(f"{check.name:44} {check.operation:26} {check.claim}")
    return MATCHED


def names() -> list[str]:
    """Return the names of all checks."""
    from refpar.conformance.operations import CHECKS

    return list(CHECKS)


def missing() -> str:
    """Return what has to be installed and is not."""
    absent = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} must be installed: pip install 'refpar[test]'" if absent else ""


def run(adapter: str, examples: int, only: str | None, known: str | None, write: str | None, report: str | None) -> int:
    """Run the battery and return the exit status: 0 matched, 1 a check failed, 2 bad input, 3 the run itself failed."""
    import pytest

    from refpar.conformance.adapter import BadAdapter, load
    from refpar.conformance.launch import rank_of_launcher, serve

    if rank_of_launcher() > 0:
        return serve(adapter)
    try:
        load(adapter)
    except BadAdapter as error:
        print(f"refpar: {error}", file=sys.stderr)
        return BAD_INPUT
    arguments = ["-q", "-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest", "-p", "no:cacheprovider", "-rx",
                 "-W", "ignore::pytest.PytestAssertRewriteWarning",
                 "-p", "refpar.conformance.plugin", "--tb=short", f"--refpar-adapter={adapter}",
                 f"--refpar-examples={examples}"]  # fmt: skip
    arguments += option("-k", " or ".join(only.split(",")) if only else None)
    arguments += option("--refpar-known", known) + option("--refpar-write", write) + option("--refpar-report", report)
    status = int(pytest.main(arguments))
    return {0: MATCHED, 1: MISMATCH, 4: BAD_INPUT, 5: BAD_INPUT}.get(status, FAILED)


def option(name: str, value: str | None) -> list[str]:
    """Return an option of the command line, where it was given."""
    return [name, value] if value else []
