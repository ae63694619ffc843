"""What Hypothesis draws: whole training problems and layouts, the ugly ones by default.

Shapes and options are drawn one by one, so that a failing example shrinks to the smallest model and
layout; the numbers in them come from a drawn seed, and no two are alike.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import strategies as st

from refpar import rng
from refpar.case import Batch, Case, Layout, State
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.precision import LossScale, Precision

seeds = st.integers(0, 2**32 - 1)
few_ranks = st.sampled_from([1, 2, 3, 5])


@st.composite
def gpts(draw: st.DrawFn, *, max_layers: int = 2) -> GPT:
    """Small GPTs: odd sizes, tied or not, with and without dropout."""
    heads = draw(st.integers(1, 3))
    return GPT(
        vocabulary=draw(st.integers(3, 11)),
        context=draw(st.integers(1, 5)),
        width=heads * draw(st.integers(1, 3)),
        layers=draw(st.integers(1, max_layers)),
        heads=heads,
        mlp_width=draw(st.integers(1, 7)),
        dropout=draw(st.sampled_from([0.0, 0.25])),
        tied=draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "relu"])),
    )


@st.composite
def mlps(draw: st.DrawFn) -> MLP:
    """MLPs of one to four layers; a width of 1 gives biases smaller than the number of ranks."""
    return MLP(tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))))


@st.composite
def optimizers(draw: st.DrawFn) -> SGD | Adam | AdamW:
    """Plain SGD, with momentum, Adam, AdamW; with and without decay and warm-up."""
    warmup, decay = draw(st.sampled_from([0, 3])), draw(st.sampled_from([0.0, 0.1]))
    return draw(
        st.sampled_from(
            [
                SGD(lr=0.1, weight_decay=decay, warmup=warmup),
                SGD(lr=0.1, momentum=0.5, weight_decay=decay, warmup=warmup),
                Adam(lr=0.01, weight_decay=decay, warmup=warmup),
                AdamW(lr=0.01, weight_decay=decay, warmup=warmup),
            ]
        )
    )


def batch(
    model: GPT | MLP, rows: int, share: float, seed: int, step: int, *, length: int | None = None, kind: str = "int64"
) -> Batch:
    """Return rows of distinct numbers, of which about ``share`` of the targets count.

    Masked targets hold -100, as is the custom, or what that is without a sign, and must not be looked at. Rows of
    tokens are as long as the context unless a ``length`` is given, and of integers of any ``kind``.
    """
    key = (seed, "batch", step)
    if isinstance(model, MLP):
        mask = rng.uniform((*key, "mask"), (rows,)) < share
        inputs, targets = (
            rng.uniform((*key, name), (rows, width)) * 4 - 2
            for name, width in (("x", model.widths[0]), ("y", model.widths[-1]))
        )
        return Batch(inputs, targets, mask)
    shape = rows, model.context if length is None else length
    mask = rng.uniform((*key, "mask"), shape) < share
    inputs, targets = (rng.integers((*key, name), shape, 0, model.vocabulary) for name in ("x", "y"))
    return Batch(inputs.astype(kind), np.where(mask, targets, -100).astype(kind), mask)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    models: st.SearchStrategy[GPT | MLP] | None = None,
    max_steps: int = 3,
    precisions: st.SearchStrategy[Precision] | None = None,
) -> Case:
    """Whole problems. Rows may be fewer than ranks or none at all, and a step may have no token that counts."""
    model = draw(models if models is not None else gpts() | mlps())
    seed = draw(seeds)
    kind = draw(st.sampled_from(["int64", "int64", "int8", "uint8", "uint32"]))
    batches = tuple(
        batch(
            model, draw(st.integers(0, 7)), draw(st.sampled_from([0.0, 0.4, 1.0])), seed, step, kind=kind,
            length=draw(st.integers(1, model.context)) if isinstance(model, GPT) else None,
        )
        for step in range(draw(st.integers(1, max_steps)))
    )  # fmt: skip
    return Case(
        model,
        draw(optimizers()),
        batches,
        precision=draw(precisions) if precisions is not None else Precision(),
        clip=draw(st.sampled_from([None, 0.05, 1e6])),
        divide=draw(st.sampled_from(["before", "after"])),
        seed=seed,
    )


@st.composite
def exact_cases(draw: st.DrawFn, *, compute: str = "float64") -> Case:
    """MLPs of small integers with ReLU, held to the squared error: one step of them rounds nothing, in any order.

    Weights, inputs and targets are -1, 0 or 1, at most four features wide and three layers deep, so that no sum
    of magnitudes exceeds 2^11, and float16 is exact too. The number of rows that count is a power of two, and so
    is the learning rate.
    """
    widths = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    model = MLP(widths, init="integers")
    seed = draw(seeds)
    counted = 2 ** draw(st.integers(0, 2))
    rows = counted + draw(st.integers(0, 3))
    mask = np.zeros(rows, bool)
    mask[np.argsort(rng.uniform((seed, "mask"), (rows,)))[:counted]] = True
    inputs, targets = (
        rng.integers((seed, name), (rows, width), -1, 2).astype(np.float64)
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    )
    return Case(
        model,
        SGD(lr=0.25, momentum=draw(st.sampled_from([0.0, 0.5]))),
        (Batch(inputs, targets, mask),),
        precision=Precision(compute),
        divide=draw(st.sampled_from(["before", "after"])),
        seed=seed,
    )


@st.composite
def data_parallel(draw: st.DrawFn) -> Layout:
    """Replicas and micro-batches, with buckets from one element to everything."""
    return Layout(
        dp=draw(few_ranks), micro_batches=draw(st.integers(1, 4)), bucket=draw(st.sampled_from([1, 7, 64, 1 << 18]))
    )


# Splitting the model: any layout that can run a case


MOST_RANKS = 12


@st.composite
def layouts(
    draw: st.DrawFn, case: Case, *, most: int = MOST_RANKS, tp: int | None = None, pp: int | None = None
) -> Layout:
    """Every technique at once, on up to ``most`` ranks; ``tp`` and ``pp`` may be given."""
    model = case.model
    units = len(model.build().units)
    slices = min(model.heads, model.vocabulary) if isinstance(model, GPT) else 4
    tp = draw(st.integers(1, min(slices, most))) if tp is None else tp
    pp = draw(st.integers(1, min(units, most // tp))) if pp is None else pp
    cuts = sorted(draw(st.sets(st.integers(1, units - 1), min_size=pp - 1, max_size=pp - 1))) if units > 1 else []
    by_hand = tuple(b - a for a, b in itertools.pairwise([0, *cuts, units]))
    return Layout(
        dp=draw(st.integers(1, most // tp // pp)),
        tp=tp,
        pp=pp,
        zero=draw(st.integers(0, 3)),
        micro_batches=draw(st.integers(1, 5)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        recompute=draw(st.sampled_from(["none", "block", "sqrt", "2"])),
        bucket=draw(st.sampled_from([1, 7, 64, 1 << 18])),
        stages=draw(st.sampled_from([(), by_hand])),
    )


@st.composite
def splits(draw: st.DrawFn, cases: st.SearchStrategy[Case] | None = None, **given: int | None) -> tuple[Case, Layout]:
    """A case, some of it frozen at times, and a layout that can run it."""
    case = draw(cases if cases is not None else three_blocks)
    model = case.model.build()
    names = st.lists(st.sampled_from([*model.specs, *(unit for unit, _ in model.units)]), max_size=3, unique=True)
    case = dataclasses.replace(case, frozen=tuple(draw(st.just([]) | names)))
    return case, draw(layouts(case, **given))


three_blocks = cases(models=gpts(max_layers=3) | mlps())


# Mixed precision: an overflow where it is wanted


def overflowing(rows: int, where: int) -> Case:
    """Return a case in float16 whose second step overflows, in one row, one entry of one gradient.

    The row has 2000 of one feature, where all else is 1. Everything is a small integer, so all layouts agree on
    every bit, and with a learning rate of 0 it stays so.
    """
    model = MLP((3, 2), init="integers")
    plain = Batch(np.ones((rows, 3)), np.ones((rows, 2)), np.ones(rows, bool))
    inputs = np.ones((rows, 3))
    inputs[where, 1] = 2000
    start = State.initial(Case(model, SGD(lr=0.0), ())).parameters
    targets = inputs @ start["layers.0.weight"] + start["layers.0.bias"] - 1  # an error of 1 in every row
    wild = Batch(inputs, targets, np.ones(rows, bool))
    precision = Precision("float16", loss_scale=LossScale(64.0, interval=2, cap=64.0))
    return Case(model, SGD(lr=0.0, momentum=0.5), (plain, wild, plain, plain), precision, divide="after")


# Narrow numbers: cases in float32 or float64, to hold honest runs of them to their bound


@st.composite
def narrow_cases(draw: st.DrawFn, *, compute: str = "float32") -> Case:
    """MLPs of real numbers or of integers, trained by SGD or Adam, with any of their parameters frozen.

    Integers cancel: where weights and inputs are -1, 0 or 1 the input of many a ReLU is 0, and no rounding may
    decide there.
    """
    widths = tuple(draw(st.lists(st.integers(2, 5), min_size=3, max_size=4)))
    whole, seed = draw(st.booleans()), draw(seeds)
    model = MLP(widths, init="integers" if whole else MLP.init)
    batches = []
    for step in range(draw(st.integers(1, 4))):
        made = batch(model, draw(st.integers(1, 6)), draw(st.sampled_from([0.6, 1.0])), seed, step)
        if whole:
            made = dataclasses.replace(made, inputs=np.rint(made.inputs / 2), targets=np.rint(made.targets / 2))
        batches.append(made)
    return Case(
        model,
        draw(st.sampled_from([SGD(lr=0.5), SGD(lr=0.125, momentum=0.5, weight_decay=0.1), Adam(lr=0.01, eps=1e-3)])),
        tuple(batches),
        Precision(compute),
        clip=draw(st.sampled_from([None, 0.05])),
        frozen=tuple(sorted(draw(st.sets(st.sampled_from(sorted(model.build().specs)), max_size=3)))),
        seed=seed,
    )
