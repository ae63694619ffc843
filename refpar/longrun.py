"""A long run: what it says while it runs, and how it is stopped between two steps.

:func:`refpar.parallel.hybrid.run` returns when all is over, with every array of every step. A run that somebody
watches keeps only numbers, and the arrays of its last step; and it speaks and listens through a file on this
machine, because ranks that compute answer no calls::

    rank 0    after each step a line of JSON in the file      ---->   whoever watches reads on
    all       look whether a second file is there yet         <----   whoever wants it stopped makes one
              and stop at the same step, if rank 0 has seen it
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from refpar.case import Case, Layout, State, Trace
from refpar.comm import ring
from refpar.comm.communicator import Communicator, Ranks
from refpar.parallel import hybrid
from refpar.parallel.assembly import RankStep, RankTrace, collect
from refpar.parallel.traffic import GROUPS

POLL = 0.1  # seconds between two looks into the file


@dataclass(frozen=True)
class Line:
    """What is said of a step.

    Attributes
    ----------
    step : steps made, counted from the first of all
    loss, tokens, norm, outcome, scale : as in :class:`refpar.case.Step`
    seconds : that it took
    sent : bytes by group, of all ranks together, since this run began
    """

    step: int
    loss: float
    tokens: int
    norm: float
    outcome: str
    scale: float
    seconds: float
    sent: dict[str, int]


@dataclass
class Speaker:
    """What a rank does after each step: rank 0 says a line; all hear whether to stop.

    Attributes
    ----------
    path : of the file that rank 0 writes to; ``path + ".stop"`` is the one that stops it
    step : steps made before
    """

    path: str
    step: int
    since: float = field(default_factory=time.perf_counter)

    def __call__(self, comm: Communicator, step: RankStep) -> bool:
        """Say what came of a step, and return whether it was the last."""
        self.step += 1
        stop = comm.rank == 0 and os.path.exists(f"{self.path}.stop")
        mine = np.array([stop, *(comm.ledger.total(group).bytes for group in GROUPS)], np.int64)
        with comm.ledger.observing():
            stopped, *sent = ring.all_reduce(comm, mine).tolist()
        if comm.rank == 0:
            now = time.perf_counter()
            line = Line(
                self.step, step.loss, step.count, step.norm, step.outcome, step.scale, now - self.since,
                dict(zip(GROUPS, sent, strict=True)),
            )  # fmt: skip
            self.since = now
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        return bool(stopped)


def train(
    case: Case,
    layout: Layout,
    *,
    world: Ranks,
    start: State | None = None,
    hear: Callable[[Line], None],
    keep: Callable[[Trace], None] = lambda trace: None,
) -> tuple[Trace, bool]:
    """Run ``case`` from ``start`` on, keeping numbers of all steps and the arrays of the last.

    Ctrl-C, or the SIGTERM of a scheduler or container that wants its machine back, ends the run after the step at
    hand; a second one, while that is computed, ends it at once.

    Parameters
    ----------
    hear : called for each step as it is made, from another thread
    keep : called with the trace at the end, out of the reach of these: what took hours is not lost for one too many

    Returns
    -------
    the trace, and whether the run was stopped before its end

    Raises
    ------
    As :func:`refpar.parallel.hybrid.run`; KeyboardInterrupt on the second Ctrl-C
    """
    with tempfile.TemporaryDirectory(prefix="refpar-") as folder:
        path = str(Path(folder) / "steps")
        Path(path).touch()
        with stopping(f"{path}.stop") as over:
            with heard(path, hear):
                parts = world.run(run, case, layout, start, path)
            over.set()
            trace = collect(case, layout, parts)
            keep(trace)
        stopped = os.path.exists(f"{path}.stop")
    return trace, stopped and trace.begun + len(trace.steps) < len(case.batches)


def run(comm: Communicator, case: Case, layout: Layout, start: State | None, path: str) -> RankTrace:
    """Run this rank's part."""
    speaker = Speaker(path, 0 if start is None else start.step)
    return hybrid.train(comm, case, layout, start, on_step=speaker, light=True)


@contextlib.contextmanager
def stopping(path: str) -> Iterator[threading.Event]:
    """Make the file ``path`` on the first signal, and raise on the second; ignore them once what is yielded is set."""
    over = threading.Event()

    def stop(number: int, frame: Any) -> None:
        if over.is_set():
            return
        if os.path.exists(path):
            raise KeyboardInterrupt
        Path(path).touch()

    if threading.current_thread() is not threading.main_thread():
        yield over  # signals are for the main thread to hear
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def heard(path: str, hear: Callable[[Line], None]) -> Iterator[None]:
    """Call ``hear`` for each line that appears in a file, until the end of the block and of the file."""
    over = threading.Event()

    def listen() -> None:
        with open(path) as file:
            begun, last = "", False
            while not last:
                last = over.is_set()  # and then once more, for what was written before
                while part := file.readline():
                    begun += part
                    if begun.endswith("\n"):
                        hear(Line(**json.loads(begun)))
                        begun = ""
                over.wait(POLL)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
