"""ZeRO: one device's result at every stage; and what each stage sends and holds, as exact integers."""

import math
from dataclasses import replace

import numpy as np
import on_memory
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_memory import NETWORKS, Network
from strategies import batch, cases, exact_cases, few_ranks, mlps, seeds
from truth import Worlds, hold, hold_exactly

from refpar.case import Batch, Case, Layout
from refpar.comm import RankError
from refpar.nn.checkpoint import segments
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.parallel import hybrid, zero
from refpar.precision import Precision


@st.composite
def layouts(draw: st.DrawFn, stages: tuple[int, ...] = (1, 2, 3)) -> Layout:
    """Stages, replicas, micro-batches and recomputation, with buckets from one element to everything."""
    return Layout(
        dp=draw(few_ranks),
        zero=draw(st.sampled_from(stages)),
        micro_batches=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(["none", "block", "sqrt", "2"])),
        bucket=draw(st.sampled_from([1, 7, 64, 1 << 18])),
    )


halves = st.sampled_from([Precision("float16"), Precision("float16", gradients="float32")])
types = st.sampled_from([Precision(), Precision("float32")]) | halves


@settings(max_examples=40, deadline=None)
@given(cases(), layouts())
def test_trace_equals_single_device(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Count, loss, every gradient, norm, state and weights of every step are those of one device."""
    hold(case, layout, worlds)


@settings(max_examples=40, deadline=None)
@given(exact_cases(), layouts())
def test_integers_are_bit_equal(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Where no sum rounds, no order of summation changes a bit."""
    hold_exactly(case, layout, worlds)


@settings(max_examples=25, deadline=None)
@given(exact_cases(compute="float16"), layouts(), halves)
def test_integers_are_bit_equal_in_halves(worlds: Worlds, case: Case, layout: Layout, types: Precision) -> None:
    """Nor does it in float16, with gradients stored in either type."""
    hold_exactly(replace(case, precision=types), layout, worlds)


# ------------------------------------------------------------------ what is sent


def units_of(case: Case, layout: Layout) -> list[dict[str, int]]:
    """Return the sizes of the parameters of each unit; what is recomputed together is a unit, and gathered together."""
    return zero.unit_sizes(segments(case.model.build().units, layout.recompute))


@settings(max_examples=40, deadline=None)
@given(cases(precisions=types), layouts())
def test_sent_is_the_formula(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Each rank sends, in elements, what its chunk sizes say; in bytes, sums wide and weights narrow."""
    trace = hybrid.run(case, layout, world=worlds(layout.dp))
    units = units_of(case, layout)
    updates = sum(step.outcome == "updated" for step in trace.steps)
    publishing = len(trace.steps) if layout.zero == 3 else updates
    for rank, ledger in enumerate(trace.ledgers):
        scattered, gathered = zero.elements_sent(units, layout.zero, layout.micro_batches, layout.dp, rank)
        for operation, count, dtype in (
            ("reduce_scatter", scattered * len(trace.steps), case.precision.reduce),
            ("all_gather", gathered * publishing, case.precision.compute),
        ):
            sent = ledger.total("dp", operation)
            assert (sent.elements, sent.bytes) == (count, count * np.dtype(dtype).itemsize)
        assert ledger.total("dp").elements == scattered * len(trace.steps) + gathered * publishing
    # What ranks agree on is a line of its own: count; flag, norm and loss.
    assert sum(ledger.total("world").elements for ledger in trace.ledgers) == len(trace.steps) * 2 * 4 * (layout.dp - 1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sent_over_all_ranks(worlds: Worlds, stage: int, ranks: int, M: int, tied: bool) -> None:
    """2(N-1)Ψ; (M+1)(N-1)Ψ, M of them with the tied weight again; 3M(N-1)(Ψ + Ψ_tied): no more with recomputation."""
    model = GPT(vocabulary=7, context=3, width=6, layers=2, heads=3, tied=tied)
    case = Case(model, SGD(lr=0.1), (batch(model, 5, 1.0, 1, 0),))
    psi = sum(math.prod(spec.shape) for spec in model.build().specs.values())
    psi_tied = 7 * 6 if tied else 0
    expected = {
        1: 2 * (ranks - 1) * psi,
        2: (ranks - 1) * (M * (psi + psi_tied) + psi),
        3: 3 * M * (ranks - 1) * (psi + psi_tied),
    }[stage]
    for recompute in ("none", "block"):
        layout = Layout(dp=ranks, zero=stage, micro_batches=M, recompute=recompute)
        trace = hybrid.run(case, layout, world=worlds(ranks))
        assert sum(ledger.total("dp").elements for ledger in trace.ledgers) == expected


@pytest.mark.parametrize(("stage", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_ratios_of_the_paper(worlds: Worlds, stage: int, factor: int) -> None:
    """For one micro-batch, where N divides every parameter, every rank sends 2Ψ(N-1)/N, and 3Ψ(N-1)/N at stage 3."""
    model = MLP((4, 8, 4))
    case = Case(model, SGD(lr=0.1), (batch(model, 8, 1.0, 1, 0),))
    trace = hybrid.run(case, Layout(dp=4, zero=stage), world=worlds(4))
    psi = 4 * 8 + 8 + 8 * 4 + 4
    assert [ledger.total("dp").elements for ledger in trace.ledgers] == [factor * psi * 3 // 4] * 4


# ------------------------------------------------------------------ what is held


@settings(max_examples=40, deadline=None)
@given(cases(precisions=types), layouts(stages=(0, 1, 2, 3)))
def test_held_is_the_formula(worlds: Worlds, case: Case, layout: Layout) -> None:
    """Between steps each rank has the bytes that the split says; at most, a unit of gradients and of weights more."""
    trace = hybrid.run(case, layout, world=worlds(layout.dp))
    units = units_of(case, layout)
    buffers = len(case.optimizer.state_names)
    ranks = range(layout.dp)
    assert trace.bytes_held == [
        zero.bytes_held(units, layout.zero, case.precision, buffers, layout.dp, rank) for rank in ranks
    ]
    peaks = [zero.peaks(units, layout.zero, case.precision, layout.micro_batches, layout.dp, rank) for rank in ranks]
    assert list(zip(trace.peak_gradients, trace.peak_gathered, strict=True)) == peaks


@pytest.mark.parametrize(("gradients", "data_parallel"), [("float16", 16), ("float32", 18)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_held_is_that_of_the_paper(worlds: Worlds, ranks: int, gradients: str, data_parallel: int) -> None:
    """16Ψ, (4 + 12/N)Ψ, (2 + 14/N)Ψ and 16Ψ/N bytes with Adam and gradients in float16; two more each in float32."""
    model = MLP((8, 12, 4))
    case = Case(model, Adam(lr=0.01), (batch(model, 8, 1.0, 1, 0),), precision=Precision("float16", gradients))
    psi, g, N = 8 * 12 + 12 + 12 * 4 + 4, data_parallel - 14, ranks
    expected = [(14 + g) * psi, (2 + g) * psi + 12 * psi // N, 2 * psi + (12 + g) * psi // N, (14 + g) * psi // N]
    held = [hybrid.run(case, Layout(dp=N, zero=stage), world=worlds(N)).bytes_held for stage in range(4)]
    assert held == [[b] * N for b in expected]


def test_figure_of_the_paper_on_64_ranks(worlds: Worlds) -> None:
    """Scaled to the paper's 7.5 billion parameters: 120, 31.4, 16.6 and 1.88 GB (figure 1), and one device's bits."""
    rows = Batch(np.eye(64), np.ones((64, 64)), np.ones(64, bool))
    case = Case(MLP((64, 64), init="integers"), Adam(lr=0.25), (rows,), precision=Precision("float16"))
    psi = 64 * 64 + 64
    shown = []
    for stage in range(4):
        trace = hold_exactly(case, Layout(dp=64, zero=stage, bucket=1 << 20), worlds)
        (each,) = set(trace.bytes_held)
        shown.append(each / psi * 7.5)
    assert shown == [120, 31.40625, 16.640625, 1.875]


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_no_gathered_weight_outlives_its_unit(worlds: Worlds, recompute: str) -> None:
    """Whenever stage 3 gathers a unit, no weight of any other is still alive: neither saved, nor in a closure."""
    model = GPT(vocabulary=7, context=3, width=6, layers=3, heads=3, dropout=0.25)
    case = Case(model, SGD(lr=0.1), (batch(model, 5, 1.0, 1, 0),))
    for alive in worlds(2).run(on_memory.outliving, case, Layout(dp=2, zero=3, recompute=recompute)):
        assert alive == {0}


# ------------------------------------------------------------------ parameters of every kind


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=12, deadline=None)
@given(layout=layouts(stages=(0, 1, 2, 3)), seed=seeds)
def test_parameters_of_every_kind(worlds: Worlds, name: str, layout: Layout, seed: int) -> None:
    """Unused by some ranks or by all, used twice in a unit and across, of no elements, in Fortran order: all match."""
    model = Network(name=name)
    batches = tuple(batch(model, rows, 0.8, seed, step) for step, rows in enumerate([6, 1, 4]))
    hold(Case(model, AdamW(lr=0.01, weight_decay=0.1), batches, clip=0.5, seed=seed), layout, worlds)


@pytest.mark.parametrize("stage", range(4))
def test_used_on_one_rank_only(worlds: Worlds, stage: int) -> None:
    """A gradient of 4 from one of two rows is a mean of 2, and what nobody uses only decays (DeepSpeed#545)."""
    model = Network(name="sometimes")
    inputs = np.array([[4.0, 1.0, 2.0], [-3.0, 1.0, 2.0]])
    case = Case(model, AdamW(lr=0.1, weight_decay=0.5), (Batch(inputs, np.ones((2, 2)), np.ones(2, bool)),))
    trace = hold(case, Layout(dp=2, zero=stage), worlds)
    (step,) = trace.steps
    assert not step.gradients["never.weight"].any()
    start = hybrid.State.initial(case).parameters["never.weight"]
    np.testing.assert_array_equal(step.parameters["never.weight"], start * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("precision", [Precision(), Precision("float16")], ids=lambda p: p.compute)
@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters(worlds: Worlds, stage: int, precision: Precision) -> None:
    """They get no gradient and no state, send none, and do not decay: their bits stay (DeepSpeed#8029)."""
    model = GPT(vocabulary=7, context=3, width=6, layers=2, heads=3)
    batches = tuple(batch(model, 5, 1.0, 1, step) for step in range(2))
    frozen = ("embedding", "blocks.0.attention.qkv.weight", "head.norm.bias")
    case = Case(model, AdamW(lr=0.1, weight_decay=0.5), batches, precision, clip=0.5, frozen=frozen)
    built = model.build()
    names = {"embedding.token.weight", "embedding.position.weight", *frozen[1:]}
    assert case.frozen_names == names
    layout = Layout(dp=3, zero=stage, micro_batches=2)
    trace = hybrid.run(case, layout, world=worlds(3)) if precision.compute == "float16" else hold(case, layout, worlds)
    start = hybrid.State.initial(case).parameters
    for step in trace.steps:
        assert set(step.gradients) == set(built.specs) - names
        assert not any(step.state.get(name) for name in names)
        for name in built.specs:
            same = np.array_equal(step.parameters[name], start[name])
            assert same == (name in names), name
    units = zero.unit_sizes(built.units)
    sizes = {name: size for unit in units for name, size in unit.items()}
    trained = sum(size for name, size in sizes.items() if name not in names)
    if stage < 2:
        assert sum(ledger.total("dp").elements for ledger in trace.ledgers) == 2 * 2 * 2 * trained
    for rank, ledger in enumerate(trace.ledgers):
        assert trace.bytes_held[rank] == zero.bytes_held(units, stage, precision, 2, 3, rank, names)
        peaks = zero.peaks(units, stage, precision, 2, 3, rank, names)
        assert (trace.peak_gradients[rank], trace.peak_gathered[rank]) == peaks
        if stage:
            expected = zero.elements_sent(units, stage, 2, 3, rank, names)
            assert ledger.total("dp").elements == 2 * sum(expected)


def test_frozen_names_what_there_is() -> None:
    """A name that freezes nothing is refused, and ``layers.1`` does not freeze ``layers.10``."""
    case = Case(MLP((1,) * 13), SGD(lr=0.1), (), frozen=("layers.1",))
    assert case.frozen_names == {"layers.1.weight", "layers.1.bias"}
    for wrong in ("layer.1", "layers.1.", "weight"):
        with pytest.raises(ValueError, match=f"frozen names '{wrong}'"):
            replace(case, frozen=(wrong,))


@pytest.mark.parametrize("stage", range(4))
def test_groups_with_different_decay(worlds: Worlds, stage: int) -> None:
    """Weights decay and biases do not, whichever owner they have: no order of names is mixed up (fairscale#483)."""
    model = MLP((3, 5, 2, 4))
    case = Case(model, SGD(lr=1.0, weight_decay=0.25), (batch(model, 4, 1.0, 1, 0),))
    trace = hold(case, Layout(dp=3, zero=stage), worlds)
    start = hybrid.State.initial(case).parameters
    for name, value in start.items():
        decay = 0.25 if name.endswith("weight") else 0.0
        moved = value - (trace.steps[0].gradients[name] + decay * value)
        np.testing.assert_array_equal(trace.steps[0].parameters[name], moved)  # the same operations, in the same order


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_clipped_by_the_norm_of_the_sum(worlds: Worlds, stage: int, ranks: int) -> None:
    """Gradients (3, 0) and (0, 4) of two rows are (0.6, 0.8) at a limit of 1: not clipped row by row (horovod#1346).

    On three ranks one owns nothing of a weight of 2 and has no row: its norm is 0 (DeepSpeed#5148).
    """
    model = MLP((2, 1), init="integers")
    case = Case(model, SGD(lr=1.0), (), clip=1.0, divide="after", frozen=("layers.0.bias",))
    start = hybrid.State.initial(case).parameters
    inputs = np.array([[3.0, 0.0], [0.0, 4.0]])
    targets = inputs @ start["layers.0.weight"] + start["layers.0.bias"] - 1
    case = replace(case, batches=(Batch(inputs, targets, np.ones(2, bool)),))
    (step,) = hold_exactly(case, Layout(dp=ranks, zero=stage), worlds).steps
    assert step.norm == 5
    moved = start["layers.0.weight"] - step.parameters["layers.0.weight"]
    # u = 2^-53 is half a last bit of what is below 2. The factor of 1/5, and its product with a gradient, are off by
    # u of 0.8 each, the new weight and the difference by u each.
    np.testing.assert_allclose(moved, [[0.6], [0.8]], rtol=0, atol=4 * 2.0**-53)


# ------------------------------------------------------------------ pieces and the order in which they travel


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_every_element_has_one_owner(sizes: list[int], ranks: int) -> None:
    """Nothing is padded and nothing left over, also where a parameter is smaller than N (DeepSpeed#8210)."""
    named = {str(i): size for i, size in enumerate(sizes)}
    pieces = zero.rank_major(named, ranks)
    for name, size in named.items():
        assert [i for _, n, r in pieces if n == name for i in r] == list(range(size))
    assert [rank for rank, _, _ in pieces] == sorted(rank for rank, _, _ in pieces)
    assert sum(zero.owned_counts(pieces, ranks)) == sum(sizes)


def test_pieces_travel_by_owner() -> None:
    """``a`` of 3 and ``b`` of 4 on 2 ranks travel as a0 a1 b0 b1, a2 b2 b3; 57 on 2 as 29 and 28 (DeepSpeed#1380)."""
    assert zero.rank_major({"a": 3, "b": 4}, 2) == [
        (0, "a", range(2)),
        (0, "b", range(2)),
        (1, "a", range(2, 3)),
        (1, "b", range(2, 4)),
    ]
    assert zero.owned_counts(zero.rank_major({"p": 57}, 2), 2) == [29, 28]


@settings(max_examples=30, deadline=None)
@given(mlps(), few_ranks, st.sampled_from([1, 5, 1 << 18]), st.sampled_from([1, 2, 3]), seeds)
def test_gather_gives_back_what_was_shared_out(
    worlds: Worlds, model: MLP, ranks: int, bucket: int, stage: int, seed: int
) -> None:
    """After an update every rank has every other's shard, in its place (pipegoose@5cb82e1, DeepSpeed#8158)."""
    for same in worlds(ranks).run(on_memory.published, model, bucket, stage, seed):
        assert same


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_one_step_are_not_in_the_next(worlds: Worlds, stage: int) -> None:
    """With a learning rate of 0, the same batch gives the same gradient twice (Megatron-LM@4fd6432de6)."""
    model = MLP((3, 4, 2))
    rows = batch(model, 5, 1.0, 1, 0)
    case = Case(model, SGD(lr=0.0), (rows, rows))
    first, second = hybrid.run(case, Layout(dp=3, zero=stage, micro_batches=2), world=worlds(3)).steps
    for name, g in first.gradients.items():
        np.testing.assert_array_equal(g, second.gradients[name])


@pytest.mark.parametrize("bucket", [3, 4, 5, 8, 9, 10])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_larger_than_its_bucket(worlds: Worlds, stage: int, bucket: int) -> None:
    """A parameter of 9 elements followed by one of 3 is whole in a bucket of 4 (DeepSpeed#3832)."""
    model = MLP((3, 3), init="integers")
    rows = Batch(np.eye(3), 2 * np.eye(3), np.ones(3, bool))
    hold_exactly(Case(model, SGD(lr=0.25), (rows,)), Layout(dp=2, zero=stage, bucket=bucket), worlds)


def test_writing_to_a_gathered_weight_raises(worlds: Worlds) -> None:
    """What is written to it would be lost when the unit is left (OpenRLHF#1357)."""
    with pytest.raises(RankError, match="read-only"):
        worlds(1).run(on_memory.write_to_gathered)
