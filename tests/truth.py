"""The one property of the project, as a function: for a case and a layout, the trace is that of one device."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import currently_in_test_context, reject

from refpar import single
from refpar.case import Case, Layout, Trace
from refpar.comm import World
from refpar.oracle import bounds, compare
from refpar.parallel import hybrid, traffic

Worlds = Callable[[int], World]


def hold(case: Case, layout: Layout, worlds: Worlds) -> Trace:
    """Assert that ``case`` in ``layout`` gives what one device gives, within what its own order can change.

    Replicas are compared bit for bit inside the run, and putting the trace together asserts that every
    element is written exactly once. What each rank has sent, by group, is what the formulas say.
    """
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    truth = single.train(case)
    try:  # without tensor parallelism, products are those of one device
        allowed = bounds.spread(truth, shaken=layout.tp > 1)
    except bounds.Unbounded:
        if not currently_in_test_context():
            raise
        reject()  # a drawn case that roundings decide has no one truth
    comparison = compare.compare(trace, truth, bounds=allowed)
    assert comparison.ok, f"{layout}: {comparison}"
    assert traffic.on_ledger(trace) == traffic.expected(trace), layout
    return trace


def hold_exactly(case: Case, layout: Layout, worlds: Worlds) -> Trace:
    """Assert that ``case`` in ``layout`` gives the very bits of one device."""
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    comparison = compare.compare(trace, single.train(case), bounds=[])
    assert comparison.ok, f"{layout}: {comparison}"
    return trace
