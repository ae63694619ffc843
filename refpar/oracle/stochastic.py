"""Stochastic arithmetic: NumPy in which every result is off by a random rounding.

How far may an honest float32 result be from the truth, when it was computed in another order, by other
kernels, on other hardware? Run the reference several times and shake every result of every operation by as
much as its rounding could have been; what the results then do is what roundings can do to them
(Parker 1997, "Monte Carlo Arithmetic"; Vignes 1993, the CESTAC method)::

    r = a + b           r + u |r| d                     d uniform in (-1, 1), new for every element
    s = sum of n        s + u sqrt(n) sum|terms| d      a sum rounds n times, in an order nobody prescribes
    c = 0.999           c + u |c| d                     a constant, held in the type: one d for all elements
    c^t                 c^t + u sqrt(t) c^t d           a power, by t multiplications; the error of c is in it t times
    exact               as it is                        2 + 3: whoever computes it gets 5

The factor sqrt(n) is that of sums whose roundings are independent (Higham & Mary 2019, "A new approach to
probabilistic rounding error analysis", theorem 2.4). u is the unit roundoff of the result's type: 2^-11, 2^-24 or
2^-53. What was float32 and is float64 for a moment, as in the global norm, is shaken as float32: others do not widen.

Constants matter where they cancel: 0.999 in float32 is off by up to u, and 1 - 0.999^t, which Adam divides by, by up to
t u 0.999^t of what is left of 1: a thousand u in the first update. Who computes that in float64 has none of it, and
both are honest. A constant that float32 holds exactly, such as 0.875, is not shaken.

What is exact stays exact, as it does when the hardware rounds at random (CESTAC). Above all the input of a ReLU that is
0 because integers cancel: shaken, it would open or shut at random, and what nobody gets wrong would look uncertain. A
result is exact where its operands have half of the digits of their type or fewer, so that products are exact, and where
a sum of them fits, in any order. What has been rounded has more digits, but for one number in 2^12.

:class:`Shaken` is an array of NumPy's own, so the code under it need not know: it is handed shaken weights, and
everything computed from them is shaken too. What NumPy hands out bare in between (a new empty array, a copy in another
order) is filled with shaken numbers and shaken on from the next operation that has a weight in it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar.case import Case

HostArray = npt.NDArray[Any]

UNIT = {np.dtype(np.float16): 2.0**-11, np.dtype(np.float32): 2.0**-24, np.dtype(np.float64): 2.0**-53}
"""Unit roundoff: half the distance from 1 to the next number."""

EXACT = {np.maximum, np.minimum, np.negative, np.positive, np.absolute, np.sign, np.isfinite, np.isinf, np.isnan}
"""Operations that do not round."""


class Shaken(np.ndarray[Any, Any]):
    """An array whose every further result is shaken.

    Attributes
    ----------
    random : where the noise comes from
    unit : the coarsest unit roundoff that its elements have seen, float16 counted as the float32 it is summed in
    """

    random: np.random.Generator
    unit: float

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, Shaken):
            self.random, self.unit = parent.random, parent.unit

    def astype(self, dtype: Any, *args: Any, **options: Any) -> Any:
        """Convert; what becomes a half is shaken by the rounding of a half."""
        result = super().astype(dtype, *args, **options)
        if result.dtype != np.float16 or self.dtype == np.float16:
            return result
        half = bare(result)
        return self._own(self._shake(half, np.where(half == bare(self), 0, np.abs(half))))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        shaken = [x for x in (*inputs, *(out or ())) if isinstance(x, Shaken)]
        source, unit = shaken[0], max(x.unit for x in shaken)
        plain = [bare(x) if isinstance(x, np.ndarray) else held(x, unit, source.random) for x in inputs]
        if ufunc is np.true_divide and isinstance(inputs[1], int | float) and abs(math.frexp(inputs[1])[0]) != 0.5:
            plain[1] *= 1 + source.random.uniform(-unit, unit)  # some multiply by the reciprocal, which is rounded
        if out is not None:
            options["out"] = tuple(bare(x) for x in out)
            plain = [x.copy() if any(y is o for o in out) else x for x, y in zip(plain, inputs, strict=True)]
        result = getattr(ufunc, method)(*plain, **options)
        if method == "at" or not isinstance(result, np.ndarray | np.floating) or result.dtype.kind != "f":
            return result
        if ufunc not in EXACT:
            result = source._shake(result, errors(ufunc, method, plain, result, unit, options), unit)
        if out is not None:
            out[0][...] = result
            return out[0]
        return source._own(result, unit)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        result = super().__array_function__(function, types, args, options)
        if not isinstance(result, np.ndarray) or result.dtype.kind != "f":
            return result
        if function is np.einsum:
            terms, *operands = args
            magnitude = np.einsum(terms, *(np.abs(bare(x)) for x in operands))
            return self._own(self._shake(bare(result), magnitude * math.sqrt(operands[0].shape[-1])))
        return result if isinstance(result, Shaken) else self._own(result)  # np.where, for one, hands out a bare array

    def _own(self, result: Any, unit: float | None = None) -> Any:
        shaken = np.asarray(result).view(Shaken)
        shaken.random, shaken.unit = self.random, self.unit if unit is None else unit
        return shaken

    def _shake(self, result: Any, magnitude: Any, unit: float | None = None) -> Any:
        unit = max(UNIT[result.dtype], self.unit if unit is None else unit)
        magnitude = np.where(np.isfinite(magnitude), magnitude, 0)  # infinity is exact
        noise = self.random.uniform(-unit, unit, np.shape(result)) * magnitude
        with np.errstate(over="ignore"):
            return (result + noise).astype(result.dtype)


def errors(ufunc: np.ufunc, method: str, x: list[Any], result: Any, unit: float, options: dict[str, Any]) -> Any:
    """Return by how many u an operation on ``x`` may be off, element by element: 0 where it is exact.

    Only products, sums, quotients and their reductions are looked at for exactness; anything else rounds.
    """
    if result.dtype == np.float16:
        return np.abs(result)
    if method == "__call__" and ufunc is np.matmul:
        sizes = np.matmul(np.abs(x[0]), np.abs(x[1]))
        if min(x[0].ndim, x[1].ndim) < 2:
            return math.sqrt(x[0].shape[-1]) * sizes
        rows, columns = is_short(x[0], unit).all(-1)[..., None], is_short(x[1], unit).all(-2)[..., None, :]
        exact = rows & columns
        if exact.any():
            grains = lowest(x[0]).min(-1, initial=np.inf)[..., None], lowest(x[1]).min(-2, initial=np.inf)[..., None, :]
            exact &= unit * sizes < grains[0] * grains[1]
        return np.where(exact, 0, math.sqrt(x[0].shape[-1]) * sizes)
    if method == "reduce" and ufunc is np.add:
        kept = {k: v for k, v in options.items() if k in ("axis", "keepdims")}
        sizes = np.add.reduce(np.abs(x[0]), **kept)
        exact = np.logical_and.reduce(is_short(x[0], unit), **kept)
        if np.any(exact):
            exact = exact & (unit * sizes < np.minimum.reduce(lowest(x[0]), initial=np.inf, **kept))
        return np.where(exact, 0, sizes * math.sqrt(x[0].size / max(np.size(sizes), 1)))
    if method != "__call__" or ufunc not in (np.add, np.subtract, np.multiply, np.true_divide, np.square):
        return np.abs(result)
    a, b = (np.asarray(y, result.dtype) for y in (x[0], x[-1]))
    exact = is_short(a, unit)
    if not exact.any() or not (exact := exact & is_short(b, unit)).any():
        return np.abs(result)
    if ufunc in (np.add, np.subtract):
        b = b if ufunc is np.add else -b
        exact = exact & (result - a == b) & (result - b == a) & is_short(result, unit)
    if ufunc is np.true_divide:
        exact = exact & (np.abs(np.frexp(b)[0]) == 0.5)
    return np.where(exact, 0, np.abs(result))


def is_short(x: HostArray, unit: float) -> Any:
    """Return where a number has at most half of the digits of the type of that ``unit`` (Veltkamp's splitting)."""
    digits = -math.frexp(UNIT[x.dtype])[1] + 1, -math.frexp(unit)[1] + 1
    with np.errstate(over="ignore", invalid="ignore"):
        factor = x.dtype.type(2.0 ** (digits[0] - digits[1] // 2) + 1)
        large = factor * x
        return large - (large - x) == x


def lowest(x: HostArray) -> HostArray:
    """Return the power of two that the last digit of each number stands for; infinity for 0."""
    fraction, exponent = np.frexp(np.asarray(x, np.float64))
    whole = (np.where(np.isfinite(fraction), fraction, 1) * 2.0**53).astype(np.int64)
    return np.where(whole, np.ldexp((whole & -whole).astype(np.float64), exponent - 53), np.inf)


def bare(x: Any) -> Any:
    """Return ``x`` without the shaking."""
    return x.view(np.ndarray) if isinstance(x, Shaken) else x


def shake(x: HostArray, random: np.random.Generator) -> Any:
    """Return ``x``, of floating type, as the start of a shaken computation."""
    shaken = x.view(Shaken)
    shaken.random, shaken.unit = random, min(UNIT[x.dtype], 2.0**-24)
    return shaken


class Constant(float):
    """A constant of the case in the hands of programs that keep it, and what they compute from it, in a narrow type.

    Attributes
    ----------
    random, unit : where the noise comes from, and the unit roundoff of the type
    settled : it is the result of an operation, and rounded already
    """

    random: np.random.Generator
    unit: float
    settled: bool

    def __new__(cls, value: float, random: np.random.Generator, unit: float, settled: bool = False) -> Constant:
        """Return ``value``, to be rounded whenever it is used."""
        self = super().__new__(cls, value)
        self.random, self.unit, self.settled = random, unit, settled
        return self

    def _of(self, exact: Callable[[Any, Any], Any], a: float, b: float) -> Any:
        if not all(isinstance(x, int | float) for x in (a, b)):
            return NotImplemented
        x, y = (held(z, self.unit, self.random) for z in (a, b))
        result = exact(x, y)
        digits = round(-math.log2(self.unit))
        if exact is operator.pow:
            roundings = 0.0 if digits_of(x) * y <= digits else math.sqrt(y)
        else:
            roundings = float(exact(Fraction(x), Fraction(y)) != Fraction(result) or digits_of(result) > digits)
        off = roundings * self.random.uniform(-self.unit, self.unit)
        return Constant(result * (1 + off), self.random, self.unit, settled=True)

    def __add__(self, other: Any) -> Any:
        return self._of(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._of(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._of(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._of(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._of(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._of(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._of(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._of(operator.truediv, other, self)

    def __pow__(self, other: Any, mod: None = None) -> Any:
        return self._of(operator.pow, self, other)


def held(x: Any, unit: float, random: np.random.Generator) -> Any:
    """Return a number as a type of that ``unit`` may hold it: shaken where it has too many digits."""
    if not isinstance(x, float) or not math.isfinite(x):
        return x
    exact = (isinstance(x, Constant) and x.settled) or digits_of(x) <= -math.log2(unit)
    return float(x) if exact else float(x) * (1 + random.uniform(-unit, unit))


def digits_of(x: float) -> int:
    """Return how many binary digits a number has, from the first that is 1 to the last."""
    numerator = abs(Fraction(x).numerator)
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


class Library:
    """What :func:`refpar.single.train` takes for an array library: everything in it starts out shaken."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.Generator(np.random.Philox(seed))

    def asarray(self, x: HostArray) -> Any:
        """Return ``x``, shaken where it is of floating type."""
        return shake(x, self.random) if x.dtype.kind == "f" else x

    def constants(self, case: Case) -> Case:
        """Return ``case`` with an optimizer whose constants are shaken, in the type of the master weights."""
        optimizer, unit = copy.copy(case.optimizer), UNIT[np.dtype(case.precision.master)]
        for field in dataclasses.fields(optimizer):
            value = getattr(optimizer, field.name)
            loose = tuple(
                Constant(x, self.random, unit) if isinstance(x, float) else x for x in np.ravel(value).tolist()
            )
            object.__setattr__(optimizer, field.name, loose if isinstance(value, tuple) else loose[0])
        return dataclasses.replace(case, optimizer=optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


Shaken.__module__ = "numpy"  # so that array_module() finds the functions that work on it: NumPy's
