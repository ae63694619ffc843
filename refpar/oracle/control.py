"""Any model: two dumps of somebody's own, without a golden.

refpar does not know their model, so it cannot say what is true; but a distributed run and a single-device run of one
program must agree as well as two single-device runs that merely add in another order. Such *control* runs give the
threshold: the batch in another order, or an even split that is known to be right. What an element may be off by is
:func:`factor` times the largest of three, each a root mean square over the control runs: its own distance from the
reference, its tensor's, and its tensor's largest entry times the relative distance that is usual among its kind
(gradients, weights) in that step.

How far may an honest number be off, when k others like it were off by s, as a root mean square? Their ratio is
Student's t with k degrees of freedom, whose tails are heavy where k is small: one control run happens to come out near
the reference, and a bound made of it is narrow by luck. So the factor follows from how many controls there are, and
from how many values are compared, such that an honest run is flagged less than once in 1 / ``ALARM``::

    controls                  1        2      3     4     6     8     16
    factor for 100 values     12732    200    56    31    19    15    13
    factor for 1000 values    127324   632    121   56    27    20    15

One control run is good for gross mistakes; four are enough, eight are better. At least 4u of a tensor's largest entry
is allowed, two steps of its last place, u the unit roundoff of the narrower type. Without a control run that is all:
good for runs that should be bit-equal, or nearly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refpar.case import HostArray
from refpar.oracle.bounds import largest
from refpar.oracle.candidate import Walk, explain, split_step, verdict
from refpar.oracle.causes import Context
from refpar.oracle.compare import Comparison
from refpar.oracle.dumps import BadDump, Dump
from refpar.oracle.parts import kind_of
from refpar.oracle.stochastic import UNIT

ALARM = 0.01
"""How likely an honest run may be flagged."""
MORE = 2
"""The candidate may round more than control runs do, in products and between ranks: to four times the variance."""
ENOUGH = 4
"""Control runs from which on a verdict needs no warning."""
MOST_USED = 16
"""Degrees of freedom beyond which the bound on Student's tail becomes no better."""
KINDS = (
    "count", "micro count", "activation", "micro activation", "micro loss", "loss", "dp gradient", "gradient", "norm",
    "outcome", "scale", "good", "t", "state", "parameter",
)  # fmt: skip
"""Kinds of values in causal order; what is of none of them comes first."""


def against(reference: Dump, candidate: Dump, controls: Sequence[Dump] = (), *, steps: int | None = None) -> Comparison:
    """Hold a dump to another one.

    Parameters
    ----------
    reference : of the single device; whatever it has, the candidate must have
    controls : runs that are right and rounded otherwise
    steps : how many steps are looked at; all by default

    Raises
    ------
    BadDump
        Where a file turns out to be broken, the reference has nothing to compare, or a control run is none: it lacks
        a value, or its gradients are further from the reference than rounding can be.
    """
    names = [name for name in in_causal_order(reference) if steps is None or split_step(name)[0] < steps]
    if not names:
        raise BadDump("the reference has no value" + ("" if steps is None else f" of the first {steps} steps"))
    expected = {name: reference.read(name)[0] for name in names}
    floats = {name: x.astype(np.float64) for name, x in expected.items() if x.dtype in UNIT}
    moved = {
        name: distance(x, [control_value(c, i, name, x) for i, c in enumerate(controls)], UNIT[expected[name].dtype])
        for name, x in floats.items()
    }
    share, times = shares(floats, moved), factor(len(controls), len(floats))
    bound: dict[str, Any] = {}
    for name, true in floats.items():
        dtype = candidate.values[name].dtype if name in candidate.values else expected[name].dtype.name
        unit = max(UNIT[expected[name].dtype], UNIT.get(np.dtype(dtype), 0.0))
        size, typical = largest(true), float(np.sqrt(np.mean(np.square(moved[name])))) if true.size else 0.0
        least = max(times * typical, times * share[group(name)] * size, 4 * unit * size)
        bound[name] = np.maximum(times * moved[name], least)
    check_controls(expected, controls)
    walk = Walk(candidate, expected, bound, "float16", {n: n for n in expected if n in candidate.values})
    walk.go()
    explain(walk, lambda name: context(expected, candidate, name), {})
    kinds = " and ".join(sorted({x.dtype.name for x in expected.values() if x.dtype.kind == "f"}))
    comparison = verdict(walk, f"{ground(len(controls))}; {kinds}")
    comparison.notes.extend(cautions(len(controls), floats, bound))
    return comparison


def factor(controls: int, values: int) -> float:
    """Return how many times the distance that ``controls`` runs show is allowed, where ``values`` are compared.

    Of Student's t with k degrees of freedom, P(|t| > F) < 2 g k^((k-1)/2) F^-k, g its density at 0: the density is
    less than g k^((k+1)/2) t^-(k+1). That is set to ``ALARM`` shared out among the values. A tensor counts once: at
    worst one of its entries is all that moves, and if more do, their mean square is known the better.
    """
    if not controls or not values:
        return 0.0
    k = min(controls, MOST_USED)
    g = math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2)) / math.sqrt(math.pi * k)
    return MORE * float((2 * g * k ** ((k - 1) / 2) * values / ALARM) ** (1 / k))


def ground(controls: int) -> str:
    """Return where the bounds come from, in words."""
    if not controls:
        return "no control run"
    runs = "1 control run" if controls == 1 else f"{controls} control runs"
    return f"{runs}: flags an honest run less than once in {1 / ALARM:.0f}"


def cautions(controls: int, true: Mapping[str, HostArray], bound: Mapping[str, Any]) -> list[str]:
    """Return what is to be said of a verdict by so many control runs."""
    how = "give more by --control, the single device with the batch in other orders"
    if not controls:
        return [f"without a control run only 4u of a tensor's largest entry is allowed: {how}"]
    notes = []
    if controls < ENOUGH:
        now, then = (factor(n, len(true)) for n in (controls, ENOUGH))
        says = "1 control run says" if controls == 1 else f"{controls} control runs say"
        notes.append(f"{says} little of how far another may be off, so {now:.0f} times that is allowed; by {ENOUGH} "
                     f"it were {then:.0f} times: {how}")  # fmt: skip
    open_ = [name for name, x in true.items() if largest(x) and np.min(bound[name]) >= largest(x)]
    if open_:
        notes.append(f"{len(open_)} values, such as {open_[0]}, may be off by as much as their largest entry, which "
                     f"says nothing of them: {how}")  # fmt: skip
    return notes


def distance(true: HostArray, others: Sequence[HostArray], unit: float) -> HostArray:
    """Return how far controls are from the reference, element by element, as a root mean square.

    Two numbers that are rounded to the same one need not be equal. Each is off by an error of variance (2u)^2 / 12,
    2u being the distance of neighbours, and what is not seen of the distance has the variance of both.
    """
    if not others:
        return np.zeros(true.shape)
    apart = [np.nan_to_num(np.abs(x - true), nan=0.0, posinf=0.0) for x in others]
    unseen: HostArray = (2 * unit * np.nan_to_num(true, nan=0.0, posinf=0.0, neginf=0.0)) ** 2 / 6
    return np.asarray(np.sqrt(np.mean(np.square(apart), axis=0) + unseen))


def shares(true: Mapping[str, HostArray], moved: Mapping[str, HostArray]) -> dict[tuple[int, str], float]:
    """Return by step and kind the median, over tensors, of how far they moved beside their largest entry."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for name, x in true.items():
        if largest(x):
            found[group(name)].append(float(np.sqrt(np.mean(np.square(moved[name])))) / largest(x))
    return defaultdict(float, {key: float(np.median(each)) for key, each in found.items()})


def group(name: str) -> tuple[int, str]:
    """Return step and kind of a value."""
    return split_step(name)[0], kind_of(name)


def control_value(control: Dump, number: int, name: str, true: HostArray) -> HostArray:
    """Return a value of a control run."""
    if name not in control.values:
        raise BadDump(f"control run {number} has no {name}")
    value = control.read(name)[0].astype(np.float64)
    if value.shape != true.shape:
        raise BadDump(f"control run {number} has {name} of shape {value.shape}, the reference of {true.shape}")
    return value


def check_controls(expected: Mapping[str, HostArray], controls: Sequence[Dump]) -> None:
    """Refuse a control run that is not what the reference computes, only rounded otherwise."""
    first = [name for name in expected if kind_of(name) == "gradient" and split_step(name)[0] == 0]
    for number, control in enumerate(controls):
        total = apart = 0.0
        unit = max((UNIT[expected[name].dtype] for name in first if expected[name].dtype in UNIT), default=0.0)
        for name in first:
            total += float(np.sum(np.square(expected[name], dtype=np.float64)))
            apart += float(np.sum(np.square(control.read(name)[0] - expected[name], dtype=np.float64)))
        if not apart <= unit * total:  # as norms: the square root of u, half of the digits
            share = np.sqrt(apart / total) if total else np.inf
            raise BadDump(f"control run {number} is none: its gradients are off by {share:.2%}, which no rounding does")


def in_causal_order(dump: Dump) -> list[str]:
    """Return names by step, then by kind; within a kind as the recorder saw them, or as the file has them."""
    place = {name: i for i, name in enumerate(dump.order or dump.values)}

    def key(name: str) -> tuple[int, int, int]:
        kind = kind_of(name)
        return split_step(name)[0], KINDS.index(kind) if kind in KINDS else -1, place.get(name, len(place))

    return sorted(dump.values, key=key)


def context(expected: Mapping[str, HostArray], candidate: Dump, name: str) -> Context:
    """Return what the causes of a wrong value may be made of."""
    step, short = split_step(name)
    true = expected[name]
    others = {
        key: x for key, x in expected.items()
        if key != name and split_step(key)[0] == step and x.shape == true.shape and x.ndim
    }  # fmt: skip
    unit = UNIT.get(true.dtype, 2.0**-24)
    previous = expected.get(f"step{step - 1}/{short}") if step else None
    return Context(unit, {"ranks": float(candidate.ranks)}, previous=previous, others=others)
