"""Stochastic arithmetic: NumPy in which every result is off by a random rounding.

How far may an honest float32 result be from the truth, when it was computed in another order, by other
kernels, on other hardware? Run the reference several times and shake every result of every operation by as
much as its rounding could have been; what the results then do is what roundings can do to them
(Parker 1997, "Monte Carlo Arithmetic"; Vignes 1993, the CESTAC method)::

    r = a + b           r + u |r| d                     d uniform in (-1, 1), new for every element
    s = sum of n        s + u sqrt(n) sum|terms| d      a sum rounds n times, in an order nobody prescribes

The factor sqrt(n) is that of sums whose roundings are independent (Higham & Mary 2019, "A new approach to
probabilistic rounding error analysis", theorem 2.4). u is the unit roundoff of the result's type: 2^-11, 2^-24 or
2^-53. What was float32 and is float64 for a moment, as in the global norm, is shaken as float32: others do not widen.

:class:`Shaken` is an array of NumPy's own, so the code under it need not know: it is handed shaken weights, and
everything computed from them is shaken too. What NumPy hands out bare in between (a new empty array, a copy in another
order) is filled with shaken numbers and shaken on from the next operation that has a weight in it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

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
        return self._own(self._shake(half, np.abs(half)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        source = next(x for x in (*inputs, *(out or ())) if isinstance(x, Shaken))
        plain = [bare(x) for x in inputs]
        magnitude: Any = None
        if method == "__call__" and ufunc is np.matmul:
            magnitude = math.sqrt(plain[0].shape[-1]) * np.matmul(np.abs(plain[0]), np.abs(plain[1]))
        elif method == "reduce" and ufunc is np.add:
            kept = {k: v for k, v in options.items() if k in ("axis", "keepdims", "dtype")}
            magnitude = np.add.reduce(np.abs(plain[0]), **kept)
            magnitude = magnitude * math.sqrt(plain[0].size / max(np.size(magnitude), 1))
        if out is not None:
            options["out"] = tuple(bare(x) for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        if method == "at" or not isinstance(result, np.ndarray | np.floating) or result.dtype.kind != "f":
            return result
        unit = max(x.unit for x in (*inputs, *(out or ())) if isinstance(x, Shaken))
        if ufunc not in EXACT:
            result = source._shake(result, np.abs(result) if magnitude is None else magnitude, unit)
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


def bare(x: Any) -> Any:
    """Return ``x`` without the shaking."""
    return x.view(np.ndarray) if isinstance(x, Shaken) else x


def shake(x: HostArray, random: np.random.Generator) -> Any:
    """Return ``x``, of floating type, as the start of a shaken computation."""
    shaken = x.view(Shaken)
    shaken.random, shaken.unit = random, min(UNIT[x.dtype], 2.0**-24)
    return shaken


class Library:
    """What :func:`refpar.single.train` takes for an array library: everything in it starts out shaken."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.Generator(np.random.Philox(seed))

    def asarray(self, x: HostArray) -> Any:
        """Return ``x``, shaken where it is of floating type."""
        return shake(x, self.random) if x.dtype.kind == "f" else x

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


Shaken.__module__ = "numpy"  # so that array_module() finds the functions that work on it: NumPy's
