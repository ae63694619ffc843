"""ZeRO: data parallel in which no rank keeps what another rank keeps too.

Data parallel holds N copies of everything. ZeRO (Rajbhandari et al. 2019, section 5) gives each
parameter's elements to N *owners* and lets the others drop, stage by stage, what they do not own::

                    weights        gradients      masters, moments    bytes a rank, mixed precision
    data parallel   all            all            all                 16 psi
    stage 1         all            all            own                 (4 + 12/N) psi
    stage 2         all            own            own                 (2 + 14/N) psi
    stage 3         own            own            own                 16 psi / N

    7 elements on 3 ranks:   rank 0 owns 0 1 2     rank 1 owns 3 4     rank 2 owns 5 6

The all-reduce of data parallel falls into its two halves, with the update between them: gradients
are *reduce-scattered*, each rank getting the sum of what it owns; each updates that; and the new
weights are *all-gathered*. Either half sends (N-1)/N of psi from each rank. Over all ranks, for M
micro-batches::

    stage 1     gradients once, when they are final; weights once              2 (N-1) psi
    stage 2     gradients every micro-batch, then dropped; weights once        (M+1) (N-1) psi
    stage 3     weights gathered for each unit, forward and again backward,    3 M (N-1) psi
                and dropped; gradients every micro-batch

With M = 1 that is the paper's "no more than data parallel" for stages 1 and 2 and its 1.5 times for
stage 3 (section 7). A tied weight counts once for each unit that uses it wherever gradients or
weights stream.

Stage 3 is what PyTorch calls FSDP. A *unit* here is a wrapped module there; gathering is "unshard",
dropping "reshard", and stage 2 is ``SHARD_GRAD_OP``.

Each parameter is split by itself, by the one split rule. So there is no padding, a parameter smaller
than N leaves some owners with nothing, and a tied weight has the same owners wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    Attributes
    ----------
    weights : by name, in stages 1 and 2 whole, in stage 3 the elements this rank owns
    masters : by name, the elements this rank owns, flat; a view of the weights unless those are float16
    gradients : by name; whole before they are reduced in stage 1, otherwise what this rank owns
    units : what to run in place of the model's units; in stage 3 they gather their weights
    peak_gathered, peak_gradients : largest bytes of gathered weights, and of stored gradients, alive at once
    """

    def __init__(
        self, comm: Communicator, units: Units, masters: Mapping[str, Array], types: Precision, bucket: int, stage: int
    ) -> None:
        self.comm, self.types, self.stage, self.bucket = comm, types, stage, bucket
        self.shapes = {name: p.shape for name, p in masters.items()}
        self.sizes = {name: p.size for name, p in masters.items()}
        self.weights = {name: precision.to_compute(p, types) for name, p in masters.items()}
        if stage == 3:
            self.weights = {name: self.own(name, p).copy() for name, p in self.weights.items()}
        if types.master != types.compute:
            self.masters = {name: self.own(name, p).copy() for name, p in masters.items()}
        elif stage == 3:
            self.masters = self.weights
        else:
            self.masters = {name: self.own(name, p) for name, p in self.weights.items()}
        self.units: Units = [(n, Gathered(layer, self)) for n, layer in units] if stage == 3 else units
        self.final = final_names(units)
        self.buckets = buckets((name for names in self.final for name in names), self.sizes, bucket)
        self.peak_gathered = self.peak_gradients = 0
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradient yet, nothing reduced."""
        self.gradients: dict[str, Array] = {}
        self.pending: dict[str, Array] = {}
        self.waiting = list(self.buckets)
        self.ready: set[str] = set()

    # From the backward pass to the owners

    def consume(self, name: str, gradient: Array) -> None:
        """Take a gradient from the backward pass.

        Stage 1 adds it to what there is and waits for :meth:`unit_done`. Stages 2 and 3 put it into the
        bucket, and empty the bucket first where it would overflow.
        """
        if self.stage == 1:
            precision.accumulate(self.gradients, name, gradient, self.types.gradients)
        else:
            waiting = sum(g.size for g in self.pending.values())
            if waiting and name not in self.pending and waiting + gradient.size > self.bucket:
                self.scatter_pending()
            precision.accumulate(self.pending, name, gradient, self.types.gradients)
        self.peak_gradients = max(self.peak_gradients, live_bytes(self.gradients, self.pending))

    def unit_done(self, index: int, last: bool) -> None:
        """Hear that unit ``index`` has run backward: stages 2 and 3 hand its gradients to their owners and drop
        the rest; stage 1 does so in the last micro-batch, with what is final."""
        if self.stage > 1:
            self.scatter_pending()
        elif last:
            self.ready.update(self.final[-1 - index])
            while self.waiting and self.ready.issuperset(self.waiting[0]):
                names = self.waiting.pop(0)
                self.gradients.update(self.reduce_scatter({name: self.gradients[name] for name in names}))

    def scatter_pending(self) -> None:
        """Empty the bucket: every owner adds the sum over all ranks to what it has."""
        pending, self.pending = self.pending, {}
        for name, gradient in self.reduce_scatter(pending).items():
            precision.accumulate(self.gradients, name, gradient, self.types.gradients)

    def reduce_scatter(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return, for each name, the sum over all ranks of the elements that this rank owns."""
        if not gradients:
            return {}
        xp = array_module(next(iter(gradients.values())))
        pieces = rank_major({name: g.size for name, g in gradients.items()}, self.comm.size)
        flat = xp.concatenate([gradients[name].reshape(-1)[r.start : r.stop] for _, name, r in pieces])
        counts = owned_counts(pieces, self.comm.size)
        mine = ring.reduce_scatter(self.comm, flat, counts=counts, accumulate=self.types.reduce)
        return dict(cut(mine, [(name, len(r)) for rank, name, r in pieces if rank == self.comm.rank]))

    def reduced(self) -> dict[str, Array]:
        """Return the summed gradients of the elements this rank owns, flat."""
        return self.gradients

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
        xp = array_module(next(iter(self.weights.values())))
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
        return split.part(self.sizes[name], self.comm.size, self.comm.rank)

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
        whole = self.store.gather(list(self.specs))
        self.store.peak_gathered = max(self.store.peak_gathered, live_bytes(whole))
        return whole


def rank_major(sizes: Mapping[str, int], ranks: int) -> list[tuple[int, str, range]]:
    """Return (owner, name, elements) of every piece in the order in which they travel.

    A collective gives each rank one contiguous chunk, and a rank owns a piece of *every* name. So the
    pieces are laid out by owner first: ``a`` of 3 and ``b`` of 4 on 2 ranks as ``a0 a1 b0 b1 | a2 b2 b3``.
    """
    return [(rank, name, split.part(size, ranks, rank)) for rank in range(ranks) for name, size in sizes.items()]


def owned_counts(pieces: Sequence[tuple[int, str, range]], ranks: int) -> list[int]:
    """Return how many elements each rank owns of all pieces together."""
    return [sum(len(r) for owner, _, r in pieces if owner == rank) for rank in range(ranks)]


def cut(flat: Array, sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Array]]:
    """Yield each name with its part of ``flat``, one after another."""
    start = 0
    for name, size in sizes:
        yield name, flat[start : start + size]
        start += size


def elements_sent(units: Units, stage: int, micro_batches: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the elements that ``rank`` sends in a step: partial sums of gradients, and weights.

    To hand n elements to their owners a rank sends all but its own; to gather them, all but those of its
    right neighbour. Summed over ranks, ``(ranks - 1) n`` each.
    """
    model = {name: spec for _, layer in units for name, spec in layer.specs.items()}
    streamed = [spec for _, layer in units for spec in layer.specs.values()]  # a tied weight in each of its units
    once = list(model.values())

    def others(specs: Sequence[ParamSpec], owner: int) -> int:
        return sum((n := math.prod(s.shape)) - len(split.part(n, ranks, owner % ranks)) for s in specs)

    scattered = others(once, rank) if stage == 1 else micro_batches * others(streamed, rank)
    gathered = 2 * micro_batches * others(streamed, rank + 1) if stage == 3 else others(once, rank + 1)
    return scattered, gathered
