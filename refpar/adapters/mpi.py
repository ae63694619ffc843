"""MPI's own collectives, through mpi4py, and a ring of one's own: adapters that live under ``mpiexec``.

    mpiexec -n 3 refpar conformance refpar.adapters.mpi:Mpi
    mpiexec -n 3 refpar conformance refpar.adapters.mpi:Ring

Rank 0 draws the examples and judges; every method here runs on all ranks, with its rank's array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar import split
from refpar.conformance import spmd

HostArray = npt.NDArray[Any]


def world() -> Any:
    """Return all ranks of MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def flat(x: HostArray) -> HostArray:
    """Return the elements of ``x`` in their order, whatever its strides: MPI sends memory as it lies."""
    return np.array(x, order="C").reshape(-1)


class Mpi:
    """Allreduce and its like, of the MPI that mpi4py is linked to."""

    name = "mpi4py"

    @property
    def version(self) -> str:
        """Of mpi4py, and of the MPI that it is linked to."""
        import mpi4py
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
        return f"{mpi4py.__version__} ({library})"

    @spmd
    def all_reduce(self, array: HostArray) -> HostArray:
        """Return the sum over ranks."""
        total = np.empty(array.size, array.dtype)
        world().Allreduce(flat(array), total)
        return total.reshape(array.shape)

    @spmd
    def all_reduce_max(self, array: HostArray) -> HostArray:
        """Return the maximum over ranks."""
        from mpi4py import MPI

        largest = np.empty(array.size, array.dtype)
        world().Allreduce(flat(array), largest, op=MPI.MAX)
        return largest.reshape(array.shape)

    @spmd
    def reduce_scatter(self, array: HostArray, counts: Sequence[int]) -> HostArray:
        """Return this rank's part of the sum."""
        part = np.empty(counts[world().rank], array.dtype)
        world().Reduce_scatter(flat(array), part, recvcounts=list(counts))
        return part

    @spmd
    def all_gather(self, array: HostArray) -> HostArray:
        """Return everybody's array."""
        lengths = world().allgather(array.size)
        everybody = np.empty(sum(lengths), array.dtype)
        world().Allgatherv(array, (everybody, lengths))
        return everybody

    @spmd
    def broadcast(self, array: HostArray, root: int) -> HostArray:
        """Return the root's array."""
        x = flat(array)
        world().Bcast(x, root)
        return x.reshape(array.shape)

    @spmd
    def all_to_all(self, array: HostArray) -> HostArray:
        """Return this rank's row of everybody's array."""
        rows = np.empty(array.shape, array.dtype)
        world().Alltoall(array, rows)
        return rows


class Ring:
    """A ring all-reduce of one's own, in ten lines: what somebody would want to have checked."""

    name = "a ring over Sendrecv"

    @spmd
    def all_reduce(self, array: HostArray) -> HostArray:
        """Return the sum over ranks."""
        total, rank, size = flat(array), world().rank, world().size
        parts = [total[r.start : r.stop] for r in split.ranges(split.sizes(total.size, size))]
        for step in range(2 * (size - 1)):
            summing = step < size - 1
            going, coming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            arrived = np.empty_like(coming)
            world().Sendrecv(going, (rank + 1) % size, recvbuf=arrived, source=(rank - 1) % size)
            coming[...] = coming + arrived if summing else arrived
        return total.reshape(array.shape)


class CutsTheTail(Ring):
    """The same with chunks of n // size elements: what is left over is not summed (ROCm/rocm-systems#7711)."""

    name = "a ring that cuts the tail"

    @spmd
    def all_reduce(self, array: HostArray) -> HostArray:
        """Return the sum over ranks."""
        whole = flat(array)
        kept = whole.size // world().size * world().size
        whole[:kept] = super().all_reduce(whole[:kept])
        return whole.reshape(array.shape)
