"""The lines of what layers keep for the backward pass, at the end of the forward passes and in the worst backward pass.

In flight are M micro-batches for GPipe, min(M, K - stage) for 1F1B (``schedule.py``); interleaved with v chunks
a stage, ``2 (K - stage - 1) + (v - 1) K + 1`` chunks of 1/v of it (Korthikanti et al. 2022, section 4.2.3;
Narayanan et al. 2021, figure 4).

On its way back a micro-batch loses its units one by one, last first, and what is recomputed for a unit is there as
well, which calculators forget. So the worst moment need not be the first, and each unit is looked at::

    forward    [b0 b1 b2 loss]  x  in flight
    backward   [b0 b1 b2]  [b0 b1]  [b0]   of one of them, each with what its last unit needs;  the others whole

A checkpoint is kept whole on every tensor-parallel rank: 2sbh, not 2sbh/t (the latter costs an all-gather a
layer more). ZeRO section 6.1 has "33 GB" of checkpoints for a 100B model, and "60 GB" elsewhere; its formula, 2sbh
a layer, gives 67 GB.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from refpar import split
from refpar.plan.ledger import Line
from refpar.plan.models import Model
from refpar.plan.recipes import Recipe
from refpar.plan.segments import Entry, recomputed, segments, stored
from refpar.plan.setups import Place, Setup, tokens_of, units_of
from refpar.plan.states import leaving
from refpar.plan.tensors import Grid, Network, Tensor, Unit
from refpar.plan.units import size


@dataclass(frozen=True)
class Part:
    """One segment on its way forward and back.

    Attributes
    ----------
    kept : from its forward pass to its backward pass
    again : in addition, while it runs backward
    leaving : its largest weight gradient, on its way
    """

    kept: list[Entry]
    again: list[Entry]
    leaving: list[Line]


def activations(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the lines of one rank."""
    weigher = Weigher(model, setup, recipe, place)
    parts = parts_of(net, setup, recipe, place)
    loss: list[Entry] = [("", tensor) for tensor in net.loss_kept] if place.p == setup.pp - 1 else []
    if setup.chunks > 1:
        yield from interleaved(parts, loss, weigher, place)
        return
    everything = [*(entry for part in parts for entry in part.kept), *loss]
    forward, candidates = moments(setup, place)
    yield from lines(everything, forward, weigher, "forward")

    def bytes_with(others: Mapping[int, int], rows: int) -> int:
        waiting = sum(weigher.bytes(everything, r) * number for r, number in others.items())
        return waiting + worst(parts, rows, weigher)[1]

    others, rows = max(candidates, key=lambda candidate: bytes_with(*candidate))
    last = worst(parts, rows, weigher)[0]
    partial = [entry for part in parts[: last + 1] for entry in part.kept]
    yield from lines(everything, others, weigher, "backward")
    yield from lines(partial, {rows: 1}, weigher, "backward", "until its backward pass is over")
    yield from lines(parts[last].again, {rows: 1}, weigher, "backward", "recomputed, while it runs backward")
    yield from parts[last].leaving


def parts_of(net: Network, setup: Setup, recipe: Recipe, place: Place) -> list[Part]:
    """Return the segments of a stage."""
    units = units_of(net, setup, place.p)
    found = segments(units, net, setup)
    behind = next_input(net, units)
    inputs = [*(segment.units[0].kind.input for segment in found[1:]), behind]
    parts = [
        Part(stored(segment, setup), recomputed(segment, after, setup), list(leaving(segment, setup, recipe, place)))
        for segment, after in zip(found, inputs, strict=True)
    ]
    if setup.accounting == "refpar" and behind is not None and found[-1].wrapped:
        # A checkpoint of refpar keeps its output, for comparison. Elsewhere it is the next unit's input, and kept by
        # that; here the next unit is on another stage.
        output = parts[-1].again.pop()
        parts[-1].kept.append(output)
    return parts


def next_input(net: Network, units: Sequence[Unit]) -> Tensor | None:
    """Return what a stage hands on: the input of the unit behind it."""
    behind = net.units.index(units[-1]) + 1
    return net.units[behind].kind.input if behind < len(net.units) else None


def worst(parts: Sequence[Part], rows: int, weigher: Weigher) -> tuple[int, int]:
    """Return the segment whose backward pass needs most, and the bytes of all that is there then."""
    running, best = 0, (-1, 0)
    for i, part in enumerate(parts):
        running += weigher.bytes(part.kept, rows)
        there = running + weigher.bytes(part.again, rows) + sum(line.bytes for line in part.leaving)
        best = max(best, (i, there), key=lambda found: (found[1], found[0]))
    return best


class Weigher:
    """Weighs what is kept of micro-batches of so many rows, on one rank."""

    def __init__(self, model: Model, setup: Setup, recipe: Recipe, place: Place) -> None:
        self.setup, self.recipe, self.t, self.tokens = setup, recipe, place.t, tokens_of(model, setup)
        self.known: dict[tuple[Tensor, int], int] = {}

    def grid(self, rows: int) -> Grid:
        """Return the sizes that tensors of so many rows have on this rank."""
        return Grid(rows, self.tokens, self.setup.tp, self.t, self.setup.sequence_parallel)

    def dtype(self, tensor: Tensor) -> str:
        """Return the type in which a tensor is kept."""
        kinds = {"activation": self.recipe.activations, "sum": self.recipe.accumulator}
        return kinds.get(tensor.dtype, tensor.dtype)

    def bytes(self, entries: Iterable[Entry], rows: int) -> int:
        """Return the bytes of entries together."""
        total = 0
        for _, tensor in entries:
            key = tensor, rows
            if key not in self.known:
                self.known[key] = size(tensor.elements(self.grid(rows)), self.dtype(tensor))
            total += self.known[key]
        return total


def in_flight(setup: Setup, p: int) -> Fraction:
    """Return how many micro-batches stage ``p`` keeps at most; with chunks, in units of a whole stage's."""
    M, K, v = setup.micro_batches, setup.pp, setup.chunks
    if setup.schedule == "gpipe":
        return Fraction(M)
    if v == 1:
        return Fraction(min(M, K - p))
    return Fraction(min(M * v, 2 * (K - p - 1) + (v - 1) * K + 1), v)


def moments(setup: Setup, place: Place) -> tuple[dict[int, int], list[tuple[dict[int, int], int]]]:
    """Return what is in flight at the end of the forward passes, and candidates for the worst backward pass.

    The first micro-batches have the most rows, so for 1F1B that is the first one. GPipe starts back with the
    last, which may be smaller than those before it, so the last of the larger ones is looked at as well.

    Returns
    -------
    how many micro-batches of how many rows; and the same for those that wait, with the rows of the one at work
    """
    n, M = int(in_flight(setup, place.p)), setup.micro_batches
    most, least = setup.rows(place.d, 0), setup.rows(place.d, M - 1)
    longer = M  # micro-batches that have the most rows
    if most > least:
        mine = len(split.part(setup.batch, setup.dp, place.d // setup.cp))
        longer = mine % M

    def span(start: int, stop: int) -> dict[int, int]:
        large = max(0, min(stop, longer) - start)
        counts = {most: large, least: stop - start - large} if most > least else {most: stop - start}
        return {rows: k for rows, k in counts.items() if k}

    forward = span(0, n)
    if setup.schedule == "gpipe":
        return forward, [(span(0, m), setup.rows(place.d, m)) for m in sorted({M - 1, longer - 1})]
    return forward, [(span(1, n), most)]


def lines(
    entries: Iterable[Entry], counts: dict[int, int], weigher: Weigher, moment: str, lifetime: str = ""
) -> Iterator[Line]:
    """Yield entries as lines, equal ones together."""
    for rows, number in counts.items():
        words = lifetime or (f"forward to backward, {number} in flight" if number > 1 else "forward to backward")
        for (pattern, tensor), copies in Counter(entries).items():
            yield line_of(pattern, tensor, rows, copies * number, weigher, moment, words)


def line_of(pattern: str, tensor: Tensor, rows: int, copies: int, weigher: Weigher, moment: str, words: str) -> Line:
    """Return one line of activations."""
    grid = weigher.grid(rows)
    shape = tensor.local(grid)
    if tensor.parallel and grid.tp == 1:
        shape, copies = (0,), 0
    whole = grid.tp == 1 or (tensor.axis is None and not (tensor.sequence and grid.sequence_parallel))
    sharded = "whole" if whole else f"tp {grid.tp}" if tensor.axis is not None else f"sequence {grid.tp}"
    return Line("activations", tensor.name.replace("*", pattern), "", shape, weigher.dtype(tensor), copies, sharded,
                words, (moment,))  # fmt: skip


def interleaved(parts: Sequence[Part], loss: Sequence[Entry], weigher: Weigher, place: Place) -> Iterator[Line]:
    """Yield the lines of a stage that holds several chunks: blocks by the chunk, the rest by the micro-batch."""
    setup = weigher.setup
    rows = setup.largest_micro_batch
    of_others = Fraction(min(setup.micro_batches, setup.pp - place.p))
    live = {"blocks.*": in_flight(setup, place.p), "head": Fraction(1)}
    everything = Counter(entry for part in parts for entry in part.kept)
    for moment in ("forward", "backward"):
        for (pattern, tensor), copies in everything.items():
            number = math.ceil(copies * live.get(pattern, of_others))
            yield line_of(pattern, tensor, rows, number, weigher, moment, "forward to backward")
    yield from lines(loss, {rows: 1}, weigher, "forward")
    work = max(parts, key=lambda part: weigher.bytes(part.again, rows) + sum(line.bytes for line in part.leaving))
    yield from lines(work.again, {rows: 1}, weigher, "backward", "recomputed, while it runs backward")
    yield from work.leaving
