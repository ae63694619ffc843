"""What the tests of the technique files' openings run on the ranks: one step on a parameter of seven elements."""

from __future__ import annotations

import numpy as np

from refpar.comm import Communicator, ring
from refpar.nn.layer import At
from refpar.nn.layers import Linear
from refpar.parallel.data import DataParallel
from refpar.parallel.zero import Zero
from refpar.precision import Precision


def seven(comm: Communicator, stage: int, compute: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return which elements this rank owns, and the elements and bytes that it sent as sums and as results.

    Parameters
    ----------
    stage : of ZeRO; 0 for data parallel, whose all-reduce does not say which is which
    """
    types = Precision(compute)
    units = [("unit", Linear("unit", (7,), (1,), bias=False))]
    initial = {"unit.weight": np.arange(7, dtype=types.master).reshape(7, 1)}
    store = Zero(comm, units, initial, types, 1, stage) if stage else DataParallel(comm, units, initial, types, 1)
    [(_, layer)] = store.units
    y, saved = layer.forward(store.weights, np.ones((2, 7), compute), At(0, 0, (0, 1)))
    for name, gradient in layer.backward(store.weights, saved, np.ones_like(y)):
        store.consume(name, gradient)
    store.unit_done(0, True)
    store.publish()
    sent = [comm.ledger.total(operation=o) for o in ("all_reduce", "reduce_scatter", "all_gather")]
    return list(store.positions("unit.weight")), [(s.elements, s.bytes) for s in sent]


def sum_of_seven(comm: Communicator) -> tuple[list[float], int]:
    """Return the all-reduce of ``rank + 1`` seven times, and the elements that it took this rank."""
    return ring.all_reduce(comm, np.full(7, comm.rank + 1.0)).tolist(), comm.ledger.elements_sent
