"""Train a case on one device: the truth that every technique is held to, and the file to read first.

A step is::

    count      tokens that count in the whole batch, from the mask alone
    forward    the loss as a *sum* over tokens
    backward   starts from seed = scale / count; gradients of every parameter, last layer first
    unscale    divide by what is left to divide by
    flag       is any gradient infinite or NaN?
    norm       of all gradients together
    clip       shrink them to the allowed norm
    update     master weights, moments, and the weights that the next step sees

Nothing here knows of ranks, and nothing from ``comm`` or ``parallel`` is imported: an oracle that
shares a defect with what it judges is no oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from refpar import optim, precision
from refpar.arrays import Array, to_host
from refpar.case import Batch, Case, HostArray, Layout, Outcome, Step, Trace, gradient_order
from refpar.nn import loss as losses
from refpar.nn.layer import At, Stream, live_bytes
from refpar.nn.models import Model, initial_value

Split = Callable[[int, int], Sequence[Sequence[int]]]


def whole(step: int, rows: int) -> Sequence[Sequence[int]]:
    """Take all rows of a step at once, in order."""
    return [range(rows)]


def train(case: Case, *, xp: ModuleType = np, split: Split = whole) -> Trace:
    """Return the trace of ``case`` on one device.

    Parameters
    ----------
    case : the problem
    xp : the array library, ``numpy`` or ``cupy``
    split : ``split(step, rows)`` gives the row numbers of each micro-batch. The mathematics does not depend on
        it; how much the rounded result does is what :func:`refpar.oracle.bounds.spread` measures.
    """
    model = case.model.build()
    types = case.precision
    masters = {name: xp.asarray(initial_value(case.seed, name, spec, types.master))
               for name, spec in model.specs.items()}
    weights = {name: precision.to_compute(p, types) for name, p in masters.items()}
    state = {name: {buffer: xp.zeros_like(p) for buffer in case.optimizer.state_names} for name, p in masters.items()}
    scaler = precision.LossScaler(types.loss_scale)
    steps: list[Step] = []
    t, peak = 0, 0

    for number, batch in enumerate(case.batches):
        count = losses.token_count(batch.mask)
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)

        gradients: dict[str, Array] = {}
        loss_sum = 0.0
        for rows in split(number, len(batch)):
            at = At(case.seed, number, tuple(rows))
            part, kept = backward(model, weights, batch.take(rows).on(xp, types.compute), at, seed, gradients, types.gradients)
            loss_sum += part
            peak = max(peak, kept)

        gradients = {name: precision.unscale(g, divisor) for name, g in gradients.items()}
        overflow = any(precision.overflowed(g) for g in gradients.values())
        norm = math.sqrt(sum(optim.squared_norm(g) for g in gradients.values()))

        outcome: Outcome = "no tokens" if count == 0 else "overflow" if overflow else "updated"
        if outcome == "updated":
            t += 1
            factor = 1.0 if case.clip is None else optim.clip_factor(norm, case.clip)
            for name, g in gradients.items():
                decays = optim.decays(model.specs[name])
                optim.update(case.optimizer, masters[name], g * factor, state[name], t, decays)
                weights[name] = precision.to_compute(masters[name], types)
        if outcome != "no tokens":
            scaler.update(overflow)

        steps.append(Step(
            count, loss_sum / max(count, 1),
            {name: copy(gradients[name]) for name in gradient_order(model.units)},
            norm, outcome, scaler.scale, scaler.good, t,
            {name: copy(p) for name, p in weights.items()},
            {name: {buffer: copy(x) for buffer, x in buffers(state[name], masters[name], weights[name]).items()}
             for name in weights},
        ))
    return Trace(case, Layout(), steps, bytes_held=[held(weights, masters, state)], peak_bytes=[peak])


def backward(
    model: Model, weights: dict[str, Array], batch: Batch, at: At, seed: float, gradients: dict[str, Array], dtype: str
) -> tuple[float, int]:
    """Run one micro-batch forward and backward, adding into ``gradients``.

    Returns
    -------
    the sum of its losses, and the bytes of activations it kept for the backward pass
    """
    x = batch.inputs
    saved = []
    for _, layer in model.units:
        x, kept = layer.forward(weights, x, at)
        saved.append(kept)
    loss_sum, kept_loss = model.loss.forward(x, batch.targets, batch.mask)
    peak = live_bytes(saved, kept_loss)

    dy = model.loss.backward(kept_loss, seed)
    for _, layer in reversed(model.units):
        for name, gradient in (stream := Stream(layer.backward(weights, saved.pop(), dy))):
            precision.accumulate(gradients, name, gradient, dtype)
        dy = stream.dx
    return float(loss_sum), peak


def buffers(state: dict[str, Array], master: Array, weight: Array) -> dict[str, Array]:
    """Return what a step leaves behind beside the weights; the master only where it is another array."""
    return state if master is weight else {**state, "master": master}


def copy(x: Array) -> HostArray:
    """Return a copy on the host that no later step can change."""
    return np.array(to_host(x))


def held(weights: dict[str, Array], masters: dict[str, Array], state: dict[str, dict[str, Array]]) -> int:
    """Return the bytes kept from step to step."""
    return live_bytes(weights, masters, state)
