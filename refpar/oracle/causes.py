"""First causes: what wrong numbers look like, by arithmetic alone.

Many mistakes leave a mark that can be read off the numbers: a constant ratio (somebody divided once too often), one
rank's share instead of the sum, a tail that was left out, the same numbers in another order, yesterday's value. This is
no diagnosis, but a first hint, and it is only given where it fits *every* entry. Axes that are odd and pairwise coprime
beside scales that are powers of two make ratios unambiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

HostArray = npt.NDArray[Any]

RATIO = 2.0**-10
"""How near a ratio must be to one that has a name: nearer than any two that have different ones."""


@dataclass(frozen=True)
class Context:
    """What is known around a value.

    Attributes
    ----------
    unit : unit roundoff of the candidate's type
    numbers : by name, what a wrong ratio may consist of: ``{"dp": 3, "micro-batches": 7, "loss scale": 1024}``
    shares : what each part brings to the sum; empty where that is not known
    counts : tokens of each part, where they are replicas
    part : what a share is of, ``"replica"`` or such
    previous : the value one step before, or before the first update
    others : other values of the same step and shape, by name
    """

    unit: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    shares: Sequence[HostArray] = ()
    counts: Sequence[int] = ()
    part: str = "replica"
    previous: HostArray | None = None
    others: Mapping[str, HostArray] = field(default_factory=dict)


def causes(got: Any, expected: Any, bound: Any, context: Context) -> list[str]:
    """Return what a wrong value looks like; nothing where it looks like nothing in particular.

    Parameters
    ----------
    got, expected : of one shape, float64
    bound : largest honest error, a number or an array
    """
    a, b = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape or not a.size:
        return []
    if not np.isfinite(a).all():
        bad = np.count_nonzero(~np.isfinite(a))
        return [f"{bad} of {a.size} entries are infinite or NaN"]
    alike = Alike(np.broadcast_to(np.asarray(bound, np.float64), b.shape), context.unit)
    if not a.any():
        return ["all entries are zero: never computed, never written, or the one rank that has them left out"]
    guesses = [*share(a, context, alike), *ratio(a, b, context, alike), *stale(a, b, context, alike)]
    return guesses or [*tail(a, b, context, alike), *order(a, b, alike), *elsewhere(a, context, alike)]


@dataclass(frozen=True)
class Alike:
    """Compares with a hypothesis: as close as an honest computation of *that* would be."""

    bound: HostArray
    unit: float

    def __call__(self, a: HostArray, b: HostArray, ratio: float = 1.0, part: Any = ...) -> bool:
        room = 4 * max(abs(ratio), 1.0) * self.bound[part] + 16 * self.unit * np.abs(b)
        return bool((np.abs(a - b) <= room).all())


def ratio(a: HostArray, b: HostArray, context: Context, alike: Alike) -> Iterator[str]:
    """One and the same factor everywhere."""
    square = float(np.vdot(b, b))
    r = float(np.vdot(a, b)) / square if square else math.nan
    if not math.isfinite(r) or r == 0 or not alike(a, r * b, r):
        return
    label = named_ratio(r, context.numbers)
    if label:
        yield f"{r:.6g} times what is expected, everywhere: {label}"
    elif a.size > 1:
        yield f"{r:.6g} times what is expected, everywhere"


def named_ratio(r: float, numbers: Mapping[str, float]) -> str:
    """Return the simplest product of powers of ``numbers`` that is ``r``, empty where there is none."""
    usable = {name: float(value) for name, value in numbers.items() if value > 0 and value != 1}
    terms: list[tuple[str, float]] = [("", 1.0)]
    for name, value in usable.items():
        for label, power in (("{}", 1.0), ("1/{}", -1.0), ("{}²", 2.0), ("1/{}²", -2.0), ("√{}", 0.5), ("1/√{}", -0.5)):
            terms.append((f"{label.format(name)} = {_short(value**power)}", value**power))
    for sign, word in ((1, ""), (-1, "with the wrong sign")):
        for label, value in terms:
            if abs(sign * r / value - 1) < RATIO and (label or word):
                return " ".join(filter(None, (label, word)))
    for (one, x), (two, y) in combinations(terms[1:], 2):
        if abs(r / (x * y) - 1) < RATIO:
            return f"{one}, and {two}"
    return ""


def share(a: HostArray, context: Context, alike: Alike) -> Iterator[str]:
    """The parts of a sum, added with other weights than one."""
    if len(context.shares) < 2 or a.size < len(context.shares):
        return
    basis = np.stack([np.asarray(x, np.float64).ravel() for x in context.shares], axis=1)
    weights, _, rank, _ = np.linalg.lstsq(basis, a.ravel(), rcond=None)
    if rank < basis.shape[1] or not alike(a, (basis @ weights).reshape(a.shape), float(np.abs(weights).max())):
        return
    near = np.round(weights)
    if (np.abs(weights - near) < RATIO).all():
        missing, counted = np.flatnonzero(near == 0), np.flatnonzero(near > 0)
        if len(counted) == 1 and near[counted[0]] == 1:
            yield f"the share of {context.part} {counted[0]} alone: it was never added to the others'"
        elif len(missing) and (near[counted] == 1).all():
            yield f"the share of {context.part} {listed(missing)} is missing from the sum"
        elif not (near == near[0]).all():
            yield f"the shares, by {context.part}, are counted {listed(near)} times"
        return
    if len(context.counts) == len(weights) and all(context.counts) and np.ptp(context.counts) > 0:
        own = weights * np.asarray(context.counts)
        if np.ptp(own) < RATIO * abs(own[0]):
            mean = abs(own[0] * len(weights) / sum(context.counts) - 1) < RATIO
            yield "a mean of the replicas' own means" if mean else "each replica divides by its own count"
            return
    if np.ptp(weights) > RATIO * np.abs(weights).max():
        yield f"the shares, by {context.part}, are counted {listed(np.round(weights, 4))} times"


def listed(values: Any) -> str:
    """Return numbers as text, the first dozen of them."""
    shown = [f"{float(v):.4g}" for v in values[:12]]
    return ", ".join(shown) + (", …" if len(values) > 12 else "")


def stale(a: HostArray, b: HostArray, context: Context, alike: Alike) -> Iterator[str]:
    """The value of the step before, or that added."""
    if context.previous is None or context.previous.shape != a.shape:
        return
    before = np.asarray(context.previous, np.float64)
    if alike(a, before):
        yield "the value of the step before: not updated, or read too early"
    elif before.any() and alike(a, b + before):
        yield "the value of the step before is added to it: not cleared"


def tail(a: HostArray, b: HostArray, context: Context, alike: Alike) -> Iterator[str]:
    """Right up to some element, and wrong from there on."""
    x, y, room = a.ravel(), b.ravel(), Alike(alike.bound.ravel(), alike.unit)
    wrong = np.abs(x - y) > room.bound
    first, last = int(np.argmax(wrong)), x.size - 1 - int(np.argmax(wrong[::-1]))
    if wrong.mean() > 0.9 or not wrong[first : last + 1].mean() > 0.5:
        return
    where = slice(first, last + 1)
    what = (
        f"elements {first} to {last} of {x.size}"
        if last < x.size - 1
        else f"the last {x.size - first} of {x.size} elements"
    )
    if not x[where].any():
        yield f"{what} are zero"
    for rank, own in enumerate(context.shares):
        if room(x[where], np.asarray(own, np.float64).ravel()[where], part=where):
            yield f"{what} are the share of {context.part} {rank} alone"
    if context.previous is not None and context.previous.size == x.size:
        before = np.asarray(context.previous, np.float64).ravel()[where]
        if room(x[where], before, part=where):
            yield f"{what} have the value of the step before"


def order(a: HostArray, b: HostArray, alike: Alike) -> Iterator[str]:
    """The right numbers in the wrong places."""
    if a.ndim == 2 and a.shape[0] == a.shape[1] and alike(a, b.T):
        yield "transposed"
        return
    if a.ndim >= 2 and alike(a, b.T.reshape(a.shape)):
        yield "in the order of the transposed array"
        return
    most = float(alike.bound.max())
    if (
        a.size < 2
        or not (np.abs(np.sort(a.ravel()) - np.sort(b.ravel())) <= most + 16 * alike.unit * np.abs(b).max()).all()
    ):
        return
    for axis in range(a.ndim):
        for shift in range(1, min(a.shape[axis], 64)):
            if alike(a, np.roll(b, shift, axis)):
                yield f"shifted by {shift} along axis {axis}"
                return
    yield "the right numbers in another order"


def elsewhere(a: HostArray, context: Context, alike: Alike) -> Iterator[str]:
    """The value of something else."""
    for name, other in context.others.items():
        if alike(a, np.asarray(other, np.float64)):
            yield f"the value of {name}"
            return


def _short(value: float) -> str:
    return f"{value:.6g}"
