"""The stories of what saves memory on one device: checkpointing, and half precision with loss scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refpar import single
from refpar.case import Batch, Case, Layout
from refpar.nn.models import MLP
from refpar.optim import SGD
from refpar.precision import LossScale, Precision
from refpar.teach.show import Story, run, section, verdict
from refpar.teach.toy import numbers, table
from refpar.teach.watch import Watched


def tell_checkpoint() -> Story:
    """Tell activation checkpointing."""
    case = deep_case()
    yield "Activation checkpointing on 1 rank: keep the inputs of segments, and compute what is inside them again."
    yield "Read beside this: refpar/nn/checkpoint.py"
    yield from section("the problem")
    yield "Eight layers, 2 features wide, with ReLU between them, on 8 rows. For its backward pass each keeps its"
    yield "input, 8 times 2 numbers of 4 bytes, and which of its 16 outputs were positive, a byte each: 80 bytes."
    runs = {"everything is kept": run(case, Layout()), "segments of 2 layers": run(case, Layout(recompute="2"))}
    for title, seen in runs.items():
        yield from section(title)
        yield from table([["what runs", "bytes alive after it", ""], *(list(row) for row in alive(seen))])
        forwards = len(seen.notes(0, "layer"))
        yield f"  at most {seen.trace.peak_bytes[0]} bytes alive; {forwards} layers run forward"
    plain, again = (seen.trace.steps[0].gradients for seen in runs.values())
    same = [name for name in plain if np.array_equal(plain[name], again[name])]
    yield from section("what it costs and what it changes")
    more = [len(seen.notes(0, "layer")) for seen in runs.values()]
    yield f"{more[1] - more[0]} layers ran forward twice. Of {len(plain)} gradients {len(same)} have the same bits."
    yield "First and last layer are left alone: the last runs backward at once, recomputing it would save nothing."
    return (yield from verdict(runs["segments of 2 layers"].trace))


def deep_case() -> Case:
    """Return eight layers on eight rows."""
    rows = np.array([[r % 3 - 1, (r * r) % 5 - 2] for r in range(8)], np.float64)
    batch = Batch(rows, rows[:, :1] + 1, np.ones(8, bool))
    return Case(MLP((2, 2, 2, 2, 2, 2, 2, 2, 1)), SGD(lr=0.25), (batch,), precision=Precision("float32"), seed=3)


def alive(seen: Watched) -> Iterator[tuple[str, str, str]]:
    """Yield what ran, and the bytes alive after it."""
    ran: list[str] = []
    forward = True
    before = 0
    for event in seen.ranks[0]:
        if event.kind != "note":
            continue
        if event.name == "pass":
            forward = event.data[0] == "F"
        elif event.name == "layer":
            ran.append(event.data.rpartition(".")[2])
        elif event.name == "alive" and event.data != before:
            what = f"forward {' '.join(ran)}" if forward else "backward"
            if not forward and ran:
                what = f"forward again {' '.join(ran)}"
            yield what, str(event.data), "#" * (event.data // 16)
            before, ran = event.data, []


def tell_fp16() -> Story:
    """Tell half precision and loss scaling."""
    case = fp16_case(LossScale(initial=2.0**15))
    plain = run(fp16_case(None), Layout(dp=2, zero=1))
    seen = run(case, Layout(dp=2, zero=1))
    yield "fp16 with loss scaling on 2 ranks: weights and gradients in half precision, masters in single."
    yield "Read beside this: refpar/precision.py"
    yield from section("the problem")
    yield "y = x w + b with w = 1 1, b = 0, held to the squared error of two rows; the largest half is 65504,"
    yield "the smallest above zero 2^-24. Optimizer state is sharded: rank 0 owns w[0] and b, rank 1 owns w[1]."
    w0, w1 = 2.0**-12 * 2.0**-13, 0.5 * 4
    yield from table(
        [
            ["row", "x", "y", "target", "y - target", "gradient of w, 2 (y - target) x / 2 rows"],
            ["0", "2^-13 0", "2^-13", "-2^-13", "2^-12", f"w[0]: {power(w0)}"],
            ["1", "0 4", "4", "3.5", "0.5", f"w[1]: {power(w1)}"],
        ]
    )
    yield from section("without scaling")
    g = stored(plain, 0, 0)
    yield f"w[0] should get {power(w0)}, and rank 0 stores {power(g)}: half of the smallest half is rounded to zero."
    master = plain.trace.steps[0].state["layers.0.weight"]["master"][0, 0]
    yield f"So w[0] would never move. Its master after the step: {float(master)!r}."
    yield from section("with scaling")
    rows = [
        [
            "step",
            "scale",
            "rank 0 stores for w[0]",
            "rank 1 stores for w[1]",
            "overflow seen by",
            "ranks hear",
            "step is",
        ]
    ]
    scale = 2.0**15
    for number, step in enumerate(seen.trace.steps):
        first, second = stored(seen, 0, number), stored(seen, 1, number)
        saw = [f"rank {rank}" for rank in range(2) if any(flag for _, flag in flags(seen, rank, number))]
        heard = ["yes" if seen.notes(rank, "agreed")[number][2] else "no" for rank in range(2)]
        cells = [power(scale), power(first), power(second), " ".join(saw) or "nobody", f"{heard[0]}, {heard[1]}"]
        rows.append([str(number), *cells, "skipped" if step.outcome == "overflow" else step.outcome])
        scale = step.scale
    yield from table(rows)
    yield "The first step overflows on the owner of w[1] alone; both skip it, weights and moments stay as they were,"
    yield "and the scale is halved. The second is good: divided by the scale in float32, w[0] gets what it should."
    last = seen.trace.steps[-1]
    master, half = last.state["layers.0.weight"]["master"][0, 0], last.parameters["layers.0.weight"][0, 0]
    yield from section("what the master remembers")
    yield f"Learning rate {numbers(case.optimizer.lr)}: w[0] = 1 - {numbers(case.optimizer.lr)} * 2^-25 = 1 - 2^-23."
    yield f"  master, float32   {float(master)!r} = 1 - {power(1 - float(master))}"
    yield f"  weight, float16   {float(half)!r}: the next half below 1 is 1 - 2^-11; the step is lost there"
    with np.errstate(over="ignore"):
        truth = single.train(case)
    return (yield from verdict(seen.trace, truth))


def fp16_case(rule: LossScale | None) -> Case:
    """Return a problem of which one gradient vanishes in half precision and another overflows when it is scaled."""
    batch = Batch(np.array([[2.0**-13, 0], [0, 4]]), np.array([[-(2.0**-13)], [3.5]]), np.ones(2, bool))
    precision = Precision("float16", loss_scale=rule)
    return Case(MLP((2, 1), init="integers"), SGD(lr=4.0), (batch, batch), precision=precision, seed=FP16_SEED)


FP16_SEED = 41
"""It draws w = 1 1 and b = 0."""


def stored(seen: Watched, rank: int, step: int) -> float:
    """Return what a rank has stored as its element of w, scaled, before it is divided."""
    gathered = [note for note in seen.notes(rank, "reduce_scatter") if note[0] == "dp"]
    return float(gathered[step][2][0])


def flags(seen: Watched, rank: int, step: int) -> Sequence[Any]:
    """Return the gradients that a rank has looked at in a step, and whether they had overflowed."""
    by_step: list[list[Any]] = [[]]
    for event in seen.ranks[rank]:
        if event.kind == "note" and event.name == "overflowed":
            by_step[-1].append(event.data)
        elif event.kind == "note" and event.name == "agreed":
            by_step.append([])
    return by_step[step]


def power(value: float) -> str:
    """Return a power of two as one, anything else as it is."""
    mantissa, exponent = np.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= value <= 4 else f"{value:g}"
