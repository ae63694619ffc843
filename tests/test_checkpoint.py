"""Activation checkpointing: the same bits, one more forward for each level of nesting, and bytes as the square root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batch, cases, gpts
from truth import Worlds, hold

from refpar import compare, single
from refpar.arrays import Array
from refpar.case import Batch, Case, Layout
from refpar.nn import checkpoint
from refpar.nn.checkpoint import Checkpoint, segment_length, segments, trade
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec, Sequential, live_bytes
from refpar.nn.layers import Dropout, Linear, ReLU
from refpar.nn.models import GPT, MLP, Model, initial_value
from refpar.optim import SGD, AdamW
from refpar.precision import LossScale, Precision

AT = At(seed=3, step=1, rows=(4, 7))
HOWS = ["none", "block", "sqrt", "1", "2", "3", "9"]


@settings(max_examples=40, deadline=None)
@given(cases(models=gpts(max_layers=4)), st.sampled_from(HOWS), st.sampled_from(["float64", "float16"]))
def test_not_a_bit_changes(case: Case, how: str, compute: str) -> None:
    """Gradients, and all that follows, are those of a run without it: dropout included, in every segment length."""
    case = Case(case.model, case.optimizer, case.batches, Precision(compute), case.clip, case.divide, case.seed)
    verdict = compare(single.train(case, recompute=how), single.train(case), bounds=[])
    assert verdict.ok, verdict


@settings(max_examples=20, deadline=None)
@given(
    cases(models=gpts(max_layers=4), max_steps=2),
    st.sampled_from(HOWS),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_with_every_stage_of_zero(worlds: Worlds, case: Case, how: str, ranks: int, stage: int, parts: int) -> None:
    """On replicas of any kind, with accumulation: one device's result, and no byte more is sent."""
    layout = Layout(dp=ranks, zero=stage, micro_batches=parts, recompute=how)
    hold(case, layout, worlds)


# ------------------------------------------------------------------ one more forward


@dataclass(frozen=True)
class Counting:
    """A layer that counts how often it runs each way."""

    layer: Layer
    calls: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        self.calls["forward"] += 1
        return self.layer.forward(params, x, at)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        self.calls["backward"] += 1
        return (yield from self.layer.backward(params, saved, dy))


def block(i: int) -> Layer:
    """Two features in and out, with dropout."""
    return Sequential([Linear(f"{i}", (2,), (2,)), Dropout(f"{i}.dropout", 0.5), ReLU()])


def run(layer: Layer, x: Array) -> dict[str, Array]:
    """Return output, gradients and input gradient of ``layer``."""
    params = {name: initial_value(1, name, spec, "float64") for name, spec in layer.specs.items()}
    y, saved = layer.forward(params, x, AT)
    results = {"y": y}

    def backward() -> Gradients:
        results["dx"] = yield from layer.backward(params, saved, y + 1)
        return None

    for name, gradient in backward():
        results[name] = results[name] + gradient if name in results else gradient
    return results


@pytest.mark.parametrize("levels", range(4))
def test_one_more_forward_for_each_level(levels: int) -> None:
    """Wrapped in one another n times, a layer runs forward 1 + n times and backward once, to the same bits."""
    x = np.array([[1.0, -2.0], [0.5, 3.0]])
    inner = Counting(block(0))
    wrapped: Layer = inner
    for _ in range(levels):
        wrapped = Checkpoint(wrapped)
    results = run(wrapped, x)
    assert inner.calls == {"forward": 1 + levels, "backward": 1}
    for name, value in run(block(0), x).items():
        np.testing.assert_array_equal(results[name], value)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("blocks", [1, 2, 5, 7])
def test_every_block_runs_again_once(blocks: int, how: str) -> None:
    """Also the blocks of a last segment that is shorter; first and last unit never do (NVIDIA/Megatron-LM#3562)."""
    counting = [Counting(block(i)) for i in range(blocks + 2)]
    units = segments([(str(i), layer) for i, layer in enumerate(counting)], how)
    run(Sequential([layer for _, layer in units]), np.ones((2, 2)))
    again = how != "none"
    assert [layer.calls["forward"] for layer in counting] == [1, *[1 + again] * blocks, 1]
    assert [layer.calls["backward"] for layer in counting] == [1] * (blocks + 2)


def test_a_segment_passes_its_outputs_on() -> None:
    """Three layers of y = 2x in one segment make 8x, not 2x (Megatron-LM@fc2c81d3a6)."""

    @dataclass(frozen=True)
    class Double:
        specs: Mapping[str, ParamSpec] = field(default_factory=dict)

        def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
            return 2 * x, None

        def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
            yield from ()
            return 2 * dy

    _, layer = checkpoint.segment([(str(i), Double()) for i in range(3)])
    assert isinstance(layer, Checkpoint)
    results = run(layer, np.array([1.0]))
    assert (results["y"], results["dx"]) == (8, 8 * 9)


def test_a_layer_used_twice_in_a_segment() -> None:
    """y = f(f(x)) with f = w x, w = 2, x = 3 has dw = 12: the second use is added to the first (fairscale#784)."""
    f = Linear("f", (1,), (1,), bias=False)
    x, params = np.array([[3.0]]), {"f.weight": np.array([[2.0]])}
    layer = Checkpoint(Sequential([f, f]))
    _, saved = layer.forward(params, x, AT)
    assert sum(g.item() for _, g in layer.backward(params, saved, np.array([[1.0]]))) == 12


@pytest.mark.parametrize(
    ("blocks", "how", "lengths"),
    [
        (7, "2", [2, 2, 2, 1]),
        (7, "sqrt", [3, 3, 1]),
        (7, "block", [1] * 7),
        (7, "9", [7]),
        (16, "sqrt", [4] * 4),
        (0, "sqrt", []),
    ],
)
def test_lengths_of_segments(blocks: int, how: str, lengths: list[int]) -> None:
    """Neighbours in groups of k, the last one shorter."""
    units = segments([(str(i), block(i)) for i in range(blocks + 2)], how)
    assert [len(layer.specs) // 2 for _, layer in units[1:-1]] == lengths
    assert [name for name, _ in (units[0], units[-1])] == ["0", str(blocks + 1)]


@pytest.mark.parametrize("wrong", ["", "0", "-1", "1.5", "all", "²", "blocks"])
def test_recompute_is_a_word_or_a_number(wrong: str) -> None:
    """Anything else is refused by name."""
    with pytest.raises(ValueError, match=r"recompute is .*must be none, block, sqrt or a number"):
        segment_length(wrong, 4)


# ------------------------------------------------------------------ not deterministic, and evaluation


@dataclass(frozen=True)
class Drawing:
    """Dropout that draws its mask instead of addressing it."""

    generator: np.random.Generator
    specs: Mapping[str, ParamSpec] = field(default_factory=dict)

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        mask = self.generator.random(x.shape) > 0.5
        return x * mask, mask

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return dy * saved


@dataclass(frozen=True)
class Shrinking(Drawing):
    """Passes on another number of features each time: routing by what it draws."""

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        kept = 99 if self.generator.random() < 0.5 else 98
        return x[:, :kept], None


@pytest.mark.parametrize("kind", [Drawing, Shrinking])
def test_a_layer_that_is_not_deterministic_raises(kind: type[Drawing]) -> None:
    """Its gradient would silently be that of another network (pytorch#14253, torchtitan#1117)."""
    layer = Checkpoint(kind(np.random.default_rng(0)))
    y, saved = layer.forward({}, np.ones((2, 99)), AT)
    with pytest.raises(RuntimeError, match="not deterministic"):
        list(layer.backward({}, saved, y))


def test_a_nan_repeats_itself() -> None:
    """An overflow is no lack of determinism: a NaN equals a NaN, and an infinity itself."""
    assert checkpoint.same(np.array([np.nan, np.inf, 1]), np.array([np.nan, np.inf, 1]))
    assert not checkpoint.same(np.array([np.nan, np.inf]), np.array([np.nan, -np.inf]))
    assert not checkpoint.same(np.array([np.nan]), np.array([1.0]))
    assert not checkpoint.same(np.ones((2, 1)), np.ones((1, 2)))
    model = MLP((2, 16, 16, 2))
    rows = Batch(np.array([[6e4, 6e4]]), np.zeros((1, 2)), np.ones(1, bool))
    case = Case(model, SGD(lr=0.1), (rows,), Precision("float16", loss_scale=LossScale(1024.0)))
    (step,) = single.train(case, recompute="block").steps
    assert step.outcome == "overflow"
    assert np.isnan(step.gradients["layers.0.weight"]).any()


def test_evaluation_is_not_affected() -> None:
    """The output has the same bits, nothing runs twice, and no more is kept than the two ends (fairscale#709)."""
    at = At(seed=3, step=1, rows=(4, 7), train=False)
    inner = Counting(block(0))
    params = {name: initial_value(1, name, spec, "float64") for name, spec in inner.specs.items()}
    x = np.array([[1.0, -2.0], [0.5, 3.0]])
    plain, _ = block(0).forward(params, x, at)
    y, saved = Checkpoint(inner).forward(params, x, at)
    np.testing.assert_array_equal(y, plain)
    assert inner.calls["forward"] == 1
    assert live_bytes(saved) == x.nbytes + y.nbytes


# ------------------------------------------------------------------ bytes


def deep(layers: int) -> tuple[Model, GPT, Case]:
    """A GPT whose blocks keep much more than its embedding and head."""
    model = GPT(vocabulary=3, context=4, width=6, layers=layers, heads=2, dropout=0.25)
    return model.build(), model, Case(model, SGD(lr=0.1), (batch(model, 3, 1.0, 1, 0),))


def sizes_of(built: Model, case: Case) -> tuple[list[int], int]:
    """Return the bytes that each unit keeps by itself, the loss among them, and those of a boundary."""
    params = {name: initial_value(0, name, spec, "float64") for name, spec in built.specs.items()}
    x, at, kept = case.batches[0].inputs, At(0, 0, (0, 1, 2)), []
    for _, layer in built.units:
        before = x
        x, saved = layer.forward(params, x, at)
        kept.append(live_bytes(saved))
    _, saved = built.loss.forward(x, case.batches[0].targets, case.batches[0].mask)
    return [*kept, live_bytes(saved)], before.nbytes


@pytest.mark.parametrize("layers", [1, 4, 5, 16])
def test_the_trade_is_what_is_measured(layers: int) -> None:
    """For every k, peak bytes of a real step are those of the table, beside what the embedding keeps."""
    built, _, case = deep(layers)
    (embedding, per_block, *_, head, loss), boundary = sizes_of(built, case)
    none, *rows = trade(layers, per_block, boundary)
    peak = single.train(case).peak_bytes
    assert peak == [embedding + none.bytes - boundary + head + loss]  # the head's norm keeps the boundary
    assert none.k == none.again == 0
    for row in rows:
        assert (row.again, row.step) == (layers, 4 / 3)
        assert single.train(case, recompute=str(row.k)).peak_bytes == [embedding + row.bytes]


def test_live_bytes_grow_as_the_square_root() -> None:
    """From L = 16 to 64 blocks twice as much is added as from 4 to 16 in segments of sqrt(L); otherwise four times.

    At sqrt(L) segments of sqrt(L) blocks the bytes are c + sqrt(L) (A + B), with A those of a boundary and B those
    of a block: an equality of integers.
    """
    built, _, case = deep(4)
    (_, per_block, *_), boundary = sizes_of(built, case)
    peaks = {how: [single.train(deep(L)[2], recompute=how).peak_bytes[0] for L in (4, 16, 64)] for how in HOWS[:3]}
    steps = {how: (b - a, c - b) for how, (a, b, c) in peaks.items()}
    assert steps["sqrt"] == (2 * (boundary + per_block), 4 * (boundary + per_block))
    assert steps["none"] == (12 * per_block, 48 * per_block)
    assert steps["block"] == (12 * boundary, 48 * boundary)


def test_nested_segments_are_dropped_one_by_one() -> None:
    """Blocks that are recomputed inside a segment that is recomputed are alive one at a time."""
    built, _, case = deep(16)
    blocks = list(built.units[1:-1])
    (embedding, per_block, *_), boundary = sizes_of(built, case)
    nested = [
        checkpoint.segment([(name, Checkpoint(layer)) for name, layer in blocks[i : i + 4]]) for i in range(0, 16, 4)
    ]
    units = [built.units[0], *nested, built.units[-1]]
    params = {name: initial_value(0, name, spec, "float64") for name, spec in built.specs.items()}
    saved: list[Any] = []
    rows = case.batches[0]
    single.forward(units, built.loss, params, rows, At(0, 0, (0, 1, 2)), saved)
    peak = single.backward(units, built.loss, params, saved, 1.0, {}, "float64")
    assert peak == embedding + 4 * boundary + 4 * boundary + per_block


@pytest.mark.parametrize(
    "model", [MLP((3, 4, 5, 4, 2)), GPT(7, 3, 6, 3, 2, dropout=0.5)], ids=lambda m: type(m).__name__
)
def test_random_numbers_stand_where_they_stood(model: Any) -> None:
    """After a step with recomputation the next one draws what it would have drawn (OLMo-core#828)."""
    case = Case(model, AdamW(lr=0.1), tuple(batch(model, 3, 1.0, 1, step) for step in range(3)), seed=9)
    traces = [single.train(case, recompute=how) for how in ("none", "block")]
    for one, other in zip(*(trace.steps for trace in traces), strict=True):
        assert one.loss == other.loss


def test_another_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed one step later, dropout is another, and the run says so instead of going on."""
    monkeypatch.setattr(checkpoint, "recompute_at", lambda at: At(at.seed, at.step + 1, at.rows))
    _, _, case = deep(2)
    with pytest.raises(RuntimeError, match=r"blocks\.1.*not deterministic"):
        single.train(case, recompute="block")
