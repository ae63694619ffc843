"""Ranks that MPI has started, on one machine or on many.

    mpiexec -n 4 python -m mpi4py -m refpar verify --transport mpi

Every rank runs the whole program, and every rank calls ``world.run`` at the same place with the same
arguments; inside, each is one rank of the world, and all of them get all results::

                     rank 0            rank 1            ...
    the program      world.run(f)      world.run(f)            the same call everywhere
    in it            f(comm 0)         f(comm 1)               messages: this file
    afterwards       [r0, r1, ...]     [r0, r1, ...]           each goes on with the same list

So nothing that is called has to be sent. What is sent are arrays and, for results, bytes made of arrays
(``pack.py``); nothing is pickled. Only point-to-point messages of MPI are used: the collectives are those of
``ring.py``, chunk by chunk, and give the same bits as on processes.

A message is a head, of fixed size, that says which call it belongs to and how long it is, and then its
bytes in pieces. MPI keeps messages between two ranks in order, so no tags are needed. Sends do not wait:
they are started from a copy, and MPI moves them on whenever this rank communicates.

A rank that raises ends all ranks with its traceback, as MPI programs do; so does a wait that runs out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from refpar import arrays
from refpar.arrays import Unavailable
from refpar.checks import whole
from refpar.comm import ring
from refpar.comm.arguments import checked_timeout
from refpar.comm.communicator import Communicator
from refpar.comm.errors import CollectiveMismatch, CommTimeout, RankError
from refpar.comm.ledger import Ledger
from refpar.comm.mailbox import shorten
from refpar.comm.pack import pack, unpack
from refpar.comm.region import TEXT_BYTES

Bytes = npt.NDArray[np.uint8]
Consume = Callable[[int, Bytes], None]

HEAD = struct.Struct(f"<QH{TEXT_BYTES}s")  # bytes of the message, length and text of the call
PIECE_BYTES = 2**22  # what a receiver sets aside; a wait is limited by the piece, not by the message
YIELDS = 30
NAP, LONGEST_NAP = 2e-5, 1e-3  # seconds

FAILED, INTERRUPTED = 3, 130
FIRST_WORD, PASSING_ON = 1.0, 0.1  # seconds

LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "Open MPI"),
    ("PMI_SIZE", "PMI_RANK", "the launcher of MPICH or Intel MPI"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
)
"""What launchers tell the processes they start: how many there are, and which one this is."""


class MpiWorld:
    """The ranks that MPI has started, or the first few of them: a :class:`~refpar.comm.processes.World` over MPI.

    Parameters
    ----------
    ranks : how many take part; by default all. The others only hear of the results.
    timeout : how long, in seconds, a rank waits for another before it gives up; None for no limit
    backend : array library of the ranks, see :func:`refpar.arrays.chosen_backend`

    Raises
    ------
    ValueError
        ``ranks`` is not a positive integer, or ``timeout`` not a positive number of seconds.
    Unavailable
        There is no MPI, or it has fewer ranks than were asked for.
    """

    def __init__(self, ranks: int | None = None, *, timeout: float | None = 60.0, backend: str | None = None) -> None:
        import threadpoolctl

        asked, timeout = None if ranks is None else whole("ranks", ranks, 1), checked_timeout(timeout)
        most = size(None) if asked is None else found()
        self.ranks = most if asked is None else asked
        if self.ranks > most:
            raise Unavailable(f"ranks is {ranks}; MPI has started {most}: mpiexec -n says how many")
        threadpoolctl.threadpool_limits(1)
        MPI = library()
        self.xp = arrays.use(arrays.chosen_backend(backend), MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank)
        self._transport = Messages(MPI.COMM_WORLD.Dup(), timeout)
        self._everyone = Communicator(self._transport, tuple(range(most)), "mpi", Ledger())
        self._runs = 0
        self.pids: list[int] = ring.all_gather(self._everyone, np.array(os.getpid())).tolist()[: self.ranks]

    def __enter__(self) -> MpiWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the ranks belong to MPI."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(comm, *args)`` on every rank, and return all results, by rank, on every rank.

        All ranks must call it, with the same arguments. A rank that raises ends all of them.
        """
        self._runs += 1
        with ending_all():
            self._meet("start")
            mine = np.empty(0, np.uint8)
            if self._transport.rank < self.ranks:
                comm = Communicator(self._transport, tuple(range(self.ranks)), "world", Ledger(), self.xp)
                mine = pack(fn(comm, *args))
            self._meet("end")
            return [unpack(data) for data in self._gather(mine)[: self.ranks]]

    def _meet(self, what: str) -> None:
        """Wait for everyone, however long they compute, and find what a function has sent that nobody received.

        Each tells each other, so that whoever still waits for a rank that is done finds this message instead
        of the one it expects.
        """
        call, nothing, messages = f"the {what} of run {self._runs}", np.empty(0, np.uint8), self._transport
        others = [rank for rank in range(messages.size) if rank != messages.rank]
        messages.doing(call)
        for rank in others:
            messages.send(rank, call, nothing)
        for rank in others:
            messages.receive(rank, call, lambda *_: None, limited=False)
        messages.doing("")

    def _gather(self, mine: Bytes) -> list[Bytes]:
        words = mine.view(np.int64)
        counts = ring.all_gather(self._everyone, np.array(words.size)).tolist()
        gathered = ring.all_gather(self._everyone, words, counts=counts)
        return [part.view(np.uint8) for part in np.split(gathered, np.cumsum(counts)[:-1])]


class Messages:
    """One rank's end of an MPI communicator: a :class:`~refpar.comm.communicator.Transport`."""

    def __init__(self, comm: Any, timeout: float | None) -> None:
        self.rank, self.size, self.timeout = comm.rank, comm.size, timeout
        self._comm = comm
        self._call = ""
        self._sending: list[tuple[Any, Bytes]] = []  # requests, and the memory that MPI still reads for them
        self._head = np.empty(HEAD.size, np.uint8)
        self._piece = np.empty(0, np.uint8)

    def send(self, dest: int, call: str, data: Bytes) -> None:
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        self._sending += self._start(dest, call, data.copy())

    def receive(self, source: int, call: str, consume: Consume, *, limited: bool = True) -> None:
        self._wait(self._comm.Irecv(self._head, source), source, limited)
        size, length, text = HEAD.unpack(self._head.tobytes())
        if text[:length] != shorten(call):
            raise CollectiveMismatch(
                f"ranks do not agree on what to do: rank {self.rank} is in {call}; "
                f"rank {source} sent it {text[:length].decode(errors='replace')}",
                self.rank,
            )
        if self._piece.size < min(size, PIECE_BYTES):
            self._piece = np.empty(min(size, PIECE_BYTES), np.uint8)
        for start in range(0, size, PIECE_BYTES):
            piece = self._piece[: min(size - start, PIECE_BYTES)]
            self._wait(self._comm.Irecv(piece, source), source, limited)
            consume(start, piece)

    def exchange(self, dest: int, data: Bytes, source: int, call: str, consume: Consume) -> None:
        sending = self._start(dest, call, data)
        self.receive(source, call, consume)
        for request, _ in sending:
            self._wait(request, dest)

    def doing(self, call: str) -> None:
        self._call = call or self._call

    def _start(self, dest: int, call: str, data: Bytes) -> list[tuple[Any, Bytes]]:
        """Start to send, from memory that must not change until the requests are done."""
        text = shorten(call)
        head = np.frombuffer(HEAD.pack(data.size, len(text), text), np.uint8)
        pieces = [head, *(data[start : start + PIECE_BYTES] for start in range(0, data.size, PIECE_BYTES))]
        return [(self._comm.Isend(piece, dest), piece) for piece in pieces]

    def _wait(self, request: Any, peer: int, limited: bool = True) -> None:
        """Wait for a request, giving up the processor in between: the other rank may need it to answer."""
        for _ in range(YIELDS):
            if request.Test():
                return
            os.sched_yield()
        began, nap = time.monotonic(), NAP
        while not request.Test():
            if limited and self.timeout is not None and time.monotonic() - began > self.timeout:
                raise CommTimeout(
                    f"rank {self.rank} waited {self.timeout:g} s for rank {peer} in {self._call}; "
                    f"MPI does not say what rank {peer} does: it may be waiting for another itself",
                    peer,
                )
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)


# The program around it: the same on every rank, but only one of them speaks.


def library() -> ModuleType:
    """Return ``mpi4py.MPI``, initialised.

    Raises
    ------
    Unavailable
        It is not installed, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise Unavailable(
            f"transport mpi: {error}. Install mpi4py with an MPI: pip install 'refpar[mpi]' brings MPICH"
        ) from None
    return MPI  # type: ignore[no-any-return]


class Launched(NamedTuple):
    """What a launcher says of the processes it has started."""

    size: int
    rank: int
    launcher: str


def launched() -> Launched | None:
    """Return what the environment says, without MPI; None where nobody says to have started several processes."""
    for size, rank, name in LAUNCHERS:
        count, number = os.environ.get(size, ""), os.environ.get(rank, "")
        if count.isdigit() and int(count) > 1:
            return Launched(int(count), int(number) if number.isdigit() else 0, name)
    return None


def found() -> int:
    """Return the number of ranks that MPI has started.

    Raises
    ------
    Unavailable
        There is one, and a launcher has started others, each of which takes itself for the only one: the
        launcher belongs to another MPI than mpi4py.
    """
    size, told = int(library().COMM_WORLD.size), launched()
    if size == 1 and told is not None:
        raise Unavailable(
            f"{told.launcher} has started {told.size} processes, but mpi4py finds itself alone in each of them: it is "
            f"linked to another MPI, {library().get_vendor()[0]}. Use the launcher of that, or an mpi4py for this one"
        )
    return size


def size(asked: int | None) -> int:
    """Return the number of ranks that MPI has started, which must be ``asked`` where that is known.

    Raises
    ------
    Unavailable
        There are more, or fewer; or there is but one, and nobody has asked for one.
    """
    size = found()
    if size == 1 and asked is None:
        raise Unavailable(
            "MPI has started 1 rank: start more by mpiexec -n 4 python -m mpi4py -m refpar ..., "
            "or ask for 1, so that one is known to be what is wanted"
        )
    if asked not in (None, size):
        raise Unavailable(f"{asked} ranks were asked for; MPI has started {size}: mpiexec -n says how many")
    return size


def refuse_local_ranks() -> None:
    """Raise where this process is one of several that a launcher has started: each would start ranks of its own."""
    told = launched()
    started = told.size if told is not None else 1
    if "mpi4py.MPI" in sys.modules:
        MPI = library()
        started = max(started, MPI.COMM_WORLD.size if MPI.Is_initialized() and not MPI.Is_finalized() else 1)
    if started > 1:
        raise Unavailable(
            f"{started} of this program have been started together, and each would start ranks of its own: "
            "use --transport mpi, or start it once"
        )


def speaks() -> bool:
    """Return whether this process prints and writes files: all do, but of MPI's ranks only the first."""
    return "mpi4py.MPI" not in sys.modules or library().COMM_WORLD.rank == 0


def everywhere(verb: Callable[[], int]) -> int:
    """Run a verb on every rank, all but the first in silence, and return the exit status of this process.

    The verb comes to the same status everywhere; one process reports it. A rank in which it raises ends all.
    """
    with ending_all(), contextlib.ExitStack() as stack:
        if not speaks():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        status = verb()
    status = status if speaks() else 0  # another may make a launcher end the first, before all it has said was read
    library().Finalize()  # waits for the others, and keeps `python -m mpi4py` from aborting them for this status
    return status


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """End every rank of the run where an exception leaves the block, after its traceback has been written."""
    try:
        yield
    except KeyboardInterrupt:
        abort(INTERRUPTED, "")
    except BaseException as error:  # sys.exit too
        rank = library().COMM_WORLD.rank
        what = str(error) if isinstance(error, RankError) else f"rank {rank} raised {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        abort(FAILED, f"refpar: {what}\n\nOn rank {rank}:\n{trace}")


def refuse(status: int, error: Exception) -> NoReturn:
    """End every rank for something that the user can mend, with one line.

    What is wrong on every rank is said once: the first rank has the first word, which is also the last.
    """
    rank = library().COMM_WORLD.rank
    if rank > 0:
        time.sleep(FIRST_WORD)
    abort(status, f"refpar: {error}\n" if rank == 0 else f"refpar: on rank {rank}: {error}\n")


def abort(status: int, text: str) -> NoReturn:
    """Write ``text`` to standard error and end every rank; ``mpiexec`` exits with ``status``."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, text.encode())
    for fd in (1, 2):
        _wait_for_reader(fd)
    library().COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH's returns once it has asked the launcher to end all


def _wait_for_reader(fd: int) -> None:
    """Wait until what was written to a pipe has been read, and passed on: who ends all ranks may drop it."""
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    unread = bytearray(4)
    for _ in range(100):
        time.sleep(0.01)
        fcntl.ioctl(fd, termios.FIONREAD, unread)
        if not any(unread):
            break
    time.sleep(PASSING_ON)
