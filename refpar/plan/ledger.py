"""A ledger of memory: every byte is a named line, and a total is a sum of lines.

A line is alive at some of these moments; a rank peaks at one of them:

=========  =================================================================================================
forward    the last forward pass before the first backward pass: every micro-batch in flight is kept whole,
           the logits of one among them
backward   one micro-batch on its way back: without its logits, with what is recomputed for it, with
           gradients on their way
step       the optimizer's: no activations
between    steps: what is held for good
=========  =================================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from refpar.plan.setups import Place
from refpar.plan.units import size

PARTS = ("weights", "gradients", "optimizer", "buffers", "activations")
MOMENTS = ("forward", "backward", "step")
BETWEEN = "between"
ALWAYS = (*MOMENTS, BETWEEN)


@dataclass(frozen=True)
class Line:
    """One entry.

    Attributes
    ----------
    part : of :data:`PARTS`
    tensor : its name; ``blocks.*`` stands for each block of this stage
    copy : which of the tensor's copies: ``"master"``, ``"m"``, ...; empty for activations
    shape : of one copy, as this rank holds it
    dtype : of its elements
    copies : how many there are
    sharded : by what it is split, or ``"whole"``
    lifetime : in words
    alive : the moments at which it counts
    """

    part: str
    tensor: str
    copy: str
    shape: tuple[int, ...]
    dtype: str
    copies: int
    sharded: str
    lifetime: str
    alive: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return size(math.prod(self.shape), self.dtype) * self.copies


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds.

    Attributes
    ----------
    rank, place : which one
    lines : everything
    """

    rank: int
    place: Place
    lines: tuple[Line, ...] = field(repr=False)

    def at(self, moment: str, *parts: str) -> int:
        """Return the bytes alive at a moment, of the named parts or of all."""
        return sum(line.bytes for line in self.lines if moment in line.alive and (not parts or line.part in parts))

    @cached_property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(MOMENTS, key=self.at)

    @cached_property
    def peak(self) -> int:
        """Most bytes at once."""
        return self.at(self.moment)

    @property
    def held(self) -> int:
        """Bytes kept from step to step."""
        return self.at(BETWEEN)

    @property
    def states(self) -> int:
        """Bytes of weights, gradients and optimizer while gradients are accumulated."""
        return self.at("backward", "weights", "gradients", "optimizer")

    @property
    def activations(self) -> int:
        """Most bytes that layers keep for the backward pass at once."""
        return max(self.at(moment, "activations") for moment in MOMENTS)

    def parts(self, moment: str | None = None) -> dict[str, int]:
        """Return the bytes of each part at a moment, by default that of the peak."""
        return {part: self.at(moment or self.moment, part) for part in PARTS}
