"""Runs on standing ranks beside ranks started for each: what makes property tests on real processes affordable.

    python benchmarks/pool.py [--launches 3]

``no-op`` is a call of an empty function on all ranks, ``4 KB`` one with an all-reduce of 4 KB.
The property is that the sum of drawn integers over all ranks is exact, once on a standing World and
once with a World for each example. ``Pool.map`` is multiprocess's own standing
pool, which hands out items but lets no worker speak to another.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from refpar.comm import World, ring

TARGET = 5.0  # times as many examples a second
EXAMPLES = {"standing": 200, "anew": 25}
RANKS = (2, 4, 8)
RESULTS = Path(__file__).parent / "results" / "pool.txt"


def median_ms(call: Any, times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def examples_a_second(run: Callable[[list[int]], Any], ranks: int, examples: int) -> float:
    """Return how fast Hypothesis gets through the property; ``run`` adds up lists over ranks."""

    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    @given(values=st.lists(st.integers(-(2**40), 2**40), max_size=50))
    def holds(values: list[int]) -> None:
        for result in run(values):
            assert result == [ranks * value + ranks * (ranks - 1) // 2 for value in values]

    began = time.perf_counter()
    holds()
    return examples / (time.perf_counter() - began)


def launch(ranks: int) -> dict[str, float]:
    from_name = os.path.basename  # any function of an importable module

    def anew(values: list[int]) -> Any:
        with World(ranks) as world:
            return world.run(reduce_list, values)

    with multiprocess.get_context("forkserver").Pool(ranks) as pool:
        pool.map(from_name, ["a"] * ranks)
        pool_map = median_ms(lambda: pool.map(from_name, ["a"] * ranks), 200)
    with World(ranks) as world:
        world.run(no_op)
        return {
            "no-op": median_ms(lambda: world.run(no_op), 300),
            "4 KB": median_ms(lambda: world.run(reduce_4k), 300),
            "Pool.map": pool_map,
            "standing": examples_a_second(lambda values: world.run(reduce_list, values), ranks, EXAMPLES["standing"]),
            "anew": examples_a_second(anew, ranks, EXAMPLES["anew"]),
        }


def no_op(comm: Any) -> None:
    pass


def reduce_4k(comm: Any) -> None:
    ring.all_reduce(comm, np.ones(1024, np.float32))


def reduce_list(comm: Any, values: list[int]) -> list[int]:
    return list(ring.all_reduce(comm, np.array(values, np.int64) + comm.rank).tolist())


def report(measured: dict[int, list[dict[str, float]]], load: float) -> str:
    """Return the table of all launches, by number of ranks."""
    lines = [
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}",
        f"{len(next(iter(measured.values())))} launches: median, and least to most; load average before: {load:.1f}",
        "",
        "ranks   no-op, ms   with 4 KB, ms   Pool.map, ms   examples/s standing   anew   ratio",
    ]
    for ranks, launches in measured.items():
        middle = {name: statistics.median(t[name] for t in launches) for name in launches[0]}
        ratios = sorted(t["standing"] / t["anew"] for t in launches)
        ratio = statistics.median(ratios)
        lines.append(
            f"{ranks:5}{middle['no-op']:12.2f}{middle['4 KB']:16.2f}{middle['Pool.map']:15.2f}"
            f"{middle['standing']:22.0f}{middle['anew']:7.0f}   {ratio:.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}),"
            f" at least {TARGET:.0f} wanted: {'met' if ratio >= TARGET else 'MISSED'}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--launches", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    text = report({ranks: [launch(ranks) for _ in range(options.launches)] for ranks in RANKS}, load)
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
