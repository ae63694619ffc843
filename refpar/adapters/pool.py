"""Standing torch workers: processes that form a gloo group and wait for calls, so that Hypothesis can use them.

    with Pool() as pool:
        results = pool.run(4, step, arguments)      # step(*arguments[r]) on each of 4 ranks; results by rank

Starting a process that imports torch takes seconds; a call on one that stands takes a millisecond. A pool has as many
workers as were ever asked for, and forms the default group anew when a call is for another number of them.

What a worker raises is raised here, as :class:`WorkerError`, and all workers are ended: the others are in the middle of
a collective that nobody will join, and what is in gloo's buffers belongs to no later call. The next call starts new
ones. An error is never a result: a check that expects wrong numbers is not satisfied by it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

LIMIT = 60.0
"""Seconds that a call may take."""
START = 120.0
"""Seconds that a worker may take to start."""
GLOO_LIMIT = 20.0
"""Seconds that gloo waits for a peer."""


class WorkerError(RuntimeError):
    """A worker has raised, or ended, or has not answered in time; the text has its traceback."""


class Pool:
    """Torch workers that stand ready.

    Parameters
    ----------
    limit : seconds that a call may take before the workers are ended
    gloo_limit : seconds that a worker waits for another
    """

    def __init__(self, *, limit: float = LIMIT, gloo_limit: float = GLOO_LIMIT) -> None:
        self.limit, self.gloo_limit = limit, gloo_limit
        self._workers: list[tuple[Any, Connection]] = []
        self._room: tempfile.TemporaryDirectory[str] | None = None
        self._groups = 0
        self._size = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(self, ranks: int, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call ``function(*arguments[r])`` on each rank r, and return the results by rank.

        ``function`` must be importable by name: it is pickled.

        Raises
        ------
        WorkerError
            Where one raises, ends, or does not answer in time.
        """
        if len(arguments) != ranks:
            raise ValueError(f"there are arguments for {len(arguments)} ranks: it must be {ranks}")
        try:
            self._start(ranks)
            group = None
            if self._size != ranks:
                assert self._room is not None
                self._groups, self._size = self._groups + 1, ranks
                group = str(Path(self._room.name) / f"group{self._groups}")
            for rank in range(ranks):
                self._workers[rank][1].send((group, rank, ranks, function, tuple(arguments[rank])))
            return self._results(ranks)
        except BaseException:  # Ctrl-C too: nobody is left in the middle of something
            self.close()
            raise

    def close(self) -> None:
        """End the workers. The pool can be used again."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers, self._size = [], 0
        if self._room is not None:
            self._room.cleanup()
            self._room = None

    def _start(self, ranks: int) -> None:
        if self._room is None:
            self._room = tempfile.TemporaryDirectory(prefix="refpar-gloo-")
        context = multiprocessing.get_context("spawn")
        fresh: list[Connection] = []
        with _main_stays_here():
            while len(self._workers) < ranks:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, list(sys.path), self.gloo_limit), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
                fresh.append(ours)
        for pipe in fresh:  # gloo's limit must not run while a peer still imports torch
            if not pipe.poll(START):
                raise WorkerError(f"a worker has not started in {START:g} s")
            pipe.recv()

    def _results(self, ranks: int) -> list[Any]:
        results: dict[int, Any] = {}
        until = time.monotonic() + self.limit
        pipes = {self._workers[rank][1]: rank for rank in range(ranks)}
        while pipes:
            for pipe in wait(list(pipes), max(0.0, until - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise WorkerError(f"rank {rank} of {ranks} has ended in the middle of a call") from None
                if error:
                    raise WorkerError(f"rank {rank} of {ranks}: {error}")
            if pipes and time.monotonic() >= until:
                raise WorkerError(f"ranks {sorted(pipes.values())} of {ranks} have not answered in {self.limit:g} s")
        return [results[rank] for rank in range(ranks)]


@contextlib.contextmanager
def _main_stays_here() -> Any:
    """Keep a spawned process from importing the caller's main module again, which may not be guarded."""
    main = sys.modules["__main__"]
    known = main.__dict__
    hidden: dict[str, Any] = {name: known.pop(name) for name in ("__file__", "__spec__") if name in known}
    known["__spec__"] = None
    try:
        yield
    finally:
        known.update(hidden)


def _serve(pipe: Connection, path: list[str], gloo_limit: float) -> None:
    """Answer calls until the pipe ends."""
    sys.path[:] = path
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            group, rank, ranks, function, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # gloo's threads would wait for their peers
        try:
            if group is not None:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{group}",
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=gloo_limit),
                )
            answer: tuple[str | None, Any] = None, function(*arguments)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionError):
            os._exit(0)
        except Exception as error:
            pipe.send((f"the result cannot be sent: {error}", None))
