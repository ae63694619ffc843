"""The MLP and the GPT: whole networks against central differences, causal, exact where they can be, well named."""

import numpy as np
import pytest
from finite import Evaluation, at, check, check_layer, draw_params, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.nn.layer import ParamSpec, Stream
from refpar.nn.layers import ReLU
from refpar.nn.loss import CrossEntropy, SquaredError
from refpar.nn.models import GPT, MLP, Model, initial_value

SMALL = GPT(vocabulary=5, context=3, width=4, layers=2, heads=2, mlp_width=5, dropout=0.25)


def example(model: Model, batch: int, rng: np.random.Generator, vocabulary: int = 5, seq: int = 3):
    """Return input, targets and mask."""
    if isinstance(model.loss, SquaredError):
        first, last = (list(model.specs.values())[i].shape for i in (0, -1))
        return numbers(rng, batch, first[0]), numbers(rng, batch, last[-1]), rng.random(batch) < 0.8
    ids = rng.integers(0, vocabulary, (batch, seq + 1))
    return ids[:, :-1], ids[:, 1:], rng.random((batch, seq)) < 0.8


def gradients(model, params, x, targets, mask, seed=1.0, where=None):
    """Return the loss sum, and the gradient of every parameter: what is yielded twice is added up."""
    where = where or at(len(x))
    y, saved = model.network.forward(params, x, where)
    loss, kept = model.loss.forward(y, targets, mask)
    found = {}
    for name, g in Stream(model.network.backward(params, saved, model.loss.backward(kept, seed))):
        found[name] = found[name] + g if name in found else g
    return loss, found


@pytest.fixture
def no_kink(monkeypatch):
    """Fail where a ReLU input changes sign between two evaluations: a difference across the kink is no derivative."""
    sides = {}
    forward = ReLU.forward

    def watched(self, params, x, at):
        sides.setdefault(x.shape, set()).add((x > 0).tobytes())
        return forward(self, params, x, at)

    monkeypatch.setattr(ReLU, "forward", watched)
    yield
    assert all(len(seen) == 1 for seen in sides.values())


@pytest.mark.usefixtures("no_kink")
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        GPT(5, 3, 4, layers=1, heads=1, tied=False, mlp_width=3),
        GPT(5, 4, 3, layers=1, heads=3, tied=False, mlp_width=3, dropout=0.5),
        GPT(5, 3, 2, layers=0, heads=1),
        MLP((3, 5, 4, 2)),
        MLP((1, 1)),
    ],
    ids=["gpt-tied-dropout", "gpt-untied", "gpt-heads-of-one", "gpt-no-blocks", "mlp", "mlp-one-layer"],
)
def test_whole_networks_have_the_gradients_of_central_differences(config):
    """Every element of every parameter's gradient, through the loss; a tied weight has the sum of both its uses."""
    rng = np.random.default_rng(1)
    model = config.build()
    params = draw_params(model.network, rng)
    x, targets, mask = example(model, 2, rng)
    where = at(2)
    _, found = gradients(model, params, x, targets, mask)
    assert set(found) == set(model.specs)

    def f() -> Evaluation:
        y, _ = model.network.forward(params, x, where)
        value = float(model.loss.forward(y, targets, mask)[0])
        return value, abs(value) + np.abs(y).sum()

    for name, p in params.items():
        check(f, p, found[name], name)


@pytest.mark.usefixtures("no_kink")
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_block_has_the_gradients_of_central_differences(activation):
    """One block by itself, its input included: the residual stream carries dx past both branches."""
    rng = np.random.default_rng(2)
    block = GPT(5, 3, 4, layers=1, heads=2, activation=activation, dropout=0.25).build().units[1][1]
    check_layer(block, draw_params(block, rng), numbers(rng, 2, 3, 4), numbers(rng, 2, 3, 4), at(2))


@pytest.mark.parametrize("tied", [True, False])
def test_the_gpt_is_pre_norm_with_two_residual_branches(tied):
    """The whole forward pass, written out once more in a few lines of einsum.

    Some hundred operations on numbers below 100 separate logits from input: 10^4 units of rounding.
    """
    rng = np.random.default_rng(0)
    config = GPT(5, 4, 6, layers=2, heads=3, mlp_width=7, tied=tied)
    network = config.build().network
    p = draw_params(network, rng)
    ids = rng.integers(0, 5, (2, 3))

    def norm(x, name):
        deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return (x - x.mean(-1, keepdims=True)) / deviation * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["embedding.token.weight"][ids] + p["embedding.position.weight"][:3]
    for b in ("blocks.0", "blocks.1"):
        qkv = np.einsum("bsw,wkhd->kbshd", norm(x, f"{b}.norm1"), p[f"{b}.attention.qkv.weight"])
        q, k, v = qkv + p[f"{b}.attention.qkv.bias"][:, None, None]
        weights = np.exp(np.einsum("bshd,bthd->bhst", q, k) / 2**0.5) * np.tri(3)
        mixed = np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("bshd,hdw->bsw", mixed, p[f"{b}.attention.proj.weight"]) + p[f"{b}.attention.proj.bias"]
        u = norm(x, f"{b}.norm2") @ p[f"{b}.mlp.up.weight"] + p[f"{b}.mlp.up.bias"]
        gelu = u / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (u + 0.044715 * u * u * u)))
        x = x + gelu @ p[f"{b}.mlp.down.weight"] + p[f"{b}.mlp.down.bias"]
    logits = norm(x, "head.norm") @ p["embedding.token.weight" if tied else "head.weight"].T
    y, _ = network.forward(p, ids, at(2))
    assert np.abs(y - logits).max() <= 1e4 * 2.0**-53 * max(1, np.abs(logits).max())


def test_the_mlp_has_relu_between_its_layers_and_none_after_the_last():
    """Bit for bit on integers."""
    model = MLP((3, 5, 4, 2), init="integers").build()
    p = {name: initial_value(0, name, spec, np.float64) for name, spec in model.specs.items()}
    x = np.random.default_rng(0).integers(-3, 4, (7, 3)).astype(float)
    y = x
    for i in range(3):
        y = (y if i == 0 else np.maximum(y, 0)) @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"]
    assert y.min() < 0 < y.max()
    assert np.array_equal(model.network.forward(p, x, at(7))[0], y)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_split_of_the_rows_sums_to_the_whole(data, tied, seed):
    """Losses and gradients of the parts, dropout included, add up to those of the batch, whatever the cuts.

    In float64 a mistake (a mask of another row, a lost row) is of the order of the gradient; the sums differ
    by their order, over at most 5 rows x 3 places, each the end of some hundred operations: 10^4 units.
    """
    rng = np.random.default_rng(seed)
    model = GPT(5, 3, 4, layers=1, heads=2, dropout=0.25, tied=tied).build()
    params = draw_params(model.network, rng)
    x, targets, mask = example(model, 5, rng)
    cuts = sorted(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    where = at(5).rows
    loss, whole = gradients(model, params, x, targets, mask)
    parts = [
        gradients(model, params, x[r], targets[r], mask[r], where=at(len(r), rows=tuple(where[i] for i in r)))
        for r in np.split(np.arange(5), cuts)
    ]
    assert abs(sum(part for part, _ in parts) - loss) <= 1e4 * 2.0**-53 * loss
    for name, g in whole.items():
        assert np.abs(sum(part[name] for _, part in parts) - g).max() <= 1e4 * 2.0**-53 * max(1, np.abs(g).max())


def test_logits_depend_on_the_past_only():
    """Other tokens from some place on change no bit of the logits before it."""
    rng = np.random.default_rng(0)
    model = SMALL.build()
    params = draw_params(model.network, rng)
    x = rng.integers(0, 5, (2, 3))
    y, _ = model.network.forward(params, x, at(2))
    for place in range(1, 3):
        other = x.copy()
        other[:, place:] = (x[:, place:] + 1) % 5
        changed, _ = model.network.forward(params, other, at(2))
        assert np.array_equal(changed[:, :place], y[:, :place])
        assert not np.array_equal(changed[:, place], y[:, place])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("config", [SMALL, MLP((3, 5, 2))], ids=["gpt", "mlp"])
def test_types_are_kept_through_the_whole_network(config, batch, dtype):
    """Logits in the type of the weights, gradients in the accumulator's; no rows give zero gradients for all names."""
    rng = np.random.default_rng(0)
    model = config.build()
    params = {name: initial_value(0, name, spec, dtype) for name, spec in model.specs.items()}
    x, targets, mask = example(model, batch, rng)
    if x.dtype.kind == "f":
        x, targets = x.astype(dtype), targets.astype(dtype)
    y, _ = model.network.forward(params, x, at(batch))
    loss, found = gradients(model, params, x, targets, mask, seed=1 / max(1, mask.sum()))
    accumulator = np.float32 if dtype == np.float16 else dtype
    assert (y.dtype, loss.dtype) == (dtype, accumulator)
    assert {name: (g.shape, g.dtype) for name, g in found.items()} == {
        name: (spec.shape, accumulator) for name, spec in model.specs.items()
    }
    if batch == 0:
        assert not any(g.any() for g in found.values())


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
def test_an_integer_mlp_is_exact(order, seed, dtype):
    """Equal bit for bit to Python integers, in both types and with the rows in any order.

    Hidden values stay within 3 * 3 + 1 = 10 and 5 * 10 + 1 = 51, outputs within 7 * 51 + 1 = 358, so the loss of
    6 rows x 2 columns within 12 * 361^2 < 2^21; every gradient is smaller, and 2^24 is exact in float32.
    """
    model = MLP((3, 5, 7, 2), init="integers").build()
    rng = np.random.default_rng(seed)
    params = {name: initial_value(seed, name, spec, dtype) for name, spec in model.specs.items()}
    assert {v for p in params.values() for v in p.ravel()} <= {-1, 0, 1}
    x, targets = rng.integers(-3, 4, (6, 3)).astype(dtype), rng.integers(-3, 4, (6, 2)).astype(dtype)
    mask = rng.random(6) < 0.8
    loss, found = gradients(model, params, x, targets, mask)
    order = list(order)
    other, shuffled = gradients(model, params, x[order], targets[order], mask[order])
    exact, wide = gradients(model, {n: p.astype(object) for n, p in params.items()}, *_objects(x, targets), mask)
    assert loss == other == exact
    for name, g in found.items():
        assert np.array_equal(g, shuffled[name])
        assert np.array_equal(g, wide[name].astype(float))


def _objects(*arrays):
    return [np.vectorize(int, otypes=[object])(a) for a in arrays]


def test_units_and_names_of_the_gpt():
    """The names that everything else goes by, with shapes and the axes of tensor parallelism."""
    model = GPT(vocabulary=11, context=7, width=6, layers=2, heads=3, tied=True).build()
    assert [name for name, _ in model.units] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert isinstance(model.loss, CrossEntropy)
    block = {
        "norm1.weight": ((6,), None),
        "norm1.bias": ((6,), None),
        "attention.qkv.weight": ((6, 3, 3, 2), 2),
        "attention.qkv.bias": ((3, 3, 2), 1),
        "attention.proj.weight": ((3, 2, 6), 0),
        "attention.proj.bias": ((6,), None),
        "norm2.weight": ((6,), None),
        "norm2.bias": ((6,), None),
        "mlp.up.weight": ((6, 24), 1),
        "mlp.up.bias": ((24,), 0),
        "mlp.down.weight": ((24, 6), 0),
        "mlp.down.bias": ((6,), None),
    }
    assert {name: (spec.shape, spec.axis) for name, spec in model.specs.items()} == {
        "embedding.token.weight": ((11, 6), 0),
        "embedding.position.weight": ((7, 6), None),
        **{f"blocks.{i}.{name}": value for i in range(2) for name, value in block.items()},
        "head.norm.weight": ((6,), None),
        "head.norm.bias": ((6,), None),
    }
    for name, spec in model.specs.items():
        assert spec.decay == (len(spec.shape) > 1 and not name.endswith("bias")), name
    shrunk = {name: spec.init for name, spec in model.specs.items() if name.endswith(("proj.weight", "down.weight"))}
    assert shrunk["blocks.1.attention.proj.weight"] == pytest.approx(0.5 / 6**0.5)  # 1 / sqrt(2 * 2 layers)
    assert shrunk["blocks.1.mlp.down.weight"] == pytest.approx(0.5 / 24**0.5)


def test_tied_is_one_name_in_two_units_and_untied_two():
    """The same spec from both ends, so that it does not matter which unit is asked."""
    tied, untied = (GPT(5, 3, 4, 1, 2, tied=tied).build() for tied in (True, False))
    ends = [dict(tied.units)[end].specs["embedding.token.weight"] for end in ("embedding", "head")]
    assert ends[0] == ends[1]
    assert set(untied.specs) - set(tied.specs) == {"head.weight"}
    assert untied.specs["head.weight"].shape == (5, 4)


def test_the_benchmarked_gpt_has_its_parameters():
    """4 layers, width 128, vocabulary 512, context 128, untied: 0.94 million."""
    specs = GPT(512, 128, 128, 4, 4, tied=False).build().specs.values()
    block = 4 * 128 * 128 + 8 * 128 * 128 + 9 * 128 + 4 * 128  # matrices, biases 3 + 1 + 4 + 1, two norms
    assert sum(int(np.prod(spec.shape)) for spec in specs) == 4 * block + (2 * 512 + 128) * 128 + 2 * 128 == 940_800


def test_layers_of_an_mlp_are_split_by_turns():
    """Column, row, column, row; the last of an odd number is whole, as nothing sums its parts."""

    def axes(*widths):
        return {name: spec.axis for name, spec in MLP(widths).build().specs.items()}

    assert axes(3, 4, 5) == {"layers.0.weight": 1, "layers.0.bias": 0, "layers.1.weight": 0, "layers.1.bias": None}
    assert list(axes(3, 4, 5, 2).values()) == [1, 0, 0, None, None, None]
    assert [name for name, _ in MLP((3, 4, 5)).build().units] == ["layers.0", "layers.1"]


def test_initial_values_are_addressed():
    """A function of seed, name and shape: not of the order of creation; rounded once from the same float64."""
    spec = ParamSpec((6, 5), init=0.25)
    value = initial_value(3, "a", spec, np.float64)
    assert np.array_equal(value, initial_value(3, "a", spec, np.float64))
    assert np.abs(value).max() <= 0.25
    assert value.min() < 0 < value.max()
    assert len(np.unique(value)) == 30
    for other in (initial_value(4, "a", spec, np.float64), initial_value(3, "b", spec, np.float64)):
        assert not np.any(other == value)
    for dtype in (np.float16, np.float32):
        assert np.array_equal(initial_value(3, "a", spec, dtype), value.astype(dtype))
    assert initial_value(3, "a", ParamSpec((2,), init="ones"), np.float16).tolist() == [1, 1]
    assert initial_value(3, "a", ParamSpec((2,)), np.float16).tolist() == [0, 0]
    integers = initial_value(3, "a", ParamSpec((50,), init="integers"), np.float16)
    assert set(integers.tolist()) == {-1, 0, 1}
    with pytest.raises(ValueError, match=r"init of a must be a number, .*not 'normal'"):
        initial_value(3, "a", ParamSpec((2,), init="normal"), np.float16)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MLP((3,)), r"MLP widths is \(3,\): it must be those of input"),
        (lambda: MLP((3, 0, 2)), r"MLP widths\[1\] is 0: it must be a whole number of at least 1"),
        (lambda: MLP((3, 2), init="normal"), "init must be one of 'uniform', 'integers', not 'normal'"),
        (lambda: GPT(0, 3, 4, 1, 2), "GPT vocabulary is 0: it must be a whole number of at least 1"),
        (lambda: GPT(5, 3, 4, 1, 3), "heads must divide width, but 3 does not divide 4"),
        (lambda: GPT(5, 3, 4, -1, 2), "GPT layers is -1: it must be a whole number of at least 0"),
        (lambda: GPT(5, 3, 4.0, 1, 2), "GPT width is 4.0: it must be a whole number of at least 1"),
        (lambda: GPT(5, True, 4, 1, 2), "GPT context is True: it must be a whole number of at least 1"),
        (lambda: GPT(5, 3, 4, 1, 2, mlp_width=0), "GPT mlp_width is 0: it must be a whole number of at least 1"),
        (lambda: GPT(5, 3, 4, 1, 2, dropout=1.0), "GPT dropout is 1.0: it must be a number of at least 0, and below 1"),
        (lambda: GPT(5, 3, 4, 1, 2, activation="tanh"), "activation must be one of 'gelu', 'relu', not 'tanh'"),
    ],
)
def test_bad_sizes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
