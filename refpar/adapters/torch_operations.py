"""The operations underneath PyTorch's techniques, each held to a single device: collectives, and those of DTensor.

    refpar conformance refpar.adapters.torch_operations:Operations

:class:`Operations` is an adapter as anybody would write it: methods that run on every rank, on standing gloo workers.
For the many operations of DTensor there is a table, :data:`SHARDED`: each is computed on a whole tensor and on one in
pieces, and both the value and the gradient must be the same. What is known to be wrong in it, in the version that is
named there, is in :data:`KNOWN`; what is known of the collectives is in ``torch_known.txt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from refpar import split
from refpar.conformance import spmd

HostArray = npt.NDArray[Any]


def tensor(x: HostArray) -> Tensor:
    """Return a tensor with memory of its own, in C order: c10d refuses any other."""
    return torch.from_numpy(np.array(x, order="C"))


def mesh() -> DeviceMesh:
    """Return all ranks as a mesh of one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Operations:
    """c10d collectives on gloo, DTensor's linear layers and losses, clipping, GradScaler and checkpoint."""

    name = "torch operations (gloo, DTensor)"
    version = torch.__version__
    workers = "torch"
    ranks = (2, 3, 4)
    dtypes = ("float16", "float32", "float64")
    even_slices = True  # DTensor cuts by one rule; it has no slices of any length
    clip_eps = 1e-6

    @spmd
    def all_reduce(self, array: HostArray) -> HostArray:
        """Return the sum over ranks."""
        x = tensor(array)
        dist.all_reduce(x)
        return x.numpy()

    @spmd
    def all_reduce_max(self, array: HostArray) -> HostArray:
        """Return the maximum over ranks."""
        x = tensor(array)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x.numpy()

    @spmd
    def reduce_scatter(self, array: HostArray, counts: Sequence[int]) -> HostArray:
        """Return this rank's part of the sum."""
        parts = list(tensor(array).split(list(counts)))
        out = torch.empty(counts[dist.get_rank()], dtype=parts[0].dtype)
        dist.reduce_scatter(out, parts)
        return out.numpy()

    @spmd
    def all_gather(self, array: HostArray) -> HostArray:
        """Return everybody's array."""
        lengths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lengths, len(array))
        padded = np.zeros(max(lengths), array.dtype)
        padded[: len(array)] = array
        out = [torch.empty(max(lengths), dtype=torch.float64) for _ in lengths]
        dist.all_gather(out, tensor(padded))
        return torch.cat([x[:n] for x, n in zip(out, lengths, strict=True)]).numpy()

    @spmd
    def broadcast(self, array: HostArray, root: int) -> HostArray:
        """Return the root's array."""
        x = tensor(array)
        dist.broadcast(x, src=root)
        return x.numpy()

    @spmd
    def all_to_all(self, array: HostArray) -> HostArray:
        """Return this rank's row of everybody's array."""
        x = tensor(array)
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out.numpy()

    @spmd
    def column_linear(self, x: HostArray, weight: HostArray, bias: HostArray, dy: HostArray) -> Any:
        """Run this rank's columns there and back."""
        return linear(x, weight, bias, dy, (Replicate(), Shard(1), Shard(0), Shard(1)))

    @spmd
    def row_linear(self, x: HostArray, weight: HostArray, bias: HostArray, dy: HostArray) -> Any:
        """Run this rank's rows there and back."""
        return linear(x, weight, bias, dy, (Shard(1), Shard(0), Replicate(), Replicate()))

    @spmd
    def vocabulary_cross_entropy(self, logits: HostArray, targets: HostArray, mask: HostArray) -> Any:
        """Return the sum of losses, and its gradient by this rank's logits."""
        from torch.distributed.tensor.parallel import loss_parallel

        own = tensor(logits).requires_grad_()
        y = DTensor.from_local(own, mesh(), [Shard(1)])
        with loss_parallel():
            loss: Any = F.cross_entropy(y, tensor(np.where(mask, targets, -100)), reduction="sum")
            loss.backward()
        return whole(loss.detach()).numpy(), np.asarray(own.grad)

    @spmd
    def clip(self, gradients: dict[str, HostArray], max_norm: float) -> Any:
        """Return the global norm, and clipped gradients."""
        lengths: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lengths, len(gradients["sharded"]))
        sharded = DTensor.from_local(
            tensor(gradients["sharded"]), mesh(), [Shard(0)], shape=torch.Size([sum(lengths)]), stride=(1,)
        )
        replicated = tensor(gradients["replicated"])
        parts = [whole(nn.utils.get_total_norm([g])) for g in (sharded, replicated)]
        norm = nn.utils.get_total_norm([part.reshape(1) for part in parts])
        for g in (sharded.to_local(), replicated):
            p = nn.Parameter(torch.empty_like(g))
            p.grad = g
            nn.utils.clip_grads_with_norm_([p], max_norm, norm)
        return float(norm), {"sharded": sharded.to_local().numpy(), "replicated": replicated.numpy()}

    @spmd
    def loss_scale(self, rule: Any, overflows: Sequence[bool]) -> Any:
        """Return the scale and the growth counter after each step."""
        p = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=rule.initial, growth_factor=rule.growth, backoff_factor=rule.backoff,
            growth_interval=rule.interval,
        )  # fmt: skip
        scales, goods = [], []
        for overflow in overflows:
            scaler.scale(torch.zeros(()))
            p.grad = torch.full((1,), float("inf") if overflow else 1.0)
            dist.all_reduce(p.grad)  # as DistributedDataParallel does
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            goods.append(scaler._get_growth_tracker())
        return scales, goods

    preserve_rng_state = True

    @spmd
    def checkpoint(self, x: HostArray, weight: HostArray, rate: float, seed: int, recompute: bool) -> Any:
        """Return y and the gradients of its sum, with and without recomputation."""
        a, w = tensor(x).requires_grad_(), tensor(weight).requires_grad_()

        def layer(a: Tensor, w: Tensor) -> Tensor:
            return F.dropout(torch.relu(a @ w), rate)

        torch.manual_seed(seed)
        if recompute:
            y = checkpoint(layer, a, w, use_reentrant=False, preserve_rng_state=self.preserve_rng_state)
        else:
            y = layer(a, w)
        y.sum().backward()
        return y.detach().numpy(), np.asarray(a.grad), np.asarray(w.grad)


class ForgetsRandomNumbers(Operations):
    """The trap of ``preserve_rng_state=False``: dropout draws anew when it is recomputed."""

    preserve_rng_state = False


def linear(x: HostArray, weight: HostArray, bias: HostArray, dy: HostArray, placements: Sequence[Any]) -> Any:
    """Run ``x @ weight + bias`` of DTensors there and back; return y, and the gradients, as this rank has them."""
    axis = mesh()
    a, w, b = (
        DTensor.from_local(tensor(own), axis, [place]).detach().requires_grad_()
        for own, place in zip((x, weight, bias), placements, strict=False)
    )
    y = F.linear(a, w.t(), b)
    back = DTensor.from_local(tensor(dy), axis, [placements[3]])
    y = y.redistribute(axis, [placements[3]])
    y.backward(back)
    grads = [p.grad.redistribute(axis, [place]).to_local() for p, place in zip((a, w, b), placements, strict=False)]
    return tuple(np.array(t.detach()) for t in (y.to_local(), *grads))


def whole(x: Tensor) -> Tensor:
    """Return the whole of a tensor, which may be in pieces."""
    return x.full_tensor() if isinstance(x, DTensor) else x


# DTensor, operation by operation


SHARDED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "sum of all": lambda x, d: x.sum(),
    "mean": lambda x, d: x.mean(d),
    "mean of all": lambda x, d: x.mean(),
    "amax": lambda x, d: x.amax(d),
    "max of all": lambda x, d: x.max(),
    "prod": lambda x, d: x.prod(d),
    "var": lambda x, d: x.var(d),
    "var of all": lambda x, d: x.var(),
    "std": lambda x, d: x.std(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x),
    "1-norm": lambda x, d: torch.linalg.vector_norm(x, 1),
    "3-norm": lambda x, d: torch.linalg.vector_norm(x, 3),
    "inf-norm": lambda x, d: torch.linalg.vector_norm(x, float("inf")),
    "-inf-norm": lambda x, d: torch.linalg.vector_norm(x, -float("inf")),
    "norm along": lambda x, d: torch.linalg.vector_norm(x, 2, dim=d),
    "argmax": lambda x, d: x.argmax(d),
    "argmax of all": lambda x, d: x.argmax(),
    "cumsum": lambda x, d: x.cumsum(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "topk": lambda x, d: x.topk(1, d).values,
    "sort": lambda x, d: x.sort(d).values,
    "layer_norm": lambda x, d: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x, d: F.rms_norm(x, x.shape[-1:], eps=1e-5),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "narrow": lambda x, d: x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2),
    "every second row": lambda x, d: x[::2],
    "last row": lambda x, d: x[-1],
    "tril": lambda x, d: x.tril(),
    "pad": lambda x, d: F.pad(x, (1, 1)),
    "repeat": lambda x, d: x.repeat(*([2] * x.ndim)),
    "cat": lambda x, d: torch.cat([x, x * 2], d),
    "stack": lambda x, d: torch.stack([x, x * 2], d),
    "gather": lambda x, d: x.gather(d, torch.zeros_like(x, dtype=torch.int64)),
    "where": lambda x, d: torch.where(x > 0, x, -2 * x),
    "sum, then square": lambda x, d: x.sum(d) ** 2,
    "sum, then relu": lambda x, d: torch.relu(x.sum(d)),
    "sum, then add 1": lambda x, d: x.sum(d) + 1,
    "max, then times -2": lambda x, d: x.amax(d) * -2,
    "times its sum": lambda x, d: x * x.sum(),
    "over its mean": lambda x, d: x / x.abs().mean(),
    "item of the sum": lambda x, d: torch.as_tensor(x.sum().item(), dtype=x.dtype),
    "mse_loss": lambda x, d: F.mse_loss(x, x.detach() * 0.5),
    "mse_loss, sum": lambda x, d: F.mse_loss(x, x.detach() * 0.5, reduction="sum"),
    "l1_loss": lambda x, d: F.l1_loss(x, x.detach() * 0.5),
    "smooth_l1_loss": lambda x, d: F.smooth_l1_loss(x, x.detach() * 0.5),
    "huber_loss": lambda x, d: F.huber_loss(x, x.detach() * 0.5),
    "huber_loss, sum": lambda x, d: F.huber_loss(x, x.detach() * 0.5, reduction="sum"),
    "binary_cross_entropy": lambda x, d: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).to(x.dtype)),
    "bce_with_logits": lambda x, d: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype)),
    "kl_div": lambda x, d: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "x @ x.T": lambda x, d: x @ x.transpose(-1, -2) if x.ndim > 1 else x @ x,
}
"""By name: a function of a tensor and an axis."""


@dataclass(frozen=True)
class Example:
    """An operation on a tensor in pieces.

    Attributes
    ----------
    name : of :data:`SHARDED`
    x : the whole input, float64
    axis : that the operation is told
    cut : the axis that is sharded, -1 for replicas, -2 for partial sums of which the input is the total
    """

    name: str
    x: HostArray
    axis: int
    cut: int


@dataclass(frozen=True)
class Answer:
    """What came out: ``""``, ``"value"`` or ``"gradient"`` is wrong, or ``"refused"``; then what it is, and must be."""

    wrong: str
    got: Any = None
    right: Any = None


def single_device(example: Example) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the value, its gradient, and the weights of the sum that the gradient is of."""
    x = tensor(example.x).requires_grad_()
    y = SHARDED[example.name](x, example.axis)
    weights = torch.linspace(-1, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape) + 0.25
    if not y.requires_grad:
        return y, None, weights
    (y * weights).sum().backward()
    return y.detach(), x.grad, weights


def in_pieces(example: Example) -> Answer:
    """Compute on every rank, from a piece each, and hold the result to a single device; called on a worker."""
    try:
        value, gradient, weights = single_device(example)
    except (RuntimeError, IndexError, ValueError):
        return Answer("refused")  # by the single device too
    x: Any = cut(example)
    y: Any = SHARDED[example.name](x, example.axis)
    got = whole(y)
    if not alike(got.detach(), value):
        return Answer("value", got.detach().tolist(), value.tolist())
    if gradient is None:
        return Answer("")
    if not got.requires_grad:
        return Answer("gradient", None, gradient.tolist())
    (got * weights).sum().backward()
    own = whole(x.grad)
    return Answer("") if alike(own, gradient) else Answer("gradient", own.tolist(), gradient.tolist())


def in_pieces_or_refused(example: Example) -> Answer:
    """The same, for operations that DTensor may refuse: that is loud, and no number is wrong."""
    try:
        return in_pieces(example)
    except (RuntimeError, NotImplementedError):
        return Answer("refused")


def cut(example: Example) -> DTensor:
    """Return the input in pieces."""
    x, axis, rank, ranks = tensor(example.x), mesh(), dist.get_rank(), dist.get_world_size()
    if example.cut == -2:
        share = x * ((rank + 1) / (ranks * (ranks + 1) / 2))
        pieces: DTensor = DTensor.from_local(share, axis, [Partial()])
    else:
        place = Replicate() if example.cut == -1 else Shard(example.cut)
        pieces = distribute_tensor(x, axis, [place], src_data_rank=None)
    return pieces.detach().requires_grad_()


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two results of one short computation in float64 are equal, but for roundings.

    Either way of computing an entry takes fewer than 64 roundings one after another. Each is of at most 2^-53 of a
    number that is below 64 (some 20 inputs of about 1, or the sum of their squares), or no larger than the results are.
    """
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    largest = max([64.0, *b[b.isfinite()].abs().flatten().tolist()])
    return torch.allclose(a, b, rtol=0, atol=2 * 64 * 2.0**-53 * largest, equal_nan=True)


def empty_pieces(example: Example, ranks: int) -> bool:
    """Return whether some rank has nothing: PyTorch cuts into ceil(n / ranks), so the last ones may."""
    if example.cut < 0:
        return False
    n = example.x.shape[example.cut]
    each = -(-n // ranks)
    return min(len(range(r * each, min((r + 1) * each, n))) for r in range(ranks)) == 0 or 0 in split.sizes(n, ranks)


def smallest(name: str, x: Sequence[float] = (0.375, -0.125)) -> Example:
    """Return the smallest input on which an operation is wrong: two numbers on two ranks, as a rule."""
    return Example(name, np.array(x), 0, 0)


LOSSES = "the backward pass divides by the elements of a rank instead of all: n times the gradient on n ranks"
NORMS = "the backward pass divides by the number of a rank's entries that are the maximum, which may be 0"
KNOWN: dict[str, tuple[Example, str]] = {
    "mse_loss": (smallest("mse_loss"), LOSSES),
    "smooth_l1_loss": (smallest("smooth_l1_loss"), LOSSES),
    "huber_loss": (smallest("huber_loss"), LOSSES),
    "binary_cross_entropy": (smallest("binary_cross_entropy"), LOSSES),
    "bce_with_logits": (
        smallest("bce_with_logits", (0.375, -0.125, 0.875)), "the mean of the ranks' means, though shards are unequal",
    ),
    "inf-norm": (smallest("inf-norm", (0.375, 0.875)), NORMS),
    "-inf-norm": (smallest("-inf-norm"), NORMS),
    "item of the sum": (smallest("item of the sum"), "item() of a sum that is still in parts is that of the own part"),
}  # fmt: skip
"""Operations that are wrong in torch 2.13.0, the smallest input, on two ranks, and how they are wrong."""
