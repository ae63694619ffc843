"""One device: the truth, so it is held to numbers worked by hand, and to itself in every other order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, exact_cases

from refpar import single
from refpar.case import Batch, Case, Layout, text_batches
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD
from refpar.oracle import bounds, compare

LINE = {"layers.0.weight": np.array([[2.0]]), "layers.0.bias": np.array([1.0])}


def line(clip: float | None = None, divide: str = "before") -> Case:
    """Three points on y = 2x + 1, to be pulled to targets of which the last does not count."""
    rows = Batch(np.array([[1.0], [2.0], [3.0]]), np.array([[0.0], [0.0], [1.0]]), np.array([True, True, False]))
    return Case(MLP((1, 1)), SGD(lr=0.5), (rows,), clip=clip, divide=divide)


@pytest.mark.parametrize("divide", ["before", "after"])
def test_a_step_by_hand(divide: str) -> None:
    """y is 3, 5, 7; the errors that count are 3 and 5, their squares sum to 34; the rest follows.

    ::

        loss     34 / 2                         = 17
        dw       2 (3*1 + 5*2) / 2              = 13
        db       2 (3 + 5) / 2                  = 8
        norm     sqrt(169 + 64)                 = sqrt(233)
        w        2 - 0.5 * 13                   = -4.5
        b        1 - 0.5 * 8                    = -3
    """
    (step,) = single.train(line(divide=divide), start=LINE).steps
    assert (step.count, step.loss, step.outcome, step.t) == (2, 17.0, "updated", 1)
    assert step.gradients["layers.0.weight"] == 13
    assert step.gradients["layers.0.bias"] == 8
    assert step.norm == math.sqrt(233)
    assert step.parameters["layers.0.weight"] == -4.5
    assert step.parameters["layers.0.bias"] == -3


def test_clipping_by_hand() -> None:
    """All gradients shrink by limit / norm, and the trace shows them and the norm before that."""
    (step,) = single.train(line(clip=1.0), start=LINE).steps
    assert step.gradients["layers.0.weight"] == 13
    assert step.norm == math.sqrt(233)
    unit = 2.0**-53  # a product, a quotient and a difference: three roundings of numbers below 4
    assert step.parameters["layers.0.weight"] == pytest.approx(2 - 0.5 * 13 / math.sqrt(233), abs=12 * unit, rel=0)


def test_loss_of_no_opinion_is_the_logarithm_of_the_vocabulary() -> None:
    """A GPT whose weights are zero gives every word the same probability: ln 7 a token, whatever the targets."""
    model = GPT(vocabulary=7, context=4, width=6, layers=1, heads=2)
    zero = {name: np.zeros(spec.shape) for name, spec in model.build().specs.items()}
    tokens = np.arange(8).reshape(2, 4) % 7
    case = Case(model, SGD(lr=0.0), (Batch(tokens, tokens[:, ::-1], tokens != 3),))
    (step,) = single.train(case, start=zero).steps
    assert step.count == 7
    assert step.loss == pytest.approx(math.log(7), abs=16 * 2.0**-53, rel=0)  # 7 additions, 1 quotient, 1 logarithm


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_columns_and_micro_batches_do_not_divide(micro_batches: int) -> None:
    """The gradient of a squared error is 2 (y - target) / rows, not / elements (siboehm/ShallowSpeed@2e236ec)."""
    x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    case = Case(MLP((2, 2)), SGD(lr=0.0), (Batch(x, np.zeros_like(x), np.ones(4, bool)),))
    identity = {"layers.0.weight": np.eye(2), "layers.0.bias": np.zeros(2)}
    (step,) = single.train(
        case, start=identity, split=lambda step, rows: np.array_split(np.arange(rows), micro_batches)
    ).steps
    np.testing.assert_array_equal(step.gradients["layers.0.bias"], 2 * x.sum(0) / 4)
    np.testing.assert_array_equal(step.gradients["layers.0.weight"], 2 * x.T @ x / 4)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_order_and_split_of_rows_change_only_rounding(case: Case, run: int) -> None:
    """Dropout follows the row, the count is that of the step, and sums do not mind their order."""
    truth = single.train(case)
    other = single.train(case, split=bounds.shuffled(case, 10_000 + run))
    verdict = compare.compare(other, truth)
    assert verdict.ok, str(verdict)


@settings(max_examples=40, deadline=None)
@given(exact_cases(), st.integers(0, 1000))
def test_order_of_integers_changes_nothing(case: Case, run: int) -> None:
    """Where nothing rounds, not a bit."""
    other = single.train(case, split=bounds.shuffled(case, run))
    assert compare.compare(other, single.train(case), bounds=[]).ok


def test_training_learns_text() -> None:
    """The loss on real text falls: from no opinion, ln 256 = 5.5, to something much better."""
    text = b"the quick brown fox jumps over the lazy dog. " * 20
    model = GPT(vocabulary=256, context=16, width=24, layers=2, heads=3)
    case = Case(model, SGD(lr=0.5, momentum=0.9), text_batches(text, steps=30, rows=8, context=16), clip=1.0)
    losses = [step.loss for step in single.train(case).steps]
    assert losses[0] > 5
    assert losses[-1] < losses[0] / 2


def test_layouts_are_read_as_they_are_written() -> None:
    """Hyphens and underscores are the same; what is not said is as on one device."""
    layout = Layout.parse("dp=2, micro-batches=3,zero=1,recompute=sqrt")
    assert layout == Layout(dp=2, micro_batches=3, zero=1, recompute="sqrt")
    assert Layout.parse(str(layout)) == layout
    assert str(Layout()) == "dp=1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zeros=2", "did you mean zero"),
        ("xyzzy=2", "known are dp"),
        ("dp", "write dp=VALUE"),
        ("dp=two", "'two'"),
        ("dp=0", "dp is 0"),
        ("zero=4", "zero is 4: it must be a whole number from 0 to 3"),
        ("dp=2,tp=3,dp=1", "dp is given twice, as 2 and as 1"),
        ("", "layout '' says nothing: write KEY=VALUE"),
        (" , ", "says nothing"),
        ("stages=", "has no value"),
        ("micro_batches=65537", "from 1 to 65,536"),
        ("schedule=2f2b", "1f1b, gpipe"),
        ("recompute=some", "none, block, sqrt"),
    ],
)
def test_layouts_that_cannot_be(text: str, words: str) -> None:
    """The error names the key, the value and what would be right."""
    with pytest.raises(ValueError, match=words):
        Layout.parse(text)


TOKENS, NUMBERS = np.zeros((2, 3), np.int64), np.zeros((2, 3))


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "mask", "words"),
    [
        (GPT(5, 3, 2, 1, 1), TOKENS + 5, TOKENS, TOKENS == 0, "inputs from 5 to 5: tokens are 0 to 4"),
        (GPT(5, 3, 2, 1, 1), TOKENS - 1, TOKENS, TOKENS == 0, "inputs from -1 to -1"),
        (GPT(5, 3, 2, 1, 1), TOKENS, TOKENS - 100, TOKENS == 0, "targets from -100"),
        (GPT(5, 3, 2, 1, 1), NUMBERS, TOKENS, TOKENS == 0, "inputs of float64: tokens are integers"),
        (GPT(5, 2, 2, 1, 1), TOKENS, TOKENS, TOKENS == 0, r"inputs of shape \(2, 3\): the model takes \(2, 2\)"),
        (GPT(5, 3, 2, 1, 1), TOKENS, TOKENS[:, :2], TOKENS == 0, r"targets of shape \(2, 2\)"),
        (MLP((3, 4)), NUMBERS, NUMBERS, np.ones(2, bool), r"targets of shape \(2, 3\): the model takes \(2, 4\)"),
        (MLP((3, 3)), NUMBERS, NUMBERS, TOKENS == 0, r"mask of shape \(2, 3\): the model takes \(2,\)"),
    ],
)
def test_batches_that_do_not_fit(model: GPT | MLP, inputs: object, targets: object, mask: object, words: str) -> None:
    """A batch that the model cannot take is refused when the case is made, not somewhere inside a rank."""
    with pytest.raises(ValueError, match=words):
        Case(model, SGD(lr=0.1), (Batch(inputs, targets, mask),))
