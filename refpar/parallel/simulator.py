"""What a pipeline schedule does, found from its lists without running them.

Each stage runs its list in order, and messages between two stages stay in order. A directed edge has room for
``capacity`` messages that are sent and not yet taken::

    capacity   a send waits
    0          until its receive is posted (rendezvous)
    c          while c messages before it are not yet taken
    None       never

Stages like these are a network of Kahn's (1974): whether and where they get stuck depends on the lists and the
capacity, and not on the costs or on who happens to be faster. Only the times do. The least capacity needed::

                               K = 1    K >= 2, M = 1    K >= 2, M >= 2
    GPipe                      0        0                0
    1F1B                       0        0                1

GPipe needs no room: on each boundary all activations have been taken before the first gradient is sent. Only
where a stage holds several slices, so that activations also go from the last stage to the first, does it need
room, and the more the larger M is (M // K in the tests): a reason for sends that never wait.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from refpar.parallel.schedule import (
    Backward,
    Forward,
    Instruction,
    Message,
    RecvActivation,
    RecvGradient,
    ScheduleError,
    SendActivation,
    SendGradient,
    holders,
    other_end,
    validate,
)

Cost = int | float | Fraction


class Deadlock(ScheduleError):
    """A schedule whose stages end up waiting for each other; the text says who waits for whom."""


@dataclass(frozen=True)
class Span:
    """When a forward or backward pass ran."""

    work: Forward | Backward
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Wait:
    """A stage that came no further than the instruction at ``position``, because of the stage ``on``."""

    stage: int
    position: int
    instruction: Instruction
    on: int | None
    """None for a stage that was told to stop."""

    def __str__(self) -> str:
        here = f"stage {self.stage}, position {self.position}, {self.instruction}"
        if self.on is None:
            return f"{here}: stopped"
        need = "take a message" if isinstance(self.instruction, SendActivation | SendGradient) else "send"
        return f"{here}: waits for stage {self.on} to {need}"


@dataclass(frozen=True)
class Simulation:
    """What came of a schedule.

    Attributes
    ----------
    spans : for each stage the passes that it ran, in order
    waits : the stages that did not reach their end; empty where all did
    """

    spans: tuple[tuple[Span, ...], ...]
    waits: tuple[Wait, ...]

    @property
    def finished(self) -> bool:
        """Whether every stage reached its end."""
        return not self.waits

    @property
    def circle(self) -> tuple[int, ...]:
        """The stages that wait for each other, each for the next and the last for the first; or none."""
        on = {wait.stage: wait.on for wait in self.waits}
        for start in sorted(on):
            path = [start]
            while (follower := on.get(path[-1])) is not None and follower not in path:
                path.append(follower)
            if follower == start:
                return tuple(path)
        return ()

    @property
    def makespan(self) -> Fraction:
        """The time at which the last pass ends.

        Raises
        ------
        Deadlock : the schedule did not finish
        """
        if self.waits:
            raise Deadlock("; ".join(map(str, self.waits)))
        return max(spans[-1].end for spans in self.spans)

    @property
    def bubble_of_step(self) -> Fraction:
        """The share of all stages' time in which they idle: (K - 1)/(M + K - 1) at equal costs."""
        return 1 - self._work / (len(self.spans) * self.makespan)

    @property
    def bubble_of_ideal(self) -> Fraction:
        """The time lost, over the time that the work takes where no stage idles: (K - 1)/M at equal costs."""
        return len(self.spans) * self.makespan / self._work - 1

    @property
    def _work(self) -> Fraction:
        return sum((span.end - span.start for spans in self.spans for span in spans), Fraction(0))


def simulate(
    schedule: Sequence[Sequence[Instruction]],
    *,
    capacity: int | None = None,
    forward: Cost | Sequence[Cost] = 1,
    backward: Cost | Sequence[Cost] = 1,
    stop: Mapping[int, int] | None = None,
) -> Simulation:
    """Run the lists on paper, with messages that take no time.

    Parameters
    ----------
    schedule : for each stage its instructions; :func:`refpar.parallel.schedule.validate` is called first
    capacity : messages for which each directed edge between two stages has room; None for no limit
    forward, backward : cost of a pass, above 0; or a cost for each slice. A float counts as the binary
        fraction that it is
    stop : for a stage the position of the instruction that it never begins, as if it had failed there

    Raises
    ------
    ScheduleError : the schedule is invalid
    ValueError : another argument is
    """
    validate(schedule)
    where = holders(schedule)
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise ValueError(f"capacity must be an integer of at least 0, or None for no limit, not {capacity!r}")
    costs: dict[type, list[Fraction]] = {
        Forward: _costs("forward", forward, len(where)),
        Backward: _costs("backward", backward, len(where)),
    }
    run = _Run(schedule, where, capacity, costs, stop or {})

    progress = True
    while progress:
        progress = False
        for stage in range(len(schedule)):
            while run.advance(stage):
                progress = True
    return Simulation(tuple(map(tuple, run.spans)), run.waits())


@dataclass
class _Run:
    """Where each stage stands, and when each message of each edge was sent and taken."""

    schedule: Sequence[Sequence[Instruction]]
    where: Sequence[int]
    capacity: int | None
    costs: Mapping[type, Sequence[Fraction]]
    stop: Mapping[int, int]
    sent: dict[tuple[int, int], list[Fraction]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[int, int], list[Fraction]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.position = [0 for _ in self.schedule]
        self.clock = [Fraction(0) for _ in self.schedule]
        self.spans: list[list[Span]] = [[] for _ in self.schedule]

    def current(self, stage: int) -> Instruction | None:
        position = self.position[stage]
        ended = position == len(self.schedule[stage]) or position == self.stop.get(stage)
        return None if ended else self.schedule[stage][position]

    def advance(self, stage: int) -> bool:
        """Carry out the next instruction of a stage and return True, or return False if it must wait."""
        instruction = self.current(stage)
        if instruction is None:
            return False
        if isinstance(instruction, SendActivation | SendGradient):
            return self.send(stage, instruction)
        if isinstance(instruction, RecvActivation | RecvGradient):
            return self.receive(stage, instruction)
        if isinstance(instruction, Forward | Backward):
            start = self.clock[stage]
            end = start + self.costs[type(instruction)][instruction.v]
            self.spans[stage].append(Span(instruction, start, end))
            self.clock[stage] = end
        self.position[stage] += 1
        return True

    def send(self, stage: int, instruction: Message) -> bool:
        dest = self.peer(instruction)
        sent, taken = self.sent[stage, dest], self.taken[stage, dest]
        ready = self.clock[stage]
        if self.capacity == 0:
            if self.current(dest) != other_end(instruction):
                return False
            ready = max(ready, self.clock[dest])
        elif self.capacity is not None and len(sent) >= self.capacity:
            freed = len(sent) - self.capacity  # the message whose slot this one takes
            if len(taken) <= freed:
                return False
            ready = max(ready, taken[freed])
        sent.append(ready)
        self.clock[stage] = ready
        self.position[stage] += 1
        return True

    def receive(self, stage: int, instruction: Message) -> bool:
        source = self.peer(instruction)
        sent, taken = self.sent[source, stage], self.taken[source, stage]
        if len(taken) == len(sent):
            return False
        self.clock[stage] = max(self.clock[stage], sent[len(taken)])
        taken.append(self.clock[stage])
        self.position[stage] += 1
        return True

    def peer(self, instruction: Message) -> int:
        return self.where[other_end(instruction).v]

    def waits(self) -> tuple[Wait, ...]:
        waits = []
        for stage, (instructions, position) in enumerate(zip(self.schedule, self.position, strict=True)):
            if position < len(instructions):
                instruction = self.current(stage)
                on = self.peer(instruction) if isinstance(instruction, Message) else None
                waits.append(Wait(stage, position, instructions[position], on))
        return tuple(waits)


def _costs(name: str, cost: Cost | Sequence[Cost], slices: int) -> list[Fraction]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * slices
    if len(costs) != slices:
        raise ValueError(f"{name}={cost!r} gives {len(costs)} costs for {slices} slices")
    for value in costs:
        if not (isinstance(value, int | float | Fraction) and 0 < value < math.inf):
            raise ValueError(f"{name}={cost!r}: a cost is a finite number above 0")
    return [Fraction(value) for value in costs]


def replay(events: Iterable[tuple[int, Instruction]], K: int) -> Simulation:
    """Simulate in unit time what a real run recorded.

    Only the order within each stage counts: clocks of different processes do not order events.

    Parameters
    ----------
    events : ``(stage, instruction)`` of all that ran, merged in any way that keeps each stage's order
    K : stages

    Raises
    ------
    ScheduleError : the record is not that of a whole, valid step
    """
    executed: list[list[Instruction]] = [[] for _ in range(K)]
    for stage, instruction in events:
        if stage not in range(K):
            raise ScheduleError(f"event ({stage!r}, {instruction}): there are stages 0 to {K - 1}")
        executed[stage].append(instruction)
    return simulate(executed)


def minimal_capacity(schedule: Sequence[Sequence[Instruction]]) -> int:
    """Return the least capacity of each directed edge with which the schedule finishes.

    Raises
    ------
    Deadlock : it does not finish with any
    """
    unlimited = simulate(schedule)
    if not unlimited.finished:
        raise Deadlock("; ".join(map(str, unlimited.waits)))
    capacity = 0
    while not simulate(schedule, capacity=capacity).finished:
        capacity += 1
    return capacity


def peak_live(instructions: Iterable[Instruction]) -> int:
    """Return how many passes a stage has run forward and not yet backward, at most.

    It is M for GPipe and min(M, K - stage) for 1F1B. Where a stage holds several slices, each counts.
    """
    live = peak = 0
    for instruction in instructions:
        live += isinstance(instruction, Forward) - isinstance(instruction, Backward)
        peak = max(peak, live)
    return peak


def render(simulation: Simulation) -> str:
    """Return the timeline as text: a row for each stage, a column for each unit of time.

    ``F2`` is the forward pass of micro-batch 2, ``-`` its continuation, ``.`` idling; where stages hold
    several slices, ``F2.5`` is that of slice 5. The unit is the largest that divides every time.

    Raises
    ------
    ValueError : there would be more than 1,000 columns
    """
    spans = [span for stage in simulation.spans for span in stage]
    several = len({span.work.v for span in spans}) > len(simulation.spans)
    unit = _common_divisor([time for span in spans for time in (span.start, span.end)])
    columns = max((int(span.end / unit) for span in spans), default=0)
    if columns > 1000:
        raise ValueError(f"the timeline would have {columns} columns: give costs with a larger common divisor")
    table = [["", *map(str, range(columns))]]
    for stage, ran in enumerate(simulation.spans):
        row = ["."] * columns
        for span in ran:
            start, end = int(span.start / unit), int(span.end / unit)
            label = f"{type(span.work).__name__[0]}{span.work.m}" + (f".{span.work.v}" if several else "")
            row[start:end] = [label] + ["-"] * (end - start - 1)
        table.append([f"stage {stage}", *row])
    margin = max(len(row[0]) for row in table)
    width = max((len(cell) for row in table for cell in row[1:]), default=0)
    lines = (" ".join([row[0].ljust(margin), *(cell.ljust(width) for cell in row[1:])]) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def _common_divisor(times: Sequence[Fraction]) -> Fraction:
    scale = math.lcm(*(time.denominator for time in times))
    return Fraction(math.gcd(*(int(time * scale) for time in times)) or 1, scale)
