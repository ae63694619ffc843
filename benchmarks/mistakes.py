"""Which mistakes do tests of single parts see, and which only a test from end to end?

Every mistake of the catalogue is made while the tests of the part that it is made in are run, in this process and in
every rank. A test that trains a case, on one device or on many, is skipped: what is left are tests of layers,
collectives, losses, optimizers, schedules, splits. Where none of these fails, only holding a whole run to one device
shows the mistake.

    python benchmarks/mistakes.py [NAME ...]        results in benchmarks/results/mistakes.txt, where no name is given
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = {
    "refpar.case": ("single", "precision"),
    "refpar.nn.loss": ("loss",),
    "refpar.nn.layers": ("layers", "models", "tensor"),
    "refpar.nn.checkpoint": ("checkpoint",),
    "refpar.optim": ("optim",),
    "refpar.precision": ("precision", "loss"),
    "refpar.comm.ring": ("ring",),
    "refpar.parallel.data": ("data",),
    "refpar.parallel.zero": ("zero",),
    "refpar.parallel.placement": ("data", "tensor", "hybrid"),
    "refpar.parallel.tensor": ("tensor",),
    "refpar.parallel.pipeline": ("pipeline", "schedule"),
    "refpar.parallel.hybrid": ("hybrid", "pipeline", "tensor"),
}
"""The files of tests that are about a module."""

TRAINS = "this trains a case from end to end"


class Plugin:
    """For pytest: makes a mistake in this process and in all ranks, and skips whatever trains, or starts programs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pytest_runtest_call(self, item: Any) -> None:
        """Replace what trains by what skips."""
        import hypothesis
        import pytest

        from refpar import single
        from refpar.parallel import hybrid

        inner = "_hypothesis_internal_use_settings"
        if hasattr(item.function, inner):  # a mistake of this catalogue shows in any example, or nearly
            setattr(item.function, inner, hypothesis.settings(getattr(item.function, inner), max_examples=6))

        def skipped(*args: Any, **options: Any) -> None:
            pytest.skip(TRAINS)

        other_programs = (subprocess, "run"), (subprocess, "Popen")
        for module, attribute in ((single, "train"), (hybrid, "run"), (hybrid, "train"), *other_programs):
            setattr(module, attribute, skipped)

    def pytest_sessionstart(self, session: Any) -> None:
        """Make the mistake here, and let ranks make it."""
        import hypothesis
        import pytest

        from refpar.comm import RankError, World
        from refpar.oracle import mistakes

        # One failing example is enough: it need not be the smallest.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("once", phases=phases, deadline=None)
        hypothesis.settings.load_profile("once")
        self.made = mistakes.applied(self.name)
        self.made.__enter__()
        right, name = World.run, self.name

        def run(world: World, fn: Any, *args: Any) -> list[Any]:
            try:
                return right(world, mistaken, name, fn, *args)
            except RankError as error:
                if TRAINS in str(error):
                    pytest.skip(TRAINS)
                raise

        World.run = run  # type: ignore[method-assign]


def mistaken(comm: Any, name: str, fn: Any, *args: Any) -> Any:
    """Call a function on a rank that makes a mistake, and does not train."""
    from refpar.oracle import mistakes
    from refpar.parallel import hybrid

    def refused(*args: Any, **options: Any) -> None:
        raise RuntimeError(TRAINS)

    hybrid.train, right = refused, hybrid.train
    try:
        with mistakes.applied(name):
            return fn(comm, *args)
    finally:
        hybrid.train = right


def seen_by(name: str, target: str) -> str:
    """Return the first test of a part that sees the mistake, or nothing."""
    files = [f"tests/test_{part}.py" for part in PARTS[target.partition(":")[0]]]
    program = (
        "import sys; sys.path[:0] = ['benchmarks', 'tests']; import pytest, mistakes;"
        f"sys.exit(pytest.main({['-x', '-q', '--no-header', '--tb=no', '-rfE', *files]}, [mistakes.Plugin({name!r})]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1].removeprefix("tests/") if failed else done.stdout + done.stderr


def main() -> None:
    """Print, and keep, a table of all mistakes."""
    from refpar.oracle.mistakes import CATALOGUE

    names = sys.argv[1:] or list(CATALOGUE)
    lines, alone = [], []
    for name in names:
        test = seen_by(name, CATALOGUE[name].target)
        alone += [] if test else [name]
        lines.append(f"{name:45} {test or 'end to end only'}")
        print(lines[-1], flush=True)
    lines.append(f"\n{len(names)} mistakes, all seen end to end; {len(alone)} of them by no test of a part.")
    print(lines[-1])
    if not sys.argv[1:]:
        (ROOT / "benchmarks/results/mistakes.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
