"""The networks of refpar as torch modules, which load its parameters by name.

Module names are refpar's, so ``named_parameters()`` has them too, but for ``head.out.weight``, which is
``head.weight``, or the token embedding where they are tied. Linear layers are ``nn.Linear``, as tensor parallelism
wants them; so :func:`to_torch` and :func:`to_refpar` turn a weight from ``(in, out)`` to ``(out, in)``, and put
queries, keys and values of one head together, ``(3, heads, head_dim)`` to ``(heads, 3, head_dim)``, because a slice of
rows shall be whole heads.

Dropout masks are refpar's, addressed by step and row (:mod:`refpar.rng`): two libraries that draw their own have no
number in common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refpar import rng
from refpar.case import Case, State
from refpar.nn.models import GPT, MLP

HostArray = npt.NDArray[Any]


@dataclass
class Where:
    """Where a forward pass stands, see :class:`refpar.nn.layer.At`; shared by all layers of a model."""

    seed: int = 0
    step: int = 0
    rows: tuple[int, ...] = ()


class Drop(nn.Module):
    """Dropout with refpar's masks.

    Attributes
    ----------
    first : of the heads at hand, the first one: under tensor parallelism
    """

    def __init__(self, name: str, rate: float, where: Where) -> None:
        super().__init__()
        self.name, self.rate, self.where = name, rate, where

    def forward(self, x: Tensor, heads: int = 0, first: int = 0) -> Tensor:
        """Drop elements of ``x``; of attention probabilities, those of heads from ``first`` on, out of ``heads``."""
        if not self.rate:
            return x
        at, shape = self.where, (heads, *x.shape[2:]) if heads else tuple(x.shape[1:])
        keep = rng.uniform((at.seed, "dropout", self.name, at.step), shape, at.rows) >= self.rate
        if heads:
            keep = keep[:, first : first + x.shape[1]]
        return x * (torch.from_numpy(keep).to(x.dtype) * (1 / (1 - self.rate)))


class Attention(nn.Module):
    """Causal self-attention; how many heads are at hand follows from what ``qkv`` returns."""

    def __init__(self, name: str, model: GPT, where: Where) -> None:
        super().__init__()
        self.heads, self.head_dim = model.heads, model.width // model.heads
        self.first = 0
        self.qkv = nn.Linear(model.width, 3 * model.width)
        self.proj = nn.Linear(model.width, model.width)
        self.probabilities = Drop(name, model.dropout, where)
        self.dropout = Drop(f"{name}.dropout", model.dropout, where)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        y = self.qkv(x)
        heads = y.shape[-1] // (3 * self.head_dim)
        q, k, v = y.reshape(batch, seq, heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)  # (batch, heads, seq, head_dim)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
        y = self.probabilities(scores.softmax(-1), self.heads, self.first) @ v
        return self.dropout(self.proj(y.transpose(1, 2).reshape(batch, seq, heads * self.head_dim)))


class Feedforward(nn.Module):
    """The MLP of a block."""

    def __init__(self, name: str, model: GPT, where: Where) -> None:
        super().__init__()
        hidden = model.mlp_width or 4 * model.width
        self.up, self.down = nn.Linear(model.width, hidden), nn.Linear(hidden, model.width)
        self.relu = model.activation == "relu"
        self.dropout = Drop(f"{name}.dropout", model.dropout, where)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.dropout(self.down(F.relu(y) if self.relu else F.gelu(y, approximate="tanh")))


class Block(nn.Module):
    """``x + attention(norm1(x))``, then ``x + mlp(norm2(x))``."""

    def __init__(self, name: str, model: GPT, where: Where) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(model.width), nn.LayerNorm(model.width)
        self.attention = Attention(f"{name}.attention", model, where)
        self.mlp = Feedforward(f"{name}.mlp", model, where)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position."""

    def __init__(self, model: GPT, where: Where) -> None:
        super().__init__()
        self.token = nn.Embedding(model.vocabulary, model.width)
        self.position = nn.Embedding(model.context, model.width)
        self.dropout = Drop("embedding.dropout", model.dropout, where)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.token(ids) + self.position(torch.arange(ids.shape[1])))


class Head(nn.Module):
    """Logits."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.out = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Network(nn.Module):
    """A model as units, in order; ``where`` is set before each forward pass."""

    def __init__(self, model: GPT | MLP) -> None:
        super().__init__()
        self.where = Where()
        if isinstance(model, MLP):
            pairs = list(zip(model.widths, model.widths[1:], strict=False))
            self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        else:
            self.embedding = Embedding(model, self.where)
            self.blocks = nn.ModuleList(Block(f"blocks.{i}", model, self.where) for i in range(model.layers))
            self.head = Head(model)

    @property
    def units(self) -> list[nn.Module]:
        """The units of refpar's model, in order."""
        if hasattr(self, "layers"):
            last = len(self.layers) - 1
            return [layer if i == last else Rectified(layer) for i, layer in enumerate(self.layers)]
        return [self.embedding, *self.blocks, self.head]

    def tie(self) -> None:
        """Give embedding and head one weight."""
        self.head.out.weight = self.embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class Rectified(nn.Module):
    """A linear layer and the ReLU behind it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


def build(case: Case) -> Network:
    """Return the network of a case with its initial values."""
    dtype = getattr(torch, case.precision.compute)
    network = Network(case.model).to(dtype)
    values = State.initial(case).parameters
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            known = refpar_name(name, case)
            if known in values:
                parameter.copy_(to_torch(known, values[known], case))
    if isinstance(case.model, GPT) and case.model.tied:
        network.tie()
    network.where.seed = case.seed
    return network


def refpar_name(name: str, case: Case) -> str:
    """Return refpar's name of a parameter of a :class:`Network`, whatever wraps it."""
    name = name.removeprefix("module.")
    for inserted in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(inserted, "")
    if name == "head.out.weight":
        return "embedding.token.weight" if isinstance(case.model, GPT) and case.model.tied else "head.weight"
    return name


def to_torch(name: str, x: HostArray, case: Case) -> Tensor:
    """Return a value of refpar's parameter ``name`` as the module has it."""
    if isinstance(case.model, GPT):
        if name.endswith("qkv.weight"):
            x = x.transpose(2, 1, 3, 0).reshape(
                -1, x.shape[0]
            )  # (width, 3, heads, head_dim) -> (heads 3 head_dim, width)
        elif name.endswith("qkv.bias"):
            x = x.transpose(1, 0, 2).reshape(-1)
        elif name.endswith(("proj.weight", "up.weight", "down.weight")):
            x = x.reshape(-1, x.shape[-1]).T
    elif name.endswith(".weight"):
        x = x.T
    return torch.from_numpy(np.array(x, order="C"))


def to_refpar(name: str, x: Tensor, case: Case) -> HostArray:
    """Return a value of the module's parameter as refpar has it: the inverse of :func:`to_torch`."""
    host: HostArray = x.detach().cpu().numpy()
    if isinstance(case.model, GPT):
        model, head_dim = case.model, case.model.width // case.model.heads
        if name.endswith("qkv.weight"):
            host = host.reshape(model.heads, 3, head_dim, model.width).transpose(3, 1, 0, 2)
        elif name.endswith("qkv.bias"):
            host = host.reshape(model.heads, 3, head_dim).transpose(1, 0, 2)
        elif name.endswith("proj.weight"):
            host = host.T.reshape(model.heads, head_dim, model.width)
        elif name.endswith(("up.weight", "down.weight")):
            host = host.T
    elif name.endswith(".weight"):
        host = host.T
    return np.array(host, order="C")


def loss_sum(case: Case, y: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of losses over the targets of the mask."""
    if isinstance(case.model, MLP):
        return ((y - targets)[mask] ** 2).sum()
    return F.cross_entropy(y.flatten(0, 1), targets.masked_fill(~mask, -100).flatten(), reduction="sum")
