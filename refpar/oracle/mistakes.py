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
from dataclasses import dataclass, replace
from typing import Any

from refpar.arrays import Array, array_module
from refpar.case import Batch, Case, Layout, State, Trace
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
        different counts, losses or norms, ``"mismatch"`` where they are not in the same collective, ``"pieces"``
        where theirs do not make up a whole, ``"recomputation"`` where a second forward pass is not the first
    clip : the limit on the gradient's norm with which it shows
    resumed : whether it is made when a run is resumed
    scaled : whether it shows under a loss scale, in float16, alone
    frozen : what must be frozen for it to show
    heard : a function, as ``module:attribute``, whose last arguments it has to know
    """

    name: str
    target: str
    wrong: Callable[..., Any]
    bugs: tuple[str, ...]
    section: str
    layout: Layout
    seen: str
    clip: float
    resumed: bool = False
    scaled: bool = False
    frozen: tuple[str, ...] = ()
    heard: str = ""

    @property
    def what(self) -> str:
        """What is done wrong, in a sentence or two."""
        return inspect.getdoc(self.wrong) or ""


CATALOGUE: dict[str, Mistake] = {}
SECTIONS: list[str] = []
"""Titles of the parts of the catalogue, in order."""
Wrong = Callable[..., Any]


def mistake(
    target: str, *bugs: str, layout: str, seen: str, clip: float | None = None, resumed: bool = False,
    scaled: bool = False, frozen: tuple[str, ...] = (), heard: str = "",
) -> Callable[[Wrong], Wrong]:  # fmt: skip
    """Enter the decorated function into the catalogue under its own name."""
    if clip is None:
        clip = 1e6 if scaled else 0.05

    def enter(wrong: Wrong) -> Wrong:
        name = wrong.__name__
        CATALOGUE[name] = Mistake(
            name, target, wrong, bugs, SECTIONS[-1], Layout.parse(layout), seen, clip, resumed, scaled, frozen, heard
        )
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

    with listening(chosen.heard) as heard:

        @functools.wraps(right)
        def wrong(*args: Any, **options: Any) -> Any:
            return chosen.wrong(right, *args, **options, **heard)

        wrong.mistake = name  # type: ignore[attr-defined]
        setattr(holder, attribute, wrong)
        try:
            yield
        finally:
            setattr(holder, attribute, right)


@contextlib.contextmanager
def listening(target: str) -> Iterator[dict[str, Any]]:
    """Keep the arguments of the last call of ``target`` under ``"heard"``; where it is empty, nothing."""
    heard: dict[str, Any] = {}
    if not target:
        yield heard
        return
    holder, attribute = resolve(target)
    right = inspect.getattr_static(holder, attribute)

    @functools.wraps(right)
    def listen(*args: Any) -> Any:
        heard["heard"] = args
        return right(*args)

    setattr(holder, attribute, listen)
    try:
        yield heard
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
    """Run ``case`` in ``layout`` with the mistake ``name`` made on every rank.

    One that is made when a run is resumed is made after the first half of the steps, which are right.
    """
    if not CATALOGUE[name].resumed:
        return assembly.collect(case, layout, world.run(train, name, case, layout))
    half = replace(case, batches=case.batches[: len(case.batches) // 2])
    first = hybrid.run(half, layout, world=world)
    second = assembly.collect(case, layout, world.run(train, name, case, layout, State.after(first)))
    return replace(second, steps=[*first.steps, *second.steps][: len(case.batches)], begun=0)


def train(comm: Communicator, name: str, case: Case, layout: Layout, start: State | None = None) -> assembly.RankTrace:
    """Run this rank's part of ``case`` with a mistake."""
    with applied(name):
        return hybrid.train(comm, case, layout, start)


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


@mistake("refpar.parallel.pipeline:Stage.backward", "siboehm/ShallowSpeed@2e236ec", layout="dp=1,micro_batches=3",
         seen="gradient")  # fmt: skip
def divided_by_micro_batches_too(right: Wrong, self: Any, m: int) -> None:
    """Each micro-batch's loss is divided by their number, though it was divided by the global count already."""
    seed, self.seed = self.seed, self.seed / len(self.micro_batches)
    right(self, m)
    self.seed = seed


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


@mistake("refpar.parallel.hybrid:agree", "horovod/horovod#1346", layout="dp=2,zero=2", seen="agreement")
def norm_of_own_shards(
    right: Wrong, world: Communicator, loss_sum: float, counted: Any, seen: Any
) -> tuple[float, float, bool]:
    """Each rank takes the norm of the elements that it owns for that of all, and clips by it."""
    from refpar import optim

    counted = list(counted)
    loss, _, overflow = right(world, loss_sum, counted, seen)
    return loss, math.sqrt(sum(optim.squared_norm(g) for g in counted)), overflow


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


section("tensor parallel")


@mistake("refpar.parallel.tensor:rewrite", "slapo#10", "MinivLLM#80", layout="tp=2", seen="loss")
def bias_added_on_every_rank(right: Wrong, layer: Any, comm: Communicator) -> Any:
    """A row-parallel layer adds its bias before the sum over ranks: it counts as often as there are ranks."""
    from refpar.nn.layer import Sequential
    from refpar.nn.layers import Linear
    from refpar.parallel.tensor import G

    if isinstance(layer, Linear) and layer.axis is not None and layer.axis < len(layer.in_shape):
        return Sequential([replace(layer, unrounded_y=True), G(comm)])
    return right(layer, comm)


@mistake("refpar.parallel.tensor:F.backward", "pytorch/torchtitan@ecae62f15", layout="tp=2", seen="replicas")
def input_gradient_of_columns_not_summed(right: Wrong, self: Any, params: Any, saved: Any, dy: Array) -> Any:
    """Below a column-parallel layer each rank goes on with the gradient of its own columns: all is too small."""
    yield from ()
    return dy.astype(saved, copy=False)


@mistake("refpar.parallel.placement:slice_initial", "NVIDIA-NeMo/Automodel#1324", "hpcaitech/ColossalAI#817",
         layout="tp=2", seen="loss")  # fmt: skip
def fused_projection_cut_as_one_block(right: Wrong, whole: Array, spec: Any, tp: int, t: int) -> Array:
    """Queries, keys and values are cut as one block: the first rank gets queries and half of the keys."""
    if not spec.axis or spec.shape[spec.axis - 1] != 3:  # not sliced, or by its first axis, or not fused
        return right(whole, spec, tp, t)
    before, after = spec.shape[: spec.axis - 1], spec.shape[spec.axis + 1 :]
    heads = len(range(spec.shape[spec.axis])[whole_slices(spec, tp, t)])
    first = 3 * whole_slices(spec, tp, t).start
    fused = whole.reshape(*before, 3 * spec.shape[spec.axis], *after)
    block = fused.take(range(first, first + 3 * heads), axis=len(before))
    return block.reshape(*before, 3, heads, *after)


def whole_slices(spec: Any, tp: int, t: int) -> slice:
    """Return which part of its axis rank ``t`` holds."""
    from refpar.parallel.placement import slices

    mine: slice = slices(spec, tp, t)[spec.axis]
    return mine


@mistake("refpar.parallel.tensor:VocabularyCrossEntropy.forward", "NVIDIA/Megatron-LM#7452", layout="tp=2", seen="loss")
def loss_of_gathered_logits(right: Wrong, self: Any, y: Array, targets: Array, mask: Array) -> Any:
    """Each rank hands the loss all logits instead of its own: every word counts tp times in the normaliser."""
    loss, (probabilities, *rest) = right(self, y, targets, mask)
    return loss + mask.sum() * math.log(self.comm.size), (probabilities / self.comm.size, *rest)


@mistake("refpar.nn.layers:Attention.forward", "NVIDIA/Megatron-LM#206", layout="tp=3", seen="loss")
def dropout_the_same_in_every_slice(right: Wrong, self: Any, params: Any, x: Array, at: Any) -> Any:
    """Every tensor-parallel rank drops in its heads what the first rank drops in its own."""
    start, stop, heads = self.heads
    return right(replace(self, heads=(0, stop - start, heads)), params, x, at)


@mistake("refpar.parallel.hybrid:owner_in_norm", "microsoft/DeepSpeed#5411", "NVIDIA/Megatron-LM@efd25df904",
         layout="tp=2", seen="norm")  # fmt: skip
def slices_counted_on_the_first_rank_only(right: Wrong, mesh: Any, name: str) -> bool:
    """In the norm every tensor-parallel rank but the first is taken for a copy: their slices are left out."""
    return bool(right(mesh, name) and mesh.tp.rank == 0)


@mistake("refpar.parallel.hybrid:owner_in_norm", "NVIDIA/Megatron-LM@4ff2c96368", layout="tp=2", seen="norm")
def replicated_counted_on_every_slice(right: Wrong, mesh: Any, name: str) -> bool:
    """What all tensor-parallel ranks hold whole is counted in the norm by each of them."""
    return bool(right(mesh, name) or mesh.specs[name].axis is None)


@mistake("refpar.parallel.hybrid:clipped", "NVIDIA/Megatron-LM@6191ff593f", layout="tp=2", seen="replicas")
def copies_not_clipped(right: Wrong, mesh: Any, name: str, gradient: Array, factor: float) -> Array:
    """Only what a rank counts in the norm is clipped, so that copies on other ranks drift away."""
    return right(mesh, name, gradient, factor) if mesh.owner(name) else gradient


section("pipelines")


@mistake("refpar.parallel.pipeline:labels", "microsoft/DeepSpeed#5729", layout="pp=2,micro_batches=7", seen="loss")
def labels_of_the_next_micro_batch(right: Wrong, micro_batches: Sequence[Batch], m: int) -> tuple[Array, Array]:
    """The last stage takes labels from its own loader, which is one micro-batch ahead of what arrives."""
    labels: tuple[Array, Array] = right(micro_batches, (m + 1) % len(micro_batches))
    return labels


@mistake("refpar.parallel.pipeline:Stage.receive_gradient", "microsoft/DeepSpeed#8154", layout="pp=2,micro_batches=3",
         seen="gradient")  # fmt: skip
def scaled_again_on_each_stage(right: Wrong, self: Any, m: int) -> Array:
    """Every stage divides what it receives by the number of micro-batches once more."""
    return right(self, m) / len(self.micro_batches)


@mistake("refpar.parallel.pipeline:is_last", "microsoft/DeepSpeed#1264", layout="dp=2,pp=2,zero=1,micro_batches=3",
         seen="gradient")  # fmt: skip
def every_micro_batch_taken_for_the_last(right: Wrong, backwards: int, micro_batches: int) -> bool:
    """The optimizer is not told where accumulation ends, and reduces the first micro-batch as if it were all."""
    return True


@mistake("refpar.parallel.hybrid:tied_sum", "uw-syfi/piper#25", "NVIDIA/Megatron-LM#299", layout="pp=2",
         seen="replicas")  # fmt: skip
def tied_copies_not_summed(right: Wrong, mesh: Any, store: Any, types: Any) -> dict[str, Array]:
    """First and last stage update the embedding that they share, each with its own gradient."""
    gradients: dict[str, Array] = store.reduced()
    return gradients


@mistake("refpar.parallel.hybrid:owner_in_norm", "NVIDIA/Megatron-LM#5916", layout="pp=2", seen="norm")
def tied_weight_counted_on_both_stages(right: Wrong, mesh: Any, name: str) -> bool:
    """The gradient of the shared embedding is in the norm twice, once for each stage that holds it."""
    return bool(right(mesh, name) or mesh.tied.get(name) is not None)


@mistake("refpar.parallel.hybrid:agree", "pytorch/torchtitan#649", layout="pp=2", seen="replicas")
def each_stage_clips_by_its_own_norm(right: Wrong, world: Communicator, loss_sum: float, counted: Any, seen: Any,
                                     *rest: Any) -> tuple[float, float, bool]:  # fmt: skip
    """The norm is not summed over the stages, and each of them clips by that of its own part."""
    from refpar import optim

    counted = list(counted)
    loss, _, overflow = right(world, loss_sum, counted, seen, *rest)
    return loss, math.sqrt(sum(optim.squared_norm(g) for g in counted)), overflow


@mistake("refpar.parallel.hybrid:count_everywhere", "NVIDIA/Megatron-LM@adfa873d96", layout="pp=2", seen="agreement")
def count_known_on_the_last_stage_only(right: Wrong, world: Communicator, tokens: int) -> int:
    """All stages but the last divide by one token, because only the last has seen the labels."""
    count: int = right(world, tokens)
    return count if world.rank == world.size - 1 else 1


@mistake("refpar.parallel.pipeline:Stage.room", "NVIDIA/Megatron-LM@ff7b28f462", layout="pp=2", seen="mismatch")
def received_in_another_type(right: Wrong, self: Any, m: int, shape: tuple[int, ...]) -> Array:
    """What comes over a boundary is received in float32, whatever was sent."""
    return right(self, m, shape).astype("float32")


section("saving and resuming")


@mistake("refpar.parallel.hybrid:beginning", "microsoft/DeepSpeed#4396", layout="dp=1", seen="t", resumed=True)
def step_count_not_saved(right: Wrong, case: Case, start: State | None) -> State:
    """Adam begins to count its steps again, and corrects moments that are old as if they were new."""
    begin: State = right(case, start)
    return replace(begin, t=0)


@mistake("refpar.parallel.hybrid:beginning", "inclusionAI/AReaL#1468", "huggingface/nanotron@013a153c", layout="tp=2",
         seen="state", resumed=True)  # fmt: skip
def moments_of_unsliced_parameters_lost(right: Wrong, case: Case, start: State | None) -> State:
    """Loading goes through the slices, and the moments of norms and biases that are not sliced start from zero."""
    begin: State = right(case, start)
    specs = case.model.build().specs
    state = {
        name: own if specs[name].axis is not None else {b: x if b == "master" else 0 * x for b, x in own.items()}
        for name, own in begin.state.items()
    }
    return replace(begin, state=state)


@mistake("refpar.parallel.hybrid:make_state", "microsoft/DeepSpeed#5105", layout="dp=2,zero=1", seen="state",
         resumed=True)  # fmt: skip
def moments_loaded_at_another_offset(right: Wrong, *args: Any) -> dict[str, dict[str, Array]]:
    """Shards are written by one rule of alignment and read by another: every moment is its neighbour's."""
    state = right(*args)
    return {name: {b: array_module(x).roll(x, 1) for b, x in own.items()} for name, own in state.items()}


@mistake("refpar.parallel.hybrid:beginning", "bghira/SimpleTuner#2986", layout="dp=2", seen="count", resumed=True)
def data_begun_anew(right: Wrong, case: Case, start: State | None) -> State:
    """The place in the data is not saved: rows that were seen come again, and the last are never seen."""
    begin: State = right(case, start)
    return replace(begin, step=0)


section("what replicas do not keep twice")


@mistake("refpar.parallel.zero:owned", "microsoft/DeepSpeed#1380", layout="dp=4,zero=2", seen="pieces")
def shards_rounded_down(right: Wrong, size: int, ranks: int, rank: int) -> range:
    """Every rank owns n // N elements, and nobody what is left over: rebuilt weights are short."""
    return range(size // ranks * rank, size // ranks * (rank + 1))


@mistake("refpar.parallel.zero:rank_major", "microsoft/DeepSpeed#8158", "facebookresearch/fairscale#483",
         layout="dp=3,zero=2", seen="gradient")  # fmt: skip
def shards_in_order_of_parameters(right: Wrong, sizes: Any, ranks: int) -> list[tuple[int, str, range]]:
    """Pieces travel parameter by parameter, and are taken apart as if owner by owner: each goes to its neighbour."""
    return sorted(right(sizes, ranks), key=lambda piece: list(sizes).index(piece[1]))


@mistake("refpar.parallel.zero:Zero.publish", "xrsrke/pipegoose@5cb82e1", layout="dp=2,zero=1", seen="replicas")
def updated_shards_stay_at_home(right: Wrong, self: Any) -> None:
    """Each rank updates what it owns and writes what the others have sent into a copy."""
    before = {name: array_module(p).array(p) for name, p in self.weights.items()}
    right(self)
    for name, p in before.items():
        own = array_module(p).array(self.own_weights(name))
        self.weights[name][...] = p
        self.own(name, self.weights[name])[...] = own


@mistake("refpar.parallel.zero:Zero.begin", "microsoft/DeepSpeed#7780", layout="dp=2,zero=2", seen="gradient")
def owned_gradients_not_cleared(right: Wrong, self: Any) -> None:
    """The shards of the gradient are not cleared after a step: the next ones are added to them."""
    before = getattr(self, "gradients", {})
    right(self)
    self.gradients = before


@mistake("refpar.parallel.zero:Zero.hand_over", "microsoft/DeepSpeed#3832", layout="dp=2,zero=2,bucket=20",
         seen="gradient")  # fmt: skip
def gradients_larger_than_a_bucket_lost(right: Wrong, self: Any, names: Sequence[str]) -> None:
    """What does not fit into a bucket is listed in it, but its numbers are never put there."""
    for name in names:
        if self.sizes[name] > self.bucket:
            self.arriving[name] = array_module(self.arriving[name]).zeros_like(self.arriving[name])
    right(self, names)


@mistake("refpar.case:frozen_names", "microsoft/DeepSpeed#8029", "facebookresearch/fairscale#614",
         layout="dp=2,zero=1", seen="norm", frozen=("blocks.0",))  # fmt: skip
def frozen_parameters_trained(right: Wrong, names: Any, frozen: Sequence[str]) -> frozenset[str]:
    """The optimizer takes in every parameter: frozen ones count in the norm, decay and are updated."""
    return frozenset()


@mistake("refpar.parallel.hybrid:make_store", "microsoft/DeepSpeed#762", "NVIDIA/Megatron-LM@2922bb6d75",
         layout="dp=2,zero=1", seen="state", resumed=True, scaled=True)  # fmt: skip
def masters_not_loaded(right: Wrong, mesh: Any, units: Any, case: Case, begin: State, xp: Any) -> Any:
    """Weights are loaded and their float32 masters are not: the first update throws the loaded weights away."""
    store = right(mesh, units, case, begin, xp)
    fresh = right(mesh, units, case, State.initial(case), xp)
    for name, master in store.masters.items():
        master[...] = fresh.masters[name]
    return store


section("recomputation")


@mistake("refpar.nn.checkpoint:recompute_at", "allenai/OLMo-core#828", "pytorch/pytorch#14253",
         layout="dp=1,recompute=block", seen="recomputation")  # fmt: skip
def recomputed_with_another_mask(right: Wrong, at: Any) -> Any:
    """Dropout draws anew in the second forward pass: the gradient is that of another network."""
    return replace(at, seed=at.seed + 1)


@mistake("refpar.nn.checkpoint:segment", "NVIDIA/Megatron-LM@fc2c81d3a6", layout="dp=1,recompute=2", seen="loss")
def every_layer_gets_the_first_input(right: Wrong, group: Any) -> Any:
    """The layers of a segment all get its input, and the last one's output is passed on."""
    return right(group[-1:])


@mistake("refpar.nn.checkpoint:segments", "NVIDIA/Megatron-LM#3562", layout="dp=1,recompute=3", seen="loss")
def short_segment_left_out(right: Wrong, units: Any, recompute: str, keep: Any = None) -> Any:
    """What remains where the length of a segment does not divide the number of blocks is never run."""
    inner = [unit for unit in units if unit[0] not in (keep or ())]
    left_out = inner[len(inner) - len(inner) % int(recompute) :]
    return right([unit for unit in units if unit not in left_out], recompute, keep)


section("float16 and the loss scale")

WITH_SCALE = "refpar.nn.loss:seed_and_divisor"  # (divide, scale, count)


@mistake("refpar.optim:squared_norm", "facebookresearch/fairscale#263", layout="dp=1", seen="norm", clip=1e6)
def squares_in_halves(right: Wrong, g: Array) -> float:
    """The squares of the norm are formed in float16: a healthy gradient of 256 has an infinite one."""
    half = g.astype("float16")
    return float((half * half).sum(dtype="float32"))


@mistake(WITH_SCALE, "NVIDIA/Megatron-LM@0b14cc27cc", layout="dp=1", seen="outcome", scaled=True)
def loss_not_scaled(right: Wrong, divide: Any, scale: float, count: int) -> tuple[float, float]:
    """The scale is set where nobody reads it: the loss is not multiplied by it, the gradient is divided by it."""
    seed, divisor = right(divide, scale, count)
    return seed / scale, divisor


@mistake("refpar.precision:unscale", "huggingface/accelerate#115", layout="dp=1", seen="gradient", scaled=True,
         heard=WITH_SCALE)  # fmt: skip
def unscaled_twice(right: Wrong, gradient: Array, divisor: float, heard: Any) -> Array:
    """Both a wrapper and the optimizer in it divide by the scale."""
    _, scale, _ = heard
    return right(gradient, divisor) / scale


@mistake("refpar.precision:accumulate", "huggingface/accelerate#641", layout="dp=1,micro_batches=2", seen="gradient",
         scaled=True, heard=WITH_SCALE)  # fmt: skip
def unscaled_inside_the_window(
    right: Wrong, into: dict[str, Array], name: str, gradient: Array, dtype: str, heard: Any
) -> None:
    """What has been accumulated is unscaled before the next micro-batch is added to it, which is scaled."""
    _, scale, _ = heard
    if name in into:
        into[name] = into[name] / scale
    right(into, name, gradient, dtype)


@mistake("refpar.optim:clip_factor", "milesial/Pytorch-UNet#468", "NVIDIA/apex#1512", layout="dp=1", seen="state",
         clip=64.0, scaled=True, heard=WITH_SCALE)  # fmt: skip
def clipped_while_scaled(right: Wrong, norm: float, max_norm: float | None, heard: Any) -> float:
    """The norm of the scaled gradient is held to the limit: updates are S times too small, training stands still."""
    _, scale, _ = heard
    return float(right(norm * scale, max_norm))


@mistake("refpar.optim:update", "chainer/chainer#7335", layout="dp=1", seen="state", scaled=True, heard=WITH_SCALE)
def decay_added_while_scaled(
    right: Wrong, optimizer: Any, p: Array, g: Array, state: Any, t: int, decay: bool, heard: Any
) -> None:
    """The L2 term is added before the gradient is unscaled, and divided by the scale with it."""
    _, scale, _ = heard
    right(replace(optimizer, weight_decay=optimizer.weight_decay / scale), p, g, state, t, decay)


@mistake("refpar.precision:next_scale", "pytorch/pytorch#98876", layout="dp=1", seen="scale", scaled=True)
def scale_without_a_cap(right: Wrong, rule: Any, scale: float, good: int, overflow: bool) -> tuple[float, int]:
    """The scale goes on growing for as long as nothing overflows, and ends in infinity."""
    result: tuple[float, int] = right(replace(rule, cap=2.0**127), scale, good, overflow)
    return result


@mistake("refpar.parallel.hybrid:agree", "pytorch/pytorch#115710", layout="dp=3,zero=2", seen="mismatch", scaled=True)
def overflow_known_to_one_rank(
    right: Wrong, world: Communicator, loss_sum: float, counted: Any, seen: Any, *rest: Any
) -> tuple[float, float, bool]:
    """The flag is read before it was exchanged: the rank that owns the infinite gradient skips, the others do not."""
    seen = list(seen)
    loss, norm, _ = right(world, loss_sum, counted, seen, *rest)
    return loss, norm, any(not bool(array_module(g).isfinite(g).all()) for g in seen)


@mistake("refpar.precision:accumulate", "PaddlePaddle/Paddle#35144", layout="dp=1,micro_batches=2", seen="outcome",
         scaled=True)  # fmt: skip
def early_overflow_forgotten(right: Wrong, into: dict[str, Array], name: str, gradient: Array, dtype: str) -> None:
    """The flag is that of the last micro-batch: what overflowed in an earlier one is left out, and the step is made."""
    if name in into:
        xp = array_module(into[name])
        into[name] = xp.where(xp.isfinite(into[name]), into[name], 0)
    right(into, name, gradient, dtype)


@mistake("refpar.optim:next_t", "NVIDIA/NeMo#3293", "huggingface/accelerate#4242", layout="dp=1", seen="t", scaled=True)
def skipped_steps_counted(right: Wrong, t: int, outcome: str) -> int:
    """Step count, warm-up and Adam's bias correction advance although the step was skipped."""
    return t + 1


@mistake("refpar.precision:outcome", "microsoft/DeepSpeed#7645", layout="dp=1", seen="outcome", scaled=True)
def updated_on_an_overflow(right: Wrong, count: int, overflow: bool) -> Any:
    """A return in the wrong branch: the step is made where it must be skipped."""
    return right(count, False)


@mistake("refpar.precision:outcome", "microsoft/DeepSpeed#7645", layout="dp=1", seen="outcome")
def never_updated(right: Wrong, count: int, overflow: bool) -> Any:
    """A return outside its branch: no step is ever made, and the loss stays where it is."""
    return right(count, True)
