"""The ladder from simple to complicated; the simplest rung that fits is recommended.

::

    data parallel  ->  ZeRO 1, 2, 3  ->  recomputation  ->  tensor parallel, inside a server
                   ->  pipeline, across servers

Published advice agrees but for one point (Megatron puts tensor parallelism before ZeRO-3): tensor parallelism only
inside a server, pipelines across servers, the smallest tp x pp that fits and then replicas (Narayanan et al. 2021,
takeaways 1 and 2), at least 4K micro-batches for K stages (GPipe), ZeRO-1 and not 2 or 3 with a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from refpar.plan.models import Bare, Model
from refpar.plan.plans import Plan, with_micro_batch
from refpar.plan.recipes import Recipe
from refpar.plan.setups import Setup
from refpar.plan.speed import Hardware


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
