"""What each rank sends in a step, by group, as an exact formula: from sizes alone, without running anything.

========  ===================================================  ===================  =================
group     what                                                 bytes an element     formula
                                                               (mixed precision)
========  ===================================================  ===================  =================
``dp``    gradients, summed on their way to owners or to all   4                    ``data``, ``zero``
          sums to all, or with ZeRO weights from their owners  2
``tp``    an activation for each f and g, a few numbers a      4                    ``tensor``
          token for the loss
``pp``    an activation onward and a gradient back for each    2                    ``pipeline``
          micro-batch and boundary
``tied``  the gradient of a weight that several stages hold    4 to sum, 2 to give  here
``world`` the count (one number); loss, norm, flag (three)     8                    here
========  ===================================================  ===================  =================

A run's ledger must show these numbers, to the byte.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from refpar import split
from refpar.case import Batch, Case, Layout, Trace
from refpar.nn.checkpoint import segments
from refpar.nn.layer import ParamSpec
from refpar.nn.loss import SquaredError
from refpar.nn.models import Model, Units
from refpar.parallel import data, mesh, pipeline, placement, tensor, zero

GROUPS = "dp", "tp", "pp", "tied", "world"


def bytes_sent(case: Case, layout: Layout, rank: int, batch: Batch, *, updated: bool = True) -> dict[str, int]:
    """Return the bytes that ``rank`` sends in the step on ``batch``, for each of the groups.

    Parameters
    ----------
    updated : False for a step that is skipped: it publishes no weights
    """
    model, types = case.model.build(), case.precision
    d, t, p = mesh.place(layout, rank)
    stages = mesh.stages_of(layout, model)
    run = units_run(model, layout, p)
    sizes = {name: size_held(spec, layout.tp, t) for name, spec in model.specs.items()}
    of_units = [{name: sizes[name] for name in layer.specs} for _, layer in run]
    trained = {name: n for unit in of_units for name, n in unit.items() if name not in case.frozen_names}
    partial, gradient, weight, master = (
        np.dtype(kind).itemsize for kind in (types.reduce, types.gradients, types.compute, types.master)
    )
    positions = batch.inputs.shape[1] if batch.inputs.dtype.kind in "iu" else 1
    rows = placement.micro_batches(placement.rows(len(batch), layout.dp, d), layout.micro_batches)
    tokens = [len(part) * positions for part in rows]

    sent = dict.fromkeys(GROUPS, 0)
    if layout.zero:
        scattered, gathered = zero.elements_sent(
            of_units, layout.zero, layout.micro_batches, layout.dp, d, case.frozen_names
        )
        publishes = updated or layout.zero == 3
        sent["dp"] = scattered * partial + gathered * weight * publishes
    else:
        sent["dp"] = data.bytes_sent(run, trained, types, layout.bucket, layout.dp, d)

    loss = model.loss if p == layout.pp - 1 else SquaredError()
    sent["tp"] = tensor.elements_sent(run, loss, tokens, layout.tp, t) * master

    widths = [tensor.output_width(model.units[stage[-1]][1], layout.tp, t) for stage, _ in pairwise(stages)]
    sent["pp"] = pipeline.elements_sent(widths, sum(tokens), p) * weight

    for name, holders in mesh.holders(layout, model).items():
        if p in holders and name in trained:
            own = len(zero.owned(sizes[name], layout.dp, d)) if layout.zero else sizes[name]
            reduce, gather = split.ring_elements(own, len(holders), holders.index(p))
            sent["tied"] += reduce * partial + gather * gradient

    sent["world"] = sum(8 * sum(split.ring_elements(n, layout.ranks, rank)) for n in (1, 3))
    return sent


def bytes_held(case: Case, layout: Layout, rank: int) -> int:
    """Return the bytes that ``rank`` keeps from step to step: weights, gradients, masters and the optimizer's state."""
    model = case.model.build()
    d, t, p = mesh.place(layout, rank)
    of_units = [
        {name: size_held(spec, layout.tp, t) for name, spec in layer.specs.items()}
        for _, layer in units_run(model, layout, p)
    ]
    buffers = len(case.optimizer.state_names)
    return zero.bytes_held(of_units, layout.zero, case.precision, buffers, layout.dp, d, case.frozen_names)


def units_run(model: Model, layout: Layout, p: int) -> Units:
    """Return the units of stage ``p``, wrapped for recomputation as they are run, but not sliced."""
    mine = [model.units[i] for i in mesh.stages_of(layout, model)[p]]
    return segments(mine, layout.recompute, keep={model.units[0][0], model.units[-1][0]})


def size_held(spec: ParamSpec, tp: int, t: int) -> int:
    """Return how many elements of a parameter tensor-parallel rank ``t`` of ``tp`` holds."""
    lengths = list(spec.shape)
    if spec.axis is not None:
        lengths[spec.axis] = len(split.part(lengths[spec.axis], tp, t))
    return math.prod(lengths)


def expected(trace: Trace) -> list[dict[str, int]]:
    """Return what each rank must have sent in a run, by group."""
    batches = trace.case.batches[trace.begun :]
    steps = [
        [bytes_sent(trace.case, trace.layout, rank, batch, updated=step.outcome == "updated")
         for batch, step in zip(batches, trace.steps, strict=False)]
        for rank in range(trace.layout.ranks)
    ]  # fmt: skip
    return [{group: sum(step[group] for step in of_rank) for group in GROUPS} for of_rank in steps]


def on_ledger(trace: Trace) -> list[dict[str, int]]:
    """Return what each rank has sent, by group."""
    return [{group: ledger.total(group).bytes for group in GROUPS} for ledger in trace.ledgers]
