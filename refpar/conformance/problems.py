"""What Hypothesis draws for the battery: arrays by rank, and whole training problems with a layout.

Shapes and options are drawn one by one, so that a failing example shrinks to the smallest; the numbers in them follow
from rank and place, or from a drawn seed, and no two are alike: equal numbers hide what is swapped (pytorch#158903).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from refpar import rng
from refpar.case import Batch, Case, Layout
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.precision import Precision

Array = npt.NDArray[Any]
T = TypeVar("T")
Draw = Callable[..., Any]
"""``draw(strategy, label=...)``."""


@dataclass(frozen=True)
class Limits:
    """What training an adapter can do: what :func:`problem` draws from.

    Attributes
    ----------
    dp, tp, pp, zero, micro_batches, schedules, recompute : values of the fields of a :class:`refpar.Layout`
    most_ranks : of a layout
    models : of ``"mlp"``, ``"gpt"``
    optimizers : of ``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``
    clips : of a :class:`refpar.Case`
    dropout, tied : values for a GPT
    precision : the type that the implementation computes in, ``"float32"`` or ``"float64"``
    divides : whether it can only do sizes that divide: heads, hidden features and vocabulary by tp, rows by
        ``dp * micro_batches``
    layers : of an MLP, at least
    empty : whether a step, or a replica, may be without any row or token
    """

    dp: tuple[int, ...] = (1, 2, 3)
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    zero: tuple[int, ...] = (0,)
    micro_batches: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = ("1f1b",)
    recompute: tuple[str, ...] = ("none",)
    most_ranks: int = 4
    models: tuple[str, ...] = ("mlp", "gpt")
    optimizers: tuple[str, ...] = ("sgd", "momentum", "adam", "adamw")
    clips: tuple[float | None, ...] = (None, 0.05, 1e6)
    dropout: tuple[float, ...] = (0.0,)
    tied: tuple[bool, ...] = (False, True)
    precision: str = "float64"
    divides: bool = False
    layers: int = 1
    empty: bool = True


BETAS = (0.875, 0.984375)

OPTIMIZERS: dict[str, SGD | Adam | AdamW] = {
    "sgd": SGD(lr=0.25),
    "momentum": SGD(lr=0.125, momentum=0.5, weight_decay=0.125, warmup=3),
    "adam": Adam(lr=2.0**-6, betas=BETAS, eps=2.0**-12, weight_decay=0.125),
    "adamw": AdamW(lr=2.0**-6, betas=BETAS, eps=2.0**-12, weight_decay=0.125, warmup=2),
}
"""All constants are dyadic, so that float32 holds the same, and nothing is lost where ``1 - beta`` cancels.

``eps`` is so large that Adam does not turn the rounding noise of a gradient that is zero into steps of size lr."""


def ranks(draw: Draw, numbers: tuple[int, ...]) -> int:
    """Draw a number of ranks."""
    return int(draw(st.sampled_from(sorted(numbers)), label="ranks"))


def shape(draw: Draw, most: int = 3) -> tuple[int, ...]:
    """Draw a shape: no axis, an empty one and one of length 1 among them."""
    return tuple(draw(st.lists(st.integers(0, 7), max_size=most), label="shape"))


def integers(rank: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return integers that differ by rank and place, so small that no sum of a few ranks rounds."""
    size = math.prod(shape)
    return ((rank + 1) * 100 + np.arange(size) % 97 * (1 if rank % 2 else -1)).astype(dtype).reshape(shape)


def reals(rank: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return numbers of many sizes and both signs that differ by rank and place: every sum of them rounds."""
    x = rng.uniform((rank, "reals"), shape) * 2 - 1
    return (x * 2.0 ** rng.integers((rank, "powers"), shape, -12, 13)).astype(dtype)


def order(draw: Draw, arrays: list[Array]) -> list[Array]:
    """Draw how arrays lie in memory: by rows, by columns, or with gaps; each rank's alike."""
    how = draw(st.sampled_from(["C", "F", "strided"]), label="memory")
    if how == "strided":
        return [np.stack([x, x + 1], axis=-1)[..., 0] for x in arrays]
    return [np.asarray(x, order=how) for x in arrays]


def parts(draw: Draw, count: int, label: str, least: int = 0, most: int = 4) -> list[int]:
    """Draw the lengths of some parts, unequal as a rule."""
    sizes = st.lists(st.integers(least, most), min_size=count, max_size=count)
    return list(draw(sizes, label=label))


def small(key: tuple[int | str, ...], shape: tuple[int, ...], dtype: str) -> Array:
    """Return integers from -4 to 4: products of matrices of them are exact, in any order."""
    return rng.integers(key, shape, -4, 5).astype(dtype)


# Whole training


def problem(draw: Draw, limits: Limits) -> tuple[Case, Layout]:
    """Draw a case and a layout that an implementation within ``limits`` can do."""

    def pick(name: str) -> Any:
        return draw(st.sampled_from(getattr(limits, name)), label=name)

    tp, pp = pick("tp"), pick("pp")
    fits = [dp for dp in limits.dp if dp * tp * pp <= limits.most_ranks]
    dp = draw(st.sampled_from(fits or [1]), label="dp")
    micro_batches = pick("micro_batches")
    model = draw_model(draw, limits, tp, pp)
    seed = draw(st.integers(0, 2**16), label="seed")
    step = dp * micro_batches if limits.divides else 1
    batches = []
    for number in range(draw(st.integers(1, 3), label="steps")):
        rows = draw(st.integers(0 if limits.empty else 1, 3 if limits.divides else 7), label="rows") * step
        share = draw(st.sampled_from([1.0, 0.4, 0.0] if limits.empty else [1.0, 0.6]), label="share that counts")
        batches.append(batch(model, rows, share, seed, number, at_least_one=not limits.empty))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=pick("zero"),
        micro_batches=micro_batches,
        schedule=pick("schedules"),
        recompute=pick("recompute"),
    )
    optimizer = OPTIMIZERS[pick("optimizers")]
    case = Case(model, optimizer, tuple(batches), Precision(limits.precision), clip=pick("clips"), seed=seed)
    return case, layout


def draw_model(draw: Draw, limits: Limits, tp: int, pp: int) -> GPT | MLP:
    """Draw a small model that can be cut into ``pp`` stages and ``tp`` slices."""
    least, step = (tp, tp) if limits.divides else (1, 1)
    if draw(st.sampled_from(limits.models), label="model") == "mlp":
        hidden = st.integers(1, 3 if limits.divides else 6).map(lambda n: n * step)
        layers = draw(st.integers(max(limits.layers, pp), 4), label="layers")
        widths = [draw(hidden, label="width") for _ in range(layers + 1)]
        return MLP(tuple(widths))
    heads = draw(st.integers(1, 2 if limits.divides else 3).map(lambda n: max(n * step, tp)), label="heads")
    return GPT(
        vocabulary=draw(st.integers(3, 11), label="vocabulary") * (step if limits.divides else 1) + (tp - least),
        context=draw(st.integers(1, 5), label="context"),
        width=heads * draw(st.integers(2, 3), label="head_dim"),  # of width 1, a norm is constant, and gradients noise
        layers=draw(st.integers(max(1, pp - 2), 2 if pp < 4 else 3), label="layers"),
        heads=heads,
        mlp_width=draw(st.integers(1, 5), label="mlp_width") * step,
        dropout=draw(st.sampled_from(limits.dropout), label="dropout"),
        tied=draw(st.sampled_from(limits.tied), label="tied"),
        activation=draw(st.sampled_from(["relu", "gelu"]), label="activation"),
    )


def batch(model: GPT | MLP, rows: int, share: float, seed: int, step: int, *, at_least_one: bool) -> Batch:
    """Return rows of distinct numbers, of which about ``share`` of the targets count; the others hold -100."""
    key = (seed, "batch", step)
    if isinstance(model, MLP):
        mask = rng.uniform((*key, "mask"), (rows,)) < share
        if at_least_one:
            mask[:1] = True
        inputs, targets = (
            rng.integers((*key, name), (rows, width), -1024, 1025) / 512
            for name, width in (("x", model.widths[0]), ("y", model.widths[-1]))
        )
        return Batch(inputs, targets, mask)
    mask = rng.uniform((*key, "mask"), (rows, model.context)) < share
    if at_least_one:
        mask[:1, :1] = True
    ids, following = (rng.integers((*key, name), mask.shape, 0, model.vocabulary) for name in ("x", "y"))
    return Batch(ids, np.where(mask, following, -100), mask)
