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

from refpar.case import Step, Trace
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
    """

    step: int
    name: str
    index: tuple[int, ...] | None
    got: Any
    expected: Any
    error: float
    bound: float
    share: float

    def __str__(self) -> str:
        at = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        text = f"step {self.step}: {self.name}{at} is {self.got}, expected {self.expected}"
        if math.isfinite(self.error):
            text += f": off by {self.error:.3g}, allowed {self.bound:.3g}"
        return text + (f", {self.share:.0%} of its entries wrong" if self.index is not None else "")


@dataclass(frozen=True)
class Comparison:
    """The verdict.

    Attributes
    ----------
    compared : number of values (tensors and single numbers) looked at
    max_error, bound : of the tensor that comes nearest to its bound, or leaves it furthest
    bound_kind : where the bound comes from: ``"spread"`` or ``"exact"``
    divergences : everything outside its bound, in causal order
    """

    compared: int
    max_error: float
    bound: float
    bound_kind: str
    divergences: list[Divergence] = field(repr=False)

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
    """
    if bounds is None:
        bounds = bounds_.spread(reference)
    kind = kind if bounds else "exact"
    found: list[Divergence] = []
    compared, worst = 0, (0.0, 0.0, 0.0)  # error / bound, error, bound
    if len(trace.steps) != len(reference.steps):
        found.append(wrong(0, "steps", len(trace.steps), len(reference.steps)))
    for number, (got, expected) in enumerate(zip(trace.steps, reference.steps, strict=False)):
        allowed = bounds[number] if bounds else {}
        for name, value, true in paired(got, expected):
            compared += 1
            bound = allowed.get(name, 0.0)
            divergence, error = judge(number, name, value, true, bound)
            worst = max(worst, (error / bound if bound else math.inf if error else 0.0, error, bound))
            found += [divergence] if divergence else []
    return Comparison(compared, worst[1], worst[2], kind, found)


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


def judge(step: int, name: str, got: Any, expected: Any, bound: float) -> tuple[Divergence | None, float]:
    """Return the divergence of one value, if it has one, and its largest error."""
    if got is None or expected is None or np.shape(got) != np.shape(expected):
        shown = [v if v is None or np.ndim(v) == 0 else f"shape {np.shape(v)}" for v in (got, expected)]
        return wrong(step, name, *shown), math.inf
    if name == "outcome":
        return (None, 0.0) if got == expected else (wrong(step, name, got, expected), math.inf)
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    if not error.size or not (error > bound).any():
        return None, float(error.max(initial=0.0))
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    place = tuple(int(i) for i in index) if error.ndim else None
    return Divergence(
        step, name, place, a[index].item(), b[index].item(), float(error[index]), bound, float((error > bound).mean())
    ), float(error[index])


def wrong(step: int, name: str, got: Any, expected: Any) -> Divergence:
    """Return the divergence of something that is not a number."""
    return Divergence(step, name, None, got, expected, math.inf, 0.0, 1.0)
