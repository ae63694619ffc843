"""Save where a run has got to, and load it again: whole arrays by name, whatever the layout was or will be.

The file is a safetensors file: no code is in it, and nothing is unpickled. It holds::

    parameter/NAME         the weights, whole, in the type they are computed with
    state/NAME/BUFFER      what the optimizer keeps, whole, and "master" where the weights are float16
    metadata               "refpar state", JSON: step, t, scale and growth counter; the options of the case, and a
                           digest of the batches taken, by which a run that does not belong to it is refused; a
                           checksum of all of it

A shard of one layout is of no use in another: a moment saved with a rank's offset is loaded at another rank's
(DeepSpeed#5105), and state that belongs to nobody's shard gets lost (AReaL#1468). So there are none in the file; a rank
cuts what it needs out of the whole (:mod:`refpar.parallel.placement`). Random numbers need no state: they are
addressed by step and row (:mod:`refpar.rng`).
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from refpar import files
from refpar.case import HostArray, State, Trace
from refpar.checks import short

KEY, VERSION = "refpar state", 1
"""Where the numbers stand in the metadata. One entry: the order of several is not the same in every file."""


class StateError(ValueError):
    """A file that cannot be written or read, or is not what it should be; the text is one line."""


def save(path: str | os.PathLike[str], state: State | Trace) -> None:
    """Write a state, or the state after a run, to ``path``: whole, or not at all.

    Raises
    ------
    StateError
        Where it cannot be written. A file that was there is then still there, unchanged.
    """
    from safetensors.numpy import save as serialize

    if not isinstance(state, State | Trace):
        raise TypeError(f"save takes a path, and then a State or a Trace, not {short(state)}")
    state = State.after(state) if isinstance(state, Trace) else state
    arrays = {f"parameter/{name}": x for name, x in state.parameters.items()}
    arrays |= {f"state/{name}/{buffer}": x for name, own in state.state.items() for buffer, x in own.items()}
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    numbers = {
        "version": VERSION,
        "step": state.step,
        "t": state.t,
        "scale": state.scale.hex(),
        "good": state.good,
        "data": state.data,
        "case": dict(state.identity),
    }
    numbers["checksum"] = checksum(arrays, numbers)
    write_whole(Path(path), serialize(arrays, {KEY: json.dumps(numbers)}))


def load(path: str | os.PathLike[str]) -> State:
    """Read what :func:`save` wrote.

    Whether it belongs to a case is for :meth:`refpar.case.State.check` to say; training with it asks.

    Raises
    ------
    StateError
        Where the file is missing, cut off, altered, or not one of these.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open(os.fsdecode(path), "rb").close()  # safetensors has words of its own for a folder, and others
        with safe_open(os.fsdecode(path), framework="np") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise StateError(f"{path}: not a state that refpar saved")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise StateError(f"{path}: cut off, or no safetensors file at all ({error})") from None
    try:
        numbers = dict(json.loads(text))
        if numbers["version"] != VERSION:
            raise StateError(f"{path}: in format version {numbers['version']}; this refpar reads version {VERSION}")
        if numbers.pop("checksum") != checksum(arrays, numbers):
            raise StateError(f"{path}: altered since it was saved: its checksum is another")
        return put_together(arrays, numbers)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"{path}: its metadata is not what refpar writes ({error!r})") from None


def put_together(arrays: Mapping[str, HostArray], numbers: Mapping[str, Any]) -> State:
    """Return the state that the entries of a file make up."""
    parameters: dict[str, HostArray] = {}
    buffers: dict[str, dict[str, HostArray]] = {}
    for key, x in arrays.items():
        kind, _, name = key.partition("/")
        if kind == "parameter":
            parameters[name] = x
        else:
            name, _, buffer = name.rpartition("/")
            buffers.setdefault(name, {})[buffer] = x
    return State(
        identity={str(name): str(value) for name, value in numbers["case"].items()},
        data=str(numbers["data"]),
        step=operator.index(numbers["step"]),
        t=operator.index(numbers["t"]),
        scale=float.fromhex(numbers["scale"]),
        good=operator.index(numbers["good"]),
        parameters=parameters,
        state=buffers,
    )


def checksum(arrays: Mapping[str, HostArray], numbers: Mapping[str, Any]) -> str:
    """Return a digest of all numbers, and of all names, types, shapes and values."""
    result = hashlib.blake2b(digest_size=16)
    result.update(json.dumps(numbers, sort_keys=True).encode())
    for name, x in sorted(arrays.items()):
        result.update(repr((name, x.dtype.name, x.shape)).encode())
        result.update(x.tobytes())
    return result.hexdigest()


def write_whole(path: Path, blob: bytes) -> None:
    """Write a file, whole or not at all.

    Raises
    ------
    StateError
        Where that fails; nothing of it is left behind.
    """
    try:
        files.write_whole(path, blob)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror or error}") from None
