"""Why a plan does not fit, and the smallest changes that make it fit.

A plan that does not fit is short by a number of bytes, on a rank, at a moment. :func:`repairs` tries single changes
of it, each in its smallest effective form (the lowest ZeRO stage, the largest micro-batch, the fewest slices), and
orders those that suffice by the time they cost. Changes that alter the numbers, the problem or the hardware come
after those that do not. Where no single change is enough, pairs are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from refpar.plan.models import Bare, Transformer
from refpar.plan.plans import Plan, with_grid, with_micro_batch
from refpar.plan.recipes import RECIPES
from refpar.plan.setups import check
from refpar.plan.units import gb

NOTHING, NUMBERS, PROBLEM, DEVICES = "", "changes the numbers", "changes the problem", "changes the hardware"
ORDER = (NOTHING, NUMBERS, PROBLEM, DEVICES)


@dataclass(frozen=True)
class Change:
    """A change of a plan, and what comes of it.

    Attributes
    ----------
    what : in words
    plan : the changed plan
    saved : bytes it saves on the most loaded rank
    slower : time of a step after it, over the time before; None where times are not known
    alters : beyond time and place: nothing, the numbers, the problem, or the hardware
    """

    what: str
    plan: Plan
    saved: int
    slower: float | None
    alters: str

    @property
    def fits(self) -> bool:
        """Whether it is enough."""
        return self.plan.fits


Option = tuple[str, Callable[[Plan], Plan], str]
"""What is changed, how, and what that alters."""


def of_setup(**changes: object) -> Callable[[Plan], Plan]:
    """Return a change of fields of the setup."""
    return lambda plan: replace(plan, setup=replace(plan.setup, **changes))  # type: ignore[arg-type]


def options(plan: Plan) -> Iterator[list[Option]]:
    """Yield single changes, as groups of the same change in growing degree."""
    setup, model = plan.setup, plan.model
    if setup.sharing > 1:
        yield [(f"ZeRO {zero}", of_setup(zero=zero), NOTHING) for zero in range(setup.zero + 1, 4)]
    if setup.prefetch:
        yield [("no prefetch", of_setup(prefetch=0), NOTHING)]
    if setup.schedule == "gpipe" and setup.pp > 1:
        yield [("schedule 1f1b", of_setup(schedule="1f1b"), NOTHING)]
    if setup.chunks > 1:
        yield [("no interleaving", of_setup(chunks=1), NOTHING)]
    if not isinstance(model, Bare):
        yield from options_of_activations(plan)
    yield [grid_option(plan, "tp", factor) for factor in factors(plan, "tp")]
    if not isinstance(model, Bare):
        yield [grid_option(plan, "pp", factor) for factor in factors(plan, "pp")]
    yield [
        (f"recipe {name}", lambda p, r=recipe: replace(p, recipe=r), NUMBERS)  # type: ignore[misc]
        for name, recipe in sorted(RECIPES.items(), key=lambda item: -sum(item[1].bytes_per_parameter))
        if sum(recipe.bytes_per_parameter) < sum(plan.recipe.bytes_per_parameter)
        and recipe.weights == "bfloat16" and "m" in plan.recipe.optimizer
    ]  # fmt: skip
    if isinstance(model, Transformer) and (tokens := setup.tokens or model.context) > 256:
        halves = [tokens >> k for k in range(1, 5) if tokens >> k >= 128]
        yield [(f"sequences of {n} tokens", of_setup(tokens=n), PROBLEM) for n in halves]
    if setup.zero:
        yield [devices_option(plan, factor) for factor in (2, 4, 8, 16, 32, 64)]
    yield [(f"devices of {gb(need_of(plan), 0)} GB", larger_device, DEVICES)]


def options_of_activations(plan: Plan) -> Iterator[list[Option]]:
    """Yield changes that only activations notice."""
    setup = plan.setup
    rows = plan.micro_batch
    halves = [rows >> k for k in range(1, rows.bit_length()) if rows >> k]
    yield [(f"micro-batch {n}", lambda p, n=n: replace(p, setup=with_micro_batch(p.setup, n)), NOTHING)  # type: ignore[misc]
           for n in halves]  # fmt: skip
    if setup.accounting != "refpar" and not setup.flash:
        yield [("flash attention", of_setup(flash=True), NOTHING)]
        if setup.recompute == "none":
            yield [("selective recomputation", of_setup(recompute="selective"), NOTHING)]
    if setup.recompute in ("none", "selective"):
        yield [("full recomputation", of_setup(recompute="block"), NOTHING)]
    if setup.tp > 1 and not setup.sequence_parallel and setup.accounting != "refpar":
        yield [("sequence parallel", of_setup(sequence_parallel=True), NOTHING)]


def factors(plan: Plan, axis: str) -> list[int]:
    """Return by how much tp or pp can grow at the cost of replicas."""
    setup, model = plan.setup, plan.model
    now = getattr(setup, axis)
    if axis == "tp":
        most = min(plan.hardware.per_server, getattr(model, "heads", plan.hardware.per_server))
        fine = [n for n in range(2 * now, most + 1, now) if getattr(model, "heads", n) % n == 0]
    else:
        fine = list(range(2 * now, getattr(model, "layers", 1) + 1, now))
    return [n // now for n in fine if setup.dp % (n // now) == 0]


def grid_option(plan: Plan, axis: str, factor: int) -> Option:
    """Return the change that takes replicas for tp or pp."""
    setup = plan.setup

    def change(p: Plan) -> Plan:
        grid = {"dp": p.setup.dp // factor, "tp": p.setup.tp, "pp": p.setup.pp}
        grid[axis] *= factor
        if grid["dp"] == 0:
            raise ValueError("no replicas left to take")
        return replace(p, setup=with_grid(p.setup, **grid))

    return f"{axis} {getattr(setup, axis) * factor}, dp {setup.dp // factor}", change, NOTHING


def devices_option(plan: Plan, factor: int) -> Option:
    """Return the change to more replicas, over which ZeRO shards; the batch stays."""
    setup = plan.setup

    def change(p: Plan) -> Plan:
        return replace(p, setup=with_grid(p.setup, p.setup.dp * factor, p.setup.tp, p.setup.pp))

    return f"{setup.ranks * factor} devices", change, DEVICES


def need_of(plan: Plan) -> int:
    """Return the bytes a device must have, in whole GB."""
    return -(-(plan.memory.peak + plan.hardware.reserve) // 10**9) * 10**9


def larger_device(plan: Plan) -> Plan:
    """Return the plan on devices that are just large enough."""
    return replace(plan, hardware=replace(plan.hardware, memory=max(need_of(plan), plan.hardware.memory)))


def apply(plan: Plan, chosen: Sequence[Option]) -> Change | None:
    """Return what comes of some changes together; None where that cannot be run."""
    changed = plan
    try:
        for _, change, _ in chosen:
            changed = change(changed)
        check(changed.model, changed.setup)
    except ValueError:
        return None
    words = " and ".join(what for what, _, _ in chosen)
    alters = max((alters for *_, alters in chosen), key=ORDER.index)
    return Change(words, changed, plan.memory.peak - changed.memory.peak, None, alters)


def timed(plan: Plan, change: Change) -> Change:
    """Return the change with the time it costs."""
    if plan.step is None or change.plan.step is None or change.alters == PROBLEM:
        return change
    per_device = change.plan.setup.ranks / plan.setup.ranks  # twice the devices for half the time is no gain
    return replace(change, slower=change.plan.step.total * per_device / plan.step.total)


def repairs(plan: Plan) -> list[Change]:
    """Return the smallest changes that make a plan fit: single ones, or else pairs; cheapest first.

    A change that takes more devices is charged for all of them.
    """
    groups = [group for group in options(plan) if group]
    singles = [found for group in groups if (found := smallest(plan, [(option,) for option in group]))]
    for allowed in (NOTHING,), (NOTHING, NUMBERS):
        if not any(change.alters in allowed for change in singles):
            keep = [group for group in groups if group[0][2] in allowed]
            pairs = (list(itertools.product(a, b)) for a, b in itertools.combinations(keep, 2))
            singles += [found for both in pairs if (found := smallest(plan, both))]
    return sorted(
        (timed(plan, change) for change in singles),
        key=lambda c: (ORDER.index(c.alters), c.slower or 0.0, c.plan.setup.tp * c.plan.setup.pp, -c.saved),
    )


def smallest(plan: Plan, degrees: Iterable[Sequence[Option]]) -> Change | None:
    """Return the first degree that is enough."""
    for chosen in degrees:
        change = apply(plan, chosen)
        if change is not None and change.fits:
            return change
    return None


# Room to spare


MOST = {"micro_batch": 2**16, "sequence": 2**24, "layers": 2**10}
"""Where :func:`room` stops looking."""


def room(plan: Plan) -> dict[str, int]:
    """Return the largest micro-batch, sequence and number of layers with which a plan still fits, each by itself."""
    setup, model, found = plan.setup, plan.model, {}
    if not isinstance(model, Bare):
        each = setup.dp * setup.micro_batches  # micro-batches of a step: as many as there are now
        found["micro_batch"] = largest(
            plan.micro_batch,
            MOST["micro_batch"],
            lambda n: replace(plan, setup=with_micro_batch(replace(setup, batch=n * each), n)),
        )
    if isinstance(model, Transformer):
        found["sequence"] = largest(
            setup.tokens or model.context, MOST["sequence"], lambda n: replace(plan, setup=replace(setup, tokens=n))
        )
        found["layers"] = largest(
            model.layers,
            MOST["layers"],
            lambda n: replace(plan, model=replace(model, layers=n), setup=replace(setup, stages=())),
        )
    return found


def largest(start: int, most: int, plan_of: Callable[[int], Plan]) -> int:
    """Return the largest number from ``start`` to ``most`` whose plan fits, to 1 in 64."""
    low = start
    while low < most and plan_of(min(2 * low, most)).fits:
        low = min(2 * low, most)
    high = 2 * low
    while low < most and high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if plan_of(middle).fits else (low, middle)
    return low
