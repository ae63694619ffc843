"""``refpar schedule``: any pipeline schedule as a timeline, with what follows from it.

A schedule is ``gpipe``, ``1f1b``, or a text file of one's own: a line for each stage, ``F2`` for the forward pass
of micro-batch 2 and ``B2`` for its backward pass; ``F2.5`` where a stage holds several slices of the model and this is
slice 5. Dots and dashes, a leading ``stage 0`` and a line of column numbers mean nothing, so a timeline that is printed
here can be read back::

    stage 0   F0 F1 .  .  B0 B1
    stage 1   .  F0 B0 F1 B1

Receives are put right before the pass that needs them, sends right after the pass that makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from refpar.checks import short
from refpar.parallel.schedule import (
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
    Step,
    gpipe,
    holders,
    one_f_one_b,
    validate,
)
from refpar.parallel.simulator import Simulation, minimal_capacity, peak_live, render, simulate

BUILT_IN = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True)
class Report:
    """A schedule and what was found out about it.

    Attributes
    ----------
    title : what it is
    schedule : for each stage its instructions
    ideal : the timeline with messages that never wait for room
    limited : the run with the room that was asked for; ``ideal`` where none was
    """

    title: str
    schedule: Schedule
    ideal: Simulation
    limited: Simulation

    @property
    def finished(self) -> bool:
        """Whether it comes to its end with the room that was asked for."""
        return self.limited.finished


def report(
    name: str,
    text: str | None = None,
    *,
    stages: int = 4,
    micro_batches: int = 8,
    forward: Fraction = Fraction(1),
    backward: Fraction = Fraction(1),
    capacity: int | None = None,
) -> Report:
    """Build, or read, a schedule and simulate it.

    Parameters
    ----------
    name : ``"gpipe"``, ``"1f1b"``, or the name of what ``text`` was read from
    text : a schedule of one's own; ``stages`` and ``micro_batches`` are then its own too
    forward, backward : cost of a pass
    capacity : messages that each directed edge between two stages has room for; None for no limit

    Raises
    ------
    ScheduleError : the schedule cannot be right
    """
    schedule = BUILT_IN[name](stages, micro_batches) if text is None else parse(text)
    validate(schedule)
    counts = f"{len(schedule)} stages, {_micro_batches(schedule)} micro-batches"
    title = f"{name}, {counts}, forward costs {forward}, backward {backward}"
    ideal = simulate(schedule, forward=forward, backward=backward)
    limited = ideal if capacity is None else simulate(schedule, capacity=capacity, forward=forward, backward=backward)
    return Report(title, schedule, ideal, limited)


def parse(text: str) -> Schedule:
    """Read a schedule of one's own; see the module's docstring.

    Raises
    ------
    ScheduleError : with the line and the word that cannot be read
    """
    work: list[list[Forward | Backward]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"^\s*stage\s*\d+\s*:?", "", line.partition("#")[0]).split()
        if not words or all(word.isdigit() for word in words):
            continue
        found = (_word(word, len(work), number) for word in words if set(word) - {".", "-"})
        work.append(list(found))
    if not work:
        raise ScheduleError("the text names no pass: write a line such as 'F0 F1 B0 B1' for each stage")
    return with_messages(work)


def _word(word: str, stage: int, line: int) -> Forward | Backward:
    match = re.fullmatch(r"([FB])(\d{1,4})(?:\.(\d{1,4}))?", word, re.ASCII)
    if match is None:
        raise ScheduleError(f"line {line}: {short(word)} is no pass: write F2 or B2, or F2.5 for slice 5 of the model")
    letter, m, v = match.groups()
    return (Forward if letter == "F" else Backward)(int(m), stage if v is None else int(v))


def with_messages(work: Sequence[Sequence[Forward | Backward]]) -> Schedule:
    """Return passes with the messages between them, the reduction and the step."""
    where = holders(work)

    def between(stage: int, passes: Iterable[Forward | Backward]) -> Iterable[Instruction]:
        for one in passes:
            m, v = one.m, one.v
            before, after = (-1, 1) if isinstance(one, Forward) else (1, -1)
            receive, send = (RecvActivation, SendActivation) if before < 0 else (RecvGradient, SendGradient)
            if 0 <= v + before < len(where) and where[v + before] != stage:
                yield receive(m, v)
            yield one
            if 0 <= v + after < len(where) and where[v + after] != stage:
                yield send(m, v)

    return tuple((*between(stage, passes), ReduceGradients(), Step()) for stage, passes in enumerate(work))


def lines(report: Report, width: int = 100) -> list[str]:
    """Return what is printed: the timeline, in parts where it is wider than ``width``, and the figures."""
    ideal, out = report.ideal, [report.title, ""]
    out += timeline(ideal, width)
    if not ideal.finished:
        return [*out, *_deadlock(ideal, "DEADLOCK, however much room messages have")]
    of_step, of_ideal = ideal.bubble_of_step, ideal.bubble_of_ideal
    lives = [peak_live(instructions) for instructions in report.schedule]
    needed = minimal_capacity(report.schedule)
    messages = _messages(report.schedule)
    out += [
        "",
        f"time      {ideal.makespan} units, of which each stage works {_busy(ideal)}",
        f"bubble    {of_step} = {float(of_step):.1%} of the step; {of_ideal} = {float(of_ideal):.1%} of the ideal step",
        f"alive     at most {', '.join(map(str, lives))} micro-batches on stages 0 to {len(lives) - 1}",
        f"sent      {messages[0]} activations and {messages[1]} gradients in all",
        f"room      {_room(needed)}",
    ]
    if not report.finished:
        out += _deadlock(report.limited, "DEADLOCK with the room that was asked for")
    elif report.limited.makespan != ideal.makespan:
        out += ["", f"With the room that was asked for it takes {report.limited.makespan} units."]
    return out


def _deadlock(simulation: Simulation, title: str) -> list[str]:
    circle = " -> ".join(f"stage {stage}" for stage in (*simulation.circle, *simulation.circle[:1]))
    return ["", f"{title}{': ' + circle if circle else ''}", *(f"  {wait}" for wait in simulation.waits)]


def timeline(simulation: Simulation, width: int) -> list[str]:
    """Return the timeline in parts of at most ``width`` characters, stacked."""
    table = render(simulation).splitlines()
    longest = max(map(len, table))
    margin = max(len(f"stage {stage} ") for stage in range(len(simulation.spans)))
    cell = next((b - a for a, b in pairwise(m.start() for m in re.finditer(r"\S+", table[0]))), 1)
    most = max(1, (width - margin) // cell)  # columns that fit
    columns = -(-(longest - margin) // cell)
    step = -(-columns // -(-columns // most)) * cell  # parts of about the same width
    parts = [
        [line[:margin].ljust(margin) + line[start : start + step].rstrip() for line in table]
        for start in range(margin, longest, step)
    ]
    return [line for part in parts for line in [*part, ""]][:-1]


def _busy(simulation: Simulation) -> str:
    busy = {sum((span.end - span.start for span in spans), Fraction(0)) for spans in simulation.spans}
    return str(busy.pop()) if len(busy) == 1 else f"{min(busy)} to {max(busy)}"


def _room(needed: int) -> str:
    if needed == 0:
        return "needs none: it also runs where a send waits for its receive (rendezvous)"
    slots = "one free slot" if needed == 1 else f"{needed} free slots"
    return f"needs {slots} for each direction of each boundary; with less it deadlocks"


def _messages(schedule: Schedule) -> tuple[int, int]:
    kinds = [type(i) for instructions in schedule for i in instructions]
    return kinds.count(SendActivation), kinds.count(SendGradient)


def _micro_batches(schedule: Schedule) -> int:
    return 1 + max(i.m for instructions in schedule for i in instructions if isinstance(i, Forward))
