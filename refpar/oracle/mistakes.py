"""The mistakes that people make, each a named object that can be made on purpose.

Every entry is a decision of refpar replaced by what somebody once shipped; the docstring says what they did,
``bugs`` where it can be read up. The catalogue has three uses: it proves that the tests can see (each mistake is
made and must be caught), it teaches, and it diagnoses: the mistake whose numbers are those of a wrong run is what
that run did.

A mistake is a function whose first argument is the right one. It is put in place inside each rank, for the length
of one run, and taken out whatever happens::

    with applied("tokens_counted_per_rank"):
        hybrid.train(comm, case, layout)
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from refpar.arrays import Array, array_module
from refpar.case import Case, Layout, Trace
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.parallel import assembly, hybrid


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalogue.

    Attributes
    ----------
    name : what is done wrong, in a few words
    target : what it replaces, as ``module:attribute``
    wrong : takes the right function first, then its arguments
    bugs : where it was made: repository and issue or commit
    section : the part of the catalogue it stands in
    layout : the smallest layout in which it shows
    seen : what it is seen by first: a name of :meth:`refpar.case.Step.items` or its part before the ``/``;
        ``"replicas"`` where ranks that should hold equal weights do not, ``"agreement"`` where they report
        different counts, losses or norms, ``"mismatch"`` where they are not in the same collective
    clip : the limit on the gradient's norm with which it shows
    """

    name: str
    target: str
    wrong: Callable[..., Any]
    bugs: tuple[str, ...]
    section: str
    layout: Layout
    seen: str
    clip: float

    @property
    def what(self) -> str:
        """What is done wrong, in a sentence or two."""
        return inspect.getdoc(self.wrong) or ""


CATALOGUE: dict[str, Mistake] = {}
SECTIONS: list[str] = []
"""Titles of the parts of the catalogue, in order."""
Wrong = Callable[..., Any]


def mistake(target: str, *bugs: str, layout: str, seen: str, clip: float = 0.05) -> Callable[[Wrong], Wrong]:
    """Enter the decorated function into the catalogue under its own name."""

    def enter(wrong: Wrong) -> Wrong:
        name = wrong.__name__
        CATALOGUE[name] = Mistake(name, target, wrong, bugs, SECTIONS[-1], Layout.parse(layout), seen, clip)
        return wrong

    return enter


def section(title: str) -> None:
    """Begin a part of the catalogue."""
    SECTIONS.append(title)


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """Make the mistake ``name`` inside the ``with`` block, in this process.

    Raises
    ------
    KeyError
        Where the catalogue has no such mistake.
    RuntimeError
        Where one is being made already.
    """
    chosen = CATALOGUE[name]
    if active():
        raise RuntimeError(f"{name} cannot be made while {active()} is")
    holder, attribute = resolve(chosen.target)
    right = inspect.getattr_static(holder, attribute)

    @functools.wraps(right)
    def wrong(*args: Any, **options: Any) -> Any:
        return chosen.wrong(right, *args, **options)

    wrong.mistake = name  # type: ignore[attr-defined]
    setattr(holder, attribute, wrong)
    try:
        yield
    finally:
        setattr(holder, attribute, right)


def active() -> str | None:
    """Return the name of the mistake that is being made in this process, None where none is."""
    for chosen in CATALOGUE.values():
        holder, attribute = resolve(chosen.target)
        made = getattr(inspect.getattr_static(holder, attribute), "mistake", None)
        if made is not None:
            return str(made)
    return None


def resolve(target: str) -> tuple[Any, str]:
    """Return the module or class that holds ``target``, and its name in there."""
    module, _, path = target.partition(":")
    *outer, attribute = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), attribute


def run(name: str, case: Case, layout: Layout, *, world: World) -> Trace:
    """Run ``case`` in ``layout`` with the mistake ``name`` made on every rank."""
    return assembly.collect(case, layout, world.run(train, name, case, layout))


def train(comm: Communicator, name: str, case: Case, layout: Layout) -> assembly.RankTrace:
    """Run this rank's part of ``case`` with a mistake."""
    with applied(name):
        return hybrid.train(comm, case, layout)


section("averaging and counting")


@mistake("refpar.nn.loss:token_count", "meta-pytorch/torchtune#1875", layout="dp=1", seen="count")
def masked_tokens_counted(right: Wrong, mask: Array) -> int:
    """Tokens that the mask leaves out are counted all the same: loss and gradient are too small."""
    return int(mask.size)


@mistake("refpar.parallel.hybrid:count_everywhere", "huggingface/transformers#34242", layout="dp=3", seen="agreement")
def tokens_counted_per_rank(right: Wrong, world: Communicator, tokens: int) -> int:
    """Each rank divides by the tokens it has itself, and the sums are added: N times the gradient, or about."""
    return tokens


@mistake(
    "refpar.parallel.hybrid:count_everywhere",
    "huggingface/transformers#34242",
    "OpenNMT/OpenNMT-py#2209",
    layout="dp=3",
    seen="agreement",
)
def mean_of_rank_means(right: Wrong, world: Communicator, tokens: int) -> int:
    """Each rank takes the mean over its own tokens, and the means are averaged: few tokens weigh as much as many."""
    return tokens * world.size


@mistake(
    "refpar.parallel.placement:rows", "pytorch/pytorch#25162", "Lightning-AI/pytorch-lightning#5060",
    layout="dp=3", seen="count",
)  # fmt: skip
def rows_repeated_to_fill(right: Wrong, total: int, parts: int, index: int) -> range:
    """Every part gets the same number of rows: the last ones are taken again where they do not divide."""
    size = math.ceil(total / parts)
    start = min(size * index, max(total - size, 0))
    return range(start, min(start + size, total))


@mistake(
    "refpar.precision:accumulate", "pytorch/torchtitan#3575", "microsoft/DeepSpeed#7981",
    layout="dp=1,micro_batches=3", seen="gradient",
)  # fmt: skip
def last_micro_batch_only(right: Wrong, into: dict[str, Array], name: str, gradient: Array, dtype: str) -> None:
    """A micro-batch's gradient overwrites that of the one before it: the batch is as small as its last part."""
    into[name] = gradient.astype(dtype, copy=False)


@mistake("refpar.precision:accumulate", "Lightning-AI/pytorch-lightning#19987", layout="dp=1,micro_batches=3",
         seen="gradient")  # fmt: skip
def decaying_average_of_micro_batches(
    right: Wrong, into: dict[str, Array], name: str, gradient: Array, dtype: str
) -> None:
    """What is accumulated is scaled again with each micro-batch, so that the early ones fade."""
    if name in into:
        into[name] = into[name] / 2
    right(into, name, gradient, dtype)


@mistake("refpar.parallel.data:DataParallel.unit_done", "microsoft/DeepSpeed#7985", layout="dp=3,micro_batches=3",
         seen="replicas")  # fmt: skip
def reduced_before_the_last_micro_batch(right: Wrong, self: Any, index: int, last: bool) -> None:
    """Gradients are reduced after the first micro-batch; what the later ones add stays local."""
    right(self, index, True)


@mistake("refpar.parallel.data:DataParallel.reduce", "volcengine/verl#7493", layout="dp=3", seen="replicas")
def gradients_not_reduced(right: Wrong, self: Any, names: Sequence[str]) -> None:
    """No gradients are exchanged: every rank trains a model of its own on its own rows."""


@mistake("refpar.parallel.data:DataParallel.reduce", "NVIDIA/Megatron-LM#3023", layout="dp=3", seen="gradient")
def divided_by_ranks_too(right: Wrong, self: Any, names: Sequence[str]) -> None:
    """The reduction averages over ranks, though the loss was divided by the global count: 1/N of the gradient."""
    right(self, names)
    for name in names:
        self.gradients[name] = self.gradients[name] / self.comm.size


@mistake("refpar.parallel.data:DataParallel.begin", "NVIDIA/Megatron-LM@4fd6432de6", layout="dp=2", seen="gradient")
def gradients_leak_into_the_next_step(right: Wrong, self: Any) -> None:
    """Gradients are not cleared: from the second step on, those of all steps before are in them."""
    before = getattr(self, "gradients", {})
    right(self)
    self.gradients = before


@mistake("refpar.nn.layers:Dropout.forward", "NVIDIA/Megatron-LM#206", layout="dp=2", seen="loss")
def dropout_by_local_row(right: Wrong, self: Any, params: Any, x: Array, at: Any) -> Any:
    """Every rank and micro-batch draws the same dropout mask, because each starts from the same seed."""
    import dataclasses

    return right(self, params, x, dataclasses.replace(at, rows=tuple(range(len(at.rows)))))


section("collectives")


@mistake("refpar.comm.ring:all_reduce", "ROCm/rocm-systems#7711", layout="dp=3", seen="agreement")
def tail_not_reduced(right: Wrong, comm: Communicator, array: Array, *args: Any, **options: Any) -> Array:
    """The array is cut into chunks of n // N elements, and what is left over stays as it was."""
    flat = array.reshape(-1)
    tail = flat.size // comm.size * comm.size
    reduced = right(comm, flat[:tail], *args, **options)
    return array_module(flat).concatenate([reduced, flat[tail:]]).reshape(array.shape)


@mistake("refpar.comm.ring:all_reduce", "microsoft/ark#253", layout="dp=3", seen="replicas")
def sum_sent_on(right: Wrong, comm: Communicator, array: Array, *args: Any, **options: Any) -> Array:
    """What is passed round is the running sum instead of what arrived: 1, 2, 4 give 11, 8, 9; two ranks are right."""
    xp = array_module(array)
    total = xp.array(array)
    for _ in range(comm.size - 1):
        room = xp.empty_like(total)
        total = total + comm.sendrecv(total, (comm.rank + 1) % comm.size, room, (comm.rank - 1) % comm.size)
    return total


@mistake("refpar.comm.ring:_gather", "openucx/xccl#123", "llnl/Aluminum#22", layout="dp=3", seen="replicas")
def gathered_from_slot_zero(
    right: Wrong, comm: Communicator, mine: Array, result: Array, parts: Sequence[slice]
) -> None:
    """Each rank takes its own chunk to stand first: right on rank 0, rotated on the others."""
    right(comm, mine, result, parts)
    start = parts[comm.rank].start if comm.name == "dp" else 0  # what training needs to get started is left right
    result[...] = array_module(result).concatenate([result[start:], result[:start]])


@mistake("refpar.parallel.data:DataParallel.reduce", "pytorch/pytorch#64629", layout="dp=3,bucket=1", seen="mismatch")
def reduced_in_order_of_arrival(right: Wrong, self: Any, names: Sequence[str]) -> None:
    """Ranks reduce in the order in which their gradients get ready, and pair up those of different parameters."""
    waiting = self.__dict__.setdefault("late", [])
    waiting.append(names)
    if len(waiting) == 2:
        first, second = waiting if self.comm.rank else reversed(waiting)
        waiting.clear()
        right(self, first)
        right(self, second)


section("norm and clipping")


@mistake("refpar.parallel.hybrid:agree", "microsoft/DeepSpeed#5411", layout="dp=3", seen="norm")
def replicas_counted_in_norm(
    right: Wrong, world: Communicator, loss_sum: float, counted: Any, seen: Any, *rest: Any
) -> tuple[float, float, bool]:
    """What several ranks hold is counted by each of them: the norm grows with the square root of their number."""
    seen = list(seen)
    result: tuple[float, float, bool] = right(world, loss_sum, seen, seen, *rest)
    return result


@mistake(
    "refpar.parallel.hybrid:agree", "karpathy/llm.c@7018280", "microsoft/DeepSpeed#5259", layout="dp=3", seen="norm"
)
def squared_norms_averaged(right: Wrong, world: Communicator, *args: Any) -> tuple[float, float, bool]:
    """The squared norms of the ranks' shares are averaged instead of added: too small by the square root of N."""
    loss, norm, overflow = right(world, *args)
    return loss, norm / math.sqrt(world.size), overflow


@mistake("refpar.optim:squared_norm", "pytorch/pytorch#159856", layout="dp=1", seen="norm")
def norms_added(right: Wrong, g: Array) -> float:
    """The norms of the parameters are added up, not their squares."""
    return math.sqrt(right(g))


@mistake("refpar.optim:clip_factor", "microsoft/DeepSpeed#5150", layout="dp=1", seen="state", clip=1e6)
def small_gradients_enlarged(right: Wrong, norm: float, max_norm: float | None) -> float:
    """The ratio is not held to at most 1: gradients below the limit are blown up to it."""
    return max_norm / norm if max_norm is not None and norm > 0 else 1.0


@mistake("refpar.optim:clip_factor", "pytorch/torchtitan#1258", layout="dp=1", seen="state")
def nothing_clipped(right: Wrong, norm: float, max_norm: float | None) -> float:
    """The norm is computed and reported, and the gradients are left as they are."""
    return 1.0


@mistake("refpar.optim:decays", "microsoft/DeepSpeed@02405740", layout="dp=1", seen="parameter")
def everything_decays(right: Wrong, spec: Any) -> bool:
    """Weight decay applies to biases and norms too."""
    return True
