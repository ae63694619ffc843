"""The battery: what each operation of an adapter is held to, one check a claim.

A check draws an example, calls the adapter, and raises :class:`Wrong` with the first number that is not what it must
be. Where integers are small enough the answer is exact in any order, and nothing is allowed; where it is not, what is
allowed is derived beside it. ``u`` is the unit roundoff of the type of the arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from refpar import rng, single
from refpar.case import Case, Layout, Trace
from refpar.conformance import problems
from refpar.conformance.adapter import Subject
from refpar.conformance.problems import Array, Draw, Limits
from refpar.nn.loss import CrossEntropy
from refpar.oracle import bounds, compare
from refpar.precision import LossScale, next_scale


class Wrong(AssertionError):
    """A number of the adapter's that is not what it must be."""


@dataclass
class Example:
    """The example that a check is at, for whoever writes it down.

    Attributes
    ----------
    inputs, expected, bound, got : arrays by name, for a reduction
    case, layout : of a training run
    first : name of the first value of it that is wrong
    ranks, dtype : of a reduction
    """

    inputs: dict[str, Array]
    expected: dict[str, Array]
    bound: dict[str, Array]
    got: dict[str, Array]
    case: Case | None = None
    layout: Layout | None = None
    first: str = ""
    ranks: int = 1
    dtype: str = "float64"


@dataclass(frozen=True)
class Check:
    """One claim about one operation.

    Attributes
    ----------
    name : of the check
    operation : that it needs
    claim : in a sentence
    body : ``body(subject, draw)``; returns an :class:`Example` where it can be written as a golden, before it judges
    """

    name: str
    operation: str
    body: Callable[[Subject, Draw, list[Example]], None]

    @property
    def claim(self) -> str:
        """What is claimed, in a sentence."""
        return (self.body.__doc__ or "").strip().partition("\n")[0]


CHECKS: dict[str, Check] = {}


def check(operation: str) -> Callable[[Any], Any]:
    """Enter the decorated function as a check of ``operation``, under its own name."""

    def enter(body: Any) -> Any:
        CHECKS[body.__name__] = Check(body.__name__, operation, body)
        return body

    return enter


# Judging


def hold(got: Any, expected: Any, allowed: Any, what: str) -> None:
    """Raise where ``got`` has another shape than ``expected``, or is off by more than ``allowed``."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise Wrong(f"{what} has shape {got.shape}, must be {expected.shape}")
    a, b = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        bad = ~((a == b) | (np.abs(a - b) <= allowed) | (np.isnan(a) & np.isnan(b)))
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.ndim else ()
        limit = float(np.broadcast_to(allowed, bad.shape)[at])
        place = f"[{', '.join(str(int(i)) for i in at)}]" if at else ""
        raise Wrong(
            f"{what}{place} is {got[at]}, must be {expected[at]}"
            + (f" within {limit:.3g}" if limit else "")
            + f"; {int(bad.sum())} of {bad.size} wrong"
        )


def hold_each(got: Sequence[Any], expected: Sequence[Any], allowed: Any, what: str) -> None:
    """Hold the results of all ranks."""
    if len(got) != len(expected):
        raise Wrong(f"there are {len(got)} results of {what}, must be {len(expected)}: one a rank")
    for rank, (own, right) in enumerate(zip(got, expected, strict=True)):
        hold(own, right, allowed, f"rank {rank}: {what}")


def hold_alike(got: Sequence[Any], what: str) -> None:
    """Raise where ranks do not have the same bits."""
    for rank, own in enumerate(got):
        if np.asarray(own).tobytes() != np.asarray(got[0]).tobytes():
            raise Wrong(f"rank {rank}: {what} has other bits than on rank 0: replicas would drift apart")


def unit(dtype: str) -> float:
    """Return the unit roundoff of a type."""
    return bounds.unit_of(dtype)


# Collectives


def reduction(subject: Subject, draw: Draw, seen: list[Example], values: Callable[..., Array], name: str) -> None:
    """Hold a sum over ranks to the exact one."""
    ranks = problems.ranks(draw, subject.ranks)
    dtype = draw(st.sampled_from([d for d in subject.dtypes if d != "float16"]), label="dtype")
    shape = problems.shape(draw)
    arrays = problems.order(draw, [values(rank, shape, dtype) for rank in range(ranks)])
    kept = [x.copy() for x in arrays]
    exact, allowed = bounds.reduction(arrays, dtype)
    got = subject.call("all_reduce", ranks, arrays)
    seen.append(
        Example(
            {f"rank{rank}/x": np.ascontiguousarray(x) for rank, x in enumerate(kept)},
            {"sum/x": exact},
            {"sum/x": allowed},
            {"sum/x": np.asarray(got[0], np.float64)},
            ranks=ranks,
            dtype=dtype,
        )
    )
    hold_each(got, [exact] * ranks, allowed, name)
    hold_alike(got, name)
    if not subject.is_spmd("all_reduce") and not getattr(subject.adapter, "in_place", False):
        hold_each(arrays, kept, 0, "the input, after the call,")


@check("all_reduce")
def all_reduce_of_integers(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """The sum of small integers is exact, on every rank, for every shape and memory order; inputs are left alone."""
    reduction(subject, draw, seen, problems.integers, "the sum")


@check("all_reduce")
def all_reduce_of_reals(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """The sum of W numbers is within (W-1) u sum|x| of the exact one, and the same bits on every rank."""
    reduction(subject, draw, seen, problems.reals, "the sum")


@check("all_reduce")
def all_reduce_of_halves(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Halves are summed in float32 and rounded once: a finite sum does not overflow on the way (horovod#1699)."""
    if "float16" not in subject.dtypes:
        return
    ranks = problems.ranks(draw, subject.ranks)
    signs = draw(st.lists(st.sampled_from([1, -1]), min_size=ranks, max_size=ranks), label="signs")
    if abs(sum(signs)) > 1:
        return  # the sum itself does not fit
    arrays = [np.array([40000.0 * sign, float(rank)], np.float16) for rank, sign in enumerate(signs)]
    exact = np.sum([x.astype(np.float64) for x in arrays], axis=0)
    hold_each(subject.call("all_reduce", ranks, arrays), [exact] * ranks, unit("float16") * abs(exact), "the sum")


@check("all_reduce_max")
def all_reduce_max_is_exact(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """The maximum over ranks is exact, negative numbers and infinities among them."""
    ranks = problems.ranks(draw, subject.ranks)
    shape = problems.shape(draw, most=2)
    arrays = [-abs(problems.reals(rank, shape, "float64")) - 1 for rank in range(ranks)]
    if draw(st.booleans(), label="an infinity"):
        arrays[-1] = np.full(shape, -np.inf)
    hold_each(subject.call("all_reduce_max", ranks, arrays), [np.max(arrays, axis=0)] * ranks, 0, "the maximum")


@check("reduce_scatter")
def reduce_scatter_of_integers(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Rank r gets elements counts[0] + … + counts[r-1] onward of the sum, exactly; parts may differ and be empty."""
    ranks = problems.ranks(draw, subject.ranks)
    counts = problems.parts(draw, ranks, "counts")
    arrays = [problems.integers(rank, (sum(counts),), "float64") for rank in range(ranks)]
    expected = np.split(np.sum(arrays, axis=0), np.cumsum(counts)[:-1])
    hold_each(subject.call("reduce_scatter", ranks, arrays, counts), expected, 0, "its part of the sum")


@check("all_gather")
def all_gather_in_order(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Every rank gets everybody's array, in the order of ranks; lengths may differ and be zero."""
    ranks = problems.ranks(draw, subject.ranks)
    lengths = problems.parts(draw, ranks, "lengths")
    arrays = [problems.integers(rank, (n,), "float64") for rank, n in enumerate(lengths)]
    hold_each(subject.call("all_gather", ranks, arrays), [np.concatenate(arrays)] * ranks, 0, "what was gathered")


@check("broadcast")
def broadcast_from_any_root(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Every rank gets the root's array, whichever rank that is."""
    ranks = problems.ranks(draw, subject.ranks)
    root = draw(st.integers(0, ranks - 1), label="root")
    shape = problems.shape(draw, most=2)
    arrays = problems.order(draw, [problems.integers(rank, shape, "float64") for rank in range(ranks)])
    expected = [arrays[root].copy()] * ranks
    hold_each(subject.call("broadcast", ranks, arrays, root), expected, 0, "what was broadcast")


@check("all_to_all")
def all_to_all_transposes(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Rank r gets row r of everybody's array, in the order of ranks."""
    ranks = problems.ranks(draw, subject.ranks)
    shape = (ranks, *problems.shape(draw, most=2))
    arrays = [problems.integers(rank, shape, "float64") for rank in range(ranks)]
    expected = [np.stack([x[rank] for x in arrays]) for rank in range(ranks)]
    hold_each(subject.call("all_to_all", ranks, [x.copy() for x in arrays]), expected, 0, "what was exchanged")


# Tensor parallelism


def linear(subject: Subject, draw: Draw, axis: int) -> tuple[int, list[Array], list[Array], Array, Array, list[int]]:
    """Draw the factors of a product that is cut along the outputs (axis 1) or the inputs (axis 0)."""
    ranks = problems.ranks(draw, subject.ranks)
    least = 0 if getattr(subject.adapter, "empty_slices", False) else 1
    lengths = problems.parts(draw, ranks, "widths of the slices", least=least)
    if getattr(subject.adapter, "even_slices", False):
        lengths = [lengths[0]] * ranks
    rows, other = draw(st.integers(0, 4), label="rows"), draw(st.integers(1, 4), label="the other width")
    cut = sum(lengths)
    inputs, outputs = (other, cut) if axis else (cut, other)
    dtype = draw(st.sampled_from([d for d in subject.dtypes if d != "float16"]), label="dtype")
    x, dy = problems.small((1, "x"), (rows, inputs), dtype), problems.small((2, "dy"), (rows, outputs), dtype)
    weight = problems.small((3, "weight"), (inputs, outputs), dtype)
    bias = problems.small((4, "bias"), (outputs,), dtype)
    ends = np.cumsum(lengths)[:-1]
    return ranks, [x, dy], [weight, bias], weight, bias, list(ends)


@check("column_linear")
def column_linear_and_its_gradients(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """A rank's columns of y = x W + b; dx is summed over ranks and whole on each; all exact, slices of any width."""
    ranks, (x, dy), _, weight, bias, ends = linear(subject, draw, axis=1)
    weights, biases, dys = np.split(weight, ends, axis=1), np.split(bias, ends), np.split(dy, ends, axis=1)
    y, dx, dweight, dbias = subject.call("column_linear", ranks, [x] * ranks, weights, biases, dys)
    hold_each(y, np.split(x @ weight + bias, ends, axis=1), 0, "y")
    hold_each(dx, [dy @ weight.T] * ranks, 0, "dx")
    hold_each(dweight, np.split(x.T @ dy, ends, axis=1), 0, "dweight")
    hold_each(dbias, np.split(dy.sum(axis=0), ends), 0, "dbias")


@check("row_linear")
def row_linear_and_its_gradients(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """y = sum over ranks of x_r W_r, and b *once*, whole on each rank; db is whole on each; all exact (slapo#10)."""
    ranks, (x, dy), _, weight, bias, ends = linear(subject, draw, axis=0)
    xs, weights = np.split(x, ends, axis=1), np.split(weight, ends, axis=0)
    y, dx, dweight, dbias = subject.call("row_linear", ranks, xs, weights, [bias] * ranks, [dy] * ranks)
    hold_each(y, [x @ weight + bias] * ranks, 0, "y")
    hold_each(dx, np.split(dy @ weight.T, ends, axis=1), 0, "dx")
    hold_each(dweight, np.split(x.T @ dy, ends, axis=0), 0, "dweight")
    hold_each(dbias, [dy.sum(axis=0)] * ranks, 0, "dbias")


@check("vocabulary_cross_entropy")
def vocabulary_cross_entropy_and_its_gradient(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """The sum over the tokens of the mask, whole on each rank, and a rank's columns of its gradient.

    An exponential is off by 2u and by the u·|x| of its rounded argument; V of them, their sum, a logarithm and a
    difference make (V + 8)(1 + |x|) u a token at most, to first order; twice that for both sides.
    """
    ranks = problems.ranks(draw, subject.ranks)
    lengths = problems.parts(draw, ranks, "words of the slices", least=1)
    if getattr(subject.adapter, "even_slices", False):
        lengths = [lengths[0]] * ranks
    tokens, vocabulary = draw(st.integers(0, 5), label="tokens"), sum(lengths)
    size = draw(st.sampled_from([1.0, 30.0, 700.0]), label="size of the logits")
    seed = draw(st.integers(0, 99), label="seed")
    logits = (rng.uniform((seed, "logits"), (tokens, vocabulary)) * 2 - 1) * size
    mask = rng.uniform((seed, "mask"), (tokens,)) < draw(st.sampled_from([1.0, 0.5, 0.0]), label="share")
    targets = np.where(mask, rng.integers((seed, "targets"), (tokens,), 0, vocabulary), -100)
    total, kept = CrossEntropy().forward(logits[None], targets[None], mask[None])
    gradient = CrossEntropy().backward(kept, 1.0)[0]
    ends = np.cumsum(lengths)[:-1]
    got = subject.call(
        "vocabulary_cross_entropy", ranks, np.split(logits, ends, axis=1), [targets] * ranks, [mask] * ranks
    )
    each = 2 * (vocabulary + 8) * (1 + 2 * size) * unit("float64")
    hold_each(got[0], [np.asarray(total)] * ranks, each * (tokens + abs(float(total))), "the sum of losses")
    hold_each(got[1], np.split(gradient, ends, axis=1), each, "its gradient")


# Clipping, scaling, recomputing


@check("clip")
def clip_by_the_global_norm(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """One norm over all ranks, whole parameters counted once; above the limit all gradients shrink by one factor.

    The limit over the norm, or as PyTorch has it over the norm + 1e-6 (``clip_eps`` of the adapter); never enlarged. A
    sum of n squares and its root are off by (n + 3) u, relatively; one more product for each clipped element.
    """
    ranks = problems.ranks(draw, subject.ranks)
    lengths = problems.parts(draw, ranks, "lengths of the shards")
    whole = draw(st.integers(0, 3), label="elements of a whole parameter")
    shards = [problems.integers(rank, (n,), "float64") for rank, n in enumerate(lengths)]
    replicated = problems.integers(ranks, (whole,), "float64")
    squares = float(np.sum(np.concatenate([*shards, replicated]) ** 2))
    norm = float(np.sqrt(squares))
    limit = draw(st.sampled_from([1.0, 0.5 * norm, 2 * norm, 1e6]).filter(lambda x: x > 0), label="max_norm")
    gradients = [{"sharded": x, "replicated": replicated.copy()} for x in shards]
    got, clipped = subject.call("clip", ranks, gradients, limit)
    relative = (sum(lengths) + whole + 8) * unit("float64")
    hold_each(got, [np.float64(norm)] * ranks, relative * norm, "the norm")
    factor = min(1.0, limit / (norm + getattr(subject.adapter, "clip_eps", 0.0))) if norm else 1.0
    for name in ("sharded", "replicated"):
        expected = [factor * (x if name == "sharded" else replicated) for x in shards]
        for rank, own in enumerate(clipped):
            hold(own[name], expected[rank], 2 * relative * abs(expected[rank]), f"rank {rank}: the {name} gradient")


@check("loss_scale")
def loss_scale_moves_everywhere_alike(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """An overflow on any rank lowers the scale on all; after ``interval`` good steps in a row it grows."""
    ranks = problems.ranks(draw, subject.ranks)
    interval = draw(st.integers(1, 3), label="interval")
    steps = draw(st.integers(1, 8), label="steps")
    flags = st.lists(st.booleans(), min_size=steps, max_size=steps)
    overflows = [draw(flags, label=f"overflows of rank {rank}") for rank in range(ranks)]
    rule = LossScale(initial=2.0**10, backoff=0.5, growth=2.0, interval=interval, floor=2.0**-100, cap=2.0**100)
    scale, good = rule.initial, 0
    scales, goods = [], []
    for step in range(steps):
        scale, good = next_scale(rule, scale, good, any(own[step] for own in overflows))
        scales.append(scale)
        goods.append(good)
    got = subject.call("loss_scale", ranks, rule, overflows)
    hold_each(got[0], [np.array(scales)] * ranks, 0, "the scale after each step")
    hold_each(got[1], [np.array(goods)] * ranks, 0, "the growth counter after each step")


@check("checkpoint")
def checkpoint_changes_no_bit(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """y = dropout(relu(x W)), and the gradients of its sum, have the same bits with and without recomputation."""
    rows, inputs, outputs = (draw(st.integers(1, 6), label=n) for n in ("rows", "inputs", "outputs"))
    rate = draw(st.sampled_from([0.0, 0.5]), label="rate")
    seed = draw(st.integers(0, 99), label="seed")
    x, weight = (
        problems.small((1, "x"), (rows, inputs), "float64"),
        problems.small((2, "w"), (inputs, outputs), "float64"),
    )
    plain, again = (subject.call("checkpoint", 1, x, weight, rate, seed, recompute) for recompute in (False, True))
    for name, first, second in zip(("y", "dx", "dweight"), plain, again, strict=True):
        hold(second, first, 0, f"{name} with recomputation")
    if not rate:
        hold(plain[0], np.maximum(x @ weight, 0), 0, "y")
        hold(plain[2], x.T @ (x @ weight > 0), 0, "dweight")


# Whole training


@check("run")
def run_equals_one_device(subject: Subject, draw: Draw, seen: list[Example]) -> None:
    """Every gradient of every step, and whatever else the adapter tells, is that of one device."""
    limits = getattr(subject.adapter, "limits", Limits())
    case, layout = problems.problem(draw, limits)
    if layout.ranks not in subject.ranks:
        return
    reason = subject.adapter.refuses(case, layout) if hasattr(subject.adapter, "refuses") else None
    if reason:
        return
    result = subject.call("run", layout.ranks, case, layout)
    with contextlib.suppress(bounds.Unbounded):  # where roundings decide there is nothing to hold it to
        judge(case, layout, result, seen)


def judge(case: Case, layout: Layout, result: Any, seen: list[Example]) -> compare.Comparison:
    """Hold what ``run`` returned to one device; raise :class:`Wrong` with the first number that is wrong."""
    steps = values_of(result)
    if case.precision.compute == "float64":
        truth = single.train(case)
        kind, limits = "spread", bounds.spread(truth)
    else:
        truth = bounds.truth(case)
        allowed = bounds.allowed(case, layout)
        kind, limits = allowed.tier, allowed.steps
    named = {f"step{n}/{name}": np.asarray(x) for n, step in enumerate(steps) for name, x in step.items()
             if name != "outcome"}  # fmt: skip
    seen.append(Example({}, {}, {}, named, case, layout))
    trained = [name for name in case.model.build().specs if name not in case.frozen_names]
    compared, first = 0, None
    found = []
    if len(steps) != len(case.batches):
        raise Wrong(f"run returned {len(steps)} steps, must be {len(case.batches)}")
    for number, (step, true) in enumerate(zip(steps, truth.steps, strict=True)):
        missing = [n for n in trained if f"gradient/{n}" not in step and f"parameter/{n}" not in step]
        if missing:
            raise Wrong(f"step {number} has neither gradient/{missing[0]} nor parameter/{missing[0]}")
        expected = dict(true.items())
        for name in step:
            if name not in expected:
                raise Wrong(f"step {number} has a value {name!r}: there is no such name")
        for name, right in expected.items():
            if name in step and not (true.outcome == "overflow" and (name == "norm" or name.startswith("gradient/"))):
                compared += 1
                divergence, _ = compare.judge(number, name, step[name], right, limits[number].get(name, 0.0))
                if divergence is not None:
                    found.append(divergence)
                    first = first or divergence
    if first is not None:
        seen[-1].first = first.name
        raise Wrong(f"{layout}: {first}")
    return compare.Comparison(compared, 0.0, 0.0, kind, found)


def values_of(result: Any) -> list[Mapping[str, Any]]:
    """Return the values of each step, of a trace or of what is as good as one."""
    if isinstance(result, Trace):
        return [dict(step.items()) for step in result.steps]
    return [dict(step) for step in result]
