"""Pipelines: stages on real ranks do what the list says, hold what it says, and change nothing in the result."""

import dataclasses
import time
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import batch, cases, exact_cases, gpts, mlps, splits
from truth import Worlds, hold, hold_exactly

from refpar import RankError, single
from refpar.case import Batch, Case, Layout, State
from refpar.comm import Communicator, region
from refpar.nn import models
from refpar.nn.layer import At, Gradients, ParamSpec
from refpar.nn.loss import SquaredError
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam
from refpar.oracle import bounds
from refpar.parallel import hybrid, mesh, pipeline, schedule, simulator
from refpar.precision import LossScale, Precision

DEEP = MLP((2, 3, 2, 4, 3, 2, 3))  # six units
PRECISIONS = st.sampled_from([Precision(), Precision("float32"), Precision("float16", loss_scale=LossScale(2.0**10))])
SCHEDULES = {"1f1b": schedule.one_f_one_b, "gpipe": schedule.gpipe}


@settings(max_examples=25, deadline=None)
@given(splits(cases(models=gpts() | mlps(), max_steps=2), most=6, tp=1))
def test_trace_equals_single_device(worlds: Worlds, split: tuple[Case, Layout]) -> None:
    """Fewer micro-batches than stages, one, none with a row in it: the trace is that of one device."""
    case, layout = split
    hold(case, dataclasses.replace(layout, dp=1), worlds)


@settings(max_examples=25, deadline=None)
@given(splits(exact_cases(), most=4, tp=1))
def test_integers_are_bit_equal(worlds: Worlds, split: tuple[Case, Layout]) -> None:
    """Where no sum rounds, stages change no bit."""
    hold_exactly(*split, worlds)


@settings(max_examples=20, deadline=None)
@given(cases(models=gpts(max_layers=3) | mlps(), max_steps=2, precisions=PRECISIONS), st.integers(1, 3), st.data())
def test_a_pipeline_changes_no_bit(worlds: Worlds, case: Case, micro_batches: int, data: st.DataObject) -> None:
    """With 1F1B, an untied model and the same micro-batches, stages compute the very bits of one: nothing is cast
    on the way (Megatron-LM@ff7b28f462)."""
    model = dataclasses.replace(case.model, tied=False) if isinstance(case.model, GPT) else case.model
    case = dataclasses.replace(case, model=model, clip=None)  # the norm is summed in another order
    K = data.draw(st.integers(1, len(model.build().units)))
    one, other = (hybrid.run(case, Layout(pp=pp, micro_batches=micro_batches), world=worlds(pp)) for pp in (1, K))
    for a, b in zip(one.steps, other.steps, strict=True):
        for (name, x), (_, y) in zip(a.items(), b.items(), strict=True):
            if name == "norm":
                # Fewer than 64 squares, none negative, added in two orders: 2 * 64 u, and half of it under the root.
                assert x == pytest.approx(y, rel=2.0**-47, nan_ok=True)
            else:
                assert_array_equal(x, y, name)


# Order


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("K", [1, 2, 3, 4, 6])
def test_what_was_done_is_what_the_list_says(worlds: Worlds, K: int, name: str) -> None:
    """Replayed in unit time, a run gives the figures of its list: timeline, both bubbles, live micro-batches.

    For as many micro-batches as stages, more, fewer (Megatron-LM@08ddde0c3b), and one.
    """
    for M in {1, 2, K - 1, K, K + 1, 2 * K} - {0}:
        case = Case(DEEP, SGD(lr=0.1), (batch(DEEP, 7, 1.0, seed=M, step=0),))
        trace = hybrid.run(case, Layout(pp=K, micro_batches=M, schedule=name), world=worlds(K))
        listed = SCHEDULES[name](K, M)
        assert tuple(trace.schedule) == listed
        replayed = simulator.replay([(k, i) for k, done in enumerate(trace.schedule) for i in done], K)
        assert replayed == simulator.simulate(listed)
        assert (replayed.bubble_of_step, replayed.bubble_of_ideal) == bubbles(K, M)
        assert trace.peak_live == [simulator.peak_live(instructions) for instructions in listed]


def bubbles(K: int, M: int) -> tuple[Fraction, Fraction]:
    """Return the bubble as a share of the step, and of the ideal step."""
    return Fraction(K - 1, M + K - 1), Fraction(K - 1, M)


# Memory


@pytest.mark.parametrize("model", [DEEP, GPT(7, 3, 4, 3, 2, dropout=0.25)], ids=["mlp", "gpt"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_live_bytes_are_those_of_live_micro_batches(worlds: Worlds, name: str, model: GPT | MLP) -> None:
    """What a stage holds at most, in bytes: M micro-batches for GPipe, min(M, K - stage) for 1F1B."""
    K, rows = 4, 2
    of_one = run_even(worlds, model, K, 1, rows, name).peak_bytes
    assert min(of_one) > 0
    for M in (1, 2, 3, 4, 7):
        trace = run_even(worlds, model, K, M, rows, name)
        live = [M if name == "gpipe" else min(M, K - stage) for stage in range(K)]
        assert trace.peak_live == live
        assert trace.peak_bytes == [n * b for n, b in zip(live, of_one, strict=True)]


def run_even(worlds: Worlds, model: GPT | MLP, K: int, M: int, rows: int, name: str) -> Any:
    """Run micro-batches of ``rows`` rows each."""
    case = Case(model, SGD(lr=0.1), (batch(model, rows * M, 1.0, seed=1, step=0),))
    return hybrid.run(case, Layout(pp=K, micro_batches=M, schedule=name), world=worlds(K))


# Stages


@pytest.mark.parametrize(
    ("stages", "numbers"),
    [((), [[0, 1], [2, 3], [4, 5]]), ((3, 2, 1), [[0, 1, 2], [3, 4], [5]]), ((1, 1, 4), [[0], [1], [2, 3, 4, 5]])],
)
def test_stages_by_rule_and_by_hand(worlds: Worlds, stages: tuple[int, ...], numbers: list[list[int]]) -> None:
    """Layers 3 + 2 + 1 on three stages are numbers 0 to 5 (Megatron-LM@b759cd37e6), and train as on one device."""
    layout = Layout(pp=3, micro_batches=2, stages=stages)
    assert [list(r) for r in mesh.stages_of(layout, DEEP.build())] == numbers
    hold(Case(DEEP, Adam(lr=0.01), (batch(DEEP, 5, 0.7, seed=1, step=0),)), layout, worlds)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (1, 3), (2, 2), (3, 3)])
def test_copies_of_a_tied_weight_stay_one(worlds: Worlds, dp: int, pp: int, zero: int) -> None:
    """Their gradients are summed, counted once, and the copies are equal bit for bit, step after step (piper#25)."""
    model = GPT(vocabulary=7, context=3, width=4, layers=1, heads=2, tied=True)
    case = Case(model, Adam(lr=0.01), tuple(batch(model, 5, 0.7, seed=1, step=step) for step in range(3)), clip=0.05)
    hold(case, Layout(dp=dp, pp=pp, zero=zero, micro_batches=2), worlds)


def test_tied_gradients_are_added(worlds: Worlds) -> None:
    """1 from the input and 2 from the output are 3 on both stages (Megatron-LM#299)."""

    def on_stage(comm: Communicator) -> float:
        place: Any = SimpleNamespace(tied={"w": comm.split(0, comm.rank, name="tied")})
        store: Any = SimpleNamespace(reduced=lambda: {"w": np.array([1.0 + comm.rank])})
        return float(hybrid.tied_sum(place, store, Precision())["w"][0])

    assert worlds(2).run(on_stage) == [3, 3]


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_loss_and_count_are_known_on_every_stage(worlds: Worlds, pp: int) -> None:
    """Three tokens that count: every stage divides by 3 (Megatron-LM@adfa873d96) and knows the loss (nanotron#422)."""
    model = GPT(vocabulary=7, context=3, width=4, layers=1, heads=2)
    rows = batch(model, 3, 1.0, seed=1, step=0)
    mask = np.zeros((3, 3), bool)
    mask[0, 0] = mask[2, 1] = mask[2, 2] = True
    case = Case(model, SGD(lr=0.1), (Batch(rows.inputs, rows.targets, mask),))
    truth = single.train(case)
    allowed = bounds.spread(truth, shaken=False)[0]["loss"]
    for part in worlds(pp).run(hybrid.train, case, Layout(pp=pp, micro_batches=2)):
        assert part.steps[0].count == truth.steps[0].count == 3
        assert abs(part.steps[0].loss - truth.steps[0].loss) <= allowed


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, micro_batches=4), Layout(pp=2, micro_batches=4, zero=2)])
@pytest.mark.parametrize("divide", ["before", "after"])
def test_gradients_are_divided_once_over_all_stages(worlds: Worlds, layout: Layout, divide: Any) -> None:
    """Four rows that each give 2: both stages have 8/4, and the first not 8/16 (DeepSpeed#8154)."""
    rows = Batch(np.ones((4, 1)), np.zeros((4, 1)), np.ones(4, bool))
    case = Case(MLP((1, 1, 1)), SGD(lr=0.0), (rows,), divide=divide)
    one = {name: np.ones_like(x) * name.endswith("weight") for name, x in State.initial(case).parameters.items()}
    start = dataclasses.replace(State.initial(case), parameters=one)
    step = hybrid.run(case, layout, world=worlds(layout.ranks), start=start).steps[0]
    assert step.gradients["layers.0.weight"] == step.gradients["layers.1.weight"] == 2


def test_outputs_meet_their_own_labels(worlds: Worlds) -> None:
    """Rows carry their number in input and target, so that a mean over others would show (DeepSpeed#5729)."""
    numbers = np.arange(1.0, 8)[:, None]
    model = MLP((1, 1), init="integers")
    for seed in range(6):
        case = Case(model, SGD(lr=0.0), (Batch(numbers, 100 * numbers, np.ones(7, bool)),), seed=seed, divide="after")
        for pp, micro_batches in ((1, 7), (1, 3)):
            hold_exactly(case, Layout(pp=pp, micro_batches=micro_batches), worlds)


# The transport


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_message_larger_than_the_mailbox_is_no_rendezvous(worlds: Worlds, name: str) -> None:
    """1F1B would deadlock on sends that wait for their receive. Five megabytes are sent like five bytes."""
    width = 5 * region.SLOT_BYTES // 8 // 2  # of two rows
    model = MLP((1, width, 1))
    case = Case(model, SGD(lr=0.0), (batch(model, 6, 1.0, seed=1, step=0),))
    layout = Layout(pp=2, micro_batches=3, schedule=name)
    assert simulator.minimal_capacity(schedule.one_f_one_b(2, 3)) == 1
    start = time.monotonic()
    trace = hybrid.run(case, layout, world=worlds(2))
    assert time.monotonic() - start < 30
    assert trace.ledgers[0].total("pp").bytes == 6 * width * 8


@dataclasses.dataclass(frozen=True)
class Exploding:
    """A layer that fails on micro-batch 1, forward or backward."""

    when: str

    @property
    def specs(self) -> dict[str, ParamSpec]:
        return {"exploding.weight": ParamSpec((1,), init="ones")}

    def forward(self, params: Any, x: Any, at: At) -> tuple[Any, Any]:
        if self.when == "forward" and 2 in at.rows:
            raise ZeroDivisionError("in row 2")
        return x * params["exploding.weight"], (x, at)

    def backward(self, params: Any, saved: Any, dy: Any) -> Gradients:
        x, at = saved
        if self.when == "backward" and 2 in at.rows:
            raise ZeroDivisionError("in row 2")
        yield "exploding.weight", (x * dy).sum().reshape(1)
        return dy * params["exploding.weight"]


@dataclasses.dataclass(frozen=True)
class Bomb(MLP):
    """An MLP of three units, of which one explodes."""

    when: str = ""
    place: int = 0

    def build(self) -> models.Model:
        units = list(MLP((1, 1, 1, 1)).build().units)
        units[self.place] = ("exploding", Exploding(self.when))
        return models.Model(tuple(units), SquaredError())


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 2])
def test_an_exception_in_a_stage_arrives(worlds: Worlds, place: int, when: str) -> None:
    """With its traceback and its rank, while the other stages wait; and the next run is right (torchgpipe#6)."""
    rows = Batch(np.ones((5, 1)), np.ones((5, 1)), np.ones(5, bool))
    model = Bomb((1, 1, 1, 1), when=when, place=place)
    with pytest.raises(RankError, match=f"rank {place}") as caught:
        hybrid.run(Case(model, SGD(lr=0.1), (rows,)), Layout(pp=3, micro_batches=3), world=worlds(3))
    assert "ZeroDivisionError: in row 2" in str(caught.value)
    assert caught.value.rank == place
    hold(Case(MLP((1, 1, 1, 1)), SGD(lr=0.1), (rows,)), Layout(pp=3, micro_batches=3), worlds)


# Arithmetic on sizes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=5), st.integers(0, 20))
def test_each_boundary_is_crossed_twice(widths: list[int], tokens: int) -> None:
    """By one activation onward and one gradient back, for each token."""
    sent = [pipeline.elements_sent(widths, tokens, stage) for stage in range(len(widths) + 1)]
    assert sum(sent) == 2 * tokens * sum(widths)
