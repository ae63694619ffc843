"""The program that the tests of MPI run under ``mpiexec``: ``python -m mpi4py on_mpi.py WHAT [FILE]``.

Whatever would be pickled raises.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import on_ranks
import threadpoolctl

from refpar import rng
from refpar.case import Batch, Case, Layout
from refpar.comm import Communicator, ring
from refpar.comm.communicator import Ranks
from refpar.nn.models import GPT
from refpar.optim import AdamW
from refpar.parallel import hybrid
from refpar.precision import LossScale, Precision

LARGE = 1_100_001  # elements: several pieces of a message, the last of them short
LAYOUTS = {
    2: ("dp=2,micro_batches=2", "dp=2,zero=2", "tp=2", "pp=2,micro_batches=3", "dp=1"),
    4: ("dp=2,tp=2,zero=1", "dp=2,pp=2,zero=3,recompute=block,micro_batches=2", "dp=3,zero=1", "dp=2"),
}
"""By the number of ranks that MPI has; some leave a part of them out."""


def batch_of(model: GPT, rows: int, step: int) -> Batch:
    """Return a batch with a ragged mask."""
    ids = rng.integers((step, "ids"), (2, rows, model.context), 0, model.vocabulary)
    return Batch(ids[0], ids[1], rng.uniform((step, "mask"), ids[0].shape) < 0.7)


MODEL = GPT(vocabulary=11, context=7, width=12, layers=2, heads=3, dropout=0.25)
BATCHES = tuple(batch_of(MODEL, 5, step) for step in range(2))
HALVES = Precision("float16", loss_scale=LossScale(1024.0))
CASES = (
    Case(MODEL, AdamW(0.01), BATCHES, clip=0.5),
    Case(MODEL, AdamW(0.01), BATCHES, clip=0.5, precision=HALVES),
)


def everything(worlds: Callable[[int], Ranks], size: int) -> list[Any]:
    """Return what all ranks return, for every collective and every layout: the same on any transport."""
    world = worlds(size)
    results: list[Any] = [world.run(collectives, dtype, shape) for dtype in ring.DTYPES for shape in [(), (0,), (3, 5)]]
    results.append(world.run(on_ranks.everybody_sends_first, [0, 1, LARGE, 5]))
    results.append(world.run(on_ranks.swap, LARGE))
    results.append(world.run(on_ranks.send_and_receive, on_ranks.Input(5, (LARGE,), "float32"), "reversed"))
    results.append(world.run(large))
    results.append(world.run(blas_threads))
    for layout in map(Layout.parse, LAYOUTS[size]):
        for case in CASES:
            results.append(worlds(layout.ranks).run(hybrid.train, case, layout))
    return results


def collectives(comm: Communicator, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    x = on_ranks.Input(5, shape, dtype, kind="reals" if dtype.startswith("float") else "integers").values(comm.rank)
    part = comm.split(comm.rank % 2, -comm.rank, name="parity")
    return {
        "sum": ring.all_reduce(comm, x),
        "max": ring.all_reduce(comm, x, "max"),
        "scatter": ring.reduce_scatter(comm, x),
        "gather": ring.all_gather(comm, x),
        "broadcast": ring.broadcast(comm, x, comm.size - 1),
        "to all": ring.all_to_all(comm, np.stack([x] * comm.size)),
        "in a part": ring.all_gather(part, x),
        "ledger": comm.ledger.snapshot(),
    }


def large(comm: Communicator) -> Any:
    """Return a few elements of a large sum."""
    return ring.all_reduce(comm, rng.uniform((comm.rank, "large"), (LARGE,)))[:: LARGE // 50]


def blas_threads(comm: Communicator) -> list[int]:
    """Return how many threads each BLAS uses: with more than one, products need not come out alike."""
    return [library["num_threads"] for library in threadpoolctl.threadpool_info()]


# What goes wrong


def raises(comm: Communicator) -> None:
    if comm.rank == 1:
        raise ValueError("boom")
    comm.barrier()


def exits(comm: Communicator) -> None:
    if comm.rank == 1:
        sys.exit(5)
    comm.barrier()


def another_collective(comm: Communicator) -> None:
    x = np.ones(3, np.float32)
    if comm.rank == 0:
        ring.all_reduce(comm, x)
    else:
        ring.broadcast(comm, x)


def another_shape(comm: Communicator) -> None:
    ring.all_reduce(comm, np.ones(3 + comm.rank, np.float32))


def waits_for_who_is_done(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.recv(np.ones(3), 1)


def sends_for_nobody(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.ones(3), 1)


def stalls(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()


def interrupts(comm: Communicator) -> None:
    if comm.rank == 1:
        raise KeyboardInterrupt
    comm.barrier()


def unsendable(comm: Communicator) -> Any:
    return object()


def starts_processes(comm: Communicator) -> None:
    from refpar import World

    del os.environ["PMI_SIZE"]  # what MPI itself says is enough
    World(2)


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("something was pickled on its way between ranks")


def main(what: str, file: str = "") -> None:
    from mpi4py import MPI

    from refpar.comm.mpi import MpiWorld
    from refpar.comm.pack import pack

    MPI.pickle.__init__(no_pickle, no_pickle)
    if what == "everything":
        results = everything(functools.cache(MpiWorld), MPI.COMM_WORLD.size)
        if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:  # the last: it has not been in every run
            Path(file).write_bytes(pack(results).tobytes())
    else:
        MpiWorld(timeout=1.0 if what == "stalls" else 30.0).run(globals()[what])
        print("not reached")


if __name__ == "__main__":
    main(*sys.argv[1:])
