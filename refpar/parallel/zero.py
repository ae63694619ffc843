"""ZeRO: data parallel in which no rank keeps what another rank keeps too.

Data parallel holds N copies of everything. ZeRO (Rajbhandari et al. 2019, section 5) gives each
parameter's elements to N *owners* and lets the others drop, stage by stage, what they do not own.
For psi parameters in mixed precision::

                    weights        gradients      masters, moments    bytes held by a rank
    data parallel   all, 2 psi     all, 2 psi     all, 12 psi         16 psi
    stage 1         all            all            own                 (4 + 12/N) psi
    stage 2         all            own            own                 (2 + 14/N) psi
    stage 3         own            own            own                 16 psi / N

Each parameter is split by itself, near-evenly, the first owners having one element more. So there is
no padding, a tied weight has the same owners wherever it stands, and small ones fill the first ranks::

    on 3 ranks      of 7     of W0 (3, 2)   b0 (2,)   W1 (2, 1)   b1 (1,)   of these 11
    rank 0 owns     0 1 2    0 1            0         0           0         5
    rank 1 owns     3 4      2 3            1         1           -         4
    rank 2 owns     5 6      4 5            -         -           -         2

The all-reduce of data parallel falls into its two halves, with the update between them: gradients
are *reduce-scattered*, each rank getting the sum of what it owns; each updates that; and the new
weights are *all-gathered*. To scatter, a rank sends all but its own, and to gather, all but what its
right neighbour owns: either half is (N-1) psi elements over all ranks. For M micro-batches::

                                                       elements sent    7 on 3 ranks, M = 1, sent from
                                                       by all ranks     rank 0  rank 1  rank 2  all
    stage 1   gradients once, when they are final;     2 (N-1) psi      4+5     5+5     5+4     28
              weights once
    stage 2   gradients every micro-batch, and then    (M+1) (N-1) psi  4+5     5+5     5+4     28
              dropped; weights once
    stage 3   gradients every micro-batch; weights     3 M (N-1) psi    4+5+5   5+5+5   5+4+4   42
              for each unit, forward and again
              backward, and then dropped

With M = 1 that is the paper's "no more than data parallel" for stages 1 and 2, and its 1.5 times for
stage 3 (section 7): three halves of an all-reduce in place of two. In bytes of mixed precision, where
sums of gradients travel in 4 and weights in 2, it is (4+2+2)/(4+2) = 4/3. A tied weight counts once for
each unit that uses it wherever gradients or weights stream: in the M of stage 2, and in all of stage 3.

The most that is alive at once, beside what is held: in stages 2 and 3 the gradients of one unit,
until it has run backward and they are handed over; in stage 3 the weights of one unit, while it runs.

In PyTorch's FSDP (Zhao et al. 2023) a *unit* is a wrapped module, gathering is "unshard", dropping
"reshard"; stage 3 is ``FULL_SHARD``, data parallel ``NO_SHARD``, and stage 2 ``SHARD_GRAD_OP``, which
gathers weights ahead of the forward pass where stage 2 publishes them after the update. FSDP keeps the
last unit gathered between its forward and its backward pass; here every unit is dropped, and the count
is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refpar import precision, split
from refpar.arrays import Array, array_module
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec, live_bytes
from refpar.nn.models import Units
from refpar.parallel.data import buckets, final_names
from refpar.precision import Precision


class Zero:
    """Weights and gradients of one rank, at ``stage`` 1, 2 or 3.

    Parameters
    ----------
    comm : the replicas, owners of each other's shards
    units : what is trained, the same on every replica
    initial : whole initial values by name, in the type of the masters
    bucket : elements that travel together; at least one parameter, and in stages 2 and 3 at most one unit
    frozen : names that get no gradient, no master and no update; in stage 3 they are shared out all the same

    Attributes
    ----------
    weights : by name, in stages 1 and 2 whole, in stage 3 the elements this rank owns, flat
    masters : by name, the elements this rank owns, flat; a view of the weights unless those are float16
    gradients : by name, sums over all ranks of the elements this rank owns, flat; in stage 1 views of the
        whole gradient, which stays where it is
    arriving : whole gradients that have not been handed to their owners yet
    units : what to run in place of the model's units; in stage 3 they gather their weights
    peak_gathered, peak_gradients : largest bytes of gathered weights, and of stored gradients, alive at once
    """

    def __init__(
        self,
        comm: Communicator,
        units: Units,
        initial: Mapping[str, Array],
        types: Precision,
        bucket: int,
        stage: int,
        frozen: Collection[str] = (),
    ) -> None:
        self.comm, self.types, self.stage, self.bucket = comm, types, stage, bucket
        self.shapes = {name: p.shape for name, p in initial.items()}
        self.sizes = {name: p.size for name, p in initial.items()}
        trained = [name for name in initial if name not in frozen]
        self.weights = {name: precision.to_compute(p, types) for name, p in initial.items()}
        if stage == 3:
            self.weights = {name: self.own(name, p).copy() for name, p in self.weights.items()}
        if types.master != types.compute:
            self.masters = {name: self.own(name, initial[name]).copy() for name in trained}
        else:
            self.masters = {name: self.own_weights(name) for name in trained}
        self.units: Units = [(n, Gathered(layer, self)) for n, layer in units] if stage == 3 else units
        self.names = [[name for name in reversed(list(layer.specs)) if name in self.masters] for _, layer in units]
        self.final = final_names(units)
        order = (name for names in self.final for name in names if name in self.masters)
        self.buckets = buckets(order, self.sizes, bucket)
        self.peak_gathered = self.peak_gradients = 0
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradient yet, nothing handed over."""
        self.gradients: dict[str, Array] = {}
        self.arriving: dict[str, Array] = {}
        self.waiting = list(self.buckets)
        self.ready: set[str] = set()

    # From the backward pass to the owners

    def consume(self, name: str, gradient: Array) -> None:
        """Add a gradient to what has arrived: from another use of the weight, in stage 1 from earlier micro-batches."""
        if name in self.masters:
            precision.accumulate(self.arriving, name, gradient, self.types.gradients)

    def unit_done(self, index: int, last: bool) -> None:
        """Hear that unit ``index`` has run backward.

        Stages 2 and 3 hand its gradients over, every micro-batch. Stage 1 does so in the last one, and only with
        what is final: a tied weight is when the first unit that uses it is done.
        """
        self.peak_gradients = max(self.peak_gradients, live_bytes(self.arriving, self.gradients))
        if self.stage > 1:
            for names in buckets(self.names[index], self.sizes, self.bucket):
                self.hand_over(names)
        elif last:
            self.ready.update(self.final[-1 - index])
            while self.waiting and self.ready.issuperset(self.waiting[0]):
                self.hand_over(self.waiting.pop(0))

    def hand_over(self, names: Sequence[str]) -> None:
        """Give every owner the sum over all ranks of what it owns; all but stage 1 drop the rest.

        What no row of this rank has used has gradient zero, and travels with the others: skipped, the ranks would
        be in different collectives (DeepSpeed#545).
        """
        for name in names:
            if name not in self.arriving:
                xp = array_module(self.weights[name])
                self.arriving[name] = xp.zeros(self.shapes[name], dtype=self.types.gradients)
        whole = {name: self.arriving.pop(name) for name in names}
        for name, piece in self.reduce_scatter(whole).items():
            if self.stage == 1:
                self.gradients[name] = self.own(name, whole[name])
                self.gradients[name][...] = piece
            else:
                precision.accumulate(self.gradients, name, piece, self.types.gradients)

    def reduce_scatter(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return, for each name, the sum over all ranks of the elements that this rank owns."""
        xp = array_module(next(iter(gradients.values())))
        pieces = rank_major({name: g.size for name, g in gradients.items()}, self.comm.size)
        flat = xp.concatenate([gradients[name].reshape(-1)[r.start : r.stop] for _, name, r in pieces])
        counts = owned_counts(pieces, self.comm.size)
        mine = ring.reduce_scatter(self.comm, flat, counts=counts, accumulate=self.types.reduce)
        return dict(cut(mine, [(name, len(r)) for rank, name, r in pieces if rank == self.comm.rank]))

    def reduced(self) -> dict[str, Array]:
        """Return the summed gradients of the elements this rank owns, flat."""
        return dict(self.gradients)

    # From the owners to the forward pass

    def publish(self) -> None:
        """Round the updated masters to weights, and give them to everybody who keeps them whole."""
        for name, master in self.masters.items():
            piece = precision.to_compute(master, self.types)
            if self.stage == 3:
                self.weights[name] = piece
            else:
                self.own(name, self.weights[name])[...] = piece
        if self.stage < 3:
            for names in self.buckets:
                for name, whole in self.gather(names).items():
                    self.weights[name][...] = whole

    def gather(self, names: Sequence[str]) -> dict[str, Array]:
        """Return the whole weights of ``names``, put together from what their owners hold."""
        if not names:
            return {}
        xp = array_module(self.weights[names[0]])
        pieces = rank_major({name: self.sizes[name] for name in names}, self.comm.size)
        mine = xp.concatenate([self.own_weights(name) for name in names])
        flat = ring.all_gather(self.comm, mine, counts=owned_counts(pieces, self.comm.size))
        whole = {name: xp.empty(self.shapes[name], flat.dtype) for name in names}
        for (_, name, r), (_, piece) in zip(pieces, cut(flat, [(n, len(r)) for _, n, r in pieces]), strict=True):
            whole[name].reshape(-1)[r.start : r.stop] = piece
        return whole

    # Who holds what

    def positions(self, name: str) -> range:
        """Return the flat positions of the elements of ``name`` that this rank owns."""
        return owned(self.sizes[name], self.comm.size, self.comm.rank)

    def own(self, name: str, whole: Array) -> Array:
        """Return a view of the elements of ``whole`` that this rank owns, flat."""
        r = self.positions(name)
        return whole.reshape(-1)[r.start : r.stop]

    def own_weights(self, name: str) -> Array:
        """Return the weights this rank owns, flat."""
        return self.weights[name] if self.stage == 3 else self.own(name, self.weights[name])


@dataclass(frozen=True)
class Gathered:
    """Stage 3: a layer that has its whole weights only while it runs.

    It stands outside a layer that recomputes, so that the recomputation shares the backward gather.
    """

    layer: Layer
    store: Zero

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return self.layer.forward(self.gather(), x, at)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        return (yield from self.layer.backward(self.gather(), saved, dy))

    def gather(self) -> Params:
        """Return the whole weights of this layer, for as long as the caller keeps them."""
        whole = self.store.gather(list(self.specs))
        for weight in whole.values():
            lock(weight)
        self.store.peak_gathered = max(self.store.peak_gathered, live_bytes(whole))
        return whole


def lock(x: Array) -> None:
    """Make ``x`` read-only where its library can: what is written to a gathered copy is lost (OpenRLHF#1357)."""
    if hasattr(x.flags, "writeable"):
        x.flags.writeable = False


def owned(size: int, ranks: int, rank: int) -> range:
    """Return the flat positions of a parameter of ``size`` elements that ``rank`` owns."""
    return split.part(size, ranks, rank)


def rank_major(sizes: Mapping[str, int], ranks: int) -> list[tuple[int, str, range]]:
    """Return (owner, name, elements) of every piece in the order in which they travel.

    A collective gives each rank one contiguous chunk, and a rank owns a piece of *every* name. So the
    pieces are laid out by owner first: ``a`` of 3 and ``b`` of 4 on 2 ranks as ``a0 a1 b0 b1 | a2 b2 b3``.
    """
    return [(rank, name, owned(size, ranks, rank)) for rank in range(ranks) for name, size in sizes.items()]


def owned_counts(pieces: Sequence[tuple[int, str, range]], ranks: int) -> list[int]:
    """Return how many elements each rank owns of all pieces together."""
    counts = [0] * ranks
    for rank, _, r in pieces:
        counts[rank] += len(r)
    return counts


def cut(flat: Array, sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Array]]:
    """Yield each name with its part of ``flat``, one after another."""
    start = 0
    for name, size in sizes:
        yield name, flat[start : start + size]
        start += size


# The claims, as arithmetic on sizes


UnitSizes = Sequence[Mapping[str, int]]
"""For each unit that a rank runs, the elements of each of its parameters (of this rank's slices, under tensor
parallelism). A tied weight is in each of its units."""


def elements_sent(
    units: UnitSizes, stage: int, micro_batches: int, ranks: int, rank: int, frozen: Collection[str] = ()
) -> tuple[int, int]:
    """Return the elements that ``rank`` sends in a step: partial sums of gradients, and weights.

    To hand n elements to their owners a rank sends all but its own; to gather them, all but those of its
    right neighbour. Summed over ranks, ``(ranks - 1) n`` each. A step without an update (no tokens, an
    overflow) publishes nothing: in stages 1 and 2 it sends no weights.
    """
    streamed = [(name, size) for unit in units for name, size in unit.items()]
    once = list(dict(streamed).items())

    def others(sizes: Iterable[tuple[str, int]], owner: int, skip: Collection[str] = frozen) -> int:
        return sum(size - len(split.part(size, ranks, owner % ranks)) for name, size in sizes if name not in skip)

    scattered = others(once, rank) if stage == 1 else micro_batches * others(streamed, rank)
    gathered = 2 * micro_batches * others(streamed, rank + 1, ()) if stage == 3 else others(once, rank + 1)
    return scattered, gathered


def bytes_held(
    units: UnitSizes, stage: int, types: Precision, buffers: int, ranks: int, rank: int, frozen: Collection[str] = ()
) -> int:
    """Return the bytes that ``rank`` keeps from step to step: weights, gradients, masters and the optimizer's state.

    Parameters
    ----------
    stage : 0 for data parallel
    buffers : arrays the optimizer keeps for each parameter: 2 for Adam
    """
    weight, gradient, master = (np.dtype(t).itemsize for t in (types.compute, types.gradients, types.master))
    copies = buffers + (types.master != types.compute)
    total = 0
    for name, size in {name: size for unit in units for name, size in unit.items()}.items():
        own = len(split.part(size, ranks, rank))
        total += weight * (own if stage == 3 else size)
        if name not in frozen:
            total += gradient * (own if stage >= 2 else size) + copies * master * (own if stage else size)
    return total


def peaks(
    units: UnitSizes, stage: int, types: Precision, micro_batches: int, ranks: int, rank: int,
    frozen: Collection[str] = (),
) -> tuple[int, int]:  # fmt: skip
    """Return the largest bytes that ``rank`` has alive at once: of stored gradients, and of gathered weights.

    Stages 2 and 3 keep what they own of the units that are done, and all of the unit that runs backward.
    """
    trained = [{name: size for name, size in unit.items() if name not in frozen} for unit in units]
    gradients, done = 0, set[tuple[str, int]]()
    for _ in range(micro_batches):
        for unit in reversed(trained):
            if stage < 2:
                done.update(unit.items())
                gradients = max(gradients, sum(size for _, size in done))
            else:
                mine = sum(len(split.part(size, ranks, rank)) for _, size in done)
                gradients = max(gradients, mine + sum(unit.values()))
                done.update(unit.items())
    gathered = max((sum(unit.values()) for unit in units), default=0) if stage == 3 else 0
    return gradients * np.dtype(types.gradients).itemsize, gathered * np.dtype(types.compute).itemsize


def unit_sizes(units: Units, held: Mapping[str, int] | None = None) -> list[dict[str, int]]:
    """Return the sizes of the parameters of each unit; those of ``held`` where a rank holds slices."""
    sizes = held or {name: int(np.prod(s.shape)) for _, layer in units for name, s in layer.specs.items()}
    return [{name: sizes[name] for name in layer.specs} for _, layer in units]
