"""The lines of everything that belongs to parameters: the copies there are, whole or owned, and what is on its way.

::

                     weights   gradients              optimizer   on their way
    ZeRO 0           whole     whole                  whole       a gradient from its layer to the main gradients
    ZeRO 1           whole     whole                  owned       the same
    ZeRO 2           whole     owned                  owned       gradients that wait for their owners
    ZeRO 3           owned     owned                  owned       the same, and the weights of the unit at work

What is owned are the elements that one of the ``dp x cp`` replicas updates (``zero.py``). Buckets of ZeRO 0 and 1 are
views of the gradients in the frameworks, and copies in refpar, whose ZeRO 2 hands gradients over by the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refpar import split
from refpar.parallel import data
from refpar.plan.ledger import ALWAYS, Line
from refpar.plan.models import Bare, Model
from refpar.plan.recipes import Recipe
from refpar.plan.segments import Segment, pattern_of, segments
from refpar.plan.setups import Place, Setup, units_of
from refpar.plan.tensors import Grid, Network, Tensor, Unit


def states(net: Network, model: Model, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the lines of everything that belongs to parameters."""
    units, N = units_of(net, setup, place.p), setup.sharing
    grid = Grid(0, 0, setup.tp, place.t)
    for pattern, tensor, copies in shared_names(units):
        shape = tensor.local(grid)
        owned = (len(split.part(math.prod(shape), N, place.d)),)
        by_tp = [f"tp {setup.tp}"] if setup.tp > 1 and tensor.axis is not None else []
        for_whole = ", ".join(by_tp) or "whole"
        for_owned = ", ".join([*by_tp, f"dp {N}"])

        def line(
            part: str, name: str, dtype: str, mine: bool, shape: tuple[int, ...] = shape,
            owned: tuple[int, ...] = owned, pattern: str = pattern, copies: int = copies,
            words: tuple[str, str] = (for_whole, for_owned),
        ) -> Line:  # fmt: skip
            return Line(part, pattern, name, owned if mine else shape, dtype, copies, words[mine], "always", ALWAYS)

        yield line("weights", "weights", recipe.weights, setup.zero == 3)
        for name, dtype in recipe.gradients.items():
            yield line("gradients", name, dtype, setup.zero >= 2)
        for name, dtype in recipe.optimizer.items():
            yield line("optimizer", name, dtype, setup.zero >= 1)
        if recipe.overhead:
            scales = round((math.prod(owned) if setup.zero else math.prod(shape)) * recipe.overhead)
            yield Line("optimizer", pattern, "scales", (scales,), "int8", copies, "as m and v", "always", ALWAYS)
    travels = N > 1 or (setup.accounting == "refpar" and setup.zero >= 2)
    if travels and not isinstance(model, Bare):  # of a bare number of parameters no unit is known
        yield from buffers(net, units, setup, recipe, place)


def buffers(net: Network, units: Sequence[Unit], setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield what is there only on its way from rank to rank."""
    sizes, groups = local_sizes(units, setup, place), handled(units, net, setup)
    of_groups = [sum(sizes[name] for name in group) for group in groups]
    if setup.zero <= 1 and setup.accounting != "refpar":
        return  # buckets are views of the gradients, which are there already
    if setup.zero <= 1:
        most = max((sum(sizes[name] for name in group) for group in gradient_buckets(groups, sizes, setup)), default=0)
        yield Line("buffers", "bucket of gradients", "", (most,), recipe.travels, 1, "whole", "while it is reduced",
                   ("backward",))  # fmt: skip
        return
    most = max(of_groups)
    if setup.accounting != "refpar":  # which waits until the unit is done, however large
        most = max(largest_pending([sizes[name] for name in reversed(group)], setup.bucket) for group in groups)
    yield Line("buffers", "gradients not yet with their owners", "", (most,), recipe.travels, 1, "whole",
               "backward pass of a unit", ("backward",))  # fmt: skip
    if setup.zero == 3:
        most = max(sum(of_groups[i : i + 1 + setup.prefetch]) for i in range(len(groups)))
        what = "weights of the unit at work" + (f" and of {setup.prefetch} ahead" if setup.prefetch else "")
        yield Line(
            "buffers", what, "", (most,), recipe.weights, 1, "whole", "while the unit runs", ("forward", "backward")
        )


def shared_names(units: Sequence[Unit]) -> list[tuple[str, Tensor, int]]:
    """Return the parameters of a stage by pattern, with how many of each: blocks have the same ones."""
    counted: dict[tuple[str, Tensor], int] = {}
    first: dict[str, None] = {}
    for unit in units:
        for tensor in unit.kind.parameters:
            if "*" not in tensor.name and tensor.name in first:
                continue  # a tied weight, held once
            first[unit.parameter(tensor)] = None
            key = tensor.name.replace("*", pattern_of(unit)), tensor
            counted[key] = counted.get(key, 0) + 1
    return [(pattern, tensor, copies) for (pattern, tensor), copies in counted.items()]


def local_sizes(units: Sequence[Unit], setup: Setup, place: Place) -> dict[str, int]:
    """Return the elements this rank holds, or would hold, of each parameter of its stage."""
    grid = Grid(0, 0, setup.tp, place.t)
    known: dict[Tensor, int] = {}
    sizes = {}
    for unit in units:
        for tensor in unit.kind.parameters:
            if tensor not in known:
                known[tensor] = tensor.elements(grid)
            sizes[unit.parameter(tensor)] = known[tensor]
    return sizes


def handled(units: Sequence[Unit], net: Network, setup: Setup) -> list[dict[str, Tensor]]:
    """Return the parameters that gather, and arrive, together: those of a unit; in refpar, of a segment."""
    if setup.accounting != "refpar":
        return [unit.parameters for unit in units]
    return [
        {name: tensor for unit in segment.units for name, tensor in unit.parameters.items()}
        for segment in segments(units, net, setup)
    ]


def gradient_buckets(groups: Sequence[dict[str, Tensor]], sizes: dict[str, int], setup: Setup) -> list[list[str]]:
    """Return the names that are reduced together, in the order in which they become final."""
    layers: Any = [("", Specs(group)) for group in groups]
    if setup.zero == 0:
        return data.bucketed(layers, sizes, setup.bucket)
    return data.buckets((name for names in data.final_names(layers) for name in names), sizes, setup.bucket)


@dataclass(frozen=True)
class Specs:
    """What :mod:`refpar.parallel` wants to know of a layer: its parameters, and along which axis they are split."""

    specs: dict[str, Tensor]


def largest_pending(sizes: Iterable[int], bucket: int) -> int:
    """Return the most elements that wait at once, where a bucket is emptied before it would overflow."""
    waiting = most = 0
    for n in sizes:
        waiting = n if waiting and waiting + n > bucket else waiting + n
        most = max(most, waiting)
    return most


def leaving(segment: Segment, setup: Setup, recipe: Recipe, place: Place) -> Iterator[Line]:
    """Yield the largest weight gradient of a segment, as it leaves its layer in the type of activations, and as it is
    cast to that of the gradients to which it is added. From ZeRO 2 on that is among what waits for its owners."""
    if setup.accounting == "refpar" or setup.zero >= 2 or segment.units[0].kind.name == "model":
        return
    grid = Grid(0, 0, setup.tp, place.t)
    tensors = [(pattern_of(unit), tensor) for unit in segment.units for tensor in unit.kind.parameters]
    pattern, tensor = max(tensors, key=lambda entry: entry[1].elements(grid))
    for dtype in dict.fromkeys((recipe.activations, recipe.travels)):
        yield Line("buffers", f"{tensor.name.replace('*', pattern)}: its gradient", "", tensor.local(grid), dtype, 1,
                   f"tp {setup.tp}" if setup.tp > 1 and tensor.axis is not None else "whole",
                   "from the layer to the main gradients", ("backward",))  # fmt: skip
