"""How far an honest result may be from the truth.

The truth is computed on one device in one order. An implementation that adds the same numbers in another order, by
other kernels, rounds differently and is no less right. How much that can matter is never guessed; there are four
grounds on which to know it, the firmest first:

===========  ====================================================  =====================================
tier         what is allowed                                       for
===========  ====================================================  =====================================
exact        nothing: no operation rounds, in any order            networks of small integers and ReLU,
             (proved by a pass over magnitudes)                    powers of two
reduction    (W-1) u sum|x|: W terms, in any order                 the collective alone
running      an error carried beside the values, worst case        MLPs with ReLU, SGD, a few steps
             (proved)
statistical  what the reference itself does when every result      transformers, Adam, and where worst
             is shaken by its rounding, times a Student quantile   cases have grown past any use
===========  ====================================================  =====================================

u is the unit roundoff of the type the *candidate* computes in: 2^-24 for float32. See ``running.py`` for the first and
third, ``stochastic.py`` for the last. :func:`spread` is a fifth, for traces of refpar itself in float64: the single
device in other orders, and shaken.

The firmest is not the sharpest. Roundings mostly cancel and worst cases never do, so a running bound is from ten times
to any number of times as wide as the statistical one: it grows with the widths and by a factor of its own in each step.
:func:`allowed` decides for a case as a whole: exact where that is proved; running where no bound of any step exceeds
``SHARE`` of the largest entry of its tensor; else statistical; and it refuses the case where zeros would pass that too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refpar import rng, single
from refpar.case import Case, HostArray, Layout, State, Step, Trace
from refpar.nn.models import initial_value
from refpar.oracle import parts, running
from refpar.oracle.stochastic import UNIT, Library, is_short
from refpar.precision import Precision

Bounds = list[dict[str, Any]]
"""By step: largest absolute error allowed, a number or an array, by the names of :meth:`refpar.case.Step.items`."""

RUNS = 8
CHANCE = 1e-6
"""Of an honest single number to leave :func:`spread`, where its errors are normal; see :func:`factor`."""

FLOOR = 4
"""Roundings that are always allowed, because no other order and no noise may happen to move what they move alike.

Between two right programs a whole tensor may differ by four common factors: the seed of the backward pass is rounded
and its product with the residual, the divisor's reciprocal and the product with that. Each is off by u at most.
"""

SHAKEN_RUNS = 16
QUANTILE = 16.0
"""|Student's t| with 16 degrees of freedom exceeds it with probability 3e-11: once in 30 billion honest numbers.

That is for errors that are normal, as sums of many roundings nearly are. It is not for a ReLU (``activation="relu"``,
MLPs) whose input is nearer to 0 than its error, for that is open or shut as a whole. A crossing that honest runs make
with probability p is seen by none of the 16 and made by the candidate with probability p (1 - p)^16, at most 0.022. An
input of size 1 is that near with a probability of about 20 u, so an honest run in float32 is flagged once in 40 million
inputs of a ReLU, rows times units. Inputs that are exactly 0 do not count: they stay so, see ``stochastic.py``.
"""


class Unbounded(ValueError):
    """A case in which roundings decide, so that no bound on its numbers is worth anything."""


def spread(reference: Trace, *, shaken: bool = True) -> Bounds:
    """Return :func:`factor` times the largest deviation that the single device shows in ``RUNS`` other runs.

    Each has its rows in another order and split, and starts from weights of which every one is off by its last bit
    or not: without that, a step of one row has no other order, and shows nothing. ``shaken``, every result is off by
    its rounding, too (``stochastic.py``): tensor parallelism adds up *inside* a product in another order, which no
    order of rows brings about.

    What happens not to move in so few runs is not for that known without error: at least ``FLOOR`` roundings of the
    tensor's largest entry are allowed, 4u·max|t|. u is the unit roundoff of what the case computes in, and of float64
    for the loss and the norm, which are kept in it.

    All runs begin at the first batch, as the run did that ``reference`` goes on from, so that step k of them is
    step k of the case. A run that skips a step that ``reference`` makes, or the other way round, is another
    computation from there on, and left out: what it is off by is an update, and no rounding.

    A NaN or infinite deviation bounds nothing: there, exact equality of the pattern is asked for.

    Raises
    ------
    Unbounded
        Where fewer than half of the runs have the outcomes of ``reference``: roundings decide there which steps are
        skipped, and no bound on numbers is worth anything. And where the bound of a gradient is none, see
        :func:`check`; of weights and state it may be, for it is one number a tensor: an entry whose gradient is all
        rounding, and which Adam moves by ``lr`` to either side, sets it for all.
    """
    case = reference.case
    runs = []
    for run in range(RUNS):
        library: Any = Library(run)
        xp, other = (library, library.constants(case)) if shaken else (np, case)
        runs.append(single.train(other, split=shuffled(case, run), xp=xp, start=nudged(case, run)).steps)
    bounds: Bounds = []
    for number, truth in enumerate(reference.steps, reference.begun):
        runs = [steps for steps in runs if decided(steps[number]) == decided(truth)]
        if len(runs) < RUNS / 2:
            raise Unbounded(
                f"step {number} of the reference is {truth.outcome!r}, at update {truth.t} and loss scale "
                f"{truth.scale:g}, and only {len(runs)} of {RUNS} runs that round otherwise agree: its numbers have no "
                "bound; keep the case further from an overflow, or give bounds"
            )
        others = [dict(steps[number].items()) for steps in runs]
        bounds.append(
            {
                name: max(
                    factor(len(runs)) * max(deviation(other[name], value) for other in others),
                    FLOOR * kept_unit(case, value) * largest(value),
                )
                for name, value in numbers(truth)
            }
        )
    gradients = [{f"gradient/{name}": g for name, g in step.gradients.items()} for step in reference.steps]
    check(bounds, gradients, factor(RUNS) * math.sqrt(unit_of(case.precision.compute)), reference.begun)
    return bounds


def factor(runs: int) -> float:
    """Return the f such that |Z| exceeds f times the largest of ``runs`` like it with a probability below ``CHANCE``.

    A normal Z falls below z/f in magnitude with a probability of at most sqrt(2/pi) z/f, so all n do where the
    candidate's is z with at most its n-th power, and on average over z with (sqrt(2/pi)/f)^n E|Z|^n. That all are
    measured from a reference that is rounded as well makes it less. 8 runs: f = 8.03; 4: 33.2.
    """
    moment = math.pow(2, runs / 2) * math.gamma((runs + 1) / 2) / math.sqrt(math.pi)  # E|Z|^n
    return math.sqrt(2 / math.pi) * math.pow(moment / CHANCE, 1 / runs)


def check(bounds: Bounds, true: Sequence[Mapping[str, Any]], noise: float, begun: int = 0) -> None:
    """Refuse bounds of the values ``true`` that are none.

    Of a gradient, no entry may be allowed the largest of its tensor; of weights and state, not every entry itself, so
    that zeros would pass. (Where a gradient is zero in theory Adam makes steps of the size of ``lr`` of its roundings:
    the bias of the attention keys, a third of a tensor, goes where it wants, and changes nothing.)

    Parameters
    ----------
    noise : the share of the largest of its kind, in the whole case, that a bound may always be. What is sqrt(u) of it,
        half of the digits, may be all rounding, and is compared absolutely: within sqrt(u), and in a spread, which
        allows the rounding seen so many times, within :func:`factor` sqrt(u): 9e-8 in float64, 0.18 in float16
    begun : the number of the first step

    Raises
    ------
    Unbounded
        With the first of them.
    """
    sizes: dict[str, float] = {}
    for step in true:
        for name, x in step.items():
            if kind_of(name):
                sizes[kind_of(name)] = max(sizes.get(kind_of(name), 0.0), largest(x))
    for number, (step, values) in enumerate(zip(bounds, true, strict=True), begun):
        for name in [name for name in values if name in step and kind_of(name)]:
            x, bound = values[name], step[name]
            most = float(np.max(bound, initial=0.0))
            if most <= noise * sizes[kind_of(name)] or not np.any(x) or not np.isfinite(x).all():
                continue
            if (name.startswith("gradient/") and most >= largest(x)) or not np.any(np.abs(x) > bound):
                raise Unbounded(
                    f"step {number}: {name} has {largest(x):.3g} as its largest entry, and honest results may be off "
                    f"by {most:.3g}, so that roundings decide it: take fewer steps, or data that does not bring the "
                    "input of a ReLU to 0 but for roundings, or a larger eps"
                )


def kind_of(name: str) -> str:
    """Return which tensors of a step are of one size with this: all gradients, weights, buffers of one name."""
    first, _, rest = name.partition("/")
    kinds = {"gradient": first, "parameter": first, "state": rest.rpartition("/")[2]}
    return kinds.get(first, "")


def decided(step: Step) -> tuple[Any, ...]:
    """Return what a step decided, and all steps before it: where two runs differ in it, they are two computations."""
    return step.outcome, step.t, step.scale, step.good


def kept_unit(case: Case, value: Any) -> float:
    """Return the unit roundoff that a value of a step has: single numbers are Python's, in float64."""
    return unit_of(case.precision.compute if isinstance(value, np.ndarray) else "float64")


def nudged(case: Case, run: int) -> dict[str, HostArray]:
    """Return the initial values of ``case``, each of them with its last bit up, down or as it is.

    Small integers stay: what is computed from them is exact, and a ReLU whose input is 0 is not up to roundings.
    """
    values = {}
    unit = unit_of(case.precision.master)
    for name, spec in case.model.build().specs.items():
        value = initial_value(case.seed, name, spec, case.precision.master)
        nudge = 1 + 2 * unit * rng.integers((case.seed, "nudge", run, name), value.shape, -1, 2)
        values[name] = np.where(is_short(value, unit), value, value * nudge)
    return values


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


# --------------------------------------------------------------------------------- for other people's implementations


SHARE = 2.0**-6
"""Of the largest entry of a tensor: a running bound that allows more gives way to the statistical one.

Both hold for honest results, so this decides how much is seen and raises no false alarm. A row lost out of as many as
small cases have, a few dozen, is about that share of a gradient.
"""


@dataclass(frozen=True)
class Allowed:
    """What an honest implementation may be off by.

    Attributes
    ----------
    tier : the ground, see the module's docstring
    steps : by step, largest absolute error, element by element, by name; what is not named is exact
    """

    tier: str
    steps: list[dict[str, HostArray]]


def unit_of(dtype: str) -> float:
    """Return the unit roundoff of a type: half the distance from 1 to the next number."""
    return UNIT[np.dtype(dtype)]


def truth(case: Case) -> Trace:
    """Return the trace of ``case`` in float64, from the initial values that its own type rounds to.

    An exact case in float16 is run in float16: the numbers are the same, but for an overflow, which float64 has not.
    """
    types = case.precision
    if types.compute == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return single.train(case)
    wide = replace(case, precision=Precision(loss_scale=types.loss_scale))
    specs = case.model.build().specs
    start = {name: initial_value(case.seed, name, spec, types.master) for name, spec in specs.items()}
    return single.train(wide, start={name: x.astype(np.float64) for name, x in start.items()})


def everything(case: Case, layout: Layout, trace: Trace, asarray: Callable[[HostArray], Any] = np.asarray) -> list[Any]:
    """Return by step all values of a trace of one device and the pieces of ``layout``, by name, in causal order.

    Parameters
    ----------
    case : whose type the initial values were rounded to; ``trace`` may be of its truth, in float64
    asarray : makes arrays of the library that the pieces are computed with
    """
    start = State.initial(case)
    initial = {name: x.astype(trace.case.precision.compute) for name, x in start.parameters.items()}
    result = []
    for number, step in enumerate(trace.steps):
        weights, scale = parts.before(trace.steps, number, initial, start.scale)
        with np.errstate(over="ignore", invalid="ignore"):  # a step that overflows is among the cases
            pieces = parts.parts(trace.case, layout, number, weights, scale, asarray)
        items = dict(step.items())
        if step.outcome == "overflow":  # which of its numbers are infinite depends on the order of additions
            pieces = {name: x for name, x in pieces.items() if "gradient" not in name}
            items = {name: x for name, x in items.items() if name != "norm" and not name.startswith("gradient/")}
        result.append(parts.in_order(items, pieces))
    return result


def allowed(case: Case, layout: Layout, true: Sequence[Mapping[str, Any]] | None = None) -> Allowed:
    """Return what an honest implementation of ``case``, in its type and in any layout, may be off by.

    Parameters
    ----------
    layout : whose pieces are bounded too, see :mod:`refpar.oracle.parts`
    true : the values, from :func:`everything`; computed where they are not given

    Raises
    ------
    ValueError
        In float16, where the case is not exact.
    Unbounded
        Where neither tier has a bound that is one, see :func:`check`.
    """
    true = everything(case, layout, truth(case)) if true is None else true
    try:
        steps = carried(case, layout, case.precision.compute, true)
    except running.NotCarried as error:
        if case.precision.compute == "float16":
            raise ValueError(f"in float16 only exact networks have a bound, and this case has none: {error}") from None
        return Allowed("statistical", statistical(case, layout, true))
    if not any(e.any() for step in steps for name, e in step.items() if name != "norm"):
        return Allowed("exact", steps)
    # The truth was rounded as well, in float64, and by as much as a candidate in float64 may be.
    double = carried(case, layout, "float64", true)
    steps = [{name: e + own[name] for name, e in step.items()} for step, own in zip(steps, double, strict=True)]
    if not useful(steps, true, float(np.finfo(case.precision.compute).tiny)):
        return Allowed("statistical", statistical(case, layout, true))
    return Allowed("running", steps)


def useful(steps: Bounds, true: Sequence[Mapping[str, Any]], tiny: float) -> bool:
    """Return whether each bound is at most ``SHARE`` of the largest entry of its tensor, or as small as underflow."""
    named = [(e, values[name]) for step, values in zip(steps, true, strict=True) for name, e in step.items()]
    return all(np.max(e, initial=0) <= max(SHARE * largest(x), tiny) for e, x in named)


def carried(case: Case, layout: Layout, dtype: str, true: Sequence[Mapping[str, Any]]) -> Bounds:
    """Return the running error bound of the values ``true`` of a case and of a layout, for a candidate in ``dtype``."""
    net = running.Network.of(case, dtype)
    ends = parts.boundaries(case.model.build(), layout)
    units = [name for name, _ in case.model.build().units]
    with np.errstate(over="ignore", invalid="ignore"):
        steps = running.carry(case, dtype)
        for step, batch in zip(steps, case.batches, strict=True):
            for d, micro_batches in enumerate(parts.cut(layout, len(batch))):
                whole = batch.take([row for rows in micro_batches for row in rows])
                part = net.part(step.weights, whole, step.seed)
                for name, g in part.gradients.items():
                    share = running.divided(running.stored(g, net.kept), step.divisor, net.summed)
                    step.errors[f"dp{d}/gradient/{name}"] = share.error
                for m, rows in enumerate(micro_batches):
                    part = net.part(step.weights, batch.take(rows), step.seed)
                    step.errors[f"dp{d}/micro{m}/loss"] = part.loss.error
                    for unit, y in zip(units, part.outputs, strict=True):
                        if unit in ends:
                            step.errors[f"dp{d}/micro{m}/activation/{unit}"] = y.error
    return [
        {name: np.asarray(e, np.float64) for name, e in step.errors.items() if name in values}
        for step, values in zip(steps, true, strict=True)
    ]


def statistical(case: Case, layout: Layout, true: Sequence[Mapping[str, Any]]) -> Bounds:
    """Return ``QUANTILE`` times the spread that roundings cause, element by element.

    The spread is the root mean square, over ``SHAKEN_RUNS`` runs whose every result is shaken by its rounding, of the
    distance from the truth. An element whose few samples happen to be small is given the median spread of its tensor,
    and the floor is ``FLOOR`` u of the value itself. Elements that no rounding moves (rows of an embedding that no
    token uses) must be exact.

    Raises
    ------
    Unbounded
        See :func:`check`.
    """
    spread = Spread(true)
    for run in range(SHAKEN_RUNS):
        library: Any = Library(run)
        shaken = single.train(library.constants(case), xp=library)
        spread.add(everything(case, layout, shaken, library.asarray))
    bounds = spread.bounds(unit_of(case.precision.compute))
    check(bounds, true, math.sqrt(unit_of(case.precision.compute)))
    return bounds


class Spread:
    """Gathers how far runs are from the truth."""

    def __init__(self, true: Sequence[Mapping[str, Any]]) -> None:
        self.true, self.runs = true, 0
        self.squares: list[dict[str, Any]] = [
            {name: np.zeros(np.shape(x)) for name, x in step.items() if is_rounded(name, x)} for step in true
        ]

    def add(self, run: Sequence[Mapping[str, Any]]) -> None:
        """Take in one run."""
        self.runs += 1
        for squares, values, true in zip(self.squares, run, self.true, strict=True):
            for name in squares:
                squares[name] += (np.asarray(values[name], np.float64) - np.asarray(true[name], np.float64)) ** 2

    def bounds(self, unit: float) -> Bounds:
        """Return what is allowed for a type of that unit roundoff."""
        result = []
        for squares, true in zip(self.squares, self.true, strict=True):
            step = {}
            for name, square in squares.items():
                spread = np.sqrt(square / self.runs)
                typical = np.median(spread) if spread.size else 0.0
                spread = np.where(spread > 0, np.maximum(spread, typical), 0.0)  # 0: not by luck, in so many runs
                step[name] = np.maximum(QUANTILE * spread, FLOOR * unit * np.abs(true[name]))
            result.append(step)
        return result


def is_rounded(name: str, value: Any) -> bool:
    """Return whether a value is a rounded number: counts, flags and the scale are exact."""
    return isinstance(value, np.ndarray) or name.rpartition("/")[2] in ("loss", "norm")


def reduction(terms: Sequence[HostArray], dtype: str) -> tuple[HostArray, HostArray]:
    """Return the exact sum of one array a rank, and what a reduction in ``dtype``, in any order, may be off by.

    The bound is (W-1) u sum|x|, and nothing where the terms are multiples of a power of two and so small that no
    partial sum rounds. The sum itself is rounded once, to float64.
    """
    stack = np.stack([np.asarray(x, np.float64) for x in terms])
    flat = stack.reshape(len(terms), -1)
    exact = np.array([math.fsum(column) for column in flat.T]).reshape(stack.shape[1:])
    sizes: Any = np.abs(stack).sum(axis=0)
    grain = running.grain_of(stack)
    if grain is not None and (sizes < 2.0 ** (running.TYPES[dtype].digits + min(grain, 900))).all():
        return exact, np.zeros(exact.shape)
    unit = 2.0**-24 if dtype == "float16" else unit_of(dtype)
    error = (len(terms) - 1) * unit * sizes
    if dtype == "float16":  # what was summed in float32 is rounded once more, errors and all
        error = error + unit_of(dtype) * (np.abs(exact) + error)
    return exact, error + 2.0**-53 * np.abs(exact)
