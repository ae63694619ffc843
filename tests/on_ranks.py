"""What tests of communication run on the ranks. Apart from them, so that ranks import neither pytest nor Hypothesis.

Inputs are made on the ranks from a seed, since arrays are dear to send; the parent makes the same.
"""

import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np

from refpar import rng
from refpar.comm import Communicator, ring

GUARD = 77

EXACT = {"int32": 2**27, "int64": 2**59, "float16": 2**11 / 16, "float32": 2**20, "float64": 2**49}
"""Sums of 8 integers up to these, in any order, stay where the type holds every integer (below 2^11 in halves)."""


@dataclass(frozen=True)
class Input:
    """What a rank brings: everything that follows from a seed, a rank and these fields."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    layout: str = "C"
    kind: str = "integers"  # or "reals"

    def values(self, rank: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return the values of ``rank``, drawn for it alone."""
        shape = self.shape if shape is None else shape
        key = (self.seed, "input", rank)
        if self.kind == "integers":
            high = int(EXACT[self.dtype])
            return rng.integers(key, shape, -high, high + 1).astype(self.dtype)
        spread = 2.0 ** rng.integers((*key, "exponent"), shape, -6, 7)
        return ((rng.uniform(key, shape) - 0.5) * spread).astype(self.dtype)


def laid_out(values: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a view that holds ``values``, and the buffer around it, whose other cells hold GUARD."""
    shape, n = values.shape, values.size
    if layout == "strided":  # every second element along every axis
        buffer = np.full([2 * s + 3 for s in shape], GUARD, values.dtype)
        view = buffer[tuple(slice(1, 2 * s + 1, 2) for s in shape)]
    else:
        buffer = np.full(n + 6, GUARD, values.dtype)
        view = buffer[3 : 3 + n]
        if layout == "reversed":
            view = view[::-1]
        if layout == "F":
            view = view.reshape(shape[::-1]).transpose()
        elif layout == "swapped":  # neither C nor F order: the last two axes exchanged
            view = view.reshape(*shape[:-2], *shape[-2:][::-1]).swapaxes(-1, -2) if len(shape) > 1 else view
        view = view.reshape(shape) if layout in ("C", "reversed") else view
    if not shape:
        view = view.reshape(()) if layout != "strided" else buffer
    view[...] = values
    assert view.size == 0 or np.shares_memory(view, buffer)
    return view, buffer


def guarded(collective: Any, comm: Communicator, mine: np.ndarray, layout: str, place: str, result_shape: Any) -> Any:
    """Call a collective on a view within guard cells; return its result when it has written nowhere else.

    ``place`` says where the result goes: to a "new" array, to an "out" laid out alike, or "in place".
    """
    array, around = laid_out(mine, layout)
    before = around.copy()
    if place == "new":
        result = collective(comm, array)
        assert not np.shares_memory(result, around)
    elif place == "out":
        out, room = laid_out(np.full(result_shape, 5, mine.dtype), layout)
        result = collective(comm, array, out=out)
        assert result is out
        copy = out.copy()
        out[...] = GUARD
        assert (room == GUARD).all(), "wrote outside of out"
        out[...] = copy
    else:
        result = collective(comm, array, out=array)
        assert result is array
        copy = array.copy()
        array[...] = mine
        assert around.tobytes() == before.tobytes(), "wrote outside of array"
        return copy
    assert around.tobytes() == before.tobytes(), "the input has changed"
    return np.array(result)


def sent(comm: Communicator) -> tuple[int, int, int]:
    return comm.ledger.messages_sent, comm.ledger.elements_sent, comm.ledger.bytes_sent


def all_reduce(comm: Communicator, given: Input, op: str, accumulate: str | None, place: str) -> Any:
    def collective(comm: Communicator, array: np.ndarray, **to: Any) -> np.ndarray:
        return ring.all_reduce(comm, array, op, accumulate=accumulate, **to)

    result = guarded(collective, comm, given.values(comm.rank), given.layout, place, given.shape)
    return result, sent(comm)


def reduce_scatter(
    comm: Communicator, given: Input, op: str, accumulate: str | None, place: str, counts: list[int] | None
) -> Any:
    def collective(comm: Communicator, array: np.ndarray, **to: Any) -> np.ndarray:
        return ring.reduce_scatter(comm, array, op, counts=counts, accumulate=accumulate, **to)

    size = int(np.prod(given.shape, dtype=int))
    part = len(np.array_split(np.empty(size), comm.size)[comm.rank]) if counts is None else counts[comm.rank]
    return guarded(collective, comm, given.values(comm.rank), given.layout, place, (part,)), sent(comm)


def all_gather(comm: Communicator, given: Input, place: str, counts: list[int] | None) -> Any:
    mine = given.values(comm.rank) if counts is None else given.values(comm.rank, (counts[comm.rank],))
    shape = (comm.size, *mine.shape) if counts is None else (sum(counts),)

    def collective(comm: Communicator, array: np.ndarray, **to: Any) -> np.ndarray:
        return ring.all_gather(comm, array, counts=counts, **to)

    return guarded(collective, comm, mine, given.layout, place, shape), sent(comm)


def all_gather_in_place(comm: Communicator, given: Input, counts: list[int]) -> Any:
    """Gather from each rank's own place in the buffer that receives everybody's."""
    whole, around = laid_out(np.full(sum(counts), 5, given.dtype), "C")
    start = sum(counts[: comm.rank])
    own = whole[start : start + counts[comm.rank]]
    own[...] = given.values(comm.rank, own.shape)
    assert ring.all_gather(comm, own, counts=counts, out=whole) is whole
    assert (around[:3] == GUARD).all()
    assert (around[-3:] == GUARD).all()
    return whole.copy()


def broadcast(comm: Communicator, given: Input, root: int, place: str) -> Any:
    def collective(comm: Communicator, array: np.ndarray, **to: Any) -> np.ndarray:
        return ring.broadcast(comm, array, root, **to)

    return guarded(collective, comm, given.values(comm.rank), given.layout, place, given.shape), sent(comm)


def all_to_all(comm: Communicator, given: Input) -> Any:
    values = given.values(comm.rank, (comm.size, *given.shape))
    array, around = laid_out(values, given.layout)
    before = around.copy()
    result = ring.all_to_all(comm, array)
    assert around.tobytes() == before.tobytes()
    return result, sent(comm)


# Messages between two


def send_and_receive(comm: Communicator, given: Input, into: str) -> Any:
    """Send to the right, then receive from the left, into an array laid out in another way."""
    array, _ = laid_out(given.values(comm.rank), given.layout)
    comm.send(array, (comm.rank + 1) % comm.size)
    array[...] = 0  # what was sent was sent, whatever becomes of the array
    out, room = laid_out(np.full(given.shape, 5, given.dtype), into)
    assert comm.recv(out, (comm.rank - 1) % comm.size) is out
    copy = out.copy()
    out[...] = GUARD
    assert (room == GUARD).all()
    return copy


def everybody_sends_first(comm: Communicator, sizes: list[int]) -> bool:
    """Send messages of all sizes to everybody, itself included, before receiving any."""
    for number, size in enumerate(sizes):
        for dest in range(comm.size):
            comm.send(stamped(size, comm.rank, dest, number), dest)
    for source in reversed(range(comm.size)):
        for number, size in enumerate(sizes):
            got = comm.recv(np.empty(size, np.float32), source)
            np.testing.assert_array_equal(got, stamped(size, source, comm.rank, number))
    return True


def stamped(size: int, source: int, dest: int, number: int) -> np.ndarray:
    """Return values that no other message has: whole numbers, exact in float32."""
    return np.arange(size, dtype=np.float32) + 1000 * (source + 10 * dest + 100 * number)


def swap(comm: Communicator, size: int) -> bool:
    """Exchange large arrays with the neighbours in both directions at once."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got = comm.sendrecv(stamped(size, comm.rank, right, 1), right, np.empty(size, np.float32), left)
    np.testing.assert_array_equal(got, stamped(size, left, comm.rank, 1))
    got = comm.sendrecv(stamped(size, comm.rank, left, 2), left, np.empty(size, np.float32), right)
    np.testing.assert_array_equal(got, stamped(size, right, comm.rank, 2))
    return True


# Bugs that others have had


def powers_of_two(comm: Communicator, place: str) -> list[float]:
    array = np.full(4, 2.0**comm.rank)
    return list(ring.all_reduce(comm, array, out=array if place == "in place" else None))


def reduce_transposed(comm: Communicator) -> np.ndarray:
    return ring.all_reduce(comm, np.arange(4).reshape(2, 2).T)


def gather_permuted(comm: Communicator) -> np.ndarray:
    rows = 2 - comm.rank
    array = (100 * comm.rank + np.arange(4.0 * rows)).reshape(rows, 4).T
    return ring.all_gather(comm, array, counts=[8, 4])


def sum_of_halves(comm: Communicator, values: list[float]) -> float:
    return float(ring.all_reduce(comm, np.array(values[comm.rank], np.float16)))


def room_of_reductions(comm: Communicator, n: int) -> dict[str, int]:
    """Return the most bytes held by reductions of ``n`` float32 or float16 beside what they were given."""
    x, part = np.ones(n, np.float32), np.empty(n // comm.size, np.float32)
    out, halves = np.empty_like(x), x.astype(np.float16)
    calls = {
        "in place": lambda: ring.all_reduce(comm, x, out=x),
        "out": lambda: ring.all_reduce(comm, x, out=out),
        "halves": lambda: ring.all_reduce(comm, halves),
        "part": lambda: ring.reduce_scatter(comm, x, out=part),
    }
    held = {}
    for name, call in calls.items():
        call()  # what is made once, when first used, is there
        tracemalloc.start()
        call()
        held[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return held


def every_collective_of_123(comm: Communicator) -> list[Any]:
    x = np.array([1.0, 2.0, 3.0])
    reduced = ring.all_reduce(comm, x), ring.all_reduce(comm, x, "max"), ring.reduce_scatter(comm, x)
    return [r.tolist() for r in (*reduced, ring.all_gather(comm, x), ring.broadcast(comm, x))]


def gather_what_there_is(comm: Communicator) -> list[int]:
    mine = [[10, 11], [], [30]][comm.rank]
    return list(ring.all_gather(comm, np.array(mine, np.int64), counts=[2, 0, 1]).tolist())


def maximum_with_nan(comm: Communicator) -> np.ndarray:
    return ring.all_reduce(comm, np.array([np.nan if comm.rank == 1 else 1.0, comm.rank]), "max")


def slow_reader(comm: Communicator, messages: int) -> list[int] | None:
    array = np.empty(1, np.int64)
    if comm.rank == 0:
        for number in range(messages):
            array[0] = number
            comm.send(array, 1)
        return None
    read = []
    for _ in range(messages):
        time.sleep(0.001)
        read.append(int(comm.recv(array, 0)[0]))
    return read


def overlaps(comm: Communicator) -> list[str]:
    x = np.zeros(6)
    calls = [
        lambda: ring.all_reduce(comm, x[:4], out=x[1:5]),
        lambda: ring.all_reduce(comm, x[:4], out=x[3::-1]),  # the same memory, in another order
        lambda: ring.all_gather(comm, x[1:4], counts=[3, 3], out=x),
        lambda: ring.broadcast(comm, x[:4], out=x[2:]),
    ]
    return [complaint(comm, lambda _, call=call: call()) for call in calls]


def complaint(comm: Communicator, fn: Any) -> str:
    """Return the message of the error that ``fn(comm)`` raises."""
    try:
        fn(comm)
    except (TypeError, ValueError) as error:
        assert comm.ledger.messages_sent == 0
        return str(error)
    raise AssertionError(f"{fn} was accepted")


def reduce_bool(comm: Communicator) -> None:
    ring.all_reduce(comm, np.array([True]))


def mean(comm: Communicator) -> None:
    ring.all_reduce(comm, np.ones(2), "mean")


def narrower(comm: Communicator) -> None:
    ring.all_reduce(comm, np.ones(2), accumulate=np.float32)


def wrong_out(comm: Communicator) -> None:
    ring.all_reduce(comm, np.ones(2), out=np.ones(3))


def wrong_counts(comm: Communicator) -> None:
    ring.reduce_scatter(comm, np.ones(3), counts=[1, 1])


def no_such_rank(comm: Communicator) -> None:
    comm.send(np.ones(3), comm.size)


def no_such_root(comm: Communicator) -> None:
    ring.broadcast(comm, np.ones(3), 5)


def rows_for_nobody(comm: Communicator) -> None:
    ring.all_to_all(comm, np.ones(3))


# Groups


def grouped(comm: Communicator, colors: list[int | None], keys: list[int]) -> Any:
    """Split, gather the members' world ranks in the group, and sum them up."""
    group = comm.split(colors[comm.rank], keys[comm.rank], name="part")
    if group is None:
        return None, comm.ledger
    members = ring.all_gather(group, np.array(comm.rank)).tolist()
    assert members == list(group.members)
    assert members[group.rank] == comm.rank
    assert group.size == len(members)
    return members, comm.ledger


def mesh(comm: Communicator) -> Any:
    """Sum over both axes of a 2 x 3 mesh, in an order that differs between the groups."""
    row, column = divmod(comm.rank, 3)
    tp = comm.split(row, column, name="tp")
    dp = comm.split(column, row, name="dp")
    x = np.array([10.0**comm.rank])
    along_tp = ring.all_reduce(tp, x)
    for _ in range(column):  # groups of one name count their calls apart
        ring.all_reduce(dp, x)
    along_dp = ring.all_reduce(dp, x)
    both = ring.all_reduce(dp, along_tp)
    return float(along_tp[0]), float(along_dp[0]), float(both[0]), comm.ledger, (tp.name, dp.name)
