"""Train a case on many ranks: every technique together, over a mesh of communicators.

The order inside a step is that of :mod:`refpar.single`, with a reduction where ranks must agree::

    count      sum over the replicas, before anything runs forward        world   1 number
    forward    each replica its rows, micro-batch by micro-batch
    backward   gradients are reduced as they come                         dp      the gradient
    unscale    each rank what it owns
    flag, norm and loss, one small sum                                    world   3 numbers
    clip       the same factor everywhere, because the norm is the same bits
    update     each rank what it owns
    publish    everybody has the new weights

Group names are those on the ledger: what is sent for the technique (``dp``) and what is sent to
agree (``world``) are separate lines, and what is sent only to observe is on neither.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from refpar import optim, precision
from refpar.arrays import Array, to_host
from refpar.case import Batch, Case, HostArray, Layout, Outcome, Step, Trace, gradient_order
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn import loss as losses
from refpar.nn.layer import At, Stream, live_bytes
from refpar.nn.models import Model, initial_value
from refpar.parallel import placement
from refpar.parallel.data import DataParallel
from refpar.parallel.placement import Piece


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the groups it talks to.

    Attributes
    ----------
    world : all ranks
    dp : ranks that hold the same part of the model and work on other rows
    """

    world: Communicator
    dp: Communicator

    @classmethod
    def of(cls, world: Communicator, layout: Layout) -> Mesh:
        """Split ``world`` into the groups of ``layout``; what that sends belongs to no step."""
        if world.size != layout.ranks:
            raise ValueError(f"layout {layout} needs {layout.ranks} ranks: there are {world.size}")
        with world.ledger.observing():
            return cls(world, world.split(0, world.rank, name="dp"))


@dataclass
class RankStep:
    """One rank's share of a :class:`refpar.case.Step`: pieces instead of whole arrays."""

    count: int
    loss: float
    norm: float
    outcome: Outcome
    scale: float
    good: int
    t: int
    gradients: dict[str, Piece]
    parameters: dict[str, Piece]
    state: dict[str, dict[str, Piece]]


@dataclass
class RankTrace:
    """What one rank brings home."""

    steps: list[RankStep]
    ledger: Any
    bytes_held: int
    peak_bytes: int


def run(case: Case, layout: Layout, *, world: World | None = None) -> Trace:
    """Train ``case`` on ``layout.ranks`` processes and return the trace, put together from all of them.

    Parameters
    ----------
    world : a standing pool to use; without one, processes are started for this run

    Raises
    ------
    refpar.RankError
        Where a rank fails; it says which, why, and what the others were doing.
    """
    if world is None:
        with World(layout.ranks) as own:
            return run(case, layout, world=own)
    return collect(case, layout, world.run(train, case, layout))


def train(comm: Communicator, case: Case, layout: Layout, *, xp: ModuleType = np) -> RankTrace:
    """Run this rank's part of ``case``; called on every rank."""
    mesh = Mesh.of(comm, layout)
    model = case.model.build()
    types = case.precision
    masters = {name: xp.asarray(initial_value(case.seed, name, spec, types.master))
               for name, spec in model.specs.items()}
    store = DataParallel(mesh.dp, model.units, masters, types, layout.bucket)
    state = {name: {buffer: xp.zeros_like(p) for buffer in case.optimizer.state_names} for name, p in store.masters.items()}
    scaler = precision.LossScaler(types.loss_scale)
    steps: list[RankStep] = []
    t, peak = 0, 0

    for number, batch in enumerate(case.batches):
        mine = placement.rows(len(batch), layout.dp, mesh.dp.rank)
        count = count_everywhere(mesh.world, losses.token_count(batch.mask[mine.start : mine.stop]))
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)

        store.begin()
        loss_sum = 0.0
        parts = placement.micro_batches(mine, layout.micro_batches)
        for m, rows in enumerate(parts):
            at = At(case.seed, number, tuple(rows))
            part, kept = micro_batch(model, store, batch.take(rows).on(xp, types.compute), at, seed, m == len(parts) - 1)
            loss_sum += part
            peak = max(peak, kept)

        gradients = {name: precision.unscale(g, divisor) for name, g in store.reduced().items()}
        loss_sum, norm, overflow = agree(mesh.world, loss_sum, gradients_in_norm(mesh, gradients), gradients.values())
        outcome: Outcome = "no tokens" if count == 0 else "overflow" if overflow else "updated"
        if outcome == "updated":
            t += 1
            factor = 1.0 if case.clip is None else optim.clip_factor(norm, case.clip)
            for name, g in gradients.items():
                decays = optim.decays(model.specs[name])
                optim.update(case.optimizer, store.masters[name], g * factor, state[name], t, decays)
            store.publish()
        if outcome != "no tokens":
            scaler.update(overflow)

        with comm.ledger.observing():
            check_replicas(mesh.dp, store.weights)
        speaks = mesh.dp.rank == 0
        order = gradient_order(model.units)
        steps.append(RankStep(
            count, loss_sum / max(count, 1), norm, outcome, scaler.scale, scaler.good, t,
            {name: piece(gradients[name], speaks) for name in order},
            {name: piece(p, speaks) for name, p in store.weights.items()},
            {name: {buffer: piece(x, speaks) for buffer, x in buffers(state, store, name).items()}
             for name in store.weights},
        ))
    return RankTrace(steps, comm.ledger.snapshot(), live_bytes(store.weights, store.masters, state), peak)


def micro_batch(
    model: Model, store: DataParallel, batch: Batch, at: At, seed: float, last: bool
) -> tuple[float, int]:
    """Run one micro-batch forward and backward, the gradients going to ``store`` as they come.

    Returns
    -------
    the sum of its losses, and the bytes of activations it kept for the backward pass
    """
    x, saved = batch.inputs, []
    for _, layer in model.units:
        x, kept = layer.forward(store.weights, x, at)
        saved.append(kept)
    loss_sum, kept_loss = model.loss.forward(x, batch.targets, batch.mask)
    peak = live_bytes(saved, kept_loss)

    dy = model.loss.backward(kept_loss, seed)
    for index, (_, layer) in reversed(list(enumerate(model.units))):
        for name, gradient in (stream := Stream(layer.backward(store.weights, saved.pop(), dy))):
            store.consume(name, gradient)
        dy = stream.dx
        store.unit_done(index, last)
    return float(loss_sum), peak


def count_everywhere(world: Communicator, tokens: int) -> int:
    """Return the number of tokens on all replicas together."""
    return int(ring.all_reduce(world, np.array([tokens], np.int64))[0])


def gradients_in_norm(mesh: Mesh, gradients: Mapping[str, Array]) -> list[Array]:
    """Return the gradients this rank counts in the global norm: what several ranks hold, one counts."""
    return list(gradients.values()) if mesh.dp.rank == 0 else []


def agree(
    world: Communicator, loss_sum: float, counted: Iterable[Array], seen: Iterable[Array]
) -> tuple[float, float, bool]:
    """Sum loss, squared norm and overflow flag over all ranks, in one message.

    Returns
    -------
    the sum of losses, the global norm, and whether any rank saw an overflow: the same bits everywhere,
    so that all ranks clip by the same factor, or all skip the step
    """
    squares = sum(optim.squared_norm(g) for g in counted)
    overflow = any(precision.overflowed(g) for g in seen)
    loss, squares, overflows = ring.all_reduce(world, np.array([loss_sum, squares, overflow], np.float64)).tolist()
    return loss, math.sqrt(squares), overflows > 0


def check_replicas(comm: Communicator, weights: Mapping[str, Array]) -> None:
    """Raise where ranks that should hold equal weights do not, bit for bit."""
    digests = np.array([digest(w) for w in weights.values()], np.int64)
    for rank, other in enumerate(ring.all_gather(comm, digests)):
        if (digests != other).any():
            name = list(weights)[int(np.argmax(digests != other))]
            raise AssertionError(f"{name} on rank {comm.rank} and rank {rank} of group {comm.name} differ: replicas drift")


def digest(x: Array) -> int:
    """Return 8 bytes that stand for all bytes of ``x``."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(to_host(x)), digest_size=8).digest(), signed=True)


def buffers(state: Mapping[str, Mapping[str, Array]], store: DataParallel, name: str) -> dict[str, Array]:
    """Return what a step leaves behind beside the weights; the master only where weights are rounded."""
    half = store.types.master != store.types.compute
    return {**state[name], "master": store.masters[name]} if half else dict(state[name])


def piece(x: Array, speaks: bool) -> Piece:
    """Return the positions and values this rank speaks for: all of ``x``, or nothing."""
    size = x.size if speaks else 0
    return np.arange(size), np.array(to_host(x)).reshape(-1)[:size]


def collect(case: Case, layout: Layout, parts: Sequence[RankTrace]) -> Trace:
    """Put the pieces of all ranks together; every element is written exactly once."""
    shapes = {name: spec.shape for name, spec in case.model.build().specs.items()}

    def whole(pieces: Iterable[Mapping[str, Piece]]) -> dict[str, HostArray]:
        return {name: placement.assemble(shapes[name], p) for name, p in placement.merge(pieces).items()}

    steps = []
    for ranks in zip(*(part.steps for part in parts), strict=True):
        first = ranks[0]
        agreed = {(r.count, r.loss, r.norm, r.outcome, r.scale, r.good, r.t) for r in ranks}
        if len(agreed) > 1 and first.norm == first.norm:  # a NaN norm equals nothing, itself included
            raise AssertionError(f"ranks disagree on (count, loss, norm, outcome, scale, good, t): {sorted(agreed)}")
        state: dict[str, dict[str, HostArray]] = {name: {} for name in shapes}
        for buffer in next(iter(first.state.values()), {}):
            of_buffer = ({name: buffers[buffer] for name, buffers in r.state.items()} for r in ranks)
            for name, x in whole(of_buffer).items():
                state[name][buffer] = x
        steps.append(Step(
            first.count, first.loss, whole(r.gradients for r in ranks), first.norm, first.outcome,
            first.scale, first.good, first.t, whole(r.parameters for r in ranks), state,
        ))
    return Trace(case, layout, steps, [p.ledger for p in parts], [p.bytes_held for p in parts],
                 [p.peak_bytes for p in parts])
