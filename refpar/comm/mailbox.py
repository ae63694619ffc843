"""Mailboxes in shared memory: how bytes get from one process to another.

Every directed pair of ranks has a mailbox of two slots and two semaphores that count them, and
every rank has a bell, a semaphore too::

      rank 0                         mailbox 0 -> 1                       rank 1

      wait for `free`             +--------+--------+
      copy a piece in        -->  | slot 0 | slot 1 |
      post `full`, ring bell 1    +--------+--------+  -->       wait for `full`
                                                                 use the piece where it lies
                                                                 post `free`, ring bell 0

A slot changes hands through a semaphore alone: whoever has acquired it sees all that was written
before it was posted, on every processor. A rank that can neither put nor take a piece tries again
a few dozen times, giving up the processor in between, because an answer is usually microseconds
away; then it sleeps on its bell.

A message that does not fit is queued at the sender, and moved on whenever the sender is in here.

All of it lies in one anonymous file in memory (``memfd_create``) that has no name: nothing is
left behind, whoever is killed. It is sparse: the slots of pairs that never talk cost nothing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar.comm.errors import CollectiveMismatch, CommTimeout

Bytes = npt.NDArray[np.uint8]
Consume = Callable[[int, Bytes], None]

PAGE = 4096
SLOT_BYTES, ALL_SLOTS_BYTES = 2**20, 2**28
"""A slot holds the first, or less where there are so many pairs that all slots together would exceed the second.

There are two: one fills while the other is emptied, and more would leave the cache.
"""
YIELDS = 30
LOOK_AROUND = 0.02  # seconds of waiting after which a rank looks at what the others are doing

TEXT_BYTES = 440
PIECE = struct.Struct(f"<QQH{TEXT_BYTES}s")  # bytes of the message, of this piece, length and text of the call
PIECE_HEAD = 512
STATUS = struct.Struct(f"<IIiH{TEXT_BYTES}s")  # run, state, waits for, length and text of the call
STATUS_BYTES, STATUS_AT = 512, 16  # before it two words: changes, odd while one is under way, and looks
CHANGES, LOOKS = range(2)
NOT_STARTED, COMPUTING, IN_CALL, WAITING, RETURNED, FAILED = range(6)


@dataclass(frozen=True)
class Status:
    """What a rank says of itself: for others to read when something is wrong, never to hand data over."""

    changes: int
    looks: int
    run: int
    state: int
    waits_for: int
    call: str

    def __str__(self) -> str:
        return {
            NOT_STARTED: "had not started",
            COMPUTING: f"computing, after {self.call}" if self.call else "computing, has not communicated",
            IN_CALL: f"in {self.call}",
            WAITING: f"waiting for rank {self.waits_for} in {self.call}",
            RETURNED: "had returned",
            FAILED: "had failed",
        }[self.state]


class Region:
    """The shared memory of a world, and the semaphores in it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        edges = size * size
        self.slot_bytes = max(PAGE, min(SLOT_BYTES, ALL_SLOTS_BYTES // edges) // PAGE * PAGE)
        self._stride = self.slot_bytes + PAGE  # room for the head
        self._bells = size * STATUS_BYTES
        self._counters = self._bells + size * 64
        self._slots = -(-(self._counters + edges * 64) // PAGE) * PAGE
        total = self._slots + edges * 2 * self._stride
        if os.fstat(fd).st_size < total:
            os.ftruncate(fd, total)
        self.memory = mmap.mmap(fd, total)
        self.bytes: Bytes = np.frombuffer(self.memory, np.uint8)
        self._words = self.bytes[: size * STATUS_BYTES].view(np.uint64).reshape(size, -1)  # written in one go each
        self._address = self.bytes.ctypes.data
        keeps_gil, drops_gil = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        self.try_wait, self.post = keeps_gil.sem_trywait, keeps_gil.sem_post
        self._init, self._get_value = keeps_gil.sem_init, keeps_gil.sem_getvalue
        self._wait_until = drops_gil.sem_clockwait

    @classmethod
    def create(cls, size: int) -> Region:
        """Return a new region for ``size`` ranks."""
        fd = None
        try:
            fd = os.memfd_create("refpar", os.MFD_CLOEXEC)
            region = cls(fd, size)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise OSError(
                error.errno,
                f"{error.strerror}: no shared memory for {size} ranks; raise the limit of files (ulimit -n), of their "
                "size (ulimit -f), of address space (ulimit -v), or of the container's memory",
            ) from error
        for rank in range(size):
            region._init(region.bell(rank), 1, 0)
        for source in range(size):
            for dest in range(size):
                full, free = region.counters(source, dest)
                region._init(full, 1, 0)
                region._init(free, 1, 2)
        return region

    def close(self) -> None:
        """Give the memory back. Mailboxes on this region must not be used afterwards."""
        del self.bytes, self._words
        self.memory.close()
        os.close(self.fd)

    def __reduce__(self) -> Any:
        from multiprocess import reduction

        return _attach, (reduction.DupFd(self.fd), self.size)

    def bell(self, rank: int) -> ctypes.c_void_p:
        """Return the semaphore that a rank sleeps on."""
        return ctypes.c_void_p(self._address + self._bells + rank * 64)

    def counters(self, source: int, dest: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """Return the semaphores that count the full and the free slots from ``source`` to ``dest``."""
        address = self._address + self._counters + (source * self.size + dest) * 64
        return ctypes.c_void_p(address), ctypes.c_void_p(address + 32)

    def slots(self, source: int, dest: int) -> list[tuple[int, Bytes]]:
        """Return the offset of the head, and the room for data, of both slots from ``source`` to ``dest``."""
        start = self._slots + (source * self.size + dest) * 2 * self._stride
        return [
            (at, self.bytes[at + PIECE_HEAD : at + PIECE_HEAD + self.slot_bytes])
            for at in (start, start + self._stride)
        ]

    def wait(self, semaphore: ctypes.c_void_p, seconds: float) -> bool:
        """Sleep until ``semaphore`` is posted, or for ``seconds``; say whether it was."""
        seconds += time.monotonic()
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        if self._wait_until(semaphore, ctypes.c_int(time.CLOCK_MONOTONIC), limit) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_clockwait failed")
        return False

    def count(self, semaphore: ctypes.c_void_p) -> int:
        """Return how often a semaphore can be taken."""
        value = ctypes.c_int()
        self._get_value(semaphore, ctypes.byref(value))
        return value.value

    def unread(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks, source and receiver, with messages between them that nobody has taken."""
        pairs = ((source, dest) for source in range(self.size) for dest in range(self.size))
        return [pair for pair in pairs if self.count(self.counters(*pair)[0])]

    def status(self, rank: int) -> Status:
        """Return what a rank says that it is doing.

        One that is caught in the middle of a change, and stays there, is in a call: the one state that
        nobody draws a conclusion from.
        """
        for _ in range(YIELDS):
            changes = int(self._words[rank, CHANGES])
            run, state, waits_for, length, text = STATUS.unpack_from(self.memory, rank * STATUS_BYTES + STATUS_AT)
            if changes % 2 == 0 and changes == self._words[rank, CHANGES]:
                break
            os.sched_yield()
        else:
            state = IN_CALL
        looks = int(self._words[rank, LOOKS])
        return Status(changes, looks, run, state, waits_for, text[:length].decode(errors="replace"))

    def say(self, rank: int, *status: Any) -> None:
        """Change what a rank says; only itself may. Whoever reads meanwhile sees an odd number of changes."""
        self._words[rank, CHANGES] += 1
        STATUS.pack_into(self.memory, rank * STATUS_BYTES + STATUS_AT, *status)
        self._words[rank, CHANGES] += 1

    def looked(self, rank: int) -> None:
        """Note that a rank looks for messages once more."""
        self._words[rank, LOOKS] += 1


def _attach(handle: Any, size: int) -> Region:
    return Region(handle.detach(), size)


class Outgoing:
    """A message on its way out, sent up to ``start``."""

    def __init__(self, call: bytes, data: Bytes) -> None:
        self.call, self.data, self.start, self.done = call, data, 0, False


class Mailbox:
    """The mailbox from ``source`` to ``dest``, as one of them sees it; ``other`` is whose bell it rings.

    Attributes
    ----------
    turn : the slot to use next
    queue : at the sender, the messages that did not fit
    """

    def __init__(self, region: Region, source: int, dest: int, other: int) -> None:
        self.full, self.free = region.counters(source, dest)
        self.slots = region.slots(source, dest)
        self.bell = region.bell(other)
        self.turn = 0
        self.queue: deque[Outgoing] = deque()


class Mailboxes:
    """One rank's end of all its mailboxes: a :class:`~refpar.comm.communicator.Transport`."""

    def __init__(self, region: Region, rank: int, timeout: float | None) -> None:
        self.region, self.rank, self.size, self.timeout = region, rank, region.size, timeout
        self.sent = self.received = 0  # pieces
        self._inboxes: dict[int, Mailbox] = {}  # by source, made when first used
        self._outboxes: dict[int, Mailbox] = {}  # by dest
        self._bell = region.bell(rank)
        self._run = 0
        self._call = b""
        self._broken: Exception | None = None

    # What the communicator asks for

    def send(self, dest: int, call: str, data: Bytes) -> None:
        message = self._enqueue(dest, call, data)
        self._push()
        if not message.done:
            message.data = message.data.copy()

    def receive(self, source: int, call: str, consume: Consume) -> None:
        take = self._taking(source, call, consume)

        def step() -> bool:
            self._push()
            return take()

        self._until(step, lambda: source)

    def exchange(self, dest: int, data: Bytes, source: int, call: str, consume: Consume) -> None:
        message = self._enqueue(dest, call, data)
        take = self._taking(source, call, consume)
        received = False

        def step() -> bool:
            nonlocal received
            self._push()
            received = take()
            return received and message.done

        self._until(step, lambda: dest if received else source)

    def doing(self, call: str) -> None:
        if call:
            self._call = shorten(call)
        self._say(IN_CALL if call else COMPUTING)

    # What the process asks for

    def begin(self, run: int) -> None:
        """Note that the function has been called."""
        self._run, self._call = run, b""
        self._say(COMPUTING)

    def finish(self) -> None:
        """Deliver what is still queued, then note that the function has returned."""

        def undelivered() -> dict[int, Mailbox]:
            return {dest: box for dest, box in self._outboxes.items() if box.queue}

        def step() -> bool:
            self._push()
            return not undelivered()

        def waits_for() -> int:
            dest, box = next(iter(undelivered().items()))
            self._call = box.queue[0].call
            return dest

        self._until(step, waits_for)
        self._say(RETURNED)

    def fail(self) -> None:
        """Note that the function has failed."""
        self._say(FAILED)

    # Pieces

    def _enqueue(self, dest: int, call: str, data: Bytes) -> Outgoing:
        box = self._outboxes.get(dest)
        if box is None:
            box = self._outboxes[dest] = Mailbox(self.region, self.rank, dest, dest)
        message = Outgoing(shorten(call), data)
        box.queue.append(message)
        return message

    def _push(self) -> None:
        """Put as many pieces into mailboxes as there are free slots."""
        try_wait, post, memory = self.region.try_wait, self.region.post, self.region.memory
        for box in self._outboxes.values():
            while box.queue and try_wait(box.free) == 0:
                message = box.queue[0]
                at, room = box.slots[box.turn]
                size, start = message.data.size, message.start
                piece = message.data[start : start + room.size]
                PIECE.pack_into(memory, at, size, piece.size, len(message.call), message.call)
                room[: piece.size] = piece
                post(box.full)
                post(box.bell)
                box.turn ^= 1
                self.sent += 1
                message.start += piece.size
                if message.start == size:
                    message.done = True
                    box.queue.popleft()

    def _taking(self, source: int, call: str, consume: Consume) -> Callable[[], bool]:
        """Return a function that takes the pieces that are there, and says whether the message is complete."""
        box = self._inboxes.get(source)
        if box is None:
            box = self._inboxes[source] = Mailbox(self.region, source, self.rank, source)
        try_wait, post, memory = self.region.try_wait, self.region.post, self.region.memory
        expected = shorten(call)
        start = 0
        complete = False

        def take() -> bool:
            nonlocal start, complete
            while not complete and try_wait(box.full) == 0:
                at, room = box.slots[box.turn]
                size, length, called, text = PIECE.unpack_from(memory, at)
                if text[:called] != expected:
                    raise self._mismatch(source, text[:called].decode())
                consume(start, room[:length])
                post(box.free)  # from here on the slot belongs to the sender again
                post(box.bell)
                box.turn ^= 1
                self.received += 1
                start += length
                complete = start == size
            return complete

        return take

    # Waiting

    def _until(self, step: Callable[[], bool], waits_for: Callable[[], int]) -> None:
        """Repeat ``step`` until it says that all is done; ``waits_for`` says whose turn it is until then.

        After an error, pieces are on their way that belong to no call any more: whoever catches it gets it again.
        """
        if self._broken is not None:
            raise self._broken
        try:
            for _ in range(YIELDS):
                if step():
                    return
                os.sched_yield()
            self._sleep(step, waits_for)
        except Exception as error:
            self._broken = error
            raise

    def _sleep(self, step: Callable[[], bool], waits_for: Callable[[], int]) -> None:
        """Sleep on the bell between steps. Every so often, look whether waiting makes sense.

        What counts as waiting is the time between two looks, but no more than a few of them should take: a program
        that was stopped as a whole, by Ctrl-Z, has not waited for anybody.
        """
        moved, waited, seen = -1, 0.0, Chain()
        recent: deque[Chain] = deque(maxlen=4)
        while True:
            while self.region.try_wait(self._bell) == 0:  # only rings from here on are to wake us
                pass
            if step():
                break
            if moved != self.sent + self.received:
                moved, waited = self.sent + self.received, 0.0
                self._say(WAITING, waits_for())
            began = time.monotonic()
            rung = self.region.wait(self._bell, LOOK_AROUND)
            waited += min(time.monotonic() - began, 5 * LOOK_AROUND)
            if not rung:
                if self.timeout is not None and waited > self.timeout:
                    raise self._timed_out(waits_for(), recent)
                seen = self._look_around(step, waits_for(), seen, recent)
        self._say(IN_CALL)

    def _look_around(self, step: Callable[[], bool], peer: int, before: Chain, recent: deque[Chain]) -> Chain:
        """Raise if the rank that is waited for will never answer; return who waits for whom, and add it to ``recent``.

        Two things end a wait before its time. The other's function has returned: it delivers what
        it has sent before that, so if another step then changes nothing, nothing will. Or the
        ranks wait for each other in a circle, and each has looked for messages, twice, and found
        none, since this rank first saw them wait so. (Once is not enough: that look may have
        begun earlier. And a rank that has been rung, but not yet given a processor, has not looked.)
        """
        self.region.looked(self.rank)
        chain = Chain(self._waits(peer))
        recent.append(chain)
        status = chain.waits[0][1]
        returned = status.run == self._run and status.state == RETURNED
        stuck = chain.is_circle(self.rank) and chain.unchanged_since(before)
        if returned or stuck:
            moved = self.sent + self.received
            if not step() and moved == self.sent + self.received:
                raise self._never(chain, returned)
        return before if chain.same_waits(before) else chain

    def _waits(self, peer: int) -> list[tuple[int, Status]]:
        """Follow who waits for whom, from ``peer`` on, to a rank that does not wait or was met before."""
        waits: list[tuple[int, Status]] = []
        met = {self.rank}
        while True:
            status = self.region.status(peer)
            waits.append((peer, status))
            met.add(peer)
            if status.state != WAITING or status.run != self._run or status.waits_for in met:
                return waits
            peer = status.waits_for

    # Errors

    def _mismatch(self, source: int, theirs: str) -> CollectiveMismatch:
        return CollectiveMismatch(
            f"ranks do not agree on what to do: rank {self.rank} is in {self._call.decode()}; "
            f"rank {source} sent it {theirs}",
            self.rank,
        )

    def _never(self, chain: Chain, returned: bool) -> CollectiveMismatch:
        peer, _ = chain.waits[0]
        why = f"whose function has returned{chain}" if returned else f"but no rank can go on{chain}"
        return CollectiveMismatch(f"rank {self.rank} waits for rank {peer} in {self._call.decode()}, {why}", peer)

    def _timed_out(self, peer: int, recent: deque[Chain]) -> CommTimeout:
        """Return the error of a wait over the limit, which blames the end of the chain of those who wait.

        But one that says it waits, and has not looked for messages while this one did so several times, is stopped.
        """
        chain = Chain(self._waits(peer))
        stopped = chain.not_looking_since(recent[0]) if len(recent) == recent.maxlen else []
        return CommTimeout(
            f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in {self._call.decode()}{chain}",
            stopped[0] if stopped else chain.waits[-1][0],
        )

    def _say(self, state: int, waits_for: int = -1) -> None:
        self.region.say(self.rank, self._run, state, waits_for, len(self._call), self._call)


@dataclass(frozen=True)
class Chain:
    """Who waits for whom: each rank waits for the next."""

    waits: list[tuple[int, Status]] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(f"; rank {rank}: {status}" for rank, status in self.waits if status.state != RETURNED)

    def is_circle(self, rank: int) -> bool:
        """Say whether the last of the chain waits for ``rank``, who waits for the first."""
        last = self.waits[-1][1]
        return last.state == WAITING and last.waits_for == rank

    def same_waits(self, before: Chain) -> bool:
        """Say whether the same ranks wait as before, in the same state."""
        return [(r, s.changes) for r, s in self.waits] == [(r, s.changes) for r, s in before.waits]

    def unchanged_since(self, before: Chain) -> bool:
        """Say whether all have looked for messages, twice, and still wait as they did before."""
        return self.same_waits(before) and all(
            now.looks >= then.looks + 2 for (_, now), (_, then) in zip(self.waits, before.waits, strict=True)
        )

    def not_looking_since(self, before: Chain) -> list[int]:
        """Return the ranks that say they wait, as they did before, and have not looked for messages meanwhile."""
        then = dict(before.waits)
        return [rank for rank, now in self.waits if now.state == WAITING and now == then.get(rank)]


def shorten(call: str) -> bytes:
    """Return ``call`` in UTF-8 that fits into a slot's head; what is cut off is stood for by its hash."""
    text = call.encode(errors="backslashreplace")
    if len(text) <= TEXT_BYTES:
        return text
    start = text[: TEXT_BYTES - 20].decode(errors="ignore").encode()  # of whole letters
    return start + b"..." + hashlib.blake2b(text, digest_size=8).hexdigest().encode()
