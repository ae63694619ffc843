"""What the pictures show, measured: each function runs something and returns numbers, and draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from refpar import single
from refpar.case import Case, HostArray, Layout, Trace, text_batches
from refpar.comm import RankError, ring
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn.layer import At, live_bytes
from refpar.nn.models import GPT
from refpar.optim import AdamW
from refpar.oracle import bounds, mistakes
from refpar.oracle.compare import compare
from refpar.oracle.verify import package_text
from refpar.parallel import hybrid
from refpar.precision import LossScale, Precision
from refpar.teach.recorder import RecordedWorld, Recorder, Run, record
from refpar.teach.watch import message

TECHNIQUES: Mapping[str, Layout] = {
    "data parallel": Layout(dp=3, micro_batches=2),
    "ZeRO-1": Layout(dp=3, zero=1),
    "ZeRO-2": Layout(dp=3, zero=2, micro_batches=2),
    "ZeRO-3": Layout(dp=3, zero=3),
    "tensor parallel": Layout(tp=2),
    "pipeline, GPipe": Layout(pp=2, micro_batches=4, schedule="gpipe"),
    "pipeline, 1F1B": Layout(pp=2, micro_batches=4),
    "checkpointing": Layout(recompute="block"),
    "all together": Layout(dp=2, tp=2, pp=2, zero=1, micro_batches=2, recompute="block"),
}


def case(steps: int = 12, precision: Precision | None = None) -> Case:
    """Return a small GPT on the source of refpar: ragged tokens, dropout, a tied embedding, clipping, AdamW."""
    model = GPT(vocabulary=256, context=16, width=18, layers=2, heads=3, dropout=0.1)
    batches = text_batches(text(), steps=steps, rows=12, context=16)
    return Case(model, AdamW(lr=0.01, weight_decay=0.1), batches, precision=precision or Precision(), clip=0.05)


@cache
def text() -> bytes:
    """Return what is trained on: the same from beginning to end, whoever edits the source meanwhile."""
    return package_text()


@contextmanager
def standing() -> Iterator[Callable[[int], World]]:
    """Give out worlds that stand until the end: ``world(3)`` is the one of three ranks."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(World(ranks)))


# ----------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int


def memory(ranks: int = 4) -> tuple[int, dict[str, Memory]]:
    """Run one step of mixed-precision Adam at each stage of ZeRO; return the number of parameters and the bytes."""
    model = GPT(vocabulary=256, context=16, width=32, layers=4, heads=4)
    batches = text_batches(text(), steps=1, rows=2 * ranks, context=16)
    problem = Case(model, AdamW(lr=1e-3), batches, precision=Precision("float16", loss_scale=LossScale(2.0**10)))
    psi = sum(int(np.prod(spec.shape)) for spec in model.build().specs.values())
    found = {}
    with World(ranks) as world:
        for stage, name in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
            by_rank = world.run(held, problem, Layout(dp=ranks, zero=stage))
            found[name] = Memory(*map(max, zip(*by_rank, strict=True)))
    return psi, found


def held(comm: Communicator, problem: Case, layout: Layout) -> tuple[int, int, int, int]:
    """Run this rank's part, and return the bytes of weights, gradients, optimizer state and activations."""
    made: dict[str, Any] = {}

    def keep(name: str) -> Any:
        def probe(recorder: Recorder, right: Any, *args: Any) -> Any:
            made[name] = right(*args)
            return made[name]

        return probe

    probes = {f"refpar.parallel.hybrid:make_{name}": keep(name) for name in ("store", "state")}
    trace, _ = record(comm, hybrid.train, (problem, layout), probes)
    store = made["store"]
    return (
        live_bytes(store.weights),
        live_bytes(store.gradients),
        live_bytes(store.masters, made["state"]),
        trace.peak_bytes,
    )


# ------------------------------------------------------------------------------------------------- ring


def ring_states(ranks: int = 4) -> list[list[list[str]]]:
    """Run an all-reduce and return after each step, for each rank and chunk, whose numbers have been added.

    Rank r has 10^r in each chunk, so the digits of a sum say whose numbers are in it: ``"ac"`` for ranks 0 and 2.
    """
    with World(ranks) as world:
        waits = [[e for e in events if e.kind == "wait"] for events in world.run(ring_events)]
    states = [[["abcdefgh"[rank]] * ranks for rank in range(ranks)]]
    for step in range(2 * (ranks - 1)):
        after = [list(chunks) for chunks in states[-1]]
        for rank in range(ranks):
            half, s = divmod(step, ranks - 1)
            chunk = (rank - s - 2 + half) % ranks
            # What a rank has after a step is what it sends in the next; after the last, what has arrived.
            last = step == 2 * (ranks - 1) - 1
            event = waits[rank][step if last else step + 1]
            value = int(message(event.name, event.data[1 if last else 0])[0])
            after[rank][chunk] = "".join(
                c for c, digit in zip("abcdefgh", reversed(str(value)), strict=False) if digit == "1"
            )
        states.append(after)
    return states


def ring_events(comm: Communicator) -> Any:
    """All-reduce 10^rank, and return what happened."""
    return record(comm, ring.all_reduce, (np.full(comm.size, 10**comm.rank),), {}, copies=True)[1]


# ------------------------------------------------------------------------------------------------- runs


def real_run(layout: Layout) -> Run:
    """Record three steps of a GPT big enough that computing shows beside talking."""
    model = GPT(vocabulary=256, context=64, width=96, layers=4, heads=4)
    batches = text_batches(text(), steps=3, rows=16, context=64)
    problem = Case(model, AdamW(lr=1e-3), batches, precision=Precision("float32"))
    with RecordedWorld(layout.ranks) as world:
        hybrid.run(problem, layout, world=world)
    return world.runs[0]


# ------------------------------------------------------------------------------------------------- fp16


@dataclass(frozen=True)
class Vanishing:
    """What half precision does to gradients.

    Attributes
    ----------
    logits : magnitudes of the true gradient of the logits, the zeros of masked tokens left out
    scale : the loss scale
    lost : share of the weights' gradient entries that are zero in float16 and not in float64, without and with it
    """

    logits: HostArray
    scale: float
    lost: tuple[float, float]


def vanishing(scale: float = 2.0**13) -> Vanishing:
    """Train a little in float64, and take the next step in float16, without and with a loss scale."""
    model = GPT(vocabulary=256, context=32, width=32, layers=2, heads=4)
    batches = text_batches(text(), steps=16, rows=16, context=32)
    true = Case(model, AdamW(lr=0.02), batches)
    trace = single.train(true)
    start = trace.steps[-2].parameters
    step = replace(true, batches=batches[-1:])
    right = single.train(step, start=start).steps[0].gradients
    lost = []
    for rule in (None, LossScale(scale, dynamic=False)):
        halves = replace(step, precision=Precision("float16", loss_scale=rule))
        got = single.train(halves, start=start).steps[0].gradients
        died = sum(int(((got[name] == 0) & (g != 0)).sum()) for name, g in right.items())
        lost.append(died / sum(int((g != 0).sum()) for g in right.values()))
    built, batch = model.build(), batches[-1]
    y, _ = built.network.forward(start, batch.inputs, At(0, 0, tuple(range(len(batch)))))
    _, saved = built.loss.forward(y, batch.targets, batch.mask)
    logits = np.abs(built.loss.backward(saved, 1 / int(batch.mask.sum())))
    return Vanishing(logits[logits > 0], scale, (lost[0], lost[1]))


# ------------------------------------------------------------------------------- losses, errors, mistakes


@cache
def truth() -> Trace:
    """Return the case on one device."""
    return single.train(case())


def traces() -> Iterator[tuple[str, Trace]]:
    """Yield every technique's name, and the case trained with it."""
    halves = case(precision=Precision("float16", loss_scale=LossScale(2.0**10)))
    with standing() as world:
        for name, layout in TECHNIQUES.items():
            yield name, hybrid.run(case(), layout, world=world(layout.ranks))
        yield "fp16", hybrid.run(halves, Layout(dp=2), world=world(2))


def errors() -> dict[str, float]:
    """Return for each technique the largest error over its bound, in the first two steps."""
    right, allowed = early()
    problem = right.case
    verdicts = {}
    with standing() as world:
        for name, layout in TECHNIQUES.items():
            verdict = compare(hybrid.run(problem, layout, world=world(layout.ranks)), right, bounds=allowed)
            verdicts[name] = verdict.max_error / verdict.bound if verdict.bound else 0.0
    return verdicts


def mistaken() -> dict[str, float]:
    """Return for each mistake that ends in a wrong number how far off the first one is, over its bound."""
    right, allowed = early()
    problem = right.case
    found = {}
    with standing() as world:
        for name, mistake in mistakes.CATALOGUE.items():
            if mistake.seen in ("replicas", "agreement", "mismatch") or mistake.clip != problem.clip:
                continue
            try:
                trace = mistakes.run(name, problem, mistake.layout, world=world(mistake.layout.ranks))
            except (RankError, AssertionError):
                continue  # noticed inside the run: there is no number to draw
            first = compare(trace, right, bounds=allowed).first
            if first is not None and np.isfinite(first.error) and first.bound > 0:
                found[name] = first.error / first.bound
    return found


@cache
def early() -> tuple[Trace, bounds.Bounds]:
    """Return the first two steps on one device, and what others may differ by."""
    right = single.train(case(steps=2))
    return right, bounds.spread(right)
