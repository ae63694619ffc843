"""A stand-in for CuPy that needs no GPU and forgives nothing.

Its arrays hold a NumPy array and do not let it out. A line that runs on them and gives NumPy's
numbers has kept to what CuPy has; a line that only NumPy can run raises here, on any machine::

    import strictpy as xp
    x = xp.asarray(host)            # the way in:  array, asarray, asanyarray, ndarray.set
    y = xp.maximum(x, 0) @ x.T      # functions and operators of CuPy
    host = xp.asnumpy(y)            # the way out: asnumpy, ndarray.get, tolist, item, float(), ...

What it refuses, and why:

====================================== ===========================================================
a name or a keyword that the installed it would raise on a GPU; ``tests/cupy_surface.json`` lists
cupy package does not have             what there is
implicit conversion to NumPy, a NumPy  CuPy raises TypeError
array or a list as operand, assignment
of one to a part
``np.sum(x)``, ``np.exp(x)``           CuPy hands them on to itself; NumPy's other functions raise,
                                       so technique code calls none
a host array or a list as index        CuPy copies it to the device, each time anew
an index array out of range            CuPy wraps it around, silently
an index array that names an element   which value stays is undefined
twice, in an assignment of an array
an assignment of contiguous elements   bytes are copied onto themselves, shifted
to a place that overlaps them
``add.at`` of floats on one element    atomic additions, in no fixed order: no two replicas with
twice, ``bincount`` with weights       the same bits
``add.reduceat`` of floats             differences of one cumulative sum: each segment carries the
                                       rounding, and the NaN, of all before it
``matmul(dtype=)`` wider than both     multiplied and rounded in the type of the operands, then
operands                               widened
``cumsum`` of halves, ``linalg`` of    in which type they accumulate is not said
halves
``cupy.random``                        its streams differ between versions: draw on the host
====================================== ===========================================================

The first three and the last are CuPy's own answers; the others are stricter than CuPy, where CuPy
would answer something that this project cannot use. What it does as CuPy does, and NumPy not:
``x[0]`` of one axis and every reduction is a 0-d array, the former a view; sums of halves
accumulate in float32; ``sort`` is stable; there is no ``__index__``; nothing warns. ``empty`` is
filled with NaN, or with the smallest integer.

Whatever leaves the device makes the host wait for it: ``with strictpy.synchronisations() as count``
counts those places in ``count.total``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from strictpy import _cuda, _functions
from strictpy._array import ndarray, synchronisations
from strictpy._surface import CUPY, entry

__all__ = ["ndarray", "synchronisations"]

cuda = _cuda


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    kind = entry("cupy", name)
    thing = getattr(np, name) if kind in ("numpy", "constant") and hasattr(np, name) else _functions.find(name, kind)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted(CUPY["cupy"])
