"""``refpar mistakes``: the catalogue, and a mistake beside the truth.

A mistake that is made in earnest rarely announces itself. What its maker sees is a log: a loss, step by step, that
goes down. What they do not see are the gradients. Both are shown here, from the same problem trained on one device, and
in the layout the mistake needs, with the mistake made on every rank and refpar's own checks inside the run turned off.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refpar import single
from refpar.case import Batch, Case, HostArray, Layout, State, Step, Trace, text_batches
from refpar.comm import CollectiveMismatch, RankError
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, AdamW
from refpar.oracle.compare import compare
from refpar.oracle.mistakes import CATALOGUE, Mistake, applied
from refpar.oracle.verify import package_text
from refpar.parallel import hybrid
from refpar.parallel.assembly import RankTrace
from refpar.precision import LossScale, Precision
from refpar.teach.recorder import Recorder, probing
from refpar.teach.toy import table

STEPS = 12
EXAMINED = 2
"""Steps that are held to bounds, which takes many runs; a mistake that shows later than in the second is rare."""


def listing() -> list[str]:
    """Return the catalogue as text, part by part."""
    lines = [f"{len(CATALOGUE)} mistakes that people have shipped. refpar mistakes NAME makes one, beside the truth."]
    section = None
    for mistake in CATALOGUE.values():
        if mistake.section != section:
            section = mistake.section
            lines += ["", section.upper()]
        lines.append(f"  {mistake.name}")
        lines += textwrap.wrap(mistake.what, 100, initial_indent="      ", subsequent_indent="      ")
    return lines


def beside_the_truth(name: str, steps: int = STEPS) -> list[str]:
    """Make the mistake ``name`` and return what its maker would have seen, and what they would not."""
    mistake = CATALOGUE[name]
    half = 2 if mistake.resumed else 0  # steps before it is resumed
    case = problem(mistake, 2 * half or steps)
    with np.errstate(over="ignore"):
        truth = single.train(case)
    lines = [name, "", *textwrap.wrap(mistake.what, 100), ""]
    lines += textwrap.wrap(f"Made by: {', '.join(mistake.bugs)}.", 100)
    what = "a small GPT on the source of refpar"
    if mistake.scaled:
        what = "a layer of small integers in fp16, whose first step overflows"
    where = f"saved after {half} and resumed" if half else "the mistake on every rank"
    lines.append(f"Here: {what}, {len(case.batches)} steps, {mistake.layout}; {where}.")
    try:
        with World(mistake.layout.ranks) as world:
            wrong = run(name, case, half, world)
    except RankError as error:
        return [*lines, "", "WHAT YOU WOULD HAVE SEEN", *crash(error)]
    examined = len(case.batches) if mistake.scaled else half + EXAMINED
    return [*lines, *what_shows(truth, wrong), *what_does_not(truth, wrong, examined, exact=mistake.scaled)]


def problem(mistake: Mistake, steps: int) -> Case:
    """Return the case on which a mistake is made: real text, ragged tokens, dropout, a tied embedding, decay."""
    if mistake.scaled:
        return overflowing(mistake.clip)
    model = GPT(vocabulary=256, context=16, width=18, layers=2, heads=3, dropout=0.1)
    batches = text_batches(package_text(), steps=steps, rows=14, context=16)
    return Case(model, AdamW(lr=0.01, weight_decay=0.1), batches, clip=mistake.clip, frozen=mistake.frozen)


def overflowing(clip: float) -> Case:
    """Return a case in float16 whose first step overflows, in one row, one entry of one gradient.

    The row has 2000 of one feature, where all else is 1; its error is 1 like that of the others. Everything is a small
    integer, so that nothing is rounded whatever the layout, and what differs is wrong.
    """
    model = MLP((3, 2), init="integers")
    counted = np.ones(8, bool)
    inputs = np.ones((8, 3))
    plain = Batch(inputs, np.ones((8, 2)), counted)
    wild = inputs.copy()
    wild[0, 1] = 2000
    weight, bias = State.initial(Case(model, SGD(lr=0.0), ())).parameters.values()
    types = Precision("float16", loss_scale=LossScale(64.0, interval=1, cap=64.0))
    batches = Batch(wild, wild @ weight + bias - 1, counted), plain, plain, plain
    optimizer = SGD(lr=0.25, momentum=0.5, weight_decay=0.25)
    return Case(model, optimizer, batches, types, clip=clip, divide="after")


# --------------------------------------------------------------------------------- a run that checks nothing


def run(name: str, case: Case, half: int, world: World) -> Trace:
    """Run a case with the mistake, made from the beginning or when the run is resumed after ``half`` steps."""
    layout = CATALOGUE[name].layout
    if not half:
        return collect(case, layout, world.run(train_quietly, name, case, layout))
    first = hybrid.run(replace(case, batches=case.batches[:half]), layout, world=world)
    second = collect(case, layout, world.run(train_quietly, name, case, layout, State.after(first)))
    return replace(second, steps=[*first.steps, *second.steps][: len(case.batches)])


def train_quietly(comm: Communicator, name: str, case: Case, layout: Layout, start: State | None = None) -> RankTrace:
    """Run this rank's part with the mistake, and let replicas drift apart."""

    def nothing(recorder: Recorder, right: Any, *args: Any) -> None:
        """Compare no replicas."""

    quiet = probing(Recorder(comm.transport), "refpar.parallel.hybrid:check_replicas", nothing)
    with applied(name), quiet, np.errstate(over="ignore", invalid="ignore"):
        return hybrid.train(comm, case, layout, start)


def collect(case: Case, layout: Layout, parts: list[Any]) -> Trace:
    """Return what the first rank reports, with arrays put together from all, however badly the pieces fit."""
    model = case.model.build()
    shapes = {name: spec.shape for name, spec in model.specs.items()}

    def whole(pieces: list[dict[str, Any]]) -> dict[str, HostArray]:
        made = {name: np.full(math.prod(shape), np.nan) for name, shape in shapes.items()}
        for by_name in pieces:
            for name, (positions, values) in by_name.items():
                made[name][positions] = values
        return {name: made[name].reshape(shapes[name]) for name in made}

    steps = []
    for ranks in zip(*(part.steps for part in parts), strict=True):
        first = ranks[0]
        state: dict[str, dict[str, HostArray]] = {name: {} for name in shapes}
        for buffer in next((buffers for r in ranks for buffers in r.state.values()), {}):
            made = whole([{name: own[buffer] for name, own in r.state.items()} for r in ranks])
            for name in {name for r in ranks for name in r.state}:
                state[name][buffer] = made[name]
        step = Step(
            first.count, first.loss, whole([r.gradients for r in ranks]), first.norm, first.outcome, first.scale,
            first.good, first.t, whole([r.parameters for r in ranks]), state,
        )  # fmt: skip
        steps.append(step)
    return Trace(case, layout, steps)


def crash(error: RankError) -> Iterator[str]:
    """Tell of a run that came to an end."""
    if isinstance(error, CollectiveMismatch):
        yield "  The run stops: ranks are not in the same collective. Without a check of what a message belongs to,"
        yield "  it would hang, or add up what does not belong together:"
    else:
        yield "  The run stops:"
    yield from textwrap.wrap(str(error).splitlines()[0], 100, initial_indent="  ", subsequent_indent="  ")


# ------------------------------------------------------------------------------------------ side by side


def what_shows(truth: Trace, wrong: Trace) -> Iterator[str]:
    """Tell the loss curves."""
    pairs = [(right.loss, other.loss) for right, other in zip(truth.steps, wrong.steps, strict=True)]
    rows = [["step", "one device", "with the mistake", "difference"]]
    for number, (right, other) in enumerate(pairs):
        rows.append(
            [str(number), f"{right:.4f}", f"{other:.4f}", f"{other - right:+.1e}" if other != right else "none"]
        )
    yield from ["", "WHAT YOU WOULD HAVE SEEN: THE LOSS", *table(rows)]


def what_does_not(truth: Trace, wrong: Trace, examined: int, exact: bool) -> Iterator[str]:
    """Tell what differs in the first steps."""
    early = replace(truth.case, batches=truth.case.batches[:examined])
    right = Trace(early, truth.layout, truth.steps[:examined])
    verdict = compare(Trace(early, wrong.layout, wrong.steps[:examined]), right, bounds=[] if exact else None)
    yield from ["", "WHAT YOU WOULD NOT: WHAT DIFFERS FIRST"]
    if verdict.first is None:
        yield f"  Nothing in the first {examined} steps."
        return
    yield from textwrap.wrap(str(verdict.first), 100, initial_indent="  ", subsequent_indent="  ")
    step = verdict.first.step
    found = [
        measured(name, wrong.steps[step].gradients[name], true) for name, true in truth.steps[step].gradients.items()
    ]
    worst = [m for m in found if not m.off <= 1e-6]
    if not worst:
        yield f"  All gradients of step {step} are right."
        return
    yield f"  {len(worst)} of {len(found)} gradients of step {step} are wrong, such as"
    rows = [["", "times the true one", "and beside it"]]
    rows += [[m.name, f"{m.times:.4f}", f"{m.beside:.1%}"] for m in sorted(worst, key=lambda m: -m.off)[:6]]
    yield from table(rows, indent=4)
    yield "    (best multiple of the true gradient, and what is left beside it, in norm)"


@dataclass(frozen=True)
class Measured:
    """How a gradient lies to the true one: ``times`` it, and ``beside`` it, and how far ``off`` in all."""

    name: str
    times: float
    beside: float
    off: float


def measured(name: str, got: HostArray, true: HostArray) -> Measured:
    """Split a gradient into a multiple of the true one and the rest."""
    g, t = got.reshape(-1), true.reshape(-1)
    square = float(t @ t)
    if not (square > 0 and np.isfinite(g).all() and math.isfinite(square)):
        same = np.array_equal(g, t, equal_nan=True)
        return Measured(name, math.nan, math.nan, 0.0 if same else math.inf)
    times = float(g @ t) / square
    rest, off = (float(np.linalg.norm(d)) / math.sqrt(square) for d in (g - times * t, g - t))
    return Measured(name, times, rest, off)
