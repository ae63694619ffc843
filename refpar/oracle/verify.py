"""The main job: run every technique on real processes and hold it to one device.

Each technique is a function that yields :class:`Row`, one a layout. A row says what was compared, how
large the largest error was beside what it is held to, and what each rank sent beside what it must have
sent according to the formula.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import refpar
from refpar import single, split
from refpar.arrays import to_host
from refpar.case import Batch, Case, Layout, Trace, text_batches
from refpar.comm import RankError, ring
from refpar.comm.communicator import Communicator, Ranks
from refpar.comm.processes import World
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.oracle import bounds
from refpar.oracle.compare import compare
from refpar.parallel import hybrid, traffic
from refpar.parallel.assembly import DRIFTED
from refpar.parallel.mesh import check
from refpar.precision import LossScale, Precision

RING_ELEMENTS = 240_000
RING_RANKS = (4, 8, 64)
RANKS = (1, 2, 3, 5)


@dataclass(frozen=True)
class Row:
    """One line of the table. Lists are by rank; None where a row has no such thing.

    Attributes
    ----------
    technique, layout, ranks, pids : what ran, and where
    steps, tensors_compared : how much of it was looked at
    max_error, bound, bound_kind : of the tensor nearest to its bound, or furthest outside
    elements, itemsize : of what is reduced in one step: the parameters' gradients, or the ring's array
    bytes_sent, bytes_expected : for the technique itself, over all steps, and the exact prediction
    bytes_held, bytes_held_expected : kept from step to step
    peak_bytes : activations kept for the backward pass
    detail : the first wrong number, where there is one
    """

    technique: str
    layout: str
    ranks: int
    pids: list[int]
    steps: int
    tensors_compared: int
    max_error: float
    bound: float
    bound_kind: str
    elements: int
    itemsize: int
    bytes_sent: list[int] | None = None
    bytes_expected: list[int] | None = None
    bytes_held: list[int] | None = None
    bytes_held_expected: list[int] | None = None
    peak_bytes: list[int] | None = None
    seconds: float = 0.0
    passed: bool = True
    detail: str = ""


@dataclass
class Problem:
    """What is verified: a case on real text, its truth, and pools of ranks to run it on.

    Attributes
    ----------
    ranks : numbers of ranks to run on, None for each technique's own choice
    opened : starts a number of ranks, or finds them
    most : how many ranks there are at most, None where they are started as needed
    skipped : what was asked for and cannot run, with the reason
    """

    text: bytes
    steps: int = 4
    seed: int = 0
    ranks: Sequence[int] | None = None
    opened: Callable[[int], AbstractContextManager[Ranks]] = World
    most: int | None = None
    skipped: list[str] = field(default_factory=list)
    worlds: dict[int, Ranks] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @cached_property
    def case(self) -> Case:
        """A small GPT on the bytes of the text: tied embedding, dropout, ragged tokens, clipping, AdamW, float64."""
        model = GPT(vocabulary=256, context=24, width=30, layers=2, heads=5, dropout=0.1)
        batches = text_batches(self.text, steps=self.steps, rows=7, context=24, seed=self.seed)
        return Case(model, AdamW(lr=1e-2, weight_decay=0.1), batches, clip=1.0, seed=self.seed)

    @cached_property
    def truth(self) -> Trace:
        """The case on one device."""
        return single.train(self.case)

    @cached_property
    def bounds(self) -> bounds.Bounds:
        """What the single device itself shows in other orders."""
        return bounds.spread(self.truth)

    @cached_property
    def halves(self) -> Case:
        """The same in float16 under a loss scale that grows; SGD, since Adam makes much of small differences."""
        types = Precision("float16", loss_scale=LossScale(2.0**10, interval=2))
        return replace(self.case, precision=types, optimizer=SGD(lr=0.1, momentum=0.5))

    @cached_property
    def integers(self) -> Case:
        """Which bits follow which, in float16 with Adam: nothing rounds before the update, and 64 divides all sizes.

        The first step is under a loss scale that its gradient overflows.
        """
        bits = 2.0 * np.unpackbits(np.frombuffer(self.text[: 65 * 8].ljust(65 * 8), np.uint8)).reshape(65, 64) - 1
        rows = Batch(bits[:-1], bits[1:], np.ones(64, bool))
        types = Precision("float16", loss_scale=LossScale(64.0, backoff=2.0**-6))
        model = MLP((64, 64), init="integers")
        return Case(model, Adam(lr=0.25), (rows, rows), types, divide="after", seed=self.seed)

    def world(self, ranks: int) -> Ranks:
        """Return a standing pool of ``ranks`` ranks."""
        if ranks not in self.worlds:
            self.worlds[ranks] = self.stack.enter_context(self.opened(ranks))
        return self.worlds[ranks]

    def counts(self, usual: Sequence[int]) -> Sequence[int]:
        """Return the numbers of ranks to run a technique on: those asked for, or the usual ones as far as there are."""
        if self.ranks is not None or self.most is None:
            return self.ranks or usual
        return sorted({min(ranks, self.most) for ranks in usual})

    def why_not(self, layout: Layout) -> str | None:
        """Return why the case cannot run in ``layout``, None where it can."""
        if self.most is not None and layout.ranks > self.most:
            return f"layout {layout} needs {layout.ranks} ranks: there are {self.most}"
        try:
            check(layout, self.case.model.build())
        except ValueError as error:
            return str(error)
        return None


def ring_rows(problem: Problem) -> Iterator[Row]:
    """All-reduce of 240,000 integers in float32: exact, and 2(N-1)/N of them sent by each rank."""
    for ranks in problem.counts(RING_RANKS):
        world = problem.world(ranks)
        start = time.perf_counter()
        results, sent = zip(*world.run(all_reduce_once, problem.seed), strict=True)
        inputs = [ring_input(rank, ranks, problem.seed) for rank in range(ranks)]
        expected: Any = np.sum(inputs, axis=0, dtype=np.float64)
        detail = ""
        for rank, result in enumerate(results):
            wrong = result != expected  # a NaN is
            if wrong.any() and not detail:
                index = int(np.argmax(wrong))
                detail = f"element {index} on rank {rank} is {result[index]}, expected {expected[index]}"
        yield judged(
            Row(
                technique="ring",
                layout=f"ranks={ranks}",
                ranks=ranks,
                pids=world.pids,
                steps=1,
                tensors_compared=ranks,
                max_error=max(float(np.abs(result - expected).max()) for result in results),
                bound=0.0,
                bound_kind="exact",
                elements=RING_ELEMENTS,
                itemsize=4,
                bytes_sent=list(sent),
                bytes_expected=[4 * sum(split.ring_elements(RING_ELEMENTS, ranks, rank)) for rank in range(ranks)],
                seconds=time.perf_counter() - start,
                detail=detail,
            )
        )


def all_reduce_once(comm: Communicator, seed: int) -> tuple[Any, int]:
    """Return the sum over ranks of their inputs, and the bytes sent for it."""
    before = comm.ledger.bytes_sent
    result = to_host(ring.all_reduce(comm, comm.xp.asarray(ring_input(comm.rank, comm.size, seed))))
    return result, comm.ledger.bytes_sent - before


def ring_input(rank: int, ranks: int, seed: int) -> Any:
    """Return integers, no two of them alike on different ranks, whose sums over all ranks are exact in float32.

    They are ``period * rank`` and up, and repeat after ``period`` elements: as many as there is room for below 2^24.
    """
    period = min(RING_ELEMENTS, 2**24 // (ranks * (ranks + 1) // 2))
    return ((np.arange(RING_ELEMENTS) + seed % period) % period + period * rank).astype(np.float32)


def dp_rows(problem: Problem) -> Iterator[Row]:
    """Data parallel on the case."""
    for ranks in problem.counts(RANKS):
        yield hybrid_row(problem, "dp", Layout(dp=ranks, micro_batches=2))


TP_LAYOUTS = ("tp=2", "tp=3,micro_batches=2", "tp=5")
PP_LAYOUTS = ("pp=2,micro_batches=4,schedule=gpipe", "pp=3,micro_batches=4", "pp=4,micro_batches=2")
HYBRID_LAYOUTS = (
    "dp=2,tp=2,zero=2",
    "dp=2,tp=2,pp=2,zero=1,micro_batches=3,recompute=block",
    "dp=2,tp=3,pp=2,zero=3,micro_batches=2,schedule=gpipe",
)


def tp_rows(problem: Problem) -> Iterator[Row]:
    """Tensor parallel: heads, columns and words that do not divide by the ranks."""
    asked = [f"tp={ranks}" for ranks in problem.ranks or ()]
    yield from layout_rows(problem, "tp", asked or TP_LAYOUTS)


def pp_rows(problem: Problem) -> Iterator[Row]:
    """Pipelines, of both schedules, with fewer micro-batches than stages too."""
    asked = [f"pp={ranks},micro_batches=4" for ranks in problem.ranks or ()]
    yield from layout_rows(problem, "pp", asked or PP_LAYOUTS)


def hybrid_rows(problem: Problem) -> Iterator[Row]:
    """Everything at once, on up to twelve ranks."""
    counts: Sequence[int] = problem.ranks or ()
    if problem.most is not None and not counts and problem.most < 12:
        counts = (problem.most,)
    asked = [f"{spread_over(ranks)},zero=1,micro_batches=2" for ranks in counts]
    yield from layout_rows(problem, "hybrid", asked or HYBRID_LAYOUTS)


def zero_rows(stage: int) -> Callable[[Problem], Iterator[Row]]:
    """Return the rows of a stage: on the case, and on 64 ranks with the paper's memory for each of them."""

    def rows(problem: Problem) -> Iterator[Row]:
        for ranks in problem.counts(RANKS):
            yield hybrid_row(problem, f"zero{stage}", Layout(dp=ranks, zero=stage, micro_batches=2))
        if problem.ranks is None and problem.most is None:
            case = replace(problem.integers, batches=problem.integers.batches[:1], precision=Precision("float16"))
            yield hybrid_row(problem, f"zero{stage}", Layout(dp=64, zero=stage), case, single.train(case), [])

    return rows


def checkpoint_rows(problem: Problem) -> Iterator[Row]:
    """Activation checkpointing: the very bits of one device, with fewer bytes; and together with ZeRO-3."""
    if 1 in (problem.ranks or (1,)):
        yield from checkpoint_alone(problem)
    for ranks in problem.counts((2, 3)):
        yield hybrid_row(problem, "checkpoint", Layout(dp=ranks, zero=3, micro_batches=2, recompute="block"))


def checkpoint_alone(problem: Problem) -> Iterator[Row]:
    """On one rank nothing is added in another order: recomputation repeats every bit, and keeps fewer bytes."""
    [alone] = problem.world(1).run(train_alone, problem.case)
    for how in ("block", "sqrt"):
        row = hybrid_row(problem, "checkpoint", Layout(recompute=how), problem.case, alone, [])
        kept, without = max(row.peak_bytes or [0]), max(problem.truth.peak_bytes)
        if row.passed and kept >= without:
            row = replace(row, passed=False, detail=f"{kept} bytes of activations, {without} without recomputation")
        yield row


def train_alone(comm: Communicator, case: Case) -> Trace:
    """Train on one device with the library of the ranks, whose bits need not be NumPy's."""
    return single.train(case, xp=comm.xp)


def fp16_rows(problem: Problem) -> Iterator[Row]:
    """Mixed precision: the same bits and the same skipped step in small integers, and the GPT as near as one device."""
    case = problem.integers
    truth = single.train(case)
    for ranks in problem.counts((1, 5)):
        yield hybrid_row(problem, "fp16", Layout(dp=ranks, zero=2), case, truth, [])
    case = problem.halves
    truth = single.train(case)
    allowed = bounds.spread(truth, shaken=False)
    for zero, ranks in enumerate(
        problem.counts(RANKS)
    ):  # every stage once; where ranks are asked for, all with stage 3
        layout = Layout(dp=ranks, zero=zero if problem.ranks is None else 3, micro_batches=2)
        yield hybrid_row(problem, "fp16", layout, case, truth, allowed)


def layout_rows(problem: Problem, technique: str, layouts: Sequence[str]) -> Iterator[Row]:
    """Run the case in those of ``layouts`` that can run it, on the ranks that there are."""
    for layout in map(Layout.parse, layouts):
        reason = problem.why_not(layout)
        if reason is None:
            yield hybrid_row(problem, technique, layout)
        elif problem.ranks is not None:
            problem.skipped.append(f"{technique}: {reason}")


def spread_over(ranks: int) -> str:
    """Return a layout of so many ranks that splits the model as many ways as it can: 12 are ``dp=3,tp=2,pp=2``."""
    pp = 2 if ranks % 2 == 0 else 1
    tp = next(n for n in (2, 3, 5, 1) if ranks // pp % n == 0)
    return f"dp={ranks // pp // tp},tp={tp},pp={pp}"


def hybrid_row(
    problem: Problem,
    technique: str,
    layout: Layout,
    case: Case | None = None,
    truth: Trace | None = None,
    allowed: bounds.Bounds | None = None,
) -> Row:
    """Run a case, that of the problem where none is given, in ``layout`` and hold it to one device.

    What it sends and keeps is held to the formulas.
    """
    if case is None or truth is None or allowed is None:
        case, truth, allowed = problem.case, problem.truth, problem.bounds
    world = problem.world(layout.ranks)
    types = case.precision
    start = time.perf_counter()
    row = Row(
        technique=technique,
        layout=str(layout),
        ranks=layout.ranks,
        pids=world.pids,
        steps=len(truth.steps),
        tensors_compared=0,
        max_error=math.inf,
        bound=0.0,
        bound_kind="exact",
        elements=sum(math.prod(spec.shape) for spec in case.model.build().specs.values()),
        itemsize=np.dtype(types.gradients).itemsize,
    )
    try:
        trace = hybrid.run(case, layout, world=world)
    except (AssertionError, RankError) as error:
        if not isinstance(error, AssertionError) and DRIFTED not in str(error):
            raise  # the run has failed: that is no verdict
        return replace(row, passed=False, detail=str(error).splitlines()[0], seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    verdict = compare(trace, truth, bounds=allowed)
    sent, expected = traffic.on_ledger(trace), traffic.expected(trace)
    detail = str(verdict.first or "")
    for rank, (got, predicted) in enumerate(zip(sent, expected, strict=True)):
        for group in traffic.GROUPS:
            if not detail and got[group] != predicted[group]:
                detail = f"rank {rank} sent {got[group]} bytes in {group}, expected {predicted[group]}"
    return judged(
        replace(
            row,
            tensors_compared=verdict.compared,
            max_error=verdict.max_error,
            bound=verdict.bound,
            bound_kind=verdict.bound_kind,
            bytes_sent=[sum(by_group.values()) - by_group["world"] for by_group in sent],
            bytes_expected=[sum(by_group.values()) - by_group["world"] for by_group in expected],
            bytes_held=trace.bytes_held,
            bytes_held_expected=[traffic.bytes_held(case, layout, rank) for rank in range(layout.ranks)],
            peak_bytes=trace.peak_bytes,
            seconds=seconds,
            detail=detail,
        )
    )


def judged(row: Row) -> Row:
    """Return the row with its verdict: numbers, bytes sent and bytes held are all as they must be."""
    detail = row.detail
    for word, got, expected in (
        ("sent", row.bytes_sent, row.bytes_expected),
        ("held", row.bytes_held, row.bytes_held_expected),
    ):
        if not detail and got != expected and got is not None and expected is not None:
            rank = next(r for r in range(row.ranks) if got[r] != expected[r])
            detail = f"rank {rank} {word} {got[rank]} bytes, expected {expected[rank]}"
    return replace(row, passed=not detail, detail=detail)


TECHNIQUES: Mapping[str, Callable[[Problem], Iterator[Row]]] = {
    "ring": ring_rows,
    "dp": dp_rows,
    **{f"zero{stage}": zero_rows(stage) for stage in (1, 2, 3)},
    "tp": tp_rows,
    "pp": pp_rows,
    "hybrid": hybrid_rows,
    "checkpoint": checkpoint_rows,
    "fp16": fp16_rows,
}


def package_text() -> bytes:
    """Return the source of this package: real text that is always there."""
    root = Path(refpar.__file__).parent
    return b"\n".join(path.read_bytes() for path in sorted(root.rglob("*.py")))


def report(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Return what ``--json`` writes."""
    versions = {"refpar": refpar.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return {
        "schema": 1,
        "passed": all(row.passed for row in rows),
        "versions": versions,
        "seed": seed,
        "results": [vars(row) for row in rows],
    }
