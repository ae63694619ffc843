"""A world of ranks: one process each, on this machine, that stands ready to run functions.

    with World(4) as world:
        results = world.run(step, 0.1)      # step(comm, 0.1) on each of 4 ranks; results by rank

The ranks are forked from a server process that does nothing else (start method ``forkserver``),
not from the caller: whatever threads the caller has, of BLAS or otherwise, and whichever of them
forked or has ended meanwhile, cannot matter to a rank. A rank has one BLAS thread, leaves Ctrl-C
to the caller, and is killed by the kernel when its parents die.

When a rank raises, exits or is killed, the others are killed, :class:`RankError` says which rank
it was and what each other was doing, and the next ``run`` starts a fresh set of ranks.

Behind it: ``pool.py`` watches one set of processes, ``starting.py`` starts each, ``rank.py`` runs in each,
``pickled.py`` turns calls and results into bytes, and ``mailbox.py`` moves what
ranks say to each other, through the memory of ``region.py``.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from refpar import arrays
from refpar.checks import whole
from refpar.comm import mpi, rank
from refpar.comm.arguments import checked_timeout
from refpar.comm.pickled import call_in_bytes
from refpar.comm.pool import Pool
from refpar.comm.starting import PROCESS_NAME

MOST_RANKS = 512
START_METHODS = ("forkserver", "spawn")  # never "fork": see above


class World:
    """A standing pool of ranks. Each keeps up to about 64 MiB of what it has freed, until it is ended.

    Parameters
    ----------
    ranks : how many processes
    timeout : how long, in seconds, a rank waits for another before it gives up; None to wait for
        ever, for debuggers. How long a rank computes is not limited.
    backend : the library whose arrays the ranks compute with, ``comm.xp`` there: ``"numpy"`` or ``"cupy"``; by
        default what ``REFPAR_BACKEND`` says, else NumPy. Rank r gets GPU ``r % count``. It is not imported here.
    start_method : ``"forkserver"``, or ``"spawn"`` for libraries that do not survive any fork, such as CUDA; by
        default what the backend needs

    Attributes
    ----------
    pids : process numbers of the ranks; they are started if they do not run

    Raises
    ------
    ValueError
        An argument is none of these.
    refpar.arrays.Unavailable
        The backend is not installed, or this is one of several MPI ranks; where there is no GPU, the first
        ``run`` raises it.
    OSError
        From the first ``run``: there is no shared memory, or there are too few file descriptors.
    """

    def __init__(
        self,
        ranks: int,
        *,
        timeout: float | None = 60.0,
        backend: str | None = None,
        start_method: str | None = None,
    ) -> None:
        ranks, timeout = whole("ranks", ranks, 1, MOST_RANKS), checked_timeout(timeout)
        if sys.platform != "linux":
            raise OSError(f"refpar runs its ranks on Linux only; this is {sys.platform}")
        import multiprocess

        if multiprocess.current_process().name.startswith(PROCESS_NAME):
            raise RuntimeError(
                "a rank cannot start ranks of its own: make one World outside, and split its communicator"
            )
        mpi.refuse_local_ranks()
        self.backend = arrays.chosen_backend(backend)
        start_method = start_method or ("forkserver" if self.backend == "numpy" else "spawn")
        if start_method not in START_METHODS:
            raise ValueError(f"start_method is {start_method!r}; it must be one of {', '.join(START_METHODS)}")
        if self.backend != "numpy" and start_method != "spawn":
            raise ValueError(f"start_method is {start_method!r}; ranks on {self.backend} must be spawned")
        self.ranks, self.timeout = ranks, timeout
        self._owner = os.getpid()
        self._context = multiprocess.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["threadpoolctl", "dill", rank.__name__, *here()])
        # The kernel ends a process when the *thread* that started it ends. The fork server has but one.
        self._starter = ThreadPoolExecutor(1) if start_method == "spawn" else None
        self._lock = threading.RLock()  # a signal handler may close a World that runs
        self._pool: Pool | None = None
        self._runs = 0
        self._closed = False

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a World cannot be sent to its ranks")

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._started().processes]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(comm, *args)`` on every rank and return the results, by rank.

        ``fn`` may be a lambda or a closure, and need not live in an importable file. It and its
        arguments are copied to the ranks, and the results back.

        Raises
        ------
        RankError
            A rank raised, exited or was killed; also its kinds :class:`CollectiveMismatch` and :class:`CommTimeout`.
        TypeError
            The function or an argument cannot be sent to another process.
        """
        call = call_in_bytes(fn, args)
        with self._lock:
            if self._pool is not None and self._pool.busy:  # a second Ctrl-C came before its ranks were ended
                self._pool.kill()
            pool = self._started()
            self._runs += 1
            try:
                return pool.run(self._runs, call)
            except BaseException as error:  # Ctrl-C too: no rank is left in the middle of something
                if self._pool is pool:
                    pool.kill()
                    self._forget()
                elif isinstance(error, Exception):  # a signal handler has closed what this was reading
                    raise RuntimeError("this World was closed while it ran") from error
                raise

    def close(self) -> None:
        """End the ranks. The World cannot be used again."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.end()
                self._forget()
            if self._starter is not None:
                self._starter.shutdown()

    def _started(self) -> Pool:
        if self._closed:
            raise RuntimeError("this World is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(f"this World belongs to process {self._owner}, not to {os.getpid()}; make one here")
        if self._pool is not None and self._pool.over:
            self._forget()
        return self._pool or self._start()

    def _start(self) -> Pool:
        """Start the ranks. A signal handler may close this World meanwhile, and then finds no pool to end."""
        closed = "this World was closed while its ranks started"
        try:
            pool = Pool(self._context, self._starter, self.ranks, self.timeout, self.backend)
        except Exception as error:  # a closed World starts no processes
            if self._closed:
                raise RuntimeError(closed) from error
            raise
        self._finalizer = weakref.finalize(self, pool.kill)
        self._pool = pool
        if self._closed:
            self._pool = None
            self._finalizer()
            raise RuntimeError(closed)
        return pool

    def _forget(self) -> Pool:
        assert self._pool is not None
        pool, self._pool = self._pool, None
        self._finalizer.detach()
        return pool


def here() -> list[str]:
    """Return the modules of refpar that this program has imported and ranks may need.

    The fork server imports them once, and ranks have them from the start: 64 ranks that import for 50 ms each
    would take seconds.
    """
    apart = {"adapters", "conformance", "teach", "cli", "__main__"}  # which bring frameworks, or stay here
    names = (name.split(".") for name in list(sys.modules))
    return sorted(".".join(path) for path in names if path[0] == "refpar" and apart.isdisjoint(path[1:2]))
