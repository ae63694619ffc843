"""Losses: sums that may be split anywhere, counts from the targets alone, and nothing from a masked token."""

import math

import numpy as np
import pytest
from finite import Evaluation, check, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.nn.loss import CrossEntropy, SquaredError, seed_and_divisor, token_count

DTYPES = (np.float16, np.float32, np.float64)
seeds = st.integers(0, 2**32 - 1)


def cross_entropy(rng, batch, seq, vocabulary, share=0.6):
    mask = rng.random((batch, seq)) < share
    targets = np.where(mask, rng.integers(0, vocabulary, (batch, seq)), -100)
    return CrossEntropy(), 3 * numbers(rng, batch, seq, vocabulary), targets, mask


def squared_error(rng, batch, columns, share=0.6):
    return SquaredError(), numbers(rng, batch, columns), numbers(rng, batch, columns), rng.random(batch) < share


@st.composite
def problems(draw):
    """A loss with outputs, targets and mask; no rows and no tokens included."""
    rng = np.random.default_rng(draw(seeds))
    batch, seq, width = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    share = draw(st.sampled_from([0.0, 0.6, 1.0]))
    if draw(st.booleans()):
        return cross_entropy(rng, batch, seq, width, share)
    return squared_error(rng, batch, width, share)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([1.0, 0.25, 3.0]))
def test_gradients_are_those_of_central_differences(problem, seed):
    """``seed`` times the derivative of the sum, for every element; zero where the mask is False."""
    loss, y, targets, mask = problem
    y.flags.writeable = targets.flags.writeable = mask.flags.writeable = False
    _, saved = loss.forward(y, targets, mask)
    dy = loss.backward(saved, seed)
    y.flags.writeable = True
    assert not dy[~mask].any()

    def f() -> Evaluation:
        # Before they cancel, the terms are as large as the logits: up to 3, and the logarithm of 5, a token.
        value = float(loss.forward(y, targets, mask)[0])
        return seed * value, seed * (abs(value) + 5 * mask.sum())

    check(f, y, dy, "y")


def test_cross_entropy_is_its_formula():
    """In Python floats, token by token."""
    loss, y, targets, mask = cross_entropy(np.random.default_rng(0), 3, 4, 5)
    value, _ = loss.forward(y, targets, mask)
    right = math.fsum(
        math.log(math.fsum(math.exp(z) for z in y[b, s])) - y[b, s, targets[b, s]] for b, s in np.argwhere(mask)
    )
    assert float(value) == pytest.approx(right, rel=0, abs=8 * 2.0**-53 * 5 * mask.sum())
    uniform, _ = loss.forward(np.zeros((1, 1, 4)), np.zeros((1, 1), int), np.ones((1, 1), bool))
    assert float(uniform) == pytest.approx(math.log(4), rel=2.0**-52)


def test_squared_error_is_its_formula():
    """4 rows of 2 columns: the gradient of the mean over rows is 2 (y - t) / 4, whatever the columns (ShallowSpeed)."""
    y, t = np.arange(8.0).reshape(4, 2), np.ones((4, 2))
    mask = np.ones(4, bool)
    value, saved = SquaredError().forward(y, t, mask)
    assert value == sum((v - 1) ** 2 for v in range(8))
    seed, divisor = seed_and_divisor("before", 1, token_count(mask))
    assert np.array_equal(SquaredError().backward(saved, seed) / divisor, 2 * (y - t) / 4)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 8), seeds)
def test_any_split_of_the_rows_adds_up(data, batch, seed):
    """Sums and counts of the parts add up to those of the whole, and gradients are the same rows.

    The squared errors of small integers are exact, so they are compared bit for bit; the cross-entropy of
    n tokens is a sum of n terms in another order: 2 (n - 1) u times the sum of magnitudes.
    """
    rng = np.random.default_rng(seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, batch), max_size=4)))
    loss, y, targets, mask = cross_entropy(rng, batch, 3, 5)
    tokens = mask.sum()
    parts = [loss.forward(*p) for p in zip(*(np.split(a, cuts) for a in (y, targets, mask)), strict=True)]
    whole, saved = loss.forward(y, targets, mask)
    assert sum(token_count(m) for m in np.split(mask, cuts)) == token_count(mask) == tokens
    assert abs(sum(v for v, _ in parts) - whole) <= 2 * tokens * 2.0**-53 * float(whole)
    assert np.array_equal(np.concatenate([loss.backward(s, 0.5) for _, s in parts]), loss.backward(saved, 0.5))

    loss, y, targets, mask = SquaredError(), *rng.integers(-9, 10, (2, batch, 3)).astype(float), rng.random(batch) < 0.6
    parts = [loss.forward(*p) for p in zip(*(np.split(a, cuts) for a in (y, targets, mask)), strict=True)]
    assert sum(v for v, _ in parts) == loss.forward(y, targets, mask)[0]


def test_a_mean_of_means_is_not_the_mean():
    """1 and 3 valid tokens with sums 8 and 4: 12 / 4 = 3, not 4.667 (huggingface/transformers#34242)."""
    parts = [(np.array([[8.0**0.5]]), 1), (np.array([[1.0], [1.0], [2.0**0.5]]), 3)]
    values = [SquaredError().forward(y, np.zeros_like(y), np.ones(n, bool))[0] for y, n in parts]
    counts = [token_count(np.ones(n, bool)) for _, n in parts]
    assert sum(values) / sum(counts) == pytest.approx(3, rel=2.0**-50)
    assert np.mean([v / c for v, c in zip(values, counts, strict=True)]) == pytest.approx(14 / 3, rel=2.0**-50)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_masked_token_is_nothing(poison):
    """Infinite and NaN logits under the mask leave no trace, and raise no warning; nor does a target of -100."""
    for loss, y, targets, mask in (
        cross_entropy(np.random.default_rng(0), 3, 4, 5),
        squared_error(np.random.default_rng(1), 6, 2),
    ):
        assert 0 < mask.sum() < mask.size
        right, saved = loss.forward(y, targets, mask)
        poisoned = y.copy()
        poisoned[~mask] = poison
        value, poisoned_saved = loss.forward(poisoned, targets, mask)
        assert value == right
        assert np.array_equal(loss.backward(poisoned_saved, 0.5), loss.backward(saved, 0.5))
        nothing, saved = loss.forward(poisoned, targets, np.zeros_like(mask))
        assert nothing == 0
        assert np.array_equal(loss.backward(saved, 1.0), np.zeros_like(y))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_are_stable(dtype):
    """Logits of 60,000: the loss is their difference, the gradient 0 or 1."""
    y = np.array([[[60000, 0, -60000]] * 2], dtype)
    targets, mask = np.array([[0, 2]]), np.ones((1, 2), bool)
    value, saved = CrossEntropy().forward(y, targets, mask)
    assert value == 120000
    assert np.array_equal(CrossEntropy().backward(saved, 1), [[[0, 0, 0], [1, 0, -1]]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 3])
def test_types_are_kept(dtype, batch):
    """The sum is 0-d in the accumulator type, the gradient in the type of y, with a float or a 0-d seed."""
    accumulator = np.float32 if dtype == np.float16 else dtype
    for loss, y, targets, mask in (
        cross_entropy(np.random.default_rng(0), batch, 4, 5),
        squared_error(np.random.default_rng(0), batch, 3),
    ):
        targets = targets if targets.dtype.kind == "i" else targets.astype(dtype)
        value, saved = loss.forward(y.astype(dtype), targets, mask)
        assert (value.shape, value.dtype) == ((), accumulator)
        for seed in (0.3, np.float64(0.3), np.float32(0.3)):
            assert loss.backward(saved, seed).dtype == dtype


def test_halves_are_summed_in_float32():
    """4,096 rows with an error of 1 sum to 4,096, and errors of 300, whose squares are no halves, to 90,000 each."""
    for size, right in ((1, 4096), (300, 4096 * 90000)):
        y = np.full((4096, 1), size, np.float16)
        value, _ = SquaredError().forward(y, np.zeros_like(y), np.ones(4096, bool))
        assert value == right
    value, _ = CrossEntropy().forward(
        np.array([[[0, 11]] * 4096], np.float16), np.zeros((1, 4096), int), np.ones((1, 4096), bool)
    )
    # One loss is 11.0000167, two float32 steps above 11; pairwise, 12 additions round it by at most u each.
    assert abs(float(value) - 4096 * math.log1p(math.exp(11))) <= 14 * 2.0**-24 * 4096 * 11.1


def test_seed_and_divisor():
    """The seed times the gradient of the sum, over the divisor, is the gradient of the mean, either way."""
    for scale in (1, 1024):
        for count in (1, 3, 64):
            for divide in ("before", "after"):
                seed, divisor = seed_and_divisor(divide, scale, count)
                assert seed / divisor == pytest.approx(1 / count, rel=2.0**-52)
    assert seed_and_divisor("before", 1024, 4) == (256, 1024)
    assert seed_and_divisor("after", 1024, 4) == (1024, 4096)
    with pytest.raises(ValueError, match="divide must be 'before' or 'after', not 'never'"):
        seed_and_divisor("never", 1, 1)


@pytest.mark.parametrize("divide", ["before", "after"])
def test_a_step_without_tokens_has_gradient_zero(divide):
    """Seed and divisor are finite and positive, and every gradient is exactly zero, not 0/0."""
    loss, y, targets, mask = cross_entropy(np.random.default_rng(0), 2, 3, 4, share=0)
    seed, divisor = seed_and_divisor(divide, 1024, token_count(mask))
    assert math.isfinite(seed)
    assert divisor > 0
    value, saved = loss.forward(y, targets, mask)
    assert value == 0
    assert np.array_equal(loss.backward(saved, seed) / divisor, np.zeros_like(y))
