"""Who flags correct runs, and who sees mistakes: refpar's bounds by tier, beside common habits.

    python benchmarks/bounds.py [--part kills] [--runs 10000] [--seed 0] > benchmarks/results/bounds.txt

Correct runs are the single device with its rows in random order and random micro-batches, its matrix products and sums
cut into a random number of parts that are added in random order (as other kernels, or tensor parallelism, would), and
refpar's own ranks in random layouts: in float32 and in float64, over every named case that runs in both.

Wrong runs are every mistake of the catalogue, in the smallest layout in which it shows, with refpar's own checks
inside the run (replicas bit-equal, ranks agree) switched off, as in somebody else's program: on an exact network of
integers, an MLP on real numbers and a GPT. A mistake that changes no number of a case cannot show there. "stopped" is a
run that ends with an error of its own.

The habits: ``torch.testing.assert_close`` with its default tolerances on all gradients and weights; a relative norm
of the difference below 8 %, of all gradients together, in every step; the loss within 5 %, in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from refpar import RankError, single, split
from refpar.arrays import accumulator, widen
from refpar.case import Case, Layout, Trace
from refpar.comm.processes import World
from refpar.nn import layers
from refpar.nn import loss as losses
from refpar.optim import AdamW
from refpar.oracle import bounds, mistakes
from refpar.oracle.cases import CASES, gpt, integers, mlp, overflow
from refpar.oracle.compare import compare
from refpar.oracle.mistakes import CATALOGUE, Mistake
from refpar.parallel import assembly, hybrid
from refpar.precision import LossScale, Precision

TOLERANCES = {"float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7)}  # rtol, atol of torch.testing.assert_close
LAYOUTS = ("dp=2", "dp=3,micro_batches=2", "tp=2", "pp=2,micro_batches=3", "dp=2,zero=2", "dp=3,zero=3", "dp=2,tp=2")

# ------------------------------------------------------------------------------------------------- correct runs


@contextlib.contextmanager
def other_kernels(random: np.random.Generator) -> Iterator[None]:
    """Cut every product and every sum into random parts, added in random order."""

    def matmul(a: Any, b: Any, *, dtype: Any = None) -> Any:
        inner = a.shape[-1]
        parts = [r for r in split.ranges(split.sizes(inner, int(random.integers(1, 4)))) if len(r)] or [range(inner)]
        random.shuffle(parts)
        products = [widen(a[..., r.start : r.stop]) @ widen(b[..., r.start : r.stop, :]) for r in parts]
        return sum(products[1:], products[0]).astype(dtype or a.dtype, copy=False)

    def total(x: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
        if axis is None or isinstance(axis, tuple) or x.shape[axis] < 2:
            return x.sum(axis=axis, dtype=accumulator(x.dtype), keepdims=keepdims)
        order = random.permutation(x.shape[axis])
        return np.take(x, order, axis).sum(axis=axis, dtype=accumulator(x.dtype), keepdims=keepdims)

    with contextlib.ExitStack() as stack:
        for module in (layers, losses):
            for function in (matmul, total):
                if hasattr(module, function.__name__):
                    stack.enter_context(mock.patch.object(module, function.__name__, function))
        yield


def one_device(case: Case, random: np.random.Generator) -> Trace:
    """Return a correct run of one device in another order, by other kernels."""

    def split_rows(step: int, rows: int) -> Any:
        parts = np.array_split(random.permutation(rows), int(random.integers(1, 6)))
        return [part.tolist() for part in parts]

    with other_kernels(random):
        return single.train(case, split=split_rows)


# ------------------------------------------------------------------------------------------------------- judges

Judge = Callable[[Trace, Trace], bool]
"""Says whether a trace, beside the truth, passes."""


def assert_close(trace: Trace, truth: Trace) -> bool:
    """``torch.testing.assert_close`` on gradients and weights."""
    rtol, atol = TOLERANCES[trace.case.precision.compute]
    for got, true in zip(trace.steps, truth.steps, strict=False):
        for a, b in ((got.gradients, true.gradients), (got.parameters, true.parameters)):
            for name, x in b.items():
                if name not in a or not np.allclose(a[name], x, rtol=rtol, atol=atol):
                    return False
    return True


def relative_norm(trace: Trace, truth: Trace) -> bool:
    """All gradients together within 8 % of their norm."""
    for got, true in zip(trace.steps, truth.steps, strict=False):
        if set(got.gradients) != set(true.gradients):
            return False
        apart = sum(float(np.sum((got.gradients[n] - x) ** 2)) for n, x in true.gradients.items())
        if not apart <= 0.08**2 * true.norm**2:
            return False
    return True


def loss_close(trace: Trace, truth: Trace) -> bool:
    """The loss within 5 %."""
    return all(abs(g.loss - t.loss) <= 0.05 * abs(t.loss) for g, t in zip(trace.steps, truth.steps, strict=False))


HABITS: dict[str, Judge] = {"assert_close": assert_close, "norm 8 %": relative_norm, "loss 5 %": loss_close}


class Subject:
    """A case with its truth and bounds."""

    def __init__(self, case: Case) -> None:
        self.case, self.truth = case, bounds.truth(case)
        allowed = bounds.allowed(case, Layout())
        self.tier, self.bounds = allowed.tier, allowed.steps

    def passes(self, trace: Trace) -> bool:
        """Judge a trace by the bounds."""
        return compare(trace, self.truth, bounds=self.bounds, kind=self.tier).ok


# --------------------------------------------------------------------------------------------------- wrong runs


def nothing(*arguments: Any) -> None:
    """Check nothing."""


def unchecked(comm: Any, name: str, case: Case, layout: Layout, start: Any = None) -> Any:
    """Run this rank's part of a case with a mistake (none where the name is empty), and without refpar's own checks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(assembly, "check_replicas", nothing))
        stack.enter_context(mock.patch.object(hybrid, "check_replicas", nothing))
        stack.enter_context(np.errstate(all="ignore"))
        if name:
            stack.enter_context(mistakes.applied(name))
        return hybrid.train(comm, case, layout, start)


def wrong_run(name: str, case: Case, layout: Layout, world: World) -> Trace | None:
    """Return the trace of a mistake, None where the run ends with an error."""
    try:
        with mock.patch.object(mistakes, "train", unchecked), mock.patch.object(assembly, "check_agreement", nothing):
            if name:
                return mistakes.run(name, case, layout, world=world)
            return assembly.collect(case, layout, world.run(unchecked, name, case, layout))
    except (RankError, AssertionError, ValueError, FloatingPointError):
        return None


def same(a: Trace, b: Trace) -> bool:
    """Return whether two traces are equal to the last bit."""
    return compare(a, b, bounds=[]).ok


SCALE = LossScale(initial=2.0**10, interval=2, cap=2.0**11)


def subjects() -> dict[str, Callable[[Mistake], Case]]:
    """Return, by column, the case that a mistake is made on: with a loss scale, clipping and frozen parameters."""
    exact = integers((5, 15, 9, 7), 7, 3, 0.25, 8, "float64", steps=3)
    exact = replace(exact, precision=Precision("float64", loss_scale=SCALE))
    real = replace(mlp("float32"), precision=Precision("float32", loss_scale=SCALE))

    def whole(dtype: str) -> Callable[[Mistake], Case]:
        optimizer = AdamW(lr=2.0**-6, betas=(0.875, 0.984375), eps=2.0**-12, weight_decay=0.25)
        made = gpt(dtype, optimizer, seed=12, dropout=0.125, layers=3, heads=3, steps=3)
        made = replace(made, precision=Precision(dtype, loss_scale=SCALE))
        return lambda mistake: replace(made, clip=mistake.clip, frozen=mistake.frozen)

    return {
        "exact16": lambda mistake: overflow("float16"),
        "exact": lambda mistake: exact,
        "running": lambda mistake: replace(real, clip=mistake.clip),
        "stat.32": whole("float32"),
        "stat.64": whole("float64"),
    }


def kills(worlds: Callable[[int], World], show: Callable[[str], None]) -> None:
    """Make every mistake on every subject and print who sees it; the habits judge the GPT in float32."""
    made: dict[Any, Subject] = {}
    columns = subjects()
    seen, possible = Counter[str](), Counter[str]()

    def subject_of(column: str, mistake: Mistake) -> Subject:
        key = (column, mistake.clip, mistake.frozen)
        if key not in made:
            made[key] = Subject(columns[column](mistake))
        return made[key]

    def note(column: str, trace: Trace | None, passes: Callable[[Trace], bool]) -> str:
        verdict = "stopped" if trace is None else "missed" if passes(trace) else "seen"
        possible[column] += 1
        seen[column] += verdict != "missed"
        return verdict

    def share(column: str) -> str:
        return f"{seen[column]}/{possible[column]}"

    heads = " ".join([*(f"{c:>8}" for c in columns), "|", *(f"{h:>12}" for h in HABITS)])
    show(f"{'mistake':42} {heads}")
    for name, mistake in CATALOGUE.items():
        world, cells = worlds(mistake.layout.ranks), dict.fromkeys([*columns, *HABITS], "-")
        for column in columns:
            subject = subject_of(column, mistake)
            right = wrong_run("", subject.case, mistake.layout, world)
            if right is None:  # more stages than units, or another layout that the case cannot have
                continue
            trace = wrong_run(name, subject.case, mistake.layout, world)
            if trace is not None and same(trace, right):
                continue
            cells[column] = note(column, trace, subject.passes)
            if column == "stat.32":
                for habit, judge in HABITS.items():
                    cells[habit] = note(habit, trace, lambda t, j=judge, s=subject: j(t, s.truth))
        show(
            f"{name:42} " + " ".join([*(f"{cells[c]:>8}" for c in columns), "|", *(f"{cells[h]:>12}" for h in HABITS)])
        )
    totals = [*(f"{share(c):>8}" for c in columns), "|", *(f"{share(h):>12}" for h in HABITS)]
    show(f"{'seen, of those that show':42} " + " ".join(totals))


def false_alarms(
    runs: int, seed: int, dtypes: list[str], worlds: Callable[[int], World], show: Callable[[str], None]
) -> None:
    """Judge ``runs`` correct runs in each type and print how many are flagged."""
    names = [name for name, named in CASES.items() if named.dtype != "float16"]
    heads = " ".join(f"{h:>12}" for h in HABITS)
    show(f"{'correct runs':14} {'tier':12} {'runs':>6} {'values':>9} {'flagged':>8} | {heads}")
    for dtype in dtypes:
        random = np.random.default_rng([seed, len(dtype), dtype == "float64"])
        total: Counter[tuple[str, str]] = Counter()
        for i, name in enumerate(names):
            subject = Subject(CASES[name].make(dtype))
            for run in range(split.sizes(runs, len(names))[i]):
                if run % 20 == 0:
                    layout = Layout.parse(LAYOUTS[int(random.integers(len(LAYOUTS)))])
                    trace = wrong_run("", subject.case, layout, worlds(layout.ranks))
                    trace = one_device(subject.case, random) if trace is None else trace  # odd widths refuse tp=2
                else:
                    trace = one_device(subject.case, random)
                total[subject.tier, "runs"] += 1
                total[subject.tier, "values"] += sum(1 for step in trace.steps for _ in step.items())
                total[subject.tier, "flagged"] += not subject.passes(trace)
                for habit, judge in HABITS.items():
                    total[subject.tier, habit] += not judge(trace, subject.truth)
        for tier in ("exact", "running", "statistical"):
            cells = " ".join(f"{total[tier, habit]:>12}" for habit in HABITS)
            n = total[tier, "runs"]
            show(f"{dtype:14} {tier:12} {n:>6} {total[tier, 'values']:>9} {total[tier, 'flagged']:>8} | {cells}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=10_000, help="correct runs in each type")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    arguments.add_argument("--part", choices=("kills", "alarms", "both"), default="both")
    options = arguments.parse_args()

    def show(line: str) -> None:
        print(line, flush=True)

    with contextlib.ExitStack() as stack:
        standing: dict[int, World] = {}

        def worlds(ranks: int) -> World:
            if ranks not in standing:
                standing[ranks] = stack.enter_context(World(ranks))
            return standing[ranks]

        start = time.perf_counter()
        if options.part in ("kills", "both"):
            kills(worlds, show)
        if options.part in ("alarms", "both"):
            false_alarms(options.runs, options.seed, options.dtypes, worlds, show)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
