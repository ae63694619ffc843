"""What a layer is: a pure pair of functions.

``forward(params, x, at)`` returns ``(y, saved)``; ``backward(params, saved, dy)`` is a generator
that *yields* ``(name, gradient)`` as soon as a gradient is known and *returns* ``dx``. Parameters
are no property of a layer: they are handed in, by name, each time. So a layer cannot tell whether
its parameters are replicated, gathered a moment ago (ZeRO-3) or a slice (tensor parallel), and a
weight used in two places is one name that is yielded twice: whoever consumes the stream adds.

``saved`` is all that the layer keeps for its backward pass, and holds no parameter. Activation
memory is therefore its size, and activation checkpointing is a layer that keeps less.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from refpar.arrays import Array

Params = Mapping[str, Array]
Gradients = Generator[tuple[str, Array], None, Array]
"""Yields ``(name, gradient)``, returns the gradient of the input (None where the input is integers)."""


@dataclass(frozen=True)
class At:
    """Where a forward pass stands: all that randomness may depend on."""

    seed: int
    step: int
    rows: tuple[int, ...]
    """Global number of each row of the batch at hand."""
    train: bool = True
    """False in an evaluation: nothing is dropped out."""


@dataclass(frozen=True)
class ParamSpec:
    """What is known of a parameter before it has values.

    Attributes
    ----------
    shape : the global shape, whatever part of it a rank holds
    axis : the axis that tensor parallelism splits; None where every rank holds all of it
    decay : whether weight decay applies (it does not to biases and norms)
    init : half-width of the uniform distribution of initial values around 0, or one of the words
        ``"zeros"``, ``"ones"`` and ``"integers"`` (drawn from -1, 0 and 1)
    """

    shape: tuple[int, ...]
    axis: int | None = None
    decay: bool = True
    init: float | str = "zeros"


class Layer(Protocol):
    """See the module's docstring. ``specs`` maps full names, such as ``blocks.0.mlp.up.weight``."""

    @property
    def specs(self) -> Mapping[str, ParamSpec]: ...

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]: ...

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients: ...


class Sequential:
    """One layer after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.specs: Mapping[str, ParamSpec] = {
            name: spec for layer in self.layers for name, spec in layer.specs.items()
        }

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        saved = []
        for layer in self.layers:
            x, kept = layer.forward(params, x, at)
            saved.append(kept)
        return x, saved

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        for layer, kept in zip(reversed(self.layers), reversed(saved), strict=True):
            dy = yield from layer.backward(params, kept, dy)
        return dy


class Residual:
    """``y = x + layer(x)``."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.specs = layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        y, saved = self.layer.forward(params, x, at)
        return x + y, saved

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        dx = yield from self.layer.backward(params, saved, dy)
        return dx + dy


class Stream:
    """Iterate over the gradients of a backward pass; afterwards ``dx`` is the gradient of its input."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.dx: Array = None

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        self.dx = yield from self.gradients


def live_bytes(*saved: Any) -> int:
    """Return the bytes that ``saved`` keeps alive: each buffer once, however many layers refer to it."""
    return sum(buffer.nbytes for buffer in {id(b): b for b in _buffers(saved)}.values())


def _buffers(saved: Any) -> Iterator[Array]:
    if hasattr(saved, "nbytes"):
        while getattr(saved, "base", None) is not None and hasattr(saved.base, "nbytes"):
            saved = saved.base
        yield saved
    elif isinstance(saved, Mapping):
        yield from _buffers(tuple(saved.values()))
    elif isinstance(saved, Iterable) and not isinstance(saved, str):
        for part in saved:
            yield from _buffers(part)
