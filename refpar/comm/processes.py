"""A world of ranks: one process each, on this machine, that stands ready to run functions.

    with World(4) as world:
        results = world.run(step, 0.1)      # step(comm, 0.1) on each of 4 ranks; results by rank

The ranks are forked from a server process that does nothing else (start method ``forkserver``),
not from the caller: whatever threads the caller has, of BLAS or otherwise, and whichever of them
forked or has ended meanwhile, cannot matter to a rank. A rank has one BLAS thread, leaves Ctrl-C
to the caller, and is killed by the kernel when its parents die.

When a rank raises, exits or is killed, the others are killed, :class:`RankError` says which rank
it was and what each other was doing, and the next ``run`` starts a fresh set of ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import numbers
import operator
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from refpar import arrays
from refpar.comm import mpi
from refpar.comm.communicator import Communicator
from refpar.comm.errors import CollectiveMismatch, CommTimeout, RankError
from refpar.comm.ledger import Ledger
from refpar.comm.mailbox import Mailboxes, Region

MOST_RANKS = 512
LONGEST_TIMEOUT = 1e9  # seconds, which the kernel can count
FILES_PER_RANK, MORE_FILES = 3, 16  # descriptors: held, and needed besides while ranks start
PROCESS_NAME = "refpar rank"


class World:
    """A standing pool of ranks.

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
        ranks, timeout = _checked_ranks(ranks), _checked_timeout(timeout)
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
        if self.backend != "numpy" and start_method != "spawn":
            raise ValueError(f"start_method is {start_method!r}; ranks on {self.backend} must be spawned")
        self.ranks, self.timeout = ranks, timeout
        self._owner = os.getpid()
        self._context = multiprocess.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["numpy", "threadpoolctl", "dill", __name__])
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
        call = _serialised(fn, args)
        with self._lock:
            pool = self._started()
            self._runs += 1
            try:
                return pool.run(self._runs, call)
            except BaseException as error:  # Ctrl-C too: no rank is left in the middle of something
                if self._pool is pool:
                    self._forget().kill()
                elif isinstance(error, Exception):  # a signal handler has closed what this was reading
                    raise RuntimeError("this World was closed while it ran") from error
                raise

    def close(self) -> None:
        """End the ranks. The World cannot be used again."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._forget().end()
            if self._starter is not None:
                self._starter.shutdown()

    def _started(self) -> Pool:
        if self._closed:
            raise RuntimeError("this World is closed")
        if os.getpid() != self._owner:
            raise RuntimeError(f"this World belongs to process {self._owner}, not to {os.getpid()}; make one here")
        if self._pool is None:
            self._pool = Pool(self._context, self._starter, self.ranks, self.timeout, self.backend)
            self._finalizer = weakref.finalize(self, self._pool.kill)
        return self._pool

    def _forget(self) -> Pool:
        assert self._pool is not None
        pool, self._pool = self._pool, None
        self._finalizer.detach()
        return pool


class Pool:
    """The processes of a world, from their start to the first thing that goes wrong."""

    def __init__(self, context: Any, starter: Executor | None, ranks: int, timeout: float | None, backend: str) -> None:
        self.number = 0
        self.owner, self.timeout, self.over = os.getpid(), timeout, False
        _check_descriptors(ranks)
        self.region = Region.create(ranks)
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.poll = select.poll()
        self.sources: dict[int, tuple[int, bool]] = {}  # file descriptor: rank, whether it tells of its end
        try:
            with _standard_streams():
                for rank in range(ranks):
                    self._start(context, starter, rank, backend)
            self._reports()  # that they are ready: no wait for a rank shall include its start
        except BaseException:
            self.kill()
            raise

    def _start(self, context: Any, starter: Executor | None, rank: int, backend: str) -> None:
        ours, theirs = context.Pipe()
        self.pipes.append(ours)
        if self.timeout is not None:  # for a rank that is stopped while a large call, or result, is on its way
            limit_waits(ours.fileno(), self.timeout)
        process = context.Process(
            target=_rank_main,
            args=(self.region, rank, theirs, self.timeout, dict(os.environ), backend),
            name=f"{PROCESS_NAME} {rank}",
            daemon=True,
        )
        from multiprocess import resource_tracker

        resource_tracker.ensure_running()  # lets Ctrl-C through when it starts, so not inside
        with theirs, _main_stays_here(), _without_ctrl_c():
            if starter is None:
                start_deaf(process)
            else:
                starter.submit(start_deaf, process).result()
            self.processes.append(process)
        for fd, is_end in ((ours.fileno(), False), (process.sentinel, True)):
            self.poll.register(fd, select.POLLIN)
            self.sources[fd] = rank, is_end

    def run(self, number: int, call: bytes) -> list[Any]:
        """Let every rank make a call, and return the results, by rank."""
        self.number = number
        data = number.to_bytes(8, "little") + call
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(data)
            except BlockingIOError:
                raise self._stuck(rank, "did not take the call") from None
            except OSError:
                raise self._ended(rank) from None
        results, pieces = self._reports()
        if pieces:
            source, dest = self.region.unread()[0]
            raise CollectiveMismatch(
                f"rank {source} sent rank {dest} a message that nobody received: both functions have returned", source
            )
        return [self._result(rank, results[rank]) for rank in range(len(self.pipes))]

    def _reports(self) -> tuple[dict[int, Any], int]:
        """Wait for one report of every rank; return the values, by rank, and pieces sent less received, of all."""
        values: dict[int, Any] = {}
        pieces = 0
        while len(values) < len(self.pipes):
            for fd, _ in self.poll.poll():
                rank, is_end = self.sources[fd]
                if is_end:
                    raise self._ended(rank)
                try:
                    kind, value, balance = pickle.loads(self.pipes[rank].recv_bytes())
                except BlockingIOError:
                    raise self._stuck(rank, "did not finish its report") from None
                except (EOFError, ConnectionError):
                    raise self._ended(rank) from None
                if kind is not None:
                    raise self._error(rank, kind, value)
                values[rank] = value
                pieces += balance
        return values, pieces

    def kill(self) -> None:
        """End the processes at once, whatever they are doing. Again, or in a forked child, do nothing."""
        if self.over or os.getpid() != self.owner:
            return
        for process in self.processes:
            process.kill()
        self.end()

    def end(self) -> None:
        """Let the processes end, and release all that they needed."""
        self.over = True
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.region.close()

    def _result(self, rank: int, data: bytes) -> Any:
        try:
            return _unpickled(data)
        except Exception as error:
            raise RankError(f"the result of rank {rank} cannot be read here: {error!r}", rank) from error

    # Errors

    def _ended(self, rank: int) -> RankError:
        """Return the error for a rank whose process is gone."""
        process = self.processes[rank]
        process.join(1)
        code = process.exitcode
        if code is None:
            what = "has closed its connection"
        elif code < 0:
            what = f"was killed by {signal.Signals(-code).name}"
        else:
            what = f"exited with status {code}"
        return RankError(f"rank {rank} {what}\n{self._others(rank)}", rank)

    def _stuck(self, rank: int, what: str) -> CommTimeout:
        return CommTimeout(f"rank {rank} {what} within {self.timeout:g} s\n{self._others(rank)}", rank)

    def _error(self, rank: int, kind: str, value: tuple[str, str, int]) -> RuntimeError:
        """Return the error for a rank that has reported one."""
        summary, trace, culprit = value
        error = KINDS[kind]
        if not issubclass(error, RankError):
            return error(summary)
        return error(f"{summary}\n{self._others(rank)}\n\nOn rank {rank}:\n{trace}", culprit)

    def _others(self, rank: int) -> str:
        """Say what every other rank is doing."""
        lines = []
        for r in range(len(self.pipes)):
            status = self.region.status(r)
            doing = str(status) if status.run == self.number else "had not begun"  # it says what it did in the last run
            lines += [f"  rank {r}: {doing}"] if r != rank else []
        return "\n".join(lines)


def _checked_ranks(ranks: Any) -> int:
    with contextlib.suppress(TypeError):
        number = operator.index(ranks)
        if not isinstance(ranks, bool) and 1 <= number <= MOST_RANKS:
            return number
    raise ValueError(f"ranks is {ranks!r}; it must be an integer from 1 to {MOST_RANKS}")


def _checked_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    with contextlib.suppress(OverflowError):
        if not isinstance(timeout, bool) and isinstance(timeout, numbers.Real):
            seconds = float(timeout)
            if 0 < seconds <= LONGEST_TIMEOUT:
                return seconds
    must = f"it must be a positive number of seconds up to {LONGEST_TIMEOUT:g}, or None for no limit"
    raise ValueError(f"timeout is {timeout!r}; {must}")


def _check_descriptors(ranks: int) -> None:
    """Raise OSError where there are too few file descriptors, before anything is started that would have to end."""
    taken: list[int] = []
    try:
        for _ in range(FILES_PER_RANK * ranks + MORE_FILES):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        text = f"{error.strerror}: {ranks} ranks need {FILES_PER_RANK * ranks + MORE_FILES} more, {len(taken)} are free"
        raise OSError(error.errno, f"{text}; raise the limit (ulimit -n)") from None
    finally:
        for fd in taken:
            os.close(fd)


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Fill descriptors 0 to 2 where they are closed: what is opened in their place would be printed to."""
    with contextlib.ExitStack() as stack:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
            stack.callback(os.close, fd)
        os.close(fd)
        yield


def start_deaf(process: Any) -> None:
    """Start a process, and the fork server with it, that Ctrl-C does not reach until they ignore it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # is inherited
    try:
        process.start()
    except EOFError:
        raise RuntimeError("the process that ranks are forked from has ended; its standard error says why") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block, so that no process is started that nobody knows of.

    Blocking the signal is not enough: the kernel then gives it to another thread, and Python to this one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _main_stays_here() -> Iterator[None]:
    """Keep new processes from importing the caller's main module again.

    They would run a script a second time that does not guard its main part, and have no use for
    it: functions defined there are sent by value.
    """
    from multiprocess import spawn

    with _starting:
        original = spawn.get_preparation_data

        def without_main(name: str) -> dict[str, Any]:
            data: dict[str, Any] = original(name)
            if name.startswith(PROCESS_NAME):
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = original


_starting = threading.Lock()


def limit_waits(fd: int, seconds: float) -> None:
    """Let reads and writes of a socket raise BlockingIOError after ``seconds`` without progress."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    with socket.socket(fileno=os.dup(fd)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _serialised(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the call in bytes.

    Functions and classes of importable modules go by name. The others, and all that belongs to the
    main module, which a rank does not have, go by value.
    """
    try:
        data = pickle.dumps((fn, args))
        if b"__main__" not in data:
            return data
    except Exception:  # pickle raises whatever it likes; dill may know how
        pass
    try:
        return _by_value((fn, args))
    except Exception as error:
        for what, value in [("fn", fn), *((f"argument {i + 1}", arg) for i, arg in enumerate(args))]:
            try:
                _by_value(value)
            except Exception:
                raise TypeError(f"{what} of World.run, {value!r:.200}, cannot be sent to the ranks: {error}") from error
        raise


def _by_value(value: Any) -> bytes:
    """Return ``value`` in bytes, functions that have no importable name with what they refer to.

    A module that such a function refers to goes by name: dill would send one that is not installed, but lies where
    it was started, with all that it holds.
    """
    import dill

    class Pickler(dill.Pickler):  # type: ignore[misc]
        def reducer_override(self, x: Any) -> Any:
            if isinstance(x, ModuleType) and x.__name__ != "__main__":
                return importlib.import_module, (x.__name__,)
            return NotImplemented

    room = io.BytesIO()
    Pickler(room, recurse=True).dump(value)
    return room.getvalue()


def _unpickled(data: bytes | memoryview) -> Any:
    import dill

    return dill.loads(data)


# In a rank


def _rank_main(
    region: Region, rank: int, pipe: Any, timeout: float | None, environ: dict[str, str], backend: str
) -> None:
    """Wait for calls and run them, until the pipe ends."""
    transport = Mailboxes(region, rank, timeout)
    xp: ModuleType = np
    try:
        _settle(environ)
        xp = arrays.use(backend, rank)
        pipe.send_bytes(pickle.dumps((None, "ready", 0)))
    except Exception as error:
        pipe.send_bytes(_failure(transport, error))
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        pipe.send_bytes(_run(transport, data, xp))


def _settle(environ: dict[str, str]) -> None:
    """Make this process a rank: bound to its parents, deaf to Ctrl-C, single-threaded."""
    import ctypes

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
        fn, args = _unpickled(call)
        comm = Communicator(transport, tuple(range(transport.size)), "world", Ledger(), xp)
        result = fn(comm, *args)
        transport.finish()
        value = _result(result, xp)
    except BaseException as error:
        return _failure(transport, error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, closed, on a full disk: no reason to lose the result
                stream.flush()
    return pickle.dumps((None, value, (transport.sent - sent) - (transport.received - received)))


def _failure(transport: Mailboxes, error: BaseException) -> bytes:
    """Return the report of an error: its kind; summary, traceback, and the rank to blame."""
    if not isinstance(error, CommTimeout):  # which leaves it known whom this rank waited for
        transport.fail()
    rank, text, trace = transport.rank, _shown(str, error), _shown(_trace, error)
    for kind, known in KINDS.items():
        if isinstance(error, known):
            return pickle.dumps((kind, (text, trace, getattr(error, "rank", rank)), 0))
    first = text if len(text) <= 200 and "\n" not in text else text[:200].partition("\n")[0] + " ..."
    return pickle.dumps(("RankError", (f"rank {rank} raised {type(error).__name__}: {first}", trace, rank), 0))


KINDS: dict[str, type[RankError] | type[arrays.Unavailable]] = {
    "CollectiveMismatch": CollectiveMismatch,
    "CommTimeout": CommTimeout,
    "RankError": RankError,
    "Unavailable": arrays.Unavailable,
}
"""Errors that reach the caller as what they are; every other becomes a RankError."""


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _shown(show: Callable[[BaseException], str], error: BaseException) -> str:
    """Return ``show(error)``, whatever the error's own methods do."""
    try:
        return show(error)
    except BaseException as other:
        return f"<its text cannot be shown: {type(other).__name__}>"


def _result(result: Any, xp: ModuleType) -> bytes:
    """Return the result in bytes, arrays of a device as NumPy's: by dill where pickle cannot."""
    try:
        if xp is np:
            return pickle.dumps(result)
        data = io.BytesIO()
        _Homeward(data, xp.ndarray).dump(result)
        return data.getvalue()
    except Exception:
        import dill

        try:
            return bytes(dill.dumps(result, recurse=True))
        except Exception as error:
            raise TypeError(f"the result, {type(result).__name__}, cannot be sent to the caller: {error}") from error


class _Homeward(pickle.Pickler):
    """Pickles device arrays as host arrays: the caller has no device, and shall not import the library."""

    def __init__(self, file: Any, kind: type) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._kind = kind

    def reducer_override(self, x: Any) -> Any:
        return arrays.to_host(x).__reduce_ex__(pickle.HIGHEST_PROTOCOL) if isinstance(x, self._kind) else NotImplemented
