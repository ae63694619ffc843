"""A recorder for torch: what a training loop computes, as a dump that ``refpar compare`` reads.

::

    with record(model, optimizer, "dump") as recorder:
        for batch in batches:
            loss = train_on(batch)              # forward and backward
            recorder.note("loss", loss)         # optional; the loss of all ranks together
            optimizer.step()                    # what is recorded is what the optimizer sees, before and after
            optimizer.zero_grad()

Each rank writes ``dump/rank<N>.safetensors`` when the block ends: gradients, weights and optimizer state of each step.
How a parameter is sharded is read from it: DTensor (FSDP2's ``fully_shard``, tensor parallel), FSDP1 with
``use_orig_params=True``, or whole on every rank (DDP, none). The file says which part of the whole it holds, so the
comparison needs no further description. Nothing is sent, but for a DTensor in a placement that has no part of its own
(Partial, or sharded twice along one axis), which is made whole.

Gradients are recorded as the optimizer finds them. Call ``recorder.gradients()`` after the backward pass instead, where
they are still to be clipped or unscaled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import distributed

HostArray = npt.NDArray[Any]

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
STATES = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "momentum"}
"""torch's names for what optimizers keep, and refpar's."""


def record(
    model: Any,
    optimizer: Any,
    path: str | Path,
    *,
    activations: Sequence[str] = (),
    rename: Callable[[str], str] = str,
) -> Recorder:
    """Return a recorder of every step that ``optimizer`` makes inside a ``with`` block.

    Parameters
    ----------
    model : torch.nn.Module
    optimizer : torch.optim.Optimizer
    path : the folder to write to; one file a rank
    activations : names of modules whose outputs are recorded too, on one rank only: several have those of other rows
    rename : gives a parameter's name in the dump
    """
    return Recorder(model, optimizer, Path(path), activations, rename)


class Recorder:
    """See :func:`record`.

    Attributes
    ----------
    step : number of the step that is being recorded
    values, pieces : by name, this rank's part of each value, and where it belongs
    """

    def __init__(
        self, model: Any, optimizer: Any, path: Path, activations: Sequence[str], rename: Callable[[str], str]
    ) -> None:
        self.model, self.optimizer, self.path, self.rename = model, optimizer, path, rename
        self.step = 0
        self.values: dict[str, HostArray] = {}
        self.pieces: dict[str, dict[str, Any]] = {}
        self.seen = False
        ready = distributed.is_available() and distributed.is_initialized()
        self.rank: int = distributed.get_rank() if ready else 0
        self.ranks: int = distributed.get_world_size() if ready else 1
        if activations and self.ranks > 1:
            raise ValueError("activations are recorded on one rank only: ranks have those of different rows")
        modules = dict(model.named_modules())
        for name in activations:
            if name not in modules:
                raise ValueError(f"activations names {name!r}: the model has no such module")
        self.hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.before_update()),
            optimizer.register_step_post_hook(lambda *_: self.updated()),
            *(modules[name].register_forward_hook(self.activation(name)) for name in activations),
        ]

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()
        if kind is None:
            self.write()

    def note(self, name: str, value: Any) -> None:
        """Record a value that all ranks have alike, such as ``loss`` or ``norm``."""
        x = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        self.put(name, np.array(x), None)

    def before_update(self) -> None:
        """Record the gradients, if that has not been asked for already."""
        if not self.seen:
            self.gradients()

    def gradients(self) -> None:
        """Record the gradients as they are now; once a step."""
        self.seen = True
        for name, parameter, flat in reversed(list(self.parameters())):  # the last layer has its gradient first
            if parameter.grad is not None:
                self.put(f"gradient/{name}", *part(parameter.grad, flat))

    def updated(self) -> None:
        """Record state and weights after an update, and go on to the next step."""
        for name, parameter, flat in self.parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key == "step":
                    self.values[f"step{self.step}/t"] = np.array(float(value))
                elif isinstance(value, torch.Tensor):
                    self.put(f"state/{name}/{STATES.get(key, key)}", *part(value, flat))
        for name, parameter, flat in self.parameters():
            self.put(f"parameter/{name}", *part(parameter, flat))
        self.step += 1
        self.seen = False

    def activation(self, name: str) -> Callable[..., None]:
        """Return a hook that records a module's output; the number of the call comes last in its name."""

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                calls = sum(key.startswith(f"step{self.step}/activation/{name}/") for key in self.values)
                self.put(f"activation/{name}/{calls}", *part(output, None))

        return hook

    def parameters(self) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
        """Yield name, parameter and, for FSDP1, where its shard belongs."""
        shards = fsdp1_shards(self.model)
        for name, parameter in self.model.named_parameters():
            yield self.rename(plain(name, self.model)), parameter, shards.get(id(parameter))

    def put(self, name: str, value: HostArray, piece: dict[str, Any] | None) -> None:
        """Keep one value of this step."""
        full = f"step{self.step}/{name}"
        self.values[full] = value
        if piece is not None:
            self.pieces[full] = piece

    def write(self) -> None:
        """Write this rank's file."""
        self.path.mkdir(parents=True, exist_ok=True)
        told = {"version": 1, "rank": self.rank, "ranks": self.ranks, "pieces": self.pieces, "order": list(self.values)}
        save_file(self.values, self.path / f"rank{self.rank}.safetensors", {"refpar": json.dumps(told)})


def part(tensor: Any, flat: dict[str, Any] | None) -> tuple[HostArray, dict[str, Any] | None]:
    """Return this rank's part of a tensor on the host, and where it belongs; None where it is the whole."""
    piece = flat
    if hasattr(tensor, "device_mesh"):
        tensor, piece = dtensor_part(tensor)
    x = tensor.detach().cpu()
    x = x.float() if x.dtype == torch.bfloat16 else x  # exact: NumPy has no bfloat16
    return np.array(x.numpy()), piece


def dtensor_part(tensor: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the local part of a DTensor and its place: shape of the whole, and index of the first element."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    axes = [p.dim for p in tensor.placements if hasattr(p, "dim")]
    if any(p.is_partial() for p in tensor.placements) or len(set(axes)) < len(axes):
        return tensor.full_tensor(), None
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if not local.numel():
        start = [0] * tensor.dim()
    return local, {"shape": list(tensor.shape), "start": [int(i) for i in start]}


def fsdp1_shards(model: Any) -> dict[int, dict[str, Any]]:
    """Return, of each parameter that FSDP1 has flattened, its whole shape and the position of this rank's shard."""
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel
    except ImportError:
        return {}
    shards: dict[int, dict[str, Any]] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model) if isinstance(model, torch.nn.Module) else ():
        handle = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        if not getattr(handle, "_use_orig_params", False):
            raise ValueError("of FSDP1, only use_orig_params=True says where a parameter's shard belongs")
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            position = info.intra_param_start_idx if info.in_shard else 0
            shards[id(parameter)] = {"shape": list(shape), "flat": int(position or 0)}
    return shards


def plain(name: str, model: Any) -> str:
    """Return a parameter's name without what wrappers have added to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return name
