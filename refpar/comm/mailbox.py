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

All of it lies in one memory, see ``region.py``.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from refpar.comm.errors import CollectiveMismatch, CommTimeout
from refpar.comm.region import COMPUTING, FAILED, IN_CALL, RETURNED, TEXT_BYTES, WAITING, Bytes, Region, Status

Consume = Callable[[int, Bytes], None]

YIELDS = 30
LOOK_AROUND = 0.02  # seconds of waiting after which a rank looks at what the others are doing

PIECE = struct.Struct(f"<QQH{TEXT_BYTES}s")  # bytes of the message, of this piece, length and text of the call


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
