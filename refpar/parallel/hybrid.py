"""Train a case on many ranks: every technique together, over a mesh of communicators.

Ranks are numbered with tensor-parallel neighbours closest, because they talk most; then replicas; then
stages of the pipeline, which talk least. For ``dp=2, tp=2, pp=2``::

                     stage 0                     stage 1
                     t=0     t=1                 t=0     t=1
    replica d=0      rank 0  rank 1   ------>    rank 4  rank 5      tp: rows of this drawing
    replica d=1      rank 2  rank 3   ------>    rank 6  rank 7      dp: columns   pp: arrows

The order inside a step is that of :mod:`refpar.single`, with a reduction where ranks must agree::

    count      sum over the replicas, before anything runs forward        world   1 number
    forward    each replica its rows, each stage its units, each tensor-parallel rank its slices
    backward   gradients are reduced over the replicas as they come       dp      the gradient
    tied sum   of the copies of a weight that several stages hold         tied    that gradient
    unscale    each rank what it owns
    flag, norm and loss, one small sum                                    world   3 numbers
    clip       the same factor everywhere, because the norm is the same bits
    update     each rank what it owns
    publish    everybody has the new weights

Group names are those on the ledger: what is sent for a technique (``dp``, ``tp``, ``pp``, ``tied``) and what is
sent to agree (``world``) are separate lines, and what is sent only to observe or to set up is on neither.
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
from refpar.case import Case, HostArray, Layout, Outcome, Step, Trace, gradient_order
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn import checkpoint
from refpar.nn import loss as losses
from refpar.nn.layer import At, live_bytes
from refpar.nn.models import Model, Units, initial_value
from refpar.parallel import pipeline, placement, schedule, tensor
from refpar.parallel.data import DataParallel
from refpar.parallel.placement import Piece
from refpar.parallel.zero import Zero

Store = DataParallel | Zero


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the groups it talks to.

    Attributes
    ----------
    world : all ranks
    dp : ranks that hold the same part of the model and work on other rows
    tp : ranks that hold other slices of the same units
    pp : ranks that hold other units, in order
    stages : for each stage, the numbers of its units
    tied : for each name that several stages hold, those stages; None where this one is not among them
    """

    world: Communicator
    dp: Communicator
    tp: Communicator
    pp: Communicator
    stages: tuple[range, ...]
    tied: Mapping[str, Communicator | None]

    @classmethod
    def of(cls, world: Communicator, layout: Layout, model: Model) -> Mesh:
        """Split ``world`` into the groups of ``layout``; what that sends belongs to no step."""
        check(layout, model)
        if world.size != layout.ranks:
            raise ValueError(f"layout {layout} needs {layout.ranks} ranks: there are {world.size}")
        rest, t = divmod(world.rank, layout.tp)
        p, d = divmod(rest, layout.dp)
        with world.ledger.observing():
            dp = world.split(p * layout.tp + t, d, name="dp")
            tp = world.split(p * layout.dp + d, t, name="tp")
            pp = world.split(d * layout.tp + t, p, name="pp")
            assert dp is not None
            assert tp is not None
            assert pp is not None
            stages = schedule.stages_of(len(model.units), layout.pp)
            tied = {}
            for name in model.specs:
                holders = [
                    s for s, numbers in enumerate(stages) if any(name in model.units[i][1].specs for i in numbers)
                ]
                if len(holders) > 1:
                    tied[name] = pp.split(0 if p in holders else None, p, name="tied")
        return cls(world, dp, tp, pp, stages, tied)

    def owner(self, name: str, model: Model) -> bool:
        """Return whether this rank speaks for what it holds of ``name``, where others hold the same elements.

        The first stage that holds a tied weight does, and of the tensor-parallel ranks the first where they all
        hold the whole. Whether replicas hold the same is for the store to say.
        """
        tied = self.tied.get(name)
        return (tied is None or tied.rank == 0) and (model.specs[name].axis is not None or self.tp.rank == 0)


def check(layout: Layout, model: Model) -> None:
    """Refuse a layout that cannot run ``model``, before anything is started.

    Raises
    ------
    ValueError
        With the reason: more stages than units, more slices than heads.
    """
    if layout.pp > len(model.units):
        raise ValueError(
            f"pp is {layout.pp}: the model has {len(model.units)} units, and every stage needs at least one"
        )
    tensor.check(model.units, layout.tp)


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
        check(layout, case.model.build())
        with World(layout.ranks) as own:
            return run(case, layout, world=own)
    return collect(case, layout, world.run(train, case, layout))


def train(comm: Communicator, case: Case, layout: Layout, *, xp: ModuleType = np) -> RankTrace:
    """Run this rank's part of ``case``; called on every rank."""
    model = case.model.build()
    types = case.precision
    mesh = Mesh.of(comm, layout, model)
    units, loss = build(mesh, model, layout)
    store = make_store(mesh, units, model, case, layout, xp)
    state = {name: optim.new_state(case.optimizer, p) for name, p in store.masters.items()}
    scaler = precision.LossScaler(types.loss_scale)
    instructions = SCHEDULES[layout.schedule](layout.pp, layout.micro_batches)[mesh.pp.rank]
    steps: list[RankStep] = []
    t, peak = 0, 0

    for number, batch in enumerate(case.batches):
        mine = placement.rows(len(batch), layout.dp, mesh.dp.rank)
        speaks = mesh.tp.rank == mesh.pp.rank == 0
        count = count_everywhere(mesh.world, losses.token_count(batch.mask[mine.start : mine.stop]) if speaks else 0)
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)

        store.begin()
        parts = placement.micro_batches(mine, layout.micro_batches)
        stage = pipeline.Stage(
            mesh.pp,
            store.units,
            loss,
            store,
            [batch.take(rows).on(xp, types.compute) for rows in parts],
            [At(case.seed, number, tuple(rows)) for rows in parts],
            seed,
            types.compute,
        )
        stage.run(instructions)
        peak = max(peak, stage.peak_bytes)

        gradients = {name: precision.unscale(g, divisor) for name, g in tied_sum(mesh, store, types).items()}
        owned = [g for name, g in gradients.items() if owner_in_norm(mesh, store, model, name)]
        loss_sum = stage.loss_sum if mesh.tp.rank == 0 else 0.0
        loss_sum, norm, overflow = agree(mesh.world, loss_sum, owned, gradients.values())
        outcome: Outcome = "no tokens" if count == 0 else "overflow" if overflow else "updated"
        if outcome == "updated":
            t += 1
            factor = optim.clip_factor(norm, case.clip)
            for name, g in gradients.items():
                decays = optim.decays(model.specs[name])
                optim.update(case.optimizer, store.masters[name], g * factor, state[name], t, decays)
            store.publish()
        if outcome != "no tokens":
            scaler.update(overflow)

        check_replicas(mesh, store, model)
        piece = Pieces(mesh, store, model)
        step = RankStep(
            count=count,
            loss=loss_sum / max(count, 1),
            norm=norm,
            outcome=outcome,
            scale=scaler.scale,
            good=scaler.good,
            t=t,
            gradients={name: piece(name, g) for name, g in gradients.items()},
            parameters={name: piece(name, store.own_weights(name)) for name in state},
            state={},
        )
        for name in state:
            kept = state[name] if types.master == types.compute else {**state[name], "master": store.masters[name]}
            step.state[name] = {buffer: piece(name, x) for buffer, x in kept.items()}
        steps.append(step)
    held = live_bytes(store.weights, store.masters, store.gradients, state)
    return RankTrace(steps, comm.ledger.snapshot(), held, peak)


SCHEDULES = {"1f1b": schedule.one_f_one_b, "gpipe": schedule.gpipe}


def build(mesh: Mesh, model: Model, layout: Layout) -> tuple[Units, losses.Loss]:
    """Return the units of this stage, rewritten for this rank's slices and for recomputation, and the loss.

    The order is from the inside out: tensor parallelism rewrites layers, checkpointing wraps units of them, and
    ZeRO-3 (in its store) gathers around those, so that a recomputation finds its weights gathered.
    """
    units: Units = model.units
    loss = model.loss
    if layout.tp > 1:
        units = tensor.parallelize(units, mesh.tp)
        loss = tensor.parallel_loss(model, mesh.tp)
    mine = [units[i] for i in mesh.stages[mesh.pp.rank]]
    return checkpoint.segments(mine, layout.recompute, keep={units[0][0], units[-1][0]}), loss


def make_store(mesh: Mesh, units: Units, model: Model, case: Case, layout: Layout, xp: ModuleType) -> Store:
    """Return the weights of this rank, from initial values that do not depend on the layout."""
    names = dict.fromkeys(name for _, layer in units for name in layer.specs)
    masters = {}
    for name in names:
        spec = model.specs[name]
        whole = initial_value(case.seed, name, spec, case.precision.master)
        masters[name] = xp.asarray(placement.slice_initial(whole, spec, layout.tp, mesh.tp.rank))
    if layout.zero:
        return Zero(mesh.dp, units, masters, case.precision, layout.bucket, layout.zero)
    return DataParallel(mesh.dp, units, masters, case.precision, layout.bucket)


def tied_sum(mesh: Mesh, store: Store, types: precision.Precision) -> dict[str, Array]:
    """Return the gradients of what this rank owns, those of a tied weight summed over the stages that hold it."""
    gradients = store.reduced()
    for name, group in mesh.tied.items():
        if group is not None:
            gradients[name] = ring.all_reduce(group, gradients[name], accumulate=types.reduce)
    return gradients


def count_everywhere(world: Communicator, tokens: int) -> int:
    """Return the number of tokens on all replicas together."""
    return int(ring.all_reduce(world, np.array([tokens], np.int64))[0])


def owner_in_norm(mesh: Mesh, store: Store, model: Model, name: str) -> bool:
    """Return whether this rank counts its elements of ``name`` in the global norm: what several hold, one counts."""
    return mesh.owner(name, model) and (isinstance(store, Zero) or mesh.dp.rank == 0)


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


def check_replicas(mesh: Mesh, store: Store, model: Model) -> None:
    """Raise where ranks that hold the same weights do not hold the same bits."""
    whole = [name for name in store.masters if model.specs[name].axis is None]
    groups = [(mesh.tp, whole), *((group, [name]) for name, group in mesh.tied.items() if group is not None)]
    if not (isinstance(store, Zero) and store.stage == 3):
        groups.append((mesh.dp, list(store.masters)))
    with mesh.world.ledger.observing():
        for group, names in groups:
            digests = np.array([digest(store.weights[name]) for name in names], np.int64)
            for rank, other in enumerate(ring.all_gather(group, digests)):
                if (digests != other).any():
                    name = names[int(np.argmax(digests != other))]
                    raise AssertionError(
                        f"{name} differs between ranks {group.rank} and {rank} of group {group.name}: "
                        "replicas have drifted apart"
                    )


def digest(x: Array) -> int:
    """Return 8 bytes that stand for all bytes of ``x``."""
    return int.from_bytes(
        hashlib.blake2b(np.ascontiguousarray(to_host(x)).tobytes(), digest_size=8).digest(), signed=True
    )


@dataclass(frozen=True)
class Pieces:
    """Cuts out of this rank's arrays what it speaks for."""

    mesh: Mesh
    store: Store
    model: Model

    def __call__(self, name: str, x: Array) -> Piece:
        """Return the global flat positions, and the values there, of the elements of ``name`` this rank owns."""
        if not owner_in_norm(self.mesh, self.store, self.model, name):
            return np.empty(0, np.int64), np.empty(0, x.dtype)
        held = placement.positions(self.model.specs[name], self.mesh.tp.size, self.mesh.tp.rank)
        r = self.store.positions(name)
        return held[r.start : r.stop], np.array(to_host(x)).reshape(-1)


def collect(case: Case, layout: Layout, parts: Sequence[RankTrace]) -> Trace:
    """Put the pieces of all ranks together; every element is written exactly once."""
    model = case.model.build()
    shapes = {name: spec.shape for name, spec in model.specs.items()}

    def whole(pieces: Iterable[Mapping[str, Piece]]) -> dict[str, HostArray]:
        merged = placement.merge(pieces)
        return {name: placement.assemble(shapes[name], merged[name]) for name in shapes}

    order = gradient_order(model.units)
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
        gradients = whole(r.gradients for r in ranks)
        steps.append(
            Step(
                first.count,
                first.loss,
                {name: gradients[name] for name in order},
                first.norm,
                first.outcome,
                first.scale,
                first.good,
                first.t,
                whole(r.parameters for r in ranks),
                state,
            )
        )
    return Trace(
        case, layout, steps, [p.ledger for p in parts], [p.bytes_held for p in parts], [p.peak_bytes for p in parts]
    )
