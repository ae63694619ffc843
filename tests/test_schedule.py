"""Pipeline schedules as lists: complete, in order, free of deadlock, and of the published shape and cost."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.parallel.schedule import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ScheduleError,
    SendActivation,
    SendGradient,
    Step,
    gpipe,
    holders,
    one_f_one_b,
    stages_of,
    validate,
)
from refpar.parallel.simulator import Deadlock, minimal_capacity, peak_live, render, replay, simulate

END = [ReduceGradients(), Step()]

stages = st.integers(1, 8)
micro_batches = st.integers(1, 16)
builders = st.sampled_from([gpipe, one_f_one_b])
capacities = st.sampled_from([0, 1, 2, None])
costs = st.fractions(Fraction(1, 7), 5, max_denominator=7)
small_schedules = st.builds(lambda build, K, M: build(K, M), builders, st.integers(1, 4), st.integers(1, 5))


def gpipe_in_slices(K, V, M):
    """GPipe where stage r holds the slices r, r + K, ...: neighbours on one stage exchange no message."""
    last = K * V - 1
    schedule = []
    for stage in range(K):
        instructions = []
        for v in range(stage, K * V, K):
            for m in range(M):
                instructions += [RecvActivation(m, v)] * (v > 0 and K > 1)
                instructions += [Forward(m, v)]
                instructions += [SendActivation(m, v)] * (v < last and K > 1)
        for v in reversed(range(stage, K * V, K)):
            for m in reversed(range(M)):
                instructions += [RecvGradient(m, v)] * (v < last and K > 1)
                instructions += [Backward(m, v)]
                instructions += [SendGradient(m, v)] * (v > 0 and K > 1)
        schedule.append(instructions + END)
    return schedule


class WrongData(Exception):
    """A pass met data that is not there, or not its own."""


def execute(schedule, capacity, seed):
    """Carry the lists out on labelled data, the next stage to move being drawn at random; return the positions reached.

    Written without the simulator and without `validate`. ``what`` of a message is (kind, m, slice that needs it).
    """
    rng = random.Random(seed)
    where = {i.v: stage for stage, instructions in enumerate(schedule) for i in instructions if hasattr(i, "v")}
    last = max(where)
    position = [0] * len(schedule)
    queues = {}
    have = [set() for _ in schedule]  # what each stage holds, in terms of (kind, m, slice)
    log = [Counter() for _ in schedule]

    def message(i):
        match i:
            case SendActivation(m, v):
                return v + 1, ("activation", m, v + 1), ("output", m, v)
            case SendGradient(m, v):
                return v - 1, ("gradient", m, v - 1), ("input gradient", m, v)
            case RecvActivation(m, v):
                return v - 1, ("activation", m, v), None
            case RecvGradient(m, v):
                return v + 1, ("gradient", m, v), None

    def consume(stage, thing):
        if thing not in have[stage]:
            raise WrongData(thing)
        have[stage].remove(thing)

    def move(stage):
        i = schedule[stage][position[stage]]
        if isinstance(i, SendActivation | SendGradient):
            other, what, source = message(i)
            dest = where.get(other)
            if dest is None or dest == stage:
                raise WrongData(i)
            queue = queues.setdefault((stage, dest), deque())
            if capacity == 0:
                partner = schedule[dest][position[dest]] if position[dest] < len(schedule[dest]) else None
                posted = isinstance(partner, RecvActivation | RecvGradient) and where[message(partner)[0]] == stage
                if not posted or queue:
                    return False
            elif capacity is not None and len(queue) >= capacity:
                return False
            consume(stage, source)
            queue.append(what)
        elif isinstance(i, RecvActivation | RecvGradient):
            other, what, _ = message(i)
            queue = queues.setdefault((where.get(other), stage), deque())
            if not queue:
                return False
            if queue.popleft() != what:
                raise WrongData(i)
            have[stage].add(what)
        elif isinstance(i, Forward):
            if i.v > 0:
                consume(
                    stage, ("activation" if where[i.v - 1] != stage else "output", i.m, i.v - (where[i.v - 1] == stage))
                )
            have[stage] |= {("saved", i.m, i.v)} | ({("output", i.m, i.v)} if i.v < last else set())
        elif isinstance(i, Backward):
            consume(stage, ("saved", i.m, i.v))
            if i.v < last and where[i.v + 1] != stage:
                consume(stage, ("gradient", i.m, i.v))
            elif i.v < last:
                consume(stage, ("input gradient", i.m, i.v + 1))
            if i.v > 0:
                have[stage].add(("input gradient", i.m, i.v))
        log[stage][i] += 1
        position[stage] += 1
        return True

    waiting = set()
    while True:
        able = [s for s in range(len(schedule)) if position[s] < len(schedule[s]) and s not in waiting]
        if not able:
            return position, log, have
        stage = rng.choice(able)
        if move(stage):
            waiting.clear()
        else:
            waiting.add(stage)


# ------------------------------------------------------------------------------------------- the schedules


def timeline(schedule, **costs):
    return render(simulate(schedule, **costs)).splitlines()


def test_gpipe_is_two_triangles():
    """Forward in order, backward in the reverse order (Huang et al., figure 2c)."""
    assert timeline(gpipe(3, 4)) == [
        "        0  1  2  3  4  5  6  7  8  9  10 11",
        "stage 0 F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0",
        "stage 1 .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .",
        "stage 2 .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .",
    ]


def test_one_f_one_b_alternates():
    """The last stage alternates from its first micro-batch on, each stage before it one forward pass later."""
    assert timeline(one_f_one_b(3, 4)) == [
        "        0  1  2  3  4  5  6  7  8  9  10 11",
        "stage 0 F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "stage 1 .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "stage 2 .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]


def test_one_f_one_b_with_fewer_micro_batches_than_stages():
    """The warm-up is cut to M passes: otherwise it waits for micro-batches that do not exist."""
    assert timeline(one_f_one_b(4, 2)) == [
        "        0  1  2  3  4  5  6  7  8  9",
        "stage 0 F0 F1 .  .  .  .  .  B0 .  B1",
        "stage 1 .  F0 F1 .  .  .  B0 .  B1 .",
        "stage 2 .  .  F0 F1 .  B0 .  B1 .  .",
        "stage 3 .  .  .  F0 B0 F1 B1 .  .  .",
    ]


def test_the_lists_of_two_stages_written_out():
    """Messages stand where data needs them: received just before use, sent as soon as made."""
    assert one_f_one_b(2, 2) == (
        (
            Forward(0, 0),
            SendActivation(0, 0),
            Forward(1, 0),
            SendActivation(1, 0),
            RecvGradient(0, 0),
            Backward(0, 0),
            RecvGradient(1, 0),
            Backward(1, 0),
            ReduceGradients(),
            Step(),
        ),
        (
            RecvActivation(0, 1),
            Forward(0, 1),
            Backward(0, 1),
            SendGradient(0, 1),
            RecvActivation(1, 1),
            Forward(1, 1),
            Backward(1, 1),
            SendGradient(1, 1),
            ReduceGradients(),
            Step(),
        ),
    )
    assert gpipe(1, 2) == ((Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0), ReduceGradients(), Step()),)


@given(builders, stages, micro_batches)
@settings(max_examples=100)
def test_schedules_are_complete(build, K, M):
    """Each stage runs each micro-batch forward once and later backward once; then one reduction and one step."""
    schedule = build(K, M)
    validate(schedule, M)
    assert holders(schedule) == tuple(range(K))
    for stage, instructions in enumerate(schedule):
        for m in range(M):
            assert instructions.index(Forward(m, stage)) < instructions.index(Backward(m, stage))
        kinds = Counter(type(i) for i in instructions)
        assert kinds[Forward] == kinds[Backward] == M
        assert kinds[RecvActivation] == kinds[SendGradient] == M * (stage > 0)
        assert kinds[SendActivation] == kinds[RecvGradient] == M * (stage < K - 1)
        assert list(instructions[-2:]) == END
        assert kinds[ReduceGradients] == kinds[Step] == 1  # siboehm/ShallowSpeed@e42f0e5: a step for every micro-batch


@given(builders, stages, micro_batches, capacities, st.integers(0, 2**32))
@settings(max_examples=100)
def test_schedules_carry_the_right_data(build, K, M, capacity, seed):
    """Whoever is fast, each pass gets its own micro-batch's data, and nothing is left over (PiPPy#1088, #957)."""
    schedule = build(K, M)
    simulation = simulate(schedule, capacity=capacity)
    position, _, have = execute(schedule, capacity, seed)
    reached = {wait.stage: wait.position for wait in simulation.waits}
    assert position == [reached.get(stage, len(instructions)) for stage, instructions in enumerate(schedule)]
    assert not simulation.finished or not any(have)


@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_fewer_micro_batches_than_stages_finish(build, M):
    """No hang for M < K (Megatron-LM@08ddde0c3b, pytorch/torchtitan#775)."""
    assert simulate(build(4, M), capacity=1).finished


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_counts_are_checked(build, value):
    """What is no integer of at least 1 is refused by name and value."""
    with pytest.raises(ValueError, match=rf"^K \(stages\) must be an integer of at least 1, not {value!r}$"):
        build(value, 2)
    with pytest.raises(ValueError, match=rf"^M \(micro-batches\) must be an integer of at least 1, not {value!r}$"):
        build(2, value)


def test_instructions_are_small_values():
    """They compare by value and kind, are hashable, travel between processes and refuse nonsense."""
    assert Forward(1, 2) == Forward(1, 2) != Backward(1, 2)
    assert pickle.loads(pickle.dumps(one_f_one_b(3, 3))) == one_f_one_b(3, 3)
    assert str(Forward(1, 2)) == "Forward(m=1, v=2)"
    for m, v in [(-1, 0), (0, -1), (0.0, 0), (0, True)]:
        with pytest.raises(ValueError, match=r"Forward: [mv] must be an integer of at least 0, not"):
            Forward(m, v)


# ------------------------------------------------------------------------------------------------ validation


@given(small_schedules, st.data())
@settings(max_examples=100)
def test_validation_agrees_with_execution(schedule, data):
    """Two instructions of a stage swapped: refused exactly where the lists cannot run to the end on the right data."""
    lists = [list(instructions) for instructions in schedule]
    swapped = lists[data.draw(st.integers(0, len(lists) - 1))]
    i, j = (data.draw(st.integers(0, len(swapped) - 1)) for _ in range(2))
    swapped[i], swapped[j] = swapped[j], swapped[i]
    try:
        position, _, _ = execute(lists, None, seed=0)
        right = all(at == len(li) for at, li in zip(position, lists, strict=True)) and all(
            li[-2:] == END for li in lists
        )
    except WrongData:
        right = False
    try:
        accepted = simulate(lists).finished
    except ScheduleError:
        accepted = False
    assert accepted == right


@given(small_schedules, st.data())
@settings(max_examples=100)
def test_a_missing_or_repeated_instruction_is_refused(schedule, data):
    """Take any instruction away, or repeat it anywhere later: the error names it and its stage."""
    stage = data.draw(st.integers(0, len(schedule) - 1))
    instructions = list(schedule[stage])
    at = data.draw(st.integers(0, len(instructions) - 1))
    M = sum(isinstance(i, Forward) for i in instructions)
    if data.draw(st.booleans()):
        again = data.draw(st.integers(at + 1, len(instructions)))
        instructions.insert(again, instructions[at])
        message = f"stage {stage}, position {again}, {instructions[at]}: a second time, after position {at}"
    else:
        gone = instructions.pop(at)
        message = f"stage {stage}: {gone} is missing from its {len(instructions)} instructions"
    with pytest.raises(ScheduleError) as caught:
        validate([*schedule[:stage], instructions, *schedule[stage + 1 :]], M)
    assert str(caught.value) == message


def changed(schedule, stage, at, *replacement, width=1):
    lists = [list(instructions) for instructions in schedule]
    lists[stage][at : at + width] = replacement
    return lists


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        pytest.param(
            changed(gpipe(2, 2), 1, 0, Forward(0, 1), RecvActivation(0, 1), width=2),
            "stage 1, position 0, Forward(m=0, v=1): RecvActivation(m=0, v=1) must precede it, not follow",
            id="received after use",
        ),
        pytest.param(
            changed(gpipe(2, 1), 0, 0, SendActivation(0, 0), Forward(0, 0), width=2),
            "stage 0, position 0, SendActivation(m=0, v=0): Forward(m=0, v=0) must precede it, not follow",
            id="sent before it is made",
        ),
        pytest.param(
            changed(gpipe(2, 1), 0, 2, Backward(0, 0), RecvGradient(0, 0), width=2),
            "stage 0, position 2, Backward(m=0, v=0): RecvGradient(m=0, v=0) must precede it, not follow",
            id="gradient received after use",
        ),
        pytest.param(
            changed(gpipe(2, 1), 1, 2, SendGradient(0, 1), Backward(0, 1), width=2),
            "stage 1, position 2, SendGradient(m=0, v=1): Backward(m=0, v=1) must precede it, not follow",
            id="gradient sent before it is made",
        ),
        pytest.param(
            changed(gpipe(1, 1), 0, 0, Backward(0, 0), Forward(0, 0), width=2),
            "stage 0, position 0, Backward(m=0, v=0): Forward(m=0, v=0) must precede it, not follow",
            id="backward before forward",
        ),
        pytest.param(
            changed(gpipe(1, 2), 0, 3, ReduceGradients(), Backward(0, 0), width=2),
            "stage 0, position 3, ReduceGradients(): Backward(m=0, v=0) must precede it, not follow",
            id="reduced before the last backward",
        ),
        pytest.param(
            changed(gpipe(1, 1), 0, 2, Step(), ReduceGradients(), width=2),
            "stage 0, position 2, Step(): ReduceGradients() must precede it, not follow",
            id="step before reduction",
        ),
        pytest.param(
            # siboehm/ShallowSpeed@e42f0e5
            changed(one_f_one_b(1, 2), 0, 2, Step(), width=0),
            "stage 0, position 6, Step(): a second time, after position 2",
            id="a step for each micro-batch",
        ),
        pytest.param(
            # DeepSpeed#1264: ZeRO takes each micro-batch for the last one
            changed(one_f_one_b(2, 2), 1, 3, ReduceGradients(), width=0),
            "stage 1, position 9, ReduceGradients(): a second time, after position 3",
            id="a reduction for each micro-batch",
        ),
        pytest.param(
            changed(gpipe(2, 1), 1, 3, ReduceGradients(), SendGradient(0, 1), width=2),
            "stage 1, position 3, ReduceGradients(): SendGradient(m=0, v=1) must precede it, not follow",
            id="work after the reduction",
        ),
        pytest.param(
            changed(gpipe(2, 1), 0, 0, RecvActivation(0, 0), width=0),
            "stage 0, position 0, RecvActivation(m=0, v=0): no place for it on a stage that holds slices [0] of 2, "
            "with 1 micro-batches",
            id="the first slice receives",
        ),
        pytest.param(
            changed(gpipe(2, 1), 1, 1, Forward(0, 0), width=0),
            "stage 1, position 1, Forward(m=0, v=0): stage 0 holds that slice",
            id="another stage's slice",
        ),
        pytest.param(
            changed(gpipe(2, 1), 1, 1, "forward", width=0),
            "stage 1, position 1, forward: this is no instruction",
            id="no instruction",
        ),
        pytest.param(
            [*gpipe(2, 1), END],
            "stage 2 holds no slice of the model: none of its instructions names one",
            id="a stage without a slice",
        ),
        pytest.param(
            [gpipe(2, 1)[0], [Forward(0, 3), Backward(0, 3), *END]],
            "slices are numbered from 0 without a gap, and these are held: [0, 3]",
            id="slices that nobody holds",
        ),
        pytest.param([], "slices are numbered from 0 without a gap, and these are held: []", id="no stage"),
        pytest.param(
            # PiPPy#1088, pytorch/pytorch#127332: complete on each side, but in another order
            [
                gpipe(2, 2)[0],
                [RecvActivation(1, 1), RecvActivation(0, 1), *gpipe(2, 2)[1][1:2], *gpipe(2, 2)[1][3:]],
            ],
            "message 0 from stage 0 to stage 1: stage 0, position 1, is SendActivation(m=0, v=0), whose receive is "
            "RecvActivation(m=0, v=1), but stage 1, position 0, is RecvActivation(m=1, v=1); "
            "without tags both must keep one order",
            id="receives in another order than sends",
        ),
    ],
)
def test_what_is_refused_and_how(schedule, message):
    """The error names stage, position and instruction, and says what would be right."""
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert str(caught.value) == message


def test_the_number_of_micro_batches_is_checked_where_it_is_given():
    """Lists from which a micro-batch is missing altogether are consistent in themselves: only M tells."""
    validate(gpipe(2, 3))
    with pytest.raises(ScheduleError, match=r"^stage 0: Forward\(m=3, v=0\) is missing"):
        validate(gpipe(2, 3), 4)
    with pytest.raises(ScheduleError) as caught:
        validate(gpipe(2, 3), 2)
    assert str(caught.value) == (
        "stage 0, position 4, Forward(m=2, v=0): no place for it on a stage that holds slices [0] of 2, "
        "with 2 micro-batches"
    )


# ------------------------------------------------------------------------------------------------- deadlock


@given(stages, micro_batches)
@settings(max_examples=50)
def test_the_room_that_messages_need(K, M):
    """1F1B needs one free slot on each directed edge as soon as K and M are at least 2; GPipe needs none."""
    assert minimal_capacity(one_f_one_b(K, M)) == (K >= 2 and M >= 2)
    assert minimal_capacity(gpipe(K, M)) == 0


@pytest.mark.parametrize(("capacity", "deadlocks"), [(0, 60), (1, 0), (None, 0)])
def test_one_f_one_b_deadlocks_in_60_of_78(capacity, deadlocks):
    """Over K in 1..6 and M in 1..13, on rendezvous sends."""
    pairs = [(K, M) for K in range(1, 7) for M in range(1, 14)]
    assert len(pairs) == 78
    assert sum(not simulate(one_f_one_b(K, M), capacity=capacity).finished for K, M in pairs) == deadlocks


@given(st.integers(1, 10), st.integers(0, 3), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_first_stage_that_runs_ahead_needs_more_room(M, capacity, seed):
    """A user's own lists: stage 0 sends all activations before it takes a gradient, stage 1 alternates.

    Stage 1 gets rid of c gradients and then holds activation c; c more fit on their edge. So 2c + 1 activations
    leave stage 0, and it finishes if that is all of them.
    """
    activations = gpipe(2, M)[0][: 2 * M]
    gradients = [i for m in range(M) for i in (RecvGradient(m, 0), Backward(m, 0))]
    schedule = [[*activations, *gradients, *END], one_f_one_b(2, M)[1]]
    simulation = simulate(schedule, capacity=capacity)
    position, _, _ = execute(schedule, capacity, seed)
    assert minimal_capacity(schedule) == M // 2
    assert simulation.finished == (capacity >= M // 2) == (position == [len(instructions) for instructions in schedule])


def test_a_deadlock_says_who_waits_for_whom():
    """An activation and a gradient meet head-on; the stage before them waits for its turn."""
    stuck = simulate(one_f_one_b(3, 4), capacity=0)
    assert list(map(str, stuck.waits)) == [
        "stage 0, position 5, SendActivation(m=2, v=0): waits for stage 1 to take a message",
        "stage 1, position 5, SendActivation(m=1, v=1): waits for stage 2 to take a message",
        "stage 2, position 3, SendGradient(m=0, v=2): waits for stage 1 to take a message",
    ]
    assert stuck.circle == (1, 2)
    for figure in ("makespan", "bubble_of_step", "bubble_of_ideal"):
        with pytest.raises(Deadlock, match="stage 2, position 3"):
            getattr(stuck, figure)
    assert render(stuck).splitlines()[1:] == ["stage 0 F0 F1 F2 .", "stage 1 .  F0 F1 .", "stage 2 .  .  F0 B0"]


def test_some_lists_deadlock_on_any_transport():
    """A stage that waits for the gradient before it has sent the activation: valid by itself, and hopeless."""
    forward, send, receive, *rest = gpipe(2, 1)[0]
    schedule = [[forward, receive, send, *rest], gpipe(2, 1)[1]]
    validate(schedule)
    with pytest.raises(Deadlock) as caught:
        minimal_capacity(schedule)
    assert str(caught.value) == (
        "stage 0, position 1, RecvGradient(m=0, v=0): waits for stage 1 to send; "
        "stage 1, position 0, RecvActivation(m=0, v=1): waits for stage 0 to send"
    )
    assert simulate(schedule).circle == (0, 1)


@given(builders, st.integers(2, 5), st.integers(1, 6), capacities, st.data())
@settings(max_examples=50)
def test_slow_stages_change_times_only(build, K, M, capacity, data):
    """Whether and where stages get stuck does not depend on how long their work takes (pytorch/PiPPy#1088)."""
    schedule = build(K, M)
    slow = {name: data.draw(st.lists(costs, min_size=K, max_size=K), name) for name in ("forward", "backward")}
    assert simulate(schedule, capacity=capacity, **slow).waits == simulate(schedule, capacity=capacity).waits


def test_a_failed_stage_stops_all_others():
    """torchgpipe@2f51a0f: after an exception in the last stage nobody before it can go on; somebody must tell them."""
    position = one_f_one_b(3, 3)[2].index(Backward(1, 2))
    stuck = simulate(one_f_one_b(3, 3), stop={2: position})
    assert [(wait.stage, wait.on) for wait in stuck.waits] == [(0, 1), (1, 2), (2, None)]
    assert str(stuck.waits[2]) == f"stage 2, position {position}, Backward(m=1, v=2): stopped"
    assert stuck.circle == ()


@pytest.mark.parametrize("capacity", [-1, 1.0, True, "1"])
def test_capacity_is_checked(capacity):
    """What is no number of slots is refused by value."""
    with pytest.raises(ValueError, match="capacity must be an integer of at least 0, or None for no limit, not"):
        simulate(gpipe(2, 2), capacity=capacity)


# --------------------------------------------------------------------------------------- times and memory


@given(builders, stages, micro_batches, costs, costs)
@settings(max_examples=60)
def test_the_bubble_is_exact(build, K, M, forward, backward):
    """At equal costs of the stages both schedules take (M + K - 1) turns, and both published fractions hold."""
    simulation = simulate(build(K, M), forward=forward, backward=backward)
    assert simulation.makespan == (M + K - 1) * (forward + backward)
    assert simulation.bubble_of_step == Fraction(K - 1, M + K - 1)
    assert simulation.bubble_of_ideal == Fraction(K - 1, M)
    assert type(simulation.bubble_of_step) is type(simulation.bubble_of_ideal) is Fraction


@given(stages, micro_batches)
@settings(max_examples=50)
def test_live_micro_batches(K, M):
    """GPipe keeps all M alive on every stage, 1F1B as many as there are stages from here to the end, at most M."""
    assert [peak_live(instructions) for instructions in gpipe(K, M)] == [M] * K
    assert [peak_live(instructions) for instructions in one_f_one_b(K, M)] == [min(M, K - stage) for stage in range(K)]


def test_live_micro_batches_of_a_run_that_broke_off():
    """The last forward pass counts although nothing follows it."""
    assert peak_live([Forward(0, 0), SendActivation(0, 0), Forward(1, 0)]) == 2
    assert peak_live([]) == 0


@given(stages, micro_batches, costs, costs)
@settings(max_examples=40)
def test_one_slot_costs_one_f_one_b_no_time(K, M, forward, backward):
    """At equal costs of the stages more room does not make 1F1B faster."""
    one, unlimited = (simulate(one_f_one_b(K, M), capacity=c, forward=forward, backward=backward) for c in (1, None))
    assert one == unlimited


def test_room_counts_messages_that_are_not_yet_taken():
    """A slow second stage holds the first one back, the less the more room there is; worked by hand.

    Forward passes cost 1 and 3, backward passes 1. Stage 1 runs F0 from 1 to 4 and F1 from 4 to 7. With
    rendezvous stage 0 sends activation 1 at 4 and activation 2 at 7, so it runs F2 at 4 and F3 at 7. With one
    slot activation 1 is sent at 2, and activation 2, made at 3, when 1 is taken at 4: F3 runs at 4.
    """
    starts = {
        capacity: [
            span.start
            for span in simulate(gpipe(2, 4), capacity=capacity, forward=[1, 3], backward=1).spans[0]
            if isinstance(span.work, Forward)
        ]
        for capacity in (0, 1, 2, None)
    }
    assert starts == {0: [0, 1, 4, 7], 1: [0, 1, 2, 4], 2: [0, 1, 2, 3], None: [0, 1, 2, 3]}


def test_uneven_stages_by_hand():
    """Costs of 1 and 2: 12 turns of work in 2 x 10, and only the ideal divides by the work."""
    simulation = simulate(gpipe(2, 2), forward=[1, 2], backward=[1, 2])
    assert render(simulation).splitlines() == [
        "        0  1  2  3  4  5  6  7  8  9",
        "stage 0 F0 F1 .  .  .  .  .  B1 .  B0",
        "stage 1 .  F0 -  F1 -  B1 -  B0 -  .",
    ]
    assert simulation.makespan == 10
    assert simulation.bubble_of_step == Fraction(20 - 12, 20)
    assert simulation.bubble_of_ideal == Fraction(20 - 12, 12)


def test_render_finds_the_unit():
    """Fractions are drawn on the coarsest grid that holds them; a grid too fine is refused."""
    assert timeline(gpipe(1, 2), forward=Fraction(1, 3), backward=Fraction(1, 2)) == [
        "        0  1  2  3  4  5  6  7  8  9",
        "stage 0 F0 -  F1 -  B1 -  -  B0 -  -",
    ]
    with pytest.raises(ValueError, match=r"the timeline would have .* columns"):
        timeline(gpipe(2, 2), forward=0.1)


@pytest.mark.parametrize("cost", [0, -1, float("nan"), float("inf"), [1], [1, "2"], [1, 2, 3]])
def test_costs_are_checked(cost):
    """A cost is a finite number above 0, for all slices or one for each."""
    for name in ("forward", "backward"):
        with pytest.raises(ValueError, match=f"^{name}=.*(a cost is a finite number above 0|costs for 2 slices)$"):
            simulate(gpipe(2, 2), **{name: cost})


# -------------------------------------------------------------------------------------------------- replay


@given(builders, st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_a_recorded_run_has_the_figures_of_its_schedule(build, K, M, rng):
    """However the records of the stages are interleaved, only each stage's own order counts."""
    schedule = build(K, M)
    turns = [stage for stage, instructions in enumerate(schedule) for _ in instructions]
    rng.shuffle(turns)
    left = [iter(instructions) for instructions in schedule]
    simulation = replay([(stage, next(left[stage])) for stage in turns], K)
    assert simulation == simulate(schedule)
    assert simulation.bubble_of_step == Fraction(K - 1, M + K - 1)


def test_a_record_of_half_a_step_is_refused():
    """So is one of a stage that does not exist."""
    events = [(stage, instruction) for stage, instructions in enumerate(gpipe(2, 2)) for instruction in instructions]
    with pytest.raises(ScheduleError, match=r"stage 1: Step\(\) is missing"):
        replay(events[:-1], 2)
    with pytest.raises(ScheduleError, match=r"event \(1, .*there are stages 0 to 0"):
        replay(events, 1)


# --------------------------------------------------------------------------------- several slices on a stage


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**32))
@settings(max_examples=50)
def test_a_stage_may_hold_several_slices(K, V, M, seed):
    """Validation, execution and simulation take any placement of slices, here round and round."""
    schedule = gpipe_in_slices(K, V, M)
    validate(schedule, M)
    assert holders(schedule) == tuple(v % K for v in range(K * V))
    needed = minimal_capacity(schedule)
    assert needed == (M // K if K > 1 and V > 1 else 0)
    for capacity in {needed, max(needed - 1, 0)}:
        simulation = simulate(schedule, capacity=capacity)
        position, _, _ = execute(schedule, capacity, seed)
        assert simulation.finished == (position == [len(instructions) for instructions in schedule])


def test_slices_are_named_where_a_stage_holds_several():
    """The first stage runs slices 0 and 2, the second 1 and 3."""
    assert timeline(gpipe_in_slices(2, 2, 1)) == [
        "        0    1    2    3    4    5    6    7",
        "stage 0 F0.0 .    F0.2 .    .    B0.2 .    B0.0",
        "stage 1 .    F0.1 .    F0.3 B0.3 .    B0.1 .",
    ]


def test_neighbouring_slices_on_one_stage_keep_their_order():
    """Without a message between them, the list itself must hand the value on."""
    schedule = [[Forward(0, 1), Forward(0, 0), Backward(0, 1), Backward(0, 0), *END]]
    with pytest.raises(ScheduleError, match=r"position 0, Forward\(m=0, v=1\): Forward\(m=0, v=0\) must precede it"):
        validate(schedule)
    schedule = [[Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1), *END]]
    with pytest.raises(ScheduleError, match=r"position 2, Backward\(m=0, v=0\): Backward\(m=0, v=1\) must precede it"):
        validate(schedule)


# ----------------------------------------------------------------------------------------- units of a stage


@given(st.integers(1, 40), st.data())
def test_units_are_split_near_evenly(units, data):
    """As numpy.array_split does it: every unit once, in order, the first stages one longer."""
    K = data.draw(st.integers(1, units))
    assert [list(part) for part in stages_of(units, K)] == [list(part) for part in np.array_split(np.arange(units), K)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_units_are_split_by_hand(counts):
    """Stages of any sizes hold consecutive units under their global numbers."""
    held = stages_of(sum(counts), counts)
    assert [len(part) for part in held] == counts
    assert [unit for part in held for unit in part] == list(range(sum(counts)))


def test_uneven_stages_keep_global_numbers():
    """3 + 2 + 1 units are 0 to 5 (Megatron-LM@b759cd37e6)."""
    assert stages_of(6, [3, 2, 1]) == (range(0, 3), range(3, 5), range(5, 6))


@pytest.mark.parametrize(
    ("units", "of", "message"),
    [
        (2, 3, "stage 2 of 3 would hold 0 units of 2: each stage needs at least one"),
        (3, [2, 0, 1], "stage 1 of 3 would hold 0 units of 3: each stage needs at least one"),
        (3, [4, -1], "stage 1 of 2 would hold -1 units of 3: each stage needs at least one"),
        (3, [1.5, 1.5], "stage 0 of 2 would hold 1.5 units of 3: each stage needs at least one"),
        (6, [3, 2], "stages=[3, 2] adds up to 5 units, and the model has 6"),
        (6, [], "stages=[] adds up to 0 units, and the model has 6"),
        (6, 0, "stages must be an integer of at least 1, not 0"),
        (6, True, "stages must be an integer of at least 1, not True"),
        (0, 1, "units must be an integer of at least 1, not 0"),
        (6.0, 2, "units must be an integer of at least 1, not 6.0"),
    ],
)
def test_a_stage_without_a_unit_is_refused(units, of, message):
    """Before anything starts, with the stage and the count."""
    with pytest.raises(ValueError) as caught:
        stages_of(units, of)
    assert str(caught.value) == message
