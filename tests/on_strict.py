"""What the tests of the strict stand-in run on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import strictpy

from refpar import rng
from refpar.arrays import array_module, to_host
from refpar.case import Case, Layout, State
from refpar.comm import Communicator, ring
from refpar.parallel import hybrid

Results = dict[str, Any]


def train(comm: Communicator, case: Case, layout: Layout, start: State | None = None) -> hybrid.RankTrace:
    """Train on arrays of the stand-in."""
    return hybrid.train(comm, case, layout, start, xp=strictpy)


def both(comm: Communicator, dtype: str, shape: tuple[int, ...]) -> tuple[Results, Results]:
    """Return the result of every collective on the stand-in's arrays, and on NumPy's."""
    return collectives(strictpy, comm, dtype, shape), collectives(np, comm, dtype, shape)


def collectives(xp: Any, comm: Communicator, dtype: str, shape: tuple[int, ...]) -> Results:
    """Call every collective, and every way to call it, on small integers."""
    values = rng.integers((comm.rank, dtype), shape, -9, 10).astype(dtype)
    x, place, guarded = xp.asarray(values), xp.asarray(values.copy()), xp.zeros((values.size + 2,), dtype=dtype)
    turned = xp.asarray(values.T).T
    counts = [0] * (comm.size - 1) + [x.size]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    results = {
        "sum": ring.all_reduce(comm, x),
        "max": ring.all_reduce(comm, turned, "max"),
        "into a part": ring.all_reduce(comm, x.reshape(x.size), out=guarded[1:-1]),
        "around the part": guarded,
        "in place": ring.all_reduce(comm, place, out=place),
        "scatter": ring.reduce_scatter(comm, x),
        "scatter by counts": ring.reduce_scatter(comm, turned, counts=counts),
        "gather": ring.all_gather(comm, x),
        "broadcast": ring.broadcast(comm, x, comm.size - 1),
        "to all": ring.all_to_all(comm, xp.stack([x + i for i in range(comm.size)])),
        "neighbour": comm.sendrecv(x, left, xp.empty(shape, dtype=dtype), right),
    }
    if dtype == "float16":
        results["sum in halves"] = ring.all_reduce(comm, x, accumulate=np.float16)
    assert results["in place"] is place
    assert {array_module(result) for result in results.values()} == {xp}
    return {"input": to_host(x), **{name: to_host(result) for name, result in results.items()}}
