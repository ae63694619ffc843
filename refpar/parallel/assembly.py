"""From what each rank computed to one trace.

A rank cuts out of its arrays the *pieces* that it speaks for (:meth:`refpar.parallel.mesh.Mesh.owner`), and brings
them home with the numbers that all ranks must agree on. :func:`collect` insists that they do agree, and that the
pieces of all ranks fill every array exactly once. 7 elements on 3 replicas::

                      rank 0          rank 1        rank 2
    data parallel     0 1 .. 6        none          none        all hold the same: the first speaks
    ZeRO              0 1 2           3 4           5 6         each speaks for what it owns

That they do hold the same is compared after every step: 8 bytes for each name, sent to observe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refpar.arrays import Array, to_host
from refpar.case import Case, HostArray, Layout, Step, Trace, gradient_order
from refpar.comm import ring
from refpar.parallel import placement
from refpar.parallel.mesh import Mesh
from refpar.parallel.pipeline import Stage
from refpar.parallel.placement import Piece
from refpar.precision import Outcome

DRIFTED = "replicas have drifted apart"
"""What a rank says that has found out."""


@dataclass
class RankStep:
    """One rank's share of a :class:`refpar.case.Step`: pieces instead of whole arrays."""

    count: int
    loss: float
    norm: float
    outcome: Outcome
    scale: float
    good: int
    t: int
    gradients: dict[str, Piece] = field(default_factory=dict)
    parameters: dict[str, Piece] = field(default_factory=dict)
    state: dict[str, dict[str, Piece]] = field(default_factory=dict)


@dataclass
class RankTrace:
    """What one rank brings home; its fields are entries of those of :class:`refpar.case.Trace`."""

    begun: int
    steps: list[RankStep] = field(default_factory=list)
    ledger: Any = None
    bytes_held: int = 0
    peak_bytes: int = 0
    peak_live: int = 0
    peak_gradients: int = 0
    peak_gathered: int = 0
    schedule: tuple[Any, ...] = ()

    def add(self, step: RankStep, stage: Stage) -> None:
        """Note what a step gave, and what its stage did and held."""
        self.steps.append(step)
        self.schedule = tuple(stage.executed)
        self.peak_bytes = max(self.peak_bytes, stage.peak_bytes)
        self.peak_live = max(self.peak_live, stage.peak_live)


@dataclass(frozen=True)
class Pieces:
    """Cuts out of this rank's arrays what it speaks for.

    Attributes
    ----------
    store : says which elements of a name this rank updates
    """

    mesh: Mesh
    store: Any

    def __call__(self, name: str, x: Array) -> Piece:
        """Return the global flat positions, and the values there, of the elements of ``name`` this rank owns."""
        if not self.mesh.owner(name):
            return np.empty(0, np.int64), np.empty(0, x.dtype)
        held = placement.positions(self.mesh.specs[name], self.mesh.tp.size, self.mesh.tp.rank)
        r = self.store.positions(name)
        return held[r.start : r.stop], np.array(to_host(x)).reshape(-1)

    def of(self, arrays: Mapping[str, Array]) -> dict[str, Piece]:
        """Return the pieces of several names."""
        return {name: self(name, x) for name, x in arrays.items()}

    def of_state(
        self, state: Mapping[str, Mapping[str, Array]], masters: Mapping[str, Array]
    ) -> dict[str, dict[str, Piece]]:
        """Return the pieces of what the optimizer keeps, and of master weights where there are any."""
        return {
            name: {buffer: self(name, x) for buffer, x in own.items()}
            | ({"master": self(name, masters[name])} if name in masters else {})
            for name, own in state.items()
        }


def collect(case: Case, layout: Layout, parts: Sequence[RankTrace]) -> Trace:
    """Put the pieces of all ranks together; every element is written exactly once.

    Steps of which only the numbers were kept have no arrays.

    Raises
    ------
    AssertionError
        Where ranks disagree, or an element is written twice or not at all.
    """
    model = case.model.build()
    order = gradient_order(model.units)
    steps = []
    for ranks in zip(*(part.steps for part in parts), strict=True):
        check_agreement(ranks)
        first = ranks[0]
        step = Step(first.count, first.loss, {}, first.norm, first.outcome, first.scale, first.good, first.t, {}, {})
        if any(r.parameters for r in ranks):
            shapes = {name: spec.shape for name, spec in model.specs.items()}
            gradients = whole(shapes, (r.gradients for r in ranks))
            step.gradients = {name: gradients[name] for name in order if name in gradients}
            step.parameters = whole(shapes, (r.parameters for r in ranks))
            step.state = {name: {} for name in shapes}
            for buffer in dict.fromkeys(b for r in ranks for own in r.state.values() for b in own):
                of_buffer = ({n: own[buffer] for n, own in r.state.items() if buffer in own} for r in ranks)
                for name, x in whole(shapes, of_buffer).items():
                    step.state[name][buffer] = x
        steps.append(step)
    return Trace(
        case,
        layout,
        steps,
        ledgers=[part.ledger for part in parts],
        bytes_held=[part.bytes_held for part in parts],
        peak_bytes=[part.peak_bytes for part in parts],
        peak_live=[part.peak_live for part in parts],
        schedule=[part.schedule for part in parts],
        begun=parts[0].begun,
        peak_gradients=[part.peak_gradients for part in parts],
        peak_gathered=[part.peak_gathered for part in parts],
    )


def whole(shapes: Mapping[str, tuple[int, ...]], pieces: Iterable[Mapping[str, Piece]]) -> dict[str, HostArray]:
    """Return the arrays that the pieces of all ranks make up, names in the order of ``shapes``."""
    merged = placement.merge(pieces)
    return {name: placement.assemble(shape, merged[name]) for name, shape in shapes.items() if name in merged}


def check_agreement(ranks: Sequence[RankStep]) -> None:
    """Raise where ranks report different numbers of what they have agreed on, to the last bit."""
    agreed = {repr((r.count, r.loss, r.norm, r.outcome, r.scale, r.good, r.t)) for r in ranks}  # repr: NaN is NaN
    if len(agreed) > 1:
        raise AssertionError(f"ranks disagree on (count, loss, norm, outcome, scale, good, t): {sorted(agreed)}")


def check_replicas(mesh: Mesh, weights: Mapping[str, Array]) -> None:
    """Raise where ranks that hold the same weights do not hold the same bits.

    Parameters
    ----------
    weights : all that this rank holds, whole where replicas hold the same
    """
    replicated = [name for name in weights if mesh.specs[name].axis is None]
    groups = [(mesh.tp, replicated), *((group, [name]) for name, group in mesh.tied.items() if group is not None)]
    if mesh.layout.zero < 3:
        groups.append((mesh.dp, list(weights)))
    with mesh.world.ledger.observing():
        for group, names in groups:
            digests = np.array([digest(weights[name]) for name in names], np.int64)
            for rank, other in enumerate(ring.all_gather(group, digests)):
                if (digests != other).any():
                    name = names[int(np.argmax(digests != other))]
                    raise AssertionError(
                        f"{name} differs between ranks {group.rank} and {rank} of group {group.name}: {DRIFTED}"
                    )


def digest(x: Array) -> int:
    """Return 8 bytes that stand for all bytes of ``x``."""
    host = np.ascontiguousarray(to_host(x))
    return int.from_bytes(hashlib.blake2b(host.tobytes(), digest_size=8).digest(), signed=True)
