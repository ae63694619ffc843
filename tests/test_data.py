"""Data parallel: the same result as one device, whatever the rows, the tokens, the ranks and the buckets."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_stores import reduced
from strategies import batch, cases, data_parallel, exact_cases, mlps, optimizers
from truth import Worlds, hold, hold_exactly

from refpar import single
from refpar.case import Batch, Case, Layout
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, AdamW
from refpar.parallel import data, hybrid, placement
from refpar.precision import Precision


@settings(max_examples=60, deadline=None)
@given(cases(), data_parallel())
def test_trace_equals_single_device(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Count, loss, every gradient, norm, state and weights of every step are those of one device."""
    hold(case, layout, worlds)


@settings(max_examples=60, deadline=None)
@given(exact_cases(), data_parallel())
def test_integers_are_bit_equal(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Where no sum rounds, no order of summation changes a bit."""
    hold_exactly(case, layout, worlds)


@settings(max_examples=25, deadline=None)
@given(cases(max_steps=2), data_parallel())
def test_sent_is_the_formula(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Each rank sends for gradients what its chunk sizes say; over all ranks, 2(N-1) times the gradient."""
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    model = case.model.build()
    sizes = {name: math.prod(spec.shape) for name, spec in model.specs.items()}
    steps, psi = len(case.batches), sum(sizes.values())
    sent = [ledger.total("dp").bytes for ledger in trace.ledgers]
    assert sent == [
        steps * data.bytes_sent(model.units, sizes, case.precision, layout.bucket, layout.dp, rank)
        for rank in range(layout.dp)
    ]
    assert sum(ledger.total("dp").elements for ledger in trace.ledgers) == steps * 2 * (layout.dp - 1) * psi


@settings(max_examples=25, deadline=None)
@given(cases(max_steps=1), data_parallel())
def test_what_ranks_agree_on_is_small(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Count (1 number) and flag, norm and loss (3) are all that is sent beside the gradients."""
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    assert {group for ledger in trace.ledgers for group, _ in ledger.sent} <= {"dp", "world"}
    assert sum(ledger.total("world").elements for ledger in trace.ledgers) == 2 * (layout.dp - 1) * (1 + 3)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 9))
def test_accumulation_changes_nothing(worlds: Worlds, case: Case, one: int, other: int) -> None:
    """Micro-batches are a matter of memory: however many, and however ragged, the sums are the same."""
    for micro_batches in (one, other):
        hold(case, Layout(dp=2, micro_batches=micro_batches), worlds)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_tokens_are_counted_over_all_ranks(worlds: Worlds, ranks: int) -> None:
    """One token and three weigh as tokens do, not as two means (huggingface/transformers#34242)."""
    model = GPT(vocabulary=7, context=3, width=4, layers=1, heads=2)
    given_batch = batch(model, 2, 1.0, 0, 0)
    mask = np.array([[True, False, False], [True, True, True]])
    case = Case(model, SGD(lr=0.1), (Batch(given_batch.inputs, given_batch.targets, mask),))
    trace = hold(case, Layout(dp=ranks), worlds)
    assert trace.steps[0].count == 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_last_accumulation_window_may_be_short(worlds: Worlds, ranks: int) -> None:
    """Five rows that each give a gradient of 1 give 1, not 1/4 or 5/4, in four micro-batches (Lightning#19987)."""
    case = Case(MLP((1, 1), init="integers"), SGD(lr=1.0), (ones(5),), divide="after")
    trace = hold_exactly(case, Layout(dp=ranks, micro_batches=4), worlds)
    whole = single.train(Case(case.model, case.optimizer, (ones(1),)))
    assert trace.steps[0].gradients["layers.0.weight"] == whole.steps[0].gradients["layers.0.weight"]


def ones(rows: int) -> Batch:
    """Return rows that are all alike: their mean gradient does not depend on how many there are."""
    return Batch(np.ones((rows, 1)), np.full((rows, 1), -2.0), np.ones(rows, bool))


@settings(max_examples=30, deadline=None)
@given(optimizers(), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_same_batch_twice_gives_the_same_gradient(worlds: Worlds, optimizer: object, parts: int, seed: int) -> None:
    """With a learning rate of 0, nothing of one step is left in the next (Megatron-LM@4fd6432de6)."""
    model = MLP((3, 4, 2))
    rows = batch(model, 5, 1.0, seed, 0)
    case = Case(model, type(optimizer)(lr=0.0), (rows, rows), seed=seed)
    first, second = hybrid.run(case, Layout(dp=3, micro_batches=parts), world=worlds(3)).steps
    for name, g in first.gradients.items():
        np.testing.assert_array_equal(g, second.gradients[name])


def test_a_step_without_tokens_changes_nothing(worlds: Worlds) -> None:
    """Its gradient is zero and its loss 0; weights, moments and step count stay; the trace says why."""
    model = GPT(vocabulary=5, context=2, width=4, layers=1, heads=1)
    full, empty = batch(model, 4, 1.0, 1, 0), batch(model, 4, 0.0, 1, 1)
    case = Case(model, AdamW(lr=0.1, weight_decay=0.1), (full, empty, full), clip=1.0)
    for layout in (Layout(), Layout(dp=3)):
        trace = hold(case, layout, worlds)
        before, skipped, after = trace.steps
        assert (skipped.outcome, skipped.count, skipped.loss, skipped.norm) == ("no tokens", 0, 0.0, 0.0)
        assert [step.t for step in trace.steps] == [1, 1, 2]
        for name, value in before.parameters.items():
            np.testing.assert_array_equal(value, skipped.parameters[name])
            assert (value != after.parameters[name]).any()
            for buffer, x in before.state[name].items():
                np.testing.assert_array_equal(x, skipped.state[name][buffer])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6))
def test_every_row_is_taken_once(total: int, dp: int, micro_batches: int) -> None:
    """Rows are split over replicas and micro-batches without repeating or losing one (pytorch/pytorch#25162)."""
    taken = [
        row
        for d in range(dp)
        for part in placement.micro_batches(placement.rows(total, dp, d), micro_batches)
        for row in part
    ]
    assert taken == list(range(total))


@settings(max_examples=100, deadline=None)
@given(mlps(), st.integers(1, 40))
def test_buckets_hold_every_gradient_once(model: MLP, limit: int) -> None:
    """Every parameter is in one bucket, also one that is larger than a bucket; none but the last is below the limit."""
    built = model.build()
    names = [name for final in data.final_names(built.units) for name in final]
    sizes = {name: math.prod(spec.shape) for name, spec in built.specs.items()}
    groups = data.buckets(names, sizes, limit)
    assert [name for group in groups for name in group] == names
    assert sorted(names) == sorted(built.specs)
    for group in groups[:-1]:
        assert sum(sizes[name] for name in group) >= limit > sum(sizes[name] for name in group[:-1])


def test_a_tied_weight_is_final_with_the_first_unit_that_uses_it() -> None:
    """Reduced with the head already, the embedding's share of its gradient would be missing (DeepSpeed#5999fb069)."""
    units = GPT(vocabulary=5, context=2, width=2, layers=1, heads=1).build().units
    final = data.final_names(units)
    assert "embedding.token.weight" not in final[0]
    assert "embedding.token.weight" in final[-1]


@pytest.mark.parametrize("compute", ["float16", "float32", "float64"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_integers_are_bit_equal_in_every_type(worlds: Worlds, compute: str, data: st.DataObject) -> None:
    """The same holds in halves, where the sums are small enough for them."""
    case = data.draw(exact_cases(compute=compute))
    assert case.precision == Precision(compute)
    hold_exactly(case, data.draw(data_parallel()), worlds)


@pytest.mark.parametrize(
    ("ranks", "total"),
    [
        ([[1, 2], [3, 4]], 10),  # the accumulated gradient, not that of the last micro-batch (picotron@d0efdcc)
        ([[1, 1], [3, 3]], 8),  # the boundary micro-batch is added before the reduction (DeepSpeed#7985)
        ([[4], [0]], 4),  # a parameter that only rank 0 has a gradient for (horovod#634)
        ([[1], [2], [4]], 7),  # three ranks see what two do not (microsoft/ark#253)
    ],
)
def test_gradients_add_up(worlds: Worlds, ranks: list[list[float]], total: float) -> None:
    """Over micro-batches and ranks, once each; the parameter, 5, is no part of it (Megatron-LM#4609)."""
    assert worlds(len(ranks)).run(reduced, [ranks]) == [[[total]]] * len(ranks)


def test_an_infinite_gradient_is_gone_in_the_next_step(worlds: Worlds) -> None:
    """Clearing an accumulator by subtracting it from itself would leave NaN for ever (horovod@98db0666)."""
    assert worlds(2).run(reduced, [[[math.inf], [1]], [[1], [2]]]) == [[[math.inf], [3]]] * 2


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3)])
def test_clipping_is_of_the_sum(worlds: Worlds, layout: Layout) -> None:
    """Ranks with (3, 0) and (0, 4) clip to norm 1 as (0.6, 0.8), not as (0.5, 0.5) (horovod#1346)."""
    model = MLP((2, 1), init="integers")
    start = single.train(Case(model, SGD(lr=0.0), (batch(model, 1, 1.0, 0, 0),))).steps[0].parameters
    x, error = np.eye(2), np.array([[3.0], [4.0]])
    y = x @ start["layers.0.weight"] + start["layers.0.bias"]
    rows = Batch(x, y - error, np.ones(2, bool))
    case = Case(model, SGD(lr=1.0), (rows,), clip=1.0, frozen=("layers.0.bias",))
    (step,) = hold(case, layout, worlds).steps
    assert step.norm == 5
    np.testing.assert_array_equal(step.gradients["layers.0.weight"], error)
    moved = start["layers.0.weight"] - step.parameters["layers.0.weight"]
    np.testing.assert_allclose(moved, [[0.6], [0.8]], rtol=0, atol=2 * 2.0**-53)  # a quotient and a difference
