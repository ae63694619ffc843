"""Collectives on a ring, chunk by chunk, written on send and receive alone.

All-reduce leaves the *sum* of everybody's array with everybody; never the mean: what to divide by is
the caller's to say. The ring does it without any rank sending more than about twice the array, however
many ranks there are. The array is cut into as many chunks as there are ranks; in each of 2(N-1) steps
every rank sends one chunk to its right neighbour and receives one from its left. For N = 4, with
``a1`` chunk 1 of rank 0's array ``a``::

            rank 0           rank 1           rank 2           rank 3
            a0 a1 a2 a3      b0 b1 b2 b3      c0 c1 c2 c3      d0 d1 d2 d3

    reduce-scatter: what arrives is added to one's own chunk, and that sum sent on
    step 0  send a3          send b0          send c1          send d2
       has  a2+d2            b3+a3            c0+b0            d1+c1
    step 1  send a2+d2       send b3+a3       send c0+b0       send d1+c1
       has  a1+d1+c1         b2+a2+d2         c3+b3+a3         d0+c0+b0
    step 2  send .. chunk 1  send .. chunk 2  send .. chunk 3  send .. chunk 0
       has  0 complete       1 complete       2 complete       3 complete

    all-gather: what arrives is complete; it is kept, and sent on
    step 0  send 0, get 3    send 1, get 0    send 2, get 1    send 3, get 2
    step 1  send 3, get 2    ...
    step 2  send 2, get 1    ...

Sent: N-1 chunks in each half, so 2(N-1)/N of the array by every rank where N divides it, and
2(N-1)n elements over all ranks always (:func:`refpar.split.ring_elements` has each rank's share).
7 elements on 3 ranks are chunks of 3, 2 and 2, and the ranks send 9, 10 and 9: 28 in all.
Held: the result, where partial sums lie until the all-gather overwrites them. A result that has no room
for them, being narrower or one part only, takes up to two chunks besides, one coming in and one going out.
Every chunk is summed in one place, in one order, so all ranks hold the same bits.

Halves: partial sums travel in ``accumulate``, float32 by default, and are rounded once, before the
all-gather: 4 bytes an element in the first half, 2 in the second. ``accumulate="float16"`` halves
the traffic of the first, rounds at every rank, and overflows where two finite gradients of 40,000
meet (horovod/horovod#1699).

Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
section 3; Sergeev & Del Balso 2018 (Horovod), section 3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar import split
from refpar.arrays import Array, accumulator, array_module
from refpar.comm.communicator import Communicator, HostArray, native

DTYPES = ("int32", "int64", "float16", "float32", "float64")
OPERATORS = {"sum": "add", "max": "maximum"}  # the names of the functions in every array library


def all_reduce(
    comm: Communicator,
    array: Array,
    op: str = "sum",
    *,
    out: Array | None = None,
    accumulate: npt.DTypeLike | None = None,
) -> Array:
    """Return the sum, or the maximum, of every rank's ``array``: the same bits on every rank.

    Parameters
    ----------
    array : int32, int64, float16, float32 or float64, any shape, strides and byte order; the same shape and dtype on
        every rank. Results are in native byte order, those in ``out`` in its own.
    op : ``"sum"`` or ``"max"``
    out : where the result goes; may be ``array`` itself, but not overlap it otherwise. After an error it holds
        sums of some ranks
    accumulate : type of the partial sums; float32 by default where ``array`` is float16, else its own

    Raises
    ------
    CollectiveMismatch
        Where the ranks' calls differ in operation, shape, dtype, ``op`` or ``accumulate``.
    """
    kept = _partial_type(array, op, accumulate)
    _check_out(array, out, array.shape, own_place=out)
    parts = _slices(split.sizes(array.size, comm.size))
    with comm.operation("all_reduce", array.dtype, array.shape, f", {op} in {kept.name}"):
        result = _flat_room(array, out, array.size)
        own = result[parts[comm.rank]]
        _reduce(comm, _flat(array), own, parts, op, kept, whole=result)
        _gather(comm, own, result, parts)
    return _shaped(result, array.shape, out)


def reduce_scatter(
    comm: Communicator,
    array: Array,
    op: str = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: Array | None = None,
    accumulate: npt.DTypeLike | None = None,
) -> Array:
    """Return this rank's part, flat, of the sum or maximum of every rank's ``array``.

    Parameters
    ----------
    array, op, accumulate : as for :func:`all_reduce`
    counts : how many elements each rank gets; near-even by default
    out : where the part goes, ``(counts[rank],)``; must not overlap ``array``

    Returns
    -------
    part : ``(counts[rank],)``, of the dtype of ``array``
    """
    kept = _partial_type(array, op, accumulate)
    counts = _checked_counts(comm, counts, array.size)
    shape = (counts[comm.rank],)
    _check_out(array, out, shape)
    with comm.operation("reduce_scatter", array.dtype, array.shape, f", {op} in {kept.name}, by {counts}"):
        result = _flat_room(array, out, shape[0])
        _reduce(comm, _flat(array), result, _slices(counts), op, kept)
    return _shaped(result, shape, out)


def all_gather(
    comm: Communicator, array: Array, *, counts: Sequence[int] | None = None, out: Array | None = None
) -> Array:
    """Return every rank's ``array``, in the order of the ranks.

    Parameters
    ----------
    array : of one dtype on every rank; of one shape, too, unless ``counts`` is given
    counts : how many elements each rank gives, where they differ
    out : where the result goes; ``array`` may be its own place in it, but not overlap it otherwise

    Returns
    -------
    gathered : ``(size, *array.shape)``, or with ``counts`` flat, ``(sum(counts),)``
    """
    _check_dtype(array)
    if counts is None:
        shape = (comm.size, *array.shape)
        counts, detail = [array.size] * comm.size, ""
    else:
        counts = _checked_counts(comm, counts, None)
        if array.size != counts[comm.rank]:
            raise ValueError(f"array has {array.size} elements; counts[{comm.rank}] says {counts[comm.rank]}")
        shape, detail = (sum(counts),), f" by {counts}"
    parts = _slices(counts)
    own_place = None
    if out is not None and out.flags.c_contiguous:
        own_place = out.reshape(-1)[parts[comm.rank]].reshape(array.shape)
    _check_out(array, out, shape, own_place=own_place)
    with comm.operation("all_gather", array.dtype, shape, detail):
        result = _flat_room(array, out, sum(counts))
        _gather(comm, _flat(array), result, parts)
    return _shaped(result, shape, out)


def broadcast(comm: Communicator, array: Array, root: int = 0, *, out: Array | None = None) -> Array:
    """Return the ``array`` of rank ``root``.

    The chunks run along the chain ``root, root + 1, ...``; each rank sends on what it has received
    while the next chunk is on its way.

    Parameters
    ----------
    array : on ``root`` what is sent; on the others only its shape and dtype matter
    out : where the result goes; may be ``array`` itself, but not overlap it otherwise
    """
    _check_dtype(array)
    _check_out(array, out, array.shape, own_place=out)
    if not 0 <= operator.index(root) < comm.size:
        raise ValueError(f"root is {root}; the ranks of {comm.name} are 0 to {comm.size - 1}")
    place = (comm.rank - root) % comm.size  # in the chain
    with comm.operation("broadcast", array.dtype, array.shape, f" from {root}"):
        result = _flat_room(array, out, array.size)
        if place == 0:
            result[...] = _flat(array)
        for chunk in _slices(split.sizes(array.size, comm.size)):
            if place > 0:
                comm.recv(result[chunk], (comm.rank - 1) % comm.size)
            if place < comm.size - 1:
                comm.send(result[chunk], (comm.rank + 1) % comm.size)
    return _shaped(result, array.shape, out)


def all_to_all(comm: Communicator, array: Array) -> Array:
    """Return what every rank has for this one: ``result[s]`` is ``array[rank]`` of rank ``s``.

    Parameters
    ----------
    array : ``(size, ...)``, the same shape and dtype on every rank; ``array[d]`` goes to rank ``d``
    """
    xp = array_module(array)
    _check_dtype(array)
    if array.ndim == 0 or array.shape[0] != comm.size:
        raise ValueError(f"array has shape {tuple(array.shape)}; its first axis must be the {comm.size} receivers")
    rank, size = comm.rank, comm.size
    with comm.operation("all_to_all", array.dtype, array.shape):
        rows = _flat(array).reshape(size, -1 if array.size else 0)
        result = xp.empty(rows.shape, rows.dtype)
        result[rank] = rows[rank]
        for step in range(1, size):
            source = (rank - step) % size
            comm.exchange(rows[(rank + step) % size], (rank + step) % size, source, _keep(result[source]))
    return result.reshape(array.shape)


# The two halves


def _reduce(
    comm: Communicator,
    flat: Array,
    own: Array,
    parts: Sequence[slice],
    op: str,
    kept: np.dtype[Any],
    whole: Array | None = None,
) -> None:
    """Reduce every part on its way round, in the type ``kept``, and leave this rank's in ``own``.

    ``whole``, the result of all parts, holds partial sums where it is of that type. It may be ``flat`` itself: each
    part of that is read for the last time where the sum that goes there is formed.
    """
    xp = array_module(flat)
    combine = getattr(xp, OPERATORS[op])
    passing = [parts[(comm.rank - step - 2) % comm.size] for step in range(comm.size - 1)]
    chunk = flat[parts[comm.rank - 1]].astype(kept, copy=False)
    for part, sums in zip(passing, _rooms(passing, own, kept, whole), strict=True):

        def add(start: int, piece: HostArray, mine: Array = flat[part], sums: Array = sums) -> None:
            stop = start + piece.size
            combine(mine[start:stop], xp.asarray(piece), out=sums[start:stop])

        comm.exchange(chunk, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, add)
        chunk = sums
    own[...] = chunk  # a half is rounded here, once


def _rooms(passing: Sequence[slice], own: Array, kept: np.dtype[Any], whole: Array | None) -> Iterator[Array]:
    """Yield where the sum of each part goes as it passes; the last is complete.

    What was sent on is needed no longer, so two rooms are enough: one fills while the other leaves. The second
    is made when the first has been filled, and what was sent before it, where that was converted, is gone.
    """
    longest = max((part.stop - part.start for part in passing), default=0)
    two: list[Array] = []
    for step, part in enumerate(passing):
        if whole is not None and whole.dtype == kept:
            yield whole[part]
        elif own.dtype == kept and step == len(passing) - 1:
            yield own
        else:
            if step < 2:
                two.append(array_module(own).empty(longest, kept))
            yield two[step % 2][: part.stop - part.start]


def _gather(comm: Communicator, mine: Array, result: Array, parts: Sequence[slice]) -> None:
    """Fill ``result`` with every rank's part, ``mine`` among them."""
    result[parts[comm.rank]] = mine
    for step in range(comm.size - 1):
        chunk = result[parts[(comm.rank - step) % comm.size]]
        coming = result[parts[(comm.rank - step - 1) % comm.size]]
        comm.exchange(chunk, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, _keep(coming))


def _keep(room: Array) -> Callable[[int, HostArray], None]:
    """Return a function that writes pieces into ``room``, flat."""
    xp = array_module(room)

    def keep(start: int, piece: HostArray) -> None:
        room[start : start + piece.size] = xp.asarray(piece)

    return keep


# Arguments and results


def _check_dtype(array: Array) -> None:
    if array.dtype.name not in DTYPES:
        raise TypeError(f"array is of {array.dtype.name}; collectives take {', '.join(DTYPES)}")


def _partial_type(array: Array, op: str, accumulate: npt.DTypeLike | None) -> np.dtype[Any]:
    """Return the type in which partial results travel."""
    _check_dtype(array)
    if op not in OPERATORS:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(map(repr, OPERATORS))}")
    own = native(array.dtype)
    if op == "max":
        return own  # exact in any type
    kept: np.dtype[Any] = accumulator(own) if accumulate is None else native(accumulate)
    if kept != own and not (own.kind == kept.kind == "f" and kept.itemsize > own.itemsize):
        raise ValueError(f"accumulate is {kept.name}; sums of {own.name} are kept in it or in a wider float")
    return kept


def _checked_counts(comm: Communicator, counts: Sequence[int] | None, total: int | None) -> list[int]:
    if counts is None:
        assert total is not None
        return split.sizes(total, comm.size)
    counts = [operator.index(count) for count in counts]
    if len(counts) != comm.size or min(counts) < 0 or total not in (None, sum(counts)):
        wanted = "" if total is None else f" that sum to {total}"
        raise ValueError(f"counts is {counts}; it must be {comm.size} numbers, not negative{wanted}")
    return counts


def _check_out(array: Array, out: Array | None, shape: tuple[int, ...], own_place: Array | None = None) -> None:
    """Refuse an ``out`` of the wrong kind, or one that overlaps ``array`` where that is not ``own_place``."""
    if out is None:
        return
    if type(out) is not type(array) or out.dtype != array.dtype or tuple(out.shape) != tuple(shape):
        raise ValueError(
            f"out is {type(out).__name__} {out.dtype} {tuple(out.shape)}; "
            f"it must be {type(array).__name__} {array.dtype} {tuple(shape)}"
        )
    if own_place is not None and _same_memory(array, own_place):
        return
    if array_module(array).shares_memory(array, out):
        raise ValueError("out overlaps array without being the same: input would be overwritten before it was sent")


def _same_memory(a: Array, b: Array) -> bool:
    if a is b:
        return True
    interfaces = [getattr(x, "__array_interface__", getattr(x, "__cuda_array_interface__", None)) for x in (a, b)]
    places = [i and (i["data"][0], x.shape, x.strides) for i, x in zip(interfaces, (a, b), strict=True)]
    return places[0] is not None and places[0] == places[1]


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(r.start, r.stop) for r in split.ranges(counts)]


def _flat(array: Array) -> Array:
    """Return the elements in their logical order and in native bytes: a view where they lie so, else a copy."""
    return array_module(array).ascontiguousarray(array, dtype=native(array.dtype)).reshape(-1)


def _lies_flat(array: Array) -> bool:
    return bool(array.flags.c_contiguous and array.dtype.isnative)


def _flat_room(array: Array, out: Array | None, size: int) -> Array:
    """Return a flat array to write the result to: the memory of ``out`` where it lies so."""
    if out is not None and _lies_flat(out):
        return out.reshape(-1)
    return array_module(array).empty(size, native(array.dtype))


def _shaped(flat: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    """Return the flat result in its shape, in ``out`` if there is one."""
    if out is None:
        return flat.reshape(shape)
    if not _lies_flat(out):
        out[...] = flat.reshape(shape)
    return out
