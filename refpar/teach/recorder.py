"""What the ranks of a real run did, and when: computing, sending, waiting.

The recorder is put around things that are there anyway, for the length of one call, inside each rank::

    Communicator ---> Recorder ---> Transport        every message: when, to or from whom, how many bytes
    pipeline.Stage.forward, .backward, ...           replaced by functions that note when they begin and end

So a run that is not recorded has nothing of it in its way, not even a question whether it is on. A
:class:`RecordedWorld` is a :class:`~refpar.comm.processes.World` that records whatever it is asked to run::

    with RecordedWorld(4) as world:
        trace = hybrid.run(case, layout, world=world)
        world.runs[0].ranks[2]                       # the events of rank 2

Times are those of one clock for all processes of a machine (``CLOCK_MONOTONIC``). Where ranks outnumber
cores they take turns, and a rank that has lost its core looks as if it computed slowly or waited long:
what is drawn of such a run says *time-shared*.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refpar.comm.communicator import Bytes, Communicator, Transport
from refpar.comm.processes import World
from refpar.oracle.mistakes import resolve

Kind = Literal["compute", "call", "send", "wait", "take", "note"]
MOST_EVENTS = 200_000
"""Of one rank in one run. What comes later is not recorded: a long run would fill the memory."""


@dataclass(slots=True)
class Event:
    """Something that a rank did.

    Attributes
    ----------
    kind : ``"compute"``; ``"call"``, a collective as a whole; inside it ``"send"``, ``"wait"`` (until a message
        has come and what is sent has left) and ``"take"`` (using a piece of it: adding it, or copying it);
        ``"note"``, at one moment
    name : what is computed, or the sentence that both sides of a call agree on
    start, end : nanoseconds
    to, source : the other ranks, in the world's numbers
    sent, received : bytes
    number_sent, number_received : of the message on its directed pair of ranks, from 0
    data : what was sent and received, where copies are kept; or what is noted
    """

    kind: Kind
    name: str
    start: int
    end: int = 0
    to: int | None = None
    source: int | None = None
    sent: int = 0
    received: int = 0
    number_sent: int | None = None
    number_received: int | None = None
    data: Any = None


@dataclass
class Run:
    """One call of :meth:`World.run`, on every rank.

    Attributes
    ----------
    name : what ran
    ranks : for each rank its events, in the order in which they began
    cores : how many cores the machine gave them together
    """

    name: str
    ranks: list[list[Event]]
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @property
    def time_shared(self) -> bool:
        """Whether the ranks had to take turns."""
        return len(self.ranks) > self.cores


class RecordedWorld(World):
    """A :class:`World` that records what its ranks do.

    Attributes
    ----------
    runs : one for each call of :meth:`run`
    """

    def __init__(self, ranks: int, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.runs: list[Run] = []

    def __enter__(self) -> RecordedWorld:
        return self

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(comm, *args)`` on every rank, as :meth:`World.run` does, and record it."""
        results, events = zip(*super().run(record, fn, args), strict=True)
        layout = next((f" {arg}" for arg in args if type(arg).__name__ == "Layout"), "")
        self.runs.append(Run(f"{getattr(fn, '__name__', 'call')}{layout}", list(events)))
        return list(results)


def record(
    comm: Communicator,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    probes: Mapping[str, Callable[..., Any]] | None = None,
    copies: bool = False,
) -> tuple[Any, list[Event]]:
    """Call ``fn(comm, *args)`` on this rank and return its result and what it did.

    Parameters
    ----------
    probes : functions to put in place of others for the length of the call, by ``module:attribute``. Each is
        called with the recorder, the function it replaces, and that one's arguments
    copies : whether to keep a copy of everything that is sent and received
    """
    recorder = Recorder(comm.transport, copies)
    recorded = Communicator(recorder, comm.members, comm.name, comm.ledger, comm.xp, comm.place)
    with contextlib.ExitStack() as stack:
        for target, probe in (probes or LABELS).items():
            stack.enter_context(probing(recorder, target, probe))
        result = fn(recorded, *args)
    return result, recorder.events


@contextlib.contextmanager
def probing(recorder: Recorder, target: str, probe: Callable[..., Any]) -> Iterator[None]:
    """Put ``probe`` in place of ``target``, such as ``refpar.parallel.pipeline:Stage.forward``, for a while."""
    holder, attribute = resolve(target)
    right = inspect.getattr_static(holder, attribute)

    @functools.wraps(right)
    def probed(*args: Any, **options: Any) -> Any:
        return probe(recorder, right, *args, **options)

    setattr(holder, attribute, probed)
    try:
        yield
    finally:
        setattr(holder, attribute, right)


class Recorder:
    """A :class:`~refpar.comm.communicator.Transport` that notes what goes through it."""

    def __init__(self, transport: Transport, copies: bool = False) -> None:
        self.transport, self.copies = transport, copies
        self.rank, self.size = transport.rank, transport.size
        self.events: list[Event] = []
        self._call: Event | None = None
        self._sent = [0] * self.size
        self._received = [0] * self.size

    def begin(self, kind: Kind, name: str, **what: Any) -> Event:
        """Note that something begins now; the caller sets its end."""
        event = Event(kind, name, time.perf_counter_ns(), **what)
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        return event

    def note(self, name: str, data: Any) -> None:
        """Note something at this moment."""
        event = self.begin("note", name, data=data)
        event.end = event.start

    def send(self, dest: int, call: str, data: Bytes) -> None:
        event = self.begin("send", call, to=dest, sent=data.size, number_sent=self._number(self._sent, dest))
        if self.copies:
            event.data = data.tobytes(), b""
        self.transport.send(dest, call, data)
        event.end = time.perf_counter_ns()

    def receive(self, source: int, call: str, consume: Callable[[int, Bytes], None]) -> None:
        event = self.begin("wait", call, source=source, number_received=self._number(self._received, source))
        pieces: list[bytes] = []
        self.transport.receive(source, call, self._taking(event, consume, pieces))
        event.end = time.perf_counter_ns()
        if self.copies:
            event.data = b"", b"".join(pieces)

    def exchange(self, dest: int, data: Bytes, source: int, call: str, consume: Callable[[int, Bytes], None]) -> None:
        numbers = {"number_sent": self._number(self._sent, dest)}
        numbers["number_received"] = self._number(self._received, source)
        event = self.begin("wait", call, to=dest, source=source, sent=data.size, **numbers)
        pieces: list[bytes] = []
        sent = data.tobytes() if self.copies else b""
        self.transport.exchange(dest, data, source, call, self._taking(event, consume, pieces))
        event.end = time.perf_counter_ns()
        if self.copies:
            event.data = sent, b"".join(pieces)

    def doing(self, call: str) -> None:
        if call:
            self._call = self.begin("call", call)
        elif self._call is not None:
            self._call.end = time.perf_counter_ns()
            self._call = None
        self.transport.doing(call)

    def _taking(
        self, event: Event, consume: Callable[[int, Bytes], None], pieces: list[bytes]
    ) -> Callable[[int, Bytes], None]:
        """Return ``consume`` with the time it takes noted: in it, the rank does not wait."""

        def take(start: int, piece: Bytes) -> None:
            event.received += piece.size
            if self.copies:
                pieces.append(piece.tobytes())
            taking = self.begin("take", event.name, source=event.source, received=piece.size)
            consume(start, piece)
            taking.end = time.perf_counter_ns()

        return take

    @staticmethod
    def _number(counters: list[int], rank: int) -> int:
        counters[rank] += 1
        return counters[rank] - 1


# What is computed, by name


def _pass(letter: str) -> Callable[..., Any]:
    """Label a forward or backward pass with its micro-batch."""

    def probe(recorder: Recorder, right: Callable[..., Any], stage: Any, m: int) -> Any:
        event = recorder.begin("compute", f"{letter}{m}")
        result = right(stage, m)
        event.end = time.perf_counter_ns()
        return result

    return probe


def _work(name: str) -> Callable[..., Any]:
    """Label a function; calls that follow each other at once are one piece of work."""

    def probe(recorder: Recorder, right: Callable[..., Any], *args: Any, **options: Any) -> Any:
        last = recorder.events[-1] if recorder.events else None
        again = last is not None and (last.kind, last.name) == ("compute", name)
        event = last if again and last is not None else recorder.begin("compute", name)
        result = right(*args, **options)
        event.end = time.perf_counter_ns()
        return result

    return probe


LABELS: Mapping[str, Callable[..., Any]] = {
    "refpar.parallel.pipeline:Stage.forward": _pass("F"),
    "refpar.parallel.pipeline:Stage.backward": _pass("B"),
    "refpar.optim:update": _work("update"),
    "refpar.parallel.data:DataParallel.publish": _work("publish"),
    "refpar.parallel.zero:Zero.publish": _work("publish"),
    "refpar.parallel.hybrid:check_replicas": _work("compare replicas (observed)"),
}
"""What a recording of a training run names. Collectives and messages name themselves."""
