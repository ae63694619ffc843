"""How often is a wrong run explained, and as what it is?

    python benchmarks/explain.py [--seconds 300] [--seed 0]

Random small cases in random layouts. For each, every mistake of the catalogue that can be made there is made by ranks
that compute in float32; that run is the candidate, held to the truth and to the replays of all mistakes in float64, by
the bounds of float32. A mistake that changes nothing in a case (clipping, where nothing is clipped) is silent there,
and not counted. What counts:

    caught       some value leaves its bound
    itself       the mistake that was made is among those that match
    and others   of these, with others that are documented to be the same there
    unnamed      none matches
    other        a mistake that was not made matches, and is not documented to be the same
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from refpar import rng
from refpar.case import Case, Layout
from refpar.comm import RankError
from refpar.comm.processes import World
from refpar.conformance import problems
from refpar.nn.models import GPT, MLP
from refpar.oracle import bounds, explain
from refpar.oracle.mistakes import CATALOGUE
from refpar.precision import Precision

LAYOUTS = ("dp=3,micro_batches=2", "dp=2,zero=2,micro_batches=3", "dp=2,tp=2", "pp=2,micro_batches=3,dp=2", "tp=3",
           "dp=3,zero=1,recompute=block", "pp=3,micro_batches=2", "dp=2,zero=3,recompute=2")  # fmt: skip


def draw(seed: int) -> tuple[Case, Layout]:
    """Return a case in float32 and a layout."""

    def pick(name: str, options: Any) -> Any:
        return options[int(rng.integers((seed, name), (), 0, len(options)))]

    layout = Layout.parse(pick("layout", LAYOUTS))
    words, hidden = pick("vocabulary", (7, 11)), pick("mlp", (5, 8))
    gpt = GPT(vocabulary=words, context=3, width=6, layers=3, heads=3, mlp_width=hidden,
              dropout=pick("dropout", (0.0, 0.25)), tied=pick("tied", (True, False)))  # fmt: skip
    model = pick("model", (gpt, gpt, MLP((5, 7, 4, 6, 3)))) if layout.recompute == "none" else gpt
    rows = pick("rows", (7, 8, 11))
    batches = tuple(problems.batch(model, rows, 0.6, seed, step, at_least_one=True) for step in range(2))
    optimizer = problems.OPTIMIZERS[pick("optimizer", ("sgd", "momentum", "adamw"))]
    clip = pick("clip", (None, 0.05, 1e6))
    return Case(model, optimizer, batches, Precision("float32"), clip=clip, seed=seed), layout


def main() -> int:
    """Print the table; return 1 where a mistake is explained as another one, or too few as themselves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    until, seed = time.perf_counter() + options.seconds, options.seed
    total, wrong, cases = Counter[str](), [], 0
    shown = set()
    while time.perf_counter() < until:
        case, layout = draw(seed)
        counts, notes, names = one(case, layout)
        total.update(counts)
        wrong += [f"{note} (seed {seed}, {layout})" for note in notes]
        shown |= names
        seed, cases = seed + 1, cases + 1
    runs = total["runs"]
    lines = [
        f"{cases} cases in {len(LAYOUTS)} layouts, {runs} wrong float32 runs of {len(shown)} mistakes, "
        f"{total['silent']} silent, {total['refused']} that refpar's own ranks refuse",
        f"caught        {total['caught']:6} {total['caught'] / max(runs, 1):8.2%}",
        f"itself        {total['itself']:6} {total['itself'] / max(runs, 1):8.2%}",
        f"  and others  {total['others']:6} {total['others'] / max(runs, 1):8.2%}",
        f"unnamed       {total['unnamed']:6} {total['unnamed'] / max(runs, 1):8.2%}",
        f"other         {total['other']:6} {total['other'] / max(runs, 1):8.2%}",
        f"next best, in bounds: at least {total_distance(DISTANCES):.1e}, median {np.median(DISTANCES or [0]):.1e}",
        *wrong,
    ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return int(total["other"] > 0 or total["itself"] < 0.95 * runs or total["caught"] < runs)


DISTANCES: list[float] = []


def total_distance(distances: list[float]) -> float:
    """Return the smallest distance, 0 where there is none."""
    return min(distances, default=0.0)


def one(case: Case, layout: Layout) -> tuple[Counter[str], list[str], set[str]]:
    """Make every mistake once, and explain it; return counts, what went wrong, and the mistakes that showed."""
    counts, notes, names = Counter[str](), [], set()
    wide, start = explain.widened(case)
    narrow = {name: x.astype(np.float32) for name, x in start.items()}
    expected = {k: explain.outcome(x) for k, x in explain.events(bounds.truth(case)).items()}
    allowed = bounds.allowed(case, layout).steps
    bound = {f"step{n}/{k}": x for n, step in enumerate(allowed) for k, x in step.items()}
    unit = bounds.unit_of("float32")
    replays, candidates = {}, {}
    with World(layout.ranks, timeout=explain.TIMEOUT) as world:
        for name in CATALOGUE:
            if not explain.possible(CATALOGUE[name], case, layout):
                continue
            try:
                replays[name] = explain.replay(name, wide, layout, start, world)
                made = explain.replay(name, replace(case), layout, narrow, world)
            except (RankError, AssertionError, ValueError):
                replays.pop(name, None)
                counts["refused"] += 1
                continue
            candidates[name] = {k: x[0] for k, x in made.items() if k in expected}
    right = {key: [x] for key, x in expected.items()}
    for name, got in candidates.items():
        held = {other: explain.held(other, got, values, expected, bound, unit) for other, values in replays.items()}
        if held[name].silent:
            counts["silent"] += 1
            continue
        names.add(name)
        counts["runs"] += 1
        counts["caught"] += off(explain.held(name, got, right, expected, bound, unit))
        matches = {other for other, replay in held.items() if replay.matches}
        strange = [o for o in matches - {name} if not any({o, name} <= group for group in explain.SAME)]
        counts["itself"] += name in matches
        counts["others"] += name in matches and len(matches) > 1 and not strange
        counts["unnamed"] += not matches
        counts["other"] += bool(strange)
        notes += [f"{name} matches {other} too" for other in strange]
        if name not in matches:
            notes.append(f"{name} is not named: off by {held[name].distance:.3g} bounds")
        others = [r.distance for o, r in held.items() if o not in matches and not r.silent]
        if matches and others and np.isfinite(min(others)):
            DISTANCES.append(min(others))
    return counts, notes, names


def off(replay: explain.Replay) -> bool:
    """Return whether a run differs from the truth."""
    return replay.matched + replay.reported < replay.compared or replay.reported > 0


if __name__ == "__main__":
    sys.exit(main())
