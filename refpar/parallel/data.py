"""Data parallel: every rank holds the whole model and works on its own rows.

The gradient of a sum is the sum of the gradients, so N ranks that each know the gradient of their
rows know that of the batch once they have added them up. A batch of 7 rows and a gradient of 7
elements on 3 ranks::

                 rank 0             rank 1             rank 2
    rows         0 1 2              3 4                5 6
    gradients    g0                 g1                 g2           backward, each for itself
    all-reduce   g0+g1+g2           g0+g1+g2           g0+g1+g2     the only communication:
      chunks     0 1 2              3 4                5 6          of about n/N elements
      sums       sends 4            sends 5            sends 5      N-1 chunks, as partial sums
      results    sends 5            sends 5            sends 4      N-1 chunks, complete
    update       the same numbers, so the same weights: replicas stay equal bit for bit

What divides is the number of tokens of the *whole* batch, one number that is summed before the backward
pass starts (:func:`refpar.parallel.hybrid.count_everywhere`); a mean of the ranks' means would be wrong as
soon as they have unequal numbers of tokens.

Gradients are reduced while the backward pass is still running: last layer first, gathered up in
*buckets* so that a small bias does not pay for a message of its own (Li et al. 2020, "PyTorch
Distributed", section 3.2; :func:`bucketed` keeps what tensor parallelism would slice apart from
what it would not). A gradient is final when the first unit that uses it has run backward,
in the last micro-batch; micro-batches before that are added up locally and send nothing.

    held     everything, on every rank: in mixed precision 16 bytes a parameter (:mod:`refpar.precision`)
    sent     for each bucket, of n elements, one all-reduce: 2(N-1)/N n by each rank where N divides n,
             2(N-1) n over all ranks always, however many micro-batches. In mixed precision sums
             have 4 bytes and results 2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from refpar import precision, split
from refpar.arrays import Array, array_module
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.nn.layer import live_bytes
from refpar.nn.models import Units
from refpar.precision import Precision


class DataParallel:
    """Weights, and the gradients on their way from the backward pass to the optimizer.

    Attributes
    ----------
    weights : by name, what the layers compute with
    units : what to run
    masters : by name and flat, what the optimizer updates; the same memory unless weights are float16.
        Frozen parameters have none, and no gradient
    peak_gradients : largest bytes of stored gradients alive at once
    peak_gathered : 0; what :class:`refpar.parallel.zero.Zero` has to gather, is here already
    """

    def __init__(
        self,
        comm: Communicator,
        units: Units,
        initial: Mapping[str, Array],
        types: Precision,
        bucket: int,
        frozen: Collection[str] = (),
    ) -> None:
        self.comm, self.types, self.units = comm, types, units
        self.shapes = {name: p.shape for name, p in initial.items()}
        self.masters = {name: p.reshape(-1) for name, p in initial.items() if name not in frozen}
        self.weights = {name: precision.to_compute(p, types) for name, p in initial.items()}
        self.final = final_names(units)
        self.buckets = bucketed(units, {name: p.size for name, p in self.masters.items()}, bucket)
        self.peak_gradients = self.peak_gathered = 0
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradient yet, nothing reduced."""
        self.gradients: dict[str, Array] = {}
        self.ready: set[str] = set()
        self.waiting = list(self.buckets)

    def consume(self, name: str, gradient: Array) -> None:
        """Add a gradient to what earlier micro-batches, or other uses of the same weight, have given."""
        if name in self.masters:
            precision.accumulate(self.gradients, name, gradient, self.types.gradients)

    def unit_done(self, index: int, last: bool) -> None:
        """Hear that unit ``index`` has run backward; in the last micro-batch, reduce what is final."""
        self.peak_gradients = max(self.peak_gradients, live_bytes(self.gradients))
        if last:
            self.ready.update(self.final[-1 - index])
            for names in [bucket for bucket in self.waiting if self.ready.issuperset(bucket)]:
                self.waiting.remove(names)
                self.reduce(names)

    def reduce(self, names: Sequence[str]) -> None:
        """Replace the gradients of one bucket by their sums over all ranks."""
        xp = array_module(self.weights[names[0]])
        for name in names:  # what no row of this rank has used has gradient zero, and is added with the others
            if name not in self.gradients:
                self.gradients[name] = xp.zeros(self.shapes[name], dtype=self.types.gradients)
        parts = [self.gradients[name] for name in names]
        flat = xp.concatenate([g.ravel() for g in parts])
        flat = ring.all_reduce(self.comm, flat, accumulate=self.types.reduce)
        start = 0
        for name, g in zip(names, parts, strict=True):
            self.gradients[name] = flat[start : start + g.size].reshape(g.shape)
            start += g.size

    def reduced(self) -> dict[str, Array]:
        """Return the summed gradients, flat: what this rank updates, which is all of them."""
        return {name: g.ravel() for name, g in self.gradients.items()}

    def positions(self, name: str) -> range:
        """Return the flat positions of the elements of ``name`` that this rank updates: all."""
        return range(math.prod(self.shapes[name]))

    def own_weights(self, name: str) -> Array:
        """Return the weights this rank updates, flat."""
        return self.weights[name].reshape(-1)

    def publish(self) -> None:
        """Round the updated masters to the weights that the next forward pass sees."""
        for name, master in self.masters.items():
            self.weights[name] = precision.to_compute(master, self.types).reshape(self.shapes[name])


def final_names(units: Units) -> list[list[str]]:
    """Return the names that become final with each unit, in backward order: last unit first.

    A weight used by several units (a tied embedding) is final only with the first of them.
    """
    first: dict[str, int] = {}
    for index, (_, layer) in enumerate(units):
        for name in layer.specs:
            first.setdefault(name, index)
    return [
        [name for name in layer.specs if first[name] == index] for index, (_, layer) in reversed(list(enumerate(units)))
    ]


def buckets(names: Iterable[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group ``names`` in order; a bucket is closed once it has ``limit`` elements or more."""
    groups: list[list[str]] = [[]]
    for name in names:
        groups[-1].append(name)
        if sum(sizes[n] for n in groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]


def bucketed(units: Units, sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the buckets of the names in ``sizes``, in the order in which their gradients become final.

    What tensor parallelism slices has buckets of its own. The order in which a ring adds up an element depends on
    the chunk it lies in, and three numbers added in another order are other bits: a norm that shares a bucket
    with slices of unequal size would drift apart between tensor-parallel ranks, from 3 replicas on.
    """
    axes = {name: spec.axis for _, layer in units for name, spec in layer.specs.items()}
    names = [name for final in final_names(units) for name in final if name in sizes]
    whole, sliced = [n for n in names if axes[n] is None], [n for n in names if axes[n] is not None]
    return [*buckets(whole, sizes, limit), *buckets(sliced, sizes, limit)]


def bytes_sent(units: Units, sizes: Mapping[str, int], types: Precision, bucket: int, ranks: int, rank: int) -> int:
    """Return the bytes that ``rank`` sends for the gradients of one step, from the chunk sizes alone.

    Partial sums travel in ``types.reduce``, results in ``types.gradients``; together the familiar
    2(N-1)/N of the gradient where N divides every bucket.
    """
    total = 0
    for group in bucketed(units, sizes, bucket):
        reduce, gather = split.ring_elements(sum(sizes[name] for name in group), ranks, rank)
        total += reduce * np.dtype(types.reduce).itemsize + gather * np.dtype(types.gradients).itemsize
    return total
