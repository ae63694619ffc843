"""Compare a trace with the truth, and find the first number that is wrong.

A step's values are walked in causal order: count, loss, gradients from the last layer to the first,
norm, outcome, optimizer state, weights. The first that leaves its bound is the one to look at; what
comes after it is mostly its consequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refpar.case import Step, Trace, digest, identity
from refpar.oracle import bounds as bounds_
from refpar.oracle.bounds import Bounds


@dataclass(frozen=True)
class Divergence:
    """One value that is not what it must be.

    Attributes
    ----------
    step, name : where, ``name`` as in :meth:`refpar.case.Step.items`
    index : of the entry that is furthest off, relative to its bound; None for single numbers
    got, expected : the values there
    error, bound : how far off it is, and how far off it may be; infinite where it is no number
    share : share of the entries that are outside the bound
    rank : that holds the entry, where a dump has several
    problem : what is wrong where it is no number that is: a missing value, another shape, replicas that differ
    role : ``"first"`` in causal order; ``"consequence"``, right for what the candidate had before it; ``"again"``,
        wrong even for that; ``"later"``, where that cannot be said
    causes : what the wrong numbers look like, in words
    """

    step: int
    name: str
    index: tuple[int, ...] | None
    got: Any
    expected: Any
    error: float
    bound: float
    share: float
    rank: int | None = None
    problem: str = ""
    role: str = ""
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        where = f"step {self.step}: {self.name}{at}" + ("" if self.rank is None else f" (rank {self.rank})")
        if self.problem:
            return f"{where}: {self.problem}"
        text = f"{where} is {self.got}, expected {self.expected}"
        if math.isfinite(self.error):
            text += f": off by {self.error:.3g}, allowed {self.bound:.3g}"
        return text + (f", {self.share:.0%} of its entries wrong" if self.index is not None else "")

    @property
    def ratio(self) -> float:
        """How many times the bound the error is."""
        return self.error / self.bound if self.bound else math.inf


@dataclass(frozen=True)
class Comparison:
    """The verdict.

    Attributes
    ----------
    compared : number of values (tensors and single numbers) looked at
    max_error, bound : of the tensor that comes nearest to its bound, or leaves it furthest
    bound_kind : where the bound comes from: ``"spread"``, or a tier of :mod:`refpar.oracle.bounds`
    divergences : everything outside its bound, in causal order
    not_compared : kinds of values that the candidate has none of, and how many of each there are
    notes : what else is worth saying
    """

    compared: int
    max_error: float
    bound: float
    bound_kind: str
    divergences: list[Divergence] = field(repr=False)
    not_compared: dict[str, int] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing diverged."""
        return not self.divergences

    @property
    def first(self) -> Divergence | None:
        """The first divergence in causal order."""
        return self.divergences[0] if self.divergences else None

    def __str__(self) -> str:
        if self.ok:
            return (
                f"matches: {self.compared} values, largest error {self.max_error:.3g} "
                f"of {self.bound:.3g} allowed ({self.bound_kind})"
            )
        later = len(self.divergences) - 1
        return f"differs first at {self.first}" + (f"; {later} later values differ too" if later else "")


def compare(trace: Trace, reference: Trace, *, bounds: Bounds | None = None, kind: str = "spread") -> Comparison:
    """Hold ``trace`` to ``reference``.

    Parameters
    ----------
    trace, reference : of the same case
    bounds : largest absolute error by step and name; by default :func:`refpar.oracle.bounds.spread` of the
        reference, which runs its case eight more times. ``[]`` asks for equality.
    kind : the word for ``bounds`` in the verdict

    Raises
    ------
    ValueError
        Where the two are of different cases or begin at different steps, or neither has a step: nothing that could be
        compared means anything.
    """
    check_alike(trace, reference)
    if bounds is None:
        bounds = bounds_.spread(reference)
    kind = kind if bounds else "exact"
    found: list[Divergence] = []
    compared, worst = 0, NOWHERE
    if len(trace.steps) != len(reference.steps):
        found.append(wrong(0, "steps", len(trace.steps), len(reference.steps)))
    for number, (got, expected) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        allowed = bounds[number] if bounds else {}
        for name, value, true in paired(got, expected):
            compared += 1
            divergence, nearest = judge(number, name, value, true, allowed.get(name, 0.0))
            worst = max(worst, nearest)
            found += [divergence] if divergence else []
    return Comparison(compared, worst[1], worst[2], kind, found)


def check_alike(trace: Trace, reference: Trace) -> None:
    """Refuse two traces that are not of the same steps of the same case. Types may differ: the bounds know of them."""
    if not trace.steps and not reference.steps:
        raise ValueError("compare: neither trace has a step, so there is nothing to compare")
    if trace.begun != reference.begun:
        raise ValueError(
            f"compare: the trace begins at step {trace.begun} and the reference at step {reference.begun}: "
            "they must begin at the same one"
        )
    if trace.case is reference.case:
        return
    theirs, ours = (identity(t.case) for t in (trace, reference))
    for key in dict.fromkeys((*ours, *theirs)):
        if theirs.get(key) != ours.get(key) and key.partition(".")[0] != "precision":
            raise ValueError(f"compare: the trace is of a case with {key}={theirs.get(key)}, the reference of "
                             f"one with {key}={ours.get(key)}")  # fmt: skip
    end = reference.begun + min(len(trace.steps), len(reference.steps))
    if digest(trace.case.batches[:end]) != digest(reference.case.batches[:end]):
        raise ValueError(f"compare: the two traces have not the same data in their first {end} steps")


def paired(got: Step, expected: Step) -> list[tuple[str, Any, Any]]:
    """Return name, value and true value of all that both steps must have, in the reference's order.

    Gradients of a step that overflowed are no numbers: which of them are infinite depends on the order of
    additions, so only the verdict, "overflow", is compared.
    """
    values = dict(got.items())
    pairs = [(name, values.pop(name, None), true) for name, true in expected.items()]
    pairs += [(name, value, None) for name, value in values.items()]
    overflow = expected.outcome == "overflow"
    return [p for p in pairs if not (overflow and (p[0] == "norm" or p[0].startswith("gradient/")))]


Nearest = tuple[float, float, float]
"""Of the entry nearest to its bound, or furthest outside: error over bound, error, bound."""
NOWHERE: Nearest = (0.0, 0.0, 0.0)


def judge(step: int, name: str, got: Any, expected: Any, bound: Any) -> tuple[Divergence | None, Nearest]:
    """Return the divergence of one value, if it has one, and how near it is to its bound.

    Parameters
    ----------
    bound : largest absolute error, a number or an array of the shape of the value; 0 asks for equality
    """
    if got is None or expected is None or np.shape(got) != np.shape(expected):
        shown = [v if v is None or np.ndim(v) == 0 else f"shape {np.shape(v)}" for v in (got, expected)]
        return wrong(step, name, *shown), (math.inf, math.inf, 0.0)
    if name == "outcome" and isinstance(got, str):
        return (None, NOWHERE) if got == expected else (wrong(step, name, got, expected), (math.inf, math.inf, 0.0))
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if not a.size:
        return None, NOWHERE
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        error = np.where(np.isnan(error), np.inf, error)
        ratio = np.where(error > 0, error / bound, 0.0)
    outside = error > bound
    worst = int(np.argmax(np.where(np.isinf(ratio), np.finfo(np.float64).max, ratio)))
    if np.isinf(ratio.flat[worst]):
        worst = int(np.argmax(np.where(np.isinf(ratio), error, -1.0)))
    index = np.unravel_index(worst, error.shape)
    nearest = (float(ratio[index]), float(error[index]), float(np.broadcast_to(bound, error.shape)[index]))
    if not outside.any():
        return None, nearest
    place = tuple(int(i) for i in index) if error.ndim else None
    found = Divergence(step, name, place, a[index].item(), b[index].item(), *nearest[1:], float(outside.mean()))
    return found, nearest


def wrong(step: int, name: str, got: Any, expected: Any) -> Divergence:
    """Return the divergence of something that is not a number."""
    return Divergence(step, name, None, got, expected, math.inf, 0.0, 1.0)
