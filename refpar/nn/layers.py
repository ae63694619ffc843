"""The layers of an MLP and of a GPT: each forward pass with its backward pass right under it.

A layer is a frozen value; what it computes is explained in ``layer.py``. All follow the same rules:

- The first axis is the rows of the batch: an example for the MLP, a sequence for the GPT. A batch
  may have no rows.
- Activations and their gradients have the type of the parameters. Sums are kept in
  ``accumulator(dtype)`` (float32 for halves) and rounded once; gradients of *parameters* leave a
  layer in that type, unrounded, because they are summed further: over micro-batches, over ranks.
- A layer takes the shapes of its parameters from ``params``, not from its own fields, so the same
  layer runs on a slice of a weight.
- ``x`` and ``dy`` are never written to and ``y`` is a new array; ``dx`` may be ``dy`` itself.

What each keeps for its backward pass, beside the parameters that it is handed again:

=========  ===========================================================
Linear     its input
Bias       nothing
Embedding  the ids
Position   nothing
Unembed    its input
LayerNorm  its input, mean and 1/deviation of each position
ReLU       where the input was positive, a byte an element
GELU       its input
Attention  q, k, v, the probabilities, what dropout kept
Dropout    what it kept, a byte an element
=========  ===========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from refpar import rng
from refpar.arrays import Array, accumulator, array_module, matmul, to_host, total, widen
from refpar.nn.layer import At, Gradients, Params, ParamSpec, Residual, Sequential

__all__ = [
    "GELU",
    "Attention",
    "Bias",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Position",
    "ReLU",
    "Residual",
    "Sequential",
    "Unembed",
    "add_bias",
]


@dataclass(frozen=True)
class Linear:
    """``y = x @ weight + bias``, over as many axes as ``in_shape`` and ``out_shape`` have.

    The last ``len(in_shape)`` axes of x are contracted with the first axes of the weight, whose
    shape is ``(*in_shape, *out_shape)``. So the projection to queries, keys and values is
    ``(width,) -> (3, heads, head_dim)``, and a slice of its weight along ``heads`` is whole heads.

    Attributes
    ----------
    name : prefix of the parameters ``name.weight`` and ``name.bias``
    in_shape, out_shape : global shapes
    bias : whether there is one
    axis : the axis of the weight that tensor parallelism splits: one of ``out_shape`` (column-parallel;
        the bias is split with it) or of ``in_shape`` (row-parallel; the bias is not split)
    init : initial values of weight and bias, see :class:`ParamSpec`; by default uniform within
        1/sqrt(inputs). The bias is not zero, so that a bias added twice shows in the first step
    unrounded_y, unrounded_dx : hand the product on in the accumulator type: it is one rank's part of
        a sum, and is to be rounded after the sum (row-parallel forward, column-parallel backward)
    """

    name: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    bias: bool = field(default=True, kw_only=True)
    axis: int | None = field(default=None, kw_only=True)
    init: float | str | None = field(default=None, kw_only=True)
    unrounded_y: bool = field(default=False, kw_only=True)
    unrounded_dx: bool = field(default=False, kw_only=True)

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        inputs = len(self.in_shape)
        init = 1 / math.sqrt(max(1, math.prod(self.in_shape))) if self.init is None else self.init
        specs = {f"{self.name}.weight": ParamSpec((*self.in_shape, *self.out_shape), self.axis, init=init)}
        if self.bias:
            axis = None if self.axis is None or self.axis < inputs else self.axis - inputs
            specs[f"{self.name}.bias"] = ParamSpec(self.out_shape, axis, decay=False, init=init)
        return specs

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        weight = params[f"{self.name}.weight"]
        inputs = len(self.in_shape)
        y = matmul(_matrix(x, inputs), _matrix(weight, weight.ndim - inputs), dtype=accumulator(x.dtype))
        y = y.reshape(*x.shape[: x.ndim - inputs], *weight.shape[inputs:])
        if self.bias:
            y = add_bias(y, params[f"{self.name}.bias"])
        return y if self.unrounded_y else y.astype(x.dtype, copy=False), x

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        x, weight = saved, params[f"{self.name}.weight"]
        inputs, outputs = len(self.in_shape), weight.ndim - len(self.in_shape)
        dy = _matrix(dy, outputs)
        if self.bias:
            yield f"{self.name}.bias", total(dy, axis=0).reshape(weight.shape[inputs:])
        dweight = matmul(_matrix(x, inputs).T, dy, dtype=accumulator(x.dtype))
        yield f"{self.name}.weight", dweight.reshape(weight.shape)
        dx = matmul(dy, _matrix(weight, outputs).T, dtype=accumulator(x.dtype) if self.unrounded_dx else x.dtype)
        return dx.reshape(x.shape)


@dataclass(frozen=True)
class Bias:
    """``y = x + bias``, rounded to the type of the bias: the end of a row-parallel Linear, after the sum over ranks."""

    name: str
    shape: tuple[int, ...]
    init: float | str = "zeros"

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.bias": ParamSpec(self.shape, decay=False, init=self.init)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        bias = params[f"{self.name}.bias"]
        return add_bias(x.astype(accumulator(x.dtype)), bias).astype(bias.dtype, copy=False), None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        bias = params[f"{self.name}.bias"]
        yield f"{self.name}.bias", total(_matrix(dy, bias.ndim), axis=0).reshape(bias.shape)
        return dy


def add_bias(y: Array, bias: Array) -> Array:
    """Add ``bias`` to ``y`` in place and return it. Where y is a sum over ranks, it gets its bias *once* (slapo#10)."""
    y += bias
    return y


@dataclass(frozen=True)
class Embedding:
    """``y[b, s] = weight[ids[b, s]]``: a vector for each token. The input is integers in ``0 .. vocabulary - 1``."""

    name: str
    vocabulary: int
    width: int
    init: float | str | None = None

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": _table(self.vocabulary, self.width, self.init, axis=0)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return params[f"{self.name}.weight"][x], x  # (batch, seq, width)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield f"{self.name}.weight", _sum_by_id(saved, dy, len(params[f"{self.name}.weight"]))
        return None


def _sum_by_id(ids: Array, dy: Array, size: int) -> Array:
    """Return the (size, width) array whose row i is the sum of the rows of dy that belong to id i.

    Sorted by id, the rows of one id stand together; each second one is added to the one before it
    until one is left. The order is fixed, so replicas get the same bits, which ``add.at`` on a GPU
    does not promise; and no row touches the sum of another id, as it does in CuPy's ``add.reduceat``,
    a difference of cumulative sums.
    """
    xp = array_module(dy)
    sums = xp.zeros((size, dy.shape[-1]), dtype=accumulator(dy.dtype))
    on_host = to_host(ids).reshape(ids.size)
    order = np.argsort(on_host, kind="stable")
    ids, rows = on_host[order], widen(_matrix(dy, 1)[xp.asarray(order)])  # (tokens,), (tokens, width)
    first = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    place = np.arange(len(ids)) - np.repeat(first, np.diff(first, append=len(ids)))  # 0, 1, 2, ... in each id
    while place.any():
        odd, even = np.flatnonzero(place % 2), np.flatnonzero(place % 2 == 0)
        rows[xp.asarray(odd - 1)] += rows[xp.asarray(odd)]
        ids, rows, place = ids[even], rows[xp.asarray(even)], place[even] // 2
    sums[xp.asarray(ids)] = rows
    return sums


@dataclass(frozen=True)
class Position:
    """``y[b, s] = x[b, s] + weight[s]``: a learned vector for each place in the sequence."""

    name: str
    context: int
    width: int
    init: float | str | None = None

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {f"{self.name}.weight": _table(self.context, self.width, self.init)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        weight = params[f"{self.name}.weight"]
        if x.shape[1] > len(weight):
            raise ValueError(f"a sequence of {x.shape[1]} tokens is longer than the context, {len(weight)} positions")
        return (widen(x) + weight[: x.shape[1]]).astype(weight.dtype, copy=False), None

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        xp, weight = array_module(dy), params[f"{self.name}.weight"]
        dweight = xp.zeros(weight.shape, dtype=accumulator(dy.dtype))
        dweight[: dy.shape[1]] = total(dy, axis=0)
        yield f"{self.name}.weight", dweight
        return dy


@dataclass(frozen=True)
class Unembed:
    """``y = x @ weight.T``: a score for each token of the vocabulary.

    The weight has the shape of an embedding's, ``(vocabulary, width)``; where its name is that of the
    embedding, the two are tied: one parameter, yielded twice.
    """

    weight: str
    vocabulary: int
    width: int
    init: float | str | None = None
    unrounded_dx: bool = field(default=False, kw_only=True)

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {self.weight: _table(self.vocabulary, self.width, self.init, axis=0)}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        weight = params[self.weight]
        y = matmul(_matrix(x, 1), weight.T)
        return y.reshape(*x.shape[:-1], len(weight)), x  # (batch, seq, vocabulary)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        x, weight = saved, params[self.weight]
        dy = _matrix(dy, 1)
        yield self.weight, matmul(dy.T, _matrix(x, 1), dtype=accumulator(x.dtype))
        dx = matmul(dy, weight, dtype=accumulator(x.dtype) if self.unrounded_dx else x.dtype)
        return dx.reshape(x.shape)


@dataclass(frozen=True)
class LayerNorm:
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias``, over the last axis (Ba et al. 2016)."""

    name: str
    width: int
    eps: float = 1e-5

    @cached_property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {
            f"{self.name}.weight": ParamSpec((self.width,), decay=False, init="ones"),
            f"{self.name}.bias": ParamSpec((self.width,), decay=False, init="zeros"),
        }

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        xp = array_module(x)
        mean = _mean(x)  # (batch, seq, 1), in the accumulator type as all that follows from it
        centred = x - mean
        scale = 1 / xp.sqrt(_mean_product(centred, centred) + self.eps)
        y = centred * scale * params[f"{self.name}.weight"] + params[f"{self.name}.bias"]
        return y.astype(x.dtype, copy=False), (x, mean, scale)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        x, mean, scale = saved
        normal = (x - mean) * scale
        yield f"{self.name}.bias", total(_matrix(dy, 1), axis=0)
        yield f"{self.name}.weight", total(_matrix(dy * normal, 1), axis=0)
        dnormal = widen(dy) * params[f"{self.name}.weight"]
        # Shift and scale of x do not change y: dx has no part along 1 and none along x.
        dx = scale * (dnormal - _mean(dnormal) - normal * _mean_product(dnormal, normal))
        return dx.astype(x.dtype, copy=False)


@dataclass(frozen=True)
class ReLU:
    """``y = max(x, 0)``; its slope at 0 is 0."""

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        return array_module(x).maximum(x, 0), x > 0

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return array_module(dy).where(saved, dy, 0)


@dataclass(frozen=True)
class GELU:
    """``y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, the form of GPT-2 (Hendrycks & Gimpel 2016).

    With the gate ``g(x) = (1 + tanh(r x + r c x^3)) / 2``, whose slope is ``2 g (1 - g) (r + 3 r c x^2)``::

        y  = x g(x)
        dx = dy g(x) (1 + x (1 - g(x)) (2 r + 6 r c x^2))
    """

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        u = widen(x)
        y = self._gate(u)
        y *= u
        return y.astype(x.dtype, copy=False), x

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        u = widen(saved)
        gate = self._gate(u)
        dx = u * u
        dx *= 6 * _R * _C
        dx += 2 * _R
        dx *= u
        dx *= 1 - gate
        dx += 1
        dx *= gate
        dx *= dy
        return dx.astype(saved.dtype, copy=False)

    @staticmethod
    def _gate(u: Array) -> Array:
        gate = u * u  # u**3 takes 288 times as long
        gate *= _R * _C
        gate += _R
        gate *= u
        array_module(u).tanh(gate, out=gate)
        gate += 1
        gate *= 0.5
        return gate


_R, _C = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class Attention:
    """Causal self-attention of each head by itself (Vaswani et al. 2017, section 3.2.1); no parameters.

    ``(batch, seq, 3, heads, head_dim) -> (batch, seq, heads, head_dim)``: the input holds queries, keys
    and values; the output is ``softmax(q k^T / sqrt(head_dim)) v`` over this and earlier places.

    Attributes
    ----------
    name : part of the address of the dropout mask
    heads : (start, stop, total): the heads at hand are those from start to stop out of the model's total
    rate : share of the probabilities that dropout sets to zero
    """

    name: str
    heads: tuple[int, int, int]
    rate: float = 0.0

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        xp = array_module(x)
        q, k, v = _heads_first(x)
        scores = matmul(self._scaled(q), k.swapaxes(-1, -2))  # (batch, heads, seq, seq)
        scores += xp.triu(xp.full(scores.shape[-2:], -math.inf, dtype=scores.dtype), 1)  # not the future
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= total(scores, axis=-1, keepdims=True)
        probabilities = scores.astype(x.dtype, copy=False)
        keep = self._mask(xp, probabilities.shape[-1], at)
        y = matmul(_drop(probabilities, keep, self.rate), v)
        return xp.ascontiguousarray(y.swapaxes(1, 2)), (x, probabilities, keep)

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        x, probabilities, keep = saved
        xp = array_module(x)
        q, k, v = _heads_first(x)
        dy = dy.swapaxes(1, 2)  # (batch, heads, seq, head_dim)
        dscores = _drop(matmul(dy, v.swapaxes(-1, -2), dtype=accumulator(x.dtype)), keep, self.rate)
        # The probabilities of a row sum to 1 whatever the scores are, so their common part is taken out.
        dscores -= xp.einsum("bhst,bhst->bhs", dscores, widen(probabilities))[..., None]
        dscores *= probabilities
        dscores = dscores.astype(x.dtype, copy=False)
        dx = xp.empty(x.shape, x.dtype)
        dq, dk, dv = _heads_first(dx)  # views
        dq[...] = self._scaled(matmul(dscores, k, dtype=accumulator(x.dtype)))
        dk[...] = matmul(dscores.swapaxes(-1, -2), self._scaled(q))
        dv[...] = matmul(_drop(probabilities, keep, self.rate).swapaxes(-1, -2), dy)
        return dx

    @staticmethod
    def _scaled(q: Array) -> Array:
        """Return q / sqrt(head_dim), in the accumulator type: cheaper than to scale the scores."""
        return widen(q) * (1 / math.sqrt(q.shape[-1]))

    def _mask(self, xp: Any, seq: int, at: At) -> Array | None:
        if not (self.rate and at.train):
            return None
        start, stop, heads = self.heads
        return _kept(xp, self.name, self.rate, (heads, seq, seq), at)[:, start:stop]


def _heads_first(x: Array) -> tuple[Array, Array, Array]:
    q, k, v = (x[:, :, i].swapaxes(1, 2) for i in range(3))  # (batch, heads, seq, head_dim), views
    return q, k, v


@dataclass(frozen=True)
class Dropout:
    """``y = x * mask / (1 - rate)``; seed, name, step and global row decide the mask (Srivastava et al. 2014)."""

    name: str
    rate: float

    @property
    def specs(self) -> Mapping[str, ParamSpec]:
        return {}

    def forward(self, params: Params, x: Array, at: At) -> tuple[Array, Any]:
        keep = _kept(array_module(x), self.name, self.rate, x.shape[1:], at) if self.rate and at.train else None
        return (x.copy() if keep is None else _drop(x, keep, self.rate)), keep

    def backward(self, params: Params, saved: Any, dy: Array) -> Gradients:
        yield from ()
        return dy if saved is None else _drop(dy, saved, self.rate)


def _kept(xp: Any, name: str, rate: float, shape: tuple[int, ...], at: At) -> Array:
    """Return the mask, True where kept, of the rows ``at.rows``: ``(len(at.rows), *shape)``."""
    return xp.asarray(rng.uniform((at.seed, "dropout", name, at.step), shape, at.rows) >= rate)


def _drop(x: Array, keep: Array | None, rate: float) -> Array:
    if keep is None:
        return x
    factor = keep.astype(accumulator(x.dtype))
    factor *= 1 / (1 - rate)
    factor *= x
    return factor.astype(x.dtype, copy=False)


def _matrix(x: Array, trailing: int) -> Array:
    """Return x as a matrix whose columns are its last ``trailing`` axes. No -1 in reshape: an axis may be empty."""
    split = x.ndim - trailing
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


def _mean(x: Array) -> Array:
    return total(x, axis=-1, keepdims=True) * (1 / x.shape[-1])


def _mean_product(x: Array, y: Array) -> Array:
    return array_module(x).einsum("...i,...i->...", x, y)[..., None] * (1 / x.shape[-1])


def _table(rows: int, width: int, init: float | str | None, axis: int | None = None) -> ParamSpec:
    return ParamSpec((rows, width), axis, init=1 / math.sqrt(width) if init is None else init)
