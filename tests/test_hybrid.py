"""All techniques at once: whatever the case and however it is split, the trace is that of one device."""

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MOST_RANKS, batch, cases, exact_cases, gpts, layouts, mlps, splits
from truth import Worlds, hold, hold_exactly

from refpar import RankError, single
from refpar.case import Batch, Case, Layout, State
from refpar.comm import Communicator
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, AdamW
from refpar.parallel import assembly, hybrid, mesh, placement, traffic
from refpar.precision import LossScale, Precision

A_GPT = GPT(vocabulary=11, context=4, width=6, layers=2, heads=3)


def a_case(model: GPT | MLP = A_GPT, **options: Any) -> Case:
    """Return two ragged steps of ``model``."""
    batches = tuple(batch(model, 7, 0.7, seed=3, step=step) for step in range(2))
    return Case(model, AdamW(lr=0.01, weight_decay=0.1), batches, **{"clip": 0.05, **options})


@settings(max_examples=30, deadline=None)
@given(splits())
def test_trace_equals_single_device(worlds: Worlds, split: tuple[Case, Layout]) -> None:
    """Count, loss, gradients, norm, scale, state and weights of every step, on up to twelve ranks, and the traffic."""
    hold(*split, worlds)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["float16", "float32", "float64"]).flatmap(lambda t: splits(exact_cases(compute=t))))
def test_integers_are_bit_equal(worlds: Worlds, split: tuple[Case, Layout]) -> None:
    """Where no sum rounds, no layout changes a bit, in any type."""
    hold_exactly(*split, worlds)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_everything_at_once(worlds: Worlds, zero: int, schedule: str) -> None:
    """Three replicas by two slices by two stages, ragged micro-batches, dropout, recomputation, a tied embedding."""
    case = a_case(dataclasses.replace(A_GPT, dropout=0.25))
    hold(case, Layout(3, 2, 2, zero, micro_batches=3, schedule=schedule, recompute="block", bucket=40), worlds)


@pytest.mark.parametrize("layout", ["dp=2,tp=2", "pp=2", "tp=3,pp=3,zero=1", "dp=2,pp=2,zero=3,micro_batches=2"])
def test_a_frozen_tied_weight(worlds: Worlds, layout: str) -> None:
    """It is held by several stages, and none of them has a gradient to sum."""
    hold(a_case(frozen=("embedding.token.weight", "blocks.1")), Layout.parse(layout), worlds)


@settings(max_examples=15, deadline=None)
@given(splits(cases(models=gpts(max_layers=2), max_steps=2), most=6))
def test_fewer_bits_change_no_verdict(worlds: Worlds, split: tuple[Case, Layout]) -> None:
    """In half precision counts, outcomes and the history of the scale are those of one device."""
    case, layout = split
    case = dataclasses.replace(case, precision=Precision("float16", loss_scale=LossScale(64.0, interval=1)))
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    for got, expected in zip(trace.steps, single.train(case).steps, strict=True):
        for name in ("count", "outcome", "scale", "good", "t"):
            assert getattr(got, name) == getattr(expected, name)


@pytest.mark.parametrize(
    "layout", ["dp=3", "pp=3", "tp=2", "dp=2,tp=2,pp=3,zero=3", "dp=3,pp=2,zero=2,micro_batches=2"]
)
def test_overflow_on_one_rank_is_known_to_all(worlds: Worlds, layout: str) -> None:
    """One unit of the last layer overflows, in one row: every rank skips, and every scale is halved."""
    model = MLP((2, 3, 2, 2), init="integers")
    inputs, targets = np.zeros((5, 2)), np.zeros((5, 2))
    targets[4, 1] = 600  # twice that, times the scale of 64, is no half
    ordinary = Batch(inputs + 1, inputs, np.ones(5, bool))
    case = Case(
        model,
        SGD(lr=0.0),  # so that all three steps are of integers
        (ordinary, Batch(inputs, targets, np.ones(5, bool)), ordinary),
        precision=Precision("float16", loss_scale=LossScale(64.0, interval=2)),
        divide="after",
    )
    with np.errstate(over="ignore", invalid="ignore"):
        trace = hold_exactly(case, Layout.parse(layout), worlds)
    assert [step.outcome for step in trace.steps] == ["updated", "overflow", "updated"]
    assert [(step.scale, step.good, step.t) for step in trace.steps] == [(64, 1, 1), (32, 0, 1), (32, 1, 2)]


# Layouts


def test_ranks_stand_as_drawn() -> None:
    """Tensor-parallel neighbours closest, then replicas, then stages."""
    places = [mesh.place(Layout(dp=2, tp=2, pp=2), rank) for rank in range(8)]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        (A_GPT, Layout(pp=5), "pp is 5: the model has 4 units, and every stage needs at least one"),
        (A_GPT, Layout(tp=4), "tp is 4: blocks.0 has 3 heads, and every rank needs at least one"),
        (GPT(2, 4, 6, 1, 3), Layout(tp=3), "tp is 3: the vocabulary has 2 words"),
        (A_GPT, Layout(pp=2, stages=(2, 1)), r"stages=\[2, 1\] adds up to 3 units, and the model has 4"),
        (MLP((2, 2)), Layout(dp=6, pp=2), "pp is 2: the model has 1 unit"),
    ],
)
def test_what_cannot_be_is_refused_before_it_starts(worlds: Worlds, model: Any, layout: Layout, reason: str) -> None:
    """With the reason, and without a process: not as zero heads a rank, nor as a hang."""
    for world in (None, worlds(1)):
        with pytest.raises(ValueError, match=reason):
            hybrid.run(a_case(model), layout, world=world)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"tp": True}, "tp is True"),
        ({"pp": 1.0}, r"pp is 1\.0"),
        ({"micro_batches": -1}, "micro_batches is -1"),
        ({"bucket": 0}, "bucket is 0"),
        ({"zero": 4}, "zero is 4: it must be a whole number from 0 to 3"),
        ({"schedule": "zb-h1"}, "schedule is 'zb-h1': it must be one of 1f1b, gpipe"),
        ({"recompute": "0"}, "recompute is '0'"),
        ({"pp": 2, "stages": (1, 1, 1)}, "stages is .1, 1, 1.: it must give the units of each of pp=2 stages"),
        ({"pp": 2, "stages": (4, 0)}, "stages is .4, 0.: it must be whole numbers of at least 1"),
        ({"pp": 2, "stages": "2+x"}, r"stages is '2\+x'"),
    ],
)
def test_layouts_are_validated(options: dict[str, Any], reason: str) -> None:
    """The message names the field, the value, and what would be right."""
    with pytest.raises(ValueError, match=reason):
        Layout(**options)


@settings(max_examples=100, deadline=None)
@given(cases(models=gpts() | mlps(), max_steps=1).flatmap(layouts), st.sampled_from("_-"))
def test_layouts_are_read_as_they_are_written(layout: Layout, separator: str) -> None:
    """In both spellings."""
    text = str(layout).replace("micro_batches", f"micro{separator}batches")
    assert Layout.parse(text) == layout
    assert layout.ranks <= MOST_RANKS


def test_a_world_of_another_size_is_refused(worlds: Worlds) -> None:
    """Two ranks cannot run what needs four."""
    with pytest.raises(ValueError, match="layout dp=2,tp=2 needs 4 ranks: there are 2"):
        hybrid.run(a_case(), Layout(dp=2, tp=2), world=worlds(2))


# Who holds what


@settings(max_examples=60, deadline=None)
@given(splits())
def test_every_element_has_one_owner(split: tuple[Case, Layout]) -> None:
    """Over slices, stages and ZeRO's shards, the positions of all owners are each position once."""
    case, layout = split
    model = case.model.build()
    holders = mesh.holders(layout, model)
    for name, spec in model.specs.items():
        taken = []
        for rank in range(layout.ranks):
            d, t, p = mesh.place(layout, rank)
            speaks = p == holders[name][0] and (spec.axis is not None or t == 0) and (layout.zero or d == 0)
            if speaks:
                held = placement.positions(spec, layout.tp, t)
                part = placement.rows(len(held), layout.dp, d) if layout.zero else range(len(held))
                taken += held[part.start : part.stop].tolist()
                assert len(held) == traffic.size_held(spec, layout.tp, t)
        assert sorted(taken) == list(range(int(np.prod(spec.shape))))


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [([[0, 1], [1, 2]], "element 1 of 3 was written 2 times"), ([[0], [2]], "element 1 of 3 was written 0 times")],
)
def test_assembly_insists_on_once(pieces: list[list[int]], complaint: str) -> None:
    """Two that speak for an element, or nobody, is an error and no number."""
    with pytest.raises(AssertionError, match=complaint):
        placement.assemble((3,), [(np.array(at), np.zeros(len(at))) for at in pieces])


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("dp=3", "head.norm.bias"),
        ("dp=3,zero=2", "embedding.token.weight"),
        ("tp=3", "head.norm.bias"),
        ("pp=2", "embedding.token.weight"),
        ("dp=2,pp=2,zero=3", "embedding.token.weight"),
    ],
)
def test_drift_is_seen(worlds: Worlds, layout: str, name: str) -> None:
    """Where one rank's copy of a weight is off by the last bit, the run says which weight, and between whom."""
    split = Layout.parse(layout)
    with pytest.raises(RankError, match=f"{name} differs between ranks"):
        worlds(split.ranks).run(drifting, a_case(), split, name)


def drifting(comm: Communicator, case: Case, layout: Layout, name: str) -> None:
    """Train, with a weight of the last rank that is one bit off."""

    def check(place: mesh.Mesh, weights: dict[str, Any]) -> None:
        if comm.rank == comm.size - 1:
            weights = {**weights, name: np.nextafter(weights[name], 1)}
        assembly.check_replicas(place, weights)

    hybrid.check_replicas, right = check, hybrid.check_replicas
    try:
        hybrid.train(comm, case, layout)
    finally:
        hybrid.check_replicas = right


def test_ranks_must_agree() -> None:
    """A loss that one rank knows otherwise is an error; a NaN is equal to a NaN."""
    steps = [assembly.RankStep(3, math_nan, 1.0, "updated", 1.0, 0, 1) for math_nan in (float("nan"), float("nan"))]
    assembly.check_agreement(steps)
    steps[1].norm = np.nextafter(1.0, 2.0)
    with pytest.raises(AssertionError, match="ranks disagree"):
        assembly.check_agreement(steps)


# Norm and clipping


@pytest.mark.parametrize(
    ("pieces", "norm"),
    [
        ([[3.0], [4.0]], 5),  # slices, shards or stages: not 3.5 (llm.c@7018280), and the same on both (torchtitan#649)
        ([[], [5.0]], 5),  # a rank that owns nothing (Megatron-LM#5530)
        ([[], []], 0),
        ([[3.0, 4.0], [12.0], []], 13),
    ],
)
def test_norm_is_that_of_all_pieces_together(worlds: Worlds, pieces: list[list[float]], norm: float) -> None:
    """Squares are summed over all ranks, and the root is taken once."""

    def on_rank(comm: Communicator) -> tuple[float, float, bool]:
        mine = [np.array([x]) for x in pieces[comm.rank]]
        return hybrid.agree(comm, 1.0 + comm.rank, mine, mine)

    total = sum(range(1, len(pieces) + 1))
    assert worlds(len(pieces)).run(on_rank) == [(total, norm, False)] * len(pieces)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_infinite_entry_is_known_to_all(worlds: Worlds, bad: float) -> None:
    """Also where it is in a copy that somebody else counts."""

    def on_rank(comm: Communicator) -> tuple[float, float, bool]:
        return hybrid.agree(comm, 0.0, [np.ones(1)], [np.array([1.0, bad if comm.rank == 2 else 0.0])])

    assert worlds(3).run(on_rank) == [(0.0, 3**0.5, True)] * 3


@pytest.mark.parametrize(
    "layout", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=1,micro_batches=2"]
)
@pytest.mark.parametrize(
    ("inputs", "targets", "weights"),
    [
        ([[1, 0], [0, 1]], [-3, -4], [-0.6, -0.8]),  # clipped before they are summed: -0.5, -0.5 (horovod#1346)
        ([[1, 3], [2, 1]], [-1, -1], [-0.6, -0.8]),  # norms added instead of gradients: 5.398 (pytorch#159856)
    ],
)
def test_what_is_clipped_is_the_sum(
    worlds: Worlds, layout: str, inputs: list[list[float]], targets: list[float], weights: list[float]
) -> None:
    """Rows on two ranks give 3 0 and 0 4, or 1 3 and 2 1: a norm of 5, and at a limit of 1 a step of 0.6 and 0.8."""
    rows = Batch(np.array(inputs, float), np.array(targets, float)[:, None], np.ones(2, bool))
    case = Case(MLP((2, 1)), SGD(lr=1.0), (rows,), clip=1.0, frozen=("layers.0.bias",))
    zeros = {name: np.zeros_like(x) for name, x in State.initial(case).parameters.items()}
    start = dataclasses.replace(State.initial(case), parameters=zeros)
    split = Layout.parse(layout)
    step = hybrid.run(case, split, world=worlds(split.ranks), start=start).steps[0]
    assert step.norm == 5
    np.testing.assert_allclose(step.parameters["layers.0.weight"].ravel(), weights, rtol=2.0**-51)


# What goes on while it runs


def test_nothing_else_is_sent(worlds: Worlds) -> None:
    """There are five groups on the ledger, and nothing beside them; what only observes is apart."""
    trace = hybrid.run(a_case(), Layout(2, 2, 2, zero=1, micro_batches=2), world=worlds(8))
    for ledger in trace.ledgers:
        assert {group for group, _ in ledger.sent} <= set(traffic.GROUPS)
        assert ledger.observed.bytes_sent > 0


def test_a_stray_draw_changes_nothing(worlds: Worlds) -> None:
    """A rank that has drawn random numbers of its own is no different (Megatron-DeepSpeed#276)."""
    case = a_case(dataclasses.replace(A_GPT, dropout=0.25))
    layout = Layout(dp=2, tp=2)

    def stray(comm: Communicator) -> assembly.RankTrace:
        if comm.rank == 0:
            np.random.random(7)  # noqa: NPY002
        return hybrid.train(comm, case, layout)

    one = hybrid.collect(case, layout, worlds(4).run(stray))
    other = hybrid.run(case, layout, world=worlds(4))
    for a, b in zip(one.steps, other.steps, strict=True):
        for (name, x), (_, y) in zip(a.items(), b.items(), strict=True):
            np.testing.assert_array_equal(x, y, name)


def test_long_runs_keep_little(worlds: Worlds) -> None:
    """``light`` keeps the numbers of every step and the arrays of the last; ``on_step`` sees each, and can stop."""
    case, layout = a_case(), Layout(dp=2, tp=2, zero=1)
    case = dataclasses.replace(case, batches=case.batches * 3)

    def watched(comm: Communicator) -> tuple[list[float], assembly.RankTrace]:
        seen: list[float] = []

        def stop(group: Communicator, step: assembly.RankStep) -> bool:
            seen.append(step.loss)
            return len(seen) == 4

        return seen, hybrid.train(comm, case, layout, on_step=stop, light=True)

    seen, parts = zip(*worlds(4).run(watched), strict=True)
    trace, full = hybrid.collect(case, layout, parts), hybrid.run(case, layout, world=worlds(4))
    assert [step.loss for step in trace.steps] == seen[0] == [step.loss for step in full.steps[:4]]
    assert not any(step.parameters or step.gradients or step.state for step in trace.steps[:3])
    for (name, x), (_, y) in itertools.zip_longest(
        trace.steps[3].items(), (item for item in full.steps[3].items() if not item[0].startswith("gradient"))
    ):
        np.testing.assert_array_equal(x, y, name)


# refpar verify


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``refpar verify``."""
    program = [sys.executable, "-m", "refpar", "verify", "--steps", "2", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("separator", ["-", "_"])
def test_any_one_layout_can_be_verified(separator: str) -> None:
    """In both spellings: one row, ``hybrid``, with what was sent and kept beside the formulas."""
    done = verify("--layout", f"dp=2,tp=2,pp=2,zero=1,micro{separator}batches=3,schedule=1f1b", "--json", "-")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert (row["technique"], row["layout"]) == ("hybrid", "dp=2,tp=2,pp=2,zero=1,micro_batches=3")
    assert (row["ranks"], len(set(row["pids"])), row["passed"]) == (8, 8, True)
    assert 0 < row["max_error"] <= row["bound"]
    assert row["bytes_sent"] == row["bytes_expected"]
    assert row["bytes_held"] == row["bytes_held_expected"]
    assert min(row["bytes_sent"]) > 0


@pytest.mark.parametrize("name", ["tp", "pp", "hybrid"])
def test_each_way_of_splitting_has_its_rows(name: str) -> None:
    """Several layouts, of up to twelve ranks, each with its own traffic."""
    done = verify("--only", name, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert len(rows) == 3
    assert {row["technique"] for row in rows} == {name}
    assert max(row["ranks"] for row in rows) <= MOST_RANKS
    assert all(row["bytes_sent"] == row["bytes_expected"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "tp=7"], "--layout dp=1,tp=7: tp is 7: blocks.0 has 5 heads"),
        (["--layout", "pp=5"], "pp is 5: the model has 4 units"),
        (["--layout", "pp=2,stages=3+2"], "adds up to 5 units"),
        (["--layout", "rows=2"], "layout key 'rows' is unknown"),
        (["--layout", "microbatches=2"], "did you mean micro_batches?"),
        (["--layout", "dp"], "layout 'dp' has no value: write dp=VALUE"),
        (["--layout", "dp=many"], "layout dp is 'many': it must be a whole number"),
        (["--layout", "dp=1000"], "1000 ranks are too many: at most 512"),
        (["--layout", "dp=2", "--only", "tp"], "--layout is a run by itself"),
        (["--only", "tp", "--ranks", "7"], "tp is 7: blocks.0 has 5 heads"),
    ],
)
def test_a_layout_that_cannot_be_is_one_clear_line(arguments: list[str], words: str) -> None:
    """Exit status 2, before anything starts."""
    done = verify(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
