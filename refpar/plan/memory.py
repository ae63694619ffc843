"""The ledger of one rank: every byte is a named line.

A line says which tensor it is, its shape as this rank holds it, its type, how many of it there are, how it is
sharded, and when it is alive. Totals are sums of lines, and nothing else::

    weights        whole; at ZeRO 3 what this rank owns
    gradients      whole until they are reduced; what this rank owns from ZeRO 2 on
    optimizer      master weights and moments: whole, or what this rank owns from ZeRO 1 on
    buffers        a gradient between its layer and the main gradients; at ZeRO 2 and 3 what waits for its owners;
                   at ZeRO 3 the weights of the unit at work
    activations    what layers keep for the backward pass, for each micro-batch in flight

A rank peaks at one of three moments, and different lines are alive in each:

=========  ==================================================================================================
forward    the last forward pass before the first backward pass: every micro-batch in flight is kept whole,
           the logits of one among them
backward   one micro-batch on its way back: without its logits, with what is recomputed for it, with
           gradients not yet reduced
step       the optimizer's: no activations
=========  ==================================================================================================

In flight are M micro-batches for GPipe, min(M, K - stage) for 1F1B (``schedule.py``); interleaved with v chunks
a stage, ``2 (K - stage - 1) + (v - 1) K + 1`` chunks of 1/v of it (Korthikanti et al. 2022, section 4.2.3;
Narayanan et al. 2021, figure 4).

Recomputation keeps a block's input and drops the rest; the block at work is there whole *as well*, which
calculators forget. The input is kept whole on every tensor-parallel rank: 2sbh, not 2sbh/t (the latter costs
an all-gather a layer more). ZeRO section 6.1 has "33 GB" of checkpoints for a 100B model, and "60 GB" elsewhere;
its formula, 2sbh a layer, gives 67 GB.

Eight peaks measured with Megatron-LM on B200 devices (SimuMax v1.2, 28 to 87 GiB) come out within 2 %, with nothing
fitted. Not on the ledger: gradients of activations on their way, workspaces of kernels, fragmentation, the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from refpar import split
from refpar.nn.checkpoint import segment_length
from refpar.parallel import data
from refpar.plan.models import Bare, Grid, Model, Network, Tensor, Unit
from refpar.plan.recipes import Recipe
from refpar.plan.setups import Place, Setup, check, distinct, network_of, tokens_of, units_of
from refpar.plan.units import size

PARTS = ("weights", "gradients", "optimizer", "buffers", "activations")
MOMENTS = ("forward", "backward", "step")
BETWEEN = "between"
ALWAYS = (*MOMENTS, BETWEEN)


@dataclass(frozen=True)
class Line:
    """One entry.

    Attributes
    ----------
    part : of :data:`PARTS`
    tensor : its name; ``blocks.*`` stands for each block of this stage
    copy : which of the tensor's copies: ``"master"``, ``"m"``, ...; empty for activations
    shape : of one copy, as this rank holds it
    dtype : of its elements
    copies : how many there are
    sharded : by what it is split, or ``"whole"``
    lifetime : in words
    alive : the moments at which it counts
    """

    part: str
    tensor: str
    copy: str
    shape: tuple[int, ...]
    dtype: str
    copies: int
    sharded: str
    lifetime: str
    alive: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return size(math.prod(self.shape), self.dtype) * self.copies


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds.

    Attributes
    ----------
    rank, place : which one
    lines : everything
    """

    rank: int
    place: Place
    lines: tuple[Line, ...] = field(repr=False)

    def at(self, moment: str, *parts: str) -> int:
        """Return the bytes alive at a moment, of the named parts or of all."""
        return sum(line.bytes for line in self.lines if moment in line.alive and (not parts or line.part in parts))

    @cached_property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(MOMENTS, key=self.at)

    @cached_property
    def peak(self) -> int:
        """Most bytes at once."""
        return self.at(self.moment)

    @property
    def held(self) -> int:
        """Bytes kept from step to step."""
        return self.at(BETWEEN)

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer while gradients are accumulated."""
        return self.at("backward", "weights", "gradients", "optimizer")

    @property
    def activations(self) -> int:
        """Most bytes that layers keep for the backward pass at once."""
        return max(self.at(moment, "activations") for moment in MOMENTS)

    def parts(self, moment: str | None = None) -> dict[str, int]:
        """Return the bytes of each part at a moment, by default that of the peak."""
        return {part: self.at(moment or self.moment, part) for part in PARTS}


@lru_cache(maxsize=1024)
def most_loaded(model: Model, setup: Setup, recipe: Recipe) -> RankMemory:
    """Return the rank that needs the most memory: the first one of the stage that does."""
    check(model, setup)
    kinds = distinct(network_of(model, setup), setup)
    ranks = (of_rank(model, setup, recipe, setup.rank(Place(p, 0, 0))) for p in kinds)
    return max(ranks, key=lambda rank: rank.peak)


def by_stage(model: Model, setup: Setup, recipe: Recipe) -> list[RankMemory]:
    """Return the most loaded rank of each stage."""
    return [of_rank(model, setup, recipe, setup.rank(Place(p, 0, 0))) for p in range(setup.pp)]


def of_rank(model: Model, setup: Setup, recipe: Recipe, rank: int) -> RankMemory:
    """Return the ledger of one rank.

    Raises
    ------
    ValueError
        Where the setup cannot run the model.
    """
    check(model, setup)
    place, net = setup.place(rank), network_of(model, setup)
    lines = (*states(net, model, setup, recipe, place), *activations(net, model, setup, recipe, place))
    return RankMemory(rank, place, lines)


# Weights, gradients, optimizer, and the buffers in which they travel


def states(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the lines of everything that belongs to parameters."""
    units, N = units_of(net, setup, place.p), setup.sharing
    grid = Grid(0, 0, setup.tp, place.t)
    for pattern, tensor, copies in shared_names(units):
        shape = tensor.local(grid)
        owned = (len(split.part(math.prod(shape), N, place.d)),)
        by_tp = [f"tp {setup.tp}"] if setup.tp > 1 and tensor.axis is not None else []
        for_whole = ", ".join(by_tp) or "whole"
        for_owned = ", ".join([*by_tp, f"dp {N}"])

        def line(
            part: str, name: str, dtype: str, mine: bool, shape: tuple[int, ...] = shape,
            owned: tuple[int, ...] = owned, pattern: str = pattern, copies: int = copies,
            words: tuple[str, str] = (for_whole, for_owned),
        ) -> Line:  # fmt: skip
            return Line(part, pattern, name, owned if mine else shape, dtype, copies, words[mine], "always", ALWAYS)

        yield line("weights", "weights", recipe.weights, setup.zero == 3)
        for name, dtype in recipe.gradients.items():
            yield line("gradients", name, dtype, setup.zero >= 2)
        for name, dtype in recipe.optimizer.items():
            yield line("optimizer", name, dtype, setup.zero >= 1)
        if recipe.overhead:
            scales = round((math.prod(owned) if setup.zero else math.prod(shape)) * recipe.overhead)
            yield Line("optimizer", pattern, "scales", (scales,), "int8", copies, "as m and v", "always", ALWAYS)
    travels = N > 1 or (setup.accounting == "refpar" and setup.zero >= 2)
    if travels and not isinstance(model, Bare):  # of a bare number of parameters no unit is known
        yield from buffers(net, units, setup, recipe, place)


def buffers(net: Network, units: Sequence[Unit], setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield what is there only on its way from rank to rank."""
    sizes, groups = local_sizes(units, setup, place), handled(units, net, setup)
    of_groups = [sum(sizes[name] for name in group) for group in groups]
    if setup.zero <= 1 and setup.accounting != "refpar":
        return  # buckets are views of the gradients, which are there already
    if setup.zero <= 1:
        most = max((sum(sizes[name] for name in group) for group in gradient_buckets(groups, sizes, setup)), default=0)
        yield Line("buffers", "bucket of gradients", "", (most,), recipe.travels, 1, "whole", "while it is reduced",
                   ("backward",))  # fmt: skip
        return
    most = max(of_groups)
    if setup.accounting != "refpar":  # which waits until the unit is done, however large
        most = max(largest_pending([sizes[name] for name in reversed(group)], setup.bucket) for group in groups)
    yield Line("buffers", "gradients not yet with their owners", "", (most,), recipe.travels, 1, "whole",
               "backward pass of a unit", ("backward",))  # fmt: skip
    if setup.zero == 3:
        most = max(sum(of_groups[i : i + 1 + setup.prefetch]) for i in range(len(groups)))
        what = "weights of the unit at work" + (f" and of {setup.prefetch} ahead" if setup.prefetch else "")
        yield Line(
            "buffers", what, "", (most,), recipe.weights, 1, "whole", "while the unit runs", ("forward", "backward")
        )


def shared_names(units: Sequence[Unit]) -> list[tuple[str, Tensor, int]]:
    """Return the parameters of a stage by pattern, with how many of each: blocks have the same ones."""
    counted: dict[tuple[str, Tensor], int] = {}
    first: dict[str, None] = {}
    for unit in units:
        for tensor in unit.kind.parameters:
            if "*" not in tensor.name and tensor.name in first:
                continue  # a tied weight, held once
            first[unit.parameter(tensor)] = None
            key = tensor.name.replace("*", pattern_of(unit)), tensor
            counted[key] = counted.get(key, 0) + 1
    return [(pattern, tensor, copies) for (pattern, tensor), copies in counted.items()]


def pattern_of(unit: Unit) -> str:
    """Return ``blocks.*`` for a block, and the name of any other unit."""
    return "blocks.*" if unit.kind.name == "block" else unit.name


def local_sizes(units: Sequence[Unit], setup: Setup, place: Place) -> dict[str, int]:
    """Return the elements this rank holds, or would hold, of each parameter of its stage."""
    grid = Grid(0, 0, setup.tp, place.t)
    known: dict[Tensor, int] = {}
    sizes = {}
    for unit in units:
        for tensor in unit.kind.parameters:
            if tensor not in known:
                known[tensor] = tensor.elements(grid)
            sizes[unit.parameter(tensor)] = known[tensor]
    return sizes


def handled(units: Sequence[Unit], net: Network, setup: Setup) -> list[dict[str, Tensor]]:
    """Return the parameters that gather, and arrive, together: those of a unit; in refpar, of a segment."""
    if setup.accounting != "refpar":
        return [unit.parameters for unit in units]
    return [
        {name: tensor for unit in segment.units for name, tensor in unit.parameters.items()}
        for segment in segments(units, net, setup)
    ]


def gradient_buckets(groups: Sequence[dict[str, Tensor]], sizes: dict[str, int], setup: Setup) -> list[list[str]]:
    """Return the names that are reduced together, in the order in which they become final."""
    layers: Any = [("", Specs(group)) for group in groups]
    if setup.zero == 0:
        return data.bucketed(layers, sizes, setup.bucket)
    return data.buckets((name for names in data.final_names(layers) for name in names), sizes, setup.bucket)


@dataclass(frozen=True)
class Specs:
    """What :mod:`refpar.parallel` wants to know of a layer: its parameters, and along which axis they are split."""

    specs: dict[str, Tensor]


def largest_pending(sizes: Iterable[int], bucket: int) -> int:
    """Return the most elements that wait at once, where a bucket is emptied before it would overflow."""
    waiting = most = 0
    for n in sizes:
        waiting = n if waiting and waiting + n > bucket else waiting + n
        most = max(most, waiting)
    return most


# Activations


@dataclass(frozen=True)
class Segment:
    """Neighbouring units that are run, and recomputed, together."""

    units: tuple[Unit, ...]
    wrapped: bool


def segments(units: Sequence[Unit], net: Network, setup: Setup) -> list[Segment]:
    """Return the segments of a stage; the model's first and last unit are not recomputed (``checkpoint.py``)."""
    if setup.recompute in ("none", "selective"):
        return [Segment((unit,), False) for unit in units]
    keep = {net.units[0].name, net.units[-1].name}
    inner = [unit for unit in units if unit.name not in keep]
    k = segment_length(setup.recompute, len(inner))
    groups = [Segment(tuple(inner[i : i + k]), True) for i in range(0, len(inner), k)]
    before = [Segment((unit,), False) for unit in units[:1] if unit.name in keep]
    after = [Segment((unit,), False) for unit in units[1:] if unit.name in keep]
    return [*before, *groups, *after]


Entry = tuple[str, Tensor]
"""The pattern of a unit's name, and what is kept of it."""


def stored(segment: Segment, setup: Setup) -> list[Entry]:
    """Return what a segment keeps from its forward pass on."""
    first = segment.units[0]
    entries = own(first, setup) if not segment.wrapped else []
    if first.kind.input is not None:
        x = first.kind.input
        if segment.wrapped and setup.accounting != "refpar":
            x = x.whole
        entries = [(pattern_of(first), x), *entries]
    return entries


def own(unit: Unit, setup: Setup) -> list[Entry]:
    """Return what a unit keeps beside its input."""
    dropped = setup.recompute == "selective"
    return [(pattern_of(unit), tensor) for tensor in unit.kind.kept if not (tensor.core and dropped)]


def recomputed(segment: Segment, after: Tensor | None, setup: Setup) -> list[Entry]:
    """Return what is there in addition while a segment runs backward."""
    if segment.wrapped:
        inner = [(pattern_of(unit), unit.kind.input) for unit in segment.units[1:] if unit.kind.input is not None]
        entries = inner + [entry for unit in segment.units for entry in own(unit, setup)]
        if setup.accounting == "refpar" and after is not None:  # the output, for comparison
            entries.append((pattern_of(segment.units[-1]), after))
        return entries
    if setup.recompute == "selective":
        return [(pattern_of(unit), t) for unit in segment.units for t in unit.kind.kept if t.core]
    return []


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


def activations(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the lines of what layers keep, at the end of the forward passes and in the worst backward pass."""
    units = units_of(net, setup, place.p)
    parts, weigher = segments(units, net, setup), Weigher(model, setup, recipe, place)
    kept = [stored(part, setup) for part in parts]
    inputs = [part.units[0].kind.input for part in parts]
    again = [
        recomputed(part, after, setup)
        for part, after in zip(parts, [*inputs[1:], _next_input(net, units)], strict=True)
    ]
    last = place.p == setup.pp - 1
    loss: list[Entry] = [("", tensor) for tensor in net.loss_kept] if last else []
    output: list[Entry] = []
    if setup.accounting == "refpar" and not last and parts[-1].wrapped:
        output = again[-1][-1:]  # a checkpoint keeps its output; elsewhere it is the next unit's input
        again[-1] = again[-1][:-1]
    # From the output of segment i on, what is recomputed shares the input of segment i + 1.
    everything = [entry for entries in kept for entry in entries] + output + loss

    on_their_way = [list(leaving(part, setup, recipe, place)) for part in parts]

    def worst(rows: int) -> tuple[int, int]:
        """Return the segment whose backward pass needs most, and the bytes."""
        running, best = 0, (-1, 0)
        for i, entries in enumerate(kept):
            running += weigher.bytes(entries, rows)
            extra = running + weigher.bytes(again[i], rows) + sum(line.bytes for line in on_their_way[i])
            if i == len(kept) - 1:
                extra += weigher.bytes(output, rows)
            if extra >= best[1]:
                best = i, extra
        return best

    if setup.chunks > 1:
        yield from interleaved(everything, again, loss, weigher, place)
        yield from max(on_their_way, key=lambda found: sum(line.bytes for line in found))
        return
    forward, candidates = moments(setup, place)
    yield from lines(everything, forward, weigher, "forward")
    full = {rows: weigher.bytes(everything, rows) for others, rows in candidates for rows in (*others, rows)}
    others, rows = max(candidates, key=lambda c: sum(full[r] * n for r, n in c[0].items()) + worst(c[1])[1])
    segment = worst(rows)[0]
    yield from lines(everything, others, weigher, "backward")
    partial = [entry for entries in kept[: segment + 1] for entry in entries]
    partial += output if segment == len(kept) - 1 else []
    yield from lines(partial, {rows: 1}, weigher, "backward", "until its backward pass is over")
    yield from lines(again[segment], {rows: 1}, weigher, "backward", "recomputed, while it runs backward")
    yield from on_their_way[segment]


def leaving(segment: Segment, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the largest weight gradient of a segment, as it leaves its layer in the type of activations, and as it is
    cast to that of the gradients to which it is added. From ZeRO 2 on that is among what waits for its owners."""
    if setup.accounting == "refpar" or setup.zero >= 2 or segment.units[0].kind.name == "model":
        return
    grid = Grid(0, 0, setup.tp, place.t)
    tensors = [(pattern_of(unit), tensor) for unit in segment.units for tensor in unit.kind.parameters]
    pattern, tensor = max(tensors, key=lambda entry: entry[1].elements(grid))
    for dtype in dict.fromkeys((recipe.activations, recipe.travels)):
        yield Line("buffers", f"{tensor.name.replace('*', pattern)}: its gradient", "", tensor.local(grid), dtype, 1,
                   f"tp {setup.tp}" if setup.tp > 1 and tensor.axis is not None else "whole",
                   "from the layer to the main gradients", ("backward",))  # fmt: skip


def _next_input(net: Network, units: Sequence[Unit]) -> Tensor | None:
    """Return what the stage hands on: the input of the unit behind it."""
    names = [unit.name for unit in net.units]
    behind = names.index(units[-1].name) + 1
    return net.units[behind].kind.input if behind < len(names) else None


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
        grouped: dict[Entry, int] = {}
        for entry in entries:
            grouped[entry] = grouped.get(entry, 0) + 1
        words = lifetime or (f"forward to backward, {number} in flight" if number > 1 else "forward to backward")
        for (pattern, tensor), copies in grouped.items():
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


def interleaved(
    everything: Sequence[Entry], again: Sequence[Sequence[Entry]], loss: Sequence[Entry], weigher: Weigher, place: Place
) -> Iterator[Line]:
    """Yield the lines of a stage that holds several chunks: blocks by the chunk, the rest by the micro-batch."""
    setup = weigher.setup
    rows, chunks = setup.largest_micro_batch, in_flight(setup, place.p)
    grouped: dict[Entry, int] = {}
    for entry in everything:
        grouped[entry] = grouped.get(entry, 0) + 1
    work = max(again, key=lambda entries: weigher.bytes(entries, rows), default=[])
    for moment in ("forward", "backward"):
        for (pattern, tensor), copies in grouped.items():
            if (pattern, tensor) in loss or pattern == "head":
                if moment == "backward" and (pattern, tensor) in loss:
                    continue
                live = Fraction(1)
            elif pattern == "blocks.*":
                live = chunks
            else:
                live = Fraction(min(setup.micro_batches, setup.pp - place.p))
            yield line_of(pattern, tensor, rows, math.ceil(copies * live), weigher, moment, "forward to backward")
    for pattern, tensor in work:
        yield line_of(pattern, tensor, rows, 1, weigher, "backward", "recomputed, while it runs backward")
