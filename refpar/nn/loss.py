"""Losses are sums, and the count comes from the targets alone.

A mean over a micro-batch cannot be put together again: with 1 and 3 valid tokens and loss sums 8
and 4, the mean of the means is 4.667 and the mean is 3 (huggingface/transformers#34242). So a loss
returns the *sum* over its tokens; how many there are follows from the masks, before any forward
pass, and is summed over micro-batches and ranks like everything else. One place,
:func:`seed_and_divisor`, says where the count enters.

A token that the mask leaves out contributes exactly nothing to the loss and has a gradient of
exactly zero, even where its logits are infinite or NaN, and whatever its target is: -100, by
custom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from refpar.arrays import Array, array_module, total, widen

Divide = Literal["before", "after"]


class Loss(Protocol):
    """See the module's docstring."""

    def forward(self, y: Array, targets: Array, mask: Array) -> tuple[Array, Any]: ...

    def backward(self, saved: Any, seed: float) -> Array: ...


def token_count(mask: Array) -> int:
    """Return how many tokens (rows, for the squared error) the mask lets through."""
    return int(mask.sum())


def seed_and_divisor(divide: Divide, scale: float, count: int) -> tuple[float, float]:
    """Return what the backward pass starts from, and what its summed gradient is divided by at the end.

    ======  ============  =============  ==================================================
    divide  seed          divisor        \
    ======  ============  =============  ==================================================
    before  scale/count   scale          what mixed precision does: halves hold the *mean*
    after   scale         scale * count  integers stay integers until the last division
    ======  ============  =============  ==================================================

    Parameters
    ----------
    divide : where the count enters
    scale : the loss scale; 1 without
    count : tokens of the whole step: of all micro-batches, on all ranks. For 0 it is taken as 1: a
        sum over no tokens is zero, and stays zero
    """
    count = max(count, 1)
    if divide == "before":
        return scale / count, scale
    if divide == "after":
        return scale, scale * count
    raise ValueError(f"divide must be 'before' or 'after', not {divide!r}")


@dataclass(frozen=True)
class CrossEntropy:
    """``-log softmax(logits)[target]``, summed over the tokens of the mask.

    Kept for the backward pass: the probabilities (4 bytes a logit for halves), targets and mask.
    """

    def forward(self, y: Array, targets: Array, mask: Array) -> tuple[Array, Any]:
        """Return the sum, 0-d in the accumulator type, and what the backward pass needs.

        Parameters
        ----------
        y : logits (batch, seq, vocabulary)
        targets : integers (batch, seq), in 0 .. vocabulary - 1 where the mask is True
        mask : bool (batch, seq)
        """
        xp = array_module(y)
        logits = xp.where(mask[..., None], widen(y), 0)
        targets = xp.where(mask, targets, 0)[..., None]  # (batch, seq, 1)
        logits -= logits.max(axis=-1, keepdims=True)
        at_target = xp.take_along_axis(logits, targets, axis=-1)
        probabilities = xp.exp(logits, out=logits)
        normaliser = total(probabilities, axis=-1, keepdims=True)
        probabilities /= normaliser
        losses = (xp.log(normaliser) - at_target)[..., 0]  # (batch, seq)
        return total(losses * mask), (probabilities, targets, mask, y.dtype)

    def backward(self, saved: Any, seed: float) -> Array:
        """Return ``seed * (probabilities - onehot(target))``, in the type of the logits."""
        probabilities, targets, mask, dtype = saved
        xp = array_module(probabilities)
        weight = (mask * seed).astype(probabilities.dtype)[..., None]  # (batch, seq, 1)
        dy = probabilities * weight
        at_target = xp.take_along_axis(dy, targets, axis=-1)
        xp.put_along_axis(dy, targets, at_target - weight, axis=-1)
        return dy.astype(dtype, copy=False)


@dataclass(frozen=True)
class SquaredError:
    """``(y - target)^2``, summed over the columns and over the rows of the mask; the count is of rows."""

    def forward(self, y: Array, targets: Array, mask: Array) -> tuple[Array, Any]:
        """Return the sum, 0-d in the accumulator type, and what the backward pass needs.

        Parameters
        ----------
        y, targets : (batch, columns)
        mask : bool (batch,)
        """
        xp = array_module(y)
        error = xp.where(mask[:, None], widen(y) - widen(targets), 0)
        return total(error * error), (error, y.dtype)

    def backward(self, saved: Any, seed: float) -> Array:
        """Return ``2 * seed * (y - target)``, in the type of y."""
        error, dtype = saved
        return (error * (2 * seed)).astype(dtype, copy=False)
