"""One set of ranks as the caller sees it: started together, given calls, watched, and ended together.

Each process has a pipe to the caller. The caller waits for reports on all pipes and for the ends of all processes
at once, so a rank that dies is seen whatever the others are doing::

    caller                                rank r (``rank.py``)
    start it, with a pipe          -->
                                   <--    report: ready
    number of the run, call        -->
                                   <--    report: result, or error
    ...

The first error, or end, is that of the run, and the last of the pool: a World then kills it and makes another.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import time
import weakref
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from refpar.comm.errors import CollectiveMismatch, CommTimeout, RankError
from refpar.comm.pickled import from_bytes
from refpar.comm.rank import KINDS, rank_main
from refpar.comm.region import Region
from refpar.comm.starting import (
    PROCESS_NAME,
    check_descriptors,
    main_stays_here,
    path_as_here,
    standard_streams,
    start_deaf,
    without_ctrl_c,
)

LOOK_AROUND = 1.0  # seconds after which the caller looks at what ranks are doing that do not report
LAST_WORDS = 1.0  # seconds: for all ranks together, to leave the program as any process may

pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """The processes of a world, from their start to the first thing that goes wrong."""

    def __init__(self, context: Any, starter: Executor | None, ranks: int, timeout: float | None, backend: str) -> None:
        self.number = 0
        self.owner, self.timeout, self.over = os.getpid(), timeout, False
        self.busy = False  # in the middle of a run, or was when that was interrupted
        check_descriptors(ranks)
        self.region = Region.create(ranks)
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.poll = select.poll()
        self.sources: dict[int, tuple[int, bool]] = {}  # file descriptor: rank, whether it tells of its end
        pools.add(self)
        try:
            with standard_streams():
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
            target=rank_main,
            args=(self.region, rank, theirs, self.timeout, dict(os.environ), backend),
            name=f"{PROCESS_NAME} {rank}",
            daemon=True,
        )
        from multiprocess import resource_tracker

        resource_tracker.ensure_running()  # lets Ctrl-C through when it starts, so not inside
        with theirs, main_stays_here(), path_as_here(), without_ctrl_c():
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
        self.number, self.busy = number, True
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
        self.busy = False
        return [self._result(rank, results[rank]) for rank in range(len(self.pipes))]

    def _reports(self) -> tuple[dict[int, Any], int]:
        """Wait for one report of every rank; return the values, by rank, and pieces sent less received, of all."""
        values: dict[int, Any] = {}
        pieces = 0
        stopped: dict[int, float] = {}  # rank: since when
        while len(values) < len(self.pipes):
            events = self.poll.poll(None if self.timeout is None else 1000 * min(self.timeout / 4, LOOK_AROUND))
            if not events:
                self._look_for_stopped(stopped)
            for fd, _ in events:
                rank, is_end = self.sources[fd]
                if is_end:
                    raise self._ended(rank)
                try:
                    number, kind, value, balance = pickle.loads(self.pipes[rank].recv_bytes())
                except BlockingIOError:
                    raise self._stuck(rank, "did not finish its report") from None
                except (EOFError, OSError):  # also in the middle of a report
                    raise self._ended(rank) from None
                if number != self.number or rank in values:
                    raise RankError(f"rank {rank} has answered call {number} twice: has it forked?", rank)
                if kind is not None:
                    raise self._error(rank, kind, value)
                values[rank] = value
                pieces += balance
        return values, pieces

    def _look_for_stopped(self, since: dict[int, float]) -> None:
        """Raise where a process has been stopped, as by SIGSTOP, for longer than the limit: computing, it is not."""
        assert self.timeout is not None
        now = time.monotonic()
        for rank, process in enumerate(self.processes):
            try:
                state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it is gone, as its sentinel will say
                continue
            if state != "T":
                since.pop(rank, None)
            elif now - since.setdefault(rank, now) > self.timeout + LOOK_AROUND:  # who waits for it speaks first
                raise self._stuck(rank, "is stopped, and did not go on")

    def kill(self) -> None:
        """End the processes at once, whatever they are doing. Again, or in a forked child, do nothing."""
        with without_ctrl_c():
            if not self.over and os.getpid() == self.owner:
                for process in self.processes:
                    process.kill()
                self.end()

    def end(self) -> None:
        """Let the processes end, and release all that they needed. Again, or in a forked child, do nothing."""
        with without_ctrl_c():
            if self.over or os.getpid() != self.owner:
                return
            self.over = True
            for pipe in self.pipes:
                pipe.close()
            limit = time.monotonic() + LAST_WORDS
            for process in self.processes:
                process.join(max(0, limit - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()
                with contextlib.suppress(ValueError):  # it has ended, but somebody else was told so
                    process.close()
            self.region.close()

    def let_go(self) -> None:
        """Give up the ranks in a forked child of their caller, who alone may use them and end them."""
        from multiprocess import process as every

        self.over = True
        for pipe in self.pipes:
            pipe.close()
        every._children.difference_update(self.processes)  # which the child would end when it ends

    def _result(self, rank: int, data: bytes) -> Any:
        try:
            return from_bytes(data)
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
            known = {int(s): s.name for s in signal.Signals}
            what = f"was killed by {known.get(-code, f'signal {-code}')}"
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


def limit_waits(fd: int, seconds: float) -> None:
    """Let reads and writes of a socket raise BlockingIOError after ``seconds`` without progress."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
    with socket.socket(fileno=os.dup(fd)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def in_child() -> None:
    """Let go, in a forked child, of what would keep ranks and their server alive, or end them with the child."""
    from multiprocess import forkserver

    for pool in list(pools):
        pool.let_go()
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


os.register_at_fork(after_in_child=in_child)
