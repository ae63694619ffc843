"""The two networks, an MLP and a GPT, as lists of units; and their initial values.

A *unit* is what the techniques handle as a whole: a pipeline stage is a slice of the list, ZeRO-3
gathers the parameters of one unit at a time, activation checkpointing recomputes one. For the GPT
(Radford et al. 2019; pre-norm, so the residual stream itself is never normalised)::

    embedding    token + position
    blocks.0     x + proj(attention(qkv(norm1(x)))),  then  x + down(gelu(up(norm2(x))))
    ...
    head         unembed(norm(x))

``axis`` in the specs says how tensor parallelism splits each weight (Shoeybi et al. 2019, section 3):
qkv and up by their outputs, proj and down by their inputs, embedding and head by the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from refpar import rng
from refpar.checks import fix, real, short, whole
from refpar.nn.layer import Layer, ParamSpec
from refpar.nn.layers import (
    GELU,
    Attention,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Position,
    ReLU,
    Residual,
    Sequential,
    Unembed,
)
from refpar.nn.loss import CrossEntropy, Loss, SquaredError

Units = Sequence[tuple[str, Layer]]


@dataclass(frozen=True)
class Model:
    """A network as a list of units, and the loss at its end."""

    units: tuple[tuple[str, Layer], ...]
    loss: Loss

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        """Every parameter once, in the order of first use: a tied weight is one name in two units."""
        return {name: spec for _, layer in self.units for name, spec in layer.specs.items()}

    @cached_property
    def network(self) -> Sequential:
        """All units, one after another: the model on one device."""
        return Sequential([layer for _, layer in self.units])


@dataclass(frozen=True)
class MLP:
    """Linear layers with ReLU between them, held to the squared error.

    The layers are column-parallel and row-parallel in turn, so that only every second one needs a
    reduction; the last of an odd number is not split.

    Attributes
    ----------
    widths : features of the input, of each hidden layer, and of the output
    init : "uniform", within 1/sqrt(inputs); or "integers", drawn from -1, 0 and 1: on integer inputs
        the whole network then computes without rounding, in any order
    """

    widths: tuple[int, ...]
    init: Literal["uniform", "integers"] = "uniform"

    def __post_init__(self) -> None:
        widths = tuple(self.widths) if isinstance(self.widths, Iterable) else ()
        if len(widths) < 2:
            raise ValueError(f"MLP widths is {short(self.widths)}: it must be those of input and output at least")
        object.__setattr__(self, "widths", tuple(whole(f"MLP widths[{i}]", n, 1) for i, n in enumerate(widths)))
        _one_of("init", self.init, ("uniform", "integers"))

    def build(self) -> Model:
        """Return the network as units, with names, shapes and initial values but no numbers yet."""
        layers = len(self.widths) - 1
        init = None if self.init == "uniform" else self.init
        units: list[tuple[str, Layer]] = []
        for i, (inputs, outputs) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            unpaired = i == layers - 1 and i % 2 == 0
            axis = None if unpaired else 1 - i % 2
            name = f"layers.{i}"
            linear = Linear(name, (inputs,), (outputs,), axis=axis, init=init)
            units.append((name, linear if i == layers - 1 else Sequential([linear, ReLU()])))
        return Model(tuple(units), SquaredError())


@dataclass(frozen=True)
class GPT:
    """A GPT-2 held to the token cross-entropy.

    Attributes
    ----------
    vocabulary, context, width, layers, heads : sizes; ``heads`` divides ``width``
    mlp_width : hidden features of the MLP; by default four times the width
    dropout : rate after the embedding, on the attention probabilities and at the end of each branch
    tied : whether embedding and head share one weight
    activation : of the MLP
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    mlp_width: int | None = None
    dropout: float = 0.0
    tied: bool = True
    activation: Literal["gelu", "relu"] = "gelu"

    def __post_init__(self) -> None:
        fix(self, whole, "vocabulary", "context", "width", "heads", least=1)
        fix(self, whole, "layers", least=0)
        fix(self, real, "dropout", below=1)
        if self.mlp_width is not None:
            fix(self, whole, "mlp_width", least=1)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, but {self.heads} does not divide {self.width}")
        _one_of("activation", self.activation, ("gelu", "relu"))

    def build(self) -> Model:
        """Return the network as units, with names, shapes and initial values but no numbers yet."""
        token = "embedding.token"
        embedding = Sequential(
            [
                Embedding(token, self.vocabulary, self.width),
                Position("embedding.position", self.context, self.width),
                *self._dropout("embedding.dropout"),
            ]
        )
        head = Sequential(
            [
                LayerNorm("head.norm", self.width),
                Unembed(f"{token}.weight" if self.tied else "head.weight", self.vocabulary, self.width),
            ]
        )
        blocks = [(f"blocks.{i}", self._block(f"blocks.{i}")) for i in range(self.layers)]
        return Model((("embedding", embedding), *blocks, ("head", head)), CrossEntropy())

    def _block(self, name: str) -> Layer:
        width, hidden, head_dim = self.width, self.mlp_width or 4 * self.width, self.width // self.heads
        # Each branch adds to the residual stream; GPT-2 keeps the sum of all from growing with depth.
        shrink = 1 / math.sqrt(2 * self.layers)
        attention: list[Layer] = [
            LayerNorm(f"{name}.norm1", width),
            Linear(f"{name}.attention.qkv", (width,), (3, self.heads, head_dim), axis=2),
            Attention(f"{name}.attention", (0, self.heads, self.heads), self.dropout),
            Linear(f"{name}.attention.proj", (self.heads, head_dim), (width,), axis=0, init=shrink / math.sqrt(width)),
            *self._dropout(f"{name}.attention.dropout"),
        ]
        mlp: list[Layer] = [
            LayerNorm(f"{name}.norm2", width),
            Linear(f"{name}.mlp.up", (width,), (hidden,), axis=1),
            GELU() if self.activation == "gelu" else ReLU(),
            Linear(f"{name}.mlp.down", (hidden,), (width,), axis=0, init=shrink / math.sqrt(hidden)),
            *self._dropout(f"{name}.mlp.dropout"),
        ]
        return Sequential([Residual(Sequential(attention)), Residual(Sequential(mlp))])

    def _dropout(self, name: str) -> list[Layer]:
        return [Dropout(name, self.dropout)] if self.dropout else []


def initial_value(seed: int, name: str, spec: ParamSpec, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the initial value of a *whole* parameter: a function of seed, name and shape alone.

    Drawn in float64 and rounded once to ``dtype``. A rank that holds a part cuts it out of the whole
    (drawing only the part would give other numbers for each split). Uniform, not normal: a normal
    needs a logarithm and a cosine, whose last bits differ between machines.
    """
    if spec.init == "zeros":
        return np.zeros(spec.shape, dtype)
    if spec.init == "ones":
        return np.ones(spec.shape, dtype)
    key = (seed, "init", name)
    if spec.init == "integers":
        return rng.integers(key, spec.shape, -1, 2).astype(dtype)
    if isinstance(spec.init, str):
        raise ValueError(f"init of {name} must be a number, 'zeros', 'ones' or 'integers', not {spec.init!r}")
    return ((2 * rng.uniform(key, spec.shape) - 1) * spec.init).astype(dtype)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
