"""The planner is right in fact: its figures are what runs of small networks hold, send and compute, to the byte."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_plan import counted
from strategies import batch, gpts, layouts, mlps, optimizers
from truth import Worlds

from refpar.case import Case, Layout, Trace
from refpar.nn.models import GPT
from refpar.optim import AdamW
from refpar.parallel import hybrid, schedule, simulator
from refpar.parallel import traffic as by_hand
from refpar.plan import memory, models, recipes, speed, traffic
from refpar.plan.activations import in_flight
from refpar.plan.recipes import Recipe
from refpar.plan.setups import Place, Setup
from refpar.precision import LossScale, Precision

PRECISIONS = [
    Precision(),
    Precision("float32"),
    Precision("float16", loss_scale=LossScale(8.0)),
    Precision("float16", gradients="float32"),
    Precision("float16", reduce="float16"),
]
STEPS = 2


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> tuple[Case, Layout]:
    """Networks of up to four blocks in which every token counts, so that every step updates; and any layout."""
    model = draw(gpts(max_layers=4) | mlps())
    rows, seed = draw(st.integers(1, 9)), draw(st.integers(0, 99))
    batches = tuple(batch(model, rows, 1.0, seed, step) for step in range(STEPS))
    case = Case(model, draw(optimizers()), batches, precision=draw(st.sampled_from(PRECISIONS)))
    return case, draw(layouts(case, most=most))


def planned(case: Case, layout: Layout) -> tuple[Setup, Recipe]:
    """Return what the planner is asked."""
    setup = Setup.of(layout, len(case.batches[0]), getattr(case.model, "context", 1))
    return setup, recipes.of(case.optimizer, case.precision)


def hold(case: Case, layout: Layout, trace: Trace) -> None:
    """Assert that every rank held, kept, gathered and sent what the ledgers on paper say."""
    setup, recipe = planned(case, layout)
    for rank in range(layout.ranks):
        paper = memory.of_rank(case.model, setup, recipe, rank)
        assert paper.held == trace.bytes_held[rank]
        assert paper.activations == trace.peak_bytes[rank]
        assert int(in_flight(setup, paper.place.p)) == trace.peak_live[rank]
        gathered = [line.bytes for line in paper.lines if line.tensor.startswith("weights of the unit at work")]
        assert sum(gathered) == trace.peak_gathered[rank]
        assert trace.peak_gradients[rank] <= paper.at("backward", "gradients", "buffers")

        expected: Counter[tuple[str, str, str]] = Counter()
        for sent in traffic.of_rank(case.model, setup, recipe, rank):
            for what in ("messages", "elements", "bytes"):
                expected[sent.group, sent.operation, what] += STEPS * getattr(sent, what)
        ledger = {
            (*key, what): getattr(sent, what)
            for key, sent in trace.ledgers[rank].sent.items()
            for what in ("messages", "elements", "bytes")
        }
        assert +expected == +Counter(ledger)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_bytes_and_messages_are_those_of_a_run(worlds: Worlds, problem: tuple[Case, Layout]) -> None:
    """Any network, layout, ZeRO stage, schedule, recomputation, precision, bucket: equal as integers, on every rank."""
    case, layout = problem
    trace = hybrid.run(case, layout, world=worlds(layout.ranks))
    if all(step.outcome == "updated" for step in trace.steps):  # a step that overflows publishes no weights
        hold(case, layout, trace)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("gpipe", "block")])
def test_every_technique_at_once(worlds: Worlds, zero: int, schedule: str, recompute: str) -> None:
    """Two replicas, two slices of 5 heads, two stages, 3 ragged micro-batches, dropout, a tied embedding, AdamW."""
    model = GPT(vocabulary=11, context=4, width=10, layers=3, heads=5, dropout=0.25)
    case = Case(model, AdamW(lr=0.01), tuple(batch(model, 11, 1.0, 3, step) for step in range(STEPS)))
    layout = Layout(2, 2, 2, zero, micro_batches=3, schedule=schedule, recompute=recompute, bucket=300)
    hold(case, layout, hybrid.run(case, layout, world=worlds(8)))


@settings(max_examples=15, deadline=None)
@given(problems(most=4))
def test_multiply_adds_are_those_of_a_run(worlds: Worlds, problem: tuple[Case, Layout]) -> None:
    """Matrix products, counted one by one as they run: forward, backward twice, and again where recomputed."""
    case, layout = problem
    setup, recipe = planned(case, layout)
    expected = [STEPS * speed.of_rank(case.model, setup, recipe, rank) for rank in range(layout.ranks)]
    assert worlds(layout.ranks).run(counted, case, layout) == expected


@settings(max_examples=50, deadline=None)
@given(problems(most=30))
def test_two_formulas_agree(problem: tuple[Case, Layout]) -> None:
    """The planner counts tensors; the techniques' own formulas look at layers. Neither knows the other's list."""
    case, layout = problem
    setup, recipe = planned(case, layout)
    for rank in range(layout.ranks):
        paper = traffic.by_group(traffic.of_rank(case.model, setup, recipe, rank))
        assert +Counter(paper) == +Counter(by_hand.bytes_sent(case, layout, rank, case.batches[0]))


@settings(max_examples=30, deadline=None)
@given(problems(most=30))
def test_first_rank_of_a_stage_is_the_most_loaded(problem: tuple[Case, Layout]) -> None:
    """So that the worst of 10^5 ranks is found by looking at one a stage."""
    case, layout = problem
    setup, recipe = planned(case, layout)
    every = [memory.of_rank(case.model, setup, recipe, rank).peak for rank in range(layout.ranks)]
    assert memory.most_loaded(case.model, setup, recipe).peak == max(every)
    assert [setup.rank(setup.place(rank)) for rank in range(layout.ranks)] == list(range(layout.ranks))


@settings(max_examples=30, deadline=None)
@given(gpts(max_layers=3) | mlps())
def test_parameters_are_those_of_the_network(model: GPT) -> None:
    """Names, shapes, order and the axis that tensor parallelism splits."""
    built = {name: (spec.shape, spec.axis) for name, spec in model.build().specs.items()}
    seen = {name: (t.shape, t.axis) for name, t in models.network(model, "refpar").parameters.items()}
    assert list(seen.items()) == list(built.items())


# Schedules: the closed forms against the simulator


@pytest.mark.parametrize("K", range(1, 9))
def test_bubble_and_live_micro_batches(K: int) -> None:
    """Up to 32 micro-batches, in unit time: (K-1)/M of the ideal step, (K-1)/(M+K-1) of the real one."""
    for M in (1, 2, 3, 5, 7, 8, 13, 16, 32):
        for name, build in (("1f1b", schedule.one_f_one_b), ("gpipe", schedule.gpipe)):
            lists = build(K, M)
            run = simulator.simulate(lists)
            assert (run.bubble_of_ideal, run.bubble_of_step) == speed.bubble(K, M)
            setup = Setup(pp=K, micro_batches=M, schedule=name)
            assert [in_flight(setup, p) for p in range(K)] == [simulator.peak_live(stage) for stage in lists]


def interleaved(K: int, M: int, v: int) -> schedule.Schedule:
    """Return interleaved 1F1B as Megatron orders it: groups of K micro-batches go through one slice after another."""

    def forward(stage: int, k: int) -> list[schedule.Instruction]:
        m, s = k // (K * v) * K + k % K, k % (K * v) // K * K + stage
        before: list[schedule.Instruction] = [schedule.RecvActivation(m, s)] if s > 0 else []
        after: list[schedule.Instruction] = [schedule.SendActivation(m, s)] if s < K * v - 1 else []
        return [*before, schedule.Forward(m, s), *after]

    def backward(stage: int, k: int) -> list[schedule.Instruction]:
        m, s = k // (K * v) * K + k % K, (v - 1 - k % (K * v) // K) * K + stage
        before: list[schedule.Instruction] = [schedule.RecvGradient(m, s)] if s < K * v - 1 else []
        after: list[schedule.Instruction] = [schedule.SendGradient(m, s)] if s > 0 else []
        return [*before, schedule.Backward(m, s), *after]

    stages = []
    for stage in range(K):
        ahead = min(M * v, 2 * (K - stage - 1) + (v - 1) * K)
        work = [i for k in range(ahead) for i in forward(stage, k)]
        for k in range(M * v - ahead):
            work += forward(stage, ahead + k) + backward(stage, k)
        work += [i for k in range(M * v - ahead, M * v) for i in backward(stage, k)]
        stages.append((*work, schedule.ReduceGradients(), schedule.Step()))
    return tuple(stages)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("K", [2, 3, 4, 8])
def test_interleaving(K: int, v: int) -> None:
    """v chunks a stage divide the bubble by v, and store 2 (K - stage - 1) + (v - 1) K + 1 chunks."""
    for M in (K, 2 * K, 4 * K):
        lists = interleaved(K, M, v)
        run = simulator.simulate(lists)
        assert (run.bubble_of_ideal, run.bubble_of_step) == speed.bubble(K, M, v)
        setup = Setup(pp=K, micro_batches=M, chunks=v)
        assert [in_flight(setup, p) * v for p in range(K)] == [simulator.peak_live(stage) for stage in lists]


@pytest.mark.parametrize(
    ("K", "M", "stages"), [(2, 4, ()), (4, 8, ()), (4, 3, ()), (3, 9, (5, 3, 3)), (3, 5, (2, 6, 3))]
)
def test_time_of_a_pipeline(K: int, M: int, stages: tuple[int, ...]) -> None:
    """The simulated time of GPipe, however unequal the stages; 1F1B takes no longer."""
    model, recipe = models.gpt2(9, 256, 4, 2000, 64), recipes.RECIPES["fp32-adam"]
    hardware = speed.Hardware(10**15, intra=1e30, inter=1e30, peak=1e12, efficiency=1.0)
    setup = Setup(pp=K, batch=M, micro_batches=M, stages=stages)
    costs = [speed.stage_time(model, setup, recipe, hardware, p) for p in range(K)]
    each = {"forward": [cost[0] for cost in costs], "backward": [cost[1] for cost in costs]}
    found = speed.step(model, setup, recipe, hardware)
    simulated = [
        float(simulator.simulate(lists(K, M), **each).makespan) for lists in (schedule.gpipe, schedule.one_f_one_b)
    ]
    assert found.total == pytest.approx(simulated[0], rel=1e-9)
    assert simulated[1] <= found.total * (1 + 1e-9)
    assert found.bubble == pytest.approx(found.total - found.compute)


def test_formulas_of_communication() -> None:
    """(N-1)/N of 2 psi, (M+1) psi and 3 M psi elements a rank; 8 bsh (t-1)/t a block and micro-batch; bsh a stage."""
    model, N, M = models.gpt2(2, 64, 4, vocabulary=128, context=32), 8, 5
    recipe = recipes.RECIPES["mixed-adam"]

    def elements(group: str, **layout: int) -> int:
        setup = Setup(batch=N * M, micro_batches=M, bucket=10**9, **layout)
        return sum(sent.elements for sent in traffic.of_rank(model, setup, recipe, 0) if sent.group == group)

    psi, twice = model.size, model.size + 128 * 64  # with the tied weight in both its units
    share = (N - 1) / N
    assert elements("dp", dp=N) == 2 * psi * share
    assert elements("dp", dp=N, zero=1) == 2 * psi * share
    assert elements("dp", dp=N, zero=2) == (M * twice + psi) * share
    assert elements("dp", dp=N, zero=3) == 3 * M * twice * share
    bsh = 32 * 64 * N  # rows of a micro-batch times tokens times width, at dp = 1
    of_blocks, of_ends, of_loss = 2 * 8 * bsh, 2 * 2 * bsh, 2 * 3 * bsh // 64
    assert elements("tp", tp=4) == M * (of_blocks + of_ends + of_loss) * 3 // 4
    assert elements("pp", pp=2) == M * bsh


def test_place_numbers_ranks_as_runs_do() -> None:
    """tp closest, then replicas, then stages."""
    setup = Setup(dp=2, tp=2, pp=2)
    assert [setup.place(rank) for rank in (0, 1, 2, 4)] == [
        Place(0, 0, 0), Place(0, 0, 1), Place(0, 1, 0), Place(1, 0, 0),
    ]  # fmt: skip
    assert np.prod([setup.dp, setup.tp, setup.pp]) == setup.ranks
