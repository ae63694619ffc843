"""PyTorch's own distributed training, held to one device: adapters for the battery of :mod:`refpar.conformance`.

    refpar conformance refpar.adapters.torch_training:Fsdp          # Ddp, ZeroOptimizer, TensorParallel, Pipeline

Each trains the networks of ``torch_models.py`` on standing gloo workers, as PyTorch's documentation says that the
technique is to be used, and returns its gradients, optimizer state and weights by refpar's names. What users do wrong
with it is in :data:`TRAPS`: options of the same functions, that make the mistake.

Losses are sums over tokens divided by their number on all ranks, ``count``. DistributedDataParallel and FSDP *average*
gradients over ranks, so what runs backward is ``sum / count * world``. PyTorch clips by ``max / (norm + 1e-6)``, which
differs from the clipped gradient of the definition by 1e-6 of the limit; the factor here is the definition's, and
``clip_grad_norm_`` itself is looked at in ``torch_operations.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from refpar import optim
from refpar.adapters.pool import Pool
from refpar.adapters.torch_models import Network, Where, build, loss_sum, refpar_name, to_refpar
from refpar.case import Batch, Case, HostArray, Layout
from refpar.conformance import Limits
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, AdamW
from refpar.parallel import placement, schedule

Step = dict[str, Any]
"""Values of a step by refpar's names."""

BUFFERS = {"momentum": "momentum_buffer", "m": "exp_avg", "v": "exp_avg_sq"}


# What all techniques do alike


def optimizer(case: Case, named: Sequence[tuple[str, nn.Parameter]], kind: Callable[..., Any] | None = None) -> Any:
    """Return the torch optimizer of a case, weights that decay in one group and the others in another.

    Parameters
    ----------
    kind : makes the optimizer out of groups, a class and its options; by default the class does
    """
    o, specs = case.optimizer, case.model.build().specs
    groups = [
        {
            "params": [p for name, p in named if optim.decays(specs[name]) == decay],
            "weight_decay": o.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(o, SGD):
        cls, options = torch.optim.SGD, {"lr": o.lr, "momentum": o.momentum}
    else:
        cls = torch.optim.AdamW if isinstance(o, AdamW) else torch.optim.Adam  # type: ignore[assignment]
        options = {"lr": o.lr, "betas": o.betas, "eps": o.eps}  # type: ignore[dict-item]
    return cls(groups, **options) if kind is None else kind(groups, cls, options)  # type: ignore[arg-type]


def parameters(network: Network, case: Case) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a network, each once, by refpar's names."""
    return [(refpar_name(name, case), p) for name, p in network.named_parameters()]


def whole(x: Tensor) -> Tensor:
    """Return the whole of a tensor, which may be in pieces."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def tensors(batch: Batch, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and mask."""
    dtype = getattr(torch, case.precision.compute)
    x, y = (
        torch.from_numpy(a).to(dtype if a.dtype.kind == "f" else torch.int64) for a in (batch.inputs, batch.targets)
    )
    return x, y, torch.from_numpy(batch.mask)


def backward(
    model: Callable[[Tensor], Tensor],
    where: Where,
    case: Case,
    batch: Batch,
    rows: range,
    micro_batches: int,
    seed: float,
    between: Callable[[bool], Any],
) -> Tensor:
    """Run a replica's rows forward and back, micro-batch by micro-batch; return the sum of their losses.

    Parameters
    ----------
    seed : that the sum of losses is multiplied by
    between : ``between(last)`` is the context that a micro-batch runs in
    """
    total = torch.zeros((), dtype=torch.float64)
    parts = placement.micro_batches(rows, micro_batches)
    for number, part in enumerate(parts):
        where.rows = tuple(part)
        x, targets, mask = tensors(batch.take(part), case)
        with between(number == len(parts) - 1):
            loss = loss_sum(case, model(x), targets, mask)
            (loss * seed).backward()
        total += whole(loss.detach())
    return total


def everywhere(x: Tensor, group: Any = None) -> Tensor:
    """Return the sum of ``x`` over all ranks."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def update(case: Case, opt: Any, named: Sequence[tuple[str, nn.Parameter]], norm: float, t: int) -> int:
    """Clip and step; return the number of updates made."""
    factor = optim.clip_factor(norm, case.clip)
    for _, p in named:
        if p.grad is not None:
            p.grad.mul_(factor)
    for group in opt.param_groups:
        group["lr"] = optim.learning_rate(case.optimizer, t + 1)
    opt.step()
    return t + 1


def gradients_of(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return whole gradients, zero where there is none."""
    return {name: whole(torch.zeros_like(p) if p.grad is None else p.grad).detach().clone() for name, p in named}


def global_norm(named: Sequence[tuple[str, nn.Parameter]]) -> float:
    """Return the norm of all gradients by PyTorch's own function, which takes those of one mesh at a time."""
    groups: dict[Any, list[Tensor]] = {}
    for _, p in named:
        if p.grad is not None:
            groups.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p.grad)
    squares = sum(float(whole(torch.nn.utils.get_total_norm(found))) ** 2 for found in groups.values())
    return math.sqrt(squares)


def values(
    case: Case,
    named: Sequence[tuple[str, nn.Parameter]],
    gradients: Mapping[str, Tensor],
    state: Mapping[Any, Mapping[str, Tensor]],
    **numbers: Any,
) -> Step:
    """Return a step by refpar's names."""
    step: Step = dict(numbers)
    for name, p in named:
        step[f"gradient/{name}"] = to_refpar(name, gradients[name], case)
        step[f"parameter/{name}"] = to_refpar(name, whole(p), case)
        for buffer in case.optimizer.state_names:
            kept = state.get(p, {}).get(BUFFERS[buffer])
            x = whole(kept) if kept is not None else torch.zeros_like(whole(p))
            step[f"state/{name}/{buffer}"] = to_refpar(name, x, case)
    return step


def train(
    case: Case,
    layout: Layout,
    network: Network,
    model: Callable[[Tensor], Tensor],
    named: Sequence[tuple[str, nn.Parameter]],
    opt: Any,
    between: Callable[[bool], Any],
    *,
    replicas: Any = None,
    replica: int = 0,
    averages: bool = True,
    norm: Callable[[Sequence[tuple[str, nn.Parameter]]], float] = global_norm,
    state: Callable[[], Mapping[Any, Mapping[str, Tensor]]] | None = None,
    per_rank: bool = False,
) -> list[Step]:
    """Train, with whatever technique ``model`` and ``between`` stand for.

    Parameters
    ----------
    replicas, replica : the group of data parallelism, None for all ranks; and which one this is
    averages : whether gradients are averaged over replicas, not summed
    per_rank : divide by this rank's own count, the mistake
    """
    steps, t = [], 0
    for number, batch in enumerate(case.batches):
        network.where.step = number
        rows = placement.rows(len(batch), layout.dp, replica)
        mine = torch.tensor(float(batch.mask[rows.start : rows.stop].sum()), dtype=torch.float64)
        count = int(everywhere(mine, replicas)) if layout.dp > 1 else int(mine)
        divisor = max(float(mine) * layout.dp if per_rank else count, 1)
        opt.zero_grad()
        seed = (layout.dp if averages else 1) / divisor
        total = backward(model, network.where, case, batch, rows, layout.micro_batches, seed, between)
        loss = float(everywhere(total, replicas) if layout.dp > 1 else total) / max(count, 1)
        gradients, size = gradients_of(named), norm(named)
        t = update(case, opt, named, size, t) if count else t
        kept = opt.state if state is None else state()
        steps.append(values(case, named, gradients, kept, count=count, loss=loss, norm=size, t=t))
    return steps


# DistributedDataParallel, and ZeroRedundancyOptimizer


def ddp(case: Case, layout: Layout, *, sharded: bool = False, trap: str = "") -> list[Step]:
    """Train with DistributedDataParallel; ``sharded`` puts the optimizer's state on one owner a parameter."""
    network = build(case)
    model = nn.parallel.DistributedDataParallel(network)
    named = parameters(network, case)
    opt = optimizer(case, named, zero_optimizer if sharded else None)

    def between(last: bool) -> Any:
        if trap == "no_sync in the last micro-batch too":
            return model.no_sync()
        return contextlib.nullcontext() if last else model.no_sync()

    def state() -> Mapping[Any, Mapping[str, Tensor]]:
        return gathered_state(opt) if sharded else opt.state  # type: ignore[no-any-return]

    per_rank = trap == "mean over the rank's own tokens"
    if trap == "sums are averaged":
        return train(case, layout, network, model, named, opt, between, replica=dist.get_rank(), averages=False)
    return train(case, layout, network, model, named, opt, between, replica=dist.get_rank(), state=state,
                 per_rank=per_rank)  # fmt: skip


def zero_optimizer(groups: Any, cls: Any, options: Any) -> Any:
    """Return a ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=cls, **options)


def gathered_state(opt: Any) -> dict[Any, Mapping[str, Tensor]]:
    """Return the state that the owners of a ZeroRedundancyOptimizer hold, on rank 0."""
    opt.consolidate_state_dict(0)
    if dist.get_rank():
        return {}
    ordered = [p for group in opt.param_groups for p in group["params"]]
    return {ordered[index]: kept for index, kept in opt.state_dict()["state"].items()}


# FSDP2


def fsdp(case: Case, layout: Layout, *, trap: str = "") -> list[Step]:
    """Train with ``fully_shard``: each block a unit, and what is left one more.

    With ``layout.tp``, the mesh has two axes. ZeRO-3 reshards after the forward pass, ZeRO-2 does not.
    """
    from torch.distributed.fsdp import fully_shard

    network = build(case)
    mesh, tp = meshes(layout)
    if tp is not None:
        parallelize(network, case, tp)
    for unit in network.layers if isinstance(case.model, MLP) else network.blocks:
        fully_shard(unit, mesh=mesh, reshard_after_forward=layout.zero == 3)
    fully_shard(network, mesh=mesh, reshard_after_forward=layout.zero == 3)
    named = parameters(network, case)
    opt = optimizer(case, named)

    @contextlib.contextmanager
    def between(last: bool) -> Iterator[None]:
        network.set_requires_gradient_sync(last)  # type: ignore[operator]
        network.set_is_last_backward(last)  # type: ignore[operator]
        with losses_in_parallel() if tp is not None and isinstance(case.model, GPT) else contextlib.nullcontext():
            yield

    def norm(named: Sequence[tuple[str, nn.Parameter]]) -> float:
        if trap == "norm of the own shards":
            found = [p.grad.to_local() for _, p in named if isinstance(p.grad, DTensor)]
            return float(torch.nn.utils.get_total_norm(found))
        return global_norm(named)

    return train(case, layout, network, network, named, opt, between, norm=norm,
                 replicas=mesh.get_group(), replica=mesh.get_local_rank())  # fmt: skip


def meshes(layout: Layout) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of data parallelism, and that of tensor parallelism where there is one."""
    if layout.tp == 1:
        return init_device_mesh("cpu", (layout.dp,), mesh_dim_names=("dp",)), None
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


# Tensor parallelism


def losses_in_parallel() -> Any:
    """Return the context in which the cross-entropy works on logits in pieces."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def parallelize(network: Network, case: Case, mesh: DeviceMesh, *, trap: str = "") -> None:
    """Cut the layers of a network over ``mesh``, as refpar's specs say."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    if isinstance(case.model, MLP):
        last = len(case.model.widths) - 2
        for i in range(last + 1):
            if not (i == last and i % 2 == 0):
                plan[f"layers.{i}"] = RowwiseParallel() if i % 2 else ColwiseParallel()
    else:
        plan["embedding.token"] = RowwiseParallel(input_layouts=Replicate())
        for i in range(case.model.layers):
            plan[f"blocks.{i}.attention.qkv"] = plan[f"blocks.{i}.mlp.up"] = ColwiseParallel()
            plan[f"blocks.{i}.attention.proj"] = plan[f"blocks.{i}.mlp.down"] = RowwiseParallel()
        plan["head.out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        for block in network.blocks:
            block.attention.first = mesh.get_local_rank() * (case.model.heads // mesh.size())  # type: ignore
    parallelize_module(network, mesh, plan)
    if isinstance(case.model, GPT) and case.model.tied and trap != "untied":
        network.tie()


def tensor_parallel(case: Case, layout: Layout, *, trap: str = "") -> list[Step]:
    """Train with DTensor's column- and row-parallel layers, and the loss on logits in pieces."""
    network = build(case)
    mesh = init_device_mesh("cpu", (layout.tp,), mesh_dim_names=("tp",))
    parallelize(network, case, mesh, trap=trap)
    named = parameters(network, case)
    opt = optimizer(case, named)

    def between(last: bool) -> Any:
        return losses_in_parallel() if isinstance(case.model, GPT) else contextlib.nullcontext()

    return train(case, layout, network, network, named, opt, between, averages=False)


# Pipelining


def interleaved(case: Case, layout: Layout) -> list[Step]:
    """Train with two stages a rank."""
    return pipeline(case, layout, stages_per_rank=2)


def pipeline(case: Case, layout: Layout, *, trap: str = "", stages_per_rank: int = 1) -> list[Step]:
    """Train with ``torch.distributed.pipelining``: GPipe or 1F1B, or interleaved with two stages a rank."""
    from torch.distributed import pipelining

    network = build(case)
    named = parameters(network, case)
    names = {id(p): name for name, p in named}
    rank = dist.get_rank()
    count = layout.pp * stages_per_rank
    cut = schedule.stages_of(len(network.units), count)
    mine = range(rank, count, layout.pp)
    modules = [nn.Sequential(*(network.units[i] for i in cut[stage])) for stage in mine]
    own = [(names[id(p)], p) for module in modules for p in module.parameters()]
    own = list(dict(own).items())
    opt = optimizer(case, own)
    dtype = getattr(torch, case.precision.compute)
    divisor = torch.ones((), dtype=dtype)

    def loss(y: Tensor, targets: Tensor) -> Tensor:
        if isinstance(case.model, MLP):
            return (((y - targets[:, :-1]) * targets[:, -1:]) ** 2).sum() / divisor
        return F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum") / divisor

    steps: list[Step] = []
    t = 0
    for number, batch in enumerate(case.batches):
        network.where.step = number
        counted = int(batch.mask.sum())
        divisor.fill_(max(counted, 1))
        opt.zero_grad()
        x, targets, mask = tensors(batch, case)
        if isinstance(case.model, MLP):
            targets = torch.cat([targets.masked_fill(~mask[:, None], 0), mask[:, None].to(dtype)], dim=1)
        else:
            targets = targets.masked_fill(~mask, -100)
        stages = [
            pipelining.PipelineStage(m, s, count, torch.device("cpu")) for m, s in zip(modules, mine, strict=True)
        ]
        kinds: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        kind = pipelining.ScheduleInterleaved1F1B if stages_per_rank > 1 else kinds[layout.schedule]
        runner = kind(
            stages if stages_per_rank > 1 else stages[0],
            layout.micro_batches,
            loss_fn=loss,
            scale_grads=trap == "scale_grads",
        )
        seen: list[Tensor] = []
        last = count - 1 in mine
        if 0 in mine:
            runner.step(x, target=targets if last else None, losses=seen if last else None)
        elif last:
            runner.step(target=targets, losses=seen)
        else:
            runner.step()
        tie_up(case, own, trap)
        gradients = gathered(gradients_of(own), case, own)
        size = float(np.sqrt(sum(optim.squared_norm(g) for g in gradients.values())))
        used = global_norm(own) if trap == "each stage clips by its own norm" else size
        t = update(case, opt, own, used, t) if counted else t
        total = everywhere(torch.stack([s.detach() for s in seen]).sum().double() if seen else torch.zeros(()).double())
        weights = gathered({name: p.detach() for name, p in own}, case, own)
        step: Step = {"count": counted, "loss": float(total), "norm": size, "t": t}
        step |= {f"gradient/{name}": g for name, g in gradients.items()}
        step |= {f"parameter/{name}": p for name, p in weights.items()}
        for buffer in case.optimizer.state_names:
            state = {name: opt.state.get(p, {}).get(BUFFERS[buffer]) for name, p in own}
            state = {name: torch.zeros_like(dict(own)[name]) if x is None else x for name, x in state.items()}
            step |= {f"state/{name}/{buffer}": x for name, x in gathered(state, case, own).items()}
        steps.append(step)
    return steps


def tie_up(case: Case, own: Sequence[tuple[str, nn.Parameter]], trap: str) -> None:
    """Sum the gradients of the copies of a tied weight: the first and the last stage's, where these are two ranks."""
    if not (isinstance(case.model, GPT) and case.model.tied) or trap == "untied":
        return
    held = dict(own)
    weight = held.get("embedding.token.weight")
    shape = case.model.vocabulary, case.model.width
    mine = torch.zeros(shape, dtype=getattr(torch, case.precision.compute))
    if weight is not None and weight.grad is not None:
        mine = weight.grad
    total = everywhere(mine)
    if weight is not None:
        weight.grad = total


def gathered(mine: Mapping[str, Tensor], case: Case, own: Sequence[tuple[str, nn.Parameter]]) -> dict[str, HostArray]:
    """Return what all stages hold, by name, of tied weights the copy of the first."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {name: to_refpar(name, x, case) for name, x in mine.items()})
    result: dict[str, HostArray] = {}
    for held in reversed(everybody):
        result |= held
    return {name: result[name] for name in case.model.build().specs}


# Adapters


class Torch:
    """What the adapters have in common: standing workers, and a function that trains on them."""

    version = torch.__version__
    function: Callable[..., list[Step]]
    limits = Limits()
    trap = ""

    def __init__(self, pool: Pool | None = None) -> None:
        self.pool, self.own = pool or Pool(), pool is None

    def run(self, case: Case, layout: Layout) -> list[Step]:
        """Train on ``layout.ranks`` workers; what rank 0 has."""
        options = {"trap": self.trap} if self.trap else {}
        result: list[Step] = self.pool.run(
            layout.ranks, call, [(type(self).function, case, layout, options)] * layout.ranks
        )[0]
        return result

    def close(self) -> None:
        """End the workers, unless they are somebody else's too."""
        if self.own:
            self.pool.close()


def call(function: Callable[..., list[Step]], case: Case, layout: Layout, options: Mapping[str, Any]) -> list[Step]:
    """Train on a worker."""
    steps = function(case, layout, **options)
    return steps if dist.get_rank() == 0 else []


class Ddp(Torch):
    """DistributedDataParallel, accumulating under ``no_sync``."""

    name = "torch DistributedDataParallel"
    function = staticmethod(ddp)
    limits = Limits(dp=(1, 2, 3, 4), dropout=(0.0, 0.25))


def ddp_zero(case: Case, layout: Layout, **options: Any) -> list[Step]:
    """Train with DistributedDataParallel and ZeroRedundancyOptimizer."""
    return ddp(case, layout, sharded=True, **options)


class ZeroOptimizer(Torch):
    """ZeroRedundancyOptimizer: ZeRO-1."""

    name = "torch ZeroRedundancyOptimizer"
    function = staticmethod(ddp_zero)
    limits = Limits(dp=(2, 3, 4), zero=(1,))


class Fsdp(Torch):
    """FSDP2, with and without resharding after the forward pass."""

    name = "torch fully_shard (FSDP2)"
    function = staticmethod(fsdp)
    limits = Limits(dp=(2, 3, 4), zero=(2, 3), dropout=(0.0, 0.25))


class FsdpTensorParallel(Torch):
    """FSDP2 over one axis of a mesh, tensor parallelism over the other."""

    name = "torch fully_shard + tensor parallel"
    function = staticmethod(fsdp)
    limits = Limits(dp=(2,), tp=(2,), zero=(2, 3), divides=True, empty=False)


class TensorParallel(Torch):
    """DTensor's tensor parallelism, with the loss on logits in pieces."""

    name = "torch tensor parallel + loss_parallel"
    function = staticmethod(tensor_parallel)
    limits = Limits(dp=(1,), tp=(2, 3), divides=True, empty=False)


class Pipeline(Torch):
    """GPipe and 1F1B."""

    name = "torch pipelining (GPipe, 1F1B)"
    function = staticmethod(pipeline)
    limits = Limits(dp=(1,), pp=(2, 3), micro_batches=(2, 3, 4), schedules=("gpipe", "1f1b"), divides=True, empty=False)

    def refuses(self, case: Case, layout: Layout) -> str | None:
        """Say that 1F1B has to have as many micro-batches as stages."""
        return "1F1B refuses M < stages" if layout.schedule == "1f1b" and layout.micro_batches < layout.pp else None


class Interleaved(Pipeline):
    """Interleaved 1F1B, two stages a rank."""

    name = "torch pipelining (interleaved)"
    limits = Limits(
        dp=(1,), pp=(2,), micro_batches=(2, 4), models=("mlp",), divides=True, empty=False, layers=4,
    )  # fmt: skip

    def run(self, case: Case, layout: Layout) -> list[Step]:
        """Train in the interleaved schedule, which a layout of refpar has no word for."""
        arguments: list[Any] = [(interleaved, case, layout, {})] * layout.ranks
        result: list[Step] = self.pool.run(layout.ranks, call, arguments)[0]
        return result


TRAPS: dict[str, tuple[type[Torch], str]] = {
    "no_sync in the last micro-batch too": (Ddp, ""),
    "mean over the rank's own tokens": (Ddp, "mean_of_rank_means"),
    "sums are averaged": (Ddp, "divided_by_ranks_too"),
    "norm of the own shards": (Fsdp, ""),
    "untied": (Pipeline, "tied_copies_not_summed"),
    "scale_grads": (Pipeline, "divided_by_micro_batches_too"),
    "each stage clips by its own norm": (Pipeline, "each_stage_clips_by_its_own_norm"),
}
"""What users do wrong with these, with which of them, and which mistake of the catalogue that is.

Not named are the first, whose gradients are not only local but also multiplied by the number of ranks, to be averaged;
and the norm of FSDP's own shards, because it cuts other shards than refpar.
"""
