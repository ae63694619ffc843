"""Networks of the tests of ZeRO, checkpointing and fp16 that no MLP and no GPT is. Ranks import them from here."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from refpar import split
from refpar.arrays import Array, total, widen
from refpar.case import Case, Layout
from refpar.comm import Communicator, ring
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec
from refpar.nn.layers import Linear, ReLU, Sequential
from refpar.nn.loss import SquaredError
from refpar.nn.models import MLP, Model
from refpar.parallel import hybrid, zero
from refpar.precision import Precision


@dataclass(frozen=True)
class Sometimes:
    """``y = x + weight`` for rows that start with a positive number: a parameter that a rank may have no row for."""

    name: str
    width: int

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": ParamSpec((self.width,), init=0.5)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        used = x[:, :1] > 0
        return x + used * params[f"{self.name}.weight"], used

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        if bool(saved.any()):
            yield f"{self.name}.weight", total(widen(dy) * saved, axis=0)
        return dy


@dataclass(frozen=True)
class Turned:
    """``y = x @ weight.T``, whose gradient leaves the layer in Fortran order."""

    name: str
    inputs: int
    outputs: int

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": ParamSpec((self.outputs, self.inputs), init=0.5)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return x @ params[f"{self.name}.weight"].T, x

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield f"{self.name}.weight", (saved.T @ dy).T
        return dy @ params[f"{self.name}.weight"]


@dataclass(frozen=True)
class Handed:
    """``y = x + weight``. Of a single row the gradient it yields is the very array it hands on."""

    name: str
    width: int

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": ParamSpec((1, self.width), init=0.5)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return x + params[f"{self.name}.weight"], None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield f"{self.name}.weight", dy if len(dy) == 1 else total(widen(dy), axis=0, keepdims=True)
        return dy


def sometimes() -> list[tuple[str, Layer]]:
    """A parameter that only some rows use, and one that none does."""
    never = Sequential([ReLU(), Linear("never", (4,), (4,)), ReLU()])
    return [
        ("first", Linear("first", (3,), (4,))),
        ("sometimes", Sequential([Sometimes("sometimes", 4), Linear("middle", (4,), (4,))])),
        ("never", Unused(never)),
        ("last", Linear("last", (4,), (2,))),
    ]


@dataclass(frozen=True)
class Unused:
    """A layer that is passed by."""

    layer: Layer

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return x, None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return dy


def twice() -> list[tuple[str, Layer]]:
    """A layer used twice in one unit, and once more in another."""
    shared = Linear("shared", (4,), (4,))
    return [
        ("first", Linear("first", (3,), (4,))),
        ("twice", Sequential([shared, ReLU(), shared, Linear("own", (4,), (4,)), ReLU()])),
        ("again", Sequential([shared, ReLU()])),
        ("last", Linear("last", (4,), (2,))),
    ]


def empty() -> list[tuple[str, Layer]]:
    """Parameters of no elements, a whole unit of them among others."""
    return [
        ("first", Linear("first", (3,), (0,))),
        ("nothing", Linear("nothing", (0,), (0,))),
        ("last", Linear("last", (0,), (2,))),
    ]


def turned() -> list[tuple[str, Layer]]:
    """Gradients in Fortran order."""
    return [("first", Turned("first", 3, 5)), ("relu", ReLU()), ("last", Turned("last", 5, 2))]


def handed() -> list[tuple[str, Layer]]:
    """Gradients that are handed on as the gradient of the input."""
    return [
        ("first", Linear("first", (3,), (4,))),
        ("handed", Sequential([Handed("handed", 4), ReLU(), Handed("other", 4)])),
        ("last", Linear("last", (4,), (2,))),
    ]


NETWORKS: dict[str, Callable[[], list[tuple[str, Layer]]]] = {
    f.__name__: f for f in (sometimes, twice, empty, turned, handed)
}


@dataclass(frozen=True)
class Network(MLP):
    """One of ``NETWORKS``, from 3 numbers to 2, held to the squared error: to a case, it is an MLP."""

    widths: tuple[int, ...] = (3, 2)
    name: str = ""

    def build(self) -> Model:
        return Model(tuple(NETWORKS[self.name]()), SquaredError())


# What runs on the ranks


def outliving(comm: Communicator, case: Case, layout: Layout) -> set[int]:
    """Return how many gathered weights were alive at the moments when others were about to be gathered."""
    gather, gathered, alive = zero.Zero.gather, [], set()

    def watched(self: zero.Zero, names: list[str]) -> dict[str, object]:
        alive.add(sum(ref() is not None for ref in gathered))
        whole = gather(self, names)
        gathered.extend(weakref.ref(x) for x in whole.values())
        return whole

    zero.Zero.gather = watched
    try:
        hybrid.train(comm, case, layout)
    finally:
        zero.Zero.gather = gather
    return alive


def published(comm: Communicator, model: MLP, bucket: int, stage: int, seed: int) -> bool:
    """Write distinct numbers into the masters, publish, and compare every gathered weight with them."""
    built = model.build()
    sizes = {name: math.prod(spec.shape) for name, spec in built.specs.items()}
    start = dict(zip(sizes, split.ranges(list(sizes.values())), strict=True))
    whole = {name: np.array(r, float).reshape(built.specs[name].shape) for name, r in start.items()}
    store = zero.Zero(
        comm, built.units, {name: np.full_like(x, np.nan) for name, x in whole.items()}, Precision(), bucket, stage
    )
    for name, master in store.masters.items():
        master[...] = store.own(name, whole[name])
    store.publish()
    gathered = store.gather(list(whole))
    kept = gathered if stage == 3 else store.weights
    return all(np.array_equal(gathered[name], x) and np.array_equal(kept[name], x) for name, x in whole.items())


def write_to_gathered(comm: Communicator) -> None:
    built = MLP((2, 2)).build()
    initial = {name: np.ones(spec.shape) for name, spec in built.specs.items()}
    store = zero.Zero(comm, built.units, initial, Precision(), 8, 3)
    store.units[0][1].gather()["layers.0.weight"][...] = 1


def both_sums(comm: Communicator, values: list[list[float]]) -> tuple[Any, Any]:
    """Return the sum over ranks with partial sums in float32, and in float16."""
    mine = np.array(values[comm.rank], np.float16)
    with np.errstate(over="ignore"):
        return ring.all_reduce(comm, mine), ring.all_reduce(comm, mine, accumulate=np.float16)
