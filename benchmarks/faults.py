"""What becomes of a run when a rank fails at a random moment: a thousand times.

    python benchmarks/faults.py [--runs 1000] [--ranks 4] [--seed 0]

Ranks send each other arrays of all sizes, in collectives and in pairs, without end. At a random
moment one of them is killed, raises, stalls for longer than the limit, or calls another collective
than the others. Counted is: in how many runs the error named that rank; how long it took, from the
fault (of a stall: from the end of the limit) to the exception in the caller; what was left of
processes, descriptors and shared memory; and whether the next run gave right numbers.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refpar.comm import CollectiveMismatch, CommTimeout, RankError, World, ring

LIMIT = 0.5
KINDS = ("killed", "raises", "stalls", "other collective")
RESULTS = Path(__file__).parent / "results" / "faults.txt"


@dataclass(frozen=True)
class Outcome:
    """What became of one run; ``seconds`` is the time to the error."""

    kind: str
    named: bool
    seconds: float
    processes: int
    descriptors: int
    segments: int
    next_right: bool
    text: str


def traffic(kind: str, victim: int, moment: float) -> Callable[[Any], None]:
    """Return what the ranks run. The fault happens between two operations, at the first chance from ``moment`` on.

    A rank that is to be killed does nothing to that end: somebody else kills it, wherever it is.
    """

    def run(comm: Any) -> None:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for turn in range(10**9):
            size = (10, 1000, 10**5, 3 * 10**5)[turn % 4]  # the last does not fit into a mailbox
            x = np.arange(size, dtype=np.float32) + comm.rank
            if comm.rank == victim and kind != "killed" and time.monotonic() >= moment:
                if kind == "raises":
                    raise ArithmeticError(f"fault of rank {victim}")
                if kind == "stalls":
                    time.sleep(60)
                else:
                    ring.broadcast(comm, x, victim)
            ring.all_reduce(comm, x)
            comm.sendrecv(x, right, np.empty_like(x), left)

    return run


def one(world: World, kind: str, victim: int, after: float) -> Outcome:
    """Let ``victim`` fail ``after`` so many seconds of a run."""
    pids = world.pids
    files, segments = descriptors(), named_segments([*pids, os.getpid()])
    moment = time.monotonic() + after
    struck = [moment]

    def kill() -> None:
        struck[0] = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)

    killer = threading.Timer(after, kill)
    if kind == "killed":
        killer.start()
    try:
        world.run(traffic(kind, victim, moment))
        raise AssertionError("the run has ended without an error")
    except RankError as error:
        ended = time.monotonic()
        text = str(error)
        named = error.rank == victim and f"rank {victim}" in text
        if kind == "other collective":
            named = isinstance(error, CollectiveMismatch) and f"rank {victim}" in text.partition("\n")[0]
        elif kind == "stalls":
            named = named and isinstance(error, CommTimeout)
    if kind == "killed":
        killer.join()
    processes = sum(map(alive, pids))
    files_left = descriptors() - (files - descriptors_of(world))
    segments_left = sum(map(os.path.exists, segments))
    results = world.run(lambda comm: ring.all_reduce(comm, np.arange(5.0) * comm.rank).tolist())
    expected = (np.arange(5.0) * sum(range(world.ranks))).tolist()
    return Outcome(
        kind,
        named,
        ended - struck[0] - (LIMIT if kind == "stalls" else 0),
        processes,
        files_left,
        segments_left,
        results == [expected] * world.ranks,
        text,
    )


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_of(world: World) -> int:
    """Return how many the parent holds for a standing pool: a pipe and two sentinels a rank, two for the memory."""
    return 3 * world.ranks + 2


def named_segments(pids: list[int]) -> set[str]:
    """Return the files in /dev/shm that processes have mapped. (Others come and go there that are not ours.)"""
    lines = (line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {line.split()[5] for line in lines if "/dev/shm/" in line}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def inject(runs: int, ranks: int, seed: int, progress: bool = False) -> list[Outcome]:
    """Return the outcomes of ``runs`` runs, of the four kinds in turn."""
    draw = random.Random(seed)
    outcomes = []
    with World(ranks, timeout=LIMIT) as world:
        for number in range(runs):
            outcomes.append(one(world, KINDS[number % 4], draw.randrange(ranks), draw.uniform(0, 0.02)))
            if progress and sys.stderr.isatty():
                print(f"\r{number + 1} of {runs}", end="", file=sys.stderr, flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    outcomes = inject(options.runs, options.ranks, options.seed, progress=True)
    lines = [
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}",
        f"{len(outcomes)} runs on {options.ranks} ranks, seed {options.seed}, {time.monotonic() - began:.0f} s;"
        f" load average before: {load:.1f}",
        "",
        "fault             runs  named the rank  ms to the error: median   worst  left  next run right",
    ]
    for kind in (*KINDS, "all"):
        chosen = [o for o in outcomes if kind in (o.kind, "all")]
        times = [o.seconds * 1e3 for o in chosen]
        left = sum(o.processes + o.descriptors + o.segments for o in chosen)
        named, right = sum(o.named for o in chosen), sum(o.next_right for o in chosen)
        lines.append(
            f"{kind:16}{len(chosen):6}{named:16}{statistics.median(times):25.1f}{max(times):8.1f}{left:6}{right:16}"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    for outcome in outcomes:
        if not outcome.named:
            print(f"not named: {outcome}")
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
