"""Name the mistake: replay a case with every known one, and see whose wrong numbers are the candidate's.

That a number is wrong says little about why. But the ways to be wrong are not many, and they have been shipped
before: :mod:`refpar.oracle.mistakes` has them as objects. So the case is trained once for each of them, on real ranks
in the candidate's layout, with the mistake made on purpose and nobody holding replicas together, and what comes out
is held to the candidate as if it were the truth::

    candidate    wrong, we know not why      loss 2.31   gradient 0.27 ...
    replay       tokens_counted_per_rank     loss 2.31   gradient 0.27 ...     41 of 41 values within the bound
                 divided_by_ranks_too        loss 2.31   gradient 0.03 ...      3 of 41
                 ...

What is said is "matches", never "is": other code may get to the same numbers by another way. All that match are
listed; :data:`SAME` says which of them cannot be told apart, and where.

How near is near enough? An honest implementation of the *mistake* rounds like an honest one of the truth, but its
numbers may be larger, and what they do to the weights carries on. So a tensor's bound is that of the truth at its
widest entry, times ``UNMEASURED`` and the factor by which the replay's numbers have outgrown the true ones, in this
step or before; and at least ``ROUNDINGS`` roundings of its largest entry, because a run that was exact without the
mistake need not be exact with it. What lies between two mistakes is larger by orders of magnitude, as a rule;
:class:`Explanation` says by how many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from refpar.case import Case, HostArray, Layout, State, Step, Trace
from refpar.comm.communicator import Communicator, Ranks
from refpar.comm.errors import RankError
from refpar.comm.processes import World
from refpar.nn import checkpoint
from refpar.nn.models import initial_value
from refpar.optim import squared_norm
from refpar.oracle import bounds, compare, mistakes
from refpar.oracle.bounds import unit_of
from refpar.oracle.mistakes import CATALOGUE, Mistake
from refpar.parallel import assembly, hybrid
from refpar.precision import Precision

UNMEASURED = 8
"""What a replay may be off by is the truth's bound, scaled, and this much wider: its own was not measured.

It is a choice, and no bound: to measure it would take sixteen more replays of every mistake. It gives the wrong
computation three bits more of rounding error, beside its size, than the right one has. No verdict hangs on it: that the
numbers are wrong has been said before. Were it too small a mistake would go unnamed, and were it too large two would be
named for one. Between two mistakes lie factors of a thousand and more, which every explanation says.
"""
ROUNDINGS = 64
"""Each term of a sum that is not exact any more rounds once, by u of a partial sum: that is one a rank and micro-batch.

64 are more than the product of both in any named case; a partial sum is taken to be no larger than the largest entry.
"""

REPORTED = ("count", "loss", "norm")
"""Values that nothing but a report need depend on."""

TIMEOUT = 20.0
"""Seconds that a rank waits for another: some mistakes end in nobody answering."""

Values = Mapping[str, Any]
"""By name, such as ``step0/gradient/blocks.0.mlp.up.weight``; ``outcome`` a word, or its number."""

SAME: dict[frozenset[str], str] = {}
"""Mistakes whose numbers are the same, and where that is so."""


def same(where: str, *names: str) -> None:
    """Note that the mistakes ``names`` have the same numbers ``where``."""
    SAME[frozenset(names)] = where


same("where every bucket, and the count, divide by the ranks", "tokens_counted_per_rank", "tail_not_reduced")
same(
    "with one replica in a pipeline: only its first stage counts tokens, so the last one divides by none",
    "tokens_counted_per_rank",
    "mean_of_rank_means",
    "tail_not_reduced",
)
same("without a pipeline", "reduced_before_the_last_micro_batch", "every_micro_batch_taken_for_the_last")
same("without tensor parallelism", "norm_of_own_shards", "each_stage_clips_by_its_own_norm", "copies_not_clipped")
same(
    "where what the one counts twice is all that the other does",
    "replicas_counted_in_norm",
    "replicated_counted_on_every_slice",
    "tied_weight_counted_on_both_stages",
)


@dataclass(frozen=True)
class Replay:
    """How near the numbers of one mistake come to the candidate's.

    Attributes
    ----------
    name : of the mistake
    compared, matched : values that both have, and how many of them agree
    reported : how many of those are counts, losses and norms that the candidate has right, and the mistake has wrong
    distance : of the value furthest off, in bounds
    silent : whether the mistake changes nothing in this case and layout, or nothing that was compared
    problem : why it could not be replayed: refpar's own ranks notice it
    """

    name: str
    compared: int = 0
    matched: int = 0
    reported: int = 0
    distance: float = math.inf
    silent: bool = False
    problem: str = ""

    @property
    def matches(self) -> bool:
        """Whether every value agrees."""
        return self.compared > 0 and self.matched + self.reported == self.compared and not self.silent


@dataclass(frozen=True)
class Explanation:
    """What is known of a wrong run.

    Attributes
    ----------
    replays : every mistake that was tried, nearest first
    advice : where to look next, if none matches
    """

    replays: tuple[Replay, ...]
    advice: str = ""

    @property
    def matches(self) -> tuple[Replay, ...]:
        """The mistakes whose numbers are the candidate's."""
        return tuple(r for r in self.replays if r.matches)

    @property
    def next_best(self) -> Replay | None:
        """The nearest of those that do not match."""
        return next((r for r in self.replays if not r.matches and not r.silent and r.compared), None)

    def __str__(self) -> str:
        lines = []
        for match in self.matches:
            mistake = CATALOGUE[match.name]
            lines += [
                f"matches {match.name} ({', '.join(mistake.bugs)}) on {match.matched} of {match.compared} values"
                + (
                    f"; counts, losses and norms are right where they differ ({match.reported})"
                    if match.reported
                    else ""
                ),
                f"  {mistake.what}",
            ]
        names = {match.name for match in self.matches}
        lines += [
            f"  {' and '.join(sorted(group))}: {where}" for group, where in SAME.items() if len(group & names) > 1
        ]
        other = self.next_best
        if lines and other is not None:
            lines.append(f"  next best, {other.name}, is off by {bounds_off(other.distance)}")
        if not lines:
            tried = sum(not (r.silent or r.problem) for r in self.replays)
            lines.append(f"matches none of the {tried} known mistakes that change anything in this case and layout")
            if other is not None:
                lines.append(f"  nearest is {other.name}, with {other.matched} of {other.compared} values")
            lines.append(f"  {self.advice}")
        return "\n".join(lines)


def bounds_off(distance: float) -> str:
    """Return a distance in words."""
    return f"10^{math.floor(math.log10(distance))} bounds" if 1 <= distance < math.inf else "any number of bounds"


def explain(
    got: Values,
    case: Case,
    layout: Layout,
    expected: Values,
    bound: Values,
    *,
    dtype: str | None = None,
    names: Collection[str] | None = None,
    world: Ranks | None = None,
    first: str = "",
) -> Explanation:
    """Replay ``case`` with every mistake, and say whose numbers are ``got``.

    Parameters
    ----------
    got : what the candidate computed, or any part of it
    case, layout : what it was meant to compute, and how it was split
    expected, bound : the truth by name, and what an honest implementation may be off by
    dtype : what the candidate computes in; by default the type of the case
    names : mistakes to try; all of the catalogue by default
    world : standing ranks, as many as the layout has; started for the purpose by default
    first : name of the first value that is wrong, for the advice

    Raises
    ------
    ValueError
        Where a value of ``got`` is not among ``expected``, so that nothing can be compared.
    """
    if world is None:
        with World(layout.ranks, timeout=TIMEOUT) as own:
            return explain(got, case, layout, expected, bound, dtype=dtype, names=names, world=own, first=first)
    known = {name: outcome(got[name]) for name in got if name in expected}
    if not known:
        raise ValueError(f"nothing to compare: of {len(got)} values none has a name that the truth has too")
    true = {name: outcome(expected[name]) for name in expected}
    unit = unit_of(dtype or case.precision.compute)
    wide, start = widened(case)
    replays = []
    for name in CATALOGUE if names is None else names:
        if names is None and not possible(CATALOGUE[name], case, layout):
            replays.append(Replay(name, silent=True))
            continue
        try:
            values = replay(name, wide, layout, start, world)
        except (RankError, AssertionError, ValueError) as error:
            replays.append(Replay(name, problem=str(error).partition("\n")[0]))
        else:
            replays.append(held(name, known, values, true, bound, unit))
    order = sorted(replays, key=lambda r: (not r.matches, bool(r.problem), r.silent, -r.matched, r.distance))
    return Explanation(tuple(order), advice(first))


def possible(mistake: Mistake, case: Case, layout: Layout) -> bool:
    """Return whether a mistake can be made here at all: one of tensor parallelism needs slices, and so on."""
    needed = mistake.layout
    for axis in ("tp", "pp", "zero", "micro_batches"):
        none = 0 if axis == "zero" else 1
        if getattr(needed, axis) > none and getattr(layout, axis) == none:
            return False
    if needed.ranks > 1 and layout.ranks == 1:
        return False
    if needed.recompute != "none" and layout.recompute == "none":
        return False
    scaled = case.precision.loss_scale is not None
    return (scaled or not mistake.scaled) and (bool(case.frozen) or not mistake.frozen)


def trace(candidate: Trace, reference: Trace, *, world: Ranks | None = None, allowed: bounds.Bounds | None = None,
          names: Collection[str] | None = None) -> Explanation:  # fmt: skip
    """Explain a trace of a float64 case, in its own layout, that ``reference`` shows to be wrong.

    Parameters
    ----------
    allowed : the bounds that the two were compared by; by default :func:`refpar.oracle.bounds.spread`
    """
    allowed = bounds.spread(reference) if allowed is None else allowed
    verdict = compare.compare(candidate, reference, bounds=allowed)
    first = verdict.first.name if verdict.first else ""
    limits = {f"step{n}/{name}": x for n, step in enumerate(allowed) for name, x in step.items()}
    return explain(
        events(candidate), candidate.case, candidate.layout, events(reference), limits,
        world=world, names=names, first=first,
    )  # fmt: skip


def events(of: Trace) -> dict[str, Any]:
    """Return all values of a trace by name; of a step that overflows, what is a number in any order of additions."""
    values: dict[str, Any] = {}
    for number, step in enumerate(of.steps):
        for name, value in step.items():
            if step.outcome != "overflow" or not (name == "norm" or name.startswith("gradient/")):
                values[f"step{number}/{name}"] = value
    return values


def widened(case: Case) -> tuple[Case, dict[str, HostArray]]:
    """Return the case in float64, and the initial values that its own type rounds to: as the truth is computed."""
    types = case.precision
    specs = case.model.build().specs
    start = {name: initial_value(case.seed, name, spec, types.master) for name, spec in specs.items()}
    if types.compute == "float16":  # exact, but for an overflow, which float64 has not
        return case, start
    wide = replace(case, precision=Precision(loss_scale=types.loss_scale))
    return wide, {name: x.astype(np.float64) for name, x in start.items()}


# Replaying


def replay(name: str, case: Case, layout: Layout, start: Mapping[str, HostArray], world: Ranks) -> dict[str, list[Any]]:
    """Return all values of a run with a mistake, by name: those that ranks disagree on as each of them has it.

    A mistake that is made when a run is resumed is made after the first half of the steps, which are right.
    """
    begin = State.initial(case, start)
    before: list[Step] = []
    if CATALOGUE[name].resumed:
        half = replace(case, batches=case.batches[: len(case.batches) // 2])
        if not half.batches:
            raise ValueError("a run of one step cannot be resumed")
        first = hybrid.run(half, layout, world=world, start=begin)
        before, begin = first.steps, State.after(first)
    ranks = world.run(train, name, case, layout, begin)
    alternatives: dict[str, list[Any]] = {}
    for number, steps in enumerate(zip(*(rank.steps for rank in ranks), strict=True), len(before)):
        for field_ in ("count", "loss", "norm", "outcome", "scale", "good", "t"):
            seen = [outcome(getattr(step, field_)) for step in steps]
            alternatives[f"step{number}/{field_}"] = list(dict.fromkeys(seen))
    agreed = [dataclasses.replace(rank, steps=[speak(*pair) for pair in zip(rank.steps, ranks[0].steps, strict=True)])
              for rank in ranks]  # fmt: skip
    made = assembly.collect(case, layout, agreed)
    values = events(replace(made, steps=[*before, *made.steps]))
    return {key: alternatives.get(key, [outcome(value)]) for key, value in values.items()}


def speak(own: assembly.RankStep, first: assembly.RankStep) -> assembly.RankStep:
    """Return a rank's pieces with the numbers of the first rank: a wrong run need not agree on them."""
    pieces = {"gradients": own.gradients, "parameters": own.parameters, "state": own.state}
    return dataclasses.replace(first, **pieces)  # type: ignore[arg-type]


def train(comm: Communicator, name: str, case: Case, layout: Layout, begin: State) -> assembly.RankTrace:
    """Run this rank's part of a case with a mistake, whatever becomes of replicas and of what is recomputed."""
    with mistakes.applied(name), nothing_compared(), np.errstate(all="ignore"):
        return hybrid.train(comm, case, layout, begin, strict=False)


@contextlib.contextmanager
def nothing_compared() -> Iterator[None]:
    """Let a recomputed output differ from the first one, as it does in other people's code."""
    right = checkpoint.same
    checkpoint.same = lambda a, b: True
    try:
        yield
    finally:
        checkpoint.same = right


# Judging


def held(
    name: str, got: Values, values: Mapping[str, Sequence[Any]], true: Values, bound: Values, unit: float
) -> Replay:
    """Hold the candidate to the replay of one mistake.

    Values that a right and a wrong run have in common are compared too: a mistake that explains the loss and would
    have spoiled a gradient that is right is not what happened. But a count, a loss or a norm that is right says only
    that it is reported from somewhere else than from where it is used.
    """
    compared = matched = reported = 0
    distance, growth, silent = 0.0, 1.0, True
    for key, expected in true.items():
        if key not in got:
            continue
        compared += 1
        if key not in values:  # such as the gradients of a step that only the wrong run skips
            distance, silent = math.inf, False
            continue
        own = outgrown(values[key][0], expected)
        if key.partition("/")[2] not in REPORTED:  # what nothing depends on makes nothing else larger
            growth = max(growth, own)
        limit = UNMEASURED * largest(bound.get(key, 0.0)) * max(growth, own)
        floor = ROUNDINGS * unit * largest(values[key][0]) if is_float(values[key][0]) else 0.0
        off = min(distance_of(got[key], value, max(limit, floor)) for value in seen_as(key, values, true))
        right = distance_of(got[key], expected, largest(bound.get(key, 0.0))) <= 1
        if off > 1 and right and key.partition("/")[2] in REPORTED:
            reported += 1
        else:
            distance = max(distance, off)
            matched += off <= 1
        silent = silent and distance_of(expected, values[key][0], max(limit, floor)) <= 1
    return Replay(name, compared, matched, reported, distance, silent)


def seen_as(key: str, values: Mapping[str, Sequence[Any]], true: Values) -> list[Any]:
    """Return what a value of a replay may be reported as, where its ranks do not agree on one.

    A loss may be divided by the right count, and a norm be that of all gradients, whatever each rank goes on with.
    """
    seen = list(values[key])
    step, _, name = key.partition("/")
    if name == "loss" and true.get(f"{step}/count"):
        counts = values.get(f"{step}/count", [])
        seen += [loss * own / true[f"{step}/count"] for loss in values[key] for own in counts]
    if name == "norm" and len(seen) > 1:
        gradients = [x[0] for other, x in values.items() if other.startswith(f"{step}/gradient/")]
        seen.append(math.sqrt(sum(squared_norm(np.asarray(g)) for g in gradients)))
    return seen


def distance_of(got: Any, wrong: Any, limit: float) -> float:
    """Return how far two values are apart, in units of ``limit``."""
    if np.shape(got) != np.shape(wrong):
        return math.inf
    a, b = np.asarray(got, np.float64), np.asarray(wrong, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    worst = float(error.max(initial=0.0))
    return worst / limit if limit else (math.inf if worst else 0.0)


def outgrown(wrong: Any, right: Any) -> float:
    """Return how many times larger the largest entry of a wrong value is than that of the right one."""
    true = largest(right)
    return largest(wrong) / true if true and is_float(right) else 1.0


def largest(x: Any) -> float:
    """Return the largest finite magnitude in ``x``, 0 where there is none."""
    return bounds.largest(x)


def is_float(x: Any) -> bool:
    """Return whether a value is a rounded number, or an array of them."""
    return np.asarray(x).dtype.kind == "f"


def outcome(value: Any) -> Any:
    """Return a value, an outcome as its number in goldens."""
    return ("updated", "overflow", "no tokens").index(value) if isinstance(value, str) else value


# Where none matches


@dataclass(frozen=True)
class Hint:
    """Where to look when a value of some kind is the first that is wrong."""

    kind: str
    text: str = field(compare=False)


HINTS = (
    Hint("count", "which targets the mask lets through; rows that are taken twice, or by nobody; the sum over ranks"),
    Hint("micro", "this micro-batch alone, on this replica: its rows, its dropout masks, the activations of the stages "
         "before it, in order"),
    Hint("dp", "this replica alone: what it adds up over its micro-batches, before any reduction"),
    Hint("loss", "the forward pass: initial values, rows, dropout. Dump dp0/micro0/loss and the activations between "
         "stages (see refpar golden --format): the first of those that is wrong names the place"),
    Hint("gradient", "the backward pass of this layer, and what it is handed: layers after it are right. Dump each "
         "replica's share, dp0/gradient/NAME: if those are right, the reduction is not"),
    Hint("norm", "the gradients are right and their norm is not: what is counted twice (held by several ranks), what "
         "is left out (held by one), what is averaged"),
    Hint("outcome", "who hears of an overflow, and whether it is an overflow: inf and NaN, in any micro-batch"),
    Hint("scale", "the loss scale after this step: growth, back-off, and the counter between them"),
    Hint("good", "the growth counter of the loss scale: back to 0 after an overflow, and after each growth"),
    Hint("t", "the number of updates: skipped steps do not count"),
    Hint("state", "gradients and norm are right, and the optimizer's state is not: clipping, moments, their bias "
         "correction, a buffer that was not cleared, or not kept"),
    Hint("parameter", "gradients and optimizer state are right, and the weights are not: weight decay, learning rate, "
         "or updated shards that do not reach everybody"),
)  # fmt: skip


def advice(first: str) -> str:
    """Return where to look, given the name of the first value that is wrong."""
    words = [word for word in first.split("/") if not (word.startswith("step") and word[4:].isdigit())]
    if not words:
        return "look at the first value that is wrong: what comes after it is mostly its consequence"
    kind = words[0]
    if kind.startswith("dp") and kind[2:].isdigit():
        kind = "micro" if len(words) > 1 and words[1].startswith("micro") else "dp"
    texts = {hint.kind: hint.text for hint in HINTS}
    return f"look next at {'/'.join(words)}: {texts.get(kind, 'it is the first value that is wrong')}"
