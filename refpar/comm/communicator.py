"""Ranks of a group, and how arrays get from one to another.

A :class:`Communicator` is handed to whoever communicates; there is no current group to look up.
It knows arrays, groups and the ledger. How bytes travel is the business of the
:class:`Transport` underneath: shared memory between processes (``mailbox.py``), or MPI.

Three rules make programs on it easy to reason about:

- **A send never waits for the receiver.** What does not fit into the mailbox is copied and moved
  on whenever this rank communicates. So "all send, then all receive" works at any size.
- **First in, first out, per directed pair of ranks.** There are no tags.
- **Every message says what it belongs to**: operation, number in its group, type and shape of the
  whole array. A receiver that finds another call than its own raises
  :class:`~refpar.comm.errors.CollectiveMismatch` instead of adding up what does not belong together.

Bytes travel in this machine's order, whatever that of the arrays on either side.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from refpar.arrays import Array, array_module, synchronise, to_host
from refpar.comm.ledger import Ledger

HostArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Transport(Protocol):
    """Moves bytes between the ranks of the world. ``call`` is the sentence that both sides must agree on.

    ``consume(start, piece)`` is called with successive pieces of the message, which are only valid
    inside the call; ``start`` is the position of the piece in the message, in bytes.
    """

    rank: int
    size: int

    def send(self, dest: int, call: str, data: Bytes) -> None:
        """Send without waiting for the receiver. ``data`` may be changed as soon as this returns."""

    def receive(self, source: int, call: str, consume: Callable[[int, Bytes], None]) -> None:
        """Wait for one message."""

    def exchange(self, dest: int, data: Bytes, source: int, call: str, consume: Callable[[int, Bytes], None]) -> None:
        """Send and receive at once, returning when both are done."""

    def doing(self, call: str) -> None:
        """Note what this rank is in the middle of, for others to read; empty when it is over."""


class Ranks(Protocol):
    """Runs functions on ranks: a :class:`~refpar.comm.processes.World`, or the ranks that MPI has started."""

    ranks: int

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(comm, *args)`` on every rank and return the results, by rank."""


class Communicator:
    """A group of ranks as one of them sees it.

    Attributes
    ----------
    rank, size : this rank's number in the group, and how many there are
    name : of the group, such as ``"world"`` or ``"dp"``; on the ledger and in errors
    members : the world rank of each member
    place : where the group comes from, empty for the world: ``"2.1"`` is the first split of the world's second.
        Calls are compared with it, since groups of other members may have the same name
    ledger : what this rank has sent, over all its groups
    xp : the array library of this rank's backend
    """

    def __init__(
        self,
        transport: Transport,
        members: tuple[int, ...],
        name: str,
        ledger: Ledger,
        xp: ModuleType = np,
        place: str = "",
    ) -> None:
        self.transport, self.members, self.name, self.ledger, self.xp = transport, members, name, ledger, xp
        self.rank, self.size = members.index(transport.rank), len(members)
        self.place = place
        self._label = f"{name} (split {place})" if place else name
        self._calls = self._splits = 0
        self._operation = self._call = ""

    def __repr__(self) -> str:
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator belongs to one rank and cannot be sent elsewhere")

    def send(self, array: Array, dest: int) -> None:
        """Send a copy of ``array``, in C order whatever its strides. Does not wait for the receiver."""
        peer, host = self._peer("dest", dest), _contiguous(array)
        with self.operation("send", host.dtype, host.shape, numbered=False):
            self._count(host)
            self.transport.send(peer, self._call, _raw(host))

    def recv(self, out: Array, source: int) -> Array:
        """Receive into ``out``, which has the shape and dtype of what is sent, and return it."""
        peer = self._peer("source", source)
        direct = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.dtype.isnative
        host = out if direct else np.empty(out.shape, native(out.dtype))
        raw = _raw(host)

        def consume(start: int, piece: Bytes) -> None:
            raw[start : start + piece.size] = piece

        with self.operation("send", host.dtype, host.shape, numbered=False):
            self.transport.receive(peer, self._call, consume)
        if host is not out:
            out[...] = array_module(out).asarray(host)
            synchronise(out)  # before `host` is freed
        return out

    def sendrecv(self, array: Array, dest: int, out: Array, source: int) -> Array:
        """Send ``array`` to ``dest`` and receive ``out`` from ``source``, in whichever order they get ready."""
        self.send(array, dest)
        return self.recv(out, source)

    def exchange(
        self, array: Array, dest: int, source: int, consume: Callable[[int, HostArray], None], dtype: Any = None
    ) -> None:
        """Send a flat array while receiving another, piece by piece: the step that rings are made of.

        Parameters
        ----------
        array : what goes to ``dest``, contiguous; must not change during the call
        consume : called with ``(start, piece)`` for each piece that comes from ``source``: host
            arrays that are only valid inside the call, ``start`` the index of their first element.
            It may write to anything but ``array``, in the library of ``array``.
        dtype : type of the elements received; that of ``array`` by default

        Notes
        -----
        Waits until ``dest`` has taken what was sent, so all ranks concerned must be in the same operation.
        """
        to, from_, host = self._peer("dest", dest), self._peer("source", source), _contiguous(array)
        kind = native(dtype or host.dtype)

        def hand_on(start: int, piece: Bytes) -> None:
            consume(start // kind.itemsize, piece.view(kind))
            synchronise(array)  # a device may still be reading the slot, which the sender may then write to

        self._count(host)
        self.transport.exchange(to, _raw(host), from_, self._call, hand_on)

    def barrier(self) -> None:
        """Wait until every rank of the group has come here (dissemination: log2(size) rounds of empty messages)."""
        nothing = np.empty(0, np.uint8)
        with self.operation("barrier", nothing.dtype, nothing.shape):
            distance = 1
            while distance < self.size:
                self.exchange(
                    nothing, (self.rank + distance) % self.size, (self.rank - distance) % self.size, lambda *_: None
                )
                distance *= 2

    @overload
    def split(self, color: int, key: int = 0, *, name: str | None = None) -> Communicator: ...

    @overload
    def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Communicator | None: ...

    def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Communicator | None:
        """Return a communicator of the ranks that gave the same ``color``, ordered by ``key``, then rank.

        All ranks of this group must call it; those with colour None get None. What this sends is
        counted as observed.

        Parameters
        ----------
        name : of the new group; by default one of its own, ``"world.2.0"`` where this is the world's second split and
            the colour 0. Groups of one name share a line of the ledger.

        Raises
        ------
        TypeError, ValueError
            ``color`` or ``key`` is no integer, or one of more than 64 bits.
        """
        from refpar.comm import ring

        color, key = None if color is None else _int64("color", color, ", or None"), _int64("key", key)
        mine = np.array([color is not None, color or 0, key], np.int64)
        self._splits += 1
        with self.ledger.observing():
            everyone = ring.all_gather(self, mine).tolist()
        if color is None:
            return None
        chosen = sorted((k, r) for r, (member, c, k) in enumerate(everyone) if member and c == color)
        members = tuple(self.members[r] for _, r in chosen)
        name = name or f"{self.name}.{self._splits}.{color}"
        place = f"{self.place}.{self._splits}".lstrip(".")
        return Communicator(self.transport, members, name, self.ledger, self.xp, place)

    @contextmanager
    def operation(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], detail: str = "", *, numbered: bool = True
    ) -> Iterator[None]:
        """Label the messages sent inside: the name on the ledger, and the call that both sides compare.

        Inside another operation this changes nothing: a reduce-scatter that is half of an
        all-reduce is part of the all-reduce.
        """
        if self._operation:
            yield
            return
        number = ""
        if numbered:
            self._calls += 1
            number = f" #{self._calls}"
        self._operation = name
        self._call = f"{name}{number} of {dtype.name} {tuple(shape)}{detail} in {self._label}"
        self.transport.doing(self._call)
        try:
            yield
        finally:
            self._operation = self._call = ""
        self.transport.doing("")

    def _count(self, host: HostArray) -> None:
        self.ledger.add(self.name, self._operation, host.size, host.nbytes)

    def _peer(self, argument: str, rank: int) -> int:
        """Return the world rank of a rank of this group."""
        rank = operator.index(rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"{argument} is {rank}; the ranks of {self.name} are 0 to {self.size - 1}")
        return self.members[rank]


def _int64(argument: str, value: int, also: str = "") -> int:
    must = f"it must be an integer of 64 bits{also}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} is {value!r}; {must}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{argument} is {value!r}; {must}")
    return number


def native(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return ``dtype`` in this machine's byte order. Its ``name``, which calls are compared by, says nothing of it."""
    return np.dtype(dtype).newbyteorder("=")


def _contiguous(array: Array) -> HostArray:
    """Return ``array`` on the host, in C order and native bytes: its elements in logical order."""
    host = to_host(array)
    return host if host.flags.c_contiguous and host.dtype.isnative else np.asarray(host, native(host.dtype), order="C")


def _raw(host: HostArray) -> Bytes:
    return host.reshape(-1).view(np.uint8)
