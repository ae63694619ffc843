"""What a network consists of, for the planner: tensors, in units of a few kinds.

Everything is a :class:`Tensor`, a name with a shape: a parameter, an activation that is kept for the
backward pass, and also a matrix product, which is the box of its multiply-adds (rows x inputs x outputs).
In shapes ``"b"`` stands for the rows of a micro-batch and ``"s"`` for the tokens of a row; ``axis`` is the
one that tensor parallelism splits. Splits are near-even, the first parts one longer, as everywhere here.
Blocks share their tensors, which are told apart by identity: 128 blocks are weighed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from refpar import split


@dataclass(frozen=True)
class Grid:
    """Which part of a tensor a rank sees: micro-batch rows, tokens of a row, and its tensor-parallel place."""

    rows: int
    tokens: int
    tp: int = 1
    t: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True, eq=False)
class Tensor:
    """A name and a shape.

    Attributes
    ----------
    name : with ``*`` for the name of its unit
    shape : of numbers, ``"b"`` and ``"s"``
    axis : what tensor parallelism splits; None where every rank has it whole
    dtype : a type; or ``"activation"``, the type of activations; ``"sum"``, that of its accumulator
    sequence : whether sequence parallelism splits it along its tokens
    core : whether selective recomputation drops it and computes it again
    short : what to do where there are fewer heads than ranks: hold one whole (keys and values)
    parallel : whether it exists only under tensor parallelism
    """

    name: str
    shape: tuple[int | str, ...]
    axis: int | None = None
    dtype: str = ""
    sequence: bool = False
    core: bool = False
    short: bool = False
    parallel: bool = False

    @cached_property
    def whole(self) -> Tensor:
        """The same, whole on every rank, sequence-parallel or not."""
        return replace(self, sequence=False)

    def local(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape as one rank has it."""
        sizes = [{"b": grid.rows, "s": grid.tokens}[n] if isinstance(n, str) else n for n in self.shape]
        axis = self.axis
        if axis is None and self.sequence and grid.sequence_parallel:
            axis = self.shape.index("s")
        if axis is not None:
            own = len(split.part(sizes[axis], grid.tp, grid.t))
            sizes[axis] = max(own, 1) if self.short else own
        return tuple(sizes)

    def elements(self, grid: Grid) -> int:
        """Return how many elements, or multiply-adds, one rank has."""
        return 0 if self.parallel and grid.tp == 1 else math.prod(self.local(grid))


@dataclass(frozen=True, eq=False)
class Kind:
    """What units of one kind have in common.

    Attributes
    ----------
    name : ``"embedding"``, ``"block"``, ``"head"``, ...
    parameters : in the order in which the forward pass meets them
    input : the activation that comes in, and is kept; None for token numbers
    kept : what is kept beside it until the unit has run backward
    products : matrix products of the forward pass; each is two in the backward pass
    forward_sums, backward_sums : what tensor-parallel ranks sum up in each direction
    """

    name: str
    parameters: tuple[Tensor, ...]
    input: Tensor | None
    kept: tuple[Tensor, ...]
    products: tuple[Tensor, ...] = ()
    forward_sums: tuple[Tensor, ...] = ()
    backward_sums: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit: what pipeline stages, ZeRO-3 and recomputation handle as a whole."""

    name: str
    kind: Kind

    def parameter(self, tensor: Tensor) -> str:
        """Return the full name of one of its parameters."""
        return tensor.name.replace("*", self.name)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All of them by full name, in forward order."""
        return {self.parameter(tensor): tensor for tensor in self.kind.parameters}


@dataclass(frozen=True, eq=False)
class Network:
    """Units in order, and what the loss keeps, and sums over tensor-parallel ranks."""

    units: tuple[Unit, ...]
    loss_kept: tuple[Tensor, ...]
    loss_sums: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter once: a tied weight is one name in two units."""
        return {name: tensor for unit in self.units for name, tensor in unit.parameters.items()}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(map(int, tensor.shape)) for tensor in self.parameters.values())
