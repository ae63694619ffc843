"""What one rank sends in a step: messages, elements and bytes, by group and operation, as the ledger counts them.

======  =============================================================================  ====================
group   what                                                                           elements a rank
======  =============================================================================  ====================
dp      ZeRO 0: all-reduce of gradients; 1: their reduce-scatter and an all-gather of  2 psi (N-1)/N
        weights; 2: the reduce-scatter every micro-batch;                              (M+1) psi (N-1)/N
        3: weights gathered for each unit, forward and backward, every micro-batch     3 M psi (N-1)/N
tp      4 all-reduces of an activation a block and micro-batch, 6 with recomputation;  8 bsh (t-1)/t
        1 of the embedding, 1 of the head, 3 numbers a token for the loss
pp      an activation forward and its gradient back over each boundary                 bsh each
tied    the gradient of a weight that two stages hold                                  V h (1/t)
world   count, loss, norm and flag of refpar itself                                    2 (1 + 3)
======  =============================================================================  ====================

psi is what the rank holds after tp and pp. ZeRO section 7 gives 2 psi and 3 psi for one micro-batch; with M of
them stages 2 and 3 send more, which is why pipelines combine with stage 1. The Ultra-Scale playbook says that
ZeRO-3 moves 16 h^2/dp bytes a rank and gather; (dp-1)/dp of 16 h^2 *elements* is right.

Sequence parallelism sends the two halves of each all-reduce apart, and gathers two inputs a block once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from refpar import split
from refpar.parallel import data, zero
from refpar.plan.activations import Weigher
from refpar.plan.models import Bare, Model, Transformer
from refpar.plan.recipes import Recipe
from refpar.plan.segments import segments
from refpar.plan.setups import Place, Setup, check, network_of, units_of
from refpar.plan.states import gradient_buckets, handled, local_sizes
from refpar.plan.tensors import Grid, Network, Tensor, Unit
from refpar.plan.units import size


@dataclass(frozen=True)
class Sent:
    """What a rank sends for one purpose in a step.

    Attributes
    ----------
    group, operation : as on the ledger
    what : in words
    messages, elements, bytes : how much
    """

    group: str
    operation: str
    what: str
    messages: int
    elements: int
    bytes: int


def of_rank(model: Model, setup: Setup, recipe: Recipe, rank: int) -> list[Sent]:
    """Return what ``rank`` sends in a step that updates."""
    check(model, setup)
    place, net = setup.place(rank), network_of(model, setup)
    sent = [
        *gradients_and_weights(net, setup, recipe, place),
        *activations(net, model, setup, recipe, place),
        *boundaries(net, model, setup, recipe, place),
        *tied(net, setup, recipe, place),
        *context(model, setup, recipe),
    ]
    if setup.accounting == "refpar":
        sent += [
            all_reduce("world", what, n, setup.ranks, rank, dtype, dtype)
            for what, n, dtype in (("count", 1, "int64"), ("loss, norm and flag", 3, "float64"))
        ]
    return [entry for entry in sent if entry.messages]


def by_group(sent: Iterable[Sent]) -> dict[str, int]:
    """Return the bytes of each group."""
    totals: dict[str, int] = {}
    for entry in sent:
        totals[entry.group] = totals.get(entry.group, 0) + entry.bytes
    return totals


def all_reduce(group: str, what: str, n: int, ranks: int, rank: int, partial: str, result: str, times: int = 1) -> Sent:
    """Return what a ring all-reduce of ``n`` sends: partial sums in one type, results in another."""
    reduce, gather = split.ring_elements(n, ranks, rank)
    nbytes = size(reduce, partial) + size(gather, result)
    return Sent(group, "all_reduce", what, 2 * (ranks - 1) * times, (reduce + gather) * times, nbytes * times)


# Data parallel and ZeRO


def gradients_and_weights(net: Network, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Sent]:
    """Yield what replicas send."""
    units, N, M = units_of(net, setup, place.p), setup.sharing, setup.micro_batches
    sizes, together = local_sizes(units, setup, place), handled(units, net, setup)
    reduced = gradient_buckets(together, sizes, setup)
    if setup.zero == 0:
        for group in merged(reduced, sizes):
            yield all_reduce("dp", "gradients", group[0], N, place.d, recipe.reduce, recipe.travels, group[1])
        return
    of_units = [{name: sizes[name] for name in names} for names in together]
    scattered, gathered = zero.elements_sent(of_units, setup.zero, M, N, place.d)
    groups = len(reduced)
    if setup.zero > 1:
        groups = M * sum(len(data.buckets(reversed(unit), unit, setup.bucket)) for unit in of_units)
    yield Sent("dp", "reduce_scatter", "gradients", (N - 1) * groups, scattered, size(scattered, recipe.reduce))
    groups = 2 * M * len(of_units) if setup.zero == 3 else len(reduced)
    yield Sent("dp", "all_gather", "weights", (N - 1) * groups, gathered, size(gathered, recipe.weights))


def merged(groups: Iterable[Sequence[str]], sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Return how many buckets there are of each number of elements."""
    counted: dict[int, int] = {}
    for group in groups:
        n = sum(sizes[name] for name in group)
        counted[n] = counted.get(n, 0) + 1
    return list(counted.items())


# Tensor parallel


def activations(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Sent]:
    """Yield what tensor-parallel ranks send."""
    if setup.tp == 1:
        return
    units, weigher = units_of(net, setup, place.p), Weigher(model, setup, recipe, place)
    dtype = recipe.accumulator if setup.accounting == "refpar" else recipe.activations
    counted: dict[tuple[str, Tensor], int] = {}
    again: dict[Tensor, int] = {}
    for segment in segments(units, net, setup):
        for unit in segment.units:
            for tensor in unit.kind.forward_sums:
                add(counted, ("forward", tensor), 1 + segment.wrapped)
            for tensor in unit.kind.backward_sums:
                add(counted, ("backward", tensor), 1)
                if setup.sequence_parallel:
                    again[tensor] = again.get(tensor, 0) + 1
    for (direction, tensor), times in counted.items():
        yield from summed(setup, weigher, place, tensor, times, dtype, f"activations, {direction}")
    for tensor, times in again.items():
        elements = times * sum(
            number * (tensor.elements(grid) // setup.tp * (setup.tp - 1)) for grid, number in grids(weigher, place)
        )
        yield Sent("tp", "all_gather", "inputs gathered again, backward", (setup.tp - 1) * setup.micro_batches * times,
                   elements, size(elements, dtype))  # fmt: skip
    if place.p == setup.pp - 1:
        for tensor in net.loss_sums:
            yield from summed(setup, weigher, place, tensor, 1, recipe.accumulator, "loss")


def add(counted: dict[tuple[str, Tensor], int], key: tuple[str, Tensor], times: int) -> None:
    """Count ``times`` more of ``key``."""
    counted[key] = counted.get(key, 0) + times


def summed(
    setup: Setup, weigher: Weigher, place: Place, tensor: Tensor, times: int, dtype: str, what: str
) -> Iterator[Sent]:
    """Yield the all-reduces of one activation, over all micro-batches."""
    for grid, number in grids(weigher, place):
        n = tensor.elements(Grid(grid.rows, grid.tokens))
        yield all_reduce("tp", what, n, setup.tp, place.t, dtype, dtype, number * times)


def grids(weigher: Weigher, place: Place) -> list[tuple[Grid, int]]:
    """Return the shapes of this replica's micro-batches, and how many there are of each."""
    setup = weigher.setup
    M, most = setup.micro_batches, setup.rows(place.d, 0)
    least = setup.rows(place.d, M - 1)
    if most == least:
        return [(weigher.grid(most), M)]
    longer = len(split.part(setup.batch, setup.dp, place.d // setup.cp)) % M
    return [(weigher.grid(most), longer), (weigher.grid(least), M - longer)]


# Pipeline


def boundaries(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Sent]:
    """Yield what stages send: an activation on, its gradient back."""
    weigher = Weigher(model, setup, recipe, place)
    units = units_of(net, setup, place.p)
    last, first = place.p == setup.pp - 1, place.p == 0
    ways = (("activations", setup.chunks - last, _behind(net, units)), ("gradients", setup.chunks - first, units[0]))
    if setup.pp == 1:
        return
    for what, times, unit in ways:
        tensor = unit.kind.input if unit is not None else units[0].kind.input
        if tensor is None:
            tensor = next(u.kind.input for u in net.units if u.kind.input is not None)
        elements = times * sum(number * tensor.elements(grid) for grid, number in grids(weigher, place))
        yield Sent("pp", "send", what, setup.micro_batches * times, elements, size(elements, recipe.activations))


def _behind(net: Network, units: Sequence[Unit]) -> Unit | None:
    index = net.units.index(units[-1]) + 1
    return net.units[index] if index < len(net.units) else None


def tied(net: Network, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Sent]:
    """Yield what the stages that hold one weight send to each other, for its gradient."""
    if setup.pp == 1:
        return
    seen: dict[str, int] = {}
    both = [name for unit in net.units for name in unit.parameters if seen.setdefault(name, id(unit)) != id(unit)]
    sizes = local_sizes(units_of(net, setup, place.p), setup, place)
    for name in both:
        holders = [
            p for p in range(setup.pp) if any(name in unit.parameters for unit in units_of(net, setup, p))
        ] if name in sizes else []  # fmt: skip
        if len(holders) > 1:
            n = sizes[name] if setup.zero == 0 else len(split.part(sizes[name], setup.sharing, place.d))
            index = holders.index(place.p)
            yield all_reduce("tied", "gradient of the tied weight", n, len(holders), index, recipe.reduce,
                             recipe.travels)  # fmt: skip


# Context parallel


def context(model: Model, setup: Setup, recipe: Recipe) -> Iterator[Sent]:
    """Yield what ring attention sends: keys and values round the ring, forward, and twice that backward."""
    if setup.cp == 1 or isinstance(model, Bare) or not isinstance(model, Transformer):
        return
    tokens = (setup.tokens or model.context) // setup.cp
    heads = math.ceil(model.kv_heads / setup.tp)
    layers = math.ceil(model.layers / setup.pp)
    once = setup.largest_micro_batch * tokens * 2 * heads * model.head_dim
    times = (setup.cp - 1) * layers * setup.micro_batches
    yield Sent("cp", "send", "keys and values", 3 * times, 3 * times * once, size(3 * times * once, recipe.activations))
