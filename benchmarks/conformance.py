"""The whole battery against real implementations: a row each of what was checked and what passed.

    python benchmarks/conformance.py [--examples 100] > benchmarks/results/conformance.txt

Needs torch, mpi4py and an MPI (extra ``bench``), and pytest with Hypothesis. A check of an operation has so many
examples, one of whole training a fifth of them. ``known`` are checks that fail for a reason that is listed in
``refpar/adapters/torch_known.txt``; on what DTensor computes wrongly beside these, see ``KNOWN`` in
``refpar/adapters/torch_operations.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ADAPTERS = Path(__file__).parents[1] / "refpar" / "adapters"
MPIEXEC = [str(Path(sys.executable).with_name("mpiexec")), "-n", "3"]
KNOWN = ["--known", str(ADAPTERS / "torch_known.txt")]
IMPLEMENTATIONS: list[tuple[list[str], str, list[str]]] = [
    ([], "torch_training:Ddp", []),
    ([], "torch_training:ZeroOptimizer", []),
    ([], "torch_training:Fsdp", []),
    ([], "torch_training:TensorParallel", []),
    ([], "torch_training:FsdpTensorParallel", []),
    ([], "torch_training:Pipeline", []),
    ([], "torch_training:Interleaved", []),
    ([], "torch_operations:Operations", KNOWN),
    (MPIEXEC, "mpi:Mpi", []),
    (MPIEXEC, "mpi:Ring", []),
]


def row(launcher: list[str], adapter: str, options: list[str], examples: int, folder: Path) -> str:
    """Run the battery on one adapter and return a line of the table."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [*launcher, sys.executable, "-m", "refpar", "conformance", f"refpar.adapters.{adapter}", *options]
    done = subprocess.run(
        [*command, "--examples", str(examples), "--report", str(report)], capture_output=True, text=True, timeout=1200
    )
    if not report.exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    said = json.loads(report.read_text())
    outcomes = Counter(said["outcomes"].values())
    checked = {name for name, outcome in said["outcomes"].items() if outcome != "skipped"}
    counted = sum(said["examples"].get(name, 0) for name in checked)
    return f"{said['title']:55} {len(checked):7} {outcomes['passed']:7} {outcomes['known']:6} {counted:9}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--examples", type=int, default=100)
    options = parser.parse_args()
    print(f"{'implementation':55} {'checks':>7} {'passed':>7} {'known':>6} {'examples':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for launcher, adapter, more in IMPLEMENTATIONS:
            print(row(launcher, adapter, more, options.examples, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
