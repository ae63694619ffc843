"""Train a case on many ranks: every technique together, over a mesh of communicators (:mod:`refpar.parallel.mesh`).

The order inside a step is that of :mod:`refpar.single`, with a reduction where ranks must agree::

    count      sum over the replicas, before anything runs forward        world   1 number
    forward    each replica its rows, each stage its units, each          tp, pp
    backward   tensor-parallel rank its slices; gradients are reduced     dp      the gradient
               over the replicas as they come
    tied sum   of the copies of a weight that several stages hold         tied    that gradient
    unscale    each rank what it owns
    flag, norm and loss, one small sum                                    world   3 numbers
    clip       the same factor everywhere, because the norm is the same bits
    update     each rank what it owns
    publish    everybody has the new weights                              dp      with ZeRO, the weights

The words on the right are groups on the ledger: what is sent for a technique (``dp``, ``tp``, ``pp``, ``tied``) and
what is sent to agree (``world``, 8 bytes a number) are separate lines, and what is sent only to observe or to set up
is on neither. :mod:`refpar.parallel.traffic` has the exact formula of each. Who holds which slice of which unit, and
which rows, is in :mod:`refpar.parallel.mesh` and :mod:`refpar.parallel.placement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import ModuleType

import numpy as np

from refpar import optim, precision
from refpar.arrays import Array
from refpar.case import Case, Layout, State, Trace
from refpar.comm import ring
from refpar.comm.communicator import Communicator, Ranks
from refpar.comm.processes import World
from refpar.nn import checkpoint
from refpar.nn import loss as losses
from refpar.nn.layer import At, live_bytes
from refpar.nn.models import Model, Units
from refpar.parallel import pipeline, placement, schedule, tensor
from refpar.parallel.assembly import Pieces, RankStep, RankTrace, check_replicas, collect
from refpar.parallel.data import DataParallel
from refpar.parallel.mesh import Mesh, check
from refpar.parallel.zero import Zero

Store = DataParallel | Zero
OnStep = Callable[[Communicator, RankStep], bool]

SCHEDULES = {"1f1b": schedule.one_f_one_b, "gpipe": schedule.gpipe}


def run(case: Case, layout: Layout, *, world: Ranks | None = None, start: State | None = None) -> Trace:
    """Train ``case`` on ``layout.ranks`` processes and return the trace, put together from all of them.

    Parameters
    ----------
    world : a standing pool to use; without one, processes are started for this run
    start : a state to go on from, of whatever layout; it is left as it is

    Raises
    ------
    ValueError
        Where ``layout`` cannot run the model or has not as many ranks as ``world``, or ``start`` belongs to another
        case: before anything starts.
    refpar.RankError
        Where a rank fails; it says which, why, and what the others were doing.
    """
    check(layout, case.model.build())
    if start is not None:
        start.check(case)
    if world is None:
        with World(layout.ranks) as own:
            return run(case, layout, world=own, start=start)
    if world.ranks != layout.ranks:
        raise ValueError(f"layout {layout} needs {layout.ranks} ranks: there are {world.ranks}")
    return collect(case, layout, world.run(train, case, layout, start))


@np.errstate(over="ignore", invalid="ignore")  # an overflow is an outcome of a step, and reported there
def train(
    comm: Communicator,
    case: Case,
    layout: Layout,
    start: State | None = None,
    *,
    xp: ModuleType | None = None,
    on_step: OnStep | None = None,
    light: bool = False,
    strict: bool = True,
) -> RankTrace:
    """Run this rank's part of ``case``; called on every rank.

    Parameters
    ----------
    start : as for :func:`run`
    xp : the array library; by default that of the rank's backend
    on_step : called after each step; the run ends early where it returns True, which it must do on all ranks alike
    light : keep the numbers of each step, but arrays of the last one alone, and no gradients
    strict : hold replicas to equal bits after each step; not where a wrong run is wanted to its end
    """
    model, types, xp = case.model.build(), case.precision, xp or comm.xp
    mesh = Mesh.of(comm, layout, model)
    begin = beginning(case, start)
    units, loss = build(mesh, model)
    store = make_store(mesh, units, case, begin, xp)
    state = make_state(mesh, store, begin, xp)
    scaler = precision.LossScaler(types.loss_scale, begin.scale, begin.good)
    t, trace = begin.t, RankTrace(begun=begin.step)
    del begin, start  # whole arrays, of which this rank has taken what it holds

    for number, batch in enumerate(case.batches[trace.begun :], trace.begun):
        rows = placement.rows(len(batch), layout.dp, mesh.dp.rank)
        speaks = mesh.tp.rank == mesh.pp.rank == 0
        count = count_everywhere(comm, losses.token_count(batch.mask[rows.start : rows.stop]) if speaks else 0)
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)

        store.begin()
        parts = placement.micro_batches(rows, layout.micro_batches)
        stage = pipeline.Stage(
            mesh.pp,
            store.units,
            loss,
            store,
            [batch.take(part).on(xp, types.compute) for part in parts],
            [At(case.seed, number, tuple(part)) for part in parts],
            seed,
            types.compute,
        )
        stage.run(SCHEDULES[layout.schedule](layout.pp, layout.micro_batches)[mesh.pp.rank])

        gradients = {name: precision.unscale(g, divisor) for name, g in tied_sum(mesh, store, types).items()}
        counted = [g for name, g in gradients.items() if owner_in_norm(mesh, name)]
        loss_sum = stage.loss_sum if mesh.tp.rank == 0 else 0.0
        loss_sum, norm, overflow = agree(comm, loss_sum, counted, gradients.values())

        outcome = precision.outcome(count, overflow)
        t = optim.next_t(t, outcome)
        if outcome == "updated":
            factor = optim.clip_factor(norm, case.clip)
            for name, g in gradients.items():
                decays = optim.decays(model.specs[name])
                g = clipped(mesh, name, g, factor)
                optim.update(case.optimizer, store.masters[name], g, state[name], t, decays)
            store.publish()
        if outcome != "no tokens":
            scaler.update(overflow)

        if strict:
            check_replicas(mesh, store.weights)
        step = RankStep(count, loss_sum / max(count, 1), norm, outcome, scaler.scale, scaler.good, t)
        stop = on_step is not None and on_step(comm, step)
        pieces = Pieces(mesh, store)
        if not light:
            step.gradients = pieces.of(gradients)
        if not light or stop or number == len(case.batches) - 1:
            step.parameters = pieces.of({name: store.own_weights(name) for name in store.weights})
            masters = {} if types.master == types.compute else store.masters
            step.state = pieces.of_state(state, masters)
        trace.add(step, stage)
        if stop:
            break
    trace.ledger = comm.ledger.snapshot()
    trace.bytes_held = live_bytes(store.weights, store.masters, store.gradients, state)
    trace.peak_gradients, trace.peak_gathered = store.peak_gradients, store.peak_gathered
    return trace


def beginning(case: Case, start: State | None) -> State:
    """Return where the run starts: from initial values, or from *all* that was saved: weights, moments, the number of
    updates, the loss scale and its growth counter, and the place in the data."""
    return State.initial(case) if start is None else start


def build(mesh: Mesh, model: Model) -> tuple[Units, losses.Loss]:
    """Return the units of this stage, rewritten for this rank's slices and for recomputation, and the loss.

    The order is from the inside out: tensor parallelism rewrites layers, checkpointing wraps units of them, and
    ZeRO-3 (in its store) gathers around those, so that a recomputation finds its weights gathered.
    """
    units: Units = model.units
    loss = model.loss
    if mesh.layout.tp > 1:
        units = tensor.parallelize(units, mesh.tp)
        loss = tensor.parallel_loss(model, mesh.tp)
    mine = [units[i] for i in mesh.units]
    return checkpoint.segments(mine, mesh.layout.recompute, keep={units[0][0], units[-1][0]}), loss


def make_store(mesh: Mesh, units: Units, case: Case, begin: State, xp: ModuleType) -> Store:
    """Return the weights of this rank: its slices of whole values, which do not depend on the layout."""
    layout = mesh.layout
    names = dict.fromkeys(name for _, layer in units for name in layer.specs)
    initial = {
        name: xp.asarray(placement.slice_initial(begin.master(name), mesh.specs[name], layout.tp, mesh.tp.rank))
        for name in names
    }
    if layout.zero:
        return Zero(mesh.dp, units, initial, case.precision, layout.bucket, layout.zero, case.frozen_names)
    return DataParallel(mesh.dp, units, initial, case.precision, layout.bucket, case.frozen_names)


def make_state(mesh: Mesh, store: Store, begin: State, xp: ModuleType) -> dict[str, dict[str, Array]]:
    """Return what the optimizer keeps for the elements that this rank updates."""

    def own(name: str, whole: Array) -> Array:
        held = placement.positions(mesh.specs[name], mesh.tp.size, mesh.tp.rank)
        r = store.positions(name)
        return xp.asarray(whole.reshape(-1)[held[r.start : r.stop]])

    return {name: {b: own(name, x) for b, x in begin.buffers(name).items()} for name in store.masters}


def tied_sum(mesh: Mesh, store: Store, types: precision.Precision) -> dict[str, Array]:
    """Return the gradients of what this rank owns, those of a tied weight summed over the stages that hold it."""
    gradients = store.reduced()
    for name, group in mesh.tied.items():
        if group is not None and name in gradients:
            gradients[name] = ring.all_reduce(group, gradients[name], accumulate=types.reduce)
    return gradients


def count_everywhere(world: Communicator, tokens: int) -> int:
    """Return the number of tokens on all replicas together."""
    return int(ring.all_reduce(world, np.array([tokens], np.int64))[0])


def owner_in_norm(mesh: Mesh, name: str) -> bool:
    """Return whether this rank counts its elements of ``name`` in the global norm: what several hold, one counts."""
    return mesh.owner(name)


def clipped(mesh: Mesh, name: str, gradient: Array, factor: float) -> Array:
    """Return what the update sees: clipped on every rank, whether or not it is this one that counts it in the norm."""
    return gradient * factor


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
