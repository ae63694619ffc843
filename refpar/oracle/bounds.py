"""How far an honest result may be from the truth.

The truth is computed on one device in one order. An implementation that adds the same numbers in
another order rounds differently and is no less right. How much that can matter is not guessed: the
single device itself is run in other orders, and what *it* shows is what others are allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refpar import rng, single
from refpar.case import Case, Step, Trace

Bounds = list[dict[str, float]]
"""By step: largest absolute error allowed, by the names of :meth:`refpar.case.Step.items`."""

RUNS = 8
FACTOR = 8


def spread(reference: Trace) -> Bounds:
    """Return ``FACTOR`` times the largest deviation that the single device shows over ``RUNS`` row orders and splits.

    The floor, for tensors that happen not to move, is 4u·max|t|: u is the unit roundoff, and the result of
    a handful of operations cannot be expected to keep the last bit of its largest entry.

    A NaN or infinite deviation bounds nothing: there, exact equality of the pattern is asked for.
    """
    case = reference.case
    runs = [single.train(case, split=shuffled(case, run)) for run in range(RUNS)]
    unit = 2.0 ** {"float16": -11, "float32": -24, "float64": -53}[case.precision.compute]
    bounds: Bounds = []
    for number, truth in enumerate(reference.steps):
        others = [dict(run.steps[number].items()) for run in runs]
        bounds.append(
            {
                name: max(FACTOR * max(deviation(other[name], value) for other in others), 4 * unit * largest(value))
                for name, value in numbers(truth)
            }
        )
    return bounds


def shuffled(case: Case, run: int) -> single.Split:
    """Return a split of each step's rows into a random number of parts, in random order."""

    def split(step: int, rows: int) -> Sequence[Sequence[int]]:
        order = np.argsort(rng.uniform((case.seed, "order", run, step), (rows,)))
        parts = int(rng.integers((case.seed, "parts", run, step), (), 1, rows + 2))
        return [part.tolist() for part in np.array_split(order, parts)]

    return split


def numbers(step: Step) -> Iterator[tuple[str, Any]]:
    """Yield the items of a step that are rounded numbers: not counts, flags and the scale, which are exact."""
    return ((name, value) for name, value in step.items() if isinstance(value, np.ndarray) or name in ("loss", "norm"))


def deviation(got: Any, expected: Any) -> float:
    """Return the largest absolute difference of two numbers or arrays, at places where both are finite."""
    a, b = (np.asarray(x, np.float64) for x in (got, expected))
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))


def largest(x: Any) -> float:
    """Return the largest finite magnitude in ``x``, 0 where there is none."""
    a = np.abs(np.asarray(x, np.float64))
    return float(np.max(a, where=np.isfinite(a), initial=0.0))
