"""Train a case on one device: the truth that every technique is held to, and the file to read first.

A step is::

    count      tokens that count in the whole batch, from the mask alone
    forward    the loss as a *sum* over tokens
    backward   starts from seed = scale / count; gradients of every parameter, last layer first
    unscale    divide by the scale; by scale * count where backward has started from the scale alone
    flag       is any gradient infinite or NaN?
    norm       of all gradients together
    clip       shrink them to the allowed norm
    update     master weights, moments, and the weights that the next step sees

Nothing here knows of ranks, and nothing from ``comm`` or ``parallel`` is imported: an oracle that
shares a defect with what it judges is no oracle.

No partial sum is sent, so ``Precision.reduce`` means nothing here. In float16 that matters: whether a *part* of a
gradient overflows where the whole does not is up to the layout, see :class:`refpar.case.Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from refpar import optim, precision
from refpar.arrays import Array, to_host
from refpar.case import Batch, Case, HostArray, Layout, State, Step, Trace, gradient_order
from refpar.nn import loss as losses
from refpar.nn.checkpoint import segments
from refpar.nn.layer import At, Params, Stream, live_bytes
from refpar.nn.loss import Loss
from refpar.nn.models import Units

Split = Callable[[int, int], Sequence[Sequence[int]]]


def whole(step: int, rows: int) -> Sequence[Sequence[int]]:
    """Take all rows of a step at once, in order."""
    return [range(rows)]


@np.errstate(over="ignore", invalid="ignore")  # an overflow is an outcome of a step, and reported there
def train(
    case: Case,
    *,
    xp: ModuleType = np,
    split: Split = whole,
    recompute: str = "none",
    start: State | Mapping[str, HostArray] | None = None,
) -> Trace:
    """Return the trace of ``case`` on one device.

    Parameters
    ----------
    case : the problem
    xp : the array library, ``numpy`` or ``cupy``
    split : ``split(step, rows)`` gives the row numbers of each micro-batch. The mathematics does not depend on
        it; how much the rounded result does is what :func:`refpar.oracle.bounds.spread` measures.
    recompute : activation checkpointing, see :func:`refpar.nn.checkpoint.segments`; changes no bit of the result
    start : initial values, by name, by default those that ``case.seed`` draws; or a state to go on from. It is
        left as it is
    """
    model = case.model.build()
    units = segments(model.units, recompute)
    types = case.precision
    begin = start if isinstance(start, State) else State.initial(case, start)
    begin.check(case)
    initial = {name: xp.asarray(begin.master(name).copy()) for name in model.specs}
    weights = {name: precision.to_compute(p, types) for name, p in initial.items()}
    frozen = case.frozen_names
    masters = {name: p for name, p in initial.items() if name not in frozen}
    state = {name: {b: xp.asarray(x.copy()) for b, x in begin.buffers(name).items()} for name in masters}
    order = [name for name in gradient_order(model.units) if name in masters]
    scaler = precision.LossScaler(types.loss_scale, begin.scale, begin.good)
    steps: list[Step] = []
    stored: dict[str, Array] = {}
    t, peak = begin.t, 0

    for number, batch in enumerate(case.batches[begin.step :], begin.step):
        count = losses.token_count(batch.mask)
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)

        stored = {}
        loss_sum = 0.0
        for rows in split(number, len(batch)):
            at = At(case.seed, number, tuple(rows))
            x = batch.take(rows).on(xp, types.compute)
            saved: list[Any] = []
            loss_sum += forward(units, model.loss, weights, x, at, saved)
            peak = max(peak, backward(units, model.loss, weights, saved, seed, stored, types.gradients))

        for name in order:  # of what no row has used the gradient is zero
            if name not in stored:
                stored[name] = xp.zeros_like(weights[name], dtype=types.gradients)
        gradients = {name: precision.unscale(stored[name], divisor) for name in order}
        overflow = any(precision.overflowed(g) for g in gradients.values())
        norm = math.sqrt(sum(optim.squared_norm(g) for g in gradients.values()))

        outcome = precision.outcome(count, overflow)
        t = optim.next_t(t, outcome)
        if outcome == "updated":
            factor = optim.clip_factor(norm, case.clip)
            for name, g in gradients.items():
                decays = optim.decays(model.specs[name])
                optim.update(case.optimizer, masters[name], g * factor, state[name], t, decays)
                weights[name] = precision.to_compute(masters[name], types)
        if outcome != "no tokens":
            scaler.update(overflow)

        step = Step(
            count=count,
            loss=loss_sum / max(count, 1),
            gradients={name: copy(g) for name, g in gradients.items()},
            norm=norm,
            outcome=outcome,
            scale=scaler.scale,
            good=scaler.good,
            t=t,
            parameters={name: copy(p) for name, p in weights.items()},
            state={},
        )
        for name, own in state.items():
            kept = own if masters[name] is weights[name] else {**own, "master": masters[name]}
            step.state[name] = {buffer: copy(x) for buffer, x in kept.items()}
        steps.append(step)
    held = live_bytes(weights, masters, {name: g for name, g in stored.items() if name in masters}, state)
    return Trace(case, Layout(), steps, bytes_held=[held], peak_bytes=[peak], begun=begin.step)


def forward(units: Units, loss: Loss, weights: Params, batch: Batch, at: At, saved: list[Any]) -> float:
    """Return the sum of the losses of a micro-batch; append what each unit keeps, and the loss, to ``saved``."""
    x = batch.inputs
    for _, layer in units:
        x, kept = layer.forward(weights, x, at)
        saved.append(kept)
    loss_sum, kept = loss.forward(x, batch.targets, batch.mask)
    saved.append(kept)
    return float(loss_sum)


def backward(
    units: Units, loss: Loss, weights: Params, saved: list[Any], seed: float, gradients: dict[str, Array], dtype: str
) -> int:
    """Add the gradients of a micro-batch to ``gradients``, emptying ``saved``.

    Returns
    -------
    the largest number of bytes of activations that were alive at once
    """
    peak = live_bytes(saved)
    dy = loss.backward(saved.pop(), seed)
    for _, layer in reversed(units):
        stream = Stream(layer.backward(weights, saved[-1], dy))
        for name, gradient in stream:
            precision.accumulate(gradients, name, gradient, dtype)
            peak = max(peak, live_bytes(saved))  # while what a layer has recomputed is still there
        dy = stream.dx
        saved.pop()
    return peak


def copy(x: Array) -> HostArray:
    """Return a copy on the host that no later step can change."""
    return np.array(to_host(x))
