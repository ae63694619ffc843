"""What tests of stores run on the ranks: gradients handed in by hand, to see what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from refpar.comm import Communicator
from refpar.nn.layer import ParamSpec
from refpar.parallel.data import DataParallel
from refpar.precision import Precision


def reduced(comm: Communicator, steps: list[list[list[float]]], parameter: float = 5.0) -> list[list[float]]:
    """Return, step by step, what a one-element parameter's gradient is after the reduction.

    Parameters
    ----------
    steps : by step, by rank, the gradient of each micro-batch
    """
    unit = SimpleNamespace(specs={"w": ParamSpec((1,))})
    store = DataParallel(comm, [("unit", unit)], {"w": np.array([parameter])}, Precision(), 1)
    results = []
    for ranks in steps:
        store.begin()
        mine = ranks[comm.rank]
        for m, gradient in enumerate(mine):
            store.consume("w", np.array([gradient]))
            store.unit_done(0, m == len(mine) - 1)
        results.append(store.reduced()["w"].tolist())
    return results
