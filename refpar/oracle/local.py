"""Local checks: one operation computed again from the candidate's own inputs.

When a run goes wrong, everything after is wrong too. Which of it is a mere consequence? Compute what the candidate
*should* have got from what it had: norm and update from its own gradients and weights, loss and gradients from its own
weights of the step before. A value that is right for its own inputs is a consequence; one that is not has a mistake of
its own. What is allowed is measured: the operation is repeated with every result shaken by its rounding, and the spread
is taken around what it gives unshaken, see :func:`refpar.oracle.bounds.statistical`. That is rounded like the candidate
and no truth, so the spread holds its error e beside that of the others, s; QUANTILE sqrt(s^2 + e^2) is at least
QUANTILE / sqrt(2) times s + e. What leaves it is more than 11 s off, by chance once in 80 million honest numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from refpar import optim, precision, single
from refpar.case import Case, HostArray, State, digest
from refpar.oracle import bounds, parts
from refpar.oracle.stochastic import Library

Read = Callable[[str], HostArray | None]
"""Returns a value of the candidate by its full name, None where it has none."""

COUNTERS = ("t", "scale", "good", "outcome")
"""What a candidate need not tell: it is taken to be right, as long as nothing is known of it."""


def recomputed(case: Case, number: int, read: Read, right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return, by name, what step ``number`` should have got from the candidate's own inputs, and what is allowed.

    Gradients and loss follow from the weights of the step before; norm, state and weights from the candidate's own
    gradients of this step. What cannot be computed, because the candidate does not say enough, is left out.

    Parameters
    ----------
    right : the expected values, for the ``COUNTERS`` that the candidate does not tell
    """

    def known(name: str) -> HostArray | None:
        said = read(name)
        return right.get(name) if said is None and name.rpartition("/")[2] in COUNTERS else said

    result: dict[str, tuple[Any, Any]] = {}
    begin = begin_of(case, number, known)
    if begin is None:
        return result
    gradients = {name: known(f"step{number}/gradient/{name}") for name in parts.trained(case)}
    if number and not any(g is None for g in gradients.values()):
        result |= allowed(lambda library: dict(forward(case, number, begin, library)), case)
    if all(g is not None and np.isfinite(g).all() for g in gradients.values()):
        result |= allowed(lambda library: dict(update(case, number, begin, gradients, library, known)), case)
    return result


def begin_of(case: Case, number: int, read: Read) -> State | None:
    """Return the candidate's own state before step ``number``, None where it does not say it."""
    if number == 0:
        return State.initial(case)
    before = f"step{number - 1}"
    start = State.initial(case)
    parameters = {name: read(f"{before}/parameter/{name}") for name in start.parameters}
    state = {n: {b: read(f"{before}/state/{n}/{b}") for b in own} for n, own in start.state.items()}
    if any(x is None or not np.isfinite(x).all() for own in (parameters, *state.values()) for x in own.values()):
        return None
    t, scale, good = (read(f"{before}/{name}") for name in ("t", "scale", "good"))
    if t is None or scale is None or good is None:
        return None
    types = case.precision
    cast = {name: np.asarray(x, types.compute) for name, x in parameters.items()}
    kept = {n: {b: np.asarray(x, types.master) for b, x in own.items()} for n, own in state.items()}
    return replace(
        start,
        step=number,
        data=digest(case.batches[:number]),
        t=int(t),
        scale=float(scale),
        good=int(good),
        parameters=cast,
        state=kept,
    )


def forward(case: Case, number: int, begin: State, library: Any) -> Iterator[tuple[str, Any]]:
    """Yield loss, gradients and norm of one step from ``begin``."""
    step = single.train(replace(case, batches=case.batches[: number + 1]), xp=library, start=begin).steps[0]
    yield "loss", step.loss
    yield from ((f"gradient/{name}", g) for name, g in step.gradients.items())


def update(
    case: Case, number: int, begin: State, gradients: Mapping[str, Any], library: Any, read: Read
) -> Iterator[tuple[str, Any]]:
    """Yield norm, state and weights that follow from ``gradients``."""
    types, specs = case.precision, case.model.build().specs
    own = {name: library.asarray(np.asarray(g, types.master)) for name, g in gradients.items()}
    norm = math.sqrt(sum(optim.squared_norm(g) for g in own.values()))
    yield "norm", norm
    reported, outcome = read(f"step{number}/norm"), read(f"step{number}/outcome")
    if outcome is not None and int(outcome) != 0:
        return
    optimizer = (library.constants(case) if isinstance(library, Library) else case).optimizer
    factor = optim.clip_factor(norm if reported is None else float(reported), case.clip)
    for name, g in own.items():
        p = library.asarray(begin.master(name).copy())
        state = {buffer: library.asarray(x.copy()) for buffer, x in begin.buffers(name).items()}
        optim.update(optimizer, p, g * factor, state, begin.t + 1, optim.decays(specs[name]))
        yield from ((f"state/{name}/{buffer}", np.array(x)) for buffer, x in state.items())
        if types.master != types.compute:
            yield f"state/{name}/master", np.array(p)
        yield f"parameter/{name}", np.array(precision.to_compute(p, types))


def allowed(compute: Callable[[Any], dict[str, Any]], case: Case) -> dict[str, tuple[Any, Any]]:
    """Return what ``compute`` gives, and what it may be off by: its spread when shaken."""
    with np.errstate(all="ignore"):
        true = compute(np)
        spread = bounds.Spread([true])
        for run in range(bounds.SHAKEN_RUNS):
            spread.add([compute(Library(run))])
        return {
            name: (true[name], room) for name, room in spread.bounds(bounds.unit_of(case.precision.compute))[0].items()
        }
