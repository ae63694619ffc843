"""Torch training loops to record: run by ``test_torch.py``, alone or as one of several ranks, each a process.

    python torch_training.py KINDS RANK RANKS FOLDER

KINDS are any of ``single``, ``reordered`` (the rows in another order), ``ddp``, ``fsdp2`` and ``fsdp1``, which all
average over ranks; or mistakes: ``mean`` (averaged, though the loss was divided by the global count already), ``stale``
(the second step of rank 1 uses the rows of the first). Each is dumped to FOLDER/KIND.
"""

import datetime
import sys

import torch
from torch import distributed as dist

from refpar.adapters.torch import record

ROWS, STEPS = 12, 2


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 7, generator=generator), torch.randn(ROWS, 3, generator=generator)


def train(kind: str, rank: int, ranks: int, folder: str) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.GELU(), torch.nn.Linear(11, 3))
    scale = 1.0 if kind == "mean" else ranks
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-6, betas=(0.875, 0.984375), eps=2.0**-12)
    with record(model, optimizer, f"{folder}/{kind}"):
        for step in range(STEPS):
            x, y = batch(0 if kind == "stale" and rank == 1 else step)
            order = torch.arange(ROWS).flip(0) if kind == "reordered" else torch.arange(ROWS)
            mine = order.tensor_split(ranks)[rank]
            loss = ((model(x[mine]) - y[mine]) ** 2).sum() / ROWS
            (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()


def main(kinds: str, rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        limit = datetime.timedelta(seconds=120)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit
        )
    for kind in kinds.split(","):
        train(kind, rank, ranks, folder)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
