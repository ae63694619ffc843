"""A model, a setup, a recipe and devices: with what that needs, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from refpar.plan import memory, speed, traffic
from refpar.plan.ledger import RankMemory
from refpar.plan.models import Bare, Model
from refpar.plan.recipes import Recipe
from refpar.plan.setups import Setup
from refpar.plan.speed import Hardware, Step
from refpar.plan.units import gb

MOMENT_WORDS = {
    "forward": "at the end of the forward passes",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
}


@dataclass(frozen=True)
class Plan:
    """A setup with what it needs; figures are computed when they are asked for.

    Attributes
    ----------
    causal : whether only half of the attention matrix counts as work of the model
    """

    model: Model
    setup: Setup
    recipe: Recipe
    hardware: Hardware
    causal: bool = False

    @cached_property
    def memory(self) -> RankMemory:
        """The most loaded rank."""
        return memory.most_loaded(self.model, self.setup, self.recipe)

    @cached_property
    def step(self) -> Step | None:
        """The estimate of a step; None where the tokens of a row are not known."""
        if isinstance(self.model, Bare) and not self.setup.tokens:
            return None
        return speed.step(self.model, self.setup, self.recipe, self.hardware, causal=self.causal)

    @cached_property
    def sent(self) -> dict[str, int]:
        """Bytes that the most loaded rank sends in a step, by group."""
        return traffic.by_group(traffic.of_rank(self.model, self.setup, self.recipe, self.memory.rank))

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.memory.peak <= self.hardware.usable

    @property
    def short(self) -> int:
        """Bytes by which the most loaded rank does not fit; what is left over is negative."""
        return self.memory.peak - self.hardware.usable

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return self.setup.largest_micro_batch

    def where(self) -> str:
        """Return the rank and the moment of the peak, in words."""
        moment = MOMENT_WORDS[self.memory.moment]
        if self.setup.pp > 1:
            return f"on rank {self.memory.rank} (stage {self.memory.place.p}), {moment}"
        return f"on every rank, {moment}" if self.setup.ranks > 1 else moment

    def why(self) -> str:
        """Return one sentence on what fills the memory."""
        largest = sorted(self.memory.parts().items(), key=lambda item: -item[1])
        parts = ", ".join(f"{part} {gb(n)}" for part, n in largest if n > 0.005 * self.memory.peak)
        verdict = f"short by {gb(self.short)} GB" if not self.fits else f"{gb(-self.short)} GB to spare"
        return f"{verdict} {self.where()}: {parts} GB"


def with_micro_batch(setup: Setup, rows: int) -> Setup:
    """Return the setup with micro-batches of so many rows, and the same batch."""
    return replace(setup, micro_batches=max(1, math.ceil(setup.batch / (setup.dp * rows))))


def with_grid(setup: Setup, dp: int, tp: int, pp: int) -> Setup:
    """Return the setup on another grid, with micro-batches as large as before."""
    rows = setup.largest_micro_batch
    M = max(1, math.ceil(setup.batch / (dp * rows)))
    chunks = setup.chunks if M % pp == 0 and pp > 1 else 1
    return replace(setup, dp=dp, tp=tp, pp=pp, micro_batches=M, chunks=chunks, stages=(),
                   zero=0 if dp * setup.cp == 1 else setup.zero)  # fmt: skip
