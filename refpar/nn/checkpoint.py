"""Activation checkpointing: keep a layer's input, and run it again when its gradient is wanted.

Each of L equal blocks is given A bytes of input, hands on as many, and keeps B bytes for its backward
pass, the input among them: L B + A in all, with the last output, until the loss is known. Chen et al.
2016 ("Training deep nets with sublinear memory cost", section 4) keep only the input of a *segment* of
k blocks, drop the rest, and compute it again segment by segment on the way back::

    L = 6, k = 2     forward     [b0 b1] [b2 b3] [b4 b5]      kept: the inputs of b0, b2, b4
                     backward    run b4 b5 again, backward;   alive: one segment's activations at a time
                                 run b2 b3 again, backward;
                                 run b0 b1 again, backward

    kept     L/k inputs, and k blocks while they are recomputed: (L/k) A + k B bytes, where k divides L (the
             last segment is shorter where not). At B = 3 A that is 9 A here, and without it 19 A
    cost     one more forward of what is wrapped: a third of the step, when backward is twice forward;
             wrapped in one another, one more for each level
    sent     nothing, but by what is wrapped: under tensor parallelism its forward all-reduces once more

The best k is sqrt(L A/B): sqrt(L) where a block keeps as much as its input, and then 2 sqrt(L) A are kept.
A GPT block keeps 17 times as much and more (Korthikanti et al. 2022, section 4.1): then one block a segment
is best up to L = 2B/A, 34 blocks, which is why it is what most people do. :func:`trade` has the table.

The second forward repeats the bits of the first: its input is the same array, its parameters have
not changed, and its random numbers are addressed, not drawn (:mod:`refpar.rng`). So gradients are
bit-equal to those of a run without it, dropout included. A layer that is not deterministic would
silently give the gradient of another network; the repeated output is therefore compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from refpar.arrays import Array
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec, Sequential
from refpar.nn.models import Units


@dataclass(frozen=True)
class Checkpoint:
    """``layer``, keeping only its input. The output is kept too, for comparison; it is the next layer's input."""

    layer: Layer

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        y, _ = self.layer.forward(params, x, at)
        return y, [x, at, y]

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        x, at, y = saved
        again, recomputed = self.layer.forward(params, x, recompute_at(at))
        if not same(again, y):
            raise RuntimeError(
                f"{first_name(self)}: a recomputed output differs from the first one: the layer is not "
                "deterministic, and its gradient would be that of another network"
            )
        del again
        saved.append(recomputed)  # alive from here on, for whoever measures
        dx = yield from self.layer.backward(params, recomputed, dy)
        saved.pop()
        return dx


def recompute_at(at: At) -> At:
    """Return where the repeated forward pass stands: exactly where the first one stood, so that dropout repeats."""
    return at


def segments(units: Units, recompute: str, keep: Collection[str] | None = None) -> Units:
    """Return ``units`` rewritten to be recomputed, in segments of neighbours.

    Parameters
    ----------
    recompute : ``"none"``; ``"block"``, each unit by itself; a number k, segments of k units, the last one
        shorter where k does not divide (NVIDIA/Megatron-LM#3562); or ``"sqrt"``, k = ceil(sqrt(L))
    keep : names of units to leave as they are; by default the first and the last. Recomputing the last,
        whose backward pass follows at once, would save nothing. A pipeline stage names those of the model.
    """
    if keep is None:
        keep = {units[0][0], units[-1][0]}
    inner = [unit for unit in units if unit[0] not in keep]
    k = segment_length(recompute, len(inner))
    if k == 0:
        return units
    groups = [inner[i : i + k] for i in range(0, len(inner), k)]
    before = [unit for unit in units[:1] if unit[0] in keep]
    after = [unit for unit in units[1:] if unit[0] in keep]
    return [*before, *(segment(group) for group in groups), *after]


def segment(group: Units) -> tuple[str, Layer]:
    """Return neighbouring units as one that keeps only its input."""
    names, layers = zip(*group, strict=True)
    if len(layers) == 1:
        return names[0], Checkpoint(layers[0])
    return f"{names[0]}..{names[-1]}", Checkpoint(Sequential(layers))


def segment_length(recompute: str, blocks: int) -> int:
    """Return how many units a segment has, 0 for no recomputation.

    Raises
    ------
    ValueError
        Where ``recompute`` is none of the words and no positive whole number.
    """
    words = {"none": 0, "block": 1, "sqrt": max(1, math.ceil(math.sqrt(blocks)))}
    if recompute in words:
        return words[recompute]
    if recompute.isascii() and recompute.isdigit() and int(recompute) > 0:
        return int(recompute)
    raise ValueError(f"recompute is {recompute!r}: it must be none, block, sqrt or a number of blocks")


@dataclass(frozen=True)
class Trade:
    """What recomputing a stack of blocks in segments of ``k`` takes.

    Attributes
    ----------
    blocks, k : in the stack, and in a segment; k = 0 recomputes nothing
    bytes : of activations of the stack, its input and its output, alive at most
    again : blocks that run forward a second time
    step : work of the whole step, where without recomputation it is 1 and backward is twice forward
    """

    blocks: int
    k: int
    bytes: int
    again: int
    step: float


def trade(blocks: int, block: int, boundary: int) -> list[Trade]:
    """Return the trade of bytes for work in a stack of equal blocks: no recomputation first, then every ``k``.

    Parameters
    ----------
    blocks : in the stack
    block : bytes that one of them keeps for its backward pass, its input among them
    boundary : bytes of its input, which are those of its output
    """
    rows = [Trade(blocks, 0, blocks * block + boundary, 0, 1.0)]
    for k in range(1, blocks + 1):
        lengths = [min(k, blocks - i) for i in range(0, blocks, k)]
        # When segment j runs back, the inputs of those before it are there, its own, and its output.
        alive = max((j + 1) * boundary + length * block for j, length in enumerate(lengths))
        rows.append(Trade(blocks, k, alive, blocks, 4 / 3))
    return rows


def same(a: Array, b: Array) -> bool:
    """Return whether two arrays are equal everywhere, a NaN being equal to a NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def first_name(layer: Layer) -> str:
    """Return the name of the first parameter: what a layer can be recognised by."""
    return next(iter(layer.specs), "a layer without parameters")
