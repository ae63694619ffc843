"""Pipeline schedules as data: what each stage does, in which order, and what follows from that alone.

A pipeline cuts the model into K slices on K stages and the batch into M micro-batches, so that stages work
at the same time. The schedule is the order of work of each stage. Both schedules here compute the same sums;
at equal costs they also take the same time. They differ in how many micro-batches are alive at once::

    gpipe(3, 4)           0  1  2  3  4  5  6  7  8  9  10 11       alive at most
              stage 0     F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0       4  = M
              stage 1     .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .        4
              stage 2     .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .        4

    one_f_one_b(3, 4)     0  1  2  3  4  5  6  7  8  9  10 11
              stage 0     F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3       3  = min(M, K - stage)
              stage 1     .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .        2
              stage 2     .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .        1

**Time.** A stage works for M of M + K - 1 turns, a turn being a forward and a backward pass. Its idle time, the
*bubble*, is (K - 1)/(M + K - 1) of the step, 1/3 above, or (K - 1)/M of the ideal step without idling, 1/2
above. Papers use both; they are different numbers.

**Sent.** Each of the K - 1 boundaries carries M activations one way and M gradients back, 16 messages above.

**Held.** A slice of the model, 3, 2 and 2 of 7 units (:func:`stages_of`); and what it saves for the backward
pass, once for each micro-batch alive.

**Deadlock.** Messages between two ranks arrive in the order in which they were sent and carry no tag. If a
send waits for its receive to be posted (rendezvous), 1F1B deadlocks for every K >= 2 and M >= 2: a stage
sends an activation to the next one, which sends it a gradient, and both wait. One free slot for each
direction of each boundary is enough. GPipe sends one way at a time and needs none.

Instructions name a micro-batch ``m`` and a *virtual stage* ``v``, a slice of the model, so that a stage can
hold several slices (interleaving, Narayanan et al. 2021, section 2.2.2). :func:`validate` and the simulator find
out from the lists who holds which slice; neighbouring slices on one stage pass their values on without a
message. No interleaved schedule is built here: beware that one deadlocks on a ragged last group unless K
divides M.

Timeline, bubble, live micro-batches and the room that messages need are computed in :mod:`refpar.parallel.simulator`.

GPipe: Huang et al. 2018, section 2.3, figure 2c. 1F1B with a flush: Narayanan et al. 2019 (PipeDream),
section 3.2; Fan et al. 2020 (DAPPLE), section 3; Narayanan et al. 2021, section 2.2.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refpar import split

# ------------------------------------------------------------------------------------------ instructions


@dataclass(frozen=True, slots=True)
class _Work:
    m: int
    """The micro-batch."""
    v: int
    """The virtual stage that does it: a slice of the model."""

    def __post_init__(self) -> None:
        for name, value in (("m", self.m), ("v", self.v)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{type(self).__name__}: {name} must be an integer of at least 0, not {value!r}")


class Forward(_Work):
    """Run the slice forward, and keep what its backward pass needs."""


class Backward(_Work):
    """Run the slice backward, add to its gradients, and drop what was kept."""


class SendActivation(_Work):
    """Send the output of the slice to the holder of slice v + 1."""


class RecvActivation(_Work):
    """Receive the input of the slice from the holder of slice v - 1."""


class SendGradient(_Work):
    """Send the gradient of the slice's input to the holder of slice v - 1."""


class RecvGradient(_Work):
    """Receive the gradient of the slice's output from the holder of slice v + 1."""


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Sum the accumulated gradients over the data-parallel replicas of this stage."""


@dataclass(frozen=True, slots=True)
class Step:
    """Update the parameters of this stage."""


Instruction = (
    Forward | Backward | SendActivation | RecvActivation | SendGradient | RecvGradient | ReduceGradients | Step
)
Message = SendActivation | RecvActivation | SendGradient | RecvGradient
Schedule = tuple[tuple[Instruction, ...], ...]
"""For each stage (rank of the pipeline) its instructions, in order."""


class ScheduleError(ValueError):
    """A schedule that cannot be right; the text names the stage, the position and the instruction."""


# --------------------------------------------------------------------------------------------- schedules


def gpipe(K: int, M: int) -> Schedule:
    """Return GPipe's schedule: all forward passes, then all backward passes, last micro-batch first.

    Parameters
    ----------
    K : stages, at least 1
    M : micro-batches, at least 1; fewer than K is fine

    Raises
    ------
    ValueError : K or M is no integer of at least 1
    """
    _check_counts(K, M)
    return tuple(
        (
            *(i for m in range(M) for i in _forward(m, v, K)),
            *(i for m in reversed(range(M)) for i in _backward(m, v, K)),
            ReduceGradients(),
            Step(),
        )
        for v in range(K)
    )


def one_f_one_b(K: int, M: int) -> Schedule:
    """Return the 1F1B schedule: after a warm-up each forward pass is followed by the oldest backward pass.

    Parameters and errors as in :func:`gpipe`.
    """
    _check_counts(K, M)
    return tuple(_one_f_one_b_stage(v, K, M) for v in range(K))


def _one_f_one_b_stage(v: int, K: int, M: int) -> tuple[Instruction, ...]:
    ahead = warm_up(v, K, M)
    instructions: list[Instruction] = []
    for m in range(ahead):  # warm-up: until the first gradient can have come back
        instructions += _forward(m, v, K)
    for m in range(M - ahead):  # steady: one forward, one backward
        instructions += _forward(ahead + m, v, K)
        instructions += _backward(m, v, K)
    for m in range(M - ahead, M):  # cool-down
        instructions += _backward(m, v, K)
    return (*instructions, ReduceGradients(), Step())


def warm_up(stage: int, K: int, M: int) -> int:
    """Return how many forward passes a stage runs before its first pair of forward and backward.

    One for each stage behind it, and never more than there are micro-batches: a warm-up of
    ``K - 1 - stage`` hangs for M < K (pytorch/torchtitan#775).
    """
    return min(K - 1 - stage, M)


def _forward(m: int, v: int, K: int) -> Iterator[Instruction]:
    if v > 0:
        yield RecvActivation(m, v)
    yield Forward(m, v)
    if v < K - 1:
        yield SendActivation(m, v)


def _backward(m: int, v: int, K: int) -> Iterator[Instruction]:
    if v < K - 1:
        yield RecvGradient(m, v)
    yield Backward(m, v)
    if v > 0:
        yield SendGradient(m, v)


def stages_of(units: int, stages: int | Sequence[int]) -> tuple[range, ...]:
    """Return which units of the model each (virtual) stage holds, as ranges of their global numbers.

    Parameters
    ----------
    units : how many units the model has
    stages : the number of stages, over which :mod:`refpar.split` divides the units near-evenly, the first
        ``units % stages`` stages holding one more; or the number of units of each stage, by hand

    Raises
    ------
    ValueError : a stage would hold no unit, or the counts given do not add up to ``units``

    Examples
    --------
    >>> stages_of(6, [3, 2, 1])
    (range(0, 3), range(3, 5), range(5, 6))
    """
    _check_at_least_one("units", units)
    if isinstance(stages, int):
        _check_at_least_one("stages", stages)
        counts = split.sizes(units, stages)
    else:
        counts = list(stages)
    for stage, count in enumerate(counts):
        if type(count) is not int or count < 1:
            raise ValueError(
                f"stage {stage} of {len(counts)} would hold {count!r} units of {units}: each stage needs at least one"
            )
    if sum(counts) != units:
        raise ValueError(f"stages={counts} adds up to {sum(counts)} units, and the model has {units}")
    return tuple(split.ranges(counts))


def _check_counts(K: int, M: int) -> None:
    _check_at_least_one("K (stages)", K)
    _check_at_least_one("M (micro-batches)", M)


def _check_at_least_one(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


# -------------------------------------------------------------------------------------------- validation


def holders(schedule: Sequence[Sequence[Instruction]]) -> tuple[int, ...]:
    """Return for each virtual stage the stage (rank of the pipeline) whose list names it.

    Raises
    ------
    ScheduleError : a slice is named by two stages or by none, a stage names none, or a list holds
        something that is no instruction
    """
    where: dict[int, int] = {}
    for stage, instructions in enumerate(schedule):
        for position, instruction in enumerate(instructions):
            if not isinstance(instruction, Instruction):
                raise _error(stage, position, instruction, "this is no instruction")
            if isinstance(instruction, _Work) and where.setdefault(instruction.v, stage) != stage:
                raise _error(stage, position, instruction, f"stage {where[instruction.v]} holds that slice")
        if stage not in where.values():
            raise ScheduleError(f"stage {stage} holds no slice of the model: none of its instructions names one")
    if sorted(where) != list(range(len(where))) or not where:
        raise ScheduleError(f"slices are numbered from 0 without a gap, and these are held: {sorted(where)}")
    return tuple(where[v] for v in range(len(where)))


def validate(schedule: Sequence[Sequence[Instruction]], M: int | None = None) -> None:
    """Refuse a schedule that does not do each piece of work once, in an order that data permits.

    Each slice of each micro-batch runs forward once and then backward once; what comes from another stage is
    received once, before it is used, and what goes there is sent once, after it is made; each list ends with
    its only reduction and its only step (one for every micro-batch is a classic mistake); and on each directed
    edge messages are received in the order in which they are sent. Whether stages nevertheless end up waiting
    for each other depends on the transport: ask :func:`refpar.parallel.simulator.simulate`.

    Parameters
    ----------
    schedule : for each stage its instructions
    M : micro-batches; where it is None, as many as are named

    Raises
    ------
    ScheduleError : with the stage, position and instruction at fault
    """
    where = holders(schedule)
    if M is None:
        M = 1 + max(i.m for instructions in schedule for i in instructions if isinstance(i, _Work))
    for stage, instructions in enumerate(schedule):
        _validate_stage(stage, instructions, where, M)
    _validate_edges(schedule, where)


def _validate_stage(stage: int, instructions: Sequence[Instruction], where: Sequence[int], M: int) -> None:
    required = _required(stage, where, M)
    at: dict[Instruction, int] = {}
    for position, instruction in enumerate(instructions):
        if instruction in at:
            raise _error(stage, position, instruction, f"a second time, after position {at[instruction]}")
        if instruction not in required:
            held = [v for v, holder in enumerate(where) if holder == stage]
            why = f"no place for it on a stage that holds slices {held} of {len(where)}, with {M} micro-batches"
            raise _error(stage, position, instruction, why)
        at[instruction] = position
    for instruction, before in required.items():
        if instruction not in at:
            raise ScheduleError(f"stage {stage}: {instruction} is missing from its {len(instructions)} instructions")
        for earlier in before:
            if at.get(earlier, -1) > at[instruction]:
                raise _error(stage, at[instruction], instruction, f"{earlier} must precede it, not follow")


def _required(stage: int, where: Sequence[int], M: int) -> dict[Instruction, list[Instruction]]:
    """All that a stage must do, each with those of its instructions that must come before."""
    required: dict[Instruction, list[Instruction]] = {}
    for m in range(M):
        for v, holder in enumerate(where):
            if holder != stage:
                continue
            forward, backward = Forward(m, v), Backward(m, v)
            required[forward], required[backward] = [], [forward]
            if v > 0 and where[v - 1] == stage:
                required[forward].append(Forward(m, v - 1))
            elif v > 0:
                required[RecvActivation(m, v)] = []
                required[forward].append(RecvActivation(m, v))
                required[SendGradient(m, v)] = [backward]
            if v < len(where) - 1 and where[v + 1] == stage:
                required[backward].append(Backward(m, v + 1))
            elif v < len(where) - 1:
                required[RecvGradient(m, v)] = []
                required[backward].append(RecvGradient(m, v))
                required[SendActivation(m, v)] = [forward]
    required[ReduceGradients()] = list(required)  # once all is done, and so the last but one
    required[Step()] = [ReduceGradients()]
    return required


def _validate_edges(schedule: Sequence[Sequence[Instruction]], where: Sequence[int]) -> None:
    sends: dict[tuple[int, int], list[tuple[int, Message]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Message]]] = defaultdict(list)
    for stage, instructions in enumerate(schedule):
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, SendActivation | SendGradient):
                sends[stage, where[other_end(instruction).v]].append((position, instruction))
            elif isinstance(instruction, RecvActivation | RecvGradient):
                receives[where[other_end(instruction).v], stage].append((position, instruction))
    for (source, dest), messages in sends.items():
        # Each stage by itself has been found complete, so there are as many receives as sends.
        pairs = zip(messages, receives[source, dest], strict=True)
        for number, ((position, send), (other_position, receive)) in enumerate(pairs):
            if other_end(send) != receive:
                raise ScheduleError(
                    f"message {number} from stage {source} to stage {dest}: "
                    f"stage {source}, position {position}, is {send}, whose receive is {other_end(send)}, "
                    f"but stage {dest}, position {other_position}, is {receive}; without tags both must keep one order"
                )


def other_end(instruction: Message) -> Message:
    """Return the receive of a send, or the send of a receive: its ``v`` is the slice at the other end."""
    m, v = instruction.m, instruction.v
    if isinstance(instruction, SendActivation):
        return RecvActivation(m, v + 1)
    if isinstance(instruction, RecvActivation):
        return SendActivation(m, v - 1)
    if isinstance(instruction, SendGradient):
        return RecvGradient(m, v - 1)
    return SendGradient(m, v + 1)


def _error(stage: int, position: int, instruction: object, why: str) -> ScheduleError:
    return ScheduleError(f"stage {stage}, position {position}, {instruction}: {why}")
