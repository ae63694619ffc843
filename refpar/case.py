"""What to compute, how it is split, and what came out.

A :class:`Case` is a complete problem: whoever has it can compute the answer without asking anything
more. A :class:`Layout` says how the work is spread over ranks and changes nothing in the answer. A
:class:`Trace` is the answer, step by step, in the order in which one thing causes the next.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from refpar import rng
from refpar.nn.checkpoint import segment_length
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.precision import Precision

HostArray = npt.NDArray[Any]
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Batch:
    """The rows of one step.

    Attributes
    ----------
    inputs : ``(rows, sequence)`` token numbers, or ``(rows, width)`` numbers
    targets : ``(rows, sequence)`` token numbers, or ``(rows, width)`` numbers
    mask : bool, ``(rows, sequence)`` or ``(rows,)``: which targets count
    """

    inputs: HostArray
    targets: HostArray
    mask: HostArray

    def __post_init__(self) -> None:
        if not len(self.inputs) == len(self.targets) == len(self.mask):
            lengths = len(self.inputs), len(self.targets), len(self.mask)
            raise ValueError(f"a Batch has inputs, targets and mask of {lengths} rows: they must be equally many")
        if self.mask.dtype != bool:
            raise ValueError(f"a Batch has a mask of {self.mask.dtype}: it must be bool, True where a target counts")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: Sequence[int] | HostArray) -> Batch:
        """Return the named rows."""
        index = np.asarray(rows, dtype=np.intp)
        return Batch(self.inputs[index], self.targets[index], self.mask[index])

    def on(self, xp: ModuleType, dtype: str) -> Batch:
        """Return the batch as arrays of ``xp``, numbers that are not token numbers in ``dtype``."""
        inputs, targets = (x if x.dtype.kind == "i" else x.astype(dtype) for x in (self.inputs, self.targets))
        return Batch(xp.asarray(inputs), xp.asarray(targets), xp.asarray(self.mask))


@dataclass(frozen=True)
class Case:
    """A complete problem.

    Attributes
    ----------
    model : what is trained
    optimizer : how it is updated
    batches : one a step, all rows of all ranks
    precision : the types
    clip : largest allowed global norm of the gradients, None for no clipping
    divide : where the token count divides: ``"before"`` the backward pass starts, or ``"after"`` the
        gradients are summed, which keeps integers exact. See :func:`refpar.nn.loss.seed_and_divisor`.
    seed : of initial values and dropout
    """

    model: GPT | MLP
    optimizer: SGD | Adam | AdamW
    batches: tuple[Batch, ...]
    precision: Precision = field(default_factory=Precision)
    clip: float | None = None
    divide: Literal["before", "after"] = "before"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.divide not in ("before", "after"):
            raise ValueError(f"Case divide is {self.divide!r}: it must be 'before' or 'after'")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"Case clip is {self.clip}: it must be positive, or None for no clipping")
        object.__setattr__(self, "batches", tuple(self.batches))


@dataclass(frozen=True)
class Layout:
    """How a case is split. ``dp * tp * pp`` ranks.

    Attributes
    ----------
    dp : replicas of the model, each with its own rows (data parallel)
    tp : slices of each layer (tensor parallel)
    pp : stages of the list of units (pipeline)
    zero : what replicas do not keep twice: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    micro_batches : parts in which a replica takes its rows, one after the other
    schedule : order of forward and backward passes, ``"1f1b"`` or ``"gpipe"``
    recompute : activation checkpointing: ``"none"``, ``"block"``, ``"sqrt"``, or a number of blocks
    bucket : elements that are gathered up before gradients are reduced together
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    bucket: int = 1 << 18

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro_batches", "bucket"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Layout {name} is {value!r}: it must be a whole number of at least 1")
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise ValueError(f"Layout zero is {self.zero!r}: it must be 0, 1, 2 or 3")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Layout schedule is {self.schedule!r}: it must be one of {', '.join(SCHEDULES)}")
        segment_length(self.recompute, 1)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp=2,micro_batches=3"``; hyphens and underscores are the same."""
        types = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = part.partition("=")
            key = key.strip().replace("-", "_")
            if key not in types:
                near = difflib.get_close_matches(key, types, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(types)}"
                raise ValueError(f"layout key {key!r} is unknown: {hint}")
            if not equals:
                raise ValueError(f"layout {part!r} has no value: write {key}=VALUE")
            try:
                values[key] = types[key](value)
            except ValueError:
                raise ValueError(f"layout {key} is {value!r}: it must be a {types[key].__name__}") from None
        return cls(**values)

    def __str__(self) -> str:
        """``dp``, and what else differs from one device, such as ``dp=2,micro_batches=3``."""
        changed = [f for f in dataclasses.fields(self) if f.name == "dp" or getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed)


Outcome = Literal["updated", "overflow", "no tokens"]


@dataclass
class Step:
    """What one step computed. Arrays are whole, on the host, in the order given here.

    Attributes
    ----------
    count : tokens (or rows) that count, over all ranks
    loss : their mean loss; 0 where there are none
    gradients : by parameter, last layer first: divided by count and scale, not clipped
    norm : global norm of ``gradients``, before clipping
    outcome : ``"updated"``, or why nothing was updated
    scale, good : loss scale and its growth counter *after* the step
    t : updates made so far
    parameters : the weights that the next forward pass sees
    state : by parameter, then by buffer: the optimizer's, and ``master`` where weights are float16
    """

    count: int
    loss: float
    gradients: dict[str, HostArray]
    norm: float
    outcome: Outcome
    scale: float
    good: int
    t: int
    parameters: dict[str, HostArray]
    state: dict[str, dict[str, HostArray]]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(name, value)`` in causal order, names such as ``gradient/blocks.0.mlp.up.weight``."""
        yield "count", self.count
        yield "loss", self.loss
        yield from ((f"gradient/{name}", value) for name, value in self.gradients.items())
        yield "norm", self.norm
        yield "outcome", self.outcome
        yield "scale", self.scale
        yield "good", self.good
        yield "t", self.t
        for name, buffers in self.state.items():
            yield from ((f"state/{name}/{buffer}", value) for buffer, value in buffers.items())
        yield from ((f"parameter/{name}", value) for name, value in self.parameters.items())


@dataclass
class Trace:
    """What a run of a case computed, and what it took.

    Attributes
    ----------
    case, layout : what was run
    steps : one :class:`Step` a batch
    ledgers : by rank, what was sent; empty for one device
    bytes_held : by rank, bytes of arrays kept from step to step
    peak_bytes : by rank, largest bytes of activations kept for the backward pass
    """

    case: Case
    layout: Layout
    steps: list[Step]
    ledgers: list[Any] = field(default_factory=list)
    bytes_held: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


def gradient_order(units: Sequence[tuple[str, Any]]) -> list[str]:
    """Return parameter names in the order in which the backward pass reaches them first."""
    names: Mapping[str, None] = dict.fromkeys(name for _, layer in reversed(units) for name in reversed(layer.specs))
    return list(names)


def text_batches(data: bytes, *, steps: int, rows: int, context: int, seed: int = 0) -> tuple[Batch, ...]:
    """Cut batches of next-byte prediction out of real text.

    Row by row, a passage of ``context + 1`` bytes is chosen at random. The targets of the last part of some
    rows are masked, as the end of a document would be: ranks then have unequal numbers of tokens.

    Raises
    ------
    ValueError
        Where the text is shorter than one row.
    """
    text = np.frombuffer(data, np.uint8).astype(np.int64)
    if len(text) <= context:
        raise ValueError(f"the text has {len(text)} bytes: one row of {context} needs at least {context + 1}")
    batches = []
    for step in range(steps):
        starts = rng.integers((seed, "text", step), (rows,), 0, len(text) - context)
        ends = rng.integers((seed, "ends", step), (rows,), 1, 2 * context)  # half of them lie behind the row
        passages = text[starts[:, None] + np.arange(context + 1)]
        mask = np.arange(context) < ends[:, None]
        batches.append(Batch(passages[:, :-1], passages[:, 1:], mask))
    return tuple(batches)
