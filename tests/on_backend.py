"""What the tests of the backend flag run on the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import expressions
import numpy as np
import strictpy
from on_strict import collectives

from refpar.arrays import array_module, to_host
from refpar.comm import Communicator, ring


def where(comm: Communicator) -> dict[str, Any]:
    """Return what this rank computes with, on which device, and how it was started."""
    started = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {
        "xp": comm.xp.__name__,
        "in parts of the world": comm.split(comm.rank % 2).xp.__name__,
        "device": getattr(comm.xp, "Device", None) and comm.xp.Device.chosen,
        "spawned": "spawn_main" in started and os.getppid(),
    }


def results(comm: Communicator) -> Any:
    """Return arrays of the backend, at several depths."""
    x = comm.xp.arange(3.0) + comm.rank
    return x, {"nested": [x.sum(), x.T]}


def events_of_transfers(comm: Communicator) -> list[str]:
    """Call everything that communicates; return, in order, every copy to the device, wait for it, and slot given away.

    On a GPU a copy from the host may still be under way when the call returns. What it reads must not be given away
    before the host has waited.
    """
    log: list[str] = []
    asarray, region = strictpy.asarray, comm.transport.region
    post = region.post

    def logging_asarray(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, np.ndarray):
            log.append("copy from a slot" if np.shares_memory(x, region.bytes) else "copy from the host")
        return asarray(x, *args, **kwargs)

    def logging_post(semaphore: Any) -> int:
        log.append("give away")
        return int(post(semaphore))

    def logging_synchronize(self: Any) -> None:
        log.append("wait")

    stream = type(strictpy.cuda.get_current_stream())
    synchronize = stream.synchronize
    x = asarray(np.arange(12.0).reshape(3, 4) + comm.rank)
    strictpy.asarray, region.post, stream.synchronize = logging_asarray, logging_post, logging_synchronize
    try:
        ring.all_reduce(comm, x)
        ring.all_reduce(comm, x, "max")
        ring.reduce_scatter(comm, x)
        ring.all_gather(comm, x)
        ring.broadcast(comm, x, comm.size - 1)
        ring.all_to_all(comm, strictpy.stack([x] * comm.size))
        comm.sendrecv(x, (comm.rank + 1) % comm.size, strictpy.empty((3, 4)), (comm.rank - 1) % comm.size)
        log.append("give away")  # the buffer in which recv has collected the message is free again
    finally:
        strictpy.asarray, region.post, stream.synchronize = asarray, post, synchronize
    return log


# On a GPU


def outcomes(comm: Communicator) -> dict[str, str]:
    """Return the expressions that came out otherwise than expected."""
    return expressions.outcomes(comm.xp)


def both(comm: Communicator, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the result of every collective on the backend's arrays, and on NumPy's."""
    xp = array_module(comm.xp.empty(0))
    return collectives(xp, comm, dtype, shape), collectives(np, comm, dtype, shape)


def race(comm: Communicator, rounds: int, size: int) -> list[int]:
    """Sum large arrays while the device has other work queued; return the rounds in which an element was wrong.

    A slot that is reused before the device has read it, or a result that is sent before the device has written it,
    gives numbers of another round: every element of every round is different.
    """
    xp, wrong = comm.xp, []
    base = xp.arange(size, dtype=np.float64)
    work = xp.ones((1500, 1500), dtype=np.float32)
    for number in range(rounds):
        work = work @ work * np.float32(1 / 1500)  # takes a while, and is not waited for
        total = ring.all_reduce(comm, base + 1000 * number + comm.rank + 0 * work[0, 0])
        expected = comm.size * (np.arange(size) + 1000.0 * number) + sum(range(comm.size))
        if not np.array_equal(to_host(total), expected):
            wrong.append(number)
    return wrong
