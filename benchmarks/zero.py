"""The stages of ZeRO beside plain data parallel, on 4 ranks: time of a step, and bytes.

    python benchmarks/zero.py [--launches 3] [--blocks 6] [--steps 3]

The model has 0.94 million parameters: 4 layers, width 128, 4 heads, vocabulary 512, sequence 128,
untied; a batch of 16, AdamW, float32. In each block the four take turns, so that a ratio compares
neighbours in time; a launch starts every process anew. A step is what ``refpar train`` runs: from
the count of tokens to published weights; its time is the median over the steps of a block on the
slowest rank. The comparison of replicas after each step, which stage 3 has none of, is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

RANKS = 4
STAGES = range(4)
NAMES = "data parallel", "stage 1", "stage 2", "stage 3"
TARGETS = {1: 1.2, 2: 1.2, 3: 1.6}
RESULTS = Path(__file__).parent / "results" / "zero.txt"


def launch(blocks: int, steps: int) -> dict[str, Any]:
    """Return, for each stage, the time of a step in each block, and bytes by kind, of the rank that has most."""
    import numpy as np

    import refpar
    from refpar.case import Case, Layout, text_batches
    from refpar.comm import World
    from refpar.nn.models import GPT
    from refpar.optim import AdamW
    from refpar.oracle.verify import package_text
    from refpar.precision import Precision

    model = GPT(vocabulary=512, context=128, width=128, layers=4, heads=4, tied=False)
    batches = text_batches(package_text(), steps=steps + 1, rows=16, context=128)
    case = Case(model, AdamW(lr=1e-3), batches, Precision("float32"), clip=1.0)
    times: list[list[float]] = [[] for _ in STAGES]
    sizes: dict[str, list[int]] = {}
    with World(RANKS) as world:
        for _ in range(blocks + 1):
            for stage in STAGES:
                ranks = world.run(timed, case, Layout(dp=RANKS, zero=stage))
                times[stage].append(median(max(step) for step in zip(*(taken for taken, _ in ranks), strict=True)))
                sizes[NAMES[stage]] = [max(column) for column in zip(*(sizes for _, sizes in ranks), strict=True)]
    return {
        "times": [taken[1:] for taken in times],  # the first block warms up
        "bytes": sizes,
        "versions": {"refpar": refpar.__version__, "python": platform.python_version(), "numpy": np.__version__},
    }


def timed(comm: Any, case: Any, layout: Any) -> tuple[list[float], list[int]]:
    """Train on a rank; return the time of each step but the first, and the bytes of each kind."""
    from refpar.parallel import hybrid

    marks: list[float] = []

    def mark(comm: Any, step: Any) -> bool:
        marks.append(time.perf_counter())
        return False

    trace = hybrid.train(comm, case, layout, on_step=mark, light=True, strict=False)
    taken = [after - before for before, after in itertools.pairwise(marks)]
    return taken, [trace.bytes_held, trace.peak_gradients, trace.peak_gathered, trace.peak_bytes]


def report(launches: list[dict[str, Any]]) -> str:
    """Return the tables: time by launch, bytes, and the verdict."""
    lines = [
        f"A step of the GPT with 0.94 million parameters on {RANKS} ranks, AdamW, float32: milliseconds (medians),",
        "and the time of each stage over that of data parallel (median over blocks of the ratio within the block).",
        "",
        "launch   " + "   ".join(f"{name:>20}" for name in NAMES),
    ]
    ratios: dict[int, list[float]] = {stage: [] for stage in TARGETS}
    for number, result in enumerate(launches, 1):
        plain, *others = result["times"]
        cells = [f"{1e3 * median(plain):20.0f}"]
        for stage, taken in enumerate(others, 1):
            ratios[stage].append(median(a / b for a, b in zip(taken, plain, strict=True)))
            cells.append(f"{1e3 * median(taken):9.0f} ratio {ratios[stage][-1]:4.2f}")
        lines.append(f"{number:6d}   " + "   ".join(cells))
    lines += [
        "",
        "kB a rank          held between steps   gradients, peak   gathered weights, peak   activations, peak",
    ]
    for name, (held, gradients, gathered, activations) in launches[0]["bytes"].items():
        cells = f"{held / 1e3:18,.0f}   {gradients / 1e3:15,.0f}   {gathered / 1e3:22,.0f}   {activations / 1e3:17,.0f}"
        lines.append(f"{name:<16}   {cells}")
    lines.append("")
    for stage, found in ratios.items():
        verdict = "reached" if max(found) <= TARGETS[stage] else "missed"
        lines.append(
            f"stage {stage}: {min(found):.2f} to {max(found):.2f} times data parallel over {len(found)} launches;"
            f" at most {TARGETS[stage]} asked for: {verdict}"
        )
    lines.append(", ".join(f"{name} {version}" for name, version in launches[0]["versions"].items()))
    lines.append(f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=3, help="one after the other, each with new processes")
    parser.add_argument("--blocks", type=int, default=6, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn, beside one that warms up")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(launch(options.blocks, options.steps)))
        return
    command = [sys.executable, __file__, "--child", f"--blocks={options.blocks}", f"--steps={options.steps}"]
    launches = []
    for _ in range(options.launches):
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        launches.append(json.loads(child.stdout))
    table = report(launches)
    print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(table + "\n")


if __name__ == "__main__":
    main()
