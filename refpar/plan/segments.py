"""What a stage is cut into for recomputation, and what each part keeps: its input, or everything.

Selective recomputation drops the attention core of every block (Korthikanti et al. 2022, section 5); full
recomputation drops all but the input of a segment of blocks (Chen et al. 2016; ``checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refpar.nn.checkpoint import segment_length
from refpar.plan.setups import Setup
from refpar.plan.tensors import Network, Tensor, Unit


@dataclass(frozen=True)
class Segment:
    """Neighbouring units that are run, and recomputed, together."""

    units: tuple[Unit, ...]
    wrapped: bool


def segments(units: Sequence[Unit], net: Network, setup: Setup) -> list[Segment]:
    """Return the segments of a stage; the model's first and last unit are not recomputed (``checkpoint.py``)."""
    if setup.recompute in ("none", "selective"):
        return [Segment((unit,), False) for unit in units]
    keep = {net.units[0].name, net.units[-1].name}
    inner = [unit for unit in units if unit.name not in keep]
    k = segment_length(setup.recompute, len(inner))
    groups = [Segment(tuple(inner[i : i + k]), True) for i in range(0, len(inner), k)]
    before = [Segment((unit,), False) for unit in units[:1] if unit.name in keep]
    after = [Segment((unit,), False) for unit in units[1:] if unit.name in keep]
    return [*before, *groups, *after]


Entry = tuple[str, Tensor]
"""The pattern of a unit's name, and what is kept of it."""


def stored(segment: Segment, setup: Setup) -> list[Entry]:
    """Return what a segment keeps from its forward pass on."""
    first = segment.units[0]
    entries = own(first, setup) if not segment.wrapped else []
    if first.kind.input is not None:
        x = first.kind.input
        if segment.wrapped and setup.accounting != "refpar":
            x = x.whole
        entries = [(pattern_of(first), x), *entries]
    return entries


def own(unit: Unit, setup: Setup) -> list[Entry]:
    """Return what a unit keeps beside its input."""
    dropped = setup.recompute == "selective"
    return [(pattern_of(unit), tensor) for tensor in unit.kind.kept if not (tensor.core and dropped)]


def recomputed(segment: Segment, after: Tensor | None, setup: Setup) -> list[Entry]:
    """Return what is there in addition while a segment runs backward."""
    if segment.wrapped:
        inner = [(pattern_of(unit), unit.kind.input) for unit in segment.units[1:] if unit.kind.input is not None]
        entries = inner + [entry for unit in segment.units for entry in own(unit, setup)]
        if setup.accounting == "refpar" and after is not None:  # the output, for comparison
            entries.append((pattern_of(segment.units[-1]), after))
        return entries
    if setup.recompute == "selective":
        return [(pattern_of(unit), t) for unit in segment.units for t in unit.kind.kept if t.core]
    return []


def pattern_of(unit: Unit) -> str:
    """Return ``blocks.*`` for a block, and the name of any other unit."""
    return "blocks.*" if unit.kind.name == "block" else unit.name
