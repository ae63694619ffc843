"""A short version of ``benchmarks/faults.py``: ranks that fail at random moments, in four ways."""

import importlib.util
import sys
from pathlib import Path


def test_whatever_a_rank_does_the_caller_is_told_and_nothing_is_left() -> None:
    """The error names the rank, no process, descriptor or segment stays, and the next run gives right numbers."""
    path = Path(__file__).parents[1] / "benchmarks" / "faults.py"
    spec = importlib.util.spec_from_file_location("faults", path)
    assert spec is not None
    assert spec.loader is not None
    faults = sys.modules["faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    faults.LIMIT = 2.0  # a rank that a busy machine leaves without a processor for half a second would be blamed
    for outcome in faults.inject(runs=40, ranks=4, seed=1):
        assert outcome.named, outcome
        assert (outcome.processes, outcome.descriptors, outcome.segments) == (0, 0, 0), outcome
        assert outcome.next_right, outcome
        assert outcome.seconds < 5, outcome
