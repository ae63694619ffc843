"""Which numbers are kept in which type, and the loss scale that keeps small gradients alive.

Mixed precision (Micikevicius et al. 2017, section 3) computes in float16 and remembers in float32:

    =====================  =======  =====  =============================================
    what                   type     bytes  why
    =====================  =======  =====  =============================================
    weights                float16  2      fast matrix products, half the memory;
    activations            float16         a product is summed in float32, rounded once
    weight gradients       float16  2      float32 as they leave a layer, rounded once
                                           where they are stored
    master weights,        float32  4,     an update of 2^-12 of a weight is lost
    Adam's m and v         float32  4 + 4  when it is added in float16
    norms, flags, losses   float64         they are single numbers
    =====================  =======  =====  =============================================

Held, then: 2 + 2 + 12 = 16 bytes a parameter, 18 where gradients are stored in float32, and 16
where all is float32 and the weights are their own masters. Sent: partial sums of gradients in
4 bytes, their results and weights in 2.

A gradient of 2^-25 or less is zero in float16, and many are. The loss is therefore multiplied by a
scale S before the backward pass, which multiplies every gradient, and the stored gradients are
divided by S in float32 before anything looks at them: at S = 2^15 one of 2^-25 is stored as 2^-10.
Too large an S overflows: then the step is skipped and S is lowered. Each rank looks at the gradients
it has (:func:`overflowed`), and :func:`refpar.parallel.hybrid.agree` makes what any one has seen the
verdict of all, before anybody updates: a rank that skipped alone would drift from its replicas.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from refpar.arrays import Array, accumulator, array_module, widen
from refpar.checks import fix, real, whole

FLOATS = ("float16", "float32", "float64")
Outcome = Literal["updated", "overflow", "no tokens"]


@dataclass(frozen=True)
class LossScale:
    """How the loss scale starts and moves.

    Attributes
    ----------
    initial : the scale of the first step, positive and finite
    dynamic : whether it moves at all
    growth, backoff : factors after ``interval`` steps without overflow, and after an overflow
    interval : consecutive good steps before the scale grows
    floor, cap : the scale never leaves this range: without a cap, growth alone ends in infinity
        (pytorch/pytorch#98876)
    """

    initial: float = 2.0**16
    dynamic: bool = True
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    def __post_init__(self) -> None:
        fix(self, real, "initial", "growth", "backoff", "floor", "cap", positive=True)
        fix(self, whole, "interval", least=1)
        if not self.floor <= self.initial <= self.cap:
            raise ValueError(f"LossScale initial is {self.initial}: it must lie in {self.floor} .. {self.cap}")
        if self.growth < 1 or self.backoff > 1:
            raise ValueError(f"LossScale growth {self.growth} must be at least 1, backoff {self.backoff} at most 1")


@dataclass(frozen=True)
class Precision:
    """The types of a run.

    Attributes
    ----------
    compute : of weights, activations and their gradients
    gradients : of stored weight gradients; by default ``compute``, as in the paper
    reduce : of partial sums of gradients on their way round the ring; by default the accumulator of
        ``gradients``, so that halves cost 4 bytes an element while they are summed and 2 while they are
        gathered. ``"float16"`` is the paper's traffic, 2 and 2, and rounds at every rank: what is lost
        grows with the ranks, and two finite gradients of 40,000 sum to infinity (horovod/horovod#1699).
        One device has no ring and ignores it: with float16 the layout may decide whether a step overflows,
        see :class:`refpar.case.Layout`
    loss_scale : None where the loss is not scaled
    """

    compute: str = "float64"
    gradients: str = ""
    reduce: str = ""
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        if self.compute not in FLOATS:
            raise ValueError(f"precision compute is {self.compute!r}: it must be one of {', '.join(FLOATS)}")
        for name, least in (("gradients", "compute"), ("reduce", "gradients")):
            floor = getattr(self, least)
            value = getattr(self, name) or (floor if name == "gradients" else accumulator(floor).name)
            if value not in FLOATS:
                raise ValueError(f"precision {name} is {value!r}: it must be one of {', '.join(FLOATS)}")
            if FLOATS.index(value) < FLOATS.index(floor):
                raise ValueError(f"precision {name} is {value!r}: it must not be narrower than {least}, {floor!r}")
            object.__setattr__(self, name, value)

    @property
    def master(self) -> str:
        """The type of master weights and of the optimizer's moments."""
        return accumulator(self.compute).name


@dataclass
class LossScaler:
    """The scale and the number of good steps since it last moved: both are state, both are saved."""

    rule: LossScale | None
    scale: float = 0.0
    """Not given, the initial one of the rule, and 1 without a rule."""
    good: int = 0

    def __post_init__(self) -> None:
        if not self.scale:
            self.scale = 1.0 if self.rule is None else float(self.rule.initial)

    def update(self, overflow: bool) -> None:
        """Move the scale after a step; ``overflow`` is the verdict of all ranks together."""
        if self.rule is not None and self.rule.dynamic:
            self.scale, self.good = next_scale(self.rule, self.scale, self.good, overflow)


def outcome(count: int, overflow: bool) -> Outcome:
    """Return what becomes of a step: nothing is updated without tokens, nor where any gradient of any rank overflowed.

    A return at the wrong place updates on an overflow, or never (DeepSpeed#7645).
    """
    return "no tokens" if count == 0 else "overflow" if overflow else "updated"


def next_scale(rule: LossScale, scale: float, good: int, overflow: bool) -> tuple[float, int]:
    """Return the scale and the count of good steps that follow."""
    if overflow:
        return max(scale * rule.backoff, rule.floor), 0
    if good + 1 < rule.interval:
        return scale, good + 1
    return min(scale * rule.growth, rule.cap), 0


def accumulate(into: MutableMapping[str, Array], name: str, gradient: Array, dtype: str) -> None:
    """Add ``gradient`` to what ``into[name]`` holds already, rounding once to ``dtype``.

    What is stored is contiguous, and memory of its own: a layer may hand on the same array as its ``dx``.
    """
    if name in into:
        into[name] = (widen(into[name]) + gradient).astype(dtype, order="C", copy=False)
    else:
        into[name] = gradient.astype(dtype, order="C")


def unscale(gradient: Array, divisor: float) -> Array:
    """Return ``gradient / divisor`` in the accumulator type."""
    return widen(gradient) / divisor


def overflowed(gradient: Array) -> bool:
    """Return whether any entry is infinite or NaN."""
    xp = array_module(gradient)
    return not bool(xp.isfinite(gradient).all())


def to_compute(master: Array, precision: Precision) -> Array:
    """Return the weights that the layers see: the master itself, or its rounding to float16."""
    return master.astype(np.dtype(precision.compute), copy=False)
