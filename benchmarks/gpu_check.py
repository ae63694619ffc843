"""Everything that only a GPU can show, in one script of under five minutes for one GPU.

    pip install '.[test,cuda13]'        # or cuda12: nvidia-smi shows which
    python benchmarks/gpu_check.py > gpu.jsonl

Each step prints one line of JSON: its name, whether it passed, how long it took, what it found. A step that fails does
not keep the next from running; the last line sums up, and the exit status is 0 only where all passed. Steps run in
ranks: several of them on one GPU, with the host in between.

======================= ===================================================================================
versions                of everything, and the GPU's name and memory
expressions             lines of CuPy come out as the stand-in of the tests takes them to
flag                    argument, option and variable start 4 ranks on the GPU, and their caller imports no cupy
refusal                 without a GPU (hidden from the process) the flag says so, with exit status 2
ring                    every collective gives NumPy's bits, in every type and in float16 as in float32
techniques              data parallel, ZeRO 1 to 3, tensor parallel, pipelines, checkpointing and all at once, in
                        float64, against one device on NumPy
exact                   networks that do not round, in float16 with a forced overflow, bit for bit
race                    large arrays are exchanged while the device is busy, and no slot is read too late
======================= ===================================================================================

It needs the tests folder of a checkout beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import on_backend  # noqa: E402

import refpar  # noqa: E402
from refpar import World, single  # noqa: E402
from refpar.case import Case, Layout, text_batches  # noqa: E402
from refpar.comm import Communicator, ring  # noqa: E402
from refpar.nn.models import GPT  # noqa: E402
from refpar.optim import AdamW  # noqa: E402
from refpar.oracle import cases  # noqa: E402
from refpar.oracle.bounds import spread  # noqa: E402
from refpar.oracle.compare import compare  # noqa: E402
from refpar.parallel import hybrid  # noqa: E402

LAYOUTS = (
    *("dp=4", "dp=4,micro_batches=2,bucket=500", "dp=4,zero=1", "dp=4,zero=2,micro_batches=2"),
    *("dp=4,zero=3,recompute=block", "tp=4", "pp=4,micro_batches=5", "pp=4,micro_batches=2,schedule=gpipe"),
    *("dp=2,tp=2,zero=1,recompute=sqrt", "dp=2,pp=2,zero=2,micro_batches=3", "tp=2,pp=2,micro_batches=2"),
)

Found = dict[str, Any]
Step = Callable[["Worlds"], Found]


class Worlds:
    """Standing worlds on cupy, by number of ranks."""

    def __init__(self) -> None:
        self.standing: dict[int, World] = {}

    def __call__(self, ranks: int) -> World:
        if ranks not in self.standing:
            self.standing[ranks] = World(ranks, backend="cupy")
        return self.standing[ranks]

    def close(self) -> None:
        """End them all."""
        for world in self.standing.values():
            world.close()


def versions(worlds: Worlds) -> Found:
    """Return the version of everything, and what the GPU is."""
    [of_cupy] = worlds(1).run(describe)
    python = sys.version.split()[0]
    return {"python": python, "numpy": np.__version__, "refpar": refpar.__version__, **of_cupy}


def describe(comm: Communicator) -> Found:
    cupy = comm.xp
    found: Found = {"cupy": cupy.__version__, "gpus": cupy.cuda.runtime.getDeviceCount()}
    found["cuda runtime"], found["cuda driver"] = (
        cupy.cuda.runtime.runtimeGetVersion(),
        cupy.cuda.runtime.driverGetVersion(),
    )
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {**found, "gpu": properties["name"].decode(), "GiB": round(properties["totalGlobalMem"] / 2**30, 1)}


def expressions(worlds: Worlds) -> Found:
    [wrong] = worlds(1).run(on_backend.outcomes)
    return {"wrong": wrong, "passed": not wrong}


def flag(worlds: Worlds) -> Found:
    """Start 4 ranks by the argument, the option and the variable."""
    by_argument = {rank["xp"] for rank in worlds(4).run(on_backend.where)}
    verify = ("verify", "--only", "ring,dp", "--ranks", "4", "--steps", "2")
    by_option, by_variable = command(*verify, "--backend", "cupy"), command(*verify, REFPAR_BACKEND="cupy")
    verdicts = [(done.stdout.splitlines() or [done.stderr])[-1] for done in (by_option, by_variable)]
    clean = "cupy" not in sys.modules
    passed = by_argument == {"cupy"} and by_option.returncode == by_variable.returncode == 0 and clean
    return {"argument": sorted(by_argument), "option, variable": verdicts, "caller is clean": clean, "passed": passed}


def refusal(worlds: Worlds) -> Found:
    """Hide the GPU."""
    arguments = ("verify", "--only", "ring", "--ranks", "2", "--backend", "cupy")
    done = command(*arguments, CUDA_VISIBLE_DEVICES="-1")
    one_line = len(done.stderr.splitlines()) == 1 and "no GPU can be used" in done.stderr
    return {"said": done.stderr.strip(), "status": done.returncode, "passed": done.returncode == 2 and one_line}


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "refpar", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def rings(worlds: Worlds) -> Found:
    """Compare every collective in every type, with NumPy's bits."""
    wrong = []
    for dtype in ring.DTYPES:
        for shape in [(), (0,), (3, 4), (1013, 7)]:
            for rank, (device, host) in enumerate(worlds(4).run(on_backend.both, dtype, shape)):
                bad = [name for name, x in host.items() if device[name].tobytes() != x.tobytes()]
                wrong += [f"{name} of {dtype} {shape} on rank {rank}" for name in bad]
    return {"wrong": wrong, "passed": not wrong}


def techniques(worlds: Worlds) -> Found:
    """Train a small GPT in every layout."""
    text = (ROOT / "refpar" / "single.py").read_bytes()
    model = GPT(vocabulary=128, context=24, width=32, layers=3, heads=4, dropout=0.1)
    batches = text_batches(text, steps=3, rows=7, context=24)
    case = Case(model, AdamW(lr=1e-2, weight_decay=0.1), batches, clip=1.0)
    truth = single.train(case)
    allowed = spread(truth)
    found: Found = {"passed": True}
    for layout in map(Layout.parse, LAYOUTS):
        verdict = compare(hybrid.run(case, layout, world=worlds(layout.ranks)), truth, bounds=allowed)
        found[str(layout)] = str(verdict.first or f"{verdict.max_error:.1e} of {verdict.bound:.1e} allowed")
        found["passed"] &= verdict.first is None
    return found


def exact(worlds: Worlds) -> Found:
    """Run networks of small integers, in float32 and in float16."""
    found: Found = {"passed": True}
    for name, dtype in (("integers-zero", "float32"), ("integers-zero", "float16"), ("overflow", "float16")):
        named = cases.CASES[name]
        case = named.make(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            truth = single.train(case)
        verdict = compare(hybrid.run(case, named.layout, world=worlds(named.layout.ranks)), truth)
        found[f"{name} in {dtype}"] = str(verdict.first or f"{verdict.compared} tensors, every bit")
        found["passed"] &= verdict.first is None
    return found


def race(worlds: Worlds, rounds: int = 40, size: int = 2**21) -> Found:
    """Exchange 16 MiB arrays while the device is busy."""
    wrong = worlds(4).run(on_backend.race, rounds, size)
    return {"rounds": rounds, "MiB": size * 8 / 2**20, "wrong rounds by rank": wrong, "passed": not any(wrong)}


STEPS: dict[str, Step] = {
    "versions": versions,
    "expressions": expressions,
    "flag": flag,
    "refusal": refusal,
    "ring": rings,
    "techniques": techniques,
    "exact": exact,
    "race": race,
}


def main() -> int:
    """Run all steps that fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=float, default=290, help="seconds after which no further step is begun")
    parser.add_argument("--only", metavar="STEP,…", default=",".join(STEPS), help="steps to run")
    options = parser.parse_args()
    limit, only = options.limit, options.only.split(",")
    worlds, begun, failed = Worlds(), time.monotonic(), []
    for name, step in ((name, STEPS[name]) for name in only):
        start = time.monotonic()
        if start - begun > limit:
            found: Found = {"passed": False, "error": f"not begun: {limit:g} s are over"}
        else:
            try:
                found = step(worlds)
            except Exception as error:
                found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        line = {"step": name, "passed": True, "seconds": round(time.monotonic() - start, 1), **found}
        print(json.dumps(line), flush=True)
        failed += [name] * (not line["passed"])
    worlds.close()
    print(
        json.dumps({"step": "all", "passed": not failed, "failed": failed, "seconds": round(time.monotonic() - begun)})
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
