"""Who works on which rows, who holds which elements, and how the pieces become one again.

Every split follows one rule, that of :func:`refpar.split.sizes`: near-even, the first parts one
longer. Rows are split over data-parallel replicas, a replica's rows over its micro-batches; a weight over
tensor-parallel ranks along its axis, and what each of those holds, flat, over replicas by ZeRO::

    5 rows on 3 replicas, in 2 micro-batches    d=0: 0 | 1    d=1: 2 | 3    d=2: 4 | none

    a weight (3, 5), axis 1, on 2 ranks         t=0           t=1            flat positions
                                                0 1 2         3 4
                                                5 6 7         8 9
                                                10 11 12      13 14
    and with ZeRO on 2 replicas, d=0 owns       0 1 2 5 6     3 4 8
                                 d=1 owns       7 10 11 12    9 13 14

A rank's result is a set of *pieces*: for a name, the global flat positions it speaks for and the
values there. Where several ranks hold the same elements one of them speaks, so that putting the
pieces together writes every element exactly once. :func:`assemble` insists on that. Nothing here is sent:
who holds what follows from sizes and rank numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from refpar import split
from refpar.case import HostArray
from refpar.nn.layer import ParamSpec

Positions = npt.NDArray[np.int64]
Piece = tuple[Positions, HostArray]


def rows(total: int, parts: int, index: int) -> range:
    """Return the rows of part ``index``: 5 rows over 3 are ``0 1``, ``2 3``, ``4``."""
    return split.part(total, parts, index)


def micro_batches(mine: range, parts: int) -> list[range]:
    """Cut a replica's rows into micro-batches, some of them empty where there are more parts than rows."""
    return [mine[r.start : r.stop] for r in (rows(len(mine), parts, m) for m in range(parts))]


def slices(spec: ParamSpec, tp: int, t: int) -> tuple[slice, ...]:
    """Return which part of a parameter tensor-parallel rank ``t`` of ``tp`` holds: all of it where it has no axis."""
    whole = [slice(None)] * len(spec.shape)
    if spec.axis is not None:
        part = split.part(spec.shape[spec.axis], tp, t)
        whole[spec.axis] = slice(part.start, part.stop)
    return tuple(whole)


def slice_initial(whole: HostArray, spec: ParamSpec, tp: int, t: int) -> HostArray:
    """Return this rank's part of an initial value that was drawn whole, so that it does not depend on ``tp``.

    A copy: a view would keep the whole in memory.
    """
    return whole[slices(spec, tp, t)].copy()


def positions(spec: ParamSpec, tp: int, t: int) -> Positions:
    """Return the global flat positions of what tensor-parallel rank ``t`` holds, in the order in which it does."""
    return np.arange(math.prod(spec.shape)).reshape(spec.shape)[slices(spec, tp, t)].reshape(-1)


def assemble(shape: tuple[int, ...], pieces: Iterable[Piece]) -> HostArray:
    """Return the whole array of ``shape``.

    Raises
    ------
    AssertionError
        Where an element is written twice or not at all: then two ranks speak for it, or none.
    """
    pieces = list(pieces)
    size = math.prod(shape)
    whole = np.empty(size, pieces[0][1].dtype)
    written = np.zeros(size, np.int64)
    for positions, values in pieces:
        whole[positions] = values
        np.add.at(written, positions, 1)
    if (written != 1).any():
        at = int(np.argmax(written != 1))
        raise AssertionError(f"element {at} of {size} was written {written[at]} times: it must be exactly once")
    return whole.reshape(shape)


def merge(parts: Iterable[Mapping[str, Piece]]) -> dict[str, list[Piece]]:
    """Gather the pieces of each name from all ranks, names in order of first appearance."""
    merged: dict[str, list[Piece]] = {}
    for part in parts:
        for name, piece in part.items():
            merged.setdefault(name, []).append(piece)
    return merged
