"""Networks of the tests of ZeRO, checkpointing and fp16 that no MLP and no GPT is. Ranks import them from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refpar.arrays import Array, total, widen
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec
from refpar.nn.layers import Linear, ReLU, Sequential
from refpar.nn.loss import SquaredError
from refpar.nn.models import Model


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
    """``y = x + weight``, for a single row: the gradient it yields is the very array it hands on."""

    name: str
    width: int

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": ParamSpec((1, self.width), init=0.5)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return x + params[f"{self.name}.weight"], None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        if len(dy) == 1:
            yield f"{self.name}.weight", dy
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
class Network:
    """One of ``NETWORKS``, from 3 numbers to 2, held to the squared error."""

    name: str
    widths: tuple[int, ...] = (3, 2)

    def build(self) -> Model:
        return Model(tuple(NETWORKS[self.name]()), SquaredError())
