"""Every layer: its values against the formula, its gradients against central differences, its types and its manners."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from finite import H, at, check_layer, draw_params, numbers, run
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.nn.layer import live_bytes
from refpar.nn.layers import (
    GELU,
    Attention,
    Bias,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Position,
    ReLU,
    Residual,
    Sequential,
    Unembed,
)

DTYPES = (np.float16, np.float32, np.float64)
sizes = st.integers(1, 4)
rows = st.integers(0, 3)


def strided(draw, x):
    """Return x with the same values in another memory order: axes permuted, every second element, or reversed."""
    order = draw(st.permutations(range(x.ndim)))
    y = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    how = draw(st.sampled_from(["dense", "gaps", "reversed"]))
    if how == "gaps":
        y = np.repeat(y, 2, axis=-1)[..., ::2]
    if how == "reversed":
        y = np.ascontiguousarray(y[::-1])[::-1]
    assert np.array_equal(x, y)
    return y


@dataclass
class Sizes:
    """Sizes from which every kind of layer can be made."""

    seq: int
    width: int
    heads: int
    head_dim: int
    vocabulary: int
    rate: float
    bias: bool


KINDS = {
    "Linear to q, k, v": lambda n: (
        Linear("l", (n.width,), (3, n.heads, n.head_dim), bias=n.bias),
        (n.seq, n.width),
        (n.seq, 3, n.heads, n.head_dim),
    ),
    "Linear from heads": lambda n: (
        Linear("l", (n.heads, n.head_dim), (n.width,), bias=n.bias),
        (n.heads, n.head_dim),
        (n.width,),
    ),
    "Bias": lambda n: (Bias("b", (n.heads, n.width)), (n.seq, n.heads, n.width), (n.seq, n.heads, n.width)),
    "Embedding": lambda n: (Embedding("e", n.vocabulary, n.width), (n.seq,), (n.seq, n.width)),
    "Position": lambda n: (Position("p", n.seq + n.heads - 1, n.width), (n.seq, n.width), (n.seq, n.width)),
    "Unembed": lambda n: (Unembed("e.weight", n.vocabulary, n.width), (n.seq, n.width), (n.seq, n.vocabulary)),
    "LayerNorm": lambda n: (LayerNorm("n", n.width), (n.seq, n.width), (n.seq, n.width)),
    "ReLU": lambda n: (ReLU(), (n.seq, n.width), (n.seq, n.width)),
    "GELU": lambda n: (GELU(), (n.seq, n.width), (n.seq, n.width)),
    "Attention": lambda n: (
        Attention("a", (1, 1 + n.heads, n.heads + 2), n.rate),
        (n.seq, 3, n.heads, n.head_dim),
        (n.seq, n.heads, n.head_dim),
    ),
    "Dropout": lambda n: (Dropout("d", n.rate), (n.seq, n.width), (n.seq, n.width)),
    "Residual": lambda n: (
        Residual(Sequential([Linear("l", (n.width,), (n.width,)), GELU()])),
        (n.width,),
        (n.width,),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
some_sizes = st.builds(
    Sizes,
    *[sizes] * 5,
    rate=st.sampled_from([0.0, 0.25, 0.5]),
    bias=st.booleans(),
)


def inputs(layer, batch, x_shape, rng):
    if isinstance(layer, Embedding):
        return rng.integers(0, layer.vocabulary, (batch, *x_shape))
    x = numbers(rng, batch, *x_shape)
    if isinstance(layer, ReLU):
        x += np.where(x < 0, -2 * H, 2 * H)  # a difference across the kink is no derivative
    if isinstance(layer, LayerNorm):
        x += 4 * np.arange(x.shape[-1])  # a variance near 0 turns the rounding of the mean into the whole result
    return x


@every_kind
@settings(max_examples=25, deadline=None)
@given(st.data(), some_sizes, rows, st.integers(0, 2**32 - 1))
def test_gradients_are_those_of_central_differences(kind, data, n, batch, seed):
    """For every layer, shape, memory order and number of rows (none too), each element of each gradient."""
    layer, x_shape, y_shape = KINDS[kind](n)
    rng = np.random.default_rng(seed)
    x = strided(data.draw, inputs(layer, batch, x_shape, rng))
    dy = strided(data.draw, numbers(rng, batch, *y_shape))
    check_layer(layer, draw_params(layer, rng), x, dy, at(batch))


@every_kind
@settings(max_examples=20, deadline=None)
@given(some_sizes, rows, st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_types_are_kept(kind, n, batch, seed, dtype):
    """Activations stay in their type, parameter gradients leave in the accumulator's; nothing becomes float64."""
    layer, x_shape, y_shape = KINDS[kind](n)
    rng = np.random.default_rng(seed)
    x = inputs(layer, batch, x_shape, rng)
    x = x.astype(dtype) if x.dtype.kind == "f" else x
    y, gradients, dx = run(
        layer, draw_params(layer, rng, dtype), x, numbers(rng, batch, *y_shape).astype(dtype), at(batch)
    )
    assert y.dtype == dtype
    assert not np.shares_memory(x, y)
    assert dx is None if kind == "Embedding" else dx.dtype == dtype
    assert {g.dtype for g in gradients.values()} <= {np.dtype(np.float32 if dtype == np.float16 else dtype)}


@every_kind
@settings(max_examples=10, deadline=None)
@given(some_sizes, rows, st.integers(0, 2**32 - 1))
def test_nothing_saved_is_a_parameter(kind, n, batch, seed):
    """A layer that kept a parameter would keep alive what ZeRO-3 drops, and miss what it gathers again."""
    layer, x_shape, _ = KINDS[kind](n)
    rng = np.random.default_rng(seed)
    params = draw_params(layer, rng)
    _, saved = layer.forward(params, inputs(layer, batch, x_shape, rng), at(batch))
    assert live_bytes(saved, params) == live_bytes(saved) + live_bytes(params)


def test_activation_memory_is_what_the_table_says():
    """Bytes kept by each layer in float16, for 2 rows of 3 places and width 8, 4 heads: the table in layers.py."""
    x = np.ones((2, 3, 8), np.float16)
    here = at(2)

    def kept(layer, x):
        return live_bytes(layer.forward(draw_params(layer, np.random.default_rng(0), np.float16), x, here)[1])

    assert kept(Linear("l", (8,), (5,)), x) == x.nbytes
    assert kept(Bias("b", (8,)), x) == 0
    assert kept(Position("p", 3, 8), x) == 0
    assert kept(Unembed("u", 5, 8), x) == x.nbytes
    assert kept(LayerNorm("n", 8), x) == x.nbytes + 2 * 4 * 6  # mean and 1/deviation in float32
    assert kept(ReLU(), x) == x.size
    assert kept(GELU(), x) == x.nbytes
    assert kept(Dropout("d", 0.5), x) == x.size
    qkv = np.ones((2, 3, 3, 4, 2), np.float16)
    probabilities = 2 * 4 * 3 * 3
    assert kept(Attention("a", (0, 4, 4)), qkv) == qkv.nbytes + 2 * probabilities
    assert kept(Attention("a", (0, 4, 4), 0.5), qkv) == qkv.nbytes + 2 * probabilities + probabilities


def test_linear_is_a_contraction():
    """The qkv projection and the projection of the heads, against einsum."""
    rng = np.random.default_rng(0)
    x, w, b = numbers(rng, 2, 3, 6), numbers(rng, 6, 3, 2, 5), numbers(rng, 3, 2, 5)
    y, _ = Linear("l", (6,), (3, 2, 5)).forward({"l.weight": w, "l.bias": b}, x, at(2))
    np.testing.assert_allclose(y, np.einsum("bsw,wkhd->bskhd", x, w) + b, rtol=0, atol=6 * 2.0**-53 * 7)
    x, w = numbers(rng, 2, 3, 2, 5), numbers(rng, 2, 5, 6)
    y, _ = Linear("l", (2, 5), (6,), bias=False).forward({"l.weight": w}, x, at(2))
    np.testing.assert_allclose(y, np.einsum("bshd,hdw->bsw", x, w), rtol=0, atol=10 * 2.0**-53 * 10)


def test_specs_say_how_to_split():
    """A bias is split with the outputs (column-parallel) and whole where the inputs are split (row-parallel)."""

    def axes(layer):
        return {name.removeprefix("l."): spec.axis for name, spec in layer.specs.items()}

    assert axes(Linear("l", (6,), (3, 4, 2), axis=2)) == {"weight": 2, "bias": 1}
    assert axes(Linear("l", (4, 2), (6,), axis=0)) == {"weight": 0, "bias": None}
    assert axes(Linear("l", (4, 2), (6,))) == {"weight": None, "bias": None}
    assert Linear("l", (4, 2), (6,)).specs["l.weight"].shape == (4, 2, 6)
    assert Linear("l", (4,), (3, 6)).specs["l.bias"].shape == (3, 6)
    assert Linear("l", (2, 8), (6,)).specs["l.weight"].init == 0.25
    for layer in (Linear("l", (4,), (6,)), LayerNorm("l", 4)):
        assert {n: s.decay for n, s in layer.specs.items()} == {"l.weight": isinstance(layer, Linear), "l.bias": False}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_row_parallel_linear_rounds_once(parts):
    """Unrounded parts, summed in float32 and given their bias, are the whole layer bit for bit in halves.

    Inputs are integers whose sums stay below 2^24, so float32 sums are exact in any order, while the
    parts need more than the 11 bits of a half: rounding them first gives other numbers.
    """
    rng = np.random.default_rng(parts)
    x, w = (rng.integers(-60, 61, s).astype(np.float16) for s in ((7, 12), (12, 5)))
    b = rng.integers(-60, 61, 5).astype(np.float16)
    whole, _ = Linear("l", (12,), (5,)).forward({"l.weight": w, "l.bias": b}, x, at(7))
    part = Linear("l", (12,), (5,), bias=False, unrounded_y=True)
    pieces = [
        part.forward({"l.weight": wp}, xp, at(7))[0]
        for xp, wp in zip(np.array_split(x, parts, axis=1), np.array_split(w, parts), strict=True)
    ]
    assert all(piece.dtype == np.float32 for piece in pieces)
    y, _ = Bias("l", (5,)).forward({"l.bias": b}, sum(pieces), at(7))
    assert y.dtype == np.float16
    assert np.array_equal(y, whole)
    rounded = sum(piece.astype(np.float16).astype(np.float32) for piece in pieces)
    assert parts == 1 or not np.array_equal(Bias("l", (5,)).forward({"l.bias": b}, rounded, at(7))[0], whole)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_column_parallel_linear_rounds_its_input_gradient_once(parts):
    """The parts of dx, left in float32, sum to the dx of the whole layer; so do those of the output projection."""
    rng = np.random.default_rng(parts)
    x, w, dy = (rng.integers(-60, 61, s).astype(np.float16) for s in ((7, 12), (12, 5), (7, 5)))
    _, _, whole = run(Linear("l", (12,), (5,), bias=False), {"l.weight": w}, x, dy, at(7))
    part = Linear("l", (12,), (5,), bias=False, unrounded_dx=True)
    splits = [np.array_split(a, parts, axis=1) for a in (w, dy)]
    dxs = [run(part, {"l.weight": wp}, x, dyp, at(7))[2] for wp, dyp in zip(*splits, strict=True)]
    assert all(dx.dtype == np.float32 for dx in dxs)
    assert np.array_equal(sum(dxs).astype(np.float16), whole)
    head = Unembed("h", 5, 12, unrounded_dx=True)
    dxs = [run(head, {"h": wp.T}, x, dyp, at(7))[2] for wp, dyp in zip(*splits, strict=True)]
    assert np.array_equal(sum(dxs).astype(np.float16), whole)


def test_sums_of_halves_are_kept_in_float32():
    """4,096 ones are 4,096 in every parameter gradient (in halves: 2,048), and 70,000 does not overflow."""
    n = 4096
    one = np.ones((n, 1, 1), np.float16)
    for layer, x in [
        (Linear("l", (1,), (1,)), one),
        (Bias("b", (1,)), one),
        (Position("p", 1, 1), one),
        (Unembed("u", 1, 1), one),
        (Embedding("e", 1, 1), np.zeros((n, 1), int)),
    ]:
        params = {name: np.ones(s.shape, np.float16) for name, s in layer.specs.items()}
        for dy, right in ((one, n), (one * 20, 20 * n)):
            for name, g in run(layer, params, x, dy, at(n))[1].items():
                assert g == right, name
    ones = np.ones((n, 2), np.float16)
    _, gradients, _ = run(LayerNorm("n", 2), {"n.weight": ones[0], "n.bias": ones[0]}, ones, ones, at(n))
    assert np.array_equal(gradients["n.bias"], [n, n])
    wide = np.full((1, 8000), 3, np.float16)
    y, _ = Linear("l", (8000,), (1,), bias=False, unrounded_y=True).forward({"l.weight": wide.T}, wide, at(1))
    assert y[0, 0] == 72000


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), sizes, st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_the_sorted_embedding_gradient_is_that_of_add_at(batch, seq, vocabulary, dtype, seed):
    """Bit for bit on integers; ids may repeat, be missing, or be none at all."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (batch, seq))
    dy = rng.integers(-8, 9, (batch, seq, 3)).astype(dtype)
    table = numbers(rng, vocabulary, 3).astype(dtype)
    y, gradients, _ = run(Embedding("e", vocabulary, 3), {"e.weight": table}, ids, dy, at(batch))
    expected = np.zeros((vocabulary, 3))
    np.add.at(expected, ids, dy.astype(float))
    assert np.array_equal(gradients["e.weight"], expected)
    for b, s in np.ndindex(ids.shape):
        assert np.array_equal(y[b, s], table[ids[b, s]])


def test_positions_are_added_from_the_first_on():
    """A sequence shorter than the context uses its beginning; a longer one is refused with both numbers."""
    layer = Position("p", 4, 2)
    weight = np.arange(8.0).reshape(4, 2)
    y, gradients, _ = run(layer, {"p.weight": weight}, np.zeros((3, 2, 2)), np.ones((3, 2, 2)), at(3))
    assert np.array_equal(y[2], weight[:2])
    assert np.array_equal(gradients["p.weight"], [[3, 3], [3, 3], [0, 0], [0, 0]])
    with pytest.raises(ValueError, match=r"5 tokens is longer than the context, 4"):
        layer.forward({"p.weight": weight}, np.zeros((1, 5, 2)), at(1))


def test_layer_norm_has_mean_and_deviation_of_its_parameters():
    """Against the formula in Python floats; a constant row, whose variance is 0, gives the bias."""
    x = np.array([[[1.0, 2.0, 4.0, 9.0], [3.0, 3.0, 3.0, 3.0]]])
    w, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([5.0, 6.0, 7.0, 8.0])
    y, _ = LayerNorm("n", 4).forward({"n.weight": w, "n.bias": b}, x, at(1))
    deviation = math.sqrt((9 + 4 + 0 + 25) / 4 + 1e-5)  # mean 4
    for i, value in enumerate([1.0, 2.0, 4.0, 9.0]):
        assert y[0, 0, i] == pytest.approx((value - 4) / deviation * w[i] + b[i], rel=8 * 2.0**-53)
    assert np.array_equal(y[0, 1], b)


def test_layer_norm_of_halves_has_float32_statistics():
    """Width 4,096 of halves around 512: in halves the sum overflows; rounded once, the result is within half a step."""
    rng = np.random.default_rng(0)
    x = (512 + numbers(rng, 1, 4096)).astype(np.float16)
    w, b = np.ones(4096, np.float16), np.zeros(4096, np.float16)
    y, _ = LayerNorm("n", 4096).forward({"n.weight": w, "n.bias": b}, x, at(1))
    x64 = x.astype(np.float64)
    right = (x64 - x64.mean()) / np.sqrt(x64.var() + 1e-5)
    # Half a step of float16, and float32's error in the mean: 4096 terms of 512, over a deviation of 0.5.
    bound = np.spacing(np.abs(right).astype(np.float16)).astype(float) / 2 + 13 * 2.0**-24 * 512 / 0.5
    assert np.all(np.abs(y - right) <= bound)


@pytest.mark.parametrize("x", [-30.0, -1.5, -0.1, 0.0, 0.1, 1.5, 30.0])
def test_activations_are_their_formulas(x):
    """GELU in the tanh form, with math.tanh; far out it is 0 and x; ReLU has slope 0 at 0."""
    array = np.array([[x]])
    y, _, dx = run(GELU(), {}, array, np.ones((1, 1)), at(1))
    t = math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    assert y[0, 0] == pytest.approx(x / 2 * (1 + t), rel=4 * 2.0**-53 / max(1 + t, 2.0**-53), abs=2.0**-53)
    if abs(x) == 30:
        assert (y[0, 0], dx[0, 0]) == (max(x, 0), x > 0)
    y, _, dx = run(ReLU(), {}, array, np.ones((1, 1)), at(1))
    assert (y[0, 0], dx[0, 0]) == (max(x, 0), x > 0)


def test_a_dead_unit_has_gradient_zero_even_under_overflow():
    """Where ReLU was off, an infinite gradient from above is stopped, not turned into NaN."""
    _, _, dx = run(ReLU(), {}, np.array([[-1.0, 1.0]]), np.array([[np.inf, np.inf]]), at(1))
    assert np.array_equal(dx, [[0, np.inf]])


def test_attention_is_its_formula():
    """Against three loops over places, for each head by itself."""
    batch, seq, heads, dim = 2, 5, 3, 4
    x = 3 * numbers(np.random.default_rng(0), batch, seq, 3, heads, dim)
    y, _ = Attention("a", (0, heads, heads)).forward({}, x, at(batch))
    for b, s, h in np.ndindex(batch, seq, heads):
        weights = [math.exp(sum(x[b, s, 0, h] * x[b, t, 1, h]) / math.sqrt(dim)) for t in range(s + 1)]
        right = sum(w * x[b, t, 2, h] for t, w in enumerate(weights)) / sum(weights)
        np.testing.assert_allclose(y[b, s, h], right, rtol=0, atol=100 * 2.0**-53)


def test_attention_looks_at_the_past_only():
    """Other tokens later on change no bit of what came before; nor does the gradient reach them."""
    rng = np.random.default_rng(0)
    x = numbers(rng, 2, 6, 3, 2, 3)
    layer = Attention("a", (0, 2, 2))
    for place in range(6):
        other = x.copy()
        other[:, place:] = 5 * numbers(rng, 2, 6 - place, 3, 2, 3)
        assert np.array_equal(layer.forward({}, other, at(2))[0][:, :place], layer.forward({}, x, at(2))[0][:, :place])
        dy = np.zeros((2, 6, 2, 3))
        dy[:, :place] = 1
        assert not run(layer, {}, x, dy, at(2))[2][:, place:].any()


def test_large_scores_do_not_overflow():
    """Scores of 10^4 in float32 and of 3 * 10^5 from halves: the largest wins, nothing is NaN."""
    for dtype, size in ((np.float32, 100.0), (np.float16, 550.0)):
        x = np.zeros((1, 2, 3, 1, 1), dtype)
        x[0, :, 0] = size
        x[0, :, 1, 0, 0] = (size, -size)
        x[0, :, 2, 0, 0] = (3, 5)
        y, _ = Attention("a", (0, 1, 1)).forward({}, x, at(1))
        assert np.array_equal(y.ravel(), [3, 3])


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_dropout_does_not_depend_on_who_computes_which_rows(data, batch, seed):
    """Any order of rows, any subset and any slice of the heads see the masks of the whole."""
    rng = np.random.default_rng(seed)
    some = data.draw(st.lists(st.sampled_from(range(batch)), unique=True))
    start, stop = sorted((data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))))
    numbered = at(batch).rows
    x = 1 + np.abs(numbers(rng, batch, 4, 3, 3, 2))
    drop, attention = Dropout("d", 0.5), Attention("a", (0, 3, 3), 0.5)
    part = Attention("a", (start, stop, 3), 0.5)
    here = at(len(some), rows=tuple(numbered[i] for i in some))
    assert np.array_equal(drop.forward({}, x[some], here)[0], drop.forward({}, x, at(batch))[0][some])
    whole = attention.forward({}, x, at(batch))[1][-1][some]
    assert np.array_equal(part.forward({}, x[some][:, :, :, start:stop], here)[1][-1], whole[:, start:stop])


def test_dropout_masks_differ_where_they_must():
    """Another seed, step, layer, row, head or place: another mask; the same address: the same."""
    x = np.ones((2, 4, 8))

    def mask(name, **where):
        return Dropout(name, 0.5).forward({}, x, at(2, **where))[1]

    masks = [mask("d"), mask("e"), mask("d", seed=8), mask("d", step=4), mask("d", rows=(5, 6))]
    rows = [m[row].tobytes() for m in masks for row in range(2)]
    assert len(set(rows)) == len(rows)
    assert np.array_equal(masks[0], mask("d"))
    keep = Attention("a", (0, 2, 2), 0.5).forward({}, np.ones((2, 8, 3, 2, 1)), at(2))[1][-1]
    assert len({keep[b, h].tobytes() for b, h in itertools.product(range(2), range(2))}) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_keeps_the_mean(dtype):
    """What is kept is divided by the share that is kept; an evaluation drops nothing."""
    x = np.full((8, 1000), 3, dtype)
    y, keep = Dropout("d", 0.25).forward({}, x, at(8))
    assert np.array_equal(y, np.where(keep, np.asarray(4, dtype), 0))
    # 8,000 draws: the share kept is within six standard deviations, sqrt(0.25 * 0.75 / 8000) each, of 0.75.
    assert abs(keep.mean() - 0.75) < 6 * math.sqrt(0.25 * 0.75 / 8000)
    for rate, where in ((0.25, at(8, train=False)), (0.0, at(8))):
        y, keep = Dropout("d", rate).forward({}, x, where)
        assert keep is None
        assert np.array_equal(x, y)
    qkv = numbers(np.random.default_rng(0), 2, 3, 3, 1, 2).astype(dtype)
    dry, _ = Attention("a", (0, 1, 1), 0.5).forward({}, qkv, at(2, train=False))
    assert np.array_equal(dry, Attention("a", (0, 1, 1)).forward({}, qkv, at(2))[0])


def test_a_layer_runs_on_a_slice_of_its_weight():
    """Shapes come from the parameters: whole heads of qkv, an empty slice too."""
    rng = np.random.default_rng(0)
    layer = Linear("l", (4,), (3, 5, 2))
    params = draw_params(layer, rng)
    x = numbers(rng, 2, 3, 4)
    whole, _ = layer.forward(params, x, at(2))
    for start, stop in ((0, 3), (3, 5), (5, 5)):
        part = {"l.weight": params["l.weight"][:, :, start:stop], "l.bias": params["l.bias"][:, start:stop]}
        y, gradients, dx = run(layer, part, x, np.ones((2, 3, 3, stop - start, 2)), at(2))
        np.testing.assert_allclose(y, whole[..., start:stop, :], rtol=0, atol=4 * 2.0**-53 * 5)
        assert gradients["l.weight"].shape == part["l.weight"].shape
        assert dx.shape == x.shape


def test_a_layer_used_twice_yields_twice():
    """y = f(f(x)), f = 2x + 0, x = 3: dw = 2 * w * x = 12, as the sum of what is yielded (fairscale#784)."""
    f = Linear("f", (1,), (1,))
    params = {"f.weight": np.array([[2.0]]), "f.bias": np.zeros(1)}
    y, gradients, dx = run(Sequential([f, f]), params, np.array([[3.0]]), np.ones((1, 1)), at(1))
    assert (y[0, 0], gradients["f.weight"][0, 0], gradients["f.bias"][0], dx[0, 0]) == (12, 12, 3, 4)
