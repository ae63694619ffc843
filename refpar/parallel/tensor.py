"""Tensor parallel: one layer on several ranks, each with a slice of its weights.

A matrix product can be cut in two ways (Shoeybi et al. 2019, "Megatron-LM", section 3)::

    column-parallel    y = x [A0 | A1]   = [x A0 | x A1]          each rank has part of y, from all of x
    row-parallel       y = [x0 | x1] (B0) = x0 B0 + x1 B1         each rank has part of the sum
                                     (B1)

One after the other they need to speak only once: the column-parallel half leaves the activations cut
just as the row-parallel half wants them, and whatever is elementwise may stand in between::

    x --f--> up (columns) --> GELU --> down (rows) --g--> + bias
    x --f--> qkv (heads)  --> attention of own heads --> proj (rows) --g--> + bias

    f    forward nothing           backward all-reduce of dx: every rank's columns depend on all of x
    g    forward all-reduce of y   backward nothing: dy is whole already

The bias of a row-parallel layer is added after *g*, once; added on every rank before it, it would count tp
times (slapo#10).

The vocabulary is cut too. A rank embeds the tokens it has rows for and zeros for the others, *g* makes them
whole; the output projection is column-parallel; and the cross-entropy works on the logits where they are:
their maximum, the sum of their exponentials and the target's logit are all that travels, three numbers a
token instead of the vocabulary. So what is all-reduced, in elements a token, is::

                       forward            backward
    embedding          width, g           -
    each block         2 width, 2 g       2 width, 2 f       where it is recomputed, its forward once more
    head               -                  width, f
    cross-entropy      1 + 2              -

    held    a slice of every weight with an ``axis``; norms, positions and row-parallel biases whole; activations
            whole between blocks, cut between f and g. Slices are near-even: of 5 heads rank 0 of 2 has 3, and
            rank 1 has 2. Fewer heads, or words, than ranks are refused
    sent    2 (N-1)/N of what is all-reduced by each rank, in 4 bytes an element (8 where all is in float64). A GPT
            of 1 block, 10 wide, with 8 tokens, on 2 ranks: 8 (10 + 40 + 10 + 3) = 504 elements from each

Partial sums leave a product in float32, are summed in float32 and rounded once: rounded first, their error
is that of tp roundings. What every rank holds whole gets the same gradient bits on every rank, because
*f* has summed what lies behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refpar import split
from refpar.arrays import Array, array_module, total, widen
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.nn.checkpoint import Checkpoint
from refpar.nn.layer import At, Gradients, Layer, Params, ParamSpec, Residual, Sequential
from refpar.nn.layers import Attention, Bias, Embedding, Linear, Unembed
from refpar.nn.loss import CrossEntropy, Loss, token_count
from refpar.nn.models import Model, Units


@dataclass(frozen=True)
class F:
    """Megatron's *f*: nothing forward, the sum over ranks backward, in float32, rounded once."""

    comm: Communicator

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return x, x.dtype

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return ring.all_reduce(self.comm, dy).astype(saved, copy=False)


@dataclass(frozen=True)
class G:
    """Megatron's *g*: the sum over ranks forward, left in float32 for the bias that follows; nothing backward."""

    comm: Communicator

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return ring.all_reduce(self.comm, widen(x)), None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return dy


@dataclass(frozen=True)
class VocabularyEmbedding:
    """The rows ``start ..`` of an embedding: the vectors of the tokens in that range, zeros for all others."""

    layer: Embedding
    start: int

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return self.layer.specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        xp, rows = array_module(x), len(params[f"{self.layer.name}.weight"])
        x = x.astype("int64", copy=False)  # a small or unsigned type has no room for the difference
        here = (x >= self.start) & (x < self.start + rows)  # (batch, seq)
        y, ids = self.layer.forward(params, xp.where(here, x - self.start, 0), at)
        return xp.where(here[..., None], y, 0), (ids, here)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        ids, here = saved
        return (yield from self.layer.backward(params, ids, array_module(dy).where(here[..., None], dy, 0)))


@dataclass(frozen=True)
class VocabularyCrossEntropy:
    """:class:`refpar.nn.loss.CrossEntropy` of logits ``(batch, seq, part of the vocabulary)``, from ``start`` on."""

    comm: Communicator
    start: int

    def count(self, targets: Array, mask: Array) -> int:
        return token_count(mask)

    def forward(self, y: Array, targets: Array, mask: Array) -> tuple[Array, Any]:
        """Return the sum of losses, the same on every rank, and what the backward pass needs."""
        xp = array_module(y)
        logits, targets = xp.where(mask[..., None], widen(y), 0), targets.astype("int64", copy=False)
        here = mask & (targets >= self.start) & (targets < self.start + y.shape[-1])  # (batch, seq)
        targets = xp.where(here, targets - self.start, 0)[..., None]  # (batch, seq, 1)
        logits = logits - ring.all_reduce(self.comm, logits.max(axis=-1, keepdims=True), "max")
        exponentials = xp.exp(logits)
        at_target = xp.where(here[..., None], xp.take_along_axis(logits, targets, axis=-1), 0)
        sums = xp.concatenate([total(exponentials, axis=-1, keepdims=True), at_target], axis=-1)
        sums = ring.all_reduce(self.comm, sums)  # (batch, seq, 2)
        normaliser, at_target = sums[..., :1], sums[..., 1:]
        losses = xp.log(normaliser) - at_target
        return total(losses * mask[..., None]), (exponentials / normaliser, targets, here, mask, y.dtype)

    def backward(self, saved: Any, seed: float) -> Array:
        """Return ``seed * (probabilities - onehot(target))`` of this part of the vocabulary."""
        probabilities, targets, here, mask, dtype = saved
        xp = array_module(probabilities)
        dy = probabilities * (mask * seed).astype(probabilities.dtype)[..., None]
        at_target = xp.take_along_axis(dy, targets, axis=-1)
        xp.put_along_axis(dy, targets, at_target - (here * seed).astype(dy.dtype)[..., None], axis=-1)
        return dy.astype(dtype, copy=False)


def parallelize(units: Units, comm: Communicator) -> Units:
    """Return ``units`` rewritten for the slices that this rank of ``comm`` holds."""
    return [(name, rewrite(layer, comm)) for name, layer in units]


def parallel_loss(model: Model, comm: Communicator) -> Loss:
    """Return the loss of ``model`` for logits that are cut along the vocabulary."""
    words = [layer.vocabulary for _, unit in model.units for layer in leaves(unit) if isinstance(layer, Unembed)]
    if not words:
        return model.loss
    return VocabularyCrossEntropy(comm, split.part(words[0], comm.size, comm.rank).start)


def rewrite(layer: Layer, comm: Communicator) -> Layer:
    """Return one layer rewritten; its parameters keep their names and global shapes."""
    match layer:
        case Sequential(layers=layers):
            return Sequential([rewrite(inner, comm) for inner in layers])
        case Residual(layer=inner):
            return Residual(rewrite(inner, comm))
        case Linear(axis=None):
            return layer
        case Linear(axis=int(axis), in_shape=in_shape) if axis >= len(in_shape):
            return Sequential([F(comm), replace(layer, unrounded_dx=True)])
        case Linear():
            product: list[Layer] = [replace(layer, bias=False, unrounded_y=True), G(comm)]
            biases = [
                Bias(layer.name, layer.out_shape, spec.init)
                for name, spec in layer.specs.items()
                if name.endswith(".bias")
            ]
            return Sequential([*product, *biases])
        case Attention(heads=(_, _, heads)):
            mine = split.part(heads, comm.size, comm.rank)
            return replace(layer, heads=(mine.start, mine.stop, heads))
        case Embedding():
            mine = split.part(layer.vocabulary, comm.size, comm.rank)
            return Sequential([VocabularyEmbedding(layer, mine.start), G(comm)])
        case Unembed():
            return Sequential([F(comm), replace(layer, unrounded_dx=True)])
    return layer


def check(units: Units, tp: int) -> None:
    """Refuse what cannot be split over ``tp`` ranks.

    Raises
    ------
    ValueError
        Where a rank would have no head, or no word of the vocabulary.
    """
    for name, layer in units:
        for part in leaves(layer):
            if isinstance(part, Attention) and part.heads[2] < tp:
                raise ValueError(f"tp is {tp}: {name} has {part.heads[2]} heads, and every rank needs at least one")
            if isinstance(part, Embedding | Unembed) and part.vocabulary < tp:
                raise ValueError(
                    f"tp is {tp}: the vocabulary has {part.vocabulary} words, every rank needs at least one"
                )


def leaves(layer: Layer) -> Iterator[Layer]:
    """Yield the layers inside ``layer`` that have no layers inside."""
    inner = getattr(layer, "layers", None) or ([layer.layer] if hasattr(layer, "layer") else [])
    if not inner:
        yield layer
    for part in inner:
        yield from leaves(part)


def all_reduces(layer: Layer, forwards: int = 1) -> Iterator[int]:
    """Yield, for each all-reduce that a micro-batch costs in an unsplit ``layer``, its elements per token.

    Parameters
    ----------
    forwards : how often the layer runs forward: once, and once more for each layer around it that recomputes
    """
    match layer:
        case Sequential(layers=layers):
            for inner in layers:
                yield from all_reduces(inner, forwards)
        case Residual(layer=inner):
            yield from all_reduces(inner, forwards)
        case Checkpoint(layer=inner):
            yield from all_reduces(inner, forwards + 1)
        case Linear(axis=int(axis), in_shape=in_shape) if axis >= len(in_shape):
            yield math.prod(in_shape)  # f, backward
        case Linear(axis=int(), out_shape=out_shape):
            yield from [math.prod(out_shape)] * forwards  # g
        case Embedding(width=width):
            yield from [width] * forwards  # g
        case Unembed(width=width):
            yield width  # f, backward


def elements_sent(units: Units, loss: Loss, tokens: Sequence[int], ranks: int, rank: int) -> int:
    """Return the elements that ``rank`` of ``ranks`` sends in a step.

    Parameters
    ----------
    units : of this rank's stage, unsplit, wrapped for recomputation as they are run
    loss : on the last stage that of the model, also unsplit; a squared error on all others, which costs nothing
    tokens : of each micro-batch, whether they count or not; rows, for the MLP
    """
    each = [n for _, layer in units for n in all_reduces(layer)]
    if isinstance(loss, CrossEntropy):
        each += [1, 2]  # the maximum; the sum of exponentials and the target's logit
    return sum(sum(split.ring_elements(n * count, ranks, rank)) for count in tokens for n in each)


def output_width(unit: Layer, ranks: int, rank: int) -> int:
    """Return how many elements ``rank`` holds of a token's activation behind ``unit``: all, or those of its columns."""
    last = [layer for layer in leaves(unit) if isinstance(layer, Linear | Embedding)][-1]
    if isinstance(last, Embedding):
        return last.width
    if last.axis is None or last.axis < len(last.in_shape):
        return math.prod(last.out_shape)
    axis = last.axis - len(last.in_shape)
    return math.prod(last.out_shape) // last.out_shape[axis] * len(split.part(last.out_shape[axis], ranks, rank))
