"""The shared memory of a world: who says what there, and where the slots and semaphores of its mailboxes lie.

    what each rank says of itself      512 bytes a rank
    bells                              a semaphore a rank
    counters                           two semaphores a pair: full slots, and free ones
    slots                              two a pair, each a head and room for a piece

All of it lies in one anonymous file in memory (``memfd_create``) that has no name: nothing is left behind, whoever is
killed. It is sparse: the slots of pairs that never talk cost nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
SLOT_BYTES, ALL_SLOTS_BYTES = 2**20, 2**28
"""A slot holds the first, or less where there are so many pairs that all slots together would exceed the second.

There are two: one fills while the other is emptied, and more would leave the cache.
"""
TEXT_BYTES = 440
PIECE_HEAD = 512
STATUS = struct.Struct(f"<IIiH{TEXT_BYTES}s")  # run, state, waits for, length and text of the call
STATUS_BYTES, STATUS_AT = 512, 16  # before it two words: changes, odd while one is under way, and looks
CHANGES, LOOKS = range(2)
NOT_STARTED, COMPUTING, IN_CALL, WAITING, RETURNED, FAILED = range(6)
TRIES = 30  # to read what a rank says between two changes of it


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
        for _ in range(TRIES):
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
