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
from refpar.case import Case, HostArray, Layout, State, Step, Trace, text_batches
from refpar.comm import CollectiveMismatch, RankError
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn.models import GPT
from refpar.optim import AdamW
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
    truth = single.train(case)
    lines = [name, "", *textwrap.wrap(mistake.what, 100), ""]
    lines += textwrap.wrap(f"Made by: {', '.join(mistake.bugs)}.", 100)
    lines.append(
        f"Here: a small GPT on the source of refpar, {len(case.batches)} steps of AdamW, {mistake.layout}; "
        + (f"saved after {half} and resumed." if half else "made on every rank.")
    )
    try:
        with World(mistake.layout.ranks) as world:
            wrong = run(name, case, half, world)
    except RankError as error:
        return [*lines, "", "WHAT YOU WOULD HAVE SEEN", *crash(error)]
    return [*lines, *what_shows(truth, wrong), *what_does_not(truth, wrong, half + EXAMINED)]


def problem(mistake: Mistake, steps: int) -> Case:
    """Return the case on which a mistake is made: real text, ragged tokens, dropout, a tied embedding, decay."""
    model = GPT(vocabulary=128, context=16, width=18, layers=2, heads=3, dropout=0.1)
    batches = text_batches(package_text(), steps=steps, rows=14, context=16)
    scale = LossScale(2.0**18, interval=1, cap=2.0**18)  # the second step overflows
    types = Precision("float16", loss_scale=scale) if mistake.scaled else Precision()
    optimizer = AdamW(lr=0.01, weight_decay=0.1)
    return Case(model, optimizer, batches, types, clip=mistake.clip, frozen=mistake.frozen)


# --------------------------------------------------------------------------------- a run that checks nothing


def run(name: str, case: Case, half: int, world: World) -> Trace:
    """Run a case with the mistake, made from the beginning or when the run is resumed after ``half`` steps."""
    layout = CATALOGUE[name].layout
    if not half:
        return collect(case, layout, world.run(train_quietly, name, case, layout))
    first = hybrid.run(replace(case, batches=case.batches[:half]), layout, world=world)
    second = collect(case, layout, world.run(train_quietly, name, case, layout, State.after(first)))
    return replace(second, steps=[*(replace(s, state={}) for s in first.steps), *second.steps][: len(case.batches)])


def train_quietly(comm: Communicator, name: str, case: Case, layout: Layout, start: State | None = None) -> RankTrace:
    """Run this rank's part with the mistake, and let replicas drift apart."""

    def nothing(recorder: Recorder, right: Any, *args: Any) -> None:
        """Compare no replicas."""

    with applied(name), probing(Recorder(comm.transport), "refpar.parallel.hybrid:check_replicas", nothing):
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
        gradients, parameters = whole([r.gradients for r in ranks]), whole([r.parameters for r in ranks])
        steps.append(
            Step(
                first.count, first.loss, gradients, first.norm, first.outcome, first.scale, first.good, first.t,
                parameters, {},
            )
        )  # fmt: skip
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


def what_does_not(truth: Trace, wrong: Trace, examined: int) -> Iterator[str]:
    """Tell what differs in the first steps."""
    early = replace(truth.case, batches=truth.case.batches[:examined])
    right = Trace(early, truth.layout, [replace(step, state={}) for step in truth.steps[:examined]])
    verdict = compare(Trace(early, wrong.layout, wrong.steps[:examined]), right)
    yield from ["", "WHAT YOU WOULD NOT: WHAT DIFFERS FIRST"]
    if verdict.first is None:
        yield f"  Nothing in the first {examined} steps."
        return
    yield from textwrap.wrap(str(verdict.first), 100, initial_indent="  ", subsequent_indent="  ")
    step = verdict.first.step
    found = [
        measured(name, wrong.steps[step].gradients[name], true) for name, true in truth.steps[step].gradients.items()
    ]
    worst = [m for m in found if m.off > 1e-6]
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
    if square == 0:
        return Measured(name, math.nan, math.nan, float(np.abs(g).max(initial=0)))
    times = float(g @ t) / square
    rest, off = (float(np.linalg.norm(d)) / math.sqrt(square) for d in (g - times * t, g - t))
    return Measured(name, times, rest, off)
