"""Timelines as files for https://ui.perfetto.dev and chrome://tracing, in the trace-event format.

A file is one JSON object whose ``traceEvents`` is a list of small objects, told apart by ``ph``::

    M    a name for a process (here: a schedule, or one run) or for a thread (here: a stage, or a rank)
    X    a slice: ``ts`` and ``dur`` in microseconds; those of one thread lie apart or inside one another
    s f  an arrow from inside one slice to inside another: here a message, under an ``id`` of its own

:func:`problems` holds a file to these rules, because a viewer that meets an event it does not understand drops
it without a word. Trace Event Format: "Event Descriptions", sections Complete Events, Flow Events, Metadata Events.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from refpar.parallel.schedule import Forward
from refpar.parallel.simulator import Simulation
from refpar.teach.recorder import Event, Run

UNIT = 1000
"""Microseconds that stand for one unit of time of a simulation: they are shown as milliseconds."""

COLOURS = {"F": "thread_state_running", "B": "thread_state_iowait", "wait": "grey", "send": "yellow"}
"""Names of colours of chrome://tracing; Perfetto chooses its own, by name."""


def of_schedule(simulation: Simulation, name: str) -> dict[str, Any]:
    """Return the file of a simulated schedule: a row for each stage, arrows where activations and gradients go."""
    events = [_name("process", 0, 0, name)]
    ends: dict[tuple[str, int, int], tuple[int, int]] = {}  # (letter, m, v): stage, microsecond
    starts: dict[tuple[str, int, int], tuple[int, int]] = {}
    for stage, spans in enumerate(simulation.spans):
        events.append(_name("thread", 0, stage, f"stage {stage}"))
        for span in spans:
            letter, m, v = ("F" if isinstance(span.work, Forward) else "B"), span.work.m, span.work.v
            start, end = _microseconds(span.start), _microseconds(span.end)
            starts[letter, m, v], ends[letter, m, v] = (stage, start), (stage, end)
            what = {"micro-batch": m, "slice": v, "pass": "forward" if letter == "F" else "backward"}
            events.append(_slice(f"{letter}{m}", "compute", 0, stage, start, end - start, what, COLOURS[letter]))
    number = 0
    for (letter, m, v), (stage, end) in ends.items():
        other, start = starts.get((letter, m, v + 1 if letter == "F" else v - 1), (stage, 0))
        if other != stage:
            word = "activation" if letter == "F" else "gradient"
            events += _arrow(number, f"{word} {m}", (0, stage, end - 1), (0, other, start))
            number += 1
    return _file(events)


def of_runs(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the file of recorded runs: a group of rows for each run, a row for each rank."""
    runs = list(runs)
    events: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        shared = f", {len(run.ranks)} ranks on {run.cores} cores: time-shared" if run.time_shared else ""
        events.append(_name("process", number, 0, f"{run.name}{shared}"))
        for rank, happened in enumerate(run.ranks):
            thread = _thread(number, rank)
            events.append(_name("thread", number, thread, f"rank {rank}"))
            events += [_happened(number, thread, event) for event in happened if event.kind != "note"]
        events += _messages(number, run)
    origin = min((event["ts"] for event in events if event["ph"] != "M"), default=0)
    for event in events:
        if event["ph"] != "M":
            event["ts"] = round(event["ts"] - origin, 3)
    return _file(events)


def _happened(run: int, thread: int, event: Event) -> dict[str, Any]:
    what = {"what": event.name}
    if event.to is not None:
        what |= {"to": f"rank {event.to}", "bytes sent": str(event.sent)}
    if event.source is not None:
        what |= {"from": f"rank {event.source}", "bytes received": str(event.received)}
    label = event.name.partition(" ")[0] if event.kind == "call" else event.name
    if event.kind == "wait":
        label = f"wait for rank {event.source}"
    elif event.kind in ("send", "take"):
        label = event.kind
    dur = (event.end - event.start) / 1000
    colour = COLOURS.get(event.name[:1] if event.kind == "compute" else event.kind)
    return _slice(label, event.kind, run, thread, event.start / 1000, dur, what, colour)


def _messages(number: int, run: Run) -> list[dict[str, Any]]:
    """Return an arrow for each message: the n-th that a rank sends to another is the n-th that this one gets."""
    sent: dict[tuple[int, int, int | None], Event] = {}
    arrows: list[dict[str, Any]] = []
    for rank, happened in enumerate(run.ranks):
        for event in happened:
            if event.to is not None:
                sent[rank, event.to, event.number_sent] = event
    for rank, happened in enumerate(run.ranks):
        for event in happened:
            if event.kind != "wait" or event.source is None or not event.received:
                continue
            message = sent.get((event.source, rank, event.number_received))
            if message is not None:
                here, there = _thread(number, rank), _thread(number, event.source)
                leaves, comes = message.start / 1000, max(event.end / 1000 - 0.001, message.start / 1000)
                arrows += _arrow(len(arrows), event.name, (number, there, leaves), (number, here, comes))
    return arrows


def _thread(run: int, rank: int) -> int:
    """Return a thread number that no other run uses: viewers take a number that comes twice for one thread."""
    return run * 1000 + rank


def _microseconds(time: Fraction) -> int:
    return round(time * UNIT)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    name: str, kind: str, pid: int, tid: int, ts: float, dur: float, args: Mapping[str, Any], colour: str | None
) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": dict(args)}
    return event | ({"cname": colour} if colour else {})


Place = tuple[int, int, float]


def _arrow(number: int, name: str, tail: Place, head: Place) -> list[dict[str, Any]]:
    common = {"name": name, "cat": "message"}
    ids = {"id": f"{tail[0]}.{number}"}
    (pid, tid, ts), (pid2, tid2, ts2) = tail, head
    return [
        {"ph": "s", **common, **ids, "pid": pid, "tid": tid, "ts": ts},
        {"ph": "f", "bp": "e", **common, **ids, "pid": pid2, "tid": tid2, "ts": ts2},
    ]


def _file(events: list[dict[str, Any]]) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ------------------------------------------------------------------------------------------ validation


def problems(file: Any) -> list[str]:
    """Return what is wrong with a file by the rules of the format: a sentence each, none where it is right."""
    if not isinstance(file, dict) or not isinstance(file.get("traceEvents"), list):
        return ["the file is no object with a list traceEvents"]
    events = file["traceEvents"]
    found = [f"event {i}: {why}" for i, event in enumerate(events) for why in _wrong(event)]
    if found:
        return found
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (pid, tid), slices in rows.items():
        found += [f"process {pid}, thread {tid}: {why}" for why in _crossing(slices)]
    return found + _loose(events, rows)


REQUIRED: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "M": {"args": dict},
    "X": {"ts": (int, float), "dur": (int, float), "cat": str},
    "s": {"ts": (int, float), "id": (str, int), "cat": str},
    "f": {"ts": (int, float), "id": (str, int), "cat": str},
}


def _wrong(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in REQUIRED:
        return [f"{event!r:.60} has no ph of {', '.join(REQUIRED)}"]
    required = {"name": str, "pid": int, "tid": int, **REQUIRED[event["ph"]]}
    found = [f"{key} is {event.get(key)!r}" for key, kind in required.items() if not isinstance(event.get(key), kind)]
    numbers = [event[key] for key in ("ts", "dur") if key in event and not found]
    return found + [f"a time of {x}" for x in numbers if not (math.isfinite(x) and x >= 0)]


TOLERANCE = 0.002
"""Microseconds. Times are rounded to nanoseconds, of which two may fall either way."""


def _crossing(slices: Sequence[tuple[float, float]]) -> list[str]:
    """Slices must lie apart or inside one another: of two that cross, a viewer drops one."""
    found: list[str] = []
    open_: list[tuple[float, float]] = []
    for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ and open_[-1][1] <= start + TOLERANCE:
            open_.pop()
        if open_ and end > open_[-1][1] + TOLERANCE:
            found.append(f"the slice {start} .. {end} crosses {open_[-1][0]} .. {open_[-1][1]}")
        open_.append((start, end))
    return found


def _loose(
    events: Sequence[Mapping[str, Any]], rows: Mapping[tuple[int, int], Sequence[tuple[float, float]]]
) -> list[str]:
    """An arrow has one tail and one head, not earlier than it, and both inside slices."""
    ends: dict[Any, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    found = []
    for event in events:
        if event["ph"] in "sf":
            if event["ph"] in ends[event["id"]]:
                found.append(f"arrow {event['id']} has two events {event['ph']}")
            ends[event["id"]][event["ph"]] = event
    covered = {row: _covered(slices) for row, slices in rows.items()}
    for number, pair in ends.items():
        if set(pair) != {"s", "f"}:
            found.append(f"arrow {number} has only {', '.join(pair)}")
        elif pair["f"]["ts"] < pair["s"]["ts"] - TOLERANCE:
            found.append(f"arrow {number} goes back in time")
        for event in pair.values():
            around = covered.get((event["pid"], event["tid"]), [])
            last = bisect.bisect_right(around, (event["ts"] + TOLERANCE, math.inf)) - 1
            if last < 0 or around[last][1] < event["ts"] - TOLERANCE:
                found.append(f"arrow {number}: its {event['ph']} lies in no slice")
    return found


def _covered(slices: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the slices of a row that lie in no other, in order."""
    outermost: list[tuple[float, float]] = []
    for start, end in sorted(slices):
        if not outermost or end > outermost[-1][1]:
            outermost.append((start, end))
    return outermost
