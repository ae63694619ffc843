"""Random numbers that are addressed, not drawn.

A generator that is drawn from makes a number depend on everything drawn before it: split the batch
over two ranks and each sees other dropout masks; recompute a layer and the mask has changed. Here
a number is a function of *where it is used*::

    uniform(shape, *key, rows)      key = (seed, "dropout", "blocks.0.drop", step), rows = global rows

so it does not matter who asks, when, in which order, or together with which other rows. The bits
are those of Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"): the key names the purpose, the counter the row and the place in it.

Everything happens on the host, with NumPy, on every backend. The map from bits to floats is exact,
so the numbers are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Key = tuple[int | str, ...]


def bits(key: Key, row: int, size: int) -> npt.NDArray[np.uint64]:
    """Return the first ``size`` 64-bit words at ``(key, row)``.

    The 128-bit Philox key is a hash of ``key``; the row is the upper half of the 256-bit counter,
    so no two rows ever meet.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    philox = np.random.Philox(key=np.frombuffer(digest, "<u8"), counter=[0, 0, row, 0])
    return philox.random_raw(size)


def uniform(key: Key, shape: tuple[int, ...], rows: Iterable[int] | None = None) -> npt.NDArray[np.float64]:
    """Return float64 numbers in [0, 1), each a multiple of 2^-53.

    Parameters
    ----------
    key : what the numbers are for, such as ``(seed, "dropout", layer name, step)``
    shape : shape of one row, or of the whole array where there are no rows
    rows : global row numbers; the result is then ``(len(rows), *shape)``
    """
    size = int(np.prod(shape, dtype=np.int64))
    if rows is None:
        return _unit(bits(key, 0, size)).reshape(shape)
    drawn = [_unit(bits(key, int(row), size)) for row in rows]
    return np.concatenate([*drawn, np.empty(0)]).reshape(len(drawn), *shape)


def integers(key: Key, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """Return integers in ``low .. high - 1``; exactly uniform only where ``high - low`` is a power of two."""
    return low + (uniform(key, shape) * (high - low)).astype(np.int64)


def _unit(words: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
