"""What runs in each process of a world: it becomes a rank, and then answers one call after another.

    from the caller                     number of the run (8 bytes), function and arguments
    back, where it has returned         number, None, result, pieces sent less received
          where it has raised           number, kind of error, (text, traceback, rank to blame), 0

The first answer is to no call: that this rank is ready, or why it cannot be one. The pieces are counted so that
the caller can tell, from the sum over all ranks, that somebody has sent what nobody has received.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from refpar import arrays
from refpar.comm.communicator import Communicator
from refpar.comm.errors import CollectiveMismatch, CommTimeout, RankError
from refpar.comm.ledger import Ledger
from refpar.comm.mailbox import Mailboxes
from refpar.comm.pickled import from_bytes, result_in_bytes
from refpar.comm.region import Region

KINDS: dict[str, type[RankError] | type[arrays.Unavailable]] = {
    "CollectiveMismatch": CollectiveMismatch,
    "CommTimeout": CommTimeout,
    "RankError": RankError,
    "Unavailable": arrays.Unavailable,
}
"""Errors that reach the caller as what they are; every other becomes a RankError."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 2**26


def rank_main(
    region: Region, rank: int, pipe: Any, timeout: float | None, environ: dict[str, str], backend: str
) -> None:
    """Wait for calls and run them, until the pipe ends."""
    transport = Mailboxes(region, rank, timeout)
    xp: ModuleType = np
    try:
        _settle(environ)
        xp = arrays.use(backend, rank)
        first = pickle.dumps((0, None, "ready", 0))
    except Exception as error:
        first = _failure(transport, error, 0)
    with contextlib.suppress(EOFError, OSError):  # the caller has closed its end: there is nobody to answer
        pipe.send_bytes(first)
        while True:
            pipe.send_bytes(_run(transport, pipe.recv_bytes(), xp))


def _settle(environ: dict[str, str]) -> None:
    """Make this process a rank: bound to its parents, deaf to Ctrl-C, single-threaded, with memory that it keeps."""
    from multiprocess import forkserver
    from threadpoolctl import threadpool_limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    server = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:
        os._exit(1)
    # The fork server ends when the last holder of this descriptor does. That must be the caller.
    alive, forkserver._forkserver._forkserver_alive_fd = forkserver._forkserver._forkserver_alive_fd, None
    if alive is not None:
        os.close(alive)
    os.environ.clear()
    os.environ.update(environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    threadpool_limits(1)
    check_subnormals()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees for the next array, as allocators on GPUs do.

    The C library gives it back to the kernel, and a page that is asked for again costs up to 3 us: most of the time
    of a reduce-scatter of 4 MB, a sixth of that of a training step. Kept is what lies between arrays that are in
    use, and behind the last of them less than ``KEPT_BYTES``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the most there is: larger arrays are still given back
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def check_subnormals() -> None:
    """Raise where subnormal numbers are 0: a library may set that for its whole process (hypothesis#3156)."""
    if not (np.float64(5e-324) > 0 and np.float16(6e-8) > 0):
        raise FloatingPointError("a library in this process flushes subnormal numbers to zero")


def _run(transport: Mailboxes, data: bytes, xp: ModuleType) -> bytes:
    """Run one call; return what became of it: kind of error or None, result, pieces sent less received."""
    number, call = int.from_bytes(data[:8], "little"), memoryview(data)[8:]
    sent, received = transport.sent, transport.received
    transport.begin(number)
    try:
        fn, args = from_bytes(call)
        comm = Communicator(transport, tuple(range(transport.size)), "world", Ledger(), xp)
        result = fn(comm, *args)
        transport.finish()
        value = result_in_bytes(result, xp)
    except BaseException as error:
        return _failure(transport, error, number)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, on a full disk: no reason to lose the result
                stream.flush()
    return pickle.dumps((number, None, value, (transport.sent - sent) - (transport.received - received)))


def _failure(transport: Mailboxes, error: BaseException, number: int) -> bytes:
    """Return the report of an error: its kind; summary, traceback, and the rank to blame."""
    if not isinstance(error, CommTimeout):  # which leaves it known whom this rank waited for
        transport.fail()
    rank, text, trace = transport.rank, _shown(str, error), _shown(_trace, error)
    for kind, known in KINDS.items():
        if isinstance(error, known):
            return pickle.dumps((number, kind, (text, trace, getattr(error, "rank", rank)), 0))
    first = text if len(text) <= 200 and "\n" not in text else text[:200].partition("\n")[0] + " ..."
    return pickle.dumps((number, "RankError", (f"rank {rank} raised {type(error).__name__}: {first}", trace, rank), 0))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _shown(show: Callable[[BaseException], str], error: BaseException) -> str:
    """Return ``show(error)``, whatever the error's own methods do."""
    try:
        return show(error)
    except BaseException as other:
        return f"<its text cannot be shown: {type(other).__name__}>"
