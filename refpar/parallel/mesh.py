"""Which rank is where: replica d, slice t and stage p of a layout, and the groups it talks to.

Ranks are numbered with tensor-parallel neighbours closest, because they talk most; then replicas; then
stages of the pipeline, which talk least. For ``dp=2, tp=2, pp=2``::

                     stage 0                     stage 1
                     t=0     t=1                 t=0     t=1
    replica d=0      rank 0  rank 1   ------>    rank 4  rank 5      tp: rows of this drawing
    replica d=1      rank 2  rank 3   ------>    rank 6  rank 7      dp: columns   pp: arrows

So the rank is ``(p * dp + d) * tp + t``, for any sizes: they need not be powers of two, nor divide anything. Groups
of up to three kinds meet in a rank: in rank 5 ``tp`` 4 5, ``dp`` 5 7 and ``pp`` 1 5. A fourth, ``tied``, joins the
stages that hold one weight together: the first and the last, where embedding and head share theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refpar.case import Layout
from refpar.comm.communicator import Communicator
from refpar.nn.layer import ParamSpec
from refpar.nn.models import Model
from refpar.parallel import schedule, tensor


def place(layout: Layout, rank: int) -> tuple[int, int, int]:
    """Return replica, slice and stage ``(d, t, p)`` of a rank."""
    rest, t = divmod(rank, layout.tp)
    p, d = divmod(rest, layout.dp)
    return d, t, p


def stages_of(layout: Layout, model: Model) -> tuple[range, ...]:
    """Return the numbers of the units of each stage."""
    return schedule.stages_of(len(model.units), layout.stages or layout.pp)


def holders(layout: Layout, model: Model) -> dict[str, list[int]]:
    """Return the stages that hold each name: more than one where it is tied."""
    stages = stages_of(layout, model)
    return {
        name: [p for p, numbers in enumerate(stages) if any(name in model.units[i][1].specs for i in numbers)]
        for name in model.specs
    }


def check(layout: Layout, model: Model) -> None:
    """Refuse a layout that cannot run ``model``, before anything is started.

    Raises
    ------
    ValueError
        With the reason: more stages than units, more slices than heads.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout is {layout!r}: it must be a refpar.Layout, such as Layout(dp=2)")
    if layout.pp > len(model.units):
        raise ValueError(
            f"pp is {layout.pp}: the model has {len(model.units)} units, and every stage needs at least one"
        )
    stages_of(layout, model)
    tensor.check(model.units, layout.tp)


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the groups it talks to.

    Attributes
    ----------
    layout, specs : what is split, and how
    world : all ranks
    dp : ranks that hold the same part of the model and work on other rows
    tp : ranks that hold other slices of the same units
    pp : ranks that hold other units, in order
    units : numbers of the units of this rank's stage
    tied : for each name that several stages hold, those stages; None where this one is not among them
    """

    layout: Layout
    specs: Mapping[str, ParamSpec]
    world: Communicator
    dp: Communicator
    tp: Communicator
    pp: Communicator
    units: range
    tied: Mapping[str, Communicator | None]

    @classmethod
    def of(cls, world: Communicator, layout: Layout, model: Model) -> Mesh:
        """Split ``world`` into the groups of ``layout``; what that sends belongs to no step."""
        check(layout, model)
        if world.size != layout.ranks:
            raise ValueError(f"layout {layout} needs {layout.ranks} ranks: there are {world.size}")
        d, t, p = place(layout, world.rank)
        dp = world.split(p * layout.tp + t, d, name="dp")
        tp = world.split(p * layout.dp + d, t, name="tp")
        pp = world.split(d * layout.tp + t, p, name="pp")
        tied = {
            name: pp.split(0 if p in stages else None, p, name="tied")
            for name, stages in holders(layout, model).items()
            if len(stages) > 1
        }
        return cls(layout, model.specs, world, dp, tp, pp, stages_of(layout, model)[p], tied)

    def owner(self, name: str) -> bool:
        """Return whether this rank speaks for the elements it holds of ``name``, of all that hold the same ones.

        The first stage that holds a tied weight does; of the tensor-parallel ranks the first, where they all hold
        the whole; and of the replicas the first, unless ZeRO has given each elements of its own.
        """
        tied = self.tied.get(name)
        first_stage = tied is None or tied.rank == 0
        first_slice = self.specs[name].axis is not None or self.tp.rank == 0
        first_replica = self.layout.zero > 0 or self.dp.rank == 0
        return first_stage and first_slice and first_replica
