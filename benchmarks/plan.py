"""How far the planner's seconds are off: rings on this machine, and step times that others have published.

    python benchmarks/plan.py [--repeats 20]

Rings: all-reduces of float32 on 2, 4 and 8 ranks are timed (least of the repeats, after a barrier). Latency and
bandwidth are fitted to 2 and 4 ranks at powers of 4; every time on 8 ranks, and every size in between, is then
predicted. Ranks that outnumber the cores take turns, so their times are divided by ranks/cores before
anything is fitted, and multiplied again for a prediction. Virtual processors may be moved to cores that share no
cache, where rings take two to five times as long (``all_reduce.py`` says more). Which it was is looked at before and
after each number of ranks; that it changed twice in between is not seen.

Steps: one number, the share of peak that matrix products reach, is fitted to all rows of Narayanan et al. 2021,
table 1; the measurements of vTrain (its public ground truth, MIT licence) are then predicted with it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from all_reduce import state

from refpar.comm import World, ring
from refpar.plan import costs, speed
from refpar.plan.models import gpt2
from refpar.plan.recipes import RECIPES
from refpar.plan.setups import Setup

TUNED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
RESULTS = Path(__file__).parent / "results" / "plan.txt"
FITTED = [4**k for k in range(6, 14)]  # 4 KiB to 64 MiB
BETWEEN = [3 * 4**k for k in range(6, 13)]
RANKS = (2, 4, 8)

NARAYANAN = [  # heads, width, layers, t, p, devices, batch, micro-batch, chunks, TFLOPS a device
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), (32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 1, 142), (48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138), (80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148), (128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163), (160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
]  # fmt: skip
SHAPES = {3.6: (30, 3072, 32), 18.4: (40, 6144, 48), 39.1: (48, 8192, 64), 175: (96, 12288, 96)}
VTRAIN = [  # billions, devices, batch, t, dp, p, micro-batch, measured milliseconds
    (3.6, 64, 512, 1, 64, 1, 8, 3566.5), (3.6, 64, 512, 2, 32, 1, 16, 3937.5), (18.4, 256, 1024, 8, 32, 1, 8, 9603.6),
    (18.4, 256, 1024, 8, 4, 8, 32, 16241.4), (39.1, 512, 1536, 8, 8, 8, 2, 15001.9),
    (39.1, 512, 1536, 8, 8, 8, 4, 14967.1), (39.1, 512, 1536, 8, 8, 8, 6, 15775.3),
    (39.1, 512, 1536, 8, 8, 8, 8, 16413.4), (39.1, 512, 1536, 8, 8, 8, 12, 17999.5),
    (39.1, 512, 1536, 8, 8, 8, 24, 23171.1), (39.1, 512, 1536, 8, 32, 2, 2, 14614.0),
    (39.1, 512, 1536, 8, 32, 2, 4, 14757.3), (39.1, 512, 1536, 8, 32, 2, 6, 14915.5),
    (39.1, 512, 1536, 8, 32, 2, 8, 15212.8), (39.1, 512, 1536, 8, 32, 2, 12, 17126.8),
    (39.1, 512, 1536, 4, 32, 4, 2, 13875.5), (39.1, 512, 1536, 4, 8, 16, 12, 27810.3),
    (175, 512, 1536, 4, 4, 32, 2, 53909.6), (175, 512, 1536, 4, 4, 32, 6, 66632.5),
    (175, 512, 1536, 8, 8, 8, 2, 55109.6),
]  # fmt: skip


def timed(comm: Any, sizes: list[int], repeats: int) -> dict[int, float]:
    """Return the least seconds of an all-reduce of each size, on one rank."""
    least = {}
    for nbytes in sizes:
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        times = []
        for _ in range(repeats if nbytes < 2**24 else max(3, repeats // 4)):
            comm.barrier()
            began = time.perf_counter()
            ring.all_reduce(comm, x, out=out)
            times.append(time.perf_counter() - began)
        least[nbytes] = min(times)
    return least


def rings(repeats: int) -> list[str]:
    """Return the lines on this machine's rings."""
    cores = len(os.sched_getaffinity(0))
    measured, cores_were = {}, []
    for n in RANKS:
        before = state()
        with World(n) as world:
            by_rank = world.run(timed, sorted([*FITTED, *BETWEEN]), repeats)
        for nbytes in by_rank[0]:
            measured[n, nbytes] = max(of_rank[nbytes] for of_rank in by_rank)
        cores_were.append(f"{before} and {state()} for {n} ranks")

    turns = {n: max(1.0, n / cores) for n in RANKS}
    known = [(n, S, measured[n, S] / turns[n]) for n in (2, 4) for S in FITTED]
    predict, link = costs.piecewise(known), costs.fit(known)
    lines = [
        f"rings on {cores} cores: one link fits as {link.alpha * 1e6:.0f} us and {1e-9 / link.beta:.2f} GB/s; "
        "two regimes are used",
        f"cores before and after: {', '.join(cores_were)}",
        "",
        f"{'':>12}" + "".join(f"{f'{n} ranks, us':>27}" for n in RANKS),
        f"{'bytes':>12}" + f"{'measured':>11}{'predicted':>10}{'':>6}" * len(RANKS),
    ]
    errors: dict[str, list[float]] = {"fitted": [], "other sizes": [], "other ranks": []}
    for S in sorted([*FITTED, *BETWEEN]):
        row = f"{S:>12,}"
        for n in RANKS:
            real, paper = measured[n, S], predict(n, S) * turns[n]
            error = paper / real - 1
            kind = "other ranks" if n == 8 else "fitted" if S in FITTED else "other sizes"
            errors[kind].append(abs(error))
            row += f"{real * 1e6:>11,.0f}{paper * 1e6:>10,.0f}{error:>+6.0%}"
        lines.append(row)
    lines += ["", "mean (worst) error of predictions: " + "; ".join(
        f"{kind} {statistics.mean(e):.0%} ({max(e):.0%})" for kind, e in errors.items())]  # fmt: skip
    return lines


def steps() -> list[str]:
    """Return the lines on published step times."""
    hardware = speed.Hardware(80 * 10**9, 8, 300e9, 200e9, 312e12)
    recipe = RECIPES["bf16-fp32-grads"]

    def narayanan(efficiency: float) -> list[float]:
        errors = []
        for a, h, L, t, p, devices, B, b, v, tflops in NARAYANAN:
            dp = devices // (t * p)
            setup = Setup(dp, t, p, batch=B, micro_batches=B // dp // b, chunks=v, recompute="full")
            step = speed.step(gpt2(L, h, a, 51_200, 2048), setup, recipe, replace(hardware, efficiency=efficiency))
            errors.append(step.total / (step.executed_flops / (tflops * 1e12 * devices)) - 1)
        return errors

    grid = [k / 100 for k in range(40, 75)]
    mean = {e: statistics.mean(map(abs, narayanan(e))) for e in grid}
    best = min(grid, key=mean.__getitem__)
    errors = []
    for billions, _, B, t, dp, p, b, ms in VTRAIN:
        L, h, a = SHAPES[billions]
        setup = Setup(dp, t, p, batch=B, micro_batches=B // dp // b, recompute="full")
        step = speed.step(gpt2(L, h, a, 51_200, 2048), setup, recipe, replace(hardware, efficiency=best))
        errors.append(step.total * 1e3 / ms - 1)
    worst = max(errors, key=abs)
    return [
        f"steps: an efficiency of {best:.2f} fits Narayanan et al. 2021, table 1, best: mean error {mean[best]:.1%} of "
        f"10 rows (worst {max(narayanan(best), key=abs):+.0%}); the default is {speed.EFFICIENCY}",
        f"predicted with it: vTrain's measurements, mean error {statistics.mean(map(abs, errors)):.1%} of "
        f"{len(errors)} rows (worst {worst:+.0%})",
    ]


def main() -> None:
    """Run it and keep the output."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--repeats", type=int, default=20)
    repeats = options.parse_args().repeats
    for name in TUNED:
        os.environ.pop(name, None)
    load = os.getloadavg()[0]
    text = "\n".join([
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} at the start, "
        f"Python {platform.python_version()}, NumPy {np.__version__}",
        "", *rings(repeats), "", *steps(), "",
    ])  # fmt: skip
    print(text, end="")
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
