"""Tensor parallel: slices of layers on several ranks, and exactly as many words between them as the paper says."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import batch, cases, exact_cases, gpts, mlps, splits
from truth import Worlds, hold, hold_exactly

from refpar import rng, split
from refpar.arrays import Array
from refpar.case import Batch, Case, Layout, State
from refpar.comm import Communicator
from refpar.nn.checkpoint import Checkpoint
from refpar.nn.layer import At, Layer, ParamSpec, Stream
from refpar.nn.layers import Attention, Dropout, Linear, Unembed
from refpar.nn.loss import CrossEntropy, SquaredError
from refpar.nn.models import GPT, MLP, initial_value
from refpar.optim import SGD
from refpar.parallel import hybrid, placement, tensor

AT = At(seed=1, step=0, rows=(0, 1, 2))
RANKS = [1, 2, 3, 5]


@settings(max_examples=25, deadline=None)
@given(splits(cases(models=gpts(max_layers=1) | mlps(), max_steps=2), most=5, pp=1))
def test_trace_equals_single_device(worlds: Worlds, given_split: tuple[Case, Layout]) -> None:
    """Odd widths, more ranks than columns, ignored tokens, any dropout: the trace is that of one device."""
    case, layout = given_split
    hold(case, dataclasses.replace(layout, dp=1), worlds)


@settings(max_examples=25, deadline=None)
@given(splits(exact_cases(), most=4, pp=1))
def test_integers_are_bit_equal(worlds: Worlds, given_split: tuple[Case, Layout]) -> None:
    """Where no sum rounds, slicing changes no bit."""
    hold_exactly(*given_split, worlds)


@pytest.mark.parametrize(("heads", "vocabulary", "tp"), [(5, 67, 2), (5, 67, 3), (5, 67, 5), (3, 3, 3)])
def test_what_does_not_divide_follows_the_split_rule(worlds: Worlds, heads: int, vocabulary: int, tp: int) -> None:
    """5 heads over 2 are 3 and 2, 67 words over 3 are 23, 22 and 22."""
    model = GPT(vocabulary, context=3, width=2 * heads, layers=1, heads=heads, mlp_width=7)
    hold(Case(model, SGD(lr=0.1), (batch(model, 3, 0.7, seed=1, step=0),)), Layout(tp=tp), worlds)
    if (heads, vocabulary) == (5, 67):
        assert split.sizes(heads, tp) == {2: [3, 2], 3: [2, 2, 1], 5: [1] * 5}[tp]
        assert split.sizes(vocabulary, tp) == {2: [34, 33], 3: [23, 22, 22], 5: [14, 14, 13, 13, 13]}[tp]


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint16", "int32"])
def test_tokens_may_be_of_any_integer_type(worlds: Worlds, kind: str) -> None:
    """Also where the first word of a rank, 134 of 200, is no number of that type, or the difference to it is none."""
    model = GPT(200, context=3, width=6, layers=1, heads=3, mlp_width=3)
    rows = batch(dataclasses.replace(model, vocabulary=100), 4, 1.0, seed=1, step=0)
    rows = Batch(rows.inputs.astype(kind), rows.targets.astype(kind), rows.mask)
    hold(Case(model, SGD(lr=0.1), (rows,)), Layout(tp=3), worlds)


# The words between ranks


def conversation(comm: Communicator, branch: int, recompute: int) -> list[tuple[int, int]]:
    """Return messages and elements sent forward and backward by half a block: its attention, or its MLP."""
    model = GPT(vocabulary=7, context=4, width=10, layers=1, heads=5, mlp_width=13).build()
    half = model.units[1][1].layers[branch]  # type: ignore[attr-defined]
    layer: Layer = tensor.rewrite(half, comm)
    for _ in range(recompute):
        layer = Checkpoint(layer)
    params = slices(layer.specs, comm)
    x = rng.uniform((1, "x"), (3, 4, 10))
    sent = []
    with_ledger = comm.ledger
    before = with_ledger.total("tp")
    y, saved = layer.forward(params, x, AT)
    middle = with_ledger.total("tp")
    for _ in Stream(layer.backward(params, saved, y)):
        pass
    after = with_ledger.total("tp")
    for start, stop in ((before, middle), (middle, after)):
        sent.append((stop.messages - start.messages, stop.elements - start.elements))
    return sent


def slices(specs: Any, comm: Communicator) -> dict[str, Array]:
    """Return this rank's slices of initial values."""
    return {
        name: placement.slice_initial(initial_value(7, name, spec, "float64"), spec, comm.size, comm.rank)
        for name, spec in specs.items()
    }


def on_tp(comm: Communicator, function: Any, *args: Any) -> Any:
    """Call ``function`` with a communicator of that name."""
    group = comm.split(0, comm.rank, name="tp")
    assert group is not None
    return function(group, *args)


@pytest.mark.parametrize("branch", [0, 1], ids=["attention", "mlp"])
@pytest.mark.parametrize("recompute", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_word_each_way(worlds: Worlds, ranks: int, recompute: int, branch: int) -> None:
    """Half a block sends one all-reduce forward and one backward; each full recomputation one more, and no other."""
    n = 3 * 4 * 10  # rows, positions, width: an activation, whatever the width of the slices
    for rank, (forward, backward) in enumerate(worlds(ranks).run(on_tp, conversation, branch, recompute)):
        once = 2 * (ranks - 1), sum(split.ring_elements(n, ranks, rank))
        assert forward == once
        assert backward == tuple(count * (1 + recompute) for count in once)


def loss_of(comm: Communicator, logits: Array, targets: Array, mask: Array) -> tuple[float, Array, int]:
    """Return loss and gradient of this rank's part of the logits, and the elements sent for them."""
    part = split.part(logits.shape[-1], comm.size, comm.rank)
    loss = tensor.VocabularyCrossEntropy(comm, part.start)
    before = comm.ledger.elements_sent
    value, saved = loss.forward(logits[..., part.start : part.stop], targets, mask)
    return float(value), loss.backward(saved, 0.5), comm.ledger.elements_sent - before


@pytest.mark.parametrize("ranks", RANKS)
@settings(max_examples=20, deadline=None)
@given(st.integers(5, 11), st.integers(0, 4), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**32))
def test_logits_stay_where_they_are(
    worlds: Worlds, ranks: int, vocabulary: int, rows: int, positions: int, share: float, seed: int
) -> None:
    """Three numbers a token travel, however many words there are; loss and gradient are those of the whole."""
    shape = rows, positions
    logits = 40 * rng.uniform((seed, "logits"), (*shape, vocabulary)) - 20
    mask = rng.uniform((seed, "mask"), shape) < share
    targets = np.where(mask, rng.integers((seed, "targets"), shape, 0, vocabulary), -100)
    value, saved = CrossEntropy().forward(logits, targets, mask)
    gradient = CrossEntropy().backward(saved, 0.5)
    results = worlds(ranks).run(on_tp, loss_of, logits, targets, mask)
    assert len({result[0] for result in results}) == 1
    unit, tokens = 2.0**-53, rows * positions
    # Of a token's loss, log of a sum of at most 11 terms and a difference: 11 + 4 roundings of numbers below 50.
    assert abs(results[0][0] - float(value)) <= 16 * 50 * unit * tokens
    pieces = np.concatenate([result[1] for result in results], axis=-1)
    assert np.abs(pieces - gradient).max(initial=0) <= 16 * unit  # of probabilities, which are at most 1
    for rank, (_, _, sent) in enumerate(results):
        assert sent == sum(split.ring_elements(tokens, ranks, rank)) + sum(split.ring_elements(2 * tokens, ranks, rank))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zero_logits_cost_the_logarithm_of_the_vocabulary(worlds: Worlds, ranks: int) -> None:
    """4 words: ln 4, not ln 8, which gathered logits would give on two ranks (Megatron-LM#7452)."""
    logits, targets = np.zeros((1, 1, 4)), np.array([[2]])
    for value, _, _ in worlds(ranks).run(on_tp, loss_of, logits, targets, np.array([[True]])):
        assert value == math.log(4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ignored_logits_may_be_anything(worlds: Worlds, ranks: int) -> None:
    """A token that does not count contributes nothing, even where its logits are infinite or no numbers."""
    logits = np.zeros((1, 3, 4))
    logits[0, 1], logits[0, 2, 3] = np.inf, np.nan
    mask, targets = np.array([[True, False, False]]), np.array([[1, -100, 99]])
    for value, gradient, _ in worlds(ranks).run(on_tp, loss_of, logits, targets, mask):
        assert value == math.log(4)
        assert_array_equal(gradient[0, 1:], 0)


# One layer, with numbers worked by hand


def run_layer(
    comm: Communicator, layer: Layer, params: dict[str, Array], x: Array, dy: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Return output, gradient of the input, and gradients of the parameters' slices."""
    specs = layer.specs
    layer = tensor.rewrite(layer, comm)
    mine = {name: placement.slice_initial(value, specs[name], comm.size, comm.rank) for name, value in params.items()}
    inner, outer = slice_of_input(specs, comm, x), slice_of_output(specs, comm, dy)
    y, saved = layer.forward(mine, inner, AT)
    gradients = dict(stream := Stream(layer.backward(mine, saved, outer)))
    return y, stream.dx, gradients


def slice_of_input(specs: dict[str, ParamSpec], comm: Communicator, x: Array) -> Array:
    """Return all of ``x``, or the columns that a row-parallel layer takes."""
    part = split.part(x.shape[-1], comm.size, comm.rank)
    return x[..., part.start : part.stop] if specs["a.weight"].axis == 0 else x


def slice_of_output(specs: dict[str, ParamSpec], comm: Communicator, dy: Array) -> Array:
    """Return all of ``dy``, or the columns that a column-parallel layer makes."""
    part = split.part(dy.shape[-1], comm.size, comm.rank)
    return dy[..., part.start : part.stop] if specs["a.weight"].axis == 1 else dy


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bias_is_added_once(worlds: Worlds, ranks: int) -> None:
    """Row-parallel, bias 100 200 300: 130 270 410, and not 230 470 710 from two ranks (MinivLLM#80, slapo#10)."""
    weight = np.array([[10.0, 20, 30], [20, 50, 80]])
    params = {"a.weight": weight, "a.bias": np.array([100.0, 200, 300])}
    x, dy = np.ones((2, 2)), np.array([[1.0, 2, 3], [4, 5, 6]])
    layer = Linear("a", (2,), (3,), axis=0)
    for y, _, gradients in worlds(ranks).run(on_tp, run_layer, layer, params, x, dy):
        assert_array_equal(y, [[130, 270, 410]] * 2)
        assert_array_equal(gradients["a.bias"], [5, 7, 9])  # of all rows, on every rank (slapo#23)


@pytest.mark.parametrize("ranks", [1, 2])
def test_columns_all_lead_back_to_the_input(worlds: Worlds, ranks: int) -> None:
    """x = 1, W = (2 | 3), dY = 1: dX is 5 on both ranks, not 2 and 3 (torchtitan@ecae62f15)."""
    params = {"a.weight": np.array([[2.0, 3]])}
    layer = Linear("a", (1,), (2,), axis=1, bias=False)
    for _, dx, _ in worlds(ranks).run(on_tp, run_layer, layer, params, np.ones((1, 1)), np.ones((1, 2))):
        assert_array_equal(dx, [[5]])


def test_slices_of_fused_projections_are_whole_heads() -> None:
    """q0 q1 k0 k1 v0 v1 over two ranks: q0 k0 v0, and not q0 q1 k0 (Automodel#1324)."""
    spec = Linear("qkv", (1,), (3, 2, 1), axis=2).specs["qkv.weight"]
    whole = np.array(["q0", "q1", "k0", "k1", "v0", "v1"]).reshape(spec.shape)
    assert placement.slice_initial(whole, spec, 2, 0).ravel().tolist() == ["q0", "k0", "v0"]
    assert placement.slice_initial(whole, spec, 2, 1).ravel().tolist() == ["q1", "k1", "v1"]


@pytest.mark.parametrize(("heads", "tp"), [(2, 8), (1, 2), (5, 6)])
def test_more_ranks_than_heads_are_refused(heads: int, tp: int) -> None:
    """Not zero heads a rank, and no reshape that fails (modelexpress#650)."""
    model = GPT(vocabulary=9, context=2, width=2 * heads, layers=1, heads=heads)
    with pytest.raises(ValueError, match=f"tp is {tp}: blocks.0 has {heads} heads"):
        tensor.check(model.build().units, tp)


# What does not depend on the slicing


@settings(max_examples=20, deadline=None)
@given(gpts() | mlps(), st.integers(2, 5), st.integers(0, 2**32))
def test_initial_values_do_not_depend_on_tp(worlds: Worlds, model: GPT | MLP, tp: int, seed: int) -> None:
    """Put together from its slices, every weight is what one device starts from, bit for bit."""
    tp = min(tp, model.heads, model.vocabulary) if isinstance(model, GPT) else tp
    case = Case(model, SGD(lr=0.0), (batch(model, 2, 1.0, seed, 0),), seed=seed)
    parameters = hybrid.run(case, Layout(tp=tp), world=worlds(tp)).steps[0].parameters
    for name, value in State.initial(case).parameters.items():
        assert_array_equal(parameters[name], value, name)


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_dropout_does_not_depend_on_tp(tp: int) -> None:
    """Of the attention's probabilities each rank drops what one device drops in its heads: on no two ranks the same."""
    whole = Attention("a", (0, 5, 5), rate=0.5)
    x = rng.uniform((1, "x"), (3, 4, 3, 5, 2))
    expected, _ = whole.forward({}, x, AT)
    masks = []
    for rank in range(tp):
        part = split.part(5, tp, rank)
        layer = dataclasses.replace(whole, heads=(part.start, part.stop, 5))
        y, saved = layer.forward({}, x[:, :, :, part.start : part.stop], AT)
        # One head is one product whatever stands beside it, and so the same bits.
        assert_array_equal(y, expected[:, :, part.start : part.stop])
        masks.append(saved[-1][:, 0])
    assert all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_dropout_of_what_is_replicated_is_the_same_in_a_group_and_another_across_replicas() -> None:
    """It is addressed by row and not drawn from a rank's generator (Megatron-LM#206)."""
    layer, x = Dropout("d", 0.5), np.ones((2, 8))
    here, again, other = (layer.forward({}, x, At(1, 0, rows))[0] for rows in ((0, 1), (0, 1), (2, 3)))
    assert_array_equal(here, again)
    assert (here != other).any()


@settings(max_examples=20, deadline=None)
@given(splits(cases(models=gpts(max_layers=1), max_steps=2), most=6, pp=1))
def test_replicated_gradients_are_the_same_bits(worlds: Worlds, given_split: tuple[Case, Layout]) -> None:
    """Norms, positions and row-parallel biases get one and the same gradient on every tensor-parallel rank."""
    case, layout = given_split

    def gradients(comm: Communicator) -> list[dict[str, bytes]]:
        seen: list[dict[str, bytes]] = []

        def tied_sum(place: Any, store: Any, types: Any) -> dict[str, Array]:
            summed: dict[str, Array] = right(place, store, types)
            seen.append({n: g.tobytes() for n, g in summed.items() if place.specs[n].axis is None})
            return summed

        hybrid.tied_sum, right = tied_sum, hybrid.tied_sum
        try:
            hybrid.train(comm, case, layout)
        finally:
            hybrid.tied_sum = right
        return seen

    ranks = worlds(layout.ranks).run(gradients)
    for replica in range(layout.dp):
        group = ranks[replica * layout.tp : (replica + 1) * layout.tp]
        assert all(seen == group[0] for seen in group)


@pytest.mark.parametrize("tp", [1, 2])
def test_norm_counts_what_is_replicated_once(worlds: Worlds, tp: int) -> None:
    """Slices 3 and 4 of a weight, a bias of 12 on both: 13 for one rank and for two (DeepSpeed#5411)."""
    # One unit, x -> relu(x W1) W2 + b, would mix them; so a row-parallel layer alone, whose input is sliced by the
    # column-parallel identity before it: loss (y - t)^2, dy = 12, dW2 = dy * (1/4, 1/3) = (3, 4), db = 12.
    model = MLP((2, 2, 1), init="integers")
    x = np.array([[0.25, 1 / 3]])
    case = Case(model, SGD(lr=0.0), (Batch(x, np.array([[-6.0]]), np.ones(1, bool)),))
    start = dataclasses.replace(
        State.initial(case),
        parameters={
            "layers.0.weight": np.eye(2),
            "layers.0.bias": np.zeros(2),
            "layers.1.weight": np.zeros((2, 1)),
            "layers.1.bias": np.zeros(1),
        },
    )
    step = hybrid.run(case, Layout(tp=tp), world=worlds(tp), start=start).steps[0]
    assert_array_equal(step.gradients["layers.1.weight"], [[3], [4]])
    assert step.gradients["layers.1.bias"] == 12
    assert step.norm == 13


# Arithmetic on sizes


@settings(max_examples=50, deadline=None)
@given(gpts() | mlps(), st.integers(1, 6), st.lists(st.integers(0, 9), max_size=4))
def test_all_ranks_together_send_2n_minus_2_of_every_word(model: GPT | MLP, ranks: int, tokens: Sequence[int]) -> None:
    """Over all ranks an all-reduce sends 2(N-1) times its array, exactly."""
    built = model.build()
    total = sum(tensor.elements_sent(built.units, built.loss, tokens, ranks, rank) for rank in range(ranks))
    if isinstance(model, GPT):
        each = model.width * (2 + 4 * model.layers) + 3
    else:
        last = len(model.widths) - 2
        pairs = range(0, last if last % 2 else last - 1, 2)
        each = sum(model.widths[i] + model.widths[i + 2] for i in pairs)
    assert total == 2 * (ranks - 1) * sum(tokens) * each


def test_a_squared_error_needs_no_word() -> None:
    """The output of an MLP is whole on every rank."""
    assert tensor.elements_sent([], SquaredError(), [3], 4, 0) == 0
    assert tensor.elements_sent([], CrossEntropy(), [4], 4, 0) == 3 * 4 * 2 * 3 // 4


@pytest.mark.parametrize("which", ["rows", "columns", "words"])
def test_partial_sums_are_rounded_once(worlds: Worlds, which: str) -> None:
    """In halves, 2048 + 1 on one rank and 1 on the other are 2050; rounded before they are added, they are 2048.

    Forward through a row-parallel layer, backward through a column-parallel one and through the output projection.
    """
    weight = np.array([[2048], [1], [1]], np.float16)
    layer: Layer = {
        "rows": Linear("a", (3,), (1,), axis=0, bias=False),
        "columns": Linear("a", (1,), (3,), axis=1, bias=False),
        "words": Unembed("a.weight", 3, 1),
    }[which]

    def product(comm: Communicator) -> Array:
        own, spec = tensor.rewrite(layer, comm), layer.specs["a.weight"]
        mine = {"a.weight": placement.slice_initial(weight.reshape(spec.shape), spec, comm.size, comm.rank)}
        ones = np.ones((1, 2 - comm.rank), np.float16)
        y, saved = own.forward(mine, ones if which == "rows" else ones[:, :1], AT)
        if which == "rows":
            return y.astype(np.float16)
        for _ in (stream := Stream(own.backward(mine, saved, ones))):
            pass
        assert stream.dx.dtype == np.float16
        return stream.dx

    assert [float(y[0, 0]) for y in worlds(2).run(product)] == [2050, 2050]
    rounded = np.float16(2048) + np.float16(1)  # the product of the first rank
    assert float(np.float16(rounded + np.float16(1))) == 2048
