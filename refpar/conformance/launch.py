"""Where the ranks of an SPMD adapter come from: mpiexec, torchrun, or standing torch workers.

Under a launcher every rank runs this program. Rank 0 draws examples, calls, judges and shrinks; the others wait for
calls, run their share and send it back. So Hypothesis runs once, whatever the number of ranks::

    rank 0    pytest   draw   scatter (name, arguments)   run own share   gather results   judge
    rank 1             wait   scatter                     run own share   gather           wait ...
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from refpar.conformance.adapter import BadAdapter, Launcher, load

GRACE = 5.0
"""Seconds that the others have to answer where a rank has raised."""
LIMIT = 120.0
"""Seconds that a call may take: a rank that is stuck in a collective ends all of them."""


class Channel(Protocol):
    """How the ranks of a launcher hand objects round."""

    rank: int
    size: int

    def scatter(self, objects: Sequence[Any] | None) -> Any:
        """Return this rank's object of those that rank 0 gives."""

    def gather(self, mine: Any) -> list[Any] | None:
        """Return every rank's object on rank 0, None elsewhere."""

    def abort(self) -> None:
        """End all ranks at once."""

    def close(self) -> None:
        """Leave, when all do."""


class Mpi:
    """The ranks of ``mpiexec``, through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm: Any = MPI.COMM_WORLD.Dup()  # messages of the adapter do not meet those of this file
        self.rank, self.size = self._comm.rank, self._comm.size

    def scatter(self, objects: Sequence[Any] | None) -> Any:
        return self._comm.scatter(objects)

    def gather(self, mine: Any) -> list[Any] | None:
        result: list[Any] | None = self._comm.gather(mine)
        return result

    def abort(self) -> None:
        os._exit(3)  # which mpiexec takes for the end of all; MPI_Abort would wait for the thread that is inside MPI

    def close(self) -> None:
        """Do nothing: MPI ends by itself."""


class Torchrun:
    """The ranks of ``torchrun``, through a gloo group of its own."""

    def __init__(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._dist: Any = dist
        self._group: Any = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def scatter(self, objects: Sequence[Any] | None) -> Any:
        mine = [None]
        self._dist.scatter_object_list(mine, objects, src=0, group=self._group)
        return mine[0]

    def gather(self, mine: Any) -> list[Any] | None:
        everybody = [None] * self.size if self.rank == 0 else None
        self._dist.gather_object(mine, everybody, dst=0, group=self._group)
        return everybody

    def abort(self) -> None:
        os._exit(3)

    def close(self) -> None:
        """Take the groups down, which gloo's threads would not survive."""
        self._dist.barrier(self._group)
        self._dist.destroy_process_group()


def started_by() -> str:
    """Return what has started this program on several ranks: ``"torchrun"``, ``"mpiexec"``, or nothing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    from refpar.comm import mpi

    return "mpiexec" if mpi.launched() is not None else ""


def rank_of_launcher() -> int:
    """Return the rank of this process under a launcher, 0 without one."""
    if started_by() == "torchrun":
        return int(os.environ["RANK"])
    from refpar.comm import mpi

    told = mpi.launched()
    return told.rank if told is not None else 0


def channel() -> Channel:
    """Return how the ranks of the launcher reach each other."""
    return Torchrun() if started_by() == "torchrun" else Mpi()


def launcher(spec: str, adapter: Any) -> tuple[Launcher, tuple[int, ...]]:
    """Return what calls an SPMD adapter, and the numbers of ranks it can have, none for any.

    Raises
    ------
    BadAdapter
        Where there are no ranks.
    """
    if started_by():
        served = Served(adapter)
        return served, (served.channel.size,)
    workers = getattr(adapter, "workers", "")
    if workers == "torch":
        return TorchWorkers(spec), ()
    raise BadAdapter(
        f"adapter {spec} has methods for ranks, and there are none: start it as mpiexec -n 3 refpar conformance {spec} "
        f'(or under torchrun), or give it workers = "torch"'
    )


class Served:
    """The ranks of a launcher, seen from rank 0."""

    def __init__(self, adapter: Any) -> None:
        self.adapter, self.channel = adapter, channel()

    def __call__(self, name: str, ranks: int, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        self.channel.scatter([(name, list(own)) for own in arguments])
        mine = answer(self.channel, self.adapter, name, arguments[0])
        watch = waiting_for(self.channel, name, mine[0])
        results = self.channel.gather(mine)
        watch.cancel()
        assert results is not None
        for rank, (error, _) in enumerate(results):
            if error:
                raise RuntimeError(f"rank {rank} of {ranks}: {error}")
        return [value for _, value in results]

    def close(self) -> None:
        """Let the other ranks end."""
        self.channel.scatter([None] * self.channel.size)
        self.channel.close()


def serve(spec: str) -> int:
    """Run calls of rank 0 until it is done: what all other ranks do; return the exit status."""
    adapter, chan = load(spec), channel()
    call = chan.scatter(None)
    while call is not None:
        mine = answer(chan, adapter, *call)
        watch = waiting_for(chan, call[0], mine[0])
        chan.gather(mine)
        call = chan.scatter(None)  # rank 0 has come out of the last call
        watch.cancel()
    chan.close()
    return 0


def waiting_for(chan: Channel, name: str, error: str) -> threading.Timer:
    """Return a watch for after a call; started, where the call raised on this rank.

    The others may then be waiting for this rank in a collective of the adapter, where nothing reaches them: they have
    ``GRACE`` to come out, and then all ranks are ended.
    """
    watch = threading.Timer(GRACE, lost, (chan, name, error))
    watch.daemon = True
    if error:
        watch.start()
    return watch


def lost(chan: Channel, name: str, error: str) -> None:
    """End all ranks: this one has raised, and the others wait for it."""
    print(f"refpar: rank {chan.rank} of {chan.size}: {error}\nthe other ranks still wait for it in {name}: ending all",
          file=sys.stderr, flush=True)  # fmt: skip
    chan.abort()


def answer(chan: Channel, adapter: Any, name: str, arguments: Sequence[Any]) -> tuple[str, Any]:
    """Run a share of a call; return the text of an error, and the result."""
    watch = threading.Timer(LIMIT, stuck, (chan, name))
    watch.daemon = True
    watch.start()
    try:
        return "", getattr(adapter, name)(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None
    finally:
        watch.cancel()


def stuck(chan: Channel, name: str) -> None:
    """End all ranks: this one has been in a call for too long."""
    print(f"refpar: rank {chan.rank} has been in {name} for {LIMIT:g} s: ending all ranks", file=sys.stderr, flush=True)
    chan.abort()


class TorchWorkers:
    """Standing processes with a gloo group, as many as a call asks for."""

    def __init__(self, spec: str) -> None:
        from refpar.adapters.pool import Pool

        self.spec, self.pool = spec, Pool()

    def __call__(self, name: str, ranks: int, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return self.pool.run(ranks, on_worker, [(self.spec, name, list(own)) for own in arguments])

    def close(self) -> None:
        """Let the workers end."""
        self.pool.close()


_LOADED: dict[str, Any] = {}


def on_worker(spec: str, name: str, arguments: Sequence[Any]) -> Any:
    """Run a share of a call on a worker, which keeps the adapter."""
    if spec not in _LOADED:
        _LOADED[spec] = load(spec)
    return getattr(_LOADED[spec], name)(*arguments)
