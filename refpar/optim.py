"""SGD, Adam and AdamW on whatever flat piece they are handed, and clipping by the global norm.

The update is elementwise, so it does not matter which elements are at hand: a whole parameter, a
ZeRO shard, one slice of a tensor-parallel weight. It is done in place on ``p`` and on its ``state``,
arrays of one type and shape, float32 or float64; ``g`` is left alone. Sent: nothing. Held for
each element beside the parameter: nothing for SGD, one number with momentum, two for Adam, m and v.

A skipped step (an overflow, a step without tokens) calls nothing here: ``t`` counts the updates that
were made (NeMo#3293).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from refpar.arrays import Array, array_module
from refpar.checks import fix, real, short, whole
from refpar.nn.layer import ParamSpec


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with momentum as PyTorch has it: the first buffer is the gradient itself.

    ::

        g += weight_decay * p
        b  = momentum * b + g           without (1 - momentum) before g
        p -= lr * b

    Attributes
    ----------
    lr : learning rate
    momentum : 0 keeps no buffer
    weight_decay : an L2 term in the gradient
    warmup : updates over which the learning rate rises to lr, see :func:`learning_rate`
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self)
        fix(self, real, "momentum", below=1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """What is kept for each parameter between updates, beside the parameter."""
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1); weight decay is an L2 term in the gradient.

    ::

        g += weight_decay * p
        m  = beta1 * m + (1 - beta1) * g
        v  = beta2 * v + (1 - beta2) * g^2
        p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self)
        betas, name = tuple(self.betas) if isinstance(self.betas, Iterable) else (), f"{type(self).__name__} betas"
        if len(betas) != 2:
            raise ValueError(f"{name} is {short(self.betas)}: it must be two numbers")
        object.__setattr__(self, "betas", tuple(real(f"{name}[{i}]", beta, below=1) for i, beta in enumerate(betas)))
        fix(self, real, "eps")

    @property
    def state_names(self) -> tuple[str, ...]:
        """What is kept for each parameter between updates, beside the parameter."""
        return ("m", "v")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): ``p -= lr * weight_decay * p`` comes first."""

    weight_decay: float = 0.01


Optimizer = SGD | Adam


def learning_rate(optimizer: Optimizer, t: int) -> float:
    """Return the learning rate of update ``t`` = 1, 2, ...: ``lr * t / warmup``, and ``lr`` from ``t = warmup`` on."""
    return optimizer.lr * t / optimizer.warmup if t < optimizer.warmup else optimizer.lr


def next_t(t: int, outcome: str) -> int:
    """Return the number of updates made: a step that was skipped is none, for Adam and for warm-up (NeMo#3293)."""
    return t + (outcome == "updated")


def decays(spec: ParamSpec) -> bool:
    """Return whether weight decay applies to a parameter: to weights, not to biases and norms."""
    return spec.decay


def update(optimizer: Optimizer, p: Array, g: Array, state: Mapping[str, Array], t: int, decay: bool) -> None:
    """Make update ``t`` = 1, 2, ... of ``p`` in place.

    Parameters
    ----------
    p : parameter, or any part of it; written to
    g : its gradient: divided, unscaled, clipped
    state : from :func:`new_state`; written to
    t : number of this update, skipped steps not counted
    decay : whether weight decay applies, see :func:`decays`
    """
    xp, lr = array_module(p), learning_rate(optimizer, t)
    weight_decay = optimizer.weight_decay if decay else 0.0
    if isinstance(optimizer, AdamW):
        p *= 1 - lr * weight_decay
    elif weight_decay:
        g = g + weight_decay * p
    if isinstance(optimizer, SGD):
        if optimizer.momentum:
            b = state["momentum"]
            b *= optimizer.momentum
            b += g
            g = b
        p -= lr * g
    else:
        m, v, (beta1, beta2) = state["m"], state["v"], optimizer.betas
        m *= beta1
        m += (1 - beta1) * g
        v *= beta2
        v += (1 - beta2) * g * g
        p -= lr / (1 - beta1**t) * m / (xp.sqrt(v / (1 - beta2**t)) + optimizer.eps)


def new_state(optimizer: Optimizer, p: Array) -> dict[str, Array]:
    """Return the state of ``p`` before its first update: zeros of its shape and type."""
    return {name: array_module(p).zeros_like(p) for name in optimizer.state_names}


def squared_norm(g: Array) -> float:
    """Return the sum of the squares of all elements, in float64; 0 where there are none.

    Squares of halves overflow from 256 on (fairscale#520), those of float32 from 1.8e19 on. The squared
    norms of disjoint pieces are added up to that of the whole; norms, or maxima, or means are not.
    """
    flat = g.astype(np.float64).reshape(g.size)
    return float(flat @ flat)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what all gradients are multiplied by so that their norm is at most ``max_norm``: never above 1.

    PyTorch adds 1e-6 to the norm; here the factor is ``max_norm / norm``. A norm of 0 gives 1, and so
    does ``max_norm = None``, no clipping. An infinite norm gives 0, which turns infinite gradients into
    NaN, and a NaN gives NaN: neither is hidden by a factor of 1.
    """
    if max_norm is None:
        return 1.0
    if math.isnan(norm):
        return math.nan
    return max_norm / norm if norm > max_norm else 1.0


def _check(optimizer: Optimizer) -> None:
    fix(optimizer, real, "lr", "weight_decay")
    fix(optimizer, whole, "warmup", least=0)
