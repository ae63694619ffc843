"""What fits, why something does not, the smallest change that makes it fit, and what to choose.

The ladder goes from simple to complicated, and the simplest rung that fits is recommended::

    data parallel  ->  ZeRO 1, 2, 3  ->  recomputation  ->  tensor parallel, inside a server
                   ->  pipeline, across servers

Published advice agrees but for one point (Megatron puts tensor parallelism before ZeRO-3): tensor parallelism only
inside a server, pipelines across servers, the smallest tp x pp that fits and then replicas (Narayanan et al. 2021,
takeaways 1 and 2), at least 4K micro-batches for K stages (GPipe), ZeRO-1 and not 2 or 3 with a pipeline.

A setup that does not fit is short by a number of bytes, on a rank, at a moment. :func:`repairs` tries single changes
of it, each in its smallest effective form (the lowest ZeRO stage, the largest micro-batch, the fewest slices), and
orders those that suffice by the time they cost. Changes that alter the numbers, the problem or the hardware come
after those that do not. Where no single change is enough, pairs are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from refpar.plan import memory, speed, traffic
from refpar.plan.memory import RankMemory
from refpar.plan.models import Bare, Model, Transformer
from refpar.plan.recipes import RECIPES, Recipe
from refpar.plan.setups import Setup, check, tokens_of
from refpar.plan.speed import Hardware, Step
from refpar.plan.units import gb, human

NOTHING, NUMBERS, PROBLEM, DEVICES = "", "changes the numbers", "changes the problem", "changes the hardware"
MOMENT_WORDS = {
    "forward": "at the end of the forward passes",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
}
ORDER = (NOTHING, NUMBERS, PROBLEM, DEVICES)


@dataclass(frozen=True)
class Plan:
    """A setup with what it needs; figures are computed when they are asked for.

    Attributes
    ----------
    causal : whether only half of the attention matrix counts as work of the model
    """

    model: Model
    setup: Setup
    recipe: Recipe
    hardware: Hardware
    causal: bool = False

    @cached_property
    def memory(self) -> RankMemory:
        """The most loaded rank."""
        return memory.most_loaded(self.model, self.setup, self.recipe)

    @cached_property
    def step(self) -> Step | None:
        """The estimate of a step; None where the tokens of a row are not known."""
        if isinstance(self.model, Bare) and not self.setup.tokens:
            return None
        return speed.step(self.model, self.setup, self.recipe, self.hardware, causal=self.causal)

    @cached_property
    def sent(self) -> dict[str, int]:
        """Bytes that the most loaded rank sends in a step, by group."""
        return traffic.by_group(traffic.of_rank(self.model, self.setup, self.recipe, self.memory.rank))

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.memory.peak <= self.hardware.usable

    @property
    def short(self) -> int:
        """Bytes by which the most loaded rank does not fit; what is left over is negative."""
        return self.memory.peak - self.hardware.usable

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return self.setup.largest_micro_batch

    def where(self) -> str:
        """Return the rank and the moment of the peak, in words."""
        moment = MOMENT_WORDS[self.memory.moment]
        if self.setup.pp > 1:
            return f"on rank {self.memory.rank} (stage {self.memory.place.p}), {moment}"
        return f"on every rank, {moment}" if self.setup.ranks > 1 else moment

    def why(self) -> str:
        """Return one sentence on what fills the memory."""
        largest = sorted(self.memory.parts().items(), key=lambda item: -item[1])
        parts = ", ".join(f"{part} {gb(n)}" for part, n in largest if n > 0.005 * self.memory.peak)
        verdict = f"short by {gb(self.short)} GB" if not self.fits else f"{gb(-self.short)} GB to spare"
        return f"{verdict} {self.where()}: {parts} GB"


def with_micro_batch(setup: Setup, rows: int) -> Setup:
    """Return the setup with micro-batches of so many rows, and the same batch."""
    return replace(setup, micro_batches=max(1, math.ceil(setup.batch / (setup.dp * rows))))


def with_grid(setup: Setup, dp: int, tp: int, pp: int) -> Setup:
    """Return the setup on another grid, with micro-batches as large as before."""
    rows = setup.largest_micro_batch
    M = max(1, math.ceil(setup.batch / (dp * rows)))
    chunks = setup.chunks if M % pp == 0 and pp > 1 else 1
    return replace(setup, dp=dp, tp=tp, pp=pp, micro_batches=M, chunks=chunks, stages=(),
                   zero=0 if dp * setup.cp == 1 else setup.zero)  # fmt: skip


# One change


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


# The ladder


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder: the plan of the least recomputation that fits, or the one that comes nearest."""

    name: str
    plan: Plan


def ladder(
    model: Model, recipe: Recipe, hardware: Hardware, devices: int, base: Setup, micro_batch: int, causal: bool = False
) -> list[Rung]:
    """Return the rungs for so many devices, from simple to complicated.

    Parameters
    ----------
    base : everything but the grid, ZeRO and recomputation
    micro_batch : rows of a micro-batch
    """

    def plan(tp: int, pp: int, zero: int, recompute: str) -> Plan:
        dp = devices // (tp * pp)
        setup = replace(base, dp=dp, tp=tp, pp=pp, zero=zero if dp > 1 else 0, recompute=recompute,
                        sequence_parallel=tp > 1, chunks=1)  # fmt: skip
        return Plan(model, with_micro_batch(setup, micro_batch), recipe, hardware, causal)

    more = [] if isinstance(model, Bare) else ["block"] if base.flash else ["selective", "block"]
    rungs = [Rung("data parallel" if devices > 1 else "one device", plan(1, 1, 0, "none"))]
    if devices > 1:
        rungs += [Rung(f"ZeRO {zero}", plan(1, 1, zero, "none")) for zero in (1, 2, 3)]
    if more:
        name = "ZeRO 3, recomputation" if devices > 1 else "recomputation"
        rungs.append(Rung(name, first_fit(plan(1, 1, 3, recompute) for recompute in more)))
    slices = [n for n in divisors(devices) if 1 < n <= hardware.per_server and splits(model, n)]
    for tp in slices:
        rungs.append(Rung("tensor parallel", first_fit(plan(tp, 1, 1, recompute) for recompute in ("none", *more))))
    tp = slices[-1] if slices else 1
    depths = [n for n in divisors(devices // tp) if 1 < n <= getattr(model, "layers", 1)]
    for pp in depths:
        rungs.append(Rung("pipeline", first_fit(plan(tp, pp, 1, recompute) for recompute in ("none", *more))))
        if rungs[-1].plan.fits:
            break
    return rungs


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    return [k for k in range(1, min(n, 4096) + 1) if n % k == 0]


def splits(model: Model, tp: int) -> bool:
    """Return whether the heads of a model can be shared out evenly."""
    return getattr(model, "heads", tp) % tp == 0


def first_fit(plans: Iterable[Plan]) -> Plan:
    """Return the first plan that fits, or the one that needs least."""
    tried = []
    for plan in plans:
        if plan.fits:
            return plan
        tried.append(plan)
    return min(tried, key=lambda plan: plan.memory.peak)


def recommend(rungs: Sequence[Rung]) -> tuple[Rung | None, Rung | None]:
    """Return the simplest rung that fits, and the fastest one where it is at least a tenth faster."""
    fitting = [rung for rung in rungs if rung.plan.fits]
    if not fitting:
        return None, None
    simplest = fitting[0]
    timed = [rung for rung in fitting if rung.plan.step is not None]
    fastest = min(timed, key=lambda rung: rung.plan.step.total if rung.plan.step else 0.0, default=simplest)
    if simplest.plan.step and fastest.plan.step and fastest.plan.step.total < 0.9 * simplest.plan.step.total:
        return simplest, fastest
    return simplest, None


# Warnings

SPARSE = {624e12: "A100", 1979e12: "H100", 3958e12: "H100 in fp8", 4500e12: "B200", 9000e12: "B200 in fp8"}


def warnings(plan: Plan) -> Iterator[str]:
    """Yield what is commonly got wrong, where this plan does."""
    setup, hardware, recipe = plan.setup, plan.hardware, plan.recipe
    mine = plan.memory.parts()
    if not plan.fits and mine["weights"] < hardware.usable / 2:
        yield (
            f"the weights are {gb(mine['weights'])} GB and would fit; what training holds beside them is "
            f"{(plan.memory.peak - mine['weights']) / max(1, mine['weights']):.1f} times that"
        )
    if not plan.fits and setup.zero == 0 and setup.dp > 1:
        yield "data parallel does not save memory: every replica holds everything, however many there are"
    if setup.zero and setup.sharing == 1:
        yield f"ZeRO {setup.zero} shards over replicas, and there is one: it saves nothing (DeepSpeed#237)"
    if setup.tp > hardware.per_server:
        yield (
            f"tp {setup.tp} reaches across servers of {hardware.per_server}: its sums wait for the slow network, "
            "in every layer"
        )
    if setup.zero >= 2 and setup.pp > 1:
        yield f"ZeRO {setup.zero} with a pipeline reduces gradients in every micro-batch; ZeRO 1 does so once"
    if setup.pp > 1 and setup.micro_batches < 4 * setup.pp:
        ideal, real = speed.bubble(setup.pp, setup.micro_batches, setup.chunks)
        yield (
            f"{setup.micro_batches} micro-batches for {setup.pp} stages: a bubble of {float(ideal):.0%} of the ideal "
            f"step, {float(real):.0%} of the real one; at least {4 * setup.pp} are advised"
        )
    if recipe.scaled:
        yield "float16 gradients below 2^-24 vanish: keep a dynamic loss scale, or take bfloat16"
    for peak, name in SPARSE.items():
        if abs(hardware.peak / peak - 1) < 0.01:
            yield f"{hardware.peak / 1e12:,.0f} TFLOPS is the {name}'s figure for 2:4 sparsity: dense is half of it"
    yield from uneven(plan)


def uneven(plan: Plan) -> Iterator[str]:
    """Yield what does not divide."""
    setup, model = plan.setup, plan.model
    if setup.batch % (setup.dp * setup.micro_batches):
        parts = f"dp x micro-batches, {setup.dp} x {setup.micro_batches}"
        yield f"a batch of {setup.batch} rows is not a multiple of {parts}: some micro-batches are smaller"
    if not isinstance(model, Transformer):
        return
    if model.heads % setup.tp:
        yield f"tp {setup.tp} does not divide {model.heads} heads: some ranks have more work than others"
    if model.kv_heads < model.heads and model.kv_heads % setup.tp:
        yield f"tp {setup.tp} does not divide {model.kv_heads} key and value heads: ranks hold copies of them"
    if setup.pp > 1 and not setup.stages and model.layers % setup.pp:
        more = model.layers % setup.pp
        yield f"{setup.pp} stages do not divide {model.layers} blocks: the first {more} have one more"
    if setup.tp > 1 and model.vocabulary % (128 * setup.tp):
        padded = model.padded(setup.tp).vocabulary
        yield f"a vocabulary of {model.vocabulary:,} runs faster padded, to {padded:,} for tp {setup.tp}"


def describe(plan: Plan) -> str:
    """Return a plan in one line."""
    setup = plan.setup
    rows = f"micro-batches of {plan.micro_batch} x {tokens_of(plan.model, setup)} tokens"
    return f"{setup}, {setup.micro_batches} {rows}; {human(plan.memory.peak)} a device"
