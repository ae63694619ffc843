"""How a model is spread over devices, and which part of the work each rank has.

Ranks are numbered as in :mod:`refpar.parallel.hybrid`: tensor-parallel neighbours closest, then replicas,
then stages. Splits are near-even and the first parts are the longer ones, so in every stage the rank with
``t = d = 0`` is the most loaded one: it is enough to look at one rank a stage to find the worst of 10^5.

Devices are ``dp x tp x pp x cp``. Where they are not, somebody has slipped: one version of Llama 3's table 4 has
8 x 16 x 16 and DP 4 for 16,384 devices (it is 8). Megatron's guide multiplies by the expert-parallel size as well,
and its own DeepSeek-V3 row does not: experts are spread over replicas, and need no further devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from refpar import split
from refpar.case import SCHEDULES, Layout
from refpar.nn.checkpoint import segment_length
from refpar.parallel import schedule as schedules
from refpar.plan.models import ACCOUNTINGS, Accounting, Bare, Model, Transformer, network
from refpar.plan.tensors import Network, Unit


class Place(NamedTuple):
    """A rank's stage, replica and slice."""

    p: int
    d: int
    t: int


@dataclass(frozen=True)
class Setup:
    """A layout, and what else memory and time depend on.

    Attributes
    ----------
    dp, tp, pp : replicas, slices of each layer, stages
    cp : parts of each sequence (context parallel); gradients are summed, and ZeRO shards, over ``dp * cp``
    zero : ZeRO stage
    batch : rows of a step, over all replicas
    micro_batches : parts in which a replica takes its rows
    schedule : ``"1f1b"`` or ``"gpipe"``
    chunks : slices of the model on each stage; above 1, 1F1B is interleaved
    recompute : ``"none"``; ``"selective"``, the attention matrices; ``"full"`` or ``"block"``, each block;
        ``"sqrt"`` or a number, segments of so many blocks
    sequence_parallel : whether norms and dropouts are split along the sequence over the tp ranks
    stages : units of each stage, by hand; near-even by default
    bucket : elements of gradients that are gathered up before they are reduced together
    prefetch : units that ZeRO-3 gathers ahead of the one at work
    accounting, flash : what layers keep, see :mod:`refpar.plan.models`
    tokens : of a row; 0 for the model's context
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    batch: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    stages: tuple[int, ...] = ()
    bucket: int = 25_000_000
    prefetch: int = 0
    accounting: Accounting = "paper"
    flash: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "batch", "micro_batches", "chunks", "bucket"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero is {self.zero!r}: it must be 0, 1, 2 or 3")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}: it must be one of {', '.join(SCHEDULES)}")
        if self.accounting not in ACCOUNTINGS:
            raise ValueError(f"accounting is {self.accounting!r}: it must be one of {', '.join(ACCOUNTINGS)}")
        if self.recompute == "full":
            object.__setattr__(self, "recompute", "block")
        if self.recompute != "selective":
            segment_length(self.recompute, 1)
        if self.chunks > 1 and (self.schedule != "1f1b" or self.micro_batches % self.pp):
            raise ValueError(
                f"chunks is {self.chunks}: interleaving is of 1F1B, and needs micro_batches, {self.micro_batches}, "
                f"to be a multiple of pp, {self.pp}"
            )

    @classmethod
    def of(cls, layout: Layout, batch: int, tokens: int) -> Setup:
        """Return what refpar itself does for a batch of so many rows."""
        return cls(layout.dp, layout.tp, layout.pp, 1, layout.zero, batch, layout.micro_batches, layout.schedule,
                   recompute=layout.recompute, stages=layout.stages, bucket=layout.bucket,
                   accounting="refpar", tokens=tokens)  # fmt: skip

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sharing(self) -> int:
        """Ranks that hold the same parameters and sum their gradients, over which ZeRO shards."""
        return self.dp * self.cp

    @property
    def largest_micro_batch(self) -> int:
        """Rows of the largest micro-batch."""
        return self.rows(0, 0)

    def rows(self, d: int, m: int) -> int:
        """Return the rows of micro-batch ``m`` of replica ``d``."""
        mine = len(split.part(self.batch, self.dp, d // self.cp))
        return len(split.part(mine, self.micro_batches, m))

    def place(self, rank: int) -> Place:
        """Return where a rank stands."""
        rest, t = divmod(rank, self.tp)
        p, d = divmod(rest, self.sharing)
        return Place(p, d, t)

    def rank(self, place: Place) -> int:
        """Return the number of the rank that stands there."""
        return (place.p * self.sharing + place.d) * self.tp + place.t

    def __str__(self) -> str:
        """What differs from one device."""
        words = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(self, name) > 1]
        if self.zero:
            words.append(f"zero={self.zero}")
        if self.recompute != "none":
            words.append(f"recompute={'full' if self.recompute == 'block' else self.recompute}")
        if self.sequence_parallel:
            words.append("sequence-parallel")
        if self.flash:
            words.append("flash")
        if self.chunks > 1:
            words.append(f"chunks={self.chunks}")
        if self.schedule != "1f1b" and self.pp > 1:
            words.append(f"schedule={self.schedule}")
        return " ".join(words) or "one device"


def tokens_of(model: Model, setup: Setup) -> int:
    """Return the tokens of a row that one rank works on; 1 where a row has none."""
    tokens = setup.tokens or getattr(model, "context", 1)
    return len(split.part(tokens, setup.cp, 0))


def units_of(net: Network, setup: Setup, p: int) -> tuple[Unit, ...]:
    """Return the units of stage ``p``.

    By default refpar splits units near-even, embedding and head among them. Megatron gives every stage as
    many blocks, with embedding and head on top; so does this, except in refpar's own accounting.
    """
    numbers = stages(len(net.units), setup)[p]
    return net.units[numbers.start : numbers.stop]


def stages(units: int, setup: Setup) -> tuple[range, ...]:
    """Return the units of every stage, as ranges of their numbers.

    Raises
    ------
    ValueError
        Where a stage would have none.
    """
    if setup.stages:
        if len(setup.stages) != setup.pp:
            raise ValueError(f"stages has {len(setup.stages)} numbers: pp is {setup.pp}")
        return schedules.stages_of(units, list(setup.stages))
    if setup.accounting == "refpar" or setup.pp == 1:
        return schedules.stages_of(units, setup.pp)
    blocks = units - 2
    if blocks < setup.pp:
        raise ValueError(f"pp is {setup.pp}: the model has {max(blocks, 0)} blocks, and every stage needs at least one")
    counts = split.sizes(blocks, setup.pp)
    counts[0] += 1
    counts[-1] += 1
    return schedules.stages_of(units, counts)


def distinct(net: Network, setup: Setup) -> dict[int, int]:
    """Return the first stage of each kind, with how many are like it: 10^5 devices have few kinds.

    Stages of one kind hold the same units. They have ever fewer micro-batches in flight, so the first needs most.
    """
    first: dict[tuple[tuple[str, int], ...], int] = {}
    found: dict[int, int] = {}
    for p, numbers in enumerate(stages(len(net.units), setup)):
        kinds: dict[str, int] = {}
        for unit in net.units[numbers.start : numbers.stop]:
            kinds[unit.kind.name] = kinds.get(unit.kind.name, 0) + 1
        like = first.setdefault(tuple(sorted(kinds.items())), p)
        found[like] = found.get(like, 0) + 1
    return found


def network_of(model: Model, setup: Setup) -> Network:
    """Return the units of a model as this setup runs it."""
    return network(model, setup.accounting, setup.flash)


def check(model: Model, setup: Setup) -> None:
    """Refuse what cannot be run.

    Raises
    ------
    ValueError
        With the reason: more slices than heads, more stages than blocks.
    """
    if isinstance(model, Bare):
        if setup.pp > 1:
            raise ValueError("pp: a number of parameters cannot be cut into stages; name a model, or give its layers")
        return
    if isinstance(model, Transformer) and setup.tp > model.heads:
        raise ValueError(f"tp is {setup.tp}: there are {model.heads} heads, and every rank needs at least one")
    net = network_of(model, setup)
    stages(len(net.units), setup)
