"""An error bound carried through an MLP beside its values: the worst that roundings can do, element by element.

Every number is carried with how far an honest result may be from it (Higham 2002, "Accuracy and Stability of
Numerical Algorithms", chapters 3 and 4)::

    y = sum of n products x_i w_i     |error of y| <= sum(|x| e_w + e_x |w| + e_x e_w) + g(n) sum(|x| + e_x)(|w| + e_w)

with g(n) = n u / (1 - n u), in *whatever order* the sum is taken: over rows, micro-batches and ranks, by one kernel or
another, with fused multiply-add or without. ReLU carries an error through; in the backward pass, where the sign of its
input is within its error of zero, both slopes are honest, and the whole gradient becomes the error.

The same pass *proves* exactness. Beside its values an array carries its grain: a power of two of which they are all
multiples. If the sum of magnitudes is below 2^p grains, p the digits of the type, then so is every partial sum in every
order, and nothing is rounded: the error is 0, and results are equal bit for bit. Integer inputs, small integer weights,
ReLU and divisors that are powers of two stay so for some steps. Where they do not, the bound takes over by itself.

Good for narrow networks and few steps: worst cases multiply, from layer to layer and from step to step. Of the largest
entry of its gradient, the bound of an MLP in float32 (two hidden layers, 32 rows, SGD with momentum) allows

=============  ======  ======  ======  ======  ======  ======
hidden width   step 0  step 1  step 2  step 3  step 4  step 5
=============  ======  ======  ======  ======  ======  ======
8              7e-5    5e-4    2e-3    4e-3    0.1     0.2
32             4e-4    4e-3    0.2     1       12      700
128            4e-3    0.2     6       300     1e7     7e31
=============  ======  ======  ======  ======  ======  ======

Where that is too much to be of use, ``bounds.allowed`` takes another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar import optim, precision
from refpar.case import Batch, Case
from refpar.nn import loss as losses
from refpar.nn.models import MLP, initial_value

HostArray = npt.NDArray[Any]

COARSEST = 1 << 16
"""The grain of zeros: they are multiples of anything."""


class NotCarried(ValueError):
    """A case that this bound is not made for."""


@dataclass(frozen=True)
class Type:
    """A floating type: significant digits, the exponent of its smallest number, its largest number."""

    digits: int
    lowest: int
    largest: float

    @property
    def unit(self) -> float:
        """Unit roundoff."""
        return 2.0**-self.digits


TYPES = {
    "float16": Type(11, -24, 65504.0),
    "float32": Type(24, -149, float(np.finfo(np.float32).max)),
    "float64": Type(53, -1074, float(np.finfo(np.float64).max)),
}


@dataclass(frozen=True)
class Carried:
    """Values with what is known of them.

    Attributes
    ----------
    value : float64
    error : how far an honest result may be from ``value``, same shape; infinite where it may overflow
    grain : every honest result is a multiple of 2**grain; None where some digits are unknown
    """

    value: HostArray
    error: HostArray
    grain: int | None

    @property
    def most(self) -> HostArray:
        """Largest magnitude that an honest result may have."""
        return np.abs(self.value) + self.error

    @property
    def T(self) -> Carried:
        """Transposed."""
        return Carried(self.value.T, self.error.T, self.grain)


def given(value: HostArray) -> Carried:
    """Return numbers that everybody has alike."""
    value = np.asarray(value, np.float64)
    return Carried(value, np.zeros_like(value), grain_of(value))


def grain_of(value: HostArray) -> int | None:
    """Return the exponent of the coarsest power of two of which all of ``value`` are multiples."""
    value = value[value != 0]
    if not np.isfinite(value).all():
        return None
    fraction, exponent = np.frexp(value)
    whole = (np.abs(fraction) * 2.0**53).astype(np.int64)
    trailing = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    return int((exponent - 53 + trailing).min(initial=COARSEST))


def rounded(
    value: HostArray, error: HostArray, grain: int | None, sizes: HostArray, roundings: int, to: Type
) -> Carried:
    """Return a result of ``roundings`` operations whose terms have the sum of magnitudes ``sizes``.

    No operation rounds where ``sizes`` is less than 2^digits grains, in whatever order they are done.
    """
    fits = grain is not None and (sizes < 2.0 ** (to.digits + min(grain, 900))).all() and (sizes <= to.largest).all()
    if fits and grain is not None and grain >= to.lowest:
        return Carried(value, error, grain)
    gamma = roundings * to.unit / (1 - roundings * to.unit)
    error = error + gamma * sizes + roundings * 2.0**to.lowest
    return Carried(value, np.where(sizes > to.largest, np.inf, error), None)


def stored(x: Carried, to: Type) -> Carried:
    """Return ``x`` rounded once to ``to``. What is exact and too large becomes infinite, for everybody alike."""
    over = np.abs(x.value) >= to.largest * (1 + to.unit)
    if (over & (x.error == 0)).any():
        value = np.where(over, np.copysign(np.inf, x.value), x.value)
        return Carried(value, x.error, None if np.isinf(value).any() else x.grain)
    return rounded(x.value, x.error, x.grain, x.most, 1, to)


def product(x: Carried, w: Carried, to: Type, bias: Carried | None = None) -> Carried:
    """Return ``x @ w + bias``, summed in ``to``."""
    value, sizes = x.value @ w.value, x.most @ w.most
    error = np.abs(x.value) @ w.error + x.error @ np.abs(w.value) + x.error @ w.error
    grain, terms = add_grains(x.grain, w.grain), x.value.shape[-1]
    if bias is not None:
        value, sizes, error, terms = value + bias.value, sizes + bias.most, error + bias.error, terms + 1
        grain = finer(grain, bias.grain)
    return rounded(value, error, grain, sizes, max(terms, 1), to)


def total(x: Carried, to: Type) -> Carried:
    """Return the sum over rows."""
    return rounded(x.value.sum(0), x.error.sum(0), x.grain, x.most.sum(0), max(len(x.value), 1), to)


def linear(to: Type, *terms: tuple[float, Carried]) -> Carried:
    """Return a sum of arrays with constant factors, each factor rounded as well."""
    value = sum(c * x.value for c, x in terms)
    error: Any = sum(abs(c) * x.error for c, x in terms)
    sizes: Any = sum(abs(c) * x.most for c, x in terms)
    grain: int | None = COARSEST
    for c, x in terms:
        grain = finer(grain, add_grains(grain_of(np.array([c])), x.grain))
    return rounded(np.asarray(value), error, grain, sizes, 2 * len(terms), to)


def divided(x: Carried, by: float, to: Type) -> Carried:
    """Return ``x / by``, or ``x * (1 / by)``: two roundings, none where ``by`` is a power of two."""
    fraction, exponent = math.frexp(by)
    grain = None if x.grain is None or fraction != 0.5 else min(x.grain - exponent + 1, COARSEST)
    return rounded(x.value / by, x.error / by, grain, x.most / by, 2, to)


def add_grains(a: int | None, b: int | None) -> int | None:
    """Return the grain of a product."""
    return None if a is None or b is None else min(a + b, COARSEST)


def finer(a: int | None, b: int | None) -> int | None:
    """Return the grain of a sum."""
    return None if a is None or b is None else min(a, b)


# ------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class Part:
    """What some rows contribute: sum of losses, gradients, and the output of each unit."""

    loss: Carried
    gradients: dict[str, Carried]
    outputs: list[Carried]


@dataclass(frozen=True)
class Network:
    """The MLP of a case in the arithmetic of a candidate.

    Attributes
    ----------
    kept, summed : types of activations, and of the sums behind them
    """

    case: Case
    kept: Type
    summed: Type

    @classmethod
    def of(cls, case: Case, dtype: str) -> Network:
        """Return the network for a candidate that computes in ``dtype``."""
        if not isinstance(case.model, MLP) or not isinstance(case.optimizer, optim.SGD):
            raise NotCarried("error bounds are carried through an MLP with ReLU that is trained by SGD, nothing else")
        return cls(case, TYPES[dtype], TYPES["float32" if dtype == "float16" else dtype])

    def part(self, weights: Mapping[str, Carried], batch: Batch, seed: float) -> Part:
        """Carry some rows forward and backward. The backward pass starts from ``seed``, whichever way it is rounded."""
        assert isinstance(self.case.model, MLP)
        layers = len(self.case.model.widths) - 1
        x = stored(given(batch.inputs), self.kept)
        inputs, before, outputs = [], [], []
        for i in range(layers):
            inputs.append(x)
            w, b = weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"]
            y = stored(product(x, w, self.summed, b), self.kept)
            before.append(y)
            x = Carried(np.maximum(y.value, 0), y.error, y.grain) if i < layers - 1 else y
            outputs.append(x)
        residual = linear(self.summed, (1.0, x), (-1.0, stored(given(batch.targets), self.kept)))
        mask = batch.mask[:, None]
        residual = Carried(np.where(mask, residual.value, 0), np.where(mask, residual.error, 0), residual.grain)
        loss = square_sum(residual, self.summed)
        dy = self.start(residual, seed)
        gradients: dict[str, Carried] = {}
        for i in reversed(range(layers)):
            # In whatever parts they are summed, each part is stored: where those are halves, all must fit.
            gradients[f"layers.{i}.bias"] = total(dy, self.kept)
            gradients[f"layers.{i}.weight"] = product(inputs[i].T, dy, self.kept)
            if i:
                dx = stored(product(dy, weights[f"layers.{i}.weight"].T, self.summed), self.kept)
                dy = slope(dx, before[i - 1])
        return Part(loss, gradients, outputs)

    def start(self, residual: Carried, seed: float) -> Carried:
        """Return the gradient of the loss, ``2 seed residual``; seed and product are rounded."""
        return stored(linear(self.summed, (2 * seed, residual)), self.kept)


def slope(dx: Carried, y: Carried) -> Carried:
    """Return ``dx`` where ``y > 0``, else 0; where the sign of ``y`` is not certain, either."""
    open_ = y.value > 0
    unsure = (np.abs(y.value) <= y.error) & (y.error > 0)
    value = np.where(open_, dx.value, 0.0)
    return Carried(value, np.where(unsure, dx.most, np.where(open_, dx.error, 0.0)), dx.grain)


def square_sum(x: Carried, to: Type) -> Carried:
    """Return the sum of all squares."""
    value, most = x.value.ravel(), x.most.ravel()
    error = (2 * np.abs(value) + x.error.ravel()) @ x.error.ravel()
    return rounded(np.asarray(value @ value), np.asarray(error), add_grains(x.grain, x.grain), np.asarray(most @ most),
                   max(value.size, 1), to)  # fmt: skip


# ----------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class StepErrors:
    """How far an honest candidate may be off, by the names of :meth:`refpar.case.Step.items`; and where it started."""

    errors: dict[str, HostArray]
    weights: dict[str, Carried]
    seed: float
    divisor: float


def carry(case: Case, dtype: str) -> list[StepErrors]:
    """Return the error bounds of each step of ``case`` for a candidate that computes in ``dtype``.

    Raises
    ------
    NotCarried
        For other networks than MLPs, other optimizers than SGD; and for float16 that is not exact, because
        where micro-batches are rounded depends on how there are many.
    """
    net = Network.of(case, dtype)
    optimizer = case.optimizer
    assert isinstance(optimizer, optim.SGD)
    specs = case.model.build().specs
    kept, to = net.kept, net.summed
    master_type = "float32" if dtype == "float16" else dtype
    masters = {
        name: given(initial_value(case.seed, name, spec, case.precision.master).astype(master_type))
        for name, spec in specs.items()
    }
    trained = [name for name in specs if name not in case.frozen_names]
    momentum = {name: given(np.zeros(masters[name].value.shape)) for name in trained}
    weights = {name: stored(p, kept) for name, p in masters.items()}
    scaler = precision.LossScaler(case.precision.loss_scale)
    steps, t = [], 0
    for batch in case.batches:
        count = losses.token_count(batch.mask)
        seed, divisor = losses.seed_and_divisor(case.divide, scaler.scale, count)
        part = net.part(weights, batch, seed)
        before = dict(weights)
        gradients = {n: divided(stored(part.gradients[n], kept), divisor, to) for n in trained}
        overflow = any(not np.isfinite(g.value).all() for g in gradients.values())
        if not overflow and any(not np.isfinite(g.error).all() for g in gradients.values()):
            raise NotCarried("whether a gradient overflows depends on the order of additions")
        errors: dict[str, HostArray] = {"loss": divided(part.loss, max(count, 1), to).error}
        factor = (1.0, 0.0)
        if not overflow:
            errors |= {f"gradient/{name}": g.error for name, g in gradients.items()}
            norm, errors["norm"] = norm_of(list(gradients.values()), to)
            factor = clip_factor(norm, float(errors["norm"]), case.clip, to)
        if not overflow and count:
            t += 1
            rate = optim.learning_rate(optimizer, t)
            for name, g in gradients.items():
                decay = optimizer.weight_decay if optim.decays(specs[name]) else 0.0
                step = clipped(g, *factor, to)
                step = linear(to, (1.0, step), (decay, masters[name])) if decay else step
                if optimizer.momentum:
                    step = momentum[name] = linear(to, (optimizer.momentum, momentum[name]), (1.0, step))
                masters[name] = linear(to, (1.0, masters[name]), (-rate, step))
                weights[name] = stored(masters[name], kept)
        if count:
            scaler.update(overflow)
        for name, p in masters.items():
            if optimizer.momentum and name in momentum:
                errors[f"state/{name}/momentum"] = momentum[name].error
            if dtype == "float16":
                errors[f"state/{name}/master"] = p.error
            errors[f"parameter/{name}"] = weights[name].error
        steps.append(StepErrors(errors, before, seed, divisor))
        if dtype == "float16" and any(e.any() for name, e in errors.items() if name != "norm"):
            raise NotCarried("in float16 errors are not carried, only exactness proved, and this case is not exact")
    return steps


def norm_of(gradients: list[Carried], to: Type) -> tuple[float, HostArray]:
    """Return the global norm, and how far it may be off: as far as the gradients are, and the roundings of its sum."""
    value = math.sqrt(math.fsum(float((g.value**2).sum()) for g in gradients))
    shift = math.sqrt(math.fsum(float((g.error**2).sum()) for g in gradients))  # the triangle inequality
    terms = sum(g.value.size for g in gradients) + 2
    return value, np.asarray(shift + terms * to.unit * (value + shift))


def clip_factor(norm: float, error: float, limit: float | None, to: Type) -> tuple[float, float]:
    """Return the factor by which gradients are clipped, and how far it may be off."""
    factor = optim.clip_factor(norm, limit)
    if limit is None or norm + error <= limit:
        return 1.0, 0.0
    return factor, limit / (norm - error) - limit / (norm + error) + to.unit if norm > error else math.inf


def clipped(g: Carried, factor: float, error: float, to: Type) -> Carried:
    """Return ``g`` times a factor that is itself known with an error."""
    if factor == 1.0 and error == 0.0:
        return g
    most = factor + error
    return rounded(g.value * factor, g.error * most + np.abs(g.value) * error, None, g.most * most, 1, to)
