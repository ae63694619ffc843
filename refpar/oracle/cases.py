"""The named cases that goldens are made of: small, odd, and each about something that goes wrong.

Axes are odd and pairwise coprime where a ratio is to name its cause (dp 3, tp 5, 7 micro-batches), the loss scale is a
power of two, no number of rows divides evenly, and values differ by row and by element. Constants of the optimizers are
dyadic, so that a program in float32 holds the same ones, and ``eps`` is large enough that Adam does not turn the
rounding noise of a gradient that is zero in theory (an attention key bias) into steps of the size of ``lr``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from refpar import rng
from refpar.case import Batch, Case, Layout
from refpar.nn.layer import At
from refpar.nn.models import GPT, MLP, initial_value
from refpar.optim import SGD, Adam, AdamW
from refpar.precision import LossScale, Precision

BETAS = (0.875, 0.984375)
EPS = 2.0**-12


@dataclass(frozen=True)
class Named:
    """One named case: ``make(dtype)`` builds it.

    Attributes
    ----------
    what : a short description
    layout : how it is split
    dtype : the type it is in where none is asked for
    """

    what: str
    make: Callable[[str], Case]
    layout: Layout
    dtype: str = "float32"


def integers(
    widths: tuple[int, ...], rows: int, masked: int, lr: float, seed: int, dtype: str, *, steps: int = 2
) -> Case:
    """Return an MLP of small integers whose steps are exact in ``dtype``, in any order, as the tests prove.

    The targets are what the initial network says, off by at most one, so that gradients stay small enough for a
    second step. The number of rows that count is a power of two, and so is ``lr``.
    """
    model = MLP(widths, init="integers")
    network, specs = model.build().network, model.build().specs
    params = {name: initial_value(seed, name, spec, "float64") for name, spec in specs.items()}
    batches = []
    for step in range(steps):
        inputs = rng.integers((seed, "inputs", step), (rows, widths[0]), -1, 2).astype(np.float64)
        said, _ = network.forward(params, inputs, At(seed, step, tuple(range(rows))))
        targets = said + rng.integers((seed, "targets", step), said.shape, -1, 2)
        batches.append(Batch(inputs, targets, mask(seed, step, rows, masked)))
    return Case(model, SGD(lr=lr, momentum=0.5), tuple(batches), Precision(dtype), divide="after", seed=seed)


def overflow(dtype: str) -> Case:
    """Return an exact MLP in float16: in step 0 one element of one row overflows; later the loss scale grows again."""
    case = integers((5, 7, 3), 11, 3, 1.0, 15, dtype, steps=3)
    first = case.batches[0]
    targets = first.targets.copy()
    targets[int(np.flatnonzero(first.mask)[4]), 1] += 16  # a row of the middle replica
    batches = (replace(first, targets=targets), *case.batches[1:])
    scale = LossScale(initial=2.0**12, backoff=0.125, interval=2)
    return replace(case, optimizer=SGD(lr=1.0), batches=batches, precision=Precision(dtype, loss_scale=scale))


def mlp(dtype: str) -> Case:
    """Return an MLP of odd widths on real numbers."""
    batches = []
    for step in range(3):
        inputs = rng.integers((3, "inputs", step), (23, 11), -1024, 1025) / 1024
        targets = rng.integers((3, "targets", step), (23, 3), -1024, 1025) / 1024
        batches.append(Batch(inputs, targets, mask(3, step, 23, 4)))
    optimizer = SGD(lr=0.0625, momentum=0.875, weight_decay=0.0625)
    return Case(MLP((11, 15, 13, 3)), optimizer, tuple(batches), Precision(dtype), clip=0.5, seed=3)


def gpt(
    dtype: str,
    optimizer: SGD | Adam | AdamW,
    *,
    seed: int,
    tied: bool = True,
    dropout: float = 0.0,
    clip: float | None = None,
    layers: int = 1,
    heads: int = 5,
    steps: int = 2,
    ragged: bool = True,
) -> Case:
    """Return a small GPT on random tokens, 17 rows of 7; ``ragged`` masks the tail of most, and all of some."""
    model = GPT(
        vocabulary=31, context=7, width=15, layers=layers, heads=heads, mlp_width=35, dropout=dropout, tied=tied
    )
    batches = []
    for step in range(steps):
        tokens = rng.integers((seed, "tokens", step), (17, 8), 0, 31)
        ends = rng.integers((seed, "ends", step), (17, 1), 0, 13) if ragged else np.full((17, 1), 7)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], np.arange(7) < ends))
    return Case(model, optimizer, tuple(batches), Precision(dtype), clip=clip, seed=seed)


def silent_replica(dtype: str) -> Case:
    """Return a GPT in which the last of three replicas has no token in the first step, and nobody in the second."""
    case = gpt(dtype, SGD(lr=0.25), seed=5, tied=False, steps=3)
    first, second, third = case.batches
    some, none = first.mask.copy(), np.zeros_like(second.mask)
    some[12:] = False
    batches = Batch(first.inputs, first.targets, some), Batch(second.inputs, second.targets, none), third
    return replace(case, batches=batches)


def mask(seed: int, step: int, rows: int, masked: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask that leaves out ``masked`` rows."""
    kept = np.ones(rows, bool)
    kept[np.argsort(rng.uniform((seed, "mask", step), (rows,)), kind="stable")[:masked]] = False
    return kept


def adamw(dtype: str, *, clip: float | None = None) -> Case:
    """Return a GPT with groups: weights decay, biases and norms do not."""
    return gpt(dtype, AdamW(lr=2.0**-6, betas=BETAS, eps=EPS, weight_decay=0.25), seed=9, clip=clip, steps=3)


CASES = {
    "integers": Named(
        "exact integers: dp 3, tp 5, 7 micro-batches, ragged rows, momentum",
        lambda dtype: integers((5, 15, 7), 35, 3, 4.0, 1, dtype),
        Layout(dp=3, tp=5, micro_batches=7),
    ),
    "integers-zero": Named(
        "exact integers: ZeRO-3 over 3 replicas, shards of unequal size, 7 micro-batches",
        lambda dtype: integers((5, 15, 7), 35, 3, 4.0, 8, dtype),
        Layout(dp=3, zero=3, micro_batches=7),
    ),
    "integers-pipeline": Named(
        "exact integers: 3 stages, 2 micro-batches (fewer than stages), dp 3, ZeRO-1",
        lambda dtype: integers((3, 11, 5, 3), 21, 5, 4.0, 4, dtype),
        Layout(dp=3, pp=3, zero=1, micro_batches=2),
    ),
    "overflow": Named(
        "exact float16: an overflow on one replica of 3, then a loss scale that grows",
        overflow,
        Layout(dp=3, micro_batches=2),
        dtype="float16",
    ),
    "mlp": Named(
        "ReLU MLP of odd widths: dp 3, tp 5, 7 micro-batches, momentum, weight decay, clipping",
        mlp,
        Layout(dp=3, tp=5, micro_batches=7),
    ),
    "ragged": Named(
        "GPT, unequal numbers of tokens: dp 3, 5 micro-batches, SGD",
        lambda dtype: gpt(dtype, SGD(lr=0.25), seed=4, tied=False),
        Layout(dp=3, micro_batches=5),
    ),
    "silent-replica": Named(
        "GPT, a replica without any token, then a step without any: dp 3",
        silent_replica,
        Layout(dp=3),
    ),
    "tied": Named(
        "GPT, embedding and head share a weight on the first and last of 3 stages, 5 micro-batches",
        lambda dtype: gpt(dtype, SGD(lr=0.25), seed=6),
        Layout(pp=3, micro_batches=5),
    ),
    "short-pipeline": Named(
        "GPT, GPipe with 2 micro-batches on 3 uneven stages, dp 3",
        lambda dtype: gpt(dtype, SGD(lr=0.25, momentum=0.875), seed=7, tied=False, layers=2),
        Layout(dp=3, pp=3, micro_batches=2, schedule="gpipe"),
    ),
    "clipping": Named(
        "GPT, gradients clipped by the global norm: tp 5, dp 3",
        lambda dtype: gpt(dtype, SGD(lr=0.25), seed=8, clip=0.5),
        Layout(dp=3, tp=5),
    ),
    "adamw-groups": Named(
        "GPT, AdamW that spares biases and norms: dp 3, ZeRO-2",
        adamw,
        Layout(dp=3, zero=2, micro_batches=2),
    ),
    "adam-warmup": Named(
        "GPT, Adam with L2 decay and a warm-up of 3 updates: dp 3, ZeRO-1",
        lambda dtype: gpt(dtype, Adam(lr=2.0**-6, betas=BETAS, eps=EPS, weight_decay=0.25, warmup=3), seed=10, steps=3),
        Layout(dp=3, zero=1),
    ),
    "dropout": Named(
        "GPT with dropout, its masks among the inputs: dp 3, 2 micro-batches, recomputation",
        lambda dtype: gpt(dtype, SGD(lr=0.25), seed=11, dropout=0.25),
        Layout(dp=3, micro_batches=2, recompute="block"),
    ),
    "saturated": Named(
        "GPT whose weights Adam makes large: GELU down to -6, attention on one token: tp 5, 3 micro-batches",
        lambda dtype: gpt(dtype, Adam(lr=0.5, betas=BETAS, eps=2.0**-8), seed=13, tied=False, steps=3),
        Layout(tp=5, micro_batches=3),
    ),
    "everything": Named(
        "GPT, all at once: dp 3, tp 2, pp 2, ZeRO-1, 5 micro-batches, AdamW, clipping, dropout, tied, recomputation",
        lambda dtype: replace(
            gpt(dtype, AdamW(lr=2.0**-6, betas=BETAS, eps=EPS, weight_decay=0.25), seed=12, dropout=0.125, layers=2),
            clip=0.5,
        ),
        Layout(dp=3, tp=2, pp=2, zero=1, micro_batches=5, recompute="block"),
    ),
}
"""By name; an exact-integer case first."""
