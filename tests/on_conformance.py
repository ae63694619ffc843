"""Adapters for the tests of the battery: refpar's own techniques, which pass, and the same with one thing wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from refpar.arrays import Array
from refpar.comm import Communicator, World, ring
from refpar.conformance import Limits, spmd
from refpar.nn.layer import At, Stream
from refpar.nn.layers import Dropout, Linear, ReLU
from refpar.nn.loss import CrossEntropy
from refpar.oracle import mistakes
from refpar.parallel import hybrid, tensor
from refpar.precision import next_scale


def collective(comm: Communicator, name: str, arrays: list[Array], *args: Any, **options: Any) -> Array:
    return getattr(ring, name)(comm, arrays[comm.rank], *args, **options)


def linear(comm: Communicator, axis: int, shares: list[list[Array]]) -> Any:
    """Run a linear layer of refpar's, rewritten for tensor parallelism, there and back."""
    x, weight, bias, dy = (own[comm.rank] for own in shares)
    layer = tensor.rewrite(Linear("l", (x.shape[1],), (weight.shape[1],), axis=axis), comm)
    params = {"l.weight": weight, "l.bias": bias}
    y, saved = layer.forward(params, x, At(0, 0, ()))
    stream = Stream(layer.backward(params, saved, dy))
    gradients = dict(stream)
    return y, stream.dx, gradients["l.weight"], gradients["l.bias"]


def cross_entropy(comm: Communicator, logits: list[Array], targets: list[Array], mask: list[Array]) -> Any:
    start = sum(x.shape[1] for x in logits[: comm.rank])
    loss = tensor.VocabularyCrossEntropy(comm, start) if comm.size > 1 else CrossEntropy()
    total, saved = loss.forward(*(x[comm.rank][None] for x in (logits, targets, mask)))
    return total, loss.backward(saved, 1.0)[0]


class Own:
    """refpar itself."""

    name = "refpar"
    dtypes = ("float16", "float32", "float64")
    limits = Limits(
        dp=(1, 2, 3), tp=(1, 2), pp=(1, 2), zero=(0, 1, 2, 3), schedules=("1f1b", "gpipe"), recompute=("none", "block"),
        dropout=(0.0, 0.25),
    )  # fmt: skip

    def __init__(self) -> None:
        self.worlds: dict[int, World] = {}

    def world(self, ranks: int) -> World:
        return self.worlds.setdefault(ranks, World(ranks))

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()

    def all_reduce(self, arrays: list[Array]) -> list[Array]:
        return self.world(len(arrays)).run(collective, "all_reduce", arrays)

    def all_reduce_max(self, arrays: list[Array]) -> list[Array]:
        return self.world(len(arrays)).run(collective, "all_reduce", arrays, "max")

    def reduce_scatter(self, arrays: list[Array], counts: list[int]) -> list[Array]:
        return self.world(len(arrays)).run(scattered, arrays, counts)

    def all_gather(self, arrays: list[Array]) -> list[Array]:
        return self.world(len(arrays)).run(gathered, arrays)

    def broadcast(self, arrays: list[Array], root: int) -> list[Array]:
        return self.world(len(arrays)).run(collective, "broadcast", arrays, root)

    def all_to_all(self, arrays: list[Array]) -> list[Array]:
        return self.world(len(arrays)).run(collective, "all_to_all", arrays)

    def column_linear(self, *shares: list[Array]) -> Any:
        return tuple(zip(*self.world(len(shares[0])).run(linear, 1, shares), strict=True))

    def row_linear(self, *shares: list[Array]) -> Any:
        return tuple(zip(*self.world(len(shares[0])).run(linear, 0, shares), strict=True))

    def vocabulary_cross_entropy(self, *shares: list[Array]) -> Any:
        return tuple(zip(*self.world(len(shares[0])).run(cross_entropy, *shares), strict=True))

    def clip(self, gradients: list[dict[str, Array]], max_norm: float) -> Any:
        from refpar import optim

        squares = sum(optim.squared_norm(g["sharded"]) for g in gradients)
        norm = float(np.sqrt(squares + optim.squared_norm(gradients[0]["replicated"])))
        factor = optim.clip_factor(norm, max_norm)
        return [norm] * len(gradients), [{name: g * factor for name, g in own.items()} for own in gradients]

    def loss_scale(self, rule: Any, overflows: list[list[bool]]) -> Any:
        scale, good, history = rule.initial, 0, []
        for flags in zip(*overflows, strict=True):
            scale, good = next_scale(rule, scale, good, any(flags))
            history.append((scale, good))
        return [[s for s, _ in history]] * len(overflows), [[g for _, g in history]] * len(overflows)

    def checkpoint(self, x: Array, weight: Array, rate: float, seed: int, recompute: bool) -> Any:
        from refpar.nn.checkpoint import Checkpoint
        from refpar.nn.layer import Sequential

        layer: Any = Sequential(
            [Linear("l", (x.shape[1],), (weight.shape[1],), bias=False), ReLU(), Dropout("d", rate)]
        )
        layer = Checkpoint(layer) if recompute else layer
        params = {"l.weight": weight}
        y, saved = layer.forward(params, x, At(seed, 0, tuple(range(len(x)))))
        stream = Stream(layer.backward(params, saved, np.ones_like(y)))
        (dweight,) = (g for _, g in stream)
        return y, stream.dx, dweight

    def run(self, case: Any, layout: Any) -> Any:
        return hybrid.run(case, layout, world=self.world(layout.ranks))


class Mistaken(Own):
    """Trains with a mistake of the catalogue, and cuts the tail off sums."""

    name = "mistaken"

    def all_reduce(self, arrays: list[Array]) -> list[Array]:
        total = sum(x.reshape(-1) for x in arrays)
        tail = total.size // len(arrays) * len(arrays)
        return [np.concatenate([total[:tail], x.reshape(-1)[tail:]]).reshape(x.shape) for x in arrays]

    def run(self, case: Any, layout: Any) -> Any:
        return mistakes.run("divided_by_ranks_too", case, layout, world=self.world(layout.ranks))


class OnlySums:
    """One capability, as a plain function; its sum is in float64, whatever it is given."""

    name, version = "sums", "0.1"

    def all_reduce(self, arrays: list[Array]) -> list[Array]:
        return [np.sum(np.asarray(arrays, np.float64), axis=0).astype(arrays[0].dtype)] * len(arrays)


class OnRanks:
    """The same on the ranks of mpiexec: mpi4py's Allreduce, and its gather."""

    name = "mpi4py"
    in_place = False

    @spmd
    def all_reduce(self, array: Array) -> Array:
        from mpi4py import MPI

        total = np.empty(array.shape, array.dtype)
        MPI.COMM_WORLD.Allreduce(np.ascontiguousarray(array), total)
        return total


class Raises:
    """Ends in an error on one rank."""

    @spmd
    def all_reduce(self, array: Array) -> Array:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1 and array.size >= 3:
            raise ZeroDivisionError("three are too many")
        return MPI.COMM_WORLD.allreduce(array)


def scattered(comm: Communicator, arrays: list[Array], counts: list[int]) -> Array:
    return ring.reduce_scatter(comm, arrays[comm.rank], counts=counts)


def gathered(comm: Communicator, arrays: list[Array]) -> Array:
    return ring.all_gather(comm, arrays[comm.rank], counts=[len(x) for x in arrays])
