"""What the pieces of a step compute: each replica's share of the gradient, each micro-batch's loss, what stages send.

A whole step says *that* something is wrong; its pieces say where. They are computed on one device, from the weights
that the step starts with, by names that an implementation can dump too::

    dp1/micro2/count                 tokens of micro-batch 2 of replica 1
    dp1/micro2/loss                  the sum of their losses
    dp1/micro2/activation/blocks.0   what the stage that ends with this unit sends on
    dp1/gradient/NAME                what replica 1 brings to the reduction: divided and unscaled like the gradient,
                                     so that the gradient is the sum over the replicas
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refpar import precision
from refpar.arrays import Array
from refpar.case import Case, HostArray, Layout, gradient_order
from refpar.nn import loss as losses
from refpar.nn.layer import At, Stream
from refpar.nn.models import Model
from refpar.parallel import placement, schedule


def cut(layout: Layout, rows: int) -> list[list[range]]:
    """Return the rows of each micro-batch of each replica."""
    return [placement.micro_batches(placement.rows(rows, layout.dp, d), layout.micro_batches) for d in range(layout.dp)]


def boundaries(model: Model, layout: Layout) -> list[str]:
    """Return the units at whose end a stage sends its activation on."""
    stages = schedule.stages_of(len(model.units), layout.stages or layout.pp)
    return [model.units[units[-1]][0] for units in stages[:-1]]


def parts(
    case: Case,
    layout: Layout,
    number: int,
    weights: Mapping[str, HostArray],
    scale: float,
    asarray: Callable[[HostArray], Array] = np.asarray,
) -> dict[str, Any]:
    """Return the pieces of step ``number``, by name, in causal order.

    Parameters
    ----------
    weights : that the step starts from, of the type that the case computes in
    scale : the loss scale of the step
    asarray : makes an array of the library to compute with
    """
    model, types, batch = case.model.build(), case.precision, case.batches[number]
    seed, divisor = losses.seed_and_divisor(case.divide, scale, losses.token_count(batch.mask))
    params = {name: asarray(w) for name, w in weights.items()}
    ends = boundaries(model, layout)
    result: dict[str, Any] = {}
    gradients: list[dict[str, Array]] = []
    for d, micro_batches in enumerate(cut(layout, len(batch))):
        rows = [row for part in micro_batches for row in part]
        mine = batch.take(rows).on(np, types.compute)
        x, targets = (asarray(a) if a.dtype.kind == "f" else a for a in (mine.inputs, mine.targets))
        saved: list[Any] = []
        outputs = {}
        for unit, layer in model.units:
            x, kept = layer.forward(params, x, At(case.seed, number, tuple(rows)))
            saved.append(kept)
            outputs[unit] = x
        dys, start = [], 0
        for m, part in enumerate(micro_batches):
            here = slice(start, start := start + len(part))
            name = f"dp{d}/micro{m}"
            result[f"{name}/count"] = losses.token_count(mine.mask[here])
            result |= {f"{name}/activation/{unit}": np.array(outputs[unit][here]) for unit in ends}
            loss_sum, kept = model.loss.forward(x[here], targets[here], mine.mask[here])
            result[f"{name}/loss"] = float(loss_sum)
            dys.append(model.loss.backward(kept, seed))
        dy = np.concatenate(dys)
        gradients.append({})
        for _, layer in reversed(model.units):
            stream = Stream(layer.backward(params, saved.pop(), dy))
            for parameter, gradient in stream:
                precision.accumulate(gradients[-1], parameter, gradient, types.gradients)
            dy = stream.dx
    if layout.dp > 1:
        for parameter in trained(case):
            for d, own in enumerate(gradients):
                result[f"dp{d}/gradient/{parameter}"] = np.array(precision.unscale(own[parameter], divisor))
    return result


def trained(case: Case) -> list[str]:
    """Return the parameters that have a gradient, last layer first."""
    return [name for name in gradient_order(case.model.build().units) if name not in case.frozen_names]


def in_order(step: Mapping[str, Any], pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a step's items and its pieces, in causal order: each replica's share before the sum."""

    def walk() -> Iterator[tuple[str, Any]]:
        for name, value in step.items():
            if name == "loss":
                yield from ((piece, x) for piece, x in pieces.items() if "/gradient/" not in piece)
            if name.startswith("gradient/"):
                yield from ((piece, x) for piece, x in pieces.items() if piece.partition("/")[2] == name)
            yield name, value

    return dict(walk())


def kind_of(name: str) -> str:
    """Return what sort of value a name stands for: ``gradient``, ``dp gradient``, ``micro loss``, ``state``, …"""
    words = name.split("/")
    if words[0].startswith("step") and words[0][4:].isdigit():
        words = words[1:]
    if len(words) > 1 and words[0].startswith("dp") and words[0][2:].isdigit():
        return f"micro {words[2]}" if words[1].startswith("micro") and len(words) > 2 else f"dp {words[1]}"
    return words[0]


def before(steps: Sequence[Any], number: int, start: Mapping[str, HostArray], scale: float) -> tuple[Any, float]:
    """Return the weights and the loss scale that step ``number`` of a trace starts from."""
    return (steps[number - 1].parameters, steps[number - 1].scale) if number else (start, scale)


def micro_gradients(
    case: Case, layout: Layout, number: int, weights: Mapping[str, HostArray], scale: float
) -> list[dict[str, HostArray]]:
    """Return what the micro-batches of one number, of all replicas together, bring to the gradient."""
    parts_of = [
        [row for d in cut(layout, len(case.batches[number])) for row in d[m]] for m in range(layout.micro_batches)
    ]
    model, batch = case.model.build(), case.batches[number]
    seed, divisor = losses.seed_and_divisor(case.divide, scale, losses.token_count(batch.mask))
    result = []
    for rows in parts_of:
        at, mine = At(case.seed, number, tuple(rows)), batch.take(rows).on(np, case.precision.compute)
        y, saved = model.network.forward(weights, mine.inputs, at)
        _, kept = model.loss.forward(y, mine.targets, mine.mask)
        own: dict[str, Array] = {}
        for name, gradient in Stream(model.network.backward(weights, saved, model.loss.backward(kept, seed))):
            precision.accumulate(own, name, gradient, case.precision.gradients)
        result.append({name: np.array(precision.unscale(g, divisor)) for name, g in own.items()})
    return result
