"""Where ranks run, and on what: processes or MPI, NumPy or CuPy, recorded or not."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from refpar.cli.words import BadInput, Parser

MOST_ON_GPUS = 12


def where(p: Parser) -> None:
    """Add the options that say where ranks run, and on what."""
    p.add_argument(
        "--backend",
        metavar="NAME",
        help="array library of the ranks: numpy or cupy (default: $REFPAR_BACKEND, or numpy)",
    )
    p.add_argument(
        "--transport",
        choices=("processes", "mpi"),
        default="processes",
        help="start processes on this machine, or use the ranks that mpiexec or srun has started (default: processes)",
    )


def ranks_for(options: argparse.Namespace, asked: int | None) -> tuple[Callable[[int], Any], int | None]:
    """Return what opens a world of so many ranks, and how many there are at most, None for any number.

    ``asked`` is how many the run needs, where that is known. Ranks on a GPU are not started by the dozen unasked:
    each takes hundreds of megabytes of it before it holds anything.
    """
    from refpar import arrays
    from refpar.comm import mpi

    try:
        backend = arrays.chosen_backend(options.backend)
        if options.transport == "mpi":
            return functools.partial(mpi.MpiWorld, backend=backend), mpi.size(asked)
        mpi.refuse_local_ranks()
    except (ValueError, arrays.Unavailable) as error:
        raise BadInput(error) from None
    from refpar.comm.processes import World

    return functools.partial(World, backend=backend), None if backend == "numpy" else MOST_ON_GPUS


def recording(options: argparse.Namespace) -> Callable[[int], Any]:
    """Return what opens worlds that record what their ranks do, for ``--trace``."""
    from refpar import arrays
    from refpar.teach.recorder import RecordedWorld

    if options.transport != "processes":
        raise BadInput("--trace records the processes of this machine: leave out --transport mpi")
    return functools.partial(RecordedWorld, backend=arrays.chosen_backend(options.backend))
